"""`messagestore gc`: delete the oldest segments of a store, after it was shown what goes and why the rest stays."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from messagestore import ExpiredFiles, delete_expired_files
from messagestore.inspect import operator
from messagestore.spi import duration_s
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import ConfigFile, Json, Root, Wait, config_of, existing, looking
from pyspark_messagestore.words import expired_fields, time_ms

PLACE = 340
PANEL = "Care"


def gc(
    root: Root,
    reserved: Annotated[
        str | None,
        typer.Option(
            "--reserved",
            metavar="DURATION",
            help="Delete segments that were last written to so long ago, such as 7d or 36h; a number alone is in "
            "hours. Without --reserved, --before and "
            "--before-offset, these are the hours of fileReservedTime, or 72.",
            show_default=False,
        ),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(
            "--before",
            metavar="TIME",
            help="Delete segments all of whose messages were stored before this time: milliseconds since 1970, a time "
            "such as 2026-01-31T12:00:00Z, or a time before now such as -7d.",
            show_default=False,
        ),
    ] = None,
    before_offset: Annotated[
        int | None,
        typer.Option(
            "--before-offset",
            metavar="PHYSICAL",
            min=0,
            help="Delete segments that end at or below this physical offset.",
            show_default=False,
        ),
    ] = None,
    ignored_groups: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore-group",
            metavar="GROUP",
            help="Do not keep segments because this consumer group has not read them. It may be given several times.",
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[
        bool,
        typer.Option("--at-once", help="Delete all that can be deleted, however old it is, and whoever needs it."),
    ] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete. Without this, only show what would go.")] = False,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Show which of the oldest segments can be deleted and why the others stay, and delete them with --delete.
    Deleted messages are gone for all readers. A batch that Spark sends again is still recognised.
    """
    path = existing(root)
    conditions: dict[str, Any] = {
        "reserved_hours": None if reserved is None else _hours("--reserved", reserved),
        "before_ms": None if before is None else time_ms("--before", before),
        "before_offset": before_offset,
        "ignored_groups": ignored_groups or (),
        "at_once": at_once,
    }

    if not delete:
        with out.waiting("looking through the store"):
            expired = operator.expired(path, looking(store_config), **conditions)
        _show(expired, done=False, as_json=as_json)
        return

    with out.waiting("deleting"):
        expired = delete_expired_files(path, config_of(store_config, lock_timeout=wait), **conditions)
    _show(expired, done=True, as_json=as_json)


def _hours(option: str, text: str) -> float:
    is_bare = re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) is not None
    return duration_s(option, f"{text.strip()}h" if is_bare else text) / 3600


def _show(expired: ExpiredFiles, *, done: bool, as_json: bool) -> None:
    if as_json:
        out.json_line(expired_fields(expired, done=done))
        return

    verb = "deleted" if done else "would delete"
    count = len(expired.segments)
    if not count and not expired.queue_file_count and not expired.index_file_count:
        out.line("nothing was deleted" if done else "there is nothing to delete")
    else:
        held = expired.message_count
        messages = "" if held is None else f", with {out.count_words(held, 'message')}"
        out.line(f"{verb} {out.count_words(count, 'segment')} of the log, {expired.size:,} bytes{messages}")
        for path in expired.segments:
            out.line(f"  {path}")

        files = out.count_words(expired.queue_file_count, "file") + " of ConsumeQueues"
        if done:
            files += f" and {out.count_words(expired.index_file_count, 'file')} of the index"
        out.line(f"{verb} {files}, which lead{'s' * (expired.queue_file_count == 1 and not done)} only there")

    rows = [("log begins at", str(expired.min_offset))]
    if expired.kept:
        rows.append(("the rest stays", f"because of the next segment: {expired.kept}"))
    if expired.restated:
        rows.append(("written again", ", ".join(f"version {v} of app {app}" for app, v in expired.restated)))
    if expired.unread_groups:
        rows.append(("not read by", ", ".join(expired.unread_groups)))

    out.facts(rows)
    if count and not done:
        out.line("nothing was changed. To delete, give --delete")
