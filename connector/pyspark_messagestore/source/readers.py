"""The source: what Spark asks about a read, answered by the modules beside this one.

    driver     StreamReader: latestOffset (ninety times a second, so microseconds when idle), partitions(start, end)
    tasks      read(partition): ranges of queues -> record batches with the columns that were asked for

Spark keeps the progress; nothing here depends on `commit` or `stop`. Messages can be read again as long as the log
holds them. If it does not, that is an error, or with failOnDataLoss=false a gap that a warning counts. Whenever there
is something new, the source checks that the log is still the one that was read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from messagestore import (
    ConfigError,
    NotAStoreError,
    OffsetOutOfRangeError,
    StoreError,
    StoreWentBackwardsError,
    UnknownTopicError,
)
from messagestore.spi import Queue, Queues, Range, Stores
from pyspark_messagestore.options.positions import EARLIEST, LATEST
from pyspark_messagestore.options.source_options import SourceOptions
from pyspark_messagestore.options.values import MOST
from pyspark_messagestore.plain_errors import plain_errors
from pyspark_messagestore.source.extent import Extent
from pyspark_messagestore.source.follower import Follower
from pyspark_messagestore.source.limits import MinOffsets, SizesAhead, limited, limited_by_size, shares
from pyspark_messagestore.source.offsets import StreamOffset, Until
from pyspark_messagestore.source.planning import only, plan, ranges_of
from pyspark_messagestore.source.progress import GroupProgress
from pyspark_messagestore.source.pushdown import Narrowed, narrowed
from pyspark_messagestore.source.read_end import Bound
from pyspark_messagestore.source.reading import read_ranges
from pyspark_messagestore.source.schema import Projection

_LOOK_INTERVAL_S = 1.0
"""How often a query that waits for its store looks for it."""

_log = logging.getLogger(__name__)


def unknown_start(options: SourceOptions) -> StreamOffset:
    """Where a new query begins in a store of which nothing is known, or that is not there yet."""
    asked = options.starting
    return StreamOffset(
        topics=options.subscription.named,
        pattern=options.subscribe_pattern,
        started="" if asked is None else asked.text,
        initial=True,
    )


@plain_errors("partitions")
class BatchReader(DataSourceReader):
    """The reader of `spark.read`: it reads what is visible when the query is planned, or less if the options say so."""

    def __init__(self, options: SourceOptions, projection: Projection, stores: Stores) -> None:
        self.options = options
        self.projection = projection
        self.stores = stores
        self.narrowed = Narrowed()

    def partitions(self) -> list[InputPartition]:
        """Plan the ranges, on the driver."""
        follower = Follower(self.options, self.stores)
        try:
            extent = Extent(follower)
            firsts = extent.starting(EARLIEST)
            reached = extent.ending(firsts)
            finish = follower.offset_at(StreamOffset(), firsts, reached)
            ranges = self._chosen(follower, ranges_of(firsts, reached))
            names_broker = self.projection.names_broker
            return plan(follower.store, follower.store_id, self.options, ranges, finish, names_broker=names_broker)
        finally:
            follower.store.close()

    def _chosen(self, follower: Follower, ranges: list[Range]) -> list[Range]:
        """What the options and Spark's filters leave of the ranges."""
        ranges = self._narrowed(follower, ranges)
        keys = self.options.keys
        if keys is None or not ranges:
            return ranges
        return only(ranges, follower.store.find(sorted({range_.topic for range_ in ranges}), keys))

    def _narrowed(self, follower: Follower, ranges: list[Range]) -> list[Range]:
        """What Spark's filters leave of some ranges."""
        wanted, extent = self.narrowed, Extent(follower)
        ranges = [range_ for range_ in ranges if wanted.covers(range_.topic, range_.queue_id)]
        queues = [(range_.topic, range_.queue_id) for range_ in ranges]
        firsts = extent.at_times(dict.fromkeys(queues, wanted.first_ms)) if wanted.first_ms >= 0 else {}
        ends = extent.at_times(dict.fromkeys(queues, wanted.end_ms)) if wanted.end_ms < MOST else {}

        left = []
        for queue, range_ in zip(queues, ranges, strict=True):
            start = max(range_.start, wanted.first, firsts.get(queue, 0))
            end = min(range_.end, wanted.end, ends.get(queue, range_.end))
            if start < end:
                left.append(replace(range_, start=start, end=end))
        return left

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, in a task."""
        return read_ranges(self.options, partition, self.projection, self.stores)


class FilteringReader(BatchReader):
    """A batch reader to which Spark passes filters. Spark refuses such readers unless its own setting allows them."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 # Spark's name
        """Narrow the read; Spark evaluates all filters again."""
        as_stored = {column.name: column.stored for column in self.projection.columns if column.made is None}
        self.narrowed = narrowed(filters, as_stored)
        tags = self.narrowed.tags
        if tags is not None:
            option_tags = self.options.tags
            self.options = replace(
                self.options, tags=tuple(sorted(tags if option_tags is None else tags & {*option_tags}))
            )
        return filters


@plain_errors("initialOffset", "latestOffset", "partitions")
class RefusedStream(DataSourceStreamReader):
    """The reader of a stream that is refused. Each call raises the reason.

    PySpark 4.3 calls `stop` on a reader that it never got if `streamReader` raises, so users would see an
    UnboundLocalError at the end of the traceback, and the reason in its middle.
    """

    def __init__(self, reason: StoreError) -> None:
        self.reason = reason

    def _refuse(self, *_given: object) -> Any:
        raise self.reason

    initialOffset = latestOffset = partitions = read = cast("Any", _refuse)  # noqa: N815 # Spark's names


@plain_errors(
    "initialOffset", "prepareForTriggerAvailableNow", "reportLatestOffset", "latestOffset", "partitions", "commit"
)
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of `readStream`. The driver keeps one as long as the query runs; copies of it read in tasks."""

    def __init__(self, options: SourceOptions, projection: Projection, stores: Stores) -> None:
        self.options = options
        self.projection = projection
        self.stores = stores

        self._follower: Follower | None = None
        self._not_before_s = 0.0
        self.target: Queues | None = None
        """Where the query ends, if its trigger is availableNow."""
        self._idle: tuple[dict[str, Any], Queues, float] | None = None
        """The start and the ends at which there is nothing to do, and until when."""

        self._planned: dict[str, Any] | None = None
        """The end of the step that was found last."""
        self._bound: Bound | None = None
        self._min_offsets = MinOffsets(options.min_offsets_per_trigger, options.max_trigger_delay)
        self._warned: set[str] = set()

        group = options.consumer_group
        self._progress = GroupProgress(group) if group is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """What tasks need; open files stay on the driver."""
        return {"options": self.options, "projection": self.projection, "stores": self.stores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # a copy begins like a new object

    # ---- the store

    @property
    def follower(self) -> Follower:
        """The store, which is opened at the first use.

        Raises
        ------
        NotAStoreError
            There is no store.
        """
        if self._follower is None:
            self._follower = Follower(self.options, self.stores)
        return self._follower

    def _opened(self) -> Follower | None:
        """The store; None if there is none yet and the query shall wait for it."""
        if self._follower is not None or self.options.on_missing_topic != "wait":
            return self.follower
        if time.monotonic() < self._not_before_s:
            return None

        try:
            return self.follower
        except NotAStoreError as error:
            if self._exists():
                raise
            self._not_before_s = time.monotonic() + _LOOK_INTERVAL_S
            self._warn_once(f"{error}. With onMissingTopic=wait the query waits for it")
            return None

    def _exists(self) -> bool:
        return self.stores.writer(self.options.location, self.options.config(), staging_ttl_s=0.0).describe().exists

    def _warn_once(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    # ---- offsets

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 # Spark's name
        """Where a new query begins.

        Spark asks several times before the first micro-batch is done, also after a restart, and the answers may differ.
        Only the first one of a run counts: `latestOffset` puts it into the end of this micro-batch. So an error counts
        only if the answer is needed, and `latestOffset` raises it then.
        """
        try:
            return self._begin().to_json()
        except (ConfigError, OffsetOutOfRangeError, UnknownTopicError):
            return replace(unknown_start(self.options), undecided=True).to_json()

    def _begin(self) -> StreamOffset:
        """Where a new query begins, as the options and the store say now."""
        follower = self._opened()
        if follower is None:
            return unknown_start(self.options)
        extent = Extent(follower)
        firsts = extent.starting(LATEST)
        ends = follower.ends()
        firsts = {queue: first for queue, first in firsts.items() if queue in ends}  # others were deleted in between
        begin = replace(unknown_start(self.options), until=extent.until({queue: ends[queue] for queue in firsts}))
        return replace(follower.next_offset(begin, dict.fromkeys(firsts, 0), firsts), initial=True)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Say whether there are limits. Spark has none that combines several, so `latestOffset` applies them."""
        options = self.options
        limits = (
            options.max_offsets_per_trigger,
            options.max_bytes_per_trigger,
            options.min_offsets_per_trigger,
        )
        if limits == (None, None, None):
            return ReadAllAvailable()
        return ReadMaxRows(options.max_offsets_per_trigger or MOST)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end at what is visible now."""
        follower = self._opened()
        if follower is None:
            self.target = {}
            return
        self.target = dict(follower.ends())

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the store reaches, for Spark's progress."""
        follower = self._opened()
        ends = {} if follower is None else follower.ends()
        store_id = "" if follower is None else follower.store_id
        return StreamOffset(store_id, self.options.subscription.named, ends).to_json()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next micro-batch reads; `start` itself if there is nothing new."""
        # `initialOffset` could not say where to begin. The answer is needed now, so the error counts.
        if start.get("undecided"):
            start = self._begin().to_json()

        if self._opened() is None:
            # Only a query that has not begun waits for its store; for any other, `follower` raises that it is gone.
            begin = StreamOffset.from_json(start)
            if not begin.store_id and not begin.queues:
                return start

        follower = self.follower
        current = follower.ends()

        # Spark asks an idle query about 90 times a second, so nothing that is slower comes before this.
        if self._is_idle(start, current):
            self._publish(start)
            return start

        begin = StreamOffset.from_json(start)
        self._check(begin)
        begin = follower.still_read(begin)
        # The end of the newest batch that is done. Spark calls `commit` later, and never for the last batch.
        self._publish(start)

        ends = self._ends(current)
        until = self._until(begin, current)
        if self._bound is not None:
            if begin.initial and self.options.fail_on_data_loss:
                self._bound.check(begin.queues)
            ends = self._bound.limited(ends)

        firsts = follower.firsts_of(follower.changed(begin, ends), begin, ends)
        reached = {**begin.queues, **{queue: max(ends[queue], first) for queue, first in firsts.items()}}
        if self._bound is not None:  # retention may have deleted more than what is before the end
            kept = firsts.keys() - follower.moved
            reached.update({queue: max(ends[queue], begin.queues.get(queue, 0)) for queue in kept})

        if isinstance(limit, ReadMaxRows):
            starts = {**begin.queues, **firsts}
            if self._is_delayed(start, starts, reached):
                self._idle = (start, current, self._min_offsets.until_s) if follower.checked else None
                return start
            reached = self._limited(starts, reached, limit.max_rows)

        if all(begin.queues.get(queue, 0) == reached[queue] <= first for queue, first in firsts.items()):
            self._idle = (start, current, math.inf) if follower.checked else None
            return start

        next_offset = follower.next_offset(replace(begin, until=until), firsts, reached)
        if begin.initial:  # nothing else says where this micro-batch begins
            next_offset = replace(next_offset, begin=replace(begin, initial=False, until=None))
        self._planned = next_offset.to_json()
        return self._planned

    def _ends(self, current: Queues) -> Queues:
        """Where the query ends, or else the store. A queue that was created again ends at its current end."""
        if self.target is None:
            return current
        moved = self.follower.moved & self.target.keys()
        return {**self.target, **{queue: min(self.target[queue], current.get(queue, 0)) for queue in moved}}

    def _is_idle(self, start: dict[str, Any], current: Queues) -> bool:
        """Whether nothing has changed since there was nothing to do."""
        if self._idle is None or self.follower.restarted:  # a queue that was made again may be as long as before
            return False
        same_start, same_ends, before_s = self._idle
        return same_ends is current and same_start == start and time.monotonic() < before_s

    def _is_delayed(self, start: dict[str, Any], starts: Queues, reached: Queues) -> bool:
        """Whether to wait for more messages."""
        count = 0
        if self._min_offsets.least is not None:
            count = sum(max(0, end - starts.get(queue, 0)) for queue, end in reached.items())
        return self._min_offsets.waits(start, count, ends_soon=self.target is not None)

    def _limited(self, starts: Queues, reached: Queues, most_rows: int) -> Queues:
        """The ends of a step within the limits."""
        most, store = self.options.max_bytes_per_trigger, self.follower.store
        reached = limited(starts, reached, most_rows)
        if most is None:
            return reached
        ranges = [Range(*queue, starts.get(queue, 0), end) for queue, end in reached.items()]
        ranges = [range_ for range_ in ranges if range_.count > 0]
        if not ranges:
            return reached
        means = dict(zip(((r.topic, r.queue_id) for r in ranges), store.mean_sizes(ranges), strict=True))
        return limited_by_size(starts, reached, most, means, SizesAhead(store.sizes, shares(ranges, most, means)))

    def _until(self, begin: StreamOffset, current: Queues) -> Until | None:
        """Where the query ends: as it was fixed before, unless the options have changed since."""
        asked, follower = self.options.ending, self.follower
        if asked is None:
            return None

        extent = Extent(follower)
        until = begin.until
        if until is None or until.asked != asked.text:
            until = self._bound.until if self._bound is not None else extent.until(current)

        assert until is not None
        if self._bound is None or self._bound.until != until:
            self._bound = extent.bound(until)
        if follower.moved:
            self._bound.forget()
        return until

    def _check(self, start: StreamOffset) -> None:
        follower, asked = self.follower, self.options.starting
        if not follower.checked:
            follower.check_topics(start)
            if asked is not None and start.started not in ("", asked.text):
                self._warn_once(
                    f"{self.options.path}: option {asked.option} has changed since this query began. It is for new "
                    f"queries, and this one continues at its checkpoint"
                )
        follower.check_start(start)

    def _publish(self, start: dict[str, Any]) -> None:
        # Offsets in another log are not progress, nor those of queues whose numbers went back
        if self._progress is not None and self.follower.checked and not self.follower.moved:
            self._progress.publish(self.follower.store, start)

    # ---- ranges

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The pieces of one micro-batch; each call returns the same rows.

        The first micro-batch begins where its end says. For `start`, Spark has just called `initialOffset` once more.
        """
        begin, finish = StreamOffset.from_json(start), StreamOffset.from_json(end)
        if self._opened() is None and not finish.store_id and not finish.queues:
            return []  # Spark plans a first micro-batch without rows, too, and it ends before there is a store

        follower = self.follower
        if begin.initial and finish.beginning is not None:
            begin = finish.beginning

        # The tasks find what has changed since the step was planned; a broker is not asked for it twice.
        is_known = self.options.location.is_cluster and end == self._planned
        visible = follower.seen if is_known else follower.ends()
        follower.check_left(finish)
        self._check(begin)

        queues = [queue for queue in follower.changed(begin, finish.queues) if queue in finish.queues]
        # What the options leave out is no fault of the log: `check_left` has told of it
        queues = [queue for queue in queues if self.options.subscription.covers(queue)]

        faults = follower.planned_faults(finish, queues, visible)
        self._refuse_faults(faults)
        ends = self._planned_ends([queue for queue in queues if queue in visible], visible, finish, faults)

        firsts = follower.firsts_of(ends, begin, ends, warn=True)
        if faults:
            follower.checked = False  # the next step begins at the planned end: each queue is compared with it
            finish = follower.offset_at(StreamOffset(), firsts, ends)
        ranges, names_broker = ranges_of(firsts, ends), self.projection.names_broker
        return plan(follower.store, follower.store_id, self.options, ranges, finish, names_broker=names_broker)

    def _refuse_faults(self, faults: Mapping[Queue | None, str]) -> None:
        """Refuse a micro-batch of which a part is gone, unless the options allow that."""
        fault = next(iter(faults.values()), None)
        if fault is not None and not self.follower.recovered and None not in faults:
            raise StoreWentBackwardsError(  # also with failOnDataLoss=false: what was planned may come back
                f"{self.options.path}: {fault}. The machine was restarted after this micro-batch was planned, or a "
                f"writer was killed, and no writer has recovered the store since. Run `messagestore recover "
                f"{self.options.path}`, or open the store for writing, and start the query again"
            )
        if fault is not None and self.options.fail_on_data_loss:
            raise StoreWentBackwardsError(
                f"{self.options.path}: {fault}: the log was cut or restored. Start a new query, or set "
                f"failOnDataLoss=false to continue"
            )

    def _planned_ends(
        self, queues: list[Queue], visible: Queues, finish: StreamOffset, faults: Mapping[Queue | None, str]
    ) -> Queues:
        """Where the queues end in this micro-batch: as planned, or earlier where a part of the plan is gone."""
        ends: Queues = {}
        # Messages that are newer than the plan come with the next micro-batch.
        newer = self.follower.first_newer([queue for queue in queues if None in faults or queue in faults], finish)
        for queue in queues:
            offset = min(finish.queues[queue], visible[queue])
            if queue in newer:
                offset = min(offset, newer[queue])
                _log.warning(
                    "%s: %s. With failOnDataLoss=false this micro-batch ends at message %d of %s/%d instead of %d",
                    self.options.path,
                    faults.get(queue) or faults[None],
                    offset,
                    *queue,
                    finish.queues[queue],
                )
            ends[queue] = offset
        return ends

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
