"""Dispatch: writes the queue units and index entries of records.

Both are derived from the log. `Dispatcher` takes arrays in log order, writes the units of each queue in one write, and
then writes the index entries (RocketMQ: DefaultMessageStore.ReputMessageService, CommitLogDispatcherBuildConsumeQueue /
BuildIndex). Nothing is synced there. Records that were already dispatched are skipped, so dispatching a range of the
log again does no harm. `rebuild` makes queues again from the log.

`QueueRuns` decides which record of the log is which message of its queue. In a log that only this project wrote,
QUEUEOFFSET decides, because the numbers of a queue are consecutive. A broker's log is not so simple. A topic that was
deleted and created again is numbered from 0 a second time; after a crash, a later record may repeat the number of an
earlier one; and damage can change a number. RocketMQ's recovery keeps every such record in the log, and so does ours:
numbers never decide where the log ends. They decide which records have a unit (RocketMQ:
ConsumeQueue.putMessagePositionInfo):

| The record says | Then |
|---|---|
| the next number | it gets the next unit |
| any number, and the next unit points to it | it keeps this unit: a broker brought a deleted topic back |
| 0, and the queue is not empty | the topic was created again: the queue starts again with this record |
| less, and the unit of this number points to it | the queue continues from there |
| less | it repeats a number and gets no unit |
| more | it gets the next unit nevertheless |

The first pass over the log (`take`) decides this; a second one (`apply`) marks the rows before they are dispatched.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError
from messagestore.files import index_rewind
from messagestore.files.consume_queue import ConsumeQueue, Units, pack_few, pack_units, queue_directory, units_of
from messagestore.files.disk import replace_file
from messagestore.files.numbered_files import FILE_NAME
from messagestore.files.unsynced import PATH_CHECK_S, FileReplaced
from messagestore.format.layout import UNIT
from messagestore.format.rows import Row, Rows, together
from messagestore.log.sealed_ends import Key
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Walk, rows_of
from messagestore.signal_handlers import pass_on

_NO_UNIT = -1

FEW_COUNT = 100
"""Up to this many single records are faster dispatched in loops than with arrays."""
_KEYS_AT_ONCE = 1_000_000
_LONG_RUN = 1_000
"""A piece with at least this many rows in a run, on average, does not wait for the rows of the next one."""


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
        self._latest: list[ConsumeQueue] = []
        """The queues that were written since the last check of files."""
        self._checked_s = -math.inf

    def dispatch(self, pieces: Iterable[Rows]) -> None:
        """Write the ConsumeQueues first, then the index, as RocketMQ does.

        Index entries of many pieces are put together, because each put reads and writes the slots that it touches, and
        a large put costs hardly more than a small one. Pieces with few rows for each queue are put together, too,
        because each queue costs some system calls, however few units it gets.
        """
        waiting: list[Rows] = []
        thin: list[Rows] = []
        key_count = row_count = 0

        for rows in pieces:
            waiting.append(rows)
            thin.append(rows)
            key_count += len(rows.key_hashes)
            row_count += rows.row_count

            full = key_count >= _KEYS_AT_ONCE or row_count >= _KEYS_AT_ONCE
            if full or rows.row_count >= _LONG_RUN * len(rows.run_topics):
                self.dispatch_queues(together(thin))
                thin = []
            if full:
                self._put_index(waiting)
                waiting, key_count, row_count = [], 0, 0

        if thin:
            self.dispatch_queues(together(thin))
        self._put_index(waiting)

    def dispatch_queues(self, rows: Rows, keys: Container[tuple[str, int]] | None = None) -> None:
        """Append the units of some or all queues; runs of one queue are written together."""
        units = units_of(rows, UNIT.dtype)
        for (topic, queue_id), numbers in rows.by_queue().items():
            if keys is not None and (topic, queue_id) not in keys:
                continue
            begin, end = int(numbers[0]), int(numbers[-1]) + 1
            chosen = slice(begin, end) if end - begin == len(numbers) else numbers  # neighbours are not copied
            for first, part in _runs(rows.queue_offsets[chosen], units[chosen]):
                self._append(topic, queue_id, first, pack_units(part))

    def dispatch_few(self, rows: Sequence[Row]) -> None:
        """Dispatch a few records, in the order of the log, as `dispatch` does.

        This is a loop over records, for single puts: below about a hundred records it is faster than arrays.
        """
        queues: dict[tuple[str, int], list[Row]] = {}
        for row in rows:
            if row.has_unit:
                queues.setdefault((row.topic, row.queue_id), []).append(row)
        for same in queues.values():
            if any(row.queue_offset != number for number, row in enumerate(same, same[0].queue_offset)):
                self.dispatch([Rows.of(rows)])  # a topic was created again
                return
        for (topic, queue_id), same in queues.items():
            units = pack_few((row.physical_offset, row.size, row.tags_code) for row in same)
            self._append(topic, queue_id, same[0].queue_offset, units)
        if self.files.index is not None:
            self.files.index.put_few(rows)

    def _append(self, topic: str, queue_id: int, first: int, units: bytes) -> None:
        queue = self.files.queue(topic, queue_id)
        self._latest.append(queue)
        self.files.mark_written(topic, queue_id, queue)
        if self.files.ends is not None:
            self.files.ends.extend((topic, queue_id), first, units)
        try:
            queue.append(first, units)
        except FileReplaced:
            # A broker started by mistake deletes files before it asks for the lock. Check the files again, rebuild,
            # then append.
            queue.load()
            self.rebuild_queue(topic, queue_id, UNIT.struct.unpack_from(units)[0])
            queue.append(first, units)

    def _put_index(self, pieces: list[Rows]) -> None:
        index = self.files.index
        if index is None or not pieces:
            return
        times = {one.one_time_ms for one in pieces}
        one_time_ms = times.pop() if len(times) == 1 else None
        index.put(
            _joined([one.physical_offsets for one in pieces]),
            _joined([one.store_timestamps_ms for one in pieces]) if one_time_ms is None else one_time_ms,
            _joined([one.key_hashes for one in pieces]),
            _joined([one.key_counts for one in pieces]),
        )

    def check_files(self, *, often: bool = False) -> None:
        """Check that every queue and index file that was written is still the file at its path.

        With `often`, as for single puts, all files are checked every `PATH_CHECK_S`. In between, only those that were
        just written are looked at, and only whether they still have a name.

        Raises
        ------
        FileReplaced
            A file was replaced. A broker started by mistake deletes files before it asks for the lock.
        """
        latest, self._latest = self._latest, []
        often = often and time.monotonic() < self._checked_s + PATH_CHECK_S
        for queue in latest if often else [queue for _, _, queue in self.files.written_queues()]:
            queue.check_files(often=often)
        if self.files.index is not None:
            self.files.index.check_files(often=often)
        if not often:
            self._checked_s = time.monotonic()

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
            index_rewind.rewind(index, end, self._store_time)  # it may hold some entries of what is dispatched again
        except FileNotFoundError as error:
            pass_on(error)
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
            index_rewind.rewind(self.files.index, physical_offset, self._store_time)

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
            if self.files.disk.is_folder(queue.directory):
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


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _runs(queue_offsets: NDArray[np.int64], units: Units) -> Iterator[tuple[int, Units]]:
    """Yield the consecutive units of one queue, each part with its first number.

    There is one part, unless a topic was created again.
    """
    breaks = np.flatnonzero(queue_offsets[1:] - queue_offsets[:-1] != 1) + 1
    if not len(breaks):
        yield int(queue_offsets[0]), units
        return
    for part, first in zip(np.split(units, breaks), queue_offsets[np.append(0, breaks)].tolist(), strict=True):
        yield first, part


def rebuild(files: StoreFiles, keys: Iterable[Key], end: int) -> None:
    """Rebuild the files of some queues from the log up to the physical offset `end`, and sync them.

    `spark/rebuild` exists meanwhile: if the process dies, the next writer rebuilds all queues of the store.
    """
    disk, paths, keys = files.disk, files.paths, set(keys)
    for key in keys:
        for path in _files_of(files, key):
            disk.open(path).close()  # refuses a link or a FIFO before anything is removed
    replace_file(disk, paths.rebuild, b"queues", via=paths.temporary("rebuild"))
    ends, files.ends = files.ends, None  # what is rewritten is known
    try:
        for key in sorted(keys):
            remove_files(files, key)
        Dispatcher(files).rebuild_queues(keys, end)
        files.sync_derived()
    finally:
        files.ends = ends
    disk.unlink(paths.rebuild)


def _files_of(files: StoreFiles, key: Key) -> list[str]:
    """Return a queue's files. Files with other names do not count; loading the queue reports them."""
    directory = queue_directory(files.paths.root, *key)
    entries = files.disk.entries(directory)
    return [os.path.join(directory, name) for name, is_folder in entries if not is_folder and FILE_NAME.fullmatch(name)]


def remove_files(files: StoreFiles, key: Key) -> None:
    """Remove a queue's files, whatever they contain.

    Raises
    ------
    NotAStoreError
        One of the files is a link or a FIFO.
    """
    for path in _files_of(files, key):
        files.disk.open(path).close()
    files.drop_queue(*key)
    paths = _files_of(files, key)
    for path in paths:
        files.pool.forget(path)
        files.disk.unlink(path)
    if paths:
        files.disk.fsync_dir(os.path.dirname(paths[0]))


class QueueRuns:
    """Numbers the records of a part of the log.

    Parameters
    ----------
    files : StoreFiles
    start : int
        Physical offset at which the part begins.
    known : dict of (topic, queue id) -> int or None
        The next number of the queues whose records below the start were examined. For other queues, the units below the
        start give it.
    units : bool
        Units on disk can be used as evidence; False if all of them are rebuilt.
    own : bool
        This project wrote the whole part, so a number that does not follow is damage unless it is 0.

    Attributes
    ----------
    next_offsets : dict of (topic, queue id) -> int
        The next number of each queue that was met.
    doubtful : set of (topic, queue id)
        Queues whose units do not lead up to their first record of the part. They must be rebuilt from the log's
        beginning, which gives the next number.
    restarted : list of (topic, queue id)
        Queues that start again.
    remade : set of (topic, queue id)
        Queues whose files must go first: the restarted ones that hold units of an earlier run, and those whose first
        files are gone although the log has their messages.
    left_out : dict of (topic, queue id) -> int
        How many records of a queue have no unit because they repeat a number.
    """

    def __init__(
        self,
        files: StoreFiles,
        start: int = 0,
        known: dict[Key, int] | None = None,
        *,
        units: bool = True,
        own: bool = False,
    ) -> None:
        self.files = files
        self.start = start
        self.known = known or {}
        self.units = units
        self.own = own
        self.next_offsets: dict[Key, int] = {}
        self.doubtful: set[Key] = set()
        self.restarted: list[Key] = []
        self.remade: set[Key] = set()
        self.left_out: dict[Key, int] = {}
        self._begins: dict[Key, int] = {}  # physical offset of the first record of the run that counts
        self._changed: dict[int, int] = {}  # physical offset -> number, where it differs from QUEUEOFFSET

    def take(self, rows: Rows, keys: Container[Key] | None = None) -> None:
        """Examine the next records of the log, or with `keys` only those of some queues.

        Raises
        ------
        CorruptionError
            The log is this project's own and contains a number that does not follow.
        """
        for key, numbers in rows.by_queue().items():
            if keys is not None and key not in keys:
                continue
            offsets = rows.queue_offsets[numbers]
            expected = self._expected(key, int(offsets[0]), int(rows.physical_offsets[numbers[0]]))
            if int(offsets[0]) == expected and (np.diff(offsets) == 1).all():
                self.next_offsets[key] = expected + len(numbers)
                continue
            self._take_odd(key, expected, offsets, rows.physical_offsets[numbers], rows.store_timestamps_ms[numbers])

    def _expected(self, key: Key, first: int, at: int) -> int:
        """The number that the next record of a queue should have; its own, `first`, if nothing says otherwise."""
        known = self.next_offsets.get(key, self.known.get(key))
        if known is not None:
            return known
        if not self.units:
            return first
        if self.start <= self.files.commit_log.min_offset:
            return self._expected_in_whole_log(key, first, at)

        expected = self._end_of_units(key)
        if first == expected or (not self.own and self._points(key, expected, at)):
            return expected
        if self._has_all_units(key, first, expected):
            return expected
        self.doubtful.add(key)
        return first

    def _expected_in_whole_log(self, key: Key, first: int, at: int) -> int:
        """As `_expected`, for the first record of a queue in the log: retention may have deleted any number before it.

        Only a broker gives a record another number than its unit.
        """
        queue = self.files.queue(*key)
        if queue.offsets and not queue.first_file_queue_offset <= first <= queue.end_file_queue_offset:
            self.remade.add(key)  # a broker that died in a deletion has unlinked the first files, and not the others
            return first
        if self.own:
            return first
        expected = self._end_of_units(key)
        return expected if first != expected and self._points(key, expected, at) else first

    def _end_of_units(self, key: Key) -> int:
        """The number after the last unit of a queue that points below the start."""
        queue = self.files.queue(*key)
        return queue.search_physical(self.start) if queue.offsets else 0

    def _has_all_units(self, key: Key, first: int, expected: int) -> bool:
        """Whether the units of a queue below the start are sound up to `expected`, although the record says `first`."""
        if self.own:
            return first < expected and self._is_unit_of(key, first)
        before = self._number_of(key, expected - 1)
        return before is not None and (first < expected or first == before + 1)

    def _take_odd(
        self,
        key: Key,
        expected: int,
        offsets: NDArray[np.int64],
        physical_offsets: NDArray[np.int64],
        times: NDArray[np.int64],
    ) -> None:
        """Examine the records of one queue one by one, because some number does not follow."""
        last = len(offsets) - 1
        for row, (number, at) in enumerate(zip(offsets.tolist(), physical_offsets.tolist(), strict=True)):
            follows = row < last and int(offsets[row + 1]) == expected + 1
            if number == expected:
                expected += 1
            elif self.own and (number or follows):
                log = self.files.commit_log
                path = log.path_of(at)
                raise CorruptionError(path, at, f"queue offset {expected} of {key[0]}/{key[1]}", str(number))
            elif number > expected or follows or self._points(key, expected, at):
                # A number is damaged, or a broker gave the record this unit: the queue continues as if the number were
                # right.
                self._changed[at] = expected
                expected += 1
            elif self._points(key, number, at):
                if not number:
                    self._restart(key, at, remade=False)
                expected = number + 1
            elif not number and not self._older(key, int(times[row])):
                self._restart(key, at, remade=True)
                expected = 1
            else:
                self._changed[at] = _NO_UNIT
                self.left_out[key] = self.left_out.get(key, 0) + 1
        self.next_offsets[key] = expected

    def _restart(self, key: Key, at: int, *, remade: bool) -> None:
        self._begins[key] = at
        self.left_out.pop(key, None)
        if key not in self.restarted:
            self.restarted.append(key)
        if remade:
            self.remade.add(key)
        else:
            self.remade.discard(key)

    def _unit(self, key: Key, number: int) -> int:
        """Return the physical offset to which a unit on disk points, or -1."""
        if not self.units:
            return -1
        units = self.files.queue(*key).read(number, 1)
        return int(units["physical_offset"][0]) if len(units) and int(units["size"][0]) > 0 else -1

    def _points(self, key: Key, number: int, at: int) -> bool:
        return self._unit(key, number) == at

    def _number_of(self, key: Key, number: int) -> int | None:
        """Return the number in the record to which a unit on disk points; None if it points to no record of the queue.

        A queue whose last unit is sound has lost no units before a record that has the next number, or a number that
        the queue has already passed.
        """
        at = self._unit(key, number) if number >= 0 else -1
        head = self.files.commit_log.head(at) if at >= self.files.commit_log.min_offset else None
        return int(head["queue_offset"]) if head is not None and int(head["queue_id"]) == key[1] else None

    def _is_unit_of(self, key: Key, number: int) -> bool:
        """Whether a unit on disk points to a record of the log that has this queue id and number."""
        return self._store_time(key, number) is not None

    def _older(self, key: Key, time_ms: int) -> bool:
        """Whether a record with number 0 was stored before the record of the queue's unit 0.

        Such a record was left by a crash; it is not the first record of a topic that was created again.
        """
        first_ms = self._store_time(key, 0)
        return first_ms is not None and time_ms < first_ms

    def _store_time(self, key: Key, number: int) -> int | None:
        at = self._unit(key, number)
        head = self.files.commit_log.head(at) if at >= self.files.commit_log.min_offset else None
        if head is None or (int(head["queue_id"]), int(head["queue_offset"])) != (key[1], number):
            return None
        return int(head["store_timestamp_ms"])

    # ---- the second pass

    def apply(self, rows: Rows) -> Rows:
        """Return the rows with the numbers and units that the first pass determined."""
        changed = np.fromiter(self._changed, np.int64, len(self._changed))
        odd = np.flatnonzero(np.isin(rows.physical_offsets, changed)) if len(changed) else changed
        if not len(odd) and not self._begins:
            return rows
        queue_offsets = rows.queue_offsets.copy()
        has_unit = np.ones(rows.row_count, np.bool_) if rows.has_unit is None else rows.has_unit.copy()
        numbers = np.array([self._changed[at] for at in rows.physical_offsets[odd].tolist()], np.int64)
        queue_offsets[odd] = np.maximum(numbers, 0)
        has_unit[odd[numbers == _NO_UNIT]] = False
        for key, of_queue in rows.by_queue().items():
            has_unit[of_queue[rows.physical_offsets[of_queue] < self._begins.get(key, 0)]] = False
        return replace(rows, queue_offsets=queue_offsets, has_unit=has_unit)
