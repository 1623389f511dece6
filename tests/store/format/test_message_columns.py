"""Columns of a user become the fields of messages."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest

from messagestore.errors import MessageIllegalError
from messagestore.format.message_columns import NO_QUEUE, ColumnTexts, MessageColumns


def from_columns(**columns: object) -> MessageColumns:
    return MessageColumns.from_arrow(pa.table({"body": pa.array([b"x", b"y"])} | columns), topic="T")


def test_names_of_both_families() -> None:
    """Kafka's and RocketMQ's names, camel case and snake case, are the same columns."""
    values = {"body": [b"x"], "queue_id": [3], "sharding_key": ["s"], "born_timestamp_ms": [5], "keys": [["k"]]}
    for names in (
        {name: name for name in values},
        {"body": "value", "queue_id": "partition", "sharding_key": "shardingKey", "born_timestamp_ms": "bornTimestamp",
         "keys": "key"},
        {"body": "body", "queue_id": "queueId", "sharding_key": "sharding_key", "born_timestamp_ms": "born_timestamp",
         "keys": "keys"},
    ):  # fmt: skip
        columns = MessageColumns.from_arrow(
            pa.table({names[name]: pa.array(values[name]) for name in values}), topic="T"
        )
        assert columns.body.to_pylist() == [b"x"]
        assert columns.queue_id.tolist() == [3]
        assert columns.born_timestamp_ms.tolist() == [5]
        assert columns.sharding_key.to_pylist() == ["s"]
        assert ColumnTexts(columns).keys.texts.to_pylist() == ["k"]


@pytest.mark.parametrize(("one", "other"), [("body", "value"), ("queueId", "partition"), ("keys", "key")])
def test_two_columns_for_one_field_are_refused(one: str, other: str) -> None:
    """One of them used to be dropped. A column of Arrow's null type counts as missing."""
    values = {"body": [b"x"], "queueId": [1], "keys": [["k"]]}
    columns = {"body": [b"x"], one: values[one], other: values[one]}
    with pytest.raises(MessageIllegalError, match=f"columns {one} and {other}: both are for "):
        MessageColumns.from_arrow(pa.table(columns), topic="T")
    columns[other] = pa.nulls(1)
    assert MessageColumns.from_arrow(pa.table(columns), topic="T").row_count == 1


def test_the_topic_of_all_rows_wins_over_the_column_but_not_in_the_digest() -> None:
    table = pa.table({"body": [b"x"], "topic": ["A"]})
    columns = MessageColumns.from_arrow(table, topic="B")
    assert columns.topic == "B"
    assert columns.given["topic"].to_pylist() == ["A"]
    assert MessageColumns.from_arrow(table).topic.to_pylist() == ["A"]


def test_nulls_of_numbers() -> None:
    """No queue: to be chosen. No time: the default. No flag: 0. The user's own column keeps its nulls."""
    columns = MessageColumns.from_arrow(
        pa.table(
            {
                "body": [b"x", b"y"],
                "queueId": pa.array([None, 1], pa.int64()),
                "flag": pa.array([7, None], pa.int8()),
                "bornTimestamp": pa.array([None, 5], pa.int64()),
            }
        ),
        topic="T",
        default_born_timestamp_ms=99,
    )
    assert columns.queue_id.tolist() == [NO_QUEUE, 1]
    assert columns.flag.tolist() == [7, 0]
    assert columns.born_timestamp_ms.tolist() == [99, 5]
    assert {name: column.to_pylist() for name, column in columns.given.items()} == {
        "queue_id": [None, 1],
        "flag": [7, None],
        "born_timestamp": [None, 5],
    }


def test_spark_timestamps() -> None:
    """Microseconds in UTC become milliseconds."""
    when = datetime.datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=datetime.UTC)
    columns = from_columns(bornTimestamp=pa.array([when, None], pa.timestamp("us", "UTC")))
    assert columns.born_timestamp_ms[0] == int(when.timestamp() * 1000)
    assert columns.born_timestamp_ms[1] > columns.born_timestamp_ms[0]
    assert columns.given["born_timestamp"].to_pylist() == [int(when.timestamp() * 1000), None]


def test_without_a_time_it_is_now() -> None:
    assert (
        abs(int(from_columns().born_timestamp_ms[0]) - int(datetime.datetime.now(datetime.UTC).timestamp() * 1000))
        < 60_000
    )
    assert from_columns().queue_id is None


@pytest.mark.parametrize(
    ("columns", "field", "says"),
    [
        ({"colour": ["a", "b"]}, "colour", "no such column"),
        ({"flag": ["a", "b"]}, "flag", "string"),
        ({"flag": pa.array([1, 1 << 31])}, "flag", "2147483648"),
        ({"queueId": pa.array([1.0, 2.0])}, "queue_id", "double"),
        ({"bornTimestamp": ["now", "then"]}, "born_timestamp", "timestamp"),
        ({"tags": pa.array([1, 2])}, "tags", "int64"),
        ({"keys": pa.array([[1], [2]])}, "keys", "list"),
        ({"properties": ["a", "b"]}, "properties", "map"),
        ({"properties": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32()))}, "properties", "map"),
        ({"topic": pa.array([1, 2])}, "topic", "int64"),
        ({"body": pa.array([1, 2])}, "body", "int64"),
    ],
)
def test_columns_that_cannot_be_stored(columns: dict, field: str, says: str) -> None:
    with pytest.raises(MessageIllegalError, match=says) as caught:
        from_columns(**columns)
    assert caught.value.field == field


def test_what_is_needed() -> None:
    with pytest.raises(MessageIllegalError, match="body"):
        MessageColumns.from_arrow(pa.table({"topic": ["T"]}))
    with pytest.raises(MessageIllegalError, match="topic"):
        MessageColumns.from_arrow(pa.table({"body": [b"x"]}))
    with pytest.raises(ValueError, match="tags: found 1 rows; allowed are 2"):
        MessageColumns("T", None, pa.array([b"", b""]), tags=pa.array(["a"]))


def test_columns_of_nothing_but_nulls() -> None:
    """Arrow's null type is what an empty column of a Python user has."""
    columns = from_columns(tags=pa.nulls(2), keys=pa.nulls(2), properties=pa.nulls(2), queueId=pa.nulls(2))
    assert columns.tags is columns.keys is columns.properties is columns.queue_id is None
    columns = from_columns(keys=pa.array([[], []]))
    assert ColumnTexts(columns).keys.counts.tolist() == [0, 0]


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.string()), pa.list_(pa.binary()), pa.large_list(pa.large_string()), pa.list_(pa.string_view())],
    ids=str,
)
def test_keys_in_lists(kind: pa.DataType) -> None:
    """None, one or several keys a row, in every type of list, sliced or not."""
    for lists in ([["a"], ["b"]], [["a"], None, [], ["b"]], [["a", "bc"], [], None, ["d"]]):
        table = pa.table({"body": [b""] * len(lists), "keys": pa.array(lists, kind)})
        for start in range(len(lists)):
            keys = ColumnTexts(MessageColumns.from_arrow(table, topic="T").slice(start, 9)).keys
            assert keys.counts.tolist() == [len(row or []) for row in lists[start:]]
            assert keys.texts.cast(pa.string()).to_pylist() == [key for row in lists[start:] for key in row or []]


def test_keys_in_lists_of_one_size() -> None:
    texts = ColumnTexts(from_columns(keys=pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string(), 2))))
    assert texts.keys.texts.to_pylist() == ["a", "b", "c", "d"]
    assert texts.key_rows == [["a", "b"], ["c", "d"]]


def test_a_batch_in_pieces() -> None:
    """A table of several chunks is one batch; a slice copies nothing and keeps what the user gave."""
    chunk = pa.record_batch({"body": [b"x"], "tags": ["t"], "queue_id": pa.array([4], pa.int32()), "topic": ["A"]})
    columns = MessageColumns.from_arrow(pa.Table.from_batches([chunk, chunk, chunk]))
    assert columns.row_count == 3
    part = columns.slice(1, 1)
    assert part.row_count == 1
    assert part.queue_id.tolist() == [4]
    assert np.shares_memory(part.queue_id, columns.queue_id)
    assert part.given["topic"].to_pylist() == ["A"]


def test_no_rows() -> None:
    columns = MessageColumns.from_arrow(
        pa.table({"body": pa.array([], pa.binary()), "topic": pa.array([], pa.string())})
    )
    texts = ColumnTexts(columns)
    assert columns.row_count == 0
    assert texts.topic_codes.tolist() == []
    assert texts.topic_names == []


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint32(), pa.uint64()])
def test_a_number_that_does_not_fit_is_named_with_its_row(kind: pa.DataType) -> None:
    batch = pa.record_batch({"body": [b"a", b"b"], "flag": pa.array([1, 1 << 31], kind)})
    with pytest.raises(MessageIllegalError, match="row 1: flag: found 2147483648; allowed is an int of 32 bits"):
        MessageColumns.from_arrow(batch, topic="t")
