"""The flush thread, which makes plain puts durable and visible.

Each writer has one such thread, from its first put or ASYNC_FLUSH batch on; opening a store and committing SYNC_FLUSH
batches need no thread. With SYNC_FLUSH, callers wait, and the thread syncs once for all of them (RocketMQ's
GroupCommitService), dispatches and publishes. With ASYNC_FLUSH, the thread dispatches and publishes within about a
millisecond (RocketMQ's reput interval; 20 ms under load) and syncs at RocketMQ's intervals: every
`flushIntervalCommitLog` if `flushCommitLogLeastPages` are dirty, and everything every
`flushCommitLogThoroughInterval`.
"""

from __future__ import annotations

import contextlib
import time
from _thread import LockType
from collections.abc import Iterator
from dataclasses import replace

from messagestore.errors import StoreError, StoreFullError
from messagestore.files.state import StateFile
from messagestore.files.writer_lock import WriterLock
from messagestore.format.layout import STATE_POISONED
from messagestore.format.message import PutMessageResult
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.pending_puts import OnewayPut, PendingPuts, PutFuture
from messagestore.writer.service_thread import ServiceThread, held_lock
from messagestore.writer.states import Health, Turn

_DISPATCH_DELAY_S = 0.001
_BUSY_DELAY_S = 0.02  # under load, fewer and larger dispatches: many puts cost hardly more than one
_BUSY_COUNT = 32
_PAGE_SIZE = 4096


class FlushService(ServiceThread):
    """The flush thread of one writer.

    Parameters
    ----------
    writer : LogWriter

    Threads: any thread may call `wait` and `wake`, but not while it holds the writer's mutex.
    """

    def __init__(self, writer: LogWriter) -> None:
        super().__init__("messagestore-flush")
        self.writer = writer
        self.promised = PendingPuts(writer)
        """The puts whose callers do not wait."""
        self._waiters: list[tuple[int, LockType]] = []
        """The ends for which callers wait, each with a lock that is released when the log is durable up to that end.

        Each caller has a lock of its own: if all were woken to find out whose turn it is, they would take the
        interpreter away from the thread that serves them.
        """
        self._requested = 0
        self._flushed = writer.synced_end
        self._dispatch_wanted = False
        self._busy = False
        self._last_flush_s = self._last_thorough_s = time.monotonic()

    def wait(self, end: int, timeout_s: float) -> bool:
        """Wait until the log is durable and visible up to `end`; False if that takes longer than `timeout_s`.

        Raises
        ------
        StorePoisonedError
            The sync failed: the message is not acknowledged.
        StoreFullError
            The disk has no room for what is in the pool.
        """
        started = self.start()
        self.writer.pool_drain.run(end)
        if not started:
            self._flush()
        waiter = (end, held_lock())
        try:
            with self._mutex:
                if self._flushed >= end:
                    return True
                self._waiters.append(waiter)
            self.writer.check_usable()  # after that: if the writer stops later, everybody who waits is woken
            self.request(end)
            waiter[1].acquire(timeout=max(0.0, timeout_s))
            if self._flushed < end:
                self.writer.check_usable()
            return self._flushed >= end
        finally:
            if self._flushed < end:
                with self._mutex:
                    self._waiters = [other for other in self._waiters if other is not waiter]

    def promise(self, result: PutMessageResult, future: PutFuture | OnewayPut, timeout_s: float) -> None:
        """Complete `future` with `result` when the log is durable and visible up to its end."""
        end = result.physical_offset + result.size
        if not self.start():
            self.wait(end, timeout_s)
            future.set_result(result)
            return
        self.promised.promise(result, future, timeout_s)
        self.request(end)

    def request(self, end: int) -> None:
        """Ask for a sync up to `end` without waiting."""
        with self._mutex:
            self._requested = max(self._requested, end)
        self.wake_thread()

    def wake(self) -> None:
        """Wake the thread because there is something to dispatch."""
        if not self._dispatch_wanted:
            self._dispatch_wanted = True
            self.wake_thread()

    def end(self) -> None:
        """Let the puts whose callers do not wait end, too. Call this after `stop`, when nothing more will be synced."""
        self.promised.end()

    def finished(self, end: int) -> None:
        """Wake the callers that wait for `end`, since another thread has made the log durable and visible up to it."""
        with self._mutex:
            self._flushed = end = max(self._flushed, end)
            served = [lock for wanted, lock in self._waiters if wanted <= end]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > end]
        for lock in served:
            lock.release()
        self.promised.flushed(end)

    def forget_threads(self) -> None:
        """Replace the locks in a forked child, where the threads that held them do not exist."""
        super().forget_threads()
        self._waiters = []
        self.promised.forget_threads()

    def run(self) -> None:
        """Sync, dispatch and publish until the store is closed or a sync fails."""
        interval_s = self.writer.files.config.flush_interval_commit_log / 1000
        while True:
            if not (self._dispatch_wanted or self._requested > self._flushed):
                self._work.acquire(timeout=interval_s)
            if self._stopped:
                return
            try:
                self._round()
            except (StoreError, OSError) as error:
                if self.writer.turn is Turn.RETIRED and self.writer.health is Health.SOUND:
                    self._wake_all()
                    return  # the store was closed meanwhile; no sync failed
                self.writer.poison(f"the flush thread failed ({error})")
                self._wake_all()
                if self.writer.turn not in (Turn.HELD, Turn.LOST):  # LOST: perhaps another store is at the path now
                    with contextlib.suppress(StoreError, OSError):  # the disk is failing
                        self._remember_poison()
                return
            except BaseException as error:
                self.writer.stop(f"the flush thread died ({error!r})")
                self._wake_all()
                raise

    def _remember_poison(self) -> None:
        """Record in `state` that a flush failed while this process did not hold the writer lock.

        This waits for its turn through a lock object of its own. Another writer may have synced its own batch after
        what was lost here; the next writer writes all of it again. A `state` that was put in place of this writer's
        belongs to a restored store, which lost nothing.
        """
        files = self.writer.files
        lock = WriterLock(files.paths.writer_lock)
        try:
            lock.acquire(files.config.lock_timeout_s, description="a failed sync")
            file = StateFile(files.disk, files.paths.state)
            state = file.read()
            if state is not None and not state.poisoned and files.state_file.inode in (-1, file.inode):
                file.write(replace(state, counter=state.counter + 1, flags=state.flags | STATE_POISONED))
        finally:
            lock.close()

    def _wake_all(self) -> None:
        with self._mutex:
            waiters, self._waiters = self._waiters, []
        for _, lock in waiters:
            lock.release()
        self.promised.wake_thread()

    def _round(self) -> None:
        if self._requested > self._flushed:
            self._flush()
        elif self._dispatch_wanted:
            time.sleep(_BUSY_DELAY_S if self._busy else _DISPATCH_DELAY_S)
            self._dispatch_wanted = False
            self._busy = len(self.writer.pending) >= _BUSY_COUNT
            self._publish()
        elif self.writer.half_dispatched:  # this was logged already: try whether the disk has room now
            with contextlib.suppress(StoreFullError):
                self.writer.publish()
        config, now_s, writer = self.writer.files.config, time.monotonic(), self.writer
        if now_s - self._last_flush_s >= config.flush_interval_commit_log / 1000:
            dirty = writer.pool_drain.end - writer.synced_end
            thorough = now_s - self._last_thorough_s >= config.flush_commit_log_thorough_interval / 1000
            if dirty > 0 and (thorough or dirty >= config.flush_commit_log_least_pages * _PAGE_SIZE):
                self._flush()
            self._last_flush_s = now_s
            if thorough:
                self._last_thorough_s = now_s

    def _publish(self) -> None:
        """Dispatch; puts for which the disk has no room are dispatched later, by the next append or by closing.

        If the clean end is due, the log is synced first, because appends go on meanwhile: the clean end moves under the
        writer's mutex.
        """
        with self._undispatched_logged():
            self.writer.publish(move=False)
            if self.writer.clean_end.is_due():
                self.finished(self.writer.group_sync())
                self.writer.publish()

    @contextlib.contextmanager
    def _undispatched_logged(self) -> Iterator[None]:
        try:
            yield
        except StoreFullError as error:
            self.writer.warn_undispatched(error)

    def _flush(self) -> None:
        end = self.writer.group_sync()
        try:
            self.writer.clean_end.maybe_move()
        finally:
            self.finished(end)  # these puts are synced, visible and acknowledged: only the next put sees a failure
