"""The sequences of the protocol's reviews in which a Java broker has a part, with the real one in it.

tests/crash/test_protocol_review.py plays the broker by files; the numbers are its findings'.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from crash.harness import APP, SMALL, Promise, batch_columns, check_store
from crash.imitate import Process, another_boot, flip, kill_when, overwrite, put, rows_seen, seal, seen, walk
from crash.simdisk import KillDisk, Killed
from interop.compare import check_messages
from interop.java_store import ANSWER_S, Driver, JavaError, JavaStore, java_config, single
from interop.trees import tree
from messagestore import BatchConflictError, BatchRequest, ChecksumError, Message, MessageStore, StoreLockedError
from messagestore.files.writer_lock import Attachment
from messagestore.verify.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

Start = Callable[..., Driver]
CONFIG = java_config(SMALL)


def java_store(java: Driver, root: Path, **settings: object) -> JavaStore:
    return JavaStore(java, root, {**CONFIG, **settings})


def append_batch(store: MessageStore, version: int, rows: int = 5) -> str:
    request = BatchRequest(app_id=APP, version=version, version_source="spark", flush_disk_type="SYNC_FLUSH")
    return store.append_batch(batch_columns(APP, version, rows), request).status


def java_puts(java: JavaStore, topic: str, bodies: list[str], **fields: object) -> list[int]:
    """Put one by one; where they are."""
    found = java.put([single(topic, body.encode(), **fields) for body in bodies])
    assert all(each["ok"] for each in found)
    java.dispatched()
    return [each["physicalOffset"] for each in found]


def check(root: Path, versions: int = 0) -> None:
    """Everything holds; the batches so far are there once, and known."""
    rows = {(APP, version): 5 for version in range(versions)}
    puts = [f"put/{number}/" for number in range(4)]
    check_store(root, Promise(rows=rows, batches=set(rows), maybe_puts=puts), SMALL)


# ---- locks


@pytest.fixture
def no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system: only the lock keeps a broker out."""
    monkeypatch.setattr(Attachment, "_lease", lambda attachment: True)


@pytest.mark.usefixtures("no_leases")
def test_03_a_broker_cannot_start_while_we_are_attached(java: Driver, root: Path) -> None:
    """3, without leases: Java recovers, then we attach and append, then Java asks for the lock: it gets none, and
    overwrites nothing."""
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
    theirs = java_store(java, root).make()
    theirs.load()
    with MessageStore.open(root, SMALL) as store:
        assert append_batch(store, 0) == "appended"
        with pytest.raises(JavaError, match="Lock failed"):
            theirs.start()
        assert append_batch(store, 1) == "appended"
    theirs.forget()
    assert rows_seen(root, config=SMALL) == {0: 5, 1: 5}
    with java_store(java, root) as again:
        with MessageStore.open_read_only(root, SMALL) as store:
            check_messages(store, again)
        java_puts(again, "java", ["j0"])
    assert seen(root, SMALL)[("java", 0)] == ["j0"]
    check(root, 2)


def test_03_we_cannot_write_while_a_broker_loads(java: Driver, root: Path) -> None:
    """3, N14: Java is made, and loads, before it asks for the lock: all the while sessions and commits are refused by
    name, change nothing, and do not disturb its start."""
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
    theirs = java_store(java, root)
    for step in (theirs.make, theirs.load):
        step()
        before = tree(root)
        with pytest.raises(StoreLockedError, match=rf"pid {java.pid} \(java\) on .* has it open for writing"):
            MessageStore.open(root, SMALL)
        with pytest.raises(StoreLockedError, match=rf"pid {java.pid}\b"):
            Process(root, SMALL).batch()
        assert tree(root) == before
    theirs.start()
    java_puts(theirs, "java", ["j0"])
    theirs.close()
    with MessageStore.open(root, SMALL) as store:
        assert append_batch(store, 0) == "appended"
    assert seen(root, SMALL)[("java", 0)] == ["j0"]
    check(root, 1)


def test_n14_short_sessions_beside_a_broker_that_starts(own_java: Start, root: Path) -> None:
    """N14: a process opens, puts and closes all the time, and a broker starts, writes and closes again and again: a put is
    refused by name, or it is there, once, for both."""
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
    told, stop = root.parent / "told", root.parent / "stop"
    java = own_java()
    with open(told, "w") as out:
        writer = subprocess.Popen([sys.executable, "-c", SHORT_SESSIONS, str(root), str(stop)], stdout=out)
    try:
        for number in range(5):
            time.sleep(0.3)
            theirs = java_store(java, root).make()
            time.sleep(0.1)
            theirs.load()
            time.sleep(0.2)
            theirs.start()
            java_puts(theirs, "java", [f"j{number}"])
            theirs.close()
        time.sleep(0.3)
    finally:
        stop.touch()
        writer.wait(20)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    acknowledged = [line[1] for line in lines if line[0] == "put"]
    refused = {line[1] for line in lines if line[0] == "refused"}
    assert len(acknowledged) > 10 and refused
    assert all(f"pid {java.pid}" in text or "cannot see" in text for text in refused), refused
    assert seen(root, SMALL)[("short", 0)] == acknowledged
    assert seen(root, SMALL)[("java", 0)] == [f"j{number}" for number in range(5)]
    assert verify(root).ok
    with java_store(java, root) as theirs:
        assert [body.decode() for body in theirs.bodies("short", 0)] == acknowledged


SHORT_SESSIONS = """
import json, os, sys, time
from messagestore import Message, MessageStore, StoreConfig, StoreLockedError
root, stop = sys.argv[1:]
number = 0
while not os.path.exists(stop):
    body = f"short/{number}"
    try:
        with MessageStore.open(root, StoreConfig(lock_timeout="200ms")) as store:
            store.put_message(Message("short", body.encode(), queue_id=0))
        print(json.dumps(["put", body]), flush=True)
        number += 1
    except StoreLockedError as error:
        print(json.dumps(["refused", str(error)]), flush=True)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("what", ["session", "commits"])
def test_18_a_broker_that_starts_waits_and_takes_over(java: Driver, root: Path, what: str) -> None:
    """18: what was begun is finished, and the broker finds a store that was closed; who wants to write then is told so.
    Also amid a batch."""
    p = Process(root, SMALL)
    if what == "session":
        store = p.session()
        put(store, "put/0/")
        assert append_batch(store, 0) == "appended"
    else:
        assert p.batch(version=0).status == "appended"
    with java_store(java, root) as theirs:
        assert theirs.ends(f"topic-{APP}", 0) == (0, 2)
        with pytest.raises(StoreLockedError, match="RocketMQ broker"):
            put(store, "put/1/") if what == "session" else p.batch(version=1)
        java_puts(theirs, "java", ["j0"])
    if what == "session":
        store.close()
    disk = KillDisk()
    amid, run = Process(root, SMALL, disk), disk._run
    starts: list[Future[object]] = []
    theirs = java_store(java, root)

    def at_the_seal(operation, *arguments, **keywords):  # type: ignore[no-untyped-def]
        if seal(operation) and not starts:
            starts.append(theirs.opening())
            time.sleep(0.5)
            assert not starts[0].done()
        return run(operation, *arguments, **keywords)

    disk._run = at_the_seal  # type: ignore[method-assign]
    assert amid.batch(version=1).status == "appended"
    starts[0].result(ANSWER_S)
    assert theirs.ends(f"topic-{APP}", 0) == (0, 4)
    with pytest.raises(StoreLockedError, match="RocketMQ broker"):
        amid.batch(version=2)
    java_puts(theirs, "java", ["j1"])
    theirs.close()
    assert amid.batch(version=2).status == "appended"
    amid.detach()
    assert seen(root, SMALL)[("java", 0)] == ["j0", "j1"]
    check(root, 3)


def test_03_we_cannot_write_while_a_broker_lives(java: Driver, root: Path) -> None:
    """The other direction, and the error names the holder: session, sink and recovery wait, and change nothing."""
    with java_store(java, root) as theirs:
        java_puts(theirs, "java", ["j0"])
        before = tree(root)
        with pytest.raises(StoreLockedError, match=rf"RocketMQ broker.*pid {java.pid}\b"):
            MessageStore.open(root, SMALL)
        with pytest.raises(StoreLockedError, match=rf"pid {java.pid}\b"):
            Process(root, SMALL).batch()
        assert tree(root) == before
        java_puts(theirs, "java", ["j1"])
    assert seen(root, SMALL)[("java", 0)] == ["j0", "j1"]


def test_03_a_killed_broker_holds_nothing(own_java: Start, root: Path) -> None:
    """The lock goes with the process."""
    java = own_java()
    theirs = java_store(java, root).open()
    java_puts(theirs, "java", ["j0"])
    java.kill()
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/", topic="java")
    assert seen(root, SMALL)[("java", 0)] == ["j0", "put/0/"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_n3_a_broker_in_another_pid_namespace(java: Driver, root: Path) -> None:
    """N3: a container that shares the volume: the kernel gives no pid, and the store is held all the same; readers read."""
    code = (
        "from messagestore import MessageStore, StoreLockedError\n"
        f"print(MessageStore.open_read_only({str(root)!r}).max_offset('java', 0))\n"
        f"try: MessageStore.open({str(root)!r})\n"
        "except StoreLockedError as error: print(error)\n"
    )
    elsewhere = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with java_store(java, root) as theirs:
        java_puts(theirs, "java", ["j0"])
        before = tree(root)
        done = subprocess.run(elsewhere, capture_output=True, text=True, check=True)
        assert tree(root) == before
    count, said = done.stdout.splitlines()
    assert count == "1"
    assert "RocketMQ broker" in said
    assert not re.search(r"pid -?\d", said)
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")


@pytest.mark.usefixtures("no_leases")
@pytest.mark.parametrize("what", ["session", "commits"])
def test_18_a_broker_is_started_by_mistake(java: Driver, root: Path, what: str) -> None:
    """18, without leases: it recovers, and deletes, before it is refused: index files, spare segments, units. We go on,
    and all is made again; also while a batch is half written."""
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
        assert append_batch(store, 0) == "appended"
    disk = KillDisk()
    p = Process(root, SMALL, disk)
    store = p.session() if what == "session" else None

    def mistake() -> None:
        theirs = java_store(java, root)
        with pytest.raises(JavaError, match="Lock failed"):
            theirs.open()
        theirs.forget()

    if store is None:
        assert p.batch(version=1).status == "appended"  # it stays attached
    for version in range(1 if store is not None else 2, 4):
        if version == 3:  # amid the batch: its data is there, its head is not
            run = disk._run

            def amid(operation, *arguments, run=run, **keywords):  # type: ignore[no-untyped-def]
                if seal(operation):
                    disk._run = run
                    mistake()
                return run(operation, *arguments, **keywords)

            disk._run = amid  # type: ignore[method-assign]
        else:
            mistake()
        if store is not None:
            assert append_batch(store, version) == "appended"
            put(store, f"put/{version}/")
        else:
            assert p.batch(version=version).status == "appended"
    if store is not None:
        store.close()
    p.detach()
    assert rows_seen(root, config=SMALL) == dict.fromkeys(range(4), 5)
    report = verify(root)
    assert report.ok, report.findings[:3]
    with java_store(java, root) as theirs, MessageStore.open_read_only(root, SMALL) as view:
        check_messages(view, theirs)
        for version in range(4):
            assert theirs.query(f"topic-{APP}", [f"k{version}-4"]) != [[]]
    check(root, 4)


# ---- who ends where


@pytest.mark.parametrize("rows", [5, 150], ids=["in a segment", "BLANK first, over segments"])
def test_04_a_broker_goes_on_where_a_killed_batch_began(own_java: Start, root: Path, rows: int) -> None:
    """4, N15: our data is there, its head is not: Java sees the log end at S, appends there, and is killed in turn."""
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


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "dies"])
def test_15_what_lies_behind_a_log_that_java_cut(own_java: Start, root: Path, closes: bool) -> None:
    """15, N1: a record is torn, Java cuts there without zeroing, and appends one of the same size: whole old records, and
    the units that point to them, lie behind it. At its next start Java takes them for live; so do we, and refuse
    nothing."""
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


def test_15_what_no_unit_points_to_comes_back_as_in_java(own_java: Start, root: Path) -> None:
    """15: the same, but the units are gone with a power cut. Java, then killed, takes the old records behind its new one for
    live ones on its next start; so do we: nothing proves which of them were acknowledged."""
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
    copy = shutil.copytree(root, root.parent / "copy")
    with java_store(own_java(), copy) as theirs:
        wanted = [body.decode() for body in theirs.bodies("java", 0)]
    assert wanted == ["old0", "old1", "old2", "old3", "new4", "old5", "old6", "old7"]
    with MessageStore.open(root, SMALL) as store:
        assert seen(root, SMALL)[("java", 0)] == wanted
        put(store, "put/0/", topic="java")
    assert verify(root).ok
    with java_store(own_java(), root) as theirs:
        assert [body.decode() for body in theirs.bodies("java", 0)] == [*wanted, "put/0/"]


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "dies"])
def test_19_a_topic_deleted_and_made_again(own_java: Start, root: Path, closes: bool) -> None:
    """19: the queue begins at 0 a second time: the later run is the topic, for us and, after us, for Java."""
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


def test_n2_what_a_broker_wrote_long_ago_is_not_cut(own_java: Start, root: Path) -> None:
    """N2: a bit rots in an old segment, then the broker is killed: neither Java's recovery nor ours looks there, and
    nothing is cut."""
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


def test_08_a_broker_that_appends_after_us_is_seen(own_java: Start, root: Path) -> None:
    """8: `state` is old, and Java writes for a while, closes or dies: readers see what it writes, also a reader that
    was there before."""
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


def test_07_a_broker_finds_abort_and_repairs(java: Driver, root: Path) -> None:
    """7: a writer is killed between its commit point and its dispatch: units of some queues are missing. `abort` is
    there, so Java makes them."""
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
def test_a_broker_that_is_stopped_amid_puts(own_java: Start, root: Path, signal_number: int) -> None:
    """What Java had acknowledged is there; we go on behind it."""
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


def test_17_no_phantom_in_a_new_topic(java: Driver, root: Path) -> None:
    """17: a batch with a new topic is cut: Java finds no message there, and no file without a unit."""
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
def test_n11_part_of_an_async_batch_that_java_kept(own_java: Start, root: Path, closes: bool) -> None:
    """N11: after a power cut Java opens first, and knows nothing of batches: it keeps the rows that are whole, and goes on
    behind them. What it wrote stays; the replay is told that only a part of the batch is there."""
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


def test_n11_recover_before_java(java: Driver, root: Path) -> None:
    """N11: the same, but `messagestore recover` ran first: the batch is gone as a whole, and Java never sees a row of it."""
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
