"""Turns Arrow columns into records, and records into columns.

This module collects both directions: `encode` and `stamp` write (record_encode.py), `decode` reads (record_decode.py),
and `row_hashes` tells whether a batch that is sent again has the same rows (row_digest.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator

import numpy as np

from messagestore.format import record_encode, rerouting
from messagestore.format.config import StoreConfig
from messagestore.format.delay_levels import DelayLevels
from messagestore.format.layout import DIGEST_NAME, RECORD_HEAD, SYS_FLAG_MULTI_TAGS
from messagestore.format.message_checks import first_fault
from messagestore.format.message_columns import NO_QUEUE, ColumnTexts, MessageColumns
from messagestore.format.record_decode import BLOCK_ROWS, COLUMNS, Expected, decode
from messagestore.format.record_encode import stamp
from messagestore.format.row_digest import row_hashes
from messagestore.format.rows import Rows

__all__ = [
    "BLOCK_ROWS",
    "COLUMNS",
    "DIGEST_NAME",
    "NO_QUEUE",
    "Expected",
    "MessageColumns",
    "Rows",
    "decode",
    "encode",
    "row_hashes",
    "stamp",
    "stamp_rows",
    "stamped",
]

_FLAGS_POSITION = RECORD_HEAD.offset("sys_flag") + 3
"""Where the lowest byte of SYSFLAG is in a record."""
BLOCK_SIZE = 512 * 1024
"""About how many bytes are stamped at once: they stay in the CPU's cache while they are checksummed and written."""


def encode(
    columns: MessageColumns | ColumnTexts,
    *,
    limits: StoreConfig,
    store_host: bytes,
    born_host: bytes,
    first_row: int = 0,
    with_digest: bool = True,
    multi_tag_topics: Collection[str] = (),
) -> Rows:
    """Encode the records of a batch as `record_encode.encode` does, and send delayed messages to the queues in which
    they wait.

    Parameters
    ----------
    multi_tag_topics : collection of str
        The topics whose messages have the flag MULTI_TAGS.

    Raises
    ------
    MessageIllegalError
        The first row that cannot be stored.
    """
    texts = columns if isinstance(columns, ColumnTexts) else ColumnTexts(columns)
    columns = texts.columns
    if columns.delay_time_level is None or not columns.delay_time_level.any():
        rows = record_encode.encode(
            texts,
            limits=limits,
            store_host=store_host,
            born_host=born_host,
            first_row=first_row,
            with_digest=with_digest,
        )
        _flag_multi_tags(rows, multi_tag_topics)
        return rows
    fault = first_fault(texts, limits, first_row)
    if fault is not None:
        raise fault
    levels = np.minimum(columns.delay_time_level, len(limits.delays_ms))  # as in RocketMQ
    delay_levels = DelayLevels(((0, limits.message_delay_level),))
    parts = []
    for level in np.unique(levels).tolist():
        some = columns.of_rows(levels == level)
        rows = record_encode.encode(
            some, limits=limits, store_host=store_host, born_host=born_host, with_digest=with_digest
        )
        _flag_multi_tags(rows, multi_tag_topics)
        parts.append(rerouting.delayed(rows, level, delay_levels) if level else rows)
    return functools.reduce(Rows.joined, parts)


def _flag_multi_tags(rows: Rows, topics: Collection[str]) -> None:
    """Set the flag MULTI_TAGS in the records of some topics, in place."""
    starts = rows.starts
    for topic, _, start, stop in rows.runs() if topics else ():
        if topic in topics:
            rows.data[starts[start:stop] + _FLAGS_POSITION] |= SYS_FLAG_MULTI_TAGS


def stamped(rows: Rows) -> Iterator[memoryview]:
    """Write into the bytes of rows, in place, what depends on their place; yield them block by block.

    A block of bytes that are read from a file is used again for the next one.
    """
    starts = rows.starts
    cuts = np.searchsorted(starts[:-1], np.arange(0, max(int(starts[-1]), 1), BLOCK_SIZE)).tolist()

    for first, last in itertools.pairwise([*cuts, rows.row_count]):
        if first == last:
            continue

        begin, end = int(starts[first]), int(starts[last])
        block = rows.data[begin:end] if rows.stored is None else rows.stored.read(begin, end)
        stamp(
            block,
            starts[first:last] - begin,
            rows.queue_offsets[first:last],
            rows.physical_offsets[first:last],
            int(rows.store_timestamps_ms[0]),
            rows.store_timestamp_position,
            rows.property_crc,
        )
        yield block.data


def stamp_rows(rows: Rows) -> None:
    """Write into the bytes of rows, in place, what depends on their place."""
    for _ in stamped(rows):
        pass
