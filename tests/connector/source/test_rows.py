"""Which rows a read gives: tags, damaged records, compressed bodies, Kafka's columns."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from crash.imitate import Broker
from messagestore import ConfigError, CorruptionError, Message, MessageStore, OffsetOutOfRangeError
from messagestore.format import compression
from messagestore.format.compression import plain_body
from messagestore.format.javahash import java_hashes
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.readers import BatchReader
from pyspark_messagestore.source.schema import Projection, core_schema
from stream_steps import ALL, SMALL, add, batch, begun, finished, retain, rows, step, stream, tables

READ = {"path": "/s", "subscribe": "t"}


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "store")
    add(path, 40, tags=[("UA", "AA", "BB", "Aa", None)[i % 5] for i in range(40)])
    return path


def projection(*names: str, row_format: str = "rocketmq") -> Projection:
    known = core_schema(row_format, "headers", "_error", "offsetMsgId")
    return Projection.of(StructType([known[name] for name in names]), row_format)


def values(reader, name: str, partitions=None) -> list:
    found = tables(reader, reader.partitions() if partitions is None else partitions)
    return [value for each in found for value in each[name].to_pylist()]


def damage(root: str, queue_id: int, number: int) -> None:
    """Another byte in a body."""
    with MessageStore.open(root, SMALL) as store:
        message = store.get_message("t", queue_id, number).messages[0]
    place, rest = message.physical_offset, Path(root, "commitlog")
    segment = sorted(rest.iterdir())[place // SMALL.mapped_file_size_commit_log]
    with open(segment, "r+b") as file:
        file.seek(place % SMALL.mapped_file_size_commit_log + 88)
        file.write(b"\xff")


# ---- tags


@pytest.mark.parametrize(
    ("text", "tags"), [("*", None), (" UA ", ("UA",)), ("UA || AA||UA", ("UA", "AA")), ("UA||", ("UA",))]
)
def test_tags_as_rocketmq_writes_them(text: str, tags: tuple[str, ...] | None) -> None:
    assert source_options({**READ, "tags": text}).tags == tags
    assert source_options({**READ, "subExpression": text}).tags == tags


@pytest.mark.parametrize("text", ["", "||", "UA || *"])
def test_texts_that_are_no_tags(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option tags: found .*; allowed is \* for all messages, or tags with"):
        source_options({**READ, "tags": text})


def test_only_messages_with_a_tag(root: str) -> None:
    reader = batch(root, projection("tags"), tags="UA || AA")
    assert sorted(values(reader, "tags")) == ["AA"] * 8 + ["UA"] * 8
    reader = batch(root, tags="UA")  # whether or not the column is asked for
    assert len(rows(reader, reader.partitions())) == 8
    assert values(batch(root, projection("tags"), tags="none"), "tags") == []


def test_tags_with_the_same_hash_are_told_apart(root: str) -> None:
    """The queue has only the hash; the record has the tag."""
    assert len(set(java_hashes(pa.array(["Aa", "BB"])).tolist())) == 1
    for tag in ("Aa", "BB"):
        assert values(batch(root, projection("tags"), tags=tag), "tags") == [tag] * 8


def test_what_other_tags_have_is_not_read(root: str) -> None:
    """A damaged record with another tag does not matter, and its bytes are not asked for."""
    add(root, 2000, size=1000, tags=["other"] * 1999 + ["last"])
    for number in range(20, 400):
        if number % 100 == 0:
            damage(root, 0, number)
    assert values(batch(root, projection("tags"), tags="last"), "tags") == ["last"]
    with pytest.raises(CorruptionError):
        values(batch(root, projection("tags"), tags="other"), "tags")


def test_a_stream_of_a_tag_goes_past_the_others(root: str) -> None:
    """The offsets move on over messages with other tags; limits count them; a restart reads the same."""
    reader = stream(root, startingOffsets="earliest", tags="UA", maxOffsetsPerTrigger="7")
    found, end = finished(reader, begun(reader))
    assert sum(map(len, found)) == 8
    assert sum(end["queues"]["t"].values()) == 40
    assert step(reader, end) == ([], end)


def test_a_delayed_message_is_found_by_its_tag(root: str) -> None:
    """Its unit has the time of its delivery in place of a hash."""
    from messagestore.format.rows import SCHEDULE_TOPIC

    broker = Broker(Path(root), SMALL)
    broker.put(SCHEDULE_TOPIC, b"x", 0)
    broker.close()
    reader = batch(root, projection("tags"), subscribe=SCHEDULE_TOPIC)
    (tag,) = values(reader, "tags")
    if tag is not None:
        assert values(batch(root, projection("tags"), subscribe=SCHEDULE_TOPIC, tags=tag), "tags") == [tag]


def test_retention_is_noticed_below_other_tags(tmp_path: Path) -> None:
    """A message with the tag may have been among those that are gone."""
    root = str(tmp_path / "store")
    add(root, 2000, size=100, tags=["UA"] * 20 + ["AA"] * 1960 + ["UA"] * 20)
    start = begun(stream(root, startingOffsets="earliest", tags="UA"))
    retain(root, 2)
    with pytest.raises(OffsetOutOfRangeError):
        step(stream(root, tags="UA"), start, ALL)
    assert len(step(stream(root, tags="UA", failOnDataLoss="false"), start, ALL)[0]) == 35  # queue 0 lost its 5


def test_retention_between_planning_and_reading_a_tag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = str(tmp_path / "store")
    add(root, 2000, size=100, tags=["UA"] * 20 + ["AA"] * 1960 + ["UA"] * 20)
    readers = [batch(root, tags="UA", failOnDataLoss=value) for value in ("true", "false")]
    planned = [reader.partitions() for reader in readers]
    retain(root, 2)
    with pytest.raises(OffsetOutOfRangeError):
        rows(readers[0], planned[0])
    assert len(rows(readers[1], planned[1])) == 35
    assert "retention has deleted" in caplog.text


# ---- keys


@pytest.mark.parametrize("text", ["", "  "])
def test_texts_that_are_no_keys(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option keys: found .*; allowed is keys with blanks between them"):
        source_options({**READ, "keys": text})


def test_keys_are_for_batch_reads(root: str) -> None:
    with pytest.raises(ConfigError, match="option keys: is for batch reads"):
        MessageStoreDataSource({"path": root, "subscribe": "t", "keys": "k"}).streamReader(
            core_schema()
        ).initialOffset()


def test_only_messages_with_a_key(tmp_path: Path) -> None:
    """Wherever they are: as one of several keys, as unique key, within the asked range only."""
    root = str(tmp_path / "store")
    add(root, 40, keys=[[f"k{i % 8}", f"n{i}"] for i in range(40)])
    add(root, 40, keys=[[] for _ in range(40)])
    names = projection("queueId", "queueOffset", "keys")
    reader = batch(root, names, keys="k3 n5")
    found = sorted(rows(reader, reader.partitions()))
    assert found == sorted([(i % 4, i // 4) for i in range(40) if i % 8 == 3 or i == 5])
    reader = batch(root, keys="k3", endingOffsets='{"t": {"*": 5}}', maxRecordsPerPartition="1")
    assert len(reader.partitions()) == 3
    assert rows(reader, reader.partitions()) == [(3, 0), (3, 2), (3, 4)]
    assert batch(root, keys="none").partitions() == []
    assert batch(root, keys="k").partitions() == []


def test_a_key_among_more_messages_than_a_lookup_returns(tmp_path: Path) -> None:
    """RocketMQ's own lookup stops at 64."""
    root = str(tmp_path / "store")
    add(root, 1000, keys=[["same"] if i % 2 else [f"k{i}"] for i in range(1000)])
    reader = batch(root, keys="same")
    assert len(rows(reader, reader.partitions())) == 500


def test_retention_after_a_key_was_looked_up(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    add(root, 2000, size=100, keys=[["same"] if i % 10 == 0 else [] for i in range(2000)])
    readers = [batch(root, keys="same", failOnDataLoss=value) for value in ("true", "false")]
    planned = [reader.partitions() for reader in readers]
    retain(root, 2)
    with pytest.raises(OffsetOutOfRangeError):
        rows(readers[0], planned[0])
    left = rows(readers[1], planned[1])
    assert 0 < len(left) < 200
    fresh = batch(root, keys="same")
    assert rows(fresh, fresh.partitions()) == left


# ---- damaged records


def test_a_damaged_record_is_an_error(root: str) -> None:
    damage(root, 1, 3)
    with pytest.raises(CorruptionError, match="commitlog"):
        values(batch(root), "body")


def test_damaged_records_are_left_out_and_counted(root: str, caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, 3, 4, 9):
        damage(root, 1, number)
    reader = batch(root, badRecords="skip")
    found = rows(reader, reader.partitions())
    assert found == [(queue, n) for queue in range(4) for n in range(10) if queue != 1 or n not in (0, 3, 4, 9)]
    assert "badRecords=skip: the first bad record is message 0 of t/1" in caplog.text
    assert "badRecords=skip: 4 bad records of this partition were left out" in caplog.text


def test_damaged_records_are_kept_with_their_error(root: str) -> None:
    damage(root, 1, 3)
    names = ("topic", "queueId", "queueOffset", "body", "keys", "bornTimestamp", "storeTimestamp", "_error")
    reader = batch(root, projection(*names), badRecords="keep", tags="UA || AA || BB || Aa")
    found = [row for each in tables(reader, reader.partitions()) for row in each.to_pylist()]
    (bad,) = [row for row in found if row["_error"] is not None]
    assert (bad["topic"], bad["queueId"], bad["queueOffset"]) == ("t", 1, 3)
    assert (bad["body"], bad["keys"], bad["bornTimestamp"]) == (None, None, None)
    assert "commitlog" in bad["_error"]
    assert len(found) == 32
    schema = MessageStoreDataSource({"path": root, "subscribe": "t", "badRecords": "keep"}).schema()
    assert schema.names[-1] == "_error"
    assert "_error" not in MessageStoreDataSource({"path": root, "subscribe": "t"}).schema().names


def test_a_restart_reads_the_same_rows_of_a_damaged_log(root: str) -> None:
    """The offsets count the bad ones, too: nothing moves."""
    damage(root, 2, 5)
    reader = stream(root, startingOffsets="earliest", badRecords="skip", maxOffsetsPerTrigger="9")
    found, end = finished(reader, begun(reader))
    assert sum(map(len, found)) == 39
    assert sum(end["queues"]["t"].values()) == 40


def test_crcs_of_bodies_may_be_left_unchecked(root: str) -> None:
    damage(root, 1, 3)
    found = values(batch(root, verifyBodyCrc="false"), "body")
    assert len(found) == 40
    assert sum(body.startswith(b"\xff") for body in found) == 1


# ---- compressed bodies


PLAIN = b"a body that is worth it " * 20


def packed(method: str) -> tuple[bytes, int]:
    """As RocketMQ's clients do, and SYSFLAG."""
    if method in ("zlib", "old zlib"):
        return zlib.compress(PLAIN), 0x301 if method == "zlib" else 0x1
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, method) as stream_:
        stream_.write(PLAIN)
    return sink.getvalue().to_pybytes(), {"lz4": 0x101, "zstd": 0x201}[method]


METHODS = ("zlib", "old zlib", "lz4", "zstd")


@pytest.mark.parametrize("method", METHODS)
def test_each_method_and_what_is_damaged(method: str) -> None:
    body, flag = packed(method)
    assert plain_body(body, flag) == PLAIN
    assert plain_body(body, 0) == body
    for wrong in (body[:-5], body[: len(body) // 2], b"", b"nonsense" + body):
        with pytest.raises(ValueError, match="cannot decompress it"):
            plain_body(wrong, flag)


@pytest.mark.parametrize("method", METHODS)
def test_a_body_that_becomes_too_large(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes may become gigabytes: no more are made than allowed."""
    body, flag = packed(method)
    monkeypatch.setattr(compression, "MAX_PLAIN_SIZE", len(PLAIN) - 1)
    with pytest.raises(ValueError, match=f"more than {len(PLAIN) - 1} bytes without compression"):
        plain_body(body, flag)
    monkeypatch.setattr(compression, "MAX_PLAIN_SIZE", len(PLAIN))
    assert plain_body(body, flag) == PLAIN


def test_an_unknown_method() -> None:
    with pytest.raises(ValueError, match="the method of compression 5 in SYSFLAG is unknown"):
        plain_body(b"x", 0x501)


@pytest.fixture
def compressed(tmp_path: Path) -> str:
    """A broker's store: plain and compressed bodies by turns, and one that is no stream at all."""
    root = str(tmp_path / "store")
    add(root, 1)
    broker = Broker(Path(root), SMALL)
    for number in range(12):
        body, flag = packed(METHODS[number // 2 % 4]) if number % 2 else (b"plain", 0)
        broker.put("t", body, 0, sys_flag=flag)
    broker.put("t", b"nonsense", 0, sys_flag=0x201)
    broker.close()
    return root


def test_compressed_bodies_are_read_as_they_were_sent(compressed: str) -> None:
    reader = batch(compressed, badRecords="skip")
    assert values(reader, "body")[1:] == [PLAIN if number % 2 else b"plain" for number in range(12)]
    stored = values(batch(compressed, decompress="false"), "body")
    assert stored[2:9:2] == [packed(method)[0] for method in METHODS]
    assert len(stored) == 14


def test_a_body_that_cannot_be_decompressed(compressed: str) -> None:
    with pytest.raises(CorruptionError, match=r"a compressed body of message 13 of t/0.*Set decompress=false"):
        values(batch(compressed), "body")
    reader = batch(compressed, projection("queueOffset", "body", "_error"), badRecords="keep")
    found = [row for each in tables(reader, reader.partitions()) for row in each.to_pylist()]
    assert [row["_error"] is None for row in found] == [True] * 13 + [False]
    assert found[-1]["body"] is None
    assert found[-1]["queueOffset"] == 13
    assert values(batch(compressed, projection("queueOffset")), "queueOffset") == list(range(14))


def test_large_bodies_come_in_several_batches(compressed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from messagestore.read import decoding

    monkeypatch.setattr(decoding, "_PLAIN_SIZE", 2 * len(PLAIN))
    reader = batch(compressed, badRecords="skip")
    found = tables(reader, reader.partitions())
    assert [each.num_rows for each in found] == [5, 4, 4]
    assert values(reader, "queueOffset") == list(range(13))


# ---- Kafka's columns


def test_kafkas_columns_and_types(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"one", keys=["k1", "k2"], properties={"a": "b", "c": "ü"}, queue_id=0))
        store.put_message(Message("t", b"two", queue_id=0))
    given = {"path": root, "subscribe": "t", "rowFormat": "kafka", "includeHeaders": "true"}
    schema = MessageStoreDataSource(given).schema()
    assert schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    plain = MessageStoreDataSource({**given, "includeHeaders": "false"}).schema()
    assert plain.names == schema.names[:-1]
    reader = batch(root, Projection.of(schema, "kafka"), rowFormat="kafka", includeHeaders="true")
    (found,) = tables(reader, reader.partitions())
    assert found.schema.equals(to_arrow_schema(schema, timezone="UTC"), check_metadata=True)
    found.validate(full=True)
    one, two = found.to_pylist()
    headers = [{"key": "a", "value": b"b"}, {"key": "c", "value": "ü".encode()}]
    assert (one["key"], one["value"], one["headers"]) == (b"k1", b"one", headers)
    assert (two["key"], two["value"], two["headers"]) == (None, b"two", None)
    assert (two["topic"], two["partition"], two["offset"], two["timestampType"]) == ("t", 0, 1, 1)
    assert abs(two["timestamp"].timestamp() - one["timestamp"].timestamp()) < 60


def test_kafkas_columns_over_many_blocks(tmp_path: Path) -> None:
    """More messages than are decoded at once; some without keys, some with several."""
    root = str(tmp_path / "store")
    count = 40_000
    with MessageStore.open(root, SMALL.replace(mapped_file_size_commit_log=1 << 24)) as store:
        store.append_batch(_many(count))
    names = ("key", "offset", "headers")
    reader = batch(root, projection(*names, row_format="kafka"), rowFormat="kafka", includeHeaders="true")
    found = [row for each in tables(reader, reader.partitions()) for row in each.to_pylist()]
    assert [row["offset"] for row in found] == list(range(count))
    assert [row["key"] for row in found[:4]] == [None, b"k1", b"k2", None]
    for number in (1, 20_000, 39_998):
        assert found[number]["key"] == (b"k%d" % number if number % 3 else None)
        assert found[number]["headers"] == ([{"key": "n", "value": b"%d" % number}] if number % 2 else None)


def _many(count: int):
    from messagestore import MessageColumns

    table = pa.record_batch(
        {
            "body": pa.array([b"x"] * count),
            "queue_id": pa.array(np.zeros(count, np.int32)),
            "keys": pa.array([[f"k{i}", "second"] if i % 3 else [] for i in range(count)], pa.list_(pa.string())),
            "properties": pa.array(
                [[("n", str(i))] if i % 2 else [] for i in range(count)], pa.map_(pa.string(), pa.string())
            ),
        }
    )
    return MessageColumns.from_arrow(table, topic="t")


def test_headers_are_kafkas(root: str) -> None:
    with pytest.raises(ConfigError, match="option includeHeaders: is for rowFormat=kafka"):
        source_options({**READ, "includeHeaders": "true"})
    with pytest.raises(ConfigError, match="column body: no such column; allowed are key, value, topic"):
        Projection.of(StructType().add("body", "binary"), "kafka")


def test_a_damaged_record_in_kafkas_columns(root: str) -> None:
    damage(root, 0, 2)
    names = ("key", "value", "partition", "offset", "timestamp", "timestampType", "headers", "_error")
    reader = batch(root, projection(*names, row_format="kafka"), rowFormat="kafka", badRecords="keep")
    found = [row for each in tables(reader, reader.partitions()) for row in each.to_pylist()]
    (bad,) = [row for row in found if row["_error"] is not None]
    assert (bad["partition"], bad["offset"], bad["value"], bad["headers"], bad["key"]) == (0, 2, None, None, None)


def test_warnings_come_only_with_bad_records(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reader = batch(root, badRecords="skip")
        assert len(rows(reader, reader.partitions())) == 40
    assert caplog.text == ""


def test_the_column_broker_name_is_the_option_or_the_stores_name(tmp_path: Path) -> None:
    """Without both it is null. The column may be read alone."""
    root = str(tmp_path / "store")
    add(root, 8)
    schema = StructType().add("brokerName", "string")
    for kept, name, options in (
        ("", None, {}),
        ("", "broker-a", {"brokerName": "broker-a"}),
        ("broker-b", "broker-b", {}),
        ("broker-b", "broker-a", {"brokerName": "broker-a"}),
    ):
        MessageStore.open(root, SMALL.replace(broker_name=kept)).close()
        given = {"path": root, "subscribe": "t", **options}
        reader = MessageStoreDataSource(given).reader(schema)
        assert isinstance(reader, BatchReader)
        found = [value for each in tables(reader, reader.partitions()) for value in each["brokerName"].to_pylist()]
        assert found == [name] * 8
    with pytest.raises(ConfigError, match="brokerName: found NOT NULL; allowed is nullable"):
        MessageStoreDataSource({"path": root, "subscribe": "t"}).reader(
            StructType([StructField("brokerName", StringType(), nullable=False)])
        )
