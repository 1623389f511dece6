"""Writes a planned batch into the log once, or not at all, and publishes it.

    S                          E
    | BATCH record | data .... |     the first eight bytes of the BATCH record are written last

Until these eight bytes are there, the log ends at S for every reader of the format. So a kill leaves nothing to cut
off, and a broker that takes over sees nothing of the batch. With SYNC_FLUSH, every segment below E is synced once
before the eight bytes are written, and the segment of S once after: that is the commit point. A BATCH record on the
disk then proves that everything below its E is on the disk. A batch becomes visible in `_publish`.

Single puts are `LogWriter`'s own. Nothing outside this package writes to the log or publishes, except recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from messagestore.errors import StorePoisonedError, SyncFailedError
from messagestore.files.state import NOTHING_IN_FLIGHT
from messagestore.format import batch_record, javahash, record, record_columns
from messagestore.format.batch_record import CHUNK_SIZE, BatchRecord
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.layout import HEAD_SEAL_SIZE
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import SCHEDULE_TOPIC, Row, Rows
from messagestore.log.dispatch import FEW_COUNT
from messagestore.log.log_end import LogEnd
from messagestore.writer.log_writer import LogWriter

_WRITEBACK_SIZE = 1 << 20


class PlannedBatch(Protocol):
    """Where each part of a batch goes in the log (`batches.plan.BatchPlan`)."""

    batch: BatchRecord
    """Its record, without the CRCs."""
    born_timestamp_ms: int | None
    """When the batch was stored that its record repeats; None: it repeats none."""
    last_record: tuple[int, int]
    """Physical offset and size of the last record; known when the batch is written."""

    @property
    def size(self) -> int:
        """The bytes of the BATCH record."""

    @property
    def body_size(self) -> int:
        """The bytes of the BATCH record's body."""

    @property
    def row_count(self) -> int:
        """How many records follow the BATCH record."""

    @property
    def counts(self) -> Mapping[tuple[str, int], int]:
        """How many records each (topic, queue id) gets."""

    @property
    def first_offsets(self) -> Mapping[tuple[str, int], int]:
        """The queue offset of the first record of each (topic, queue id)."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of the records of each topic."""

    def rows(self, timestamp_ms: int, *, with_data: bool) -> Iterator[Rows]:
        """The records in the order of the log."""


class _LogCrc:
    """Computes the CRC-32 of each `CHUNK_SIZE` bytes of the log; data must be added in order."""

    def __init__(self) -> None:
        self.crcs: list[int] = []
        self._crc = 0
        self._size = 0

    def add(self, data: memoryview) -> None:
        while len(data):
            part = data[: CHUNK_SIZE - self._size]
            self._crc = record.crc32(part, self._crc)
            self._size += len(part)
            data = data[len(part) :]
            if self._size == CHUNK_SIZE:
                self.finish()

    def add_zeros(self, count: int) -> None:
        zeros = memoryview(bytes(min(count, CHUNK_SIZE)))
        while count:
            self.add(zeros[: min(count, len(zeros))])
            count -= min(count, len(zeros))

    def finish(self) -> None:
        if self._size:
            self.crcs.append(self._crc)
        self._crc = self._size = 0


def append(writer: LogWriter, plan: PlannedBatch) -> int:
    """Write a batch, seal it and publish it; returns its store time in ms.

    The caller holds the writer for the batch: nothing is pending, and the disk has room.

    Raises
    ------
    StoreFullError
        The disk is full; nothing of the batch is in the log.
    StorePoisonedError
        A sync failed; the next opening of the store decides whether the batch is in the log.
    """
    try:
        head, timestamp_ms = _write(writer, plan)
    except StorePoisonedError:
        raise
    except SyncFailedError as error:
        raise writer.poison(f"{error}") from error
    except Exception:
        with writer.unbroken("a batch that failed could not be undone", failures=True):
            writer.undo(plan.batch.end)
            writer.write_state(in_flight=NOTHING_IN_FLIGHT)
        raise
    except BaseException as error:
        writer.poison_untold(f"an append was interrupted ({error!r})", interrupted=True)
        raise

    # From here on, a failure is not undone: the seal may be in the log, and recovery finishes what it begins.
    with writer.unbroken("a batch could not be published", failures=True):
        _seal(writer, plan, head)
        _note_end(writer, plan, timestamp_ms)
        _publish(writer, plan, timestamp_ms)
    return timestamp_ms


def _write(writer: LogWriter, plan: PlannedBatch) -> tuple[bytes, int]:
    """Write the data, then the BATCH record without its first eight bytes; returns these bytes and the store time."""
    log, batch, log_end = writer.log, plan.batch, writer.end.physical_offset
    writer.begin(batch.physical_offset, batch.flush_disk_type)
    if SCHEDULE_TOPIC in plan.sizes:
        # In flight already, and on the disk before the records that need them.
        writer.keep_levels()
    if batch.physical_offset != log_end:
        log.write(log_end, log.blank(log_end))

    timestamp_ms = writer.clock.put_ms()
    position, crc = batch.physical_offset + plan.size, _LogCrc()
    for rows in plan.rows(timestamp_ms, with_data=True):
        if rows.physical_offset != position:
            position = _blank(writer, position, crc)
        begin = position
        for data in record_columns.stamped(rows):  # each byte comes into the CPU's cache once
            crc.add(data)
            log.write(position, data)
            position += len(data)
        if batch.flush_disk_type == SYNC_FLUSH and position - begin >= _WRITEBACK_SIZE:
            log.start_writeback(begin, position - begin)  # the disk writes while the next rows are stamped
        plan.last_record = (int(rows.physical_offsets[-1]), int(rows.sizes[-1]))

    if position != batch.end:
        raise AssertionError(f"planned end {batch.end}, reached {position}")
    crc.finish()
    plan.batch = replace(batch, crcs=tuple(crc.crcs))

    files = writer.files
    record_bytes = batch_record.encode(
        plan.batch, plan.body_size, files.config, files.store_host, timestamp_ms, plan.born_timestamp_ms
    )
    if len(record_bytes) != plan.size:
        raise AssertionError(f"planned {plan.size} bytes for the BATCH record, got {len(record_bytes)}")

    log.write(batch.physical_offset + HEAD_SEAL_SIZE, memoryview(record_bytes)[HEAD_SEAL_SIZE:])
    return bytes(record_bytes[:HEAD_SEAL_SIZE]), timestamp_ms


def _blank(writer: LogWriter, position: int, crc: _LogCrc) -> int:
    blank = writer.log.blank(position)
    left = writer.log.left(position)
    writer.log.write(position, blank)
    crc.add(memoryview(blank))
    crc.add_zeros(left - len(blank))
    return position + left


def _seal(writer: LogWriter, plan: PlannedBatch, head: bytes) -> None:
    """Sync the data, write the first eight bytes of the BATCH record, and sync them."""
    sync = plan.batch.flush_disk_type == SYNC_FLUSH
    start = plan.batch.physical_offset
    if sync:
        writer.sync_log(plan.batch.end)
    writer.check_locks()
    try:
        writer.log.write(start, head)
    except OSError as error:
        raise writer.poison(f"the head of a BATCH record could not be written ({error})") from error
    if sync:
        writer.sync_log(plan.batch.end, segment=start)
    writer.check_segments(start, plan.batch.end)


def _note_end(writer: LogWriter, plan: PlannedBatch, timestamp_ms: int) -> None:
    """Note that the log ends with the batch, and count its messages: it is there, even if it cannot be published."""
    end = LogEnd(plan.batch.end, *plan.last_record, timestamp_ms)
    messages: Counter[str] = Counter()
    for (topic, _), count in plan.counts.items():
        messages[topic] += count
    for topic, count in messages.items():
        writer.appended(end, topic, count, plan.sizes[topic])
    writer.appended(end, BATCH_TOPIC, 1, plan.size)


def _publish(writer: LogWriter, plan: PlannedBatch, timestamp_ms: int) -> None:
    """Dispatch the batch, then make it visible. It is in the log: if this fails, the next recovery finishes it."""
    batch = plan.batch

    def dispatch() -> None:
        if plan.row_count < FEW_COUNT:
            writer.dispatcher.dispatch_few([row for rows in _rows(plan, timestamp_ms) for row in rows.each()])
        else:
            writer.dispatcher.dispatch(_rows(plan, timestamp_ms))
        writer.dispatcher.check_files()

    writer.dispatch_or_poison(dispatch, batch.physical_offset)
    next_offsets = {key: plan.first_offsets[key] + count for key, count in plan.counts.items()}
    writer.numbers.next_offsets.update(next_offsets)
    writer.numbers.next_offsets[BATCH_TOPIC, 0] = batch.queue_offset + 1
    writer.write_state(visible_end=batch.end, in_flight=NOTHING_IN_FLIGHT)
    if batch.flush_disk_type == SYNC_FLUSH:
        writer.note_flushed(batch.end)
    writer.journal.add(batch)
    writer.clean_end.maybe_move()


def _rows(plan: PlannedBatch, timestamp_ms: int) -> Iterator[Rows]:
    """The BATCH record, then the rows of the batch."""
    batch = plan.batch
    key_hash = javahash.index_hash(BATCH_TOPIC, batch.app_id)
    place = (batch.queue_offset, batch.physical_offset, plan.size)
    tags_code = javahash.tags_code(batch_record.PROGRESS_TAG) if batch.progress else 0
    yield Rows.of([Row(BATCH_TOPIC, 0, *place, tags_code, timestamp_ms, [key_hash])])
    yield from plan.rows(timestamp_ms, with_data=False)
