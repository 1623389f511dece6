"""A disk that is slow, a sync that never returns, a process that is stopped: nobody is told what is not true, the store
stays locked, and readers go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crash.harness import SMALL, Promise, check_store
from crash.imitate import Process, commit, put, rows_seen, seal, seen
from crash.simdisk import KillDisk, Operation
from messagestore import MessageStore, PutMessageStatus, StoreLockedError
from messagestore.files.disk import Disk, File
from messagestore.files.writer_lock import probe_attached

BOUND_S = 120.0
"""Whoever waits for longer hangs."""


class SlowDisk(Disk):
    """Each sync of the log takes as long as the gate is closed."""

    def __init__(self) -> None:
        self.syncing, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.sync_count = 0

    def fdatasync(self, file: File) -> None:
        if "/commitlog/" in file.path:
            self.syncing.set()
            assert self.gate.wait(BOUND_S)
            self.sync_count += 1
        super().fdatasync(file)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# ---- slow


def test_a_slow_sync_is_waited_for_and_keeps_the_lock(root: Path) -> None:
    """A batch's sync takes longer than `syncFlushTimeout`, `lockTimeout` and `attachTimeout`: it returns when it is synced."""
    disk = SlowDisk()
    config = SMALL.replace(sync_flush_timeout=50, attach_timeout="50ms", lock_timeout="50ms")
    p, q = Process(root, config, disk), Process(root, config)
    done: list[int] = []
    try:
        p.batch(version=0)
        before = disk.sync_count
        disk.gate.clear()
        disk.syncing.clear()
        thread = in_thread(lambda: done.append((p.batch(version=1), disk.sync_count)[1]))
        assert disk.syncing.wait(BOUND_S)
        with pytest.raises(StoreLockedError, match=f"pid {os.getpid()} .*app-1 1"):
            q.batch("q", 0)
        assert probe_attached(str(root)), "a broker could start"
        assert rows_seen(root) == {0: 5}, "a reader waited for the sync of a writer"
        time.sleep(0.2)
        assert not done
        disk.gate.set()
        thread.join(BOUND_S)
        assert done and done[0] - before >= 2, "acknowledged before both syncs"
        q.batch("q", 0)
        p.batch(version=2)
    finally:
        p.detach()
        q.detach()
    assert rows_seen(root) == {0: 5, 1: 5, 2: 5}
    check_store(root, Promise(rows={("app-1", version): 5 for version in range(3)}, maybe_batches={("app-1", 0)}))


def test_a_put_whose_sync_is_late_is_said_late_and_is_there(root: Path) -> None:
    """FLUSH_DISK_TIMEOUT as RocketMQ gives it; it is not visible before its sync, and the puts behind it are in order."""
    disk = SlowDisk()
    with MessageStore.open(root, SMALL.replace(sync_flush_timeout=30), disk=disk) as store:
        put(store, "put/0/")
        with MessageStore.open_read_only(root) as reader:
            disk.gate.clear()
            assert put(store, "put/1/").status is PutMessageStatus.FLUSH_DISK_TIMEOUT
            assert put(store, "put/2/").status is PutMessageStatus.FLUSH_DISK_TIMEOUT
            assert reader.max_offset("single", 0) == 1
            disk.gate.set()
            store.flush()
            assert reader.max_offset("single", 0) == 3
    assert seen(root)[("single", 0)] == ["put/0/", "put/1/", "put/2/"]
    puts = ["put/0/", "put/1/", "put/2/"]
    check_store(root, Promise(puts=puts, maybe_puts=puts))


# ---- stuck, or stopped


class StuckDisk(KillDisk):
    """When its turn comes, an operation of a kind never returns; or the process is stopped in it."""

    def __init__(self, when: Callable[[Operation], bool], stuck: Callable[[], object]) -> None:
        super().__init__()
        self.when, self.stuck = when, stuck
        self.armed = False
        self.before = self._stick

    def _stick(self, operation: Operation) -> None:
        if self.armed and self.when(operation):
            self.stuck()


@contextmanager
def child(work: Callable[[Callable[[bytes], object]], object]) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """A forked process that does `work(tell)`; its pid, and a function that waits for what it tells next."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        try:
            work(lambda said: os.write(write_end, said))
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        yield pid, lambda: os.read(read_end, 1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)


def is_sync(operation: Operation) -> bool:
    return operation.name == "fdatasync" and "/commitlog/" in operation.path


class Head:
    """The sync behind the head of a BATCH record."""

    def __init__(self) -> None:
        self.written = False

    def __call__(self, operation: Operation) -> bool:
        self.written |= seal(operation)
        return self.written and is_sync(operation)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("where", ["data of a batch", "head of a batch", "a put"])
def test_a_sync_that_never_returns_holds_the_lock_until_the_process_is_killed(root: Path, where: str) -> None:
    """A second writer waits as long as it is told, and is told who it is; readers read; SIGKILL ends it."""
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
        commit(store.writer)

    def work(tell: Callable[[bytes], object]) -> None:
        disk = StuckDisk(
            Head() if where == "head of a batch" else is_sync, lambda: (tell(b"s"), threading.Event().wait())
        )
        p = Process(root, SMALL.replace(sync_flush_timeout=20, attach_timeout="20ms"), disk)
        store = p.session()
        disk.armed = True
        if where == "a put":
            assert put(store, "put/1/").status is PutMessageStatus.FLUSH_DISK_TIMEOUT
            tell(b"t")
        commit(store.writer, version=1)
        tell(b"a")  # acknowledged, which is wrong

    with child(work) as (pid, told):
        assert told() == b"s"
        if where == "a put":
            assert told() == b"t"
        began_s = time.monotonic()
        with pytest.raises(StoreLockedError, match=rf"still locked by pid {pid} .* after 0\.2 s") as caught:
            MessageStore.open(root, SMALL.replace(lock_timeout="200ms"))
        assert f"pid {pid}" in caught.value.holder
        assert 0.2 <= time.monotonic() - began_s < BOUND_S
        assert rows_seen(root) == {0: 5}
        assert seen(root)[("single", 0)] == ["put/0/"]
        assert probe_attached(str(root))
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended by itself"
    promise = Promise(
        puts=["put/0/"], maybe_puts=["put/0/", "put/1/"], batches={("app-1", 0)},
        maybe_batches={("app-1", 0), ("app-1", 1)}, rows={("app-1", 0): 5, ("app-1", 1): 5},
    )  # fmt: skip
    check_store(root, promise)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_writer_that_is_stopped_keeps_its_place(root: Path) -> None:
    """SIGSTOP in the middle of a batch, for longer than any timeout: no lease ends; SIGCONT, and it goes on as if nothing was."""

    def work(tell: Callable[[bytes], object]) -> None:
        disk = StuckDisk(seal, lambda: (tell(b"s"), os.kill(os.getpid(), signal.SIGSTOP)))
        p = Process(root, SMALL.replace(sync_flush_timeout=20, attach_timeout="20ms"), disk)
        p.batch(version=0)
        disk.armed = True
        p.batch(version=1)
        disk.armed = False
        p.batch(version=2)
        tell(b"d")
        p.detach()
        tell(b"e")

    with child(work) as (pid, told):
        assert told() == b"s"
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        q = Process(root, SMALL.replace(lock_timeout="100ms"))
        for _ in range(2):
            with pytest.raises(StoreLockedError, match=f"pid {pid} "):
                q.batch("q", 0)
        assert rows_seen(root) == {0: 5}
        os.kill(pid, signal.SIGCONT)
        assert told() == b"d"
        q.batch("q", 0)
        assert told() == b"e"
        q.detach()
    assert rows_seen(root) == {0: 5, 1: 5, 2: 5}
    assert rows_seen(root, "q") == {0: 5}
    assert not (root / "abort").exists()
    check_store(root, Promise(rows={("app-1", 1): 5}, batches={("app-1", 1)}, maybe_batches={("app-1", 1)}))
