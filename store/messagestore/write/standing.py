"""Who may write, and whether what was written can be believed: what all parts of a writer stand on.

`Standing` knows whether its process holds the writer lock, whether a sync has failed, and what `state` says. It is the
only one that writes `state`, and it syncs the log. `LogWriter` is a `Standing` that appends and publishes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

from messagestore.errors import (
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.files.state import State, boot_hash
from messagestore.format.layout import STATE_POISONED
from messagestore.format.rows import Row, Rows
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.store_files import Paths, StoreFiles
from messagestore.write.states import HEALTHS, TURNS, Health, HealthEvent, Turn, TurnEvent, moved

_log = logging.getLogger(__name__)
_LOCKS_CHECK_S = 0.02


class LogEnd(NamedTuple):
    """Where the log ends, and the last record before that end (`size` 0: there is none)."""

    physical_offset: int
    last_position: int
    last_size: int
    last_store_timestamp_ms: int


def broker_comes(paths: Paths) -> StoreLockedError:
    """The error for who wants to write while a broker waits to open the store."""
    holder = "a RocketMQ broker that is starting"
    return StoreLockedError(
        f"{paths.lock}: {holder} waits to open this store, and gets it as soon as what was begun before is finished. "
        f"Nothing more is written by this process; what was acknowledged is on the disk. Open the store again when the "
        f"broker has stopped",
        path=paths.lock,
        holder=holder,
    )


class _Unbroken:
    """`Standing.unbroken`; a class, since a generator costs each put a microsecond more."""

    __slots__ = ("_failures", "_what", "_writer")

    def __init__(self, writer: Standing, what: str, failures: bool) -> None:
        self._writer, self._what, self._failures = writer, what, failures

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StorePoisonedError):
            return
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            self._writer.poison_untold(f"{self._what} ({error!r})")  # the caller sees the interrupt only
        elif self._failures:
            raise self._writer.poison(f"{self._what} ({error})") from error


class Standing:
    """A writer's right to write, and what it knows: `state`, the end of the log, and the journal.

    Parameters
    ----------
    files : StoreFiles
    state : State
        As recovery published it.
    end : LogEnd
    journal : BatchJournal
    """

    def __init__(self, files: StoreFiles, state: State, end: LogEnd, journal: BatchJournal) -> None:
        self.files = files
        self.pid = os.getpid()
        self.turn = Turn.HELD
        """`state`, the journal and the store checkpoint are written while it is HELD only."""
        self.health = Health.SOUND
        self.poison_reason = ""
        """What made `health` POISONED."""
        self._moving = threading.Lock()
        self.locks_intact: Callable[[], bool] = lambda: True
        """Whether the lock files are still those that were locked."""
        self.broker_waits: Callable[[], bool] = lambda: False
        """Whether a Java broker waits to open the store: nothing new is begun then."""
        self._why_retired: Callable[[], StoreError] | None = None
        self._locks_checked_s = 0.0
        self.flush_thread: int | None = None
        """The thread that shows `StorePoisonedError` to no caller."""
        self.log = files.commit_log
        self.journal = journal
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()  # always taken after `mutex`
        self.state = state
        self.end = end
        self.synced_end = end.physical_offset
        self.pending: list[Row | Rows] = []
        """What is appended and not visible yet."""

    def forget_threads(self) -> None:
        """In a forked child: no other thread is there to let go of what it held."""
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()
        self._moving = threading.Lock()
        for pool in (self.files.pool, self.files.log_pool):
            pool.forget_threads()

    def _turn(self, event: TurnEvent) -> None:
        with self._moving:
            self.turn = moved(TURNS, self.turn, event)

    def take_turn(self) -> None:
        """The process has taken the writer lock."""
        self._turn(TurnEvent.TAKE)

    def give_turn(self) -> None:
        """The process is about to give the writer lock back: the flush thread goes on, and writes no `state` any
        more.
        """
        with self.mutex:
            self._turn(TurnEvent.GIVE)

    def retire(self, why: Callable[[], StoreError]) -> None:
        """Another writer is the store's now, or none; `why` makes the error for those who still have this one."""
        self._why_retired = why
        self._turn(TurnEvent.RETIRE)

    def check_usable(self) -> None:
        """Raise when an earlier sync failed.

        Raises
        ------
        StorePoisonedError
        StoreClosedError
            In a forked child: the parent has the locks.
        StoreLockedError
            The store was closed for a broker that starts.
        """
        if os.getpid() != self.pid:
            raise StoreClosedError(f"{self.files.paths.root}: was opened before a fork; a child opens the store itself")
        if self.health is Health.SOUND:
            if self.turn is Turn.RETIRED and self._why_retired is not None:
                raise self._why_retired()
            return
        if threading.get_ident() != self.flush_thread:
            self._health(HealthEvent.TELL)
        raise StorePoisonedError(
            f"{self.files.paths.root}: {self.poison_reason}; nothing more is written by this process. Check the "
            f"disk, then "
            "close and open the store again: what was acknowledged is kept, the rest is checked"
        )

    def check_turn(self) -> None:
        """Refuse to begin something while a Java broker waits to open the store.

        Called under the mutex and before `check_usable`: who lets the broker in takes the mutex after the broker has
        come, and retires this writer before the broker is gone from here.

        Raises
        ------
        StoreLockedError
            Nothing was written; what was appended before is finished, and then the broker starts.
        """
        if self.broker_waits():
            raise broker_comes(self.files.paths)

    def check_locks(self, *, often: bool = False) -> None:
        """Poison when a lock file is gone: whoever removed it as "stale" has let another writer in. Also when the disk
        does not say whether it is there: a writer that cannot know writes nothing.

        With `often`, as for single puts, the files are looked at only when the last look is `_LOCKS_CHECK_S` ago.
        """
        now_s = time.monotonic()
        if often and now_s < self._locks_checked_s + _LOCKS_CHECK_S:
            return
        self._locks_checked_s = now_s
        try:
            intact = self.locks_intact()
        except OSError as error:
            raise self.poison(f"a lock file cannot be looked at ({error})") from error
        if not intact:
            self._turn(TurnEvent.LOSE)
            raise self.poison(
                "a lock file was removed or replaced, or a broker waited for longer than the kernel lets it, and "
                "another writer may be at work"
            )

    def _health(self, event: HealthEvent, reason: str = "") -> None:
        with self._moving:
            after = moved(HEALTHS, self.health, event)
            self.poison_reason = self.poison_reason or reason
            self.health = after

    def stop(self, reason: str) -> None:
        """Nothing more is appended, synced or published. Without the mutex, and nothing is written: `poison` follows,
        where that is possible.
        """
        self._health(HealthEvent.POISON, reason)

    def poison_untold(self, reason: str) -> None:
        """Stop all writing, and say so in `state` as far as that works; no caller hears of it now."""
        self.stop(reason)
        if not self.state.poisoned and self.turn is Turn.HELD:
            with contextlib.suppress(
                OSError
            ):  # the disk is failing; what is in flight makes the next writer recover as well
                self.write_state(flags=self.state.flags | STATE_POISONED)

    def poison(self, reason: str) -> StorePoisonedError:
        """Stop all writing; say so in `state` as far as that works; the error to raise."""
        self.poison_untold(reason)
        try:
            self.check_usable()
        except StorePoisonedError as error:
            return error
        raise AssertionError("unreachable")

    def unbroken(self, what: str, *, failures: bool = False) -> _Unbroken:
        """An interrupt or want of memory in here, and with `failures` any error, poisons: only recovery can tell what
        was done.
        """
        return _Unbroken(self, what, failures)

    def no_room(self, what: str, error: StoreFullError) -> StoreFullError:
        """An error of a full disk that says what was done and what to do."""
        text = f"{self.files.paths.root}: {what}. Make room"
        full = StoreFullError(text, path=error.path, needed=error.needed, free=error.free)
        full.errno = error.errno
        return full

    def write_state(self, **changes: int) -> None:
        """One change of `state`."""
        self.state = self.files.state_file.write(self.changed_state(changes))

    def changed_state(self, changes: dict[str, int]) -> State:
        """`state` with changes, as this writer writes it next."""
        if self.turn is not Turn.HELD:
            self.check_usable()
            raise AssertionError(f"`state` is another process's to write: {self.turn.value}")
        counter = max(self.state.counter, self.files.state_file.last_counter) + 1  # a change may have failed half-way
        return replace(self.state, counter=counter, boot_hash=boot_hash(), writer_pid=os.getpid(), **changes)

    def sync_to_end(self) -> None:
        """Everything up to the log's end is durable when this returns; a failure poisons. Call under the mutex."""
        self.sync_log(self.end.physical_offset)

    def sync_log(self, end: int, *, segment: int | None = None) -> None:
        """Sync what was written below `end`; with `segment`, that one segment only.

        One sync at a time: a descriptor reports an error once, so the loser of a race would see success.
        """
        with self.sync_mutex:
            self.check_usable()
            try:
                if segment is None:
                    self.log.sync_plan(self.synced_end, end).run()
                else:
                    self.log.sync_segment(segment)
            except OSError as error:
                raise self.poison(f"a sync failed ({error})") from error
        if segment is None:
            self.synced_end = end
