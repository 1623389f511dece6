"""RocketMQ's mqadmin shows how far a stream has read (connector/README.md), and has the settings of groups that we write."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from interop import java_build
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS
from interop.live import put, soon
from interop.real_broker import NameServer, RealBroker
from messagestore import Message, MessageStore, StoreConfig
from stream_steps import begun, step, stream

FIRST, SECOND = "spark-flights", "spark-audit"
WAIT_S = 120


def read_with(root: Path, group: str, count: int) -> None:
    """A stream reads some messages, and says so when it plans its next micro-batch."""
    options = {"startingOffsets": "earliest", "consumerGroup": group, "maxOffsetsPerTrigger": str(count)}
    reader = stream(str(root), **options)
    found, end = step(reader, begun(reader))
    assert len(found) == count
    reader.latestOffset(end, reader.getDefaultReadLimit())
    reader.stop()


def create_topic(root: Path, topic: str) -> None:
    """With our command line."""
    command = [
        sys.executable,
        "-m",
        "pyspark_messagestore.command",
        "topic",
        "create",
        str(root),
        topic,
        "--queues",
        "1",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)


def until(done: Callable[[str], object], ask: Callable[[], str]) -> str:
    """The first answer that is good: a broker that has started is not known to its name server at once."""
    until_s = time.monotonic() + WAIT_S
    while not done(text := ask()):
        assert time.monotonic() < until_s, text[-3000:]
        time.sleep(1)
    return text


def progress(text: str) -> dict[int, tuple[str, int, int]]:
    """Queue -> broker, its end, and where the group is, from what `mqadmin consumerProgress` prints."""
    rows = [line.split() for line in text.splitlines()]
    return {int(row[2]): (row[1], int(row[3]), int(row[4])) for row in rows if row[:1] == ["t"]}


def test_consumer_progress_of_a_stream(memory: Path, root: Path) -> None:
    """One group's retry topic is created in the store, the other's through the broker that runs. Without such a topic,
    mqadmin knows no group."""
    need(NEWEST, java_build.tools_classpath)
    with NameServer(NEWEST, memory / "names") as names:
        broker = RealBroker(NEWEST, memory / "broker", root, names)
        with MessageStore.open(root, StoreConfig.load(broker.conf)) as store:
            store.create_topic("t", 4)
            for number in range(12):
                store.put_message(Message("t", b"x", queue_id=number % 4))
        read_with(root, FIRST, 8)
        read_with(root, SECOND, 4)
        create_topic(root, f"%RETRY%{FIRST}")
        with broker:
            COUNTS.stores += 1
            text = until(progress, lambda: names.mqadmin("consumerProgress", "-g", FIRST))
            assert progress(text) == dict.fromkeys(range(4), ("broker-a", 3, 2)), text
            assert "Diff Total: 4" in text
            unknown = names.mqadmin("consumerProgress", "-g", SECOND)
            assert f"No topic route info in name server for the topic: %RETRY%{SECOND}" in unknown
            assert not progress(unknown)
            names.mqadmin("updateSubGroup", "-c", "DefaultCluster", "-g", SECOND)
            names.mqadmin("updateTopic", "-c", "DefaultCluster", "-t", f"%RETRY%{SECOND}", "-r", "1", "-w", "1")
            text = until(progress, lambda: names.mqadmin("consumerProgress", "-g", SECOND))
            assert progress(text) == dict.fromkeys(range(4), ("broker-a", 3, 1)), text

            # The broker keeps the offsets now, so it is told. What it has stored says where it listens.
            put(names, "t", [b"y"] * 8, queues=4)
            with MessageStore.open_read_only(root) as store:
                soon(lambda: [store.max_offset("t", each) for each in range(4)], lambda ends: ends == [5] * 4)
            read_with(root, FIRST, 20)
            there = dict.fromkeys(range(4), ("broker-a", 5, 5))
            text = until(lambda text: progress(text) == there, lambda: names.mqadmin("consumerProgress", "-g", FIRST))
            assert "Diff Total: 0" in text


def test_settings_of_groups_go_both_ways(memory: Path, root: Path) -> None:
    """A broker has what we altered, mqadmin alters it through the broker, and we have that; meanwhile nobody else may."""
    need(NEWEST, java_build.tools_classpath)
    with NameServer(NEWEST, memory / "names") as names:
        broker = RealBroker(NEWEST, memory / "broker", root, names)
        config = StoreConfig.load(broker.conf)
        with MessageStore.open(root, config) as store:
            store.put_message(Message("t", b"x", queue_id=0))
            store.create_group(FIRST, retry_max_times=3, retry_queue_nums=2)
        with broker:
            COUNTS.stores += 1
            asked = ("updateSubGroup", "-c", "DefaultCluster", "-g", FIRST, "-r", "7", "-q", "5", "-s", "false")
            found = until(lambda text: "success" in text, lambda: names.mqadmin(*asked))
            assert "retryMaxTimes=7" in found
            command = [sys.executable, "-m", "pyspark_messagestore.command", "group", "alter", str(root), FIRST]
            refused = subprocess.run(
                [*command, "--consume", "--wait", "1s"], capture_output=True, text=True, check=False
            )
            assert refused.returncode == 3
            assert f"mqadmin updateSubGroup -b HOST:PORT -g {FIRST} -s true" in refused.stderr
        with MessageStore.open(root, config) as store:
            theirs = store.group_config(FIRST)
            assert theirs is not None
            assert (theirs.retry_max_times, theirs.retry_queue_nums, theirs.consume_enable) == (7, 5, False)
            store.alter_group(FIRST, retry_max_times=1)
        with broker:
            text = until(lambda text: "retryMaxTimes" in text, lambda: names.mqadmin("getConsumerConfig", "-g", FIRST))
            assert re.search(r"retryMaxTimes\s*=\s*1\b", text), text
            assert re.search(r"retryQueueNums\s*=\s*5\b", text), text
