"""From the columns of a DataFrame to messages with queues."""

from __future__ import annotations

import pyarrow as pa
import pytest

from messagestore import ConfigError, MessageIllegalError, StoreConfig
from messagestore.format.javahash import java_hash
from pyspark_messagestore.columns import ASSIGNED, Mapper, prepare

TYPES = {
    pa.string(): "string",
    pa.binary(): "binary",
    pa.int32(): "int",
    pa.list_(pa.string()): "array<string>",
    pa.map_(pa.string(), pa.string()): "map<string,string>",
}


def mapped(columns: dict, *, topic: str | None = "t", selector: str = "auto", counts=None, seed: str = "0/0"):
    batch = pa.record_batch(columns)
    kinds = [(name, TYPES[kind]) for name, kind in zip(batch.schema.names, batch.schema.types, strict=True)]
    mapping = prepare(kinds, topic)
    return Mapper(mapping, topic, selector, lambda name: (counts or {}).get(name, 8), seed).messages(batch, 100)


def queue_of(key: str, count: int = 8) -> int:
    hashed = java_hash(key)
    return 0 if hashed == -(1 << 31) else abs(hashed) % count


def test_both_families_of_names() -> None:
    """RocketMQ's names, Kafka's, and RocketMQ's where both are there."""
    kafka = mapped({"key": ["k"], "value": ["v"], "partition": pa.array([3], pa.int32())}).columns
    assert (kafka.body.to_pylist(), kafka.keys.to_pylist(), kafka.queue_id.tolist()) == (["v"], ["k"], [3])
    both = mapped({"value": ["kafka"], "body": ["rocket"]}).columns
    assert both.body.to_pylist() == ["rocket"]


def test_the_columns_of_kafkas_sink() -> None:
    """With rowFormat=kafka, RocketMQ's names have no meaning, so none of them can take Kafka's place."""
    kafka = [
        ("key", "binary"),
        ("value", "binary"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
    ]
    mapping = prepare(kafka, "t", row_format="kafka")
    assert (mapping.names, mapping.indices) == (("keys", "body", "queueId"), (0, 1, 2))
    rocket = [("body", "string"), ("value", "string"), ("queueId", "int")]
    assert prepare(rocket, "t", "ignore", "kafka").indices == (1,)
    with pytest.raises(ConfigError, match=r"column body: no such column; allowed are key, value, .*rowFormat=kafka"):
        prepare(rocket, "t", row_format="kafka")
    with pytest.raises(ConfigError, match="column value: found none"):
        prepare([("body", "string")], "t", "ignore", "kafka")


def test_what_was_read_can_be_written_back() -> None:
    """The source's columns are all accepted; those the store assigns itself are left out."""
    columns = [
        ("topic", "string"),
        ("queueId", "int"),
        ("queueOffset", "bigint"),
        ("body", "binary"),
        ("tags", "string"),
    ]
    columns += [("keys", "array<string>"), ("properties", "map<string,string>"), ("bornTimestamp", "timestamp")]
    mapping = prepare([*columns, ("storeTimestamp", "timestamp"), ("msgId", "string")], None)
    assert set(mapping.names) == {"topic", "queueId", "body", "tags", "keys", "properties", "bornTimestamp"}
    assert not {name.lower() for name in mapping.names} & ASSIGNED


def test_columns_that_cannot_be() -> None:
    """Refused before a row is read, by name."""
    with pytest.raises(ConfigError, match="column bodyy: no such column"):
        prepare([("bodyy", "string")], "t")
    with pytest.raises(ConfigError, match="column body: found type int; allowed is binary or string"):
        prepare([("body", "int")], "t")
    with pytest.raises(ConfigError, match=r"column body \(or value\): found none"):
        prepare([("tags", "string")], "t")
    with pytest.raises(ConfigError, match="topic: found neither"):
        prepare([("body", "string")], None)


def test_queues_by_the_first_key() -> None:
    """As RocketMQ's SelectMessageQueueByHash: abs of Java's hash, modulo the queues; -2147483648 is queue 0."""
    keys = ["a", "N14228", "polygenelubricants", "Zürich"]
    found = mapped({"body": ["x"] * 4, "keys": pa.array([[k, "other"] for k in keys])})
    assert found.columns.queue_id.tolist() == [queue_of(k) for k in keys]


def test_queues_by_sharding_key_then_key_then_in_turn() -> None:
    columns = {
        "body": ["x"] * 5,
        "shardingKey": pa.array(["s1", None, None, "s2", None]),
        "keys": pa.array([["k"], ["k"], None, [], []], pa.list_(pa.string())),
    }
    queues = mapped(columns).columns.queue_id.tolist()
    assert queues[0] == queue_of("s1")
    assert queues[1] == queue_of("k")
    assert queues[3] == queue_of("s2")
    assert mapped(columns, selector="keys").columns.queue_id.tolist()[0] == queue_of("k")


def test_queues_in_turn_begin_at_the_same_place_for_the_same_batch() -> None:
    """A replayed task chooses the same queues; another partition begins elsewhere."""
    columns = {"body": ["x"] * 20}
    one, again = mapped(columns, seed="7/0").columns.queue_id, mapped(columns, seed="7/0").columns.queue_id
    assert one.tolist() == again.tolist() == [(int(one[0]) + i) % 8 for i in range(20)]
    turns = {int(mapped(columns, seed=f"7/{p}").columns.queue_id[0]) for p in range(20)}
    assert len(turns) > 3
    forced = mapped({"body": ["x"] * 9, "keys": pa.array([["k"]] * 9)}, selector="roundRobin").columns.queue_id
    assert sorted(set(forced.tolist())) == list(range(8))


def test_queue_ids_given() -> None:
    """A null is chosen; one the topic does not have is named with its row."""
    queues = mapped({"body": ["x"] * 3, "queueId": pa.array([5, None, 0], pa.int32()), "keys": pa.array([["k"]] * 3)})
    assert queues.columns.queue_id.tolist() == [5, queue_of("k"), 0]
    assert queues.columns.given["queue_id"].to_pylist() == [5, None, 0]
    for wrong in (8, -1):
        with pytest.raises(MessageIllegalError, match=rf"row 101: queueId: found {wrong}; allowed is 0 to 7"):
            mapped({"body": ["x"] * 2, "queueId": pa.array([0, wrong], pa.int32())})


def test_topics_with_different_queue_counts() -> None:
    columns = {"body": ["x"] * 4, "topic": ["a", "b", "a", "b"], "keys": pa.array([["k1"], ["k1"], ["k9"], ["k9"]])}
    found = mapped(columns, topic=None, counts={"a": 3, "b": 5}).columns.queue_id.tolist()
    assert found == [queue_of("k1", 3), queue_of("k1", 5), queue_of("k9", 3), queue_of("k9", 5)]


def test_kafka_headers_become_properties() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch({"value": ["x", "y"], "headers": pa.array([[{"key": "a", "value": b"1"}], None], kind)})
    mapping = prepare([("value", "string"), ("headers", "array<struct<key:string,value:binary>>")], "t")
    columns = Mapper(mapping, "t", "auto", lambda _: 8, "").messages(batch, 0).columns
    assert columns.properties.to_pylist() == [[("a", b"1")], None]
    bad = pa.record_batch({"value": ["x"], "headers": pa.array([[{"key": "a", "value": b"\xff"}]], kind)})
    mapper = Mapper(mapping, "t", "auto", lambda _: 8, "")
    assert "not UTF-8. Encode bytes" in str(mapper.faults(bad, 0, StoreConfig())[0])
