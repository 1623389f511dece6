"""How does Spark read a store: which offsets, which ranges, which rows?

    driver     StreamReader: latestOffset (ninety times a second, so microseconds when idle), partitions(start, end)
    tasks      read(partition): ranges of queues -> record batches with the columns that were asked for

Progress is Spark's: nothing here depends on `commit` or `stop`. What was read can be read again as long as the log
holds
it; where it does not, that is an error, or with failOnDataLoss=false a gap that is counted in a warning.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from messagestore import ConfigError, NotAStoreError, OffsetOutOfRangeError, StoreWentBackwardsError, UnknownTopicError
from messagestore.spi import FILLER_UNIT_SIZE, StoreView, Visible
from pyspark_messagestore.offsets import LastRecord, Queues, Range, StreamOffset, limited, pieces
from pyspark_messagestore.options import EARLIEST, EVERY_QUEUE, LATEST, SourceOptions
from pyspark_messagestore.progress import GroupProgress
from pyspark_messagestore.schema import Projection

PARTITION_ROWS = 262_144
"""Messages of a Spark partition, where `minPartitions` does not ask for smaller ones."""
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
    """

    store_id: str
    ranges: list[tuple[str, int, int, int]]

    def __init__(self, store_id: str, ranges: list[Range]) -> None:
        super().__init__(None)
        self.store_id = store_id
        self.ranges = [(r.topic, r.queue_id, r.start, r.end) for r in ranges]


def read_ranges(path: str, partition: InputPartition, projection: Projection) -> Iterator[pa.RecordBatch]:
    """In a task: the messages of a partition as Spark's record batches.

    Raises
    ------
    NotAStoreError
        The store at the path is not the one that was planned: this host sees another disk.
    """
    if not isinstance(partition, RangesPartition) or not partition.ranges:
        return
    try:
        view = StoreView(path)
    except NotAStoreError:
        raise _elsewhere(path, partition.store_id, "no store") from None
    try:
        if partition.store_id and view.store_id != partition.store_id:
            raise _elsewhere(path, partition.store_id, f"another store, {view.store_id or 'without an id'}")
        for topic, queue_id, start, end in partition.ranges:
            for batch in view.read(
                topic, queue_id, start, end, projection.stored, max_rows=BATCH_ROWS, read_ahead=False
            ):
                yield projection.converted(batch)
    finally:
        view.close()


def _elsewhere(path: str, store_id: str, found: str) -> NotAStoreError:
    return NotAStoreError(
        f"{path}: host {socket.gethostname()} found {found} there, and the driver planned to read store "
        f"{store_id or 'without an id'}; executors and driver must see the same disk",
        path=path,
    )


class Follower:
    """The store as the driver sees it: how far the subscribed queues reach, and whether a start is still good."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.view = StoreView(options.path)
        self.refused: StreamOffset | None = None
        self._ends: Queues = {}
        self._visible: Visible | None = None
        self._quiet: tuple[int, int] | None = None
        self._looked_s = 0.0
        self._queue_ids: dict[str, list[int]] = {}

    # ---- ends

    def ends(self) -> Queues:
        """Queue -> number of the first message that cannot be seen yet. Microseconds when nothing changed."""
        if self._quiet is not None and self.view.quiet() == self._quiet:
            return self._ends
        visible = self.view.refresh()
        if visible == self._visible and visible.end is not None:
            return self._ends
        self._quiet = self.view.quiet() if visible.end is None else None
        now_s = time.monotonic()
        if visible.end is not None or self._quiet is not None or now_s - self._looked_s >= _LOOK_INTERVAL_S:
            self._looked_s = now_s
            self._queue_ids = {topic: self.view.queue_ids(topic) for topic in self.options.subscribe}
        ends = self.view.max_offsets((topic, queue_id) for topic, ids in self._queue_ids.items() for queue_id in ids)
        if ends != self._ends:  # the same object while nothing changed: see StreamReader.latestOffset
            self._ends = ends
        self._visible = self.view.visible
        return self._ends

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

    def check_start(self, start: StreamOffset) -> bool:
        """On the first plan after a start: is this the log that `start` was read from? False: cannot be told yet.

        Raises
        ------
        StoreWentBackwardsError
            The log was cut below it, a queue was made again, or it is another store.
        """
        if start.store_id and start.store_id != self.view.store_id:
            raise StoreWentBackwardsError(
                f"{self.options.path}: found store {self.view.store_id or 'without an id'}, and the checkpoint is of "
                f"store "
                f"{start.store_id}; use a new checkpoint for another store"
            )
        last, log = start.last, self.view.files.commit_log
        fault = ""
        if (
            last is not None
            and last.position >= log.min_offset
            and log.crc(last.position, last.position + last.size) != last.crc
        ):
            fault = f"the record at physical offset {last.position} is not the one this query has read"
        unknown = False
        for (topic, queue_id), offset in start.queues.items():
            units = self.view.units(topic, queue_id, offset - 1, offset) if offset else None
            if units is None:
                continue
            if not len(units) or units["size"][0] <= 0:
                unknown = True
                continue
            end = int(units["physical_offset"][0]) + int(units["size"][0])
            if units["size"][0] != FILLER_UNIT_SIZE and end > start.physical_offset:
                fault = (
                    fault
                    or f"{topic}/{queue_id} was made again: message {offset - 1} is another than this query has read"
                )
        if not fault:
            return not unknown
        if self.options.fail_on_data_loss:
            raise StoreWentBackwardsError(
                f"{self.options.path}: {fault}: the log was cut, restored or made again below the checkpoint "
                f"(physical offset "
                f"{start.physical_offset}); start a new query, or set failOnDataLoss=false to go on at the first "
                f"newer message"
            )
        _log.warning("%s: %s; failOnDataLoss=false: going on at the first newer message", self.options.path, fault)
        self.refused = start
        return True

    def first_of(self, queue: tuple[str, int], start: StreamOffset) -> int:
        """Where the range of a queue really begins: a start that was refused is replaced, retention is stepped over."""
        offset = start.queues.get(queue, 0)
        if self.refused is not None and offset == self.refused.queues.get(queue):
            offset = min(offset, self.view.files.queue(*queue).search_physical(self.refused.physical_offset))
        begin = self.begin(*queue)
        if offset < begin and queue in start.queues:
            if self.options.fail_on_data_loss:
                raise self._gone(queue, offset, begin)
            _log.warning("%s/%d: messages %d to %d are gone; failOnDataLoss=false", *queue, offset, begin)
        return max(offset, begin)

    # ---- the end of a step

    def offset_at(self, start: StreamOffset, ends: Queues) -> StreamOffset:
        """The stream offset with these ends; physical offset and last record follow from their last units."""
        physical_offset, last = start.physical_offset, start.last
        place = (-1, 0)
        for (topic, queue_id), end in ends.items():
            if end > start.queues.get((topic, queue_id), 0):
                unit = self.view.units(topic, queue_id, end - 1, end)[0]
                if unit["size"] != FILLER_UNIT_SIZE:
                    place = max(place, (int(unit["physical_offset"]), int(unit["size"])))
        if place[0] >= 0 and place[0] + place[1] > physical_offset:
            physical_offset = place[0] + place[1]
            log = self.view.files.commit_log
            there = place[0] >= log.min_offset
            last = LastRecord(*place, log.crc(place[0], physical_offset)) if there else None
        return StreamOffset(self.view.store_id, self.options.subscribe, ends, physical_offset, last)

    def plan(self, firsts: Queues, ends: Queues) -> list[InputPartition]:
        """The pieces tasks read."""
        ranges = [Range(*queue, firsts[queue], end) for queue, end in sorted(ends.items()) if end > firsts[queue]]
        total = sum(r.count for r in ranges)
        rows = min(PARTITION_ROWS, max(1, total // (self.options.min_partitions or 1)))
        return [RangesPartition(self.view.store_id, part) for part in pieces(ranges, rows)]


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
            return follower.plan(firsts, {queue: ends[queue] for queue in firsts})
        finally:
            follower.view.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return read_ranges(self.options.path, partition, self.projection)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What `readStream` sees. On the driver one lives as long as the query; copies of it read in tasks."""

    def __init__(self, options: SourceOptions, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self._follower: Follower | None = None
        self._checked = False
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
        return follower.offset_at(StreamOffset(), follower.starting(LATEST)).to_json()

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
        ends = self.follower.ends() if self._target is None else self._target
        if self._idle is not None and self._idle[1] is ends and self._idle[0] == start:
            self._publish(start)
            return start
        begin = StreamOffset.from_json(start)
        self._check(begin)
        self._publish(start)
        if self._target is not None:
            self.follower.ends()  # what was visible once may be gone
        firsts = {queue: self.follower.first_of(queue, begin) for queue in ends}
        reached = {queue: max(end, firsts[queue]) for queue, end in ends.items()}
        if isinstance(limit, ReadMaxRows):
            reached = limited(firsts, reached, limit.max_rows)
        kept = {queue: offset for queue, offset in begin.queues.items() if queue not in reached}
        reached |= kept
        if all(begin.queues.get(queue, 0) == offset for queue, offset in reached.items()):
            self._idle = (start, ends) if self._checked else None
            return start
        return self.follower.offset_at(begin, reached).to_json()

    def _check(self, start: StreamOffset) -> None:
        if not self._checked:
            self.follower.check_topics()
            self._checked = self.follower.check_start(start)

    def _publish(self, start: dict[str, Any]) -> None:
        if self._progress is not None and self._checked:  # offsets of another log are nobody's progress
            self._progress.publish(start)

    # ---- ranges

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The pieces of one micro-batch; the same rows each time it is asked."""
        follower = self.follower
        begin, finish = StreamOffset.from_json(start), StreamOffset.from_json(end)
        visible = follower.ends()
        self._check(begin)
        firsts: Queues = {}
        ends: Queues = {}
        for queue, offset in finish.queues.items():
            reached = visible.get(queue, 0)
            if offset > reached and offset > begin.queues.get(queue, 0):
                if self.options.fail_on_data_loss:
                    raise StoreWentBackwardsError(
                        f"{self.options.path}: {queue[0]}/{queue[1]}: this micro-batch was planned up to offset "
                        f"{offset}, and the "
                        f"queue reaches {reached}: the log was cut, restored, or not recovered yet (run "
                        f"`messagestore recover`); "
                        "start a new query, or set failOnDataLoss=false to go on"
                    )
                _log.warning("%s/%d: messages %d to %d are gone; failOnDataLoss=false", *queue, reached, offset)
                offset = reached  # noqa: PLW2901
            if offset > begin.queues.get(queue, 0) or (follower.refused is not None and queue in visible):
                firsts[queue], ends[queue] = follower.first_of(queue, begin), offset
        return follower.plan(firsts, ends)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return read_ranges(self.options.path, partition, self.projection)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing depends on it: Spark does not call it for the last batch."""

    def stop(self) -> None:
        """Let go of the files."""
        if self._follower is not None:
            self._follower.view.close()
            self._follower = None
