"""Appends a whole batch to the log once, or not at all.

    S                          E
    | BATCH record | data .... |     the first eight bytes of the BATCH record are written last

Until these eight bytes are there, the log ends at S for every reader of the format. So a kill leaves nothing to cut
off, and a broker that takes over sees nothing of the batch. With SYNC_FLUSH, every segment below E is synced once
before the eight bytes are written, and the segment of S once after: that is the commit point. A BATCH record on the
disk then proves that everything below its E is on the disk.

A batch comes as chunks of encoded records; the chunk limits the memory, and not the batch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from messagestore.errors import (
    LostBatchesError,
    StoreFullError,
    StorePoisonedError,
    SyncFailedError,
)
from messagestore.files.state import NOTHING_IN_FLIGHT
from messagestore.format import batch_record, javahash, record, record_columns
from messagestore.format.batch_record import CHUNK_SIZE, check_app_id
from messagestore.format.config import ASYNC_FLUSH, SYNC_FLUSH
from messagestore.format.layout import DIGEST_NAME, HEAD_SEAL_SIZE
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import Row, Rows
from messagestore.log.batch_journal import BatchJournal, JournalEntry
from messagestore.log.batch_search import batch_is_there, known_batch
from messagestore.log.dispatch import FEW_COUNT
from messagestore.write.batch_plan import BatchPlan, BatchRequest, Chunks, ChunkSource, OwnRequest, Restated
from messagestore.write.batch_rules import APPENDED, KNOWN, SKIPPED, BatchResult, Decision, decide
from messagestore.write.log_writer import LogWriter
from messagestore.write.standing import LogEnd

__all__ = ["APPENDED", "KNOWN", "SKIPPED", "BatchRequest", "BatchResult", "Chunks", "append_batch", "append_own"]

_WRITEBACK_SIZE = 1 << 20


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


def append_batch(writer: LogWriter, source: ChunkSource, request: BatchRequest, *, own: bool = False) -> BatchResult:
    """Append a batch. The log contains all of it once if this returns, and nothing of it if this raises.

    Parameters
    ----------
    writer : LogWriter
        The caller holds the writer lock.
    source : ChunkSource
    request : BatchRequest
    own : bool
        The store made the records itself: their topics, which are in `config/topics.json`, and queues are not checked.

    Raises
    ------
    BatchConflictError, QueryConflictError, VersionRegressionError, LostBatchesError
        The rules in `batch_rules` refuse the batch; nothing was written.
    MessageIllegalError
        A topic, queue or size is not allowed; nothing was written.
    StoreFullError
        The disk is full; nothing of the batch is in the log.
    StorePoisonedError
        A sync failed; the next opening of the store decides whether the batch is in the log.
    """
    with _ready(writer, request):
        decision = _check_journal(writer, source, request)
        known = decision.known
        if known is not None:
            if request.flush_disk_type == SYNC_FLUSH and known.end > writer.synced_end:
                writer.sync_to_end()  # it was appended with ASYNC_FLUSH, and is now acknowledged as synced
                writer.note_flushed(known.end)
            return known
        writer.check_disk()
        end = writer.end.physical_offset
        plan = BatchPlan(writer.files, end, writer.numbers.next_offset, source, request, decision.replaces, own=own)
        _append(writer, plan, request)
        return BatchResult(
            APPENDED,
            plan.batch.physical_offset,
            plan.batch.end,
            plan.row_count,
            plan.batch.end - plan.batch.physical_offset,
        )


def append_own(writer: LogWriter, source: ChunkSource, flush_disk_type: str) -> list[Row]:
    """Append records that the store itself makes, as one batch: all of them are in the log, or none is.

    Their topics may be a broker's own. They are not checked, and must be in `config/topics.json` already.

    Returns
    -------
    list of Row
        Where each record is, in the order of `source`.

    Raises
    ------
    StoreFullError, StorePoisonedError, StoreLockedError
        As for `append_batch`.
    """
    request = BatchRequest(flush_disk_type=flush_disk_type)
    with _ready(writer, request):
        end = writer.end.physical_offset
        plan = BatchPlan(writer.files, end, writer.numbers.next_offset, source, request, own=True)
        timestamp_ms = _append(writer, plan, request)
        return [row for rows in plan.rows(timestamp_ms, with_data=False) for row in rows.each()]


@contextlib.contextmanager
def _ready(writer: LogWriter, request: BatchRequest) -> Iterator[None]:
    """Hold the writer for a batch: it may append, and nothing is pending."""
    if request.flush_disk_type == ASYNC_FLUSH:
        writer.start_flushing()
    with writer.mutex:
        writer.check_turn()
        writer.check_usable()
        writer.check_locks()
        writer.finish()
        yield


def _append(writer: LogWriter, plan: BatchPlan, request: BatchRequest) -> int:
    """Write a planned batch and publish it; returns its store time."""
    _check_space(writer, plan)
    try:
        head, timestamp_ms = _write(writer, plan, request)
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
        writer.poison(f"an append was interrupted ({error!r})")
        raise
    with writer.unbroken("a batch could not be published", failures=True):
        _commit(writer, plan, head, request)
        _count(writer, plan)
        _publish(writer, plan, timestamp_ms)
    return timestamp_ms


def restate_batches(writer: LogWriter, below: int) -> list[tuple[str, int]]:
    """Write the newest BATCH record of each app again if it lies below a physical offset.

    A batch that is sent again is then known although the segment of its BATCH record was deleted and the journal is
    lost, as on a copy without `spark/`. The new records have no rows. They are appended in ASYNC_FLUSH, and are on the
    disk when the caller has moved the clean end.

    Returns
    -------
    list of (str, int)
        The app and version of each batch that was restated.

    Raises
    ------
    CorruptionError
        A BATCH record that must be restated cannot be read.
    """
    with _ready(writer, BatchRequest()):
        for app_id in writer.journal.app_ids():
            last = writer.journal.last(app_id)
            if last is not None:
                _drop_vanished(writer, app_id, last.version)
        restated = [each for each in newest_batches(writer.journal) if each[1].physical_offset < below]
        for app_id, entry in restated:
            _restate(writer, app_id, entry)
        return [(app_id, entry.version) for app_id, entry in restated]


def newest_batches(journal: BatchJournal) -> list[tuple[str, JournalEntry]]:
    """The batches from which the rules recognise an app's next ones: the last one, and the last one that names a query.

    In each pair, the first is the app's id.
    """
    found = []
    for app_id in journal.app_ids():
        last = journal.last(app_id)
        if last is None:
            continue
        if last.query_id is None:
            found += [(app_id, each) for each in journal.entries(app_id) if each.query_id is not None][-1:]
        found.append((app_id, last))
    return found


def _restate(writer: LogWriter, app_id: str, entry: JournalEntry) -> None:
    below_log = entry.physical_offset < writer.log.min_offset
    batch = None if below_log else known_batch(writer.log, entry.physical_offset)
    request = OwnRequest(  # also those of the store itself
        app_id=app_id,
        version=entry.version,
        version_source=entry.version_source,
        query_id=entry.query_id,
        flush_disk_type=ASYNC_FLUSH,
        start=entry.start,
        origin=None if batch is None else batch.origin,
    )
    restated = Restated(entry, tuple(sorted(writer.journal.replaced(app_id))))
    end = writer.end.physical_offset
    plan = BatchPlan(writer.files, end, writer.numbers.next_offset, Chunks(), request, restated=restated)
    _append(writer, plan, request)


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch that is in the store.

    Parameters
    ----------
    app_id, version : str, int
        Identify the batch.
    query_id : str | None
        The streaming query that wrote it, if it is known.
    physical_offset, end : int
        Where the batch begins and ends in the log, in bytes from its origin.
    row_count : int
    origin : dict | None
        What the program that appended the batch said about where its rows come from. None: nothing.
    """

    app_id: str
    version: int
    query_id: str | None
    physical_offset: int
    end: int
    row_count: int
    origin: Mapping[str, Any] | None


def last_batch(writer: LogWriter, app_id: str) -> StoredBatch | None:
    """Return an app's last batch, or None if the store has none.

    Raises
    ------
    LostBatchesError
        Retention has deleted the batch's own record, so its origin is gone.
    """
    check_app_id(app_id)
    with writer.mutex:
        writer.check_turn()
        last = writer.journal.last(app_id)
        if last is None:
            return None
        _drop_vanished(writer, app_id, last.version)
        last = writer.journal.last(app_id)
        if last is None:
            return None
        if last.physical_offset < writer.log.min_offset:
            raise LostBatchesError(
                f"app {app_id!r}: version {last.version} is the last one, and retention has deleted its record, at "
                f"{last.physical_offset}: the log begins at {writer.log.min_offset}. Its origin is unknown. "
                f"Find out where the next batch begins, and give the app a new name",
                app_id=app_id,
                version=last.version,
            )
        batch = known_batch(writer.log, last.physical_offset)
        origin = None if batch is None else batch.origin
        return StoredBatch(app_id, last.version, last.query_id, last.physical_offset, last.end, last.row_count, origin)


def digests_needed(writer: LogWriter, request: BatchRequest | None) -> tuple[str, ...]:
    """The names of the digests that the rows of a batch need, so that the batch is recognised if the store has it."""
    if request is None or request.app_id is None:
        return (DIGEST_NAME,)
    with writer.mutex:
        return writer.journal.digests_of(request.app_id, request.version)


def _check_journal(writer: LogWriter, source: ChunkSource, request: BatchRequest) -> Decision:
    """Apply the rules of `batch_rules`, after entries that the log has lost were removed from the journal."""
    if request.app_id is None:
        return Decision()
    _drop_vanished(writer, request.app_id, request.version)
    return decide(writer.files, writer.journal, source, request)


def _drop_vanished(writer: LogWriter, app_id: str, version: int) -> None:
    """Drop an app's journal entries whose BATCH record is neither in the log nor below its first segment.

    Only the entry of the version and the app's last entries are checked.
    """
    journal = writer.journal
    entry = journal.find(app_id, version)
    if entry is not None and not batch_is_there(writer.files, writer.end.physical_offset, app_id, entry):
        journal.drop(app_id, version)
    entry = journal.last(app_id)
    while entry is not None and not batch_is_there(writer.files, writer.end.physical_offset, app_id, entry):
        journal.drop(app_id, entry.version)
        entry = journal.last(app_id)


def _check_space(writer: LogWriter, plan: BatchPlan) -> None:
    needed = plan.batch.end - writer.end.physical_offset + plan.row_count * 64
    free = writer.files.disk.free(writer.files.paths.root)
    if free < needed:
        raise StoreFullError(
            f"{writer.files.paths.root}: this batch needs about {needed} bytes, but {free} are free. Nothing of it was "
            f"written. Make room and try again",
            path=writer.files.paths.root,
            needed=needed,
            free=free,
        )


def _write(writer: LogWriter, plan: BatchPlan, request: BatchRequest) -> tuple[bytes, int]:
    """Write the data, then the BATCH record without its first eight bytes; returns these bytes and the store time."""
    log, batch, log_end = writer.log, plan.batch, writer.end.physical_offset
    writer.begin(batch.physical_offset, request.flush_disk_type)
    if batch.physical_offset != log_end:
        log.write(log_end, log.blank(log_end))
    timestamp_ms = writer.now_ms()
    position, crc = batch.physical_offset + plan.size, _LogCrc()
    for rows in plan.rows(timestamp_ms, with_data=True):
        if rows.physical_offset != position:
            position = _blank(writer, position, crc)
        begin = position
        for data in record_columns.stamped(rows):  # each byte comes into the CPU's cache once
            crc.add(data)
            log.write(position, data)
            position += len(data)
        if request.flush_disk_type == SYNC_FLUSH and position - begin >= _WRITEBACK_SIZE:
            log.start_writeback(begin, position - begin)  # the disk writes while the next rows are stamped
        plan.last_record = (int(rows.physical_offsets[-1]), int(rows.sizes[-1]))
    if position != batch.end:
        raise AssertionError(f"planned end {batch.end}, reached {position}")
    crc.finish()
    plan.batch = replace(batch, crcs=tuple(crc.crcs))
    own = batch_record.encode(plan.batch, plan.body_size, writer.files.config, writer.files.store_host, timestamp_ms)
    if len(own) != plan.size:
        raise AssertionError(f"planned {plan.size} bytes for the BATCH record, got {len(own)}")
    log.write(batch.physical_offset + HEAD_SEAL_SIZE, memoryview(own)[HEAD_SEAL_SIZE:])
    return bytes(own[:HEAD_SEAL_SIZE]), timestamp_ms


def _blank(writer: LogWriter, position: int, crc: _LogCrc) -> int:
    blank = writer.log.blank(position)
    left = writer.log.left(position)
    writer.log.write(position, blank)
    crc.add(memoryview(blank))
    crc.add_zeros(left - len(blank))
    return position + left


def _commit(writer: LogWriter, plan: BatchPlan, head: bytes, request: BatchRequest) -> None:
    """Sync the data, write the first eight bytes of the BATCH record, and sync them."""
    sync = request.flush_disk_type == SYNC_FLUSH
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


def _count(writer: LogWriter, plan: BatchPlan) -> None:
    """Count the messages of a batch. It is in the log now, even if it cannot be published."""
    messages: Counter[str] = Counter()
    for (topic, _), count in plan.counts.items():
        messages[topic] += count
    for topic, count in messages.items():
        writer.count(topic, count, plan.sizes[topic])
    writer.count(BATCH_TOPIC, 1, plan.size)


def _publish(writer: LogWriter, plan: BatchPlan, timestamp_ms: int) -> None:
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
    next_offsets[BATCH_TOPIC, 0] = batch.queue_offset + 1
    writer.appended(LogEnd(batch.end, *plan.last_record, timestamp_ms), next_offsets)
    writer.write_state(visible_end=batch.end, in_flight=NOTHING_IN_FLIGHT)
    if batch.flush_disk_type == SYNC_FLUSH:
        writer.note_flushed(batch.end)
    writer.journal.add(batch)
    writer.clean_end.maybe_move()


def _rows(plan: BatchPlan, timestamp_ms: int) -> Iterator[Rows]:
    """The BATCH record, then the rows of the batch."""
    batch = plan.batch
    key_hash = javahash.index_hash(BATCH_TOPIC, batch.app_id)
    place = (batch.queue_offset, batch.physical_offset, plan.size)
    yield Rows.of([Row(BATCH_TOPIC, 0, *place, 0, timestamp_ms, [key_hash])])
    yield from plan.rows(timestamp_ms, with_data=False)
