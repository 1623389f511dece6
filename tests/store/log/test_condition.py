"""How a store was left: every combination of what can be found, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from messagestore import Message, MessageStore, StoreConfig
from messagestore.files.checkpoint import StoreCheckpoint
from messagestore.files.disk import Disk
from messagestore.files.state import State, boot_hash
from messagestore.format.layout import STATE_CLEAN, STATE_POISONED, STATE_RECOVERING
from messagestore.format.record import crc32
from messagestore.log.condition import CONDITIONS, Checked, Condition, Left, Promise, Shown, Start, Traces, Writer, look
from messagestore.log.store_files import Identity, Paths, StoreFiles

OPEN = State(visible_end=100, clean_end=50, in_flight=100, boot_hash=boot_hash())
CLOSED = State(
    visible_end=100, clean_end=100, anchor_position=40, anchor_size=60, boot_hash=boot_hash(), flags=STATE_CLEAN
)
OURS, THEIRS = StoreCheckpoint(5, 5, 5, 0, 40), StoreCheckpoint(9, 9, 9, 0, 40)
TOLD, UNTOLD = Promise(1, crc32(OURS.to_bytes())), Promise(1, None)

OPEN_CASES = {
    "nothing valid in state": (None, Left.UNREADABLE),
    "in flight": (OPEN, Left.IN_FLIGHT),
    "nothing in flight": (replace(OPEN, in_flight=-1), Left.IDLE),
    "a recovery": (replace(OPEN, flags=STATE_RECOVERING), Left.RECOVERING),
    "another boot": (replace(OPEN, boot_hash=boot_hash() ^ 1), Left.RESTARTED),
    "a recovery in another boot": (
        replace(OPEN, boot_hash=boot_hash() ^ 1, flags=STATE_RECOVERING),
        Left.RESTARTED,
    ),
}


@pytest.mark.parametrize("case", OPEN_CASES)
def test_abort_is_ours_and_state_decides(case: str) -> None:
    state, left = OPEN_CASES[case]
    assert Traces.of("ours", ours=True, state=state).left is left


@pytest.mark.parametrize("state", [None, OPEN, CLOSED])
def test_an_abort_that_is_not_ours_is_a_brokers_whatever_state_says(state: State | None) -> None:
    assert Traces.of("", ours=False, state=state).left is Left.BROKER


CLOSED_CASES = {
    # state, store checkpoint, what the journal says of it
    "as we leave it": (CLOSED, OURS, TOLD, Left.CLOSED),
    "in another boot": (replace(CLOSED, boot_hash=1), OURS, TOLD, Left.CLOSED),
    "state is lost": (None, OURS, TOLD, Left.CLOSED_ODDLY),
    "state is older": (OPEN, OURS, TOLD, Left.CLOSED_ODDLY),
    "V is not C": (replace(CLOSED, visible_end=200), OURS, TOLD, Left.CLOSED_ODDLY),
    "another checkpoint": (CLOSED, THEIRS, TOLD, Left.CLOSED_BY_BROKER),
    "another checkpoint, and no state": (None, THEIRS, TOLD, Left.CLOSED_BY_BROKER),
    "no journal": (CLOSED, OURS, UNTOLD, Left.CLOSED_UNTOLD),
    "no journal, another last record": (CLOSED, replace(OURS, confirm_physical_offset=90), UNTOLD, Left.CLOSED_BY_SOMEBODY),
    "no journal, and no record": (replace(CLOSED, anchor_size=0), OURS, UNTOLD, Left.CLOSED_BY_SOMEBODY),
    "no journal, and no state": (None, OURS, UNTOLD, Left.CLOSED_BY_SOMEBODY),
    "no checkpoint": (CLOSED, None, TOLD, Left.CLOSED_BY_SOMEBODY),
    "neither checkpoint nor journal": (CLOSED, None, UNTOLD, Left.CLOSED_BY_SOMEBODY),
    "nothing": (None, None, UNTOLD, Left.CLOSED_BY_SOMEBODY),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOSED_CASES)
def test_without_abort_checkpoint_and_journal_decide(case: str) -> None:
    state, checkpoint, promise, left = CLOSED_CASES[case]
    assert Traces.of(None, ours=False, state=state, checkpoint=checkpoint, promise=promise).left is left


FINISHED = {
    "nothing in flight": (Traces.of("ours", ours=True, state=replace(OPEN, in_flight=-1)), True),
    "in flight": (Traces.of("ours", ours=True, state=OPEN), False),
    "a sync failed": (Traces.of("ours", ours=True, state=replace(OPEN, in_flight=-1, flags=STATE_POISONED)), False),
    "another boot": (Traces.of("ours", ours=True, state=replace(OPEN, in_flight=-1, boot_hash=1)), False),
    "state is lost": (Traces.of("ours", ours=True, state=None), False),
    "a broker": (Traces.of("", ours=False, state=CLOSED), False),
    "closed": (Traces.of(None, ours=False, state=CLOSED, checkpoint=OURS, promise=TOLD), True),
    "closed, and the journal is lost": (
        Traces.of(None, ours=False, state=CLOSED, checkpoint=OURS, promise=UNTOLD),
        True,
    ),
    "without abort, and not closed": (Traces.of(None, ours=False, state=OPEN, checkpoint=OURS, promise=TOLD), False),
}


@pytest.mark.parametrize("case", FINISHED)
def test_an_attached_writer_goes_on_only_behind_what_is_finished(case: str) -> None:
    traces, finished = FINISHED[case]
    assert traces.is_finished is finished


def test_every_way_to_leave_a_store_has_a_row() -> None:
    """The table is written out once more: a row that changes is seen here, beside what it means."""
    assert set(CONDITIONS) == set(Left)
    assert {left for left in Left if CONDITIONS[left].shown is Shown.SEALED} == {Left.CLOSED, Left.CLOSED_UNTOLD}
    assert {left for left in Left if CONDITIONS[left].closed} == {left for left in Left if "CLOSED" in left.name}
    assert {left for left in Left if CONDITIONS[left].start is Start.NOWHERE} == {Left.CLOSED}


@pytest.mark.parametrize("left", Left)
def test_the_columns_of_a_row_agree(left: Left) -> None:
    condition = CONDITIONS[left]
    of_shown = {Shown.UP_TO_V: Checked.TO_V, Shown.PROVEN_TAIL: Checked.TO_C, Shown.NOTHING: Checked.TO_PROVEN}
    if not condition.closed:
        assert condition.checked is of_shown.get(condition.shown, Checked.TO_PROVEN)
        assert condition.start is (Start.AT_C if condition.wrote is Writer.OURS else Start.AT_CHECKPOINT)
    else:
        assert (condition.checked, condition.all_units) == (Checked.TO_UNITS, True)
        assert condition.start in (Start.NOWHERE, Start.AT_UNITS)
    assert condition.ours_open == (condition.wrote is Writer.OURS and not condition.closed)
    assert condition.broker_open == (left is Left.BROKER)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFiles]:
    """The files of a store with one message, which was closed."""
    root = tmp_path / "s"
    with MessageStore.open(root) as store:
        store.put_message(Message("t", b"one"))
    paths, disk = Paths(root), Disk()
    files = StoreFiles(paths, StoreConfig(), Identity.read(disk, paths.identity), disk)
    yield files
    files.close()


def condition_of(files: StoreFiles) -> tuple[Left, Condition]:
    traces = look(files)
    return traces.left, traces.condition


def test_a_look_at_a_closed_store(files: StoreFiles) -> None:
    assert condition_of(files) == (Left.CLOSED, CONDITIONS[Left.CLOSED])


def test_a_look_at_an_open_store(files: StoreFiles) -> None:
    with MessageStore.open(files.paths.root) as store:
        store.put_message(Message("t", b"two"))
        assert look(files).left in (Left.IDLE, Left.IN_FLIGHT)


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ("state", Left.CLOSED_ODDLY),
        ("journal", Left.CLOSED_UNTOLD),
        ("checkpoint", Left.CLOSED_BY_SOMEBODY),
    ],
)
def test_a_look_at_a_closed_store_that_lost_a_file(files: StoreFiles, lost: str, left: Left) -> None:
    Path(getattr(files.paths, lost)).unlink()
    assert look(files).left is left


def test_the_journal_is_read_again_when_state_has_changed(files: StoreFiles) -> None:
    before = look(files)
    with MessageStore.open(files.paths.root) as store:
        store.put_message(Message("t", b"two"))
    after = look(files, before.promise)
    assert after.left is Left.CLOSED
    assert after.promise is not None
    assert before.promise is not None
    assert after.promise.counter > before.promise.counter
    assert look(files, after.promise).promise is after.promise


def test_a_broker_that_was_killed_or_has_closed_the_store(files: StoreFiles) -> None:
    abort, checkpoint = Path(files.paths.abort), Path(files.paths.checkpoint)
    abort.touch()
    assert look(files).left is Left.BROKER
    abort.unlink()
    checkpoint.write_bytes(b"\x00" * 7 + b"\x01" + checkpoint.read_bytes()[8:])
    assert look(files).left is Left.CLOSED_BY_BROKER
