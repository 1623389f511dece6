"""Records that the store makes itself go into the log together, also to topics that are a broker's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.harness import die
from crash.simdisk import KillDisk, Killed
from messagestore import Message, MessageStore, StoreConfig, StorePoisonedError
from messagestore.batches.append import append_own
from messagestore.batches.own_records import chunks_of
from messagestore.format import record
from messagestore.format.hosts import pack_host
from messagestore.format.rows import Row
from messagestore.inspect.verify import verify
from small import SMALL, SMALL_ASYNC

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
HALF, OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
MESSAGES = (
    Message("t", b"first", queue_id=1, keys=["k"], tags="a"),
    Message(HALF, b"second", queue_id=0, born_host="[2001:db8::1]:4"),
    Message(OP, b"third", queue_id=0, tags="d"),
    Message("t", b"fourth", queue_id=1),
)


def append(store: MessageStore) -> list[Row]:
    writer, config = store.writer, store.writer.files.config
    hosts = (pack_host("127.0.0.1:10911"), pack_host("[::1]:10911"))
    records = [
        record.encode_message(message, queue_id=message.queue_id or 0, store_host=hosts[number % 2], limits=config)
        for number, message in enumerate(MESSAGES)
    ]
    chunks = chunks_of(records, property_crc=config.enabled_append_prop_crc)
    return append_own(writer, chunks, config.flush_disk_type)


def shown(store: MessageStore) -> list[bytes]:
    queues = (("t", 1), (HALF, 0), (OP, 0))
    return [message.body for queue in queues for message in store.get_message(*queue, 0).messages]


@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC, SMALL.replace(enabled_append_prop_crc=True)])
def test_records_for_a_brokers_own_topics_are_one_batch(tmp_path: Path, config: StoreConfig) -> None:
    """Each has its place, its number and its entry in the index, whatever hosts it names."""
    root = tmp_path / "store"
    with MessageStore.open(root, config) as store:
        store.put_message(Message("t", b"before", queue_id=1))
        rows = append(store)
        assert [(row.topic, row.queue_id, row.queue_offset) for row in rows] == [
            ("t", 1, 1), (HALF, 0, 0), (OP, 0, 0), ("t", 1, 2),
        ]  # fmt: skip
        found = [store.look_message_by_offset(row.physical_offset) for row in rows]
        assert [message and message.body for message in found] == [message.body for message in MESSAGES]
        assert [message.body for message in store.query_message("t", "k")] == [b"first"]
        assert store.put_message(Message("t", b"after", queue_id=1)).queue_offset == 3
    report = verify(root, config)
    assert report.ok, report.findings[:3]


def test_a_kill_leaves_all_of_the_records_or_none(tmp_path: Path) -> None:
    """The process dies before each of its operations."""
    at, seen = 0, set()
    while True:
        root = tmp_path / str(at)
        disk = KillDisk(at)
        done = False
        try:
            with MessageStore.open(root, SMALL, disk=disk) as store:
                append(store)
                done = True
        except (Killed, StorePoisonedError):
            pass
        die(root)
        if root.exists():
            with MessageStore.open(root, SMALL) as store:
                bodies = shown(store)
            assert bodies in ([], [b"first", b"fourth", b"second", b"third"])
            assert bodies or not done
            seen.add(bool(bodies))
        if not disk.dead:
            break
        at += 1
    assert seen == {False, True}
