"""The sink's options for rows and files: dead letters, other columns, unique keys, hosts, staging and preallocation."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from messagestore import BatchConflictError, ConfigError, Message, MessageIllegalError, MessageStore, StoreConfig
from messagestore.spi import STORES
from messagestore.spi.local import LOCAL_STORES
from pyspark_messagestore.monitoring.health import facts_of, findings_of
from pyspark_messagestore.monitoring.metrics import registry_of
from pyspark_messagestore.options.table import sink_options
from pyspark_messagestore.sink.columns import prepare
from pyspark_messagestore.sink.unique_keys import UniqueKeys
from pyspark_messagestore.sink.writers import Sink, StreamWriter
from sink_tasks import settings, staged

TYPES = {
    pa.string(): "string",
    pa.binary(): "binary",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
    pa.date32(): "date",
    pa.float64(): "double",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.list_(pa.string()): "array<string>",
    pa.map_(pa.string(), pa.string()): "map<string,string>",
    pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])): "array<struct<key:string,value:binary>>",
}
MAP = pa.map_(pa.string(), pa.string())


def planned(root: str, batch: pa.RecordBatch, **options: str) -> Sink:
    parsed = sink_options({"path": root, "storeConfig": str(settings(root)), **options})
    kinds = [(name, TYPES[kind]) for name, kind in zip(batch.schema.names, batch.schema.types, strict=True)]
    return Sink.plan(parsed, prepare(kinds, parsed.topic, parsed.unknown_columns), STORES)


def write(root: str, context, batch: pa.RecordBatch, batch_id: int = 0, **options: str) -> StreamWriter:
    writer = StreamWriter(planned(root, batch, **options))
    writer.commit(staged(writer.sink, context, batch_id, batch), batch_id)
    return writer


def messages(root: str, topic: str = "t") -> list:
    with MessageStore.open_read_only(root) as store:
        found = []
        for queue_id in store.topics().get(topic, []):
            found += store.get_message(topic, queue_id, 0, max_count=1000).messages
        return sorted(found, key=lambda message: message.physical_offset)


DEAD = {"invalidRows": "deadLetter", "deadLetterTopic": "dead"}


def hostile() -> pa.RecordBatch:
    """A row for each way in which a row can be illegal, between rows that are not."""
    bad = [
        {"body": None},
        {"body": b"x" * 101},
        {"topic": "no/topic"},
        {"topic": None},
        {"topic": "rmq_sys_wheel_timer"},
        {"queueId": 8},
        {"queueId": -1},
        {"queueId": 1 << 40},
        {"flag": 1 << 31},
        {"keys": ["a b"]},
        {"keys": ["ok", None]},
        {"keys": ["ok", ""]},
        {"tags": "a\x01b"},
        {"tags": ""},
        {"properties": [("UNIQ_KEY", "mine")]},
        {"properties": [("a", "\x02")]},
        {"properties": [("a", "1"), ("a", "2")]},
        {"properties": [("a", None)]},
        {"properties": [("a", "x" * 33_000)]},
        {"delayTimeLevel": -1},
        {"body": None, "keys": ["a b"], "topic": None},
    ]

    good = {
        "body": b"good",
        "topic": "t",
        "queueId": None,
        "flag": 1,
        "keys": ["k"],
        "tags": "T",
        "properties": [("p", "v")],
        "delayTimeLevel": None,
    }

    rows = []
    for fault in bad:
        rows += [good, {**good, **fault}]
    types = [pa.binary(), pa.string(), pa.int64(), pa.int64(), pa.list_(pa.string()), pa.string(), MAP, pa.int32()]
    return pa.record_batch(
        {name: pa.array([row[name] for row in rows], kind) for name, kind in zip(good, types, strict=True)}
    )


def test_each_kind_of_illegal_row_becomes_a_dead_letter(root, context, caplog) -> None:
    """Good rows are where they belong; each bad one is in the other topic, with its reason, in the same batch."""
    batch = hostile()
    write(root, context, batch, **DEAD, maxMessageSize="100")
    assert [m.body for m in messages(root)] == [b"good"] * (batch.num_rows // 2)
    letters = sorted(messages(root, "dead"), key=lambda m: (m.queue_offset, m.queue_id))  # they go to queues in turn
    origins = [json.loads(m.properties["dlqOrigin"]) for m in letters]
    assert len(origins) == batch.num_rows // 2
    assert all(origin["batch"] == 0 and not origin.keys() & {"partition", "row"} for origin in origins)
    fields = [m.properties["dlqField"] for m in letters]
    assert fields[:5] == ["body", "body", "topic", "topic", "topic"]
    assert fields[5:10] == ["queueId", "queueId", "queueId", "flag", "keys"]
    assert fields[10:] == ["keys"] * 2 + ["tags"] * 2 + ["properties"] * 5 + ["delayTimeLevel", "body"]
    assert [letters[row].properties["dlqReason"] for row in (10, 17)] == [
        "keys: found null; allowed is text",
        "property 'a': found null; allowed is text",
    ]
    assert "dlqBodySize" not in letters[0].properties
    assert (letters[1].properties["dlqBodySize"], len(letters[1].body)) == ("101", 100)
    assert "found null" in letters[0].properties["dlqReason"]
    assert origins[2]["topic"] == "no/topic"
    assert f"{len(letters)} rows of this batch cannot be stored and went to topic dead" in caplog.text
    assert {m.store_timestamp_ms for m in letters} == {m.store_timestamp_ms for m in messages(root)}


def test_a_replay_with_dead_letters_is_known(root, context) -> None:
    batch = hostile()
    write(root, context, batch, **DEAD, maxMessageSize="100")
    before = [m.body for m in messages(root)], [m.body for m in messages(root, "dead")]
    write(root, context, batch, **DEAD, maxMessageSize="100")
    assert ([m.body for m in messages(root)], [m.body for m in messages(root, "dead")]) == before


def test_without_the_option_the_batch_is_refused(root, context) -> None:
    with pytest.raises(MessageIllegalError, match=r"partition 0.*Nothing of this batch was written"):
        write(root, context, hostile(), maxMessageSize="100")
    with pytest.raises(ConfigError, match="found deadLetter without deadLetterTopic"):
        sink_options({"path": root, "invalidRows": "deadLetter"})
    with pytest.raises(ConfigError, match="found without invalidRows=deadLetter"):
        sink_options({"path": root, "deadLetterTopic": "dead"})


def test_every_row_is_a_dead_letter(root, context) -> None:
    """A batch without a good row; a header that is not UTF-8."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = pa.array([[{"key": "h", "value": b"\xff"}]] * 3, kind)
    write(root, context, pa.record_batch({"value": ["a", "b", "c"], "headers": headers}), topic="t", **DEAD)
    assert messages(root) == []
    letters = messages(root, "dead")
    assert sorted(m.body for m in letters) == [b"a", b"b", b"c"]
    assert all("not UTF-8" in m.properties["dlqReason"] for m in letters)


def test_random_rows_are_stored_or_dead_letters_once_each(root, context) -> None:
    """Whatever the mixture: as many messages as rows, and no good row among the dead letters."""
    random.seed(5)
    bodies = [random.choice([b"ok%d" % i, None, b"y" * 300]) for i in range(500)]
    keys = [random.choice([["k"], ["a b"], [], None, ["x", ""]]) for _ in bodies]
    batch = pa.record_batch({"body": pa.array(bodies, pa.binary()), "keys": pa.array(keys, pa.list_(pa.string()))})
    write(root, context, batch, topic="t", maxMessageSize="200", **DEAD)
    good = [b for b, k in zip(bodies, keys, strict=True) if b and len(b) <= 200 and k in (["k"], [], None)]
    assert sorted(m.body for m in messages(root)) == sorted(good)
    assert len(messages(root, "dead")) == len(bodies) - len(good)


def test_other_columns_become_properties(root, context) -> None:
    """Text, whole numbers, booleans and dates; nulls are left out; a property of the map stays."""
    batch = pa.record_batch(
        {
            "body": ["a", "b", "c"],
            "properties": pa.array([[("own", "1")], None, []], MAP),
            "gate": pa.array(["C3", None, "\u00fc"]),
            "delay": pa.array([7, -1, None], pa.int32()),
            "late": pa.array([True, False, None]),
            "day": pa.array([0, 1, None], pa.date32()),
        }
    )
    write(root, context, batch, topic="t", unknownColumns="properties")
    assert {m.body: m.properties for m in messages(root)} == {
        b"a": {"own": "1", "gate": "C3", "delay": "7", "late": "true", "day": "1970-01-01"},
        b"b": {"delay": "-1", "late": "false", "day": "1970-01-02"},
        b"c": {"gate": "\u00fc"},
    }


def test_other_columns_are_left_out_or_refused(root, context) -> None:
    batch = pa.record_batch({"body": ["a"], "gate": ["C3"]})
    write(root, context, batch, topic="t", unknownColumns="ignore")
    assert messages(root)[0].properties == {}
    with pytest.raises(ConfigError, match=r"column gate: no such column.* unknownColumns"):
        planned(root, batch, topic="t")
    for name, values, words in (
        ("price", pa.array([1.5]), "found type double.*Cast it to string"),
        ("WAIT", pa.array(["x"]), "cannot become a property"),
    ):
        with pytest.raises(ConfigError, match=words):
            planned(root, pa.record_batch({"body": ["a"], name: values}), topic="t", unknownColumns="properties")
    twice = pa.record_batch({"body": ["a"], "properties": pa.array([[("gate", "1")]], MAP), "gate": ["C3"]})
    with pytest.raises(MessageIllegalError, match="property 'gate': found twice"):
        write(root, context, twice, 1, topic="t", unknownColumns="properties")


def test_the_name_of_the_cluster_is_stamped_and_a_replay_with_another_one_is_known(root, context, tmp_path) -> None:
    """Dead letters have it, too. The option takes precedence over the file."""
    settings = tmp_path / "store.properties"
    settings.write_text("stampCluster=true\nbrokerClusterName=south\n")
    batch = pa.record_batch({"body": ["a", "b" * 20]})
    options = {
        "topic": "t",
        "txnAppId": "app",
        "invalidRows": "deadLetter",
        "deadLetterTopic": "dead",
        "maxMessageSize": "10",
    }
    north = {"brokerClusterName": "north", "storeConfig": str(settings)}
    for more in (north, {"storeConfig": str(settings)}, {}):
        write(root, context, batch, **options, **more)
    write(root, context, batch, 1, **options, storeConfig=str(settings))
    for topic in ("t", "dead"):
        assert [m.system_properties["CLUSTER"] for m in messages(root, topic)] == ["north", "south"]
    with pytest.raises(ConfigError, match=r"brokerClusterName: found .*; allowed is printable text"):
        write(root, context, batch, 2, **options, brokerClusterName="a\tb")


def test_dead_letters_are_a_finding_as_those_of_consumers_are(root, context) -> None:
    """Also where the topic may have any name; a topic without a dead letter is none of them."""
    options = {"topic": "t", "txnAppId": "app", "maxMessageSize": "10", **DEAD}

    def seen() -> tuple[dict[str, str], float | None]:
        with contextlib.closing(LOCAL_STORES.reader(str(root), StoreConfig())) as store:
            findings = findings_of(facts_of(store))
        letters = registry_of(str(root)).get_sample_value("spark_dead_letters_total", {"store": str(root)})
        return {each.sentence: each.remedy for each in findings if each.rule == "dead-letters"}, letters

    write(root, context, pa.record_batch({"body": ["a"]}), **options)
    assert seen() == ({}, 0)
    write(root, context, pa.record_batch({"body": ["a", "b" * 20]}), 1, **options)
    (found, letters) = seen()
    ((sentence, remedy),) = found.items()
    assert sentence == "dead got 1 message in the last 24 hours: rows that the store cannot hold"
    assert f"messagestore get {root} dead" in remedy and letters == 1


def test_a_topic_without_write_permission_stops_a_query_and_not_a_replay(root, context) -> None:
    """Its rows are no dead letters: they come again when the topic may be written. Dead letters need the permission,
    too."""
    batch = pa.record_batch({"body": ["a", "b" * 20]})
    options = {"invalidRows": "deadLetter", "deadLetterTopic": "dead", "maxMessageSize": "10", "txnAppId": "app"}
    write(root, context, batch, topic="t", **options)
    for topic in ("t", "dead"):
        with MessageStore.open(root) as store:
            store.alter_topic(topic, perm=4)
        write(root, context, batch, topic="t", **options)  # is known
        with pytest.raises(MessageIllegalError, match=f"topic '{topic}': found perm 4"):
            write(root, context, batch, 1, topic="t", **options)
        with MessageStore.open(root) as store:
            store.alter_topic(topic, perm=6)
    write(root, context, batch, 1, topic="t", **options)
    assert [m.body for m in messages(root)] == [b"a"] * 2


def test_a_topic_without_a_queue_to_write_stops_a_query_and_not_a_replay(root, context) -> None:
    batch = pa.record_batch({"body": ["a", "b"], "keys": ["k", None]})
    write(root, context, batch, topic="t", txnAppId="app")
    with MessageStore.open(root):
        pass  # ends the turn of this process, which would not look at the file again
    path = Path(root, "config", "topics.json")
    path.write_text(path.read_text().replace('"writeQueueNums":8', '"writeQueueNums":0'))
    write(root, context, batch, topic="t", txnAppId="app")
    with pytest.raises(MessageIllegalError, match="topic 't': found writeQueueNums 0"):
        write(root, context, batch, 1, topic="t", txnAppId="app")
    assert sorted(m.body for m in messages(root)) == [b"a", b"b"]


def test_rows_of_a_topic_with_multi_tags_have_its_flag(root, context) -> None:
    batch = pa.record_batch({"body": ["a", "b", "c"], "topic": ["t", "other", "t"], "delayTimeLevel": [None, None, 2]})
    with MessageStore.open(root) as store:
        store.create_topic("t", 1)
    path = Path(root, "config", "topics.json")
    path.write_text(path.read_text().replace("SINGLE_TAG", "MULTI_TAG"))
    write(root, context, batch)
    found = [(m.body, m.sys_flag) for name in ("t", "other", "SCHEDULE_TOPIC_XXXX") for m in messages(root, name)]
    assert found == [(b"a", 2), (b"b", 0), (b"c", 2)]


def test_unique_keys_are_the_same_after_a_replay_and_differ_otherwise(root, context) -> None:
    batch = pa.record_batch({"body": ["a", "b", "c"]})
    write(root, context, batch, topic="t", uniqKey="true", txnAppId="app")
    keys = [m.unique_key for m in messages(root)]
    assert len(set(keys)) == 3 and all(len(key) == 32 and set(key) <= set("0123456789ABCDEF") for key in keys)
    assert all(key[20:28] == "00000000" for key in keys)
    with MessageStore.open_read_only(root) as store:
        for key in keys:
            assert [m.unique_key for m in store.query_message("t", key)] == [key]

    of = lambda *place: UniqueKeys(*place)(np.arange(70_000)).to_pylist()  # noqa: E731
    assert of("app", 0, 0)[:3] == sorted(keys)
    assert len({*of("app", 0, 0), *of("app", 1, 0), *of("app", 0, 1), *of("other", 0, 0)}) == 280_000
    assert of(None, None, 0)[0] != of(None, None, 0)[0]


def test_the_store_host_is_in_every_record(root, context) -> None:
    """It is what the option says, and without one it is that of the store's records."""
    batch = pa.record_batch({"body": ["a"]})
    write(root, context, batch, 0, topic="t", storeHost="10.1.2.3:10912", txnAppId="a")
    write(root, context, batch, 1, topic="t", txnAppId="a")
    write(root, context, batch, 2, topic="t", storeHost="[fe80::1]:10911", txnAppId="a")
    write(root, context, batch, 3, topic="t", txnAppId="a")
    hosts = ["10.1.2.3:10912", "10.1.2.3:10912", "[fe80::1]:10911", "10.1.2.3:10912"]
    assert [m.store_host for m in messages(root)] == hosts
    for wrong in ("10.1.2.3", "fe80::1:10911", "host:1", "10.1.2.3:70000", ":1", "[10.1.2.3]:1"):
        with pytest.raises(ConfigError, match="option storeHost: found"):
            sink_options({"path": root, "storeHost": wrong})


def test_the_store_keeps_the_name_of_its_broker(root, context, tmp_path: Path) -> None:
    """A new store and one that exists; the option takes precedence over `storeConfig`, and without one it stays."""
    batch = pa.record_batch({"body": ["a"]})
    given = tmp_path / "named.properties"
    given.write_text("brokerName=broker-0\n")
    both = {"storeConfig": str(given), "brokerName": "broker-b"}
    names = []
    for version, options in enumerate(({}, {"brokerName": "broker-a"}, {}, {"storeConfig": str(given)}, both)):
        write(root, context, batch, version, topic="t", txnAppId="a", **options)
        with MessageStore.open_read_only(root) as store:
            names.append(store.broker_name)
    assert names == ["", "broker-a", "broker-a", "broker-0", "broker-b"]
    for wrong in ("", " b", "b\n", "x" * 256):
        with pytest.raises(ConfigError, match=r"option brokerName: found .* allowed is 1 to 255 printable characters"):
            sink_options({"path": root, "brokerName": wrong})


def test_a_column_that_names_a_broker_is_left_out(root, context) -> None:
    """It says where a row was read, as storeHost does; rows of several stores can be written to one."""
    time = pa.array([0] * 3, pa.timestamp("us", "UTC"))
    read = {"queueOffset": pa.array([0] * 3, pa.int64()), "storeTimestamp": time, "msgId": ["m"] * 3}
    batch = pa.record_batch({"body": ["a", "b", "c"], "brokerName": ["broker-a", "broker-b", None], **read})
    write(root, context, batch, topic="t", brokerName="broker-c")
    assert len(messages(root)) == 3 and all("brokerName" not in m.properties for m in messages(root))
    with MessageStore.open_read_only(root) as store:
        assert store.broker_name == "broker-c"


def test_puts_of_the_library_name_the_same_host(root) -> None:
    config = StoreConfig.load(settings(root))
    with MessageStore.open(root, config.replace(broker_ip1="10.9.8.7", listen_port=1)) as store:
        store.put_message(Message(topic="t", body=b"x", queue_id=0))
    with MessageStore.open(root, config) as store:
        result = store.put_message(Message(topic="t", body=b"y", queue_id=0))
        assert result.message_id.startswith("0A09080700000001")
    assert [m.store_host for m in messages(root)] == ["10.9.8.7:1"] * 2


def test_a_staging_folder_of_its_own(root, context, tmp_path: Path) -> None:
    """Files lie there until the commit, and a missing folder is refused before anything is created."""
    batch = pa.record_batch({"body": ["a"]})
    folder = tmp_path / "staging"
    with pytest.raises(ConfigError, match=rf"found no folder {folder}. Create it"):
        planned(root, batch, topic="t", stagingDir=str(folder))
    assert not os.path.exists(root)
    folder.mkdir()
    writer = StreamWriter(planned(root, batch, topic="t", stagingDir=str(folder)))
    left = staged(writer.sink, context, 0, batch)
    assert [name.rsplit(".")[-1] for name in os.listdir(folder)] == ["staged"]
    assert not os.path.exists(root)
    writer.commit(left, 0)
    assert [m.body for m in messages(root)] == [b"a"]
    assert os.listdir(folder) == os.listdir(Path(root) / "spark" / "staging") == []
    writer.abort(staged(writer.sink, context, 1, batch), 1)
    assert os.listdir(folder) == []


def test_segments_are_allocated_at_once(root, context) -> None:
    write(root, context, pa.record_batch({"body": ["a"]}), topic="t", preallocate="true")
    segment = Path(root) / "commitlog" / ("0" * 20)
    assert segment.stat().st_blocks * 512 >= segment.stat().st_size == 65_536


def test_a_column_of_delay_levels(root: str, context) -> None:
    """Rows with a level wait in SCHEDULE_TOPIC_XXXX, once, however often the batch comes."""
    batch = pa.record_batch(
        {
            "body": pa.array([b"now", b"later", b"soon", b"null"]),
            "queueId": pa.array([0, 1, 0, 1], pa.int32()),
            "delayTimeLevel": pa.array([0, 3, 1, None], pa.int32()),
        }
    )
    writer = write(root, context, batch, topic="t")
    writer.commit(staged(writer.sink, context, 0, batch), 0)
    assert [message.body for message in messages(root)] == [b"now", b"null"]
    waiting = {message.body: message for message in messages(root, "SCHEDULE_TOPIC_XXXX")}
    assert {body: message.queue_id for body, message in waiting.items()} == {b"later": 2, b"soon": 0}
    assert waiting[b"later"].system_properties["REAL_QID"] == "1"
    other = batch.set_column(2, "delayTimeLevel", pa.array([0, 3, 2, None], pa.int32()))
    with pytest.raises(BatchConflictError):
        writer.commit(staged(writer.sink, context, 0, other), 0)


def test_delay_levels_that_are_none_are_dead_letters(root: str, context) -> None:
    batch = pa.record_batch(
        {
            "body": pa.array([b"good", b"below", b"wide"]),
            "delayTimeLevel": pa.array([2, -1, 1 << 40], pa.int64()),
        }
    )
    write(root, context, batch, topic="t", **DEAD)
    assert [message.body for message in messages(root, "SCHEDULE_TOPIC_XXXX")] == [b"good"]
    dead = messages(root, "dead")
    assert [message.body for message in dead] == [b"below", b"wide"]
    with pytest.raises(MessageIllegalError, match=r"row 1: delay level: found -1"):
        write(root, context, batch.slice(0, 2), 1, topic="t")
