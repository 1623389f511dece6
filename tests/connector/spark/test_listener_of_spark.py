"""The listener beside a real query, and what Spark reports of a Python source."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pyspark_messagestore import MessageStoreListener
from spark_runs import fill


def test_a_listener_says_how_far_a_query_is_behind(spark: Any, tmp_path: Path) -> None:
    """After each of four batches: what was there and not read, down to nothing."""
    root = str(tmp_path / "source")
    fill(root, 4000)
    told: list[Any] = []

    class Lags(MessageStoreListener):
        def on_lag(self, lag: Any) -> None:
            told.append(lag)

    listener = Lags(root)
    spark.streams.addListener(listener)
    try:
        stream = spark.readStream.format("messagestore").option("subscribe", "flights")
        query = (
            stream.option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", 1000)
            .load(root)
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        deadline_s = time.monotonic() + 60
        while len(told) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.1)
    finally:
        spark.streams.removeListener(listener)
    assert [lag.records_behind for lag in told[:4]] == [3000, 2000, 1000, 0]
    assert [lag.metrics["maxOffsetsBehindLatest"] for lag in told[:4]] == ["750", "500", "250", "0"]
    assert told[0].bytes_behind > told[1].bytes_behind > told[2].bytes_behind > told[3].bytes_behind == 0
    assert told[0].description == f"messagestore {root}: flights"
    (source,) = query.lastProgress["sources"]
    offsets = [json.loads(source[name]) for name in ("startOffset", "endOffset", "latestOffset")]
    shape = {"formatVersion", "last", "physicalOffset", "queues", "storeId"}
    assert all(shape <= each.keys() for each in offsets)
    assert all(each["queues"].keys() == {"flights"} for each in offsets)
    assert len({each["storeId"] for each in offsets}) == 1
    # Spark's own: the description and the metrics of a Python source cannot be set. If this fails, they can be now.
    assert source["description"].startswith(
        "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream"
    )
    assert source["metrics"] == {}
