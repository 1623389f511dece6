"""A streaming job in a process of its own: store -> Spark -> store, once through, on any kind of session.

    python job.py MASTER ROOT CHECKPOINT [FORMAT [STARTING]]

MASTER is `local[2]`, `local-cluster[2,1,1024]` or `remote` (Spark Connect). Prints what a test wants to know.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_runs import SESSION


def session(master: str) -> SparkSession:
    """A session of the kind asked for."""
    if master == "remote":
        os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
        return SparkSession.builder.remote("local[2]").getOrCreate()
    builder = SparkSession.builder.master(master)
    for key, value in {**SESSION, "spark.executor.memory": "512m"}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def copy(
    spark: SparkSession, root: str, checkpoint: str, sink: str = "messagestore", starting: str = "earliest"
) -> None:
    """Topic `flights` to topic `copy`, 250 messages a micro-batch, then end.

    With the trigger AvailableNow, a query that begins at `latest` would end there.
    """
    writer = flights(spark, root, sink, starting).writeStream.format(sink).option("topic", "copy")
    writer = writer.option("checkpointLocation", checkpoint)
    if starting == "earliest":
        writer.trigger(availableNow=True).start(root).awaitTermination()
        return
    query = writer.start(root)
    try:
        query.processAllAvailable()
    finally:
        query.stop()


def copy_foreach(spark: SparkSession, root: str, checkpoint: str, source: str) -> None:
    """The same through foreachBatch; place `foreach`: the write has gone through."""
    import killing

    from pyspark_messagestore import MessageStoreSink

    sink = MessageStoreSink(root, topic="copy", app_id="copy")

    def write(df: DataFrame, batch_id: int) -> None:
        sink(df, batch_id)
        killing.at("foreach", batch_id)

    writer = flights(spark, root, source).writeStream.foreachBatch(write)
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def flights(spark: SparkSession, root: str, source: str, starting: str = "earliest") -> DataFrame:
    """The topic as a stream."""
    return (
        spark.readStream.format(source)
        .option("subscribe", "flights")
        .option("startingOffsets", starting)
        .option("maxOffsetsPerTrigger", 250)
        .load(root)
        .selectExpr("body", "keys", "tags", "properties")
    )


def main() -> None:
    (master, root, checkpoint), given = sys.argv[1:4], sys.argv[4:]
    sink, starting = [*given, *("messagestore", "earliest")[len(given) :]]
    warnings.simplefilter("ignore")
    spark = session(master)
    if sink == "killing":
        import killing

        spark.dataSource.register(killing.KillingSource)
        plan = Path(os.environ[killing.PLAN])
        if plan.exists() and "JVM" in plan.read_text():
            plan.write_text(plan.read_text().replace("JVM", str(spark.sparkContext._gateway.proc.pid)))
    copy(spark, root, checkpoint, sink, starting)
    print(json.dumps({"done": True}))
    spark.stop()


if __name__ == "__main__":
    main()
