"""One message to one record, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Callable

import crcmod.predefined
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
import vectors
from messagestore.errors import ChecksumError, CorruptionError, MagicError, MessageIllegalError, TornRecordError
from messagestore.format import layout, record
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.message import Message, MessageExt
from messagestore.format.properties import RESERVED_PROPERTIES

CONFIG = StoreConfig()
STORE_HOST = "10.1.2.3:10911"


def encoded(
    message: Message, *, store_host: str = STORE_HOST, limits: StoreConfig = CONFIG, **more: object
) -> bytearray:
    return record.encode_message(
        message, queue_id=message.queue_id or 0, store_host=pack_host(store_host), limits=limits, **more
    )


def as_reference(message: MessageExt) -> dict:
    """A message as the oracle's decoder gives it."""
    fields = dataclasses.asdict(message)
    fields["all_properties"] = fields.pop("properties") | fields.pop("system_properties")
    for derived in ("keys", "tags", "unique_key"):
        del fields[derived]
    return fields


# ---- known answers


@pytest.mark.parametrize("name", vectors.RECORDS)
def test_java_records_are_made_byte_for_byte(name: str) -> None:
    """What RocketMQ's encoder wrote for these fields, both codecs write."""
    fields, wanted = vectors.FIELDS[name], vectors.RECORDS[name]
    assert reference.encode(**fields) == wanted
    stored = dict(fields.get("properties", ()))
    message = Message(
        fields["topic"],
        fields["body"],
        keys=stored.get("KEYS", "").split(),
        tags=stored.get("TAGS"),
        flag=fields["flag"],
        queue_id=fields.get("queue_id", 0),
        born_timestamp_ms=fields["born_ms"],
        born_host=fields["born_host"],
    )
    crc = fields.get("with_crc", False)
    data = encoded(message, store_host=fields["store_host"], unique_key=stored.get("UNIQ_KEY"), property_crc=crc)
    record.stamp_record(
        data, fields.get("queue_offset", 0), fields.get("physical_offset", 0), fields["store_ms"], property_crc=crc
    )
    assert data.hex() == wanted.hex()


@pytest.mark.parametrize("name", vectors.RECORDS)
def test_java_records_are_read(name: str) -> None:
    wanted = vectors.RECORDS[name]
    message = record.decode_message(wanted, physical_offset=vectors.FIELDS[name].get("physical_offset", 0))
    assert as_reference(message) == reference.decode(wanted)


def test_vector_a_in_full() -> None:
    message = record.decode_message(vectors.A)
    assert message.keys == ("k1", "k2")
    assert message.tags == "TagA"
    assert message.unique_key == message.message_id == "U1"
    assert message.properties == {}
    assert message.offset_message_id == "0A01020300002A9F0000000000000000"


def test_vector_e_a_long_topic() -> None:
    """200 characters, as only retry and DLQ topics may have: V2, with a topic length of two bytes."""
    topic = "%RETRY%" + "t" * 193
    data = encoded(Message(topic, b"xx"))
    assert len(data) == 294
    assert data.startswith(vectors.E_BEGIN)
    assert b"\x00\xc8" + topic.encode() in data
    assert record.decode_message(data).topic == topic


def test_vector_f_blank() -> None:
    assert record.pack_blank(65536 - 61002) == vectors.F
    assert record.total_size(vectors.F) == 4534


def test_vectors_g_to_j() -> None:
    """What the oracle makes of units, a batch element's properties, and index entries."""
    assert reference.unit(0, 135, reference.java_hash("TagA")) == vectors.G[0]
    assert reference.unit(135, 113, reference.java_hash("TagB")) == vectors.G[1]
    properties = vectors.I[-27:]
    assert reference.properties_of(properties) == {"KEYS": "k0", "WAIT": "true", "TAGS": "tg0"}
    assert struct.unpack_from(">h", vectors.I, len(vectors.I) - 29) == (27,)
    assert reference.index_entry(1903211523, 1450, 0, 8) == vectors.J_ENTRY
    assert reference.index_header(1795170401381, 1795170401465, 0, 69784, 9, 17) == vectors.J_HEADER


def test_crcs_agree_with_somebody_elses() -> None:
    crc = crcmod.predefined.mkCrcFun("crc-32")
    for body, wanted in vectors.BODY_CRCS.items():
        assert record.crc32(body) & layout.CRC_MASK == crc(body) & layout.CRC_MASK == wanted == reference.body_crc(body)


def test_the_head_of_layout_is_the_head_that_is_packed() -> None:
    """record.py packs with a format of its own; it must be the table's."""
    assert struct.calcsize(">iiiiiqqiq8sq8siqi") == layout.RECORD_HEAD.size
    data = encoded(Message("T", b"x", flag=1))
    assert data[layout.RECORD_HEAD.offset("flag") :][:4] == b"\0\0\0\1"
    assert data[layout.RECORD_HEAD.offset("body_size") :][:5] == b"\0\0\0\1x"


# ---- round trips


@given(
    message=strategies.messages,
    store_host=strategies.hosts,
    unique_key=st.none() | strategies.keys,
    crc=st.booleans(),
    stamp=st.tuples(strategies.offsets, strategies.offsets, strategies.int64s),
    queue_id=st.integers(0, 65535),
)
def test_every_message_comes_back(
    message: Message, store_host: str, unique_key: str | None, crc: bool, stamp: tuple[int, int, int], queue_id: int
) -> None:
    """Written by us, it is what the oracle writes, and both read it."""
    data = record.encode_message(
        message,
        queue_id=queue_id,
        store_host=pack_host(store_host),
        limits=CONFIG,
        unique_key=unique_key,
        property_crc=crc,
        extra_properties=[("REAL_TOPIC", "x")],
    )
    record.stamp_record(data, *stamp, property_crc=crc)

    pairs = [("KEYS", " ".join(message.keys))] if message.keys else []
    pairs += [("UNIQ_KEY", unique_key)] if unique_key else []
    pairs += [("TAGS", message.tags)] if message.tags else []
    pairs += [] if message.wait_store_msg_ok else [("WAIT", "false")]
    pairs += [*message.properties.items(), ("REAL_TOPIC", "x")]

    wanted = reference.encode(
        topic=message.topic,
        body=message.body,
        properties=pairs,
        queue_id=queue_id,
        flag=message.flag,
        queue_offset=stamp[0],
        physical_offset=stamp[1],
        sys_flag=message.sys_flag,
        born_ms=message.born_timestamp_ms,
        born_host=message.born_host,
        store_ms=stamp[2],
        store_host=store_host,
        reconsume_times=message.reconsume_times,
        with_crc=crc,
    )
    assert bytes(data) == wanted

    found = record.decode_message(data, physical_offset=stamp[1])
    assert as_reference(found) == reference.decode(wanted)
    assert found.keys == tuple(message.keys)
    assert found.tags == message.tags
    assert found.unique_key == unique_key
    assert found.properties == dict(message.properties)
    assert found.properties.keys().isdisjoint(RESERVED_PROPERTIES)


def test_host_bits_are_the_stores_own() -> None:
    """A user's SYSFLAG cannot claim an IPv6 host that is not there."""
    message = record.decode_message(encoded(Message("T", b"x", sys_flag=0x31)))
    assert message.sys_flag == 0x1
    assert message.born_host == "127.0.0.1:0"


@pytest.mark.parametrize(
    "body", [bytearray(b"abc"), memoryview(b"abc"), memoryview(struct.pack("<2i", 1, 2)).cast("i")]
)
def test_bodies_of_any_bytes_type(body: object) -> None:
    assert record.decode_message(encoded(Message("T", body))).body == bytes(body)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"body": None}, "body"),
        ({"body": "text"}, "body"),
        ({"body": b"x" * 101}, "body"),
        ({"topic": "a/b"}, "topic"),
        ({"topic": "x" * 128}, "topic"),
        ({"keys": ["a b"]}, "keys"),
        ({"tags": ""}, "tags"),
        ({"properties": {"TAGS": "x"}}, "properties"),
        ({"properties": {"x": "y" * 32766}}, "properties"),
        ({"flag": 1 << 31}, "flag"),
        ({"flag": "1"}, "flag"),
        ({"sys_flag": -(1 << 31) - 1}, "sys_flag"),
        ({"born_timestamp_ms": 1 << 63}, "born_timestamp_ms"),
        ({"reconsume_times": 1 << 40}, "reconsume_times"),
        ({"queue_id": 1 << 31}, "queue_id"),
        ({"born_host": "nowhere"}, "host"),
    ],
)
def test_illegal_messages(change: dict, field: str) -> None:
    message = dataclasses.replace(Message("T", b"x"), **change)
    with pytest.raises(MessageIllegalError) as caught:
        encoded(message, limits=CONFIG.replace(max_message_size=100))
    assert caught.value.field == field


@pytest.mark.parametrize("crc", [False, True])
def test_the_limit_of_properties_counts_the_crc(crc: bool) -> None:
    """32 767 bytes fit, 20 of them the CRC's; one more does not."""
    room = layout.MAX_PROPERTIES_SIZE - (layout.PROPERTY_CRC_SIZE if crc else 0) - 3
    data = encoded(Message("T", b"", properties={"n": "v" * room}), property_crc=crc)
    assert record.decode_message(data, verify=False).properties == {"n": "v" * room}
    with pytest.raises(MessageIllegalError) as caught:
        encoded(Message("T", b"", properties={"n": "v" * (room + 1)}), property_crc=crc)
    assert (caught.value.size, caught.value.limit) == (32768, 32767)


def test_long_topics_need_v2() -> None:
    with pytest.raises(MessageIllegalError, match="autoMessageVersionOnTopicLen"):
        encoded(Message("%RETRY%" + "x" * 128, b""), limits=CONFIG.replace(auto_message_version_on_topic_len=False))


# ---- damage: whole, one byte short, with more behind


def whole() -> bytes:
    data = encoded(Message("TopicA", b"hello", keys=["k"], tags="t"), property_crc=True)
    record.stamp_record(data, 3, 4096, 5, property_crc=True)
    return bytes(data)


class TestCutRecords:
    """A record is read whole, refused when a byte is missing, and what follows it is not looked at."""

    def test_whole(self) -> None:
        assert record.decode_message(whole()).body == b"hello"

    def test_shorter(self) -> None:
        data = whole()
        for size in range(len(data)):
            with pytest.raises(TornRecordError):
                record.decode_message(data[:size])

    def test_with_more_behind(self) -> None:
        data = whole()
        assert record.decode_message(data + b"\xff" * 100) == record.decode_message(data)
        assert record.decode_message(b"\xff" * 7 + data + b"\xff", 7) == record.decode_message(data)


def test_every_flipped_bit_is_found() -> None:
    """With `__CRC32#` no change of a bit goes unnoticed, also in the name `__CRC32#` itself."""
    data = whole()
    for bit in range(8 * len(data)):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError):
            record.decode_message(broken)


@given(st.integers(0, 120), st.binary(min_size=1, max_size=8), st.booleans())
def test_overwritten_bytes_raise_nothing_else(position: int, junk: bytes, verify: bool) -> None:
    """Whatever is written over a record: a message, or one of our errors."""
    data = bytearray(whole())
    data[position : position + len(junk)] = junk
    with contextlib.suppress(CorruptionError):
        assert record.decode_message(data, verify=verify).size <= len(data)


@given(st.binary(max_size=200))
def test_garbage(junk: bytes) -> None:
    with pytest.raises(CorruptionError):
        record.decode_message(junk)


def broken_at(name: str, value: int, size: int = 4) -> Callable[[bytearray], None]:
    position = layout.RECORD_HEAD.offset(name)

    def change(data: bytearray) -> None:
        data[position : position + size] = value.to_bytes(size, "big", signed=True)

    return change


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        (broken_at("magic", layout.MAGIC_BLANK), MagicError, "magic"),
        (broken_at("magic", 0), MagicError, "magic"),
        (broken_at("magic", layout.MAGIC_V2), TornRecordError, "LEN"),
        (broken_at("total_size", 0), TornRecordError, "TOTALSIZE"),
        (broken_at("total_size", -1), TornRecordError, "TOTALSIZE"),
        (broken_at("total_size", 88), TornRecordError, "TOTALSIZE"),
        (broken_at("total_size", 0x7FFFFFFF), TornRecordError, "TOTALSIZE"),
        (broken_at("body_size", -1), TornRecordError, "BODYLEN"),
        (broken_at("body_size", 0x7FFFFFFF), TornRecordError, "BODYLEN"),
        (broken_at("sys_flag", 0x30), TornRecordError, "LEN"),
        (broken_at("body_crc", -1), ChecksumError, "BODYCRC"),
        (broken_at("queue_offset", 4, 8), ChecksumError, "__CRC32#"),
        (broken_at("physical_offset", 4097, 8), MagicError, "PHYSICALOFFSET"),
    ],
)
def test_errors_say_where_and_what(change: Callable[[bytearray], None], kind: type, expected: str) -> None:
    data = bytearray(whole())
    change(data)
    with pytest.raises(kind) as caught:
        record.decode_message(data, path="commitlog/0", physical_offset=4096)
    assert type(caught.value) is kind
    assert expected in caught.value.expected
    assert (caught.value.path, caught.value.physical_offset) == ("commitlog/0", 4096)


def test_negative_topic_and_property_lengths() -> None:
    """Both lengths are signed; Java would throw, we say what is there."""
    plain = bytes(encoded(Message("TopicA", b"hello")))
    topic_at = layout.RECORD_HEAD.size + 5
    for position, junk, expected in ((topic_at, b"\xff", "TOPICLEN"), (topic_at + 7, b"\xff\xff", "PROPLEN")):
        data = bytearray(plain)
        data[position : position + len(junk)] = junk
        with pytest.raises(TornRecordError) as caught:
            record.decode_message(data)
        assert expected in caught.value.expected


def test_an_empty_body_has_no_crc() -> None:
    """As Java: the field is not looked at when there is no body."""
    data = encoded(Message("T", b""))
    data[8:12] = b"\x11\x22\x33\x44"
    assert record.decode_message(data).body == b""


def test_without_verifying_crcs_are_not_looked_at() -> None:
    data = bytearray(whole())
    data[layout.RECORD_HEAD.size] ^= 1
    assert record.decode_message(data, verify=False).body == b"iello"
