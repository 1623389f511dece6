"""To whoever reads, a topic that does not exist is an empty one, as in RocketMQ's store."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from messagestore import GetMessageStatus, MessageStore, ReadOnlyStore, UnknownTopicError, deliver_delayed
from small import SMALL, filled

READS: dict[str, tuple[Callable[[Any, str, int], Any], Any]] = {
    "max_offset": (lambda s, topic, queue_id: s.max_offset(topic, queue_id), 0),
    "min_offset": (lambda s, topic, queue_id: s.min_offset(topic, queue_id), 0),
    "get_message": (
        lambda s, topic, queue_id: [
            (found.status, found.messages, found.next_begin_offset, found.min_offset, found.max_offset)
            for found in (s.get_message(topic, queue_id, 0), s.get_message(topic, queue_id, 7))
        ],
        [(GetMessageStatus.NO_MESSAGE_IN_QUEUE, [], 0, 0, 0)] * 2,
    ),
    "get_batch": (lambda s, topic, queue_id: s.get_batch(topic, queue_id, 0), None),
    "query_message": (lambda s, topic, _: s.query_message(topic, "k0"), []),
    "queue_offset_by_time": (
        lambda s, topic, queue_id: [s.queue_offset_by_time(topic, queue_id, 5, way) for way in ("lower", "upper")],
        [0, 0],
    ),
    "read": (lambda s, topic, queue_id: [*s.read(topic, queue_id, 0), *s.read(topic, queue_id, 7)], []),
    "wait": (lambda s, topic, queue_id: s.wait(topic, queue_id, 0, timeout=0), False),
    "follow": (lambda s, topic, queue_id: list(s.follow(topic, queue_id, 0, timeout=0)), []),
}
"""Method -> a call, and what it answers for a topic that does not exist."""
OTHERS = {"create_topic", "alter_topic", "delete_topic", "topic_config", "append_batch"}
"""These make or delete a topic, write to one, or ask for its settings."""


def takes_a_topic(kind: type) -> set[str]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        name for name, each in methods if name[0] != "_" and {"topic", "name"} & {*inspect.signature(each).parameters}
    }


def test_every_method_that_takes_a_topic_is_here() -> None:
    assert takes_a_topic(ReadOnlyStore) == set(READS)
    assert takes_a_topic(MessageStore) - OTHERS == set(READS)
    assert "topic" not in inspect.signature(deliver_delayed).parameters


@pytest.mark.parametrize("method", READS)
@pytest.mark.parametrize("kind", ["a writer", "a reader", "a reader of an empty store"])
def test_a_topic_that_does_not_exist_is_an_empty_one(tmp_path: Path, kind: str, method: str) -> None:
    """`query_message` raised an error, and all others answered. A queue that does not exist, and a topic that was
    created and has no message, are the same to them.
    """
    call, empty = READS[method]
    root = tmp_path / "s"
    if "empty" not in kind:
        filled(root, 3)
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("created", 2)
        if kind == "a writer":
            ask_for_each(store, call, empty)
    with MessageStore.open_read_only(root, SMALL) as reader:
        ask_for_each(reader, call, empty)


def ask_for_each(store: ReadOnlyStore, call: Callable[[Any, str, int], Any], empty: Any) -> None:
    before = store.topics()
    for topic in ("nope", "created"):
        for queue_id in (0, 7):
            assert call(store, topic, queue_id) == empty, (topic, queue_id)
    assert store.topics() == before


def test_only_a_change_of_its_settings_needs_the_topic(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        assert store.topic_config("nope") is None
        with pytest.raises(UnknownTopicError, match="topic 'nope' is not in the store"):
            store.alter_topic("nope", perm=4)
