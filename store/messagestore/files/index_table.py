"""One index file as arrays: its header, its slots and its entries.

An index file is a hash table on disk. Its size never changes:

    +--------+-------------------------+------------------------------------------------+
    | header | slots, 4 bytes each     | entry 0 (unused) | entry 1 | entry 2 | ... | 0 |
    +--------+-------------------------+------------------------------------------------+
               slot: number of the       entry: hash, record, seconds, and the number of
               newest entry with         the entry before it in the same slot
               hash mod slots

A search walks a slot's chain backwards from the newest entry. Entries are in log order: their physical offsets never
decrease. A put writes entries, then the header, then slots: everything that the header counts exists, and slots lead to
nothing else.

Threads: one writer; readers with an object of their own. Source: RocketMQ `store/index/IndexFile.java`,
`IndexHeader.java`.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from messagestore.files.disk import Disk, File, FilePool, read_exactly
from messagestore.format import kernel
from messagestore.format.layout import INDEX_ENTRY, INDEX_HEADER, INDEX_SLOT_SIZE

ENTRY_DTYPE: np.dtype[Any] = INDEX_ENTRY.dtype.newbyteorder("=")
"""An entry in memory: the fields of `layout.INDEX_ENTRY` in the machine's byte order, packed."""
SLOT_DTYPE = np.dtype(f">i{INDEX_SLOT_SIZE}")
MAX_SECONDS = int(np.iinfo(np.int32).max)

_PAGE_SLOTS = 1024
_HEADER_SLOTS = INDEX_HEADER.size // INDEX_SLOT_SIZE
"""How many slots would fit where the header is, in the file's first page."""
_PAGE_GAP_COUNT = 2
"""One page between two others is read and written with them: that costs less than a call."""
_FEW_SLOTS = 2
"""With up to this many keys for each page of the file, only their slots are read and written."""
_BLOCK_COUNT = 256 * 1024 // INDEX_ENTRY.size
"""About how many entries are made at once: they stay in the CPU's cache while they are written."""
_NEAR_COUNT = 256
_MAX_STEPS = 1 << 20

_log = logging.getLogger(__name__)

T = TypeVar("T", int, NDArray[np.int64])


class IndexHeader(NamedTuple):
    """The header of an index file; the fields of `layout.INDEX_HEADER`, in its order."""

    begin_timestamp_ms: int = 0
    end_timestamp_ms: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    slot_count: int = 0
    entry_count: int = 1

    def to_bytes(self) -> bytes:
        """Return the header's bytes as on disk."""
        return INDEX_HEADER.struct.pack(*self)


class IndexTable:
    """One index file.

    Parameters
    ----------
    path : str
    pool : FilePool
    slot_count, max_entry_count : int
        The store's values, which are not in the file. Numbers of entries are below `max_entry_count`.

    Attributes
    ----------
    size : int
        Bytes of the file.
    """

    def __init__(self, path: str, pool: FilePool, slot_count: int, max_entry_count: int) -> None:
        self.path = path
        self.pool = pool
        self.disk: Disk = pool.disk
        self.slot_count = slot_count
        self.max_entry_count = max_entry_count
        self.entries_position = slot_position(slot_count)
        self.size = self.entry_position(max_entry_count)

    # ---- its parts

    def header(self) -> IndexHeader:
        """Return the header on disk; as in RocketMQ, an entry count of 0 or less reads as 1."""
        data = read_exactly(self.disk, self.pool.get(self.path), INDEX_HEADER.size, 0)
        header = IndexHeader(*INDEX_HEADER.struct.unpack(data))
        return header._replace(entry_count=min(max(1, header.entry_count), self.max_entry_count))

    def slots(self, first: int, count: int) -> NDArray[np.int32]:
        """Return slots `first` to `first + count - 1` in native byte order, owned by the caller."""
        data = read_exactly(self.disk, self.pool.get(self.path), count * INDEX_SLOT_SIZE, slot_position(first))
        return np.frombuffer(data, SLOT_DTYPE).astype(np.int32)

    def slot(self, key_hash: int) -> int:
        """Return the slot of a hash: the number of its newest entry."""
        return int(self.slots(key_hash % self.slot_count, 1)[0])

    def entries(self, first: int, count: int) -> NDArray[np.void]:
        """Return entries `first` to `first + count - 1` in native byte order, owned by the caller."""
        size = count * INDEX_ENTRY.size
        data = read_exactly(self.disk, self.pool.get(self.path), size, self.entry_position(first))
        return np.frombuffer(data, INDEX_ENTRY.dtype).astype(ENTRY_DTYPE)

    def entry(self, number: int) -> tuple[int, int, int, int]:
        """Return one entry: key hash, physical offset, seconds, previous."""
        data = read_exactly(self.disk, self.pool.get(self.path), INDEX_ENTRY.size, self.entry_position(number))
        key_hash, physical_offset, seconds, previous = INDEX_ENTRY.struct.unpack(data)
        return key_hash, physical_offset, seconds, previous

    def entry_position(self, number: int) -> int:
        """Return where an entry lies in the file."""
        return self.entries_position + number * INDEX_ENTRY.size

    # ---- put

    def put(
        self,
        file: File,
        header: IndexHeader,
        key_hashes: NDArray[np.int32],
        physical_offsets: NDArray[np.int64],
        store_timestamps_ms: NDArray[np.int64],
    ) -> IndexHeader:
        """Write one entry per key: first the entries, then the header, then the slots.

        A broker that takes over from a killed writer deletes an index file whose end is later than its checkpoint, and
        rebuilds it. It would keep a file with the old header, and lose what follows a slot that leads to an entry which
        the header does not count.

        Parameters
        ----------
        file : File
            The file, open for writing.
        header : IndexHeader
            Its current header.
        key_hashes, physical_offsets, store_timestamps_ms : int32[k], int64[k], int64[k]
            In log order; at least one, and no more than there is room for.

        Returns
        -------
        IndexHeader
            The file's new header.
        """
        lib = kernel.lib
        if lib is None:
            keys = zip(key_hashes.tolist(), physical_offsets.tolist(), store_timestamps_ms.tolist(), strict=True)
            return self.put_few(file, header, list(keys))

        first_number, count = header.entry_count, len(key_hashes)
        slots: SlotPages | ChosenSlots
        if count < _FEW_SLOTS * page_of(self.slot_count):
            slots = ChosenSlots(self.disk, file, np.unique(key_hashes % np.int32(self.slot_count)))
        else:
            touched = np.zeros(page_of(self.slot_count - 1) + 1, np.bool_)
            lib.index_pages(key_hashes, self.slot_count, touched)
            slots = SlotPages(self.disk, file, self.slot_count, np.flatnonzero(touched))

        times = store_timestamps_ms[:1] if not store_timestamps_ms.strides[0] else store_timestamps_ms
        place = (self.slot_count, first_number, header.begin_timestamp_ms, slots.bases, slots.chosen, slots.slots)
        block, used_count = np.empty(min(count, _BLOCK_COUNT), INDEX_ENTRY.dtype).view(np.uint8), header.slot_count
        for first in range(0, count, _BLOCK_COUNT):
            entries = block[: min(_BLOCK_COUNT, count - first) * INDEX_ENTRY.size]
            used_count += lib.index_put(key_hashes, first, physical_offsets, times, *place, entries)
            self.disk.pwrite(file, entries.data, self.entry_position(first_number + first))

        if first_number <= 1:
            header = header._replace(
                begin_timestamp_ms=int(store_timestamps_ms[0]), begin_physical_offset=int(physical_offsets[0])
            )

        header = header._replace(
            end_timestamp_ms=int(store_timestamps_ms[-1]),
            end_physical_offset=int(physical_offsets[-1]),
            slot_count=used_count,
            entry_count=first_number + count,
        )

        self.disk.pwrite(file, header.to_bytes(), 0)
        slots.write()
        return header

    def put_few(self, file: File, header: IndexHeader, keys: list[tuple[int, int, int]]) -> IndexHeader:
        """Put a few keys, given as (hash, physical offset, store time in ms), as `put` does.

        This is a loop over keys. Below some twenty it is faster than `put`, and without the kernel it does all of the
        work.
        """
        first_number = header.entry_count
        slots: dict[int, int] = {}
        entries = []

        for number, (key_hash, physical_offset, timestamp_ms) in enumerate(keys, first_number):
            slot = key_hash % self.slot_count
            previous = slots.get(slot)
            if previous is None:
                data = read_exactly(self.disk, file, INDEX_SLOT_SIZE, slot_position(slot))
                previous = int.from_bytes(data, "big", signed=True)
                if not 0 < previous < first_number:
                    previous = 0
                    header = header._replace(slot_count=header.slot_count + 1)

            slots[slot] = number
            begin_ms = header.begin_timestamp_ms
            seconds = min(max(0, timestamp_ms - begin_ms) // 1000, MAX_SECONDS) if begin_ms > 0 else 0
            entries.append(INDEX_ENTRY.struct.pack(key_hash, physical_offset, seconds, previous))
            if number <= 1:
                header = header._replace(begin_timestamp_ms=timestamp_ms, begin_physical_offset=physical_offset)

        self.disk.pwrite(file, b"".join(entries), self.entry_position(first_number))
        header = header._replace(
            end_timestamp_ms=timestamp_ms, end_physical_offset=physical_offset, entry_count=first_number + len(keys)
        )
        # The header before the slots, as in `put`.
        self.disk.pwrite(file, header.to_bytes(), 0)
        for slot, number in slots.items():
            self.disk.pwrite(file, number.to_bytes(INDEX_SLOT_SIZE, "big"), slot_position(slot))
        return header

    # ---- search

    def search(self, key_hash: int, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return the physical offsets of entries with this hash, newest first, at most `max_count`.

        This follows RocketMQ's rules, except that a chain must lead to ever smaller numbers. An entry that the header
        does not count yet (another process is putting it) is walked through but not returned.
        """
        header = self.header()
        number, number_before = self.slot(key_hash), self.max_entry_count
        physical_offsets: list[int] = []
        block_start, block = 0, np.empty(0, ENTRY_DTYPE)

        for _ in range(_MAX_STEPS):
            if not 0 < number < number_before or len(physical_offsets) >= max_count:
                return physical_offsets
            if not block_start <= number < block_start + len(block):
                # One key over and over gives a chain of neighbours: read many at once.
                near = _NEAR_COUNT if number_before - number < _NEAR_COUNT else 1
                block_start = max(1, number - near + 1)
                block = self.entries(block_start, number - block_start + 1)

            entry_hash, physical_offset, seconds, previous = block[number - block_start].item()
            if number < header.entry_count:
                timestamp_ms = header.begin_timestamp_ms + seconds * 1000
                if seconds < 0:
                    return physical_offsets
                if entry_hash == key_hash and begin_ms <= timestamp_ms <= end_ms:
                    physical_offsets.append(physical_offset)
                if timestamp_ms < begin_ms:
                    return physical_offsets
            elif (entry_hash - key_hash) % self.slot_count:
                return physical_offsets
            number_before, number = number, previous

        _log.warning(
            "%s: the search for hash %d stopped after %d entries of other keys and may have missed messages. Search a "
            "shorter time range",
            self.path,
            key_hash,
            _MAX_STEPS,
        )
        return physical_offsets


class SlotPages:
    """Pages of the slots of a file, read and written in runs of neighbours.

    Parameters
    ----------
    disk : Disk
    file : File
    slot_count : int
        Slots of the whole file.
    pages : int[p]
        Numbers of the pages (`page_of`), ascending, each once; at least one.

    Attributes
    ----------
    slots : big-endian int32[m]
        The slots of these pages, and of a page between two of them. The caller changes them.
    bases : int64
        For each page of the file up to the last one of all, where its first slot would lie in `slots`.
    """

    chosen = None

    def __init__(self, disk: Disk, file: File, slot_count: int, pages: NDArray[np.int64]) -> None:
        self.disk = disk
        self.file = file

        breaks = np.flatnonzero(np.diff(pages) > _PAGE_GAP_COUNT) + 1
        first_pages, last_pages = pages[np.append(0, breaks)], pages[np.append(breaks, len(pages)) - 1]
        firsts = np.maximum(first_pages * _PAGE_SLOTS - _HEADER_SLOTS, 0)
        ends = np.minimum((last_pages + 1) * _PAGE_SLOTS - _HEADER_SLOTS, slot_count)
        befores = np.cumsum(ends - firsts) - (ends - firsts)

        self.slots = np.empty(int((ends - firsts).sum()), SLOT_DTYPE)
        self.bases = np.full(page_of(slot_count - 1) + 1, np.iinfo(np.int64).max)

        counts = last_pages - first_pages + 1
        numbers = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts - first_pages, counts)
        self.bases[numbers] = numbers * _PAGE_SLOTS - _HEADER_SLOTS + np.repeat(befores - firsts, counts)

        starts = befores * INDEX_SLOT_SIZE
        self._parts = (slot_position(firsts), starts, starts + (ends - firsts) * INDEX_SLOT_SIZE)
        disk.pread_parts(file, self.slots.view(np.uint8).data, *self._parts)

    def places(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where these slots lie in `slots`; their pages must be there."""
        places: NDArray[np.int64] = self.bases[page_of(slots)] + (slots + _HEADER_SLOTS) % _PAGE_SLOTS
        return places

    def write(self) -> None:
        """Write all pages back."""
        self.disk.pwrite_parts(self.file, self.slots.view(np.uint8).data, *self._parts)


class ChosenSlots:
    """Some slots of a file, read and written one by one.

    With one or two keys in each page that they touch, this costs half of what whole pages do.

    Parameters
    ----------
    disk : Disk
    file : File
    chosen : int32[m]
        Numbers of the slots, ascending, each once.

    Attributes
    ----------
    slots : big-endian int32[m]
        The slots. The caller changes them.
    """

    bases = None

    def __init__(self, disk: Disk, file: File, chosen: NDArray[np.int32]) -> None:
        self.disk = disk
        self.file = file
        self.chosen = chosen
        self.slots = np.empty(len(chosen), SLOT_DTYPE)
        starts = np.arange(len(chosen)) * INDEX_SLOT_SIZE
        self._parts = (slot_position(chosen.astype(np.int64)), starts, starts + INDEX_SLOT_SIZE)
        disk.pread_parts(file, self.slots.view(np.uint8).data, *self._parts)

    def write(self) -> None:
        """Write the slots back."""
        self.disk.pwrite_parts(self.file, self.slots.view(np.uint8).data, *self._parts)


def page_of(slot: T) -> T:
    """Return the number of the file's page that a slot lies in."""
    return (slot + _HEADER_SLOTS) // _PAGE_SLOTS


def slot_position(slot: T) -> T:
    """Return where a slot lies in its file."""
    return INDEX_HEADER.size + slot * INDEX_SLOT_SIZE
