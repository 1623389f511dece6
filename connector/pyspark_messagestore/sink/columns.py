"""Turns the columns of a DataFrame into messages with queues.

`prepare` checks the DataFrame's columns once, before a row is read. `Mapper` turns the Arrow batches of one task into
`MessageColumns`: it accepts the store's and Kafka's names and types, leaves out the columns that the store assigns
itself (a queue offset, a store time), and gives each row a queue.

    queueSelector=auto:   column queueId, else hash of shardingKey, else hash of the first key, else queues in turn
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore import ConfigError, MessageColumns, MessageIllegalError, StoreConfig
from messagestore.spi import (
    MOST_MS,
    SYS_FLAG_COMPRESSED,
    ColumnTexts,
    all_faults,
    array_of,
    check_properties,
    choose_queues,
    numpy_of,
    queue_counts,
    valid_of,
)
from pyspark_messagestore.options.values import KAFKA, ROCKETMQ
from pyspark_messagestore.sink.unique_keys import UniqueKeys

_TEXTUAL = ("string", "binary")
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_TIMES = ("timestamp", "bigint", "int")
_PROPERTY_TYPES = ("string", *_WHOLE, "boolean", "date")
"""Types of columns that may become properties: those whose text is the same in Spark and Arrow."""

ACCEPTED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "body": ("body", _TEXTUAL, "binary or string"),
    "value": ("body", _TEXTUAL, "binary or string"),
    "topic": ("topic", ("string",), "string"),
    "tags": ("tags", _TEXTUAL, "string"),
    "keys": ("keys", ("array<string>", "array<binary>", *_TEXTUAL), "array<string>, string or binary"),
    "key": ("keys", ("array<string>", "array<binary>", *_TEXTUAL), "binary, string or array<string>"),
    "properties": ("properties", ("map<string,string>",), "map<string,string>"),
    "headers": (
        "properties",
        ("map<string,string>", "array<struct<key:string,value:binary>>", "array<struct<key:string,value:string>>"),
        "array<struct<key:string,value:binary>> or map<string,string>",
    ),
    "queueid": ("queueId", _WHOLE, "int"),
    "partition": ("queueId", _WHOLE, "int"),
    "shardingkey": ("shardingKey", _TEXTUAL, "string"),
    "borntimestamp": ("bornTimestamp", _TIMES, "timestamp, or bigint of ms"),
    "flag": ("flag", _WHOLE, "int"),
    "delaytimelevel": ("delayTimeLevel", _WHOLE, "int"),
}
"""For each name of a column in lower case: the store's name, the types that it may have as Spark writes them, and these
types in words. Two columns for one field are an error."""

_KNOWN = (
    "body (value), topic, tags, keys (key), properties (headers), queueId (partition), shardingKey, bornTimestamp, "
    "flag, delayTimeLevel"
)

_INTS = frozenset({"queueId", "flag", "delayTimeLevel"})
"""The store's names of the columns that are ints in a record. A bigint is taken if its numbers fit."""

ASSIGNED: dict[str, dict[str, str]] = {
    ROCKETMQ: {
        "queueOffset": "bigint",
        "storeTimestamp": "timestamp",
        "msgId": "string",
        "offsetMsgId": "string",
        "commitLogOffset": "bigint",
        "storeSize": "int",
        "sysFlag": "int",
        "bodyCrc": "int",
        "reconsumeTimes": "int",
        "bornHost": "string",
        "storeHost": "string",
        "preparedTransactionOffset": "bigint",
        "systemProperties": "map<string,string>",
        "brokerName": "string",
    },
    KAFKA: {"offset": "bigint", "timestamp": "timestamp", "timestampType": "int"},
}
"""Columns of this source, in both row formats, that the store assigns itself, with their types. They are left out of a
frame that was read, so that it can be written back."""
_SIGNS = {ROCKETMQ: ("queueOffset", "storeTimestamp", "msgId"), KAFKA: ("offset", "timestamp", "timestampType")}
"""A frame that has all of these columns of a row format was read. A user's own frame may have one of them."""

_KAFKAS = ("key", "value", "headers", "topic", "partition")
"""The columns that Spark's sink for Kafka writes."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which column of the DataFrame is which field.

    Parameters
    ----------
    indices : tuple of int
    names : tuple of str
        The store's names of these columns.
    extra_indices : tuple of int
    extra_names : tuple of str
        The columns that become properties, and the names of these.
    sys_flag : int | None
        The column that says which bodies are compressed, in a frame that was read.
    """

    indices: tuple[int, ...]
    names: tuple[str, ...]
    extra_indices: tuple[int, ...] = ()
    extra_names: tuple[str, ...] = ()
    sys_flag: int | None = None


def prepare(
    columns: Iterable[tuple[str, str]], topic: str | None, unknown: str = "error", row_format: str = ROCKETMQ
) -> Mapping:
    """Check the columns of a DataFrame.

    Parameters
    ----------
    columns : pairs of str
        The name and Spark's type (`simpleString`) of each column.
    topic : str | None
        The option `topic`.
    unknown : str
        The option `unknownColumns`: "error", "ignore" or "properties".
    row_format : str
        The option `rowFormat`: with "kafka", only Kafka's names are known.

    Raises
    ------
    ConfigError
        A column is unknown, is missing or has the wrong type.
    """
    columns = list(columns)
    places: dict[str, tuple[str, int]] = {}
    extras: dict[str, int] = {}
    accepted = list(ACCEPTED) if row_format == ROCKETMQ else list(_KAFKAS)
    left_out = assigned(columns)

    for index, (name, kind) in enumerate(columns):
        if index in left_out:
            continue
        if name.lower() not in accepted:
            if unknown == "error":
                allowed = _KNOWN if row_format == ROCKETMQ else f"{', '.join(_KAFKAS)} (rowFormat=kafka)"
                raise ConfigError(
                    f"column {name}: no such column; allowed are {allowed}.{_why_kept(name)} Drop the column, put its "
                    f"value into the body or the properties, or set unknownColumns to properties or ignore",
                    key=name,
                )
            if unknown == "properties":
                _check_extra(name, kind, extras)
                extras[name] = index
            continue

        stored, kinds, allowed = ACCEPTED[name.lower()]
        if kind not in kinds:
            hint = _NO_ZONE if kind == "timestamp_ntz" else ""
            raise ConfigError(f"column {name}: found type {kind}; allowed is {allowed}{hint}", key=name, value=kind)

        if stored in places:
            raise ConfigError(
                f"columns {places[stored][0]} and {name}: both are for {stored}, of which a message has one. Drop or "
                f"rename one of them",
                key=name,
            )
        places[stored] = (name, index)

    if "body" not in places:
        name = "body (or value)" if row_format == ROCKETMQ else "value"
        raise ConfigError(f"column {name}: found none. Give the bodies of the messages as binary or string", key="body")
    if "topic" not in places and topic is None:
        raise ConfigError("topic: found neither the option topic nor a column topic. Give one of them", key="topic")

    return Mapping(
        tuple(index for _, index in places.values()),
        tuple(places),
        tuple(extras.values()),
        tuple(extras),
        next((index for index in left_out if columns[index][0] == "sysFlag"), None),
    )


_NO_ZONE = (
    ". A timestamp without a time zone is no moment. Cast it to timestamp, which takes it as a time in the session's "
    "time zone (spark.sql.session.timeZone)"
)


def assigned(columns: Sequence[tuple[str, str]]) -> set[int]:
    """The indices of the columns that a source gave to a frame that was read from it, and that the store assigns."""
    pairs = set(columns)
    return {
        index
        for row_format, kinds in ASSIGNED.items()
        if all((name, kinds[name]) in pairs for name in _SIGNS[row_format])
        for index, (name, kind) in enumerate(columns)
        if kinds.get(name) == kind
    }


def _why_kept(name: str) -> str:
    """Why a column that the store assigns is not left out of this frame."""
    for row_format, kinds in ASSIGNED.items():
        if name.lower() in map(str.lower, kinds):
            signs = ", ".join(f"{sign} {kinds[sign]}" for sign in _SIGNS[row_format])
            return f" A column of this name is left out only of a frame that was read, which has {signs}."
    return ""


def _check_extra(name: str, kind: str, extras: dict[str, int]) -> None:
    """Refuse a column that cannot become a property."""
    try:
        check_properties({name: "value"})
    except MessageIllegalError as error:
        raise ConfigError(
            f"column {name}: cannot become a property: {error.reason}. Rename or drop the column", key=name
        ) from None

    if kind not in _PROPERTY_TYPES:
        raise ConfigError(
            f"column {name}: found type {kind}; allowed in a column that becomes a property "
            f"(unknownColumns=properties) are {', '.join(_PROPERTY_TYPES)}. Cast it to string",
            key=name,
            value=kind,
        )
    if name in extras:
        raise ConfigError(f"column {name}: found twice, but a property has one value. Drop one of them", key=name)


@dataclass
class Mapper:
    """Turns the batches of one task into messages with queues.

    Parameters
    ----------
    mapping : Mapping
    topic : str | None
        The option `topic`, which takes precedence over the column.
    selector : str
        "auto", "keys" or "roundRobin".
    queue_count : function of str to int
        Returns the number of queues of a topic.
    seed : str
        It determines the queue with which the turns begin: the same one for the same batch and partition.
    unique_keys : UniqueKeys | None
        Gives each message a UNIQ_KEY.
    """

    mapping: Mapping
    topic: str | None
    selector: str
    queue_count: Callable[[str], int]
    seed: str
    unique_keys: UniqueKeys | None = None
    _turn: int = field(init=False)

    def __post_init__(self) -> None:
        self._turn = zlib.crc32(self.seed.encode())

    def messages(self, batch: pa.RecordBatch, first_row: int, numbers: NDArray[np.int64] | None = None) -> ColumnTexts:
        """The messages of a batch, with queues.

        Parameters
        ----------
        first_row : int
            The number of the first row in the task, for errors.
        numbers : int64[n] | None
            The numbers of the rows in the task; None: one after the other from `first_row` on.
        """
        faults = self._own_faults(batch, first_row)
        if faults:
            raise faults[min(faults)]
        texts = self._texts(self.columns(batch))
        texts.columns.queue_id = self._queues(texts, first_row)
        if self.unique_keys is not None:
            if numbers is None:
                numbers = np.arange(first_row, first_row + batch.num_rows)
            texts.columns.unique_key = self.unique_keys(numbers)
        return texts

    def faults(self, batch: pa.RecordBatch, first_row: int, limits: StoreConfig) -> dict[int, MessageIllegalError]:
        """An error for each row of a batch that cannot be stored, by the row in the batch."""
        columns = self.columns(batch)
        errors = self._own_faults(batch, first_row)
        for name in _INTS & columns.keys():
            if pa.types.is_int64(columns[name].type):
                columns[name] = _narrowed(columns[name])

        texts = self._texts(columns)
        if self.selector == "auto" and texts.columns.queue_id is not None:
            queue_ids, is_given = texts.columns.queue_id, valid_of(texts.columns.given["queue_id"])
            counts = self._counts(texts)
            for row in np.flatnonzero(is_given & ((queue_ids < 0) | (queue_ids >= counts))).tolist():
                errors[row] = _queue_error(queue_ids, counts, row, first_row)
        texts.columns.queue_id = np.zeros(batch.num_rows, np.int32)
        return {**all_faults(texts, limits, first_row), **errors}

    def _own_faults(self, batch: pa.RecordBatch, first_row: int) -> dict[int, MessageIllegalError]:
        """What is wrong with rows that the store itself would take, or could not see."""
        faults: dict[int, MessageIllegalError] = {}
        if self.mapping.sys_flag is not None:
            flags = numpy_of(batch.column(self.mapping.sys_flag), null=0)
            compressed = np.flatnonzero(flags & SYS_FLAG_COMPRESSED).tolist()
            faults |= {row: _compressed_error(int(flags[row]), row, first_row) for row in compressed}

        for name, index in zip(self.mapping.names, self.mapping.indices, strict=True):
            column = batch.column(index)
            if name == "properties":
                faults |= {row: _unnamed_error(row, first_row) for row in _unnamed(column)}
            if name in _INTS and pa.types.is_int64(column.type):
                values = numpy_of(column, null=0)
                rows = _outside(column).tolist()
                faults |= {row: _int_error(name, int(values[row]), row, first_row) for row in rows}
            if name == "bornTimestamp" and pa.types.is_int64(column.type):
                times = numpy_of(column, null=0)
                outside = np.flatnonzero((times > MOST_MS) | (times < -MOST_MS)).tolist()
                faults |= {row: _time_error(int(times[row]), row, first_row) for row in outside}

        return faults

    def columns(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """The columns of a batch by the store's names."""
        mapping = self.mapping
        columns = {name: batch.column(index) for name, index in zip(mapping.names, mapping.indices, strict=True)}
        if "properties" in columns:
            columns["properties"] = _plain_headers(columns["properties"])
        if mapping.extra_names:
            extras = {n: batch.column(i) for n, i in zip(mapping.extra_names, mapping.extra_indices, strict=True)}
            columns["properties"] = _with_extras(columns.get("properties"), extras)
        return columns

    def _texts(self, columns: dict[str, pa.Array]) -> ColumnTexts:
        return ColumnTexts(MessageColumns.from_arrow(pa.RecordBatch.from_pydict(columns), topic=self.topic))

    def _counts(self, texts: ColumnTexts) -> NDArray[np.int32] | np.int32:
        return queue_counts(texts, self.queue_count)

    def _queues(self, texts: ColumnTexts, first_row: int) -> NDArray[np.int32]:
        counts = self._counts(texts)
        queue_ids = texts.columns.queue_id if self.selector == "auto" else None
        if queue_ids is None:
            return self._chosen(texts, counts)
        is_given = valid_of(texts.columns.given["queue_id"])
        _check_given(queue_ids, is_given, counts, first_row)
        return (
            queue_ids if is_given.all() else np.where(is_given, queue_ids, self._chosen(texts, counts)).astype(np.int32)
        )

    def _chosen(self, texts: ColumnTexts, counts: NDArray[np.int32] | np.int32) -> NDArray[np.int32]:
        turn = self._turn
        self._turn += texts.columns.row_count
        return choose_queues(
            texts, counts, turn, by_sharding_key=self.selector == "auto", by_key=self.selector != "roundRobin"
        )


def _check_given(
    queue_ids: NDArray[np.int32], is_given: NDArray[np.bool_], counts: NDArray[np.int32] | np.int32, first_row: int
) -> None:
    bad = np.flatnonzero(is_given & ((queue_ids < 0) | (queue_ids >= counts)))
    if len(bad):
        raise _queue_error(queue_ids, counts, int(bad[0]), first_row)


def _queue_error(
    queue_ids: NDArray[np.int32], counts: NDArray[np.int32] | np.int32, row: int, first_row: int
) -> MessageIllegalError:
    count = int(np.broadcast_to(counts, queue_ids.shape)[row])
    return MessageIllegalError(
        f"queueId: found {int(queue_ids[row])}; allowed is 0 to {count - 1}, because the topic has {count} queues. "
        f"Drop the column to have queues chosen, or create the topic with more queues",
        field="queueId",
        row=first_row + row,
    )


def _outside(column: pa.Array) -> NDArray[np.int64]:
    """The rows with a number that is no int32."""
    values = numpy_of(column, null=0)
    return np.flatnonzero((values < -(1 << 31)) | (values >= 1 << 31))


def _narrowed(column: pa.Array) -> pa.Array:
    """A column of whole numbers as int32. Numbers that do not fit become nulls."""
    values, mask = numpy_of(column, null=0), ~valid_of(column)
    mask[_outside(column)] = True
    return pa.array(np.where(mask, 0, values).astype(np.int32), mask=mask)


def _int_error(name: str, value: int, row: int, first_row: int) -> MessageIllegalError:
    return MessageIllegalError(
        f"{name}: found {value}; allowed is an int of 32 bits. Cast the column to int, or correct the row",
        field=name,
        row=first_row + row,
    )


def _plain_headers(column: pa.Array) -> pa.Array:
    """Kafka's headers as a map of string to bytes, in which a name that is null is empty; other columns unchanged."""
    if not _is_headers(column):
        return column
    names, texts = column.values.flatten()
    names = pc.fill_null(names, "") if names.null_count else names  # such a row is refused: see `_unnamed`
    kind = pa.map_(names.type, texts.type)
    entries = pa.StructArray.from_arrays([names, texts], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(column), column.buffers()[:2], column.null_count, column.offset, [entries])


def _is_headers(column: pa.Array) -> bool:
    return bool(pa.types.is_list(column.type) and pa.types.is_struct(column.type.value_type))


def _unnamed(column: pa.Array) -> list[int]:
    """The rows with a header whose name is null, or which is null itself."""
    if not _is_headers(column):
        return []
    names = column.values.flatten()[0]
    if not names.null_count:
        return []
    before = np.append(0, np.cumsum(~valid_of(names)))
    offsets = numpy_of(column.offsets)
    return np.flatnonzero(valid_of(column) & (before[offsets[1:]] > before[offsets[:-1]])).tolist()


def _unnamed_error(row: int, first_row: int) -> MessageIllegalError:
    return MessageIllegalError(
        "headers: found a header without a name (null); allowed is text. Leave it out, or name it",
        field="headers",
        row=first_row + row,
    )


def _time_error(time: int, row: int, first_row: int) -> MessageIllegalError:
    return MessageIllegalError(
        f"bornTimestamp: found {time}; allowed are {-MOST_MS} to {MOST_MS} ms since 1970, which Spark's timestamps can "
        f"hold. Is it in microseconds? Divide it by 1000, or give a timestamp",
        field="bornTimestamp",
        row=first_row + row,
    )


def _compressed_error(sys_flag: int, row: int, first_row: int) -> MessageIllegalError:
    return MessageIllegalError(
        f"body: is compressed (sysFlag {sys_flag}), as it was read with decompress=false, and a message that the sink "
        f"writes does not say so. Read it with decompress=true. If the body is not compressed any more, drop the "
        f"column sysFlag",
        field="body",
        row=first_row + row,
    )


def _with_extras(properties: pa.Array | None, extras: dict[str, pa.Array]) -> pa.Array:
    """A map column that also has the values of other columns as text; a null value has no entry."""
    names: list[pa.Array] = []
    values: list[pa.Array] = []
    rows: list[NDArray[np.int64]] = []
    count = len(next(iter(extras.values())))

    if properties is not None:
        pair = pa.struct([("key", pa.binary()), ("value", pa.binary())])
        lists = properties.cast(pa.map_(pa.binary(), pa.binary())).cast(pa.list_(pair))
        rows.append(np.repeat(np.arange(count), numpy_of(pc.list_value_length(lists), null=0)))
        entries = lists.flatten()
        names.append(entries.field("key"))
        values.append(entries.field("value"))

    for name, column in extras.items():
        valid = np.flatnonzero(valid_of(column))
        rows.append(valid)
        text = column.drop_null().cast(pa.string()).cast(pa.binary())
        names.append(pa.array([name.encode()], pa.binary()).take(array_of(np.zeros(len(valid), np.int64))))
        values.append(text)

    # The sort is stable, so the entries of a row keep their order: first its properties, then the other columns.
    of_rows = np.concatenate(rows)
    order = array_of(np.argsort(of_rows, kind="stable"))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(of_rows, minlength=count))]).astype(np.int32)

    return pa.MapArray.from_arrays(
        array_of(offsets), pa.concat_arrays(names).take(order), pa.concat_arrays(values).take(order)
    )
