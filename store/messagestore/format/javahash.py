"""Java's `String.hashCode` of one text and of many, and the hashes made from it.

The hash of c[0] .. c[n-1] (UTF-16 code units) is the sum of c[i] * 31**(n-1-i) mod 2**32. The kernel computes those of
many texts from their UTF-8 bytes (`store/kernel/javahash.c`).

Source: `java.lang.String`, RocketMQ `store/index/IndexFile.java`,
`client/producer/selector/SelectMessageQueueByHash.java`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.format import kernel
from messagestore.format.arrow_bytes import codes_of, ranges_of

_MASK = 0xFFFFFFFF


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
        hashes_of_rows: NDArray[np.int32] = hashes[codes_of(values)]
        return hashes_of_rows
    return hash_ranges(*ranges_of(values))


def hash_ranges(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int32]:
    """`String.hashCode` of the UTF-8 text in each range of `data`: int32[n] of two times int64[n]."""
    out = np.empty(len(starts), np.int32)
    if kernel.lib is not None:
        kernel.lib.java_hashes(data, *_contiguous(starts, ends), np.zeros(1, np.int32), out)
    else:
        out[:] = [java_hash(text) for text in _texts(data, starts, ends)]
    return out


def index_hashes_behind(before: NDArray[np.int32], values: pa.Array) -> NDArray[np.int32]:
    """The hash in the index files of each value behind a text of which only the hash is given.

    Parameters
    ----------
    before : int32[n]
    values : pa.Array[n]
        As for `java_hashes`, but no dictionary.
    """
    data, starts, ends = ranges_of(values)
    out = np.empty(len(starts), np.int32)
    if kernel.lib is not None:
        kernel.lib.index_hashes(data, *_contiguous(starts, ends), np.ascontiguousarray(before), out)
    else:
        texts = _texts(data, starts, ends)
        out[:] = [java_hash(text, first) for text, first in zip(texts, before.tolist(), strict=True)]
        out = index_hashes(out)
    return out


def _contiguous(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(ends, np.int64)


def _texts(data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[str]:
    """The text in each range. Bytes that are not UTF-8 become U+FFFD, as Java reads them."""
    view = data.data
    return (str(view[start:end], "utf-8", "replace") for start, end in zip(starts.tolist(), ends.tolist(), strict=True))


def index_hashes(hashes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Java's abs of each hash, with 0 for -2147483648 (RocketMQ IndexFile.indexKeyHashMethod)."""
    return np.abs(hashes) & np.int32(0x7FFFFFFF)


def queue_of_hash(hashes: NDArray[np.int32], queue_count: int | np.int32 | NDArray[np.int32]) -> NDArray[np.int32]:
    """The queue of each sharding key's hash: abs, 0 for -2147483648, modulo the queue count.

    `queue_count` is one number, or one number per row.
    """
    return index_hashes(hashes) % np.asarray(queue_count, np.int32)
