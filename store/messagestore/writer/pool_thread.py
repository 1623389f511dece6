"""The thread of the TransientStorePool, which writes what the pool holds to the log (RocketMQ's CommitRealTimeService).

A session with a pool has such a thread. It drains the pool every `commitIntervalCommitLog` if so much waits as
`commitCommitLogLeastPages` says, and every `commitCommitLogThoroughInterval` in any case. Then it wakes the flush
thread, which dispatches and publishes what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from messagestore.errors import StoreError, StoreFullError
from messagestore.files.transient_store_pool import TransientStorePool
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.service_thread import ServiceThread
from messagestore.writer.states import Health, Turn

_PAGE_SIZE = 4096


class PoolService(ServiceThread):
    """The thread that drains the pool of one writer.

    Parameters
    ----------
    writer : LogWriter
    pool : TransientStorePool
    drained : callable
        Called when the pool was drained, and when the thread ends because the writer must not write any more.
    """

    def __init__(self, writer: LogWriter, pool: TransientStorePool, drained: Callable[[], None]) -> None:
        super().__init__("messagestore-pool")
        self.writer = writer
        self.pool = pool
        self._drained = drained
        self._last_s = time.monotonic()

    def run(self) -> None:
        """Drain the pool at its intervals until the store is closed or a write fails."""
        while True:
            self._work.acquire(timeout=self.writer.files.config.commit_interval_commit_log / 1000)
            if self._stopped:
                return

            try:
                self._round()
            except (StoreError, OSError) as error:
                if self.writer.turn is not Turn.RETIRED or self.writer.health is not Health.SOUND:
                    self.writer.poison(f"the thread of the pool failed ({error})")
                self._drained()
                return
            except BaseException as error:
                self.writer.stop(f"the thread of the pool died ({error!r})")
                self._drained()
                raise

    def _round(self) -> None:
        config, now_s, waiting = self.writer.files.config, time.monotonic(), self.pool.undrained
        thorough = now_s - self._last_s >= config.commit_commit_log_thorough_interval / 1000
        if waiting and (thorough or waiting >= config.commit_commit_log_least_pages * _PAGE_SIZE):
            was_stuck = self.writer.pool_drain.is_stuck
            try:
                self.writer.pool_drain.run()
            except StoreFullError as error:  # the next round tries again, and so does the next put, which raises it
                if not was_stuck:
                    self.writer.warn_undispatched(error)
            self._last_s = time.monotonic()
            self._drained()
        elif thorough:
            self._last_s = now_s
