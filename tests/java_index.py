"""RocketMQ's index in a few lines of Python: bytes of whole files, one key at a time, `struct` only.

It follows the IndexFile section of store/FORMAT.md and shares no code with the package. Tests compare directories of files
with it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

HEADER = struct.Struct(">qqqqii")
ENTRY = struct.Struct(">iqii")
SLOT = struct.Struct(">i")


@dataclass
class Record:
    """What dispatch knows of a record: its place, its store time, the hashes of its keys."""

    physical_offset: int
    store_timestamp_ms: int
    hashes: list[int] = field(default_factory=list)


class JavaFile:
    """IndexFile.java with IndexHeader.java."""

    def __init__(self, slot_count: int, max_entry_count: int, end_physical: int = 0, end_time: int = 0) -> None:
        self.slot_count = slot_count
        self.max_entry_count = max_entry_count
        self.data = bytearray(40 + 4 * slot_count + 20 * max_entry_count)
        self.begin_time = self.end_time = end_time
        self.begin_physical = self.end_physical = end_physical
        self.used = 0
        self.count = 1
        self.flush()

    @property
    def is_full(self) -> bool:
        return self.count >= self.max_entry_count

    def flush(self) -> None:
        fields = (self.begin_time, self.end_time, self.begin_physical, self.end_physical, self.used, self.count)
        HEADER.pack_into(self.data, 0, *fields)

    def slot_at(self, key_hash: int) -> int:
        return 40 + key_hash % self.slot_count * 4

    def entry_at(self, number: int) -> int:
        return 40 + self.slot_count * 4 + number * 20

    def put_key(self, key_hash: int, physical: int, time: int) -> None:
        (before,) = SLOT.unpack_from(self.data, self.slot_at(key_hash))
        if before <= 0 or before > self.count:
            before = 0
        seconds = 0
        if self.begin_time > 0:
            seconds = min(max(time - self.begin_time, 0) // 1000, 2**31 - 1)
        ENTRY.pack_into(self.data, self.entry_at(self.count), key_hash, physical, seconds, before)
        SLOT.pack_into(self.data, self.slot_at(key_hash), self.count)
        if self.count <= 1:
            self.begin_physical, self.begin_time = physical, time
        if before == 0:
            self.used += 1
        self.count += 1
        self.end_physical, self.end_time = physical, time
        self.flush()

    def select(self, found: list[int], key_hash: int, most: int, begin: int, end: int) -> None:
        (number,) = SLOT.unpack_from(self.data, self.slot_at(key_hash))
        if number <= 0 or number > self.count or self.count <= 1:
            return
        while len(found) < most:
            read_hash, physical, seconds, before = ENTRY.unpack_from(self.data, self.entry_at(number))
            if seconds < 0:
                return
            time = self.begin_time + seconds * 1000
            if read_hash == key_hash and begin <= time <= end:
                found.append(physical)
            if before <= 0 or before > self.count or before == number or time < begin:
                return
            number = before


class JavaIndex:
    """IndexService.java: buildIndex and queryOffset."""

    def __init__(self, slot_count: int, max_entry_count: int) -> None:
        self.slot_count = slot_count
        self.max_entry_count = max_entry_count
        self.files: list[JavaFile] = []

    def last(self) -> JavaFile:
        if not self.files or self.files[-1].is_full:
            end = (self.files[-1].end_physical, self.files[-1].end_time) if self.files else (0, 0)
            self.files.append(JavaFile(self.slot_count, self.max_entry_count, *end))
        return self.files[-1]

    def build(self, record: Record) -> None:
        if record.physical_offset < self.last().end_physical:
            return
        for key_hash in record.hashes:
            self.last().put_key(key_hash, record.physical_offset, record.store_timestamp_ms)

    def query(self, key_hash: int, most: int, begin: int, end: int) -> list[int]:
        found: list[int] = []
        for file in reversed(self.files):
            first, last = file.begin_time, file.end_time
            if (begin < first and end > last) or first <= begin <= last or first <= end <= last:
                file.select(found, key_hash, most, begin, end)
            if first < begin or len(found) >= most:
                break
        return found

    def images(self) -> list[bytes]:
        return [bytes(file.data) for file in self.files]

    def images_with_entries(self) -> list[bytes]:
        return [bytes(file.data) for file in self.files if file.count > 1]
