"""Puts without a waiting caller: each Future completes once, by the sync of its group, on time, or with an error."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from messagestore import (
    AppendMessageStatus,
    Message,
    MessageBatch,
    MessageStore,
    PutMessageResult,
    PutMessageStatus,
    StoreClosedError,
    StoreError,
    StorePoisonedError,
)
from messagestore.files.disk import Disk, File
from small import SMALL, SMALL_ASYNC, read_all

BOUND_S = 120.0
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads


class WatchedDisk(Disk):
    """Counts the syncs of the log; can hold them back, or fail them."""

    def __init__(self) -> None:
        self.count = 0
        self.gate = threading.Event()
        self.gate.set()
        self.fail = False

    def fdatasync(self, file: File) -> None:
        if "commitlog" in file.path:
            self.count += 1
            self.gate.wait(BOUND_S)
            if self.fail:
                raise OSError(errno.EIO, "Input/output error", file.path)
        super().fdatasync(file)


def message(number: int = 0, size: int = 1) -> Message:
    return Message("t", b"%d" % number * size, queue_id=0)


def put_many(store: MessageStore, count: int) -> list[Future[PutMessageResult]]:
    return [store.put_message_async(message(number)) for number in range(count)]


def test_thousands_in_flight_share_a_few_syncs(tmp_path: Path) -> None:
    """The results come in the order of the calls, and every message is on the disk and visible then."""
    disk = WatchedDisk()
    config = SMALL.replace(mapped_file_size_commit_log=1 << 20)
    with MessageStore.open(tmp_path / "s", config, disk=disk) as store:
        store.put_message(message())
        disk.gate.clear()
        before = disk.count
        futures = put_many(store, 3000)
        assert not any(future.done() for future in futures)
        disk.gate.set()
        results = [future.result(BOUND_S) for future in futures]
        assert [result.queue_offset for result in results] == list(range(1, 3001))
        assert {result.status for result in results} == {PutMessageStatus.PUT_OK}
        assert disk.count - before <= 6  # the tail shares one; the clean end has its own
        with MessageStore.open_read_only(tmp_path / "s") as reader:
            assert reader.max_offset("t", 0) == 3001


def test_a_future_is_never_done_before_its_sync(tmp_path: Path) -> None:
    """A put that comes while a sync is under way completes with the next one."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.put_message(message())
        disk.gate.clear()
        before = disk.count
        first = store.put_message_async(message(1))
        while disk.count == before:
            time.sleep(0.001)
        second = store.put_message_async(message(2))
        seen: list[int] = []
        second.add_done_callback(lambda _: seen.append(disk.count - before))
        disk.gate.set()
        assert first.result(BOUND_S).is_ok
        assert second.result(BOUND_S).is_ok
        store.flush()
        assert seen[0] >= 2


def test_a_put_in_flight_cannot_be_cancelled(tmp_path: Path) -> None:
    """It was appended."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        disk.gate.clear()
        future = store.put_message_async(message())
        assert not future.cancel()
        disk.gate.set()
        assert future.result(BOUND_S).is_ok


def test_asyncio_awaits_puts(tmp_path: Path) -> None:
    """`asyncio.wrap_future` is all that a coroutine needs."""

    async def put_all(store: MessageStore) -> list[int]:
        futures = [asyncio.wrap_future(future) for future in put_many(store, 20)]
        return [result.queue_offset for result in await asyncio.gather(*futures)]

    with MessageStore.open(tmp_path / "s", SMALL) as store:
        assert asyncio.run(put_all(store)) == list(range(20))


def test_every_future_times_out_in_time(tmp_path: Path) -> None:
    """A sync that hangs keeps nobody longer than `syncFlushTimeout`, and a late sync completes nothing twice."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL.replace(sync_flush_timeout=300), disk=disk) as store:
        store.put_message(message())
        disk.gate.clear()
        begun_s = time.monotonic()
        futures = put_many(store, 5)
        time.sleep(0.1)
        store.alter_config(sync_flush_timeout=50)  # an earlier deadline behind later ones
        futures.append(store.put_message_async(message(9)))
        calls: Counter[int] = Counter()
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: calls.update([number]))  # type: ignore[misc]
        assert futures[-1].result(BOUND_S).status is PutMessageStatus.FLUSH_DISK_TIMEOUT
        assert not futures[0].done()
        for future in futures:
            assert future.result(BOUND_S).status is PutMessageStatus.FLUSH_DISK_TIMEOUT
        assert 0.3 <= time.monotonic() - begun_s < 60
        disk.gate.set()
        store.flush()
        assert len(read_all(store)) == 7
    assert calls == dict.fromkeys(range(6), 1)


def test_a_failed_sync_fails_every_future(tmp_path: Path) -> None:
    """Each error names the place of its record and has RocketMQ's statuses; nothing is acknowledged."""
    disk = WatchedDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    good = store.put_message_async(message()).result(BOUND_S)
    disk.gate.clear()
    futures = put_many(store, 10)
    disk.fail = True
    disk.gate.set()
    places = set()
    for future in futures:
        error = future.exception(BOUND_S)
        assert isinstance(error, StorePoisonedError)
        assert (error.put_status, error.append_status) == (PutMessageStatus.UNKNOWN_ERROR, AppendMessageStatus.PUT_OK)
        places.add(error.physical_offset)
    assert len(places) == 10
    late = store.put_message_async(message()).exception(BOUND_S)
    assert isinstance(late, StorePoisonedError)
    assert (late.put_status, late.append_status) == (PutMessageStatus.SERVICE_NOT_AVAILABLE, None)
    disk.fail = False
    with contextlib.suppress(StorePoisonedError):
        store.close()
    with MessageStore.open(tmp_path / "s", SMALL) as again:
        found = again.look_message_by_offset(good.physical_offset)
        assert found is not None
        assert found.body == b"0"


def test_close_says_that_puts_failed_whose_futures_nobody_looked_at(tmp_path: Path) -> None:
    """A Future that was thrown away does not hide a failed sync."""
    disk = WatchedDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    disk.fail = True
    with contextlib.suppress(StoreError):
        store.put_message_async(message()).result(BOUND_S)
    with pytest.raises(StorePoisonedError, match="sync failed"):
        store.close()


def test_close_completes_every_future(tmp_path: Path) -> None:
    """What is pending is synced by the close; when it returns, nothing is in flight any more."""
    disk = WatchedDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    disk.gate.clear()
    futures = put_many(store, 50)
    threading.Timer(0.2, disk.gate.set).start()
    store.close()
    assert all(future.done() and future.result().is_ok for future in futures)
    late = store.put_message_async(message()).exception()
    assert isinstance(late, StoreClosedError)
    assert late.put_status is PutMessageStatus.SERVICE_NOT_AVAILABLE


def test_a_function_that_is_called_with_a_result_may_put_and_close(tmp_path: Path) -> None:
    """It runs outside all locks."""
    store = MessageStore.open(tmp_path / "s", SMALL.replace(put_in_flight_size=1))
    chain: list[PutMessageResult] = []
    closed = threading.Event()

    def go_on(future: Future[PutMessageResult]) -> None:
        chain.append(future.result())
        if len(chain) < 20:
            store.put_message(message(len(chain)))
            store.put_message_async(message(len(chain))).add_done_callback(go_on)
        else:
            store.close()
            closed.set()

    store.put_message_async(message()).add_done_callback(go_on)
    assert closed.wait(BOUND_S)
    with MessageStore.open(tmp_path / "s", SMALL) as again:
        assert len(read_all(again)) == 39


@pytest.mark.parametrize("error", [SystemExit(), MemoryError(), ValueError()], ids=repr)
def test_a_function_that_fails_keeps_no_other_future_waiting(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is logged."""

    def fail(_: object) -> None:
        raise error

    with MessageStore.open(tmp_path / "s", SMALL) as store:
        first = store.put_message_async(message())
        first.add_done_callback(fail)
        assert all(future.result(BOUND_S).is_ok for future in [first, *put_many(store, 20)])
    assert type(error).__name__ in caplog.text


def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    """A caller who is faster than the disk waits for it; a hanging sync lets him go on after the timeout."""
    disk = WatchedDisk()
    config = SMALL.replace(mapped_file_size_commit_log=1 << 20, put_in_flight_size=40_000)
    with MessageStore.open(tmp_path / "s", config, disk=disk) as store:
        store.put_message(message())
        disk.gate.clear()
        futures: list[Future[PutMessageResult]] = []

        def put() -> None:
            futures.extend(store.put_message_async(message(n, 900)) for n in range(100))

        thread = threading.Thread(target=put)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        in_flight = store.writer.end.physical_offset - store.writer.synced_end
        assert in_flight < 44_000
        disk.gate.set()
        thread.join(BOUND_S)
        assert [future.result(BOUND_S).queue_offset for future in futures] == list(range(1, 101))
        store.alter_config(sync_flush_timeout=20)
        disk.gate.clear()
        late = [store.put_message_async(message(n, 900)) for n in range(100)]
        assert {future.result(BOUND_S).status for future in late} == {PutMessageStatus.FLUSH_DISK_TIMEOUT}
        disk.gate.set()


def test_a_child_gets_an_error_and_the_parent_its_result(tmp_path: Path) -> None:
    """A fork while puts are in flight."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        disk.gate.clear()
        futures = put_many(store, 5)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = "?"
            with contextlib.suppress(BaseException):
                errors = [future.exception(10) for future in futures]
                said = ",".join(type(error).__name__ for error in errors)
                said += f" {type(store.put_message_async(message()).exception(10)).__name__}"
            os.write(write_end, said.encode())
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            told = pipe.read().decode()
        os.waitpid(pid, 0)
        assert told == ",".join(["StoreClosedError"] * 5) + " StoreClosedError"
        disk.gate.set()
        assert all(future.result(BOUND_S).is_ok for future in futures)


def test_batches_have_the_same_forms(tmp_path: Path) -> None:
    """A batch has one Future, and counts once."""
    batch = MessageBatch.from_messages([message(number) for number in range(3)])
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        result = store.put_messages_async(batch).result(BOUND_S)
        assert (result.status, result.queue_offset, result.message_count) == (PutMessageStatus.PUT_OK, 0, 3)
        store.put_messages_oneway(batch)
        store.flush()
        assert len(read_all(store)) == 6
    assert store.oneway_counts() == {PutMessageStatus.PUT_OK: 1}


def test_async_flush_completes_at_once(tmp_path: Path) -> None:
    """Nothing has to be waited for, so no thread is needed for the Futures."""
    with MessageStore.open(tmp_path / "s", SMALL_ASYNC) as store:
        futures = put_many(store, 10)
        assert all(future.done() and future.result().is_ok for future in futures)
        assert read_all(store) == [b"%d" % number for number in range(10)]


def test_a_put_that_asks_not_to_wait_is_done_at_once(tmp_path: Path) -> None:
    """WAIT=false never waits, in no form."""
    disk = WatchedDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        disk.gate.clear()
        future = store.put_message_async(Message("t", b"x", queue_id=0, wait_store_msg_ok=False))
        assert future.done()
        disk.gate.set()


def test_one_way_puts_raise_nothing_and_are_counted(tmp_path: Path) -> None:
    """Also those whose sync fails later."""
    disk = WatchedDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    store.put_message_oneway(message())
    store.put_message_oneway(Message("no blanks", b""))
    store.put_message_oneway(Message("t", b"x" * (SMALL.max_message_size + 1), queue_id=0))
    store.flush()
    assert read_all(store) == [b"0"]
    disk.gate.clear()
    store.put_message_oneway(message(1))
    store.put_message_oneway(message(2))
    disk.fail = True
    disk.gate.set()
    with contextlib.suppress(StorePoisonedError):
        store.flush()
    with contextlib.suppress(StorePoisonedError):
        store.close()
    store.put_message_oneway(message(3))
    assert store.oneway_counts() == {
        PutMessageStatus.PUT_OK: 1,
        PutMessageStatus.MESSAGE_ILLEGAL: 2,
        PutMessageStatus.UNKNOWN_ERROR: 2,
        PutMessageStatus.SERVICE_NOT_AVAILABLE: 1,
    }


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    """The thread that completes Futures ends with the store."""
    before = threading.active_count()
    for _ in range(3):
        with MessageStore.open(tmp_path / "s", SMALL) as store:
            put_many(store, 3)
    assert threading.active_count() == before
