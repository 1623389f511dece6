"""Decides what recovery does. Nothing here reads or writes a file.

There are two decisions, and each is a function of what was read before it:

    walk_start  where the walk over the log begins, and what is made again from the whole log
    make_plan   whether the end that the walk found is accepted, and what is cut off, written again, rebuilt and sealed

Both raise `CorruptionError` if bytes are missing that were provably synced, unless the caller accepts the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto

from messagestore.errors import CorruptionError
from messagestore.files.state import State
from messagestore.format.batch_record import BatchRecord
from messagestore.log.condition import CONDITIONS, Condition, Left, Start, Writer
from messagestore.log.dispatch import QueueRuns
from messagestore.log.log_end import LogEnd
from messagestore.log.lost_end import LostEnd
from messagestore.log.seal_check import listed
from messagestore.log.store_files import Paths
from messagestore.recovery.log_tail import Tail
from messagestore.recovery.report import RecoveryReport
from messagestore.recovery.survey import Survey
from messagestore.recovery.trust import Trust

Key = tuple[str, int]
"""A queue: its topic and its id."""


class Derived(Flag):
    """What is derived from the log, and can be made again from it."""

    NOTHING = 0
    QUEUES = auto()
    INDEX = auto()
    BOTH = QUEUES | INDEX

    @property
    def words(self) -> str:
        """The words for a report."""
        return {Derived.QUEUES: "ConsumeQueues", Derived.INDEX: "index"}.get(self, "ConsumeQueues and index")


class Place(Enum):
    """Where the walk over the log begins."""

    CLEAN_END = "at C"
    CHAINED_SEGMENT = "at the newest segment to whose first record a unit points"
    BROKERS_START = "where a broker's own recovery begins"
    HIGHER_START = "where a broker's own recovery begins, or at C if that is higher"
    LOG_BEGIN = "at the log's first byte"
    BEHIND_UNITS = "behind the last record that a unit points to"
    UNITS_OR_CLEAN_END = "behind the last record that a unit points to, or at C if records lead from there to C"


class Durable(Enum):
    """How recovery makes durable what it keeps from the start of the walk on."""

    REWRITTEN = "written again and synced, because a sync of the last writer may have failed"
    SYNCED = "synced"


class IndexStep(Enum):
    """What becomes of the index before the records of the walk are dispatched."""

    REMADE = "all of it is removed, and made again"
    REWOUND = "it goes back to where the walk began"
    KEPT = "it stays: the store was closed, and the walk met no record"


@dataclass(frozen=True)
class Inventory:
    """What a store shows before anybody walks over its log.

    Parameters
    ----------
    left : Left
        How the store was left.
    state : State | None
        None: it has no valid slot.
    anchored : LogEnd | None
        The clean end; None: the record before it is not the one that `state` names.
    paths : Paths
        For messages.
    min_offset : int
        Where the first segment begins.
    has_segments : bool
    units_without_log : str
        A queue that has units although the log has no segment; empty: there is none, or they prove nothing.
    segments_lost : LostEnd | None
        The last segment ends below C.
    half_remade : Derived
        What a recovery was making again when it was killed.
    missing : Derived
        Of what there is no folder, or no file.
    wanted : Derived
        What the settings ask for.
    has_queues : bool
        A queue has a folder.
    had_queues : bool
        A queue may have had units at the last clean end.
    lost_queues : tuple of (topic, queue id)
        Queues without a folder that had units at the last clean end, and whose topics nobody deleted.
    broker_was_here : bool
        Something shows that a broker has opened the store since a writer of ours last had it open.
    journal_end : int
        Where the log ended when the journal was written; 0: there is no journal.
    """

    left: Left
    state: State | None
    anchored: LogEnd | None
    paths: Paths
    min_offset: int
    has_segments: bool
    units_without_log: str
    segments_lost: LostEnd | None
    half_remade: Derived
    missing: Derived
    wanted: Derived
    has_queues: bool
    had_queues: bool
    lost_queues: tuple[Key, ...]
    broker_was_here: bool
    journal_end: int

    @property
    def condition(self) -> Condition:
        """What follows from how the store was left."""
        return CONDITIONS[self.left]


@dataclass(frozen=True)
class WalkStart:
    """Where the walk begins, and what it may trust.

    Parameters
    ----------
    place : Place
    reason : str
        The reason of the report.
    trust : Trust
    remade : Derived
        What is made again from the whole log.
    lost_queues : frozenset of (topic, queue id)
        Queues whose folders were deleted by accident, which are made again.
    notes, rebuilt : tuple of str
        For the report.
    """

    place: Place
    reason: str
    trust: Trust
    remade: Derived
    lost_queues: frozenset[Key]
    notes: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()

    @property
    def are_queues_remade(self) -> bool:
        """Whether all queues are made again."""
        return Derived.QUEUES in self.remade


@dataclass(frozen=True)
class UnitBehind:
    """A unit for a record that is not in the log: with SYNC_FLUSH, it was written after its record was synced."""

    topic: str
    queue_id: int
    number: int
    physical_offset: int


@dataclass(frozen=True)
class RecordBehind:
    """A record behind one that cannot be read, in a store that was closed, so nothing is torn. The queues, which would
    show the log's end, are missing.
    """

    physical_offset: int


Behind = BatchRecord | UnitBehind | RecordBehind
"""What proves, behind the end of the walk, that more was on the disk. The BATCH record is a later one of SYNC_FLUSH."""


@dataclass(frozen=True)
class Evidence:
    """What the walk over the log found, and what lies behind its end.

    Parameters
    ----------
    walked : Survey
        The walk.
    kept : Survey
        What is kept of it: all of it, or what lies before a batch of which the rest is lost.
    partial : BatchRecord | None
        That batch.
    path : str
        The segment in which the walk ended.
    below : QueueRuns
        The numbers of the records below the walk, for the queues that are made again from there.
    short : frozenset of (topic, queue id)
        Queues that a broker left complete, and that end before their last record now.
    to_look_at : dict of str -> list of int
        The queues that may have units above the clean end.
    lost : LostEnd | None
        The proof that records behind the walk's end are lost.
    behind : tuple of BatchRecord, UnitBehind or RecordBehind
        What lies behind the walk's end and proves that more was on the disk.
    tail : Tail
        What lies behind the end of `kept`.
    has_head : bool
        The bytes there begin with something else than eight zeros.
    levels : str
        A note about the delay levels of what a broker wrote; empty: there is none.
    """

    walked: Survey
    kept: Survey
    partial: BatchRecord | None
    path: str
    below: QueueRuns
    short: frozenset[Key]
    to_look_at: Mapping[str, list[int]]
    lost: LostEnd | None
    behind: tuple[Behind, ...]
    tail: Tail
    has_head: bool
    levels: str


@dataclass(frozen=True)
class Plan:
    """What recovery changes.

    Parameters
    ----------
    survey : Survey
        What is kept; the log ends at its end, and everything behind it is cut off.
    report : RecoveryReport
        What is known before anything is changed.
    condition : Condition
        How the store was left.
    before : State | None
        `state` as it was found.
    is_new : bool
        The store contains nothing yet that a broker could have written.
    broker_was_here : bool
        A broker has opened the store since: `State.own` does not stay, and what a broker was about to make goes.
    save : bool
        The bytes that are cut off are kept in `spark/cut/`, because no replay contains them.
    durable : Durable
    remade : Derived
        What is made again from the whole log.
    index : IndexStep
    below : QueueRuns
        The numbers of the records below the walk.
    lost_queues, short : frozenset of (topic, queue id)
        See `WalkStart` and `Evidence`.
    to_look_at : dict of str -> list of int
        The queues whose units behind the log's end become zeros, besides those that get new units.
    seals_hold : bool
        `spark/ends` says where the queues ended: no broker has written since, and it belongs to this log.
    changed_from : int
        Below it, nothing has changed since the journal was written.
    """

    survey: Survey
    report: RecoveryReport
    condition: Condition
    before: State | None
    is_new: bool
    broker_was_here: bool
    save: bool
    durable: Durable
    remade: Derived
    index: IndexStep
    below: QueueRuns
    lost_queues: frozenset[Key]
    short: frozenset[Key]
    to_look_at: Mapping[str, list[int]]
    seals_hold: bool
    changed_from: int

    @property
    def end(self) -> int:
        """The physical offset at which the log ends."""
        return self.survey.end.physical_offset


# ---- where the walk begins


def walk_start(inventory: Inventory, *, accept_loss: bool) -> WalkStart:
    """Decide where the walk begins, and what it may trust.

    Raises
    ------
    CorruptionError
        The store has units and no log, or the log ends below what was synced: files are missing.
    """
    _check_segments(inventory, accept_loss=accept_loss)

    remade = _remade(inventory)
    place, reason = _place(inventory, remade)
    state = inventory.state
    trust = Trust(
        inventory.condition,
        anchored=place is Place.CLEAN_END,
        only_synced=state is not None and not state.asynchronous,
        units=Derived.QUEUES not in remade,
    )

    notes, rebuilt, lost = [], [], inventory.lost_queues if trust.units else ()
    if place is Place.CHAINED_SEGMENT:
        cause = "`spark/state` could not be read" if state is None else "the record before the clean end is gone"
        notes.append(f"{cause}, so recovery began at an earlier segment")
    if lost and inventory.condition.wrote is Writer.BROKER:
        notes.append(
            f"{listed(lost)}: the queues had messages, but have no folder now. They were not rebuilt, because a broker "
            "has used the store since, and may have deleted the topic and created it again"
        )
        lost = ()
    elif lost:
        rebuilt.append(f"{listed(lost)}: the queues' folders were missing and were rebuilt from the log")
    return WalkStart(place, reason, trust, remade, frozenset(lost), tuple(notes), tuple(rebuilt))


def _check_segments(inventory: Inventory, *, accept_loss: bool) -> None:
    lost = inventory.segments_lost
    if inventory.units_without_log:
        no_segments = f"none, but {inventory.units_without_log} has units"
        raise CorruptionError(inventory.paths.commit_log, 0, "CommitLog segments", no_segments)
    if lost is not None and not accept_loss:
        raise lost.error()


def _remade(inventory: Inventory) -> Derived:
    """What is made again from the whole log, because somebody deleted it, or a recovery that was killed left a part."""
    if not inventory.has_segments:
        return Derived.NOTHING
    remade = inventory.half_remade | inventory.missing
    # An empty folder is left by a broker that deleted the only topic. The journal says so from the next clean end on.
    if inventory.condition.ours_open and not inventory.has_queues and inventory.had_queues:
        remade |= Derived.QUEUES
    return remade & inventory.wanted


def _place(inventory: Inventory, remade: Derived) -> tuple[Place, str]:
    """Where the walk begins (`Condition.start`), and the reason of the report."""
    condition, state = inventory.condition, inventory.state
    is_anchored = inventory.anchored is not None

    if condition.start is Start.AT_C:
        idle = inventory.left is Left.IDLE and state is not None and not state.poisoned
        reason = "not closed, nothing in flight" if idle else "a writer crashed"
        return (Place.CLEAN_END if is_anchored else Place.CHAINED_SEGMENT), reason

    if condition.start is Start.AT_CHECKPOINT:
        return (Place.HIGHER_START if is_anchored else Place.BROKERS_START), "a broker crashed"

    if state is None and not inventory.has_segments:
        return Place.LOG_BEGIN, "new"
    ours = condition.wrote is Writer.OURS
    reason = "closed, but files were lost or changed" if ours else "closed by a broker"
    if Derived.QUEUES in remade:
        return Place.LOG_BEGIN, reason
    return (Place.UNITS_OR_CLEAN_END if is_anchored else Place.BEHIND_UNITS), reason


# ---- where the log ends, and what follows from that


def make_plan(inventory: Inventory, begin: WalkStart, evidence: Evidence, *, accept_loss: bool) -> Plan:
    """Accept or refuse the end that the walk found, and decide what is changed.

    Raises
    ------
    CorruptionError
        Something behind the end of the walk proves that more was on the disk.
    """
    condition, state, kept = inventory.condition, inventory.state, evidence.kept
    end = kept.end.physical_offset

    report = RecoveryReport(begin.reason, start=evidence.walked.start)
    report.notes += begin.notes
    if evidence.levels:
        report.notes.append(evidence.levels)
    for note in begin.rebuilt:
        report.note_queues(note)
    _check_end(inventory, evidence, report, accept_loss=accept_loss)
    _check_behind(inventory, evidence)
    report.end, report.record_count, report.stop = end, kept.record_count, kept.stop.reason
    report.cut_messages, report.cut_queues = evidence.tail.message_count, len(evidence.tail.queues)

    replayed = kept.in_batch or (state is not None and state.in_flight == end and not evidence.has_head)
    is_anchored = inventory.anchored is not None and state is not None and end >= state.clean_end
    return Plan(
        survey=kept,
        report=report,
        condition=condition,
        before=state,
        is_new=condition.closed and not inventory.has_segments and not inventory.has_queues,
        broker_was_here=inventory.broker_was_here,
        save=not replayed,
        durable=Durable.REWRITTEN if condition.ours_open else Durable.SYNCED,
        remade=begin.remade,
        index=_index_step(inventory, begin, evidence, report),
        below=evidence.below,
        lost_queues=begin.lost_queues,
        short=evidence.short,
        to_look_at=evidence.to_look_at,
        seals_hold=condition.wrote is Writer.OURS and is_anchored,
        # A broker may have cut the log anywhere; without a broker, nothing below the start of the walk has changed.
        changed_from=min(report.start, end) if condition.ours_open else 0,
    )


def _index_step(inventory: Inventory, begin: WalkStart, evidence: Evidence, report: RecoveryReport) -> IndexStep:
    if Derived.INDEX in begin.remade:
        return IndexStep.REMADE
    kept = evidence.kept
    if not inventory.condition.closed or kept.start < kept.end.physical_offset or report.lost is not None:
        return IndexStep.REWOUND
    return IndexStep.KEPT


def _check_end(inventory: Inventory, evidence: Evidence, report: RecoveryReport, *, accept_loss: bool) -> None:
    """Refuse a log that is provably shorter than it was, or report the loss if the caller accepts it."""
    state, lost = inventory.state, evidence.lost or inventory.segments_lost
    end = evidence.walked.end.physical_offset
    if lost is not None:
        if not accept_loss:
            raise lost.error()
        report.lost = lost.summary

    if evidence.lost is None and state is not None and end < state.clean_end:
        if inventory.condition.wrote is not Writer.BROKER and not accept_loss:
            raise _damaged(evidence, f"(synced up to {state.clean_end})")
        report.notes.append(
            f"the log ends at {end}, but was synced up to {state.clean_end} before. Either a broker cut it and "
            f"continued there, or the folder spark/ belongs to another copy"
        )

    if not inventory.condition.ours_open and state is not None and report.lost is None:
        report.changed = changed_below(state, inventory.anchored, inventory.min_offset) or None

    if evidence.partial is not None:
        batch = evidence.partial
        report.notes.append(
            f"app {batch.app_id!r}, version {batch.version}: a part of this batch is lost, and the rest was cut off "
            f"from {batch.physical_offset} on. The batch can be sent again"
        )
    if state is None and inventory.journal_end:
        report.notes.append(f"{inventory.paths.state} was missing or damaged, and was rebuilt")


def _check_behind(inventory: Inventory, evidence: Evidence) -> None:
    """Refuse the log if something behind its end proves that the bytes there were on the disk."""
    for proof in evidence.behind:
        match proof:
            case RecordBehind():
                raise _damaged(
                    evidence,
                    "(the store was closed, and more records follow)",
                    "Restore the folder consumequeue, or this segment, from a copy. If a crash left these bytes behind "
                    "the log's end, let a broker open and close the store once.",
                )
            case BatchRecord():
                raise _damaged(evidence, f"(the batch at {proof.physical_offset} proves {proof.end} bytes synced)")
            case UnitBehind():
                raise _damaged(
                    evidence,
                    f"(unit {proof.number} of {proof.topic}/{proof.queue_id} proves the record at "
                    f"{proof.physical_offset} synced, or is damaged itself)",
                    f"If records are lost, restore the log from a copy. If the queue is damaged, remove the folder "
                    f"{inventory.paths.consume_queue} and run `messagestore recover`, which rebuilds all queues.",
                )


def _damaged(evidence: Evidence, proof: str, hint: str = "") -> CorruptionError:
    """The error for a walk that ended too early; `proof` says why."""
    stop, end = evidence.walked.stop, evidence.walked.end.physical_offset
    expected = f"{stop.expected or 'a record'} {proof}"
    return CorruptionError(evidence.path, end, expected, stop.found or "none", hint=hint)


def changed_below(state: State, anchored: LogEnd | None, min_offset: int) -> str:
    """What has changed if the record before the clean end is missing, although its segment exists; or an empty text."""
    if not state.anchor_size or state.anchor_position < min_offset or anchored is not None:
        return ""
    return (
        f"bytes below {state.clean_end}, which this project had written and synced, have changed: the record at "
        f"{state.anchor_position} is gone. A broker that was started beside a writer, or a restored copy, has "
        f"replaced acknowledged messages. Compare the store with what was sent"
    )
