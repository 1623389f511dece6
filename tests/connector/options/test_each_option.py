"""Each option of the source, in a batch read and in a stream, through the data source as Spark calls it."""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructField, StructType

from crash.harness import APP, ROOMY
from crash.imitate import Broker, Process, another_boot
from messagestore import ASYNC_FLUSH, ConfigError, CorruptionError, MessageStore, NotRecoveredError
from messagestore.files.consumer_offsets import publish_offsets
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.options.option import STREAMS
from pyspark_messagestore.options.table import OPTIONS
from pyspark_messagestore.source import planning
from pyspark_messagestore.source import readers as source
from pyspark_messagestore.source.readers import BatchReader, StreamReader
from pyspark_messagestore.source.schema import COLUMNS
from stream_steps import SMALL, add, again, tables

BATCH, STREAM = "batch", "stream"
BOTH = pytest.mark.parametrize("kind", [BATCH, STREAM])


def opened(kind: str, root: str, schema: str = "", **options: str) -> BatchReader | StreamReader:
    """The reader of `spark.read` or of `spark.readStream`, for topic t unless the options say otherwise."""
    named = options.keys() & {"subscribe", "topic", "subscribePattern", "assign"}
    given = {"path": root, **({} if named else {"subscribe": "t"}), **options}
    data = MessageStoreDataSource(CaseInsensitiveDict(given))
    columns = data.schema()
    if schema:
        known = {column.name: column.spark_type for column in COLUMNS}
        columns = StructType([StructField(name, known[name]) for name in schema.split()])
    found = data.reader(columns) if kind == BATCH else data.streamReader(columns)
    assert isinstance(found, BatchReader | StreamReader)
    return found


def partitions(reader: BatchReader | StreamReader) -> list[Any]:
    """What the tasks of a batch read, or of a stream's first micro-batch, get."""
    if isinstance(reader, BatchReader):
        return list(reader.partitions())
    start = again(reader.initialOffset())
    end = again(reader.latestOffset(start, reader.getDefaultReadLimit()))
    return [] if end == start else list(reader.partitions(start, end))


def rows(kind: str, root: str, schema: str = "", **options: str) -> list[dict[str, Any]]:
    """The rows of a batch read, or of a stream's first micro-batch."""
    reader = opened(kind, root, schema, **options)
    return [row for each in tables(reader, partitions(reader)) for row in each.to_pylist()]


def numbers(kind: str, root: str, **options: str) -> list[list[int]]:
    """For each queue of topic t, the numbers of the messages that are read."""
    found: list[list[int]] = [[], [], [], []]
    for row in rows(kind, root, "queueId queueOffset", **options):
        found[row["queueId"]].append(row["queueOffset"])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Topic t: six messages in each of four queues, stored at three different times. Topic u: two in one queue."""
    path = str(tmp_path_factory.mktemp("each") / "store")
    for _ in range(3):
        add(path, 8)
        time.sleep(0.02)
    add(path, 2, topic="u", queues=1)
    return path


def times(root: str) -> list[int]:
    """When the messages of queue 0 were stored, in milliseconds."""
    with MessageStore.open_read_only(root, SMALL) as store:
        return [message.store_timestamp_ms for message in store.get_message("t", 0, 0).messages]


EVERY = [[0, 1, 2, 3, 4, 5]] * 4
NOTHING: list[list[int]] = [[]] * 4
LAST_FOUR = [[2, 3, 4, 5]] * 4
FIRST_TWO = [[0, 1]] * 4
EARLIEST = {"startingOffsets": "earliest"}


def by_queue(**positions: object) -> str:
    return json.dumps({"t": {name.removeprefix("q").replace("rest", "*"): value for name, value in positions.items()}})


POSITIONS: dict[str, tuple[Callable[[list[int]], dict[str, str]], list[list[int]]]] = {
    "earliest": (lambda _: EARLIEST, EVERY),
    "offsets": (lambda _: {"startingOffsets": by_queue(q0=4, q1=-2, q2=6, rest=5)}, [[4, 5], EVERY[0], [], [5]]),
    "offsets of the rest": (lambda _: {"startingOffsets": by_queue(q3=6, rest=-2)}, [*EVERY[:3], []]),
    "offsets with a broker's name": (
        lambda _: {"startingOffsets": '{"t": {"broker-a": {"0": 5, "*": 6}}}'},
        [[5], [], [], []],
    ),
    "a time": (lambda ms: {"startingTimestamp": str(ms[2])}, LAST_FOUR),
    "a time as text": (lambda _: {"startingTimestamp": "2020-02-03T04:05:06Z"}, EVERY),
    "a time ago": (lambda _: {"startingTimestamp": "-1h"}, EVERY),
    "this moment": (lambda _: {"startingTimestamp": "-0s"}, NOTHING),
    "times by queue": (
        lambda ms: {"startingOffsetsByTimestamp": by_queue(q0=ms[4], q1="-1h", rest=ms[2])},
        [[4, 5], EVERY[0], *LAST_FOUR[:2]],
    ),
    "a time beats offsets": (
        lambda ms: {
            "startingTimestamp": str(ms[2]),
            "startingOffsetsByTimestamp": by_queue(rest=ms[4]),
            "startingOffsets": "earliest",
        },
        LAST_FOUR,
    ),
    "times by queue beat offsets": (
        lambda ms: {"startingOffsetsByTimestamp": by_queue(rest=ms[2]), "startingOffsets": "earliest"},
        LAST_FOUR,
    ),
    "no message is as young": (lambda ms: {"startingTimestamp": str(ms[5] + 1)}, NOTHING),
    "no message is as young, from the end": (
        lambda ms: {"startingTimestamp": str(ms[5] + 1), "startingOffsetsByTimestampStrategy": "latest"},
        NOTHING,
    ),
    "no message is as young, from the beginning": (
        lambda ms: {"startingTimestamp": str(ms[5] + 1), "startingOffsetsByTimestampStrategy": "earliest"},
        EVERY,
    ),
    "to offsets": (lambda _: {**EARLIEST, "endingOffsets": by_queue(q0=2, q1=0, rest=-1)}, [[0, 1], [], *EVERY[:2]]),
    "to a time": (lambda ms: {**EARLIEST, "endingTimestamp": str(ms[2])}, FIRST_TWO),
    "to a time ago": (lambda _: {**EARLIEST, "endingTimestamp": "-1h"}, NOTHING),
    "to this moment": (lambda _: {**EARLIEST, "endingTimestamp": "-0s"}, EVERY),
    "to times by queue": (
        lambda ms: {**EARLIEST, "endingOffsetsByTimestamp": by_queue(q1=ms[4], q2="-1h", rest=ms[2])},
        [[0, 1], [0, 1, 2, 3], [], [0, 1]],
    ),
    "a time beats ending offsets": (
        lambda ms: {
            **EARLIEST,
            "endingTimestamp": str(ms[2]),
            "endingOffsetsByTimestamp": by_queue(rest=ms[4]),
            "endingOffsets": "latest",
        },
        FIRST_TWO,
    ),
    "times by queue beat ending offsets": (
        lambda ms: {**EARLIEST, "endingOffsetsByTimestamp": by_queue(rest=ms[2]), "endingOffsets": "latest"},
        FIRST_TWO,
    ),
    "two queues": (lambda _: {**EARLIEST, "assign": '{"t": [1, 3]}'}, [[], EVERY[0], [], EVERY[0]]),
    "a pattern": (lambda _: {**EARLIEST, "subscribePattern": "[a-t]"}, EVERY),
    "the alias of subscribe": (lambda _: {**EARLIEST, "topic": "t"}, EVERY),
}


@BOTH
@pytest.mark.parametrize("name", list(POSITIONS))
def test_where_a_read_begins_and_ends(root: str, kind: str, name: str) -> None:
    asked, wanted = POSITIONS[name]
    options = asked(times(root))
    assert numbers(kind, root, **options) == wanted


def test_where_a_read_begins_that_does_not_say_it(root: str) -> None:
    """A batch read begins with the first message, and a stream with the next one, as with Kafka."""
    assert numbers(BATCH, root) == EVERY
    assert numbers(STREAM, root) == NOTHING
    assert numbers(BATCH, root, endingOffsets="latest") == EVERY
    assert numbers(STREAM, root, startingOffsets="latest") == NOTHING
    assert numbers(STREAM, root, startingOffsets=by_queue(q0=-1, rest=-2)) == [[], *EVERY[:3]]


@BOTH
def test_no_message_is_as_young_and_that_is_an_error(root: str, kind: str) -> None:
    late = str(times(root)[5] + 1)
    with pytest.raises(ConfigError, match="option startingTimestamp: queue 0 of t has no message that was stored at"):
        rows(kind, root, startingTimestamp=late, startingOffsetsByTimestampStrategy="error")


def test_the_path_by_its_name_in_rocketmq(root: str) -> None:
    data = MessageStoreDataSource({"storePathRootDir": root, "subscribe": "t"})
    reader = data.reader(data.schema())
    assert isinstance(reader, BatchReader)
    assert sum(each.num_rows for each in tables(reader, partitions(reader))) == 24


@BOTH
def test_a_list_of_topics_and_a_pattern_of_several(root: str, kind: str) -> None:
    for options, topics in (
        ({"subscribe": "t, u"}, {"t": 24, "u": 2}),
        ({"subscribe": "u"}, {"u": 2}),
        ({"subscribePattern": "t|u"}, {"t": 24, "u": 2}),
        ({"subscribePattern": "[^t]"}, {"u": 2}),
    ):
        found = [row["topic"] for row in rows(kind, root, "topic", **EARLIEST, **options)]
        assert {topic: found.count(topic) for topic in found} == topics


def test_a_stream_begins_where_its_group_has_read_to(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    add(root, 24)
    publish_offsets(root, "g", {("t", queue): 4 for queue in range(4)})
    for group in ("consumerGroup", "group"):
        assert numbers(STREAM, root, **{group: "g"}, startingOffsets="committed") == [[4, 5]] * 4
    for group, otherwise, rest in (("h", "earliest", EVERY[0]), ("i", "latest", [])):
        publish_offsets(root, group, {("t", 0): 5})
        found = numbers(STREAM, root, consumerGroup=group, startingOffsets=f"committed:{otherwise}")
        assert found == [[5], rest, rest, rest]


# ---- micro-batches and partitions


@BOTH
def test_partitions_as_small_as_they_are_asked_for(root: str, kind: str) -> None:
    def sizes(**options: str) -> list[int]:
        reader = opened(kind, root, **EARLIEST, **options)
        return [sum(each.num_rows for each in tables(reader, [part])) for part in partitions(reader)]

    assert len(sizes()) < 6
    assert len(sizes(minPartitions="6")) >= 6
    assert max(sizes(maxRecordsPerPartition="3")) == 3
    assert sizes(maxBytesPerPartition="1") == [1] * 24


@BOTH
def test_partitions_have_a_largest_size_that_nobody_has_to_set(
    root: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """262 144 messages and 128 MiB. Here with smaller numbers, which are divided in the same way."""
    assert (planning.PARTITION_ROWS, planning.PARTITION_SIZE) == (262_144, 128 << 20)
    whole = len(partitions(opened(kind, root, **EARLIEST)))
    with monkeypatch.context() as patch:
        patch.setattr(planning, "PARTITION_ROWS", 4)
        assert len(partitions(opened(kind, root, **EARLIEST))) >= 6 > whole
    monkeypatch.setattr(planning, "PARTITION_SIZE", 500)
    assert len(partitions(opened(kind, root, **EARLIEST))) >= 6 > whole


def looked(reader: StreamReader) -> Any:
    """The first offset of a query that has looked for messages once: what is there at the first look does not wait."""
    start = again(reader.initialOffset())
    reader.latestOffset(start, reader.getDefaultReadLimit())
    return start


def test_a_micro_batch_is_limited(root: str) -> None:
    assert len(rows(STREAM, root, **EARLIEST, maxOffsetsPerTrigger="5")) == 5
    few = rows(STREAM, root, "queueOffset", **EARLIEST, maxBytesPerTrigger="600")
    assert 1 < len(few) < 24
    assert len(rows(STREAM, root, **EARLIEST, maxBytesPerTrigger="1")) == 1
    for least, goes_on in (("25", False), ("24", True)):
        reader = opened(STREAM, root, **EARLIEST, minOffsetsPerTrigger=least)
        assert isinstance(reader, StreamReader)
        start = looked(reader)
        assert (reader.latestOffset(start, reader.getDefaultReadLimit()) != start) is goes_on


@pytest.mark.parametrize(("options", "wait_s"), [({}, 900), ({"maxTriggerDelay": "2m"}, 120)])
def test_messages_wait_for_others_as_long_as_it_says(
    root: str, options: dict[str, str], wait_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = opened(STREAM, root, **EARLIEST, minOffsetsPerTrigger="100", **options)
    assert isinstance(reader, StreamReader)
    begun_s = time.monotonic()
    monkeypatch.setattr(source.time, "monotonic", lambda: begun_s)
    start = looked(reader)
    for later_s, goes_on in ((0, False), (wait_s - 1, False), (wait_s + 1, True)):
        monkeypatch.setattr(source.time, "monotonic", lambda later_s=later_s: begun_s + later_s)
        assert (reader.latestOffset(start, reader.getDefaultReadLimit()) != start) is goes_on


@pytest.mark.parametrize("option", [option.name for option in OPTIONS if option.only == STREAMS])
def test_an_option_of_streams_is_refused_in_a_batch_read(root: str, option: str) -> None:
    """Kafka's connector ignores some of them: the user would wait for an effect that never comes."""
    value = {"maxTriggerDelay": "2m", "onMissingTopic": "wait", "consumerGroup": "g"}.get(option, "5")
    with pytest.raises(ConfigError, match=f"option {option}: is for streams, but this is a batch read"):
        opened(BATCH, root, **{option: value})


# ---- records


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """Four messages in queue 0: the second one's body is damaged, and the last one's is compressed."""
    root = str(tmp_path / "store")
    add(root, 3, queues=1, size=100)
    broker = Broker(Path(root), SMALL)
    broker.put("t", zlib.compress(b"plain" * 50), 0, sys_flag=0x301)
    broker.close()
    place = rows(BATCH, root, "commitLogOffset")[1]["commitLogOffset"]
    segment = min((Path(root) / "commitlog").iterdir())
    with open(segment, "r+b") as file:
        file.seek(place + 88 + 20)
        file.write(b"\xff")
    return root


@BOTH
def test_damaged_records(damaged: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, {"badRecords": "fail"}, {"verifyBodyCrc": "true"}):
        with pytest.raises(CorruptionError, match="commitlog"):
            rows(kind, damaged, **EARLIEST, **options)
    skipped = rows(kind, damaged, "queueOffset body", **EARLIEST, badRecords="skip")
    assert [row["queueOffset"] for row in skipped] == [0, 2, 3]
    assert "badRecords=skip: 1 bad records of this partition were left out" in caplog.text
    kept = rows(kind, damaged, **EARLIEST, badRecords="keep")
    assert [(row["body"] is None, row["_error"] is None) for row in kept] == [
        (False, True),
        (True, False),
        *[(False, True)] * 2,
    ]
    assert [row["queueOffset"] for row in kept] == [0, 1, 2, 3]
    unchecked = rows(kind, damaged, "body", **EARLIEST, verifyBodyCrc="false")
    assert unchecked[1]["body"][20:21] == b"\xff"
    assert "_error" not in unchecked[0]


@BOTH
def test_compressed_bodies(damaged: str, kind: str) -> None:
    plain = b"plain" * 50
    for options, wanted in (
        ({}, plain),
        ({"decompress": "true"}, plain),
        ({"decompress": "false"}, zlib.compress(plain)),
    ):
        assert rows(kind, damaged, "body", **EARLIEST, badRecords="skip", **options)[-1]["body"] == wanted


@BOTH
def test_tags(tmp_path: Path, kind: str) -> None:
    root = str(tmp_path / "store")
    add(root, 8, tags=["UA", "AA", "BB", "Aa", None, "UA", "AA", "BB"])
    for name in ("tags", "subExpression"):
        assert sorted(row["tags"] for row in rows(kind, root, "tags", **EARLIEST, **{name: "UA || BB"})) == [
            "BB",
            "BB",
            "UA",
            "UA",
        ]
    for everything in ({}, {"tags": "*"}):
        assert len(rows(kind, root, **EARLIEST, **everything)) == 8


@BOTH
def test_a_reader_that_shall_fail_where_something_is_not_proven(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After a reboot, with an ASYNC_FLUSH batch of which nothing says that it is on the disk."""
    root = tmp_path / "store"
    root.mkdir()
    process = Process(
        root, ROOMY.replace(flush_interval_commit_log=3_600_000, flush_commit_log_thorough_interval=3_600_000)
    )
    process.batch(version=0, rows=6)
    process.batch(version=1, rows=6, flush=ASYNC_FLUSH)
    process.die()
    topic = {"subscribe": f"topic-{APP}", **EARLIEST}
    with another_boot(), caplog.at_level(logging.WARNING):
        for options in ({}, {"failOnUnproven": "false"}):
            assert len(rows(kind, str(root), "queueOffset", **topic, **options)) == 6
        assert "nothing proves yet that they are on the disk" in caplog.text
        with pytest.raises(NotRecoveredError, match=r"more records lie between .*`messagestore recover`"):
            rows(kind, str(root), **topic, failOnUnproven="true")


# ---- columns


def moment(ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


@pytest.fixture
def brokers(tmp_path: Path) -> Broker:
    """Two messages of a broker in queue 1 of topic t that have nothing in common."""
    root = tmp_path / "store"
    add(str(root), 1)
    broker = Broker(root, SMALL)
    broker.put(
        "t",
        b"UA 1545",
        1,
        store_ms=broker.now_ms + 5000,
        sys_flag=0x8,
        flag=7,
        born_host="10.0.0.1:1234",
        store_host="10.0.0.2:10911",
        reconsume_times=3,
        prepared_offset=42,
        properties=[("TAGS", "UA"), ("KEYS", "k1 k2"), ("UNIQ_KEY", "ABC"), ("own", "1"), ("more", "2")],
    )
    broker.put("t", b"AA 1", 1, store_ms=broker.now_ms + 9000)
    broker.close()
    return broker


@BOTH
def test_each_column_has_what_the_record_has(brokers: Broker, kind: str) -> None:
    one, two = rows(kind, str(brokers.root), **EARLIEST, assign='{"t": [1]}')
    late = moment(brokers.now_ms + 5000)
    assert one == {
        "topic": "t",
        "queueId": 1,
        "queueOffset": 0,
        "body": b"UA 1545",
        "tags": "UA",
        "keys": ["k1", "k2"],
        "properties": [("own", "1"), ("more", "2")],
        "bornTimestamp": late,
        "storeTimestamp": late,
        "msgId": "ABC",
    }

    assert (two["queueOffset"], two["body"], two["tags"], two["keys"], two["properties"]) == (1, b"AA 1", None, [], [])
    assert two["storeTimestamp"] == two["bornTimestamp"] == moment(brokers.now_ms + 9000)

    named = "offsetMsgId commitLogOffset storeSize flag sysFlag bodyCrc reconsumeTimes bornHost storeHost"
    names = f"{named} preparedTransactionOffset systemProperties brokerName msgId"
    one, two = rows(kind, str(brokers.root), names, **EARLIEST, assign='{"t": [1]}', brokerName="b")

    place = one["commitLogOffset"]
    assert place > 0
    assert one == {
        "offsetMsgId": f"0A00000200002A9F{place:016X}",
        "commitLogOffset": place,
        "storeSize": two["commitLogOffset"] - place,
        "flag": 7,
        "sysFlag": 0x8,
        "bodyCrc": zlib.crc32(b"UA 1545") & 0x7FFFFFFF,
        "reconsumeTimes": 3,
        "bornHost": "10.0.0.1:1234",
        "storeHost": "10.0.0.2:10911",
        "preparedTransactionOffset": 42,
        "systemProperties": [("TAGS", "UA"), ("KEYS", "k1 k2"), ("UNIQ_KEY", "ABC")],
        "brokerName": "b",
        "msgId": "ABC",
    }

    assert two == {
        "offsetMsgId": f"7F00000100002A9F{two['commitLogOffset']:016X}",
        "commitLogOffset": two["commitLogOffset"],
        "storeSize": 91 + len("t") + len(b"AA 1"),
        "flag": 0,
        "sysFlag": 0,
        "bodyCrc": zlib.crc32(b"AA 1") & 0x7FFFFFFF,
        "reconsumeTimes": 0,
        "bornHost": "127.0.0.1:0",
        "storeHost": "127.0.0.1:10911",
        "preparedTransactionOffset": 0,
        "systemProperties": [],
        "brokerName": "b",
        "msgId": two["offsetMsgId"],
    }


@BOTH
def test_each_of_kafkas_columns_has_what_the_record_has(brokers: Broker, kind: str) -> None:
    kafka = {"rowFormat": "kafka", "includeHeaders": "true", "badRecords": "keep"}
    one, two = rows(kind, str(brokers.root), **EARLIEST, assign='{"t": [1]}', **kafka)
    assert one == {
        "key": b"k1",
        "value": b"UA 1545",
        "topic": "t",
        "partition": 1,
        "offset": 0,
        "timestamp": moment(brokers.now_ms + 5000),
        "timestampType": 1,
        "headers": [{"key": "own", "value": b"1"}, {"key": "more", "value": b"2"}],
        "_error": None,
    }
    assert (two["key"], two["value"], two["offset"], two["headers"]) == (None, b"AA 1", 1, None)
    assert two["timestamp"] == moment(brokers.now_ms + 9000)


@BOTH
def test_the_time_of_a_message_is_not_the_time_of_its_record(tmp_path: Path, kind: str) -> None:
    root = str(tmp_path / "store")
    add(root, 2, born_timestamp_ms=[1_600_000_000_001, 1_600_000_000_002])
    found = rows(kind, root, "bornTimestamp storeTimestamp", **EARLIEST)
    assert [row["bornTimestamp"] for row in found] == [moment(1_600_000_000_001), moment(1_600_000_000_002)]
    assert all(abs(row["storeTimestamp"].timestamp() - time.time()) < 600 for row in found)


@BOTH
def test_row_formats(root: str, kind: str) -> None:
    rocketmq = rows(kind, root, **EARLIEST)
    assert list(rocketmq[0])[:4] == ["topic", "queueId", "queueOffset", "body"]
    assert rows(kind, root, **EARLIEST, rowFormat="rocketmq") == rocketmq
    plain = rows(kind, root, **EARLIEST, rowFormat="kafka")
    assert list(plain[0]) == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert rows(kind, root, **EARLIEST, rowFormat="kafka", includeHeaders="false") == plain
    headers = rows(kind, root, **EARLIEST, rowFormat="kafka", includeHeaders="true")
    assert headers == [{**row, "headers": None} for row in plain]


@BOTH
def test_the_name_of_the_broker(root: str, kind: str) -> None:
    for options, name in (({}, None), ({"brokerName": "broker-a"}, "broker-a")):
        data = MessageStoreDataSource({"path": root, "subscribe": "t", **EARLIEST, **options})
        schema = StructType().add("brokerName", "string")
        reader = data.reader(schema) if kind == BATCH else data.streamReader(schema)
        assert isinstance(reader, BatchReader | StreamReader)
        found = [row["brokerName"] for each in tables(reader, partitions(reader)) for row in each.to_pylist()]
        assert found == [name] * 24
