"""A sink around a sink, which notes what each call cost: `format("profiled").option("profiled", "messagestore")`.

Spark runs the calls of a sink in processes of its own. Each call leaves a file in the folder of the option
`profileFolder`, and each commit also notes what every process of this Spark has used until then. Batches take turns:
the first of three is left alone, the second measures its steps by the clock, the third by CPU time of the thread.
"""

from __future__ import annotations

import cProfile
import json
import os
import resource
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from benchmarks import call_steps, process_tree
from benchmarks.spark_floors import DroppingSink
from messagestore.files.disk import Disk
from pyspark_messagestore.datasource import MessageStoreDataSource

PLAIN, WALL, CPU = "plain", "wall", "cpu"
MODES = (PLAIN, WALL, CPU)
SINKS: dict[str, type[DataSource]] = {"messagestore": MessageStoreDataSource, "dropping": DroppingSink}


class Call:
    """Measures one call of a sink, as a context.

    Parameters
    ----------
    folder : Path
        For the file that the call leaves.
    kind : str
        `task` or `commit`.
    batch : int
    """

    def __init__(self, folder: Path, kind: str, batch: int) -> None:
        self.folder, self.kind, self.batch = folder, kind, batch
        self.mode = MODES[batch % len(MODES)]
        self.bytes: Counter[str] = Counter()
        self.rows = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the block, and write what was found."""
        with ExitStack() as stack:
            if self.mode == PLAIN:
                stack.enter_context(_counted(self.bytes))
            profile = cProfile.Profile(time.thread_time if self.mode == CPU else time.perf_counter)

            wall_s, thread_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
            before = resource.getrusage(resource.RUSAGE_THREAD)
            if self.mode != PLAIN:
                profile.enable()

            yield
            profile.disable()

        after = resource.getrusage(resource.RUSAGE_THREAD)
        thread_s = time.thread_time() - thread_s

        found: dict[str, Any] = {
            "kind": self.kind,
            "batch": self.batch,
            "mode": self.mode,
            "pid": os.getpid(),
            "rows": self.rows,
            "wall_s": time.perf_counter() - wall_s,
            "thread_s": thread_s,
            "other_threads_s": max(0.0, time.process_time() - process_s - thread_s),
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
            "bytes": dict(self.bytes),
        }

        if self.mode != PLAIN:
            profile.create_stats()
            steps = call_steps.TASK if self.kind == "task" else call_steps.COMMIT
            found["steps"] = call_steps.seconds(profile, steps)

        if self.kind == "commit":
            jvm = process_tree.ancestor(os.getpid(), "java")
            found["jvm"] = jvm
            found["processes"] = {pid: asdict(process) for pid, process in process_tree.tree([jvm]).items()}
            found["at_s"] = time.time()

        name = self.folder / f"{self.kind}-{self.batch}-{uuid.uuid4().hex}"
        name.with_suffix(".part").write_text(json.dumps(found))
        name.with_suffix(".part").rename(name.with_suffix(".json"))

    def received(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches as they come; the time until each is here is a step of its own."""
        for batch in batches:
            self.rows += batch.num_rows
            if self.mode == PLAIN:
                self.bytes["received from the JVM"] += batch.nbytes
            yield batch


@contextmanager
def _counted(into: Counter[str]) -> Iterator[None]:
    """Count the bytes that go through `Disk`, by what is done and by the folder below the store's root."""

    def counted(name: str, word: str, size: Callable[[Any, Any], int]) -> Any:
        real = getattr(Disk, name)

        def call(self: Disk, file: Any, *args: Any, **kwargs: Any) -> Any:
            result = real(self, file, *args, **kwargs)
            into[f"{word} {_folder(file.path)}"] += size(args[0], result)
            return result

        return patch.object(Disk, name, call)

    with (
        counted("pwrite", "written to", lambda data, _: memoryview(data).nbytes),
        counted("pread", "read from", lambda _, result: len(result)),
        counted("pread_into", "read from", lambda _, result: int(result)),
    ):
        yield


def _folder(path: str) -> str:
    parts = Path(path).parts
    for name in ("staging", "commitlog", "consumequeue", "index"):
        if name in parts:
            return name
    return "small files"


class ProfiledWriter(DataSourceStreamArrowWriter):
    """Passes every call on to a writer, and measures it."""

    def __init__(self, writer: Any, folder: Path) -> None:
        self.writer, self.folder = writer, folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        call = Call(self.folder, "task", int(context.getLocalProperty("streaming.sql.batchId") or 0))
        with call.measured():
            message: WriterCommitMessage = self.writer.write(call.received(iterator))
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        with Call(self.folder, "commit", batchId).measured():
            self.writer.commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.writer.abort(messages, batchId)


class ProfiledSink(DataSource):
    """The sink of the format `profiled`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        given = {name: value for name, value in options.items() if name.lower() not in ("profiled", "profilefolder")}
        self.folder = Path(options["profileFolder"])
        self.sink = SINKS[options["profiled"]](type(options)(given))  # type: ignore[call-arg]

    @classmethod
    def name(cls) -> str:
        return "profiled"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return ProfiledWriter(self.sink.streamWriter(schema, overwrite), self.folder)
