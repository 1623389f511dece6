"""Writes to a store on this host: a `StoreWriter` over the staging folder and the store that this process attaches to.

The commit of the first batch creates the store. Until then only the staging folder is created, and only when a task
stages rows.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from messagestore.errors import NotAStoreError, StoreError, StoreLockedError
from messagestore.files.mapped_file import Disk
from messagestore.files.staging_files import Write, remove, sweep, sweep_write
from messagestore.files.topics import Topics
from messagestore.files.writer_lock import probe_java
from messagestore.format.config import StoreConfig
from messagestore.log.store_files import (
    Identity,
    Paths,
    check_root,
    config_of_records,
    looks_like_store,
    make_staging,
    refuse_to_write,
)
from messagestore.session import AttachedStore, attached_store, detach_at_the_end
from messagestore.spi.interface import Committed, Description
from messagestore.write.log_writer import LogWriter
from messagestore.write.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.write.transaction import BatchRequest, BatchResult, append_batch

SWEEP_INTERVAL_S = 600.0
"""How often this process looks for files of dead writers."""
_ABORT_TIMEOUT_S = 5.0

_last_sweep_s: dict[str, float] = {}
"""When this process last swept each staging folder. It only saves work."""


class LocalWriter:
    """Writes to a store on this host.

    Parameters
    ----------
    path : str
    config : StoreConfig
    staging_ttl_s : float
    ends_abruptly : bool
        See `Stores.writer`.
    disk : Disk | None
    attached : function, optional
        Returns this process's `AttachedStore` for a path.

    Attributes
    ----------
    file_type : type of StagingWriter
        The type that `stage` creates. The fault harness puts another one here.
    """

    file_type = StagingWriter

    def __init__(
        self,
        path: str,
        config: StoreConfig,
        *,
        staging_ttl_s: float,
        ends_abruptly: bool = False,
        disk: Disk | None = None,
        attached: Callable[[str, StoreConfig], AttachedStore] = attached_store,
    ) -> None:
        self.paths = Paths(path, config.file_mode_bits)
        self.config = config
        self.disk = disk or Disk()
        self._staging_ttl_s = staging_ttl_s
        self._ends_abruptly = ends_abruptly
        self._make_attached = attached

    # ---- what is there

    def describe(self) -> Description:
        """What is at the path now."""
        found = self._described()
        topics = Topics(self.disk, self.paths.root)
        topics.load()
        counts = {name: topic.write_queue_nums for name in topics.names if (topic := topics.get(name)) is not None}
        return replace(found, queue_counts=counts)

    def _described(self) -> Description:
        """The result of `describe` without the queue counts."""
        identity = Identity.read(self.disk, self.paths.identity)
        exists = identity is not None or looks_like_store(self.disk, self.paths)
        if identity is None:
            return Description(exists=exists, config=self.config)
        return Description(identity.store_id, identity.known_ids - {identity.store_id}, exists, config=self.config)

    def prepare(self) -> Description:
        """What is at the path, after a check that it may be written."""
        holder = probe_java(self.paths.root)
        if holder is not None:
            raise StoreLockedError(
                f"{self.paths.lock}: locked by {holder.words}; stop it, or write to another store: nothing of this "
                f"batch was written",
                path=self.paths.lock,
                holder=holder.words,
            )
        check_root(self.disk, self.paths)
        refuse_to_write(self.disk, self.paths, self.config)
        found = self._described()
        if found.exists and not found.store_id:  # a broker's store
            with self._attached().writing("making the store"):
                found = self._described()
        if found.store_id:
            self.config = config_of_records(self.disk, self.paths, self.config)
        self._sweep()  # before tasks need the room: a driver that was killed repeatedly left its files each time
        return replace(found, config=self.config)

    def _check_place(self, store_id: str) -> bool:
        """Whether the store that a write was planned for is there; False if there was no store, and there is none.

        Raises
        ------
        NotAStoreError
            Another store is there, or the store is missing.
        """
        identity = Identity.read(self.disk, self.paths.identity)
        if not store_id:
            return identity is not None
        if identity is None or identity.store_id != store_id:
            found = "no store" if identity is None else f"another store, {identity.store_id}"
            raise NotAStoreError(
                f"{self.paths.root}: host {socket.gethostname()} found {found} there, and the write was planned for "
                f"store {store_id}; executors and driver must see the same disk, and nobody may replace the folder "
                f"meanwhile",
                path=self.paths.root,
            )
        return True

    # ---- tasks

    def stage(self, write: Write, store_id: str) -> StagingWriter:
        """A new file in the staging folder of the store, or of the path where the store will be created."""
        if not self._check_place(store_id):
            make_staging(self.disk, self.paths)
        return self.file_type(self.paths.staging, self.disk, write=write)

    # ---- the driver

    def commit(
        self, files: Sequence[StagedFile], request: BatchRequest, store_id: str, *, closing: bool = False
    ) -> Committed:
        """Append staged files as one batch."""
        self._check_place(store_id)
        chunks = StagedChunks(files, self.disk)
        store = self._attached()
        with store.writing(_description(request)) as writer:
            self._check_place(store_id)  # again, now that nobody else can create a store here
            committed = Committed(writer.files.store_id, self.append(writer, chunks, request))
        if closing:
            with contextlib.suppress(StoreError, OSError):  # the batch is in the log; the next writer recovers
                store.detach()
        self._remove([file.path for file in files])
        self._sweep()
        return committed

    def append(self, writer: LogWriter, chunks: StagedChunks, request: BatchRequest) -> BatchResult:
        """The step of `commit` that holds the writer lock."""
        return append_batch(writer, chunks, request)

    def abort(self, names: Sequence[str], store_id: str) -> None:
        """Delete staged files, under the writer lock if there is a store."""
        if not self._check_place(store_id):
            self._remove(names)  # there was no store to commit to, and none is created here
            return
        with self._attached().writing("abort", min(_ABORT_TIMEOUT_S, self.config.lock_timeout_s)):
            self._remove(names)
        self._sweep()

    def _remove(self, names: Sequence[str]) -> None:
        """Delete the files of a write that has ended, and those that its failed attempts left."""
        remove(names, self.disk)
        sweep_write(names, self.disk)

    def _sweep(self) -> None:
        """Delete files of dead writers if the last sweep was at least `SWEEP_INTERVAL_S` ago."""
        folder, now_s = self.paths.staging, time.monotonic()
        if now_s - _last_sweep_s.get(folder, -SWEEP_INTERVAL_S) >= SWEEP_INTERVAL_S:
            _last_sweep_s[folder] = now_s
            sweep(folder, self._staging_ttl_s, self.disk)

    def _attached(self) -> AttachedStore:
        if self._ends_abruptly:
            detach_at_the_end()
        return self._make_attached(self.paths.root, self.config)


def _description(request: BatchRequest) -> str:
    """The text by which other processes learn who holds the writer lock."""
    if request.app_id is None:
        return "a batch write of Spark"
    return f"batch {request.version} of app {request.app_id}"
