"""A model of what a power cut may leave of the changes to a folder.

The model of a disk takes operations one by one. It shows what is safe and what is not, and builds an `Image` for any
choice of what survives. `crash.simdisk.RecordingDisk` feeds it.

The model assumes that a power cut may leave the following:

- A file's bytes and size are safe once `fdatasync` of it, or `syncfs`, has returned. Of what was written since, any
  set of 512-byte sectors may survive; a sector is as it was after one of the writes to it, in their order, and is
  never a mixture of an earlier and a later state. Punching a hole counts as writing zeros.
- A size that a write increased may be lost with or without the bytes: bytes after the size are then missing, and
  bytes that are missing below it are zero. The size given to `open_new` comes with the file: it and a later rename are
  both in the file system's journal, which keeps their order.
- A name (created, renamed, unlinked; a folder's, too) is safe once `fsync_dir` of its folder, or `syncfs`, has
  returned: syncing the file alone is not enough. Of the other changes, any set may survive, but a name is as it was
  after one of the changes to it, in their order. A rename is atomic, changes two names, and belongs to the folder into
  which it renames: it may or may not survive, and the data of a renamed file that was not synced may be zero.
- After a failed sync, nothing is known, and a later successful sync proves nothing about what was written before the
  failed one, until its sector is written again.
- What was in the folder when recording began is safe. Files that do not go through `Disk` (locks) are not recorded.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

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
POWER_MODES = tuple(mode for mode in MODES if mode != "all")

T = TypeVar("T")

# ---- operations


@dataclass(frozen=True)
class Write:
    inode: int
    position: int
    data: bytes


@dataclass(frozen=True)
class Punch:
    inode: int
    position: int
    size: int


@dataclass(frozen=True)
class Sync:
    inode: int | None  # None: everything, including names
    failed: bool = False


@dataclass(frozen=True)
class Create:
    inode: int
    size: int
    is_folder: bool = False


@dataclass(frozen=True)
class Name:
    """In `folder`, `name` now refers to `inode` (None: is removed), and the inode's previous name is removed."""

    folder: int
    name: str
    inode: int | None
    before: tuple[int, str] | None = None
    gone: int | None = None
    text: str = ""


@dataclass(frozen=True)
class SyncFolder:
    folder: int


Event = Write | Punch | Sync | Create | Name | SyncFolder


@dataclass
class FileContent:
    """The content of one inode: what is safe, and what came later."""

    size: int = 0
    sectors: dict[int, bytes] = field(default_factory=dict)
    pieces: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    """Sector -> (position in it, bytes), in order, not safe."""
    sizes: list[int] = field(default_factory=list)
    """Sizes to which it grew, not safe."""
    doomed: dict[int, int] = field(default_factory=dict)
    """Sector -> the number of its pieces whose fate a failed sync leaves unknown."""

    def copy(self) -> FileContent:
        pieces = {number: list(found) for number, found in self.pieces.items()}
        return FileContent(self.size, dict(self.sectors), pieces, list(self.sizes), dict(self.doomed))

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
        """Return a sector after the first `count` of its unsafe writes."""
        safe = self.sectors.get(number, b"")
        pieces = self.pieces.get(number, [])[:count]
        if not pieces:
            return safe
        data = bytearray(safe.ljust(SECTOR_SIZE, b"\0"))
        for within, piece in pieces:
            data[within : within + len(piece)] = piece
        return bytes(data)


class Atom(NamedTuple):
    """Something that a power cut may remove on its own; `key` is a sector, or the number of a change of a name."""

    kind: str  # "sector", "size" or "name"
    inode: int
    key: int


class Replay:
    """The disk at one moment: what is safe, and what is not."""

    def __init__(
        self,
        root: int,
        files: Mapping[int, FileContent],
        folders: Mapping[int, Mapping[str, int]],
        changes: Sequence[Name] = (),
    ) -> None:
        self.root = root
        self.files = {inode: file.copy() for inode, file in files.items()}
        self.folders = {inode: dict(names) for inode, names in folders.items()}
        self.changes = list(changes)

    def advance(self, event: Event) -> None:
        match event:
            case Write(inode, position, data):
                self.files[inode].write(position, data)
            case Punch(inode, position, size):
                self.files[inode].punch(position, size)
            case Create(inode, size, is_folder):
                if is_folder:
                    self.folders[inode] = {}
                elif inode in self.files:
                    self.files[inode].grow(size)
                else:
                    self.files[inode] = FileContent(size)
            case Name():
                self.changes.append(event)
            case SyncFolder(folder):
                self._make_safe({number for number, change in enumerate(self.changes) if change.folder == folder})
            case Sync(inode, failed):
                for file in self.files.values() if inode is None else (self.files[inode],):
                    file.sync_failed() if failed else file.sync()
                if inode is None and not failed:
                    self._make_safe(set(range(len(self.changes))))

    def _make_safe(self, numbers: set[int]) -> None:
        safe = with_earlier(self.changes, numbers)
        for number in sorted(safe):
            apply_change(self.folders, self.changes[number])
        self.changes = [change for number, change in enumerate(self.changes) if number not in safe]

    def atoms(self) -> dict[Atom, int]:
        """Return everything that is not safe, with the number of writes behind each atom."""
        found = {Atom("name", -1, number): 1 for number in range(len(self.changes))}
        for inode, file in self.files.items():
            if file.sizes:
                found[Atom("size", inode, 0)] = len(file.sizes)
            found.update({Atom("sector", inode, sector): len(pieces) for sector, pieces in file.pieces.items()})
        return found

    def paths(self) -> dict[int, str]:
        """Return where each file is, below the root, if everything survives."""
        names = {inode: dict(entries) for inode, entries in self.folders.items()}
        for change in self.changes:
            apply_change(names, change)
        found: dict[int, str] = {}

        def walk(folder: int, path: str) -> None:
            for name, inode in names[folder].items():
                found[inode] = f"{path}{name}"
                if inode in names:
                    walk(inode, f"{path}{name}/")

        walk(self.root, "")
        return found

    def content(self, kept: Mapping[Atom, int]) -> Folder:
        """Return the folder if, of what is not safe, only `kept` (atom -> how many of its writes) survives."""
        names = {inode: dict(entries) for inode, entries in self.folders.items()}
        survivors = {number for number in range(len(self.changes)) if kept.get(Atom("name", -1, number))}
        for number in sorted(with_earlier(self.changes, survivors)):
            apply_change(names, self.changes[number])
        return self._folder(self.root, names, kept)

    def _folder(self, inode: int, names: dict[int, dict[str, int]], kept: Mapping[Atom, int]) -> Folder:
        folder: Folder = {}
        for name, entry in names[inode].items():
            if entry in self.folders:
                folder[name] = self._folder(entry, names, kept)
                continue
            file = self.files[entry]
            count = kept.get(Atom("size", entry, 0), 0)
            size = file.sizes[count - 1] if count else file.size
            sectors = dict(file.sectors)
            for number in file.pieces:
                sectors[number] = file.sector(number, kept.get(Atom("sector", entry, number), 0))
            folder[name] = (size, sectors)
        return folder


Folder = dict[str, "tuple[int, dict[int, bytes]] | Folder"]


def with_earlier(changes: Sequence[Name], numbers: set[int]) -> set[int]:
    """Add all earlier changes of the same names to `numbers`, because a name passes through its states in order."""
    found: set[int] = set()
    names: set[tuple[int, str]] = set()
    for number in range(len(changes) - 1, -1, -1):
        change = changes[number]
        own = {(change.folder, change.name)} | ({change.before} if change.before is not None else set())
        if number in numbers or own & names:
            found.add(number)
            names |= own
    return found


def apply_change(folders: dict[int, dict[str, int]], change: Name) -> None:
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
        Which of the unsafe changes survived; for messages.
    atoms : mapping
        Everything that was not safe: atom -> the number of its writes.
    kept : mapping
        What survived of it: atom -> the number of its surviving writes.
    """

    cut: int
    label: str
    atoms: Mapping[Atom, int] = field(repr=False)
    kept: Mapping[Atom, int] = field(repr=False)
    _replayed: Callable[[], Replay] = field(repr=False)

    @cached_property
    def folder(self) -> Folder:
        """Return the contents, built on demand."""
        return self._replayed().content(self.kept)

    @property
    def lost(self) -> list[int]:
        """Return the numbers of the atoms that did not survive, or not with all of their writes."""
        return [number for number, (atom, count) in enumerate(self.atoms.items()) if self.kept.get(atom, 0) < count]

    def with_lost(self, numbers: Collection[int]) -> Image:
        """Return the same cut in which only these of `lost` did not survive."""
        kept = {
            atom: self.kept.get(atom, 0) if number in numbers else count
            for number, (atom, count) in enumerate(self.atoms.items())
        }
        return Image(self.cut, f"{self.label}, lost {len(numbers)} of {len(kept)}", self.atoms, kept, self._replayed)

    def build(self, target: str | Path) -> Path:
        """Build the folder at `target`, which must be missing or empty."""
        path = Path(target)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ValueError(f"{path}: is not empty")
        _build(path, self.folder)
        return path

    def __str__(self) -> str:
        return f"power cut after operation {self.cut}, {self.label}"


def _build(path: Path, folder: Folder) -> None:
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
    """Yield neighbouring sectors joined, without sectors of zeros."""
    first, parts = 0, list[bytes]()
    for number, data in sorted(sectors.items()):
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


# ---- choices of what survives

Choice = tuple["str | Atom | int", Mapping[Atom, int]]


def choices(
    mode: str, atoms: Mapping[Atom, int], chance: random.Random, limit: int, random_count: int
) -> Iterator[Choice]:
    """Yield what survives in one mode: a label, and the number of writes of each atom."""

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
    elif mode == "one file present":  # with all names, because without its own the file would not be visible
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


def with_names_in_order(
    kept: Mapping[Atom, int], atoms: Mapping[Atom, int], label: str | Atom | int
) -> dict[Atom, int]:
    """Return `kept` with only the first changes of names.

    A change that was to survive alone brings the earlier ones with it.
    """
    names = [atom for atom in atoms if atom.kind == "name"]
    if isinstance(label, Atom) and label in names and len(kept) == 1:
        count = names.index(label) + 1
    else:
        count = next((number for number, atom in enumerate(names) if not kept.get(atom)), len(names))
    chosen = {atom: number for atom, number in kept.items() if atom.kind != "name"}
    return {**chosen, **dict.fromkeys(names[:count], 1)}
