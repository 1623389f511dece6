"""Puts whose callers do not wait: their Futures complete when the log is synced up to them.

A put that is promised was appended, and waits here for the sync of its group. A thread of its own completes the
Futures, while the flush thread syncs for the next group. It holds no lock meanwhile, so a function that a caller gave
to `Future.add_done_callback` may put messages and close the store. Every put that is promised ends here once:

| What happened | The Future has |
|---|---|
| the log is synced up to the put, and the put is visible | the result, `PUT_OK` |
| `syncFlushTimeout` has passed | the result, `FLUSH_DISK_TIMEOUT` |
| a sync failed, or the writer was stopped | `StorePoisonedError`, which names the place of the record |
| the store was closed without a sync | `StoreClosedError`, which names the place of the record |
| the process was forked | the same in the child; the parent notices nothing |

A one-way put has no Future. How it ended is counted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from _thread import LockType
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

from messagestore.errors import AppendMessageStatus, PutMessageStatus, StoreClosedError, StoreError, StorePoisonedError
from messagestore.format.message import PutMessageResult
from messagestore.writer.service_thread import ServiceThread, held_lock
from messagestore.writer.standing import Standing
from messagestore.writer.states import Health
from messagestore.writer.statistics import Statistics, clock, status_of

FUTURE_SIZE = 1024
"""About the memory that a put in flight takes, besides its record."""
_AGAIN_S = 0.01
_log = logging.getLogger(__name__)


class PutFuture(Future[PutMessageResult]):
    """The Future of a put that was appended, so it cannot be cancelled. The put counts when it completes.

    Parameters
    ----------
    statistics : Statistics
    """

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._statistics, self._began_s = statistics, clock()

    def set_result(self, result: PutMessageResult) -> None:
        """Complete a put that is stored."""
        self._statistics.put_ended(self._began_s, result.status)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """Complete a put that failed."""
        if exception is not None:
            self._statistics.put_failed(self._began_s, exception)
        super().set_exception(exception)

    def forget_threads(self) -> None:
        """Replace the lock in a forked child, where the thread that held it does not exist."""
        self._condition = threading.Condition()


class OnewayPut:
    """Takes the place of a Future for a one-way put, and counts how the put ends."""

    __slots__ = ("_began_s", "_done", "_statistics")

    def __init__(self, statistics: Statistics) -> None:
        self._statistics, self._began_s, self._done = statistics, clock(), False

    def done(self) -> bool:
        """Whether the put has ended."""
        return self._done

    def set_result(self, result: PutMessageResult) -> None:
        """Count a put that is stored."""
        self._done = True
        self._statistics.oneway_ended(self._began_s, result.status)

    def set_exception(self, error: StoreError | OSError) -> None:
        """Count a put that failed."""
        self._done = True
        self._statistics.oneway_ended(self._began_s, status_of(error))

    def forget_threads(self) -> None:
        """Do nothing: the counts are the store's."""


class _Promise(NamedTuple):
    deadline_s: float
    end: int
    result: PutMessageResult
    future: PutFuture | OnewayPut


class _Outcome(NamedTuple):
    future: PutFuture | OnewayPut
    result: PutMessageResult | None
    error: StoreError | None
    physical_offset: int


def in_doubt(error: StoreError, physical_offset: int) -> StoreError:
    """The error for a put whose record was appended, and may or may not be there when the store is opened again."""
    kind = StorePoisonedError if isinstance(error, StorePoisonedError) else StoreClosedError
    doubt = kind(
        f"{error}. This put was appended at physical offset {physical_offset}. Whether it counts is decided when the "
        "store is opened again; look for it there (look_message_by_offset) before you put it again"
    )
    doubt.physical_offset = physical_offset
    doubt.put_status, doubt.append_status = PutMessageStatus.UNKNOWN_ERROR, AppendMessageStatus.PUT_OK
    return doubt


class PendingPuts(ServiceThread):
    """The puts of one writer that wait for a sync without a caller, and the thread that completes them.

    Parameters
    ----------
    writer : Standing
    """

    def __init__(self, writer: Standing) -> None:
        super().__init__("messagestore-promised")
        self._writer = writer
        self._promises: deque[_Promise] = deque()
        """In the order of the log, except for neighbours that two threads put."""
        self._completing: list[_Outcome] = []
        """Taken out of `_promises`; only the thread changes it."""

        self._earliest_s = math.inf
        """No put in flight has an earlier deadline."""
        self._looks_s = 0.0
        """When the thread looks at the deadlines next."""

        self._blocked: list[LockType] = []
        """Each caller who waits for room, with a lock of its own."""

        self._flushed = writer.synced_end
        self._syncs_ended = self._thread_ended = False
        """Nothing more will be synced; and nobody completes a promise that comes now."""

    # ---- callers

    def await_room(self, limit: int) -> None:
        """Start the thread, and wait until less than `limit` bytes are in flight. Call this before an append.

        The bytes from the oldest put in flight to the end of the log count, and `FUTURE_SIZE` for each put. A function
        that is called when a Future completes does not wait, because it would wait for itself.
        """
        self.start()
        if self._thread is threading.current_thread():
            return

        while self._in_flight() >= limit:
            waiter = held_lock()
            with self._mutex:
                if self._thread_ended:
                    return
                self._blocked.append(waiter)
            try:
                self.wake_thread()
                waiter.acquire()
            finally:
                with self._mutex:
                    self._blocked = [other for other in self._blocked if other is not waiter]

    def _in_flight(self) -> int:
        with self._mutex:
            if not self._promises:
                return 0
            oldest = self._promises[0].result.physical_offset
            return max(0, self._writer.end.physical_offset - oldest) + FUTURE_SIZE * len(self._promises)

    def promise(self, result: PutMessageResult, future: PutFuture | OnewayPut, timeout_s: float) -> None:
        """Complete `future` with `result` when the log is synced up to its end."""
        promise = _Promise(time.monotonic() + timeout_s, result.physical_offset + result.size, result, future)
        with self._mutex:
            is_late = self._thread_ended
            if not is_late:
                self._promises.append(promise)
                self._earliest_s = min(self._earliest_s, promise.deadline_s)

        if is_late:
            self._complete(self._outcome(promise, self._no_sync_error()))
        elif (
            promise.deadline_s < self._looks_s
            or self._flushed >= promise.end
            or self._syncs_ended
            or self._writer.health is not Health.SOUND
        ):
            self.wake_thread()

    # ---- the flush service

    def flushed(self, end: int) -> None:
        """Note that the log is durable and visible up to `end`."""
        self._flushed = max(self._flushed, end)
        if self._promises:
            self.wake_thread()

    def end(self) -> None:
        """Let the thread complete what is left, and end: nothing more will be synced."""
        with self._mutex:
            self._syncs_ended = self._stopped = True
            self._thread_ended = self._thread_ended or self._thread is None
        self.wake_thread()

    def forget_threads(self) -> None:
        """Fail the puts in flight in a forked child: the parent has them."""
        super().forget_threads()
        in_flight = [(outcome.future, outcome.physical_offset) for outcome in self._completing]
        in_flight += [(promise.future, promise.result.physical_offset) for promise in self._promises]
        self._promises, self._completing, self._blocked = deque(), [], []
        self._syncs_ended = self._thread_ended = True
        root = self._writer.files.paths.root
        closed = StoreClosedError(f"{root}: put before a fork. The parent process learns how this put ends")
        for future, physical_offset in in_flight:
            future.forget_threads()
            if not future.done():
                future.set_exception(in_doubt(closed, physical_offset))

    # ---- the thread

    def run(self) -> None:
        """Complete what is synced, late or lost, until the store is closed."""
        while True:
            now_s = time.monotonic()
            self._looks_s = min(self._earliest_s, now_s + self._writer.files.config.sync_flush_timeout / 1000)
            if not self._syncs_ended:
                self._work.acquire(timeout=max(0.0, self._looks_s - now_s))
            try:
                self._complete_due()
            except MemoryError:  # the puts are still there
                _log.exception("%s: puts could not be reported to their callers", self._writer.files.paths.root)
            if self._completing:
                time.sleep(_AGAIN_S)
                continue
            with self._mutex:
                self._thread_ended = self._syncs_ended and not self._promises
                if self._thread_ended:
                    return

    def _complete_due(self) -> None:
        """Complete the puts whose outcome is known, outside all locks, and let callers that wait for room go on."""
        with self._mutex:
            self._take_due()
            blocked, self._blocked = self._blocked, []
        for lock in blocked:
            lock.release()
        for outcome in self._completing:
            try:
                self._complete(outcome)
            except BaseException:  # noqa: BLE001 - a caller's function raised SystemExit, or memory ran out
                _log.exception("%s: a put could not be reported to its caller", self._writer.files.paths.root)
        self._completing = [outcome for outcome in self._completing if not outcome.future.done()]

    def _take_due(self) -> None:
        """Take the puts whose outcome is known, each before it leaves `_promises`. Call under the mutex."""
        promises = self._promises
        while promises and promises[0].end <= self._flushed:
            self._completing.append(self._outcome(promises[0], None))
            promises.popleft()

        lost_error = None if self._writer.health is Health.SOUND and not self._syncs_ended else self._no_sync_error()
        now_s = time.monotonic()
        if promises and lost_error is None and now_s < self._earliest_s:
            return

        left: deque[_Promise] = deque()
        for promise in promises:
            if promise.end <= self._flushed or lost_error is not None or now_s >= promise.deadline_s:
                self._completing.append(self._outcome(promise, lost_error))
            else:
                left.append(promise)
        self._promises = left
        self._earliest_s = min((promise.deadline_s for promise in left), default=math.inf)

    def _outcome(self, promise: _Promise, lost_error: StoreError | None) -> _Outcome:
        """How a put ends: synced, lost, or else late."""
        at = promise.result.physical_offset
        if promise.end <= self._flushed:
            return _Outcome(promise.future, promise.result, None, at)
        if lost_error is not None:
            return _Outcome(promise.future, None, in_doubt(lost_error, at), at)
        late = promise.result._replace(status=PutMessageStatus.FLUSH_DISK_TIMEOUT)
        return _Outcome(promise.future, late, None, at)

    def _no_sync_error(self) -> StoreError:
        """The error that says why nothing more will be synced."""
        if self._writer.health is not Health.SOUND:
            return self._writer.poison_error()
        return StoreClosedError(f"{self._writer.files.paths.root}: the store was closed before this put was synced")

    @staticmethod
    def _complete(outcome: _Outcome) -> None:
        if outcome.future.done():
            return
        if outcome.error is not None:
            outcome.future.set_exception(outcome.error)
        elif outcome.result is not None:
            outcome.future.set_result(outcome.result)
