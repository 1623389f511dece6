"""The columns of the source, and those that a read asks for.

The store has the table of the columns, with their Arrow types, which `scan` shares. Spark's types are derived from
them, so they cannot differ. The columns in Kafka's words are the source's own.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType

from messagestore import ConfigError
from messagestore.spi import ERROR, FRAME_COLUMNS, TIME, FrameColumn, FrameProjection, numpy_of
from pyspark_messagestore.options.values import KAFKA, ROCKETMQ

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


class Column(FrameColumn):
    """One column of the source."""

    @property
    def spark_type(self) -> DataType:
        """The type that Spark sees."""
        return from_arrow_type(self.type)


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


COLUMNS: tuple[Column, ...] = tuple(
    Column(column.name, column.type, column.stored, column.core, column.may_be_null, column.made)
    for column in FRAME_COLUMNS
)
KAFKA_COLUMNS: tuple[Column, ...] = (
    Column("key", pa.binary(), "keys", may_be_null=True, made=_first_keys),
    Column("value", pa.binary(), "body"),
    Column("topic", pa.string(), "topic"),
    Column("partition", pa.int32(), "queue_id"),
    Column("offset", pa.int64(), "queue_offset"),
    Column("timestamp", TIME, "store_timestamp_ms"),
    Column("timestampType", pa.int32(), "queue_id", made=_log_append_time),
    Column("headers", _HEADERS, "properties", core=False, may_be_null=True, made=_headers),
)
"""The columns of Spark's source for Kafka."""
_ERROR = Column(ERROR, pa.string(), "", core=False, may_be_null=True)
_BY_NAME = {
    ROCKETMQ: {column.name: column for column in (*COLUMNS, _ERROR)},
    KAFKA: {column.name: column for column in (*KAFKA_COLUMNS, _ERROR)},
}


def core_schema(row_format: str = ROCKETMQ, *extra: str) -> StructType:
    """The core columns of a row format, and some more."""
    columns = _BY_NAME[row_format].values()
    return StructType([StructField(c.name, c.spark_type) for c in columns if c.core or c.name in extra])


class Projection(FrameProjection):
    """The columns that a query asks for: what is decoded, and the Arrow schema that Spark expects of the source."""

    @classmethod
    def of(cls, schema: StructType, row_format: str = ROCKETMQ) -> Projection:
        """From Spark's schema.

        Raises
        ------
        ConfigError
            The source does not have a column, or has it with another type.
        """
        columns = []
        for field in schema.fields:
            column = _BY_NAME[row_format].get(field.name)
            if column is None:
                raise ConfigError(
                    f"schema: column {field.name}: no such column; allowed are {', '.join(_BY_NAME[row_format])}",
                    key="schema",
                )

            if not _same(column.spark_type, field.dataType):
                raise ConfigError(
                    f"schema: column {field.name}: found type {field.dataType.simpleString()}; allowed is "
                    f"{column.spark_type.simpleString()}",
                    key="schema",
                )
            if column.may_be_null and not field.nullable:
                raise ConfigError(
                    f"schema: column {field.name}: found NOT NULL; allowed is nullable, because not every message has "
                    "a value",
                    key="schema",
                )

            columns.append(column)
        return cls(tuple(columns), to_arrow_schema(schema, timezone="UTC"))


def _same(ours: DataType, wanted: DataType) -> bool:
    """The same type, regardless of what it says about nulls inside it."""
    return ours.simpleString() == wanted.simpleString()
