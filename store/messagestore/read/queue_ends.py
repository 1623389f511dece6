"""The ends of the queues of some topics, while the store grows.

A stream over thousands of queues needs these ends many times a second, and usually one or two of the queues have grown.
If a writer of ours says how far the log is visible, the queues that grew are found in the log: from the last known
record, over the records and BATCH records after it, to the visible end. The queues themselves are read the first time,
under a broker's rules, and whenever the log does not continue what is known.

A queue that was deleted and created again may happen to be as long as the old one. Therefore the place of each queue's
last message is remembered, and is compared when the queue is read again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from messagestore.errors import CorruptionError
from messagestore.format.batch_record import BatchRecord
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import is_ordinary_topic
from messagestore.log.walk import Depth, Run, Walk, rows_of
from messagestore.read.view import StoreView

Ends = dict[tuple[str, int], int]
FEW_QUEUES = 16
"""Up to this number of queues, reading the queues is preferred to reading the log."""
_WALK_SIZE = 1 << 20
_WALK_SIZE_PER_QUEUE = 16 * 1024
"""The largest number of bytes of single messages that are read before the queues are read instead."""
_LONG_LOOK_S = 0.05
_PAUSE = 2.0
"""If reading all queues of a broker's store took long, they are read again after this many times as long."""


class _Mark(NamedTuple):
    """The end of the log to which the known ends belong, and a record that shows whether the log is still the same.

    The record is the last one below `end`, or a BATCH record, whose CRCs cover its batch.
    """

    end: int
    position: int
    size: int
    crc: int


class QueueEnds:
    """The ends of all queues of some topics.

    Parameters
    ----------
    view : StoreView
    topics : iterable of str
    pattern : str | None
        A regular expression: also the topics whose whole name matches it, except retry, dead letter and system topics.

    Attributes
    ----------
    ends : dict of (topic, queue id) to int
        The number of the first message that is not visible yet. It is the same object until it changes.
    restarted : set of (topic, queue id)
        The queues that begin again at or below the end that was known before: they were deleted and created again. The
        caller removes those that it has processed.
    waiting : bool
        The last look was skipped, because it would have taken long and the one before was recent.
    """

    def __init__(self, view: StoreView, topics: Iterable[str], pattern: str | None = None) -> None:
        self.view = view
        self.topics = tuple(topics)
        self.pattern = pattern
        self._is_covered = dict.fromkeys(self.topics, True)
        self.ends: Ends = {}
        self.restarted: set[tuple[str, int]] = set()
        self.waiting = False
        self._places: dict[tuple[str, int], tuple[int, int]] = {}  # end, and where the last message before it lies
        self._mark: _Mark | None = None
        self._queue_ids: dict[str, list[int]] | None = None
        self._not_before_s = 0.0

    def look(self, *, find_queues: bool = True) -> Ends:
        """The ends now; the caller has refreshed the view.

        Parameters
        ----------
        find_queues : bool
            Also look for new queues when the queues are read.
        """
        found = self._followed()
        self.waiting = found is None and self.view.known_end is None and time.monotonic() < self._not_before_s
        if found is None and not self.waiting:
            found = self._asked(find_queues)
        if found is not None and found != self.ends:
            self.ends = found
        return self.ends

    def covers(self, topic: str) -> bool:
        """Whether the queues of a topic are followed."""
        known = self._is_covered.get(topic)
        if known is None:
            known = self.pattern is not None and is_ordinary_topic(topic)
            known = self._is_covered[topic] = known and re.fullmatch(self.pattern or "", topic) is not None
        return known

    # ---- all queues

    def _asked(self, find_queues: bool) -> Ends:
        begin_s = time.thread_time()
        view = self.view
        if find_queues or self._queue_ids is None:
            topics = self.topics if self.pattern is None else filter(self.covers, view.topics())
            self._queue_ids = {topic: view.queue_ids(topic) for topic in topics}
        ends = view.max_offsets((topic, queue_id) for topic, ids in self._queue_ids.items() for queue_id in ids)
        newest = (-1, 0)
        for key, end in ends.items():
            known_end, known_place = self._places.get(key, (0, -1))
            known = 0 < known_end <= end and known_place >= 0
            if known and self._place(key, known_end)[0] not in (known_place, -1):
                self.restarted.add(key)
            place, size = self._place(key, end) if end else (-1, 0)
            self._places[key] = end, place
            newest = max(newest, (place, size))
        self._mark = self._marked(sum(newest), *newest) if view.known_end is not None else None
        took_s = time.thread_time() - begin_s
        if took_s > _LONG_LOOK_S:
            self._not_before_s = time.monotonic() + _PAUSE * took_s
        return ends

    def _place(self, key: tuple[str, int], end: int) -> tuple[int, int]:
        """The physical offset and the size of the last message before an end; (-1, 0) if its unit is missing."""
        units = self.view.units(*key, end - 1, end)
        if not len(units) or units["size"][0] == FILLER_UNIT_SIZE:
            return -1, 0
        return int(units["physical_offset"][0]), int(units["size"][0])

    def _marked(self, end: int, position: int, size: int) -> _Mark | None:
        crc = self.view.record_crc(position, size) if position >= 0 else None
        return None if crc is None or crc < 0 else _Mark(end, position, size, crc)

    # ---- the log

    def _followed(self) -> Ends | None:
        """The ends according to what was added to the log since the last look; None if the queues must be read."""
        view, mark, limit = self.view, self._mark, self.view.known_end
        if mark is None or limit is None or limit < mark.end or len(self.ends) <= FEW_QUEUES:
            return None
        if view.record_crc(mark.position, mark.size) != mark.crc:
            return None
        if limit == mark.end:
            return self.ends
        try:
            walk = view.healed(lambda: self._walked(mark.end, limit))
        except CorruptionError:  # the error is raised when the message is read
            return None
        if walk is None:
            return None
        self.restarted |= walk.restarted
        for key in walk.grown:
            self._places[key] = walk.ends[key], self._place(key, walk.ends[key])[0]
        self._mark = self._marked(limit, *walk.last)
        return walk.ends if walk.grown else self.ends

    def _walked(self, position: int, limit: int) -> _Walk | None:
        walk = _Walk(self, limit)
        return walk if walk.run(position) else None


class _Walk:
    """A walk over the log from one record to its visible end."""

    def __init__(self, known: QueueEnds, limit: int) -> None:
        self.log = known.view.files.commit_log
        self.limit = limit
        self.own = known.view.own
        self.covers = known.covers
        self.ends = dict(known.ends)
        self.grown: set[tuple[str, int]] = set()
        self.restarted: set[tuple[str, int]] = set()
        self.last = (-1, 0)
        self.left = max(_WALK_SIZE, _WALK_SIZE_PER_QUEUE * len(known.ends))

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
        for topic in filter(self.covers, batch.ranges):
            for queue_id, first, count in batch.ranges[topic]:
                if not self._take(topic, queue_id, first, count):
                    return False
        return True

    def _take_run(self, run: Run) -> bool:
        """Add single messages."""
        rows = rows_of(run)
        for topic, queue_id, start, stop in rows.runs():
            if self.covers(topic):
                first, last = int(rows.queue_offsets[start]), int(rows.queue_offsets[stop - 1])
                if last - first != stop - 1 - start or not self._take(topic, queue_id, first, stop - start):
                    return False
        return True

    def _take(self, topic: str, queue_id: int, first: int, count: int) -> bool:
        """Add the messages `first` to `first + count - 1` of a queue; False if some before them are not known.

        If a broker has written the store, a number out of order proves nothing: the unit may have another number.
        """
        key = (topic, queue_id)
        known = self.ends.get(key)
        if known is not None and (first > known or (first < known and not self.own)):
            return False
        if known is not None and first < known:
            self.restarted.add(key)
        self.ends[key] = first + count
        self.grown.add(key)
        return True
