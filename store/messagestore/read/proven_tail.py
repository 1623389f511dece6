"""Proves which part of a log is on the disk after a reboot, before a writer has recovered the store.

Everything up to the clean end C is on the disk. Above C, only the log was synced, and only where SYNC_FLUSH required
it: the head of a SYNC_FLUSH batch is written after everything below its end E is on the disk. So a reader follows the
records from C on. A SYNC_FLUSH batch whose CRCs match proves all records up to its E; recovery keeps these records, or
refuses the store. ConsumeQueue units above C were never synced, so they are built from the records.

    C | put | async batch | SYNC batch | put | SYNC batch | put | async batch | torn
      |<------------------ proven ------------------------>|<-- recovery decides -->

Single puts and ASYNC_FLUSH batches after the last SYNC_FLUSH batch are not proven, although they may be on the disk.
The same applies to everything that lies above C by more than the limit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from messagestore.files.consume_queue import Units, units_of
from messagestore.files.state import State
from messagestore.format.batch_record import CHUNK_SIZE, BatchRecord
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import Rows
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Run, Walk, rows_of

Key = tuple[str, int]

_log = logging.getLogger(__name__)


@dataclass
class ProvenTail:
    """The proven part of a log above its clean end.

    Parameters
    ----------
    start : int
        C.
    end : int
        The end of the last batch that proves everything below it; `start` if there is none.
    units : dict of (topic, queue id) to (int, Units)
        For the records in between: the queue offset of each queue's first record, and one unit for each record.
    hidden_end : int
        The end of the valid records after `end`. Nothing proves that they are on the disk.
    hidden_count : int
        The number of these records.
    limited : bool
        The limit was reached, and what follows was not examined.
    """

    start: int
    end: int
    units: dict[Key, tuple[int, Units]] = field(default_factory=dict)
    hidden_end: int = 0
    hidden_count: int = 0
    limited: bool = False

    def read(self, key: Key, start: int, end: int) -> Units:
        """The units `start..end` of a queue, as far as they are in `units`."""
        first, units = self.units[key]
        return units[max(0, start - first) : max(0, end - first)]

    def queue_end(self, key: Key) -> int:
        """The queue offset after the last message of a queue that is in `units`."""
        first, units = self.units[key]
        return first + len(units)

    def search_physical(self, key: Key, physical_offset: int) -> int:
        """The queue offset of the first message in `units` at a physical offset or above."""
        first, units = self.units[key]
        return first + int(np.searchsorted(units["physical_offset"], physical_offset))

    @property
    def complete(self) -> bool:
        """Whether no known record is left out."""
        return not self.hidden_count and not self.limited

    def words(self, root: str) -> str:
        """The text that says what a reader does not see."""
        hidden = f"{self.hidden_count} more records lie between {self.end} and {self.hidden_end}"
        if self.limited:
            hidden += ", and the rest of the log was not examined (provenTailSize)"
        return (
            f"{root}: no writer has opened the store since the machine was started, so messages up to physical offset "
            f"{self.end} are shown. {hidden}; nothing proves yet that they are on the disk. Run `messagestore "
            f"recover`, or open the store for writing, to see what is kept"
        )


def find_proven_tail(files: StoreFiles, state: State, limit: int) -> ProvenTail:
    """Find the proven part of the log above C.

    Parameters
    ----------
    files : StoreFiles
    state : State
        The state that the last writer left, in another boot.
    limit : int
        The largest number of bytes above C to examine.
    """
    return _Chain(files, state, limit).run()


class _Chain:
    """A walk over the records from C on."""

    def __init__(self, files: StoreFiles, state: State, limit: int) -> None:
        self.files = files
        self.log = files.commit_log
        self.state = state
        self.limit = state.clean_end + limit
        self._known_ids = files.identity.known_ids if files.identity is not None else frozenset()
        self.tail = ProvenTail(state.clean_end, state.clean_end, hidden_end=state.clean_end)
        self._next: dict[Key, int] = {}
        self._pieces: dict[Key, tuple[int, list[Units]]] = {}
        self._waiting: list[tuple[Key, int, Units]] = []  # not proven yet
        self._waiting_count = 0

    def run(self) -> ProvenTail:
        tail = self.tail
        if self._anchored():
            self._follow(tail.start)
        tail.hidden_count = self._waiting_count
        tail.units = {key: (first, np.concatenate(parts)) for key, (first, parts) in self._pieces.items()}
        return tail

    def _anchored(self) -> bool:
        """Whether the record before C is in the log. If it is not, no record begins at C."""
        state, log = self.state, self.log
        if not state.anchor_size:
            return state.clean_end == log.min_offset
        if state.anchor_position < log.min_offset or not log.fits(state.anchor_position, state.anchor_size):
            return False
        return log.crc(state.anchor_position, state.anchor_position + state.anchor_size) == state.anchor_crc

    def _follow(self, position: int) -> None:
        walk, after = Walk(self.log, position, batches=True), position
        runs = iter(walk)
        while after < self.limit:
            run = next(runs, None)
            if run is None:
                return
            taken = self._take_run(run) if run.batch is None else self._take_batch(run.batch)
            if taken is None:
                return
            walk.jump(taken)
            after = self.tail.hidden_end = taken
        self.tail.limited = any(self.log.read(after, 8))

    def _take_batch(self, batch: BatchRecord) -> int | None:
        """The end of a batch if it is complete, or None. A SYNC_FLUSH batch proves everything below its end."""
        if batch.store_id not in self._known_ids or not self._holds(batch):
            return None
        walk = Walk(self.log, batch.physical_offset, batch.end, Depth.FRAMING)
        for run in walk:
            if not self._note(rows_of(run)):
                return None
        if walk.position < batch.end:
            return None
        if batch.flush_disk_type == SYNC_FLUSH:
            self._prove(batch.end)
        return batch.end

    def _holds(self, batch: BatchRecord) -> bool:
        position = batch.data_offset
        for crc in batch.crcs:
            end = min(position + CHUNK_SIZE, batch.end)
            if self.log.crc(position, end) != crc:
                return False
            position = end
        return True

    def _take_run(self, run: Run) -> int | None:
        """The end of single records, or None. A BATCH record among them cannot be read, and ends the log."""
        rows = rows_of(run)
        unread = next(rows.of_topic(BATCH_TOPIC), None)
        rows = rows.slice(0, unread if unread is not None else rows.row_count)
        if not rows.row_count or not self._note(rows):
            return None
        self.tail.hidden_end = rows.end
        return rows.end if unread is None else None

    def _note(self, rows: Rows) -> bool:
        """Remember the units of rows; False if a queue does not continue with them."""
        units = units_of(rows)
        for topic, queue_id, start, stop in rows.runs():
            key, first, last = (topic, queue_id), int(rows.queue_offsets[start]), int(rows.queue_offsets[stop - 1])
            if last - first != stop - 1 - start or not self._continues(key, first):
                return False
            self._waiting.append((key, first, units[start:stop]))
            self._next[key] = last + 1
        self._waiting_count += rows.row_count
        return True

    def _continues(self, key: Key, first: int) -> bool:
        """Whether a record is the next one of its queue. The units below C are synced; those above it prove nothing."""
        known = self._next.get(key)
        if known is not None:
            return first == known
        return first <= proven_queue_end(self.files, *key, self.state.clean_end, crc=False)

    def _prove(self, end: int) -> None:
        for key, first, units in self._waiting:
            self._pieces.setdefault(key, (first, []))[1].append(units)
        self._waiting, self._waiting_count = [], 0
        self.tail.end = end


def tell(tail: ProvenTail, root: str) -> None:
    """Log which records a reader does not see."""
    if not tail.complete:
        _log.warning("%s", tail.words(root))
