"""`messagestore put`, `get`, `tail` and `find`: messages that go into a store and come out of it."""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    ConfigError,
    Message,
    MessageExt,
    MessageStore,
    PutMessageResult,
    PutMessageStatus,
    ReadOnlyStore,
)
from messagestore.spi import BATCH_TOPIC, check_topic, local_operator
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_app import (
    FOUND_NOTHING,
    ConfigFile,
    Json,
    Root,
    Wait,
    config_of,
    opened,
    path_of,
    time_ms,
)
from pyspark_messagestore.cli_read import Cursor, messages, queue_ids

_GET_COUNT = 32
_TAIL_COUNT = 10
_FIND_COUNT = 64


class Flush(enum.StrEnum):
    """When a put is on the disk."""

    SYNC_FLUSH = SYNC_FLUSH
    ASYNC_FLUSH = ASYNC_FLUSH


class From(enum.StrEnum):
    """Where to begin."""

    EARLIEST = "earliest"
    LATEST = "latest"


# ---- put


def put(
    root: Root,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="The topic. A new topic is created.", show_default=False)
    ],
    body: Annotated[
        str | None,
        typer.Argument(
            metavar="BODY", help="The body of the message, unless --file or --lines is given.", show_default=False
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", metavar="FILE", help="Read the body from this file; - is standard input.", show_default=False
        ),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Put one message per line of standard input.")] = False,
    queue: Annotated[
        int | None,
        typer.Option(
            "--queue",
            metavar="ID",
            min=0,
            help="Put into this queue. Without it, the hash of the first key chooses the queue. Without keys, the "
            "queues take turns.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            help="A key by which the message can be found. Repeat the option for more keys.",
            show_default=False,
        ),
    ] = None,
    tags: Annotated[
        str | None, typer.Option("--tags", metavar="TAG", help="The tag of the message.", show_default=False)
    ] = None,
    prop: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            metavar="NAME=VALUE",
            help="A property of the message. Repeat the option for more.",
            show_default=False,
        ),
    ] = None,
    flush: Annotated[
        Flush | None,
        typer.Option(
            "--flush",
            help="SYNC_FLUSH waits until the message is on the disk; ASYNC_FLUSH does not. The default is the setting "
            "in --store-config, or SYNC_FLUSH.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="Put the same message N times.")] = 1,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Put messages, and print one line for each as soon as it is stored. A missing or empty ROOT becomes a store."""
    if [body is not None, file is not None, lines].count(True) != 1:
        raise ConfigError("put: give exactly one of BODY, --file FILE and --lines", key="BODY")
    if lines and count > 1:
        raise ConfigError(
            "put: --count repeats a single message. Leave it out with --lines", key="--count", value=count
        )
    path = path_of(root)
    check_topic(topic)  # before a store is created for it
    config = config_of(store_config, lock_timeout=wait, flush_disk_type=flush.value if flush is not None else None)
    properties = dict(_property(text) for text in prop or ())
    bodies = _lines() if lines else [_body(body, file)] * count
    is_new = not local_operator.holds_store(path)
    late = False
    with MessageStore.open(path, config) as store:
        if is_new:
            out.note(f"created a new store in {os.path.abspath(path)}")
        for data in bodies:
            message = Message(topic, data, queue_id=queue, keys=key or (), tags=tags, properties=properties)
            result = store.put_message(message)
            late |= result.status is PutMessageStatus.FLUSH_DISK_TIMEOUT
            _show_put(topic, result, as_json=as_json)
    if late:
        out.note("messagestore: the message is stored, but the disk took longer than syncFlushTimeout to confirm it")
        raise typer.Exit(FOUND_NOTHING)


def _body(text: str | None, file: str | None) -> bytes:
    if text is not None:
        return os.fsencode(text)
    if file == "-":
        return sys.stdin.buffer.read()
    assert file is not None
    return Path(file).read_bytes()


def _lines() -> Iterator[bytes]:
    for data in sys.stdin.buffer:
        yield data.removesuffix(b"\n")


def _property(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--property: found {text!r}; allowed is NAME=VALUE", key="--property", value=text)
    return name, value


def _show_put(topic: str, result: PutMessageResult, *, as_json: bool) -> None:
    if as_json:
        out.json_line(
            {
                "status": result.status.value,
                "topic": topic,
                "queueId": result.queue_id,
                "queueOffset": result.queue_offset,
                "physicalOffset": result.physical_offset,
                "size": result.size,
                "msgId": result.message_id,
                "storeTimestamp": result.store_timestamp_ms,
            }
        )
        return
    out.line(
        f"{result.status.value}  {out.shown(topic)}/{result.queue_id} @{result.queue_offset}  "
        f"at {result.physical_offset}, {result.size} B  {result.message_id}"
    )


# ---- commands that read messages


def get(
    root: Root,
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
    found = 0
    with opened(root) as store:
        ids = queue_ids(store, topic)
        if queue is not None and queue not in ids:
            raise ConfigError(
                f"{topic}: the topic has no queue {queue}. Its queues are {', '.join(map(str, ids))}",
                key="QUEUE",
                value=queue,
            )
        chosen = ids if queue is None else [queue]
        ends = store.ends([topic]).queues
        begins = store.begins((topic, queue_id) for queue_id in chosen)
        for queue_id in chosen:
            low, high = begins[topic, queue_id], ends.get((topic, queue_id), 0)
            start = {"earliest": low, "latest": max(low, high - count)}.get(offset)
            start = int(offset) if start is None else start
            if not low <= start < high:
                out.note(f"{topic}/{queue_id}: no message at {start}. The queue holds {_range_words(low, high)}")
                continue
            for message in messages(store, (topic, queue_id), start, min(high, start + count)):
                _show(message, as_json=as_json)
                found += 1
    if not found:
        raise typer.Exit(FOUND_NOTHING)


def _range_words(low: int, high: int) -> str:
    return f"{low} to {high - 1}" if high > low else "none"


def _show(message: MessageExt, *, as_json: bool) -> None:
    if as_json:
        out.json_line(out.message_fields(message))
    else:
        out.line(out.message_line(message))


@contextmanager
def _noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C as usual, and remember it: if it arrives in a finalizer, Python only prints it and continues."""
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    usual = signal.default_int_handler
    takes = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is usual
    if takes:
        signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(came)
    finally:
        if takes:
            signal.signal(signal.SIGINT, usual)


def tail(
    root: Root,
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", help="The topics to show; without one, all topics.", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new messages and show them as they arrive, until Ctrl-C.")
    ] = False,
    start: Annotated[
        From,
        typer.Option(
            "--from",
            help="earliest starts with the first message. latest shows the last messages, or with --follow only new "
            "ones.",
        ),
    ] = From.LATEST,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            metavar="N",
            min=1,
            help=f"Stop after N messages. Without it, latest shows {_TAIL_COUNT}.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the last messages in the order in which they were stored, or with --follow those that arrive."""
    shown = 0
    try:
        with _noted_interrupt() as interrupted, opened(root) as store:
            if topics and not follow:
                for topic in topics:
                    queue_ids(store, topic)
            cursor = Cursor(store, topics or None)
            if start is From.LATEST:
                cursor.skip_to(0 if follow else count or _TAIL_COUNT)
            for message in cursor.follow(interrupted) if follow else cursor.once():
                _show(message, as_json=as_json)
                shown += 1
                if shown == count:
                    return
            if interrupted():
                return
    except KeyboardInterrupt:
        return
    if not shown:
        out.note("no message found")
        raise typer.Exit(FOUND_NOTHING)


# ---- find


def find(
    root: Root,
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
    cover are read, so the answer is complete; without an index it takes as long as reading the log.
    """
    if [key, unique_key, message_id].count(None) != 2:
        raise ConfigError("find: give exactly one of --key, --unique-key and --msg-id", key="find")
    if message_id is not None and (topic or begin is not None or end is not None):
        raise ConfigError("find: --msg-id names one place in the log. Leave out --topic, --from and --to", key="find")
    wanted = key if key is not None else unique_key
    times = [0 if begin is None else time_ms("--from", begin), None if end is None else time_ms("--to", end)]
    found = 0
    with MessageStore.open_read_only(path_of(root), config_of(store_config)) as store:
        if wanted is None:
            assert message_id is not None
            message = store.look_message_by_id(message_id)
            hits = [] if message is None else [message]
            for message in hits:
                _show(message, as_json=as_json)
            found = len(hits)
        else:
            for name in topic or sorted(store.topics().keys() - {BATCH_TOPIC}):
                with out.waiting("looking through index and log"):
                    hits = _with_key(store, name, wanted, count, times, unique=unique_key is not None)
                for message in hits:
                    _show(message, as_json=as_json)
                    found += 1
    if not found:
        out.note("no message found")
        raise typer.Exit(FOUND_NOTHING)


def _with_key(
    store: ReadOnlyStore, topic: str, wanted: str, count: int, times: list[int | None], *, unique: bool
) -> list[MessageExt]:
    """The newest messages of a topic with a key or a unique key. The store looks for both at once."""
    begin_ms, end_ms = times
    asked = count
    while True:
        hits = store.query_message(topic, wanted, asked, begin_ms or 0, end_ms)
        mine = [each for each in hits if (each.unique_key == wanted if unique else wanted in each.keys)]
        if len(mine) >= count or len(hits) < asked:
            return mine[-count:]
        asked *= 4
