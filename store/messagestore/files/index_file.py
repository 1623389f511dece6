"""The index: finds records by key.

The index is a series of files in `<root>/index`, which are named by the local time of their creation. Only the newest
file is written to; when it is full, the next one follows. Each file is a hash table (`index_table`). A search compares
31 bits of a hash, so the caller must check the records.

An index is derived data. After a crash, `index_rewind` takes it back to a place in the log, whatever part of the later
writes reached the disk, and records from that place on are put again.

Threads: one writer; any number of readers, each with its own object that it loads itself.
Source: RocketMQ `store/index/IndexService.java`.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError
from messagestore.files.disk import Disk, File, FilePool, new_file
from messagestore.files.index_table import MAX_SECONDS, IndexHeader, IndexTable
from messagestore.files.unsynced import WrittenFiles
from messagestore.format import kernel
from messagestore.format.javahash import index_hash
from messagestore.format.rows import Row, Rows
from messagestore.signal_handlers import pass_on

_NAME_DIGITS = 17
_PUT_COUNT = 1 << 20
"""The number of keys put at once. More keys are put in turns, which bounds the memory."""
_PUT_COUNT_WITHOUT_KERNEL = 10_000
_FEW_COUNT = 24
"""Up to this many keys are put in a loop, without arrays."""
_MOST_BACK_MS = 3_600_000
"""Entries count seconds from the beginning of their file; a time further below the beginning goes into a new file."""


class IndexService:
    """The index files of a store.

    Parameters
    ----------
    directory : str
        `<root>/index`; it may be missing.
    pool : FilePool
        Holds the open files.
    staging : str
        A folder on the same file system, in which new files are created.
    slot_count, max_entry_count : int
        The store's `maxHashSlotNum` and `maxIndexNum`.

    Attributes
    ----------
    written : WrittenFiles
        Files and folders that were written since they were last synced.
    """

    def __init__(self, directory: str, pool: FilePool, staging: str, *, slot_count: int, max_entry_count: int) -> None:
        self.directory = directory
        self.pool = pool
        self.disk: Disk = pool.disk
        self.staging = staging
        self.slot_count = slot_count
        self.max_entry_count = max_entry_count
        self.files: list[IndexTable] = []
        """The index files, oldest first."""
        self.written = WrittenFiles(self.disk, pool)
        self._header: IndexHeader | None = None

    def load(self) -> None:
        """Read the folder again, and reopen files that were open.

        Raises
        ------
        CorruptionError
            A file has another size.
        """
        for file in self.files:
            self.pool.forget(file.path)
            self.written.forget(file.path)
        files = []
        for name in self.disk.names(self.directory):
            path = os.path.join(self.directory, name)
            if not _is_index_name(name) or self.disk.is_folder(path):
                continue  # RocketMQ skips names that are not numbers, too
            file = IndexTable(path, self.pool, self.slot_count, self.max_entry_count)
            try:
                size = self.disk.size(path)
            except FileNotFoundError as error:
                pass_on(error)
                continue  # retention has just deleted it
            if size == 0:
                continue  # a broker has just created it, or one that crashed left it: not a file yet
            if size != file.size:
                raise CorruptionError(
                    path,
                    0,
                    f"{file.size} bytes (maxHashSlotNum {self.slot_count}, maxIndexNum {self.max_entry_count})",
                    f"{size} bytes",
                    hint="Open the store with the settings with which it was written (`--store-config`; a broker's are "
                    "in its own file). Or delete the folder index while no broker runs on the store: recovery rebuilds "
                    "it from the log.",
                )
            files.append(file)
        self.files = files
        self._header = None

    @property
    def header(self) -> IndexHeader:
        """The newest file's header, as the writer knows it; all zero without files."""
        if self._header is None:
            self._header = self.files[-1].header() if self.files else IndexHeader()
        return self._header

    @property
    def end_physical_offset(self) -> int:
        """The physical offset of the newest entry's record, 0 without entries; `put` skips records below it."""
        return self.header.end_physical_offset

    @property
    def end_timestamp_ms(self) -> int:
        """The store time of the newest entry; 0 without entries."""
        return self.header.end_timestamp_ms

    # ---- writing

    def put(
        self,
        physical_offsets: NDArray[np.int64],
        store_timestamps_ms: NDArray[np.int64] | int,
        key_hashes: NDArray[np.int32],
        key_counts: NDArray[np.int32],
    ) -> None:
        """Index n records in log order. If this raises, rewind to the first of them before the next put.

        Parameters
        ----------
        physical_offsets : int64[n]
            Where each record begins; never decreasing.
        store_timestamps_ms : int64[n] or int
        key_hashes : int32[k]
            `javahash.index_hash` of each key, at least 0.
        key_counts : int32[n]
            Record i has the next `key_counts[i]` keys; 0 for none.

        Raises
        ------
        ValueError
            The arrays do not fit together; nothing was written.
        FileReplaced
            The newest file is no longer at its path.
        """
        if not len(physical_offsets):
            return
        _check(physical_offsets, store_timestamps_ms, key_hashes, key_counts)
        self._make_room()

        timestamps = np.broadcast_to(np.asarray(store_timestamps_ms, np.int64), physical_offsets.shape)
        skipped = int(np.searchsorted(physical_offsets, self.end_physical_offset))
        if skipped:  # they were put before
            key_hashes = key_hashes[int(key_counts[:skipped].sum()) :]
            physical_offsets, timestamps, key_counts = (
                physical_offsets[skipped:],
                timestamps[skipped:],
                key_counts[skipped:],
            )

        offsets, times = physical_offsets, timestamps
        if len(key_hashes) != len(key_counts) or (key_counts != 1).any():  # not exactly one key each
            offsets, times = np.repeat(physical_offsets, key_counts), np.repeat(timestamps, key_counts)

        done, most = 0, _PUT_COUNT if kernel.lib is not None else _PUT_COUNT_WITHOUT_KERNEL
        while done < len(offsets):
            header = self._make_room()
            end = done + min(most, len(offsets) - done, self.max_entry_count - header.entry_count)
            begin_ms = header.begin_timestamp_ms if header.entry_count > 1 else int(times[done])
            back = np.flatnonzero(times[done:end] < begin_ms - _MOST_BACK_MS)
            if len(back) and not back[0]:
                self._make_file(header)
                continue
            end = done + int(back[0]) if len(back) else end
            part = slice(done, end)
            self._header = self._put(header, key_hashes[part], offsets[part], times[part])
            done = end

        if len(key_counts) and not key_counts[-1]:
            self._make_room()  # after a full file, a record without keys also creates the next file

    def put_few(self, records: Sequence[Row]) -> None:
        """Index a few records as `put` does.

        This is a loop over records, for single puts. Up to `_FEW_COUNT` keys it is faster than arrays.
        """
        header, first = self._make_room(), records[0]
        keys = [
            (key_hash, row.physical_offset, row.store_timestamp_ms) for row in records for key_hash in row.key_hashes
        ]

        plain = (
            len(keys) <= _FEW_COUNT
            and len(keys) < self.max_entry_count - header.entry_count
            and first.physical_offset >= header.end_physical_offset
            and header.entry_count > 1
            and min(row.store_timestamp_ms for row in records) >= header.begin_timestamp_ms - _MOST_BACK_MS
        )

        if not plain:
            rows = Rows.of(records)
            self.put(rows.physical_offsets, rows.store_timestamps_ms, rows.key_hashes, rows.key_counts)
        elif keys:
            self._header = self.files[-1].put_few(self._writable(), header, keys)

    def _put(
        self, header: IndexHeader, hashes: NDArray[np.int32], offsets: NDArray[np.int64], times: NDArray[np.int64]
    ) -> IndexHeader:
        if len(hashes) > _FEW_COUNT:
            return self.files[-1].put(self._writable(), header, hashes, offsets, times)
        keys = list(zip(hashes.tolist(), offsets.tolist(), times.tolist(), strict=True))
        return self.files[-1].put_few(self._writable(), header, keys)

    def _writable(self) -> File:
        """Return the newest file, open for writing and at its path, and note it as written."""
        return self.written.writable(self.files[-1].path)

    def _make_room(self) -> IndexHeader:
        """Return the newest file's header; a new file is created if there is none, or if the newest one is full."""
        header = self.header
        if self.files and header.entry_count < self.max_entry_count:
            return header
        return self._make_file(header)

    def _make_file(self, header: IndexHeader) -> IndexHeader:
        """Create a new file after the one with this header."""
        # Until its first entry, RocketMQ gives a new file the end of the previous one as its begin and end.
        header = IndexHeader(
            header.end_timestamp_ms, header.end_timestamp_ms, header.end_physical_offset, header.end_physical_offset
        )

        temporary = os.path.join(self.staging, f"new-{uuid.uuid4().hex}")
        file = IndexTable(self._next_path(), self.pool, self.slot_count, self.max_entry_count)
        with new_file(self.disk, file.path, file.size, via=temporary) as made:
            self.disk.pwrite(made, header.to_bytes(), 0)
            if not self.disk.exists(self.directory):
                self.disk.mkdir(self.directory)
                self.written.folders.add(os.path.dirname(self.directory))
            self.written.folders.add(self.directory)

        self.pool.put(made)
        self.written.note(made)
        self.files.append(file)
        self._header = header
        return header

    def _next_path(self) -> str:
        """Return a name for the current local time that sorts after every existing name."""
        now_ms = self.disk.time_ns() // 1_000_000
        number = int(time.strftime("%Y%m%d%H%M%S", time.localtime(now_ms // 1000))) * 1000 + now_ms % 1000
        names = [int(name) for name in self.disk.names(self.directory) if _is_index_name(name)]
        return os.path.join(self.directory, f"{max([number, *(name + 1 for name in names)]):0{_NAME_DIGITS}d}")

    def unlink_all(self) -> None:
        """Delete the index. It will be rebuilt from the log."""
        while self.files:
            self.unlink_last()

    def unlink_last(self) -> None:
        """Delete the newest file."""
        file = self.files[-1]
        self.forget_header()
        if self.disk.exists(file.path):
            self.disk.unlink(file.path)
        self.pool.forget(file.path)
        self.files.pop()
        self.written.removed(file.path)

    def forget_below(self, physical_offset: int) -> list[str]:
        """Forget the first files, as far as all their entries lead to records below a physical offset; return their
        paths.

        The caller deletes them. The last file never counts.
        """
        count = 0
        while count < len(self.files) - 1 and self.files[count].header().end_physical_offset < physical_offset:
            count += 1
        gone = [file.path for file in self.files[:count]]
        self.files = self.files[count:]
        for path in gone:
            self.pool.forget(path)
            self.written.forget(path)
        return gone

    def forget_header(self) -> None:
        """Read the newest file's header again when it is needed, because somebody else changes it."""
        self._header = None

    def check_files(self, *, often: bool = False) -> None:
        """Check that every file written since the last sync is still the file at its path; called before publishing.

        With `often`, paths are looked at by time only (`WrittenFiles.opened`).

        Raises
        ------
        FileReplaced
            A file was replaced; the error is for the first one.
        """
        self.written.check(often=often)

    def sync(self) -> None:
        """Force what was written to disk. After an `OSError`, it must not be called again."""
        self.written.sync()

    # ---- reading

    def search(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return physical offsets of records that may have this key, newest first (RocketMQ queryOffset).

        Parameters
        ----------
        topic, key : str
            Only their hash is compared, so the caller must check the records.
        max_count : int
            The largest number of results; RocketMQ allows `maxMsgsNumBatch`.
        begin_ms, end_ms : int
            Store times, both inclusive, compared in whole seconds from each file's first entry.

        Raises
        ------
        FileNotFoundError
            Retention has deleted a file since `load`. Load, and search again.
        """
        key_hash = index_hash(topic, key)
        physical_offsets: list[int] = []
        for file in reversed(self.files):
            header = file.header()
            first_ms, last_ms = header.begin_timestamp_ms, header.end_timestamp_ms
            if begin_ms <= last_ms and end_ms >= first_ms:
                physical_offsets += file.search(key_hash, max_count - len(physical_offsets), begin_ms, end_ms)
            if first_ms < begin_ms or len(physical_offsets) >= max_count:
                break
        return physical_offsets

    def forget_unsafe(self, physical_offset: int) -> None:
        """Until the next `load`, use only files that were full and synced before the record at an offset was put.

        The newest file that begins below the offset was written to later, so a power cut may have damaged it: a lost
        entry cuts off all older ones in its slot.
        """
        begins = [header.begin_physical_offset if header.entry_count > 1 else None for header in self._headers()]
        below = [i for i, begin in enumerate(begins) if begin is not None and begin < physical_offset]
        self.files = self.files[: below[-1]] if below else []

    def _headers(self) -> list[IndexHeader]:
        return [file.header() for file in self.files]

    def ranges(self) -> list[tuple[int, int]]:
        """Return the physical offsets of the first and last record of each file that has entries, oldest first.

        Records between two files may be missing where a broker has crashed.
        """
        return [(h.begin_physical_offset, h.end_physical_offset) for h in self._headers() if h.entry_count > 1]


def _check(
    physical_offsets: NDArray[np.int64],
    store_timestamps_ms: NDArray[np.int64] | int,
    key_hashes: NDArray[np.int32],
    key_counts: NDArray[np.int32],
) -> None:
    count = len(physical_offsets)
    if len(key_counts) != count or np.shape(store_timestamps_ms) not in ((), (count,)):
        raise ValueError(
            f"found {len(key_counts)} key counts for {count} records; allowed is one count and time for each"
        )
    if int(key_counts.min()) < 0 or int(key_counts.sum()) != len(key_hashes):
        raise ValueError(f"found {len(key_hashes)} key hashes; the key counts add up to {int(key_counts.sum())}")
    if len(key_hashes) and int(key_hashes.min()) < 0:
        raise ValueError(f"found the key hash {int(key_hashes.min())}; allowed is 0 to {MAX_SECONDS}")
    if physical_offsets[0] < 0 or (physical_offsets[1:] < physical_offsets[:-1]).any():
        raise ValueError("physical offsets: found negative or descending values; allowed is the order of the log")


def _is_index_name(name: str) -> bool:
    return name.isascii() and name.isdigit()
