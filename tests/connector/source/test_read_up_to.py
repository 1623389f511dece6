"""The option `readUpTo`, without Spark: a stream of what is flushed, in a store that is written with ASYNC_FLUSH."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from crash.imitate import Broker
from messagestore import ASYNC_FLUSH, ConfigError, Message, MessageStore
from stream_steps import ALL, SMALL, batch, begun, planned_first, rows, step, stream

LAZY = SMALL.replace(
    flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=3_600_000, flush_commit_log_thorough_interval=3_600_000
)
FLUSHED = {"readUpTo": "flushed", "startingOffsets": "earliest"}


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(root: str) -> Iterator[MessageStore]:
    """A session that syncs only when it is told to."""
    with MessageStore.open(root, LAZY) as store:
        put(store, 3)
        yield store


def put(store: MessageStore, count: int) -> None:
    """Messages that are visible, and not synced."""
    for _ in range(count):
        store.put_message(Message("t", b"x", queue_id=0))
    store.max_offset("t", 0)  # a session that reads publishes what it has put


def test_a_stream_reads_messages_when_they_are_synced(root: str, store: MessageStore) -> None:
    reader = stream(root, **FLUSHED)
    start = begun(reader)
    assert step(reader, start, ALL) == ([], start)
    store.flush()
    put(store, 2)
    found, end = step(reader, start, ALL)
    assert found == [(0, 0), (0, 1), (0, 2)]
    assert step(reader, end, ALL) == ([], end)
    assert reader.reportLatestOffset()["queues"] == {"t": {"0": 3}}
    assert len(step(stream(root, readUpTo="visible"), end, ALL)[0]) == 2
    store.flush()
    assert step(reader, end, ALL)[0] == [(0, 3), (0, 4)]


def test_latest_is_the_end_of_what_is_flushed(root: str, store: MessageStore) -> None:
    """A new query with startingOffsets=latest reads what is synced after it has begun."""
    reader = stream(root, readUpTo="flushed", startingOffsets="latest")
    start = begun(reader)
    assert start["queues"] == {"t": {"0": 0}}
    store.flush()
    assert len(step(reader, start, ALL)[0]) == 3


def test_a_batch_read(root: str, store: MessageStore) -> None:
    for synced in (0, 3):
        reader = batch(root, readUpTo="flushed")
        assert len(rows(reader, reader.partitions())) == synced
        everything = batch(root)
        assert len(rows(everything, everything.partitions())) == 3
        by_key = batch(root, readUpTo="flushed", keys="none")
        assert rows(by_key, by_key.partitions()) == []
        store.flush()


def test_a_broker_that_takes_over_ends_the_stream(root: str) -> None:
    """Its files do not say what is on the disk; after recovery the stream continues."""
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    reader = stream(root, **FLUSHED)
    end = planned_first(reader)
    Broker(Path(root), SMALL)
    with pytest.raises(ConfigError, match="a Java broker wrote the store last"):
        reader.latestOffset(end, ALL)
    with pytest.raises(ConfigError, match="a Java broker wrote the store last"):
        planned_first(stream(root, **FLUSHED))
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"y", queue_id=0))
    assert step(stream(root, **FLUSHED), end, ALL)[0] == [(0, 1)]
