"""The data source under test, with kill points: a process kills itself, or another, at a named place, once.

The plan is a file (MESSAGESTORE_KILL_PLAN) with one line, `<place> <victim> <batch id>`; whoever gets there takes it
away first, so the kill happens once. Victims:
`self`, `executor` (its JVM and workers), or a process id: it and all below it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from pyspark_messagestore import sink
from pyspark_messagestore.datasource import MessageStoreDataSource

PLAN = "MESSAGESTORE_KILL_PLAN"


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
    for pid in victims_of(victim):
        os.kill(pid, signal.SIGKILL)
    time.sleep(60)


def victims_of(victim: str) -> list[int]:
    """Process ids. An executor is the JVM above the daemon above this worker; with it goes the daemon's group."""
    if victim == "self":
        return [os.getpid()]
    if victim == "executor":
        daemon = os.getppid()
        return [parent_of(daemon), daemon, os.getpid()]
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


class KillingWriter(sink.StreamWriter):
    """Places: task, staged, staged-half, commit, locked, data, sealed, published, returned."""

    def write(self, iterator):
        from pyspark import TaskContext

        batch_id = TaskContext.get().getLocalProperty("streaming.sql.batchId")
        at("task", batch_id)
        half = sink.StagingWriter.write

        def write_half(writer, chunk):
            half(writer, chunk)
            at("staged-half", batch_id)

        sink.StagingWriter.write = write_half
        try:
            message = super().write(iterator)
        finally:
            sink.StagingWriter.write = half
        at("staged", batch_id)
        return message

    def commit(self, messages, batchId):  # noqa: N803
        from messagestore import transaction

        at("commit", batchId)
        originals = sink.append_batch, transaction._commit, transaction._publish

        def locked(*args):
            at("locked", batchId)
            return originals[0](*args)

        def data(*args):
            at("data", batchId)
            originals[1](*args)
            at("sealed", batchId)

        def published(*args):
            originals[2](*args)
            at("published", batchId)

        sink.append_batch, transaction._commit, transaction._publish = locked, data, published
        try:
            super().commit(messages, batchId)
        finally:
            sink.append_batch, transaction._commit, transaction._publish = originals
        at("returned", batchId)

    def abort(self, messages, batchId):  # noqa: N803
        at("abort", batchId)
        super().abort(messages, batchId)


class KillingSource(MessageStoreDataSource):
    """Format `killing`."""

    @classmethod
    def name(cls):
        return "killing"

    def streamWriter(self, schema, overwrite):  # noqa: N802
        return KillingWriter(super().streamWriter(schema, overwrite).sink)
