"""Messages of running brokers by key, by QUERY_MESSAGE.

A broker answers from its index with the newest messages first, 64 at most, and compares hashes of keys only. So each
answer is filtered here, and older messages are asked for with an earlier end, until nothing is left.

    asked    begin |......................| end        the newest 64
                   |..............| the oldest of these, and so on
"""

from __future__ import annotations

from collections.abc import Iterator

from messagestore.errors import UnknownTopicError
from messagestore.format.message import MessageExt
from messagestore.format.record import decode_message
from messagestore.remoting import Answer, Client, codes
from messagestore.remoting.idle_clients import given_back
from messagestore.remoting.replicas import Replicas
from messagestore.spi.location import Location
from messagestore.spi.pulls import Records
from messagestore.spi.running_broker import client_of

_UNIQUE_FIELD = "_UNIQUE_KEY_QUERY"
"""The field that says that the key is a sender's id (RocketMQ common/MixAll.java)."""
_MOST = 64
"""The most messages in an answer of a broker, unless its `maxMsgsNumBatch` says less."""
_INDEX_STEP_MS = 1000
"""An index has whole seconds, so a message may be up to a second newer than its entry says."""
_LATEST_MS = 1 << 62
_ACCEPTED = {codes.QUERY_MESSAGE: frozenset({codes.SUCCESS, codes.QUERY_NOT_FOUND})}

Hit = tuple[str, MessageExt]
"""The name of a broker, and a message that it has."""


def query_brokers(
    location: Location,
    topic: str,
    key: str,
    count: int,
    *,
    unique: bool = False,
    begin_ms: int = 0,
    end_ms: int | None = None,
) -> tuple[list[Hit], list[str]]:
    """The newest messages of a topic with a key, on all brokers of the topic, in the order of their store times.

    Parameters
    ----------
    location : Location
        Name servers, and perhaps one broker.
    count : int
        At most so many.
    unique : bool
        `key` is the sender's id (UNIQ_KEY).
    begin_ms, end_ms : int, int | None
        Only messages that were stored at these times or between them.

    Returns
    -------
    tuple of (list of (str, MessageExt), list of str)
        The messages with the names of their brokers, and in words what a broker did not show.

    Raises
    ------
    UnknownTopicError
        No broker has the topic, or the one that is named does not.
    StoreUnavailableError
        A broker does not answer.
    """
    client = client_of(location)
    try:
        names = sorted(client.route(topic).queues)
        if location.broker:
            if location.broker not in names:
                raise UnknownTopicError(
                    topic, None, f"It is on the brokers {', '.join(names)}, not on {location.broker}"
                )
            names = [location.broker]

        hits, faults = list[Hit](), list[str]()
        for name in names:
            query = _Query(client, location, name, topic, key, unique=unique)
            messages = list(query.newest(count, begin_ms, _LATEST_MS if end_ms is None else end_ms))
            hits += [(name, message) for message in messages]
            faults += query.faults
    finally:
        given_back(client)
    hits.sort(key=lambda hit: (hit[1].store_timestamp_ms, hit[0], hit[1].physical_offset))
    return hits[-count:], faults


class _Query:
    """The search for one key on one broker."""

    def __init__(self, client: Client, location: Location, name: str, topic: str, key: str, *, unique: bool) -> None:
        self._replicas = Replicas(client, name, slaves_first=location.settings.read_from == "slave")
        self._path, self._topic, self._key, self._unique = str(location.of_broker(name)), topic, key, unique
        self.faults: list[str] = []

    def newest(self, count: int, begin_ms: int, end_ms: int) -> Iterator[MessageExt]:
        """The messages, newer answers first; at least `count`, if the broker has so many."""
        seen, found, until_ms = set[int](), 0, end_ms
        while found < count and until_ms >= begin_ms:
            records = self._asked(max(0, begin_ms - _INDEX_STEP_MS), until_ms)
            if not records:
                return
            for message in records:
                is_new = message.physical_offset not in seen
                if is_new and begin_ms <= message.store_timestamp_ms <= end_ms and self._is_wanted(message):
                    found += 1
                    yield message
            places = {message.physical_offset for message in records}
            oldest_ms = min(message.store_timestamp_ms for message in records)
            if oldest_ms >= until_ms or places <= seen:  # an index has whole seconds: it shows the same ones again
                if len(places) >= _MOST:
                    self._tell_more(oldest_ms)
                oldest_ms = min(oldest_ms, until_ms) - _INDEX_STEP_MS
            seen |= places
            until_ms = oldest_ms

    def _asked(self, begin_ms: int, end_ms: int) -> list[MessageExt]:
        fields: dict[str, object] = {
            "topic": self._topic,
            "key": self._key,
            "maxNum": _MOST,
            "beginTimestamp": begin_ms,
            "endTimestamp": end_ms,
            _UNIQUE_FIELD: self._unique,
        }
        (answer,) = self._replicas.asked([(codes.QUERY_MESSAGE, fields)], _ACCEPTED)
        return [] if answer.code == codes.QUERY_NOT_FOUND else self._decoded(answer)

    def _decoded(self, answer: Answer) -> list[MessageExt]:
        records = Records.of([answer.body], self._path)
        messages = []
        columns = (records.positions, records.sizes, records.physical_offsets)
        for position, size, place in zip(*(column.tolist() for column in columns), strict=True):
            data = records.data[position : position + size].tobytes()
            messages.append(decode_message(data, path=self._path, physical_offset=place))
        return messages

    def _is_wanted(self, message: MessageExt) -> bool:
        if message.topic != self._topic:
            return False
        return message.unique_key == self._key if self._unique else self._key in message.keys

    def _tell_more(self, time_ms: int) -> None:
        self.faults.append(
            f"{self._path}: the broker shows {_MOST} messages with this key, and no more, of the second around "
            f"{time_ms} (milliseconds since 1970). There may be others; `messagestore get` shows all of a topic"
        )
