"""The state file: two slots, and the valid one with the higher counter counts."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import zlib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore import Message, MessageStore, StoreError
from messagestore.files.disk import Disk
from messagestore.files.state import UNKNOWN_FLUSHED_END, State, StateFile, boot_hash
from messagestore.format.layout import (
    STATE_ASYNC,
    STATE_CLEAN,
    STATE_FILE_SIZE,
    STATE_FLUSHED,
    STATE_POISONED,
    STATE_SLOT,
    STATE_SLOT_POSITIONS,
)
from small import SMALL, filled

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
UINT32 = st.integers(0, (1 << 32) - 1)
STATES = st.builds(
    State,
    counter=st.integers(1, (1 << 63) - 1),
    in_flight=INT64,
    visible_end=INT64,
    clean_end=INT64,
    anchor_position=INT64,
    anchor_size=st.integers(-(1 << 31), (1 << 31) - 1),
    anchor_crc=UINT32,
    boot_hash=UINT32,
    flags=UINT32,
    writer_pid=st.integers(0, (1 << 31) - 1),
    known_flushed_end=INT64,
)


class CountingDisk(Disk):
    """Counts the writes, and what they cover."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int]] = []

    def pwrite(self, file, data, position):
        self.writes.append((position, len(data)))
        super().pwrite(file, data, position)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk()


@pytest.fixture
def state_file(disk: CountingDisk, path: str) -> StateFile:
    file = StateFile(disk, path)
    file.create(path + ".new", State(counter=1, visible_end=100))
    disk.writes.clear()
    return file


# ---- one slot


def test_the_fields_are_the_tables_rows():
    """A State is what the layouts say, in their order, without the CRCs."""
    names = [f.name for f in STATE_SLOT.fields][:-1]
    assert [f.name for f in fields(State)] == [*names, f"known_{STATE_FLUSHED.fields[0].name}"]


def test_a_slot_byte_by_byte():
    """Big-endian, 60 bytes of fields and their CRC-32, then the flushed end: written out by hand."""
    state = State(7, -1, 0x0102030405060708, 3, 4, 5, 0xFFFFFFFE, 0x80000001, 6, 4711, 9)
    head = struct.pack(">qqqqqiIIIi", 7, -1, 0x0102030405060708, 3, 4, 5, 0xFFFFFFFE, 0x80000001, 6, 4711)
    flushed = struct.pack(">qI", 9, zlib.crc32(head))
    assert state.to_bytes() == head + struct.pack(">I", zlib.crc32(head)) + flushed + struct.pack(
        ">I", zlib.crc32(flushed)
    )


@given(STATES)
def test_a_slot_comes_back(state: State):
    """Any value a slot can hold is read as it was written."""
    assert State.from_bytes(state.to_bytes()) == state


@given(STATES, st.integers(0, STATE_SLOT.size * 8 - 1))
def test_one_flipped_bit_is_no_state(state: State, bit: int):
    """Whichever bit the disk turns, the slot does not count."""
    data = bytearray(state.to_bytes())
    data[bit // 8] ^= 1 << bit % 8
    assert State.from_bytes(bytes(data)) is None


def test_short_long_and_zero_slots_are_no_state():
    """A slot that was never written, one byte short or with a trailing byte holds nothing."""
    data = State().to_bytes()
    assert State.from_bytes(data[:-1]) is None
    assert State.from_bytes(data + b"\0") is None
    assert State.from_bytes(bytes(len(data))) is None


@given(STATES, st.integers(STATE_SLOT.size * 8, (STATE_SLOT.size + STATE_FLUSHED.size) * 8 - 1))
def test_one_flipped_bit_behind_the_slot_makes_the_flushed_end_unknown(state: State, bit: int):
    """The slot still counts; a reader of what is flushed goes back to the clean end."""
    data = bytearray(state.to_bytes())
    data[bit // 8] ^= 1 << bit % 8
    assert State.from_bytes(bytes(data)) == replace(state, known_flushed_end=UNKNOWN_FLUSHED_END)


def test_a_slot_with_the_flushed_end_of_another_one_has_none():
    """Zeros, or the flushed end of an older slot, lie behind it."""
    state, older = State(counter=9, visible_end=800, clean_end=100), State(counter=7, known_flushed_end=700)
    for behind in (bytes(STATE_FLUSHED.size), older.to_bytes()[STATE_SLOT.size :]):
        found = State.from_bytes(state.to_bytes()[: STATE_SLOT.size] + behind)
        assert found == state
        assert replace(found, flags=STATE_ASYNC).flushed_end == 100
        assert found.flushed_end == 800


@pytest.mark.parametrize(
    ("clean_end", "known", "flushed_end"), [(100, -1, 100), (100, 50, 100), (100, 300, 300), (100, 900, 800)]
)
def test_the_flushed_end_lies_between_the_clean_and_the_visible_end(clean_end: int, known: int, flushed_end: int):
    state = State(visible_end=800, clean_end=clean_end, known_flushed_end=known)
    assert state.flushed_end == 800, "without ASYNC_FLUSH, what is visible is synced"
    assert replace(state, flags=STATE_ASYNC).flushed_end == flushed_end


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("visible_end", 1 << 63),
        ("in_flight", -(1 << 63) - 1),
        ("anchor_size", 1 << 31),
        ("flags", -1),
        ("flags", 1 << 32),
    ],
)
def test_a_value_that_does_not_fit_is_refused(name: str, value: int):
    """An offset beyond int64 is an error, never a wrapped number."""
    with pytest.raises(ValueError, match=str(value)):
        replace(State(), **{name: value}).to_bytes()


def test_flags_by_name():
    """Each flag has its property, alone and together."""
    assert [State().poisoned, State().asynchronous, State().clean] == [False, False, False]
    assert State(flags=STATE_POISONED).poisoned
    assert State(flags=STATE_ASYNC).asynchronous
    assert State(flags=STATE_CLEAN).clean
    both = State(flags=STATE_ASYNC | STATE_POISONED)
    assert both.poisoned
    assert both.asynchronous
    assert not both.clean


def test_the_boot_hash_is_of_the_boot_id():
    """CRC-32 of the text, without its line end; the same in every process of this boot."""
    text = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    assert boot_hash() == zlib.crc32(text) == boot_hash()


# ---- the file


def test_without_a_file_there_is_no_state(disk: Disk, path: str):
    """A missing file, and a missing folder, are no error for a reader."""
    assert StateFile(disk, path).read() is None
    assert StateFile(disk, path + "/no/folder").read() is None


def test_created_whole(state_file: StateFile, path: str):
    """4 096 bytes; the first state is in its slot and the other slot is empty."""
    assert os.path.getsize(path) == STATE_FILE_SIZE
    assert state_file.read() == State(counter=1, visible_end=100)
    assert not os.path.exists(path + ".new")


def test_a_change_is_one_write_of_one_slot(state_file: StateFile, disk: CountingDisk):
    """80 bytes, in turn in both slots, which share no sector."""
    state_file.write(State(counter=2))
    state_file.write(State(counter=3))
    assert disk.writes == [(STATE_SLOT_POSITIONS[0], 80), (STATE_SLOT_POSITIONS[1], 80)]
    assert abs(STATE_SLOT_POSITIONS[0] - STATE_SLOT_POSITIONS[1]) >= 512


def test_the_higher_counter_counts(state_file: StateFile, disk: Disk, path: str):
    """Another process sees each change, whichever slot it is in."""
    other = StateFile(disk, path)
    for counter in range(2, 8):
        state = state_file.write(State(counter=counter, visible_end=counter * 10))
        assert other.read() == state


@pytest.mark.parametrize("kept", range(0, 81, 8))
def test_a_torn_write_leaves_the_state_before(state_file: StateFile, disk: Disk, path: str, kept: int):
    """A kill in the middle of a write: the old state, or the whole new one."""
    state_file.write(State(counter=2, visible_end=200))
    new = State(counter=3, visible_end=300)
    file = disk.open(path, writable=True)
    disk.pwrite(file, new.to_bytes()[:kept], STATE_SLOT_POSITIONS[1])
    found = StateFile(disk, path).read()
    assert found == (new if kept >= 64 else State(counter=2, visible_end=200))


def test_after_a_torn_write_the_torn_slot_is_written_again(state_file: StateFile, disk: Disk, path: str):
    """The next writer never touches the one slot that is whole."""
    state_file.write(State(counter=2, visible_end=200))
    file = disk.open(path, writable=True)
    disk.pwrite(file, b"torn", STATE_SLOT_POSITIONS[1])
    next_writer = StateFile(disk, path)
    assert next_writer.read() == State(counter=2, visible_end=200)
    next_writer.write(State(counter=3, visible_end=300))
    disk.pwrite(file, b"torn", STATE_SLOT_POSITIONS[1])
    assert StateFile(disk, path).read() == State(counter=2, visible_end=200)


@pytest.mark.parametrize("counter", [1, 0, -1, 3, 5])
def test_a_counter_that_hurts_the_slot_that_counts_is_refused(state_file: StateFile, counter: int):
    """Not above the last one, or in its slot: a torn write would lose both."""
    with pytest.raises(ValueError, match="after 1 comes 2"):
        state_file.write(State(counter=counter))
    assert state_file.read() == State(counter=1, visible_end=100)


def test_a_new_object_knows_the_last_counter(state_file: StateFile, disk: Disk, path: str):
    """Writing without having read does not go back in time."""
    state_file.write(State(counter=2))
    with pytest.raises(ValueError, match="after 2 comes 3"):
        StateFile(disk, path).write(State(counter=2))


def test_both_slots_hold_what_must_not_get_lost(state_file: StateFile, disk: Disk, path: str):
    """After write_both either slot may be lost, and the flag is still there."""
    state = state_file.write_both(State(counter=2, flags=STATE_ASYNC))
    state_file.sync()
    assert state == State(counter=3, flags=STATE_ASYNC) == state_file.read()
    file = disk.open(path, writable=True)
    for position in STATE_SLOT_POSITIONS:
        before = disk.pread(file, 64, position)
        disk.pwrite(file, bytes(64), position)
        found = StateFile(disk, path).read()
        assert found is not None
        assert found.asynchronous
        disk.pwrite(file, before, position)


def test_no_valid_slot_is_no_state(state_file: StateFile, disk: Disk, path: str):
    """Both slots damaged: None, so that recovery looks at the log."""
    file = disk.open(path, writable=True)
    disk.pwrite(file, b"\xff" * 600, 0)
    assert state_file.read() is None


def test_a_short_file_is_no_state(path: str, disk: Disk):
    """A file that ends early is read without an error."""
    Path(path).write_bytes(State(counter=2, visible_end=5).to_bytes()[:40])
    assert StateFile(disk, path).read() is None
    Path(path).write_bytes(State(counter=2, visible_end=5).to_bytes())
    assert StateFile(disk, path).read() == State(counter=2, visible_end=5)


def test_a_replaced_file_is_seen(state_file: StateFile, disk: Disk, path: str):
    """Recovery in another process made the file anew: who had the old one open reads and writes the new one."""
    reader = StateFile(disk, path)
    assert reader.read() is not None
    StateFile(disk, path).create(path + ".new", State(counter=50, visible_end=500))
    assert reader.read() == State(counter=50, visible_end=500)
    state_file.read()
    state_file.write(State(counter=51, visible_end=510))
    assert reader.read() == State(counter=51, visible_end=510)


def test_a_vanished_file_is_none_to_read_and_an_error_to_write(state_file: StateFile, path: str):
    """A store that was deleted under its users."""
    os.unlink(path)
    assert state_file.read() is None
    with pytest.raises(FileNotFoundError):
        state_file.write(State(counter=2))


def test_writing_after_reading_opens_the_file_for_writing(state_file: StateFile, disk: Disk, path: str):
    """A read-only view's descriptor is never written to; close may be called at any time."""
    file = StateFile(disk, path)
    file.read()
    file.write(State(counter=2, visible_end=7))
    file.close()
    assert file.read() == State(counter=2, visible_end=7)
    file.write(State(counter=3))
    file.close()
    file.close()


def test_a_reader_beside_a_writer_sees_whole_states_only(state_file: StateFile, disk: Disk, path: str):
    """Counters go up and the fields of one state belong together, however the reads fall."""
    stop = threading.Event()

    def write() -> None:
        counter = 1
        while not stop.is_set():
            counter += 1
            state_file.write(State(counter=counter, visible_end=counter * 3, clean_end=counter * 2))

    thread = threading.Thread(target=write)
    reader = StateFile(disk, path)
    thread.start()
    try:
        last = 1
        for _ in range(3000):
            state = reader.read()
            assert state is not None
            assert state.counter >= last
            last = state.counter
            assert last == 1 or (state.visible_end, state.clean_end) == (last * 3, last * 2)
    finally:
        stop.set()
        thread.join()


def test_the_state_of_a_store_that_was_restored_under_its_writer_is_not_written(tmp_path: Path) -> None:
    """A writer that stops says so in its own `state`, and not in that of a backup which was put in its place."""
    root, backup = filled(tmp_path / "store"), tmp_path / "backup"
    shutil.copytree(root, backup)
    store = MessageStore.open(root, SMALL)
    store.put_message(Message("t", b"one", queue_id=0))
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    with pytest.raises(StoreError):
        store.put_message(Message("t", b"two", queue_id=0))
    store.close()
    assert (root / "spark" / "state").read_bytes() == (backup / "spark" / "state").read_bytes()
    with MessageStore.open(root, SMALL) as again:
        assert again.max_offset("t", 0) == 5
