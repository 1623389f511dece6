"""`messagestore batches`: the apps that have batches in a store, and the version with which each continues."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from messagestore import MessageStore
from messagestore.inspect import operator
from messagestore.spi import APPENDED, Location
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import (
    FOUND_NOTHING,
    ConfigFile,
    Json,
    Root,
    Wait,
    by_location,
    config_of,
    opened,
    path_of,
)

PLACE = 440
PANEL = "Spark"


class Batches(TyperGroup):
    """A group of commands in which `batches ROOT` means `batches list ROOT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `list` if the first word is not a command."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


batches = typer.Typer(
    cls=Batches,
    no_args_is_help=True,
    help="Show which apps have batches in a store, or let an app continue with a version.",
)


@batches.command("list")
@by_location
def list_apps(root: Location, as_json: Json = False) -> None:
    """Show the apps whose batches the store holds, and the next version of each. `batches ROOT` does the same."""
    with out.waiting("reading the list of batches"), opened(root) as store:
        rows, _ = store.view("apps")
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        app_table(rows)
    if not rows:
        out.note("no batch found")
        raise typer.Exit(FOUND_NOTHING)


@batches.command("start")
def start(
    root: Root,
    app_id: Annotated[
        str, typer.Argument(metavar="APP", help="The txnAppId, or the app_id of MessageStoreSink.", show_default=False)
    ],
    version: Annotated[
        int, typer.Argument(metavar="VERSION", help="The id of the batch that comes next.", show_default=False, min=1)
    ],
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Let an app continue with VERSION once, because its sink was added to a running query, or because its earlier
    batches are lost. The rows of the versions before it are not in the store. A missing or empty ROOT becomes a store.
    """
    path = path_of(root)
    is_new = not operator.holds_store(path)
    with MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store:
        if is_new:
            out.note(f"created a new store in {os.path.abspath(path)}")
        result = store.start_batches(app_id, version)

    if as_json:
        out.json_line({"app": app_id, "version": version, "status": result.status})
    elif result.status == APPENDED:
        out.line(f"app {app_id} continues with version {version}")
    else:
        out.line(f"nothing to do: the next version of app {app_id} is {version}")


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
