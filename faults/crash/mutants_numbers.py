"""Bugs planted where a broker has left queues whose units have other numbers than their records."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from crash import broker_logs, brokers, renumbered
from crash.harness import SMALL
from crash.imitate import overwrite
from crash.judge import Verdict
from crash.planting import Ground, Mutant, Search, many, patched, without
from messagestore import CorruptionError, Message, MessageStore, ReadOnlyStore, StoreError, StoreWentBackwardsError
from messagestore.files.commit_log import CommitLog
from messagestore.files.state import State
from messagestore.format import record_decode
from messagestore.inspect.derived import QueueCheck
from messagestore.inspect.verify import verify
from messagestore.log import refusals
from messagestore.log.dispatch import QueueRuns
from messagestore.read import query, queue_records
from messagestore.read.sight import Seals
from messagestore.read.view import StoreView
from messagestore.recovery.examine import Examination
from messagestore.recovery.survey import Surveyor

_HISTORIES = 120
_FOUND_BY = "deleted topics that a broker brought back"


def brought_back(ground: Ground) -> Iterator[Verdict]:
    """Run the case of the mode `fuzz` with random histories."""
    yield from renumbered.histories(ground.folder / "renumbered", ground.chance, _HISTORIES)


def a_changed_number(ground: Ground) -> Iterator[Verdict]:
    """No broker was ever there, so a record with another number is damage, which no CRC shows."""
    root, verdict = ground.folder / "changed", Verdict()
    with MessageStore.open(root, SMALL) as store:
        places = [store.put_message(Message("t", b"%d/" % n, queue_id=0)).physical_offset for n in range(4)]
    overwrite(root, places[2] + 20, (9).to_bytes(8, "big"))
    with MessageStore.open_read_only(root, SMALL) as view, contextlib.suppress(CorruptionError):
        verdict.misread.append(f"read without an error: {list(view.read('t', 0, 0))}")
    if verify(root, SMALL).ok:
        verdict.misread.append("verify finds nothing")
    yield verdict


def a_lost_queue_file(ground: Ground) -> Iterator[Verdict]:
    """The file of a queue goes while a writer puts to another one: readers say so, or show all that is there."""
    root, verdict = ground.folder / "lost", Verdict()
    with MessageStore.open(root, SMALL) as store:
        for number in range(6):
            store.put_message(Message("t", b"%d/" % number, queue_id=number % 2))
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"6/", queue_id=0))
        for path in (root / "consumequeue" / "t" / "1").iterdir():
            path.unlink()
        with MessageStore.open_read_only(root, SMALL) as view, contextlib.suppress(CorruptionError):
            verdict.lost.append(f"read without an error: {list(view.read('t', 1, 0))}")
    yield verdict


def an_older_copy_under_a_follower(root: Path) -> None:
    """While a follower waits at the end, an older copy is put in place, and grows beyond its number."""
    copy, came_back = root.with_name("copy"), False

    def put(count: int, body: bytes) -> None:
        with MessageStore.open(root, SMALL) as store:
            for _ in range(count):
                assert store.put_message(Message("t", body, queue_id=0)).is_ok

    def wait(reader: ReadOnlyStore, *given: Any, **named: Any) -> Any:
        nonlocal came_back
        if not came_back:
            shutil.copytree(copy, root, dirs_exist_ok=True)
            came_back = True
            put(12, b"longer, so that no record lies where another one was")
        return real(reader, *given, **named)

    put(4, b"x")
    shutil.copytree(root, copy)
    put(8, b"x")
    real = ReadOnlyStore._wait
    with (
        MessageStore.open_read_only(root, SMALL) as view,
        mock.patch.object(ReadOnlyStore, "_wait", wait),
        contextlib.suppress(StoreWentBackwardsError),
    ):
        found = next(view.follow("t", 0, 12, timeout=5), None)
        raise AssertionError(f"came back: {came_back}; the follower skipped messages 4 to 11, and went on with {found}")


def named(look: Callable[[Path], None]) -> Search:
    """Run a named case of the mode `fuzz`."""

    def search(ground: Ground) -> Iterator[Verdict]:
        verdict = Verdict()
        try:
            look(ground.folder / "named")
        except (AssertionError, StoreError) as error:
            verdict.misread.append(f"{type(error).__name__}: {error}")
        yield verdict

    return search


def as_records_say(_: Any) -> Any:
    def numbers(_check: QueueCheck, _queue: Any, said: Any, _places: Any) -> Any:
        return said, np.ones(len(said), np.bool_)

    return numbers


def none_in_order(_view: StoreView, _topic: str, _queue_id: int, _position: int, places: Any) -> Any:
    return np.zeros(len(places), np.bool_)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a broker's record must say the number of its unit", patched(queue_records, "_in_order", lambda _: none_in_order), _FOUND_BY, brought_back),
    Mutant("rows show the numbers that records say", patched(record_decode, "_MAKERS", lambda makers: {k: v for k, v in makers.items() if k != "queue_offset"}), _FOUND_BY, brought_back),
    Mutant("a message shows the number that its record says", patched(query, "_numbered", lambda _: lambda *arguments: arguments[-1]), _FOUND_BY, brought_back),
    Mutant("recovery does not believe a unit with another number", without(QueueRuns, "_points", result=False), _FOUND_BY, brought_back),
    Mutant("recovery makes a queue again whose numbers jump", without(QueueRuns, "_number_of"), _FOUND_BY, brought_back),
    Mutant("nobody remembers that a broker was there", without(Examination, "_broker_was_here", result=False), _FOUND_BY, brought_back),
    Mutant("verify goes by the numbers that records say", patched(QueueCheck, "_numbers", as_records_say), _FOUND_BY, brought_back),
    Mutant("a queue beside a writer may end before its seal", without(Seals, "_is_short", result=False), "a lost queue file", a_lost_queue_file),
    Mutant("every store is checked as if a broker had been there", patched(State, "own", lambda _: False), "a changed number in our own store", a_changed_number),
    Mutant("a record torn inside its topic's name is damage", without(Surveyor, "_torn_in_topic", result=False), "a torn record", named(broker_logs.torn_in_a_name)),
    Mutant("a topic that can have no queue ends any log", without(Surveyor, "_torn_in_topic", result=True), "a torn record", named(broker_logs.torn_in_a_name)),
    Mutant("a follower does not know the message before its start", without(ReadOnlyStore, "_place_before", result=-1), "an older copy", named(an_older_copy_under_a_follower)),
    Mutant("files of the controller mode and of DLedger are passed over", without(refusals, "_refuse_elected"), "refusals", many(brokers.refusals)),
    Mutant("only folders tell of light queues", without(refusals, "_refuse_light_messages"), "light queues", named(broker_logs.light_queues_behind)),
    Mutant("what a killed broker had not dispatched is not looked at", without(CommitLog, "segment_before_time", result=1 << 40), "light queues", named(broker_logs.light_queues_behind)),
)  # fmt: skip
