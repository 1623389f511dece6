"""What must work on classic Spark and on Connect alike, beyond streaming through."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from messagestore import Message, MessageStore
from pyspark_messagestore.options.table import OPTIONS
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


READS: tuple[tuple[dict[str, str], int], ...] = (
    ({"subscribePattern": "fli.*"}, 100),
    ({"assign": '{"flights": [0, 3]}'}, 50),
    ({"startingOffsets": '{"flights": {"0": 20, "*": -2}}'}, 80),
    ({"startingTimestamp": "-1h"}, 100),
    ({"startingOffsetsByTimestamp": '{"flights": {"0": "-0s", "*": "-1h"}}'}, 75),
    ({"startingTimestamp": "-0s", "startingOffsetsByTimestampStrategy": "earliest"}, 100),
    ({"endingOffsets": '{"flights": {"*": 5}}'}, 20),
    ({"endingTimestamp": "-1h"}, 0),
    ({"endingOffsetsByTimestamp": '{"flights": {"0": "-1h", "*": "-0s"}}'}, 75),
    ({"minPartitions": "7"}, 100),
    ({"maxRecordsPerPartition": "10"}, 100),
    ({"maxBytesPerPartition": "1k"}, 100),
    ({"failOnDataLoss": "false"}, 100),
    ({"failOnUnproven": "true"}, 100),
    ({"readUpTo": "flushed"}, 100),
    ({"tags": "UA || AA"}, 0),
    ({"keys": "k3 k5"}, 12),
    ({"brokerName": "broker-a"}, 100),
    ({"rowFormat": "kafka", "includeHeaders": "true"}, 100),
    ({"badRecords": "keep"}, 100),
    ({"verifyBodyCrc": "false", "decompress": "false"}, 100),
    ({"view": "queues"}, 4),
)
"""Options of a batch read, and how many rows of 100 messages in four queues they leave."""
STREAMS: tuple[tuple[dict[str, str], int], ...] = (
    ({"maxOffsetsPerTrigger": "30"}, 100),
    ({"maxBytesPerTrigger": "4k"}, 100),
    ({"minOffsetsPerTrigger": "10", "maxTriggerDelay": "1s"}, 100),
    ({"onMissingTopic": "wait", "subscribe": "flights,later"}, 100),
    ({"consumerGroup": "g", "startingOffsets": "committed:earliest"}, 100),
    ({"readUpTo": "flushed", "endingOffsets": '{"flights": {"*": 10}}'}, 40),
)
"""Options of a stream, and how many of 100 messages it copies."""
WRITES: tuple[tuple[dict[str, str], int], ...] = (
    ({"writeQueueNums": "3", "queueSelector": "roundRobin"}, 10),
    ({"flushDiskType": "ASYNC_FLUSH"}, 10),
    ({"txnAppId": "a", "txnVersion": "0"}, 10),
    (
        {
            "onReplayMismatch": "skip",
            "onVersionRegression": "skip",
            "onLostBatches": "continue",
            "onNewQuery": "continue",
            "onNewTopic": "continue",
        },
        10,
    ),
    ({"invalidRows": "deadLetter", "deadLetterTopic": "dead", "maxMessageSize": "10"}, 10),
    ({"unknownColumns": "properties"}, 10),
    ({"uniqKey": "true", "brokerClusterName": "north"}, 10),
    ({"storeHost": "10.0.0.7:10911", "brokerName": "broker-b"}, 10),
    ({"lockTimeout": "20s", "stagingTtl": "1h", "preallocate": "true"}, 10),
    ({"rowFormat": "kafka", "includeHeaders": "true"}, 10),
    ({"stagingDir": "{folder}"}, 10),
    ({"storeConfig": "{folder}/store.properties"}, 10),
    ({"autoCreateTopic": "true", "txnVersionSource": "user", "txnAppId": "b", "txnVersion": "7"}, 10),
)
"""Options of a write, and how many of its ten rows the topic then has."""


def every_option(spark, folder: Path) -> None:
    """Each option of both sides, once: what it leaves of a read, and that a write with it arrives."""
    root = str(folder / "store")
    fill(root, 100)
    for options, count in READS:
        given = {
            **({} if options.keys() & {"subscribePattern", "assign", "view"} else {"subscribe": "flights"}),
            **options,
        }
        assert spark.read.format("messagestore").options(**given).load(root).count() == count, options
    named = spark.read.format("messagestore").schema("brokerName string, storeHost string, queueOffset long")
    rows = named.options(subscribe="flights", brokerName="broker-a").load(root).distinct().collect()
    assert {row["brokerName"] for row in rows} == {"broker-a"}
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushed = spark.read.format("messagestore").options(subscribe="flights", filterPushdown="true").load(root)
        assert pushed.where("queueId = 1 AND queueOffset >= 20").count() == 5
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    for number, (options, count) in enumerate(STREAMS):
        given = {"subscribe": "flights", "startingOffsets": "earliest", **options}
        query = (
            spark.readStream.format("messagestore")
            .options(**given)
            .load(root)
            .select("body")
            .writeStream.format("messagestore")
            .option("topic", f"copy-{number}")
            .option("checkpointLocation", str(folder / f"checkpoint-{number}"))
            .trigger(availableNow=True)
            .start(root)
        )
        query.awaitTermination()
        assert sum(bodies(root, f"copy-{number}").values()) == count, options
    (folder / "store.properties").write_text("mappedFileSizeCommitLog=1048576\n")
    for number, (options, count) in enumerate(WRITES):
        given = {name: value.format(folder=folder) if value[0] == "{" else value for name, value in options.items()}
        target = str(folder / f"target-{number}")
        body = "value" if "rowFormat" in options else "body"
        df = spark.range(10).selectExpr(
            f"cast(id as string) {body}", *(["id other"] if "unknownColumns" in options else [])
        )
        df.write.format("messagestore").mode("append").options(topic="t", **given).save(target)
        assert sum(bodies(target, "t").values()) == count, options
    used = {name for table in (READS, STREAMS, WRITES) for options, _ in table for name in options}
    known = {option.name for option in OPTIONS}
    of_servers = {"tokenFile", "caFile", "certFile", "keyFile", "retryTimeout"}  # refused with a folder
    of_servers |= {
        "credentialsFile",
        "useTLS",
        "checkHostName",
        "readFrom",
        "lookupDir",
        "producerGroup",
        "onUnconfirmed",
    }
    assert known - used == {"path", "topic", "filterPushdown"} | of_servers, known ^ used


CHECKS = {
    "every_option": every_option,
    "a_store_that_is_gone": a_store_that_is_gone,
    "sql": sql,
    "batch_round_trip": batch_round_trip,
    "foreach_batch": foreach_batch,
}
