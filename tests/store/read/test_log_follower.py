"""Listeners and further dispatchers: each record once, in the order of the log, and no put that waits or fails for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from messagestore import ASYNC_FLUSH, BatchRequest, ConfigError, Message, MessageStore, StoreConfig
from small import SMALL, columns

PREPARED, ROLLBACK = 4, 12


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", ASYNC_FLUSH])
def test_every_record_is_handed_over_once_in_the_order_of_the_log(tmp_path: Path, flush: str) -> None:
    """Puts of four threads and batches, over many small segments."""
    found: list[dict] = []
    with MessageStore.open(tmp_path / "s", StoreConfig(**{**vars_of(SMALL), "flush_disk_type": flush})) as store:
        store.put_message(Message("t", b"before", queue_id=0))
        follower = store.add_dispatcher(
            lambda batch: found.extend(batch.to_pylist()), columns=["physical_offset", "size", "body", "topic"]
        )

        def put(thread: int) -> None:
            for number in range(30):
                store.put_message(Message("t", b"%d/%d" % (thread, number), queue_id=thread))

        threads = [threading.Thread(target=put, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for version in range(3):
            store.append_batch([columns([b"batch"] * 20)], BatchRequest(app_id="app", version=version))
        for thread in threads:
            thread.join()
        end = store.writer.end.physical_offset
    assert follower.position >= end
    assert follower.error is None
    places = [row["physical_offset"] for row in found]
    assert places == sorted(set(places))
    bodies = [row["body"] for row in found if row["topic"] == "t"]
    assert b"before" not in bodies
    assert bodies.count(b"batch") == 60
    assert sorted(each for each in bodies if b"/" in each) == sorted(
        b"%d/%d" % (t, n) for t in range(4) for n in range(30)
    )
    assert sum(row["topic"] == "rmq_sys_spark_sink" for row in found) == 3


def vars_of(config: StoreConfig) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_a_listener_gets_what_rocketmqs_gets(tmp_path: Path) -> None:
    """Not for half messages and rollbacks, which are in no queue."""
    found: list[tuple] = []
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.add_arriving_listener(lambda *arrived: found.append(arrived))
        put = store.put_message(
            Message("t", b"a", queue_id=1, keys=["k1", "k2"], tags="T", properties={"user": "\u00e9"})
        )
        for kind in (PREPARED, ROLLBACK):
            store.put_message(Message("t", b"half", queue_id=1, sys_flag=kind))
        store.put_message(Message("u", b"b", queue_id=0))
        stored = store.look_message_by_offset(put.physical_offset)
        assert stored is not None
    assert found[0] == (
        "t",
        1,
        0,
        ord("T"),
        stored.store_timestamp_ms,
        {"KEYS": "k1 k2", "TAGS": "T", "user": "\u00e9"},
    )
    assert [arrived[:4] for arrived in found] == [("t", 1, 0, ord("T")), ("u", 0, 0, 0)]


def test_a_slow_listener_delays_no_put(tmp_path: Path) -> None:
    """The puts end while the listener still has its first message; closing waits for the rest."""
    go, found = threading.Event(), []

    def slow(*arrived: object) -> None:
        assert go.wait(60)
        found.append(arrived[2])

    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.add_arriving_listener(slow)
        for number in range(10):
            store.put_message(Message("t", b"%d" % number, queue_id=0))
        assert not found
        go.set()
    assert found == list(range(10))


def test_a_listener_that_fails_fails_no_put_and_gets_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found: list[int] = []

    def failing(*arrived: int) -> None:
        if arrived[2] == 1:
            raise ValueError("no such gate")
        found.append(arrived[2])

    def broken(batch: pa.RecordBatch) -> None:
        raise KeyError("gate")

    with MessageStore.open(tmp_path / "s", SMALL) as store, caplog.at_level(logging.ERROR):
        store.add_arriving_listener(failing)
        follower = store.add_dispatcher(broken)
        for number in range(3):
            assert store.put_message(Message("t", b"%d" % number, queue_id=0)).queue_offset == number
    assert found == [0, 2]
    assert follower.error is None
    said = [record.getMessage() for record in caplog.records]
    assert any("a listener failed at t/0, offset 1; it gets the next message" in line for line in said)
    assert any("a dispatcher failed at" in line for line in said)


def test_a_listener_that_is_removed_gets_no_more(tmp_path: Path) -> None:
    """Also when it removes itself, and when it closes the store."""
    found: list[int] = []
    with MessageStore.open(tmp_path / "s", SMALL) as store:

        def once(*arrived: int) -> None:
            found.append(arrived[2])
            follower.close()

        follower = store.add_arriving_listener(once)
        other = store.add_arriving_listener(lambda *_: None)
        other.close()
        other.close()
        place = other.position
        store.put_message(Message("t", b"0", queue_id=0))
        while not found:
            time.sleep(0.01)
        store.put_message(Message("t", b"1", queue_id=0))
    assert found == [0]
    assert other.position == place


def test_a_listener_may_read_the_store(tmp_path: Path) -> None:
    """With a reader of its own: what it is told of is visible."""
    bodies: list[bytes] = []
    root = tmp_path / "s"

    def read(topic: str, queue_id: int, offset: int, *_: object) -> None:
        with MessageStore.open_read_only(root) as reader:
            bodies.extend(message.body for message in reader.get_message(topic, queue_id, offset, 1).messages)

    with MessageStore.open(root, SMALL) as store:
        store.add_arriving_listener(read)
        for number in range(3):
            store.put_message(Message("t", b"%d" % number, queue_id=0))
    assert bodies == [b"0", b"1", b"2"]


def test_what_retention_took_is_said_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A listener that is far behind goes on with what is left."""
    go, found = threading.Event(), []

    def slow(*arrived: int) -> None:
        found.append(arrived[2])
        assert go.wait(60)

    with MessageStore.open(tmp_path / "s", SMALL) as store, caplog.at_level(logging.WARNING):
        store.add_arriving_listener(slow)
        store.put_message(Message("t", b"first", queue_id=0))
        while not found:
            time.sleep(0.01)
        for _ in range(300):
            store.put_message(Message("t", b"x" * 200, queue_id=0))
        segments = sorted((tmp_path / "s" / "commitlog").iterdir())
        assert len(segments) > 3
        for path in segments[:2]:
            os.unlink(path)
        go.set()
    assert found[0] == 0
    assert found[-1] == 300
    assert any("retention has deleted the records from" in record.getMessage() for record in caplog.records)


def test_a_dispatcher_goes_on_after_retention_has_deleted_all_segments_that_it_knew(tmp_path: Path) -> None:
    """Also those that it was about to read: it had begun with the part of the log that ended there."""
    go, called = threading.Semaphore(0), threading.Semaphore(0)
    found: list[int] = []

    def slow(batch: pa.RecordBatch) -> None:
        found.extend(batch["queue_offset"].to_pylist())
        called.release()
        assert go.acquire(timeout=60)

    with MessageStore.open(tmp_path / "s", SMALL) as store:
        follower = store.add_dispatcher(slow, columns=["queue_offset"])

        def put_into(segments: int) -> int:
            while len(list((tmp_path / "s" / "commitlog").iterdir())) < segments:
                last = store.put_message(Message("t", b"x" * 900, queue_id=0)).queue_offset
            return last

        store.put_message(Message("t", b"first", queue_id=0))
        assert called.acquire(timeout=60)
        put_into(3)
        go.release()
        assert called.acquire(timeout=60)  # what is left of the first segment; two more are to be read
        last = put_into(6)
        expired = store.delete_expired_files(reserved_hours=0)
        assert len(expired.segments) >= 3
        go.release(1000)
    assert follower.error is None
    assert found[0] == 0
    assert found[-1] == last
    assert found == sorted(set(found))


def test_a_fork_does_not_wait_for_threads_that_it_does_not_have(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.add_arriving_listener(lambda *_: None)
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        store.put_message(Message("t", b"0", queue_id=0))


def test_what_cannot_be_called_is_refused(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        with pytest.raises(ConfigError, match="listener: found None; allowed is a function"):
            store.add_arriving_listener(None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="columns: found 'nothing'"):
            store.add_dispatcher(print, columns=["nothing"])
