"""`messagestore halves`: transactions that have not ended."""

from __future__ import annotations

import typer

from messagestore import MessageStore
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, Json, Root, looking, path_of

PLACE = 160
PANEL = "Messages"


def halves(root: Root, as_json: Json = False) -> None:
    """Show the half messages that have neither been committed nor rolled back, the oldest first.
    Nobody who reads their topics sees them. Programs that use the library end them, and so does a RocketMQ broker.
    """
    with out.waiting("reading half messages"), MessageStore.open_read_only(path_of(root), looking()) as store:
        open_halves = store.open_halves()

    if as_json:
        for half in open_halves:
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
    elif open_halves:
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
            for half in open_halves
        ]
        out.table([*titles, ("made", False), ("UNIQ_KEY", False)], rows)

    if not open_halves:
        out.note("messagestore: no open half message found")
        raise typer.Exit(FOUND_NOTHING)
