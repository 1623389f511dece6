"""The rules that decide which batches a store accepts, which it knows already, and which it refuses.

A batch is known by its app id, its query id and its version. The rules apply in this order:

1. A query that another one has replaced is refused for good.
2. A query other than the one that wrote the app's batches is refused. With `onNewQuery=continue` it takes the app over:
   its versions count from 0 again, and its first BATCH record names the query ids it replaces.
3. A known version is not written again. It must have the same rows, for the same topics.
4. An unknown version below the last one is refused (`onVersionRegression`).
5. A version above the last one + 1 is refused if versions are Spark's batch ids (`onLostBatches`).
6. A batch with Spark's batch id goes to the topic of the batch before it, if the writer of one of them has only one
   (`onNewTopic`). The queries of two checkpoints that were swapped continue each other's apps with the right versions.
7. If the store has no batch of the app at all, a stream must begin with version 0. An operator who adds a sink to a
   running query says so once, with `messagestore batches start`: it appends an empty BATCH record for the version
   before.

A query id of None means "not known": a batch write, or foreachBatch on Spark Connect. Such a batch may continue
the batches of any query, and any query may continue its batches, but only at their end. A known version below the last
one might belong to another query, which nothing distinguishes, and is refused. `refusals` has the sentences.
"""

from __future__ import annotations

from dataclasses import dataclass

from messagestore.batches import refusals as refused
from messagestore.batches.plan import BatchRequest, ChunkSource, PlannedWrite
from messagestore.format.batch_record import SOURCE_NONE, SOURCE_SPARK, BatchRecord
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_journal import PARTIAL, BatchJournal, JournalEntry
from messagestore.log.batch_search import batches_from, read_batch
from messagestore.log.store_files import StoreFiles

APPENDED, KNOWN, SKIPPED = "appended", "known", "skipped"


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of appending a batch.

    Parameters
    ----------
    status : str
        "appended". "known": the store held the batch already, with the same rows. "skipped": the store holds it with
        other rows, or holds a later batch, and the request said to skip it.
    physical_offset, end : int
        Where the batch begins and ends in the log, in bytes from its origin; -1 if it was skipped.
    row_count : int
        The number of messages.
    appended_bytes : int
        The bytes that this call added to the log.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from messagestore import MessageColumns, MessageStore
    >>> rows = MessageColumns.from_arrow(pa.record_batch({"body": [b"B12", b"C3"]}), topic="gates", queue_id=0)
    >>> with MessageStore.open("store") as store:
    ...     result = store.append_batch(rows)
    >>> result.status, result.row_count, result.end - result.physical_offset == result.appended_bytes
    ('appended', 2, True)
    """

    status: str
    physical_offset: int
    end: int
    row_count: int
    appended_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say about a batch.

    Parameters
    ----------
    known : BatchResult | None
        The result if nothing has to be written. None: the batch has to be appended.
    replaces : tuple of str
        Query ids from which the batch takes its app over.
    """

    known: BatchResult | None = None
    replaces: tuple[str, ...] = ()


def decide(files: StoreFiles, journal: BatchJournal, source: ChunkSource, request: BatchRequest) -> Decision:
    """Apply the rules to a batch with an app id. The journal names batches that are in the log, or were below it.

    Raises
    ------
    QueryConflictError
        By rule 1, 2 or 6, or if it is not certain which query a known batch belongs to.
    BatchConflictError
        By rule 3.
    VersionRegressionError, LostBatchesError
        By rules 4, 5 and 7.
    """
    if request.start:
        return _start(journal, request)

    replaces = _replaced_by(files, journal, request)
    if replaces:
        return Decision(replaces=replaces)

    assert request.app_id is not None
    entry = journal.find(request.app_id, request.version)
    last = journal.last(request.app_id)
    if entry is not None and last is not None and not entry.start:
        _check_whose(entry, last, request)
        return Decision(_known(files, entry, source, request))

    if last is None:
        _check_first(files, journal, request)
    elif request.version <= last.version:
        return Decision(_older(last, request))
    elif request.version_source == SOURCE_SPARK:
        _check_same_topic(files, last, request)
        if request.on_lost_batches == "fail":
            _check_gap(files, last, request)
    return Decision()


def decide_by_id(files: StoreFiles, end: int, batch_count: int, source: ChunkSource, planned: PlannedWrite) -> Decision:
    """Whether a batch without an app id is in the log: it is looked for behind the place where its write was planned.

    The journal has no such batches, and nobody needs them for longer than a lost answer is asked for again. A batch
    whose BATCH record retention has deleted meanwhile does not count: the newest segment is never deleted.

    Parameters
    ----------
    end : int
        Where the log ends.
    batch_count : int
        The number of units of the BATCH queue.

    Raises
    ------
    StoreWentBackwardsError
        The log ends before the place where the write was planned: it was restored, or is another one.
    BatchConflictError
        The batch is there with other rows.
    CorruptionError
        A BATCH record behind that place cannot be read.
    """
    if planned.log_end > end:
        raise refused.planned_behind(files.paths.root, end, planned)

    first = files.queue(BATCH_TOPIC, 0).search_physical(planned.log_end)
    for batch in batches_from(files, first, batch_count):
        if batch.version_source == SOURCE_NONE and batch.app_id == planned.batch_id:
            sent = source.contents
            if (batch.row_count, batch.digest) != (sent.row_count, sent.digest):
                raise refused.other_rows_by_id(batch, sent, planned)
            return Decision(BatchResult(KNOWN, batch.physical_offset, batch.end, batch.row_count))
    return Decision()


# ---- which query the batches belong to


def _replaced_by(files: StoreFiles, journal: BatchJournal, request: BatchRequest) -> tuple[str, ...]:
    """Query ids from which this batch takes its app over; empty if its query is the app's query, or is not known."""
    app_id, query_id = request.app_id, request.query_id
    assert app_id is not None
    if query_id is None:
        return ()

    query_ids = journal.query_ids(app_id)
    if query_id in journal.replaced(app_id):
        raise refused.replaced(request, query_ids)
    if not query_ids or query_ids[-1] == query_id:
        return ()

    last = journal.last(app_id)
    assert last is not None
    if request.on_new_query == "fail":
        raise refused.another_query(request, query_ids[-1], last)
    if request.version_source == SOURCE_SPARK and request.version:
        raise refused.taken_over_late(request, files.paths.root)
    return tuple(query_ids)


def _check_whose(entry: JournalEntry, last: JournalEntry, request: BatchRequest) -> None:
    """Refuse a known version below the last one if only one of the two queries is known: they may differ."""
    if (entry.query_id is None) != (request.query_id is None) and entry.version != last.version:
        raise refused.unknown_query(entry, last, request)


# ---- known batches


def _known(files: StoreFiles, entry: JournalEntry, source: ChunkSource, request: BatchRequest) -> BatchResult:
    sent = source.contents
    rows, digest = sent.row_count, sent.digest

    log = files.commit_log
    batch = read_batch(log, entry.physical_offset) if entry.physical_offset >= log.min_offset else None
    _check_topics(batch, entry, sent.topics, request)

    if (rows, digest) == (entry.row_count, entry.digest):
        _check_origin(batch, entry, request)
        return BatchResult(KNOWN, entry.physical_offset, entry.end, entry.row_count)
    if request.on_replay_mismatch == "skip":
        return BatchResult(SKIPPED, entry.physical_offset, entry.end, entry.row_count)
    if entry.row_count == PARTIAL:
        raise refused.partial(entry, request)
    raise refused.other_rows(entry, request, rows, digest)


def _check_topics(
    batch: BatchRecord | None, entry: JournalEntry, topics: frozenset[str], request: BatchRequest
) -> None:
    """Refuse the same rows for another topic: they are not a replay, and a second sink must not lose them silently."""
    stored_topics = set(batch.ranges) if batch is not None else set(entry.topics)

    # A batch without rows has no topic; the digest shows whether rows are missing.
    if stored_topics and topics and stored_topics != topics:
        raise refused.other_topics(entry, request, stored_topics, topics)


def _check_origin(batch: BatchRecord | None, entry: JournalEntry, request: BatchRequest) -> None:
    """Refuse the same rows from another origin: the caller takes its next place from the origin in the store."""
    if batch is not None and request.origin is not None and batch.origin != request.origin:
        raise refused.other_origin(batch, entry, request)


# ---- batches that are not known


def _older(last: JournalEntry, request: BatchRequest) -> BatchResult:
    if request.on_version_regression == "skip":
        return BatchResult(SKIPPED, -1, -1, 0)
    if last.start:
        raise refused.before_the_start(last, request)
    raise refused.older(last, request)


def _check_same_topic(files: StoreFiles, last: JournalEntry, request: BatchRequest) -> None:
    """Refuse another topic than that of the app's last batch: its query has probably got the checkpoint of another."""
    if request.on_new_topic == "continue" or last.version_source != SOURCE_SPARK or last.start:
        return
    log = files.commit_log
    batch = read_batch(log, last.physical_offset) if last.physical_offset >= log.min_offset else None
    if batch is None or (batch.restated and batch.topic is None) or batch.topic == request.topic:
        return  # without its record, nobody knows the topic
    raise refused.another_topic(batch, last, request)


def _check_gap(files: StoreFiles, last: JournalEntry, request: BatchRequest) -> None:
    if request.version != last.version + 1:
        raise refused.gap(last, request, files.paths.root)


def _check_first(files: StoreFiles, journal: BatchJournal, request: BatchRequest) -> None:
    must_begin = request.version_source == SOURCE_SPARK or request.stream_batch_id or not journal.complete
    if request.version and must_begin:
        raise refused.no_batches(files.store_id, files.paths.root, request, complete=journal.complete)


# ---- messagestore batches start


def _start(journal: BatchJournal, request: BatchRequest) -> Decision:
    assert request.app_id is not None
    last = journal.last(request.app_id)
    if last is None or last.version < request.version:
        return Decision()
    if last.version == request.version:
        return Decision(BatchResult(KNOWN, last.physical_offset, last.end, last.row_count))
    raise refused.start_below(last, request)
