"""Which apps have batches in a store, and where each goes on: `messagestore batches`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from messagestore.spi import BATCH_TOPIC, StoreView, journal_of
from pyspark_messagestore import cli_output as out


class Batches(TyperGroup):
    """`batches ROOT` is `batches list ROOT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `list` where the first word is no command."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def apps_of(view: StoreView) -> list[dict[str, Any]]:
    """A row for each app, for JSON: its query, the versions that are known, and what comes next."""
    journal = journal_of(view.files, view.max_offset(BATCH_TOPIC, 0))
    rows = []
    for app_id in journal.app_ids():
        entries = journal.entries(app_id)
        batches = sorted((entry for entry in entries if not entry.start), key=lambda entry: entry.version)
        last = batches[-1] if batches else None
        query_ids = journal.query_ids(app_id)
        rows.append(
            {
                "app": app_id,
                "queryId": query_ids[-1] if query_ids else None,
                "firstVersion": batches[0].version if batches else None,
                "lastVersion": None if last is None else last.version,
                "lastRows": None if last is None else last.row_count,
                "lastTopics": None if last is None or last.topics is None else list(last.topics),
                "nextVersion": max(entry.version for entry in entries) + 1,
                "replacedQueryIds": sorted(journal.replaced(app_id)),
            }
        )
    return rows


def app_table(rows: list[dict[str, Any]]) -> None:
    """Show it."""
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
