"""config/topics.json and config/consumerOffset.json: each side reads what the other wrote, by the broker's own managers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from interop import recipes
from interop.java_store import COUNTS, Driver
from messagestore import ConfigError, Message, MessageIllegalError, MessageStore, topics
from messagestore.mapped_file import Disk
from messagestore.topics import TopicConfig, Topics
from small import SMALL

FIELDS = {
    "read_queue_nums": "readQueueNums",
    "write_queue_nums": "writeQueueNums",
    "perm": "perm",
    "topic_sys_flag": "topicSysFlag",
    "order": "order",
    "topic_filter_type": "topicFilterType",
    "attributes": "attributes",
}


def loaded_by_java(java: Driver, root: Path, **arguments: object) -> dict:
    COUNTS.stores += 1
    return java.call("config", file="topics", root=str(root), **arguments)


def ours(root: Path) -> dict[str, TopicConfig]:
    found = Topics(Disk(), str(root))
    found.load()
    return {name: config for name in found.names if (config := found.get(name)) is not None}


def same(config: TopicConfig, theirs: dict) -> None:
    for name, java_name in FIELDS.items():
        assert getattr(config, name) == theirs[java_name], (config.topic_name, name)


def test_our_topics_are_loaded_by_java(each_java: Driver, root: Path) -> None:
    """Topics of all names and queue counts; what a broker knows besides, it adds, and we keep."""
    rng = Random(1)
    wanted = {recipes.topic(rng): rng.choice([1, 4, 8, 16, 1000, 65536]) for _ in range(60)}
    with MessageStore.open(root, SMALL) as store:
        for topic, count in wanted.items():
            store.create_topic(topic, count)
    found = loaded_by_java(each_java, root)
    for topic, count in wanted.items():
        theirs = found["topics"][topic]
        assert (theirs["readQueueNums"], theirs["writeQueueNums"], theirs["perm"]) == (count, count, 6)
        assert theirs["topicName"] == topic
        same(ours(root)[topic], theirs)


def test_java_s_topics_are_loaded_by_us(each_java: Driver, root: Path) -> None:
    """And back: Java writes, we add a topic, Java has them all, with their attributes."""
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("ours-first", 3)
    rng = Random(2)
    made = {
        recipes.topic(rng): [rng.randint(1, 32), rng.randint(1, 32), rng.choice([2, 4, 6, 7]), {}] for _ in range(40)
    }
    made["with-attributes"] = [4, 4, 6, {"queue.type": "SimpleCQ", "cleanup.policy": "DELETE"}]
    found = loaded_by_java(each_java, root, put=made)
    assert set(made) | {"ours-first"} <= set(found["topics"])
    for topic, theirs in found["topics"].items():
        if "/" not in topic:
            same(ours(root)[topic], theirs)
    version = found["version"]["counter"]
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("ours-second", 5)
        assert store.create_topic("with-attributes", 9).write_queue_nums == 4
    again = loaded_by_java(each_java, root)
    assert again["topics"]["ours-second"]["writeQueueNums"] == 5
    assert again["topics"]["with-attributes"]["attributes"] == made["with-attributes"][3]
    assert again["version"]["counter"] > version, "a broker's slaves look at the version"
    without = {name: fields for name, fields in again["topics"].items() if name != "ours-second"}
    assert without == found["topics"]


def test_a_topic_with_batch_queues_is_refused(java: Driver, root: Path) -> None:
    """The attribute that Java's own tools write, with and without its `+`."""
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("t")
    loaded_by_java(java, root, put={"inner": [4, 4, 6, {"queue.type": "BatchCQ"}]})
    with MessageStore.open(root, SMALL) as store:
        with pytest.raises((ConfigError, MessageIllegalError), match="BatchCQ"):
            store.put_message(Message("inner", b"x", queue_id=0))
        assert store.put_message(Message("t", b"x", queue_id=0)).is_ok


def test_unquoted_keys(java: Driver, root: Path) -> None:
    """consumerOffset.json as Java writes it has integer keys without quotes, which is no JSON: our reader of such text
    reads it, and Java loads what our writer makes of it. (Nothing of ours writes consumer offsets yet.)"""
    table = {"a@g1": {"0": 7, "1": 2**40, "15": 0}, "%RETRY%g1@g1": {"0": 3}}
    java.call("config", file="offsets", root=str(root), put=table)
    path = root / "config" / "consumerOffset.json"
    text = path.read_text()
    with pytest.raises(ValueError, match="property name"):
        json.loads(text)
    found = json.loads(topics._UNQUOTED_KEY.sub(topics._quoted_key, text))
    assert found["offsetTable"] == table
    path.write_text(topics._fastjson(found))
    assert java.call("config", file="offsets", root=str(root)) == table
    COUNTS.stores += 2
