"""Queries, and what they publish, beside every way in which the numbers of a queue go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from checkpoints import checkpoint
from cli_runs import objects, run
from messagestore import ConfigError, MessageStore, OffsetOutOfRangeError, StoreWentBackwardsError
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.disk import Disk
from messagestore.log.remembered import ANSWERS, Answer, Memory, WayBack, corrected
from messagestore.spi import LOCAL_STORES
from numbers_back import BEHIND_THE_GROUP, EVERY_WAY, MORE, READ, History
from pyspark_messagestore.cli.cursor import Cursor
from stream_steps import ALL, again, begun, finished, planned_first, rows, stream


class Query:
    """A query that reads the queue to its end, and remembers that."""

    def __init__(self, **options: str) -> None:
        self.options = {"startingOffsets": "earliest", **options}
        self.end: Any = None

    def remember(self, history: History, store: MessageStore) -> None:
        store.flush()
        reader = stream(str(history.root), **self.options)
        start = begun(reader)
        self.end = again(reader.latestOffset(start, ALL))
        assert len(rows(reader, reader.partitions(start, self.end))) == READ
        reader.latestOffset(self.end, ALL)
        reader.stop()


def remember_group(history: History, store: MessageStore) -> None:
    store.flush()
    publish_offsets(str(history.root), "g", {("t", 0): READ})


def group(root: Path) -> dict[int, int]:
    table = ConsumerOffsets(Disk(), str(root))
    table.load()
    return table.get("t", "g")


@EVERY_WAY
def test_a_query_refuses_or_skips_nothing(tmp_path: Path, way: WayBack) -> None:
    assert ANSWERS[Memory.CHECKPOINT, way] is Answer.REFUSED
    query = Query()
    history = History(tmp_path / "s", "plain", query.remember)
    end = history.back(way)
    root = str(history.root)
    with history.open() as store:
        history.put(store, MORE)
    with pytest.raises(StoreWentBackwardsError, match="Start a new query, or set failOnDataLoss=false"):
        stream(root, **query.options).latestOffset(query.end, ALL)
    going_on = stream(root, failOnDataLoss="false", **query.options)
    read = [number for taken in finished(going_on, query.end)[0] for _, number in taken]
    assert read[-MORE:] == list(range(end, end + MORE))


@BEHIND_THE_GROUP
def test_a_new_query_begins_where_its_group_is_or_refuses(tmp_path: Path, way: WayBack) -> None:
    assert ANSWERS[Memory.COMMITTED, way] is Answer.REFUSED
    history = History(tmp_path / "s", "plain", remember_group)
    end = history.back(way)
    root, given = str(history.root), {"startingOffsets": "committed", "consumerGroup": "g"}
    with history.open() as store:
        begin = store.min_offset("t", 0) if end else 0
    if end:
        with pytest.raises(OffsetOutOfRangeError, match=f"offset {READ} was requested"):
            planned_first(stream(root, **given))
        first = planned_first(stream(root, failOnDataLoss="false", **given))
        assert first["begin"]["queues"] == {"t": {"0": corrected(READ, begin, end)}}
    with history.open() as store:
        history.put(store, MORE)
    first = planned_first(stream(root, **given))
    assert first["begin"]["queues"] == {"t": {"0": corrected(READ, begin, end)}}
    assert first["queues"] == {"t": {"0": end + MORE}}


def test_a_group_has_read_nothing_of_a_topic_that_was_deleted_and_made_again(tmp_path: Path) -> None:
    """A new query would have begun behind the first messages of the new topic."""
    assert ANSWERS[Memory.COMMITTED, WayBack.DELETED] is Answer.FORGOTTEN
    history = History(tmp_path / "s", "plain", remember_group)
    end = history.back(WayBack.DELETED)
    with history.open() as store:
        history.put(store, MORE)
    root, given = str(history.root), {"startingOffsets": "committed", "consumerGroup": "g"}
    with pytest.raises(ConfigError, match="consumer group g has not read queue 0 of t"):
        planned_first(stream(root, **given))
    first = planned_first(stream(root, **{**given, "startingOffsets": "committed:earliest"}))
    assert first["begin"]["queues"] == {"t": {"0": 0}}
    assert first["queues"] == {"t": {"0": end + MORE}}


@EVERY_WAY
def test_a_query_publishes_no_place_of_another_log(tmp_path: Path, way: WayBack) -> None:
    """A group's place beyond the end would let whoever begins there skip messages."""
    assert ANSWERS[Memory.PUBLISHED, way] is Answer.NOT_PUBLISHED
    query = Query(consumerGroup="g")
    history = History(tmp_path / "s", "plain", query.remember, newer=())
    end = history.back(way)
    with history.open() as store:
        history.put(store, 1)
    before = group(history.root)
    assert before.get(0, 0) <= end
    for fails in ("true", "false"):
        reader = stream(str(history.root), failOnDataLoss=fails, **query.options)
        try:
            reader.latestOffset(query.end, ALL)
        except StoreWentBackwardsError:
            assert fails == "true"
        assert group(history.root) == before


@EVERY_WAY
def test_the_lag_of_a_checkpoint_is_what_the_query_would_find(tmp_path: Path, way: WayBack) -> None:
    """It was content with a store that the query refuses, and counted from a number that means another message."""
    assert ANSWERS[Memory.CHECKPOINT_LAG, way] is Answer.COUNTED
    query = Query()
    history = History(tmp_path / "s", "plain", query.remember)
    end = history.back(way)
    folder = checkpoint(tmp_path / "ck", [[query.end]])
    with history.open() as store:
        history.put(store, MORE)
    told = run("lag", history.root, "--checkpoint", folder, "--json", code=1)
    (row,) = objects(told)
    assert row["committedOffset"] == READ
    assert MORE <= row["lag"] <= end + MORE
    assert "The query refuses this store" in told.stderr


@EVERY_WAY
def test_tail_shows_each_new_message(tmp_path: Path, way: WayBack) -> None:
    """It looked again when the queue had grown past the number that it had reached, and showed the rest."""
    found: list[Cursor] = []

    def show(history: History, store: MessageStore) -> None:
        store.flush()
        found.append(Cursor(LOCAL_STORES.reader(str(history.root)), ["t"]))
        assert len(list(found[0].once())) == READ

    history = History(tmp_path / "s", "plain", show)
    history.back(way)
    with history.open() as store:
        history.disk.now_ms += 1
        bodies = history.put(store, MORE)
    shown = [message.body for message in found[0].once() if message.topic == "t"]
    assert [body for body in shown if body in bodies] == bodies
    assert len(shown) == len(set(shown))
    found[0].store.close()
