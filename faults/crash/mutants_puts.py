"""Bugs planted where single puts are dispatched, acknowledged and woken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crash import interrupts, strangers
from crash.harness import SMALL
from crash.judge import Verdict
from crash.mutants_numbers import named
from crash.planting import Ground, Mutant, patched, without
from messagestore import Message, MessageStore
from messagestore.files.disk import Disk, File
from messagestore.writer.flush import FlushService

_BOUND_S = 60.0


def wakes_everybody(real: Any) -> Any:
    """Everybody who waits is served by any sync, also by one that began before their put."""

    def finished(flush: FlushService, end: int) -> None:
        real(flush, max([end, *(wanted for wanted, _ in flush._waiters)]))

    return finished


class HeldDisk(Disk):
    """Each sync of the log is held until the test lets it go, one after the other."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def fdatasync(self, file: File) -> None:
        if "/commitlog/" in file.path:
            self.begun.release()
            assert self.go.acquire(timeout=_BOUND_S)
        super().fdatasync(file)


def puts_during_a_sync(root: Path) -> None:
    """Puts that come while a sync is under way are acknowledged by the next one."""
    disk, synced, early = HeldDisk(), 0, []
    disk.go.release()
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"first", queue_id=0))
        assert disk.begun.acquire(timeout=_BOUND_S)

        def put(number: int) -> None:
            store.put_message(Message("t", b"x", queue_id=0))
            if synced < number:
                early.append(f"put {number} was acknowledged after sync {synced}")

        threads = []
        for number in (1, 2):
            threads.append(threading.Thread(target=put, args=(number,)))
            threads[-1].start()
            while len(store._attached.flush._waiters) < number:  # type: ignore[union-attr]
                time.sleep(0.001)
            if number == 1:
                assert disk.begun.acquire(timeout=_BOUND_S)
        synced = 1
        disk.go.release()
        assert disk.begun.acquire(timeout=_BOUND_S)
        threads[1].join(0.2)
        synced = 2
        for _ in range(9):
            disk.go.release()
        for thread in threads:
            thread.join()
    assert not early, early


def wakes_the_first(real: Any) -> Any:
    """Of those whom a sync served, only the first is woken."""

    def finished(flush: FlushService, end: int) -> None:
        with flush._mutex:
            served = [waiter for waiter in flush._waiters if waiter[0] <= end]
            flush._waiters = [waiter for waiter in flush._waiters if waiter not in served[1:]]
        real(flush, end)

    return finished


def keeps_who_is_served(real: Any) -> Any:
    """An interrupted put takes everybody who waits out of the list, and not only itself."""

    def wait(flush: FlushService, end: int, timeout_s: float) -> bool:
        try:
            served: bool = real(flush, end, timeout_s)
        except BaseException:
            flush._waiters = []
            raise
        return served

    return wait


def group_of_puts(ground: Ground) -> Iterator[Verdict]:
    """The story `group` of the interrupts: without one, and with one in each line of the wait."""
    base = ground.bases["filled"]
    yield interrupts.check("group", base, ground.root, interrupts.Interrupter(), power_cut=False)
    hits = interrupts.lines("group", base, ground.root)
    for line, hit, error in interrupts.cases(hits):
        if line[0] == "flush":
            yield interrupts.check(
                "group", base, ground.root, interrupts.Interrupter(line, hit, error), power_cut=False
            )


MUTANTS: tuple[Mutant, ...] = (
    Mutant("a sync serves puts that came after it began", patched(FlushService, "finished", wakes_everybody), "puts during a sync", named(puts_during_a_sync)),
    Mutant("only the first of those whom a sync served is woken", patched(FlushService, "finished", wakes_the_first), "interrupts", group_of_puts),
    Mutant("an interrupted put takes the others off the list of those who wait", patched(FlushService, "wait", keeps_who_is_served), "interrupts", group_of_puts),
    Mutant("the link count of a written file is not looked at", without(Disk, "linked", result=True), "replaced files", named(strangers.files_that_were_just_replaced)),
)  # fmt: skip
