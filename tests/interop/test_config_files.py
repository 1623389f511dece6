"""The broker's files in config/: each side reads what the other wrote, by the broker's own managers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from interop import recipes
from interop.java_build import NEWEST
from interop.java_store import COUNTS, Driver, JavaStore, single
from messagestore import ConfigError, Message, MessageIllegalError, MessageStore, StoreLockedError
from messagestore.files.config_file import parsed
from messagestore.files.consumer_filters import consumer_filters
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.topics import TopicConfig, Topics
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


# ---- consumer offsets


def offsets_of_java(java: Driver, root: Path, **arguments: object) -> dict:
    COUNTS.stores += 1
    return java.call("config", file="offsets", root=str(root), **arguments)


def our_offsets(root: Path) -> dict[str, dict[str, int]]:
    """As Java's table: topic@group -> queue id as text -> offset."""
    found = ConsumerOffsets(Disk(), str(root))
    found.load()
    return {
        f"{topic}@{group}": {str(queue_id): offset for queue_id, offset in found.get(topic, group).items()}
        for group in found.groups
        for topic in found.topics(group)
    }


def random_offsets(rng: Random, count: int) -> dict[str, dict[str, int]]:
    ends = [0, 1, 2**31, 2**40, 2**63 - 1]
    return {
        f"{recipes.topic(rng)}@{rng.choice(['g', 'delays', '%a|b-c_9', 'x' * 255])}": {
            str(queue_id): rng.choice(ends) + rng.randint(-1, 0) * (rng.random() < 0.5) or 5
            for queue_id in rng.sample(range(65536), rng.randint(1, 20))
        }
        for _ in range(count)
    }


def test_our_offsets_are_loaded_by_java(each_java: Driver, root: Path) -> None:
    """Published by us, loaded by a broker's ConsumerOffsetManager: every group, topic, queue id and offset; then Java
    moves a group, adds one and saves, and we read that, move another, and Java reads it."""
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x"))
    wanted = {name: {"3": 0, "10": 2**63 - 1} for name in random_offsets(Random(3), 40)}
    for name, offsets in wanted.items():
        topic, group = name.split("@")
        publish_offsets(str(root), group, {(topic, int(queue_id)): offset for queue_id, offset in offsets.items()})
    found = offsets_of_java(each_java, root)
    assert found["offsets"] == wanted
    assert found["version"]["counter"] == len(wanted)
    moved = next(iter(wanted))
    wanted[moved] = {"3": 7, "10": 1, "11": 2**40}
    wanted["new@theirs"] = {"0": 1}
    after = offsets_of_java(each_java, root, put={moved: wanted[moved], "new@theirs": {"0": 1}})
    assert after["offsets"] == wanted == our_offsets(root)
    publish_offsets(str(root), "ours", {("t", 0): 1})
    publish_offsets(str(root), "theirs", {("new", 2): 3})
    again = offsets_of_java(each_java, root)
    assert again["offsets"] == wanted | {"t@ours": {"0": 1}, "new@theirs": {"0": 1, "2": 3}}
    assert again["version"]["counter"] == after["version"]["counter"] + 2, "a broker's slaves look at the version"


def test_java_s_offsets_are_read_and_written_by_us(each_java: Driver, root: Path) -> None:
    """As Java writes them the queue ids have no quotes, which is no JSON; what we write next to them is laid out as
    Java's: the lines differ only in order, version and our own group."""
    table = random_offsets(Random(4), 60)
    theirs = offsets_of_java(each_java, root, put=table)
    path = root / "config" / "consumerOffset.json"
    text = path.read_text()
    with pytest.raises(ValueError, match="property name"):
        json.loads(text)
    assert our_offsets(root) == theirs["offsets"] == table
    publish_offsets(str(root), "ours", {("flights", 0): 250, ("flights", 1): 251})
    written = offsets_of_java(each_java, root)
    assert written["offsets"] == table | {"flights@ours": {"0": 250, "1": 251}}
    assert written["groups"]["ours"] == ["flights"]
    ours_text = path.read_text()
    offsets_of_java(each_java, root, put={"flights@ours": {"0": 250}})  # Java writes the same table
    java_text = path.read_text()
    assert (root / "config" / "consumerOffset.json.bak").read_text() == ours_text

    def tokens(text: str) -> list[str]:
        """Everything between commas, brackets and line ends, with its tabs: the order in Java's maps is its own."""
        return sorted(re.split(r"[,\[\]\n]|(?<={)", text))

    assert tokens(ours_text) == tokens(java_text)


def test_a_live_java_store_keeps_its_offsets(java: Driver, root: Path) -> None:
    """While Java holds the store the file is the broker's: nothing is written; once it has closed, it is."""
    with JavaStore(java, root, {}) as theirs:
        theirs.put([single("t", b"x")])
        with pytest.raises(StoreLockedError, match=f"a RocketMQ broker, pid {java.pid}"):
            publish_offsets(str(root), "ours", {("t", 0): 1})
        assert not (root / "config" / "consumerOffset.json").exists()
        assert not (root / "spark").exists()
    publish_offsets(str(root), "ours", {("t", 0): 1})
    assert offsets_of_java(java, root)["offsets"] == {"t@ours": {"0": 1}}
    with JavaStore(java, root, {}) as theirs:
        assert theirs.bodies("t", 0) == [b"x"]


# ---- consumer groups


def groups_of_java(java: Driver, root: Path, **arguments: object) -> dict:
    COUNTS.stores += 1
    return java.call("config", file="groups", root=str(root), **arguments)


def file_of_groups(root: Path) -> dict:
    return parsed((root / "config" / "subscriptionGroup.json").read_text())


def test_our_groups_are_loaded_by_java(each_java: Driver, root: Path) -> None:
    """What we create and alter, a broker has, with its own defaults for what we do not name."""
    rng = Random(5)
    wanted = {
        f"%g|{number}-_": (rng.choice([0, 1, 16, 2**31 - 1]), rng.choice([0, 1, 8, 65536]), rng.random() < 0.5)
        for number in range(40)
    }
    with MessageStore.open(root, SMALL) as store:
        for group, (times, queues, enable) in wanted.items():
            store.create_group(group)
            store.alter_group(group, retry_max_times=times, retry_queue_nums=queues, consume_enable=enable)
    found = groups_of_java(each_java, root)
    for group, settings in wanted.items():
        theirs = found["groups"][group]
        assert (theirs["retryMaxTimes"], theirs["retryQueueNums"], theirs["consumeEnable"]) == settings
        assert theirs["groupName"] == group
        assert theirs["consumeFromMinEnable"] is theirs["consumeBroadcastEnable"] is True
        assert theirs["consumeTimeoutMinute"] == 15
    counter = 2 * len(wanted) if each_java.version == NEWEST else 0  # 5.1.4 does not read this version
    assert found["version"]["counter"] == counter


def test_java_s_groups_are_altered_by_us(each_java: Driver, root: Path) -> None:
    """Java writes groups with every setting that it has, and what a group may not read; we alter one and add one, and
    Java finds everything else as it was."""
    with MessageStore.open(root, SMALL) as store:
        store.create_group("ours-first", retry_max_times=2)
    policy = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 5000]}}
    made: dict[str, dict[str, object]] = {
        "boards": {"retryMaxTimes": 3, "retryQueueNums": 4, "consumeBroadcastEnable": False, "brokerId": 7},
        "orders": {"consumeMessageOrderly": True, "groupRetryPolicy": policy, "consumeTimeoutMinute": 99},
        "stopped": {"consumeEnable": False, "groupSysFlag": 5, "notifyConsumerIdsChangedEnable": False},
    }
    theirs = groups_of_java(each_java, root, put=made, forbid={"boards": "secret"})
    assert {*made, "ours-first", "TOOLS_CONSUMER"} <= set(theirs["groups"])
    version = file_of_groups(root)["dataVersion"]
    with MessageStore.open(root, SMALL) as store:
        for group, fields in theirs["groups"].items():
            config = store.group_config(group)
            assert config is not None
            assert (config.retry_max_times, config.retry_queue_nums, config.consume_enable) == (
                fields["retryMaxTimes"],
                fields["retryQueueNums"],
                fields["consumeEnable"],
            )
        store.alter_group("boards", retry_max_times=5)
        store.create_group("ours-second", consume_enable=False)
    again = groups_of_java(each_java, root)
    assert again["groups"].pop("ours-second")["consumeEnable"] is False
    assert again["groups"]["boards"].pop("retryMaxTimes") == 5
    assert theirs["groups"]["boards"].pop("retryMaxTimes") == 3
    assert again["groups"] == theirs["groups"]
    assert again["forbidden"] == theirs["forbidden"] == {"boards": {"secret": 2}}
    now = file_of_groups(root)["dataVersion"]
    assert now["counter"] == version["counter"] + 2, "a broker's slaves look at the version"
    assert now["stateVersion"] == version["stateVersion"]


def test_what_java_writes_into_our_file_of_groups_is_what_we_write(java: Driver, root: Path) -> None:
    """The same settings, written by each side: the same fields, and the same text but for the order of Java's maps."""
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("t")
    groups_of_java(java, root, put={"boards": {"retryMaxTimes": 3}})
    with MessageStore.open(root, SMALL) as store:
        store.alter_group("boards", retry_max_times=4)
    path = root / "config" / "subscriptionGroup.json"
    ours_text = path.read_text()
    groups_of_java(java, root, put={"boards": file_of_groups(root)["subscriptionGroupTable"]["boards"]})
    java_text = path.read_text()
    ours_fields, java_fields = parsed(ours_text), parsed(java_text)
    assert ours_fields.pop("dataVersion") != java_fields.pop("dataVersion")
    assert ours_fields == java_fields

    def tokens(text: str) -> list[str]:
        return sorted(re.split(r",|\n", re.sub(r'"(counter|timestamp)":\d+', "", text)))

    assert tokens(ours_text) == tokens(java_text)


# ---- filters


def filters_of_java(java: Driver, root: Path, **arguments: object) -> list[dict]:
    COUNTS.stores += 1
    return java.call("config", file="filters", root=str(root), **arguments)


def our_filters(root: Path) -> list[dict]:
    return [
        {
            "group": each.consumer_group,
            "topic": each.topic,
            "expression": each.expression,
            "type": each.expression_type,
            "born": each.born_time_ms,
            "dead": each.dead_time_ms,
            "version": each.client_version,
            "isDead": each.is_dead,
        }
        for each in consumer_filters(Disk(), str(root))
    ]


def test_java_s_filters_are_read_by_us(each_java: Driver, root: Path) -> None:
    """As a broker registers them, while their consumers live and after they have ended; and Java loads them again."""
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x"))
    assert our_filters(root) == []
    made = [
        ["boards", "flights", "delay > 15 AND origin = 'EWR'", 3],
        ["boards", "%RETRY%boards", "delay > 15", 3],
        ["alarms", "flights", "note IN ('a\"{1:2}', 'é,\n{3:', '\u2028') OR delay IS NULL", 2**40],
    ]

    def in_order(rows: list[dict]) -> list[dict]:
        return sorted(rows, key=lambda each: (each["group"], each["topic"]))

    theirs = in_order(filters_of_java(each_java, root, put=made))
    assert [(row["group"], row["topic"], row["expression"], row["version"]) for row in theirs] == sorted(
        map(tuple, made), key=lambda row: row[:2]
    )
    assert our_filters(root) == theirs
    assert not any(row["isDead"] for row in theirs)
    ended = in_order(filters_of_java(each_java, root, end="boards"))  # who loads takes the others for dead as well
    assert [row["isDead"] for row in ended] == [True, True, True]
    assert our_filters(root) == ended
    assert [row["expression"] for row in in_order(filters_of_java(each_java, root))] == [
        row["expression"] for row in theirs
    ]
