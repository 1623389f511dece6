"""Copies topics of other stores into an archive: each message once, whatever is killed and when.

A broker's topic has an app of its own in the archive, `copy/BROKER/TOPIC`. Each batch of this app takes along, as its
origin, the place behind its messages: how far each queue was copied, and the last record, by which the other log is
recognised. So messages and place are in the archive together, or neither is. The first batch is empty, and says where
the copy begins.

    Origin       a broker, or another store, with some topics
    TopicCopy    one topic of it, and how far it was copied
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from messagestore import BatchRequest, MessageStore, OffsetOutOfRangeError, StoreWentBackwardsError
from messagestore.spi import Ends, Gathered, PlannedRead, Queue, Queues, Range, StoreReader, append_copies
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import From, opened
from pyspark_messagestore.source.offsets import StreamOffset
from pyspark_messagestore.source.same_log import place_now

BATCH_SIZE = 16 * 1024 * 1024
"""About so many bytes of records come in one batch, and about three times as much memory is used."""
_BATCH_ROWS = 65_536
_APP_PREFIX = "copy/"
_WHO = "this copy"


@dataclass(slots=True)
class Step:
    """What one batch has copied of a topic."""

    messages: int = 0
    size: int = 0
    lost: int = 0
    """Messages that were gone before they were copied, as far as their numbers say."""

    def add(self, other: Step) -> None:
        """Count another batch, too."""
        self.messages += other.messages
        self.size += other.size
        self.lost += other.lost


class TopicCopy:
    """One topic of another store, and how far it was copied.

    Parameters
    ----------
    archive : MessageStore
    origin : StoreReader
    names : sequence of str
        The name of the broker, or what stands for it, and then those that it may have had. The copy goes on under the
        first of them that the archive knows.
    topic : str
    accept_loss : bool
        Go on behind messages that are gone, and say so. False: that is an error.
    """

    def __init__(
        self, archive: MessageStore, origin: StoreReader, names: Sequence[str], topic: str, *, accept_loss: bool
    ) -> None:
        self.topic, self.name = topic, names[0]
        self._archive, self._origin, self._accept_loss = archive, origin, accept_loss
        apps = [f"{_APP_PREFIX}{name}/{topic}" for name in names]
        self._app_id = next((app for app in apps if archive.last_batch(app) is not None), apps[0])
        self._mean_size = 0.0
        self.place = StreamOffset(topics=(topic,))

        last = archive.last_batch(self._app_id)
        self._version = 0 if last is None else last.version + 1
        if last is not None:
            self.place = StreamOffset.from_json(last.origin or {})

    @property
    def has_begun(self) -> bool:
        """Whether the archive says how far the topic was copied."""
        return self._version > 0

    # ---- the beginning

    def begin(self, ends: Queues, start: From | int) -> None:
        """Write into the archive where the copy begins.

        Parameters
        ----------
        ends : dict of (str, int) to int
            The queues of the topic.
        start : From | int
            Earliest, latest, or milliseconds since 1970: with the first message that was stored then or later.
        """
        if start is From.LATEST:
            queues = dict(ends)
        elif start is From.EARLIEST:
            queues = self._origin.begins(ends)
        else:
            queues = self._origin.seek(dict.fromkeys(ends, int(start) - 1))
        self._append([], self._placed(queues, queues))

    def _placed(self, queues: Queues, moved: Queues) -> StreamOffset:
        """The place with these offsets of its queues, of which some have moved."""
        physical_offset, last = self.place.physical_offset, self.place.last
        places = [place for place in self._origin.places(moved).values() if place.size]
        newest = max(places, key=lambda place: place.physical_offset, default=None)
        if newest is not None and newest.end > physical_offset:
            physical_offset = newest.end
            last = self._origin.prove_last(newest.physical_offset, newest.size, with_time=True)
            if last is not None and last.store_timestamp_ms is None:
                last = None  # no record begins there: it is one of an inner batch
        return StreamOffset(topics=(self.topic,), queues=queues, physical_offset=physical_offset, last=last)

    # ---- one batch

    def step(self, ends: Queues, bounds: Queues | None = None) -> Step | None:
        """Copy the next batch; None if there is nothing new.

        Parameters
        ----------
        ends : dict of (str, int) to int
            How far the queues of the topic reach.
        bounds : dict of (str, int) to int | None
            Copy only up to these numbers.

        Raises
        ------
        StoreWentBackwardsError
            The log is not the one that was copied, or a queue has other messages.
        OffsetOutOfRangeError
            Retention has deleted messages that were not copied.
        """
        limits = ends if bounds is None else {queue: min(end, bounds.get(queue, 0)) for queue, end in ends.items()}
        before, step = self.place, Step()
        copied = before.queues
        self._check(ends)  # also if nothing is new: other messages may have the same numbers
        if self.place is before and all(limits[queue] <= copied.get(queue, 0) for queue in limits):
            return None

        queues, step.lost = self._behind_gaps(self.place.queues, limits)
        behind = {queue: end for queue, end in limits.items() if queues.get(queue, 0) < end}
        blocks, reached, lost = self._gathered(queues, behind)
        step.lost += lost
        if not reached and queues == copied and self.place is before:
            return None
        step.messages, step.size = self._append(blocks, self._placed({**queues, **reached}, reached))
        return step

    def _check(self, ends: Queues) -> None:
        """Check that the log is the one that was copied. If it is not, and that is accepted, the place moves."""
        queues, faults = place_now(self._origin, self.place, _WHO)
        if not faults:
            return
        if not self._accept_loss:
            raise StoreWentBackwardsError(
                f"{self.name}: {faults[0]}: the log was cut or restored, the topic was created again, or another store "
                f"answers. What was copied stays in the archive. Give --accept-loss to go on with the first newer "
                f"message"
            )
        for fault in faults:
            out.note(f"{self.name}: {fault}. The copy goes on with the first newer message")
        self.place = StreamOffset(
            topics=(self.topic,), queues={queue: at for queue, at in queues.items() if queue in ends}
        )

    def _behind_gaps(self, queues: Queues, ends: Queues) -> tuple[Queues, int]:
        """The offsets behind what retention has deleted before it was copied, and how many messages that were."""
        unfinished = [queue for queue, end in ends.items() if queues.get(queue, 0) < end]
        offsets, lost = dict(queues), 0
        for queue, begin in self._origin.begins(unfinished).items():
            offset, first = queues.get(queue, 0), min(begin, ends[queue])
            if offset < first:
                if not self._accept_loss:
                    raise self._gap(queue, offset, begin, ends[queue])
                offsets[queue], lost = first, lost + self._tell_gap(queue, offset, first)
        return offsets, lost

    def _tell_gap(self, queue: Queue, offset: int, first: int) -> int:
        """Note that messages are gone; returns how many."""
        count = first - offset
        which = f"{offset} is" if count == 1 else f"{offset} to {first - 1} are"
        out.note(
            f"{self.name}: {out.count_words(count, 'message')} of {queue[0]}/{queue[1]} were not copied: {which} gone, "
            f"because retention has deleted them. The copy goes on behind"
        )
        return count

    def _gap(self, queue: Queue, offset: int, begin: int, end: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            f"{self.name}: {queue[0]}/{queue[1]} was copied up to {offset}, but the queue holds {begin} to {end}: "
            f"retention has deleted {min(begin, end) - offset} messages before they were copied. Give --accept-loss to "
            f"go on behind them",
            topic=queue[0],
            queue_id=queue[1],
            queue_offset=offset,
            min=begin,
            max=end,
        )

    def _gathered(self, queues: Queues, ends: Queues) -> tuple[list[Gathered], Queues, int]:
        """The next messages of some queues, a share of each; how far they reach; and how many are gone before that."""
        blocks, reached, lost = list[Gathered](), Queues(), 0
        planned = PlannedRead("", 0, self.place.last)
        share = BATCH_SIZE // max(1, len(ends))
        for queue, end in ends.items():
            start = queues.get(queue, 0)
            if not self._mean_size:
                (self._mean_size,) = self._origin.mean_sizes([Range(*queue, start, end)])
            count = min(_BATCH_ROWS, int(share / max(1.0, self._mean_size)))
            span = Range(*queue, start, min(end, start + max(1, count)))
            size = 0
            try:
                for block in self._origin.gather([span], planned=planned, max_size=share):
                    blocks.append(block)
                    reached[queue] = block.end
                    size += int(block.sizes.sum())
                    self._mean_size = size / (block.end - start)
                    if size >= share:
                        break
            except OffsetOutOfRangeError as error:  # retention was faster
                at, first = reached.get(queue, start), min(error.min, end)
                if self._accept_loss and at < first:
                    reached[queue], lost = first, lost + self._tell_gap(queue, at, first)
                elif at == start:
                    raise self._gap(queue, start, error.min, error.max) from None
        return blocks, reached, lost

    def _append(self, blocks: Sequence[Gathered], place: StreamOffset) -> tuple[int, int]:
        """Append messages together with the place behind them."""
        self._make_topic(place.queues)
        request = BatchRequest(app_id=self._app_id, version=self._version, origin=place.to_json())
        copied = append_copies(self._archive.writer, blocks, self.name, request)
        if copied.without_origin:
            some = ", ".join(map(str, copied.without_origin[:5]))
            out.note(
                f"{self.name}: {out.count_words(len(copied.without_origin), 'message')} of {self.topic} (with the "
                f"queue offsets {some}{', ...' if len(copied.without_origin) > 5 else ''}) had no room for the "
                f"properties that say where it was. They were copied without them"
            )
        self._version += 1
        self.place = place
        return copied.message_count, copied.size

    def _make_topic(self, queues: Queues) -> None:
        """Create the topic in the archive, with as many queues as the origin has."""
        count = self._origin.describe([self.topic]).queue_counts.get(self.topic, 0)
        count = max(1, count, *(queue_id + 1 for _, queue_id in queues))
        config = self._archive.topic_config(self.topic)
        if config is None:
            self._archive.create_topic(self.topic, count)
        elif config.write_queue_nums < count:
            more = max(count, config.read_queue_nums)
            self._archive.alter_topic(self.topic, write_queue_nums=count, read_queue_nums=more)


class Origin:
    """A broker, or another store, of which topics are copied.

    Parameters
    ----------
    archive : MessageStore
    reader : StoreReader
    names : sequence of str
        The broker's name, and then those that it may have had.
    accept_loss : bool
    """

    def __init__(self, archive: MessageStore, reader: StoreReader, names: Sequence[str], *, accept_loss: bool) -> None:
        self.name, self.reader, self.copies = names[0], reader, dict[str, TopicCopy]()
        self._names = names
        self._archive, self._accept_loss = archive, accept_loss
        self._seen: Ends | None = None
        self._is_behind = True
        self._bounds: Queues | None = None

    def add(self, topics: Sequence[str], start: From | int, begun: set[str], *, follow: bool) -> list[TopicCopy]:
        """Copy those of some topics that this broker has, too; returns the copies that begin now.

        Parameters
        ----------
        start : From | int
            Where they begin.
        begun : set of str
            The topics that were copied from other brokers before, which begin with the first message of this one.
        follow : bool
            Go on with messages that come. False: end where the queues end now.
        """
        description = self.reader.describe(topics, queues=True)
        existing = description.queue_ids.keys() | description.queue_counts.keys()  # also one without a message yet
        new = [topic for topic in topics if topic in existing and topic not in self.copies]
        if not new:
            return []

        fresh = list[TopicCopy]()
        ends = self.reader.ends(new)
        for topic in new:
            copy = TopicCopy(self._archive, self.reader, self._names, topic, accept_loss=self._accept_loss)
            if not copy.has_begun:
                copy.begin(_of(topic, ends.queues), From.EARLIEST if topic in begun else start)
                fresh.append(copy)
            self.copies[topic] = copy
        self._seen, self._is_behind = None, True
        self._bounds = None if follow else {**(self._bounds or {}), **ends.queues}
        return fresh

    @property
    def left(self) -> int:
        """How many messages are to be copied, as far as is known."""
        ends = {} if self._seen is None else self._seen.queues
        bounds = ends if self._bounds is None else self._bounds
        places = {queue: at for copy in self.copies.values() for queue, at in copy.place.queues.items()}
        return sum(max(0, min(end, bounds.get(queue, 0)) - places.get(queue, 0)) for queue, end in ends.items())

    def round(self) -> Iterator[tuple[TopicCopy, Step]]:
        """Copy a batch of each topic that has something new."""
        ends = self.reader.ends(tuple(self.copies), self._seen)
        if ends is self._seen and not self._is_behind:
            return
        self._seen, self._is_behind = ends, False
        for topic, copy in self.copies.items():
            step = copy.step(_of(topic, ends.queues), self._bounds)
            if step is not None:
                self._is_behind = True
                yield copy, step


def _of(topic: str, queues: Queues) -> Queues:
    return {queue: end for queue, end in queues.items() if queue[0] == topic}


def copied_topics(path: str) -> set[str]:
    """The topics of which the archive in a folder has copies."""
    with opened(path) as reader:
        rows, _ = reader.view("apps")
    return {row["app"].rpartition("/")[2] for row in rows if row["app"].startswith(_APP_PREFIX)}


def names_of(reader: StoreReader) -> list[str]:
    """The names by which an archive may know a store that is no broker: the name of its broker, its id, or else one
    word.

    A store may get its name after it was copied, and a restored store has an id of its own, so the ids that it had
    before follow. If two stores share a name or have none, the record that was copied last tells them apart.
    """
    store = reader.describe([])
    return [name for name in (reader.broker_name(), store.store_id, *sorted(store.ancestors)) if name] or ["store"]
