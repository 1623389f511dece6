"""What a consumer group does: how fast one consumer reads, how soon it has a message, commits, and what a kill costs.

If a Kafka broker can be had, kafka-python reads bodies of the same size from it in the same rounds, with one process
and polls of the same size. Its broker runs on this machine; a consumer of ours reads the files itself.

The delay of a message is the time from the beginning of a put, in this process, until a worker that waits in another
process has it from `poll`; SYNC_FLUSH, so the sync is part of it. A takeover is the time from the kill of one of four
workers until others have got a message of each of its queues.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Rounds, Settings, settle, timed, title
from benchmarks.messages import BODY_SIZE, QUEUE_COUNT, TOPIC, sliced, table
from messagestore import BatchRequest, Consumer, Message, MessageColumns, MessageStore
from messagestore.read_only_store import CHUNK_ROWS

_POLL = 500
_GOAL_READ, _GOAL_OBJECTS, _GOAL_MS, _GOAL_TAKEOVER_S = 1e6, 250e3, 5.0, 1.0
_DELAYS, _COMMITS, _WORKERS = 300, 300, 4
_PAUSE_S = 0.01
_KAFKA_ROWS = 100_000


def run(settings: Settings) -> None:
    """Measure all four."""
    title(f"consume {settings.rows:,} messages of {QUEUE_COUNT} queues, {_POLL} with each poll")
    root, rounds = settings.folder / "consume", Rounds()
    parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(table(settings.rows), CHUNK_ROWS))
    with MessageStore.open(root) as store:
        size = store.append_batch(parts, BatchRequest(app_id="bench")).appended_bytes

    with contextlib.ExitStack() as stack:
        reads: dict[str, tuple[int, Callable[[], int]]] = {
            "consume.poll": (settings.rows, lambda: _polled(root, lambda _: None)),
            "consume.objects": (settings.rows, lambda: _polled(root, _look)),
            "consume.iteration": (settings.rows, lambda: _iterated(root)),
        }
        broker = stack.enter_context(_kafka(settings))
        if broker is not None:
            count = min(settings.rows, _KAFKA_ROWS)
            _fill(broker, count)
            reads["consume.kafka_python.poll"] = count, lambda: _kafka_polled(broker, count)

        for number in range(settings.rounds + 1):
            into = rounds if number else Rounds()  # the first round warms up and is not counted
            for name, (count, read) in reads.items():
                settle(settings.folder, size)
                taken, found = timed(read)
                if found != count:
                    raise AssertionError(f"{name}: read {found} messages, {count} are there")
                into.add_rate(name, count, taken)

    for number in range(settings.rounds):
        settle(settings.folder)
        delays_ms = 1e3 * np.asarray(_delays(settings.folder / f"w{number}"))
        for percentile in (50, 99):
            rounds.add(f"consume.arrival.p{percentile}", float(np.percentile(delays_ms, percentile)))
        _add_commits(rounds, settings.folder / f"c{number}")
        rounds.add("consume.takeover", _takeover(settings.folder / f"t{number}"))

    peer = "consume.kafka_python.poll" if "consume.kafka_python.poll" in reads else None
    rounds.report("consume.poll", "messages/s", goal=_GOAL_READ, floor=peer)
    rounds.report("consume.objects", "messages/s", goal=_GOAL_OBJECTS, floor=peer)
    rounds.report("consume.iteration", "messages/s", floor=peer)
    if peer is not None:
        rounds.report(peer, "messages/s")
    rounds.report("consume.arrival.p50", "ms", lower_is_better=True)
    rounds.report("consume.arrival.p99", "ms", goal=_GOAL_MS, lower_is_better=True)
    rounds.report("consume.floor.sync_puts", "puts/s")
    rounds.report("consume.commits", "commits/s", floor="consume.floor.sync_puts", goal_ratio=1.0)
    rounds.report("consume.takeover", "s", goal=_GOAL_TAKEOVER_S, lower_is_better=True)


# ---- how fast one consumer reads


def _polled(root: Path, each: Callable[[Any], object]) -> int:
    count = 0
    with Consumer(root, "polls", TOPIC) as consumer:
        while found := consumer.poll(0.0, _POLL):
            for messages in found.values():
                count += len(messages)
                each(messages)
    return count


def _look(messages: list[Any]) -> None:
    """Use what a program uses of a message."""
    for message in messages:
        _ = message.body, message.tags, message.keys


def _iterated(root: Path) -> int:
    with Consumer(root, "iterates", TOPIC, consumer_timeout=0.0) as consumer:
        return sum(1 for _ in consumer)


# ---- kafka-python


@contextlib.contextmanager
def _kafka(settings: Settings) -> Iterator[str | None]:
    """The address of a Kafka broker; None in a quick run, and where none can be had, which is said."""
    if settings.quick:
        yield None
        return
    from benchmarks.peers import kafka_broker, tools

    try:
        import kafka  # noqa: F401

        jars = tools.classpath_of("broker")
    except (ImportError, tools.CannotHaveError) as error:
        print(f"without kafka-python: {error}", file=sys.stderr)
        yield None
        return
    with kafka_broker.running(jars, settings.folder / "kafka") as broker:
        yield broker.servers


def _fill(servers: str, count: int) -> None:
    from kafka import KafkaAdminClient, KafkaProducer
    from kafka.admin import NewTopic

    admin = KafkaAdminClient(bootstrap_servers=servers)
    admin.create_topics([NewTopic(TOPIC, QUEUE_COUNT, 1)])
    admin.close()
    producer = KafkaProducer(bootstrap_servers=servers, linger_ms=20, batch_size=1 << 17)
    body = os.urandom(BODY_SIZE)
    for number in range(count):
        producer.send(TOPIC, body, partition=number % QUEUE_COUNT)
    producer.flush()
    producer.close()


def _kafka_polled(servers: str, count: int) -> int:
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest", max_poll_records=_POLL)
    consumer.assign([TopicPartition(TOPIC, number) for number in range(QUEUE_COUNT)])
    consumer.seek_to_beginning()
    found, until_s = 0, time.monotonic() + 120
    while found < count and time.monotonic() < until_s:
        found += sum(map(len, consumer.poll(timeout_ms=1000).values()))
    consumer.close()
    return found


# ---- workers


class _Worker:
    """A process of the group, and what it has said."""

    def __init__(self, root: Path, topic: str) -> None:
        command = [sys.executable, "-m", "benchmarks.one_worker", str(root), topic]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        self.delays: list[float] = []
        self.queues: set[int] = set()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sign, value = line.split()
            if sign == "=":
                self.delays.append(float(value))
            elif sign == "+":
                self.queues.add(int(value))
            else:
                self.queues.discard(int(value))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()


@contextlib.contextmanager
def _workers(root: Path, topic: str, count: int) -> Iterator[list[_Worker]]:
    """Workers that have shared all queues of a topic."""
    started = [_Worker(root, topic) for _ in range(count)]
    try:
        _await(lambda: sorted(len(worker.queues) for worker in started) == [QUEUE_COUNT // count] * count)
        yield started
    finally:
        for worker in started:
            worker.kill()


def _await(is_so: Callable[[], bool]) -> None:
    until_s = time.perf_counter() + 60
    while not is_so():
        if time.perf_counter() > until_s:
            raise AssertionError("the workers do not come to it within a minute")
        time.sleep(0.001)


def _put(store: MessageStore, topic: str, queue_id: int = 0) -> None:
    store.put_message(Message(topic, repr(time.perf_counter()).encode(), queue_id=queue_id))


def _delays(root: Path) -> list[float]:
    """Seconds from each put to its message in another process, while nothing else is to do."""
    with MessageStore.open(root) as store:
        for queue_id in range(QUEUE_COUNT):
            _put(store, "arrivals", queue_id)
        with _workers(root, "arrivals", 1) as (worker,):
            _await(lambda: len(worker.delays) == QUEUE_COUNT)
            for number in range(_DELAYS):
                time.sleep(_PAUSE_S)
                _put(store, "arrivals", number % QUEUE_COUNT)
            _await(lambda: len(worker.delays) == QUEUE_COUNT + _DELAYS)
        return worker.delays[QUEUE_COUNT:]


def _add_commits(rounds: Rounds, root: Path) -> None:
    """Puts and commits of one message each, by turns."""
    put_s = commit_s = 0.0
    with MessageStore.open(root) as store, Consumer(root, "commits", "c") as consumer:
        for _ in range(_COMMITS):
            begun_s = time.perf_counter()
            _put(store, "c")
            put_s += time.perf_counter() - begun_s
            while not consumer.poll(1.0):
                pass
            begun_s = time.perf_counter()
            consumer.commit()
            commit_s += time.perf_counter() - begun_s
    rounds.add("consume.floor.sync_puts", _COMMITS / put_s)
    rounds.add("consume.commits", _COMMITS / commit_s)


def _takeover(root: Path) -> float:
    """Seconds from the kill of a worker until others have its queues."""
    with MessageStore.open(root) as store:
        for queue_id in range(QUEUE_COUNT):
            _put(store, "shared", queue_id)
    with _workers(root, "shared", _WORKERS) as (dead, *others):
        begun_s = time.perf_counter()
        dead.kill()
        _await(lambda: set.union(*(worker.queues for worker in others)) == set(range(QUEUE_COUNT)))
        return time.perf_counter() - begun_s
