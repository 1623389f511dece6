"""What must work on classic Spark and on Connect alike, beyond streaming through."""

from __future__ import annotations

import sys
from pathlib import Path

from spark_runs import bodies, fill

sys.path.insert(0, str(Path(__file__).parent))


def batch_round_trip(spark, folder: Path) -> None:
    """Keys, tags, properties and times survive being written, read, written back and read."""
    root = str(folder / "store")
    df = spark.range(300).selectExpr(
        "concat('b', id) body",
        "array(concat('k', id % 7), 'other') keys",
        "'UA' tags",
        "map('p', cast(id as string)) properties",
        "timestamp'2024-02-03 04:05:06.789' bornTimestamp",
    )
    df.write.format("messagestore").mode("append").option("topic", "one").save(root)
    read = spark.read.format("messagestore").option("subscribe", "one").load(root)
    read.write.format("messagestore").mode("append").option("topic", "two").save(root)
    again = spark.read.format("messagestore").option("subscribe", "two").load(root)
    wanted = ["queueId", "body", "tags", "keys", "properties", "bornTimestamp"]
    assert sorted(map(str, read.select(wanted).collect())) == sorted(map(str, again.select(wanted).collect()))
    both = spark.read.format("messagestore").option("subscribe", "one,two").schema("topic string").load(root)
    assert {row["topic"]: row["count"] for row in both.groupBy("topic").count().collect()} == {"one": 300, "two": 300}
    assert bodies(root, "two") == bodies(root, "one")


def foreach_batch(spark, folder: Path) -> None:
    """MessageStoreSink in foreachBatch; the same batches again are known."""
    from pyspark_messagestore import MessageStoreSink

    root = str(folder / "store")
    fill(root, 500)
    for checkpoint in ("first", "second"):
        df = (
            spark.readStream.format("messagestore").option("subscribe", "flights").option("startingOffsets", "earliest")
        )
        query = (
            df.option("maxOffsetsPerTrigger", 200)
            .load(root)
            .select("body", "keys")
            .writeStream.foreachBatch(MessageStoreSink(root, topic="copy", app_id="app"))
            .option("checkpointLocation", str(folder / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    assert bodies(root, "copy") == bodies(root, "flights")


CHECKS = {"batch_round_trip": batch_round_trip, "foreach_batch": foreach_batch}


def run(spark, folder: Path) -> None:
    for name, check in CHECKS.items():
        check(spark, folder / name)
        print("CHECK", name, flush=True)
