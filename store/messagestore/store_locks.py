"""What one process holds of a store, and whose turn it is among the threads of this process.

    held    the root folder, then the lock that keeps brokers out, then the writer lock
    let go  in the same order: the next holder of the writer lock must not find this process attached

`StoreLocks` takes turns with other processes; each change of `Presence` happens there. `ThreadTurns` takes turns among
the threads of this process, before that.

Threads: `StoreLocks` belongs to the thread whose turn it is. Any thread may call `intact` and `broker_waits`, and read
`presence` and `attachment`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from messagestore.errors import NotAStoreError, StoreLockedError
from messagestore.files.disk import Disk
from messagestore.files.writer_lock import Attachment, WriterLock, attach
from messagestore.log.store_files import Paths
from messagestore.signal_handlers import pass_on
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.states import PRESENCES, Presence, PresenceEvent, moved

_BETWEEN_TURNS = "closing the store"


class StoreLocks:
    """What this process holds of one store.

    Parameters
    ----------
    paths : Paths
    disk : Disk
        It holds the root folder.
    """

    def __init__(self, paths: Paths, disk: Disk) -> None:
        self._paths, self._disk = paths, disk
        self.presence = Presence.DETACHED
        """It changes after a lock is taken and before one is released, so it never names a lock that is not held."""
        self.attachment: Attachment | None = None
        """The lock that keeps brokers out; None: this process is not attached."""
        self.writer_lock = WriterLock(paths.writer_lock)

    def _move(self, event: PresenceEvent) -> None:
        self.presence = moved(PRESENCES, self.presence, event)

    @property
    def attached(self) -> bool:
        """Whether this process keeps brokers out of the store."""
        return self.presence in (Presence.ATTACHED, Presence.HOLDING)

    @property
    def lost(self) -> bool:
        """Whether this process was attached, and no longer keeps brokers out."""
        return self.attachment is not None and not (self.attached and self.attachment.intact())

    def intact(self) -> bool:
        """Whether both locks are held, and their files are still the ones that were locked."""
        attachment = self.attachment
        return attachment is not None and attachment.intact() and self.writer_lock.intact()

    def broker_waits(self) -> bool:
        """Whether a broker waits to open the store."""
        attachment = self.attachment
        return attachment is not None and attachment.broker_waits()

    def hold_root(self, file_mode: int | None) -> bool:
        """Hold the folder that is at the root now: from now on, everything is read and written in this folder.

        Returns
        -------
        bool
            False: there is no folder.
        """
        try:
            self._disk.hold_root(self._paths.root, file_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False  # `make_root` makes it, or says what is wrong
        return True

    def attach(self) -> None:
        """Become one of the processes that are at work on the store."""
        self.attachment = attach(self._paths.root, self._disk)
        self._move(PresenceEvent.ATTACH)

    def take(
        self, timeout_s: float, description: str, writer: LogWriter | None, waits: Callable[[], bool] = lambda: True
    ) -> None:
        """Take the writer lock; from now on it is the turn of `writer`, if there is one already.

        Raises
        ------
        StoreLockedError
            Another process holds it for longer than `timeout_s`, or until `waits` is false.
        NotAStoreError
            The folder `spark` was removed.
        """
        try:
            self.writer_lock.acquire(timeout_s, description=description, waits=waits)
        except FileNotFoundError as error:
            pass_on(error)
            raise NotAStoreError(
                f"{self._paths.spark}: found no such folder; this process had the store open when it was removed. Put "
                "it back from a backup, or end all processes that had the store open, and open it again",
                path=self._paths.root,
            ) from error
        self._move(PresenceEvent.TAKE)
        if writer is not None:
            writer.take_turn()

    def check_place(self) -> None:
        """Check that the locks were taken in the folder that is held.

        Raises
        ------
        StoreLockedError
            Another folder came to the root's path meanwhile.
        """
        if not self.intact():
            raise StoreLockedError(
                f"{self._paths.root}: the folder, or a lock file in it, was renamed or replaced while the store was "
                f"opened. Nothing was written. Try again",
                path=self._paths.root,
                holder="a process that moves the store's folder",
            )

    def release(self, writer: LogWriter | None = None) -> None:
        """Release the writer lock; before that, the turn of `writer` ends."""
        self._move(PresenceEvent.GIVE)
        if writer is not None and self.writer_lock.held:
            writer.give_turn()
        self.writer_lock.release()

    def let_go(self) -> None:
        """Release everything, as far as it is held. After an interrupt, a second call does the rest."""
        self._disk.release_root(self._paths.root)
        self._move(PresenceEvent.DETACH)

        if self.attachment is not None:  # before the lock: its next holder must not find us attached
            self.attachment.detach()
            self.attachment = None

        self.release()
        self.writer_lock.close()
        self.writer_lock = WriterLock(self._paths.writer_lock)


class ThreadTurns:
    """The turns that the threads of one process take at a store; a thread may begin a turn within its own.

    Attributes
    ----------
    mutex : RLock
        Who holds it has the turn.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self.mutex = threading.RLock()
        self._turn_of = _BETWEEN_TURNS
        """What the thread does that holds `mutex`; for other threads that wait for it in vain."""

    @contextlib.contextmanager
    def turn(self, description: str, limit_s: float) -> Iterator[tuple[float, bool]]:
        """Hold the mutex; yields what is left of the time, and whether another thread had its turn meanwhile.

        Raises
        ------
        StoreLockedError
            Another thread holds it for longer than `limit_s`; the error says what for.
        """
        left_s, waited = limit_s, False
        taken: list[bool] = []
        try:
            # One step of the interpreter: no exception of a signal handler comes between the lock and the note of it
            taken.extend(map(self.mutex.acquire, (False,)))
            if not any(taken):
                begin_s = time.monotonic()
                taken.extend(map(self.mutex.acquire, (True,), (min(limit_s, threading.TIMEOUT_MAX),)))
                if not any(taken):
                    holder = f"another thread of this process, pid {os.getpid()} ({self._turn_of})"
                    raise StoreLockedError(
                        f"{self._paths.root}: still locked by {holder} after {limit_s:g} s. Let that thread finish, or "
                        f"allow more time (lockTimeout)",
                        path=self._paths.writer_lock,
                        holder=holder,
                    )
                left_s = max(0.0, limit_s - (time.monotonic() - begin_s))
                waited = True

            before, self._turn_of = self._turn_of, description
            try:
                yield left_s, waited
            finally:
                self._turn_of = before
        finally:
            if any(taken):
                self.mutex.release()
