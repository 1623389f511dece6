"""Catching up with what other processes appended while this process stayed attached.

A writer that was attached without interruption, and finds a newer counter in `state`, follows the heads of records from
its cached end to V. At a BATCH record it jumps to the E that the record names. If it finds anything unexpected on the
way, recovery decides instead.
"""

from __future__ import annotations

from messagestore.format.batch_record import BatchRecord
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.batch_search import batches_from
from messagestore.log.condition import look
from messagestore.log.log_end import LogEnd
from messagestore.log.store_files import Identity, StoreFiles
from messagestore.log.walk import Depth, Walk, rows_of
from messagestore.writer.log_writer import LogWriter
from messagestore.writer.states import Health


def journal_of(files: StoreFiles, end: int) -> BatchJournal:
    """The journal as it is on the disk now, with the batches that the BATCH topic's queue has up to a queue offset.

    Nothing is written. A journal that cannot be used is rebuilt from that queue in memory.

    Raises
    ------
    CorruptionError
        A BATCH record cannot be read.
    """
    journal = BatchJournal.read(files.disk, files.paths.journal)
    if journal.fault or journal.covered > end:
        journal = BatchJournal(complete=journal.complete)
    journal.extend(batches_from(files, journal.covered, end))
    return journal


def catch_up(writer: LogWriter) -> bool:
    """Take in what other Python writers appended since `writer` held the lock; False if recovery is needed.

    This follows the heads of records from the cached end to V, and jumps from a BATCH record to its E.
    """
    with writer.mutex:  # the flush thread may be running
        if not _catch_up(writer):
            return False
        writer.clock.load()
        return True


def _catch_up(writer: LogWriter) -> bool:
    files, log = writer.files, writer.log
    traces = look(files)
    state = traces.state
    if state is None or not traces.is_finished or writer.health is not Health.SOUND:
        return False

    if state.counter == writer.state.counter:
        # Nobody has published since. Bytes behind the end are of an append that died.
        return not any(log.read(writer.end.physical_offset, 8))
    files.others_wrote |= state.clean_end < state.visible_end
    files.others_named = True

    identity = Identity.read(files.disk, files.paths.identity)
    if identity is None:
        return False
    files.know(identity)
    if not state.own:
        # Somebody may have deleted topics: what was known of their queues must not count for queues that are made
        # again. The clean end shows nothing if it was at the log's end before.
        files.ends, writer.journal.queues = None, None
        if state.clean_end != writer.state.clean_end:  # whoever moved it has synced what this process wrote
            files.forget_written()
    files.forget_queues()

    begin = log.min_offset
    log.refresh()
    if log.min_offset != begin:
        files.pool.clear()  # retention has deleted queue files, too, and the disk waits for their blocks
    log.note_names()

    if files.index is not None:
        files.index.load()
    files.topics.load()

    grown: dict[tuple[str, int], int] = {}
    end = _follow(writer, writer.end, state.visible_end, grown)
    if end is None:
        return False

    if files.ends is not None:
        for key, queue_end in grown.items():
            files.ends.ask(key, queue_end)  # the last units are read from the queues' files when they are needed

    count = files.queue(BATCH_TOPIC, 0).end(hint=writer.journal.covered, limit=state.visible_end)
    writer.journal.extend(batches_from(files, writer.journal.covered, count))
    writer.others_appended(end, state)
    return True


def _follow(writer: LogWriter, end: LogEnd, visible_end: int, grown: dict[tuple[str, int], int]) -> LogEnd | None:
    """Where the log ends, or None. `grown` receives the ends of the queues that others have appended to."""
    walk = Walk(writer.log, end.physical_offset, visible_end, Depth.FRAMING, batches=True)
    for run in walk:
        end = LogEnd(run.end, run.last_offset, run.last_size, run.last_timestamp_ms)

        batch = run.batch
        if batch is not None:
            grown[BATCH_TOPIC, 0] = batch.queue_offset + 1
            for topic, ranges in batch.ranges.items():
                grown.update({(topic, queue_id): first + count for queue_id, first, count in ranges})
        elif writer.files.ends is not None:
            rows = rows_of(run)
            for key, indices in rows.by_queue().items():
                grown[key] = max(grown.get(key, 0), int(rows.queue_offsets[indices[-1]]) + 1)

        if batch is not None and batch.end > run.end:
            last = _last_record(writer, batch)
            if last is None:
                return None
            end = LogEnd(batch.end, *last, run.last_timestamp_ms)
            walk.jump(batch.end)
    return end if walk.position == visible_end else None


def _last_record(writer: LogWriter, batch: BatchRecord) -> tuple[int, int] | None:
    """Position and size of the last record of a batch, from the last units of its queues."""
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
