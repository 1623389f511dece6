"""Kills between Spark, or a copy, and brokers that run: of the driver, of a task, of a broker, and of connections.

    python -m interop.kills --faults 500 --seed 1       # `make live-deep`; `--case 17` is one case alone
    python -m interop.kills --forms rocksdb dledger     # the brokers' forms; with `batch`, the queues of both are batch queues

Two brokers run, and before each stands a proxy that counts the bytes that pass. In each case a query reads topic `in`
from both brokers and writes topic `out` to both, with the connector's own source and sink, which are called as Spark
calls them: the driver is a process, and its tasks run in other ones. Each broker's connections meet one fault, at a
byte that is drawn:

    delay, reset, close, half-open, blackhole    what `crash.proxy` does to one connection
    broker killed       SIGKILL; it is started again at once, on its files
    broker stopped      SIGSTOP for up to some seconds; then it goes on with what it was sent meanwhile
    task killed         SIGKILL to the process that runs the tasks; the task is tried again in another one
    driver killed       SIGKILL to the driver and its tasks; a new driver goes on from the checkpoint

Each fourth case copies `in` into an archive by `messagestore copy` instead, whose process is killed:

    copy killed         SIGKILL to the command; it is run again

No query may fail. In the end, the tasks have read each row of `in` once, whole and in order, and `out` has each row
once. So has the archive. docs/guides/rocketmq-live.md says when a row may be there twice. One of its reasons can occur here: a broker that
was stopped did not show for a second what it had stored. Such doubles are counted on their own; any other fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from crash import proxy
from crash.counts import Counts
from crash.judge import Verdict
from crash.proxy import DOWN, UP, Fault, Proxy
from interop.java_build import NEWEST
from interop.live import BATCH_QUEUES, ROCKSDB, await_route, broker, create_topic, dledger, put, put_batches, soon
from interop.real_broker import NameServer
from messagestore import MessageStore
from messagestore.remoting import Call, Client
from messagestore.spi import STORES, Location, Range
from processes import CONTEXT
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.sink import brokers as sink
from spark_faults.fake_spark import Checkpoint, Driver, QueryFailedError
from spark_faults.processes import Process, connect

BROKERS = ("broker-a", "broker-b")
QUEUES = 2
ROWS = 100
"""The rows of each queue of `in`."""
BATCH_ROWS = 140
BODY_SIZE = 300
ATTEMPTS = 4
"""How often Spark tries a task."""
ANSWER_TIMEOUT_S = 3.0
"""How long a silent broker is waited for here; a user waits for half a minute."""
RETRY_TIMEOUT = "120s"
"""For how long what comes back by itself is waited for, however busy this machine is."""
_ADVERTISED = "127.0.0.2"
"""Where name servers say that brokers are: there the proxies listen."""
_BIND = "bindAddress=127.0.0.1\nbrokerIP1=127.0.0.2\n"
_STOPS_S = (0.3, 1.5, 3.5, 6.0)
_SHOWN_MS = 1000
"""Who looks for a row that may be stored waits for so long (`sends.SETTLE_S`)."""
_ENDS_S = 240.0
_BATCH_SIZE = 8
"""The messages of a batch in batch queues. Steps end within batches."""
FORMS = ("plain", "rocksdb", "dledger", "batch")
_WORKERS = 4
QUERIES, ARCHIVES, DOUBLES = "queries", "archives", "rows twice as the guide says"
_DRIVERS, _TASKS, _COPIES = "driver killed", "task killed", "copy killed"
_KILLED, _STOPPED = "broker killed", "broker stopped"
_WEIGHTS = {**dict.fromkeys(proxy.KINDS, 4), _DRIVERS: 8, _TASKS: 8, _KILLED: 3, _STOPPED: 3}
"""The faults, by how often they are drawn."""
_COPY_WEIGHTS = {**dict.fromkeys(proxy.KINDS, 4), _COPIES: 12, _KILLED: 3, _STOPPED: 3}
_COPY_EACH = 4
_COPY = f"""
import sys
from messagestore.remoting import Call, Client
from pyspark_messagestore.cli import copying
from pyspark_messagestore.cli.main import app
Call.answer.__defaults__ = ({ANSWER_TIMEOUT_S},)
Client.request.__kwdefaults__["timeout_s"] = {ANSWER_TIMEOUT_S}
copying.BATCH_SIZE = 16_000
app(sys.argv[1:])
"""
"""The command in small batches, with this module's patience."""


def body(name: str, queue_id: int, number: int) -> bytes:
    """A row of `in`; what fills it is different in each."""
    text = f"{name[-1]}{queue_id}/{number}/".encode()
    return text + random.Random(text).randbytes((BODY_SIZE - len(text)) // 2).hex().encode()


def form(name: str, kind: str) -> str:
    """The lines that give a broker its form."""
    return {"rocksdb": lambda: ROCKSDB, "dledger": lambda: dledger(name)}.get(kind, str)()


EXPECTED = {
    f"{name[-1]}{queue_id}": [body(name, queue_id, number) for number in range(ROWS)]
    for name in BROKERS
    for queue_id in range(QUEUES)
}
"""The rows of `in`, by their queues."""


class Cluster:
    """A name server, two brokers with a proxy before each, and the topics `in` and `out`."""

    def __init__(self, folder: Path, forms: tuple[str, ...] = ("plain", "plain")) -> None:
        self.folder = folder
        self.names = NameServer(NEWEST, folder / "names")
        self._attributes = BATCH_QUEUES if "batch" in forms else ""
        self.brokers = {
            name: broker(NEWEST, folder, self.names, name, more=_BIND + form(name, kind))
            for name, kind in zip(BROKERS, forms, strict=True)
        }
        self.proxies: dict[str, Proxy] = {}
        self.query: Query | Copy | None = None
        self.passed: dict[type, dict[str, dict[str, list[int]]]] = {}
        """What passed each proxy in a case of each kind without a fault."""
        self.rng = random.Random(0)
        self._timers: list[threading.Timer] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything, until the block ends."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.names)
            for one in self.brokers.values():
                one.begin()
                stack.callback(one.kill)
            for name, one in self.brokers.items():
                one.wait()
                target, listens_on = ("127.0.0.1", one.port), (_ADVERTISED, one.port)
                made = Proxy(target, lambda kind, name=name: self._act(name, kind), listens_on)
                self.proxies[name] = stack.enter_context(made)
            for topic in ("in", "out"):
                create_topic(self.names, [*self.brokers.values()], topic, QUEUES, attributes=self._attributes)
            for name in BROKERS:
                if self._attributes:
                    rows = {queue_id: EXPECTED[f"{name[-1]}{queue_id}"] for queue_id in range(QUEUES)}
                    put_batches(self.names, "in", rows, name, _BATCH_SIZE)
                    continue
                turns = [body(name, queue_id, number) for number in range(ROWS) for queue_id in range(QUEUES)]
                put(self.names, "in", turns, name, queues=QUEUES)
            yield

    def _act(self, name: str, kind: str) -> None:
        """Do a fault that is not a proxy's own. The thread of the broker's proxy calls this."""
        one = self.brokers[name]
        if kind == _KILLED:
            one.kill()
            one.begin()
        elif kind == _STOPPED:
            process = one.process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            timer = threading.Timer(self.rng.choice(_STOPS_S), process.send_signal, [signal.SIGCONT])
            timer.start()
            self._timers.append(timer)
        elif self.query is not None:
            self.query.act(kind)

    def settle(self) -> None:
        """Wait until all brokers run again."""
        for timer in self._timers:
            timer.join()
        self._timers.clear()
        for one in self.brokers.values():
            one.wait()
        await_route(self.names, [*self.brokers.values()], "out")

    def ends(self) -> dict[tuple[str, int], int]:
        """Where the queues of `out` end."""
        found = {}
        for name in BROKERS:
            with contextlib.closing(self._reader(name)) as reader:
                found |= {(name, queue_id): end for (_, queue_id), end in reader.ends(["out"]).queues.items()}
        return found

    def written(self, since: dict[tuple[str, int], int], prefix: bytes) -> dict[tuple[str, int], list[dict[str, Any]]]:
        """The rows of a query in `out`, in the order of their queues."""
        found = {}
        columns = ["body", "unique_key", "queue_offset", "physical_offset", "store_timestamp_ms"]
        for (name, queue_id), end in self.ends().items():
            rows: list[dict[str, Any]] = []
            if end > since[name, queue_id]:
                with contextlib.closing(self._reader(name)) as reader:
                    for part in reader.gather([Range("out", queue_id, since[name, queue_id], end)]):
                        rows += part.decoded(columns).to_pylist()
            found[name, queue_id] = [row for row in rows if row["body"].startswith(prefix)]
        return found

    def _reader(self, name: str) -> Any:
        return STORES.reader(Location.of(f"rocketmq://{self.names}/{name}"))


# ---- a query in processes of its own


class Query:
    """The query of a case: a driver after the other, until one has nothing more to do."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.folder = cluster.folder / f"case-{number}"
        self.folder.mkdir()
        self.label = f"{number}:"
        path = {"path": f"rocketmq://{cluster.names}", "retryTimeout": RETRY_TIMEOUT}
        self._source = path | {
            "subscribe": "in",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(BATCH_ROWS),
        }
        self._sink = path | {"topic": "out", "lookupDir": str(self.folder / "lookups")}
        self.checkpoint = Checkpoint(f"{number:016x}-{cluster.rng.getrandbits(64):x}")
        self.drivers = 0
        self._pids: list[int] = []

    def act(self, kind: str) -> None:
        """Kill the driver with its tasks, or the process of its tasks alone."""
        for pid in self._pids if kind == _DRIVERS else self._pids[1:2]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self) -> str:
        """Run until the query has read everything; return what made it fail, if it did."""
        while True:
            self.drivers += 1
            _save(self.folder, self.checkpoint)
            ours, theirs = Pipe()
            process = CONTEXT.Process(
                target=_drive, args=(str(self.folder), theirs, self._source, self._sink, self.label), name="a driver"
            )
            process.start()
            theirs.close()
            try:
                self._pids = ours.recv()
                ours.send("go")
                assert wait([process.sentinel], _ENDS_S), "the query does not end"
                said = ours.recv() if ours.poll() else None
            except (EOFError, OSError):
                said = None
            finally:
                for pid in self._pids:  # by the pipes of the driver they notice its end, but not at once
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.kill()
                process.join()
                ours.close()
                self._pids = []
            self.checkpoint = pickle.loads((self.folder / "checkpoint").read_bytes())
            if said is not None:
                return str(said)

    def read(self) -> list[dict[str, Any]]:
        """What each task that ended well has read, in the order of their ends."""
        path = self.folder / "read"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Copy:
    """The copy of a case: one process after the other, until one has copied everything."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.folder = cluster.folder / f"case-{number}"
        self.folder.mkdir()
        self.archive = self.folder / "archive"
        self.drivers = 0
        given = ("copy", f"rocketmq://{cluster.names}", "in", self.archive, "--retry-timeout", RETRY_TIMEOUT)
        self._command = [sys.executable, "-c", _COPY, *map(str, given)]
        self._process: subprocess.Popen[str] | None = None

    def act(self, _kind: str) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()

    def run(self) -> str:
        """Run until everything is copied; return what made it fail, if it did."""
        while True:
            self.drivers += 1
            with subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            ) as process:
                self._process = process
                try:
                    said = process.communicate(timeout=_ENDS_S)[1]
                finally:
                    process.kill()
            if process.returncode != -signal.SIGKILL:
                return f"exit code {process.returncode}: {said[-500:]}" if process.returncode else ""

    def judge(self, verdict: Verdict) -> None:
        """Compare the archive with `in`."""
        found: dict[str, list[bytes]] = defaultdict(list)
        with MessageStore.open_read_only(self.archive) as store:
            for queue_id in range(QUEUES):
                offset, end = 0, store.max_offset("in", queue_id)
                while offset < end:
                    for one in store.get_message("in", queue_id, offset, 32).messages:
                        found[f"{one.properties['originBroker'][-1]}{one.properties['originQueueId']}"].append(one.body)
                        offset += 1
        for queue, expected in EXPECTED.items():
            judge_queue("copy", queue, expected, found.pop(queue, []), verdict)
        verdict.misread += [f"copy: queue {queue} is not in the topic" for queue in found]


class LiveDriver(Driver):
    """A driver whose tasks run in other processes, which may die."""

    kind = MessageStoreDataSource

    def __init__(self, *given: Any, workers: list[Connection], log: Path) -> None:
        super().__init__(*given)
        self._workers, self._log = workers, log

    def _task(self, index: int, number: int, partition: bytes) -> tuple[Any, list[bytes]]:
        ids = (index, self.checkpoint.query_id, number, self.run_id)
        for _ in range(ATTEMPTS):
            try:
                self._workers[0].send((ids, pickle.dumps(self.reader), self.writer, partition, self.label))
                message, rows, failure = self._workers[0].recv()
            except (OSError, EOFError):  # it was killed
                self._workers.pop(0)
                continue
            if failure:
                raise QueryFailedError("task") from RuntimeError(failure)
            with open(self._log, "a") as log:
                texts = [row.decode() for row in rows]
                log.write(json.dumps({"batch": number, "run": self.run_id, "pid": os.getpid(), "rows": texts}) + "\n")
            return message, rows
        return None, []


def _worker(connection: Connection) -> None:
    """Run tasks until the driver is gone."""
    while True:
        try:
            ids, reader, writer, partition, label = connection.recv()
        except EOFError:
            return
        process, rows, message, failure = Process(), list[bytes](), None, ""
        driver = Driver.__new__(Driver)
        driver.label = label
        try:
            with process.running():
                process.task(*ids)
                given = pickle.loads(partition)
                batches = iter(()) if given is None else pickle.loads(reader).read(given)
                message = pickle.loads(writer).write(driver._transformed(batches, rows, process))
        except Exception as error:  # noqa: BLE001 - the driver tells it
            failure = repr(error)
        connection.send((message, rows, failure))


def _drive(folder: str, harness: Connection, source: dict[str, str], sink_options: dict[str, str], label: str) -> None:
    """What the driver's process does. Its workers are forked first, as long as it has no connection."""
    where = Path(folder)
    workers, pids = list[Connection](), [os.getpid()]
    with pytest.MonkeyPatch.context() as patch:
        connect(patch)
        patch.setattr(sink, "TaskContext", sink_context())
        hurry(patch)
        for _ in range(_WORKERS):
            ours, theirs = Pipe()
            pid = os.fork()
            if not pid:
                for each in (ours, harness, *workers):
                    each.close()
                with contextlib.suppress(BrokenPipeError):
                    _worker(theirs)
                os._exit(0)
            theirs.close()
            workers.append(ours)
            pids.append(pid)
        harness.send(pids)
        harness.recv()

        checkpoint = pickle.loads((where / "checkpoint").read_bytes())
        given = (checkpoint, source, sink_options, label, lambda _kind: Process())
        driver = LiveDriver(*given, workers=workers, log=where / "read")
        try:
            for _ in driver.batches():
                _save(where, checkpoint)
            harness.send("")
        except QueryFailedError as error:
            harness.send(f"{error}: {error.__cause__!r}")
        finally:
            driver.die()


def sink_context() -> Any:
    """`TaskContext` of the process that a thread plays."""
    from spark_faults.processes import current

    class Context:
        get = staticmethod(lambda: current().context)

    return Context


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Wait for a silent broker less long than a user does."""
    patch.setattr(Call.answer, "__defaults__", (ANSWER_TIMEOUT_S,))
    patch.setitem(Client.request.__kwdefaults__, "timeout_s", ANSWER_TIMEOUT_S)


def _save(folder: Path, checkpoint: Checkpoint) -> None:
    new = folder / "checkpoint.new"
    new.write_bytes(pickle.dumps(checkpoint))
    new.replace(folder / "checkpoint")


# ---- what must hold


def judge_source(tasks: list[dict[str, Any]], label: str, verdict: Verdict) -> None:
    """Compare what tasks read with `in`: each row once, and each batch the same rows however often it was read."""
    by_run: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for task in tasks:
        by_run[task["batch"], task["pid"], task["run"]] += task["rows"]
    last = {batch: rows for (batch, _, _), rows in by_run.items()}
    for (batch, _, _), rows in by_run.items():
        if strangers := set(rows) - set(last[batch]):
            verdict.misread.append(f"source: batch {batch} had other rows before, as {min(strangers)[:40]}")
    found = [text.removeprefix(label).encode() for batch in sorted(last) for text in last[batch]]
    by_queue: dict[str, list[bytes]] = defaultdict(list)
    for row in found:
        by_queue[row.split(b"/")[0].decode()].append(row)
    for queue, expected in EXPECTED.items():
        judge_queue("source", queue, expected, by_queue.pop(queue, []), verdict)
    verdict.misread += [f"source: queue {queue} is not in the topic" for queue in by_queue]


def judge_queue(who: str, queue: str, expected: list[bytes], rows: list[bytes], verdict: Verdict) -> None:
    """Compare the rows of one queue of `in`: each once, and in order."""
    counts = Counter(rows)
    verdict.lost += [f"{who}: {row[:30]!r}" for row in expected if not counts[row]]
    verdict.duplicated += [f"{who}: {row[:30]!r}" for row, count in counts.items() if count > 1]
    verdict.misread += [f"{who}: nobody wrote {row[:60]!r}" for row in counts if row not in expected]
    if set(rows) == set(expected) and len(rows) == len(expected) and rows != expected:
        verdict.misread.append(f"{who}: queue {queue} is out of order")


def judge_sink(
    written: dict[tuple[str, int], list[dict[str, Any]]], label: str, stopped: set[str], verdict: Verdict
) -> list[str]:
    """Compare `out` with `in`; return the doubles that the guide names, which brokers that were stopped may cause."""
    copies: dict[bytes, list[str]] = defaultdict(list)
    times_ms: dict[bytes, list[int]] = defaultdict(list)
    named: list[str] = []
    for (name, queue_id), rows in written.items():
        last: dict[str, int] = {}
        for row in rows:
            text = row["body"].removeprefix(label.encode())
            is_again = text in copies
            copies[text].append(
                f"{name}/{queue_id} offset {row['queue_offset']} at {row['store_timestamp_ms']} key {row['unique_key']}"
            )
            times_ms[text].append(row["store_timestamp_ms"])
            queue, number = text.split(b"/")[:2]
            origin = queue.decode()
            if not is_again and last.get(origin, -1) >= int(number):
                verdict.misread.append(f"sink: {text[:20]!r} is out of order in {name}/{queue_id}")
            last[origin] = int(number)
    for expected in EXPECTED.values():
        verdict.lost += [f"sink: {row[:30]!r}" for row in expected if row not in copies]
    everything = {row for rows in EXPECTED.values() for row in rows}
    for row, places in copies.items():
        if row not in everything:
            verdict.misread.append(f"sink: nobody wrote {row[:60]!r}")
        elif len(places) > 1:
            is_named = places[0].split("/")[0] in stopped and max(times_ms[row]) - min(times_ms[row]) >= _SHOWN_MS
            (named if is_named else verdict.duplicated).append(f"sink: {row[:30]!r}: {' and '.join(places)}")
    return named


# ---- the cases


def chosen(passed: dict[str, list[int]], rng: random.Random, weights: dict[str, int]) -> Fault:
    """A fault before, inside or at the end of a message of a run without one."""
    direction = rng.choice((UP, DOWN))
    ends = [0, *passed[direction]]
    piece = rng.randrange(1, len(ends))
    at = rng.choice((ends[piece - 1], (ends[piece - 1] + ends[piece]) // 2, ends[piece] - 1))
    return Fault(rng.choices(tuple(weights), tuple(weights.values()))[0], direction, at)


def run_case(
    cluster: Cluster, number: int, faults: dict[str, Fault], counts: Counts, seed: int, kind: type[Query | Copy]
) -> None:
    """Run a query or a copy to its end, and count what happened and what is wrong."""
    since, began_s = cluster.ends(), time.monotonic()
    query, verdict = kind(cluster, number), Verdict()
    for name, one in cluster.proxies.items():
        one.plan(faults.get(name))
    cluster.query = query
    said = query.run()
    happened = {name: fault for name, fault in faults.items() if cluster.proxies[name].happened}
    passed = {name: one.passed for name, one in cluster.proxies.items()}
    cluster.query = None
    for one in cluster.proxies.values():
        one.plan(None)
    cluster.settle()
    if not faults:
        cluster.passed[kind] = passed
    if said:
        verdict.misread.append(f"it failed: {said}")

    named: list[str] = []
    if isinstance(query, Copy):
        query.judge(verdict)
    else:
        judge_source(query.read(), query.label, verdict)
        # A broker that has just started may still fill its queues.
        label = query.label.encode()
        rows = soon(lambda: cluster.written(since, label), lambda _: True)
        stopped = {name for name, fault in happened.items() if fault.kind == _STOPPED}
        named = judge_sink(rows, query.label, stopped, verdict)
    counts.cases[DOUBLES] += len(named)
    counts.cases.update(fault.kind for fault in happened.values())
    counts.cases[ARCHIVES if kind is Copy else QUERIES] += 1
    if not verdict.ok:
        counts.fail(
            f"case {number}, {kind.__name__}, {happened}, {query.drivers} drivers: {verdict}",
            f"python -m interop.kills --seed {seed} --case {number}",
            verdict,
        )
    shutil.rmtree(query.folder)
    print(
        f"{number} {kind.__name__}: {'; '.join(f'{name} {fault}' for name, fault in happened.items()) or 'no fault'}: "
        f"{time.monotonic() - began_s:.1f} s{f' doubles that the guide names: {named}' if named else ''}{'' if verdict.ok else f' WRONG {verdict}'}",
        file=sys.stderr,
        flush=True,
    )


def count_faults(counts: Counts) -> int:
    """How many faults happened."""
    return sum(count for kind, count in counts.cases.items() if kind not in (QUERIES, ARCHIVES, DOUBLES))


def run(
    folder: Path, faults: int, seed: int, case: int | None = None, forms: tuple[str, ...] = ("plain", "plain")
) -> Counts:
    """Run cases until so many faults have happened, or one case alone."""
    CONTEXT.set_forkserver_preload(["interop.live", "pyspark_messagestore.datasource", "spark_faults.fake_spark"])
    counts, cluster = Counts(), Cluster(folder, forms)
    with pytest.MonkeyPatch.context() as patch, cluster.running():
        hurry(patch)
        for place, kind in enumerate((Query, Copy)):
            run_case(cluster, -place, {}, counts, seed, kind)
        number = 0
        while (case is None and count_faults(counts) < faults) or (case is not None and number < 1):
            number += 1
            rng = cluster.rng = random.Random(f"{seed} {case or number}")
            kind, weights = (Query, _WEIGHTS) if (case or number) % _COPY_EACH else (Copy, _COPY_WEIGHTS)
            planned = {name: chosen(cluster.passed[kind][name], rng, weights) for name in BROKERS}
            run_case(cluster, case or number, planned, counts, seed, kind)
    return counts


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(prog="interop.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=500, help="go on until so many have happened")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="one case alone")
    parser.add_argument("--forms", nargs=2, choices=FORMS, default=("plain", "plain"), help="of the two brokers")
    given = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="messagestore-kills-", dir=memory) as folder:
        counts = run(Path(folder), given.faults, given.seed, given.case, tuple(given.forms))
    for failure in counts.failures:
        print(failure)
    print(
        f"{count_faults(counts)} faults ({counts.words}): lost {counts.lost}, doubled {counts.duplicated}, "
        f"misread {counts.misread}"
    )
    return 0 if counts.ok else 1


if __name__ == "__main__":
    sys.exit(main())
