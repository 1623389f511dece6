"""The view of a reader: what it may see, and how it reads it.

The file `abort` alone decides which rules apply. If it holds our store id, `state` decides: V is loaded once, and every
queue is limited to units whose record ends at or below V. If it is absent or holds anything else (a broker is running,
has crashed, or has closed the store), the reader sees what the queues show. It checks each unit against its record, and
then reads `abort` again; if that is ours now, `state` decides.

Until a writer has recovered the store, a V that was written in another boot counts only up to C, and up to the end of
the last batch after C that is proven to be on the disk (`proven_tail`). Readers never write.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import (
    ConfigError,
    CorruptionError,
    MagicError,
    NotAStoreError,
    NotRecoveredError,
    OffsetOutOfRangeError,
    StoreError,
    StoreWentBackwardsError,
)
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.broker_name import read_broker_name
from messagestore.files.commit_log import GAP
from messagestore.files.consume_queue import ConsumeQueue, queue_ids_of
from messagestore.files.folder_watch import FolderWatch
from messagestore.files.mapped_file import Disk, File
from messagestore.files.state import State, boot_hash
from messagestore.format import record, record_columns
from messagestore.format.config import FLUSHED, StoreConfig
from messagestore.format.gathered import Gathered
from messagestore.format.inner_batch import single_records
from messagestore.format.layout import BLANK, FILLER_UNIT_SIZE, UNIT
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.queue_proof import proven_queue_end
from messagestore.log.refusals import check_readable_topic, refuse_to_read
from messagestore.log.seal_check import Fault, fault_of, is_deleted, sealed_at
from messagestore.log.sealed_ends import SealedEnds
from messagestore.log.store_files import Identity, Paths, StoreFiles, looks_like_store
from messagestore.read.proven_tail import ProvenTail, find_proven_tail, tell

_log = logging.getLogger(__name__)
_TRIES = 2
_HEALING_TRIES = 5
"""How often a read is repeated because files that it needs were deleted meanwhile."""
READ_ROWS = record_columns.BLOCK_ROWS
READ_BYTES = 16 * 1024 * 1024
_READ_AHEAD = 2
_EXTENSION_ADDRESS = -(1 << 31) - 1
"""A tags code at or below this is no hash: it points to the extension file of a broker's ConsumeQueue."""
_MOST_GAPS = 4
"""How many times the requested bytes may be read in order to read the records of a sparse queue together."""

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
        False: the state was written in another boot, or by a recovery that has not ended. What is derived from the log
        above C may be incomplete, and so may files that hold such data besides older data.
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
        refuse_to_read(disk, paths)
        self._folders: dict[str, File] = {}
        self._identity_file: File | None = None
        self._pin_folders(disk, paths)
        self.files = StoreFiles(paths, config or StoreConfig(), self._read_identity(disk, paths), disk)
        self.files.load(index=False)
        self._ends: dict[tuple[str, int], int] = {}
        self._seen: Visible | None = None
        self.tail: ProvenTail | None = None
        """What is proven above C in a store that no writer has recovered since the machine was started."""
        self._given_tail = tail
        self._tail_key: tuple[int, int] | None = None
        self.generation = 0
        """How often `spark/state` turned out to be another file: the store may have been restored file by file."""
        self._state_inode = -1
        self._end_checked = False
        self._closed: tuple[int, int | None] = (-1, None)  # counter, CRC of the store checkpoint at that time
        self._closed_end: int | None = None
        self._watch: FolderWatch | None = None
        self._watch_at_s = 0.0
        self.own = False
        """Whether no broker ever wrote the store, according to the last `refresh`: then each record has the number of
        its unit.
        """
        self._seals: tuple[State, SealedEnds] | None = None  # what is known about the queues of a closed store
        self._closed_state: State | None = None
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
        return self._closed_end if self.visible.end is None else self.visible.end

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
            files.identity = self._read_identity(files.disk, files.paths)
        self._forget_deleted()
        abort, state = files.read_abort(), files.state_file.read()
        if files.state_file.inode != self._state_inode:  # files may have been restored one by one
            if self._state_inode >= 0:
                self._begin_anew()
            self._state_inode = files.state_file.inode
        counter = state.counter if state is not None else -1
        if self._seen is not None and counter != self._seen.counter and self._written_over(counter):
            self._begin_anew()
        self._closed_end, same_boot = None, True
        if not files.store_id or abort != files.abort_token:
            if abort is None and state is not None and self._closed_by_us(state):
                self._closed_end, self._closed_state = state.clean_end, state
            self.visible = Visible(None, state.counter if state is not None else -1, 0)
        else:
            if state is None:
                raise CorruptionError(
                    files.paths.state,
                    0,
                    "a valid slot",
                    "none",
                    hint="Run `messagestore recover` on the store. The messages in the log are not affected.",
                )
            same_boot = state.boot_hash == boot_hash()
            up_to = state.flushed_end if files.config.read_up_to == FLUSHED else state.visible_end
            visible_end = up_to if same_boot else self._proven_end_of(state)
            self.visible = Visible(visible_end, state.counter, state.clean_end, same_boot and not state.recovering)
        if files.config.read_up_to == FLUSHED and self.known_end is None:
            raise ConfigError(
                f"readUpTo: found flushed, but nothing in {files.paths.root} says what is on the disk: a Java broker "
                f"wrote the store last, or spark/state is lost. Read up to visible, or run `messagestore recover` when "
                f"no broker is running",
                key="readUpTo",
                value=FLUSHED,
            )
        self.own = state is not None and state.own and self.known_end is not None
        if self.visible.end is None or same_boot:
            self.tail = self._tail_key = None
        if self.visible != self._seen:
            end = self.visible.end
            if end is None or end > files.commit_log.max_offset:
                files.commit_log.load()
            if self._seen is not None and self._seen.end is None and end is not None:
                self._ends.clear()  # a writer of ours took over: limit what was accepted without proof
            self._seen = self.visible
        if abort is None and state is None and not self._end_checked:
            self._check_end()
        if self._closed_end is not None and files.commit_log.max_offset < self._closed_end:
            found = files.commit_log.max_offset
            raise CorruptionError(
                files.paths.commit_log, found, f"segments up to {self._closed_end}", f"none from {found} on"
            )
        return self.visible

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
        found = f"the end of the last segment, {log.max_offset}"
        if last < log.max_offset:
            if any(log.read(last, 8)):
                return
            found = "zeros"
        if files.read_abort() is None:
            path = log.path_of(last)
            self._end_checked = False
            raise CorruptionError(path, last, "the last record of the log, which the store checkpoint names", found)

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
        self._seen, self._closed, self._seals = None, (-1, None), None

    def _proven_end_of(self, state: State) -> int:
        """How far the log of another boot is proven to be on the disk. The search is done once."""
        files, key = self.files, (state.counter, state.clean_end)
        if self.tail is None or self._tail_key != key:
            files.commit_log.load()
            self._ends.clear()
            if self._given_tail is not None and self._given_tail.start == state.clean_end:
                self.tail = self._given_tail
            else:
                self.tail = find_proven_tail(files, state, files.config.proven_tail_size)
                tell(self.tail, files.paths.root)
            self._tail_key = key
        if files.config.fail_on_unproven and not self.tail.complete:
            raise NotRecoveredError(self.tail.words(files.paths.root))
        return self.tail.end

    # ---- the place

    def _pin_folders(self, disk: Disk, paths: Paths) -> None:
        """Keep the folders open, in order to compare them later with what is at their paths."""
        for path in (paths.root, paths.commit_log):
            if path not in self._folders:
                try:
                    self._folders[path] = disk.open_folder(path)
                except FileNotFoundError:
                    continue  # a store without messages has no log folder yet

    def _read_identity(self, disk: Disk, paths: Paths) -> Identity | None:
        """Read `spark/store.json`, and keep the file open in order to notice another one."""
        try:
            self._identity_file = disk.open(paths.identity)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Identity.read(disk, paths.identity)

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
        files = self.files
        disk, paths = files.disk, files.paths
        for folder in self._folders.values():
            if not disk.folder_at_path(folder):
                raise self._moved()
        if len(self._folders) < 2:  # root and log
            self._pin_folders(disk, paths)
        if self._identity_file is not None and not disk.at_path(self._identity_file):
            found = Identity.read(disk, paths.identity)
            if found is not None and found.store_id != files.store_id:
                raise self._moved()
            self._read_identity(disk, paths)  # a new file with the same id: an upgrade of its format

    def _moved(self) -> StoreError:
        """The error for a folder that is no longer at its path."""
        disk, paths = self.files.disk, self.files.paths
        self._drop_files()  # some may have been opened at the path since then
        opened = f"the folder that was opened (store {self.store_id or 'without an id'})"
        what = "Open the store at the place where it is now"
        if not looks_like_store(disk, paths):
            found = "another folder, without a store in it," if disk.is_folder(paths.root) else "nothing"
            text = f"{paths.root}: found {found} where {opened} was: it was renamed, deleted or unmounted. {what}"
            return NotAStoreError(text, path=paths.root)
        try:
            identity = Identity.read(disk, paths.identity)
            found = f"store {identity.store_id}" if identity is not None else "a store without an id"
        except StoreError as error:
            found = f"a store that cannot be read ({error})"
        return StoreWentBackwardsError(
            f"{paths.root}: found {found} in another folder than {opened}: it was restored, replaced or created again. "
            f"{what}"
        )

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
                missing = error
                self._heal()
        raise CorruptionError(str(missing.filename), 0, "this file", "none") from missing

    def _heal(self) -> None:
        """Read all folders again."""
        self.check_place()
        self._forget_deleted()
        self._drop_files()
        self.files.commit_log.load()

    def _drop_files(self) -> None:
        self.files.forget_queues()
        self.files.pool.clear()
        self.files.log_pool.clear()

    def _closed_by_us(self, state: State) -> bool:
        """Whether a Python writer closed the store and no broker has written since: then its end is known.

        In such a store, units are trusted: a unit that points to damage does not end its queue, and the damage is
        reported when the message is read.
        """
        if not state.clean or state.visible_end != state.clean_end:
            return False
        files = self.files
        if self._closed[0] != state.counter:
            self._closed = state.counter, self._checkpoint_crc()
        checkpoint = store_checkpoint.read(files.disk, files.paths.checkpoint)
        if self._closed[1] is None:  # no journal shows it; the checkpoint names the log's last record as ours does
            return bool(state.anchor_size) and checkpoint.confirm_physical_offset == state.anchor_position
        return self._closed[1] == record.crc32(checkpoint.to_bytes())

    def _checkpoint_crc(self) -> int | None:
        paths = self.files.paths
        return BatchJournal.read_checkpoint_crc(self.files.disk, paths.journal, paths.journal_1)

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
        found = self.files.queue_names() | self.files.find_batch_queues()
        for topic, queue_id in (*(self.tail.units if self.tail is not None else ()), *self._lost_queues()):
            if queue_id not in found.setdefault(topic, []):
                found[topic] = sorted([*found[topic], queue_id])
        return found

    def _lost_queues(self, topic: str | None = None) -> list[tuple[str, int]]:
        """The queues of a closed store whose folders are missing. They are listed, and their ends raise an error."""
        if self._closed_end is None:
            return []
        files = self.files
        keys = [key for key in self._sealed().seals if topic in (None, key[0])]
        there = {name: set(queue_ids_of(files.disk, files.paths.root, name)) for name in {name for name, _ in keys}}
        lost = [key for key in keys if key[1] not in there[key[0]]]
        if lost:
            files.topics.load()  # a broker that deletes a topic removes its name
        return [key for key in lost if not is_deleted(files, key)]

    def queue_ids(self, topic: str) -> list[int]:
        """The queue ids of one topic, from its folders.

        Raises
        ------
        ConfigError
            The topic's queues are not simple queues.
        """
        check_readable_topic(topic)
        found = queue_ids_of(self.files.disk, self.files.paths.root, topic)
        if not found:
            found = self.files.find_batch_queues().get(topic, [])
        if self.tail is not None:
            found = sorted({*found, *(queue_id for name, queue_id in self.tail.units if name == topic)})
        return sorted({*found, *(queue_id for _, queue_id in self._lost_queues(topic))})

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, loaded again if files were added or deleted."""
        queue = self.files.queue(topic, queue_id)
        known = self._ends.get((topic, queue_id), 0)
        if len(queue.offsets) > 1:
            queue.forget_deleted()
        if not queue.offsets or known >= queue.end_file_queue_offset:
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
        if self.tail is not None:
            return self._end_in_tail(key)
        queue = self._queue(topic, queue_id)
        end = self._visible_end(topic, queue_id, self._ends.get(key, 0))
        while end and end == queue.end_file_queue_offset:  # the last known file is full: there may be more files
            queue.load()
            if end >= queue.end_file_queue_offset:
                break
            end = self._visible_end(topic, queue_id, end)
        self._ends[key] = end
        return end

    def _end_in_tail(self, key: tuple[str, int]) -> int:
        """The end of a queue in what is proven. Units above C come from the records; those in files were not synced."""
        assert self.tail is not None
        if key in self.tail.units:
            return self.tail.queue_end(key)
        if key not in self._ends:
            self._queue(*key)
            self._ends[key] = proven_queue_end(self.files, *key, self.tail.start, crc=False)
        return self._ends[key]

    def _visible_end(self, topic: str, queue_id: int, hint: int) -> int:
        """The maximum offset of a queue in the files that are known."""
        queue = self.files.queue(topic, queue_id)
        if self.visible.end is not None:
            return queue.end(hint=hint, limit=self.visible.end)
        end = self._proven_end(topic, queue_id, hint)
        if self.files.abort_is_ours:  # a writer of ours took over meanwhile
            self.refresh()
            return queue.end(hint=0, limit=self.visible.end)
        return end

    def max_offsets(self, queues: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The maximum offsets of many queues at one moment. Together they include all of a Spark batch, or nothing of
        it.

        Under a broker's rules the queues are read one after the other. If a writer of ours opened the store meanwhile,
        `abort` or the counter of `state` shows it, and the queues are read again. If writers open and close the store
        faster than that, the queues are limited to the V of one of them: everything that was in the store when it was
        opened is below V.
        """
        keys = list(queues)
        for tries in itertools.count():
            visible = self.refresh()
            if tries >= _TRIES and visible.end is None:
                state = self.files.state_file.read()
                if state is not None and not state.recovering and state.boot_hash == boot_hash():
                    visible = self.visible = Visible(state.visible_end, state.counter, state.clean_end)
            ends = {key: self.max_offset(*key) for key in keys}
            if self.visible == visible and (visible.end is not None or self.refresh() == visible):
                return ends
        raise AssertionError("unreachable")

    def _proven_end(self, topic: str, queue_id: int, hint: int) -> int:
        sealed = self._sealed() if self._closed_end is not None else None
        known = sealed is None or sealed.end_of((topic, queue_id)) in (hint, None)
        if known and (topic, queue_id) in self._ends and self.files.queue(topic, queue_id).end(hint=hint) == hint:
            return hint  # nothing was added; this took one read
        if self._closed_end is not None:
            return self._sealed_end(topic, queue_id, hint)
        log = self.files.commit_log
        torn = self.files.read_abort() is not None  # a broker that crashed may have left a torn record
        end = proven_queue_end(self.files, topic, queue_id, 1 << 62, hint, crc=torn)
        if end <= hint:
            log.load()  # a new segment may be there
            end = proven_queue_end(self.files, topic, queue_id, 1 << 62, hint, crc=torn)
        return end

    def _sealed(self) -> SealedEnds:
        """The ends of the queues of a store that a Python writer closed, as far as they are known; read once."""
        assert self._closed_end is not None
        assert self._closed_state is not None
        if self._seals is None or self._seals[0] != self._closed_state:
            self._seals = self._closed_state, sealed_at(self.files, self._closed_end, self._closed_end)
        return self._seals[1]

    def _sealed_end(self, topic: str, queue_id: int, hint: int) -> int:
        """The end of a queue in a closed store.

        Raises
        ------
        CorruptionError
            The queue lacks units that it had when the store was closed.
        """
        ends, key, state = self._sealed(), (topic, queue_id), self._closed_state
        expected, queue = ends.end_of(key), self.files.queue(topic, queue_id)
        if expected is None:
            return queue.end(hint=hint)
        fault = fault_of(self.files, ends, key)
        if fault is not None:
            self.files.topics.load()  # a broker that deletes a topic removes its name
            queue.load()  # a writer may have created the next file, or rebuilt the queue
            fault = fault_of(self.files, ends, key)
        end = queue.end(hint=expected)
        if fault is None and end > expected:
            words = f"{expected} units, as at the clean end"
            fault = Fault(queue.directory, expected * UNIT.size, words, str(end))
        if fault is None:
            return end
        self.refresh()
        if self._closed_end is not None and self._closed_state == state:
            raise fault.error()
        return self._visible_end(topic, queue_id, 0)  # a writer opened the store meanwhile

    @healing
    def min_offset(self, topic: str, queue_id: int) -> int:
        """The number of the first message of a queue whose record is still in the log; its maximum offset if there is
        none.
        """
        self._forget_deleted()
        return self.search_physical(topic, queue_id, self.files.commit_log.min_offset)

    @healing
    def search_physical(self, topic: str, queue_id: int, physical_offset: int) -> int:
        """The number of the first message of a queue at a physical offset or above; its maximum offset if there is
        none.
        """
        end = self.max_offset(topic, queue_id)  # first, since it loads the files that were added
        found = self._queue(topic, queue_id).search_physical(physical_offset)
        if self.tail is not None and (topic, queue_id) in self.tail.units:
            first = self.tail.units[topic, queue_id][0]
            if found >= first or not self.files.queue(topic, queue_id).offsets:
                found = self.tail.search_physical((topic, queue_id), physical_offset)
        return min(found, end)

    @healing
    def offset_behind_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The number of the first message of a queue that was stored after a time; its maximum offset if there is
        none.
        """
        left, right = self.min_offset(topic, queue_id), self.max_offset(topic, queue_id)
        while left < right:
            middle = (left + right) // 2
            units = self.units(topic, queue_id, middle, middle + 1)
            head = self.files.commit_log.head(int(units["physical_offset"][0])) if len(units) else None
            if head is not None and int(head["store_timestamp_ms"]) > timestamp_ms:
                right = middle
            else:
                left = middle + 1
        return left

    @healing
    def units(self, topic: str, queue_id: int, start: int, end: int) -> NDArray[np.void]:
        """The units `start..end` of a queue, as far as its files hold them. The caller has called `max_offset`."""
        key = (topic, queue_id)
        if self.tail is None or key not in self.tail.units or end <= self.tail.units[key][0]:
            queue = self.files.queue(topic, queue_id)
            units = queue.read(start, end - start)
            if len(units) < end - start:
                queue.load()  # the next file was created meanwhile
                units = queue.read(start, end - start)
            return units
        first = self.tail.units[key][0]
        above = self.tail.read(key, max(start, first), end)
        if start >= first:
            return above
        below = self.files.queue(topic, queue_id).read(start, first - start)
        return np.concatenate([below, above]) if len(below) == first - start else below

    @healing
    def record_crc(self, position: int, size: int) -> int | None:
        """The CRC-32 of bytes of the log, read from the file that is at the path now.

        Returns
        -------
        int | None
            None: the bytes lie below the first segment. -1: the log does not reach that far.
        """
        self._forget_deleted()
        log = self.files.commit_log
        if position + size > log.max_offset:
            log.load()
        if position < log.min_offset:
            return None
        log.reopen_replaced(position)
        return log.crc(position, position + size)

    # ---- records

    def read(
        self,
        topic: str,
        queue_id: int,
        start: int,
        end: int,
        columns: Sequence[str],
        *,
        verify_body_crc: bool = True,
        max_rows: int = READ_ROWS,
        max_bytes: int = READ_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """Read the messages `start..end` of a queue as record batches, in order, each message once.

        A thread reads the next records meanwhile.

        Parameters
        ----------
        start, end : int
            Queue offsets; `end` at most `max_offset`.
        columns : sequence of str
            Names in `record_columns.COLUMNS`; nothing else is decoded.
        max_rows, max_bytes : int
            The limits of one batch, in messages and bytes of records. A batch has at least one message.

        Raises
        ------
        CorruptionError
            A unit and its record do not agree, or a CRC does not match. The error names file and offset.
        OffsetOutOfRangeError
            Retention has deleted the next message, at `queue_offset`; `min` is the first one that is left. All messages
            before it were given.
        """
        blocks = self.blocks(topic, queue_id, start, end, max_rows, max_bytes)

        def decoded(block: Gathered) -> pa.RecordBatch:
            return block.decoded(columns, verify_body_crc=verify_body_crc)

        if end - start <= max_rows:
            yield from map(decoded, blocks)
            return
        with ThreadPoolExecutor(1) as pool:  # reading and copying do not need the GIL, which the CRCs hold for long
            ahead = deque(pool.submit(next, blocks, None) for _ in range(_READ_AHEAD))
            while (block := ahead.popleft().result()) is not None:
                ahead.append(pool.submit(next, blocks, None))
                yield decoded(block)

    def blocks(
        self,
        topic: str,
        queue_id: int,
        start: int,
        end: int,
        max_rows: int,
        max_bytes: int,
        tags_codes: frozenset[int] | None = None,
    ) -> Iterator[Gathered]:
        """The messages of a queue as bytes, up to `max_rows` messages and `max_bytes` bytes at a time.

        Parameters
        ----------
        tags_codes : frozenset of int | None
            Only the messages whose unit has one of these tags codes. A unit that has no tags code is passed on, too:
            those of delayed messages, which have a time instead, and those that point to an extension file.
        """
        position = start
        codes = None if tags_codes is None or topic == SCHEDULE_TOPIC else np.array(sorted(tags_codes), np.int64)
        while position < end:
            try:
                block = self._block(topic, queue_id, position, min(end, position + max_rows), max_bytes, codes)
            except FileNotFoundError as error:
                self._check_retention(topic, queue_id, position, end)
                raise CorruptionError(str(error.filename), 0, "this file", "none") from error
            if block is None:
                self._check_retention(topic, queue_id, position, end)
                raise StoreWentBackwardsError(
                    f"{topic}/{queue_id}: message {position} was visible and is gone. The queue was deleted, or the "
                    f"store was restored"
                )
            position = block.end
            yield block
            del block  # so that the next block can use its memory

    def _block(
        self, topic: str, queue_id: int, position: int, end: int, max_bytes: int, codes: NDArray[np.int64] | None
    ) -> Gathered | None:
        """The next messages of a queue; None if the first of them is no longer in the queue or in the log."""
        units = self.units(topic, queue_id, position, end)
        if not len(units) or 0 <= int(units["physical_offset"][0]) < self.files.commit_log.min_offset:
            return None
        end = position + len(units)
        rows = np.arange(len(units), dtype=np.int64)
        all_offsets = units["physical_offset"].astype(np.int64)
        if codes is not None:
            rows = rows[np.isin(units["tags_code"], codes) | (units["tags_code"] <= _EXTENSION_ADDRESS)]
            if not len(rows):
                none = np.empty(0, np.int64)
                sizes, path = none.astype(np.int32), self.files.paths.commit_log
                return Gathered(topic, queue_id, position, end, none, none, sizes, none.astype(np.uint8), none, path)
        sizes = units["size"][rows].astype(np.int32)
        physical_offsets = all_offsets[rows]
        costs = sizes
        if self.files.has_batch_queues(topic):  # the messages of one record are read together
            costs = np.where(np.diff(physical_offsets, prepend=-1) == 0, 0, sizes).astype(np.int32)
        count = max(1, int(np.searchsorted(np.cumsum(costs, dtype=np.int64), max_bytes, side="right")))
        gaps = physical_offsets[1:count] - physical_offsets[: count - 1] - sizes[: count - 1]
        read_together = np.cumsum(costs[1:count] + np.where((gaps > 0) & (gaps <= GAP), gaps, 0), dtype=np.int64)
        count = 1 + int(np.searchsorted(read_together, _MOST_GAPS * max_bytes, side="right"))
        if count < len(rows):
            end = position + int(rows[count])
        queue_offsets = position + rows[:count]
        sizes, physical_offsets = sizes[:count], physical_offsets[:count]
        self.check_units(topic, queue_id, queue_offsets, physical_offsets, sizes)
        if self.files.has_batch_queues(topic):
            return self._gathered_singly(topic, queue_id, position, queue_offsets, physical_offsets, sizes)
        data, positions = self.files.commit_log.gather(physical_offsets, sizes)
        self.check_place()  # after reading, because files are opened by their paths
        renumbered = None
        if not self.own:
            renumbered = self._in_order(topic, queue_id, position, all_offsets)[rows[:count]]
        path = self.files.paths.commit_log
        return Gathered(
            topic, queue_id, position, end, queue_offsets, physical_offsets, sizes, data, positions, path, renumbered
        )

    def _gathered_singly(
        self,
        topic: str,
        queue_id: int,
        start: int,
        queue_offsets: NDArray[np.int64],
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int32],
    ) -> Gathered:
        """Messages of a batch queue, each with a record of its own that is made from its part of the inner batch."""
        queue, log, path = self.files.queue(topic, queue_id), self.files.commit_log, self.files.paths.commit_log
        places, firsts = np.unique(physical_offsets, return_index=True)
        data, positions = log.gather(places, sizes[firsts])
        self.check_place()
        found: list[bytes] = []
        for row, (place, first) in enumerate(zip(places.tolist(), firsts.tolist(), strict=True)):
            at, size = int(positions[row]), int(sizes[first])
            records = single_records(data[at : at + size].tobytes(), path, place)
            skipped = int(queue_offsets[first]) - queue.number_in_record(int(queue_offsets[first]))
            wanted = int(np.count_nonzero(physical_offsets == place))
            if skipped + wanted > len(records):
                said = f"unit {int(queue_offsets[first]) + wanted - 1} of {topic}/{queue_id}"
                raise MagicError(path, place, said, f"a record with {len(records)} messages")
            found += records[skipped : skipped + wanted]
        lengths = np.fromiter(map(len, found), np.int32, len(found))
        ends = np.cumsum(lengths, dtype=np.int64)
        return Gathered(
            topic,
            queue_id,
            start,
            start + len(found),
            queue_offsets,
            physical_offsets,
            lengths,
            np.frombuffer(b"".join(found), np.uint8),
            ends - lengths,
            path,
        )

    def _in_order(
        self, topic: str, queue_id: int, position: int, physical_offsets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which units point to a place after the record of the unit before.

        A broker that restores a deleted topic gives its records the next units, whatever numbers they contain. Even so,
        each unit points to a later record than the one before, so no record is in its queue twice.
        """
        before = self.units(topic, queue_id, max(position - 1, 0), position)
        filled = not len(before) or int(before["size"][0]) == FILLER_UNIT_SIZE
        last = -1 if filled else int(before["physical_offset"][0])
        renumbered: NDArray[np.bool_] = np.diff(physical_offsets, prepend=last) > 0
        return renumbered

    def _check_retention(self, topic: str, queue_id: int, position: int, end: int) -> None:
        """Raise an error if the message at `position` was deleted with the first segments of the log.

        Raises
        ------
        OffsetOutOfRangeError
            The message was deleted. The error says how many messages up to `end` are missing.
        NotAStoreError, StoreWentBackwardsError
            The whole store is missing, or another one is there.
        """
        self._heal()
        begin = self.min_offset(topic, queue_id)
        if not self.files.queue(topic, queue_id).offsets or begin <= position:
            return
        high = self.max_offset(topic, queue_id)
        raise OffsetOutOfRangeError(
            f"{topic}/{queue_id}: {min(begin, end) - position} messages from {position} on are gone, because retention "
            f"has deleted their segments. The queue holds {begin} to {high}",
            topic=topic,
            queue_id=queue_id,
            queue_offset=position,
            min=begin,
            max=high,
        )

    def check_units(
        self,
        topic: str,
        queue_id: int,
        queue_offsets: NDArray[np.int64],
        physical_offsets: NDArray[np.int64],
        sizes: NDArray[np.int32],
    ) -> None:
        """Refuse units that cannot belong to a record, before anything is read or allocated for them.

        Raises
        ------
        MagicError
            The size of a unit is not that of a record, or exceeds the room in its segment.
        """
        log = self.files.commit_log
        room = log.file_size - BLANK.size - (physical_offsets - log.min_offset) % log.file_size
        bad = np.flatnonzero((sizes <= 0) | (sizes > room) | (physical_offsets < 0))
        if len(bad):
            row = int(bad[0])
            queue_offset = int(queue_offsets[row])
            raise MagicError(
                self.files.queue(topic, queue_id).place(queue_offset)[0],
                queue_offset,
                f"unit {queue_offset} of {topic}/{queue_id}",
                f"physical offset {int(physical_offsets[row])}, size {int(sizes[row])}",
            )

    def close(self) -> None:
        """Close all files."""
        self.files.close()
        for held in (*self._folders.values(), self._identity_file):
            if held is not None:
                held.close()
        if self._watch is not None:
            self._watch.close()
        self._watch, self._watch_at_s = None, math.inf
        self._folders.clear()
        self._identity_file = None
