"""The table of options: what is read, what is refused, and what the documents say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from messagestore import ConfigError
from pyspark_messagestore.options.option import SINK, SOURCE
from pyspark_messagestore.options.positions import EARLIEST, EVERY_QUEUE, LATEST
from pyspark_messagestore.options.table import (
    OPTIONS,
    check_names,
    sink_options,
    source_options,
    with_tables,
)

README = Path(__file__).resolve().parents[3] / "connector" / "README.md"
READ = {"path": "/data/store", "subscribe": "flights"}
WRITE = {"path": "/data/store", "topic": "flights"}


def refused(parse, options: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults() -> None:
    """What a user gets who says only where and what."""
    read, written = source_options(READ), sink_options(WRITE)
    assert (str(read.path), read.subscribe, read.starting_offsets, read.fail_on_data_loss) == (
        "/data/store",
        ("flights",),
        None,
        True,
    )
    assert (written.write_queue_nums, written.auto_create_topic, written.queue_selector) == (8, True, "auto")
    assert (written.lock_timeout, written.staging_ttl, written.max_message_size) == (None, 86400.0, None)
    assert written.config().flush_disk_type == "SYNC_FLUSH"
    assert (written.config().lock_timeout, written.config().max_message_size) == ("30s", 4194304)


def test_names_in_any_case_and_aliases() -> None:
    """Spark hands options over in lower case; RocketMQ's nouns are aliases."""
    options = source_options({"STOREPATHROOTDIR": "/s", "Topic": " a , b,a", "startingoffsets": "EARLIEST"})
    assert (str(options.path), options.subscribe, options.starting_offsets) == ("/s", ("a", "b"), EARLIEST)


def test_an_option_given_twice() -> None:
    assert "found twice, as subscribe and as topic" in refused(source_options, {**READ, "topic": "other"})
    assert source_options({**READ, "topic": "flights"}).subscribe == ("flights",)


@pytest.mark.parametrize(
    "path", ["file:/data/store", "file:///data/store", "file://localhost/data/store", "/data/store"]
)
def test_paths(path: str) -> None:
    """SQL tables hand over a `file:` path."""
    assert str(sink_options({**WRITE, "path": path}).path) == "/data/store"


@pytest.mark.parametrize("path", ["store", "./a:b", "a/~b"])
def test_a_relative_path_is_meant_from_where_spark_runs(path: str) -> None:
    assert str(sink_options({**WRITE, "path": path}).path) == os.path.abspath(path)


def test_the_path_of_a_table() -> None:
    """SQL's CREATE TABLE gives it as `location`."""
    assert str(source_options({"location": "file:/data/store", "subscribe": "a"}).path) == "/data/store"


@pytest.mark.parametrize("path", ["hdfs://host/x", "s3a://bucket/x", "", "file:", "dbfs:/x", "hdfs:/x", "~/x", "~"])
def test_paths_that_are_no_folder(path: str) -> None:
    """`dbfs:/x` and `~/x` became folders of these names in the current directory, and nothing was said."""
    assert "option path: found" in refused(sink_options, {**WRITE, "path": path})


def test_unknown_names_are_refused_with_a_hint() -> None:
    """A typo must not become a default."""
    assert "Did you mean startingOffsets?" in refused(source_options, {**READ, "startingOffset": "x"})
    assert "Did you mean flushDiskType?" in refused(sink_options, {**WRITE, "flushDisktyp": "x"})
    assert "The options are" in refused(check_names, {"zzzzzz": "1"})
    check_names({**READ, "checkpointLocation": "/c", "option.x": "1", "owner": "me", "provider": "messagestore"})


def test_options_of_the_other_side() -> None:
    assert "option maxOffsetsPerTrigger: is for reading" in refused(
        sink_options, {**WRITE, "maxOffsetsPerTrigger": "1"}
    )
    assert "option txnAppId: is for writing" in refused(source_options, {**READ, "txnAppId": "a"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("maxOffsetsPerTrigger", "0"),
        ("maxOffsetsPerTrigger", "many"),
        ("minPartitions", "-1"),
        ("failOnDataLoss", "maybe"),
        ("subscribe", "a,b/c"),
        ("subscribe", ","),
        ("startingOffsets", "newest"),
        ("startingOffsets", '{"flights": {"0": -3}}'),
        ("startingOffsets", '{"flights": {"x": 1}}'),
        ("startingOffsets", '{"flights": 1}'),
        ("startingOffsets", "[1]"),
    ],
)
def test_wrong_values_of_the_source(name: str, value: str) -> None:
    """Each error names the option, what was given and what is allowed."""
    message = refused(source_options, {**READ, name: value})
    assert message.startswith(f"option {name}: found {value!r}; allowed is ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topic", "a/b"),
        ("writeQueueNums", "0"),
        ("autoCreateTopic", "yes"),
        ("queueSelector", "hash"),
        ("flushDiskType", "SYNC"),
        ("txnAppId", ""),
        ("onReplayMismatch", "ignore"),
        ("onVersionRegression", "continue"),
        ("onLostBatches", "skip"),
        ("maxMessageSize", "4M"),
        ("lockTimeout", "soon"),
        ("stagingTtl", "-1s"),
    ],
)
def test_wrong_values_of_the_sink(name: str, value: str) -> None:
    message = refused(sink_options, {**WRITE, name: value})
    assert message.startswith(f"option {name}: found {value!r}; allowed is ")


def test_a_topic_of_a_broker_can_be_read_but_not_written() -> None:
    """The sink's option says why; the source takes the same name."""
    message = refused(sink_options, {**WRITE, "topic": "rmq_sys_wheel_timer"})
    assert message.startswith("option topic: found 'rmq_sys_wheel_timer', which is reserved for RocketMQ's broker: ")
    assert source_options({**READ, "subscribe": "SCHEDULE_TOPIC_XXXX"}).subscribe == ("SCHEDULE_TOPIC_XXXX",)


def test_starting_offsets_as_json() -> None:
    """Kafka's form, RocketMQ's with a broker between, and the rest of the queues."""
    asked = source_options({**READ, "startingOffsets": '{"flights": {"0": 23, "1": -2, "*": -1}}'}).starting_offsets
    assert asked == {"flights": {0: 23, 1: EARLIEST, EVERY_QUEUE: LATEST}}
    nested = source_options({**READ, "startingOffsets": '{"flights": {"broker-a": {"0": 5}}}'}).starting_offsets
    assert nested == {"flights": {0: 5}}


@pytest.mark.parametrize(
    "queues",
    [
        '{"broker-a": {"0": 5}, "broker-b": {"0": 7}}',
        '{"broker-a": {"0": 5}, "1": 7}',
        '{"a": {"b": {"0": 1}}, "c": {}}',
    ],
)
def test_positions_of_several_brokers_are_refused(queues: str) -> None:
    """The one that came last counted, although a store holds the queues of one broker."""
    assert "option startingOffsets: found" in refused(
        source_options, {**READ, "startingOffsets": f'{{"flights": {queues}}}'}
    )


def test_missing_ones() -> None:
    assert "option path (or storePathRootDir): is missing" in refused(source_options, {"subscribe": "a"})
    assert "option subscribe (or topic): is missing" in refused(source_options, {"path": "/s"})
    assert "option path: is missing" in refused(sink_options, {"topic": "a"})
    assert "both or neither" in refused(sink_options, {**WRITE, "txnVersion": "1"})


def test_store_config(tmp_path: Path) -> None:
    """A properties file sets what options do not; a file that is not there is named."""
    file = tmp_path / "store.properties"
    file.write_text("mappedFileSizeCommitLog=1048576\nmessageIndexEnable=false\n")
    config = sink_options({**WRITE, "storeConfig": str(file), "maxMessageSize": "1000"}).config()
    assert (config.mapped_file_size_commit_log, config.message_index_enable, config.max_message_size) == (
        1048576,
        False,
        1000,
    )
    with pytest.raises(ConfigError, match=r"option storeConfig: found .*nothing"):
        sink_options({**WRITE, "storeConfig": str(tmp_path / "nothing")}).config()


def test_the_readme_has_the_table() -> None:
    """`make docs` renews it."""
    text = README.read_text(encoding="utf-8")
    assert with_tables(text) == text
    for option in OPTIONS:
        assert f"`{option.name}`" in text


def test_every_option_says_what_it_means() -> None:
    for option in OPTIONS:
        assert option.side in (SOURCE, SINK)
        assert option.meaning.endswith((".", "`).")) and re.match(r"[A-Z`-]", option.meaning)
