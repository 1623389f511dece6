"""What single calls to a store on another host cost, beside the same calls on a folder, without Spark.

commit      stage and commit ten rows
ends        what an idle stream asks ninety times a second: the first time in 50 ms, and again
endpoint    the processor time of both sides for a row that is gathered, or staged; a commit costs the same on a server
memory      the server's, idle and with 64 readers that take the first part of a read and stop
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.measure import Rounds, Settings, settle, title
from benchmarks.messages import QUEUE_COUNT, TOPIC, table
from benchmarks.spark_afar import server
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig
from messagestore.format.rows import divided
from messagestore.spi import LOCAL_STORES, Range, Stores, Write, driver_token, encode, store_host_of
from messagestore.spi.remote import RemoteStores
from pyspark_messagestore.sink.writers import CHUNK_SIZE

COMMITS = 200
ASKED = 200
STOPPED = 64
_MEASURED = 5
"""So often are a store's rows read, and staged, for the processor time of a row."""


def run(settings: Settings) -> None:
    """Measure commits, ends and memory."""
    title("single calls, by folder and by URL")
    rounds = Rounds()
    commits = 20 if settings.quick else COMMITS
    for number in range(settings.rounds):
        root = settings.folder / f"store-{number}"
        with MessageStore.open(root) as store:
            store.create_topic(TOPIC, QUEUE_COUNT)
            store.append_batch(MessageColumns.from_arrow(table(settings.rows), topic=TOPIC))
        settle(settings.folder)
        with server(root, settings.folder / f"server-{number}", tls=False) as (url, _, pid):
            rounds.add("afar.memory.idle", _memory(pid))
            places: tuple[tuple[str, Stores, str], ...] = (
                ("local", LOCAL_STORES, str(root)),
                ("http", RemoteStores(), url),
            )
            for name, stores, path in places:
                rounds.add(f"afar.commit.{name}", _commit_ms(stores, path, f"{name}-{number}", commits))
                first_us, again_us = _ends_us(stores, path)
                rounds.add(f"afar.ends.first.{name}", first_us)
                rounds.add(f"afar.ends.again.{name}", again_us)
                rounds.add(f"afar.gather.{name}", _gather_ns(stores, path, pid, settings))
                rounds.add(f"afar.stage.{name}", _stage_ns(stores, path, pid, f"rows-{name}-{number}", settings))
            for what in ("gather", "stage"):
                rounds.add(
                    f"afar.endpoint.{what}",
                    rounds.values[f"afar.{what}.http"][-1] - rounds.values[f"afar.{what}.local"][-1],
                )
            rounds.add("afar.memory.stopped", _stopped(url, pid, settings.rows))

    rounds.report("afar.commit.local", "ms", lower_is_better=True)
    rounds.report("afar.commit.http", "ms", floor="afar.commit.local", lower_is_better=True)
    for when in ("first", "again"):
        rounds.report(f"afar.ends.{when}.local", "us", lower_is_better=True)
        goal = 2000.0 if when == "first" else 20.0
        rounds.report(f"afar.ends.{when}.http", "us", floor=f"afar.ends.{when}.local", goal=goal, lower_is_better=True)
    for what, goal in (("gather", 110.0), ("stage", 120.0)):
        rounds.report(f"afar.{what}.local", "ns/row", lower_is_better=True)
        rounds.report(f"afar.{what}.http", "ns/row", floor=f"afar.{what}.local", lower_is_better=True)
        rounds.report(f"afar.endpoint.{what}", "ns/row", goal=goal, lower_is_better=True)
    rounds.report("afar.memory.idle", "MB", goal=150.0, lower_is_better=True)
    rounds.report("afar.memory.stopped", "MB", goal=450.0, lower_is_better=True)


def _commit_ms(stores: Stores, path: str, app: str, count: int) -> float:
    """The best commit of ten rows, with its one file."""
    writer = stores.writer(path, StoreConfig(), staging_ttl_s=3600.0)
    found = writer.prepare()
    messages, host = MessageColumns.from_arrow(table(10), topic=TOPIC), store_host_of(found.config)
    best_s = float("inf")
    for version in range(count):
        begin_s = time.perf_counter()
        with writer.stage(Write(driver_token(), app, version), found.store_id) as staging:
            staging.write(encode(messages, limits=found.config, store_host=host, born_host=host))
            file = staging.finish()
        writer.commit([file], BatchRequest(app_id=app, version=version), found.store_id)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 1000 * best_s


def _ends_us(stores: Stores, path: str) -> tuple[float, float]:
    """The first call in 50 ms, and others: the best of many."""
    first_s, again_s = [], []
    with closing(stores.reader(path)) as reader:
        known = reader.ends([TOPIC])
        for _ in range(20):
            time.sleep(0.06)
            for taken in (first_s, again_s):
                begin_s = time.perf_counter()
                known = reader.ends([TOPIC], known)
                taken.append(time.perf_counter() - begin_s)
    return 1e6 * min(first_s), 1e6 * min(again_s)


def _gather_ns(stores: Stores, path: str, pid: int, settings: Settings) -> float:
    """The processor time of this process and of the server for each row of a read, as a source task reads."""
    ranges = [Range(TOPIC, queue_id, 0, settings.rows // QUEUE_COUNT) for queue_id in range(QUEUE_COUNT)]
    with closing(stores.reader(path)) as reader:
        best_ns = math.inf
        for _ in range(_MEASURED):
            begin_ns = _cpu_ns(pid)
            count = sum(len(part.sizes) for part in reader.gather(ranges))
            best_ns = min(best_ns, (_cpu_ns(pid) - begin_ns) / count)
        return best_ns


def _stage_ns(stores: Stores, path: str, pid: int, app: str, settings: Settings) -> float:
    """The same for rows that are encoded already and are staged, as a task does, and deleted again.

    They are not committed: the log would grow with each round, and a page of the disk's cache that is new costs a
    virtual machine three times as much as one that was used before.
    """
    writer = stores.writer(path, StoreConfig(), staging_ttl_s=3600.0)
    found = writer.prepare()
    messages, host = MessageColumns.from_arrow(table(settings.rows), topic=TOPIC), store_host_of(found.config)
    rows = encode(messages, limits=found.config, store_host=host, born_host=host)
    chunks = list(divided(rows, CHUNK_SIZE))
    best_ns = math.inf
    for version in range(_MEASURED):
        begin_ns = _cpu_ns(pid)
        with writer.stage(Write(driver_token(), app, version), found.store_id) as staging:
            for chunk in chunks:
                staging.write(chunk)
            file = staging.finish()
        best_ns = min(best_ns, (_cpu_ns(pid) - begin_ns) / settings.rows)
        writer.abort([file.name], found.store_id)
    return best_ns


def _cpu_ns(pid: int) -> int:
    """The processor time of this process and of all threads of another one."""
    threads = Path("/proc", str(pid), "task").glob("*/schedstat")
    return time.process_time_ns() + sum(int(thread.read_text().split()[0]) for thread in threads)


def _stopped(url: str, pid: int, rows: int) -> float:
    """The server's memory while readers that took one part do not go on."""
    ranges = [Range(TOPIC, queue_id, 0, rows // QUEUE_COUNT) for queue_id in range(QUEUE_COUNT)]
    with ExitStack() as stack:
        for _ in range(STOPPED):
            reader = stack.enter_context(closing(RemoteStores().reader(url)))
            parts = reader.gather(ranges)
            stack.callback(parts.close)  # type: ignore[attr-defined]
            next(parts)
        time.sleep(1.0)  # the server fills what it may
        return _memory(pid)


def _memory(pid: int) -> float:
    """Resident memory in MB."""
    for line in Path("/proc", str(pid), "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    raise LookupError(f"process {pid} has no memory")
