"""The checker's own decoders of records, `spark/state` and `spark/journal`, which use only `struct`."""

from __future__ import annotations

import binascii
import json
import re
import struct
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import reference

BATCH_TOPIC = "rmq_sys_spark_sink"


class Record(NamedTuple):
    """The contents of one record; `fault` if it is not a record."""

    size: int
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_ms: int
    born_ms: int
    flag: int
    body: bytes
    properties: tuple[tuple[str, str], ...]
    tags_code: int
    key_hashes: tuple[int, ...]
    fault: str = ""


@lru_cache(1 << 16)
def parse(data: bytes) -> Record:
    """Parse one whole record."""
    try:
        return _parse(data)
    except (struct.error, ValueError, IndexError) as error:
        return broken(len(data), f"framing: {error}")


def broken(size: int, fault: str) -> Record:
    return Record(size, "", -1, -1, -1, 0, 0, 0, b"", (), 0, (), fault)


def _parse(data: bytes) -> Record:
    size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_ms = struct.unpack_from(
        ">iIiiiqqiq", data
    )
    if magic not in (reference.V1, reference.V2) or size != len(data):
        return broken(len(data), f"size {size}, magic {magic:#x}")
    at = 48 + (20 if sys_flag & 0x10 else 8)
    (store_ms,) = struct.unpack_from(">q", data, at)
    at += 8 + (20 if sys_flag & 0x20 else 8) + 12
    (body_size,) = struct.unpack_from(">i", data, at)
    if not 0 <= body_size <= size:
        return broken(size, f"body size {body_size}")
    body = data[at + 4 : at + 4 + body_size]
    at += 4 + body_size
    head = ">h" if magic == reference.V2 else ">b"
    (topic_size,) = struct.unpack_from(head, data, at)
    at += struct.calcsize(head)
    topic = data[at : at + topic_size].decode("ascii")
    (properties_size,) = struct.unpack_from(">h", data, at + topic_size)
    at += topic_size + 2
    if topic_size <= 0 or properties_size < 0 or at + properties_size != size:
        return broken(size, f"topic size {topic_size}, properties size {properties_size}, which end at no {size}")
    text = data[at:]
    if (reference.body_crc(body) if body else 0) != crc:
        return broken(size, "body CRC")
    has_crc = text[-20:-11] == b"__CRC32#\x01"  # where users may have written it, it is not a CRC
    if sum(x == y for x, y in zip(text[-20:-11], b"__CRC32#\x01", strict=False)) == 8:
        return broken(size, f"a property {text[-20:-12]!r}, which is __CRC32# but for one character")
    if has_crc and (len(text) < 20 or text[-20:] != reference.property_crc(data[:-20])):
        return broken(size, "property CRC")
    if topic == BATCH_TOPIC and not has_crc:
        return broken(size, "a BATCH record without __CRC32#")
    if text and not text.endswith(b"\x02"):
        return broken(size, "properties without an end")
    if not re.fullmatch(r"[%|a-zA-Z0-9_-]{1,255}", topic) or queue_id < 0 or queue_offset < 0:
        return broken(size, f"topic {topic!r}, queue {queue_id}, queue offset {queue_offset}")
    pairs = [part.partition(b"\x01") for part in text.split(b"\x02") if part]
    properties = tuple((name.decode(), value.decode()) for name, _, value in pairs if name != b"__CRC32#")
    fields = dict(properties)
    keys = [*fields.get("KEYS", "").split(" "), fields.get("UNIQ_KEY", "")]
    return Record(
        size, topic, queue_id, queue_offset, physical_offset, store_ms, born_ms, flag, body, properties,
        reference.java_hash(fields["TAGS"]) if "TAGS" in fields else 0,
        tuple(reference.index_key(topic, key) for key in keys if key),
    )  # fmt: skip


_RESERVED = ("KEYS", "TAGS", "UNIQ_KEY", "WAIT", "CLUSTER", "DELAY", "REAL_TOPIC", "REAL_QID")
_ROW_FIELDS = ("queue_id", "topic", "flag", "born_ms")
DIGESTS = {"rowsum-1": reference.row_hash}


@lru_cache(1 << 16)
def _row_hash(name: str, record: Record, given: tuple[bool, ...]) -> int:
    """Return the row hash of a record, if the columns in `given` (of `_ROW_FIELDS`) were the user's own."""
    fields = dict(record.properties)
    own = {k: v for k, v in fields.items() if k not in _RESERVED}
    values: dict[str, Any] = {
        "keys": fields["KEYS"].split(" ") if "KEYS" in fields else None,
        "tags": fields.get("TAGS"),
        "properties": own or None,
    }
    if "REAL_TOPIC" in fields:  # a delayed message
        record = record._replace(topic=fields["REAL_TOPIC"], queue_id=int(fields["REAL_QID"]))
        values["delay_time_level"] = int(fields["DELAY"])
    values |= {name: getattr(record, name) for name, is_given in zip(_ROW_FIELDS, given, strict=True) if is_given}
    return DIGESTS[name](record.body, **values)


def digest_holds(name: str, digest: str, rows: list[Record]) -> bool:
    """Whether the digest of this name is that of the rows.

    The log does not say which columns the user gave, so each possibility is tried.
    """
    for given in product((True, False), (False, True), (False, True), (False, True)):
        if f"{sum(_row_hash(name, row, given) for row in rows) % 2**64:016x}" == digest:
            return True
    return False


class Slot(NamedTuple):
    """A slot of `spark/state`."""

    counter: int
    in_flight: int
    visible_end: int
    clean_end: int
    anchor_position: int
    anchor_size: int
    anchor_crc: int
    boot_hash: int
    flags: int
    writer_pid: int


def slot_of(data: bytes) -> Slot | None:
    """Return the slot of a `spark/state` that counts."""
    best: Slot | None = None
    for position in (0, 512):
        *values, crc = struct.unpack_from(">qqqqqiIIIiI", data, position)
        if crc == binascii.crc32(data[position : position + 60]) and (best is None or values[0] > best.counter):
            best = Slot(*values)
    return best


def ends_of(data: bytes, limit: int) -> dict[str, Any]:
    """Parse the file `spark/ends`.

    The result has `end`, the clean end of the newest block at or below a limit, and `queues`: (topic, queue id) ->
    number of units, and place, size and tags code of the last one. Whatever follows an invalid block is ignored.
    """
    queues: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    at, before, newest = 0, 0, -1
    while at + 72 <= len(data):
        magic, version, previous, end, _, _, _, count, size, body_crc, _, crc = struct.unpack_from(
            ">8siIqqiIqqIqI", data, at
        )

        body = data[at + 72 : at + 72 + count * 48 + size]
        if magic != b"MSQENDS1" or version != 1 or previous != before or crc != binascii.crc32(data[at : at + 68]):
            break
        if len(body) != count * 48 + size or binascii.crc32(body) != body_crc or end > limit:
            break

        names = json.loads(body[count * 48 :])
        for number in range(count):
            units, place, tags, _, unit_size, topic, queue_id, _ = struct.unpack_from(">qqqqiiiI", body, number * 48)
            queues[names[topic], queue_id] = units, place, unit_size, tags
        at, before, newest = at + 72 + len(body), crc, end

    return {"end": newest, "queues": {key: seal for key, seal in queues.items() if seal[0] >= 0}}


def journal_of(data: bytes | None) -> dict[str, Any] | None:
    """Parse the file `spark/journal`; None if there is no file.

    The result has covered, checkpoint_crc, apps (rows of each), and the names that came with it; or a `fault` if a
    checksum does not match.
    """
    if data is None:
        return None
    if len(data) < 64 or data[:8] != b"MSJOURNL":
        return {"fault": f"{len(data)} bytes that begin with {data[:8]!r}"}

    version, flags, covered, end, count, size, checkpoint_crc, body_crc, _, crc = struct.unpack_from(
        ">iIqqqqIIII", data, 8
    )
    body = data[64:]
    if crc != binascii.crc32(data[:60]) or body_crc != binascii.crc32(body) or version != 1:
        return {"fault": f"format version {version}, or other bytes"}
    if len(body) != count * 56 + size:
        return {"fault": f"{len(body)} bytes behind the header"}

    names = json.loads(body[count * 56 :])
    apps: dict[str, list[list[Any]]] = {}
    for number in range(count):
        row = struct.unpack_from(">qqqqQiiiI", body, number * 56)
        apps.setdefault(names["apps"][row[5]], []).append(
            [
                row[0],
                "user" if row[8] & 1 else "spark",
                None if row[6] < 0 else names["queries"][row[6]],
                *row[1:4],
                f"{row[4]:016x}",
                names["topics"][row[7]],
                bool(row[8] & 2),
            ]
        )

    return {
        "covered": covered,
        "end": end,
        "complete": not flags & 2,
        "checkpoint_crc": checkpoint_crc if flags & 1 else None,
        "apps": apps,
        "replaced": names["replaced"],
        "identity": names["identity"],
        "queues": names.get("queues", {}),
    }
