"""A takeover of an app, and `messagestore batches start`, die at each operation: each has happened, or has not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.harness import die, no_thread_warnings
from crash.imitate import another_boot
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.power_cut import Folder
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchRequest,
    LostBatchesError,
    MessageStore,
    QueryConflictError,
    VersionRegressionError,
)
from small import SMALL, bodies, columns

pytestmark = no_thread_warnings

KILL = "all"
POWER = ("strict", "names only", "data only")


def append(store: MessageStore, query: str, version: int, flush: str = SYNC_FLUSH, new: str = "fail") -> str:
    """A batch of app `app` with rows of its own; what became of it."""
    rows = columns(bodies(4, start=100 * (query == "q2") + 10 * version))
    request = BatchRequest("app", version, "spark", query, flush_disk_type=flush, on_new_query=new)
    return store.append_batch(rows, request).status


def deaths(root: Path, base: Folder, work: Callable[[MessageStore], None]) -> Iterator[tuple[str, Folder, bool]]:
    """What each death leaves, and whether the work had been acknowledged before it."""
    disk = MemRecordingDisk(root, base)
    store = MessageStore.open(root, SMALL, disk=disk)
    first = disk.position
    work(store)
    acknowledged = disk.position
    store.close()
    die(root)
    for cut in range(first, disk.position + 1):
        for mode in (KILL, POWER[cut % len(POWER)]):
            yield f"{mode} {cut}", disk.image(cut, mode).folder, cut >= acknowledged


def made(root: Path, batches: int) -> Folder:
    """A closed store with some batches of query q1."""
    disk = MemDisk(root)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        for version in range(batches):
            append(store, "q1", version)
    die(root)
    return disk.content()


def reopened(root: Path, folder: Folder, label: str, check: Callable[[MessageStore], bool]) -> bool:
    """Look at what is left as the next process, in another boot after a power cut."""
    disk = MemDisk(root, folder)
    if label.startswith(KILL):
        with MessageStore.open(root, SMALL, disk=disk) as store:
            found = check(store)
    else:
        with another_boot(), MessageStore.open(root, SMALL, disk=disk) as store:
            found = check(store)
    die(root)
    return found


@pytest.mark.parametrize("flush", [SYNC_FLUSH, ASYNC_FLUSH])
def test_a_takeover_that_dies_has_happened_or_has_not(scratch: Path, flush: str) -> None:
    """Acknowledged (SYNC_FLUSH, or a kill): the old query is refused for good. Else the old one goes on, or it is refused."""
    root = Path(os.path.realpath(scratch)) / "store"
    base = made(root, 3)
    counts = {True: 0, False: 0}

    def work(store: MessageStore) -> None:
        assert append(store, "q2", 0, flush, "continue") == "appended"

    def check(store: MessageStore) -> bool:
        if (done := "q1" in store.writer.journal.replaced("app")) is True:
            assert append(store, "q2", 0) == "known"
            for new in ("fail", "continue"):
                with pytest.raises(QueryConflictError, match="has replaced"):
                    append(store, "q1", 3, new=new)
        else:
            assert append(store, "q1", 2) == "known"
            with pytest.raises(QueryConflictError):
                append(store, "q2", 0)
            assert append(store, "q2", 0, new="continue") == "appended"
        assert append(store, "q2", 1) == "appended"
        return done

    for label, folder, acknowledged in deaths(root, base, work):
        done = reopened(root, folder, label, check)
        counts[done] += 1
        assert done or not acknowledged or (flush == ASYNC_FLUSH and not label.startswith(KILL)), label
    assert min(counts.values()) > 10


def test_a_start_that_dies_has_happened_or_has_not(scratch: Path) -> None:
    """Run again after a death it comes to the same."""
    root = Path(os.path.realpath(scratch)) / "store"
    base = made(root, 1)
    counts = {True: 0, False: 0}

    def work(store: MessageStore) -> None:
        assert store.start_batches("app", 7).status == "appended"

    def check(store: MessageStore) -> bool:
        last = store.writer.journal.last("app")
        assert last is not None
        done = last.start
        if done:
            with pytest.raises(VersionRegressionError):
                append(store, "q1", 1)
        else:
            with pytest.raises(LostBatchesError):
                append(store, "q1", 7)
        assert store.start_batches("app", 7).status == ("known" if done else "appended")
        assert append(store, "q1", 7) == "appended"
        return done

    for label, folder, acknowledged in deaths(root, base, work):
        done = reopened(root, folder, label, check)
        counts[done] += 1
        assert done or not acknowledged, label
    assert min(counts.values()) > 10
