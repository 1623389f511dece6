"""The command line `messagestore`: show a store, put and get messages, check and repair a store. It needs no Spark.

Exit codes: 0: done. 1: the command found a fault, or found nothing. 2: the command is wrong or cannot be done; one line
on standard error says why. 3: somebody else holds the store. 4: `recover` did its work and cut bytes off the log, or
made queues again.

Commands that only read take no lock and write nothing. They work beside any writer, including a Java broker.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import re
import signal
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import pyspark_messagestore
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    ConfigError,
    CorruptionError,
    Message,
    MessageExt,
    MessageStore,
    NotAStoreError,
    PutMessageResult,
    PutMessageStatus,
    StoreConfig,
    StoreError,
    StoreLockedError,
)
from messagestore.spi import APPENDED, LOCAL_STORES, StoreReader, check_topic, local_operator
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_batches import Batches, app_table
from pyspark_messagestore.cli_read import Cursor, messages, queue_ids
from pyspark_messagestore.cli_status import group_table, status_lines

FOUND_NOTHING, CANNOT, LOCKED, CUT = 1, 2, 3, 4
_GET_COUNT = 32
_TAIL_COUNT = 10


class _Commands(TyperGroup):
    """Commands whose errors become one line and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # typer's own class or click's, by version
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `messagestore dump ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except StoreLockedError as error:
            out.note(f"messagestore: {error}")
            raise typer.Exit(LOCKED) from error
        except CorruptionError as error:
            out.note(f"messagestore: {error}")
            raise typer.Exit(FOUND_NOTHING) from error
        except (StoreError, OSError) as error:
            out.note(f"messagestore: {_words(error)}")
            raise typer.Exit(CANNOT) from error


def _words(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, StoreError):
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or text
    return "; ".join([text, *getattr(error, "__notes__", [])])


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show a message store, put and get messages, and check or repair a store.",
    epilog="Exit codes: 0: done. 1: the command found a fault, or found nothing. 2: the command is wrong or cannot be "
    "done. 3: somebody else holds the store. 4: recover cut bytes off the end of the log, or "
    "made queues again.",
)


def _version(asked: bool) -> None:
    if asked:
        out.line(f"messagestore {pyspark_messagestore.__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


Root = Annotated[str, typer.Argument(metavar="ROOT", help="The store's root folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Write JSON: one object, or one object per line.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--store-config",
        metavar="FILE",
        help="A store.properties file, or a broker's own broker.conf. It is needed for a new store whose settings are "
        "not the defaults, and for a broker's store with file sizes of its own.",
        show_default=False,
    ),
]
Wait = Annotated[
    str | None,
    typer.Option(
        "--wait",
        metavar="DURATION",
        help="How long to wait for another writer, for example 500ms or 2m. The default is 30s.",
        show_default=False,
    ),
]


class Flush(enum.StrEnum):
    """When a put is on the disk."""

    SYNC_FLUSH = SYNC_FLUSH
    ASYNC_FLUSH = ASYNC_FLUSH


class From(enum.StrEnum):
    """Where to begin."""

    EARLIEST = "earliest"
    LATEST = "latest"


# ---- opening


def _path(root: str) -> str:
    """A folder's path from a path or a file URL."""
    if root.startswith("file:"):
        return urllib.parse.unquote(urllib.parse.urlparse(root).path)
    if re.match(r"[A-Za-z][\w+.-]*:", root):
        raise ConfigError(
            f"{root}: found a URL; allowed is the path of a folder on this machine", key="ROOT", value=root
        )
    return root


def _config(file: Path | None, **changes: object) -> StoreConfig:
    config = StoreConfig.load(file) if file is not None else StoreConfig()
    return config.replace(**{name: value for name, value in changes.items() if value is not None})


@contextmanager
def _opened(root: str) -> Iterator[StoreReader]:
    """The store, open for reading. Index files are not opened, so a broker's store needs no configuration."""
    with contextlib.closing(LOCAL_STORES.reader(_path(root), _looking())) as store:
        yield store


def _looking(file: Path | None = None) -> StoreConfig:
    """Settings for a command that only looks."""
    return _config(file, message_index_enable=False)


def _check_exists(root: str) -> str:
    path = _path(root)
    if not local_operator.holds_store(path):
        raise NotAStoreError(
            f"{os.path.abspath(path)}: found no message store (no commitlog folder); give the store's root folder",
            path=path,
        )
    return path


# ---- commands that look


@app.command()
def status(root: Root, store_config: ConfigFile = None, as_json: Json = False) -> None:
    """Show who holds the store, how it was left, and what is in it."""
    found = local_operator.status(_path(root), _looking(store_config))
    if as_json:
        out.json_line(found)
    else:
        status_lines(found)
    for fault in found["faults"]:
        out.note(f"messagestore: {fault}")
    if found["faults"]:
        raise typer.Exit(FOUND_NOTHING)


@app.command()
def groups(root: Root, as_json: Json = False) -> None:
    """Show how far consumer groups have read: the committed offset, the maximum offset and the lag of each queue."""
    rows, faults = local_operator.groups(_path(root), _looking())
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        group_table(rows)
    for fault in faults:
        out.note(f"messagestore: {fault}")
    if not rows:
        out.note("no consumer group found")
    if faults or not rows:
        raise typer.Exit(FOUND_NOTHING)


@app.command()
def dump(
    root: Root,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="PHYSICAL",
            min=0,
            help="Start with the record at this physical offset.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="Show at most N records.", show_default=False)
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="T", help="Show only records of this topic.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Also show the head of each record in hex.")] = False,
    as_json: Json = False,
) -> None:
    """Show the records of the CommitLog in the order in which they were written."""
    found = 0
    with contextlib.closing(local_operator.dump(_path(root), _looking(), start, out.note)) as records:
        for head, message in records:
            if topic is not None and message.topic != topic:
                continue
            if as_json:
                out.json_line({**out.message_fields(message), **({"head": head.hex()} if raw else {})})
            else:
                out.line(out.message_line(message, physical=True))
                for text in out.hex_lines(head) if raw else ():
                    out.line(text)
            found += 1
            if found == count:
                break
    if not found:
        out.note("no record found")
        raise typer.Exit(FOUND_NOTHING)


@app.command("verify")
def verify_command(root: Root, store_config: ConfigFile = None, as_json: Json = False) -> None:
    """Check every byte of the store that has a meaning. This writes nothing, and a writer may be at work."""
    path = _check_exists(root)
    with out.progress_bar("checking") as progress:
        report = local_operator.verify(path, _config(store_config), progress=progress)
    if as_json:
        out.json_line(report.to_dict())
    else:
        out.report_lines(report, os.path.realpath(path))
    if not report.ok:
        raise typer.Exit(FOUND_NOTHING)


# ---- commands that write


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the store's warnings, because the command shows the report that they come from."""
    logger = logging.getLogger("messagestore")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@app.command()
def recover(
    root: Root,
    store_config: ConfigFile = None,
    wait: Wait = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="If the end of the log is lost, continue without the messages that were there."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Repair what a killed writer left, and close the store cleanly, so that a Java broker can take over.
    The exit code is 4 if bytes behind the log's end were cut off; one line then says how many messages they held. It is
    also 4 if a broker has replaced messages that were acknowledged, if --accept-loss went on without messages,
    and if ConsumeQueues were damaged or missing and had to be made again from the log.
    """
    path = _check_exists(root)
    config = _config(store_config, lock_timeout=wait)
    with _quiet(), MessageStore.open(path, config, accept_loss=accept_loss) as store:
        report = store.report
        assert report is not None
        lines = [report.rebuilt, store.check_queues()]
        report.rebuilt = "; ".join(line for line in lines if line) or None
    left = local_operator.is_open(path)
    if as_json:
        out.json_line({**report.to_dict(), "cut": report.cut, "closed": not left})
    else:
        rows = [("found", report.reason), ("log ends at", str(report.end))]
        if report.reason != "clean":
            rows.append(("walked", f"{out.count_words(report.record_count, 'record')} from {report.start} on"))
        if report.cut is not None:
            rows.append(("cut off", report.cut))
        if report.lost is not None:
            rows.append(("lost", report.lost))
        if report.changed is not None:
            rows.append(("changed", report.changed))
        if report.rebuilt is not None:
            rows.append(("rebuilt", report.rebuilt))
        out.facts([*rows, *(("note", text) for text in report.notes if text not in (report.rebuilt or ""))])
        if left:
            out.line("another writer is attached: `abort` stays until it has closed; do not start a broker yet")
        else:
            out.line("closed cleanly: a Java broker can take over")
    if any(each is not None for each in (report.cut, report.lost, report.changed, report.rebuilt)):
        raise typer.Exit(CUT)


@app.command()
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
            help="Put into this queue. Without it, the hash of the first key chooses the queue; without keys, the "
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
            "put: --count repeats a single message; leave it out with --lines", key="--count", value=count
        )
    path = _path(root)
    check_topic(topic)  # before a store is created for it
    config = _config(store_config, lock_timeout=wait, flush_disk_type=flush.value if flush is not None else None)
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


# ---- batches

batches_app = typer.Typer(
    cls=Batches,
    no_args_is_help=True,
    help="Show which apps have batches in a store, or let an app continue with a version.",
)
app.add_typer(batches_app, name="batches")


@batches_app.command("list")
def batches_list(root: Root, as_json: Json = False) -> None:
    """Show the apps whose batches the store holds, and the next version of each. `batches ROOT` does the same."""
    rows = local_operator.batches(_path(root), _looking())
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        app_table(rows)
    if not rows:
        out.note("no batch found")
        raise typer.Exit(FOUND_NOTHING)


@batches_app.command("start")
def batches_start(
    root: Root,
    app_id: Annotated[
        str, typer.Argument(metavar="APP", help="The txnAppId, or the app_id of MessageStoreSink.", show_default=False)
    ],
    version: Annotated[
        int, typer.Argument(metavar="VERSION", help="The id of the batch that comes next.", show_default=False, min=1)
    ],
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Let an app continue with VERSION once, because its sink was added to a running query, or because its earlier
    batches are lost. The rows of the versions before it are not in the store. A missing or empty ROOT becomes a store.
    """
    path = _path(root)
    is_new = not local_operator.holds_store(path)
    with MessageStore.open(path, _config(store_config, lock_timeout=wait)) as store:
        if is_new:
            out.note(f"created a new store in {os.path.abspath(path)}")
        result = store.start_batches(app_id, version)
    if as_json:
        out.json_line({"app": app_id, "version": version, "status": result.status})
    elif result.status == APPENDED:
        out.line(f"app {app_id} continues with version {version}")
    else:
        out.line(f"nothing to do: the next version of app {app_id} is {version}")


# ---- commands that read messages


@app.command()
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
    with _opened(root) as store:
        ids = queue_ids(store, topic)
        if queue is not None and queue not in ids:
            raise ConfigError(
                f"{topic}: the topic has no queue {queue}; its queues are {', '.join(map(str, ids))}",
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
                out.note(f"{topic}/{queue_id}: no message at {start}; there are {_range_words(low, high)}")
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


@app.command()
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
    """Show the last messages in the order in which they were stored, and with --follow also those that arrive."""
    shown = 0
    try:
        with _noted_interrupt() as interrupted, _opened(root) as store:
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


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # for a terminal without UTF-8
    app(prog_name="messagestore")


if __name__ == "__main__":
    main()
