"""The CommitLog: appends records to segments, reads them, and scans them.

The CommitLog is one long file that is divided into segments of equal size. A record of L bytes fits if L + 8 bytes are
left in its segment; otherwise a BLANK record fills the segment, and the record begins the next one.

    | record | record | ... | BLANK |   | record | ...        (one segment each; zeros after the last record)

Invariants: bytes after the log's end are zero (what a Java broker left there is zeroed before Python writes).
Threads: one writer; reads may come from any thread.
Source: RocketMQ store/CommitLog.java.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError, PutMessageStatus, StoreError, StoreFullError, note_statuses
from messagestore.files.disk import Disk, File, FilePool, read_exactly
from messagestore.files.numbered_files import MAX_OFFSET, MappedFileQueue
from messagestore.files.unsynced import WrittenFiles
from messagestore.format import record, record_scan
from messagestore.format.delay_levels import DelayLevels
from messagestore.format.layout import BLANK, MAGIC_BLANK, RECORD_HEAD, TOPIC_LENGTH_SIZES

READ_SIZE = 16 * 1024 * 1024
_BLANK_SIZE = BLANK.size
_PIECE_SIZE = 1024 * 1024
"""What is looked at once is read in pieces of this size: they stay in the CPU's cache, and all use the same memory.
Getting new memory from the system for each piece would take longer than reading it."""
GAP = 16 * 1024
"""Records that lie closer than this are read together: 16 KiB more cost as much as another call."""
HEAD_READ_SIZE = RECORD_HEAD.size + 24
"""A record's head has at most this many bytes: both hosts may be IPv6."""
RECORD_BEGIN = struct.Struct(">ii")
"""TOTALSIZE and MAGICCODE, which begin a record and a BLANK."""


@dataclass
class SyncPlan:
    """Folders and files that one flush syncs."""

    disk: Disk
    folders: list[str]
    files: list[File]

    def run(self) -> None:
        """Sync each of them once. After an `OSError`, none of them may be synced again."""
        for folder in self.folders:
            self.disk.fsync_dir(folder)
        for file in self.files:
            self.disk.fdatasync(file)


class CommitLog(MappedFileQueue):
    """The segments of a store, read and written at physical offsets.

    Parameters
    ----------
    directory : str
        The `commitlog` folder.
    segment_size : int
        The size of a segment in bytes; 0: that of the existing files.
    pool : FilePool
    staging : str
        The folder in which new segments are created.
    preallocate : bool
        Reserve the disk blocks of a segment when it is created.

    Attributes
    ----------
    delay_levels : DelayLevels
        Which delay levels count for each record, for those who read units out of the records.
    """

    def __init__(
        self, directory: str, segment_size: int, pool: FilePool, staging: str, *, preallocate: bool = False
    ) -> None:
        super().__init__(directory, segment_size, pool, staging)
        self.preallocate = preallocate
        self.delay_levels = DelayLevels()
        self.written = WrittenFiles(self.disk, pool, hold=True)
        self.take_spare: Callable[[], File | None] = lambda: None
        """Gives a file for the next segment that was made ahead, if one is ready."""

    @property
    def segment_size(self) -> int:
        """The size of a segment in bytes."""
        return self.file_size

    def segment_of(self, physical_offset: int) -> int:
        """The first physical offset of the segment that contains `physical_offset`, whether it exists or not."""
        first, size = self.min_offset, self.file_size  # read several times for each put
        return first + (physical_offset - first) // size * size

    def path_of(self, physical_offset: int) -> str:
        """The path of that segment."""
        return self.path(self.segment_of(physical_offset))

    def left(self, physical_offset: int) -> int:
        """The number of bytes from `physical_offset` to the end of its segment."""
        return self.segment_of(physical_offset) + self.file_size - physical_offset

    def fits(self, physical_offset: int, size: int) -> bool:
        """Whether a record of `size` bytes can begin there: its segment has room for it and for a BLANK after it."""
        return RECORD_HEAD.size < size <= self.left(physical_offset) - BLANK.size

    # ---- reading

    def read(self, physical_offset: int, size: int) -> bytes:
        """Read up to `size` bytes: fewer at the end of a segment, none if there is no segment."""
        return self.pread(physical_offset, size)

    def read_array(self, physical_offset: int, size: int) -> NDArray[np.uint8]:
        """Read as `read` does, into memory that the caller owns."""
        if self.holding(physical_offset) is None:
            return np.empty(0, np.uint8)
        data = np.empty(min(size, self.left(physical_offset)), np.uint8)
        return data[: self.pread_into(data.data, physical_offset)]

    def read_into(self, buffer: memoryview, physical_offset: int) -> None:
        """Fill `buffer`; all of it must be available, in one segment.

        Raises
        ------
        CorruptionError
        """
        count = self.pread_into(buffer, physical_offset)
        if not count:
            self.load()  # for a reader, the segment may be new
            count = self.pread_into(buffer, physical_offset)
        if count != len(buffer):
            raise CorruptionError(self.path_of(physical_offset), physical_offset, f"{len(buffer)} bytes", f"{count}")

    def gather(
        self, physical_offsets: NDArray[np.int64], sizes: NDArray[np.int32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return records as (data, where each record begins in it).

        Records that lie close together are read in one call.
        """
        ends = physical_offsets + sizes
        begin, end = int(physical_offsets[0]), int(ends[-1])
        gaps = physical_offsets[1:] - ends[:-1]
        breaks = (gaps > GAP) | (gaps < 0)
        if self.segment_of(begin) != self.segment_of(end - 1):
            segments = (physical_offsets - self.min_offset) // self.segment_size
            breaks |= segments[1:] != segments[:-1]

        if not breaks.any():
            data = np.empty(end - begin, np.uint8)
            self.read_into(data.data, begin)
            return data, physical_offsets - begin

        span_first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        span_last = np.append(span_first[1:], len(sizes)) - 1
        span_starts, span_ends = physical_offsets[span_first], ends[span_last]
        span_positions = np.concatenate([[0], np.cumsum(span_ends - span_starts)])

        data = np.empty(int(span_positions[-1]), np.uint8)
        view = data.data
        for begin, end, position in zip(
            span_starts.tolist(), span_ends.tolist(), span_positions.tolist(), strict=False
        ):
            self.read_into(view[position : position + end - begin], begin)

        spans = np.repeat(np.arange(len(span_first)), span_last - span_first + 1)
        return data, physical_offsets - span_starts[spans] + span_positions[spans]

    def reopen_replaced(self, physical_offset: int) -> None:
        """Close the segment that holds an offset if another file is now at its path (a restored copy)."""
        start = self.holding(physical_offset)
        if start is not None and not self.disk.at_path(self.file(start)):
            self.pool.forget(self.path(start))

    def record_bytes(self, physical_offset: int) -> bytes | None:
        """Return the bytes of what claims to be a record at an offset, or None.

        Only the magic and the size are checked.

        No memory is allocated for a size that belongs to no record: there must be a magic, and the record must fit into
        its segment.
        """
        head = self.read(physical_offset, RECORD_HEAD.size)
        if len(head) < RECORD_HEAD.size:
            return None
        size, magic = RECORD_BEGIN.unpack_from(head)
        if magic not in TOPIC_LENGTH_SIZES or not self.fits(physical_offset, size):
            return None
        data = self.read(physical_offset, size)
        return data if len(data) == size else None

    def head(self, physical_offset: int) -> np.void | None:
        """Return the head of the record at an offset, or None if no record of the log can begin there."""
        data = self.read_array(physical_offset, HEAD_READ_SIZE)
        if len(data) < RECORD_HEAD.size:
            return None
        head = record_scan.heads(data, np.zeros(1, np.int64))[0]
        return head if record_scan.is_head(head, physical_offset) else None

    def segment_before_time(self, time_ms: int) -> int:
        """Return the beginning of the newest segment whose first record was stored by a time, or else that of the log.

        With the time of its store checkpoint, this is where a broker's own recovery starts after a crash.
        """
        for segment in reversed(self.offsets):
            head = self.head(segment)
            if head is not None and 0 < int(head["store_timestamp_ms"]) <= time_ms:
                return segment
        return self.min_offset

    # ---- writing

    def blank_needed(self, physical_offset: int, size: int) -> bool:
        """Whether a record (or batch) of `size` bytes does not fit after `physical_offset` in its segment."""
        return size + _BLANK_SIZE > self.file_size - (physical_offset - self.min_offset) % self.file_size

    def check_room(self, end: int) -> None:
        """Refuse bytes up to `end` if their segment would end above the largest possible offset.

        Raises
        ------
        StoreFullError
        """
        segment_end = self.segment_of(end - 1) + self.segment_size
        if segment_end > MAX_OFFSET:
            text = f"{self.directory}: the log has reached {MAX_OFFSET}, the largest offset. Open a new store"
            full = StoreFullError(text, path=self.directory, needed=segment_end - MAX_OFFSET, free=0)
            note_statuses(full, PutMessageStatus.CREATE_MAPPED_FILE_FAILED, None)
            raise full

    def blank(self, physical_offset: int) -> bytes:
        """Return the BLANK record that fills the segment from `physical_offset` on."""
        return record.pack_blank(self.left(physical_offset), MAGIC_BLANK)

    def write(self, physical_offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes that lie in one segment. If the next segment is missing, it is created with these bytes in it."""
        start = self.segment_of(physical_offset)
        file = self.written.held.get(self.path(start))
        if file is None:
            if self.holding(physical_offset) is None:
                self.note_names()  # first, because the name must be synced even if something fails after the rename
                self.written.note(self._create_segment(start, memoryview(data), physical_offset - start))
                return
            file = self.written.note(self.file(start, writable=True))
        self.disk.pwrite(file, data, physical_offset - start)

    def _create_segment(self, start: int, data: memoryview, position: int) -> File:
        """Create the next segment with `data` in it; an error says that the creation failed."""
        try:
            return self.create(start, data, position, preallocate=self.preallocate, spare=self.take_spare())
        except (OSError, StoreError) as error:
            note_statuses(error, PutMessageStatus.CREATE_MAPPED_FILE_FAILED, None)
            raise

    def start_writeback(self, physical_offset: int, size: int) -> None:
        """Tell the disk to start writing bytes that were just appended; they lie in one segment."""
        start = self.segment_of(physical_offset)
        self.disk.start_writeback(self._open(start), physical_offset - start, size)

    def sync_plan(self, start: int, end: int) -> SyncPlan:
        """Return what must be synced to make `start..end` durable; it may run with or without the writer's mutex."""
        folders: list[str] = []
        if self.offsets:
            folders = sorted(self.written.folders, reverse=True)
            self.written.folders.clear()
        last = self.segment_of(max(start, end - 1))
        segments = range(self.segment_of(max(start, self.min_offset)), last + 1, self.segment_size)
        files = [self._open(start) for start in segments if self.holding(start) is not None]
        return SyncPlan(self.disk, folders, files)

    def _open(self, start: int) -> File:
        """Open a segment for writing or syncing, through the descriptor that wrote it, if there is one."""
        return self.written.held.get(self.path(start)) or self.file(start, writable=True)

    def note_names(self) -> None:
        """Note that the names of segments must be synced with the next flush.

        Segments were created, or another writer may have created some.
        """
        self.written.folders |= {self.directory, os.path.dirname(self.directory)}

    def sync(self, start: int, end: int) -> None:
        """Make everything in `start..end` durable: the folder if a segment was created, then each segment once."""
        self.sync_plan(start, end).run()

    def sync_segment(self, physical_offset: int) -> None:
        """Run one `fdatasync` on the segment that holds an offset, through the descriptor that wrote it."""
        start = self.segment_of(physical_offset)
        if self.path(start) in self.written.held or self.holding(start) is not None:
            self.disk.fdatasync(self._open(start))

    def close(self) -> None:
        """Close the files that were written."""
        self.written.clear()

    def forget_file(self, path: str) -> None:
        """Drop a segment, also the descriptor that wrote it: the disk would not get its blocks back."""
        super().forget_file(path)
        self.written.forget(path)

    def forget_written(self, below: int) -> None:
        """Close the descriptors of segments that end at or below `below`; all of them are synced."""
        for start in self.offsets:
            if start + self.segment_size <= below:
                self.written.forget(self.path(start))

    def check_files(self, start: int, end: int, *, often: bool = False) -> None:
        """Check that each segment between two offsets that was written is still the file at its path.

        Raises
        ------
        FileReplaced
            A segment was replaced; the error is for the first one.
        """
        self.written.check(map(self.path, range(self.segment_of(start), end, self.segment_size)), often=often)

    def undo(self, start: int, end: int) -> None:
        """Zero `start..end` again after a failed append."""
        for segment in self.offsets:
            begin, stop = max(start, segment), min(end, segment + self.segment_size)
            if begin < stop:
                self.disk.punch(self.file(segment, writable=True), begin - segment, stop - begin)

    def zero_behind(self, end: int) -> int:
        """Zero every byte after `end`, including later segments, and sync.

        The result is the number of bytes that were not zero before.
        """
        count = 0
        for start in self.offsets:
            if start + self.segment_size <= end:
                continue

            file = self.file(start, writable=True)
            position = max(end - start, 0)
            dirty = self.nonzero_ranges(start + position)
            if not dirty:
                continue

            count += sum(stop - begin for begin, stop in dirty)
            self.disk.punch(file, position, self.segment_size - position)
            self.disk.fdatasync(file)
        return count

    def nonzero_ranges(self, physical_offset: int) -> list[tuple[int, int]]:
        """Return the physical ranges with data up to the segment's end.

        Each range goes from the first to the last byte of one read that is not zero.
        """
        start = self.holding(physical_offset)
        if start is None:
            return []

        file = self.file(start)
        ranges: list[tuple[int, int]] = []
        for begin, stop in self.disk.data_ranges(file, physical_offset - start, self.segment_size):
            for position in range(start + begin, start + stop, READ_SIZE):
                first = last = -1
                for at, data in self._pieces(position, min(position + READ_SIZE, start + stop)):
                    nonzero = data != 0
                    if nonzero.any():
                        first = at + int(nonzero.argmax()) if first < 0 else first
                        last = at + len(data) - int(nonzero[::-1].argmax())
                if first >= 0:
                    ranges.append((first, last))
        return ranges

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield a range of the log piece by piece: where each begins, and its bytes. All use the same memory.

        It ends early where a segment is missing.
        """
        buffer = np.empty(max(min(_PIECE_SIZE, end - start), 0), np.uint8)
        position = start
        while position < end and self.holding(position) is not None:
            piece = buffer[: min(end - position, self.left(position))]
            count = self.pread_into(piece.data, position)
            if not count:
                return
            yield position, piece[:count]
            position += count

    def rewrite(self, start: int, end: int) -> None:
        """Write the same bytes to `start..end` again, and sync.

        After a failed sync, the page cache may show bytes that are not on disk; writing marks them dirty again.
        """
        position = start
        for at, data in self._pieces(start, end):
            self.write(at, data.data)
            position = at + len(data)
        if position < end:
            raise CorruptionError(self.path_of(position), position, "a segment", "no file")
        if start < end:
            self.sync(start, end)

    def crc(self, start: int, end: int) -> int:
        """Return the CRC-32 of a range of the log; -1 if the log does not reach that far."""
        crc, position = 0, start
        for at, data in self._pieces(start, end):
            crc = record.crc32(data, crc)
            position = at + len(data)
        return crc if position >= end else -1

    def exact(self, physical_offset: int, size: int) -> bytes:
        """Read bytes that must be there; raise `CorruptionError` if the segment is missing or too short."""
        start = self.holding(physical_offset)
        if start is None:
            path = self.path_of(physical_offset)
            raise CorruptionError(path, physical_offset, "a segment", "no file")
        return read_exactly(self.disk, self.file(start), size, physical_offset - start)
