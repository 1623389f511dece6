"""One running broker, asked without memory of what it said before. `rocketmq` reads its store with these questions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from isal.isal_zlib import crc32

from messagestore.errors import CorruptionError, StoreClosedError, StoreUnavailableError, UnknownTopicError
from messagestore.format.message import is_ordinary_topic
from messagestore.remoting import Answer, Client, QueueData, Route, codes
from messagestore.remoting.idle_clients import given_back, taken
from messagestore.remoting.replicas import Replicas, Request
from messagestore.spi.interface import Description, LastRecord, Queue, Queues, Range
from messagestore.spi.location import Location
from messagestore.spi.pulls import ANSWERS, GROUP, Records, pull_fields

NAMES_S = 5.0
"""How long the names of topics are kept before the name servers are asked again."""
_SAMPLED = 32
ACCEPTED: Mapping[int, frozenset[int]] = {
    codes.PULL_MESSAGE: ANSWERS,
    codes.VIEW_MESSAGE_BY_ID: frozenset({codes.SUCCESS, codes.SYSTEM_ERROR}),
    codes.QUERY_CONSUMER_OFFSET: frozenset({codes.SUCCESS, codes.QUERY_NOT_FOUND}),
}
"""The answers to requests for what may not be there."""


def client_of(location: Location) -> Client:
    """A client of the cluster at a location, which `given_back` takes in the end."""
    return taken(location.name_servers, location.settings.remoting())


def route_of(client: Client, topic: str, *, fresh: bool = False, waits: bool = False) -> Route:
    """The route of a topic; an empty one if the name servers do not know it."""
    try:
        return client.awaited_route(topic) if waits else client.route(topic, fresh=fresh)
    except UnknownTopicError:
        return Route()


class RunningBroker:
    """A broker that runs, its name servers, and the questions that a reader has for them.

    Parameters
    ----------
    location : Location
    client : Client
        It is given back when the broker is closed.
    name : str
        `brokerName`.

    Attributes
    ----------
    path : str
        The location of this broker's store, for errors.
    group : str
        The consumer group that is named in pulls.
    topic : str | None
        A topic that is read. ACL 2.0 asks for one even with a request for a place in the log.
    """

    def __init__(self, location: Location, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self.path = str(location.of_broker(name))
        self.group = location.settings.group or GROUP
        self.replicas = Replicas(client, name, slaves_first=location.settings.read_from == "slave")
        self.topic: str | None = None
        self.is_closed = False
        self._topic_names: tuple[float, frozenset[str]] | None = None

    def asked(self, requests: Sequence[Request], accepts: Mapping[int, frozenset[int]] = ACCEPTED) -> list[Answer]:
        """The answers to some requests, which are under way together.

        Raises
        ------
        StoreClosedError
        """
        if self.is_closed:
            raise StoreClosedError(f"{self.path}: this reader is closed. Open another one")
        return self.replicas.asked(requests, accepts)

    def close(self) -> None:
        """Ask nothing more. Its connections are there for the next reader of this process."""
        if not self.is_closed:
            self.is_closed = True
            given_back(self.client)

    # ---- topics and queues

    def describe(self, topics: Iterable[str] | None = None, *, queues: bool = False) -> Description:
        """What the name servers know of some topics on this broker (None: of all ordinary ones)."""
        names = sorted(self.topic_names()) if topics is None else list(topics)
        data = {name: self.row_of(name) for name in names}
        if topics is not None and None in data.values():  # name servers forget the topics of a broker that is down
            self.await_known()
            data = {name: self.row_of(name, fresh=True) for name in names}
        on_broker = {name: row for name, row in data.items() if row is not None}
        return Description(
            queue_counts={name: row.write_queue_nums for name, row in on_broker.items()},
            queue_ids={name: [*range(row.read_queue_nums)] for name, row in on_broker.items()} if queues else {},
        )

    def await_known(self) -> None:
        """Wait until the name servers know this broker, which told them its topics when it came."""
        patience = self.replicas.patience()
        self.client.forget_brokers()
        while self.name not in self.client.brokers():
            patience.wait(
                StoreUnavailableError(
                    f"{self.path}: the name servers {self.client.name_servers} do not know broker "
                    f"{self.name}. Is it down?"
                )
            )
            self.client.forget_brokers()

    def row_of(self, topic: str, *, fresh: bool = False) -> QueueData | None:
        """What the name servers say of a topic on this broker."""
        return route_of(self.client, topic, fresh=fresh).queues.get(self.name)

    def topic_names(self) -> frozenset[str]:
        """The names of all ordinary topics that the name servers know, as they said within the last seconds."""
        now_s = time.monotonic()
        if self._topic_names is None or now_s - self._topic_names[0] >= NAMES_S:
            names = frozenset(filter(is_ordinary_topic, self.client.topics()))
            if self._topic_names is not None and self._topic_names[1] == names:
                names = self._topic_names[1]  # the caller's own object
            self._topic_names = now_s, names
        return self._topic_names[1]

    def queues(self, topics: Iterable[str], *, fresh: bool = False) -> list[Queue]:
        """The queues of some topics on this broker that consumers may read."""
        rows = ((topic, self.row_of(topic, fresh=fresh)) for topic in topics)
        return [
            (topic, queue_id)
            for topic, row in rows
            if row is not None and row.is_readable
            for queue_id in range(row.read_queue_nums)
        ]

    def known_queues(self, topics: Iterable[str]) -> list[Queue]:
        """The queues of some topics; of all ordinary ones without a name."""
        names = list(dict.fromkeys(topics))
        for topic in names:
            if self.row_of(topic) is None:
                raise UnknownTopicError(topic, self.describe().queue_counts)
        return self.queues(names or sorted(self.topic_names()))

    def max_offsets(self, queues: Sequence[Queue]) -> list[int]:
        """The number behind the last message of each queue."""
        answers = self.asked([max_offset_request(queue) for queue in queues])
        return [max(0, answer.number("offset")) for answer in answers]

    def min_offsets(self, queues: Sequence[Queue]) -> list[int]:
        """The number of the first message of each queue that is still in the log."""
        requests: list[Request] = [
            (codes.GET_MIN_OFFSET, {"topic": topic, "queueId": queue_id}) for topic, queue_id in queues
        ]
        return [max(0, answer.number("offset")) for answer in self.asked(requests)]

    def bounds(self, queues: Sequence[Queue]) -> tuple[Queues, Queues]:
        """Where some queues begin, and where they end."""
        begins, ends = self.min_offsets(queues), self.max_offsets(queues)
        return dict(zip(queues, begins, strict=True)), dict(zip(queues, ends, strict=True))

    def group_offsets(self, group: str, queues: Sequence[Queue]) -> Queues:
        """How far a consumer group has read, without the queues of which it has read nothing."""
        requests: list[Request] = [
            (
                codes.QUERY_CONSUMER_OFFSET,
                {"consumerGroup": group, "topic": topic, "queueId": queue_id, "setZeroIfNotFound": False},
            )
            for topic, queue_id in queues
        ]
        return {
            queue: answer.number("offset")
            for queue, answer in zip(queues, self.asked(requests), strict=True)
            if answer.code == codes.SUCCESS
        }

    # ---- messages

    def messages(self, offsets: Mapping[Queue, int]) -> dict[Queue, Records]:
        """One message of each queue, by its number. A queue that does not have it is left out."""
        wanted = {queue: offset for queue, offset in offsets.items() if offset >= 0}
        answers = self.asked([self.pull_before(queue, offset + 1) for queue, offset in wanted.items()])
        rows = zip(wanted, map(self._message, wanted.values(), answers), strict=True)
        return {queue: message for queue, message in rows if message is not None}

    def pull_before(self, queue: Queue, offset: int) -> Request:
        """A request for the message before an offset."""
        return codes.PULL_MESSAGE, pull_fields(*queue, offset - 1, 1, self.group)

    def _message(self, offset: int, answer: Answer) -> Records | None:
        """The message in the answer to a pull for it; None: it is not there."""
        if answer.code != codes.SUCCESS or not len(answer.body):
            return None
        records = Records.of([answer.body], self.path)
        row = int(np.searchsorted(records.queue_offsets, offset))
        is_there = row < len(records.sizes) and int(records.queue_offsets[row]) == offset
        return records.rows(row, row + 1) if is_there else None

    def store_times(self, offsets: Mapping[Queue, int]) -> dict[Queue, int]:
        """When some messages were stored, without those that are not there."""
        messages = self.messages(offsets)
        return {queue: int(record.store_timestamps_ms[0]) for queue, record in messages.items()}

    def seek(self, times_ms: Mapping[Queue, int | None], *, physical_offset: int | None = None) -> Queues:
        """The number of each queue's first message at or above a physical offset, or stored after a time."""
        queues = list(times_ms)
        begins, ends = self.bounds(queues)
        hints = self._by_time({queue: time_ms for queue, time_ms in times_ms.items() if time_ms is not None})

        def is_behind(queue: Queue, record: Records) -> bool:
            time_ms = times_ms[queue]
            if physical_offset is not None and int(record.physical_offsets[0]) >= physical_offset:
                return True
            return time_ms is not None and int(record.store_timestamps_ms[0]) > time_ms

        bounds = {queue: (begins[queue], max(begins[queue], ends[queue])) for queue in queues}
        if physical_offset is None:  # no message is behind no time
            bounds |= {queue: (ends[queue], ends[queue]) for queue in queues if times_ms[queue] is None}
        return self._searched(bounds, hints, is_behind)

    def _by_time(self, times_ms: Mapping[Queue, int]) -> Queues:
        """Where the broker says that a time is. Versions differ about what lies around it, so it is a hint."""
        requests = [
            (codes.SEARCH_OFFSET_BY_TIMESTAMP, {"topic": topic, "queueId": queue_id, "timestamp": max(0, time_ms + 1)})
            for (topic, queue_id), time_ms in times_ms.items()
        ]
        return {queue: answer.number("offset") for queue, answer in zip(times_ms, self.asked(requests), strict=True)}

    def _searched(
        self,
        bounds: dict[Queue, tuple[int, int]],
        hints: Mapping[Queue, int],
        is_behind: Callable[[Queue, Records], bool],
    ) -> Queues:
        """The first message of each queue that is behind something, by halving. A hint is looked at first.

        Parameters
        ----------
        bounds : dict of queue to (int, int)
            The message is in `first..last`, or is `last` if no message before that is behind.
        """
        probes = {queue: hint - 1 for queue, hint in hints.items() if bounds[queue][0] < hint <= bounds[queue][1]}
        second = {queue: hint for queue, hint in hints.items() if bounds[queue][0] <= hint < bounds[queue][1]}
        while True:
            for asked in (probes, second):
                messages = self.messages(asked)
                for queue, offset in asked.items():
                    first, last = bounds[queue]
                    record = messages.get(queue)
                    if not first <= offset < last:
                        continue
                    if record is None or not is_behind(queue, record):  # None: retention was faster
                        bounds[queue] = offset + 1, last
                    else:
                        bounds[queue] = first, offset
            probes = {queue: (first + last) // 2 for queue, (first, last) in bounds.items() if first < last}
            second = {}
            if not probes:
                return {queue: first for queue, (first, _) in bounds.items()}

    def mean_sizes(self, ranges: Sequence[Range]) -> list[float]:
        """The mean record size of each range, from its first messages."""
        requests = [
            (
                codes.PULL_MESSAGE,
                pull_fields(span.topic, span.queue_id, span.start, min(_SAMPLED, max(1, span.count)), self.group),
            )
            for span in ranges
        ]
        means = []
        for answer in self.asked(requests):
            sizes = Records.of([answer.body], self.path).sizes if answer.code == codes.SUCCESS else ()
            means.append(float(np.mean(sizes)) if len(sizes) else 0.0)
        return means

    def view_request(self, position: int) -> Request:
        """A request for the record at a place of the log."""
        return codes.VIEW_MESSAGE_BY_ID, {"topic": self.topic, "offset": position}

    def last_of(self, answer: Answer, position: int, size: int) -> LastRecord:
        """What stands at a place of the log, by the answer that has it."""
        time_ms = None
        if len(answer.body) == size:
            # Other bytes than a record are not the one that was read.
            with contextlib.suppress(CorruptionError):
                records = Records.of([answer.body], self.path)
                time_ms = int(records.store_timestamps_ms[0]) if len(records.sizes) else None
        return LastRecord(position, size, crc32(answer.body), time_ms)


def max_offset_request(queue: Queue) -> Request:
    """A request for the number behind the last message of a queue."""
    return codes.GET_MAX_OFFSET, {"topic": queue[0], "queueId": queue[1]}
