"""Dispatch: writes the queue units and index entries of records.

Both are derived from the log. Dispatch takes arrays in log order, writes the units of each queue in one write, and then
writes the index entries (RocketMQ: DefaultMessageStore.ReputMessageService, CommitLogDispatcherBuildConsumeQueue /
BuildIndex). Nothing is synced here. Records that were already dispatched are skipped, so dispatching a range of the log
again does no harm.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messagestore.files.consume_queue import UNIT_DTYPE, Units
from messagestore.files.written import FileReplaced
from messagestore.format.rows import Rows
from messagestore.log.queue_runs import QueueRuns
from messagestore.log.read_back import rows_of
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Walk

_KEYS_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A set of some queues, and of all queues of some topics."""

    queues: frozenset[tuple[str, int]]
    topics: frozenset[str]

    def __contains__(self, key: object) -> bool:
        return key in self.queues or (isinstance(key, tuple) and key[0] in self.topics)


class Dispatcher:
    """Writes the units and index entries of one store. The caller holds the writer's mutex."""

    def __init__(self, files: StoreFiles) -> None:
        self.files = files

    def dispatch(self, pieces: Iterable[Rows]) -> None:
        """Write the ConsumeQueues first, then the index, as RocketMQ does.

        Index entries of many pieces are put together, because each put reads and writes the slots that it touches, and
        a large put costs hardly more than a small one.
        """
        waiting: list[Rows] = []
        key_count = 0
        for rows in pieces:
            self.dispatch_queues(rows)
            waiting.append(rows)
            key_count += len(rows.key_hashes)
            if key_count >= _KEYS_AT_ONCE:
                self._put_index(waiting)
                waiting, key_count = [], 0
        self._put_index(waiting)

    def dispatch_queues(self, rows: Rows, keys: Container[tuple[str, int]] | None = None) -> None:
        """Append the units of some or all queues; runs of one queue are written together."""
        units = units_of(rows)
        for (topic, queue_id), numbers in rows.by_queue().items():
            if keys is not None and (topic, queue_id) not in keys:
                continue
            for first, part in _runs(rows.queue_offsets[numbers], units[numbers]):
                self._append(topic, queue_id, first, part)

    def _append(self, topic: str, queue_id: int, first: int, units: NDArray[np.void]) -> None:
        queue = self.files.queue(topic, queue_id)
        self.files.mark_written(topic, queue_id, queue)
        if self.files.ends is not None:
            self.files.ends.extend((topic, queue_id), first, units)
        try:
            queue.append(first, units)
        except FileReplaced:
            # A broker started by mistake deletes files before it asks for the lock. Check the files again, rebuild,
            # then append.
            queue.load()
            self.rebuild_queue(topic, queue_id, int(units["physical_offset"][0]))
            queue.append(first, units)

    def _put_index(self, pieces: list[Rows]) -> None:
        index = self.files.index
        if index is None or not pieces:
            return
        columns = [(one.physical_offsets, one.store_timestamps_ms, one.key_hashes, one.key_counts) for one in pieces]
        index.put(*(columns[0] if len(columns) == 1 else map(np.concatenate, zip(*columns, strict=True))))

    def check_files(self) -> None:
        """Check that every queue and index file that was written is still the file at its path.

        Raises
        ------
        FileReplaced
            A file was replaced. A broker started by mistake deletes files before it asks for the lock.
        """
        for _, _, queue in self.files.written_queues():
            queue.check_files()
        if self.files.index is not None:
            self.files.index.check_files()

    def repair(self, end: int) -> None:
        """Rebuild the index, and the queues that are no longer at their path, from the log up to `end`."""
        for topic, queue_id, queue in self.files.written_queues():
            try:
                queue.check_files()
            except FileReplaced:
                queue.load()
                self.rebuild_queue(topic, queue_id, end)
        index, log = self.files.index, self.files.commit_log
        if index is None:
            return
        try:
            index.check_files()
            index.rewind(end, self._store_time)  # it may hold some entries of what is dispatched again
        except FileNotFoundError:
            index.load()
            index.unlink_all()
            for run in Walk(log, log.min_offset, end, Depth.FRAMING):
                self._put_index([rows_of(run)])

    def _store_time(self, physical_offset: int) -> int | None:
        head = self.files.commit_log.head(physical_offset)
        return None if head is None else int(head["store_timestamp_ms"])

    def rewind_index(self, physical_offset: int) -> None:
        """Rewind the index to its state before anything at or above an offset was put."""
        if self.files.index is not None:
            self.files.index.rewind(physical_offset, self._store_time)

    def rebuild_queue(self, topic: str, queue_id: int, end: int) -> None:
        """Rewrite a queue's units from the log's first segment up to the physical offset `end`."""
        self.rebuild_queues([(topic, queue_id)], end)

    def rebuild_queues(
        self, queues: Iterable[tuple[str, int]], end: int, topics: Iterable[str] = ()
    ) -> set[tuple[str, int]]:
        """Rewrite the units of some queues, and of all queues of some topics, if they have records.

        This takes two passes over the log up to the physical offset `end`.
        """
        log, wanted = self.files.commit_log, _Wanted(frozenset(queues), frozenset(topics))
        runs = QueueRuns(self.files, log.min_offset, units=False)
        for run in Walk(log, log.min_offset, end, Depth.FRAMING).whole():
            runs.take(rows_of(run), wanted)
        begun = {key for key in runs.next_offsets if key[0] in wanted.topics}
        for topic, queue_id in sorted(runs.remade | begun):
            queue = self.files.queue(topic, queue_id)
            if self.files.disk.is_folder(queue.files.directory):
                queue.truncate(0)
                self.files.mark_written(topic, queue_id, queue)
        self.rebuild(runs, end, wanted)
        return set(runs.next_offsets)

    def rebuild(
        self,
        runs: QueueRuns,
        end: int,
        keys: Container[tuple[str, int]] | None,
        *,
        queues: bool = True,
        index: bool = False,
    ) -> None:
        """Rewrite units and entries from the log's first segment up to the physical offset `end`.

        Parameters
        ----------
        runs : QueueRuns
            Says which number each record has in its queue.
        keys : container of (topic, queue id) or None
            The queues to rebuild; None: all of them.
        queues, index : bool
            What to rebuild.
        """
        log = self.files.commit_log
        ends, self.files.ends = self.files.ends, None  # the ends of these queues are known
        try:
            for run in Walk(log, log.min_offset, end, Depth.FRAMING).whole():
                rows = runs.apply(rows_of(run))
                if queues:
                    self.dispatch_queues(rows, keys)
                if index:
                    self._put_index([rows])
        finally:
            self.files.ends = ends


def units_of(rows: Rows) -> Units:
    """Return the ConsumeQueue unit of each row."""
    units: Units = np.empty(rows.row_count, UNIT_DTYPE)
    units["physical_offset"] = rows.physical_offsets
    units["size"] = rows.sizes
    units["tags_code"] = rows.tags_codes
    return units


def _runs(queue_offsets: NDArray[np.int64], units: Units) -> Iterator[tuple[int, Units]]:
    """Yield the consecutive units of one queue, each part with its first number.

    There is one part, unless a topic was created again.
    """
    breaks = np.flatnonzero(np.diff(queue_offsets) != 1) + 1
    for part, first in zip(np.split(units, breaks), queue_offsets[np.append(0, breaks)].tolist(), strict=True):
        yield first, part
