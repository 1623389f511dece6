"""Reads the ranges of a partition as record batches for Spark. It runs in tasks.

A task asks the store for one thing only, the bytes of its ranges. With these, the store checks that it is the one in
which they were planned, and that log and queues still are what the driver saw, before and after the read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from messagestore import NotAStoreError, OffsetOutOfRangeError
from messagestore.spi import Decoder, PlannedRead, Queue, Range, StoreReader, Stores, planned_elsewhere
from pyspark_messagestore.options.source_options import SourceOptions
from pyspark_messagestore.source.planning import RangesPartition
from pyspark_messagestore.source.same_log import GO_ON, warn_of_gap
from pyspark_messagestore.source.schema import Projection

BATCH_ROWS = 65_536


def read_ranges(
    options: SourceOptions, partition: InputPartition, projection: Projection, stores: Stores
) -> Iterator[pa.RecordBatch]:
    """Read the messages of a partition as record batches for Spark. It runs in a task.

    Raises
    ------
    NotAStoreError
        The store at the path is not the one in which the ranges were planned: this host sees another disk.
    OffsetOutOfRangeError
        Retention has deleted messages since the ranges were planned. With failOnDataLoss=false, a warning counts them.
    StoreWentBackwardsError
        The log was restored or created again since the ranges were planned.
    """
    if not isinstance(partition, RangesPartition) or not partition.ranges:
        return

    path = partition.location or options.location
    try:
        store = stores.reader(path, proven=partition.proven, to_gather=True)
    except NotAStoreError:  # Spark runs a task on any host, also on one where this path is another disk
        raise planned_elsewhere(path, partition.store_id, "no store") from None

    try:
        if projection.names_broker:
            projection = projection.of_broker(partition.broker_name)
        ranges = [Range(*values) for values in partition.ranges]
        decoder = decoder_of(options, projection)
        planned = PlannedRead(partition.store_id, partition.physical_offset, partition.last)
        yield from _read_ranges(store, ranges, planned, decoder, fail_on_data_loss=options.fail_on_data_loss)
        decoder.close()
    finally:
        store.close()


def decoder_of(options: SourceOptions, projection: Projection) -> Decoder:
    """What makes the rows that a query asks for."""
    return Decoder(
        projection,
        tags=options.tags,
        keys=options.keys,
        bad_records=options.bad_records,
        verify_body_crc=options.verify_body_crc,
        decompress=options.decompress,
    )


def _read_ranges(
    store: StoreReader, ranges: Sequence[Range], planned: PlannedRead, decoder: Decoder, *, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    left = list(reversed(ranges))  # the next one is last
    while left:
        try:
            parts = store.gather(left[::-1], planned=planned, max_rows=BATCH_ROWS, tags_codes=decoder.tags_codes)
            for part in parts:  # `gather` is called again after each gap
                _drop_before(left, (part.topic, part.queue_id), part.start)
                decoded = decoder.decoded(part)
                left[-1] = replace(left[-1], start=part.end)
                del part  # so that the next part can use its memory
                for messages in decoded:
                    yield from decoder.rows(messages)
            return
        except OffsetOutOfRangeError as error:
            _drop_before(left, (error.topic, error.queue_id), error.queue_offset)
            first = min(error.min, left[-1].end)
            if fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    f"{error}. This happened after the read was planned. {GO_ON}",
                    topic=error.topic,
                    queue_id=error.queue_id,
                    queue_offset=error.queue_offset,
                    min=error.min,
                    max=error.max,
                ) from None
            warn_of_gap((error.topic, error.queue_id), error.queue_offset, first)
            left[-1] = replace(left[-1], start=first)


def _drop_before(left: list[Range], queue: Queue, offset: int) -> None:
    """Drop the ranges before the one that holds a message; the next one is the last of the list."""
    while (left[-1].topic, left[-1].queue_id) != queue or left[-1].end <= offset:
        left.pop()
