"""The only walk over the records of the log.

Recovery walks from the clean end, a writer that catches up walks from its cached end, and `verify` and a rebuild walk
from the log's first record. They all use `Walk`, which yields runs of records and says where and why it stopped. It
stores nothing in the log object and knows nothing about queues, torn records or proofs, which belong to its callers.

    walk = Walk(log, start)
    for run in walk:
        ...
    walk.position, walk.stop.reason      # the first place where no record begins, and why

`rows_of` reads back the records of a run as rows: what the ConsumeQueues and the index need of each record. Appends get
their rows from the encoder (RocketMQ: CommitLog.checkMessageAndReturnSize, which makes a DispatchRequest).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError
from messagestore.files.commit_log import READ_SIZE, CommitLog
from messagestore.format import record_rows, record_scan
from messagestore.format.batch_record import BatchRecord, parse
from messagestore.format.delay_levels import ROCKETMQS, DelayLevels
from messagestore.format.layout import (
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from messagestore.format.message import BATCH_TOPIC, MAX_QUEUE_ID, topic_fault
from messagestore.format.properties import PROPERTY_SEPARATOR
from messagestore.format.record_scan import ScanEnd
from messagestore.format.rows import Rows

_FIRST_READ_SIZE = 8 * 1024
_BATCH_TOPIC = np.frombuffer(BATCH_TOPIC.encode(), np.uint8)


class Depth(enum.Enum):
    """Says how much of each record a walk checks."""

    FRAMING = "magic, size, lengths and place"
    CHECKSUMS = "the CRCs of body and properties, too"


@dataclass
class Run:
    """Consecutive valid records in one segment.

    Parameters
    ----------
    physical_offset : int
        Physical offset of `data[0]`.
    data : uint8[m]
        Bytes of the log; owned by this object.
    starts : int64[n]
        Where each record begins in `data`; at least one.
    heads : structured[n]
        The heads of the records, in native byte order.
    delay_levels : DelayLevels
        Which delay levels count for each record.
    batch : BatchRecord | None
        In a walk that looks for batches: the contents of the one BATCH record that this run consists of.
    """

    physical_offset: int
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    heads: NDArray[np.void]
    delay_levels: DelayLevels = ROCKETMQS
    batch: BatchRecord | None = None

    @property
    def end(self) -> int:
        """Physical offset just after the last record."""
        return self.last_offset + self.last_size

    @property
    def last_offset(self) -> int:
        """Physical offset of the last record."""
        return self.physical_offset + int(self.starts[-1])

    @property
    def last_size(self) -> int:
        """Bytes of the last record."""
        return int(self.heads["total_size"][-1])

    @property
    def last_timestamp_ms(self) -> int:
        """Store time of the last record."""
        return int(self.heads["store_timestamp_ms"][-1])

    def slice(self, begin: int, end: int) -> Run:
        """Return some of the records, with the same bytes."""
        return replace(self, starts=self.starts[begin:end], heads=self.heads[begin:end])


class Walk:
    """Yields runs of valid records from a place in the log on, across segments, up to the first invalid place.

    Parameters
    ----------
    log : CommitLog
    start : int
        Physical offset at which a record begins.
    end : int | None
        No record that begins at or above it is yielded.
    depth : Depth
    batches : bool
        Yield each readable BATCH record as a run of its own, and read little at first; the caller calls `jump` to
        continue after the batch's data.
    few : bool
        Few records are expected, so read little at first. What lies behind a log's end is zeros, up to the end of the
        segment.

    Attributes
    ----------
    position : int
        The place after the run that was yielded last; after the walk, where it stopped.
    stop : ScanEnd
        After the walk, why it stopped there; the reason is "end" if `end` was reached.
    """

    def __init__(
        self,
        log: CommitLog,
        start: int,
        end: int | None = None,
        depth: Depth = Depth.CHECKSUMS,
        *,
        batches: bool = False,
        few: bool = False,
    ) -> None:
        self.log = log
        self.end = end
        self.depth = depth
        self.batches = batches
        self.few = few or batches
        self.position = start
        self.stop = ScanEnd("end", 0, "", "")
        self._jump: int | None = None

    def jump(self, physical_offset: int) -> None:
        """Continue at a place after the run that was yielded last."""
        self._jump = physical_offset

    def __iter__(self) -> Iterator[Run]:
        log, end = self.log, self.end
        least = _FIRST_READ_SIZE if self.few else READ_SIZE
        size = least

        while end is None or self.position < end:
            start = self.position
            wanted = size if end is None else min(size, end - start)
            data = log.read_array(start, wanted)
            if not len(data):
                self.stop = ScanEnd("zero", 0, "a record", "the end of the last segment")
                return

            left = log.left(start)
            starts, heads, stop = record_scan.scan(
                data, start, file_bytes_left=left, verify_body_crc=self.depth is Depth.CHECKSUMS
            )

            if len(starts):
                yield from self._given(Run(start, data, starts, heads, log.delay_levels))
                if self._jump is not None:
                    self.position, self._jump, size = self._jump, None, least
                    continue

            self.position = start + stop.position
            size = least if not self.few else min(2 * size, READ_SIZE)

            if stop.reason == "blank":
                following = log.segment_of(start) + log.segment_size
                if log.holding(following) is None:
                    self.stop = stop  # as in Java: a BLANK without a next segment is the log's end
                    return
                self.position = following
            elif stop.reason != "end":
                self.stop = stop
                return
            elif not stop.position:
                if len(data) < wanted or len(data) == left or (end is not None and start + wanted >= end):
                    self.stop = ScanEnd("size", 0, "a record within the segment", "one that passes its end")
                    return
                size = max(size, 2 * len(data))  # a record is larger than what was read

    def _given(self, run: Run) -> Iterator[Run]:
        """Yield a run, or its parts up to a BATCH record after which the walk jumps."""
        yielded = 0
        for row in rows_of_batch_topic(run) if self.batches else ():
            at = run.physical_offset + int(run.starts[row])
            batch = parse(self.log.record_bytes(at) or b"", at)
            if batch is None:
                continue

            if row > yielded:
                yield self._passed(run.slice(yielded, row))
            yield self._passed(replace(run.slice(row, row + 1), batch=batch))
            if self._jump is not None:
                return
            yielded = row + 1

        if yielded < len(run.starts):
            yield self._passed(run.slice(yielded, len(run.starts)) if yielded else run)

    def _passed(self, run: Run) -> Run:
        self.position = run.end
        return run

    def whole(self) -> Iterator[Run]:
        """Yield the runs of a part of the log that is known to be whole.

        Raises
        ------
        CorruptionError
            The chain of records breaks before the end.
        """
        yield from self
        if self.end is not None and self.position < self.end:
            raise self.broken(f" (the log goes on to {self.end})")

    def broken(self, more: str = "") -> CorruptionError:
        """Return the error that contains the place where the walk stopped."""
        path = self.log.path_of(self.position)
        expected = f"{self.stop.expected or 'a record'}{more}"
        return CorruptionError(path, self.position, expected, self.stop.found or self.stop.reason)


def leads_to(log: CommitLog, start: int, end: int) -> bool:
    """Whether records follow one another without a gap from `start` to `end`, which is higher."""
    if end <= start:
        return False
    walk = Walk(log, start, end, Depth.FRAMING)
    for _ in walk:
        pass
    return walk.position == end


def whole_rows(run: Run, rows: Rows) -> NDArray[np.bool_]:
    """Return which records of this project are not torn in the part after the body, which no CRC covers.

    A record that this project writes has a legal topic, and properties that end with a separator. A record that was not
    written to its end has another last byte, whatever its content is. If a power cut lost a sector in the middle of
    long properties, this check does not find it: nothing proves that the sector ever held other bytes.
    """
    legal = [topic_fault(topic) is None and 0 <= queue_id <= MAX_QUEUE_ID for topic, queue_id, _, _ in rows.runs()]
    whole = np.repeat(np.array(legal, np.bool_), rows.run_counts)
    ends = run.starts + run.heads["total_size"]
    without = np.flatnonzero(run.data[ends - 1] != PROPERTY_SEPARATOR[0])
    _, where = record_scan.parts(run.data, run.starts[without], run.heads[without])
    whole[without[where.ends > where.property_starts]] = False
    return whole


def rows_of_batch_topic(run: Run) -> list[int]:
    """Return which records of a run have the topic of BATCH records."""
    _, where = record_scan.parts(run.data, run.starts, run.heads)
    rows = np.flatnonzero(where.topic_ends - where.topic_starts == len(_BATCH_TOPIC))
    topics = run.data[where.topic_starts[rows, None] + np.arange(len(_BATCH_TOPIC))]
    of_topic: list[int] = rows[(topics == _BATCH_TOPIC).all(axis=1)].tolist()
    return of_topic


def _without_unit(run: Run) -> NDArray[np.bool_]:
    """Return which records of a run get no unit: PREPARED and ROLLBACK."""
    transaction = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK
    half: NDArray[np.bool_] = transaction == SYS_FLAG_TRANSACTION_ROLLBACK
    half |= transaction == SYS_FLAG_TRANSACTION_PREPARED
    return half


def rows_of(run: Run) -> Rows:
    """Return the rows of a run of records."""
    rows = record_rows.rows_of(run.data, run.starts, run.heads, run.physical_offset, run.delay_levels)
    without = _without_unit(run)
    if not without.any():  # only logs with half messages pay for what follows
        return rows
    rolled_back = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_ROLLBACK
    indexed = ~(without & rolled_back)  # as RocketMQ: PREPARED is indexed, ROLLBACK is not
    return replace(
        rows,
        key_hashes=rows.key_hashes[np.repeat(indexed, rows.key_counts)],
        key_counts=np.where(indexed, rows.key_counts, 0).astype(np.int32),
        has_unit=~without,
    )
