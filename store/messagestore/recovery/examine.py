"""Examines a store that recovery opens. Nothing here changes a file.

`Examination` reads in three steps, and each thing once:

    objection    what speaks against going on at the clean end, as after a close
    inventory    what the small files, the folders and the record before C show
    walk         which records count, and what lies behind the last one of them
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from messagestore.errors import CorruptionError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.checkpoint import StoreCheckpoint
from messagestore.format import record
from messagestore.format.batch_record import BatchRecord
from messagestore.format.half_records import DISCARD_TOPIC, HALF_TOPIC, OP_TOPIC
from messagestore.format.layout import STATE_FILE_SIZE
from messagestore.format.message import BATCH_TOPIC, is_own_topic
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.batch_search import all_batches
from messagestore.log.condition import CONDITIONS, Promise, Start, Writer, look
from messagestore.log.dispatch import QueueRuns
from messagestore.log.log_end import LogEnd, is_anchored
from messagestore.log.lost_end import LostEnd, end_of_queues, lost_end, units_behind
from messagestore.log.queue_proof import is_settled
from messagestore.log.seal_check import short_queues
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Walk, leads_to, rows_of
from messagestore.recovery.decide import (
    Behind,
    Derived,
    Evidence,
    Inventory,
    Key,
    Place,
    RecordBehind,
    UnitBehind,
    WalkStart,
)
from messagestore.recovery.journal import batch_units, read_journal
from messagestore.recovery.log_tail import heads_behind, later_sync_batch, tail_behind
from messagestore.recovery.survey import Survey, Surveyor
from messagestore.signal_handlers import pass_on

_OWN_TOPICS = (BATCH_TOPIC, SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, DISCARD_TOPIC)
"""The topics that this project writes without a name in `topics.json`."""
_QUEUES, _INDEX = b"queues", b"index"
"""The words that `spark/rebuild` may contain."""


def rebuild_begun(files: StoreFiles) -> Derived:
    """What a recovery was making again when it was killed, as `spark/rebuild` says."""
    try:
        words = files.disk.read(files.paths.rebuild).split()
    except FileNotFoundError as error:
        pass_on(error)
        return Derived.NOTHING
    begun = Derived.NOTHING
    if _QUEUES in words:
        begun |= Derived.QUEUES
    if _INDEX in words:
        begun |= Derived.INDEX
    return begun or Derived.BOTH  # what cannot be read says at least that something was begun


def rebuild_words(begun: Derived) -> bytes:
    """The content of `spark/rebuild`."""
    return b" ".join(word for part, word in ((Derived.QUEUES, _QUEUES), (Derived.INDEX, _INDEX)) if part in begun)


class Examination:
    """What one recovery reads.

    Parameters
    ----------
    files : StoreFiles
        The loaded files of the store; the caller is attached and holds the writer lock.
    """

    def __init__(self, files: StoreFiles) -> None:
        self.files = files
        self.log = files.commit_log
        self.state = files.state_file.read()
        self.journal = read_journal(files, self.state, self.anchored)

        # A journal that belongs to another store or log says nothing of how the store was left.
        counter = -1 if self.state is None else self.state.counter
        self.left = look(files, Promise(counter, self.journal.checkpoint_crc)).left
        self.condition = CONDITIONS[self.left]

        self.without_folder = self._topics_without_folder() if self.journal.queues is None else []
        """Topics of `topics.json` that had no queue when recovery began; empty if the journal lists the queues."""

    @cached_property
    def checkpoint(self) -> StoreCheckpoint:
        """The store checkpoint; all zero if there is none."""
        return store_checkpoint.read(self.files.disk, self.files.paths.checkpoint)

    @cached_property
    def anchored(self) -> LogEnd | None:
        """The log's end at C if the record before it is the one that `state` names, or None."""
        state = self.state
        if state is None or not is_anchored(self.log, state):
            return None
        if not state.anchor_size:
            return LogEnd(state.clean_end, 0, 0, 0)
        head = self.log.head(state.anchor_position)
        if head is None:
            return None
        return LogEnd(state.clean_end, state.anchor_position, state.anchor_size, int(head["store_timestamp_ms"]))

    @cached_property
    def queues(self) -> dict[str, list[int]]:
        """The queues that had a folder when recovery began."""
        return self.files.queue_names()

    # ---- a store that was closed

    def objection(self) -> str:
        """What speaks against going on at the clean end without a walk; empty for a store that a writer of ours closed.

        A broker that wrote may have cut the log below C first, and never zeroes what it cuts off.
        """
        files, state, journal = self.files, self.state, self.journal
        if self.condition.start is not Start.NOWHERE or state is None:
            return "the store was not closed by a writer of ours"
        if rebuild_begun(files):
            return "a recovery was killed while it rebuilt queues or index"
        if files.disk.size(files.paths.state) != STATE_FILE_SIZE:
            return "`state` has another size"
        if state.poisoned or not state.nothing_in_flight:
            return "something was in flight"

        clean_end = state.clean_end
        if self.anchored is None:
            return "the record before C is another one"
        if any(self.log.read(clean_end, 8)):
            return "there are bytes at C"
        if self.anchored.last_size and self._folder_missing():
            return "queues or index are missing"
        if journal.end > clean_end or 0 < clean_end <= self.checkpoint.confirm_physical_offset:
            return "`state` is older than the log was"
        if journal.fault:
            return "the journal cannot be used"
        if self._queues_changed():
            return "the folder of a queue is missing"
        if batch_units(files, journal, clean_end) < journal.covered:
            return "the queue of BATCH records is shorter than the journal says"
        if any(any(self.log.read(segment, 8)) for segment in self.log.offsets if segment > clean_end):
            return "a later segment has bytes"
        return ""

    def _folder_missing(self) -> bool:
        """Whether somebody deleted all queues, or all index files, of a closed store. This takes two small reads."""
        disk, paths, index = self.files.disk, self.files.paths, self.files.index
        if not disk.is_folder(paths.consume_queue):  # an empty one is left by a broker that deleted the only topic
            return self.journal.queues != {}  # if the log had only records without a unit, there never was a folder
        return index is not None and not index.files and self.checkpoint.index_timestamp_ms > 0

    def _queues_changed(self) -> bool:
        """Whether a queue that had units at the last clean end has no folder now.

        A broker that deletes a topic also removes it from `topics.json`: the journal then forgets the topic, and if it
        is created again, it begins without messages. If only the folder is missing, that is an accident, and its queues
        are rebuilt. Until then they would seem to be empty beside a session that writes to others.
        """
        return any(
            not set(range(first, last + 1)) <= set(self.queues.get(topic, ()))
            for topic, ranges in (self.journal.queues or {}).items()
            for first, last in ranges
        )

    # ---- before the walk

    def inventory(self) -> Inventory:
        """What the store shows before the walk."""
        files, state, end = self.files, self.state, max(self.log.max_offset, 0)
        lost = None
        if state is not None and state.clean_end > end:
            proof = f"spark/state says that the log was synced up to {state.clean_end}"
            count, queues, _ = units_behind(files, end)
            lost = LostEnd.of(self.log, end, state.clean_end, proof, count, queues)

        index, missing = files.index, Derived.NOTHING
        if not files.disk.is_folder(files.paths.consume_queue):
            missing |= Derived.QUEUES
        if index is not None and not index.files:  # RocketMQ creates one for the first record that it dispatches
            missing |= Derived.INDEX

        return Inventory(
            left=self.left,
            state=state,
            anchored=self.anchored,
            paths=files.paths,
            min_offset=self.log.min_offset,
            has_segments=bool(self.log.offsets),
            units_without_log=self._units_without_log(),
            segments_lost=lost,
            half_remade=rebuild_begun(files),
            missing=missing,
            wanted=Derived.QUEUES if index is None else Derived.BOTH,
            has_queues=bool(self.queues),
            had_queues=self._had_queues(),
            lost_queues=tuple(self._lost_queues()),
            broker_was_here=self._broker_was_here(),
            journal_end=self.journal.end,
        )

    def _had_queues(self) -> bool:
        """Whether a queue may have had units at the clean end; False only if the journal of that moment says so."""
        state, journal = self.state, self.journal
        return journal.queues != {} or state is None or journal.end != state.clean_end

    def _units_without_log(self) -> str:
        """A queue with units in a store without a log, or an empty text."""
        state = self.state
        if self.log.offsets:
            return ""
        if self.condition.ours_open and state is not None and state.asynchronous and not state.clean_end:
            return ""  # nothing was ever synced, and a unit may be on the disk before its record
        for topic, queue_ids in self.queues.items():
            for queue_id in queue_ids:
                if self.files.queue(topic, queue_id).end():
                    return f"{topic}/{queue_id}"
        return ""

    def _topics_without_folder(self) -> list[str]:
        names = dict.fromkeys((*self.files.topics.names, *_OWN_TOPICS))
        return [topic for topic in names if topic not in self.queues]

    def _lost_queues(self) -> list[Key]:
        """Queues without a folder that had units at the last clean end, and whose topics nobody deleted."""
        topics = self.files.topics.names
        return [
            (topic, queue_id)
            for topic, ranges in (self.journal.queues or {}).items()
            if topic in topics or is_own_topic(topic)
            for first, last in ranges
            for queue_id in sorted(set(range(first, last + 1)) - set(self.queues.get(topic, ())))
        ]

    def _broker_was_here(self) -> bool:
        """Whether anything shows that a broker has opened the store since a writer of ours last had it open.

        `abort` and the store checkpoint show that a broker wrote; a missing topic shows that a broker deleted it.
        `State.own` keeps this for good, because what a broker leaves in a queue stays there.
        """
        if self.condition.wrote is not Writer.OURS:
            return True
        topics = self.files.topics.names
        return any(
            topic not in topics and topic not in self.queues and not is_own_topic(topic)
            for topic in self.journal.queues or ()
        )

    # ---- the walk

    def walk(self, begin: WalkStart, *, accept_loss: bool, already_lost: bool) -> Evidence:
        """Walk over the log, and look at what lies behind the last record that counts.

        Parameters
        ----------
        begin : WalkStart
        accept_loss : bool
            The caller accepts that the end of the log is lost: no unit is asked about it.
        already_lost : bool
            Segments are missing.
        """
        levels = self._know_brokers_levels()
        before = self._locate(begin.place)

        short: set[Key] = set()
        if self.condition.closed and not begin.are_queues_remade:
            short = short_queues(self.files, before.physical_offset)
        walked, below = self._survey(before, begin, set(begin.lost_queues) | short)
        end = walked.end

        lost = None
        if not self.condition.broker_open:  # a crashed broker leaves units after the end
            lost = lost_end(self.files, end.physical_offset, end.last_store_timestamp_ms, self.journal, self.condition)
        to_look_at = self._queues_to_look_at(begin)

        kept, partial = walked, None
        if accept_loss and (lost is not None or already_lost):
            kept, partial = self._without_partial_batch(walked)
        return Evidence(
            walked=walked,
            kept=kept,
            partial=partial,
            path=self.log.path_of(end.physical_offset),
            below=below,
            short=frozenset(short),
            to_look_at=to_look_at,
            lost=lost,
            behind=tuple(self._behind(begin, walked, to_look_at, accept_loss=accept_loss)),
            tail=tail_behind(self.log, kept.end.physical_offset),
            has_head=any(self.log.read(kept.end.physical_offset, 8)),
            levels=levels,
        )

    def _know_brokers_levels(self) -> str:
        """Apply the delay levels of these settings to what a broker wrote last: nothing else says which ones the broker
        had. Returns a note for the report, or an empty text.
        """
        levels, state, identity = self.files.asked_levels, self.state, self.files.identity
        if levels is None or state is None or identity is None or self.condition.wrote is not Writer.BROKER:
            return ""
        levels_so_far = identity.delay_levels
        changed = levels_so_far.changed(state.visible_end, levels, self.log.min_offset)
        if changed is levels_so_far:
            return ""
        self.log.delay_levels = changed
        return (
            f"a broker wrote from {state.visible_end} on. Its delayed messages have the delay levels that were given, "
            f"{levels!r}; those before have {levels_so_far.last!r}"
        )

    def _locate(self, place: Place) -> LogEnd:
        """The place where the walk begins, with the record before it."""
        anchored = self.anchored
        if place is Place.LOG_BEGIN:
            return LogEnd(self.log.min_offset, 0, 0, 0)
        if place is Place.CHAINED_SEGMENT:
            return LogEnd(self._newest_chained_segment(), 0, 0, 0)

        # Where RocketMQ starts: at the newest segment that is not newer than its checkpoint allows.
        if place in (Place.BROKERS_START, Place.HIGHER_START):
            start = self.log.segment_before_time(self.checkpoint.min_timestamp_ms)
            if place is Place.HIGHER_START and anchored is not None and anchored.physical_offset > start:
                return anchored
            return LogEnd(start, 0, 0, 0)

        if place in (Place.BEHIND_UNITS, Place.UNITS_OR_CLEAN_END):
            behind = end_of_queues(self.files)
            # If records lead to C, the queues that pointed there were deleted with their topics. They do not lead there
            # if a broker cut the log below C and went on: it leaves old records, and C may stand behind one of them.
            if anchored is not None and leads_to(self.log, behind.physical_offset, anchored.physical_offset):
                return anchored
            return behind

        assert anchored is not None
        return anchored

    def _newest_chained_segment(self) -> int:
        """The newest segment with a first record that a unit of its queue points to."""
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
                return segment
        return self.log.min_offset

    def _survey(self, before: LogEnd, begin: WalkStart, doubtful: set[Key]) -> tuple[Survey, QueueRuns]:
        """Walk over the log; returns the walk, and the numbers below it of the queues that need them.

        The units of a doubtful queue do not lead up to its first record here, so its numbers come from the records
        below. The walk begins again with them until it meets no other such queue.
        """
        trust = begin.trust
        while True:
            below = self._look_below(before.physical_offset, begin, doubtful)
            runs = QueueRuns(self.files, before.physical_offset, below.next_offsets, units=trust.units, own=trust.own)
            survey = Surveyor(self.files, before, runs, trust).run()
            if runs.doubtful <= doubtful:
                return survey, below
            doubtful = doubtful | runs.doubtful

    def _look_below(self, start: int, begin: WalkStart, doubtful: set[Key]) -> QueueRuns:
        """The queue offsets of records below the survey's start, for queues whose files do not show them."""
        everything = begin.are_queues_remade
        if not doubtful and not everything:
            return QueueRuns(self.files, units=False)
        below = QueueRuns(self.files, self.log.min_offset, units=False)
        for run in Walk(self.log, self.log.min_offset, start, Depth.FRAMING).whole():
            below.take(rows_of(run), None if everything else doubtful)
        below.doubtful = doubtful
        return below

    def _queues_to_look_at(self, begin: WalkStart) -> dict[str, list[int]]:
        """The queues that may have units above the clean end, by topic.

        A crashed writer of this project has left units there only in the queues of records after the clean end. One
        small read of each other queue shows that it has none.
        """
        if self.state is None or not begin.trust.own or begin.are_queues_remade:
            return self.queues
        clean_end = self.state.clean_end
        return {
            topic: [q for q in queue_ids if not is_settled(self.files, topic, q, clean_end)]
            for topic, queue_ids in self.queues.items()
        }

    def _behind(
        self, begin: WalkStart, walked: Survey, queues: dict[str, list[int]], *, accept_loss: bool
    ) -> Iterator[Behind]:
        """What lies behind the walk's end and proves that more was on the disk."""
        end, condition = walked.end, self.condition
        if condition.closed and begin.are_queues_remade and walked.record_count:
            record_behind = next(heads_behind(self.log, end.physical_offset), None)
            if record_behind is not None and walked.stop.reason not in ("end", "blank"):
                yield RecordBehind(record_behind[0])

        if not condition.ours_open or self.state is None:
            return
        batch = later_sync_batch(self.files, end)
        if batch is not None:
            yield batch

        if begin.trust.only_synced and not accept_loss:
            unit = self._unit_behind(queues, end.physical_offset)
            if unit is not None:
                yield unit

    def _unit_behind(self, queues: dict[str, list[int]], end: int) -> UnitBehind | None:
        """A unit for a record after the end, or None. With ASYNC_FLUSH, a unit may be on the disk before its record, so
        it proves nothing.
        """
        for topic, queue_ids in queues.items():
            for queue_id in queue_ids:
                queue = self.files.queue(topic, queue_id)
                count = queue.end()
                units = queue.read(count - 1, 1)
                if not len(units):
                    continue  # it is empty, or retention has deleted all files but the last, which was just created
                position, size = int(units["physical_offset"][0]), int(units["size"][0])
                if position + size > end and position >= self.log.min_offset:
                    return UnitBehind(topic, queue_id, count - 1, position)
        return None

    def _without_partial_batch(self, walked: Survey) -> tuple[Survey, BatchRecord | None]:
        """The walk, ended before the last batch if a part of that batch is lost with the log's end; and that batch.

        The log holds a batch completely or not at all, and Spark can send it again.
        """
        end = walked.end.physical_offset
        batch = max(all_batches(self.files, end), key=lambda batch: batch.physical_offset, default=None)
        if batch is None or batch.end <= end:
            return walked, None

        begin = batch.physical_offset
        before = LogEnd(begin, 0, 0, 0)
        for run in Walk(self.log, self.log.segment_of(begin), begin, Depth.FRAMING):
            before = LogEnd(begin, run.last_offset, run.last_size, run.last_timestamp_ms)
        return Survey(begin, before, QueueRuns(self.files, begin, units=True)), batch
