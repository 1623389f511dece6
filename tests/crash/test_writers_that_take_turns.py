"""Several writers, threads and forked children share one store."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.harness import APP, no_thread_warnings, tree_hash
from crash.imitate import (
    commit,
    put,
    read_slot,
    rows_seen,
    seen,
    units,
    walk,
)
from crash.simdisk import FailDisk
from messagestore import (
    ASYNC_FLUSH,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.inspect.verify import verify
from sequences import SIZES, Start, broker_may_lock, recovered, reopened

pytestmark = no_thread_warnings


def in_child(function: Callable[[], object]) -> str:
    """Run in a forked child; "done", or the name of what it raised."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            function()
            os.write(write, b"done")
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_neither_write_nor_unlock(root: Path, process: Start) -> None:
    """A child has its parent's objects. Using or closing them must neither write a byte nor let anybody in."""
    store = reopened(root)
    put(store, "put/0/")
    before = tree_hash(root)
    slot = read_slot(root)
    assert in_child(lambda: put(store, "put/1/")) == "StoreClosedError"
    assert in_child(lambda: commit(store.writer)) == "StoreClosedError"
    assert in_child(store.close) in ("done", "StoreClosedError")
    assert in_child(store._attached.detach) in ("done", "StoreClosedError")
    assert tree_hash(root) == before
    assert read_slot(root) == slot
    assert (root / "abort").exists()
    assert not broker_may_lock(root)
    with pytest.raises(StoreLockedError):
        process(root, lock_timeout="0ms").batch()
    put(store, "put/1/")
    store.close()
    assert seen(root)[("single", 0)] == ["put/0/", "put/1/"]


def test_a_put_of_another_thread_does_not_land_inside_a_batch(root: Path, process: Start) -> None:
    """The put lands before the batch or behind it."""
    with process(root).session() as store:
        stop = threading.Event()
        numbers: list[int] = []

        def putting() -> None:
            while not stop.is_set():
                put(store, f"put/{len(numbers)}/")
                numbers.append(len(numbers))

        thread = threading.Thread(target=putting)
        thread.start()
        results = [commit(store.writer, APP, version, 30) for version in range(10)]
        stop.set()
        thread.join()
        places = [place for place, _, _ in units(root, "single", 0)]
        assert len(places) == len(numbers) > 0
        for result in results:
            assert not any(result.physical_offset <= place < result.end for place in places)


def test_the_clean_end_is_anchored_by_the_last_record_below_it(root: Path, process: Start) -> None:
    """This holds also where the clean end stands behind a BLANK, at the start of a segment."""
    with process(root, **SIZES).session() as store:
        for version in range(8):
            commit(store.writer, APP, version, 12)
            store.writer.clean_end.move()
            slot = read_slot(root)
            last = walk(root)[0][-1]
            assert (slot["anchor_position"], slot["anchor_size"]) == (last["physical_offset"], last["size"])
            assert slot["clean_end"] == slot["visible_end"] == last["physical_offset"] + last["size"]
    assert len(list((root / "commitlog").iterdir())) > 1


def test_a_flush_thread_without_the_lock_leaves_the_state_alone(root: Path, process: Start) -> None:
    """The flush thread of an ASYNC sink fails long after it gave the lock back. The visible end of the next writer must
    not go back.
    """
    disk = FailDisk()
    p = process(root, disk, flush_interval_commit_log=3_600_000)
    p.batch("p", 0, flush=ASYNC_FLUSH)
    q = process(root)
    for version in range(4):
        q.batch("q", version)
        slot = read_slot(root)
        if version == 2:
            disk.fail_at = len(disk.operations)
            with pytest.raises(StorePoisonedError):
                p.store.writer.group_sync()
            assert read_slot(root) == slot
    assert rows_seen(root, "q") == {0: 5, 1: 5, 2: 5, 3: 5}
    assert p.batch("p", 1).status == "appended", "the next commit recovers"
    assert rows_seen(root, "p") == {0: 5, 1: 5}


def test_writers_that_take_turns_do_not_recover(root: Path, process: Start) -> None:
    """Two sinks write to one store. Each catches up from its cached end to the visible end, and the clean end does not
    move with each commit.
    """
    p, q = process(root), process(root)
    p.batch("p", 0)
    q.batch("q", 0)
    clean, reports = read_slot(root)["clean_end"], (p.store.report, q.store.report)
    for version in range(1, 6):
        p.batch("p", version)
        q.batch("q", version)
    assert (p.store.report, q.store.report) == reports
    assert read_slot(root)["clean_end"] == clean
    p.detach()
    q.detach()
    report = verify(root)
    assert report.ok, report.findings[:3]
    assert report.batch_count == 12


def test_queues_of_another_writer_come_back_when_their_folders_are_lost(root: Path, process: Start) -> None:
    """P stays attached while Q commits and leaves; P closes last. The journal names the queues of both, so that Q's are
    made again when their folders are gone.
    """
    p, q = process(root), process(root)
    p.batch("p", 0)
    p.detach()
    p.batch("p", 1)
    q.batch("q", 0)
    q.detach()
    p.batch("p", 2)
    p.detach()
    shutil.rmtree(root / "consumequeue" / "topic-q")
    assert any("topic-q/0" in note for note in recovered(root))
    assert rows_seen(root, "q") == {0: 5}
    assert verify(root).ok


def test_a_flush_thread_without_the_lock_does_not_move_the_clean_end(root: Path, process: Start) -> None:
    """The flush thread of an ASYNC sink syncs long after the sink gave the lock back. When the clean end is due by then,
    it stays where it is: `state`, the journal and the store checkpoint are the next writer's.
    """
    q = process(root)
    q.batch("q", 0)
    p = process(root, flush_interval_commit_log=3_600_000)
    p.batch("p", 0, flush=ASYNC_FLUSH)
    q.batch("q", 1)
    assert p.syncs_late()
    assert p.store.writer is not None
    assert p.store.writer.synced_end == p.store.writer.end.physical_offset
    assert p.batch("p", 1).status == q.batch("q", 2).status == "appended"
    assert rows_seen(root, "q") == {0: 5, 1: 5, 2: 5}
    assert rows_seen(root, "p") == {0: 5, 1: 5}


def test_an_interrupt_in_a_writer_that_was_replaced_leaves_the_state_alone(root: Path, process: Start) -> None:
    """Ctrl-C comes to a put whose store was closed meanwhile, for a broker that starts."""
    p = process(root)
    store = p.session()
    put(store, "put/0/")
    writer = store.writer
    p.die()
    q = process(root)
    q.batch("q", 0)
    before = (root / "spark" / "state").read_bytes()
    with pytest.raises(KeyboardInterrupt), writer.unbroken("an append was interrupted"):
        raise KeyboardInterrupt
    assert (root / "spark" / "state").read_bytes() == before
    assert q.batch("q", 1).status == "appended"
