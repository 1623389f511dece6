"""Delayed messages between this project and a real broker: it delivers what we wrote, and either goes on where the other
one stopped."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS
from interop.real_broker import RealBroker
from messagestore import BatchRequest, Message, MessageColumns, MessageExt, MessageStore, StoreConfig
from messagestore.verify.verify import verify

LONGEST_S = 40


@pytest.fixture
def broker(memory: Path) -> RealBroker:
    need(NEWEST)
    return RealBroker(NEWEST, memory / "broker", memory / "store")


def there(root: Path, topic: str = "t") -> list[MessageExt]:
    """All messages of a topic, queue by queue."""
    with MessageStore.open_read_only(root) as store:
        queue_ids = store.topics().get(topic, [])
        found = [m for queue_id in queue_ids for m in store.get_message(topic, queue_id, 0, 100_000).messages]
    COUNTS.messages += len(found)
    return found


def wait_for(root: Path, count: int, topic: str = "t") -> list[MessageExt]:
    """Until the broker has delivered so many."""
    until_s = time.monotonic() + LONGEST_S
    while len(found := there(root, topic)) < count and time.monotonic() < until_s:
        time.sleep(0.1)
    return found


def columns(levels: list[int], begin: int = 0) -> MessageColumns:
    count = len(levels)
    rows = {
        "body": [b"batch/%d" % (begin + i) for i in range(count)],
        "queue_id": pa.array([i % 3 for i in range(count)], pa.int32()),
        "keys": [f"k{begin + i}" for i in range(count)],
        "tags": ["tag"] * count,
        "properties": pa.array([[("own", str(i))] for i in range(count)], pa.map_(pa.string(), pa.string())),
        "delay_time_level": pa.array(levels, pa.int32()),
    }
    return MessageColumns.from_arrow(pa.record_batch(rows), topic="t")


def test_a_broker_delivers_what_we_wrote(broker: RealBroker, root: Path) -> None:
    """Puts and a batch, at levels 1 and 2 and above the last: each that is due comes once, with what it had."""
    config = StoreConfig.load(broker.conf)
    with broker:
        pass
    with MessageStore.open(root, config) as store:
        store.create_topic("t", queue_nums=3)
        for number in range(10):
            level = (1, 2, 99)[number % 3]
            message = Message("t", b"put/%d" % number, queue_id=number % 3, keys=[f"p{number}"], tags="tag")
            message = Message(
                "t", message.body, message.queue_id, message.keys, message.tags, {"own": "1"}, 7, delay_time_level=level
            )
            store.put_message(message)
        store.append_batch(columns([0, 1, 2] * 40), BatchRequest(app_id="a", version=0))
    wanted = {b"put/%d" % n: n % 3 for n in range(10) if n % 3 < 2} | {b"batch/%d" % n: n % 3 for n in range(120)}
    with broker:
        found = wait_for(root, len(wanted))
    COUNTS.stores += 1
    assert Counter(m.body for m in found) == Counter(wanted.keys())
    for message in found:
        assert message.queue_id == wanted[message.body]
        assert (message.tags, len(message.keys), len(message.properties)) == ("tag", 1, 1)
    with MessageStore.open(root, config) as store:
        assert [m.body for m in store.query_message("t", "k1")] == [b"batch/1"]
        assert store.max_offset("SCHEDULE_TOPIC_XXXX", 17) == 3
    assert verify(root, config).ok
