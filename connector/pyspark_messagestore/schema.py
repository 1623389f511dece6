"""The columns of the source, and those that a read asks for.

The table `COLUMNS` holds the name that users see, Spark's type, and the column of the store that it is made from.
Spark's schema and Arrow's are both derived from it, so they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
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
    """

    name: str
    spark_type: DataType
    stored: str
    core: bool = True
    may_be_null: bool = False


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
)
_BY_NAME = {column.name: column for column in COLUMNS}


def core_schema() -> StructType:
    """The ten core columns."""
    return StructType([StructField(column.name, column.spark_type) for column in COLUMNS if column.core])


@dataclass(frozen=True, slots=True)
class Projection:
    """The columns that a query asks for: what is decoded, and the Arrow schema that Spark expects of the source."""

    stored: tuple[str, ...]
    arrow_schema: pa.Schema

    @classmethod
    def of(cls, schema: StructType) -> Projection:
        """From Spark's schema.

        Raises
        ------
        ConfigError
            The source does not have a column, or has it with another type.
        """
        stored = []
        for asked in schema.fields:
            column = _BY_NAME.get(asked.name)
            if column is None:
                raise ConfigError(
                    f"schema: column {asked.name}: no such column; allowed are {', '.join(_BY_NAME)}", key="schema"
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
            stored.append(column.stored)
        return cls(tuple(stored), to_arrow_schema(schema, timezone="UTC"))

    def converted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the store as Spark expects it. Texts and bytes are not copied."""
        arrays = [_converted(*pair) for pair in zip(batch.columns, self.arrow_schema.types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)


def _same(ours: DataType, asked: DataType) -> bool:
    """The same type, regardless of what it says about nulls inside it."""
    return ours.simpleString() == asked.simpleString()


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if pa.types.is_timestamp(kind):
        return array_of(numpy_of(column) * np.int64(1000)).view(kind)
    return column.cast(kind)
