"""Checks a whole store (`messagestore verify`).

`verify` reads the whole store and writes nothing. It can run while a writer is at work, and on a store whose writer was
killed. Every fault is a `Finding` with file, offset, what was expected and what was found. It checks:

- the framing, the position and the CRCs of every record, BLANK records, and the zeros after the end; after a damaged
  record it continues with the next one that it can find;
- every ConsumeQueue unit against its record, every record against its unit, and queue offsets for gaps;
- every key through the index;
- every BATCH record: the CRCs of its data, its ranges, and its journal entry;
- `state`, the store checkpoint, and files that do not belong to a store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from messagestore.errors import CorruptionError, NotAStoreError
from messagestore.files.disk import Disk
from messagestore.format import record
from messagestore.format.batch_record import BODY_BEGIN, BatchRecord
from messagestore.format.config import StoreConfig
from messagestore.format.layout import BLANK, FILLER_UNIT_SIZE, PROPERTY_CRC_SIZE
from messagestore.format.message import BATCH_TOPIC, stored_topic_fault
from messagestore.format.record_scan import PROPERTY_CRC_BEGIN
from messagestore.inspect.derived import IndexCheck, QueueCheck
from messagestore.inspect.report import Finding, Progress, VerifyReport
from messagestore.inspect.small_files import SmallFiles, rules_of
from messagestore.log.batch_search import bad_chunk, read_batch
from messagestore.log.condition import Left, Writer
from messagestore.log.refusals import refuse_to_read
from messagestore.log.store_files import Identity, Paths, StoreFiles
from messagestore.log.walk import Run, Walk, rows_of
from messagestore.writer.store_clock import MOST_AHEAD_MS

__all__ = ["Finding", "Progress", "VerifyReport", "verify"]

_TRIES = 5
_NEAR_COUNT = 16


def verify(
    root: str | os.PathLike[str],
    config: StoreConfig | None = None,
    *,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a whole store. A writer may be at work; what it appends after the start is not checked.

    Parameters
    ----------
    root : path
    config : StoreConfig | None
        Index slot and entry counts of a store without `spark/store.json`.
    disk : Disk
    progress : callable | None
        A function that is called with the bytes of the log that were checked and the bytes in total.

    Raises
    ------
    NotAStoreError
        There is no store, or its queues are in RocksDB, so that it would look empty or faulty.
    """
    disk, paths = disk or Disk(), Paths(root)
    refuse_to_read(disk, paths, config)
    for left in reversed(range(_TRIES)):
        report = VerifyReport()
        files: StoreFiles | None = None
        try:
            files = StoreFiles(paths, config or StoreConfig(), Identity.read(disk, paths.identity), disk)
            if _Verifier(files, report, progress, at_rest=left > 0).run():
                return report
        except CorruptionError as error:
            report.find(error.path, error.physical_offset, error.expected, error.found)
            return report
        except NotAStoreError as error:
            report.find(error.path, 0, "a plain file", str(error))
            return report
        except (
            FileNotFoundError
        ) as error:  # retention, or the deletion of a topic, removed a file while it was being read
            if not left:
                report.find(str(error.filename), 0, "this file", f"none: it was deleted in each of {_TRIES} checks")
        finally:
            if files is not None:
                files.close()
    return report


class _Verifier:
    def __init__(self, files: StoreFiles, report: VerifyReport, progress: Progress | None, *, at_rest: bool) -> None:
        self.files = files
        self.log = files.commit_log
        self.report = report
        self.progress = progress
        self.at_rest = at_rest
        self.last_time_ms = 0
        self.times_back: list[int] = []

    def run(self) -> bool:
        """Check everything; return False to repeat the check.

        It must be repeated if the store changed hands meanwhile and there are findings.
        """
        files, report = self.files, self.report
        if not self._load():
            return True

        small_files = SmallFiles(files, report)
        self._choose_rules(small_files)
        rules = self.rules
        whole = self._check_log()
        self._note_times()

        self.queues.finish(all_units=rules.all_units and whole, zeros_behind=rules.zeros_behind and whole)
        self.index.finish()
        small_files.check(rules, self.last_time_ms if whole and not self.queues.gap else None)
        return report.ok or rules.hold(files) or not self.at_rest

    def _choose_rules(self, small_files: SmallFiles) -> None:
        """Find out how the store was left, and so what must be in it."""
        files, report = self.files, self.report
        self.rules = rules = rules_of(files, report, at_rest=self.at_rest)
        self.log.load()
        files.know(Identity.read(files.disk, files.paths.identity))  # as it is for the end that was just read
        if files.other_levels:
            report.note(files.other_levels)

        condition = rules.condition
        own = rules.state is not None and rules.state.own and condition.wrote is Writer.OURS
        self.queues = QueueCheck(files, report, rules.limit, small_files.had_queue, own=own)
        dispatched = condition.up_to_date and rules.traces.left is not Left.RECOVERING  # it rewinds the index
        self.index = IndexCheck(files, report, rules.limit, up_to_date=dispatched)

    def _check_log(self) -> bool:
        """Check the records, and what lies behind the last one; whether the log reaches as far as it must."""
        report, rules = self.report, self.rules
        report.start = self.log.min_offset
        report.end = self._walk(report.start, rules.limit)
        whole = report.end >= rules.limit
        if rules.condition.closed and rules.all_units and whole:
            self._walk_behind()
        if rules.zeros_behind and whole:
            self._check_zeros()
        if rules.condition.broker_open:
            self._check_segments()
        return whole

    def _note_times(self) -> None:
        """Note what store times say of the clocks of writers."""
        if self.times_back:
            self.report.note(
                f"store times go back at {len(self.times_back)} records, first at {self.times_back[0]}: "
                "a clock was set back. A search by time there may miss messages if it was set back by more than 10 s"
            )

        ahead_s = (self.last_time_ms - self.files.disk.time_ns() // 1_000_000) // 1000
        if ahead_s > MOST_AHEAD_MS // 1000:
            self.report.note(
                f"a record was stored at {self.last_time_ms}, which is {ahead_s} s ahead of this machine's clock: "
                "the clock of the writer or of this machine is, or was, wrong"
            )

    def _load(self) -> bool:
        """Read the folders; False if there is no log to check."""
        files, report = self.files, self.report
        for part in (files.index, files.topics, self.log):
            try:
                if part is not None:
                    part.load()
            except CorruptionError as error:
                report.find(error.path, error.physical_offset, error.expected, error.found)
                if part is self.log:
                    return False
                if part is files.index:
                    files.index = None

        if not self.log.segment_size:
            self.log.file_size = files.config.mapped_file_size_commit_log
        return True

    # ---- records

    def _walk(self, start: int, limit: int) -> int:
        """Check every record from `start` to `limit`, continuing after unreadable parts; return where it ended."""
        log, position = self.log, start
        while position < limit:
            readable = True
            walk = Walk(log, position, limit)
            try:
                for run in walk:
                    position = run.end
                    self._check_run(run)
                    if self.progress is not None:
                        self.progress(position - start, limit - start)

                position, stop = walk.position, walk.stop
                expected, found = stop.expected or "a record", stop.found or stop.reason
                if stop.reason == "blank":
                    expected, found = "a segment behind this BLANK record", "no file"
            except FileNotFoundError:
                raise
            except OSError as error:
                readable, expected, found = False, "bytes that can be read", error.strerror or str(error)

            if position >= limit:
                break

            following = self._next_record(position, limit) if readable else self._next_segment(position, limit)
            more = "no record behind it can be found" if following is None else f"the next record is at {following}"
            expected = f"{expected} (the log goes on to {limit})"
            self.report.find(self.log.path_of(position), position, expected, f"{found}; {more}")
            self.queues.gap += 1
            if following is None:
                return position
            position = following

        if position > limit:
            self.report.find(self.log.path_of(limit), limit, "the end of a record", "the middle of one")
        return position

    def _next_segment(self, position: int, limit: int) -> int | None:
        following = self.log.segment_of(position) + self.log.segment_size
        return following if following < limit and self.log.holding(following) is not None else None

    def _next_record(self, position: int, limit: int) -> int | None:
        """Return the first place after `position` where a record begins, according to sizes, queues and segments."""
        log = self.log
        data = log.record_bytes(position)
        places = [] if data is None else [position + len(data)]

        for topic, queue_ids in self.queues.names.items():
            for queue_id in queue_ids:
                queue = self.queues.queue(topic, queue_id)
                if queue is not None:
                    units = queue.read(queue.search_physical(position + 1), _NEAR_COUNT)
                    places += units["physical_offset"][units["size"] > 0].tolist()

        places += [segment for segment in log.offsets if segment > position]
        for place in sorted(set(places)):
            if position < place < limit and (
                log.head(place) is not None or log.read(place, BLANK.size) == log.blank(place)
            ):
                return int(place)
        return None

    def _check_run(self, run: Run) -> None:
        times = run.heads["store_timestamp_ms"]
        back = np.flatnonzero(times < np.maximum.accumulate(np.concatenate([[self.last_time_ms], times[:-1]])))
        self.times_back += (run.physical_offset + run.starts[back]).tolist()
        self.last_time_ms = max(self.last_time_ms, int(times.max()))

        ends = run.starts + run.heads["total_size"]
        names = run.data[(ends - PROPERTY_CRC_SIZE)[:, None] + np.arange(len(PROPERTY_CRC_BEGIN))]
        same = (names == np.frombuffer(PROPERTY_CRC_BEGIN, np.uint8)).sum(axis=1)
        for row in np.flatnonzero(
            same == len(PROPERTY_CRC_BEGIN) - 1
        ).tolist():  # otherwise a flipped bit would switch the check off
            at = run.physical_offset + int(run.starts[row])
            self.report.find(self.log.path_of(at), at, "a property __CRC32#", f"{names[row].tobytes()!r}")

        self.report.record_count += len(run.starts)
        without = np.flatnonzero(same < len(PROPERTY_CRC_BEGIN))
        if len(without) and not self.report.without_property_crc:
            self.report.first_without_property_crc = run.physical_offset + int(run.starts[without[0]])
        self.report.without_property_crc += len(without)

        rows = rows_of(run)
        self.queues.take(rows)
        self.index.take(rows)
        for row in rows.of_topic(BATCH_TOPIC):
            self._check_batch_at(int(rows.physical_offsets[row]))

    def _check_batch_at(self, at: int) -> None:
        batch = read_batch(self.log, at)
        if batch is None and self._is_foreign(at):
            self.report.note(f"topic {BATCH_TOPIC} holds messages of other producers, which are no batches")
        elif batch is None:
            self.report.find(self.log.path_of(at), at, "a BATCH record that can be read", "one that cannot")
        else:
            self._check_batch(batch)

    def _is_foreign(self, physical_offset: int) -> bool:
        """Whether a complete record in the topic of batches is somebody else's message."""
        data = self.log.record_bytes(physical_offset)
        try:
            return data is not None and not bytes(
                record.decode_message(data, physical_offset=physical_offset).body
            ).startswith(BODY_BEGIN)
        except CorruptionError:
            return False

    def _check_batch(self, batch: BatchRecord) -> None:
        at = batch.physical_offset
        self.report.batch_count += 1

        def find(expected: str, found: str, offset: int = at) -> None:
            self.report.find(self.log.path_of(offset), offset, expected, found)

        store_ids = self.files.known_ids
        if store_ids and batch.store_id not in store_ids:
            find(f"a batch of the store {self.files.store_id!r}", f"one of {batch.store_id!r}")
        if batch.end > self.rules.limit:
            find(f"a batch that ends at or below {self.rules.limit}", f"one that ends at {batch.end}")
            return
        bad = bad_chunk(self.log, batch)
        if bad is not None:
            find(f"the data of the batch at {at} (CRC-32)", "other bytes", bad)
        if batch.restated:
            return  # it has no rows of its own
        ranges = list(_ranges(batch))
        rows = sum(count for _, _, _, count in ranges)
        if rows != batch.row_count:
            find(f"{batch.row_count} rows in the batch's ranges", str(rows))
            return
        if not self.queues.own:
            return  # a broker may have deleted the topic and restored it: each record is compared with its unit
        for topic, queue_id, first, count in ranges:
            queue = self.queues.queue(topic, queue_id)
            if queue is None:
                continue
            units = queue.read(first, count)
            inside = (units["physical_offset"] >= batch.data_offset) & (units["physical_offset"] < batch.end)
            if len(units) < count or not inside.all():
                missing = count - int(inside.sum())
                wanted = f"units {first} to {first + count - 1} of {topic}/{queue_id} inside the batch"
                find(wanted, f"{missing} that are elsewhere")

    # ---- the end of the log

    def _walk_behind(self) -> None:
        """In a closed store, find a record after the last one with a unit.

        Such a record was forgotten, or is a broker's stale tail.
        """
        for run in Walk(self.log, self.report.end):
            rows = rows_of(run)
            (topic, queue_id, _, _), at = next(rows.runs()), rows.physical_offset
            follows = int(rows.queue_offsets[0]) == (self.queues.next_offset(topic, queue_id) or 0)
            if follows and int(rows.store_timestamps_ms.min()) >= self.last_time_ms:
                self.report.find(self.log.path_of(at), at, f"a unit of {topic}/{queue_id} for this record", "none")
            return  # one is enough: recovery includes all that follow

    def _check_segments(self) -> None:
        """In a store that a broker left open, find a unit that points behind the last segment: segments are missing."""
        log = self.log
        for topic, queue_ids in self.queues.names.items():
            for queue_id in queue_ids:
                queue = self.queues.queue(topic, queue_id)
                if queue is None:
                    continue
                number = queue.end(limit=log.max_offset)
                units = queue.read(number, 1)
                if not len(units) or not 0 < int(units["size"][0]) < FILLER_UNIT_SIZE:
                    continue
                log.load()  # the broker may have created the segment just now
                if int(units["physical_offset"][0]) >= log.max_offset:
                    end = int(units["physical_offset"][0]) + int(units["size"][0])
                    expected = f"segments up to {end}, where the record of unit {number} of {topic}/{queue_id} ends"
                    self.report.find(log.path(log.max_offset), log.max_offset, expected, "none")
                    return

    def _check_zeros(self) -> None:
        """Check for zeros after the end, up to the end of the last segment."""
        limit, log = self.rules.limit, self.log
        for segment in log.offsets:
            if segment + log.segment_size > limit:
                for begin, _ in log.nonzero_ranges(max(segment, limit))[:1]:
                    self.report.find(self.log.path_of(begin), begin, "zeros behind the log's end", "other bytes")


def _ranges(batch: BatchRecord) -> Iterator[tuple[str, int, int, int]]:
    """Yield the ranges of the batch that are possible: each row must have its bytes inside the batch."""
    most = batch.end - batch.data_offset
    for topic, runs in batch.ranges.items():
        for queue_id, first, count in runs:
            values = (queue_id, first, count)
            if stored_topic_fault(topic) is None and all(type(v) is int and v >= 0 for v in values) and count <= most:
                yield topic, queue_id, first, count
