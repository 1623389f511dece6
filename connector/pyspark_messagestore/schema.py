"""The columns of the source, and those that a read asks for.

The table `COLUMNS` holds the name that users see, Spark's type, and the column of the store that it is made from.
Spark's schema and Arrow's are both derived from it, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from messagestore import ConfigError
from messagestore.spi import array_of, numpy_of
from pyspark_messagestore.source_options import KAFKA, ROCKETMQ

_TEXT, _INT, _LONG, _TIME = StringType(), IntegerType(), LongType(), TimestampType()
_MAP = MapType(_TEXT, _TEXT)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the source.

    Parameters
    ----------
    name : str
    spark_type : DataType
    stored : str
        The name in `messagestore.spi.COLUMNS`.
    core : bool
        Whether the column is in the default schema.
    may_be_null : bool
    made : function | None
        Makes the column from the stored one, if they differ by more than their type.
    """

    name: str
    spark_type: DataType
    stored: str
    core: bool = True
    may_be_null: bool = False
    made: Callable[[pa.Array], pa.Array] | None = None


def _first_keys(keys: pa.Array) -> pa.Array:
    """The first key of each message; null if it has none."""
    counts = numpy_of(pc.list_value_length(keys), null=0)
    starts = np.cumsum(counts) - counts
    return keys.flatten().take(pa.array(starts, mask=counts == 0)).cast(pa.binary())


def _log_append_time(column: pa.Array) -> pa.Array:
    """Kafka's number for times that the broker, here the store, has set."""
    return pa.array(np.ones(len(column), np.int32))


def _headers(properties: pa.Array) -> pa.Array:
    """Properties as Kafka's headers; null if a message has none."""
    counts = numpy_of(pc.list_value_length(properties.cast(pa.list_(properties.type.field(0).type))), null=0)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    entries = properties.cast(pa.list_(properties.type.field(0).type)).flatten()
    headers = pa.StructArray.from_arrays([entries.field(0), entries.field(1).cast(pa.binary())], names=["key", "value"])
    return pa.ListArray.from_arrays(pa.array(offsets), headers, mask=pa.array(counts == 0))


def _null_texts(column: pa.Array) -> pa.Array:
    """A column of texts without a value."""
    return pa.nulls(len(column), pa.string())


def _every_row(text: str, column: pa.Array) -> pa.Array:
    """The same text in each row."""
    return pa.repeat(text, len(column))


_BROKER_NAME = "brokerName"
COLUMNS: tuple[Column, ...] = (
    Column("topic", _TEXT, "topic"),
    Column("queueId", _INT, "queue_id"),
    Column("queueOffset", _LONG, "queue_offset"),
    Column("body", BinaryType(), "body"),
    Column("tags", _TEXT, "tags", may_be_null=True),
    Column("keys", ArrayType(_TEXT), "keys"),
    Column("properties", _MAP, "properties"),
    Column("bornTimestamp", _TIME, "born_timestamp_ms"),
    Column("storeTimestamp", _TIME, "store_timestamp_ms"),
    Column("msgId", _TEXT, "message_id"),
    Column("offsetMsgId", _TEXT, "offset_message_id", core=False),
    Column("commitLogOffset", _LONG, "physical_offset", core=False),
    Column("storeSize", _INT, "size", core=False),
    Column("flag", _INT, "flag", core=False),
    Column("sysFlag", _INT, "sys_flag", core=False),
    Column("bodyCrc", _INT, "body_crc", core=False),
    Column("reconsumeTimes", _INT, "reconsume_times", core=False),
    Column("bornHost", _TEXT, "born_host", core=False),
    Column("storeHost", _TEXT, "store_host", core=False),
    Column("preparedTransactionOffset", _LONG, "prepared_transaction_offset", core=False),
    Column("systemProperties", _MAP, "system_properties", core=False),
    Column(_BROKER_NAME, _TEXT, "queue_id", core=False, may_be_null=True, made=_null_texts),
)
ERROR = "_error"
"""The column that says why a record could not be read (`badRecords=keep`)."""
_HEADERS = ArrayType(StructType([StructField("key", _TEXT), StructField("value", BinaryType())]))
KAFKA_COLUMNS: tuple[Column, ...] = (
    Column("key", BinaryType(), "keys", may_be_null=True, made=_first_keys),
    Column("value", BinaryType(), "body"),
    Column("topic", _TEXT, "topic"),
    Column("partition", _INT, "queue_id"),
    Column("offset", _LONG, "queue_offset"),
    Column("timestamp", _TIME, "store_timestamp_ms"),
    Column("timestampType", _INT, "queue_id", made=_log_append_time),
    Column("headers", _HEADERS, "properties", core=False, may_be_null=True, made=_headers),
)
"""The columns of Spark's source for Kafka."""
_ERROR = Column(ERROR, _TEXT, "", core=False, may_be_null=True)
_BY_NAME = {
    ROCKETMQ: {column.name: column for column in (*COLUMNS, _ERROR)},
    KAFKA: {column.name: column for column in (*KAFKA_COLUMNS, _ERROR)},
}


def core_schema(row_format: str = ROCKETMQ, *extra: str) -> StructType:
    """The core columns of a row format, and some more."""
    columns = _BY_NAME[row_format].values()
    return StructType([StructField(c.name, c.spark_type) for c in columns if c.core or c.name in extra])


@dataclass(frozen=True, slots=True)
class Projection:
    """The columns that a query asks for: what is decoded, and the Arrow schema that Spark expects of the source."""

    columns: tuple[Column, ...]
    arrow_schema: pa.Schema

    @property
    def stored(self) -> tuple[str, ...]:
        """The names in `messagestore.spi.COLUMNS` of what is decoded."""
        return tuple(dict.fromkeys(column.stored for column in self.columns if column.stored))

    @classmethod
    def of(cls, schema: StructType, row_format: str = ROCKETMQ) -> Projection:
        """From Spark's schema.

        Raises
        ------
        ConfigError
            The source does not have a column, or has it with another type.
        """
        columns = []
        for asked in schema.fields:
            column = _BY_NAME[row_format].get(asked.name)
            if column is None:
                raise ConfigError(
                    f"schema: column {asked.name}: no such column; allowed are {', '.join(_BY_NAME[row_format])}",
                    key="schema",
                )
            if not _same(column.spark_type, asked.dataType):
                raise ConfigError(
                    f"schema: column {asked.name}: found type {asked.dataType.simpleString()}; allowed is "
                    f"{column.spark_type.simpleString()}",
                    key="schema",
                )
            if column.may_be_null and not asked.nullable:
                raise ConfigError(
                    f"schema: column {asked.name}: found NOT NULL; allowed is nullable, because not every message has "
                    "a value",
                    key="schema",
                )
            columns.append(column)
        return cls(tuple(columns), to_arrow_schema(schema, timezone="UTC"))

    @property
    def names_broker(self) -> bool:
        """Whether the column brokerName is asked for."""
        return any(column.name == _BROKER_NAME for column in self.columns)

    def of_broker(self, name: str) -> Projection:
        """The same, with this value in the column brokerName of each row; an empty name leaves the column null."""
        if not name:
            return self
        made = partial(_every_row, name)
        columns = [replace(each, made=made) if each.name == _BROKER_NAME else each for each in self.columns]
        return replace(self, columns=tuple(columns))

    def converted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the store as Spark expects it. Texts and bytes are not copied."""
        arrays = [
            _converted(_made(column, batch), kind)
            for column, kind in zip(self.columns, self.arrow_schema.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)


def _same(ours: DataType, asked: DataType) -> bool:
    """The same type, regardless of what it says about nulls inside it."""
    return ours.simpleString() == asked.simpleString()


def _made(column: Column, batch: pa.RecordBatch) -> pa.Array:
    if column.name == ERROR:
        index = batch.schema.get_field_index(ERROR)
        return pa.nulls(batch.num_rows, pa.string()) if index < 0 else batch.column(index)
    stored = batch.column(column.stored)
    return stored if column.made is None else column.made(stored)


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if pa.types.is_timestamp(kind):
        return (
            column.cast(pa.timestamp("ms", "UTC")).cast(kind)
            if column.null_count
            else array_of(numpy_of(column) * np.int64(1000)).view(kind)
        )
    return column.cast(kind)
