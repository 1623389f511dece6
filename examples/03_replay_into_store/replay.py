"""Copy the messages of the last hour into a second store, as a stream that ends.

    python replay.py [FOLDER]

The query begins at the first message that was stored in the last hour, reads to what is there when it starts, and ends.
Run it again, and it copies what was stored since then: its checkpoint says how far it came, and the second store
recognises a batch that it has.
"""

from __future__ import annotations

import os
import sys
import tempfile

from pyspark.sql import SparkSession

from messagestore import Message, MessageStore


def run(spark: SparkSession, folder: str) -> None:
    """Fill a store, replay it, put more messages into it, and replay those."""
    root, copy = f"{folder}/store", f"{folder}/copy"
    for gates in (["B12", "C3"], ["D7"]):
        with MessageStore.open(root) as store:
            for gate in gates:
                store.put_message(Message("gates", gate.encode(), keys=[gate], tags="UA"))
        stream = spark.readStream.format("messagestore").option("subscribe", "gates")
        rows = stream.option("startingTimestamp", "-1h").load(root)
        query = rows.writeStream.format("messagestore").option("checkpointLocation", f"{folder}/checkpoint")
        query.trigger(availableNow=True).start(copy).awaitTermination()
        there = spark.read.format("messagestore").option("subscribe", "gates").load(copy)
        there.selectExpr("string(body) AS gate", "keys", "tags", "storeTimestamp").orderBy("gate").show(truncate=False)


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run(SparkSession.builder.getOrCreate(), sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
