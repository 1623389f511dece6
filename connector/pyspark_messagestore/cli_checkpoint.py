"""`messagestore checkpoint show` and `rewind`: the checkpoint of a streaming query, while Spark is stopped."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from messagestore import ConfigError
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_app import FOUND_NOTHING, Json, path_of
from pyspark_messagestore.spark_checkpoint import (
    Batch,
    Checkpoint,
    copy_rewound,
    files_of,
    read_checkpoint,
    stream_offset,
)

_SHOWN_BATCHES = 10

checkpoint_app = typer.Typer(
    no_args_is_help=True,
    help="Show the checkpoint of a streaming query, or copy it as it was before a batch.",
)

CheckpointFolder = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="The folder that is the query's checkpointLocation.", show_default=False),
]


@checkpoint_app.command("show")
def checkpoint_show(
    checkpoint: CheckpointFolder,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Show at most N batches, the newest; --json shows all.")
    ] = _SHOWN_BATCHES,
    as_json: Json = False,
) -> None:
    """Show the batches that a checkpoint holds, how far each has read, and from which of them the query can run again.
    Spark need not run, and nothing is written.
    """
    found = read_checkpoint(path_of(checkpoint))
    if as_json:
        out.json_line(_fields(found))
    else:
        _show(found, count)
    for batch in found.batches:
        if batch.fault:
            out.note(f"messagestore: {batch.fault}")
    if not found.batches:
        out.note("no batch found")
    if not found.batches or any(batch.fault for batch in found.batches):
        raise typer.Exit(FOUND_NOTHING)


def _fields(found: Checkpoint) -> dict[str, Any]:
    newest = found.committed
    return {
        "checkpoint": found.path,
        "queryId": found.query_id,
        "lastCommittedBatch": None if newest is None else newest.batch_id,
        "nextBatch": found.next_batch_id,
        "rewindable": found.rewindable,
        "batches": [
            {
                "batchId": batch.batch_id,
                "committed": batch.committed,
                "plannedAt": batch.planned_at_ms,
                "offsets": list(batch.offsets),
                "fault": batch.fault or None,
            }
            for batch in found.batches
        ],
        "state": [
            {"folder": folder.path, "versions": sorted({*folder.whole, *folder.changes})} for folder in found.state
        ],
    }


def _show(found: Checkpoint, count: int) -> None:
    newest = found.committed
    rewindable = found.rewindable
    rows = [
        ("checkpoint", found.path),
        ("query", found.query_id),
        ("done", "no batch" if newest is None else f"up to batch {newest.batch_id}"),
        ("next", f"batch {found.next_batch_id}"),
        ("rewind", f"possible to {_batches(rewindable)}" if rewindable else "not possible"),
    ]
    if found.state:
        versions = [sorted({*folder.whole, *folder.changes}) for folder in found.state]
        oldest, last = min(v[0] if v else 0 for v in versions), max(v[-1] if v else 0 for v in versions)
        rows.append(
            ("state", f"{out.count_words(len(found.state), 'state store')}, files of the versions {oldest} to {last}")
        )
    out.facts(rows)
    if not found.batches:
        return
    titles = [("batch", True), ("done", False), ("planned", False), ("source", True), ("topic", False)]
    before: Batch | None = None
    cells: list[list[object]] = []
    for batch in found.batches:
        cells += _batch_cells(batch, before)
        before = batch
    shown = {batch.batch_id for batch in found.batches[-count:]}
    out.table([*titles, ("read up to", True), ("messages", True)], [row for row in cells if row[0] in shown])
    more = len(found.batches) - len(shown)
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
        earlier = before.offsets[source] if before is not None and source < len(before.offsets) else None
        start = offset.beginning or stream_offset(earlier)
        for topic in offset.topics:
            read = sum(end for (name, _), end in offset.queues.items() if name == topic)
            begun = 0 if start is None else sum(end for (name, _), end in start.queues.items() if name == topic)
            rows.append([*head, source, topic, f"{read:,}", "-" if start is None else f"{read - begun:,}"])
    return rows


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


@checkpoint_app.command("rewind")
def checkpoint_rewind(
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
    found = read_checkpoint(path_of(checkpoint))
    fault = found.rewind_fault(batch)
    if fault:
        possible = f"the batches {_ranges(found.rewindable)}" if found.rewindable else "none"
        raise ConfigError(f"{found.path}: {fault}. Possible are {possible}", key="BATCH", value=batch)
    kept, dropped = files_of(found, batch)
    again = [each.batch_id for each in found.batches if each.batch_id >= batch]
    report = {
        "checkpoint": found.path,
        "queryId": found.query_id,
        "nextBatch": batch,
        "runAgain": again,
        "kept": len(kept),
        "leftOut": dropped,
        "to": None if to is None else os.path.abspath(path_of(to)),
        "dryRun": to is None,
    }
    if to is not None:
        with out.progress_bar("copying") as progress:
            copy_rewound(found, batch, path_of(to), progress)
    if as_json:
        out.json_line(report)
        return
    stores = f", and {out.count_words(len(found.state), 'state store')} at version {batch}" if found.state else ""
    out.facts(
        [
            ("checkpoint", found.path),
            ("query", found.query_id),
            ("run again", f"{out.count_words(len(again), 'batch')}: {_ranges(again)}"),
            ("taken over", f"{out.count_words(len(kept), 'file')}{stores}"),
            ("left out", f"{out.count_words(len(dropped), 'file')}"),
        ]
    )
    first = [stream_offset(fields) for each in found.batches if each.batch_id == batch == 0 for fields in each.offsets]
    if any(offset is not None and offset.beginning is None for offset in first):
        out.line(
            "An earlier release planned batch 0 and did not keep where it begins: it begins where startingOffsets says "
            "when the query starts."
        )
    if to is None:
        out.line("Nothing was written. To make the copy, give --to FOLDER.")
        return
    out.line(f"The copy is {out.shown(str(report['to']))}. Start the query with it as its checkpointLocation.")
    out.line(
        "Do not start it from the original again. A sink that recognises batches passes over those that it holds with "
        "the same rows; other sinks get these rows twice."
    )
