"""Checks that the ConsumeQueues and the index agree with the log.

The records come as rows in the order of the log; their units and entries are read and compared, and nothing is written.
What only a Java broker does is not a fault: a topic that was deleted leaves records without a queue; a topic that was
created again restarts its numbers; a topic that a crash of the broker restored has units with other numbers than its
records; and after such a crash, stretches of the log are in no index file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError, StoreError
from messagestore.files import index_check
from messagestore.files.consume_queue import CONSUME_QUEUE_FOLDER, ConsumeQueue, list_queues, units_of
from messagestore.format.layout import UNIT
from messagestore.format.message import is_own_topic, stored_topic_fault
from messagestore.format.record import decode_message
from messagestore.format.rows import SCHEDULE_TOPIC, Rows
from messagestore.inspect.report import Finding, VerifyReport
from messagestore.log.store_files import StoreFiles

LIGHT_TOPIC_PREFIX = "%LMQ%"
_QUEUE_EXT_FOLDER = "consumequeue_ext"
_ROCKSDB_FILE = "CURRENT"
_MOST_OF_QUEUE = 20
_BEHIND_COUNT = 128
Units = NDArray[np.void]


@dataclass(slots=True)
class _Seen:
    """What the check has seen of one queue.

    Parameters
    ----------
    first, next : int | None
        The number of its first record, and the number that its next record must have.
    gap : int
        The number of stretches of the log that could not be read when the queue was last seen.
    begin, last : int
        The physical offsets of the first record since the queue started, and of the last one.
    renumbered : int
        The number of records whose unit has another number than the record.
    repeated : int
        The number of records that repeat a number and have no unit.
    faults : list of Finding
        They are kept until the end: if the queue starts again, earlier records are missing legitimately.
    """

    first: int | None = None
    next: int = 0
    begin: int = 0
    last: int = 0
    gap: int = 0
    renumbered: int = 0
    repeated: int = 0
    fault_count: int = 0
    faults: list[Finding] = field(default_factory=list)


class QueueCheck:
    """Compares every record with its unit, and every unit with its record.

    Parameters
    ----------
    files : StoreFiles
    report : VerifyReport
    limit : int
        Units of records that end above it may be unfinished.
    had_queue : callable
        Whether a queue had messages at the end of the last Python writer; None: unknown, as after a broker.
    own : bool
        No broker ever wrote the store, so each unit has the number of its record.
    """

    def __init__(
        self,
        files: StoreFiles,
        report: VerifyReport,
        limit: int,
        had_queue: Callable[[str, int], bool | None],
        *,
        own: bool,
    ) -> None:
        self.own = own
        self.files = files
        self.log = files.commit_log
        self.report = report
        self.limit = limit
        self.had_queue = had_queue

        self.gap = 0
        self.seen: dict[tuple[str, int], _Seen] = {}
        self._left_out: dict[str, bool] = {}
        self._told_levels = False
        self._unreadable: set[tuple[str, int]] = set()

        self._has_ext = files.disk.exists(os.path.join(files.paths.root, _QUEUE_EXT_FOLDER))
        self.names = files.queue_names()

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue; None, and a finding, if its files cannot be used."""
        key = (topic, queue_id)
        if key in self._unreadable:
            return None
        try:
            return self.files.queue(topic, queue_id)
        except StoreError as error:
            self._unreadable.add(key)
            path = getattr(error, "path", self.files.paths.consume_queue)
            expected, found = getattr(error, "expected", "files of units"), getattr(error, "found", str(error))
            self.report.find(path, getattr(error, "physical_offset", 0), expected, found)
            return None

    def next_offset(self, topic: str, queue_id: int) -> int | None:
        """Return the number that the next record of a queue must have; None if no record was seen."""
        seen = self.seen.get((topic, queue_id))
        return seen.next if seen is not None and seen.first is not None else None

    # ---- records

    def take(self, rows: Rows) -> None:
        """Check that each record has its unit, with the next number of its queue."""
        units = units_of(rows)
        for (topic, queue_id), numbers in rows.by_queue().items():
            self._take_queue(topic, queue_id, rows.queue_offsets[numbers], units[numbers])

    def _take_queue(self, topic: str, queue_id: int, recorded: NDArray[np.int64], units: Units) -> None:
        at = int(units["physical_offset"][0])
        if stored_topic_fault(topic) is not None or queue_id < 0:
            place_of_record = f"topic {topic[:80]!r}, queue {queue_id}"
            self.report.find(self.log.path_of(at), at, "a legal topic and queue id", place_of_record)
            return

        queue = None if self._is_left_out(topic) else self.queue(topic, queue_id)
        if queue is None:
            return

        self.report.unit_count += len(units)
        numbers, has_unit = (recorded, None) if self.own else self._numbers(queue, recorded, units["physical_offset"])
        breaks = np.diff(numbers) != 1
        if has_unit is not None:
            breaks |= np.diff(has_unit)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(units)]]).tolist()

        for start, end in itertools.pairwise(starts):  # one run, unless the numbers of the queue jump
            without_unit = has_unit is not None and not has_unit[start]
            self._take_part(topic, queue_id, queue, int(numbers[start]), units[start:end], without_unit)
            self.seen[topic, queue_id].renumbered += int((numbers[start:end] != recorded[start:end]).sum())

    def _numbers(
        self, queue: ConsumeQueue, recorded: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the number of each record's unit (or of the record, if it has none), and which records have a unit."""
        units = queue.read(int(recorded[0]), len(recorded)) if (np.diff(recorded) == 1).all() else queue.read(0, 0)
        if len(units) == len(recorded) and (units["physical_offset"] == places).all():
            return recorded, np.ones(len(recorded), np.bool_)
        first = queue.search_physical(int(places[0])) if queue.offsets else 0
        units = queue.read(first, len(places))
        units = units[: int((units["size"] > 0).cumprod().sum())]
        at = np.searchsorted(units["physical_offset"], places)
        has_unit = np.zeros(len(places), np.bool_)
        inside = at < len(units)
        has_unit[inside] = units["physical_offset"][at[inside]] == places[inside]
        return np.where(has_unit, first + at, recorded), has_unit

    def _take_part(
        self, topic: str, queue_id: int, queue: ConsumeQueue, first: int, units: Units, without_unit: bool
    ) -> None:
        """Check records with consecutive numbers.

        Parameters
        ----------
        without_unit : bool
            No unit of the queue points to any of them.
        """
        seen = self.seen.setdefault((topic, queue_id), _Seen())
        seen.last = int(units["physical_offset"][-1])

        if without_unit and seen.first is None and not self.own:
            # A part of a deleted topic came back: the queue begins with its first record that came back.
            earlier = min(len(units), self._earlier(queue, first, seen.last))
            first, units = first + earlier, units[earlier:]
            if not len(units):
                return

        if without_unit and seen.first is not None and first < seen.next:
            # RocketMQ gives no unit to a record whose number the queue has passed
            repeated = min(len(units), seen.next - first)
            seen.repeated += repeated
            first, units = first + repeated, units[repeated:]
            if not len(units):
                return

        name = f"{topic}/{queue_id}"
        stored, same = self._compare(topic, queue, first, units)

        skipped = 0
        if seen.first is None:
            seen.first = seen.next = first
            seen.begin = int(units["physical_offset"][0])
        elif first != seen.next and not (self.gap > seen.gap and first > seen.next):
            if first < seen.next and same[0]:
                self.report.note(f"{name}: numbers start again at {first}: the topic was deleted and created again")
                seen.faults, seen.fault_count, seen.first = [], 0, first
                seen.renumbered = seen.repeated = 0
                seen.begin = int(units["physical_offset"][0])
            else:
                at = int(units["physical_offset"][0])
                self._fault(seen, Finding(self.log.path_of(at), at, f"queue offset {seen.next} of {name}", str(first)))
                skipped = 1

        # A number that the queue does not know either is one damaged record, not the place where the queue continues.
        seen.next = (first if same[0] or not skipped else seen.next) + len(units)
        seen.gap = self.gap

        for row in (np.flatnonzero(~same[skipped:]) + skipped).tolist():
            unit = _words(stored[row]) if row < len(stored) else "no file"
            path, position = queue.place(first + row)
            self._fault(seen, Finding(path, position, f"unit {first + row} of {name}: {_words(units[row])}", unit))

    def _earlier(self, queue: ConsumeQueue, first: int, last_place: int) -> int:
        """Count the numbers, from a given one on, without units because the queue begins after a place in the log."""
        begin = queue.search_physical(0) if queue.offsets else 0
        units = queue.read(begin, 1 if begin > first else 0)
        return begin - first if len(units) and int(units["physical_offset"][0]) > last_place else 0

    def _compare(self, topic: str, queue: ConsumeQueue, first: int, units: Units) -> tuple[Units, NDArray[np.bool_]]:
        """Return the units that exist, and whether each of `units` does."""
        stored = queue.read(first, len(units))
        if len(stored) < len(units):
            queue.load()  # a writer may have made the next file
            stored = queue.read(first, len(units))
        same = np.zeros(len(units), np.bool_)
        wanted = units[: len(stored)]
        equal = (stored["physical_offset"] == wanted["physical_offset"]) & (stored["size"] == wanted["size"])
        if not self._has_ext:  # with the extension, it is a place in another file
            other = equal & (stored["tags_code"] != wanted["tags_code"])
            equal &= ~other
            if topic == SCHEDULE_TOPIC and other.any() and not self._told_levels:
                self._told_levels = True
                self.report.note(
                    f"{SCHEDULE_TOPIC}: delayed messages are due at other times than {self._levels_words()}"
                )
        same[: len(stored)] = equal
        return stored, same

    def _levels_words(self) -> str:
        """What says when delayed messages are due, and what to do if it is not true."""
        if self.files.identity is None:
            return (
                "messageDelayLevel says. If the store's broker has another messageDelayLevel, verify with that one "
                "(storeConfig)"
            )
        return (
            f"the store's delay levels say (`delayLevels` in {self.files.paths.identity}). If a broker put them, with "
            "another messageDelayLevel, their units are right, and a rebuild of the queues would change them"
        )

    def _fault(self, seen: _Seen, finding: Finding) -> None:
        seen.fault_count += 1
        if len(seen.faults) < _MOST_OF_QUEUE:
            seen.faults.append(finding)

    def _is_left_out(self, topic: str) -> bool:
        left_out = self._left_out.get(topic)
        if left_out is None:
            left_out = self._left_out[topic] = self._reason(topic) is not None
            if left_out:
                self.report.note(f"{topic}: {self._reason(topic)}. Its records were not compared with units")
        return left_out

    def _reason(self, topic: str) -> str | None:
        """Return the reason why the units of a topic are not checked."""
        if self.files.disk.exists(os.path.join(self.files.paths.consume_queue, _ROCKSDB_FILE)):
            return "its queues are in RocksDB"
        if topic.startswith(LIGHT_TOPIC_PREFIX):
            return "it is a light message queue"
        if not self.files.topics.is_simple_queue(topic):
            return "its queues are not of the simple kind"
        if not is_own_topic(topic) and topic not in self.names and self.files.topics.get(topic) is None:
            return "it has no queue and no entry in config/topics.json, so it was deleted"
        return None

    # ---- units

    def finish(self, *, all_units: bool, zeros_behind: bool) -> None:
        """Check that no unit is without a record and that every folder is a queue, and report what was found.

        Parameters
        ----------
        all_units : bool
            There are no units of records above the limit.
        zeros_behind : bool
            There is nothing after the last unit.
        """
        for topic, queue_ids in self.names.items():
            for queue_id in queue_ids:
                self._check_units(topic, queue_id, None if all_units else self.limit, zeros_behind)

        for (topic, queue_id), seen in self.seen.items():
            if seen.fault_count and self._is_deleted(topic, queue_id, seen):
                self.report.note(
                    f"{topic}/{queue_id}: the records up to {seen.last} are in no queue, because the topic was deleted "
                    f"and created again, and no record from there to {self.limit} is in this queue"
                )
                continue

            self.report.add(*seen.faults)
            more = seen.fault_count - len(seen.faults)
            if more:
                self.report.finding_count += more
                self.report.note(f"{topic}/{queue_id}: {more} more findings of the same kind")
            self._note_numbers(f"{topic}/{queue_id}", seen)

        self._check_names()

    def _note_numbers(self, name: str, seen: _Seen) -> None:
        why = "a broker brought back a topic that had been deleted"
        if seen.renumbered:
            self.report.note(f"{name}: units whose number is not that of their record: {seen.renumbered} ({why})")
        if seen.repeated:
            self.report.note(f"{name}: records that repeat a number and are in no queue: {seen.repeated} ({why})")

    def _is_deleted(self, topic: str, queue_id: int, seen: _Seen) -> bool:
        """Whether all records of a queue are those of a deleted topic.

        The queue may begin again with a record above the limit. If it has no file, its records lie before those of the
        queues that its topic has now. If the topic has none, the last Python writer must have seen it without.
        """
        queue, had_queue = self.queue(topic, queue_id), self.had_queue(topic, queue_id)
        if queue is None:
            return False
        if queue.offsets:
            return self._begins_above(topic, queue_id, queue)
        if had_queue:
            return False
        begins = [self._begin(topic, other) for other in self.names.get(topic, ()) if other != queue_id]
        known = [begin for begin in begins if begin is not None]
        return seen.last < min(known) if known else had_queue is False

    def _begin(self, topic: str, queue_id: int) -> int | None:
        """The physical offset of a queue's first record, or the limit if it begins above it; None if none was seen, or
        if the queue has no file that can be read: a writer that is killed may leave a folder.
        """
        seen, queue = self.seen.get((topic, queue_id)), self.queue(topic, queue_id)
        if queue is None or not queue.offsets:
            return None
        if self._begins_above(topic, queue_id, queue):
            return self.limit
        return seen.begin if seen is not None and seen.first is not None else None

    def _begins_above(self, topic: str, queue_id: int, queue: ConsumeQueue) -> bool:
        """Whether the first unit of a queue points to a whole record above the limit that is message 0 of this queue.

        A writer that was killed had written it, but had not made it visible.
        """
        units = queue.read(0, 1)
        if not len(units) or int(units["physical_offset"][0]) < self.limit:
            return False
        at, size = int(units["physical_offset"][0]), int(units["size"][0])
        try:
            message = decode_message(self.log.read(at, max(size, 0)), physical_offset=at)
        except CorruptionError:
            return False
        found = (message.topic, message.queue_id, message.queue_offset, message.size)
        return found == (topic, queue_id, 0, size)

    def _check_units(self, topic: str, queue_id: int, limit: int | None, zeros_behind: bool) -> None:
        queue = None if self._is_left_out(topic) else self.queue(topic, queue_id)
        if queue is None:
            return

        begin = queue.search_physical(self.files.commit_log.min_offset)
        end = queue.end(limit=limit)
        size, identity = queue.file_size, self.files.identity
        if queue.offsets and identity is not None and size != identity.mapped_file_size_consume_queue:
            expected = f"a file of {identity.mapped_file_size_consume_queue} bytes"
            self.report.find(queue.path(queue.offsets[0]), 0, expected, f"{size} bytes")

        seen = self.seen.get((topic, queue_id))
        if seen is None or seen.first is None:
            self._unit_without_record(topic, queue_id, queue, begin, end)
            return
        self._unit_without_record(topic, queue_id, queue, begin, seen.first)
        self._unit_without_record(topic, queue_id, queue, seen.next, end)

        if zeros_behind:
            behind = queue.read(end, _BEHIND_COUNT).view(np.uint8).reshape(-1, UNIT.size).any(axis=1)
            if behind.any():
                path, position = queue.place(end + int(behind.argmax()))
                self.report.find(path, position, f"zeros behind unit {end - 1} of {topic}/{queue_id}", "other bytes")

    def _unit_without_record(self, topic: str, queue_id: int, queue: ConsumeQueue, start: int, end: int) -> None:
        if start < end and not self.gap:  # nothing is known after a stretch that cannot be read
            path, position = queue.place(start)
            expected = f"records for the units {start} to {end - 1} of {topic}/{queue_id}"
            units = queue.read(start, 1)
            says = _words(units[0]) if len(units) else "no unit"
            self.report.find(path, position, expected, f"none, and unit {start} says {says}")

    def _check_names(self) -> None:
        """Check that RocketMQ's folder holds only queues."""
        top, disk = self.files.paths.consume_queue, self.files.disk
        if disk.exists(os.path.join(top, _ROCKSDB_FILE)):
            return
        for name in list_queues(disk, self.files.paths.root)[1]:
            self.report.find(os.path.join(top, name), 0, "folders of topics", f"{name!r}, no legal topic")
        for name in disk.names(top):
            if not disk.is_folder(os.path.join(top, name)):
                self.report.find(os.path.join(top, name), 0, f"folders only in {CONSUME_QUEUE_FOLDER}", "a file")


class IndexCheck:
    """Checks that each key is found through the index.

    Parameters
    ----------
    files : StoreFiles
    report : VerifyReport
    limit : int
        Entries of records at or above it are not examined.
    up_to_date : bool
        Every record below the limit has been dispatched, and no power cut can have lost any of that.
    """

    def __init__(self, files: StoreFiles, report: VerifyReport, limit: int, *, up_to_date: bool) -> None:
        self.index = files.index
        self.report = report
        self.limit = limit
        self.up_to_date = up_to_date
        self.path = files.paths.index

        self.uncovered_count = 0
        self.uncovered_from = -1
        self.behind_count = 0
        self.behind_from = -1

        if self.index is None:
            return
        self.index.load()
        ranges = self.index.ranges()
        self.begins = np.array([begin for begin, _ in ranges], np.int64)
        self.ends = np.array([end for _, end in ranges], np.int64)

    def take(self, rows: Rows) -> None:
        """Check that each key of these records has an entry in the file that covers it."""
        self.report.key_count += len(rows.key_hashes)
        if self.index is None or not len(rows.key_hashes):
            return

        offsets = np.repeat(rows.physical_offsets, rows.key_counts)
        after = np.searchsorted(self.begins, offsets, side="right")  # files that begin at or before the record
        covered = np.zeros(len(offsets), np.bool_)
        some = after > 0
        covered[some] = offsets[some] <= self.ends[after[some] - 1]
        behind = offsets > (int(self.ends[-1]) if len(self.ends) else -1)

        if behind.any():
            self.behind_from = int(offsets[behind][0]) if self.behind_from < 0 else self.behind_from
            self.behind_count += int(behind.sum())

        between = ~covered & ~behind
        if between.any():
            self.uncovered_from = int(offsets[between][0]) if self.uncovered_from < 0 else self.uncovered_from
            self.uncovered_count += int(between.sum())

        for at in index_check.missing(self.index.files, rows.key_hashes[covered], offsets[covered]).tolist():
            self.report.find(self.path, 0, f"an entry for each key of the record at {at}", "none")
        times = index_check.wrong_times(self.index.files, rows.physical_offsets, rows.store_timestamps_ms)
        for path, position, expected, found in times:
            self.report.find(path, position, expected, found)

    def finish(self) -> None:
        """Check that each entry is found through its slot."""
        if self.index is None:
            return

        if self.behind_count and self.up_to_date:
            expected = f"entries for the {self.behind_count} keys of the records from {self.behind_from} on"
            self.report.find(self.path, 0, expected, "none")
        elif self.behind_count:
            self.report.note(f"{self.behind_count} keys from {self.behind_from} on are not in the index yet")

        if self.uncovered_count:
            self.report.note(
                f"{self.uncovered_count} keys are in no index file (the first in the record at {self.uncovered_from}), "
                "so look-ups scan the log for them"
            )

        for path, position, expected, found in index_check.wrong_headers(self.index.files) if self.up_to_date else ():
            self.report.find(path, position, expected, found)
        for path, position, physical_offset in index_check.unreachable(self.index.files) if self.up_to_date else ():
            if physical_offset < self.limit:
                expected = f"an entry (of the record at {physical_offset}) to which the chain of its slot leads"
                self.report.find(path, position, expected, "an entry that no chain reaches")

        if any(each.path.startswith(self.path) for each in self.report.findings):
            self.report.note(
                f"{self.path}: remove this folder and run `messagestore recover`, which makes the index from the log"
            )


def _words(unit: np.void) -> str:
    physical_offset, size, tags_code = unit.item()
    if not any((physical_offset, size, tags_code)):
        return "no unit"
    return f"physical offset {physical_offset}, size {size}, tags code {tags_code}"
