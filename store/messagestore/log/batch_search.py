"""Finds BATCH records in the log, checks their data, and proves whether a missing record is no longer in the log.

BATCH records are found in two ways: through the units of their queue, and in the log itself. A unit or a record that
cannot be read is damage. It never counts as "no batch", because the batch would be appended a second time when Spark
sends it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from messagestore.errors import CorruptionError
from messagestore.files.commit_log import CommitLog
from messagestore.format import record, record_scan
from messagestore.format.batch_record import BODY_BEGIN, CHUNK_SIZE, BatchRecord, parse, parse_torn
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.layout import BLANK, MAGIC_V1, PROPERTIES_LENGTH_SIZE, PROPERTY_CRC_SIZE, RECORD_HEAD
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_journal import PARTIAL, JournalEntry
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Run, Walk, rows_of_batch_topic

_BATCH_TOPIC_PART = bytes([len(BATCH_TOPIC)]) + BATCH_TOPIC.encode()
_BEGIN = np.frombuffer(BODY_BEGIN, np.uint8)


def batches_from(files: StoreFiles, queue_offset: int, end: int) -> Iterator[BatchRecord]:
    """Yield BATCH records from a queue offset on, in the order of the log, except those below the first segment.

    Raises
    ------
    CorruptionError
        A unit points to something that is not a record of the BATCH topic, or to a record that cannot be read.
    """
    queue = files.queue(BATCH_TOPIC, 0)
    position = max(queue_offset, queue.search_physical(files.commit_log.min_offset))

    while position < end:
        units = queue.read(position, min(4096, end - position))
        if not len(units):
            return
        for physical_offset in units["physical_offset"].tolist():
            batch = known_batch(files.commit_log, physical_offset)
            if batch is not None:
                yield batch
        position += len(units)


def batches_of_log(log: CommitLog, start: int, end: int) -> Iterator[BatchRecord]:
    """Yield BATCH records that begin in `start..end` of the log, whatever their queue says.

    The search skips the data of a SYNC_FLUSH batch, which were synced before its record was sealed. It follows the
    sizes of all other records.

    Parameters
    ----------
    log : CommitLog
    start : int
        Physical offset at which a record begins.
    end : int
        Physical offset at which the log ends.

    Raises
    ------
    CorruptionError
        No record can be read at a place below the end, or a BATCH record is damaged.
    """
    walk = Walk(log, start, end, Depth.FRAMING)
    for run in walk.whole():
        for at in _of_batch_topic(run):
            batch = known_batch(log, run.physical_offset + at)
            if batch is None:
                continue
            yield batch
            if batch.flush_disk_type == SYNC_FLUSH and run.end < batch.end <= end:
                walk.jump(batch.end)


def _of_batch_topic(run: Run) -> list[int]:
    """Return where the records of the BATCH topic begin in a run.

    Raises
    ------
    CorruptionError
        A record has the body of a BATCH record, and its CRC says that its topic is damaged.
    """
    named = rows_of_batch_topic(run)
    _, where = record_scan.parts(run.data, run.starts, run.heads)
    long_enough = where.body_ends - where.body_starts > len(_BEGIN)
    long_enough[named] = False
    rows = np.flatnonzero(long_enough)
    bodies = run.data[where.body_starts[rows, None] + np.arange(len(_BEGIN))]
    for row in rows[(bodies == _BEGIN).all(axis=1)].tolist():  # the others are users' messages that look like one
        start = int(run.starts[row])
        record.decode_message(run.data.data, start, physical_offset=run.physical_offset + start)
    starts: list[int] = run.starts[named].tolist()
    return starts


def all_batches(files: StoreFiles, end: int) -> list[BatchRecord]:
    """Return every BATCH record of the log below `end`: through their queue, else from the log.

    The queue is trusted as long as its BATCH records themselves show that none is missing between them: each contains
    its number. The log is searched after the last one.

    Raises
    ------
    CorruptionError
        As for `batches_of_log`.
    """
    log, queue = files.commit_log, files.queue(BATCH_TOPIC, 0)
    try:
        of_queue = list(batches_from(files, 0, queue.end(limit=end)))
    except CorruptionError:
        of_queue = []  # units may be damaged, too: the log shows which
    numbers = [batch.queue_offset for batch in of_queue]
    gaps = any(second != first + 1 for first, second in itertools.pairwise(numbers))
    if not of_queue or gaps or (numbers[0] > 0 and not log.min_offset):
        return list(batches_of_log(log, log.min_offset, end))
    last = of_queue.pop()
    return [*of_queue, *batches_of_log(log, last.physical_offset, end)]


def batch_is_there(files: StoreFiles, end: int, app_id: str, entry: JournalEntry) -> bool:
    """Whether the log, up to `end`, has the BATCH record that an entry names; True if it was below the first segment.

    Raises
    ------
    CorruptionError
        The record cannot be read and nothing proves that it is missing, or it belongs to another store.
    """
    log = files.commit_log
    if entry.physical_offset < log.min_offset:
        return True

    partial = entry.row_count == PARTIAL
    if entry.physical_offset < end:
        batch = known_batch(log, entry.physical_offset) if partial else read_batch(log, entry.physical_offset)
        if batch is not None and (batch.app_id, batch.version) == (app_id, entry.version):
            if batch.store_id not in files.known_ids:
                raise not_ours(files, batch)
            return batch.end <= end or partial

    return not is_gone(log, entry.physical_offset, end)


def is_gone(log: CommitLog, physical_offset: int, end: int) -> bool:
    """Whether it is proven that a BATCH record which cannot be read at a place is no longer in the log.

    It is proven if the log ends before that place, or if a chain of valid records from the start of its segment leads
    to another record there or steps over the place.

    Parameters
    ----------
    log : CommitLog
    physical_offset : int
        At or above the first segment; `read_batch` finds no record there, or another one.
    end : int
        Physical offset at which the log ends.

    Raises
    ------
    CorruptionError
        There is no proof: the record is damaged, or an earlier one in its segment is.
    """
    if physical_offset >= end:
        return True
    walk = Walk(log, log.segment_of(physical_offset))
    for run in walk:
        if run.end > physical_offset:
            if not (run.physical_offset + run.starts == physical_offset).any():
                return True  # the chain steps over this place
            batch = read_batch(log, physical_offset)
            record_topic = record.decode_message(log.record_bytes(physical_offset) or b"").topic
            if batch is None and record_topic == BATCH_TOPIC:
                known_batch(log, physical_offset)
            return True
    raise walk.broken(" (the BATCH record that the journal names)" if walk.position == physical_offset else "")


def not_ours(files: StoreFiles, batch: BatchRecord) -> CorruptionError:
    """Return the error for a BATCH record of another store, if this store is not a copy of that one."""
    log = files.commit_log
    return CorruptionError(
        log.path_of(batch.physical_offset),
        batch.physical_offset,
        f"a BATCH record of store {files.store_id}",
        f"one of store {batch.store_id} (a copied segment, or spark/store.json of another store or copy?)",
        hint=f"Put back a log and a folder {files.paths.spark} that belong together. Or move that folder away and run "
        "`messagestore recover`, which rebuilds it from the log and gives the store a new id.",
    )


def read_batch(log: CommitLog, physical_offset: int) -> BatchRecord | None:
    """Return the BATCH record at a place of the log, or None if there is no valid one."""
    data = log.record_bytes(physical_offset)
    return None if data is None else parse(data, physical_offset)


def known_batch(log: CommitLog, physical_offset: int) -> BatchRecord | None:
    """Return the BATCH record at a place where the log or a queue says that a record of the BATCH topic begins.

    Returns
    -------
    BatchRecord | None
        None: the record is whole but is not a BATCH record. A broker's client can write such a message.

    Raises
    ------
    CorruptionError
        The record cannot be read. Its batch may be there, so no caller may continue as if it were not.
    """
    data = log.record_bytes(physical_offset)
    batch = None if data is None else parse(data, physical_offset) or parse_torn(data, physical_offset)
    if batch is not None:
        return batch

    path = log.path_of(physical_offset)
    if data is None:
        raise CorruptionError(path, physical_offset, "a BATCH record that can be read", "no record")

    message = record.decode_message(data, path=path, physical_offset=physical_offset)
    if message.topic != BATCH_TOPIC:
        raise CorruptionError(path, physical_offset, f"a record of {BATCH_TOPIC}", f"one of {message.topic!r}")
    if message.body.startswith(BODY_BEGIN):
        raise CorruptionError(path, physical_offset, "a BATCH record that can be read", "one that cannot")
    return None


def bad_chunk(log: CommitLog, batch: BatchRecord) -> int | None:
    """Return the physical offset of the first piece of a batch that does not match its CRC; None if all of them do."""
    position = batch.data_offset
    for crc in batch.crcs:
        end = min(position + CHUNK_SIZE, batch.end)
        if log.crc(position, end) != crc:
            return position
        position = end
    return None


def is_sealed_batch(log: CommitLog, physical_offset: int) -> bool:
    """Whether the record at a place is a BATCH record by its own lengths, whatever its CRCs say.

    A plain put cannot pass for one, because its topic lies where its own BODYLEN says. A body that looks like a BATCH
    record inside a torn put is therefore only a body.
    """
    data = log.read_array(physical_offset, RECORD_HEAD.size + 24)
    if len(data) < RECORD_HEAD.size:
        return False
    return is_batch_by_lengths(log, physical_offset, record_scan.heads(data, np.zeros(1, np.int64))[0])


def is_batch_by_lengths(log: CommitLog, at: int, head: np.void) -> bool:
    """Check the topic, the lengths and the name of the last property, with four small reads."""
    total_size, body_size = int(head["total_size"]), int(head["body_size"])
    if int(head["magic"]) != MAGIC_V1 or body_size < len(BODY_BEGIN):
        return False
    body_end = int(record_scan.head_sizes(np.array([head]))[0]) + body_size
    topic_end = body_end + len(_BATCH_TOPIC_PART)
    properties_start = topic_end + PROPERTIES_LENGTH_SIZE
    if not properties_start + PROPERTY_CRC_SIZE <= total_size <= log.left(at) - BLANK.size:
        return False
    if log.read(at + body_end, len(_BATCH_TOPIC_PART)) != _BATCH_TOPIC_PART:
        return False
    size = int.from_bytes(log.read(at + topic_end, PROPERTIES_LENGTH_SIZE), "big", signed=True)
    return properties_start + size == total_size
