"""Stories of a classic session: failed commits, checkpoints that are deleted, rolled back and copied, several "
"writers."""

from __future__ import annotations

import shutil
import subprocess
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
    """The batch is in the store, Spark thinks it is not and calls abort (here even twice): started again it is "
    "known."""
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


def test_executors_whose_staging_disk_is_full(spark, root, tmp_path) -> None:
    """The query ends with a sentence, and none of its tasks leaves a file. With room it goes on, and each row is there
    once."""
    disk, checkpoint = tmp_path / "staging", tmp_path / "checkpoint"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("NOT DONE HERE: a small disk needs root")

    def run() -> None:
        asked = {"subscribe": "flights", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 100}
        df = spark.readStream.format("messagestore").options(**asked).load(root)
        noise = "sha2(concat(string(body), '-', string(n)), 256)"
        size = "IF(int(string(body)) BETWEEN 120 AND 180, 200, 1)"
        long = f"array_join(transform(sequence(1, {size}), n -> {noise}), '')"
        rows = df.selectExpr(f"binary(concat(string(body), ' ', {long})) AS body", "keys")
        given = {"topic": "copy", "stagingDir": str(disk), "checkpointLocation": str(checkpoint)}
        writer = rows.writeStream.format("messagestore").options(**given).trigger(availableNow=True)
        writer.start(root).awaitTermination()

    fill(root, 200)
    try:
        with pytest.raises(
            StreamingQueryException, match=rf"StoreFullError: {disk}/\S+: no room for \d+ bytes .*Make room"
        ):
            run()
        assert sum(bodies(root, "copy").values()) == 100
        assert [*disk.iterdir()] == []
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        run()
        assert [*disk.iterdir()] == []
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert Counter(body.split()[0] for body in bodies(root, "copy").elements()) == bodies(root, "flights")


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


def test_dead_letters_come_again_from_other_partitions_of_another_session(spark, root, tmp_path) -> None:
    """Spark forgot that its last batches were done: each is known, with its dead letters."""
    fill(root, 300)
    checkpoint = tmp_path / "checkpoint"
    changed = {"spark.sql.session.timeZone": "America/New_York", "spark.sql.execution.arrow.useLargeVarTypes": "true"}

    def run(**options: str) -> None:
        df = spark.readStream.format("messagestore").option("subscribe", "flights").options(**options)
        df = df.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 100).load(root)
        body = "IF(int(string(body)) % 7 = 0, NULL, body) AS body"
        rows = df.selectExpr(
            body, "keys", "map('n', string(body)) AS properties", "timestamp(storeTimestamp) AS bornTimestamp"
        )
        dead = {"invalidRows": "deadLetter", "deadLetterTopic": "dead"}
        writer = rows.writeStream.format("messagestore").options(topic="copy", **dead)
        writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        writer.start(root).awaitTermination()

    run(minPartitions="2")
    for number in (1, 2):
        (checkpoint / "commits" / str(number)).unlink()
        (checkpoint / "commits" / f".{number}.crc").unlink(missing_ok=True)
    for name, value in changed.items():
        spark.conf.set(name, value)
    try:
        run(minPartitions="5")
    finally:
        for name in changed:
            spark.conf.unset(name)
    more(root, 300, 20)
    run()
    assert sum(bodies(root, "copy").values()) == sum(n % 7 != 0 for n in range(320))
    assert sum(bodies(root, "dead").values()) == sum(n % 7 == 0 for n in range(320))


def test_checkpoints_that_were_swapped(spark, root, tmp_path) -> None:
    """Each query would read its topic from the beginning once more, as the next batches of the other's app. The source
    refuses that, and so does the sink, which knows the topic of each app. Swapped back, both go on."""
    from messagestore import Message, MessageStore

    fill(root, 40)

    def put(topic: str, first: int, count: int) -> None:
        with MessageStore.open(root) as store:
            for i in range(first, first + count):
                store.put_message(Message(topic, str(i).encode(), queue_id=0))

    def run(topic: str, checkpoint: str, **options: str) -> None:
        df = spark.readStream.format("messagestore").option("subscribe", topic).option("startingOffsets", "earliest")
        writer = df.options(**options).load(root).select("body").writeStream.format("messagestore")
        writer = writer.option("topic", f"{topic}-copy").option("checkpointLocation", str(tmp_path / checkpoint))
        writer.trigger(availableNow=True).start(root).awaitTermination()

    put("trains", 0, 30)
    run("flights", "a")
    run("trains", "b")
    put("trains", 30, 5)
    more(root, 40, 5)
    for topic, checkpoint in (("flights", "b"), ("trains", "a")):
        with pytest.raises(StreamingQueryException, match=r"ConfigError: option subscribe: leaves out"):
            run(topic, checkpoint)
        shutil.copytree(tmp_path / checkpoint, tmp_path / f"{checkpoint}-copy")
        with pytest.raises(StreamingQueryException, match=r"QueryConflictError: .* for topic \w+-copy, but its last"):
            run(topic, f"{checkpoint}-copy", failOnDataLoss="false")
    run("flights", "a")
    run("trains", "b")
    assert bodies(root, "flights-copy") == bodies(root, "flights")
    assert bodies(root, "trains-copy") == Counter(map(str, range(35)))


def test_a_deleted_checkpoint(spark, root, tmp_path) -> None:
    """It is another query: under the app id of the old one it is refused, whatever its rows, unless it takes the app
    over; then the old query is refused for good. Without an app id it is new.
    """
    fill(root, 200)
    checkpoint = tmp_path / "checkpoint"
    copy(spark, root, checkpoint, txnAppId="mine")
    shutil.move(checkpoint, tmp_path / "old")
    for most in (100, 150):
        with pytest.raises(StreamingQueryException, match="QueryConflictError: app 'mine': found version 0 of query"):
            copy(spark, root, checkpoint, most=most, txnAppId="mine")
        shutil.rmtree(checkpoint)
        assert bodies(root, "copy") == bodies(root, "flights")
    for _ in range(2):
        copy(spark, root, checkpoint, txnAppId="mine", onNewQuery="continue")
        assert set(bodies(root, "copy").values()) == {2}
    more(root, 200, 10)
    with pytest.raises(
        StreamingQueryException, match=r"QueryConflictError: app 'mine': found version 2 of query .* has replaced"
    ):
        copy(spark, root, tmp_path / "old", txnAppId="mine", onNewQuery="continue")
    copy(spark, root, checkpoint, txnAppId="mine")
    assert sum(bodies(root, "copy").values()) == 410
    shutil.rmtree(checkpoint)
    copy(spark, root, checkpoint)
    assert set(bodies(root, "copy").values()) == {2, 3}


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


# ---- the store is gone, or is another, under a checkpoint


def foreach_copy(spark, root: str, source: str, checkpoint: Path, topic: str = "copy", **options: str) -> None:
    """Topic flights of one store through `MessageStoreSink` to another, 100 rows a micro-batch."""
    from pyspark_messagestore import MessageStoreSink

    df = spark.readStream.format("messagestore").option("subscribe", "flights").option("startingOffsets", "earliest")
    df = df.option("maxOffsetsPerTrigger", 100).load(source).select("body", "keys")
    query = df.writeStream.foreachBatch(MessageStoreSink(root, topic=topic, app_id="app", **options))
    query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def stream_copy(spark, root: str, source: str, checkpoint: Path, topic: str = "copy", **options: str) -> None:
    """The same through the sink of a stream."""
    df = spark.readStream.format("messagestore").option("subscribe", "flights").option("startingOffsets", "earliest")
    df = df.option("maxOffsetsPerTrigger", 100).load(source).select("body", "keys")
    given = {"topic": topic, "checkpointLocation": str(checkpoint), "txnAppId": "app", **options}
    writer = df.writeStream.format("messagestore").options(**given).trigger(availableNow=True)
    writer.start(root).awaitTermination()


@pytest.mark.parametrize("copies", [stream_copy, foreach_copy])
def test_a_store_that_is_gone_under_a_checkpoint(spark, root, tmp_path, copies) -> None:
    """Not mounted: refused, and the folder stays as it is. An older backup: refused. The store back: it goes on."""
    from messagestore import MessageStore
    from messagestore.session import attached_store

    source, checkpoint, away = root + "-source", tmp_path / "checkpoint", Path(root + "-away")
    fill(source, 100)
    copies(spark, root, source, checkpoint)
    shutil.copytree(root, root + "-backup")
    for first, at in ((100, 100), (200, 100)):
        more(source, first, at)
        copies(spark, root, source, checkpoint)
    more(source, 300, 50)
    Path(root).rename(away)
    for exists in (False, True):
        if exists:
            Path(root).mkdir()
        with pytest.raises(
            StreamingQueryException, match="LostBatchesError: app 'app': found version 3, but no store at"
        ):
            copies(spark, root, source, checkpoint)
        assert Path(root).exists() is exists
        assert not exists or list(Path(root).iterdir()) == []
    Path(root).rmdir()
    shutil.copytree(root + "-backup", root)
    with pytest.raises(StreamingQueryException, match=r"LostBatchesError: .* versions 1 to 2 are not in the store"):
        copies(spark, root, source, checkpoint)
    assert bodies(root, "copy") == Counter(map(str, range(100)))
    shutil.rmtree(root)
    away.rename(root)
    for _ in range(2):  # the second run has nothing to do
        copies(spark, root, source, checkpoint)
        assert bodies(root, "copy") == bodies(source, "flights")
    more(source, 350, 10)
    new = root + "-new"
    with MessageStore.open(new) as store:
        store.start_batches("app", 4)
    copies(spark, new, source, checkpoint)
    assert bodies(new, "copy") == Counter(map(str, range(350, 360)))
    attached_store(new).detach()


def test_a_second_checkpoint_and_a_second_topic_under_one_app_id(spark, root, tmp_path) -> None:
    """Through `MessageStoreSink`: the rows were dropped as known. A second run on the first checkpoint goes on."""
    source, checkpoint = root + "-source", tmp_path / "checkpoint"
    fill(source, 100)
    for _ in range(2):
        foreach_copy(spark, root, source, checkpoint)
    with pytest.raises(StreamingQueryException, match="QueryConflictError: app 'app': found version 0 of query"):
        foreach_copy(spark, root, source, tmp_path / "second")
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink()
    with pytest.raises(StreamingQueryException, match="rows for topic copy, and came again with rows for topic audit"):
        foreach_copy(spark, root, source, checkpoint, topic="audit")
    foreach_copy(spark, root, source, checkpoint)
    assert bodies(root, "copy") == bodies(source, "flights")
