"""The speed of sink and source in streams, compared with what Spark itself can do in the same run.

Each round starts a query, lets it run some micro-batches and stops it. The figure is the number of rows divided by the
time of a trigger, as the median of all micro-batches except the first. Floors and figures take turns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Rounds, Settings

BATCHES = 4
FOUR = "topic string, queueId int, queueOffset long, body binary"
MESSAGES = (
    "cast(rpad(cast(value as string), 100, 'abcdefghijklmnopqrstuvwxyz') as binary) body",
    "array(concat('ord-', pmod(value * 7919, 1000000))) keys",
    "element_at(array('created', 'paid', 'shipped', 'returned', 'lost'), cast(pmod(value, 5) as int) + 1) tags",
)


def session() -> Any:
    """A session with `local[2]` whose workers can import the benchmarks."""
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    from pyspark.sql import SparkSession

    from benchmarks.spark_floors import DroppingSink, ReadySource

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "ERROR").config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.sql.streaming.numRecentProgressUpdates", "1000").getOrCreate()
    spark.dataSource.register(DroppingSink)
    spark.dataSource.register(ReadySource)
    return spark


def rate(writer: Any, rows: int, path: str | None = None) -> float:
    """The rows per second of a query in the median micro-batch, without the first one."""
    query = writer.start(path) if path else writer.start()
    try:
        while True:
            done = [p for p in query.recentProgress if p["numInputRows"] >= rows]
            if len(done) > BATCHES:
                break
            if not query.isActive:
                raise RuntimeError(str(query.exception()))
            time.sleep(0.1)
    finally:
        query.stop()
    times = [p["durationMs"]["triggerExecution"] for p in done[1:]]
    return rows / statistics.median(times) * 1000


def run_sink(settings: Settings) -> None:
    """Measure writing with SYNC_FLUSH, index on and off, and a Python Arrow writer that drops all rows."""
    spark = session()
    rounds, folder = Rounds(), settings.folder
    off = folder / "off.properties"
    off.write_text("messageIndexEnable=false\n")

    def writer(kind: str, round_: str, rows: int) -> Any:
        df = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2).load()
        made = df.selectExpr(*MESSAGES).writeStream.format(kind)
        return made.option("checkpointLocation", str(folder / f"checkpoint-{round_}"))

    for number in range(settings.rounds):
        dropped = rate(writer("dropping", f"drop-{number}", settings.rows), settings.rows)
        rounds.add("sink_floor", dropped)
        for name, options in (("sink_index_on", {}), ("sink_index_off", {"storeConfig": str(off)})):
            root = str(folder / f"{name}-{number}")
            made = (
                writer("messagestore", f"{name}-{number}", settings.rows).option("topic", "flights").options(**options)
            )
            rounds.add(name, rate(made, settings.rows, root))
            shutil.rmtree(root, ignore_errors=True)
    rounds.report("sink_floor", "rows/s")
    rounds.report("sink_index_on", "rows/s", floor="sink_floor", goal_ratio=0.40)
    rounds.report("sink_index_off", "rows/s", floor="sink_floor", goal_ratio=0.50)
    spark.stop()


def run_source(settings: Settings) -> None:
    """Measure reading four columns and all ten, and a source that yields one batch repeatedly."""
    from benchmarks import messages
    from messagestore import MessageColumns, MessageStore
    from pyspark_messagestore.source.schema import core_schema

    spark = session()
    rounds, folder = Rounds(), settings.folder
    root = str(folder / "store")
    batch = messages.table(settings.rows)
    with MessageStore.open(root) as store:
        store.create_topic("flights", messages.QUEUE_COUNT)
        for _ in range(BATCHES + 2):
            store.append_batch(MessageColumns.from_arrow(batch, topic="flights"))

    def reader(schema: Any) -> Any:
        df = spark.readStream.format("messagestore").schema(schema).option("subscribe", "flights")
        df = df.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", settings.rows)
        return df.load(root).writeStream.format("noop")

    for number in range(settings.rounds):
        for name in ("source_floor", "source_four", "source_core"):
            if name == "source_floor":
                made = spark.readStream.format("ready").option("rows", settings.rows).load().writeStream.format("noop")
            else:
                made = reader(FOUR if name == "source_four" else core_schema())
            rounds.add(name, rate(made.option("checkpointLocation", str(folder / f"{name}-{number}")), settings.rows))
    rounds.report("source_floor", "rows/s")
    rounds.report("source_four", "rows/s", floor="source_floor", goal_ratio=0.55)
    rounds.report("source_core", "rows/s", floor="source_floor", goal_ratio=0.25)
    spark.stop()
