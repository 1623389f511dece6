"""Messages for one queue that are appended side by side: RocketMQ's MessageExtBatch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from messagestore.errors import (
    MessageIllegalError,
)
from messagestore.format import arguments, record
from messagestore.format.arrow_bytes import list_array
from messagestore.format.message import (
    Message,
)
from messagestore.format.properties import (
    check_keys,
    check_properties,
    check_tags,
)
from messagestore.format.record_columns import MessageColumns

_OF_THE_BATCH = (
    "born_host", "sys_flag", "reconsume_times", "wait_store_msg_ok", "prepared_transaction_offset", "delay_time_level"
)  # fmt: skip
_NEW = Message("new", b"")


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Messages for one topic and queue that are appended side by side (RocketMQ's MessageExtBatch).

    Give it to `MessageStore.put_messages`. The records of a batch together have at most `maxMessageSize` bytes (4 MiB
    by default). For larger batches, and for batches that go to several topics or queues, use
    `MessageStore.append_batch`.

    Parameters
    ----------
    columns : MessageColumns
        The messages as columns. The columns are kept, not copied.

    Examples
    --------
    >>> from messagestore import Message, MessageBatch, MessageStore
    >>> batch = MessageBatch.from_messages([Message("delays", b"UA1545"), Message("delays", b"UA1714")])
    >>> with MessageStore.open("store") as store:
    ...     result = store.put_messages(batch)
    ...     result.queue_id, result.queue_offset, result.message_count
    (0, 0, 2)
    """

    columns: MessageColumns

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch | pa.Table, *, topic: str, queue_id: int = 0) -> MessageBatch:
        """Make a batch from Arrow columns.

        Parameters
        ----------
        batch : pa.RecordBatch | pa.Table
            Columns `body` (binary or string, required), `tags`, `keys`, `properties`, `flag`, `born_timestamp_ms`, as
            in `MessageColumns.from_arrow`. The buffers are kept, not copied.
        topic : str
            The topic of all rows.
        queue_id : int
            The queue of all rows.

        Raises
        ------
        MessageIllegalError
            A column is unknown, is missing, or has a type that cannot be stored.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from messagestore import MessageBatch
        >>> rows = pa.record_batch({"body": [b"UA1545", b"UA1714"], "tags": ["UA", "UA"]})
        >>> MessageBatch.from_arrow(rows, topic="delays", queue_id=3).columns.row_count
        2
        """
        return cls(MessageColumns.from_arrow(batch, topic=topic, queue_id=queue_id))

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> MessageBatch:
        """Make a batch from messages that all name the same topic and the same queue.

        As in RocketMQ, some fields belong to the batch and not to each message: `born_host`, `sys_flag`,
        `reconsume_times`, `wait_store_msg_ok`, `prepared_transaction_offset` and `delay_time_level` must have their
        default values. A batch therefore cannot be part of a transaction, or be delayed.

        Parameters
        ----------
        messages : sequence of Message
            At least one. If `queue_id` is None, the messages go to queue 0. Messages without `born_timestamp_ms` get
            the time of this call.

        Raises
        ------
        MessageIllegalError
            There is no message, or one of them cannot be stored in this batch; `row` is its index.
        """
        arguments.instance("messages", messages, Sequence)
        if not messages:
            raise MessageIllegalError("batch: found no message; give at least one", field="batch")
        for message in messages:
            arguments.instance("messages", message, Message)

        first, now_ms = messages[0], time.time_ns() // 1_000_000
        for row, message in enumerate(messages):
            _check_of_batch(message, first, row)
        times = [now_ms if m.born_timestamp_ms is None else m.born_timestamp_ms for m in messages]

        columns = {
            "body": list_array([memoryview(m.body).tobytes() for m in messages], pa.binary()),
            "tags": list_array([m.tags for m in messages], pa.string()),
            "keys": list_array([list(m.keys) or None for m in messages], pa.list_(pa.string())),
            "properties": list_array(
                [list(m.properties.items()) or None for m in messages], pa.map_(pa.string(), pa.string())
            ),
            "flag": list_array([m.flag for m in messages], pa.int32()),
            "born_timestamp_ms": list_array(times, pa.int64()),
        }

        return cls.from_arrow(pa.record_batch(columns), topic=first.topic, queue_id=first.queue_id or 0)


def _check_of_batch(message: Message, first: Message, row: int) -> None:
    """Refuse a message that a batch that begins with `first` cannot hold."""
    for name in ("topic", "queue_id"):
        value, wanted = getattr(message, name), getattr(first, name)
        if value != wanted:
            fault = f"{name}: found {value!r}; allowed is {wanted!r}, as in the first message. Use append_batch"
            raise MessageIllegalError(fault, field=name, row=row)

    for name in _OF_THE_BATCH:
        value, wanted = getattr(message, name), getattr(_NEW, name)
        if value != wanted:
            fault = f"{name}: found {value!r}; allowed in a batch is {wanted!r}. Put this message by itself"
            raise MessageIllegalError(fault, field=name, row=row)

    record.size_of_body(message.body, row)
    check_keys(message.keys, row)
    check_tags(message.tags, row)
    check_properties(message.properties, row)

    error = record.bad_number(message, first.queue_id or 0, row)
    if error is not None:
        raise error
