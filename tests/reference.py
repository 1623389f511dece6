"""A second codec, one record at a time, with `struct` only: the oracle of the tests.

Written from the description of RocketMQ's format and sharing no code with the package. Slow, and meant to be read.
"""

from __future__ import annotations

import binascii
import ipaddress
import struct

import xxhash

V1, V2, BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194


def body_crc(body: bytes) -> int:
    return binascii.crc32(body) & 0x7FFFFFFF


def property_crc(record_without_it: bytes) -> bytes:
    digits = str(binascii.crc32(record_without_it) & 0x7FFFFFFF)
    return b"__CRC32#\x01" + ("0" * (10 - len(digits)) + digits)[::-1].encode() + b"\x02"


def java_hash(text: str) -> int:
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for (unit,) in struct.iter_unpack(">H", units):
        value = (31 * value + unit) % 2**32
    return value - 2**32 if value >= 2**31 else value


def index_key(topic: str, key: str) -> int:
    value = java_hash(topic + "#" + key)
    return 0 if value == -(2**31) else abs(value)


def host(text: str) -> bytes:
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + struct.pack(">i", int(port))


def host_text(packed: bytes) -> str:
    (port,) = struct.unpack(">i", packed[-4:])
    address = ipaddress.ip_address(packed[:-4])
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def message_id(store_host: str, physical_offset: int) -> str:
    return (host(store_host) + struct.pack(">q", physical_offset)).hex().upper()


def properties_text(properties: list[tuple[str, str]]) -> bytes:
    return b"".join(name.encode() + b"\x01" + value.encode() + b"\x02" for name, value in properties)


def properties_of(text: bytes) -> dict[str, str]:
    found = {}
    for segment in text.split(b"\x02"):
        name, separator, value = segment.partition(b"\x01")
        if name and separator and value:
            found[name.decode(errors="replace")] = value.decode(errors="replace")
    return found


def encode(
    *,
    topic: str,
    body: bytes,
    properties: list[tuple[str, str]] = (),  # type: ignore[assignment]
    queue_id: int = 0,
    flag: int = 0,
    queue_offset: int = 0,
    physical_offset: int = 0,
    sys_flag: int = 0,
    born_ms: int = 0,
    born_host: str = "127.0.0.1:0",
    store_ms: int = 0,
    store_host: str = "127.0.0.1:10911",
    reconsume_times: int = 0,
    prepared_offset: int = 0,
    with_crc: bool = False,
) -> bytes:
    born, store = host(born_host), host(store_host)
    sys_flag |= (0x10 if len(born) == 20 else 0) | (0x20 if len(store) == 20 else 0)
    name = topic.encode()
    long_topic = len(name) > 127
    text = properties_text(properties)
    size = 48 + len(born) + 8 + len(store) + 12 + 4 + len(body) + (2 if long_topic else 1) + len(name) + 2 + len(text)
    size += 20 if with_crc else 0
    record = struct.pack(">iI", size, V2 if long_topic else V1)
    record += struct.pack(">iii", body_crc(body), queue_id, flag)
    record += struct.pack(">qqi", queue_offset, physical_offset, sys_flag)
    record += struct.pack(">q", born_ms) + born + struct.pack(">q", store_ms) + store
    record += struct.pack(">iq", reconsume_times, prepared_offset)
    record += struct.pack(">i", len(body)) + body
    record += struct.pack(">h" if long_topic else ">b", len(name)) + name
    record += struct.pack(">h", len(text) + (20 if with_crc else 0)) + text
    return record + property_crc(record) if with_crc else record


def decode(record: bytes) -> dict:
    """Every field of a whole record; trusts it."""
    size, magic, crc, queue_id, flag = struct.unpack_from(">iIiii", record)
    queue_offset, physical_offset, sys_flag, born_ms = struct.unpack_from(">qqiq", record, 20)
    at = 48
    born = record[at : at + (20 if sys_flag & 0x10 else 8)]
    at += len(born)
    (store_ms,) = struct.unpack_from(">q", record, at)
    store = record[at + 8 : at + 8 + (20 if sys_flag & 0x20 else 8)]
    at += 8 + len(store)
    reconsume_times, prepared_offset, body_size = struct.unpack_from(">iqi", record, at)
    body = record[at + 16 : at + 16 + body_size]
    at += 16 + body_size
    (topic_size,) = struct.unpack_from(">h" if magic == V2 else ">b", record, at)
    at += 2 if magic == V2 else 1
    topic = record[at : at + topic_size].decode()
    (properties_size,) = struct.unpack_from(">h", record, at + topic_size)
    at += topic_size + 2
    assert at + properties_size == size
    return {
        "topic": topic,
        "queue_id": queue_id,
        "queue_offset": queue_offset,
        "physical_offset": physical_offset,
        "size": size,
        "body": body,
        "all_properties": properties_of(record[at:size]),
        "flag": flag,
        "sys_flag": sys_flag,
        "born_timestamp_ms": born_ms,
        "store_timestamp_ms": store_ms,
        "born_host": host_text(born),
        "store_host": host_text(store),
        "reconsume_times": reconsume_times,
        "prepared_transaction_offset": prepared_offset,
        "body_crc": crc,
        "offset_message_id": (store + struct.pack(">q", physical_offset)).hex().upper(),
    }


def unit(physical_offset: int, size: int, tags_code: int) -> bytes:
    return struct.pack(">qiq", physical_offset, size, tags_code)


def index_header(begin_ms: int, end_ms: int, begin: int, end: int, slot_count: int, entry_count: int) -> bytes:
    return struct.pack(">qqqqii", begin_ms, end_ms, begin, end, slot_count, entry_count)


def index_entry(key_hash: int, physical_offset: int, seconds: int, previous: int) -> bytes:
    return struct.pack(">iqii", key_hash, physical_offset, seconds, previous)


# ---- the digest rowsum-1, one row at a time


def row_hash(
    body: bytes | None,
    *,
    topic: str | None = None,
    keys: list[str] | None = None,
    tags: str | None = None,
    properties: dict[str, str] | None = None,
    flag: int | None = None,
    sharding_key: str | None = None,
    queue_id: int | None = None,
    born_ms: int | None = None,
    delay_time_level: int | None = None,
    unique_key: str | None = None,
) -> int:
    def of_text(text: str | None) -> int | None:
        return None if text is None else xxhash.xxh3_64_intdigest(text.encode())

    values = [
        xxhash.xxh3_64_intdigest(body or b""),
        of_text(topic),
        of_text(" ".join(keys)) if keys else None,
        of_text(tags),
        sum(of_text(f"{k}\x01{v}") or 0 for k, v in properties.items()) if properties else None,
        flag,
        of_text(sharding_key),
        queue_id,
        born_ms,
        delay_time_level,
        of_text(unique_key),
    ]
    items = [struct.pack("<QQ", k, value % 2**64) for k, value in enumerate(values) if value is not None]
    return int(xxhash.xxh3_64_intdigest(b"".join(items)))
