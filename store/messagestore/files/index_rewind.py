"""Takes the index back to what it held before a place in the log (`rewind`).

After a crash, a file holds everything that was put before a place, completely, and any part of what was put later: each
sector of the disk is as it was at some time since the last sync. `count_below` finds the last entry to keep, and `keep`
restores the file as if nothing had followed it. Both rely only on facts that a crash cannot falsify:

* An entry within one sector is complete or missing. An entry in two sectors may have lost either half.
* The physical offset of an entry says on which side of the place it belongs; entries before the place are complete.
* The header, in one sector, counts at least the entries to keep.
* A slot's head is the newest entry at some time, so its chain leads to the newest entry to keep, unless an entry on
  the way is lost: then the entries are scanned.

Threads: only the writer uses this module.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from messagestore.files.index_file import IndexService
from messagestore.files.index_table import IndexTable, SlotPages, page_of
from messagestore.files.unsynced import WrittenFiles
from messagestore.format.layout import INDEX_ENTRY

_SECTOR_SIZE = 512
_SLOT_CHUNK_COUNT = 1 << 22
_ENTRY_CHUNK_COUNT = 1 << 20
_SCAN_SIZE = 1 << 20
_MAX_ROUNDS = 64


def rewind(
    index: IndexService, physical_offset: int, store_timestamp_ms: Callable[[int], int | None] | None = None
) -> None:
    """Restore the index to a state as if no record at or above `physical_offset` had ever been put.

    It does not matter which parts of those records were kept. Entries below the offset must be whole. Files without an
    entry below it are unlinked. Whatever is changed is synced, so that later puts cannot mix with what was there.
    Running it twice, or again after a crash during it, gives the same bytes.

    Parameters
    ----------
    index : IndexService
    physical_offset : int
    store_timestamp_ms : callable | None
        Returns the store time of the record at a physical offset. Without it, a header end time that must be restored
        is that of the last entry: up to 999 ms too early.
    """
    index.forget_header()
    while index.files:
        table = index.files[-1]
        count = count_below(table, physical_offset)
        if count:
            keep(index, count, store_timestamp_ms)
            break
        index.unlink_last()
    index.sync()


def count_below(table: IndexTable, physical_offset: int) -> int:
    """Return how many entries point below `physical_offset`, by a binary search over entries within one sector."""
    end = table.header().entry_count  # it may count lost entries, but it counts all entries to keep
    number = _first_not_below(table, 1, end, physical_offset)
    if physical_offset > 0 and number < end and _is_zero_entry(table, number):
        number = _first_not_below(table, number + 1, end, physical_offset)
    return number - 1


def _first_not_below(table: IndexTable, low: int, high: int, physical_offset: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if _is_split(table, middle):
            if high - low == 1:
                return low + _is_sound(table, low, physical_offset)
            middle = middle + 1 if middle + 1 < high else middle - 1  # two neighbours are never both split
        if _is_below(table.entry(middle), physical_offset):
            low = middle + 1
        else:
            high = middle
    return low


def _is_below(entry: tuple[int, int, int, int], physical_offset: int) -> bool:
    return any(entry) and entry[1] < physical_offset


def _is_split(table: IndexTable, number: int) -> bool:
    """Whether the entry lies in two sectors."""
    return table.entry_position(number) % _SECTOR_SIZE > _SECTOR_SIZE - INDEX_ENTRY.size


def _is_zero_entry(table: IndexTable, number: int) -> bool:
    """Whether zeros at `number` are an entry: one with hash 0, the first in slot 0, for the record at 0."""
    if any(table.entry(number)) or table.slot(0) < number:
        return False
    return table.header().begin_physical_offset == 0 and (number == 1 or table.entry(number - 1)[1] == 0)


def _is_sound(table: IndexTable, number: int, physical_offset: int) -> bool:
    """Whether a split entry is below the offset and fits the header or the previous entry, and its slot.

    Half an entry can pass only if the log's offsets cross a multiple of 4 GiB between it and the previous entry, or for
    the record at 0. It is then kept: a hit that leads to no record does no harm, but a key that is not found does.
    """
    entry = table.entry(number)
    key_hash, entry_offset, _, previous = entry
    if not _is_below(entry, physical_offset) or key_hash < 0 or not 0 <= previous < number:
        return False
    if table.slot(key_hash) < number:
        return False
    if number == 1:
        return entry_offset == table.header().begin_physical_offset
    if entry_offset < table.entry(number - 1)[1]:
        return False
    return previous == 0 or (table.entry(previous)[0] - key_hash) % table.slot_count == 0


def keep(index: IndexService, count: int, store_timestamp_ms: Callable[[int], int | None] | None = None) -> None:
    """Restore the newest file as if only its first `count` entries had ever been put; the caller syncs the changes.

    Slots come first, while the entries that lead back still exist; then entries; then the header. A crash in between
    leaves what any crash may leave, and the next `keep` produces the same bytes.

    Parameters
    ----------
    index : IndexService
    count : int
        At least 1.
    store_timestamp_ms : callable | None
        As for `rewind`.
    """
    table, written = index.files[-1], index.written
    written.opened(table.path)
    used_count = _repair_slots(table, count, written)
    _zero_entries(table, count + 1, written)
    header = table.header()
    _, physical_offset, seconds, _ = table.entry(count)
    end_ms = store_timestamp_ms(physical_offset) if store_timestamp_ms is not None else None
    same = (header.entry_count, header.end_physical_offset) == (count + 1, physical_offset)
    if not same or end_ms not in (None, header.end_timestamp_ms):  # half of a header may have been written
        if end_ms is None:
            # The first entry of a second file counts its seconds from the end of the previous file.
            end_ms = header.begin_timestamp_ms + (seconds * 1000 if count > 1 else 0)
        header = header._replace(
            end_timestamp_ms=end_ms,
            end_physical_offset=physical_offset,
            slot_count=used_count,
            entry_count=count + 1,
        )
        table.disk.pwrite(written.writable(table.path), header.to_bytes(), 0)


def _zero_entries(table: IndexTable, first: int, written: WrittenFiles) -> None:
    """Write zeros from entry `first` on, except where there are zeros already."""
    position = table.entry_position(first)
    file = written.opened(table.path)
    for start, end in table.disk.data_ranges(file, position, table.size):
        for at in range(start, end, _SCAN_SIZE):
            if any(table.disk.pread(file, min(_SCAN_SIZE, end - at), at)):
                table.disk.punch(written.writable(table.path), position, table.size - position)
                return


def _repair_slots(table: IndexTable, count: int, written: WrittenFiles) -> int:
    """Point every slot to the newest of its entries up to `count`; return how many slots are then in use."""
    used_count = 0
    stale: list[NDArray[np.int64]] = []
    stale_heads: list[NDArray[np.int32]] = []

    for first in range(0, table.slot_count, _SLOT_CHUNK_COUNT):
        heads = table.slots(first, min(_SLOT_CHUNK_COUNT, table.slot_count - first))
        places = np.flatnonzero((heads > count) | (heads < 0))
        used_count += int(np.count_nonzero(heads)) - len(places)
        stale.append(places + first)
        stale_heads.append(heads[places])

    slots = np.concatenate(stale)
    if len(slots):
        numbers = _newest(table, slots, np.concatenate(stale_heads), count)
        pages = SlotPages(table.disk, written.writable(table.path), table.slot_count, np.unique(page_of(slots)))
        pages.slots[pages.places(slots)] = numbers
        pages.write()
        used_count += int(np.count_nonzero(numbers))
    return used_count


def _newest(table: IndexTable, slots: NDArray[np.int64], heads: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return the newest entry up to `count` in each of these slots, 0 for none.

    It is found back along the chains, or else by a scan.
    """
    numbers = heads.copy()
    broken: NDArray[np.bool_] = (numbers < 0) | (numbers >= table.max_entry_count)
    numbers[broken] = 0
    end = int(numbers.max()) + 1
    while end > count + 1:
        first = max(count + 1, end - _ENTRY_CHUNK_COUNT)
        # Read one entry more: it shows whether a split entry before it is whole.
        entries = table.entries(first, min(end + 1, table.max_entry_count) - first)
        _follow(table, slots, numbers, broken, first, entries)
        end = first
    if broken.any():
        numbers[broken] = _scan(table, slots[broken], count)
    return numbers


def _follow(
    table: IndexTable,
    slots: NDArray[np.int64],
    numbers: NDArray[np.int32],
    broken: NDArray[np.bool_],
    first: int,
    entries: NDArray[np.void],
) -> None:
    """Follow the chains at `numbers` to below `first`, in place; those that cannot be trusted become `broken`."""
    positions = table.entry_position(first) + np.arange(len(entries), dtype=np.int64) * INDEX_ENTRY.size
    split = positions % _SECTOR_SIZE > _SECTOR_SIZE - INDEX_ENTRY.size
    hashes, previous = entries["key_hash"], entries["previous"]
    is_there = (hashes != 0) | (entries["physical_offset"] != 0) | (entries["seconds"] != 0) | (previous != 0)
    # A split entry that says "none before" may have lost that half, unless its second sector also has the next entry.
    next_is_there = np.append(is_there[1:], False)
    whole = is_there & ((previous > 0) | ~split | next_is_there)
    for _ in range(_MAX_ROUNDS):
        here = np.flatnonzero(numbers >= first)
        if not len(here):
            return
        at = numbers[here] - first
        sound = whole[at] & (hashes[at] % table.slot_count == slots[here])
        sound &= (previous[at] >= 0) & (previous[at] < numbers[here])
        numbers[here] = np.where(sound, previous[at], 0)
        broken[here[~sound]] = True
    here = np.flatnonzero(numbers >= first)  # one key over and over: a scan is cheaper
    numbers[here] = 0
    broken[here] = True


def _scan(table: IndexTable, slots: NDArray[np.int64], count: int) -> NDArray[np.int32]:
    """Find the same as `_newest` by reading the entries from `count` downwards until each slot has one."""
    numbers = np.zeros(len(slots), np.int32)
    places = np.full(table.slot_count, -1, np.int32)
    places[slots] = np.arange(len(slots), dtype=np.int32)
    missing, end = len(slots), count + 1

    while end > 1 and missing:
        first = max(1, end - _ENTRY_CHUNK_COUNT)
        places_of_entries = places[table.entries(first, end - first)["key_hash"] % table.slot_count]
        wanted = np.flatnonzero(places_of_entries >= 0)
        np.maximum.at(numbers, places_of_entries[wanted], (wanted + first).astype(np.int32))
        done = np.unique(places_of_entries[wanted])
        places[slots[done]] = -1
        missing -= len(done)
        end = first
    return numbers
