"""The floors of Spark itself: a sink that drops all rows, and a source that yields one batch again and again.

`spark_streams.session` registers both by name; workers import this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

READY_ROWS = 65_536


class DroppingWriter(DataSourceStreamArrowWriter):
    """Counts the rows and drops them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self.count = sum(batch.num_rows for batch in iterator)
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        return

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        return


class DroppingSink(DataSource):
    """The sink of the format `dropping`."""

    @classmethod
    def name(cls) -> str:
        return "dropping"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: ARG002, N802
        return DroppingWriter()


class ReadyReader(DataSourceStreamReader):
    """Reads `rows` messages per micro-batch in `parts` partitions. Each task yields slices of one batch repeatedly."""

    def __init__(self, rows: int, parts: int) -> None:
        self.rows, self.parts = rows, parts

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: ARG002, N802
        return {"n": start["n"] + self.rows}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((end["n"] - start["n"]) // self.parts) for _ in range(self.parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        bodies = np.random.default_rng(1).integers(0, 256, READY_ROWS * 100, np.uint8)
        offsets = np.arange(READY_ROWS + 1, dtype=np.int32) * 100
        body = pa.Array.from_buffers(pa.binary(), READY_ROWS, [None, pa.py_buffer(offsets), pa.py_buffer(bodies)])
        ready = pa.record_batch({"value": pa.array(np.arange(READY_ROWS)), "body": body})
        left = partition.value
        while left > 0:
            yield ready.slice(0, min(left, READY_ROWS))
            left -= READY_ROWS

    def commit(self, end: dict[str, int]) -> None: ...

    def stop(self) -> None: ...


class ReadySource(DataSource):
    """The source of the format `ready`."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return "value long, body binary"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        return ReadyReader(int(self.options["rows"]), 4)
