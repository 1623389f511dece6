"""`messagestore dump`: the records of the log."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from messagestore.inspect import operator
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, Json, Root, looking, path_of

PLACE = 310
PANEL = "Messages"


def dump(
    root: Root,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="PHYSICAL",
            min=0,
            help="Start with the record at this physical offset.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="Show at most N records.", show_default=False)
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="T", help="Show only records of this topic.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Also show the head of each record in hex.")] = False,
    as_json: Json = False,
) -> None:
    """Show the records of the CommitLog in the order in which they were written."""
    shown_count = 0
    with contextlib.closing(operator.dump(path_of(root), looking(), start, out.note)) as records:
        for head, message in records:
            if topic is not None and message.topic != topic:
                continue

            if as_json:
                out.json_line({**out.message_fields(message), **({"head": head.hex()} if raw else {})})
            else:
                out.line(out.message_line(message, physical=True))
                for text in out.hex_lines(head) if raw else ():
                    out.line(text)

            shown_count += 1
            if shown_count == count:
                break

    if not shown_count:
        out.note("no record found")
        raise typer.Exit(FOUND_NOTHING)
