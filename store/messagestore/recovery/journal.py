"""The journal of a store that is recovered: what its file says, and what the log says where the file is of no use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from messagestore.errors import CorruptionError
from messagestore.files.state import State
from messagestore.format.batch_record import BatchRecord
from messagestore.format.config import ASYNC_FLUSH
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_journal import MISSING, PARTIAL, BatchJournal, JournalEntry
from messagestore.log.batch_search import all_batches, bad_chunk, batches_from, is_gone, not_ours, read_batch
from messagestore.log.dispatch import Dispatcher
from messagestore.log.log_end import LogEnd
from messagestore.log.seal_check import listed
from messagestore.log.store_files import StoreFiles
from messagestore.recovery.decide import changed_below
from messagestore.recovery.report import RecoveryReport


def read_journal(files: StoreFiles, state: State | None, anchored: LogEnd | None) -> BatchJournal:
    """The journal, or an empty one if it belongs to another store or another log."""
    path = files.paths.journal
    journal = BatchJournal.read(files.disk, path)

    other = journal.identity.get("storeId", files.store_id)
    if other != files.store_id:
        return BatchJournal(complete=False, fault=f"{path}: found the journal of store {other}")

    fault = fault_of_pair(files, journal, state, anchored)
    if fault:
        return BatchJournal(complete=False, fault=f"{path}: {fault}", checkpoint_crc=journal.checkpoint_crc)
    return journal


def fault_of_pair(files: StoreFiles, journal: BatchJournal, state: State | None, anchored: LogEnd | None) -> str:
    """Why the journal does not belong to this log, or an empty text. The folder spark/ may be that of another copy.

    The writer that closed the store, or moved its clean end, synced the record before the clean end and all batches of
    the journal. If one of them is another record now, the journal says nothing about this log. If it is damaged, or the
    log ends before it, other checks find that.
    """
    log = files.commit_log
    if state is not None and changed_below(state, anchored, log.min_offset):
        return f"the record at {state.anchor_position}, the last one below the clean end, is another one in the log"

    for app_id, entry in journal.newest_first(log.min_offset):
        position = entry.physical_offset
        if position >= log.max_offset or not any(log.read(position, 8)) or entry.row_count == PARTIAL:
            return ""

        batch = read_batch(log, position)
        if batch is None:
            try:
                is_other = is_gone(log, position, log.max_offset)
            except CorruptionError:
                return ""
        else:
            in_log = (batch.app_id, batch.version, batch.digest, batch.end)
            is_other = in_log != (app_id, entry.version, entry.digest, entry.end)

        if is_other:
            return f"its newest batch, version {entry.version} of app {app_id!r}, is not at {position} in the log"
        return ""
    return ""


def batch_units(files: StoreFiles, journal: BatchJournal, end: int) -> int:
    """The number of units of the BATCH topic's queue, for records below `end`."""
    return files.queue(BATCH_TOPIC, 0).end(hint=journal.covered, limit=end)


def extend_to_end(files: StoreFiles, journal: BatchJournal, end: int) -> bool:
    """Bring the journal up to `end` with the batches that it does not know yet; False if it cannot be used."""
    count = batch_units(files, journal, end)
    if journal.fault or journal.covered > count:
        return False
    journal.extend(_of_this_store(files, batches_from(files, journal.covered, count)))
    return True


def journal_up_to(
    files: StoreFiles,
    journal: BatchJournal,
    end: int,
    report: RecoveryReport,
    *,
    before: State | None,
    without_folder: Collection[str],
) -> BatchJournal:
    """The journal with every batch below `end`; it is rebuilt from the log if the file cannot be used.

    Parameters
    ----------
    files : StoreFiles
    journal : BatchJournal
        What `read_journal` returned.
    end : int
    report : RecoveryReport
        Gets notes of what is rebuilt.
    before : State | None
        `state` as it was found.
    without_folder : collection of str
        Topics of `topics.json` that had no queue when recovery began.
    """
    if extend_to_end(files, journal, end):
        return journal
    if files.first_writer:
        return BatchJournal(complete=files.searched_whole)

    log = files.commit_log
    count, batches = batch_units(files, journal, end), list(_of_this_store(files, all_batches(files, end)))
    new_journal = BatchJournal(
        checkpoint_crc=journal.checkpoint_crc,
        complete=not log.min_offset or (journal.complete and not journal.fault),
        queues=journal.queues,
    )

    new_journal.carry(journal, log.min_offset)
    new_journal.extend(batches)
    new_journal.mark_partial(lambda entry: is_partial(files, entry, end))

    for app_id, entry in journal.newest_first(log.min_offset):
        if new_journal.find(app_id, entry.version) is None:
            new_journal.dropped.append((app_id, entry.version))

    if batches and batches[-1].queue_offset >= count:
        Dispatcher(files).rebuild_queue(BATCH_TOPIC, 0, end)
        report.note_queues(f"{BATCH_TOPIC}/0: units were missing and were rebuilt from the log")

    if journal.queues is None:
        _rebuild_unlisted(files, batches, end, without_folder, report)

    never_written = journal.fault == MISSING and before is not None and not before.clean_end
    if journal.fault and not never_written and log.offsets:
        report.notes.append(_rebuilt_note(files, journal.fault, new_journal))
    return new_journal


def _of_this_store(files: StoreFiles, batches: Iterable[BatchRecord]) -> Iterator[BatchRecord]:
    """The batches; raises `CorruptionError` at one of another store."""
    for batch in batches:
        if batch.store_id not in files.known_ids:
            raise not_ours(files, batch)
        yield batch


def _rebuild_unlisted(
    files: StoreFiles,
    batches: list[BatchRecord],
    end: int,
    without_folder: Collection[str],
    report: RecoveryReport,
) -> None:
    """Rebuild missing queues if no journal lists the queues that had messages.

    `topics.json` and the BATCH records name the queues that must exist.
    """
    folders = files.queue_names()
    topic_names = {*files.topics.names, BATCH_TOPIC}
    topics = [topic for topic in without_folder if topic not in folders]  # the repair made the others
    of_batches = {(t, q) for batch in batches for t, runs in batch.ranges.items() for q, _, _ in runs}
    lost = {(t, q) for t, q in of_batches if t in topic_names and q not in folders.get(t, ())}
    if not (lost or topics) or not end:
        return

    rebuilt = Dispatcher(files).rebuild_queues(lost, end, topics)
    if rebuilt:
        report.note_queues(f"{listed(rebuilt)}: the queues' folders were missing and were rebuilt from the log")


def _rebuilt_note(files: StoreFiles, fault: str, new_journal: BatchJournal) -> str:
    why = "was missing" if fault == MISSING else f"could not be used ({fault})"
    note = f"{files.paths.journal} {why}, and was rebuilt from the log with {len(new_journal)} batches"
    if not new_journal.complete:
        note += ". The log does not begin at 0, so batches that retention has deleted are not in it"
    return note


def is_partial(files: StoreFiles, entry: JournalEntry, end: int) -> bool:
    """Whether data of a batch are missing: a broker found an ASYNC one above C torn, and appended after it."""
    if not files.commit_log.min_offset <= entry.physical_offset < end:
        return False
    batch = read_batch(files.commit_log, entry.physical_offset)
    if batch is None:
        return False  # it is missing or damaged, which the check of the journal finds
    return batch.end > end or (batch.flush_disk_type == ASYNC_FLUSH and bad_chunk(files.commit_log, batch) is not None)
