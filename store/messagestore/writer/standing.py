"""The base of a writer: whether it may write, and whether what it wrote can be trusted.

`Standing` knows whether its process holds the writer lock, whether a sync has failed, and what `state` says. Only this
class writes `state`, and it syncs the log. `LogWriter` is a `Standing` that appends and publishes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from messagestore.errors import (
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePoisonedError,
)
from messagestore.files.disk import is_failure
from messagestore.files.state import State, boot_hash
from messagestore.files.transient_store_pool import TransientStorePool
from messagestore.files.unsynced import FileReplaced
from messagestore.format.layout import STATE_POISONED
from messagestore.format.rows import Row, Rows
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.log_end import LogEnd
from messagestore.log.store_files import Paths, StoreFiles
from messagestore.writer.service_thread import is_service_thread
from messagestore.writer.states import HEALTHS, TURNS, Health, HealthEvent, Turn, TurnEvent, moved

_log = logging.getLogger(__name__)
_LOCKS_CHECK_S = 0.02
TURN_CHECK_S = 0.001
"""Single puts look so often whether a broker waits: each look is a system call for which a thread gives up the GIL."""


def broker_comes(paths: Paths) -> StoreLockedError:
    """The error for a caller that wants to write while a broker waits to open the store."""
    holder = "a RocketMQ broker that is starting"
    return StoreLockedError(
        f"{paths.lock}: {holder} waits to open this store, and gets it when the writes that had begun are finished. "
        f"This process writes nothing more; what was acknowledged is on the disk. Open the store again when the broker "
        f"has stopped",
        path=paths.lock,
        holder=holder,
    )


class _Unbroken:
    """The context manager of `Standing.unbroken`; it is a class, since a generator costs a microsecond more per put."""

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
        if not is_failure(error):
            # The caller only sees the interrupt
            self._writer.poison_untold(f"{self._what} ({error!r})", interrupted=True)
        elif self._failures:
            raise self._writer.poison(f"{self._what} ({error})") from error


def _is_handled_here(error: BaseException) -> bool:
    """Whether the store handles an error; a caller may put messages while it handles one of its own."""
    trace = error.__traceback__
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("messagestore.")


class Standing:
    """A writer's right to write, and what it knows: `state`, the end of the log, and the journal.

    Parameters
    ----------
    files : StoreFiles
    state : State
        The `state` that recovery published.
    end : LogEnd
    journal : BatchJournal
    """

    def __init__(self, files: StoreFiles, state: State, end: LogEnd, journal: BatchJournal) -> None:
        self.files = files
        self.pid = os.getpid()

        self.turn = Turn.HELD
        """The writer's turn. `state`, the journal and the store checkpoint are written only while it is HELD."""
        self.health = Health.SOUND
        self.poison_reason = ""
        """Why `health` became POISONED."""
        self._interrupted = False
        """Whether that was an interrupt, and no failure of the disk."""

        self._moving = threading.Lock()
        self.locks_intact: Callable[[], bool] = lambda: True
        """Whether the lock files are still the files that were locked."""
        self.broker_waits: Callable[[], bool] = lambda: False
        """Whether a Java broker waits to open the store; the writer begins nothing new while one waits."""
        self._why_retired: Callable[[], StoreError] | None = None
        self._locks_checked_s = self._turn_checked_s = 0.0

        self.log = files.commit_log
        self.journal = journal
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()  # always taken after `mutex`

        self.state = state
        self.end = end
        self.synced_end = end.physical_offset

        self.disk_used_percent: int | None = None
        """How full the disk is, if it is above the warning level: nothing is appended then. None: it is not."""
        self.look_at_disk: Callable[[], int] = lambda: 0
        """Finds out how full the disk is now."""

        self.pending: list[Row | Rows] = []
        """What was appended and is not visible yet."""
        self.pool: TransientStorePool | None = None
        """Where single puts wait until they are committed to the log's files. None: they are written there at once."""

    def forget_threads(self) -> None:
        """Replace the locks in a forked child, where the threads that held them do not exist."""
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()
        self._moving = threading.Lock()
        for pool in (self.files.pool, self.files.log_pool, self.pool):
            if pool is not None:
                pool.forget_threads()

    def _turn(self, event: TurnEvent) -> None:
        with self._moving:
            self.turn = moved(TURNS, self.turn, event)

    def take_turn(self) -> None:
        """Note that the process has taken the writer lock."""
        self._turn(TurnEvent.TAKE)

    def give_turn(self) -> None:
        """Note that the process is about to release the writer lock: the flush thread continues, but no longer writes
        `state`.
        """
        with self.mutex:
            self._turn(TurnEvent.GIVE)

    def retire(self, why: Callable[[], StoreError]) -> None:
        """Retire this writer: the store has another writer now, or none.

        `why` makes the error for callers that still use this one.
        """
        self._why_retired = why
        self._turn(TurnEvent.RETIRE)

    def check_usable(self) -> None:
        """Raise an error if this writer must not write any more.

        Raises
        ------
        StorePoisonedError
            An earlier sync failed.
        StoreClosedError
            This process is a forked child; the parent has the locks.
        StoreLockedError
            The store was closed for a broker that starts.
        """
        if os.getpid() != self.pid:
            text = f"{self.files.paths.root}: opened before a fork. Open the store again in the child process"
            raise StoreClosedError(text)
        if self.health is Health.SOUND:
            if self.turn is Turn.RETIRED and self._why_retired is not None:
                raise self._why_retired()
            return
        if not is_service_thread():
            self._health(HealthEvent.TELL)
        raise self.poison_error()

    def poison_error(self) -> StorePoisonedError:
        """The error that says why the writer has stopped."""
        lost = "" if self.pool is None else ", except for puts whose result said committed=False"
        remedy = "Close" if self._interrupted else "Check the disk, then close"
        return StorePoisonedError(
            f"{self.files.paths.root}: {self.poison_reason}. This process writes nothing more. {remedy} the store and "
            f"open it again: what was acknowledged is kept{lost}, and the rest is checked"
        )

    def check_turn(self, now_s: float | None = None) -> None:
        """Refuse to begin anything while a Java broker waits to open the store.

        Call it under the mutex and before `check_usable`: the thread that lets the broker in takes the mutex after the
        broker has come, calls `watch_turn`, and retires this writer before `broker_waits` is False again. With `now_s`,
        as for single puts, this looks only if the last look was at least `TURN_CHECK_S` ago.

        Raises
        ------
        StoreLockedError
            A broker waits. Nothing was written; what was appended before is finished, and then the broker starts.
        """
        if now_s is not None:
            if now_s < self._turn_checked_s + TURN_CHECK_S:
                return
            self._turn_checked_s = now_s
        if self.broker_waits():
            self.watch_turn()
            raise broker_comes(self.files.paths)

    def watch_turn(self) -> None:
        """Let every single put look whether a broker waits, from the next one on. Call it under the mutex."""
        self._turn_checked_s = -math.inf

    def check_disk(self) -> None:
        """Refuse an append while the disk is fuller than `diskSpaceWarningLevelRatio`. Call it under the mutex.

        Raises
        ------
        StoreFullError
        """
        if self.disk_used_percent is not None:
            self.look_at_disk()  # somebody may have made room
        percent = self.disk_used_percent
        if percent is None:
            return
        root = self.files.paths.root
        raise StoreFullError(
            f"{root}: the disk is {percent} % full; allowed are {self.files.config.warning_percent} "
            "(diskSpaceWarningLevelRatio). Nothing was written. Retention deletes the oldest segments that it may "
            "delete; `messagestore gc` says which ones stay, and why. Make room, or delete by hand with "
            "`messagestore gc --delete`",
            path=root,
            needed=0,
            free=self.files.disk.free(root),
        )

    def check_locks(self, now_s: float | None = None, *, often: bool = False) -> None:
        """Poison the writer if a lock file is missing or cannot be checked.

        Whoever deleted the file as "stale" may have let another writer in. A writer that cannot find out whether the
        file exists writes nothing. With `often`, as for single puts, the files are checked only if the last check was
        at least `_LOCKS_CHECK_S` ago.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if often and now_s < self._locks_checked_s + _LOCKS_CHECK_S:
            return
        self._locks_checked_s = now_s

        try:
            intact = self.locks_intact()
        except OSError as error:
            raise self.poison(f"a lock file cannot be examined ({error})") from error
        if not intact:
            self._turn(TurnEvent.LOSE)
            raise self.poison(
                "the store's folder was renamed or replaced, or a lock file was removed or replaced, or a broker "
                "waited longer than the kernel lets it wait, so another writer may be at work"
            )

    def _health(self, event: HealthEvent, reason: str = "") -> None:
        with self._moving:
            after = moved(HEALTHS, self.health, event)
            self.poison_reason = self.poison_reason or reason
            self.health = after

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Make sure that nothing more is appended, synced or published.

        This needs no mutex and writes nothing; the caller calls `poison` afterwards, where that is possible.
        """
        error = sys.exception()
        if not interrupted and isinstance(error, OSError) and _is_handled_here(error) and not is_failure(error):
            interrupted, reason = True, f"what a signal handler raised has interrupted it ({error!r})"
        if self.health is Health.SOUND:
            self._interrupted = interrupted
        self._health(HealthEvent.POISON, reason)

    def poison_untold(self, reason: str, *, interrupted: bool = False) -> None:
        """Stop all writing, and record it in `state` if possible; no caller sees an error now."""
        self.stop(reason, interrupted=interrupted)
        if not self.state.poisoned and self.turn is Turn.HELD:
            with contextlib.suppress(
                OSError
            ):  # the disk is failing; what is in flight also makes the next writer recover
                self._write_state(self.files.state_file.write, {"flags": self.state.flags | STATE_POISONED})

    def poison(self, reason: str) -> StorePoisonedError:
        """Stop all writing, record it in `state` if possible, and return the error to raise."""
        self.poison_untold(reason)
        try:
            self.check_usable()
        except StorePoisonedError as error:
            return error
        raise AssertionError("unreachable")

    def unbroken(self, what: str, *, failures: bool = False) -> _Unbroken:
        """A context in which an interrupt or a MemoryError, and with `failures` each failure, poisons the writer.

        After such an error, only recovery can find out what was done.
        """
        return _Unbroken(self, what, failures)

    def no_room(self, what: str, error: StoreFullError) -> StoreFullError:
        """A `StoreFullError` that says what was done and what to do."""
        text = f"{self.files.paths.root}: {what}. Make room"
        full = StoreFullError(text, path=error.path, needed=error.needed, free=error.free)
        full.errno = error.errno
        return full

    def write_state(self, *, both: bool = False, **changes: int) -> None:
        """Write `state` with changes, with `both` into both slots. Another file, or none, poisons the writer."""
        file = self.files.state_file
        try:
            self._write_state(file.write_both if both else file.write, changes)
        except FileReplaced as error:
            raise self.poison(f"{error.path} was deleted or replaced while the store was open") from error

    def _write_state(self, write: Callable[[State], State], changes: dict[str, int]) -> None:
        self.state = write(self.changed_state(changes))

    def changed_state(self, changes: dict[str, int]) -> State:
        """`state` with changes, as this writer would write it next."""
        if self.turn is not Turn.HELD:
            self.check_usable()
            raise AssertionError(f"`state` is another process's to write: {self.turn.value}")
        counter = max(self.state.counter, self.files.state_file.last_counter) + 1  # a change may have failed midway
        return replace(self.state, counter=counter, boot_hash=boot_hash(), writer_pid=os.getpid(), **changes)

    def note_flushed(self, end: int) -> None:
        """Say in `state` that everything below `end` is synced. Call under the mutex, after a sync that succeeded.

        Without ASYNC_FLUSH bytes, what is visible is synced, and nothing has to be said.
        """
        state = self.state
        if state.asynchronous and state.known_flushed_end < min(end, state.visible_end) and self.turn is Turn.HELD:
            self.write_state(known_flushed_end=end)

    def sync_log(self, end: int, *, segment: int | None = None) -> None:
        """Sync what was written below `end`; with `segment`, sync that one segment only.

        Only one sync runs at a time: a descriptor reports an error once, so the second of two syncs that run at the
        same time would see success.
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
