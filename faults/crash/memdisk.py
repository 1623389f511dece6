"""A disk in memory, on which thousands of stores per minute are opened, killed and compared.

`MemDisk`
    Implements `disk.Disk` over a tree in memory, made from what a power cut left (`power_cut.Folder`) or from a
    real folder. Only the two lock files are real: they do not go through `Disk`, and lie in a folder at the same path.
`MemKillDisk`, `MemRecordingDisk`
    The disks of `crash.simdisk` over such a tree.

`test_memdisk.py` compares it with the real disk.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crash.power_cut import SECTOR_SIZE, FileContent, Folder, Replay, Write
from crash.simdisk import FailDisk, RecordingDisk
from messagestore.errors import NotAStoreError
from messagestore.files.disk import Disk, File

_FREE = 1 << 40
_PAGE_SIZE = 4096
LOCK_FILES = ("lock", os.path.join("spark", "writer.lock"))

Tree = dict[str, bytes]
"""Path below the root -> bytes; a folder ends with a slash and has none."""


def as_content(data: bytes) -> tuple[int, dict[int, bytes]]:
    """Return the bytes of a file as a `Folder` has them: without the sectors that hold only zeros."""
    starts = range(0, len(data), SECTOR_SIZE)
    sectors = {start // SECTOR_SIZE: data[start : start + SECTOR_SIZE] for start in starts}
    return len(data), {number: sector for number, sector in sectors.items() if sector.count(0) != len(sector)}


class Node:
    """The contents of a file."""

    __slots__ = ("data", "number")

    def __init__(self, number: int, data: bytearray) -> None:
        self.number = number
        self.data = data


class MemFile(File):
    """An open file of a `MemDisk`; there is no descriptor."""

    __slots__ = ("node",)

    def __init__(self, node: Node, path: str, writable: bool) -> None:
        self._fd = -1
        self.node = node
        self.path = path
        self.writable = writable
        self.inode = node.number
        self.device = 0

    def close(self) -> None:
        pass


class MemDisk(Disk):
    """A tree in memory at the path `root`.

    Parameters
    ----------
    root : path
        A real folder, created here, for the lock files; everything else is in memory. Paths above it are read from the
        real disk.
    content : Folder | None
        The content as in `power_cut.Image`; None: an empty folder.
    """

    def __init__(self, root: str | os.PathLike[str], content: Folder | None = None) -> None:
        self.root = self.top = os.path.realpath(root)
        make_lock_folder(self.root)
        self.nodes: dict[str, Node | None] = {self.root: None}  # None: a folder
        self.children: dict[str, set[str]] = {self.root: set()}
        self.numbers = itertools.count(1)
        self.folder_numbers: dict[str, int] = {self.root: 0}
        if content is not None:
            self._build(self.root, content)
        super().__init__()

    def _build(self, path: str, folder: Folder) -> None:
        for name, entry in folder.items():
            child = f"{path}/{name}"
            self.children[path].add(name)
            if isinstance(entry, dict):
                self._add_folder(child)
                self._build(child, entry)
                continue
            size, sectors = entry
            data = bytearray(size)
            for number, sector in sectors.items():
                start = number * SECTOR_SIZE
                if start < size and sector:
                    part = sector[: size - start]
                    data[start : start + len(part)] = part
            self.nodes[child] = Node(next(self.numbers), data)

    def _add_folder(self, path: str) -> None:
        self.nodes[path] = None
        self.children[path] = set()
        self.folder_numbers[path] = next(self.numbers)

    # ---- beside the interface of `Disk`

    def tree(self) -> Tree:
        """Return everything that exists, except the lock files."""
        skip = len(self.root) + 1
        return {
            path[skip:] + ("/" if node is None else ""): b"" if node is None else bytes(node.data)
            for path, node in self.nodes.items()
            if path != self.root
        }

    def content(self) -> Folder:
        """Return everything that exists, as the initial content of another disk."""
        return self._content(self.root)

    def _content(self, path: str) -> Folder:
        found: Folder = {}
        for name in self.children[path]:
            node = self.nodes[f"{path}/{name}"]
            if node is None:
                found[name] = self._content(f"{path}/{name}")
                continue
            found[name] = as_content(bytes(node.data))
        return found

    def node(self, relative: str) -> bytearray:
        """Return the bytes of a file, to be damaged."""
        found = self.nodes[f"{self.root}/{relative}"]
        assert found is not None
        return found.data

    def put_file(self, relative: str, data: bytes) -> None:
        """Create or replace a file, and the folders that it needs, without the store's knowledge."""
        path = f"{self.root}/{relative}"
        missing = []
        parent = os.path.dirname(path)
        while parent not in self.nodes:
            missing.append(parent)
            parent = os.path.dirname(parent)
        for folder in reversed(missing):
            self.children[os.path.dirname(folder)].add(os.path.basename(folder))
            self._add_folder(folder)
        self.children[os.path.dirname(path)].add(os.path.basename(path))
        self.nodes[path] = Node(next(self.numbers), bytearray(data))

    def remove_tree(self, relative: str) -> None:
        """Remove a file or a folder with all its contents."""
        path = f"{self.root}/{relative}"
        for name in list(self.children.get(path, ())):
            self.remove_tree(f"{relative}/{name}")
        self.children.pop(path, None)
        self.children[os.path.dirname(path)].discard(os.path.basename(path))
        del self.nodes[path]

    def write_to(self, target: Path) -> None:
        """Create the same tree on the real disk."""
        for name, data in sorted(self.tree().items()):
            path = target / name
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    # ---- paths

    def _find(self, path: str | os.PathLike[str]) -> tuple[str, Node | None]:
        """Return the file or folder at a path."""
        text = os.fspath(path)
        try:
            return text, self.nodes[text]
        except KeyError:
            raise self._missing(text) from None

    def _missing(self, path: str) -> OSError:
        parent = os.path.dirname(path)
        while parent and parent != "/" and parent not in self.nodes:
            parent = os.path.dirname(parent)
        kind = NotADirectoryError if self.nodes.get(parent) is not None else FileNotFoundError
        number = errno.ENOTDIR if kind is NotADirectoryError else errno.ENOENT
        return kind(number, os.strerror(number), path)

    def _parent(self, path: str) -> str:
        parent = os.path.dirname(path)
        if self.nodes.get(parent, self) is not None:
            raise self._missing(path)
        return parent

    def _is_inside(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + "/")

    # ---- the interface of `Disk`

    def open(self, path: str | Path, *, writable: bool = False) -> File:
        text, node = self._find(path)
        if node is None:
            raise NotAStoreError(f"{text}: found a link, FIFO or folder where a file must be", path=text)
        return MemFile(node, text, writable)

    def open_new(self, path: str | Path, size: int) -> File:
        text = os.fspath(path)
        parent = self._parent(text)
        if text in self.nodes:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), text)
        node = self.nodes[text] = Node(next(self.numbers), bytearray(size))
        self.children[parent].add(os.path.basename(text))
        return MemFile(node, text, True)

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        view = memoryview(data).cast("B")
        assert isinstance(file, MemFile)
        target = file.node.data
        end = position + len(view)
        if end > len(target):
            target.extend(bytes(end - len(target)))
        target[position:end] = view

    def pread(self, file: File, size: int, position: int) -> bytes:
        assert isinstance(file, MemFile)
        if size < 0 or position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), file.path)
        return bytes(file.node.data[position : position + size])

    def pread_into(self, file: File, buffer: memoryview, position: int) -> int:
        buffer = buffer.cast("B")
        data = self.pread(file, len(buffer), position)
        buffer[: len(data)] = data
        return len(data)

    def fdatasync(self, file: File) -> None:
        pass

    def start_writeback(self, file: File, position: int, size: int) -> None:
        pass

    def _device(self, _folder: str) -> int:
        return 0

    def fsync_dir(self, path: str | Path) -> None:
        if self._is_inside(os.fspath(path)) and self._find(path)[1] is not None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))

    def syncfs(self, file: File) -> None:
        pass

    def rename(self, source: str | Path, target: str | Path) -> None:
        old, new = os.fspath(source), os.fspath(target)
        self._parent(old)
        parent = self._parent(new)
        node = self._find(old)[1]
        if node is None:
            self._rename_folder(old, new)
            return
        if old.startswith(f"{new}/"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), old)
        if self.nodes.get(new, self) is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), new)
        del self.nodes[old]
        self.children[os.path.dirname(old)].discard(os.path.basename(old))
        self.nodes[new] = node
        self.children[parent].add(os.path.basename(new))

    def _rename_folder(self, old: str, new: str) -> None:
        if new in self.nodes:
            raise AssertionError(f"{new}: the store gives a folder a name that is free")
        below = [path for path in self.nodes if path == old or path.startswith(f"{old}/")]
        for path in below:
            name = new + path.removeprefix(old)
            self.nodes[name] = self.nodes.pop(path)
            for table in (self.children, self.folder_numbers):
                if path in table:
                    table[name] = table.pop(path)  # type: ignore[index,assignment] # each keeps its own values
        self.children[os.path.dirname(old)].discard(os.path.basename(old))
        self.children[os.path.dirname(new)].add(os.path.basename(new))

    def rmdir(self, path: str | Path) -> None:
        text, node = self._find(path)
        if node is not None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), text)
        if self.children[text]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), text)
        del self.nodes[text], self.children[text], self.folder_numbers[text]
        self.children[os.path.dirname(text)].discard(os.path.basename(text))

    def unlink(self, path: str | Path) -> None:
        text, node = self._find(path)
        if node is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), text)
        del self.nodes[text]
        self.children[os.path.dirname(text)].discard(os.path.basename(text))

    def mkdir(self, path: str | Path) -> None:
        text = os.fspath(path)
        if text in self.nodes:
            if self.nodes[text] is not None:
                raise NotAStoreError(f"{text}: found a file where a folder must be", path=text)
            return
        parent = self._parent(text)
        self._add_folder(text)
        self.children[parent].add(os.path.basename(text))

    def fallocate(self, file: File, size: int) -> None:
        assert isinstance(file, MemFile)
        if size > len(file.node.data):
            file.node.data.extend(bytes(size - len(file.node.data)))

    def punch(self, file: File, position: int, size: int) -> None:
        assert isinstance(file, MemFile)
        end = min(position + size, len(file.node.data))
        if position < end:
            file.node.data[position:end] = bytes(end - position)

    def size(self, path: str | Path) -> int:
        node = self._find(path)[1]
        return _PAGE_SIZE if node is None else len(node.data)

    def modified_s(self, path: str | Path) -> float:
        return time.time()

    def exists(self, path: str | Path) -> bool:
        text = os.fspath(path)
        return text in self.nodes or (not self._is_inside(text) and super().exists(text))

    def names(self, path: str | Path) -> list[str]:
        return sorted(self.children.get(os.fspath(path), ()))

    def entries(self, path: str | Path) -> list[tuple[str, bool]]:
        text = os.fspath(path)
        return [(name, self.nodes[f"{text}/{name}"] is None) for name in sorted(self.children.get(text, ()))]

    def is_folder(self, path: str | Path) -> bool:
        text = os.fspath(path)
        return self.nodes.get(text, self) is None or (not self._is_inside(text) and super().is_folder(text))

    def open_folder(self, path: str | Path) -> File:
        text, node = self._find(path)
        if node is not None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), text)
        return MemFile(Node(self.folder_numbers[text], bytearray()), text, False)

    def folder_at_path(self, folder: File) -> bool:
        return self.nodes.get(folder.path, self) is None and self.folder_numbers[folder.path] == folder.inode

    def hold_root(self, root: str, file_mode: int | None = None) -> None:
        """Do nothing, because no folder in memory is renamed."""

    def at_path(self, file: File) -> bool:
        if not isinstance(file, MemFile):
            return super().at_path(file)  # for a lock file
        return self.nodes.get(file.path) is file.node

    def identity_at(self, path: str | Path) -> tuple[int, int] | None:
        node = self.nodes.get(os.fspath(path))
        return None if node is None else (0, node.number)

    def linked(self, file: File) -> bool:
        return self.at_path(file) if isinstance(file, MemFile) else super().linked(file)

    def check_folders(self, path: str | Path) -> None:
        """Do nothing, because there are no links."""

    def data_ranges(self, file: File, start: int, end: int) -> Iterator[tuple[int, int]]:
        assert isinstance(file, MemFile)
        data = file.node.data
        end = min(end, len(data))
        if start >= end or not any(data[start:end]):
            return
        begin = None
        for page in range(start - start % _PAGE_SIZE, end, _PAGE_SIZE):
            low, high = max(page, start), min(page + _PAGE_SIZE, end)
            if any(data[low:high]):
                begin = low if begin is None else begin
            elif begin is not None:
                yield begin, low
                begin = None
        if begin is not None:
            yield begin, end

    def free(self, path: str | Path) -> int:
        return _FREE

    def free_names(self, path: str | Path) -> int | None:
        return None

    def used_percent(self, path: str | Path) -> int:
        return 1

    def length(self, file: File) -> int:
        assert isinstance(file, MemFile)
        return len(file.node.data)


class MemKillDisk(FailDisk, MemDisk):
    """`crash.simdisk.FailDisk` (and so `KillDisk`) in memory."""

    def __init__(
        self, root: str | os.PathLike[str], content: Folder | None = None, fail_at: int | None = None, **faults: Any
    ) -> None:
        FailDisk.__init__(self, fail_at, **faults)
        MemDisk.__init__(self, root, content)


class MemRecordingDisk(RecordingDisk, MemDisk):
    """`crash.simdisk.RecordingDisk` in memory."""

    def __init__(
        self, root: str | os.PathLike[str], content: Folder | None = None, fail_at: int | None = None, **faults: Any
    ) -> None:
        MemDisk.__init__(self, root, content)
        RecordingDisk.__init__(self, self.root, fail_at, **faults)

    @classmethod
    def after_kill(cls, root: str | os.PathLike[str], before: RecordingDisk, cut: int) -> MemRecordingDisk:
        """Return the disk as a process left it that was killed after `cut` operations of `before`.

        The next process sees everything; what was not synced before the kill is not safe now.
        """
        replay = before._replay_at(cut)
        disk = cls(root, replay.content(replay.atoms()))
        paths = {inode: f"{disk.root}/{path}" for inode, path in replay.paths().items()} | {replay.root: disk.root}
        disk._ids = {disk._path_key(path): inode for inode, path in paths.items()}
        disk._root = replay.root
        disk._base_files = {inode: file.copy() for inode, file in replay.files.items()}
        disk._base_folders = {inode: dict(names) for inode, names in replay.folders.items()}
        disk._base_changes = list(replay.changes)
        disk._numbers = itertools.count(max([*replay.files, *replay.folders]) + 1)
        disk._replay = Replay(disk._root, disk._base_files, disk._base_folders, disk._base_changes)
        return disk

    def _take_in(self, path: str) -> int:
        inode = self._new_id(path)
        entries = self._base_folders[inode] = {}
        for name in self.children[path]:
            child = f"{path}/{name}"
            entries[name] = self._take_in(child) if self.nodes[child] is None else self._take_in_file(child)
        return inode

    def _take_in_file(self, path: str) -> int:
        inode, node = self._new_id(path), self.nodes[path]
        assert node is not None
        content = self._base_files[inode] = FileContent(len(node.data))
        data = bytes(node.data)
        for start in range(0, len(data), SECTOR_SIZE):
            sector = data[start : start + SECTOR_SIZE]
            if sector.count(0) != len(sector):
                content.sectors[start // SECTOR_SIZE] = sector
        return inode

    def _path_key(self, path: str) -> tuple[int, int]:
        node = self._find(path)[1]
        return (0, node.number) if node is not None else (1, self.folder_numbers[path])

    def _file_key(self, file: File) -> tuple[int, int]:
        return 0, file.inode


def make_lock_folder(root: str) -> None:
    """Create a real folder for the lock files of a store that is otherwise in memory."""
    os.makedirs(os.path.join(root, "spark"), exist_ok=True)


def half_write(disk: RecordingDisk, cut: int) -> Write | None:
    """Return the operation after the first `cut`, if it is a write to a file that has a name."""
    for number, event in disk._events:
        if number == cut and isinstance(event, Write):
            return event if event.inode in disk._replay_at(cut).paths() else None
    return None


def with_half_write(disk: RecordingDisk, cut: int, content: Folder, root: Path) -> Folder:
    """Return the content with half of the next operation's write completed."""
    event = half_write(disk, cut)
    assert event is not None
    half = MemDisk(root, content)
    path = f"{half.root}/{disk._replay_at(cut).paths()[event.inode]}"
    half.pwrite(half.open(path, writable=True), event.data[: len(event.data) // 2], event.position)
    return half.content()
