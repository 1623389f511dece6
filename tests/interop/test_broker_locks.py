"""A real broker and our writers want one store at the same time: who is refused, who waits, and what the error says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from crash.harness import APP, SMALL, no_thread_warnings
from crash.imitate import Process, put, rows_seen, seal, seen
from crash.simdisk import KillDisk, Operation
from interop.compare import check_messages
from interop.java_store import ANSWER_S, Driver, JavaError
from interop.steps import append_batch, check, java_puts, java_store
from interop.trees import tree
from kernel import refuse_leases
from messagestore import MessageStore, StoreLockedError
from messagestore.inspect.verify import verify
from processes import SHORT_SESSIONS

pytestmark = no_thread_warnings
Start = Callable[..., Driver]


@pytest.fixture
def no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system: only the lock keeps a broker out."""
    refuse_leases(monkeypatch)


@pytest.mark.usefixtures("no_leases")
def test_a_broker_cannot_start_while_we_are_attached(java: Driver, root: Path) -> None:
    """Without leases: Java recovers, then we attach and append, then Java asks for the lock. It gets none and
    overwrites nothing.
    """
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


def test_we_cannot_write_while_a_broker_loads(java: Driver, root: Path) -> None:
    """Java is made and loads before it asks for the lock. All the while sessions and commits are refused with its pid,
    change nothing, and do not disturb its start.
    """
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


def test_short_sessions_beside_a_broker_that_starts_lose_nothing(own_java: Start, root: Path) -> None:
    """A process opens, puts and closes all the time, and a broker starts, writes and closes again and again. Each put
    is refused, or it is there once, for both.
    """
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
    # Before a session begins, the broker is named by its pid where that can be seen; one that comes within a session waits.
    names = (f"pid {java.pid}", "cannot see", "a RocketMQ broker that is starting waits")
    assert all(any(name in text for name in names) for text in refused), refused
    assert seen(root, SMALL)[("short", 0)] == acknowledged
    assert seen(root, SMALL)[("java", 0)] == [f"j{number}" for number in range(5)]
    assert verify(root).ok
    with java_store(java, root) as theirs:
        assert [body.decode() for body in theirs.bodies("short", 0)] == acknowledged


@pytest.mark.parametrize("what", ["session", "commits"])
def test_a_broker_that_starts_waits_and_takes_over(java: Driver, root: Path, what: str) -> None:
    """What was begun is finished, also in the middle of a batch, and the broker finds a store that was closed. Whoever
    wants to write then is told so.
    """
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
    amid = Process(root, SMALL, disk)
    starts: list[Future[object]] = []
    theirs = java_store(java, root)

    def at_the_seal(operation: Operation) -> None:
        if seal(operation) and not starts:
            starts.append(theirs.opening())
            time.sleep(0.5)
            assert not starts[0].done()

    disk.before = at_the_seal
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


def test_we_cannot_write_while_a_broker_lives(java: Driver, root: Path) -> None:
    """Sessions, commits and recovery wait and change nothing, and the error names the holder."""
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


def test_a_killed_broker_holds_nothing(own_java: Start, root: Path) -> None:
    """The lock goes with the process."""
    java = own_java()
    theirs = java_store(java, root).open()
    java_puts(theirs, "java", ["j0"])
    java.kill()
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/", topic="java")
    assert seen(root, SMALL)[("java", 0)] == ["j0", "put/0/"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_broker_in_another_pid_namespace_holds_the_store(java: Driver, root: Path) -> None:
    """A container shares the volume. The kernel gives no pid, and the store is held all the same; readers read."""
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
def test_a_broker_started_by_mistake_deletes_files_that_we_make_again(java: Driver, root: Path, what: str) -> None:
    """Without leases it recovers, and deletes index files, spare segments and units, before it is refused. We go on,
    and all of them are made again; also while a batch is half written.
    """
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

            def amid(operation: Operation) -> None:
                if seal(operation):
                    disk.before = None
                    mistake()

            disk.before = amid
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
