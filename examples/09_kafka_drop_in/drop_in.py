"""Run a job that was written for Spark's connector for Kafka on a message store: only the connection is another one.

    python drop_in.py [FOLDER]
    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:VERSION drop_in.py localhost:9092

The first command writes to a store in the folder, and the second one, with the version of your Spark, to a Kafka
cluster. The job writes delays with keys and headers to the topic `flights`. A stream then copies the flights that are
late to the topic `late`, and the job shows what is there.
"""

from __future__ import annotations

import os
import sys
import tempfile

from pyspark.sql import SparkSession

FLIGHTS = [
    ("N14228", "UA 1545", 11, "EWR"),
    ("N619AA", "AA 1141", 33, "JFK"),
    ("N804JB", "B6 725", -18, "JFK"),
    ("N668DN", "DL 461", -25, "LGA"),
    ("N24211", "UA 1714", 20, "LGA"),
]


def connection(where: str) -> tuple[str, dict[str, str]]:
    """All that differs: the format, and the options that say where the topics are."""
    if ":" in where:
        return "kafka", {"kafka.bootstrap.servers": where}
    return "messagestore", {"path": f"{where}/store", "rowFormat": "kafka"}


def run(spark: SparkSession, where: str) -> None:
    """Write, copy as a stream, and read."""
    format_, options = connection(where)
    flights = spark.createDataFrame(FLIGHTS, "tail string, flight string, delay int, origin string")
    rows = flights.selectExpr(
        "tail AS key",
        "to_json(struct(flight, delay)) AS value",
        "array(struct('origin' AS key, cast(origin AS binary) AS value)) AS headers",
    )
    rows.write.format(format_).options(**options).option("topic", "flights").mode("append").save()

    stream = spark.readStream.format(format_).options(**options).option("subscribe", "flights")
    stream = stream.option("startingOffsets", "earliest").option("includeHeaders", "true").load()
    late = stream.where("get_json_object(string(value), '$.delay') > 0").select("key", "value", "headers")
    query = late.writeStream.format(format_).options(**options).option("topic", "late")
    query = query.option("checkpointLocation", tempfile.mkdtemp()).trigger(availableNow=True)
    query.start().awaitTermination()

    there = spark.read.format(format_).options(**options).option("subscribe", "late")
    shown = there.option("includeHeaders", "true").load()
    shown.selectExpr("string(key)", "string(value)", "string(headers[0].value) AS origin").orderBy("key").show(
        truncate=False
    )


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run(SparkSession.builder.getOrCreate(), sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
