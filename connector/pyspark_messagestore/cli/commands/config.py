"""`messagestore config`: the settings that live with a store, shown and changed."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from messagestore import ConfigError, StoreConfig, alter_stored_config
from messagestore.inspect import operator
from messagestore.spi import duration_s
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import Json, Root, Wait, broker_named, existing

PLACE = 405
PANEL = "Care"


class Action(enum.StrEnum):
    """What to do with the settings."""

    SHOW = "show"
    SET = "set"
    UNSET = "unset"


def config(
    root: Root,
    action: Annotated[Action, typer.Argument(help="What to do.")] = Action.SHOW,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE | NAME]...",
            help="For set: settings as in store.properties, such as fileReservedTime=168. For unset and show: names.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="With show: also the settings that have their default.")] = False,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Show or change the settings that live with a store. They count for every program that gives none: Python, Spark's
    sink, serve, deliver, gc. What a program gives itself takes precedence there. Programs that have the store open keep
    their settings until they open it again. While a broker runs on the store, nothing is changed.
    """
    path, given = existing(root), names or []
    if action is Action.SHOW:
        _show(path, _checked(given), every=every, as_json=as_json)
        return

    changes = _changes(action, given)
    with broker_named("settings", "mqadmin updateBrokerConfig -b HOST:PORT -k NAME -v VALUE"):
        timeout_s = None if wait is None else duration_s("--wait", wait)
        alter_stored_config(path, changes, timeout_s=timeout_s)
    _show(path, list(changes) if action is Action.SET else [], every=False, as_json=as_json)


def _checked(names: list[str]) -> list[str]:
    """The names, after a check that all of them are settings."""
    StoreConfig.check_names(names)
    return names


def _changes(action: Action, given: list[str]) -> dict[str, object]:
    if not given:
        example = "fileReservedTime=168" if action is Action.SET else "fileReservedTime"
        raise ConfigError(f"config {action}: found no setting. Give one, such as {example}", key=f"config {action}")
    changes: dict[str, object] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if bool(separator) is not (action is Action.SET):
            allowed = "NAME=VALUE, such as fileReservedTime=168" if action is Action.SET else "the name of a setting"
            raise ConfigError(f"config {action}: found {text!r}; allowed is {allowed}", key=name, value=text)
        if name.strip().lower() in (key.lower() for key in changes):
            raise ConfigError(f"config {action}: found {name.strip()} twice. Give it once", key=name, value=text)
        changes[name.strip()] = value.strip() if separator else None
    return changes


_FROM = {"store": "set in the store", "fixed": "fixed in the store", "records": "its records", "default": "default"}


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "(empty)"


def _show(path: str, names: list[str], *, every: bool, as_json: bool) -> None:
    asked = {name.lower() for name in names}
    rows = [
        row
        for row in operator.settings(path)
        if row["name"].lower() in asked or (not names and (every or row["from"] != "default"))
    ]
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        cells = [[row["name"], _value(row["value"]), _FROM[row["from"]]] for row in rows]
        out.table([("setting", False), ("value", False), ("from", False)], cells)
    else:
        out.line("the store has no settings of its own; --all shows the defaults")
