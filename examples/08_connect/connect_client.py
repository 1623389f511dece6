"""Write and read a store through Spark Connect: the client needs no Java, and the server has the files.

    python connect_client.py sc://localhost:15002 /data/store /data/checkpoint

The folders are the server's. The package `pyspark-messagestore` must be installed where the server's Python workers
run; the client needs it only for `MessageStoreSink`.
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession


def run(spark: SparkSession, root: str, checkpoint: str) -> None:
    """Write three gates, copy their topic as a stream, and read the copy."""
    gates = spark.createDataFrame([("B12",), ("C3",), ("D7",)], "body string")
    gates.write.format("messagestore").mode("append").option("topic", "gates").save(root)
    stream = spark.readStream.format("messagestore").option("subscribe", "gates").option("startingOffsets", "earliest")
    copy = stream.load(root).writeStream.format("messagestore").option("topic", "gates-copy")
    query = copy.option("checkpointLocation", checkpoint).trigger(availableNow=True).start(root)
    query.awaitTermination()
    there = spark.read.format("messagestore").option("subscribe", "gates-copy").load(root)
    there.selectExpr("string(body) AS gate", "queueOffset").orderBy("gate").show()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="the address of the server, such as sc://localhost:15002")
    parser.add_argument("root", help="the root folder of the store, on the server")
    parser.add_argument("checkpoint", help="a folder for the checkpoint of the stream, on the server")
    given = parser.parse_args()
    run(SparkSession.builder.remote(given.server).getOrCreate(), given.root, given.checkpoint)
