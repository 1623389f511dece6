"""Delivers delayed messages that are due: to the topic and queue for which they were put, once each.

    SCHEDULE_TOPIC_XXXX/2:  | delivered ........ | due ..... | not due yet ... |
                                                 ^ progress of level 3

RocketMQ looks at the first message of each level that was not delivered yet, delivers while it is due, and writes its
progress to `config/delayOffset.json` now and then; after a kill it delivers messages again. Here the due messages of
all levels and the progress behind them are one batch of the log: its BATCH record, of app `DELIVERY_APP`, holds the
progress as its origin. So the progress is in the log exactly if the messages are. `delayOffset.json` follows it, and a
broker goes on from there. Where both say something, the larger progress counts, since a broker may have delivered in
between.

The numbers of a level's queue may go back (`log/remembered.py` says how). A number then counts only as far as the place
in the log bears it out: a BATCH record has delivered nothing that was appended after it, and `delayOffset.json` nothing
that the queue does not have or that is due after the last record. The file is corrected when a store is opened, before
anything is appended.

The levels are the queues that the store has, and a unit says when its message is due. A deliverer's own
`messageDelayLevel` counts for nothing.

A delivery is always a SYNC_FLUSH batch: what it has delivered is on the disk with everything below it, before
`delayOffset.json` says so.

Source: RocketMQ broker/schedule/ScheduleMessageService.java.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.batches.append import Chunks, append_batch
from messagestore.batches.plan import OwnRequest
from messagestore.errors import CorruptionError, MessageIllegalError, StoreFullError, StoreLockedError
from messagestore.files.consume_queue import queue_ids_of
from messagestore.files.delay_offsets import DelayOffsets
from messagestore.files.topics import queue_nums_again
from messagestore.format import record_decode, record_scan, rerouting
from messagestore.format.arrow_bytes import numpy_of
from messagestore.format.batch_record import DELIVERY_APP
from messagestore.format.config import StoreConfig
from messagestore.format.layout import (
    BLANK,
    FILLER_UNIT_SIZE,
    LEAST_TAGS_CODE,
    MAX_PROPERTIES_SIZE,
    PROPERTY_CRC_SIZE,
    SYS_FLAG_BORN_HOST_V6,
)
from messagestore.format.message import MAX_QUEUE_ID, put_topic_fault
from messagestore.format.properties import REAL_QID, REAL_TOPIC
from messagestore.format.record import store_timestamp_position
from messagestore.format.record_rows import values_of
from messagestore.format.rows import SCHEDULE_TOPIC, Rows
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.batch_search import known_batch
from messagestore.log.store_files import StoreFiles
from messagestore.signal_handlers import pass_on
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.states import Health

MAX_ROWS, MAX_SIZE = 16_384, 16 * 1024 * 1024
"""How much one batch delivers at most; puts wait meanwhile."""
_ORIGIN, _LOG_END = "delayOffset", "logEnd"
_UNITS = 1024
_SHORTEST_PAUSE_S = 0.01
AFTER_DAMAGE_S = 10.0
"""How long after an error the next round comes, as in RocketMQ."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What one round of delivery did.

    Parameters
    ----------
    count : int
        How many messages were delivered.
    left_out : int
        How many messages that were due cannot be delivered. They stay in SCHEDULE_TOPIC_XXXX, and a warning names the
        first one.
    next_due_ms : int | None
        When the next message that waits is due, in milliseconds since 1970: the past, if more are due now. None: none
        waits.

    Examples
    --------
    >>> from messagestore import Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     _ = store.put_message(Message("gates", b"B12", queue_id=0, delay_time_level=3))
    ...     store.deliver_delayed().count
    0
    """

    count: int
    left_out: int
    next_due_ms: int | None

    def pause_s(self, config: StoreConfig) -> float:
        """How long to wait before the next round: until the next message is due, and at most for the shortest level,
        since a message that is put meanwhile waits for that long at least.
        """
        shortest_s = max(min(config.delays_ms) / 1000, _SHORTEST_PAUSE_S)
        if self.next_due_ms is None:
            return shortest_s
        return min(max(self.next_due_ms / 1000 - time.time(), _SHORTEST_PAUSE_S), shortest_s)


@dataclass(slots=True)
class _Due:
    """The messages of one level that are due: their units, and the number of the first one."""

    level: int
    first: int
    units: NDArray[np.void]


class Delivery:
    """Delivers the delayed messages of one writer's store.

    Parameters
    ----------
    writer : LogWriter
        The caller holds the writer lock.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer, self._files = writer, writer.files
        self._file = DelayOffsets(writer.files.disk, writer.files.paths.root)
        self._of_broker: dict[int, int] | None = None
        self._saved_s = time.monotonic()
        self.pause_s = 0.0
        """The time until `deliver_all` has to be called again."""

    def deliver_all(self, stopping: Callable[[float], bool]) -> None:
        """Deliver everything that is due, as a service of a session does, until `stopping` says to end."""
        self.pause_s = AFTER_DAMAGE_S
        while self._writer.health is Health.SOUND and not stopping(0):
            try:
                done = self.deliver()
            except StoreLockedError:
                return  # a broker is about to start, and delivers by itself
            if not done.count:
                self.pause_s = done.pause_s(self._files.config)
                return

    def deliver(self, max_rows: int = MAX_ROWS) -> Delivered:
        """Deliver messages that are due, as one batch; the rest, if there are more, is for the next call.

        Raises
        ------
        CorruptionError
            A message that is due is damaged. The other levels were delivered.
        StoreFullError, StorePoisonedError, StoreLockedError
            As for `append_batch`.
        """
        damaged: dict[int, CorruptionError] = {}
        with self._writer.mutex:
            while True:
                before = len(damaged)
                done = self._round(max_rows, damaged)
                if done.count or len(damaged) == before:
                    break
        if damaged:
            raise next(iter(damaged.values()))
        return done

    def _round(self, max_rows: int, damaged: dict[int, CorruptionError]) -> Delivered:
        """Deliver once, without the levels whose next message is damaged; more of those are noted."""
        progress = self._progress()
        all_due, next_due_ms = self._due(
            {level: at for level, at in progress.items() if level not in damaged}, max_rows
        )
        chunks, after, left_out = Chunks(), dict(progress), 0

        for due in all_due:
            try:
                rows, faults = self._undamaged(due)
            except CorruptionError as error:
                damaged[due.level] = error
                continue
            chunks += rows
            after[due.level] = due.first + len(due.units)
            left_out += faults

        if after != progress:
            if not self._append(chunks, after):
                # Its BATCH record would be too large for a segment: deliver half as many messages.
                return self._round(max(1, sum(len(due.units) for due in all_due) // 2), damaged)
            # For brokers; the log itself says what was delivered.
            self._save(after)

        return Delivered(sum(rows.row_count for rows in chunks), left_out, next_due_ms)

    # ---- the progress

    def _progress(self) -> dict[int, int]:
        """The number of the next message of each level that has a queue."""
        writer, files = self._writer, self._files
        of_broker = self._of_broker_now()
        in_log = delivered(files, writer.journal)
        progress = {}
        for queue_id in queue_ids_of(files.disk, files.paths.root, SCHEDULE_TOPIC):
            level = queue_id + 1
            if files.queue(SCHEDULE_TOPIC, queue_id).offsets:
                end = writer.numbers.next_offset(SCHEDULE_TOPIC, queue_id)
                progress[level] = min(max(in_log.get(level, 0), of_broker.get(level, 0)), end)
        return progress

    def _of_broker_now(self) -> dict[int, int]:
        """What `delayOffset.json` said when the store was opened, corrected as the queues and the log were then."""
        if self._of_broker is None:
            in_log = delivered(self._files, self._writer.journal)
            of_broker = self._file.load()
            self._of_broker = {
                level: offset if offset <= in_log.get(level, 0) else self._possible(level, in_log.get(level, 0), offset)
                for level, offset in of_broker.items()
            }
        return self._of_broker

    def _possible(self, level: int, least: int, offset: int) -> int:
        """How many messages of a level can have been delivered into this log, at most `offset`.

        RocketMQ lowers the number to the queue's end (`correctDelayOffset`). A delivery is stored when its message is
        due or later. So what is due after the last record of the log was not delivered into it either: the file is
        newer than the log, or a crash has taken the deliveries.
        """
        files, last_ms = self._files, self._writer.end.last_store_timestamp_ms
        queue = files.queue(SCHEDULE_TOPIC, level - 1)
        end = self._writer.numbers.next_offset(SCHEDULE_TOPIC, level - 1) if queue.offsets else 0

        high = min(offset, end)
        low = min(self._first_left(level, least), high) if high else 0

        while low < high:
            first = max(low, high - _UNITS)
            units = queue.read(first, high - first)
            early = np.flatnonzero(self._due_times(units, level) <= last_ms)
            if len(early):
                high = first + int(early[-1]) + 1
                break
            high = first

        if high < offset:
            _log.warning(
                "%s: %s says that %d messages of delay level %d were delivered, but at most %d of those in the log can "
                "have been: the file is newer than the log, or the queue was rebuilt, cut or restored. Delivery "
                "continues there",
                files.paths.root,
                self._file.path,
                offset,
                level,
                high,
            )
        return high

    def follow(self) -> None:
        """Let `config/delayOffset.json` say what the log says, so that a broker delivers nothing again, and skips none.

        This is done when a store is opened and when it is closed. What a broker has delivered since stays. If it fails,
        the log knows what was delivered in any case.
        """
        try:
            with self._writer.mutex:
                right = self._right()
                if right:
                    self._file.save(right)
        except (CorruptionError, StoreFullError, OSError) as error:
            pass_on(error)
            _log.warning(
                "%s: config/delayOffset.json could not be brought up to date, so that a broker would deliver messages "
                "again, or skip some: %s",
                self._files.paths.root,
                error,
            )

    def saved(self) -> dict[int, int]:
        """The number of the next message of each level that has delivered something, as `delayOffset.json` says it from
        now on. Retention may delete what lies below. Call under the mutex.

        Raises
        ------
        CorruptionError
            The file cannot be read, or a queue is damaged.
        """
        right = self._right()
        try:
            self._file.save(right)
        except (StoreFullError, OSError) as error:  # a broker begins at the first message that is left
            _log.warning("%s could not be written: %s", self._file.path, error)
        return right

    def _right(self) -> dict[int, int]:
        """What `delayOffset.json` has to say."""
        of_broker, in_log = self._of_broker_now(), delivered(self._files, self._writer.journal)
        right = {level: max(in_log.get(level, 0), of_broker.get(level, 0)) for level in {*in_log, *of_broker}}
        return {level: offset for level, offset in right.items() if offset or level in of_broker}

    def _save(self, progress: dict[int, int]) -> None:
        """Let `delayOffset.json` follow, at RocketMQ's interval."""
        if time.monotonic() - self._saved_s >= self._files.config.flush_delay_offset_interval / 1000:
            self._file.save(progress)
            self._saved_s = time.monotonic()

    # ---- what is due

    def _due(self, progress: dict[int, int], max_rows: int) -> tuple[list[_Due], int | None]:
        """The messages that are due, at most so many, and when the next one is."""
        # The due times are the store's, whose clock may stand still after the machine's was set back.
        now_ms = self._writer.clock.read_ms()
        clock_ms = min(self._files.disk.time_ns() // 1_000_000, now_ms)

        all_due: list[_Due] = []
        nexts: list[int] = []
        room, size = max_rows, MAX_SIZE
        for level, offset in progress.items():
            first = self._first_left(level, offset)
            units = self._units(level, first, room + 1)
            codes = self._due_times(units, level)
            codes = self._since_put(units, codes, now_ms)
            count = self._due_count(units, codes, now_ms)
            if count < len(units):
                nexts.append(int(codes[count]))

            ends = np.cumsum(units["size"][:count], dtype=np.int64)
            fitting = min(max(int(np.searchsorted(ends, size, "right")), 1), room) if size > 0 else 0
            if count > fitting:
                nexts.append(now_ms)
            count = min(count, fitting)

            if count:
                all_due.append(_Due(level, first, units[:count]))
                room -= count
                size -= int(ends[count - 1])

        return all_due, min(nexts) - (now_ms - clock_ms) if nexts else None

    def _since_put(self, units: NDArray[np.void], codes: NDArray[np.int64], now_ms: int) -> NDArray[np.int64]:
        """The due times by the store's clock. That clock stands still while the machine's clock is behind it. A message
        that is put meanwhile waits for no longer than its level, as in RocketMQ.
        """
        times = self._writer.clock.put_times
        later = np.flatnonzero((codes > now_ms) & (units["physical_offset"] < times.end))
        if len(later):
            some = units[later]
            delays_ms = codes[later] - self._store_times(some)
            due_ms = times.latest(some["physical_offset"].astype(np.int64)) + delays_ms
            codes = codes.copy()
            uptime_ms = self._files.disk.uptime_ns() // 1_000_000
            codes[later] = np.minimum(codes[later], now_ms + np.maximum(due_ms - uptime_ms, 0))
        return codes

    def _due_count(self, units: NDArray[np.void], codes: NDArray[np.int64], now_ms: int) -> int:
        """How many messages are due before the first one that waits.

        As in RocketMQ, a message does not wait for a clock that was ahead when it was put. RocketMQ knows such a one by
        a due time that is further away than the level's delay. Its store time says the same, whatever the levels are.
        """
        later = codes > now_ms
        if not later.any():
            return len(units)
        first = int(later.argmax())
        if self._store_times(units[first : first + 1])[0] <= now_ms:
            return first
        waits = later & (self._store_times(units) <= now_ms)
        return int(waits.argmax()) if waits.any() else len(units)

    def _first_left(self, level: int, offset: int) -> int:
        """The first message at or behind a number whose record is in the log."""
        files = self._files
        queue, begin = files.queue(SCHEDULE_TOPIC, level - 1), files.commit_log.min_offset
        first = max(offset, queue.first_file_queue_offset)
        units = queue.read(first, 1)
        if len(units) and (int(units["size"][0]) == FILLER_UNIT_SIZE or int(units["physical_offset"][0]) < begin):
            first = max(first, queue.search_physical(begin))
        return first

    def _due_times(self, units: NDArray[np.void], level: int) -> NDArray[np.int64]:
        """When each message is due. A unit of a broker with ConsumeQueueExt contains a place in another file instead of
        a time; then the store time counts, as in RocketMQ.
        """
        codes = units["tags_code"].astype(np.int64)
        elsewhere = np.flatnonzero(codes < LEAST_TAGS_CODE)
        if len(elsewhere):
            codes[elsewhere] = self._store_times(units[elsewhere])
            places = units["physical_offset"][elsewhere].astype(np.int64)
            for rows, delays_ms in self._writer.log.delay_levels.of(places):
                codes[elsewhere[rows]] += delays_ms[min(level, len(delays_ms)) - 1]
        return codes

    def _store_times(self, units: NDArray[np.void]) -> NDArray[np.int64]:
        """When each message was stored, from its record."""
        places, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int32)
        data, starts = self._files.commit_log.gather(places, sizes)
        return record_scan.heads(data, starts)["store_timestamp_ms"].astype(np.int64)

    def _units(self, level: int, first: int, count: int) -> NDArray[np.void]:
        """The next units of a level, at most so many."""
        files = self._files
        queue = files.queue(SCHEDULE_TOPIC, level - 1)
        end = self._writer.numbers.next_offset(SCHEDULE_TOPIC, level - 1)
        units = queue.read(first, min(count, end - first))
        readable = (units["size"] > 0) & (units["size"] != FILLER_UNIT_SIZE)
        readable &= units["physical_offset"] + units["size"] <= self._writer.end.physical_offset
        return units if readable.all() else units[: int(readable.argmin())]

    # ---- what is delivered

    def _undamaged(self, due: _Due) -> tuple[list[Rows], int]:
        """The result of `_restored` for the messages before the first damaged one; `due` is left with these."""
        while True:
            try:
                return self._restored(due)
            except CorruptionError:
                if len(due.units) == 1:
                    raise
                due.units = due.units[: len(due.units) // 2]

    def _restored(self, due: _Due) -> tuple[list[Rows], int]:
        """The records of due messages for the topics and queues that they were put for, and how many have none."""
        files, config = self._files, self._files.config
        places, sizes = due.units["physical_offset"].astype(np.int64), due.units["size"].astype(np.int32)
        numbers = np.arange(due.first, due.first + len(places))
        data, starts = files.commit_log.gather(places, sizes)

        may_differ = np.ones(len(places), np.bool_)  # a broker's units may have other numbers than their records
        expected = record_decode.Expected(SCHEDULE_TOPIC, due.level - 1, numbers, places, may_differ)
        path = files.commit_log.path_of(int(places[0]))
        columns = record_decode.decode(
            data, starts, sizes, ("system_properties", "sys_flag"), expected=expected, path=path
        )

        names, codes, queue_ids = _real_queues(columns.column(0))
        legal = [
            put_topic_fault(name) is None and files.topics.is_simple_queue(name) and not files.topics.is_compacted(name)
            for name in names
        ]
        topics = [name for name, good in zip(names, legal, strict=True) if good]
        codes = np.where([*legal, False], np.cumsum([*legal, False]) - 1, -1)[codes]

        room = files.commit_log.segment_size - BLANK.size
        longest = np.array([*map(len, topics), 0], np.int64)
        codes[sizes + longest[codes] + PROPERTY_CRC_SIZE > room] = -1

        good = (codes >= 0) & (queue_ids >= 0)
        if not good.all():
            self._warn(due, int(np.flatnonzero(~good)[0]), int((~good).sum()))
        self._create_missing(topics, codes[good], queue_ids[good])

        ipv6 = numpy_of(columns.column(1)) & SYS_FLAG_BORN_HOST_V6 != 0
        with_crc = np.full(len(codes), config.enabled_append_prop_crc)
        if config.enabled_append_prop_crc:
            with_crc &= _property_sizes(data, starts) <= MAX_PROPERTIES_SIZE - PROPERTY_CRC_SIZE

        order = np.argsort(codes * (MAX_QUEUE_ID + 1) + queue_ids, kind="stable")
        chunks = []
        for wide, crc in ((False, False), (False, True), (True, False), (True, True)):
            some = order[(good & (ipv6 == wide) & (with_crc == crc))[order]]
            if len(some):
                moved, begins = rerouting.readdressed(
                    data, starts, topics, codes, queue_ids, order=some, property_crc=crc
                )
                position = store_timestamp_position(SYS_FLAG_BORN_HOST_V6 if wide else 0)
                levels = files.commit_log.delay_levels
                chunks.append(
                    rerouting.unplaced(moved, begins, levels, store_timestamp_position=position, property_crc=crc)
                )

        return chunks, int((~good).sum())

    def _warn(self, due: _Due, row: int, count: int) -> None:
        _log.warning(
            "%s: %d messages in %s/%d have no topic and queue to which they could be delivered, or do not fit into a "
            "segment there. They stay where they are. The first of them has number %d, at physical offset %d "
            "(look_message_by_offset)",
            self._files.paths.root,
            count,
            SCHEDULE_TOPIC,
            due.level - 1,
            due.first + row,
            int(due.units["physical_offset"][row]),
        )

    def _create_missing(self, topics: list[str], codes: NDArray[np.int64], queue_ids: NDArray[np.int32]) -> None:
        """Create the topics that have gone since the messages were put."""
        table = self._files.topics
        missing = [code for code in np.unique(codes).tolist() if table.get(topics[code]) is None]
        for code in missing:
            table.create(topics[code], queue_nums_again(topics[code], int(queue_ids[codes == code].max())))
        if missing:
            table.save_or_drop()

    def _append(self, chunks: Chunks, after: dict[int, int]) -> bool:
        """Append a delivery and its progress; False if its BATCH record would be too large for a segment."""
        last = _last_version(self._writer)
        request = OwnRequest(
            app_id=DELIVERY_APP,
            version=0 if last is None else last + 1,
            origin={
                _ORIGIN: {str(level): offset for level, offset in after.items()},
                _LOG_END: self._writer.end.physical_offset,
            },
        )

        try:
            append_batch(self._writer, chunks, request, own=True)
        except MessageIllegalError as error:
            if error.field != "batch" or sum(rows.row_count for rows in chunks) <= 1:
                raise
            return False
        return True


def _real_queues(properties: pa.MapArray) -> tuple[list[str], NDArray[np.int64], NDArray[np.int32]]:
    """The distinct topics that messages were put for, and the index of each message's topic, and its queue; -1 where a
    message has none.
    """
    n = len(properties)
    codes, queue_ids = np.full(n, -1, np.int64), np.full(n, -1, np.int32)
    rows, names = values_of(properties, REAL_TOPIC)
    topics = names.dictionary_encode()
    codes[rows] = numpy_of(topics.indices)
    rows, texts = values_of(properties, REAL_QID)
    numbers = texts.dictionary_encode()
    queue_ids[rows] = np.array([_queue_id(text) for text in numbers.dictionary.to_pylist()], np.int32)[
        numpy_of(numbers.indices)
    ]
    return topics.dictionary.to_pylist(), codes, queue_ids


def _queue_id(text: str) -> int:
    """A queue id, or -1 if the text is none."""
    good = text.isascii() and text.isdigit() and len(text) <= 10
    return int(text) if good and int(text) <= MAX_QUEUE_ID else -1


def _property_sizes(data: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    _, parts = record_scan.parts(data, starts, record_scan.heads(data, starts))
    return parts.ends - parts.property_starts


def _last_version(writer: LogWriter) -> int | None:
    last = writer.journal.last(DELIVERY_APP)
    return None if last is None else last.version


def delivered_so_far(files: StoreFiles, journal: BatchJournal) -> dict[int, int]:
    """The progress of a store that nobody changes meanwhile: what the log holds, or `delayOffset.json` if that is more.

    Raises
    ------
    CorruptionError
        The file, or the BATCH record of the newest delivery, cannot be read.
    """
    in_log, of_broker = delivered(files, journal), DelayOffsets(files.disk, files.paths.root).load()
    return {level: max(in_log.get(level, 0), of_broker.get(level, 0)) for level in {*in_log, *of_broker}}


def delivered(files: StoreFiles, journal: BatchJournal) -> dict[int, int]:
    """The progress that the log holds: level -> number of the next message to deliver.

    The BATCH record also says where the log ended. A message behind that place was not delivered, whatever its number
    is: the numbers began again.
    """
    last = journal.last(DELIVERY_APP)
    if last is None or last.physical_offset < files.commit_log.min_offset:
        return {}  # where its record is gone, so are all the messages that it or an earlier one delivered
    batch = known_batch(files.commit_log, last.physical_offset)
    origin = {} if batch is None or batch.origin is None else batch.origin
    end = origin.get(_LOG_END, last.physical_offset)
    return {int(level): _below(files, int(level), offset, end) for level, offset in origin.get(_ORIGIN, {}).items()}


def _below(files: StoreFiles, level: int, offset: int, end: int) -> int:
    """At most the number of a level's first message that lies at or behind a physical offset."""
    queue = files.queue(SCHEDULE_TOPIC, level - 1)
    last = queue.read(offset - 1, 1)
    if len(last) and int(last["size"][0]) > 0 and int(last["physical_offset"][0]) < end:
        return offset
    return min(offset, queue.search_physical(end)) if queue.offsets else 0
