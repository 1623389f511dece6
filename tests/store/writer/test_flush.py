"""The flush thread: group commit, ASYNC rhythm, and what callers learn when it fails."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from messagestore import (
    ASYNC_FLUSH,
    BatchRequest,
    Message,
    MessageStore,
    PutMessageStatus,
    StoreConfig,
    StorePoisonedError,
)
from messagestore.files.disk import Disk, File
from small import SMALL, SMALL_ASYNC, bodies, columns, read_all


class WatchedDisk(Disk):
    """Notes when the log is synced; can hold a sync back, or fail it."""

    def __init__(self) -> None:
        self.synced_s: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail = False

    def fdatasync(self, file: File) -> None:
        if "commitlog" in file.path:
            self.synced_s.append(time.monotonic())
            self.gate.wait(240)
            if self.fail:
                raise OSError(errno.EIO, "Input/output error", file.path)
        super().fdatasync(file)


def test_one_sync_for_all_who_wait(tmp_path: Path) -> None:
    """Puts that come while a sync is under way share the next one."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.put_message(Message("t", b"first", queue_id=0))
        disk.gate.clear()
        threads = [
            threading.Thread(target=store.put_message, args=(Message("t", b"x", queue_id=0),)) for _ in range(10)
        ]
        before = len(disk.synced_s)
        for thread in threads:
            thread.start()
        while store.writer.numbers.next_offsets.get(("t", 0), 0) < 11:
            time.sleep(0.001)
        assert store.writer.state.visible_end < store.writer.end.physical_offset
        disk.gate.set()
        for thread in threads:
            thread.join()
        assert len(disk.synced_s) - before <= 3
        assert store.max_offset("t", 0) == 11


def test_a_put_is_woken_by_its_own_sync_only(tmp_path: Path) -> None:
    """Puts that come while a sync is under way are not acknowledged by it."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.put_message(Message("t", b"first", queue_id=0))
        disk.gate.clear()
        before, done = len(disk.synced_s), []

        def put() -> None:
            store.put_message(Message("t", b"x", queue_id=0))
            done.append(len(disk.synced_s) - before)

        threads = [threading.Thread(target=put)]
        threads[0].start()
        while len(disk.synced_s) == before:
            time.sleep(0.001)
        threads += [threading.Thread(target=put) for _ in range(5)]
        for thread in threads[1:]:
            thread.start()
        while len(store._attached.flush._waiters) < 6:  # type: ignore[union-attr]
            time.sleep(0.001)
        disk.gate.set()
        for thread in threads:
            thread.join()
        assert sorted(done)[1:] == [2] * 5
        assert not store._attached.flush._waiters  # type: ignore[union-attr]


def test_a_put_that_gave_up_leaves_nothing_behind(tmp_path: Path) -> None:
    """A late sync finds nobody who waits for it any more."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL.replace(sync_flush_timeout=20), disk=disk) as store:
        disk.gate.clear()
        started_s = time.monotonic()
        assert store.put_message(Message("t", b"x", queue_id=0)).status is PutMessageStatus.FLUSH_DISK_TIMEOUT
        assert time.monotonic() - started_s < 60
        assert not store._attached.flush._waiters  # type: ignore[union-attr]
        disk.gate.set()
        store.flush()
        assert read_all(store) == [b"x"]


def test_async_syncs_in_its_rhythm(tmp_path: Path) -> None:
    """Nothing waits for a sync; 16 KiB are synced after the interval, less only after the thorough one."""
    disk = WatchedDisk()
    config = SMALL_ASYNC.replace(
        mapped_file_size_commit_log=1 << 20, flush_interval_commit_log=50, flush_commit_log_thorough_interval=600
    )
    with MessageStore.open(tmp_path / "s", config, disk=disk) as store:
        opened_s = time.monotonic()
        store.put_message(Message("t", b"little", queue_id=0))
        time.sleep(0.2)
        assert disk.synced_s == [] or time.monotonic() - opened_s > 0.5  # on a busy machine the thorough one may come
        for _ in range(6):
            store.put_message(Message("t", b"x" * 4000, queue_id=0))
        deadline = time.monotonic() + 120
        while not disk.synced_s and time.monotonic() < deadline:
            time.sleep(0.005)
        assert disk.synced_s
        count = len(disk.synced_s)
        store.put_message(Message("t", b"little", queue_id=0))
        deadline = time.monotonic() + 120
        while len(disk.synced_s) == count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(disk.synced_s) > count


def test_a_failed_sync_reaches_every_waiter(tmp_path: Path) -> None:
    """No put that waited for the failed sync is acknowledged; nothing is synced again; reopening finds the store
    whole.
    """
    disk = WatchedDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    store.put_message(Message("t", b"good", queue_id=0))
    disk.fail = True
    errors: list[BaseException] = []

    def put() -> None:
        try:
            store.put_message(Message("t", b"x", queue_id=0))
        except StorePoisonedError as error:
            errors.append(error)

    threads = [threading.Thread(target=put) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 5
    count = len(disk.synced_s)
    disk.fail = False
    with pytest.raises(StorePoisonedError):
        store.put_message(Message("t", b"x", queue_id=0))
    store.close()
    assert len(disk.synced_s) == count
    with MessageStore.open(tmp_path / "s", SMALL) as again:
        assert again.get_message("t", 0, 0).messages[0].body == b"good"


def test_the_thread_ends_with_the_store(tmp_path: Path) -> None:
    """No thread is left behind."""
    before = set(threading.enumerate())  # a thread of an earlier test may end meanwhile
    for _ in range(3):
        with MessageStore.open(tmp_path / "s", SMALL) as store:
            store.put_message(Message("t", b"x", queue_id=0))
    assert set(threading.enumerate()) <= before


def flush_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "messagestore-flush"]


def test_who_puts_nothing_needs_no_thread(tmp_path: Path) -> None:
    """Opening a store and SYNC_FLUSH batches start none; an ASYNC_FLUSH batch does, and is synced in its rhythm."""
    disk = WatchedDisk()
    config = SMALL.replace(flush_interval_commit_log=20, flush_commit_log_thorough_interval=20)
    with MessageStore.open(tmp_path / "s", config, disk=disk) as store:
        store.append_batch(columns(bodies(3)), BatchRequest("app", 0))
        assert not flush_threads()
        count = len(disk.synced_s)
        store.append_batch(columns(bodies(3)), BatchRequest("app", 1, flush_disk_type=ASYNC_FLUSH))
        assert len(flush_threads()) == 1
        deadline = time.monotonic() + 120
        while len(disk.synced_s) == count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(disk.synced_s) > count
    assert not flush_threads()


@pytest.mark.parametrize("really", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
def test_an_interrupt_while_the_thread_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: StoreConfig, really: bool
) -> None:
    """Ctrl-C before or after the thread was made: nothing was put, and the next put has one thread."""
    start = threading.Thread.start
    interrupted: list[threading.Thread] = []

    def interrupt(thread: threading.Thread) -> None:
        if thread.name == "messagestore-flush" and not interrupted:
            interrupted.append(thread)
            if really:
                start(thread)
            raise KeyboardInterrupt
        start(thread)

    with MessageStore.open(tmp_path / "s", config) as store:
        monkeypatch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put_message(Message("t", b"x", queue_id=0))
        assert store.put_message(Message("t", b"y", queue_id=0)).is_ok
        store.flush()
        assert read_all(store) == [b"y"]
        if really:
            interrupted[0].join(5)
        assert len(flush_threads()) == 1


def interrupted_put(store: MessageStore, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A put in ASYNC_FLUSH is acknowledged, and the next one is interrupted while it writes."""
    assert store.put_message(Message("t", b"acknowledged", queue_id=0)).is_ok

    def interrupt(*_: object) -> None:
        raise error

    monkeypatch.setattr(store.writer.log, "write", interrupt)
    store.put_message(Message("t", b"x", queue_id=0))


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
def test_close_says_that_an_interrupted_put_kept_others_from_being_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """What was acknowledged before is not synced by a close after it: who has seen only the interrupt must hear so."""
    disk = WatchedDisk()
    store = MessageStore.open(tmp_path / "s", SMALL_ASYNC, disk=disk)
    with pytest.raises(type(error)):
        interrupted_put(store, monkeypatch, error)
    with pytest.raises(StorePoisonedError, match=type(error).__name__):
        store.close()
    store.close()
    with MessageStore.open(tmp_path / "s", SMALL_ASYNC) as again:
        assert [message.body for message in again.get_message("t", 0, 0).messages] == [b"acknowledged"]


def test_an_interrupt_stays_one_when_the_store_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What close has to say about it stands in its notes."""
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        MessageStore.open(tmp_path / "s", SMALL_ASYNC) as store,
    ):
        interrupted_put(store, monkeypatch, KeyboardInterrupt())
    assert "This process writes nothing more" in caught.value.__notes__[0]
