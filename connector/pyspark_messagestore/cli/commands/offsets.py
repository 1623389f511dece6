"""`messagestore offsets`: how far the queues reach."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from messagestore.spi import Location, Report, StoreReader
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import Json, by_location, end_of_rows, named_report, opened_parts
from pyspark_messagestore.words import time_ms

PLACE = 130
PANEL = "Topics and groups"


@by_location
def offsets(
    root: Location,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", help="The topics; without one, all topics.", show_default=False),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Also show the offset of the first message that was stored at this time or later: milliseconds since "
            "1970, a time such as 2026-01-31T12:00:00Z (UTC if it names no zone), or a time before now such as -10m.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the minimum and the maximum offset of each queue. The maximum is the offset that the next message gets."""
    at_ms = None if at is None else time_ms("--at", at)
    with out.waiting("looking through the queues"), opened_parts(root, names or []) as stores:
        rows, faults = named_report(
            (name, _of_store(store, names or [], at_ms, all_known=not name or bool(root.broker)))
            for name, store in stores.items()
        )

    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        titles = [("topic", False), ("queue", True), ("min", True), ("max", True), ("messages", True)]
        if "brokerName" in rows[0]:
            titles.insert(0, ("broker", False))
        if at_ms is not None:
            titles += [(f"at {out.time_words(at_ms)}", True), ("stored", False)]
        out.table(titles, [_offset_cells(row) for row in rows])

    end_of_rows(rows, faults, "no queue found")


def _of_store(store: StoreReader, names: list[str], at_ms: int | None, *, all_known: bool) -> Report:
    """The rows of one store. A broker of a cluster need not have all topics."""
    known = store.describe(names).queue_counts if names and not all_known else names
    return store.offsets([name for name in names if name in known], at_ms)


def _offset_cells(row: dict[str, Any]) -> list[object]:
    cells = list(row.values())
    if "storeTimestamp" in row:
        cells[-1] = "-" if row["storeTimestamp"] is None else out.time_words(row["storeTimestamp"])
    return cells
