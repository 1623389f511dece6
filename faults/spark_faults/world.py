"""The world of a history: a store, an input, queries and processes, and the conditions that must hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from crash import hostile
from messagestore import (
    BatchConflictError,
    LostBatchesError,
    Message,
    MessageColumns,
    MessageStore,
    OffsetOutOfRangeError,
    QueryConflictError,
    StoreConfig,
    StoreLockedError,
    StorePoisonedError,
    VersionRegressionError,
)
from spark_faults.fake_spark import Checkpoint, ConcurrentUpdateError, Driver, QueryFailedError, TaskError
from spark_faults.ledger import Ledger, visible
from spark_faults.processes import COMMIT_SITES, Killed, Process

QUEUES = 3
PROPERTIES = """
mappedFileSizeCommitLog=16384
mappedFileSizeConsumeQueue=320
maxHashSlotNum=64
maxIndexNum=200
maxMessageSize=8192
"""
TURNS = 300
"""No query takes this many steps, unless it never ends."""


class Query:
    """A user's query: its checkpoint and options, and what was done to it."""

    def __init__(self, label: str, checkpoint: Checkpoint, source: dict[str, str], sink: dict[str, str]) -> None:
        self.label, self.checkpoint, self.source, self.sink = label, checkpoint, source, sink
        self.backups: list[Checkpoint] = []
        self.tampered = False
        self.done_for = self.replaced = self.copied = False
        self.not_before: dict[int, int] | None = None
        self.foreach = False

    @property
    def app(self) -> str:
        """Return the name that identifies its batches."""
        return self.sink.get("txnAppId", self.checkpoint.query_id)


class World:
    """Everything in one history, in an empty folder; `tally` counts what happened in all histories."""

    def __init__(self, folder: Path, seed: int, tally: Counter[str]) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.tally = tally
        self.story: list[str] = []

        self.out = str(folder / "out")
        self.input = self.out if self.rng.random() < 0.6 else str(folder / "in")

        settings = folder / "small.properties"
        settings.write_text(PROPERTIES + "cleanInterval=1ms\n" * (self.rng.random() < 0.5))
        self.config = StoreConfig.load(settings).replace(lock_timeout="20ms")
        self.settings = str(settings)

        self.ledger = Ledger()
        self.labels: dict[str, str] = {}
        self.written = 0
        self.seen: dict[bytes, int] = {}
        self.gone: set[bytes] = set()

        self.queries: list[Query] = []
        self.processes: list[Process] = []
        self.doom: dict[str, dict[str, object]] = {}
        self.asleep = self.finishing = False
        self.elsewhere = False
        """Whether the store that the queries wrote to is not at its place: it is missing, or an older copy is there."""

    def note(self, what: str) -> None:
        """Add a note for a person who examines one history."""
        self.story.append(what)

    # ---- processes and their faults

    def process(self, kind: str) -> Process:
        """Create a process, which is doomed if the history says so."""
        given = self.doom.pop(kind, {})
        kill_at, half = given.get("kill_at"), bool(given.get("half"))
        process = Process(kill_at, half=half)  # type: ignore[arg-type]
        process.disk.doomed_at = given.get("site")  # type: ignore[assignment]
        process.bad_row = bool(given.get("bad_row"))
        process.raises_after = bool(given.get("raises_after"))
        process.times = self.rng.choice((1, 1, 2)) if kind == "abort" else 1
        self.processes.append(process)
        return process

    def draw_fault(self, driver: Driver) -> None:
        """Choose what goes wrong next, or nothing."""
        rng = self.rng
        kind = rng.choice(("none", "task", "bad row", "commit", "commit", "commit", "raises after", "planner", "abort"))
        half = rng.random() < 0.5

        if kind == "commit" and rng.random() < 0.6:
            self.doom["commit"] = {"site": (rng.choice(COMMIT_SITES), rng.randrange(3)), "half": half}
        elif kind == "commit":
            self.doom["commit"] = {"kill_at": rng.randrange(40), "half": half}
        elif kind == "bad row":
            self.doom["task"] = {"bad_row": True}
            driver.attempts = rng.choice((1, 2))
        elif kind == "raises after":
            self.doom["commit"] = {"raises_after": True}
        elif kind == "abort":
            self.doom = {"commit": {"kill_at": rng.randrange(40)}, "abort": {"kill_at": rng.randrange(12)}}
        elif kind != "none":
            self.doom[kind] = {"kill_at": rng.randrange(8), "half": half}

    def driver(self, query: Query) -> Driver:
        """Create a driver JVM for a query on its checkpoint; options that may change between runs may change."""
        rng = self.rng
        source = dict(query.source)
        if rng.random() < 0.7 and not self.finishing:
            source["maxOffsetsPerTrigger"] = str(rng.randint(5, 30))
        if rng.random() < 0.4:
            source["minPartitions"] = str(rng.randint(2, 4))
        driver = Driver(query.checkpoint, source, dict(query.sink), query.label, self.process, foreach=query.foreach)
        driver.on_commit = self.ledger.attempted
        self.labels[driver.app] = query.label
        return driver

    # ---- running a query

    def step(self, query: Query, driver: Driver, places: Iterator[str]) -> str:
        """Run to the next place; return "failed" if the query ended with an error."""
        try:
            place = next(places)
        except (QueryFailedError, ConcurrentUpdateError) as error:
            self.judge(query, driver, error)
            driver.die()
            return "failed"
        self.note(f"{query.label} {place} {driver.checkpoint.last}")
        if place == "returned":
            assert driver.attempt is not None
            self.note(f"{driver.attempt.app} {driver.attempt.version}: {len(driver.attempt.rows)} rows")
            assert not self.elsewhere, f"{driver.attempt.key}: was accepted, and its store is not there"
            self.ledger.committed(
                driver.attempt,
                skipping="onReplayMismatch" in driver.sink_options,
                taking_over="onNewQuery" in driver.sink_options,
            )
            query.sink.pop("onReplayMismatch", None)  # for this batch only
            self.tally["commits"] += 1
        elif place in ("started", "offsets"):
            if place == "started":
                driver.begins = self.input_ends()
            elif driver.begins is not None:  # of all that Spark is told about the beginning, this is the first answer
                query.not_before, driver.begins = driver.begins, None
            first = place == "started" or driver.checkpoint.last == 0
            if first and not self.finishing and self.rng.random() < 0.3:
                self.append()
        elif place == "idle":
            driver.die()
        return place

    def drive(self, query: Query, driver: Driver, places: Iterator[str], *, kill: float = 0.0, stop: str = "") -> str:
        """Run until the driver is "idle", "failed", "killed" or at the place `stop`."""
        for _ in range(TURNS):
            place = self.step(query, driver, places)
            if place in ("idle", "failed", stop):
                return place
            if self.rng.random() < kill:
                self.tally[f"driver killed at {place}"] += 1
                driver.die()
                return "killed"
        raise AssertionError(f"query {query.label} never ends")

    def judge(self, query: Query, driver: Driver, failure: Exception) -> None:
        """Check that this history should cause the error; then do what a person would do about it."""
        error = failure.__cause__
        self.note(f"{query.label} failed: {failure!r} from {error!r}"[:300])
        self.tally[f"ended with {type(error or failure).__name__}"] += 1
        if isinstance(error, BatchConflictError | VersionRegressionError):
            assert query.tampered, f"{query.label}: a conflict out of nothing: {error}"
            attempt = driver.attempt
            assert attempt is not None
            conflict = isinstance(error, BatchConflictError)
            if isinstance(error, QueryConflictError):
                assert self.ledger.has_other_query(attempt), f"{query.label}: {error}"
                self.repair(query)
                return
            due = self.ledger.has_other_rows(attempt) if conflict else self.ledger.has_later(attempt)
            assert due, f"{query.label}: {error}"
            if driver.checkpoint is query.checkpoint:  # if two drivers share it, the first one to fail repairs it
                self.repair(query)
        elif isinstance(error, OffsetOutOfRangeError):
            assert self.gone, f"{query.label}: {error}"
            query.source["failOnDataLoss"] = "false"
        elif isinstance(error, StoreLockedError):
            assert self.asleep, f"{query.label}: {error}"
        elif isinstance(error, LostBatchesError):
            assert self.elsewhere, f"{query.label}: {error}"
        else:
            expected = error is None or isinstance(error, Killed | TaskError) or "after publishing" in str(error)
            assert expected, repr(error)

    def repair(self, query: Query) -> None:
        """Repair a conflict: restore the earlier checkpoint, or drop the rows that come again."""
        if self.gone and (query.backups or query.copied):
            query.done_for = query.replaced = True  # nobody can know which of the two it was, so the query is given up
        elif query.backups:
            query.checkpoint = query.backups.pop()
        elif self.gone:
            query.sink["onReplayMismatch"] = "skip"  # its rows were deleted from the source, and are in the store
        else:
            query.done_for = True  # another driver continues with the batches of this one

    def any_query(self) -> Query:
        """Return one of the queries that are still in use."""
        if all(query.done_for for query in self.queries):
            self.new_query()
        return self.rng.choice([query for query in self.queries if not query.done_for])

    def input_ends(self) -> dict[int, int]:
        """Return queue -> how many rows the input has had."""
        with MessageStore.open_read_only(self.input) as store:
            return {queue_id: store.max_offset("in", queue_id) for queue_id in store.topics().get("in", [])}

    def look_at_input(self) -> set[bytes]:
        """Read the input as it is now; remember every row that was ever there, with its place."""
        with MessageStore.open_read_only(self.input) as store:
            firsts = {queue_id: store.min_offset("in", queue_id) for queue_id in store.topics().get("in", [])}
        now = visible(self.input, "in")
        self.seen |= {body: firsts[q] + i for q, bodies in now.items() for i, body in enumerate(bodies)}
        return {body for bodies in now.values() for body in bodies}

    def append(self, *, fat: bool = False) -> None:
        """Append rows to the input, as single puts or as a batch; the writer may be killed."""
        rng = self.rng
        queue_ids = [rng.randrange(QUEUES) for _ in range(rng.randint(1, 25))]
        bodies = [f"{queue_id}/{self.written + i:0{400 * fat}}".encode() for i, queue_id in enumerate(queue_ids)]
        self.written += len(bodies)

        self.note(f"append {bodies[0]!r} and {len(bodies) - 1} more")

        process = Process(rng.randrange(40) if rng.random() < 0.2 else None)
        self.processes.append(process)
        numbers = range(self.written, self.written + len(bodies)) if rng.random() < 0.3 else None

        try:
            with process.running(), MessageStore.open(self.input, self.config) as store:
                if rng.random() < 0.4:
                    for row, (queue_id, body) in enumerate(zip(queue_ids[:3], bodies, strict=False)):
                        texts = hostile.texts(numbers[row]) if numbers else {}
                        store.put_message(Message("in", body, queue_id=queue_id, **texts))
                else:
                    columns = {"body": pa.array(bodies), "queue_id": pa.array(queue_ids, pa.int32())}
                    batch = pa.record_batch(columns | (hostile.columns(numbers) if numbers else {}))
                    store.append_batch(MessageColumns.from_arrow(batch, topic="in"))
        except (Killed, StorePoisonedError):
            assert process.disk.dead
            self.tally["writer of the input killed"] += 1
        except StoreLockedError:
            assert self.asleep
        finally:
            process.die()

    def identifier(self) -> str:
        """Return a query id."""
        return f"{self.rng.getrandbits(64):016x}"

    def new_query(self) -> None:
        """Add a query into the same topic."""
        number = len(self.queries)
        source = {"path": self.input, "subscribe": "in", "startingOffsets": self.rng.choice(("earliest", "latest"))}
        sink = {"path": self.out, "topic": "out", "storeConfig": self.settings, "lockTimeout": "20ms"}
        if self.rng.random() < 0.3:
            sink["flushDiskType"] = "ASYNC_FLUSH"
        query = Query(f"q{number}/", Checkpoint(self.identifier()), source, sink)
        if self.rng.random() < 0.5:
            sink["txnAppId"] = f"app-{number}"
            query.foreach = self.rng.random() < 0.5
        self.queries.append(query)
