"""What other users prepare, and whose files come of it: links that lead out of a store, owners, modes.

Named cases of the mode `fuzz`. A case fails with an `AssertionError`; an error of the store's own kind is an answer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from crash.harness import SMALL, batch_columns, commit_staged, die
from messagestore import Message, MessageStore, StoreError
from messagestore.consumer_offsets import publish_offsets
from messagestore.staging import sweep

NOBODY = 65534
_ANSWERS: tuple[type[BaseException], ...] = (StoreError, OSError)
_FIRST_LEVEL = ("commitlog", "consumequeue", "index", "config")
Tree = dict[str, tuple[int, int, int, bytes]]


def a_store(root: Path, *, killed: bool) -> None:
    """Some of everything: rolled segments, queue files and index files, batches, torn bytes, leftovers, groups."""
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
    """Enough to make new segments, queue files and index files."""
    for number in range(40):
        store.put_message(Message("single", b"x" * 500, queue_id=0, keys=[f"k{number}"]))
    store.append_batch(batch_columns("app-1", 0, 60))
    store.create_topic(f"made-{store.writer.end.physical_offset}")


def stage_and_commit(root: Path, store: MessageStore, number: int) -> None:
    """As Spark does, with the store's own staging folder."""
    commit_staged(store, f"app-{number}", 0, 30, "SYNC_FLUSH", str(root / "spark" / "staging"))


def everything(root: Path, number: int) -> None:
    """All that writers, commits, sweeps and streams do to a store; each goes on where the one before was refused."""
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
    """Modes, owners, sizes and contents of a file, or of a folder and all that is in it."""
    found: Tree = {}
    for one in [path, *path.rglob("*")]:
        info = one.lstat()
        data = one.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        found[str(one)] = (info.st_mode, info.st_uid, info.st_size, data)
    return found


def names_in(root: Path) -> Iterator[str]:
    """Every name below a root, the second of two files of one kind left out."""
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
    """Each file and folder of a store is a link to somebody else's: nothing of theirs is made, changed or removed."""
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
                continue  # of the same owner: such a link is allowed
            (root / name).symlink_to(victim)
            before = tree_of(victim)
            everything(root, number)
            changed = {path for path in {**before, **tree_of(victim)} if tree_of(victim).get(path) != before.get(path)}
            assert not changed, f"{name} is a link, and behind it was changed: {sorted(changed)[:3]}"
            shutil.rmtree(root)


def _folders_elsewhere(folder: Path) -> None:
    """RocketMQ's folders may be links of the owner to folders of the owner: the store works as if they were here."""
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
    """What uid 0 makes belongs to the owner and group of the root folder, with modes as that folder's group has them."""
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
            allowed = 0o700 | bits | (0o010 if bits else 0) if path.is_dir() else 0o600 | bits
            found = (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode) & 0o777)
            assert found == (NOBODY, NOBODY, allowed), f"{path}: {found[0]}:{found[1]} {found[2]:o}"
        assert _as_nobody(lambda root=root: everything_works(root)), f"{root}: the owner is locked out"


def everything_works(root: Path) -> None:
    """A session and a reader, without a refusal."""
    with MessageStore.open(root, SMALL) as store:
        work(store)
        stage_and_commit(root, store, 9)
    with MessageStore.open_read_only(root, SMALL) as reader:
        assert reader.max_offset("single", 0) >= 40


def _as_nobody(call: Callable[[], None]) -> bool:
    """Whether a call goes well in a process of another user."""
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


CASES: dict[str, Callable[[Path], None]] = {
    "links to a victim": _links_to_a_victim,
    "folders elsewhere": _folders_elsewhere,
    "root works for the owner": _root_works_for_the_owner,
}
