"""`messagestore half commit` and `half rollback`: a transaction is ended by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from messagestore import HalfMessageEndedError, MessageStore
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, ConfigFile, Json, Root, Wait, config_of, existing

PLACE = 430
PANEL = "Messages"

half = typer.Typer(no_args_is_help=True, help="Commit a half message, or roll it back.")

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The message id of the half message, or its UNIQ_KEY. `messagestore halves` shows both.",
        show_default=False,
    ),
]


@half.command("commit")
def commit(
    root: Root, message_id: Id, store_config: ConfigFile = None, wait: Wait = None, as_json: Json = False
) -> None:
    """Commit a half message: its message appears in its topic. A second commit changes nothing."""
    path = existing(root)
    try:
        with MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store:
            half = store.find_half(message_id)
            result = half.commit()
    except HalfMessageEndedError as error:
        _refused(error)

    place = {"topic": half.half.topic, "queueId": result.queue_id, "queueOffset": result.queue_offset}
    if as_json:
        out.json_line({**place, "messageId": result.message_id})
    else:
        out.line(f"committed: {out.shown(half.half.topic)}/{result.queue_id}, message {result.queue_offset}")


@half.command("rollback")
def rollback(
    root: Root, message_id: Id, store_config: ConfigFile = None, wait: Wait = None, as_json: Json = False
) -> None:
    """Roll a half message back: its message never appears in its topic. A second rollback changes nothing."""
    path = existing(root)
    try:
        with MessageStore.open(path, config_of(store_config, lock_timeout=wait)) as store:
            half = store.find_half(message_id)
            half.rollback()
    except HalfMessageEndedError as error:
        _refused(error)

    if as_json:
        out.json_line({"rolledBack": half.message_id})
    else:
        out.line(f"rolled back: it was for {out.shown(half.half.topic)}/{half.half.queue_id}")


def _refused(error: HalfMessageEndedError) -> None:
    out.note(f"messagestore: {error}")
    raise typer.Exit(FOUND_NOTHING) from None
