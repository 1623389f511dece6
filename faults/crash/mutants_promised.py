"""Bugs planted where puts without a waiting caller are completed and counted."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crash import interrupts
from crash.harness import SMALL
from crash.judge import Verdict
from crash.mutants_numbers import named
from crash.mutants_puts import HeldDisk
from crash.planting import Ground, Mutant, patched, power_cuts, without
from messagestore import Message, MessageStore, PutMessageStatus, StoreError
from messagestore.files.disk import Disk, File
from messagestore.writer.flush import FlushService
from messagestore.writer.pending_puts import OnewayPut, PendingPuts
from messagestore.writer.states import Health

_BOUND_S = 60.0
_SOON_S = 5.0


class GatedDisk(Disk):
    """Syncs of the log wait until they may go on, and fail if they shall."""

    def __init__(self) -> None:
        self.begun, self.gate, self.fail = threading.Semaphore(0), threading.Event(), False

    def fdatasync(self, file: File) -> None:
        if "/commitlog/" in file.path:
            self.begun.release()
            assert self.gate.wait(_BOUND_S)
            if self.fail:
                raise OSError(errno.EIO, "Input/output error", file.path)
        super().fdatasync(file)


def put(store: MessageStore, number: int = 0) -> Any:
    return store.put_message_async(Message("t", b"%d" % number, queue_id=0))


def a_sync_fails(root: Path) -> None:
    """Each put in flight gets an error, and each one-way put counts as failed."""
    disk = GatedDisk()
    store = MessageStore.open(root, SMALL, disk=disk)
    futures = [put(store, number) for number in range(3)]
    for _ in range(2):
        store.put_message_oneway(Message("t", b"x", queue_id=0))

    disk.fail = True
    disk.gate.set()

    try:
        for future in futures:
            assert isinstance(future.exception(_SOON_S), StoreError), "a put whose sync failed was acknowledged"
    except TimeoutError:
        raise AssertionError("a put whose sync failed has no outcome") from None
    finally:
        with contextlib.suppress(StoreError):
            store.close()

    counts = store.oneway_counts()
    assert counts == {PutMessageStatus.UNKNOWN_ERROR: 2}, f"one-way puts whose sync failed: {counts}"


def a_sync_hangs(root: Path) -> None:
    """Each put in flight is late in time, and a put that begins during a sync is not acknowledged by it."""
    disk = GatedDisk()
    with MessageStore.open(root, SMALL.replace(sync_flush_timeout=200), disk=disk) as store:
        first = put(store)
        assert disk.begun.acquire(timeout=_BOUND_S)
        second = put(store, 1)
        try:
            for future in (first, second):
                status = future.result(_SOON_S).status
                assert status is PutMessageStatus.FLUSH_DISK_TIMEOUT, status
        except TimeoutError:
            raise AssertionError("FLUSH_DISK_TIMEOUT did not come in time") from None
        finally:
            disk.gate.set()


def a_put_comes_during_a_sync(root: Path) -> None:
    """The sync that was under way does not complete it."""
    disk = HeldDisk()
    disk.go.release()
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"first", queue_id=0))
        assert disk.begun.acquire(timeout=_BOUND_S)

        first = put(store)
        assert disk.begun.acquire(timeout=_BOUND_S)
        second = put(store, 1)

        disk.go.release()
        try:
            assert first.result(_BOUND_S).is_ok
            assert disk.begun.acquire(timeout=_BOUND_S)
            time.sleep(0.1)
            early = second.done()
        finally:
            for _ in range(9):
                disk.go.release()

        assert not early, "a put was acknowledged by the sync before its own"


def the_store_closes_without_a_sync(root: Path) -> None:
    """What is in flight when the locks are lost gets an error from the close."""
    store = MessageStore.open(root, SMALL)
    store.put_message(Message("t", b"first", queue_id=0))
    flush = store._attached.flush
    assert flush is not None
    flush.stop()  # nothing is synced any more
    future = put(store)
    (root / "lock").unlink()
    threading.Thread(target=store.close, daemon=True).start()
    try:
        assert isinstance(future.exception(_SOON_S), StoreError)
    except TimeoutError:
        raise AssertionError("a put in flight outlived the store") from None


def the_process_forks(root: Path) -> None:
    """The child does not wait for what only the parent learns."""
    disk = GatedDisk()
    with MessageStore.open(root, SMALL, disk=disk) as store:
        future = put(store)
        pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                status = 0 if isinstance(future.exception(_SOON_S), StoreError) else 1
            os._exit(status)
        _, status = os.waitpid(pid, 0)
        disk.gate.set()
        assert status == 0, "a child waited for a put of its parent"


def completes_at_once(_: Any) -> Any:
    """The Future completes when the put was appended."""

    def promise(_promised: PendingPuts, result: Any, future: Any, _timeout_s: float) -> None:
        future.set_result(result)

    return promise


def completes_all(real: Any) -> Any:
    """A sync completes every put in flight, also those that came after it began."""

    def flushed(promised: PendingPuts, end: int) -> None:
        real(promised, max([end, *(each.end for each in promised._promises)]))

    return flushed


def drops_what_is_lost(real: Any) -> Any:
    """A failed sync takes the puts in flight off the list, and nobody is told."""

    def take(promised: PendingPuts) -> None:
        if promised._writer.health is not Health.SOUND:
            promised._promises.clear()
        real(promised)

    return take


def counts_no_failure(real: Any) -> Any:
    def set_exception(oneway: OnewayPut, error: Any) -> None:
        oneway._done = True

    return set_exception


def is_never_late(real: Any) -> Any:
    """The thread does not look at deadlines."""

    def promise(promised: PendingPuts, result: Any, future: Any, _timeout_s: float) -> None:
        real(promised, result, future, 1e6)

    return promise


def puts_in_flight(ground: Ground) -> Iterator[Verdict]:
    """The story `promised` of the interrupts, with an interrupt in each line of the puts in flight."""
    base = ground.bases["filled"]
    hits = interrupts.lines("promised", base, ground.root)
    for line, hit, error in interrupts.cases(hits):
        if line[0] == "pending_puts":
            interrupter = interrupts.Interrupter(line, hit, error)
            yield interrupts.check("promised", base, ground.root, interrupter, power_cut=False)


def forgets_others(real: Any) -> Any:
    """An interrupted put takes the puts of other threads with it."""

    def promise(promised: PendingPuts, result: Any, future: Any, timeout_s: float) -> None:
        try:
            real(promised, result, future, timeout_s)
        except BaseException:
            promised._promises.clear()
            raise

    return promise


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a Future completes before the sync", patched(PendingPuts, "promise", completes_at_once), "power cuts", power_cuts("puts in flight")),
    Mutant("a Future completes with a sync that began before its put", patched(PendingPuts, "flushed", completes_all), "a put during a sync", named(a_put_comes_during_a_sync)),
    Mutant("Futures are dropped when a sync fails", patched(PendingPuts, "_take_due", drops_what_is_lost), "a failing sync", named(a_sync_fails)),
    Mutant("a one-way put that fails is not counted", patched(OnewayPut, "set_exception", counts_no_failure), "a failing sync", named(a_sync_fails)),
    Mutant("FLUSH_DISK_TIMEOUT does not reach a Future", patched(PendingPuts, "promise", is_never_late), "a hanging sync", named(a_sync_hangs)),
    Mutant("a close leaves Futures open", without(FlushService, "end"), "a close", named(the_store_closes_without_a_sync)),
    Mutant("a child waits for the Futures of its parent", without(PendingPuts, "forget_threads"), "a fork", named(the_process_forks)),
    Mutant("an interrupted put takes the Futures of others with it", patched(PendingPuts, "promise", forgets_others), "interrupts", puts_in_flight),
)  # fmt: skip
