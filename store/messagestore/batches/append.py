"""Appends a whole batch to the log once, or not at all: applies the rules, plans the batch, and checks the room for it.

`writer.whole_batch` writes what was planned, seals it and makes it visible. A batch comes as chunks of encoded records;
the chunk limits the memory, and not the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from messagestore.batches.plan import BatchPlan, BatchRequest, Chunks, ChunkSource, OwnRequest, PlannedWrite, Restated
from messagestore.batches.progress import Move, ProgressToMove
from messagestore.batches.rules import APPENDED, KNOWN, SKIPPED, BatchResult, Decision, decide, decide_by_id
from messagestore.errors import ConfigError, LostBatchesError, StoreFullError
from messagestore.format.batch_record import check_app_id
from messagestore.format.config import ASYNC_FLUSH, SYNC_FLUSH
from messagestore.format.layout import UNIT
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import Row
from messagestore.log.batch_journal import BatchJournal, JournalEntry
from messagestore.log.batch_search import batch_is_there, known_batch
from messagestore.writer import whole_batch
from messagestore.writer.log_writer import LogWriter

__all__ = [
    "APPENDED",
    "KNOWN",
    "SKIPPED",
    "BatchRequest",
    "BatchResult",
    "Chunks",
    "PlannedWrite",
    "append_batch",
    "append_own",
]

_NAMES = 16
"""How many names a batch needs besides those of its queues: segments, index, BATCH queue, and small files."""


def append_batch(
    writer: LogWriter,
    source: ChunkSource,
    request: BatchRequest,
    *,
    planned: PlannedWrite | None = None,
    own: bool = False,
    progress: ProgressToMove | None = None,
) -> BatchResult:
    """Append a batch. The log contains all of it once if this returns, and nothing of it if this raises.

    Parameters
    ----------
    writer : LogWriter
        The caller holds the writer lock.
    source : ChunkSource
    request : BatchRequest
    planned : PlannedWrite | None
        Recognises a batch without an app id that was appended before. None: such a batch is appended in any case.
    own : bool
        The store made the records itself: their topics, which are in `config/topics.json`, and queues are not checked.
    progress : ProgressToMove | None
        The progress of consumer groups that the batch moves. If the batch is known, it has moved it already.

    Raises
    ------
    ProgressConflictError, StoreLockedError
        The progress is not the caller's to move; nothing was written.
    BatchConflictError, QueryConflictError, VersionRegressionError, LostBatchesError
        The rules in `rules` refuse the batch; nothing was written.
    MessageIllegalError
        A topic, queue or size is not allowed; nothing was written.
    StoreFullError
        The disk is full; nothing of the batch is in the log.
    StorePoisonedError
        A sync failed; the next opening of the store decides whether the batch is in the log.
    """
    if progress is not None and request.flush_disk_type != SYNC_FLUSH:
        raise ConfigError(
            f"progress: found {request.flush_disk_type} in the request; allowed is SYNC_FLUSH. A power cut could take "
            f"the results and leave the progress",
            key="progress",
        )
    with _ready(writer, request), ExitStack() as held:
        decision = _check_journal(writer, source, request, planned)
        stored = decision.known
        if stored is not None:
            if request.flush_disk_type == SYNC_FLUSH and stored.end > writer.synced_end:
                writer.sync_to_end()  # it was appended with ASYNC_FLUSH, and is now acknowledged as synced
                writer.note_flushed(stored.end)
            return stored
        writer.check_disk()
        end = writer.end.physical_offset
        move = None if progress is None else Move(writer, progress, held)
        plan = BatchPlan(
            writer.files,
            end,
            writer.numbers.next_offset,
            source,
            request,
            decision.replaces,
            own=own,
            batch_id=None if planned is None else planned.batch_id,
            progress=None if move is None else move.begin,
        )
        _append(writer, plan)
        if move is not None:
            move.finish()
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
        timestamp_ms = _append(writer, plan)
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


def _append(writer: LogWriter, plan: BatchPlan) -> int:
    """Write a planned batch for which there is room; returns its store time."""
    _check_space(writer, plan)
    return whole_batch.append(writer, plan)


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
        restated = [batch for batch in newest_batches(writer.journal) if batch[1].physical_offset < below]
        for app_id, entry in restated:
            _restate(writer, app_id, entry)
        return [(app_id, entry.version) for app_id, entry in restated]


def newest_batches(journal: BatchJournal) -> list[tuple[str, JournalEntry]]:
    """The batches from which the rules recognise an app's next ones: the last one, and the last one that names a query.

    In each pair, the first is the app's id.
    """
    batches = []
    for app_id in journal.app_ids():
        last = journal.last(app_id)
        if last is None:
            continue
        if last.query_id is None:
            batches += [(app_id, entry) for entry in journal.entries(app_id) if entry.query_id is not None][-1:]
        batches.append((app_id, last))
    return batches


def _restate(writer: LogWriter, app_id: str, entry: JournalEntry) -> None:
    below_log = entry.physical_offset < writer.log.min_offset
    batch = None if below_log else known_batch(writer.log, entry.physical_offset)
    head = None if batch is None else writer.log.head(entry.physical_offset)
    request = OwnRequest(  # also those of the store itself
        app_id=app_id,
        version=entry.version,
        version_source=entry.version_source,
        query_id=entry.query_id,
        flush_disk_type=ASYNC_FLUSH,
        start=entry.start,
        origin=None if batch is None else batch.origin,
        topic=None if batch is None else batch.topic,
    )
    born_ms = None if head is None else int(head["born_timestamp_ms"])
    restated = Restated(entry, tuple(sorted(writer.journal.replaced(app_id))), born_ms)
    end = writer.end.physical_offset
    plan = BatchPlan(writer.files, end, writer.numbers.next_offset, Chunks(), request, restated=restated)
    _append(writer, plan)


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


def _check_journal(
    writer: LogWriter, source: ChunkSource, request: BatchRequest, planned: PlannedWrite | None
) -> Decision:
    """Apply the rules of `rules`, after entries that the log has lost were removed from the journal."""
    if request.app_id is None:
        end, count = writer.end.physical_offset, writer.numbers.next_offset(BATCH_TOPIC, 0)
        return Decision() if planned is None else decide_by_id(writer.files, end, count, source, planned)
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
    """Refuse a batch for which the disk has no room, in bytes or in names. Once it is in the log, it must be published.

    Raises
    ------
    StoreFullError
        Nothing was written.
    """
    needed = plan.batch.end - writer.end.physical_offset + plan.row_count * 64
    free = writer.files.disk.free(writer.files.paths.root)
    _check_names(writer, plan, free)
    if free < needed:
        raise StoreFullError(
            f"{writer.files.paths.root}: this batch needs about {needed} bytes, but {free} are free. Nothing of it was "
            f"written. Make room and try again",
            path=writer.files.paths.root,
            needed=needed,
            free=free,
        )


def _check_names(writer: LogWriter, plan: BatchPlan, free: int) -> None:
    """Refuse a batch whose queues need more new files and folders than the file system can make (inodes)."""
    files = writer.files
    possible = files.disk.free_names(files.paths.root)
    unit_count = max(1, files.config.mapped_file_size_consume_queue // UNIT.size)
    if possible is None or possible >= _NAMES + 3 * len(plan.counts) + plan.row_count // unit_count:
        return
    needed = _NAMES + (plan.batch.end - writer.end.physical_offset) // writer.log.segment_size
    for (topic, queue_id), count in plan.counts.items():
        queue, first = files.queue(topic, queue_id), plan.first_offsets[topic, queue_id]
        size = queue.file_size // UNIT.size
        end_of_files = queue.end_file_queue_offset if queue.offsets else first // size * size
        needed += max(0, -(-(first + count - end_of_files) // size))
        needed += 0 if queue.offsets else 2  # the folders of the queue and, perhaps, of its topic
    if possible < needed:
        raise StoreFullError(
            f"{files.paths.root}: this batch needs about {needed} new files and folders, but the file system can make "
            f"{possible} (inodes; `df -i` shows them). Nothing of it was written. Make room and try again",
            path=files.paths.root,
            needed=needed,
            free=free,
        )
