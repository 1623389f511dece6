"""Mistakes that users make, and the sentence that each of them gives. Those that need Spark are in `spark/cases.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cli_runs import run as command
from messagestore import (
    BatchRequest,
    ConfigError,
    Message,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
    NotAStoreError,
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreConfig,
)
from pyspark_messagestore.options.table import check_names, sink_options, source_options
from pyspark_messagestore.sink.columns import prepare

READ = {"path": "/data/store", "subscribe": "flights"}
WRITE = {"path": "/data/store", "topic": "flights"}


def reading(changed: dict[str, str | None]) -> None:
    given = {name: value for name, value in {**READ, **changed}.items() if value is not None}
    check_names(given)
    source_options(given)


def writing(changed: dict[str, str | None]) -> None:
    given = {name: value for name, value in {**WRITE, **changed}.items() if value is not None}
    check_names(given)
    sink_options(given).config()


OPTIONS: dict[str, tuple[Callable[[Any], None], dict[str, str | None], str]] = {
    "no path": (reading, {"path": None}, 'is missing. Give the store\'s root folder, as in .load("/data/store")'),
    "a path of Databricks": (reading, {"path": "dbfs:/x"}, "found 'dbfs:/x'; allowed is the path of a folder"),
    "a path of S3": (writing, {"path": "s3a://b/x"}, "found 's3a://b/x'; allowed is the path of a folder"),
    "a path with ~": (writing, {"path": "~/x"}, "written out (no ~, and no URI"),
    "no topic to read": (reading, {"subscribe": None}, "Give exactly one of subscribe, subscribePattern and assign"),
    "two ways to name topics": (reading, {"assign": '{"a": [0]}'}, "Give exactly one of subscribe"),
    "a pattern that is none": (
        reading,
        {"subscribe": None, "subscribePattern": "("},
        "found '('; allowed is a regular expression",
    ),
    "assign without lists": (reading, {"subscribe": None, "assign": '{"a": 1}'}, "allowed is JSON topic -> list"),
    "an illegal topic to read": (reading, {"subscribe": "a/b"}, "found 'a/b'; allowed is one or more topics"),
    "only commas": (reading, {"subscribe": " , "}, "found ' , '; allowed is one or more topics"),
    "a topic under two names": (reading, {"topic": "b"}, "found twice, as subscribe and as topic"),
    "a starting position with a slip": (reading, {"startingOffsets": "newest"}, "found 'newest'; allowed is earliest"),
    "an offset below -2": (reading, {"startingOffsets": '{"flights": {"0": -3}}'}, "(-2 earliest, -1 latest)"),
    "a time in words": (reading, {"startingTimestamp": "yesterday"}, "allowed is milliseconds since 1970, ISO 8601"),
    "an end before the beginning": (reading, {"endingOffsets": "earliest"}, "a read cannot end at -2"),
    "committed without a group": (reading, {"startingOffsets": "committed"}, "Give the group whose offsets"),
    "an option of the sink": (reading, {"flushDiskType": "SYNC_FLUSH"}, "is for writing, but this is reading"),
    "an option with a slip": (reading, {"failOnDataLos": "true"}, "Did you mean failOnDataLoss?"),
    "yes for true": (reading, {"failOnDataLoss": "yes"}, "found 'yes'; allowed is true or false"),
    "a limit of nothing": (reading, {"maxOffsetsPerTrigger": "0"}, "allowed is a whole number from 1 to"),
    "a number in short form": (reading, {"maxOffsetsPerTrigger": "1e6"}, "allowed is a whole number from 1 to"),
    "a group with a blank": (reading, {"consumerGroup": "a b"}, "allowed is a consumer group: letters, digits"),
    "an option of Kafka's consumer": (
        reading,
        {"kafkaConsumer.pollTimeoutMs": "1"},
        "option kafkaConsumer.pollTimeoutMs: is for a Kafka broker",
    ),
    "a group of Kafka's": (reading, {"groupIdPrefix": "x"}, "option groupIdPrefix: is for a Kafka broker"),
    "a row format that is none": (writing, {"rowFormat": "avro"}, "found 'avro'; allowed is rocketmq or kafka"),
    "an option of Kafka": (reading, {"kafka.bootstrap.servers": "x"}, "leave out all kafka.* options"),
    "an illegal topic to write": (writing, {"topic": "a/b"}, "allowed is a topic: letters, digits, and %|-_ , at most"),
    "a topic that a broker acts on": (writing, {"topic": "rmq_sys_wheel_timer"}, "Choose another topic"),
    "dead letters into a topic of a broker": (
        writing,
        {"invalidRows": "deadLetter", "deadLetterTopic": "SCHEDULE_TOPIC_XXXX"},
        "option deadLetterTopic: found 'SCHEDULE_TOPIC_XXXX', which is reserved",
    ),
    "a topic of 128 letters": (writing, {"topic": "x" * 128}, "at most 127"),
    "a flush type with a slip": (writing, {"flushDiskType": "sync"}, "allowed is SYNC_FLUSH or ASYNC_FLUSH"),
    "a duration in words": (writing, {"lockTimeout": "soon"}, "a duration such as 500ms, 30s, 2m, 24h"),
    "a size with a unit": (writing, {"maxMessageSize": "4MB"}, "allowed is a whole number from 10 to 1073741824"),
    "a version without an app": (writing, {"txnVersion": "1"}, "found without txnAppId; allowed is both or neither"),
    "a version below 0": (writing, {"txnAppId": "a", "txnVersion": "-1"}, "allowed is a whole number from 0 to"),
    "an app id with a blank": (
        writing,
        {"txnAppId": "a b", "txnVersion": "0"},
        "without blanks and control characters",
    ),
    "dead letters without a topic": (writing, {"invalidRows": "deadLetter"}, "Give the topic of the dead letters"),
    "a host name as address": (writing, {"storeHost": "localhost:10911"}, "allowed is an IP address and a port"),
    "a broker's name with a line break": (
        writing,
        {"brokerName": "broker-a\n"},
        "allowed is 1 to 255 printable characters",
    ),
    "no queues": (writing, {"writeQueueNums": "0"}, "allowed is a whole number from 1 to 65536"),
    "settings that are not there": (writing, {"storeConfig": "/nope"}, "cannot be read (No such file or directory)"),
    "an option of the source": (writing, {"startingOffsets": "earliest"}, "is for reading, but this is writing"),
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(name: str) -> None:
    parse, changed, sentence = OPTIONS[name]
    with pytest.raises(ConfigError) as caught:
        parse(changed)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("option ")


COLUMNS = {
    "no body": ([("tags", "string")], "t", "column body (or value): found none. Give the bodies"),
    "no topic": ([("body", "string")], None, "found neither the option topic nor a column topic. Give one of them"),
    "a number as body": ([("body", "int")], "t", "found type int; allowed is binary or string"),
    "numbers as keys": (
        [("body", "string"), ("keys", "array<int>")],
        "t",
        "allowed is array<string>, string or binary",
    ),
    "text as properties": ([("body", "string"), ("properties", "string")], "t", "allowed is map<string,string>"),
    "a column of another job": (
        [("body", "string"), ("price", "int")],
        "t",
        "set unknownColumns to properties or ignore",
    ),
    "text as queue": ([("body", "string"), ("queueId", "string")], "t", "found type string; allowed is int"),
    "text as time": ([("body", "string"), ("bornTimestamp", "string")], "t", "allowed is timestamp, or bigint of ms"),
}


@pytest.mark.parametrize("name", list(COLUMNS))
def test_columns(name: str) -> None:
    columns, topic, sentence = COLUMNS[name]
    with pytest.raises(ConfigError) as caught:
        prepare(columns, topic)
    assert sentence in str(caught.value)


def put(root: Path, *args: Any, **fields: Any) -> None:
    with MessageStore.open(root) as store:
        store.put_message(Message(*args, **fields))


def read(root: Path, method: str, *args: Any, **named: Any) -> None:
    with MessageStore.open_read_only(root) as store:
        list(getattr(store, method)(*args, **named) or [])


def use_closed(root: Path) -> None:
    store = MessageStore.open(root)
    store.close()
    store.put_message(Message("flights", b""))


def append(root: Path, columns: dict[str, list[str]]) -> None:
    rows = MessageColumns.from_arrow(pa.record_batch(columns), topic="flights")
    with MessageStore.open(root) as store:
        store.append_batch(rows)


LIBRARY: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a store that is not there": (
        lambda root: MessageStore.open_read_only(root / "nope"),
        NotAStoreError,
        "found no message store (no commitlog folder). Give the store's root folder",
    ),
    "a file as store": (lambda _: MessageStore.open(__file__), NotAStoreError, "found a file; allowed is a folder"),
    "a store below a file": (
        lambda _: MessageStore.open(Path(__file__, "store")),
        NotAStoreError,
        f"{__file__} is a file; allowed is a folder",
    ),
    "text as body": (lambda root: put(root, "flights", "text"), MessageIllegalError, "found str; allowed are bytes"),
    "a blank in a key": (
        lambda root: put(root, "flights", b"", keys=["a b"]),
        MessageIllegalError,
        "allowed is text without blanks, which separate keys",
    ),
    "text as keys": (
        lambda root: put(root, "flights", b"", keys="abc"),
        MessageIllegalError,
        "found text 'abc'; allowed is a list of text",
    ),
    "an empty tag": (lambda root: put(root, "flights", b"", tags=""), MessageIllegalError, "Leave it out"),
    "a queue that is not there": (
        lambda root: put(root, "flights", b"", queue_id=99),
        MessageIllegalError,
        "found 99; allowed is 0 to 7",
    ),
    "a property of RocketMQ": (
        lambda root: put(root, "flights", b"", properties={"UNIQ_KEY": "1"}),
        MessageIllegalError,
        "RocketMQ uses this name itself. Choose another name",
    ),
    "a number as property": (
        lambda root: put(root, "flights", b"", properties={"a": 1}),
        MessageIllegalError,
        "found int; allowed is text",
    ),
    "a topic with a blank": (
        lambda root: put(root, "a b", b""),
        MessageIllegalError,
        "found 'a b'; allowed are the characters % | a-z A-Z 0-9 _ -",
    ),
    "a store that was closed": (use_closed, StoreClosedError, "the store is closed. Open it again"),
    "a column with a slip": (
        lambda root: read(root, "get_batch", "flights", 0, 0, columns=["bodyy"]),
        ConfigError,
        "found 'bodyy'; allowed are topic, queue_id",
    ),
    "a negative offset": (
        lambda root: read(root, "read", "flights", 0, -5),
        OffsetOutOfRangeError,
        "flights/0: found start -5; the queue holds",
    ),
    "a boundary that is none": (
        lambda root: read(root, "queue_offset_by_time", "flights", 0, 1, boundary="mid"),
        ConfigError,
        "found 'mid'; allowed is 'lower' or 'upper'",
    ),
    "a message id that is none": (
        lambda root: read(root, "look_message_by_id", "xyz"),
        MessageIllegalError,
        "allowed are 32 (IPv4) or 56 (IPv6) hex characters",
    ),
    "a setting with a slip": (
        lambda _: StoreConfig.from_mapping({"flushDisk": "x"}),
        ConfigError,
        "Did you mean flushDiskType?",
    ),
    "a segment of 10 bytes": (
        lambda _: StoreConfig(mapped_file_size_commit_log=10),
        ConfigError,
        "found 10; allowed is 4096 to 2147483647",
    ),
    "an Arrow column with a slip": (
        lambda root: append(root, {"bodyy": ["x"]}),
        MessageIllegalError,
        "column 'bodyy': no such column; allowed are body",
    ),
    "half a version": (
        lambda _: BatchRequest(app_id="a", version=1.5),  # type: ignore[arg-type]
        ConfigError,
        "found 1.5; allowed is a whole number from 0",
    ),
}


@pytest.mark.parametrize("name", list(LIBRARY))
def test_library(tmp_path: Path, name: str) -> None:
    with MessageStore.open(tmp_path) as store:
        store.put_message(Message("flights", b"x"))
    mistake, kind, sentence = LIBRARY[name]
    with pytest.raises(kind) as caught:
        mistake(tmp_path)
    assert sentence in str(caught.value)
    with MessageStore.open_read_only(tmp_path) as view:
        assert sum(view.max_offset("flights", queue) for queue in view.topics()["flights"]) == 1


COMMANDS = {
    "a store that is not there": (["status", "{root}/nope"], "found no message store"),
    "a topic with a slip": (
        ["get", "{root}", "flightz"],
        "topic 'flightz' is not in the store. Its topics are: flights",
    ),
    "tail of a topic with a slip": (["tail", "{root}", "flightz"], "Its topics are: flights"),
    "an illegal topic": (["put", "{root}", "a/b", "x"], "found 'a/b'; allowed are the characters"),
    "a command with a slip": (["staus", "{root}"], "No such command 'staus'. Did you mean 'status'?"),
    "recover without a store": (["recover", "{root}/nope"], "found no message store"),
    "lag of nothing": (["lag", "{root}"], "give exactly one of --checkpoint and --group"),
    "a folder that is no checkpoint": (["checkpoint", "show", "{root}"], "found no checkpoint of a streaming query"),
    "offsets of a topic with a slip": (["offsets", "{root}", "nope"], "Its topics are: flights"),
}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_commands(tmp_path: Path, name: str) -> None:
    with MessageStore.open(tmp_path) as store:
        store.put_message(Message("flights", b"x"))
    words, sentence = COMMANDS[name]
    done = command(*(word.format(root=tmp_path) for word in words), code=2)
    assert sentence in " ".join(done.stderr.split())
