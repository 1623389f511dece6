"""`messagestore tail`: the last messages of a store, and those that arrive."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from messagestore.spi import Location, StoreReader, brokers_of
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, From, Json, by_location, opened, opened_parts
from pyspark_messagestore.cli.cursor import Cursors, queue_ids

PLACE = 230
PANEL = "Messages"

_TAIL_COUNT = 10


@contextmanager
def _noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C as usual, and remember it: if it arrives in a finalizer, Python only prints it and continues."""
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        signal.default_int_handler(number, frame)

    usual = signal.default_int_handler
    takes = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is usual
    if takes:
        signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(signals)
    finally:
        if takes:
            signal.signal(signal.SIGINT, usual)


@by_location
def tail(
    root: Location,
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
    """Show the last messages in the order in which they were stored, or with --follow those that arrive. Messages of
    all brokers of a cluster come in the order of their store times.
    """
    shown = 0
    try:
        with _noted_interrupt() as interrupted, contextlib.ExitStack() as stack:
            # With --follow, a topic that is not there yet may still come.
            wanted = [] if follow else topics or []
            stores = stack.enter_context(opened_parts(root, wanted))
            if not root.is_cluster:
                for topic in wanted:
                    queue_ids(stores[""], topic)

            def more(known: Iterable[str]) -> dict[str, StoreReader]:
                parts = brokers_of(root)
                return {name: stack.enter_context(opened(parts[name])) for name in parts.keys() - set(known)}

            cursors = Cursors(stores, topics or None, more if root.is_cluster else None)
            if start is From.LATEST:
                cursors.skip_to(0 if follow else count or _TAIL_COUNT)

            for name, message in cursors.follow(interrupted) if follow else cursors.once():
                out.show_message(message, as_json=as_json, broker=name)
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
