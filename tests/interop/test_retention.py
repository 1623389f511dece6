"""The log's first segments are gone, as retention leaves it: queues begin above 0, or in the middle of a file; some have
nothing left. Statuses, ends and times are Java's."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from interop.compare import check_messages, check_statuses, check_times
from interop.java_store import Driver, JavaStore, batch, java_config, single
from messagestore import Message, MessageStore
from messagestore.verify.verify import verify
from small import SMALL

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


def test_nothing_of_the_index_is_needed(java: Driver, root: Path) -> None:
    """Index files deleted with the segments they lead to: keys of what is left are found, by scanning if need be."""
    filled(java, root, "java")
    expire(root, 2, queue_files=True)
    shutil.rmtree(root / "index")
    with MessageStore.open_read_only(root, SMALL) as store:
        assert [m.body[:9] for m in store.query_message("busy", "busy149")] == [b"busy149/."]
