"""The writer of the log: the one place that appends and publishes.

`LogWriter` is the only class that appends, publishes and moves the clean end. The order matters:

    state (in flight at S) -> bytes -> sync -> dispatch -> state (visible end V) -> now and then: sync all, clean end C

A record of a plain put is dispatched and becomes visible after its sync (SYNC_FLUSH) or within a moment (ASYNC_FLUSH).
A failed sync poisons the writer: it does not append, sync or publish anything any more.

Threads: an append holds `mutex` from its first byte to its last; a Spark batch holds it until the batch is visible.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

from messagestore.errors import (
    CorruptionError,
    MessageIllegalError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePoisonedError,
    SyncFailedError,
)
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.consume_queue import queue_directory
from messagestore.files.mapped_file import sync_errors
from messagestore.files.state import NOTHING_IN_FLIGHT, State, boot_hash
from messagestore.files.written import FileReplaced, replace_file
from messagestore.format import record, record_columns
from messagestore.format.config import ASYNC_FLUSH
from messagestore.format.layout import HEAD_SEAL_SIZE, STATE_ASYNC, STATE_CLEAN, STATE_POISONED, UNIT
from messagestore.format.rows import NO_DATA, Row, Rows
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.dispatch import Dispatcher
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.seal_check import (
    Fault,
    fault_of,
    is_without_crc,
    listed,
    rebuild,
    seal_of_file,
    sealed_at,
    without_last_unit,
)
from messagestore.log.sealed_ends import Anchor, SealedEnds
from messagestore.log.store_files import Paths, StoreFiles
from messagestore.write.states import HEALTHS, TURNS, Health, HealthEvent, Turn, TurnEvent, moved

CLEAN_SIZE = 1 << 30
"""The clean end moves at the latest after this many bytes."""
_CLEAN_AGAIN_S = 1.0
"""How long after the disk had no room for the clean end it is tried again."""
MOST_AHEAD_MS = 3_600_000
"""Store times stand still while the clock is behind the last one by no more than this."""
CLOCK_IS_SET_MS = 1_577_836_800_000
"""2020: a clock before this is not set, and not believed."""
_log = logging.getLogger(__name__)
_LOCKS_CHECK_S = 0.02
MAX_QUEUE_OFFSET = ((1 << 63) - 1) // UNIT.size - (1 << 31)
"""Its place in the queue's files, and that of 2^31 messages behind it, is an int64."""


class LogEnd(NamedTuple):
    """Where the log ends, and the last record before that end (`size` 0: there is none)."""

    physical_offset: int
    last_position: int
    last_size: int
    last_store_timestamp_ms: int


def broker_comes(paths: Paths) -> StoreLockedError:
    """The error for who wants to write while a broker waits to open the store."""
    holder = "a RocketMQ broker that is starting"
    return StoreLockedError(
        f"{paths.lock}: {holder} waits to open this store, and gets it as soon as what was begun before is finished. "
        f"Nothing more is written by this process; what was acknowledged is on the disk. Open the store again when the "
        f"broker has stopped",
        path=paths.lock,
        holder=holder,
    )


class _Unbroken:
    """`LogWriter.unbroken`; a class, since a generator costs each put a microsecond more."""

    __slots__ = ("_failures", "_what", "_writer")

    def __init__(self, writer: LogWriter, what: str, failures: bool) -> None:
        self._writer, self._what, self._failures = writer, what, failures

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StorePoisonedError):
            return
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            self._writer.poison_untold(f"{self._what} ({error!r})")  # the caller sees the interrupt only
        elif self._failures:
            raise self._writer.poison(f"{self._what} ({error})") from error


def _columns_of(puts: list[Row | Rows]) -> Iterator[Rows]:
    """What was put, in the order of the log; single puts that follow one another go together."""
    for kind, same in itertools.groupby(puts, type):
        found: list[Any] = list(same)
        yield from [Rows.of(found)] if kind is Row else found


class LogWriter:
    """Appends to one store; made by recovery, used while the writer lock is held.

    Parameters
    ----------
    files : StoreFiles
    state : State
        As recovery published it.
    end : LogEnd
    journal : BatchJournal
    """

    def __init__(self, files: StoreFiles, state: State, end: LogEnd, journal: BatchJournal) -> None:
        self.files = files
        self.pid = os.getpid()
        self.turn = Turn.HELD
        """`state`, the journal and the store checkpoint are written while it is HELD only."""
        self.health = Health.SOUND
        self.poison_reason = ""
        """What made `health` POISONED."""
        self._moving = threading.Lock()
        self.locks_intact: Callable[[], bool] = lambda: True
        """Whether the lock files are still those that were locked."""
        self.broker_waits: Callable[[], bool] = lambda: False
        """Whether a Java broker waits to open the store: nothing new is begun then."""
        self._why_retired: Callable[[], StoreError] | None = None
        self.start_flushing: Callable[[], None] = lambda: None
        """Called before something is appended that the flush thread is to sync or publish."""
        self._locks_checked_s = 0.0
        self.flush_thread: int | None = None
        """The thread that shows `StorePoisonedError` to no caller."""
        self.log = files.commit_log
        self.journal = journal
        self.dispatcher = Dispatcher(files)
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()  # always taken after `mutex`
        self.state = state
        self.end = end
        self.synced_end = end.physical_offset
        self.next_offsets: dict[tuple[str, int], int] = {}
        self.pending: list[Row | Rows] = []
        self.clean_moved_s = time.monotonic()
        self._clean_again_s: float | None = None
        """When the clean end is tried again, after the disk had no room for it; None: nothing has failed."""
        self.half_dispatched = False
        """Some of what is pending may be in queues and index already: the disk had no room for all of it."""
        self.rebuilt: list[str] = []
        """What was done to queues whose files were damaged, in one line each."""

    def forget_threads(self) -> None:
        """In a forked child: no other thread is there to let go of what it held."""
        self.mutex = threading.RLock()
        self.sync_mutex = threading.Lock()
        self._moving = threading.Lock()
        for pool in (self.files.pool, self.files.log_pool):
            pool.forget_threads()

    # ---- usable or not

    def _turn(self, event: TurnEvent) -> None:
        with self._moving:
            self.turn = moved(TURNS, self.turn, event)

    def take_turn(self) -> None:
        """The process has taken the writer lock."""
        self._turn(TurnEvent.TAKE)

    def give_turn(self) -> None:
        """The process is about to give the writer lock back: the flush thread goes on, and writes no `state` any
        more.
        """
        with self.mutex:
            self._turn(TurnEvent.GIVE)

    def retire(self, why: Callable[[], StoreError]) -> None:
        """Another writer is the store's now, or none; `why` makes the error for those who still have this one."""
        self._why_retired = why
        self._turn(TurnEvent.RETIRE)

    def check_usable(self) -> None:
        """Raise when an earlier sync failed.

        Raises
        ------
        StorePoisonedError
        StoreClosedError
            In a forked child: the parent has the locks.
        StoreLockedError
            The store was closed for a broker that starts.
        """
        if os.getpid() != self.pid:
            raise StoreClosedError(f"{self.files.paths.root}: was opened before a fork; a child opens the store itself")
        if self.health is Health.SOUND:
            if self.turn is Turn.RETIRED and self._why_retired is not None:
                raise self._why_retired()
            return
        if threading.get_ident() != self.flush_thread:
            self._health(HealthEvent.TELL)
        raise StorePoisonedError(
            f"{self.files.paths.root}: {self.poison_reason}; nothing more is written by this process. Check the "
            f"disk, then "
            "close and open the store again: what was acknowledged is kept, the rest is checked"
        )

    def check_turn(self) -> None:
        """Refuse to begin something while a Java broker waits to open the store.

        Called under the mutex and before `check_usable`: who lets the broker in takes the mutex after the broker has
        come, and retires this writer before the broker is gone from here.

        Raises
        ------
        StoreLockedError
            Nothing was written; what was appended before is finished, and then the broker starts.
        """
        if self.broker_waits():
            raise broker_comes(self.files.paths)

    def check_locks(self, *, often: bool = False) -> None:
        """Poison when a lock file is gone: whoever removed it as "stale" has let another writer in. Also when the disk
        does not say whether it is there: a writer that cannot know writes nothing.

        With `often`, as for single puts, the files are looked at only when the last look is `_LOCKS_CHECK_S` ago.
        """
        now_s = time.monotonic()
        if often and now_s < self._locks_checked_s + _LOCKS_CHECK_S:
            return
        self._locks_checked_s = now_s
        try:
            intact = self.locks_intact()
        except OSError as error:
            raise self.poison(f"a lock file cannot be looked at ({error})") from error
        if not intact:
            self._turn(TurnEvent.LOSE)
            raise self.poison(
                "a lock file was removed or replaced, or a broker waited for longer than the kernel lets it, and "
                "another writer may be at work"
            )

    def _health(self, event: HealthEvent, reason: str = "") -> None:
        with self._moving:
            after = moved(HEALTHS, self.health, event)
            self.poison_reason = self.poison_reason or reason
            self.health = after

    def stop(self, reason: str) -> None:
        """Nothing more is appended, synced or published. Without the mutex, and nothing is written: `poison` follows,
        where that is possible.
        """
        self._health(HealthEvent.POISON, reason)

    def poison_untold(self, reason: str) -> None:
        """Stop all writing, and say so in `state` as far as that works; no caller hears of it now."""
        self.stop(reason)
        if not self.state.poisoned and self.turn is Turn.HELD:
            with contextlib.suppress(
                OSError
            ):  # the disk is failing; what is in flight makes the next writer recover as well
                self.write_state(flags=self.state.flags | STATE_POISONED)

    def poison(self, reason: str) -> StorePoisonedError:
        """Stop all writing; say so in `state` as far as that works; the error to raise."""
        self.poison_untold(reason)
        try:
            self.check_usable()
        except StorePoisonedError as error:
            return error
        raise AssertionError("unreachable")

    def write_state(self, **changes: int) -> None:
        """One change of `state`."""
        self.state = self.files.state_file.write(self._changed_state(changes))

    def _changed_state(self, changes: dict[str, int]) -> State:
        if self.turn is not Turn.HELD:
            self.check_usable()
            raise AssertionError(f"`state` is another process's to write: {self.turn.value}")
        counter = max(self.state.counter, self.files.state_file.last_counter) + 1  # a change may have failed half-way
        return replace(self.state, counter=counter, boot_hash=boot_hash(), writer_pid=os.getpid(), **changes)

    # ---- appending

    def ensure_abort(self) -> None:
        """`abort` exists and holds our token, before the first byte of the first write.

        A broker that finds it rebuilds what is missing; without it, it trusts what it finds.
        """
        files = self.files
        if files.abort_is_ours:
            return
        try:
            replace_file(
                files.disk, files.paths.abort, files.abort_token.encode() + b"\n", via=files.paths.temporary("abort")
            )
        except Exception as error:  # also for want of memory: a second try would take it for synced
            if files.abort_is_ours:  # it is there, and may not be there after a power cut
                raise self.poison(f"a sync failed ({error})") from error
            raise

    def begin(self, physical_offset: int, flush_disk_type: str) -> None:
        """Before the first byte of an append: `abort` is ours, and `state` says that bytes from S on may be
        unfinished.
        """
        self.ensure_abort()
        if flush_disk_type == ASYNC_FLUSH and not self.state.asynchronous:
            # Must be on the disk before the first ASYNC byte: without it a ConsumeQueue unit proves its record synced.
            flags = (self.state.flags | STATE_ASYNC) & ~STATE_CLEAN
            self.state = self.files.state_file.write_both(
                self._changed_state({"flags": flags, "in_flight": physical_offset})
            )
            try:
                self.files.state_file.sync()
            except Exception as error:
                raise self.poison(f"a sync failed ({error})") from error
        elif self.state.in_flight != physical_offset or self.state.clean:
            self.write_state(in_flight=physical_offset, flags=self.state.flags & ~STATE_CLEAN)

    def now_ms(self) -> int:
        """The next store time: now; the last one while the clock is a little behind that.

        Asked before the first byte of an append. When the last record's time lies far ahead of a clock that has been
        set, that record's clock was wrong: times go back to now, instead of standing still until the clock gets there.
        """
        now_ms, last_ms = self.files.disk.time_ns() // 1_000_000, self.end.last_store_timestamp_ms
        if now_ms >= last_ms:
            return now_ms
        if last_ms - now_ms <= MOST_AHEAD_MS or now_ms < CLOCK_IS_SET_MS:
            return last_ms
        self._go_back_to(now_ms, last_ms)
        return now_ms

    def _go_back_to(self, now_ms: int, last_ms: int) -> None:
        """Before the first record with an earlier time: the store checkpoint must not be ahead of it.

        A broker that recovers trusts its queues below the newest segment that begins before the checkpoint's times.
        Segments to come would begin before them although they are not synced.
        """
        files, path = self.files, self.files.paths.checkpoint
        old = store_checkpoint.read(files.disk, path)
        times = ("physic_timestamp_ms", "logics_timestamp_ms", "index_timestamp_ms")
        lower = {name: min(getattr(old, name), now_ms - 1) for name in times}
        if all(getattr(old, name) == value for name, value in lower.items()):
            return
        try:
            store_checkpoint.write(files.disk, path, replace(old, **lower), via=files.paths.temporary("checkpoint"))
        except StoreFullError:
            raise
        except OSError as error:
            raise self.poison(f"the store checkpoint could not be written ({error})") from error
        _log.warning(
            "%s: the last store time, %d, is %d s ahead of this machine's clock: store times go back to now, and "
            "looking for a time there may miss messages; see `messagestore verify`",
            files.paths.root,
            last_ms,
            (last_ms - now_ms) // 1000,
        )

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Number the next message of a queue gets."""
        key = (topic, queue_id)
        offset = self.next_offsets.get(key)
        if offset is None:
            offset = self.next_offsets[key] = self.checked_queue_end(topic, queue_id)
        if offset > MAX_QUEUE_OFFSET:
            text = (
                f"{topic}/{queue_id}: queue offset {offset}; allowed are at most {MAX_QUEUE_OFFSET}: use another queue"
            )
            raise MessageIllegalError(text, field="queue_offset", size=offset, limit=MAX_QUEUE_OFFSET)
        return offset

    def checked_queue_end(self, topic: str, queue_id: int) -> int:
        """End of a queue as the log proves it; units a crashed broker left behind the end are zeroed."""
        key = (topic, queue_id)
        self.files.disk.check_folders(f"{queue_directory(self.files.paths.root, topic, queue_id)}/{'0' * 20}")
        self._check_sound(key)
        queue = self.files.queue(topic, queue_id)
        if not queue.files.offsets and self.journal.had_queue(topic, queue_id):
            folder = queue.files.directory
            if not self.files.disk.is_folder(folder):
                raise CorruptionError(
                    folder,
                    0,
                    f"the units of {topic}/{queue_id}, which had messages when the store was closed",
                    "no folder",
                    hint=f"Remove the folder {os.path.dirname(folder)} and run `messagestore recover`: its queues are "
                    "made again from the log.",
                )
        known = self.sealed_ends().end_of(key)
        offset = (
            known
            if known is not None
            else proven_queue_end(self.files, topic, queue_id, self.end.physical_offset, crc=False)
        )
        if queue.end(hint=offset) > offset:
            queue.truncate(offset)
        return offset

    # ---- where the queues end

    def sealed_ends(self) -> SealedEnds:
        """Where the queues end in what has been dispatched, as far as it is known."""
        files = self.files
        if files.ends is None:
            files.ends = sealed_at(files, self.state.clean_end, self.state.visible_end)
        return files.ends

    def make_sound(self, faults: dict[tuple[str, int], Fault]) -> str:
        """Make queues again from the log whose files are not as they were, and say so in one line. Call under the
        mutex.

        Raises
        ------
        CorruptionError
            The log does not give what the queues had.
        StorePoisonedError
            A sync failed.
        """
        files, ends = self.files, self.sealed_ends()
        first = next(iter(faults.values()))
        try:
            rebuild(files, faults, self.state.visible_end)
        except OSError as error:
            raise self.poison(f"queues could not be made again ({error})") from error
        for key in faults:
            fault = fault_of(files, ends, key)
            if fault is not None:
                raise CorruptionError(
                    fault.path,
                    fault.position,
                    fault.expected,
                    f"{fault.found}, also after it was made from the log",
                    hint=f"Put back the folder consumequeue from a copy. To go on with what the log gives, move "
                    f"{files.paths.ends} away and run `messagestore recover`.",
                )
        count = f"{len(faults)} queue" + ("" if len(faults) == 1 else "s")
        line = (
            f"{count} did not have what the log says they must have ({listed(faults)}); rebuilt from the log. "
            f"The first: {first.path}: offset {first.position}: expected {first.expected}, found {first.found}"
        )
        _log.warning("%s: %s", files.paths.root, line)
        self.rebuilt.append(line)
        return line

    def _check_sound(self, key: tuple[str, int]) -> None:
        """Look at a queue's last unit; when it is not there, look at all queues, and make again what is damaged."""
        ends = self.sealed_ends()
        fault = fault_of(self.files, ends, key)
        if fault is None:
            return
        faults = {key: fault}
        for other in {*ends.seals, *ends.asked}:
            found = fault_of(self.files, ends, other, thorough=True)
            if found is not None:
                faults.setdefault(other, found)
        self.make_sound(faults)

    def check_queues(self) -> str | None:
        """Look at all units of all queues, and make again those that are not as they were; in one line what was done.

        Queues that `spark/ends` does not know are compared with the log, and are known from then on. Call it when
        nothing is in flight.

        Raises
        ------
        CorruptionError
            The log does not give what a queue had.
        """
        with self.mutex:
            self.check_usable()
            files, ends = self.files, self.sealed_ends()
            found = {key: fault_of(files, ends, key, thorough=True) for key in {*ends.seals, *ends.asked}}
            faults = {key: fault for key, fault in found.items() if fault is not None}
            there = {(t, q) for t, queue_ids in files.queue_names().items() for q in queue_ids}
            unknown = there - ends.seals.keys() - ends.asked.keys()
            if unknown:
                end = self.state.visible_end
                for key in without_last_unit(files, files.commit_log.min_offset, end, unknown):
                    directory = files.queue(*key).files.directory
                    faults[key] = Fault(directory, 0, f"a unit for the last record of {key[0]}/{key[1]}", "none")
            line = self.make_sound(faults) if faults else None
            without_crc = {key for key, seal in ends.seals.items() if is_without_crc(files, key, seal)}
            for key in unknown | without_crc:
                ends.ask(key)
            if (unknown or without_crc) and self.state.clean_end == self.state.visible_end:
                self._seal_asked()
                self._write_ends()
            return line

    def _seal_asked(self) -> None:
        """Ask the files of queues that were not written through this object for their last units."""
        files, ends = self.files, self.sealed_ends()
        limit = self.state.visible_end
        for last_try in (False, True):
            missing = []
            for key in list(ends.asked):
                known = ends.asked[key]
                seal = seal_of_file(files, ends, key, limit)
                if seal is None and known and not last_try:
                    missing.append(key)
                else:
                    ends.answer(key, seal)
            if not missing:
                return
            rebuild(files, missing, limit)

    def _write_ends(self) -> None:
        state, files = self.state, self.files
        anchor = Anchor(state.anchor_position, state.anchor_size, state.anchor_crc)
        self.sealed_ends().write(files.disk, files.paths.ends, files.paths.temporary("ends"), state.clean_end, anchor)

    def append(
        self,
        data: bytearray,
        topic: str,
        queue_id: int,
        tags_code: int,
        key_hashes: list[int],
        *,
        property_crc: bool,
        flush_disk_type: str,
        half: bool = False,
    ) -> Row:
        """Append one encoded record; it is not dispatched, synced or visible yet.

        `half`: it is PREPARED or ROLLBACK; it gets queue offset 0 and no unit, and its queue does not advance.

        Raises
        ------
        StoreFullError
            Nothing of it is in the log.
        """
        self.start_flushing()
        with self.mutex, self.unbroken("an append was interrupted"):
            self.check_turn()
            self.check_usable()
            self.check_locks(often=True)
            self.check_dispatched()
            queue_offset = 0 if half else self.next_queue_offset(topic, queue_id)
            if self.state.in_flight == NOTHING_IN_FLIGHT or (
                flush_disk_type == ASYNC_FLUSH and not self.state.asynchronous
            ):
                self.begin(self.end.physical_offset, flush_disk_type)
            size, now = len(data), self.now_ms()
            physical_offset = self.open_space(size)
            record.stamp_record(
                data,
                queue_offset=queue_offset,
                physical_offset=physical_offset,
                store_timestamp_ms=now,
                property_crc=property_crc,
            )
            self.write_or_undo(physical_offset, data)
            row = Row(topic, queue_id, queue_offset, physical_offset, size, tags_code, now, key_hashes, not half)
            self.pending.append(row)
            if not half:
                self.next_offsets[(topic, queue_id)] = queue_offset + 1
            self.end = LogEnd(physical_offset + size, physical_offset, size, now)
            return row

    def append_side_by_side(self, rows: Rows, topic: str, queue_id: int, flush_disk_type: str) -> Rows:
        """Append encoded records of one queue as one MessageExtBatch: in one segment, with one store time.

        The first eight bytes are written last, so a kill leaves all of it or nothing.
        """
        self.start_flushing()
        with self.mutex, self.unbroken("an append was interrupted"):
            self.check_turn()
            self.check_usable()
            self.check_locks(often=True)
            self.check_dispatched()
            queue_offset = self.next_queue_offset(topic, queue_id)
            if self.state.in_flight == NOTHING_IN_FLIGHT or (
                flush_disk_type == ASYNC_FLUSH and not self.state.asynchronous
            ):
                self.begin(self.end.physical_offset, flush_disk_type)
            now = self.now_ms()
            rows = rows.numbered({(topic, queue_id): queue_offset}).at(self.open_space(rows.end), now)
            record_columns.stamp_rows(rows)
            data = rows.data.data
            self.write_or_undo(rows.physical_offset + HEAD_SEAL_SIZE, data[HEAD_SEAL_SIZE:])
            self.write_or_undo(rows.physical_offset, data[:HEAD_SEAL_SIZE])
            self.pending.append(replace(rows, data=NO_DATA))
            self.next_offsets[(topic, queue_id)] = queue_offset + rows.row_count
            self.end = LogEnd(rows.end, int(rows.physical_offsets[-1]), int(rows.sizes[-1]), now)
            return rows

    def open_space(self, size: int) -> int:
        """Where `size` bytes can go: at the end, or behind a BLANK at the start of the next segment."""
        position = self.end.physical_offset
        if not self.log.blank_needed(position, size):
            return position
        start = position + self.log.left(position)
        self.log.check_room(start + size)
        self.write_or_undo(position, self.log.blank(position))
        return start

    def write_or_undo(self, physical_offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write; when that fails make what was written since the log's end zero again and raise."""
        try:
            self.log.write(physical_offset, data)
        except SyncFailedError as error:
            raise self.poison(f"{error}") from error
        except OSError:
            self.undo(physical_offset + len(data))
            raise

    def undo(self, end: int) -> None:
        """Make everything from the log's end to `end` zero; if even that fails, poison."""
        try:
            self.log.undo(
                self.end.physical_offset, max(end, self.end.physical_offset + self.log.left(self.end.physical_offset))
            )
        except OSError as error:
            raise self.poison(f"an append failed and could not be undone ({error})") from error

    def unbroken(self, what: str, *, failures: bool = False) -> _Unbroken:
        """An interrupt or want of memory in here, and with `failures` any error, poisons: only recovery can tell what
        was done.
        """
        return _Unbroken(self, what, failures)

    # ---- publishing

    def sync_to_end(self) -> None:
        """Everything up to the log's end is durable when this returns; a failure poisons. Call under the mutex."""
        self.sync_log(self.end.physical_offset)

    def sync_log(self, end: int, *, segment: int | None = None) -> None:
        """Sync what was written below `end`; with `segment`, that one segment only.

        One sync at a time: a descriptor reports an error once, so the loser of a race would see success.
        """
        with self.sync_mutex:
            self.check_usable()
            try:
                if segment is None:
                    self.log.sync_plan(self.synced_end, end).run()
                else:
                    self.log.sync_segment(segment)
            except OSError as error:
                raise self.poison(f"a sync failed ({error})") from error
        if segment is None:
            self.synced_end = end

    def group_sync(self) -> int:
        """Sync everything appended so far for all who wait, without holding up appends; then publish it. The synced
        end.

        The clean end is not moved: what is published here is acknowledged, whatever becomes of that.
        """
        self.mutex.acquire()
        with self.sync_mutex:
            try:
                self.check_usable()
                end = self.end.physical_offset
                plan = self.log.sync_plan(self.synced_end, end)
            finally:
                self.mutex.release()
            try:
                plan.run()
            except OSError as error:
                self.stop(f"a sync failed ({error})")
        with self.mutex:
            if self.health is not Health.SOUND:
                raise self.poison(self.poison_reason)
            self.synced_end = max(self.synced_end, end)
            try:
                self._drain(end)
            except StoreFullError as error:
                self.tell_undispatched(error)  # durable, so it is acknowledged
        return end

    def drain(self, end: int | None = None) -> None:
        """Dispatch plain puts that end at or below `end` and make them visible.

        Raises
        ------
        StoreFullError
            There is no room for their units: they stay pending, and nothing is appended before they are dispatched.
        """
        with self.mutex:
            if self._drain(end):
                self.maybe_move_clean()

    def _drain(self, end: int | None = None) -> bool:
        """As `drain`, without the clean end; whether there was something. Call under the mutex.

        What had no room when the writer lock was given back waits for who takes it next.
        """
        self.check_usable()
        if not self.pending or self.turn is Turn.AWAY:
            return False
        count = len(self.pending)
        if end is not None and self.pending[-1].physical_offset >= end:
            count = sum(put.physical_offset < end for put in self.pending)
        if not count:
            return False
        puts = self.pending[:count]
        visible = puts[-1].end
        with self.unbroken("records are in the log, but could not be published", failures=True):
            full = self._publish_puts(puts, self.pending[count:], visible)
        if full is not None:
            raise full
        return True

    def _publish_puts(self, puts: list[Row | Rows], others: list[Row | Rows], visible: int) -> StoreFullError | None:
        """Dispatch the first of what is pending; the error when there is no room for it, and all is pending still."""
        self.pending = others
        self.check_locks(often=True)
        start = puts[0].physical_offset
        self.check_segments(start, visible)
        try:
            if self.half_dispatched:
                self.dispatcher.repair(start)
            self.dispatch_or_poison(lambda: _columns_of(puts), start)
            self.write_state(visible_end=visible, in_flight=visible)
        except StoreFullError as error:
            self.pending, self.half_dispatched = puts + others, True
            return self._no_room(
                f"the disk has no room for the ConsumeQueue units of {len(self.pending)} puts ({error}). They are in "
                "the log, and become visible when there is room, or when the store is opened again; nothing more was "
                "appended",
                error,
            )
        self.half_dispatched = False
        return None

    def tell_undispatched(self, error: StoreFullError) -> None:
        """Say that puts were acknowledged and are not visible yet."""
        _log.warning("%s", error)

    def _no_room(self, what: str, error: StoreFullError) -> StoreFullError:
        """An error of a full disk that says what was done and what to do."""
        text = f"{self.files.paths.root}: {what}. Make room"
        full = StoreFullError(text, path=error.path, needed=error.needed, free=error.free)
        full.errno = error.errno
        return full

    def check_dispatched(self) -> None:
        """Before an append: what had no room in the queues is dispatched first.

        Raises
        ------
        StoreFullError
            There is no room still; nothing was appended.
        """
        if self.half_dispatched:
            self.drain()

    def check_segments(self, start: int, end: int) -> None:
        """Poison when a segment that was written is no longer the file at its path."""
        try:
            self.log.check_files(start, end)
        except FileReplaced as error:
            raise self.poison(
                f"{error.path} was deleted or replaced while it was written (a broker started on this store?)"
            ) from error

    def dispatch_or_poison(self, rows: Callable[[], Iterable[Rows]], physical_offset: int) -> None:
        """Dispatch, after a failure once more; records that are in the log but in no queue must not be built upon.

        Parameters
        ----------
        rows : callable
            Gives the rows, each time from the first one on.
        physical_offset : int
            Of the first record.

        Raises
        ------
        StoreFullError
            There is no room for all of it; it may be tried again, after `Dispatcher.repair`.
        """
        failures = (OSError, StoreError)
        try:
            self.dispatcher.dispatch(rows())
            self.dispatcher.check_files()
        except SyncFailedError as error:
            raise self.poison(f"{error}") from error
        except failures as first_error:
            try:
                self.dispatcher.repair(physical_offset)
                self.dispatcher.dispatch(rows())
                self.dispatcher.check_files()
            except StoreFullError:
                raise
            except failures:
                reason = f"records are in the log, but their queues could not be written ({first_error})"
                raise self.poison(reason) from first_error

    def finish(self) -> None:
        """Publish all that is pending; afterwards nothing is in flight."""
        with self.mutex:
            if self.health is not Health.SOUND:
                return
            if self.pending:
                if self.files.config.flush_disk_type != ASYNC_FLUSH:
                    self.sync_to_end()  # visible only when durable
                self.drain()
            if self.state.in_flight != NOTHING_IN_FLIGHT:
                self.write_state(in_flight=NOTHING_IN_FLIGHT)

    # ---- clean end

    def maybe_move_clean(self) -> None:
        """Move the clean end when it is time: an interval, 1 GiB, or a new segment.

        It saves the next recovery work, and nothing that was acknowledged depends on it. So where the disk has no room
        for the few bytes that say so, it stays where it is, and is tried again a moment later.
        """
        with self.mutex:
            self._maybe_move_clean()

    def _maybe_move_clean(self) -> None:
        clean, visible, again_s = self.state.clean_end, self.state.visible_end, self._clean_again_s
        if (clean == visible and again_s is None) or self.pending or self.turn is not Turn.HELD:
            return
        now_s = time.monotonic()
        if again_s is not None and now_s < again_s:
            return
        due = now_s - self.clean_moved_s >= self.files.config.clean_interval_s
        rolled = self.log.segment_of(visible) != self.log.segment_of(clean)
        if due or rolled or again_s is not None or visible - clean >= CLEAN_SIZE:
            try:
                self.move_clean()
            except StoreFullError as error:
                if again_s is None:
                    _log.warning("%s", error)
                self._clean_again_s = time.monotonic() + _CLEAN_AGAIN_S

    def move_clean(self, *, closing: bool = False) -> None:
        """C := V. CommitLog, ConsumeQueues and index are synced first, then `state`, then the store checkpoint.

        Raises
        ------
        StoreFullError
            The disk has no room to say so. Log, queues and index are synced, and the store may be gone on with.
        StorePoisonedError
            A sync failed.
        """
        self.check_usable()
        if self.pending:
            raise AssertionError("the clean end moves only when everything is published")
        end = self.end
        try:
            self.sync_to_end()
            self._seal_asked()
            with sync_errors(self.files.paths.root):
                self.files.sync_derived()
            self._write_clean_end(end, closing=closing)
        except StoreFullError as error:
            synced = f"everything up to {end.physical_offset} is synced"
            text = f"the disk has no room to note that {synced} ({error}). {synced.capitalize()}, and nothing is lost"
            raise self._no_room(text, error) from error
        except OSError as error:
            raise self.poison(f"the clean end could not be made durable ({error})") from error
        self.log.forget_written(end.physical_offset)
        self.clean_moved_s, self._clean_again_s = time.monotonic(), None

    def _write_clean_end(self, end: LogEnd, *, closing: bool) -> None:
        data = self.log.exact(end.last_position, end.last_size) if end.last_size else b""
        flags = (self.state.flags & ~STATE_ASYNC) | (STATE_CLEAN if closing else 0)
        self.write_state(
            clean_end=end.physical_offset,
            anchor_position=end.last_position,
            anchor_size=end.last_size,
            anchor_crc=record.crc32(data),
            flags=flags,
        )
        with sync_errors(self.files.paths.state):
            self.files.state_file.sync()
        self._write_checkpoint(end)
        self._write_journal(end)
        self._write_ends()

    def _write_journal(self, end: LogEnd) -> None:
        files, journal = self.files, self.journal
        journal.end = end.physical_offset
        if files.identity is not None:
            journal.identity = files.identity.to_fields()
        if journal.queues is None or files.others_named:
            files.ever_written.update((t, q) for t, queue_ids in files.queue_names().items() for q in queue_ids)
        if files.others_named:
            told = BatchJournal.read(files.disk, files.paths.journal, files.paths.journal_1)
            files.ever_written.update(told.queue_names())
        journal.note_queues(files.ever_written)
        files.ever_written.clear()
        journal.write(
            files.disk,
            files.paths.journal,
            files.paths.temporary("journal"),
            old_path=files.paths.journal_1,
            retention=files.config.journal_retention,
        )
        files.others_named = False

    def _write_checkpoint(self, end: LogEnd) -> None:
        files = self.files
        old = store_checkpoint.read(files.disk, files.paths.checkpoint)
        index_ms = old.index_timestamp_ms
        if files.index is not None:  # below the times to come: a broker keeps an index file that ends at this time
            last_ms = end.last_store_timestamp_ms  # lower than the index's end when times have gone back
            index_ms = min(files.index.end_timestamp_ms, last_ms, files.disk.time_ns() // 1_000_000 - 1)
        new = replace(
            old,
            physic_timestamp_ms=end.last_store_timestamp_ms,
            logics_timestamp_ms=end.last_store_timestamp_ms,
            index_timestamp_ms=index_ms,
            confirm_physical_offset=end.last_position,
        )
        self.journal.checkpoint_crc = record.crc32(new.to_bytes())
        store_checkpoint.write(files.disk, files.paths.checkpoint, new, via=files.paths.temporary("checkpoint"))
