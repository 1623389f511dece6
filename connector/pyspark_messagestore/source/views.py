"""What a store contains besides messages, as frames: `spark.read` with the option `view`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
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
from messagestore.spi import Stores
from pyspark_messagestore.options.source_options import SourceOptions
from pyspark_messagestore.plain_errors import plain_errors

_TEXT, _INT, _LONG, _TIME, _YES = StringType(), IntegerType(), LongType(), TimestampType(), BooleanType()
_COLUMNS: dict[str, dict[str, DataType]] = {
    "topics": {
        "topic": _TEXT,
        "queues": _INT,
        "messages": _LONG,
        "writeQueueNums": _INT,
        "readQueueNums": _INT,
        "perm": _INT,
        "order": _YES,
        "attributes": MapType(_TEXT, _TEXT),
    },
    "queues": {"topic": _TEXT, "queueId": _INT, "minOffset": _LONG, "maxOffset": _LONG, "messages": _LONG},
    "segments": {
        "file": _TEXT,
        "firstPhysicalOffset": _LONG,
        "endPhysicalOffset": _LONG,
        "firstStoreTimestamp": _TIME,
    },
    "groups": {
        "group": _TEXT,
        "topic": _TEXT,
        "queueId": _INT,
        "committedOffset": _LONG,
        "maxOffset": _LONG,
        "lag": _LONG,
        "beyond": _LONG,
    },
    "batches": {
        "app": _TEXT,
        "version": _LONG,
        "versionSource": _TEXT,
        "queryId": _TEXT,
        "rows": _LONG,
        "topics": ArrayType(_TEXT),
        "physicalOffset": _LONG,
        "endPhysicalOffset": _LONG,
    },
}
VIEWS = {
    name: StructType([StructField(column, kind) for column, kind in columns.items()])
    for name, columns in _COLUMNS.items()
}
"""The schema of each view."""

_log = logging.getLogger(__name__)


@plain_errors("partitions")
class ViewReader(DataSourceReader):
    """Reads one view, in one task.

    Raises
    ------
    ConfigError
        The schema is not a part of the view's.
    """

    def __init__(self, options: SourceOptions, schema: StructType, stores: Stores) -> None:
        self.options, self.stores = options, stores

        types = {field.name: field.dataType.simpleString() for field in VIEWS[options.contents].fields}
        for field in schema.fields:
            if types.get(field.name) != field.dataType.simpleString():
                columns = ", ".join(f"{name} {kind}" for name, kind in types.items())
                raise ConfigError(
                    f"schema: column {field.name}: no such column of type {field.dataType.simpleString()}; the view "
                    f"{options.contents} has {columns}",
                    key="schema",
                )

        self.arrow_schema = to_arrow_schema(schema, timezone="UTC")

    def partitions(self) -> list[InputPartition]:
        """One partition."""
        return [InputPartition(0)]

    def read(self, _partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of the view, as they are now."""
        store = self.stores.reader(self.options.location, self.options.config())
        try:
            rows, faults = store.view(self.options.contents)
        finally:
            store.close()
        for fault in faults:
            _log.warning("%s: view %s: %s", self.options.path, self.options.contents, fault)
        if rows:
            yield pa.RecordBatch.from_pylist([self._plain(row) for row in rows], self.arrow_schema)

    def _plain(self, row: dict[str, Any]) -> dict[str, Any]:
        """Times, which a store has in milliseconds, in Spark's microseconds."""
        return {
            field.name: value * 1000 if pa.types.is_timestamp(field.type) and value is not None else value
            for field in self.arrow_schema
            for value in (row.get(field.name),)
        }
