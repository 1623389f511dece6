"""What recovery decides, as tables: each row is a way in which a store can be found, without a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from messagestore.errors import CorruptionError
from messagestore.files.state import NOTHING_IN_FLIGHT, State
from messagestore.format.batch_record import BatchRecord
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.layout import STATE_ASYNC
from messagestore.format.record_scan import ScanEnd
from messagestore.log.condition import CONDITIONS, Left
from messagestore.log.dispatch import QueueRuns
from messagestore.log.log_end import LogEnd
from messagestore.log.lost_end import LostEnd
from messagestore.log.store_files import Paths, StoreFiles
from messagestore.recovery import decide
from messagestore.recovery.decide import (
    Derived,
    Durable,
    Evidence,
    IndexStep,
    Inventory,
    Place,
    Plan,
    RecordBehind,
    UnitBehind,
)
from messagestore.recovery.log_tail import Tail
from messagestore.recovery.survey import Survey

C = 1000
"""The clean end of the stores in these tables."""
END = LogEnd(1300, 1200, 100, 7)
"""Where the walk ended."""
STATE = State(clean_end=C, anchor_position=900, anchor_size=100, in_flight=C, visible_end=C)
IDLE = replace(STATE, in_flight=NOTHING_IN_FLIGHT)
ASYNC = replace(STATE, flags=STATE_ASYNC)
LOST = LostEnd("log/0", are_segments=False, end=1300, known_end=2000, proof="a proof", message_count=3, queue_count=1)
RUNS = QueueRuns(cast(StoreFiles, None))
QUEUE = ("t", 0)


def inventory(left: Left = Left.IN_FLIGHT, **changes: Any) -> Inventory:
    """A store whose writer was killed while bytes were in flight, with changes."""
    base = Inventory(
        left=left,
        state=STATE,
        anchored=LogEnd(C, 900, 100, 5),
        paths=Paths("/store"),
        min_offset=0,
        has_segments=True,
        units_without_log="",
        segments_lost=None,
        half_remade=Derived.NOTHING,
        missing=Derived.NOTHING,
        wanted=Derived.BOTH,
        has_queues=True,
        had_queues=True,
        lost_queues=(),
        broker_was_here=False,
        journal_end=C,
    )
    return replace(base, **changes)


def survey(end: LogEnd = END, count: int = 3, stop: str = "body_crc", start: int = C) -> Survey:
    return Survey(start, end, RUNS, ScanEnd(stop, 0, "a CRC", "another"), record_count=count)


def evidence(**changes: Any) -> Evidence:
    """A walk that ended at a torn record, with nothing behind it that proves anything, with changes."""
    walked = changes.pop("walked", survey())
    base = Evidence(
        walked=walked,
        kept=walked,
        partial=None,
        path="/store/commitlog/0",
        below=RUNS,
        short=frozenset(),
        to_look_at={},
        lost=None,
        behind=(),
        tail=Tail(60, 1, {QUEUE}),
        has_head=True,
        levels="",
    )
    return replace(base, **changes)


BEGINS: dict[str, tuple[Inventory, Place, str, Derived]] = {
    "a writer was killed": (inventory(), Place.CLEAN_END, "a writer crashed", Derived.NOTHING),
    "a writer was killed between two appends": (
        inventory(Left.IDLE, state=IDLE),
        Place.CLEAN_END,
        "not closed, nothing in flight",
        Derived.NOTHING,
    ),
    "the machine went down": (inventory(Left.RESTARTED), Place.CLEAN_END, "a writer crashed", Derived.NOTHING),
    "the record before C is another one": (
        inventory(anchored=None),
        Place.CHAINED_SEGMENT,
        "a writer crashed",
        Derived.NOTHING,
    ),
    "no slot of `state` is valid": (
        inventory(Left.UNREADABLE, state=None, anchored=None),
        Place.CHAINED_SEGMENT,
        "a writer crashed",
        Derived.NOTHING,
    ),
    "a broker crashed behind C": (inventory(Left.BROKER), Place.HIGHER_START, "a broker crashed", Derived.NOTHING),
    "a broker crashed, and C is not there": (
        inventory(Left.BROKER, anchored=None),
        Place.BROKERS_START,
        "a broker crashed",
        Derived.NOTHING,
    ),
    "a broker closed it": (
        inventory(Left.CLOSED_BY_BROKER),
        Place.UNITS_OR_CLEAN_END,
        "closed by a broker",
        Derived.NOTHING,
    ),
    "a broker's store without `spark/`": (
        inventory(Left.CLOSED_BY_SOMEBODY, state=None, anchored=None),
        Place.BEHIND_UNITS,
        "closed by a broker",
        Derived.NOTHING,
    ),
    "we closed it, and files were changed": (
        inventory(Left.CLOSED),
        Place.UNITS_OR_CLEAN_END,
        "closed, but files were lost or changed",
        Derived.NOTHING,
    ),
    "nobody has written": (
        inventory(Left.CLOSED_BY_SOMEBODY, state=None, anchored=None, has_segments=False, missing=Derived.BOTH),
        Place.LOG_BEGIN,
        "new",
        Derived.NOTHING,
    ),
    "the folder of all queues is gone from a closed store": (
        inventory(Left.CLOSED, missing=Derived.QUEUES, has_queues=False),
        Place.LOG_BEGIN,
        "closed, but files were lost or changed",
        Derived.QUEUES,
    ),
    "the folder of all queues is empty after a broker's close": (
        inventory(Left.CLOSED_BY_BROKER, has_queues=False),
        Place.UNITS_OR_CLEAN_END,
        "closed by a broker",
        Derived.NOTHING,
    ),
    "the folder of all queues is empty after a kill": (
        inventory(has_queues=False),
        Place.CLEAN_END,
        "a writer crashed",
        Derived.QUEUES,
    ),
    "the folder of all queues is empty after a kill, as at the clean end": (
        inventory(has_queues=False, had_queues=False),
        Place.CLEAN_END,
        "a writer crashed",
        Derived.NOTHING,
    ),
    "the index is gone": (inventory(missing=Derived.INDEX), Place.CLEAN_END, "a writer crashed", Derived.INDEX),
    "the index is gone, and not wanted": (
        inventory(missing=Derived.INDEX, half_remade=Derived.INDEX, wanted=Derived.QUEUES),
        Place.CLEAN_END,
        "a writer crashed",
        Derived.NOTHING,
    ),
    "a rebuild of everything was killed": (
        inventory(half_remade=Derived.BOTH),
        Place.CLEAN_END,
        "a writer crashed",
        Derived.BOTH,
    ),
}


def test_a_state_that_cannot_be_read_is_no_record_that_is_gone() -> None:
    """The report named a record that nobody had looked for."""
    (note,) = decide.walk_start(inventory(Left.UNREADABLE, state=None, anchored=None), accept_loss=False).notes
    assert note.startswith("`spark/state` could not be read")
    (note,) = decide.walk_start(inventory(anchored=None), accept_loss=False).notes
    assert note.startswith("the record before the clean end is gone")


@pytest.mark.parametrize("row", BEGINS)
def test_where_the_walk_begins(row: str) -> None:
    found, place, reason, remade = BEGINS[row]
    begin = decide.walk_start(found, accept_loss=False)
    assert (begin.place, begin.reason, begin.remade) == (place, reason, remade)
    assert begin.trust.own == (place is Place.CLEAN_END)
    assert begin.trust.units == (Derived.QUEUES not in remade)


def test_every_way_to_leave_a_store_has_a_row() -> None:
    """Or another way has it that has the same answers to what recovery asks."""
    lefts = {found.left for found, *_ in BEGINS.values()}
    as_others = {
        Left.CLOSED_ODDLY: Left.CLOSED,  # something speaks against going on at C
        Left.CLOSED_UNTOLD: Left.CLOSED_BY_SOMEBODY,
        Left.RECOVERING: Left.IN_FLIGHT,
    }
    assert lefts | as_others.keys() == set(Left)
    for left, other in as_others.items():
        one, two = CONDITIONS[left], CONDITIONS[other]
        assert (one.wrote, one.closed) == (two.wrote, two.closed)


@pytest.mark.parametrize(
    ("left", "rebuilt"), [(Left.IN_FLIGHT, {QUEUE}), (Left.CLOSED, {QUEUE}), (Left.CLOSED_BY_BROKER, set())]
)
def test_a_queue_without_a_folder_is_rebuilt_unless_a_broker_may_have_deleted_it(
    left: Left, rebuilt: set[tuple[str, int]]
) -> None:
    begin = decide.walk_start(inventory(left, lost_queues=(QUEUE,)), accept_loss=False)
    assert begin.lost_queues == rebuilt
    assert bool(begin.rebuilt) == bool(rebuilt)
    assert bool(begin.notes) != bool(rebuilt)


def test_segments_that_are_missing_are_refused_before_the_walk() -> None:
    short = inventory(segments_lost=LOST)
    with pytest.raises(CorruptionError, match="records up to 2000 at least"):
        decide.walk_start(short, accept_loss=False)
    assert decide.walk_start(short, accept_loss=True).place is Place.CLEAN_END
    with pytest.raises(CorruptionError, match="none, but t/0 has units"):
        decide.walk_start(inventory(units_without_log="t/0", has_segments=False), accept_loss=True)


def planned(found: Inventory, seen: Evidence, *, accept_loss: bool = False) -> Plan:
    begin = decide.walk_start(found, accept_loss=accept_loss)
    return decide.make_plan(found, begin, seen, accept_loss=accept_loss)


BATCH = BatchRecord("app", 1, "batch", None, "id", 1500, 0, 1900, SYNC_FLUSH, 3, {}, (), 0)
BELOW_C = survey(LogEnd(800, 700, 100, 3), count=0, start=800)
REFUSALS: dict[str, tuple[Inventory, Evidence, str, bool]] = {
    # what was found, what the error says, and whether the caller can accept it
    "something says that the log was longer": (inventory(), evidence(lost=LOST), "a proof", True),
    "the log ends below C": (inventory(), evidence(walked=BELOW_C), r"synced up to 1000", True),
    "a SYNC_FLUSH batch lies behind": (inventory(), evidence(behind=(BATCH,)), "the batch at", False),
    "a unit points behind": (
        inventory(),
        evidence(behind=(UnitBehind("t", 0, 4, 1400),)),
        "unit 4 of t/0 proves the record at 1400 synced",
        False,
    ),
    "records follow in a closed store without queues": (
        inventory(Left.CLOSED, missing=Derived.QUEUES),
        evidence(behind=(RecordBehind(1400),)),
        "the store was closed, and more records follow",
        False,
    ),
}


@pytest.mark.parametrize("row", REFUSALS)
def test_a_log_that_was_longer_is_refused(row: str) -> None:
    found, seen, match, can_accept = REFUSALS[row]
    with pytest.raises(CorruptionError, match=match):
        planned(found, seen)
    if can_accept:
        assert planned(found, seen, accept_loss=True).end == seen.kept.end.physical_offset


PLANS: dict[str, tuple[Inventory, Evidence, dict[str, object]]] = {
    # what was found, and what is done
    "a writer was killed within a put": (
        inventory(state=replace(STATE, in_flight=1200)),
        evidence(),
        {"end": 1300, "durable": Durable.REWRITTEN, "index": IndexStep.REWOUND, "save": True, "seals_hold": True},
    ),
    "a writer was killed within a batch that is not sealed": (
        inventory(state=replace(STATE, in_flight=1300)),
        evidence(has_head=False),
        {"save": False},
    ),
    "the data of an ASYNC_FLUSH batch are torn": (
        inventory(state=ASYNC),
        evidence(walked=replace(survey(), in_batch=True)),
        {"save": False},
    ),
    "nothing was written since the close": (
        inventory(Left.CLOSED),
        evidence(walked=survey(LogEnd(C, 900, 100, 5), count=0)),
        {"end": C, "durable": Durable.SYNCED, "index": IndexStep.KEPT, "seals_hold": True, "changed_from": 0},
    ),
    "the index of a closed store is gone": (
        inventory(Left.CLOSED, missing=Derived.INDEX),
        evidence(walked=survey(LogEnd(C, 900, 100, 5), count=0)),
        {"remade": Derived.INDEX, "index": IndexStep.REMADE},
    ),
    "a broker crashed": (
        inventory(Left.BROKER, broker_was_here=True),
        evidence(),
        {"durable": Durable.SYNCED, "seals_hold": False, "broker_was_here": True, "changed_from": 0},
    ),
    "a broker left a queue complete that is short now": (
        inventory(Left.CLOSED_BY_BROKER, broker_was_here=True),
        evidence(short=frozenset({QUEUE})),
        {"short": frozenset({QUEUE}), "seals_hold": False},
    ),
    "a broker cut the log below C": (
        inventory(Left.CLOSED_BY_BROKER, anchored=None),
        evidence(walked=BELOW_C),
        {"end": 800, "seals_hold": False, "lost": None, "changed": True},
    ),
    "nobody has written": (
        inventory(
            Left.CLOSED_BY_SOMEBODY, state=None, anchored=None, has_segments=False, has_queues=False, journal_end=0
        ),
        evidence(walked=survey(LogEnd(0, 0, 0, 0), count=0, start=0)),
        {"end": 0, "is_new": True, "durable": Durable.SYNCED, "notes": []},
    ),
    "`state` is lost": (
        inventory(Left.UNREADABLE, state=None, anchored=None),
        evidence(),
        {"before": None, "durable": Durable.REWRITTEN, "seals_hold": False},
    ),
}


@pytest.mark.parametrize("row", PLANS)
def test_what_recovery_changes(row: str) -> None:
    found, seen, expected = PLANS[row]
    plan = planned(found, seen)
    for name, value in expected.items():
        if name == "changed":
            assert (plan.report.changed is not None) == value
        elif name in ("lost", "notes"):
            assert getattr(plan.report, name) == value
        else:
            assert getattr(plan, name) == value, name
    assert (plan.report.cut_messages, plan.report.cut_queues) == (1, 1)


def test_with_a_part_of_a_batch_lost_the_rest_of_it_goes_too() -> None:
    """The loss is accepted: the log ends before the batch, the seals count for nothing, and the report says what."""
    kept = survey(LogEnd(900, 800, 100, 4), count=0, start=900)
    plan = planned(inventory(), evidence(lost=LOST, kept=kept, partial=BATCH), accept_loss=True)
    assert (plan.end, plan.index, plan.seals_hold, plan.changed_from) == (900, IndexStep.REWOUND, False, 900)
    assert plan.report.lost is not None
    assert any("a part of this batch is lost" in note for note in plan.report.notes)
