"""`messagestore backup`, `backup list` and `backup prune`: a store's copy elsewhere, at points that can be restored."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from messagestore import ConfigError
from messagestore import backup as backups
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import Json, Root, existing, path_of

PLACE = 335
PANEL = "Care"
_STREAM = "-"


class _BackupFirst(TyperGroup):
    """`backup ROOT TARGET` is `backup take ROOT TARGET`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command that is meant if none is."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["take", *args]
        return super().parse_args(ctx, args)


backup = typer.Typer(
    cls=_BackupFirst,
    no_args_is_help=True,
    help="Copy what is new in a store to a backup, beside its writers: `messagestore backup ROOT TARGET`.",
)

Target = Annotated[str, typer.Argument(metavar="TARGET", help="The folder with the backup.", show_default=False)]


@backup.command()
def take(
    root: Root,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A missing or empty folder, or one with backups of this store. `-`: a tar archive on standard output, "
            "with all of the store.",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Copy what is new in the store to a backup, and name the point that can be restored. This is what `messagestore
    backup ROOT TARGET` does. Writers and brokers may be at work. A run that was killed is run again.
    """
    path = existing(root)
    with out.progress_bar("copying") as progress:
        if target == _STREAM:
            if sys.stdout.isatty():
                raise ConfigError(
                    "TARGET: found -, and standard output is a terminal. Send it to a file or a pipe", key="TARGET"
                )
            point = backups.stream(path, sys.stdout.buffer, progress=progress)
        else:
            point = backups.back_up(path, path_of(target), progress=progress)

    fields = {**_fields(point), "target": target if target == _STREAM else os.path.realpath(target)}
    if target == _STREAM:
        out.note(f"point {point.number}: {_words(point)}, {out.size_words(point.new_bytes)} sent")
    elif as_json:
        out.json_line(fields)
    else:
        out.line(f"point {point.number}: {_words(point)}, {out.size_words(point.new_bytes)} copied and read back")


@backup.command("list")
def listed(target: Target, as_json: Json = False) -> None:
    """List the points of a backup, the oldest first."""
    points = backups.points(path_of(target))
    if as_json:
        for point in points:
            out.json_line(_fields(point))
        return

    rows = [
        (
            point.number,
            out.time_words(point.time_ms),
            point.begin,
            point.end,
            point.messages,
            out.size_words(point.new_bytes),
            point.store_id or "(a broker's)",
        )
        for point in points
    ]
    titles = (("point", True), ("taken", False), ("log from", True), ("to", True), ("messages ever put", True))
    out.table((*titles, ("new", True), ("store", False)), rows)


@backup.command()
def prune(
    target: Target,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", help="How many of the newest points stay.", show_default=False)
    ],
    delete: Annotated[bool, typer.Option("--delete", help="Delete them; otherwise only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the oldest points of a backup, and the files that only they need."""
    gone, size = backups.prune(path_of(target), keep, delete=delete)
    if as_json:
        out.json_line({"points": gone, "bytes": size, "deleted": delete})
        return
    if not gone:
        out.line("nothing to delete")
        return
    verb = "deleted" if delete else "would delete"
    out.line(f"{verb} {out.count_words(len(gone), 'point')} and {out.size_words(size)} of files")
    if not delete:
        out.line("--delete deletes them")


def _fields(point: backups.Point) -> dict[str, Any]:
    return {
        "point": point.number,
        "time": point.time_ms,
        "storeId": point.store_id,
        "begin": point.begin,
        "end": point.end,
        "messages": point.messages,
        "newBytes": point.new_bytes,
    }


def _words(point: backups.Point) -> str:
    return f"the log from {point.begin} to {point.end}"
