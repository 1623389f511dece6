"""Messages and topics: what may be put, by RocketMQ's rules."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore.errors import MessageIllegalError
from messagestore.format.message import (
    BATCH_TOPIC,
    AppendMessageStatus,
    Message,
    MessageExt,
    PutMessageResult,
    PutMessageStatus,
    check_queue_id,
    check_topic,
    topic_fault,
)
from messagestore.format.rows import SCHEDULE_TOPIC

ALLOWED = "%|abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"


OF_A_BROKER = (
    SCHEDULE_TOPIC,
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
    "TBW102",
    "rmq_sys_wheel_timer",
    "rmq_sys_",
    "rmq_sys_REVIVE_LOG_DefaultCluster",
    "%LMQ%a",
)


@pytest.mark.parametrize(
    "topic", ["a", "flights-enriched", "A_1|x%", "x" * 127, "%RETRY%g", "%DLQ%" + "g" * 250, "BenchmarkTest", "rmq_sys"]
)
def test_a_good_topic(topic: str):
    """To 127 characters; to 255 for retry and dead-letter topics."""
    assert topic_fault(topic) is None
    assert check_topic(topic) == topic


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("", "empty"),
        ("a b", "'a b'"),
        ("a/b", "allowed are the characters"),
        ("..", "allowed are the characters"),
        ("a\n", "allowed are the characters"),
        ("a\0", "allowed are the characters"),
        ("é", "allowed are the characters"),
        ("\uff11", "allowed are the characters"),
        ("\ud800", "allowed are the characters"),
        ("x" * 128, "found 128 bytes; allowed are at most 127"),
        ("%RETRY%" + "g" * 249, "found 256 bytes; allowed are at most 255"),
        ("%SYS%" + "g" * 123, "found 128 bytes"),
        (None, "NoneType"),
        (b"a", "bytes"),
        (7, "int"),
    ],
)
def test_a_bad_topic(topic: object, words: str):
    """A topic becomes a path: what is not in the list is refused, with the reason and the row."""
    assert words in str(topic_fault(topic))
    with pytest.raises(MessageIllegalError, match="row 5: topic: found") as caught:
        check_topic(topic, row=5)
    assert (caught.value.field, caught.value.row) == ("topic", 5)


def test_a_long_bad_topic_is_cut_in_the_message():
    """A megabyte of garbage does not fill the log."""
    assert len(str(topic_fault("é" * 1_000_000))) < 200


@given(st.text(max_size=20))
def test_only_the_characters_of_the_list(topic: str):
    """Whatever the text."""
    assert (topic_fault(topic) is None) == (len(topic) > 0 and set(topic) <= set(ALLOWED))


def test_the_stores_own_topic_is_not_for_users():
    """A name that can be read, but not be put to."""
    assert topic_fault(BATCH_TOPIC) is None
    with pytest.raises(MessageIllegalError, match=r"which the store uses itself\. Choose another topic"):
        check_topic(BATCH_TOPIC)


@pytest.mark.parametrize("topic", OF_A_BROKER)
def test_topics_that_a_broker_acts_on_are_not_for_users(topic: str):
    """They can be read, but not be put to; the error says why."""
    assert topic_fault(topic) is None
    with pytest.raises(
        MessageIllegalError, match=r"row 3: topic: found .* reserved for RocketMQ's broker: .+\. Choose another topic"
    ):
        check_topic(topic, row=3)


@pytest.mark.parametrize(("queue_id", "count"), [(0, None), (65535, None), (0, 1), (7, 8)])
def test_a_good_queue_id(queue_id: int, count: int | None):
    """0 to one less than there are."""
    assert check_queue_id(queue_id, queue_count=count) == queue_id


@pytest.mark.parametrize(
    ("queue_id", "count", "most"),
    [(-1, None, 65535), (65536, None, 65535), (8, 8, 7), (True, None, 65535), (1.0, 8, 7), ("1", 8, 7), (None, 8, 7)],
)
def test_a_bad_queue_id(queue_id: object, count: int | None, most: int):
    """A queue id becomes a path, too."""
    with pytest.raises(MessageIllegalError, match=f"allowed is 0 to {most}") as caught:
        check_queue_id(queue_id, row=1, queue_count=count)
    assert caught.value.row == 1


def test_a_message_has_its_defaults_to_itself():
    """Properties that nobody gave cannot be changed for all messages at once."""
    message = Message("t", b"")
    assert (message.keys, message.tags, dict(message.properties), message.queue_id) == ((), None, {}, None)
    with pytest.raises(TypeError):
        message.properties["a"] = "b"  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        message.body = b"x"  # type: ignore[misc]


@pytest.mark.parametrize(("unique_key", "expected"), [("7F000001", "7F000001"), (None, "OFFSET"), ("", "OFFSET")])
def test_the_id_of_a_message(unique_key: str | None, expected: str):
    """The producer's, where it gave one."""
    message = MessageExt(
        topic="t",
        queue_id=0,
        queue_offset=0,
        physical_offset=0,
        size=0,
        body=b"",
        keys=(),
        tags=None,
        properties={},
        system_properties={},
        flag=0,
        sys_flag=0,
        born_timestamp_ms=0,
        store_timestamp_ms=0,
        born_host="",
        store_host="",
        reconsume_times=0,
        prepared_transaction_offset=0,
        body_crc=0,
        unique_key=unique_key,
        offset_message_id="OFFSET",
    )
    assert message.message_id == expected


@pytest.mark.parametrize("status", PutMessageStatus)
def test_a_timeout_is_still_stored(status: PutMessageStatus):
    """As RocketMQ's isOk: it looks at the append, not at the flush."""
    result = PutMessageResult(status, AppendMessageStatus.PUT_OK, 0, 1, 0, "id", 1, 0, 0)
    assert result.is_ok
