"""Hostile records, and what the compiled kernel and the scalar codec make of the same bytes."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import reference
from messagestore.errors import CorruptionError
from messagestore.format import kernel
from messagestore.format.properties import RESERVED_PROPERTIES
from messagestore.format.record_decode import COLUMNS, Expected, decode
from messagestore.format.record_scan import scan

ALL = list(COLUMNS)
PLACE = (1 << 40) + 7
HOSTS = ("127.0.0.1:1234", "[2001:db8::1]:80", "10.0.0.255:65535", "[::ffff:1.2.3.4]:1")
INT64 = (0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63))


def raw(topic: bytes, body: bytes, properties: bytes, *, crc: bool = False, **fields: object) -> bytes:
    """A record with any bytes as topic and properties."""
    record = bytearray(reference.encode(topic="", body=body, **fields))
    wide = len(topic) > 127
    record[-3:] = struct.pack(">h" if wide else ">b", len(topic)) + topic
    record += struct.pack(">h", len(properties) + (20 if crc else 0)) + properties
    record[:8] = struct.pack(">iI", len(record) + (20 if crc else 0), 0xDAA320AB if wide else 0xDAA320A7)
    return bytes(record) + (reference.property_crc(bytes(record)) if crc else b"")


_NAMES = [*(name.encode() for name in sorted(RESERVED_PROPERTIES)), b"a", b"bc", b"TAG", b"TAGSS", b"KEY", b"UNIQ_KEZ",
          b"UNIQ_KEYS", b"a_rather_long_name", b"a_rather_long_nam", "größe".encode(), b"\xff", b"\xfe", b""]  # fmt: skip
_VALUES = [b"v", b"", b" ", b"k1 k2", b" k1  k2 ", b"12345678", b"123456789012345678901234567890", "中文".encode(),
           "\U0001f600 \U0001f601".encode(), b"\xff", b"\xe4\xb8", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"x\x01y"]  # fmt: skip


def any_properties(chance: random.Random) -> bytes:
    match chance.randrange(12):
        case 0:
            return b""
        case 1:
            return chance.randbytes(chance.randrange(40))
        case 2:
            return bytes(chance.choices(b"\x01\x02ab ", k=chance.randrange(30)))
        case 3:  # more than the kernel looks at together
            names = [b"n%d" % chance.randrange(80) for _ in range(chance.choice((31, 32, 33, 64, 65, 200)))]
            return b"".join(name + b"\x01v\x02" for name in names)
    frequent = [b"KEYS", b"TAGS", b"UNIQ_KEY", b"WAIT", b"a"]
    pairs = [
        chance.choice(frequent if chance.random() < 0.6 else _NAMES) + b"\x01" + chance.choice(_VALUES)
        for _ in range(chance.randrange(6))
    ]
    return b"\x02".join(pairs) + chance.choice((b"", b"\x02", b"\x02", b"\x02"))


def any_record(chance: random.Random, place: int) -> bytes:
    topic = chance.choice(
        (b"TopicA", b"TopicA", b"", b"%RETRY%" + b"t" * 140, b"\xffopic", "tópico".encode(), b"\xed\xa0\x80")
    )
    body = chance.choice(
        (b"", chance.randbytes(chance.randrange(200)), zlib.compress(b"x" * 500), b"\xda\xa3\x20\xa7" * 5)
    )
    return raw(
        topic, body, any_properties(chance), crc=chance.random() < 0.3,
        queue_id=chance.choice((0, 3, -1, 2**31 - 1)), flag=chance.choice((0, -5)), queue_offset=chance.choice(INT64[:4]),
        physical_offset=place, sys_flag=chance.choice((0, 1, 2, 4, 8, 12, 0x301)), born_ms=chance.choice(INT64),
        store_ms=chance.choice(INT64), born_host=chance.choice(HOSTS), store_host=chance.choice(HOSTS),
        reconsume_times=chance.choice((0, 2**31 - 1)), prepared_offset=chance.choice(INT64),
    )  # fmt: skip


def chain(chance: random.Random, count: int) -> list[bytes]:
    found, place = [], PLACE
    for _ in range(count):
        found.append(any_record(chance, place))
        place += len(found[-1])
    return found


def queue(chance: random.Random, count: int) -> list[bytes]:
    found, place = [], PLACE
    for number in range(count):
        found.append(
            raw(b"TopicA", chance.randbytes(20), any_properties(chance), crc=number % 2 == 0, queue_id=3,
                queue_offset=number, physical_offset=place, born_host=HOSTS[number % 4], store_host=HOSTS[number // 2 % 4])
        )  # fmt: skip
        place += len(found[-1])
    return found


def laid_out(pieces: list[bytes], between: bytes = b"") -> tuple[NDArray, NDArray, NDArray]:
    data, starts = b"", []
    for piece in pieces:
        data += between
        starts.append(len(data))
        data += piece
    sizes = np.array([len(piece) for piece in pieces], np.int32)
    return np.frombuffer(data, np.uint8), np.array(starts, np.int64), sizes


def outcome(call: Callable[[], object]) -> tuple:
    try:
        return ("given", call())
    except CorruptionError as error:
        return (type(error), error.path, error.physical_offset, error.expected, error.found)


def both(data: NDArray, starts: NDArray, sizes: NDArray, columns: list[str] = ALL, **options: object) -> tuple:
    """What both codecs say: they say the same, or this fails."""
    by_kernel = outcome(lambda: decode(data, starts, sizes, columns, **options))
    with mock.patch.object(kernel, "lib", None):
        by_scalar_codec = outcome(lambda: decode(data, starts, sizes, columns, **options))
    if by_kernel[0] == "given":
        by_kernel[1].validate(full=True)
        assert by_scalar_codec[0] == "given", by_scalar_codec
        for name in columns:
            assert by_kernel[1].column(name).equals(by_scalar_codec[1].column(name)), name
    else:
        assert by_kernel == by_scalar_codec
    return by_kernel


def promised(pieces: list[bytes], topic: str = "TopicA", queue_id: int = 3, renumbered: bool | None = None) -> Expected:
    at = [struct.unpack_from(">qq", piece, 20) for piece in pieces]
    numbers, places = (np.array([pair[i] for pair in at], np.int64) for i in (0, 1))
    return Expected(topic, queue_id, numbers, places, None if renumbered is None else np.full(len(at), renumbered))


def _scanned(data: NDArray, place: int, verify: bool, left: int) -> tuple[list[int], NDArray, object]:
    starts, found, end = scan(data, place, file_bytes_left=left, verify_body_crc=verify)
    return starts.tolist(), found, end


def compare_scans(data: NDArray, place: int, verify: bool, left: int | None = None) -> list[int]:
    """Where records begin: both ways to find them find the same."""
    left = len(data) + 8 if left is None else left
    starts, found, end = _scanned(data, place, verify, left)
    with mock.patch.object(kernel, "lib", None):
        wanted_starts, wanted, wanted_end = _scanned(data, place, verify, left)
    assert (starts, end) == (wanted_starts, wanted_end)
    assert found.tobytes() == wanted.tobytes()
    return starts
