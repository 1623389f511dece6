"""Changes the files as recovery has decided.

Every change may be the last one, because the process may be killed behind it. The order is such that the next recovery
then leaves the same bytes: `state` says first that a recovery is at work, what is cut off is saved before it is zeroed,
what is kept is on the disk before anything is dispatched, and V moves last.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from messagestore.errors import CorruptionError, SyncFailedError
from messagestore.files.disk import replace_file, sync_errors
from messagestore.files.recoveries import keep_recovery
from messagestore.files.state import NOTHING_IN_FLIGHT, UNKNOWN_FLUSHED_END, State, boot_hash
from messagestore.format.layout import STATE_ASYNC, STATE_CLEAN, STATE_FILE_SIZE, STATE_OWN, STATE_RECOVERING
from messagestore.format.message import put_topic_fault
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.batch_search import batch_is_there
from messagestore.log.condition import Start
from messagestore.log.dispatch import Dispatcher, remove_files
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.seal_check import is_deleted, keep_number, listed, sealed_at
from messagestore.log.sealed_ends import SealedEnds
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Walk, rows_of
from messagestore.recovery.decide import Derived, Durable, IndexStep, Key, Plan
from messagestore.recovery.examine import Examination, rebuild_begun, rebuild_words
from messagestore.recovery.journal import is_partial, journal_up_to
from messagestore.signal_handlers import pass_on
from messagestore.writer.log_writer import LogWriter

_LOGGER = logging.getLogger(__name__)
SAVED_SIZE = 64 * 1024 * 1024
"""Recovery saves at most this many torn bytes to `spark/cut/`."""
LOOKED_THROUGH_SIZE = 1 << 30
"""Recovery searches a broker's log of at most this many bytes for the records of topics whose folders are missing."""


def take_away(examined: Examination, error: CorruptionError) -> bool:
    """Remove the files of a queue that cannot be used because one of them has a wrong size; False if they stay.

    The files stay unless the seals of a closed store show that the log contains the whole queue.
    """
    files, state = examined.files, examined.state
    folder, topic, queue_id = os.path.dirname(os.path.dirname(os.path.dirname(error.path))), "", ""
    if folder == files.paths.consume_queue:
        topic, queue_id = error.path.split(os.sep)[-3:-1]
    if not queue_id.isdecimal() or examined.condition.start is not Start.NOWHERE or state is None:
        return False

    key = topic, int(queue_id)
    if key not in sealed_at(files, state.clean_end, state.clean_end).seals:
        return False
    if files.disk.size(error.path) == files.config.mapped_file_size_consume_queue:
        return False
    remove_files(files, key)
    return True


def apply(examined: Examination, plan: Plan) -> LogWriter:
    """Change the files as `plan` says, and publish the log's end.

    The report of the plan gets what was done.
    """
    return _Changes(examined.files, examined.journal, examined.without_folder, plan).run()


class _Changes:
    """The changes of one recovery."""

    def __init__(self, files: StoreFiles, journal: BatchJournal, without_folder: Sequence[str], plan: Plan) -> None:
        self.files = files
        self.log = files.commit_log
        self.plan = plan
        self.report = plan.report
        self.survey = plan.survey
        self.journal = journal
        self.without_folder = without_folder
        self.state = plan.before
        """`state`, as it is now."""
        self.begun_ms = files.disk.time_ns() // 1_000_000
        self.kept_report: dict[str, Any] | None = None
        """The report as it is in `spark/recoveries.json`."""

    def run(self) -> LogWriter:
        """Make the changes."""
        end, survey = self.plan.end, self.survey
        self._begin()
        self.files.keep_levels(self.log.delay_levels)
        self.files.sweep_temporary()

        if self.plan.save:
            self._save(end)
        self.report.zeroed_bytes = self.log.zero_behind(end)
        self._make_durable()

        # The repair makes a folder for the queues that have new records. Nothing would then show that the other queues
        # of their topics are missing. So if recovery is killed before it has rebuilt those, the next one rebuilds all.
        if {topic for topic, _ in survey.queues.next_offsets}.intersection(self.without_folder):
            self._begin_rebuild(Derived.QUEUES)

        self._repair_derived()
        self._keep_numbers()
        self._note_remade()
        self._rebuild_named(end)

        journal = self._whole_journal()
        journal.queues = None  # the clean end lists the folders that exist now
        self.files.ends = self._sealed_ends()
        self._note_numbers()
        self._keep_report()  # from `_publish` on, no other recovery would find what this one has mended
        writer = self._publish(journal)
        self._keep_report()
        return writer

    # ---- the log

    def _begin(self) -> None:
        """Mark something as in flight in `state`, so that attached writers notice a recovery that dies midway."""
        before = self.plan.before
        if before is not None:
            own = 0 if self.plan.broker_was_here else STATE_OWN
            state = replace(
                before,
                counter=before.counter + 1,
                in_flight=self.plan.end,
                flags=(before.flags & (~(STATE_CLEAN | STATE_OWN) | own)) | STATE_RECOVERING,
            )
            self.state = self.files.state_file.write(state)

    def _save(self, end: int) -> None:
        """Save the bytes that are cut off."""
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
            pass_on(error)
            self.report.notes.append(f"{ranges[-1][1] - end} torn bytes at {end} could not be saved ({error})")

    def _make_durable(self) -> None:
        """Make sure that what is kept above the clean end is on the disk."""
        start, end = self.survey.start, self.plan.end
        # The dead writer may have created segments, also behind the end: they stay, and their names may be unsynced.
        self.log.note_names()
        # After a failed sync, the page cache may show bytes that are not on the disk, so they are written again.
        if self.plan.durable is Durable.REWRITTEN:
            self.log.rewrite(start, end)
        elif start < end:
            self.log.sync(start, end)

    # ---- queues and index

    def _begin_rebuild(self, what: Derived) -> None:
        """Record what is rebuilt: a recovery that is killed meanwhile leaves a part, and the next one starts over."""
        disk, paths = self.files.disk, self.files.paths
        replace_file(
            disk, paths.rebuild, rebuild_words(what | rebuild_begun(self.files)), via=paths.temporary("rebuild")
        )

    def _repair_derived(self) -> None:
        """Make ConsumeQueues and index hold exactly the records of the log from the walk's start on."""
        plan, files, survey = self.plan, self.files, self.survey
        runs, below, dispatcher = survey.queues, plan.below, Dispatcher(files)
        all_queues = Derived.QUEUES in plan.remade

        # Before the first file changes, so that after a kill the next recovery starts over.
        if plan.remade or plan.short:
            self._begin_rebuild(plan.remade | (Derived.QUEUES if plan.short else Derived.NOTHING))

        remade = below.remade | runs.remade | below.doubtful
        if all_queues:
            remade |= {(topic, queue_id) for topic, queue_ids in files.queue_names().items() for queue_id in queue_ids}
        for topic, queue_id in sorted(remade):
            queue = files.queue(topic, queue_id)
            queue.truncate(0)
            files.mark_written(topic, queue_id, queue)

        self._rewind_index(dispatcher)
        if survey.start > self.log.min_offset and (plan.remade or below.doubtful):
            keys = None if all_queues else below.doubtful
            dispatcher.rebuild(
                below,
                survey.start,
                keys,
                queues=all_queues or bool(keys),
                index=Derived.INDEX in plan.remade,
            )

        missing = sorted((below.doubtful | runs.remade.difference(runs.restarted)) - plan.lost_queues)
        if missing:
            self.report.note_queues(f"{listed(missing)}: units were missing and were rebuilt from the log")

        rest = map(rows_of, Walk(self.log, survey.kept_end, plan.end, Depth.FRAMING))
        dispatcher.dispatch(map(runs.apply, itertools.chain(survey.kept, rest)))

        self._truncate_queues()

    def _rewind_index(self, dispatcher: Dispatcher) -> None:
        """Take everything from the walk's start on, or everything, out of the index."""
        index, step = self.files.index, self.plan.index
        if index is None:
            return
        if step is IndexStep.REMADE:
            index.unlink_all()
        elif step is IndexStep.REWOUND:
            dispatcher.rewind_index(self.survey.start)

    def _truncate_queues(self) -> None:
        """Set the units behind the log's end to zero."""
        plan, files = self.plan, self.files
        if Derived.QUEUES in plan.remade:
            names = files.queue_names()
        else:
            names = {topic: queue_ids.copy() for topic, queue_ids in plan.to_look_at.items()}

        for topic, queue_id in {**plan.below.next_offsets, **self.survey.queues.next_offsets}:
            queue = files.queue(topic, queue_id)
            if not files.disk.is_folder(queue.directory):
                continue  # its records do not count after all: there is nothing to sync
            queue.note_names()
            files.mark_written(topic, queue_id, queue)
            if queue_id not in names.setdefault(topic, []):
                names[topic].append(queue_id)

        if plan.broker_was_here:
            self.log.remove_unmade()

        zeroed = 0
        for topic, queue_ids in names.items():
            for queue_id in queue_ids:
                zeroed += self._truncate_queue(topic, queue_id)
                if plan.broker_was_here:
                    files.queue(topic, queue_id).remove_unmade()
        if zeroed:
            self.report.notes.append(f"{zeroed} queues had units behind the log's end, which were set to zero")

    def _truncate_queue(self, topic: str, queue_id: int) -> bool:
        """Set a queue's units behind the log's end to zero; whether there were any."""
        queue, key = self.files.queue(topic, queue_id), (topic, queue_id)
        end = self.survey.queues.next_offsets.get(key, self.plan.below.next_offsets.get(key))
        if end is None:
            end = proven_queue_end(self.files, topic, queue_id, self.plan.end, crc=False)

        before = len(queue.written.files), queue.offsets.copy()
        queue.truncate(end)
        changed = (len(queue.written.files), queue.offsets) != before
        if changed:
            self.files.mark_written(topic, queue_id, queue)
        if not queue.offsets and not self._may_have_had_units(key):
            self._remove_folder(key, queue.directory)
        return changed

    def _may_have_had_units(self, key: Key) -> bool:
        """Whether a queue had units at the clean end, or nothing tells."""
        journal, state = self.journal, self.plan.before
        if not self.plan.seals_hold or journal.queues is None or state is None or journal.end != state.clean_end:
            return True
        return journal.had_queue(*key) or key in self._seals

    @cached_property
    def _seals(self) -> Collection[Key]:
        return SealedEnds.read(self.files.disk, self.files.paths.ends, self.log.max_offset).seals

    def _remove_folder(self, key: Key, directory: str) -> None:
        """Remove the folder of a queue that a crash has left without a file before the queue got its first message.

        The journal, which lists the folders, would say that the queue had messages. If those of a deleted topic have
        its name, they would then seem to be lost.
        """
        disk = self.files.disk
        if not disk.is_folder(directory) or disk.names(directory):
            return
        self.files.drop_queue(*key)
        self.files.ever_written.discard(key)
        disk.rmdir(directory)
        with sync_errors(directory):
            disk.fsync_dir(os.path.dirname(directory))

    def _keep_numbers(self) -> None:
        """Make again the last unit of each queue that was rebuilt and has no message left, so that it numbers on.

        Retention leaves the newest file of such a queue; its units point below the first segment, and RocketMQ takes
        the number after the last one. The log cannot give these units back, but the seal has the last one. Where no
        seal can be trusted, or a queue ends lower than its seal says, the report names the queue.
        """
        plan, files = self.plan, self.files
        all_queues = Derived.QUEUES in plan.remade
        if not all_queues and not plan.lost_queues:
            return

        written = SealedEnds.read(files.disk, files.paths.ends, self.log.max_offset).seals
        ends = SealedEnds()
        if plan.before is not None and plan.seals_hold:
            ends = sealed_at(files, plan.before.clean_end, plan.before.clean_end)

        listed_before = {
            (topic, queue_id)
            for topic, ranges in (self.journal.queues or {}).items()
            for first, last in ranges
            for queue_id in range(first, last + 1)
        }

        notes: list[str] = []
        for key in sorted(listed_before | written.keys()):
            if (not all_queues and key not in plan.lost_queues) or is_deleted(files, key):
                continue

            keep_number(files, ends, key)
            end, name = files.queue(*key).end(), f"{key[0]}/{key[1]}"
            if key in written and end < written[key].end:
                notes.append(
                    f"{name}: the next message gets number {end}, although spark/ends names {written[key].end}. Who "
                    f"has read further than {end} must read this queue from {end} on"
                )
            elif key not in written and not end:
                notes.append(
                    f"{name}: no message is left, and nothing tells the number of the last one, so the next message "
                    f"gets number 0. Who has read this queue must read it from 0 on"
                )

        if notes:  # whoever only opens the store does not see the report
            more = f" ({len(notes) - 1} more queues)" if len(notes) > 1 else ""
            _LOGGER.warning("%s: %s%s", files.paths.root, notes[0], more)
            self.report.notes += notes

    def _note_remade(self) -> None:
        """Report that queues or index were missing and were made again.

        A log may hold only records without a unit (PREPARED, ROLLBACK): then no queue was missing.
        """
        remade, index = self.plan.remade, self.files.index
        note = f"{remade.words}: the files were missing and were rebuilt from the log"
        if Derived.QUEUES in remade and self.files.queue_keys():
            self.report.note_queues(note)
        elif Derived.INDEX in remade and index is not None and index.files:
            note = f"{Derived.INDEX.words}: the files were missing and were rebuilt from the log"
            self.report.notes.append(note)

    def _note_numbers(self) -> None:
        """Report the records whose numbers do not follow the ones before them."""
        for runs in (self.plan.below, self.survey.queues):
            self.report.notes += [
                f"{topic}/{queue_id}: the queue offsets start again, because the topic was deleted and created again"
                for topic, queue_id in runs.restarted
            ]
            self.report.notes += [
                f"{topic}/{queue_id}: {count} records repeat the number of another one. They are in the log, but in no "
                f"queue"
                for (topic, queue_id), count in runs.left_out.items()
            ]

    def _rebuild_named(self, end: int) -> None:
        """Rebuild queues that a broker's store has lost: `topics.json` names their topic, which has no folder.

        A broker that deletes a topic first removes its name there. A topic that was never used has no folder either, so
        only the log shows which topics lost their queues. A log of up to `LOOKED_THROUGH_SIZE` is searched; for a
        longer one, the report names the topics.
        """
        files = self.files
        topics = [topic for topic in self.without_folder if put_topic_fault(topic) is None]
        if not topics or not end or Derived.QUEUES in self.plan.remade:
            return
        if end - self.log.min_offset > LOOKED_THROUGH_SIZE:
            names = ", ".join(topics[:5]) + (f" and {len(topics) - 5} more" if len(topics) > 5 else "")
            self.report.notes.append(
                f"topics.json names topics without a folder in consumequeue: {names}. Either they were never used, or "
                f"their queues are lost; the log was too long to be searched for their records. `messagestore verify` "
                f"tells which. To rebuild all queues, remove the folder consumequeue and run `messagestore recover`"
            )
            return
        self._begin_rebuild(Derived.QUEUES)  # if killed from here on, the next recovery rebuilds all queues
        rebuilt = Dispatcher(files).rebuild_queues((), end, topics)
        if rebuilt:
            self.report.note_queues(
                f"{listed(rebuilt)}: the queues' folders were missing and were rebuilt from the log"
            )

    # ---- the small files

    def _keep_report(self) -> None:
        """Keep the report for those who ask later, if something was mended and the file does not say so yet.

        A disk without room does not stop a recovery: the report is then only in the program's log.
        """
        report = {"recoveredTime": self.begun_ms, **self.report.to_fields()}
        if not self.report.has_news or report == self.kept_report:
            return
        disk, paths = self.files.disk, self.files.paths
        try:
            keep_recovery(disk, paths.recoveries, report, via=paths.temporary("recoveries.json"))
        except SyncFailedError:
            raise
        except OSError as error:
            pass_on(error)
            _LOGGER.warning("%s: the report of this recovery could not be kept: %s", paths.root, error)
        self.kept_report = report

    def _whole_journal(self) -> BatchJournal:
        """The journal with every batch of the log."""
        files, plan, end = self.files, self.plan, self.plan.end
        journal = journal_up_to(
            files, self.journal, end, self.report, before=plan.before, without_folder=self.without_folder
        )
        if plan.condition.ours_open:
            return journal

        clean_end = max(plan.before.clean_end if plan.before is not None else 0, self.log.min_offset)
        for app_id, version in journal.mark_partial(lambda entry: is_partial(files, entry, end), above=clean_end):
            self.report.notes.append(
                f"app {app_id!r}, version {version}: a power cut took a part of this batch, and a broker appended to "
                "the rest"
            )
        return journal

    def _sealed_ends(self) -> SealedEnds:
        """The ends of the queues. They are read from the queues' files if a broker wrote, which may delete topics."""
        plan, files, ends = self.plan, self.files, SealedEnds()
        if plan.seals_hold and Derived.QUEUES not in plan.remade and plan.before is not None:
            clean_end = plan.before.clean_end
            ends = sealed_at(files, clean_end, max(clean_end, min(self.survey.start, plan.end)))
            for key in [key for key in ends.seals if is_deleted(files, key)]:
                ends.answer(key, None)
        else:
            for topic, queue_ids in files.queue_names().items():
                for queue_id in queue_ids:
                    ends.ask((topic, queue_id))
        for key in plan.lost_queues:
            ends.answer(key, None)  # its CRC may cover units that the log could not give back
            ends.ask(key)
        for key, count in {**plan.below.next_offsets, **self.survey.queues.next_offsets}.items():
            ends.ask(key, count)
        return ends

    def _publish(self, journal: BatchJournal) -> LogWriter:
        """Write `state` and make the writer, move the clean end, and make `abort` ours if the store was not closed."""
        files, plan, old, end = self.files, self.plan, self.state, self.survey.end
        new_flags = STATE_OWN if plan.is_new else 0
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
            flags=new_flags if old is None else old.flags & (STATE_ASYNC | STATE_OWN),
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
        journal.check(
            lambda app_id, entry: batch_is_there(files, end.physical_offset, app_id, entry), above=plan.changed_from
        )
        for app_id, version in journal.dropped:
            self.report.notes.append(
                f"app {app_id!r}, version {version}: the batch is gone from the log, and was removed from the journal"
            )

        closed = plan.condition.closed
        if end.physical_offset or not closed:
            writer.clean_end.move(closing=closed)
        if not closed:
            writer.ensure_abort()

        # Until here, a recovery that was killed has to rebuild again.
        if rebuild_begun(files):
            files.disk.unlink(files.paths.rebuild)
        return writer
