"""Files of one size, named by their first byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore.errors import CorruptionError, StoreFullError
from messagestore.files.disk import Disk, File, FilePool
from messagestore.files.numbered_files import MappedFileQueue, file_name

SIZE = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spark").mkdir()
    return tmp_path / "commitlog"


def queue_of(folder: Path, file_size: int = SIZE, disk: Disk | None = None) -> MappedFileQueue:
    return MappedFileQueue(str(folder), file_size, FilePool(disk or Disk(), 8), str(folder.parent / "spark"))


@pytest.fixture
def queue(folder: Path) -> MappedFileQueue:
    return queue_of(folder)


def put(folder: Path, name: str | int, size: int = SIZE) -> None:
    folder.mkdir(exist_ok=True)
    (folder / (file_name(name) if isinstance(name, int) else name)).write_bytes(b"\1" * size)


# ---- looking


def test_a_name_has_twenty_digits():
    """So that the order of names is the order of offsets."""
    assert file_name(0) == "0" * 20
    assert file_name(1073741824) == "00000000001073741824"
    assert len(file_name((1 << 63) - 1)) == 20


def test_no_folder_and_no_file(queue: MappedFileQueue, folder: Path):
    """A queue without files holds nothing."""
    for _ in range(2):
        queue.load()
        assert (queue.offsets, queue.min_offset, queue.max_offset) == ([], 0, 0)
        assert queue.holding(0) is None
        assert queue.pread(0, 10) == b""
        folder.mkdir(exist_ok=True)


def test_files_that_begin_anywhere(queue: MappedFileQueue, folder: Path):
    """Retention deletes the first ones; offsets stay what they are."""
    for offset in (300, 400, 500):
        put(folder, offset)
    queue.load()
    assert (queue.offsets, queue.min_offset, queue.max_offset) == ([300, 400, 500], 300, 600)


def test_the_size_is_taken_from_the_files(folder: Path):
    """A store that somebody else configured."""
    put(folder, 0, 64)
    put(folder, 64, 64)
    queue = queue_of(folder, 0)
    queue.load()
    assert (queue.file_size, queue.max_offset) == (64, 128)


@pytest.mark.parametrize(
    "name", ["x.tmp", "0", file_name(0) + "~", "-" + "0" * 19, "\u0660" * 20, "9" * 20, file_name(0)[1:]]
)
def test_a_stray_file_is_refused(queue: MappedFileQueue, folder: Path, name: str):
    """A broker would not start beside it; the error names it and says what to do. 20 nines are no int64."""
    put(folder, name)
    with pytest.raises(CorruptionError, match="Move it out") as caught:
        queue.load()
    assert caught.value.path == str(folder / name)


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_refused(queue: MappedFileQueue, folder: Path, size: int):
    """Also an empty one, when it is not the last."""
    put(folder, 0)
    put(folder, 100, size)
    put(folder, 200)
    with pytest.raises(CorruptionError, match=f"expected a file of 100 bytes, found {size} bytes") as caught:
        queue.load()
    assert caught.value.path == str(folder / file_name(100))


def test_an_empty_last_file_is_not_there_yet(queue: MappedFileQueue, folder: Path):
    """A broker makes the next one in two steps, and may be killed between them."""
    put(folder, 0)
    put(folder, 100, 0)
    queue.load()
    assert queue.offsets == [0]
    queue.create(100, b"data", 3)
    assert queue.pread(100, 7) == bytes(3) + b"data"


def test_a_gap_is_refused(queue: MappedFileQueue, folder: Path):
    """The error names the file that is missing."""
    put(folder, 0)
    put(folder, 200)
    with pytest.raises(
        CorruptionError, match="expected this file, found 00000000000000000200 as the next one"
    ) as caught:
        queue.load()
    assert (caught.value.path, caught.value.physical_offset) == (str(folder / file_name(100)), 100)


def test_a_failed_load_changes_nothing(queue: MappedFileQueue, folder: Path):
    """What was known before is still what is known."""
    put(folder, 0)
    queue.load()
    put(folder, 100, 7)
    with pytest.raises(CorruptionError):
        queue.load()
    assert queue.offsets == [0]


def test_folders_are_skipped(queue: MappedFileQueue, folder: Path):
    """As a broker does."""
    put(folder, 0)
    (folder / "lost+found").mkdir()
    queue.load()
    assert queue.offsets == [0]


class DeletingDisk(Disk):
    """Retention deletes the first files after a load has looked at one of them."""

    def __init__(self, folder: Path, seen: int, deleted: list[int]) -> None:
        self.folder, self.seen, self.deleted = folder, seen, deleted

    def size(self, path: str | Path) -> int:
        size = super().size(path)
        if str(path) == str(self.folder / file_name(self.seen)):
            for start in self.deleted:
                os.unlink(self.folder / file_name(start))
        return size


@pytest.mark.parametrize(("seen", "deleted", "left"), [(0, [0, 100], [200, 300]), (100, [0, 100, 200], [300])])
def test_files_that_retention_deletes_during_a_look_are_no_gap(
    folder: Path, seen: int, deleted: list[int], left: list[int]
):
    for start in (0, 100, 200, 300):
        put(folder, start)
    queue = queue_of(folder, disk=DeletingDisk(folder, seen, deleted))
    queue.load()
    assert list(queue.offsets) == left


def test_files_that_recovery_deletes_during_a_look_leave_the_ones_before(folder: Path):
    for start in (0, 100, 200):
        put(folder, start)
    queue = queue_of(folder, disk=DeletingDisk(folder, 0, [200]))
    queue.load()
    assert list(queue.offsets) == [0, 100]


def test_a_file_deleted_while_looking(folder: Path):
    """Retention in a live broker."""

    class RacingDisk(Disk):
        def size(self, path: str | Path) -> int:
            if str(path).endswith(file_name(0)) and os.path.exists(path):
                os.unlink(path)
            return super().size(path)

    put(folder, 0)
    put(folder, 100)
    queue = queue_of(folder, disk=RacingDisk())
    queue.load()
    assert queue.offsets == [100]


@given(st.integers(0, 50), st.integers(0, 6), st.integers(1, 70), st.integers(-10, 10_000))
def test_which_file_holds_an_offset(first: int, count: int, size: int, offset: int):
    """Against the obvious loop."""
    queue = MappedFileQueue("/nowhere", size, FilePool(Disk(), 8), "/nowhere")
    queue.set_offsets([(first + number) * size for number in range(count)])
    expected = [start for start in queue.offsets if start <= offset < start + size]
    assert queue.holding(offset) == (expected[0] if expected else None)
    assert queue.max_offset == (queue.offsets[-1] + size if count else 0)


# ---- reading


def test_a_read_ends_with_its_file(queue: MappedFileQueue):
    """Records do not cross files."""
    queue.create(0, b"a" * SIZE)
    queue.create(100, b"b" * SIZE)
    assert queue.pread(90, 20) == b"a" * 10
    assert queue.pread(100, 500) == b"b" * 100
    assert queue.pread(200, 1) == b""
    assert queue.pread(150, 0) == b""


# ---- making and removing


class LookingDisk(Disk):
    """Looks at every file that gets a name, the moment it gets it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes]] = []

    def rename(self, source: str | Path, target: str | Path) -> None:
        super().rename(source, target)
        self.seen.append((str(target), Path(target).read_bytes()))


def test_a_new_file_appears_whole(folder: Path):
    """With its size and its first bytes: a broker that looks just then must not refuse or misread it."""
    disk = LookingDisk()
    queue = queue_of(folder, disk=disk)
    file = queue.create(300, b"first", 20)
    assert disk.seen == [(str(folder / file_name(300)), bytes(20) + b"first" + bytes(75))]
    assert file.path == str(folder / file_name(300))
    assert disk.at_path(file)
    assert queue.file(300, writable=True) is file
    assert queue.offsets == [300]
    assert os.listdir(folder.parent / "spark") == []


def test_folders_are_made_with_the_first_file(tmp_path: Path):
    """A ConsumeQueue's folder, and its topic's, do not exist before it has a unit."""
    (tmp_path / "spark").mkdir()
    queue = queue_of(tmp_path / "store")
    queue.directory = str(tmp_path / "consumequeue" / "topic" / "0")
    queue.create(0)
    assert (tmp_path / "consumequeue" / "topic" / "0" / file_name(0)).stat().st_size == SIZE


def test_room_may_be_taken_at_once(folder: Path):
    """preallocate: a full disk shows when the file is made."""
    queue = queue_of(folder, 1 << 20)
    queue.create(0, b"x", preallocate=True)
    assert (folder / file_name(0)).stat().st_blocks * 512 >= 1 << 20


class NamingDisk(Disk):
    """Notes the order in which files of a folder get their names and the folder is synced."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def rename(self, source: str | Path, target: str | Path) -> None:
        super().rename(source, target)
        self.order.append(Path(target).name.lstrip("0") or "0")

    def fsync_dir(self, path: str | Path) -> None:
        super().fsync_dir(path)
        self.order.append("sync")


@pytest.mark.parametrize("how", ["load", "refresh"])
def test_a_name_that_was_found_is_synced_before_the_next_one(folder: Path, how: str):
    """Its writer may have been killed: a power cut must not take an earlier name and leave a later one."""
    disk, dead = NamingDisk(), queue_of(folder)
    dead.create(0)
    queue = queue_of(folder, disk=disk)
    queue.load()
    if how == "refresh":
        queue.name_synced(0)
        dead.create(100)
        queue.refresh()
    for start in (queue.max_offset, queue.max_offset + 100):
        queue.create(start)
    last = int(disk.order[-1])
    assert disk.order == ["sync", str(last - 100), "sync", str(last)]


@pytest.mark.parametrize("call", ["pwrite", "fallocate", "rename", "mkdir"])
def test_a_file_that_could_not_be_made_leaves_nothing(folder: Path, call: str):
    """A full disk: no half file anywhere, and the next try works."""

    class FailingDisk(Disk):
        failing = True

        def fail(self, name: str) -> None:
            if self.failing and name == call:
                raise StoreFullError("no room", path="", needed=1, free=0)

        def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
            self.fail("pwrite")
            super().pwrite(file, data, position)

        def fallocate(self, file: File, size: int) -> None:
            self.fail("fallocate")
            super().fallocate(file, size)

        def rename(self, source: str | Path, target: str | Path) -> None:
            self.fail("rename")
            super().rename(source, target)

        def mkdir(self, path: str | Path) -> None:
            self.fail("mkdir")
            super().mkdir(path)

    disk = FailingDisk()
    queue = queue_of(folder, disk=disk)
    with pytest.raises(StoreFullError):
        queue.create(0, b"x", preallocate=True)
    assert queue.offsets == []
    assert os.listdir(folder.parent / "spark") == []
    assert disk.names(folder) == []
    disk.failing = False
    queue.create(0, b"x", preallocate=True)
    queue.load()
    assert queue.offsets == [0]


def test_a_removed_file_is_open_for_who_reads_it(queue: MappedFileQueue, folder: Path):
    """Its name is gone, and the pool does not know it any more; the one made next in its place is another file."""
    queue.create(0, b"old")
    reader = queue.file(0)
    queue.remove(0)
    assert queue.offsets == []
    assert os.listdir(folder) == []
    assert queue.disk.pread(reader, 3, 0) == b"old"
    queue.create(0, b"new")
    assert queue.pread(0, 3) == b"new"
    assert queue.disk.pread(reader, 3, 0) == b"old"


def test_another_process_sees_what_was_made(queue: MappedFileQueue, folder: Path):
    """Names and sizes are all there is to know."""
    queue.create(200, b"a")
    queue.create(300)
    other = queue_of(folder, 0)
    other.load()
    assert (other.offsets, other.file_size) == ([200, 300], SIZE)
    assert other.path(300) == queue.path(300) == str(folder / file_name(300))


# ---- looking again


class CountingDisk(Disk):
    """Counts the looks at files and folders."""

    def __init__(self) -> None:
        self.looks = 0

    def size(self, path: str | Path) -> int:
        self.looks += 1
        return super().size(path)

    def exists(self, path: str | Path) -> bool:
        self.looks += 1
        return super().exists(path)

    def is_folder(self, path: str | Path) -> bool:
        self.looks += 1
        return super().is_folder(path)

    def names(self, path: str | Path) -> list[str]:
        self.looks += 1
        return super().names(path)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_a_second_look_sees_what_a_first_one_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
):
    """Whatever retention took before, and writers added behind."""
    folder = tmp_path_factory.mktemp("queue") / "commitlog"
    first = last = 0
    known = queue_of(folder)
    for added, removed in steps:
        for _ in range(added):
            put(folder, last * SIZE)
            last += 1
        for _ in range(min(removed, last - first)):
            (folder / file_name(first * SIZE)).unlink()
            first += 1
        known.refresh()
        fresh = queue_of(folder)
        fresh.load()
        assert known.offsets == fresh.offsets == [number * SIZE for number in range(first, last)]


def test_a_second_look_costs_the_same_with_any_number_of_files(folder: Path):
    """A commit after another process's, in a store of 16 000 segments."""
    looks = []
    for count in (10, 1000):
        for number in range(count):
            put(folder, number * SIZE, SIZE)
        disk = CountingDisk()
        queue = queue_of(folder, disk=disk)
        queue.load()
        put(folder, count * SIZE)
        disk.looks = 0
        queue.refresh()
        assert queue.max_offset == (count + 1) * SIZE
        looks.append(disk.looks)
    assert looks[0] == looks[1] <= 5


def test_a_second_look_at_a_next_file_that_is_none(queue: MappedFileQueue, folder: Path):
    """An empty one is not a file yet; one of another size is damage."""
    put(folder, 0)
    queue.load()
    put(folder, SIZE, 0)
    queue.refresh()
    assert queue.offsets == [0]
    put(folder, SIZE, SIZE - 1)
    with pytest.raises(CorruptionError, match=f"expected a file of {SIZE} bytes, found {SIZE - 1} bytes"):
        queue.refresh()
