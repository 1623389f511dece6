"""What a commit of ten rows costs: the time of a micro-batch into the store beside that of a sink that drops its rows.

Both are a few hundred milliseconds of Spark's, and differ by a few. Therefore they take turns within one query: every
other micro-batch goes to the store. The figure is the difference of the means of each kind's middle half.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from benchmarks.measure import Rounds, Settings, title
from benchmarks.spark_floors import DroppingWriter
from pyspark_messagestore.datasource import MessageStoreDataSource

ROWS = 10
BATCHES = 120
WARM_UP = 10


class AlternatingWriter(DataSourceStreamArrowWriter):
    """Gives every other micro-batch to the store, and drops the rest."""

    def __init__(self, store: Any) -> None:
        self.writers: tuple[Any, Any] = (store, DroppingWriter())  # a store begins with batch 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty("streaming.sql.batchId") or 0)
        message: WriterCommitMessage = self.writers[batch % 2].write(iterator)
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.writers[batchId % 2].commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.writers[batchId % 2].abort(messages, batchId)


class AlternatingSink(DataSource):
    """The sink of the format `alternating`, with the options of the store's."""

    @classmethod
    def name(cls) -> str:
        return "alternating"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return AlternatingWriter(MessageStoreDataSource(self.options).streamWriter(schema, overwrite))


def run(settings: Settings) -> None:
    """Measure the commit of ten rows."""
    from benchmarks.spark_streams import MESSAGES, session

    title("the time of a micro-batch of ten rows, into the store and dropped by turns")
    spark, rounds, folder = session(), Rounds(), settings.folder
    spark.dataSource.register(AlternatingSink)
    for number in range(settings.rounds):
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2)
        made = rows.load().selectExpr(*MESSAGES).writeStream.format("alternating").option("topic", "flights")
        made = made.option("onLostBatches", "continue").option("checkpointLocation", str(folder / f"small-{number}"))
        took = _times(made.start(str(folder / f"store-{number}")), 2 * WARM_UP if settings.quick else BATCHES)
        stored, dropped = _middle(took[0]), _middle(took[1])
        rounds.add("small.dropped", dropped)
        rounds.add("small.stored", stored)
        rounds.add("small.commit", stored - dropped)
    rounds.report("small.dropped", "ms", lower_is_better=True)
    rounds.report("small.stored", "ms", floor="small.dropped", lower_is_better=True)
    rounds.report("small.commit", "ms", goal=3.0, lower_is_better=True)
    spark.stop()


def _times(query: Any, batches: int) -> tuple[list[float], list[float]]:
    """The milliseconds of the micro-batches of a query, even and odd ones, without the first."""
    try:
        while len(query.recentProgress) < batches + WARM_UP:
            if not query.isActive:
                raise RuntimeError(str(query.exception()))
            time.sleep(0.2)
        done = query.recentProgress[WARM_UP:]
    finally:
        query.stop()
    took: tuple[list[float], list[float]] = ([], [])
    for progress in done:
        took[progress["batchId"] % 2].append(float(progress["durationMs"]["triggerExecution"]))
    return took


def _middle(values: list[float]) -> float:
    """The mean of the middle half: Spark counts whole milliseconds."""
    quarter = len(values) // 4
    return statistics.mean(sorted(values)[quarter : len(values) - quarter])
