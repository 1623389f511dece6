"""Stores of RocketMQ brokers that run: an implementation of `Stores` and `StoreReader` that asks brokers.

A broker is one store: it has one log, to which its physical offsets belong. `rocketmq://ns1:9876;ns2:9876/broker-a` is
the store of the broker `broker-a`, and without a name it is that of the only broker. `parts` names the brokers of a
cluster.

Nothing is registered, and no offset of a group is changed unless `publish_progress` is called. Everything that is asked
for may be asked with the permission of a consumer.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from messagestore.errors import (
    ConfigError,
    CorruptionError,
    StoreClosedError,
    StoreUnavailableError,
    StoreWentBackwardsError,
    UnknownTopicError,
)
from messagestore.format.config import StoreConfig
from messagestore.format.gathered import Gathered
from messagestore.format.message import is_ordinary_topic
from messagestore.log.remembered import corrected
from messagestore.remoting import Answer, Client, Route, codes
from messagestore.remoting.idle_clients import given_back, taken
from messagestore.remoting.replicas import Replicas, Request
from messagestore.spi.interface import (
    GATHERED_ROWS,
    GATHERED_SIZE,
    Description,
    Ends,
    LastRecord,
    Place,
    PlannedRead,
    Proven,
    Queue,
    Queues,
    Range,
    Report,
    StoreWriter,
)
from messagestore.spi.location import Location
from messagestore.spi.pulls import ANSWERS, GROUP, Pull, Records, pull_fields, tell_progress
from messagestore.spi.waits import Waits

LOOK_S = 0.1
"""How often a broker is asked for ends that keeps no requests, as a slave."""
ALL_S = 5.0
"""How often a broker that keeps requests is asked all the same: a queue may have become shorter, or have come."""
NAMES_S = 5.0
"""How long the names of topics are kept before the name servers are asked again."""
MEANS_S = 30.0
"""How long the mean size of a queue's records counts for whoever follows it."""
_SAMPLED = 32
_ACCEPTED = {
    codes.PULL_MESSAGE: ANSWERS,
    codes.VIEW_MESSAGE_BY_ID: frozenset({codes.SUCCESS, codes.SYSTEM_ERROR}),
    codes.QUERY_CONSUMER_OFFSET: frozenset({codes.SUCCESS, codes.QUERY_NOT_FOUND}),
}
"""The answers to requests for what may not be there."""
_NEWS_ANSWERS = {**_ACCEPTED, codes.PULL_MESSAGE: ANSWERS | {codes.TOPIC_NOT_EXIST}}
"""The same with those after which a topic was deleted: its ends, which are asked for then, say so better."""


class RocketMQStores:
    """The stores of running brokers. It holds nothing, so that a task receives only its name."""

    def reader(
        self,
        location: Location,
        config: StoreConfig | None = None,  # noqa: ARG002
        proven: Proven | None = None,  # noqa: ARG002
        *,
        to_gather: bool = False,  # noqa: ARG002 - opening asks no broker
    ) -> RocketMQReader:
        """Open the store of a broker for reading; the broker is asked by the first call."""
        client = client_of(location)
        name = location.broker
        if not name:
            names = sorted(client.brokers())
            if len(names) != 1:
                given_back(client)
                raise ConfigError(
                    f"{location}: found the brokers {', '.join(names) or 'none'}; allowed is one. Give one of them, as "
                    f"in {location.of_broker((names or ['broker-a'])[0])}",
                    key="path",
                    value=str(location),
                )
            name = names[0]
        return RocketMQReader(location, client, name)

    def writer(self, location: Location, config: StoreConfig, **_options: Any) -> StoreWriter:  # noqa: ARG002
        """Refuse: a broker takes messages from producers, and has no batches."""
        _cannot(location, "writes")

    def parts(
        self, location: Location, topics: Iterable[str] | None = None, *, waits: bool = False
    ) -> dict[str, Location]:
        """The stores of a cluster, by the names of their brokers; with topics, those that have one of them.

        With `waits`, a topic that the name servers do not know is waited for, for as long as `retry_timeout_s`.
        """
        client = client_of(location)
        try:
            if location.broker:
                return {location.broker: location}
            if topics is None:
                names = set(client.brokers())
            else:
                names = {name for topic in topics for name in _route(client, topic, waits=waits).queues}
            return {name: location.of_broker(name) for name in sorted(names)}
        finally:
            given_back(client)


ROCKETMQ_STORES = RocketMQStores()


def client_of(location: Location) -> Client:
    """A client of the cluster at a location, which `given_back` takes in the end."""
    return taken(location.name_servers, location.settings.remoting())


def _cannot(location: Location, what: str) -> NoReturn:
    raise ConfigError(
        f"{location}: found the address of RocketMQ brokers; nothing here {what} there. Give the folder of a store, or "
        f"the URL of one that is served",
        key="path",
        value=str(location),
    )


def _route(client: Client, topic: str, *, fresh: bool = False, waits: bool = False) -> Route:
    try:
        return client.awaited_route(topic) if waits else client.route(topic, fresh=fresh)
    except UnknownTopicError:
        return Route()


@dataclass
class _Look:
    """What a broker said since a look at its ends. It is asked for the same again only after the next look.

    Whoever follows queues asks the same several times in a step: what he read last, where his step ends, and what of it
    is planned. What changes after the look is found by the tasks, or with the next look.
    """

    connect_count: int
    """Of the client, when all queues were asked for: with another connection, nothing of this may hold."""
    address: str = ""
    """Who said it."""
    begun_s: float = field(default_factory=time.monotonic)
    begins: Queues = field(default_factory=dict)
    places: dict[tuple[Queue, int], Place | None] = field(default_factory=dict)
    """By queue and offset."""
    lasts: dict[tuple[int, int], LastRecord] = field(default_factory=dict)
    """By position and size, with store times."""

    def without(self, queues: Container[Queue]) -> _Look:
        """What still holds when some queues have new messages: nothing that was said of these, or of the log."""
        return _Look(
            self.connect_count,
            self.address,
            self.begun_s,
            {queue: begin for queue, begin in self.begins.items() if queue not in queues},
            {item: place for item, place in self.places.items() if item[0] not in queues},
        )


class RocketMQReader:
    """The store of a running broker, opened for reading.

    Parameters
    ----------
    location : Location
    client : Client
    name : str
        `brokerName`.
    """

    def __init__(self, location: Location, client: Client, name: str) -> None:
        self._location, self._client, self._name = location, client, name
        self._replicas = Replicas(client, name, slaves_first=location.settings.read_from == "slave")
        self._group = location.settings.group or GROUP
        self._path = str(location.of_broker(name))
        self._waits = Waits(self._replicas, self._group)
        self._look: _Look | None = None
        """None: nobody follows queues, so each question is asked."""
        self._means: dict[Queue, tuple[float, float]] = {}
        """When the mean size of a queue's records was asked for, and the size."""
        self._instance, self._serials = uuid.uuid4().hex, itertools.count()
        self._answers: dict[tuple[tuple[str, ...], bool], Ends] = {}
        self._looked_s: dict[tuple[tuple[str, ...], bool], float] = {}
        self._topic_names: tuple[float, frozenset[str]] | None = None
        self._ends: Queues = {}
        """The largest end of each queue that was seen."""
        self._deleted: set[Queue] = set()
        """Queues of these that name servers have not known for as long as `retry_timeout_s`."""
        self._shrinks: Queues = {}
        self._topic: str | None = None
        """A topic that is read. ACL 2.0 asks for one even with a request for a place in the log."""
        self._is_closed = False

    def _asked(self, requests: Sequence[Request], accepts: Mapping[int, frozenset[int]] = _ACCEPTED) -> list[Answer]:
        if self._is_closed:
            raise StoreClosedError(f"{self._path}: this reader is closed. Open another one")
        return self._replicas.asked(requests, accepts)

    # ---- what there is

    def describe(self, topics: Iterable[str] | None = None, *, queues: bool = False) -> Description:
        """What the name servers know of some topics on this broker (None: of all ordinary ones)."""
        names = sorted(self._names()) if topics is None else list(topics)
        data = {name: _route(self._client, name).queues.get(self._name) for name in names}
        if topics is not None and None in data.values():  # name servers forget the topics of a broker that is down
            self._await_broker()
            data = {name: _route(self._client, name, fresh=True).queues.get(self._name) for name in names}
        on_broker = {name: row for name, row in data.items() if row is not None}
        return Description(
            queue_counts={name: row.write_queue_nums for name, row in on_broker.items()},
            queue_ids={name: [*range(row.read_queue_nums)] for name, row in on_broker.items()} if queues else {},
        )

    def _await_broker(self) -> None:
        """Wait until the name servers know the broker, which told them its topics when it came."""
        patience = self._replicas.patience()
        self._client.forget_brokers()
        while self._name not in self._client.brokers():
            patience.wait(
                StoreUnavailableError(
                    f"{self._path}: the name servers {self._client.name_servers} do not know broker "
                    f"{self._name}. Is it down?"
                )
            )
            self._client.forget_brokers()

    def broker_name(self) -> str:
        """The name of the broker."""
        return self._name

    def _names(self) -> frozenset[str]:
        """The names of all ordinary topics that the name servers know, as they said within the last seconds."""
        now_s = time.monotonic()
        if self._topic_names is None or now_s - self._topic_names[0] >= NAMES_S:
            names = frozenset(filter(is_ordinary_topic, self._client.topics()))
            if self._topic_names is not None and self._topic_names[1] == names:
                names = self._topic_names[1]  # the caller's own object
            self._topic_names = now_s, names
        return self._topic_names[1]

    def _queues(self, topics: Iterable[str], *, fresh: bool = False) -> list[Queue]:
        """The queues of some topics on this broker that consumers may read."""
        rows = ((topic, _route(self._client, topic, fresh=fresh).queues.get(self._name)) for topic in topics)
        return [
            (topic, queue_id)
            for topic, row in rows
            if row is not None and row.is_readable
            for queue_id in range(row.read_queue_nums)
        ]

    # ---- ends

    def ends(self, topics: Sequence[str], since: Ends | None = None, *, names: bool = False) -> Ends:
        """How far the queues of some topics reach. The broker is asked when it has answered a request that it kept."""
        key, now_s = (tuple(topics), names), time.monotonic()
        before = self._answers.get(key)
        if before is not None and since is before and not self._is_closed:
            fresh_s = LOOK_S if not self._waits.is_armed else ALL_S if self._waits.is_quiet(before.queues) else 0.0
            if now_s - self._looked_s[key] < fresh_s:
                return before

        queues = self._awaited_queues(topics)
        self._topic = next((topic for topic, _ in queues), self._topic)
        ends = self._looked_at(queues, follows=since is not None)
        for queue, end in ends.items():
            if end < self._ends.get(queue, 0) and not self._replicas.is_slave:
                self._shrinks[queue] = self._shrinks.get(queue, 0) + 1
            self._ends[queue] = end

        topic_names = self._names() if names else None
        shrinks = {queue: self._shrinks[queue] for queue in queues if queue in self._shrinks}
        recovered = not self._replicas.is_slave
        if before is not None and (before.queues, before.topic_names, before.shrinks, before.recovered) == (
            ends,
            topic_names,
            shrinks,
            recovered,
        ):
            answer = before
        else:
            if before is not None and before.queues == ends:
                ends = before.queues
            answer = Ends(
                "",
                ends,
                topic_names,
                shrinks=shrinks,
                recovered=recovered,
                instance=self._instance,
                serial=next(self._serials),
            )
        self._answers[key], self._looked_s[key] = answer, now_s
        if since is not None:  # whoever asks once does not wait
            self._waits.arm(ends)
        return answer

    def _awaited_queues(self, topics: Sequence[str]) -> list[Queue]:
        """The queues of some topics. Name servers forget those of a broker that is down, so these are waited for."""
        queues = self._queues(topics)
        if queues and not self._lost(topics, queues):
            return queues

        patience = self._replicas.patience()
        while True:
            self._await_broker()
            queues = self._queues(topics, fresh=True)
            lost = self._lost(topics, queues)
            if not lost:
                return queues
            topic, queue_id = min(lost)
            try:
                words = f"{self._path}: the name servers do not know queue {queue_id} of {topic} now"
                patience.wait(StoreUnavailableError(words))
            except StoreUnavailableError:
                self._deleted |= lost
                return queues

    def _lost(self, topics: Sequence[str], queues: list[Queue]) -> set[Queue]:
        """The queues that were there before, and are not among those that the name servers know."""
        self._deleted.difference_update(queues)
        return {queue for queue in self._ends if queue[0] in topics}.difference(queues, self._deleted)

    def _looked_at(self, queues: Sequence[Queue], *, follows: bool) -> Queues:
        """The ends of some queues. All are asked for every `ALL_S`, and whenever more may have changed than that there
        are new messages.
        """
        look = self._look
        if follows and look is not None and time.monotonic() - look.begun_s < ALL_S:
            ends = self._with_news(look, queues)
            if ends is not None:
                return ends
        connect_count = self._client.connect_count
        answers = self._asked([_max_offset(queue) for queue in queues])
        address = answers[0].address if answers else ""
        self._look = _Look(connect_count, address) if follows else None
        return {queue: max(0, answer.number("offset")) for queue, answer in zip(queues, answers, strict=True)}

    def _with_news(self, before: _Look, queues: Sequence[Queue]) -> Queues | None:
        """The ends of queues for each of which the broker keeps a request. Only those with new messages are asked for.

        One request has the message before the old end, by which the queue is recognised, and the first new one. The
        newest record of before is compared, too.

        Returns
        -------
        dict or None
            None: more than that may have changed.
        """
        news = self._waits.news(queues)
        if not news:
            return None

        self._look = look = before.without(news)
        last = max(before.lasts, default=None)
        comes = {place.physical_offset for item in news.items() if (place := before.places.get(item)) is not None}
        requests: list[Request] = [
            (codes.PULL_MESSAGE, pull_fields(*queue, max(0, end - 1), 2, self._group)) for queue, end in news.items()
        ]
        views = [self._view(last[0])] if last is not None and last[0] not in comes else []
        answers = self._asked([*requests, *views], _NEWS_ANSWERS)
        if self._client.connect_count != look.connect_count or any(each.address != look.address for each in answers):
            return None

        ends = {queue: self._ends[queue] for queue in queues}
        for (queue, end), answer in zip(news.items(), answers, strict=False):
            if answer.code != codes.SUCCESS or answer.number("maxOffset") <= end:
                return None
            self._noted(queue, answer)
            look.begins[queue], ends[queue] = max(0, answer.number("minOffset")), answer.number("maxOffset")
        if last is not None and views and answers[-1].code == codes.SUCCESS:
            look.lasts[last] = self._last_of(answers[-1], *last)
        return ends

    def _max_offsets(self, queues: Sequence[Queue]) -> list[int]:
        return [max(0, answer.number("offset")) for answer in self._asked([_max_offset(queue) for queue in queues])]

    def await_change(self, timeout_s: float) -> None:
        """Wait until the broker has a message behind the ends that `ends` has returned last."""
        if self._waits.is_armed:
            self._waits.wait(timeout_s)
        else:
            time.sleep(max(0.0, min(timeout_s, LOOK_S)))

    def begins(self, queues: Iterable[Queue]) -> Queues:
        """The number of the first message of each queue that is still in the log."""
        wanted = list(queues)
        known = {} if self._look is None else self._look.begins
        left = [queue for queue in wanted if queue not in known]
        answers = self._asked([_min_offset(queue) for queue in left])
        found = {queue: max(0, answer.number("offset")) for queue, answer in zip(left, answers, strict=True)}
        if self._look is not None:
            self._look.begins |= found
        return {queue: found[queue] if queue in found else known[queue] for queue in wanted}

    # ---- single messages

    def _messages(self, offsets: Mapping[Queue, int]) -> dict[Queue, Records]:
        """One message of each queue, by its number. A queue that does not have it is left out."""
        wanted = {queue: offset for queue, offset in offsets.items() if offset >= 0}
        answers = self._asked([self._pull_before(queue, offset + 1) for queue, offset in wanted.items()])
        found = zip(wanted, map(self._message, wanted.values(), answers), strict=True)
        return {queue: message for queue, message in found if message is not None}

    def _pull_before(self, queue: Queue, offset: int) -> Request:
        return codes.PULL_MESSAGE, pull_fields(*queue, offset - 1, 1, self._group)

    def _message(self, offset: int, answer: Answer) -> Records | None:
        """The message in the answer to a pull for it; None: it is not there."""
        if answer.code != codes.SUCCESS or not len(answer.body):
            return None
        records = Records.of([answer.body], self._path)
        row = int(np.searchsorted(records.queue_offsets, offset))
        is_there = row < len(records.sizes) and int(records.queue_offsets[row]) == offset
        return records.rows(row, row + 1) if is_there else None

    def places(self, offsets: Mapping[Queue, int]) -> dict[Queue, Place]:
        """Where the message before each offset lies."""
        known = {} if self._look is None else self._look.places
        left = [(queue, offset) for queue, offset in offsets.items() if offset > 0 and (queue, offset) not in known]
        answers = self._asked([self._pull_before(queue, offset) for queue, offset in left])
        found: dict[tuple[Queue, int], Place | None] = {
            (queue, offset): self._noted(queue, answer).get(offset)
            for (queue, offset), answer in zip(left, answers, strict=True)
        }
        if self._look is not None:
            self._look.places |= found
        places = {queue: found.get((queue, offset), known.get((queue, offset))) for queue, offset in offsets.items()}
        return {queue: place for queue, place in places.items() if place is not None}

    def _noted(self, queue: Queue, answer: Answer) -> dict[int, Place]:
        """Where the messages in an answer lie, by the offsets behind them. The look keeps it."""
        if answer.code != codes.SUCCESS or not len(answer.body):
            return {}
        records = Records.of([answer.body], self._path)
        rows = [
            *zip(records.queue_offsets.tolist(), records.physical_offsets.tolist(), records.sizes.tolist(), strict=True)
        ]
        places = {offset + 1: Place(position, size) for offset, position, size in rows}
        if self._look is None:
            return places

        self._look.places.update({(queue, offset): place for offset, place in places.items()})
        # A message of a batch that the broker keeps as one is not what stands at its place in the log.
        if np.array_equal(records.data, np.frombuffer(answer.body, np.uint8)):
            starts, times_ms = records.positions.tolist(), records.store_timestamps_ms.tolist()
            for start, time_ms, (_, position, size) in zip(starts, times_ms, rows, strict=True):
                crc = crc32(records.data[start : start + size])
                self._look.lasts[position, size] = LastRecord(position, size, crc, time_ms)
        return places

    def seek(self, times_ms: Mapping[Queue, int | None], *, physical_offset: int | None = None) -> Queues:
        """The number of each queue's first message at or above a physical offset, or stored after a time."""
        queues = list(times_ms)
        begins, ends = self.begins(queues), dict(zip(queues, self._max_offsets(queues), strict=True))
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
        return {queue: answer.number("offset") for queue, answer in zip(times_ms, self._asked(requests), strict=True)}

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
                messages = self._messages(asked)
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

    def prove_last(self, position: int, size: int, *, with_time: bool = False) -> LastRecord | None:
        """The record that begins at a place in the log, by VIEW_MESSAGE_BY_ID."""
        last = None if self._look is None else self._look.lasts.get((position, size))
        if last is None:
            (answer,) = self._asked([self._view(position)])
            if answer.code != codes.SUCCESS:
                return None if self._is_below_log(position) else LastRecord(position, size, -1)
            last = self._last_of(answer, position, size)
            if self._look is not None:
                self._look.lasts[position, size] = last
        return last if with_time else replace(last, store_timestamp_ms=None)

    def _view(self, position: int) -> Request:
        return codes.VIEW_MESSAGE_BY_ID, {"topic": self._topic, "offset": position}

    def _last_of(self, answer: Answer, position: int, size: int) -> LastRecord:
        """What stands at a place of the log, by the answer that has it."""
        time_ms = None
        if len(answer.body) == size:
            # Other bytes than a record are not the one that was read.
            with contextlib.suppress(CorruptionError):
                records = Records.of([answer.body], self._path)
                time_ms = int(records.store_timestamps_ms[0]) if len(records.sizes) else None
        return LastRecord(position, size, crc32(answer.body), time_ms)

    def _is_below_log(self, position: int) -> bool:
        """Whether nothing is at a place because retention deleted it; True if that cannot be said of a slave.

        A log that still has a later record has lost nothing at its end, and retention deletes nothing behind an earlier
        one. A log whose queues are empty has lost it all.
        """
        if self._replicas.is_slave:
            return True
        ends = {queue: end for queue, end in self._ends.items() if end}
        begins = self.begins(ends)
        left = {queue: end for queue, end in ends.items() if begins[queue] < end}
        firsts, lasts = self.places({queue: begins[queue] + 1 for queue in left}), self.places(left)
        if any(place.physical_offset < position for place in firsts.values()):
            return False
        return not left or any(place.physical_offset > position for place in lasts.values())

    # ---- ranges

    def mean_sizes(self, ranges: Sequence[Range]) -> list[float]:
        """The mean record size of each range, from its first messages.

        Whoever follows the queues is told what it was within the last seconds, or the size of the range's last message
        if that is larger.
        """
        if self._look is None:
            return self._asked_means(ranges)
        before_s = time.monotonic() - MEANS_S
        left = [span for span in ranges if self._means.get((span.topic, span.queue_id), (0.0, 0.0))[0] < before_s]
        for span, mean in zip(left, self._asked_means(left), strict=True):
            self._means[span.topic, span.queue_id] = time.monotonic(), mean
        means = []
        for span in ranges:
            queue = span.topic, span.queue_id
            last = self._look.places.get((queue, span.end))
            means.append(max(self._means[queue][1], 0.0 if last is None else last.size))
        return means

    def _asked_means(self, ranges: Sequence[Range]) -> list[float]:
        requests = [
            (
                codes.PULL_MESSAGE,
                pull_fields(span.topic, span.queue_id, span.start, min(_SAMPLED, max(1, span.count)), self._group),
            )
            for span in ranges
        ]
        means = []
        for answer in self._asked(requests):
            sizes = Records.of([answer.body], self._path).sizes if answer.code == codes.SUCCESS else ()
            means.append(float(np.mean(sizes)) if len(sizes) else 0.0)
        return means

    def sizes(self, ranges: Sequence[Range]) -> list[NDArray[np.int32]]:
        """The size of each record of some ranges. A consumer cannot ask for units, so the records are pulled."""
        return [self._sizes(span) for span in ranges]

    def _sizes(self, span: Range) -> NDArray[np.int32]:
        blocks = Pull(self._replicas, span, self._path, self._group).blocks(GATHERED_ROWS, GATHERED_SIZE)
        return np.concatenate([np.empty(0, np.int32), *(block.sizes for block in blocks)])

    def find(self, topics: Sequence[str], keys: Sequence[str]) -> dict[Queue, list[int]]:  # noqa: ARG002
        """Refuse: a broker searches its index only for the newest messages with a key."""
        _cannot(self._location, "finds messages by their keys")

    def proven(self, parts: Sequence[Sequence[Range]]) -> list[Proven | None]:
        """Nothing: a broker shows only what it has recovered."""
        return [None] * len(parts)

    def gather(
        self,
        ranges: Sequence[Range],
        *,
        planned: PlannedRead | None = None,
        max_rows: int = GATHERED_ROWS,
        max_size: int = GATHERED_SIZE,
        tags_codes: frozenset[int] | None = None,  # noqa: ARG002 - the broker would leave gaps in the numbers
    ) -> Iterator[Gathered]:
        """The bytes of the records of some ranges. The plan is compared again whenever a connection broke."""

        def check() -> None:
            if planned is not None and planned.last is not None:
                self._check_last(planned.last)

        self._topic = next((span.topic for span in ranges), None)
        pulls = [Pull(self._replicas, span, self._path, self._group, check) for span in ranges]
        for pull, following in itertools.pairwise(pulls):
            pull.following = following
        if pulls and not self._is_closed:
            pulls[0].ask_ahead()
        check()

        has_last = False
        for pull in pulls:
            for block in pull.blocks(max_rows, max_size):
                has_last |= planned is not None and self._has_last(planned, block)
                yield block
        if not has_last:
            check()

    def _check_last(self, last: LastRecord) -> None:
        """Check that the last record that was planned is in the log."""
        if not last.is_there(self.prove_last(last.position, last.size)):
            raise self._changed(f"the record at physical offset {last.position}")

    def _has_last(self, planned: PlannedRead, block: Gathered) -> bool:
        """Check that the records of a block were in the log when they were planned. Whether the last one is here."""
        if planned.physical_offset:
            for row in np.flatnonzero(block.physical_offsets >= planned.physical_offset)[:1].tolist():
                raise self._changed(f"message {block.queue_offsets[row]} of {block.topic}/{block.queue_id}")

        last = planned.last
        rows = () if last is None else np.flatnonzero(block.physical_offsets == last.position).tolist()
        for row in rows:
            start, size = int(block.positions[row]), int(block.sizes[row])
            if last is not None and (size, crc32(block.data[start : start + size])) != (last.size, last.crc):
                raise self._changed(f"the record at physical offset {last.position}")
        return bool(rows)

    def _changed(self, what: str) -> StoreWentBackwardsError:
        return StoreWentBackwardsError(
            f"{self._path}: {what} has changed since this micro-batch was planned: the broker lost the end of its log, "
            f"another broker has its name, or the topic was created again. Restart the query"
        )

    # ---- others

    def publish_progress(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Tell the broker how far a query has read, as the offsets of a consumer group."""
        tell_progress(self._asked, group, offsets)

    def published_progress(self, group: str) -> Queues:
        """How far a consumer group has read in the queues that this reader has followed."""
        queues = list(self._ends) or self._queues(sorted(self._names()))
        requests = [
            (
                codes.QUERY_CONSUMER_OFFSET,
                {"consumerGroup": group, "topic": topic, "queueId": queue_id, "setZeroIfNotFound": False},
            )
            for topic, queue_id in queues
        ]
        return {
            queue: answer.number("offset")
            for queue, answer in zip(queues, self._asked(requests), strict=True)
            if answer.code == codes.SUCCESS
        }

    # ---- reports

    def view(self, name: str) -> Report:
        """The view "topics", of what name servers and the broker say. Other views are of a store's files: refused."""
        if name != "topics":
            _cannot(self._location, f"shows the view {name}")
        names = sorted(self._names())
        queues = self._queues(names)
        counts = dict.fromkeys(names, 0)
        begins = self.begins(queues)
        for (topic, queue_id), end in zip(queues, self._max_offsets(queues), strict=True):
            counts[topic] += max(0, end - begins[topic, queue_id])

        rows = []
        for topic in names:
            data = _route(self._client, topic).queues.get(self._name)
            if data is not None:
                rows.append(
                    {
                        "topic": topic,
                        "writeQueueNums": data.write_queue_nums,
                        "readQueueNums": data.read_queue_nums,
                        "perm": data.perm,
                        "order": None,  # name servers do not say
                        "topicFilterType": None,
                        "topicSysFlag": data.topic_sys_flag,
                        "attributes": None,
                        "queues": data.read_queue_nums,
                        "messages": counts[topic],
                    }
                )
        return rows, []

    def offsets(self, topics: Sequence[str] = (), at_ms: int | None = None) -> Report:
        """How far the queues of some topics reach, and where they were at a time."""
        queues = self._known_queues(topics)
        begins, ends = self.begins(queues), dict(zip(queues, self._max_offsets(queues), strict=True))
        rows: list[dict[str, Any]] = [
            {
                "topic": topic,
                "queueId": queue_id,
                "minOffset": begins[topic, queue_id],
                "maxOffset": end,
                "messages": end - begins[topic, queue_id],
            }
            for (topic, queue_id), end in ends.items()
        ]
        if at_ms is not None:
            found = self.seek(dict.fromkeys(queues, at_ms - 1))
            times_ms = self._store_times(found)
            for queue, row in zip(queues, rows, strict=True):
                row |= {"offset": found[queue], "storeTimestamp": times_ms.get(queue)}
        return rows, []

    def _known_queues(self, topics: Iterable[str]) -> list[Queue]:
        """The queues of some topics; of all ordinary ones without a name."""
        names = list(dict.fromkeys(topics))
        for topic in names:
            if self._name not in _route(self._client, topic).queues:
                raise UnknownTopicError(topic, self.describe().queue_counts)
        return self._queues(names or sorted(self._names()))

    def _store_times(self, offsets: Mapping[Queue, int]) -> dict[Queue, int]:
        """When some messages were stored, without those that are not there."""
        messages = self._messages(offsets)
        return {queue: int(record.store_timestamps_ms[0]) for queue, record in messages.items()}

    def lag(self, offsets: Mapping[Queue, int], topics: Iterable[str] = ()) -> Report:
        """How far a reader is behind the end of each queue.

        `lagBytes` is an estimate from the first messages of each queue's lag: consumers cannot ask for sizes.
        """
        queues = sorted({*self._queues({*topics, *(topic for topic, _ in offsets)}), *offsets})
        begins, ends = self.begins(queues), dict(zip(queues, self._max_offsets(queues), strict=True))
        places = {queue: corrected(offsets.get(queue, 0), begins[queue], ends[queue]) for queue in queues}
        firsts = {queue: max(place, begins[queue]) for queue, place in places.items()}
        behind = [Range(*queue, first, ends[queue]) for queue, first in firsts.items() if first < ends[queue]]
        sizes = {
            (span.topic, span.queue_id): round(mean * span.count)
            for span, mean in zip(behind, self.mean_sizes(behind), strict=True)
        }
        times_ms = self._store_times({(span.topic, span.queue_id): span.start for span in behind})

        rows, faults = list[dict[str, Any]](), list[str]()
        for queue in queues:
            (topic, queue_id), offset, low, high = queue, offsets.get(queue), begins[queue], ends[queue]
            if offset is not None and offset > high:
                faults.append(
                    f"{topic}/{queue_id}: the reader is at {offset}, but the queue ends at {high}: the topic was "
                    f"deleted, or the broker lost messages. The lag counts from {places[queue]}"
                )
            elif offset is not None and places[queue] < low:
                faults.append(
                    f"{topic}/{queue_id}: retention has deleted {low - places[queue]} messages that were not read"
                )
            rows.append(
                {
                    "topic": topic,
                    "queueId": queue_id,
                    "committedOffset": offset,
                    "minOffset": low,
                    "maxOffset": high,
                    "lag": high - (firsts[queue] if offset is None else places[queue]),
                    "beyond": max((offset or 0) - high, 0),
                    "lagBytes": sizes.get(queue, 0),
                    "oldestUnread": times_ms.get(queue),
                }
            )
        return rows, faults

    def group_lag(self, group: str) -> Report:
        """How far a consumer group is behind in the topics of which it has read a queue."""
        offsets = self.published_progress(group)
        return self.lag(offsets) if offsets else ([], [])

    def close(self) -> None:
        """Ask nothing more. Its connections are there for the next reader of this process."""
        if not self._is_closed:
            self._is_closed = True
            given_back(self._client)


def _max_offset(queue: Queue) -> Request:
    return codes.GET_MAX_OFFSET, {"topic": queue[0], "queueId": queue[1]}


def _min_offset(queue: Queue) -> Request:
    return codes.GET_MIN_OFFSET, {"topic": queue[0], "queueId": queue[1]}
