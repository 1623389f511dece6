"""`messagestore checkpoint show` and `rewind`: the checkpoint of a streaming query, while Spark is stopped."""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Any

import typer

from messagestore import ConfigError
from pyspark_messagestore.checkpoint.spark_checkpoint import (
    Batch,
    Checkpoint,
    copy_rewound,
    files_of,
    read_checkpoint,
    stream_offset,
)
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, Json, path_of
from pyspark_messagestore.source.offsets import StreamOffset

PLACE = 450
PANEL = "Spark"

_SHOWN_BATCHES = 10
_SHOWN_ROWS = 1000

checkpoint = typer.Typer(
    no_args_is_help=True,
    help="Show the checkpoint of a streaming query, or copy it as it was before a batch.",
)

CheckpointFolder = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="The folder that is the query's checkpointLocation.", show_default=False),
]


@checkpoint.command("show")
def show(
    checkpoint: CheckpointFolder,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Show at most N batches, the newest; --json shows all.")
    ] = _SHOWN_BATCHES,
    as_json: Json = False,
) -> None:
    """Show the batches that a checkpoint holds, how far each has read, and from which of them the query can run again.
    Spark need not run, and nothing is written.
    """
    contents = read_checkpoint(path_of(checkpoint))
    if as_json:
        out.json_line(_fields(contents))
    else:
        _show(contents, count)

    faults = [fault for batch in contents.batches for fault in (batch.fault, batch.commit_fault) if fault]
    for fault in faults:
        out.note(f"messagestore: {fault}")

    if not contents.batches:
        out.note("no batch found")
    if not contents.batches or faults:
        raise typer.Exit(FOUND_NOTHING)


def _fields(contents: Checkpoint) -> dict[str, Any]:
    newest = contents.committed

    return {
        "checkpoint": contents.path,
        "queryId": contents.query_id,
        "lastCommittedBatch": None if newest is None else newest.batch_id,
        "nextBatch": contents.next_batch_id,
        "rewindable": contents.rewindable,
        "batches": [
            {
                "batchId": batch.batch_id,
                "committed": batch.committed,
                "plannedAt": batch.planned_at_ms,
                "offsets": list(batch.offsets),
                "fault": batch.fault or batch.commit_fault or None,
            }
            for batch in contents.batches
        ],
        "state": [
            {"folder": folder.path, "versions": sorted({*folder.whole, *folder.changes})} for folder in contents.state
        ],
    }


def _show(contents: Checkpoint, count: int) -> None:
    newest = contents.committed
    rewindable = contents.rewindable
    rows = [
        ("checkpoint", contents.path),
        ("query", contents.query_id),
        ("done", "no batch" if newest is None else f"up to batch {newest.batch_id}"),
        ("next", f"batch {contents.next_batch_id}"),
        ("rewind", f"possible to {_batches(rewindable)}" if rewindable else "not possible"),
    ]

    if contents.state:
        versions = [sorted({*folder.whole, *folder.changes}) for folder in contents.state]
        oldest, last = min(v[0] if v else 0 for v in versions), max(v[-1] if v else 0 for v in versions)
        rows.append(
            (
                "state",
                f"{out.count_words(len(contents.state), 'state store')}, files of the versions {oldest} to {last}",
            )
        )

    out.facts(rows)
    if not contents.batches:
        return

    titles = [("batch", True), ("done", False), ("planned", False), ("source", True), ("topic", False)]
    shown = contents.batches[-count:]
    more = len(contents.batches) - len(shown)

    # The messages of a batch are counted from the end of the one before it, also where that one is not shown.
    before: Batch | None = contents.batches[more - 1] if more else None
    cells: list[list[object]] = []
    for batch in shown:
        cells += _batch_cells(batch, before)
        before = batch

    out.table([*titles, ("read up to", True), ("messages", True)], cells[-_SHOWN_ROWS:])
    if len(cells) > _SHOWN_ROWS:
        out.line(f"the newest {_SHOWN_ROWS:,} of {len(cells):,} rows are shown; --json shows all")
    if more:
        out.line(f"{out.count_words(more, 'earlier batch')} not shown; --count and --json show them")


def _batch_cells(batch: Batch, before: Batch | None) -> list[list[object]]:
    """One row for each source and topic: the sum of the offsets of its queues, and of the messages of the batch."""
    planned = "-" if batch.planned_at_ms is None else out.time_words(batch.planned_at_ms)
    head: list[object] = [batch.batch_id, "yes" if batch.committed else "no", planned]
    if batch.fault:
        return [[*head, "-", "cannot be read", "-", "-"]]

    rows: list[list[object]] = []
    for source, fields in enumerate(batch.offsets):
        offset = stream_offset(fields)
        if offset is None:
            rows.append([*head, source, "(another source)" if fields is not None else "(nothing read yet)", "-", "-"])
            continue

        # The first batch carries its own beginning: no batch before it says where it starts.
        earlier = before.offsets[source] if before is not None and source < len(before.offsets) else None
        start = offset.beginning or stream_offset(earlier)
        read, begun = _totals(offset), _totals(start)

        for topic in offset.topics:
            messages = "-" if start is None else f"{read[topic] - begun[topic]:,}"
            rows.append([*head, source, topic, f"{read[topic]:,}", messages])
    return rows


def _totals(offset: StreamOffset | None) -> Counter[str]:
    """The sum of the offsets of each topic's queues."""
    totals: Counter[str] = Counter()
    for (topic, _), end in ({} if offset is None else offset.queues).items():
        totals[topic] += end
    return totals


def _ranges(numbers: list[int]) -> str:
    """`[1, 2, 3, 7]` -> `1 to 3, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts)


def _batches(numbers: list[int]) -> str:
    return f"{'batch' if len(numbers) == 1 else 'batches'} {_ranges(numbers)}"


@checkpoint.command("rewind")
def rewind(
    checkpoint: CheckpointFolder,
    batch: Annotated[
        int,
        typer.Argument(
            metavar="BATCH", min=0, help="The batch that the query runs first when it starts again.", show_default=False
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="Make the copy here. Without it, the command only says what it would do.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint as it was before a batch. A query that starts from the copy runs this batch again with the
    same offsets, and plans the later ones anew. The original stays as it is. Stop the query first.
    """
    contents = read_checkpoint(path_of(checkpoint))
    fault = contents.rewind_fault(batch)
    if fault:
        possible = f"the batches {_ranges(contents.rewindable)}" if contents.rewindable else "none"
        raise ConfigError(f"{contents.path}: {fault}. Possible are {possible}", key="BATCH", value=batch)

    kept, dropped = files_of(contents, batch)
    again = [planned.batch_id for planned in contents.batches if planned.batch_id >= batch]
    report = {
        "checkpoint": contents.path,
        "queryId": contents.query_id,
        "nextBatch": batch,
        "runAgain": again,
        "kept": len(kept),
        "leftOut": dropped,
        "to": None if to is None else os.path.abspath(path_of(to)),
        "dryRun": to is None,
    }

    if to is not None:
        with out.progress_bar("copying") as progress:
            copy_rewound(contents, batch, path_of(to), progress)

    if as_json:
        out.json_line(report)
        return

    stores = f", and {out.count_words(len(contents.state), 'state store')} at version {batch}" if contents.state else ""
    out.facts(
        [
            ("checkpoint", contents.path),
            ("query", contents.query_id),
            ("run again", f"{out.count_words(len(again), 'batch')}: {_ranges(again)}"),
            ("taken over", f"{out.count_words(len(kept), 'file')}{stores}"),
            ("left out", f"{out.count_words(len(dropped), 'file')}"),
        ]
    )

    if to is None:
        out.line("Nothing was written. To make the copy, give --to FOLDER.")
        return
    out.line(f"The copy is {out.shown(str(report['to']))}. Start the query with it as its checkpointLocation.")
    out.line(
        "Do not start it from the original again. A sink that recognises batches passes over those that it holds with "
        "the same rows; other sinks get these rows twice."
    )
