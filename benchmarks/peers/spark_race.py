"""The part of the race in Spark: `python -m benchmarks.peers.spark_race PLAN FOUND`.

All sinks take the same stream of Parquet files, and all sources hold the same rows; each micro-batch has `rows` rows.
A contestant's turn is a query of its own. Its first micro-batch does not count: processes start in it. The rate is that
of the median micro-batch; the CPU time is that of this process and everything below it (the JVM, the Python workers),
and of the broker where Kafka takes part.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import process_tree
from benchmarks.messages import QUEUE_COUNT, TOPIC, sliced
from benchmarks.peers import kafka_broker
from benchmarks.peers.contestants import SPARK_PARTS, Contestant, of
from benchmarks.peers.plan import Found, Plan
from benchmarks.peers.rows import table
from benchmarks.peers.tools import ROOT
from messagestore import BatchRequest, MessageColumns, MessageStore
from messagestore.read_only_store import CHUNK_ROWS

FILES_PER_BATCH = 2
"""As many as there are tasks."""
SPARE = 3
"""Micro-batches beside those that count: the first one, and what runs when the query is stopped."""
FOUR = ("topic", "queueId", "queueOffset", "body")
TUNED = {
    "kafka.batch.size": str(512 * 1024),
    "kafka.linger.ms": "20",
    "kafka.compression.type": "lz4",
    "kafka.buffer.memory": str(128 * 1024 * 1024),
}
_POLL_S = 0.1
_SAMPLE_S = 1.0


class SparkRace:
    """One Spark session, and the broker beside it.

    Parameters
    ----------
    plan : Plan
    stack : ExitStack
        Ends what is started here.
    """

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        self.plan, self.folder = plan, Path(plan.folder)
        self.broker: kafka_broker.Broker | None = None
        if "broker" in plan.classpaths and "kafka" not in plan.missing:
            self.broker = stack.enter_context(kafka_broker.running(plan.classpaths["broker"], self.folder / "kafka"))
        self.spark = session(plan.folder, plan.classpaths)
        stack.callback(self.spark.stop)
        self.turns = 0

    # ---- rows

    def make_rows(self, bodies: str) -> None:
        """Write the rows that the sinks take: one micro-batch in two files, under many names."""
        self.bodies = bodies
        self.batch = table(self.plan.rows, bodies)
        self.rows = self._fresh("rows")
        half = -(-self.plan.rows // FILES_PER_BATCH)
        for number, part in enumerate(sliced(self.batch, half)):
            first = self.rows / f"{number:05}.parquet"
            pq.write_table(pa.Table.from_batches([part]), first, compression="none", use_dictionary=False)
            for batch in range(1, self.plan.batches + SPARE):
                os.link(first, self.rows / f"{FILES_PER_BATCH * batch + number:05}.parquet")

    def make_sources(self) -> None:
        """Fill what the sources read: each holds the rows of all micro-batches."""
        store, batches = self._fresh("source-store") / "store", self.plan.batches + SPARE
        with MessageStore.open(store) as opened:
            opened.create_topic(TOPIC, QUEUE_COUNT)
            for version in range(batches):
                parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(self.batch, CHUNK_ROWS))
                opened.append_batch(parts, BatchRequest(app_id="race", version=version))

        half = -(-self.plan.rows // FILES_PER_BATCH)
        one = self._fresh("source-one") / "one"
        read = self.spark.read.format("messagestore").option("subscribe", TOPIC).load(str(store))
        read.limit(half).coalesce(1).write.parquet(str(one))
        (file,) = one.glob("*.parquet")

        self.files = self._fresh("source-parquet")
        for number in range(FILES_PER_BATCH * batches):
            os.link(file, self.files / f"{number:05}.parquet")

        if self._takes_part("delta"):
            self.table = self._fresh("source-delta") / "table"
            once = self.spark.read.parquet(str(one)).coalesce(1)
            for _ in range(FILES_PER_BATCH * batches):
                once.write.format("delta").mode("append").save(str(self.table))

        if self._takes_part("kafka"):
            self.make_topic(f"source-{self.bodies}")
            files = self.spark.read.parquet(*map(str, sorted(self.rows.glob("*.parquet"))))
            written = files.selectExpr("cast(keys[0] as binary) key", "body value").write.format("kafka")
            written.options(**self._kafka(f"source-{self.bodies}"), **TUNED).save()

    def drop_sources(self) -> None:
        """Delete what `make_sources` wrote."""
        for folder in self.folder.glob("source-*"):
            shutil.rmtree(folder)
        if self._takes_part("kafka"):
            self.delete_topic(f"source-{self.bodies}")

    def _takes_part(self, tool: str) -> bool:
        return tool not in self.plan.missing

    def _fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    # ---- Kafka

    def _kafka(self, topic: str) -> dict[str, str]:
        assert self.broker is not None
        return {"kafka.bootstrap.servers": self.broker.servers, "topic": topic, "kafka.acks": "all"}

    def make_topic(self, name: str) -> None:
        """Create a topic with the broker's number of partitions."""
        assert self.broker is not None
        kafka_broker.create_topic(self.spark._jvm, self.broker.servers, name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        assert self.broker is not None
        kafka_broker.delete_topic(self.spark._jvm, self.broker.servers, name)

    # ---- turns

    def sink(self, contestant: Contestant) -> tuple[int, float, float]:
        """One turn of a sink."""
        self.turns += 1
        name, folder = contestant.name, self._fresh(f"turn-{self.turns}")

        rows = self.spark.readStream.schema(self.spark.read.parquet(str(self.rows)).schema)
        rows = rows.option("maxFilesPerTrigger", FILES_PER_BATCH).parquet(str(self.rows))
        rows = rows.select("body", "keys", "tags")

        path: str | None = str(folder / "out")
        if name in ("dropping", "noop"):
            writer, path = rows.writeStream.format(name), None
        elif name.startswith("kafka"):
            path = None
            self.make_topic(folder.name)
            rows = rows.selectExpr("cast(keys[0] as binary) key", "body value")
            writer = rows.writeStream.format("kafka").options(**self._kafka(folder.name))
            if name == "kafka_tuned":
                writer = writer.options(**TUNED)
        elif name.startswith("ours"):
            settings = folder / "store.properties"
            settings.write_text(f"messageIndexEnable={'true' if name == 'ours_index_on' else 'false'}\n")
            writer = rows.writeStream.format("messagestore").option("topic", TOPIC)
            writer = writer.option("writeQueueNums", QUEUE_COUNT).option("storeConfig", str(settings))
        else:
            writer = rows.writeStream.format(name)

        taken = self._turn(contestant, writer, folder, path)
        if name.startswith("kafka"):
            self.delete_topic(folder.name)
        return taken

    def source(self, contestant: Contestant) -> tuple[int, float, float]:
        """One turn of a source; the rows go to Spark's noop sink."""
        self.turns += 1
        kind, _, columns = contestant.name.partition("_")
        folder, stream = self._fresh(f"turn-{self.turns}"), self.spark.readStream
        if kind == "ready":
            rows = stream.format("ready").option("rows", self.plan.rows).load()
        elif kind == "ours":
            from pyspark_messagestore.source.schema import core_schema

            whole = core_schema()
            schema = type(whole)([whole[name] for name in FOUR]) if columns == "4" else whole
            rows = stream.format("messagestore").schema(schema).option("subscribe", TOPIC)
            rows = rows.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", self.plan.rows)
            rows = rows.load(str(self.folder / "source-store" / "store"))
        elif kind == "kafka":
            assert self.broker is not None
            rows = stream.format("kafka").option("kafka.bootstrap.servers", self.broker.servers)
            rows = rows.option("subscribe", f"source-{self.bodies}").option("startingOffsets", "earliest")
            rows = rows.option("maxOffsetsPerTrigger", self.plan.rows).load()
            rows = rows.select("topic", "partition", "offset", "value")
        else:
            if kind == "parquet":
                stream = stream.schema(self.spark.read.parquet(str(self.files)).schema)
            rows = stream.format(kind).option("maxFilesPerTrigger", FILES_PER_BATCH)
            rows = rows.load(str(self.files if kind == "parquet" else self.table))
            if columns == "4":
                rows = rows.select(*FOUR)
        return self._turn(contestant, rows.writeStream.format("noop"), folder, None)

    def _turn(self, contestant: Contestant, writer: Any, folder: Path, path: str | None) -> tuple[int, float, float]:
        roots = [os.getpid(), *([self.broker.pid] if "kafka" in contestant.needs and self.broker else [])]
        writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
        query = writer.start(path) if path else writer.start()

        try:
            self._wait(query, 1)
            first, meter = self._done(query), process_tree.Meter(roots)
            self._wait(query, len(first) + self.plan.batches, meter)
            done = self._done(query)
            meter.sample()
        finally:
            query.stop()
            shutil.rmtree(folder, ignore_errors=True)

        counted = done[len(first) :]
        rows = statistics.median(progress["numInputRows"] for progress in counted)
        wall_s = statistics.median(progress["durationMs"]["triggerExecution"] for progress in counted) / 1000
        return int(rows), wall_s, meter.cpu_s / len(counted)

    def _done(self, query: Any) -> list[Any]:
        """The micro-batches that are done. Kafka's are seldom exactly as large as they are asked for."""
        return [progress for progress in query.recentProgress if progress["numInputRows"] >= 0.9 * self.plan.rows]

    def _wait(self, query: Any, count: int, meter: process_tree.Meter | None = None) -> None:
        sampled = time.monotonic()
        while len(self._done(query)) < count:
            if meter is not None and time.monotonic() > sampled + _SAMPLE_S:
                meter.sample()
                sampled = time.monotonic()
            if not query.isActive:
                raise RuntimeError(str(query.exception() or "the query ended before it had enough micro-batches"))
            time.sleep(_POLL_S)


def session(folder: str, classpaths: Mapping[str, str], cores: int = 2) -> Any:
    """A session with the floors and the peers that there are. It is started without PySpark's zip, as in the tests."""
    sys.path.append(str(ROOT / "tests"))
    import spark_home
    import spark_runs

    spark_home.make_links(spark_runs.HOME)
    os.environ |= {
        "SPARK_HOME": str(spark_runs.HOME),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    from pyspark.sql import SparkSession

    from benchmarks.spark_floors import DroppingSink, ReadySource

    there = {_artifact(jar) for jar in (spark_runs.HOME / "jars").glob("*.jar")}
    jars = [
        jar
        for name in ("kafka", "delta")
        for jar in filter(None, classpaths.get(name, "").split(":"))
        if _artifact(Path(jar)) not in there
    ]
    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.driver.memory", "2g")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.log.level": "OFF",  # each query that is stopped would be an error; one that fails says so itself
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",  # Delta Lake reads its own log with so many tasks
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
        "spark.driver.extraClassPath": ":".join(jars),
        "spark.sql.warehouse.dir": str(Path(folder) / "warehouse"),
    }.items():
        builder = builder.config(name, value)
    if "delta" in classpaths:
        builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    spark = builder.getOrCreate()
    spark.dataSource.register(DroppingSink)
    spark.dataSource.register(ReadySource)
    return spark


def _artifact(jar: Path) -> str:
    """The name of a jar without its version."""
    return jar.stem.rpartition("-")[0]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan, found = Plan.read(Path(sys.argv[1])), Found()

    with ExitStack() as stack:
        race = SparkRace(plan, stack)
        for bodies in plan.bodies:
            race.make_rows(bodies)
            for part in (part for part in SPARK_PARTS if part in plan.parts):
                contestants = [each for each in of(part) if not set(each.needs) & set(plan.missing)]
                print(f"  {part}, {bodies} bodies", file=sys.stderr, flush=True)
                if part == "source":
                    race.make_sources()

                turn: Callable[[Contestant], tuple[int, float, float]] = getattr(race, part)
                found.take_turns(contestants, bodies, plan.rounds, turn)
                if part == "source":
                    race.drop_sources()

    found.write(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
