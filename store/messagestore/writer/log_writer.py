"""The writer of the log.

`LogWriter` appends single puts, and publishes them; `whole_batch` does so for a batch, on top of it. Nothing else
appends or publishes. Its parts are modules of their own: `standing` says whether it may write, `queue_numbers` says
which queue offset comes next and `store_clock` which store time, `pool_drain` brings buffered puts to the files, and
`clean_end` moves the clean end. The writer always works in this order:

    state (in flight at S) -> bytes -> sync -> dispatch -> state (visible end V) -> now and then: sync all, clean end C

`state` is written before the bytes only if it does not say yet that something is in flight. With ASYNC_FLUSH, the sync
comes at any time after the bytes.

With the TransientStorePool, single puts wait in memory before that, and `PoolDrain` writes their bytes.

The record of a plain put is dispatched and becomes visible after its sync (SYNC_FLUSH) or within a moment
(ASYNC_FLUSH). A failed sync poisons the writer: it no longer appends, syncs or publishes anything.

Threads: an append holds `mutex` from its first byte to its last; a Spark batch holds it until the batch is visible.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import (
    MessageIllegalError,
    PutMessageStatus,
    StoreError,
    StoreFullError,
    SyncFailedError,
    note_statuses,
)
from messagestore.files.disk import replace_file
from messagestore.files.state import NOTHING_IN_FLIGHT, State
from messagestore.files.transient_store_pool import TransientStorePool
from messagestore.files.unsynced import FileReplaced
from messagestore.format import record_columns, record_encode, record_scan
from messagestore.format.config import ASYNC_FLUSH
from messagestore.format.layout import BLANK, HEAD_SEAL_SIZE, STATE_ASYNC, STATE_CLEAN
from messagestore.format.rows import NO_DATA, SCHEDULE_TOPIC, Row, Rows
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.dispatch import FEW_COUNT, Dispatcher
from messagestore.log.log_end import LogEnd
from messagestore.log.store_files import StoreFiles
from messagestore.writer.clean_end import CleanEnd
from messagestore.writer.pool_drain import PoolDrain
from messagestore.writer.queue_numbers import QueueNumbers
from messagestore.writer.standing import Standing
from messagestore.writer.states import Health, Turn
from messagestore.writer.statistics import clock
from messagestore.writer.store_clock import StoreClock

SLOW_S = 0.5
"""A put that holds the writer's mutex for longer than this is logged, as in RocketMQ."""
_log = logging.getLogger(__name__)


def _columns_of(puts: list[Row | Rows]) -> Iterator[Rows]:
    """What was put, in the order of the log; consecutive single puts are combined into one `Rows`."""
    for kind, same in itertools.groupby(puts, type):
        run: list[Any] = list(same)
        yield from [Rows.of(run)] if kind is Row else run


def _only_few(puts: list[Row | Rows]) -> TypeGuard[list[Row]]:
    return len(puts) <= FEW_COUNT and all(type(put) is Row for put in puts)


def _log_slow(
    root: str,
    held_s: float,
    topic: str,
    queue_id: int,
    data: NDArray[np.uint8],
    places: NDArray[np.int64],
    outcome: str,
) -> None:
    """Log that a put has held the mutex for long, so that all others had to wait; `outcome` says how it ended."""
    _log.warning(
        "%s: a put to %s/%d held the writer's lock for %d ms, and other puts waited meanwhile: bodies of %d bytes, "
        "records of %d, %s. The disk may be slow or busy",
        root,
        topic,
        queue_id,
        int(held_s * 1000),
        int(record_scan.heads(data, places)["body_size"].sum()),
        len(data),
        outcome or f"appended at {int(record_scan.heads(data, places)['physical_offset'][0])}",
    )


class LogWriter(Standing):
    """Appends to one store.

    Recovery makes the writer, and it is used while the writer lock is held.

    Parameters
    ----------
    files : StoreFiles
    state : State
        The `state` that recovery published.
    end : LogEnd
    journal : BatchJournal
    """

    def __init__(self, files: StoreFiles, state: State, end: LogEnd, journal: BatchJournal) -> None:
        super().__init__(files, state, end, journal)

        # They use this object as the `Standing` that it is from here on.
        self.numbers = QueueNumbers(self)
        self.clean_end = CleanEnd(self, self.numbers)
        self.clock = StoreClock(self)
        self.pool_drain = PoolDrain(self)
        self.dispatcher = Dispatcher(files)

        self.topics_put: dict[str, list[int]] = {}
        """How many messages were appended to each topic, and their bytes. It changes under the mutex."""
        self.half_dispatched = False
        """Whether a part of `pending` may be in the queues and the index already, because the disk had no room for
        all of it.
        """

        self._unbroken_put = self.unbroken("an append was interrupted")
        self.start_flushing: Callable[[], object] = lambda: None
        """Called before each append that the flush thread has to sync or publish."""
        self.allocate_ahead: Callable[[], None] = lambda: None
        """Called when the next segments should be made."""

        self._allocate_from = self.log.segment_of(end.physical_offset) + self.log.segment_size * 7 // 8
        """The next put from here on asks for the next segments."""

    # ---- appending

    def ensure_abort(self) -> None:
        """Make sure that `abort` exists and holds our token, before the first byte of the first write.

        A broker that finds `abort` rebuilds what is missing; a broker that does not find it trusts the files as they
        are.
        """
        files = self.files
        if files.abort_is_ours:
            return
        try:
            replace_file(
                files.disk, files.paths.abort, files.abort_token.encode() + b"\n", via=files.paths.temporary("abort")
            )
        except Exception as error:  # a MemoryError as well: a second try would assume that the file is synced
            if files.abort_is_ours:  # the file exists, but may be lost in a power cut
                raise self.poison(f"a sync failed ({error})") from error
            raise

    def begin(self, physical_offset: int, flush_disk_type: str) -> None:
        """Prepare an append before its first byte: `abort` becomes ours, and `state` says that the bytes from S on may
        be unfinished.
        """
        self.ensure_abort()
        if flush_disk_type == ASYNC_FLUSH and not self.state.asynchronous:
            # The flag must be on the disk before the first ASYNC byte: without it, a ConsumeQueue unit proves that its
            # record is synced.
            flags = (self.state.flags | STATE_ASYNC) & ~STATE_CLEAN
            flushed = self.state.visible_end  # so far, what is visible is synced
            self.write_state(both=True, flags=flags, in_flight=physical_offset, known_flushed_end=flushed)
            try:
                self.files.state_file.sync()
            except Exception as error:
                raise self.poison(f"a sync failed ({error})") from error
        elif self.state.in_flight != physical_offset or self.state.clean:
            self.write_state(in_flight=physical_offset, flags=self.state.flags & ~STATE_CLEAN)

    def check_fits(self, size: int) -> None:
        """Refuse a record, or records side by side, that no segment has room for.

        Raises
        ------
        MessageIllegalError
        """
        room = self.log.segment_size - BLANK.size
        if size > room:
            raise MessageIllegalError(
                f"record: found {size} bytes; allowed are {room}, the room in a segment (mappedFileSizeCommitLog)",
                field="body",
                size=size,
                limit=room,
            )

    def append(
        self,
        data: bytearray,
        topic: str,
        queue_id: int,
        tags_code: int,
        key_hashes: Sequence[int],
        *,
        property_crc: bool,
        flush_disk_type: str,
        half: bool = False,
    ) -> tuple[Row, float]:
        """Append one encoded record, which is not dispatched, synced or visible yet; also returns for how many
        seconds the append held the mutex.

        In `SCHEDULE_TOPIC`, `tags_code` says how long the message waits.

        `half` says that the record is PREPARED or ROLLBACK: it gets queue offset 0 and no unit, and its queue does not
        advance.

        Raises
        ------
        StoreFullError
            The disk is full; nothing of the record is in the log.
        """
        self.start_flushing()
        began_s, outcome = 0.0, ""
        try:
            with self.mutex, self._unbroken_put:
                began_s = clock()
                self._check_put(began_s)

                queue_offset = 0 if half else self.numbers.next_offset(topic, queue_id)
                self._begin_put(flush_disk_type)
                if topic == SCHEDULE_TOPIC:
                    # In flight already, and on the disk before the record that needs them.
                    self.keep_levels()

                size, now_ms = len(data), self.clock.put_ms()
                pool = self.pool
                if pool is None or not self._is_buffered(pool, size, flush_disk_type):
                    pool = None
                    physical_offset = self.open_space(size)
                else:
                    physical_offset = self.open_space(size, blank=False)

                record_encode.stamp_one(data, queue_offset, physical_offset, now_ms, property_crc)
                if pool is None:
                    self.write_or_undo(physical_offset, data)
                else:
                    pool.put(self.end.physical_offset, physical_offset, data)

                if topic == SCHEDULE_TOPIC:
                    tags_code += now_ms  # when the message is due
                row = Row(topic, queue_id, queue_offset, physical_offset, size, tags_code, now_ms, key_hashes, not half)
                self.pending.append(row)
                if not half:
                    self.numbers.next_offsets[topic, queue_id] = queue_offset + 1

                end = (physical_offset + size, physical_offset, size, now_ms)
                self.appended(tuple.__new__(LogEnd, end), topic, 1, size)  # at half the cost of a call of the class
        except BaseException as error:
            outcome = repr(error)
            raise
        finally:
            held_s = clock() - began_s if began_s else 0.0
            if held_s > SLOW_S:
                places = np.zeros(1, np.int64)
                _log_slow(
                    self.files.paths.root, held_s, topic, queue_id, np.frombuffer(data, np.uint8), places, outcome
                )
        return row, held_s

    def append_side_by_side(self, rows: Rows, topic: str, queue_id: int, flush_disk_type: str) -> tuple[Rows, float]:
        """Append encoded records of one queue as one MessageExtBatch: in one segment, with one store time; also
        returns for how many seconds the append held the mutex.

        The first eight bytes are written last, so a kill leaves the whole batch or nothing of it.
        """
        self.start_flushing()
        began_s, outcome = 0.0, ""
        try:
            with self.mutex, self._unbroken_put:
                began_s = clock()
                self._check_put(began_s)
                self.pool_drain.run()

                queue_offset = self.numbers.next_offset(topic, queue_id)
                self._begin_put(flush_disk_type)
                now_ms, size = self.clock.put_ms(), rows.end

                rows = rows.numbered({(topic, queue_id): queue_offset}).at(self.open_space(rows.end), now_ms)
                record_columns.stamp_rows(rows)
                data = rows.data.data

                self.write_or_undo(rows.physical_offset + HEAD_SEAL_SIZE, data[HEAD_SEAL_SIZE:])
                self.write_or_undo(rows.physical_offset, data[:HEAD_SEAL_SIZE])

                self.pending.append(replace(rows, data=NO_DATA))
                end = LogEnd(rows.end, int(rows.physical_offsets[-1]), int(rows.sizes[-1]), now_ms)
                self.numbers.next_offsets[topic, queue_id] = queue_offset + rows.row_count
                self.appended(end, topic, rows.row_count, size)
        except BaseException as error:
            outcome = repr(error)
            raise
        finally:
            held_s = clock() - began_s if began_s else 0.0
            if held_s > SLOW_S:
                places = rows.physical_offsets - rows.physical_offset
                _log_slow(self.files.paths.root, held_s, topic, queue_id, rows.data, places, outcome)
        return rows, held_s

    def _check_put(self, now_s: float) -> None:
        """Check that a put can be appended now, and dispatch first what had no room. Call under the mutex."""
        self.check_turn(now_s)
        self.check_usable()
        self.check_locks(now_s, often=True)
        self.check_disk()
        self.check_dispatched()

    def _begin_put(self, flush_disk_type: str) -> None:
        """Say in `state` that something is in flight, unless it says so already."""
        state = self.state
        if state.in_flight == NOTHING_IN_FLIGHT or (flush_disk_type == ASYNC_FLUSH and not state.asynchronous):
            self.begin(self.end.physical_offset, flush_disk_type)

    def keep_levels(self) -> None:
        """Let `store.json` say which delay levels count for a message that is appended now, before its first byte.

        Call it under the mutex, and after `begin`: if this process dies here, the next one reads the file again.

        Raises
        ------
        ConfigError
            The levels have changed too often.
        StoreFullError
            The disk has no room for the file.
        """
        try:
            changed = self.files.change_levels(self.end.physical_offset)
        except StoreFullError:
            raise
        except OSError as error:
            raise self.poison(f"the delay levels could not be written ({error})") from error
        if changed:
            self.clean_end.moved_s = -math.inf  # the journal, which has a copy of the file, is to be written soon

    def appended(self, end: LogEnd, topic: str, messages: int, size: int) -> None:
        """Note where the log ends after an append, and count the messages of a topic in it. Call it under the mutex.

        The log's end moves only here and in `others_appended`.
        """
        self.end = end
        total = self.topics_put.get(topic)
        if total is None:
            total = self.topics_put[topic] = [0, 0]
        total[0] += messages
        total[1] += size

    def others_appended(self, end: LogEnd, state: State) -> None:
        """Note where the log ends after others have appended; queues are looked at again before their next number."""
        self.numbers.next_offsets.clear()
        self.clock.read_ms()  # what this process has put ends here
        self.end, self.state = end, state  # `state` is set last: its counter says that all this is done

    def open_space(self, size: int, *, blank: bool = True) -> int:
        """The offset where `size` bytes fit: the log's end, or the start of the next segment after a BLANK record.

        The BLANK record is written if `blank` says so.
        """
        position = self.end.physical_offset
        if position >= self._allocate_from:
            self._allocate_from = self.log.segment_of(position) + self.log.segment_size
            self.allocate_ahead()
        if not self.log.blank_needed(position, size):
            return position
        start = position + self.log.left(position)
        self.log.check_room(start + size)
        if blank:
            self.write_or_undo(position, self.log.blank(position))
        return start

    def _is_buffered(self, pool: TransientStorePool, size: int, flush_disk_type: str) -> bool:
        """Whether the next put goes into the pool, which then has room for it. Otherwise, the pool is empty.

        If all buffers are in use, this drains the pool. While the disk has no room for what is in it, nothing
        more is taken. Call it under the mutex.
        """
        if self.pool_drain.is_stuck:
            self.pool_drain.run()

        if flush_disk_type == ASYNC_FLUSH:
            end = self.end.physical_offset
            start = self.open_space(size, blank=False)
            if pool.has_room(end, start):
                return True
            self.pool_drain.run()
            if pool.has_room(end, start):
                return True

        self.pool_drain.run()
        return False

    def write_or_undo(self, physical_offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write `data`; if that fails, zero everything that was written since the log's end, and raise."""
        try:
            self.log.write(physical_offset, data)
        except SyncFailedError as error:
            raise self.poison(f"{error}") from error
        except OSError:
            self.undo(physical_offset + len(data))
            raise

    def undo(self, end: int) -> None:
        """Zero everything from the log's end to `end`; if that fails too, poison the writer."""
        try:
            self.log.undo(
                self.end.physical_offset, max(end, self.end.physical_offset + self.log.left(self.end.physical_offset))
            )
        except OSError as error:
            raise self.poison(f"an append failed and could not be undone ({error})") from error

    # ---- syncing and publishing

    def sync_to_end(self) -> None:
        """Write and sync everything up to the log's end; a failure poisons the writer. Call under the mutex."""
        self.pool_drain.run()
        self.sync_log(self.end.physical_offset)

    def group_sync(self) -> int:
        """Sync everything written so far for all callers that wait, without blocking appends; then publish it.

        Returns the synced end. This does not move the clean end: what is published here is acknowledged, even if
        moving the clean end fails later.
        """
        self.mutex.acquire()
        with self.sync_mutex:
            try:
                self.check_usable()
                end = self.pool_drain.end
                plan = self.log.sync_plan(self.synced_end, end)
            finally:
                self.mutex.release()

            # Without the mutex, so that appends go on during the sync.
            try:
                plan.run()
            except OSError as error:
                self.stop(f"a sync failed ({error})")

        with self.mutex:
            if self.health is not Health.SOUND:
                raise self.poison(self.poison_reason)
            self.synced_end = max(self.synced_end, end)
            try:
                self._publish(end)
                with self.unbroken("`state` was being written"):
                    self.note_flushed(end)
            except StoreFullError as error:
                self.warn_undispatched(error)  # the records are durable, so they are acknowledged
        return end

    def sync_segment_name(self) -> None:
        """Sync the name of the last segment, so that the next segment need not wait for it.

        Raises
        ------
        StorePoisonedError
            The sync failed.
        """
        with self.mutex:
            segment = self.log.unsynced_name

        if segment is None:
            return

        with self.sync_mutex:
            self.check_usable()
            try:
                self.files.disk.fsync_dir(self.log.directory)
            except OSError as error:
                self.stop(f"a sync failed ({error})")

        with self.mutex:
            if self.health is not Health.SOUND:
                raise self.poison(self.poison_reason)
            self.log.name_synced(segment)

    def publish(self, end: int | None = None, *, move: bool = True) -> None:
        """Dispatch plain puts that end at or below `end` and make them visible; with `move`, move the clean end if due.

        Raises
        ------
        StoreFullError
            The disk has no room for their units: the puts stay pending, and nothing is appended before they are
            dispatched.
        """
        with self.mutex:
            if move and self.pool is not None and self.clean_end.is_due():
                self.pool_drain.run()  # the clean end moves only when nothing is pending
            self._publish(end)
            if move:
                self.clean_end.maybe_move()

    def _publish(self, end: int | None = None) -> bool:
        """Do what `publish` does, except moving the clean end; whether anything was dispatched. Call under the mutex.

        Puts that had no room when the writer lock was released wait until a process takes the lock again.
        """
        self.check_usable()
        if not self.pending or self.turn is Turn.AWAY:
            return False

        count = len(self.pending)
        if self.pool is not None:
            end = self.pool_drain.end if end is None else min(end, self.pool_drain.end)
        if end is not None and self.pending[-1].physical_offset >= end:
            count = sum(put.physical_offset < end for put in self.pending)
        if not count:
            return False

        puts = self.pending[:count]
        visible_end = puts[-1].end
        with self.unbroken("records are in the log, but could not be published", failures=True):
            full = self._publish_puts(puts, self.pending[count:], visible_end)
        if full is not None:
            raise full
        return True

    def _publish_puts(self, puts: list[Row | Rows], later: list[Row | Rows], visible_end: int) -> StoreFullError | None:
        """Dispatch the first pending puts; returns an error if the disk has no room, and then all puts stay pending."""
        self.pending = later
        self.check_locks(often=True)
        start = puts[0].physical_offset
        self.check_segments(start, visible_end, often=True)

        def dispatch() -> None:
            if _only_few(puts):
                self.dispatcher.dispatch_few(puts)
            else:
                self.dispatcher.dispatch(_columns_of(puts))
            self.dispatcher.check_files(often=True)

        try:
            if self.half_dispatched:
                self.dispatcher.repair(start)
            self.dispatch_or_poison(dispatch, start)
            self.write_state(visible_end=visible_end, in_flight=visible_end)
        except StoreFullError as error:
            self.pending, self.half_dispatched = puts + later, True
            full = self.no_room(
                f"the disk has no room for the ConsumeQueue units of {len(self.pending)} puts ({error}). These earlier "
                "puts are in the log, and become visible when there is room, or when the store is opened again. "
                "Nothing more was appended: what was to be put now is not in the log",
                error,
            )
            note_statuses(full, PutMessageStatus.SERVICE_NOT_AVAILABLE, None)
            return full
        self.half_dispatched = False
        return None

    def warn_undispatched(self, error: StoreFullError) -> None:
        """Log a warning that puts were acknowledged and are not visible yet."""
        _log.warning("%s", error)

    def check_dispatched(self) -> None:
        """Dispatch, before an append, the puts for which the queues had no room.

        Raises
        ------
        StoreFullError
            The disk still has no room; nothing was appended.
        """
        if self.half_dispatched:
            self.publish()

    def check_segments(self, start: int, end: int, *, often: bool = False) -> None:
        """Poison the writer if a segment that was written is no longer the file at its path."""
        try:
            self.log.check_files(start, end, often=often)
        except FileReplaced as error:
            raise self.poison(
                f"{error.path} was deleted or replaced while it was written (a broker started on this store?)"
            ) from error

    def dispatch_or_poison(self, dispatch: Callable[[], None], physical_offset: int) -> None:
        """Dispatch records, and try once more after a failure. If that fails too, poison the writer, since nothing may
        be appended after records that are in the log but in no queue.

        Parameters
        ----------
        dispatch : callable
            Dispatches the records, from the first one on in every call, and checks the files.
        physical_offset : int
            The offset of the first record.

        Raises
        ------
        StoreFullError
            The disk has no room for all rows; the caller may try again, after `Dispatcher.repair`.
        """
        failures = (OSError, StoreError)
        try:
            dispatch()
        except SyncFailedError as error:
            raise self.poison(f"{error}") from error
        except failures as first_error:
            try:
                self.dispatcher.repair(physical_offset)
                dispatch()
            except StoreFullError:
                raise
            except failures:
                reason = f"records are in the log, but their queues could not be written ({first_error})"
                raise self.poison(reason) from first_error

    def finish(self) -> None:
        """Publish everything that is pending; afterwards nothing is in flight."""
        with self.mutex:
            if self.health is not Health.SOUND:
                return
            if self.pending:
                self.pool_drain.run()
                if self.files.config.flush_disk_type != ASYNC_FLUSH:
                    self.sync_to_end()  # a SYNC_FLUSH record becomes visible only when it is durable
                self.publish()
            if self.state.in_flight != NOTHING_IN_FLIGHT:
                self.write_state(in_flight=NOTHING_IN_FLIGHT)
            self.clock.save()
