"""The ends of the queues of some topics, while the store grows.

A stream over thousands of queues needs these ends many times a second, and usually one or two of the queues have grown.
If a writer of ours says how far the log is visible, the queues that grew are found in the log: from the last known
record, over the records and BATCH records after it, to the visible end. The queues themselves are read the first time,
under a broker's rules, and whenever the log does not continue what is known.

A queue that was deleted and created again may happen to be as long as the old one. Therefore the place of each queue's
last message is remembered, and is compared when the queue is read again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from messagestore.errors import CorruptionError
from messagestore.format.batch_record import BatchRecord
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import is_ordinary_topic
from messagestore.log.log_end import Anchor
from messagestore.log.walk import Depth, Run, Walk, rows_of
from messagestore.read.view import NoBytes, StoreView

Ends = dict[tuple[str, int], int]
FEW_QUEUES = 16
"""Up to this number of queues, reading the queues is preferred to reading the log."""
_WALK_SIZE = 1 << 20
_WALK_SIZE_PER_QUEUE = 16 * 1024
"""The largest number of bytes of single messages that are read before the queues are read instead."""
_SETTLED_S = 2.0
"""How old the time of a folder must be before it is relied on. A second change may get the same time as the first: file
systems have clocks with steps of up to two seconds.
"""
_LONG_LOOK_S = 0.05
_PAUSE = 2.0
"""If reading all queues of a broker's store took long, they are read again after this many times as long."""


class _Mark(NamedTuple):
    """The end of the log to which the known ends belong, and a record that shows whether the log is still the same.

    The record is the last one below `end`, or a BATCH record, whose CRCs cover its batch.
    """

    end: int
    record: Anchor


class _Listing(NamedTuple):
    """The folders of queues when they were read, by which it is seen that they need not be read again.

    Parameters
    ----------
    folders : tuple of str
        `consumequeue`, and then the folders of the topics that are there.
    times_s : tuple of float
        When a name in each of them changed last.
    settled : bool
        The times certainly show the next change.
    log_end : int | None
        Where the log ended for readers.
    generation : int
        That of the view.
    """

    folders: tuple[str, ...]
    times_s: tuple[float, ...]
    settled: bool
    log_end: int | None
    generation: int

    @classmethod
    def begun(cls, view: StoreView, topics: Iterable[str]) -> _Listing:
        """Note what the folders are like before they are read."""
        disk, top = view.files.disk, view.files.paths.consume_queue
        paths = (top, *(path for topic in topics if disk.is_folder(path := os.path.join(top, topic))))
        folders = tuple(os.path.join(path, ".") for path in paths)  # where a link leads to
        times_s = _times_s(view, folders)
        settled = max(times_s) < disk.time_ns() / 1e9 - _SETTLED_S
        return cls(folders, times_s, settled, view.known_end, view.generation)


def _times_s(view: StoreView, folders: Iterable[str]) -> tuple[float, ...]:
    """When names in folders changed last; now for a folder that is missing."""
    return tuple(view.files.disk.modified_s(folder) for folder in folders)


class QueueEnds:
    """The ends of all queues of some topics.

    Parameters
    ----------
    view : StoreView
    topics : iterable of str
    names : bool
        Also look for the names of all topics.

    Attributes
    ----------
    ends : dict of (topic, queue id) to int
        The number of the first message that is not visible yet. It is the same object until it changes.
    topic_names : frozenset of str | None
        All topics that have queues, except retry, dead letter and system topics; None if nobody asked for them. It is
        the same object until it changes.
    restarts : dict of (topic, queue id) to int
        How often a queue was found to begin again at or below the end that was known before: it was deleted and created
        again. Queues to which this never happened are left out. It is the same object until it changes.
    shrinks : dict of (topic, queue id) to int
        How often a queue was found to be shorter than before, or gone; as `restarts`.
    waiting : bool
        The last look was skipped, because it would have taken long and the one before was recent.
    """

    def __init__(self, view: StoreView, topics: Iterable[str], *, names: bool = False) -> None:
        self.view = view
        self.topics = tuple(topics)
        self.topic_names: frozenset[str] | None = frozenset() if names else None
        self._covered = frozenset(self.topics)
        self.ends: Ends = {}
        self.restarts: Ends = {}
        self.shrinks: Ends = {}
        self.waiting = False
        self._places: dict[tuple[str, int], tuple[int, int]] = {}  # end, and where the last message before it lies
        self._mark: _Mark | None = None
        self._queue_ids: dict[str, list[int]] | None = None
        self._listed: _Listing | None = None
        self._not_before_s = 0.0

    def look(self, *, find_queues: bool = True) -> Ends:
        """The ends now; the caller has refreshed the view.

        Parameters
        ----------
        find_queues : bool
            Also look for new queues when the queues are read.
        """
        ends = self._followed()
        self.waiting = ends is None and self.view.known_end is None and time.monotonic() < self._not_before_s
        if ends is None and not self.waiting:
            ends = self._asked(find_queues)
        if ends is not None and ends != self.ends:
            self.shrinks = _counted(self.shrinks, {key for key, end in self.ends.items() if ends.get(key, 0) < end})
            self.ends = ends
        return self.ends

    def covers(self, topic: str) -> bool:
        """Whether the queues of a topic are followed."""
        return topic in self._covered

    def add_names(self, topics: Iterable[str]) -> None:
        """Note topics that were found, if the names of all topics are wanted."""
        if self.topic_names is not None:
            new = frozenset(topic for topic in topics if topic not in self.topic_names and is_ordinary_topic(topic))
            if new:
                self.topic_names |= new

    # ---- all queues

    def _asked(self, find_queues: bool) -> Ends:
        begin_s = time.thread_time()
        view = self.view

        if self._queue_ids is None or (find_queues and not self._is_listed()):
            self._queue_ids = self._found_queues()
        keys = [(topic, queue_id) for topic, ids in self._queue_ids.items() for queue_id in ids]

        few = len(keys) <= FEW_QUEUES
        asked = view.max_offsets(keys, self._places) if few else view.max_offsets(keys)
        ends = {key: asked[key] if key in asked else self._places[key][0] for key in keys}
        newest, again = (-1, 0), set[tuple[str, int]]()
        for key, end in asked.items():
            known_end, known_place = self._places.get(key, (0, -1))
            placed = 0 < known_end <= end and known_place >= 0
            if placed and self._place(key, known_end)[0] not in (known_place, -1):
                again.add(key)
            place, size = self._place(key, end) if end else (-1, 0)
            self._places[key] = end, place
            newest = max(newest, (place, size))
        self.restarts = _counted(self.restarts, again)
        self._mark = self._marked(sum(newest), *newest) if view.known_end is not None and not few else None

        took_s = time.thread_time() - begin_s
        if took_s > _LONG_LOOK_S:
            self._not_before_s = time.monotonic() + _PAUSE * took_s
        return ends

    def _found_queues(self) -> dict[str, list[int]]:
        """The queue ids of the topics, and the names of all topics if they are wanted, from the folders."""
        view = self.view
        listing = _Listing.begun(view, self.topics)
        queue_ids = {topic: view.queue_ids(topic) for topic in self.topics}
        if self.topic_names is not None:
            names = frozenset(filter(is_ordinary_topic, view.topics()))
            self.topic_names = self.topic_names if names == self.topic_names else names
        self._listed = listing
        return queue_ids

    def _is_listed(self) -> bool:
        """Whether the folders hold the queues that were found in them last. Any message may have made a new topic."""
        listed, view = self._listed, self.view
        if listed is None or not listed.settled or view.known_end is None or view.tail is not None:
            return False
        if self.topic_names is not None and view.known_end != listed.log_end:
            return False
        return listed.generation == view.generation and listed.times_s == _times_s(view, listed.folders)

    def _place(self, key: tuple[str, int], end: int) -> tuple[int, int]:
        """The physical offset and the size of the last message before an end; (-1, 0) if its unit is missing."""
        units = self.view.units(*key, end - 1, end)
        if not len(units) or units["size"][0] == FILLER_UNIT_SIZE:
            return -1, 0
        return int(units["physical_offset"][0]), int(units["size"][0])

    def _marked(self, end: int, position: int, size: int) -> _Mark | None:
        crc = self.view.record_crc(position, size) if position >= 0 else NoBytes.DELETED
        return None if isinstance(crc, NoBytes) else _Mark(end, Anchor(position, size, crc))

    # ---- the log

    def _followed(self) -> Ends | None:
        """The ends according to what was added to the log since the last look; None if the queues must be read."""
        view, mark, limit = self.view, self._mark, self.view.known_end
        if mark is None or limit is None or limit < mark.end or len(self.ends) <= FEW_QUEUES:
            return None
        if self._has_other_topics() or view.record_crc(mark.record.position, mark.record.size) != mark.record.crc:
            return None
        if limit == mark.end:
            return self.ends
        try:
            walk = view.healed(lambda: self._walked(mark.end, limit))
        except CorruptionError:  # the error is raised when the message is read
            return None
        if walk is None:
            return None
        self.restarts = _counted(self.restarts, walk.restarted)
        for key in walk.restarted | (walk.grown - self.ends.keys()):
            view.max_offset(*key)  # files of a queue of this name that was deleted may still be open
        for key in walk.grown:
            self._places[key] = walk.ends[key], self._place(key, walk.ends[key])[0]
        self._mark = self._marked(limit, *walk.last)
        return walk.ends if walk.grown else self.ends

    def _has_other_topics(self) -> bool:
        """Whether topics were made or deleted since the folders were read: the log does not tell of deleted ones."""
        listed = self._listed
        return listed is None or _times_s(self.view, listed.folders[:1]) != listed.times_s[:1]

    def _walked(self, position: int, limit: int) -> _Walk | None:
        walk = _Walk(self, limit)
        return walk if walk.run(position) else None


def _counted(counts: Ends, keys: set[tuple[str, int]]) -> Ends:
    """The counts after something has happened to some queues; the same object if nothing has."""
    return {**counts, **{key: counts.get(key, 0) + 1 for key in keys}} if keys else counts


class _Walk:
    """A walk over the log from one record to its visible end."""

    def __init__(self, queue_ends: QueueEnds, limit: int) -> None:
        self.log = queue_ends.view.files.commit_log
        self.limit = limit
        self.own = queue_ends.view.own
        self.covers = queue_ends.covers
        self.add_names = queue_ends.add_names
        self.ends = dict(queue_ends.ends)
        self.grown: set[tuple[str, int]] = set()
        self.restarted: set[tuple[str, int]] = set()
        self.last = (-1, 0)
        self.left = max(_WALK_SIZE, _WALK_SIZE_PER_QUEUE * len(queue_ends.ends))

    def run(self, position: int) -> bool:
        """Walk record by record; whether the end was reached."""
        walk = Walk(self.log, position, self.limit, Depth.FRAMING, batches=True)
        for run in walk:
            batch = run.batch
            if batch is None:
                self.left -= run.end - int(run.physical_offset + run.starts[0])
                if not self._take_run(run) or self.left < 0:
                    return False
            elif batch.end > self.limit or not self._take_batch(batch):
                return False
            else:
                walk.jump(batch.end)

            self.last = run.last_offset, run.last_size
        return walk.position == self.limit

    def _take_batch(self, batch: BatchRecord) -> bool:
        self.add_names(batch.ranges)
        for topic in filter(self.covers, batch.ranges):
            for queue_id, first, count in batch.ranges[topic]:
                if not self._take(topic, queue_id, first, count):
                    return False
        return True

    def _take_run(self, run: Run) -> bool:
        """Add single messages."""
        rows = rows_of(run)
        queues = rows.by_queue()
        self.add_names(topic for topic, _ in queues)
        for (topic, queue_id), numbers in queues.items():
            if self.covers(topic):
                offsets = rows.queue_offsets[numbers]
                if (np.diff(offsets) != 1).any() or not self._take(topic, queue_id, int(offsets[0]), len(offsets)):
                    return False
        return True

    def _take(self, topic: str, queue_id: int, first: int, count: int) -> bool:
        """Add the messages `first` to `first + count - 1` of a queue; False if some before them are not known.

        If a broker has written the store, a number out of order proves nothing: the unit may have another number.
        """
        key = (topic, queue_id)
        end = self.ends.get(key)
        if end is not None and (first > end or (first < end and not self.own)):
            return False
        if end is not None and first < end:
            self.restarted.add(key)
        self.ends[key] = first + count
        self.grown.add(key)
        return True
