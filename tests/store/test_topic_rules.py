"""What the settings of a topic forbid and change: permissions, filter type, message type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from crash.imitate import walk
from messagestore import (
    BatchRequest,
    Message,
    MessageBatch,
    MessageIllegalError,
    MessageStore,
    PutMessageStatus,
    StoreConfig,
)
from messagestore.format import kernel
from messagestore.format.layout import SYS_FLAG_MULTI_TAGS
from messagestore.inspect.verify import verify
from small import SMALL, ClockDisk, bodies, columns, delayed

ONE = Message("t", b"x", queue_id=0)
PUTS: dict[str, Callable[[MessageStore], object]] = {
    "put_message": lambda store: store.put_message(ONE),
    "put_message_async": lambda store: store.put_message_async(ONE).result(),
    "delayed": lambda store: store.put_message(Message("t", b"x", queue_id=0, delay_time_level=1)),
    "put_messages": lambda store: store.put_messages(MessageBatch.from_messages([ONE])),
    "half_message": lambda store: store.half_message(ONE, "g"),
    "append_batch": lambda store: store.append_batch(columns(bodies(3))),
    "append_batch, delayed": lambda store: store.append_batch(delayed([1, 2])),
}


def settings_of_topic(root: Path, topic: str, **settings: object) -> None:
    """Change a topic in `config/topics.json` by hand."""
    path = root / "config" / "topics.json"
    table = json.loads(path.read_text())
    table["topicConfigTable"][topic].update(settings)
    path.write_text(json.dumps(table))


def read_only(store: MessageStore) -> None:
    store.create_topic("t", 2)
    store.alter_topic("t", perm=4)


# ---- permissions


@pytest.mark.parametrize("put", PUTS)
def test_a_topic_without_write_permission_takes_no_message(tmp_path: Path, put: str) -> None:
    """As RocketMQ, whose producers then find no queue. What is in the topic can be read, and it can be opened again."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(ONE)
        read_only(store)
        end = store.writer.end.physical_offset
        with pytest.raises(
            MessageIllegalError, match=r"topic 't': found perm 4 in .*NO_PERMISSION.*--perm 6"
        ) as caught:
            PUTS[put](store)
        assert caught.value.put_status is PutMessageStatus.MESSAGE_ILLEGAL
        assert store.writer.end.physical_offset == end
        assert [message.body for message in store.get_message("t", 0, 0).messages] == [b"x"]
        store.alter_topic("t", perm=2)
        PUTS[put](store)
        assert store.writer.end.physical_offset > end
    assert verify(tmp_path / "s", SMALL).ok


@pytest.mark.parametrize("put", PUTS)
def test_a_broker_that_may_not_be_written_takes_no_message(tmp_path: Path, put: str) -> None:
    """`brokerPermission` of its own file. RocketMQ ignores a value that is no number, and so do we."""
    path = tmp_path / "broker.conf"
    for permission, allowed in (("4", False), ("6", True), ("2", True), ("read", True)):
        path.write_text(f"brokerPermission={permission}\nmappedFileSizeCommitLog=65536\n")
        config = StoreConfig.load(path)
        with MessageStore.open(tmp_path / permission, config) as store:
            store.create_topic("t", 2)
            if allowed:
                PUTS[put](store)
            else:
                with pytest.raises(MessageIllegalError, match=r"found brokerPermission=4 .* another broker's store"):
                    PUTS[put](store)
                assert store.writer.end.physical_offset == 0


def test_what_was_accepted_before_a_topic_was_closed_still_arrives(tmp_path: Path) -> None:
    """As from a broker, a delayed message is delivered, and a half message is committed. A batch that comes again is
    known."""
    disk, request = ClockDisk(1_700_000_000_000), BatchRequest(app_id="app", version=0)
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.create_topic("t", 2)
        store.put_message(Message("t", b"delayed", queue_id=0, delay_time_level=1))
        half = store.half_message(Message("t", b"half", queue_id=0), "g")
        store.append_batch(columns([b"batch"]), request)
        store.alter_topic("t", perm=4)
        disk.now_ms += 60_000
        assert store.deliver_delayed().count == 1
        half.commit()
        assert store.append_batch(columns([b"batch"]), request).status == "known"
        found = store.get_message("t", 0, 0).messages
        assert [message.body for message in found] == [b"batch", b"delayed", b"half"]


@pytest.mark.parametrize("put", [*PUTS, "in turn", "by key"])
@pytest.mark.parametrize("count", [0, -3])
def test_a_topic_without_a_queue_to_write_takes_no_message(tmp_path: Path, put: str, count: int) -> None:
    """RocketMQ's tools set writeQueueNums to 0 so that producers leave a topic."""
    puts = {
        **PUTS,
        "in turn": lambda store: store.put_message(Message("t", b"x")),
        "by key": lambda store: store.half_message(Message("t", b"x", keys=["k"]), "g"),
    }
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.create_topic("t", 2)
    settings_of_topic(tmp_path / "s", "t", writeQueueNums=count)
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        with pytest.raises(MessageIllegalError, match=rf"topic 't': found writeQueueNums {count} in .*alter --queues"):
            puts[put](store)
        assert store.writer.end.physical_offset == 0
        store.alter_topic("t", write_queue_nums=2)
        puts[put](store)


def test_a_retry_topic_without_write_permission_takes_nothing_back(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(ONE)
        (message,) = store.get_message("t", 0, 0).messages
        store.create_topic("%RETRY%g", 1, perm=4)
        with pytest.raises(MessageIllegalError, match="topic '%RETRY%g': found perm 4"):
            store.send_back(message, "g")
    settings_of_topic(tmp_path / "s", "%RETRY%g", writeQueueNums=0)
    with (
        MessageStore.open(tmp_path / "s", SMALL) as store,
        pytest.raises(MessageIllegalError, match="topic '%RETRY%g': found writeQueueNums 0"),
    ):
        store.send_back(message, "g")


# ---- retry topics


def test_a_message_to_a_retry_topic_is_a_dead_letter_after_its_last_retry(tmp_path: Path) -> None:
    """As by a broker: above the group's `retryMaxTimes`, to the only queue of its dead-letter topic, without a delay."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.create_group("g", retry_max_times=3)
        for group, times in (("g", 3), ("g", 4), ("other", 16), ("other", 17)):
            message = Message(
                f"%RETRY%{group}", b"%d" % times, queue_id=3, keys=["k"], reconsume_times=times, delay_time_level=2
            )
            store.put_message(message)
        for group, dead in (("g", b"4"), ("other", b"17")):
            (found,) = store.get_message(f"%DLQ%{group}", 0, 0).messages
            assert (found.body, found.reconsume_times) == (dead, int(dead))
            assert found.system_properties["DELAY"] == "-1"
            assert store.query_message(f"%DLQ%{group}", "k") == [found]
            config = store.topic_config(f"%DLQ%{group}")
            assert config is not None and config.write_queue_nums == 1
        waiting = store.get_message("SCHEDULE_TOPIC_XXXX", 1, 0).messages
        assert [message.body for message in waiting] == [b"3", b"16"]
        store.alter_group("g", retry_max_times=0)
        store.put_message(Message("%RETRY%g", b"first", queue_id=0))
        store.put_message(Message("%RETRY%g", b"once", queue_id=0, reconsume_times=1))
        assert [message.body for message in store.get_message("%RETRY%g", 0, 0).messages] == [b"first"]
        assert [message.body for message in store.get_message("%DLQ%g", 0, 0).messages] == [b"4", b"once"]
    assert verify(tmp_path / "s", SMALL).ok


def test_a_batch_of_messages_for_a_retry_topic_is_refused(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        batch = MessageBatch.from_messages([Message("%RETRY%g", b"x", queue_id=0)])
        with pytest.raises(MessageIllegalError, match=r"batch: found the retry topic %RETRY%g; .* Use send_back"):
            store.put_messages(batch)
        assert store.topics() == {}


# ---- filter type


@pytest.mark.parametrize("lib", [kernel.lib, None], ids=["kernel", "scalar"])
def test_messages_of_a_topic_with_multi_tags_have_its_flag(tmp_path: Path, lib: object) -> None:
    """In every form, and while they wait, as from a broker. Messages of other topics have none."""
    disk = ClockDisk(1_700_000_000_000)
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.create_topic("t", 2)
        store.create_topic("other", 2)
    settings_of_topic(tmp_path / "s", "t", topicFilterType="MULTI_TAG")
    with mock.patch.object(kernel, "lib", lib), MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        for put in PUTS.values():
            found = put(store)
            if hasattr(found, "commit"):
                found.commit()
        store.put_message(Message("other", b"x", queue_id=0))
        store.append_batch(columns(bodies(3), topic="other"))
        store.append_batch(delayed([1, 2, None], topic="other"))
        disk.now_ms += 60_000
        assert store.deliver_delayed().count == 5
        config = store.alter_topic("t", perm=6)
        assert config.topic_filter_type == "MULTI_TAG"
    seen = set()
    for record in walk(tmp_path / "s")[0]:
        topic = record["all_properties"].get("REAL_TOPIC", record["topic"])
        assert bool(record["sys_flag"] & SYS_FLAG_MULTI_TAGS) == (topic == "t"), record
        seen.add((record["topic"], topic))
    assert seen >= {(topic, topic) for topic in ("t", "other")}
    assert seen >= {("SCHEDULE_TOPIC_XXXX", "t"), ("SCHEDULE_TOPIC_XXXX", "other"), ("RMQ_SYS_TRANS_HALF_TOPIC", "t")}
    assert verify(tmp_path / "s", SMALL).ok


# ---- message type


@pytest.mark.parametrize("kind", ["NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED", "PRIORITY"])
def test_a_topic_takes_messages_of_every_type(tmp_path: Path, kind: str) -> None:
    """RocketMQ's broker compares no message with the attribute `message.type`, only its proxy does. The attribute and
    those that this project does not know stay in the file."""
    attributes = {"message.type": kind, "+from.later": "x"}
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.create_topic("t", 2, attributes=attributes)
        for put in PUTS.values():
            put(store)
        store.alter_topic("t", order=True)
    table = json.loads((tmp_path / "s" / "config" / "topics.json").read_text())["topicConfigTable"]
    assert table["t"]["attributes"] == attributes
