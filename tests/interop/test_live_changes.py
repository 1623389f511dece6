"""What changes at brokers while one reader goes on: queues and brokers that come, flow control, retention, a deletion."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from interop import java_build
from interop.conftest import need
from interop.java_build import NEWEST
from interop.java_store import COUNTS
from interop.live import WAIT_S, broker, create_topic, put, soon
from interop.real_broker import NameServer
from interop.test_live_source import FIELDS, Query, bodies
from messagestore import BrokerError, StoreUnavailableError, StoreWentBackwardsError, UnknownTopicError
from messagestore.remoting import codes
from messagestore.remoting.replicas import Replicas
from stream_steps import again

ALWAYS = ";".join(f"{hour:02d}" for hour in range(24))
RETENTION = f"fileReservedTime=0\ndeleteWhen={ALWAYS}\ncleanResourceInterval=300\ndeleteCommitLogFilesInterval=10\n"
"""Each segment but the newest is deleted as soon as it is seen."""
FLOW_CONTROL = "pullMessageThreadPoolNums=1\npullThreadPoolQueueCapacity=3\n"
"""One pull is answered at a time, three wait, and all others are refused."""


@pytest.fixture
def names(memory: Path) -> Iterator[NameServer]:
    need(NEWEST, java_build.tools_classpath)
    with NameServer(NEWEST, memory / "names") as server:
        yield server


class Running(Query):
    """A stream that is never started again."""

    def __init__(self, names: NameServer, **options: str) -> None:
        super().__init__(names, **options)
        self.running = self.reader()

    def step(self) -> int:
        """A micro-batch; returns how many messages came."""
        before = len(self.rows)
        self.start = self.start or again(self.running.initialOffset())
        end = again(self.running.latestOffset(self.start, self.running.getDefaultReadLimit()))
        for partition in self.running.partitions(self.start, end) if end != self.start else []:
            for rows in self.running.read(partition):
                self.rows += zip(*(rows[name].to_pylist() for name in FIELDS), strict=True)
        self.start = end
        COUNTS.messages += len(self.rows) - before
        return len(self.rows) - before

    def until(self, count: int) -> None:
        """Read on until so many messages have come."""
        until_s = time.monotonic() + WAIT_S
        while len(self.rows) < count:
            assert time.monotonic() < until_s, f"{len(self.rows)} of {count} messages"
            self.step() or time.sleep(0.02)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.stop()


def test_queues_and_brokers_that_come_under_a_reader(memory: Path, names: NameServer) -> None:
    first, second, third = bodies("first", 60), bodies("second", 80), bodies("third", 50)
    with broker(NEWEST, memory, names) as a, Running(names) as query:
        create_topic(names, [a], "t")
        put(names, "t", first)
        query.until(60)
        create_topic(names, [a], "t", 4)
        put(names, "t", second, queues=4)
        query.until(140)
        with broker(NEWEST, memory, names, "broker-b") as b:
            create_topic(names, [a, b], "t", 4)
            put(names, "t", third, "broker-b", queues=4)
            query.until(190)
            query.check(*first, *second, *third)
    COUNTS.stores += 2


def test_a_broker_that_refuses_pulls_while_it_is_busy(
    memory: Path, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SYSTEM_BUSY: the pulls are sent again, and each message comes once."""
    refused: list[int] = []
    real = Replicas.may_answer_later

    def noted(replicas: Replicas, code: int) -> bool:
        refused.append(code)
        return real(replicas, code)

    monkeypatch.setattr(Replicas, "may_answer_later", noted)
    wanted = bodies("x", 3000)
    with broker(NEWEST, memory, names, more=FLOW_CONTROL) as a:
        create_topic(names, [a], "t")
        put(names, "t", wanted)
        query = Query(names, retryTimeout="90s")
        assert query.run() == 3000
        query.check(*wanted)
    assert codes.SYSTEM_BUSY in refused
    COUNTS.stores += 1


@contextlib.contextmanager
def sending(names: NameServer, size: int) -> Iterator[list[bytes]]:
    """Messages that are put as long as the block lasts, or until they are refused; those that were answered."""
    sent: list[bytes] = []
    ends = threading.Event()

    def send() -> None:
        with contextlib.suppress(BrokerError, StoreUnavailableError, UnknownTopicError):
            while not ends.is_set():
                some = [b"%08d " % (len(sent) + number) + b"." * size for number in range(100)]
                put(names, "t", some)
                sent.extend(some)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        ends.set()
        thread.join()


def test_retention_that_is_faster_than_a_reader(
    memory: Path, names: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    """With failOnDataLoss=false, what was deleted is counted, and all else comes once and in order."""
    caplog.set_level(logging.WARNING)
    with (
        broker(NEWEST, memory, names, more=RETENTION) as a,
        Running(names, failOnDataLoss="false", maxOffsetsPerTrigger="150") as query,
    ):
        create_topic(names, [a], "t")
        gaps = re.compile(r"retention has deleted (\d+) messages")
        until_s = time.monotonic() + 2 * WAIT_S
        with sending(names, 8000) as sent:
            soon(lambda: len(sent), lambda count: count > 300)
            while not (gaps.search(caplog.text) and len(query.rows) > 600):
                assert time.monotonic() < until_s, f"{len(query.rows)} rows, {len(sent)} sent"
                query.step()
                time.sleep(0.1)
        lost = sum(map(int, gaps.findall(caplog.text)))
        while len(query.rows) + lost < len(sent):
            assert time.monotonic() < until_s, f"{len(query.rows)} and {lost} of {len(sent)}"
            query.step() or time.sleep(0.05)
            lost = sum(map(int, gaps.findall(caplog.text)))
    assert len(query.rows) + lost == len(sent)
    found = [int(body[:8]) for *_, body in query.rows]
    assert len(set(found)) == len(found)
    for queue_id in range(2):
        numbers = [(number, body) for _, queue, number, body in query.rows if queue == queue_id]
        assert numbers == sorted(numbers)
        assert all(body == sent[2 * number + queue_id] for number, body in numbers)
    COUNTS.stores += 1


def test_a_topic_that_is_deleted_under_load(memory: Path, names: NameServer) -> None:
    """Whoever reads it is told so, and has read each message once until then."""
    with broker(NEWEST, memory, names) as a, Running(names, retryTimeout="5s") as query:
        create_topic(names, [a], "t")
        with sending(names, 100) as sent:
            query.until(200)
            names.mqadmin("deleteTopic", "-c", "DefaultCluster", "-t", "t")
            with pytest.raises((StoreWentBackwardsError, UnknownTopicError, BrokerError), match=r"\bt\b"):
                query.until(1 << 40)
        queues: dict[int, list[int]] = {}
        for _, queue_id, number, body in query.rows:
            queues.setdefault(queue_id, []).append(number)
            assert int(body[:8]) == 2 * number + queue_id
        assert all(numbers == [*range(len(numbers))] for numbers in queues.values())
        assert len(sent) >= 100
    COUNTS.stores += 1
