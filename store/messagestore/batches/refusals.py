"""What the rules of batches say when they refuse one: what was found, what is allowed, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from messagestore.batches.plan import BatchRequest, Contents, PlannedWrite
from messagestore.errors import (
    BatchConflictError,
    LostBatchesError,
    QueryConflictError,
    StoreWentBackwardsError,
    VersionRegressionError,
)
from messagestore.format.batch_record import BatchRecord
from messagestore.log.batch_journal import JournalEntry

_APP_ID = "txnAppId (app_id of MessageStoreSink)"


# ---- which query the batches belong to


def replaced(request: BatchRequest, query_ids: Sequence[str]) -> QueryConflictError:
    """Another query has taken the app over for good."""
    return QueryConflictError(
        f"app {request.app_id!r}: found version {request.version} of query {request.query_id}, which "
        f"{f'query {query_ids[-1]}' if query_ids else 'the query of another checkpoint'} has replaced with "
        "onNewQuery=continue. A replaced query is refused for good, and nothing of this batch was written. Stop "
        f"this query, or give it a {_APP_ID} of its own",
        app_id=request.app_id or "",
        version=request.version,
    )


def another_query(request: BatchRequest, query_id: str, last: JournalEntry) -> QueryConflictError:
    """The app's batches are another query's."""
    return QueryConflictError(
        f"app {request.app_id!r}: found version {request.version} of query {request.query_id}, but the batches of this "
        f"app in the store, up to version {last.version}, are of query {query_id}. Causes: two queries with one "
        f"{_APP_ID}; a checkpoint that was deleted, or a query without checkpointLocation. Allowed is one query "
        f"for each {_APP_ID}, and nothing of this batch was written. Give this query a {_APP_ID} of its own, or "
        "continue from the old checkpoint. To give the app to this query for good, set onNewQuery=continue. Its "
        f"batches then count from 0 again, query {query_id} is refused from then on, and rows that both of them "
        "read are in the store twice",
        app_id=request.app_id or "",
        version=request.version,
    )


def taken_over_late(request: BatchRequest, root: str) -> LostBatchesError:
    """A query that takes an app over does not begin with its first batch."""
    app_id = request.app_id or ""
    return LostBatchesError(
        f"app {app_id!r}: onNewQuery=continue was set, but query {request.query_id} begins with version "
        f"{request.version}; allowed is version 0, the first batch of a new checkpoint. The batches before this "
        f"one went elsewhere, and nothing of this batch was written. Give this query a {_APP_ID} of its own (for "
        f"example {app_id + '-2'!r}), and run once: {start_command(app_id + '-2', request.version, root)}",
        app_id=app_id,
        version=request.version,
    )


def unknown_query(entry: JournalEntry, last: JournalEntry, request: BatchRequest) -> QueryConflictError:
    """Only one of the two queries of a known batch is known."""
    return QueryConflictError(
        f"app {request.app_id!r}: version {entry.version} is in the store, written by {_query(entry.query_id)}, and "
        f"came again from {_query(request.query_id)}. The app's last version is {last.version}. The store cannot tell "
        "whether this is a replay or another query, because foreachBatch on Spark Connect and batch writes have no "
        "query id. Nothing of this batch was written. Run this query on the kind of session that wrote the batch, or "
        f"give it a {_APP_ID} of its own",
        app_id=request.app_id or "",
        version=request.version,
    )


def partial(entry: JournalEntry, request: BatchRequest) -> BatchConflictError:
    """The store has only the beginning of the batch."""
    return BatchConflictError(
        f"app {request.app_id!r}: only a part of version {entry.version} is in the store (from {entry.physical_offset} "
        "on): a power cut took the rest of an ASYNC_FLUSH batch, and a broker opened the store before a Python "
        "writer did. Find out which rows are missing and write them in a batch of their own. With "
        "onReplayMismatch=skip, the rows of this batch are dropped. Before a hand-over, run `messagestore recover`",
        app_id=request.app_id or "",
        version=entry.version,
    )


def other_rows(entry: JournalEntry, request: BatchRequest, rows: int, digest: int) -> BatchConflictError:
    """The batch came again with other rows."""
    return BatchConflictError(
        f"app {request.app_id!r}: version {entry.version} is in the store with {entry.row_count} rows (digest "
        f"{entry.digest:016x}), and came again with {rows} rows (digest {digest:016x}). Nothing of this batch was "
        "written. Causes: a checkpoint that was rolled back or lost its last offsets; two queries or two writes under "
        "one txnAppId; columns such as uuid(), rand() or current_timestamp() that change on replay. `messagestore "
        "status` shows the last batch. Give each target an app id of its own, and leave such columns out. "
        "With onReplayMismatch=skip, the rows of this batch are dropped",
        app_id=request.app_id or "",
        version=entry.version,
    )


def other_rows_by_id(batch: BatchRecord, sent: Contents, planned: PlannedWrite) -> BatchConflictError:
    """A batch without an app id was committed again with other rows."""
    return BatchConflictError(
        f"batch {planned.batch_id}: is in the store with {batch.row_count} rows (digest {batch.digest:016x}), and "
        f"came again with {sent.row_count} rows (digest {sent.digest:016x}). Nothing of it was written. Plan a new "
        f"write for other rows",
        app_id=planned.batch_id,
        version=0,
    )


def planned_behind(root: str, end: int, planned: PlannedWrite) -> StoreWentBackwardsError:
    """The log ends before the place where a write was planned."""
    return StoreWentBackwardsError(
        f"{root}: the log ends at {end}, but ended at {planned.log_end} or later when this write was planned: the "
        f"store was restored. Whether the batch was in the log is unknown. Nothing of it was written. Start the write "
        f"again"
    )


def other_topics(
    entry: JournalEntry, request: BatchRequest, stored: Iterable[str], sent: Iterable[str]
) -> BatchConflictError:
    """The same rows came again for another topic."""
    before, now = _listed(stored), _listed(sent)
    return BatchConflictError(
        f"app {request.app_id!r}: version {entry.version} is in the store with rows for {before}, and came again with "
        f"rows for {now}. Allowed is one {_APP_ID} for each target, and nothing of this batch was written. If there "
        f"are two sinks, give the second one a {_APP_ID} of its own. If the topic of a sink was changed, write this "
        f"batch with {before} again, and change the topic afterwards",
        app_id=request.app_id or "",
        version=entry.version,
    )


def other_origin(batch: BatchRecord, entry: JournalEntry, request: BatchRequest) -> BatchConflictError:
    """The same rows came again from another origin."""
    return BatchConflictError(
        f"app {request.app_id!r}: version {entry.version} is in the store with origin {batch.origin!r:.200}, and came "
        f"again with origin {request.origin!r:.200}. Nothing of this batch was written. Begin where the origin of "
        f"MessageStore.last_batch says",
        app_id=request.app_id or "",
        version=entry.version,
    )


def before_the_start(last: JournalEntry, request: BatchRequest) -> VersionRegressionError:
    """An operator has said that the app begins with a later version."""
    app_id, version = request.app_id or "", request.version
    return VersionRegressionError(
        f"app {app_id!r}: found version {version}; allowed is version {last.version + 1}, with which the app "
        "begins according to `messagestore batches start`. Nothing of this batch was written. If the number was "
        f"wrong, give the query a new {_APP_ID} and start that one with version {version}. With "
        "onVersionRegression=skip, the rows of this batch are dropped",
        app_id=app_id,
        version=version,
    )


def older(last: JournalEntry, request: BatchRequest) -> VersionRegressionError:
    """The store has a later batch, but not this one."""
    app_id, version = request.app_id or "", request.version
    return VersionRegressionError(
        f"app {app_id!r}: version {version} is not in the store, but version {last.version} "
        f"({_query(last.query_id)}) is: the query was restarted from another or an older checkpoint. Give it a new "
        "txnAppId, continue from the right checkpoint, or set onVersionRegression=skip to drop these rows",
        app_id=app_id,
        version=version,
    )


def another_topic(batch: BatchRecord, last: JournalEntry, request: BatchRequest) -> QueryConflictError:
    """The app's last batch is for another topic."""
    return QueryConflictError(
        f"app {request.app_id!r}: found version {request.version} for {_target(request.topic)}, but its last batch in "
        f"the store, version {last.version} ({_query(last.query_id)}), is for {_target(batch.topic)}. Causes: this "
        "query got the checkpoint of another one; the option topic was changed. Nothing of this batch was written. "
        "Give each query its own checkpoint. If the topic was changed on purpose, set onNewTopic=continue for the next "
        "batch",
        app_id=request.app_id or "",
        version=request.version,
    )


def gap(last: JournalEntry, request: BatchRequest, root: str) -> LostBatchesError:
    """Batches between the app's last one and this one are missing."""
    app_id, version, expected = request.app_id or "", request.version, last.version + 1
    missing = f"version {expected} is" if version == expected + 1 else f"versions {expected} to {version - 1} are"

    return LostBatchesError(
        f"app {app_id!r}: found version {version}, but the last one in the store is {last.version} "
        f"({_query(last.query_id)}): {missing} not in the store (a backup was restored; ASYNC_FLUSH and a power "
        f"cut; a foreachBatch function that does not call the sink for every batch). Allowed is version {expected}, "
        f"and nothing of this batch was written. Stop the query and rewind its checkpoint, so that Spark writes the "
        f"missing ones again: messagestore checkpoint rewind CHECKPOINT {expected} --to NEW_FOLDER. To continue "
        f"without their rows, run once: {start_command(app_id, version, root)}. Or set onLostBatches=continue, "
        "which continues at every such gap",
        app_id=app_id,
        version=version,
    )


def no_batches(store_id: str, root: str, request: BatchRequest, *, complete: bool) -> LostBatchesError:
    """The store has no batch of the app, and this is not its first one."""
    app_id, version = request.app_id or "", request.version
    why = (
        "the log does not begin at 0, and the list of its batches was lost, so it is not known whether it held "
        "batches of this app"
        if not complete
        else "the store has no batch of this app. Causes: the disk is not mounted and this is another folder; an older "
        "backup was restored; the folder was deleted; the sink was added to a running query"
    )

    return LostBatchesError(
        f"app {app_id!r}: found version {version} ({_query(request.query_id)}) in store {store_id} at "
        f"{root}, but {why}. {no_history(app_id, version, root)}",
        app_id=app_id,
        version=version,
    )


def start_below(last: JournalEntry, request: BatchRequest) -> VersionRegressionError:
    """`messagestore batches start` names a version that the store is above."""
    return VersionRegressionError(
        f"app {request.app_id!r}: found start version {request.version + 1}, but the store has its batches up to "
        f"version {last.version} ({_query(last.query_id)}); allowed is a version above {last.version}. To begin "
        f"below it, give the query a new {_APP_ID}",
        app_id=request.app_id or "",
        version=request.version,
    )


# ---- what several of them say


def no_history(app_id: str, version: int, root: str) -> str:
    """The text for errors that says what is allowed, and what to do, if a store has no batch of an app."""
    return (
        "Allowed is version 0, and nothing of this batch was written (onLostBatches=continue does not help here). "
        "Bring the store with the earlier batches back, or begin with a new checkpoint. To let the app begin with "
        f"version {version}, run once: {start_command(app_id, version, root)}"
    )


def start_command(app_id: str, version: int, root: str) -> str:
    """The command after which an app begins with a version."""
    return f"`messagestore batches start {shlex.quote(root)} {shlex.quote(app_id)} {version}`"


def _listed(topics: Iterable[str]) -> str:
    names = sorted(topics)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ("topic " if len(names) == 1 else "topics ") + ", ".join(names[:5]) + more


def _target(topic: str | None) -> str:
    return "the topics that its rows name" if topic is None else f"topic {topic}"


def _query(query_id: str | None) -> str:
    return f"query {query_id}" if query_id else "an unknown query"
