"""How does Spark read a store: which offsets, which ranges, which rows?

    driver     StreamReader: latestOffset (ninety times a second, so microseconds when idle), partitions(start, end)
    tasks      read(partition): ranges of queues -> record batches with the columns that were asked for

Progress is Spark's: nothing here depends on `commit` or `stop`. What was read can be read again as long as the log
holds it; where it does not, that is an error, or with failOnDataLoss=false a gap that is counted in a warning. Whether
the log is still the one that was read is checked whenever there is something new.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from messagestore import ConfigError, NotAStoreError, OffsetOutOfRangeError, StoreWentBackwardsError, UnknownTopicError
from messagestore.spi import FILLER_UNIT_SIZE, UNIT_DTYPE, ProvenTail, QueueEnds, StoreView, Visible
from pyspark_messagestore.offsets import LastRecord, Queues, Range, StreamOffset, limited, pieces
from pyspark_messagestore.options import EARLIEST, EVERY_QUEUE, LATEST, SourceOptions
from pyspark_messagestore.progress import GroupProgress
from pyspark_messagestore.schema import Projection

PARTITION_ROWS = 262_144
"""Messages of a Spark partition, at most."""
PARTITION_SIZE = 128 * 1024 * 1024
"""Bytes of records of a Spark partition, at most."""
ROW_WEIGHT = 256
"""What one more message costs a task, in bytes of records."""
SMALL_WEIGHT = 16 * 1024 * 1024
"""Less than this is not divided: another task would cost more than it saves."""
_SLACK = 1.05
"""A task may get so much more than its share, before a queue is cut or another task begun."""
_KEPT_PLACES = 3
"""Steps of which the driver remembers where the messages before their ends lie: the last one may be planned again."""
_SAMPLED_QUEUES = 64
_SAMPLED_UNITS = 256
BATCH_ROWS = 65_536
_LOOK_INTERVAL_S = 1.0
"""How often new queues are looked for in a store whose writer does not tell when it changed (a Java broker)."""

_SYSTEM_PREFIX = "rmq_sys_"

_log = logging.getLogger(__name__)


@dataclass
class RangesPartition(InputPartition):
    """What one task reads: plain values only.

    Parameters
    ----------
    store_id : str
        Of the store these ranges were planned in.
    ranges : list of (topic, queue id, start, end)
    physical_offset : int
        No record of the ranges ends behind it; 0: not known.
    last : (position, size, crc) | None
        The last record that was planned: a task knows the log by it.
    tail : (start, end, {(topic, queue id): (first queue offset, units)}) | None
        Of a store that no writer has recovered since the machine was started: what the driver has proven
        (`ProvenTail`), as far as these ranges need it.
    """

    store_id: str
    ranges: list[tuple[str, int, int, int]]
    physical_offset: int = 0
    last: tuple[int, int, int] | None = None
    tail: tuple[int, int, dict[tuple[str, int], tuple[int, bytes]]] | None = None

    def __init__(
        self, store_id: str, ranges: list[Range], finish: StreamOffset | None = None, tail: ProvenTail | None = None
    ) -> None:
        super().__init__(None)
        if tail is not None:
            parts = {}
            for part in ranges:
                key = (part.topic, part.queue_id)
                if key in tail.units and part.end > tail.units[key][0]:
                    first = max(part.start, tail.units[key][0])
                    parts[key] = first, tail.read(key, first, part.end).tobytes()
            self.tail = tail.start, tail.end, parts
        self.store_id = store_id
        self.ranges = [(r.topic, r.queue_id, r.start, r.end) for r in ranges]
        if finish is not None:
            last = finish.last
            self.physical_offset = finish.physical_offset
            self.last = None if last is None else (last.position, last.size, last.crc)

    def proven_tail(self) -> ProvenTail | None:
        """As the view wants it."""
        if self.tail is None:
            return None
        start, end, parts = self.tail
        units = {key: (first, np.frombuffer(data, UNIT_DTYPE)) for key, (first, data) in parts.items()}
        return ProvenTail(start, end, units)


def read_ranges(options: SourceOptions, partition: InputPartition, projection: Projection) -> Iterator[pa.RecordBatch]:
    """In a task: the messages of a partition as Spark's record batches.

    Raises
    ------
    NotAStoreError
        The store at the path is not the one that was planned: this host sees another disk.
    OffsetOutOfRangeError
        Retention has taken messages since the ranges were planned; with failOnDataLoss=false they are counted.
    StoreWentBackwardsError
        The log was restored or made again since the ranges were planned.
    """
    if not isinstance(partition, RangesPartition) or not partition.ranges:
        return
    path = options.path
    try:
        view = StoreView(path, tail=partition.proven_tail())
    except NotAStoreError:
        raise _elsewhere(path, partition.store_id, "no store") from None
    try:
        if partition.store_id and view.store_id != partition.store_id:
            raise _elsewhere(path, partition.store_id, f"another store, {view.store_id or 'without an id'}")
        _check_planned(view, path, partition)
        for each in partition.ranges:
            yield from _read_range(view, each, projection, fail_on_data_loss=options.fail_on_data_loss)
        _check_planned(view, path, partition)  # behind the reading: the store may change at any moment
    finally:
        view.close()


def _check_planned(view: StoreView, path: str, partition: RangesPartition) -> None:
    """Whether log and queues are those that were planned (below the log's first segment nothing can be told)."""
    fault = ""
    if partition.last is not None:
        position, size, crc = partition.last
        if view.record_crc(position, size) not in (crc, None):
            fault = f"the record at physical offset {position} is not the one that was there"
    for topic, queue_id, _, end in partition.ranges if partition.physical_offset else ():
        units = view.units(topic, queue_id, end - 1, end)
        if len(units) and units["size"][0] != FILLER_UNIT_SIZE:
            place = int(units["physical_offset"][0]) + int(units["size"][0])
            if place > partition.physical_offset:
                fault = f"message {end - 1} of {topic}/{queue_id} is not the one that was there"
    if fault:
        raise StoreWentBackwardsError(
            f"{path}: {fault} when this micro-batch was planned: the log was cut or restored, or the topic made again, "
            f"meanwhile; restart the query"
        )


def _read_range(
    view: StoreView, part: tuple[str, int, int, int], projection: Projection, *, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    topic, queue_id, start, end = part
    while start < end:
        batches = view.read(topic, queue_id, start, end, projection.stored, max_rows=BATCH_ROWS, read_ahead=False)
        try:
            for batch in batches:
                start += batch.num_rows
                yield projection.converted(batch)
        except OffsetOutOfRangeError as error:
            first = min(error.min, end)
            if fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    f"{error}; this happened after the read was planned. {_GO_ON}",
                    topic=topic,
                    queue_id=queue_id,
                    queue_offset=error.queue_offset,
                    min=error.min,
                    max=error.max,
                ) from None
            _tell_gap((topic, queue_id), error.queue_offset, first)
            start = first


_GO_ON = "Start a new query, or set failOnDataLoss=false to go on at the first message that is there"


def _tell_gap(queue: tuple[str, int], start: int, end: int) -> None:
    _log.warning(
        "%s/%d: %d messages, %d to %d, are gone (retention); failOnDataLoss=false: going on behind them",
        *queue,
        end - start,
        start,
        end - 1,
    )


def _elsewhere(path: str, store_id: str, found: str) -> NotAStoreError:
    return NotAStoreError(
        f"{path}: host {socket.gethostname()} found {found} there, and the driver planned to read store "
        f"{store_id or 'without an id'}; executors and driver must see the same disk",
        path=path,
    )


class Follower:
    """The store as the driver sees it: how far the subscribed queues reach, and whether a start is still good.

    Attributes
    ----------
    checked : bool
        The start that was examined last is of this log, and nothing about it is unknown.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.view = StoreView(options.path, options.config())
        self.checked = False
        self._queues = QueueEnds(self.view, options.subscribe)
        self._ends: Queues = {}
        self._visible: Visible | None = None
        self._quiet: tuple[int, int] | None = None
        self._generation = 0
        self._looked_s = 0.0
        self._examined: StreamOffset | None = None
        self._moved: Queues = {}
        self._before: dict[
            tuple[str, int], dict[int, int]
        ] = {}  # the last ends, and where the message before each lies
        self._told: set[str] = set()

    # ---- ends

    def ends(self) -> Queues:
        """Queue -> number of the first message that cannot be seen yet. Microseconds when nothing changed.

        Raises
        ------
        NotAStoreError
            The store's folder is gone.
        StoreWentBackwardsError
            Another store is at the path.
        """
        try:
            return self._look()
        except (NotAStoreError, StoreWentBackwardsError):  # another folder is at the path: a restored copy?
            self._reopen()
            return self._look()

    def _look(self) -> Queues:
        if self._quiet is not None and self.view.quiet() == self._quiet:
            return self._ends
        visible = self.view.refresh()
        if self.view.generation != self._generation:  # what was found about a start was found in other files
            self._generation = self.view.generation
            self.checked, self._examined, self._visible = False, None, None
        if visible == self._visible and visible.end is not None:
            return self._ends
        self._quiet = self.view.quiet() if visible.end is None else None
        now_s = time.monotonic()
        find = visible.end is not None or self._quiet is not None or now_s - self._looked_s >= _LOOK_INTERVAL_S
        if find:
            self._looked_s = now_s
        self._ends = self._queues.look(find_queues=find)
        if self._queues.waiting:
            self._quiet = None
        self._visible = self.view.visible
        return self._ends

    def _reopen(self) -> None:
        """Another folder is at the path: open what is there, which must be this store, and check everything again."""
        view = StoreView(self.options.path, self.options.config())
        if self.view.store_id and view.store_id != self.view.store_id:
            view.close()
            raise StoreWentBackwardsError(
                f"{self.options.path}: found store {view.store_id or 'without an id'} where store {self.view.store_id} "
                f"was, which this query reads; put that one back, or start a new query with a new checkpoint"
            )
        self.view.close()
        self.view, self._queues = view, QueueEnds(view, self.options.subscribe)
        self._ends, self._visible, self._quiet, self._generation = {}, None, None, 0
        self.checked, self._examined = False, None

    def check_topics(self) -> None:
        """Refuse a topic the store has never heard of.

        Raises
        ------
        UnknownTopicError
            It lists the topics there are.
        """
        known = set(self.view.topics()) | set(self.view.files.topics.names)
        for topic in self.options.subscribe:
            if topic not in known:
                raise UnknownTopicError(topic, (name for name in known if not name.startswith(_SYSTEM_PREFIX)))

    def begin(self, topic: str, queue_id: int) -> int:
        """Number of the first message of a queue that is still there."""
        return self.view.min_offset(topic, queue_id)

    # ---- the first offset

    def starting(self, default: int) -> Queues:
        """Where a new query begins, by `startingOffsets`.

        Raises
        ------
        ConfigError
            Queues that are not listed, or that are not there.
        OffsetOutOfRangeError
            An offset that the queue does not hold, with failOnDataLoss=true.
        """
        self.check_topics()
        ends = self.ends()
        asked = self.options.starting_offsets
        if asked is None:
            asked = default
        if isinstance(asked, int):
            return {queue: self._resolved(queue, asked) for queue in ends}
        self._check_listed(asked, ends)
        found: Queues = {}
        for topic, queue_id in ends:
            offsets = asked[topic]
            offset = offsets.get(queue_id, offsets.get(EVERY_QUEUE, LATEST))
            found[topic, queue_id] = self._resolved((topic, queue_id), offset)
        return found

    def _check_listed(self, asked: dict[str, dict[int, int]], ends: Queues) -> None:
        for topic in {*asked, *self.options.subscribe}:
            offsets = asked.get(topic)
            if topic not in self.options.subscribe or offsets is None:
                fault = "is not subscribed" if offsets is not None else "is not listed"
                raise _starting(f"topic {topic} {fault}")
            there = {queue_id for t, queue_id in ends if t == topic}
            listed = set(offsets) - {EVERY_QUEUE}
            if listed - there:
                raise _starting(f"queue {min(listed - there)} of {topic} is not there; its queues are {sorted(there)}")
            if there - listed and EVERY_QUEUE not in offsets:
                raise _starting(f'queue {min(there - listed)} of {topic} is not listed; list it, or give "*"')

    def _resolved(self, queue: tuple[str, int], offset: int) -> int:
        if offset == LATEST:
            return self._ends[queue]
        begin = self.begin(*queue)
        if offset == EARLIEST:
            return begin
        if begin <= offset <= self._ends[queue]:
            return offset
        if self.options.fail_on_data_loss:
            raise self._gone(queue, offset, begin)
        return min(max(offset, begin), self._ends[queue])

    def _gone(self, queue: tuple[str, int], offset: int, begin: int) -> OffsetOutOfRangeError:
        topic, queue_id = queue
        end = self._ends.get(queue, 0)
        lost = f"{min(begin, end) - offset} messages are gone" if offset < begin else "it has not got that far"
        return OffsetOutOfRangeError(
            f"{topic}/{queue_id}: offset {offset} was asked for, {begin} to {end} are there: {lost}; start a new "
            f"query, or set "
            "failOnDataLoss=false to go on at the first offset that is there",
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            min=begin,
            max=end,
        )

    # ---- whether a start is good

    def check_start(self, start: StreamOffset) -> None:
        """Is this still the log that `start` was read from? Asked whenever there is something new.

        The last record that was read is read again. A queue must reach the start, and the message before the start must
        lie within what was read: of all queues the first time, then of those that have changed.

        Raises
        ------
        StoreWentBackwardsError
            The log was cut below it, a queue was made again, or it is another store.
        """
        ends = self.ends()
        if start.store_id not in ("", self.view.store_id):
            self._check_copy(start)
        if start != self._examined:
            self._examined, self._moved = start, {}
        faults = self._faults(start, ends)
        if not faults:
            return
        if self.options.fail_on_data_loss:
            raise StoreWentBackwardsError(
                f"{self.options.path}: {next(iter(faults.values()))}: the log was cut, restored or made again below "
                f"the checkpoint (physical offset {start.physical_offset}), or a topic was deleted; start a new query, "
                f"or set failOnDataLoss=false to go on at the first newer message"
            )
        self._go_on(start, ends, faults)

    def _check_copy(self, start: StreamOffset) -> None:
        """The checkpoint is of another store. This one may be a copy of it: then the last record is the same."""
        known = not self.view.store_id or start.store_id in self.view.known_ids
        last = start.last
        if known and (last is None or self.view.record_crc(last.position, last.size) == last.crc):
            return
        why = "which is no copy of it" if not known else "which does not have the last record that was read"
        raise StoreWentBackwardsError(
            f"{self.options.path}: the checkpoint is of store {start.store_id}, and this is store "
            f"{self.view.store_id or 'without an id'}, {why}; use a new checkpoint for another store"
        )

    def _faults(self, start: StreamOffset, ends: Queues) -> dict[tuple[str, int] | None, str]:
        """What is wrong, by queue; None: with the log."""
        every, unknown = not self.checked, False
        faults: dict[tuple[str, int] | None, str] = {}
        last = start.last
        if last is not None and self.view.record_crc(last.position, last.size) not in (last.crc, None):
            faults[None] = f"the record at physical offset {last.position} is not the one this query has read"
        for queue, offset in start.queues.items():
            end = ends.get(queue)
            if not offset or (end == offset and not every and queue not in self._queues.restarted):
                continue
            if queue in self._queues.restarted:
                faults[queue] = f"{queue[0]}/{queue[1]} was made again: it began below message {offset} again"
            elif end is None or end < offset:
                if not self.view.visible.recovered:
                    unknown = True  # what was read may be there, but a writer must recover the store first
                elif queue[0] in self.options.subscribe:
                    faults[queue] = (
                        f"{queue[0]}/{queue[1]} ends at {end}, and this query has read up to {offset}"
                        if end is not None
                        else f"{queue[0]}/{queue[1]} is gone, and this query has read up to {offset}"
                    )
            elif self._ends_behind(queue, offset, start.physical_offset):
                faults[queue] = (
                    f"{queue[0]}/{queue[1]} was made again: message {offset - 1} is another than this query has read"
                )
        self.checked = not unknown
        return faults

    def planned_faults(
        self, finish: StreamOffset, queues: list[tuple[str, int]], ends: Queues
    ) -> dict[tuple[str, int] | None, str]:
        """What is wrong with the end of a micro-batch that was planned before, by queue; None: with the log."""
        faults: dict[tuple[str, int] | None, str] = {}
        last = finish.last
        if last is not None and self.view.record_crc(last.position, last.size) not in (last.crc, None):
            faults[None] = (
                f"the record at physical offset {last.position} is not the one this micro-batch was planned up to"
            )
        for queue in queues:
            offset, end = finish.queues[queue], ends.get(queue, 0)
            name = f"{queue[0]}/{queue[1]}"
            if offset > end:
                faults[queue] = (
                    f"{name}: this micro-batch was planned up to offset {offset}, and the queue ends at {end}"
                )
            elif offset and self._ends_behind(queue, offset, finish.physical_offset):
                faults[queue] = f"{name}: message {offset - 1} is not the one this micro-batch was planned up to"
        return faults

    def _ends_behind(self, queue: tuple[str, int], offset: int, physical_offset: int) -> bool:
        """Whether the message before an offset ends behind a place in the log."""
        units = self.view.units(*queue, offset - 1, offset)
        if not len(units) or units["size"][0] == FILLER_UNIT_SIZE:
            return False  # retention has taken it
        return int(units["physical_offset"][0]) + int(units["size"][0]) > physical_offset

    def _go_on(self, start: StreamOffset, ends: Queues, faults: dict[tuple[str, int] | None, str]) -> None:
        """With failOnDataLoss=false: find the first newer message of each queue, and say so."""
        queues = list(start.queues) if None in faults else [queue for queue in faults if queue is not None]
        restarted = set(queues) & self._queues.restarted
        self._queues.restarted -= restarted
        for queue, fault in faults.items():
            if queue not in self._moved:
                self._tell(f"{fault}; failOnDataLoss=false: going on at the first newer message")
        for queue in queues:
            if queue in self._moved or queue not in ends:
                continue
            # In a log that is otherwise the same all messages of a queue that was made again are newer.
            made_again = queue in restarted and None not in faults
            self._moved[queue] = 0 if made_again else self.first_newer(queue, start)
            if self._moved[queue] != start.queues[queue]:
                self._tell(
                    f"{queue[0]}/{queue[1]}: going on at message {self._moved[queue]}, not {start.queues[queue]}; "
                    f"the {self._moved[queue]} before it were read, or are taken for read"
                )

    def _tell(self, text: str) -> None:
        """A warning, once."""
        if text not in self._told:
            self._told.add(text)
            _log.warning("%s: %s", self.options.path, text)

    def first_newer(self, queue: tuple[str, int], start: StreamOffset) -> int:
        """The first message of a queue that was stored behind, or later than, everything this query has read."""
        first = self.view.search_physical(*queue, start.physical_offset)
        if start.last is not None and start.last.store_timestamp_ms is not None:
            first = min(first, self.view.offset_behind_time(*queue, start.last.store_timestamp_ms))
        offset = start.queues[queue]
        place = self._before.get(queue, {}).get(offset, -1)
        if place >= 0 and first > offset:
            units = self.view.units(*queue, offset - 1, offset)
            if len(units) and int(units["physical_offset"][0]) != place:
                return first  # the queue's numbers are those of another time: the start says nothing about them
        return min(first, offset)  # a limit may have left older messages unread

    def first_of(self, queue: tuple[str, int], start: StreamOffset, end: int, *, tell: bool = False) -> int:
        """Where the range of a queue really begins, up to `end`: behind what retention has taken.

        A queue that is new to the stream begins at 0, unless its topic was not subscribed before.
        """
        offset = self._moved.get(queue, start.queues.get(queue, 0))
        begin = self.begin(*queue)
        if offset < begin and (queue in start.queues or queue[0] in start.topics):
            if self.options.fail_on_data_loss:
                raise self._gone(queue, offset, begin)
            if tell and min(begin, end) > offset:
                _tell_gap(queue, offset, min(begin, end))
        return max(offset, begin)

    @property
    def moved(self) -> set[tuple[str, int]]:
        """Queues that do not go on where the start says, which was examined last (failOnDataLoss=false)."""
        return set(self._moved)

    def changed(self, start: StreamOffset, ends: Queues) -> list[tuple[str, int]]:
        """The queues in which a step from `start` to `ends` may read something."""
        known, moved = start.queues, self._moved
        return [queue for queue, end in ends.items() if known.get(queue, 0) != end or queue in moved]

    # ---- the end of a step

    def next_offset(self, start: StreamOffset, firsts: Queues, reached: Queues) -> StreamOffset:
        """As `offset_at`, for a step that Spark is told of: queues that were made again before are in it."""
        for queue, end in reached.items():
            if queue in firsts and end:
                units = self.view.units(*queue, end - 1, end)
                places = self._before.setdefault(queue, {})
                places.pop(end, None)
                places[end] = int(units["physical_offset"][0]) if len(units) else -1
                if len(places) > _KEPT_PLACES:
                    del places[next(iter(places))]
        self._queues.restarted.clear()
        return self.offset_at(start, firsts, reached)

    def offset_at(self, start: StreamOffset, firsts: Queues, reached: Queues) -> StreamOffset:
        """The stream offset with these ends; physical offset and last record follow from their last units.

        Parameters
        ----------
        firsts : dict
            Where the queues that were looked at begin; a queue is read when it reaches further.
        reached : dict
            Of all queues.
        """
        again = bool(self._moved)  # a log that was cut or made again is known by what is in it now
        physical_offset, last = (0, None) if again else (start.physical_offset, start.last)
        place = (-1, 0)
        for queue, end in reached.items():
            if end > (0 if again else firsts.get(queue, end)):
                units = self.view.units(*queue, end - 1, end)
                if len(units) and units["size"][0] != FILLER_UNIT_SIZE:
                    place = max(place, (int(units["physical_offset"][0]), int(units["size"][0])))
        if place[0] >= 0 and sum(place) > physical_offset:
            physical_offset, last = sum(place), self._record(*place)
        return StreamOffset(self.view.store_id, self.options.subscribe, reached, physical_offset, last)

    def _record(self, position: int, size: int) -> LastRecord | None:
        """The record at a place, to know the log by; None below the first segment."""
        crc = self.view.record_crc(position, size)
        head = self.view.files.commit_log.head(position) if crc is not None else None
        if crc is None or head is None:
            return None
        return LastRecord(position, size, crc, int(head["store_timestamp_ms"]))

    def plan(self, firsts: Queues, ends: Queues, finish: StreamOffset) -> list[InputPartition]:
        """The pieces tasks read: as many as there are processors, unless they would be small, or large."""
        ranges = [Range(*queue, firsts[queue], end) for queue, end in sorted(ends.items()) if end > firsts[queue]]
        if not ranges:
            return []
        weights = self._weights(ranges)
        total = sum(r.count * weights[r.topic, r.queue_id] for r in ranges)
        rows = sum(r.count for r in ranges)
        heaviest = min(PARTITION_SIZE, PARTITION_ROWS * total / rows)
        most = min(heaviest, max(SMALL_WEIGHT, _SLACK * total / len(os.sched_getaffinity(0))))
        if self.options.min_partitions is not None:
            most = min(most, total / min(rows, self.options.min_partitions))
        parts = pieces(ranges, most, weights)
        return [RangesPartition(self.view.store_id, part, finish, self.view.tail) for part in parts]

    def _weights(self, ranges: list[Range]) -> dict[tuple[str, int], float]:
        """What one message of each range costs, by the sizes in some units; no record is read."""
        weights: dict[tuple[str, int], float] = {}
        longest = sorted(ranges, key=lambda r: -r.count)[:_SAMPLED_QUEUES]
        for each in longest:
            middle = max(each.start, (each.start + each.end - _SAMPLED_UNITS) // 2)
            sizes = [
                self.view.units(each.topic, each.queue_id, at, min(each.end, at + _SAMPLED_UNITS))["size"]
                for at in {each.start, middle, max(each.start, each.end - _SAMPLED_UNITS)}
            ]
            count = sum(map(len, sizes))
            mean = sum(int(some.sum(dtype="int64")) for some in sizes) / count if count else 0.0
            weights[each.topic, each.queue_id] = ROW_WEIGHT + max(0.0, mean)
        mean = sum(weights.values()) / len(weights)
        return {(r.topic, r.queue_id): weights.get((r.topic, r.queue_id), mean) for r in ranges}


def _starting(fault: str) -> ConfigError:
    return ConfigError(f"option startingOffsets: {fault}", key="startingOffsets")


class BatchReader(DataSourceReader):
    """What `spark.read` sees: all that is visible when the query is planned."""

    def __init__(self, options: SourceOptions, projection: Projection) -> None:
        self.options = options
        self.projection = projection

    def partitions(self) -> list[InputPartition]:
        """On the driver."""
        follower = Follower(self.options)
        try:
            firsts = follower.starting(EARLIEST)
            ends = follower.ends()  # a queue that came in between is left for the next read
            reached = {queue: ends[queue] for queue in firsts}
            return follower.plan(firsts, reached, follower.offset_at(StreamOffset(), firsts, reached))
        finally:
            follower.view.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return read_ranges(self.options, partition, self.projection)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What `readStream` sees. On the driver one lives as long as the query; copies of it read in tasks."""

    def __init__(self, options: SourceOptions, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self._follower: Follower | None = None
        self._target: Queues | None = None
        self._idle: tuple[dict[str, Any], Queues] | None = None
        group = options.consumer_group
        self._progress = GroupProgress(options.path, group) if group is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """What tasks need; open files stay here."""
        return {"options": self.options, "projection": self.projection}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # a copy begins like new

    @property
    def follower(self) -> Follower:
        """The store; opened when it is first asked for."""
        if self._follower is None:
            self._follower = Follower(self.options)
        return self._follower

    # ---- offsets

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 # Spark's name
        """Where a new query begins."""
        follower = self.follower
        firsts = follower.starting(LATEST)
        return follower.next_offset(StreamOffset(), dict.fromkeys(firsts, 0), firsts).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """`maxOffsetsPerTrigger`."""
        most = self.options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """The query ends at what is visible now."""
        self.follower.check_topics()
        self._target = dict(self.follower.ends())

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the store reaches, for Spark's progress."""
        return StreamOffset("", self.options.subscribe, self.follower.ends()).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next micro-batch reads; `start` itself when there is nothing new."""
        follower = self.follower
        current = follower.ends()
        ends = current if self._target is None else self._target
        if self._idle is not None and self._idle[1] is current and self._idle[0] == start:
            self._publish(start)
            return start
        begin = StreamOffset.from_json(start)
        self._check(begin)
        self._publish(start)
        if self._target is not None:  # a queue that was made again ends where it does now
            ends = {
                **ends,
                **{queue: min(ends[queue], current.get(queue, 0)) for queue in follower.moved & ends.keys()},
            }
        firsts = {queue: follower.first_of(queue, begin, ends[queue]) for queue in follower.changed(begin, ends)}
        reached = {**begin.queues, **{queue: max(ends[queue], first) for queue, first in firsts.items()}}
        if isinstance(limit, ReadMaxRows):
            reached = limited({**begin.queues, **firsts}, reached, limit.max_rows)
        if all(begin.queues.get(queue, 0) == reached[queue] <= first for queue, first in firsts.items()):
            self._idle = (start, current) if follower.checked else None
            return start
        return follower.next_offset(begin, firsts, reached).to_json()

    def _check(self, start: StreamOffset) -> None:
        if not self.follower.checked:
            self.follower.check_topics()
        self.follower.check_start(start)

    def _publish(self, start: dict[str, Any]) -> None:
        if self._progress is not None and self.follower.checked:  # offsets of another log are nobody's progress
            self._progress.publish(start)

    # ---- ranges

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The pieces of one micro-batch; the same rows each time it is asked."""
        follower = self.follower
        begin, finish = StreamOffset.from_json(start), StreamOffset.from_json(end)
        visible = follower.ends()
        self._check(begin)
        queues = [queue for queue in follower.changed(begin, finish.queues) if queue in finish.queues]
        faults = follower.planned_faults(finish, queues, visible)
        if faults and self.options.fail_on_data_loss:
            raise StoreWentBackwardsError(
                f"{self.options.path}: {next(iter(faults.values()))}: the log was cut, restored, or not recovered yet "
                f"(run `messagestore recover`); start a new query, or set failOnDataLoss=false to go on"
            )
        firsts: Queues = {}
        ends: Queues = {}
        for queue in queues:
            if queue not in visible:
                continue
            offset = min(finish.queues[queue], visible[queue])
            if None in faults or queue in faults:  # what is newer than the plan comes with the next micro-batch
                offset = min(offset, follower.first_newer(queue, finish))
                _log.warning(
                    "%s: %s; failOnDataLoss=false: this micro-batch ends at message %d of %s/%d, not %d",
                    self.options.path,
                    faults.get(queue) or faults[None],
                    offset,
                    *queue,
                    finish.queues[queue],
                )
            firsts[queue], ends[queue] = follower.first_of(queue, begin, offset, tell=True), offset
        if faults:
            follower.checked = False  # the next step begins at what was planned: each queue is compared with it
            finish = follower.offset_at(StreamOffset(), firsts, ends)
        return follower.plan(firsts, ends, finish)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return read_ranges(self.options, partition, self.projection)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing depends on it: Spark does not call it for the last batch."""

    def stop(self) -> None:
        """Let go of the files."""
        if self._follower is not None:
            self._follower.view.close()
            self._follower = None
