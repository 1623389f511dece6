"""Rows of a batch to the queues of running brokers, and the search for those that are there already.

RocketMQ has no idempotent producer: a request that is sent again is stored again. So a request whose answer is lost is
looked for before it is sent again, by the UNIQ_KEYs of its rows, in its queue from the last place on that is known.

    producer = Producer(location, "group")
    target = producer.target("flights")                     # the queues that may be written, and where they end now
    producer.stored("flights", target.places, "0A1B..")     # what was stored since, by the first digits of its keys
    producer.send(rows, {"flights": target})                # all rows are stored when it returns

One request of a queue is under way at a time, because a broker works on several at once and does not keep their order.
Requests of different queues are under way together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.errors import (
    BrokerError,
    ConfigError,
    MessageIllegalError,
    StoreError,
    StoreUnavailableError,
    UnknownTopicError,
)
from messagestore.format.arrow_bytes import flat_index, numpy_of, unaligned
from messagestore.format.layout import (
    MAGIC_V1,
    RECORD_HEAD,
    SENT_HEAD,
    TOPIC_LENGTH_SIZES,
)
from messagestore.format.record_columns import Rows, decode, stamp_rows
from messagestore.format.rows import Run
from messagestore.remoting import Answer, Call, Route, codes
from messagestore.remoting.client import refused
from messagestore.remoting.idle_clients import given_back
from messagestore.remoting.replicas import Patience
from messagestore.spi.interface import Range
from messagestore.spi.location import Location
from messagestore.spi.pulls import ANSWERS, GROUP, pull_fields
from messagestore.spi.rocketmq import ROCKETMQ_STORES
from messagestore.spi.running_broker import client_of

REQUEST_SIZE = 1024 * 1024
"""A request has at most this many bytes of messages, but at least one message."""
SETTLE_S = 1.0
"""How long to wait, from an answer of the broker on, until queues are searched. A broker drops a request that has
waited for 200 ms (waitTimeMillsInSendQueue), so what it has not stored by then it will not store. It also numbers a
message before the queue shows it, and has no request that says so: it answers GET_MAX_OFFSET with what is shown, also
for `committed=false`.
"""
STORED = frozenset({codes.SUCCESS, codes.FLUSH_DISK_TIMEOUT, codes.FLUSH_SLAVE_TIMEOUT, codes.SLAVE_NOT_AVAILABLE})
"""The answers after which the messages are in the broker's log."""
_STORED_KEYS = pa.schema([("unique_key", pa.string()), ("body_crc", pa.int32())])
_FLOW_CONTROL = "flow control"
_TOO_LONG = "n\x01" + "v" * (1 << 15) + "\x02"
"""Properties that no broker stores: they are longer than a record can say."""


class SendQueue(NamedTuple):
    """A queue of a topic: the broker, and the queue's id there."""

    broker: str
    queue_id: int


Places = dict[SendQueue, int]
"""A queue offset for each queue."""


@dataclass
class Target:
    """Where the rows of a topic go.

    Parameters
    ----------
    queues : list of SendQueue
        The queues that may be written. The queue id of an encoded row is a position in this list.
    places : dict of SendQueue to int
        For each queue, a place before everything that is still to be sent.
    """

    queues: list[SendQueue]
    places: Places


@dataclass
class Sent:
    """What became of the rows that were sent.

    Parameters
    ----------
    rows, requests : int
        How many were stored by this process.
    unconfirmed : int
        How many rows of these the broker has stored without waiting for its disk or its slave to the end.
    """

    rows: int = 0
    requests: int = 0
    unconfirmed: int = 0


class _Request(NamedTuple):
    """Rows `first..last` of one queue."""

    first: int
    last: int


@dataclass
class _Line:
    """The requests of one queue, of which the first is under way."""

    topic: str
    queue: SendQueue
    requests: list[_Request]
    patience: Patience
    call: Call | None = None
    failure: StoreError | None = None
    address: str = field(default="")


class Producer:
    """Sends to the brokers of a cluster.

    Parameters
    ----------
    location : Location
        The name servers; with the name of a broker, only that one is written.
    group : str
        The producer group that requests name.
    accepts_unconfirmed : bool
        Whether rows count as sent that a broker has stored, and for which it did not wait until its disk or its slave
        had them.
    """

    def __init__(self, location: Location, group: str, *, accepts_unconfirmed: bool = True) -> None:
        self._location, self._group = location, group
        self._accepts_unconfirmed = accepts_unconfirmed
        self._client = client_of(location)
        self.sent = Sent()

    # ---- before the first row

    def target(self, topic: str) -> Target:
        """The queues of a topic that may be written now, by the names of the brokers, and where they end.

        Name servers forget a topic while its brokers are down, so it is waited for.

        Raises
        ------
        UnknownTopicError
            No broker has the topic after `retryTimeout`. A broker might create it (autoCreateTopicEnable), but it is
            not asked to.
        ConfigError
            No queue of the topic may be written.
        """
        route = self._client.awaited_route(topic, self._has_masters)

        queues, why = [], []
        for name, data in sorted(route.queues.items()):
            broker = route.brokers.get(name)
            if self._location.broker not in ("", name):
                continue
            if not data.is_writable:
                why.append(f"broker {name} gives no permission to write it (perm {data.perm})")
            elif broker is None or broker.master is None:
                why.append(f"the master of broker {name} is down")
            else:
                queues += [SendQueue(name, queue_id) for queue_id in range(data.write_queue_nums)]

        if not queues:
            reason = "; ".join(why) or f"it is on the brokers {', '.join(sorted(route.queues))}"
            raise ConfigError(
                f"topic {topic}: found no queue at {self._location} that can be written: {reason}. Start the broker, "
                f"or give the permission with RocketMQ's mqadmin updateTopicPerm",
                key="topic",
                value=topic,
            )
        return Target(queues, self._ends(topic, queues))

    def _has_masters(self, route: Route) -> bool:
        """Whether a broker of a route, and of this producer's location, has a master that is up."""
        only = self._location.broker
        return any(broker.master is not None for name, broker in route.brokers.items() if only in ("", name))

    def check_rights(self, topic: str, queues: Sequence[SendQueue]) -> None:
        """Refuse a topic that this client may not write, or not search, before a row is sent.

        Each broker is sent a message whose properties are too long to be stored. Rights are looked at first.

        Raises
        ------
        BrokerError
            A broker refuses: the client lacks a right.
        """
        fields = self._fields(topic, 0, 0) | {"i": _TOO_LONG}
        for name in dict.fromkeys(queue.broker for queue in queues):
            self._asked(topic, name, codes.SEND_MESSAGE_V2, fields, b"x", accepts={codes.MESSAGE_ILLEGAL})
            search = pull_fields(topic, 0, 0, 1, self._location.settings.group or GROUP)
            self._asked(topic, name, codes.PULL_MESSAGE, search, accepts=ANSWERS)

    def begin(self, topic: str, queue: SendQueue) -> int:
        """The number of a queue's first message that the broker still has."""
        fields = {"topic": topic, "queueId": queue.queue_id}
        return max(0, self._asked(topic, queue.broker, codes.GET_MIN_OFFSET, fields).number("offset"))

    def _end(self, topic: str, queue: SendQueue) -> int:
        return self._ends(topic, [queue])[queue]

    def _ends(self, topic: str, queues: Sequence[SendQueue]) -> Places:
        """Where some queues end. All of them are asked for at once, and those without an answer again."""
        calls: dict[SendQueue, Call] = {}
        for queue in queues:
            with contextlib.suppress(StoreUnavailableError):
                fields = {"topic": topic, "queueId": queue.queue_id}
                calls[queue] = self._client.send(self._master(topic, queue.broker), codes.GET_MAX_OFFSET, fields)

        ends = {}
        for queue in queues:
            answer = None
            if queue in calls:
                with contextlib.suppress(StoreUnavailableError):
                    answer = calls[queue].answer()
            if answer is None or answer.code != codes.SUCCESS:
                fields = {"topic": topic, "queueId": queue.queue_id}
                answer = self._asked(topic, queue.broker, codes.GET_MAX_OFFSET, fields)
            ends[queue] = max(0, answer.number("offset"))
        return ends

    # ---- what is there

    def stored(self, topic: str, places: Places, prefix: str) -> pa.Table:
        """The messages in some queues, from some places on, whose UNIQ_KEY begins with some digits.

        Returns
        -------
        pa.Table
            `unique_key` (string), `body_crc` (int32).
        """
        # A broker that stood still works through what it was sent meanwhile, as soon as it answers again.
        self._ends(topic, [*places])
        time.sleep(SETTLE_S)
        parts = [part for queue, place in places.items() for part in self._stored(topic, queue, place, prefix)]
        return pa.concat_tables([_STORED_KEYS.empty_table(), *parts])

    def _stored(self, topic: str, queue: SendQueue, place: int, prefix: str) -> Iterator[pa.Table]:
        end = self._end(topic, queue)
        if place >= end:
            return

        reader = ROCKETMQ_STORES.reader(self._location.of_broker(queue.broker))
        try:
            for part in reader.gather([Range(topic, queue.queue_id, place, end)]):
                columns = part.decoded(["unique_key", "body_crc"], verify_body_crc=False)
                is_ours = pc.fill_null(pc.starts_with(columns["unique_key"], prefix), False)
                yield pa.table([column.filter(is_ours) for column in columns.columns], schema=_STORED_KEYS)
        finally:
            reader.close()

    # ---- sending

    def send(self, rows: Rows, targets: Mapping[str, Target]) -> None:
        """Send encoded rows. When it returns, brokers have stored all of them, in the order of each queue.

        Parameters
        ----------
        rows : Rows
            Each has a UNIQ_KEY.
        targets : mapping of str to Target
            Where the rows of each topic go. The places are moved behind what was stored.

        Raises
        ------
        BrokerError
            A broker refuses a request.
        MessageIllegalError
            A broker refuses a message.
        StoreUnavailableError
            A broker gives no answer for as long as `retryTimeout`. Its rows may have been stored, or not.
        """
        wire = _Wire.of(rows)
        lines = [
            _Line(run.topic, targets[run.topic].queues[run.queue_id], wire.requests(run), self._patience())
            for run in rows.runs()
        ]
        while lines:
            for line in lines:
                self._begin(line, wire)
            for line in lines:
                self._finish(line, wire, targets[line.topic].places)
            lines = [line for line in lines if line.requests]

    def _begin(self, line: _Line, wire: _Wire) -> None:
        request = line.requests[0]
        fields = self._fields(line.topic, line.queue.queue_id, int(wire.born_ms[request.first]))
        try:
            line.address = self._master(line.topic, line.queue.broker)
            line.call = self._client.send(
                line.address, codes.SEND_BATCH_MESSAGE, fields | {"m": True}, wire.body(request.first, request.last)
            )
        except StoreUnavailableError as error:
            line.call, line.failure = None, error

    def _finish(self, line: _Line, wire: _Wire, places: Places) -> None:
        """Wait for the answer to a queue's request; drop what is stored from the line."""
        queue, request = line.queue, line.requests[0]
        answer = None
        if line.call is not None:
            try:
                answer = line.call.answer()
            except StoreUnavailableError as error:
                line.failure = error

        if answer is None:
            assert line.failure is not None
            self._look_up(line, wire, places)
            return

        count = request.last - request.first
        if answer.code in STORED:
            unconfirmed = answer.code != codes.SUCCESS
            if unconfirmed and not self._accepts_unconfirmed:
                raise refused(answer, queue.broker)
            self.sent.rows += count
            self.sent.requests += 1
            self.sent.unconfirmed += count if unconfirmed else 0
            places[queue] = answer.number("queueOffset") + count
            line.patience.progressed()
            del line.requests[0]
        elif _is_busy(answer):
            if answer.code == codes.GO_AWAY:
                self._client.drop(line.address)
            line.patience.wait(refused(answer, queue.broker))
        elif answer.code == codes.MESSAGE_ILLEGAL and count > 1:
            middle = request.first + count // 2
            line.requests[:1] = [_Request(request.first, middle), _Request(middle, request.last)]
        elif answer.code == codes.MESSAGE_ILLEGAL:
            size = int(wire.sizes[request.first])
            raise MessageIllegalError(
                f"body: broker {queue.broker} ({answer.address}) refuses a message of {size:,} bytes: "
                f"{answer.remark}. Is it larger than the broker's maxMessageSize?",
                field="body",
                size=size,
            )
        else:
            raise refused(answer, queue.broker)

    def _look_up(self, line: _Line, wire: _Wire, places: Places) -> None:
        """Find out what became of a request without an answer, and leave in the line what is not stored."""
        assert line.failure is not None
        self._client.drop(line.address)
        line.patience.wait(line.failure)

        queue, request = line.queue, line.requests[0]
        keys = wire.keys(request.first, request.last)
        try:
            stored = self.stored(line.topic, {queue: places[queue]}, "")
        except StoreUnavailableError as error:
            line.failure = error
            return

        is_stored = numpy_of(pc.is_in(keys, value_set=stored["unique_key"].combine_chunks()).cast(pa.uint8()))
        left = request.first + np.flatnonzero(is_stored == 0)
        self.sent.rows += int(is_stored.sum())
        cuts = np.flatnonzero(np.diff(left) > 1) + 1
        line.requests[:1] = [_Request(int(some[0]), int(some[-1]) + 1) for some in np.split(left, cuts) if len(some)]

    # ---- brokers

    def _fields(self, topic: str, queue_id: int, born_ms: int) -> dict[str, object]:
        """The header of a send request, in the short names of SendMessageRequestHeaderV2."""
        return {
            "a": self._group,
            "b": topic,
            "c": "TBW102",
            "d": 4,
            "e": queue_id,
            "f": 0,
            "g": born_ms,
            "h": 0,
            "i": "",
            "j": 0,
            "k": False,
        }

    def _master(self, topic: str, name: str) -> str:
        broker = None
        with contextlib.suppress(UnknownTopicError):  # all brokers that have it are down
            broker = self._client.route(topic).brokers.get(name)
            if broker is None or broker.master is None:
                broker = self._client.route(topic, fresh=True).brokers.get(name)
        if broker is None or broker.master is None:
            raise StoreUnavailableError(
                f"broker {name}: the name servers {self._client.name_servers} know no master of it with the "
                f"topic {topic}. Is it down?"
            )
        return broker.master

    def _asked(
        self,
        topic: str,
        name: str,
        code: int,
        fields: Mapping[str, object],
        body: bytes = b"",
        accepts: frozenset[int] | set[int] = frozenset({codes.SUCCESS}),
    ) -> Answer:
        """The answer of a broker's master to a request that stores nothing."""
        patience = self._patience()
        while True:
            failure: StoreError
            try:
                address = self._master(topic, name)
                return self._client.request(address, code, fields, body, accepts=accepts, broker=name, repeats=False)
            except StoreUnavailableError as error:
                failure = error
            except BrokerError as error:
                if error.code not in codes.BUSY:
                    raise
                failure = error

            patience.wait(failure)

    def _patience(self) -> Patience:
        return Patience(self._client.settings.retry_timeout_s)

    def close(self) -> None:
        """Send nothing more. Its connections are there for the next one of this process."""
        given_back(self._client)


def _is_busy(answer: Answer) -> bool:
    """Whether a broker did nothing, and may do it later."""
    return answer.code in codes.BUSY or (answer.code == codes.SYSTEM_ERROR and _FLOW_CONTROL in answer.remark)


@dataclass(frozen=True)
class _Wire:
    """Encoded rows, and where in them lies what a broker is sent of each.

    Parameters
    ----------
    rows : Rows
    starts, body_sizes, properties : int64[n]
        Where each record begins, the size of its body, and where the length of its properties is.
    sizes : int64[n]
        The size of each message in a request.
    born_ms : int64[n]
    """

    rows: Rows
    starts: NDArray[np.int64]
    body_sizes: NDArray[np.int64]
    properties: NDArray[np.int64]
    sizes: NDArray[np.int64]
    born_ms: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Rows) -> _Wire:
        starts, data = rows.starts[:-1], rows.data
        ends = starts + rows.sizes

        def column(name: str, kind: str) -> NDArray[np.int64]:
            return unaligned(data, kind)[starts + RECORD_HEAD.offset(name)].astype(np.int64)

        body_sizes = column("body_size", ">i4")
        topics = starts + RECORD_HEAD.size + body_sizes
        is_v1 = column("magic", ">i4").astype(np.int32) == np.int32(MAGIC_V1)
        width = np.where(is_v1, *TOPIC_LENGTH_SIZES.values())
        topic_sizes = np.where(is_v1, data[topics], 0)
        if not is_v1.all():
            topic_sizes = np.where(is_v1, topic_sizes, unaligned(data, ">u2")[topics])
        properties = topics + width + topic_sizes
        sizes = SENT_HEAD.size + body_sizes + (ends - properties)
        return cls(rows, starts, body_sizes, properties, sizes, column("born_timestamp_ms", ">i8"))

    def requests(self, run: Run) -> list[_Request]:
        """Rows of one queue as requests. A request names one time at which all of its messages were made."""
        start, stop = run.start, run.stop
        sizes, born_ms = self.sizes[start:stop], self.born_ms[start:stop]
        ends = np.cumsum(sizes)
        times = np.append(np.flatnonzero(np.diff(born_ms)) + 1, stop - start)
        requests, first = [], 0
        while first < stop - start:
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + REQUEST_SIZE, "right")))
            last = min(last, int(times[np.searchsorted(times, first, "right")]))
            requests.append(_Request(start + first, start + last))
            first = last
        return requests

    def body(self, first: int, last: int) -> memoryview:
        """Some rows as the body of a request."""
        sizes = self.sizes[first:last]
        places = np.cumsum(sizes) - sizes
        out = np.zeros(int(sizes.sum()), np.uint8)
        data, starts = self.rows.data, self.starts[first:last]

        unaligned(out, ">i4")[places + SENT_HEAD.offset("total_size")] = sizes
        flags = unaligned(data, ">i4")[starts + RECORD_HEAD.offset("flag")]
        unaligned(out, ">i4")[places + SENT_HEAD.offset("flag")] = flags

        # The body with its size is one piece in both forms, and so are the properties.
        body_sizes = self.body_sizes[first:last] + RECORD_HEAD.size - RECORD_HEAD.offset("body_size")
        properties = self.properties[first:last]
        ends = starts + self.rows.sizes[first:last]
        place, body_starts = SENT_HEAD.offset("body_size"), starts + RECORD_HEAD.offset("body_size")
        out[flat_index(places + place, body_sizes)] = data[flat_index(body_starts, body_sizes)]
        out[flat_index(places + place + body_sizes, ends - properties)] = data[
            flat_index(properties, ends - properties)
        ]
        return out.data

    def keys(self, first: int, last: int) -> pa.Array:
        """The UNIQ_KEYs of some rows: string[n]."""
        some = slice(first, last)
        return decode(self.rows.data, self.starts[some], self.rows.sizes[some], ["unique_key"], verify_body_crc=False)[
            0
        ]


def keys_and_crcs(rows: Rows | None) -> pa.Table:
    """The UNIQ_KEYs and the bodies' CRCs of encoded rows, as `Producer.stored` returns them; None: no rows."""
    if rows is None:
        return _STORED_KEYS.empty_table()
    stamp_rows(rows)
    columns = decode(rows.data, rows.starts[:-1], rows.sizes, _STORED_KEYS.names, verify_body_crc=False)
    return pa.Table.from_batches([columns], schema=_STORED_KEYS)
