"""Java's `String.hashCode` of many texts at once, and the hashes made from it.

The hash of c[0] .. c[n-1] (UTF-16 code units) is the sum of c[i] * 31**(n-1-i) mod 2**32. 31 is odd, so it has an
inverse mod 2**32, and one running sum S of c[i] * 31**-i over a whole buffer holds the hash of each range of it:

    hash(start, end) = 31**(end-1) * (S[end] - S[start])    mod 2**32

This needs no matrix and no padding: each byte costs a multiplication and a running sum, whatever the lengths are.

Source: `java.lang.String`, RocketMQ `store/index/IndexFile.java`,
`client/producer/selector/SelectMessageQueueByHash.java`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.format import kernel
from messagestore.format.arrow_bytes import codes_of, ranges_of

_MASK = 0xFFFFFFFF
_INVERSE_31 = pow(31, -1, 1 << 32)
_CHUNK = 1 << 16
"""The number of units hashed at once: two tables of powers and the sums of a chunk stay in the CPU's cache."""


def java_hash(text: str, before: int = 0) -> int:
    """`String.hashCode` of one text, as a signed int32. A lone surrogate counts as the code unit that it is.

    Parameters
    ----------
    text : str
    before : int
        The hash of the text that comes before this one.
    """
    value = before
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & _MASK
    else:
        data = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(data[::2], data[1::2], strict=True):
            value = (31 * value + (high << 8 | low)) & _MASK
    return value - (1 << 32) if value > 0x7FFFFFFF else value


def index_hash(topic: str, key: str) -> int:
    """The hash of a key in the index files: abs of the hash of `topic#key`, or 0 for -2147483648."""
    value = abs(java_hash(key, _known_hash(f"{topic}#")))
    return value if value <= 0x7FFFFFFF else 0


_known_hash = lru_cache(4096)(java_hash)
tags_code = _known_hash
"""`java_hash` of tags, cached: there are few different tags, and each message has one."""


def queue_of_key(key: str, queue_count: int) -> int:
    """The queue of one key, as `queue_of_hash` gives it."""
    value = abs(java_hash(key))
    return value % queue_count if value <= 0x7FFFFFFF else 0


def java_hashes(values: pa.Array) -> NDArray[np.int32]:
    """`String.hashCode` of each value.

    Parameters
    ----------
    values : pa.Array[n]
        string, binary (UTF-8), large_*, or a dictionary of these.

    Returns
    -------
    int32[n]
        0 for null. Bytes that are not UTF-8 are hashed as Java reads them, each fault as U+FFFD.
    """
    if isinstance(values, pa.DictionaryArray):
        hashes = np.append(java_hashes(values.dictionary), np.int32(0))  # the last hash is for nulls
        found: NDArray[np.int32] = hashes[codes_of(values)]
        return found
    return hash_ranges(*ranges_of(values))


def hash_ranges(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int32]:
    """`String.hashCode` of the UTF-8 text in each range of `data`.

    Parameters
    ----------
    data : uint8[m]
    starts, ends : int64[n]
        The starts must not decrease, and the ranges must not overlap. Ranges that are close together cost least.

    Returns
    -------
    int32[n]
    """
    if not len(starts):
        return np.empty(0, np.int32)
    if kernel.lib is not None:
        out = np.empty(len(starts), np.int32)
        starts, ends = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(ends, np.int64)
        kernel.lib.java_hashes(data, starts, ends, np.zeros(1, np.int32), out)
        return out
    low, high = int(starts[0]), int(ends.max())
    hashes = np.zeros(len(starts), np.uint32)
    if low < high:
        span = data[low:high]
        if int(span.max()) < 0x80:
            _hash_units(span, starts - low, ends - low, hashes)
        else:
            _hash_with_non_ascii(span, starts - low, ends - low, hashes)
    return hashes.view(np.int32)


def _hash_units(
    units: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[np.uint32]
) -> None:
    """The hashes of ranges of code units, chunk by chunk. A range that is longer than a chunk is a chunk of its own."""
    first, n = 0, len(starts)
    while first < n:
        base = int(starts[first])
        last = int(np.searchsorted(starts, base + _CHUNK, "right"))
        reach = ends[first:last]
        if int(reach.max()) > base + _CHUNK:  # the range that passes the chunk's end waits for the next one
            last = max(first + int(np.argmax(reach > base + _CHUNK)), first + 1)
            reach = ends[first:last]
        size = int(reach.max()) - base
        powers, inverses = _powers(max(size, _CHUNK))
        sums = np.empty(size + 1, np.uint32)
        sums[0] = 0
        np.cumsum(units[base : base + size] * inverses[:size], dtype=np.uint32, out=sums[1:])
        reach = reach - base
        out[first:last] = powers[reach - 1] * (sums[reach] - sums[starts[first:last] - base])
        first = last


def _hash_with_non_ascii(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[np.uint32]
) -> None:
    """The hashes of ranges, some of which are not ASCII. Those are converted to UTF-16."""
    marks = np.zeros(len(data) + 1, np.int64)
    np.cumsum(data >= 0x80, out=marks[1:])
    wide = marks[ends] != marks[starts]
    narrow = np.flatnonzero(~wide)
    part = np.zeros(len(narrow), np.uint32)
    if len(narrow):
        _hash_units(data, starts[narrow], ends[narrow], part)
        out[narrow] = part
    rows = np.flatnonzero(wide)
    part = np.zeros(len(rows), np.uint32)
    if not len(rows):
        return
    sizes = ends[rows] - starts[rows]
    stops = np.cumsum(sizes)
    picked = np.repeat(starts[rows] - (stops - sizes), sizes) + np.arange(int(stops[-1]))
    text = data[picked]
    try:
        units = np.frombuffer(text.tobytes().decode("utf-8").encode("utf-16-le"), "<u2")
    except UnicodeDecodeError:
        units = np.empty(0, np.uint16)
    lengths = _utf16_sums(text)
    if len(units) == lengths[-1] and not ((text[stops - sizes] & 0xC0) == 0x80).any():
        _hash_units(units, lengths[stops - sizes], lengths[stops], part)
    else:
        _hash_broken(text, stops - sizes, stops, part)
    out[rows] = part


def _hash_broken(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[np.uint32]
) -> None:
    """Hash the ranges one by one: if text is not UTF-8, the number of code units depends on what is replaced."""
    view = data.data
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        out[row] = java_hash(str(view[start:end], "utf-8", "replace")) & _MASK


def _utf16_sums(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The number of UTF-16 code units before each byte of UTF-8 text, and before its end."""
    sums = np.zeros(len(data) + 1, np.int64)
    np.cumsum(((data & 0xC0) != 0x80).view(np.int8) + (data >= 0xF0).view(np.int8), out=sums[1:])
    return sums


@lru_cache(maxsize=2)
def _powers(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """31**i and 31**-i mod 2**32 for i below `count`."""
    tables = []
    for base in (31, _INVERSE_31):
        table = np.full(count, base, np.uint32)
        table[0] = 1
        tables.append(np.multiply.accumulate(table, dtype=np.uint32))
    return tables[0], tables[1]


def utf16_lengths(values: pa.Array) -> NDArray[np.int32]:
    """The length of each value in UTF-16 code units (Java's `String.length`); 0 for null.

    Parameters
    ----------
    values : pa.Array[n]
        string, binary (UTF-8), large_*, or a dictionary of these.
    """
    if isinstance(values, pa.DictionaryArray):
        lengths = np.append(utf16_lengths(values.dictionary), np.int32(0))
        found: NDArray[np.int32] = lengths[codes_of(values)]
        return found
    return utf16_lengths_of_ranges(*ranges_of(values))


def utf16_lengths_of_ranges(
    data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The length of the UTF-8 text in each range of `data`, in UTF-16 code units. The starts must not decrease."""
    low, high = (int(starts[0]), int(ends.max())) if len(starts) else (0, 0)
    span = data[low:high]
    if not len(span) or int(span.max()) < 0x80:
        return (ends - starts).astype(np.int32)
    sums = _utf16_sums(span)
    return (sums[ends - low] - sums[starts - low]).astype(np.int32)


def hash_after(
    prefix_hash: NDArray[np.int32], suffix_hash: NDArray[np.int32], suffix_length: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The hash of prefix + suffix, computed from their hashes.

    Parameters
    ----------
    prefix_hash, suffix_hash : int32[n]
    suffix_length : int32[n]
        In UTF-16 code units.
    """
    powers, _ = _powers(max(int(suffix_length.max(initial=0)) + 1, _CHUNK))
    prefix, suffix = prefix_hash.view(np.uint32), suffix_hash.view(np.uint32)
    return (prefix * powers[suffix_length] + suffix).view(np.int32)


def index_hashes(hashes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Java's abs of each hash, with 0 for -2147483648 (RocketMQ IndexFile.indexKeyHashMethod)."""
    return np.abs(hashes) & np.int32(0x7FFFFFFF)


def queue_of_hash(hashes: NDArray[np.int32], queue_count: int | np.int32 | NDArray[np.int32]) -> NDArray[np.int32]:
    """The queue of each sharding key's hash: abs, 0 for -2147483648, modulo the queue count.

    `queue_count` is one number, or one number per row.
    """
    return index_hashes(hashes) % np.asarray(queue_count, np.int32)
