"""A broker's files, read with `struct` from RocketMQ's description alone: nothing here knows the package that is tested."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

V1, V2, BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194
UNIT = struct.Struct(">qiq")


@dataclass(frozen=True)
class Record:
    """What the walk needs of a record."""

    physical_offset: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    sys_flag: int

    @property
    def has_unit(self) -> bool:
        """PREPARED and ROLLBACK have none."""
        return self.sys_flag & 0xC in (0, 0x8)


def segments(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir()) if (root / "commitlog").exists() else []


def records(root: Path) -> tuple[list[Record], int]:
    """The records as Java's recovery walks them (size, magic, body CRC, lengths), and where the walk ends."""
    found: list[Record] = []
    end = 0
    for path in segments(root):
        data, base, at = path.read_bytes(), int(path.name), 0
        end = base
        while True:
            size, magic = struct.unpack_from(">iI", data, at) if at + 8 <= len(data) else (0, 0)
            if magic == BLANK:
                break
            record = _record(data, at, size, magic, base) if magic in (V1, V2) else None
            if record is None:
                return found, base + at
            found.append(record)
            at += size
            end = base + at
    return found, end


def _record(data: bytes, at: int, size: int, magic: int, base: int) -> Record | None:
    if size < 91 or at + size > len(data):
        return None
    body_crc, queue_id = struct.unpack_from(">ii", data, at + 8)
    queue_offset, physical_offset, sys_flag = struct.unpack_from(">qqi", data, at + 20)
    body_at = at + 48 + (20 if sys_flag & 0x10 else 8) + 8 + (20 if sys_flag & 0x20 else 8) + 12
    try:
        (body_size,) = struct.unpack_from(">i", data, body_at)
        topic_at = body_at + 4 + body_size
        width = 1 if magic == V1 else 2
        topic_size = int.from_bytes(data[topic_at : topic_at + width], "big", signed=True)
        properties_at = topic_at + width + topic_size
        (properties_size,) = struct.unpack_from(">h", data, properties_at)
    except struct.error:
        return None
    if body_size < 0 or topic_size < 0 or properties_size < 0 or properties_at + 2 + properties_size != at + size:
        return None
    body = data[body_at + 4 : topic_at]
    if body and zlib.crc32(body) & 0x7FFFFFFF != body_crc:
        return None
    topic = data[topic_at + width : properties_at].decode("utf-8", "replace")
    assert physical_offset == base + at, f"a record at {base + at} says it lies at {physical_offset}"
    return Record(base + at, size, topic, queue_id, queue_offset, sys_flag)


def units(root: Path, topic: str, queue_id: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Units `[begin, end)` of a queue: physical offset, size, tags code."""
    found = []
    for path in sorted((root / "consumequeue" / topic / str(queue_id)).glob("*")):
        data, first = path.read_bytes(), int(path.name) // UNIT.size
        low, high = max(begin, first), min(end, first + len(data) // UNIT.size)
        found += [UNIT.unpack_from(data, (number - first) * UNIT.size) for number in range(low, high)]
    return found


def log_bytes(root: Path, end: int) -> bytes:
    """The log's bytes up to an offset."""
    return b"".join(path.read_bytes()[: max(0, end - int(path.name))] for path in segments(root))


def zero(root: Path, begin: int, end: int) -> None:
    """Bytes that never reached the disk."""
    for path in segments(root):
        base, size = int(path.name), path.stat().st_size
        low, high = max(begin, base), min(end, base + size)
        if low < high:
            with open(path, "r+b") as file:
                file.seek(low - base)
                file.write(bytes(high - low))


def queue_folders(root: Path) -> list[Path]:
    """`consumequeue/<topic>/<queue id>`."""
    return sorted(path for path in (root / "consumequeue").glob("*/*") if path.is_dir())


def lives(found: list[Record]) -> dict[tuple[str, int], list[list[Record]]]:
    """Per queue its records with units, cut where queue offsets begin again: the topic was deleted and made again."""
    queues: dict[tuple[str, int], list[list[Record]]] = {}
    for record in found:
        if record.has_unit:
            parts = queues.setdefault((record.topic, record.queue_id), [[]])
            if parts[-1] and record.queue_offset <= parts[-1][-1].queue_offset:
                parts.append([])
            parts[-1].append(record)
    return queues
