"""`messagestore groups`: how far consumer groups have read, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer

from messagestore import CorruptionError
from messagestore.inspect import operator
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, Json, Root, looking, path_of

PLACE = 140
PANEL = "Topics and groups"

_T = TypeVar("_T")

_QUEUES = [("group", False), ("topic", False), ("queue", True), ("committed", True), ("max", True), ("lag", True)]

_SETTINGS = [("group", False), ("consume", False), ("retries", True), ("retry queues", True)]

_FILTERS = [("group", False), ("topic", False), ("type", False), ("filter", False), ("since", False), ("alive", False)]


def groups(root: Root, as_json: Json = False) -> None:
    """Show how far consumer groups have read each queue, their settings, and the filters that they have registered with
    a broker. A group without settings has RocketMQ's defaults.
    """
    faults: list[str] = []
    path = path_of(root)
    with out.waiting("looking through the queues"):
        queues, wrong = _readable(lambda: operator.groups(path, looking()), faults) or ([], [])
        faults += wrong
        settings = _readable(lambda: operator.group_settings(path), faults) or []
        filters = _readable(lambda: operator.filters(path), faults) or []

    if as_json:
        for row in [*queues, *({"group": fields["groupName"], "settings": fields} for fields in settings), *filters]:
            out.json_line(row)
    else:
        _tables(queues, settings, filters)

    for fault in faults:
        out.note(f"messagestore: {fault}")

    has_rows = bool(queues or settings or filters)
    if not has_rows and not faults:
        out.note("no consumer group found")
    if faults or not has_rows:
        raise typer.Exit(FOUND_NOTHING)


def _readable(read: Callable[[], _T], faults: list[str]) -> _T | None:
    """What a file says. If it is damaged: None, and one more line in `faults`, so that the other files are shown."""
    try:
        return read()
    except CorruptionError as error:
        faults.append(str(error))
        return None


def _tables(queues: list[dict[str, Any]], settings: list[dict[str, Any]], filters: list[dict[str, Any]]) -> None:
    titles, shown_fields = list(_QUEUES), ["group", "topic", "queueId", "committedOffset", "maxOffset", "lag"]
    if any(row["beyond"] for row in queues):
        titles.append(("beyond the end", True))
        shown_fields.append("beyond")

    tables = [
        (titles, [["-" if row[name] is None else row[name] for name in shown_fields] for row in queues]),
        (_SETTINGS, [_settings_cells(fields) for fields in settings]),
        (_FILTERS, [_filter_cells(row) for row in filters]),
    ]

    shown = [(titles, cells) for titles, cells in tables if cells]
    for number, (titles, cells) in enumerate(shown):
        if number:
            out.line()
        out.table(titles, cells)


def _settings_cells(fields: dict[str, Any]) -> list[object]:
    enable = "yes" if fields["consumeEnable"] else "no"
    return [fields["groupName"], enable, fields["retryMaxTimes"], fields["retryQueueNums"]]


def _filter_cells(row: dict[str, Any]) -> list[object]:
    fields = row["filter"]
    dead = fields["deadTime"] >= fields["bornTime"]
    ended = f"until {out.time_words(fields['deadTime'])}" if dead else "yes"
    since = out.time_words(fields["bornTime"])
    return [row["group"], row["topic"], fields["expressionType"], fields["expression"], since, ended]
