"""A ConsumeQueue is checked against a plain list of units, and its bytes against those Java wrote."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from messagestore.errors import CorruptionError, MessageIllegalError, NotAStoreError
from messagestore.files.consume_queue import (
    UNIT_DTYPE,
    ConsumeQueue,
    Units,
    list_queues,
    pack_units,
    queue_directory,
)
from messagestore.files.disk import Disk, File, FilePool
from messagestore.files.unsynced import FileReplaced
from messagestore.format.layout import UNIT

FILLER = (0, 0x7FFFFFFF, 0)
ZERO = (0, 0, 0)


class WatchedDisk(Disk):
    """Counts reads, and remembers what was synced."""

    def __init__(self) -> None:
        self.reads = 0
        self.synced: list[str] = []

    def pread_into(self, file: File, buffer: memoryview, position: int) -> int:
        self.reads += 1
        return super().pread_into(file, buffer, position)

    def fdatasync(self, file: File) -> None:
        super().fdatasync(file)
        self.synced.append(os.path.basename(file.path))

    def fsync_dir(self, path: str | Path) -> None:
        super().fsync_dir(path)
        self.synced.append(os.path.basename(path) + "/")


def make(root: str | Path, file_size: int = 100, *, disk: Disk | None = None, queue_id: int = 0) -> ConsumeQueue:
    os.makedirs(os.path.join(root, "spark"), exist_ok=True)
    pool = FilePool(disk or Disk(), 16)
    queue = ConsumeQueue(queue_directory(str(root), "T", queue_id), file_size, pool, os.path.join(root, "spark"))
    queue.load()
    return queue


def units_of(*rows: tuple[int, int, int]) -> Units:
    return np.array(list(rows), UNIT_DTYPE)


def some_units(first: int, count: int, size: int = 10) -> Units:
    units = np.zeros(count, UNIT_DTYPE)
    units["physical_offset"] = np.arange(first, first + count) * size
    units["size"] = size
    units["tags_code"] = -np.arange(first, first + count)
    return units


def image(queue: ConsumeQueue) -> dict[str, bytes]:
    """Every file of the queue, by name."""
    with contextlib.suppress(FileNotFoundError):
        return {path.name: path.read_bytes() for path in sorted(Path(queue.directory).iterdir())}
    return {}


# ---- the bytes


def test_units_have_the_bytes_java_wrote(tmp_path: Path):
    """Java's own units (vectors G and H), written by append and read back."""
    queue = make(tmp_path)
    units = units_of((0, 135, 2598919), (135, 113, 2598920), (762, 158, 1795170411450))
    queue.append(0, pack_units(units))
    java = (
        "000000000000000000000087000000000027a807"
        "000000000000008700000071000000000027a808"
        "00000000000002fa0000009e000001a1f87ea3ba"
    )
    assert image(queue) == {"0" * 20: bytes.fromhex(java) + bytes(40)}
    found = queue.read(0, 3)
    assert found.dtype == UNIT_DTYPE
    assert found.dtype["physical_offset"].isnative
    assert found.flags.c_contiguous
    assert found.tolist() == units.tolist()


def test_a_queue_that_begins_above_0_is_filled_from_its_files_start(tmp_path: Path):
    """Java pre-fills the first file with (0, 0x7FFFFFFF, 0), and names it by its own first byte."""
    queue = make(tmp_path)
    queue.append(13, pack_units(some_units(13, 4)))
    assert sorted(image(queue)) == [f"{200:020d}", f"{300:020d}"]
    assert queue.first_file_queue_offset == 10
    assert queue.end_file_queue_offset == 20
    assert queue.read(10, 4).tolist() == [FILLER] * 3 + some_units(13, 1).tolist()
    assert queue.end() == 17
    assert queue.search_physical(0) == 13
    assert queue.search_physical(141) == 15
    assert queue.search_physical(10**9) == 17


def test_a_files_first_units_are_in_it_when_it_gets_its_name(tmp_path: Path):
    """Java sees a phantom message in an empty first file, so no moment may show one."""
    seen = []

    class RenameDisk(Disk):
        def rename(self, source, target):
            seen.append((os.path.dirname(source), Path(source).read_bytes()))
            super().rename(source, target)

    queue = make(tmp_path, disk=RenameDisk())
    queue.append(1, pack_units(some_units(1, 2)))
    assert len(seen) == 1
    folder, data = seen[0]
    assert folder == str(tmp_path / "spark")
    assert data == image(queue)["0" * 20]
    assert len(data) == 100
    assert any(data[:60])


# ---- the model: a list of units from a first queue offset on


class QueueModel(RuleBasedStateMachine):
    """Appends, overwrites, truncations and reopenings, beside a list; files of 5 units."""

    @initialize(first=st.one_of(st.just(0), st.integers(0, 40)))
    def start(self, first: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.queue = make(self.folder.name)
        self.first = first
        self.model: list[tuple[int, int, int]] = []
        self.next_physical = 1000

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def _make(self, count: int, physical: int, gap: int) -> list[tuple[int, int, int]]:
        rows = []
        for i in range(count):
            rows.append((physical, 10 + i, -(2**63) + i))
            physical += 10 + i + gap
        self.next_physical = physical
        return rows

    @rule(count=st.integers(0, 23), gap=st.integers(0, 30))
    def append(self, count: int, gap: int) -> None:
        rows = self._make(count, self.next_physical, gap)
        self.queue.append(self.first + len(self.model), pack_units(units_of(*rows)))
        self.model += rows

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 23))
    def write_again(self, data: st.DataObject, count: int) -> None:
        """Recovery writes units that are there already, and goes on behind them."""
        at = data.draw(st.integers(0, len(self.model) - 1))
        rows = self._make(count, self.model[at][0] + 1, 3)
        self.queue.truncate(self.first + at)
        self.model[at:] = rows
        if at == 0:
            self.queue.append(self.first, pack_units(units_of(*rows)))
            return
        kept = self.model[at - 1]
        self.queue.append(self.first + at - 1, pack_units(units_of(kept, *rows)))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.model) + 3))
        self.queue.truncate(self.first + at)
        del self.model[at:]
        before = image(self.queue)
        self.queue.truncate(self.first + at)
        assert image(self.queue) == before

    @rule()
    def reopen(self) -> None:
        self.queue.sync()
        self.queue = make(self.folder.name)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "queue"):
            return
        queue, model, first = self.queue, self.model, self.first
        files = image(queue)
        assert all(len(data) == 100 for data in files.values())
        assert sum(any(data) for data in files.values()) == len(files)
        end = first + len(model)
        if not model:
            assert files == {}
            assert queue.end(end) == 0
            assert len(queue.read(0, 10)) == 0
            return
        start = first - first % 5
        expected = [FILLER] * (first - start) + model
        expected += [ZERO] * (-len(expected) % 5)
        assert queue.first_file_queue_offset == start
        assert queue.read(start, 10**6).tolist() == expected
        assert queue.read(first + 1, 7).tolist() == expected[first + 1 - start :][:7]
        for hint in (0, first, end - 1, end, end + 1, end + 100):
            assert queue.end(hint) == end

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def search(self, data: st.DataObject) -> None:
        physical = data.draw(st.integers(0, self.next_physical + 5))
        hint = data.draw(st.integers(0, self.first + len(self.model) + 5))
        below = sum(row[0] < physical for row in self.model)
        assert self.queue.search_physical(physical, hint) == self.first + below
        assert self.queue.search_physical(physical) == self.first + below
        ended = sum(row[0] + row[1] <= physical for row in self.model)
        assert self.queue.end(hint, limit=physical) == self.first + ended


QueueModel.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestQueueModel = QueueModel.TestCase


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 5100), st.sampled_from([6000, 20_000, 200_000]))
def test_the_end_is_found_from_any_hint(count: int, hint: int, file_size: int):
    """Galloping up, galloping down, in the window, across files: always the same end."""
    with tempfile.TemporaryDirectory() as folder:
        queue = make(folder, file_size)
        queue.append(0, pack_units(some_units(0, count)))
        assert queue.end(hint) == count
        assert queue.end(hint, limit=hint * 10) == min(hint, count)
        assert queue.search_physical(hint * 10 - 3, hint) == min(hint, count)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=100, max_size=400), st.integers(-5, 40), st.integers(-10, 10**19))
def test_any_bytes_give_an_end_in_the_queue(data: bytes, hint: int, physical: int):
    """Garbage in a queue's files (a zero page in the middle, torn units) ends no search in a hang or outside it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(queue_directory(folder, "T", 0))
        directory.mkdir(parents=True)
        for start in range(0, len(data) // 100 * 100, 100):
            (directory / f"{start + 200:020d}").write_bytes(data[start : start + 100])
        queue = make(folder, 0)
        least, most = queue.first_file_queue_offset, queue.end_file_queue_offset
        assert (least, most) == (10, 10 + len(data) // 100 * 5)
        physical = min(physical, 2**63 - 1)
        for found in (queue.end(hint), queue.end(hint, limit=physical), queue.search_physical(physical, hint)):
            assert least <= found <= most


def test_an_idle_queue_costs_one_read(tmp_path: Path):
    """A source asks thousands of queues for their end on every trigger."""
    disk = WatchedDisk()
    queue = make(tmp_path, 6_000_000, disk=disk)
    queue.append(0, pack_units(some_units(0, 50_000)))
    end = queue.end()
    disk.reads = 0
    assert queue.end(end) == end == 50_000
    assert disk.reads == 1


# ---- what may not be written


@pytest.mark.parametrize(
    ("queue_offset", "units"),
    [
        (-1, some_units(0, 1)),
        (2**63 // 20, some_units(0, 1)),
        (2**70, some_units(0, 1)),
        (3, units_of((0, 0, 0))),
        (3, units_of((0, 10, 0), (-1, 10, 0))),
        (3, units_of((0, -5, 0))),
        (6, some_units(6, 1)),
        (3, np.ones(1, np.int64)),
        (3, np.zeros((1, 1), UNIT_DTYPE)),
    ],
)
def test_what_would_break_the_prefix_is_refused(tmp_path: Path, queue_offset: int, units: Units):
    """Numbers out of range, units that are none, a gap before the unit: refused before a byte is written."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 3)))
    before = image(queue)
    with pytest.raises(ValueError, match="allowed"):
        queue.append(queue_offset, pack_units(units))
    assert image(queue) == before


def test_units_are_packed_from_memory_and_from_the_order_of_the_file():
    units = some_units(3, 4)
    assert pack_units(units.astype(UNIT.dtype)) == pack_units(units)


def test_the_largest_offsets_fit(tmp_path: Path):
    """The last file a 20-digit name and an int64 allow."""
    queue = make(tmp_path, 20)
    most = (2**63 - 1) // 20 - 1
    queue.append(most, pack_units(units_of((2**63 - 1, 2**31 - 2, 2**63 - 1))))
    assert queue.read(most, 1).tolist() == [(2**63 - 1, 2**31 - 2, 2**63 - 1)]
    assert queue.end() == most + 1
    assert queue.end(limit=2**63 - 1) == most  # offset + size would not fit into an int64


def test_a_file_size_is_set_once(tmp_path: Path):
    """Without files nothing says how large they are; with files, they do."""
    queue = make(tmp_path, 0)
    with pytest.raises(ValueError, match="Call assume_file_size"):
        queue.append(0, pack_units(some_units(0, 1)))
    with pytest.raises(ValueError, match="multiple of 20"):
        queue.assume_file_size(30)
    queue.assume_file_size(40)
    queue.append(0, pack_units(some_units(0, 1)))
    with pytest.raises(ValueError, match="before the queue has a file"):
        queue.assume_file_size(60)
    again = make(tmp_path, 0)
    assert again.file_size == 40


# ---- truncation


def test_a_queue_cut_to_its_fillers_has_no_file(tmp_path: Path):
    """Java takes fillers for units that end at 2147483647; zeros for a phantom message. So the file goes."""
    queue = make(tmp_path)
    queue.append(7, pack_units(some_units(7, 2)))
    queue.truncate(7)
    assert image(queue) == {}
    assert queue.end() == 0
    queue.append(7, pack_units(some_units(7, 1)))
    assert queue.search_physical(0) == 7


def test_a_zero_file_ahead_is_unlinked(tmp_path: Path):
    """A broker's spare file holds no unit: a cut in it leaves none either."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 5)))
    (Path(queue.directory) / f"{100:020d}").write_bytes(bytes(100))
    queue.load()
    queue.truncate(7)
    assert list(image(queue)) == ["0" * 20]


def test_a_unit_behind_a_hole_keeps_its_file(tmp_path: Path):
    """A power cut may take a page from the middle; the file still has a unit below the cut, so it stays."""
    queue = make(tmp_path, 40_000)
    queue.append(0, pack_units(some_units(0, 2000)))
    path = Path(queue.path(0))
    data = bytearray(path.read_bytes())
    data[:4096] = bytes(4096)
    data[20 * 900 :] = bytes(len(data) - 20 * 900)
    path.write_bytes(data)
    queue.truncate(1500)
    assert path.read_bytes() == data
    queue.truncate(300)
    assert path.read_bytes() == data[:6000] + bytes(34_000)
    queue.truncate(200)
    assert image(queue) == {}


def test_a_sound_queue_is_not_written_by_a_cut_at_its_end(tmp_path: Path):
    """Recovery of ten thousand healthy queues must not dirty ten thousand files."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 3)))
    queue.sync()
    os.utime(queue.path(0), (1, 1))
    queue.truncate(3)
    assert not queue.written.files
    assert os.stat(queue.path(0)).st_mtime == 1


# ---- a broker started by mistake


def test_a_deleted_file_is_noticed_before_it_is_written(tmp_path: Path):
    """A second broker deletes files before it asks for the lock; units must not go into an unlinked file."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 3)))
    queue.check_files()
    os.unlink(queue.path(0))
    with pytest.raises(FileReplaced) as caught:
        queue.append(3, pack_units(some_units(3, 1)))
    assert caught.value.path == queue.path(0)
    queue.load()
    queue.append(0, pack_units(some_units(0, 4)))
    assert queue.end() == 4


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        ConsumeQueue.check_files,
        ConsumeQueue.sync,
        lambda queue: queue.append(1, pack_units(some_units(1, 1))),
        lambda queue: queue.truncate(1),
    ],
)
def test_a_replaced_file_is_noticed(tmp_path: Path, call: Callable[[ConsumeQueue], None], forget: bool):
    """The same name, another file: seen before a write, publishing or a sync, and when the pool forgot the old one."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 3)))
    path = Path(queue.path(0))
    other = path.with_suffix(".x")
    other.write_bytes(path.read_bytes())
    other.rename(path)
    if forget:
        queue.pool.clear()
    with pytest.raises(FileReplaced, match="deleted or replaced"):
        call(queue)
    queue.load()
    queue.append(0, pack_units(some_units(0, 4)))
    queue.sync()
    assert queue.end() == 4


def test_a_file_somebody_else_made_is_not_overwritten(tmp_path: Path):
    """The next file appeared meanwhile: renaming ours onto it would delete theirs."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 5)))
    theirs = Path(queue.path(100))
    theirs.write_bytes(b"\1" * 100)
    with pytest.raises(FileReplaced):
        queue.append(5, pack_units(some_units(5, 1)))
    assert theirs.read_bytes() == b"\1" * 100


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path):
    """It was said to be replaced while this process wrote it, and opening the store raised that as it was."""
    queue = make(tmp_path)
    os.makedirs(queue.path(0))
    with pytest.raises(NotAStoreError, match="00000000000000000000: found a folder where a file must be"):
        queue.append(0, pack_units(some_units(0, 1)))


def test_load_opens_files_anew(tmp_path: Path):
    """A topic deleted and made again has a file of the same name; a descriptor of the old one must not answer."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 3)))
    path = Path(queue.path(0))
    assert queue.end() == 3
    path.unlink()
    path.write_bytes(some_units(0, 1).byteswap().tobytes() + bytes(80))
    queue.load()
    assert queue.end(3) == 1


def test_a_file_deleted_by_retention_is_a_missing_file(tmp_path: Path):
    """A reader that has not looked since gets FileNotFoundError, and goes on at the first file after a load."""
    writer = make(tmp_path)
    writer.append(0, pack_units(some_units(0, 12)))
    reader = make(tmp_path)
    os.unlink(writer.path(0))
    with pytest.raises(FileNotFoundError):
        reader.read(2, 5)
    reader.load()
    assert reader.first_file_queue_offset == 5
    assert len(reader.read(2, 5)) == 0
    assert reader.read(5, 100)[:7].tolist() == some_units(5, 7).tolist()


# ---- syncs


def test_a_full_file_is_synced_before_the_second_one_after_it_gets_a_unit(tmp_path: Path):
    """Java looks back three files after a crash; older ones must be whole."""
    disk = WatchedDisk()
    queue = make(tmp_path, disk=disk)
    queue.append(0, pack_units(some_units(0, 10)))
    assert disk.synced == ["0/"]  # the first file's name, before the second one's is made
    queue.append(10, pack_units(some_units(10, 1)))
    assert disk.synced == ["0/", f"{0:020d}", "0/"]
    queue.append(11, pack_units(some_units(11, 14)))
    assert disk.synced[3:] == [f"{100:020d}", "0/", f"{200:020d}", "0/"]
    assert sorted(os.path.basename(path) for path in queue.written.files) == [f"{300:020d}", f"{400:020d}"]
    again = make(tmp_path, disk=disk)  # what another process left may be unsynced as well
    disk.synced.clear()
    again.append(25, pack_units(some_units(25, 1)))
    assert disk.synced[:1] == [f"{300:020d}"]


def test_sync_forces_files_and_the_folders_that_were_made(tmp_path: Path):
    """A file whose name is not on the disk is not there after a power cut."""
    disk = WatchedDisk()
    queue = make(tmp_path, disk=disk)
    queue.append(0, pack_units(some_units(0, 6)))
    disk.synced.clear()
    queue.sync()
    assert disk.synced == [f"{0:020d}", f"{100:020d}", "0/", "T/", "consumequeue/", tmp_path.name + "/"]
    assert not queue.written.files
    assert not queue.written.folders
    disk.synced.clear()
    queue.append(6, pack_units(some_units(6, 1)))
    queue.sync()
    queue.sync()
    assert disk.synced == [f"{100:020d}"]
    disk.synced.clear()
    queue.truncate(5)
    queue.sync()
    assert disk.synced == ["0/"]
    queue.append(5, pack_units(some_units(5, 1)))
    queue.written.clear()
    disk.synced.clear()
    queue.sync()
    assert disk.synced == []


def test_a_failed_sync_is_an_error_and_stays_dirty(tmp_path: Path):
    """The caller must know, and must not believe a second sync."""

    class FailingDisk(Disk):
        def fdatasync(self, file):
            raise OSError(5, "Input/output error", file.path)

    queue = make(tmp_path, disk=FailingDisk())
    queue.append(0, pack_units(some_units(0, 3)))
    with pytest.raises(OSError, match="Input/output"):
        queue.sync()
    assert queue.written.files


# ---- many queues, and their folders


def test_thousands_of_queues_share_sixteen_descriptors(tmp_path: Path):
    """ulimit -n 1024 is common; a store with ten thousand queues must work under it."""
    os.mkdir(tmp_path / "spark")
    pool = FilePool(Disk(), 16)
    before = len(os.listdir("/proc/self/fd"))
    root, staging = str(tmp_path), str(tmp_path / "spark")
    queues = [ConsumeQueue(queue_directory(root, "T", i), 100, pool, staging) for i in range(2000)]
    for number in range(3):
        for queue in queues:
            queue.append(number, pack_units(some_units(number, 1)))
        assert len(os.listdir("/proc/self/fd")) <= before + 16
    assert [queue.end(3) for queue in queues] == [3] * 2000
    assert len(os.listdir("/proc/self/fd")) <= before + 16
    found, refused = list_queues(Disk(), str(tmp_path))
    assert found == {"T": list(range(2000))}
    assert refused == []


def test_the_folders_tell_the_queues(tmp_path: Path):
    """Names become paths: what a broker's folders can be called, and plain numbers, count; links and files do not."""
    top = tmp_path / "consumequeue"
    for name in (
        "T/0",
        "T/10",
        "T/2",
        "T/01",
        "T/x",
        "T/-1",
        "T/2147483648",
        "%RETRY%g+t/0",
        "L" * 200 + "/0",
        "bad topic/x",
        "empty",
    ):
        (top / name).mkdir(parents=True)
    (top / "T" / "3").write_bytes(b"")
    (top / "T" / "4").symlink_to(tmp_path)
    (top / "CURRENT").write_bytes(b"")
    assert list_queues(Disk(), str(tmp_path)) == ({"T": [0, 2, 10], "%RETRY%g+t": [0], "L" * 200: [0]}, ["bad topic"])
    assert list_queues(Disk(), str(tmp_path / "nowhere")) == ({}, [])
    assert queue_directory("/s", "T", 3) == "/s/consumequeue/T/3"


@pytest.mark.parametrize(("name", "size"), [(f"{0:020d}", 30), (f"{30:020d}", 40)])
def test_files_that_do_not_hold_whole_units_are_refused(tmp_path: Path, name: str, size: int):
    """A size or a name that is no multiple of 20 would shift every unit."""
    directory = Path(queue_directory(str(tmp_path), "T", 0))
    directory.mkdir(parents=True)
    (directory / name).write_bytes(bytes(size))
    with pytest.raises(CorruptionError, match="multiple of 20"):
        make(tmp_path, 0)


def test_a_file_cut_short_behind_our_back_is_corruption(tmp_path: Path):
    """Found at load it is another size; after load, a read that ends early."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 5)))
    os.truncate(queue.path(0), 50)
    with pytest.raises(CorruptionError, match="end of the file"):
        queue.read(0, 5)


@pytest.mark.parametrize("topic", ["", ".", "..", "../victim", "a/b", "a\0b", "t" * 256, 5])
def test_a_topic_that_cannot_be_a_folder_is_an_illegal_message(topic: Any) -> None:
    """It was a bare ValueError, or a TypeError; `except StoreError` did not see it."""
    with pytest.raises(MessageIllegalError, match=r"^topic: found .*lists the topics") as refused:
        queue_directory("/s", topic, 0)
    assert refused.value.field == "topic"
    with pytest.raises(MessageIllegalError, match=r"^queue id: found -1; allowed is a whole number, 0 or more$"):
        queue_directory("/s", "T", -1)


def test_a_queue_that_still_ends_where_it_did_is_told_by_one_read(tmp_path: Path) -> None:
    """Anything else, and what one read cannot tell, is to be looked at."""
    queue = make(tmp_path, 80)
    queue.append(0, pack_units(units_of((0, 100, 7), (100, 100, 7))))
    assert queue.still_ends(2, 100, 200)
    assert not queue.still_ends(2, 90, 200)  # another message
    assert not queue.still_ends(1, 0, 200)  # one more
    assert queue.still_ends(1, 0, 199)  # which does not count yet
    assert not queue.still_ends(3, 100, 200)
    assert not queue.still_ends(0, 0, 200)
    queue.append(2, pack_units(units_of((200, 100, 7), (300, 100, 7))))
    assert not queue.still_ends(4, 300, 400)  # the next one would be in another file


def test_a_file_that_is_missing_in_the_middle_is_not_asked_for_from_a_copy(tmp_path: Path):
    """Units are derived from the log, so whoever reads the error is told to have them made again."""
    queue = make(tmp_path)
    queue.append(0, pack_units(some_units(0, 15)))
    os.unlink(queue.path(100))
    with pytest.raises(CorruptionError, match="`messagestore recover` rebuilds the queue"):
        queue.load()
