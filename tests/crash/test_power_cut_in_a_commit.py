"""The power goes in a commit or soon after it: what the disk kept, and what the next process and readers make of it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from crash.harness import APP, no_thread_warnings
from crash.imitate import (
    another_boot,
    commit,
    dispatch,
    kill_when,
    log_sync,
    overwrite,
    put,
    read_checkpoint,
    rows_seen,
    seal,
    seen,
    units,
    walk,
)
from crash.simdisk import Killed, Operation, RecordingDisk
from messagestore import (
    ASYNC_FLUSH,
    MessageStore,
    StorePoisonedError,
)
from messagestore.inspect.verify import verify
from sequences import CONFIG, SIZES, Start, filled, image, recording, recovered

pytestmark = no_thread_warnings


def test_a_power_cut_in_a_commit_leaves_a_store_that_opens(root: Path, scratch: Path, process: Start) -> None:
    """A sector of the BATCH record survives and none of the batch's data does, or the other way round: the store opens,
    and the batch is there whole or not at all.
    """
    filled(root, process)
    disk = recording(root)
    p = process(root, disk)
    p.batch(version=1)
    sealed = next(i for i, operation in enumerate(disk.operations) if seal(operation))
    p.die()
    for cut in range(sealed - 1, sealed + 3):
        for number, one in enumerate(disk.images(cut, ("strict", "all", "one missing", "one present"), limit=3)):
            target = one.build(scratch / f"{cut}-{number}")
            with another_boot():
                recovered(target)
                assert rows_seen(target).get(1, 0) in ((0, 5) if cut < sealed + 2 else (5,)), one


def test_an_async_batch_that_survived_does_not_turn_an_earlier_loss_into_damage(root: Path, process: Start) -> None:
    """The power cut took a sector of ASYNC batch 1 and nothing of batch 2. Both batches go, and recovery reports no
    damage.
    """
    filled(root, process)
    p = process(root)
    first = p.batch(version=1, flush=ASYNC_FLUSH)
    p.batch(version=2, flush=ASYNC_FLUSH)
    p.die()
    overwrite(root, first.end - 512, bytes(512))
    with another_boot():
        recovered(root)
        assert rows_seen(root) == {0: 5}
        assert process(root).batch(version=1).status == "appended"


def test_a_batch_that_is_answered_as_known_survives_a_power_cut(root: Path, scratch: Path, process: Start) -> None:
    """The writer is killed between the seal and its sync. The replay is told that the batch is known; a power cut after
    that must not take it.
    """
    disk = recording(root)
    p = process(root, disk)
    p.batch(version=0)
    kill_when(disk, log_sync, nth=2)
    with pytest.raises(Killed):
        p.batch(version=1)
    p.die()
    disk.revive()
    q = process(root, disk)
    assert q.batch(version=1).status == "known"
    target = image(disk, scratch)
    with another_boot():
        recovered(target)
        assert rows_seen(target) == {0: 5, 1: 5}


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_sync_is_not_forgotten_when_its_process_ends(
    root: Path, scratch: Path, process: Start, nth: int
) -> None:
    """The page cache shows the next process a batch whose sync failed, but the disk does not hold it."""
    disk = recording(root)
    p = process(root, disk)
    p.batch(version=0)
    syncs = 0

    def failing(operation: Operation) -> None:
        nonlocal syncs
        if log_sync(operation):
            syncs += 1
            if syncs == nth:
                disk.fail_at = len(disk.operations)

    disk.before = failing
    with pytest.raises(StorePoisonedError):
        p.batch(version=1)
    assert syncs == nth, "synced again after a failed sync"
    p.die()
    q = process(root, disk)
    assert q.batch(version=1).status == ("appended" if nth == 1 else "known")
    target = image(disk, scratch)
    with another_boot():
        recovered(target)
        assert rows_seen(target) == {0: 5, 1: 5}


def test_a_sync_batch_makes_the_async_batch_below_it_durable(root: Path, scratch: Path, process: Start) -> None:
    """An ASYNC batch fills a segment and a SYNC batch opens the next one. At its commit point both batches and the new
    name are on the disk.
    """
    disk = recording(root)
    a, b = process(root, disk, **SIZES), process(root, disk, **SIZES)
    a.batch("a", 0, 70, ASYNC_FLUSH)
    b.batch("b", 0, 30)
    syncs = [i for i, operation in enumerate(disk.operations) if log_sync(operation)]
    sealed = max(i for i, operation in enumerate(disk.operations) if seal(operation))
    cut = next(i for i in syncs if i > sealed) + 1
    assert len(list((root / "commitlog").iterdir())) == 2
    target = image(disk, scratch, cut)
    with another_boot():
        recovered(target)
        assert rows_seen(target, "a") == {0: 70}
        assert rows_seen(target, "b") == {0: 30}


def test_the_checkpoint_is_never_newer_than_the_queues(root: Path, scratch: Path, process: Start) -> None:
    """A broker trusts the queues up to the times in the checkpoint. Whatever a power cut takes, the units older than
    the checkpoint are there.
    """

    class QuickClock(RecordingDisk):
        now_ms = 1_700_000_000_000

        def time_ns(self) -> int:
            self.now_ms += 5_000
            return self.now_ms * 1_000_000

    root.mkdir()
    disk = QuickClock(root)
    with process(root, disk, **SIZES).session() as store:
        for number in range(6):
            put(store, f"put/{number}/" + "x" * 4000, queue_id=number % 2)
            commit(store.writer, APP, number)
    for cut in range(0, disk.position + 1, 2):
        for number, one in enumerate(disk.images(cut, ("strict", "one missing"), limit=1)):
            target = one.build(scratch / f"{cut}-{number}")
            newest = min(read_checkpoint(target)[:2]) - 3000
            found = {(t, q): units(target, t, q) for t, q in (("single", 0), ("single", 1), (f"topic-{APP}", 0))}
            for record in walk(target)[0]:
                queue = found.get((record["topic"], record["queue_id"]))
                if queue is not None and record["store_timestamp_ms"] <= newest:
                    places = [place for place, _, _ in queue]
                    assert record["queue_offset"] < len(places), one
                    assert places[record["queue_offset"]] == record["physical_offset"], one
            shutil.rmtree(target)


def test_a_full_queue_file_is_synced_before_the_second_file_after_it_is_made(root: Path, process: Start) -> None:
    """A broker looks back three queue files, so a power cut must not take anything that lies further back."""
    disk = recording(root)
    p = process(root, disk)
    with p.session() as store:
        commit(store.writer, APP, 0, 3 * 16 * 4)
    made = [o.detail.rsplit("/", 1)[1] for o in disk.operations if o.name == "rename" and f"topic-{APP}/0/" in o.detail]
    assert len(made) == 4
    for number in (2, 3):
        made_at = next(
            i
            for i, o in enumerate(disk.operations)
            if o.name == "rename" and o.detail.endswith(f"topic-{APP}/0/{made[number]}")
        )
        synced = [
            o for o in disk.operations[:made_at] if o.name == "fdatasync" and o.path.endswith(f"0/{made[number - 2]}")
        ]
        assert synced, f"file {number} is made, and file {number - 2} was never synced"


def test_abort_is_removed_only_when_everything_is_synced(root: Path, scratch: Path, process: Start) -> None:
    """Whatever a power cut leaves of a clean close: where `abort` is gone, nothing else is missing."""
    disk = recording(root)
    store = process(root, disk).session()
    put(store, "put/0/")
    commit(store.writer)
    start = disk.position
    store.close()
    gone = 0
    for cut in range(start, disk.position + 1):
        for number, one in enumerate(disk.images(cut, ("strict", "all", "one missing", "one present"), limit=8)):
            target = one.build(scratch / f"{cut}-{number}")
            if not (target / "abort").exists():
                gone += 1
                report = verify(target)
                assert report.ok, (one, report.findings[:2])
                assert report.record_count == 7
            shutil.rmtree(target)
    assert gone


def test_a_reader_that_comes_before_recovery_sees_whole_batches(root: Path, scratch: Path, process: Start) -> None:
    """After a power cut some queue files hold the batch and others do not. A reader starts before any writer has
    recovered.
    """
    filled(root, process)
    disk = recording(root)
    p = process(root, disk)
    p.batch(version=1)
    for one in disk.images(disk.position, ("strict", "one file missing", "one file present", "random")):
        target = one.build(scratch / f"image-{one.label}".replace("/", "-").replace(" ", ""))
        with another_boot():
            assert rows_seen(target) in ({0: 5}, {0: 5, 1: 5}), one


def test_queue_units_do_not_prove_that_async_puts_are_on_the_disk(root: Path, scratch: Path, process: Start) -> None:
    """ASYNC puts follow a SYNC writer in one store. A power cut keeps the units and takes the log: a legal loss, not
    damage.
    """
    filled(root, process)
    disk = recording(root)
    store = process(root, disk, flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=3_600_000).session()
    for number in range(2, 8):
        put(store, f"put/{number}/")
    store.writer.publish()
    for one in disk.images(disk.position, ("one file missing", "one missing", "random")):
        target = one.build(scratch / f"image-{time.monotonic_ns()}")
        with another_boot():
            recovered(target)
            found = seen(target)[("single", 0)]
            assert found == [f"put/{n}/" for n in range(len(found))], one
            assert len(found) >= 2
    store._attached._drop()


def test_after_a_reboot_readers_see_only_what_is_proven_to_be_on_the_disk(root: Path, process: Start) -> None:
    """Before a writer has recovered, readers see the SYNC_FLUSH batches above the clean end, and nothing that may have
    been in the page cache only.
    """
    filled(root, process)
    p = process(root)
    p.batch(version=1)
    p.batch(version=2, flush=ASYNC_FLUSH)
    assert rows_seen(root) == {0: 5, 1: 5, 2: 5}
    p.die()
    with another_boot():
        assert rows_seen(root) == {0: 5, 1: 5}
        with MessageStore.open_read_only(root, CONFIG) as reader:
            end = reader.max_offset(f"topic-{APP}", 0)
            assert reader.get_message(f"topic-{APP}", 0, end + 1).status.name == "OFFSET_OVERFLOW_BADLY"
        recovered(root)
        assert rows_seen(root) == {0: 5, 1: 5, 2: 5}


def test_recovery_syncs_the_names_of_the_segments_it_keeps(root: Path, scratch: Path, process: Start) -> None:
    """An ASYNC batch opened a segment and its process died. When recovery keeps the batch, a power cut must not take
    the segment's name any more.
    """
    disk = recording(root)
    p = process(root, disk, **SIZES)
    p.batch(version=0, rows=20)
    kill_when(disk, dispatch)
    with pytest.raises(Killed):
        p.batch(version=1, rows=100, flush=ASYNC_FLUSH)
    p.die()
    disk.revive()
    q = process(root, disk, **SIZES)
    assert q.batch(version=1, rows=100).status == "known"
    target = image(disk, scratch)
    with another_boot():
        recovered(target)
        assert rows_seen(target) == {0: 20, 1: 100}
