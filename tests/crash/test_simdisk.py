"""The crash harness finds what it is for: a tiny store with planted bugs, and the real folder as the oracle."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crash.simdisk import MODES, Image, KillDisk, Killed, Operation, RecordingDisk
from messagestore.errors import StoreFullError
from messagestore.files.disk import Disk, File, replace_file

# A syncfs in here must not wait for whatever else the machine is writing.
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None

# ---- a tiny store


class TinyStore:
    """Blocks of 700 bytes in files of two; `put` has the block safe when it returns, unless a bug is planted."""

    BLOCK_SIZE = 700
    BLOCKS_PER_FILE = 2

    def __init__(self, disk: Disk, folder: Path, bug: str = "") -> None:
        self.disk = disk
        self.folder = folder
        self.bug = bug
        self.count = 0
        self.file: File | None = None

    def put(self) -> int:
        number, place = divmod(self.count, self.BLOCKS_PER_FILE)
        if place == 0:
            self.file = self.disk.open_new(self.folder / f"{number}", self.BLOCK_SIZE * self.BLOCKS_PER_FILE)
            if self.bug != "no fsync_dir":
                self.disk.fsync_dir(self.folder)
        assert self.file is not None
        self.disk.pwrite(self.file, block(self.count), place * self.BLOCK_SIZE)
        if self.bug != "no fdatasync":
            self.disk.fdatasync(self.file)
        self.count += 1
        if self.bug != "no fdatasync before rename":
            replace_file(self.disk, self.folder / "count", b"%d" % self.count, via=self.folder / "new")
        else:
            file = self.disk.open_new(self.folder / "new", 0)
            self.disk.pwrite(file, b"%d" % self.count, 0)
            self.disk.rename(self.folder / "new", self.folder / "count")
            self.disk.fsync_dir(self.folder)
        return self.count


def block(number: int) -> bytes:
    return bytes([number + 1]) * TinyStore.BLOCK_SIZE


def recover(folder: Path) -> int:
    """How many blocks are there; an error when it is not what the count file says."""
    try:
        count = int((folder / "count").read_bytes())
    except FileNotFoundError:
        return 0
    for number in range(count):
        index, place = divmod(number, TinyStore.BLOCKS_PER_FILE)
        start = place * TinyStore.BLOCK_SIZE
        found = (folder / f"{index}").read_bytes()[start : start + TinyStore.BLOCK_SIZE]
        if found != block(number):
            raise ValueError(f"block {number} is not there")
    return count


def losses(tmp_path: Path, bug: str, modes: tuple[str, ...] = MODES) -> list[Image]:
    """The images in which an acknowledged put is missing."""
    folder = tmp_path / "real"
    folder.mkdir()
    disk = RecordingDisk(folder)
    store = TinyStore(disk, folder, bug)
    acknowledged = [(0, 0)]
    for _ in range(5):
        count = store.put()
        acknowledged.append((disk.position, count))
    found = []
    for cut in range(disk.position + 1):
        least = max(count for position, count in acknowledged if position <= cut)
        for image in disk.images(cut, modes):
            with tempfile.TemporaryDirectory(dir=MEMORY) as target:
                try:
                    if recover(image.build(target)) >= least:
                        continue
                except (OSError, ValueError):
                    pass
                found.append(image)
    return found


def test_a_sound_store_loses_nothing(tmp_path: Path):
    """Data, then the name, then the count: every image of every cut holds what was acknowledged."""
    assert losses(tmp_path, "") == []


@pytest.mark.parametrize("bug", ["no fsync_dir", "no fdatasync", "no fdatasync before rename"])
def test_a_planted_bug_shows(tmp_path: Path, bug: str):
    """Each missing sync loses an acknowledged put in some image."""
    assert losses(tmp_path, bug)


@pytest.mark.parametrize("bug", ["no fsync_dir", "no fdatasync", "no fdatasync before rename"])
def test_a_kill_does_not_show_it(tmp_path: Path, bug: str):
    """The page cache outlives the process: that is why there are power cuts here."""
    assert losses(tmp_path, bug, ("kill",)) == []


@pytest.mark.parametrize("mode", ["strict", "one file missing", "one missing", "random"])
def test_a_missing_data_sync_shows_in_many_ways(tmp_path: Path, mode: str):
    """Not only when everything is lost: also when a single sector is."""
    assert losses(tmp_path, "no fdatasync", (mode,))


# ---- the real folder as the oracle

NAMES = st.sampled_from(["a", "b", "c", "d/a", "d/b", "d"])
SIZES = st.integers(0, 3000)
STEPS = st.one_of(
    st.tuples(st.just("open_new"), NAMES, SIZES),
    st.tuples(st.just("pwrite"), NAMES, SIZES, st.integers(0, 2000)),
    st.tuples(st.just("punch"), NAMES, SIZES, st.integers(1, 2000)),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.just("unlink"), NAMES),
    st.tuples(st.just("mkdir"), NAMES),
    st.tuples(st.just("rmdir"), NAMES),
    st.tuples(st.just("fdatasync"), NAMES),
    st.tuples(st.just("fallocate"), NAMES, st.integers(1, 4000)),
    st.tuples(st.just("fsync_dir"), st.sampled_from([".", "d"])),
    st.tuples(st.just("syncfs"), NAMES),
    st.tuples(st.just("replace"), NAMES, SIZES),
)


def run(disk: Disk, root: Path, steps: list[tuple]) -> None:
    """Do the steps; those that make no sense fail as they would for anybody."""
    for number, (name, first, *rest) in enumerate(steps, 1):
        path = root / first
        try:
            if name in ("open_new", "unlink", "mkdir", "rmdir", "fsync_dir"):
                getattr(disk, name)(path, *rest)
            elif name == "rename":
                disk.rename(path, root / rest[0])
            elif name == "replace":
                replace_file(disk, path, bytes([number]) * rest[0], via=root / "via")
            else:
                file = disk.open(path, writable=True)
                if name == "pwrite":
                    disk.pwrite(file, bytes([number]) * rest[1], rest[0])
                else:
                    getattr(disk, name)(file, *rest)
        except (OSError, ValueError):
            continue


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in sorted(root.rglob("*"))}


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=25), st.lists(STEPS, max_size=25))
def test_the_image_of_all_is_the_real_folder(before: list[tuple], steps: list[tuple]):
    """Whatever is done: what survives a kill is what is really there, and a syncfs makes it safe."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        real, image, safe = (Path(temporary) / name for name in ("real", "image", "safe"))
        real.mkdir()
        run(Disk(), real, before)
        disk = RecordingDisk(real)
        assert tree(disk.image(0).build(Path(temporary) / "base")) == tree(real)
        run(disk, real, steps)
        assert tree(disk.image(disk.position, "all").build(image)) == tree(real)
        anchor = disk.open_new(real / "anchor", 0)
        disk.syncfs(anchor)
        assert disk.unsafe(disk.position) == []
        assert tree(disk.image(disk.position, "strict").build(safe)) == tree(real)


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=15))
def test_a_killed_process_leaves_the_operations_before_it(steps: list[tuple]):
    """KillDisk at n, on a folder of its own, leaves the recorded image of all at n."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        recorded = Path(temporary) / "recorded"
        recorded.mkdir()
        recording = RecordingDisk(recorded)
        run(recording, recorded, steps)
        for cut in range(recording.position + 1):
            killed = Path(temporary) / f"killed-{cut}"
            killed.mkdir()
            disk = KillDisk(cut)
            try:
                run(disk, killed, steps)
                assert cut == recording.position
            except Killed:
                assert disk.dead
            assert len(disk.operations) == cut
            image = recording.image(cut, "kill").build(Path(temporary) / f"image-{cut}")
            assert tree(image) == tree(killed)


# ---- the rules of a power cut, one by one


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "real"
    path.mkdir()
    (path / "old").write_bytes(b"o" * 2000)
    return path


@pytest.fixture
def disk(root: Path) -> RecordingDisk:
    return RecordingDisk(root)


@pytest.fixture
def trees(tmp_path: Path, disk: RecordingDisk) -> Callable[..., list[dict[str, bytes | None]]]:
    """The trees of all images of some modes at the end of what was done."""

    def build(*modes: str) -> list[dict[str, bytes | None]]:
        found = []
        for image in disk.images(disk.position, modes or MODES, limit=1000, random_count=50):
            with tempfile.TemporaryDirectory(dir=tmp_path) as target:
                found.append(tree(image.build(target)))
        return found

    return build


def test_a_write_may_survive_by_sectors(root: Path, disk: RecordingDisk, trees: Callable):
    """Old bytes and new ones in one file, but not within one sector."""
    disk.pwrite(disk.open(root / "old", writable=True), b"n" * 1200, 100)
    contents = {t["old"] for t in trees()}
    assert b"o" * 2000 in contents
    assert b"o" * 100 + b"n" * 1200 + b"o" * 700 in contents
    assert b"o" * 512 + b"n" * 512 + b"o" * 976 in contents
    for content in contents:
        assert content is not None
        for start in range(0, 2000, 512):
            new = content[start : start + 512].count(b"n")
            assert new in (0, min(1300, start + 512) - max(100, start))


def test_two_writes_to_a_sector_survive_in_their_order(root: Path, disk: RecordingDisk, trees: Callable):
    """None, the first, or both: never the second alone."""
    file = disk.open(root / "old", writable=True)
    disk.pwrite(file, b"1", 0)
    disk.pwrite(file, b"2", 1)
    assert {t["old"][:3] for t in trees()} == {b"ooo", b"1oo", b"12o"}


def test_a_synced_write_survives_and_the_next_does_not(root: Path, disk: RecordingDisk, trees: Callable):
    """fdatasync is about what came before it, in this file."""
    file = disk.open(root / "old", writable=True)
    disk.pwrite(file, b"1", 0)
    disk.fdatasync(file)
    disk.pwrite(file, b"2", 0)
    assert {t["old"][:2] for t in trees()} == {b"1o", b"2o"}


def test_a_synced_file_without_its_name_is_lost(root: Path, disk: RecordingDisk, trees: Callable):
    """The folder has to be synced, too."""
    file = disk.open_new(root / "new", 3)
    disk.pwrite(file, b"abc", 0)
    disk.fdatasync(file)
    assert {t.get("new") for t in trees()} == {None, b"abc"}
    disk.fsync_dir(root)
    assert {t.get("new") for t in trees()} == {b"abc"}


def test_a_name_without_its_data_is_zeros_of_its_size(root: Path, disk: RecordingDisk, trees: Callable):
    """A segment that was renamed into place and not synced."""
    file = disk.open_new(root / "via", 700)
    disk.pwrite(file, b"a" * 700, 0)
    disk.rename(root / "via", root / "new")
    disk.fsync_dir(root)
    assert {t["new"] for t in trees()} == {
        bytes(700),
        b"a" * 700,
        bytes(512) + b"a" * 188,
        b"a" * 512 + bytes(188),
    }
    assert not any("via" in t for t in trees())


def test_a_file_that_grew_may_be_short(root: Path, disk: RecordingDisk, trees: Callable):
    """Written from nothing, renamed, not synced: empty, or zeros, or whole."""
    file = disk.open_new(root / "via", 0)
    disk.pwrite(file, b"abc", 0)
    disk.rename(root / "via", root / "old")
    assert {t.get("old") for t in trees()} == {b"o" * 2000, b"", bytes(3), b"abc"}


def test_a_rename_is_whole(root: Path, disk: RecordingDisk, trees: Callable):
    """One of the two names, never both and never neither."""
    disk.rename(root / "old", root / "new")
    assert sorted(tuple(t) for t in trees()) == [("new",), ("old",)]


def test_an_unlink_may_not_have_happened(root: Path, disk: RecordingDisk, trees: Callable):
    """Until its folder is synced."""
    disk.unlink(root / "old")
    assert {tuple(t) for t in trees()} == {("old",), ()}
    disk.fsync_dir(root)
    assert {tuple(t) for t in trees()} == {()}


def test_a_file_in_a_lost_folder_is_lost(root: Path, disk: RecordingDisk, trees: Callable):
    """Syncing the inner folder does not save its own name."""
    disk.mkdir(root / "inner")
    disk.fdatasync(disk.open_new(root / "inner" / "file", 1))
    disk.fsync_dir(root / "inner")
    assert {tuple(t) for t in trees()} == {("old",), ("inner", "inner/file", "old")}
    disk.fsync_dir(root)
    assert {tuple(t) for t in trees()} == {("inner", "inner/file", "old")}


def test_a_hole_may_not_have_been_punched(root: Path, disk: RecordingDisk, trees: Callable):
    """Zeroing a tail is a write like any other."""
    disk.punch(disk.open(root / "old", writable=True), 512, 600)
    contents = {t["old"] for t in trees()}
    assert b"o" * 2000 in contents
    assert b"o" * 512 + bytes(600) + b"o" * 888 in contents
    assert b"o" * 512 + bytes(512) + b"o" * 976 in contents


def test_a_failed_sync_is_not_made_good_by_the_next(root: Path, trees: Callable, disk: RecordingDisk):
    """The pages are clean and lost: only writing them again helps."""
    file = disk.open(root / "old", writable=True)
    disk.pwrite(file, b"1", 0)
    disk.pwrite(file, b"1", 600)
    disk.fail_at = disk.position
    with pytest.raises(OSError, match="Input/output error"):
        disk.fdatasync(file)
    disk.fdatasync(file)
    assert {t["old"][0:1] + t["old"][600:601] for t in trees()} == {b"oo", b"1o", b"o1", b"11"}
    disk.pwrite(file, b"1", 0)
    disk.fdatasync(file)
    assert {t["old"][0:1] + t["old"][600:601] for t in trees()} == {b"1o", b"11"}


def test_after_a_kill_the_next_process_goes_on(root: Path, disk: RecordingDisk, trees: Callable):
    """What the dead one wrote is in the page cache, and still not safe."""
    file = disk.open(root / "old", writable=True)
    disk.pwrite(file, b"1", 0)
    disk.kill_at = disk.position
    with pytest.raises(Killed):
        disk.fdatasync(file)
    disk.revive()
    assert disk.pread(file, 2, 0) == b"1o"
    disk.pwrite(file, b"2", 600)
    assert {t["old"][0:1] + t["old"][600:601] for t in trees()} == {b"oo", b"1o", b"o2", b"12"}


@pytest.mark.parametrize("in_order", [False, True])
def test_names_may_be_lost_in_order_only(root: Path, disk: RecordingDisk, tmp_path: Path, in_order: bool):
    """One journal, as on ext4 and XFS: no later name without the earlier ones. Without that promise: any."""
    for name in ("a", "b", "c"):
        disk.open_new(root / name, 1)
    found = set()
    for image in disk.images(disk.position, limit=100, random_count=100, names_in_order=in_order):
        with tempfile.TemporaryDirectory(dir=MEMORY) as target:
            found.add("".join(name for name in tree(image.build(target)) if name != "old"))
    assert found == ({"", "a", "ab", "abc"} if in_order else {"", "a", "b", "c", "ab", "ac", "bc", "abc"})


def test_images_come_again_with_the_same_seed(root: Path, disk: RecordingDisk):
    """A failure can be run again; another seed gives other sets."""
    file = disk.open(root / "old", writable=True)
    for position in range(0, 2000, 100):
        disk.pwrite(file, b"n" * 50, position)
    once, again, other = (
        [image.folder for image in disk.images(disk.position, ["random"], random_count=20, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert once == again != other
    assert [image.folder for image in disk.images(5)] == [image.folder for image in disk.images(5)]


def test_an_image_is_what_it_was_when_it_was_made(root: Path, disk: RecordingDisk, tmp_path: Path):
    """Looking at other cuts, backwards too, changes nothing in it."""
    file = disk.open(root / "old", writable=True)
    disk.pwrite(file, b"1", 0)
    image = disk.image(1, "all")
    disk.pwrite(file, b"2", 0)
    disk.fdatasync(file)
    later = disk.image(3)
    assert tree(image.build(tmp_path / "first"))["old"][:1] == b"1"  # type: ignore[index]
    assert tree(later.build(tmp_path / "later"))["old"][:1] == b"2"  # type: ignore[index]
    assert tree(disk.image(0).build(tmp_path / "base")) == {"old": b"o" * 2000}
    with pytest.raises(ValueError, match="is not empty"):
        image.build(tmp_path / "first")
    with pytest.raises(ValueError, match="allowed is 0 to 3"):
        disk.image(4)


def test_messages_name_what_was_lost(root: Path, disk: RecordingDisk):
    """A failing image says what to look for."""
    disk.rename(root / "old", root / "new")
    disk.pwrite(disk.open(root / "new", writable=True), b"n" * 600, 0)
    assert disk.unsafe(disk.position) == [
        f"the renaming of {root}/old to {root}/new",
        "new sector 0",
        "new sector 1",
    ]
    labels = [str(image) for image in disk.images(disk.position, ["one missing"])]
    assert "power cut after operation 2, one missing: new sector 0" in labels


def test_a_file_that_was_made_elsewhere_is_an_error(root: Path, disk: RecordingDisk, tmp_path: Path):
    """A write past the seam would make every image wrong."""
    (root / "bypass").write_bytes(b"x")
    with pytest.raises(AssertionError, match="was not made through the disk that records"):
        disk.pwrite(disk.open(root / "bypass", writable=True), b"y", 0)
    disk.unlink(root / "bypass")
    (tmp_path / "outside").write_bytes(b"x")
    with pytest.raises(AssertionError, match="outside"):
        disk.fdatasync(disk.open(tmp_path / "outside"))
    disk.revive()
    assert tree(root) == {"old": b"o" * 2000}


# ---- killing and failing


def test_the_dead_do_nothing(root: Path):
    """Every operation of the seam, reads too."""
    disk = KillDisk(1)
    file = disk.open(root / "old", writable=True)
    disk.pwrite(file, b"1", 0)
    with pytest.raises(Killed, match=r"in operation 1: pwrite .*old \(1 bytes at 1\)"):
        disk.pwrite(file, b"2", 1)

    path = str(root / "old")
    for call in (
        lambda: disk.open(path),
        lambda: disk.open_new(path + "2", 0),
        lambda: disk.pwrite(file, b"", 0),
        lambda: disk.pread(file, 1, 0),
        lambda: disk.pread_into(file, memoryview(bytearray(1)), 0),
        lambda: disk.fdatasync(file),
        lambda: disk.fsync_dir(root),
        lambda: disk.syncfs(file),
        lambda: disk.rename(path, path + "2"),
        lambda: disk.unlink(path),
        lambda: disk.mkdir(path + "2"),
        lambda: disk.rmdir(root),
        lambda: disk.fallocate(file, 1),
        lambda: disk.punch(file, 0, 1),
        lambda: disk.size(path),
        lambda: disk.exists(path),
        lambda: disk.names(root),
        lambda: disk.entries(root),
        lambda: disk.is_folder(root),
        lambda: disk.at_path(file),
        lambda: disk.identity_at(path),
        lambda: disk.data_ranges(file, 0, 1),
        lambda: disk.free(root),
        lambda: disk.modified_s(path),
        lambda: disk.read(path),
        lambda: disk.length(file),
        lambda: disk.check_folders(path),
        lambda: replace_file(disk, path, b"", via=path + "2"),
    ):
        with pytest.raises(Killed, match="dead since operation 1"):
            call()

    assert tree(root) == {"old": b"1" + b"o" * 1999}
    assert disk.operations == [Operation("pwrite", path, "1 bytes at 0")]


def test_every_operation_of_the_seam_is_covered():
    """A method that Disk gets later must be put among the mutating or the reading ones."""
    public = {name for name, value in vars(Disk).items() if not name.startswith("_") and callable(value)}
    of_the_machine = {"time_ns", "uptime_ns", "lease_break_time_s", "available_memory", "locked_memory"}
    made_of_the_others = {
        "make_empty",
        "read",
        "read_head",
        "make_folders",
        "pread_parts",
        "pwrite_parts",
        "release_root",
        "sync_names_above",
    }
    assert public - set(vars(KillDisk)) - of_the_machine == made_of_the_others


def test_parts_that_are_written_together_are_killed_one_by_one(root: Path):
    """Only the kernel of a plain disk writes them in one call: a crash may come between two of them."""
    disk = KillDisk(1)
    positions, starts, ends = (np.array(each) for each in ([0, 8], [0, 2], [2, 4]))
    with pytest.raises(Killed):
        disk.pwrite_parts(disk.open(root / "old", writable=True), memoryview(b"1234"), positions, starts, ends)
    assert (root / "old").read_bytes()[:10] == b"12oooooooo"


def test_half_a_write(root: Path):
    """The process dies between two pages."""
    disk = KillDisk(0, half_writes=True)
    with pytest.raises(Killed):
        disk.pwrite(disk.open(root / "old", writable=True), b"12345", 0)
    assert (root / "old").read_bytes()[:6] == b"12oooo"


def test_half_a_write_is_recorded(root: Path, tmp_path: Path):
    """It is in the page cache, so a power cut may leave it or not."""
    disk = RecordingDisk(root, kill_at=0, half_writes=True)
    with pytest.raises(Killed):
        disk.pwrite(disk.open(root / "old", writable=True), b"1" * 1200, 0)
    disk.revive()
    assert tree(disk.image(disk.position, "all").build(tmp_path / "all")) == tree(root)
    assert tree(disk.image(disk.position).build(tmp_path / "strict")) == {"old": b"o" * 2000}


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, OSError), (errno.ENOSPC, StoreFullError)])
def test_one_operation_fails(root: Path, tmp_path: Path, number: int, kind: type):
    """With the error the real disk would raise; then the process lives on."""
    disk = RecordingDisk(root, 1, number, half_writes=True)
    file = disk.open(root / "old", writable=True)
    disk.pwrite(file, b"1", 0)
    with pytest.raises(kind) as caught:
        disk.pwrite(file, b"2222", 10)
    assert caught.value.errno == number
    disk.pwrite(file, b"3", 20)
    assert [operation.detail for operation in disk.operations] == [
        "1 bytes at 0",
        "4 bytes at 10, failed",
        "1 bytes at 20",
    ]
    assert (root / "old").read_bytes()[:21] == b"1ooooooooo22oooooooo3"
    assert tree(disk.image(3, "all").build(tmp_path / "all")) == tree(root)
    assert os.listdir(tmp_path / "all") == ["old"]
