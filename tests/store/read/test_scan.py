"""Scans: topics as one frame, with bounds that leave out what they can before reading, and each message once."""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from crash.imitate import Broker
from messagestore import (
    ConfigError,
    CorruptionError,
    Message,
    MessageIllegalError,
    MessageStore,
    OffsetOutOfRangeError,
    StoreConfig,
)
from messagestore.files.disk import Disk
from small import SMALL, SMALL_POOL, ClockDisk, bodies, columns, filled

HOUR_MS = 3_600_000
FIRST_MS = 1_800_000_000_000


def time_of(ms: int) -> datetime:
    return datetime.fromtimestamp(ms // 1000, UTC) + timedelta(milliseconds=ms % 1000)


def numbers(reader: pa.RecordBatchReader) -> list[tuple[int, int]]:
    table = reader.read_all()
    return list(zip(table["queueId"].to_pylist(), table["queueOffset"].to_pylist(), strict=True))


class CountingDisk(Disk):
    """Counts the bytes that are read from the log."""

    def __init__(self) -> None:
        self.log_bytes = 0

    def pread(self, file: Any, size: int, position: int) -> bytes:
        data = super().pread(file, size, position)
        self.log_bytes += len(data) if "/commitlog/" in file.path else 0
        return data

    def pread_into(self, file: Any, buffer: memoryview, position: int) -> int:
        count = super().pread_into(file, buffer, position)
        self.log_bytes += count if "/commitlog/" in file.path else 0
        return count


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        for number, body in enumerate(bodies(200)):
            tag = ("x", "y", "z")[number % 3]
            store.put_message(Message("t", body, queue_id=number % 4, keys=[f"k{number}"], tags=tag))
        yield store


def test_a_topic_is_a_frame_with_the_messages_of_all_queues_in_order(store: MessageStore) -> None:
    table = store.scan("t").read_all()
    table.validate(full=True)
    assert table["queueOffset"].to_pylist() == [*range(50)] * 4
    assert table["queueId"].to_pylist() == [number // 50 for number in range(200)]
    assert sorted(table["body"].to_pylist()) == bodies(200)
    assert table.schema.field("storeTimestamp").type == pa.timestamp("us", tz="UTC")
    assert table["keys"][0].as_py() == ["k0"]


@pytest.mark.parametrize("left_out", [{}, {"tags": "none"}])
def test_a_frame_without_a_row_has_a_batch(store: MessageStore, left_out: dict[str, str]) -> None:
    """`polars.from_arrow` refuses a reader without one: "Must pass schema, or at least one RecordBatch"."""
    reader = store.scan("empty", **left_out)
    (batch,) = reader
    assert (batch.num_rows, batch.schema) == (0, reader.schema)


def test_a_scan_ends_where_the_store_ended_when_it_was_made(store: MessageStore) -> None:
    """A batch across queues that comes between the scan and its reading is left out of every queue."""
    frame = store.scan("t", columns=["body"])
    store.append_batch(columns([b"late"] * 40, queues=4))
    assert frame.read_all().num_rows == 200
    assert store.scan("t", columns=["body"]).read_all().num_rows == 240


def test_two_scans_are_read_by_turns_and_by_other_threads(store: MessageStore) -> None:
    """DuckDB joins two frames so, from a thread of its own."""
    frames = [store.scan("t"), store.scan("t", tags="x")]
    found: list[list[int]] = [[], []]

    def read(number: int) -> None:
        for batch in frames[number]:
            found[number] += batch["queueOffset"].to_pylist()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in found] == [200, 67]


def test_a_frame_outlives_its_store_and_gives_its_files_back(tmp_path: Path) -> None:
    root = filled(tmp_path / "store", 40)
    before = len(os.listdir("/proc/self/fd"))
    with MessageStore.open_read_only(root, SMALL) as reader:
        frame, unread = reader.scan("t"), reader.scan("t")
    assert frame.read_all().num_rows == 40
    del frame, unread
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_frame_that_is_not_read_to_its_end_ends_its_thread(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store") as store:
        store.append_batch(columns(bodies(100_000), queues=1))
        frame = store.scan("t")
        assert frame.read_next_batch().num_rows == 16_384
        assert any(thread.name == "messagestore-ahead" for thread in threading.enumerate())
        del frame
        assert not any(thread.name == "messagestore-ahead" for thread in threading.enumerate())


def test_what_is_only_in_the_pool_of_a_session_is_in_its_frame(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL_POOL) as store:
        store.put_message(Message("t", b"one", queue_id=0))
        assert store.scan("t").read_all()["body"].to_pylist() == [b"one"]


# ---- bounds


def test_bounds_by_offset(store: MessageStore) -> None:
    assert numbers(store.scan("t", start=48)) == [(queue, n) for queue in range(4) for n in (48, 49)]
    assert numbers(store.scan("t", end=1)) == [(queue, 0) for queue in range(4)]
    assert numbers(store.scan("t", start=7, end=7)) == []
    assert numbers(store.scan("t", start=50, end=1000)) == []


def test_bounds_by_queue_leave_other_queues_whole(store: MessageStore) -> None:
    found = numbers(store.scan("t", start={("t", 0): 48, ("t", 1): 50}, end={("t", 2): 3}))
    assert found == [(0, 48), (0, 49), *((2, n) for n in range(3)), *((3, n) for n in range(50))]


def test_bounds_by_time_are_exact_to_the_millisecond(tmp_path: Path) -> None:
    disk = ClockDisk(FIRST_MS)
    with MessageStore.open(tmp_path / "store", SMALL, disk=disk) as store:
        for number in range(20):
            disk.now_ms = FIRST_MS + number * HOUR_MS
            store.put_message(Message("t", b"%d" % number, queue_id=0))

        def found(**bounds: datetime) -> list[int]:
            return [int(body) for body in store.scan("t", columns=["body"], **bounds).read_all()["body"].to_pylist()]

        at = time_of(FIRST_MS + 7 * HOUR_MS)
        ms = timedelta(milliseconds=1)
        assert found(start=at) == [*range(7, 20)]
        assert found(start=at + ms) == [*range(8, 20)]
        assert found(start=at - ms / 2) == [*range(7, 20)]
        assert found(start=at + ms / 2) == [*range(8, 20)]
        assert found(end=at) == [*range(7)]
        assert found(end=at + ms / 2) == [*range(8)]
        assert found(start=at, end=at + timedelta(hours=2)) == [7, 8]
        assert found(start=at.astimezone(timezone(timedelta(hours=-5))), end=at + ms) == [7]


def test_bounds_by_time_miss_nothing_where_a_brokers_clock_was_set_back(tmp_path: Path) -> None:
    """Half an hour back: the messages after that are newer in the queue and older in time."""
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, SMALL)
    times_ms = [FIRST_MS + number * 60_000 for number in (*range(40), *range(10, 50))]
    for time_ms in times_ms:
        broker.put("t", b"%d" % time_ms, 0, store_ms=time_ms)
    broker.close()
    start_ms, end_ms = FIRST_MS + 15 * 60_000, FIRST_MS + 35 * 60_000
    with MessageStore.open_read_only(root, SMALL) as store:
        frame = store.scan("t", start=time_of(start_ms), end=time_of(end_ms)).read_all()
    assert [int(body) for body in frame["body"].to_pylist()] == [ms for ms in times_ms if start_ms <= ms < end_ms]


def test_bounds_and_tags_and_keys_leave_records_unread(tmp_path: Path) -> None:
    root, disk = tmp_path / "store", CountingDisk()
    with MessageStore.open(root, StoreConfig(mapped_file_size_commit_log=1 << 20)) as store:
        rows = pa.table({"body": bodies(20_000, 500), "keys": [f"k{n}" for n in range(20_000)]})
        tags = ["rare" if number % 1000 == 0 else "often" for number in range(20_000)]
        store.append_batch(rows.append_column("tags", pa.array(tags)), topic="t", queue_id=0)

    with MessageStore.open_read_only(root, disk=disk) as reader:

        def read(rows: int, **bounds: Any) -> int:
            before = disk.log_bytes
            assert reader.scan("t", columns=["body"], **bounds).read_all().num_rows == rows
            return disk.log_bytes - before

        whole = read(20_000)
        assert whole > 20_000 * 500
        assert read(100, start=100, end=200) < whole / 50
        assert read(20, tags="rare") < whole / 10
        assert read(2, keys=["k77", "k12000"]) < whole / 4
        assert read(0, start=datetime(2200, 1, 1, tzinfo=UTC)) < whole / 50


def test_retention_that_took_the_next_message_is_an_error_that_counts(tmp_path: Path) -> None:
    root = filled(tmp_path / "store", 400)
    for segment in sorted((root / "commitlog").iterdir())[:2]:
        segment.unlink()
    with MessageStore.open_read_only(root, SMALL) as reader:
        first = reader.min_offset("t", 0)
        assert first > 0
        assert numbers(reader.scan("t", end=first + 1))[0] == (0, first)
        with pytest.raises(OffsetOutOfRangeError, match=f"t/0: {first} messages from 0 on are gone"):
            reader.scan("t", start=0).read_all()


# ---- what is compared in the records


def test_tags_with_the_same_hash_are_told_apart(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        for tag in ("Aa", "BB", None):
            store.put_message(Message("t", b"%r" % tag, queue_id=0, tags=tag))
        assert numbers(store.scan("t", tags="BB")) == [(0, 1)]
        assert numbers(store.scan("t", tags=["Aa", "BB"])) == [(0, 0), (0, 1)]
        assert numbers(store.scan("t", tags=["CC"])) == []


def test_keys_are_compared_whole_and_unique_keys_count(store: MessageStore) -> None:
    assert numbers(store.scan("t", keys="k7")) == [(3, 1)]
    assert numbers(store.scan("t", keys=["k7", "k8", "none"], end=2)) == [(3, 1)]
    store.append_batch(pa.table({"body": ["b"], "queue_id": [2], "unique_key": ["u1"]}), topic="t")
    assert numbers(store.scan("t", keys=["u1"])) == [(2, 50)]
    assert numbers(store.scan("t", keys="k7", tags="z")) == []


def test_a_filter_uses_columns_that_are_not_given(store: MessageStore) -> None:
    frame = store.scan("t", columns=["body"], filter=(pc.field("queueId") == 1) & (pc.field("tags") == "y"))
    table = frame.read_all()
    assert table.schema.names == ["body"]
    assert table["body"].to_pylist() == [body for n, body in enumerate(bodies(200)) if n % 4 == 1 and n % 3 == 1]
    assert store.scan("t", columns=["tags"], filter=pc.field("tags") == "none").read_all().num_rows == 0


def test_rows_that_are_few_come_in_few_batches(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store") as store:
        store.create_topic("t", 300)
        store.append_batch(columns(bodies(9_000), queues=300))
        batches = list(store.scan("t", filter=pc.field("queueOffset") >= 15))
        assert sum(batch.num_rows for batch in batches) == 4_500
        assert len(batches) <= 3


def test_compressed_bodies_are_plain_and_a_bad_one_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, SMALL)
    broker.put("t", zlib.compress(b"plain" * 10), 0, sys_flag=0x301)
    broker.put("t", b"nonsense", 1, sys_flag=0x301)
    broker.close()
    with MessageStore.open_read_only(root, SMALL) as store:
        assert store.scan("t", end={("t", 1): 0}).read_all()["body"].to_pylist() == [b"plain" * 10]
        with pytest.raises(CorruptionError, match="a compressed body of message 0 of t/1"):
            store.scan("t").read_all()


def test_a_damaged_record_is_an_error_that_names_file_and_offset(tmp_path: Path) -> None:
    root = filled(tmp_path / "store", 10)
    segment = root / "commitlog" / ("0" * 20)
    data = segment.read_bytes()
    place = data.index(bodies(10)[4])
    segment.write_bytes(data[:place] + b"!" + data[place + 1 :])
    with MessageStore.open_read_only(root, SMALL) as reader:
        frame = reader.scan("t", columns=["body"])
        with pytest.raises(CorruptionError, match="commitlog"):
            frame.read_all()


# ---- arguments


def test_topics_by_name_and_by_pattern(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        for topic in ("orders.eu", "orders.us", "other", "%DLQ%orders"):
            if "." not in topic:
                store.put_message(Message(topic, topic.encode(), queue_id=0))
        store.put_message(Message("orders-eu", b"orders-eu", queue_id=0))

        def found(topics: Any) -> list[bytes]:
            return store.scan(topics, columns=["body"]).read_all()["body"].to_pylist()

        assert found(["other", "orders-eu", "other"]) == [b"other", b"orders-eu"]
        assert found(re.compile(".*orders.*")) == [b"orders-eu"]
        assert found("%DLQ%orders") == [b"%DLQ%orders"]
        assert found("nobody") == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topics": []}, "topics: found \\[\\]; allowed is text, or a list"),
        ({"topics": 7}, "topics: found 7"),
        ({"start": "earliest"}, "start: found 'earliest'; allowed is a queue offset, a datetime with a time zone"),
        (
            {"start": datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)},
            "start: found 2026-01-01 00:00:00 without a time zone",
        ),
        ({"end": -1}, "end: found -1"),
        ({"end": True}, "end: found True"),
        ({"start": {"t": 5}}, "start: found 't'; allowed is"),
        ({"start": {("t", 0): -5}}, "start: found -5"),
        ({"tags": []}, "tags: found \\[\\]"),
        ({"keys": [b"k"]}, "keys: found b'k'"),
        ({"columns": []}, "columns: found none; give at least one of topic"),
        ({"columns": ["offset"]}, "columns: found 'offset'; allowed are topic, queueId"),
        ({"filter": "queueId = 1"}, "filter: found str; allowed is Expression"),
        (
            {"filter": pc.field("offset") == 1},
            "filter: found .offset == 1., which cannot be used: .* The columns are topic, queueId",
        ),
        ({"filter": pc.field("body") > 5}, "filter: found .* which cannot be used"),
    ],
)
def test_wrong_arguments_have_their_sentence(store: MessageStore, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        store.scan(**{"topics": "t", **arguments})


def test_a_topic_that_leads_out_of_the_store_is_refused(store: MessageStore) -> None:
    with pytest.raises(MessageIllegalError):
        store.scan("../t")
