"""XXH3 with 64 bits, of one value and of many; without a seed and with the default secret.

The kernel computes the hashes of many values (`store/kernel/xxh3.c`). `xxh3` is the same in Python, for a machine
without the kernel.

Source: the specification in the documentation of xxHash (`doc/xxhash_spec.md`, Yann Collet, version 0.2.0).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.format import kernel
from messagestore.format.arrow_bytes import codes_of, ranges_of

_MASK = (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_FIRST = (_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1)
_STRIPE, _BLOCK = 64, 1024
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_OF_STRIPES = np.stack([np.frombuffer(_SECRET, "<u8", 8, 8 * i) for i in range(_BLOCK // _STRIPE)])
"""The part of the secret for each stripe of a block."""
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)


def xxh3(data: bytes) -> int:
    """The hash of some bytes, as an unsigned number of 64 bits."""
    size = len(data)
    if size <= 16:
        return _of_16(data, size)
    if size > 240:
        return _of_many(data, size)

    value = size * _P64_1
    if size <= 128:
        for i in range((size - 1) // 32 + 1):
            value += _mixed(data, 16 * i, 32 * i) + _mixed(data, size - 16 * i - 16, 32 * i + 16)
        return _avalanche(value)

    for i in range(8):
        value += _mixed(data, 16 * i, 16 * i)
    value = _avalanche(value)
    for i in range(8, size // 16):
        value += _mixed(data, 16 * i, 16 * i - 125)
    return _avalanche(value + _mixed(data, size - 16, 119))


def xxh3_of(values: pa.Array) -> NDArray[np.uint64]:
    """The hash of each value.

    Parameters
    ----------
    values : pa.Array[n]
        string, binary, large_*, or a dictionary of these.

    Returns
    -------
    uint64[n]
        That of no bytes for a null.
    """
    if isinstance(values, pa.DictionaryArray):
        hashes = np.append(xxh3_of(values.dictionary), np.uint64(xxh3(b"")))  # the last one is for nulls
        hashes_of_rows: NDArray[np.uint64] = hashes[codes_of(values)]
        return hashes_of_rows
    data, starts, ends = ranges_of(values)
    out = np.empty(len(starts), np.uint64)
    if kernel.lib is not None:
        kernel.lib.xxh3_of_ranges(data, np.ascontiguousarray(starts), np.ascontiguousarray(ends), out)
    else:
        view = data.data
        out[:] = [xxh3(bytes(view[start:end])) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return out


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _folded(left: int, right: int) -> int:
    product = left * right
    return product & _MASK ^ product >> 64


def _mixed(data: bytes, at: int, secret: int) -> int:
    return _folded(_u64(data, at) ^ _u64(_SECRET, secret), _u64(data, at + 8) ^ _u64(_SECRET, secret + 8))


def _avalanche(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 37) * 0x165667919E3779F9 & _MASK
    return value ^ value >> 32


def _avalanche_64(value: int) -> int:
    """The one of XXH64."""
    value = (value ^ value >> 33) * _P64_2 & _MASK
    value = (value ^ value >> 29) * _P64_3 & _MASK
    return value ^ value >> 32


def _of_16(data: bytes, size: int) -> int:
    if size > 8:
        low = _u64(data, 0) ^ _u64(_SECRET, 24) ^ _u64(_SECRET, 32)
        high = _u64(data, size - 8) ^ _u64(_SECRET, 40) ^ _u64(_SECRET, 48)
        return _avalanche(size + int.from_bytes(low.to_bytes(8, "big"), "little") + high + _folded(low, high))

    if size >= 4:
        value = _u32(data, size - 4) + (_u32(data, 0) << 32) ^ _u64(_SECRET, 8) ^ _u64(_SECRET, 16)
        value = (value ^ _rotated(value, 49) ^ _rotated(value, 24)) * 0x9FB21C651E98DF25 & _MASK
        value = (value ^ (value >> 35) + size) * 0x9FB21C651E98DF25 & _MASK
        return value ^ value >> 28

    if not size:
        return _avalanche_64(_u64(_SECRET, 56) ^ _u64(_SECRET, 64))
    value = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
    return _avalanche_64(value ^ _u32(_SECRET, 0) ^ _u32(_SECRET, 4))


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & _MASK


def _of_many(data: bytes, size: int) -> int:
    """More than 240 bytes: eight lanes, stripe by stripe. numpy's numbers of 64 bits overflow as C's do."""
    lanes = np.array(_FIRST, np.uint64)
    for start in range(0, size - 1, _BLOCK):
        if start + _BLOCK < size:
            _add(lanes, data[start : start + _BLOCK], _OF_STRIPES)
            lanes = (lanes ^ lanes >> np.uint64(47) ^ np.frombuffer(_SECRET, "<u8", 8, 128)) * np.uint64(_P32_1)
        else:
            _add(lanes, data[start:], _OF_STRIPES[: (size - 1 - start) // _STRIPE])

    _add(lanes, data[-_STRIPE:], np.frombuffer(_SECRET, "<u8", 8, 121)[None])
    last = lanes.tolist()
    value = size * _P64_1
    for i, (left, right) in enumerate(zip(last[::2], last[1::2], strict=True)):
        value += _folded(left ^ _u64(_SECRET, 16 * i + 11), right ^ _u64(_SECRET, 16 * i + 19))
    return _avalanche(value)


def _add(lanes: NDArray[np.uint64], data: bytes, secrets: NDArray[np.uint64]) -> None:
    """Add the stripes that `data` begins with, one for each row of `secrets`."""
    stripes = np.frombuffer(data, "<u8", 8 * len(secrets)).reshape(-1, 8)
    keyed = stripes ^ secrets
    lanes += ((keyed & _LOW) * (keyed >> _HIGH)).sum(0, np.uint64)  # both factors have 32 bits
    lanes += stripes.sum(0, np.uint64)[[1, 0, 3, 2, 5, 4, 7, 6]]
