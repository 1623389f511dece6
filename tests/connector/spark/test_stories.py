"""Stories of a classic session: failed commits, checkpoints that are deleted, rolled back and copied, several writers."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from spark_runs import bodies, fill, in_order

StreamingQueryException = pytest.importorskip("pyspark.errors").StreamingQueryException


def writer(spark, root: str, checkpoint: Path, sink: str = "messagestore", most: int = 100, **options: str):
    """Topic flights to topic copy, `most` rows a micro-batch, until all is read."""
    df = spark.readStream.format("messagestore").option("subscribe", "flights").option("startingOffsets", "earliest")
    df = df.option("maxOffsetsPerTrigger", most).load(root).select("body", "keys")
    given = {"topic": "copy", "checkpointLocation": str(checkpoint), **options}
    return df.writeStream.format(sink).options(**given).trigger(availableNow=True)


def copy(spark, root: str, checkpoint: Path, most: int = 100, **options: str) -> None:
    writer(spark, root, checkpoint, most=most, **options).start(root).awaitTermination()


def more(root: str, first: int, count: int) -> None:
    """Rows that go on where `fill` has ended."""
    from messagestore import Message, MessageStore

    with MessageStore.open(root) as store:
        for i in range(first, first + count):
            store.put_message(Message("flights", str(i).encode(), queue_id=i % 4, keys=[f"k{i % 17}"]))


def roll_back(checkpoint: Path, count: int) -> None:
    """The last batches were never planned."""
    numbers = sorted(int(path.name) for path in (checkpoint / "offsets").iterdir() if path.name.isdigit())
    for number in numbers[-count:]:
        for folder in ("offsets", "commits"):
            (checkpoint / folder / str(number)).unlink(missing_ok=True)
            (checkpoint / folder / f".{number}.crc").unlink(missing_ok=True)


def test_a_commit_that_raises_after_publishing(spark, kill_plan, root, tmp_path) -> None:
    """The batch is in the store, Spark thinks it is not and calls abort (here even twice): started again it is known."""
    import killing

    spark.dataSource.register(killing.KillingSource)
    fill(root, 300)
    kill_plan.write_text("returned raise 1")
    with pytest.raises(StreamingQueryException, match="PlannedError: raised at returned"):
        writer(spark, root, tmp_path / "checkpoint", sink="killing").start(root).awaitTermination()
    assert not kill_plan.exists()
    assert sum(bodies(root, "copy").values()) == 200
    copy(spark, root, tmp_path / "checkpoint")
    assert bodies(root, "copy") == bodies(root, "flights")


@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_rolled_back_with_other_rows(spark, root, tmp_path, count: int) -> None:
    """Known batch ids with other rows: a conflict, nothing changes; with the newer checkpoint it goes on."""
    fill(root, 400)
    checkpoint, backup = tmp_path / "checkpoint", tmp_path / "backup"
    copy(spark, root, checkpoint)
    shutil.copytree(checkpoint, backup)
    roll_back(checkpoint, count)
    with pytest.raises(StreamingQueryException, match=r"BatchConflictError: app '.*': version \d is in the store"):
        copy(spark, root, checkpoint, most=70)
    assert bodies(root, "copy") == bodies(root, "flights")
    more(root, 400, 50)
    copy(spark, root, backup, most=70)
    assert bodies(root, "copy") == Counter(map(str, range(450)))
    assert in_order(root, "copy")


def test_a_checkpoint_rolled_back_that_plans_the_same(spark, root, tmp_path) -> None:
    """The same rows come again, in other partitions: known batch by batch, then new ones."""
    fill(root, 300)
    checkpoint = tmp_path / "checkpoint"
    copy(spark, root, checkpoint)
    roll_back(checkpoint, 2)
    df = spark.readStream.format("messagestore").option("subscribe", "flights").option("startingOffsets", "earliest")
    df = df.option("maxOffsetsPerTrigger", 100).option("minPartitions", 7).load(root).select("body", "keys")
    again = df.writeStream.format("messagestore").option("topic", "copy").option("checkpointLocation", str(checkpoint))
    again.trigger(availableNow=True).start(root).awaitTermination()
    assert bodies(root, "copy") == bodies(root, "flights")
    more(root, 300, 30)
    copy(spark, root, checkpoint)
    assert bodies(root, "copy") == Counter(map(str, range(330)))


def test_a_deleted_checkpoint(spark, root, tmp_path) -> None:
    """Under an app id of its own: the same batches are known, others are a conflict. Without one it is a new query."""
    fill(root, 200)
    checkpoint = tmp_path / "checkpoint"
    for _ in range(2):
        copy(spark, root, checkpoint, txnAppId="mine")
        shutil.rmtree(checkpoint)
    assert bodies(root, "copy") == bodies(root, "flights")
    with pytest.raises(StreamingQueryException, match="BatchConflictError: app 'mine': version 0"):
        copy(spark, root, checkpoint, most=150, txnAppId="mine")
    assert bodies(root, "copy") == bodies(root, "flights")
    shutil.rmtree(checkpoint)
    copy(spark, root, checkpoint)
    assert set(bodies(root, "copy").values()) == {2}


def test_a_copied_checkpoint(spark, root, tmp_path) -> None:
    """Both copies go on: the second to write a batch with other rows is told; the first is not disturbed."""
    fill(root, 200)
    first, second = tmp_path / "first", tmp_path / "second"
    copy(spark, root, first)
    shutil.copytree(first, second)
    more(root, 200, 40)
    copy(spark, root, second)
    copy(spark, root, first)  # the same rows under the same number: known
    assert bodies(root, "copy") == Counter(map(str, range(240)))
    more(root, 240, 10)
    copy(spark, root, second)
    more(root, 250, 10)
    with pytest.raises(StreamingQueryException, match="BatchConflictError"):
        copy(spark, root, first)
    copy(spark, root, second)
    assert bodies(root, "copy") == Counter(map(str, range(260)))


def test_two_queries_and_a_batch_job(spark, root, tmp_path) -> None:
    """At the same time into one store and topic: each waits for its turn, and each row is there once from each."""
    fill(root, 600)
    queries = [writer(spark, root, tmp_path / name).start(root) for name in ("one", "two")]
    jobs = [spark.range(1000 * i, 1000 * i + 50).selectExpr("cast(id as string) body") for i in (1, 2, 3)]
    for version, df in enumerate(jobs):
        for _ in range(2):  # run again: known
            given = {"topic": "copy", "txnAppId": "job", "txnVersion": str(version)}
            df.write.format("messagestore").mode("append").options(**given).save(root)
    for query in queries:
        query.awaitTermination()
    found = bodies(root, "copy")
    assert {body: found[body] for body in map(str, range(600))} == dict.fromkeys(map(str, range(600)), 2)
    assert sum(found.values()) == 2 * 600 + 150


def test_a_foreach_batch_that_fails_after_its_write(spark, root, tmp_path) -> None:
    """The write has gone through and the function raises: Spark runs the batch again, and the store knows it."""
    from pyspark_messagestore import MessageStoreSink

    fill(root, 300)
    sink = MessageStoreSink(root, topic="copy", app_id="app")
    fails = [1]

    def write(df, batch_id: int) -> None:
        sink(df, batch_id)
        if batch_id in fails:
            fails.remove(batch_id)
            raise RuntimeError("after the write")

    def run() -> None:
        df = spark.readStream.format("messagestore").option("subscribe", "flights")
        df = df.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 100).load(root)
        query = df.select("body", "keys").writeStream.foreachBatch(write)
        query = query.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()

    with pytest.raises(StreamingQueryException, match="after the write"):
        run()
    assert sum(bodies(root, "copy").values()) == 200
    run()
    assert bodies(root, "copy") == bodies(root, "flights")
