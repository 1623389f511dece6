"""Records as columns: one value for rows that are encoded, appended, dispatched or read back.

    run_topics      | orders                  | audit   |     r runs, each of one (topic, queue id)
    run_counts      | 3                       | 1       |
                    +-------+--------+--------+---------+
    queue_offsets   | 7     | 8      | 9      | 40      |     n rows, in the order of the log
    sizes, ...      | 220   | 201    | 240    | 180     |
                    +-------+--------+--------+---------+
    key_counts      | 1     | 0      | 2      | 1       |
    key_hashes      | 1cf3  | 77a0 02be  | 5121         |     k keys, each row's behind those of the row before

The encoder makes rows that have no place yet (`Rows.unplaced`). The writer numbers them (`numbered`), takes what fits
into a segment (`slice`), and gives it a place and a store time (`at`). Rows that are read back from the log have all of
these. The arrays of rows never change once they are made, except that stamping writes to `data`; slices and placed rows
share the arrays they were made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_DATA: NDArray[np.uint8] = np.empty(0, np.uint8)
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""The topic in which delayed messages wait. The tags code of its units is the time at which a message is due."""


class Stored(Protocol):
    """Bytes of records that are still in a file."""

    def part(self, begin: int, end: int) -> Stored:
        """A part of them; nothing is read."""

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """A part of them, in memory that may be changed and that the next read uses again."""


class Run(NamedTuple):
    """Rows `start` to `stop - 1`, which follow one another and are all of one queue."""

    topic: str
    queue_id: int
    start: int
    stop: int


@dataclass(slots=True)
class Row:
    """One record by itself; `Rows.of` makes columns of several. The fields are those of `Rows`."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    store_timestamp_ms: int
    key_hashes: Sequence[int]
    has_unit: bool = True

    @property
    def end(self) -> int:
        """Physical offset behind the record."""
        return self.physical_offset + self.size


_columns_of_row = attrgetter(*(one.name for one in fields(Row)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Records in the order of the log; n rows in r runs of one (topic, queue id) each.

    Parameters
    ----------
    run_topics, run_queue_ids, run_counts : list of str, int32[r], int32[r]
        Topic, queue and number of rows of each run.
    queue_offsets : int64[n]
        0 until `numbered`.
    physical_offsets : int64[n]
        Counted from 0 until `at`.
    sizes : int32[n]
        Bytes of each record.
    tags_codes : int64[n]
        In `SCHEDULE_TOPIC`, the time at which a message is due; until `at`, how long it waits.
    store_timestamps_ms : int64[n]
        0 until `at`.
    key_hashes, key_counts : int32[k], int32[n]
        Index hashes; row i has the next `key_counts[i]` of them.
    has_unit : bool[n] or None
        Which rows get a ConsumeQueue unit; None: all. PREPARED and ROLLBACK have none; a PREPARED one is indexed all
        the same.
    data : uint8[m]
        The records, back to back; writable, owned by whoever encoded or read them. Empty where nobody needs the bytes.
    stored : Stored or None
        The records where they are, if they are not in `data`.
    store_timestamp_position : int
        Of STORETIMESTAMP in each record of `data`.
    property_crc : bool
        Whether each record of `data` ends in `__CRC32#`.
    digest : int
        The sum of the hashes of all rows that were encoded together, mod 2**64 (row_digest.py); 0 if it was not
        computed. Slices have the digest of the whole.
    real_queues : tuple of (str, int)
        Where the delayed rows go when they are due: each topic, with its highest queue id.
    """

    run_topics: list[str]
    run_queue_ids: NDArray[np.int32]
    run_counts: NDArray[np.int32]
    queue_offsets: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int32]
    tags_codes: NDArray[np.int64]
    store_timestamps_ms: NDArray[np.int64]
    key_hashes: NDArray[np.int32]
    key_counts: NDArray[np.int32]
    has_unit: NDArray[np.bool_] | None = None
    data: NDArray[np.uint8] = field(default_factory=lambda: NO_DATA)
    stored: Stored | None = None
    store_timestamp_position: int = 0
    property_crc: bool = False
    digest: int = 0
    real_queues: tuple[tuple[str, int], ...] = ()

    @classmethod
    def unplaced(cls, starts: NDArray[np.int64], **columns: Any) -> Rows:
        """Encoded records without a place, a store time and numbers; `starts`, int64[n+1], is where each begins in the
        data, and where the last one ends.
        """
        zeros = np.zeros(len(starts) - 1, np.int64)
        sizes = np.diff(starts).astype(np.int32)
        return cls(queue_offsets=zeros, physical_offsets=starts[:-1], sizes=sizes, store_timestamps_ms=zeros, **columns)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """Single records as columns, in the order given."""
        columns: Any = zip(*map(_columns_of_row, rows), strict=True) if rows else ((),) * len(fields(Row))
        topics, queue_ids, queue_offsets, physical_offsets, sizes, tags_codes, times, key_hashes, has_unit = columns
        runs = [(key, len(list(same))) for key, same in itertools.groupby(zip(topics, queue_ids, strict=True))]

        return cls(
            run_topics=[topic for (topic, _), _ in runs],
            run_queue_ids=np.array([queue_id for (_, queue_id), _ in runs], np.int32),
            run_counts=np.array([count for _, count in runs], np.int32),
            queue_offsets=np.array(queue_offsets, np.int64),
            physical_offsets=np.array(physical_offsets, np.int64),
            sizes=np.array(sizes, np.int32),
            tags_codes=np.array(tags_codes, np.int64),
            store_timestamps_ms=np.array(times, np.int64),
            key_hashes=np.array([key_hash for some in key_hashes for key_hash in some], np.int32),
            key_counts=np.array([len(some) for some in key_hashes], np.int32),
            has_unit=None if all(has_unit) else np.array(has_unit, np.bool_),
        )

    def each(self) -> list[Row]:
        """The records one by one, for a few of them."""
        ends = np.cumsum(self.key_counts).tolist()
        hashes = self.key_hashes.tolist()
        topics = [(topic, queue_id) for topic, queue_id, start, stop in self.runs() for _ in range(start, stop)]
        numbers = (self.queue_offsets, self.physical_offsets, self.sizes, self.tags_codes, self.store_timestamps_ms)

        columns = zip(
            topics,
            zip(*(column.tolist() for column in numbers), strict=True),
            [hashes[start:end] for start, end in zip([0, *ends], ends, strict=False)],
            [True] * len(topics) if self.has_unit is None else self.has_unit.tolist(),
            strict=True,
        )

        return [
            Row(topic, queue_id, queue_offset, physical_offset, size, tags_code, timestamp_ms, keys, has_unit)
            for (topic, queue_id), (
                queue_offset,
                physical_offset,
                size,
                tags_code,
                timestamp_ms,
            ), keys, has_unit in columns
        ]

    @property
    def row_count(self) -> int:
        """How many records."""
        return len(self.sizes)

    @property
    def physical_offset(self) -> int:
        """Where the first record begins; 0 without rows."""
        return int(self.physical_offsets[0]) if len(self.physical_offsets) else 0

    @property
    def end(self) -> int:
        """Physical offset behind the last record; 0 without rows."""
        return int(self.physical_offsets[-1]) + int(self.sizes[-1]) if len(self.sizes) else 0

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each record begins in `data`, and where the last one ends: int64[n+1]."""
        return np.append(self.physical_offsets, self.end) - self.physical_offset

    @property
    def one_time_ms(self) -> int | None:
        """The store time that `at` gave all rows, or that of a single one; None if each may have its own."""
        times = self.store_timestamps_ms
        return int(times[0]) if len(times) == 1 or (len(times) and not times.strides[0]) else None

    def runs(self) -> Iterator[Run]:
        """The runs, in the order of the log."""
        start = 0
        counts = self.run_counts.tolist()
        for topic, queue_id, count in zip(self.run_topics, self.run_queue_ids.tolist(), counts, strict=True):
            yield Run(topic, queue_id, start, start + count)
            start += count

    def of_topic(self, topic: str) -> Iterator[int]:
        """Numbers of the rows of a topic."""
        if topic in self.run_topics:
            for run in self.runs():
                if run.topic == topic:
                    yield from range(run.start, run.stop)

    def by_queue(self) -> dict[tuple[str, int], NDArray[np.int64]]:
        """Numbers of the rows that get a unit, of each queue that has some, in the order of the log."""
        queues: dict[tuple[str, int], int] = {}
        keys = zip(self.run_topics, self.run_queue_ids.tolist(), strict=True)
        of_runs = [queues.setdefault(key, len(queues)) for key in keys]
        if len(queues) == len(of_runs):
            rows_by_queue = {(topic, queue_id): np.arange(start, stop) for topic, queue_id, start, stop in self.runs()}
        else:
            of_rows = np.repeat(np.array(of_runs, np.uint16 if len(queues) <= 1 << 16 else np.int64), self.run_counts)
            order = np.argsort(of_rows, kind="stable")  # 16 bits are sorted by radix
            ends = np.cumsum(np.bincount(of_rows)).tolist()
            rows_by_queue = {key: order[start:end] for key, start, end in zip(queues, [0, *ends], ends, strict=False)}
        if self.has_unit is None:
            return rows_by_queue
        with_unit = {key: rows[self.has_unit[rows]] for key, rows in rows_by_queue.items()}
        return {key: rows for key, rows in with_unit.items() if len(rows)}

    def numbered(self, next_offsets: dict[tuple[str, int], int]) -> Rows:
        """The rows with the next queue offsets of their queues, which are counted up in `next_offsets`."""
        firsts = []
        keys = zip(self.run_topics, self.run_queue_ids.tolist(), strict=True)
        for key, count in zip(keys, self.run_counts.tolist(), strict=True):
            first = next_offsets[key]
            firsts.append(first)
            next_offsets[key] = first + count
        starts = np.cumsum(self.run_counts) - self.run_counts
        steps = np.repeat(np.array(firsts, np.int64) - starts, self.run_counts)
        return replace(self, queue_offsets=np.arange(self.row_count) + steps)

    def at(self, physical_offset: int, store_timestamp_ms: int) -> Rows:
        """The rows with their place in the log, where the first one begins at `physical_offset`, and one store time.

        The bytes in `data` say so only when they are stamped.
        """
        times = np.ndarray(self.row_count, np.int64, np.array([store_timestamp_ms], np.int64), strides=(0,))
        return replace(
            self,
            physical_offsets=self.physical_offsets + (physical_offset - self.physical_offset),
            store_timestamps_ms=times,
            tags_codes=self._due(times),
        )

    def waiting(self, delays_ms: tuple[int, ...]) -> Rows:
        """The rows, which have no place yet, with the delays that the levels of the store have now."""
        if SCHEDULE_TOPIC not in self.run_topics:
            return self
        codes = self.tags_codes.copy()
        for topic, queue_id, start, stop in self.runs():
            if topic == SCHEDULE_TOPIC:
                codes[start:stop] = delays_ms[min(queue_id, len(delays_ms) - 1)]
        return replace(self, tags_codes=codes)

    def _due(self, store_timestamps_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tags codes with other store times: delayed messages are due so much earlier or later."""
        if SCHEDULE_TOPIC not in self.run_topics:
            return self.tags_codes
        codes = self.tags_codes.copy()
        for topic, _, start, stop in self.runs():
            if topic == SCHEDULE_TOPIC:
                codes[start:stop] += store_timestamps_ms[start:stop] - self.store_timestamps_ms[start:stop]
        return codes

    def joined(self, other: Rows) -> Rows:
        """These rows and other rows that were encoded with them, back to back, none of which has a place yet."""
        both = np.concatenate
        return replace(
            self,
            run_topics=self.run_topics + other.run_topics,
            run_queue_ids=both([self.run_queue_ids, other.run_queue_ids]),
            run_counts=both([self.run_counts, other.run_counts]),
            queue_offsets=both([self.queue_offsets, other.queue_offsets]),
            physical_offsets=both([self.physical_offsets, other.physical_offsets + self.end]),
            sizes=both([self.sizes, other.sizes]),
            tags_codes=both([self.tags_codes, other.tags_codes]),
            store_timestamps_ms=both([self.store_timestamps_ms, other.store_timestamps_ms]),
            key_hashes=both([self.key_hashes, other.key_hashes]),
            key_counts=both([self.key_counts, other.key_counts]),
            data=both([self.data, other.data]),
            digest=(self.digest + other.digest) % (1 << 64),
            real_queues=self.real_queues + other.real_queues,
        )

    def slice(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop - 1`, with their runs, keys and bytes; nothing is copied but the runs."""
        if start <= 0 and stop >= self.row_count:
            return self

        run_ends = np.cumsum(self.run_counts)
        counts = np.clip(np.minimum(run_ends, stop) - np.maximum(run_ends - self.run_counts, start), 0, None)
        some = np.flatnonzero(counts)

        first_key = int(self.key_counts[:start].sum())
        last_key = first_key + int(self.key_counts[start:stop].sum())
        starts, rows = self.starts, slice(start, stop)

        return replace(
            self,
            run_topics=[self.run_topics[i] for i in some],
            run_queue_ids=self.run_queue_ids[some],
            run_counts=counts[some].astype(np.int32),
            queue_offsets=self.queue_offsets[rows],
            physical_offsets=self.physical_offsets[rows],
            sizes=self.sizes[rows],
            tags_codes=self.tags_codes[rows],
            store_timestamps_ms=self.store_timestamps_ms[rows],
            key_hashes=self.key_hashes[first_key:last_key],
            key_counts=self.key_counts[rows],
            has_unit=None if self.has_unit is None else self.has_unit[rows],
            data=self.data[starts[start] : starts[stop]],
            stored=None if self.stored is None else self.stored.part(int(starts[start]), int(starts[stop])),
        )


def divided(rows: Rows, most_size: int) -> Iterator[Rows]:
    """Rows in pieces of at most `most_size` bytes of records, or of one row; the first has the digest of all.

    Parameters
    ----------
    rows : Rows
        Without a place.
    most_size : int
    """
    starts, first = rows.starts, 0
    while rows.row_count and int(starts[-1] - starts[first]) > most_size and first + 1 < rows.row_count:
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + most_size, "right")) - 1)
        yield replace(rows.slice(first, stop), digest=0 if first else rows.digest)
        first = stop
    if first < rows.row_count or not rows.row_count:
        yield replace(rows.slice(first, rows.row_count), digest=0 if first else rows.digest)


def together(pieces: Sequence[Rows]) -> Rows:
    """The rows of several pieces, which have their places in the log, with what their units need; no keys, no bytes."""
    if len(pieces) == 1:
        return pieces[0]

    joined: dict[str, Any] = {
        name: np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("run_queue_ids", "run_counts", "queue_offsets", "physical_offsets", "sizes", "tags_codes")
    }

    has_unit = None
    if any(piece.has_unit is not None for piece in pieces):
        has_unit = np.concatenate(
            [np.ones(piece.row_count, np.bool_) if piece.has_unit is None else piece.has_unit for piece in pieces]
        )

    count = sum(piece.row_count for piece in pieces)
    return Rows(
        run_topics=[topic for piece in pieces for topic in piece.run_topics],
        store_timestamps_ms=np.zeros(count, np.int64),
        key_hashes=np.empty(0, np.int32),
        key_counts=np.zeros(count, np.int32),
        has_unit=has_unit,
        **joined,
    )
