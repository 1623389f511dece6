"""Delayed messages between this project and a real broker: it delivers what we wrote, and either goes on where the other
one stopped."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from crash.harness import die
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS
from interop.real_broker import RealBroker
from messagestore import BatchRequest, Message, MessageColumns, MessageExt, MessageStore, StoreConfig
from messagestore.files.delay_offsets import DelayOffsets
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify

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


def put_and_deliver(root: Path, config: StoreConfig, begin: int, count: int, *, closes: bool) -> None:
    """Put messages that are due after a second, and deliver them; then close, or be killed."""
    store = MessageStore.open(root, config)
    store.append_batch(columns([1] * count, begin))
    time.sleep(1.2)
    done = 0
    while (round_ := store.deliver_delayed()).count:
        done += round_.count
    assert done == count
    if closes:
        store.close()
    else:
        die(root)


def put_only(root: Path, config: StoreConfig, begin: int, count: int) -> None:
    with MessageStore.open(root, config) as store:
        store.append_batch(columns([1] * count, begin))


def test_either_goes_on_where_the_other_stopped(broker: RealBroker, root: Path) -> None:
    """We deliver, a broker goes on, we go on, are killed and recovered, the broker again: each message once."""
    config = StoreConfig.load(broker.conf)
    with broker:
        pass
    put_and_deliver(root, config, 0, 30, closes=True)
    put_only(root, config, 30, 20)
    with broker:
        wait_for(root, 50)
        time.sleep(1.0)
    COUNTS.stores += 1
    assert DelayOffsets(Disk(), str(root)).load()[1] == 50
    put_and_deliver(root, config, 50, 10, closes=False)
    with MessageStore.open(root, config) as store:  # messagestore recover
        assert store.deliver_delayed().count == 0
    put_only(root, config, 60, 5)
    with broker:
        wait_for(root, 65)
        time.sleep(2.0)
    COUNTS.stores += 1
    with MessageStore.open(root, config) as store:
        assert store.deliver_delayed().count == 0
    assert Counter(m.body for m in there(root)) == Counter(b"batch/%d" % n for n in range(65))
    assert verify(root, config).ok


def test_a_broker_after_a_killed_deliverer_repeats_and_loses_nothing_more(broker: RealBroker, root: Path) -> None:
    """Without `recover` in between, the broker repeats what delayOffset.json does not know yet, and no other message."""
    config = StoreConfig.load(broker.conf)
    put_and_deliver(root, config, 0, 20, closes=True)
    put_and_deliver(root, config, 20, 10, closes=False)
    with broker:
        wait_for(root, 40)
        time.sleep(1.0)
    COUNTS.stores += 1
    with MessageStore.open(root, config) as store:
        assert store.deliver_delayed().count == 0
    found = Counter(m.body for m in there(root))
    assert {body for body, count in found.items() if count > 1} <= {b"batch/%d" % n for n in range(20, 30)}
    assert set(found) == {b"batch/%d" % n for n in range(30)}


def test_delay_offset_json_has_the_same_bytes(broker: RealBroker, root: Path) -> None:
    """What a broker wrote, read and written by us, differs in the counter and the time only."""
    config = StoreConfig.load(broker.conf)
    with MessageStore.open(root, config) as store:
        store.append_batch(columns([1, 1, 1, 2]))
    with broker:
        wait_for(root, 4)
        time.sleep(1.0)
    COUNTS.stores += 1
    path = root / "config" / "delayOffset.json"
    theirs, file = path.read_text(), DelayOffsets(Disk(), str(root))
    offsets = file.load()
    assert {level: offset for level, offset in offsets.items() if offset} == {1: 3, 2: 1}
    file.save({1: 4})

    def fixed(text: str) -> str:
        return re.sub(r'"(counter|timestamp)":\d+', r'"\1":0', text)

    assert fixed(path.read_text()) == fixed(theirs).replace("1:3", "1:4")
    with broker:
        pass
    assert DelayOffsets(Disk(), str(root)).load()[1] == 3  # more than the queue has: a broker takes its end, as we do


def test_a_broker_delivers_what_was_sent_back(broker: RealBroker, root: Path) -> None:
    """To the group's retry topic, whose consumers read it, with what RocketMQ keeps."""
    config = StoreConfig.load(broker.conf)
    with MessageStore.open(root, config) as store:
        put = store.put_message(Message("t", b"x", queue_id=0, keys=["k"], tags="tag"))
        (message,) = store.get_message("t", 0, 0).messages
        store.send_back(message, "boards", 1)
        store.send_back(message, "boards", -1)
    with broker:
        (found,) = wait_for(root, 1, "%RETRY%boards")
        (dead,) = there(root, "%DLQ%boards")
    COUNTS.stores += 1
    for each in (found, dead):
        assert (each.body, each.keys, each.tags, each.reconsume_times) == (b"x", ("k",), "tag", 1)
        assert each.system_properties["RETRY_TOPIC"] == "t"
        assert each.system_properties["ORIGIN_MESSAGE_ID"] == put.message_id
    assert verify(root, config).ok
