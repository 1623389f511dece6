"""The rules that decide which batches a store accepts, which it knows already, and which it refuses.

A batch is known by its app id, its query id and its version. The rules apply in this order:

1. A query that another one has replaced is refused for good.
2. A query other than the one that wrote the app's batches is refused. With `onNewQuery=continue` it takes the app over:
   its versions count from 0 again, and its first BATCH record names the query ids it replaces.
3. A known version is not written again. It must have the same rows, for the same topics.
4. An unknown version below the last one is refused (`onVersionRegression`).
5. A version above the last one + 1 is refused if versions are Spark's batch ids (`onLostBatches`).
6. If the store has no batch of the app at all, a stream must begin with version 0. An operator who adds a sink to a
   running query says so once, with `messagestore batches start`: it appends an empty BATCH record for the version
   before.

A query id of None means "not known": a batch write, or foreachBatch on Spark Connect. Such a batch may continue
the batches of any query, and any query may continue its batches, but only at their end. A known version below the last
one might belong to another query, which nothing distinguishes, and is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from messagestore.errors import BatchConflictError, LostBatchesError, QueryConflictError, VersionRegressionError
from messagestore.format.batch_record import SOURCE_SPARK, BatchRecord
from messagestore.log.batch_journal import PARTIAL, BatchJournal, JournalEntry
from messagestore.log.batch_search import read_batch
from messagestore.log.store_files import StoreFiles
from messagestore.write.batch_plan import BatchRequest, ChunkSource, digests_of_batch

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
        By rule 1 or 2, or if it is not certain which query a known batch belongs to.
    BatchConflictError
        By rule 3.
    VersionRegressionError, LostBatchesError
        By rules 4 to 6.
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
    elif request.version_source == SOURCE_SPARK and request.on_lost_batches == "fail":
        _check_gap(files, last, request)
    return Decision()


# ---- which query the batches belong to


def _replaced_by(files: StoreFiles, journal: BatchJournal, request: BatchRequest) -> tuple[str, ...]:
    """Query ids from which this batch takes its app over; empty if its query is the app's query, or is not known."""
    app_id, query_id = request.app_id, request.query_id
    assert app_id is not None
    if query_id is None:
        return ()
    known = journal.query_ids(app_id)
    if query_id in journal.replaced(app_id):
        raise QueryConflictError(
            f"app {app_id!r}: found version {request.version} of query {query_id}, which "
            f"{f'query {known[-1]}' if known else 'the query of another checkpoint'} has replaced with "
            "onNewQuery=continue. A replaced query is refused for good, and nothing of this batch was written. Stop "
            f"this query, or give it a {_APP_ID} of its own",
            app_id=app_id,
            version=request.version,
        )
    if not known or known[-1] == query_id:
        return ()
    last = journal.last(app_id)
    assert last is not None
    if request.on_new_query == "fail":
        raise QueryConflictError(
            f"app {app_id!r}: found version {request.version} of query {query_id}, but the batches of this app in "
            f"the store, up to version {last.version}, are of query {known[-1]}. Causes: two queries with one "
            f"{_APP_ID}; a checkpoint that was deleted, or a query without checkpointLocation. Allowed is one query "
            f"for each {_APP_ID}, and nothing of this batch was written. Give this query a {_APP_ID} of its own, or "
            "continue from the old checkpoint. To give the app to this query for good, set onNewQuery=continue. Its "
            f"batches then count from 0 again, query {known[-1]} is refused from then on, and rows that both of them "
            "read are in the store twice",
            app_id=app_id,
            version=request.version,
        )
    if request.version_source == SOURCE_SPARK and request.version:
        raise LostBatchesError(
            f"app {app_id!r}: onNewQuery=continue was set, but query {query_id} begins with version "
            f"{request.version}; allowed is version 0, the first batch of a new checkpoint. The batches before this "
            f"one went elsewhere, and nothing of this batch was written. Give this query a {_APP_ID} of its own (for "
            f"example {app_id + '-2'!r}), and run once: {_start_command(files, app_id + '-2', request.version)}",
            app_id=app_id,
            version=request.version,
        )
    return tuple(known)


def _check_whose(entry: JournalEntry, last: JournalEntry, request: BatchRequest) -> None:
    """Refuse a known version below the last one if only one of the two queries is known: they may differ."""
    if (entry.query_id is None) == (request.query_id is None) or entry.version == last.version:
        return
    raise QueryConflictError(
        f"app {request.app_id!r}: version {entry.version} is in the store, written by {_query(entry.query_id)}, and "
        f"came again from {_query(request.query_id)}. The app's last version is {last.version}. The store cannot tell "
        "whether this is a replay or another query, because foreachBatch on Spark Connect and batch writes have no "
        "query id. "
        "Nothing of this batch was written. Run this query on the kind of session that wrote the batch, or give it "
        f"a {_APP_ID} of its own",
        app_id=request.app_id or "",
        version=request.version,
    )


# ---- known batches


def _known(files: StoreFiles, entry: JournalEntry, source: ChunkSource, request: BatchRequest) -> BatchResult:
    app_id = request.app_id or ""
    rows, topics = 0, set[str]()
    each: list[Mapping[str, int]] = []
    for index in range(len(source)):
        chunk = source.read(index, with_data=False)
        rows += chunk.row_count
        each.append(chunk.digests)
        topics.update(chunk.run_topics, (topic for topic, _ in chunk.real_queues))
    log = files.commit_log
    batch = read_batch(log, entry.physical_offset) if entry.physical_offset >= log.min_offset else None
    _check_topics(batch, entry, topics, app_id)
    digests, there = digests_of_batch(each), batch or entry  # an earlier release may have written the journal
    if rows == entry.row_count and (not rows or digests.get(there.digest_name) == there.digest):
        _check_origin(batch, entry, request)
        return BatchResult(KNOWN, entry.physical_offset, entry.end, entry.row_count)
    if request.on_replay_mismatch == "skip":
        return BatchResult(SKIPPED, entry.physical_offset, entry.end, entry.row_count)
    if entry.row_count == PARTIAL:
        raise BatchConflictError(
            f"app {app_id!r}: only a part of version {entry.version} is in the store (from {entry.physical_offset} "
            "on): a power cut took the rest of an ASYNC_FLUSH batch, and a broker opened the store before a Python "
            "writer did. Find out which rows are missing and write them in a batch of their own. With "
            "onReplayMismatch=skip, the rows of this batch are dropped. Before a hand-over, run `messagestore recover`",
            app_id=app_id,
            version=entry.version,
        )
    if rows == entry.row_count and there.digest_name not in digests:
        raise BatchConflictError(
            f"app {app_id!r}: version {entry.version} is in the store with the digest {there.digest_name}, and came "
            f"again with as many rows and the digest {' and '.join(digests) or 'none'}, so it is not known whether "
            "they are the same. Cause: another release wrote the batch, or runs on a part of the executors. Nothing of "
            "this batch was written. Use one release, the newest of them, on the driver and on all executors, and "
            "write the batch again",
            app_id=app_id,
            version=entry.version,
        )
    came = f"{digests[there.digest_name]:016x}" if there.digest_name in digests else "not computed"
    raise BatchConflictError(
        f"app {app_id!r}: version {entry.version} is in the store with {entry.row_count} rows (digest "
        f"{there.digest:016x}), and came again with {rows} rows (digest {came}). Nothing of this batch was "
        "written. Causes: a checkpoint that was rolled back or lost its last offsets; two queries or two writes under "
        "one txnAppId; columns such as uuid(), rand() or current_timestamp() that change on replay. `messagestore "
        "status` shows the last batch. Give each target an app id of its own, and leave such columns out. "
        "With onReplayMismatch=skip, the rows of this batch are dropped",
        app_id=app_id,
        version=entry.version,
    )


def _check_topics(batch: BatchRecord | None, entry: JournalEntry, topics: set[str], app_id: str) -> None:
    """Refuse the same rows for another topic: they are not a replay, and a second sink must not lose them silently."""
    found = set(batch.ranges) if batch is not None else None if entry.topics is None else set(entry.topics)
    if found is None or not found or not topics or found == topics:
        return  # a batch without rows has no topic; the digest shows whether rows are missing
    there, came = _listed(found), _listed(topics)
    raise BatchConflictError(
        f"app {app_id!r}: version {entry.version} is in the store with rows for {there}, and came again with rows "
        f"for {came}. Allowed is one {_APP_ID} for each target, and nothing of this batch was written. If there are "
        f"two sinks, give the second one a {_APP_ID} of its own. If the topic of a sink was changed, write this batch "
        f"with {there} again, and change the topic afterwards",
        app_id=app_id,
        version=entry.version,
    )


def _check_origin(batch: BatchRecord | None, entry: JournalEntry, request: BatchRequest) -> None:
    """Refuse the same rows from another origin: the caller takes its next place from the origin in the store."""
    if batch is None or request.origin is None or batch.origin == request.origin:
        return
    raise BatchConflictError(
        f"app {request.app_id!r}: version {entry.version} is in the store with origin {batch.origin!r:.200}, and came "
        f"again with origin {request.origin!r:.200}. Nothing of this batch was written. Begin where the origin of "
        f"MessageStore.last_batch says",
        app_id=request.app_id or "",
        version=entry.version,
    )


def _listed(topics: set[str]) -> str:
    names = sorted(topics)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ("topic " if len(names) == 1 else "topics ") + ", ".join(names[:5]) + more


# ---- batches that are not known


def _older(last: JournalEntry, request: BatchRequest) -> BatchResult:
    if request.on_version_regression == "skip":
        return BatchResult(SKIPPED, -1, -1, 0)
    app_id, version = request.app_id or "", request.version
    if last.start:
        raise VersionRegressionError(
            f"app {app_id!r}: found version {version}; allowed is version {last.version + 1}, with which the app "
            "begins according to `messagestore batches start`. Nothing of this batch was written. If the number was "
            f"wrong, give the query a new {_APP_ID} and start that one with version {version}. With "
            "onVersionRegression=skip, the rows of this batch are dropped",
            app_id=app_id,
            version=version,
        )
    raise VersionRegressionError(
        f"app {app_id!r}: version {version} is not in the store, but version {last.version} "
        f"({_query(last.query_id)}) is: the query was restarted from another or an older checkpoint. Give it a new "
        "txnAppId, continue from the right checkpoint, or set onVersionRegression=skip to drop these rows",
        app_id=app_id,
        version=version,
    )


def _check_gap(files: StoreFiles, last: JournalEntry, request: BatchRequest) -> None:
    app_id, version, expected = request.app_id or "", request.version, last.version + 1
    if version == expected:
        return
    missing = f"version {expected} is" if version == expected + 1 else f"versions {expected} to {version - 1} are"
    raise LostBatchesError(
        f"app {app_id!r}: found version {version}, but the last one in the store is {last.version} "
        f"({_query(last.query_id)}): {missing} not in the store (a backup was restored; ASYNC_FLUSH and a power "
        f"cut; a foreachBatch function that does not call the sink for every batch). Allowed is version {expected}, "
        f"and nothing of this batch was written. Stop the query and rewind its checkpoint, so that Spark writes the "
        f"missing ones again: messagestore checkpoint rewind CHECKPOINT {expected} --to NEW_FOLDER. To continue "
        f"without their rows, run once: {_start_command(files, app_id, version)}. Or set onLostBatches=continue, "
        "which continues at every such gap",
        app_id=app_id,
        version=version,
    )


def _check_first(files: StoreFiles, journal: BatchJournal, request: BatchRequest) -> None:
    app_id, version = request.app_id or "", request.version
    incomplete = not journal.complete
    spark = request.version_source == SOURCE_SPARK
    if not version or not (spark or request.stream_batch_id or incomplete):
        return
    why = (
        "the log does not begin at 0, and the list of its batches was lost, so it is not known whether it held "
        "batches of this app"
        if incomplete
        else "the store has no batch of this app. Causes: the disk is not mounted and this is another folder; an older "
        "backup was restored; the folder was deleted; the sink was added to a running query"
    )
    raise LostBatchesError(
        f"app {app_id!r}: found version {version} ({_query(request.query_id)}) in store {files.store_id} at "
        f"{files.paths.root}, but {why}. {no_history(app_id, version, files.paths.root)}",
        app_id=app_id,
        version=version,
    )


def no_history(app_id: str, version: int, root: str) -> str:
    """The text for errors that says what is allowed, and what to do, if a store has no batch of an app."""
    return (
        "Allowed is version 0, and nothing of this batch was written (onLostBatches=continue does not help here). "
        "Bring the store with the earlier batches back, or begin with a new checkpoint. To let the app begin with "
        f"version {version}, run once: {start_command(app_id, version, root)}"
    )


# ---- messagestore batches start


def _start(journal: BatchJournal, request: BatchRequest) -> Decision:
    assert request.app_id is not None
    last = journal.last(request.app_id)
    if last is None or last.version < request.version:
        return Decision()
    if last.version == request.version:
        return Decision(BatchResult(KNOWN, last.physical_offset, last.end, last.row_count))
    raise VersionRegressionError(
        f"app {request.app_id!r}: found start version {request.version + 1}, but the store has its batches up to "
        f"version {last.version} ({_query(last.query_id)}); allowed is a version above {last.version}. To begin "
        f"below it, give the query a new {_APP_ID}",
        app_id=request.app_id,
        version=request.version,
    )


def start_command(app_id: str, version: int, root: str) -> str:
    """The command after which an app begins with a version."""
    return f"`messagestore batches start {shlex.quote(root)} {shlex.quote(app_id)} {version}`"


def _start_command(files: StoreFiles, app_id: str, version: int) -> str:
    return start_command(app_id, version, files.paths.root)


_APP_ID = "txnAppId (app_id of MessageStoreSink)"


def _query(query_id: str | None) -> str:
    return f"query {query_id}" if query_id else "an unknown query"
