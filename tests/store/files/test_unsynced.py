"""What was written, whether it is synced, and whether it is still the file at its path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from messagestore.errors import SyncFailedError
from messagestore.files.disk import Disk, File, FilePool
from messagestore.files.unsynced import FileReplaced, WrittenFiles


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


@pytest.mark.parametrize("how", ["deleted", "replaced", "deleted and made again"])
def test_a_file_that_is_gone_is_noticed_though_its_path_was_just_looked_at(disk: Disk, path: str, how: str) -> None:
    """Between two looks at the path, the open file is asked whether it still has a name."""
    written = WrittenFiles(disk, hold=True, pool=FilePool(disk))
    disk.at_path = lambda file: pytest.fail("the path was looked at") if asked else True  # type: ignore[method-assign]
    asked = False
    written.writable(path)
    asked = True
    written.check(often=True)
    if how == "replaced":
        put_another_there(path)
    else:
        os.unlink(path)
        if how != "deleted":
            Path(path).write_bytes(b"ours")
    for look in (written.writable, lambda path: written.check([path], often=True)):
        with pytest.raises(FileReplaced):
            look(path)


def test_a_file_that_was_moved_is_noticed_in_time(disk: Disk, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved file still has a name: its path tells, as soon as it is looked at again."""
    written = WrittenFiles(disk, hold=True, pool=FilePool(disk))
    written.writable(path)
    os.rename(path, path + ".moved")
    written.check(often=True)
    with pytest.raises(FileReplaced):
        written.check()
    monkeypatch.setattr("messagestore.files.unsynced.PATH_CHECK_S", 0.0)
    with pytest.raises(FileReplaced):
        written.check(often=True)


@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("how", ["deleted", "replaced", "a link"])
def test_a_file_that_was_closed_in_between_is_compared_without_being_opened(
    disk: Disk, path: str, how: str, often: bool
) -> None:
    """Where more files are written than may be open, looking at their paths is enough."""
    written = WrittenFiles(disk, FilePool(disk, 1))
    written.writable(path)
    Path(path + ".other").write_bytes(b"ours")
    written.writable(path + ".other")
    kept = disk.open(path)  # so that no other file gets its inode number
    disk.open = lambda *_, **__: pytest.fail("opened")  # type: ignore[method-assign, assignment]
    written.check(often=often)
    if how == "replaced":
        put_another_there(path)
    else:
        os.unlink(path)
    if how == "a link":
        os.symlink(path + ".other", path)
    with pytest.raises(FileReplaced) as caught:
        written.check(often=often)
    assert caught.value.path == path
    kept.close()


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
