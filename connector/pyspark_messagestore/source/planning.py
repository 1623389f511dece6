"""The partitions of a read: ranges of queues, divided and combined into what one task reads each."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from pyspark.sql.datasource import InputPartition

from messagestore.spi import LastRecord, Location, Proven, Queue, Queues, Range, StoreReader, runs_of
from pyspark_messagestore.options.source_options import SourceOptions
from pyspark_messagestore.options.values import MOST
from pyspark_messagestore.source.limits import Sizes, SizesAhead, fitting
from pyspark_messagestore.source.offsets import StreamOffset

PARTITION_ROWS = 262_144
"""The largest number of messages in a Spark partition."""
PARTITION_SIZE = 128 * 1024 * 1024
"""The largest number of bytes of records in a Spark partition."""
ROW_WEIGHT = 256
"""The cost of one more message for a task, expressed in bytes of records."""
SMALL_WEIGHT = 16 * 1024 * 1024
"""A range with a weight below this is not divided: another task would cost more than it saves."""
_SLACK = 1.05
"""A task may get this many times its share before a queue is divided or another task is begun."""
_SAMPLED_QUEUES = 64
"""The number of queues from which the sizes of some records are read."""


@dataclass
class RangesPartition(InputPartition):
    """What one task reads: plain values only.

    Parameters
    ----------
    store_id : str
        The store in which these ranges were planned.
    ranges : list of (topic, queue id, start, end)
    physical_offset : int
        No record of the ranges ends after this offset. 0: the offset is not known.
    last : LastRecord | None
        The last record that was planned; by it, a task recognises the log.
    proven : Proven | None
        What the driver has proven about a store that no writer has recovered since the machine was started, as far as
        these ranges need it.
    broker_name : str
        The name of the store's broker, if a column needs it.
    location : Location | None
        The store that a task opens, if it is one of several.
    """

    store_id: str
    ranges: list[tuple[str, int, int, int]]
    physical_offset: int = 0
    last: LastRecord | None = None
    proven: Proven | None = None
    broker_name: str = ""
    location: Location | None = None

    def __init__(
        self,
        store_id: str,
        ranges: list[Range],
        finish: StreamOffset | None = None,
        proven: Proven | None = None,
        broker_name: str = "",
    ) -> None:
        super().__init__(None)
        self.store_id = store_id
        self.ranges = [(r.topic, r.queue_id, r.start, r.end) for r in ranges]
        self.proven, self.broker_name = proven, broker_name
        if finish is not None:
            self.physical_offset, self.last = finish.physical_offset, finish.last


def plan(
    store: StoreReader,
    store_id: str,
    options: SourceOptions,
    ranges: list[Range],
    finish: StreamOffset,
    *,
    names_broker: bool = False,
) -> list[InputPartition]:
    """The pieces that tasks read: as many as there are processors, unless these would be too small or too large.

    The processors are this driver's, where `local` tasks run. Those that read a store on another host run elsewhere, so
    for them only sizes and `minPartitions` count.
    """
    if not ranges:
        return []

    weights = _weights(store, ranges)
    total = sum(r.count * weights[r.topic, r.queue_id] for r in ranges)
    rows = sum(r.count for r in ranges)

    heaviest = min(PARTITION_SIZE, PARTITION_ROWS * total / rows)
    processors = len(os.sched_getaffinity(0))
    most = heaviest if options.path.is_remote else min(heaviest, max(SMALL_WEIGHT, _SLACK * total / processors))
    if options.min_partitions is not None:
        most = min(most, total / min(rows, options.min_partitions))

    sizes = SizesAhead(store.sizes, ranges)
    parts = pieces(ranges, most, weights, options.max_records_per_partition, options.max_bytes_per_partition, sizes)
    broker_name = (options.broker_name or store.broker_name()) if names_broker else ""
    return [
        RangesPartition(store_id, part, finish, proven, broker_name)
        for part, proven in zip(parts, store.proven(parts), strict=True)
    ]


def ranges_of(firsts: Queues, ends: Queues) -> list[Range]:
    """What is between the firsts and the ends of some queues."""
    return [Range(*queue, firsts[queue], end) for queue, end in sorted(ends.items()) if end > firsts[queue]]


def only(ranges: list[Range], numbers: Mapping[Queue, list[int]]) -> list[Range]:
    """What ranges have of some messages, in runs of consecutive ones."""
    runs: list[Range] = []
    for span in ranges:
        wanted = np.array(numbers.get((span.topic, span.queue_id), []), np.int64)
        wanted = wanted[(wanted >= span.start) & (wanted < span.end)]
        runs += [replace(span, start=start, end=end) for start, end in runs_of(wanted)]
    return runs


def _weights(store: StoreReader, ranges: list[Range]) -> dict[Queue, float]:
    """The cost of one message of each range, estimated from the sizes in some units; no record is read."""
    longest = sorted(ranges, key=lambda r: -r.count)[:_SAMPLED_QUEUES]
    sizes = zip(longest, store.mean_sizes(longest), strict=True)
    weights = {(span.topic, span.queue_id): ROW_WEIGHT + max(0.0, size) for span, size in sizes}
    mean = sum(weights.values()) / len(weights)
    return {(r.topic, r.queue_id): weights.get((r.topic, r.queue_id), mean) for r in ranges}


def pieces(
    ranges: list[Range],
    most: float,
    weights: Mapping[Queue, float] | None = None,
    most_rows: int | None = None,
    most_size: int | None = None,
    sizes: Sizes | None = None,
) -> list[list[Range]]:
    """Divide and combine ranges into pieces of about the weight `most`, in order; no piece is much heavier.

    A queue that is heavier than `most` is divided into equal parts; light queues are combined.

    Parameters
    ----------
    most : float
    weights : mapping of (topic, queue id) to float, optional
        The weight of one message of a queue; 1 for queues without an entry.
    most_rows : int, optional
        The largest number of messages in a piece.
    most_size : int, optional
        The largest number of bytes of records in a piece, unless it has one message only; `sizes` says how many there
        are.
    """
    result: list[list[Range]] = []
    # As if a piece were full, so that the first part begins one.
    filled, rows, size = most, 0, 0
    for part, part_size in _parts(ranges, most, weights or {}, most_rows or MOST, most_size, sizes):
        heavy = part.count * (1.0 if weights is None else weights.get((part.topic, part.queue_id), 1.0))
        full = most_size is not None and size + part_size > most_size
        if filled + heavy > most or rows + part.count > (most_rows or MOST) or full:
            result.append([])
            filled, rows, size = 0, 0, 0

        result[-1].append(part)
        filled, rows, size = filled + heavy, rows + part.count, size + part_size
    return result


def _parts(
    ranges: list[Range],
    most: float,
    weights: Mapping[Queue, float],
    most_rows: int,
    most_size: int | None,
    sizes: Sizes | None,
) -> Iterator[tuple[Range, int]]:
    """The ranges, divided where they are too large for one piece, and their bytes where these are limited."""
    for span in ranges:
        weight = weights.get((span.topic, span.queue_id), 1.0)
        count = max(min(span.count, math.ceil(span.count * weight / most)), math.ceil(span.count / most_rows))
        bounds = [span.start + span.count * i // count for i in range(count + 1)] if count else []
        for start, end in itertools.pairwise(bounds):
            left = replace(span, start=start, end=end)
            if most_size is None or sizes is None:
                yield left, 0
                continue
            while left.count:
                stop, size = fitting(left, most_size, sizes)
                stop = max(stop, left.start + 1)  # a large message, or one whose unit is missing
                yield replace(left, end=stop), size or most_size
                left = replace(left, start=stop)
