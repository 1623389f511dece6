"""ConsumeQueues: record where in the log each message of a queue is.

A ConsumeQueue is an array on disk: unit n has 20 bytes and lies at byte n * 20 of the queue's files.

    +--------+--------+-- ... --+--------+--------+--------+
    | filler | filler |         | unit   | unit   | 0 0 0  |
    +--------+--------+-- ... --+--------+--------+--------+
    0        1                  n        n + 1    end

Units are derived data: each one repeats what its record in the CommitLog says, and recovery rewrites units that a crash
destroyed. The units are a prefix: missing units are zero, and nothing follows the first zero. Therefore `end` and
`search_physical` gallop from a hint and then do a binary search; neither reads a whole file. A queue whose
first message has a number above 0 begins with filler units up to it, as RocketMQ writes them.

Offsets are in messages. Threads: one writer; any number of readers, each with its own object that it loads itself
(another process may add and delete files). Source: RocketMQ `store/ConsumeQueue.java`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError, NotAStoreError
from messagestore.files.disk import Disk, File, FilePool
from messagestore.files.numbered_files import MappedFileQueue
from messagestore.files.unsynced import FileReplaced, WrittenFiles
from messagestore.format.layout import FILLER_UNIT_SIZE, UNIT
from messagestore.format.message import LMQ_PREFIX, check_readable_queue, stored_topic_fault, topic_fault
from messagestore.format.rows import Rows

CONSUME_QUEUE_FOLDER = "consumequeue"
UNIT_DTYPE: np.dtype[Any] = UNIT.dtype.newbyteorder("=")
"""A unit in memory: the packed fields of `layout.UNIT` in native byte order."""

Units = NDArray[np.void]

_MAX_UNIT_COUNT = int(np.iinfo(np.int64).max) // UNIT.size
_INT32 = np.iinfo(np.int32)
_PROBE_COUNT = 128
"""The number of units that are read at once around a hint: one page."""
_SCAN_SIZE = 1 << 20


class ConsumeQueue(MappedFileQueue):
    """The units of one queue.

    Parameters
    ----------
    directory : str
        `<root>/consumequeue/<topic>/<queue id>` (`queue_directory`); it may be missing.
    file_size : int
        Bytes of each file, a multiple of 20. 0: taken from the files that exist.
    pool : FilePool
        Holds the open files; shared by all queues.
    staging : str
        A folder on the same file system, in which new files are created.

    Attributes
    ----------
    written : WrittenFiles
        Files and folders that were written since they were last synced.
    """

    missing_hint = "The messages are in the log. `messagestore recover` rebuilds the queue from it."

    def __init__(self, directory: str, file_size: int, pool: FilePool, staging: str) -> None:
        super().__init__(directory, file_size, pool, staging)
        self.written = WrittenFiles(self.disk, pool)

    def load(self) -> None:
        """Read the folder again, and reopen the files that were open.

        Raises
        ------
        CorruptionError
            RocketMQ would refuse a file, or its size is not a multiple of a unit's size.
        """
        self._load_files(UNIT.size)
        for offset in self.offsets:
            if offset % UNIT.size:
                raise CorruptionError(self.path(offset), 0, f"a multiple of {UNIT.size} as name", f"{offset}")

    def _load_files(self, unit_size: int) -> None:
        for offset in self.offsets:
            self.pool.forget(self.path(offset))
        super().load()
        if self.file_size % unit_size:
            size = f"{self.file_size} bytes"
            raise CorruptionError(self.path(self.min_offset), 0, f"a multiple of {unit_size} bytes", size)

    def assume_file_size(self, size: int) -> None:
        """Use files of this size, in bytes, until an existing file shows another one."""
        if self.offsets or size <= 0 or size % UNIT.size:
            allowed = f"a multiple of {UNIT.size}, set before the queue has a file"
            raise ValueError(f"{self.directory}: file size: found {size}; allowed is {allowed}")
        self.file_size = size

    @property
    def first_file_queue_offset(self) -> int:
        """The number of the first unit in the first file; 0 without files."""
        return self.min_offset // UNIT.size

    @property
    def end_file_queue_offset(self) -> int:
        """The number of the first unit that does not fit into the last file; 0 without files."""
        return self.max_offset // UNIT.size

    def number_in_record(self, queue_offset: int) -> int:
        """Return the queue offset that the record of a message should contain: its own, as each has a record."""
        return queue_offset

    # ---- reading

    def read(self, queue_offset: int, count: int) -> Units:
        """Read units from `queue_offset` on, across files.

        Parameters
        ----------
        queue_offset : int
        count : int
            The number of units to read.

        Returns
        -------
        Units
            Native, contiguous, owned by the caller. At most `count` units: as many as the files have room for, so zero
            units may be among them; none if `queue_offset` lies outside the files.

        Raises
        ------
        FileNotFoundError
            Retention has deleted a file since `load`. Load again, and begin at the first file.
        """
        offset, end = queue_offset * UNIT.size, self.max_offset
        if count <= 0 or not self.min_offset <= offset < end:
            return np.empty(0, UNIT_DTYPE)

        units: Units = np.empty(min(count, (end - offset) // UNIT.size), UNIT_DTYPE)
        view = units.view(np.uint8).data
        while len(view):
            read_size = self.pread_into(view, offset)
            size = min(len(view), self.file_size - (offset - self.min_offset) % self.file_size)
            if read_size != size:
                path, position = self.place(offset // UNIT.size)
                raise CorruptionError(path, position, f"{size} bytes", f"{read_size} bytes, then the end of the file")
            offset += size
            view = view[size:]

        if UNIT.dtype != UNIT_DTYPE:
            units.byteswap(inplace=True)
        return units

    def place(self, queue_offset: int) -> tuple[str, int]:
        """Return the file and the position of a unit; the folder if no file holds it."""
        offset = queue_offset * UNIT.size
        start = self.holding(offset)
        return (self.directory, offset) if start is None else (self.path(start), offset - start)

    def end(self, hint: int = 0, limit: int | None = None) -> int:
        """Return the number of the first missing unit, which is the queue offset of the next message.

        Parameters
        ----------
        hint : int
            The previous end, or any number. If it is still the end, this costs one read.
        limit : int | None
            A physical offset. Units whose record ends above it count as missing.

        Returns
        -------
        int
            At least `first_file_queue_offset`. If it is `end_file_queue_offset`, another process may have created the
            next file: load, and ask again. Filler units count as existing.
        """
        return self._first_without(lambda units: _existing(units, limit), hint)

    def still_ends(self, end: int, physical_offset: int, limit: int) -> bool:
        """Return whether unit `end - 1` still points to `physical_offset`, and none that counts follows it.

        This takes one read of 40 bytes. False, too, where that does not tell: both units are not in one file.

        Parameters
        ----------
        end : int
        physical_offset : int
        limit : int
            As for `end`.
        """
        offset = (end - 1) * UNIT.size
        start = self.holding(offset)
        if start is None or offset + 2 * UNIT.size > start + self.file_size:
            return False
        data = self.disk.pread(self.file(start), 2 * UNIT.size, offset - start)
        if len(data) < 2 * UNIT.size:
            return False

        (last, last_size, _), (following, size, _) = UNIT.struct.iter_unpack(data)
        if last != physical_offset or not 0 < last_size < FILLER_UNIT_SIZE:
            return False
        return bool(size != FILLER_UNIT_SIZE and (size <= 0 or following < 0 or following + size > limit))

    def search_physical(self, physical_offset: int, hint: int = 0) -> int:
        """Return the queue offset of the first unit that points to `physical_offset` or above, or `end()`.

        Filler units count as below every offset. For the first byte that is left of the log, this is the queue's first
        message (RocketMQ's correctMinOffset).
        """

        def below(units: Units) -> NDArray[np.bool_]:
            fits: NDArray[np.bool_] = units["size"] == FILLER_UNIT_SIZE
            fits |= units["physical_offset"] < physical_offset
            return fits & _existing(units, None)

        return self._first_without(below, hint)

    def _first_without(self, holds: Callable[[Units], NDArray[np.bool_]], hint: int) -> int:
        """Return the first queue offset whose unit does not meet a condition that a prefix of the queue meets."""
        low, high = self.first_file_queue_offset, self.end_file_queue_offset
        start = max(low, min(hint - 1, high - 1))
        flags = holds(self.read(start, _PROBE_COUNT))
        if not len(flags):
            return low

        # Steps that double enclose the end in a few reads if the hint is near it.
        step = _PROBE_COUNT
        if flags[0]:
            if not flags.all():
                return start + int(flags.argmin())
            low = start + len(flags)
            while low < high:
                probe = min(low + step, high) - 1
                if not holds(self.read(probe, 1))[0]:
                    high = probe
                    break
                low, step = probe + 1, step * 2
        else:
            high = start
            while low < high:
                probe = max(high - step, low)
                if holds(self.read(probe, 1))[0]:
                    low = probe + 1
                    break
                high, step = probe, step * 2

        while high - low > _PROBE_COUNT:
            probe = (low + high) // 2
            if holds(self.read(probe, 1))[0]:
                low = probe + 1
            else:
                high = probe

        if low == high:
            return low
        flags = holds(self.read(low, high - low))
        return low + (int(flags.argmin()) if not flags.all() else len(flags))

    # ---- writing

    def append(self, queue_offset: int, data: bytes) -> None:
        """Write units at `queue_offset`, overwriting what is there. Nothing is synced except older full files.

        The first file of a queue that begins above 0 is filled with filler units up to `queue_offset`. Before the first
        unit of a file is written, the file two before it is synced, because Java looks back only three files.

        Parameters
        ----------
        queue_offset : int
            The number of the first unit; at most `end_file_queue_offset`, unless the queue has no file.
        data : bytes
            The units as `pack_units` or `pack_few` returned them.

        Raises
        ------
        ValueError
            The queue offset is out of range, or there would be a gap; nothing was written.
        FileReplaced
            A file is no longer at its path.
        """
        if not data:
            return

        self._check_place(queue_offset, len(data) // UNIT.size)
        offset = queue_offset * UNIT.size
        done = 0
        while done < len(data):
            start = (offset + done) // self.file_size * self.file_size
            position = offset + done - start
            chunk = memoryview(data)[done : done + self.file_size - position]

            if position == 0:
                self._sync_file(start - 2 * self.file_size)
            if self.holding(start) is None:
                self._create(start, chunk, position)
            else:
                self.disk.pwrite(self.written.writable(self.path(start)), chunk, position)
            done += len(chunk)

    def _check_place(self, queue_offset: int, count: int) -> None:
        if not self.file_size:
            raise ValueError(f"{self.directory}: the queue has no file. Call assume_file_size before the first append")
        most = _MAX_UNIT_COUNT - count
        if not 0 <= queue_offset <= most:
            raise ValueError(f"queue offset: found {queue_offset}; allowed is 0 to {most}")
        first, end = self.first_file_queue_offset, self.end_file_queue_offset
        if self.offsets and not first <= queue_offset <= end:
            allowed = f"allowed is {first} to {end}, by the files in {self.directory}"
            raise ValueError(f"queue offset: found {queue_offset}; {allowed}")

    def _create(self, start: int, chunk: memoryview, position: int) -> None:
        """Create the file that begins at `start`, with its first units in it."""
        path = self.path(start)
        if self.disk.is_folder(path):
            raise NotAStoreError(f"{path}: found a folder where a file must be", path=path)
        if self.disk.exists(path) and self.disk.size(path):  # as in `load`, an empty file does not count yet
            raise FileReplaced(path)  # another process created it: renaming our file there would delete theirs
        self.written.note_folders(self.directory)
        filler = np.zeros(position // UNIT.size, UNIT.dtype)
        filler["size"] = FILLER_UNIT_SIZE
        self.written.note(self.create(start, filler.tobytes() + chunk if position else chunk))

    def truncate(self, queue_offset: int) -> None:
        """Zero everything from unit `queue_offset` on. Files are never shortened; doing it twice changes nothing.

        Files that are left without a unit of a record are unlinked, including the first one, because Java sees a
        phantom message in a file of zeros. A file that is already zero there is not written.
        """
        offset = max(0, queue_offset) * UNIT.size
        for start in reversed(self.offsets):
            if start + self.file_size <= offset:
                return

            if start >= offset or not self._has_message(start, min(offset, start + self.file_size)):
                self.remove(start)
                continue

            file = self.written.opened(self.path(start))
            position = offset - start
            if self._has_data(file, position):
                self.written.note(file)
                self.disk.punch(file, position, self.file_size - position)

    def _has_message(self, start: int, end: int) -> bool:
        """Whether a unit of a record lies in the bytes `start` to `end` of the queue, which lie in one file."""
        first, last = start // UNIT.size, end // UNIT.size
        for queue_offset in (first, last - 1):
            if _real(self.read(queue_offset, 1)).any():
                return True
        step = _SCAN_SIZE // UNIT.size
        return any(_real(self.read(at, min(step, last - at))).any() for at in range(first, last, step))

    def _has_data(self, file: File, position: int) -> bool:
        """Whether a byte from `position` to the end of the file is not zero."""
        for start, end in self.disk.data_ranges(file, position, self.file_size):
            for at in range(start, end, _SCAN_SIZE):
                data = self.disk.pread(file, min(_SCAN_SIZE, end - at), at)
                if data.count(0) != len(data):
                    return True
        return False

    def remove(self, file_from_offset: int) -> None:
        """Unlink a file, and note that its name is gone."""
        super().remove(file_from_offset)
        self.written.removed(self.path(file_from_offset))

    def forget_file(self, path: str) -> None:
        """Drop a file, and that it was written."""
        super().forget_file(path)
        self.written.forget(path)

    def load_after_others(self) -> None:
        """Read the folder again after another process has written: its retention may have deleted the first files, and
        what this process wrote into them needs no sync any more.
        """
        self.load()
        for path in list(self.written.files):
            if self._start(path) < self.min_offset:
                self.forget_file(path)

    def count_below(self, physical_offset: int) -> int:
        """Return how many of the first files hold no message at or above a physical offset. The last file never counts.

        As in RocketMQ, the last unit of a file decides.
        """
        count = 0
        for start in self.offsets[:-1]:
            last = self.read((start + self.file_size) // UNIT.size - 1, 1)[0]
            if int(last["size"]) <= 0 or not 0 <= int(last["physical_offset"]) < physical_offset:
                break
            count += 1
        return count

    # ---- the disk

    def check_files(self, *, often: bool = False) -> None:
        """Check that every file written since the last sync is still the file at its path. This runs before publishing.

        With `often`, paths are looked at by time only (`WrittenFiles.opened`).

        Raises
        ------
        FileReplaced
            A file was replaced.
        """
        self.written.check(often=often)

    def sync(self) -> None:
        """Force the dirty files and folders to disk. After an `OSError`, it must not be called again.

        Raises
        ------
        FileReplaced
            A file that was written is no longer at its path.
        """
        for path in list(self.written.files):
            self._sync_file(self._start(path))
        self.written.sync_folders()

    def note_names(self) -> None:
        """Note that the names of this queue's files and folders may be unsynced.

        A dead writer may have created them.
        """
        folder = self.directory
        for _ in range(3):  # the folders of the queue, the topic, and all queues
            self.written.folders.add(folder)
            folder = os.path.dirname(folder)

    def _sync_file(self, start: int) -> None:
        """Sync one file if it exists, dirty or not: an earlier process may have left it unsynced."""
        if self.holding(start) is not None:
            self.written.sync_file(self.path(start))

    @staticmethod
    def _start(path: str) -> int:
        return int(os.path.basename(path))


def pack_units(units: Units) -> bytes:
    """Return units as they lie in a file.

    Raises
    ------
    ValueError
        The array is not one of `UNIT_DTYPE` or `UNIT.dtype`, or a unit belongs to no record.
    """
    if units.dtype not in (UNIT_DTYPE, UNIT.dtype) or units.ndim != 1:
        raise ValueError(f"units: found {units.dtype} of {units.ndim} dimensions; allowed is one of UNIT_DTYPE")
    exist = _existing(units, None)
    if not exist.all():
        row = int(exist.argmin())
        raise _no_unit(row, units[row])
    return unit_bytes(units)


def unit_bytes(units: Units) -> bytes:
    """Return units, whatever they are, as they lie in a file."""
    return (units if units.dtype == UNIT.dtype else units.byteswap()).tobytes()


def pack_few(units: Iterable[tuple[int, int, int]]) -> bytes:
    """Return a few units, given as (physical offset, size, tags code), as they lie in a file.

    This is a loop over units, for single puts: an array costs more than a few units.

    Raises
    ------
    ValueError
        A unit belongs to no record.
    """
    packed = []
    for row, (physical_offset, size, tags_code) in enumerate(units):
        if physical_offset < 0 or size <= 0:
            raise _no_unit(row, (physical_offset, size, tags_code))
        packed.append(UNIT.struct.pack(physical_offset, size, tags_code))
    return b"".join(packed)


def _no_unit(row: int, unit: object) -> ValueError:
    return ValueError(f"unit {row}: found {unit}; allowed are physical offsets >= 0 and sizes > 0")


def _existing(units: Units, limit: int | None) -> NDArray[np.bool_]:
    """Return which units exist, including fillers; with a limit, only those whose record ends at or below it."""
    sizes = units["size"]
    exist: NDArray[np.bool_] = (sizes > 0) & (units["physical_offset"] >= 0)
    if limit is not None:
        exist &= (sizes == FILLER_UNIT_SIZE) | (units["physical_offset"] <= limit - sizes.astype(np.int64))
    return exist


def _real(units: Units) -> NDArray[np.bool_]:
    """Return which units belong to a record."""
    real: NDArray[np.bool_] = units["size"] != FILLER_UNIT_SIZE
    return real & _existing(units, None)


def queue_directory(root: str, topic: str, queue_id: int) -> str:
    """Return the folder that holds a queue's files.

    Raises
    ------
    MessageIllegalError
        The topic cannot be the name of a folder, or the queue id is below 0.
    """
    check_readable_queue(topic, queue_id)
    return os.path.join(root, CONSUME_QUEUE_FOLDER, topic, str(queue_id))


def list_queues(disk: Disk, root: str) -> tuple[dict[str, list[int]], list[str]]:
    """Return the queues that have a folder.

    Returns
    -------
    queues : dict of str to list of int
        Queue ids, ascending, by topic. Children whose name is not a queue id are skipped, as in RocketMQ; a topic
        without a queue is left out.
    refused : list of str
        Folders whose name is not a legal topic and that hold no queue.
    """
    queues: dict[str, list[int]] = {}
    refused: list[str] = []
    top = os.path.join(root, CONSUME_QUEUE_FOLDER)
    for topic, is_folder in disk.entries(top):
        if not is_folder or topic.startswith(LMQ_PREFIX):  # a light queue has no records of its own
            continue
        ids = queue_ids_of(disk, root, topic)
        if stored_topic_fault(topic) is not None or (not ids and topic_fault(topic) is not None):
            refused.append(topic)
        elif ids:
            queues[topic] = ids
    return queues, refused


def queue_ids_of(disk: Disk, root: str, topic: str) -> list[int]:
    """Return the ids of one topic's queues that have a folder, ascending.

    A name that no folder can have has none: a broker's table of offsets holds whatever name a client gave it.
    """
    if stored_topic_fault(topic) is not None:
        return []
    folder = os.path.join(root, CONSUME_QUEUE_FOLDER, topic)
    return sorted(int(name) for name, is_folder in disk.entries(folder) if is_folder and is_queue_id(name))


def is_queue_id(name: str) -> bool:
    """Whether a folder below a topic's is a queue's."""
    plain = name.isascii() and name.isdigit() and len(name) <= len(str(_INT32.max))
    return plain and str(int(name)) == name and int(name) <= int(_INT32.max)


def units_of(rows: Rows, dtype: np.dtype[Any] = UNIT_DTYPE) -> Units:
    """Return the ConsumeQueue unit of each row, in memory or, with `UNIT.dtype`, as in a file."""
    units: Units = np.empty(rows.row_count, dtype)
    units["physical_offset"] = rows.physical_offsets
    units["size"] = rows.sizes
    units["tags_code"] = rows.tags_codes
    return units
