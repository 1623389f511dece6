"""The job of the live demo: flights from a topic of a RocketMQ cluster, with their airlines' names, into another topic.

    enrich.py NAME_SERVERS FOLDER               goes on until it is stopped
    enrich.py NAME_SERVERS FOLDER --to-end      ends when it has done what is there now

The checkpoint is in FOLDER. The job can be killed at any time and started again. Each message says in its property
`origin` which message it was made of: broker, queue and offset.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "01_flights"))
import flights  # noqa: E402  # the names of the airlines

SOURCE, TARGET = "flights", "flights-named"
ROWS = 2000
"""So many messages a micro-batch."""


def main(names: str, folder: Path, *, to_end: bool) -> None:
    """Run the query."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable  # for Spark's workers, too
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sf

    spark = (
        SparkSession.builder.master("local[2]")
        .appName("enrich")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.adaptive.enabled", "false")
        .getOrCreate()
    )
    airlines = spark.read.option("header", True).csv(str(flights.data_folder() / "airlines.csv"))
    messages = (
        spark.readStream.format("messagestore")
        .schema("brokerName string, queueId int, queueOffset bigint, body binary")
        .option("subscribe", SOURCE)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", ROWS)
        .option("retryTimeout", "2m")
        .load(f"rocketmq://{names}")
    )
    fields = sf.from_json(sf.col("body").cast("string"), "id long, carrier string, dest string")
    flight = messages.withColumn("flight", fields).select("*", "flight.*")
    named = flight.join(sf.broadcast(airlines), "carrier", "left").select(
        sf.to_json(sf.struct("id", "carrier", "dest", sf.col("name").alias("airline"))).alias("body"),
        sf.col("carrier").alias("tags"),
        sf.create_map(sf.lit("origin"), sf.concat_ws("/", "brokerName", "queueId", "queueOffset")).alias("properties"),
    )

    writer = named.writeStream.format("messagestore").option("topic", TARGET).option("retryTimeout", "2m")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    trigger = {"availableNow": True} if to_end else {"processingTime": "500 milliseconds"}
    writer.trigger(**trigger).start(f"rocketmq://{names}").awaitTermination()
    spark.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Flights with their airlines' names, from topic to topic.")
    parser.add_argument("names", help="the name servers, host:port;host:port")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to-end", action="store_true", help="end when everything is done that is there now")
    given = parser.parse_args()
    main(given.names, given.folder, to_end=given.to_end)
