"""A whole batch, once, or nothing: the journal's rules, placing over segments, limits, undoing."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from messagestore import (
    ASYNC_FLUSH,
    BatchConflictError,
    BatchRequest,
    ConfigError,
    LostBatchesError,
    Message,
    MessageBatch,
    MessageIllegalError,
    MessageStore,
    StoreConfig,
    StoreFullError,
    StorePoisonedError,
    VersionRegressionError,
)
from messagestore.files.disk import Disk, File
from messagestore.inspect.verify import verify
from messagestore.log.batch_search import read_batch
from small import SMALL, bodies, columns, read_all


def request(version: int, app: str = "app", source: str = "spark", **options: str) -> BatchRequest:
    return BatchRequest(app_id=app, version=version, version_source=source, **options)  # type: ignore[arg-type]


def test_a_batch_is_there_once(tmp_path: Path) -> None:
    """Appended, then known; in another process, too."""
    rows = columns(bodies(20))
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        first = store.append_batch(rows, request(0))
        again = store.append_batch(rows, request(0))
        assert (first.status, again.status) == ("appended", "known")
        assert (again.physical_offset, again.row_count) == (first.physical_offset, 20)
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        assert store.append_batch(rows, request(0)).status == "known"
        assert read_all(store, queue_id=0) == bodies(20)[::2]
        assert read_all(store, queue_id=1) == bodies(20)[1::2]


def test_other_partitioning_is_the_same_batch(tmp_path: Path) -> None:
    """A replay may come in another order and with other chunks: the digest does not care."""
    rows = bodies(20)
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        table = [columns(rows[:10], queues=1), columns(rows[10:], queues=1, key="k1")]
        store.append_batch(table, request(0))
        assert store.append_batch(table[::-1], request(0)).status == "known"


def test_changed_rows_are_a_conflict(tmp_path: Path) -> None:
    """Every other sink would lose these rows in silence."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(20)), request(0))
        with pytest.raises(BatchConflictError, match="onReplayMismatch=skip") as caught:
            store.append_batch(columns(bodies(20, start=1)), request(0))
        assert (caught.value.app_id, caught.value.version) == ("app", 0)
        skipped = store.append_batch(columns(bodies(21)), request(0, on_replay_mismatch="skip"))
        assert skipped.status == "skipped"
        assert len(read_all(store)) == 10


def test_an_older_version_is_a_regression(tmp_path: Path) -> None:
    """Spark went on from another checkpoint; skipping would lose data."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for version in (0, 1, 5):
            store.append_batch(columns(bodies(4)), request(version, on_lost_batches="continue"))
        with pytest.raises(VersionRegressionError, match="version 3 is not in the store"):
            store.append_batch(columns(bodies(4)), request(3))
        assert store.append_batch(columns(bodies(4)), request(3, on_version_regression="skip")).status == "skipped"


def test_a_gap_in_sparks_batch_ids_is_lost_batches(tmp_path: Path) -> None:
    """From Spark's batch id only: versions a user sets must grow, no more."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(4)), request(0))
        with pytest.raises(LostBatchesError, match="versions 1 to 4"):
            store.append_batch(columns(bodies(4)), request(5))
        assert store.append_batch(columns(bodies(4)), request(5, on_lost_batches="continue")).status == "appended"
        store.append_batch(columns(bodies(4)), request(20260101, app="daily", source="user"))
        assert (
            store.append_batch(columns(bodies(4)), request(20260103, app="daily", source="user")).status == "appended"
        )


def test_empty_batches_count(tmp_path: Path) -> None:
    """A BATCH record without data: the next version has no gap."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        result = store.append_batch([], request(0))
        assert (result.status, result.row_count) == ("appended", 0)
        assert store.append_batch([], request(0)).status == "known"
        assert store.append_batch(columns(bodies(4)), request(1)).status == "appended"
    assert verify(tmp_path / "s").ok


def test_without_app_id_nothing_is_remembered(tmp_path: Path) -> None:
    """A plain batch write is there as often as it is written."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for _ in range(2):
            assert store.append_batch(columns(bodies(4))).status == "appended"
        assert len(read_all(store)) == 4
        assert store.writer.journal.app_ids() == []


def test_the_batch_record_says_what_is_in_the_batch(tmp_path: Path) -> None:
    """Ranges, end, rows, flush mode, ids: what recovery and replays go by."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(3)), request(0))
        result = store.append_batch(columns(bodies(5), queues=2), BatchRequest("app", 1, "spark", "query-7"))
        batch = read_batch(store.writer.log, result.physical_offset)
        assert batch is not None
        assert (batch.app_id, batch.version, batch.query_id, batch.store_id) == ("app", 1, "query-7", store.store_id)
        assert (batch.end, batch.row_count, batch.queue_offset) == (result.end, 5, 1)
        assert batch.ranges == {"t": [(0, 2, 3), (1, 1, 2)]}
        assert len(batch.crcs) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(6, 3000), min_size=1, max_size=60),
    queues=st.integers(1, 5),
    before=st.integers(0, 3000),
    data=st.data(),
)
def test_batches_over_segments(tmp_path: Path, sizes: list[int], queues: int, before: int, data: st.DataObject) -> None:
    """Batches of any shape at any alignment, over many segments, in several chunks: whole, in order, and the files
    hold.
    """
    root = Path(tempfile.mkdtemp(dir=tmp_path)) / "s"
    rows = [f"{i:06d}".encode() + bytes([65 + i % 26]) * (size - 6) for i, size in enumerate(sizes)]
    cut = data.draw(st.integers(0, len(rows)))
    ids = [i % queues for i in range(len(rows))]
    with MessageStore.open(root, SMALL.replace(mapped_file_size_commit_log=8192, max_message_size=4000)) as store:
        store.put_message(Message("other", b"x" * before, queue_id=0))
        parts = [columns(rows[:cut], queue_ids=ids[:cut]), columns(rows[cut:], queue_ids=ids[cut:])]
        result = store.append_batch([p for p in parts if p.row_count], request(0))
        assert result.row_count == len(rows)
        for queue in range(queues):
            assert read_all(store, queue_id=queue) == [r for r, q in zip(rows, ids, strict=True) if q == queue]
    report = verify(root)
    assert report.ok, report.findings[:3]
    assert report.record_count == len(rows) + 2


class CountingDisk(Disk):
    """Counts syncs, and can run out of space."""

    def __init__(self) -> None:
        self.syncs: list[str] = []
        self.full_after: int | None = None
        self.fail_sync = False

    def fdatasync(self, file: File) -> None:
        self.syncs.append(file.path)
        if self.fail_sync:
            raise OSError(errno.EIO, "Input/output error", file.path)
        super().fdatasync(file)

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        if self.full_after is not None and "commitlog" in file.path:
            self.full_after -= 1
            if self.full_after < 0:
                raise StoreFullError(f"{file.path}: no room", path=file.path, needed=len(data), free=0)
        super().pwrite(file, data, position)


@pytest.mark.parametrize("queues", [1, 8, 300])
def test_two_syncs_a_batch(tmp_path: Path, queues: int) -> None:
    """One for the segment, one for the head, however many queues there are."""
    disk = CountingDisk()
    config = StoreConfig(
        mapped_file_size_commit_log=1 << 22, max_hash_slot_num=64, max_index_num=5000, clean_interval="1h"
    )
    with MessageStore.open(tmp_path / "s", config, disk=disk) as store:
        store.create_topic("t", 300)
        store.append_batch(columns(bodies(600), queues=queues), request(0))
        for version in range(1, 4):
            disk.syncs.clear()
            store.append_batch(columns(bodies(600), queues=queues), request(version))
            assert [Path(p).parent.name for p in disk.syncs] == ["commitlog", "commitlog"]


@pytest.mark.parametrize("writes", range(4))
def test_a_full_disk_leaves_nothing(tmp_path: Path, writes: int) -> None:
    """No room at any write before the commit point: nothing of the batch is in the log, and the next append works."""
    disk = CountingDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.append_batch(columns(bodies(5)), request(0))
        end = store.writer.end
        disk.full_after = writes
        with pytest.raises((StoreFullError, StorePoisonedError)) as caught:
            store.append_batch(columns(bodies(200)), request(1))
        if caught.type is StorePoisonedError:
            pytest.skip("this write is the head: the commit point")
        disk.full_after = None
        assert store.writer.end == end
        assert not any(store.writer.log.read(end.physical_offset, 5000))
        assert store.append_batch(columns(bodies(200)), request(1)).status == "appended"
        assert len(read_all(store)) == 103
    assert verify(tmp_path / "s").ok


def test_a_failed_sync_poisons(tmp_path: Path) -> None:
    """After a failed sync nothing is acknowledged or synced again until the store is opened anew."""
    disk = CountingDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    store.append_batch(columns(bodies(5)), request(0))
    disk.fail_sync = True
    with pytest.raises(StorePoisonedError, match="open it again"):
        store.append_batch(columns(bodies(5)), request(1))
    disk.fail_sync = False
    syncs = len(disk.syncs)
    with pytest.raises(StorePoisonedError):
        store.append_batch(columns(bodies(5)), request(1))
    with pytest.raises(StorePoisonedError):
        store.put_message(Message("t", b"x", queue_id=0))
    store.close()
    assert len(disk.syncs) == syncs
    with MessageStore.open(tmp_path / "s", SMALL) as again:
        assert again.report is not None and again.report.reason == "a writer crashed"
        assert again.append_batch(columns(bodies(5)), request(1)).status == "appended"


def test_too_large_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    """A record that fits in no segment, and a BATCH record that names too many queues."""
    config = SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=1 << 20)
    with MessageStore.open(tmp_path / "s", config) as store:
        store.create_topic("t", 1000)
        with pytest.raises(MessageIllegalError, match="the room in a segment"):
            store.append_batch(columns([b"x" * 5000]), request(0))
        with pytest.raises(MessageIllegalError, match="names 500 queues"):
            store.append_batch(columns(bodies(500), queues=500), request(0))
        assert store.writer.end.physical_offset == 0
    assert not list((tmp_path / "s" / "commitlog").glob("*"))


def test_bad_topics_and_queues_are_refused(tmp_path: Path) -> None:
    """The BATCH topic, a queue that the topic does not have, a topic that may not be made."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        with pytest.raises(MessageIllegalError, match="rmq_sys_spark_sink"):
            store.append_batch(columns(bodies(2), topic="rmq_sys_spark_sink"), request(0))
        with pytest.raises(MessageIllegalError, match=r"TBW102.*reserved"):
            store.append_batch(columns(bodies(2), topic="TBW102"), request(0))
        with pytest.raises(MessageIllegalError, match=r"SCHEDULE_TOPIC_XXXX.*reserved"):
            store.put_messages(MessageBatch(columns(bodies(2), topic="SCHEDULE_TOPIC_XXXX", queues=1)))
        with pytest.raises(MessageIllegalError, match="queue id: found 8"):
            store.append_batch(columns(bodies(9), queues=9), request(0))
        with pytest.raises(MessageIllegalError, match="autoCreateTopic"):
            store.append_batch(columns(bodies(2), topic="new"), BatchRequest("app", 0, auto_create_topic=False))
        assert store.writer.end.physical_offset == 0


def test_requests_are_checked() -> None:
    """Options name what was found and what is allowed."""
    with pytest.raises(ConfigError, match="on_lost_batches: found 'no'; allowed is fail or continue"):
        BatchRequest(on_lost_batches="no")
    with pytest.raises(ConfigError, match="txnVersion: found -1"):
        BatchRequest(app_id="a", version=-1)
    with pytest.raises(MessageIllegalError, match="txnAppId"):
        BatchRequest(app_id="a b")


def test_async_is_said_in_state_before_the_first_byte(tmp_path: Path) -> None:
    """An ASYNC byte in the log means that a unit proves nothing: `state` says so, synced, before it is written."""
    disk = CountingDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.append_batch(columns(bodies(5)), request(0))
        disk.syncs.clear()
        store.append_batch(columns(bodies(5)), request(1, flush_disk_type=ASYNC_FLUSH))
        assert [Path(p).name for p in disk.syncs] == ["state"]
        assert store.writer.state.asynchronous
        store.writer.clean_end.move()
        assert not store.writer.state.asynchronous


def test_a_batch_after_plain_puts(tmp_path: Path) -> None:
    """Plain puts that wait for their sync are published before a batch begins; order in the queue is order of calls."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"first-", queue_id=0, wait_store_msg_ok=False))
        store.append_batch(columns([b"second"], queues=1), request(0))
        store.put_message(Message("t", b"third-", queue_id=0))
        assert read_all(store) == [b"first-", b"second", b"third-"]
        assert np.all(store.view.units("t", 0, 0, 3)["size"] > 0)


@pytest.mark.parametrize("version", [4.2, 4.0, True, "4", None])
def test_a_version_that_is_no_whole_number_is_refused(version: object) -> None:
    """4.2 was kept as 4, so the same batch was appended again when it came again."""
    with pytest.raises(ConfigError, match="allowed is a whole number"):
        BatchRequest(app_id="app", version=version)  # type: ignore[arg-type]
    assert BatchRequest(app_id="app", version=np.int64(4)).version == 4  # type: ignore[arg-type]
