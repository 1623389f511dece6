"""The layouts of all structures on disk: where every byte is.

Each structure on disk is a table of rows (offset, name, type, meaning). Building a layout checks the table: a gap, an
overlap or a wrong total raises an error. A layout provides a numpy dtype for arrays of the structure, and a table for
FORMAT.md (`python -m messagestore.format.layout store/FORMAT.md` updates the tables).

All integers on disk are big-endian and signed (two's complement) unless a row says otherwise.
Source: RocketMQ 5.3.3 `store/CommitLog.java`, `ConsumeQueue.java`, `index/IndexFile.java`, `StoreCheckpoint.java`.
"""

from __future__ import annotations

import re
import struct
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"i1": 1, "u1": 1, "i2": 2, "i4": 4, "u4": 4, "i8": 8, "u8": 8}


@dataclass(frozen=True)
class Field:
    """One row of a layout: `type` is a numpy type code without byte order ("i4"), or "S8" for eight raw bytes."""

    offset: int
    name: str
    type: str
    meaning: str

    @property
    def size(self) -> int:
        """The size of the field in bytes."""
        return int(self.type[1:]) if self.type[0] in "SV" else SIZES[self.type]


class Layout:
    """A fixed structure: fields without gap or overlap.

    Raises
    ------
    ValueError
        The rows leave a gap, overlap, or do not add up to `size`.
    """

    def __init__(self, name: str, size: int, rows: list[tuple[int, str, str, str]]) -> None:
        self.name = name
        self.size = size
        self.fields = tuple(Field(*row) for row in rows)
        position = 0
        for field in self.fields:
            if field.offset != position:
                raise ValueError(
                    f"{name}.{field.name}: offset {field.offset}, but the field before it ends at {position}"
                )
            position += field.size
        if position != size:
            raise ValueError(f"{name}: fields end at {position}, but the size is {size}")

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """A structured big-endian dtype with `itemsize == size`."""
        return np.dtype([(f.name, f.type.replace("S", "V") if f.type[0] == "S" else ">" + f.type) for f in self.fields])

    @cached_property
    def struct(self) -> struct.Struct:
        """The same fields for one structure: numpy's scalars cost more than the work that is done with them."""
        codes = {"i8": "q", "u8": "Q", "i4": "i", "u4": "I", "i2": "h", "u2": "H", "i1": "b", "u1": "B"}
        return struct.Struct(">" + "".join(codes[field.type] for field in self.fields))

    def offset(self, name: str) -> int:
        """The position of a field, in bytes from the start of the structure."""
        return next(f.offset for f in self.fields if f.name == name)


# ---- CommitLog

MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
MAGIC_BLANK = 0xCBD43194 - (1 << 32)

RECORD_HEAD = Layout(
    "record head (both hosts IPv4)",
    88,
    [
        (0, "total_size", "i4", "TOTALSIZE: bytes of the whole record, this field included"),
        (4, "magic", "i4", "MAGICCODE: 0xDAA320A7 (V1) or 0xDAA320AB (V2)"),
        (8, "body_crc", "i4", "BODYCRC: CRC-32 of the body with the top bit cleared; 0 for an empty body"),
        (12, "queue_id", "i4", "QUEUEID"),
        (16, "flag", "i4", "FLAG: the user's own"),
        (20, "queue_offset", "i8", "QUEUEOFFSET: number of the message in its queue"),
        (28, "physical_offset", "i8", "PHYSICALOFFSET: the record's own place in the log"),
        (36, "sys_flag", "i4", "SYSFLAG: compression, transaction and host bits"),
        (40, "born_timestamp_ms", "i8", "BORNTIMESTAMP: ms since 1970"),
        (48, "born_ip", "u4", "BORNHOST: address (16 bytes when SYSFLAG has 0x10: all that follows moves by 12)"),
        (52, "born_port", "i4", "BORNHOST: port"),
        (56, "store_timestamp_ms", "i8", "STORETIMESTAMP: ms since 1970"),
        (64, "store_ip", "u4", "STOREHOST: address (16 bytes when SYSFLAG has 0x20: all that follows moves by 12)"),
        (68, "store_port", "i4", "STOREHOST: port"),
        (72, "reconsume_times", "i4", "RECONSUMETIMES"),
        (76, "prepared_transaction_offset", "i8", "PREPARED_TRANSACTION_OFFSET"),
        (
            84,
            "body_size",
            "i4",
            "BODYLEN; then the body, TOPICLEN (1 byte in V1, 2 in V2), topic, PROPLEN (2 bytes), properties",
        ),
    ],
)
SENT_HEAD = Layout(
    "message of a batch that a producer sends",
    20,
    [
        (0, "total_size", "i4", "bytes of the whole message, this field included"),
        (4, "magic", "i4", "0: a broker writes its own"),
        (8, "body_crc", "i4", "0: a broker computes it"),
        (12, "flag", "i4", "FLAG: the user's own"),
        (16, "body_size", "i4", "BODYLEN; then the body, PROPLEN (2 bytes), properties"),
    ],
)
IPV6_EXTRA_SIZE = 12
"""The bytes by which an IPv6 host is larger (16 + 4 instead of 4 + 4)."""
TOPIC_LENGTH_SIZES = {MAGIC_V1: 1, MAGIC_V2: 2}
PROPERTIES_LENGTH_SIZE = 2
HEAD_SEAL_SIZE = 8
"""TOTALSIZE and MAGICCODE: the bytes of a BATCH record that are written last."""

SYS_FLAG_COMPRESSED = 0x1
SYS_FLAG_MULTI_TAGS = 0x2
SYS_FLAG_TRANSACTION_MASK = 0xC
SYS_FLAG_TRANSACTION_PREPARED = 0x4
SYS_FLAG_TRANSACTION_COMMIT = 0x8
SYS_FLAG_TRANSACTION_ROLLBACK = 0xC
SYS_FLAG_BORN_HOST_V6 = 0x10
SYS_FLAG_STORE_HOST_V6 = 0x20
SYS_FLAG_NEED_UNWRAP = 0x40
SYS_FLAG_INNER_BATCH = 0x80
SYS_FLAG_COMPRESSION_MASK = 0x700
SYS_FLAG_COMPRESSION_SHIFT = 8

CRC_MASK = 0x7FFFFFFF
PROPERTY_CRC_NAME = "__CRC32#"
PROPERTY_CRC_SIZE = 20
"""The size of `__CRC32#` 0x01, ten digits, 0x02 at the end of a record, in bytes."""
MAX_PROPERTIES_SIZE = 32767
RECORD_SIZE_RESERVE = 65536
"""The number of bytes by which a record may be larger than `maxMessageSize`."""
MAX_V1_TOPIC_LENGTH = 127

BLANK = Layout(
    "BLANK record",
    8,
    [
        (0, "total_size", "i4", "bytes left in the file, this record included"),
        (4, "magic", "i4", "0xCBD43194"),
    ],
)
"""The record that ends a full CommitLog file. A record of L bytes fits only where L + 8 bytes are left."""

# ---- ConsumeQueue

UNIT = Layout(
    "ConsumeQueue unit",
    20,
    [
        (0, "physical_offset", "i8", "where the record begins in the log"),
        (8, "size", "i4", "TOTALSIZE of the record; 0: no unit yet; 0x7FFFFFFF: filler below the queue's first offset"),
        (12, "tags_code", "i8", "Java's String.hashCode of TAGS, 0 without; deliver time in SCHEDULE_TOPIC_XXXX"),
    ],
)
LEAST_TAGS_CODE = -(1 << 31)
"""What is less is the place of a unit's extension, from the least int64 on (RocketMQ: ConsumeQueueExt.isExtAddr)."""
FILLER_UNIT_SIZE = 0x7FFFFFFF

BATCH_UNIT = Layout(
    "BatchConsumeQueue unit",
    46,
    [
        (0, "physical_offset", "i8", "where the record begins in the log"),
        (8, "size", "i4", "TOTALSIZE of the record"),
        (12, "tags_code", "i8", "as in a ConsumeQueue unit"),
        (20, "store_timestamp_ms", "i8", "store time of the record"),
        (28, "base", "i8", "queue offset of the record's first message (INNER_BASE)"),
        (36, "count", "i2", "messages in the record (INNER_NUM); 1 for an ordinary one"),
        (38, "compacted_offset", "i4", "-1"),
        (42, "reserved", "i4", "0"),
    ],
)

# ---- IndexFile

INDEX_HEADER = Layout(
    "IndexFile header",
    40,
    [
        (0, "begin_timestamp_ms", "i8", "store time of the first entry"),
        (8, "end_timestamp_ms", "i8", "store time of the last entry"),
        (16, "begin_physical_offset", "i8", "record of the first entry"),
        (24, "end_physical_offset", "i8", "record of the last entry"),
        (32, "slot_count", "i4", "slots that are in use"),
        (36, "entry_count", "i4", "entries plus one: the number the next entry gets (entry 0 is never used)"),
    ],
)
INDEX_SLOT_SIZE = 4
INDEX_ENTRY = Layout(
    "IndexFile entry",
    20,
    [
        (0, "key_hash", "i4", "abs of Java's String.hashCode of `topic#key`; 0 for the hash -2147483648"),
        (4, "physical_offset", "i8", "where the record begins in the log"),
        (12, "seconds", "i4", "store time less the file's begin_timestamp, in seconds, 0 to 2147483647"),
        (16, "previous", "i4", "the entry before this one in the same slot, 0: none"),
    ],
)

# ---- store checkpoint

CHECKPOINT_SIZE = 4096
CHECKPOINT = Layout(
    "store checkpoint",
    40,
    [
        (0, "physic_timestamp_ms", "i8", "store time up to which the CommitLog is synced"),
        (8, "logics_timestamp_ms", "i8", "store time up to which the ConsumeQueues are synced"),
        (16, "index_timestamp_ms", "i8", "store time up to which the index is synced"),
        (24, "master_flushed_offset", "i8", "HA; kept as found"),
        (32, "confirm_physical_offset", "i8", "begin of the last valid record"),
    ],
)

# ---- state (ours)

STATE_FILE_SIZE = 4096
STATE_SLOT_POSITIONS = (0, 512)
STATE_SLOT = Layout(
    "state slot",
    64,
    [
        (0, "counter", "i8", "the generation: every change is a new one; the valid slot with the higher one counts"),
        (8, "in_flight", "i8", "S: bytes at or above it may be unfinished; -1: nothing is in flight"),
        (16, "visible_end", "i8", "V: readers see the records that end at or below it"),
        (24, "clean_end", "i8", "C: below it CommitLog, ConsumeQueues and index are synced"),
        (32, "anchor_position", "i8", "the last record below C: where it begins"),
        (40, "anchor_size", "i4", "its TOTALSIZE; 0: there is no record below C"),
        (44, "anchor_crc", "u4", "CRC-32 of its bytes (all 32 bits)"),
        (48, "boot_hash", "u4", "CRC-32 of the text of the writer's boot id"),
        (
            52,
            "flags",
            "u4",
            "1: poisoned; 2: ASYNC_FLUSH bytes above C; 4: closed cleanly at C; 8: in recovery; 16: no broker wrote",
        ),
        (56, "writer_pid", "i4", "who wrote the slot; for messages only"),
        (60, "crc", "u4", "CRC-32 of the 60 bytes before"),
    ],
)
STATE_FLUSHED = Layout(
    "flushed end",
    16,
    [
        (0, "flushed_end", "i8", "F: while flag 2 is set, the log is synced below it"),
        (8, "slot_crc", "u4", "the CRC of the slot to which this belongs"),
        (12, "crc", "u4", "CRC-32 of the 12 bytes before"),
    ],
)
"""Lies behind each slot, and belongs to it only if it names the CRC of the slot."""
STATE_POISONED = 1
STATE_ASYNC = 2
STATE_CLEAN = 4
STATE_RECOVERING = 8
STATE_OWN = 16

# ---- journal (ours)

JOURNAL_MAGIC = int.from_bytes(b"MSJOURNL", "big")
JOURNAL_FORMAT = 1
JOURNAL_HEADER = Layout(
    "journal header",
    64,
    [
        (0, "magic", "i8", "the text MSJOURNL"),
        (8, "format_version", "i4", "1"),
        (
            12,
            "flags",
            "u4",
            "1: `checkpoint_crc` is known; 2: rebuilt from a log that did not begin at 0",
        ),
        (16, "covered", "i8", "queue offset in `rmq_sys_spark_sink` up to which batches are in the journal"),
        (24, "end", "i8", "physical offset up to which the log's batches are in the journal"),
        (32, "entry_count", "i8", "entries behind this header"),
        (40, "names_size", "i8", "bytes of JSON behind the entries"),
        (48, "checkpoint_crc", "u4", "CRC-32 of the 40 bytes of the store checkpoint's fields when this was written"),
        (52, "body_crc", "u4", "CRC-32 of all bytes behind this header"),
        (56, "reserved", "u4", "0"),
        (60, "crc", "u4", "CRC-32 of the 60 bytes before"),
    ],
)
JOURNAL_CHECKPOINT_KNOWN = 1
JOURNAL_INCOMPLETE = 2
JOURNAL_ENTRY = Layout(
    "journal entry",
    56,
    [
        (0, "version", "i8", "the batch's number in its app"),
        (8, "physical_offset", "i8", "where the BATCH record begins"),
        (16, "end", "i8", "E, where the batch ends"),
        (24, "row_count", "i8", "messages; -1: only a part of the batch is in the log"),
        (32, "digest", "u8", "sum of the row hashes"),
        (40, "app", "i4", "index in the names' `apps`"),
        (44, "query", "i4", "index in the names' `queries`; -1: none"),
        (48, "topics", "i4", "index in the names' `topics`"),
        (
            52,
            "flags",
            "u4",
            "1: the version is set by the user, not by Spark; 2: `start`",
        ),
    ],
)
JOURNAL_USER_VERSION = 1
JOURNAL_START = 2

# ---- BATCH record (ours)

DIGEST_NAME = "rowsum-1"
"""How the digest of a batch's rows is computed. BATCH records, the journal and staging files contain the name."""

# ---- ends (ours)

ENDS_MAGIC = int.from_bytes(b"MSQENDS1", "big")
ENDS_FORMAT = 1
ENDS_HEADER = Layout(
    "ends header",
    72,
    [
        (0, "magic", "i8", "the text MSQENDS1"),
        (8, "format_version", "i4", "1"),
        (12, "previous", "u4", "`crc` of the block before; 0: this is the first one of the file"),
        (16, "clean_end", "i8", "C: the entries are the ends of their queues in the log below it"),
        (24, "anchor_position", "i8", "the last record below C: where it begins"),
        (32, "anchor_size", "i4", "its TOTALSIZE; 0: there is no record below C"),
        (36, "anchor_crc", "u4", "CRC-32 of its bytes"),
        (40, "entry_count", "i8", "entries behind this header"),
        (48, "names_size", "i8", "bytes of JSON behind the entries"),
        (56, "body_crc", "u4", "CRC-32 of the entries and the names"),
        (60, "reserved", "i8", "0"),
        (68, "crc", "u4", "CRC-32 of the 68 bytes before"),
    ],
)
ENDS_ENTRY = Layout(
    "ends entry",
    48,
    [
        (0, "end", "i8", "units of the queue below C; -1: not known any more"),
        (8, "physical_offset", "i8", "of its last unit"),
        (16, "tags_code", "i8", "of its last unit"),
        (24, "crc_from", "i8", "number of the first unit that `crc` covers: 0, unless a broker wrote the queue"),
        (32, "size", "i4", "of its last unit"),
        (36, "topic", "i4", "index in the names"),
        (40, "queue_id", "i4", "the queue's number in its topic"),
        (44, "crc", "u4", "CRC-32 of the units from `crc_from` to the last one"),
    ],
)

ALL = (
    RECORD_HEAD, BLANK, UNIT, BATCH_UNIT, INDEX_HEADER, INDEX_ENTRY, CHECKPOINT, STATE_SLOT, STATE_FLUSHED,
    JOURNAL_HEADER, JOURNAL_ENTRY, ENDS_HEADER, ENDS_ENTRY,
)  # fmt: skip
"""What is on disk. `SENT_HEAD` is not: it is what a broker is sent."""


def markdown(layout: Layout) -> str:
    """The table of FORMAT.md for one layout."""
    lines = [f"**{layout.name}**, {layout.size} bytes", "", "| offset | bytes | field | meaning |", "|---|---|---|---|"]
    lines += [f"| {f.offset} | {f.size} | `{f.name}` | {f.meaning} |" for f in layout.fields]
    return "\n".join(lines)


def refreshed(text: str) -> str:
    """A document with updated tables. Each table is between `<!-- layout: NAME -->` and `<!-- end -->`."""
    tables = {name: value for name, value in globals().items() if isinstance(value, Layout)}

    def table(match: re.Match[str]) -> str:
        return f"<!-- layout: {match[1]} -->\n{markdown(tables[match[1]])}\n<!-- end -->"

    return re.sub(r"<!-- layout: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        document = Path(name)
        document.write_text(refreshed(document.read_text(encoding="utf-8")), encoding="utf-8")
