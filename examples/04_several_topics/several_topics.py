"""Write each micro-batch to two stores, or to several topics with rules of their own, exactly once.

    python several_topics.py [FOLDER]

`MessageStoreSink` is called once for each target, with an app id of its own. If the query is killed between two of the
calls, Spark sends the batch again: the target that has it recognises it, and the other one gets it.
"""

from __future__ import annotations

import os
import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession

from messagestore import Message, MessageStore
from pyspark_messagestore import MessageStoreSink


def run(spark: SparkSession, folder: str) -> None:
    """Split a topic of delays into late and punctual flights, in two stores."""
    root = f"{folder}/store"
    with MessageStore.open(root) as store:
        for number, delay in enumerate([2, 45, -3, 120, 0, 16]):
            store.put_message(Message("delays", str(delay).encode(), keys=[f"UA{number}"]))
    late = MessageStoreSink(f"{folder}/late", topic="late", app_id="late")
    punctual = MessageStoreSink(f"{folder}/punctual", topic="punctual", app_id="punctual")

    def split(batch: DataFrame, batch_id: int) -> None:
        batch.persist()
        late(batch.where("int(string(body)) > 15"), batch_id)  # called for every batch, also for one without rows
        punctual(batch.where("int(string(body)) <= 15"), batch_id)
        batch.unpersist()

    rows = spark.readStream.format("messagestore").option("subscribe", "delays").option("startingOffsets", "earliest")
    query = rows.load(root).writeStream.foreachBatch(split).option("checkpointLocation", f"{folder}/checkpoint")
    query.trigger(availableNow=True).start().awaitTermination()
    for name in ("late", "punctual"):
        there = spark.read.format("messagestore").option("subscribe", name).load(f"{folder}/{name}")
        there.selectExpr("keys[0] AS flight", "string(body) AS delay").orderBy("flight").show()


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run(SparkSession.builder.getOrCreate(), sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
