"""Reads the ranges of a partition as record batches for Spark. It runs in tasks.

A task checks that the store is the one in which its ranges were planned, and that log and queues still are what the
driver saw, before and after it has read them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from messagestore import NotAStoreError, OffsetOutOfRangeError, StoreWentBackwardsError
from messagestore.spi import LOCAL_STORES, Queue, Range, StoreReader, Stores
from pyspark_messagestore.decoding import Decoder
from pyspark_messagestore.planning import RangesPartition
from pyspark_messagestore.same_log import GO_ON, ends_behind, is_there, tell_gap
from pyspark_messagestore.schema import Projection
from pyspark_messagestore.source_options import SourceOptions

BATCH_ROWS = 65_536


def read_ranges(
    options: SourceOptions, partition: InputPartition, projection: Projection, stores: Stores = LOCAL_STORES
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
    path = options.path
    try:
        store = stores.reader(path, proven=partition.proven)
    except NotAStoreError:
        raise _elsewhere(path, partition.store_id, "no store") from None
    try:
        found = store.describe().store_id
        if partition.store_id and found != partition.store_id:
            raise _elsewhere(path, partition.store_id, f"another store, {found or 'without an id'}")
        _check_planned(store, path, partition)
        if projection.names_broker:
            projection = projection.of_broker(options.broker_name or store.broker_name())
        ranges = [Range(*each) for each in partition.ranges]
        decoder = Decoder(options, projection)
        yield from _read_ranges(store, ranges, decoder, fail_on_data_loss=options.fail_on_data_loss)
        decoder.close()
        _check_planned(store, path, partition)  # after reading: the store may change at any moment
    finally:
        store.close()


def _check_planned(store: StoreReader, path: str, partition: RangesPartition) -> None:
    """Check that log and queues are those that were planned. Nothing is known below the log's first segment."""
    fault = ""
    last = partition.last
    if last is not None and not is_there(store, last):
        fault = f"the record at physical offset {last.position} has changed"
    if partition.physical_offset:
        ends = {(topic, queue_id): end for topic, queue_id, _, end in partition.ranges}
        for (topic, queue_id), place in store.places(ends).items():
            if ends_behind(place, partition.physical_offset):
                fault = f"message {ends[topic, queue_id] - 1} of {topic}/{queue_id} has changed"
    if fault:
        raise StoreWentBackwardsError(
            f"{path}: {fault} since this micro-batch was planned: the log was cut or restored, or the topic was "
            f"created again. Restart the query"
        )


def _read_ranges(
    store: StoreReader, ranges: Sequence[Range], decoder: Decoder, *, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    left = list(reversed(ranges))  # the next one is last
    while left:
        try:
            parts = store.gather(left[::-1], max_rows=BATCH_ROWS, tags_codes=decoder.tags_codes)
            for part in parts:  # `gather` is called again after each gap
                _drop_before(left, (part.topic, part.queue_id), part.start)
                decoded = decoder.decoded(part)
                left[-1] = replace(left[-1], start=part.end)
                del part  # so that the next part can use its memory
                for found in decoded:
                    yield from decoder.rows(found)
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
            tell_gap((error.topic, error.queue_id), error.queue_offset, first)
            left[-1] = replace(left[-1], start=first)


def _drop_before(left: list[Range], queue: Queue, offset: int) -> None:
    """Drop the ranges before the one that holds a message; the next one is the last of the list."""
    while (left[-1].topic, left[-1].queue_id) != queue or left[-1].end <= offset:
        left.pop()


def _elsewhere(path: str, store_id: str, found: str) -> NotAStoreError:
    return NotAStoreError(
        f"{path}: host {socket.gethostname()} found {found} there, but the driver planned to read store "
        f"{store_id or 'without an id'}. Let executors and driver see the same disk",
        path=path,
    )
