"""Bugs planted where puts are counted."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from crash.harness import SMALL
from crash.mutants_numbers import named
from crash.planting import Mutant, patched
from messagestore import Message, MessageStore, PutMessageStatus, StoreFullError
from messagestore.files.disk import Disk, File
from messagestore.writer import whole_batch
from messagestore.writer.statistics import Statistics
from small import bodies, columns


class FullDisk(Disk):
    """A disk that is full for the log from a moment on."""

    full = False

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        if self.full and "/commitlog/" in file.path:
            raise StoreFullError("the disk is full", path=file.path, needed=1, free=0)
        super().pwrite(file, data, position)


def threads_come_and_go(root: Path) -> None:
    """Each put counts, also after its thread has ended."""
    with MessageStore.open(root, SMALL) as store:
        for _ in range(3):
            thread = threading.Thread(target=store.put_message, args=(Message("t", b"x", queue_id=0),))
            thread.start()
            thread.join()
        found = store.stats()
    assert found.put_statuses == {PutMessageStatus.PUT_OK: 3}, found.put_statuses
    assert found.topics["t"].messages == 3, found.topics


def a_batch_and_a_put_have_no_room(root: Path) -> None:
    """Nothing of them is in the log, so no topic counts them."""
    disk = FullDisk()
    with MessageStore.open(root, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        disk.full = True
        for put in (
            lambda: store.put_message(Message("t", b"x", queue_id=0)),
            lambda: store.append_batch(columns(bodies(3))),
        ):
            with contextlib.suppress(StoreFullError):
                put()
        disk.full = False
        found = store.stats()
    assert found.put_messages == 1, found.topics
    assert found.put_failed == 1, found.put_statuses


def forgets_the_ended(real: Any) -> Any:
    """The counts of threads that have ended are dropped, and not added up."""

    def new_counts(statistics: Statistics) -> Any:
        counts = real(statistics)
        statistics._by_thread = statistics._by_thread[0].__class__(), statistics._by_thread[1]
        return counts

    return new_counts


def counts_first(real: Any) -> Any:
    """A batch is counted before it is written."""

    def write(writer: Any, plan: Any) -> Any:
        for (topic, _), count in plan.counts.items():
            writer.appended(writer.end, topic, count, plan.sizes[topic])
        return real(writer, plan)

    return write


def counts_as_stored(_real: Any) -> Any:
    """A put that raises an error counts as one that is stored."""

    def put_failed(statistics: Statistics, began_s: float, _error: BaseException) -> None:
        statistics.put_ended(began_s, PutMessageStatus.PUT_OK)

    return put_failed


MUTANTS: tuple[Mutant, ...] = (
    Mutant("what a thread has counted ends with it", patched(Statistics, "_new_counts", forgets_the_ended), "threads", named(threads_come_and_go)),
    Mutant("a batch that is undone is counted", patched(whole_batch, "_write", counts_first), "a full disk", named(a_batch_and_a_put_have_no_room)),
    Mutant("a put that failed counts as stored", patched(Statistics, "put_failed", counts_as_stored), "a full disk", named(a_batch_and_a_put_have_no_room)),
)  # fmt: skip
