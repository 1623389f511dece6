"""`messagestore get`: messages of a topic, queue by queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from messagestore import ConfigError, MessageExt
from messagestore.spi import Location, StoreReader
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, From, Json, by_location, opened_parts
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
            metavar="QUEUE",
            min=0,
            help="One queue of the topic, on each broker of a cluster; without it, all queues.",
            show_default=False,
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
    with opened_parts(root, [topic]) as stores:
        ids = {name: queue_ids(store, topic) for name, store in stores.items()}
        if queue is not None and not any(queue in known for _, known in ids.values()):
            known = sorted({queue_id for _, known in ids.values() for queue_id in known})
            raise ConfigError(
                f"{topic}: the topic has no queue {queue}. Its queues are {', '.join(map(str, known))}",
                key="QUEUE",
                value=queue,
            )

        for name, store in stores.items():
            used, known = ids[name]
            place = f"{name}: {topic}" if name else topic
            if not used:
                out.note(f"{place}: the topic has {out.count_words(len(known), 'queue')} and no message yet")
                continue
            chosen = used if queue is None else [queue] if queue in known else []
            for message in _messages(store, topic, chosen, offset, count, place):
                out.show_message(message, as_json=as_json, broker=name)
                shown_count += 1

    if not shown_count:
        raise typer.Exit(FOUND_NOTHING)


def _messages(
    store: StoreReader, topic: str, queue_ids: list[int], offset: str, count: int, place: str
) -> Iterator[MessageExt]:
    """At most `count` messages of each queue from an offset on; a note names each queue that has none there."""
    ends = store.ends([topic]).queues
    begins = store.begins((topic, queue_id) for queue_id in queue_ids)
    for queue_id in queue_ids:
        low, high = begins[topic, queue_id], ends.get((topic, queue_id), 0)
        start = {"earliest": low, "latest": max(low, high - count)}.get(offset)
        start = int(offset) if start is None else start
        if not low <= start < high:
            out.note(f"{place}/{queue_id}: no message at {start}. The queue holds {_range_words(low, high)}")
            continue
        yield from messages(store, (topic, queue_id), start, min(high, start + count))


def _range_words(low: int, high: int) -> str:
    return f"{low} to {high - 1}" if high > low else "none"
