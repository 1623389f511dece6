"""Disturbs the connection between Spark and a store on another host, that host, and Spark's driver.

A fake Spark reads a topic through a server and writes it to another topic of the same store, in two micro-batches of two
tasks each, with the connector's own source and sink. A proxy between them counts the bytes that pass. In each case one
fault happens before one of these bytes, and Spark starts its query again on its checkpoint as often as it fails:

    delay, reset, close, half-open, blackhole      what `crash.proxy` does to one connection
    kill, stop, drain, next release, far release, full disk, broker, another store, older copy
                                                   what `crash.distant_hosts` does to the store's host
    new token, new certificate, expired certificate, wrong token      what `crash.rotations` does to the secrets
    driver killed, zombie driver                   the driver's process gets SIGKILL, or SIGSTOP; a new one takes its
                                                   place, and the one that was stopped goes on when that has ended

Some rows have a delay level. Between the cases, a process of the host delivers what is due, in turns with the server; at the
end, all of them must have been delivered once, and none before its time. In one of four cases of a connection, the topic
is deleted on the host after the first micro-batch, so that the second one makes it again.

A query may fail only because of some of these, and then with the sentence of `SAID`; otherwise it waits. Everything is
encrypted, and each request has a token. At the end of each case, a reader on the store's host finds each row once, and
in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from crash import proxy
from crash.counts import Counts, again
from crash.distant_drivers import ANSWER_TIMEOUT_S, DistantDriver, DriverProcess, level_of
from crash.distant_hosts import DELAYS_MS, QUEUES, ROWS, Host
from crash.judge import Verdict
from crash.power import CannotMountError, loop_mount
from crash.proxy import Fault, Proxy
from messagestore import CommitUnknownError, MessageStore, ReadOnlyStore
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect.verify import verify
from messagestore.spi import connections
from spark_faults.fake_spark import Checkpoint, QueryFailedError
from spark_faults.ledger import visible
from spark_faults.processes import Process, connect

QUICK_CASES, DEEP_CASES = 500, 10_000
CASES_OF_A_STORE = 250
BATCH_ROWS = 60
_HOSTS = {
    "kill": 5,
    "stop": 4,
    "drain": 3,
    "next release": 2,
    "far release": 2,
    "full disk": 3,
    "broker": 3,
    "another store": 2,
    "older copy": 2,
}
_SECRETS = {"new token": 1, "new certificate": 1, "expired certificate": 1, "wrong token": 1}
_DRIVERS = {"driver killed": 3, "zombie driver": 3}
_WEIGHTS = {**dict.fromkeys(proxy.KINDS, 8), **_HOSTS, **_SECRETS, **_DRIVERS}
"""The faults, by how often they are drawn."""
_SLOW = frozenset(_WEIGHTS) - frozenset(proxy.KINDS)

SAID = {
    # Who has not read the new certificate yet does not know it at all.
    "expired certificate": r"StoreUnavailableError: .*certificate is not trusted \((certificate has expired|self-signed certificate)\)",
    "wrong token": r"AccessDeniedError: .*does not know the token of the request\. Give a file with another one",
    "far release": r"ProtocolError: the client speaks protocol 1-1, and this side 2-3\. .*upgrade the older side",
    "full disk": r"StoreFullError: .*(no room for|but \d+ are free).*Make room",
    "broker": (
        r"StoreLockedError: .*locked by a RocketMQ broker.*Stop (it|that process)"
        r"|StoreLockedError: .*as a RocketMQ broker does when it starts\. Stop the broker and try again"
        r"|StoreLockedError: .*a RocketMQ broker that is starting waits .*Open the store again when the broker has stopped"
    ),
    "another store": (
        r"StoreWentBackwardsError: .*(Use a new checkpoint for another store|found store .* in place of store)"
        r"|NotAStoreError: .*found another store.*but the (write was planned for|driver planned to read) store"
    ),
    "older copy": (
        r"LostBatchesError: .*"
        r"|StoreWentBackwardsError: .*found store .* in place of store"
        r"|NotAStoreError: .*found another store.*but the (write was planned for|driver planned to read) store"
    ),
}
"""What ends a query, and with which error; all others may not."""
_WAITED, _GIVEN_UP = "120s", "2s"
"""For how long a client waits for what comes back by itself, however busy this machine is; and for what does not."""
_DELETES = frozenset(proxy.KINDS)
"""Faults after which a query repeats no batch that it has finished, so what was deleted of it does not come back."""
_DELIVERS_EVERY = 6
_TURNS = 8
"""A query that has failed so often will never end."""
_DISK_SIZE = "2G"


class Afar:
    """A host, a proxy before it, and the cases that have been run.

    Parameters
    ----------
    folder : Path
    disk : Path, optional
        A folder on a file system of its own for the store. Without it, no disk is filled.
    """

    def __init__(self, folder: Path, disk: Path | None = None) -> None:
        self.folder = folder
        self.host = Host(folder, disk or folder)
        self.tally: Counter[str] = Counter()
        self.passed: dict[str, list[int]] = {}
        self._driver: DriverProcess | None = None
        self._queries: list[_Query] = []
        """Those whose rows are in the store."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The server and the proxy, until the block ends."""
        self.host.start()
        try:
            with Proxy(("127.0.0.1", self.host.port), self._act) as self.proxy:
                yield
        except BaseException:
            self.host.kill()
            raise
        code = self.host.end()
        assert code == 0, f"the server ended with {code}"

    def _act(self, kind: str) -> None:
        if kind in _DRIVERS:
            assert self._driver is not None
            self._driver.act(kind)
            return
        self.host.act(kind)
        if kind in _SECRETS:
            self.proxy.cut()  # what was opened before keeps its certificate

    def case(self, number: int, fault: Fault | None, *, named: bool) -> Verdict:
        """Run the query of a case to its end, however often it fails; return what is wrong with its topic."""
        kind = "" if fault is None else fault.kind
        self.host.before(kind)
        query = _Query(self, number, kind, named=named)
        self.proxy.plan(fault)
        if kind in _DRIVERS:
            query.run_in_a_process()
        else:
            query.run()
        self.tally["faults that happened"] += self.proxy.happened
        self.passed = self.proxy.passed
        self.proxy.plan(None)
        self.host.settle()
        if query.finish():
            self._queries.append(query)
        return query.verdict

    def deliveries(self) -> Iterator[Verdict]:
        """Wait until all that was delayed is due, deliver it, and say what is wrong with the rows of each query."""
        self.host.deliver(all_of_them=True)
        with MessageStore.open_read_only(self.host.root) as store:
            put_ms = dict(_rows(store, SCHEDULE_TOPIC))
            for query in self._queries:
                yield query.delivered(store, put_ms)

    @contextlib.contextmanager
    def driver(self, driver: DriverProcess) -> Iterator[DriverProcess]:
        """The driver to which faults happen, until the block ends."""
        self._driver = driver
        try:
            yield driver
        finally:
            self._driver = None
            driver.end()


class _Query:
    """The query of one case.

    Parameters
    ----------
    afar : Afar
    number : int
        Of the case.
    kind : str
        The fault; empty: none.
    named : bool
        Whether the sink has a `txnAppId`.
    """

    def __init__(self, afar: Afar, number: int, kind: str, *, named: bool) -> None:
        self._afar, self._kind, self._number = afar, kind, number
        self.topic, self.label, self.verdict = f"out-{number}", f"{number}/", Verdict()
        self._deleted = set[str]()
        self.delayed: list[str] = []
        self._store_id = afar.host.store_id
        self._checkpoint = Checkpoint(f"{number:016x}")
        store = {"path": f"https://127.0.0.1:{afar.proxy.port}", **afar.host.secrets.options}
        store["retryTimeout"] = _GIVEN_UP if kind == "expired certificate" else _WAITED
        self._source = store | {
            "subscribe": "in",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(BATCH_ROWS),
        }
        self._sink = store | {"topic": self.topic} | ({"txnAppId": f"app-{number}"} if named else {})

    def run(self) -> None:
        """Start it until it has nothing more to do; what makes it fail is put right."""
        failure: BaseException | None = None
        deletes = self._kind in _DELETES and self._number % 4 == 0
        for _ in range(_TURNS):
            driver = DistantDriver(self._checkpoint, self._source, self._sink, self.label, lambda _kind: Process())
            try:
                for step in driver.batches():
                    if step == "idle":
                        return
                    if step == "commits" and deletes:
                        deletes = False
                        self._delete(driver)
            except QueryFailedError as error:
                failure = error.__cause__
                self._failed(failure)
            finally:
                driver.die()
        self.verdict.misread.append(f"the query failed {_TURNS} times: {failure!r}")

    def _delete(self, driver: DistantDriver) -> None:
        """Delete the topic that the first batch has made. Its delayed rows are still to come, and make it again."""
        assert driver.attempt is not None
        self._afar.host.delete_topic(self.topic)
        self._deleted = {body.decode() for body in driver.attempt.rows if not level_of(body)}
        self._afar.tally["topics deleted between two batches"] += 1

    def run_in_a_process(self) -> None:
        """Start it in a process to which the fault happens, and go on here, as a new driver on the same checkpoint."""
        process = DriverProcess(self._afar.folder, self._checkpoint, self._source, self._sink, self.label)
        with self._afar.driver(process):
            self._checkpoint = process.wait()
            self.run()
            said = process.go_on()
        if said:
            self._afar.tally[f"{self._kind} ended with {said.partition('(')[0]}"] += 1
            if not self._afar.proxy.happened:
                self.verdict.misread.append(f"a driver to which nothing happened failed: {said}")

    def _failed(self, failure: BaseException | None) -> None:
        """Judge an error, put right what is wrong, and do with the checkpoint what the guide says."""
        words = f"{type(failure).__name__}: {failure}"
        told = failure  # a commit without an answer is unknown, whatever refuses it when it is sent again: that is the cause
        if isinstance(failure, CommitUnknownError) and failure.__cause__ is not None:
            told = failure.__cause__
        self._afar.tally[f"{self._kind or 'nothing'}: query failed with {type(failure).__name__}"] += 1
        if self._kind not in SAID:
            self.verdict.misread.append(f"the query failed because of {self._kind or 'nothing'}: {words}")
        elif not re.match(SAID[self._kind], f"{type(told).__name__}: {told}", re.DOTALL):
            self.verdict.misread.append(f"the query did not say {SAID[self._kind]!r}, but: {words}")
        self._afar.host.heal()
        if self._kind == "older copy" and type(failure).__name__ == "LostBatchesError":
            self._checkpoint.roll_back(len(self._checkpoint.offsets))
        elif self._kind == "another store" and self._is_of_another_store:
            self._checkpoint = Checkpoint(f"{self._number:015x}n")

    @property
    def _is_of_another_store(self) -> bool:
        """Whether the checkpoint was begun while another store was there."""
        return any(json.loads(offset)["storeId"] != self._store_id for offset in self._checkpoint.offsets.values())

    def finish(self) -> bool:
        """Look at what was written; returns whether it is in the host's own store."""
        if self._kind == "another store" and self._is_of_another_store:  # it never met the store that was replaced
            self._judge()
            self._afar.host.heal()
            if visible(str(self._afar.host.root), self.topic):
                self.verdict.misread.append("rows of a query on another store are in the store")
            return False
        self._afar.host.heal()
        if self._kind == "older copy" and not visible(str(self._afar.host.root), self.topic):
            self._checkpoint.commits.discard(
                max(self._checkpoint.commits)
            )  # all was done before: its next batch is refused
            self.run()
        self._judge()
        return True

    def _judge(self) -> None:
        """Look at the rows without a delay, and at those that wait for their time."""
        expected = [f"{self.label}{number % QUEUES}/{number}" for number in range(ROWS)]
        self.delayed = [body for body in expected if level_of(body.encode())]
        root, mine = str(self._afar.host.root), self.label.encode()
        now = {
            queue: [body for body in bodies if not (body.startswith(mine) and level_of(body))]
            for queue, bodies in visible(root, self.topic).items()
        }
        _judge(now, [body for body in expected if body not in {*self.delayed, *self._deleted}], self.verdict)
        waiting = {
            queue: [body for body in bodies if body.startswith(mine)]
            for queue, bodies in visible(root, SCHEDULE_TOPIC).items()
        }
        _judge(waiting, self.delayed, self.verdict)

    def delivered(self, store: ReadOnlyStore, put_ms: Mapping[bytes, int]) -> Verdict:
        """Look at what was delivered in the end.

        Parameters
        ----------
        store : ReadOnlyStore
        put_ms : mapping of bytes to int
            When the delay of each row began.
        """
        verdict, rows = Verdict(), [row for row in _rows(store, self.topic) if level_of(row[0])]
        counts = Counter(body.decode() for body, _ in rows)
        verdict.lost += [f"{body}, which was delayed" for body in self.delayed if not counts[body]]
        verdict.duplicated += [f"{body}, which was delayed" for body, count in counts.items() if count > 1]
        verdict.misread += [f"nobody delayed {body}" for body in counts if body.encode() not in put_ms]
        verdict.misread += [
            f"{body!r} was delivered at {stored_ms}, and was put at {put_ms[body]}"
            for body, stored_ms in rows
            if body in put_ms and stored_ms < put_ms[body] + DELAYS_MS[level_of(body) - 1]
        ]
        return verdict


def _rows(store: ReadOnlyStore, topic: str) -> Iterator[tuple[bytes, int]]:
    """The bodies of a topic, and when each was stored."""
    for queue_id in store.topics().get(topic, []):
        first = store.min_offset(topic, queue_id)
        for batch in store.read(topic, queue_id, first, columns=("body", "store_timestamp_ms")):
            yield from zip(batch["body"].to_pylist(), batch["store_timestamp_ms"].to_pylist(), strict=True)


def _judge(queues: dict[int, list[bytes]], expected: list[str], verdict: Verdict) -> None:
    """Compare queues with what must be in them."""
    counts = Counter(body.decode() for bodies in queues.values() for body in bodies)
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


def chosen(passed: dict[str, list[int]], rng: random.Random, without: frozenset[str] = frozenset()) -> Fault:
    """A fault before, inside or at the end of a message of a run without one; some kinds may be left out."""
    weights = {kind: weight for kind, weight in _WEIGHTS.items() if kind not in without}
    direction = rng.choice((proxy.UP, proxy.DOWN))
    ends = [0, *passed[direction]]
    piece = rng.randrange(1, len(ends))
    at = rng.choice((ends[piece - 1], (ends[piece - 1] + ends[piece]) // 2, ends[piece] - 1))
    return Fault(rng.choices(tuple(weights), tuple(weights.values()))[0], direction, at)


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
    numbers = range(part[0], QUICK_CASES if quick and not case else DEEP_CASES, part[1])
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            connect(patch)
            patch.setattr(connections, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
            disk: Path | None = None
            try:
                disk = stack.enter_context(loop_mount("ext4", folder, _DISK_SIZE)).folder
            except CannotMountError as error:
                counts.notes.append(f"full disks of a store on another host: {error}")
            for first in range(0, len(numbers), CASES_OF_A_STORE):
                some = numbers[first : first + CASES_OF_A_STORE]
                if case in ("", *map(str, some)):
                    _cases(folder / str(first), disk, counts, some, seed, case)
    finally:
        shutil.rmtree(folder)
    return counts


def _cases(folder: Path, disk: Path | None, counts: Counts, numbers: range, seed: int, case: str) -> None:
    """Run some cases on a new store."""
    folder.mkdir()
    own = None if disk is None else disk / folder.name
    if own is not None:
        own.mkdir()
    afar = Afar(folder, own)
    without = frozenset(["full disk"] if own is None else [])

    with afar.running():
        counts.take("runs without a fault", afar.case(1_000_000, None, named=True), "no fault", again("afar", seed, ""))
        passed = afar.passed

        for number in numbers:
            if case not in ("", str(number)):
                continue
            fault = chosen(passed, random.Random(f"{seed} {number}"), _SLOW if _is_short(number) else without)
            counts.take(
                _class_of(fault.kind),
                afar.case(number, fault, named=number % 3 > 0),
                f"{number}: {fault}",
                again("afar", seed, str(number)),
            )
            if number % _DELIVERS_EVERY == 0:
                afar.host.deliver()
        for verdict in afar.deliveries():
            counts.take("queries whose delayed rows were delivered", verdict, "deliveries", again("afar", seed, ""))

    report = verify(afar.host.root)
    if not report.ok:
        counts.fail(f"verify: {report.findings[:3]}", again("afar", seed, ""))
    if left := afar.host.orphans():
        counts.fail(f"after the sweep, the staging folder has {left[:3]}", again("afar", seed, ""))
    counts.cases.update(afar.tally)
    for each in (folder, own):
        if each is not None:
            shutil.rmtree(each)


def _is_short(number: int) -> bool:
    """Whether a case has a fault of a connection: three of four in a quick run, since others cost five times as much."""
    return number < QUICK_CASES and number % 8 > 1


def _class_of(kind: str) -> str:
    for of, kinds in (("host", _HOSTS), ("secrets", _SECRETS), ("driver", _DRIVERS)):
        if kind in kinds:
            return f"{of}: {kind}"
    return f"connection: {kind}"
