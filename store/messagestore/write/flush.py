"""The flush thread, which makes plain puts durable and visible.

There is one thread per writer, from its first put or ASYNC_FLUSH batch on; opening a store and committing SYNC_FLUSH
batches need none. SYNC_FLUSH: callers wait, and the thread syncs once for all of them (RocketMQ's GroupCommitService),
dispatches and publishes. ASYNC_FLUSH: the thread dispatches and publishes within about a millisecond (RocketMQ's reput
interval; 20 ms under load) and syncs in RocketMQ's rhythm: every `flushIntervalCommitLog` when
`flushCommitLogLeastPages` are dirty, and everything every `flushCommitLogThoroughInterval`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from messagestore.errors import StoreError, StoreFullError
from messagestore.write.log_writer import LogWriter
from messagestore.write.states import Health, Turn

_DISPATCH_DELAY_S = 0.001
_BUSY_DELAY_S = 0.02  # many at once cost hardly more than one: under load fewer, larger dispatches
_BUSY_COUNT = 32
_PAGE_SIZE = 4096
_STOP_TIMEOUT_S = 30.0


class FlushService:
    """The flush thread of one writer.

    Parameters
    ----------
    writer : LogWriter
    remember_poison : callable
        Called when a flush failed while the writer lock was not held.

    Threads: `wait` and `wake` from any thread, not while holding the writer's mutex.
    """

    def __init__(self, writer: LogWriter, remember_poison: Callable[[], None] = lambda: None) -> None:
        self.writer = writer
        self._remember_poison = remember_poison
        self._changed = threading.Condition()
        self._requested = 0
        self._flushed = writer.synced_end
        self._dispatch_wanted = False
        self._busy = False
        self._stopped = False
        self._last_flush_s = self._last_thorough_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has: before something is appended that the thread is to sync or publish."""
        if self._thread is None:
            self._start_once()

    def _start_once(self) -> None:
        with self._changed:  # the thread waits for it, and ends when it is not the one that was begun
            if self._thread is not None or self._stopped:
                return
            thread = threading.Thread(target=self._run, name="messagestore-flush", daemon=True)
            try:
                self._thread = thread
                thread.start()
            except BaseException:  # Ctrl-C may have come before or after the thread was made
                self._thread = None
                raise

    def wait(self, end: int, timeout_s: float) -> bool:
        """Wait until the log is durable and visible up to `end`; False when that takes longer than `timeout_s`.

        Raises
        ------
        StorePoisonedError
            The sync failed: the message is not acknowledged.
        """
        self.start()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._requested = max(self._requested, end)
            self._changed.notify_all()
            while self._flushed < end:
                self.writer.check_usable()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def request(self, end: int) -> None:
        """Ask for a sync up to `end` without waiting."""
        with self._changed:
            self._requested = max(self._requested, end)
            self._changed.notify_all()

    def wake(self) -> None:
        """There is something to dispatch."""
        if not self._dispatch_wanted:
            with self._changed:
                self._dispatch_wanted = True
                self._changed.notify_all()

    def stop(self) -> None:
        """End the thread; what is pending is the caller's to finish."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_TIMEOUT_S)

    def finished(self, end: int) -> None:
        """Somebody else has made the log durable and visible up to `end`: who waits for that need wait no longer."""
        with self._changed:
            self._flushed = max(self._flushed, end)
            self._changed.notify_all()

    def forget_threads(self) -> None:
        """In a forked child: no other thread is there to let go of what it held."""
        self._changed = threading.Condition()

    @property
    def alive(self) -> bool:
        """Whether the thread runs, or may still be started: not in a child that was forked when it ran."""
        return self._thread is None or self._thread.is_alive()

    def _run(self) -> None:
        own, interval_s = threading.current_thread(), self.writer.files.config.flush_interval_commit_log / 1000
        with self._changed:
            if self._thread is not own:
                return
            self.writer.flush_thread = own.ident
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or self._dispatch_wanted or self._requested > self._flushed,
                    timeout=interval_s,
                )
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
                if self.writer.turn is not Turn.HELD:
                    with contextlib.suppress(StoreError, OSError):  # the disk is failing
                        self._remember_poison()
                return
            except BaseException as error:
                self.writer.stop(f"the flush thread died ({error!r})")
                self._wake_all()
                raise

    def _wake_all(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _round(self) -> None:
        if self._requested > self._flushed:
            self._flush()
        elif self._dispatch_wanted:
            time.sleep(_BUSY_DELAY_S if self._busy else _DISPATCH_DELAY_S)
            self._dispatch_wanted = False
            self._busy = len(self.writer.pending) >= _BUSY_COUNT
            self._drain()
        elif self.writer.half_dispatched:  # told already: look whether there is room now
            with contextlib.suppress(StoreFullError):
                self.writer.drain()
        config, now_s, writer = self.writer.files.config, time.monotonic(), self.writer
        if now_s - self._last_flush_s >= config.flush_interval_commit_log / 1000:
            dirty = writer.end.physical_offset - writer.synced_end
            thorough = now_s - self._last_thorough_s >= config.flush_commit_log_thorough_interval / 1000
            if dirty > 0 and (thorough or dirty >= config.flush_commit_log_least_pages * _PAGE_SIZE):
                self._flush()
            self._last_flush_s = now_s
            if thorough:
                self._last_thorough_s = now_s

    def _drain(self) -> None:
        """Dispatch; what the disk has no room for is dispatched later, by whoever appends next or closes the store."""
        try:
            self.writer.drain()
        except StoreFullError as error:
            self.writer.tell_undispatched(error)

    def _flush(self) -> None:
        end = self.writer.group_sync()
        try:
            self.writer.clean_end.maybe_move()
        finally:
            self.finished(end)  # these puts are synced and visible, and acknowledged: a failure is the next put's
