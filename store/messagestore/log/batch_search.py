"""Finds BATCH records in the log, and proves whether a missing record is no longer in the log.

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
from messagestore.format import record_scan
from messagestore.format.config import SYNC_FLUSH
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.record import decode_message
from messagestore.log.batch_journal import PARTIAL, JournalEntry
from messagestore.log.batch_record import BODY_BEGIN, BatchRecord, known_batch, read_batch
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Run, Walk, rows_of_batch_topic

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
        decode_message(run.data.data, start, physical_offset=run.physical_offset + start)
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
        found = list(batches_from(files, 0, queue.end(limit=end)))
    except CorruptionError:
        found = []  # units may be damaged, too: the log shows which
    numbers = [batch.queue_offset for batch in found]
    gaps = any(second != first + 1 for first, second in itertools.pairwise(numbers))
    if not found or gaps or (numbers[0] > 0 and not log.min_offset):
        return list(batches_of_log(log, log.min_offset, end))
    last = found.pop()
    return [*found, *batches_of_log(log, last.physical_offset, end)]


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
            record_topic = decode_message(log.record_bytes(physical_offset) or b"").topic
            if batch is None and record_topic == BATCH_TOPIC:
                known_batch(log, physical_offset)
            return True
    raise walk.broken(" (the BATCH record that the journal names)" if walk.position == physical_offset else "")


def not_ours(files: StoreFiles, batch: BatchRecord) -> CorruptionError:
    """Return the error for a BATCH record of a store that is neither this one nor one of which this is a copy."""
    log = files.commit_log
    return CorruptionError(
        log.path_of(batch.physical_offset),
        batch.physical_offset,
        f"a BATCH record of store {files.store_id}",
        f"one of store {batch.store_id} (a copied segment, or spark/store.json of another store or copy?)",
        hint=f"Put back a log and a folder {files.paths.spark} that belong together. Or move that folder away and run "
        "`messagestore recover`, which rebuilds it from the log and gives the store a new id.",
    )
