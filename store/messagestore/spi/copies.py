"""Messages of another store, appended as they are: the bytes of their records, with what they were in that store.

    record there   head | body | topic | properties
    copy           head | body | topic | properties | originBroker originQueueId originQueueOffset originStoreTimestamp
                                                      originOffsetMsgId

Body, CRC, flags, times and hosts of birth, and all properties stay, so a compressed body stays compressed. What depends
on the place in a log is that of the copy, and properties say what it was. A message that has `originQueueOffset` is a
copy already: it keeps what it has, so a copy of a copy says where the message was first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.batches.append import BatchRequest, BatchResult, Chunks, append_batch
from messagestore.format import record_scan, rerouting
from messagestore.format.arrow_bytes import array_of, lengths_of, numpy_of
from messagestore.format.gathered import Gathered
from messagestore.format.layout import MAX_PROPERTIES_SIZE, PROPERTY_CRC_SIZE, SYS_FLAG_BORN_HOST_V6
from messagestore.format.record import store_timestamp_position
from messagestore.format.rows import Rows
from messagestore.writer.log_writer import LogWriter

ORIGIN_BROKER = "originBroker"
ORIGIN_QUEUE_ID = "originQueueId"
ORIGIN_QUEUE_OFFSET = "originQueueOffset"
ORIGIN_STORE_TIMESTAMP = "originStoreTimestamp"
ORIGIN_OFFSET_MESSAGE_ID = "originOffsetMsgId"


@dataclass(slots=True)
class Copied:
    """What `append_copies` did.

    Parameters
    ----------
    result : BatchResult
    message_count : int
    size : int
        Bytes of the records in the other store.
    without_origin : list of int
        The queue offsets of messages whose properties leave no room for those of the origin. They have none.
    """

    result: BatchResult
    message_count: int
    size: int
    without_origin: list[int] = field(default_factory=list)


def append_copies(writer: LogWriter, blocks: Iterable[Gathered], name: str, request: BatchRequest) -> Copied:
    """Append messages of another store as one batch, each to the topic and the queue id that it has there.

    Parameters
    ----------
    writer : LogWriter
        Of the store that gets them. The caller holds the writer lock.
    blocks : iterable of Gathered
        As a `StoreReader` gathers them. All of them are in memory, encoded, until the batch is appended.
    name : str
        The value of `originBroker`.
    request : BatchRequest

    Raises
    ------
    CorruptionError
        A record is damaged, or is not the one that its unit describes; nothing was written.
    MessageIllegalError
        A topic may not be written, or has no such queue here, or a record does not fit into a segment; nothing was
        written.
    StoreFullError, StorePoisonedError, StoreLockedError
        As for `append_batch`.
    """
    chunks, count, size, without = Chunks(), 0, 0, list[int]()
    for block in blocks:
        rows, bare = _copies(block, name, writer)
        chunks += rows
        count, size = count + len(block.sizes), size + int(block.sizes.sum(dtype=np.int64))
        without += bare
    return Copied(append_batch(writer, chunks, request), count, size, without)


def _copies(block: Gathered, name: str, writer: LogWriter) -> tuple[list[Rows], list[int]]:
    """The records of a block for another log, and the queue offsets of those that do not say where they were."""
    if not len(block.sizes):
        return [], []

    origins = _origins(block, name)
    starts = np.ascontiguousarray(block.positions, np.int64)
    heads = record_scan.heads(block.data, starts)
    _, parts = record_scan.parts(block.data, starts, heads)  # `_origins` has checked all records
    sizes = parts.ends - parts.property_starts
    bare = sizes + lengths_of(origins) > MAX_PROPERTIES_SIZE - 1  # a separator may come between them
    said = _are_copies(block.data, parts)
    origins = pc.if_else(array_of(bare | said), pa.scalar(b"", pa.large_binary()), origins)

    config = writer.files.config
    with_crc = np.full(len(starts), config.enabled_append_prop_crc)
    with_crc &= sizes + lengths_of(origins) <= MAX_PROPERTIES_SIZE - 1 - PROPERTY_CRC_SIZE
    wide = heads["sys_flag"] & SYS_FLAG_BORN_HOST_V6 != 0

    rows = []
    for first, last in _runs(with_crc, wide):
        crc, some = bool(with_crc[first]), np.arange(first, last)
        data, begins = rerouting.readdressed(
            block.data,
            starts,
            [block.topic],
            np.zeros(len(starts), np.int64),
            np.full(len(starts), block.queue_id, np.int32),
            property_crc=crc,
            order=some,
            more=origins,
            store_host=writer.files.store_host,
        )
        position = store_timestamp_position(SYS_FLAG_BORN_HOST_V6 if wide[first] else 0)
        levels = writer.files.commit_log.delay_levels
        rows.append(rerouting.unplaced(data, begins, levels, store_timestamp_position=position, property_crc=crc))
    return rows, block.queue_offsets[bare & ~said].tolist()


def _origins(block: Gathered, name: str) -> pa.Array:
    """What the messages were in the other store, as properties: large_binary[n]."""
    columns = block.decoded(["store_timestamp_ms", "offset_message_id"])
    pieces = (
        f"{ORIGIN_BROKER}\x01{name}\x02{ORIGIN_QUEUE_ID}\x01{block.queue_id}\x02{ORIGIN_QUEUE_OFFSET}\x01",
        array_of(block.queue_offsets).cast(pa.string()),
        f"\x02{ORIGIN_STORE_TIMESTAMP}\x01",
        columns.column(0).cast(pa.string()),
        f"\x02{ORIGIN_OFFSET_MESSAGE_ID}\x01",
        columns.column(1),
        "\x02",
    )
    return pc.binary_join_element_wise(*pieces, "").cast(pa.large_string()).cast(pa.large_binary())


def _are_copies(data: NDArray[np.uint8], parts: record_scan.Parts) -> NDArray[np.bool_]:
    """Which records have the property `originQueueOffset`: bool[n]."""
    properties = rerouting.slices_of(data, parts.property_starts, parts.ends)
    own = properties.take(array_of(2 * np.arange(len(parts.ends))))
    name = f"{ORIGIN_QUEUE_OFFSET}\x01".encode()
    found: NDArray[np.bool_] = numpy_of(pc.or_(pc.starts_with(own, name), pc.match_substring(own, b"\x02" + name)))
    return found


def _runs(*columns: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The rows `first..last` that have the same values in some columns and follow one another.

    A batch's chunk has one position for store times, and `__CRC32#` in all records or in none.
    """
    changes = np.zeros(len(columns[0]), bool)
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    firsts = [0, *np.flatnonzero(changes).tolist()]
    yield from zip(firsts, [*firsts[1:], len(changes)], strict=True)
