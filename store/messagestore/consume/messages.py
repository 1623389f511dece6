"""Messages as a consumer hands them out: rows of a block that was decoded column by column."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any, Protocol

from messagestore.errors import CorruptionError
from messagestore.format.arrow_bytes import numpy_of
from messagestore.format.compression import plain_body
from messagestore.format.gathered import Gathered
from messagestore.format.layout import SYS_FLAG_COMPRESSED
from messagestore.format.message import MessageExt
from messagestore.format.properties import RETRY_TOPIC

_MAPS = ("properties", "system_properties")


class Returns(Protocol):
    """Takes back messages that could not be processed."""

    def send_back(self, message: ConsumedMessage, delay_level: int | None) -> bool:
        """Have a message handed out again later; whether it is to be this same message, which holds its queue."""
        ...

    def bury(self, message: ConsumedMessage, reason: str | None) -> None:
        """Put a message among the dead letters."""
        ...


class Block:
    """Consecutive messages of a queue, decoded as far as somebody has looked.

    Parameters
    ----------
    gathered : Gathered
        The bytes of the records.
    tags : frozenset of str | None
        Only messages with one of these tags; None: all.
    returns : Returns
        The consumer that hands them out.

    Attributes
    ----------
    rows : list of int
        The messages that are handed out, by their position among those of `gathered`.
    offsets : list of int
        Their queue offsets.
    bodies : list of bytes
        Their bodies, decompressed.
    end : int
        The queue offset after the last message that was looked at, also of those that no tag lets through.
    """

    def __init__(self, gathered: Gathered, tags: frozenset[str] | None, returns: Returns) -> None:
        self.returns = returns
        self.topic, self.queue_id, self.end = gathered.topic, gathered.queue_id, gathered.end
        self._gathered = gathered
        self._columns: dict[str, list[Any]] = {}
        self.retries: dict[int, int] = {}
        """How often each message that stayed in its queue was retried, by its row."""
        self.rows = list(range(len(gathered.positions)))
        self.offsets: list[int] = gathered.queue_offsets.tolist()
        if tags is not None and self.rows:  # units hold a hash of the tag, which other tags may have, too
            self.rows = [row for row in self.rows if self.value("tags", row) in tags]
            self.offsets = [self.offsets[row] for row in self.rows]
        self.bodies = self._bodies()

    def _bodies(self) -> list[bytes]:
        if not self.rows:
            return []
        batch = self._gathered.decoded(["body", "sys_flag"])
        body = batch["body"]
        _, starts, data = body.buffers()
        ends = memoryview(starts).cast("i")[body.offset : body.offset + len(body) + 1].tolist()
        text = data.to_pybytes() if data is not None else b""

        if len(self.rows) == len(body):
            bodies = [text[start:end] for start, end in pairwise(ends)]
        else:
            bodies = [text[ends[row] : ends[row + 1]] for row in self.rows]

        flags = numpy_of(batch["sys_flag"])
        if (flags & SYS_FLAG_COMPRESSED).any():
            bodies = [self._plain(body, int(flags[row]), row) for body, row in zip(bodies, self.rows, strict=True)]
        return bodies

    def messages(self) -> list[ConsumedMessage]:
        """The messages that are handed out."""
        return list(map(ConsumedMessage, self.offsets, self.bodies, repeat(self), self.rows))

    def _plain(self, body: bytes, sys_flag: int, row: int) -> bytes:
        try:
            return plain_body(body, sys_flag)
        except ValueError as error:
            place = int(self._gathered.physical_offsets[row])
            raise CorruptionError(
                self._gathered.path, place, "a compressed body", str(error), hint="Seek past it to continue."
            ) from None

    def value(self, name: str, row: int) -> Any:
        """A field of one message. The first call decodes it for all."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = self._gathered.decoded([name], verify_body_crc=False)[name].to_pylist()
        field = column[row]
        return dict(field) if name in _MAPS else field

    def place(self, row: int) -> int:
        """The physical offset of one message."""
        return int(self._gathered.physical_offsets[row])

    def message_ext(self, row: int, queue_offset: int) -> MessageExt:
        """One message with all its fields, as `get_message` returns it."""
        (message,) = self._gathered.rows(row, row + 1).messages()
        return replace(message, topic=self.topic, queue_id=self.queue_id, queue_offset=queue_offset)


class ConsumedMessage:
    """A message that a `Consumer` handed out. It has the fields of `MessageExt`, which are decoded when asked for.

    Attributes
    ----------
    queue_offset : int
        The number of the message in its queue.
    body : bytes
        The body. If a RocketMQ client compressed it, it is decompressed.

    Examples
    --------
    >>> from messagestore import Consumer, Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     _ = store.put_message(Message("gates", b"B12", queue_id=0, keys=["UA1545"], tags="UA"))
    >>> with Consumer("store", "boards", "gates") as consumer:
    ...     for messages in consumer.poll().values():
    ...         for message in messages:
    ...             print(message.queue_offset, message.tags, message.keys, message.body)
    0 UA ('UA1545',) b'B12'
    """

    __slots__ = ("_block", "_row", "body", "queue_offset")

    def __init__(self, queue_offset: int, body: bytes, block: Block, row: int) -> None:
        self.queue_offset = queue_offset
        self.body = body
        self._block = block
        self._row = row

    def __repr__(self) -> str:
        return f"ConsumedMessage({self.topic!r}, {self.queue_id}, {self.queue_offset}, {self.body[:40]!r})"

    @property
    def topic(self) -> str:
        """The topic it was read from."""
        return self._block.topic

    @property
    def queue_id(self) -> int:
        """The queue of the topic."""
        return self._block.queue_id

    @property
    def queue(self) -> tuple[str, int]:
        """The topic and the queue id: what `Consumer.seek` and `Consumer.position` ask for."""
        return self._block.topic, self._block.queue_id

    @property
    def tags(self) -> str | None:
        """The message's tag; None if it has none."""
        tag: str | None = self._block.value("tags", self._row)
        return tag

    @property
    def keys(self) -> tuple[str, ...]:
        """The message's keys."""
        return tuple(self._block.value("keys", self._row))

    @property
    def properties(self) -> dict[str, str]:
        """The user's own properties."""
        properties: dict[str, str] = self._block.value("properties", self._row)
        return properties

    @property
    def system_properties(self) -> dict[str, str]:
        """The properties with RocketMQ's reserved names."""
        properties: dict[str, str] = self._block.value("system_properties", self._row)
        return properties

    @property
    def born_timestamp_ms(self) -> int:
        """When the message was made, in milliseconds since 1970."""
        return int(self._block.value("born_timestamp_ms", self._row))

    @property
    def store_timestamp_ms(self) -> int:
        """When the message was appended, in milliseconds since 1970."""
        return int(self._block.value("store_timestamp_ms", self._row))

    @property
    def message_id(self) -> str:
        """The unique key if the message has one; otherwise the offset message id."""
        return str(self._block.value("message_id", self._row))

    @property
    def reconsume_times(self) -> int:
        """How often consumers have sent the message back; an orderly consumer adds the retries of its own."""
        return int(self._block.value("reconsume_times", self._row)) + self._block.retries.get(self._row, 0)

    @property
    def physical_offset(self) -> int:
        """The place of its record, in bytes from the log's origin."""
        return self._block.place(self._row)

    def retry(self, delay_level: int | None = None) -> None:
        """Have this message handed out again later, because it could not be processed now.

        It goes back as by a RocketMQ consumer (`MessageStore.send_back`): it waits at a delay level, and comes again in
        the group's retry topic `%RETRY%group`, which the consumer reads, with `reconsume_times` one higher; after the
        group's `retryMaxTimes` it goes to the dead letters. It is in the log when this returns, so its queue can be
        committed. Delayed messages need somebody who delivers them: a broker, `messagestore deliver`, or
        `MessageStore.deliver_delayed`.

        In an orderly consumer the message holds its queue instead, and comes again after the delay: a second, or that
        of the level. Until then, no commit goes past it. Only this consumer counts these retries.

        Parameters
        ----------
        delay_level : int | None
            The level to wait at; None: the usual one, 3 + `reconsume_times`.

        Raises
        ------
        ConfigError
            The level is not allowed.
        StoreLockedError
            Another process writes the store for longer than `lockTimeout`, or a broker holds it. Nothing was written.
        MessageIllegalError, StoreFullError, StorePoisonedError
            As for `MessageStore.send_back`.
        """
        if self._block.returns.send_back(self, delay_level):
            self._block.retries[self._row] = self._block.retries.get(self._row, 0) + 1

    def dead_letter(self, reason: str | None = None) -> None:
        """Put this message among the group's dead letters, in the topic `%DLQ%group`.

        Parameters
        ----------
        reason : str | None
            It is kept in the property `DEAD_LETTER_REASON`.

        Raises
        ------
        StoreLockedError, MessageIllegalError, StoreFullError, StorePoisonedError
            As for `retry`.
        """
        self._block.returns.bury(self, reason)

    @property
    def origin_topic(self) -> str:
        """The topic to which the message was first put: another one than `topic` if a consumer sent it back."""
        return self.system_properties.get(RETRY_TOPIC, self.topic)

    @property
    def message_ext(self) -> MessageExt:
        """The message with all its fields, as `MessageStore.get_message` returns it; the body is as stored."""
        return self._block.message_ext(self._row, self.queue_offset)
