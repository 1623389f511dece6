"""`messagestore lag`: how far readers of a store are behind its end."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from messagestore import ConfigError, StoreUnavailableError, StoreWentBackwardsError
from messagestore.spi import Location, Report, StoreReader
from pyspark_messagestore.checkpoint.spark_checkpoint import read_progress, stream_offset
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, Json, by_location, named_report, opened_parts, path_of
from pyspark_messagestore.source.offsets import StreamOffset
from pyspark_messagestore.source.same_log import place_now

PLACE = 150
PANEL = "Topics and groups"


@by_location
def lag(
    root: Location,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            help="The checkpointLocation of a streaming query that reads this store. Spark need not run.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="GROUP", help="A consumer group, as `groups` shows it.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how many messages and bytes a reader is behind the end of each queue, and since when the oldest of them
    waits. The reader is a streaming query, by its checkpoint, or a consumer group.
    """
    if (checkpoint is None) == (group is None):
        raise ConfigError("lag: give exactly one of --checkpoint and --group", key="lag")

    if group is not None:
        with out.waiting("adding up sizes"), opened_parts(root) as stores:
            rows, faults = named_report((name, store.group_lag(group)) for name, store in stores.items())
        if not rows and not faults:
            shows = "`mqadmin consumerProgress`" if root.is_cluster else "`messagestore groups`"
            raise ConfigError(
                f"consumer group {group!r} has no offsets in {root}; {shows} shows those that have",
                key="--group",
                value=group,
            )
        rows = [{"group": group, **row} for row in rows]
    else:
        assert checkpoint is not None
        rows, faults = _of_checkpoint(root, path_of(checkpoint))

    if as_json:
        for row in rows:
            out.json_line(row)
    else:
        _lag_table(rows)

    for fault in faults:
        out.note(f"messagestore: {fault}")
    if faults:
        raise typer.Exit(FOUND_NOTHING)


def _of_checkpoint(root: Location, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of each source of a query that reads this store, after its newest batch that is done."""
    progress = read_progress(folder)
    batch = progress.committed
    if batch is None:
        raise ConfigError(f"{progress.path}: no batch of this query is done yet", key="--checkpoint", value=folder)
    if batch.fault:
        raise ConfigError(batch.fault, key="--checkpoint", value=folder)

    reports = []
    with opened_parts(root) as stores:
        fields_of = dict(enumerate(batch.offsets))
        for name, store in _read_by(fields_of, stores, root, progress.path).items():
            for source, offset in _sources(store, name, root, progress.path, fields_of).items():
                with out.waiting("adding up sizes"):
                    rows, faults = _behind(store, offset)
                told = {"queryId": progress.query_id, "batchId": batch.batch_id, "source": source}
                reports.append((name, ([told | row for row in rows], faults)))
        rows, faults = named_report(reports)

    # Spark has planned a batch that it has not done, and runs it again after a restart.
    if progress.next_batch_id <= progress.batches[-1].batch_id:
        out.note(f"batch {progress.next_batch_id} is planned and not done; its messages count as lag")
    return rows, faults


def _read_by(
    fields_of: dict[int, Any], stores: dict[str, StoreReader], root: Location, folder: str
) -> dict[str, StoreReader]:
    """The stores that a query has read: of a whole cluster, the brokers that its offset names."""
    if not root.is_cluster or root.broker:
        return stores
    names = {name for fields in fields_of.values() for name in (fields or {}).get("brokers", {})}
    if not names and len(stores) > 1:
        raise ConfigError(
            f"{folder}: this query does not read a whole cluster, but {root} has the brokers {', '.join(stores)}. Give "
            f"the broker that the query reads, as in {root}/{min(stores)}",
            key="ROOT",
            value=str(root),
        )

    unknown = sorted(names - stores.keys())
    if unknown:
        raise StoreUnavailableError(
            f"{folder}: this query reads the brokers {', '.join(sorted(names))}, but the name servers of {root} do not "
            f"know {', '.join(unknown)}. Start them, or correct the address"
        )
    return {name: store for name, store in stores.items() if name in names or not names}


def _behind(store: StoreReader, offset: StreamOffset) -> Report:
    """How far a query is behind in one store."""
    committed, refused = place_now(store, offset)
    rows, wrong = store.lag(committed, offset.topics)
    for row in rows:
        row["committedOffset"] = offset.queues.get((row["topic"], row["queueId"]))
    faults = [
        f"{fault}. The query refuses this store, unless failOnDataLoss=false. The lag counts from the first message "
        "that is newer than what it has read"
        for fault in refused
    ]
    return rows, faults + wrong


def _sources(
    store: StoreReader, name: str, root: Location, folder: str, fields_of: dict[int, Any]
) -> dict[int, StreamOffset]:
    """The sources of a query that read the store, by their numbers."""
    if name:  # a query of a whole cluster has an offset for each broker
        fields_of = {i: (fields or {}).get("brokers", {}).get(name, fields) for i, fields in fields_of.items()}
    ours = {i: offset for i, fields in fields_of.items() if (offset := stream_offset(fields)) is not None}
    here = store.describe([])
    store_ids = {here.store_id, *here.ancestors, ""}
    of_store = {source: offset for source, offset in ours.items() if offset.store_id in store_ids}

    if not of_store:
        ids = ", ".join(sorted({offset.store_id for offset in ours.values()}))
        raise StoreWentBackwardsError(
            f"{folder}: this query reads {'store ' + ids if ids else 'no message store'}, but {root} is store "
            f"{here.store_id or 'without an id'}. Give the store that the query reads"
        )
    return of_store


def _lag_table(rows: list[dict[str, Any]]) -> None:
    titles = [("topic", False), ("queue", True), ("read up to", True), ("min", True), ("max", True)]
    titles += [("lag", True), ("bytes", True), ("oldest unread", False)]
    if any(row.get("source") for row in rows):
        titles.insert(0, ("source", True))
    if any("brokerName" in row for row in rows):
        titles.insert(0, ("broker", False))
    firsts = [name for title, name in (("broker", "brokerName"), ("source", "source")) if title in dict(titles)]

    cells = []
    for row in rows:
        oldest = row["oldestUnread"]
        cell: list[object] = [
            row["topic"],
            row["queueId"],
            "-" if row["committedOffset"] is None else row["committedOffset"],
            row["minOffset"],
            row["maxOffset"],
            f"{row['lag']:,}",
            out.size_words(row["lagBytes"]),
            "-" if oldest is None else out.time_words(oldest),
        ]
        cells.append([*(row[name] for name in firsts), *cell])
    out.table(titles, cells)

    behind = sum(max(0, row["lag"]) for row in rows)
    total = f"{out.count_words(behind, 'message')}, {out.size_words(sum(row['lagBytes'] for row in rows))} behind"
    times = [row["oldestUnread"] for row in rows if row["oldestUnread"] is not None]
    out.line(f"{total}; the oldest was stored {out.time_words(min(times))}" if times else total)
