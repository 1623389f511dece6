"""Sends micro-batches to a cluster as the tasks of Spark's sink do, without Spark; others kill it meanwhile.

python -m interop.sender OPTIONS BATCH COUNT     # JSON options of the sink, the batch's number, and its rows
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pyarrow as pa

from pyspark_messagestore.options.table import sink_options
from pyspark_messagestore.sink import brokers
from pyspark_messagestore.sink.brokers import BrokerSink, SentMessage
from pyspark_messagestore.sink.columns import prepare

STEP = 500
COLUMNS = (("body", "binary"), ("tags", "string"), ("keys", "string"), ("properties", "map<string,string>"))


@dataclass
class Context:
    """What a task knows of itself."""

    batch_id: int
    partition: int = 0

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 # Spark's name
        return {"sql.streaming.queryId": "query", "streaming.sql.batchId": str(self.batch_id)}.get(name)

    def partitionId(self) -> int:  # noqa: N802 # Spark's name
        return self.partition


def sink_of(options: dict[str, str], columns: Any = COLUMNS) -> BrokerSink:
    parsed = sink_options(options)
    return BrokerSink.plan(parsed, prepare(columns, parsed.topic), None, streaming=True)


def sent(sink: BrokerSink, batch_id: int, *batches: pa.RecordBatch) -> SentMessage:
    """Send a partition as a task does."""
    with mock.patch.object(brokers, "TaskContext") as context:
        context.get.return_value = Context(batch_id)
        return sink.stage(iter(batches), streaming=True)


def rows(batch_id: int, count: int) -> list[pa.RecordBatch]:
    """The rows of a micro-batch, which are the same whenever it is sent."""
    batches = []
    for first in range(0, count, STEP):
        numbers = range(first, min(first + STEP, count))
        bodies = [b"batch %d row %d " % (batch_id, number) + b"." * 150 for number in numbers]
        keys = [f"{batch_id}/{number}" for number in numbers]
        properties = pa.array([[("number", str(number))] for number in numbers], pa.map_(pa.string(), pa.string()))
        tags = pa.array(["even" if number % 2 == 0 else None for number in numbers], pa.string())
        names = [name for name, _ in COLUMNS]
        batches.append(pa.RecordBatch.from_arrays([pa.array(bodies), tags, pa.array(keys), properties], names=names))
    return batches


if __name__ == "__main__":
    given, number, row_count = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sending = sink_of(given)
    message = sent(sending, number, *rows(number, row_count))
    sending.commit([message], number)
    print(json.dumps({"rows": message.rows, "repeated": message.repeated}))
