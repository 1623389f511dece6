"""A real broker opens what our crash left, or we open what its crash left: where the log ends, and what is kept."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.harness import APP, SMALL, no_thread_warnings
from crash.imitate import Process, another_boot, flip, kill_when, overwrite, put, rows_seen, seal, seen, walk
from crash.simdisk import KillDisk, Killed
from interop.compare import check_messages
from interop.java_store import Driver
from interop.steps import append_batch, check, java_puts, java_store
from messagestore import BatchConflictError, ChecksumError, Message, MessageStore
from messagestore.inspect.verify import verify

pytestmark = no_thread_warnings
Start = Callable[..., Driver]


@pytest.mark.parametrize("rows", [5, 150], ids=["in a segment", "BLANK first, over segments"])
def test_a_broker_goes_on_where_a_killed_batch_began(own_java: Start, root: Path, rows: int) -> None:
    """Our data is there and its head is not. Java sees the log end where the batch begins, appends there, and is killed
    in turn.
    """
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/" + "x" * 6000)
        put(store, "put/1/" + "x" * 6000)
    disk = KillDisk()
    kill_when(disk, seal)
    p = Process(root, SMALL, disk)
    with pytest.raises(Killed):
        p.batch(version=0, rows=rows)
    p.die()
    end = walk(root)[1]
    java = own_java()
    theirs = java_store(java, root).open()
    assert theirs.log()["max"] == end
    (place,) = java_puts(theirs, "java", ["j0"])
    assert place == end
    java.kill()
    with MessageStore.open(root, SMALL) as store:
        assert seen(root, SMALL)[("java", 0)] == ["j0"]
        assert append_batch(store, 0, rows) == "appended"
    assert rows_seen(root, config=SMALL) == {0: rows}
    assert verify(root).ok


def check_old_records_are_back(own_java: Start, root: Path) -> None:
    """Behind one new record Java shows the old ones; we show the same, go on behind them, and Java reads that."""
    copy = shutil.copytree(root, root.parent / "copy")
    with java_store(own_java(), copy) as theirs:
        wanted = [body.decode() for body in theirs.bodies("java", 0)]
    assert wanted == ["old0", "old1", "old2", "old3", "new4", "old5", "old6", "old7"]
    with MessageStore.open(root, SMALL) as store:
        assert seen(root, SMALL)[("java", 0)] == wanted
        put(store, "put/0/", topic="java")
    assert seen(root, SMALL)[("java", 0)] == [*wanted, "put/0/"]
    assert verify(root).ok
    with java_store(own_java(), root) as theirs:
        assert [body.decode() for body in theirs.bodies("java", 0)] == [*wanted, "put/0/"]


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "dies"])
def test_old_records_behind_a_log_that_java_cut_come_back_as_in_java(own_java: Start, root: Path, closes: bool) -> None:
    """A record is torn. Java cuts there without zeroing and appends one of the same size, so that whole old records,
    and the units that point to them, lie behind it. At its next start Java takes them for live ones; so do we, and
    refuse nothing.
    """
    java = own_java()
    theirs = java_store(java, root).open()
    places = java_puts(theirs, "java", [f"old{n}" for n in range(8)])
    java.kill()
    flip(root, places[4] + 89)  # in the body
    java = own_java()
    theirs = java_store(java, root).open()
    assert theirs.log()["max"] == places[4]
    java_puts(theirs, "java", ["new4"])
    if closes:
        theirs.close()
    java.kill()
    check_old_records_are_back(own_java, root)


def test_old_records_that_no_unit_points_to_come_back_as_in_java(own_java: Start, root: Path) -> None:
    """A power cut took the units as well. On its next start a killed Java takes the old records behind its new one for
    live ones. So do we: nothing proves which of them were acknowledged.
    """
    java = own_java()
    theirs = java_store(java, root).open()
    places = java_puts(theirs, "java", [f"old{n}" for n in range(8)])
    java.kill()
    flip(root, places[4] + 89)
    queue = next((root / "consumequeue" / "java" / "0").iterdir())
    queue.write_bytes(queue.read_bytes()[: 4 * 20].ljust(SMALL.mapped_file_size_consume_queue, b"\0"))
    java = own_java()
    theirs = java_store(java, root).open()
    java_puts(theirs, "java", ["new4"])
    java.kill()
    check_old_records_are_back(own_java, root)


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "dies"])
def test_a_topic_deleted_and_made_again_shows_its_later_run(own_java: Start, root: Path, closes: bool) -> None:
    """The queue begins at 0 a second time. The later run is the topic, for us and, after us, for Java."""
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
    java = own_java()
    theirs = java_store(java, root).open()
    java_puts(theirs, "java", [f"old{n}" for n in range(4)])
    assert theirs.delete_topic("java") == 1
    java_puts(theirs, "else", ["e0"])
    java_puts(theirs, "java", ["new0", "new1"])
    assert theirs.ends("java", 0) == (0, 2)
    assert seen(root, SMALL)[("java", 0)] == ["new0", "new1"]
    if closes:
        theirs.close()
    java.kill()
    assert seen(root, SMALL)[("java", 0)] == ["new0", "new1"]
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/1/", topic="java")
    assert seen(root, SMALL)[("java", 0)] == ["new0", "new1", "put/1/"]
    with java_store(own_java(), root) as theirs, MessageStore.open_read_only(root, SMALL) as view:
        check_messages(view, theirs)


def test_rot_in_what_a_broker_wrote_long_ago_cuts_nothing(own_java: Start, root: Path) -> None:
    """A bit rots in an old segment, then the broker is killed. Neither Java's recovery nor ours looks there, and
    nothing is cut.
    """
    java = own_java()
    fast = {"flushCommitLogThoroughInterval": 20, "flushIntervalCommitLog": 10, "flushConsumeQueueThoroughInterval": 20}
    theirs = java_store(java, root, flushIntervalConsumeQueue=10, **fast).open()
    start = time.time_ns() // 1_000_000 - 10**7
    bodies = [f"j{n}/" + "x" * 1500 for n in range(40)]
    places = []
    for number, body in enumerate(bodies):
        places += java_puts(theirs, "java", [body], clock=start + 10_000 * number)
    time.sleep(1.5)  # the checkpoint is written once a second
    java.kill()
    flip(root, places[12] + 500)
    java = own_java()
    theirs = java_store(java, root).open()
    assert theirs.ends("java", 0) == (0, 40)
    java.kill()
    with MessageStore.open(root, SMALL) as store:
        assert store.max_offset("java", 0) == 40
        assert store.get_message("java", 0, 39, 1).messages[0].body.startswith(b"j39/")
        with pytest.raises(ChecksumError):
            store.get_message("java", 0, 12, 1)
        put(store, "put/0/", topic="java")
        assert store.max_offset("java", 0) == 41


def test_a_reader_sees_what_a_broker_appends_after_us(own_java: Start, root: Path) -> None:
    """Our state is old, and Java writes for a while, closes or dies. Readers see what it writes, also a reader that was
    there before.
    """
    with MessageStore.open(root, SMALL) as store:
        append_batch(store, 0)
    with MessageStore.open_read_only(root, SMALL) as view:
        assert view.max_offset(f"topic-{APP}", 0) == 2
        java = own_java()
        theirs = java_store(java, root).open()
        java_puts(theirs, f"topic-{APP}", ["java/9/0", "java/9/1"])
        assert view.max_offset(f"topic-{APP}", 0) == 4
        java.kill()
        assert view.max_offset(f"topic-{APP}", 0) == 4
        with MessageStore.open(root, SMALL) as store:
            append_batch(store, 1)
        assert view.max_offset(f"topic-{APP}", 0) == 6
    assert rows_seen(root, config=SMALL) == {0: 5, 1: 5, 9: 2}
    assert verify(root).ok


def test_a_broker_finds_abort_and_makes_the_units_of_a_killed_dispatch(java: Driver, root: Path) -> None:
    """A writer is killed between its commit point and the end of its dispatch, so that some queues have no units.
    `abort` is there, and Java makes them.
    """
    with MessageStore.open(root, SMALL) as store:
        append_batch(store, 0)
    disk = KillDisk()
    kill_when(disk, lambda operation: "/consumequeue/" in operation.path, nth=2)
    p = Process(root, SMALL, disk)
    with pytest.raises(Killed):
        p.batch(version=1)
    p.die()
    with java_store(java, root) as theirs:
        count = sum(len(theirs.bodies(f"topic-{APP}", queue_id)) for queue_id in range(3))
        assert count == 10
    check(root, 2)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_broker_acknowledged_is_there_after_it_is_killed_or_stopped(
    own_java: Start, root: Path, signal_number: int
) -> None:
    """We go on behind it."""
    java = own_java()
    theirs = java_store(java, root).open()
    theirs.pump(topic="t", queues=1, count=10**6, seed=1, padding=100, largestBatch=4)
    while (told := theirs.pumped()["ends"][0]) < 100:
        time.sleep(0.01)
    os.kill(java.pid, signal_number)
    java.process.wait(20)
    with MessageStore.open(root, SMALL) as store:
        high = store.max_offset("t", 0)
        assert high >= told > 0
        store.put_message(Message("t", high.to_bytes(8, "big"), queue_id=0))
    numbers = [int.from_bytes(body[:8], "big") for body in bodies_of(root)]
    assert numbers == list(range(high + 1))


def bodies_of(root: Path) -> list[bytes]:
    with MessageStore.open_read_only(root, SMALL) as store:
        return [m.body for m in store.get_message("t", 0, 0, 10**6).messages]


def test_a_cut_batch_leaves_no_phantom_message_in_a_new_topic(java: Driver, root: Path) -> None:
    """Java finds no message there, and no queue file without a unit."""
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
    disk = KillDisk()
    p = Process(root, SMALL, disk)
    kill_when(disk, seal)
    with pytest.raises(Killed):
        p.batch("new", 0)
    p.die()
    overwrite(root, walk(root)[1], bytes(64))
    with MessageStore.open(root, SMALL):
        pass
    with java_store(java, root) as theirs:
        for queue_id in range(3):
            assert theirs.get("topic-new", queue_id, 0)["status"] == "NO_MESSAGE_IN_QUEUE"


def half_lost(root: Path) -> int:
    """A power cut took the end of an ASYNC batch of eight rows: where the log ends now."""
    with MessageStore.open(root, SMALL) as store:
        append_batch(store, 0)
    p = Process(root, SMALL)
    lost = p.batch(version=1, rows=8, flush="ASYNC_FLUSH")
    p.die()
    place = walk(root, lost.physical_offset)[0][6]["physical_offset"]
    overwrite(root, place, bytes(lost.end - place))
    return place


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "dies"])
def test_part_of_an_async_batch_that_java_kept_is_not_written_twice(own_java: Start, root: Path, closes: bool) -> None:
    """After a power cut Java opens first and knows nothing of batches: it keeps the rows that are whole and goes on
    behind them. What it wrote stays, and the replay is told that only a part of the batch is there.
    """
    place = half_lost(root)
    java = own_java()
    theirs = java_store(java, root).open()
    assert theirs.log()["max"] == place
    assert sum(len(theirs.bodies(f"topic-{APP}", queue_id)) for queue_id in range(3)) == 5 + 5
    java_puts(theirs, "java", ["j0", "j1"])
    if closes:
        theirs.close()
    java.kill()
    with another_boot(), MessageStore.open(root, SMALL) as store:
        assert seen(root, SMALL)[("java", 0)] == ["j0", "j1"]
        assert rows_seen(root, config=SMALL) == {0: 5, 1: 5}
        with pytest.raises(BatchConflictError, match="part"):
            append_batch(store, 1, 8)
        assert append_batch(store, 2) == "appended"
    findings = verify(root).findings
    assert findings, "half a batch is said for as long as it is there"
    assert all("batch" in finding.expected for finding in findings), findings


def test_a_recovery_before_java_takes_a_half_lost_batch_away_as_a_whole(java: Driver, root: Path) -> None:
    """When `messagestore recover` runs before Java, Java never sees a row of the batch."""
    half_lost(root)
    with another_boot():
        with MessageStore.open(root, SMALL):
            pass
        with java_store(java, root) as theirs:
            assert sum(len(theirs.bodies(f"topic-{APP}", queue_id)) for queue_id in range(3)) == 5
            java_puts(theirs, "java", ["j0"])
        with MessageStore.open(root, SMALL) as store:
            assert append_batch(store, 1, 8) == "appended"
        assert rows_seen(root, config=SMALL) == {0: 5, 1: 8}
        assert seen(root, SMALL)[("java", 0)] == ["j0"]
    assert verify(root).ok
