"""Queues that went or became shorter under a stream: with failOnDataLoss=false, no newer message is passed over."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from crash.harness import die
from crash.imitate import Broker, another_boot
from messagestore import ASYNC_FLUSH, Message, MessageStore, StoreConfig, StoreWentBackwardsError
from messagestore.read import queue_ends
from messagestore.spi import STORES
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.readers import StreamReader
from pyspark_messagestore.source.schema import Projection

SMALL = StoreConfig(mapped_file_size_commit_log=1 << 16, max_hash_slot_num=100, max_index_num=400)
BODY = Projection.of(StructType().add("body", "binary"))
READ = 5


class Query:
    """A stream with failOnDataLoss=false, a micro-batch at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reader = self._new()
        self.start = self.reader.initialOffset()

    def _new(self) -> StreamReader:
        options = {"path": str(self.root), "subscribe": "t", "startingOffsets": "earliest", "failOnDataLoss": "false"}
        return StreamReader(source_options(options), BODY, STORES)

    def restart(self) -> None:
        self.reader.stop()
        self.reader = self._new()

    def plan(self, most: int | None = None) -> dict[str, object]:
        return self.reader.latestOffset(self.start, ReadAllAvailable() if most is None else ReadMaxRows(most))

    def read(self, end: dict[str, object]) -> set[bytes]:
        partitions = self.reader.partitions(self.start, end)
        self.start = end
        return {body for part in partitions for batch in self.reader.read(part) for body in batch["body"].to_pylist()}

    def step(self, most: int | None = None) -> set[bytes]:
        return self.read(self.plan(most))


def put(store: MessageStore, name: str, queue_ids: Iterable[int]) -> set[bytes]:
    bodies = {f"{name} {number}".encode(): queue_id for number, queue_id in enumerate(queue_ids)}
    for body, queue_id in bodies.items():
        store.put_message(Message("t", body, queue_id=queue_id))
    return set(bodies)


def filled(root: Path) -> Query:
    """Return a query that has read five messages of each of two queues."""
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("t", 2)
        bodies = put(store, "old", [0, 1] * READ)
    query = Query(root)
    assert query.step() == bodies
    return query


def remake(root: Path, lengths: Mapping[int, int]) -> set[bytes]:
    """Let a broker delete the topic and create it again, with so many messages in each queue."""
    broker = Broker(root, SMALL)
    shutil.rmtree(root / "consumequeue" / "t")
    broker.now_ms = time.time_ns() // 1_000_000 + 10
    bodies = set()
    for queue_id, length in lengths.items():
        broker.next["t", queue_id] = 0
        for number in range(length):
            bodies.add(f"new {queue_id}/{number}".encode())
            broker.put("t", f"new {queue_id}/{number}".encode(), queue_id)
    broker.close()
    return bodies


def test_a_queue_that_is_gone_comes_back_as_long_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages were passed over: its end was again what the query had read."""
    monkeypatch.setattr(queue_ends, "FEW_QUEUES", 0)  # as with many queues: the ends are followed in the log
    query = filled(tmp_path / "store")
    bodies = remake(query.root, {1: 2})
    with MessageStore.open(query.root, SMALL):
        pass
    assert query.step() == bodies
    with MessageStore.open(query.root, SMALL) as store:
        bodies = put(store, "back", [0] * READ)
    assert query.step() == bodies


def test_a_queue_shrinks_to_where_the_query_has_read(tmp_path: Path) -> None:
    """The reader knew a longer queue, which the query's limits had left unread, and did not compare the new one."""
    query = filled(tmp_path / "store")
    with MessageStore.open(query.root, SMALL) as store:
        put(store, "unread", [0, 0, 1, 1])
    assert len(query.step(most=1)) == 1
    bodies = remake(query.root, {0: READ, 1: READ})
    with MessageStore.open(query.root, SMALL):
        pass
    assert query.step() == bodies


def test_a_planned_message_is_hidden_until_the_store_is_recovered(tmp_path: Path) -> None:
    """The micro-batch ended before it, Spark's checkpoint said that it was read, and recovery kept it."""
    query = filled(tmp_path / "store")
    store = MessageStore.open(query.root, SMALL.replace(flush_disk_type=ASYNC_FLUSH))
    store.writer.start_flushing = lambda: None
    bodies = put(store, "async", [0, 1, 0])
    die(query.root)
    end = query.plan()
    with another_boot():
        query.restart()
        with pytest.raises(StoreWentBackwardsError, match=r"Run `messagestore recover .*start the query again"):
            query.read(end)
        with MessageStore.open(query.root, SMALL):
            pass
        query.restart()
        assert query.read(end) == bodies


def test_a_shorter_queue_with_newer_messages_was_made_again_also_before_recovery(tmp_path: Path) -> None:
    """The query waited for the recovery with this queue, read others meanwhile, and then took its messages for read."""
    query = filled(tmp_path / "store")
    bodies = remake(query.root, {0: 2, 1: READ + 1})
    store = MessageStore.open(query.root, SMALL)
    bodies |= put(store, "killed", [1])
    die(query.root)
    with another_boot():
        query.restart()
        seen = query.step()
        with MessageStore.open(query.root, SMALL):
            pass
        assert seen | query.step() == bodies
