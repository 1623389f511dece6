"""Processes of a fake Spark: each has its own writer of a store, and can be killed or stopped at any of its operations.

Locks of the store belong to descriptors, so two of these exclude each other as two real processes do. A process that
dies releases its locks but cleans nothing up.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from crash.simdisk import KillDisk, Killed, Operation
from messagestore import StoreConfig, message_store
from messagestore.batches.staging import StagingWriter
from messagestore.session import AttachedStore
from messagestore.spi import Proven
from messagestore.spi.local import LocalReader, LocalWriter
from messagestore.spi.location import Location
from pyspark_messagestore.sink import writers as sink
from pyspark_messagestore.source import follower, same_log
from pyspark_messagestore.source import readers as source

T = TypeVar("T")
_current = threading.local()

WAIT_S = 30.0


def current() -> Process:
    """Return the process that this thread plays."""
    return _current.process


class StoppingDisk(KillDisk):
    """A disk on which one operation waits until it may continue: a process that sleeps while others continue.

    `doomed_at` is a site (see `site_of`), and the number of operations there that the process survives.
    """

    def __init__(self, stop_at: int | None = None, kill_at: int | None = None, *, half_writes: bool = False) -> None:
        super().__init__(kill_at, half_writes=half_writes)
        self.stop_at = stop_at
        self.doomed_at: tuple[str, int] | None = None
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def _run(
        self, operation: Operation, call: Callable[[], T], half: Callable[[], object] | None = None, size: int = 0
    ) -> T:
        if len(self.operations) == self.stop_at and not self.stopped.is_set():
            self.stopped.set()
            assert self.go_on.wait(WAIT_S), "nobody woke it up"
        if self.doomed_at is not None and site_of(operation) == self.doomed_at[0]:
            site, left = self.doomed_at
            self.doomed_at = (site, left - 1) if left else None
            self.kill_at = self.kill_at if left else len(self.operations)
        return super()._run(operation, call, half, size)


class _Store(AttachedStore):
    """A store without a thread that detaches later, because the history decides when to detach."""

    def _watch(self) -> None:
        return


class Process:
    """One process.

    Parameters
    ----------
    kill_at : int | None
        How many changes of the disk the process makes before it dies in the next one.
    stop_at : int | None
        The change before which the process sleeps.
    half : bool
        Complete half of the write in which the process dies.

    Attributes
    ----------
    bad_row : bool
        For a task: its code raises at the first row.
    raises_after : bool
        For a commit: its next call raises after the batch is published.
    times : int
        For an abort: how often it is called.
    """

    def __init__(self, kill_at: int | None = None, stop_at: int | None = None, *, half: bool = False) -> None:
        self.disk = StoppingDisk(stop_at, kill_at, half_writes=half)
        self.bad_row = self.raises_after = self.counted = False
        self.times = 1
        self.stores: dict[str, _Store] = {}
        self.context: SimpleNamespace | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Process]:
        """Let this thread play the process until the block ends; if it is killed there, the process ends."""
        before = getattr(_current, "process", None)
        _current.process = self
        try:
            yield self
        except Killed:
            self.die()
            raise
        finally:
            _current.process = before

    def store(self, root: str | os.PathLike[str], config: StoreConfig | None = None) -> _Store:
        """Return the process's writer of the store at a root."""
        self.disk.check_alive()
        path = os.path.realpath(os.fspath(root))
        if path not in self.stores:
            self.stores[path] = _Store(path, config or StoreConfig(), self.disk)
        return self.stores[path]

    def task(self, partition_id: int, query_id: str | None, batch_id: int | None, run_id: str | None = None) -> None:
        """Set the result of `TaskContext.get()`; the run is the driver's, which is new with each start of a query."""
        local = {
            "sql.streaming.queryId": query_id,
            "streaming.sql.batchId": None if batch_id is None else str(batch_id),
            "spark.jobGroup.id": run_id,
        }
        self.context = SimpleNamespace(partitionId=lambda: partition_id, getLocalProperty=local.get)

    def idle(self) -> None:
        """Detach, because nothing was appended for a while."""
        with self.running():
            for store in self.stores.values():
                store.detach()

    def die(self) -> None:
        """Kill the process: the system releases its locks."""
        if self.disk.killed_in is None:
            self.disk.killed_in = Operation("kill", "", "from outside")
        for store in self.stores.values():
            store._drop()
        self.stores.clear()


class _StagingWriter(StagingWriter):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not current().disk.dead:  # a dead process removes nothing
            super().__exit__(kind, error, trace)
        else:
            self._file.close()


class _Writer(LocalWriter):
    file_type = _StagingWriter


class ProcessStores:
    """Opens stores as the process that the calling thread plays; tasks pickle it by its name."""

    def reader(
        self,
        path: Location | str,
        config: StoreConfig | None = None,
        proven: Proven | None = None,
        *,
        to_gather: bool = False,
    ) -> LocalReader:
        """Return a reader; reading changes nothing, so it needs no process."""
        return LocalReader(path, config, proven)

    def writer(
        self,
        path: Location | str,
        config: StoreConfig,
        *,
        staging_ttl_s: float,
        staging_dir: str | None = None,
        ends_abruptly: bool = False,
    ) -> LocalWriter:
        """Return a writer that uses the process's own disk and locks."""
        process = current()
        return _Writer(
            path,
            config,
            staging_ttl_s=staging_ttl_s,
            staging_dir=staging_dir,
            ends_abruptly=ends_abruptly,
            disk=process.disk,
            attached=process.store,
        )


def connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, do everything as the process that the calling thread plays."""
    monkeypatch.setattr(message_store, "attached_store", lambda path, config, disk: current().store(path, config))
    monkeypatch.setattr(sink, "TaskContext", SimpleNamespace(get=lambda: current().context))
    for module in (source, follower, same_log):
        monkeypatch.setattr(module._log, "disabled", True)
    monkeypatch.setattr(threading, "excepthook", _quiet(threading.excepthook))


def _quiet(hook: Callable[[Any], object]) -> Callable[[Any], None]:
    """Suppress the traceback of a thread that dies with its process."""

    def said(arguments: Any) -> None:
        if not issubclass(arguments.exc_type, Killed):
            hook(arguments)

    return said


COMMIT_SITES = ("write", "data or head sync", "head write", "dispatch", "state", "clean end", "staged removed")


def site_of(operation: Operation) -> str:
    """Return where in the protocol an operation lies, in the terms of the list of kill sites."""
    path = Path(operation.path)
    folder = path.parent.name
    if operation.name == "kill":
        return "between two calls"
    if folder == "staging":
        return {"open_new": "staged create", "unlink": "staged removed"}.get(operation.name, "staged half")
    if "consumequeue" in path.parts or folder == "index" or "/index/" in operation.path:
        return "dispatch"
    if folder == "commitlog" or path.name == "commitlog":
        return _log_site(operation)
    return {"state": "state", "abort": "attach or detach", "checkpoint": "clean end", "journal": "clean end"}.get(
        path.name.removesuffix(".tmp"), "making the store"
    )


def _log_site(operation: Operation) -> str:
    if operation.name == "fdatasync":
        return "data or head sync"
    if operation.name == "pwrite":
        return "head write" if operation.detail.startswith("8 bytes") else "write"
    return "segment"
