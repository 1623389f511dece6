"""Which records of the log count, and where does the log end?

The walk goes from a start point to the first thing that does not count. A record counts if its framing, position and
CRCs agree (`record.scan`), its QUEUEOFFSET is its queue's next one and its store time is not below its predecessor's. A
record that fails only the last two and that no ConsumeQueue unit points to is a stale tail: a crashed broker's bytes.
A BATCH record counts if the CRCs of all its data hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from messagestore import batch_record, record, record_scan
from messagestore.batch_record import CHUNK_SIZE, BatchRecord, read_batch
from messagestore.commit_log import Scanned
from messagestore.config import SYNC_FLUSH
from messagestore.dispatch import DispatchRequest, queued_rows, request_of
from messagestore.errors import ChecksumError, CorruptionError
from messagestore.layout import IPV6_EXTRA_SIZE, RECORD_HEAD
from messagestore.log_writer import LogEnd
from messagestore.message import BATCH_TOPIC, MAX_QUEUE_ID, topic_fault
from messagestore.properties import PROPERTY_SEPARATOR
from messagestore.record_scan import ScanEnd
from messagestore.store_files import StoreFiles

_KEPT_RECORDS = 1_000_000  # some 50 bytes each
_SEARCH_SIZE = 16 * 1024 * 1024
_SECTOR_SIZE = 512
_DAMAGED = ("body_crc", "property_crc", "length", "position", "torn")
_TAIL_SIZE = 512  # topic and properties of a BATCH record are within this many bytes of its end


@dataclass
class Walk:
    """What a walk found.

    Parameters
    ----------
    start : int
        Where it began.
    end : LogEnd
        Where the log ends by what was found.
    stop : ScanEnd
        Why it stopped there.
    in_batch : bool
        It stopped at a BATCH whose data do not hold (ASYNC_FLUSH): these bytes are in a replay.
    next_offsets : dict of (topic, queue id) -> int
        Of each queue met.
    first_offsets : dict of (topic, queue id) -> int
    batches : list of BatchRecord
    record_count : int
    restarted : list of (topic, queue id)
        Queues whose offsets started again: the topic was deleted and made again by a broker.
    requests : list of DispatchRequest
        Of the records from `start` up to `requests_end`, all that were met or the first 1,000,000: what is dispatched
        after the walk need not be decoded again.
    requests_end : int
    """

    start: int
    end: LogEnd
    stop: ScanEnd = field(default_factory=lambda: ScanEnd("end", 0, "", ""))
    in_batch: bool = False
    next_offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    first_offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    batches: list[BatchRecord] = field(default_factory=list)
    record_count: int = 0
    restarted: list[tuple[str, int]] = field(default_factory=list)
    requests: list[DispatchRequest] = field(default_factory=list)
    requests_end: int = field(init=False)

    def __post_init__(self) -> None:
        self.requests_end = self.start


class Walker:
    """Walks one store's log.

    Parameters
    ----------
    files : StoreFiles
    before : LogEnd
        Where to start, and the last record before.
    trust_queues : bool
        Units below the start are synced: a queue's next offset is known from them. False when everything is rebuilt.
    sync_proof : bool
        Every BATCH record that is there was sealed after its data were synced, unless it says ASYNC_FLUSH itself.
    own : bool
        All records from the start on were written by this project.
    broker : bool
        A broker wrote last: it may have kept a part of an ASYNC batch, and what it appended behind that part counts.
    """

    def __init__(
        self,
        files: StoreFiles,
        before: LogEnd,
        *,
        trust_queues: bool,
        sync_proof: bool,
        own: bool = False,
        broker: bool = False,
    ) -> None:
        self.files = files
        self.log = files.commit_log
        self.trust_queues = trust_queues
        self.sync_proof = sync_proof
        self.own = own
        self.broker = broker
        self.walk = Walk(before.physical_offset, before)

    def run(self) -> Walk:
        """Walk to the end."""
        walk, log = self.walk, self.log
        for run in log.scan(walk.start, verify_body_crc=self.files.config.check_crc_on_recover):
            if not self._take(run):
                return walk
        walk.stop = log.scan_end
        walk.end = LogEnd(
            max(log.scan_offset, walk.end.physical_offset),
            walk.end.last_position,
            walk.end.last_size,
            walk.end.last_store_timestamp_ms,
        )
        self._check_sealed_batch(walk.end.physical_offset)
        return walk

    def _take(self, run: Scanned) -> bool:
        """Take in the records of a run that count; False when one does not."""
        request = request_of(run)
        whole = self._whole(run, request)
        if whole == len(run.starts):
            taken = self._take_whole(run, request)
            if taken and self.walk.record_count <= _KEPT_RECORDS:
                self.walk.requests.append(request)
                self.walk.requests_end = self.walk.end.physical_offset
            return taken
        torn = run.physical_offset + int(run.starts[whole])
        run = replace(run, starts=run.starts[:whole], heads=run.heads[:whole])
        if self._take_whole(run, request_of(run)):
            self.walk.stop = ScanEnd("torn", 0, "a record", "a part of one")
            self.walk.end = self.walk.end._replace(physical_offset=torn)
            self._check_sealed_batch(torn)
        return False

    def _whole(self, run: Scanned, request: DispatchRequest) -> int:
        """How many records of a run no power cut tore where no CRC covers them: behind the body.

        A sector that was lost is zero. A topic has no zero bytes, and properties end with a separator (a broker leaves
        it out): so only whole sectors of zeros within the properties are left to look for.
        """
        queued = queued_rows(run)
        bad = np.zeros(len(run.starts), np.bool_)
        bad_runs = [
            topic_fault(topic) is not None or not 0 <= queue_id <= MAX_QUEUE_ID
            for topic, queue_id in zip(request.run_topics, request.run_queue_ids.tolist(), strict=True)
        ]
        bad[queued] = np.repeat(bad_runs, request.run_counts)
        if self.own:
            _, where = record_scan.parts(run.data, run.starts, run.heads)
            sizes = where.ends - where.property_starts
            bad |= (sizes > 0) & (run.data[where.ends - 1] != PROPERTY_SEPARATOR[0])
            for row in np.flatnonzero(sizes > _SECTOR_SIZE).tolist():
                start, end = int(where.property_starts[row]), int(where.ends[row])
                start += -(run.physical_offset + start) % _SECTOR_SIZE
                sectors = run.data[start : start + (end - start) // _SECTOR_SIZE * _SECTOR_SIZE].reshape(
                    -1, _SECTOR_SIZE
                )
                bad[row] |= not sectors.any(axis=1).all()
        return record_scan.leading(~bad)

    def _take_whole(self, run: Scanned, request: DispatchRequest) -> bool:
        count = self._counting(run, request)
        count = self._check_batches(run, request, count)
        walk = self.walk
        if count:
            last = count - 1
            position, size = run.physical_offset + int(run.starts[last]), int(run.heads["total_size"][last])
            walk.end = LogEnd(position + size, position, size, int(run.heads["store_timestamp_ms"][last]))
            walk.record_count += count
        if count < len(run.starts):
            at = run.physical_offset + int(run.starts[count])
            walk.end = LogEnd(at, walk.end.last_position, walk.end.last_size, walk.end.last_store_timestamp_ms)
            return False
        return True

    def _counting(self, run: Scanned, request: DispatchRequest) -> int:
        """How many records of a run follow their predecessors in time and queue."""
        if len(request.sizes) != len(run.starts):
            return len(run.starts)  # half messages of old brokers among them: only their framing is checked
        times = run.heads["store_timestamp_ms"]
        before = np.concatenate([[self.walk.end.last_store_timestamp_ms], times[:-1]])
        earlier = times < before
        offsets = request.queue_offsets
        row = 0
        for topic, queue_id, count in zip(
            request.run_topics, request.run_queue_ids.tolist(), request.run_counts.tolist(), strict=True
        ):
            key = (topic, queue_id)
            expected = self._expected(key, int(offsets[row]))
            good = np.concatenate([[offsets[row] == expected], np.diff(offsets[row : row + count]) == 1])
            good &= ~earlier[row : row + count]
            for bad in np.flatnonzero(~good):
                at = row + int(bad)
                if not self._unit_points_to(key, int(offsets[at]), int(request.physical_offsets[at])):
                    self.walk.next_offsets[key] = int(offsets[at - 1]) + 1 if bad else expected
                    what = (
                        "an earlier store time"
                        if earlier[at]
                        else f"queue offset {int(offsets[at])} of {topic}/{queue_id}"
                    )
                    self.walk.stop = ScanEnd("stale", 0, "the record that follows", what)
                    return at
                if not earlier[at]:
                    self.walk.restarted.append(key)
            row += count
            self.walk.next_offsets[key] = int(offsets[row - 1]) + 1
        return len(run.starts)

    def _expected(self, key: tuple[str, int], offset: int) -> int:
        expected = self.walk.next_offsets.get(key)
        if expected is None:
            expected = offset
            if self.trust_queues:
                queue = self.files.queue(*key)
                if queue.files.offsets:
                    expected = queue.search_physical(self.walk.start)
                    if expected != offset and self.own:
                        expected = self._next_in_log(key, expected)
            self.walk.first_offsets[key] = offset
        return expected

    def _next_in_log(self, key: tuple[str, int], known: int) -> int:
        """A queue's next offset by the log below the start, when its units tell another one: some may be damaged, or
        their file gone. Without this the records that follow would pass for a stale tail.
        """
        units = self.files.queue(*key).read(max(known - 1, 0), 1)
        start = int(units["physical_offset"][0]) if len(units) and known else -1
        if not self.log.min_offset <= start < self.walk.start or self.log.head(start) is None:
            start = self.log.min_offset
        for run in self.log.scan(start, self.walk.start, verify_body_crc=False):
            request, row = request_of(run), 0
            for topic, queue_id, count in zip(
                request.run_topics, request.run_queue_ids.tolist(), request.run_counts.tolist(), strict=True
            ):
                row += count
                if (topic, queue_id) == key:
                    known = int(request.queue_offsets[row - 1]) + 1
        return known

    def _unit_points_to(self, key: tuple[str, int], queue_offset: int, physical_offset: int) -> bool:
        units = self.files.queue(*key).read(queue_offset, 1)
        return bool(len(units)) and int(units["physical_offset"][0]) == physical_offset and int(units["size"][0]) > 0

    def _check_batches(self, run: Scanned, request: DispatchRequest, count: int) -> int:
        """Rows up to the first BATCH whose data do not hold."""
        if BATCH_TOPIC not in request.run_topics or len(request.sizes) != len(run.starts):
            return count
        ends = np.cumsum(request.run_counts)
        for topic, run_count, end in zip(request.run_topics, request.run_counts.tolist(), ends.tolist(), strict=True):
            if topic != BATCH_TOPIC:
                continue
            for row in range(end - run_count, min(end, count)):
                if not self._batch_holds(int(request.physical_offsets[row])):
                    self.walk.in_batch = True
                    self.walk.stop = ScanEnd("batch", 0, "the data of the BATCH record", "other bytes")
                    self.walk.next_offsets = {
                        k: min(v, self._next_below(k, v, request, row)) for k, v in self.walk.next_offsets.items()
                    }
                    return row
        return count

    def _next_below(self, key: tuple[str, int], value: int, request: DispatchRequest, row: int) -> int:
        """A queue's next offset when the log ends before `row`."""
        first = 0
        for topic, queue_id, count in zip(
            request.run_topics, request.run_queue_ids.tolist(), request.run_counts.tolist(), strict=True
        ):
            if (topic, queue_id) == key and first + count > row:
                return int(request.queue_offsets[max(first, row)])
            first += count
        return value

    def _batch_holds(self, physical_offset: int) -> bool:
        """Whether a BATCH record's data are all there.

        Raises
        ------
        CorruptionError
            When they are not although they were synced before the record was sealed, or it is another store's.
        """
        batch = read_batch(self.log, physical_offset)
        path = self.log.files.path(self.log.segment_of(physical_offset))
        if batch is None and self.sync_proof:
            raise CorruptionError(path, physical_offset, "a BATCH record that can be read", "one that cannot")
        if batch is None:
            return self.broker  # torn, and a broker does not look at its `__CRC32#`
        if batch.store_id not in self.files.known_ids:
            raise CorruptionError(
                path,
                physical_offset,
                f"a BATCH record of store {self.files.store_id}",
                f"one of store {batch.store_id} (a copied segment?)",
            )
        bad = bad_chunk(self.files, batch)
        if bad is None:
            self.walk.batches.append(batch)
            return True
        if batch.flush_disk_type == SYNC_FLUSH:
            raise ChecksumError(
                self.log.files.path(self.log.segment_of(bad)),
                bad,
                f"the data of the batch at {physical_offset} (CRC-32)",
                "other bytes",
            )
        return self.broker

    def _check_sealed_batch(self, physical_offset: int) -> None:
        """A BATCH record that is sealed but does not hold, where only SYNC_FLUSH wrote, is damage and not a torn
        tail.
        """
        if not self.sync_proof or self.walk.stop.reason not in _DAMAGED:
            return
        data = self.log.read(physical_offset, self.files.config.max_message_size)
        size = record.total_size(data) if len(data) >= RECORD_HEAD.size else 0
        begins = (
            batch_record.BODY_BEGIN in data[: RECORD_HEAD.size + 2 * IPV6_EXTRA_SIZE + len(batch_record.BODY_BEGIN)]
        )
        if begins or BATCH_TOPIC.encode() in data[max(0, size - _TAIL_SIZE) : max(0, size)]:
            path = self.log.files.path(self.log.segment_of(physical_offset))
            raise ChecksumError(
                path, physical_offset, f"a BATCH record ({self.walk.stop.expected})", self.walk.stop.found
            )


def bad_chunk(files: StoreFiles, batch: BatchRecord) -> int | None:
    """Physical offset of the first piece of a batch whose CRC does not hold, or None."""
    position = batch.data_offset
    for crc in batch.crcs:
        end = min(position + CHUNK_SIZE, batch.end)
        if files.commit_log.crc(position, end) != crc:
            return position
        position = end
    return None


def later_sync_batch(files: StoreFiles, end: LogEnd) -> BatchRecord | None:
    """A valid SYNC_FLUSH batch behind the end, not older than the last record: it proves that bytes at the end were
    lost.
    """
    log = files.commit_log
    needle = batch_record.BODY_BEGIN
    for segment in log.files.offsets:
        if segment + log.segment_size <= end.physical_offset:
            continue
        for begin, stop in log.nonzero_ranges(max(segment, end.physical_offset)):
            position = begin
            while position < stop:
                data = log.read(position, min(_SEARCH_SIZE + len(needle), log.left(position)))
                hit = data.find(needle)
                while hit >= 0:
                    for v6 in range(3):
                        batch = read_batch(log, position + hit - RECORD_HEAD.size - v6 * IPV6_EXTRA_SIZE)
                        if _proves_loss(files, batch, end):
                            return batch
                    hit = data.find(needle, hit + 1)
                position += _SEARCH_SIZE
    return None


def _proves_loss(files: StoreFiles, batch: BatchRecord | None, end: LogEnd) -> bool:
    if batch is None or batch.store_id not in files.known_ids or batch.flush_disk_type != SYNC_FLUSH:
        return False
    head = files.commit_log.head(batch.physical_offset)
    return head is not None and int(head["store_timestamp_ms"]) >= end.last_store_timestamp_ms
