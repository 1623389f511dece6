"""The columns of messages in a frame: their names and types, and how each is made from a column of the store.

Users see these columns in Spark's source and in `scan`. The table `FRAME_COLUMNS` holds the name, the Arrow type, and
the column of the store that it is made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import pyarrow as pa

from messagestore.format.arrow_bytes import array_of, numpy_of, valid_of

MOST_MS = ((1 << 63) - 1) // 1000
"""The last time in ms since 1970 that a timestamp of microseconds in 64 bits can hold. Such a time before 1970 is the
first one. A message with a time beyond them shows the nearest of them."""
ERROR = "_error"
"""The column that says why a record could not be read."""
TIME = pa.timestamp("us", tz="UTC")
_TEXT, _INT, _LONG = pa.string(), pa.int32(), pa.int64()
_MAP = pa.map_(_TEXT, _TEXT)
_BROKER_NAME = "brokerName"


@dataclass(frozen=True, slots=True)
class FrameColumn:
    """One column of a frame.

    Parameters
    ----------
    name : str
    type : pa.DataType
    stored : str
        The name in `record_columns.COLUMNS`.
    core : bool
        Whether the column is one of those that a read without a choice of columns has.
    may_be_null : bool
    made : function | None
        Makes the column from the stored one, if they differ by more than their type.
    """

    name: str
    type: pa.DataType
    stored: str
    core: bool = True
    may_be_null: bool = False
    made: Callable[[pa.Array], pa.Array] | None = None


def _null_texts(column: pa.Array) -> pa.Array:
    """A column of texts without a value."""
    return pa.nulls(len(column), _TEXT)


def _every_row(text: str, column: pa.Array) -> pa.Array:
    """The same text in each row."""
    return pa.repeat(text, len(column))


FRAME_COLUMNS: tuple[FrameColumn, ...] = (
    FrameColumn("topic", _TEXT, "topic"),
    FrameColumn("queueId", _INT, "queue_id"),
    FrameColumn("queueOffset", _LONG, "queue_offset"),
    FrameColumn("body", pa.binary(), "body"),
    FrameColumn("tags", _TEXT, "tags", may_be_null=True),
    FrameColumn("keys", pa.list_(pa.field("element", _TEXT)), "keys"),
    FrameColumn("properties", _MAP, "properties"),
    FrameColumn("bornTimestamp", TIME, "born_timestamp_ms"),
    FrameColumn("storeTimestamp", TIME, "store_timestamp_ms"),
    FrameColumn("msgId", _TEXT, "message_id"),
    FrameColumn("offsetMsgId", _TEXT, "offset_message_id", core=False),
    FrameColumn("commitLogOffset", _LONG, "physical_offset", core=False),
    FrameColumn("storeSize", _INT, "size", core=False),
    FrameColumn("flag", _INT, "flag", core=False),
    FrameColumn("sysFlag", _INT, "sys_flag", core=False),
    FrameColumn("bodyCrc", _INT, "body_crc", core=False),
    FrameColumn("reconsumeTimes", _INT, "reconsume_times", core=False),
    FrameColumn("bornHost", _TEXT, "born_host", core=False),
    FrameColumn("storeHost", _TEXT, "store_host", core=False),
    FrameColumn("preparedTransactionOffset", _LONG, "prepared_transaction_offset", core=False),
    FrameColumn("systemProperties", _MAP, "system_properties", core=False),
    FrameColumn(_BROKER_NAME, _TEXT, "queue_id", core=False, may_be_null=True, made=_null_texts),
)


@dataclass(frozen=True, slots=True)
class FrameProjection:
    """The columns that are asked for: what is decoded, and the Arrow schema of what is given."""

    columns: tuple[FrameColumn, ...]
    arrow_schema: pa.Schema

    @classmethod
    def named(cls, names: Sequence[str]) -> Self:
        """Some of `FRAME_COLUMNS`, in the order of their names here."""
        by_name = {column.name: column for column in FRAME_COLUMNS}
        columns = tuple(by_name[name] for name in names)
        return cls(columns, pa.schema([(column.name, column.type) for column in columns]))

    @property
    def stored(self) -> tuple[str, ...]:
        """The names in `record_columns.COLUMNS` of what is decoded."""
        return tuple(dict.fromkeys(column.stored for column in self.columns if column.stored))

    @property
    def names_broker(self) -> bool:
        """Whether the column brokerName is asked for."""
        return any(column.name == _BROKER_NAME for column in self.columns)

    def of_broker(self, name: str) -> Self:
        """The same, with this value in the column brokerName of each row; an empty name leaves the column null."""
        if not name:
            return self
        made = partial(_every_row, name)
        columns = [replace(column, made=made) if column.name == _BROKER_NAME else column for column in self.columns]
        return replace(self, columns=tuple(columns))

    def converted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the store with these columns. Texts and bytes are not copied."""
        arrays = [
            _converted(_made(column, batch), kind)
            for column, kind in zip(self.columns, self.arrow_schema.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)


def _made(column: FrameColumn, batch: pa.RecordBatch) -> pa.Array:
    if column.name == ERROR:
        index = batch.schema.get_field_index(ERROR)
        return pa.nulls(batch.num_rows, _TEXT) if index < 0 else batch.column(index)
    stored = batch.column(column.stored)
    return stored if column.made is None else column.made(stored)


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if pa.types.is_timestamp(kind):
        us = np.clip(numpy_of(column, null=0), -MOST_MS, MOST_MS) * np.int64(1000)
        nulls = array_of(valid_of(column)).buffers()[1] if column.null_count else None
        return pa.Array.from_buffers(kind, len(us), [nulls, pa.py_buffer(us)])
    return column.cast(kind)
