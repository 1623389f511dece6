"""Decodes many records into Arrow columns.

The records may be anywhere in a buffer. Their heads are gathered into one structured array, and their bodies and
property strings are copied with one memcpy each; only the requested columns are decoded. Every record is checked: its
sizes and its magic, whether its lengths add up, whether it is the record that the unit promised, and its CRCs. The
first bad record raises an error that names file and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.errors import MagicError, TornRecordError
from messagestore.format.arrow_bytes import (
    all_equal,
    array_of,
    binary_array,
    data_of,
    gather,
    join,
    list_array,
    offsets_of,
    rows_not_utf8,
    scalar_of,
    unaligned,
)
from messagestore.format.hosts import HOST_V4_SIZE, HOST_V6_SIZE, unpack_host
from messagestore.format.layout import (
    CRC_MASK,
    IPV6_EXTRA_SIZE,
    MAGIC_V1,
    MAGIC_V2,
    MAX_V1_TOPIC_LENGTH,
    RECORD_HEAD,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
)
from messagestore.format.properties import TAGS, UNIQUE_KEY
from messagestore.format.record import decode_message
from messagestore.format.record_properties import PropertyTexts
from messagestore.format.record_scan import HeadFields, bad_property_crcs, crcs_of, heads, parts

_TEXT_MAP = pa.map_(pa.string(), pa.string())

COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "queue_id": pa.int32(),
    "queue_offset": pa.int64(),
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.list_(pa.string()),
    "properties": _TEXT_MAP,
    "born_timestamp_ms": pa.int64(),
    "store_timestamp_ms": pa.int64(),
    "message_id": pa.string(),
    "unique_key": pa.string(),
    "offset_message_id": pa.string(),
    "physical_offset": pa.int64(),
    "size": pa.int32(),
    "flag": pa.int32(),
    "sys_flag": pa.int32(),
    "body_crc": pa.int32(),
    "reconsume_times": pa.int32(),
    "born_host": pa.string(),
    "store_host": pa.string(),
    "prepared_transaction_offset": pa.int64(),
    "system_properties": _TEXT_MAP,
}
"""The columns that `decode` can give. Without a value, `tags` and `unique_key` are null, and `keys`, `properties` (the
user's own) and `system_properties` are empty. `message_id` is UNIQ_KEY, or else the offset message id. `queue_offset`
is that of the unit that promised the record; without `Expected`, that of the record."""

BLOCK_ROWS = 16_384
"""The number of rows decoded at once: each record is examined several times and stays in the CPU's cache meanwhile."""
_HEAD_FIELDS = {name: "total_size" if name == "size" else name for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class Expected:
    """The records that n units of one queue promise.

    Parameters
    ----------
    topic : str
    queue_id : int
    queue_offsets, physical_offsets : int64[n]
    renumbered : bool[n] or None
        The rows whose record may have another queue offset than the unit; None: no row's may.
    """

    topic: str
    queue_id: int
    queue_offsets: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    renumbered: NDArray[np.bool_] | None = None

    def slice(self, rows: slice) -> Expected:
        """The same for some of the rows."""
        renumbered = None if self.renumbered is None else self.renumbered[rows]
        return Expected(self.topic, self.queue_id, self.queue_offsets[rows], self.physical_offsets[rows], renumbered)


def decode(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int32],
    columns: Sequence[str],
    *,
    verify_body_crc: bool = True,
    expected: Expected | None = None,
    path: str = "",
) -> pa.RecordBatch:
    """Decode columns of n records.

    Parameters
    ----------
    data : uint8[m]
        It is not kept: the result has buffers of its own.
    starts, sizes : int64[n], int32[n]
        Where each record is in `data`, and its TOTALSIZE according to the unit. All bodies together are below 2 GiB.
    columns : sequence of str
        Names in `COLUMNS`, in the order of the result.
    verify_body_crc : bool
        Check BODYCRC, and `__CRC32#` if it is present.
    expected : Expected | None
        What the records must say about themselves.
    path : str
        For errors.

    Raises
    ------
    MagicError, TornRecordError, ChecksumError
        The first bad record is not complete, or is not the one that was promised.
    """
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise ValueError(f"column {unknown[0]!r}: no such column; allowed are {', '.join(COLUMNS)}")
    blocks = []
    for first in range(0, max(len(starts), 1), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        promised = None if expected is None else expected.slice(block)
        rows = _Rows(data, starts[block], sizes[block].astype(np.int64), promised, path)
        if verify_body_crc:
            rows.check_crcs()
        blocks.append([_MAKERS[name](rows) if name in _MAKERS else rows.field(_HEAD_FIELDS[name]) for name in columns])
    arrays = blocks[0] if len(blocks) == 1 else [pa.concat_arrays(column) for column in zip(*blocks, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(name, COLUMNS[name]) for name in columns]))


class _Rows:
    """n checked records and where their parts are."""

    def __init__(
        self,
        data: NDArray[np.uint8],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        expected: Expected | None,
        path: str,
    ) -> None:
        self.data, self.starts, self.sizes, self.expected, self.path = data, starts, sizes, expected, path
        self._require((starts >= 0) & (sizes >= RECORD_HEAD.size) & (starts + sizes <= len(data)))
        self.heads = HeadFields(data, starts)
        magic = self.heads["magic"]
        self._require((self.heads["total_size"] == sizes) & ((magic == MAGIC_V1) | (magic == MAGIC_V2)))
        count, self.parts = parts(data, starts, self.heads)
        if count < len(starts):
            self._fail_at(count)
        if expected is not None:
            self._require(self._as_expected(expected))

    def _require(self, good: NDArray[np.bool_]) -> None:
        if not good.all():
            self._fail_at(int(good.argmin()))

    def _fail_at(self, row: int) -> NoReturn:
        """Raise the error of a bad row, or of an earlier row that only a later check would find."""
        before = slice(0, row)
        expected = None if self.expected is None else self.expected.slice(before)
        _Rows(self.data, self.starts[before], self.sizes[before], expected, self.path)
        self.fail(row)

    def _as_expected(self, expected: Expected) -> NDArray[np.bool_]:
        found = self.heads
        same: NDArray[np.bool_] = found["queue_offset"] == expected.queue_offsets
        if expected.renumbered is not None:
            same |= expected.renumbered
        same &= found["physical_offset"] == expected.physical_offsets
        same &= found["queue_id"] == expected.queue_id
        topic = expected.topic.encode("utf-8", "surrogatepass")
        if not same.all():
            return same
        if len(topic) <= MAX_V1_TOPIC_LENGTH and (self.heads["magic"] == MAGIC_V1).all():
            # its length and the topic in one look
            return all_equal(self.data, self.parts.body_ends, bytes([len(topic)]) + topic)
        same = self.parts.topic_ends - self.parts.topic_starts == len(topic)
        rows = np.flatnonzero(same)
        same[rows] = all_equal(self.data, self.parts.topic_starts[rows], topic)
        return same

    def fail(self, row: int) -> NoReturn:
        """Raise the error of a row: what a check of this record alone finds, or that it is another record."""
        start, size = int(self.starts[row]), int(self.sizes[row])
        place = int(self.expected.physical_offsets[row]) if self.expected is not None else None
        record = self.data[start : start + size].tobytes() if start >= 0 and size > 0 else b""
        if place is None and len(record) >= RECORD_HEAD.size:
            place = int(heads(self.data, self.starts[row : row + 1])["physical_offset"][0])
        where = start if place is None else place
        if len(record) != size:
            raise TornRecordError(self.path, where, f"a record of {size} bytes", f"{len(record)} bytes")
        message = decode_message(record, path=self.path, physical_offset=place)
        if message.size != size:
            raise TornRecordError(self.path, where, f"TOTALSIZE {size}", str(message.size))
        if self.expected is None:
            raise AssertionError(f"the record at {where} is refused as one of many and accepted alone")
        wanted = f"message {int(self.expected.queue_offsets[row])} of {self.expected.topic}/{self.expected.queue_id}"
        found = f"message {message.queue_offset} of {message.topic[:300]}/{message.queue_id}"
        raise MagicError(self.path, where, wanted, found)

    def check_crcs(self) -> None:
        """Raise the error of the first record with a wrong CRC of the body or of the record."""
        crcs = crcs_of(self.body) & np.uint32(CRC_MASK)
        bad = (crcs.view(np.int32) != self.heads["body_crc"]) & (self.heads["body_size"] != 0)
        bad |= bad_property_crcs(self.data, self.starts, self.parts)
        if bad.any():
            self.fail(int(bad.argmax()))

    def field(self, name: str) -> pa.Array:
        """A field of the heads."""
        return array_of(self.heads[name])

    def queue_offset(self) -> pa.Array:
        """The queue offsets of the units; without units, those of the records."""
        return self.field("queue_offset") if self.expected is None else array_of(self.expected.queue_offsets)

    @cached_property
    def body(self) -> pa.Array:
        """The bodies: binary[n]."""
        bodies = gather(self.data, self.parts.body_starts, self.parts.body_ends)
        return bodies if bodies.type == pa.binary() else bodies.cast(pa.binary())

    @cached_property
    def properties(self) -> PropertyTexts:
        """The properties, parsed."""
        return PropertyTexts(self.data, self.parts.property_starts, self.parts.ends)

    def topic(self) -> pa.Array:
        """The topics; bytes that are not UTF-8 become U+FFFD."""
        if self.expected is not None and self.expected.topic.isascii():  # each row was compared with it
            return pa.repeat(scalar_of(self.expected.topic, pa.string()), len(self.starts))
        topics = gather(self.data, self.parts.topic_starts, self.parts.topic_ends).cast(pa.binary())
        if rows_not_utf8(topics):
            return list_array([str(topic, "utf-8", "replace") for topic in topics.to_pylist()], pa.string())
        return topics.view(pa.string())

    def host(self, name: str) -> pa.Array:
        """`ip:port` of each row. There are few hosts and many rows, so each host is formatted once."""
        starts, sizes = self._host_ranges(name)
        hosts = gather(self.data, starts, starts + sizes).dictionary_encode()
        texts = list_array([unpack_host(host) for host in hosts.dictionary.to_pylist()], pa.string())
        return texts.take(hosts.indices)

    def _host_ranges(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        flags = self.heads["sys_flag"]
        starts = self.starts + RECORD_HEAD.offset(f"{name}_ip")
        if name == "store":
            starts = starts + np.where(flags & SYS_FLAG_BORN_HOST_V6, IPV6_EXTRA_SIZE, 0)
        flag = SYS_FLAG_BORN_HOST_V6 if name == "born" else SYS_FLAG_STORE_HOST_V6
        return starts, np.where(flags & flag, HOST_V6_SIZE, HOST_V4_SIZE)

    @cached_property
    def offset_message_id(self) -> pa.Array:
        """The upper-case hex of store host and physical offset: string[n]."""
        n = len(self.starts)
        starts, sizes = self._host_ranges("store")
        if not (self.heads["sys_flag"] & SYS_FLAG_STORE_HOST_V6).any():
            ids = np.empty((n, 2), np.uint64)
            ids[:, 0] = unaligned(self.data, np.uint64)[starts]
            ids[:, 1] = self.heads["physical_offset"].view(np.uint64).byteswap()
            return binary_array(_hex(ids.view(np.uint8)), np.arange(0, 32 * n + 1, 32, dtype=np.int32), pa.string())
        hosts = gather(self.data, starts, starts + sizes).cast(pa.binary())
        offsets = self.heads["physical_offset"].astype(">i8")
        ids = join(
            [hosts, binary_array(offsets.view(np.uint8), np.arange(0, 8 * n + 1, 8, dtype=np.int32), pa.binary())],
            large=False,
        )
        return binary_array(_hex(data_of(ids)), offsets_of(ids) * 2, pa.string())

    def message_id(self) -> pa.Array:
        """UNIQ_KEY if there is one, otherwise the offset message id."""
        unique = self.properties.column(UNIQUE_KEY)
        if unique.null_count == 0:
            return unique
        if unique.null_count == len(unique):
            return self.offset_message_id
        return pc.coalesce(unique, self.offset_message_id)


def _hex(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The upper-case hex digits of bytes. Both digits of a byte are computed at once, in 16 bits."""
    digits = data.reshape(-1).astype("<u2")
    digits = (digits >> 4) | ((digits & 0x0F) << 8)  # the high half first, as text is read
    letters = ((digits + 0x0606) >> 4) & 0x0101
    return (digits + 0x3030 + letters * 7).view(np.uint8)


_MAKERS: dict[str, Callable[[_Rows], pa.Array]] = {
    "topic": _Rows.topic,
    "queue_offset": _Rows.queue_offset,
    "body": lambda rows: rows.body,
    "tags": lambda rows: rows.properties.column(TAGS),
    "unique_key": lambda rows: rows.properties.column(UNIQUE_KEY),
    "keys": lambda rows: rows.properties.keys(),
    "properties": lambda rows: rows.properties.map(reserved=False),
    "system_properties": lambda rows: rows.properties.map(reserved=True),
    "message_id": _Rows.message_id,
    "offset_message_id": lambda rows: rows.offset_message_id,
    "born_host": lambda rows: rows.host("born"),
    "store_host": lambda rows: rows.host("store"),
}
