"""The seam to the disk: whole writes, whole reads, errors that name the file, and a pool of open files."""

from __future__ import annotations

import errno
import gc
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messagestore.errors import CorruptionError, NotAStoreError, StoreFullError
from messagestore.files import disk as disk_module
from messagestore.files.disk import Disk, File, FilePool, new_file, pool_limit, read_exactly, replace_file


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "file")


@pytest.fixture
def file(disk: Disk, path: str) -> File:
    return disk.open_new(path, 10_000)


@contextmanager
def size_limit(size: int) -> Iterator[None]:
    """No file of this process may be larger: the kernel's own error, on every file system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- opening


def test_a_new_file_is_sparse_zero_and_private(disk: Disk, path: str):
    """As large as asked for, without a block, for its owner only."""
    file = disk.open_new(path, 1 << 30)
    info = os.stat(path)
    assert (info.st_size, info.st_blocks, info.st_mode & 0o777) == (1 << 30, 0, 0o600)
    assert disk.pread(file, 4, 1 << 29) == bytes(4)
    with pytest.raises(FileExistsError):
        disk.open_new(path, 1)
    assert os.path.getsize(path) == 1 << 30


def test_a_file_that_is_too_large_leaves_nothing(disk: Disk, path: str):
    """The name is free again after the error, which says what was needed."""
    with size_limit(5000), pytest.raises(StoreFullError, match="no room for") as caught:
        disk.open_new(path, 6000)
    assert caught.value.needed == 6000
    assert caught.value.errno == errno.EFBIG
    assert not os.path.exists(path)


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "fifo", "socket", "device"])
@pytest.mark.parametrize("writable", [False, True])
def test_only_regular_files_are_opened(disk: Disk, path: str, tmp_path: Path, kind: str, writable: bool):
    """Without hanging on a FIFO, and without following a link out of the store."""
    if kind == "link":
        (tmp_path / "target").write_bytes(b"x")
        os.symlink(tmp_path / "target", path)
    elif kind == "dangling":
        os.symlink(tmp_path / "nowhere", path)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = "/dev/null"
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
    with pytest.raises(NotAStoreError) as caught:
        disk.open(path, writable=writable)
    assert caught.value.path == path


def test_a_missing_file_is_an_error_of_its_own(disk: Disk, path: str):
    """Callers tell it from others."""
    with pytest.raises(FileNotFoundError):
        disk.open(path)


def test_a_file_opened_for_reading_is_not_written(disk: Disk, path: str, file: File):
    """Views cannot change a store by mistake."""
    reader = disk.open(path)
    assert not reader.writable
    assert file.writable
    with pytest.raises(OSError, match="file") as caught:
        disk.pwrite(reader, b"x", 0)
    assert caught.value.errno == errno.EBADF
    assert caught.value.filename == path


def test_descriptors_do_not_survive_exec_and_close_with_the_last_reference(disk: Disk, path: str, file: File):
    """A started program does not keep a store's files open; a forgotten file does not, either."""
    assert not os.get_inheritable(file.fileno())
    other = disk.open(path)
    number = other.fileno()
    del other
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_closed_file_says_so(disk: Disk, path: str, file: File):
    """Never another file's descriptor, however often it was closed."""
    file.close()
    file.close()
    with pytest.raises(OSError, match="file is closed") as caught:
        disk.pread(file, 1, 0)
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, path)


# ---- reading and writing


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=400)), max_size=8),
    st.integers(0, 4000),
    st.integers(0, 4000),
)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, writes: list, position: int, size: int):
    """Against a bytearray; a read ends with the file."""
    disk = Disk()
    file = disk.open_new(tmp_path_factory.mktemp("file") / "file", 1000)
    model = bytearray(1000)
    for at, data in writes:
        disk.pwrite(file, data, at)
        if data:
            model.extend(bytes(max(0, at + len(data) - len(model))))
            model[at : at + len(data)] = data
    assert disk.pread(file, size, position) == bytes(model[position : position + size])
    buffer = bytearray(b"\xff" * size)
    count = disk.pread_into(file, memoryview(buffer), position)
    assert bytes(buffer[:count]) == bytes(model[position : position + size])
    assert buffer[count:] == b"\xff" * (size - count)


def _parts(*parts: tuple[int, int, int]) -> list[np.ndarray]:
    return [np.array(column, np.int64) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", [Disk, type("OtherDisk", (Disk,), {})], ids=["by one call", "by a call for each"])
def test_parts_of_a_file_are_read_and_written(kind: type[Disk], path: str):
    """Parts that overlap are written in their order; empty ones are nothing."""
    disk = kind()
    file = disk.open_new(path, 100)
    data = memoryview(bytes(range(100)))
    disk.pwrite_parts(file, data, *_parts((10, 0, 4), (50, 4, 4), (12, 90, 93)))
    assert Path(path).read_bytes() == bytes(10) + bytes([0, 1, 90, 91, 92]) + bytes(85)
    buffer = bytearray(8)
    disk.pread_parts(file, memoryview(buffer), *_parts((12, 5, 8), (10, 0, 1), (9, 3, 5)))
    assert bytes(buffer) == bytes([0, 0, 0, 0, 0, 90, 91, 92])


@pytest.mark.parametrize("kind", [Disk, type("OtherDisk", (Disk,), {})], ids=["by one call", "by a call for each"])
def test_a_part_that_cannot_be_read_or_written_is_an_error(kind: type[Disk], path: str):
    """The parts before it were read or written; the error names the file."""
    disk = kind()
    file = disk.open_new(path, 10)
    disk.pwrite(file, b"0123456789", 0)
    buffer = memoryview(bytearray(8))
    with pytest.raises(CorruptionError, match="expected 4 bytes, found 2 bytes") as error:
        disk.pread_parts(file, buffer, *_parts((0, 0, 4), (8, 4, 8)))
    assert (error.value.path, error.value.physical_offset) == (path, 8)
    assert bytes(buffer[:4]) == b"0123"
    with pytest.raises(OSError, match=r"Bad file descriptor") as refused:
        disk.pwrite_parts(disk.open(path), buffer, *_parts((0, 4, 8)))
    assert refused.value.filename == path
    with pytest.raises(OSError, match=r"Invalid argument"):
        disk.pwrite_parts(file, buffer, *_parts((4, 0, 4), (-1, 4, 8)))
    assert Path(path).read_bytes() == b"0123012389"


class ShortDisk(Disk):
    """A disk that takes at most three bytes at a time."""

    def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
        return super()._pwrite(fd, view[:3], position)


def test_a_short_write_is_gone_on_with(path: str):
    """The kernel may write less than it was asked to."""
    disk = ShortDisk()
    file = disk.open_new(path, 0)
    disk.pwrite(file, b"0123456789", 5)
    assert Path(path).read_bytes() == bytes(5) + b"0123456789"


def test_a_write_of_nothing_is_an_error(path: str):
    """Not an endless loop."""

    class DeadDisk(Disk):
        def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
            return 0

    disk = DeadDisk()
    with pytest.raises(OSError, match="wrote 0 of 3 bytes at 7"):
        disk.pwrite(disk.open_new(path, 0), b"abc", 7)


def test_short_reads_are_gone_on_with(disk: Disk, file: File, monkeypatch: pytest.MonkeyPatch):
    """A signal may cut a read."""
    disk.pwrite(file, bytes(range(100)), 0)
    real_pread, real_preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, size, position: real_pread(fd, min(size, 3), position))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, position: real_preadv(fd, [buffers[0][:3]], position))
    assert disk.pread(file, 50, 10) == bytes(range(10, 60))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_are_written(disk: Disk, file: File, path: str, kind: Callable):
    """Copies are not needed."""
    disk.pwrite(file, kind(b"abc"), 1)
    assert disk.pread(file, 3, 1) == b"abc"


def test_arrays_are_bytes(disk: Disk, file: File):
    """A view of numbers is read and written as bytes, not as so many numbers."""
    numbers = np.arange(5, dtype=np.int64)
    disk.pwrite(file, memoryview(numbers), 8)
    found = np.zeros(5, np.int64)
    assert disk.pread_into(file, memoryview(found), 8) == 40
    assert found.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_in_a_write(file: File, path: str, number: int):
    """The error says what was needed, what is free and what to do."""

    class FullDisk(Disk):
        def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
            raise OSError(number, os.strerror(number))

    with pytest.raises(StoreFullError, match=r"no room for 3 bytes .* free\)\. Make room") as caught:
        FullDisk().pwrite(file, b"abc", 0)
    assert (caught.value.path, caught.value.needed, caught.value.errno) == (path, 3, number)
    assert caught.value.free > 0


def test_a_real_size_limit(disk: Disk, path: str):
    """The kernel's own error, not one that a test made up; what fitted is written."""
    file = disk.open_new(path, 0)
    with size_limit(5000), pytest.raises(StoreFullError):
        disk.pwrite(file, b"x" * 6000, 0)
    assert os.path.getsize(path) == 5000


@pytest.mark.parametrize("call", ["pwrite", "pread", "preadv", "fdatasync", "fsync"])
def test_an_io_error_names_the_file(
    disk: Disk, path: str, file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    """Which disk it was is in the message."""

    def broken(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, broken)
    calls: dict[str, Callable[[], object]] = {
        "pwrite": lambda: disk.pwrite(file, b"x", 0),
        "pread": lambda: disk.pread(file, 1, 0),
        "preadv": lambda: disk.pread_into(file, memoryview(bytearray(1)), 0),
        "fdatasync": lambda: disk.fdatasync(file),
        "fsync": lambda: disk.fsync_dir(tmp_path),
    }
    with pytest.raises(OSError, match="Input/output error") as caught:
        calls[call]()
    assert caught.value.filename == (str(tmp_path) if call == "fsync" else path)


def test_the_syncs_work(disk: Disk, file: File, tmp_path: Path):
    """On this file system, at least."""
    disk.pwrite(file, b"x", 0)
    disk.fdatasync(file)
    disk.fsync_dir(tmp_path)
    disk.syncfs(file)
    assert disk.pread(file, 1, 0) == b"x"


def test_read_exactly(disk: Disk, file: File, path: str):
    """All of it, or an error that says where the file ends."""
    assert read_exactly(disk, file, 10, 9990) == bytes(10)
    with pytest.raises(CorruptionError, match="expected 10 bytes, found 9 bytes, then the end of the file") as caught:
        read_exactly(disk, file, 10, 9991)
    assert (caught.value.path, caught.value.physical_offset) == (path, 9991)


# ---- holes


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 30_000), st.integers(0, 30_000))
@pytest.mark.parametrize("holes", [True, False], ids=["hole", "zeros"])
def test_a_punched_range_is_zero(tmp_path_factory: pytest.TempPathFactory, holes: bool, position: int, size: int):
    """To the byte, with and without holes, and the size stays: who has the file open is not cut off."""

    class NoHolesLibrary:
        def fallocate(self, *args: object) -> int:
            disk_module.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    disk = Disk()
    file = disk.open_new(tmp_path_factory.mktemp("file") / "file", 20_000)
    disk.pwrite(file, b"\xff" * 15_000, 0)
    with pytest.MonkeyPatch.context() as patch:
        if not holes:
            patch.setattr(disk_module, "_libc", NoHolesLibrary())
        disk.punch(file, position, size)
    model = bytearray(b"\xff" * 15_000 + bytes(5_000))
    end = min(position + size, 20_000)
    if end > position:
        model[position:end] = bytes(end - position)
    assert disk.pread(file, 30_000, 0) == bytes(model)
    assert os.fstat(file.fileno()).st_size == 20_000


def test_punching_gives_room_back(disk: Disk, path: str):
    """A long tail that is cut takes no blocks."""
    file = disk.open_new(path, 1 << 20)
    disk.pwrite(file, b"x" * (1 << 20), 0)
    disk.punch(file, 4096, (1 << 20) - 4096)
    assert os.stat(path).st_blocks * 512 <= 8192


def test_an_error_in_punching_names_the_file(disk: Disk, path: str, file: File):
    """A read-only descriptor, for one."""
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        disk.punch(disk.open(path), 0, 4096)
    assert caught.value.filename == path


def test_data_ranges_cover_what_was_written(disk: Disk, path: str):
    """A scan of a sparse gigabyte looks at its blocks only."""
    file = disk.open_new(path, 1 << 30)
    disk.pwrite(file, b"a", 5)
    disk.pwrite(file, b"b", 500_000_000)
    ranges = list(disk.data_ranges(file, 0, 1 << 30))
    assert sum(end - start for start, end in ranges) <= 1 << 20
    for position in (5, 500_000_000):
        assert any(start <= position < end for start, end in ranges)
    assert list(disk.data_ranges(file, 1 << 20, 1 << 21)) == []
    assert list(disk.data_ranges(file, 2, 7)) == [(2, 7)]
    assert list(disk.data_ranges(file, 7, 7)) == []


def test_reserved_room_is_there(disk: Disk, path: str):
    """A full disk shows now, not inside a segment; more than there is, is an error."""
    file = disk.open_new(path, 100_000)
    disk.fallocate(file, 100_000)
    assert os.stat(path).st_blocks * 512 >= 100_000
    assert os.stat(path).st_size == 100_000
    with size_limit(150_000), pytest.raises(StoreFullError):
        disk.fallocate(file, 200_000)


# ---- names


def test_folders(disk: Disk, tmp_path: Path):
    """Private; one that exists is left alone; a file in the way is an error."""
    disk.mkdir(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    (tmp_path / "a" / "x").write_bytes(b"")
    disk.mkdir(tmp_path / "a")
    assert disk.names(tmp_path / "a") == ["x"]
    with pytest.raises(NotAStoreError, match="found a file where a folder must be"):
        disk.mkdir(tmp_path / "a" / "x")
    assert disk.names(tmp_path / "missing") == []
    assert [disk.is_folder(tmp_path / name) for name in ("a", "a/x", "missing")] == [True, False, False]
    os.symlink(tmp_path / "a", tmp_path / "link")
    assert not disk.is_folder(tmp_path / "link")


def test_existence_and_size(disk: Disk, tmp_path: Path, file: File, path: str):
    """A dangling link is a name that is taken."""
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    assert [disk.exists(tmp_path / name) for name in ("file", "link", "missing")] == [True, True, False]
    assert disk.size(path) == 10_000
    with pytest.raises(FileNotFoundError):
        disk.size(tmp_path / "missing")
    assert disk.free(tmp_path) > 0


def test_when_a_file_was_written(disk: Disk, path: str, file: File, tmp_path: Path):
    """Seconds since 1970; what is gone was written now."""
    os.utime(path, (1, 1234.5))
    assert disk.modified_s(path) == 1234.5
    assert disk.modified_s(tmp_path / "missing") > 1_600_000_000


@pytest.mark.parametrize("what", ["unlink", "replace", "nothing", "rename away"])
def test_whether_a_file_is_still_at_its_path(disk: Disk, file: File, path: str, what: str):
    """A broker started by mistake deletes and makes anew, under our feet."""
    if what == "unlink":
        disk.unlink(path)
    elif what == "replace":
        replace_file(disk, path, b"new", via=path + ".new")
    elif what == "rename away":
        disk.rename(path, path + ".old")
    assert disk.at_path(file) == (what == "nothing")


def test_a_small_file_that_is_large_is_not_read(disk: Disk, path: str):
    """A sparse file of a gibibyte under a small file's name costs no memory."""
    disk.open_new(path, 1 << 30)
    with pytest.raises(CorruptionError, match="expected a file of at most 65536 bytes, found 1073741824 bytes"):
        disk.read(path)
    with pytest.raises(CorruptionError, match="at most 10 bytes"):
        disk.read(path, limit=10)


# ---- the pool


@pytest.fixture
def paths(disk: Disk, tmp_path: Path) -> list[str]:
    found = [str(tmp_path / f"f{number}") for number in range(5)]
    for path in found:
        disk.open_new(path, 10)
    return found


def test_the_least_recently_used_goes(disk: Disk, paths: list[str]):
    """At most as many as allowed are open; what is asked for often stays."""
    pool = FilePool(disk, 2)
    first, second = pool.get(paths[0]), pool.get(paths[1])
    assert pool.get(paths[0]) is first
    pool.get(paths[2])
    assert pool.get(paths[0]) is first
    assert pool.get(paths[1]) is not second


def test_a_forgotten_file_is_open_for_who_holds_it(disk: Disk, paths: list[str]):
    """A reader in another thread is not cut off; when it lets go the descriptor closes."""
    pool = FilePool(disk, 1)
    file = pool.get(paths[0])
    number = file.fileno()
    pool.get(paths[1])
    assert disk.pread(file, 1, 0) == b"\0"
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_readers_and_writers_have_files_of_their_own(disk: Disk, paths: list[str]):
    """A view asks for reading, and never gets what may be written."""
    pool = FilePool(disk, 5)
    assert pool.get(paths[0], writable=True).writable
    assert not pool.get(paths[0]).writable
    before = (pool.get(paths[0]), pool.get(paths[0], writable=True))
    pool.forget(paths[0])
    after = (pool.get(paths[0]), pool.get(paths[0], writable=True))
    assert before[0] is not after[0]
    assert before[1] is not after[1]
    pool.clear()
    assert pool.get(paths[0]) is not after[0]


def test_a_file_made_elsewhere_is_taken_in(disk: Disk, tmp_path: Path):
    """A new segment is not opened a second time."""
    pool = FilePool(disk, 5)
    file = disk.open_new(tmp_path / "new", 0)
    pool.put(file)
    assert pool.get(str(tmp_path / "new"), writable=True) is file


def test_a_file_that_is_unlinked_while_it_is_opened_is_not_kept(paths: list[str]):
    """Else the pool would hand out the dead file for ever, in place of the next one of that name."""

    class RacingDisk(Disk):
        def open(self, path: str | Path, *, writable: bool = False) -> File:
            file = super().open(path, writable=writable)
            if racing:
                racing.clear()
                self.unlink(path)  # another thread deletes the file, has it forgotten, and makes it anew
                pool.forget(str(path))
                self.pwrite(self.open_new(path, 10), b"new", 0)
            return file

    racing = [True]
    disk = RacingDisk()
    pool = FilePool(disk, 5)
    assert disk.pread(pool.get(paths[0]), 3, 0) == bytes(3)
    assert disk.pread(pool.get(paths[0]), 3, 0) == b"new"


def test_many_threads_and_few_descriptors(disk: Disk, paths: list[str]):
    """A pool of one between four threads: every read is of the file that was asked for."""
    for number, path in enumerate(paths):
        disk.pwrite(disk.open(path, writable=True), bytes([number]) * 10, 0)
    pool = FilePool(disk, 1)
    wrong: list[object] = []

    def read(seed: int) -> None:
        try:
            for turn in range(300):
                number = (turn * seed) % 5
                if disk.pread(pool.get(paths[number]), 10, 0) != bytes([number]) * 10:
                    wrong.append(number)
        except OSError as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def descriptors() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda count: resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("allowed", "limit"), [(1024, 256), (4096, 512), (256, 64)])
def test_the_pool_leaves_descriptors_for_others(descriptors: Callable[[int], None], allowed: int, limit: int):
    """A quarter of what `ulimit -n` says."""
    descriptors(allowed)
    assert pool_limit() == limit == FilePool(Disk()).limit


def test_a_new_file_has_its_name_when_it_is_complete(disk: Disk, tmp_path: Path) -> None:
    """A broker refuses a folder with a file of another size; a block that fails leaves nothing at all."""
    path, via = str(tmp_path / "new"), str(tmp_path / "via")
    with pytest.raises(KeyboardInterrupt), new_file(disk, path, 8, via=via):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with new_file(disk, path, 8, via=via) as file:
        disk.pwrite(file, b"x", 0)
        assert os.listdir(tmp_path) == ["via"]
    assert os.listdir(tmp_path) == ["new"]
    assert file.path == path
    assert disk.pread(file, 8, 0) == b"x" + bytes(7)


def test_replacing_is_whole_or_not_at_all(disk: Disk, path: str):
    """Written elsewhere, synced, renamed; a leftover of an earlier try is in nobody's way."""
    Path(path).write_bytes(b"old")
    Path(path + ".new").write_bytes(b"left by a killed process")
    replace_file(disk, path, b"new", via=path + ".new")
    assert disk.read(path) == b"new"
    assert not os.path.exists(path + ".new")

    class FullDisk(Disk):
        def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreFullError):
        replace_file(FullDisk(), path, b"newer", via=path + ".new")
    assert disk.read(path) == b"new"
    replace_file(disk, path, b"newest", via=path + ".new")
    assert disk.read(path) == b"newest"
    assert disk.read_head(path, 3) == b"new"
    assert disk.read_head(path, 100) == b"newest"


def test_a_replacement_is_synced_in_order(path: str):
    """Bytes, then the name, then the folder: else a power cut leaves an empty file."""
    calls: list[str] = []

    class LoggingDisk(Disk):
        def fdatasync(self, file: File) -> None:
            calls.append("fdatasync")
            super().fdatasync(file)

        def rename(self, source: str | Path, target: str | Path) -> None:
            calls.append("rename")
            super().rename(source, target)

        def fsync_dir(self, path: str | Path) -> None:
            calls.append(f"fsync_dir {path}")
            super().fsync_dir(path)

    replace_file(LoggingDisk(), path, b"x", via=path + ".new")
    assert calls == ["fdatasync", "rename", f"fsync_dir {os.path.dirname(path)}"]


def test_a_file_system_without_an_inode_is_named_as_such(tmp_path: Path) -> None:
    """The error said that there is no room for 1 bytes."""

    class WithoutInode(Disk):
        def free_names(self, path: str | Path) -> int | None:
            return 0

    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for needed in (1, 4096):
        full = WithoutInode()._translated(error, str(tmp_path / "file"), needed)
        assert "no room for another file (No space left on device, " in str(full)
        assert "and 0 inodes free). Make room" in str(full)
