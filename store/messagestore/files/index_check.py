"""Checks that the index leads to every record that has a key.

There are three checks, and each costs one pass over the entries. `missing` finds records without an entry for one of
their keys; entries are in log order, so those of a stretch of the log are neighbours. `wrong_times` finds headers and
entries with wrong times. `unreachable` finds entries that the chain of their slot does not reach. It reads entries from
the newest to the oldest, and remembers for each slot where its chain continues:

    slot -> newest entry -> the one before -> ... -> 0          a search does not find an entry that the chain skips

The checks may run while another process puts: they pass through entries that the header does not count yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from messagestore.files.index_table import MAX_SECONDS, IndexHeader, IndexTable
from messagestore.format.layout import INDEX_ENTRY, INDEX_HEADER

_ENTRY_CHUNK_COUNT = 1 << 20
_SLOT_CHUNK_COUNT = 1 << 22
_LOOKED_UP_COUNT = 100
"""This many keys without an entry at their place are looked up as a search does it, before they count as missing."""
_LOOKS = 3
_LOOK_PAUSE_S = 0.01


def missing(
    tables: Sequence[IndexTable], key_hashes: NDArray[np.int32], physical_offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the physical offsets of the records that lack an entry for one of their keys, ascending, each once.

    Parameters
    ----------
    tables : sequence of IndexTable
        Oldest first.
    key_hashes, physical_offsets : int32[k], int64[k]
        The hash of each key and the offset of its record, in log order. An entry counts if it is in a file, whether or
        not the chain of its slot leads to it: see `unreachable`.
    """
    if not len(key_hashes):
        return np.empty(0, np.int64)
    first, last = int(physical_offsets[0]), int(physical_offsets[-1])
    blocks = [_entries_between(table, first, last) for table in tables]
    hashes = np.concatenate([np.empty(0, np.int32), *(block["key_hash"] for block in blocks)])
    offsets = np.concatenate([np.empty(0, np.int64), *(block["physical_offset"] for block in blocks)])
    if np.array_equal(hashes, key_hashes) and np.array_equal(offsets, physical_offsets):
        return np.empty(0, np.int64)
    return _missing_one_by_one(
        tables, set(zip(hashes.tolist(), offsets.tolist(), strict=True)), key_hashes, physical_offsets
    )


def _missing_one_by_one(
    tables: Sequence[IndexTable],
    entry_keys: set[tuple[int, int]],
    key_hashes: NDArray[np.int32],
    physical_offsets: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Loop over the keys where entries and keys differ (an entry is missing, or a broker has put one twice)."""
    lost: list[int] = []
    for key in zip(key_hashes.tolist(), physical_offsets.tolist(), strict=True):
        if key not in entry_keys:
            # A damaged entry may have misled the search for the stretch.
            looked_up = len(lost) < _LOOKED_UP_COUNT and any(_is_found(table, *key) for table in tables)
            if not looked_up:
                lost.append(key[1])
    return np.unique(np.array(lost, np.int64))


def _is_found(table: IndexTable, key_hash: int, physical_offset: int) -> bool:
    header = table.header()
    if not header.begin_physical_offset <= physical_offset <= header.end_physical_offset:
        return False
    return physical_offset in table.search(key_hash, header.entry_count, 0, 1 << 62)


def wrong_times(
    tables: Sequence[IndexTable], physical_offsets: NDArray[np.int64], timestamps_ms: NDArray[np.int64]
) -> list[tuple[str, int, str, str]]:
    """Return wrong times in headers and entries of these records, which a search within a time range would miss.

    Parameters
    ----------
    tables : sequence of IndexTable
    physical_offsets, timestamps_ms : int64[n]
        Where each record begins, ascending, and its store time.

    Returns
    -------
    list of (path, position, what is expected, what was found)
    """
    faults: list[tuple[str, int, str, str]] = []
    first, last = int(physical_offsets[0]), int(physical_offsets[-1])
    for table in tables:
        header = table.header()
        if header.entry_count <= 1 or header.end_physical_offset < first or header.begin_physical_offset > last:
            continue

        for name in ("begin", "end"):
            at, time_ms = getattr(header, f"{name}_physical_offset"), getattr(header, f"{name}_timestamp_ms")
            row = int(np.searchsorted(physical_offsets, at))
            if first <= at <= last and physical_offsets[row] == at and timestamps_ms[row] != time_ms:
                position = INDEX_HEADER.offset(f"{name}_timestamp_ms")
                faults.append((table.path, position, f"{int(timestamps_ms[row])}, the time of {at}", f"{time_ms}"))

        # The time of the first entry is relative to the previous file.
        start = max(2, _first_at_or_above(table, first, header.entry_count))
        entries = table.entries(start, max(0, _first_at_or_above(table, last + 1, header.entry_count) - start))
        rows = np.minimum(np.searchsorted(physical_offsets, entries["physical_offset"]), len(physical_offsets) - 1)
        has_record = physical_offsets[rows] == entries["physical_offset"]
        wanted = np.clip((timestamps_ms[rows] - header.begin_timestamp_ms) // 1000, 0, MAX_SECONDS)
        wanted[:] = wanted if header.begin_timestamp_ms > 0 else 0

        for number in np.flatnonzero(has_record & (entries["seconds"] != wanted))[:_LOOKED_UP_COUNT].tolist():
            position = table.entry_position(start + number) + INDEX_ENTRY.offset("seconds")
            faults.append((table.path, position, f"{int(wanted[number])} s", f"{int(entries['seconds'][number])} s"))
    return faults


def wrong_headers(tables: Sequence[IndexTable]) -> list[tuple[str, int, str, str]]:
    """Return the headers that do not match the records of their first and last entry, in the form of `wrong_times`.

    A file without entries begins and ends where the file before it ends, as in RocketMQ. A record without keys makes
    such a file if the one before is full.
    """
    faults: list[tuple[str, int, str, str]] = []
    before = None
    for table in tables:
        header = table.header()
        if header.entry_count <= 1:
            faults += [] if before is None else _wrong_without_entries(table, header, before)
        else:
            for name, number in (("begin", 1), ("end", header.entry_count - 1)):
                at = getattr(header, f"{name}_physical_offset")
                if number < table.max_entry_count and table.entry(number)[1] != at:
                    position = INDEX_HEADER.offset(f"{name}_physical_offset")
                    faults.append((table.path, position, f"{table.entry(number)[1]}, as entry {number}", f"{at}"))
        before = header
    return faults


def _wrong_without_entries(
    table: IndexTable, header: IndexHeader, before: IndexHeader
) -> list[tuple[str, int, str, str]]:
    """Return the fields of the header of a file without entries that do not match the header of the file before."""
    faults = []
    for what in ("timestamp_ms", "physical_offset"):
        expected = getattr(before, f"end_{what}")
        for name in (f"begin_{what}", f"end_{what}"):
            value = getattr(header, name)
            if value != expected:
                words = f"{expected}, the end of the file before, because there is no entry"
                faults.append((table.path, INDEX_HEADER.offset(name), words, f"{value}"))
    return faults


def _entries_between(table: IndexTable, first: int, last: int) -> NDArray[np.void]:
    """Return the entries of records from physical offset `first` to `last`."""
    header = table.header()
    if header.end_physical_offset < first or header.begin_physical_offset > last:
        return table.entries(1, 0)
    start = _first_at_or_above(table, first, header.entry_count)
    end = _first_at_or_above(table, last + 1, header.entry_count)
    return table.entries(start, max(0, end - start))


def _first_at_or_above(table: IndexTable, physical_offset: int, end: int) -> int:
    low, high = 1, end
    while low < high:
        middle = (low + high) // 2
        if table.entry(middle)[1] < physical_offset:
            low = middle + 1
        else:
            high = middle
    return low


def unreachable(tables: Sequence[IndexTable]) -> list[tuple[str, int, int]]:
    """Return path, position and physical offset of each entry that no search can find. This reads all files once.

    A put counts its entries in the header before slots lead to them, so the entries found are checked a second time.
    """
    lost = []
    for table in tables:
        numbers = _unreachable_in(table).tolist()
        for _ in range(_LOOKS if numbers else 0):
            time.sleep(_LOOK_PAUSE_S)
            again = set(_unreachable_in(table).tolist())
            numbers = [number for number in numbers if number in again]
        lost += [(table.path, table.entry_position(number), table.entry(number)[1]) for number in numbers]
    return lost


def _unreachable_in(table: IndexTable) -> NDArray[np.int64]:
    """Return the numbers, ascending, of the entries that no search finds because their slot's chain misses them.

    Memory: 4 bytes for each slot of the file, and the space of a million entries.
    """
    count = table.header().entry_count
    if count <= 1:
        return np.empty(0, np.int64)
    heads = _heads(table, count)
    lost: list[NDArray[np.int64]] = []
    for end in range(count, 1, -_ENTRY_CHUNK_COUNT):
        start = max(1, end - _ENTRY_CHUNK_COUNT)
        lost.append(_passed_over(table, start, end, heads))
    return np.sort(np.concatenate(lost))


def _heads(table: IndexTable, count: int) -> NDArray[np.int32]:
    """Return the newest entry below `count` in each slot's chain, 0 for none."""
    parts = [
        table.slots(first, min(_SLOT_CHUNK_COUNT, table.slot_count - first))
        for first in range(0, table.slot_count, _SLOT_CHUNK_COUNT)
    ]
    heads = np.concatenate(parts)
    # One by one, because these are only the entries that are being put at this moment.
    for slot in np.flatnonzero(heads >= count).tolist():
        number = int(heads[slot])
        while number >= count:
            key_hash, _, _, previous = table.entry(number) if number < table.max_entry_count else (-1, 0, 0, 0)
            if (key_hash - slot) % table.slot_count or previous >= number:
                previous = 0
            number = previous
        heads[slot] = number
    return heads


def _passed_over(table: IndexTable, start: int, end: int, heads: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the entries of `start..end` that no chain reaches; move `heads` to where the chains continue below."""
    entries = table.entries(start, end - start)[::-1]
    numbers = np.arange(end - 1, start - 1, -1)
    slots = entries["key_hash"] % table.slot_count
    order = np.argsort(slots, kind="stable")  # newest first within a slot
    slots, numbers, previous = slots[order], numbers[order], entries["previous"][order]
    first_of_slot = np.append(True, slots[1:] != slots[:-1])
    leads_to = np.where(first_of_slot, heads[slots], np.append(0, previous[:-1]))
    broken = np.unique(slots[leads_to != numbers])
    last_of_slot = np.append(first_of_slot[1:], True)
    old = heads[broken]
    heads[slots[last_of_slot]] = previous[last_of_slot]
    heads[broken] = old
    lost = []
    for slot in broken.tolist():  # one chain at a time, because only damaged chains are left
        number = int(heads[slot])
        low, high = np.searchsorted(slots, [slot, slot + 1]).tolist()
        for i in range(low, high):
            if int(numbers[i]) == number:
                number = int(previous[i])
            else:
                lost.append(int(numbers[i]))
        heads[slot] = number
    return np.array(lost, np.int64)
