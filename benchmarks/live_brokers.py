"""Source and sink beside RocketMQ's own Java clients, at a broker that runs.

    source   all messages of a topic with 4 queues, 1 KB each, four columns: beside DefaultLitePullConsumer
    sink     200 B a message, 500 in a request, to 4 queues: beside DefaultMQProducer.send(batch)
    copy     the messages of `source` into an archive by `messagestore copy`, a process from its start to its end
    arrivals how long a put takes at a pace, while nobody reads, and while a reader follows from the end; and from the
             beginning of the put until the reader has the message

Broker, name server and the producer of `arrivals` share a core; the client that is measured has another one, if the
machine has two. What is compared takes turns, and a round that does not count comes first. The source is called as
Spark calls it, driver and task in one process, so Spark's own planning is not in the figures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import Rounds, Settings, Taken, timed, title
from benchmarks.peers import tools
from benchmarks.peers.jvms import RocketMqClients

_QUEUES = 4
_SOURCE_SIZE, _SINK_SIZE, _PUT_SIZE = 1000, 200, 1000
_REQUEST = 500
_FIELDS = ("body", "tags", "queueId", "queueOffset")
_PAUSES_MS = {"busy": 2, "idle": 100}
"""Between two puts. With the longer one, a reader waits for each message."""
_CORES = sorted(os.sched_getaffinity(0))
_TIME = struct.Struct(">d")
_CONF = """
brokerName=broker-a
autoCreateTopicEnable=false
mappedFileSizeCommitLog=1073741824
mappedFileSizeConsumeQueue=6000000
maxHashSlotNum=5000000
maxIndexNum=20000000
"""


def run(name: str, settings: Settings) -> None:
    """Measure one of the four."""
    try:
        jars = tools.rocketmq_classpath()
    except tools.CannotHaveError as error:
        print(f"left out: {error}", file=sys.stderr)
        return

    with _cluster(settings.folder) as (names, broker), _on_core(1), contextlib.ExitStack() as stack:
        java = stack.enter_context(contextlib.closing(RocketMqClients(settings.folder / "java", jars, names)))
        with _on_core(0):
            producer = RocketMqClients(settings.folder / "producer", jars, names)
        stack.enter_context(contextlib.closing(producer))
        race = _Race(settings, names, broker, java, producer)
        {"source": race.source, "sink": race.sink, "copy": race.copy, "arrivals": race.arrivals}[name]()


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The address of a name server; the name server and its broker, whose JVM is not that of the tests."""
    from interop import java_build
    from interop.real_broker import NameServer, RealBroker

    flags = ("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g")
    with _on_core(0), contextlib.ExitStack() as stack:
        names = stack.enter_context(NameServer(java_build.NEWEST, folder / "names"))
        broker = RealBroker(
            java_build.NEWEST, folder / "broker", folder / "broker" / "store", names, more=_CONF, flags=flags
        )
        yield str(names), (names, stack.enter_context(broker))


@contextlib.contextmanager
def _on_core(number: int) -> Iterator[None]:
    """What begins within the block runs on one core, and so does this process."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_CORES[number % len(_CORES)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Race:
    """What takes turns at one broker."""

    def __init__(
        self, settings: Settings, names: str, broker: Any, java: RocketMqClients, producer: RocketMqClients
    ) -> None:
        self.settings, self.names, self.broker, self.java, self.producer = settings, names, broker, java, producer
        self.rounds = Rounds()
        self._batch_ids = itertools.count()

    def _topic(self, topic: str) -> str:
        from interop.live import create_topic

        name_server, broker = self.broker
        create_topic(name_server, [broker], topic, _QUEUES)
        return topic

    def _take_turns(self, name: str, count: int, ours: Callable[[], Taken], theirs: Callable[[], Taken]) -> None:
        """Rounds of two that do the same; in each, the other one begins."""
        turns = [(name, ours), (f"{name}.java", theirs)]
        for number in range(self.settings.rounds + 1):
            for each, run in turns if number % 2 else reversed(turns):
                taken = run()
                if number:
                    self.rounds.add_rate(each, count, taken)

    # ---- source

    def source(self) -> None:
        count = self.settings.rows // 5
        title(f"{count:,} messages of {_SOURCE_SIZE} B in {_QUEUES} queues, read with the columns {', '.join(_FIELDS)}")
        topic = self._filled(count)

        def ours() -> Taken:
            taken, found = timed(self._read, topic)
            if found != count:
                raise AssertionError(f"found {found} messages; put were {count}")
            return taken

        self._take_turns("live.source", count, ours, lambda: self.java.call("read", topic=topic, count=count))
        self.rounds.report("live.source.java", "rows/s")
        self.rounds.report("live.source", "rows/s", floor="live.source.java")

    def _filled(self, count: int) -> str:
        """A topic with so many messages, all of which its readers see."""
        topic = self._topic("source")
        self._send(topic, count, _SOURCE_SIZE)
        _await(lambda: self._read(topic), count)  # a broker dispatches to its queues after it has answered
        return topic

    def copy(self) -> None:
        count = self.settings.rows // 5
        title(f"{count:,} messages of {_SOURCE_SIZE} B in {_QUEUES} queues, copied into an archive with SYNC_FLUSH")
        topic = self._filled(count)
        for number in range(self.settings.rounds + 1):
            archive = self.settings.folder / f"archive-{number}"
            taken, found = self._copied(topic, archive)
            shutil.rmtree(archive)
            if found != count:
                raise AssertionError(f"copied {found} messages; put were {count}")
            read, _ = timed(self._read, topic)
            if number:
                self.rounds.add_rate("live.copy", count, taken)
                self.rounds.add_rate("live.copy.read", count, read)
        self.rounds.report("live.copy.read", "rows/s")
        self.rounds.report("live.copy", "rows/s", floor="live.copy.read")

    def _copied(self, topic: str, archive: Path) -> tuple[Taken, int]:
        command = [sys.executable, "-m", "pyspark_messagestore.cli.main", "copy"]
        command += [f"rocketmq://{self.names}", topic, str(archive), "--json"]
        start_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        taken_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise AssertionError(f"the copy ended with {done.returncode}: {done.stderr[-1000:]}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Taken(taken_s, cpu_s), sum(json.loads(line)["messages"] for line in done.stdout.splitlines())

    def _options(self, topic: str, **more: str) -> dict[str, str]:
        return {"path": f"rocketmq://{self.names}", "subscribe": topic, "startingOffsets": "earliest", **more}

    def _read(self, topic: str) -> int:
        from messagestore.spi import STORES
        from pyspark_messagestore.options.table import source_options
        from pyspark_messagestore.source.cluster import ClusterBatchReader

        reader = ClusterBatchReader(source_options(self._options(topic)), _projection(), STORES)
        return sum(rows.num_rows for part in reader.partitions() for rows in reader.read(part))

    # ---- sink

    def sink(self) -> None:
        count = self.settings.rows // 5
        title(f"{count:,} messages of {_SINK_SIZE} B, written to {_QUEUES} queues, {_REQUEST} in a request")
        topic = self._topic("sink")
        self._take_turns(
            "live.sink",
            count,
            lambda: self._send(topic, count, _SINK_SIZE),
            lambda: self.java.call("send", topic=topic, count=count, size=_SINK_SIZE, batch=_REQUEST),
        )
        self.rounds.report("live.sink.java", "rows/s")
        self.rounds.report("live.sink", "rows/s", floor="live.sink.java")

    def _send(self, topic: str, count: int, size: int) -> Taken:
        """Send a micro-batch as a task of the sink does, with what a repeat would look up."""
        from interop.sender import sent, sink_of

        data = np.random.default_rng(1).bytes(count * size)
        offsets = np.arange(0, (count + 1) * size, size, dtype=np.int32)
        bodies = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
        batch = pa.record_batch({"body": bodies})
        given = {
            "path": f"rocketmq://{self.names}",
            "topic": topic,
            "lookupDir": str(self.settings.folder / "lookups"),
        }
        sink = sink_of(given, (("body", "binary"),))
        parts = [batch.slice(first, 10_000) for first in range(0, count, 10_000)]
        taken, message = timed(sent, sink, next(self._batch_ids), *parts)
        if message.rows != count:
            raise AssertionError(f"sent {message.rows} messages of {count}")
        return taken

    # ---- arrival, and what a reader costs the puts

    def arrivals(self) -> None:
        title(
            f"puts of {_PUT_SIZE} B, one each {' or '.join(map(str, _PAUSES_MS.values()))} ms, and readers at the end"
        )
        topics = map("puts-{}".format, itertools.count())  # a new one each time: its end is its beginning
        for pace, pause_ms in _PAUSES_MS.items():
            count = (600 if self.settings.quick else 6000) // pause_ms
            for number in range(self.settings.rounds + 1):
                for name in ("nobody", "source", "java"):
                    topic = self._topic(next(topics))
                    times_ms, delays_ms = self._put(topic, name, count, pause_ms)
                    if number:
                        self._add(f"live.{pace}.put.{name}", times_ms)
                        self._add(f"live.{pace}.arrival.{name}", delays_ms)
            for percentile in (50, 99):
                nobody, java = f"live.{pace}.put.nobody.p{percentile}", f"live.{pace}.arrival.java.p{percentile}"
                self.rounds.report(nobody, "ms", lower_is_better=True)
                for name in ("source", "java"):
                    put = f"live.{pace}.put.{name}.p{percentile}"
                    self.rounds.report(put, "ms", floor=nobody, lower_is_better=True)
                self.rounds.report(java, "ms", lower_is_better=True)
                ours = f"live.{pace}.arrival.source.p{percentile}"
                self.rounds.report(ours, "ms", floor=java, lower_is_better=True)

    def _add(self, name: str, times_ms: list[float]) -> None:
        for percentile in (50, 99) if times_ms else ():
            self.rounds.add(f"{name}.p{percentile}", float(np.percentile(times_ms, percentile)))

    def _put(self, topic: str, reader: str, count: int, pause_ms: int) -> tuple[list[float], list[float]]:
        """Put messages; how long each put took, and how long each message was on its way to the reader, in ms."""
        asked = {"topic": topic, "count": count, "size": _PUT_SIZE, "pauseMicros": 1000 * pause_ms}
        if reader == "source":
            with self._following(topic) as delays_s:
                times_ms = self.producer.ask("put", **asked)["times_ms"]
                _await(delays_s.__len__, count)
        elif reader == "java":
            self.java.ask("follow", topic=topic)
            times_ms = self.producer.ask("put", **asked)["times_ms"]
            delays_s = self.java.ask("rest", count=count)["delays_s"]
        else:
            times_ms, delays_s = self.producer.ask("put", **asked)["times_ms"], []
        return times_ms, [1000 * each for each in delays_s]

    @contextlib.contextmanager
    def _following(self, topic: str) -> Iterator[list[float]]:
        """A stream that is at its end; the delay of each message that comes, in seconds."""
        from messagestore.spi import STORES
        from pyspark_messagestore.options.table import source_options
        from pyspark_messagestore.source.cluster import ClusterStreamReader

        options = source_options(self._options(topic, startingOffsets="latest"))
        reader = ClusterStreamReader(options, _projection(), STORES)
        start, delays, ends, failures = reader.initialOffset(), list[float](), threading.Event(), list[Exception]()

        def follow(start: Any) -> None:
            try:
                while not ends.is_set():
                    end = reader.latestOffset(start, reader.getDefaultReadLimit())
                    if end == start:
                        time.sleep(0.01)  # Spark's own pause between two looks
                        continue
                    for part in reader.partitions(start, end):
                        for rows in reader.read(part):
                            now_s = time.time()
                            delays.extend(now_s - _TIME.unpack_from(body)[0] for body in rows["body"].to_pylist())
                    start = end
            except Exception as error:  # noqa: BLE001 - the thread that waits raises it
                failures.append(error)

        thread = threading.Thread(target=follow, args=(start,))
        thread.start()
        try:
            yield delays
        finally:
            ends.set()
            thread.join()
            reader.stop()
        if failures:
            raise failures[0]


def _await(found: Callable[[], int], count: int) -> None:
    until_s = time.monotonic() + 60
    while (seen := found()) < count:
        if time.monotonic() > until_s:
            raise AssertionError(f"{seen} of {count} messages are there")
        time.sleep(0.05)


def _projection() -> Any:
    from pyspark.sql.types import StructType

    from pyspark_messagestore.source.schema import Projection

    kinds = {"body": "binary", "tags": "string", "queueId": "integer", "queueOffset": "long"}
    schema = StructType()
    for name in _FIELDS:
        schema = schema.add(name, kinds[name])
    return Projection.of(schema)
