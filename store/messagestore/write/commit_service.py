"""The commit thread, which writes what the TransientStorePool holds to the log (RocketMQ's CommitRealTimeService).

A session with a pool has such a thread. It commits every `commitIntervalCommitLog` if `commitCommitLogLeastPages` are
waiting, and everything every `commitCommitLogThoroughInterval`. After a commit, it wakes the flush thread, which
dispatches and publishes what was committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from messagestore.errors import StoreError, StoreFullError
from messagestore.files.transient_store_pool import TransientStorePool
from messagestore.write.log_writer import LogWriter
from messagestore.write.service_thread import ServiceThread
from messagestore.write.states import Health, Turn

_PAGE_SIZE = 4096


class CommitService(ServiceThread):
    """The commit thread of one writer.

    Parameters
    ----------
    writer : LogWriter
    pool : TransientStorePool
    committed : callable
        Called after each commit, and when the thread ends because the writer must not write any more.
    """

    def __init__(self, writer: LogWriter, pool: TransientStorePool, committed: Callable[[], None]) -> None:
        super().__init__("messagestore-commit")
        self.writer = writer
        self.pool = pool
        self._committed = committed
        self._last_s = time.monotonic()

    def run(self) -> None:
        """Commit until the store is closed or a commit fails."""
        while True:
            self._work.acquire(timeout=self.writer.files.config.commit_interval_commit_log / 1000)
            if self._stopped:
                return
            try:
                self._round()
            except (StoreError, OSError) as error:
                if self.writer.turn is not Turn.RETIRED or self.writer.health is not Health.SOUND:
                    self.writer.poison(f"the commit thread failed ({error})")
                self._committed()
                return
            except BaseException as error:
                self.writer.stop(f"the commit thread died ({error!r})")
                self._committed()
                raise

    def _round(self) -> None:
        config, now_s, waiting = self.writer.files.config, time.monotonic(), self.pool.uncommitted
        thorough = now_s - self._last_s >= config.commit_commit_log_thorough_interval / 1000
        if waiting and (thorough or waiting >= config.commit_commit_log_least_pages * _PAGE_SIZE):
            was_stuck = self.writer.commit_is_stuck
            try:
                self.writer.commit()
            except StoreFullError as error:  # the next round tries again, and so does the next put, which raises it
                if not was_stuck:
                    self.writer.tell_undispatched(error)
            self._last_s = time.monotonic()
            self._committed()
        elif thorough:
            self._last_s = now_s
