"""Each option and each column of the sink, through the data source as Spark calls it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from messagestore import (
    BatchConflictError,
    ConfigError,
    LostBatchesError,
    MessageExt,
    MessageIllegalError,
    MessageStore,
    QueryConflictError,
    StoreConfig,
    StoreLockedError,
    VersionRegressionError,
)
from messagestore.format.javahash import java_hash
from messagestore.spi import local
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.sink.columns import ACCEPTED
from pyspark_messagestore.sink.writers import BatchWriter, StreamWriter
from sink_tasks import settings, staged

TEXT_MAP = pa.map_(pa.string(), pa.string())


def headers(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct([("key", pa.string()), ("value", kind)]))


KINDS = {
    "string": pa.string(),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.string()),
    "array<binary>": pa.list_(pa.binary()),
    "map<string,string>": TEXT_MAP,
    "array<struct<key:string,value:binary>>": headers(pa.binary()),
    "array<struct<key:string,value:string>>": headers(pa.string()),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
"""Spark's types, and what they are in Arrow."""


def frame(**columns: Any) -> pa.RecordBatch:
    """The rows of a DataFrame; a list of text is a column of strings."""
    return pa.record_batch(columns)


def source(root: str, **options: str) -> MessageStoreDataSource:
    given = {"path": root, "storeConfig": str(settings(root)), **options}
    return MessageStoreDataSource(CaseInsensitiveDict(given))


def schema(rows: pa.RecordBatch) -> StructType:
    """As Spark has it."""
    return from_arrow_schema(rows.schema, prefer_timestamp_ntz=True)


def streaming(root: str, rows: pa.RecordBatch, **options: str) -> StreamWriter:
    """The writer of a stream."""
    found = source(root, **options).streamWriter(schema(rows), False)
    assert isinstance(found, StreamWriter)
    return found


def written(root: str, context: Any, rows: pa.RecordBatch, batch_id: int = 0, **options: str) -> None:
    """One micro-batch of a stream to topic t, unless the options say otherwise."""
    given = {"topic": "t", **options}
    writer = streaming(root, rows, **{name: value for name, value in given.items() if value})
    writer.commit(staged(writer.sink, context, batch_id, rows), batch_id)


def batch_written(root: str, context: Any, rows: pa.RecordBatch, **options: str) -> None:
    """A batch write to topic t."""
    context.properties, context.partition = {}, 0
    writer = source(root, **{"topic": "t", **options}).writer(schema(rows), False)
    assert isinstance(writer, BatchWriter)
    writer.commit([writer.write(iter([rows]))])


def messages(root: str, topic: str = "t", config: StoreConfig | None = None) -> list[MessageExt]:
    """The messages of a topic in the order in which they were stored."""
    with MessageStore.open_read_only(root, config) as store:
        queues = store.topics().get(topic, [])
        found = [m for queue in queues for m in store.get_message(topic, queue, 0, max_count=1000).messages]
    return sorted(found, key=lambda message: message.physical_offset)


def bodies(root: str, topic: str = "t") -> list[str]:
    return sorted(message.body.decode() for message in messages(root, topic))


# ---- topics and queues


def test_the_option_topic_counts_more_than_the_column(root: str, context: Any) -> None:
    rows = frame(body=["x"], topic=["of-the-column"])
    written(root, context, rows, topic="of-the-option")
    assert (bodies(root, "of-the-option"), bodies(root, "of-the-column")) == (["x"], [])
    written(root, context, rows, 1, topic="", onNewTopic="continue")
    assert bodies(root, "of-the-column") == ["x"]


@pytest.mark.parametrize(("options", "count"), [({}, 8), ({"writeQueueNums": "8"}, 8), ({"writeQueueNums": "3"}, 3)])
def test_a_topic_is_created_with_so_many_queues(root: str, context: Any, options: dict[str, str], count: int) -> None:
    written(root, context, frame(body=[str(i) for i in range(20)]), autoCreateTopic="true", **options)
    assert {message.queue_id for message in messages(root)} == set(range(count))
    with pytest.raises(MessageIllegalError, match="autoCreateTopic"):
        written(root, context, frame(body=["x"]), topic="u", txnAppId="other", autoCreateTopic="false")


HASHED = java_hash("k") % 8


@pytest.mark.parametrize(
    ("options", "queues"),
    [
        ({}, [5, 5, 5, 5]),
        ({"queueSelector": "auto"}, [5, 5, 5, 5]),
        ({"queueSelector": "keys"}, [HASHED] * 4),
        ({"queueSelector": "roundRobin"}, None),
    ],
)
def test_which_queues_the_rows_get(root: str, context: Any, options: dict[str, str], queues: list[int] | None) -> None:
    rows = frame(body=["x"] * 4, queueId=pa.array([5] * 4, pa.int32()), keys=["k"] * 4, shardingKey=["s"] * 4)
    written(root, context, rows, **options)
    found = [message.queue_id for message in messages(root)]
    first = found[0]
    assert found == (queues or [(first + i) % 8 for i in range(4)])


# ---- what is promised of a batch


@pytest.mark.parametrize(
    ("options", "count"), [({}, 1), ({"flushDiskType": "SYNC_FLUSH"}, 1), ({"flushDiskType": "ASYNC_FLUSH"}, 0)]
)
def test_what_is_on_the_disk_when_a_commit_returns(
    root: str, context: Any, options: dict[str, str], count: int, tmp_path: Path
) -> None:
    lazy = tmp_path / "lazy.properties"
    never = "flushIntervalCommitLog=3600000\nflushCommitLogThoroughInterval=3600000\n"
    lazy.write_text(f"{settings(root).read_text()}{never}")
    written(root, context, frame(body=["x"]), storeConfig=str(lazy), **options)
    assert len(messages(root)) == 1
    assert len(messages(root, config=StoreConfig(read_up_to="flushed"))) == count


def test_the_app_and_the_version_of_a_batch(root: str, context: Any) -> None:
    """A stream without `txnAppId` has its query's id; a batch write has the app and the version that it is given."""
    written(root, context, frame(body=["a"]))
    written(root, context, frame(body=["b"]), txnAppId="mine")
    batch_written(root, context, frame(body=["c"]), txnAppId="other", txnVersion="7")
    batch_written(root, context, frame(body=["c"]), txnAppId="other", txnVersion="7")
    batch_written(root, context, frame(body=["c"]), txnAppId="other", txnVersion="9", txnVersionSource="user")
    assert bodies(root) == ["a", "b", "c", "c"]
    rows = frame(body=["d"])
    with pytest.raises(LostBatchesError, match="version 12"):
        batch_written(root, context, rows, txnAppId="other", txnVersion="12", txnVersionSource="spark")
    local.attached_store(root).detach()
    with MessageStore.open(root) as store:
        found = {app: store.last_batch(app) for app in ("q1", "mine", "other")}
    assert {app: last and last.version for app, last in found.items()} == {"q1": 0, "mine": 0, "other": 9}


ON = {
    "onReplayMismatch": ("skip", [0, 0], BatchConflictError),
    "onVersionRegression": ("skip", [5, 3], VersionRegressionError),
    "onLostBatches": ("continue", [0, 3], LostBatchesError),
    "onNewQuery": ("continue", [0, 0], QueryConflictError),
    "onNewTopic": ("continue", [0, 1], QueryConflictError),
}


@pytest.mark.parametrize("name", list(ON))
def test_what_happens_to_a_batch_that_does_not_follow(root: str, context: Any, name: str) -> None:
    """By default it is an error that names both batches; otherwise the rows are dropped, or written."""
    other, versions, error = ON[name]
    written(root, context, frame(body=["first"]), 0, txnAppId="app")
    if versions[0]:
        local.attached_store(root).detach()
        with MessageStore.open(root) as store:
            store.start_batches("app", versions[0])
    before = bodies(root)
    target = "" if name == "onNewTopic" else "t"  # empty: the rows name their topics
    rows = frame(body=["late"], topic=["t"])
    if name == "onNewQuery":
        context.properties["sql.streaming.queryId"] = "q2"
    for given in ({}, {name: "fail"}):
        with pytest.raises(error):
            written(root, context, rows, versions[1], txnAppId="app", topic=target, **given)
    written(root, context, rows, versions[1], txnAppId="app", topic=target, **{name: other})
    assert bodies(root) == (before if other == "skip" else sorted([*before, "late"]))


# ---- limits and waiting


def test_the_largest_body(root: str, context: Any, tmp_path: Path) -> None:
    large = tmp_path / "large.properties"
    large.write_text("mappedFileSizeCommitLog=16777216\nmaxHashSlotNum=100\nmaxIndexNum=400\n")
    for number, (options, most) in enumerate((({}, 4_194_304), ({"maxMessageSize": "1000"}, 1000))):
        given = {**options, "storeConfig": str(large)}
        written(root, context, frame(body=["x" * most]), number, **given)
        with pytest.raises(MessageIllegalError, match=rf"{most + 1}.*{most}"):
            written(root, context, frame(body=["x" * (most + 1)]), number + 1, **given)


def test_a_commit_waits_for_another_writer_as_long_as_it_says(root: str, context: Any) -> None:
    rows = frame(body=["x"])
    assert streaming(root, rows, topic="t").sink.config.lock_timeout_s == 30
    written(root, context, rows)
    local.attached_store(root).detach()
    holder = (
        "import sys\nfrom messagestore import MessageStore\n"
        "with MessageStore.open(sys.argv[1]):\n    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        begun_s = time.monotonic()
        with pytest.raises(StoreLockedError, match=f"pid {process.pid}"):
            written(root, context, rows, 1, lockTimeout="300ms")
        assert 0.3 <= time.monotonic() - begun_s < 20


@pytest.mark.parametrize(("options", "hours"), [({}, 24), ({"stagingTtl": "2h"}, 2)])
def test_staging_files_are_deleted_at_an_age(root: str, context: Any, options: dict[str, str], hours: int) -> None:
    """Nobody knows whether the tasks of the other write are alive."""
    rows = frame(body=["x"])
    files = [staged(streaming(root, rows, topic="t").sink, context, 0, rows)[0].file for _ in range(2)]
    left = [os.path.join(root, "spark", "staging", file.name) for file in files]
    for path, age_s in zip(left, (hours * 3600 - 60, hours * 3600 + 60), strict=True):
        os.utime(path, (time.time() - age_s,) * 2)
    local._last_sweep_s.clear()
    written(root, context, rows, **options)
    assert [os.path.exists(path) for path in left] == [True, False]


# ---- files


def test_the_settings_of_a_store_that_is_created(root: str, context: Any, tmp_path: Path) -> None:
    written(root, context, frame(body=["x"]))
    assert [path.stat().st_size for path in (Path(root) / "commitlog").iterdir()] == [65_536]
    plain = str(tmp_path / "plain")
    data = MessageStoreDataSource({"path": plain, "topic": "t"}).streamWriter(schema(frame(body=["x"])), False)
    assert isinstance(data, StreamWriter)
    data.commit(staged(data.sink, context, 0, frame(body=["x"])), 0)
    assert [path.stat().st_size for path in (Path(plain) / "commitlog").iterdir()] == [1 << 30]
    local.attached_store(plain).detach()


@pytest.mark.parametrize(
    ("options", "allocated"), [({}, False), ({"preallocate": "false"}, False), ({"preallocate": "true"}, True)]
)
def test_whether_a_segment_gets_its_blocks_at_once(
    root: str, context: Any, options: dict[str, str], allocated: bool
) -> None:
    written(root, context, frame(body=["x"]), **options)
    segment = min((Path(root) / "commitlog").iterdir()).stat()
    assert (segment.st_blocks * 512 >= segment.st_size == 65_536) is allocated


def test_a_staging_folder(root: str, context: Any, tmp_path: Path) -> None:
    rows = frame(body=["x"])
    for options, folder in (({}, f"{root}/spark/staging"), ({"stagingDir": str(tmp_path)}, str(tmp_path))):
        sink = streaming(root, rows, topic="t", **options).sink
        assert staged(sink, context, 0, rows)[0].file.name in os.listdir(folder)


def test_the_host_in_the_records(root: str, context: Any) -> None:
    written(root, context, frame(body=["x"]), storeHost="10.0.0.7:10912")
    (message,) = messages(root)
    assert message.store_host == "10.0.0.7:10912"
    assert message.offset_message_id.startswith("0A000007" + "00002AA0")


def test_the_names_of_broker_and_cluster(root: str, context: Any) -> None:
    """The store keeps the broker's name, and the messages have the cluster's."""
    written(root, context, frame(body=["x"]))
    written(root, context, frame(body=["y"]), 1, brokerName="broker-a", brokerClusterName="cluster-b")
    assert [message.system_properties.get("CLUSTER") for message in messages(root)] == [None, "cluster-b"]
    with MessageStore.open_read_only(root) as store:
        assert store.broker_name == "broker-a"


@pytest.mark.parametrize(
    ("options", "stamped"), [({}, False), ({"uniqKey": "false"}, False), ({"uniqKey": "true"}, True)]
)
def test_unique_keys(root: str, context: Any, options: dict[str, str], stamped: bool) -> None:
    written(root, context, frame(body=["x"]), **options)
    (message,) = messages(root)
    assert (message.unique_key is not None) is stamped


# ---- rows


def test_rows_that_the_store_cannot_hold(root: str, context: Any) -> None:
    rows = frame(body=["good", None])
    for options in ({}, {"invalidRows": "fail"}):
        with pytest.raises(MessageIllegalError, match="Nothing of this batch was written"):
            written(root, context, rows, **options)
    for number, topic in enumerate(("dead", "lost")):
        written(root, context, rows, number, invalidRows="deadLetter", deadLetterTopic=topic)
        (letter,) = messages(root, topic)
        assert letter.properties["dlqField"] == "body"
    assert bodies(root) == ["good", "good"]


def test_columns_that_the_sink_does_not_know(root: str, context: Any) -> None:
    rows = frame(body=["x"], gate=["C3"])
    for options in ({}, {"unknownColumns": "error"}):
        with pytest.raises(ConfigError, match="column gate: no such column"):
            written(root, context, rows, **options)
    written(root, context, rows, 0, unknownColumns="ignore")
    written(root, context, rows, 1, unknownColumns="properties")
    assert [message.properties for message in messages(root)] == [{}, {"gate": "C3"}]


@pytest.mark.parametrize("more", [{}, {"includeHeaders": "false"}, {"includeHeaders": "true"}])
def test_row_formats(root: str, context: Any, more: dict[str, str]) -> None:
    """Without `rowFormat=kafka`, RocketMQ's names are known, too, but not both for one field."""
    sent = pa.array([[{"key": "h", "value": b"1"}]], headers(pa.binary()))
    both = frame(value=["of kafka"], body=["of rocketmq"], headers=sent)
    ours = frame(body=["of rocketmq"], headers=sent)
    written(root, context, ours, 0)
    written(root, context, ours, 1, rowFormat="rocketmq")
    with pytest.raises(ConfigError, match="columns value and body: both are for body"):
        written(root, context, both, 2)
    with pytest.raises(ConfigError, match="column body: no such column; allowed are key, value, headers"):
        written(root, context, both, 2, rowFormat="kafka", **more)
    written(root, context, frame(value=["of kafka"], headers=sent), 2, rowFormat="kafka", **more)
    assert [message.body for message in messages(root)] == [b"of rocketmq"] * 2 + [b"of kafka"]
    assert all(message.properties == {"h": "1"} for message in messages(root))


def test_only_append(root: str) -> None:
    rows = schema(frame(body=["x"]))
    with pytest.raises(ConfigError, match="mode overwrite: a message log only grows"):
        source(root, topic="t").writer(rows, True)
    with pytest.raises(ConfigError, match="outputMode complete: a message log only grows"):
        source(root, topic="t").streamWriter(rows, True)


# ---- columns

TIME_MS = 1_600_000_000_123
TIME = datetime.fromtimestamp(TIME_MS / 1000, UTC)


def body(message: MessageExt) -> object:
    return message.body


COLUMNS: dict[str, tuple[dict[str, Any], Callable[[MessageExt], object], Any]] = {
    "body": ({"string": "text", "binary": b"text"}, body, b"text"),
    "value": ({"string": "text", "binary": b"text"}, body, b"text"),
    "topic": ({"string": "t"}, lambda m: m.topic, "t"),
    "tags": ({"string": "UA", "binary": b"UA"}, lambda m: m.tags, "UA"),
    "keys": (
        {"array<string>": ["k"], "array<binary>": [b"k"], "string": "k", "binary": b"k"},
        lambda m: m.keys,
        ("k",),
    ),
    "key": (
        {"array<string>": ["k"], "array<binary>": [b"k"], "string": "k", "binary": b"k"},
        lambda m: m.keys,
        ("k",),
    ),
    "properties": ({"map<string,string>": [("p", "v")]}, lambda m: m.properties, {"p": "v"}),
    "headers": (
        {
            "map<string,string>": [("p", "v")],
            "array<struct<key:string,value:binary>>": [{"key": "p", "value": b"v"}],
            "array<struct<key:string,value:string>>": [{"key": "p", "value": "v"}],
        },
        lambda m: m.properties,
        {"p": "v"},
    ),
    "queueid": (dict.fromkeys(("tinyint", "smallint", "int", "bigint"), 6), lambda m: m.queue_id, 6),
    "partition": (dict.fromkeys(("tinyint", "smallint", "int", "bigint"), 6), lambda m: m.queue_id, 6),
    "shardingkey": ({"string": "s", "binary": b"s"}, lambda m: m.queue_id, java_hash("s") % 8),
    "borntimestamp": (
        {"timestamp": TIME, "bigint": TIME_MS, "int": 1_600_000_000},
        lambda m: m.born_timestamp_ms,
        TIME_MS,
    ),
    "flag": (dict.fromkeys(("tinyint", "smallint", "int", "bigint"), 7), lambda m: m.flag, 7),
    "delaytimelevel": (
        dict.fromkeys(("tinyint", "smallint", "int", "bigint"), 3),
        lambda m: (m.topic, m.system_properties["DELAY"]),
        ("SCHEDULE_TOPIC_XXXX", "3"),
    ),
}
"""For each column: a value of each type that it may have, what it is in the message, and the value there."""


def test_the_columns_and_types_are_those_of_the_sink() -> None:
    assert {name: set(values) for name, (values, _, _) in COLUMNS.items()} == {
        name: set(kinds) for name, (_, kinds, _) in ACCEPTED.items()
    }


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_each_column_of_each_type_is_in_the_message(root: str, context: Any, name: str) -> None:
    """Names are compared without regard to case."""
    values, field, wanted = COLUMNS[name]
    for number, (kind, value) in enumerate(values.items()):
        columns = {name.upper(): pa.array([value], KINDS[kind])}
        columns |= {} if name in ("body", "value") else {"body": pa.array(["x"])}
        written(root, context, frame(**columns), number, **({"topic": ""} if name == "topic" else {}))
        found = messages(root, "SCHEDULE_TOPIC_XXXX" if name == "delaytimelevel" else "t")
        assert len(found) == number + 1
        assert field(found[-1]) == (value if kind == "int" and name == "borntimestamp" else wanted), kind


def test_what_was_read_is_written_back_unchanged(root: str, context: Any) -> None:
    """The columns that the store gives its messages itself are left out."""
    rows = frame(
        body=["x"],
        queueOffset=pa.array([99], pa.int64()),
        storeTimestamp=pa.array([TIME], KINDS["timestamp"]),
        msgId=["m"],
        offsetMsgId=["m"],
        commitLogOffset=pa.array([5], pa.int64()),
        storeSize=pa.array([5], pa.int32()),
        sysFlag=pa.array([8], pa.int32()),
        bodyCrc=pa.array([5], pa.int32()),
        reconsumeTimes=pa.array([5], pa.int32()),
        bornHost=["h"],
        storeHost=["h"],
        preparedTransactionOffset=pa.array([5], pa.int64()),
        systemProperties=pa.array([[("UNIQ_KEY", "m")]], TEXT_MAP),
        brokerName=["b"],
        offset=pa.array([99], pa.int64()),
        timestamp=pa.array([TIME], KINDS["timestamp"]),
        timestampType=pa.array([1], pa.int32()),
    )
    written(root, context, rows)
    (message,) = messages(root)
    assert (message.queue_offset, message.sys_flag, message.reconsume_times, message.unique_key) == (0, 0, 0, None)
    assert message.properties == {}
    assert message.store_timestamp_ms > TIME_MS
    assert re.fullmatch("[0-9A-F]{32}", message.message_id)
