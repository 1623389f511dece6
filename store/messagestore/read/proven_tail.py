"""Finds what the log holds above the end that `state` names, before a writer has recovered the store.

After a reboot, only a part of it is proven to be on the disk. After a kill all of it is there (see below).

Everything up to the clean end C is on the disk. Above C, only the log was synced, and only where SYNC_FLUSH required
it: the head of a SYNC_FLUSH batch is written after everything below its end E is on the disk. So a reader follows the
records from C on. A SYNC_FLUSH batch whose CRCs match proves all records up to its E; recovery keeps these records, or
refuses the store. ConsumeQueue units above C were never synced, so they are built from the records.

    C | put | async batch | SYNC batch | put | SYNC batch | put | async batch | torn
      |<------------------ proven ------------------------>|<-- recovery decides -->

Single puts and ASYNC_FLUSH batches after the last SYNC_FLUSH batch are not proven, although they may be on the disk.
The same applies to everything that lies above C by more than the limit.

If a process with ASYNC_FLUSH was killed, and the machine was not restarted, everything is in the log that was written.
The last puts that were acknowledged lie above V, because their units were still to be written. So a reader follows the
records from V on, and shows all that recovery keeps: not the record or the batch that was under way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from messagestore.files.consume_queue import Units, units_of
from messagestore.files.state import State
from messagestore.format import record_scan
from messagestore.format.batch_record import BatchRecord
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import Rows
from messagestore.log.batch_search import bad_chunk
from messagestore.log.log_end import is_anchored
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Run, Walk, rows_of, whole_rows

Key = tuple[str, int]

_log = logging.getLogger(__name__)


@dataclass
class ProvenTail:
    """The proven part of a log above its clean end.

    Parameters
    ----------
    start : int
        C; after a kill, V.
    end : int
        The end of the last batch that proves everything below it; `start` if there is none. After a kill, the end of
        the last record.
    units : dict of (topic, queue id) to (int, Units)
        For the records in between: the queue offset of each queue's first record, and one unit for each record.
    hidden_end : int
        The end of the valid records after `end`. Nothing proves that they are on the disk.
    hidden_count : int
        The number of these records.
    limited : bool
        The limit was reached, and what follows was not examined.
    killed : bool
        The writer was killed, and the machine was not restarted since.
    """

    start: int
    end: int
    units: dict[Key, tuple[int, Units]] = field(default_factory=dict)
    hidden_end: int = 0
    hidden_count: int = 0
    limited: bool = False
    killed: bool = False

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
        if self.killed:
            return (
                f"{root}: a writer was killed, and no writer has opened the store since, so messages up to physical "
                f"offset {self.end} are shown. The rest of the log was not examined (provenTailSize). Run "
                f"`messagestore recover`, or open the store for writing, to see it"
            )

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


def find_killed_tail(files: StoreFiles, state: State, limit: int) -> ProvenTail:
    """Find what a killed writer with ASYNC_FLUSH had written to the log above V, in this boot of the machine.

    Parameters
    ----------
    files : StoreFiles
    state : State
        The state that the writer left, or that of a recovery which has not ended.
    limit : int
        The largest number of bytes above V to examine.
    """
    return _KilledChain(files, state, limit).run()


class _Chain:
    """A walk over the records from C on."""

    end: int | None = None
    """Where the walk ends at the latest."""

    def __init__(self, files: StoreFiles, state: State, limit: int) -> None:
        self.files = files
        self.log = files.commit_log
        self.state = state
        start = self._start()
        self.limit = start + limit
        self._known_ids = files.identity.known_ids if files.identity is not None else frozenset()
        self.tail = ProvenTail(start, start, hidden_end=start)
        self._next: dict[Key, int] = {}
        self._pieces: dict[Key, tuple[int, list[Units]]] = {}
        self._waiting: list[tuple[Key, int, Units]] = []  # not proven yet
        self._waiting_count = 0

    def _start(self) -> int:
        return self.state.clean_end

    def run(self) -> ProvenTail:
        tail = self.tail
        if self._anchored():
            self._follow(tail.start)
        tail.hidden_count = self._waiting_count
        tail.units = {key: (first, np.concatenate(parts)) for key, (first, parts) in self._pieces.items()}
        return tail

    def _anchored(self) -> bool:
        """Whether the log continues at the start."""
        return is_anchored(self.log, self.state)

    def _follow(self, position: int) -> None:
        walk, after = Walk(self.log, position, self.end, batches=True), position
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
        if batch.store_id not in self._known_ids or bad_chunk(self.log, batch) is not None:
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
        for key, numbers in rows.by_queue().items():
            offsets = rows.queue_offsets[numbers]
            first = int(offsets[0])
            if (np.diff(offsets) != 1).any() or not self._continues(key, first):
                return False
            self._waiting.append((key, first, units[numbers]))
            self._next[key] = int(offsets[-1]) + 1
        self._waiting_count += rows.row_count
        return True

    def _continues(self, key: Key, first: int) -> bool:
        """Whether a record is the next one of its queue. The units below C are synced; those above it prove nothing."""
        next_offset = self._next.get(key)
        if next_offset is not None:
            return first == next_offset
        return first <= proven_queue_end(self.files, *key, self.tail.start, crc=False)

    def _prove(self, end: int) -> None:
        for key, first, units in self._waiting:
            self._pieces.setdefault(key, (first, []))[1].append(units)
        self._waiting, self._waiting_count = [], 0
        self.tail.end = end


class _KilledChain(_Chain):
    """A walk over the records from V on, all of which count."""

    def __init__(self, files: StoreFiles, state: State, limit: int) -> None:
        super().__init__(files, state, limit)
        self.tail.killed = True
        if state.recovering:
            self.end = state.in_flight  # where recovery found the end; it removes what lies behind it

    def _start(self) -> int:
        return self.state.visible_end

    def _anchored(self) -> bool:
        return True

    def _take_batch(self, batch: BatchRecord) -> int | None:
        end = super()._take_batch(batch)
        if end is not None:
            self._prove(end)
        return end

    def _take_run(self, run: Run) -> int | None:
        count = record_scan.leading(whole_rows(run, rows_of(run)))
        end = super()._take_run(run.slice(0, count)) if count else None
        if self._waiting:
            self._prove(self.tail.hidden_end)
        return end if count == len(run.starts) else None


def tell(tail: ProvenTail, root: str) -> None:
    """Log which records a reader does not see."""
    if not tail.complete:
        _log.warning("%s", tail.words(root))
