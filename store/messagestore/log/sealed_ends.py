"""`spark/ends`: records where each queue ends at the clean end.

A ConsumeQueue file does not say how many units it must have, so a file that was cut, zeroed, or replaced by an older
copy looks like a shorter queue. `spark/ends` holds the seal of each queue: its number of units below the clean end C,
its last unit, and a CRC of all units that this project has written since it first knew the queue.

    | block | block | ... |     each: header, entries, names of topics as JSON

A block holds the queues that changed since the previous block, so moving C costs as much as the queues that changed.
Each block refers to the previous one by its checksum, so whatever a torn append leaves after the last valid block is
ignored. When the blocks have become twice as long as the first one, a single block replaces them.

The file may lag behind `spark/state`, which is written first. The log supplies the rest (`seal_check`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from messagestore.files.disk import Disk, replace_file
from messagestore.format.layout import ENDS_ENTRY, ENDS_FORMAT, ENDS_HEADER, ENDS_MAGIC, UNIT
from messagestore.format.record import crc32
from messagestore.log.log_end import Anchor
from messagestore.signal_handlers import pass_on

MAX_SIZE = 256 * 1024 * 1024
"""The file is read up to this many bytes."""
Key = tuple[str, int]
_UNKNOWN = -1
_GROWTH_SIZE = 64 * 1024
_HEADER = ENDS_HEADER.struct
_CRC_POSITION = ENDS_HEADER.offset("crc")


class Seal(NamedTuple):
    """Says where a queue ends; its attributes are the fields of an entry."""

    end: int
    physical_offset: int
    tags_code: int
    crc_from: int
    size: int
    crc: int

    @classmethod
    def of(cls, first: int, units: bytes, old: Seal | None = None) -> Seal:
        """Return the seal of a queue that ended at `old` and then got units from number `first` on, as in its file."""
        crc_from, crc = (old.crc_from, old.crc) if old is not None else (first, 0)
        physical_offset, size, tags_code = UNIT.struct.unpack_from(units, len(units) - UNIT.size)
        end = first + len(units) // UNIT.size
        return cls(end, physical_offset, tags_code, crc_from, size, crc32(units, crc))


NO_RECORD = Anchor(0, 0, 0)


@dataclass
class SealedEnds:
    """Holds the seals of the queues in a part of the log that has been dispatched.

    Parameters
    ----------
    seals : dict of (topic, queue id) to Seal
    clean_end : int
        C of the last block that was read or written.
    anchor : Anchor
        The last record below it.
    """

    seals: dict[Key, Seal] = field(default_factory=dict)
    clean_end: int = 0
    anchor: Anchor = NO_RECORD
    unsealed: dict[Key, int | None] = field(default_factory=dict)
    """Queues whose files must be asked for the last unit, each with the known end or None."""

    def __post_init__(self) -> None:
        self._changed: set[Key] = set()
        self._previous = 0
        self._end = 0
        self._base_size = 0
        self._file: tuple[int, int] | None = None  # inode and size in bytes of the file that this object continues

    # ---- contents

    def end_of(self, key: Key) -> int | None:
        """Return the number of units of a queue; None if it is unknown."""
        if key in self.unsealed:
            return self.unsealed[key]
        seal = self.seals.get(key)
        return None if seal is None else seal.end

    def extend(self, key: Key, first: int, units: bytes) -> None:
        """Add units, as they lie in the file, that were appended to a queue from number `first` on."""
        old, end = self.seals.get(key), first + len(units) // UNIT.size
        if key in self.unsealed or first != (old.end if old is not None else 0):
            self.ask(key, end)
            return
        self.seals[key] = Seal.of(first, units, old)
        self._changed.add(key)

    def ask(self, key: Key, end: int | None = None) -> None:
        """Note that a queue has changed, and that its file must be asked for its last unit."""
        self.unsealed[key] = end

    def answer(self, key: Key, seal: Seal | None) -> None:
        """Add the seal of a queue whose file had to be asked; None: nothing is known about the queue any more."""
        self.unsealed.pop(key, None)
        self._changed.add(key)
        if seal is None:
            self.seals.pop(key, None)
        else:
            self.seals[key] = seal

    # ---- the file

    @classmethod
    def read(cls, disk: Disk, path: str, clean_end: int) -> SealedEnds:
        """Read what the file says about the newest clean end at or below `clean_end`; empty if there is no such block.

        Readers may meet a block that is being appended, and ignore it.
        """
        ends = cls()
        try:
            file = disk.open(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return ends

        try:
            size = disk.length(file)
            data = disk.pread(file, min(size, MAX_SIZE), 0)
            while ends._take(data, clean_end):
                pass
            ends._file = file.inode, size
        finally:
            file.close()
        return ends

    def _take(self, data: bytes, clean_end: int) -> bool:
        """Add the next block; return False if there is no valid one."""
        at = self._end
        if len(data) - at < ENDS_HEADER.size:
            return False

        values = _HEADER.unpack_from(data, at)
        magic, version, previous, block_end, position, size, anchor_crc, count, names_size, body_crc, _, crc = values
        begin = at + ENDS_HEADER.size
        end = begin + count * ENDS_ENTRY.size + names_size

        if (magic, version, previous) != (ENDS_MAGIC, ENDS_FORMAT, self._previous) or block_end > clean_end:
            return False
        if crc != crc32(data[at : at + _CRC_POSITION]) or min(count, names_size) < 0 or end > len(data):
            return False

        body = memoryview(data)[begin:end]
        if crc32(body) != body_crc:
            return False

        try:
            names = json.loads(bytes(body[count * ENDS_ENTRY.size :]))
            rows = np.frombuffer(body, ENDS_ENTRY.dtype, count)
            for seal_end, physical_offset, tags_code, crc_from, unit_size, topic, queue_id, unit_crc in rows.tolist():
                key = str(names[topic]), queue_id
                if seal_end == _UNKNOWN:
                    self.seals.pop(key, None)
                else:
                    self.seals[key] = Seal(seal_end, physical_offset, tags_code, crc_from, unit_size, unit_crc)
        except (ValueError, IndexError, KeyError, TypeError, RecursionError) as error:
            pass_on(error)
            return False

        self.clean_end, self.anchor = block_end, Anchor(position, size, anchor_crc)
        self._end, self._previous = end, crc
        self._base_size = self._base_size or end
        return True

    def write(self, disk: Disk, path: str, via: str, clean_end: int, anchor: Anchor) -> None:
        """Record that all of this holds at a clean end, and sync it. No queue may remain to be asked."""
        if self.unsealed:
            raise AssertionError("queues are left that must be asked")

        try:
            file = disk.open(path, writable=True)
        except FileNotFoundError as error:
            pass_on(error)
            file = None

        try:
            same = file is not None and (file.inode, disk.length(file)) == self._file
            if not same or not self._end or self._end > max(_GROWTH_SIZE, 2 * self._base_size):
                block = self._block(self.seals, clean_end, anchor, 0)
                replace_file(disk, path, block, via=via)
                self._end = self._base_size = len(block)
                self._file = None
            else:
                assert file is not None
                block = self._block(self._changed, clean_end, anchor, self._previous)
                disk.pwrite(file, block, self._end)
                disk.fdatasync(file)
                self._end += len(block)
                self._file = file.inode, disk.length(file)
        finally:
            if file is not None:
                file.close()

        if self._file is None:
            made = disk.open(path)
            self._file = made.inode, disk.length(made)
            made.close()

        self._previous = int.from_bytes(block[_CRC_POSITION : ENDS_HEADER.size], "big")
        self.clean_end, self.anchor = clean_end, anchor
        self._changed.clear()

    def _block(self, keys: Iterable[Key], clean_end: int, anchor: Anchor, previous: int) -> bytes:
        keys = sorted(keys)
        numbers: dict[str, int] = {}
        rows = np.zeros(len(keys), ENDS_ENTRY.dtype)
        unknown = Seal(_UNKNOWN, 0, 0, 0, 0, 0)
        values: list[tuple[Any, ...]] = []

        for key in keys:
            seal = self.seals.get(key, unknown)
            topic = numbers.setdefault(key[0], len(numbers))
            values.append((*seal[:-1], topic, key[1], seal.crc))
        if values:
            rows[:] = values

        names = json.dumps(list(numbers), separators=(",", ":"), ensure_ascii=False).encode()
        body = rows.tobytes() + names
        head = _HEADER.pack(
            ENDS_MAGIC, ENDS_FORMAT, previous, clean_end, *anchor, len(keys), len(names), crc32(body), 0, 0
        )[:_CRC_POSITION]
        return head + crc32(head).to_bytes(4, "big") + body
