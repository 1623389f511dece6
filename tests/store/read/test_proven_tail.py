"""After a reboot, and before a writer has recovered, a reader sees all that is proven to be on the disk, and says what it
does not show."""

from __future__ import annotations

import json
import logging
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.harness import APP, ROOMY, batch_columns, payload
from crash.imitate import Process, another_boot
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.simdisk import RecordingDisk
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchRequest,
    GetMessageStatus,
    Message,
    MessageStore,
    NotRecoveredError,
    ReadOnlyStore,
)
from messagestore.read import sight
from messagestore.read.view import StoreView

TOPIC = f"topic-{APP}"
QUIET = ROOMY.replace(flush_interval_commit_log=3_600_000, flush_commit_log_thorough_interval=3_600_000)


def bodies_of(store: ReadOnlyStore) -> dict[tuple[str, int], list[bytes]]:
    """Every queue that a reader sees."""
    return {
        (topic, queue_id): [
            body for batch in store.read(topic, queue_id, 0, columns=("body",)) for body in batch["body"].to_pylist()
        ]
        for topic, queue_ids in store.topics().items()
        for queue_id in queue_ids
        if not topic.startswith("rmq_sys")
    }


@pytest.fixture
def fifty(tmp_path: Path) -> Iterator[Path]:
    """Fifty acknowledged SYNC_FLUSH batches, of which only the log was synced; the power went, and came again."""
    root = tmp_path / "store"
    root.mkdir()
    disk = RecordingDisk(root)
    process = Process(root, ROOMY, disk)
    for version in range(50):
        process.batch(version=version, rows=6)
    image = disk.image(disk.position, "strict").build(tmp_path / "image")
    process.die()
    with another_boot():
        yield image


def damaged(root: Path, physical_offset: int) -> None:
    size = ROOMY.mapped_file_size_commit_log
    segment = root / "commitlog" / f"{physical_offset // size * size:020d}"
    data = bytearray(segment.read_bytes())
    data[physical_offset % size] ^= 1
    segment.write_bytes(data)


def test_every_batch_is_seen_after_a_reboot(fifty: Path) -> None:
    """By each way to look, although queues and index were never synced; nothing is written."""
    before = {path: path.read_bytes() for path in fifty.rglob("*") if path.is_file()}
    with MessageStore.open_read_only(fifty, ROOMY) as reader:
        assert reader.topics() == {TOPIC: [0, 1, 2], "rmq_sys_spark_sink": [0]}
        for queue_id in range(3):
            wanted = [payload(APP, v, row) for v in range(50) for row in (queue_id, queue_id + 3)]
            assert bodies_of(reader)[TOPIC, queue_id] == wanted
            assert (reader.min_offset(TOPIC, queue_id), reader.max_offset(TOPIC, queue_id)) == (0, 100)
        found = reader.get_message(TOPIC, 1, 98)
        assert (found.status, len(found.messages)) == (GetMessageStatus.FOUND, 2)
        message = found.messages[1]
        assert reader.look_message_by_offset(message.physical_offset).body == message.body
        assert [m.body for m in reader.query_message(TOPIC, "k49-4")] == [message.body]
        assert reader.queue_offset_by_time(TOPIC, 1, message.store_timestamp_ms + 1) == 100
    assert {path: path.read_bytes() for path in fifty.rglob("*") if path.is_file()} == before
    with MessageStore.open(fifty, ROOMY) as store:
        assert store.max_offset(TOPIC, 1) == 100


def test_a_view_that_is_open_while_a_writer_recovers(fifty: Path) -> None:
    """It goes over to what the writer publishes, and follows."""
    with MessageStore.open_read_only(fifty, ROOMY) as reader:
        assert reader.max_offset(TOPIC, 0) == 100
        with MessageStore.open(fifty, ROOMY) as store:
            store.append_batch(batch_columns(APP, 50, 3), BatchRequest(APP, 50))
            assert reader.max_offset(TOPIC, 0) == 101
            assert reader.view.tail is None
        assert reader.max_offset(TOPIC, 0) == 101


def test_what_is_not_proven_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Puts and ASYNC_FLUSH batches behind the last SYNC_FLUSH batch: a warning that counts, and an error on request."""
    root = tmp_path / "store"
    root.mkdir()
    process = Process(root, QUIET)
    process.batch(version=0, rows=6)
    process.batch(version=1, rows=6, flush=ASYNC_FLUSH)
    process.batch(version=2, rows=6)
    process.batch(version=3, rows=6, flush=ASYNC_FLUSH)
    store = process.session()
    store.put_message(Message("t", b"put", queue_id=0))
    process.die()
    with another_boot():
        with MessageStore.open_read_only(root, QUIET) as reader:
            assert reader.max_offset(TOPIC, 0) == 6
            assert reader.max_offset("t", 0) == 0
            reader.view.refresh()
            assert caplog.text.count("8 more records lie between") == 1
            assert caplog.text.count("nothing proves yet that they are on the disk") == 1
        with pytest.raises(NotRecoveredError, match=r"8 more records lie between .*`messagestore recover`"):
            MessageStore.open_read_only(root, QUIET.replace(fail_on_unproven=True))
        with MessageStore.open(root, QUIET):
            pass
        with MessageStore.open_read_only(root, QUIET.replace(fail_on_unproven=True)) as reader:
            assert (reader.max_offset(TOPIC, 0), reader.max_offset("t", 0)) == (8, 1)


def test_status_says_what_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is shown is counted as after recovery, the last batch included."""
    from messagestore.inspect.operator import status
    from pyspark_messagestore.cli.commands.status import status_lines

    root = tmp_path / "store"
    root.mkdir()
    process = Process(root, QUIET)
    process.batch(version=0, rows=6)
    process.batch(version=1, rows=6, flush=ASYNC_FLUSH)
    process.die()
    with another_boot():
        found = status(str(root), QUIET)
        assert (found["messages"], found["batches"], found["lastBatch"]["version"]) == (6, 1, 0)
        assert found["unproven"]["records"] == 7
        status_lines(found)
        assert f"7 records behind {found['unproven']['begin']}, not proven to be durable" in capsys.readouterr().out


def test_no_more_than_the_limit_is_looked_at(fifty: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is behind it is not shown, and that is said."""
    config = ROOMY.replace(proven_tail_size=20_000)
    with MessageStore.open_read_only(fifty, config) as reader:
        high = reader.max_offset(TOPIC, 0)
        assert 0 < high < 100
        assert [len(bodies) for bodies in bodies_of(reader).values()] == [high] * 3
        assert "was not examined (provenTailSize)" in caplog.text
    with pytest.raises(NotRecoveredError, match="provenTailSize"):
        MessageStore.open_read_only(fifty, config.replace(fail_on_unproven=True))
    with MessageStore.open_read_only(fifty, ROOMY.replace(proven_tail_size=0)) as reader:
        assert reader.max_offset(TOPIC, 0) == 0


@pytest.mark.parametrize(("part", "seen"), [("head", 60), ("data", 60), ("before", 58)])
def test_a_batch_that_is_damaged_proves_nothing(fifty: Path, part: str, seen: int) -> None:
    """Neither itself nor what follows; recovery refuses such a store."""
    with MessageStore.open_read_only(fifty, ROOMY) as reader:
        unit = reader.view.units("rmq_sys_spark_sink", 0, 30, 31)[0]
        place, size = int(unit["physical_offset"]), int(unit["size"])
    damaged(fifty, {"head": place + 100, "data": place + size + 100, "before": place - 20}[part])
    with MessageStore.open_read_only(fifty, ROOMY) as reader:
        assert reader.max_offset(TOPIC, 0) == seen


def test_the_record_before_the_clean_end_must_be_there(fifty: Path) -> None:
    """C is a place where a record begins only if the record before it is the one that `state` names."""
    with MessageStore.open(fifty, ROOMY):
        pass
    process = Process(fifty, ROOMY)
    for version in range(50, 53):
        process.batch(version=version)
    state = process.store.writer.state
    process.die()
    with another_boot(78):
        with MessageStore.open_read_only(fifty, ROOMY) as reader:
            assert reader.view.visible.end > state.clean_end
        damaged(fifty, state.anchor_position + 100)
        with MessageStore.open_read_only(fifty, ROOMY) as reader:
            assert reader.view.visible.end == state.clean_end


@pytest.mark.parametrize("seed", range(10))
def test_a_reader_sees_a_part_of_what_recovery_keeps(tmp_path: Path, seed: int) -> None:
    """SYNC, ASYNC and single puts mixed, the clean end moving now and then, power cut anywhere: all that a reader shows
    stays, and every SYNC_FLUSH batch that was acknowledged is among it."""
    chance, root = random.Random(seed), tmp_path / "store"
    disk = MemRecordingDisk(root)
    acknowledged: list[tuple[int, int]] = []
    with MessageStore.open(root, QUIET, disk=disk) as store:
        for step in range(14):
            kind = chance.random()
            if kind < 0.3:
                store.put_message(Message("t", b"put/%d" % step, queue_id=chance.randrange(2)))
            elif kind < 0.4:
                store.flush()
                store.writer.finish()
                store.writer.clean_end.move()
            else:
                flush = SYNC_FLUSH if chance.random() < 0.5 else ASYNC_FLUSH
                store.append_batch(batch_columns(APP, step, 9), BatchRequest(APP, step, flush_disk_type=flush))
                if flush == SYNC_FLUSH:
                    acknowledged.append((step, disk.position))
        count = disk.position
    logging.disable(logging.WARNING)
    try:
        for _ in range(25):
            cut, mode = chance.randint(1, count), chance.choice(["strict", "all", "random"])
            for image in disk.images(cut, (mode,), limit=1, random_count=1, seed=chance.randrange(1 << 20)):
                found = MemDisk(tmp_path / "image", image.folder)
                if "commitlog/" in found.tree():
                    with another_boot():
                        promised = {step for step, position in acknowledged if position <= cut}
                        check_reader(found, promised, f"{cut} {mode}")
    finally:
        logging.disable(logging.NOTSET)


def check_reader(disk: MemDisk, promised: set[int], label: str) -> None:
    with MessageStore.open_read_only(disk.root, QUIET, disk=disk) as reader:
        seen = bodies_of(reader)
    with MessageStore.open(disk.root, QUIET, disk=disk) as store:
        kept = bodies_of(store)
    for key, bodies in seen.items():
        assert kept.get(key, [])[: len(bodies)] == bodies, label
    everything = {body for bodies in seen.values() for body in bodies}
    assert {payload(APP, step, row) for step in promised for row in range(9)} <= everything, label


def test_a_task_reads_what_the_driver_has_proven(fifty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark reads all of it before recovery; the tasks are handed the units and do not look for the end again."""
    pytest.importorskip("pyspark")

    from pyspark.sql.streaming.datasource import ReadAllAvailable
    from pyspark.sql.types import StructType

    from messagestore.spi import STORES
    from pyspark_messagestore.options.table import source_options
    from pyspark_messagestore.source.readers import BatchReader, StreamReader
    from pyspark_messagestore.source.schema import Projection

    columns = Projection.of(StructType().add("body", "binary"))
    options = {"path": str(fifty), "subscribe": TOPIC, "minPartitions": "7", "startingOffsets": "earliest"}
    batch, stream = (kind(source_options(options), columns, STORES) for kind in (BatchReader, StreamReader))
    start = json.loads(json.dumps(stream.initialOffset()))
    end = json.loads(json.dumps(stream.latestOffset(start, ReadAllAvailable())))
    planned = [batch.partitions(), stream.partitions(start, end)]
    monkeypatch.setattr(sight, "find_proven_tail", lambda *_: pytest.fail("a task looked for the proven end"))
    wanted = sorted(payload(APP, version, row) for version in range(50) for row in range(6))
    for partitions in planned:
        assert len(partitions) >= 7
        copies = pickle.loads(pickle.dumps(partitions))
        found = [body for p in copies for b in batch.read(p) for body in b["body"].to_pylist()]
        assert sorted(found) == wanted
    monkeypatch.undo()
    with MessageStore.open(fifty, ROOMY) as store:
        store.append_batch(batch_columns(APP, 50, 6), BatchRequest(APP, 50))
    again = json.loads(json.dumps(stream.latestOffset(end, ReadAllAvailable())))
    found = [body for p in stream.partitions(end, again) for b in stream.read(p) for body in b["body"].to_pylist()]
    assert sorted(found) == sorted(payload(APP, 50, row) for row in range(6))


def test_a_view_of_the_library_is_handed_nothing(fifty: Path) -> None:
    """It looks once, however often it is asked."""
    looked = StoreView(fifty, ROOMY)
    tail = looked.tail
    assert tail is not None
    assert tail.complete
    for _ in range(3):
        looked.refresh()
        assert looked.tail is tail
    looked.close()
