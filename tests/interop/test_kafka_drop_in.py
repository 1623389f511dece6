"""The same job against a real Kafka broker and against a store: it finds the same rows, or a sentence that says why not.

`kafka_job.py` is the job. It runs four times: with `format("kafka")`, and with `format("messagestore")` in the Spark for
which there is a connector for Kafka, in the project's own, and there through Spark Connect. The last two take turns with the one
before them (`share.py`).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import kafka_broker, tools
from kafka.admin import KafkaAdminClient, NewTopic

import spark_runs
from interop.share import part
from messagestore import MessageStore

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.slow]
JOB = Path(__file__).with_name("kafka_job.py")
PARTITIONS = 3
PREFIX = "job"
TOPICS = (
    *("batch", "batch2", "copied", "foreach", "twice", "once", "by_key", "left", "right", "forced", "live"),
    *("hostile", "dead", "other", "created"),
)
CONNECTOR = ("spark-sql-kafka-", "spark-token-provider-kafka-", "kafka-clients-", "commons-pool2-")
STEPS = (
    *("batch", "schemas", "positions", "times", "topics", "copied", "restarted", "foreach", "deduplicated"),
    *("counted", "by_key", "column_topic", "progress"),
)
CLASSIC = ("in Kafka's Spark", "in our Spark")
CONNECT = "on Connect"
TURNS = ((CLASSIC[0],), (CLASSIC[1], CONNECT))
OURS = [where for turn in part(TURNS, len(TURNS)) for where in turn]
"""Where the job runs beside Kafka; all of them in two days."""
CLASSIC_NOW = [where for where in CLASSIC if where in OURS]

HOSTILE: dict[str, tuple[tuple[str | None, str | None, list[tuple[str, str | None]] | None], str]] = {
    "a tombstone": (("k", None, None), "body: found null; allowed are bytes (empty ones, too)"),
    "an empty key": (("", "v", None), "keys: found empty text, which RocketMQ drops. Leave it out"),
    "a key with blanks": (("New York", "v", None), "keys: found 'New York'; allowed is text without blanks"),
    "a key that is not UTF-8": (("\xff\x00", "v", None), "which is not UTF-8. Encode bytes as text first"),
    "two headers of one name": (("k", "v", [("h", "1"), ("h", "2")]), "property 'h': found twice; allowed is once"),
    "a header without a value": (("k", "v", [("h", None)]), "property 'h': found null; allowed is text"),
    "a header with an empty value": (("k", "v", [("h", "")]), "property 'h': found empty text"),
    "a header that is not UTF-8": (("k", "v", [("h", "\xff")]), "which is not UTF-8. Encode bytes as text first"),
    "a header with a separator": (("k", "v", [("h", "\x01")]), "allowed is text without U+0001 and U+0002"),
    "a header that is RocketMQ's": (("k", "v", [("TAGS", "v")]), "property 'TAGS': "),
}
"""Rows (bytes as Latin-1) that Kafka has, and RocketMQ's format has no room for; what the sink says."""

OPTIONS: dict[str, tuple[dict[str, str], str]] = {
    "kafka.*": ({"kafka.session.timeout.ms": "10000"}, "leave out all kafka.* options"),
    "groupIdPrefix": ({"groupIdPrefix": "p"}, "option groupidprefix: is for a Kafka broker"),
    "poll": ({"kafkaConsumer.pollTimeoutMs": "60000"}, "option kafkaconsumer.polltimeoutms: is for a Kafka broker"),
    "fetch": ({"fetchOffset.numRetries": "2"}, "option fetchoffset.numretries: is for a Kafka broker"),
}
"""Options that a Kafka job may have and a store refuses."""

DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "no mode": (None, 'cannot be written in the "ErrorIfExists" mode. Please use either the "Append"'),
    "update": (None, "Update"),
    "foreachBatch": (None, "option txnAppId: is missing in foreachBatch, where a batch may come again"),
    "another column": (None, "column body: no such column; allowed are key, value, headers, topic, partition"),
    "a missing partition": ("partition", "queueId: found 99; allowed is 0 to 2, because the topic has 3 queues"),
    "a topic with a dot": (None, "option topic: found 'job-a.b'; allowed is a topic: letters, digits, and %|-_"),
    "a limit in a batch": (1, "option maxOffsetsPerTrigger: is for streams, but this is a batch read"),
    "a time to come": ("No offset matched from request", 0),
    "end offset": ([f"{PREFIX}-batch2"], ["queues"]),
    "timestampType": (0, 1),
    "continuous": (None, "continuous"),
    "a pattern of Java": ([f"{PREFIX}-batch2"], "subscribePattern"),
    "a topic that does not exist": ("UnknownTopicOrPartitionException", None),
    "partitions of keys": ([1, 0, 2, 2, 0, 2, 2], [2, 0, 1, 2, 0, 1, 2]),
}
"""What differs otherwise: what Kafka's connector does, and what this one does. Texts are parts of errors.

docs/guides/from-kafka.md lists them.
"""
ALLOWED_ON_CONNECT = ("foreachBatch",)
"""Of these, what Connect does as Kafka's connector: there, nothing says that a write comes from foreachBatch."""


def settings(python: str) -> dict[str, str]:
    """Of Spark. The jars of Kafka's connector are given to the Spark that it was made for."""
    if python == sys.executable:
        return spark_runs.SESSION
    jars = tools.classpath_of("spark-kafka").split(":")
    return {**spark_runs.SESSION, "spark.jars": ",".join(jar for jar in jars if Path(jar).name.startswith(CONNECTOR))}


def run(python: str, folder: Path, targets: dict[str, Any], on_connect: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the job for some targets, one after the other in one session; and then for some through Connect."""
    folder.mkdir()
    theirs, others = (
        {name: {**each, "topic": PREFIX, "folder": f"{folder}/{name}"} for name, each in some.items()}
        for some in (targets, on_connect or {})
    )
    plan = {
        "settings": settings(python),
        "targets": theirs,
        "on_connect": others,
        "hostile": {name: row for name, (row, _) in HOSTILE.items()},
        "options": {name: given for name, (given, _) in OPTIONS.items()},
        "result": str(folder / "result.json"),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": spark_runs.JAVA_OPTIONS}
    if python == sys.executable:
        environment |= spark_runs.environment()
    else:
        environment.pop("SPARK_HOME", None)
    done = subprocess.run(
        [python, str(JOB), str(folder / "plan.json")],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "result.json").read_text())


def ours(folder: Path) -> dict[str, Any]:
    """A store, and how the job is connected to it: what a user changes in a Kafka job."""
    with MessageStore.open(folder) as store:
        for topic in TOPICS:
            store.create_topic(f"{PREFIX}-{topic}", PARTITIONS)
    return {
        "format": "messagestore",
        "options": {"path": str(folder), "rowFormat": "kafka"},
        "in_foreach": {"txnAppId": "job", "txnVersion": "{batch_id}"},
        "dead_letters": {"invalidRows": "deadLetter", "deadLetterTopic": f"{PREFIX}-dead"},
    }


def kafkas(servers: str) -> dict[str, Any]:
    """Topics of the broker, whose times are the broker's as they are the store's."""
    admin = KafkaAdminClient(bootstrap_servers=servers)
    configs = {name: {"message.timestamp.type": "LogAppendTime"} for name in TOPICS}
    configs |= {"created": {}, "a.b": {}}
    topics = [NewTopic(f"{PREFIX}-{name}", PARTITIONS, 1, topic_configs=each) for name, each in configs.items()]
    admin.create_topics(topics)
    admin.close()
    options = {"kafka.bootstrap.servers": servers, **kafka_broker.PATIENCE}
    return {"format": "kafka", "options": options, "in_foreach": {}, "dead_letters": {}}


@pytest.fixture(scope="module")
def found(tmp_path_factory, worker_id) -> dict[str, Any]:
    """What the job found: by target, by step. The processes of xdist share it."""
    folder = tmp_path_factory.mktemp("drop-in")
    if worker_id == "master":
        return runs(folder)
    kept = tmp_path_factory.getbasetemp().parent / "drop-in.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(runs(folder)))
        return json.loads(kept.read_text())


def runs(folder: Path) -> dict[str, Any]:
    """Start a broker, and run the job with Kafka and where it runs today."""
    reason = spark_runs.why_not()
    try:
        python, classpath = tools.spark_python(), tools.classpath_of("broker")
        tools.classpath_of("spark-kafka")
    except tools.CannotHaveError as error:
        reason = str(error)
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI the Kafka broker must run: {reason}", pytrace=False)
        pytest.skip(f"no Kafka broker: {reason}")
    with kafka_broker.running(classpath, folder / "broker") as broker:
        targets = {"kafka": kafkas(broker.servers)}
        if CLASSIC[0] in OURS:
            targets[CLASSIC[0]] = ours(folder / "first")
        results = run(python, folder / "theirs", targets)
    if CLASSIC[1] in OURS:
        own = {CLASSIC[1]: ours(folder / "second")}, {CONNECT: ours(folder / "third")}
        results |= run(sys.executable, folder / "ours", *own)
    return results


@pytest.mark.parametrize("where", OURS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_finds_what_it_finds_in_kafka(found, where, step) -> None:
    assert found[where][step] == found["kafka"][step]
    assert found["kafka"][step]


@pytest.mark.parametrize("where", CLASSIC_NOW)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_format_has_no_room_for_is_refused_by_name(found, where, name) -> None:
    assert found["kafka"]["hostile"]["errors"][name] is None, "Kafka has it"
    assert HOSTILE[name][1] in found[where]["hostile"]["errors"][name]["error"]
    assert "Nothing of this batch was written" in found[where]["hostile"]["errors"][name]["error"]


@pytest.mark.parametrize("where", CLASSIC_NOW)
def test_nothing_of_a_refused_batch_is_written(found, where) -> None:
    assert found[where]["hostile"]["rows"] == []
    assert len(found["kafka"]["hostile"]["rows"]) == 2 * len(HOSTILE)


@pytest.mark.parametrize("where", CLASSIC_NOW)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_kafkas_client_is_refused_by_name(found, where, name) -> None:
    assert found["kafka"]["options"][name] == len(found["kafka"]["batch"]) + 6, "Kafka takes it"
    assert OPTIONS[name][1].lower() in found[where]["options"][name]["error"].lower()


@pytest.mark.parametrize("where", CLASSIC_NOW)
def test_or_goes_to_dead_letters_with_its_reason(found, where) -> None:
    kept, dead = found[where]["hostile"]["kept"], found[where]["hostile"]["dead"]
    assert [base64.b64decode(row["value"]).decode() for row in kept] == list(HOSTILE)
    reasons = [{each["key"]: base64.b64decode(each["value"]).decode() for each in row["headers"]} for row in dead]
    assert sorted(each["dlqReason"] for each in reasons) == sorted(
        found[where]["hostile"]["errors"][name]["error"].split(": ", 2)[2].rpartition(". Nothing")[0]
        for name in HOSTILE
    )


@pytest.mark.parametrize("where", OURS)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_known(found, where, name) -> None:
    theirs, own = DIFFERENCES[name]
    own = theirs if where == CONNECT and name in ALLOWED_ON_CONNECT else own
    for target, expected in (("kafka", theirs), (where, own)):
        result = found[target]["differences"][name]
        if isinstance(expected, str):
            assert expected in result["error"]
        else:
            assert result == expected
