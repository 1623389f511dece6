"""The two Kafka bridges of the examples against a real Kafka broker: killed at every step, each record arrives once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from benchmarks.peers import kafka_broker
from benchmarks.peers.tools import CannotHaveError, classpath_of
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic

from messagestore import MessageColumns, MessageStore

pytestmark = pytest.mark.java
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
INTO = EXAMPLES / "06_kafka_to_store" / "kafka_to_store.py"
OUT_OF = EXAMPLES / "07_store_to_kafka" / "store_to_kafka.py"
PARTITIONS = 3

KILLED_AT = """
import os, runpy, signal, sys
where, nth, path, *arguments = sys.argv[1:]
module, _, rest = where.partition(":")
when, _, name = rest.partition(" ")
holder = __import__(module, fromlist=["_"])
*owners, method = name.split(".")
for owner in owners:
    holder = getattr(holder, owner)
real, calls = getattr(holder, method), 0
def replaced(*args, **kwargs):
    global calls
    calls += 1
    if when == "before" and calls == int(nth):
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*args, **kwargs)
    if calls == int(nth):
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(holder, method, replaced)
sys.argv = [path, *arguments]
runpy.run_path(path, run_name="__main__")
"""
"""Runs a program and kills it before or after the n-th call of a method."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    try:
        classpath = classpath_of("broker")
    except CannotHaveError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"in CI the Kafka broker must run: {error}", pytrace=False)
        pytest.skip(f"no Kafka broker: {error}")
    with kafka_broker.running(classpath, tmp_path_factory.mktemp("kafka") / "broker") as found:
        yield found.servers


@pytest.fixture
def topic(broker):
    name = f"t{random.Random().randrange(1 << 40)}"
    admin = KafkaAdminClient(bootstrap_servers=broker)
    admin.create_topics([NewTopic(name, PARTITIONS, 1)])
    yield name
    admin.close()


def run(script: Path, *arguments: str, killed: tuple[str, int] | None = None, after_s: float | None = None) -> int:
    """Run a bridge; returns its exit status, which is -9 if it was killed."""
    command = [sys.executable, str(script), *arguments]
    if killed is not None:
        command = [sys.executable, "-c", KILLED_AT, killed[0], str(killed[1]), str(script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if after_s is not None:
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), output[-3000:]
    assert killed is None or process.returncode == -signal.SIGKILL, f"never came to {killed}: {output}"
    return process.returncode


def produce(broker: str, topic: str, first: int, count: int) -> None:
    producer = KafkaProducer(bootstrap_servers=broker)
    for number in range(first, first + count):
        producer.send(
            topic,
            key=b"key-%d" % (number % 11),
            value=b"%d" % number,
            headers=[("h", b"%d" % number)],
            partition=number % PARTITIONS,
        )
    producer.flush()
    producer.close()


def in_store(root: Path, topic: str) -> list[list[int]]:
    with MessageStore.open_read_only(root) as store:
        queues = [store.read(topic, queue_id, 0) for queue_id in range(PARTITIONS)]
        return [[int(body) for batch in queue for body in batch["body"].to_pylist()] for queue in queues]


def in_kafka(broker: str, topic: str) -> list[list[int]]:
    consumer = KafkaConsumer(bootstrap_servers=broker, group_id=None, isolation_level="read_committed")
    places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    ends = consumer.end_offsets(places)
    found: list[list[int]] = [[] for _ in places]
    while any(consumer.position(place) < ends[place] for place in places):
        for place, records in consumer.poll(timeout_ms=500).items():
            found[place.partition] += [int(record.value) for record in records]
    consumer.close()
    return found


def expected(count: int) -> list[list[int]]:
    return [list(range(queue, count, PARTITIONS)) for queue in range(PARTITIONS)]


def test_into_the_store_killed_at_every_step(broker, topic, tmp_path) -> None:
    """Before and after each append, and at any moment: the store has each record once, in order."""
    root = tmp_path / "store"
    given = (broker, topic, str(root), "--batch-rows", "200")
    total = 0
    for step in ("before append_batch", "after append_batch", "before last_batch", "after last_batch"):
        for nth in (1, 2):
            produce(broker, topic, total, 500)
            total += 500
            when, _, name = step.partition(" ")
            run(INTO, *given, killed=(f"messagestore:{when} MessageStore.{name}", nth))
    dice = random.Random(1)
    for _ in range(6):
        produce(broker, topic, total, 2000)
        total += 2000
        run(INTO, *given, after_s=dice.uniform(0.2, 1.2))
    run(INTO, *given)
    assert in_store(root, topic) == expected(total)


def test_out_of_the_store_killed_at_every_step(broker, topic, tmp_path) -> None:
    """Before and after each step of a transaction, and at any moment: Kafka has each message once, in order."""
    root = tmp_path / "store"
    given = (str(root), topic, broker, "--name", topic, "--batch-rows", "200")
    total = 0

    def fill(count: int) -> None:
        nonlocal total
        with MessageStore.open(root) as store:
            store.create_topic(topic, PARTITIONS)
            numbers = range(total, total + count)
            rows = pa.record_batch(
                {
                    "body": [str(number) for number in numbers],
                    "queueId": pa.array([number % PARTITIONS for number in numbers], pa.int32()),
                    "keys": [f"key-{number % 11}" for number in numbers],
                }
            )
            store.append_batch(MessageColumns.from_arrow(rows, topic=topic))
        total += count

    steps = [
        ("kafka:after KafkaProducer.init_transactions", 1),
        ("kafka:after KafkaProducer.begin_transaction", 1),
        ("kafka:after KafkaProducer.send", 50),
        ("kafka:before KafkaProducer.commit_transaction", 1),
        ("kafka:after KafkaProducer.commit_transaction", 1),
        ("kafka:before KafkaProducer.commit_transaction", 2),
        ("kafka:after KafkaProducer.commit_transaction", 2),
    ]
    for step in steps:
        fill(500)
        run(OUT_OF, *given, killed=step)
    dice = random.Random(2)
    for _ in range(4):
        fill(2000)
        run(OUT_OF, *given, after_s=dice.uniform(0.3, 1.5))
    run(OUT_OF, *given)
    assert in_kafka(broker, topic) == expected(total)


def test_what_rocketmq_has_no_room_for_is_kept(broker, topic, tmp_path) -> None:
    """Null values, keys and headers that are no text: nothing is lost, and the properties say what was there."""
    producer = KafkaProducer(bootstrap_servers=broker)
    producer.send(topic, key=b"a b", value=None, headers=[("h", b"\xff"), ("h", b"")], partition=0)
    producer.send(topic, key=b"", value=b"x", headers=[("ok", b"1"), ("two", b"2")], partition=0)
    producer.flush()
    producer.close()
    run(INTO, broker, topic, str(tmp_path / "store"))
    with MessageStore.open_read_only(tmp_path / "store") as store:
        first, second = store.get_message(topic, 0, 0).messages
    assert (first.body, first.keys) == (b"", ())
    assert json.loads(first.properties.pop("kafkaHeaders")) == [["h", "/w=="], ["h", "="]]
    assert first.properties == {"kafkaKey": "YSBi", "kafkaTombstone": "true"}
    assert (second.body, second.properties) == (b"x", {"kafkaKey": "=", "ok": "1", "two": "2"})


def test_a_store_that_went_back_and_another_store(broker, topic, tmp_path) -> None:
    """Neither is copied over what Kafka has: the program ends with a sentence."""
    for name in ("one", "two"):
        with MessageStore.open(tmp_path / name) as store:
            store.create_topic(topic, PARTITIONS)
            rows = pa.record_batch({"body": ["0"], "queueId": pa.array([0], pa.int32())})
            store.append_batch(MessageColumns.from_arrow(rows, topic=topic))
    run(OUT_OF, str(tmp_path / "one"), topic, broker, "--name", topic)
    command = [sys.executable, str(OUT_OF), str(tmp_path / "two"), topic, broker, "--name", topic]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 1
    assert "Kafka has messages of store" in done.stderr
    assert in_kafka(broker, topic)[0] == [0]
