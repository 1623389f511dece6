"""Where a read begins and where it ends, by the options."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from messagestore.spi import Queue, Queues
from pyspark_messagestore.options.positions import EARLIEST, LATEST, Asked, Committed, Moment, Position
from pyspark_messagestore.source.follower import Follower
from pyspark_messagestore.source.offsets import Until
from pyspark_messagestore.source.read_end import Bound


class Extent:
    """Where a read begins and where it ends in each queue, as the options ask for it."""

    def __init__(self, follower: Follower) -> None:
        self._follower, self._store = follower, follower.store
        self._options, self._subscription = follower.options, follower.subscription

    # ---- the first offset

    def starting(self, default: int) -> Queues:
        """Where a new query begins, according to the options.

        Raises
        ------
        ConfigError
            A queue is not listed, or does not exist; or no message is as young as the starting time, and that is to be
            an error.
        OffsetOutOfRangeError
            A queue does not hold its offset, and failOnDataLoss is true.
        """
        self._follower.check_topics()
        ends = self._follower.ends()

        asked = self._options.starting or Asked("startingOffsets", default)
        wanted = asked.positions(self.with_empty(asked, ends), self._subscription.covers_topic)
        committed = {queue for queue, position in wanted.items() if isinstance(position, Committed)}
        offsets = self._resolved(asked, self._after_commits(asked, wanted), committed, ends)
        return {queue: offset for queue, offset in offsets.items() if queue in ends}

    def with_empty(self, asked: Asked, ends: Queues) -> Queues:
        """The ends, also of the queues that an option names and that the topic has, but that never had a message."""
        without_message = [queue for queue in asked.listed if queue not in ends and self._subscription.covers(queue)]
        if not without_message:
            return ends
        counts = self._store.describe({topic for topic, _ in without_message}).queue_counts
        return {**ends, **{queue: 0 for queue in without_message if queue[1] < counts.get(queue[0], 0)}}

    def _after_commits(self, asked: Asked, wanted: Mapping[Queue, Position]) -> dict[Queue, int | Moment]:
        """The positions, with the offsets that the consumer group has published where these are asked for."""
        group = self._options.consumer_group
        published: Queues = {}
        if group is not None and any(isinstance(position, Committed) for position in wanted.values()):
            published = self._store.published_progress(group)

        positions: dict[Queue, int | Moment] = {}
        for queue, position in wanted.items():
            if not isinstance(position, Committed):
                positions[queue] = position
                continue

            offset = published.get(queue, position.otherwise)
            if offset is None:
                raise asked.error(
                    f"consumer group {group} has not read queue {queue[1]} of {queue[0]}. Give committed:earliest or "
                    f"committed:latest to say where to begin in such queues"
                )
            positions[queue] = offset
        return positions

    def _resolved(
        self, asked: Asked, wanted: Mapping[Queue, int | Moment], committed: set[Queue], ends: Queues
    ) -> Queues:
        """The queue offsets of the positions at which a new query begins."""
        begins = self._store.begins(queue for queue, offset in wanted.items() if offset != LATEST)
        # One moment for all queues, so that a time ago means the same in each.
        now_ms = time.time_ns() // 1_000_000
        times_ms = {queue: at.at(now_ms) for queue, at in wanted.items() if isinstance(at, Moment)}
        firsts = self.at_times(times_ms)
        offsets: Queues = {}

        for queue, position in wanted.items():
            end = ends.get(queue, 0)
            begin = min(begins.get(queue, end), end)

            if isinstance(position, Moment):
                offsets[queue] = self._from_time(asked, queue, begin, end, times_ms[queue], firsts[queue])
            elif position in (EARLIEST, LATEST):
                offsets[queue] = begin if position == EARLIEST else end
            elif begin <= position <= end:
                offsets[queue] = position
            elif self._options.fail_on_data_loss:
                raise self._follower.gone(queue, position, begin)
            else:
                offsets[queue] = self._nearest(queue, position, begin, end, committed=queue in committed)
        return offsets

    def _nearest(self, queue: Queue, position: int, begin: int, end: int, *, committed: bool) -> int:
        """Where a read with failOnDataLoss=false begins if the message that it asks for is gone."""
        first = min(max(position, begin), end)
        if not committed:
            return first
        if position > end and begin == 0:  # as for consumers of RocketMQ: it is not the queue that the group has read
            first = 0
        self._follower.warn_once(
            f"consumer group {self._options.consumer_group} has read {queue[0]}/{queue[1]} up to {position}, but the "
            f"queue holds {begin} to {end}. With failOnDataLoss=false the query begins at message {first}"
        )
        return first

    def _from_time(self, asked: Asked, queue: Queue, begin: int, end: int, time_ms: int, first: int) -> int:
        """The first message that was stored at a time or later; if there is none, what the strategy says."""
        if first < end:
            return max(first, begin)

        strategy = self._options.starting_offsets_by_timestamp_strategy
        if strategy == "error":
            when = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
            raise asked.error(
                f"queue {queue[1]} of {queue[0]} has no message that was stored at {when} or later. Give an earlier "
                f"time, or set startingOffsetsByTimestampStrategy to latest or earliest"
            )
        return begin if strategy == "earliest" else end

    def at_times(self, times_ms: Mapping[Queue, int]) -> Queues:
        """The first message of each queue that was stored at its time or later; the queue's end if there is none."""
        return self._store.seek({queue: time_ms - 1 for queue, time_ms in times_ms.items()}) if times_ms else {}

    # ---- the last offset

    def until(self, ends: Queues) -> Until | None:
        """The end that the options ask for, fixed now; None: the options say nothing about it."""
        asked = self._options.ending
        if asked is None:
            return None
        needed = asked.is_offsets or asked.has_latest or isinstance(asked.wanted, dict)
        return Until(asked.text, time.time_ns() // 1_000_000, ends if needed else {})

    def bound(self, until: Until) -> Bound:
        """Where the read ends, by the options and by what was fixed before."""
        asked = self._options.ending
        assert asked is not None
        return Bound(
            asked, until, self._subscription.covers_topic, self.with_empty, self.at_times, self._follower.warn_once
        )

    def ending(self, firsts: Queues) -> Queues:
        """Where a batch read ends, according to the options.

        Raises
        ------
        ConfigError
            A queue is not listed, does not exist, or would end before it begins.
        OffsetOutOfRangeError
            A queue does not reach its offset, and failOnDataLoss is true.
        """
        ends = self._follower.ends()
        # A queue that was created in between is left out, and one that was deleted is empty
        reached = {queue: ends.get(queue, 0) for queue in firsts}
        until = self.until(reached)
        if until is None:
            return reached

        bound = self.bound(until)
        if self._options.fail_on_data_loss:
            bound.check(firsts)
            for queue, wanted in bound.offsets(self.with_empty(bound.asked, reached)).items():
                if wanted > reached.get(queue, 0):
                    raise self._follower.gone(queue, wanted, self._store.begins([queue]).get(queue, 0))
        return {queue: max(end, firsts[queue]) for queue, end in bound.limited(reached).items()}
