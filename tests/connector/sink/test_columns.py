"""From the columns of a DataFrame to messages with queues."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from messagestore import ConfigError, MessageColumns, MessageIllegalError, StoreConfig
from messagestore.format.javahash import java_hash
from messagestore.spi import MOST_MS, encode
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.sink.columns import ACCEPTED, ASSIGNED, Mapper, prepare
from pyspark_messagestore.sink.dead_letters import DeadLetters
from pyspark_messagestore.source.schema import COLUMNS, KAFKA_COLUMNS, Projection

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
    """RocketMQ's names, and Kafka's, but not both for one field: one of the two would be dropped."""
    kafka = mapped({"key": ["k"], "value": ["v"], "partition": pa.array([3], pa.int32())}).columns
    assert (kafka.body.to_pylist(), kafka.keys.to_pylist(), kafka.queue_id.tolist()) == (["v"], ["k"], [3])
    with pytest.raises(ConfigError, match="columns value and body: both are for body, of which a message has one"):
        mapped({"value": ["kafka"], "body": ["rocket"]})
    with pytest.raises(MessageIllegalError, match="columns body and value: both are for body"):
        MessageColumns.from_arrow(pa.record_batch({"value": ["kafka"], "body": ["rocket"]}), topic="t")


def test_the_columns_of_kafkas_sink() -> None:
    """With rowFormat=kafka, RocketMQ's names have no meaning, so none of them can take Kafka's place."""
    kafka = [
        ("key", "binary"),
        ("value", "binary"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
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
    assert not {*mapping.names} & ASSIGNED["rocketmq"].keys()


OF_SOURCE = {
    row_format: {column.name: column.spark_type.simpleString() for column in found}
    for row_format, found in (("rocketmq", COLUMNS), ("kafka", KAFKA_COLUMNS))
}


def test_the_columns_that_the_store_assigns_are_those_of_the_source_that_the_sink_does_not_take() -> None:
    for row_format, kinds in ASSIGNED.items():
        taken = {name: kind for name, kind in OF_SOURCE[row_format].items() if name.lower() not in ACCEPTED}
        assert kinds == taken


NAMES = sorted({*OF_SOURCE["rocketmq"], *OF_SOURCE["kafka"]})


@pytest.mark.parametrize("row_format", ["rocketmq", "kafka"])
@pytest.mark.parametrize("spelled", [str, str.lower, str.upper])
@pytest.mark.parametrize("name", NAMES)
def test_no_column_of_the_user_is_dropped_silently(name: str, spelled: Callable[[str], str], row_format: str) -> None:
    """Each name of a column of the source, in each spelling and mode, in a frame that was not read from a store: the
    column is in the message, or an error names it."""
    own = spelled(name)
    body = "value" if row_format == "kafka" else "body"
    kinds = {kind for of in OF_SOURCE.values() for each, kind in of.items() if each == name} | {"string"}
    accepted = ACCEPTED.keys() if row_format == "rocketmq" else {"key", "value", "headers", "topic", "partition"}
    for kind in sorted(kinds):
        for others in ([], [("key", "binary")]):
            frame = [*others, (own, kind), (body, "string")]
            for unknown in ("error", "properties"):
                try:
                    mapping = prepare(frame, "t", unknown, row_format)
                except ConfigError as error:
                    assert f"column {own}: " in str(error) or "both are for" in str(error)
                else:
                    assert len(mapping.indices) + len(mapping.extra_indices) == len(frame)
                    assert name.lower() in accepted or own in mapping.extra_names


@pytest.mark.parametrize("row_format", ["rocketmq", "kafka"])
def test_a_column_that_the_store_assigns_is_left_out_only_of_a_frame_that_was_read(row_format: str) -> None:
    whole = list(OF_SOURCE[row_format].items())
    mapping = prepare(whole, "t")
    assert len(mapping.indices) == len(whole) - len(ASSIGNED[row_format])
    other = next(each for each in ("rocketmq", "kafka") if each != row_format)
    words = "no such column.* left out only of a frame that was read, which has "
    for name, kind in ASSIGNED[other].items():  # a column of the user's beside them
        with pytest.raises(ConfigError, match=f"column {name}: {words}"):
            prepare([*whole, (name, kind)], "t")
    for name in ASSIGNED[row_format]:
        changed = [(each, "double" if each == name else kind) for each, kind in whole]
        with pytest.raises(ConfigError, match=words):
            prepare(changed, "t")
        twice = prepare([*whole, (name.upper(), "string")], "t", "properties")  # caseSensitive=true
        assert twice.extra_names == (name.upper(),)


def test_two_columns_that_differ_in_case_are_refused() -> None:
    """With spark.sql.caseSensitive=true a frame may have both."""
    for name, (_, kinds, _) in ACCEPTED.items():
        with pytest.raises(ConfigError, match=f"columns {name} and {name.upper()}: both are for"):
            prepare([(name, kinds[0]), (name.upper(), kinds[0]), ("body", "string")], "t", "properties")


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found type timestamp_ntz; allowed is .*Cast it to timestamp"):
        prepare([("body", "string"), ("bornTimestamp", "timestamp_ntz")], "t")


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", None])
def test_a_time_is_the_millisecond_in_which_it_lies(unit: str, zone: str | None) -> None:
    """Before 1970, too: a time there used to be rounded to the next millisecond."""
    per_ms = {"ms": 1, "us": 1000, "ns": 1_000_000}[unit]
    times = [
        0,
        1,
        -1,
        per_ms,
        -per_ms,
        -per_ms - 1,
        1_700_000_000_123 * per_ms + per_ms - 1,
        None,
        -1 - 86_400_000 * per_ms,
    ]
    rows = pa.record_batch({"body": ["x"] * len(times), "bornTimestamp": pa.array(times, pa.timestamp(unit, zone))})
    for start in (0, 3):
        given = MessageColumns.from_arrow(rows.slice(start), topic="t").given["born_timestamp"]
        assert given.to_pylist() == [None if time is None else time // per_ms for time in times[start:]]


def test_a_time_that_no_timestamp_can_hold_is_refused_and_one_in_the_store_is_the_last_one() -> None:
    """10^16 ms, which are usually meant as microseconds, used to be read as a time before 1970."""
    times = pa.array([MOST_MS, None, MOST_MS + 1, -MOST_MS, 10**16], pa.int64())
    rows = pa.record_batch({"body": ["x"] * 5, "bornTimestamp": times})
    mapper = Mapper(prepare([("body", "string"), ("bornTimestamp", "bigint")], "t"), "t", "auto", lambda _: 8, "")
    assert sorted(mapper.faults(rows, 0, StoreConfig())) == [2, 4]
    with pytest.raises(MessageIllegalError, match=r"row 102: bornTimestamp: found \d+; allowed .* in microseconds\?"):
        mapper.messages(rows, 100)
    mapper.messages(rows.slice(0, 2), 0)
    stored = pa.record_batch({"born_timestamp_ms": pa.array([10**16, -(10**16), 5, None], pa.int64())})
    for part in (stored, stored.slice(0, 3)):
        found = Projection.of(StructType().add("bornTimestamp", "timestamp")).converted(part)
        us = found.column(0).cast(pa.int64()).to_pylist()
        assert us == [MOST_MS * 1000, -MOST_MS * 1000, 5000, None][: part.num_rows]


def test_a_compressed_body_that_was_read_as_it_is_stored_is_refused() -> None:
    """Its bytes were written, and the flag that says what they are was not, so nobody could read them."""
    kinds = {**OF_SOURCE["rocketmq"]}
    names = ["body", "queueOffset", "storeTimestamp", "msgId", "sysFlag"]
    rows = pa.record_batch(
        {
            "body": pa.array([b"plain", b"compressed", b"tags"]),
            "queueOffset": pa.array([0, 1, 2], pa.int64()),
            "storeTimestamp": pa.array([0, 1, 2], pa.timestamp("us", "UTC")),
            "msgId": ["a", "b", "c"],
            "sysFlag": pa.array([0, 1 | 2 << 8, 2], pa.int32()),
        }
    )
    mapper = Mapper(prepare([(name, kinds[name]) for name in names], "t"), "t", "auto", lambda _: 8, "")
    assert list(mapper.faults(rows, 0, StoreConfig())) == [1]
    with pytest.raises(MessageIllegalError, match=r"row 1: body: is compressed \(sysFlag 513\).*decompress=true"):
        mapper.messages(rows, 0)
    assert mapper.messages(rows.take(pa.array([0, 2])), 0).columns.row_count == 2
    read = MessageStoreDataSource({"path": "/s", "subscribe": "t", "decompress": "false"})
    assert "sysFlag" in read.schema().names
    with pytest.raises(ConfigError, match="option decompress: found false with rowFormat=kafka"):
        MessageStoreDataSource({"path": "/s", "subscribe": "t", "decompress": "false", "rowFormat": "kafka"}).schema()


_STRING, _BYTES = {False: pa.string(), True: pa.large_string()}, {False: pa.binary(), True: pa.large_binary()}


def nestings(kind: str, large: bool) -> tuple[pa.DataType, list[Any]]:
    """An accepted type as Arrow has it, and values with null, and with nothing, at each level of it."""
    text, data = _STRING[large], _BYTES[large]
    if kind.startswith("array<struct"):
        value = b"v" if kind.endswith("binary>>") else "v"
        items = [None, *({"key": k, "value": v} for k in ("k", "", None) for v in (value, value[:0], None))]
        pairs = [[one, {"key": "last", "value": value}] for one in items]
        struct = pa.struct([("key", text), ("value", data if kind.endswith("binary>>") else text)])
        return pa.list_(struct), [None, [], *([one] for one in items), *pairs]
    if kind.startswith("map"):
        return pa.map_(text, text), [
            None,
            [],
            [("k", "v")],
            [("k", None)],
            [("k", "")],
            [("", "v")],
            [("k", "v"), ("l", None)],
        ]
    if kind.startswith("array"):
        value = b"a" if "binary" in kind else "a"
        return pa.list_(data if "binary" in kind else text), [None, [], [None], [value], [value, None], [value[:0]]]
    if kind in ("string", "binary"):
        value = b"a" if kind == "binary" else "a"
        return data if kind == "binary" else text, [None, value, value[:0]]
    types = {"tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64()}
    return types.get(kind, pa.timestamp("us", "UTC")), [None, 1, 0]


NESTED = [(name, kind, large) for name, (_, kinds, _) in ACCEPTED.items() for kind in kinds for large in (False, True)]


@pytest.mark.parametrize(("name", "kind", "large"), NESTED)
def test_null_at_each_level_of_each_type(name: str, kind: str, large: bool) -> None:
    """A row is stored or refused by itself, alone, beside others and in a slice; Arrow aborted on a header without a
    name, and on large types (spark.sql.execution.arrow.useLargeVarTypes)."""
    arrow, values = nestings(kind, large)
    taken = ACCEPTED[name][0]
    frame = [(name, kind), *([] if taken == "body" else [("body", "string")]), ("gate", "string")]
    host = bytes(8)
    for unknown in ("ignore", "properties"):
        mapper = Mapper(
            prepare(frame, None if taken == "topic" else "t", unknown),
            None if taken == "topic" else "t",
            "auto",
            lambda _: 8,
            "",
        )

        def batch(of: list[Any]) -> pa.RecordBatch:
            every = [values[-1], *of]
            columns = {name: pa.array(every, arrow)}
            if taken != "body":
                columns["body"] = pa.array(["x"] * len(every), _STRING[large])
            columns["gate"] = pa.array([None, *["C3"] * len(of)], _STRING[large])
            return pa.RecordBatch.from_pydict(columns).slice(1)

        together = mapper.faults(batch(values), 0, StoreConfig())
        for row, value in enumerate(values):
            alone = mapper.faults(batch([value]), 0, StoreConfig())
            assert (0 in alone) == (row in together), value
            if 0 not in alone:
                encode(mapper.messages(batch([value]), 0), limits=StoreConfig(), store_host=host, born_host=host)
                continue
            with pytest.raises(MessageIllegalError) as caught:
                encode(mapper.messages(batch([value]), 0), limits=StoreConfig(), store_host=host, born_host=host)
            assert caught.value.row == 0 and alone[0].reason
            if kind.startswith("array<struct") and any(each is None or each["key"] is None for each in value):
                assert "found a header without a name (null)" in alone[0].reason

        encoding = functools.partial(encode, limits=StoreConfig(), store_host=host, born_host=host)
        letters = DeadLetters(mapper, "dead", StoreConfig(), encoding, version=0)
        assert sum(rows.row_count for rows in letters.encoded(batch(values), 0)) == len(values)
        assert letters.count == len(together)


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


@pytest.mark.parametrize("name", ["queueId", "flag", "delayTimeLevel"])
@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, (1 << 63) - 1])
def test_a_number_of_more_than_32_bits_names_its_column_and_row(name: str, value: int) -> None:
    """Arrow's own error came instead, which named no row. A dead letter takes the row, and only this one."""
    mapping = prepare([("body", "string"), (name, "bigint")], "t")
    batch = pa.record_batch({"body": ["a", "b", "c"], name: pa.array([0, None, value], pa.int64())})
    mapper = Mapper(mapping, "t", "auto", lambda _: 8, "")
    with pytest.raises(MessageIllegalError, match=rf"row 102: {name}: found {value}; allowed is an int of 32 bits"):
        mapper.messages(batch, 100)
    faults = mapper.faults(batch, 100, StoreConfig())
    assert {row: (error.row, error.field) for row, error in faults.items()} == {2: (102, name)}
    assert mapper.messages(batch.slice(0, 2), 100).columns.row_count == 2
