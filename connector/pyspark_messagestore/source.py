"""The source: plans which offsets and ranges Spark reads, and reads their rows.

    driver     StreamReader: latestOffset (ninety times a second, so microseconds when idle), partitions(start, end)
    tasks      read(partition): ranges of queues -> record batches with the columns that were asked for

Spark keeps the progress; nothing here depends on `commit` or `stop`. Messages can be read again as long as the log
holds them. If it does not, that is an error, or with failOnDataLoss=false a gap that a warning counts. Whenever there
is something new, the source checks that the log is still the one that was read.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from messagestore import ConfigError, NotAStoreError, OffsetOutOfRangeError, StoreWentBackwardsError, UnknownTopicError
from messagestore.spi import LOCAL_STORES, Ends, LastRecord, Place, Proven, Queue, Queues, Range, StoreReader, Stores
from pyspark_messagestore.offsets import StreamOffset, limited, pieces
from pyspark_messagestore.options import EARLIEST, EVERY_QUEUE, LATEST, SourceOptions
from pyspark_messagestore.progress import GroupProgress
from pyspark_messagestore.schema import Projection

PARTITION_ROWS = 262_144
"""The largest number of messages in a Spark partition."""
PARTITION_SIZE = 128 * 1024 * 1024
"""The largest number of bytes of records in a Spark partition."""
ROW_WEIGHT = 256
"""The cost of one more message for a task, expressed in bytes of records."""
SMALL_WEIGHT = 16 * 1024 * 1024
"""A range with a weight below this is not divided: another task would cost more than it saves."""
_SLACK = 1.05
"""A task may get this many times its share before a queue is divided or another task is begun."""
_KEPT_PLACES = 3
"""The number of steps for which the driver remembers where the messages before their ends are, since the last step may
be planned again."""
_SAMPLED_QUEUES = 64
"""The number of queues from which the sizes of some records are read."""
BATCH_ROWS = 65_536

_SYSTEM_PREFIX = "rmq_sys_"

_log = logging.getLogger(__name__)


@dataclass
class RangesPartition(InputPartition):
    """What one task reads: plain values only.

    Parameters
    ----------
    store_id : str
        The store in which these ranges were planned.
    ranges : list of (topic, queue id, start, end)
    physical_offset : int
        No record of the ranges ends after this offset. 0: the offset is not known.
    last : LastRecord | None
        The last record that was planned; by it, a task recognises the log.
    proven : Proven | None
        What the driver has proven about a store that no writer has recovered since the machine was started, as far as
        these ranges need it.
    """

    store_id: str
    ranges: list[tuple[str, int, int, int]]
    physical_offset: int = 0
    last: LastRecord | None = None
    proven: Proven | None = None

    def __init__(
        self, store_id: str, ranges: list[Range], finish: StreamOffset | None = None, proven: Proven | None = None
    ) -> None:
        super().__init__(None)
        self.store_id = store_id
        self.ranges = [(r.topic, r.queue_id, r.start, r.end) for r in ranges]
        self.proven = proven
        if finish is not None:
            self.physical_offset, self.last = finish.physical_offset, finish.last


def read_ranges(
    options: SourceOptions, partition: InputPartition, projection: Projection, stores: Stores = LOCAL_STORES
) -> Iterator[pa.RecordBatch]:
    """Read the messages of a partition as record batches for Spark. It runs in a task.

    Raises
    ------
    NotAStoreError
        The store at the path is not the one in which the ranges were planned: this host sees another disk.
    OffsetOutOfRangeError
        Retention has deleted messages since the ranges were planned. With failOnDataLoss=false, a warning counts them.
    StoreWentBackwardsError
        The log was restored or created again since the ranges were planned.
    """
    if not isinstance(partition, RangesPartition) or not partition.ranges:
        return
    path = options.path
    try:
        store = stores.reader(path, proven=partition.proven)
    except NotAStoreError:
        raise _elsewhere(path, partition.store_id, "no store") from None
    try:
        found = store.describe().store_id
        if partition.store_id and found != partition.store_id:
            raise _elsewhere(path, partition.store_id, f"another store, {found or 'without an id'}")
        _check_planned(store, path, partition)
        ranges = [Range(*each) for each in partition.ranges]
        yield from _read_ranges(store, ranges, projection, fail_on_data_loss=options.fail_on_data_loss)
        _check_planned(store, path, partition)  # after reading: the store may change at any moment
    finally:
        store.close()


def _check_planned(store: StoreReader, path: str, partition: RangesPartition) -> None:
    """Check that log and queues are those that were planned. Nothing is known below the log's first segment."""
    fault = ""
    last = partition.last
    if last is not None and not _is_there(store, last):
        fault = f"the record at physical offset {last.position} has changed"
    if partition.physical_offset:
        ends = {(topic, queue_id): end for topic, queue_id, _, end in partition.ranges}
        for (topic, queue_id), place in store.places(ends).items():
            if _ends_behind(place, partition.physical_offset):
                fault = f"message {ends[topic, queue_id] - 1} of {topic}/{queue_id} has changed"
    if fault:
        raise StoreWentBackwardsError(
            f"{path}: {fault} since this micro-batch was planned: the log was cut or restored, or the topic was "
            f"created again; restart the query"
        )


def _is_there(store: StoreReader, last: LastRecord) -> bool:
    """Whether a record that was read is still in the log, or retention has deleted its segment."""
    found = store.prove_last(last.position, last.size)
    return found is None or found.crc == last.crc


def _ends_behind(place: Place | None, physical_offset: int) -> bool:
    """Whether a message ends after a physical offset; False if retention has deleted the message."""
    return place is not None and place.size > 0 and place.end > physical_offset


def _read_ranges(
    store: StoreReader, ranges: Sequence[Range], projection: Projection, *, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    left = list(reversed(ranges))  # the next one is last
    while left:
        try:
            for part in store.gather(left[::-1], max_rows=BATCH_ROWS):  # called again after each gap
                _drop_before(left, (part.topic, part.queue_id), part.start)
                batch = part.decoded(projection.stored)
                left[-1] = replace(left[-1], start=part.end)
                del part  # so that the next part can use its memory
                yield projection.converted(batch)
            return
        except OffsetOutOfRangeError as error:
            _drop_before(left, (error.topic, error.queue_id), error.queue_offset)
            first = min(error.min, left[-1].end)
            if fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    f"{error}; this happened after the read was planned. {_GO_ON}",
                    topic=error.topic,
                    queue_id=error.queue_id,
                    queue_offset=error.queue_offset,
                    min=error.min,
                    max=error.max,
                ) from None
            _tell_gap((error.topic, error.queue_id), error.queue_offset, first)
            left[-1] = replace(left[-1], start=first)


def _drop_before(left: list[Range], queue: Queue, offset: int) -> None:
    """Drop the ranges before the one that holds a message; the next one is the last of the list."""
    while (left[-1].topic, left[-1].queue_id) != queue or left[-1].end <= offset:
        left.pop()


_GO_ON = "Start a new query, or set failOnDataLoss=false to continue at the first message that is left"


def _tell_gap(queue: Queue, start: int, end: int) -> None:
    _log.warning(
        "%s/%d: retention has deleted %d messages, %d to %d; with failOnDataLoss=false the query continues behind them",
        *queue,
        end - start,
        start,
        end - 1,
    )


def _elsewhere(path: str, store_id: str, found: str) -> NotAStoreError:
    return NotAStoreError(
        f"{path}: host {socket.gethostname()} found {found} there, but the driver planned to read store "
        f"{store_id or 'without an id'}; executors and driver must see the same disk",
        path=path,
    )


class Follower:
    """The store as the driver sees it: how far the subscribed queues reach, and whether a start is still valid.

    Attributes
    ----------
    checked : bool
        The start that was examined last belongs to this log, and nothing about it is unknown.
    """

    def __init__(self, options: SourceOptions, stores: Stores = LOCAL_STORES) -> None:
        self.options = options
        self.store = stores.reader(options.path, options.config())
        self.checked = False
        self.restarted: set[Queue] = set()
        """Queues that were deleted and created again since the last step."""
        self._ends = Ends("", {})
        self._examined: StreamOffset | None = None
        self._moved: Queues = {}
        self._before: dict[Queue, dict[int, int]] = {}  # the last ends, and where the message before each lies
        self._told: set[str] = set()

    # ---- ends

    def ends(self) -> Queues:
        """The queue offset of each queue's first message that is not visible yet. This takes microseconds if nothing
        changed.

        Raises
        ------
        NotAStoreError
            The store's folder is missing.
        StoreWentBackwardsError
            Another store is at the path.
        """
        found = self.store.ends(self.options.subscribe)
        if found is not self._ends:
            if found.generation != self._ends.generation:  # the start was examined in other files
                self.checked, self._examined = False, None
                self.restarted.clear()
            self.restarted |= found.restarted
            self._ends = found
        return found.queues

    def check_topics(self) -> None:
        """Refuse a topic that the store does not know.

        Raises
        ------
        UnknownTopicError
            A topic is unknown. The error lists the topics that the store has.
        """
        found = self.store.describe(queues=True)
        known = found.queue_ids.keys() | found.queue_counts.keys()
        for topic in self.options.subscribe:
            if topic not in known:
                raise UnknownTopicError(topic, (name for name in known if not name.startswith(_SYSTEM_PREFIX)))

    # ---- the first offset

    def starting(self, default: int) -> Queues:
        """Where a new query begins, according to `startingOffsets`.

        Raises
        ------
        ConfigError
            A queue is not listed, or does not exist.
        OffsetOutOfRangeError
            A queue does not hold its offset, and failOnDataLoss is true.
        """
        self.check_topics()
        ends = self.ends()
        asked = self.options.starting_offsets
        if asked is None:
            asked = default
        if isinstance(asked, int):
            return self._resolved(dict.fromkeys(ends, asked))
        self._check_listed(asked, ends)
        wanted: Queues = {}
        for topic, queue_id in ends:
            offsets = asked[topic]
            wanted[topic, queue_id] = offsets.get(queue_id, offsets.get(EVERY_QUEUE, LATEST))
        return self._resolved(wanted)

    def _check_listed(self, asked: dict[str, dict[int, int]], ends: Queues) -> None:
        for topic in {*asked, *self.options.subscribe}:
            offsets = asked.get(topic)
            if topic not in self.options.subscribe or offsets is None:
                fault = "is not subscribed" if offsets is not None else "is not listed"
                raise _starting(f"topic {topic} {fault}")
            there = {queue_id for t, queue_id in ends if t == topic}
            listed = set(offsets) - {EVERY_QUEUE}
            if listed - there:
                raise _starting(
                    f"queue {min(listed - there)} of {topic} does not exist; its queues are {sorted(there)}"
                )
            if there - listed and EVERY_QUEUE not in offsets:
                raise _starting(f'queue {min(there - listed)} of {topic} is not listed; list it, or give "*"')

    def _resolved(self, wanted: Queues) -> Queues:
        """The offsets for wanted offsets, EARLIEST and LATEST."""
        begins = self.store.begins(queue for queue, offset in wanted.items() if offset != LATEST)
        found: Queues = {}
        for queue, offset in wanted.items():
            end = self._ends.queues[queue]
            begin = begins.get(queue, end)
            if offset in (EARLIEST, LATEST):
                found[queue] = begin
            elif begin <= offset <= end:
                found[queue] = offset
            elif self.options.fail_on_data_loss:
                raise self._gone(queue, offset, begin)
            else:
                found[queue] = min(max(offset, begin), end)
        return found

    def _gone(self, queue: Queue, offset: int, begin: int) -> OffsetOutOfRangeError:
        topic, queue_id = queue
        end = self._ends.queues.get(queue, 0)
        lost = f"{min(begin, end) - offset} messages are gone" if offset < begin else "the queue has not grown that far"
        return OffsetOutOfRangeError(
            f"{topic}/{queue_id}: offset {offset} was requested, but the queue holds {begin} to {end}: {lost}; start a "
            f"new query, or set failOnDataLoss=false to continue at the first offset that is there",
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            min=begin,
            max=end,
        )

    # ---- whether a start is valid

    def check_start(self, start: StreamOffset) -> None:
        """Check that this is still the log that `start` was read from. It runs whenever there is something new.

        The last record that was read is read again. Each queue must reach the start, and the message before the start
        must lie within what was read. The first time, all queues are checked, then those that have changed.

        Raises
        ------
        StoreWentBackwardsError
            The log was cut below the start, a queue was created again, or this is another store.
        """
        ends = self.ends()
        if start.store_id not in ("", self._ends.store_id):
            self._check_copy(start)
        if start != self._examined:
            self._examined, self._moved = start, {}
        faults = self._faults(start, ends)
        if not faults:
            return
        if self.options.fail_on_data_loss:
            raise StoreWentBackwardsError(
                f"{self.options.path}: {next(iter(faults.values()))}: the log was cut, restored or created again below "
                f"the checkpoint (physical offset {start.physical_offset}), or a topic was deleted; start a new query, "
                f"or set failOnDataLoss=false to continue at the first newer message"
            )
        self._go_on(start, ends, faults)

    def _check_copy(self, start: StreamOffset) -> None:
        """Refuse the checkpoint of another store, unless this one is a copy of it that has the same last record."""
        here, last = self.store.describe(), start.last
        known = not here.store_id or start.store_id in here.ancestors
        found = None if last is None else self.store.prove_last(last.position, last.size)
        if known and (last is None or (found is not None and found.crc == last.crc)):
            return
        why = "which is no copy of it" if not known else "which does not hold the last record that was read"
        raise StoreWentBackwardsError(
            f"{self.options.path}: the checkpoint belongs to store {start.store_id}, but this is store "
            f"{here.store_id or 'without an id'}, {why}; use a new checkpoint for another store"
        )

    def _faults(self, start: StreamOffset, ends: Queues) -> dict[Queue | None, str]:
        """The faults by queue. The key None stands for the log."""
        every, unknown = not self.checked, False
        faults: dict[Queue | None, str] = {}
        last = start.last
        if last is not None and not _is_there(self.store, last):
            faults[None] = f"the record at physical offset {last.position} is not the one that this query has read"
        looked = {
            queue: offset
            for queue, offset in start.queues.items()
            if offset and (every or ends.get(queue) != offset or queue in self.restarted)
        }
        places = self.store.places({queue: offset for queue, offset in looked.items() if ends.get(queue, 0) >= offset})
        for queue, offset in looked.items():
            end = ends.get(queue)
            if queue in self.restarted:
                faults[queue] = f"{queue[0]}/{queue[1]} was created again: it began again below message {offset}"
            elif end is None or end < offset:
                if not self._ends.recovered:
                    unknown = True  # what was read may be in the log, but a writer must recover the store first
                elif queue[0] in self.options.subscribe:
                    faults[queue] = (
                        f"{queue[0]}/{queue[1]} ends at {end}, but this query has read up to {offset}"
                        if end is not None
                        else f"{queue[0]}/{queue[1]} is gone, but this query has read up to {offset}"
                    )
            elif _ends_behind(places.get(queue), start.physical_offset):
                faults[queue] = (
                    f"{queue[0]}/{queue[1]} was created again: message {offset - 1} is not the one that this query has "
                    f"read"
                )
        self.checked = not unknown
        return faults

    def planned_faults(self, finish: StreamOffset, queues: list[Queue], ends: Queues) -> dict[Queue | None, str]:
        """The faults of the end of a micro-batch that was planned before, by queue. The key None stands for the log."""
        faults: dict[Queue | None, str] = {}
        last = finish.last
        if last is not None and not _is_there(self.store, last):
            faults[None] = (
                f"the record at physical offset {last.position} is not the one that this micro-batch was planned up to"
            )
        reached = {queue: finish.queues[queue] for queue in queues}
        places = self.store.places({queue: end for queue, end in reached.items() if 0 < end <= ends.get(queue, 0)})
        for queue, offset in reached.items():
            end = ends.get(queue, 0)
            name = f"{queue[0]}/{queue[1]}"
            if offset > end:
                faults[queue] = (
                    f"{name}: this micro-batch was planned up to offset {offset}, but the queue ends at {end}"
                )
            elif _ends_behind(places.get(queue), finish.physical_offset):
                faults[queue] = f"{name}: message {offset - 1} is not the one that this micro-batch was planned up to"
        return faults

    def _go_on(self, start: StreamOffset, ends: Queues, faults: dict[Queue | None, str]) -> None:
        """With failOnDataLoss=false: find the first newer message of each queue, and log it."""
        queues = list(start.queues) if None in faults else [queue for queue in faults if queue is not None]
        restarted = set(queues) & self.restarted
        self.restarted -= restarted
        for queue, fault in faults.items():
            if queue not in self._moved:
                self._tell(f"{fault}; with failOnDataLoss=false the query continues at the first newer message")
        for queue in queues:
            if queue in self._moved or queue not in ends:
                continue
            # If the log is otherwise the same, all messages of a queue that was created again are newer.
            made_again = queue in restarted and None not in faults
            self._moved[queue] = 0 if made_again else self.first_newer(queue, start)
            if self._moved[queue] != start.queues[queue]:
                self._tell(
                    f"{queue[0]}/{queue[1]}: continuing at message {self._moved[queue]} instead of "
                    f"{start.queues[queue]}; the {self._moved[queue]} before it were read, or count as read"
                )

    def _tell(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._told:
            self._told.add(text)
            _log.warning("%s: %s", self.options.path, text)

    def first_newer(self, queue: Queue, start: StreamOffset) -> int:
        """The first message of a queue that was stored after everything this query has read, by place or by time."""
        time_ms = None if start.last is None else start.last.store_timestamp_ms
        first = self.store.seek(queue, physical_offset=start.physical_offset, after_ms=time_ms)
        offset = start.queues[queue]
        place = self._before.get(queue, {}).get(offset, -1)
        if place >= 0 and first > offset:
            found = self.store.places({queue: offset}).get(queue)
            if found is not None and found.physical_offset != place:
                return first  # the queue has new numbers, about which the start says nothing
        return min(first, offset)  # a limit may have left older messages unread

    def firsts_of(self, queues: Iterable[Queue], start: StreamOffset, ends: Queues, *, tell: bool = False) -> Queues:
        """Where the ranges of some queues begin, after the messages that retention has deleted."""
        begins = self.store.begins(queues)
        return {queue: self.first_of(queue, start, begin, ends[queue], tell=tell) for queue, begin in begins.items()}

    def first_of(self, queue: Queue, start: StreamOffset, begin: int, end: int, *, tell: bool = False) -> int:
        """Where the range of one queue begins; `begin` is the queue's first message that is still in the log.

        A queue that is new to the stream begins at 0, unless its topic was not subscribed before.
        """
        offset = self._moved.get(queue, start.queues.get(queue, 0))
        if offset < begin and (queue in start.queues or queue[0] in start.topics):
            if self.options.fail_on_data_loss:
                raise self._gone(queue, offset, begin)
            if tell and min(begin, end) > offset:
                _tell_gap(queue, offset, min(begin, end))
        return max(offset, begin)

    @property
    def moved(self) -> set[Queue]:
        """The queues that do not continue where the start that was examined last says (failOnDataLoss=false)."""
        return set(self._moved)

    def changed(self, start: StreamOffset, ends: Queues) -> list[Queue]:
        """The queues in which a step from `start` to `ends` may read something."""
        known, moved = start.queues, self._moved
        return [queue for queue, end in ends.items() if known.get(queue, 0) != end or queue in moved]

    # ---- the end of a step

    def next_offset(self, start: StreamOffset, firsts: Queues, reached: Queues) -> StreamOffset:
        """The result of `offset_at` for a step that is reported to Spark. It covers the queues that were created again
        before.
        """
        ends = {queue: end for queue, end in reached.items() if queue in firsts and end}
        found = self.store.places(ends)
        for queue, end in ends.items():
            places = self._before.setdefault(queue, {})
            places.pop(end, None)
            places[end] = found[queue].physical_offset if queue in found else -1
            if len(places) > _KEPT_PLACES:
                del places[next(iter(places))]
        self.restarted.clear()
        return self.offset_at(start, firsts, reached)

    def offset_at(self, start: StreamOffset, firsts: Queues, reached: Queues) -> StreamOffset:
        """The stream offset with these ends; physical offset and last record follow from their last units.

        Parameters
        ----------
        firsts : dict
            Where the examined queues begin. A queue is read if it reaches further.
        reached : dict
            The ends of all queues.
        """
        again = bool(self._moved)  # a log that was cut or created again is recognised by what it contains now
        physical_offset, last = (0, None) if again else (start.physical_offset, start.last)
        ends = {queue: end for queue, end in reached.items() if end > (0 if again else firsts.get(queue, end))}
        places = [place for place in self.store.places(ends).values() if place.size]
        newest = max(places, key=lambda place: place.physical_offset, default=None)
        if newest is not None and newest.end > physical_offset:
            physical_offset = newest.end
            last = self.store.prove_last(newest.physical_offset, newest.size, with_time=True)
            if last is not None and last.store_timestamp_ms is None:
                last = None  # no record begins there
        return StreamOffset(self._ends.store_id, self.options.subscribe, reached, physical_offset, last)

    def plan(self, firsts: Queues, ends: Queues, finish: StreamOffset) -> list[InputPartition]:
        """The pieces that tasks read: as many as there are processors, unless these would be too small or too large."""
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
        return [RangesPartition(self._ends.store_id, part, finish, self.store.proven(part)) for part in parts]

    def _weights(self, ranges: list[Range]) -> dict[Queue, float]:
        """The cost of one message of each range, estimated from the sizes in some units; no record is read."""
        longest = sorted(ranges, key=lambda r: -r.count)[:_SAMPLED_QUEUES]
        sizes = zip(longest, self.store.mean_sizes(longest), strict=True)
        weights = {(each.topic, each.queue_id): ROW_WEIGHT + max(0.0, size) for each, size in sizes}
        mean = sum(weights.values()) / len(weights)
        return {(r.topic, r.queue_id): weights.get((r.topic, r.queue_id), mean) for r in ranges}


def _starting(fault: str) -> ConfigError:
    return ConfigError(f"option startingOffsets: {fault}", key="startingOffsets")


class BatchReader(DataSourceReader):
    """The reader of `spark.read`: it reads everything that is visible when the query is planned."""

    def __init__(self, options: SourceOptions, projection: Projection, stores: Stores = LOCAL_STORES) -> None:
        self.options = options
        self.projection = projection
        self.stores = stores

    def partitions(self) -> list[InputPartition]:
        """Plan the ranges, on the driver."""
        follower = Follower(self.options, self.stores)
        try:
            firsts = follower.starting(EARLIEST)
            ends = follower.ends()  # a queue that was created in between is left for the next read
            reached = {queue: ends[queue] for queue in firsts}
            return follower.plan(firsts, reached, follower.offset_at(StreamOffset(), firsts, reached))
        finally:
            follower.store.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, in a task."""
        return read_ranges(self.options, partition, self.projection, self.stores)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of `readStream`. The driver keeps one as long as the query runs; copies of it read in tasks."""

    def __init__(self, options: SourceOptions, projection: Projection, stores: Stores = LOCAL_STORES) -> None:
        self.options = options
        self.projection = projection
        self.stores = stores
        self._follower: Follower | None = None
        self._target: Queues | None = None
        self._idle: tuple[dict[str, Any], Queues] | None = None
        group = options.consumer_group
        self._progress = GroupProgress(group) if group is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """What tasks need; open files stay on the driver."""
        return {"options": self.options, "projection": self.projection, "stores": self.stores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # a copy begins like a new object

    @property
    def follower(self) -> Follower:
        """The store, which is opened at the first use."""
        if self._follower is None:
            self._follower = Follower(self.options, self.stores)
        return self._follower

    # ---- offsets

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 # Spark's name
        """Where a new query begins."""
        follower = self.follower
        firsts = follower.starting(LATEST)
        return follower.next_offset(StreamOffset(), dict.fromkeys(firsts, 0), firsts).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit that `maxOffsetsPerTrigger` sets."""
        most = self.options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end at what is visible now."""
        self.follower.check_topics()
        self._target = dict(self.follower.ends())

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the store reaches, for Spark's progress."""
        return StreamOffset("", self.options.subscribe, self.follower.ends()).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next micro-batch reads; `start` itself if there is nothing new."""
        follower = self.follower
        current = follower.ends()
        ends = current if self._target is None else self._target
        if self._idle is not None and self._idle[1] is current and self._idle[0] == start:
            self._publish(start)
            return start
        begin = StreamOffset.from_json(start)
        self._check(begin)
        self._publish(start)
        if self._target is not None:  # a queue that was created again ends at its current end
            ends = {
                **ends,
                **{queue: min(ends[queue], current.get(queue, 0)) for queue in follower.moved & ends.keys()},
            }
        firsts = follower.firsts_of(follower.changed(begin, ends), begin, ends)
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
        if self._progress is not None and self.follower.checked:  # offsets in another log are not progress
            self._progress.publish(self.follower.store, start)

    # ---- ranges

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The pieces of one micro-batch; each call returns the same rows."""
        follower = self.follower
        begin, finish = StreamOffset.from_json(start), StreamOffset.from_json(end)
        visible = follower.ends()
        self._check(begin)
        queues = [queue for queue in follower.changed(begin, finish.queues) if queue in finish.queues]
        faults = follower.planned_faults(finish, queues, visible)
        if faults and self.options.fail_on_data_loss:
            raise StoreWentBackwardsError(
                f"{self.options.path}: {next(iter(faults.values()))}: the log was cut, restored, or not recovered yet "
                f"(run `messagestore recover`); start a new query, or set failOnDataLoss=false to continue"
            )
        ends: Queues = {}
        for queue in queues:
            if queue not in visible:
                continue
            offset = min(finish.queues[queue], visible[queue])
            if (
                None in faults or queue in faults
            ):  # messages that are newer than the plan come with the next micro-batch
                offset = min(offset, follower.first_newer(queue, finish))
                _log.warning(
                    "%s: %s; with failOnDataLoss=false this micro-batch ends at message %d of %s/%d instead of %d",
                    self.options.path,
                    faults.get(queue) or faults[None],
                    offset,
                    *queue,
                    finish.queues[queue],
                )
            ends[queue] = offset
        firsts = follower.firsts_of(ends, begin, ends, tell=True)
        if faults:
            follower.checked = False  # the next step begins at the planned end: each queue is compared with it
            finish = follower.offset_at(StreamOffset(), firsts, ends)
        return follower.plan(firsts, ends, finish)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, in a task."""
        return read_ranges(self.options, partition, self.projection, self.stores)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark does not call it for the last batch, so nothing may depend on it."""

    def stop(self) -> None:
        """Close the files."""
        if self._follower is not None:
            self._follower.store.close()
            self._follower = None
