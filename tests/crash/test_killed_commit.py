"""A process is killed while it commits, recovers or detaches, and another goes on."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from crash.harness import no_thread_warnings
from crash.imitate import (
    another_boot,
    dispatch,
    file_bytes,
    kill_when,
    overwrite,
    put,
    rows_seen,
    seal,
    walk,
)
from crash.simdisk import KillDisk, Killed, Operation
from messagestore import (
    ASYNC_FLUSH,
    MessageStore,
    StorePoisonedError,
)
from messagestore.inspect.verify import verify
from sequences import CONFIG, SIZES, Start, filled, recovered, reopened

pytestmark = no_thread_warnings


def test_a_killed_commit_is_not_written_over(root: Path, process: Start) -> None:
    """A dies behind its commit point and before it publishes. B has been attached all the time and must not go on at
    its old end.
    """
    a, b = process(root, disk := KillDisk()), process(root)
    a.batch("other", 0)
    b.batch("b", 0)
    kill_when(disk, dispatch)
    with pytest.raises(Killed):
        a.batch("a", 0)
    a.die()
    _, end = walk(root)
    before = file_bytes(root, 0, end)
    assert b.batch("b", 1).physical_offset >= end
    assert file_bytes(root, 0, end) == before
    assert rows_seen(root, "a") == {0: 5}
    assert rows_seen(root, "b") == {0: 5, 1: 5}


def test_a_killed_recovery_is_noticed_by_a_writer_that_stayed_attached(
    root: Path, scratch: Path, process: Start
) -> None:
    """B is attached and idle. A attaches, recovers and dies on the way: what A had taken back is made again."""
    at = 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        b = process(root)
        b.batch("b", 0)
        a = process(root, disk := KillDisk(at))
        try:
            a.store.open_session("test")
        except Killed:
            pass
        a.die()
        assert b.batch("b", 1).status == "appended"
        b.detach()
        report = verify(root)
        assert report.ok, (disk.killed_in, report.findings[:2])
        assert rows_seen(root, "b") == {0: 5, 1: 5}
        with reopened(root) as store:
            assert len(store.query_message("topic-b", "k0-4")) == 1, disk.killed_in
        if not disk.dead:
            break
        at += 1
    assert at > 5


def test_a_session_that_closes_leaves_abort_to_the_writer_that_is_still_attached(root: Path, process: Start) -> None:
    """A session opens and closes between two commits of another process, which is then killed in its dispatch."""
    disk = KillDisk()
    w = process(root, disk)
    w.batch(version=0)
    with process(root).session() as store:
        put(store, "put/0/")
    assert (root / "abort").read_text().startswith("messagestore ")
    kill_when(disk, dispatch, nth=2)
    with pytest.raises(Killed):
        w.batch(version=1)
    assert (root / "abort").read_text().startswith("messagestore ")
    w.die()
    recovered(root)
    assert rows_seen(root) == {0: 5, 1: 5}


def test_no_queue_file_begins_with_zeros_when_the_first_batch_of_a_topic_dies(
    root: Path, scratch: Path, process: Start
) -> None:
    """RocketMQ takes a queue file of zeros for a message. The batch dies at each of its operations."""
    filled(root, process)
    at = 0
    while True:
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        disk = KillDisk(at)
        p = process(copy, disk)
        try:
            p.batch("new", 0, flush=ASYNC_FLUSH)
        except Killed:
            pass
        p.die()
        assert_queue_files_have_units(copy)
        if not disk.dead:
            break
        if walk(copy)[1] > walk(root)[1]:  # sealed: take the batch away, as a power cut may
            overwrite(copy, walk(root)[1], bytes(2048))
        with another_boot():
            recovered(copy)
        assert_queue_files_have_units(copy)
        if walk(copy)[1] == walk(root)[1]:
            assert not list((copy / "consumequeue" / "topic-new").glob("*/*")), f"killed in {disk.killed_in}"
        at += 1
    assert at > 10


def assert_queue_files_have_units(root: Path) -> None:
    for path in (root / "consumequeue").glob("*/*/*"):
        assert struct.unpack_from(">qi", path.read_bytes())[1] > 0, f"{path}: begins with zeros"


def test_a_killed_detach_is_harmless(root: Path, scratch: Path, process: Start) -> None:
    """Spark kills an idle worker in the middle of its detach. At each operation the store is whole, and `abort` goes
    last.
    """
    p = process(root)
    p.batch(version=0)
    p.die()
    at = 0
    while True:
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        disk = KillDisk()
        q = process(copy, disk)
        q.batch(version=1)
        disk.kill_at = len(disk.operations) + at
        try:
            q.detach()
        except Killed:
            q.die()
        with MessageStore.open_read_only(copy, CONFIG):
            assert rows_seen(copy) == {0: 5, 1: 5}
        assert (copy / "abort").exists() or disk.operations[-1].name in ("unlink", "fsync_dir")
        recovered(copy)
        assert rows_seen(copy) == {0: 5, 1: 5}
        if not disk.dead:
            break
        at += 1
    assert at > 5


def test_a_batch_record_that_does_not_fit_begins_in_the_next_segment(root: Path, process: Start) -> None:
    """BLANK comes first, and the batch begins with the next segment. Killed there, the log ends at the start of that
    segment or before it.
    """
    p = process(root, **SIZES)
    p.batch(version=0, rows=92)
    p.detach()
    _, end = walk(root)
    assert 16 * 1024 - 600 < end < 16 * 1024, "the BATCH record would fit"
    disk = KillDisk()
    kill_when(disk, seal, nth=2)  # the BLANK has eight bytes, too
    q = process(root, disk, **SIZES)
    with pytest.raises(Killed):
        q.batch(version=1)
    q.die()
    assert walk(root)[1] == 16 * 1024
    recovered(root)
    r = process(root, **SIZES)
    assert r.batch(version=1).physical_offset == 16 * 1024
    assert rows_seen(root) == {0: 92, 1: 5}


@pytest.mark.parametrize("count", range(1, 8))
def test_a_torn_seal_is_no_record(root: Path, scratch: Path, process: Start, count: int) -> None:
    """Any one to seven of the seal's eight bytes, from either end: no reader of the format sees a record."""
    filled(root, process)
    _, end = walk(root)
    shutil.copytree(root, scratch / "whole")
    process(scratch / "whole").batch(version=1)
    head = file_bytes(scratch / "whole", end, 8)
    disk = KillDisk()
    kill_when(disk, seal)
    p = process(root, disk)
    with pytest.raises(Killed):
        p.batch(version=1)
    p.die()
    for torn in (head[:count].ljust(8, b"\0"), head[-count:].rjust(8, b"\0")):
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        overwrite(copy, end, torn)
        if torn != head:  # the first bytes of TOTALSIZE are zero
            assert walk(copy)[1] == end
            recovered(copy)
            assert rows_seen(copy) == {0: 5}
            assert not any(file_bytes(copy, end, 1 << 18))


def test_an_interrupt_behind_the_commit_point_leaves_a_batch_that_is_finished_later(root: Path, process: Start) -> None:
    """Nobody appends over the batch, and it is there when the store is opened next."""
    p = process(root, disk := KillDisk())

    def interrupting(operation: Operation) -> None:
        if dispatch(operation):
            disk.before = None
            raise KeyboardInterrupt

    disk.before = interrupting
    with pytest.raises((KeyboardInterrupt, StorePoisonedError)):
        p.batch(version=0, rows=20)
    q = process(root)
    q.batch("q", 0, 3)
    assert rows_seen(root) == {0: 20}
    p.batch("p", 0, 3)
    assert p.batch(version=0, rows=20).status == "known"
    p.detach()
    q.detach()
    report = verify(root)
    assert report.ok, report.findings[:3]
