"""The store as the driver sees it: how far the queues of a query reach, and whether its start is still valid."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from messagestore import ConfigError, OffsetOutOfRangeError, StoreWentBackwardsError, UnknownTopicError
from messagestore.spi import Ends, Queue, Queues, Stores, is_ordinary_topic
from pyspark_messagestore.options.source_options import SourceOptions
from pyspark_messagestore.source.offsets import StreamOffset
from pyspark_messagestore.source.same_log import ends_behind, is_there, warn_of_gap

_KEPT_PLACES = 3
"""The number of steps for which the driver remembers where the messages before their ends are, since the last step may
be planned again."""

_log = logging.getLogger(__name__)


class Follower:
    """The store as the driver sees it: how far the subscribed queues reach, and whether a start is still valid.

    Attributes
    ----------
    checked : bool
        The start that was examined last belongs to this log, and nothing about it is unknown.
    """

    def __init__(self, options: SourceOptions, stores: Stores) -> None:
        self.options = options
        self.subscription = options.subscription
        self.store = stores.reader(options.location, options.config())
        self.checked = False
        self.restarted: set[Queue] = set()
        """Queues that were deleted and created again since the last step."""
        self._shrunk: set[Queue] = set()
        """Queues that went or became shorter since the last step, or are gone now."""
        self._topics = self.subscription.named
        self._answer = self._ends = Ends("", {})
        """What the store has answered last; and the part of it that is about the queues that are read."""
        self._examined: StreamOffset | None = None
        self._moved: Queues = {}
        self._before: dict[Queue, dict[int, int]] = {}
        """The last ends of each queue, and where the message before each end lies."""
        self._warned: set[str] = set()

    # ---- ends

    @property
    def recovered(self) -> bool:
        """False: messages that were visible before may be missing until a writer has recovered the store."""
        return self._ends.recovered

    @property
    def store_id(self) -> str:
        """The id of the store that is read; empty for a store without one."""
        return self._ends.store_id

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
        ends = self._asked()
        if ends is not self._answer:
            if ends.instance != self._answer.instance:  # the start was examined in other files
                self.checked, self._examined = False, None
                self.restarted.clear()

            self.restarted |= set(filter(self.subscription.covers, ends.restarted_since(self._answer)))
            self._shrunk |= set(filter(self.subscription.covers, ends.shrunk_since(self._answer)))

            queues_before, is_same = self._ends.queues, ends.queues is self._answer.queues
            queues = queues_before if is_same else self.subscription.of(ends.queues)
            self._ends = replace(ends, queues=queues)
            if not is_same:
                self._shrunk |= {queue for queue, end in queues_before.items() if queues.get(queue, 0) < end}

            self._answer = ends
        return self._ends.queues

    def _asked(self) -> Ends:
        """The store's answer for the topics that are read, which a pattern finds among all names."""
        pattern = self.subscription.pattern
        ends = self.store.ends(self._topics, self._answer, names=pattern is not None)
        if pattern is None or ends.topic_names is self._answer.topic_names:
            return ends

        topics = tuple(sorted(filter(self.subscription.covers_topic, ends.topic_names or ())))
        if topics == self._topics:
            return ends
        self._topics = topics
        return self.store.ends(topics, names=True)

    @property
    def seen(self) -> Queues:
        """What `ends` has returned last."""
        return self._ends.queues

    def check_topics(self, start: StreamOffset | None = None) -> None:
        """Refuse a topic that the store does not have, unless the query shall wait for it.

        A pattern without a match, and an assigned queue that does not exist, are warnings, as Kafka's connector takes
        both: a stream reads such topics and queues when they come.

        Parameters
        ----------
        start : StreamOffset | None
            Where the query continues. None: it begins, and is told if a pattern matches no topic.

        Raises
        ------
        UnknownTopicError
            A topic is unknown. The error lists the topics that the store has.
        StoreWentBackwardsError
            The query has read a topic that is gone, and failOnDataLoss is true. Otherwise this is a warning.
        """
        begun = start is not None and not start.initial
        read = {*start.topics, *(topic for topic, _ in start.queues)} if start is not None and begun else set()
        if self.options.on_missing_topic == "wait":
            return

        pattern = self.subscription.pattern
        if pattern is not None and start is not None:
            return
        description = self.store.describe(None if pattern is not None else self.subscription.named, queues=True)
        topics = description.queue_ids.keys() | description.queue_counts.keys()

        for topic in self.subscription.named:
            if topic not in topics and topic in read:
                self._check_gone(topic)
            elif topic not in topics:
                whole_store = self.store.describe(queues=True)
                raise UnknownTopicError(
                    topic,
                    filter(is_ordinary_topic, whole_store.queue_ids.keys() | whole_store.queue_counts.keys()),
                    f"{self._creation(topic)}, or set onMissingTopic=wait for a stream that begins before its topic",
                )

        if pattern is not None and not any(map(self.subscription.covers_topic, topics)):
            ordinary = sorted(filter(is_ordinary_topic, topics))
            self.warn_once(
                f"option subscribePattern: no topic matches {pattern!r}, so nothing is read yet. The store has "
                f"{', '.join(ordinary) or 'no topic'}"
            )

        for topic, queue_id in sorted(self.subscription.queues or ()):
            ids, count = description.queue_ids.get(topic, []), description.queue_counts.get(topic, 0)
            if queue_id not in ids and queue_id >= count:
                self.warn_once(
                    f"option assign: queue {queue_id} of {topic} does not exist, so nothing of it is read yet. Its "
                    f"queues are {sorted({*ids, *range(count)})}"
                )

    def _creation(self, topic: str) -> str:
        """How to make a topic, in words."""
        if self.options.location.is_cluster:
            names = self.options.location.name_servers
            names = "HOST:PORT" if "://" in names else names  # mqadmin takes no URL
            return f"Create it with `mqadmin updateTopic -n '{names}' -c CLUSTER -t {topic}`"
        if self.options.location.is_remote:
            return (
                f"Create it on the host of {self.options.path} with `messagestore topic create ROOT {topic}`, where "
                f"ROOT is the folder that the server serves"
            )
        return f"Create it with `messagestore topic create {self.options.path} {topic}`"

    def _check_gone(self, topic: str) -> None:
        """Refuse to go on without a topic that the query has read; with failOnDataLoss=false, say so."""
        if not self._ends.recovered:
            return  # it may be in the log, but a writer must recover the store first
        fault = f"topic {topic}, which this query has read, is gone: it was deleted, or the store was restored"
        if self.options.fail_on_data_loss:
            raise StoreWentBackwardsError(
                f"{self.options.path}: {fault}. What was not read of it is lost. Start a new query, or set "
                f"failOnDataLoss=false to continue without it"
            )
        self.warn_once(
            f"{fault}. With failOnDataLoss=false the query continues, and reads the topic if it is made again"
        )

    # ---- whether a start is valid

    def check_start(self, start: StreamOffset) -> None:
        """Check by the ends that were seen last that this is still the log that `start` was read from. It runs whenever
        there is something new.

        The last record that was read is read again. Each queue must reach the start, and the message before the start
        must lie within what was read. The first time, all queues are checked, then those that have changed.

        Raises
        ------
        StoreWentBackwardsError
            The log was cut below the start, a queue was created again, or this is another store.
        ConfigError
            The options no longer name a topic or a queue that the query has read.
        """
        self.check_left(start)

        if start.store_id not in ("", self._ends.store_id):
            self._check_copy(start)
        if start != self._examined:
            self._examined, self._moved = start, {}

        faults = self._faults(start, self.seen)
        if not faults:
            return

        if self.options.fail_on_data_loss:
            self.checked = False  # whoever asks again gets the same answer
            raise StoreWentBackwardsError(
                f"{self.options.path}: {next(iter(faults.values()))}: the log was cut, restored or created again below "
                f"the checkpoint (physical offset {start.physical_offset}), or a topic was deleted. Start a new query, "
                f"or set failOnDataLoss=false to continue at the first newer message"
            )
        self._go_on(start, self.seen, faults)

    def _left(self, start: StreamOffset) -> list[str]:
        """The topics, or with `assign` the queues, that the query read before and that the options leave out."""
        queues = self.subscription.queues
        if queues is not None:
            return [f"{topic}/{queue_id}" for topic, queue_id in sorted(start.queues.keys() - queues)]
        return [topic for topic in start.topics if not self.subscription.covers_topic(topic)]

    def check_left(self, start: StreamOffset) -> None:
        """Refuse a start with a topic or queue that is no longer read, as Kafka's connector does.

        Its later messages would be missing, and nobody would be told. A checkpoint of another query looks the same.
        """
        left = self._left(start)
        if not left:
            return

        name = self.subscription.option
        fault = (
            f"option {name}: leaves out {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}, which this query has "
            f"read before"
        )

        if self.options.fail_on_data_loss:
            raise ConfigError(
                f"{fault}, so messages that come there would be missing. Is this the checkpoint of another query? Name "
                f"them again, start a new query with a new checkpoint, or set failOnDataLoss=false to continue without "
                f"them",
                key=name,
            )

        self.warn_once(
            f"{fault}. With failOnDataLoss=false the query continues without them; if they "
            f"are named again, they are read from their first message"
        )

    def still_read(self, start: StreamOffset) -> StreamOffset:
        """A start without the queues that the options leave out. If they are named again, they are new."""
        if not self._left(start):
            return start
        queues = {queue: offset for queue, offset in start.queues.items() if self.subscription.covers(queue)}
        return replace(start, queues=queues, topics=tuple(filter(self.subscription.covers_topic, start.topics)))

    def _check_copy(self, start: StreamOffset) -> None:
        """Refuse the checkpoint of another store, unless this one is a copy of it that has the same last record."""
        here, last = self.store.describe(), start.last
        is_copy = not here.store_id or start.store_id in here.ancestors
        record_now = None if last is None else self.store.prove_last(last.position, last.size)
        if is_copy and (last is None or (record_now is not None and record_now.crc == last.crc)):
            return

        why = "which is no copy of it. Use a new checkpoint for another store"
        if is_copy:
            why = (
                "a copy of it, which does not hold the last record that was read. Rewind the checkpoint to a batch "
                "that the copy has (messagestore checkpoint rewind); with a new one, everything is read once more"
            )
        raise StoreWentBackwardsError(
            f"{self.options.path}: the checkpoint belongs to store {start.store_id}, but this is store "
            f"{here.store_id or 'without an id'}, {why}"
        )

    def _faults(self, start: StreamOffset, ends: Queues) -> dict[Queue | None, str]:
        """The faults by queue. The key None stands for the log."""
        all_queues, is_unknown = not self.checked, False
        faults: dict[Queue | None, str] = {}

        last = start.last
        if last is not None and not is_there(self.store, last):
            faults[None] = f"the record at physical offset {last.position} is not the one that this query has read"

        to_check = {
            queue: offset
            for queue, offset in start.queues.items()
            if offset and (all_queues or ends.get(queue) != offset or queue in self.restarted or queue in self._shrunk)
        }
        self._shrunk |= to_check.keys() - ends.keys()

        places = self.store.places({queue: min(offset, ends.get(queue, 0)) for queue, offset in to_check.items()})
        for queue, offset in to_check.items():
            end = ends.get(queue)
            if queue in self.restarted:
                faults[queue] = f"{queue[0]}/{queue[1]} was created again: it began again below message {offset}"
            elif end is None or end < offset:
                if not self._ends.recovered and not ends_behind(places.get(queue), start.physical_offset):
                    is_unknown = True  # what was read may be in the log, but a writer must recover the store first
                elif self.subscription.covers(queue):
                    faults[queue] = (
                        f"{queue[0]}/{queue[1]} ends at {end}, but this query has read up to {offset}"
                        if end is not None
                        else f"{queue[0]}/{queue[1]} is gone, but this query has read up to {offset}"
                    )
            elif ends_behind(places.get(queue), start.physical_offset):
                faults[queue] = (
                    f"{queue[0]}/{queue[1]} was created again: message {offset - 1} is not the one that this query has "
                    f"read"
                )

        self.checked = not is_unknown
        return faults

    def planned_faults(self, finish: StreamOffset, queues: list[Queue], ends: Queues) -> dict[Queue | None, str]:
        """The faults of the end of a micro-batch that was planned before, by queue. The key None stands for the log."""
        faults: dict[Queue | None, str] = {}
        last = finish.last
        if last is not None and not is_there(self.store, last):
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
            elif ends_behind(places.get(queue), finish.physical_offset):
                faults[queue] = f"{name}: message {offset - 1} is not the one that this micro-batch was planned up to"
        return faults

    def _go_on(self, start: StreamOffset, ends: Queues, faults: dict[Queue | None, str]) -> None:
        """With failOnDataLoss=false: find the first newer message of each queue, and log it."""
        queues = list(start.queues) if None in faults else [queue for queue in faults if queue is not None]
        restarted = set(queues) & self.restarted
        self.restarted -= restarted

        for queue, fault in faults.items():
            if queue not in self._moved:
                self.warn_once(f"{fault}. With failOnDataLoss=false the query continues at the first newer message")

        queues = [queue for queue in queues if queue not in self._moved and queue in ends]
        # If the log is otherwise the same, all messages of a queue that was created again are newer.
        made_again = restarted if None not in faults else set()
        newer = self.first_newer([queue for queue in queues if queue not in made_again], start)

        for queue in queues:
            self._moved[queue] = newer.get(queue, 0)
            if self._moved[queue] != start.queues[queue]:
                self.warn_once(
                    f"{queue[0]}/{queue[1]}: continuing at message {self._moved[queue]} instead of "
                    f"{start.queues[queue]}. The {self._moved[queue]} messages before it were read, or count as read"
                )

    def warn_once(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s: %s", self.options.path, text)

    def first_newer(self, queues: Iterable[Queue], start: StreamOffset) -> Queues:
        """The first message of each queue that was stored after everything this query has read, by place or by time."""
        time_ms = None if start.last is None else start.last.store_timestamp_ms
        times_ms = dict.fromkeys(queues, time_ms)
        firsts = self.store.seek(times_ms, physical_offset=start.physical_offset) if times_ms else {}

        places_before = {queue: self._before.get(queue, {}).get(start.queues[queue], -1) for queue in firsts}
        ahead = {queue: start.queues[queue] for queue, place in places_before.items() if place >= 0}
        ahead = {queue: offset for queue, offset in ahead.items() if firsts[queue] > offset}
        places = self.store.places(ahead) if ahead else {}

        # A queue that has new numbers: the start says nothing about them.
        renumbered = {queue for queue, place in places.items() if place.physical_offset != places_before[queue]}
        # In the others, a limit may have left older messages unread.
        return {
            queue: first if queue in renumbered else min(first, start.queues[queue]) for queue, first in firsts.items()
        }

    def firsts_of(self, queues: Iterable[Queue], start: StreamOffset, ends: Queues, *, warn: bool = False) -> Queues:
        """Where the ranges of some queues begin, after the messages that retention has deleted."""
        begins = self.store.begins(queues)
        return {queue: self.first_of(queue, start, begin, ends[queue], warn=warn) for queue, begin in begins.items()}

    def first_of(self, queue: Queue, start: StreamOffset, begin: int, end: int, *, warn: bool = False) -> int:
        """Where the range of one queue begins; `begin` is the queue's first message that is still in the log.

        A queue that is new to the stream begins at 0, unless it was not subscribed before.
        """
        offset = self._moved.get(queue, start.queues.get(queue, 0))
        if offset < begin and (queue in start.queues or self._was_covered(queue, start)):
            if self.options.fail_on_data_loss:
                raise self.gone(queue, offset, begin)
            if warn and min(begin, end) > offset:
                warn_of_gap(queue, offset, min(begin, end))
        return max(offset, begin)

    def gone(self, queue: Queue, offset: int, begin: int) -> OffsetOutOfRangeError:
        """The error for a message that a queue does not hold; `begin` is its first one that is still in the log."""
        topic, queue_id = queue
        end = self._ends.queues.get(queue, 0)
        lost = f"{min(begin, end) - offset} messages are gone" if offset < begin else "the queue has not grown that far"
        return OffsetOutOfRangeError(
            f"{topic}/{queue_id}: offset {offset} was requested, but the queue holds {begin} to {end}: {lost}. Start a "
            f"new query, or set failOnDataLoss=false to continue at the first offset that is there",
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            min=begin,
            max=end,
        )

    def _was_covered(self, queue: Queue, start: StreamOffset) -> bool:
        """Whether a queue that the start does not list was subscribed there: then it is new, or not created yet."""
        if self.subscription.queues is not None:
            return False  # every assigned queue is listed
        return queue[0] in start.topics or (start.pattern is not None and start.pattern == self.subscription.pattern)

    @property
    def moved(self) -> set[Queue]:
        """The queues that do not continue where the start that was examined last says (failOnDataLoss=false)."""
        return set(self._moved)

    def changed(self, start: StreamOffset, ends: Queues) -> list[Queue]:
        """The queues in which a step from `start` to `ends` may read something."""
        offsets, moved = start.queues, self._moved
        return [queue for queue, end in ends.items() if offsets.get(queue, 0) != end or queue in moved]

    # ---- the end of a step

    def next_offset(self, start: StreamOffset, firsts: Queues, reached: Queues) -> StreamOffset:
        """The result of `offset_at` for a step that is reported to Spark. It covers the queues that were created again
        before.
        """
        ends = {queue: end for queue, end in reached.items() if queue in firsts and end}
        places_reached = self.store.places(ends)
        for queue, end in ends.items():
            places = self._before.setdefault(queue, {})
            # The end goes to the last place in the dict, so that the oldest one is dropped.
            places.pop(end, None)
            places[end] = places_reached[queue].physical_offset if queue in places_reached else -1
            if len(places) > _KEPT_PLACES:
                del places[next(iter(places))]

        self.restarted.clear()
        self._shrunk -= self._ends.queues.keys()  # one that is gone may come back as long as the start
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

        # Messages that retention has deleted are passed over as if they had been read: their units may be left.
        ends = {
            queue: end
            for queue, end in reached.items()
            if again or queue in firsts
            if end > (0 if again else start.queues.get(queue, 0))
        }
        places = [place for place in self.store.places(ends).values() if place.size]

        newest = max(places, key=lambda place: place.physical_offset, default=None)
        if newest is not None and newest.end > physical_offset:
            physical_offset = newest.end
            record = self.store.prove_last(newest.physical_offset, newest.size, with_time=True)
            if record is not None:  # else retention has deleted it, and a copy may still have the one before
                last = record if record.store_timestamp_ms is not None else None  # None: no record begins there

        return StreamOffset(
            self._ends.store_id,
            self.subscription.named,
            reached,
            physical_offset,
            last,
            pattern=self.subscription.pattern,
            started=start.started,
            until=start.until,
        )
