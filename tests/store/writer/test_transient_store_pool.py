"""Puts that wait in memory for a commit: who sees them, what takes them along, and what a failure leaves of them."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import messagestore.session as session
from crash.harness import die
from messagestore import (
    ASYNC_FLUSH,
    BatchRequest,
    ConfigError,
    Message,
    MessageBatch,
    MessageStore,
    StoreClosedError,
    StoreConfig,
    StoreFullError,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.errors import AppendMessageStatus, PutMessageStatus
from messagestore.files.disk import Disk, File
from messagestore.files.writer_lock import Attachment
from messagestore.inspect.verify import verify
from messagestore.session import AttachedStore
from messagestore.writer.pool_drain import PoolDrain
from messagestore.writer.states import Health
from small import SMALL, SMALL_POOL, ClockDisk, bodies, columns, read_all

COMMITTING = SMALL_POOL.replace(
    commit_interval_commit_log=1, commit_commit_log_least_pages=0, flush_interval_commit_log=5
)


def put(store: MessageStore, body: bytes, *, key: str = "k", topic: str = "t") -> bool:
    result = store.put_message(Message(topic, body, queue_id=0, keys=[key], tags="tag"))
    assert result.is_ok
    return result.committed


def put_all(store: MessageStore, puts: list[bytes]) -> None:
    for body in puts:
        put(store, body)


def seen(root: Path) -> list[bytes]:
    """What another process sees."""
    with MessageStore.open_read_only(root, SMALL) as reader:
        return read_all(reader)


def wait_until(true: Callable[[], object]) -> None:
    until_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_a_put_is_in_memory_until_it_is_committed(tmp_path: Path) -> None:
    """Its result says so, no reader sees it, and `stats` counts it as behind the commit, and as nothing else."""
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        found = [store.put_message(Message("t", body, queue_id=0)) for body in bodies(3)]
        assert not any(result.committed for result in found)
        assert not list((tmp_path / "commitlog").glob("*"))
        assert seen(tmp_path) == []
        stats = store.stats()
        assert (stats.pool_behind, stats.dispatch_behind, stats.flush_behind) == (3 * found[0].size, 0, 0)
        store.flush()
        assert seen(tmp_path) == bodies(3)
        stats = store.stats()
        assert (stats.pool_behind, stats.dispatch_behind, stats.flush_behind) == (0, 0, 0)


def test_without_a_pool_every_put_is_committed(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL_POOL.replace(transient_store_pool_enable=False)) as store:
        assert put(store, b"x")
        assert store.stats().pool_behind == 0
    assert store.stats().pool_behind is None


def test_a_session_reads_what_it_has_put(tmp_path: Path) -> None:
    """By place, key, message id and queue, waiting and following: each read commits first."""
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        result = store.put_message(Message("t", b"0", queue_id=0))
        assert store.look_message_by_id(result.message_id).body == b"0"
        put(store, b"1", key="one")
        assert [message.body for message in store.query_message("t", "one")] == [b"1"]
        put(store, b"2")
        assert store.max_offset("t", 0) == 3
        put(store, b"3")
        assert store.wait("t", 0, 3, timeout=60)
        put(store, b"4")
        assert [batch.column("body").to_pylist() for batch in store.follow("t", 0, 4, timeout=0)] == [[b"4"]]


@pytest.mark.parametrize(
    ("pages", "thorough_ms"), [(0, 3_600_000), (1_000_000, 1)], ids=["enough pages", "the thorough interval"]
)
def test_the_thread_commits_by_pages_and_by_time(tmp_path: Path, pages: int, thorough_ms: int) -> None:
    """The puts become visible to others and are synced, although nobody asks for it; listeners hear of them."""
    config = COMMITTING.replace(commit_commit_log_least_pages=pages, commit_commit_log_thorough_interval=thorough_ms)
    heard: list[int] = []
    with MessageStore.open(tmp_path, config) as store:
        store.add_arriving_listener(lambda *arrived: heard.append(arrived[2]))
        put_all(store, bodies(30))
        wait_until(lambda: seen(tmp_path) == bodies(30))
        wait_until(lambda: len(heard) == 30)
        wait_until(lambda: store.stats().pool_behind == 0)
    assert heard == list(range(30))


def test_the_thread_waits_for_enough_pages(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, COMMITTING.replace(commit_commit_log_least_pages=1_000_000)) as store:
        put_all(store, bodies(30))
        time.sleep(0.05)
        assert store.stats().pool_behind > 0
        assert seen(tmp_path) == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_segments_that_fill_up_return_their_buffers(tmp_path: Path, size: int) -> None:
    """A put that finds no buffer waits for a commit, so any number of puts need no more memory."""
    with MessageStore.open(tmp_path, SMALL_POOL.replace(transient_store_pool_size=size)) as store:
        for body in bodies(300, 1000):
            put(store, body)
            pool = store.writer.pool
            assert pool is not None
            assert len(pool._free) + len(pool._used) == size
            assert pool.undrained <= size * 16 * 1024
        assert len(list((tmp_path / "commitlog").iterdir())) > 15
    assert seen(tmp_path) == bodies(300, 1000)
    assert verify(tmp_path).ok


def test_a_kill_loses_only_what_is_not_committed(tmp_path: Path) -> None:
    """What is left is a clean prefix; the queue offsets of the others are given to the next puts."""
    store = MessageStore.open(tmp_path, SMALL_POOL)
    put_all(store, bodies(5))
    store.flush()
    lost = store.put_message(Message("t", b"lost", queue_id=0))
    assert (lost.committed, lost.queue_offset) == (False, 5)
    die(tmp_path)
    assert seen(tmp_path) == bodies(5)
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        assert store.put_message(Message("t", b"next", queue_id=0)).queue_offset == 5
    assert seen(tmp_path) == [*bodies(5), b"next"]
    assert verify(tmp_path).ok


def test_what_is_not_a_single_put_takes_the_puts_before_it_along(tmp_path: Path) -> None:
    """A batch is committed when it returns, with everything before it, and a kill leaves all of it."""
    store = MessageStore.open(tmp_path, SMALL_POOL)
    put(store, b"0")
    store.append_batch(columns([b"1", b"2"], queues=1), BatchRequest(flush_disk_type=ASYNC_FLUSH))
    assert not put(store, b"3")
    assert store.put_messages(MessageBatch.from_messages([Message("t", b"4", queue_id=0)])).committed
    assert not put(store, b"5")
    half = store.half_message(Message("other", b"half", queue_id=0), "group")
    put(store, b"lost")
    die(tmp_path)
    assert seen(tmp_path) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        store.find_half(half.message_id).commit()
        assert store.get_message("other", 0, 0).messages[0].body == b"half"


def test_a_close_commits(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path, SMALL_POOL)
    put_all(store, bodies(20))
    futures = [store.put_message_async(Message("t", body, queue_id=0)) for body in bodies(20, start=20)]
    assert not any(future.result(60).committed for future in futures)
    store.put_message_oneway(Message("t", b"oneway", queue_id=0))
    store.close()
    assert seen(tmp_path) == [*bodies(40), b"oneway"]
    assert not (tmp_path / "abort").exists()
    assert store.oneway_counts() == {PutMessageStatus.PUT_OK: 1}


def test_a_put_that_meets_a_close_is_not_left_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread began before the close, and appends after what was in the pool was committed."""
    store, found = MessageStore.open(tmp_path, SMALL_POOL), []
    writer, real = store.writer, AttachedStore._make_durable

    def make_durable(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        store._closed, store._puts._writer = False, writer
        found.append(put(store, b"late"))
        store._closed, store._puts._writer = True, None

    monkeypatch.setattr(AttachedStore, "_make_durable", make_durable)
    put(store, b"first")
    store.close()
    monkeypatch.undo()
    assert found == [True]
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        assert read_all(store) == [b"first", b"late"]


def test_the_clean_end_moves_under_load(tmp_path: Path) -> None:
    """There is always something in the pool then, and the clean end moves only when nothing is pending."""
    with MessageStore.open(tmp_path, COMMITTING.replace(clean_interval="20ms")) as store:
        begin, until_s = store.writer.state.clean_end, time.monotonic() + 60
        while store.writer.state.clean_end < begin + 3 * 16 * 1024 and time.monotonic() < until_s:
            put(store, b"x" * 500)
        assert store.writer.state.clean_end >= begin + 3 * 16 * 1024


def test_threads_put_while_others_commit(tmp_path: Path) -> None:
    """Commits of the thread, of puts that found no buffer, of batches and of reads meet, over many segments."""
    count, failures = 250, []

    def run(queue_id: int) -> None:
        try:
            for number in range(count):
                message = Message("t", b"%d/%d/" % (queue_id, number) + b"x" * 400, queue_id=queue_id)
                if number % 50 == 49:
                    assert store.put_messages(MessageBatch.from_messages([message])).committed
                else:
                    assert store.put_message(message).is_ok
                if number % 40 == 39:
                    store.flush()
        except BaseException as error:
            failures.append(error)
            raise

    with MessageStore.open(tmp_path, COMMITTING.replace(clean_interval="5ms")) as store:
        threads = [threading.Thread(target=run, args=(queue_id,)) for queue_id in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
    with MessageStore.open_read_only(tmp_path, SMALL) as reader:
        for queue_id in range(4):
            found = [tuple(map(int, body.split(b"/")[:2])) for body in read_all(reader, "t", queue_id)]
            assert found == [(queue_id, number) for number in range(count)]
    assert verify(tmp_path).ok


# ---- failures


class FailingDisk(Disk):
    """Writes to the log fail while `number` is an errno."""

    number = 0

    def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
        number = self.number  # once: the test changes it meanwhile
        if number and "/commitlog/" in os.readlink(f"/proc/self/fd/{fd}"):
            if number != errno.ENOSPC or position % 512:  # a part of it has room
                raise OSError(number, os.strerror(number))
            return super()._pwrite(fd, memoryview(view)[: min(100, len(view))], position)
        return super()._pwrite(fd, view, position)


def test_a_full_disk_keeps_the_puts_in_memory(tmp_path: Path) -> None:
    """Nothing more is appended until there is room, and then everything is there once, in order."""
    disk = FailingDisk()
    store = MessageStore.open(tmp_path, SMALL_POOL, disk=disk)
    put(store, b"first")
    store.flush()
    put_all(store, [b"second", b"third"])
    disk.number = errno.ENOSPC
    with pytest.raises(StoreFullError, match=r"no room for \d+ bytes of the TransientStorePool"):
        store.flush()
    with pytest.raises(StoreFullError) as caught:
        put(store, b"refused")
    assert caught.value.put_status is PutMessageStatus.SERVICE_NOT_AVAILABLE
    assert seen(tmp_path) == [b"first"]
    disk.number = 0
    assert not put(store, b"fourth")
    store.close()
    assert seen(tmp_path) == [b"first", b"second", b"third", b"fourth"]
    assert verify(tmp_path).ok


def test_a_half_message_that_stays_in_memory_says_so(tmp_path: Path) -> None:
    """It is open when there is room, so nobody may prepare it again; one that was refused is nowhere."""
    store, disk = waiting(tmp_path)
    store.half_message(Message("t", b"rolled back", queue_id=0), "group").rollback()
    disk.number = errno.ENOSPC
    with pytest.raises(StoreFullError, match=r"This put is among them.*do not put it again") as caught:
        store.half_message(Message("t", b"kept", queue_id=0), "group")
    assert caught.value.put_status is PutMessageStatus.SERVICE_NOT_AVAILABLE
    assert caught.value.append_status is AppendMessageStatus.PUT_OK
    with pytest.raises(StoreFullError) as refused:
        store.half_message(Message("t", b"refused", queue_id=0), "group")
    assert "This put is among them" not in str(refused.value)
    disk.number = 0
    [half] = store.open_halves()
    assert half.message_id in str(caught.value)
    store.find_half(half.message_id).commit()
    assert read_all(store) == [b"first", b"waits", b"kept"]
    store.close()


def test_a_half_message_whose_write_fails_is_in_doubt(tmp_path: Path) -> None:
    store, disk = waiting(tmp_path)
    store.half_message(Message("t", b"rolled back", queue_id=0), "group").rollback()
    disk.number = errno.EIO
    with pytest.raises(StorePoisonedError, match=r"This put was appended at physical offset \d+"):
        store.half_message(Message("t", b"half", queue_id=0), "group")
    store.close()


def test_the_thread_tries_a_full_disk_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FailingDisk()
    with MessageStore.open(tmp_path, COMMITTING, disk=disk) as store:
        put(store, b"first")
        store.flush()
        disk.number = errno.ENOSPC
        put(store, b"second")
        wait_until(lambda: store.writer.pool_drain.is_stuck)
        time.sleep(0.02)
        disk.number = 0
        wait_until(lambda: seen(tmp_path) == [b"first", b"second"])
    assert [each.message for each in caplog.records if "bytes of the TransientStorePool" in each.message][1:] == []


def waiting(root: Path) -> tuple[MessageStore, FailingDisk]:
    """A store in which `first` is in the log and `waits` is in the pool."""
    disk = FailingDisk()
    store = MessageStore.open(root, SMALL_POOL, disk=disk)
    put(store, b"first")
    store.flush()
    put(store, b"waits")
    return store, disk


def test_a_close_on_a_full_disk_gives_nothing_up(tmp_path: Path) -> None:
    """The store stays open, for more puts and for another close."""
    store, disk = waiting(tmp_path)
    disk.number = errno.ENOSPC
    for _ in range(2):
        with pytest.raises(StoreFullError, match=r"TransientStorePool .* also by another close"):
            store.close()
    disk.number = 0
    put(store, b"later")
    store.close()
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        assert read_all(store) == [b"first", b"waits", b"later"]
    assert verify(tmp_path).ok


def test_a_close_whose_write_fails_says_so_once(tmp_path: Path) -> None:
    store, disk = waiting(tmp_path)
    disk.number = errno.EIO
    with pytest.raises(StorePoisonedError, match="could not be drained"):
        store.close()
    store.close()
    disk.number = 0
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        assert read_all(store) == [b"first"]


class FullForState(Disk):
    """There is no room for `spark/state` while `full` is set; `synced` has the segments that were synced since."""

    def __init__(self) -> None:
        self.full = False
        self.synced: list[str] = []

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        if self.full and file.path.endswith("/spark/state"):
            raise StoreFullError("no room", path=file.path, needed=len(data), free=0)
        super().pwrite(file, data, position)

    def fdatasync(self, file: File) -> None:
        super().fdatasync(file)
        if self.full and "/commitlog/" in file.path:
            self.synced.append(file.path)


@pytest.mark.parametrize("config", [SMALL_POOL, SMALL.replace(flush_disk_type=ASYNC_FLUSH)])
def test_a_close_without_room_for_its_notes_has_synced_the_puts(tmp_path: Path, config: StoreConfig) -> None:
    """Another close does nothing, so what was put must be on the disk by then."""
    disk = FullForState()
    store = MessageStore.open(tmp_path, config, disk=disk)
    put(store, b"first")
    disk.full = True
    with pytest.raises(StoreFullError):
        store.close()
    store.close()
    assert len(disk.synced) == 1
    disk.full = False
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        assert read_all(store) == [b"first"]


def test_a_close_that_is_interrupted_gives_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MessageStore.open(tmp_path, SMALL_POOL)
    put(store, b"waits")

    def interrupted(*_given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PoolDrain, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    store.close()
    assert seen(tmp_path) == [b"waits"]


def test_a_second_close_during_the_first_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = waiting(tmp_path)
    run, drains = PoolDrain.run, threading.Event()

    def slow(drain: PoolDrain, end: int | None = None) -> None:
        drains.set()
        time.sleep(0.2)
        run(drain, end)

    with monkeypatch.context() as patched, ThreadPoolExecutor() as threads:
        patched.setattr(PoolDrain, "run", slow)
        first = threads.submit(store.close)
        assert drains.wait(60.0)
        second = threads.submit(store.close)
        for each in (first, second):
            each.result()
    assert seen(tmp_path) == [b"first", b"waits"]


def test_a_delayed_message_that_waits_in_memory_is_delivered_when_it_is_due(tmp_path: Path) -> None:
    disk = ClockDisk(1_700_000_000_000)
    with MessageStore.open(tmp_path, SMALL_POOL, disk=disk) as store:
        store.put_message(Message("t", b"delayed", queue_id=0, delay_time_level=1))
        disk.now_ms += 1_000
        assert store.deliver_delayed().count == 1
        assert read_all(store) == [b"delayed"]


def test_a_with_statement_on_a_full_disk_gives_nothing_up(tmp_path: Path) -> None:
    """The next `open` of this process finds what waits."""
    disk = FailingDisk()
    store = MessageStore.open(tmp_path, SMALL_POOL, disk=disk)

    def work() -> None:
        with store:
            put(store, b"first")
            store.flush()
            put(store, b"waits")
            disk.number = errno.ENOSPC

    with pytest.raises(StoreFullError, match="TransientStorePool"):
        work()
    disk.number = 0
    with MessageStore.open(tmp_path, disk=disk) as other:
        put(other, b"later")
        store.close()
        assert read_all(other) == [b"first", b"waits", b"later"]
    assert seen(tmp_path) == [b"first", b"waits", b"later"]


def test_one_session_of_two_closes_on_a_full_disk(tmp_path: Path) -> None:
    """What waits is written by the session that goes on."""
    disk = FailingDisk()
    with MessageStore.open(tmp_path, SMALL_POOL, disk=disk) as store:
        put(store, b"first")
        store.flush()
        with MessageStore.open(tmp_path, disk=disk) as other:
            put(other, b"waits")
            disk.number = errno.ENOSPC
        disk.number = 0
        put(store, b"later")
    assert seen(tmp_path) == [b"first", b"waits", b"later"]


def test_a_process_that_ends_on_a_full_disk_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, disk = waiting(tmp_path)
    disk.number = errno.ENOSPC
    session._detach_all()
    assert "lost if the process ends" in caplog.text
    store.close()
    disk.number = 0
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        assert read_all(store) == [b"first"]
    assert verify(tmp_path).ok


def test_a_broker_that_comes_while_the_disk_is_full_leaves_a_line_about_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives a writer no time to wait for room."""
    store, disk = waiting(tmp_path)
    disk.number = errno.ENOSPC
    monkeypatch.setattr(Attachment, "broker_waits", lambda attachment: True)
    store._attached.wake_watcher()
    wait_until(lambda: not store._attached.attached)
    with pytest.raises(StoreLockedError):
        put(store, b"later")
    wait_until(lambda: "could not be closed properly: " in caplog.text)  # the thread says it when it has let go
    assert "no room for" in caplog.text
    store.close()


@pytest.mark.parametrize("config", [SMALL_POOL, COMMITTING], ids=["a caller commits", "the thread commits"])
def test_a_commit_that_fails_poisons(tmp_path: Path, config: StoreConfig) -> None:
    """The error says that puts with committed=False are not kept; the next session goes on with the others."""
    disk = FailingDisk()
    store = MessageStore.open(tmp_path, config, disk=disk)
    put(store, b"first")
    store.flush()
    disk.number = errno.EIO
    put(store, b"lost")
    if config is COMMITTING:
        wait_until(lambda: store.writer.health is not Health.SOUND)
    with pytest.raises(StorePoisonedError, match=r"could not be drained.*except for puts whose result said committed"):
        store.flush()
    with pytest.raises(StorePoisonedError):
        put(store, b"refused")
    store.close()
    disk.number = 0
    with MessageStore.open(tmp_path, SMALL_POOL) as store:
        assert read_all(store) == [b"first"]


def test_a_lost_lock_stops_the_commit(tmp_path: Path) -> None:
    """Another writer may be at work then, so nothing of the pool is written."""
    store = MessageStore.open(tmp_path, SMALL_POOL)
    put(store, b"first")
    store.flush()
    put(store, b"lost")
    size = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
    (tmp_path / "lock").unlink()
    time.sleep(0.03)
    with pytest.raises(StorePoisonedError, match="a lock file was removed"):
        store.flush()
    store.close()
    assert (tmp_path / "commitlog" / f"{0:020d}").read_bytes() == size


def test_a_forked_child_commits_nothing(tmp_path: Path) -> None:
    """It has no puts in memory; the parent's are still there."""
    store = MessageStore.open(tmp_path, SMALL_POOL)
    put(store, b"parent")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            store.flush()
        except StoreClosedError:
            store.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert seen(tmp_path) == []
    put(store, b"again")
    store.close()
    assert seen(tmp_path) == [b"parent", b"again"]


# ---- what it takes


class NoMemory(Disk):
    """The second buffer cannot be locked, or the machine has little memory."""

    def __init__(self, available: int | None = None) -> None:
        self.available, self.buffers = available, 0

    def available_memory(self) -> int | None:
        return self.available

    def locked_memory(self, size: int):  # type: ignore[no-untyped-def]
        self.buffers += 1
        if self.buffers > 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return super().locked_memory(size)


def test_memory_that_cannot_be_had_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """The store is closed then, and opens without a pool."""
    with pytest.raises(ConfigError, match=r"must be locked .* refused buffer 2 \(Cannot allocate.*ulimit -l.*=false"):
        MessageStore.open(tmp_path, SMALL_POOL, disk=NoMemory())
    with pytest.raises(ConfigError, match=r"3 buffers of 16384 bytes .* take 49152 bytes .* 40000 are left"):
        MessageStore.open(tmp_path, SMALL_POOL, disk=NoMemory(40000))
    assert not (tmp_path / "abort").exists()
    with MessageStore.open(tmp_path, SMALL) as store:
        assert put(store, b"x")


def test_memory_is_locked_as_far_as_the_user_may(tmp_path: Path) -> None:
    """A child without privileges gets what RLIMIT_MEMLOCK allows, and an error beyond that."""
    memory = Disk().locked_memory(1 << 20)
    locked = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck:"))
    assert int(locked.split()[1]) >= 1024
    memory.close()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
            if os.getuid() == 0:
                os.setuid(65534)
            Disk().locked_memory(1 << 20)
        except OSError as error:
            status = 0 if error.errno in (errno.ENOMEM, errno.EPERM, errno.EAGAIN) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_memory_goes_with_the_session(tmp_path: Path) -> None:
    config = SMALL_POOL.replace(mapped_file_size_commit_log=1 << 20)
    gc.collect()  # what an earlier test let go must not go while this one counts
    before = Path("/proc/self/maps").read_text().count("/dev/zero")
    for _ in range(3):
        with MessageStore.open(tmp_path, config) as store:
            put(store, b"x")
            assert Path("/proc/self/maps").read_text().count("/dev/zero") > before
        assert Path("/proc/self/maps").read_text().count("/dev/zero") == before


def test_a_pool_needs_async_flush(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found true with flushDiskType=SYNC_FLUSH; allowed is true with ASYNC_FLUSH"):
        MessageStore.open(tmp_path, SMALL.replace(transient_store_pool_enable=True))
    with MessageStore.open(tmp_path, SMALL_POOL) as store, MessageStore.open(tmp_path) as other:
        assert not put(other, b"x")  # a session that asks for nothing works as the open one does
        assert not put(store, b"x")


def test_a_brokers_file_does_not_turn_the_pool_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says how much memory the broker may take."""
    file = tmp_path / "broker.conf"
    file.write_text("haListenPort=0\ntransientStorePoolEnable=true\nflushDiskType=ASYNC_FLUSH\n")
    assert not StoreConfig.load(file).transient_store_pool_enable
    assert "ignored: haListenPort, transientStorePoolEnable" in caplog.text
    file.write_text("transientStorePoolEnable=true\nflushDiskType=ASYNC_FLUSH\n")
    assert StoreConfig.load(file).transient_store_pool_enable
