"""The clean end of the log, and how it moves.

Everything below the clean end is synced, and the next recovery does not check it. The order of a move is important:
the log, the queues and the index are synced first; then `state` is written and synced; then the store checkpoint, the
journal, and the ends of the queues are written.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from messagestore.errors import (
    StoreFullError,
)
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.disk import sync_errors
from messagestore.format import record
from messagestore.format.layout import STATE_ASYNC, STATE_CLEAN
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.log_end import LogEnd
from messagestore.writer.queue_numbers import QueueNumbers
from messagestore.writer.standing import Standing
from messagestore.writer.states import Turn

CLEAN_SIZE = 1 << 30
"""The clean end moves after this many bytes at the latest."""
_AGAIN_S = 1.0
"""The time until the clean end is tried again after the disk had no room for it."""
_log = logging.getLogger(__name__)


class CleanEnd:
    """The clean end of a writer's store.

    Parameters
    ----------
    standing : Standing
    numbers : QueueNumbers
        The object that knows where the queues end.
    """

    def __init__(self, standing: Standing, numbers: QueueNumbers) -> None:
        self._standing = standing
        self._files, self._log = standing.files, standing.log
        self._numbers = numbers
        self.moved_s = time.monotonic()
        self._again_s: float | None = None
        """When the clean end is tried again after the disk had no room for it. None: nothing has failed."""

    def maybe_move(self) -> None:
        """Move the clean end if it is time (`is_due`) and nothing is pending.

        The clean end saves the next recovery some work, and nothing that was acknowledged depends on it. So if the disk
        has no room for these few bytes, the clean end stays where it is, and is tried again a moment later.
        """
        with self._standing.mutex:
            self._maybe_move()

    def is_due(self) -> bool:
        """Whether it is time to move the clean end: after an interval, after 1 GiB, or at a new segment."""
        clean, visible, again_s = self._standing.state.clean_end, self._standing.state.visible_end, self._again_s
        now_s = time.monotonic()
        if self._standing.turn is not Turn.HELD:
            return False
        if again_s is not None:
            return now_s >= again_s
        if clean == visible:
            return False

        is_late = now_s - self.moved_s >= self._files.config.clean_interval_s
        is_new_segment = self._log.segment_of(visible) != self._log.segment_of(clean)
        return is_late or is_new_segment or visible - clean >= CLEAN_SIZE

    def _maybe_move(self) -> None:
        if self._standing.pending or not self.is_due():
            return
        again_s = self._again_s
        try:
            self.move()
        except StoreFullError as error:
            if again_s is None:
                _log.warning("%s", error)
            self._again_s = time.monotonic() + _AGAIN_S

    def move(self, *, closing: bool = False) -> None:
        """Move the clean end C to the visible end V.

        The CommitLog, the ConsumeQueues and the index are synced first, then `state`, then the store checkpoint.

        Raises
        ------
        StoreFullError
            The disk has no room to record the move. Log, queues and index are synced, and the writer stays usable.
        StorePoisonedError
            A sync failed.
        """
        self._standing.check_usable()
        if self._standing.pending:
            raise AssertionError("the clean end moves only when everything is published")

        end = self._standing.end
        try:
            self._standing.sync_log(end.physical_offset)
            self._numbers.seal_unsealed()
            with sync_errors(self._files.paths.root):
                self._files.sync_derived()
            self._write_clean_end(end, closing=closing)
        except StoreFullError as error:
            synced = f"everything up to {end.physical_offset} is synced"
            text = f"the disk has no room to note that {synced} ({error}). {synced.capitalize()}, and nothing is lost"
            raise self._standing.no_room(text, error) from error
        except OSError as error:
            raise self._standing.poison(f"the clean end could not be made durable ({error})") from error

        self._log.forget_written(end.physical_offset)
        self.moved_s, self._again_s = time.monotonic(), None

    def _write_clean_end(self, end: LogEnd, *, closing: bool) -> None:
        data = self._log.exact(end.last_position, end.last_size) if end.last_size else b""
        flags = (self._standing.state.flags & ~STATE_ASYNC) | (STATE_CLEAN if closing else 0)
        self._standing.write_state(
            clean_end=end.physical_offset,
            anchor_position=end.last_position,
            anchor_size=end.last_size,
            anchor_crc=record.crc32(data),
            flags=flags,
        )
        with sync_errors(self._files.paths.state):
            self._files.state_file.sync()
        self._write_checkpoint(end)
        self._write_journal(end)

        # After `state`: if a crash comes between, the records up to C supply what the seals lack.
        self._numbers.write_ends()

    def _write_journal(self, end: LogEnd) -> None:
        files, journal = self._files, self._standing.journal
        journal.end = end.physical_offset
        if files.identity is not None:
            journal.identity = files.identity.to_fields()

        if journal.queues is None or files.others_named:
            files.ever_written.update((t, q) for t, queue_ids in files.queue_names().items() for q in queue_ids)
        if files.others_named:
            on_disk = BatchJournal.read(files.disk, files.paths.journal)
            files.ever_written.update(on_disk.queue_names())

        journal.note_queues(files.ever_written)
        files.ever_written.clear()

        journal.write(
            files.disk,
            files.paths.journal,
            files.paths.temporary("journal"),
            retention=files.config.journal_retention,
        )
        files.others_named = False

    def _write_checkpoint(self, end: LogEnd) -> None:
        files = self._files
        old = store_checkpoint.read(files.disk, files.paths.checkpoint)
        index_ms = old.index_timestamp_ms
        if files.index is not None:  # below all future times: a broker keeps an index file that ends at this time
            last_ms = end.last_store_timestamp_ms  # lower than the index's end if store times have gone back
            index_ms = min(files.index.end_timestamp_ms, last_ms, files.disk.time_ns() // 1_000_000 - 1)
        new = replace(
            old,
            physic_timestamp_ms=end.last_store_timestamp_ms,
            logics_timestamp_ms=end.last_store_timestamp_ms,
            index_timestamp_ms=index_ms,
            confirm_physical_offset=end.last_position,
        )
        self._standing.journal.checkpoint_crc = record.crc32(new.to_bytes())
        store_checkpoint.write(files.disk, files.paths.checkpoint, new, via=files.paths.temporary("checkpoint"))
