"""Reads the messages that `messagestore get` and `messagestore tail` show.

`messages` gives the messages of one queue in its order, `Cursor` gives those of many queues in the order in which they
were stored, and `Cursors` those of all brokers of a cluster. They see only what a reader may see.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator

from messagestore import MessageExt, OffsetOutOfRangeError, StoreWentBackwardsError, UnknownTopicError
from messagestore.spi import BATCH_TOPIC, Ends, LastRecord, Queue, Queues, Range, StoreReader, is_ordinary_topic
from pyspark_messagestore.cli import output as out

_PAGE_COUNT = 32
_POLL_S = 0.1
_TOPICS_POLL_S = 1.0
_BROKERS_POLL_S = 5.0


def queue_ids(store: StoreReader, topic: str) -> tuple[list[int], list[int]]:
    """The queues of a topic that hold messages or have held some, and all queues that the topic was created with.

    Raises
    ------
    UnknownTopicError
        The store has no such topic.
    """
    description = store.describe([topic], queues=True)
    if topic not in description.queue_ids and topic not in description.queue_counts:
        whole_store = store.describe(queues=True)
        raise UnknownTopicError(topic, filter(is_ordinary_topic, {*whole_store.queue_ids, *whole_store.queue_counts}))
    used = description.queue_ids.get(topic, [])
    return used, sorted({*used, *range(description.queue_counts.get(topic, 0))})


def messages(store: StoreReader, queue: Queue, start: int, end: int) -> Iterator[MessageExt]:
    """The messages `start..end` of a queue, read page by page. A note says how many messages retention has deleted."""
    topic, queue_id = queue
    while start < end:
        try:
            for page in store.gather([Range(topic, queue_id, start, end)], max_rows=_PAGE_COUNT):
                yield from page.messages()
                # From here the loop goes on if retention deletes the next messages meanwhile.
                start = page.end
            return
        except OffsetOutOfRangeError as error:
            first = min(error.min, end)
            out.note(
                f"{topic}/{queue_id}: {first - start} messages from {start} on are gone, because retention has deleted "
                "them"
            )
            start = first
        except StoreWentBackwardsError:
            end_now = store.ends([topic]).queues.get(queue, 0)
            if end_now > start:
                raise
            out.note(f"{topic}/{queue_id}: the queue now ends at {end_now}: it was deleted, or the store was restored")
            return


class Cursor:
    """A place in each queue of some topics (None: all topics except the store's own).

    In a store that this project writes, messages come in the order of the log, whatever queue they are in. In a live
    broker's store this is true of the messages of one call of `once`; messages that another queue received meanwhile
    come with the next call.
    """

    def __init__(self, store: StoreReader, topics: list[str] | None) -> None:
        self.store = store
        self.topics = topics
        self.places: Queues = {}
        self._found_topics: list[str] = []
        self._look_at_s = 0.0
        self._seen: Ends | None = None
        self._last: LastRecord | None = None

        self.find_topics()
        created = store.describe(topics).queue_counts if topics else {}
        self.missing = [topic for topic in topics or () if topic not in self._found_topics and topic not in created]

    def find_topics(self) -> None:
        """Add topics that are new, if some time has passed since the last look."""
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _TOPICS_POLL_S
        ids_by_topic = self.store.describe(self.topics, queues=True).queue_ids
        topics = ids_by_topic.keys() - {BATCH_TOPIC} if self.topics is None else ids_by_topic.keys() & set(self.topics)
        self._found_topics = sorted(topics)

    def skip(self, count: int) -> list[MessageExt]:
        """Skip all messages; returns the last `count` ones of all queues together, to which `go_back` may lead."""
        ends = self._places_in(self._ends())
        last = (
            message
            for queue, end in ends.items()
            for message in messages(self.store, queue, max(self.places[queue], end - count), end)
        )
        newest = heapq.nlargest(count, last, key=lambda message: message.physical_offset)
        self.places = ends
        return newest

    def go_back(self, message: MessageExt) -> None:
        """Begin, in the queue of a message, not behind it."""
        queue = message.topic, message.queue_id
        self.places[queue] = min(self.places[queue], message.queue_offset)

    def once(self) -> Iterator[MessageExt]:
        """The messages that have arrived since the last call, in the order of the log."""
        topic_ends = self._ends()
        if topic_ends is self._seen:
            return
        ends = self._places_in(topic_ends)

        # Both may lower places, and the places say which parts there are to read.
        self._look_back()
        if self._seen is not None:
            self._begin_again(topic_ends.restarted_since(self._seen))

        parts = [self._part(queue, ends[queue]) for queue, place in self.places.items() if place < ends[queue]]

        for queue, end in ends.items():
            if end < self.places[queue]:
                topic, queue_id = queue
                out.note(
                    f"{topic}/{queue_id}: the queue went back from {self.places[queue]} to {end}: it was deleted, or "
                    f"the store was restored"
                )
                self.places[queue] = end

        for queue, message in heapq.merge(*parts, key=lambda pair: pair[1].physical_offset):
            self.places[queue] = max(self.places[queue], min(message.queue_offset + 1, ends[queue]))
            yield message
        self.places.update(ends)

        # Not before all is shown: if a file goes while it is read, the next call looks again.
        self._seen = topic_ends

        places = [place for place in self.store.places(self.places).values() if place.size]
        if places:
            newest = max(places, key=lambda place: place.physical_offset)
            self._last = self.store.prove_last(newest.physical_offset, newest.size, with_time=True)

    def _look_back(self) -> None:
        """Go back to what was stored since the newest message that was shown, when another record lies in its place.

        The store was restored or remade then, and its queues may have grown past the places that were reached before.
        """
        last = self._last
        if last is None or last.store_timestamp_ms is None:
            return
        record_now = self.store.prove_last(last.position, last.size)
        if record_now is None or record_now.crc == last.crc:
            return
        out.note("the log was replaced (the store was restored or created again). Continuing with newer messages")
        firsts = self.store.seek(dict.fromkeys(self.places, last.store_timestamp_ms))
        self.places.update({queue: min(place, firsts[queue]) for queue, place in self.places.items()})

    def _begin_again(self, queues: Iterable[Queue]) -> None:
        """Go back to the newer messages of queues that were made again, and have grown past the places reached."""
        behind = 0 if self._last is None else self._last.position + 1
        again = dict.fromkeys(sorted(self.places.keys() & queues), None)
        for queue, first in self.store.seek(again, physical_offset=behind).items():
            if first < self.places[queue]:
                out.note(f"{queue[0]}/{queue[1]}: the queue was made again. Continuing with its newer messages")
                self.places[queue] = first

    def _ends(self) -> Ends:
        """How far the topics reach at one moment; new queues are read from their first message on."""
        topic_ends = self.store.ends(self._found_topics, self._seen)
        if topic_ends is not self._seen:
            self.places |= self.store.begins(queue for queue in topic_ends.queues if queue not in self.places)
        return topic_ends

    def _places_in(self, topic_ends: Ends) -> Queues:
        """The ends of the known queues; a queue that was deleted ends at 0."""
        return {queue: topic_ends.queues.get(queue, 0) for queue in self.places}

    def _part(self, queue: Queue, end: int) -> Iterator[tuple[Queue, MessageExt]]:
        for message in messages(self.store, queue, self.places[queue], end):
            yield queue, message


class Cursors:
    """A place in each queue of some topics in one store, or on all brokers of a cluster.

    The messages of several brokers come in the order of their store times, each broker's own in the order of its log.

    Parameters
    ----------
    stores : dict of str to StoreReader
        By the names of the brokers; one store alone has no name.
    topics : list of str | None
        None: all topics except the store's own.
    more : function, optional
        The stores of brokers that are not among some names. It is asked now and then; they are read from their first
        message.
    """

    def __init__(
        self,
        stores: dict[str, StoreReader],
        topics: list[str] | None,
        more: Callable[[Iterable[str]], dict[str, StoreReader]] | None = None,
    ) -> None:
        self._topics, self._more, self._look_at_s = topics, more, time.monotonic() + _BROKERS_POLL_S
        self._cursors = {name: Cursor(store, topics) for name, store in stores.items()}
        lists = [cursor.missing for cursor in self._cursors.values()]
        missing = [topic for topic in topics or () if all(topic in some for some in lists)]
        if missing:
            out.note(f"these topics do not exist yet: {', '.join(missing)}")

    def skip_to(self, count: int) -> None:
        """Skip all but the last `count` messages of all queues together."""
        last = [(cursor, message) for cursor in self._cursors.values() for message in cursor.skip(count)]
        if len(self._cursors) > 1:
            last = heapq.nlargest(count, last, key=lambda pair: pair[1].store_timestamp_ms)
        for cursor, message in last:
            cursor.go_back(message)

    def once(self) -> Iterator[tuple[str, MessageExt]]:
        """The messages that have arrived since the last call, each with the name of its broker."""
        parts = [self._part(name, cursor) for name, cursor in self._cursors.items()]
        return heapq.merge(*parts, key=lambda pair: pair[1].store_timestamp_ms)

    @staticmethod
    def _part(name: str, cursor: Cursor) -> Iterator[tuple[str, MessageExt]]:
        for message in cursor.once():
            yield name, message

    def follow(self, interrupted: Callable[[], bool]) -> Iterator[tuple[str, MessageExt]]:
        """The existing messages and those that arrive, until `interrupted` returns True."""
        while not interrupted():
            begin_s = time.monotonic()
            try:
                yield from self.once()
                for cursor in self._cursors.values():
                    cursor.find_topics()
            except FileNotFoundError:
                pass  # retention, or the deletion of a topic, removed a file while it was being read: look again
            if self._more is not None and begin_s >= self._look_at_s:
                self._look_at_s = begin_s + _BROKERS_POLL_S
                for name, store in self._more(self._cursors).items():
                    self._cursors[name] = Cursor(store, self._topics)
            looked_s = time.monotonic() - begin_s
            for cursor in self._cursors.values():
                cursor.store.await_change(_POLL_S / len(self._cursors))
            time.sleep(min(_POLL_S, looked_s))  # half of the time belongs to others, whatever a look costs
