"""Is everything in the store as it must be?

`verify` reads the whole store and writes nothing; it works on a live store and on a dead one. Every fault is a `Finding`
with file, offset, what is expected and what was found:

- framing, position and CRCs of every record, BLANK records, zeros behind the end;
- every ConsumeQueue unit against its record, every record against its unit, queue offsets without gap;
- every key through the index;
- every BATCH: its data's CRCs, its ranges, and its journal entry;
- `state`, store checkpoint, and files that do not belong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from messagestore import checkpoint as store_checkpoint
from messagestore import record
from messagestore.batch_journal import BatchJournal
from messagestore.batch_record import BatchRecord, read_batch
from messagestore.commit_log import Scanned
from messagestore.config import StoreConfig
from messagestore.consume_queue import UNIT_DTYPE
from messagestore.dispatch import DispatchRequest, request_of
from messagestore.errors import CorruptionError, StoreError
from messagestore.layout import CHECKPOINT_SIZE
from messagestore.mapped_file import Disk
from messagestore.message import BATCH_TOPIC
from messagestore.recovery_walk import bad_chunk
from messagestore.view import StoreView

_KNOWN_NAMES = {
    "commitlog", "consumequeue", "index", "config", "abort", "abort.bak", "checkpoint", "lock", "spark", "batchconsumequeue",
    "consumequeue_ext", "compaction", "timerwheel", "timerlog", "epochFileCheckpoint", "brokerIdentity",
}  # fmt: skip
_KEYS_AT_ONCE = 65_536
_MOST_FINDINGS = 1000
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Parameters
    ----------
    path : str
    offset : int
        Physical offset for the log, else the position or unit number in the file.
    expected, found : str
    """

    path: str
    offset: int
    expected: str
    found: str


@dataclass
class VerifyReport:
    """What `verify` checked, and what it found.

    Parameters
    ----------
    start, end : int
        Physical offsets of the part of the log that was checked.
    record_count, unit_count, key_count, batch_count : int
    findings : list of Finding
        At most 1 000.
    """

    start: int = 0
    end: int = 0
    record_count: int = 0
    unit_count: int = 0
    key_count: int = 0
    batch_count: int = 0
    findings: list[Finding] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.findings = self.findings or []

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


def verify(
    root: str | os.PathLike[str],
    config: StoreConfig | None = None,
    *,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a whole store.

    Parameters
    ----------
    root : path
    config : StoreConfig | None
        Index slot and entry counts of a store without `spark/store.json`.
    progress : callable | None
        Called with (bytes of the log checked, bytes in all).

    Raises
    ------
    NotAStoreError
        When there is no store.
    """
    try:
        view = StoreView(root, config, disk)
    except CorruptionError as error:
        return VerifyReport(findings=[Finding(error.path, error.physical_offset, error.expected, error.found)])
    try:
        return _Verifier(view, progress).run()
    finally:
        view.close()


class _Verifier:
    def __init__(self, view: StoreView, progress: Progress | None) -> None:
        self.view = view
        self.files = view.files
        self.log = view.files.commit_log
        self.progress = progress
        self.report = VerifyReport()
        self.next_offsets: dict[tuple[str, int], int] = {}
        self.batches: list[BatchRecord] = []

    def run(self) -> VerifyReport:
        report, log = self.report, self.log
        queues = {(t, q): self._queue_range(t, q) for t, ids in self.view.topics().items() for q in ids}
        limit = self.view.visible.end
        report.start = log.min_offset
        last_time = 0
        for run in log.scan(report.start, limit):
            last_time = self._check_run(run, last_time)
            report.record_count += len(run.starts)
            if self.progress is not None:
                self.progress(run.end - report.start, (limit or log.files.max_offset) - report.start)
        report.end = log.scan_offset
        self._check_end(limit)
        self._check_queues(queues)
        for batch in self.batches:
            self._check_batch(batch)
        self._check_journal()
        self._check_small_files()
        self._check_names()
        return report

    def find(self, path: str, offset: int, expected: str, found: str) -> None:
        """Note a fault."""
        if len(self.report.findings) < _MOST_FINDINGS:
            self.report.findings.append(Finding(path, offset, expected, found))

    def _log_path(self, physical_offset: int) -> str:
        return self.log.files.path(self.log.segment_of(physical_offset))

    def _queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        try:
            return self.view.min_offset(topic, queue_id), self.view.max_offset(topic, queue_id)
        except StoreError as error:
            self.find(self.files.queue(topic, queue_id).files.directory, 0, "files that can be read", str(error))
            return 0, 0

    # ---- records

    def _check_run(self, run: Scanned, last_time: int) -> int:
        request = request_of(run)
        times = run.heads["store_timestamp_ms"]
        back = np.flatnonzero(np.diff(np.concatenate([[last_time], times])) < 0)
        for row in back[:1].tolist():
            at = run.physical_offset + int(run.starts[row])
            self.find(self._log_path(at), at, "a store time not below the one before", f"{int(times[row])}")
        self._check_units_of(request)
        self._check_keys_of(request)
        if BATCH_TOPIC in request.run_topics:
            self._take_batches(request)
        return int(times[-1])

    def _check_units_of(self, request: DispatchRequest) -> None:
        """Each record has its unit, with the next number of its queue."""
        row = 0
        for topic, queue_id, count in zip(
            request.run_topics, request.run_queue_ids.tolist(), request.run_counts.tolist(), strict=True
        ):
            rows = slice(row, row + count)
            offsets = request.queue_offsets[rows]
            first = int(offsets[0])
            expected = np.arange(count) + self.next_offsets.get((topic, queue_id), first)
            bad = np.flatnonzero(offsets != expected)
            if len(bad):
                at = int(request.physical_offsets[row + int(bad[0])])
                self.find(
                    self._log_path(at),
                    at,
                    f"queue offset {int(expected[bad[0]])} of {topic}/{queue_id}",
                    f"{int(offsets[bad[0]])}",
                )
            self.next_offsets[(topic, queue_id)] = int(offsets[-1]) + 1
            wanted = np.empty(count, UNIT_DTYPE)
            wanted["physical_offset"] = request.physical_offsets[rows]
            wanted["size"] = request.sizes[rows]
            wanted["tags_code"] = request.tags_codes[rows]
            self._compare_units(topic, queue_id, first, wanted)
            self.report.unit_count += count
            row += count

    def _compare_units(self, topic: str, queue_id: int, first: int, wanted: Any) -> None:
        queue = self.files.queue(topic, queue_id)
        units = queue.read(first, len(wanted))
        count = min(len(units), len(wanted))
        differ = units[:count] != wanted[:count]
        row = int(differ.argmax()) if differ.any() else count
        if row < len(wanted):
            found = str(units[row]) if row < count else "no unit"
            path = os.path.join(queue.files.directory, "*")
            self.find(path, first + row, f"unit {first + row}: {wanted[row]}", found)

    def _check_keys_of(self, request: DispatchRequest) -> None:
        """Each key's entry is found through its slot."""
        index = self.files.index
        self.report.key_count += len(request.key_hashes)
        if index is None or not len(request.key_hashes):
            return
        low, high = index.covers()
        rows = np.repeat(np.arange(len(request.sizes)), request.key_counts)
        offsets = request.physical_offsets[rows]
        covered = (offsets >= low) & (offsets <= high)
        missing = index.missing(request.key_hashes[covered], offsets[covered])
        for at in missing[:1].tolist():
            self.find(self.files.paths.index, int(at), "an index entry for each key of this record", "none")

    def _take_batches(self, request: DispatchRequest) -> None:
        ends = np.cumsum(request.run_counts)
        for topic, count, end in zip(request.run_topics, request.run_counts.tolist(), ends.tolist(), strict=True):
            for row in range(end - count, end) if topic == BATCH_TOPIC else ():
                at = int(request.physical_offsets[row])
                batch = read_batch(self.log, at)
                if batch is None:
                    self.find(self._log_path(at), at, "a BATCH record that can be read", "one that cannot")
                else:
                    self.batches.append(batch)

    def _check_end(self, limit: int | None) -> None:
        """The log ends where it must, and behind the end there are zeros."""
        log, end = self.log, self.report.end
        stop = log.scan_end
        if limit is not None and end < limit:
            self.find(
                self._log_path(end),
                end,
                f"{stop.expected or 'a record'} (visible up to {limit})",
                stop.found or stop.reason,
            )
        elif limit is not None and end > limit:
            self.find(self._log_path(limit), limit, "a record that begins there", "the middle of one")
        elif limit is None and stop.reason not in ("zero", "end", "blank"):
            at = log.files.path(log.segment_of(end))
            if any(self._points_behind(t, q, end) for t, ids in self.view.topics().items() for q in ids):
                self.find(at, end, stop.expected, stop.found)
        state = self.files.state_file.read()
        if limit is not None and state is not None and state.in_flight == -1 and self.view.refresh().end == limit:
            for segment in log.files.offsets:
                if segment + log.segment_size > limit:
                    for begin, _ in log.nonzero_ranges(max(segment, limit))[:1]:
                        if self.view.refresh().end == limit:
                            self.find(self._log_path(begin), begin, "zeros behind the log's end", "other bytes")

    def _points_behind(self, topic: str, queue_id: int, end: int) -> bool:
        high = self.view.max_offset(topic, queue_id)
        units = self.view.units(topic, queue_id, high - 1, high) if high else []
        return bool(len(units)) and int(units[0]["physical_offset"]) >= end

    # ---- everything else

    def _check_queues(self, queues: dict[tuple[str, int], tuple[int, int]]) -> None:
        """No unit without a record."""
        for (topic, queue_id), (low, high) in queues.items():
            known = self.next_offsets.get((topic, queue_id))
            directory = self.files.queue(topic, queue_id).files.directory
            if known is None and high > low:
                self.find(directory, low, "records for the units of this queue", f"none for units {low} to {high - 1}")
            elif known is not None and high > known:
                self.find(directory, known, "no unit (the log has no record for it)", f"units {known} to {high - 1}")

    def _check_batch(self, batch: BatchRecord) -> None:
        self.report.batch_count += 1
        bad = bad_chunk(self.files, batch)
        if bad is not None:
            self.find(
                self._log_path(bad), bad, f"the data of the batch at {batch.physical_offset} (CRC-32)", "other bytes"
            )
        if batch.store_id != self.files.store_id:
            self.find(
                self._log_path(batch.physical_offset),
                batch.physical_offset,
                f"store {self.files.store_id}",
                batch.store_id,
            )
        rows = sum(count for runs in batch.ranges.values() for _, _, count in runs)
        if rows != batch.row_count:
            self.find(
                self._log_path(batch.physical_offset),
                batch.physical_offset,
                f"{batch.row_count} rows",
                f"{rows} in its ranges",
            )
        for topic, queue_id, first, count in _ranges(batch):
            units = self.files.queue(topic, queue_id).read(first, count)
            inside = (units["physical_offset"] >= batch.data_offset) & (units["physical_offset"] < batch.end)
            if len(units) < count or not inside.all():
                at = batch.physical_offset
                self.find(
                    self._log_path(at),
                    at,
                    f"units {first} to {first + count - 1} of {topic}/{queue_id} in the batch",
                    "others",
                )

    def _check_journal(self) -> None:
        path = self.files.paths.journal
        journal = BatchJournal.read(self.files.disk, path)
        for app_id, versions in journal.apps.items():
            for entry in versions.values():
                if entry.physical_offset < self.log.min_offset:
                    continue
                batch = read_batch(self.log, entry.physical_offset)
                if batch is None or (batch.app_id, batch.version, batch.digest) != (
                    app_id,
                    entry.version,
                    entry.digest,
                ):
                    self.find(
                        path,
                        entry.physical_offset,
                        f"the batch of {app_id!r} version {entry.version}",
                        "another record, or none",
                    )

    def _check_small_files(self) -> None:
        paths, disk = self.files.paths, self.files.disk
        state = self.files.state_file.read()
        if self.files.store_id and disk.exists(paths.state) and state is None:
            self.find(paths.state, 0, "a valid slot", "none")
        if state is not None and self.view.visible.end is not None:
            if state.clean_end > state.visible_end:
                self.find(
                    paths.state, 0, "a clean end not above the visible end", f"{state.clean_end} > {state.visible_end}"
                )
            if state.anchor_size:
                data = self.log.read(state.anchor_position, state.anchor_size)
                if record.crc32(data) != state.anchor_crc:
                    self.find(
                        paths.state, 0, f"the record at {state.anchor_position} as the anchor has it", "other bytes"
                    )
        if disk.exists(paths.checkpoint):
            size = disk.size(paths.checkpoint)
            if size != CHECKPOINT_SIZE:
                self.find(paths.checkpoint, 0, f"{CHECKPOINT_SIZE} bytes", f"{size}")
            found = store_checkpoint.read(disk, paths.checkpoint)
            if (
                state is not None
                and self.view.visible.end is not None
                and found.confirm_physical_offset > state.visible_end
            ):
                self.find(
                    paths.checkpoint, 32, f"an offset up to {state.visible_end}", str(found.confirm_physical_offset)
                )

    def _check_names(self) -> None:
        paths, disk = self.files.paths, self.files.disk
        for name in disk.names(paths.root):
            if name not in _KNOWN_NAMES:
                self.find(os.path.join(paths.root, name), 0, "files of a message store only", "a stray name")


def _ranges(batch: BatchRecord) -> Iterator[tuple[str, int, int, int]]:
    for topic, runs in batch.ranges.items():
        for queue_id, first, count in runs:
            yield topic, queue_id, first, count
