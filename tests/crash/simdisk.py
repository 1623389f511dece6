"""What is left on the disk after a kill, or after a power cut?

Three disks for tests, each the real one with something added. They know nothing of the store: only the seam.

`KillDisk`
    The process dies at operation n: `Killed` instead of it, and for every operation after it, reads too.
`FailDisk`
    Operation n fails with an error, once. (It can kill as well.)
`RecordingDisk`
    Writes down every operation, so that the folder can be built as a power cut at any time may have left it. (It can
    fail and kill as well; after `revive` the next process goes on with the same page cache.)

What a power cut may leave, as assumed here:

- A file's bytes and size are safe once `fdatasync` of it, or `syncfs`, has returned. Of what was written since, any
  set of 512-byte sectors may be there; a sector is as it was after one of the writes to it, in their order, and is
  never mixed of an earlier and a later state. A hole that was punched is a write of zeros.
- A size that a write made larger may be lost with or without the bytes: bytes behind the size are then not there, and
  bytes that are missing below it are zero. The size given to `open_new` comes with the file: it and a later rename are
  both in the file system's journal, which keeps their order.
- A name (created, renamed, unlinked; a folder's, too) is safe once `fsync_dir` of its folder, or `syncfs`, has
  returned: syncing the file alone is not enough. Of the others any set may have come to pass, in their order. A rename
  is atomic and belongs to the folder it renames into; the data of a renamed file that was not synced may be zero.
- After a sync that failed nobody knows, and a later sync that works proves nothing of what was written before the
  failed one, until its sector is written again.
- What was in the folder when recording began is safe. Files that do not go through the seam (locks) are not recorded.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from messagestore.mapped_file import Disk, File

SECTOR_SIZE = 512
MODES = (
    "strict",
    "all",
    "names only",
    "data only",
    "one file missing",
    "one file present",
    "one missing",
    "one present",
    "random",
)
_SYNCS = ("fdatasync", "fsync_dir", "syncfs")
_NO_ROOM = ("open_new", "pwrite", "fallocate")

T = TypeVar("T")


class Killed(BaseException):
    """The process is dead. No `except Exception` may bring it back to life."""


class Operation(NamedTuple):
    """One mutating operation of the seam, for messages."""

    name: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}" + (f" ({self.detail})" if self.detail else "")


def _reading(name: str) -> Any:
    def method(self: KillDisk, *args: Any, **keywords: Any) -> Any:
        self.check_alive()
        return getattr(Disk, name)(self, *args, **keywords)

    return method


class KillDisk(Disk):
    """Counts the mutating operations and dies at one of them.

    Parameters
    ----------
    kill_at : int | None
        How many operations are done before the process dies in the next one. None: never.
    half_writes : bool
        When the operation it dies in is a pwrite: the first half of its bytes is written.

    Attributes
    ----------
    operations : list of Operation
        What was done.
    killed_in : Operation | None
        What was not done, or only half.

    Threads: one operation at a time; they all die together.
    """

    def __init__(self, kill_at: int | None = None, *, half_writes: bool = False) -> None:
        self.kill_at = kill_at
        self.half_writes = half_writes
        self.operations: list[Operation] = []
        self.killed_in: Operation | None = None
        self._mutex = threading.RLock()

    @property
    def dead(self) -> bool:
        """Whether the process was killed."""
        return self.killed_in is not None

    def check_alive(self) -> None:
        """Raise `Killed` when dead."""
        if self.killed_in is not None:
            raise Killed(f"dead since operation {len(self.operations)}: {self.killed_in}")

    def revive(self, kill_at: int | None = None) -> None:
        """Another process takes over: the same disk and page cache; operations are counted on."""
        self.kill_at = kill_at
        self.killed_in = None

    def _run(
        self, operation: Operation, call: Callable[[], T], half: Callable[[], object] | None = None, size: int = 0
    ) -> T:
        with self._mutex:
            self.check_alive()
            if len(self.operations) == self.kill_at:
                self.killed_in = operation
                if half is not None and self.half_writes:
                    half()
                raise Killed(f"in operation {self.kill_at}: {operation}")
            result = self._attempt(operation, call, half, size)
            self.operations.append(operation)
            return result

    def _attempt(
        self, operation: Operation, call: Callable[[], T], half: Callable[[], object] | None, size: int
    ) -> T:
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

    def mkdir(self, path: str | Path) -> None:
        self._run(Operation("mkdir", str(path), ""), lambda: self._mkdir(str(path)))

    def fallocate(self, file: File, size: int) -> None:
        operation = Operation("fallocate", file.path, f"{size} bytes")
        self._run(operation, lambda: self._fallocate(file, size), size=size)

    def punch(self, file: File, position: int, size: int) -> None:
        operation = Operation("punch", file.path, f"{size} bytes at {position}")
        self._run(operation, lambda: self._punch(file, position, size))

    # ---- how each is really done; `RecordingDisk` adds to these

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

    def _mkdir(self, path: str) -> None:
        super().mkdir(path)

    def _fallocate(self, file: File, size: int) -> None:
        super().fallocate(file, size)

    def _punch(self, file: File, position: int, size: int) -> None:
        super().punch(file, position, size)

    # ---- reads of the dead

    open = _reading("open")
    pread = _reading("pread")
    pread_into = _reading("pread_into")
    size = _reading("size")
    exists = _reading("exists")
    names = _reading("names")
    is_folder = _reading("is_folder")
    at_path = _reading("at_path")
    data_ranges = _reading("data_ranges")
    free = _reading("free")


class FailDisk(KillDisk):
    """One operation fails; the process lives on.

    Parameters
    ----------
    fail_at : int | None
        How many operations are done before the one that fails. It counts as an operation.
    error_number : int
        `errno.EIO`, `errno.ENOSPC` (a `StoreFullError` where the disk says so), ...
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

    def _attempt(
        self, operation: Operation, call: Callable[[], T], half: Callable[[], object] | None, size: int
    ) -> T:
        if len(self.operations) != self.fail_at:
            return call()
        self.operations.append(operation._replace(detail=f"{operation.detail}, failed".lstrip(", ")))
        if half is not None and self.half_writes:
            half()
        if operation.name in _SYNCS:
            self._sync_failed(operation)
        error = OSError(self.error_number, os.strerror(self.error_number), operation.path)
        raise self._translated(error, operation.path, size) if operation.name in _NO_ROOM else error

    def _sync_failed(self, operation: Operation) -> None:
        """A sync is about to report an error."""


# ---- recording


@dataclass(frozen=True)
class _Write:
    inode: int
    position: int
    data: bytes


@dataclass(frozen=True)
class _Punch:
    inode: int
    position: int
    size: int


@dataclass(frozen=True)
class _Sync:
    inode: int | None  # None: everything, names as well
    failed: bool = False


@dataclass(frozen=True)
class _Create:
    inode: int
    size: int
    is_folder: bool = False


@dataclass(frozen=True)
class _Name:
    """In `folder`, `name` is `inode` from now on (None: is not there), and where it was before it is no more."""

    folder: int
    name: str
    inode: int | None
    before: tuple[int, str] | None = None
    gone: int | None = None
    text: str = ""


@dataclass(frozen=True)
class _SyncFolder:
    folder: int


_Event = _Write | _Punch | _Sync | _Create | _Name | _SyncFolder


@dataclass
class _File:
    """Content of one inode: what is safe, and what came since."""

    size: int = 0
    sectors: dict[int, bytes] = field(default_factory=dict)
    pieces: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    """Sector -> (position in it, bytes), in order, not safe."""
    sizes: list[int] = field(default_factory=list)
    """Sizes it grew to, not safe."""
    doomed: dict[int, int] = field(default_factory=dict)
    """Sector -> how many of its pieces a failed sync left in the dark."""

    @property
    def newest_size(self) -> int:
        return self.sizes[-1] if self.sizes else self.size

    def grow(self, size: int) -> None:
        if size > self.newest_size:
            self.sizes.append(size)

    def write(self, position: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            sector, within = divmod(position + done, SECTOR_SIZE)
            piece = data[done : done + SECTOR_SIZE - within]
            self.pieces.setdefault(sector, []).append((within, piece))
            done += len(piece)
        if data:
            self.grow(position + len(data))

    def punch(self, position: int, size: int) -> None:
        end = min(position + size, self.newest_size)
        for sector in sorted(self.sectors.keys() | self.pieces.keys()):  # all others are zero
            start = max(position, sector * SECTOR_SIZE)
            stop = min(end, (sector + 1) * SECTOR_SIZE)
            if start < stop:
                self.pieces.setdefault(sector, []).append((start - sector * SECTOR_SIZE, bytes(stop - start)))

    def sync(self) -> None:
        for sector in list(self.pieces):
            if len(self.pieces[sector]) > self.doomed.get(sector, 0):
                self.sectors[sector] = self.sector(sector, len(self.pieces[sector]))
                del self.pieces[sector]
                self.doomed.pop(sector, None)
        self.size = self.newest_size
        self.sizes = []

    def sync_failed(self) -> None:
        self.doomed = {sector: len(pieces) for sector, pieces in self.pieces.items()}

    def sector(self, number: int, count: int) -> bytes:
        """A sector after the first `count` of its writes that are not safe."""
        safe = self.sectors.get(number, b"")
        pieces = self.pieces.get(number, [])[:count]
        if not pieces:
            return safe
        data = bytearray(safe.ljust(SECTOR_SIZE, b"\0"))
        for within, piece in pieces:
            data[within : within + len(piece)] = piece
        return bytes(data)


class Atom(NamedTuple):
    """Something that a power cut may take by itself; `key` is a sector, or the number of a change of a name."""

    kind: str  # "sector", "size" or "name"
    inode: int
    key: int


class _Replay:
    """The disk at one moment: what is safe, and what is not."""

    def __init__(self, root: int, files: Mapping[int, _File], folders: Mapping[int, Mapping[str, int]]) -> None:
        self.root = root
        self.files = {inode: _File(file.size, dict(file.sectors)) for inode, file in files.items()}
        self.folders = {inode: dict(names) for inode, names in folders.items()}
        self.changes: list[_Name] = []

    def advance(self, event: _Event) -> None:
        match event:
            case _Write(inode, position, data):
                self.files[inode].write(position, data)
            case _Punch(inode, position, size):
                self.files[inode].punch(position, size)
            case _Create(inode, size, is_folder):
                if is_folder:
                    self.folders[inode] = {}
                elif inode in self.files:
                    self.files[inode].grow(size)
                else:
                    self.files[inode] = _File(size)
            case _Name():
                self.changes.append(event)
            case _SyncFolder(folder):
                for change in self.changes:
                    if change.folder == folder:
                        _rename(self.folders, change)
                self.changes = [change for change in self.changes if change.folder != folder]
            case _Sync(inode, failed):
                for file in self.files.values() if inode is None else (self.files[inode],):
                    file.sync_failed() if failed else file.sync()
                if inode is None and not failed:
                    for change in self.changes:
                        _rename(self.folders, change)
                    self.changes = []

    def atoms(self) -> dict[Atom, int]:
        """All that is not safe, with how many writes each stands for."""
        found = {Atom("name", -1, number): 1 for number in range(len(self.changes))}
        for inode, file in self.files.items():
            if file.sizes:
                found[Atom("size", inode, 0)] = len(file.sizes)
            found.update({Atom("sector", inode, sector): len(pieces) for sector, pieces in file.pieces.items()})
        return found

    def content(self, kept: Mapping[Atom, int]) -> _Folder:
        """The folder when only `kept` (atom -> how many of its writes) of what is not safe survives."""
        names = {inode: dict(entries) for inode, entries in self.folders.items()}
        for number, change in enumerate(self.changes):
            if kept.get(Atom("name", -1, number)):
                _rename(names, change)
        return self._folder(self.root, names, kept)

    def _folder(self, inode: int, names: dict[int, dict[str, int]], kept: Mapping[Atom, int]) -> _Folder:
        folder: _Folder = {}
        for name, entry in names[inode].items():
            if entry in self.folders:
                folder[name] = self._folder(entry, names, kept)
                continue
            file = self.files[entry]
            count = kept.get(Atom("size", entry, 0), 0)
            size = file.sizes[count - 1] if count else file.size
            sectors = {
                number: file.sector(number, kept.get(Atom("sector", entry, number), 0))
                for number in sorted(file.sectors.keys() | file.pieces.keys())
            }
            folder[name] = (size, sectors)
        return folder


_Folder = dict[str, "tuple[int, dict[int, bytes]] | _Folder"]


def _rename(folders: dict[int, dict[str, int]], change: _Name) -> None:
    entries = folders[change.folder]
    if change.inode is None:
        if entries.get(change.name) == change.gone:
            del entries[change.name]
        return
    if change.before is not None:
        folder, name = change.before
        if folders[folder].get(name) == change.inode:
            del folders[folder][name]
    entries[change.name] = change.inode


@dataclass(frozen=True)
class Image:
    """What one power cut left.

    Parameters
    ----------
    cut : int
        How many operations had been done.
    label : str
        Which of the things that were not safe survived; for messages.
    """

    cut: int
    label: str
    _folder: _Folder = field(repr=False)

    def build(self, target: str | Path) -> Path:
        """Make the folder at `target`, which must be missing or empty."""
        path = Path(target)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ValueError(f"{path}: is not empty")
        _build(path, self._folder)
        return path

    def __str__(self) -> str:
        return f"power cut after operation {self.cut}, {self.label}"


def _build(path: Path, folder: _Folder) -> None:
    for name, entry in folder.items():
        if isinstance(entry, dict):
            (path / name).mkdir()
            _build(path / name, entry)
            continue
        size, sectors = entry
        fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, size)
            for position, data in _runs(sectors):
                if position < size:
                    os.pwrite(fd, data[: size - position], position)
        finally:
            os.close(fd)


def _runs(sectors: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
    """Neighbouring sectors joined; sectors of zeros are left out."""
    first, parts = 0, list[bytes]()
    for number, data in sectors.items():
        if parts and number != first + len(parts):
            yield first * SECTOR_SIZE, b"".join(parts)
            parts = []
        if data.strip(b"\0"):
            if not parts:
                first = number
            parts.append(data.ljust(SECTOR_SIZE, b"\0"))
        elif parts:
            yield first * SECTOR_SIZE, b"".join(parts)
            parts = []
    if parts:
        yield first * SECTOR_SIZE, b"".join(parts)


class RecordingDisk(FailDisk):
    """Writes down what is done to one folder, and makes images of it after a power cut.

    Parameters
    ----------
    folder : str | Path
        Must be there; what is in it now is safe. Operations outside of it are an error.
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
        self.folder = os.path.abspath(folder)
        self._events: list[tuple[int, _Event]] = []  # with the count of operations before it
        self._ids: dict[tuple[int, int], int] = {}
        self._base_files: dict[int, _File] = {}
        self._base_folders: dict[int, dict[str, int]] = {}
        self._root = self._take_in(self.folder)
        self._replay = _Replay(self._root, self._base_files, self._base_folders)
        self._replayed = 0

    # ---- images

    @property
    def position(self) -> int:
        """How many operations were done: remember it with each acknowledgement."""
        return len(self.operations)

    def images(
        self, cut: int, modes: Iterable[str] = MODES, *, limit: int = 20, random_count: int = 5, seed: int = 0
    ) -> Iterator[Image]:
        """Images after a power cut when `cut` operations had been done (0 to `position`), each only once.

        Parameters
        ----------
        cut : int
            Ascending from call to call is fast.
        modes : iterable of str
            "strict": nothing survives that is not safe. "all" (or "kill"): everything does. "names only", "data only":
            one kind does. "one file missing", "one file present": the bytes and size of a file. "one missing", "one
            present": a sector, a size or a name. "random": `random_count` random sets.
        limit : int
            At most so many images of each of the "one ..." modes, chosen at random when there are more.
        random_count : int
        seed : int
            The same seed and cut give the same images.
        """
        replay = self._at(cut)
        atoms = replay.atoms()
        seen: set[frozenset[tuple[Atom, int]]] = set()
        chance = random.Random(f"{seed} {cut}")
        for mode in modes:
            for label, kept in _choices(mode, atoms, chance, limit, random_count):
                key = frozenset((atom, count) for atom, count in kept.items() if count)
                if key not in seen:
                    seen.add(key)
                    yield Image(cut, f"{mode}{label and ': '}{self._words(replay, label)}", replay.content(kept))

    def image(self, cut: int, mode: str = "strict") -> Image:
        """The one image of a mode that has one ("strict", "all", "kill", "names only", "data only")."""
        replay = self._at(cut)
        (_, kept), *_ = _choices(mode, replay.atoms(), random.Random(0), 1, 1)
        return Image(cut, mode, replay.content(kept))

    def unsafe(self, cut: int) -> list[str]:
        """What a power cut at that time may take, in words."""
        replay = self._at(cut)
        return [self._words(replay, atom) for atom in replay.atoms()]

    def _at(self, cut: int) -> _Replay:
        if not 0 <= cut <= len(self.operations):
            raise ValueError(f"cut: found {cut}; allowed is 0 to {len(self.operations)}")
        if self._replayed and self._events[self._replayed - 1][0] >= cut:
            self._replay, self._replayed = _Replay(self._root, self._base_files, self._base_folders), 0
        while self._replayed < len(self._events) and self._events[self._replayed][0] < cut:
            self._replay.advance(self._events[self._replayed][1])
            self._replayed += 1
        return self._replay

    def _words(self, replay: _Replay, label: str | Atom | int) -> str:
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
        """The last path of each inode."""
        found: dict[int, str] = {}

        def walk(folder: int, path: str) -> None:
            for name, inode in self._base_folders[folder].items():
                found[inode] = os.path.join(path, name)
                if inode in self._base_folders:
                    walk(inode, found[inode])

        walk(self._root, "")
        for _, event in self._events:
            if isinstance(event, _Name) and event.inode is not None:
                found[event.inode] = os.path.join(found.get(event.folder, ""), event.name)
        return found

    def _record(self, *events: _Event) -> None:
        # What half a write left when the process died, or the write failed, belongs to the operation that died.
        number = len(self.operations) - (1 if self.operations and self.operations[-1].detail.endswith("failed") else 0)
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
        content = self._base_files[inode] = _File(size)
        for start, end in Disk().data_ranges(file, 0, size):
            content.write(start, Disk().pread(file, end - start, start))
        content.sync()
        return inode

    def _new_id(self, path: str) -> int:
        info = os.stat(path, follow_symlinks=False)
        number = self._ids[(info.st_dev, info.st_ino)] = len(self._ids_given)
        self._ids_given.append(path)
        return number

    @property
    def _ids_given(self) -> list[str]:
        return self.__dict__.setdefault("_given", [])

    def _id(self, info: os.stat_result, path: str) -> int:
        number = self._ids.get((info.st_dev, info.st_ino))
        if number is None:
            raise AssertionError(f"{path}: was not made through the disk that records, or is outside of {self.folder}")
        return number

    def _id_of(self, file: File) -> int:
        return self._id(os.fstat(file.fileno()), file.path)

    def _place(self, path: str) -> tuple[int, str]:
        folder, name = os.path.split(os.path.abspath(path))
        return self._id(os.stat(folder), folder), name

    def _open_new(self, path: str, size: int) -> File:
        file = super()._open_new(path, size)
        folder, name = self._place(path)
        inode = self._new_id(path)
        self._record(_Create(inode, size), _Name(folder, name, inode, text=f"the new name {path}"))
        return file

    def _pwrite_all(self, file: File, data: bytes, position: int) -> None:
        super()._pwrite_all(file, data, position)
        self._record(_Write(self._id_of(file), position, data))

    def _fdatasync(self, file: File) -> None:
        super()._fdatasync(file)
        self._record(_Sync(self._id_of(file)))

    def _fsync_dir(self, path: str) -> None:
        super()._fsync_dir(path)
        self._record(_SyncFolder(self._id(os.stat(path), path)))

    def _syncfs(self, file: File) -> None:
        super()._syncfs(file)
        self._record(_Sync(None))

    def _sync_failed(self, operation: Operation) -> None:
        if operation.name == "fdatasync":
            inode = self._id(os.stat(operation.path), operation.path)
            self._record(_Sync(inode, failed=True))
        elif operation.name == "syncfs":
            self._record(_Sync(None, failed=True))

    def _rename(self, source: str, target: str) -> None:
        inode = self._id(os.stat(source, follow_symlinks=False), source)
        before = self._place(source)
        super()._rename(source, target)
        folder, name = self._place(target)
        self._record(_Name(folder, name, inode, before=before, text=f"the renaming of {source} to {target}"))

    def _unlink(self, path: str) -> None:
        info = os.stat(path, follow_symlinks=False)
        gone = self._ids.get((info.st_dev, info.st_ino))
        folder, name = self._place(path)
        super()._unlink(path)
        if gone is not None:  # else: a file that is not recorded
            self._record(_Name(folder, name, None, gone=gone, text=f"the unlinking of {path}"))

    def _mkdir(self, path: str) -> None:
        is_new = not os.path.lexists(path)
        super()._mkdir(path)
        if is_new:
            folder, name = self._place(path)
            inode = self._new_id(path)
            self._record(_Create(inode, 0, is_folder=True), _Name(folder, name, inode, text=f"the folder {path}"))

    def _fallocate(self, file: File, size: int) -> None:
        super()._fallocate(file, size)
        self._record(_Create(self._id_of(file), size))

    def _punch(self, file: File, position: int, size: int) -> None:
        super()._punch(file, position, size)
        self._record(_Punch(self._id_of(file), position, size))


_Choice = tuple["str | Atom | int", Mapping[Atom, int]]


def _choices(
    mode: str, atoms: Mapping[Atom, int], chance: random.Random, limit: int, random_count: int
) -> Iterator[_Choice]:
    """What survives, in one mode: a label, and how many writes of each atom."""

    def some(of: Iterable[T]) -> list[T]:
        found = list(of)
        return found if len(found) <= limit else chance.sample(found, limit)

    inodes = dict.fromkeys(atom.inode for atom in atoms if atom.kind != "name")
    if mode == "strict":
        yield "", {}
    elif mode in ("all", "kill"):
        yield "", atoms
    elif mode == "names only":
        yield "", {atom: count for atom, count in atoms.items() if atom.kind == "name"}
    elif mode == "data only":
        yield "", {atom: count for atom, count in atoms.items() if atom.kind != "name"}
    elif mode == "one file missing":
        for inode in some(inodes):
            yield inode, {atom: count for atom, count in atoms.items() if atom.inode != inode}
    elif mode == "one file present":  # with all names: without its own it would not be seen
        for inode in some(inodes):
            yield inode, {atom: count for atom, count in atoms.items() if atom.inode in (inode, -1)}
    elif mode == "one missing":
        for atom in some(atoms):
            yield atom, {**atoms, atom: chance.randrange(atoms[atom])}
    elif mode == "one present":
        for atom in some(atoms):
            yield atom, {atom: chance.randint(1, atoms[atom])}
    elif mode == "random":
        for number in range(random_count):
            share = chance.choice((0.1, 0.5, 0.9))
            kept = {
                atom: chance.randint(1, count) if chance.random() < 0.5 else count
                for atom, count in atoms.items()
                if chance.random() < share
            }
            yield f"{number}, {len(kept)} of {len(atoms)}", kept
    else:
        raise ValueError(f"mode: found {mode!r}; allowed are {', '.join(MODES)}")
