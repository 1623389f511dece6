"""The digest of a batch, which tells whether a batch that is sent again has the same rows.

The digest "rowsum-1" of a batch is its row count and the sum, mod 2**64, of a hash of each row. Order and partitioning
do not change it. It is computed from the user's columns, before defaults, routing and encoding, so that a correct
replay has the same digest. FORMAT.md defines it and has test vectors.

    m = 0
    for each field k that was given and is not null:  m = (m ^ (v + k)) * 0x9E3779B1;  m ^= m >> 15     (mod 2**32)
    row hash = splitmix64(crc32(body) << 32 | m)
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.format import javahash
from messagestore.format.arrow_bytes import numpy_of, valid_of
from messagestore.format.message_columns import ColumnTexts, Entries, MessageColumns

DIGEST_NAME = "rowsum-1"
TOPIC, KEYS, TAGS, PROPERTIES, FLAG, SHARDING_KEY, QUEUE_ID, BORN_TIMESTAMP = range(1, 9)
"""The numbers of the fields, in the order they are mixed."""

_MULTIPLIER = np.uint32(0x9E3779B1)


def row_hashes(columns: MessageColumns, body_crcs: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """The row hash of each row.

    Parameters
    ----------
    columns : MessageColumns
        n rows.
    body_crcs : uint32[n]
        CRC-32 of each body, all 32 bits; 0 for a null body.

    Returns
    -------
    uint64[n]
    """
    return hashes_of(ColumnTexts(columns), body_crcs)


def hashes_of(texts: ColumnTexts, body_crcs: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """The row hashes of a batch whose texts were hashed before."""
    columns, given = texts.columns, texts.columns.given
    mixed = np.zeros(columns.row_count, np.uint32)
    topic = given.get("topic", None if isinstance(columns.topic, str) else columns.topic)
    if topic is columns.topic and topic is not None:
        topic = texts.topics
    if topic is not None:
        _mix(mixed, TOPIC, javahash.java_hashes(topic), valid_of(topic))
    if texts.keys is not None:
        _mix(mixed, KEYS, texts.keys.joined_hashes, texts.keys.counts > 0)
    if texts.tags is not None and texts.tags_hashes is not None:
        _mix(mixed, TAGS, texts.tags_hashes, valid_of(texts.tags))
    if texts.entries is not None:
        _mix(mixed, PROPERTIES, _property_sums(texts.entries), texts.entries.counts > 0)
    if "flag" in given:
        _mix(mixed, FLAG, *_numbers(given["flag"]))
    elif columns.flag is not None:
        _mix(mixed, FLAG, columns.flag.astype(np.int32), None)
    if columns.sharding_key is not None:
        _mix(mixed, SHARDING_KEY, javahash.java_hashes(columns.sharding_key), valid_of(columns.sharding_key))
    if "queue_id" in given:
        _mix(mixed, QUEUE_ID, *_numbers(given["queue_id"]))
    if "born_timestamp" in given:
        _mix(mixed, BORN_TIMESTAMP, *_numbers(given["born_timestamp"]))
    return javahash.splitmix64((body_crcs.astype(np.uint64) << np.uint64(32)) | mixed)


def _mix(mixed: NDArray[np.uint32], number: int, values: NDArray[np.int32], present: NDArray[np.bool_] | None) -> None:
    """Mix a field into the rows that have it, in place."""
    result = (mixed ^ (values.view(np.uint32) + np.uint32(number))) * _MULTIPLIER
    result ^= result >> np.uint32(15)
    if present is None or present.all():
        mixed[:] = result
    else:
        np.copyto(mixed, result, where=present)


def _numbers(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """An int32 column unchanged, or an int64 column as its low half ^ its high half; and where it is not null."""
    valid = valid_of(column)
    numbers = numpy_of(column, null=0)
    if numbers.dtype == np.int64:
        numbers = numbers ^ (numbers >> 32)
    return numbers.astype(np.int32), valid


def _property_sums(entries: Entries) -> NDArray[np.int32]:
    """The sum, mod 2**32, of the hashes of a row's properties. Their order does not change it."""
    names = javahash.java_hashes(entries.names).view(np.uint32)
    hashes = _fmix(names * np.uint32(31) + javahash.java_hashes(entries.values).view(np.uint32))
    sums = np.zeros(len(hashes) + 1, np.uint32)
    np.cumsum(hashes, dtype=np.uint32, out=sums[1:])
    ends = np.cumsum(entries.counts)
    of_rows: NDArray[np.uint32] = sums[ends] - sums[ends - entries.counts]
    return of_rows.view(np.int32)


def _fmix(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The finaliser of MurmurHash3, mod 2**32."""
    mixed = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> np.uint32(16))
