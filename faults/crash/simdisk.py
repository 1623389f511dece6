"""Disks that kill, fail and record, to test what is left on them after a kill or a power cut.

These are three disks for tests, each the real disk with an addition. They know only `Disk`, and nothing of the store.

`KillDisk`
    The process dies at operation n: `Killed` is raised instead of it, and for every later operation, including reads.
`FailDisk`
    Operation n fails once with an error. (It can kill as well.)
`RecordingDisk`
    Records every operation, so that the folder can be built as a power cut at any time may have left it. (It can fail
    and kill as well; after `revive`, the next process continues with the same page cache.)

`crash.power_cut` describes and computes what a power cut may leave.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from crash.power_cut import (
    MODES,
    Atom,
    Create,
    Event,
    FileContent,
    Image,
    Name,
    Punch,
    Replay,
    Sync,
    SyncFolder,
    Write,
    choices,
    with_names_in_order,
)
from messagestore.files.disk import Disk, File

__all__ = ["MODES", "FailDisk", "Image", "KillDisk", "Killed", "Operation", "RecordingDisk"]

_SYNCS = ("fdatasync", "fsync_dir", "syncfs")
_NO_ROOM = ("open_new", "pwrite", "fallocate", "mkdir", "rename")

T = TypeVar("T")


class Killed(BaseException):
    """The process is dead. No `except Exception` may bring it back to life."""


class Operation(NamedTuple):
    """One mutating operation of `Disk`, for messages."""

    name: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}" + (f" ({self.detail})" if self.detail else "")


def _reading(name: str) -> Any:
    def method(self: KillDisk, *args: Any, **keywords: Any) -> Any:
        self.check_alive()
        return getattr(super(KillDisk, self), name)(*args, **keywords)

    return method


class KillDisk(Disk):
    """Counts the mutating operations and dies at one of them.

    Parameters
    ----------
    kill_at : int | None
        How many operations are done before the process dies in the next one. None: it never dies.
    half_writes : bool
        If the operation in which it dies is a pwrite, the first half of its bytes is written.

    Attributes
    ----------
    operations : list of Operation
        The operations that were done.
    killed_in : Operation | None
        The operation that was not done, or only half.
    before, after : callable
        Called with each operation before its outcome is decided, and after it has been done. They observe, act as
        another process, set `kill_at`, or raise.

    Threads: one operation at a time; all threads die together.
    """

    def __init__(self, kill_at: int | None = None, *, half_writes: bool = False) -> None:
        self.kill_at = kill_at
        self.half_writes = half_writes
        self.operations: list[Operation] = []
        self.killed_in: Operation | None = None
        self.before: Callable[[Operation], object] | None = None
        self.after: Callable[[Operation], object] | None = None
        self._mutex = threading.RLock()

    @property
    def dead(self) -> bool:
        """Whether the process was killed."""
        return self.killed_in is not None

    def check_alive(self) -> None:
        """Raise `Killed` if the process is dead."""
        if self.killed_in is not None:
            raise Killed(f"dead since operation {len(self.operations)}: {self.killed_in}")

    def revive(self, kill_at: int | None = None) -> None:
        """Let another process take over the same disk and page cache; the count of operations continues."""
        self.kill_at = kill_at
        self.killed_in = None

    def _run(
        self, operation: Operation, call: Callable[[], T], half: Callable[[], object] | None = None, size: int = 0
    ) -> T:
        if self.before is not None:
            self.before(operation)
        with self._mutex:
            self.check_alive()
            if len(self.operations) == self.kill_at:
                self.killed_in = operation
                if half is not None and self.half_writes:
                    half()
                raise Killed(f"in operation {self.kill_at}: {operation}")
            result = self._attempt(operation, call, half, size)
            self.operations.append(operation)
        if self.after is not None:
            self.after(operation)
        return result

    def _attempt(self, operation: Operation, call: Callable[[], T], half: Callable[[], object] | None, size: int) -> T:
        return call()

    # ---- mutating operations

    def open_new(self, path: str | Path, size: int) -> File:
        operation = Operation("open_new", str(path), f"{size} bytes")
        return self._run(operation, lambda: self._open_new(str(path), size), size=size)

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        copy = memoryview(data).cast("B").tobytes()
        operation = Operation("pwrite", file.path, f"{len(copy)} bytes at {position}")
        self._run(
            operation,
            lambda: self._pwrite_all(file, copy, position),
            lambda: self._pwrite_all(file, copy[: len(copy) // 2], position),
            len(copy),
        )

    def fdatasync(self, file: File) -> None:
        self._run(Operation("fdatasync", file.path, ""), lambda: self._fdatasync(file))

    def fsync_dir(self, path: str | Path) -> None:
        self._run(Operation("fsync_dir", str(path), ""), lambda: self._fsync_dir(str(path)))

    def syncfs(self, file: File) -> None:
        self._run(Operation("syncfs", file.path, ""), lambda: self._syncfs(file))

    def rename(self, source: str | Path, target: str | Path) -> None:
        operation = Operation("rename", str(source), f"to {target}")
        self._run(operation, lambda: self._rename(str(source), str(target)))

    def unlink(self, path: str | Path) -> None:
        self._run(Operation("unlink", str(path), ""), lambda: self._unlink(str(path)))

    def rmdir(self, path: str | Path) -> None:
        self._run(Operation("rmdir", str(path), ""), lambda: self._rmdir(str(path)))

    def mkdir(self, path: str | Path) -> None:
        self._run(Operation("mkdir", str(path), ""), lambda: self._mkdir(str(path)))

    def fallocate(self, file: File, size: int) -> None:
        operation = Operation("fallocate", file.path, f"{size} bytes")
        self._run(operation, lambda: self._fallocate(file, size), size=size)

    def punch(self, file: File, position: int, size: int) -> None:
        operation = Operation("punch", file.path, f"{size} bytes at {position}")
        self._run(operation, lambda: self._punch(file, position, size))

    # ---- the implementation of each operation, which `RecordingDisk` extends

    def _open_new(self, path: str, size: int) -> File:
        return super().open_new(path, size)

    def _pwrite_all(self, file: File, data: bytes, position: int) -> None:
        super().pwrite(file, data, position)

    def _fdatasync(self, file: File) -> None:
        super().fdatasync(file)

    def _fsync_dir(self, path: str) -> None:
        super().fsync_dir(path)

    def _syncfs(self, file: File) -> None:
        super().syncfs(file)

    def _rename(self, source: str, target: str) -> None:
        super().rename(source, target)

    def _unlink(self, path: str) -> None:
        super().unlink(path)

    def _rmdir(self, path: str) -> None:
        super().rmdir(path)

    def _mkdir(self, path: str) -> None:
        super().mkdir(path)

    def _fallocate(self, file: File, size: int) -> None:
        super().fallocate(file, size)

    def _punch(self, file: File, position: int, size: int) -> None:
        super().punch(file, position, size)

    # ---- reads of a dead process

    open = _reading("open")
    pread = _reading("pread")
    pread_into = _reading("pread_into")
    size = _reading("size")
    exists = _reading("exists")
    names = _reading("names")
    entries = _reading("entries")
    is_folder = _reading("is_folder")
    at_path = _reading("at_path")
    identity_at = _reading("identity_at")
    linked = _reading("linked")
    open_folder = _reading("open_folder")
    folder_at_path = _reading("folder_at_path")
    hold_root = _reading("hold_root")
    root_at_path = _reading("root_at_path")
    check_folders = _reading("check_folders")
    watch = _reading("watch")
    data_ranges = _reading("data_ranges")
    length = _reading("length")
    free = _reading("free")
    free_names = _reading("free_names")
    used_percent = _reading("used_percent")
    modified_s = _reading("modified_s")
    start_writeback = _reading("start_writeback")


class FailDisk(KillDisk):
    """A disk on which one operation fails while the process survives.

    Parameters
    ----------
    fail_at : int | None
        How many operations are done before the one that fails. The failing one counts as an operation.
    error_number : int
        `errno.EIO`, `errno.ENOSPC` (a `StoreFullError` if the disk reports it), ...
    kill_at, half_writes
        As for `KillDisk`; `half_writes` also for a pwrite that fails.
    """

    def __init__(
        self,
        fail_at: int | None = None,
        error_number: int = errno.EIO,
        *,
        kill_at: int | None = None,
        half_writes: bool = False,
    ) -> None:
        super().__init__(kill_at, half_writes=half_writes)
        self.fail_at = fail_at
        self.error_number = error_number

    def _attempt(self, operation: Operation, call: Callable[[], T], half: Callable[[], object] | None, size: int) -> T:
        if len(self.operations) != self.fail_at:
            return call()
        if half is not None and self.half_writes:
            half()
        if operation.name in _SYNCS:
            self._sync_failed(operation)
        self.operations.append(operation._replace(detail=f"{operation.detail}, failed".lstrip(", ")))
        error = OSError(self.error_number, os.strerror(self.error_number), operation.path)
        raise self._translated(error, operation.path, size) if operation.name in _NO_ROOM else error

    def _sync_failed(self, operation: Operation) -> None:
        """Called when a sync is about to report an error."""


class RecordingDisk(FailDisk):
    """Records what is done to one folder, and builds images of it after a power cut.

    Parameters
    ----------
    folder : str | Path
        Must exist; its current contents are safe. Operations outside of it are an error.
    fail_at, error_number, kill_at, half_writes
        As for `FailDisk`.
    """

    def __init__(
        self,
        folder: str | Path,
        fail_at: int | None = None,
        error_number: int = errno.EIO,
        *,
        kill_at: int | None = None,
        half_writes: bool = False,
    ) -> None:
        super().__init__(fail_at, error_number, kill_at=kill_at, half_writes=half_writes)
        self.folder = self.top = os.path.abspath(folder)
        self._events: list[tuple[int, Event]] = []  # with the count of operations before it
        self._numbers = itertools.count()
        self._ids: dict[tuple[int, int], int] = {}
        self._base_files: dict[int, FileContent] = {}
        self._base_folders: dict[int, dict[str, int]] = {}
        self._base_changes: list[Name] = []
        self._root = self._take_in(self.folder)
        self._replay = Replay(self._root, self._base_files, self._base_folders)
        self._replayed = 0
        self._known_paths: tuple[int, dict[int, str]] = (-1, {})

    # ---- images

    @property
    def position(self) -> int:
        """Return how many operations were done; remember it with each acknowledgement."""
        return len(self.operations)

    def images(
        self,
        cut: int,
        modes: Iterable[str] = MODES,
        *,
        limit: int = 20,
        random_count: int = 5,
        seed: int = 0,
        names_in_order: bool = False,
    ) -> Iterator[Image]:
        """Yield the images after a power cut when `cut` operations had been done (0 to `position`), each only once.

        Parameters
        ----------
        cut : int
            Values that ascend from call to call are fast.
        modes : iterable of str
            "strict": nothing survives that is not safe. "all" (or "kill"): everything survives. "names only", "data
            only": one kind survives. "one file missing", "one file present": the bytes and size of a file. "one
            missing", "one present": a sector, a size or a name. "random": `random_count` random sets.
        limit : int
            The largest number of images of each of the "one ..." modes, chosen at random if there are more.
        random_count : int
        seed : int
            The same seed and cut give the same images.
        names_in_order : bool
            True: if a change of a name is lost, all later ones that are not safe are lost as well, in any folder,
            because one journal holds them, as on ext4 and XFS. False: each change is independent.
        """
        atoms = self._replay_at(cut).atoms()
        seen: set[frozenset[tuple[Atom, int]]] = set()
        chance = random.Random(f"{seed} {cut}")
        for mode in modes:
            for label, chosen in choices(mode, atoms, chance, limit, random_count):
                kept = with_names_in_order(chosen, atoms, label) if names_in_order else chosen
                key = frozenset((atom, count) for atom, count in kept.items() if count)
                if key not in seen:
                    seen.add(key)
                    words = f"{mode}{label and ': '}{self._words(self._replay_at(cut), label)}"
                    yield Image(cut, words, atoms, kept, partial(self._replay_at, cut))

    def image(self, cut: int, mode: str = "strict") -> Image:
        """Return the only image of a mode that has one ("strict", "all", "kill", "names only", "data only")."""
        atoms = self._replay_at(cut).atoms()
        (_, kept), *_ = choices(mode, atoms, random.Random(0), 1, 1)
        return Image(cut, mode, atoms, kept, partial(self._replay_at, cut))

    def unsafe(self, cut: int) -> list[str]:
        """Return in words what a power cut at that time may remove."""
        replay = self._replay_at(cut)
        return [self._words(replay, atom) for atom in replay.atoms()]

    def _replay_at(self, cut: int) -> Replay:
        if not 0 <= cut <= len(self.operations):
            raise ValueError(f"cut: found {cut}; allowed is 0 to {len(self.operations)}")
        if self._replayed and self._events[self._replayed - 1][0] >= cut:
            base = Replay(self._root, self._base_files, self._base_folders, self._base_changes)
            self._replay, self._replayed = base, 0
        while self._replayed < len(self._events) and self._events[self._replayed][0] < cut:
            self._replay.advance(self._events[self._replayed][1])
            self._replayed += 1
        return self._replay

    def _words(self, replay: Replay, label: str | Atom | int) -> str:
        if isinstance(label, str):
            return label
        if isinstance(label, int):
            return self._paths.get(label, "?")
        if label.kind == "name":
            return replay.changes[label.key].text
        where = f"sector {label.key}" if label.kind == "sector" else "size"
        return f"{self._paths.get(label.inode, '?')} {where}"

    # ---- recording

    @property
    def _paths(self) -> dict[int, str]:
        """Return the last path of each inode."""
        known_at, found = self._known_paths
        if known_at == len(self._events):
            return found
        found = {}

        def walk(folder: int, path: str) -> None:
            for name, inode in self._base_folders[folder].items():
                found[inode] = os.path.join(path, name)
                if inode in self._base_folders:
                    walk(inode, found[inode])

        walk(self._root, "")
        for _, event in self._events:
            if isinstance(event, Name) and event.inode is not None:
                found[event.inode] = os.path.join(found.get(event.folder, ""), event.name)
        self._known_paths = (len(self._events), found)
        return found

    def _record(self, *events: Event) -> None:
        # What half a write left when the process died belongs to the last cut, not after it.
        number = len(self.operations) - self.dead
        self._events += [(number, event) for event in events]

    def _take_in(self, path: str) -> int:
        inode = self._new_id(path)
        entries = self._base_folders[inode] = {}
        for name in os.listdir(path):
            child = os.path.join(path, name)
            if os.path.islink(child):
                raise ValueError(f"{child}: links are not recorded")
            entries[name] = self._take_in(child) if os.path.isdir(child) else self._take_in_file(child)
        return inode

    def _take_in_file(self, path: str) -> int:
        inode = self._new_id(path)
        file = Disk().open(path)
        size = os.fstat(file.fileno()).st_size
        content = self._base_files[inode] = FileContent(size)
        for start, end in Disk().data_ranges(file, 0, size):
            content.write(start, Disk().pread(file, end - start, start))
        content.sync()
        return inode

    def _path_key(self, path: str) -> tuple[int, int]:
        """Return what distinguishes the file or folder at a path from all others."""
        info = os.stat(path, follow_symlinks=False)
        return info.st_dev, info.st_ino

    def _file_key(self, file: File) -> tuple[int, int]:
        info = os.fstat(file.fileno())
        return info.st_dev, info.st_ino

    def _new_id(self, path: str) -> int:
        number = self._ids[self._path_key(path)] = next(self._numbers)  # the kernel may reuse a number
        return number

    def _id(self, key: tuple[int, int], path: str) -> int:
        number = self._ids.get(key)
        if number is None:
            raise AssertionError(f"{path}: was not made through the disk that records, or is outside of {self.folder}")
        return number

    def _id_of(self, file: File) -> int:
        return self._id(self._file_key(file), file.path)

    def _place(self, path: str) -> tuple[int, str]:
        folder, name = os.path.split(os.path.abspath(path))
        return self._id(self._path_key(folder), folder), name

    def _open_new(self, path: str, size: int) -> File:
        file = super()._open_new(path, size)
        folder, name = self._place(path)
        inode = self._new_id(path)
        self._record(Create(inode, size), Name(folder, name, inode, text=f"the new name {path}"))
        return file

    def _pwrite_all(self, file: File, data: bytes, position: int) -> None:
        super()._pwrite_all(file, data, position)
        self._record(Write(self._id_of(file), position, data))

    def _fdatasync(self, file: File) -> None:
        super()._fdatasync(file)
        self._record(Sync(self._id_of(file)))

    def _fsync_dir(self, path: str) -> None:
        super()._fsync_dir(path)
        self._record(SyncFolder(self._id(self._path_key(path), path)))

    def _syncfs(self, file: File) -> None:
        super()._syncfs(file)
        self._record(Sync(None))

    def _sync_failed(self, operation: Operation) -> None:
        if operation.name == "fdatasync":
            inode = self._id(self._path_key(operation.path), operation.path)
            self._record(Sync(inode, failed=True))
        elif operation.name == "syncfs":
            self._record(Sync(None, failed=True))

    def _rename(self, source: str, target: str) -> None:
        inode = self._id(self._path_key(source), source)
        before = self._place(source)
        super()._rename(source, target)
        folder, name = self._place(target)
        self._record(Name(folder, name, inode, before=before, text=f"the renaming of {source} to {target}"))

    def _unlink(self, path: str) -> None:
        gone = self._ids.get(self._path_key(path))
        folder, name = self._place(path)
        super()._unlink(path)
        if gone is not None:  # otherwise the file is not recorded
            self._record(Name(folder, name, None, gone=gone, text=f"the unlinking of {path}"))

    def _rmdir(self, path: str) -> None:
        gone = self._id(self._path_key(path), path)
        folder, name = self._place(path)
        super()._rmdir(path)
        self._record(Name(folder, name, None, gone=gone, text=f"the removal of the folder {path}"))

    def _mkdir(self, path: str) -> None:
        is_new = not super().exists(path)
        super()._mkdir(path)
        if is_new:
            folder, name = self._place(path)
            inode = self._new_id(path)
            self._record(Create(inode, 0, is_folder=True), Name(folder, name, inode, text=f"the folder {path}"))

    def _fallocate(self, file: File, size: int) -> None:
        super()._fallocate(file, size)
        self._record(Create(self._id_of(file), size))

    def _punch(self, file: File, position: int, size: int) -> None:
        super()._punch(file, position, size)
        self._record(Punch(self._id_of(file), position, size))
