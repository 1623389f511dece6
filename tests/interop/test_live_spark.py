"""A Spark query follows a store that a Java process is writing, is stopped and started again: each message once, in order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import spark_runs
from interop.java_store import COUNTS, Driver, JavaStore
from interop.test_live_tail import MODES, PADDING, QUEUES, SIZES

BATCHES = 4
"""That each run of the query makes while Java writes."""

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default::ResourceWarning")]


@pytest.fixture(scope="module")
def spark() -> Iterator[object]:
    reason = spark_runs.why_not()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI Spark must run: {reason}", pytrace=False)
        pytest.skip(reason)
    with spark_runs.session("local[2]") as session:
        yield session


def test_a_query_follows_java(java: Driver, spark: object, root: Path, tmp_path: Path) -> None:
    """Puts and batches, roll-over; the query is stopped amid them and goes on from its checkpoint."""
    settings = {**MODES["async"], **SIZES}
    with JavaStore(java, root, settings) as theirs:
        theirs.pump(
            topic="live", queues=QUEUES, count=10**9, seed=5, padding=PADDING, largestBatch=20, pauseMicros=1500
        )

        def start() -> object:
            stream = spark.readStream.format("messagestore")  # type: ignore[attr-defined]
            stream = stream.option("subscribe", "live").option("startingOffsets", "earliest").load(str(root))
            writer = stream.select("queueId", "queueOffset", "body").writeStream.format("parquet")
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).option(
                "path", str(tmp_path / "out")
            )
            return writer.trigger(processingTime="200 milliseconds").start()

        for _ in range(2):
            query = start()
            batches = 0
            deadline = time.monotonic() + 60
            while batches < BATCHES and time.monotonic() < deadline:
                batches = sum(progress["numInputRows"] > 0 for progress in query.recentProgress)  # type: ignore[attr-defined]
                time.sleep(0.1)
            assert query.exception() is None  # type: ignore[attr-defined]
            assert batches >= BATCHES
            query.stop()  # type: ignore[attr-defined]
        told = theirs.stop_pump()
        assert told["failure"] is None
        theirs.dispatched()
        query = start()
        query.processAllAvailable()  # type: ignore[attr-defined]
        query.stop()  # type: ignore[attr-defined]
    table = pq.read_table(tmp_path / "out")
    queue_ids, offsets = table.column("queueId").to_numpy(), table.column("queueOffset").to_numpy()
    for queue_id, end in enumerate(told["ends"]):
        mine = queue_ids == queue_id
        assert np.array_equal(np.sort(offsets[mine]), np.arange(end)), queue_id
        bodies = table.column("body").filter(mine).to_pylist()
        for number, body in zip(offsets[mine].tolist(), bodies, strict=True):
            assert body == number.to_bytes(8, "big") + bytes([number & 0xFF]) * (number % (PADDING + 1))
    assert len(list((tmp_path / "out").glob("*.parquet"))) > 5
    assert told["put"] == sum(told["ends"]) == len(offsets)
    COUNTS.messages += len(offsets)
