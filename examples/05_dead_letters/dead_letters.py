"""Keep rows that the store cannot hold in a topic of dead letters, and repair them later.

    python dead_letters.py [FOLDER]

Some rows have no body, or a key with a blank, which RocketMQ's format has no room for. They go to the topic
`gates-dead`, in the same batch as the other rows. A second query reads this topic, repairs what it can, and writes it
to the topic `gates`.
"""

from __future__ import annotations

import os
import sys
import tempfile

from pyspark.sql import SparkSession

ROWS = [("B12", "UA 1"), ("C3", "UA2"), (None, "UA3"), ("D7", "UA4")]


def run(spark: SparkSession, folder: str) -> None:
    """Write four rows, two of which are illegal; then repair one of these."""
    root = f"{folder}/store"
    rows = spark.createDataFrame(ROWS, "body string, key string")
    writer = rows.write.format("messagestore").mode("append").option("topic", "gates")
    writer.option("invalidRows", "deadLetter").option("deadLetterTopic", "gates-dead").save(root)

    dead = spark.read.format("messagestore").option("subscribe", "gates-dead").load(root)
    letters = dead.selectExpr(
        "body",
        "properties['dlqReason'] AS reason",
        "properties['dlqField'] AS field",
        "get_json_object(properties['dlqOrigin'], '$.keys') AS key",
    )
    letters.selectExpr("string(body) AS body", "field", "key", "reason").orderBy("field").show(truncate=False)

    repaired = letters.where("field = 'keys'").selectExpr("body", "replace(key, ' ', '') AS key")
    repaired.write.format("messagestore").mode("append").option("topic", "gates").save(root)
    gates = spark.read.format("messagestore").option("subscribe", "gates").load(root)
    gates.selectExpr("string(body) AS gate", "keys[0] AS flight").orderBy("flight").show()


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run(SparkSession.builder.getOrCreate(), sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
