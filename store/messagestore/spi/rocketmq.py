"""Stores of RocketMQ brokers that run: an implementation of `Stores` and `StoreReader` that asks brokers.

A broker is one store: it has one log, to which its physical offsets belong. `rocketmq://ns1:9876;ns2:9876/broker-a` is
the store of the broker `broker-a`, and without a name it is that of the only broker. `parts` names the brokers of a
cluster.

Nothing is registered, and no offset of a group is changed unless `publish_progress` is called. Everything that is asked
for may be asked with the permission of a consumer.
"""

from __future__ import annotations

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
    StoreUnavailableError,
    StoreWentBackwardsError,
)
from messagestore.format.config import StoreConfig
from messagestore.format.gathered import Gathered
from messagestore.remoting import Answer, Client, codes
from messagestore.remoting.idle_clients import given_back
from messagestore.remoting.replicas import Request
from messagestore.spi import broker_reports
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
from messagestore.spi.pulls import ANSWERS, Pull, Records, pull_fields, tell_progress
from messagestore.spi.running_broker import ACCEPTED, RunningBroker, client_of, max_offset_request, route_of
from messagestore.spi.waits import Waits

LOOK_S = 0.1
"""How often a broker that keeps no requests, such as a slave, is asked for ends."""
ALL_S = 5.0
"""How often a broker that keeps requests is asked all the same: a queue may be shorter than before, or new."""
MEANS_S = 30.0
"""How long the mean size of a queue's records counts for whoever follows it."""
_NEWS_ANSWERS = {**ACCEPTED, codes.PULL_MESSAGE: ANSWERS | {codes.TOPIC_NOT_EXIST}}
"""The same, and those that say that a topic was deleted: the request for its ends, which follows, gives a better error.
"""


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
                names = {name for topic in topics for name in route_of(client, topic, waits=waits).queues}
            return {name: location.of_broker(name) for name in sorted(names)}
        finally:
            given_back(client)


ROCKETMQ_STORES = RocketMQStores()


def _cannot(location: Location, what: str) -> NoReturn:
    raise ConfigError(
        f"{location}: found the address of RocketMQ brokers; nothing here {what} there. Give the folder of a store, or "
        f"the URL of one that is served",
        key="path",
        value=str(location),
    )


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
        self._location = location
        self._broker = broker = RunningBroker(location, client, name)
        self._waits = Waits(broker.replicas, broker.group)
        self._look: _Look | None = None
        """None: nobody follows queues, so each question is asked."""
        self._means: dict[Queue, tuple[float, float]] = {}
        """When the mean size of a queue's records was asked for, and the size."""
        self._instance, self._serials = uuid.uuid4().hex, itertools.count()
        self._answers: dict[tuple[tuple[str, ...], bool], Ends] = {}
        self._looked_s: dict[tuple[tuple[str, ...], bool], float] = {}
        self._ends: Queues = {}
        """The largest end of each queue that was seen."""
        self._deleted: set[Queue] = set()
        """Queues of these that name servers have not known for as long as `retry_timeout_s`."""
        self._shrinks: Queues = {}

    def describe(self, topics: Iterable[str] | None = None, *, queues: bool = False) -> Description:
        """What the name servers know of some topics on this broker (None: of all ordinary ones)."""
        return self._broker.describe(topics, queues=queues)

    def broker_name(self) -> str:
        """The name of the broker."""
        return self._broker.name

    # ---- ends

    def ends(self, topics: Sequence[str], since: Ends | None = None, *, names: bool = False) -> Ends:
        """How far the queues of some topics reach. The broker is asked when it has answered a request that it kept."""
        key, now_s = (tuple(topics), names), time.monotonic()
        before = self._answers.get(key)
        follows = since is not None
        is_repeated = since is before and not self._broker.is_closed
        if before is not None and is_repeated and now_s - self._looked_s[key] < self._fresh_s(before):
            return before

        queues = self._awaited_queues(topics)
        self._broker.topic = next((topic for topic, _ in queues), self._broker.topic)
        ends = self._looked_at(queues, follows=follows)
        self._count_shrinks(ends)

        # The caller gets his own objects back while nothing has changed.
        if before is not None and before.queues == ends:
            ends = before.queues
        answer = Ends(
            "",
            ends,
            self._broker.topic_names() if names else None,
            shrinks={queue: self._shrinks[queue] for queue in queues if queue in self._shrinks},
            recovered=not self._broker.replicas.is_slave,
            instance=self._instance,
            serial=0 if before is None else before.serial,
        )
        answer = before if before is not None and answer == before else replace(answer, serial=next(self._serials))

        self._answers[key], self._looked_s[key] = answer, now_s
        if follows:  # whoever asks once does not wait
            self._waits.arm(ends)
        return answer

    def _fresh_s(self, answer: Ends) -> float:
        """For how many seconds an answer holds without a look."""
        if not self._waits.is_armed:
            return LOOK_S
        return ALL_S if self._waits.is_quiet(answer.queues) else 0.0

    def _count_shrinks(self, ends: Queues) -> None:
        """Count the queues that have become shorter. A slave may only be behind its master, and is not counted."""
        for queue, end in ends.items():
            if end < self._ends.get(queue, 0) and not self._broker.replicas.is_slave:
                self._shrinks[queue] = self._shrinks.get(queue, 0) + 1
            self._ends[queue] = end

    def _awaited_queues(self, topics: Sequence[str]) -> list[Queue]:
        """The queues of some topics. Name servers forget those of a broker that is down, so these are waited for."""
        queues = self._broker.queues(topics)
        if queues and not self._lost(topics, queues):
            return queues

        patience = self._broker.replicas.patience()
        while True:
            self._broker.await_known()
            queues = self._broker.queues(topics, fresh=True)
            lost = self._lost(topics, queues)
            if not lost:
                return queues
            topic, queue_id = min(lost)
            try:
                words = f"{self._broker.path}: the name servers do not know queue {queue_id} of {topic} now"
                patience.wait(StoreUnavailableError(words))
            except StoreUnavailableError:
                self._deleted |= lost
                return queues

    def _lost(self, topics: Sequence[str], queues: list[Queue]) -> set[Queue]:
        """The queues that were there before, and are not among those that the name servers know."""
        self._deleted.difference_update(queues)
        return {queue for queue in self._ends if queue[0] in topics}.difference(queues, self._deleted)

    def _looked_at(self, queues: Sequence[Queue], *, follows: bool) -> Queues:
        """The ends of some queues. All are asked for every `ALL_S` seconds, and whenever anything but new messages may
        have changed them.
        """
        look = self._look
        if follows and look is not None and time.monotonic() - look.begun_s < ALL_S:
            ends = self._with_news(look, queues)
            if ends is not None:
                return ends
        connect_count = self._broker.client.connect_count
        answers = self._broker.asked([max_offset_request(queue) for queue in queues])
        address = answers[0].address if answers else ""
        self._look = _Look(connect_count, address) if follows else None
        return {queue: max(0, answer.number("offset")) for queue, answer in zip(queues, answers, strict=True)}

    def _with_news(self, before: _Look, queues: Sequence[Queue]) -> Queues | None:
        """The ends of queues for each of which the broker keeps a request. Only those with new messages are asked for.

        One request gets the message before the old end, which shows that the queue is the same, and the first new one.
        The newest record of the last look is compared, too.

        Returns
        -------
        dict or None
            None: more than that may have changed.
        """
        news = self._waits.news(queues)
        if not news:
            return None

        broker = self._broker
        self._look = look = before.without(news)
        last = max(before.lasts, default=None)
        comes = {place.physical_offset for item in news.items() if (place := before.places.get(item)) is not None}
        requests: list[Request] = [
            (codes.PULL_MESSAGE, pull_fields(*queue, max(0, end - 1), 2, self._broker.group))
            for queue, end in news.items()
        ]
        views = [self._broker.view_request(last[0])] if last is not None and last[0] not in comes else []
        answers = self._broker.asked([*requests, *views], _NEWS_ANSWERS)
        if self._broker.client.connect_count != look.connect_count or any(
            each.address != look.address for each in answers
        ):
            return None

        ends = {queue: self._ends[queue] for queue in queues}
        for (queue, end), answer in zip(news.items(), answers, strict=False):
            if answer.code != codes.SUCCESS or answer.number("maxOffset") <= end:
                return None
            self._noted(queue, answer)
            look.begins[queue], ends[queue] = max(0, answer.number("minOffset")), answer.number("maxOffset")
        if last is not None and views and answers[-1].code == codes.SUCCESS:
            look.lasts[last] = broker.last_of(answers[-1], *last)
        return ends

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
        begins = dict(zip(left, self._broker.min_offsets(left), strict=True))
        if self._look is not None:
            self._look.begins |= begins
        return {queue: begins[queue] if queue in begins else known[queue] for queue in wanted}

    # ---- single messages

    def places(self, offsets: Mapping[Queue, int]) -> dict[Queue, Place]:
        """Where the message before each offset lies."""
        known = {} if self._look is None else self._look.places
        left = [(queue, offset) for queue, offset in offsets.items() if offset > 0 and (queue, offset) not in known]
        answers = self._broker.asked([self._broker.pull_before(queue, offset) for queue, offset in left])
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
        records = Records.of([answer.body], self._broker.path)
        rows = [
            *zip(records.queue_offsets.tolist(), records.physical_offsets.tolist(), records.sizes.tolist(), strict=True)
        ]
        places = {offset + 1: Place(position, size) for offset, position, size in rows}
        if self._look is None:
            return places

        self._look.places.update({(queue, offset): place for offset, place in places.items()})
        # If a broker keeps a batch as one record, that record stands at the places of all its messages.
        if np.array_equal(records.data, np.frombuffer(answer.body, np.uint8)):
            starts, times_ms = records.positions.tolist(), records.store_timestamps_ms.tolist()
            for start, time_ms, (_, position, size) in zip(starts, times_ms, rows, strict=True):
                crc = crc32(records.data[start : start + size])
                self._look.lasts[position, size] = LastRecord(position, size, crc, time_ms)
        return places

    def seek(self, times_ms: Mapping[Queue, int | None], *, physical_offset: int | None = None) -> Queues:
        """The number of each queue's first message at or above a physical offset, or stored after a time."""
        return self._broker.seek(times_ms, physical_offset=physical_offset)

    def prove_last(self, position: int, size: int, *, with_time: bool = False) -> LastRecord | None:
        """The record that begins at a place in the log, by VIEW_MESSAGE_BY_ID."""
        last = None if self._look is None else self._look.lasts.get((position, size))
        if last is None:
            (answer,) = self._broker.asked([self._broker.view_request(position)])
            if answer.code != codes.SUCCESS:
                return None if self._is_below_log(position) else LastRecord(position, size, -1)
            last = self._broker.last_of(answer, position, size)
            if self._look is not None:
                self._look.lasts[position, size] = last
        return last if with_time else replace(last, store_timestamp_ms=None)

    def _is_below_log(self, position: int) -> bool:
        """Whether nothing is at a place because retention deleted it; True if that cannot be said of a slave.

        A log that still has a later record has lost nothing at its end, and retention deletes nothing behind an earlier
        one. A log whose queues are empty has lost it all.
        """
        if self._broker.replicas.is_slave:
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
            return self._broker.mean_sizes(ranges)
        before_s = time.monotonic() - MEANS_S
        left = [span for span in ranges if self._means.get((span.topic, span.queue_id), (0.0, 0.0))[0] < before_s]
        for span, mean in zip(left, self._broker.mean_sizes(left), strict=True):
            self._means[span.topic, span.queue_id] = time.monotonic(), mean
        means = []
        for span in ranges:
            queue = span.topic, span.queue_id
            last = self._look.places.get((queue, span.end))
            means.append(max(self._means[queue][1], 0.0 if last is None else last.size))
        return means

    def sizes(self, ranges: Sequence[Range]) -> list[NDArray[np.int32]]:
        """The size of each record of some ranges. A consumer cannot ask for units, so the records are pulled."""
        return [self._sizes(span) for span in ranges]

    def _sizes(self, span: Range) -> NDArray[np.int32]:
        blocks = Pull(self._broker.replicas, span, self._broker.path, self._broker.group).blocks(
            GATHERED_ROWS, GATHERED_SIZE
        )
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

        self._broker.topic = next((span.topic for span in ranges), None)
        pulls = [self._pull(span, check) for span in ranges]
        for pull, following in itertools.pairwise(pulls):
            pull.following = following
        if pulls and not self._broker.is_closed:
            pulls[0].ask_ahead()
        check()

        has_last = False
        for pull in pulls:
            for block in pull.blocks(max_rows, max_size):
                has_last |= planned is not None and self._has_last(planned, block)
                yield block
        if not has_last:
            check()

    def _pull(self, span: Range, check: Callable[[], None] | None = None) -> Pull:
        return Pull(self._broker.replicas, span, self._broker.path, self._broker.group, check)

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
            f"{self._broker.path}: {what} has changed since this micro-batch was planned: the broker lost the end of "
            f"its log, another broker has its name, or the topic was created again. Restart the query"
        )

    # ---- groups and reports

    def publish_progress(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Tell the broker how far a query has read, as the offsets of a consumer group."""
        tell_progress(self._broker.asked, group, offsets)

    def published_progress(self, group: str) -> Queues:
        """How far a consumer group has read in the queues that this reader has followed."""
        broker = self._broker
        return broker.group_offsets(group, list(self._ends) or broker.queues(sorted(broker.topic_names())))

    def view(self, name: str) -> Report:
        """The view "topics". Other views are of a store's files: refused."""
        if name != "topics":
            _cannot(self._location, f"shows the view {name}")
        return broker_reports.topics(self._broker)

    def offsets(self, topics: Sequence[str] = (), at_ms: int | None = None) -> Report:
        """How far the queues of some topics reach, and where they were at a time."""
        return broker_reports.offsets(self._broker, topics, at_ms)

    def lag(self, offsets: Mapping[Queue, int], topics: Iterable[str] = ()) -> Report:
        """How far a reader is behind the end of each queue."""
        return broker_reports.lag(self._broker, offsets, topics)

    def group_lag(self, group: str) -> Report:
        """How far a consumer group is behind in the topics of which it has read a queue."""
        offsets = self.published_progress(group)
        return self.lag(offsets) if offsets else ([], [])

    def close(self) -> None:
        """Ask nothing more. Its connections are there for the next reader of this process."""
        self._broker.close()
