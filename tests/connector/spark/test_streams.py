"""Streams of a classic session: replays, limits, lost data, projections."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from messagestore import MessageStore
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.disk import Disk
from spark_runs import bodies, fill

StreamingQueryException = pytest.importorskip("pyspark.errors").StreamingQueryException


GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def read(spark, root: str, **options: str):
    given = {"subscribe": "flights", "startingOffsets": "earliest", **options}
    return spark.readStream.format("messagestore").options(**given).load(root)


def copy(spark, root: str, checkpoint: Path, **options: str):
    query = (
        read(spark, root, **options)
        .select("body", "keys")
        .writeStream.format("messagestore")
        .option("topic", "copy")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(root)
    )
    query.awaitTermination()
    return query


def forget(checkpoint: Path, *names: str) -> None:
    """Delete entries of Spark's checkpoint, and their checksums."""
    for name in names:
        path = checkpoint / name
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def test_a_batch_that_spark_runs_again_is_there_once(spark, root, tmp_path) -> None:
    """commits/N is gone, as after a crash: Spark runs batch N again, and the store knows it."""
    fill(root, 900)
    checkpoint = tmp_path / "checkpoint"
    copy(spark, root, checkpoint, maxOffsetsPerTrigger="300")
    forget(checkpoint, "commits/2")
    copy(spark, root, checkpoint, maxOffsetsPerTrigger="300", minPartitions="5")
    assert bodies(root, "copy") == bodies(root, "flights")


def test_a_batch_that_comes_again_with_other_rows_is_a_conflict(spark, root, tmp_path) -> None:
    """The checkpoint is rolled back by one batch and the batch is planned larger: every other sink loses these rows."""
    fill(root, 600)
    checkpoint = tmp_path / "checkpoint"
    copy(spark, root, checkpoint, maxOffsetsPerTrigger="300")
    forget(checkpoint, "commits/1", "offsets/1")
    fill(root, 100)
    with pytest.raises(Exception, match=r"BatchConflictError: app '.*': version 1 is in the store with 300 rows"):
        copy(spark, root, checkpoint)
    assert sum(bodies(root, "copy").values()) == 600


def test_limits_are_exact_and_the_query_ends(spark, root, tmp_path) -> None:
    """AvailableNow with maxOffsetsPerTrigger: micro-batches of exactly so many rows, then the rest, then the end."""
    fill(root, 1000)
    query = copy(spark, root, tmp_path / "checkpoint", maxOffsetsPerTrigger="300")
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == [300, 300, 300, 100]
    assert bodies(root, "copy") == bodies(root, "flights")


def test_several_topics_and_a_projection(spark, root, tmp_path) -> None:
    """Two topics in one stream; the schema asked for is all that is read."""
    fill(root, 100)
    fill(root, 50, topic="trains")
    df = spark.readStream.format("messagestore").schema("topic string, queueOffset long")
    df = df.option("subscribe", "flights,trains").option("startingOffsets", "earliest").load(root)
    assert df.columns == ["topic", "queueOffset"]
    query = df.writeStream.format("memory").queryName("several").trigger(availableNow=True).start()
    query.awaitTermination()
    found = {row["topic"]: row["count"] for row in spark.table("several").groupBy("topic").count().collect()}
    assert found == {"flights": 100, "trains": 50}


def test_a_consumer_group_shows_the_progress(spark, root, tmp_path) -> None:
    """Published after every micro-batch, the last one, too, under AvailableNow and while the query waits for more."""
    fill(root, 100)

    def lag() -> int:
        offsets = ConsumerOffsets(Disk(), root)
        offsets.load()
        committed = offsets.get("flights", "copy")
        with MessageStore.open_read_only(root) as store:
            return sum(store.max_offset("flights", queue) - committed.get(queue, 0) for queue in range(8))

    copy(spark, root, tmp_path / "checkpoint", maxOffsetsPerTrigger="30", consumerGroup="copy")
    assert lag() == 0
    query = read(spark, root, group="copy").writeStream.format("noop").trigger(processingTime="50 milliseconds").start()
    fill(root, 50)
    query.processAllAvailable()
    deadline = time.monotonic() + 120
    while lag() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert query.exception() is None
    query.stop()
    assert lag() == 0
    assert bodies(root, "copy").total() == 100


def test_lost_data(spark, root, tmp_path) -> None:
    """Segments deleted below the checkpoint: an error, and with failOnDataLoss=false a gap."""
    fill(root, 200, mapped_file_size_commit_log=8192)
    checkpoint = tmp_path / "checkpoint"
    first = read(spark, root, maxOffsetsPerTrigger="10").select("body")
    query = first.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    while not query.recentProgress:
        query.awaitTermination(0.2)
    query.stop()
    for segment in sorted((Path(root) / "commitlog").iterdir())[:2]:
        segment.unlink()

    def again(**options: str):
        df = read(spark, root, **options).select("body")
        writer = df.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query = writer.start()
        query.awaitTermination()
        return query

    saved = tmp_path / "saved"
    shutil.copytree(checkpoint, saved)
    with pytest.raises(Exception, match=r"OffsetOutOfRangeError: flights/.* messages are gone"):
        again()
    shutil.rmtree(checkpoint)
    shutil.copytree(saved, checkpoint)
    rows = sum(p["numInputRows"] for p in again(failOnDataLoss="false").recentProgress)
    assert 0 < rows < 190


def test_registered_by_hand(spark, root) -> None:
    """`spark.dataSource.register`, and a path with `file:`."""
    from pyspark_messagestore import MessageStoreDataSource

    spark.dataSource.register(MessageStoreDataSource)
    fill(root, 30)
    assert spark.read.format("messagestore").option("subscribe", "flights").load(f"file:{root}").count() == 30


def test_a_replay_by_pattern_ends_where_it_was_asked_to(spark, root, tmp_path) -> None:
    """What is stored after the query began is not read, also after a restart in the middle; later options say more."""
    fill(root, 600)
    checkpoint = tmp_path / "checkpoint"
    given = {"subscribePattern": "fli.*", "startingTimestamp": "-1h", "endingOffsets": "latest"}
    query = replay(spark, root, checkpoint, maxOffsetsPerTrigger="250", maxBytesPerTrigger="1g", **given)
    query.awaitTermination()
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == [250, 250, 100]
    forget(checkpoint, "commits/2")
    fill(root, 300)
    replay(spark, root, checkpoint, **given).awaitTermination()
    assert sum(bodies(root, "copy").values()) == 600
    replay(spark, root, checkpoint, assign='{"flights": [0, 1, 2, 3]}', onMissingTopic="wait").awaitTermination()
    assert bodies(root, "copy") == bodies(root, "flights")


def test_a_query_waits_for_a_store_that_does_not_exist_yet(spark, root, tmp_path) -> None:
    """Spark plans a first micro-batch without rows, before there is a store."""
    store, found = str(tmp_path / "later"), []
    reading = spark.readStream.format("messagestore").options(subscribe="flights", onMissingTopic="wait").load(store)
    query = (
        reading.writeStream.foreachBatch(lambda rows, number: found.append((number, rows.count())))
        .option("checkpointLocation", str(tmp_path / "waiting"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        query.processAllAvailable()
        assert found == [(0, 0)]
        fill(store, 30)
        deadline = time.monotonic() + 60
        while len(found) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            query.processAllAvailable()
    finally:
        query.stop()
    assert found == [(0, 0), (1, 30)]


def test_limits_in_bytes_are_exact_and_the_query_ends(spark, root, tmp_path) -> None:
    fill(root, 500)
    given = {"maxBytesPerTrigger": "32k", "minOffsetsPerTrigger": "400", "maxRecordsPerPartition": "20"}
    query = replay(spark, root, tmp_path / "checkpoint", subscribe="flights", startingOffsets="earliest", **given)
    query.awaitTermination()
    assert len([p for p in query.recentProgress if p["numInputRows"]]) > 1
    assert bodies(root, "copy") == bodies(root, "flights")


def test_a_first_batch_that_failed_is_read_after_its_group_has_gone(spark, root, tmp_path) -> None:
    """The restart failed, because Spark asks once more where the query begins."""
    fill(root, 40)
    publish_offsets(root, "g", {("flights", queue_id): 2 for queue_id in range(4)})
    found: list[int] = []

    def fail(df, number) -> None:
        raise RuntimeError("the first run fails")

    for each in (fail, lambda df, number: found.append(df.count())):
        query = (
            read(spark, root, startingOffsets="committed", consumerGroup="g")
            .writeStream.foreachBatch(each)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        if each is fail:
            with pytest.raises(StreamingQueryException, match="the first run fails"):
                query.awaitTermination()
            Path(root, "config", "consumerOffset.json").unlink()
    query.awaitTermination()
    assert found == [32]


def replay(spark, root: str, checkpoint: Path, **options: str):
    return (
        spark.readStream.format("messagestore")
        .options(**options)
        .load(root)
        .select("body")
        .writeStream.format("messagestore")
        .option("topic", "copy")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(root)
    )


def test_a_job_written_for_kafka(spark, root, tmp_path) -> None:
    """Only format, path and kafka.* options differ: columns, types and names are those of Kafka's source."""
    fill(root, 200)
    df = (
        spark.readStream.format("messagestore")
        .option("subscribePattern", "flights")
        .option("startingOffsets", '{"flights": {"0": 10, "1": -2, "2": -2, "3": -1}}')
        .option("rowFormat", "kafka")
        .option("includeHeaders", "true")
        .load(root)
    )
    query = (
        df.selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value", "partition", "headers")
        .where("partition < 2")
        .select("key", "value")
        .writeStream.format("messagestore")
        .option("topic", "copy")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(root)
    )
    query.awaitTermination()
    assert sum(bodies(root, "copy").values()) == 40 + 50
    given = {"subscribe": "flights", "rowFormat": "kafka", "includeHeaders": "true", "endingOffsets": "latest"}
    first = spark.read.format("messagestore").options(**given).load(root).orderBy("offset", "partition").first()
    assert (first.key, first.value, first.partition, first.timestampType, first.headers) == (b"k0", b"0", 0, 1, None)


def test_filters_and_keys_of_a_batch_read(spark, root) -> None:
    """With pushdown the same rows as without."""
    fill(root, 340)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        counts = []
        for given in ({}, {"filterPushdown": "true"}):
            df = spark.read.format("messagestore").options(subscribe="flights", **given).load(root)
            middle = df.agg({"storeTimestamp": "max"}).first()[0]
            counts.append(
                [
                    df.where("queueId = 2 and queueOffset >= 10").count(),
                    df.where("queueOffset in (3, 4) and topic = 'flights'").count(),
                    df.where(df.storeTimestamp >= middle).count(),
                    df.where(df.storeTimestamp < middle).count(),
                    df.where("tags = 'x'").count(),
                ]
            )
        assert counts[0] == counts[1]
        assert counts[0][:2] == [75, 8]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    keyed = spark.read.format("messagestore").options(subscribe="flights", keys="k3 k5").load(root)
    assert keyed.count() == 40


def test_views_are_frames(spark, root) -> None:
    fill(root, 100)
    queues = spark.read.format("messagestore").option("view", "queues").load(root)
    assert queues.agg({"messages": "sum"}).first()[0] == 100
    segments = spark.read.format("messagestore").option("view", "segments").load(root)
    assert segments.where("firstStoreTimestamp > '2020-01-01'").count() == 1
    assert spark.read.format("messagestore").option("view", "groups").load(root).count() == 0


@pytest.mark.parametrize("name", ["plain-5.3.3", "crashed-5.3.3"])
def test_views_of_a_brokers_store(spark, tmp_path, name) -> None:
    """A store that a broker closed, and one whose broker was killed: each view says what the broker says."""
    with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
        archive.extractall(tmp_path / "store")
    root = str(tmp_path / "store")
    expected_text = (tmp_path / "store" / "expected.json").read_text("utf-8")
    expected = {
        (topic, queue_id): (queue["min"], queue["max"])
        for topic, queue_id, queue in json.loads(expected_text)["queues"]
    }
    first_topic, first_queue = next(iter(expected))
    (tmp_path / "store" / "config").mkdir()
    (tmp_path / "store" / "config" / "consumerOffset.json").write_text(
        f'{{"offsetTable":{{"{first_topic}@readers":{{{first_queue}:1}}}}}}'
    )

    def view(of: str):
        return spark.read.format("messagestore").option("view", of).load(root).collect()

    assert {(row.topic, row.queueId): (row.minOffset, row.maxOffset) for row in view("queues")} == expected
    messages = {
        topic: sum(high - low for (of, _), (low, high) in expected.items() if of == topic) for topic, _ in expected
    }
    assert {row.topic: row.messages for row in view("topics")} == messages

    stored_ms = {
        message["physicalOffset"]: message["stored"]
        for _, _, queue in json.loads(expected_text)["queues"]
        for message in queue["messages"]
    }
    segments = view("segments")
    assert [row.firstPhysicalOffset for row in segments] == sorted(
        int(path.name) for path in (tmp_path / "store" / "commitlog").iterdir()
    )
    first_ms = [round(row.firstStoreTimestamp.timestamp() * 1000) for row in segments if row.firstStoreTimestamp]
    assert first_ms == [stored_ms[row.firstPhysicalOffset] for row in segments if row.firstStoreTimestamp] != []

    groups = {(row.group, row.topic, row.queueId): (row.committedOffset, row.lag) for row in view("groups")}
    assert groups["readers", first_topic, first_queue] == (1, expected[first_topic, first_queue][1] - 1)
    assert {key[:2] for key in groups} == {("readers", first_topic)}
    assert view("batches") == []
