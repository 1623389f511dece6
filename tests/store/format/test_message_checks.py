"""A batch with one bad row is refused, and the row is named."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from messagestore.errors import MessageIllegalError
from messagestore.format import properties
from messagestore.format.config import StoreConfig
from messagestore.format.message import check_topic
from messagestore.format.message_checks import first_fault
from messagestore.format.message_columns import ColumnTexts, MessageColumns

LIMITS = StoreConfig(max_message_size=100)
TEXT_MAP = pa.map_(pa.string(), pa.string())


def fault_of(first_row: int = 0, limits: StoreConfig = LIMITS, **columns: object) -> MessageIllegalError | None:
    n = max(len(column) for column in columns.values() if not isinstance(column, str | None))
    defaults = {"topic": "T", "queue_id": np.zeros(n, np.int32), "body": pa.array([b""] * n, pa.binary())}
    return first_fault(ColumnTexts(MessageColumns(**(defaults | columns))), limits, first_row)


@pytest.mark.parametrize(
    ("columns", "row", "field", "says"),
    [
        ({"body": pa.array([b"", None, b""])}, 1, "body", "null"),
        ({"body": pa.array([b"x" * 100, b"x" * 101])}, 1, "body", "101"),
        ({"body": pa.array(["ü" * 51])}, 0, "body", "102"),
        ({"body": pa.array([b"x" * 200, None])}, 0, "body", "200"),
        ({"topic": pa.array(["T", "U", "T/U", "T/U"])}, 2, "topic", "T/U"),
        ({"topic": pa.array(["T", None])}, 1, "topic", "null"),
        ({"topic": pa.array(["rmq_sys_spark_sink"])}, 0, "topic", "the store uses itself"),
        ({"topic": pa.array(["T", "T", "rmq_sys_wheel_timer"])}, 2, "topic", "reserved for RocketMQ's broker"),
        ({"topic": pa.array(["T", "SCHEDULE_TOPIC_XXXX"]).dictionary_encode()}, 1, "topic", "reserved"),
        ({"topic": pa.array([b"T", b"\xff"], pa.binary()).dictionary_encode()}, 1, "topic", "found"),
        ({"topic": "", "tags": pa.array(["t"])}, 0, "topic", "empty"),
        ({"queue_id": np.array([0, 65535, 65536], np.int32)}, 2, "queue_id", "65536"),
        ({"queue_id": np.array([0, -1], np.int32)}, 1, "queue_id", "-1"),
        ({"flag": np.array([0, 1 << 31], np.int64)}, 1, "flag", "2147483648"),
        ({"keys": pa.array([["a"], ["b", "c d"]])}, 1, "keys", "blank"),
        ({"keys": pa.array([[], ["b", ""]])}, 1, "keys", "empty"),
        ({"keys": pa.array([["a", None]])}, 0, "keys", "null"),
        ({"keys": pa.array([[], [], ["a\x02"]])}, 2, "keys", "U\\+0002"),
        ({"keys": pa.array([None, "a", ""])}, 2, "keys", "empty"),
        ({"keys": pa.array([b"a", b"\xff"], pa.binary())}, 1, "keys", "UTF-8"),
        ({"unique_key": pa.array(["u", "u v"])}, 1, "keys", "blank"),
        ({"tags": pa.array([None, "a b", ""])}, 2, "tags", "empty"),
        ({"tags": pa.array(["a\x01b"]).dictionary_encode()}, 0, "tags", "U\\+0001"),
        ({"tags": pa.array([b"\xc3", b"x"], pa.binary())}, 0, "tags", "UTF-8"),
        ({"properties": pa.array([[("a", "b")], [("KEYS", "k")]], TEXT_MAP)}, 1, "properties", "RocketMQ"),
        ({"properties": pa.array([None, [], [("a", "")]], TEXT_MAP)}, 2, "properties", "empty"),
        ({"properties": pa.array([[("a", None)]], TEXT_MAP)}, 0, "properties", "null"),
        ({"properties": pa.array([[("", "v")]], TEXT_MAP)}, 0, "properties", "empty"),
        ({"properties": pa.array([[("a\x01", "v")]], TEXT_MAP)}, 0, "properties", "U\\+0001"),
        ({"properties": pa.array([[("a", "v")], [("b", "v"), ("a", "")]], TEXT_MAP)}, 1, "properties", "empty"),
        ({"properties": pa.array([[("a", "v")], [("a", "v"), ("a", "w")]], TEXT_MAP)}, 1, "properties", "twice"),
        ({"properties": pa.array([[(b"a", b"\xff")]], pa.map_(pa.binary(), pa.binary()))}, 0, "properties", "UTF-8"),
    ],
)  # fmt: skip
def test_the_row_is_named(columns: dict, row: int, field: str, says: str) -> None:
    """In the user's batch: the rows before it count."""
    for first_row in (0, 1000):
        fault = fault_of(first_row, **columns)
        assert fault is not None
        assert (fault.row, fault.field) == (first_row + row, field)
        with pytest.raises(MessageIllegalError, match=says):
            raise fault


def test_the_first_of_several_bad_rows() -> None:
    fault = fault_of(
        body=pa.array([b"", b"", b"", None]), tags=pa.array(["a", "", None, ""]), keys=pa.array(["a", "b", "c d", "e"])
    )
    assert (fault.row, fault.field) == (1, "tags")


def test_what_is_legal() -> None:
    """Limits themselves, blanks where they do no harm, other control characters, no properties at all."""
    assert (
        fault_of(
            topic=pa.array(["%RETRY%" + "x" * 248, "a|b-c_%", None]).fill_null("T").dictionary_encode(),
            queue_id=np.array([0, 65535, 7], np.int32),
            body=pa.array([b"", b"x" * 100, b"\x01\x02 "]),
            keys=pa.array([["a", "b\tc"], [], None]),
            tags=pa.array(["a b", None, "A || B"]),
            properties=pa.array([[("a b", "c d"), ("\0", "\n")], None, []], TEXT_MAP),
            flag=np.array([-1, 0, 1], np.int32),
        )
        is None
    )


def test_names_that_no_row_has_do_not_count() -> None:
    """A slice keeps the dictionary of the whole."""
    topics = pa.array(["T", "a/b"]).dictionary_encode()[:1]
    names = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array(["mine", "KEYS", ""]))
    pairs = pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), names, pa.array(["v"]))
    assert fault_of(topic=topics, properties=pairs) is None


def test_long_topics_without_v2() -> None:
    limits = StoreConfig(auto_message_version_on_topic_len=False)
    fault = fault_of(topic=pa.array(["T", "%DLQ%" + "x" * 200]), limits=limits)
    assert fault.row == 1
    assert "autoMessageVersionOnTopicLen" in fault.reason


def test_queues_must_be_chosen() -> None:
    with pytest.raises(ValueError, match="no queues"):
        fault_of(queue_id=None, body=pa.array([b""]))


def allowed(check: object, value: object) -> bool:
    try:
        check(value)
    except MessageIllegalError:
        return False
    return True


reserved = st.sampled_from(sorted(properties.RESERVED_PROPERTIES))
storable = st.text(st.one_of(st.sampled_from("ab \x01\x02é😀"), st.characters(exclude_categories=["Cs"])), max_size=4)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["T", "U", "a/b", ""]) | strategies.topics,
            st.none() | st.lists(storable, max_size=2),
            st.none() | storable,
            st.none() | st.dictionaries(storable | reserved, storable, max_size=2),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_batch_rule_is_the_rule_of_one_message(rows: list[tuple]) -> None:
    """Whatever the rows: the first one that a single put would refuse is the one that is named."""
    good = [
        allowed(check_topic, topic)
        and allowed(properties.check_keys, keys or [])
        and allowed(properties.check_tags, tags)
        and allowed(properties.check_properties, pairs or {})
        for topic, keys, tags, pairs in rows
    ]
    fault = fault_of(
        topic=pa.array([row[0] for row in rows]),
        keys=pa.array([row[1] for row in rows], pa.list_(pa.string())),
        tags=pa.array([row[2] for row in rows], pa.string()),
        properties=pa.array([None if row[3] is None else list(row[3].items()) for row in rows], TEXT_MAP),
    )
    assert (fault.row if fault is not None else None) == (None if all(good) else good.index(False))
