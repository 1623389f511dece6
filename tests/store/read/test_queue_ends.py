"""The ends of many queues, found in the log, are those the queues themselves tell."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pytest

from crash.imitate import Broker, seen
from messagestore import BatchRequest, Message, MessageBatch, MessageColumns, MessageStore
from messagestore.read import queue_ends
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.view import StoreView
from small import SMALL, bodies, columns, filled

TOPICS = ("t", "u")


def asked(root: Path) -> dict[tuple[str, int], int]:
    """By a view of its own, from the queues."""
    view = StoreView(root)
    try:
        keys = [(topic, queue_id) for topic in TOPICS for queue_id in view.queue_ids(topic)]
        return view.max_offsets(keys)
    finally:
        view.close()


@pytest.fixture
def no_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is looked at however few queues there are."""
    monkeypatch.setattr(queue_ends, "FEW_QUEUES", 0)


@pytest.mark.usefixtures("no_few")
@pytest.mark.parametrize("seed", range(4))
def test_the_log_tells_what_the_queues_tell(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts, puts side by side, batches, other topics, new queues, roll-over, closing and opening again: after each the
    ends are those of the queues, and they were mostly found in the log."""
    chance, root = random.Random(seed), tmp_path / "s"

    walks: list[bool] = []
    real = QueueEnds._followed
    monkeypatch.setattr(QueueEnds, "_followed", lambda self: walks.append((found := real(self)) is not None) or found)

    store = MessageStore.open(root, SMALL)
    store.create_topic("t", 8)
    store.append_batch(columns(bodies(8), queues=2), BatchRequest("app", 0))
    view = StoreView(root)
    ends = QueueEnds(view, TOPICS)

    for step in range(1, 60):
        kind, topic, queue_id = chance.randrange(6), chance.choice(["t", "u", "other"]), chance.randrange(8)
        if kind == 0:
            store.append_batch(
                columns(bodies(chance.randrange(1, 40)), topic=topic, queues=5), BatchRequest("app", step)
            )
        elif kind == 1:
            for _ in range(chance.randrange(1, 5)):
                store.put_message(Message(topic, b"." * chance.randrange(1, 3000), queue_id=queue_id))
        elif kind == 2:
            some = [Message(topic, b"x", queue_id=queue_id) for _ in range(3)]
            store.put_messages(MessageBatch.from_messages(some))
        elif kind == 3:
            store.append_batch(columns([], topic=topic), BatchRequest("app", step))
        elif kind == 4 and chance.random() < 0.3:
            store.close()
            if chance.random() < 0.5:
                view.refresh()
                assert ends.look() == asked(root)
            store = MessageStore.open(root, SMALL)

        if chance.random() < 0.7:
            view.refresh()
            assert ends.look() == asked(root), step
            assert all(place >= 0 for end, place in ends._places.values() if end), "a unit in a new file was not found"
    store.close()
    view.refresh()
    assert ends.look() == asked(root)
    assert not ends.restarts and not ends.shrinks
    assert sum(walks) > len(walks) / 2

    view.close()


@pytest.mark.usefixtures("no_few")
def test_a_log_that_does_not_continue_is_not_followed(tmp_path: Path) -> None:
    """The store is another state of itself, file by file: the ends are asked for, not added up."""
    root = filled(tmp_path / "s", 30)
    shutil.copytree(root, tmp_path / "backup")
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(20)), BatchRequest("app", 1))
    view = StoreView(root)
    ends = QueueEnds(view, ["t"])
    assert ends.look() == {("t", 0): 25, ("t", 1): 25}
    for path in sorted((tmp_path / "backup").rglob("*")):
        if path.is_file():
            shutil.copyfile(path, tmp_path / "part")
            (tmp_path / "part").rename(root / path.relative_to(tmp_path / "backup"))
    time.sleep(0.002)
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(30), queue_ids=[0] * 20 + [1] * 10), BatchRequest("app", 1))
        view.refresh()
        assert ends.look() == asked(root) == {("t", 0): 35, ("t", 1): 25}
    view.close()


@pytest.mark.parametrize("count", [3, 5, 9], ids=["shorter", "as long", "longer"])
def test_a_queue_that_was_made_again_is_told(tmp_path: Path, count: int) -> None:
    """Also when it is as long as the old one was, or longer."""
    root = filled(tmp_path / "s", 10)
    view = StoreView(root)
    ends = QueueEnds(view, ["t"])
    assert ends.look() == {("t", 0): 5, ("t", 1): 5}
    broker = Broker(root, SMALL)
    shutil.rmtree(root / "consumequeue" / "t" / "0")
    broker.next["t", 0] = 0
    for number in range(count):
        broker.put("t", b"%d" % number, 0)
    view.refresh()
    assert ends.look()["t", 0] == count == len(seen(root)["t", 0])
    assert ends.restarts == ({("t", 0): 1} if count >= 5 else {})
    assert ends.shrinks == ({("t", 0): 1} if count < 5 else {})
    view.close()


def test_many_queues_are_not_asked_when_one_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand queues, one more message: the others are not touched."""
    root = tmp_path / "s"
    config = SMALL.replace(mapped_file_size_commit_log=1 << 20, max_message_size=1 << 18)
    with MessageStore.open(root, config) as store:
        store.create_topic("t", 1000)
        batch = pa.record_batch({"body": ["x"] * 1000, "queue_id": pa.array(range(1000), pa.int32())})
        store.append_batch(MessageColumns.from_arrow(batch, topic="t"))
        view = StoreView(root, config)
        ends = QueueEnds(view, ["t"])
        assert sum(ends.look().values()) == 1000
        touched: list[object] = []
        real = StoreView.units
        monkeypatch.setattr(StoreView, "units", lambda self, *key: touched.append(key) or real(self, *key))
        monkeypatch.setattr(StoreView, "max_offsets", lambda *_: pytest.fail("all queues were asked"))
        store.put_message(Message("t", b"one more", queue_id=77))
        view.refresh()
        assert ends.look()["t", 77] == 2
        assert touched == [("t", 77, 1, 2)]
        view.close()


@pytest.mark.parametrize("few", [0, 16], ids=["many queues", "few queues"])
def test_a_topic_that_is_deleted_beside_an_open_writer_is_gone(
    tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records stay in the log, and nothing is added to it: only the folders say so."""
    monkeypatch.setattr(queue_ends, "FEW_QUEUES", few)
    root = filled(tmp_path / "s", 10)
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("u", b"x", queue_id=0))
        view = StoreView(root)
        ends = QueueEnds(view, TOPICS, names=True)
        for path in (root / "consumequeue", root / "consumequeue" / "t", root / "consumequeue" / "u"):
            os.utime(path, (1, 1))  # long ago, so that its time is relied on
        assert ends.look().keys() == {("t", 0), ("t", 1), ("u", 0)}
        assert ends.topic_names == {"t", "u"}
        store.delete_topic("u")
        view.refresh()
        assert ends.look().keys() == {("t", 0), ("t", 1)}
        assert ends.topic_names == {"t"}
        view.close()


def test_few_queues_are_asked_only_if_they_grew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that waits looks again and again: no folder is read, and of the queues only that which has a message."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for queue_id in range(7):
            store.put_message(Message("t", b"x", queue_id=queue_id))
        for path in (tmp_path / "s" / "consumequeue", tmp_path / "s" / "consumequeue" / "t"):
            os.utime(path, (1, 1))
        view = StoreView(tmp_path / "s")
        ends = QueueEnds(view, TOPICS, names=True)
        assert sum(ends.look().values()) == 7

        asked_for: list[object] = []
        real = StoreView._end
        monkeypatch.setattr(StoreView, "_end", lambda self, key: asked_for.append(key) or real(self, key))
        listed: list[str] = []
        queue_ids = StoreView.queue_ids
        monkeypatch.setattr(StoreView, "queue_ids", lambda self, topic: listed.append(topic) or queue_ids(self, topic))
        view.refresh()
        ends.look()
        assert (asked_for, listed) == ([], [])

        store.put_message(Message("t", b"one more", queue_id=5))
        view.refresh()
        assert ends.look()["t", 5] == 2
        assert {*asked_for} == {("t", 5)}

        store.put_message(Message("t", b"of a new queue", queue_id=7))
        store.put_message(Message("u", b"of a new topic", queue_id=0))
        view.refresh()
        assert ends.look()["t", 7] == ends.look()["u", 0] == 1
        assert ends.topic_names == {"t", "u"}
        view.close()


def test_a_queue_of_a_writer_that_was_made_again_and_is_as_long_is_told(tmp_path: Path) -> None:
    """Between two looks at few queues."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"old", queue_id=0))
        view = StoreView(tmp_path / "s")
        ends = QueueEnds(view, TOPICS)
        assert ends.look() == {("t", 0): 1}
        store.delete_topic("t")
        store.put_message(Message("t", b"new", queue_id=0))
        view.refresh()
        assert ends.look() == {("t", 0): 1}
        assert ends.restarts == {("t", 0): 1}
        view.close()
