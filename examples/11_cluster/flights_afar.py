"""The job of the cluster demo: flights into a store on another host, and the late ones from it into another topic.

    flights_afar.py MASTER URL FOLDER

Two streaming queries run at the same time. `write` puts the CSV files below FOLDER/months into three topics of the
store at URL. `late` reads these topics back, and puts flights that left over an hour late into the topic
`late-flights`. The job ends when both have done everything. It can be killed and started again.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "01_flights"))
import flights  # noqa: E402  # the CSV files, the topics and the schema of the first example

LATE = "late-flights"
MINUTES = 60


def main(master: str, url: str, folder: Path) -> None:
    """Run both queries to their end."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sf

    spark = (
        SparkSession.builder.master(master)
        .appName("flights-afar")
        .config("spark.executor.memory", "700m")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    access = {"tokenFile": str(folder / "token"), "caFile": str(folder / "ca.pem")}

    months = spark.readStream.schema(flights.CSV_SCHEMA).option("maxFilesPerTrigger", 1).csv(str(folder / "months"))
    messages = months.select(
        sf.concat(sf.lit("flights-"), "origin").alias("topic"),
        sf.col("carrier").alias("tags"),
        sf.to_json(sf.struct("*")).alias("body"),
    )
    write = (
        messages.writeStream.format("messagestore")
        .options(**access)
        .queryName("write")
        .option("writeQueueNums", flights.QUEUES)
        .option("checkpointLocation", str(folder / "checkpoints" / "write"))
        .trigger(availableNow=True)
        .start(url)
    )

    rows = (
        spark.readStream.format("messagestore")
        .schema("body binary")
        .options(**access)
        .option("subscribe", ",".join(flights.TOPICS))
        .option("startingOffsets", "earliest")
        .option("onMissingTopic", "wait")
        .load(url)
    )
    flight = rows.select(sf.from_json(sf.col("body").cast("string"), flights.CSV_SCHEMA).alias("f")).select("f.*")
    late = (
        flight.where(sf.col("dep_delay") > MINUTES)
        .select(sf.lit(LATE).alias("topic"), sf.to_json(sf.struct("*")).alias("body"))
        .writeStream.format("messagestore")
        .options(**access)
        .queryName("late")
        .option("checkpointLocation", str(folder / "checkpoints" / "late"))
        .trigger(processingTime="500 milliseconds")
        .start(url)
    )

    write.awaitTermination()
    late.processAllAvailable()
    late.stop()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
