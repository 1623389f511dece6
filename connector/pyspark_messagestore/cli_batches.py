"""`messagestore batches`: the apps that have batches in a store, and the version with which each continues."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from pyspark_messagestore import cli_output as out


class Batches(TyperGroup):
    """A group of commands in which `batches ROOT` means `batches list ROOT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `list` if the first word is not a command."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def app_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows of `apps_of` as a table."""
    columns = [("app", False), ("query", False), ("versions", False), ("rows of the last", True), ("next", True)]
    cells = [
        (
            row["app"],
            row["queryId"] or "not known",
            "none yet" if row["lastVersion"] is None else f"{row['firstVersion']} to {row['lastVersion']}",
            "-" if row["lastRows"] is None or row["lastRows"] < 0 else f"{row['lastRows']:,}",
            row["nextVersion"],
        )
        for row in rows
    ]
    out.table(columns, cells)
