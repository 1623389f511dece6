"""Our reader follows a store that a Java process is writing: nothing lost, repeated, torn or out of order.

What must be in a body follows from its queue offset (driver: Pump.java), so each block is checked as arrays.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from interop.java_store import COUNTS, Driver, JavaStore
from messagestore import MessageStore, StoreConfig
from messagestore.read import queue_records
from messagestore.read.view import StoreView

QUEUES = 4
PADDING = 60
MODES = {
    "async": {"flushDiskType": "ASYNC_FLUSH"},
    "sync": {"flushDiskType": "SYNC_FLUSH"},
    # Without the last two a Java that runs out of buffers stands still: see test_a_java_store_out_of_pool_buffers.
    "pool": {
        "flushDiskType": "ASYNC_FLUSH",
        "transientStorePoolEnable": "true",
        "transientStorePoolSize": 8,
        "fastFailIfNoBufferInStorePool": "true",
    },
}
SIZES = {
    "mappedFileSizeCommitLog": 4 << 20,
    "mappedFileSizeConsumeQueue": 20 * 5000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
}
TAGS = pa.array([f"t{tag}" for tag in range(7)])
CONFIG = StoreConfig(max_hash_slot_num=1000, max_index_num=4000)


def check_block(batch: pa.RecordBatch, first: int) -> None:
    """Rows `first`, `first + 1`, ... of a queue: offsets and bodies are what they must be, byte by byte."""
    count = batch.num_rows
    numbers = np.arange(first, first + count, dtype=np.int64)
    assert np.array_equal(batch.column("queue_offset").to_numpy(), numbers)
    bodies = batch.column("body")
    offsets = np.frombuffer(bodies.buffers()[1], np.int32)[bodies.offset : bodies.offset + count + 1].astype(np.int64)
    data = np.frombuffer(bodies.buffers()[2], np.uint8)
    sizes = np.diff(offsets)
    assert np.array_equal(sizes, 8 + numbers % (PADDING + 1))
    heads = data[offsets[:-1, None] + np.arange(8)].copy().view(">i8").ravel()
    assert np.array_equal(heads, numbers)
    body = data[offsets[0] : offsets[-1]]
    padding = np.ones(len(body), bool)
    padding[(offsets[:-1, None] - offsets[0] + np.arange(8)).ravel()] = False
    assert np.array_equal(body[padding], np.repeat((numbers & 0xFF).astype(np.uint8), sizes - 8))
    assert batch.column("tags").equals(TAGS.take(pa.array(numbers % len(TAGS))))


def told_by(theirs: JavaStore) -> dict:
    """What Java has put, what its own dispatch shows, how far its log is."""
    ends = [theirs.ends("live", queue_id)[1] for queue_id in range(QUEUES)]
    return {"pump": theirs.pumped(), "ends": ends, "log": theirs.log()}


def follow(theirs: JavaStore, count: int, timeout_s: float = 150) -> int:
    """Read what comes until `count` messages were seen; how many times something new was there."""
    root = theirs.root
    deadline, seen, looks = time.monotonic() + timeout_s, [0] * QUEUES, 0
    while not (root / "commitlog").exists():
        time.sleep(0.001)
    view = StoreView(root, CONFIG)
    stored_ms = 0
    while sum(seen) < count:
        assert time.monotonic() < deadline, f"{seen} of {count} after {timeout_s} s; Java: {told_by(theirs)}"
        ends = view.max_offsets(("live", queue_id) for queue_id in range(QUEUES))
        came = 0
        for queue_id in range(QUEUES):
            end = ends[("live", queue_id)]
            assert end >= seen[queue_id], "the queue has become shorter"
            columns = ("queue_offset", "body", "tags", "store_timestamp_ms")
            for batch in queue_records.read(view, "live", queue_id, seen[queue_id], end, columns):
                check_block(batch, seen[queue_id])
                seen[queue_id] += batch.num_rows
                came += batch.num_rows
                stored_ms = max(stored_ms, batch.column("store_timestamp_ms")[-1].as_py())
        assert seen == [ends[("live", queue_id)] for queue_id in range(QUEUES)]
        looks += came > 0
        if not came:
            time.sleep(0.001)
            told = theirs.pumped()
            assert told["failure"] is None, told
    view.close()
    COUNTS.messages += sum(seen)
    return looks


@pytest.mark.parametrize(
    ("mode", "count", "largest_batch"),
    [
        ("async", 500_000, 50),
        ("async", 100_000, 1),
        ("sync", 100_000, 50),
        ("sync", 20_000, 1),
        ("pool", 280_000, 50),
    ],
)
def test_a_million_messages(java: Driver, root: Path, mode: str, count: int, largest_batch: int) -> None:
    """Single puts and batches, by turns and alone, over hundreds of segments: 1 000 000 messages in all cases together."""
    with JavaStore(java, root, {**MODES[mode], **SIZES}) as theirs:
        theirs.pump(topic="live", queues=QUEUES, count=count, seed=7, padding=PADDING, largestBatch=largest_batch)
        looks = follow(theirs, count)
        told = theirs.pumped(wait_ms=10_000)
        assert told["failure"] is None
        assert told["put"] == count
        assert not told["alive"]
        assert sum(told["ends"]) == count
        for queue_id, end in enumerate(told["ends"]):
            assert theirs.ends("live", queue_id)[1] == end
    assert looks > 2, "everything was there at once: nothing was followed"
    view = StoreView(root, CONFIG)
    assert [view.max_offset("live", queue_id) for queue_id in range(QUEUES)] == told["ends"]
    view.close()


def test_the_cases_make_a_million() -> None:
    """The guard of the test above."""
    (mark,) = (mark for mark in test_a_million_messages.pytestmark if mark.name == "parametrize")
    assert sum(case[1] for case in mark.args[1]) == 1_000_000


def test_a_java_store_out_of_pool_buffers(java: Driver, root: Path) -> None:
    """A reader once stood still at 267 211 of 280 000, which is where a segment begins: Java had no buffer left in its
    TransientStorePool when it made that segment, wrote to it all the same, and never took what was there for committed.
    So its own dispatch stands still for good, and we show what its consumers are shown. It even closes without `abort`;
    the next writer finds everything all the same. One buffer in the pool makes it happen each time."""
    settings = {**MODES["pool"], **SIZES, "transientStorePoolSize": 1, "fastFailIfNoBufferInStorePool": "false"}
    count = 40_000
    with JavaStore(java, root, settings) as theirs:
        theirs.pump(topic="live", queues=QUEUES, count=count, seed=7, padding=PADDING, largestBatch=50)
        told = theirs.pumped(wait_ms=20_000)
        assert (told["put"], told["failure"]) == (count, None)
        view = StoreView(root, CONFIG)
        standing, still = -1, 0  # Java has put all; its dispatch comes to where it stops
        while still < 20:
            dispatched = sum(theirs.ends("live", queue_id)[1] for queue_id in range(QUEUES))
            still = still + 1 if dispatched == standing else 0
            standing = dispatched
            time.sleep(0.05)
        ends = [view.max_offset("live", queue_id) for queue_id in range(QUEUES)]
        assert ends == [theirs.ends("live", queue_id)[1] for queue_id in range(QUEUES)]
        assert sum(ends) < count
        view.close()
    with MessageStore.open(root, CONFIG) as store:
        assert [store.max_offset("live", queue_id) for queue_id in range(QUEUES)] == told["ends"]
        for queue_id, end in enumerate(told["ends"]):
            first = 0
            for batch in store.read("live", queue_id, 0, columns=("queue_offset", "body", "tags")):
                check_block(batch, first)
                first += batch.num_rows
            assert first == end
    COUNTS.messages += count


def test_many_readers_of_a_live_store(java: Driver, root: Path) -> None:
    """Readers that come and go find what the first one found."""
    with JavaStore(java, root, {**MODES["async"], **SIZES}) as theirs:
        theirs.pump(
            topic="live", queues=QUEUES, count=20_000, seed=3, padding=PADDING, largestBatch=8, pauseMicros=1000
        )
        known = [0] * QUEUES
        while sum(known) < 20_000:
            view = StoreView(root, CONFIG)
            for queue_id in range(QUEUES):
                end = view.max_offset("live", queue_id)
                assert end >= known[queue_id]
                first = max(0, known[queue_id] - 100)
                for batch in queue_records.read(view, "live", queue_id, first, end, ("queue_offset", "body", "tags")):
                    check_block(batch, first)
                    first += batch.num_rows
                assert first == end
                known[queue_id] = end
            view.close()
    COUNTS.messages += 20_000
