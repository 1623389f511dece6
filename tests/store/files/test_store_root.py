"""What may be passed through below a root, who owns what is made there, and what a refusal says."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash import strangers
from messagestore import ConfigError, Message, MessageStore, NotAStoreError, StoreConfig, StorePermissionError
from messagestore import session as attached_stores
from messagestore.files.disk import Disk
from messagestore.files.store_root import Place, known_root, root_of
from messagestore.log.store_files import Paths
from small import SMALL, filled

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="NOT DONE HERE: files of another user need root")
NOBODY = strangers.NOBODY


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", list(strangers.CASES))
def test_nothing_outside_of_the_store_is_touched_and_nobody_is_locked_out(name: str, tmp_path: Path) -> None:
    """The named cases of `make crash`."""
    strangers.CASES[name](tmp_path)


def test_a_root_is_found_by_its_longest_name() -> None:
    """Of a path, and of nothing beside it."""
    known_root("/some/store")
    assert root_of("/some/store/spark/state") == "/some/store"
    assert root_of("/some/store/a/b/c/d") == "/some/store"
    assert root_of("/some/store") is None
    assert root_of("/some/store2/spark/state") is None
    assert root_of("relative/spark/state") is None


@pytest.mark.parametrize("name", ["spark", "spark/staging", "consumequeue/t", "consumequeue/t/0"])
@pytest.mark.parametrize("operation", ["open_new", "open", "rename to", "rename from", "unlink", "mkdir"])
def test_a_linked_folder_is_not_followed(tmp_path: Path, name: str, operation: str) -> None:
    """Whatever the operation, the error names the link, and the victim is as it was."""
    root, victim, disk = tmp_path / "store", tmp_path / "victim", Disk()
    root.mkdir()
    victim.mkdir()
    (victim / "letter").write_bytes(b"precious")
    (root / "own").write_bytes(b"own")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(victim)
    Paths(root)
    inside = f"{root}/{name}/letter"
    calls = {
        "open_new": lambda: disk.open_new(f"{root}/{name}/new", 10),
        "open": lambda: disk.open(inside, writable=True),
        "rename to": lambda: disk.rename(f"{root}/own", inside),
        "rename from": lambda: disk.rename(inside, f"{root}/stolen"),
        "unlink": lambda: disk.unlink(inside),
        "mkdir": lambda: disk.mkdir(f"{root}/{name}/folder"),
    }
    with pytest.raises(NotAStoreError, match=f"{root}/{name}: found a symbolic link where a folder must be"):
        calls[operation]()
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == {"letter": b"precious"}
    assert (root / "own").exists()


def test_files_in_spark_are_not_read_through_a_link(tmp_path: Path) -> None:
    """Nor is the store that a linked `spark` would make of it opened."""
    root = filled(tmp_path / "store")
    shutil.move(root / "spark", tmp_path / "elsewhere")
    (root / "spark").symlink_to(tmp_path / "elsewhere")
    for call in (lambda: MessageStore.open(root, SMALL), lambda: MessageStore.open_read_only(root, SMALL)):
        with pytest.raises(NotAStoreError, match="spark: found a symbolic link"):
            call()


def test_a_link_that_appears_during_a_walk_is_not_followed(tmp_path: Path) -> None:
    """The folder that was checked is the one that is used, also when its name leads elsewhere a moment later."""
    root, victim = tmp_path / "store", tmp_path / "victim"
    (root / "spark").mkdir(parents=True)
    victim.mkdir()
    (root / "spark" / "new-1").write_bytes(b"ours")
    (victim / "new-1").write_bytes(b"theirs")
    Paths(root)
    with Place(f"{root}/spark/new-1") as place:
        (root / "spark").rename(root / "moved")
        (root / "spark").symlink_to(victim)
        os.unlink(place.name, dir_fd=place.folder)
    assert (victim / "new-1").exists()
    assert not (root / "moved" / "new-1").exists()


def test_a_put_to_a_queue_behind_a_link_is_refused_before_it_is_in_the_log(tmp_path: Path) -> None:
    """The store goes on with other queues."""
    root = filled(tmp_path / "store")
    (root / "consumequeue" / "linked").symlink_to(tmp_path)
    with MessageStore.open(root, SMALL) as store:
        end = store.writer.end
        with pytest.raises(NotAStoreError, match="linked: found a symbolic link"):
            store.put_message(Message("linked", b"x", queue_id=0))
        assert store.writer.end == end
        store.put_message(Message("t", b"x", queue_id=0))


@AS_ROOT
@pytest.mark.parametrize(
    ("link", "folder", "allowed"),
    [(0, 0, False), (NOBODY, NOBODY, True), (0, NOBODY, True), (12345, NOBODY, False), (NOBODY, 12345, False)],
)
def test_a_link_of_the_first_level_must_be_the_owners(tmp_path: Path, link: int, folder: int, allowed: bool) -> None:
    """Made by the root folder's owner or by root, to a folder of the same owner; others are named."""
    root, target, disk = tmp_path / "store", tmp_path / "log", Disk()
    for path in (root, target):
        path.mkdir()
    os.chown(root, NOBODY, NOBODY)
    os.chown(target, folder, folder)
    (root / "commitlog").symlink_to(target)
    os.chown(root / "commitlog", link, link, follow_symlinks=False)
    Paths(root)
    assert disk.is_folder(root / "commitlog") == allowed
    if allowed:
        disk.open_new(root / "commitlog" / "0", 1)
        assert (target / "0").stat().st_uid == NOBODY
    else:
        with pytest.raises(NotAStoreError, match=f"uid {NOBODY}.*, who owns {root}, to a folder of the same user"):
            disk.open_new(root / "commitlog" / "0", 1)
        assert not (target / "0").exists()


def test_a_folder_on_another_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to another disk: new files cannot be renamed there."""

    def across(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", across)
    with pytest.raises(
        OSError, match=r"is on another file system than the store's folder spark.*commitlog/0"
    ) as caught:
        Disk().rename(tmp_path / "new", tmp_path / "commitlog/0")
    assert caught.value.errno == errno.EXDEV


@AS_ROOT
def test_a_file_that_root_left_is_named_with_its_owner_and_the_remedy(shared: Path) -> None:
    """A store as releases before this one left it after `sudo messagestore recover`."""
    root = filled(shared / "store")
    for path in [root, *root.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    (root / "spark" / "store.json").chmod(0o600)
    os.chown(root / "spark" / "store.json", 0, 0)

    def work() -> None:
        with pytest.raises(StorePermissionError) as caught:
            MessageStore.open(root, SMALL)
        said = str(caught.value)
        assert said.startswith(f"{root}/spark/store.json: Permission denied: ")
        assert "belongs to root (uid 0), group root (gid 0), mode 0600, and this process runs as" in said
        assert said.endswith(f"Run: sudo chown -R {NOBODY}:{NOBODY} {root}")
        assert caught.value.errno == errno.EACCES

    assert strangers._as_nobody(work)


@AS_ROOT
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_reader_is_not_told_to_read(shared: Path, mode: int) -> None:
    """A reader that may not read was told to open the store read-only. A writer that may read is told so."""
    root = filled(shared / "store")
    for path in [root, *root.rglob("*")]:
        path.chmod(mode | 0o111 if path.is_dir() else mode)

    def work() -> None:
        how = MessageStore.open_read_only if mode == 0o600 else MessageStore.open
        with pytest.raises(StorePermissionError) as caught:
            how(root, SMALL)
        said = str(caught.value)
        assert f"make the store {'readable' if mode == 0o600 else 'writable'} for a group" in said
        assert ("or open it read-only" in said) == (mode == 0o644)

    assert strangers._as_nobody(work)


@pytest.mark.parametrize(
    ("mode", "file", "folder"),
    [("0600", 0o600, 0o700), ("0640", 0o640, 0o750), ("644", 0o644, 0o755), ("0660", 0o660, 0o770)],
)
def test_file_mode_is_followed(tmp_path: Path, mode: str, file: int, folder: int) -> None:
    """Whatever the umask: files and folders of all kinds."""
    before = os.umask(0o077)
    try:
        root = filled(tmp_path / "store", 40, SMALL.replace(file_mode=mode))
    finally:
        os.umask(before)
    locks = {root / "lock", root / "spark" / "writer.lock"}
    found = {stat.S_IMODE(path.stat().st_mode) for path in {*root.rglob("*")} - locks if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()}
    assert (found, folders) == ({file}, {folder})
    writers = file & 0o222
    assert {stat.S_IMODE(path.stat().st_mode) for path in locks} == {writers | writers << 1}, "who reads may lock"


@pytest.mark.parametrize("mode", ["0400", "0777", "0602", "rw-r--r--", "0o640", "6400", "-0600"])
def test_a_file_mode_that_would_not_do(mode: str) -> None:
    """The owner reads and writes; nothing is executed."""
    with pytest.raises(ConfigError, match=r"fileMode: found .*; allowed is 0600, 0640"):
        StoreConfig(file_mode=mode)


def test_a_backup_of_hard_links_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It changes with the store, and so is none."""
    root = tmp_path / "store"
    filled(root)
    attached_stores.attached_store(root).detach()
    attached_stores._looked_for_links.clear()
    (segment,) = (root / "commitlog").iterdir()
    os.link(segment, tmp_path / "backup")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            filled(root)
            attached_stores.attached_store(root).detach()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{segment}: this file has a second name (a hard link)")


def test_a_root_that_everybody_may_write_to_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            filled(root)
            attached_stores.attached_store(root).detach()
    assert [record.getMessage() for record in caplog.records] == [
        (
            f"{root}: every user may write in this folder, and could replace the store's files or put links there. Take "
            "this permission away (chmod o-w)"
        )
    ]
