"""Turns Arrow columns into records, and records into columns.

One name for both directions: `encode` and `stamp` write (record_encode.py), `decode` reads (record_decode.py), and
`row_hashes` tells whether a batch that comes again is the same (row_digest.py).
"""

from __future__ import annotations

from messagestore.format.message_columns import NO_QUEUE, MessageColumns
from messagestore.format.record_decode import BLOCK_ROWS, COLUMNS, Expected, decode
from messagestore.format.record_encode import EncodedRecords, encode, stamp
from messagestore.format.row_digest import DIGEST_NAME, row_hashes

__all__ = [
    "BLOCK_ROWS",
    "COLUMNS",
    "DIGEST_NAME",
    "NO_QUEUE",
    "EncodedRecords",
    "Expected",
    "MessageColumns",
    "decode",
    "encode",
    "row_hashes",
    "stamp",
]
