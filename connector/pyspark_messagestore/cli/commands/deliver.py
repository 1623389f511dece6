"""`messagestore deliver`: a process that delivers the delayed messages of a store, in turns with its writers."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from messagestore import CorruptionError, Delivered, deliver_delayed
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, ConfigFile, Json, Root, Wait, config_of, existing

PLACE = 350
PANEL = "Care"

_AFTER_DAMAGE_S = 10.0  # as RocketMQ does


def deliver(
    root: Root,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is due now, and end.")] = False,
    store_config: ConfigFile = None,
    wait: Wait = None,
    as_json: Json = False,
) -> None:
    """Deliver delayed messages to their topics and queues when they are due, until Ctrl-C or SIGTERM.
    Each message is delivered once, also if this command is killed, or runs several times. Other writers take turns with
    it. A RocketMQ broker delivers by itself, and cannot start while this command runs.
    """
    path, config = existing(root), config_of(store_config, lock_timeout=wait)
    damage: set[str] = set()
    count = 0

    with _told_to_end() as ends:
        while not ends.is_set():
            pause_s = 0.0

            try:
                done = deliver_delayed(path, config)
            except CorruptionError as error:
                # The same damage is met in every round, and told once.
                if str(error) not in damage:
                    damage.add(str(error))
                    out.note(f"messagestore: {error}")
                done, pause_s = Delivered(0, 0, None), _AFTER_DAMAGE_S

            count += done.count
            if done.count or done.left_out:
                _show(done, as_json=as_json)
                continue

            if once:
                break
            ends.wait(pause_s or done.pause_s(config))

    if not as_json:
        out.line(f"{out.count_words(count, 'message')} delivered")
    if damage:
        raise typer.Exit(FOUND_NOTHING)


def _show(done: Delivered, *, as_json: bool) -> None:
    if as_json:
        out.json_line({"delivered": done.count, "leftOut": done.left_out, "nextDue": done.next_due_ms})
    elif done.left_out:
        out.note(
            f"{out.count_words(done.left_out, 'message')} that cannot be delivered: no topic and queue to go to. They "
            "stay in SCHEDULE_TOPIC_XXXX"
        )


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set: what was begun is finished, and the store is closed."""
    ends = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield ends
        return
    usual = {number: signal.signal(number, lambda *_: ends.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ends
    finally:
        for number, handler in usual.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python
                signal.signal(number, handler)
