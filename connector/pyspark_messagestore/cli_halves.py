"""`messagestore halves`, `half commit` and `half rollback`: transactions that have not ended."""

from __future__ import annotations

from typing import Annotated

import typer

from messagestore import HalfMessageEndedError, MessageStore
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_app import (
    FOUND_NOTHING,
    ConfigFile,
    Json,
    Root,
    Wait,
    config_of,
    existing,
    looking,
    path_of,
)

half_app = typer.Typer(no_args_is_help=True, help="Commit a half message, or roll it back.")

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The message id of the half message, or its UNIQ_KEY. `messagestore halves` shows both.",
        show_default=False,
    ),
]


def halves(root: Root, as_json: Json = False) -> None:
    """Show the half messages that have neither been committed nor rolled back, the oldest first.
    Nobody who reads their topics sees them. Programs that use the library end them, and so does a RocketMQ broker.
    """
    with out.waiting("reading half messages"), MessageStore.open_read_only(path_of(root), looking()) as store:
        found = store.open_halves()
    if as_json:
        for half in found:
            out.json_line(
                {
                    "messageId": half.message_id,
                    "uniqueKey": half.transaction_id,
                    "topic": half.topic,
                    "queueId": half.queue_id,
                    "producerGroup": half.producer_group,
                    "checkTimes": half.check_times,
                    "bornTimestamp": half.born_timestamp_ms,
                    "queueOffset": half.queue_offset,
                    "physicalOffset": half.physical_offset,
                }
            )
    elif found:
        titles = [("message id", False), ("topic", False), ("queue", True), ("producer group", False), ("checks", True)]
        rows = [
            (
                half.message_id,
                out.shown(half.topic),
                half.queue_id,
                out.shown(half.producer_group),
                half.check_times,
                out.time_words(half.born_timestamp_ms),
                out.shown(half.transaction_id),
            )
            for half in found
        ]
        out.table([*titles, ("made", False), ("UNIQ_KEY", False)], rows)
    if not found:
        out.note("messagestore: no open half message found")
        raise typer.Exit(FOUND_NOTHING)


@half_app.command("commit")
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


@half_app.command("rollback")
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
