"""What a backup folder holds: one copy of the log and of the queues, and the points to which they can be restored.

    <target>/commitlog/00000000000000000000          a segment, as long as what was copied of it
    <target>/consumequeue/<topic>/<queue id>/...     units, likewise
    <target>/points/000001.json                      a point: how far each file counts, its CRC-32, and the small files
    <target>/points/unfinished.json                  what a backup that was killed has already copied and synced
    <target>/lock

The files only grow, and each point is a prefix of the next, so a point costs what came since the one before. If a queue
was deleted and made again, its new files are in `consumequeue@<number of the point>`.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from messagestore.errors import ConfigError, CorruptionError, NotAStoreError
from messagestore.files.disk import Disk, replace_file
from messagestore.files.writer_lock import WriterLock
from messagestore.format.record import crc32
from messagestore.signal_handlers import pass_on

FORMAT_VERSION = 1
UNFINISHED = "unfinished"
_NAME = re.compile(r"(\d{6,})\.json")
_MOST_SIZE = 1 << 30


@dataclass(frozen=True, slots=True)
class Point:
    """A moment to which a store can be restored.

    Parameters
    ----------
    number : int
        From 1.
    time_ms : int
        When the backup looked how far the store reaches, in ms since 1970.
    store_id : str
        The store's id; empty for a broker's store.
    known_ids : list of str
        The ids of the stores whose batches are known there.
    begin, end : int
        Physical offsets of the log.
    segment_size : int
    identity : dict
        The fields of `spark/store.json`; empty for a broker's store.
    files : dict of str to (int, int)
        Path below the target -> how many bytes of the file count, and their CRC-32.
    queues : dict of str to dict of str to (int, int, int)
        Topic -> queue id -> the point with which its files begin (0: they are in `consumequeue`), the queue's end, and
        the size of its files in the store.
    small : dict of str to str
        Path below the root -> content, in base64.
    new_bytes : int
        How many bytes were copied.
    """

    number: int
    time_ms: int
    store_id: str
    known_ids: list[str]
    begin: int
    end: int
    segment_size: int
    identity: dict[str, Any]
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    queues: dict[str, dict[str, tuple[int, int, int]]] = field(default_factory=dict)
    small: dict[str, str] = field(default_factory=dict)
    new_bytes: int = 0

    @property
    def messages(self) -> int:
        """The number of messages in all queues that were ever put, as the ends of the queues count them."""
        return sum(end for queues in self.queues.values() for _, end, _ in queues.values())

    def small_files(self) -> Mapping[str, bytes]:
        """Path below the root -> content."""
        return {path: base64.b64decode(text) for path, text in self.small.items()}

    def to_bytes(self) -> bytes:
        """The file: one line of JSON, and one with its CRC-32."""
        text = json.dumps({"formatVersion": FORMAT_VERSION, **asdict(self)}, separators=(",", ":")).encode()
        return text + f"\n{crc32(text):08x}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Point:
        """Parse the file.

        Raises
        ------
        CorruptionError
            The bytes are damaged.
        NotAStoreError
            Another release wrote the file.
        """
        text, _, crc = data.partition(b"\n")
        if crc.strip() != f"{crc32(text):08x}".encode():
            raise CorruptionError(
                path, 0, "a point of a backup", "bytes that do not agree with their CRC-32", hint="Use another point."
            )

        fields = json.loads(text)
        version = fields.pop("formatVersion")
        if version != FORMAT_VERSION:
            raise NotAStoreError.of_version(path, version, FORMAT_VERSION)

        fields["files"] = {name: (size, crc) for name, (size, crc) in fields["files"].items()}
        return cls(**fields)


class Target:
    """A folder with backups.

    Parameters
    ----------
    path : str
    disk : Disk
    """

    def __init__(self, path: str, disk: Disk) -> None:
        self.path, self.disk = os.path.abspath(path), disk
        self.folder = os.path.join(self.path, "points")

    def lock(self, what: str) -> WriterLock:
        """Make the folder if it is missing, and take its lock: one process changes it at a time.

        Raises
        ------
        StoreLockedError
            Another process backs up or prunes there.
        NotAStoreError
            The folder holds something else.
        """
        names = set(self.disk.names(self.path))
        if names and not names & {"points", "lock"}:
            raise NotAStoreError(
                f"{self.path}: found a folder with {', '.join(sorted(names)[:5])} in it; a backup needs a missing or "
                f"empty folder, or one with backups. Give another path",
                path=self.path,
            )
        self.disk.make_folders(self.folder)
        if not self.numbers():
            self.disk.sync_names_above(self.folder)
        lock = WriterLock(os.path.join(self.path, "lock"))
        lock.acquire(0, description=what)
        return lock

    def place(self, path: str) -> str:
        """Where a file of the backup is."""
        return os.path.join(self.path, path)

    def numbers(self) -> list[int]:
        """The numbers of the points, ascending."""
        matches = (_NAME.fullmatch(name) for name in self.disk.names(self.folder))
        return sorted(int(match[1]) for match in matches if match is not None)

    def read(self, number: int) -> Point:
        """A point.

        Raises
        ------
        CorruptionError
        """
        return self._read(f"{number:06d}")

    def unfinished(self) -> Point | None:
        """What a killed backup has left; None: nothing."""
        try:
            return self._read(UNFINISHED)
        except FileNotFoundError as error:
            pass_on(error)
            return None

    def _read(self, name: str) -> Point:
        path = os.path.join(self.folder, f"{name}.json")
        return Point.from_bytes(self.disk.read(path, _MOST_SIZE), path)

    def write(self, point: Point, *, finished: bool) -> None:
        """Write a point, whole or not at all, and sync it."""
        name = f"{point.number:06d}" if finished else UNFINISHED
        via = os.path.join(self.folder, "new")
        replace_file(self.disk, os.path.join(self.folder, f"{name}.json"), point.to_bytes(), via=via)

    def forget_unfinished(self) -> None:
        """Remove what tells a later backup what is already copied."""
        path = os.path.join(self.folder, f"{UNFINISHED}.json")
        if self.disk.exists(path):
            self.disk.unlink(path)


def target_of(path: str, disk: Disk | None = None) -> Target:
    """A folder that holds backups.

    Raises
    ------
    NotAStoreError
        It holds none.
    """
    target = Target(path, disk or Disk())
    if not target.disk.is_folder(target.folder):
        raise NotAStoreError(
            f"{target.path}: found no backup (no folder points). Give the folder to which `messagestore backup` wrote",
            path=target.path,
        )
    return target


def points(path: str, disk: Disk | None = None) -> list[Point]:
    """The points of a backup folder, the oldest first.

    Raises
    ------
    NotAStoreError
        There is no backup.
    CorruptionError
        A point is damaged.
    """
    target = target_of(path, disk)
    return [target.read(number) for number in target.numbers()]


def point_of(target: Target, number: int | None) -> Point:
    """The point with a number, or the newest.

    Raises
    ------
    ConfigError
        There is no such point.
    """
    numbers = target.numbers()
    if not numbers:
        raise ConfigError(
            f"{target.path}: the folder has no point yet: its first backup was not finished. Run it again", key="TARGET"
        )
    if number is not None and number not in numbers:
        newest = ", ".join(map(str, numbers[-10:]))
        raise ConfigError(f"--point: found {number}; {target.path} has {newest}", key="--point", value=number)
    return target.read(numbers[-1] if number is None else number)


def prune(path: str, keep: int, *, delete: bool = True, disk: Disk | None = None) -> tuple[list[int], int]:
    """Delete all points but the newest, and the files that only they need.

    Points share their files, so room comes free only where retention has deleted the oldest messages in the store, too.

    Parameters
    ----------
    path : str
    keep : int
        How many points stay, at least 1.
    delete : bool
        False: only say what would be deleted.

    Returns
    -------
    gone : list of int
        The numbers of the points.
    size : int
        The bytes of the files.

    Raises
    ------
    ConfigError
        Less than one point would stay.
    """
    if keep < 1:
        raise ConfigError(f"--keep: found {keep}; allowed is 1 or more", key="--keep", value=keep)
    target = target_of(path, disk)
    lock = target.lock("backup prune")
    try:
        numbers = target.numbers()
        gone, stay = numbers[:-keep], [target.read(number) for number in numbers[-keep:]]
        if not gone:
            return [], 0
        unfinished = target.unfinished()
        needed = {name for point in (*stay, *([unfinished] if unfinished else [])) for name in point.files}
        only = sorted({name for number in gone for name in target.read(number).files} - needed)
        files = [name for name in only if target.disk.exists(target.place(name))]
        size = sum(target.disk.size(target.place(name)) for name in files)
        if delete:
            for number in gone:  # first, so that no point lacks a file
                target.disk.unlink(os.path.join(target.folder, f"{number:06d}.json"))
            target.disk.fsync_dir(target.folder)
            for name in files:
                target.disk.unlink(target.place(name))
        return gone, size
    finally:
        lock.close()
