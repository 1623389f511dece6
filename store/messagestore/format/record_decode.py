"""Decodes many records into Arrow columns.

The records may be anywhere in a buffer. Every record is checked: its sizes and its magic, whether its lengths add up,
whether it is the record that the unit promised, and its CRCs. Only the requested columns are decoded. The first bad
record raises an error that names file and offset.

The compiled kernel does the work: it checks all records and notes where their parts are, measures the columns, and
fills buffers of that size. What it does not understand, the scalar codec of record.py decides: why a record is bad, and
how Java reads texts that are not UTF-8 or names that occur twice. Without the kernel, the scalar codec decodes
everything, one record after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import MagicError, TornRecordError
from messagestore.format import kernel
from messagestore.format.arrow_bytes import MAX_SMALL, array_of, list_array
from messagestore.format.hosts import HOST_V4_SIZE, unpack_host
from messagestore.format.layout import (
    IPV6_EXTRA_SIZE,
    RECORD_HEAD,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
)
from messagestore.format.message import MessageExt
from messagestore.format.properties import (
    PROPERTY_SEPARATOR,
    RESERVED_PROPERTIES,
    decode_properties,
    encode_properties,
)
from messagestore.format.record import decode_message
from messagestore.format.record_scan import heads, parts

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
        records = _Records(data, starts[block], sizes[block], promised, path, verify=verify_body_crc)
        if kernel.lib is None:
            kernel.tell_without()
            blocks.append(_by_scalar_codec(records, columns))
        else:
            blocks.append(list(map(_KernelRows(kernel.lib, records, columns).array, columns)))

    arrays = blocks[0] if len(blocks) == 1 else [pa.concat_arrays(column) for column in zip(*blocks, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(name, COLUMNS[name]) for name in columns]))


def _bytes_of(topic: str) -> bytes:
    return topic.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class _Records:
    """What `decode` was asked for, in some of the rows."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int32]
    expected: Expected | None
    path: str
    verify: bool

    def message(self, row: int) -> MessageExt:
        """One record, decoded and checked by the scalar codec.

        Raises
        ------
        MagicError, TornRecordError, ChecksumError
            The record is bad, or is not the one that was promised.
        """
        start, size, expected = int(self.starts[row]), int(self.sizes[row]), self.expected
        record = self.data[start : start + size].tobytes() if start >= 0 and size > 0 else b""

        place = None if expected is None else int(expected.physical_offsets[row])
        if place is None and len(record) >= RECORD_HEAD.size:  # for errors: the place that the record itself gives
            at = RECORD_HEAD.offset("physical_offset")
            place = int.from_bytes(record[at : at + 8], "big", signed=True)

        where = start if place is None else place
        if len(record) != size:
            raise TornRecordError(self.path, where, f"a record of {size} bytes", f"{len(record)} bytes")

        message = decode_message(record, verify=self.verify, path=self.path, physical_offset=place)
        if message.size != size:
            raise TornRecordError(self.path, where, f"TOTALSIZE {size}", str(message.size))

        if expected is not None:
            number = int(expected.queue_offsets[row])
            same = message.queue_offset == number or (
                expected.renumbered is not None and bool(expected.renumbered[row])
            )
            same &= (message.topic, message.queue_id) == (expected.topic, expected.queue_id)
            if same and not message.topic.isascii():  # U+FFFD may stand for bytes that are not UTF-8
                same = self._topic(row) == _bytes_of(expected.topic)
            if not same:
                wanted = f"message {number} of {expected.topic}/{expected.queue_id}"
                other = f"message {message.queue_offset} of {message.topic[:300]}/{message.queue_id}"
                raise MagicError(self.path, where, wanted, other)
        return message

    def _topic(self, row: int) -> bytes:
        """The topic of a record that was decoded, with the bytes that are not UTF-8."""
        one = self.starts[row : row + 1]
        where = parts(self.data, one, heads(self.data, one))[1]
        return self.data[where.topic_starts[0] : where.topic_ends[0]].tobytes()

    def queue_offset(self) -> pa.Array | None:
        """The queue offsets of the units; None without units."""
        return None if self.expected is None else array_of(self.expected.queue_offsets)


# ---- one record after the other

_VALUES: dict[str, Callable[[MessageExt], object]] = {
    "keys": lambda message: list(message.keys),
    "properties": lambda message: list(message.properties.items()),
    "system_properties": lambda message: list(message.system_properties.items()),
    "message_id": lambda message: message.unique_key or message.offset_message_id,
}
"""The columns that are not simply a field of a message."""


def _by_scalar_codec(records: _Records, columns: Sequence[str]) -> list[pa.Array]:
    messages = [records.message(row) for row in range(len(records.starts))]
    arrays = []
    for name in columns:
        promised = records.queue_offset() if name == "queue_offset" else None
        value = _VALUES.get(name)
        values = [getattr(message, name) if value is None else value(message) for message in messages]
        arrays.append(list_array(values, COLUMNS[name]) if promised is None else promised)
    return arrays


# ---- many records at once

_ROW = np.dtype(
    [(name, "i8") for name in ("start", "topic", "properties")]
    + [(name, "i4") for name in ("body", "body_size", "topic_size", "properties_size", "sys_flag", "state")]
)
"""The kernel's notes about a record (`Row` in decode.c)."""
_TEXT = np.dtype(("i4", 8))
"""The kernel's notes about the properties of a record (`Text` in decode.c)."""
_UNCLEAN, _REWRITTEN = 1, 2
_WANT_TOPIC, _WANT_PROPERTIES, _WANT_MAPS = 1, 2, 4
_TOTALS = (
    "tags", "tags_count", "unique_key", "unique_key_count", "keys", "key_count", "user_count", "user_names",
    "user_values", "reserved_count", "reserved_names", "reserved_values", "topic", "message_id", "offset_message_id",
)  # fmt: skip
_WHICH = {
    name: number
    for number, name in enumerate(
        ("body", "topic", "offset_message_id", "born_host", "store_host", "tags", "unique_key", "message_id")
    )
}
_MAPS = {"properties": ("user", 0), "system_properties": ("reserved", 1)}
_OF_PROPERTIES = frozenset(("tags", "unique_key", "message_id", "keys", *_MAPS))
"""The columns whose values come from the property string."""
_HOST_FLAGS = {"born_host": SYS_FLAG_BORN_HOST_V6, "store_host": SYS_FLAG_STORE_HOST_V6}
_RESERVED = b"".join(name.encode() + PROPERTY_SEPARATOR for name in sorted(RESERVED_PROPERTIES))
_HEAD_FIELDS = {"size": "total_size"}
_NOTHING = np.empty(0, np.int64)


def _promised(expected: Expected | None) -> tuple[Any, ...]:
    """The arguments of `frame` that say what units promise."""
    if expected is None:
        return b"", 0, _NOTHING, _NOTHING, _NOTHING
    return (
        _bytes_of(expected.topic),
        expected.queue_id,
        np.ascontiguousarray(expected.queue_offsets, np.int64),
        np.ascontiguousarray(expected.physical_offsets, np.int64),
        _NOTHING if expected.renumbered is None else np.ascontiguousarray(expected.renumbered, np.bool_),
    )


class _KernelRows:
    """n checked records, and the kernel's notes about them."""

    def __init__(self, lib: kernel.Kernel, records: _Records, columns: Sequence[str]) -> None:
        self.lib, self.records, self.count = lib, records, len(records.starts)
        self.data = np.ascontiguousarray(records.data)
        self.rows = np.empty(self.count, _ROW)

        starts = np.ascontiguousarray(records.starts, np.int64)
        sizes = np.ascontiguousarray(records.sizes, np.int32)
        promised = _promised(records.expected)
        good, body, topic = lib.frame(self.data, starts, sizes, self.rows, records.verify, *promised)
        if good < self.count:
            # Decoding it alone raises the error that says what is wrong with it.
            records.message(good)
            raise AssertionError(f"record {good}, at {starts[good]}, is refused as one of many and accepted alone")

        self.sizes = {
            "body": body,
            "topic": topic,
            "offset_message_id": 32 * self.count + 24 * self._ipv6_count("store_host"),
        }
        self.sizes |= self._measure(columns)

    def array(self, name: str) -> pa.Array:
        """A column."""
        return _MAKERS.get(name, _KernelRows.number)(self, name)

    def number(self, name: str) -> pa.Array:
        """A field of the heads."""
        kind, field = COLUMNS[name], _HEAD_FIELDS.get(name, name)
        position, width = RECORD_HEAD.offset(field), kind.bit_width // 8
        behind = (position >= RECORD_HEAD.offset("store_timestamp_ms")) + (
            position >= RECORD_HEAD.offset("reconsume_times")
        )
        out = pa.allocate_buffer(self.count * width)
        self.lib.fill_numbers(self.data, self.rows, position, behind, width, out)
        return pa.Array.from_buffers(kind, self.count, [None, out])

    def queue_offset(self, name: str) -> pa.Array:
        """The queue offsets of the units; without units, those of the records."""
        promised = self.records.queue_offset()
        return self.number(name) if promised is None else promised

    def body(self, name: str) -> pa.Array:
        """The bodies."""
        return self._values(name, self.sizes[name], pa.binary())

    def host(self, name: str) -> pa.Array:
        """`ip:port` of each row. There are few hosts and many rows, so each host is formatted once."""
        size = HOST_V4_SIZE * self.count + IPV6_EXTRA_SIZE * self._ipv6_count(name)
        hosts = self._values(name, size, pa.binary()).dictionary_encode()
        texts = list_array([unpack_host(host) for host in hosts.dictionary.to_pylist()], pa.string())
        return texts.take(hosts.indices)

    def _ipv6_count(self, host: str) -> int:
        return int(np.count_nonzero(self.rows["sys_flag"] & _HOST_FLAGS[host]))

    # ---- texts

    def _measure(self, columns: Sequence[str]) -> dict[str, int]:
        """Read the texts that the columns need: how large each column is. Texts that only Java understands are
        rewritten first.
        """
        parts, expected = 0, self.records.expected
        if "topic" in columns and not (expected is not None and expected.topic.isascii()):
            parts |= _WANT_TOPIC  # otherwise each record was compared with a topic that is UTF-8
        if not _OF_PROPERTIES.isdisjoint(columns):
            parts |= _WANT_PROPERTIES
        if not _MAPS.keys().isdisjoint(columns):
            parts |= _WANT_MAPS
        if not parts:
            return {}

        self.texts, totals = np.empty(self.count, _TEXT), np.zeros(len(_TOTALS), np.int64)
        if self.lib.measure(self.data, self.rows, self.texts, _RESERVED, parts, totals):
            self._rewrite()
            if unclean := self.lib.measure(self.data, self.rows, self.texts, _RESERVED, parts, totals):
                raise AssertionError(f"the texts of {unclean} records were rewritten, and are refused again")
        return dict(zip(_TOTALS, totals.tolist(), strict=True))

    def _rewrite(self) -> None:
        """Let the scalar codec read the texts of the unclean rows, and put what it reads behind the data.

        It reads them one by one, as each is unclean in its own way. No writer of today produces such rows.
        """
        texts, at = [], len(self.data)
        for row in np.flatnonzero(self.rows["state"] == _UNCLEAN).tolist():
            topic = str(self._text(row, "topic"), "utf-8", "replace").encode()
            properties = encode_properties(decode_properties(self._text(row, "properties")).items())
            for name, text in (("topic", topic), ("properties", properties)):
                self.rows[name][row], self.rows[f"{name}_size"][row] = at, len(text)
                texts.append(text)
                at += len(text)
            self.rows["state"][row] = _REWRITTEN
        self.data = np.concatenate([self.data, np.frombuffer(b"".join(texts), np.uint8)])

    def _text(self, row: int, name: str) -> bytes:
        start = int(self.rows[name][row])
        return self.data[start : start + int(self.rows[f"{name}_size"][row])].tobytes()

    def text(self, name: str) -> pa.Array:
        """A column of texts without nulls."""
        return self._values(name, self.sizes[name], pa.string())

    def nullable_text(self, name: str) -> pa.Array:
        """A column of texts: null in the rows that have no such property."""
        if self.sizes[f"{name}_count"] == self.count:
            return self.text(name)
        valid = np.zeros((self.count + 7) // 8, np.uint8)
        return self._values(name, self.sizes[name], pa.string(), valid)

    def keys(self, name: str) -> pa.Array:
        """KEYS of each row, split at single blanks, without empty pieces."""
        lists, offsets = self._offsets(self.count), self._offsets(self.sizes["key_count"])
        texts = _allocated(self.sizes[name], name)
        self.lib.fill_keys(self.data, self.rows, self.texts, lists, offsets, texts)
        items = pa.Array.from_buffers(pa.string(), self.sizes["key_count"], [None, offsets, texts])
        return pa.Array.from_buffers(COLUMNS[name], self.count, [None, lists], children=[items])

    def map(self, name: str) -> pa.Array:
        """The properties of each row whose names are RocketMQ's, or the user's own."""
        kind, (owner, number) = COLUMNS[name], _MAPS[name]
        count = self.sizes[f"{owner}_count"]
        maps = self._offsets(self.count)
        buffers = [
            (self._offsets(count), _allocated(self.sizes[f"{owner}_{part}"], name)) for part in ("names", "values")
        ]
        self.lib.fill_map(self.data, self.rows, self.texts, _RESERVED, number, maps, *buffers[0], *buffers[1])
        parts = [pa.Array.from_buffers(pa.string(), count, [None, *part]) for part in buffers]
        entries = pa.StructArray.from_arrays(parts, fields=[kind.key_field, kind.item_field])
        return pa.Array.from_buffers(kind, self.count, [None, maps], children=[entries])

    @staticmethod
    def _offsets(count: int) -> pa.Buffer:
        return pa.allocate_buffer(4 * (count + 1))

    def _values(self, name: str, size: int, kind: pa.DataType, valid: NDArray[np.uint8] | None = None) -> pa.Array:
        offsets, values = self._offsets(self.count), _allocated(size, name)
        texts = self.texts if name in _OF_PROPERTIES else _NOTHING
        nulls = _NOTHING if valid is None else valid
        self.lib.fill_values(self.data, self.rows, texts, _WHICH[name], offsets, values, nulls)
        bitmap = None if valid is None else pa.py_buffer(valid)
        return pa.Array.from_buffers(kind, self.count, [bitmap, offsets, values])


def _allocated(size: int, name: str) -> pa.Buffer:
    """A buffer for the values of a column.

    Raises
    ------
    ValueError
        More than 2 GiB, which offsets of 32 bits cannot address.
    """
    if size > MAX_SMALL:
        raise ValueError(f"{name}: found {size} bytes for one array; allowed are {MAX_SMALL}")
    return pa.allocate_buffer(size)


_MAKERS: dict[str, Callable[[_KernelRows, str], pa.Array]] = {
    "topic": _KernelRows.text,
    "queue_offset": _KernelRows.queue_offset,
    "body": _KernelRows.body,
    "tags": _KernelRows.nullable_text,
    "unique_key": _KernelRows.nullable_text,
    "keys": _KernelRows.keys,
    "properties": _KernelRows.map,
    "system_properties": _KernelRows.map,
    "message_id": _KernelRows.text,
    "offset_message_id": _KernelRows.text,
    "born_host": _KernelRows.host,
    "store_host": _KernelRows.host,
}
"""What makes each column that is not simply a number of the heads."""
