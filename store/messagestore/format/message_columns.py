"""Batches of messages as columns.

`MessageColumns` holds the columns that the user gave, mapped to fields by name. `ColumnTexts` holds what the checks,
the digest and the encoder all need of them, computed once: keys in one form, hashes, and properties as flat arrays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import ConfigError, MessageIllegalError
from messagestore.format import arguments, javahash
from messagestore.format.arrow_bytes import (
    array_of,
    as_binary,
    codes_of,
    is_textual,
    items_of,
    numpy_of,
    plain,
    valid_of,
)
from messagestore.format.message import check_queue_id

_NAMES = {
    "body": ("body", "value"),
    "topic": ("topic",),
    "tags": ("tags",),
    "keys": ("keys", "key"),
    "properties": ("properties",),
    "queue_id": ("queue_id", "queueId", "partition"),
    "sharding_key": ("sharding_key", "shardingKey"),
    "unique_key": ("unique_key", "uniqueKey"),
    "born_timestamp": ("born_timestamp_ms", "bornTimestamp", "born_timestamp"),
    "flag": ("flag",),
    "delay_time_level": ("delay_time_level", "delayTimeLevel"),
}
"""Field of MessageColumns -> the names that its column may have, of which only one may be present."""
NO_QUEUE = -1
"""The queue id of a row whose queue column is null, until one is chosen (`queue_choice`)."""


@runtime_checkable
class ArrowStream(Protocol):
    """A frame that Arrow can read: of pandas, Polars, DuckDB, and others (Arrow's PyCapsule interface)."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The columns, as a capsule."""


@dataclass
class MessageColumns:
    """n messages as columns, for `MessageStore.append_batch` and `MessageBatch`.

    `from_arrow` is the usual way to make one. Arrays are kept, not copied; do not change them before the append.

    Parameters
    ----------
    topic : str or pa.Array[n]
        One topic for all rows, or a column of type string or dictionary.
    queue_id : int32[n] | None
        None until the queues are chosen: by the sink, or by `MessageStore.append_batch`.
    body : pa.Array[n]
        Type binary, string (stored as UTF-8), or their large_* variants.
    keys : pa.Array[n] | None
        A list of string or binary; or string or binary, with one key per row.
    tags, sharding_key, unique_key : pa.Array[n] | None
        Type string, binary, their large_* variants, or a dictionary of these.
    properties : pa.MapArray[n] | None
        The user's own properties, text to text.
    flag : int32[n] | None
    born_timestamp_ms : int64[n] | None
        When the messages were made, in milliseconds since 1970. None: the time of encoding.
    delay_time_level : int32[n] | None
        The delay level of each message (`StoreConfig.message_delay_level`); 0: it is not delayed.
    given : mapping of str to pa.Array[n]
        The user's own columns, with their nulls: "topic", "queue_id", "flag", "born_timestamp" (int64, ms),
        "delay_time_level" and "unique_key". The digest by which a batch is recognised covers these. Without an entry it
        covers `topic` if that is an array, and `flag` and `delay_time_level` if they are given, but never a queue that
        the store chose, a time that it filled in, or a unique key that the sink made.

    Raises
    ------
    ValueError
        The columns do not all have the same number of rows.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from messagestore import MessageColumns
    >>> rows = pa.record_batch({"body": [b"B12", b"C3"], "queueId": pa.array([0, 1], pa.int32()), "tags": ["UA", "UA"]})
    >>> gates = MessageColumns.from_arrow(rows, topic="gates")
    >>> gates.row_count, gates.queue_id.tolist()
    (2, [0, 1])
    """

    topic: str | pa.Array
    queue_id: NDArray[np.int32] | None
    body: pa.Array
    keys: pa.Array | None = None
    tags: pa.Array | None = None
    properties: pa.MapArray | None = None
    flag: NDArray[np.int32] | None = None
    born_timestamp_ms: NDArray[np.int64] | None = None
    sharding_key: pa.Array | None = None
    unique_key: pa.Array | None = None
    delay_time_level: NDArray[np.int32] | None = None
    given: Mapping[str, pa.Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in vars(self).items():
            if column is not None and not isinstance(column, str | Mapping) and len(column) != self.row_count:
                raise ValueError(f"{name}: found {len(column)} rows; allowed are {self.row_count}, as there are bodies")

    @property
    def row_count(self) -> int:
        """The number of messages."""
        return len(self.body)

    def slice(self, start: int, count: int) -> MessageColumns:
        """The rows from `start` to `start + count` (at most to the end), without copying."""
        rows = slice(start, start + count)
        taken: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            taken[column.name] = value if value is None or isinstance(value, str | Mapping) else value[rows]
        taken["given"] = {name: values[rows] for name, values in self.given.items()}
        return MessageColumns(**taken)

    def of_rows(self, mask: NDArray[np.bool_]) -> MessageColumns:
        """Some of the rows: bool[n]. The values are copied."""
        taken = {column.name: _of_rows(getattr(self, column.name), mask) for column in fields(self)}
        taken["given"] = {name: _of_rows(values, mask) for name, values in self.given.items()}
        return MessageColumns(**taken)

    @classmethod
    def from_arrow(
        cls,
        batch: pa.RecordBatch | pa.Table | ArrowStream,
        *,
        topic: str | None = None,
        queue_id: int | None = None,
        default_born_timestamp_ms: int | None = None,
    ) -> MessageColumns:
        """Take the columns of a record batch or table by their names.

        Parameters
        ----------
        batch : pa.RecordBatch | pa.Table | ArrowStream
            An `ArrowStream` is a frame of another library; it is read to its end.
            Columns body (or value), topic, tags, keys (or key), properties, queueId (or partition), shardingKey,
            uniqueKey, bornTimestamp, flag, delayTimeLevel; or the same names in snake_case. `body` is required, and
            a field has one column. A timestamp is stored as the millisecond in which it lies; one without a time zone
            counts as UTC. The chunks of a table are combined.
        topic, queue_id : str | None, int | None
            One value for all rows; it takes precedence over a column.
        default_born_timestamp_ms : int | None
            The time of rows without one, in milliseconds since 1970; None: now.

        Raises
        ------
        MessageIllegalError
            A column is unknown, is missing, or has a type that cannot be stored.
        ConfigError
            It is no frame of columns.
        """
        batch = _table("batch", batch)
        columns = _columns_by_field(batch, topic)
        if queue_id is not None:
            check_queue_id(queue_id)

        given: dict[str, pa.Array] = {}
        for name in ("flag", "queue_id", "born_timestamp", "delay_time_level"):
            if name in columns:
                given[name] = _integers(columns[name], name)
        flags, queues, times = given.get("flag"), given.get("queue_id"), given.get("born_timestamp")
        now = default_born_timestamp_ms if default_born_timestamp_ms is not None else time.time_ns() // 1_000_000
        queue_ids = None if queues is None else numpy_of(queues, null=NO_QUEUE)

        for name in ("topic", "unique_key"):
            if name in columns:
                given[name] = _texts(columns[name], name)

        return cls(
            topic=given["topic"] if topic is None else topic,
            queue_id=queue_ids if queue_id is None else np.full(batch.num_rows, queue_id, np.int32),
            body=plain(_texts(columns["body"], "body")),
            keys=_keys(columns["keys"]) if "keys" in columns else None,
            tags=_texts(columns["tags"], "tags") if "tags" in columns else None,
            properties=_map(columns["properties"]) if "properties" in columns else None,
            flag=None if flags is None else numpy_of(flags, null=0),
            born_timestamp_ms=np.full(batch.num_rows, now, np.int64) if times is None else numpy_of(times, null=now),
            sharding_key=_texts(columns["sharding_key"], "sharding_key") if "sharding_key" in columns else None,
            unique_key=given.get("unique_key"),
            delay_time_level=numpy_of(given["delay_time_level"], null=0) if "delay_time_level" in given else None,
            given=given,
        )


def _columns_by_field(batch: pa.RecordBatch | pa.Table, topic: str | None) -> dict[str, Any]:
    """The column of each field; raises `MessageIllegalError` if one is missing that every message needs."""
    names = batch.schema.names
    for name in names:
        if names.count(name) > 1:
            raise MessageIllegalError(f"column {name!r}: found more than once; allowed is once", field=name)

    columns = _find(dict(zip(names, batch.columns, strict=True)))
    if "body" not in columns:
        raise MessageIllegalError("body: found no column body (or value). Add one", field="body")
    if topic is None and "topic" not in columns:
        text = "topic: found neither a column topic nor a topic for all rows. Give one of them"
        raise MessageIllegalError(text, field="topic")
    if topic is not None and not isinstance(topic, str):
        raise MessageIllegalError(f"topic: found {type(topic).__name__}; allowed is text", field="topic")
    return columns


def columns_of(
    rows: MessageColumns | pa.RecordBatch | pa.Table | ArrowStream | Iterable[Any],
    topic: str | None,
    queue_id: int | None,
) -> list[MessageColumns]:
    """The parts of a batch, from the columns or from the frames that a caller gave.

    Parameters
    ----------
    rows : MessageColumns, pa.RecordBatch, pa.Table, ArrowStream, or iterable of these
    topic, queue_id : str | None, int | None
        One value for all rows of all frames, as in `MessageColumns.from_arrow`.

    Raises
    ------
    MessageIllegalError
        As in `MessageColumns.from_arrow`.
    ConfigError
        Something else was given, or `topic` or `queue_id` beside a MessageColumns.
    """
    now_ms = time.time_ns() // 1_000_000
    alone = isinstance(rows, MessageColumns | pa.RecordBatch | pa.Table | ArrowStream)
    parts = [rows] if alone else arguments.instance("columns", rows, Iterable)
    return [_part(part, topic, queue_id, now_ms) for part in parts]


def _part(part: object, topic: str | None, queue_id: int | None, now_ms: int) -> MessageColumns:
    if isinstance(part, MessageColumns):
        for name, value in (("topic", topic), ("queue_id", queue_id)):
            if value is not None:
                raise arguments.refused(
                    name, value, "None for MessageColumns, which have topics and queues of their own"
                )
        return part

    table = _table("columns", part)
    return MessageColumns.from_arrow(table, topic=topic, queue_id=queue_id, default_born_timestamp_ms=now_ms)


def _table(name: str, value: object) -> pa.RecordBatch | pa.Table:
    """A frame in Arrow's own classes. Buffers are shared where the other library allows it.

    Raises
    ------
    ConfigError
        It is no frame.
    """
    if isinstance(value, pa.RecordBatch | pa.Table):
        return value
    if not isinstance(value, ArrowStream):
        raise arguments.refused(name, value, "MessageColumns, RecordBatch, Table, or a frame with __arrow_c_stream__")
    if isinstance(value, pa.RecordBatchReader):
        return value.read_all()  # what its source raises, such as a scan of a damaged store, comes as it is
    try:
        reader = pa.RecordBatchReader.from_stream(value)
    except pa.ArrowInvalid as error:  # a single column has the method, too
        fault = f"{name}: found {type(value).__name__}, which gives no columns with names ({error}); allowed is a frame"
        raise ConfigError(fault, key=name, value=value) from None
    return reader.read_all()


def _of_rows(values: Any, mask: NDArray[np.bool_]) -> Any:
    if values is None or isinstance(values, str | Mapping):
        return values
    return values.filter(array_of(mask)) if isinstance(values, pa.Array) else values[mask]


def _find(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> dict[str, pa.Array]:
    """Field -> column. A column of Arrow's null type counts as missing, except for the body."""
    column_names = [name for names in _NAMES.values() for name in names]
    for name in columns:
        if name not in column_names:
            raise MessageIllegalError(
                f"column {name!r}: no such column; allowed are {', '.join(column_names)}", field=name
            )

    columns_by_field: dict[str, pa.Array] = {}
    for name, names in _NAMES.items():
        aliases = [alias for alias in names if alias in columns and not pa.types.is_null(columns[alias].type)]
        if len(aliases) > 1:
            raise MessageIllegalError(
                f"columns {aliases[0]} and {aliases[1]}: both are for {name}, of which a message has one. "
                "Drop one of them",
                field=name,
            )

        for alias in names:
            if alias in columns and name not in columns_by_field:
                column = columns[alias]
                column = _one_array(column, alias)
                if not pa.types.is_null(column.type):
                    columns_by_field[name] = column
                elif name == "body":
                    columns_by_field[name] = column.cast(pa.binary())
    return columns_by_field


def _one_array(column: pa.Array | pa.ChunkedArray, name: str) -> pa.Array:
    try:
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    except pa.ArrowInvalid as error:  # together they are too long for their type
        fault = (
            f"column {name}: its chunks cannot be put together ({error}). Give the table in parts, or use a large type"
        )
        raise MessageIllegalError(fault, field=name) from None


def _wrong_type(name: str, column: pa.Array, allowed: str) -> MessageIllegalError:
    return MessageIllegalError(f"column {name}: found type {column.type}; allowed is {allowed}", field=name)


def _texts(column: pa.Array, name: str) -> pa.Array:
    if not is_textual(column.type):
        raise _wrong_type(name, column, "string or binary")
    return column


def _keys(column: pa.Array) -> pa.Array:
    kind = column.type
    if is_textual(kind):
        return column
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not (is_textual(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise _wrong_type("keys", column, "a list of strings, string or binary")
    return column.cast(pa.list_(pa.string())) if pa.types.is_null(kind.value_type) else column


def _map(column: pa.Array) -> pa.MapArray:
    kind = column.type
    if not pa.types.is_map(kind) or not (is_textual(kind.key_type) and is_textual(kind.item_type)):
        raise _wrong_type("properties", column, "a map of string to string")
    return column


def _integers(column: pa.Array, name: str) -> pa.Array:
    """The column as int32, or as int64 in ms for times. Nulls stay."""
    if name == "born_timestamp" and pa.types.is_timestamp(column.type):
        return _whole_ms(column)
    if not pa.types.is_integer(column.type):
        raise _wrong_type(name, column, "an integer" + (" of ms, or a timestamp" if name == "born_timestamp" else ""))
    try:
        return column.cast(pa.int64() if name == "born_timestamp" else pa.int32())
    except pa.ArrowInvalid:
        bits = 64 if name == "born_timestamp" else 32
        most, values = 1 << (bits - 1), column.to_pylist()
        row = next(row for row, value in enumerate(values) if value is not None and not -most <= value < most)
        text = f"{name}: found {values[row]}; allowed is an int of {bits} bits"
        raise MessageIllegalError(text, field=name, row=row) from None


def _whole_ms(column: pa.Array) -> pa.Array:
    """Times as whole ms since 1970, rounded down, also before 1970."""
    values, unit = numpy_of(column.cast(pa.int64()), null=0), column.type.unit
    if unit == "s":
        return column.cast(pa.timestamp("ms", column.type.tz)).cast(pa.int64())
    ms = values // {"ms": 1, "us": 1_000, "ns": 1_000_000}[unit]
    nulls = array_of(valid_of(column)).buffers()[1] if column.null_count else None
    return pa.Array.from_buffers(pa.int64(), len(ms), [nulls, pa.py_buffer(ms)])


# ---- what is computed once


@dataclass
class Keys:
    """The keys of n rows.

    Parameters
    ----------
    texts : pa.Array[k]
        All keys as a plain array, in row order. Nulls are only those in the user's lists.
    counts : int64[n]
        The number of keys of each row.
    """

    texts: pa.Array
    counts: NDArray[np.int64]

    @cached_property
    def hashes(self) -> NDArray[np.int32]:
        """Java hash of each key: int32[k]."""
        return javahash.java_hashes(self.texts)


@dataclass
class Entries:
    """The properties of n rows as flat arrays, in row order.

    Parameters
    ----------
    counts : int64[n]
        Properties of each row.
    names : pa.DictionaryArray[k]
    values : pa.Array[k]
        Plain.
    """

    counts: NDArray[np.int64]
    names: pa.DictionaryArray
    values: pa.Array

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The row of each property: int64[k]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def name_codes(self) -> NDArray[np.int64]:
        """Index of each name in the dictionary: int64[k]; -1 for a null."""
        return codes_of(self.names)


class ColumnTexts:
    """What the checks, the digest and the encoder need of a batch. Each part is computed when it is first requested."""

    def __init__(self, columns: MessageColumns) -> None:
        self.columns = columns

    @cached_property
    def topic_codes(self) -> NDArray[np.int64]:
        """Index of each row's topic in `topic_names`: int64[n]; -1 for a null."""
        if isinstance(self.columns.topic, str):
            return np.zeros(self.columns.row_count, np.int64)
        return codes_of(self.topics)

    @cached_property
    def topic_names(self) -> list[str]:
        """The topics. Bytes that are not UTF-8 become U+FFFD, which no topic may contain."""
        if isinstance(self.columns.topic, str):
            return [self.columns.topic]
        names = as_binary(plain(self.topics.dictionary)).to_pylist()
        return [str(name or b"", "utf-8", "replace") for name in names]

    @cached_property
    def topics(self) -> pa.DictionaryArray:
        """The topic column, dictionary-encoded. Only for a batch that has one."""
        topic = self.columns.topic
        return topic if isinstance(topic, pa.DictionaryArray) else plain(topic).dictionary_encode()

    @cached_property
    def body(self) -> pa.Array:
        """The bodies as binary or large_binary."""
        return as_binary(plain(self.columns.body))

    @cached_property
    def keys(self) -> Keys | None:
        """The keys, or None if there is no such column."""
        column = self.columns.keys
        if column is None:
            return None
        if is_textual(column.type):
            column = plain(column)
            valid = valid_of(column)
            return Keys(column.drop_null() if column.null_count else column, valid.astype(np.int64))
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        counts, pick = items_of(column)
        return Keys(plain(pick(column.values)), counts)

    @cached_property
    def tags(self) -> pa.Array | None:
        """The tags as a plain array."""
        return None if self.columns.tags is None else plain(self.columns.tags)

    @cached_property
    def unique_key(self) -> pa.Array | None:
        """The unique keys as a plain array."""
        return None if self.columns.unique_key is None else plain(self.columns.unique_key)

    @cached_property
    def entries(self) -> Entries | None:
        """The properties, or None if there is no such column or every row is null or empty."""
        column = self.columns.properties
        if column is None:
            return None
        counts, pick = items_of(column)
        if not counts.any():
            return None
        names = pick(column.keys)
        names = names if isinstance(names, pa.DictionaryArray) else plain(names).dictionary_encode()
        return Entries(counts, names, plain(pick(column.items)))

    # ---- the same as Python objects, for what goes row by row

    @cached_property
    def key_rows(self) -> list[list[str]]:
        """The keys of each row."""
        keys = self.keys
        if keys is None:
            return [[]] * self.columns.row_count
        ends = np.cumsum(keys.counts).tolist()
        texts = _strings(keys.texts)
        return [texts[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def tag_rows(self) -> list[str | None]:
        """The tag of each row."""
        return [None] * self.columns.row_count if self.tags is None else _strings(self.tags)

    @cached_property
    def unique_key_rows(self) -> list[str | None]:
        """The unique key of each row."""
        return [None] * self.columns.row_count if self.unique_key is None else _strings(self.unique_key)

    @cached_property
    def property_rows(self) -> list[dict[str, str]]:
        """The properties of each row."""
        entries = self.entries
        if entries is None:
            return [{}] * self.columns.row_count
        ends = np.cumsum(entries.counts).tolist()
        names, values = _strings(plain(entries.names)), _strings(entries.values)
        return [
            dict(zip(names[start:end], values[start:end], strict=True))
            for start, end in zip([0, *ends], ends, strict=False)
        ]


def _strings(array: pa.Array) -> list[Any]:
    """The values of a plain array as text; bytes that are not UTF-8 as U+FFFD, as Java reads them."""
    return [None if value is None else str(value, "utf-8", "replace") for value in as_binary(array).to_pylist()]
