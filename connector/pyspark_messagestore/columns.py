"""Turns the columns of a DataFrame into messages with queues.

`prepare` checks the DataFrame's columns once, before a row is read. `Mapper` turns the Arrow batches of one task into
`MessageColumns`: it accepts the store's and Kafka's names and types, leaves out the columns that the store assigns
itself (a queue offset, a store time), and gives each row a queue.

    queueSelector=auto:   column queueId, else hash of shardingKey, else hash of the first key, else queues in turn
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore import ConfigError, MessageColumns, MessageIllegalError
from messagestore.spi import ColumnTexts, java_hashes, queue_of_hash, valid_of

_TEXTUAL = ("string", "binary")
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_TIMES = ("timestamp", "timestamp_ntz", "bigint", "int")

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
}
"""For each name of a column in lower case: the store's name, the types that it may have as Spark writes them, and these
types in words. If two columns are given for one field, RocketMQ's name, which comes first, takes precedence."""

_KNOWN = (
    "body (value), topic, tags, keys (key), properties (headers), queueId (partition), shardingKey, bornTimestamp, flag"
)

ASSIGNED = frozenset(
    {
        *(
            "queueoffset",
            "storetimestamp",
            "msgid",
            "offsetmsgid",
            "commitlogoffset",
            "storesize",
            "sysflag",
            "bodycrc",
        ),
        *("reconsumetimes", "bornhost", "storehost", "preparedtransactionoffset", "systemproperties", "brokername"),
        *("offset", "timestamp", "timestamptype"),
    }
)
"""Columns of this source and of Kafka's that the store assigns itself. They are allowed and left out, so that a
DataFrame that was read can be written back."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which column of the DataFrame is which field.

    Parameters
    ----------
    indices : tuple of int
    names : tuple of str
        The store's names of these columns.
    """

    indices: tuple[int, ...]
    names: tuple[str, ...]


def prepare(columns: Iterable[tuple[str, str]], topic: str | None) -> Mapping:
    """Check the columns of a DataFrame.

    Parameters
    ----------
    columns : pairs of str
        The name and Spark's type (`simpleString`) of each column.
    topic : str | None
        The option `topic`.

    Raises
    ------
    ConfigError
        A column is unknown, is missing or has the wrong type.
    """
    found: dict[str, tuple[int, int]] = {}
    order = list(ACCEPTED)
    for index, (name, kind) in enumerate(columns):
        if name.lower() in ASSIGNED:
            continue
        if name.lower() not in ACCEPTED:
            raise ConfigError(
                f"column {name}: no such column; the sink takes {_KNOWN}; drop it, or put its value into the body or "
                f"the properties",
                key=name,
            )
        stored, kinds, allowed = ACCEPTED[name.lower()]
        if kind not in kinds:
            raise ConfigError(f"column {name}: found type {kind}; allowed is {allowed}", key=name, value=kind)
        rank = order.index(name.lower())
        if stored not in found or rank < found[stored][0]:
            found[stored] = (rank, index)
    if "body" not in found:
        raise ConfigError(
            "column body (or value): is missing; give the bodies of the messages as binary or string", key="body"
        )
    if "topic" not in found and topic is None:
        raise ConfigError("topic: found neither the option topic nor a column topic; give one of them", key="topic")
    return Mapping(tuple(index for _, index in found.values()), tuple(found))


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
    """

    mapping: Mapping
    topic: str | None
    selector: str
    queue_count: Callable[[str], int]
    seed: str
    _turn: int = field(init=False)

    def __post_init__(self) -> None:
        self._turn = zlib.crc32(self.seed.encode())

    def messages(self, batch: pa.RecordBatch, first_row: int) -> ColumnTexts:
        """The messages of a batch, with queues; `first_row` is the number of its first row in the task, for errors."""
        columns = [_plain_headers(batch.column(index)) for index in self.mapping.indices]
        named = pa.RecordBatch.from_arrays(columns, names=list(self.mapping.names))
        texts = ColumnTexts(MessageColumns.from_arrow(named, topic=self.topic))
        texts.columns.queue_id = self._queues(texts, first_row)
        return texts

    def _queues(self, texts: ColumnTexts, first_row: int) -> NDArray[np.int32]:
        codes = texts.topic_codes
        known = [self.queue_count(name) for name in texts.topic_names] or [1]
        counts: NDArray[np.int32] | np.int32 = np.int32(known[0])
        if len(known) > 1:
            counts = np.array(known, np.int32)[codes]  # a null topic is refused by the encoder
        given = texts.columns.queue_id if self.selector == "auto" else None
        if given is None:
            return self._chosen(texts, counts)
        is_given = valid_of(texts.columns.given["queue_id"])
        _check_given(given, is_given, counts, first_row)
        return given if is_given.all() else np.where(is_given, given, self._chosen(texts, counts)).astype(np.int32)

    def _chosen(self, texts: ColumnTexts, counts: NDArray[np.int32] | np.int32) -> NDArray[np.int32]:
        n = texts.columns.row_count
        hashes, has_hash = np.zeros(n, np.int32), np.zeros(n, np.bool_)
        keys = texts.keys if self.selector != "roundRobin" else None
        if keys is not None and len(keys.counts) == len(keys.texts) and keys.counts.all():
            hashes, has_hash = keys.hashes, np.ones(n, np.bool_)
        elif keys is not None:
            has_hash = keys.counts > 0
            hashes[has_hash] = keys.hashes[(np.cumsum(keys.counts) - keys.counts)[has_hash]]
        sharding = texts.columns.sharding_key if self.selector == "auto" else None
        if sharding is not None:
            has_sharding = valid_of(sharding)
            hashes = np.where(has_sharding, java_hashes(sharding), hashes)
            has_hash = has_hash | has_sharding
        if has_hash.all():
            return queue_of_hash(hashes, counts)
        turns = self._turn + np.arange(n, dtype=np.int64)
        self._turn += n
        return np.where(has_hash, queue_of_hash(hashes, counts), turns % counts).astype(np.int32)


def _check_given(
    given: NDArray[np.int32], is_given: NDArray[np.bool_], counts: NDArray[np.int32] | np.int32, first_row: int
) -> None:
    bad = np.flatnonzero(is_given & ((given < 0) | (given >= counts)))
    if len(bad):
        row = int(bad[0])
        count = int(np.broadcast_to(counts, given.shape)[row])
        raise MessageIllegalError(
            f"queueId: found {int(given[row])}; allowed is 0 to {count - 1}, the topic has {count} queues; drop the "
            f"column to "
            "have queues chosen, or create the topic with more",
            field="queueId",
            row=first_row + row,
        )


def _plain_headers(column: pa.Array) -> pa.Array:
    """Kafka's headers as a map; other columns unchanged."""
    if not pa.types.is_list(column.type) or not pa.types.is_struct(column.type.value_type):
        return column
    values = column.values
    names = values.field("key")
    texts = values.field("value")
    try:
        texts = texts.cast(pa.string())
    except pa.ArrowInvalid:
        raise MessageIllegalError(
            "headers: found a value that is not UTF-8; RocketMQ's properties are text; encode it first, as with base64",
            field="headers",
        ) from None
    kind = pa.map_(pa.string(), pa.string())
    offsets = column.buffers()[1]
    entries = pa.StructArray.from_arrays([names, texts], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(
        kind, len(column), [column.buffers()[0], offsets], column.null_count, column.offset, [entries]
    )
