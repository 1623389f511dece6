"""The store's clock, which gives records their store times.

Store times do not go back: they stand still while the machine's clock is behind the last one. Only a clock that was
wrong by far lets them go back, once it has been set. `PutTimes` knows when records were put while they stand still.

Threads: the writer's mutex.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from messagestore.errors import CorruptionError, StoreError, StoreFullError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.signal_handlers import pass_on
from messagestore.writer.put_times import PutTimes
from messagestore.writer.standing import Standing

MOST_AHEAD_MS = 3_600_000
"""Store times stand still while the clock is behind the last store time by at most this."""
CLOCK_IS_SET_MS = 1_577_836_800_000
"""The start of 2020. A clock that shows an earlier time has not been set, and the writer ignores it."""
_log = logging.getLogger(__name__)


class StoreClock:
    """The clock of a writer's store.

    Parameters
    ----------
    standing : Standing

    Attributes
    ----------
    put_times : PutTimes
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._files, self._log = standing.files, standing.log
        self.put_times = PutTimes()

    def read_ms(self) -> int:
        """The current time, or the last store time while the clock is slightly behind it.

        If the last record's time is far ahead of a clock that has been set, the clock that gave that time was wrong:
        store times go back to the current time, instead of standing still until the clock reaches the last one.
        """
        return self._read_ms(put=False)

    def put_ms(self) -> int:
        """The store time of the next record. The writer calls this before the first byte of an append."""
        now_ms, last_ms = self._read_ms(put=True), self._standing.end.last_store_timestamp_ms
        if now_ms < last_ms:
            self._go_back_to(now_ms, last_ms)
        return now_ms

    def _read_ms(self, *, put: bool) -> int:
        disk, end = self._files.disk, self._standing.end
        now_ms, last_ms = disk.time_ns() // 1_000_000, end.last_store_timestamp_ms
        if now_ms >= last_ms or (last_ms - now_ms > MOST_AHEAD_MS and now_ms >= CLOCK_IS_SET_MS):
            if self.put_times.behind:
                self.put_times.caught_up(disk.uptime_ns() // 1_000_000, end.physical_offset)
            return now_ms
        until_ms = last_ms + self._log.delay_levels.longest_ms
        self.put_times.note(disk.uptime_ns() // 1_000_000, end.physical_offset, until_ms, put=put)
        return last_ms

    def _go_back_to(self, now_ms: int, last_ms: int) -> None:
        """Lower the times in the store checkpoint before the first record with an earlier time is written.

        A broker that recovers trusts its queues below the newest segment that begins before the checkpoint's times.
        Future segments would begin before these times although they are not synced.
        """
        files, path = self._files, self._files.paths.checkpoint
        old = store_checkpoint.read(files.disk, path)
        times = ("physic_timestamp_ms", "logics_timestamp_ms", "index_timestamp_ms")
        lower = {name: min(getattr(old, name), now_ms - 1) for name in times}

        if all(getattr(old, name) == value for name, value in lower.items()):
            return
        try:
            store_checkpoint.write(files.disk, path, replace(old, **lower), via=files.paths.temporary("checkpoint"))
        except StoreFullError:
            raise
        except OSError as error:
            raise self._standing.poison(f"the store checkpoint could not be written ({error})") from error

        _log.warning(
            "%s: the last store time, %d, is %d s ahead of this machine's clock. Store times go back to now, and a "
            "search by time there may miss messages; `messagestore verify` names the place",
            files.paths.root,
            last_ms,
            (last_ms - now_ms) // 1000,
        )

    def load(self) -> None:
        """Take over what other processes know of the times of puts. Call it under the mutex."""
        files = self._files
        try:
            self.put_times.load(files.disk, files.paths.put_times, self._standing.end.physical_offset)
        except CorruptionError as error:
            _log.warning("%s", error)
        self.save()

    def save(self) -> None:
        """Let the next process know when records were put, if the clock was set back."""
        files = self._files
        try:
            self.put_times.save(
                files.disk, files.paths.put_times, self.read_ms(), via=files.paths.temporary("put-times.json")
            )
        except (StoreError, OSError) as error:
            pass_on(error)
            _log.warning(
                "%s: %s could not be written, so delayed messages may wait for their level once more: %s",
                files.paths.root,
                files.paths.put_times,
                error,
            )
