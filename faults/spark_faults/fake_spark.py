"""A small model of how Spark uses a Python sink and source; a test compares its calls with those of a real Spark.

It makes each call of the connector's own classes in the process in which Spark makes it.

A driver is a generator. It yields the name of each place where it could be killed, or where another driver gets its
turn.

    started    a new query knows where it begins            task       a task's message has arrived
    latest     the range of the next batch is planned      commit     all tasks are finished
    offsets    offsets/N is written                        returned   the commit has returned
    planned    sink and partitions are created             commits    commits/N is written
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructField, StructType

from messagestore import StoreError
from pyspark_messagestore.datasource import MessageStoreDataSource
from spark_faults.ledger import Attempt
from spark_faults.processes import Killed, Process, ProcessStores

READ = StructType([StructField("body", BinaryType())])
WRITTEN = StructType([StructField("body", BinaryType()), StructField("keys", ArrayType(StringType()))])
_TASK_ROWS = 7
"""Rows of an Arrow batch that Spark passes to a task: few, so that a task has several batches."""

_runs = itertools.count()


class FakeSource(MessageStoreDataSource):
    """The data source, with the stores of the process that calls it."""

    stores = ProcessStores()


Faults = Callable[[str], Process]
"""Maps a kind of process to a function that makes one, possibly doomed. Kinds: planner, task, commit, abort."""


class QueryFailedError(Exception):
    """The query ended with an error; `__cause__` is what the sink, the source or a task raised."""


class ConcurrentUpdateError(Exception):
    """Another driver wrote this entry of the checkpoint: CONCURRENT_STREAM_LOG_UPDATE."""


@dataclass
class Checkpoint:
    """Spark's checkpoint folder: the query's id, offsets/N and commits/N as text."""

    query_id: str
    offsets: dict[int, str] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)

    def copy(self) -> Checkpoint:
        """Copy the checkpoint as `cp -r` would."""
        return copy.deepcopy(self)

    def roll_back(self, count: int) -> None:
        """Restore the state as if the last batches had never been planned."""
        for number in sorted(self.offsets)[-count:]:
            del self.offsets[number]
            self.commits.discard(number)

    @property
    def last(self) -> int | None:
        """Return the number of the last batch that was planned."""
        return max(self.offsets, default=None)


class Driver:
    """One driver JVM with one query on a checkpoint.

    Parameters
    ----------
    checkpoint : Checkpoint
    source, sink : dict
        Options; if the sink's options contain `txnAppId`, `app` is its value.
    label : str
        What the query puts before every body.
    faults : callable
        Creates the driver's processes.
    foreach : bool
        Use `foreachBatch` and a batch write.
    attempts : int
        How often a task is tried.

    Attributes
    ----------
    begins : dict of int to int | None
        The ends of the input's queues when the query asked where it begins, until offsets/0 is written.
    kind : type of MessageStoreDataSource
        The data source that the query uses.
    written : StructType
        The columns that `_columns` gives the sink.
    """

    kind: type[MessageStoreDataSource] = FakeSource
    written: StructType = WRITTEN

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: dict[str, str],
        sink: dict[str, str],
        label: str,
        faults: Faults,
        *,
        foreach: bool = False,
        attempts: int = 2,
    ) -> None:
        self.checkpoint = checkpoint
        self.source_options, self.sink_options = source, sink
        self.label, self.faults, self.foreach, self.attempts = label, faults, foreach, attempts
        self.app = sink.get("txnAppId", checkpoint.query_id or label)
        self.run_id = f"run-{next(_runs)}"
        self.commit_process: Process | None = None
        self.task_error: StoreError | None = None
        self.attempt: Attempt | None = None
        self.messages: list[Any] = []
        self.writer: bytes = b""
        self.reader: Any = self._new_reader()
        self.begins: dict[int, int] | None = None
        self.on_commit: Callable[[Attempt], None] = lambda _: None

    def _new_reader(self) -> Any:
        return self.kind(dict(self.source_options)).streamReader(READ)

    # ---- the micro-batch

    def batches(self) -> Iterator[str]:
        """Run micro-batches until there is nothing new; then yield `idle` and end.

        Raises
        ------
        QueryFailedError, ConcurrentUpdateError
        Killed
            The driver itself died.
        """
        checkpoint, reader = self.checkpoint, self.reader
        start: dict[str, Any] | None = None
        last = checkpoint.last
        if last is not None and last in checkpoint.commits:
            start = json.loads(checkpoint.offsets[last])
        elif last is not None:
            start = json.loads(checkpoint.offsets[last - 1]) if last else self._call("initialOffset")
            yield from self._batch(last, start, json.loads(checkpoint.offsets[last]))
            start = json.loads(checkpoint.offsets[last])
        number = 0 if last is None else last + 1  # kept in memory, because another driver may write to the checkpoint
        while True:
            begin = self._call("initialOffset") if start is None else start
            if start is None:
                yield "started"
            end = self._call("latestOffset", begin, self._call("getDefaultReadLimit") or ReadAllAvailable())
            if start is not None and _text(end) == _text(start):
                yield "idle"
                return
            yield "latest"
            if number in checkpoint.offsets:
                raise ConcurrentUpdateError(f"offsets/{number}")
            checkpoint.offsets[number] = _text(end)
            yield "offsets"
            if start is not None:
                reader.commit(copy.deepcopy(start))
            begin = self._call("initialOffset") if start is None else start  # Spark asks again
            yield from self._batch(number, begin, end)
            start = json.loads(_text(end))
            number += 1

    def _call(self, name: str, *arguments: object) -> Any:
        """Call the source in the driver's Python process; the result is converted to text and back."""
        try:
            found = getattr(self.reader, name)(*copy.deepcopy(arguments))
        except Killed:
            raise
        except Exception as error:
            raise QueryFailedError(f"source: {name}") from error
        return json.loads(_text(found)) if isinstance(found, dict) else found

    def _batch(self, number: int, start: dict[str, Any], end: dict[str, Any]) -> Iterator[str]:
        partitions = self._call("partitions", start, end) or [None]  # without rows, Spark runs one task
        self.writer = self._plan(number)
        yield "planned"
        rows: list[bytes] = []
        self.messages = [None] * len(partitions)
        for index, partition in enumerate(partitions):
            message, taken = self._task(index, number, pickle.dumps(partition))
            self.messages[index] = message
            if message is None:
                self._abort(number)
                raise QueryFailedError("a task failed too often") from self.task_error
            rows += taken
            yield "task"
        self.attempt = Attempt(self.app, number, rows, self.checkpoint.query_id)
        yield "commit"
        self._commit(number)
        yield "returned"
        if number in self.checkpoint.commits:
            raise ConcurrentUpdateError(f"commits/{number}")
        self.checkpoint.commits.add(number)
        yield "commits"

    # ---- its processes

    def _sink_again(self, number: int) -> Any:
        """Return the sink for commit or abort.

        A stream recreates it in their own process; a batch uses the planner's.
        """
        return pickle.loads(self.writer) if self.foreach else self._sink(number)

    def _plan(self, number: int) -> bytes:
        """Create the sink as a planner does, and pickle it for the tasks."""
        process = self.faults("planner")
        try:
            with process.running():
                return pickle.dumps(self._sink(number))
        except (Killed, Exception) as error:
            raise QueryFailedError("planner") from error
        finally:
            process.die()

    def _sink(self, number: int) -> Any:
        """Create the sink as a planner does."""
        options = dict(self.sink_options)
        if not self.foreach:
            return self.kind(options).streamWriter(self.written, overwrite=False)
        if "txnAppId" in options:
            options["txnVersion"] = str(number)
        if self.checkpoint.query_id:  # as MessageStoreSink does
            options["txnVersionSource"] = "spark"
        return self.kind(options).writer(self.written, overwrite=False)

    def _task(self, index: int, number: int, partition: bytes) -> tuple[Any, list[bytes]]:
        """Run all attempts of one task; return its message or None, and the rows that it wrote."""
        self.task_error = None
        for _ in range(self.attempts):
            process = self.faults("task")

            try:
                with process.running():
                    query_id = self.checkpoint.query_id or None
                    process.task(index, query_id, number if query_id else None, self.run_id if query_id else None)
                    reader, writer = pickle.loads(pickle.dumps(self.reader)), pickle.loads(self.writer)

                    rows: list[bytes] = []
                    given = pickle.loads(partition)
                    batches = self._transformed(iter(()) if given is None else reader.read(given), rows, process)
                    return pickle.loads(pickle.dumps(writer.write(batches))), rows
            except (Killed, TaskError):
                continue
            except StoreError as error:
                self.task_error = error
                continue
            finally:
                process.die()

        return None, []

    def _transformed(
        self, batches: Iterator[pa.RecordBatch], rows: list[bytes], process: Process
    ) -> Iterator[pa.RecordBatch]:
        """Apply select concat(label, body) body, array(<the queue it came from>) keys."""
        for batch in batches:
            for first in range(0, batch.num_rows, _TASK_ROWS):
                if process.bad_row:
                    raise TaskError
                bodies = [self.label.encode() + b.as_py() for b in batch.column("body").slice(first, _TASK_ROWS)]
                rows += bodies
                yield self._columns(bodies)

    def _columns(self, bodies: list[bytes]) -> pa.RecordBatch:
        keys = [[body.split(b"/")[1].decode()] for body in bodies]
        return pa.record_batch([pa.array(bodies, pa.binary()), pa.array(keys)], ["body", "keys"])

    def commit_in(self, process: Process, number: int) -> None:
        """Call `commit` in a process; if the process is asleep, it can continue after its driver is dead."""
        with process.running():
            process.task(0, None, None)
            writer, messages = self._sink_again(number), pickle.loads(pickle.dumps(self.messages))
            if self.foreach:
                writer.commit(messages)
            else:
                writer.commit(messages, batchId=number)

    def _commit(self, number: int) -> None:
        assert self.attempt is not None
        self.on_commit(self.attempt)
        if self.commit_process is None or self.commit_process.disk.dead:
            self.commit_process = self.faults("commit")
        process = self.commit_process
        try:
            self.commit_in(process, number)
            if process.raises_after:
                process.raises_after = False
                raise RuntimeError("raised after publishing")
        except (Killed, Exception) as error:
            self._abort(number)
            raise QueryFailedError(f"commit {number}") from error

    def _abort(self, number: int) -> None:
        """Abort in another process than the commit; an error of the abort is lost."""
        process = self.faults("abort")
        for _ in range(process.times):
            try:
                with process.running():
                    process.task(0, None, None)
                    writer = self._sink_again(number)
                    if self.foreach:
                        writer.abort(pickle.loads(pickle.dumps(self.messages)))
                    else:
                        writer.abort(pickle.loads(pickle.dumps(self.messages)), batchId=number)
            except (Killed, Exception):  # noqa: BLE001 # Spark reports the error that led here
                break
        process.die()

    def die(self, *, zombie: bool = False) -> None:
        """Kill the JVM with SIGKILL: its Python processes end with it, except a commit whose daemon died, too."""
        if self.commit_process is not None and not zombie:
            self.commit_process.die()
        self.reader.stop()


@dataclass
class Given:
    """A DataFrame of given rows, which a batch job reads."""

    partitions: list[list[bytes]]

    def read(self, partition: list[bytes]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        yield pa.record_batch({"body": pa.array(partition, pa.binary())})

    def stop(self) -> None:
        """Do nothing, because there is nothing to release."""


class Job(Driver):
    """A batch job: `df.write` with a given version, or without one.

    Parameters
    ----------
    partitions : list of list of bytes
        The rows.
    sink : dict
        Options; they include `txnVersion`, or have no `txnAppId`.
    """

    def __init__(self, partitions: list[list[bytes]], sink: dict[str, str], label: str, faults: Faults) -> None:
        self.given = Given(partitions)
        super().__init__(Checkpoint(""), {}, sink, label, faults, foreach=True)

    def _new_reader(self) -> Any:
        return self.given

    def batches(self) -> Iterator[str]:
        """Run the only batch."""
        yield from self._batch(int(self.sink_options.get("txnVersion", "0")), {}, {})
        yield "idle"

    def _call(self, name: str, *arguments: object) -> Any:
        return self.given.partitions


class TaskError(Exception):
    """A row that the user's code cannot process."""


def _text(offset: dict[str, Any]) -> str:
    return json.dumps(offset)
