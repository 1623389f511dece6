"""`messagestore get`: messages of a topic, queue by queue."""

from __future__ import annotations

from typing import Annotated

import typer

from messagestore import ConfigError
from messagestore.spi import Location
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, From, Json, by_location, opened
from pyspark_messagestore.cli.cursor import messages, queue_ids

PLACE = 220
PANEL = "Messages"

_GET_COUNT = 32


@by_location
def get(
    root: Location,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)],
    queue: Annotated[
        int | None,
        typer.Argument(
            metavar="QUEUE", min=0, help="One queue of the topic; without it, all queues.", show_default=False
        ),
    ] = None,
    offset: Annotated[
        str,
        typer.Option(
            "--offset", metavar="N", help="Where to start: a queue offset, earliest, or latest for the last messages."
        ),
    ] = "earliest",
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Show at most N messages of each queue.")
    ] = _GET_COUNT,
    as_json: Json = False,
) -> None:
    """Show messages of a topic, queue by queue."""
    if offset not in tuple(From) and not (offset.isascii() and offset.isdigit()):
        raise ConfigError(
            f"--offset: found {offset!r}; allowed is a number, earliest or latest", key="--offset", value=offset
        )

    shown_count = 0
    with opened(root) as store:
        used, ids = queue_ids(store, topic)
        if queue is not None and queue not in ids:
            raise ConfigError(
                f"{topic}: the topic has no queue {queue}. Its queues are {', '.join(map(str, ids))}",
                key="QUEUE",
                value=queue,
            )

        if not used:
            out.note(f"{topic}: the topic has {out.count_words(len(ids), 'queue')} and no message yet")

        chosen = used if queue is None else [queue]
        ends = store.ends([topic]).queues
        begins = store.begins((topic, queue_id) for queue_id in chosen)

        for queue_id in chosen:
            low, high = begins[topic, queue_id], ends.get((topic, queue_id), 0)
            start = {"earliest": low, "latest": max(low, high - count)}.get(offset)
            start = int(offset) if start is None else start

            if not used:
                continue
            if not low <= start < high:
                out.note(f"{topic}/{queue_id}: no message at {start}. The queue holds {_range_words(low, high)}")
                continue

            for message in messages(store, (topic, queue_id), start, min(high, start + count)):
                out.show_message(message, as_json=as_json)
                shown_count += 1

    if not shown_count:
        raise typer.Exit(FOUND_NOTHING)


def _range_words(low: int, high: int) -> str:
    return f"{low} to {high - 1}" if high > low else "none"
