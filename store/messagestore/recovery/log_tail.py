"""Examines the bytes after the log's end.

Nothing there is trusted, because the sender of a message chose most of its bytes. Every examination takes time in
proportion to the number of bytes, whatever their values are. Heads are found by their magic and must contain their own
offset; expensive checks are done only for records that do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from messagestore.files.commit_log import CommitLog
from messagestore.format import batch_record, record_scan
from messagestore.format.arrow_bytes import unaligned
from messagestore.format.batch_record import BatchRecord
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.layout import (
    BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTY_CRC_SIZE,
    RECORD_HEAD,
    TOPIC_LENGTH_SIZES,
)
from messagestore.format.record_scan import FIRST_MAGIC_BYTE, MAGIC_POSITION, PROPERTY_CRC_BEGIN
from messagestore.log.batch_search import is_batch_by_lengths, read_batch
from messagestore.log.log_end import LogEnd
from messagestore.log.store_files import StoreFiles

_SEARCH_SIZE = 16 * 1024 * 1024
_MAGICS = tuple(int(np.array(magic, ">i4").view("=i4")) for magic in (MAGIC_V1, MAGIC_V2))


@dataclass
class Tail:
    """What lies after an offset.

    Parameters
    ----------
    byte_count : int
        The number of bytes in each segment from the offset to the last byte that is not zero, added up.
    message_count : int
        The number of records whose head contains their own offset, complete or not. Records within another record are
        not counted.
    queues : set of (topic, queue id)
        The queues of these records, as far as their topics can be read.
    """

    byte_count: int = 0
    message_count: int = 0
    queues: set[tuple[str, int]] = field(default_factory=set)


def tail_behind(log: CommitLog, physical_offset: int) -> Tail:
    """What lies after the log's end."""
    tail = Tail()
    for segment in log.offsets:
        start = max(segment, physical_offset)
        if segment + log.segment_size <= start:
            continue
        ranges = log.nonzero_ranges(start)
        tail.byte_count += ranges[-1][1] - start if ranges else 0

    end = 0
    for at, head in heads_behind(log, physical_offset):
        # The body of a record may look like records.
        if at < end:
            continue
        end = at + int(head["total_size"])
        tail.message_count += 1
        topic = _topic_at(log, at, head)
        if topic:
            tail.queues.add((topic, int(head["queue_id"])))
    return tail


def heads_behind(log: CommitLog, physical_offset: int) -> Iterator[tuple[int, np.void]]:
    """The offsets where the head of a record begins, with the head: its magic, sizes and PHYSICALOFFSET are right."""
    for segment in log.offsets:
        start, segment_end = max(segment, physical_offset), segment + log.segment_size
        if segment_end <= start:
            continue
        ranges = log.nonzero_ranges(start)
        if not ranges:
            continue
        position, last = max(start, ranges[0][0] - MAGIC_POSITION), ranges[-1][1]  # TOTALSIZE begins with zeros
        while position < last:
            data = log.read_array(position, min(_SEARCH_SIZE + RECORD_HEAD.size + 24, segment_end - position))
            step = min(_SEARCH_SIZE, last - position)
            places = _magics_in(data, step)
            heads = record_scan.heads(data, places)
            good = heads["physical_offset"] == position + places
            good &= (heads["body_size"] >= 0) & (heads["total_size"] > RECORD_HEAD.size)
            good &= position + places + heads["total_size"] <= segment_end - BLANK.size
            for row in np.flatnonzero(good).tolist():
                at = position + int(places[row])
                if record_scan.is_head(heads[row], at):
                    yield at, heads[row]
            position += step


def _magics_in(data: NDArray[np.uint8], step: int) -> NDArray[np.int64]:
    """Where records may begin in `data[:step]`, judged by the magic alone; each has room for a whole head."""
    magics = unaligned(data, np.int32)
    most = min(len(magics), step + MAGIC_POSITION)
    positions = np.flatnonzero(data[:most] == FIRST_MAGIC_BYTE)
    magic = magics[positions]
    positions = positions[(magic == _MAGICS[0]) | (magic == _MAGICS[1])] - MAGIC_POSITION
    places: NDArray[np.int64] = positions[
        (positions >= 0) & (positions < step) & (positions + RECORD_HEAD.size <= len(data))
    ]
    return places


def _head_size(head: np.void) -> int:
    return int(record_scan.head_sizes(np.array([head]))[0])


def _topic_at(log: CommitLog, at: int, head: np.void) -> str:
    """The topic that the record's own lengths point to; empty if it is not text."""
    size = TOPIC_LENGTH_SIZES[int(head["magic"])]
    place = at + _head_size(head) + int(head["body_size"])
    length = int.from_bytes(log.read(place, size), "big", signed=True)
    if not 0 < length <= int(head["total_size"]):
        return ""
    data = log.read(place + size, min(length, 255))
    try:
        return data.decode().strip("\0")
    except UnicodeDecodeError:
        return ""


# ---- BATCH records


def later_sync_batch(files: StoreFiles, end: LogEnd) -> BatchRecord | None:
    """A valid SYNC_FLUSH batch after the end that is not older than the last record, or None.

    Such a batch proves that bytes at the end were lost. Bytes within the record at the end are the body of a torn
    message and prove nothing. A BATCH record is text except for its head, so a candidate that contains another
    candidate is not a BATCH record. The ranges that are read are therefore disjoint.
    """
    log = files.commit_log
    start = end.physical_offset
    first = log.head(start)
    if first is not None:
        start += int(first["total_size"])

    candidate, candidate_end = -1, -1
    for at, head in heads_behind(log, start):
        if candidate >= 0 and at >= candidate_end:
            batch = _proof(files, candidate, end)
            if batch is not None:
                return batch

        candidate = -1
        if int(head["queue_id"]) == 0 and _begins_batch(log, at, head) and is_batch_by_lengths(log, at, head):
            candidate, candidate_end = at, at + int(head["total_size"])
    return _proof(files, candidate, end) if candidate >= 0 else None


def _begins_batch(log: CommitLog, at: int, head: np.void) -> bool:
    if int(head["store_timestamp_ms"]) < 0:
        return False
    begin = log.read(at + _head_size(head), len(batch_record.BODY_BEGIN))
    crc = log.read(at + int(head["total_size"]) - PROPERTY_CRC_SIZE, len(PROPERTY_CRC_BEGIN))
    return begin == batch_record.BODY_BEGIN and crc == PROPERTY_CRC_BEGIN


def _proof(files: StoreFiles, at: int, end: LogEnd) -> BatchRecord | None:
    batch = read_batch(files.commit_log, at)
    if batch is None or batch.store_id not in files.known_ids or batch.flush_disk_type != SYNC_FLUSH:
        return None
    head = files.commit_log.head(at)
    return batch if head is not None and int(head["store_timestamp_ms"]) >= end.last_store_timestamp_ms else None
