"""The mode `model`: histories hold, are the same each time, and a planted bug is found, shrunk and repeated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from crash import model, runner
from crash.counts import Counts
from crash.model import History, run_history
from crash.model_processes import one_store
from crash.plain_model import (
    CLOSED,
    COMMITTED,
    HALF_TOPIC,
    KILLED,
    LIVES,
    POWER_CUT,
    SCHEDULE_TOPIC,
    Effect,
    Found,
    Half,
    Model,
    Operation,
    Queue,
    Wait,
)
from messagestore import Message, MessageStore

QUEUE = ("t", 0)


@pytest.mark.parametrize("number", range(12))
def test_a_history_loses_and_doubles_nothing(tmp_path: Path, number: int) -> None:
    world = run_history(History(5, number), tmp_path / "store", Counter())
    assert world.verdict.ok, f"{world.verdict}\n" + "\n".join(world.log)


def test_processes_that_are_killed_and_stopped_lose_and_double_nothing(tmp_path: Path) -> None:
    """The second layer: real processes with other settings and levels each, two rounds of them."""
    counts = Counts()
    verdict, said = one_store(tmp_path / "store", "17", counts, rounds=2)
    assert verdict.ok, f"{verdict}\n" + "\n".join(said)
    assert counts.cases["operations of the model's processes"]


def test_a_history_is_the_same_each_time(tmp_path: Path) -> None:
    """Every operation of the disk, and every line of what was done."""
    first, second = (run_history(History(5, 1), tmp_path / "store", Counter()) for _ in range(2))
    assert first.log == second.log
    assert [(each.name, each.path) for each in first.disk.operations] == [
        (each.name, each.path) for each in second.disk.operations
    ]


def test_a_planted_bug_is_found_and_shrunk_and_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A put without a result is stored twice."""

    def twice(store: MessageStore, message: Message) -> None:
        real(store, message)
        real(store, message)

    real = MessageStore.put_message_oneway
    with mock.patch.object(MessageStore, "put_message_oneway", twice), mock.patch.object(model, "MOST_FAILURES", 1):
        counts = model.run(0, 1, quick=True)
        assert counts.duplicated
        key = ":".join(counts.failures[0].split(":")[:2])
        history = History.of_key(1, key)
        assert len(history.actions()) <= 3
        assert runner.main(["--only", "model", "--seed", "1", "--case", key]) == 1
    said = capfd.readouterr().out
    assert f"--case {key}" in said
    assert "is there for the second time" in said
    assert runner.main(["--only", "model", "--seed", "1", "--case", key]) == 0


# ---- the plain model itself


def found(*bodies: bytes, first: int = 0, place: int = 0) -> list[Found]:
    return [Found(first + at, body, place + 100 * at, 1000) for at, body in enumerate(bodies)]


def asked(model: Model, body: bytes, queue: Queue = QUEUE, *, returned: bool = True, durable: bool = True) -> Operation:
    operation = model.begins(Operation(f"put {body!r}", (Effect(queue, body),)))
    if returned:
        model.returned(operation, durable=durable)
    return operation


def test_what_returned_is_there_after_a_kill() -> None:
    one = Model()
    asked(one, b"a", durable=False)
    assert one.compare({}, KILLED).lost == ["put b'a': 0 of 1 messages are there"]


def test_what_is_not_durable_may_go_with_the_power_but_nothing_before_it() -> None:
    one = Model()
    asked(one, b"a", durable=False)
    asked(one, b"b", durable=False)
    assert one.compare({}, POWER_CUT).ok
    other = Model()
    asked(other, b"a", durable=False)
    asked(other, b"b", durable=False)
    assert other.compare({QUEUE: found(b"b")}, POWER_CUT).misread


def test_what_was_refused_is_never_there() -> None:
    one = Model()
    one.refused(asked(one, b"a", returned=False))
    assert one.compare({QUEUE: found(b"a")}, CLOSED).misread


def test_what_is_in_doubt_is_there_as_a_whole() -> None:
    for bodies, good in (((), True), ((b"a",), False), ((b"a", b"b"), True)):
        one = Model()
        one.begins(Operation("batch", (Effect(QUEUE, b"a"), Effect(QUEUE, b"b")), batch=("app", 3)))
        assert one.compare({QUEUE: found(*bodies)}, KILLED).ok is good
        assert bool(one.batches) is (len(bodies) > 0)


def test_a_put_that_failed_does_not_take_the_place_of_a_later_one() -> None:
    one, level = Model(), (SCHEDULE_TOPIC, 1)
    for group, returned in (("readers", False), ("billing", True)):
        effect = Effect(level, b"a", Wait((f"%RETRY%{group}", 0), 5000, 1, 0, 1))
        operation = one.begins(Operation(f"send back for {group}", (effect,)))
        if returned:
            one.returned(operation, durable=True)
    assert one.compare({level: found(b"a")}, LIVES).ok
    arrived = {level: found(b"a"), ("%RETRY%billing", 0): found(b"a", place=100)}
    assert one.compare(arrived, CLOSED).ok
    assert [slot.found.place for slot in one.arrived] == [0]


def test_what_is_there_twice_or_moved_or_gone_is_told() -> None:
    one = Model()
    asked(one, b"a")
    assert one.compare({QUEUE: found(b"a")}, CLOSED).ok
    assert one.compare({QUEUE: found(b"a", b"a")}, CLOSED).duplicated
    assert Model().compare({QUEUE: found(b"a")}, CLOSED).misread
    moved = Model()
    asked(moved, b"a")
    moved.compare({QUEUE: found(b"a")}, CLOSED)
    assert moved.compare({QUEUE: found(b"a", first=1)}, CLOSED).misread
    assert moved.compare({}, CLOSED).lost


def test_a_delayed_message_comes_once_and_retention_waits_for_it() -> None:
    one = Model()
    level = (SCHEDULE_TOPIC, 0)
    one.returned(
        one.begins(Operation("put", (Effect(level, b"a", Wait(QUEUE, 1000, 0, 0)),))),
        durable=True,
    )
    assert one.compare({level: found(b"a")}, CLOSED).ok
    assert [body for _, slot, _ in one.waiting() for body in [slot.found.body]] == [b"a"]
    assert one.deleted_below(500).lost
    other = Model()
    other.returned(
        other.begins(Operation("put", (Effect(level, b"a", Wait(QUEUE, 1000, 0, 0)),))),
        durable=True,
    )
    assert other.compare({level: found(b"a"), QUEUE: found(b"a", place=100)}, CLOSED).ok
    assert not list(other.waiting())
    assert other.compare({level: found(b"a"), QUEUE: found(b"a", b"a", place=100)}, CLOSED).duplicated


def test_a_half_message_ends_once() -> None:
    one = Model()
    one.halves[b"h"] = Half(QUEUE)
    asked(one, b"h", (HALF_TOPIC, 0))
    assert one.compare({(HALF_TOPIC, 0): found(b"h")}, CLOSED, [b"h"]).ok
    one.returned(one.begins(Operation("commit", (Effect(QUEUE, b"h"),), half=(b"h", COMMITTED))), durable=True)
    there = {(HALF_TOPIC, 0): found(b"h"), QUEUE: found(b"h", place=100)}
    assert one.compare(there, CLOSED, []).ok
    assert one.halves[b"h"].state == COMMITTED
    assert one.compare(there, CLOSED, [b"h"]).misread


def test_retention_leaves_what_a_group_has_not_read() -> None:
    one = Model()
    asked(one, b"a")
    asked(one, b"b")
    one.compare({QUEUE: found(b"a", b"b")}, CLOSED)
    one.read["g"] = {QUEUE: 1}
    assert one.deleted_below(100).ok
    assert one.deleted_below(200).lost
