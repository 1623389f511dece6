"""What a reader sees of a store: one class for each way in which the store was left.

    UpTo          a writer of ours is attached, or was killed idle or with SYNC_FLUSH: what ends at or below V
    Unrecovered   it ended with the machine, or was killed with ASYNC_FLUSH: what the log proves behind C, or behind V
    Sealed        a writer of ours closed the store: the queues, as their seals say
    Units         a broker wrote last, or nobody knows who: the queues; each unit is compared with its record

`Sights` chooses one by the condition of the store (`log.condition`), and the view keeps it while nothing changes.

Threads: one thread at a time, as for the view.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError
from messagestore.files.consume_queue import ConsumeQueue, queue_ids_of
from messagestore.files.state import State
from messagestore.files.writer_lock import is_writing
from messagestore.format.config import FLUSHED
from messagestore.format.layout import FILLER_UNIT_SIZE, UNIT
from messagestore.log.condition import Shown, Traces
from messagestore.log.lost_end import lost_segments
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.seal_check import Fault, fault_of, is_deleted, number_left, sealed_at
from messagestore.log.sealed_ends import SealedEnds
from messagestore.log.store_files import StoreFiles
from messagestore.read.proven_tail import ProvenTail, find_killed_tail, find_proven_tail, tell

Key = tuple[str, int]
_NO_LIMIT = 1 << 62
_LOCK_LOOK_S = 0.05
"""How often a reader looks whether the writer that has something in flight lives."""
_TRIES = 3
"""How often seals are read again, because a writer may be replacing them."""


class SealBroken(Exception):
    """A queue of a closed store does not match its seal."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class Seals:
    """What the seals say of the queues of a store that a writer has opened since.

    Parameters
    ----------
    files : StoreFiles
    clean_end : int
        C of `state`.
    """

    def __init__(self, files: StoreFiles, clean_end: int) -> None:
        self.files = files
        self.clean_end = clean_end

    @cached_property
    def _ends(self) -> SealedEnds:
        self.files.topics.load()  # a broker that deletes a topic removes its name
        return sealed_at(self.files, self.clean_end, self.clean_end)

    def number_left(self, key: Key) -> int:
        """The number with which a queue without files goes on: retention deleted its messages, and somebody its files.

        The next writer goes on with it, so it is the end that readers see; 0 if the queue has files, or if nothing is
        known of it.
        """
        if self.files.queue(*key).offsets or not self.files.commit_log.min_offset:
            return 0
        return number_left(self.files, self._ends, key)

    def checked_end(self, key: Key, limit: int, look: Callable[[], int]) -> int:
        """The end of a queue that `look` finds in its files, of records that end at or below `limit`.

        Raises
        ------
        SealBroken
            It lies before the seal: somebody has taken files away, or cut them. A recovery rebuilds it from the log.
            Until then, readers would see too little.
        """
        end = look()
        if not self._is_short(self._ends, key, end, limit):
            self._check_begin(key)
            return end

        # There may be new files, or the topic was deleted. Whoever deletes it takes the seal away before the files, so
        # the files are looked at first.
        files = self.files
        queue = files.queue(*key)
        for _ in range(_TRIES):
            queue.load()
            end, state = look(), files.state_file.read()
            if state is None:
                return end
            ends = sealed_at(files, state.clean_end, state.clean_end)
            if key in ends.seals:
                break
        files.topics.load()
        if not self._is_short(ends, key, end, limit) or is_deleted(files, key):
            return end
        words = f"{ends.seals[key].end} units of {key[0]}/{key[1]}, as at the clean end"
        raise SealBroken(fault_of(files, ends, key) or Fault(*queue.place(end), words, str(end)))

    def _check_begin(self, key: Key) -> None:
        """Refuse a queue that lacks its first files although the log still begins at 0.

        Raises
        ------
        SealBroken
            Readers would take the messages for deleted by retention.
        """
        files = self.files
        queue = files.queue(*key)
        if not self._begins_late(queue):
            return
        queue.load()
        files.commit_log.load()  # retention deletes segments first
        files.topics.load()
        if not self._begins_late(queue) or is_deleted(files, key):
            return
        words = f"units of {key[0]}/{key[1]} from 0 on: the log begins at 0"
        raise SealBroken(Fault(queue.directory, 0, words, f"units from {queue.first_file_queue_offset} on"))

    def _begins_late(self, queue: ConsumeQueue) -> bool:
        """Whether the log begins at 0, but the queue's first file does not, and no broker made it so."""
        if self.files.commit_log.min_offset or not queue.offsets or not queue.first_file_queue_offset:
            return False
        units = queue.read(queue.first_file_queue_offset, 1)
        return bool(len(units)) and int(units["size"][0]) != FILLER_UNIT_SIZE

    def _is_short(self, ends: SealedEnds, key: Key, end: int, limit: int) -> bool:
        seal = ends.seals.get(key)
        if seal is None or key in ends.unsealed or end >= seal.end:
            return False
        return seal.physical_offset + seal.size <= limit


class Sight(ABC):
    """What a reader sees.

    Attributes
    ----------
    end : int | None
        Readers see the records that end at or below this physical offset. None: those that the queues show.
    known_end : int | None
        Where the log ends. None: only the queues show it.
    tail : ProvenTail | None
        What the log proves and the queues' files do not.
    """

    end: int | None = None
    known_end: int | None = None
    tail: ProvenTail | None = None

    def __init__(self, files: StoreFiles) -> None:
        self.files = files

    @abstractmethod
    def queue_end(self, key: Key, hint: int, *, hint_was_end: bool) -> int:
        """The number of the first message of a queue that is not visible. The queue's files are known.

        Parameters
        ----------
        key : (topic, queue id)
        hint : int
            The end is here or later.
        hint_was_end : bool
            `hint` was the end when the queue was last asked.

        Raises
        ------
        CorruptionError
        """

    def other_queues(self, topic: str | None = None) -> list[Key]:  # noqa: ARG002 - there are none
        """The queues, of one topic or of all, that a reader must see although they have no folder."""
        return []

    def units(self, key: Key, start: int, end: int) -> NDArray[np.void]:
        """The units `start..end` of a queue, as far as they are there."""
        queue = self.files.queue(*key)
        units = queue.read(start, end - start)
        if len(units) < end - start:
            queue.load()  # the next file was created meanwhile
            units = queue.read(start, end - start)
        return units

    def search_physical(self, key: Key, physical_offset: int) -> int:
        """The number of the first message of a queue at a physical offset or above. The queue's files are known."""
        return self.files.queue(*key).search_physical(physical_offset)


class UpTo(Sight):
    """A store that a writer of ours has open, or left so that everything below V is there."""

    end: int

    def __init__(self, files: StoreFiles, end: int, seals: Seals) -> None:
        super().__init__(files)
        self.end = self.known_end = end
        self._seals = seals

    def queue_end(self, key: Key, hint: int, *, hint_was_end: bool) -> int:
        """The end of the units whose records end at or below V.

        Raises
        ------
        SealBroken
            The queue lacks units that it had at the clean end.
        """

        def look() -> int:
            return self.files.queue(*key).end(hint=hint, limit=self.end) or self._seals.number_left(key)

        return look() if hint_was_end else self._seals.checked_end(key, self.end, look)


class Unrecovered(Sight):
    """A store that no writer has recovered since the machine was started or a writer with ASYNC_FLUSH was killed.

    Parameters
    ----------
    files : StoreFiles
    tail : ProvenTail
    counter : int
        The counter of `state` for which the tail was found.
    seals : Seals
    """

    tail: ProvenTail

    def __init__(self, files: StoreFiles, tail: ProvenTail, counter: int, seals: Seals) -> None:
        super().__init__(files)
        self.tail = tail
        self.counter = counter
        self._seals = seals
        self._checked: set[Key] = set()
        self.end = self.known_end = tail.end

    def queue_end(self, key: Key, hint: int, *, hint_was_end: bool) -> int:
        """The end of the queue in what is proven. Units above C come from records; those in files were not synced.

        Raises
        ------
        SealBroken
            The queue lacks units that it had at the clean end.
        """
        if key in self.tail.units:
            if key not in self._checked:
                start = self.tail.start
                self._seals.checked_end(key, start, lambda: self.files.queue(*key).end(limit=start))
                self._checked.add(key)
            return self.tail.queue_end(key)
        if hint_was_end:
            return hint

        def look() -> int:
            end = proven_queue_end(self.files, *key, self.tail.start, crc=False)
            return end or self._seals.number_left(key)

        return self._seals.checked_end(key, self.tail.start, look)

    def other_queues(self, topic: str | None = None) -> list[Key]:
        """The queues that have units above C."""
        return [key for key in self.tail.units if topic in (None, key[0])]

    def units(self, key: Key, start: int, end: int) -> NDArray[np.void]:
        """Units from the queue's files below C, and from the records above it."""
        if key not in self.tail.units or end <= self.tail.units[key][0]:
            return super().units(key, start, end)
        first = self.tail.units[key][0]
        above = self.tail.read(key, max(start, first), end)
        if start >= first:
            return above
        below = self.files.queue(*key).read(start, first - start)
        return np.concatenate([below, above]) if len(below) == first - start else below

    def search_physical(self, key: Key, physical_offset: int) -> int:
        """Search the queue's files below C, and the records above it."""
        queue = self.files.queue(*key)
        number = queue.search_physical(physical_offset)
        if key in self.tail.units and (number >= self.tail.units[key][0] or not queue.offsets):
            return self.tail.search_physical(key, physical_offset)
        return number


class Sealed(Sight):
    """A store that a writer of ours closed, and to which nobody has written since.

    Its units are trusted: one that points to damage does not end its queue, and the damage is reported when the message
    is read.
    """

    def __init__(self, files: StoreFiles, state: State) -> None:
        super().__init__(files)
        self.state = state
        self.known_end = state.clean_end

    @cached_property
    def _ends(self) -> SealedEnds:
        """The ends of the queues, as far as they are known."""
        return sealed_at(self.files, self.state.clean_end, self.state.clean_end)

    def other_queues(self, topic: str | None = None) -> list[Key]:
        """The queues whose folders are missing. They are listed, and their ends raise an error."""
        files = self.files
        keys = [key for key in self._ends.seals if topic in (None, key[0])]
        with_folder = {
            name: set(queue_ids_of(files.disk, files.paths.root, name)) for name in {name for name, _ in keys}
        }
        lost = [key for key in keys if key[1] not in with_folder[key[0]]]
        if lost:
            files.topics.load()  # a broker that deletes a topic removes its name
        return [key for key in lost if not is_deleted(files, key)]

    def queue_end(self, key: Key, hint: int, *, hint_was_end: bool) -> int:
        """The end of the queue, as its seal says.

        Raises
        ------
        SealBroken
            The queue lacks units that it had when the store was closed, or has more.
        """
        queue, expected = self.files.queue(*key), self._ends.end_of(key)
        if hint_was_end and expected in (hint, None) and queue.end(hint=hint) == hint:
            return hint  # nothing was added; this took one read
        if expected is None:
            return queue.end(hint=hint)
        if not queue.offsets and number_left(self.files, self._ends, key):
            return expected

        fault = fault_of(self.files, self._ends, key)
        if fault is not None:
            self.files.topics.load()  # a broker that deletes a topic removes its name
            queue.load()  # a writer may have created the next file, or rebuilt the queue
            fault = fault_of(self.files, self._ends, key)
        end = queue.end(hint=expected)
        if fault is None and end > expected:
            words = f"{expected} units, as at the clean end"
            fault = Fault(queue.directory, expected * UNIT.size, words, str(end))
        if fault is not None:
            raise SealBroken(fault)
        return end


class Units(Sight):
    """A store whose end only the queues show: a broker is at work, has crashed, or has closed it."""

    def queue_end(self, key: Key, hint: int, *, hint_was_end: bool) -> int:
        """The end of the units that have a record.

        Raises
        ------
        CorruptionError
            A unit behind them points behind the last segment.
        """
        files = self.files
        if hint_was_end and files.queue(*key).end(hint=hint) == hint:
            return hint  # nothing was added; this took one read
        torn = files.read_abort() is not None  # a broker that crashed may have left a torn record
        end = proven_queue_end(files, *key, _NO_LIMIT, hint, crc=torn)
        if end <= hint:
            files.commit_log.load()  # a new segment may be there
            end = proven_queue_end(files, *key, _NO_LIMIT, hint, crc=torn)
        self._check_unit_behind(key, end)
        return end

    def _check_unit_behind(self, key: Key, end: int) -> None:
        """Refuse a unit after the proven ones if it points behind the last segment.

        What a crashed broker leaves behind the end of a queue points into the segments that there are.

        Raises
        ------
        CorruptionError
        """
        log = self.files.commit_log
        units = self.files.queue(*key).read(end, 1)
        if not len(units) or not 0 < int(units["size"][0]) < FILLER_UNIT_SIZE:
            return
        physical_offset = int(units["physical_offset"][0])
        if physical_offset >= log.max_offset:
            log.load()  # a broker may have created the segment just now
        if physical_offset >= log.max_offset:
            record_end = physical_offset + int(units["size"][0])
            raise lost_segments(log, f"{record_end}, where the record of unit {end} of {key[0]}/{key[1]} ends")


class Sights:
    """Chooses what a reader sees of one store.

    Parameters
    ----------
    files : StoreFiles
    given_tail : ProvenTail | None
        The result of an earlier search. It is used where this one would begin at the same place.
    """

    def __init__(self, files: StoreFiles, given_tail: ProvenTail | None = None) -> None:
        self.files = files
        self._given_tail = given_tail
        self._seals: Seals | None = None
        self._lock_look_at_s = 0.0

    def of(self, traces: Traces, old: Sight) -> Sight:
        """What a reader sees of a store that was left like this. It is `old` while nothing has changed.

        Raises
        ------
        CorruptionError
            No slot of `state` is valid.
        """
        files, state = self.files, traces.state
        shown = traces.condition.shown
        if shown is Shown.UNITS:
            return old if isinstance(old, Units) else Units(files)
        if state is None:
            raise CorruptionError(
                files.paths.state,
                0,
                "a valid slot",
                "none",
                hint="Run `messagestore recover` on the store. The messages in the log are not affected.",
            )
        if shown is Shown.SEALED:
            return old if isinstance(old, Sealed) and old.state == state else Sealed(files, state)

        flushed = files.config.read_up_to == FLUSHED
        killed = shown is Shown.UP_TO_V and not flushed and self._was_killed(state, old)
        if killed or shown is Shown.PROVEN_TAIL:
            return self._unrecovered(state, old, killed=killed)
        end = state.flushed_end if flushed else state.visible_end
        return old if isinstance(old, UpTo) and old.end == end else self.up_to(state, end)

    def up_to(self, state: State, end: int) -> UpTo:
        """What a reader sees up to a physical offset, whoever has the store now."""
        return UpTo(self.files, end, self._seals_of(state))

    def forget_seals(self) -> None:
        """Read the seals anew: other files may be there."""
        self._seals = None

    def _seals_of(self, state: State) -> Seals:
        """What the seals say. The object stays until C moves, because it reads them once."""
        if self._seals is None or self._seals.clean_end != state.clean_end:
            self._seals = Seals(self.files, state.clean_end)
        return self._seals

    def _was_killed(self, state: State, old: Sight) -> bool:
        """Whether a writer with ASYNC_FLUSH was killed in this boot, and no recovery has published since.

        V is then behind what was acknowledged: the units are written shortly after the puts return. A look at the lock
        shows whether the writer lives; if another process holds it, that is about to recover the store. The look is
        repeated after `_LOCK_LOOK_S` at the earliest. While a recovery is at work, and until it publishes, what was
        shown stays.
        """
        if not state.asynchronous or state.poisoned or state.nothing_in_flight:
            return False

        if state.recovering:
            return True
        if isinstance(old, Unrecovered) and (old.counter, old.tail.start) == (state.counter, state.visible_end):
            return True

        given_tail = self._given_tail
        if given_tail is not None and given_tail.start == state.visible_end < given_tail.end:
            return True

        now_s = time.monotonic()
        if now_s < self._lock_look_at_s:
            return False
        self._lock_look_at_s = now_s + _LOCK_LOOK_S
        lock = self.files.paths.writer_lock

        # A writer may have published or closed between the two looks: a free lock counts only for the same `state`.
        return not is_writing(lock, state.writer_pid) and self.files.state_file.read() == state

    def _unrecovered(self, state: State, old: Sight, *, killed: bool) -> Unrecovered:
        """What a reader sees of a log that was written in another boot, or whose writer was killed.

        The search is done once.
        """
        files, start = self.files, state.visible_end if killed else state.clean_end
        if isinstance(old, Unrecovered) and (old.counter, old.tail.start) == (state.counter, start):
            return old
        files.commit_log.load()
        tail = self._given_tail
        if tail is None or tail.start != start:
            find = find_killed_tail if killed else find_proven_tail
            tail = find(files, state, files.config.proven_tail_size)
            tell(tail, files.paths.root)
        return Unrecovered(files, tail, state.counter, self._seals_of(state))
