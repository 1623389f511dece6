"""What was written, whether it is synced, and whether it is still the file at its path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from messagestore.errors import StoreFullError, SyncFailedError
from messagestore.files.mapped_file import Disk, File, FilePool
from messagestore.files.written import FileReplaced, WrittenFiles, new_file, replace_file


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(b"ours")
    return str(tmp_path / "file")


def put_another_there(path: str) -> None:
    Path(path + ".x").write_bytes(b"theirs")
    os.rename(path + ".x", path)


def test_a_file_that_was_replaced_is_never_written_where_nothing_makes_it_again(disk: Disk, path: str) -> None:
    """`spark/state` of a backup that was restored under its writer: not at the first write, and not at the second."""
    written = WrittenFiles(disk)
    disk.pwrite(written.writable(path), b"OURS", 0)
    put_another_there(path)
    for _ in range(2):
        with pytest.raises(FileReplaced) as caught:
            written.writable(path)
    assert caught.value.path == path
    assert Path(path).read_bytes() == b"theirs"


def test_a_file_that_is_made_again_can_be_written_again(disk: Disk, path: str) -> None:
    """A queue's: the error comes once, then the caller has loaded the queue and builds it anew."""
    written = WrittenFiles(disk, FilePool(disk))
    written.writable(path)
    put_another_there(path)
    with pytest.raises(FileReplaced):
        written.check()
    written.check()
    disk.pwrite(written.writable(path), b"THEIRS", 0)
    assert Path(path).read_bytes() == b"THEIRS"


def test_a_file_is_held_although_the_pool_is_full(disk: Disk, tmp_path: Path) -> None:
    """The descriptor that wrote is the one to which a failed write-back is reported."""
    pool = FilePool(disk, 1)
    written = WrittenFiles(disk, pool, hold=True)
    paths = [str(tmp_path / name) for name in "ab"]
    for name in paths:
        Path(name).touch()
    first = written.writable(paths[0])
    written.writable(paths[1])
    assert pool.get(paths[0], writable=True) is not first
    assert written.opened(paths[0]) is first


def test_what_is_synced_is_not_synced_again(disk: Disk, path: str) -> None:
    """Files first, then folders from below; after an error the file stays noted."""
    calls: list[str] = []

    class LoggingDisk(Disk):
        failing = False

        def fdatasync(self, file: File) -> None:
            if self.failing:
                raise OSError(errno.EIO, "Input/output error", file.path)
            calls.append(file.path)

        def fsync_dir(self, path: str | Path) -> None:
            calls.append(str(path))

    logging = LoggingDisk()
    written = WrittenFiles(logging, FilePool(logging))
    written.writable(path)
    folder = os.path.dirname(path)
    written.note_folders(f"{folder}/missing/too")
    written.sync()
    assert calls == [path, f"{folder}/missing/too", f"{folder}/missing", folder]
    written.sync()
    assert len(calls) == 4
    written.writable(path)
    logging.failing = True
    with pytest.raises(SyncFailedError, match="Input/output error"):
        written.sync()
    assert list(written.files) == [path]


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
        def _pwrite(self, fd: int, view: memoryview, position: int) -> int:
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
