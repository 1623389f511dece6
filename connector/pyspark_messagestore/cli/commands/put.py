"""`messagestore put`: messages that go into a store."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    ConfigError,
    Message,
    MessageStore,
    PutMessageResult,
    PutMessageStatus,
    StoreFullError,
)
from messagestore.inspect import operator
from messagestore.spi import check_topic
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, ConfigFile, Json, Root, Wait, config_of, path_of

PLACE = 210
PANEL = "Messages"


class Flush(enum.StrEnum):
    """When a put is on the disk."""

    SYNC_FLUSH = SYNC_FLUSH
    ASYNC_FLUSH = ASYNC_FLUSH


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
            metavar="TYPE",
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
    is_new = not operator.holds_store(path)
    late, durable = False, False

    try:
        with MessageStore.open(path, config) as store:
            if is_new:
                out.note(f"created a new store in {os.path.abspath(path)}")
            for data in bodies:
                message = Message(topic, data, queue_id=queue, keys=key or (), tags=tags, properties=properties)
                result = store.put_message(message)
                late |= result.status is PutMessageStatus.FLUSH_DISK_TIMEOUT
                _show_put(topic, result, as_json=as_json)
            # With SYNC_FLUSH, each message that was shown is on the disk, even if the store cannot be closed.
            durable = config.flush_disk_type == SYNC_FLUSH
    except StoreFullError as error:
        if not durable:
            raise
        out.note(
            f"messagestore: every message that was shown is stored, but the store could not be closed: {error}. Do not "
            "put them again. Make room; the next writer does the rest"
        )

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
