"""What a process counts: each put once, with its time and status, and each message that is in the log by its topic."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from messagestore import (
    BatchRequest,
    Message,
    MessageBatch,
    MessageStore,
    PutMessageStatus,
    StoreError,
    StoreFullError,
    StoreStats,
    deliver_delayed,
)
from messagestore.files.disk import Disk, File
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.writer import statistics
from messagestore.writer.statistics import Statistics, clock, percentile_ms
from small import SMALL, SMALL_ASYNC, ClockDisk, bodies, columns, read_all

OK = PutMessageStatus.PUT_OK


class FailingDisk(Disk):
    """Writes to the log fail, or take long, from a moment on."""

    def __init__(self) -> None:
        self.full = False
        self.fail_syncs = False
        self.slow_s = 0.0

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, offset: int) -> None:
        if "/commitlog/" in file.path:
            time.sleep(self.slow_s)
            if self.full:
                raise StoreFullError("the disk is full", path=file.path, needed=1, free=0)
        super().pwrite(file, data, offset)

    def fdatasync(self, file: File) -> None:
        if self.fail_syncs and "/commitlog/" in file.path:
            raise OSError(errno.EIO, "Input/output error", file.path)
        super().fdatasync(file)


def puts_of(found: StoreStats) -> int:
    return sum(found.put_times.values())


def messages_of(found: StoreStats) -> dict[str, int]:
    return {topic: counts.messages for topic, counts in found.topics.items()}


def test_every_form_of_a_put_counts_once(tmp_path: Path) -> None:
    """A batch is one put, and its messages count by topic."""
    batch = MessageBatch.from_messages([Message("b", b"x", queue_id=0)] * 3)
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        sizes = [store.put_message(Message("t", b"x" * 10, queue_id=0)).size, store.put_messages(batch).size]
        store.put_message_async(Message("t", b"x", queue_id=0)).result()
        store.put_messages_async(batch).result()
        store.put_message_oneway(Message("t", b"x", queue_id=0))
        store.put_messages_oneway(batch)
        store.half_message(Message("t", b"x", queue_id=0), "g").commit()
    found = store.stats()
    assert puts_of(found) == 7
    assert found.put_statuses == {OK: 7}
    assert store.oneway_counts() == {OK: 2}
    assert messages_of(found) == {
        "t": 4,
        "b": 9,
        "RMQ_SYS_TRANS_HALF_TOPIC": 1,
        "RMQ_SYS_TRANS_OP_HALF_TOPIC": 1,
        "rmq_sys_spark_sink": 1,
    }
    assert found.topics["b"].size == 3 * sizes[1]
    assert found.put_messages == 16
    assert found.put_size == sum(topic.size for topic in found.topics.values())


def test_a_delayed_message_counts_where_it_waits_and_again_where_it_is_delivered(tmp_path: Path) -> None:
    disk = ClockDisk(1_700_000_000_000)
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        waits = store.put_message(Message("t", b"x", queue_id=0, delay_time_level=1))
        assert messages_of(store.stats()) == {SCHEDULE_TOPIC: 1}
        assert store.stats().topics[SCHEDULE_TOPIC].size == waits.size
        disk.now_ms += 60_000
        store.deliver_delayed()
        while store.max_offset("t", 0) == 0:  # the session's own service may have been first
            time.sleep(0.01)
        assert messages_of(store.stats()) == {SCHEDULE_TOPIC: 1, "t": 1, "rmq_sys_spark_sink": 1}


def test_batches_of_spark_count_by_topic_and_known_ones_do_not(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for _ in range(2):
            store.append_batch(columns(bodies(40)), BatchRequest("copy", 0))
        found = store.stats()
        size = sum(message.size for message in _messages(store))
    assert messages_of(found) == {"t": 40, "rmq_sys_spark_sink": 1}
    assert found.topics["t"].size == size
    assert puts_of(found) == 0


def _messages(store: MessageStore) -> list[object]:
    found = []
    for queue_id in store.topics()["t"]:
        found += store.get_message("t", queue_id, 0, 1000).messages
    return found


def test_what_fails_counts_by_status_and_not_by_topic(tmp_path: Path) -> None:
    """Before its first byte, in the middle of its write, and after the store is closed; in all forms."""
    disk = FailingDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    batch = MessageBatch.from_messages([Message("t", b"x", queue_id=0)] * 3)
    illegal, legal = Message("no blanks", b"x"), Message("t", b"x", queue_id=0)

    def fails(status: PutMessageStatus, message: Message) -> None:
        with pytest.raises(StoreError):
            store.put_message(message)
        assert isinstance(store.put_message_async(message).exception(), StoreError)
        store.put_message_oneway(message)
        expected[status] = expected.get(status, 0) + 3

    expected: dict[PutMessageStatus, int] = {}
    fails(PutMessageStatus.MESSAGE_ILLEGAL, illegal)
    assert store.stats().put_statuses == expected
    store.put_message(legal)
    disk.full = True
    fails(PutMessageStatus.UNKNOWN_ERROR, legal)
    with pytest.raises(StoreFullError):
        store.put_messages(batch)
    expected[PutMessageStatus.UNKNOWN_ERROR] += 1
    with pytest.raises(StoreFullError):
        store.append_batch(columns(bodies(4)))
    disk.full = False
    store.close()
    fails(PutMessageStatus.SERVICE_NOT_AVAILABLE, legal)
    found = store.stats()
    assert found.put_statuses == {OK: 1, **expected}
    assert (found.put_failed, puts_of(found)) == (10, 11)
    assert messages_of(found) == {"t": 1}
    assert store.oneway_counts() == {
        PutMessageStatus.MESSAGE_ILLEGAL: 1,
        PutMessageStatus.UNKNOWN_ERROR: 1,
        PutMessageStatus.SERVICE_NOT_AVAILABLE: 1,
    }


def test_a_put_whose_sync_fails_has_failed_and_is_in_the_log(tmp_path: Path) -> None:
    disk = FailingDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    store.put_message(Message("t", b"0", queue_id=0))
    disk.fail_syncs = True
    with pytest.raises(StoreError):
        store.put_message(Message("t", b"1", queue_id=0))
    with contextlib.suppress(StoreError):
        store.close()
    found = store.stats()
    assert found.put_statuses == {OK: 1, PutMessageStatus.UNKNOWN_ERROR: 1}
    assert messages_of(found) == {"t": 2}


def test_threads_lose_and_double_no_count(tmp_path: Path) -> None:
    """Threads come and go while others ask; every put and get is counted once."""
    root, rounds, threads, each = tmp_path / "s", 5, 8, 40
    with MessageStore.open(root, SMALL_ASYNC.replace(mapped_file_size_commit_log=1 << 20)) as store:
        asked: list[int] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                asked.append(puts_of(store.stats()))

        asker = threading.Thread(target=ask)
        asker.start()

        def work(number: int) -> None:
            for n in range(each):
                message = Message(f"t{number % 3}", b"x", queue_id=0)
                if n % 3 == 0:
                    store.put_message(message)
                elif n % 3 == 1:
                    store.put_message_async(message).result()
                else:
                    store.put_message_oneway(message)
                if n % 10 == 0:
                    with pytest.raises(StoreError):
                        store.put_message(Message("no blanks", b"x"))

        for _ in range(rounds):
            workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        stop.set()
        asker.join()
        found = store.stats()
    puts = rounds * threads * each
    assert found.put_statuses == {OK: puts, PutMessageStatus.MESSAGE_ILLEGAL: rounds * threads * 4}
    assert puts_of(found) == puts + rounds * threads * 4
    assert found.put_messages == puts
    assert asked == sorted(asked), "a count went back"


def test_the_counts_of_ended_threads_take_no_memory() -> None:
    counted = Statistics()

    def count() -> None:
        counted.put_ended(clock(), OK)

    for _ in range(50):
        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
    count()
    assert len(counted._by_thread[1]) == 1
    assert counted.stats(disk_used={}).put_statuses == {OK: 51}


def test_times_fall_into_rocketmqs_buckets() -> None:
    counted = Statistics()
    for ms in (0, 1, 9, 10, 49, 50, 99, 100, 200, 499, 500, 999, 1000, 2000, 3000, 4000, 5000, 9999, 10_000, 90_000):
        counted.put_ended(clock() - ms / 1000 - 1e-6, OK)
    found = counted.stats(disk_used={})
    assert list(found.put_times.items()) == [
        ("<=0ms", 1), ("0~10ms", 2), ("10~50ms", 2), ("50~100ms", 2), ("100~200ms", 1), ("200~500ms", 2),
        ("500ms~1s", 2), ("1~2s", 1), ("2~3s", 1), ("3~4s", 1), ("4~5s", 1), ("5~10s", 2), ("10s~", 2),
    ]  # fmt: skip
    assert found.put_longest_ms == 90_000


def test_a_percentile_is_rocketmqs() -> None:
    """The expected values are those that findPutMessageEntireTimePX of 5.3.3 gives for the same puts, but the last."""
    assert percentile_ms({}, 0.99) == 0
    assert percentile_ms({1: 100}, 0.99) == 0.99
    assert percentile_ms({3: 90, 120: 10}, 0.5) == 2 + 50 / 90
    assert percentile_ms({3: 90, 120: 10}, 0.99) == 110 + 10 * 9 / 10
    assert percentile_ms({9000: 4, 10_000: 6}, 0.9) == 9833.333333333334
    assert percentile_ms({10_001: 4}, 0.99) == 9000 + 1000 * 3 / 4


def test_rates_are_means_over_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are taken by whoever watches the store; before an idle time without samples, nothing was put."""
    now_s = 1000.0
    monkeypatch.setattr(statistics, "clock", lambda: now_s)
    counted = Statistics()
    topics = counted.topics_of_writer()

    def rates() -> dict[int, float]:
        return {seconds: round(rate, 3) for seconds, rate in counted.stats(disk_used={}).put_tps.items()}

    assert rates() == {10: 0.0, 60: 0.0, 600: 0.0}
    topics["t"] = [30, 3000]
    now_s += 2.0
    assert rates() == {10: 15.0, 60: 15.0, 600: 15.0}
    for _ in range(8):
        now_s += 1.0
        counted.sample()
    assert rates() == {10: 3.0, 60: 3.0, 600: 3.0}
    now_s += 1000.0  # detached
    counted.sample()
    topics["t"][0] += 300
    topics["u"] = [300, 9000]
    now_s += 5.0
    assert rates() == {10: 60.0, 60: 10.0, 600: 1.0}
    for _ in range(700):
        now_s += 1.0
        topics["t"][0] += 7
        counted.sample()
        counted.sample()
    assert rates() == {10: 7.0, 60: 7.0, 600: 7.0}


def test_a_session_samples_its_rates_by_itself(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        statistics_of = store._statistics
        store.put_message(Message("t", b"x", queue_id=0))
        end_s = time.monotonic() + 10
        while len(statistics_of._samples) < 2:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        found = store.stats().put_tps
        assert 0 < found[600] == found[60] <= 1


def test_reads_count_as_hits_and_misses(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_messages(MessageBatch.from_messages([Message("t", b"x", queue_id=0)] * 3))
        store.get_message("t", 0, 0)
        store.get_message("t", 0, 3)
        store.get_batch("t", 0, 1)
        store.get_batch("nothing", 0, 0)
        found = store.stats()
        assert (found.gets_found, found.gets_missed, found.messages_got) == (2, 2, 5)
    with MessageStore.open_read_only(tmp_path / "s") as reader:
        reader.get_message("t", 0, 0)
        found = reader.stats()
    assert (found.gets_found, found.gets_missed, found.messages_got, found.dispatch_behind) == (1, 0, 3, None)


def test_what_is_behind_is_known_while_the_store_is_open(tmp_path: Path) -> None:
    """ASYNC puts are dispatched within a moment, and synced later."""
    config = SMALL_ASYNC.replace(flush_interval_commit_log=3_600_000)
    with MessageStore.open(tmp_path / "s", config) as store:
        with store.writer.mutex:  # so that nothing is dispatched meanwhile
            size = store.put_message(Message("t", b"x", queue_id=0)).size
            found = store.stats()
        assert (found.dispatch_behind, found.flush_behind) == (size, size)
        assert set(found.disk_used) == {"commitlog"}
        assert len(read_all(store)) == 1
        found = store.stats()
        assert (found.dispatch_behind, found.flush_behind) == (0, size)
        assert set(found.disk_used) == {"commitlog", "consumequeue"}
        assert found.disk_used["commitlog"] == pytest.approx(Disk().used_percent(tmp_path), abs=1)  # others use it, too
        store.flush()
        assert store.stats().flush_behind == 0
    found = store.stats()
    assert (found.dispatch_behind, found.flush_behind, found.disk_used) == (None, None, {})


def test_sessions_of_a_process_share_their_counts_and_an_open_after_a_close_goes_on(tmp_path: Path) -> None:
    for number in range(3):
        with MessageStore.open(tmp_path / "s", SMALL) as store:
            store.put_message(Message("t", b"x", queue_id=0))
            assert puts_of(store.stats()) == number + 1
    deliver_delayed(tmp_path / "s")
    assert messages_of(store.stats()) == {"t": 3}


@pytest.mark.parametrize("fails", [False, True])
def test_a_put_that_holds_the_lock_for_long_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """With the size of its body and what became of it. The time is in the result, and does not count the wait."""
    disk = FailingDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        first = store.put_message(Message("t", b"x", queue_id=0)).page_cache_ms
        assert ("held the writer's lock" in caplog.text) == (first > 500)
        caplog.clear()
        disk.slow_s, disk.full = 0.6, fails
        began_s = time.monotonic()
        with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
            puts = [pool.submit(store.put_message, Message("t", b"y" * 77, queue_id=3)) for _ in range(2)]
            if fails:
                assert all(isinstance(put.exception(), StoreFullError) for put in puts)
            else:
                held_ms = [put.result().page_cache_ms for put in puts]
                assert min(held_ms) >= 600
                assert sum(held_ms) <= (time.monotonic() - began_s) * 1000, "a put counted its wait for the other"
        disk.slow_s, disk.full = 0.0, False
    assert "a put to t/3 held the writer's lock for" in caplog.text
    assert "bodies of 77 bytes" in caplog.text
    assert ("StoreFullError" if fails else "appended at") in caplog.text


def test_a_batch_that_holds_the_lock_for_long_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FailingDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        disk.slow_s = 0.3  # in two writes
        result = store.put_messages(MessageBatch.from_messages([Message("t", b"y" * 50, queue_id=0)] * 3))
        disk.slow_s = 0.0
    assert result.page_cache_ms >= 600
    assert "bodies of 150 bytes" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_can_count_although_a_lock_was_held(tmp_path: Path) -> None:
    """Its own store counts from nothing; what it inherited does not hang."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        with store._statistics._mutex:
            pid = os.fork()
            if pid == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    thread = threading.Thread(target=lambda: store.put_message_async(Message("t", b"x")).exception(9))
                    thread.start()
                    thread.join(9)
                    code = int(store.stats().put_statuses.get(PutMessageStatus.SERVICE_NOT_AVAILABLE) != 1)
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
