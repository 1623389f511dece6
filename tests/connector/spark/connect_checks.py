"""What must work on classic Spark and on Connect alike, beyond streaming through."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from messagestore import Message, MessageStore
from spark_runs import ROOT, bodies, fill

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
    """MessageStoreSink in foreachBatch; a batch that Spark forgot to have written is known when it comes again."""
    from pyspark_messagestore import MessageStoreSink

    root = str(folder / "store")
    fill(root, 500)
    for _ in range(2):
        df = (
            spark.readStream.format("messagestore").option("subscribe", "flights").option("startingOffsets", "earliest")
        )
        query = (
            df.option("maxOffsetsPerTrigger", 200)
            .load(root)
            .select("body", "keys")
            .writeStream.foreachBatch(MessageStoreSink(root, topic="copy", app_id="app"))
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        (folder / "checkpoint" / "commits" / "2").unlink()
        (folder / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
    assert bodies(root, "copy") == bodies(root, "flights")


def a_store_that_is_gone(spark, folder: Path) -> None:
    """MessageStoreSink: refused, and nothing is made; so are a second topic, and where the query is known a second query."""
    from pyspark_messagestore import MessageStoreSink

    root, source = str(folder / "store"), str(folder / "source")
    fill(source, 100)

    def run(checkpoint: str = "checkpoint", topic: str = "copy") -> None:
        df = spark.readStream.format("messagestore").option("subscribe", "flights")
        df = df.option("startingOffsets", "earliest").load(source).select("body", "keys")
        writer = df.writeStream.foreachBatch(MessageStoreSink(root, topic=topic, app_id="app"))
        writer = writer.option("checkpointLocation", str(folder / checkpoint)).trigger(availableNow=True)
        writer.start().awaitTermination()

    run()
    with MessageStore.open(source) as store:
        store.put_message(Message("flights", b"new"))
    Path(root).rename(root + "-away")
    with pytest.raises(Exception, match="LostBatchesError: app 'app': found version 1, but no store at"):
        run()
    assert not Path(root).exists()
    Path(root + "-away").rename(root)
    with pytest.raises(Exception, match=r"BatchConflictError|QueryConflictError"):
        run("second")  # 101 rows; where no query is known it is noticed by them
    run()
    for name in ("1", ".1.crc"):
        (folder / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    with pytest.raises(Exception, match="rows for topic copy, and came again with rows for topic audit"):
        run(topic="audit")
    run()
    assert bodies(root, "copy") == bodies(source, "flights")


def sql(spark, folder: Path) -> None:
    """The SQL of connector/README.md, found by its name and registered by hand; a table that is not told is an error."""
    from pyspark_messagestore import MessageStoreDataSource

    text = (ROOT / "connector" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name in ("found", "registered"):
        root = str(folder / name / "store")
        fill(root, 40)
        if name == "registered":
            spark.dataSource.register(MessageStoreDataSource)
        statements = block.replace("/data/store", root).split(";")
        shown = [spark.sql(statement).collect() for statement in statements if statement.strip()]
        assert [row["count(1)"] for row in shown[1]] == [40]
        assert [(bytes(row["body"]), row["tags"], row["topic"]) for row in shown[-1]] == [(b"UA 1545", "UA", "late")]
        told = {"path": root, "subscribe": "late"}
        assert spark.read.options(**told).table("log").count() == 1
        given = spark.sql("SELECT 'DL 9' body, 'DL' tags")
        given.writeTo("late").options(path=root, topic="late").append()
        assert bodies(root, "late") == {"UA 1545": 1, "DL 9": 1}
        with pytest.raises(Exception, match="Spark does not pass on the options of a CREATE TABLE"):
            spark.sql("SELECT * FROM log").collect()
        for statement in ("DROP VIEW flights", "DROP TABLE late", "DROP TABLE log"):
            spark.sql(statement)


CHECKS = {
    "a_store_that_is_gone": a_store_that_is_gone,
    "sql": sql,
    "batch_round_trip": batch_round_trip,
    "foreach_batch": foreach_batch,
}


def run(spark, folder: Path) -> None:
    for name, check in CHECKS.items():
        check(spark, folder / name)
        print("CHECK", name, flush=True)
