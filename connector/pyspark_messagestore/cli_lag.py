"""`messagestore groups`: how far readers of a store are behind its end."""

from __future__ import annotations

from typing import Any

import typer

from messagestore.spi import local_operator
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_app import FOUND_NOTHING, Json, Root, looking, path_of


def groups(root: Root, as_json: Json = False) -> None:
    """Show how far consumer groups have read: the committed offset, the maximum offset and the lag of each queue."""
    rows, faults = local_operator.groups(path_of(root), looking())
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        group_table(rows)
    for fault in faults:
        out.note(f"messagestore: {fault}")
    if not rows:
        out.note("no consumer group found")
    if faults or not rows:
        raise typer.Exit(FOUND_NOTHING)


def group_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows of `groups_of` as a table."""
    columns = [("group", False), ("topic", False), ("queue", True), ("committed", True), ("max", True), ("lag", True)]
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    out.table(columns, cells)
