"""`messagestore groups`, `group create` and `group alter`: which consumer groups there are, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from messagestore import ConfigError, CorruptionError, MessageStore
from messagestore.spi import local_operator
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_app import (
    FOUND_NOTHING,
    ConfigFile,
    Json,
    Root,
    Wait,
    broker_named,
    config_of,
    existing,
    looking,
    path_of,
)

_T = TypeVar("_T")
_QUEUES = [("group", False), ("topic", False), ("queue", True), ("committed", True), ("max", True), ("lag", True)]
_SETTINGS = [("group", False), ("consume", False), ("retries", True), ("retry queues", True)]
_FILTERS = [("group", False), ("topic", False), ("type", False), ("filter", False), ("since", False), ("alive", False)]

group_app = typer.Typer(no_args_is_help=True, help="Give a consumer group settings, or change them.")

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.", show_default=False)]
Times = Annotated[
    int | None,
    typer.Option(
        "--retry-max-times",
        metavar="N",
        min=0,
        help="A message that was sent back so many times goes to the group's dead-letter topic.",
        show_default=False,
    ),
]
Queues = Annotated[
    int | None,
    typer.Option(
        "--retry-queues",
        metavar="N",
        min=0,
        help="The number of queues of the group's retry topic when it is created (retryQueueNums). With 0, a broker "
        "drops what is sent back.",
        show_default=False,
    ),
]
Consume = Annotated[
    bool | None,
    typer.Option(
        "--consume/--no-consume",
        help="Whether a broker gives messages to the group. This project's own readers ignore it.",
        show_default=False,
    ),
]


# ---- looking


def groups(root: Root, as_json: Json = False) -> None:
    """Show how far consumer groups have read each queue, their settings, and the filters that they have registered with
    a broker. A group without settings has RocketMQ's defaults.
    """
    faults: list[str] = []
    path = path_of(root)
    with out.waiting("looking through the queues"):
        queues, wrong = _readable(lambda: local_operator.groups(path, looking()), faults) or ([], [])
        faults += wrong
        settings = _readable(lambda: local_operator.group_settings(path), faults) or []
        filters = _readable(lambda: local_operator.filters(path), faults) or []
    if as_json:
        for row in [*queues, *({"group": each["groupName"], "settings": each} for each in settings), *filters]:
            out.json_line(row)
    else:
        _tables(queues, settings, filters)
    for fault in faults:
        out.note(f"messagestore: {fault}")
    found = bool(queues or settings or filters)
    if not found and not faults:
        out.note("no consumer group found")
    if faults or not found:
        raise typer.Exit(FOUND_NOTHING)


def _readable(read: Callable[[], _T], faults: list[str]) -> _T | None:
    """What a file says. If it is damaged: None, and one more line in `faults`, so that the other files are shown."""
    try:
        return read()
    except CorruptionError as error:
        faults.append(str(error))
        return None


def _tables(queues: list[dict[str, Any]], settings: list[dict[str, Any]], filters: list[dict[str, Any]]) -> None:
    tables = [
        (_QUEUES, [["-" if value is None else value for value in row.values()] for row in queues]),
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
    found = row["filter"]
    dead = found["deadTime"] >= found["bornTime"]
    ended = f"until {out.time_words(found['deadTime'])}" if dead else "yes"
    since = out.time_words(found["bornTime"])
    return [row["group"], row["topic"], found["expressionType"], found["expression"], since, ended]


# ---- changing


@group_app.command("create")
def group_create(
    root: Root,
    group: Group,
    retry_max_times: Times = None,
    retry_queues: Queues = None,
    consume: Consume = None,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Give a consumer group settings in config/subscriptionGroup.json: those that are named, and RocketMQ's
    defaults (16 retries, one retry queue) for the others. While a broker runs on the store, nothing is changed.
    """
    asked = _asked(retry_max_times, retry_queues, consume)
    path = existing(root)
    with (
        broker_named("groups", _update(group, asked)),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        if store.group_config(group) is not None:
            raise ConfigError(
                f"{group}: the group has settings already. Change them with `messagestore group alter`",
                key="GROUP",
                value=group,
            )
        made = store.create_group(group, **asked)
    _show(made.to_fields(), "created", as_json=as_json)


@group_app.command("alter")
def group_alter(
    root: Root,
    group: Group,
    retry_max_times: Times = None,
    retry_queues: Queues = None,
    consume: Consume = None,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Change settings of a consumer group in config/subscriptionGroup.json; what is not named stays as it is, also what
    this project does not know. While a broker runs on the store, nothing is changed.
    """
    asked = _asked(retry_max_times, retry_queues, consume)
    if not asked:
        raise ConfigError(
            "group alter: found nothing to change. Give --retry-max-times, --retry-queues or --consume/--no-consume",
            key="group alter",
        )
    path = existing(root)
    with (
        broker_named("groups", _update(group, asked)),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        made = store.alter_group(group, **asked)
    _show(made.to_fields(), "altered", as_json=as_json)


def _asked(retry_max_times: int | None, retry_queues: int | None, consume: bool | None) -> dict[str, Any]:
    given = {"retry_max_times": retry_max_times, "retry_queue_nums": retry_queues, "consume_enable": consume}
    return {name: value for name, value in given.items() if value is not None}


def _update(group: str, asked: dict[str, Any]) -> str:
    """The command of RocketMQ's tools that does the same through a broker."""
    letters = {"retry_max_times": "-r", "retry_queue_nums": "-q", "consume_enable": "-s"}
    words = "".join(f" {letters[name]} {str(value).lower()}" for name, value in asked.items())
    return f"mqadmin updateSubGroup -b HOST:PORT -g {group}{words}"


def _show(fields: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        out.json_line(fields)
        return
    queues = fields["retryQueueNums"]
    words = [
        f"{what} group {out.shown(fields['groupName'])}: {fields['retryMaxTimes']} retries",
        "1 retry queue" if queues == 1 else f"{queues} retry queues",
        f"consuming {'enabled' if fields['consumeEnable'] else 'disabled'}",
    ]
    out.line(", ".join(words))
