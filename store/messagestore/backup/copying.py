"""Takes a backup: what is new in the store goes to a folder, or all of it goes out as a stream.

    look at the store -> does the backup end where this store goes on? -> copy tails and new files
        -> sync -> read back and compare -> write the point

A kill leaves the points as they were. What was copied and synced before it is in `unfinished.json`, and the next run
goes on there.
"""

from __future__ import annotations

import base64
import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import BinaryIO, NamedTuple

from messagestore.backup.points import Point, Target
from messagestore.backup.snapshot import Snapshot
from messagestore.errors import ConfigError, CorruptionError, NotAStoreError, StoreWentBackwardsError
from messagestore.files.disk import Disk, File
from messagestore.format.layout import FILLER_UNIT_SIZE, UNIT
from messagestore.format.record import crc32
from messagestore.signal_handlers import pass_on

Progress = Callable[[int, int], None]
_PIECE_SIZE = 1 << 20
"""What is copied at once stays in the processor's cache until its CRC is computed."""
_WRITEBACK_SIZE = 32 << 20
_COMPARED_SIZE = 64 * 1024
"""How many bytes before the end of a backup must be the same in the store."""
_MANY_FILES = 64
"""From this number on, one syncfs is faster than syncing each file."""


class _Part(NamedTuple):
    """A file of the backup, from the byte on at which something is new.

    Parameters
    ----------
    path : str
        Below the target.
    start, size : int
        The file has `size` bytes, of which those from `start` on are new.
    crc : int
        Of what is already there.
    read : function
        Gives some bytes at a position of the file.
    begins_log : int | None
        The physical offset of a segment; None: the file is a queue's.
    """

    path: str
    start: int
    size: int
    crc: int
    read: Callable[[int, int], bytes]
    begins_log: int | None = None


def back_up(
    root: str,
    target: str,
    *,
    disk: Disk | None = None,
    target_disk: Disk | None = None,
    progress: Progress | None = None,
) -> Point:
    """Copy what a store has, and the backup folder has not. The store may have writers, or a broker; it is only read.

    Parameters
    ----------
    root : str
    target : str
        A missing or empty folder, or one with backups of this store.
    disk, target_disk : Disk
        For tests.
    progress : function
        Called with the bytes that were copied and the bytes in total.

    Returns
    -------
    Point
        What can be restored now: every message below `end`, of each batch all or none.

    Raises
    ------
    NotAStoreError
        There is no store, or the target holds something else, or backups of another store.
    StoreWentBackwardsError
        The store lacks what was backed up, or has something else there.
    StoreLockedError
        Another process backs up to this folder.
    CorruptionError
        What was written could not be read back, or the store cannot be read. No point was made.
    """
    backup = Target(target, target_disk or Disk())
    _check_apart(os.path.abspath(root), backup.path)

    time_ms = time.time_ns() // 1_000_000
    snapshot = Snapshot(root, disk or Disk())
    try:
        lock = backup.lock("backup")
        try:
            return _Backup(snapshot, backup, time_ms, progress).run()
        finally:
            lock.close()
    finally:
        snapshot.close()


def _check_apart(root: str, target: str) -> None:
    if f"{os.path.realpath(target)}/".startswith(f"{os.path.realpath(root)}/"):
        raise ConfigError(
            f"{target}: found a folder inside the store {root}; allowed is one outside it, best on another disk",
            key="TARGET",
            value=target,
        )


def _empty(snapshot: Snapshot, number: int, time_ms: int) -> Point:
    """A point of this moment without files."""
    identity = snapshot.identity
    return Point(
        number=number,
        time_ms=time_ms,
        store_id=snapshot.store_id,
        known_ids=sorted(snapshot.view.known_ids),
        begin=snapshot.begin,
        end=snapshot.end,
        segment_size=snapshot.segment_size,
        identity={} if identity is None else identity.to_fields(),
    )


class _Backup:
    """One backup to a folder."""

    def __init__(self, snapshot: Snapshot, target: Target, time_ms: int, progress: Progress | None) -> None:
        self._snapshot, self._target, self._progress = snapshot, target, progress
        numbers = target.numbers()
        self._last = target.read(numbers[-1]) if numbers else None
        left = target.unfinished()
        self._known = left if left is not None and left.number == (numbers[-1] if numbers else 0) + 1 else self._last
        if self._known is not None:
            self._check_goes_on(self._known)
        self._point = _empty(snapshot, (numbers[-1] if numbers else 0) + 1, time_ms)
        self._files: dict[str, tuple[int, int]] = dict(self._known.files) if self._known is not None else {}
        self._begin = snapshot.begin
        self._done = 0

    def run(self) -> Point:
        queues, parts = self._queues()
        log_parts = list(self._log_parts())
        total = sum(part.size - part.start for part in (*log_parts, *parts))
        copied = [part for part in (*log_parts, *parts) if self._copy(part, total)]
        self._sync(copied)
        for part in copied:
            self._check_back(part)
        self._snapshot.check_place()

        used = {
            f"commitlog/{start:020d}" for start in range(self._begin, self._point.end, self._point.segment_size or 1)
        }
        for (topic, queue_id), (generation, _, _) in queues.items():
            used |= {_moved(path, generation) for _, path, _ in self._snapshot.queue_files(topic, queue_id)}
        point = replace(
            self._point,
            begin=self._begin,
            files={name: size_and_crc for name, size_and_crc in sorted(self._files.items()) if name in used},
            queues=_by_topic(queues),
            small={path: base64.b64encode(data).decode() for path, data in self._snapshot.small.items()},
            new_bytes=self._done,
        )
        self._target.write(point, finished=True)
        self._target.forget_unfinished()
        return point

    # ---- does the store go on where the backup ends?

    def _check_goes_on(self, last: Point) -> None:
        snapshot = self._snapshot
        if last.store_id and last.store_id not in snapshot.view.known_ids:
            raise NotAStoreError(
                f"{self._target.path}: found backups of store {last.store_id}, and this is store "
                f"{snapshot.store_id or 'without an id'}. Back it up to a folder of its own",
                path=self._target.path,
            )
        ends = [int(os.path.basename(name)) + size for name, (size, _) in last.files.items() if _is_log(name)]
        end = max(ends, default=0)
        if end <= snapshot.begin:
            return  # retention has deleted all that was backed up
        fault = "" if snapshot.end >= end else f"the store ends at {snapshot.end}"
        start = max(snapshot.begin, (end - 1) // last.segment_size * last.segment_size, end - _COMPARED_SIZE)
        if last.begin <= start and (not fault or snapshot.view.known_end is None):
            first = (start - last.begin) // last.segment_size * last.segment_size + last.begin
            with self._target.disk.open(self._target.place(f"commitlog/{first:020d}")) as file:
                ours = self._target.disk.pread(file, end - start, start - first)
            if snapshot.log_bytes(start, end - start) != ours:
                fault = fault or f"the store has other bytes in front of {end}"
            else:  # a broker has deleted the topics of the last records
                fault, snapshot.end = "", max(snapshot.end, end)
        if fault:
            raise StoreWentBackwardsError(
                f"{self._target.path}: the backup reaches to {end}, and {fault}: the store was cut, or is an older "
                f"copy. Back it up to another folder, and keep this one until you know what was lost"
            )

    # ---- what is to be copied

    def _log_parts(self) -> Iterator[_Part]:
        for start, path, size in self._snapshot.log_files():
            done, crc = self._files.get(path, (0, 0))
            if done < size:
                read = _reader(self._snapshot.log_bytes, start)
                yield _Part(path, done, size, crc, read, begins_log=start)

    def _queues(self) -> tuple[dict[tuple[str, int], tuple[int, int, int]], list[_Part]]:
        """The queues of the point, and what is new in their files."""
        queues: dict[tuple[str, int], tuple[int, int, int]] = {}
        parts: list[_Part] = []
        for topic, queue_id in self._snapshot.queues:
            files = self._snapshot.queue_files(topic, queue_id)
            generation = self._generation(topic, queue_id)
            end, size = self._snapshot.queues[topic, queue_id][1], self._snapshot.queue_file_size(topic, queue_id)
            queues[topic, queue_id] = generation, end, size

            for start, path, length in files:
                name = _moved(path, generation)
                done, crc = self._files.get(name, (0, 0))
                if done < length:
                    parts.append(_Part(name, done, length, crc, _unit_reader(self._snapshot, topic, queue_id, start)))
        return queues, parts

    def _generation(self, topic: str, queue_id: int) -> int:
        """The point with which the files of a queue begin: a new one if the queue was made again since the last."""
        last_point = self._known
        before = None if last_point is None else last_point.queues.get(topic, {}).get(str(queue_id))
        if before is None:
            # An earlier point may have had a queue with this name, and the last one none.
            folder = f"consumequeue/{topic}/{queue_id}"
            names = self._target.disk.names(self._target.place(folder))
            return self._point.number if any(f"{folder}/{name}" in self._every_name for name in names) else 0
        generation, end, size = before
        if not end:
            return generation
        now = self._snapshot.queues[topic, queue_id][1]
        start = (end - 1) * UNIT.size // size * size
        path = _moved(f"consumequeue/{topic}/{queue_id}/{start:020d}", generation)
        if now >= end and size == self._snapshot.queue_file_size(topic, queue_id):
            with self._target.disk.open(self._target.place(path)) as file:
                ours = self._target.disk.pread(file, UNIT.size, (end - 1) * UNIT.size - start)
            theirs = self._snapshot.unit_bytes(topic, queue_id, end - 1, end)
            gone = theirs == UNIT.struct.pack(0, FILLER_UNIT_SIZE, 0)  # retention took the file
            if ours == theirs or gone:
                return generation
        return self._point.number

    @cached_property
    def _every_name(self) -> frozenset[str]:
        """The files of all points."""
        return frozenset(name for number in self._target.numbers() for name in self._target.read(number).files)

    # ---- copying

    def _copy(self, part: _Part, total: int) -> bool:
        """Copy a file's new bytes; False if retention has deleted the segment meanwhile."""
        disk, place = self._target.disk, self._target.place(part.path)
        disk.make_folders(os.path.dirname(place))

        crc, position, started = part.crc, part.start, part.start
        with disk.open(place, writable=True) if disk.exists(place) else disk.open_new(place, 0) as file:
            while position < part.size:
                try:
                    piece = part.read(position, min(_piece(part), part.size - position))
                except FileNotFoundError as error:
                    pass_on(error)
                    self._gone(part)
                    return False
                if not piece:
                    raise CorruptionError(
                        self._snapshot.view.files.paths.root, position, f"more of {part.path}", "none"
                    )

                disk.pwrite(file, piece, position)
                crc, position = crc32(piece, crc), position + len(piece)
                if position - started >= _WRITEBACK_SIZE:
                    disk.start_writeback(file, started, position - started)
                    started = position
                self._done += len(piece)
                if self._progress is not None:
                    self._progress(self._done, total)

            if part.begins_log is not None:
                disk.fdatasync(file)
            else:  # so that the syncs of many small files share the work of the first one
                disk.start_writeback(file, started, position - started)

        self._files[part.path] = part.size, crc
        if part.begins_log is not None and part.size == self._point.segment_size:
            self._sync_folders([part])
            self._note()
        return True

    def _gone(self, part: _Part) -> None:
        """Begin the point behind a segment that retention has deleted."""
        if part.begins_log is None:
            raise CorruptionError(part.path, 0, "this file", "none")
        self._begin = part.begins_log + self._point.segment_size
        self._point = replace(self._point, end=max(self._point.end, self._begin))

    def _note(self) -> None:
        """Note what is copied and synced: whole segments. What is known of queues is what the last point says."""
        queues = {} if self._known is None else self._known.queues
        synced = {
            name: size_and_crc for name, size_and_crc in self._files.items() if _is_log(name) or self._was_known(name)
        }
        self._target.write(replace(self._point, begin=self._begin, files=synced, queues=queues), finished=False)

    def _was_known(self, name: str) -> bool:
        return self._known is not None and name in self._known.files

    def _sync(self, parts: list[_Part]) -> None:
        disk, units = self._target.disk, [part for part in parts if part.begins_log is None]
        if len(units) > _MANY_FILES:
            with disk.open(self._target.place(units[0].path)) as file:
                disk.syncfs(file)
            return
        for part in units:
            with disk.open(self._target.place(part.path), writable=True) as file:
                disk.fdatasync(file)
        self._sync_folders(parts)

    def _sync_folders(self, parts: list[_Part]) -> None:
        """Sync the names of files, and of all folders above them, which a killed run may have made and not synced."""
        folders = {self._target.path}
        for part in parts:
            folder = os.path.dirname(part.path)
            while folder:
                folders.add(self._target.place(folder))
                folder = os.path.dirname(folder)
        for folder in sorted(folders, reverse=True):
            self._target.disk.fsync_dir(folder)

    def _check_back(self, part: _Part) -> None:
        """Read back what was written, and compare its CRC-32."""
        size, expected = self._files[part.path]
        with self._target.disk.open(self._target.place(part.path)) as file:
            crc = crc_of(self._target.disk, file, part.start, size, part.crc)
        if crc != expected:
            raise CorruptionError(
                file.path, part.start, f"what was written, CRC-32 {expected:08x}", f"{crc:08x}",
                hint="No point was made. The disk of the backup, or its memory, is not to be trusted.",
            )  # fmt: skip


def crc_of(disk: Disk, file: File, start: int, end: int, crc: int = 0) -> int:
    """The CRC-32 of bytes of a file, continued from that of the bytes before."""
    buffer = memoryview(bytearray(min(_PIECE_SIZE, end - start)))
    while start < end:
        count = disk.pread_into(file, buffer[: end - start], start)
        if not count:
            return crc
        crc, start = crc32(buffer[:count], crc), start + count
    return crc


def _piece(part: _Part) -> int:
    return _PIECE_SIZE if part.begins_log is not None else _PIECE_SIZE // UNIT.size * UNIT.size


def _reader(read: Callable[[int, int], bytes], start: int) -> Callable[[int, int], bytes]:
    return lambda position, size: read(start + position, size)


def _moved(path: str, generation: int) -> str:
    """The place of a queue's file in the backup."""
    return path.replace("consumequeue/", f"consumequeue@{generation}/", 1) if generation else path


def _is_log(name: str) -> bool:
    return name.startswith("commitlog/")


def _by_topic(
    queues: dict[tuple[str, int], tuple[int, int, int]],
) -> dict[str, dict[str, tuple[int, int, int]]]:
    by_topic: dict[str, dict[str, tuple[int, int, int]]] = {}
    for (topic, queue_id), values in queues.items():
        by_topic.setdefault(topic, {})[str(queue_id)] = values
    return by_topic


# ---- as a stream


def stream(root: str, out: BinaryIO, *, disk: Disk | None = None, progress: Progress | None = None) -> Point:
    """Write a whole backup as a tar archive, which unpacks to a backup folder with one point.

    No member has a hole: each is as long as what is in it, so any program may store and unpack the archive. The point
    is the last member, so an archive that was cut off restores nothing.

    Raises
    ------
    NotAStoreError
        There is no store.
    CorruptionError
        The store cannot be read, or retention has deleted a segment that was being sent.
    """
    time_ms = time.time_ns() // 1_000_000
    snapshot = Snapshot(root, disk or Disk())
    try:
        return _Stream(snapshot, out, time_ms, progress).run()
    finally:
        snapshot.close()


class _Stream:
    """One backup as a stream."""

    def __init__(self, snapshot: Snapshot, out: BinaryIO, time_ms: int, progress: Progress | None) -> None:
        self._snapshot, self._out, self._progress = snapshot, out, progress
        self._point = _empty(snapshot, 1, time_ms)
        self._files: dict[str, tuple[int, int]] = {}
        self._done = 0

    def run(self) -> Point:
        snapshot = self._snapshot
        queues: dict[tuple[str, int], tuple[int, int, int]] = {}
        log_files = snapshot.log_files()
        all_files = [(path, size) for _, path, size in log_files]
        for topic, queue_id in snapshot.queues:
            all_files += [(path, size) for _, path, size in snapshot.queue_files(topic, queue_id)]
        total = sum(size for _, size in all_files)
        begin = snapshot.begin

        with tarfile.open(fileobj=self._out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for start, path, size in log_files:
                if not self._add(archive, path, size, _reader(snapshot.log_bytes, start), total):
                    begin = start + snapshot.segment_size

            for topic, queue_id in snapshot.queues:
                end, file_size = snapshot.queues[topic, queue_id][1], snapshot.queue_file_size(topic, queue_id)
                queues[topic, queue_id] = 0, end, file_size
                for start, path, size in snapshot.queue_files(topic, queue_id):
                    read = _unit_reader(snapshot, topic, queue_id, start)
                    self._add(archive, path, size, read, total)

            point = replace(
                self._point,
                begin=begin,
                end=max(begin, self._point.end),
                files={name: size_and_crc for name, size_and_crc in self._files.items() if _kept(name, begin)},
                queues=_by_topic(queues),
                small={path: base64.b64encode(data).decode() for path, data in snapshot.small.items()},
                new_bytes=self._done,
            )
            data = point.to_bytes()
            archive.addfile(self._member("points/000001.json", len(data)), io.BytesIO(data))
        self._out.flush()
        return point

    def _add(
        self, archive: tarfile.TarFile, path: str, size: int, read: Callable[[int, int], bytes], total: int
    ) -> bool:
        """Add a file; False if retention has deleted it before its first byte was read."""
        try:
            first = read(0, min(_PIECE_SIZE // UNIT.size * UNIT.size, size))
        except FileNotFoundError as error:
            pass_on(error)
            return False
        pieces = _Pieces(first, size, read, lambda count: self._tell(count, total))
        archive.addfile(self._member(path, size), pieces)  # type: ignore[arg-type] # it only reads
        self._files[path] = size, pieces.crc
        return True

    def _tell(self, count: int, total: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, total)

    def _member(self, path: str, size: int) -> tarfile.TarInfo:
        member = tarfile.TarInfo(path)
        member.size, member.mode, member.mtime = size, 0o600, self._point.time_ms // 1000
        return member


class _Pieces:
    """A file that `tarfile` reads from its beginning to its end."""

    def __init__(self, first: bytes, size: int, read: Callable[[int, int], bytes], tell: Callable[[int], None]) -> None:
        self._left, self._position, self._size = first, 0, size
        self._read, self._tell = read, tell
        self.crc = 0

    def read(self, size: int) -> bytes:
        """The next bytes, as many as were asked for."""
        parts = []
        while size:
            if not self._left:
                most = min(_PIECE_SIZE // UNIT.size * UNIT.size, self._size - self._position)
                try:
                    self._left = self._read(self._position, most) if most else b""
                except FileNotFoundError as error:
                    raise CorruptionError(
                        str(error.filename), self._position, "this segment", "none: retention deleted it",
                        hint="What was sent is no backup. Run it again, or back up to a folder.",
                    ) from error  # fmt: skip
                if not self._left:
                    break
            piece, self._left = self._left[:size], self._left[size:]
            parts.append(piece)
            size -= len(piece)
            self._position += len(piece)
        data = b"".join(parts)
        self.crc = crc32(data, self.crc)
        self._tell(len(data))
        return data


def _unit_reader(snapshot: Snapshot, topic: str, queue_id: int, start: int) -> Callable[[int, int], bytes]:
    def read(position: int, size: int) -> bytes:
        first, end = (start + position) // UNIT.size, (start + position + size) // UNIT.size
        return snapshot.unit_bytes(topic, queue_id, first, end)

    return read


def _kept(name: str, begin: int) -> bool:
    return not _is_log(name) or int(os.path.basename(name)) >= begin
