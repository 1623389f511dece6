"""The digest "rowsum-1", which earlier releases wrote: it recognises the batches that they appended.

It is computed only for a batch that may be in the store with this digest, beside "rowsum-2" (row_digest.py). FORMAT.md
defines it and has test vectors.

    m = 0
    for each field k that was given and is not null:  m = (m ^ (v + k)) * 0x9E3779B1;  m ^= m >> 15     (mod 2**32)
    row hash = splitmix64(crc32(body) << 32 | m)
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from messagestore.format import javahash
from messagestore.format.arrow_bytes import numpy_of, valid_of
from messagestore.format.message_columns import ColumnTexts, MessageColumns
from messagestore.format.properties import KEY_SEPARATOR
from messagestore.format.row_digest import (
    BORN_TIMESTAMP,
    DELAY_TIME_LEVEL,
    FLAG,
    KEYS,
    PROPERTIES,
    QUEUE_ID,
    SHARDING_KEY,
    TAGS,
    TOPIC,
    given_topic,
)

Field = tuple[int, NDArray[np.int32], NDArray[np.bool_]]
"""The number of a field, its value in each row, and which rows have it."""
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1


def earlier_fields(texts: ColumnTexts) -> list[Field]:
    """The fields that the digest covers besides body, keys, tags and properties."""
    columns, given = texts.columns, texts.columns.given
    fields: list[Field] = []
    topic = given_topic(texts)
    if topic is not None:
        fields.append((TOPIC, javahash.java_hashes(topic), valid_of(topic)))
    if "flag" in given:
        fields.append((FLAG, *_numbers(given["flag"])))
    elif columns.flag is not None:
        fields.append((FLAG, columns.flag.astype(np.int32), np.ones(len(columns.flag), np.bool_)))
    if columns.sharding_key is not None:
        key = columns.sharding_key
        fields.append((SHARDING_KEY, javahash.java_hashes(key), valid_of(key)))
    if "queue_id" in given:
        fields.append((QUEUE_ID, *_numbers(given["queue_id"])))
    if "born_timestamp" in given:
        fields.append((BORN_TIMESTAMP, *_numbers(given["born_timestamp"])))
    if "delay_time_level" in given:
        fields.append((DELAY_TIME_LEVEL, *_numbers(given["delay_time_level"])))
    elif columns.delay_time_level is not None:
        levels = columns.delay_time_level.astype(np.int32)
        fields.append((DELAY_TIME_LEVEL, levels, np.ones(len(levels), np.bool_)))
    return fields


def _numbers(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """An int32 column unchanged, or an int64 column as its low half ^ its high half; and where it is not null."""
    valid = valid_of(column)
    numbers = numpy_of(column, null=0)
    if numbers.dtype == np.int64:
        numbers = numbers ^ (numbers >> 32)
    return numbers.astype(np.int32), valid


def earlier_hashes(columns: MessageColumns | ColumnTexts) -> list[int]:
    """The row hash of each row, one row after the other. The kernel sums them while it encodes (encode.c)."""
    texts = columns if isinstance(columns, ColumnTexts) else ColumnTexts(columns)
    fields = [(number, values.tolist(), present.tolist()) for number, values, present in earlier_fields(texts)]
    keys, tags, properties = texts.key_rows, texts.tag_rows, texts.property_rows
    hashes = []
    for row, body in enumerate(texts.body.to_pylist()):
        found = {number: values[row] for number, values, present in fields if present[row]}
        if keys[row]:
            found[KEYS] = javahash.java_hash(KEY_SEPARATOR.join(keys[row]))
        tag = tags[row]
        if tag is not None:
            found[TAGS] = javahash.tags_code(tag)
        if properties[row]:
            found[PROPERTIES] = sum(map(_property_hash, *zip(*properties[row].items(), strict=True)))
        mixed = 0
        for number in sorted(found):
            mixed = (mixed ^ (found[number] + number & _MASK_32)) * 0x9E3779B1 & _MASK_32
            mixed ^= mixed >> 15
        hashes.append(_splitmix64(crc32(body or b"") << 32 | mixed))
    return hashes


def _property_hash(name: str, value: str) -> int:
    """The hash of one property: MurmurHash3's finaliser of both hashes, mod 2**32. The order of properties is free."""
    mixed = javahash.java_hash(name) * 31 + javahash.java_hash(value) & _MASK_32
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & _MASK_32
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & _MASK_32
    return mixed ^ mixed >> 16


def _splitmix64(value: int) -> int:
    """The finaliser of SplitMix64 (add the golden gamma, then mix), mod 2**64."""
    mixed = value + 0x9E3779B97F4A7C15 & _MASK_64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK_64
    return mixed ^ mixed >> 31
