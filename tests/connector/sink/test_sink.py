"""The sink without Spark: tasks, commit and abort called as Spark calls them."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from messagestore import (
    BatchConflictError,
    ChecksumError,
    ConfigError,
    CorruptionError,
    LostBatchesError,
    MessageIllegalError,
    MessageStore,
    NotAStoreError,
    QueryConflictError,
    StoreConfig,
    StoreFullError,
    VersionRegressionError,
)
from messagestore.files.disk import Disk
from messagestore.files.staging_files import process_token
from messagestore.session import attached_store
from messagestore.spi import STORES, local
from pyspark_messagestore.options.table import sink_options
from pyspark_messagestore.sink.columns import prepare
from pyspark_messagestore.sink.writers import CHUNK_SIZE, BatchWriter, MessageStoreSink, Sink, StreamWriter, gathered
from sink_tasks import settings, staged

KINDS = [("body", "string"), ("keys", "array<string>")]


def planned(root: str, **options: str) -> Sink:
    parsed = sink_options({"path": root, "topic": "t", "storeConfig": str(settings(root)), **options})
    return Sink.plan(parsed, prepare(KINDS, parsed.topic), STORES)


def make(root: str) -> None:
    """A store without messages."""
    with MessageStore.open(root, StoreConfig.load(settings(root))):
        pass


def rows(*bodies: str) -> pa.RecordBatch:
    return pa.record_batch({"body": list(bodies), "keys": pa.array([[b] for b in bodies], pa.list_(pa.string()))})


def contents(root: str) -> list[str]:
    with MessageStore.open_read_only(root) as store:
        found = []
        for queue_id in store.topics().get("t", []):
            for batch in store.read("t", queue_id, 0, columns=["body"]):
                found += [body.decode() for body in batch.column("body").to_pylist()]
        return sorted(found)


def left(root: str) -> list[str]:
    return os.listdir(Path(root) / "spark" / "staging")


def test_a_batch_and_its_replay(root, context) -> None:
    """The same rows in other partitions are known; nothing is written twice, and staging is empty afterwards."""
    writer = StreamWriter(planned(root))
    writer.commit(staged(writer.sink, context, 0, rows("a", "b"), rows("c")), 0)
    assert contents(root) == ["a", "b", "c"]
    writer.commit(staged(writer.sink, context, 0, rows("c", "a"), rows("b"), rows()), 0)
    assert contents(root) == ["a", "b", "c"]
    assert left(root) == []


def test_a_store_in_memory_warns_when_it_is_made(root, context, caplog, monkeypatch) -> None:
    """Once, and not in each of the processes that Spark starts for its commits."""
    monkeypatch.setattr("messagestore.spi.local.mounted", lambda folder: ("tmpfs", "/run"))
    writer = StreamWriter(planned(root))
    for number in range(2):
        writer.commit(staged(writer.sink, context, number, rows("a", "b")), number)
        writer = StreamWriter(planned(root))
    assert caplog.text.count(f"{root}: this new store is in memory (tmpfs, mounted on /run)") == 1


def test_other_rows_under_a_known_batch(root, context) -> None:
    writer = StreamWriter(planned(root))
    writer.commit(staged(writer.sink, context, 0, rows("a")), 0)
    with pytest.raises(BatchConflictError):
        writer.commit(staged(writer.sink, context, 0, rows("b")), 0)
    skipping = StreamWriter(planned(root, onReplayMismatch="skip"))
    skipping.commit(staged(skipping.sink, context, 0, rows("b")), 0)
    assert contents(root) == ["a"]


def test_older_and_missing_batches(root, context) -> None:
    """Spark's batch ids are consecutive: a gap and a step back are errors, unless the user says otherwise."""
    make(root)
    with MessageStore.open(root) as store:
        store.start_batches("q1", 5)
    writer = StreamWriter(planned(root))
    writer.commit(staged(writer.sink, context, 5, rows("a")), 5)
    with pytest.raises(VersionRegressionError):
        writer.commit(staged(writer.sink, context, 3, rows("b")), 3)
    with pytest.raises(LostBatchesError):
        writer.commit(staged(writer.sink, context, 8, rows("c")), 8)
    lenient = StreamWriter(planned(root, onLostBatches="continue", onVersionRegression="skip"))
    lenient.commit(staged(lenient.sink, context, 3, rows("b")), 3)
    lenient.commit(staged(lenient.sink, context, 8, rows("c")), 8)
    assert contents(root) == ["a", "c"]


def test_a_task_and_a_commit_read_the_small_files_of_a_store_few_times(root, context, monkeypatch) -> None:
    """A micro-batch of ten rows costs little else: the store is looked at once, and once more under the lock."""
    make(root)
    writer = StreamWriter(planned(root))
    writer.commit(staged(writer.sink, context, 0, rows("a")), 0)
    opens: Counter[str] = Counter()
    opened = Disk.open

    def counted(disk: Disk, path: Any, **given: Any) -> Any:
        opens[os.path.basename(path)] += 1
        return opened(disk, path, **given)

    monkeypatch.setattr(Disk, "open", counted)
    messages = staged(writer.sink, context, 1, rows("b"))
    assert {name: opens[name] for name in ("store.json", "topics.json", "journal")} == {
        "store.json": 2,
        "topics.json": 1,
        "journal": 0,
    }
    opens.clear()
    writer.commit(messages, 1)
    [segment] = os.listdir(Path(root, "commitlog"))
    assert opens == {
        "store.json": 2,
        "settings.json": 1,
        "abort": 2,  # the writer takes over, and each append looks whether a broker has taken the store meanwhile
        "put-times.json": 1,  # another process may have seen a clock that was set back; usually there is no file
        segment: 1,
        messages[0].file.name: 1,
    }


def test_an_empty_batch_is_remembered(root, context) -> None:
    """No rows, no staging file, but a BATCH record: the next batch is not taken for a gap."""
    writer = StreamWriter(planned(root))
    for batch_id in range(3):
        messages = staged(writer.sink, context, batch_id, rows())
        assert messages[0].file is None
        writer.commit(messages, batch_id)
    assert contents(root) == []


def test_abort_after_a_commit_that_went_through(root, context) -> None:
    """Spark calls abort after a commit that died behind its commit point; what is in the log stays."""
    writer = StreamWriter(planned(root))
    messages = staged(writer.sink, context, 0, rows("a"))
    writer.commit(messages, 0)
    StreamWriter(planned(root)).abort([*messages, None], 0)
    assert contents(root) == ["a"]


def test_abort_deletes_what_was_staged(root, context) -> None:
    make(root)
    writer = StreamWriter(planned(root))
    messages = staged(writer.sink, context, 0, rows("a"), rows("b"))
    assert len(left(root)) == 2
    writer.abort([messages[0], None], 0)
    writer.abort([*messages], 0)
    writer.abort([None], 0)
    assert left(root) == []
    assert contents(root) == []


def test_orphans_are_swept(root, context) -> None:
    """What a killed task of another write left goes after stagingTtl; what is young stays."""
    writer = StreamWriter(planned(root, stagingTtl="1h"))
    orphans = staged(planned(root), context, 0, rows("old"), rows("young"))
    old_s = time.time() - 7200
    os.utime(Path(root, "spark", "staging", orphans[0].file.name), (old_s, old_s))
    local._last_sweep_s.clear()
    writer.commit(staged(writer.sink, context, 0, rows("a")), 0)
    assert left(root) == [orphans[1].file.name]


@pytest.mark.parametrize("damage", ["gone", "altered", "cut"])
def test_staging_files_that_are_not_what_was_written(root, context, damage: str) -> None:
    """Refused before the first byte."""
    make(root)
    writer = StreamWriter(planned(root))
    messages = staged(writer.sink, context, 0, rows("a", "b"))
    path = Path(root, "spark", "staging", messages[0].file.name)
    if damage == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "altered" else data[:-1])
    with pytest.raises((CorruptionError, ChecksumError), match=path.name):
        writer.commit(messages, 0)
    assert contents(root) == []


def test_messages_of_others_are_refused(root, context) -> None:
    """Of another batch, store or query, twice, or missing."""
    make(root)
    writer = StreamWriter(planned(root))
    good = staged(writer.sink, context, 0, rows("a"), rows("b"))
    for change in ({"batch_id": "1"}, {"store_id": "x"}, {"query_id": "q2"}, {"partition_id": 0}):
        other = pickle.loads(pickle.dumps(good[1]))
        for name, value in change.items():
            setattr(other, name, value)
        elsewhere = "store_id" in change
        words = "found another store, x, but the write" if elsewhere else "one message of each task"
        with pytest.raises(NotAStoreError if elsewhere else CorruptionError, match=words):
            writer.commit([good[0], other], 0)
    with pytest.raises(CorruptionError, match="1 tasks left no message"):
        writer.commit([good[0], None], 0)
    assert contents(root) == []


def test_a_bad_row_is_named(root, context) -> None:
    """Partition and row; no file is left, and nothing is in the log."""
    sink = planned(root, maxMessageSize="100")
    context.partition = 3
    with pytest.raises(MessageIllegalError, match="partition 3, row 70001: body") as caught:
        sink.stage(iter([rows(*["x"] * 40_000), rows(*["x"] * 30_001, "y" * 101)]))
    assert str(caught.value).endswith("Nothing of this batch was written")
    assert left(root) == []


def test_a_task_that_sees_another_store(root, context) -> None:
    """Each host must see the driver's disk."""
    make(root)
    sink = planned(root)
    elsewhere = Sink(sink.options, sink.config, sink.mapping, STORES, "0" * 32)
    with pytest.raises(NotAStoreError, match="executors and driver see the same store, on one disk or by one URL"):
        elsewhere.stage(iter([rows("a")]))


def test_a_store_that_is_gone_at_the_commit_is_not_made_anew(root, context) -> None:
    """The folder was removed between the tasks and the commit: an error, and no empty store in its place."""
    make(root)
    sink = planned(root)
    message = sink.stage(iter([rows("a")]))
    shutil.rmtree(root)
    with pytest.raises(NotAStoreError, match="found no store there, but the write was planned for store"):
        sink.commit([message], 0)
    assert not os.path.exists(root)


def test_a_store_that_is_gone_at_the_abort_is_not_made_anew(root, context) -> None:
    """The disk is unmounted and Spark gives up: the empty folder does not become a store that the next run fills."""
    make(root)
    sink = planned(root)
    message = sink.stage(iter([rows("a")]))
    shutil.rmtree(root)
    sink.abort([message, None])
    assert not os.path.exists(root)


def test_batch_writes(root, context) -> None:
    """Without an app id: no exactly-once, and refused in foreachBatch; with one, known again."""
    context.properties = {}
    BatchWriter(planned(root)).commit(staged_batch(planned(root), context, rows("a")))
    BatchWriter(planned(root)).commit(staged_batch(planned(root), context, rows("a")))
    assert contents(root) == ["a", "a"]
    for _ in range(2):
        sink = planned(root, txnAppId="app", txnVersion="7")
        BatchWriter(sink).commit(staged_batch(sink, context, rows("b")))
    assert contents(root) == ["a", "a", "b"]
    context.properties = {"sql.streaming.queryId": "q"}
    with pytest.raises(ConfigError, match="option txnAppId: is missing in foreachBatch"):
        BatchWriter(planned(root)).write(iter([rows("c")]))


def staged_batch(sink: Sink, context, batch: pa.RecordBatch) -> list:
    context.partition = 0
    return [BatchWriter(sink).write(iter([batch]))]


def test_topics_and_queues(root, context) -> None:
    """A topic is made with writeQueueNums queues; not without autoCreateTopic."""
    strict = StreamWriter(planned(root, autoCreateTopic="false"))
    with pytest.raises(MessageIllegalError, match="autoCreateTopic"):
        strict.commit(staged(strict.sink, context, 0, rows("a")), 0)
    wide = StreamWriter(planned(root, writeQueueNums="3"))
    wide.commit(staged(wide.sink, context, 0, rows(*map(str, range(50)))), 0)
    with MessageStore.open_read_only(root) as store:
        assert store.topics()["t"] == [0, 1, 2]


def test_a_row_for_a_topic_of_a_broker_is_named(root, context) -> None:
    """A column topic with one bad row: the batch is refused with partition and row, and nothing is staged."""
    planned(root)
    sink = Sink.plan(sink_options({"path": root}), prepare([("body", "string"), ("topic", "string")], None), STORES)
    batch = pa.record_batch({"body": ["a", "b"], "topic": ["t", "RMQ_SYS_TRANS_HALF_TOPIC"]})
    with pytest.raises(
        MessageIllegalError, match=r"partition 0, row 1: topic: found .* reserved for RocketMQ's broker"
    ):
        staged(sink, context, 0, batch)
    assert left(root) == []


def test_drivers_that_are_killed_again_and_again_do_not_fill_the_disk(root, context, monkeypatch) -> None:
    """Each staged a batch and died before its commit; the next one's plan deletes that, and nothing of a live driver."""
    monkeypatch.setattr(local, "SWEEP_INTERVAL_S", 0.0)
    planned(root)
    for _ in range(3):
        driver = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
        sink = replace(planned(root), driver=process_token(driver.pid))
        staged(sink, context, 0, rows("a", "b"), rows("c"))
        driver.communicate()
        assert len(left(root)) == 2
    alive = staged(replace(planned(root), driver=process_token(os.getpid())), context, 0, rows("x"))
    writer = StreamWriter(planned(root))
    assert left(root) == [alive[0].file.name]
    writer.commit(staged(writer.sink, context, 0, rows("a")), 0)
    assert len(left(root)) == 1


def test_what_failed_attempts_left_goes_with_the_commit(root, context) -> None:
    """Speculative and killed attempts of this batch and earlier ones; another query's files, and foreachBatch's, stay."""
    writer = StreamWriter(planned(root))
    for batch_id in (0, 1):
        failed = [writer.write(iter([rows("lost")])) for _ in range(2)]
        assert {message.file.name for message in failed} <= set(left(root))
        context.properties["streaming.sql.batchId"] = str(batch_id)
        good = pickle.loads(pickle.dumps(writer)).write(iter([rows(f"b{batch_id}")]))
        others = [BatchWriter(planned(root, txnAppId="a", txnVersion="0")).write(iter([rows("x")])).file.name]
        context.properties["sql.streaming.queryId"] = "q2"
        others.append(StreamWriter(planned(root)).write(iter([rows("y")])).file.name)
        context.properties["sql.streaming.queryId"] = "q1"
        StreamWriter(planned(root)).commit([good], batch_id)
        assert sorted(left(root)) == sorted(others)
        for name in others:
            Path(root, "spark", "staging", name).unlink()


def test_a_batch_with_many_bytes_is_divided() -> None:
    """A task has the records of one part in memory at a time; the large rows may all be at the end."""
    bodies = [b"small"] * 9_000 + [bytes([n % 251]) * 70_000 for n in range(1_000)]
    parts = list(gathered(iter([pa.record_batch({"body": bodies})])))
    assert max(part.nbytes for part in parts) <= CHUNK_SIZE
    assert [body for part in parts for body in part.column("body").to_pylist()] == bodies


def test_batches_are_gathered() -> None:
    """Spark's batches of 10 000 rows go into chunks of about 64k; empty ones vanish."""
    sizes = [10_000] * 20 + [0] + [5]
    parts = list(gathered(iter([pa.record_batch({"a": pa.nulls(n, pa.int8())}) for n in sizes])))
    assert [part.num_rows for part in parts] == [60_000, 60_000, 60_000, 20_005]
    assert list(gathered(iter([]))) == []


def test_the_foreach_batch_sink_can_be_sent(root) -> None:
    """On Connect it is pickled; options are taken in either spelling."""
    made = pickle.loads(
        pickle.dumps(MessageStoreSink(root, app_id="a", flush_disk_type="ASYNC_FLUSH", autoCreateTopic=True))
    )
    assert made.options == {"flushDiskType": "ASYNC_FLUSH", "autoCreateTopic": "true"}
    with pytest.raises(ConfigError, match="app_id"):
        MessageStoreSink(root, app_id="")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"flush_disk_type": "FAST"}, "option flushDiskType: found 'FAST'; allowed is SYNC_FLUSH or ASYNC_FLUSH"),
        ({"flushDisktyp": "x"}, "Did you mean flushDiskType?"),
        ({"writeQueueNums": 1.5}, "option writeQueueNums: found '1.5'; allowed is a whole number from 1 to 65536"),
        ({"txn_version": 3}, "option txnVersion: MessageStoreSink sets it"),
        ({"topic": "a/b"}, "option topic: found 'a/b'"),
        ({"topic": 5}, "topic: found 5; allowed is text"),
        ({"app_id": None}, "app_id: found None; allowed is text"),
        ({"app_id": "a b"}, "option txnAppId: found 'a b'"),
        ({"path": 5}, "path: found 5; allowed is the path of a folder"),
        ({"path": b"/x"}, "path: found b'/x'; allowed is the path of a folder"),
        ({"path": ""}, "option path: found ''"),
    ],
)
def test_what_foreach_batch_would_refuse_is_refused_at_once(root: str, given: dict[str, Any], words: str) -> None:
    """A misspelt option failed in the first batch, under a page of Java."""
    with pytest.raises(ConfigError) as caught:
        MessageStoreSink(**{"path": root, "topic": "t", "app_id": "a", **given})
    assert words in str(caught.value)


def test_a_full_disk(tmp_path, context) -> None:
    """A task, or the commit, finds no room: the error says how much is free, and nothing is in the log."""
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        root = str(disk / "store")
        make(root)
        writer = StreamWriter(planned(root))
        with pytest.raises(StoreFullError, match="free"):
            staged(writer.sink, context, 0, *[rows(*["x" * 1000] * 700)] * 2)
        for name in left(root):
            (Path(root) / "spark" / "staging" / name).unlink()
        with pytest.raises(StoreFullError, match="free"):
            writer.commit(staged(writer.sink, context, 0, rows(*["x" * 1000] * 550)), 0)
        assert contents(root) == []
        attached_store(root).detach()
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


# ---- the store is gone, or another, under a running query


def test_the_disk_is_not_mounted_under_a_running_query(root, context) -> None:
    """A new store was made in the empty folder, and the query looked healthy: it is an error, and nothing is made."""
    for batch_id in (0, 1):
        writer = StreamWriter(planned(root))
        writer.commit(staged(writer.sink, context, batch_id, rows(f"{batch_id}")), batch_id)
    attached_store(root).detach()
    os.rename(root, root + "-unmounted")
    for make_mount_point in (False, True):
        if make_mount_point:
            os.mkdir(root)
        for options in ({}, {"onLostBatches": "continue"}):
            sink = planned(root, **options)
            for batch in (rows("2"), rows()):
                with pytest.raises(
                    LostBatchesError, match=f"app 'q1': found version 2, but no store at {root}"
                ) as caught:
                    staged(sink, context, 2, batch)
            StreamWriter(sink).abort([None], 2)
            assert f"`messagestore batches start {root} q1 2`" in str(caught.value)
            assert os.path.exists(root) is make_mount_point
            assert not make_mount_point or os.listdir(root) == []
    os.rmdir(root)
    os.rename(root + "-unmounted", root)
    again = StreamWriter(planned(root))
    again.commit(staged(again.sink, context, 2, rows("2")), 2)
    assert contents(root) == ["0", "1", "2"]


def test_another_store_is_there_under_a_running_query(root, context) -> None:
    """The error names both stores, where this process knows the one that the earlier batches went to."""
    first = planned(root)
    StreamWriter(first).commit(staged(first, context, 0, rows("0")), 0)
    attached_store(root).detach()
    old = planned(root).store_id
    shutil.rmtree(root)
    make(root)
    sink = planned(root)
    with pytest.raises(LostBatchesError, match=f"went to store {old}, but this is store {sink.store_id}$"):
        StreamWriter(sink).commit(staged(sink, context, 1, rows("1")), 1)
    assert contents(root) == []


def test_the_disk_goes_between_tasks_and_commit(root, context) -> None:
    """The commit looks again: it makes no store, neither for a first batch nor for a later one."""
    for batch_id in (0, 1):
        if batch_id:
            make(root)
        sink = planned(root)
        messages = staged(sink, context, batch_id, rows("a"))
        attached_store(root).detach()
        shutil.rmtree(root)
        for planned_before in (True, False):  # a stream's commit plans the sink again
            writer = StreamWriter(sink if planned_before else planned(root))
            with pytest.raises((CorruptionError, NotAStoreError)):
                writer.commit(messages, batch_id)
            assert not os.path.exists(root)


def test_a_batch_that_is_refused_leaves_no_store(root, context) -> None:
    """A bad row in the first batch, or foreachBatch without an app id: the folder does not become a store."""
    sink = planned(root, maxMessageSize="10")
    with pytest.raises(MessageIllegalError):
        staged(sink, context, 0, rows("x" * 11))
    StreamWriter(sink).abort([None], 0)
    with pytest.raises(ConfigError, match="is missing in foreachBatch"):
        BatchWriter(planned(root)).write(iter([rows("c")]))
    assert not os.path.exists(os.path.join(root, "commitlog"))
    assert not os.path.exists(os.path.join(root, "spark", "store.json"))
    assert left(root) == []
    writer = StreamWriter(planned(root))
    writer.commit(staged(writer.sink, context, 0, rows("a")), 0)
    assert contents(root) == ["a"]


def test_two_first_batches_at_once(root, context) -> None:
    """Both are planned where there is no store; one makes it, the other finds it."""
    sinks = [planned(root, txnAppId=app) for app in ("one", "two")]
    messages = [staged(sink, context, 0, rows(sink.options.txn_app_id)) for sink in sinks]
    for sink, staged_messages in zip(sinks, messages, strict=True):
        StreamWriter(sink).commit(staged_messages, 0)
    assert contents(root) == ["one", "two"]


class _Frame:
    """As much of a DataFrame as `MessageStoreSink` needs: its write runs as one task and a commit."""

    def __init__(self, root: str, batch: pa.RecordBatch) -> None:
        self.write, self.given, self.batch, self.root = self, {}, batch, root

    def format(self, name: str) -> _Frame:
        assert name == "messagestore"
        return self

    def mode(self, mode: str) -> _Frame:
        assert mode == "append"
        return self

    def options(self, **given: str) -> _Frame:
        self.given |= given
        return self

    def option(self, name: str, value: str) -> _Frame:
        self.given[name] = value
        return self

    def save(self, path: str) -> None:
        options = {"storeConfig": str(settings(path)), **self.given, "path": path}
        parsed = sink_options(options)
        writer = BatchWriter(Sink.plan(parsed, prepare(KINDS, parsed.topic), STORES))
        writer.commit([pickle.loads(pickle.dumps(writer.write(iter([self.batch]))))])


@pytest.fixture(params=["classic", "connect"])
def foreach(request, root, context):
    """One micro-batch through `MessageStoreSink`; on Connect a task sees neither query nor batch id."""

    def run(batch_id: int, *bodies: str, topic: str = "t", query: str = "q1", **options: str) -> None:
        on_classic = {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch_id)}
        context.properties = on_classic if request.param == "classic" else {}
        MessageStoreSink(root, topic=topic, app_id="app", **options)(_Frame(root, rows(*bodies)), batch_id)

    run.mode = request.param
    return run


def test_a_store_that_is_gone_under_foreach_batch(root, foreach) -> None:
    """MessageStoreSink accepted versions 0, 1, 2, 7, and made a store for any of them."""
    for batch_id in (1, 7):
        with pytest.raises(LostBatchesError, match=f"app 'app': found version {batch_id}, but no store"):
            foreach(batch_id, "x")
        assert not os.path.exists(root)
    for batch_id in (0, 1, 2):
        foreach(batch_id, f"{batch_id}")
    with pytest.raises(LostBatchesError, match="versions 3 to 6 are not in the store"):
        foreach(7, "7")
    foreach(2, "2")
    foreach(3, "3")
    assert contents(root) == ["0", "1", "2", "3"]


def test_an_older_backup_under_foreach_batch(root, foreach) -> None:
    """The batches between backup and checkpoint are named; nothing is skipped."""
    foreach(0, "0")
    attached_store(root).detach()
    shutil.copytree(root, root + "-backup")
    for batch_id in (1, 2):
        foreach(batch_id, f"{batch_id}")
    attached_store(root).detach()
    shutil.rmtree(root)
    shutil.copytree(root + "-backup", root)
    with pytest.raises(LostBatchesError, match="versions 1 to 2 are not in the store"):
        foreach(3, "3")
    assert contents(root) == ["0"]


def test_a_sink_that_is_added_to_a_running_query(root, foreach) -> None:
    """`messagestore batches start` lets it in, once."""
    with pytest.raises(LostBatchesError):
        foreach(5, "5")
    with MessageStore.open(root, StoreConfig.load(settings(root))) as store:
        store.start_batches("app", 5)
    with pytest.raises(VersionRegressionError):
        foreach(4, "4")
    foreach(5, "5")
    with pytest.raises(LostBatchesError):
        foreach(7, "7")
    foreach(6, "6")
    assert contents(root) == ["5", "6"]


def test_batches_may_be_left_out_when_the_user_says_so(root, foreach) -> None:
    """A foreachBatch function that writes some batches only: `txnVersionSource=user`. The first one is looked at."""
    if foreach.mode == "classic":
        with pytest.raises(LostBatchesError):
            foreach(3, "3", txnVersionSource="user")
    foreach(0, "0", txnVersionSource="user")
    foreach(4, "4", txnVersionSource="user")
    assert contents(root) == ["0", "4"]


def test_two_sinks_under_one_app_id(root, foreach) -> None:
    """The same rows for a second topic were dropped as known: 530 orders, none in the second topic, no error."""
    foreach(0, "a", "b", topic="t")
    with pytest.raises(BatchConflictError, match="rows for topic t, and came again with rows for topic audit"):
        foreach(0, "a", "b", topic="audit")
    foreach(0, "a", "b", topic="t")
    assert contents(root) == ["a", "b"]


def test_a_second_checkpoint_under_one_app_id(root, foreach) -> None:
    """Equal rows were dropped as known. On Connect foreachBatch has no query id, so there it cannot be told."""
    foreach(0, "a")
    if foreach.mode == "connect":
        foreach(0, "a", query="q2")
    else:
        with pytest.raises(
            QueryConflictError, match=r"version 0 of query q2, but the batches of this app .* of query q1"
        ):
            foreach(0, "a", query="q2")
        foreach(0, "a", query="q2", onNewQuery="continue")
        with pytest.raises(QueryConflictError, match="which query q2 has replaced"):
            foreach(1, "b", onNewQuery="continue")
    assert contents(root) == (["a"] if foreach.mode == "connect" else ["a", "a"])


def test_a_replay_after_the_topic_got_fewer_queues(root, context) -> None:
    """The queues of a topic may be altered between a batch and its replay: the same topic is the same destination."""
    writer = StreamWriter(planned(root))
    batch = rows(*map(str, range(40)))
    writer.commit(staged(writer.sink, context, 0, batch), 0)
    with MessageStore.open(root) as store:
        topics = store.writer.files.topics
        topics.alter("t", write_queue_nums=3)
        topics.save()
    again = StreamWriter(planned(root))
    again.commit(staged(again.sink, context, 0, batch), 0)
    assert len(contents(root)) == 40
