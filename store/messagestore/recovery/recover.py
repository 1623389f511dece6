"""Recovery: decides where the log ends, and repairs everything that depends on it.

Recovery runs under both locks. If it runs twice, or again after a crash within it, it leaves the same bytes. `abort`
decides which rules apply:

    absent          no walk: the log ends after the last record that a ConsumeQueue unit points to, plus valid records
                    after it; if the queues are missing, the whole log is walked, and nothing in it is torn
    not ours        a broker crashed: walk from where its own recovery starts, or from C if that is higher
    ours            walk from C, if the log holds the anchor there; otherwise from an earlier segment

If bytes are missing that were provably synced, recovery raises `CorruptionError`. Anything else after the last record
that counts is the torn end of the log: it is saved (unless a replay of a batch contains it), zeroed and synced, and
reported in one line. What is kept above C is rewritten and synced before anything is dispatched or published.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from messagestore.errors import CorruptionError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.checkpoint import StoreCheckpoint
from messagestore.files.mapped_file import replace_file
from messagestore.files.state import NOTHING_IN_FLIGHT, UNKNOWN_FLUSHED_END, State, boot_hash
from messagestore.format import record
from messagestore.format.batch_record import BatchRecord
from messagestore.format.config import ASYNC_FLUSH
from messagestore.format.layout import (
    JOURNAL_FORMAT,
    STATE_ASYNC,
    STATE_CLEAN,
    STATE_FILE_SIZE,
    STATE_OWN,
    STATE_RECOVERING,
)
from messagestore.format.message import BATCH_TOPIC, put_topic_fault
from messagestore.log.batch_journal import MISSING, PARTIAL, BatchJournal, JournalEntry
from messagestore.log.batch_search import all_batches, batch_is_there, batches_from, is_gone, not_ours, read_batch
from messagestore.log.dispatch import Dispatcher, QueueRuns, remove_files
from messagestore.log.lost_end import LostEnd, end_of_queues, lost_end, units_behind
from messagestore.log.queue_proof import is_settled, proven_queue_end
from messagestore.log.seal_check import is_deleted, listed, sealed_at, short_queues
from messagestore.log.sealed_ends import SealedEnds
from messagestore.log.store_files import StoreFiles, as_record
from messagestore.log.walk import Depth, Walk, rows_of
from messagestore.recovery.log_tail import heads_behind, later_sync_batch, tail_behind
from messagestore.recovery.report import RecoveryReport
from messagestore.recovery.survey import Survey, Surveyor, bad_chunk
from messagestore.recovery.trust import Left, Trust
from messagestore.write.log_writer import LogWriter
from messagestore.write.standing import LogEnd

_LOGGER = logging.getLogger(__name__)
SAVED_SIZE = 64 * 1024 * 1024
"""Recovery saves at most this many torn bytes to `spark/cut/`."""
LOOKED_THROUGH_SIZE = 1 << 30
"""Recovery searches a broker's log of at most this many bytes for the records of topics whose folders are missing."""
_QUEUES, _INDEX = b"queues", b"index"
"""The words that `spark/rebuild` may contain."""
_EMPTY = LogEnd(0, 0, 0, 0)


def recover(files: StoreFiles, *, accept_loss: bool = False) -> tuple[LogWriter, RecoveryReport]:
    """Bring a store into a state that can be appended to.

    Parameters
    ----------
    files : StoreFiles
        The loaded files of the store; the caller is attached and holds the writer lock.
    accept_loss : bool
        True: if the end of the log is provably lost, continue without it; the report says what is missing.

    Raises
    ------
    CorruptionError
        Bytes that were provably on the disk are missing; nothing was changed.
    """
    while True:
        recovery = _Recovery(files, accept_loss=accept_loss)
        try:
            writer, report = recovery.run()
            break
        except CorruptionError as error:
            if recovery.take_away(error):
                continue
            if type(error) is CorruptionError and error.path.startswith(files.paths.consume_queue + os.sep):
                raise CorruptionError(
                    error.path,
                    error.physical_offset,
                    error.expected,
                    error.found,
                    hint=f"Restore this file from a copy. If there is none, run `messagestore verify`. If it finds no "
                    f"fault in the log, remove the folder {files.paths.consume_queue} and run `messagestore recover`, "
                    "which rebuilds all queues from the log.",
                ) from error
            raise
    end = writer.end
    if end.last_size:
        files.configure(as_record(files.commit_log.read(end.last_position, end.last_size), files.config))
    return writer, report


class _Recovery:
    def __init__(self, files: StoreFiles, *, accept_loss: bool = False) -> None:
        self.files = files
        self.accept_loss = accept_loss
        self.log = files.commit_log
        self.state = files.state_file.read()
        self.left = self._left_by(files.read_abort())
        self.report = RecoveryReport("clean")
        self._before: dict[str, list[int]] | None = None
        self.journal = self._read_journal()
        self.below = QueueRuns(files, units=False)
        """The queue offsets of the records below the survey's start, for the queues that are rebuilt from there."""
        self.lost: set[tuple[str, int]] = set()
        """Queues whose folders were deleted by accident."""
        self.short: set[tuple[str, int]] = set()
        """Queues that a broker left complete, and that now end before their last record."""
        self.all_queues = False
        """Whether all queues are rebuilt."""
        self.all_index = False
        """Whether the index is rebuilt."""
        self.without_folder = self._topics_without_folder() if self.journal.queues is None else []
        """Topics of `topics.json` that had no queue when recovery began; empty if the journal lists the queues."""
        self.settled_end: int | None = None
        """The clean end, if a writer of this project crashed and the record before the clean end is in the log."""
        self.to_look_at: dict[str, list[int]] | None = None

    def _left_by(self, abort: str | None) -> Left:
        """Who wrote last, by what `abort` says: it exists from the first write until the store is closed."""
        if abort is None:
            return Left.CLOSED
        return Left.KILLED if abort == self.files.abort_token else Left.CRASHED

    def _queues_before(self) -> dict[str, list[int]]:
        """The queues that had a folder when recovery began; the folders are listed only once."""
        if self._before is None:
            self._before = self.files.queue_names()
        return self._before

    def take_away(self, error: CorruptionError) -> bool:
        """Remove the files of a queue that cannot be used because one of them has a wrong size; False if they stay.

        The files stay unless the seals of a closed store show that the log contains the whole queue.
        """
        files, state = self.files, self.state
        folder, topic, queue_id = os.path.dirname(os.path.dirname(os.path.dirname(error.path))), "", ""
        if folder == files.paths.consume_queue:
            topic, queue_id = error.path.split(os.sep)[-3:-1]
        if not queue_id.isdecimal() or self.left is not Left.CLOSED or state is None or not state.clean:
            return False
        key = topic, int(queue_id)
        if (
            self._checkpoint_is_ours() is not True
            or key not in sealed_at(files, state.clean_end, state.clean_end).seals
        ):
            return False
        if files.disk.size(error.path) == files.config.mapped_file_size_consume_queue:
            return False
        remove_files(files, key)
        return True

    def run(self) -> tuple[LogWriter, RecoveryReport]:
        clean = self._clean_end()
        if clean is not None:
            self.report.start = self.report.end = clean.physical_offset
            return self._writer(clean), self.report
        self._check_segments()
        survey = self._survey()
        self._check_proofs(survey)
        if self.report.lost is not None:
            survey = self._without_partial_batch(survey)
        tail = tail_behind(self.log, survey.end.physical_offset)
        self.report.cut_messages, self.report.cut_queues = tail.message_count, len(tail.queues)
        if self.state is None and self.journal.end:
            self.report.notes.append(f"{self.files.paths.state} was missing or damaged, and was rebuilt")
        # From here on, recovery changes the store.
        self._begin(survey)
        self.files.sweep_temporary()
        self._save_torn(survey)
        self.report.zeroed_bytes = self.log.zero_behind(survey.end.physical_offset)
        self._make_durable(survey)
        if {topic for topic, _ in survey.queues.next_offsets}.intersection(self.without_folder):
            # The repair makes a folder for the queues that have new records. Nothing would then show that the other
            # queues of their topics are missing. So if recovery is killed before it has rebuilt those, the next one
            # rebuilds all queues.
            self._begin_rebuild(queues=True, index=False)
        self._repair_derived(survey)
        self._rebuild_named(survey.end.physical_offset)
        journal = self._journal_of(survey)
        journal.queues = None  # the clean end lists the folders that exist now
        self.files.ends = self._sealed_ends(survey)
        writer = self._publish(survey.end, journal)
        self.report.end = survey.end.physical_offset
        self.report.record_count = survey.record_count
        self.report.stop = survey.stop.reason
        for runs in (self.below, survey.queues):
            self.report.notes += [
                f"{t}/{q}: the queue offsets start again, because the topic was deleted and created again"
                for t, q in runs.restarted
            ]
            self.report.notes += [
                f"{t}/{q}: {count} records repeat the number of another one. They are in the log, but in no queue"
                for (t, q), count in runs.left_out.items()
            ]
        if self.report.changed is not None:
            _LOGGER.error("%s: %s", self.files.paths.root, self.report.changed)
        if self.report.cut is not None:
            _LOGGER.warning("%s: cut off %s", self.files.paths.root, self.report.cut)
        if self.short:
            _LOGGER.warning("%s: %s", self.files.paths.root, self.report.rebuilt)
        return writer, self.report

    # ---- what was there before

    def _clean_end(self) -> LogEnd | None:
        """The end of a store that a Python writer closed and nobody wrote to since then; None for any other store."""
        state = self.state
        if self.left is not Left.CLOSED or state is None or self._rebuild_begun():
            return None
        if self.files.disk.size(self.files.paths.state) != STATE_FILE_SIZE:
            return None
        if (
            not state.clean
            or state.poisoned
            or state.in_flight != NOTHING_IN_FLIGHT
            or state.visible_end != state.clean_end
        ):
            return None
        end = self.anchored
        if end is None or any(self.log.read(state.clean_end, 8)):
            return None
        if self._checkpoint_is_ours() is not True:
            return None  # a broker wrote: it may have cut the log below C first, and it never zeroes what it cuts off
        if end.last_size and self._folder_missing():
            return None
        if self.journal.end > state.clean_end or self._checkpoint_is_ahead(state.clean_end):
            return None  # `state` is older than the log was
        if self.journal.fault or self._topics_changed() or self._batch_units(state.clean_end) < self.journal.covered:
            return None
        later = [s for s in self.log.offsets if s > state.clean_end]
        return None if any(any(self.log.read(s, 8)) for s in later) else end

    def _checkpoint_is_ours(self) -> bool | None:
        """Whether the store checkpoint is as we last wrote it; a broker that appends writes it, too.

        None: this is not known, or there is no store checkpoint.
        """
        files, written = self.files, self.journal.checkpoint_crc
        if written is None or not files.disk.exists(files.paths.checkpoint):
            return None
        return written == record.crc32(self.checkpoint.to_bytes())

    def _checkpoint_is_ahead(self, end: int) -> bool:
        """Whether the store checkpoint names a record at or after a log's end."""
        return 0 < end <= self.checkpoint.confirm_physical_offset

    @cached_property
    def checkpoint(self) -> StoreCheckpoint:
        """The store checkpoint, which recovery does not write before it publishes; all zero if there is none."""
        return store_checkpoint.read(self.files.disk, self.files.paths.checkpoint)

    @cached_property
    def anchored(self) -> LogEnd | None:
        """What `_anchored` said before recovery changed anything."""
        return None if self.state is None else self._anchored(self.state)

    def _anchored(self, state: State) -> LogEnd | None:
        """The log's end at C if the record before it is the one that `state` names, or None."""
        if not state.anchor_size:
            return LogEnd(state.clean_end, 0, 0, 0) if state.clean_end == self.log.min_offset else None
        data = self.log.read(state.anchor_position, state.anchor_size)
        if len(data) != state.anchor_size or record.crc32(data) != state.anchor_crc:
            return None
        head = self.log.head(state.anchor_position)
        if head is None:
            return None
        return LogEnd(state.clean_end, state.anchor_position, state.anchor_size, int(head["store_timestamp_ms"]))

    def _check_segments(self) -> None:
        """Refuse a store with units and no log, or with a log that ends below what was synced: files are missing."""
        path = self.files.paths.commit_log
        state = self.state
        killed = self.left is Left.KILLED
        never_synced = killed and state is not None and state.asynchronous and not state.clean_end
        if not self.log.offsets and not never_synced:
            for topic, queue_ids in self._queues_before().items():
                for queue_id in queue_ids:
                    if self.files.queue(topic, queue_id).end():
                        raise CorruptionError(path, 0, "CommitLog segments", f"none, but {topic}/{queue_id} has units")
        end = max(self.log.max_offset, 0)
        if self.state is not None and self.state.clean_end > end:
            proof = f"spark/state says that the log was synced up to {self.state.clean_end}"
            count, queues, _ = units_behind(self.files, end)
            self._refuse_lost(LostEnd(end, self.state.clean_end, proof, count, queues))

    def _refuse_lost(self, lost: LostEnd) -> None:
        """Refuse a log whose end is lost, unless the caller accepts the loss."""
        if not self.accept_loss:
            raise lost.error(self.log)
        self.report.lost = f"{lost.words} ({lost.proof})"
        _LOGGER.warning("%s: recovery continues without what is lost: %s", self.files.paths.root, self.report.lost)

    # ---- the survey

    def _survey(self) -> Survey:
        files, state, left = self.files, self.state, self.left
        anchored = self.anchored
        if left is Left.CLOSED and state is None and not self.log.offsets:
            self.report.reason = "new"
            before = _EMPTY
        elif left is Left.CLOSED:
            self.report.reason = "closed by a broker"
            before = LogEnd(self.log.min_offset, 0, 0, 0)
            if not self._queues_gone():
                before = LogEnd(*end_of_queues(self.files))
                if anchored is not None and self._leads_to(before.physical_offset, anchored.physical_offset):
                    before = anchored  # the queues that pointed there were deleted with their topics
        elif left is Left.KILLED:
            idle = state is not None and state.idle
            self.report.reason = "not closed, nothing in flight" if idle else "a writer crashed"
            before = anchored or self._newest_chained_segment()
        else:
            self.report.reason = "a broker crashed"
            before = self._broker_start()
            if anchored is not None and anchored.physical_offset > before.physical_offset:
                before = anchored
        self.all_queues, self.all_index = self._queues_gone(), self._index_gone()
        if self.log.offsets and (self.all_queues or self.all_index):
            what = {(True, True): "ConsumeQueues and index", (True, False): "ConsumeQueues"}
            missing = what.get((self.all_queues, self.all_index), "index")
            note = f"{missing}: the files were missing and were rebuilt from the log"
            if self.all_queues:
                self._note_queues(note)
            else:
                self.report.notes.append(note)
        self.report.start = before.physical_offset
        trust = self._trust(anchored=before is anchored)
        if trust.own and state is not None and not self.all_queues:
            self.settled_end = state.clean_end
        self.lost = set() if self.all_queues else self._lost_by_accident()
        doubtful = self.lost
        if trust.left is Left.CLOSED and not self.all_queues:
            self.short = short_queues(files, before.physical_offset)
            doubtful = doubtful | self.short
        while True:
            self._look_below(before.physical_offset, doubtful)
            queues = QueueRuns(files, before.physical_offset, self.below.next_offsets, units=trust.units, own=trust.own)
            survey = Surveyor(files, before, queues, trust).run()
            if queues.doubtful <= doubtful:
                return survey
            doubtful = doubtful | queues.doubtful

    def _trust(self, *, anchored: bool) -> Trust:
        units = not self.all_queues
        if self.left is Left.CLOSED:
            return Trust.closed_by_a_broker(units=units)
        if self.left is Left.CRASHED:
            return Trust.crashed_broker(units=units)
        only_synced = self.state is not None and not self.state.asynchronous
        return Trust.killed_writer(anchored=anchored, only_synced=only_synced, units=units)

    def _leads_to(self, start: int, end: int) -> bool:
        """Whether records follow one another without a gap from `start` to `end`.

        A broker that cut the log below the clean end, and continued there, leaves old records after its own; the record
        before the clean end may be one of them.
        """
        if end <= start:
            return False
        walk = Walk(self.log, start, end, Depth.FRAMING)
        for _ in walk:
            pass
        return walk.position == end

    def _look_below(self, start: int, doubtful: set[tuple[str, int]]) -> None:
        """Collect the queue offsets of records below the survey's start, for queues whose files do not show them."""
        if not doubtful and not self.all_queues:
            return
        self.below = QueueRuns(self.files, self.log.min_offset, units=False)
        for run in Walk(self.log, self.log.min_offset, start, Depth.FRAMING).whole():
            self.below.take(rows_of(run), None if self.all_queues else doubtful)
        self.below.doubtful = doubtful

    def _rebuild_begun(self, what: bytes = b"") -> bool:
        """Whether a recovery was killed while it rebuilt queues (`_QUEUES`), the index (`_INDEX`), or either (b"")."""
        try:
            begun = self.files.disk.read(self.files.paths.rebuild)
        except FileNotFoundError:
            return False
        return not begun or what in begun.split() or not what

    def _begin_rebuild(self, *, queues: bool, index: bool) -> None:
        """Record what is rebuilt: a recovery that is killed meanwhile leaves a part, and the next one starts over."""
        disk, paths = self.files.disk, self.files.paths
        parts = [_QUEUES] * (queues or self._rebuild_begun(_QUEUES)) + [_INDEX] * (index or self._rebuild_begun(_INDEX))
        replace_file(disk, paths.rebuild, b" ".join(parts), via=paths.temporary("rebuild"))

    def _queues_gone(self) -> bool:
        """Whether somebody deleted all queues of a store that had them."""
        files = self.files
        if not self.log.offsets:
            return False
        if self._rebuild_begun(_QUEUES) or not files.disk.is_folder(files.paths.consume_queue):
            return True
        # An empty folder is left by a broker that deleted the only topic.
        return self.left is Left.KILLED and not self._queues_before()

    def _index_gone(self) -> bool:
        """Whether somebody deleted all index files; RocketMQ creates one for the first record that it dispatches."""
        index = self.files.index
        return index is not None and bool(self.log.offsets) and (not index.files or self._rebuild_begun(_INDEX))

    def _folder_missing(self) -> bool:
        """Whether somebody deleted all queues, or all index files, of a closed store. This takes two small reads."""
        disk, paths, index = self.files.disk, self.files.paths, self.files.index
        if not disk.is_folder(paths.consume_queue):  # an empty one is left by a broker that deleted the only topic
            return True
        return index is not None and not index.files and self.checkpoint.index_timestamp_ms > 0

    def _broker_start(self) -> LogEnd:
        """Where a broker's own recovery starts: at the newest segment that is not newer than its checkpoint allows."""
        return LogEnd(self.log.segment_before_time(self.checkpoint.min_timestamp_ms), 0, 0, 0)

    def _newest_chained_segment(self) -> LogEnd:
        """The newest segment with a first record that a unit of its queue points to."""
        self.report.notes.append("the record before the clean end is gone, so recovery began at an earlier segment")
        for segment in reversed(self.log.offsets):
            data = self.log.record_bytes(segment)
            if data is None:
                continue
            try:
                message = record.decode_message(data, physical_offset=segment)
            except CorruptionError:
                continue
            units = self.files.queue(message.topic, message.queue_id).read(message.queue_offset, 1)
            if len(units) and int(units["physical_offset"][0]) == segment:
                return LogEnd(segment, 0, 0, 0)
        return LogEnd(self.log.min_offset, 0, 0, 0)

    def _check_proofs(self, survey: Survey) -> None:
        """Refuse the log if something after its end proves that the bytes at the end were on the disk."""
        end, state = survey.end.physical_offset, self.state
        path = self.log.path_of(end)
        ours, closed = self.left is Left.KILLED, self.left is Left.CLOSED
        expected, found = survey.stop.expected or "a record", survey.stop.found or "none"
        lost = self._lost_end(survey)
        if lost is not None:
            self._refuse_lost(lost)
        elif state is not None and end < state.clean_end:
            proven = ours or (closed and self._checkpoint_is_ours() is not False)
            if proven and not self.accept_loss:
                raise CorruptionError(path, end, f"{expected} (synced up to {state.clean_end})", found)
            self.report.notes.append(
                f"the log ends at {end}, but was synced up to {state.clean_end} before. Either a broker cut it and "
                f"continued there, or the folder spark/ belongs to another copy"
            )
        if not ours and state is not None and self.report.lost is None:
            self.report.changed = self._changed_below(state)
        if closed and self.all_queues and survey.record_count:
            self._check_closed(survey, path)
        if not ours or state is None:
            return
        batch = later_sync_batch(self.files, survey.end)
        if batch is not None:
            raise CorruptionError(
                path, end, f"{expected} (the batch at {batch.physical_offset} proves {batch.end} bytes synced)", found
            )
        if not state.asynchronous and not self.accept_loss:
            for topic, queue_ids in self._queues_to_look_at().items():
                for queue_id in queue_ids:
                    self._check_unit_behind(topic, queue_id, survey, path)

    def _without_partial_batch(self, survey: Survey) -> Survey:
        """The walk, ended before the last batch if a part of that batch is lost with the log's end.

        The log holds a batch completely or not at all, and Spark can send it again.
        """
        end = survey.end.physical_offset
        batch = max(all_batches(self.files, end), key=lambda batch: batch.physical_offset, default=None)
        if batch is None or batch.end <= end:
            return survey
        begin = batch.physical_offset
        before = LogEnd(begin, 0, 0, 0)
        for run in Walk(self.log, self.log.segment_of(begin), begin, Depth.FRAMING):
            before = LogEnd(begin, run.last_offset, run.last_size, run.last_timestamp_ms)
        self.report.notes.append(
            f"app {batch.app_id!r}, version {batch.version}: a part of this batch is lost, and the rest was cut off "
            f"from {begin} on. The batch can be sent again"
        )
        return Survey(begin, before, QueueRuns(self.files, begin, units=True))

    def _lost_end(self, survey: Survey) -> LostEnd | None:
        """The proof that records after the end of the walk are lost, or None."""
        if self.left is Left.CRASHED:
            return None  # a crashed broker leaves units after the end
        by_us = True if self.left is Left.KILLED else self._checkpoint_is_ours()
        end, time_ms = survey.end.physical_offset, survey.end.last_store_timestamp_ms
        return lost_end(self.files, end, time_ms, self.journal, ours=by_us, closed=self.left is Left.CLOSED)

    def _changed_below(self, state: State) -> str | None:
        """What has changed if the record before the clean end is missing, although its segment exists; or None."""
        if not state.anchor_size or state.anchor_position < self.log.min_offset or self.anchored is not None:
            return None
        return (
            f"bytes below {state.clean_end}, which this project had written and synced, have changed: the record at "
            f"{state.anchor_position} is gone. A broker that was started beside a writer, or a restored copy, has "
            f"replaced acknowledged messages. Compare the store with what was sent"
        )

    def _queues_to_look_at(self) -> dict[str, list[int]]:
        """The queues that may have units above the clean end, by topic.

        A crashed writer of this project has left units there only in the queues of records after the clean end. One
        small read of each other queue shows that it has none.
        """
        if self.to_look_at is None:
            names, clean_end = self._queues_before(), self.settled_end
            if clean_end is not None:
                names = {
                    topic: [q for q in queue_ids if not is_settled(self.files, topic, q, clean_end)]
                    for topic, queue_ids in names.items()
                }
            self.to_look_at = names
        return {topic: queue_ids.copy() for topic, queue_ids in self.to_look_at.items()}

    def _check_closed(self, survey: Survey, path: str) -> None:
        """Refuse a closed log without queues that has records after an unreadable one.

        Nothing is torn in a log that was closed, so a record that cannot be read was damaged. The queues, which would
        show where the log ends, are missing.
        """
        end = survey.end.physical_offset
        if survey.stop.reason in ("end", "blank") or not next(heads_behind(self.log, end), None):
            return
        raise CorruptionError(
            path,
            end,
            f"{survey.stop.expected or 'a record'} (the store was closed, and more records follow)",
            survey.stop.found or "none",
            hint="Restore the folder consumequeue, or this segment, from a copy. If a crash left these bytes behind "
            "the log's end, let a broker open and close the store once.",
        )

    def _check_unit_behind(self, topic: str, queue_id: int, survey: Survey, path: str) -> None:
        """Refuse a unit for a record after the end: with SYNC_FLUSH, a unit is written after its record was synced."""
        queue, end = self.files.queue(topic, queue_id), survey.end.physical_offset
        count = queue.end()
        units = queue.read(count - 1, 1)
        if not len(units):
            return  # the queue is empty, or retention has deleted all files but the last, which was just created
        unit = units[0]
        if (
            int(unit["physical_offset"]) + int(unit["size"]) > end
            and int(unit["physical_offset"]) >= self.log.min_offset
        ):
            raise CorruptionError(
                path,
                end,
                f"{survey.stop.expected or 'a record'} (unit {count - 1} of {topic}/{queue_id} proves the record at "
                f"{int(unit['physical_offset'])} synced, or is damaged itself)",
                survey.stop.found or "none",
                hint=f"If records are lost, restore the log from a copy. If the queue is damaged, remove the folder "
                f"{self.files.paths.consume_queue} and run `messagestore recover`, which rebuilds all queues.",
            )

    # ---- changes

    def _begin(self, survey: Survey) -> None:
        """Mark something as in flight in `state`, so that attached writers notice a recovery that dies midway."""
        if self.state is not None:
            own = 0 if self._broker_was_here() else STATE_OWN
            state = replace(
                self.state,
                counter=self.state.counter + 1,
                in_flight=survey.end.physical_offset,
                flags=(self.state.flags & (~(STATE_CLEAN | STATE_OWN) | own)) | STATE_RECOVERING,
            )
            self.state = self.files.state_file.write(state)

    def _save_torn(self, survey: Survey) -> None:
        """Save torn bytes that no replay contains."""
        end = survey.end.physical_offset
        if survey.in_batch or (self.state is not None and self.state.in_flight == end and self._unsealed(end)):
            return
        ranges = self.log.nonzero_ranges(end)
        if not ranges:
            return
        disk, paths = self.files.disk, self.files.paths
        target = os.path.join(paths.cut, f"{end:020d}-{disk.time_ns() // 1_000_000}.bin")
        try:
            disk.mkdir(paths.cut)
            size = min(ranges[-1][1] - end, SAVED_SIZE)
            replace_file(disk, target, bytes(self.log.read_array(end, size)), via=paths.temporary("cut"))
            self.report.saved = target
        except OSError as error:
            self.report.notes.append(f"{ranges[-1][1] - end} torn bytes at {end} could not be saved ({error})")

    def _unsealed(self, end: int) -> bool:
        return not any(self.log.read(end, 8))

    def _make_durable(self, survey: Survey) -> None:
        """Make sure that what is kept above the clean end is on the disk."""
        start, end = survey.start, survey.end.physical_offset
        if self.left is Left.KILLED:
            self.log.rewrite(start, end)
        elif start < end:
            self.log.sync(start, end)

    def _repair_derived(self, survey: Survey) -> None:
        """Make ConsumeQueues and index hold exactly the records of the log from the walk's start on."""
        files, runs = self.files, survey.queues
        dispatcher = Dispatcher(files)
        if self.all_queues or self.all_index or self.short:
            self._begin_rebuild(queues=self.all_queues or bool(self.short), index=self.all_index)
        remade = self.below.remade | runs.remade | self.below.doubtful
        if self.all_queues:
            remade |= {(topic, queue_id) for topic, queue_ids in files.queue_names().items() for queue_id in queue_ids}
        for topic, queue_id in sorted(remade):
            queue = files.queue(topic, queue_id)
            queue.truncate(0)
            files.mark_written(topic, queue_id, queue)
        self._rewind_index(survey, dispatcher)
        if survey.start > self.log.min_offset and (self.all_queues or self.all_index or self.below.doubtful):
            keys = None if self.all_queues else self.below.doubtful
            dispatcher.rebuild(
                self.below, survey.start, keys, queues=self.all_queues or bool(keys), index=self.all_index
            )
        missing = sorted(self.below.doubtful - self.lost)
        if missing:
            self._note_queues(f"{listed(missing)}: units were missing and were rebuilt from the log")
        rest = map(rows_of, Walk(self.log, survey.kept_end, survey.end.physical_offset, Depth.FRAMING))
        dispatcher.dispatch(map(runs.apply, itertools.chain(survey.kept, rest)))
        names = files.queue_names() if self.all_queues else self._queues_to_look_at()
        for topic, queue_id in {**self.below.next_offsets, **runs.next_offsets}:
            queue = files.queue(topic, queue_id)
            if not files.disk.is_folder(queue.directory):
                continue  # its records do not count after all: there is nothing to sync
            queue.note_names()
            files.mark_written(topic, queue_id, queue)
            if queue_id not in names.setdefault(topic, []):
                names[topic].append(queue_id)
        zeroed = 0
        for topic, queue_ids in names.items():
            for queue_id in queue_ids:
                zeroed += self._truncate_queue(topic, queue_id, survey)
        if zeroed:
            self.report.notes.append(f"{zeroed} queues had units behind the log's end, which were set to zero")

    def _rewind_index(self, survey: Survey, dispatcher: Dispatcher) -> None:
        """Take everything from the walk's start on, or everything, out of the index."""
        index = self.files.index
        if index is None:
            return
        if self.all_index:
            index.unlink_all()
        elif self.left is not Left.CLOSED or survey.start < survey.end.physical_offset or self.report.lost is not None:
            dispatcher.rewind_index(survey.start)

    def _truncate_queue(self, topic: str, queue_id: int, survey: Survey) -> bool:
        queue = self.files.queue(topic, queue_id)
        key = (topic, queue_id)
        end = survey.queues.next_offsets.get(key, self.below.next_offsets.get(key))
        if end is None:
            end = proven_queue_end(self.files, topic, queue_id, survey.end.physical_offset, crc=False)
        before = len(queue.written.files), queue.offsets.copy()
        queue.truncate(end)
        if (len(queue.written.files), queue.offsets) == before:
            return False
        self.files.mark_written(topic, queue_id, queue)
        return True

    def _read_journal(self) -> BatchJournal:
        """The journal, or an empty one if it belongs to another store or another log."""
        paths = self.files.paths
        journal = BatchJournal.read(self.files.disk, paths.journal, paths.journal_1)
        other = journal.identity.get("storeId", self.files.store_id)
        if other != self.files.store_id:
            return BatchJournal(complete=False, fault=f"{paths.journal}: found the journal of store {other}")
        fault = self._fault_of_pair(journal)
        if fault:
            return BatchJournal(
                complete=False, fault=f"{paths.journal}: {fault}", checkpoint_crc=journal.checkpoint_crc
            )
        return journal

    def _fault_of_pair(self, journal: BatchJournal) -> str:
        """Why the journal does not belong to this log, or an empty text. The folder spark/ may be that of another copy.

        The writer that closed the store, or moved its clean end, synced the record before the clean end and all batches
        of the journal. If one of them is another record now, the journal says nothing about this log. If it is damaged,
        or the log ends before it, other checks find that.
        """
        log, state = self.log, self.state
        if state is not None and self._changed_below(state) is not None:
            return f"the record at {state.anchor_position}, the last one below the clean end, is another one in the log"
        for app_id, entry in journal.newest_first(log.min_offset):
            at = entry.physical_offset
            if at >= log.max_offset or not any(log.read(at, 8)) or entry.row_count == PARTIAL:
                return ""
            batch = read_batch(log, at)
            if batch is None:
                try:
                    gone = is_gone(log, at, log.max_offset)
                except CorruptionError:
                    return ""
            else:
                found = (batch.app_id, batch.version, batch.digest, batch.end)
                gone = found != (app_id, entry.version, entry.digest, entry.end)
            return f"its newest batch, version {entry.version} of app {app_id!r}, is not at {at} in the log" * gone
        return ""

    def _batch_units(self, end: int) -> int:
        """The number of units of the BATCH topic's queue, for records below `end`."""
        return self.files.queue(BATCH_TOPIC, 0).end(hint=self.journal.covered, limit=end)

    def _journal_up_to(self, end: int) -> BatchJournal:
        """The journal with every batch below `end`; it is rebuilt from the log if the file cannot be used."""
        files, journal = self.files, self.journal
        count = self._batch_units(end)
        if not journal.fault and journal.version == JOURNAL_FORMAT and journal.covered <= count:
            journal.extend(self._own(batches_from(files, journal.covered, count)))
            return journal
        if files.first_writer:
            return BatchJournal(complete=files.searched_whole)
        batches = list(self._own(all_batches(files, end)))
        made = BatchJournal(
            checkpoint_crc=journal.checkpoint_crc,
            complete=not self.log.min_offset or (journal.complete and not journal.fault),
            queues=journal.queues,
        )
        made.carry(journal, self.log.min_offset)
        made.extend(batches)
        made.mark_partial(lambda entry: self._is_partial(entry, end))
        for app_id, entry in journal.newest_first(self.log.min_offset):
            if made.find(app_id, entry.version) is None:
                made.dropped.append((app_id, entry.version))
        if batches and batches[-1].queue_offset >= count:
            Dispatcher(files).rebuild_queue(BATCH_TOPIC, 0, end)
            self._note_queues(f"{BATCH_TOPIC}/0: units were missing and were rebuilt from the log")
        if journal.queues is None:
            self._rebuild_unlisted(batches, end)
        self._note_rebuilt(made)
        return made

    def _own(self, batches: Iterable[BatchRecord]) -> Iterator[BatchRecord]:
        """The batches; raises an error for a batch of another store."""
        for batch in batches:
            if batch.store_id not in self.files.known_ids:
                raise not_ours(self.files, batch)
            yield batch

    def _rebuild_unlisted(self, batches: list[BatchRecord], end: int) -> None:
        """Rebuild missing queues if no journal lists the queues that had messages.

        `topics.json` and the BATCH records name the queues that must exist.
        """
        files = self.files
        there = files.queue_names()
        known = {*files.topics.names, BATCH_TOPIC}
        topics = [topic for topic in self.without_folder if topic not in there]  # the repair made the others
        of_batches = {(t, q) for batch in batches for t, runs in batch.ranges.items() for q, _, _ in runs}
        lost = {(t, q) for t, q in of_batches if t in known and q not in there.get(t, ())}
        if not (lost or topics) or not end:
            return
        rebuilt = Dispatcher(files).rebuild_queues(lost, end, topics)
        if rebuilt:
            self._note_queues(f"{listed(rebuilt)}: the queues' folders were missing and were rebuilt from the log")

    def _rebuild_named(self, end: int) -> None:
        """Rebuild queues that a broker's store has lost: `topics.json` names their topic, which has no folder.

        A broker that deletes a topic first removes its name there. A topic that was never used has no folder either, so
        only the log shows which topics lost their queues. A log of up to `LOOKED_THROUGH_SIZE` is searched; for a
        longer one, the report names the topics.
        """
        files = self.files
        topics = [topic for topic in self.without_folder if put_topic_fault(topic) is None]
        if not topics or not end or self.all_queues:
            return
        if end - self.log.min_offset > LOOKED_THROUGH_SIZE:
            names = ", ".join(topics[:5]) + (f" and {len(topics) - 5} more" if len(topics) > 5 else "")
            self.report.notes.append(
                f"topics.json names topics without a folder in consumequeue: {names}. Either they were never used, or "
                f"their queues are lost; the log was too long to be searched for their records. `messagestore verify` "
                f"tells which. To rebuild all queues, remove the folder consumequeue and run `messagestore recover`"
            )
            return
        self._begin_rebuild(queues=True, index=False)  # if killed from here on, the next recovery rebuilds all queues
        rebuilt = Dispatcher(files).rebuild_queues((), end, topics)
        if rebuilt:
            self._note_queues(f"{listed(rebuilt)}: the queues' folders were missing and were rebuilt from the log")

    def _note_queues(self, note: str) -> None:
        """Report which queues were missing and rebuilt."""
        self.report.notes.append(note)
        self.report.rebuilt = f"{self.report.rebuilt}; {note}" if self.report.rebuilt else note

    def _note_rebuilt(self, made: BatchJournal) -> None:
        fault, state = self.journal.fault, self.state
        never_written = fault == MISSING and state is not None and not state.clean_end
        if not fault or never_written or not self.log.offsets:
            return
        why = "was missing" if fault == MISSING else f"could not be used ({fault})"
        note = f"{self.files.paths.journal} {why}, and was rebuilt from the log with {len(made)} batches"
        if not made.complete:
            note += ". The log does not begin at 0, so batches that retention has deleted are not in it"
        self.report.notes.append(note)

    def _journal_of(self, survey: Survey) -> BatchJournal:
        journal = self._journal_up_to(survey.end.physical_offset)
        if self.left is not Left.KILLED:
            clean_end = max(self.state.clean_end if self.state is not None else 0, self.log.min_offset)
            end = survey.end.physical_offset
            for app_id, version in journal.mark_partial(lambda entry: self._is_partial(entry, end), above=clean_end):
                self.report.notes.append(
                    f"app {app_id!r}, version {version}: a power cut took a part of this batch, and a broker appended "
                    "to the rest"
                )
        return journal

    def _is_partial(self, entry: JournalEntry, end: int) -> bool:
        """Whether data of a batch are missing: a broker found an ASYNC one above C torn, and appended after it."""
        if not self.log.min_offset <= entry.physical_offset < end:
            return False
        batch = read_batch(self.log, entry.physical_offset)
        if batch is None:
            return False  # it is missing or damaged, which the check of the journal finds
        return batch.end > end or (batch.flush_disk_type == ASYNC_FLUSH and bad_chunk(self.files, batch) is not None)

    def _topics_changed(self) -> bool:
        """Whether a topic that had units at the last clean end has no folder now.

        A broker that deletes a topic also removes it from `topics.json`: the journal then forgets the topic, and if it
        is created again, it begins without messages. If only the folder is missing, that is an accident, and its queues
        are rebuilt.
        """
        there = set(self.files.disk.names(self.files.paths.consume_queue))
        return any(topic not in there for topic in self.journal.queues or ())

    def _topics_without_folder(self) -> list[str]:
        there = self._queues_before()
        return [topic for topic in (*self.files.topics.names, BATCH_TOPIC) if topic not in there]

    def _lost_queues(self) -> list[tuple[str, int]]:
        """Queues without a folder that had units at the last clean end, and whose topics nobody deleted."""
        files, queues = self.files, self.journal.queues or {}
        there = self._queues_before()
        known = {*files.topics.names, BATCH_TOPIC}
        return [
            (topic, queue_id)
            for topic, ranges in queues.items()
            if topic in known
            for first, last in ranges
            for queue_id in sorted(set(range(first, last + 1)) - set(there.get(topic, ())))
        ]

    def _is_new(self) -> bool:
        """Whether the store contains nothing yet that a broker could have written."""
        return self.left is Left.CLOSED and not self.log.offsets and not self.files.queue_names()

    def _broker_was_here(self) -> bool:
        """Whether anything shows that a broker has opened the store since a Python writer last had it open.

        `abort` and the store checkpoint show that a broker wrote; a missing topic shows that a broker deleted it.
        `State.own` keeps this for good, because what a broker leaves in a queue stays there.
        """
        if self.left is Left.CRASHED or (self.left is Left.CLOSED and self._checkpoint_is_ours() is not True):
            return True
        names, there = {*self.files.topics.names, BATCH_TOPIC}, self.files.queue_names()
        return any(topic not in names and topic not in there for topic in self.journal.queues or ())

    def _broker_wrote(self) -> bool:
        """Whether a broker wrote after the last Python writer; it leaves another store checkpoint."""
        return self.left is Left.CRASHED or (self.left is Left.CLOSED and self._checkpoint_is_ours() is False)

    def _lost_by_accident(self) -> set[tuple[str, int]]:
        """Queues whose folders are missing, and that no broker can have deleted; they are rebuilt from the log."""
        lost = self._lost_queues()
        if not lost:
            return set()
        names = listed(lost)
        if self._broker_wrote():
            self.report.notes.append(
                f"{names}: the queues had messages, but have no folder now. They were not rebuilt, because a broker "
                "has used the store since, and may have deleted the topic and created it again"
            )
            return set()
        self._note_queues(f"{names}: the queues' folders were missing and were rebuilt from the log")
        return set(lost)

    def _sealed_ends(self, survey: Survey) -> SealedEnds:
        """The ends of the queues. They are read from the queues' files if a broker wrote, which may delete topics."""
        files, state = self.files, self.state
        ends = SealedEnds()
        ours = self.left is Left.KILLED or (self.left is Left.CLOSED and self._checkpoint_is_ours() is True)
        if ours and not self.all_queues and state is not None and self._anchored(state) is not None:
            clean_end = state.clean_end
            ends = sealed_at(files, clean_end, max(clean_end, min(survey.start, survey.end.physical_offset)))
            for key in [key for key in ends.seals if is_deleted(files, key)]:
                ends.answer(key, None)
        else:
            for topic, queue_ids in files.queue_names().items():
                for queue_id in queue_ids:
                    ends.ask((topic, queue_id))
        for key, count in {**self.below.next_offsets, **survey.queues.next_offsets}.items():
            ends.ask(key, count)
        return ends

    def _publish(self, end: LogEnd, journal: BatchJournal) -> LogWriter:
        files = self.files
        old = self.state
        state = State(
            counter=old.counter + 1 if old is not None else 1,
            in_flight=NOTHING_IN_FLIGHT,
            visible_end=end.physical_offset,
            clean_end=0,
            anchor_position=0,
            anchor_size=0,
            anchor_crc=0,
            boot_hash=boot_hash(),
            # STATE_ASYNC stays set: units after the log's end were zeroed, and they must not prove anything until the
            # zeros are on the disk (`CleanEnd.move`).
            flags=old.flags & (STATE_ASYNC | STATE_OWN) if old is not None else STATE_OWN * self._is_new(),
            writer_pid=os.getpid(),
            known_flushed_end=UNKNOWN_FLUSHED_END if old is None else min(old.known_flushed_end, end.physical_offset),
        )
        if old is None or files.disk.size(files.paths.state) != STATE_FILE_SIZE:
            files.state_file.create(files.paths.temporary("state"), state)
        else:
            if end.physical_offset >= old.clean_end:
                state = replace(
                    state,
                    clean_end=old.clean_end,
                    anchor_position=old.anchor_position,
                    anchor_size=old.anchor_size,
                    anchor_crc=old.anchor_crc,
                )
            files.state_file.write(state)
        writer = LogWriter(files, state, end, journal)
        # A broker may have cut the log anywhere; without a broker, nothing below the walk's start has changed.
        above = min(self.report.start, end.physical_offset) if self.left is Left.KILLED else 0
        journal.check(lambda app_id, entry: batch_is_there(files, end.physical_offset, app_id, entry), above=above)
        for app_id, version in journal.dropped:
            self.report.notes.append(
                f"app {app_id!r}, version {version}: the batch is gone from the log, and was removed from the journal"
            )
        closed = self.left is Left.CLOSED
        if end.physical_offset or not closed:
            writer.clean_end.move(closing=closed)
        if not closed:
            writer.ensure_abort()
        if self._rebuild_begun():
            files.disk.unlink(files.paths.rebuild)
        return writer

    def _writer(self, end: LogEnd) -> LogWriter:
        """The writer of a clean store, for which only the journal is read."""
        assert self.state is not None
        files, old = self.files, self.journal
        writer = LogWriter(files, self.state, end, self._journal_up_to(end.physical_offset))
        if old.version != JOURNAL_FORMAT:
            writer.clean_end.move(closing=True)  # this writes the journal in the newest format
        return writer
