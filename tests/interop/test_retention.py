"""The log's first segments are gone, as retention leaves it: queues begin above 0, or in the middle of a file; some have
nothing left. Statuses, ends and times are Java's."""

from __future__ import annotations

import os
import shutil
import struct
import time
from pathlib import Path

import pytest

from crash.harness import die
from crash.simdisk import KillDisk, Killed
from interop.compare import check_messages, check_statuses, check_times
from interop.java_store import Driver, JavaStore, batch, java_config, single
from messagestore import BatchRequest, Message, MessageStore
from messagestore.inspect.verify import verify
from small import SMALL, bodies, columns

CONFIG = java_config(SMALL)
PUTS = 150


def filled(java: Driver, root: Path, who: str) -> None:
    """About five segments: a busy queue, one that ends early, one that begins late."""
    rows = [("busy", n % 2, f"busy{n}/" + "." * 400) for n in range(PUTS)]
    rows[5:5] = [("early", 0, f"early{n}") for n in range(40)]
    rows[-5:-5] = [("late", 0, f"late{n}") for n in range(3)]
    if who == "ours":
        with MessageStore.open(root, SMALL) as store:
            for topic, queue_id, body in rows:
                store.put_message(Message(topic, body.encode(), queue_id=queue_id, keys=[body.split("/")[0]]))
    else:
        with JavaStore(java, root, CONFIG) as theirs:
            theirs.put([single(t, body.encode(), queue_id=q, keys=[body.split("/")[0]]) for t, q, body in rows])
            theirs.dispatched()


def expire(root: Path, segments: int, *, queue_files: bool) -> int:
    """Delete the first segments, and with `queue_files` the queue files Java's own retention would delete; the log's begin."""
    paths = sorted((root / "commitlog").iterdir())
    for path in paths[:segments]:
        path.unlink()
    begin = int(paths[segments].name)
    if queue_files:
        for queue in (root / "consumequeue").glob("*/*"):
            for path in sorted(queue.iterdir())[:-1]:
                data = path.read_bytes()
                if struct.unpack_from(">q", data, len(data) - 20)[0] >= begin:
                    break
                path.unlink()
    return begin


@pytest.mark.parametrize(
    ("segments", "queue_files"),
    [(1, False), (1, True), (3, True), (4, True)],
    ids=["1 segment, no queue file", "1", "3", "4"],
)
@pytest.mark.parametrize("who", ["java", "ours"])
def test_what_is_left_after_retention(java: Driver, root: Path, who: str, segments: int, queue_files: bool) -> None:
    """Java and we agree on the statuses of each class of offsets, on the ends, and on every message that is left; we go on
    writing, and Java reads that."""
    filled(java, root, who)
    assert len(list((root / "commitlog").iterdir())) >= 5
    begin = expire(root, segments, queue_files=queue_files)
    queues = [("busy", 0), ("busy", 1), ("early", 0), ("late", 0)]
    with JavaStore(java, root, CONFIG) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        assert theirs.log()["min"] == begin
        for topic, queue_id in queues:
            check_statuses(store, theirs, topic, queue_id)
            check_times(store, theirs, topic, queue_id)
        check_messages(store, theirs)
        assert store.max_offset("early", 0) == store.min_offset("early", 0) == 40
        for key in ("busy0", "early3"):
            assert store.query_message(key.rstrip("0123456789"), key) == []
        assert [m.body for m in store.query_message("late", "late2")] == [b"late2"]
    with MessageStore.open(root, SMALL) as store:
        for topic, queue_id in queues:
            high = store.max_offset(topic, queue_id)
            assert store.put_message(Message(topic, b"ours", queue_id=queue_id)).queue_offset == high
    assert verify(root, SMALL).findings == []
    with JavaStore(java, root, CONFIG) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        each = [single("early", b"again") for _ in range(20)]
        theirs.put([batch("early", each), single("late", b"again")])
        theirs.dispatched()
        if queue_files:
            check_messages(store, theirs)
        for topic, queue_id in queues:
            # Java looks for the begin in a queue's first file only: with a file left that holds nothing any more, which its
            # own retention never leaves behind, it says 0 and skips ahead message by message; we say where they begin.
            if queue_files or topic != "early":
                check_statuses(store, theirs, topic, queue_id)
        assert store.get_message("early", 0, 0).next_begin_offset == 40
        assert [m.body for m in store.get_message("early", 0, 40, 30).messages] == [b"ours"] + [b"again"] * 20


def age(root: Path, segments: int, hours: float = 100) -> int:
    """Let the first segments look as if nobody had written to them for hours; where the next one begins."""
    paths = sorted((root / "commitlog").iterdir())
    for path in paths[:segments]:
        os.utime(path, (time.time() - hours * 3600,) * 2)
    return int(paths[segments].name)


def leading_files(root: Path) -> dict[str, list[str]]:
    """The names of the files of each queue, and of the index."""
    folders = [*(root / "consumequeue").glob("*/*"), root / "index"]
    return {
        str(folder.relative_to(root)): sorted(path.name for path in folder.iterdir())
        for folder in folders
        if "rmq_sys" not in str(folder)
    }


@pytest.mark.parametrize("segments", [1, 3, 4])
@pytest.mark.parametrize("who", ["java", "ours"])
def test_our_retention_leaves_what_javas_leaves(
    java: Driver, root: Path, tmp_path: Path, who: str, segments: int
) -> None:
    """The same store cleaned by Java and by us: the same segments, queue files and index files are left. Java and we agree
    on every status and message of what we cleaned; Java goes on, we go on, and so does Java's next retention."""
    filled(java, root, who)
    begin = age(root, segments)
    by_java = tmp_path / "by-java"
    shutil.copytree(root, by_java)
    with JavaStore(java, by_java, CONFIG) as theirs:
        assert theirs.clean() == begin
    with MessageStore.open(root, SMALL) as store:
        deleted = store.delete_expired_files(reserved_hours=72)
        assert deleted.min_offset == begin
        assert len(deleted.segments) == segments
    assert leading_files(root) == leading_files(by_java)
    queues = [("busy", 0), ("busy", 1), ("early", 0), ("late", 0)]
    with JavaStore(java, root, CONFIG) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        assert theirs.log()["min"] == begin
        for topic, queue_id in queues:
            check_statuses(store, theirs, topic, queue_id)
            check_times(store, theirs, topic, queue_id)
        check_messages(store, theirs)
        theirs.put([single(topic, b"java" + b"." * 900, queue_id=queue_id) for topic, queue_id in queues * 8])
        theirs.dispatched()
        check_messages(store, theirs)
    later = age(root, 1)
    with MessageStore.open(root, SMALL) as store:
        for topic, queue_id in queues:
            store.put_message(Message(topic, b"ours", queue_id=queue_id))
    with JavaStore(java, root, CONFIG) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        assert theirs.clean() == later
        for topic, queue_id in queues:
            check_statuses(store, theirs, topic, queue_id)
        check_messages(store, theirs)
    assert verify(root, SMALL).findings == []


@pytest.mark.parametrize("lost", ["consumequeue", "consumequeue/early", "consumequeue/early/0"])
def test_java_continues_a_queue_without_messages_that_we_made_again(java: Driver, root: Path, lost: str) -> None:
    """Retention took all messages of `early`, and somebody its files. The log does not say how many there were. What we
    make again from the seal tells Java the next number, and the begin and the end of the queue."""
    filled(java, root, "ours")
    begin = age(root, 3)
    with MessageStore.open(root, SMALL) as store:
        assert store.delete_expired_files(reserved_hours=72).min_offset == begin
    shutil.rmtree(root / lost)
    with MessageStore.open(root, SMALL) as store:  # as `messagestore recover`
        store.check_queues()
    queues = [("busy", 0), ("busy", 1), ("early", 0), ("late", 0)]
    with JavaStore(java, root, CONFIG) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        assert theirs.log()["min"] == begin
        for topic, queue_id in queues:
            check_statuses(store, theirs, topic, queue_id)
        assert store.min_offset("early", 0) == store.max_offset("early", 0) == 40
        theirs.put([single("early", b"java %d" % n) for n in range(20)])  # into the next file of the queue
        theirs.dispatched()
        assert [m.body for m in store.get_message("early", 0, 40).messages] == [b"java %d" % n for n in range(20)]
        for topic, queue_id in queues:
            check_statuses(store, theirs, topic, queue_id)
        check_messages(store, theirs)
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("early", b"ours", queue_id=0)).queue_offset == 60
    assert verify(root, SMALL).findings == []
    with JavaStore(java, root, CONFIG) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        check_statuses(store, theirs, "early", 0)
        check_messages(store, theirs)


def test_batches_are_known_after_javas_retention(java: Driver, root: Path) -> None:
    """Java knows nothing of batches and deletes their segments: the journal knows them, and our next retention writes the
    newest one down again, so that a copy without `spark/` knows it, too."""
    rows, request = columns(bodies(20), topic="batches"), BatchRequest(app_id="app", version=3)
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(rows, request)
    filled(java, root, "ours")
    begin = age(root, 2)
    with JavaStore(java, root, CONFIG) as theirs:
        assert theirs.clean() == begin
    age(root, 1)
    with MessageStore.open(root, SMALL) as store:
        assert store.append_batch(rows, request).status == "known"
        assert store.delete_expired_files(reserved_hours=72).restated == (("app", 3),)
        check = store.append_batch(rows, request)
        assert (check.status, check.row_count) == ("known", 20)
    assert verify(root, SMALL).findings == []
    with JavaStore(java, root, CONFIG) as theirs, MessageStore.open_read_only(root, SMALL) as store:
        check_messages(store, theirs)
        theirs.put([single("busy", b"java")])
        theirs.dispatched()
    shutil.rmtree(root / "spark")
    with MessageStore.open(root, SMALL) as store:
        assert store.append_batch(rows, request).status == "known"


def test_java_opens_what_a_killed_retention_of_ours_left(java: Driver, root: Path, tmp_path: Path) -> None:
    """Killed at every third operation: Java opens the store, shows every message that is left, and cleans the rest."""
    filled(java, root, "ours")
    age(root, 4)
    number = 0
    while True:
        copy, disk = tmp_path / f"killed-{number}", KillDisk()
        shutil.copytree(root, copy)
        store = MessageStore.open(copy, SMALL, disk=disk)
        disk.kill_at = len(disk.operations) + number
        killed = False
        try:
            store.delete_expired_files(reserved_hours=72)
        except Killed:
            killed = True
        die(copy)
        if not killed:
            break
        with JavaStore(java, copy, CONFIG) as theirs:
            theirs.clean()
            theirs.put([single("busy", b"java")])
            theirs.dispatched()
            with MessageStore.open_read_only(copy, SMALL) as reader:
                check_messages(reader, theirs)
        with MessageStore.open(copy, SMALL) as store:
            assert store.put_message(Message("early", b"ours", queue_id=0)).queue_offset == 40
        number += 3
    assert number >= 20


def test_nothing_of_the_index_is_needed(java: Driver, root: Path) -> None:
    """Index files deleted with the segments they lead to: keys of what is left are found, by scanning if need be."""
    filled(java, root, "java")
    expire(root, 2, queue_files=True)
    shutil.rmtree(root / "index")
    with MessageStore.open_read_only(root, SMALL) as store:
        assert [m.body[:9] for m in store.query_message("busy", "busy149")] == [b"busy149/."]
