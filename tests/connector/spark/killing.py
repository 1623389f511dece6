"""The data source under test, with kill points: a process kills itself, or another, at a named place, once.

The plan is a file (MESSAGESTORE_KILL_PLAN) with one line, `<place> <victim> <batch id>`; whoever gets there takes it
away first, so the kill happens once. Victims:

    self        this worker
    executor    the executor's JVM, its daemon and this worker
    jvm         the driver's JVM alone: its Python processes notice
    zombie      the JVM and the daemon; this worker sleeps for a while and then goes on
    <pid>       that process and all below it
    raise       nobody: an error is raised here instead
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from messagestore.batches.staging import StagingWriter
from messagestore.files.disk import Disk
from messagestore.spi.local import LocalStores, LocalWriter
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.options.positions import LATEST
from pyspark_messagestore.sink import writers as sink
from pyspark_messagestore.source import readers as source
from spark_runs import fill

PLAN = "MESSAGESTORE_KILL_PLAN"
BATCH_ROWS = 250
ARRIVING = 2 * BATCH_ROWS
_ZOMBIE_SLEEP_S = 8.0


class PlannedError(RuntimeError):
    """Raised where the plan says so."""


def at(place: str, batch_id: object) -> None:
    """Kill, when the plan says so."""
    path = os.environ.get(PLAN, "")
    try:
        with open(path, encoding="ascii") as plan:
            wanted, victim, number = plan.read().split()
        if (wanted, number) != (place, str(batch_id)):
            return
        os.rename(path, path + ".done")
    except (OSError, ValueError):
        return
    if victim == "raise":
        raise PlannedError(f"raised at {place}")
    if victim == "zombie":
        with open(path + ".zombie", "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    for pid in victims_of(victim):
        os.kill(pid, signal.SIGKILL)
    time.sleep(_ZOMBIE_SLEEP_S if victim == "zombie" else 60)


def victims_of(victim: str) -> list[int]:
    """Process ids. An executor is the JVM above the daemon above this worker; with it goes the daemon's group."""
    if victim == "self":
        return [os.getpid()]
    if victim == "executor":
        daemon = os.getppid()
        return [parent_of(daemon), daemon, os.getpid()]
    if victim in ("jvm", "zombie"):
        above = ancestors(os.getpid())
        jvm = next(pid for pid in above if name_of(pid) == "java")
        return above[above.index(jvm) :: -1] if victim == "zombie" else [jvm]
    return family(int(victim))


def family(pid: int) -> list[int]:
    """A process and all below it, but this one last."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                parents[int(name)] = parent_of(int(name))
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return sorted(found, key=lambda each: each == os.getpid())


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def ancestors(pid: int) -> list[int]:
    """Its parent, the parent's parent and so on."""
    found = []
    while (pid := parent_of(pid)) > 1:
        found.append(pid)
    return found


def name_of(pid: int) -> str:
    with open(f"/proc/{pid}/comm", encoding="ascii") as comm:
        return comm.read().strip()


@contextmanager
def watched_disk(batch_id: object) -> Iterator[None]:
    """While a batch is appended: write-half, data-synced, head-written, head-synced, dispatch."""
    pwrite, fdatasync = Disk.pwrite, Disk.fdatasync
    head_written = False

    def watched_pwrite(disk, file, data, position):
        nonlocal head_written
        size = memoryview(data).nbytes
        if "/commitlog/" in file.path and size > 8:
            pwrite(disk, file, memoryview(data).cast("B")[: size // 2], position)
            at("write-half", batch_id)
        pwrite(disk, file, data, position)
        if "/commitlog/" in file.path and size == 8:
            head_written = True
            at("head-written", batch_id)
        if "/consumequeue/" in file.path:
            at("dispatch", batch_id)

    def watched_fdatasync(disk, file):
        fdatasync(disk, file)
        if "/commitlog/" in file.path:
            at("head-synced" if head_written else "data-synced", batch_id)

    Disk.pwrite, Disk.fdatasync = watched_pwrite, watched_fdatasync
    try:
        yield
    finally:
        Disk.pwrite, Disk.fdatasync = pwrite, fdatasync


class KillingStore(LocalWriter):
    """Place: locked, and those of `watched_disk`."""

    def append(self, writer, chunks, request, planned):
        at("locked", request.version)
        with watched_disk(request.version):
            return super().append(writer, chunks, request, planned)


class KillingStores(LocalStores):
    """Stores in which a commit may kill."""

    def writer(self, path, config, **options):
        return KillingStore(path, config, **options)


class KillingWriter(sink.StreamWriter):
    """Places: task, staged-half, staged; commit, locked, data, those of `watched_disk`, sealed, published, returned;
    abort, aborted."""

    def write(self, iterator):
        from pyspark import TaskContext

        batch_id = TaskContext.get().getLocalProperty("streaming.sql.batchId")
        at("task", batch_id)
        half = StagingWriter.write

        def write_half(writer, chunk):
            half(writer, chunk)
            at("staged-half", batch_id)

        StagingWriter.write = write_half
        try:
            message = super().write(iterator)
        finally:
            StagingWriter.write = half
        at("staged", batch_id)
        return message

    def commit(self, messages, batchId):  # noqa: N803
        from messagestore.writer import whole_batch

        at("commit", batchId)
        originals = whole_batch._seal, whole_batch._publish

        def data(*args):
            at("data", batchId)
            originals[0](*args)
            at("sealed", batchId)

        def published(*args):
            originals[1](*args)
            at("published", batchId)

        whole_batch._seal, whole_batch._publish = data, published
        try:
            super().commit(messages, batchId)
        finally:
            whole_batch._seal, whole_batch._publish = originals
        at("returned", batchId)

    def abort(self, messages, batchId):  # noqa: N803
        at("abort", batchId)
        super().abort(messages, batchId)
        super().abort(messages, batchId)  # a second one finds nothing to do
        at("aborted", batchId)


class KillingReader(source.StreamReader):
    """Places: offsets (offsets/N is written), commits (commits/N is written).

    If the query begins at `latest`, `BATCH_ROWS` messages arrive after each answer to the question where that is, until
    there are `ARRIVING`.
    """

    def initialOffset(self):  # noqa: N802
        found = super().initialOffset()
        count = sum(self.follower.ends().values())
        if self.options.starting.wanted == LATEST and count < ARRIVING:
            fill(str(self.options.path), BATCH_ROWS, first=count)
        return found

    def partitions(self, start, end):
        at("offsets", batch_of(start))
        return super().partitions(start, end)

    def latestOffset(self, start, limit):  # noqa: N802
        at("commits", batch_of(start) - 1)
        return super().latestOffset(start, limit)


def batch_of(start: dict) -> int:
    """Number of the batch that begins at an offset, when all before have `BATCH_ROWS` rows."""
    return sum(offset for queues in start["queues"].values() for offset in queues.values()) // BATCH_ROWS


class KillingSource(MessageStoreDataSource):
    """Format `killing`."""

    stores = KillingStores()

    @classmethod
    def name(cls):
        return "killing"

    def streamWriter(self, schema, overwrite):  # noqa: N802
        return KillingWriter(super().streamWriter(schema, overwrite).sink)

    def streamReader(self, schema):  # noqa: N802
        reader = super().streamReader(schema)
        return KillingReader(reader.options, reader.projection, reader.stores)
