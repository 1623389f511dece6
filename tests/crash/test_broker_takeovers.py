"""A broker, imitated by files, writes before, between and after our writers."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.harness import APP, no_thread_warnings, tree_hash
from crash.imitate import (
    Broker,
    another_boot,
    file_bytes,
    flip,
    kill_when,
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
from crash.simdisk import KillDisk, Killed
from kernel import FLOCK, hide_pids
from messagestore import (
    ASYNC_FLUSH,
    BatchConflictError,
    ChecksumError,
    MessageStore,
    NotAStoreError,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.format.message import BATCH_TOPIC
from messagestore.inspect.verify import verify
from sequences import CONFIG, SIZES, Start, broker_may_lock, filled, recovered, reopened

pytestmark = no_thread_warnings


def test_what_a_broker_appends_between_two_commits_is_kept(root: Path, process: Start) -> None:
    """A broker can come only while nobody is attached. Whoever attaches next finds what it appended."""
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


def test_a_broker_gets_no_lock_between_two_commits(root: Path, process: Start) -> None:
    """A broker recovers before it takes the lock, so writers hold the lock from before their recovery until they have
    tidied up.
    """
    p, q = process(root), process(root)
    p.batch("p", 0)
    assert not broker_may_lock(root)
    q.batch("q", 0)
    p.detach()
    assert not broker_may_lock(root)
    q.detach()
    assert broker_may_lock(root)
    assert not (root / "abort").exists()


@pytest.mark.parametrize("where", [log_write, seal], ids=["data", "seal"])
@pytest.mark.parametrize("closes", [True, False], ids=["broker closes", "broker dies"])
def test_a_broker_takes_over_a_killed_commit(root: Path, process: Start, where: Callable, closes: bool) -> None:
    """A broker goes on where the killed batch began and hands the store back: its messages stay, and no row of the
    batch shows.
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


def test_a_reader_sees_what_a_broker_wrote_after_our_crash(root: Path, process: Start) -> None:
    """A crash left a batch in flight in the state, and then a broker ran. A reader sees its messages and nothing of the
    batch.
    """
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


def test_a_reader_sees_what_a_broker_wrote_after_our_clean_close(root: Path, process: Start) -> None:
    """The state does not change when a broker writes. An idle reader notices its messages all the same."""
    filled(root, process)
    with MessageStore.open_read_only(root, CONFIG) as reader:
        assert reader.max_offset("single", 0) == 2
        broker = Broker(root, CONFIG)
        broker.put("single", b"j0")
        assert reader.max_offset("single", 0) == 3
        broker.close()
        assert reader.max_offset("single", 0) == 3


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "crashed"])
def test_a_broker_that_goes_on_below_our_clean_end_loses_nothing(root: Path, process: Start, closes: bool) -> None:
    """A copy was restored, or a power cut took more than it may: the log ends in the middle of what our state knows."""
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


def test_a_journal_entry_without_its_batch_does_not_count(root: Path, process: Start) -> None:
    """The journal names a batch that is not in the log any more. The replay is appended, and the report says so."""
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


def test_a_truncated_tail_comes_back_as_in_rocketmq(root: Path, process: Start) -> None:
    """Of eight records of one size the fifth is torn. A broker truncates there without zeroing, appends one record of
    the same size, and dies. RocketMQ's next recovery takes the three old records behind it for live ones and dispatches
    them. Nothing in the bytes proves the contrary, so we keep what it keeps.
    """
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


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "crashed"])
def test_a_topic_deleted_and_made_again_shows_its_later_run(root: Path, process: Start, closes: bool) -> None:
    """A broker deletes a topic and makes it again, so that its queue offsets begin at 0 a second time."""
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
    assert closes or any("created again" in note for note in notes)
    with reopened(root) as store:
        put(store, "put/2/", topic="java")
    assert seen(root)[("java", 0)] == ["new0", "new1", "put/2/"]


def test_a_topic_made_again_next_to_its_first_run_shows_its_later_run(root: Path, process: Start) -> None:
    """Nothing lies between the two runs, and the broker dies before it dispatches all of the second one."""
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


def test_a_file_that_a_killed_broker_was_about_to_make_is_removed(root: Path, process: Start) -> None:
    """RocketMQ before 5.3 refuses a log or a queue whose last file has no byte, and would have refused what we left."""
    filled(root, process)
    broker = Broker(root, CONFIG)
    broker.put("java", b"kept")
    empty = [
        root / "commitlog" / f"{(broker.end // CONFIG.mapped_file_size_commit_log + 1) * CONFIG.mapped_file_size_commit_log:020d}",
        root / "consumequeue" / "java" / "0" / f"{CONFIG.mapped_file_size_consume_queue:020d}",
    ]  # fmt: skip
    for path in empty:
        path.write_bytes(b"")
    recovered(root)
    assert not [path for path in empty if path.exists()]
    assert seen(root)[("java", 0)][-1] == "kept"


def test_stores_with_rocksdb_or_batch_queues_are_refused_before_the_first_byte(root: Path, process: Start) -> None:
    """We could not keep such queues up, and a broker could not load what we would leave."""
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


def test_an_idle_writer_leaves_a_store_that_a_broker_opens_as_closed(root: Path, process: Start) -> None:
    """Nobody closes a commit worker of Spark. It detaches by itself, and a broker then starts as after a clean close."""
    p = process(root, attach_timeout="50ms")
    p.batch(version=0)
    deadline = time.monotonic() + 120
    while ((root / "abort").exists() or not broker_may_lock(root)) and time.monotonic() < deadline:
        time.sleep(0.01)  # `abort` goes first, then the lock
    assert not (root / "abort").exists()
    assert broker_may_lock(root)
    last = walk(root)[0][-1]["store_timestamp_ms"]
    assert read_checkpoint(root)[:3] == (last, last, last)


def test_a_store_whose_broker_crashed_once_is_not_refused(root: Path, process: Start) -> None:
    """A broker never zeroes behind its end: after a crash and a clean close, whole old records lie there."""
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


def test_rot_in_what_a_broker_wrote_long_ago_cuts_nothing(root: Path, process: Start) -> None:
    """A bit rots in a segment that a broker flushed weeks ago, then the broker crashes. Its own recovery would not look
    there.
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


def test_a_clean_hand_over_costs_no_walk(root: Path, process: Start) -> None:
    """What a broker closed is not read again, however much it is."""
    with process(root, **SIZES).session() as store:
        put(store, "put/0/")
    broker, _ = java_weeks(root)
    broker.close()
    with reopened(root, **SIZES) as store:
        assert store.report is not None
        assert store.report.record_count == 0
        assert store.max_offset("java", 0) == 40


def test_a_broker_in_another_pid_namespace_holds_the_store(
    root: Path, process: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel answers pid 0 for a broker in a container. It is a broker all the same."""
    filled(root, process)
    with open(root / "lock", "r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        hide_pids(monkeypatch)
        with pytest.raises(StoreLockedError, match="another pid namespace"):
            process(root).batch(version=1)
    assert not (root / "abort").exists()


def test_readers_see_a_brokers_messages_while_a_writer_waits_or_dies_in_its_recovery(
    root: Path, process: Start
) -> None:
    """A broker closed the store after a week of writing. A Python writer has attached since, so the lock alone does not
    say who wrote last.
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


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "crashed"])
def test_part_of_an_async_batch_that_a_broker_kept_is_not_written_twice(
    root: Path, process: Start, closes: bool
) -> None:
    """A power cut took the end of an ASYNC batch, and a broker went on there before we recovered. What it wrote stays,
    and the replay is told that only a part of the batch is in the store.
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
