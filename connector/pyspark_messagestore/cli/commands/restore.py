"""`messagestore restore`: a store from a point of a backup."""

from __future__ import annotations

from typing import Annotated

import typer

from messagestore import backup as backups
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import ConfigFile, Json, config_of, path_of

PLACE = 341
PANEL = "Care"


def restore(
    target: Annotated[str, typer.Argument(metavar="BACKUP", help="The folder with the backup.", show_default=False)],
    root: Annotated[
        str,
        typer.Argument(metavar="ROOT", help="Where the store will be: a missing or empty folder.", show_default=False),
    ],
    point: Annotated[
        int | None,
        typer.Option("--point", metavar="N", help="A point's number; without it, the newest.", show_default=False),
    ] = None,
    store_config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Make a store of a point of a backup, checked from end to end. It gets a new id and knows the batches of the old
    one. Streams and queries that have gone further than the point say so.
    """
    with out.progress_bar("restoring") as progress:
        made = backups.restore(
            path_of(target), path_of(root), number=point, config=config_of(store_config), progress=progress
        )

    if as_json:
        out.json_line({"point": made.number, "begin": made.begin, "end": made.end, "backedUp": made.store_id})
    else:
        out.line(f"restored point {made.number}: the log from {made.begin} to {made.end}, every byte checked")
