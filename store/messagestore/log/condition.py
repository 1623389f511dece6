"""The condition of a store: who wrote last, how that ended, and how far the log counts.

`look` reads what shows this: `abort`, `state`, and, of a store without `abort`, the store checkpoint and what the
journal says about it. `Traces.of` makes one word of them, and `CONDITIONS` says what follows from each word: what
readers see, who wrote the newest records, what a check of the store covers, and what the next writer does.

    abort is ours       state has no valid slot              UNREADABLE
                        state is of another boot             RESTARTED
                        a recovery has not ended             RECOVERING
                        state says that bytes are in flight  IN_FLIGHT
                        otherwise                            IDLE
    abort is not ours                                        BROKER
    no abort            the store checkpoint is as we left it:
                            state says so, too               CLOSED
                            state is lost, or older          CLOSED_ODDLY
                        the store checkpoint has changed     CLOSED_BY_BROKER
                        checkpoint or journal are lost:
                            the record before C is named     CLOSED_UNTOLD
                            otherwise                        CLOSED_BY_SOMEBODY

The locks say whether the writer lives (`writer_lock`). The record before C says whether the log is the one that these
files belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.checkpoint import StoreCheckpoint
from messagestore.files.disk import Disk
from messagestore.files.state import State, boot_hash
from messagestore.format.record import crc32
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.store_files import Paths, StoreFiles


class Left(Enum):
    """How a store was left."""

    CLOSED = "a writer of ours closed it, and nobody has written since"
    CLOSED_ODDLY = "closed, and no broker has written since our last writer, but `state` is lost or of another moment"
    CLOSED_UNTOLD = "closed; it looks as a writer of ours leaves it, but the journal that would show it is lost"
    CLOSED_BY_BROKER = "a broker closed it"
    CLOSED_BY_SOMEBODY = "closed, and nothing shows by whom; or nobody has written yet"
    IDLE = "a writer of ours is attached and has nothing in flight, or ended without closing it"
    IN_FLIGHT = "a writer of ours is at work, or was killed"
    RECOVERING = "a recovery is at work, or was killed"
    RESTARTED = "a writer of ours was attached when the machine went down"
    UNREADABLE = "a writer of ours is attached or was killed, and `state` has no valid slot"
    BROKER = "a broker is at work, or was killed"


class Shown(Enum):
    """What readers see."""

    UP_TO_V = "the records that end at or below V; `Sights.of` adds what is proven behind V if the writer was killed"
    PROVEN_TAIL = "what lies below C, and what is proven behind it"
    SEALED = "the queues; each is compared with its seal"
    UNITS = "what the queues show; each unit is compared with its record"
    NOTHING = "an error"


class Writer(Enum):
    """Who wrote last."""

    OURS = "this project"
    BROKER = "a broker"
    UNKNOWN = "nothing shows it"


class Checked(Enum):
    """How far `verify` requires the log to be complete."""

    TO_V = "up to V"
    TO_C = "up to C"
    TO_UNITS = "up to the last record that a unit points to, and at least up to C"
    TO_PROVEN = "up to the last record that exists and that a unit points to"


class Start(Enum):
    """Where the next writer begins to examine the log."""

    NOWHERE = "it continues at C; if anything speaks against that, as AT_UNITS"
    AT_C = "at C, if the record before it is there; otherwise at an earlier segment"
    AT_UNITS = "behind the last record that a unit points to"
    AT_CHECKPOINT = "where a broker's own recovery begins, or at C if that is higher"


@dataclass(frozen=True, slots=True)
class Condition:
    """What follows from how a store was left.

    Parameters
    ----------
    shown : Shown
        What readers see.
    wrote : Writer
    closed : bool
        Nobody was writing, so no record is torn.
    checked : Checked
    all_units : bool
        Nothing is under way: no unit points behind the log's end.
    start : Start
    """

    shown: Shown
    wrote: Writer
    closed: bool
    checked: Checked
    all_units: bool
    start: Start

    @property
    def ours_open(self) -> bool:
        """Whether a writer of ours has the store open, or ended without closing it."""
        return self.wrote is Writer.OURS and not self.closed

    @property
    def broker_open(self) -> bool:
        """Whether a broker has the store open, or was killed."""
        return self.wrote is Writer.BROKER and not self.closed

    @property
    def up_to_date(self) -> bool:
        """Whether what `verify` covers has been dispatched, and no power cut can have lost any of that."""
        return self.checked in (Checked.TO_V, Checked.TO_UNITS)


# fmt: off
_ROWS = {
    #                        readers see         wrote last      closed verify covers      all    a writer begins
    Left.CLOSED:             (Shown.SEALED,      Writer.OURS,    True,  Checked.TO_UNITS,  True,  Start.NOWHERE),
    Left.CLOSED_ODDLY:       (Shown.UNITS,       Writer.OURS,    True,  Checked.TO_UNITS,  True,  Start.AT_UNITS),
    Left.CLOSED_UNTOLD:      (Shown.SEALED,      Writer.UNKNOWN, True,  Checked.TO_UNITS,  True,  Start.AT_UNITS),
    Left.CLOSED_BY_BROKER:   (Shown.UNITS,       Writer.BROKER,  True,  Checked.TO_UNITS,  True,  Start.AT_UNITS),
    Left.CLOSED_BY_SOMEBODY: (Shown.UNITS,       Writer.UNKNOWN, True,  Checked.TO_UNITS,  True,  Start.AT_UNITS),
    Left.IDLE:               (Shown.UP_TO_V,     Writer.OURS,    False, Checked.TO_V,      True,  Start.AT_C),
    Left.IN_FLIGHT:          (Shown.UP_TO_V,     Writer.OURS,    False, Checked.TO_V,      False, Start.AT_C),
    Left.RECOVERING:         (Shown.UP_TO_V,     Writer.OURS,    False, Checked.TO_V,      False, Start.AT_C),
    Left.RESTARTED:          (Shown.PROVEN_TAIL, Writer.OURS,    False, Checked.TO_C,      False, Start.AT_C),
    Left.UNREADABLE:         (Shown.NOTHING,     Writer.OURS,    False, Checked.TO_PROVEN, False, Start.AT_C),
    Left.BROKER:             (Shown.UNITS,       Writer.BROKER,  False, Checked.TO_PROVEN, False, Start.AT_CHECKPOINT),
}
# fmt: on
CONDITIONS: Mapping[Left, Condition] = {left: Condition(*row) for left, row in _ROWS.items()}


class Promise(NamedTuple):
    """What the journal says about the store checkpoint.

    Parameters
    ----------
    counter : int
        The counter of `state` when the journal was read; -1: there was no `state`.
    checkpoint_crc : int | None
        The CRC-32 of the store checkpoint as our last writer left it; None: unknown.
    """

    counter: int
    checkpoint_crc: int | None


class Traces(NamedTuple):
    """What a store's last writer has left, read at one moment; `Traces.of` makes it.

    Parameters
    ----------
    abort : str | None
        The content of `abort`; None: there is no such file.
    ours : bool
        `abort` has the id of this store.
    state : State | None
    checkpoint : StoreCheckpoint | None
        None: it is missing, or was not read because it would say nothing.
    promise : Promise | None
        None: it was not read because of `abort`.
    left : Left
        How the store was left.
    condition : Condition
        What follows from that.
    """

    abort: str | None
    ours: bool
    state: State | None
    checkpoint: StoreCheckpoint | None
    promise: Promise | None
    left: Left
    condition: Condition

    @classmethod
    def of(
        cls,
        abort: str | None,
        state: State | None,
        checkpoint: StoreCheckpoint | None = None,
        promise: Promise | None = None,
        *,
        ours: bool,
    ) -> Traces:
        """The traces, with what they say."""
        if abort is None:
            left = _left_closed(state, checkpoint, promise)
        else:
            left = _left_open(state) if ours else Left.BROKER
        return cls(abort, ours, state, checkpoint, promise, left, CONDITIONS[left])

    @property
    def is_finished(self) -> bool:
        """Whether our last writer has left nothing half done: a writer that stayed attached goes on behind V."""
        state = self.state
        if state is None or state.poisoned or not state.nothing_in_flight:
            return False
        return self.left is Left.IDLE or (self.condition.closed and state.clean)


def _left_open(state: State | None) -> Left:
    """How a store was left if its `abort` is ours."""
    if state is None:
        return Left.UNREADABLE
    if state.boot_hash != boot_hash():
        return Left.RESTARTED
    if state.recovering:
        return Left.RECOVERING
    return Left.IDLE if state.nothing_in_flight else Left.IN_FLIGHT


def _left_closed(state: State | None, checkpoint: StoreCheckpoint | None, promise: Promise | None) -> Left:
    """How a store was left if it has no `abort`."""
    written = None if promise is None else promise.checkpoint_crc
    if written is not None and checkpoint is not None:
        if crc32(checkpoint.to_bytes()) != written:
            return Left.CLOSED_BY_BROKER
        return Left.CLOSED if state is not None and state.closed else Left.CLOSED_ODDLY
    last = 0 if checkpoint is None else checkpoint.confirm_physical_offset
    named = state is not None and state.closed and state.anchor_size > 0 and state.anchor_position == last
    return Left.CLOSED_UNTOLD if written is None and named else Left.CLOSED_BY_SOMEBODY


def look(files: StoreFiles, promise: Promise | None = None) -> Traces:
    """Read what a store's last writer has left. This takes microseconds.

    Parameters
    ----------
    files : StoreFiles
    promise : Promise | None
        What the journal says about the store checkpoint, if the caller has read it. It is read again if the counter of
        `state` is another one now.
    """
    abort, state = files.read_abort(), files.state_file.read()
    ours = bool(files.store_id) and abort == files.abort_token
    if abort is not None:
        return Traces.of(abort, state, ours=ours)
    counter = -1 if state is None else state.counter
    if promise is None or promise.counter != counter:
        promise = Promise(counter, BatchJournal.read_checkpoint_crc(files.disk, files.paths.journal))
    if state is None and promise.checkpoint_crc is None:
        return Traces.of(None, None, None, promise, ours=False)  # a broker's store: the store checkpoint says nothing
    return Traces.of(None, state, _checkpoint(files.disk, files.paths), promise, ours=False)


def _checkpoint(disk: Disk, paths: Paths) -> StoreCheckpoint | None:
    """The store checkpoint; None if there is no such file."""
    checkpoint = store_checkpoint.read(disk, paths.checkpoint)
    return checkpoint if checkpoint != StoreCheckpoint() or disk.exists(paths.checkpoint) else None
