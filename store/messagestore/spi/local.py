"""Stores on this host: the implementations of `Stores`, `StoreReader` and `StoreWriter` that read and write files.

The reader uses a `StoreView`. An idle stream calls `ends` ninety times a second, so `ends` first checks whether a
writer has changed anything. If another folder with the same store is at the path, the reader opens that one.

The writer uses the staging folder and the store that this process attaches to. The commit of the first batch creates
the store. Until then only the staging folder is created, and only when a task stages rows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messagestore.batches.append import APPENDED, KNOWN, BatchRequest, BatchResult, PlannedWrite, append_batch
from messagestore.batches.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.errors import (
    ConfigError,
    NotAStoreError,
    OffsetOutOfRangeError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreWentBackwardsError,
)
from messagestore.files.consume_queue import UNIT_DTYPE
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.counters import DEAD_LETTERS, KNOWN_BATCHES, ORPHANS_DELETED, SKIPPED_BATCHES, count
from messagestore.files.disk import Disk
from messagestore.files.file_systems import MEMORY, mounted, warn_of_network, was_warned_of
from messagestore.files.staging_files import Write, path_of, remove, sweep, sweep_write
from messagestore.files.state import StateFile
from messagestore.files.store_settings import read_settings
from messagestore.files.topics import Topics
from messagestore.files.writer_lock import probe_java
from messagestore.format.config import StoreConfig
from messagestore.format.gathered import Gathered
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.log.refusals import refuse_to_write
from messagestore.log.store_files import (
    Identity,
    Paths,
    check_root,
    config_of_records,
    looks_like_store,
    make_staging,
    with_levels,
)
from messagestore.read import queue_records
from messagestore.read.group_offsets import add_progress, group_offsets
from messagestore.read.proven_tail import ProvenTail
from messagestore.read.query import find_keys, offset_behind_time
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.view import NoBytes, StoreView, Visible
from messagestore.session import AttachedStore, attached_store, detach_at_the_end
from messagestore.spi.interface import (
    GATHERED_ROWS,
    GATHERED_SIZE,
    NOT_REACHED,
    Committed,
    Description,
    Ends,
    LastRecord,
    Place,
    PlannedRead,
    Proven,
    Queue,
    Queues,
    Range,
    Report,
)
from messagestore.spi.location import Location
from messagestore.writer.log_writer import LogWriter

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 600.0
"""How often this process looks for files of dead writers."""
_ABORT_TIMEOUT_S = 5.0
_RETENTION_LIMIT_S = 1.0
"""How long a commit deletes expired segments after it has published; the next commit continues."""
_last_sweep_s: dict[str, float] = {}
"""When this process last swept each staging folder. It only saves work."""

_LOOK_INTERVAL_S = 1.0
"""How often the reader looks for new queues in a store whose writer does not show changes (a Java broker)."""
_SAMPLED_UNITS = 256
_MOST_SIZE = (1 << 31) - 1
"""That of a record."""
_MOST_FOLLOWED = 16
_MOST_TOPICS = 65_536
"""How many sets of topics a reader follows, and how many topics they have, unless one has more. What nobody has asked
about for longest is dropped: a client of a server can ask for any names.
"""


class LocalStores:
    """The stores in folders of this host. It has no state, so a task receives only its name."""

    def reader(
        self,
        location: Location | str,
        config: StoreConfig | None = None,
        proven: Proven | None = None,
        *,
        to_gather: bool = False,  # noqa: ARG002 - opening asks nobody
    ) -> LocalReader:
        """Open a store for reading."""
        return LocalReader(location, config, proven)

    def writer(
        self,
        location: Location | str,
        config: StoreConfig,
        *,
        staging_ttl_s: float,
        staging_dir: str | None = None,
        ends_abruptly: bool = False,
    ) -> LocalWriter:
        """A writer for a store; nothing is opened yet."""
        return LocalWriter(
            location, config, staging_ttl_s=staging_ttl_s, staging_dir=staging_dir, ends_abruptly=ends_abruptly
        )


LOCAL_STORES = LocalStores()


class LocalReader:
    """A store on this host, opened for reading.

    Parameters
    ----------
    path : Location | str
    config : StoreConfig | None
    proven : Proven | None
    disk : Disk | None

    Raises
    ------
    NotAStoreError
        There is no store, or its queues cannot be read.
    """

    def __init__(
        self,
        path: Location | str,
        config: StoreConfig | None = None,
        proven: Proven | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._path, self._config, self._disk = os.fspath(path), config, disk
        self._view = StoreView(self._path, config, disk, None if proven is None else _tail_of(proven))
        self._followed: dict[tuple[tuple[str, ...], bool], _Followed] = {}
        """What callers ask about, with what was asked last at the end."""

    @property
    def store_id(self) -> str:
        """The id of the store; empty if it has none yet."""
        return self._view.store_id

    def describe(self, topics: Iterable[str] | None = None, *, queues: bool = False) -> Description:
        """Which store this is."""
        view, wanted = self._view, None if topics is None else tuple(topics)
        queue_ids: dict[str, list[int]] = {}
        if queues and wanted is None:
            queue_ids = view.topics()
        elif queues:
            queue_ids = {name: ids for name in wanted or () if (ids := view.queue_ids(name))}
        return Description(
            view.store_id,
            view.known_ids - {view.store_id},
            **_known_of(view.files.topics, wanted),
            queue_ids=queue_ids,
            config=view.files.config,
        )

    def broker_name(self) -> str:
        """The name of the store's broker."""
        return self._view.broker_name

    # ---- ends

    def ends(self, topics: Sequence[str], since: Ends | None = None, *, names: bool = False) -> Ends:
        """How far the queues of some topics reach."""
        key = tuple(topics), names
        try:
            ends = self._follow(key).look()
        except (NotAStoreError, StoreWentBackwardsError):  # another folder is at the path: a restored copy?
            self._reopen()
            ends = self._follow(key).look()
        return since if since is not None and (since.instance, since.serial) == (ends.instance, ends.serial) else ends

    def _follow(self, key: tuple[tuple[str, ...], bool]) -> _Followed:
        followed = self._followed.pop(key, None)
        if followed is None:
            topics, names = key
            while self._followed and (
                len(self._followed) >= _MOST_FOLLOWED
                or len(topics) + sum(len(others) for others, _ in self._followed) > _MOST_TOPICS
            ):
                del self._followed[next(iter(self._followed))]
            followed = _Followed(self._view, topics, names=names)
        self._followed[key] = followed
        return followed

    def _reopen(self) -> None:
        """Open the other folder that is at the path now, which must contain the same store."""
        view = StoreView(self._path, self._config, self._disk)
        if self._view.store_id and view.store_id != self._view.store_id:
            view.close()
            raise replaced(self._path, self._view.store_id, view.store_id)
        self._view.close()
        self._view = view
        self._followed.clear()

    # ---- single messages

    def await_change(self, timeout_s: float) -> None:
        """Wait until the store may have changed."""
        self._view.await_change(timeout_s)

    def begins(self, queues: Iterable[Queue]) -> Queues:
        """The number of the first message of each queue that is still in the log."""
        return {queue: self._view.min_offset(*queue) for queue in queues}

    def places(self, offsets: Mapping[Queue, int]) -> dict[Queue, Place]:
        """Where the message before each offset lies."""
        places = {}
        for queue, offset in offsets.items():
            units = self._view.units(*queue, max(0, offset - 1), offset)
            if len(units):
                size = int(units["size"][0])
                places[queue] = Place(int(units["physical_offset"][0]), 0 if size == FILLER_UNIT_SIZE else size)
        return places

    def seek(self, times_ms: Mapping[Queue, int | None], *, physical_offset: int | None = None) -> Queues:
        """The number of each queue's first message at or above a physical offset, or stored after a time."""
        return {queue: self._seek(queue, physical_offset, time_ms) for queue, time_ms in times_ms.items()}

    def _seek(self, queue: Queue, physical_offset: int | None, after_ms: int | None) -> int:
        view = self._view
        behind = None if after_ms is None else offset_behind_time(view, *queue, after_ms)
        if physical_offset is None:
            return view.max_offset(*queue) if behind is None else behind
        first = view.search_physical(*queue, physical_offset)
        return first if behind is None else min(first, behind)

    def prove_last(self, position: int, size: int, *, with_time: bool = False) -> LastRecord | None:
        """The bytes at a place, as a record."""
        view = self._view
        if not 0 <= size <= _MOST_SIZE:  # more than a record can have
            return LastRecord(position, size, NOT_REACHED)
        crc = view.record_crc(position, size)
        if crc is NoBytes.DELETED:
            return None
        if crc is NoBytes.NOT_REACHED:
            return LastRecord(position, size, NOT_REACHED)

        head = view.healed(lambda: view.files.commit_log.head(position)) if with_time else None
        return LastRecord(position, size, crc, None if head is None else int(head["store_timestamp_ms"]))

    # ---- ranges

    def mean_sizes(self, ranges: Sequence[Range]) -> list[float]:
        """The mean record size of each range, from units at its beginning, in its middle and at its end."""
        return [self._mean_size(range_) for range_ in ranges]

    def _mean_size(self, range_: Range) -> float:
        middle = max(range_.start, (range_.start + range_.end - _SAMPLED_UNITS) // 2)
        sizes = [
            self._sizes(Range(range_.topic, range_.queue_id, at, min(range_.end, at + _SAMPLED_UNITS)))
            for at in {range_.start, middle, max(range_.start, range_.end - _SAMPLED_UNITS)}
        ]
        count = sum(map(len, sizes))
        return sum(int(some.sum(dtype="int64")) for some in sizes) / count if count else 0.0

    def sizes(self, ranges: Sequence[Range]) -> list[NDArray[np.int32]]:
        """The sizes in the units of some ranges."""
        return [self._sizes(range_) for range_ in ranges]

    def _sizes(self, range_: Range) -> NDArray[np.int32]:
        units = self._view.units(range_.topic, range_.queue_id, range_.start, range_.end)
        sizes = units["size"].astype(np.int32)
        if self._view.files.has_batch_queues(range_.topic):  # several messages share a record
            _, same, counts = np.unique(units["physical_offset"], return_inverse=True, return_counts=True)
            sizes = np.maximum(1, sizes // counts[same]).astype(np.int32)
        sizes[(sizes == FILLER_UNIT_SIZE) | (sizes < 0)] = 0
        return sizes

    def find(self, topics: Sequence[str], keys: Sequence[str], *, most: int | None = None) -> dict[Queue, list[int]]:
        """The numbers of all messages with one of some keys.

        Raises
        ------
        ConfigError
            There are more than `most`.
        """
        found: dict[Queue, list[int]] = {}
        for topic in topics:
            left = None if most is None else most - sum(map(len, found.values()))
            found |= {
                (topic, queue_id): numbers for queue_id, numbers in find_keys(self._view, topic, keys, left).items()
            }
        return found

    def proven(self, parts: Sequence[Sequence[Range]]) -> list[Proven | None]:
        """What is proven of these ranges, in a store that nobody has recovered since the machine was started."""
        tail = self._view.tail
        return [None if tail is None else _proven(tail, ranges) for ranges in parts]

    def gather(
        self,
        ranges: Sequence[Range],
        *,
        planned: PlannedRead | None = None,
        max_rows: int = GATHERED_ROWS,
        max_size: int = GATHERED_SIZE,
        tags_codes: frozenset[int] | None = None,
    ) -> Iterator[Gathered]:
        """The bytes of the records of some ranges."""
        if planned is not None:
            self._check_planned(planned, ranges)
        try:
            for range_ in ranges:
                view = self._view
                yield from queue_records.blocks(
                    view, range_.topic, range_.queue_id, range_.start, range_.end, max_rows, max_size, tags_codes
                )
        except OffsetOutOfRangeError:
            if planned is not None:
                self._check_planned(planned, ranges)
            raise
        if planned is not None:  # after reading, too: the store may change at any moment
            self._check_planned(planned, ranges)

    def _check_planned(self, planned: PlannedRead, ranges: Sequence[Range]) -> None:
        """Check that log and queues are those that were planned. Nothing is known below the log's first segment."""
        store_id = self._view.store_id
        if planned.store_id and store_id != planned.store_id:
            raise planned_elsewhere(self._path, planned.store_id, f"another store, {store_id or 'without an id'}")

        fault = ""
        last = planned.last
        if last is not None and not last.is_there(self.prove_last(last.position, last.size)):
            fault = f"the record at physical offset {last.position} has changed"

        if planned.physical_offset:
            ends = {(range_.topic, range_.queue_id): range_.end for range_ in ranges}
            for (topic, queue_id), place in self.places(ends).items():
                if place.ends_behind(planned.physical_offset):
                    fault = f"message {ends[topic, queue_id] - 1} of {topic}/{queue_id} has changed"

        if fault:
            raise StoreWentBackwardsError(
                f"{self._path}: {fault} since this micro-batch was planned: the log was cut or restored, or the topic "
                f"was created again. Restart the query"
            )

    # ---- others

    def publish_progress(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Write how far a query has read, as the offsets of a consumer group, to `config/consumerOffset.json`. A broker
        that holds the store has this file in memory, and is told.
        """
        holder = probe_java(self._path)
        if holder is not None:
            from messagestore.spi.holder import tell_holder  # what most readers never need

            tell_holder(self._view, group, offsets, holder.words)
            return
        publish_offsets(
            self._path, group, offsets, disk=self._disk, pending=lambda table: add_progress(self._view, table)
        )

    def view(self, name: str) -> Report:
        """Rows that say what the store contains."""
        from messagestore.inspect.views import rows_of  # what most readers never need

        return rows_of(self._looked_at(), name)

    def offsets(self, topics: Sequence[str] = (), at_ms: int | None = None) -> Report:
        """How far the queues of some topics reach, and where they were at a time."""
        from messagestore.inspect.queues import offsets_of

        return offsets_of(self._looked_at(), topics, at_ms)

    def lag(self, offsets: Mapping[Queue, int], topics: Iterable[str] = ()) -> Report:
        """How far a reader is behind the end of each queue."""
        from messagestore.inspect.lag import lag_of

        return lag_of(self._looked_at(), offsets, topics)

    def group_lag(self, group: str) -> Report:
        """How far a consumer group is behind the end of each queue."""
        from messagestore.inspect.lag import group_lag_of

        return group_lag_of(self._looked_at(), group)

    def _looked_at(self) -> StoreView:
        """The view, as the store is now."""
        self._view.refresh()
        return self._view

    def published_progress(self, group: str) -> Queues:
        """How far a consumer group has read, from `config/consumerOffset.json`."""
        offsets = group_offsets(self._view)
        return {
            (topic, queue_id): offset
            for topic in offsets.topics(group)
            for queue_id, offset in offsets.get(topic, group).items()
        }

    def close(self) -> None:
        """Close all files."""
        self._view.close()


class _Followed:
    """The queues of some topics in one view, and what was found there last."""

    def __init__(self, view: StoreView, topics: tuple[str, ...], *, names: bool) -> None:
        self._view = view
        self._queues = QueueEnds(view, topics, names=names)
        self._found = Ends("", {})
        self._serials = itertools.count()
        self._instance = ""
        self._generation = -1
        """That of the view, to which `_instance` belongs."""
        self._visible: Visible | None = None
        self._quiet: tuple[int, int] | None = None
        self._looked_s = 0.0

    def look(self) -> Ends:
        """How far the queues reach now; the same object if nothing has changed."""
        view = self._view

        if self._quiet is not None and view.quiet() == self._quiet and view.generation == self._generation:
            return self._found

        visible = view.refresh()
        if view.generation != self._generation:
            self._generation, self._visible, self._instance = view.generation, None, uuid.uuid4().hex
        if visible == self._visible and visible.end is not None:
            return self._found

        self._quiet = view.quiet() if visible.end is None else None
        now_s = time.monotonic()
        find = visible.end is not None or self._quiet is not None or now_s - self._looked_s >= _LOOK_INTERVAL_S
        if find:
            self._looked_s = now_s

        self._queues.look(find_queues=find)
        if self._queues.waiting:
            self._quiet = None

        self._visible = view.visible
        self._found = self._answer()
        return self._found

    def _answer(self) -> Ends:
        """What was found, as the last answer if it is the same."""
        queues, before = self._queues, self._found
        ends = replace(
            before,
            store_id=self._view.store_id,
            queues=queues.ends,
            topic_names=queues.topic_names,
            restarts=queues.restarts,
            shrinks=queues.shrinks,
            recovered=self._view.visible.recovered,
            instance=self._instance,
        )
        return before if ends == before else replace(ends, serial=next(self._serials))


def replaced(path: str, store_id: str, other_id: str) -> StoreWentBackwardsError:
    """The error for a reader that finds another store at its path."""
    return StoreWentBackwardsError(
        f"{path}: found store {other_id or 'without an id'} in place of store {store_id}, which was read until "
        f"now. Put that store back, or begin anew: a query with a new checkpoint, a command once more"
    )


def planned_elsewhere(path: Location | str, store_id: str, other: str) -> NotAStoreError:
    """The error for a read that was planned in a store other than the one at this path."""
    return NotAStoreError(
        f"{path}: host {socket.gethostname()} found {other} there, but the driver planned to read store "
        f"{store_id or 'without an id'}. Let executors and driver see the same store, on one disk or by one URL; if it "
        f"was replaced, restart the query",
        path=str(path),
    )


def _known_of(topics: Topics, names: Iterable[str] | None) -> dict[str, Any]:
    """The fields of a `Description` that say what is known of some topics, or of all."""
    names = tuple(topics.names if names is None else names)
    counts = {name: topic.write_queue_nums for name in names if (topic := topics.get(name)) is not None}
    return {"queue_counts": counts, "multi_tag_topics": topics.with_multi_tags.intersection(names)}


def _proven(tail: ProvenTail, ranges: Iterable[Range]) -> Proven:
    units = {}
    for range_ in ranges:
        queue = (range_.topic, range_.queue_id)
        if queue in tail.units and range_.end > tail.units[queue][0]:
            first = max(range_.start, tail.units[queue][0])
            units[queue] = first, tail.read(queue, first, range_.end).tobytes()
    return Proven(tail.start, tail.end, units)


def _tail_of(proven: Proven) -> ProvenTail:
    units = {queue: (first, np.frombuffer(data, UNIT_DTYPE)) for queue, (first, data) in proven.units.items()}
    return ProvenTail(proven.start, proven.end, units)


class LocalWriter:
    """Writes to a store on this host.

    Parameters
    ----------
    path : Location | str
    config : StoreConfig
    staging_ttl_s : float
    staging_dir : str | None
    ends_abruptly : bool
        See `Stores.writer`.
    client : str
        For whom a server stages files.
    disk : Disk | None
    attached : function, optional
        Returns this process's `AttachedStore` for a path.

    Attributes
    ----------
    file_type : type of StagingWriter
        The type that `stage` creates. The fault harness puts another one here.
    """

    file_type = StagingWriter

    def __init__(
        self,
        path: Location | str,
        config: StoreConfig,
        *,
        staging_ttl_s: float,
        staging_dir: str | None = None,
        ends_abruptly: bool = False,
        client: str = "",
        disk: Disk | None = None,
        attached: Callable[[str, StoreConfig], AttachedStore] = attached_store,
    ) -> None:
        self.paths = Paths(os.fspath(path), config.file_mode_bits)
        self.disk = disk or Disk()
        self.config = config
        self._staging = staging_dir
        self._staging_ttl_s = staging_ttl_s
        self._ends_abruptly = ends_abruptly
        self._client = client
        self._make_attached = attached

    # ---- what is there

    def describe(self, topics: Iterable[str] | None = None) -> Description:
        """What is at the path now."""
        self._look_at_settings()
        identity = Identity.read(self.disk, self.paths.identity)
        topics_table = Topics(self.disk, self.paths.root)
        topics_table.load()
        return replace(
            self._described(identity), **_known_of(topics_table, topics), config=with_levels(self.config, identity)
        )

    def _look_at_settings(self) -> None:
        """Take the settings that live with the store as they are now, where the caller gave none."""
        self.config = self.config.completed(read_settings(self.disk, self.paths.settings))

    def _described(self, identity: Identity | None) -> Description:
        """The result of `describe` without what is known of topics, and with the settings as they were given."""
        exists = identity is not None or looks_like_store(self.disk, self.paths)
        if identity is None:
            return Description(exists=exists, config=self.config)
        return Description(identity.store_id, identity.known_ids - {identity.store_id}, exists, config=self.config)

    def prepare(self) -> Description:
        """What is at the path, after a check that it may be written."""
        holder = probe_java(self.paths.root)
        if holder is not None:
            raise StoreLockedError(
                f"{self.paths.lock}: locked by {holder.words}. Nothing of this batch was written. Stop that "
                f"process, or write to another store",
                path=self.paths.lock,
                holder=holder.words,
            )
        check_root(self.disk, self.paths)
        self._look_at_settings()
        refuse_to_write(self.disk, self.paths, self.config)
        warn_of_network(self.paths.root)
        self._check_staging()
        description = self._described(Identity.read(self.disk, self.paths.identity))
        if description.exists and not description.store_id:  # a broker's store
            with self._attached().writing("creating the store", config=self.config):
                description = self._described(Identity.read(self.disk, self.paths.identity))
        if description.store_id:
            self.config = config_of_records(self.disk, self.paths, self.config)
        self._sweep()  # before tasks need the room: a driver that was killed repeatedly left its files each time
        state = StateFile(self.disk, self.paths.state).read()
        return replace(description, config=self.config, log_end=0 if state is None else state.clean_end)

    def _check_place(self, store_id: str) -> bool:
        """Whether the store that a write was planned for is there; False if there was no store, and there is none.

        Raises
        ------
        NotAStoreError
            Another store is there, or the store is missing.
        """
        identity = Identity.read(self.disk, self.paths.identity)
        if not store_id:
            return identity is not None
        if identity is None or identity.store_id != store_id:
            present = "no store" if identity is None else f"another store, {identity.store_id}"
            raise NotAStoreError(
                f"{self.paths.root}: host {socket.gethostname()} found {present} there, but the write was planned for "
                f"store {store_id}. Let executors and driver see the same store, on one disk or by one URL, and do not "
                f"replace it during a write",
                path=self.paths.root,
            )
        return True

    # ---- tasks

    def stage(self, write: Write, store_id: str) -> StagingWriter:
        """A new file in the staging folder of the store, or of the path where the store will be created."""
        exists = self._check_place(store_id)
        if self._staging is not None:
            self._check_staging()
        elif not exists:
            make_staging(self.disk, self.paths)
        return self.file_type(self._folder, self.disk, write=write, client=self._client)

    @property
    def _folder(self) -> str:
        """The folder of the staged files."""
        return self._staging or self.paths.staging

    def _check_staging(self) -> None:
        """Refuse a staging folder that is missing here. It is not created: it would be seen by this host only."""
        if self._staging is not None and not self.disk.is_folder(self._staging):
            raise ConfigError(
                f"option stagingDir: host {socket.gethostname()} found no folder {self._staging}. Create it on a disk "
                f"that the driver and all executors see. Nothing of this batch was written",
                key="stagingDir",
                value=self._staging,
            )

    # ---- the driver

    def commit(
        self,
        files: Sequence[StagedFile],
        request: BatchRequest,
        store_id: str,
        *,
        planned: PlannedWrite | None = None,
        closing: bool = False,
        dead_letter_topic: str = "",
    ) -> Committed:
        """Append staged files as one batch."""
        store_exists = self._check_place(store_id)
        chunks = StagedChunks(self._folder, files, self.disk)
        if not store_exists:  # no batch is known in a store that is not there, and files that are gone must make none
            chunks.open()

        store = self._attached()
        with store.writing(_description(request), config=self.config) as writer:
            self._check_place(store_id)  # again, now that nobody else can create a store here
            try:
                committed = Committed(writer.files.store_id, self.append(writer, chunks, request, planned))
            except StoreFullError:
                _delete_expired(store)
                raise
            _delete_expired(store)
        if not store_exists:
            _warn_of_memory(self.paths.root)

        status, changes = committed.result.status, dict[str, int]()
        if status != APPENDED:
            changes[KNOWN_BATCHES if status == KNOWN else SKIPPED_BATCHES] = 1
        if dead_letter_topic and status in (APPENDED, KNOWN):  # its first commit may have been killed before it counted
            changes[f"{DEAD_LETTERS}{dead_letter_topic}"] = 1
        if changes:
            self._count(**changes)

        if closing:
            with contextlib.suppress(StoreError, OSError):  # the batch is in the log; the next writer recovers
                store.detach()
        self._remove([file.name for file in files])
        self._sweep()
        return committed

    def append(
        self, writer: LogWriter, chunks: StagedChunks, request: BatchRequest, planned: PlannedWrite | None
    ) -> BatchResult:
        """The step of `commit` that holds the writer lock."""
        return append_batch(writer, chunks, request, planned=planned)

    def abort(self, names: Sequence[str], store_id: str) -> None:
        """Delete staged files, under the writer lock if there is a store."""
        for name in names:
            path_of(self._folder, name)
        if not self._check_place(store_id):
            self._remove(names)  # there was no store to commit to, and none is created here
            return
        timeout_s = min(_ABORT_TIMEOUT_S, self.config.lock_timeout_s)
        with self._attached().writing("abort", timeout_s, config=self.config):
            self._remove(names)
        self._sweep()

    def _remove(self, names: Sequence[str]) -> None:
        """Delete the files of a write that has ended, and those that its failed attempts left."""
        remove([path_of(self._folder, name) for name in names], self.disk)
        sweep_write(self._folder, names, self.disk)

    def _sweep(self) -> None:
        """Delete files of dead writers if the last sweep was at least `SWEEP_INTERVAL_S` ago."""
        folder, now_s = self._folder, time.monotonic()
        if now_s - _last_sweep_s.get(folder, -SWEEP_INTERVAL_S) >= SWEEP_INTERVAL_S:
            _last_sweep_s[folder] = now_s
            gone = sweep(folder, self._staging_ttl_s, self.disk)
            if gone:
                self._count(**{ORPHANS_DELETED: len(gone)})

    def _count(self, **changes: int) -> None:
        """Count for monitoring what leaves no trace in the log. If that fails, a warning says so.

        Where there is no store yet nothing is counted: a folder with more than staging files does not become one.
        """
        if not self.disk.exists(self.paths.identity):
            return
        try:
            count(self.disk, self.paths.spark, **changes)
        except (StoreError, OSError) as error:
            _log.warning("%s: %s was not counted: %s", self.paths.root, ", ".join(changes), error)

    def _attached(self) -> AttachedStore:
        if self._ends_abruptly:
            detach_at_the_end()
            was_warned_of(self.paths.root)  # `prepare` warns; Spark starts a process for each commit
        return self._make_attached(self.paths.root, self.config)


def _warn_of_memory(root: str) -> None:
    """Warn about a store that was made where a reboot loses it. Only the write that makes the store says so."""
    kind, mount = mounted(os.path.realpath(root))
    if kind in MEMORY:
        _log.warning(
            "%s: this new store is in memory (%s, mounted on %s), and gone after a reboot. Put a store that must last "
            "on a disk",
            root,
            kind,
            mount,
        )


def _delete_expired(store: AttachedStore) -> None:
    """Run retention that is due, unless a session of this process does that."""
    services = store.services
    if services is not None and not services.periodic:
        services.retention.run_after_append(_RETENTION_LIMIT_S)


def _description(request: BatchRequest) -> str:
    """The text by which other processes learn who holds the writer lock."""
    if request.app_id is None:
        return "a batch write of Spark"
    return f"batch {request.version} of app {request.app_id}"
