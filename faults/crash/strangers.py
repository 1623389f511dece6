"""Stores that other users prepared: links that lead out of a store, owners, modes.

These are named cases of the mode `fuzz`. A case fails with an `AssertionError`; an error of the store's own kind is an
answer.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

from crash.harness import SMALL, batch_columns, commit_staged, die
from crash.simdisk import KillDisk, Operation
from messagestore import BatchRequest, Message, MessageStore, StoreError, StorePoisonedError
from messagestore.batches.append import append_batch
from messagestore.batches.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.files import unsynced as written
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.staging_files import Write, process_token, sweep, sweep_write
from messagestore.format.record_columns import encode
from messagestore.log import dispatch
from messagestore.log.store_files import Paths, StoreFiles

NOBODY = 65534
_ANSWERS: tuple[type[BaseException], ...] = (StoreError, OSError)
_FIRST_LEVEL = ("commitlog", "consumequeue", "index", "config")
Tree = dict[str, tuple[int, int, int, bytes]]


def a_store(root: Path, *, killed: bool) -> None:
    """Create some of everything: rolled segments, queue and index files, batches, torn bytes, leftovers, groups."""
    root.mkdir(exist_ok=True)
    store = MessageStore.open(root, SMALL)
    work(store)
    if killed:
        store.put_message(Message("single", b"the last one", queue_id=0))
        end = store.writer.end.physical_offset
        die(root)
        segment = max((root / "commitlog").iterdir())
        with segment.open("r+b") as file:  # torn bytes: recovery saves and zeroes them
            file.seek(end - int(segment.name))
            file.write(b"torn" * 10)
    else:
        store.close()
    publish_offsets(str(root), "group", {("single", 0): 3})
    for name in ("new-0123", "staging/old.staged", "cut/00000000000000000000-1.bin"):
        path = root / "spark" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left behind")
        os.utime(path, (1, 1))


def work(store: MessageStore) -> None:
    """Write enough to create new segments, queue files and index files."""
    for number in range(40):
        store.put_message(Message("single", b"x" * 500, queue_id=0, keys=[f"k{number}"]))
    store.append_batch(batch_columns("app-1", 0, 60))
    store.create_topic(f"made-{store.writer.end.physical_offset}")


def stage_and_commit(root: Path, store: MessageStore, number: int) -> None:
    """Stage and commit as Spark does, with the store's own staging folder."""
    commit_staged(store, f"app-{number}", 0, 30, "SYNC_FLUSH", str(root / "spark" / "staging"))


def everything(root: Path, number: int) -> None:
    """Run all that writers, commits, sweeps and streams do to a store.

    Each continues where the previous one was refused.
    """
    with contextlib.suppress(*_ANSWERS):
        publish_offsets(str(root), "group", {("single", 0): 1 + number})
    with contextlib.suppress(*_ANSWERS):
        sweep(str(root / "spark" / "staging"), 0.0)
    try:
        with MessageStore.open(root, SMALL) as store:
            for step in (work, lambda store: stage_and_commit(root, store, number)):
                with contextlib.suppress(*_ANSWERS):
                    step(store)
    except _ANSWERS:
        pass
    finally:
        die(root)


def tree_of(path: Path) -> Tree:
    """Return modes, owners, sizes and contents of a file, or of a folder and everything in it."""
    found: Tree = {}
    for one in [path, *path.rglob("*")]:
        info = one.lstat()
        data = one.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        found[str(one)] = (info.st_mode, info.st_uid, info.st_size, data)
    return found


def names_in(root: Path) -> Iterator[str]:
    """Yield every name below a root, except the second of two files of one kind."""
    seen = set()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        kind = (
            name if not path.name.isdigit() else f"{path.parent}/*{path.is_dir()}{path == max(path.parent.iterdir())}"
        )
        if kind not in seen:
            seen.add(kind)
            yield name


def _links_to_a_victim(folder: Path) -> None:
    """Link each file and folder of a store to a victim's: nothing of the victim's is created, changed or removed."""
    for killed in (False, True):
        sample = folder / f"sample-{killed}"
        a_store(sample, killed=killed)
        for number, name in enumerate(names_in(sample)):
            root, victim = folder / f"store-{killed}-{number}", folder / f"victim-{killed}-{number}"
            shutil.copytree(sample, root, symlinks=True)
            shutil.move(root / name, victim)
            if os.geteuid() == 0:
                for path in [victim, *victim.rglob("*")]:
                    os.chown(path, NOBODY, NOBODY)
            elif name in _FIRST_LEVEL:
                continue  # a link of the same owner is allowed
            (root / name).symlink_to(victim)
            before = tree_of(victim)
            everything(root, number)
            changed = {path for path in {**before, **tree_of(victim)} if tree_of(victim).get(path) != before.get(path)}
            assert not changed, f"{name} is a link, and behind it was changed: {sorted(changed)[:3]}"
            shutil.rmtree(root)


def _folders_elsewhere(folder: Path) -> None:
    """Make RocketMQ's folders the owner's links to the owner's folders: the store works as if they were here."""
    for name in _FIRST_LEVEL:
        root, target = folder / f"linked-{name}", folder / f"elsewhere-{name}"
        a_store(root, killed=True)
        shutil.move(root / name, target)
        (root / name).symlink_to(target)
        with MessageStore.open(root, SMALL) as store:
            work(store)
            store.put_message(Message("new", b"x", queue_id=0))
        with MessageStore.open_read_only(root, SMALL) as reader:
            assert reader.max_offset("new", 0) == 1
        assert (root / name).is_symlink()


def _root_works_for_the_owner(folder: Path) -> None:
    """What uid 0 creates belongs to the owner and group of the root folder, with that folder's modes for the group."""
    if os.geteuid() != 0:
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    folder.chmod(0o755)
    try:
        _each_root_folder(folder)
    finally:
        shutil.rmtree(folder)


def _each_root_folder(folder: Path) -> None:
    for number, mode in enumerate((0o700, 0o750, 0o755, 0o2770)):
        root = folder / f"owned-{number}"
        root.mkdir()
        os.chown(root, NOBODY, NOBODY)
        root.chmod(mode)
        MessageStore.open(root, SMALL).close()
        everything(root, 0)
        MessageStore.open(root, SMALL).put_message(Message("single", b"x"))
        die(root)
        everything(root, 1)
        for path in root.rglob("*"):
            info = path.lstat()
            bits = mode & 0o060
            if path.name == "lock" or path.suffix == ".lock":  # whoever may not write may not hold it either
                bits = bits if bits & 0o020 else 0
            allowed = 0o700 | bits | (0o010 if bits else 0) if path.is_dir() else 0o600 | bits
            found = (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode) & 0o777)
            assert found == (NOBODY, NOBODY, allowed), f"{path}: {found[0]}:{found[1]} {found[2]:o}"
        assert _as_nobody(lambda root=root: everything_works(root)), f"{root}: the owner is locked out"


def everything_works(root: Path) -> None:
    """Run a session and a reader without a refusal."""
    with MessageStore.open(root, SMALL) as store:
        work(store)
        stage_and_commit(root, store, 9)
    with MessageStore.open_read_only(root, SMALL) as reader:
        assert reader.max_offset("single", 0) >= 40


def _as_nobody(call: Callable[[], None]) -> bool:
    """Whether a call succeeds in a process of another user."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _orphans_in_staging(folder: Path) -> None:
    """Drivers die, drivers live, and attempts fail: dead drivers leave nothing, and live ones can commit."""
    chance, root = random.Random(7), folder / "store"
    with MessageStore.open(root, SMALL) as store:
        staging = str(root / "spark" / "staging")
        for batch in range(12):
            driver = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
            write = Write(process_token(driver.pid), "query", batch)
            lost, good = (_stage(store, staging, write, batch) for _ in range(2))
            other = StagingWriter(staging, write=replace(write, key="another query"))  # still at work
            if chance.random() < 0.5:
                driver.communicate()
                sweep(staging, 86_400.0)
                other._file.close()
                assert os.listdir(staging) == [], "files of a dead driver are left"
                continue
            sweep(staging, 86_400.0)
            request = BatchRequest(app_id="app", version=batch, version_source="user")
            with store._attached.writing("a commit") as writer:
                append_batch(writer, StagedChunks(staging, [good]), request)
            sweep_write(staging, [good.name])
            assert not os.path.exists(os.path.join(staging, lost.name)), "a failed attempt is left after its commit"
            assert other.finish().name, "a file of a live driver was deleted"
            driver.communicate()
            sweep(staging, 86_400.0)


def _stage(store: MessageStore, staging: str, write: Write, batch: int) -> StagedFile:
    files = store.writer.files
    hosts = {"store_host": files.store_host, "born_host": files.store_host}
    with StagingWriter(staging, write=write) as writing:
        writing.write(encode(batch_columns("app", batch, 10), limits=files.config, **hosts))
        return writing.finish()


def _torn_bytes_of_years(folder: Path) -> None:
    """Recoveries saved large and old torn bytes: the newest file stays, and so do young and small ones."""
    day_ms, now_ms = 86_400_000, time.time_ns() // 1_000_000
    for ages, sizes, kept in (
        ((0, 1, 29, 31, 400), (10,) * 5, 3),
        ((300, 400, 500), (10,) * 3, 1),
        ((0, 1, 2), (1 << 30, 1, 1), 1),
        ((0, 1, 2), (1, 1 << 30, 1), 1),
        ((0, 1, 2), (1 << 29, (1 << 29) - 9, 10), 2),
        ((0,), (1 << 33,), 1),
    ):
        root = folder / f"store-{len(list(folder.iterdir()))}"
        a_store(root, killed=True)
        shutil.rmtree(root / "spark" / "cut")
        (root / "spark" / "cut").mkdir()

        paths = [root / "spark" / "cut" / f"{7:020d}-{now_ms - age * day_ms}.bin" for age in ages]
        for path, size in zip(paths, sizes, strict=True):
            path.touch()
            os.truncate(path, size)
        (root / "spark" / "cut" / "notes.txt").write_text("mine")

        StoreFiles(Paths(root), SMALL, None, Disk()).sweep_cut()
        left = sorted(paths[:kept])
        assert sorted((root / "spark" / "cut").glob("*.bin")) == left, f"{ages}, {sizes}"
        assert (root / "spark" / "cut" / "notes.txt").exists()


def files_that_were_just_replaced(folder: Path) -> None:
    """Between two puts, a file is deleted or another one renamed to its path, while paths are looked at by time only.

    No put is acknowledged into a segment or a `state` that is gone; queues and index are made again.
    """
    for part in ("commitlog", "spark/state", "consumequeue", "index"):
        for how in ("deleted", "replaced"):
            root = folder / f"{part.replace('/', '-')}-{how}"
            with (
                mock.patch.object(written, "PATH_CHECK_S", 3600.0),
                mock.patch.object(dispatch, "PATH_CHECK_S", 3600.0),
            ):
                bodies = _puts_around_a_change(root, part, how)
            with MessageStore.open_read_only(root) as reader:
                found = [message.body for message in reader.get_message("t", 0, 0).messages]
                by_key = [message.body for message in reader.query_message("t", "key")]
            assert found[: len(bodies)] == bodies, f"{part} {how}: {found}, acknowledged {bodies}"
            assert sorted(by_key) == sorted(found), f"{part} {how}: {by_key} by key, {found} in the queue"


def _puts_around_a_change(root: Path, part: str, how: str) -> list[bytes]:
    """The bodies of the puts that were acknowledged and must still be there."""
    store = MessageStore.open(root, SMALL)
    try:
        assert store.put_message(Message("t", b"first", queue_id=0, keys=["key"])).is_ok
        _change(root / part, how)
        if part in ("commitlog", "spark/state"):
            with contextlib.suppress(StorePoisonedError):
                status = store.put_message(Message("t", b"second", queue_id=0, keys=["key"])).status
                raise AssertionError(f"{part} {how}: a put was acknowledged ({status})")
            return [b"first"]
        assert store.put_message(Message("t", b"second", queue_id=0, keys=["key"])).is_ok
        return [b"first", b"second"]
    finally:
        with contextlib.suppress(StoreError):
            store.close()


def _change(path: Path, how: str) -> None:
    for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
        copy = file.with_suffix(".copy")
        shutil.copyfile(file, copy)
        if how == "deleted":
            file.unlink()
        copy.rename(file)


def _folder_moved_under_a_session(folder: Path) -> None:
    """Rename a store's folder at each operation of a session, with a link to another store or that store in its place.

    The other store keeps every byte, and the one that was renamed has all that was acknowledged.
    """
    for name in ("store", "other"):
        with MessageStore.open(folder / "begin" / name, SMALL) as store:
            store.put_message(Message("single", b"0", queue_id=0, keys=["k"]))
    number = operations = 0
    while number <= operations:
        place = folder / str(number)
        shutil.copytree(folder / "begin", place)
        operations = _moved_at(number, place)
        shutil.rmtree(place)
        number += 1


def _moved_at(number: int, place: Path) -> int:
    """Rename the folder of a session at one of its operations; return how many there were."""
    root, moved, other, disk = place / "store", place / "moved", place / "other", KillDisk()
    there = other if number % 2 else root

    def contents(path: Path) -> Tree:
        return {name.removeprefix(str(path)): found for name, found in tree_of(path).items()}

    def move(_: Operation) -> None:
        if len(disk.operations) == number and not moved.exists():
            root.rename(moved)
            if number % 2:
                root.symlink_to(other)
            else:
                other.rename(root)

    disk.before, before = move, contents(other)
    acknowledged: list[bytes] = []
    with contextlib.suppress(*_ANSWERS), MessageStore.open(root, SMALL, disk=disk) as store:
        for count in range(1, 8):
            body = b"%d" % count * 700
            store.put_message(Message("single" if count % 2 else "new", body, queue_id=0, keys=["k"]))
            acknowledged.append(body)
        assert store.append_batch(batch_columns("app-1", 0, 10), BatchRequest("app-1", 0)).status == "appended"
        acknowledged.append(b"")
    die(root)
    if moved.exists():
        assert contents(there) == before, f"operation {number} changed the other store"
    with MessageStore.open(moved if moved.exists() else root, SMALL) as store:
        got = store.get_message("single", 0, 0).messages + store.get_message("new", 0, 0).messages
        missing = {body for body in acknowledged if body} - {message.body for message in got}
        assert not missing, f"operation {number}: {len(missing)} acknowledged puts are not in the renamed store"
        assert b"" not in acknowledged or store.last_batch("app-1") is not None, f"operation {number}: no batch"
    return len(disk.operations)


CASES: dict[str, Callable[[Path], None]] = {
    "files that were just replaced": files_that_were_just_replaced,
    "links to a victim": _links_to_a_victim,
    "folders elsewhere": _folders_elsewhere,
    "root works for the owner": _root_works_for_the_owner,
    "a folder moved under a session": _folder_moved_under_a_session,
    "orphans in staging": _orphans_in_staging,
    "torn bytes of years": _torn_bytes_of_years,
}
