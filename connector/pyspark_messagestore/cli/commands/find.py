"""`messagestore find`: messages by key or id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from messagestore import ConfigError, MessageExt, MessageStore, ReadOnlyStore
from messagestore.spi import BATCH_TOPIC, Location, query_brokers
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import (
    FOUND_NOTHING,
    ConfigFile,
    Json,
    by_location,
    config_of,
    opened,
    path_of,
)
from pyspark_messagestore.cli.cursor import queue_ids
from pyspark_messagestore.words import time_ms

PLACE = 240
PANEL = "Messages"

_FIND_COUNT = 64


@by_location
def find(
    root: Location,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Search only this topic. Repeat the option for more. Without it, all topics are searched.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Find the messages that have this key.", show_default=False),
    ] = None,
    unique_key: Annotated[
        str | None,
        typer.Option(
            "--unique-key",
            metavar="ID",
            help="Find the message with this id of its sender (UNIQ_KEY, which RocketMQ's clients show as msgId).",
            show_default=False,
        ),
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option(
            "--msg-id",
            metavar="ID",
            help="Find the message with this offset message id, as `put` and mqadmin show it.",
            show_default=False,
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Only messages that were stored at this time or later: milliseconds since 1970, a time such as "
            "2026-01-31T12:00:00Z, or a time before now such as -10m.",
            show_default=False,
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="TIME", help="Only messages that were stored at this time or earlier.", show_default=False
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, help="Show at most N messages of each topic, the newest.")
    ] = _FIND_COUNT,
    store_config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Find messages by key, by their sender's id, or by offset message id. Parts of the log that the index does not
    cover are read, so the answer is complete; without an index it takes as long as reading the log. Brokers that run
    answer from their index alone.
    """
    if [key, unique_key, message_id].count(None) != 2:
        raise ConfigError("find: give exactly one of --key, --unique-key and --msg-id", key="find")
    if message_id is not None and (topic or begin is not None or end is not None):
        raise ConfigError("find: --msg-id names one place in the log. Leave out --topic, --from and --to", key="find")

    sought = key if key is not None else unique_key
    times = [0 if begin is None else time_ms("--from", begin), None if end is None else time_ms("--to", end)]

    if root.is_cluster:
        if sought is None or not topic or store_config is not None:
            raise ConfigError(
                f"{root}: found the address of RocketMQ's brokers. They find messages of a topic by key: give --topic, "
                "and --key or --unique-key, without --store-config. For a message id, use `mqadmin queryMsgById`",
                key="find",
            )
        _at_brokers(root, topic, sought, count, times, unique=unique_key is not None, as_json=as_json)
        return

    path, shown_count = path_of(str(root)), 0
    if topic:
        with opened(root, store_config) as reader:  # a slip of the keyboard would find nothing
            for name in topic:
                queue_ids(reader, name)

    with MessageStore.open_read_only(path, config_of(store_config)) as store:
        if sought is None:
            messages: Iterable[MessageExt] = filter(None, [store.look_message_by_id(message_id or "")])
        else:
            names = topic or sorted(store.topics().keys() - {BATCH_TOPIC})
            messages = _in_topics(store, names, sought, count, times, unique=unique_key is not None)
        for message in messages:
            out.show_message(message, as_json=as_json)
            shown_count += 1

    if not shown_count:
        out.note("no message found")
        raise typer.Exit(FOUND_NOTHING)


def _at_brokers(
    root: Location, topics: list[str], sought: str, count: int, times: list[int | None], *, unique: bool, as_json: bool
) -> None:
    """Show the newest messages of some topics that brokers find, each with the name of its broker.

    Raises
    ------
    typer.Exit
        There is none, or a broker did not show all.
    """
    begin_ms, end_ms = times
    shown_count, all_faults = 0, list[str]()
    for topic in topics:
        with out.waiting("asking the brokers"):
            hits, faults = query_brokers(
                root, topic, sought, count, unique=unique, begin_ms=begin_ms or 0, end_ms=end_ms
            )
        for broker, message in hits:
            out.show_message(message, as_json=as_json, broker=broker)
        shown_count += len(hits)
        all_faults += faults

    for fault in all_faults:
        out.note(f"messagestore: {fault}")
    if not shown_count:
        out.note("no message found")
    if all_faults or not shown_count:
        raise typer.Exit(FOUND_NOTHING)


def _in_topics(
    store: ReadOnlyStore, topics: list[str], sought: str, count: int, times: list[int | None], *, unique: bool
) -> Iterator[MessageExt]:
    """The newest messages of each topic with a key or a unique key, as soon as they are found."""
    for topic in topics:
        with out.waiting("looking through index and log"):
            hits = _with_key(store, topic, sought, count, times, unique=unique)
        yield from hits


def _with_key(
    store: ReadOnlyStore, topic: str, sought: str, count: int, times: list[int | None], *, unique: bool
) -> list[MessageExt]:
    """The newest messages of a topic with a key or a unique key. The store looks for both at once."""
    begin_ms, end_ms = times
    most = count
    while True:
        hits = store.query_message(topic, sought, most, begin_ms or 0, end_ms)
        mine = [hit for hit in hits if (hit.unique_key == sought if unique else sought in hit.keys)]
        if len(mine) >= count or len(hits) < most:
            return mine[-count:]
        most *= 4
