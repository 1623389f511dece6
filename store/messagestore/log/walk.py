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
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import CorruptionError
from messagestore.files.commit_log import READ_SIZE, CommitLog
from messagestore.format import javahash, record, record_decode, record_scan
from messagestore.format.arrow_bytes import array_of, lengths_of, list_array, numpy_of, valid_of
from messagestore.format.batch_record import BatchRecord, parse
from messagestore.format.layout import (
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from messagestore.format.message import BATCH_TOPIC, SCHEDULE_TOPIC, MessageExt
from messagestore.format.record_scan import ScanEnd
from messagestore.format.rows import Row, Rows

_FEW = 32  # below 45, where both ways take equally long
_DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's messageDelayLevel, levels 1 to 18."""

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
    batch : BatchRecord | None
        In a walk that looks for batches: the contents of the one BATCH record that this run consists of.
    """

    physical_offset: int
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    heads: NDArray[np.void]
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
        Yield each readable BATCH record as a run of its own, and read little at a time; the caller calls `jump` to
        continue after the batch's data.

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
    ) -> None:
        self.log = log
        self.end = end
        self.depth = depth
        self.batches = batches
        self.position = start
        self.stop = ScanEnd("end", 0, "", "")
        self._jump: int | None = None

    def jump(self, physical_offset: int) -> None:
        """Continue at a place after the run that was yielded last."""
        self._jump = physical_offset

    def __iter__(self) -> Iterator[Run]:
        log, end = self.log, self.end
        least = _FIRST_READ_SIZE if self.batches else READ_SIZE
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
                yield from self._given(Run(start, data, starts, heads))
                if self._jump is not None:
                    self.position, self._jump, size = self._jump, None, least
                    continue
            self.position = start + stop.position
            size = least if not self.batches else min(2 * size, READ_SIZE)
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
        given = 0
        for row in rows_of_batch_topic(run) if self.batches else ():
            at = run.physical_offset + int(run.starts[row])
            batch = parse(self.log.record_bytes(at) or b"", at)
            if batch is None:
                continue
            if row > given:
                yield self._passed(run.slice(given, row))
            yield self._passed(replace(run.slice(row, row + 1), batch=batch))
            if self._jump is not None:
                return
            given = row + 1
        if given < len(run.starts):
            yield self._passed(run.slice(given, len(run.starts)) if given else run)

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


def rows_of_batch_topic(run: Run) -> list[int]:
    """Return which records of a run have the topic of BATCH records."""
    _, where = record_scan.parts(run.data, run.starts, run.heads)
    rows = np.flatnonzero(where.topic_ends - where.topic_starts == len(_BATCH_TOPIC))
    topics = run.data[where.topic_starts[rows, None] + np.arange(len(_BATCH_TOPIC))]
    found: list[int] = rows[(topics == _BATCH_TOPIC).all(axis=1)].tolist()
    return found


def _without_unit(run: Run) -> NDArray[np.bool_]:
    """Return which records of a run get no unit: PREPARED and ROLLBACK, whose QUEUEOFFSET is 0.

    Earlier revisions of this project gave their own records of these kinds a number and a unit like all others. A
    number that is not 0 therefore counts.
    """
    transaction = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK
    half: NDArray[np.bool_] = transaction == SYS_FLAG_TRANSACTION_ROLLBACK
    half |= transaction == SYS_FLAG_TRANSACTION_PREPARED
    half &= run.heads["queue_offset"] == 0
    return half


def rows_of(run: Run) -> Rows:
    """Return the rows of a run of records."""
    rows = _few(run) if len(run.starts) <= _FEW else _many(run)
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


def _few(run: Run) -> Rows:
    """Read records one by one, which for a few dozen takes a fraction of what the many steps of `_many` cost."""
    found = []
    for start in run.starts.tolist():
        m = record.decode_message(run.data.data, start, verify=False)
        keys = m.keys if m.unique_key is None else (m.unique_key, *m.keys)
        hashes = [javahash.index_hash(m.topic, key) for key in keys]
        place = (m.queue_offset, run.physical_offset + start, m.size)
        found.append(Row(m.topic, m.queue_id, *place, _tags_code(m), m.store_timestamp_ms, hashes))
    return Rows.of(found)


def _many(run: Run) -> Rows:
    starts, heads = run.starts, run.heads
    columns = record_decode.decode(
        run.data,
        starts,
        heads["total_size"].astype(np.int32),
        ("topic", "tags", "keys", "unique_key"),
        verify_body_crc=False,
    )
    topics = columns.column("topic").dictionary_encode()
    codes = numpy_of(topics.indices).astype(np.int64)
    queue_ids = heads["queue_id"].astype(np.int64)
    changes = np.flatnonzero((np.diff(codes) != 0) | (np.diff(queue_ids) != 0)) + 1
    run_starts = np.concatenate([[0], changes]) if len(starts) else np.empty(0, np.int64)
    names = topics.dictionary.to_pylist()
    key_hashes, key_counts = _key_hashes(topics, columns.column("keys"), columns.column("unique_key"))
    tags_codes = javahash.java_hashes(columns.column("tags")).astype(np.int64)
    if SCHEDULE_TOPIC in names:
        for row in np.flatnonzero(codes == names.index(SCHEDULE_TOPIC)).tolist():  # only a broker's own topic
            tags_codes[row] = _tags_code(record.decode_message(run.data.data, int(starts[row]), verify=False))
    return Rows(
        run_topics=[names[codes[i]] for i in run_starts],
        run_queue_ids=queue_ids[run_starts].astype(np.int32),
        run_counts=np.diff(np.append(run_starts, len(starts))).astype(np.int32),
        queue_offsets=heads["queue_offset"].astype(np.int64),
        physical_offsets=run.physical_offset + starts,
        sizes=heads["total_size"].astype(np.int32),
        tags_codes=tags_codes,
        store_timestamps_ms=heads["store_timestamp_ms"].astype(np.int64),
        key_hashes=key_hashes,
        key_counts=key_counts,
    )


def _tags_code(message: MessageExt) -> int:
    """Return the tags code of a message's unit: the hash of its tags, or the due time of a delayed message."""
    if message.topic == SCHEDULE_TOPIC:
        level = message.system_properties.get("DELAY", "0")
        number = int(level) if level.isascii() and level.isdigit() else 0
        if number > 0:
            highest = len(_DELAY_LEVELS_S)  # RocketMQ treats a level above the highest as the highest
            return message.store_timestamp_ms + 1000 * _DELAY_LEVELS_S[min(number, highest) - 1]
    return javahash.tags_code(message.tags or "")


def _key_hashes(
    topics: pa.DictionaryArray, keys: pa.ListArray, unique_keys: pa.StringArray
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the index hashes of each record: UNIQ_KEY first, then the parts of KEYS."""
    n = len(topics)
    unique = valid_of(unique_keys)
    counts = lengths_of(keys).astype(np.int32)
    rows = np.concatenate([np.flatnonzero(unique), np.repeat(np.arange(n), counts)])
    order = np.argsort(rows, kind="stable")  # unique keys were put first, so they stay first within their row
    texts = pa.concat_arrays([unique_keys.filter(array_of(unique)), keys.flatten().cast(pa.string())])
    prefixes = javahash.java_hashes(list_array([t + "#" for t in topics.dictionary.to_pylist()], pa.string()))
    codes = numpy_of(topics.indices)
    before = prefixes[codes[rows]] if n else np.empty(0, np.int32)
    return javahash.index_hashes_behind(before, texts)[order], (counts + unique).astype(np.int32)
