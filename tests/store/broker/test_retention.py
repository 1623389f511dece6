"""Retention: which segments go and which stay, what is left of queues, batches and readers, and what a kill leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from crash.harness import die
from crash.imitate import Process, another_boot, commit
from crash.simdisk import KillDisk, Killed
from messagestore import (
    BatchConflictError,
    BatchRequest,
    ConfigError,
    LostBatchesError,
    Message,
    MessageStore,
    OffsetOutOfRangeError,
    PutMessageResult,
    QueryConflictError,
    StoreError,
    StoreFullError,
    VersionRegressionError,
    deliver_delayed,
)
from messagestore.batches.append import Chunks, append_batch
from messagestore.broker.expired import Expiry, last_delete_time_ms
from messagestore.files.consume_queue import ConsumeQueue
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.delay_offsets import DelayOffsets
from messagestore.files.disk import Disk
from messagestore.format.config import ASYNC_FLUSH, StoreConfig
from messagestore.format.record_columns import encode
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from messagestore.read import queue_records
from messagestore.session import AttachedStore
from messagestore.spi.local import LOCAL_STORES
from small import SMALL, ClockDisk, bodies, columns, read_all, stop_periodic

CONFIG = SMALL.replace(attach_timeout="1h")
SEGMENT = SMALL.mapped_file_size_commit_log
HOUR_MS = 3_600_000


def request(version: int, query_id: str | None = "query-1", **more: object) -> BatchRequest:
    return BatchRequest(app_id="app", version=version, version_source="spark", query_id=query_id, **more)


def rows(version: int, count: int = 5) -> object:
    return columns(bodies(count, start=100 * version), topic="batches")


def put(store: MessageStore, count: int, topic: str = "busy", queue_id: int = 0) -> list[int]:
    """Put large messages; their physical offsets."""
    return [
        store.put_message(
            Message(topic, b"%05d" % number + b"." * 1000, queue_id=queue_id, keys=[f"{topic}{number}"])
        ).physical_offset
        for number in range(count)
    ]


def segments(root: Path) -> list[int]:
    return sorted(int(path.name) for path in (root / "commitlog").iterdir())


def age(root: Path, hours: float, names: list[int] | None = None) -> None:
    """Let segments look as if they were last written to so many hours ago."""
    then = time.time() - hours * 3600
    for start in segments(root) if names is None else names:
        os.utime(root / "commitlog" / f"{start:020d}", (then, then))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of a few segments: a queue with messages in all of them, one that ends early, and two batches early on."""
    root = tmp_path / "store"
    with MessageStore.open(root, CONFIG) as store:
        store.append_batch(rows(0), request(0))
        store.append_batch(rows(1), request(1, origin={"next": 7}))
        put(store, 20, "early")
        put(store, 60)
    assert len(segments(root)) >= 5
    return root


# ---- what goes and what stays


def test_segments_go_that_are_old_enough_and_queues_begin_where_the_log_begins(root: Path) -> None:
    """The oldest segments, and the queue and index files that lead only to them. A queue without a message that is left
    keeps its number."""
    all_segments, queue_files = segments(root), len(list((root / "consumequeue").rglob("0*")))
    age(root, 30, all_segments[:3])
    with MessageStore.open(root, CONFIG) as store:
        before = read_all(store, "busy", 0)
        deleted = store.delete_expired_files(reserved_hours=24)
        assert [int(Path(path).name) for path in deleted.segments] == all_segments[:3]
        assert deleted.size == 3 * SEGMENT
        assert "was written to" in deleted.kept
        assert deleted.min_offset == all_segments[3] == store.writer.log.min_offset
        assert deleted.queue_file_count == queue_files - len(list((root / "consumequeue").rglob("0*"))) > 0
        assert (store.min_offset("early", 0), store.max_offset("early", 0)) == (20, 20)
        low = store.min_offset("busy", 0)
        assert 0 < low < 60
        left = [body for batch in store.read("busy", 0, low, columns=("body",)) for body in batch["body"].to_pylist()]
        assert left == before[low:]
        assert store.put_message(Message("early", b"next", queue_id=0)).queue_offset == 20
    assert segments(root)[0] == all_segments[3]
    assert verify(root, CONFIG).findings == []


def test_two_runs_at_once_do_not_take_each_others_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`delete_expired_files` beside the session's own thread: FileNotFoundError, of a queue file that it had listed."""
    age(root, 30, segments(root)[:3])
    listed, others = threading.Event(), list[threading.Thread]()
    count_below = ConsumeQueue.count_below

    def slowly(queue: ConsumeQueue, physical_offset: int) -> int:
        if not listed.is_set():
            listed.set()
            others.append(threading.Thread(target=store.delete_expired_files, kwargs={"reserved_hours": 24}))
            others[0].start()
            others[0].join(0.5)  # it has to wait until this run is over
        return count_below(queue, physical_offset)

    with MessageStore.open(root, CONFIG) as store:
        monkeypatch.setattr(ConsumeQueue, "count_below", slowly)
        deleted = store.delete_expired_files(reserved_hours=24)
        others[0].join()
    assert len(deleted.segments) == 3 and deleted.queue_file_count > 0
    assert verify(root, CONFIG).findings == []


def test_without_conditions_the_hours_are_those_of_the_settings(root: Path) -> None:
    age(root, 50, segments(root)[:2])
    with MessageStore.open(root, CONFIG) as store:
        assert store.delete_expired_files().segments == ()  # 72 hours
    with MessageStore.open(root, CONFIG.replace(file_reserved_time=48, clean_resource_interval=86_400_000)) as store:
        stop_periodic(store)
        store.delete_expired_files()
    assert len(segments(root)) >= 3
    assert segments(root)[0] == 2 * SEGMENT


def test_the_last_segment_and_that_of_the_clean_end_stay(root: Path) -> None:
    with MessageStore.open(root, CONFIG) as store:
        end, anchor = store.writer.end.physical_offset, store.writer.state.anchor_position
        deleted = store.delete_expired_files(at_once=True)
        assert deleted.min_offset == end // SEGMENT * SEGMENT <= anchor
        assert "last one" in deleted.kept
        assert store.delete_expired_files(at_once=True).segments == ()
    assert verify(root, CONFIG).findings == []


def test_what_is_not_known_to_be_synced_stays(root: Path) -> None:
    """A store in use, looked at from outside: nothing above the clean end, nor the segment of the record before it."""
    with MessageStore.open(root, CONFIG.replace(clean_interval="1h")) as store:
        state = store.writer.state
        seen = operator.expired(str(root), CONFIG, at_once=True)
        assert seen.min_offset <= state.anchor_position
        assert seen.message_count == sum(store.view.search_physical(t, q, seen.min_offset) for t, q in
                                         (("early", 0), ("busy", 0), ("batches", 0), ("batches", 1)))  # fmt: skip
        assert segments(root)[0] == 0, "a look deletes nothing"


def test_segments_before_a_time_or_a_place(root: Path) -> None:
    all_segments = segments(root)
    with MessageStore.open(root, CONFIG) as store:
        assert store.delete_expired_files(before_offset=2 * SEGMENT - 1).min_offset == SEGMENT
        assert store.delete_expired_files(before_offset=SEGMENT).segments == ()
        first = store.view.files.commit_log.head(3 * SEGMENT)
        deleted = store.delete_expired_files(before_ms=int(first["store_timestamp_ms"]))
        assert all(int(store.view.files.commit_log.head(s)["store_timestamp_ms"]) >= 0 for s in segments(root)[:-1])
        assert deleted.min_offset <= 3 * SEGMENT
        assert store.delete_expired_files(before_ms=0).segments == ()
        assert store.delete_expired_files(before_ms=1 << 45).min_offset == all_segments[-1]


def test_an_idle_gap_counts_to_the_time_of_the_last_message(tmp_path: Path) -> None:
    """The messages of a segment are from Monday, the next one begins on Friday: what is before Wednesday goes."""
    root, disk = tmp_path / "store", ClockDisk(1_700_000_000_000)
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        put(store, 10)
        disk.now_ms += 96 * HOUR_MS
        put(store, 30)
        assert len(store.delete_expired_files(before_ms=1_700_000_000_000 + 48 * HOUR_MS).segments) == 0
        put(store, 20)
        size = store.writer.log.segment_size
        head = store.writer.log.head(size)
        assert int(head["store_timestamp_ms"]) > 1_700_000_000_000
        assert store.delete_expired_files(before_ms=disk.now_ms + 1).min_offset > 0


def test_a_segment_before_one_of_a_clock_that_was_set_back_keeps_its_latest_messages(tmp_path: Path) -> None:
    """The next segment begins two hours earlier, which says nothing of what is in this one."""
    root, disk = tmp_path / "store", ClockDisk(1_700_000_000_000)
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        put(store, 5)
        disk.now_ms += 2 * HOUR_MS
        while store.writer.end.physical_offset < SEGMENT - 1500:
            put(store, 1)
    disk.now_ms -= 2 * HOUR_MS
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        while store.writer.end.physical_offset < 3 * SEGMENT:
            put(store, 1)
        following = int(store.writer.log.head(SEGMENT)["store_timestamp_ms"])
        limit_ms = disk.now_ms + HOUR_MS
        assert following < limit_ms, "the clock went back"
        deleted = store.delete_expired_files(before_ms=limit_ms)
        assert deleted.segments == ()
        assert "it holds messages that were stored at" in deleted.kept


def test_a_consumer_group_keeps_what_it_has_not_read(root: Path) -> None:
    """Its segment and all later ones stay, and the reason names it; an abandoned group can be left out."""
    with MessageStore.open_read_only(root, CONFIG) as store:
        physical = store.get_message("busy", 0, 30, 1).messages[0].physical_offset
    publish_offsets(str(root), "delays", {("busy", 0): 30})
    publish_offsets(str(root), "ready", {("early", 0): 20})
    with MessageStore.open(root, CONFIG) as store:
        deleted = store.delete_expired_files(reserved_hours=0)
        assert deleted.min_offset == physical // SEGMENT * SEGMENT > 0
        assert "consumer group delays has not read busy/0 from message 30 on" in deleted.kept
        again = store.delete_expired_files(reserved_hours=0, ignored_groups=["delays"])
        assert again.min_offset > physical
        assert again.unread_groups == ()


def test_a_retried_message_stays_although_its_group_has_no_place_in_its_retry_topic(root: Path) -> None:
    """A group has no offset in its retry topic before it has read the first message there: it was deleted unread."""
    with MessageStore.open(root, CONFIG) as store:
        place = store.put_message(Message("%RETRY%delays", b"precious", queue_id=0)).physical_offset
        put(store, 40)
        store.writer.clean_end.move()
        publish_offsets(str(root), "delays", {("busy", 0): store.max_offset("busy", 0)})
        publish_offsets(str(root), "others", {("early", 0): 20})

        deleted = store.delete_expired_files(reserved_hours=0)
        assert deleted.min_offset == place // SEGMENT * SEGMENT
        assert "consumer group delays has not read %RETRY%delays/0 from message 0 on" in deleted.kept

        behind = {(row["group"], row["topic"]): row["lag"] for row in operator.groups(str(root), CONFIG)[0]}
        assert behind == {
            ("delays", "busy"): 0,
            ("delays", "%RETRY%delays"): 1,
            ("others", "early"): 0,
        }
        with contextlib.closing(LOCAL_STORES.reader(str(root), CONFIG)) as reader:
            lags, _ = reader.group_lag("delays")
        assert [(row["topic"], row["lag"]) for row in lags] == [("%RETRY%delays", 1), ("busy", 0)]

        publish_offsets(str(root), "delays", {("%RETRY%delays", 0): 1})
        assert store.delete_expired_files(reserved_hours=0).min_offset > place


def test_a_delayed_message_that_was_not_delivered_keeps_its_segment(root: Path) -> None:
    with MessageStore.open(root, CONFIG.replace(file_reserved_time=-1)) as store:
        store.put_message(Message("later", b"x", queue_id=0, delay_time_level=18))
        place = store.writer.end.physical_offset
        put(store, 40)
        store.writer.clean_end.move()
        deleted = store.delete_expired_files(reserved_hours=0)
        assert deleted.min_offset <= place
        assert "the delivery of delayed messages has not read SCHEDULE_TOPIC_XXXX/17 from message 0 on" in deleted.kept
        assert store.delete_expired_files(at_once=True).min_offset > place


def test_gc_says_that_delivered_messages_were_not_delivered(root: Path) -> None:
    """`delayOffset.json` follows the log only every ten seconds. Deletion in between looked there and not in the log."""
    disk = ClockDisk(1_900_000_000_000)
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        for level in (1, 2):
            store.put_message(Message("later", b"x", queue_id=0, delay_time_level=level))
        put(store, 40)
        disk.now_ms += 1000
        assert deliver_delayed(root, disk=disk).count == 1
        store.flush()
        table = DelayOffsets(disk, str(root))
        assert table.load() == {}
        first = "the delivery of delayed messages has not read SCHEDULE_TOPIC_XXXX/{} from message 0 on"
        foreseen = operator.expired(str(root), CONFIG, before_offset=store.writer.end.physical_offset)
        assert foreseen.kept == first.format(1)  # level 2, which waits for four more seconds
        disk.now_ms += 4000
        assert deliver_delayed(root, disk=disk).count == 1
        put(store, 10)
        store.flush()

        place, end = store.writer.log.segment_size, store.writer.end.physical_offset
        foreseen = operator.expired(str(root), CONFIG, before_offset=end)
        deleted = store.delete_expired_files(before_offset=end)
        assert deleted.min_offset >= foreseen.min_offset > place
        assert "delivery" not in foreseen.kept + deleted.kept
        assert table.load() == {1: 1, 2: 1}
    assert verify(root, CONFIG).findings == []


def test_a_full_disk_does_not_wait_for_a_group_and_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish_offsets(str(root), "delays", {("busy", 0): 30})
    with MessageStore.open(root, CONFIG) as store:
        deleted = store.delete_expired_files(at_once=True)
    assert deleted.unread_groups == ("delays",)
    assert "deleted although consumer group delays has not read busy/0 from message 30 on" in caplog.text


def test_puts_into_a_compacted_topic_are_refused_by_name(root: Path) -> None:
    """With keys and without: a broker's consumers read another file, which only the broker writes."""
    with MessageStore.open(root, CONFIG) as store:
        store.create_topic("latest", 1, attributes={"+cleanup.policy": "compaction"})
        end = store.writer.end.physical_offset
        message = Message("latest", b"x", queue_id=0, keys=["k"])
        for put_it in (
            lambda: store.put_message(message),
            lambda: store.put_message(Message("latest", b"x")),
            lambda: store.put_message(replace(message, delay_time_level=1)),
            lambda: store.half_message(message, "producers"),
            lambda: store.append_batch(columns([b"x"], topic="latest", queues=1)),
        ):
            with pytest.raises(ConfigError, match=r"cleanup\.policy COMPACTION: consumers read it .*DELETE"):
                put_it()
        assert store.writer.end.physical_offset == end
        store.alter_topic("latest", attributes={"cleanup.policy": "DELETE"})
        assert store.put_message(message).is_ok


def test_a_store_with_a_compacted_topic_is_refused_by_name(root: Path) -> None:
    with MessageStore.open(root, CONFIG) as store:
        store.create_topic("latest", 1, attributes={"cleanup.policy": "COMPACTION"})
        with pytest.raises(ConfigError, match=r"cleanup\.policy=COMPACTION for topic latest"):
            store.delete_expired_files(at_once=True)
        assert segments(root)[0] == 0
        store.alter_topic("latest", attributes={"cleanup.policy": "DELETE"})
        assert store.delete_expired_files(at_once=True).segments


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"reserved_hours": -1}, "reserved_hours: found -1"),
        ({"reserved_hours": True}, "reserved_hours: found True"),
        ({"before_ms": 1.5}, "before_ms: found 1.5"),
        ({"before_offset": -1}, "before_offset: found -1"),
        ({"ignored_groups": "delays"}, "ignored_groups: found 'delays'"),
        ({"ignored_groups": None}, "ignored_groups: found None"),
        ({"at_once": 1}, "at_once: found 1"),
    ],
)
def test_wrong_arguments(root: Path, arguments: dict, error: str) -> None:
    with MessageStore.open(root, CONFIG) as store, pytest.raises(ConfigError, match=error):
        store.delete_expired_files(**arguments)
    assert segments(root)[0] == 0


def test_files_of_a_brokers_extension_go_with_their_messages(root: Path) -> None:
    """ConsumeQueueExt: units name places of another file, and what lies a whole file below the first one that stays goes."""
    size, at = 4096, 100
    for topic, count in (("busy", 60), ("early", 20)):
        units = b"".join(path.read_bytes() for path in sorted((root / "consumequeue" / topic / "0").iterdir()))
        for number in range(count):
            address = number * 10 * at - (1 << 63)
            units = units[: 20 * number + 12] + address.to_bytes(8, "big", signed=True) + units[20 * number + 20 :]
        for path in sorted((root / "consumequeue" / topic / "0").iterdir()):
            path.write_bytes(units[int(path.name) : int(path.name) + path.stat().st_size])
        folder = root / "consumequeue_ext" / topic / "0"
        folder.mkdir(parents=True)
        for begin in range(0, count * 10 * at, size):
            (folder / f"{begin:020d}").write_bytes(bytes(size))
        (folder / "notes.txt").write_text("of somebody else")
    (root / "spark" / "ends").unlink()
    with MessageStore.open(root, CONFIG) as store:
        assert store.delete_expired_files(reserved_hours=0).segments
        first = store.min_offset("busy", 0)
        assert first > 10
        assert store.min_offset("early", 0) == 20
    left = sorted(path.name for path in (root / "consumequeue_ext" / "busy" / "0").iterdir())
    wanted = [f"{begin:020d}" for begin in range(0, 60 * 10 * at, size) if begin + size >= first * 10 * at]
    assert left == [*wanted, "notes.txt"]
    assert int(wanted[0]) > 0
    assert (
        len(list((root / "consumequeue_ext" / "early" / "0").iterdir())) == 6
    )  # as in RocketMQ, no unit names a place


# ---- batches outlive their segments


def lose_nothing(root: Path) -> None:
    pass


def lose_journal(root: Path) -> None:
    (root / "spark" / "journal").unlink()


def lose_spark(root: Path) -> None:
    shutil.rmtree(root / "spark")


def lose_spark_and_queue(root: Path) -> None:
    lose_spark(root)
    shutil.rmtree(root / "consumequeue" / "rmq_sys_spark_sink")


LOSSES = [lose_nothing, lose_journal, lose_spark, lose_spark_and_queue]


@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("runs", [1, 3])
def test_a_batch_is_known_after_its_segment_went(root: Path, lose: Callable[[Path], None], runs: int) -> None:
    """Sent again, it is known, with other rows it is refused, and the app goes on; also if the journal is lost, and
    after the restated record was restated itself."""
    for number in range(runs):
        with MessageStore.open(root, CONFIG) as store:
            assert store.delete_expired_files(at_once=True).restated == (("app", 1),)
            put(store, 20, f"more{number}")
    lose(root)
    with MessageStore.open(root, CONFIG) as store:
        end = store.writer.end.physical_offset
        assert store.append_batch(rows(1), request(1)).status == "known"
        with pytest.raises(BatchConflictError):
            store.append_batch(rows(1, 6), request(1))
        with pytest.raises(QueryConflictError):
            store.append_batch(rows(2), request(2, "query-2"))
        with pytest.raises(LostBatchesError):
            store.append_batch(rows(3), request(3))
        with pytest.raises(BatchConflictError, match="topic"):
            store.append_batch(columns(bodies(5, start=100), topic="others"), request(1))
        last = store.last_batch("app")
        assert (last.version, last.query_id, last.row_count, last.origin) == (1, "query-1", 5, {"next": 7})
        assert store.writer.end.physical_offset == end
        assert store.append_batch(rows(2), request(2)).status == "appended"
    assert verify(root, CONFIG).findings == []


def test_a_batch_keeps_its_time_when_its_record_is_written_again(tmp_path: Path) -> None:
    """Also if that happens twice: the time is when Spark wrote the batch, not when retention ran."""
    root, clock = tmp_path / "store", ClockDisk(time.time_ns() // 1_000_000 - 72 * HOUR_MS)
    with MessageStore.open(root, CONFIG, disk=clock) as store:
        store.append_batch(rows(0), request(0))
        stored_ms = clock.now_ms
        for number in range(2):
            put(store, 20, f"more{number}")
            clock.now_ms += HOUR_MS
            assert store.delete_expired_files(at_once=True).restated == (("app", 0),)
    with contextlib.closing(LOCAL_STORES.reader(str(root), CONFIG)) as reader:
        (batch,) = reader.view("batches")[0]
        (figures,) = reader.view("figures")[0]
    assert operator.batch_times(str(root), [batch["physicalOffset"]]) == [stored_ms]
    assert [app["publishedMs"] for app in figures["apps"]] == [stored_ms]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_replaced_query_stays_refused(root: Path, lose: Callable[[Path], None]) -> None:
    with MessageStore.open(root, CONFIG) as store:
        store.append_batch(rows(0), request(0, "query-2", on_new_query="continue"))
        put(store, 20)
        store.delete_expired_files(at_once=True)
    lose(root)
    with MessageStore.open(root, CONFIG) as store:
        assert store.append_batch(rows(0), request(0, "query-2")).status == "known"
        with pytest.raises(QueryConflictError, match="has replaced"):
            store.append_batch(rows(2), request(2, "query-1", on_new_query="continue"))


@pytest.mark.parametrize("lose", LOSSES)
def test_a_start_mark_and_a_batch_without_a_query_are_restated(root: Path, lose: Callable[[Path], None]) -> None:
    with MessageStore.open(root, CONFIG) as store:
        store.start_batches("started", 17)
        store.append_batch(rows(2), request(2, None))
        put(store, 20)
        restated = store.delete_expired_files(at_once=True).restated
        assert restated == (("app", 1), ("app", 2), ("started", 16))
    lose(root)
    with MessageStore.open(root, CONFIG) as store:
        assert store.append_batch(rows(2), request(2, None)).status == "known"
        with pytest.raises(QueryConflictError):
            store.append_batch(rows(3), request(3, "query-2"))
        with pytest.raises(VersionRegressionError, match="version 17"):
            store.append_batch(rows(0), BatchRequest(app_id="started", version=3, version_source="spark"))
        assert store.append_batch(rows(0), BatchRequest(app_id="started", version=17, version_source="spark")).row_count


def test_with_the_journal_older_batches_are_known_too(root: Path) -> None:
    with MessageStore.open(root, CONFIG) as store:
        store.delete_expired_files(at_once=True)
    with MessageStore.open(root, CONFIG) as store:
        assert store.append_batch(rows(0), request(0)).status == "known"


def test_no_room_to_restate_deletes_what_needs_no_restating(root: Path) -> None:
    """The newest batch lies in the third segment, and nothing can be appended: the two before it make room."""

    class NoRoom(Disk):
        full = False

        def pwrite(self, file: object, data: object, position: int) -> None:
            if self.full and "commitlog" in file.path:
                raise StoreFullError("no room", path=file.path, needed=1, free=0)
            super().pwrite(file, data, position)

    disk = NoRoom()
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        place = store.append_batch(rows(2), request(2)).physical_offset
        put(store, 30)
        disk.full = True
        deleted = store.delete_expired_files(at_once=True)
        assert deleted.restated == ()
        assert deleted.min_offset == place // SEGMENT * SEGMENT > 0
        assert "no room for the BATCH records" in deleted.kept
        with pytest.raises(StoreFullError):
            store.delete_expired_files(at_once=True)
        disk.full = False
        assert store.delete_expired_files(at_once=True).restated == (("app", 2),)
    assert verify(root, CONFIG).findings == []


# ---- readers and other writers


def test_a_reader_finishes_or_gets_the_exact_number_of_what_is_gone(root: Path) -> None:
    with MessageStore.open_read_only(root, CONFIG) as reader, MessageStore.open(root, CONFIG) as store:
        opened = MessageStore.open_read_only(root, CONFIG)  # it has all segments open
        before = read_all(opened, "busy", 0)
        batches = queue_records.read(reader.view, "busy", 0, 0, 60, ("body",), max_rows=4)
        first = next(batches)["body"].to_pylist()
        finishing = queue_records.read(opened.view, "busy", 0, 0, 60, ("body",), max_rows=4)
        done = next(finishing)["body"].to_pylist()
        store.delete_expired_files(at_once=True)
        for batch in finishing:
            done += batch["body"].to_pylist()
        assert done == before
        opened.close()
        low, found = store.min_offset("busy", 0), list(first)
        with pytest.raises(OffsetOutOfRangeError) as error:
            found.extend(body for batch in batches for body in batch["body"].to_pylist())
        assert found == before[: len(found)]
        assert (error.value.queue_offset, error.value.min) == (len(found), low)
        assert f"{low - len(found)} messages from {len(found)} on are gone" in str(error.value)
        rest = [body for batch in reader.read("busy", 0, low, columns=("body",)) for body in batch["body"].to_pylist()]
        assert rest == before[low:]
        assert reader.query_message("early", "early3") == []
        assert [m.queue_offset for m in reader.query_message("busy", "busy59")] == [59]


def open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", ASYNC_FLUSH])
def test_a_writer_goes_on_behind_the_retention_of_another_one(tmp_path: Path, flush: str) -> None:
    """Two processes are attached by turns. The first fills many files of a queue; the second one deletes them, and the
    first appends, syncs, closes, and holds no deleted segment open."""
    root = str(tmp_path / "store")
    config = CONFIG.replace(clean_interval="1h", flush_disk_type=flush)
    first, second = AttachedStore(root, config, Disk()), AttachedStore(root, config, Disk())
    try:

        def puts(store: AttachedStore, count: int) -> None:
            with store.writing("puts") as writer:
                host = writer.files.store_host
                many = columns(bodies(count, 200), topic="t", queues=1)
                batch = encode(many, limits=config, store_host=host, born_host=host)
                append_batch(writer, Chunks([batch]), BatchRequest(flush_disk_type=flush))

        puts(first, 60)  # four files of the queue, and not yet the end of a segment: nothing is synced
        puts(second, 200)
        with second.writing("retention"):
            assert second.services is not None
            deleted = second.services.retention.run(Expiry(at_once=True))
            assert deleted.segments
            assert deleted.queue_file_count
        puts(first, 30)
        assert not [path for path in open_files() if path.endswith("(deleted)") and root in path]
        puts(second, 30)
    finally:
        first.detach()
        second.detach()
    assert verify(root, config).findings == []


# ---- kills


def killed_runs(root: Path, tmp_path: Path, step: int) -> Iterator[tuple[Path, str]]:
    """The store after retention was killed before every `step`th operation, and the operation."""
    number = 0
    while True:
        copy = tmp_path / f"killed-{number}"
        shutil.copytree(root, copy)
        disk = KillDisk()
        store = MessageStore.open(copy, CONFIG, disk=disk)
        disk.kill_at = len(disk.operations) + number
        try:
            store.delete_expired_files(at_once=True)
        except Killed:
            die(copy)
            yield copy, str(disk.killed_in)
            shutil.rmtree(copy)
            number += step
            continue
        die(copy)
        return


def edge(root: Path, config: StoreConfig) -> PutMessageResult:
    """A killed store with a queue of one whole file and one unit, which is not synced; the first segments are gone."""
    store = MessageStore.open(root, config)
    for number in range(config.mapped_file_size_consume_queue // 20):
        store.put_message(Message("edge", b"%d" % number, queue_id=0))
    put(store, 60)
    store.flush()
    with store.writer.mutex:
        store.writer.finish()
        store.writer.clean_end.move()
    last = store.put_message(Message("edge", b"last", queue_id=0))
    assert store.delete_expired_files(reserved_hours=0).segments
    assert store.min_offset("edge", 0) == last.queue_offset > 0
    die(root)
    return last


def lose_spark_and_abort(root: Path) -> None:
    lose_spark(root)
    (root / "abort").unlink()


@pytest.mark.parametrize("lose", [lose_nothing, lose_spark, lose_spark_and_abort])
def test_a_queue_whose_only_file_lost_its_units_in_a_power_cut(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    """Retention had deleted the file before it. Recovery ended with an IndexError, and the store did not open again."""
    root = tmp_path / "store"
    last = edge(root, CONFIG.replace(clean_interval="1h"))
    first, second = sorted((root / "consumequeue" / "edge" / "0").iterdir())
    first.unlink()  # as a broker's retention does
    second.write_bytes(bytes(second.stat().st_size))
    lose(root)
    with another_boot(), MessageStore.open(root, CONFIG) as store:
        assert [message.body for message in store.get_message("edge", 0, last.queue_offset).messages] == [b"last"]
        assert store.put_message(Message("edge", b"next", queue_id=0)).queue_offset == last.queue_offset + 1
    assert verify(root, CONFIG).findings == []


def test_a_power_cut_takes_no_number_of_a_queue_without_messages(tmp_path: Path) -> None:
    """Its only unit was not synced, like its record. Retention had deleted the file before; the queue began at 0 again."""
    root, config = tmp_path / "store", CONFIG.replace(clean_interval="1h", flush_disk_type=ASYNC_FLUSH)
    last = edge(root, config)
    newest = max((root / "consumequeue" / "edge" / "0").iterdir())
    newest.write_bytes(bytes(newest.stat().st_size))
    with (root / "commitlog" / f"{last.physical_offset // SEGMENT * SEGMENT:020d}").open("r+b") as segment:
        segment.seek(last.physical_offset % SEGMENT)
        segment.write(bytes(last.size))
    with another_boot(), MessageStore.open(root, config) as store:
        assert (store.min_offset("edge", 0), store.max_offset("edge", 0)) == (last.queue_offset,) * 2
    shutil.rmtree(root / "spark")
    with another_boot(), MessageStore.open(root, config) as store:
        assert store.put_message(Message("edge", b"next", queue_id=0)).queue_offset == last.queue_offset
    assert verify(root, config).findings == []


@pytest.mark.parametrize(("lose", "step"), [(lose_nothing, 3), (lose_spark, 7)])
def test_a_kill_at_any_operation_leaves_a_store_that_opens(
    root: Path, tmp_path: Path, lose: Callable[[Path], None], step: int
) -> None:
    """What is left can be read, nothing is damaged, the newest batch is known, and the next run finishes the work."""
    with MessageStore.open_read_only(root, CONFIG) as reader:
        before = {topic: read_all(reader, topic, 0) for topic in ("busy", "early")}
    last = segments(root)[-1]
    places = []
    for copy, place in killed_runs(root, tmp_path, step):
        lose(copy)
        with MessageStore.open(copy, CONFIG) as store:
            for topic, found in before.items():
                low = store.min_offset(topic, 0)
                left = [b for batch in store.read(topic, 0, low, columns=("body",)) for b in batch["body"].to_pylist()]
                assert left == found[low:], place
                assert store.max_offset(topic, 0) == len(found), place
            assert store.append_batch(rows(1), request(1)).status == "known", place
            assert store.report.cut_messages == 0, place
        assert verify(copy, CONFIG).findings == [], place
        with MessageStore.open(copy, CONFIG) as store:
            assert store.delete_expired_files(at_once=True).min_offset == last
        queue_files = [len(list(queue.iterdir())) for queue in (copy / "consumequeue").glob("*/*")]
        assert max(queue_files) <= 2, place
        assert verify(copy, CONFIG).findings == [], place
        places.append(place)
    assert any(place.startswith("unlink") for place in places)
    assert len(places) * step > 40


# ---- the service


@dataclass
class FullDisk(Disk):
    """A disk that is as full as the test wants."""

    percent: int = 10

    def used_percent(self, path: object) -> int:
        return self.percent


def due(root: Path, disk: Disk, **settings: object) -> tuple[int, str]:
    """Where the log begins after retention that is due, and why the rest stays."""
    config = CONFIG.replace(file_reserved_time=24, clean_resource_interval=0, **settings)
    with MessageStore.open(root, config, disk=disk) as store:
        stop_periodic(store)
        found = store._attached.services.retention.run_if_due()
        return found.min_offset, found.kept


def hour(shift: int) -> str:
    return f"{time.localtime(time.time() + 3600 * shift).tm_hour:02d}"


def test_expired_segments_go_at_the_hour_that_is_set(root: Path) -> None:
    age(root, 25, segments(root)[:2])
    assert due(root, Disk(), delete_when=f"{hour(2)};{hour(4)}")[0] == 0, "they expired an hour ago, after that hour"
    assert due(root, Disk(), delete_when=f"{hour(3)};{hour(0)}")[0] == 2 * SEGMENT


def test_what_expired_before_the_hour_goes_when_the_store_is_opened_later(root: Path) -> None:
    age(root, 24 + 12, segments(root)[:1])
    assert due(root, Disk(), delete_when=hour(-3))[0] == SEGMENT


def test_last_delete_time() -> None:
    config = StoreConfig(delete_when="4;16")
    noon = int(time.mktime((2026, 1, 15, 12, 30, 5, 0, 0, -1)))
    assert last_delete_time_ms(config, noon * 1000) == (noon - 5 - 30 * 60 - 7 * 3600) * 1000  # 5:00
    four = noon + 4 * 3600
    assert last_delete_time_ms(config, four * 1000 + 7) == four * 1000 + 7
    assert last_delete_time_ms(config, (noon - 9 * 3600) * 1000) == (noon - 5 - 30 * 60 - 19 * 3600) * 1000


def test_a_disk_that_fills_up(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Above the first level expired segments go at any hour, above the second all that can go, above the last one nothing
    more is written."""
    publish_offsets(str(root), "delays", {("busy", 0): 0})
    age(root, 25, segments(root)[:2])
    never = {"delete_when": hour(2)}
    assert due(root, FullDisk(percent=75), **never)[0] == 0
    assert due(root, FullDisk(percent=76), **never) == (SEGMENT, due(root, FullDisk(percent=76), **never)[1])
    assert "delays" in due(root, FullDisk(percent=76), **never)[1], "a group still counts"
    assert due(root, FullDisk(percent=86), clean_file_forcibly_enable=False, **never)[0] == SEGMENT
    assert due(root, FullDisk(percent=86), **never)[0] == segments(root)[-1]
    assert "although consumer group delays has not read" in caplog.text
    disk = FullDisk(percent=91)
    config = CONFIG.replace(file_reserved_time=24, clean_resource_interval=0)
    with MessageStore.open(root, config, disk=disk) as store:
        stop_periodic(store)
        store._attached.services.retention.run_if_due()
        with pytest.raises(StoreFullError, match=r"the disk is 91 % full; allowed are 90"):
            store.put_message(Message("busy", b"x", queue_id=0))
        with pytest.raises(StoreFullError, match="diskSpaceWarningLevelRatio"):
            store.append_batch(rows(2), request(2))
        assert store.append_batch(rows(1), request(1)).status == "known"
        disk.percent = 50
        store._attached.services.retention.run_if_due()
        assert store.put_message(Message("busy", b"x", queue_id=0)).is_ok
    assert verify(root, CONFIG).findings == []


def test_what_a_kill_left_goes_after_the_interval(root: Path) -> None:
    """A run is killed when all segments are gone, and the files of the queues are not. Nothing expires any more."""
    disk = KillDisk()
    store = MessageStore.open(root, CONFIG, disk=disk)
    disk.before = lambda operation: setattr(
        disk,
        "kill_at",
        len(disk.operations) if operation.name == "unlink" and "consumequeue" in operation.path else None,
    )
    with pytest.raises(Killed):
        store.delete_expired_files(at_once=True)
    die(root)
    before, last = segments(root), queue_file_count(root)
    for interval, left in ((86_400_000, last), (0, 4)):
        due(root, Disk(), correct_logic_min_offset_force_interval=interval)
        assert (segments(root), queue_file_count(root)) == (before, left)
    assert verify(root, CONFIG).findings == []


@pytest.mark.parametrize("part", ["commitlog", "consumequeue"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_a_deletion_that_fails_or_is_interrupted_leaves_no_gap(root: Path, part: str, error: BaseException) -> None:
    """The second file of a row cannot be deleted, and the caller tries again: none behind it goes before it."""

    class Failing(Disk):
        count = 0

        def unlink(self, path: object) -> None:
            if f"/{part}/" in str(path):
                self.count += 1
                if self.count == 2:
                    raise error
            super().unlink(path)

    store = MessageStore.open(root, CONFIG, disk=Failing())
    with pytest.raises(type(error)):
        store.delete_expired_files(at_once=True)
    with contextlib.suppress(StoreError):
        store.delete_expired_files(at_once=True)
    with contextlib.suppress(StoreError):
        store.close()
    with MessageStore.open(root, CONFIG) as store:
        store.delete_expired_files(at_once=True)
    assert len(segments(root)) == 1
    assert verify(root, CONFIG).findings == []


def queue_file_count(root: Path) -> int:
    return len([path for path in (root / "consumequeue").glob("*/*/*") if "rmq_sys" not in str(path)])


def test_without_the_setting_nothing_goes_by_itself(root: Path) -> None:
    age(root, 10_000)
    with MessageStore.open(root, CONFIG, disk=FullDisk(percent=99)) as store:
        assert store._attached.services.periodic == []
        assert store._attached.services.retention.run_if_due() is None
        assert store.put_message(Message("busy", b"x", queue_id=0)).is_ok
    assert segments(root)[0] == 0


def test_a_session_deletes_by_itself_while_it_is_open(root: Path) -> None:
    all_segments = segments(root)
    age(root, 25)
    config = CONFIG.replace(
        file_reserved_time=24, clean_resource_interval=10, delete_commit_log_files_interval=1, delete_when=hour(0),
        delete_file_batch_max=1,
    )  # fmt: skip
    with MessageStore.open(root, config) as store:
        deadline = time.monotonic() + 30
        while segments(root)[0] < all_segments[-1] and time.monotonic() < deadline:
            assert store.put_message(Message("busy", b"y", queue_id=0)).is_ok
            time.sleep(0.002)
    assert segments(root)[0] == all_segments[-1]
    assert verify(root, CONFIG).findings == []


def test_closing_does_not_wait_for_the_pauses_of_retention(root: Path) -> None:
    """A session is closed while its retention pauses between two segments; the next one goes on."""
    all_segments = segments(root)
    age(root, 25)
    config = CONFIG.replace(
        file_reserved_time=24,
        clean_resource_interval=1,
        delete_commit_log_files_interval=3_600_000,
        delete_when=hour(0),
    )
    store = MessageStore.open(root, config)
    deadline = time.monotonic() + 30
    while segments(root)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    begin_s = time.monotonic()
    store.close()
    assert time.monotonic() - begin_s < 10
    assert segments(root)[0] == all_segments[1]
    assert verify(root, CONFIG).findings == []


def test_readers_beside_a_writer_whose_retention_deletes_all_the_time(tmp_path: Path) -> None:
    """Each message that a reader gets is the right one, and what it got and what it was told is gone are all that was put."""
    root, count = tmp_path / "store", 1500
    config = CONFIG.replace(file_reserved_time=0, clean_resource_interval=1, delete_when=hour(0), file_mode="0600")
    found: list[tuple[int, int]] = []
    failures: list[Exception] = []
    done = threading.Event()

    def read(slow_s: float) -> None:
        try:
            with MessageStore.open_read_only(root, SMALL) as reader:
                place = given = gone = 0
                while True:
                    was_done = done.is_set()
                    try:
                        for batch in reader.read("t", 0, place, columns=("queue_offset", "body")):
                            for number, body in zip(
                                *(batch[name].to_pylist() for name in batch.column_names), strict=True
                            ):
                                assert number == place
                                assert body == b"%07d" % number + b"." * 500
                                place, given = place + 1, given + 1
                            time.sleep(slow_s)
                    except OffsetOutOfRangeError as error:
                        assert error.queue_offset == place < error.min
                        gone, place = gone + error.min - place, error.min
                        continue
                    if was_done:
                        break
                found.append((given, gone))
        except (StoreError, AssertionError, OSError) as error:
            failures.append(error)

    with MessageStore.open(root, config) as store:
        store.put_message(Message("t", b"%07d" % 0 + b"." * 500, queue_id=0))
        threads = [threading.Thread(target=read, args=(slow_s,)) for slow_s in (0.0, 0.02)]
        for thread in threads:
            thread.start()
        for number in range(1, count):
            store.put_message(Message("t", b"%07d" % number + b"." * 500, queue_id=0, keys=[f"k{number}"]))
        deadline = time.monotonic() + 30
        while len(segments(root)) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        done.set()
        for thread in threads:
            thread.join()
        begin = store.min_offset("t", 0)
    assert not failures, failures
    assert [given + gone for given, gone in found] == [count, count]
    assert begin > count // 2
    assert verify(root, SMALL).findings == []


def test_a_queue_whose_early_files_another_process_deleted_is_not_rebuilt(root: Path) -> None:
    """A process that is attached meanwhile knows the last unit that it sealed, and its file is gone: that is no damage.
    It made all queues again, and readers saw them empty meanwhile.
    """
    us, others = Process(root, CONFIG), Process(root, CONFIG)
    with us.store.writing("0") as writer:
        commit(writer, version=0)
        writer.clean_end.move()
        attached = writer
    for version in range(1, 120):
        (others if version % 10 else us).batch(version=version)
    us.batch(version=120)
    with others.store.writing("retention") as writer:
        writer.clean_end.move()
        assert others.store.services is not None
        assert others.store.services.retention.run(Expiry(before_offset=segments(root)[-2])).queue_file_count > 0
    names = sorted(str(path) for path in (root / "consumequeue").rglob("0*"))
    inodes = [os.stat(name).st_ino for name in names]

    with us.store.writing("1") as writer:
        assert writer is attached, "it has caught up, without a recovery"
        commit(writer, version=121)
        writer.clean_end.move()
    assert [os.stat(name).st_ino for name in names] == inodes
    for process in (us, others):
        process.detach()
    assert verify(root).ok
