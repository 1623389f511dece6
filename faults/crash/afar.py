"""Disturbs the connection between Spark and a store on another host, and that host's server.

A fake Spark reads a topic through a server and writes it to another topic of the same store, in two micro-batches of two
tasks each, with the connector's own source and sink. A proxy between them counts the bytes that pass. In each case one
fault happens before one of these bytes, and Spark starts its query again on its checkpoint as often as it fails:

    delay, reset, close, half-open, blackhole      what `crash.proxy` does to one connection
    kill       the server is killed with SIGKILL, and started again
    stop       the server gets SIGSTOP, and goes on after its clients have given it up
    drain      the server gets SIGTERM while it works, and is started again
    new token, new certificate, expired certificate, wrong token      what `crash.rotations` does to the secrets

Everything is encrypted, and each request has a token. At the end of each case, a reader on the store's host finds each row once, and in order.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.peers import ports

from crash import proxy, rotations
from crash.counts import Counts, again
from crash.judge import Verdict
from crash.proxy import Fault, Proxy
from crash.rotations import Secrets
from messagestore import Message, MessageStore, StoreConfig
from messagestore.inspect.verify import verify
from messagestore.spi import connections
from pyspark_messagestore.datasource import MessageStoreDataSource
from spark_faults.fake_spark import Checkpoint, Driver, QueryFailedError
from spark_faults.ledger import visible
from spark_faults.processes import Process, connect

QUICK_CASES, DEEP_CASES = 500, 10_000
ROWS, QUEUES, BATCH_ROWS = 120, 3, 60
_SERVERS = {"kill": 5, "stop": 4, "drain": 3}
_SECRETS = rotations.UNNOTICED | rotations.REFUSED
_WEIGHTS = {**dict.fromkeys(proxy.KINDS, 8), **_SERVERS, **_SECRETS}
"""The faults, by how often they are drawn."""
_ANSWER_TIMEOUT_S = 1.0
"""How long the client waits here for a silent server; a user's waits for a minute."""
_STOPPED_S = 1.5
_START_S = 30.0
_TURNS = 8
"""A query that has failed so often will never end."""
_SMALL = StoreConfig(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=400)


class Host:
    """The store's host: its server, which is killed and started again at the same address.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "store", folder / "serve.log"
        self.port = ports.reserve()
        (folder / "secrets").mkdir()
        self.secrets = Secrets(folder / "secrets", self.port)
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the server, and wait until it is ready."""
        command = [sys.executable, "-m", "pyspark_messagestore.command", "serve", str(self.root)]
        command += ["--listen", f"127.0.0.1:{self.port}", "--drain", "5s", *self.secrets.arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        until_s = time.monotonic() + _START_S
        while True:
            if rotations.ready(self.port):
                return
            ended = self._process.poll()
            if ended is not None or time.monotonic() > until_s:
                raise AssertionError(f"the server does not start ({ended}): {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def act(self, kind: str) -> None:
        """Do what a fault says; what takes time goes on in a thread."""
        assert self._process is not None
        if kind == "kill":
            self._process.kill()
            self._process.wait()
            self._later(self.start)
        elif kind == "drain":
            self._process.send_signal(signal.SIGTERM)
            self._later(self._again)
        elif kind == "stop":
            self._process.send_signal(signal.SIGSTOP)
            self._later(self._go_on)
        else:
            self.secrets.act(kind)

    def _later(self, call: object) -> None:
        thread = threading.Thread(target=call, name="the store's host")  # type: ignore[arg-type]
        thread.start()
        self._threads.append(thread)

    def _again(self) -> None:
        assert self._process is not None
        code = self._process.wait(_START_S)
        assert code == 0, f"the server drained and ended with {code}: {self.log.read_text()[-2000:]}"
        self.start()

    def _go_on(self) -> None:
        assert self._process is not None
        time.sleep(_STOPPED_S)
        self._process.send_signal(signal.SIGCONT)

    def settle(self) -> None:
        """Wait until what a fault began is over."""
        while self._threads:
            self._threads.pop().join()

    def end(self) -> int:
        """End the server in its own time; return its exit code."""
        self.settle()
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_START_S)


class Afar:
    """A host, a proxy before it, and the cases that have been run."""

    def __init__(self, folder: Path) -> None:
        self.host = Host(folder)
        self.tally: Counter[str] = Counter()
        self.passed: dict[str, list[int]] = {}
        with MessageStore.open(self.host.root, _SMALL) as store:
            store.create_topic("in", QUEUES)
            for number in range(ROWS):
                store.put_message(_row(number))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The server and the proxy, until the block ends."""
        self.host.start()
        try:
            with Proxy(("127.0.0.1", self.host.port), self._act) as self.proxy:
                yield
        finally:
            code = self.host.end()
        assert code == 0, f"the server ended with {code}"

    def _act(self, kind: str) -> None:
        self.host.act(kind)
        if kind in _SECRETS:
            self.proxy.cut()  # what was opened before keeps its certificate

    def case(self, number: int, fault: Fault | None, *, named: bool) -> Verdict:
        """Run the query of a case to its end, however often it fails; return what is wrong with its topic."""
        topic, verdict = f"out-{number}", Verdict()
        store = {"path": f"https://127.0.0.1:{self.proxy.port}", **self.host.secrets.options}
        source = store | {
            "subscribe": "in",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(BATCH_ROWS),
        }
        sink = store | {"topic": topic} | ({"txnAppId": f"app-{number}"} if named else {})
        checkpoint = Checkpoint(f"{number:016x}")

        failure: BaseException | None = None
        self.proxy.plan(fault)
        for _ in range(_TURNS):
            driver = _Driver(checkpoint, source, sink, f"{number}/", lambda _kind: Process())
            try:
                if "idle" in driver.batches():
                    break
            except QueryFailedError as error:
                failure = error.__cause__
                self.tally[f"query failed with {type(failure).__name__}"] += 1
                if fault is not None and fault.kind in rotations.UNNOTICED:
                    verdict.misread.append(f"the query failed because of a {fault.kind}: {failure!r}")
                self.host.secrets.heal()
            finally:
                driver.die()
        else:
            verdict.misread.append(f"the query failed {_TURNS} times: {failure!r}")
        self.tally["faults that happened"] += self.proxy.happened
        self.passed = self.proxy.passed
        self.proxy.plan(None)
        self.host.settle()
        self.host.secrets.heal()

        _judge(visible(str(self.host.root), topic), f"{number}/", verdict)
        return verdict


class _Driver(Driver):
    kind = MessageStoreDataSource


def _row(number: int) -> Message:
    return Message("in", f"{number % QUEUES}/{number}".encode(), queue_id=number % QUEUES)


def _judge(queues: dict[int, list[bytes]], label: str, verdict: Verdict) -> None:
    """Compare a topic with what must be in it."""
    counts = Counter(body.decode() for bodies in queues.values() for body in bodies)
    expected = [f"{label}{number % QUEUES}/{number}" for number in range(ROWS)]
    verdict.lost += [body for body in expected if not counts[body]]
    verdict.duplicated += [body for body, count in counts.items() if count > 1]
    verdict.misread += [f"nobody wrote {body}" for body in counts if body not in expected]
    for bodies in queues.values():
        last: dict[bytes, int] = {}
        for body in bodies:
            _, origin, number = body.split(b"/")
            if last.get(origin, -1) >= int(number):
                verdict.misread.append(f"{body!r} is out of order")
            last[origin] = int(number)


def chosen(passed: dict[str, list[int]], rng: random.Random) -> Fault:
    """A fault before, inside or at the end of a message of a run without one."""
    kinds, weights = zip(*_WEIGHTS.items(), strict=True)
    direction = rng.choice((proxy.UP, proxy.DOWN))
    ends = [0, *passed[direction]]
    piece = rng.randrange(1, len(ends))
    at = rng.choice((ends[piece - 1], (ends[piece - 1] + ends[piece]) // 2, ends[piece] - 1))
    return Fault(rng.choices(kinds, weights)[0], direction, at)


def run(_seconds: float, seed: int, quick: bool, *, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run a share of `QUICK_CASES` or `DEEP_CASES`: faults are counted here, and not seconds.

    Parameters
    ----------
    case : str
        A number: one case alone.
    """
    counts = Counts()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="messagestore-afar-", dir=memory))
    try:
        afar = Afar(folder)
        with pytest.MonkeyPatch.context() as patch:
            connect(patch)
            patch.setattr(connections, "ANSWER_TIMEOUT_S", _ANSWER_TIMEOUT_S)
            _cases(afar, counts, range(part[0], QUICK_CASES if quick else DEEP_CASES, part[1]), seed, case)
    finally:
        shutil.rmtree(folder)
    return counts


def _cases(afar: Afar, counts: Counts, numbers: range, seed: int, case: str) -> None:
    with afar.running():
        counts.take("runs without a fault", afar.case(1_000_000, None, named=True), "no fault", again("afar", seed, ""))
        passed = afar.passed

        for number in numbers:
            if case not in ("", str(number)):
                continue
            fault = chosen(passed, random.Random(f"{seed} {number}"))
            counts.take(
                _class_of(fault.kind),
                afar.case(number, fault, named=number % 3 > 0),
                f"{number}: {fault}",
                again("afar", seed, str(number)),
            )

    report = verify(afar.host.root)
    if not report.ok:
        counts.fail(f"verify: {report.findings[:3]}", again("afar", seed, ""))
    counts.cases.update(afar.tally)


def _class_of(kind: str) -> str:
    if kind in _SERVERS:
        return f"server: {kind}"
    return f"secrets: {kind}" if kind in _SECRETS else f"connection: {kind}"
