"""One record: its bytes, and where a chain of records ends.

    TOTALSIZE MAGIC BODYCRC ... BODYLEN | body | TOPICLEN topic | PROPLEN properties [__CRC32# 0x01 digits 0x02]
    `------------ head, 88 bytes ------'  (12 more for each IPv6 host; the layout is in layout.py)

A record is encoded with zeros in QUEUEOFFSET, PHYSICALOFFSET and STORETIMESTAMP, and is *stamped* when its place is
known. Numbers that are read from a record are not trusted: lengths are signed, and are checked against the bytes that
are there before they are used. For Arrow columns, see record_columns.py.

Source: RocketMQ `store/MessageExtEncoder.java`, `common/message/MessageDecoder.java`, `store/CommitLog.java`.
"""

from __future__ import annotations

import operator
import struct
import time
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NoReturn

from isal.isal_zlib import crc32

from messagestore.errors import ChecksumError, MagicError, MessageIllegalError, TornRecordError
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import HOST_V4_SIZE, HOST_V6_SIZE, offset_message_id, pack_host, unpack_host
from messagestore.format.layout import (
    CRC_MASK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    MAX_PROPERTIES_SIZE,
    MAX_V1_TOPIC_LENGTH,
    PROPERTY_CRC_NAME,
    PROPERTY_CRC_SIZE,
    RECORD_HEAD,
    RECORD_SIZE_RESERVE,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from messagestore.format.message import NO_PROPERTIES, Message, MessageExt, topic_fault
from messagestore.format.properties import (
    CLUSTER,
    KEY_SEPARATOR,
    KEYS,
    NAME_VALUE_SEPARATOR,
    PROPERTY_CRC,
    PROPERTY_SEPARATOR,
    RESERVED_PROPERTIES,
    TAGS,
    UNIQUE_KEY,
    WAIT,
    check_keys,
    check_properties,
    check_tags,
    decode_properties,
    encode_properties,
)
from messagestore.format.record_scan import (
    HEAD_DTYPE,
    HOST_FLAGS,
    MIN_RECORD_SIZE,
    PROPERTY_CRC_BEGIN,
    ScanEnd,
    heads,
    is_head,
    scan,
)

__all__ = [
    "HEAD_DTYPE",
    "MIN_RECORD_SIZE",
    "ScanEnd",
    "crc32",
    "decode_message",
    "encode_again",
    "encode_message",
    "heads",
    "is_half",
    "is_head",
    "pack_blank",
    "scan",
    "stamp_record",
    "stamps",
    "total_size",
]

PROPERTY_CRC_BLANK = PROPERTY_CRC_BEGIN + b"0000000000\x02"
"""The property CRC of a record that is not stamped yet."""
OFFSETS_POSITION = RECORD_HEAD.offset("queue_offset")
"""The positions of QUEUEOFFSET and of PHYSICALOFFSET right behind it."""


def _head_struct(flags: int) -> struct.Struct:
    born = HOST_V6_SIZE if flags & SYS_FLAG_BORN_HOST_V6 else HOST_V4_SIZE
    store = HOST_V6_SIZE if flags & SYS_FLAG_STORE_HOST_V6 else HOST_V4_SIZE
    return struct.Struct(f">iiiiiqqiq{born}sq{store}siqi")


_HEADS = {flags: _head_struct(flags) for flags in (0, SYS_FLAG_BORN_HOST_V6, SYS_FLAG_STORE_HOST_V6, HOST_FLAGS)}
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_OFFSETS = struct.Struct(">qq")
_BLANK = struct.Struct(">ii")
_LENGTHS = {MAGIC_V1: struct.Struct(">b"), MAGIC_V2: struct.Struct(">h")}
_PROPERTIES_LENGTH = struct.Struct(">h")
_SYS_FLAG_POSITION = RECORD_HEAD.offset("sys_flag")
_STORE_TIMESTAMP_POSITION = RECORD_HEAD.offset("store_timestamp_ms")


# ---- one message to one record


@lru_cache(maxsize=4096)
def topic_bytes(topic: str, auto_version: bool) -> tuple[int, bytes]:
    """The magic of a topic's records, and TOPICLEN with the topic.

    Raises
    ------
    MessageIllegalError
        The topic is not legal.
    """
    fault = topic_fault(topic)
    if fault is None and len(topic) > MAX_V1_TOPIC_LENGTH and not auto_version:
        fault = f"found {len(topic)} bytes; allowed are {MAX_V1_TOPIC_LENGTH} without autoMessageVersionOnTopicLen"
    if fault is not None:
        raise MessageIllegalError(f"topic: {fault}", field="topic")
    magic = MAGIC_V2 if len(topic) > MAX_V1_TOPIC_LENGTH else MAGIC_V1
    return magic, _LENGTHS[magic].pack(len(topic)) + topic.encode()


def stamps(limits: StoreConfig) -> tuple[tuple[str, str], ...]:
    """The properties that a broker adds to each message that it accepts, behind the user's: CLUSTER, if it is wanted.

    Messages that the store makes itself, such as BATCH records, do not get them.
    """
    return ((CLUSTER, limits.broker_cluster_name),) if limits.stamp_cluster else ()


def encode_message(
    message: Message,
    *,
    queue_id: int,
    store_host: bytes,
    limits: StoreConfig,
    unique_key: str | None = None,
    property_crc: bool | None = None,
    extra_properties: Sequence[tuple[str, str]] = (),
) -> bytearray:
    """Encode a message as a record, ready for `stamp_record`.

    Parameters
    ----------
    message : Message
        Its `queue_id` is ignored.
    queue_id : int
    store_host : bytes
        As `hosts.pack_host` gives it.
    limits : StoreConfig
        `maxMessageSize`, `autoMessageVersionOnTopicLen`, `enabledAppendPropCRC`.
    unique_key : str | None
        UNIQ_KEY.
    property_crc : bool | None
        Whether `__CRC32#` ends the record; None: as `enabledAppendPropCRC` says.
    extra_properties : sequence of (str, str)
        Reserved properties that the store itself adds behind the user's. Only their size is checked.

    Raises
    ------
    MessageIllegalError
        A field has the wrong type or is too large, or a name or value cannot be stored.
    """
    body, body_size = message.body, size_of_body(message.body)
    if body_size > limits.max_message_size:
        raise too_large("body", body_size, limits.max_message_size)

    magic, topic = topic_bytes(message.topic, limits.auto_message_version_on_topic_len)
    property_crc = limits.enabled_append_prop_crc if property_crc is None else property_crc
    properties = _properties_bytes(message, unique_key, extra_properties, property_crc)

    born_host = pack_host(message.born_host)
    flags = host_flags(born_host, store_host)
    head = _HEADS[flags]
    size = head.size + body_size + len(topic) + _PROPERTIES_LENGTH.size + len(properties)
    if size > limits.max_message_size + RECORD_SIZE_RESERVE:
        raise too_large("record", size, limits.max_message_size + RECORD_SIZE_RESERVE)

    born_timestamp_ms = message.born_timestamp_ms
    if born_timestamp_ms is None:
        born_timestamp_ms = time.time_ns() // 1_000_000

    try:
        packed = head.pack(
            size,
            magic,
            crc32(body) & CRC_MASK if body_size else 0,
            queue_id,
            message.flag,
            0,
            0,
            message.sys_flag & ~HOST_FLAGS | flags,
            born_timestamp_ms,
            born_host,
            0,
            store_host,
            message.reconsume_times,
            message.prepared_transaction_offset,
            body_size,
        )
    except (struct.error, TypeError) as error:
        raise bad_number(message, queue_id) or error from None

    record = bytearray(packed)
    record += memoryview(body)  # numpy would add its array number by number
    record += topic
    record += _PROPERTIES_LENGTH.pack(len(properties))
    record += properties
    return record


def encode_again(
    data: bytes | bytearray | memoryview,
    *,
    topic: str,
    queue_id: int,
    limits: StoreConfig,
    sys_flag: int | None = None,
    prepared_transaction_offset: int = 0,
    properties: Mapping[str, str] = MappingProxyType({}),
) -> bytearray:
    """Encode the message of a stored record again, for another topic or queue, ready for `stamp_record`.

    Body, flag, hosts, born time, reconsume times and properties stay as they are, byte by byte. `__CRC32#` is left out,
    or made anew, as `enabledAppendPropCRC` says.

    Parameters
    ----------
    data : bytes-like
        The record, which was checked before.
    topic, queue_id : str, int
        Where the message goes.
    limits : StoreConfig
        `autoMessageVersionOnTopicLen`, `enabledAppendPropCRC`.
    sys_flag : int | None
        None: as in the record.
    properties : mapping of str to str
        Properties that are added, or that replace those of the same name.

    Raises
    ------
    MessageIllegalError
        The topic is not legal, or the properties become too large.
    """
    view = memoryview(data)
    old_flag = sys_flag_of(view)
    head = _HEADS[old_flag & HOST_FLAGS]
    (_, magic, body_crc, _, flag, _, _, _, born_ms, born, _, store, reconsume_times, _, body_size) = head.unpack_from(
        view
    )

    body_end, _, properties_start = _ranges(view, head.size, body_size, magic, _Fault("", 0))
    kept = _other_properties(bytes(view[properties_start:]), {PROPERTY_CRC, *properties})
    kept += encode_properties(properties.items())
    if limits.enabled_append_prop_crc:
        kept += PROPERTY_CRC_BLANK
    if len(kept) > MAX_PROPERTIES_SIZE:
        raise too_large("properties", len(kept), MAX_PROPERTIES_SIZE)

    new_magic, new_topic = topic_bytes(topic, limits.auto_message_version_on_topic_len)
    size = body_end + len(new_topic) + _PROPERTIES_LENGTH.size + len(kept)
    new_flag = (old_flag if sys_flag is None else sys_flag) & ~HOST_FLAGS | old_flag & HOST_FLAGS

    record = bytearray(
        head.pack(
            size, new_magic, body_crc, queue_id, flag, 0, 0, new_flag, born_ms, born, 0, store, reconsume_times,
            prepared_transaction_offset, body_size,
        )
    )  # fmt: skip

    record += view[head.size : body_end]
    record += new_topic
    record += _PROPERTIES_LENGTH.pack(len(kept))
    record += kept
    return record


def _other_properties(data: bytes, names: Container[str]) -> bytes:
    """A property string without the properties of some names; it ends in a separator unless it is empty."""
    segments = (segment for segment in data.split(PROPERTY_SEPARATOR) if segment)
    kept = [one for one in segments if one.partition(NAME_VALUE_SEPARATOR)[0].decode("utf-8", "replace") not in names]
    return b"".join(one + PROPERTY_SEPARATOR for one in kept)


def pack_head(store_host: bytes, born_host: bytes, born_timestamp_ms: int) -> bytes:
    """The head of a record with what is the same in all records of a batch, and zeros elsewhere."""
    flags = host_flags(born_host, store_host)
    return _HEADS[flags].pack(0, 0, 0, 0, 0, 0, 0, flags, born_timestamp_ms, born_host, 0, store_host, 0, 0, 0)


def size_of_body(body: object, row: int | None = None) -> int:
    """The size of a body in bytes.

    Raises
    ------
    MessageIllegalError
        The body is not bytes.
    """
    try:
        view = memoryview(body)  # type: ignore[arg-type]
    except TypeError:
        kind = type(body).__name__
        raise MessageIllegalError(f"body: found {kind}; allowed are bytes", field="body", row=row) from None
    if not view.c_contiguous:
        kind = "a memoryview of bytes that are not side by side"
        raise MessageIllegalError(f"body: found {kind}; allowed are bytes. Call its tobytes()", field="body", row=row)
    return view.nbytes


def _properties_bytes(
    message: Message, unique_key: str | None, extra: Sequence[tuple[str, str]], property_crc: bool
) -> bytes:
    """The property string: KEYS, UNIQ_KEY, TAGS, WAIT, the user's own, the store's extra ones, and an empty
    `__CRC32#`.
    """
    pairs: list[tuple[str, str]] = []
    keys, tags, own = message.keys, message.tags, message.properties

    check_keys(keys)
    if keys:
        pairs.append((KEYS, KEY_SEPARATOR.join(keys)))
    if unique_key is not None:
        check_keys((unique_key,))
        pairs.append((UNIQUE_KEY, unique_key))
    if tags is not None:
        check_tags(tags)
        pairs.append((TAGS, tags))
    if not message.wait_store_msg_ok:
        pairs.append((WAIT, "false"))

    if own is not NO_PROPERTIES:
        check_properties(own)
        pairs.extend(own.items())
    pairs.extend(extra)

    properties = encode_properties(pairs)
    if property_crc:
        properties += PROPERTY_CRC_BLANK
    if len(properties) > MAX_PROPERTIES_SIZE:
        raise too_large("properties", len(properties), MAX_PROPERTIES_SIZE)
    return properties


def host_flags(born_host: bytes, store_host: bytes) -> int:
    """The SYSFLAG bits of two packed hosts."""
    flags = SYS_FLAG_BORN_HOST_V6 if len(born_host) == HOST_V6_SIZE else 0
    return flags | (SYS_FLAG_STORE_HOST_V6 if len(store_host) == HOST_V6_SIZE else 0)


def too_large(field: str, size: int, limit: int, row: int | None = None) -> MessageIllegalError:
    """The error for a part of a message that exceeds its limit."""
    what = {
        "body": "(maxMessageSize). Send less, or raise maxMessageSize",
        "record": f"(maxMessageSize and {RECORD_SIZE_RESERVE} more for topic and properties)",
    }.get(field, "(the format's limit)")
    text = f"{field}: found {size} bytes; allowed are {limit} {what}"
    return MessageIllegalError(text, field=field, size=size, limit=limit, row=row)


def bad_number(message: Message, queue_id: int, row: int | None = None) -> MessageIllegalError | None:
    """The error for a number that does not fit into a record's head, or None if all fit."""
    numbers = {
        "queue_id": (queue_id, 32),
        "flag": (message.flag, 32),
        "sys_flag": (message.sys_flag, 32),
        "born_timestamp_ms": (message.born_timestamp_ms, 64),
        "reconsume_times": (message.reconsume_times, 32),
        "prepared_transaction_offset": (message.prepared_transaction_offset, 64),
    }
    for name, (value, bits) in numbers.items():
        if value is None and name == "born_timestamp_ms":  # now
            continue
        if value is None or not hasattr(value, "__index__") or not -(1 << bits - 1) <= value < 1 << bits - 1:
            fault = f"{name}: found {value!r}; allowed is an int of {bits} bits"
            return MessageIllegalError(fault, field=name, row=row)
    return None


def is_half(sys_flag: int) -> bool:
    """Whether a message belongs to a transaction that was not committed (PREPARED or ROLLBACK). It is in no queue."""
    return sys_flag & SYS_FLAG_TRANSACTION_MASK in (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)


def stamp_record(
    record: bytearray | memoryview,
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    property_crc: bool = False,
) -> None:
    """Fill in what depends on the place of the record: both offsets, the store time, and then the property CRC.

    Parameters
    ----------
    record : bytearray or memoryview
        The result of `encode_message`, or its place in a larger buffer; it is changed in place.
    property_crc : bool
        Whether the record was encoded with one.
    """
    _OFFSETS.pack_into(record, OFFSETS_POSITION, queue_offset, physical_offset)
    sys_flag = _INT32.unpack_from(record, _SYS_FLAG_POSITION)[0]
    _INT64.pack_into(record, store_timestamp_position(sys_flag), store_timestamp_ms)
    if property_crc:
        end = len(record) - PROPERTY_CRC_SIZE
        record[end + len(PROPERTY_CRC_BEGIN) : -1] = crc_digits(crc32(memoryview(record)[:end]))


def store_timestamp_position(sys_flag: int) -> int:
    """The position of STORETIMESTAMP in a record: 56, or 68 behind an IPv6 born host."""
    later = HOST_V6_SIZE - HOST_V4_SIZE if sys_flag & SYS_FLAG_BORN_HOST_V6 else 0
    return _STORE_TIMESTAMP_POSITION + later


def sys_flag_of(data: bytes | bytearray | memoryview) -> int:
    """The SYSFLAG of a record, unchecked."""
    sys_flag: int = _INT32.unpack_from(data, _SYS_FLAG_POSITION)[0]
    return sys_flag


def crc_digits(crc: int) -> bytes:
    """Ten decimal digits, the last one first (RocketMQ UtilAll / CommitLog.setCRC32)."""
    return str(crc & CRC_MASK).zfill(10)[::-1].encode()


def pack_blank(size: int, magic: int = MAGIC_BLANK) -> bytes:
    """The BLANK record that fills the last `size` bytes of a segment."""
    return _BLANK.pack(size, magic)


def total_size(head: bytes | memoryview) -> int:
    """The TOTALSIZE of a record, unchecked."""
    size: int = _INT32.unpack_from(head)[0]
    return size


# ---- one record to one message


class _Fault:
    """Raises the errors of one record; they name its place."""

    def __init__(self, path: str, physical_offset: int) -> None:
        self.path = path
        self.physical_offset = physical_offset

    def torn(self, expected: str, found: str) -> NoReturn:
        raise TornRecordError(self.path, self.physical_offset, expected, found)

    def magic(self, expected: str, found: str) -> NoReturn:
        raise MagicError(self.path, self.physical_offset, expected, found)

    def checksum(self, expected: str, found: str) -> NoReturn:
        raise ChecksumError(self.path, self.physical_offset, expected, found)


def decode_message(
    data: bytes | bytearray | memoryview,
    position: int = 0,
    *,
    verify: bool = True,
    path: str = "",
    physical_offset: int | None = None,
) -> MessageExt:
    """Decode the message whose record begins at `data[position]`. Bytes behind the record are ignored.

    Parameters
    ----------
    data : bytes-like
    position : int
    verify : bool
        Check the CRC of the body and, if there is one, of the record.
    path : str
        For error messages.
    physical_offset : int | None
        The place that the record was read from, which PHYSICALOFFSET must repeat. None: not checked.

    Raises
    ------
    MagicError
        No record begins there, or the record belongs to another place.
    TornRecordError
        The record is incomplete, or its lengths contradict each other.
    ChecksumError
        A CRC does not match.
    """
    view = memoryview(data).cast("B")[position:]
    fault = _Fault(path, position if physical_offset is None else physical_offset)
    if len(view) < MIN_RECORD_SIZE:
        fault.torn(f"a record of at least {MIN_RECORD_SIZE} bytes", f"{len(view)} bytes")

    magic = _INT32.unpack_from(view, RECORD_HEAD.offset("magic"))[0]
    if magic not in _LENGTHS:
        fault.magic(f"magic {MAGIC_V1 & 0xFFFFFFFF:#x} or {MAGIC_V2 & 0xFFFFFFFF:#x}", f"{magic & 0xFFFFFFFF:#x}")

    head = _HEADS[_INT32.unpack_from(view, _SYS_FLAG_POSITION)[0] & HOST_FLAGS]
    size = total_size(view)
    if not head.size < size <= len(view):
        fault.torn(f"TOTALSIZE of {head.size} to {len(view)}", str(size))

    view = view[:size]
    (_, _, body_crc, queue_id, flag, queue_offset, own_offset, sys_flag, born_ms, born, store_ms, store,
     reconsume_times, prepared_offset, body_size) = head.unpack_from(view)  # fmt: skip
    if physical_offset is not None and own_offset != physical_offset:
        fault.magic(f"PHYSICALOFFSET {physical_offset}", str(own_offset))

    body_end, topic, properties_start = _ranges(view, head.size, body_size, magic, fault)
    body = bytes(view[head.size : body_end])
    if verify:
        _verify(view, body, body_crc, properties_start, fault)

    properties = decode_properties(bytes(view[properties_start:]))
    return MessageExt(
        topic=str(topic, "utf-8", "replace"),
        queue_id=queue_id,
        queue_offset=queue_offset,
        physical_offset=own_offset,
        size=size,
        body=body,
        keys=tuple(key for key in properties.get(KEYS, "").split(KEY_SEPARATOR) if key),
        tags=properties.get(TAGS),
        properties={name: value for name, value in properties.items() if name not in RESERVED_PROPERTIES},
        system_properties={name: value for name, value in properties.items() if name in RESERVED_PROPERTIES},
        flag=flag,
        sys_flag=sys_flag,
        born_timestamp_ms=born_ms,
        store_timestamp_ms=store_ms,
        born_host=unpack_host(born),
        store_host=unpack_host(store),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        body_crc=body_crc,
        unique_key=properties.get(UNIQUE_KEY),
        offset_message_id=offset_message_id(store, own_offset),
    )


def _ranges(view: memoryview, head_size: int, body_size: int, magic: int, fault: _Fault) -> tuple[int, memoryview, int]:
    """End of the body, the topic, and where the properties begin; the lengths add up to the record's size."""
    length = _LENGTHS[magic]
    body_end = head_size + body_size
    least_behind = length.size + _PROPERTIES_LENGTH.size
    if body_size < 0 or body_end + least_behind > len(view):
        fault.torn(f"BODYLEN of 0 to {len(view) - head_size - least_behind}", str(body_size))

    topic_size = length.unpack_from(view, body_end)[0]
    topic_start = body_end + length.size
    topic_end = topic_start + topic_size
    if topic_size < 0 or topic_end + _PROPERTIES_LENGTH.size > len(view):
        fault.torn(f"TOPICLEN of 0 to {len(view) - topic_start - _PROPERTIES_LENGTH.size}", str(topic_size))

    properties_size = _PROPERTIES_LENGTH.unpack_from(view, topic_end)[0]
    properties_start = topic_end + _PROPERTIES_LENGTH.size
    if properties_size != len(view) - properties_start:
        fault.torn(f"PROPLEN of {len(view) - properties_start}, as TOTALSIZE leaves", str(properties_size))

    return body_end, view[topic_start:topic_end], properties_start


def _verify(view: memoryview, body: bytes, body_crc: int, properties_start: int, fault: _Fault) -> None:
    if body and crc32(body) & CRC_MASK != body_crc:
        fault.checksum(f"BODYCRC {crc32(body) & CRC_MASK:08x}", f"{body_crc & 0xFFFFFFFF:08x}")

    end = len(view) - PROPERTY_CRC_SIZE
    if end < properties_start:
        return

    name, digits = bytes(view[end : end + len(PROPERTY_CRC_BEGIN)]), bytes(view[end + len(PROPERTY_CRC_BEGIN) :])
    whole = name == PROPERTY_CRC_BEGIN
    if not whole and 2 * sum(map(operator.eq, name, PROPERTY_CRC_BEGIN)) < len(name):
        return

    wanted = crc_digits(crc32(view[:end])) + b"\x02"
    if whole and digits != wanted:
        fault.checksum(f"{PROPERTY_CRC_NAME} {wanted[:-1].decode()}", repr(digits[:-1])[1:])
    if not whole and digits == wanted:  # only a property whose name was damaged has this value
        fault.checksum(f"a property {PROPERTY_CRC_NAME}", repr(name[:-1])[1:])
