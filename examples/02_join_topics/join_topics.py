"""Join two topics as streams, and write what belongs together to a third one.

    python join_topics.py [FOLDER]

The topics `departures` and `arrivals` have messages with the flight's number as key. The query joins both by this key,
and writes one message for each flight that has landed to the topic `flights`. Each is written once, also if the query
is killed and started again: it continues from its checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from messagestore import Message, MessageStore


def make_store(root: str) -> None:
    """Six departures, and the arrivals of four of them."""
    with MessageStore.open(root) as store:
        for number, (start, end) in enumerate([("EWR", "IAH"), ("LGA", "IAH"), ("JFK", "MIA"), ("JFK", "BQN")] * 2):
            key = f"UA{number}"
            if number < 6:
                store.put_message(Message("departures", json.dumps({"from": start}).encode(), keys=[key]))
            if number < 4:
                store.put_message(Message("arrivals", json.dumps({"to": end}).encode(), keys=[key]))


def run(spark: SparkSession, folder: str) -> None:
    """Join what is in the store, and end."""
    root = f"{folder}/store"
    make_store(root)

    departures = stream_of(spark, root, "departures", "from")
    arrivals = stream_of(spark, root, "arrivals", "to")
    same_flight = (
        "departures_key = arrivals_key AND arrivals_time BETWEEN departures_time AND departures_time + INTERVAL 1 DAY"
    )
    flights = departures.join(arrivals, expr(same_flight))
    messages = flights.selectExpr("departures_key AS key", "to_json(struct(`from`, `to`)) AS body")
    sink = messages.writeStream.format("messagestore").option("topic", "flights")
    sink = sink.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    sink.start(root).awaitTermination()
    landed = spark.read.format("messagestore").option("subscribe", "flights").load(root)
    landed.selectExpr("keys[0] AS flight", "string(body) AS body").orderBy("flight").show(truncate=False)


def stream_of(spark: SparkSession, root: str, topic: str, field: str) -> DataFrame:
    """A topic as a stream: the key, one field of the body, and the time at which the message was stored."""
    rows = spark.readStream.format("messagestore").option("subscribe", topic).option("startingOffsets", "earliest")
    value = f"get_json_object(string(body), '$.{field}') AS `{field}`"
    columns = rows.load(root).selectExpr(f"keys[0] AS {topic}_key", value, f"storeTimestamp AS {topic}_time")
    return columns.withWatermark(f"{topic}_time", "1 hour")


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.config(
        "spark.sql.shuffle.partitions", "4"
    )  # each has a state of its own: 200 are slow
    run(builder.getOrCreate(), sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
