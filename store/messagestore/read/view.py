"""The view of a reader: what it may see, and how it reads it.

How the store was left decides what a reader sees (`log.condition`), and each answer is a class of `read.sight`. While a
writer of ours has it open, each look reads V once, and every queue is limited to units whose record ends at or below V.
If only the queues show where the log ends, the reader reads `abort` again after them; if it is ours now, `state`
decides.

A V that was written in another boot does not count. Until a writer has recovered the store, a reader then sees what
ends at or below C, and what lies before the end of the last batch after C that is proven to be on the disk
(`proven_tail`). If a writer with ASYNC_FLUSH was killed in this boot, the records after V count, too. Readers never
write.

A reader with `readUpTo=flushed` takes the flushed end instead of V. What is proven after a reboot is on the disk.

A view belongs to the folder that was at its path when it was opened. If that folder is renamed, or another one takes
its place, the view raises an error and never shows the other store. The view notices files that retention deletes, and
counts what they held.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import (
    ConfigError,
    CorruptionError,
    NotAStoreError,
    NotRecoveredError,
    StoreWentBackwardsError,
)
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.broker_name import read_broker_name
from messagestore.files.consume_queue import ConsumeQueue, queue_ids_of
from messagestore.files.disk import Disk
from messagestore.files.folder_watch import FolderWatch
from messagestore.files.state import State, boot_hash
from messagestore.files.store_settings import read_settings
from messagestore.format.config import FLUSHED, StoreConfig
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.condition import Promise, Traces, look
from messagestore.log.lost_end import lost_segments
from messagestore.log.refusals import check_readable_topic, refuse_to_read
from messagestore.log.store_files import Paths, StoreFiles
from messagestore.read.pinned import PinnedFolders
from messagestore.read.proven_tail import ProvenTail
from messagestore.read.sight import SealBroken, Sight, Sights, Units, Unrecovered, UpTo
from messagestore.signal_handlers import pass_on

_log = logging.getLogger(__name__)
_TRIES = 2
_HEALING_TRIES = 5
"""How often a read is repeated because files that it needs were deleted meanwhile."""

_LOOK_S = 0.1
"""The longest wait for a change of `state`: a broker that takes the store over does not change it."""
_POLL_S = 0.004
"""How often to look where nothing tells of changes: a broker writes through memory mappings."""

T = TypeVar("T")
P = ParamSpec("P")


def healing(look: Callable[Concatenate[StoreView, P], T]) -> Callable[Concatenate[StoreView, P], T]:
    """Make a method of a view repeat itself if a file that it reads is deleted meanwhile (`StoreView.healed`)."""

    @functools.wraps(look)
    def repeated(view: StoreView, /, *args: P.args, **options: P.kwargs) -> T:
        return view.healed(lambda: look(view, *args, **options))

    return repeated


class NoBytes(Enum):
    """Why the log has no bytes at a place."""

    DELETED = "the place lies below the first segment"
    NOT_REACHED = "the log does not reach that far"


@dataclass(frozen=True, slots=True)
class Visible:
    """How far a reader may see at one moment.

    Parameters
    ----------
    end : int | None
        A physical offset; None: as far as the queues show (a broker's store).
    counter : int
        The counter of `state` at that moment; -1 without `state`.
    clean_end : int
        C: everything below it survives a power cut.
    recovered : bool
        False: the state was written in another boot, or by a writer that was killed, or by a recovery that has not
        ended. What is derived from the log above C may be incomplete, and so may files that hold such data besides
        older data.
    """

    end: int | None
    counter: int
    clean_end: int
    recovered: bool = True


class StoreView:
    """Reads one store, its own or a live broker's, and follows it as it grows.

    Parameters
    ----------
    root : path
    config : StoreConfig
        It gives the index slot and entry counts of a store without `spark/store.json`, and `proven_tail_size`,
        `fail_on_unproven` and `read_up_to`.
    disk : Disk
    tail : ProvenTail, optional
        The result of an earlier search in a store that no writer has recovered since the machine was started. It saves
        the search.

    Raises
    ------
    NotAStoreError
        There is no store, or its queues are in RocksDB.

    Threads: one thread at a time.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: StoreConfig | None = None,
        disk: Disk | None = None,
        tail: ProvenTail | None = None,
    ) -> None:
        paths = Paths(root)
        disk = disk or Disk()
        refuse_to_read(disk, paths, config)

        self._pinned = PinnedFolders(disk, paths)
        config = (config or StoreConfig()).completed(read_settings(disk, paths.settings))
        self.files = StoreFiles(paths, config, self._pinned.identity, disk)
        self.files.load(index=False)

        self._ends: dict[tuple[str, int], int] = {}
        self._seen: Visible | None = None
        self.sight: Sight = Units(self.files)
        """What the view sees, according to the last `refresh`."""
        self._sights = Sights(self.files, tail)
        self.generation = 0
        """How often `spark/state` turned out to be another file: the store may have been restored file by file."""
        self._state_inode = -1
        self._end_checked = self._units_checked = False
        self._promise: Promise | None = None
        self._watch: FolderWatch | None = None
        self._watch_at_s = 0.0

        self.own = False
        """Whether no broker ever wrote the store, according to the last `refresh`: then each record has the number of
        its unit.
        """

        self.visible = self.refresh()

    @property
    def store_id(self) -> str:
        """The store's id; empty if this project never wrote the store."""
        return self.files.store_id

    @property
    def broker_name(self) -> str:
        """The name of the broker whose store this is, read from the file; empty if the store has none."""
        return read_broker_name(self.files.disk, self.files.paths.broker_name)

    @property
    def known_end(self) -> int | None:
        """Where the log ended for readers at the last `refresh`; None if only the queues show it (a broker's store)."""
        return self.sight.known_end

    @property
    def tail(self) -> ProvenTail | None:
        """What is proven above C in a store that no writer has recovered since the machine was started, or since a
        writer with ASYNC_FLUSH was killed.
        """
        return self.sight.tail

    @property
    def known_ids(self) -> frozenset[str]:
        """The id of the store, and those of the stores that it is a copy of."""
        return self.files.known_ids

    def refresh(self) -> Visible:
        """Find out how far the store has grown. This takes microseconds if nothing changed.

        Raises
        ------
        CorruptionError
            `abort` is ours and no slot of `state` is valid: `messagestore recover` decides what the store contains.
        NotRecoveredError
            With `failOnUnproven`: the log has records that only recovery can show.
        ConfigError
            With `readUpTo=flushed`: a Java broker wrote the store last.
        NotAStoreError, StoreWentBackwardsError
            The folder that was opened is no longer at the path: it was renamed, or another one is there.
        """
        files = self.files
        self.check_place()
        if files.identity is None:
            files.know(self._pinned.read_identity())
        self._forget_deleted()

        traces = look(files, self._promise)
        if self._is_replaced(traces.state):
            self._begin_anew()
            traces = look(files)

        self._promise, state = traces.promise, traces.state
        self._see(traces)

        if files.config.read_up_to == FLUSHED and self.known_end is None:
            raise ConfigError(
                f"readUpTo: found flushed, but nothing in {files.paths.root} says what is on the disk: a Java broker "
                f"wrote the store last, or spark/state is lost. Read up to visible, or run `messagestore recover` when "
                f"no broker is running",
                key="readUpTo",
                value=FLUSHED,
            )

        # Without a known end, a broker may be writing.
        self.own = state is not None and state.own and self.known_end is not None

        if self.visible != self._seen:
            end = self.visible.end
            if end is None or end > files.commit_log.max_offset:
                files.commit_log.load()
            if self._seen is not None and self._seen.end is None and end is not None:
                self._ends.clear()  # a writer of ours took over: limit what was accepted without proof
            self._seen = self.visible

        if traces.abort is None and state is None and not self._end_checked:
            self._check_end()
        self._check_segments(traces)
        return self.visible

    def _see(self, traces: Traces) -> None:
        """Show a store that was left like this from now on.

        Raises
        ------
        CorruptionError
            No slot of `state` is valid.
        NotRecoveredError
            With `failOnUnproven`: the log has records that only recovery can show.
        """
        files, state, before = self.files, traces.state, self.sight
        sight = self._sights.of(traces, before)
        if isinstance(sight, Unrecovered):
            self.sight = sight
            if sight is not before:
                self._ends.clear()
            if files.config.fail_on_unproven and not sight.tail.complete:
                raise NotRecoveredError(sight.tail.words(files.paths.root))

        counter, clean_end, recovered = -1 if state is None else state.counter, 0, True
        if state is not None and traces.condition.ours_open:
            clean_end = state.clean_end
            recovered = isinstance(sight, UpTo) and not state.recovering
        self.sight, self.visible = sight, Visible(sight.end, counter, clean_end, recovered)

    def _is_replaced(self, state: State | None) -> bool:
        """Whether somebody has replaced the files since the last look, by restoring them one by one or in place."""
        before, self._state_inode = self._state_inode, self.files.state_file.inode
        if self._state_inode != before and before >= 0:
            return True
        counter = -1 if state is None else state.counter
        return self._seen is not None and counter != self._seen.counter and self._written_over(counter)

    def _check_segments(self, traces: Traces) -> None:
        """Refuse a log that lacks segments: a copy of a part of it, or one of several folders (`storePathCommitLog`).

        `spark/state` says how far the log reached, whatever the store checkpoint says. It does not count while a broker
        is at work, which may have cut the log. Without it, units show that segments are missing: those of a queue are
        compared with the log when its end is asked for, and here, if there is no segment at all.

        Raises
        ------
        CorruptionError
        """
        files, log, state = self.files, self.files.commit_log, traces.state
        proven_end = self.known_end or 0
        if state is not None and not traces.condition.broker_open:
            proven_end = max(proven_end, state.clean_end)
        if proven_end > log.max_offset:
            log.load()

        # If `state` has changed, a recovery has just cut the log.
        if proven_end > log.max_offset and files.state_file.read() == state:
            raise lost_segments(log, f"{proven_end}, where the log ended according to {files.paths.state}")
        if not log.offsets and self.known_end is None and not self._units_checked:
            log.load()
            if not log.offsets:
                self.check_units_in_log()
                self._units_checked = True

    @healing
    def check_units_in_log(self) -> None:
        """Check that no queue of a broker's store has a unit behind the last segment.

        This asks for the ends of all queues, so it is for callers that do not read the log queue by queue.

        Raises
        ------
        CorruptionError
            There is one: segments are missing.
        """
        if self.known_end is None:
            for topic, queue_ids in self.files.queue_names().items():
                for queue_id in queue_ids:
                    self.max_offset(topic, queue_id)

    def _check_end(self) -> None:
        """Check the last record of a log without `state`, which the store checkpoint names if this project closed it.

        Raises
        ------
        CorruptionError
            That record is missing.
        """
        files, log = self.files, self.files.commit_log
        last = store_checkpoint.read(files.disk, files.paths.checkpoint).confirm_physical_offset
        self._end_checked = True
        if last <= log.min_offset or not (files.store_id or BATCH_TOPIC in files.queue_names()):
            return  # a broker's store, where the number may have another meaning
        log.load()
        remains = f"the end of the last segment, {log.max_offset}"
        if last < log.max_offset:
            if any(log.read(last, 8)):
                return
            remains = "zeros"
        if files.read_abort() is None:
            path = log.path_of(last)
            self._end_checked = False
            raise CorruptionError(path, last, "the last record of the log, which the store checkpoint names", remains)

    def _written_over(self, counter: int) -> bool:
        """Whether older files were copied over the store's files, under the same names (`rsync --inplace`).

        In that case the counter went back, or segments that were deleted in between were created again.
        """
        back = self._seen is not None and counter < self._seen.counter
        return back or self.files.log_pool.has_replaced()

    def _begin_anew(self) -> None:
        """Forget everything that is known about the files."""
        self.generation += 1
        if self._watch is not None:
            self._watch.close()
            self._watch, self._watch_at_s = None, 0.0
        self._drop_files()
        self.files.commit_log.load()
        self._ends.clear()
        self._sights.forget_seals()
        self._seen, self._promise, self.sight = None, None, Units(self.files)

    # ---- the place

    def check_place(self) -> None:
        """Check that the folders at the paths, and the identity in them, are those that were opened.

        This takes three system calls.

        Raises
        ------
        NotAStoreError
            Nothing, or something that is not a store, is there now.
        StoreWentBackwardsError
            Another store, or a copy of this one, is there.
        """
        try:
            identity = self._pinned.check()
        except (NotAStoreError, StoreWentBackwardsError):
            self._drop_files()  # some may have been opened at the path since then
            raise
        if identity is not None:
            self.files.know(identity)

    def _forget_deleted(self) -> None:
        """Find out whether retention has deleted the first segments. This takes one system call if it has not.

        Raises
        ------
        CorruptionError
            All segments are missing, although retention leaves the last one.
        """
        log = self.files.commit_log
        had = log.offsets[-1:]
        if had and log.forget_deleted() and not log.offsets:
            log.load()
            if not log.offsets:
                self.check_place()  # the folder may have been renamed just now
                raise CorruptionError(log.path(had[0]), had[0], "this segment", "none")

    def healed(self, look: Callable[[], T]) -> T:
        """Return `look()`, repeated from the start if a file that it reads was deleted meanwhile.

        Raises
        ------
        CorruptionError
            A file is missing, although its neighbours prove that it must be there.
        """
        for _ in range(_HEALING_TRIES):
            try:
                return look()
            except FileNotFoundError as error:
                pass_on(error)
                missing = error
                self.heal()
        raise CorruptionError(str(missing.filename), 0, "this file", "none") from missing

    def heal(self) -> None:
        """Read all folders again."""
        self.check_place()
        self._forget_deleted()
        self._drop_files()
        self.files.commit_log.load()

    def _drop_files(self) -> None:
        self.files.forget_queues()
        self.files.pool.clear()
        self.files.log_pool.clear()

    def quiet(self) -> tuple[int, int] | None:
        """A token that changes when a writer writes; None while a writer may be writing.

        Every writer creates `abort` before its first byte, which changes the root folder, and a writer of ours changes
        `state`. This takes a few system calls. Take the token before reading the data for which it stands.
        """
        files = self.files
        self.check_place()
        if files.read_abort() is not None:
            return None
        state = files.state_file.read()
        return os.stat(files.paths.root).st_mtime_ns, -1 if state is None else state.counter

    def await_change(self, timeout_s: float) -> None:
        """Wait until the store may have changed, but not longer than a tenth of a second, nor than `timeout_s`.

        Call this once with 0 before looking at the store for the first time: a change after that ends the next wait.

        Changes of `spark/state`, by which a writer of ours shows what it has written, end the wait at once. Where a
        broker writes, or folders cannot be watched, the wait takes a few milliseconds.
        """
        watch = self._state_watch()
        if watch is not None and self.known_end is not None:
            watch.wait(min(timeout_s, _LOOK_S))
        elif timeout_s > 0:
            time.sleep(min(timeout_s, _POLL_S))

    def _state_watch(self) -> FolderWatch | None:
        """The watch of the folder `spark`; None if it cannot be watched, or does not exist yet."""
        if self._watch is None and time.monotonic() >= self._watch_at_s:
            files = self.files
            self._watch_at_s = time.monotonic() + 1.0
            try:
                self._watch = files.disk.watch(os.path.dirname(files.paths.state))
            except OSError as error:
                _log.debug("%s: looking again and again instead of being told of changes (%s)", files.paths.root, error)
        return self._watch

    # ---- queues

    def topics(self) -> dict[str, list[int]]:
        """The queue ids of each topic, from the existing folders."""
        self.check_place()
        queues = self.files.queue_names() | self.files.find_batch_queues()
        for topic, queue_id in self.sight.other_queues():
            if queue_id not in queues.setdefault(topic, []):
                queues[topic] = sorted([*queues[topic], queue_id])
        return queues

    def queue_ids(self, topic: str) -> list[int]:
        """The queue ids of one topic, from its folders.

        Raises
        ------
        ConfigError
            The topic's queues are not simple queues.
        """
        check_readable_topic(topic)
        queue_ids = queue_ids_of(self.files.disk, self.files.paths.root, topic)
        if not queue_ids:
            queue_ids = self.files.find_batch_queues().get(topic, [])
        return sorted({*queue_ids, *(queue_id for _, queue_id in self.sight.other_queues(topic))})

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, loaded again if files were added or deleted."""
        queue = self.files.queue(topic, queue_id)
        known_end = self._ends.get((topic, queue_id), 0)

        if len(queue.offsets) > 1:
            queue.forget_deleted()
        if not queue.offsets or known_end >= queue.end_file_queue_offset:
            queue.load()
        elif not self._at_path(queue):
            queue.load()
            if not queue.offsets or self._ends.get((topic, queue_id), 0) > queue.end_file_queue_offset:
                self._ends.pop((topic, queue_id), None)

        check_readable_topic(topic)
        if not queue.offsets and topic in self.files.find_batch_queues():
            queue = self.files.queue(topic, queue_id)
        return queue

    def _at_path(self, queue: ConsumeQueue) -> bool:
        try:
            return self.files.disk.at_path(queue.file(queue.offsets[-1]))
        except FileNotFoundError:
            return False

    @healing
    def max_offset(self, topic: str, queue_id: int) -> int:
        """The number of the first message of a queue that is not visible (yet)."""
        key = (topic, queue_id)
        end = self._end(key)
        if self.sight.end is None and self.files.abort_is_ours:  # a writer of ours took over meanwhile
            self.refresh()
            self._ends.pop(key, None)
            end = self._end(key)
        return end

    def _end(self, key: tuple[str, int]) -> int:
        tail = self.sight.tail
        if tail is not None and key in tail.units:
            return self._visible_end(key, 0)
        queue = self._queue(*key)
        end = self._visible_end(key, self._ends.get(key, 0))
        while end and end == queue.end_file_queue_offset:  # the last known file is full: there may be more files
            queue.load()
            if end >= queue.end_file_queue_offset:
                break
            end = self._visible_end(key, end)
        self._ends[key] = end
        return end

    def _still_ends(self, key: tuple[str, int], end: int, physical_offset: int) -> bool:
        """Whether a queue certainly ends where it did, behind the same message."""
        limit = self.sight.end
        if limit is None or self.sight.tail is not None or self._ends.get(key) != end:
            return False
        queue = self.files.queue(*key)
        try:
            return bool(queue.offsets) and self._at_path(queue) and queue.still_ends(end, physical_offset, limit)
        except FileNotFoundError as error:
            pass_on(error)
            return False  # retention, or whoever deletes the topic, has just deleted it

    def _visible_end(self, key: tuple[str, int], hint: int) -> int:
        """The maximum offset of a queue in the files that are known."""
        sight = self.sight
        try:
            return sight.queue_end(key, hint, hint_was_end=key in self._ends)
        except SealBroken as broken:
            self.refresh()
            if self.sight is sight or (isinstance(sight, UpTo) and isinstance(self.sight, UpTo)):
                raise broken.fault.error() from None
            return self._visible_end(key, 0)  # a writer opened or closed the store meanwhile

    def max_offsets(
        self,
        queues: Iterable[tuple[str, int]],
        known: Mapping[tuple[str, int], tuple[int, int]] = MappingProxyType({}),
    ) -> dict[tuple[str, int], int]:
        """The maximum offsets of many queues at one moment. Together they include all of a Spark batch, or nothing of
        it.

        `known` has the ends that some queues had, each with the physical offset of the message before it. A queue for
        which that is still so is left out of the result, which takes a tenth of the time.

        Under a broker's rules the queues are read one after the other. If a writer of ours opened the store meanwhile,
        `abort` or the counter of `state` shows it, and the queues are read again. If writers open and close the store
        faster than that, the queues are limited to the V of one of them: everything that was in the store when it was
        opened is below V.
        """
        keys = list(queues)
        for tries in itertools.count():
            visible = self.refresh()
            if tries >= _TRIES and visible.end is None:
                visible = self._limited_to_v() or visible
            ends = {
                key: self.healed(functools.partial(self._end, key))
                for key in keys
                if key not in known or not self._still_ends(key, *known[key])
            }
            if self.visible == visible and (visible.end is not None or self.refresh() == visible):
                return ends
        raise AssertionError("unreachable")

    def _limited_to_v(self) -> Visible | None:
        """Show what lies below V although no writer is attached now; None if `state` does not say what that is."""
        state = self.files.state_file.read()
        if state is None or state.recovering or state.boot_hash != boot_hash():
            return None
        self.visible = Visible(state.visible_end, state.counter, state.clean_end)
        self.sight = self._sights.up_to(state, state.visible_end)
        return self.visible

    @healing
    def min_offset(self, topic: str, queue_id: int) -> int:
        """The number of the first message of a queue whose record is still in the log; its maximum offset if there is
        none.
        """
        self._forget_deleted()
        return self.search_physical(topic, queue_id, self.files.commit_log.min_offset)

    def search_physical(self, topic: str, queue_id: int, physical_offset: int) -> int:
        """The number of the first message of a queue at a physical offset or above; its maximum offset if there is
        none.
        """
        return self.search_physicals(topic, queue_id, [physical_offset])[0]

    @healing
    def search_physicals(self, topic: str, queue_id: int, physical_offsets: Sequence[int]) -> list[int]:
        """The same for several physical offsets. The queue's end is looked for once."""
        end = self.max_offset(topic, queue_id)  # first, since it loads the files that were added
        return [self._search_physical((topic, queue_id), each, end) for each in physical_offsets]

    @healing
    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The minimum and the maximum offset of a queue, whose end is looked for once."""
        self._forget_deleted()
        end = self.max_offset(topic, queue_id)
        return self._search_physical((topic, queue_id), self.files.commit_log.min_offset, end), end

    def _search_physical(self, key: tuple[str, int], physical_offset: int, end: int) -> int:
        """As `search_physical`, for a queue whose end was just looked for."""
        tail = self.sight.tail
        if not self.files.queue(*key).offsets and (tail is None or key not in tail.units):
            return end
        return min(self.sight.search_physical(key, physical_offset), end)

    @healing
    def units(self, topic: str, queue_id: int, start: int, end: int) -> NDArray[np.void]:
        """The units `start..end` of a queue, as far as its files hold them. The caller has called `max_offset`."""
        return self.sight.units((topic, queue_id), start, end)

    @healing
    def record_crc(self, position: int, size: int) -> int | NoBytes:
        """The CRC-32 of bytes of the log, read from the file that is at the path now, or why there are none."""
        self._forget_deleted()
        log = self.files.commit_log
        if position + size > log.max_offset:
            log.load()
        if position < log.min_offset:
            return NoBytes.DELETED

        log.reopen_replaced(position)
        crc = log.crc(position, position + size)
        return NoBytes.NOT_REACHED if crc < 0 else crc

    @healing
    def stored_ms(self, position: int) -> int | None:
        """When the record was stored that begins at a place of the log; None if none begins there."""
        self._forget_deleted()
        log = self.files.commit_log
        if position >= log.max_offset:
            log.load()
        if position < log.min_offset:
            return None
        log.reopen_replaced(position)
        head = log.head(position)
        return None if head is None else int(head["store_timestamp_ms"])

    def close(self) -> None:
        """Close all files."""
        self.files.close()
        self._pinned.close()
        if self._watch is not None:
            self._watch.close()
        self._watch, self._watch_at_s = None, math.inf
