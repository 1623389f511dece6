"""The sequences of two rounds of attacks on drafts of the protocol, one test each, against the protocol as it is.

A broker's part is played by files (`crash.imitate.Broker`): `abort` with a pid, records and units written by hand, a
tail
that was truncated and not zeroed. What needs more than files comes with other tests:

| Finding | What of it is not here | Where |
|---|---|---|
| 2, 3, N14 | that a broker's own `load`, then `start`, meets our lock | interop (Java) |
| 4, N11, N15 | that a broker's recovery ends at S, and appends there | interop (Java); here by a walk with Java's
rules |
| 6, 7, 17 | what a broker makes of the checkpoint, of a missing `abort`, of a zero queue file | interop (Java) |
| 15, N1, N2 | the bytes a broker really leaves behind a truncated log | interop (Java); here imitated |
| 18 | which files a broker that starts by mistake deletes | interop (Java); here each kind is deleted |
| 19 | a broker that deletes a topic and makes it again | interop (Java); here imitated |
| N3 | a broker in another pid namespace | interop (Java); here the kernel's answer is imitated |
| 10, 13b, N13, 24b | stream offsets of Spark | tests of the source |
| N8 | Spark's idle timeout of workers | tests of the sink |
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from crash.harness import APP, ROOMY, SMALL, Promise, check_store, payload, tree_hash
from crash.imitate import (
    Broker,
    Process,
    another_boot,
    commit,
    dispatch,
    file_bytes,
    flip,
    kill_when,
    log_sync,
    log_write,
    overwrite,
    put,
    read_checkpoint,
    read_slot,
    remake_queue,
    rows_seen,
    seal,
    seen,
    units,
    walk,
)
from crash.simdisk import FailDisk, KillDisk, Killed, RecordingDisk
from messagestore import (
    ASYNC_FLUSH,
    BatchConflictError,
    BatchRequest,
    ChecksumError,
    CorruptionError,
    LostBatchesError,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
    NotAStoreError,
    StoreFullError,
    StoreLockedError,
    StorePoisonedError,
    VersionRegressionError,
)
from messagestore.files import writer_lock
from messagestore.files.mapped_file import Disk
from messagestore.format.message import BATCH_TOPIC
from messagestore.read.view import StoreView
from messagestore.verify.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

CONFIG = ROOMY
Start = Callable[..., Process]


@pytest.fixture
def root(scratch: Path) -> Path:
    return scratch / "store"


@pytest.fixture
def process() -> Iterator[Start]:
    """Starts processes; those that are left are killed at the end."""
    started: list[Process] = []

    def start(root: Path, disk: Disk | None = None, **changes: object) -> Process:
        started.append(Process(root, CONFIG.replace(**changes), disk))
        return started[-1]

    yield start
    for one in started:
        one.die()


def filled(root: Path, start: Start, versions: int = 1) -> None:
    """A store that was closed: a few puts, and batches of the app from version 0 on."""
    p = start(root)
    with p.session() as store:
        put(store, "put/0/")
        put(store, "put/1/")
        for version in range(versions):
            commit(store.writer, APP, version)


def reopened(root: Path, **changes: object) -> MessageStore:
    return MessageStore.open(root, CONFIG.replace(**changes))


def recovered(root: Path) -> list[str]:
    """Open and close the store; what recovery had to say."""
    with reopened(root) as store:
        assert store.report is not None
        return store.report.notes


def recording(root: Path) -> RecordingDisk:
    root.mkdir(exist_ok=True)
    return RecordingDisk(root)


def image(disk: RecordingDisk, scratch: Path, cut: int | None = None, mode: str = "strict") -> Path:
    """The store after a power cut."""
    target = scratch / f"image-{time.monotonic_ns()}"
    return disk.image(disk.position if cut is None else cut, mode).build(target)


# ---- first round


def test_01_a_power_cut_in_a_commit_bricks_nothing(root: Path, scratch: Path, process: Start) -> None:
    """1: power goes in a commit, and a sector of the BATCH record survives but none of its data, or the other way
    round.
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


def test_01_async_a_later_batch_that_survived_proves_nothing(root: Path, process: Start) -> None:
    """1, 14: ASYNC batch 1 lost a sector in a power cut and batch 2 did not: both go, and nobody speaks of damage."""
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


def test_02_a_killed_commit_is_not_written_over(root: Path, process: Start) -> None:
    """2a: A dies behind its commit point and before it publishes; B, attached all the time, must not go on at its
    old end.
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


def test_02_a_killed_recovery_is_noticed(root: Path, scratch: Path, process: Start) -> None:
    """2a: B is attached and idle; A attaches, so it recovers, and dies half-way: what it had taken back is made
    again.
    """
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


def test_02_a_broker_between_two_commits_is_noticed(root: Path, process: Start) -> None:
    """2b: a broker may come only when nobody is attached; what it appends is found by whoever attaches next."""
    p = process(root)
    p.batch(version=0)
    p.detach()
    broker = Broker(root, CONFIG)
    for number in range(10):
        broker.put("java", f"j{number}".encode())
    broker.close()
    p.batch(version=1)
    assert seen(root)[("java", 0)] == [f"j{n}" for n in range(10)]
    assert rows_seen(root) == {0: 5, 1: 5}


def java_may_lock(root: Path) -> bool:
    """Whether FileChannel.tryLock(0, 1, false) would get its lock. The file is only read: the writers make way for
    whoever opens it for writing.
    """
    with open(root / "lock", "rb") as file:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        return struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] == fcntl.F_UNLCK


def test_03_a_writer_stays_attached_between_commits(root: Path, process: Start) -> None:
    """3: a broker recovers before it locks: so the lock must hold from before our recovery until we have tidied up."""
    p, q = process(root), process(root)
    p.batch("p", 0)
    assert not java_may_lock(root)
    q.batch("q", 0)
    p.detach()
    assert not java_may_lock(root)
    q.detach()
    assert java_may_lock(root)
    assert not (root / "abort").exists()


@pytest.mark.parametrize("where", [log_write, seal], ids=["data", "seal"])
@pytest.mark.parametrize("closes", [True, False], ids=["broker closes", "broker dies"])
def test_04_a_broker_takes_over_a_killed_commit(root: Path, process: Start, where: Callable, closes: bool) -> None:
    """4, N11: killed amid a batch, a broker goes on at S and hands back: its messages stay, no row of the batch
    shows.
    """
    filled(root, process)
    _, end = walk(root)
    disk = KillDisk(half_writes=True)
    kill_when(disk, where)
    p = process(root, disk)
    with pytest.raises(Killed):
        p.batch(version=1)
    p.die()
    assert walk(root)[1] == end, "a reader of the format sees something of an unfinished batch"
    broker = Broker(root, CONFIG)
    broker.put("java", b"j0")
    broker.put("java", b"j1", unit=closes)
    if closes:
        broker.close()
    recovered(root)
    assert seen(root)[("java", 0)] == ["j0", "j1"]
    assert rows_seen(root) == {0: 5}
    assert process(root).batch(version=1).status == "appended"
    assert rows_seen(root) == {0: 5, 1: 5}


def test_05_a_known_batch_is_on_the_disk(root: Path, scratch: Path, process: Start) -> None:
    """5a: killed between the seal and its sync. The replay is told "known": from then on a power cut must not take
    it.
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
def test_05_a_failed_sync_outlives_its_process(root: Path, scratch: Path, process: Start, nth: int) -> None:
    """5b: a sync fails, the process ends. The page cache shows the batch to the next one, but the disk does not have
    it.
    """
    disk = recording(root)
    p = process(root, disk)
    p.batch(version=0)
    syncs = 0

    def failing(operation: object, *arguments: object, **keywords: object) -> object:
        nonlocal syncs
        if log_sync(operation):  # type: ignore[arg-type]
            syncs += 1
            if syncs == nth:
                disk.fail_at = len(disk.operations)
        return run(operation, *arguments, **keywords)  # type: ignore[arg-type]

    run, disk._run = disk._run, failing  # type: ignore[assignment,method-assign]
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


def test_05_a_sync_batch_makes_safe_what_is_below_it(root: Path, scratch: Path, process: Start) -> None:
    """5c, 5d: an ASYNC batch fills a segment, a SYNC batch opens the next: at its commit point both, and the new
    name.
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


SIZES = {"mapped_file_size_commit_log": SMALL.mapped_file_size_commit_log}


def test_06_the_checkpoint_is_never_newer_than_the_queues(
    root: Path, scratch: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6: a broker trusts the queues up to the checkpoint's times: whatever a power cut takes, units older than it
    are there.
    """
    clock = SimpleNamespace(now=1_700_000_000_000)

    def time_ns() -> int:
        clock.now += 5_000
        return clock.now * 1_000_000

    monkeypatch.setattr(
        "messagestore.write.log_writer.time", SimpleNamespace(time_ns=time_ns, monotonic=time.monotonic)
    )
    disk = recording(root)
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


def test_06_a_full_queue_file_is_synced_before_the_second_after_it(root: Path, process: Start) -> None:
    """6: a broker looks back three queue files: what lies further back must not be lost in a power cut."""
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


def test_07_abort_is_there_while_a_writer_writes(root: Path, process: Start) -> None:
    """7: a session opens and closes cleanly between two commits of another process, which then dies in its dispatch."""
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


def test_07_abort_goes_when_everything_is_synced(root: Path, scratch: Path, process: Start) -> None:
    """7: whatever a power cut leaves of a clean close: where `abort` is gone nothing else may be missing."""
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


def test_08_before_recovery_a_reader_sees_whole_batches(root: Path, scratch: Path, process: Start) -> None:
    """8a, N6: after a power cut some queue files have the batch and others do not; a reader starts before any
    writer.
    """
    filled(root, process)
    disk = recording(root)
    p = process(root, disk)
    p.batch(version=1)
    for one in disk.images(disk.position, ("strict", "one file missing", "one file present", "random")):
        target = one.build(scratch / f"image-{one.label}".replace("/", "-").replace(" ", ""))
        with another_boot():
            assert rows_seen(target) in ({0: 5}, {0: 5, 1: 5}), one


def test_08_a_broker_s_week_after_a_crash_is_seen(root: Path, process: Start) -> None:
    """8b: a crash left "in flight at S", then a broker ran: a reader sees what it wrote, and nothing of the batch."""
    filled(root, process)
    disk = KillDisk()
    kill_when(disk, seal)
    p = process(root, disk)
    with pytest.raises(Killed):
        p.batch(version=1)
    p.die()
    reader = MessageStore.open_read_only(root, CONFIG)
    broker = Broker(root, CONFIG)
    broker.put("java", b"j0")
    assert reader.max_offset("java", 0) == 1
    broker.put("java", b"j1")
    assert [m.body for m in reader.get_message("java", 0, 0).messages] == [b"j0", b"j1"]
    assert rows_seen(root) == {0: 5}
    reader.close()


def test_08_a_broker_takes_over_a_clean_store(root: Path, process: Start) -> None:
    """8c: the same, after a clean close: an idle reader does not sleep on over an unchanged `state`."""
    filled(root, process)
    with MessageStore.open_read_only(root, CONFIG) as reader:
        assert reader.max_offset("single", 0) == 2
        broker = Broker(root, CONFIG)
        broker.put("single", b"j0")
        assert reader.max_offset("single", 0) == 3
        broker.close()
        assert reader.max_offset("single", 0) == 3


def test_08_a_busy_writer_starves_no_reader(root: Path, process: Start) -> None:
    """8d: `state` changes each time a reader looks: it loads V once, and is done."""
    p = process(root)
    store = p.session()
    put(store, "put/0/")

    class Busy(Disk):
        reads = 0

        def pread(self, file, size, position):  # type: ignore[no-untyped-def]
            if file.path.endswith("/state"):
                Busy.reads += 1
                put(store, f"put/{Busy.reads}/")
            return super().pread(file, size, position)

    with MessageStore.open_read_only(root, CONFIG, disk=Busy()) as reader:
        before = Busy.reads
        found = reader.max_offset("single", 0)
        assert Busy.reads == before + 1
        assert found == before + 2
    store.close()


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "crashed"])
def test_09_a_log_that_ends_in_the_middle_of_what_was_known(root: Path, process: Start, closes: bool) -> None:
    """9: a copy is restored, or a power cut took more than it may; a broker goes on below our clean end: all of it
    stays.
    """
    filled(root, process, versions=2)
    records, _ = walk(root)
    place = records[8]["physical_offset"]
    assert records[8]["topic"] == BATCH_TOPIC
    broker = Broker(root, CONFIG, end=place)
    for topic, queue_id in ((f"topic-{APP}", 0), (f"topic-{APP}", 1), (f"topic-{APP}", 2), (BATCH_TOPIC, 0)):
        remake_queue(root, topic, queue_id, [u for u in units(root, topic, queue_id) if u[0] < place], CONFIG)
    for number in range(20):
        broker.put("java", f"j{number}".encode() * (number + 1))
    if closes:
        broker.close()
    kept, _ = walk(root)
    recovered(root)
    assert walk(root)[0][: len(kept)] == kept
    assert len(seen(root)[("java", 0)]) == 20


def test_11_a_journal_entry_without_its_batch_does_not_count(root: Path, process: Start) -> None:
    """11, N14: the journal names a batch that is not in the log any more: the replay is appended, and it is said."""
    filled(root, process, versions=2)
    batch = units(root, BATCH_TOPIC, 0)[1]
    broker = Broker(root, CONFIG, end=batch[0])
    for topic in (f"topic-{APP}", BATCH_TOPIC):
        for queue_id in range(3):
            if wanted := units(root, topic, queue_id):
                remake_queue(root, topic, queue_id, [u for u in wanted if u[0] < batch[0]], CONFIG)
    broker.put("java", b"j0")
    broker.close()
    p = process(root)
    assert p.batch(version=1).status == "appended"
    assert p.store.report is not None
    notes = p.store.report.notes
    assert any(repr(APP) in note and "version 1" in note for note in notes)
    assert any("a broker cut it" in note for note in notes)
    assert rows_seen(root) == {0: 5, 1: 5}
    kept, _ = walk(root)
    assert [r["body"] for r in kept if r["topic"] == "java"] == [b"j0"], "the log cannot be walked through"


def test_12_another_partitioning_is_the_same_batch(root: Path) -> None:
    """12: a replay comes in another order, in other chunks, and is routed to other queues: it is the same batch."""
    bodies = [payload(APP, 0, row) for row in range(10)]

    def columns(part: list[bytes], queue_id: int) -> MessageColumns:
        table = pa.record_batch({"body": pa.array(part, pa.binary()), "keys": pa.array([b[:9].decode() for b in part])})
        return MessageColumns.from_arrow(table, topic="t", queue_id=queue_id)

    request = BatchRequest(app_id=APP, version=0, version_source="spark")
    with reopened(root) as store:
        assert store.append_batch([columns(bodies[:5], 0), columns(bodies[5:], 1)], request).status == "appended"
    with reopened(root) as store:
        other = bodies[::-1]
        parts = [columns(other[:2], 2), columns(other[2:3], 0), columns(other[3:], 1)]
        assert store.append_batch(parts, request).status == "known"


def test_13_every_version_has_its_digest(root: Path, process: Start) -> None:
    """13: the checkpoint was restored some batches back: the old version is compared, not skipped."""
    filled(root, process, versions=11)
    p = process(root)
    assert p.batch(version=8).status == "known"
    with pytest.raises(BatchConflictError):
        p.batch(version=8, rows=6)
    (root / "spark" / "journal").unlink()
    p.detach()
    q = process(root)
    assert q.batch(version=7).status == "known"
    with pytest.raises(BatchConflictError):
        q.batch(version=7, rows=4)


def test_14_a_flipped_bit_in_an_acknowledged_put_is_damage(root: Path, process: Start) -> None:
    """14: SYNC puts, a killed session, one bit flips in the middle: a thousand acknowledged puts are not cut away."""
    store = process(root).session()
    places = [put(store, f"put/{n}/").physical_offset for n in range(100)]
    store._attached._drop()
    flip(root, places[90] + 90)
    before = tree_hash(root)
    with pytest.raises(CorruptionError) as error:
        reopened(root)
    assert error.value.physical_offset == places[90]
    assert tree_hash(root) == before


def test_14_a_flipped_bit_in_the_newest_batch_is_damage(root: Path, process: Start) -> None:
    """14: its own BATCH record proves that its data were synced."""
    p = process(root)
    p.batch(version=0)
    batch = p.batch(version=1)
    p.die()
    flip(root, batch.end - 20)
    before = tree_hash(root)
    with pytest.raises(CorruptionError):
        reopened(root)
    assert tree_hash(root) == before


def test_15_a_truncated_tail_comes_back_as_in_rocketmq(root: Path, process: Start) -> None:
    """15: eight records of one size, the fifth torn; a broker truncates without zeroing, appends one of the same size, and
    dies. RocketMQ's next recovery takes the three old records behind it for live ones, and dispatches them; nothing in the
    bytes proves the contrary, so we keep what it keeps."""
    filled(root, process)
    broker = Broker(root, CONFIG)
    places = [broker.put("java", f"old{n}".encode(), store_ms=broker.now_ms) for n in range(8)]
    flip(root, places[4] + 89)
    remake_queue(root, "java", 0, units(root, "java", 0)[:4], CONFIG)
    second = Broker(root, CONFIG)
    assert second.end == places[4]
    second.now_ms += 1000
    second.put("java", b"new0")
    assert len(walk(root)[0]) == 8 + 8
    assert recovered(root) == []
    assert len(walk(root)[0]) == 8 + 8
    assert seen(root)[("java", 0)] == ["old0", "old1", "old2", "old3", "new0", "old5", "old6", "old7"]
    assert verify(root).ok


def test_16_versions_of_the_user_only_grow(root: Path) -> None:
    """16: `foreachBatch` that skips empty batches, or takes the day as version, leaves gaps that are no loss."""
    with reopened(root) as store:
        for version in (10, 20, 30):
            assert commit(store.writer, "days", version, version_source="user").status == "appended"
        with pytest.raises(VersionRegressionError):
            commit(store.writer, "days", 15, version_source="user")
        with pytest.raises(LostBatchesError):
            commit(store.writer, "spark", 5, on_lost_batches="continue")  # an app that was never here
        assert commit(store.writer, "spark", 0).status == "appended"
        with pytest.raises(LostBatchesError):
            commit(store.writer, "spark", 7)
        assert commit(store.writer, "spark", 7, on_lost_batches="continue").status == "appended"


def test_17_no_queue_file_without_a_unit(root: Path, scratch: Path, process: Start) -> None:
    """17: the first batch of a topic dies at each operation: RocketMQ's folder never has a queue file that begins
    with zeros.
    """
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


@pytest.mark.parametrize("what", ["index", "consumequeue", "both"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_18_a_broker_that_starts_by_mistake(root: Path, process: Start, what: str, how: str) -> None:
    """18: it deletes files before it asks for the lock: what it deletes is made again from the log, and the writer
    goes on.
    """
    p = process(root)
    p.batch(version=0)
    for folder in ("index", "consumequeue") if what == "both" else (what,):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file():
                size = path.stat().st_size
                path.unlink()
                if how == "replaced":
                    path.write_bytes(bytes(size))
    assert p.batch(version=1).status == "appended"
    assert p.batch("other", 0).status == "appended"
    p.detach()
    report = verify(root)
    assert report.ok, report.findings[:3]
    check_store(root, Promise(rows={(APP, 0): 5, (APP, 1): 5}, batches={(APP, 0), (APP, 1)}), CONFIG)


def test_18_a_segment_that_is_gone_poisons(root: Path, process: Start) -> None:
    """18: a segment that is not at its path any more: nothing is acknowledged into an unlinked file."""
    p = process(root)
    p.batch(version=0)
    (path,) = (root / "commitlog").iterdir()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StorePoisonedError):
        p.batch(version=1)
    assert p.batch(version=1).status == "appended", "the next commit opens the store again"
    assert rows_seen(root) == {0: 5, 1: 5}


def test_18_a_segment_that_is_gone_poisons_a_session(root: Path, process: Start) -> None:
    """18: the same for plain puts."""
    store = process(root).session()
    put(store, "put/0/")
    (path,) = (root / "commitlog").iterdir()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StorePoisonedError):
        put(store, "put/1/")
    store.close()
    assert seen(root)[("single", 0)] == ["put/0/"]


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "crashed"])
def test_19_a_topic_made_again(root: Path, process: Start, closes: bool) -> None:
    """19: a broker deletes a topic and makes it again: offsets begin at 0 a second time; the later run is the topic."""
    filled(root, process)
    broker = Broker(root, CONFIG)
    for number in range(4):
        broker.put("java", f"old{number}".encode())
    broker.put("else", b"e0")
    shutil.rmtree(root / "consumequeue" / "java")
    broker.next[("java", 0)] = 0
    broker.put("java", b"new0")
    broker.put("java", b"new1")
    if closes:
        broker.close()
    notes = recovered(root)
    assert seen(root)[("java", 0)] == ["new0", "new1"]
    assert closes or any("made again" in note for note in notes)
    with reopened(root) as store:
        put(store, "put/2/", topic="java")
    assert seen(root)[("java", 0)] == ["new0", "new1", "put/2/"]


def test_19_a_topic_made_again_side_by_side(root: Path, process: Start) -> None:
    """19: the same with nothing between the two runs, and the broker dies before it dispatches the second one."""
    filled(root, process)
    broker = Broker(root, CONFIG)
    for number in range(4):
        broker.put("java", f"old{number}".encode())
    shutil.rmtree(root / "consumequeue" / "java")
    broker.next[("java", 0)] = 0
    broker.put("java", b"new0")
    broker.put("java", b"new1")
    broker.put("java", b"new2", unit=False)
    recovered(root)
    assert seen(root)[("java", 0)] == ["new0", "new1", "new2"]


def test_20_a_full_disk_is_undone_in_place(root: Path, process: Start) -> None:
    """20: no room amid a batch: nothing of it is left, the lock is free, and the process goes on when there is room."""
    filled(root, process)
    _, end = walk(root)
    disk = FailDisk(error_number=errno.ENOSPC)
    p = process(root, disk)
    p.batch("other", 0)
    _, end = walk(root)
    run = disk._run

    def failing(operation, *arguments, **keywords):  # type: ignore[no-untyped-def]
        if log_write(operation) and disk.fail_at is None:
            disk.fail_at = len(disk.operations)
            disk.half_writes = True
        return run(operation, *arguments, **keywords)

    disk._run = failing  # type: ignore[method-assign]
    with pytest.raises(StoreFullError):
        p.batch(version=1)
    assert not any(file_bytes(root, end, 1 << 20))
    assert read_slot(root)["in_flight"] == -1
    assert p.batch(version=1).status == "appended"


def test_20_torn_bytes_that_cannot_be_saved(root: Path, process: Start) -> None:
    """20: recovery wants to save torn bytes on the disk that is full: that is said, and the store opens."""
    filled(root, process)
    store = process(root).session()
    place = put(store, "put/2/", topic="single").physical_offset
    end = store.writer.end.physical_offset
    store._attached._drop()
    overwrite(root, end, b"torn" * 100)
    disk = FailDisk(error_number=errno.ENOSPC)
    run = disk._run

    def failing(operation, *arguments, **keywords):  # type: ignore[no-untyped-def]
        if operation.name == "open_new" and "cut" in operation.path:
            disk.fail_at = len(disk.operations)
        return run(operation, *arguments, **keywords)

    disk._run = failing  # type: ignore[method-assign]
    p = process(root, disk)
    with p.session() as again:
        assert again.report is not None
        assert any("could not be saved" in note for note in again.report.notes)
        assert not any(file_bytes(root, end, 1 << 20))
        assert again.look_message_by_offset(place) is not None


@pytest.mark.parametrize("limit", [8192, 1 << 20], ids=["maxMessageSize", "a segment"])
def test_21_a_batch_record_that_cannot_fit_is_refused(root: Path, process: Start, limit: int) -> None:
    """21: a batch into so many queues that its BATCH record is too large: refused before the first byte."""
    with process(root, max_message_size=limit, **SIZES).session() as store:
        store.create_topic("wide", 3000)
        put(store, "put/0/")
        before = tree_hash(root)
        rows = np.arange(3000)
        table = pa.record_batch({"body": pa.array([b"x"] * 3000), "queue_id": pa.array(rows, pa.int32())})
        with pytest.raises(MessageIllegalError):
            store.append_batch(MessageColumns.from_arrow(table, topic="wide"), BatchRequest(app_id=APP, version=0))
        assert tree_hash(root) == before
        put(store, "put/1/")
    assert seen(root)[("single", 0)] == ["put/0/", "put/1/"]


def flip_in_batch_record(root: Path, copy: Path, position: int) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    place = units(copy, BATCH_TOPIC, 0)[-1][0]
    flip(copy, place + position)
    before = tree_hash(copy)
    with pytest.raises(CorruptionError):
        reopened(copy)
    assert tree_hash(copy) == before, f"byte {position}"


@pytest.mark.parametrize("which", ["some", pytest.param("every", marks=pytest.mark.slow)])
def test_22_the_batch_record_itself_is_covered(root: Path, scratch: Path, process: Start, which: str) -> None:
    """22: a bit flips in the header, the topic, the keys or the body of a BATCH record: damage, not an unfinished
    batch.
    """
    p = process(root)
    p.batch(version=0)
    p.batch(version=1)
    p.die()
    size = units(root, BATCH_TOPIC, 0)[-1][1]
    assert size > 300
    some = [0, 3, 4, 8, 12, 20, 28, 36, 40, 48, 56, 64, 72, 76, 84, 87, 88, 100, 300, size - 60, size - 20, size - 2]
    for position in some if which == "some" else range(size):
        flip_in_batch_record(root, scratch / "copy", position)


def test_22_users_cannot_put_to_the_batch_topic(root: Path) -> None:
    """22: what is in that topic is ours."""
    with reopened(root) as store:
        with pytest.raises(MessageIllegalError):
            put(store, "x", topic=BATCH_TOPIC)
        table = pa.record_batch({"body": pa.array([b"x"]), "topic": pa.array([BATCH_TOPIC])})
        with pytest.raises(MessageIllegalError):
            store.append_batch(MessageColumns.from_arrow(table, queue_id=0))


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
def test_23_a_forked_child_can_neither_write_nor_unlock(root: Path, process: Start) -> None:
    """23: a child has the parent's objects. Using or closing them must neither write a byte nor let anybody in."""
    store = process(root).session()
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
    assert not java_may_lock(root)
    with pytest.raises(StoreLockedError):
        process(root, lock_timeout="0ms").batch()
    put(store, "put/1/")
    store.close()
    assert seen(root)[("single", 0)] == ["put/0/", "put/1/"]


def test_23_a_put_does_not_land_inside_a_batch(root: Path, process: Start) -> None:
    """23: another thread puts while a batch is appended: it lands before S or behind E."""
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


def test_24_foreign_forms_are_refused(root: Path, process: Start) -> None:
    """24a: RocksDB queues, and batch queues: refused before the first byte."""
    filled(root, process)
    for name in ("consumequeue/CURRENT", "batchconsumequeue/b/0/x"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        before = tree_hash(root), read_slot(root)
        with pytest.raises(NotAStoreError):
            process(root).batch(version=1)
        assert (tree_hash(root), read_slot(root)) == before
        assert not (root / "abort").exists()
        path.unlink()
        shutil.rmtree(root / "batchconsumequeue", ignore_errors=True)
    assert process(root).batch(version=1).status == "appended"


def test_25_an_idle_writer_tidies_up(root: Path, process: Start) -> None:
    """25: nobody closes a commit worker: it detaches by itself, and a broker then starts as after a clean close."""
    p = process(root, attach_timeout="50ms")
    p.batch(version=0)
    deadline = time.monotonic() + 120
    while ((root / "abort").exists() or not java_may_lock(root)) and time.monotonic() < deadline:
        time.sleep(0.01)  # `abort` goes first, then the lock
    assert not (root / "abort").exists()
    assert java_may_lock(root)
    last = walk(root)[0][-1]["store_timestamp_ms"]
    assert read_checkpoint(root)[:3] == (last, last, last)


# ---- second round


def test_n1_a_broker_that_crashed_once_is_not_refused(root: Path, process: Start) -> None:
    """N1: a broker never zeroes behind its end: after a crash and a clean close whole old records lie there."""
    filled(root, process)
    broker = Broker(root, CONFIG)
    places = [broker.put("java", f"old{n}".encode()) for n in range(8)]
    flip(root, places[4] + 89)
    remake_queue(root, "java", 0, units(root, "java", 0)[:4], CONFIG)
    Broker(root, CONFIG).close()
    recovered(root)
    assert seen(root)[("java", 0)] == ["old0", "old1", "old2", "old3"]
    with reopened(root) as store:
        put(store, "put/2/", topic="java")
    assert seen(root)[("java", 0)][4:] == ["put/2/"]


def java_weeks(root: Path) -> tuple[Broker, list[int]]:
    """A broker fills several segments, ten seconds from message to message."""
    broker = Broker(root, CONFIG.replace(**SIZES))
    places = []
    for number in range(40):
        broker.now_ms += 10_000
        places.append(broker.put("java", f"j{number}/".encode() + b"x" * 1500))
    return broker, places


def test_n2_what_a_broker_wrote_long_ago_is_not_cut(root: Path, process: Start) -> None:
    """N2: a bit rots in a segment a broker flushed weeks ago, then the broker crashes: its own recovery would not
    look there.
    """
    with process(root, **SIZES).session() as store:
        put(store, "put/0/")
    broker, places = java_weeks(root)
    broker.checkpoint(broker.now_ms - 5000)
    flip(root, places[12] + 500)
    before = file_bytes(root, 0, 1 << 20)
    with reopened(root, **SIZES) as store:
        assert store.report is not None
        assert store.report.record_count < 20
        assert store.max_offset("java", 0) == 40
        assert store.get_message("java", 0, 39, 1).messages[0].body.startswith(b"j39/")
        with pytest.raises(ChecksumError):
            store.get_message("java", 0, 12, 1)
        with pytest.raises(ChecksumError):
            list(store.read("java", 0, 0))
    assert file_bytes(root, 0, 1 << 20) == before


def test_n2_a_clean_hand_over_costs_no_walk(root: Path, process: Start) -> None:
    """N2: what a broker closed is not read again, however much it is."""
    with process(root, **SIZES).session() as store:
        put(store, "put/0/")
    broker, _ = java_weeks(root)
    broker.close()
    with reopened(root, **SIZES) as store:
        assert store.report is not None
        assert store.report.record_count == 0
        assert store.max_offset("java", 0) == 40


@pytest.mark.parametrize("where", ["in the middle", "last of its queue", "last of all"])
def test_n2_rot_in_what_a_broker_closed_is_said_not_cut(root: Path, process: Start, where: str) -> None:
    """N1, N2: a bit rots in a store that a broker closed: the message is there, reading it is an error, nothing is
    reused.
    """
    filled(root, process)
    broker = Broker(root, CONFIG)
    places = [broker.put("java", f"j{n}".encode()) for n in range(5)]
    if where == "last of its queue":
        broker.put("else", b"e0")
    broker.close()
    row = 2 if where == "in the middle" else 4
    flip(root, places[row] + 89)
    before = units(root, "java", 0)
    with reopened(root) as store:
        assert store.max_offset("java", 0) == 5
        with pytest.raises(CorruptionError):
            store.get_message("java", 0, row, 1)
        assert put(store, "put/2/", topic="java").queue_offset == 5
    assert units(root, "java", 0)[:5] == before


@pytest.mark.parametrize("rows", [4, 7])
def test_n2_rot_in_what_we_closed_is_said_not_cut(root: Path, process: Start, rows: int) -> None:
    """N2: the same in a store of ours: a writer that goes on must not give the rotten message's number to another."""
    p = process(root)
    p.batch(version=0, rows=rows)
    p.detach()
    place = units(root, f"topic-{APP}", 0)[-1][0]
    flip(root, place + 90)
    before = units(root, f"topic-{APP}", 0)
    with MessageStore.open_read_only(root, CONFIG) as reader:
        assert reader.max_offset(f"topic-{APP}", 0) == len(before)
        with pytest.raises(CorruptionError):
            reader.get_message(f"topic-{APP}", 0, len(before) - 1, 1)
    q = process(root)
    q.batch(version=1, rows=rows)
    assert units(root, f"topic-{APP}", 0)[: len(before)] == before


@pytest.mark.parametrize("position", [0, 4, 28])
def test_n2_a_head_that_rots_in_what_we_closed_is_not_cut(root: Path, process: Start, position: int) -> None:
    """N2: TOTALSIZE, magic or place of the last record rot after a clean close: refused, and not taken for the log's
    end.
    """
    filled(root, process)
    last = walk(root)[0][-1]
    flip(root, last["physical_offset"] + position + 3)
    before = tree_hash(root)
    for _ in range(2):
        with pytest.raises(CorruptionError) as error:
            reopened(root)
        assert error.value.physical_offset == last["physical_offset"]
        assert tree_hash(root) == before


def test_n3_a_broker_in_another_pid_namespace(root: Path, process: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: the kernel answers pid 0 for a broker in a container: it is a broker all the same."""
    filled(root, process)
    with open(root / "lock", "r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        monkeypatch.setattr(writer_lock, "_in_the_way", lambda fd, kind, path: writer_lock.Holder(0))
        with pytest.raises(StoreLockedError, match="another pid namespace"):
            process(root).batch(version=1)
    assert not (root / "abort").exists()


def test_n4_python_holds_the_lock_but_a_broker_wrote_last(root: Path, process: Start) -> None:
    """N4a: a broker closed after a week; a Python writer has attached and waits, or dies in its recovery: readers
    see the week.
    """
    filled(root, process)
    holder = process(root)
    broker = Broker(root, CONFIG)
    for number in range(5):
        broker.put("java", f"j{number}".encode())
    broker.close()
    for at in range(0, 30, 3):
        disk = KillDisk(at)
        p = process(root, disk)
        try:
            p.session()
        except (Killed, StorePoisonedError):
            pass
        assert len(seen(root)[("java", 0)]) == 5, f"a writer died in {disk.killed_in}"
        p.die()
    holder.die()


@pytest.mark.parametrize("closes", [False, True], ids=["attached", "come and gone"])
def test_n4_a_writer_comes_while_a_reader_looks_around(root: Path, process: Start, closes: bool) -> None:
    """N4b: the store is closed, a reader collects the ends of its queues, and in between a writer commits a batch."""
    filled(root, process)
    p = process(root)
    queues = [(f"topic-{APP}", queue_id) for queue_id in range(3)]

    class Slow(Disk):
        done = False

        def pread_into(self, file, buffer, position):  # type: ignore[no-untyped-def]
            if file.path.endswith(f"topic-{APP}/1/{0:020d}") and not Slow.done:
                Slow.done = True
                p.batch(version=1, rows=9)
                if closes:
                    p.detach()
            return super().pread_into(file, buffer, position)

    view = StoreView(root, CONFIG, Slow())
    ends = view.max_offsets(queues)
    assert Slow.done
    assert list(ends.values()) in ([2, 2, 1], [5, 5, 4])
    view.close()


def test_n4_writers_that_come_and_go_all_the_time(root: Path, process: Start) -> None:
    """N4b: each time the reader looks around a writer comes, commits and goes: it still sees whole batches, and is done."""
    filled(root, process)
    queues = [(f"topic-{APP}", queue_id) for queue_id in range(3)]

    class Busy(Disk):
        versions = 0

        def pread_into(self, file, buffer, position):  # type: ignore[no-untyped-def]
            if file.path.endswith(f"topic-{APP}/1/{0:020d}"):
                Busy.versions += 1
                p = process(root)
                p.batch(version=Busy.versions, rows=3)
                p.detach()
            return super().pread_into(file, buffer, position)

    view = StoreView(root, CONFIG, Busy())
    for _ in range(3):
        ends = list(view.max_offsets(queues).values())
        assert ends[0] - 2 == ends[1] - 2 == ends[2] - 1 > 0
    assert Busy.versions < 60
    view.close()


def test_n5_async_is_not_proven_by_units(root: Path, scratch: Path, process: Start) -> None:
    """N5: ASYNC puts in a store that a SYNC writer used before; a power cut keeps the units and takes the log."""
    filled(root, process)
    disk = recording(root)
    store = process(root, disk, flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=3_600_000).session()
    for number in range(2, 8):
        put(store, f"put/{number}/")
    store.writer.drain()
    for one in disk.images(disk.position, ("one file missing", "one missing", "random")):
        target = one.build(scratch / f"image-{time.monotonic_ns()}")
        with another_boot():
            recovered(target)
            found = seen(target)[("single", 0)]
            assert found == [f"put/{n}/" for n in range(len(found))], one
            assert len(found) >= 2
    store._attached._drop()


def test_n6_v_of_another_boot_counts_as_far_as_it_is_proven(root: Path, process: Start) -> None:
    """N6: after a restart of the machine, and before a writer has recovered, readers see what is proven to be on the disk:
    SYNC_FLUSH batches above the clean end, and not what was only in the page cache."""
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


def test_n7_the_anchor_is_the_last_record_below_c(root: Path, process: Start) -> None:
    """N7: also where C stands behind a BLANK, at the start of a segment."""
    with process(root, **SIZES).session() as store:
        for version in range(8):
            commit(store.writer, APP, version, 12)
            store.writer.move_clean()
            slot = read_slot(root)
            last = walk(root)[0][-1]
            assert (slot["anchor_position"], slot["anchor_size"]) == (last["physical_offset"], last["size"])
            assert slot["clean_end"] == slot["visible_end"] == last["physical_offset"] + last["size"]
    assert len(list((root / "commitlog").iterdir())) > 1


def test_n8_a_killed_detach_is_harmless(root: Path, scratch: Path, process: Start) -> None:
    """N8: Spark kills an idle worker amid its detach: at each operation the store is whole, and `abort` goes last."""
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


def test_n9_three_rules_for_versions(root: Path, process: Start) -> None:
    """N9: known; not known and not above the last; above last + 1: in this order, for every app."""
    p = process(root)
    for version in range(6):
        p.batch(version=version)
    p.batch(version=8, on_lost_batches="continue")
    p.batch(version=9)
    for version in (6, 7):
        with pytest.raises(VersionRegressionError):
            p.batch(version=version)
        assert p.batch(version=version, on_version_regression="skip").status == "skipped"
    assert p.batch(version=3).status == "known"
    assert p.batch(version=9).status == "known"
    assert p.batch(version=10, rows=0).status == "appended"
    assert p.batch(version=10, rows=0).status == "known"
    with pytest.raises(LostBatchesError):
        p.batch(version=12)


def test_n10_an_idle_flush_thread_leaves_state_alone(root: Path, process: Start) -> None:
    """N10: the flush thread of an ASYNC sink fails long after the lock was given back: V of the next writer must not
    go back.
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


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "crashed"])
def test_n11_part_of_an_async_batch_that_a_broker_kept(root: Path, process: Start, closes: bool) -> None:
    """N11, 9: a power cut took the end of an ASYNC batch, a broker came first and went on there: what it wrote stays, and
    the replay is told that only a part of the batch is in the store.
    """
    filled(root, process)
    p = process(root)
    batch = p.batch(version=1, rows=8, flush=ASYNC_FLUSH)
    p.die()
    place = walk(root, batch.physical_offset)[0][7]["physical_offset"]
    overwrite(root, place, bytes(batch.end - place))
    with another_boot():
        broker = Broker(root, CONFIG)
        assert broker.end == place
        for queue_id in range(3):
            topic = f"topic-{APP}"
            remake_queue(root, topic, queue_id, [u for u in units(root, topic, queue_id) if u[0] < place], CONFIG)
        broker.put("java", b"j0")
        broker.put("java", b"j1")
        if closes:
            broker.close()
        recovered(root)
        assert seen(root)[("java", 0)] == ["j0", "j1"]
        assert rows_seen(root) == {0: 5, 1: 6}
        q = process(root)
        with pytest.raises(BatchConflictError, match="part"):
            q.batch(version=1, rows=8)
        assert q.batch(version=1, rows=8, on_replay_mismatch="skip").status == "skipped"
        assert q.batch(version=2).status == "appended"


def test_n12_writers_that_take_turns_do_not_recover(root: Path, process: Start) -> None:
    """N12: two sinks on one store: each catches up from its cached end to V, and C does not move with each commit."""
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


def test_n15_blank_first_then_s(root: Path, process: Start) -> None:
    """N15b: the BATCH record does not fit: BLANK, S is the next segment's start; killed there, the log ends at S or
    before.
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
def test_n15_a_torn_seal_is_no_record(root: Path, scratch: Path, process: Start, count: int) -> None:
    """N15c: any one to seven of the eight bytes, from either end: no reader of the format sees a record."""
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


def test_n15_a_missing_segment_below_e_is_damage(root: Path, process: Start) -> None:
    """N15d: a segment in the middle of a SYNC batch is gone: refused, nothing cut."""
    p = process(root, **SIZES)
    p.batch(version=0, rows=20)
    p.batch(version=1, rows=250)
    p.die()
    paths = sorted((root / "commitlog").iterdir())
    assert len(paths) > 3
    paths[-1].unlink()
    before = tree_hash(root)
    with pytest.raises(CorruptionError):
        recovered(root)
    assert tree_hash(root) == before


def test_n15_recovery_syncs_the_names_it_found(root: Path, scratch: Path, process: Start) -> None:
    """N15e: an ASYNC batch opened a segment and its process died; recovery keeps it: the name must be safe then,
    too.
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


def test_n15_what_is_behind_its_commit_point_is_finished(root: Path, process: Start) -> None:
    """N15f: an interrupt behind the commit point: nobody appends over the batch, it is there when the store is
    opened next.
    """

    class Interrupting(KillDisk):
        armed = True

        def _run(self, operation, *arguments, **keywords):  # type: ignore[no-untyped-def]
            if self.armed and dispatch(operation):
                self.armed = False
                raise KeyboardInterrupt
            return super()._run(operation, *arguments, **keywords)

    p = process(root, Interrupting())
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
