"""Transactions of single messages: half messages that are committed, rolled back, or checked (RocketMQ's transactions).

A program that changes something of its own, such as a row of a database, and wants to send a message about it exactly
if the change happens, does three things: it *prepares* the message, makes its change, and *commits* or *rolls back* the
message. A prepared message is a *half message*: it is in the store, and nobody who reads its topic sees it. If the
program dies in between, a *check* finds the half message later, and asks whether the change has happened.

    prepare -> open -> committed          the message is in its topic
                 |---> rolled back        it never will be
                 |---> put back, open     a check has asked, and nobody knew; the half message counts the checks
                 `---> discarded          it was checked `transactionCheckMax` times, or is older than fileReservedTime

Each arrow after the first is one batch of the log (`append_own`): what a half message becomes, together with the op
message that ends it. So whatever is killed and when, a half message has ended once, in one way, or is open. What is
decided depends on the log alone and not on what a process remembers: under the writer's mutex, what was appended to the
two queues is read first.

This has nothing to do with Spark's exactly-once batches (`append_batch`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from messagestore.batches.append import append_own
from messagestore.batches.own_records import chunks_of
from messagestore.broker.half_progress import save_half_progress
from messagestore.broker.open_halves import OpenHalves
from messagestore.errors import (
    AppendMessageStatus,
    ConfigError,
    HalfMessageEndedError,
    MessageIllegalError,
    PutMessageStatus,
    StoreError,
    UnknownTopicError,
)
from messagestore.files.topics import TopicConfig, queue_nums_again
from messagestore.format import arguments, half_records, record
from messagestore.format.half_records import DISCARD_TOPIC, GROUP, HALF_TOPIC, OWN_TOPICS, QUEUE_ID, OpenHalf
from messagestore.format.hosts import offset_message_id, parse_offset_message_id
from messagestore.format.layout import SYS_FLAG_TRANSACTION_COMMIT, SYS_FLAG_TRANSACTION_MASK
from messagestore.format.message import (
    Message,
    MessageExt,
    PutMessageResult,
    check_topic,
    group_fault,
)
from messagestore.format.rows import Row
from messagestore.format.unique_key import new_unique_key
from messagestore.log.refusals import check_simple_topic
from messagestore.read import query
from messagestore.read.view import StoreView
from messagestore.writer.log_writer import LogWriter

COMMITTED, ROLLED_BACK, DISCARDED = "committed", "rolled back", "discarded"
DELETED, ENDED, UNKNOWN = "deleted by retention", "ended", "unknown"
SAVE_EVERY = 1000
"""The progress is saved when this many half messages or op messages need not be read again."""
ROUND_COUNT = 100
ROUND_SIZE = 8 * 1024 * 1024
"""The most half messages, and the most bytes of them, that one batch ends or checks."""
_log = logging.getLogger(__name__)


class Session(Protocol):
    """What this module needs of a session: its `Puts`."""

    @property
    def writer(self) -> LogWriter:
        """The writer of the store."""
        ...

    def create_view(self) -> StoreView:
        """A new reader of the store."""
        ...

    def choose_queue(self, message: Message) -> int:
        """The queue of a message. Its topic is created if it does not exist."""
        ...

    def create_own_topic(self, topic: str, queue_nums: int) -> TopicConfig:
        """Create a topic that may be a broker's own, unless it exists."""
        ...

    def put_encoded(
        self, data: bytearray, topic: str, queue_id: int, tags: str | None, keys: Sequence[str], *, wait: bool
    ) -> PutMessageResult:
        """Append an encoded record."""
        ...


@dataclass(slots=True)
class End:
    """A half message that somebody wants to commit or to roll back, and what became of it."""

    half: OpenHalf
    commit: bool
    result: PutMessageResult | None = None
    error: BaseException | None = None
    done: bool = False


class HalfMessage:
    """A half message of an open store. `MessageStore.half_message` prepares one; `MessageStore.find_half` finds one.

    As a context, it is committed when the block ends, unless it was rolled back there. If the block raises, the half
    message stays open: it is not known whether the change has happened, and a check finds out. Roll back explicitly if
    it has not.

    Attributes
    ----------
    half : OpenHalf
        What the half message is, as it was when it was prepared or found.
    result : PutMessageResult | None
        The result of preparing it.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     with store.half_message(Message("orders", b"42 is paid", queue_id=0), "payments") as half:
    ...         before = store.max_offset("orders", 0)  # pay here, and half.rollback() if that fails
    ...     before, store.max_offset("orders", 0)
    (0, 1)
    """

    def __init__(self, halves: HalfMessages, half: OpenHalf, result: PutMessageResult | None = None) -> None:
        self._halves = halves
        self.half = half
        self.result = result
        self._outcome = ""
        self._committed: PutMessageResult | None = None

    @property
    def message_id(self) -> str:
        """The offset message id of the half message. The message that is committed gets another one."""
        return self.half.message_id

    def commit(self) -> PutMessageResult:
        """Commit the message: it is in its topic when this returns. A second commit returns the same result.

        Raises
        ------
        HalfMessageEndedError
            The half message was rolled back or discarded.
        StoreFullError
            The disk is full. The half message is open.
        StorePoisonedError
            A sync failed. Open the store again, find the half message by its id (`MessageStore.find_half`), and commit
            it once more.
        """
        if self._committed is None:
            if self._outcome:
                raise ended_error(self.message_id, self._outcome, commit=True)
            self._committed = self._halves.end(self.half, commit=True)
            self._outcome = COMMITTED
        assert self._committed is not None
        return self._committed

    def rollback(self) -> None:
        """Roll the message back: nobody ever sees it in its topic. A second call does nothing.

        Raises
        ------
        HalfMessageEndedError
            The half message was committed.
        StoreFullError, StorePoisonedError
            As for `commit`.
        """
        if self._outcome == ROLLED_BACK:
            return
        if self._outcome:
            raise ended_error(self.message_id, self._outcome, commit=False)
        self._halves.end(self.half, commit=False)
        self._outcome = ROLLED_BACK

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._outcome:
            self.commit()


def ended_error(message_id: str, outcome: str, *, commit: bool) -> HalfMessageEndedError:
    """The error for a half message that cannot be ended (once more, or otherwise)."""
    wish = "committed" if commit else "rolled back"
    if outcome == UNKNOWN:
        text = (
            f"half message {message_id!r}: the store has no such half message; allowed is the message id or the "
            "UNIQ_KEY of an open one. `messagestore halves` lists them"
        )
    else:
        text = f"half message {message_id!r}: it was {outcome}, and cannot be {wish} any more. Nothing was written"
    return HalfMessageEndedError(text, message_id=message_id, outcome=outcome)


class HalfMessages:
    """The half messages of one session.

    Threads: any number of threads. Those that end half messages at the same time share a batch.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._mutex = threading.RLock()
        self._wanted_mutex = threading.Lock()
        self._wanted: list[End] = []
        self._open: OpenHalves | None = None
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the files of the reader."""
        if self._pid != os.getpid():
            return  # a forked child, in which nobody may release the mutex
        with self._mutex:
            if self._open is not None:
                self._open.view.close()
                self._open = None

    # ---- preparing

    def prepare(self, message: Message, producer_group: str, check_immunity_s: int | None) -> HalfMessage:
        """Append a half message; see `MessageStore.half_message`."""
        writer = self.session.writer
        config = writer.files.config

        if config.reject_transaction_message:
            text = "half messages are refused: rejectTransactionMessage is true. Put the message, or change the setting"
            raise ConfigError(text, key="rejectTransactionMessage", value=True)

        fault = group_fault(producer_group)
        if fault is not None:
            raise MessageIllegalError(f"producer group: {fault}", field="producer_group")

        arguments.true_or_false("wait_store_msg_ok", message.wait_store_msg_ok)
        if check_immunity_s is not None:
            check_immunity_s = arguments.whole_number("check_immunity_s", check_immunity_s, 0, (1 << 31) - 1)

        if message.sys_flag & SYS_FLAG_TRANSACTION_MASK or message.prepared_transaction_offset:
            text = "sys_flag: found transaction bits; a half message has none. Leave them out, or use put_message"
            raise MessageIllegalError(text, field="sys_flag")
        if message.delay_time_level:
            text = "delay_time_level: found a half message with one; allowed is 0. Commit the message when it is due"
            raise MessageIllegalError(text, field="delay_time_level")
        now_ms = writer.files.disk.time_ns() // 1_000_000
        if message.born_timestamp_ms is None:
            message = replace(message, born_timestamp_ms=now_ms)
        if self._open is None:
            with self.current():  # corrects a saved progress that is ahead of the queues
                pass
        queue_id = self.session.choose_queue(message)
        topic_config = writer.files.topics.get(message.topic)
        message = message if topic_config is None else topic_config.flagged(message)
        transaction_id = new_unique_key(now_ms)
        data = record.encode_message(
            replace(message, topic=HALF_TOPIC),
            queue_id=QUEUE_ID,
            store_host=writer.files.store_host,
            limits=config,
            unique_key=transaction_id,
            extra_properties=[
                *record.stamps(config),
                *half_records.half_properties(message, queue_id, producer_group, transaction_id, check_immunity_s),
            ],
        )
        # A message that no check could put back, or nobody could commit, must not become a half message
        writer.check_fits(len(half_records.longest(bytes(data), message.topic, config)))
        self._create_topics()
        keys = [transaction_id, *message.keys]
        wait = message.wait_store_msg_ok
        result = self.session.put_encoded(data, HALF_TOPIC, QUEUE_ID, message.tags, keys, wait=wait)
        half = OpenHalf(
            message_id=result.message_id,
            transaction_id=transaction_id,
            producer_group=producer_group,
            topic=message.topic,
            queue_id=queue_id,
            born_timestamp_ms=message.born_timestamp_ms or 0,
            store_timestamp_ms=result.store_timestamp_ms,
            check_times=0,
            check_immunity_s=check_immunity_s,
            queue_offset=result.queue_offset,
            physical_offset=result.physical_offset,
            size=result.size,
        )
        return HalfMessage(self, half, result)

    def _create_topics(self) -> None:
        topics = self.session.writer.files.topics
        for topic in OWN_TOPICS:
            if topics.get(topic) is None:
                self.session.create_own_topic(topic, 1)

    # ---- finding

    @contextmanager
    def current(self) -> Iterator[OpenHalves]:
        """Hold the writer, with the half messages that are open at this moment."""
        self.session.writer.check_usable()  # before the mutex, which nobody releases in a forked child
        with self._mutex:
            writer = self.session.writer
            with writer.mutex:
                writer.check_turn()
                writer.check_usable()
                writer.finish()  # what was put is visible to the reader
                if self._open is None:
                    self._open = OpenHalves(self.session.create_view())
                self._open.refresh()
                if self._open.saved_is_ahead():
                    self.save_progress(self._open)
                yield self._open

    def open_halves(self) -> list[OpenHalf]:
        """All half messages that are open, the oldest first."""
        with self.current() as halves:
            return list(halves.by_offset.values())

    def find(self, message_id: str) -> HalfMessage:
        """The half message with a message id or UNIQ_KEY; see `MessageStore.find_half`."""
        arguments.text("message_id", message_id)
        with self.current() as halves:
            same_key = halves.of_transaction(message_id)
            if len(same_key) > 1:
                ids = ", ".join(half.message_id for half in same_key)
                text = (
                    f"UNIQ_KEY {message_id}: found {len(same_key)} open half messages: {ids}. Give the id of one of "
                    "them"
                )
                raise MessageIllegalError(text, field="message_id")
            half = same_key[0] if same_key else _stored(halves.view, message_id)

        if half is None:
            raise ended_error(message_id, UNKNOWN, commit=True)
        return HalfMessage(self, half)

    # ---- ending

    def end(self, half: OpenHalf, *, commit: bool) -> PutMessageResult | None:
        """Commit or roll back a half message, once. What has ended in the same way already stays as it is.

        Callers that come while a batch is written wait for it, and the first of them writes a batch for all of them.
        """
        self.session.writer.check_usable()
        mine = End(half, commit)
        with self._wanted_mutex:
            self._wanted.append(mine)
        with self._mutex:
            while not mine.done:
                self.end_all(self._next_ends())
        if mine.error is not None:
            raise mine.error
        return mine.result

    def _next_ends(self) -> list[End]:
        """The next callers, as many as one batch serves."""
        with self._wanted_mutex:
            size, count = 0, 0
            while count < min(len(self._wanted), ROUND_COUNT) and (not count or size < ROUND_SIZE):
                size += self._wanted[count].half.size
                count += 1
            ends, self._wanted = self._wanted[:count], self._wanted[count:]
            return ends

    def end_all(self, ends: Sequence[End]) -> None:
        """End half messages for callers. Each of them gets a result or an error, whatever happens."""
        try:
            with self.current() as halves:
                again = self._append_ends(halves, ends)
                if again:  # several callers ended the same one: for all but the first, it has ended already
                    halves.refresh()
                    self._append_ends(halves, again)
                self._save_now_and_then(halves)
        except BaseException as error:
            for end in ends:
                if not end.done:
                    end.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            for end in ends:
                end.done = True

    def _append_ends(self, halves: OpenHalves, ends: Sequence[End]) -> list[End]:
        """End those half messages that are open, in one batch; returns the ends of which this one decides."""
        writer = self.session.writer
        taken: dict[int, End] = {}
        again: list[End] = []
        records: list[bytearray] = []
        commits: list[End] = []

        for end in ends:
            half = _now(halves, end.half)
            if half is not None and half.queue_offset in taken:
                again.append(end)
                continue

            try:
                if half is None:
                    self._has_ended(halves.view, end)
                    continue
                if ended_by_broker(halves.view, half):
                    taken[half.queue_offset] = end  # only its op message was missing
                    self._has_ended(halves.view, end)
                    continue
                if end.commit:
                    records.append(self._committed(halves.view, half))
                    commits.append(end)
                taken[half.queue_offset] = end
            except (StoreError, ValueError) as error:
                end.error, end.done = error, True

        if taken:
            rows = self.append(records, taken)
            for end, row in zip(commits, rows, strict=False):
                end.result = _result(row, offset_message_id(writer.files.store_host, row.physical_offset))
            for end in taken.values():
                end.done = True
        return again

    def append(self, records: Sequence[bytearray], ended: Iterable[int]) -> list[Row]:
        """Append records together with the op messages that say which half messages have ended, as one batch."""
        writer = self.session.writer
        config, now_ms = writer.files.config, writer.files.disk.time_ns() // 1_000_000
        self._create_topics()
        ops = [half_records.ended(queue_offset, now_ms, writer.files.store_host, config) for queue_offset in ended]
        chunks = chunks_of([*records, *ops], property_crc=config.enabled_append_prop_crc)
        return append_own(writer, chunks, config.flush_disk_type)

    def _committed(self, view: StoreView, half: OpenHalf) -> bytearray:
        """The record of a message that is committed; its topic exists when this returns."""
        log, files = view.files.commit_log, self.session.writer.files
        half_records.check_committable(half, log.path_of(half.physical_offset))
        check_topic(half.topic)
        check_simple_topic(files, half.topic)
        if files.topics.get(half.topic) is None:  # it was deleted since the message was prepared
            self.session.create_own_topic(half.topic, queue_nums_again(half.topic, half.queue_id))
        return half_records.committed(log.exact(half.physical_offset, half.size), half, files.config)

    def _has_ended(self, view: StoreView, end: End) -> None:
        """Give a caller the result or the error of a half message that has ended."""
        outcome, message = _outcome(view, end.half)
        if outcome != (COMMITTED if end.commit else ROLLED_BACK):
            raise ended_error(end.half.message_id, outcome, commit=end.commit)
        if message is not None:
            place = (message.topic, message.queue_id, message.queue_offset, message.physical_offset, message.size)
            row = Row(*place, 0, message.store_timestamp_ms, ())
            end.result = _result(row, message.offset_message_id)
        end.done = True

    # ---- progress

    def _save_now_and_then(self, halves: OpenHalves) -> None:
        """Save the progress if much of it is new. A failure does not concern those who have ended half messages."""
        first, op = halves.progress()
        if first - halves.saved[0] < SAVE_EVERY and op - halves.saved[1] < SAVE_EVERY:
            return
        try:
            self.save_progress(halves)
        except (StoreError, OSError) as error:
            _log.warning(
                "%s: the progress of %s could not be saved, so more has to be read when the store is opened next (%s)",
                self.session.writer.files.paths.root,
                GROUP,
                error,
            )

    def save_progress(self, halves: OpenHalves) -> None:
        """Write into `config/consumerOffset.json` from where on a broker has to look."""
        place = halves.progress()
        if place == halves.saved:
            return
        save_half_progress(self.session.writer, place)
        halves.saved = place


def _now(halves: OpenHalves, half: OpenHalf) -> OpenHalf | None:
    """The open half message that `half` is now: it may have been put back meanwhile. None: it has ended."""
    current = halves.by_offset.get(half.queue_offset)
    if current is not None and current.physical_offset == half.physical_offset:
        return current
    same = halves.of_transaction(half.transaction_id) if half.transaction_id else []
    later = [other for other in same if other.queue_offset > half.queue_offset]
    if not later or _outcome(halves.view, half)[0] == COMMITTED:  # a producer has sent its message twice
        return None
    return later[0]


def _stored(view: StoreView, message_id: str) -> OpenHalf | None:
    """The half message with an id, whether it is open or has ended."""
    try:
        message = query.look_message_by_offset(view, parse_offset_message_id(message_id)[1])
    except MessageIllegalError:
        message = None
    if message is None or (message.topic, message.offset_message_id) != (HALF_TOPIC, message_id.upper()):
        message = next(iter(_by_key(view, HALF_TOPIC, message_id)), None)
    return None if message is None else OpenHalf.of(message)


def _by_key(view: StoreView, topic: str, key: str) -> list[MessageExt]:
    """The messages of a topic with a key, the newest first."""
    if not topic or not key:
        return []
    try:
        return query.query_message(view, topic, key, None, 0, query.NO_END_MS)[::-1]
    except UnknownTopicError:
        return []


def _outcome(view: StoreView, half: OpenHalf) -> tuple[str, MessageExt | None]:
    """How a half message has ended, and the message that was committed."""
    for message in _by_key(view, half.topic, half.transaction_id):
        if message.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_COMMIT:
            return COMMITTED, message
    if _by_key(view, DISCARD_TOPIC, half.transaction_id):
        return DISCARDED, None
    if half.physical_offset < view.files.commit_log.min_offset:
        return DELETED, None
    return (ROLLED_BACK if half.transaction_id else ENDED), None


def ended_by_broker(view: StoreView, half: OpenHalf) -> bool:
    """Whether a broker has committed or discarded a half message, and was killed before it wrote the op message."""
    return not view.own and _outcome(view, half)[0] in (COMMITTED, DISCARDED)


def _result(row: Row, message_id: str) -> PutMessageResult:
    return PutMessageResult(
        status=PutMessageStatus.PUT_OK,
        append_status=AppendMessageStatus.PUT_OK,
        physical_offset=row.physical_offset,
        size=row.size,
        queue_offset=row.queue_offset,
        message_id=message_id,
        message_count=1,
        store_timestamp_ms=row.store_timestamp_ms,
        queue_id=row.queue_id,
    )
