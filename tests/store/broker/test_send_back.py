"""Messages that a consumer sends back: they wait, come to the group's retry topic, and in the end to its dead letters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from messagestore import (
    ConfigError,
    CorruptionError,
    Message,
    MessageExt,
    MessageIllegalError,
    MessageStore,
    StoreClosedError,
)
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect.verify import verify
from small import SMALL, ClockDisk

NOW_MS = 1_795_170_401_381
RETRY, DEAD = "%RETRY%boards", "%DLQ%boards"


def last(store: MessageStore, topic: str, queue_id: int = 0) -> MessageExt:
    return store.get_message(topic, queue_id, store.max_offset(topic, queue_id) - 1).messages[0]


def groups(root: Path, **settings: object) -> None:
    (root / "config").mkdir(parents=True, exist_ok=True)
    table = {"boards": {"groupName": "boards", **settings}}
    (root / "config" / "subscriptionGroup.json").write_text(json.dumps({"subscriptionGroupTable": table}))


def put(store: MessageStore) -> MessageExt:
    message = Message(
        "t",
        b"body",
        queue_id=3,
        keys=["k"],
        tags="tag",
        properties={"own": "1"},
        flag=7,
        born_timestamp_ms=17,
        born_host="10.1.2.3:99",
    )
    store.put_message(message)
    return last(store, "t", 3)


def test_a_message_comes_again_later_each_time_and_then_is_dead(tmp_path: Path) -> None:
    """Sixteen retries, at levels 3 to 18, then the dead-letter topic; what the message had stays."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        first = message = put(store)
        for times in range(1, 17):
            result = store.send_back(message, "boards")
            level = min(2 + times, 18)
            assert (result.queue_id, store.deliver_delayed().count) == (level - 1, 0)
            disk.now_ms += SMALL.delays_ms[level - 1]
            assert store.deliver_delayed().count == 1
            message = last(store, RETRY)
            assert message.reconsume_times == times
            assert message.system_properties["RETRY_TOPIC"] == "t"
            assert message.system_properties["ORIGIN_MESSAGE_ID"] == first.offset_message_id
            assert message.system_properties["REAL_TOPIC"] == RETRY
            assert message.system_properties["DELAY"] == str(level)
        store.send_back(message, "boards")
        dead = last(store, DEAD)
        assert dead.reconsume_times == 17
        for name in ("body", "keys", "tags", "properties", "flag", "born_timestamp_ms", "born_host"):
            assert getattr(dead, name) == getattr(first, name)
        assert dead.system_properties["RETRY_TOPIC"] == "t"
        assert [dead.system_properties[name] for name in ("DELAY", "REAL_TOPIC", "REAL_QID")] == ["0", RETRY, "0"]
        assert dead.system_properties["ORIGIN_MESSAGE_ID"] == first.offset_message_id
        assert store.max_offset("t", 3) == 1
        assert store.max_offset(RETRY, 0) == 16
        assert [m.body for m in store.query_message(DEAD, "k")] == [b"body"]
    assert verify(tmp_path, SMALL).ok


@pytest.mark.parametrize(("level", "waits"), [(None, 3), (0, 3), (1, 1), (99, 18)])
def test_the_level_may_be_given(tmp_path: Path, level: int | None, waits: int) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        assert store.send_back(put(store), "boards", level).queue_id == waits - 1
        assert last(store, SCHEDULE_TOPIC, waits - 1).reconsume_times == 1


def test_a_level_below_zero_is_death(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        result = store.send_back(put(store), "boards", -1)
        assert (result.queue_id, result.queue_offset) == (0, 0)
        assert last(store, DEAD).reconsume_times == 1
        assert SCHEDULE_TOPIC not in store.topics()
        config = store.topic_config(DEAD)
        assert config is not None and config.write_queue_nums == 1


def test_the_groups_settings_count(tmp_path: Path) -> None:
    """`retryMaxTimes` and `retryQueueNums` of config/subscriptionGroup.json, and RocketMQ's for other groups."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        message = put(store)
        groups(tmp_path, retryMaxTimes=1, retryQueueNums=4, other=[1])
        for _ in range(40):
            store.send_back(message, "boards", 1)
        disk.now_ms += 1_000
        assert store.deliver_delayed().count == 40
        assert set(store.topics()[RETRY]) == {0, 1, 2, 3}
        again = last(store, RETRY, 2)
        store.send_back(again, "boards")
        assert last(store, DEAD).system_properties["RETRY_TOPIC"] == "t"
        assert store.send_back(again, "others").queue_id == 3


@pytest.mark.parametrize("queues", [0, -1])
def test_a_group_without_retry_queues_is_refused(tmp_path: Path, queues: int) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        message, end = put(store), store.writer.end
        groups(tmp_path, retryQueueNums=queues)
        with pytest.raises(ConfigError, match="retryQueueNums"):
            store.send_back(message, "boards")
        assert store.writer.end == end


def test_a_damaged_table_of_groups_is_named(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        message = put(store)
        groups(tmp_path, retryMaxTimes="many")
        with pytest.raises(CorruptionError, match="subscriptionGroup"):
            store.send_back(message, "boards")


def test_the_unique_key_stays_and_finds_the_message(tmp_path: Path) -> None:
    from crash.imitate import Broker

    root = tmp_path / "store"
    root.mkdir()
    Broker(root, SMALL).put("t", b"x", 0, properties=[("UNIQ_KEY", "U1"), ("KEYS", "k"), ("TRACE_ON", "true")])
    with MessageStore.open(root, SMALL) as store:
        store.send_back(last(store, "t"), "boards", -1)
        (dead,) = store.query_message(DEAD, "U1")
        assert dead.unique_key == "U1"
        assert dead.system_properties["TRACE_ON"] == "true"
        assert dead.message_id == "U1"


@pytest.mark.parametrize("group", ["", "a b", "CID_RMQ_SYS_x", 3, "g" * 249, "g" * 260])
def test_groups_that_cannot_be_are_refused(tmp_path: Path, group: object) -> None:
    with MessageStore.open(tmp_path, SMALL) as store, pytest.raises(MessageIllegalError):
        store.send_back(put(store), group)  # type: ignore[arg-type]


def test_what_is_no_message_of_the_store_is_refused(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        message = put(store)
        for other in (
            replace(message, physical_offset=message.physical_offset + 1),
            replace(message, body=b"other"),
            replace(message, topic="u"),
        ):
            with pytest.raises(MessageIllegalError, match="no such message"):
                store.send_back(other, "boards")
        with pytest.raises(ConfigError, match="message"):
            store.send_back(Message("t", b"x"), "boards")  # type: ignore[arg-type]
        with pytest.raises(MessageIllegalError, match="delay level"):
            store.send_back(message, "boards", 1.5)  # type: ignore[arg-type]
        assert set(store.topics()) == {"t"}
    with pytest.raises(StoreClosedError):
        store.send_back(message, "boards")
