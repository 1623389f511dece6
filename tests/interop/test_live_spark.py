"""A Spark query follows a store that a Java process is writing, is stopped and started again: each message once, in order.

1 000 000 messages in all cases together, at the least: Java writes on until the query was stopped and started again twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spark_runs
from interop.java_store import COUNTS, Driver, JavaStore
from interop.test_live_tail import MODES, PADDING, QUEUES, SIZES, check_block
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.disk import Disk

STOPS = 2
"""How many times the query is stopped and started again while Java writes."""
BATCHES = 3
"""That it makes before each stop."""
CASES = {"async": 600_000, "sync": 100_000, "pool": 300_000}
TIMEOUT_S = 90

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("default::ResourceWarning")]


@pytest.fixture(scope="module")
def spark() -> Iterator[object]:
    reason = spark_runs.why_not()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI Spark must run: {reason}", pytrace=False)
        pytest.skip(reason)
    # The log of the files of each micro-batch tells their order, and is read below: it is never put together.
    with spark_runs.session("local[2]", **{"spark.sql.streaming.fileSink.log.compactInterval": "100000"}) as session:
        yield session


class Query:
    """store -> parquet files, with a checkpoint."""

    def __init__(self, spark: object, root: Path, folder: Path) -> None:
        self.spark, self.root, self.out, self.checkpoint = spark, root, folder / "out", folder / "checkpoint"
        self.running: object = None

    def start(self, **trigger: object) -> None:
        options = {"subscribe": "live", "startingOffsets": "earliest", "minPartitions": "2", "consumerGroup": "copy"}
        stream = self.spark.readStream.format("messagestore").options(**options).load(str(self.root))  # type: ignore[attr-defined]
        writer = stream.select("queueId", "queueOffset", "body", "tags").writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(self.checkpoint)).option("path", str(self.out))
        self.running = writer.trigger(**(trigger or {"processingTime": "200 milliseconds"})).start()

    def wait(self, batch_count: int) -> None:
        """Until it has made so many micro-batches with rows since its start."""
        deadline = time.monotonic() + TIMEOUT_S
        while sum(progress["numInputRows"] > 0 for progress in self.running.recentProgress) < batch_count:  # type: ignore[attr-defined]
            assert self.running.exception() is None  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, self.running.lastProgress  # type: ignore[attr-defined]
            time.sleep(0.1)

    def stop(self) -> None:
        assert self.running.exception() is None  # type: ignore[attr-defined]
        self.running.stop()  # type: ignore[attr-defined]

    def files(self) -> Iterator[list[pa.Table]]:
        """What each micro-batch wrote, in order: a table for each file."""
        for log in sorted((self.out / "_spark_metadata").glob("[0-9]*"), key=lambda path: int(path.name)):
            paths = [json.loads(line)["path"] for line in log.read_text().splitlines()[1:]]
            yield [pq.ParquetFile(unquote(urlparse(path).path)).read() for path in paths]


def checked(query: Query) -> list[int]:
    """The queues' ends, when every queue was read without a gap, a repetition or a wrong byte, micro-batch by micro-batch."""
    seen = [0] * QUEUES
    for tables in query.files():
        for queue_id in range(QUEUES):
            parts = [table.filter(table.column("queueId").to_numpy() == queue_id) for table in tables]
            parts = [part for part in parts if part.num_rows]
            for part in sorted(parts, key=lambda part: part.column("queueOffset")[0].as_py()):
                columns = ("queueOffset", "body", "tags")
                merged = part.select(columns).rename_columns(["queue_offset", "body", "tags"]).combine_chunks()
                for batch in merged.to_batches():
                    check_block(batch, seen[queue_id])
                    seen[queue_id] += batch.num_rows
    return seen


@pytest.mark.parametrize("mode", CASES)
def test_a_query_follows_java(java: Driver, spark: object, root: Path, memory: Path, mode: str) -> None:
    """Puts and batches, roll-over; the query is stopped amid them and goes on from its checkpoint. Its consumer group is
    the broker's business as long as Java lives, and published once it has gone."""
    query = Query(spark, root, memory)
    with JavaStore(java, root, {**MODES[mode], **SIZES}) as theirs:
        theirs.pump(topic="live", queues=QUEUES, count=10**9, seed=5, padding=PADDING, largestBatch=50, pauseMicros=250)
        for _ in range(STOPS):
            query.start()
            query.wait(BATCHES)
            query.stop()
        query.start()
        deadline = time.monotonic() + TIMEOUT_S
        while (told := theirs.pumped())["put"] < CASES[mode]:
            assert told["failure"] is None
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
        told = theirs.stop_pump()
        assert told["failure"] is None
        theirs.dispatched()
        query.running.processAllAvailable()  # type: ignore[attr-defined]
        query.stop()
        assert not (root / "config" / "consumerOffset.json").exists(), "a live broker's file"
    query.start(availableNow=True)
    query.running.awaitTermination()  # type: ignore[attr-defined]
    assert checked(query) == told["ends"]
    assert told["put"] == sum(told["ends"]) >= CASES[mode]
    offsets = ConsumerOffsets(Disk(), str(root))
    offsets.load()
    assert list(offsets.get("live", "copy").items()) == list(enumerate(told["ends"]))
    COUNTS.messages += told["put"]


def test_the_cases_make_a_million() -> None:
    """The guard of the test above."""
    assert sum(CASES.values()) == 1_000_000
    assert set(CASES) == set(MODES)
