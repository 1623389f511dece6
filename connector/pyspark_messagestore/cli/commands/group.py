"""`messagestore group create`, `alter` and `reset-offset`: the settings of a consumer group, and its place."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from messagestore import ConfigError, MessageStore, reset_offsets
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import ConfigFile, Json, Root, Wait, broker_named, config_of, existing
from pyspark_messagestore.words import time_ms

PLACE = 420
PANEL = "Topics and groups"

group = typer.Typer(no_args_is_help=True, help="Give a consumer group settings, or another place in its queues.")

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


@group.command("create")
def create(
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
    changes = _asked(retry_max_times, retry_queues, consume)
    path = existing(root)
    with (
        broker_named("groups", _update(group, changes)),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        if store.group_config(group) is not None:
            raise ConfigError(
                f"{group}: the group has settings already. Change them with `messagestore group alter`",
                key="GROUP",
                value=group,
            )

        made = store.create_group(group, **changes)
    _show(made.to_fields(), "created", as_json=as_json)


@group.command("alter")
def alter(
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
    changes = _asked(retry_max_times, retry_queues, consume)
    if not changes:
        raise ConfigError(
            "group alter: found nothing to change. Give --retry-max-times, --retry-queues or --consume/--no-consume",
            key="group alter",
        )

    path = existing(root)
    with (
        broker_named("groups", _update(group, changes)),
        MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store,
    ):
        made = store.alter_group(group, **changes)
    _show(made.to_fields(), "altered", as_json=as_json)


@group.command("reset-offset")
def reset_offset(
    root: Root,
    group: Group,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="Where to go: earliest, latest, an offset, a time such as 2026-01-31T12:00:00Z or in milliseconds "
            "since 1970, or a time before now such as -10m.",
            show_default=False,
        ),
    ],
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Only this topic. It may be given several times. Without it, all topics in which the group has "
            "offsets.",
            show_default=False,
        ),
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="Reset. Without this, only show where the group would go.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show where a consumer group would go in each queue, and move it there with --execute. The group must have no
    consumer meanwhile. A streaming query of Spark has its place in its checkpoint, and does not move.
    """
    path = existing(root)
    with broker_named("offsets", f"mqadmin resetOffsetByTime -n HOST:PORT -g {group} -t TOPIC -s TIME"):
        resets = reset_offsets(path, group, _place(to), topics, execute=execute)

    if as_json:
        for reset in resets:
            out.json_line(
                {
                    "group": group,
                    "topic": reset.topic,
                    "queueId": reset.queue_id,
                    "committedOffset": reset.committed,
                    "newOffset": reset.offset,
                    "executed": execute,
                }
            )
        return
    titles = [("topic", False), ("queue", True), ("committed", True), ("new", True)]
    out.table(titles, [["-" if value is None else value for value in reset] for reset in resets])
    if not execute:
        out.line("nothing was changed. To reset, give --execute")


def _place(text: str) -> str | int | datetime:
    """A place that a user named. A whole number is an offset, unless it has the length of a time in milliseconds.

    Raises
    ------
    ConfigError
        It is none.
    """
    if text in ("earliest", "latest"):
        return text
    if re.fullmatch(r"[0-9]{1,12}", text):
        return int(text)
    try:
        return datetime.fromtimestamp(time_ms("--to", text) / 1000, UTC)
    except (ConfigError, OverflowError, ValueError):
        raise ConfigError(
            f"--to: found {text!r}; allowed are earliest, latest, an offset, a time such as 2026-01-31T12:00:00Z or in "
            "milliseconds since 1970, and a time before now such as -10m",
            key="--to",
            value=text,
        ) from None


def _asked(retry_max_times: int | None, retry_queues: int | None, consume: bool | None) -> dict[str, Any]:
    options = {"retry_max_times": retry_max_times, "retry_queue_nums": retry_queues, "consume_enable": consume}
    return {name: value for name, value in options.items() if value is not None}


def _update(group: str, changes: dict[str, Any]) -> str:
    """The command of RocketMQ's tools that does the same through a broker."""
    letters = {"retry_max_times": "-r", "retry_queue_nums": "-q", "consume_enable": "-s"}
    words = "".join(f" {letters[name]} {str(value).lower()}" for name, value in changes.items())
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
