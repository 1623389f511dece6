"""Turns Arrow columns into records, and records into columns.

This module collects both directions: `encode` and `stamp` write (record_encode.py), `decode` reads (record_decode.py),
and `row_hashes` tells whether a batch that is sent again has the same rows (row_digest.py).
"""

from __future__ import annotations

from messagestore.format.message_columns import NO_QUEUE, MessageColumns
from messagestore.format.record_decode import BLOCK_ROWS, COLUMNS, Expected, decode
from messagestore.format.record_encode import encode, stamp
from messagestore.format.row_digest import DIGEST_NAME, row_hashes
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
]


def stamp_rows(rows: Rows) -> None:
    """Write into the bytes of rows, in place, what depends on their place: see `stamp`."""
    stamp(
        rows.data,
        rows.starts[:-1],
        rows.queue_offsets,
        rows.physical_offsets,
        int(rows.store_timestamps_ms[0]),
        rows.store_timestamp_position,
        rows.property_crc,
    )
