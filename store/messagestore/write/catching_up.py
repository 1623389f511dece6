"""Catching up: takes in what other processes appended while this one stayed attached.

A writer that was attached without a break, and finds a newer counter in `state`, follows record heads from its cached
end to V; a BATCH record gives its E: jump. Anything odd on the way, and recovery decides instead.
"""

from __future__ import annotations

from messagestore.format.layout import RECORD_HEAD
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.batch_record import BatchRecord, read_batch
from messagestore.log.batch_search import batches_from
from messagestore.log.read_back import rows_of
from messagestore.log.sealed_ends import SealedEnds
from messagestore.log.store_files import StoreFiles
from messagestore.write.log_writer import NOTHING_IN_FLIGHT, LogEnd, LogWriter


def journal_of(files: StoreFiles, end: int) -> BatchJournal:
    """What the journal says now, with the batches that the BATCH topic's queue has up to a queue offset. Nothing is
    written; a journal that cannot be used is made again from that queue.

    Raises
    ------
    CorruptionError
        A BATCH record cannot be read.
    """
    journal = BatchJournal.read(files.disk, files.paths.journal, files.paths.journal_1)
    if journal.fault or journal.covered > end:
        journal = BatchJournal(complete=journal.complete)
    journal.extend(batches_from(files, journal.covered, end))
    return journal


def catch_up(writer: LogWriter) -> bool:
    """Take in what other Python writers appended since `writer` held the lock; False when only recovery will do.

    Follows record heads from the cached end to V; a BATCH record gives its E: jump.
    """
    with writer.mutex:  # the flush thread may be at work
        return _catch_up(writer)


def _catch_up(writer: LogWriter) -> bool:
    files, log = writer.files, writer.log
    state = files.state_file.read()
    if state is None or state.in_flight != NOTHING_IN_FLIGHT or state.poisoned or writer.poison_reason is not None:
        return False
    if not (files.abort_is_ours or (files.read_abort() is None and state.clean)):
        return False
    if state.counter == writer.state.counter:
        return not any(log.read(writer.end.physical_offset, 8))
    files.others_wrote |= state.clean_end < state.visible_end
    files.others_named = True
    files.forget_queues()
    log.refresh()
    log.note_names()
    if files.index is not None:
        files.index.load()
    files.topics.load()
    grown: dict[tuple[str, int], int] = {}
    singles: list[tuple[int, int]] = []
    end = _follow(writer, writer.end, state.visible_end, grown, singles)
    if end is None:
        return False
    if files.ends is not None:
        _note_grown(files, files.ends, grown, singles)
    count = files.queue(BATCH_TOPIC, 0).end(hint=writer.journal.covered, limit=state.visible_end)
    writer.journal.extend(batches_from(files, writer.journal.covered, count))
    writer.next_offsets.clear()
    writer.end, writer.state = end, state  # `state` last: with its counter all this counts as done
    return True


def _note_grown(
    files: StoreFiles, ends: SealedEnds, grown: dict[tuple[str, int], int], singles: list[tuple[int, int]]
) -> None:
    """Where the queues end that others have appended to: their files tell the last units when they are needed."""
    for begin, end in singles:
        for run in files.commit_log.scan(begin, end, verify_body_crc=False):
            read = rows_of(run)
            for key, rows in read.by_queue().items():
                grown[key] = max(grown.get(key, 0), int(read.queue_offsets[rows[-1]]) + 1)
    for key, count in grown.items():
        ends.ask(key, count)


def _follow(
    writer: LogWriter,
    end: LogEnd,
    visible_end: int,
    grown: dict[tuple[str, int], int],
    singles: list[tuple[int, int]],
) -> LogEnd | None:
    """Where the log ends. `grown` gets the ends of the queues of batches, `singles` where other records lie."""
    log = writer.log
    position = end.physical_offset
    while position < visible_end:
        head = log.head(position)
        if head is None:
            if log.left(position) == log.segment_size or log.read(position, 8) != log.blank(position):
                return None
            position += log.left(position)
            continue
        size, timestamp_ms = int(head["total_size"]), int(head["store_timestamp_ms"])
        batch = (
            read_batch(log, position)
            if log.read(position + RECORD_HEAD.size, 24)[:16].startswith(b'{"messagestore"')
            else None
        )
        end = LogEnd(position + size, position, size, timestamp_ms)
        if batch is not None:
            grown[BATCH_TOPIC, 0] = batch.queue_offset + 1
            for topic, runs in batch.ranges.items():
                grown.update({(topic, queue_id): first + count for queue_id, first, count in runs})
        elif singles and singles[-1][1] == position:
            singles[-1] = singles[-1][0], position + size
        else:
            singles.append((position, position + size))
        position += size
        if batch is not None and batch.end > position:
            last = _last_record(writer, batch)
            if last is None:
                return None
            end = LogEnd(batch.end, last[0], last[1], timestamp_ms)
            position = batch.end
    return end if position == visible_end else None


def _last_record(writer: LogWriter, batch: BatchRecord) -> tuple[int, int] | None:
    """Position and size of the last record of a batch: the last unit of one of its queues."""
    best: tuple[int, int] | None = None
    for topic, runs in batch.ranges.items():
        for queue_id, first, count in runs:
            units = writer.files.queue(topic, queue_id).read(first + count - 1, 1)
            if not len(units):
                return None
            position, size = int(units["physical_offset"][0]), int(units["size"][0])
            if best is None or position > best[0]:
                best = (position, size)
    return best if best is not None and sum(best) == batch.end else None
