"""The digest of a batch, which tells whether a batch that is sent again has the same rows.

The digest "rowsum-1" of a batch is its row count and the sum, mod 2**64, of a hash of each row. Order and partitioning
do not change it. It is computed from the user's columns, before defaults, routing and encoding, so that a correct
replay has the same digest. FORMAT.md defines it and has test vectors.

    for each field that was given and is not null, in the order of their numbers:  number, value    (64 bits each)
    row hash = xxh3(these numbers and values)

The value of a text is its own xxh3, so no text can move from one field into the next one.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.format.arrow_bytes import array_of, numpy_of, valid_of
from messagestore.format.message_columns import ColumnTexts, MessageColumns
from messagestore.format.properties import KEY_SEPARATOR, NAME_VALUE_SEPARATOR
from messagestore.format.xxh3 import xxh3, xxh3_of

BODY, TOPIC, KEYS, TAGS, PROPERTIES, FLAG, SHARDING_KEY, QUEUE_ID, BORN_TIMESTAMP, DELAY_TIME_LEVEL = range(10)
UNIQUE_KEY = 10
"""The numbers of the fields."""

Field = tuple[int, NDArray[np.uint64], NDArray[np.bool_]]
"""The number of a field, its value in each row, and which rows have it."""
_MASK = (1 << 64) - 1


def given_topic(texts: ColumnTexts) -> pa.Array | None:
    """The user's own column of topics, if there is one; a topic for all rows does not count."""
    columns = texts.columns
    topic = columns.given.get("topic", None if isinstance(columns.topic, str) else columns.topic)
    return texts.topics if topic is columns.topic and topic is not None else topic


def digest_fields(texts: ColumnTexts) -> list[Field]:
    """The fields that the digest covers besides body, keys, tags and properties."""
    columns, given = texts.columns, texts.columns.given
    flag, delay = columns.flag, columns.delay_time_level
    fields = {
        TOPIC: _texts(given_topic(texts)),
        FLAG: _numbers(given.get("flag", None if flag is None else array_of(flag))),
        SHARDING_KEY: _texts(columns.sharding_key),
        QUEUE_ID: _numbers(given.get("queue_id")),
        BORN_TIMESTAMP: _numbers(given.get("born_timestamp")),
        DELAY_TIME_LEVEL: _numbers(given.get("delay_time_level", None if delay is None else array_of(delay))),
        UNIQUE_KEY: _texts(given.get("unique_key")),
    }
    return [(number, *field) for number, field in fields.items() if field is not None]


def _texts(column: pa.Array | None) -> tuple[NDArray[np.uint64], NDArray[np.bool_]] | None:
    return None if column is None else (xxh3_of(column), valid_of(column))


def _numbers(column: pa.Array | None) -> tuple[NDArray[np.uint64], NDArray[np.bool_]] | None:
    """Integers as their two's complement of 64 bits."""
    return None if column is None else (numpy_of(column, null=0).astype(np.int64).view(np.uint64), valid_of(column))


def row_hashes(columns: MessageColumns | ColumnTexts) -> list[int]:
    """The row hash of each row, one row after the other. The kernel sums them while it encodes (encode.c)."""
    texts = columns if isinstance(columns, ColumnTexts) else ColumnTexts(columns)
    fields = [(number, values.tolist(), present.tolist()) for number, values, present in digest_fields(texts)]
    keys, tags, properties = texts.key_rows, texts.tag_rows, texts.property_rows

    hashes = []
    for row, body in enumerate(texts.body.to_pylist()):
        hashes_of_fields = {number: values[row] for number, values, present in fields if present[row]}
        hashes_of_fields[BODY] = xxh3(body or b"")
        if keys[row]:
            hashes_of_fields[KEYS] = xxh3(KEY_SEPARATOR.join(keys[row]).encode())
        tag = tags[row]
        if tag is not None:
            hashes_of_fields[TAGS] = xxh3(tag.encode())
        if properties[row]:
            pairs = [(name.encode(), value.encode()) for name, value in properties[row].items()]
            hashes_of_fields[PROPERTIES] = (
                sum(xxh3(name + NAME_VALUE_SEPARATOR + value) for name, value in pairs) & _MASK
            )

        hashes.append(
            xxh3(b"".join(struct.pack("<QQ", number, hashes_of_fields[number]) for number in sorted(hashes_of_fields)))
        )
    return hashes
