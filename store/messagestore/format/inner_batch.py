"""Inner batches: records of a broker's batch queues, each of which contains several messages in its body.

The body is a producer's batch. This module gives each message a record of its own, as RocketMQ's consumers do: place,
times, hosts, topic and queue are those of the batch, and flag, body and properties are the message's own.

    size magic crc flag bodylen body proplen properties | size magic ...        the body of an inner batch

Source: RocketMQ common/message/MessageDecoder.java, decodeMessage and encodeMessage.
"""

from __future__ import annotations

import struct

from messagestore.errors import TornRecordError
from messagestore.format import record
from messagestore.format.compression import plain_body
from messagestore.format.layout import (
    CRC_MASK,
    IPV6_EXTRA_SIZE,
    RECORD_HEAD,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_MASK,
    SYS_FLAG_INNER_BATCH,
    SYS_FLAG_STORE_HOST_V6,
)
from messagestore.signal_handlers import pass_on

_ELEMENT = struct.Struct(">iiiii")
_LENGTH = struct.Struct(">h")
_INT, _LONG = struct.Struct(">i"), struct.Struct(">q")
_BODY_CRC, _FLAG = RECORD_HEAD.offset("body_crc"), RECORD_HEAD.offset("flag")
_QUEUE_OFFSET, _SYS_FLAG = RECORD_HEAD.offset("queue_offset"), RECORD_HEAD.offset("sys_flag")


def single_records(data: bytes, path: str, physical_offset: int) -> list[bytes]:
    """Return one record for each message of a record; a record that is no inner batch stays as it is.

    Parameters
    ----------
    data : bytes
        A record.
    path : str
        For errors.
    physical_offset : int
        Where the record lies.

    Raises
    ------
    CorruptionError
        The record is damaged, or its body is not a batch.
    """
    message = record.decode_message(data, path=path, physical_offset=physical_offset)
    if not message.sys_flag & SYS_FLAG_INNER_BATCH:
        return [data]

    body_at = RECORD_HEAD.size
    body_at += IPV6_EXTRA_SIZE * (bool(message.sys_flag & SYS_FLAG_BORN_HOST_V6))
    body_at += IPV6_EXTRA_SIZE * (bool(message.sys_flag & SYS_FLAG_STORE_HOST_V6))
    topic_at = body_at + len(message.body)
    properties_size = _LENGTH.size + len(data) - _properties_at(data, message.topic, topic_at)
    topic = data[topic_at : len(data) - properties_size]

    head = bytearray(data[:body_at])
    flags = message.sys_flag & ~(SYS_FLAG_COMPRESSED | SYS_FLAG_COMPRESSION_MASK)
    _INT.pack_into(head, _SYS_FLAG, flags)

    records = []
    try:
        elements = _elements(plain_body(message.body, message.sys_flag))
    except ValueError as error:
        pass_on(error)
        expected = "a batch of messages as body (SYSFLAG 0x80)"
        raise TornRecordError(path, physical_offset, expected, str(error)) from None

    for number, (flag, body, properties) in enumerate(elements):
        _INT.pack_into(head, 0, body_at + len(body) + len(topic) + _LENGTH.size + len(properties))
        _INT.pack_into(head, _BODY_CRC, record.crc32(body) & CRC_MASK if body else 0)
        _INT.pack_into(head, _FLAG, flag)
        _LONG.pack_into(head, _QUEUE_OFFSET, message.queue_offset + number)
        _INT.pack_into(head, body_at - _INT.size, len(body))
        records.append(b"".join((head, body, topic, _LENGTH.pack(len(properties)), properties)))
    return records


def _properties_at(data: bytes, topic: str, topic_at: int) -> int:
    """Where the properties of a record begin: behind the topic, its length, and theirs."""
    size = len(topic.encode())
    one_byte = data[topic_at] == size and data[topic_at + 1 : topic_at + 1 + size] == topic.encode()
    return topic_at + (1 if one_byte else 2) + size + _LENGTH.size


def _elements(body: bytes) -> list[tuple[int, bytes, bytes]]:
    """Flag, body and properties of each message in the body of an inner batch.

    Raises
    ------
    ValueError
        A length leads out of the body.
    """
    elements, at = [], 0
    while at < len(body):
        if at + _ELEMENT.size > len(body):
            raise ValueError(f"{len(body) - at} bytes behind the last message")

        size, _, _, flag, body_size = _ELEMENT.unpack_from(body, at)
        body_end = at + _ELEMENT.size + body_size
        if body_size < 0 or body_end + _LENGTH.size > len(body):
            raise ValueError(f"a message of {body_size} bytes at {at} of {len(body)} bytes")

        (properties_size,) = _LENGTH.unpack_from(body, body_end)
        end = body_end + _LENGTH.size + properties_size
        if properties_size < 0 or end > len(body) or size != end - at:
            raise ValueError(f"a message at {at} that says {size} bytes and has {end - at}")

        elements.append((flag, body[at + _ELEMENT.size : body_end], body[body_end + _LENGTH.size : end]))
        at = end
    return elements
