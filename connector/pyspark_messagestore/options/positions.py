"""Where a read begins and ends: what users may ask for, and how the options say it.

A position is a queue offset, `earliest`, `latest`, a store time, or the offset that a consumer group has committed. It
is asked for all queues, or topic by topic and queue by queue, in the JSON of Kafka's connector. Nothing here opens a
store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from messagestore import ConfigError
from messagestore.spi import Queue, duration_s, stored_topic_fault
from pyspark_messagestore.options.values import MOST, Kind, parsed_json, whole

LATEST, EARLIEST = -1, -2
"""Special queue offsets, with the meaning that Kafka's connector gives them."""
EVERY_QUEUE = -1
"""A special queue id (`"*"`): all queues of the topic that are not listed."""
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Moment:
    """A store time.

    Parameters
    ----------
    ms : int
        Milliseconds since 1970, or if `relative`, milliseconds before the query begins.
    relative : bool
    """

    ms: int
    relative: bool = False

    def at(self, now_ms: int) -> int:
        """Milliseconds since 1970, for a query that begins now."""
        return now_ms - self.ms if self.relative else self.ms


@dataclass(frozen=True, slots=True)
class Committed:
    """The offset that the consumer group has committed; `otherwise` is EARLIEST, LATEST, or None for an error."""

    otherwise: int | None = None


Position = int | Moment | Committed
ByQueue = dict[str, dict[int, Any]]
"""Topic -> queue id (or `EVERY_QUEUE`) -> position."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one option asks for.

    Parameters
    ----------
    option : str
        Its name, for errors.
    wanted : Position or ByQueue
    """

    option: str
    wanted: Position | ByQueue

    @property
    def text(self) -> str:
        """Always the same text for the same wish, by which a restarted query notices that it has changed."""
        return json.dumps([self.option, _plain(self.wanted)], sort_keys=True)

    @property
    def is_offsets(self) -> bool:
        """Whether it is written as queue offsets rather than times."""
        return "Timestamp" not in self.option

    @property
    def listed(self) -> list[Queue]:
        """The queues that it names."""
        wanted = self.wanted if isinstance(self.wanted, dict) else {}
        return [(topic, queue_id) for topic, ids in wanted.items() for queue_id in ids if queue_id != EVERY_QUEUE]

    def covers(self, queue: Queue) -> bool:
        """Whether it says something about a queue."""
        if not isinstance(self.wanted, dict):
            return True
        listed = self.wanted.get(queue[0], {})
        return queue[1] in listed or EVERY_QUEUE in listed

    @property
    def has_latest(self) -> bool:
        """Whether a queue, or every queue, begins or ends at its latest message."""
        wanted = self.wanted.values() if isinstance(self.wanted, dict) else [{EVERY_QUEUE: self.wanted}]
        return any(LATEST in ids.values() for ids in wanted)

    def positions(self, queues: Iterable[Queue], covers: Callable[[str], bool]) -> dict[Queue, Position]:
        """The position of each queue.

        Raises
        ------
        ConfigError
            A queue is not listed, or does not exist; or a topic is not read at all.
        """
        queues = list(queues)
        if not isinstance(self.wanted, dict):
            return dict.fromkeys(queues, self.wanted)

        ids_by_topic: dict[str, set[int]] = {}
        for topic, queue_id in queues:
            ids_by_topic.setdefault(topic, set()).add(queue_id)
        for topic in sorted({*self.wanted, *ids_by_topic}):
            self._check(topic, ids_by_topic.get(topic, set()), covers)

        positions: dict[Queue, Position] = {}
        for topic, queue_id in queues:
            listed = self.wanted[topic]
            positions[topic, queue_id] = listed[queue_id if queue_id in listed else EVERY_QUEUE]
        return positions

    def _check(self, topic: str, existing: set[int], covers: Callable[[str], bool]) -> None:
        assert isinstance(self.wanted, dict)
        listed = self.wanted.get(topic)
        if listed is None:
            raise self.error(f"topic {topic} is not listed")
        if not covers(topic):
            raise self.error(f"topic {topic} is not subscribed")

        ids = set(listed) - {EVERY_QUEUE}
        if ids - existing:
            raise self.error(
                f"queue {min(ids - existing)} of {topic} does not exist. Its queues are {sorted(existing)}"
            )
        if existing - ids and EVERY_QUEUE not in listed:
            raise self.error(f'queue {min(existing - ids)} of {topic} is not listed. List it, or give "*"')

    def error(self, fault: str) -> ConfigError:
        """An error that names the option."""
        return ConfigError(f"option {self.option}: {fault}", key=self.option)


def _plain(wanted: object) -> object:
    """A wish as JSON can show it."""
    if isinstance(wanted, dict):
        return {str(key): _plain(value) for key, value in wanted.items()}
    if isinstance(wanted, Moment):
        return f"{'-' if wanted.relative else ''}{wanted.ms}ms"
    return f"committed:{wanted.otherwise}" if isinstance(wanted, Committed) else wanted


# ---- how the options say it


def _start(value: object) -> int | Moment:
    """A time, or one of Kafka's special numbers: -1 latest, -2 earliest."""
    return EARLIEST if str(value).strip() == str(EARLIEST) else _end(value)


def _end(value: object) -> int | Moment:
    """A time, or -1: the latest message."""
    return LATEST if str(value).strip() == str(LATEST) else _moment(value)


def _moment(value: object) -> Moment:
    """A time: milliseconds since 1970, ISO 8601 with a time zone, or a duration with a minus sign."""
    text = str(value).strip() if type(value) in (int, str) else ""
    if re.fullmatch(r"[0-9]{1,19}", text):
        ms = int(text)
        if ms > MOST:
            raise ValueError
        return Moment(ms)

    if re.fullmatch(r"-.*[a-z]", text):
        return Moment(round(1000 * duration_s("", text[1:])), relative=True)

    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError
    microseconds = (when - _EPOCH) // timedelta(microseconds=1)
    if microseconds < 0:
        raise ValueError
    return Moment(-(-microseconds // 1000))


def _starting_offsets(text: str) -> Position | ByQueue:
    word = text.strip().lower()
    if word == "committed" or word.startswith("committed:"):
        return Committed(_WORDS[word.removeprefix("committed:")] if ":" in word else None)
    return _WORDS[word] if word in _WORDS else _by_queue(parsed_json(text), lambda value: _offset(value, EARLIEST))


def _ending_offsets(text: str) -> Position | ByQueue:
    if text.strip().lower() == "latest":
        return LATEST
    return _by_queue(parsed_json(text), lambda value: _offset(value, LATEST))


def _offset(value: object, least: int) -> int:
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError
    return value


def _by_queue(table: Mapping[str, Any], parse: Callable[[Any], Any]) -> ByQueue:
    result: ByQueue = {}
    for topic, queues in table.items():
        if stored_topic_fault(topic):
            raise ValueError
        result[topic] = _queues(queues, parse)
    return result


def _queues(queues: Mapping[str, Any], parse: Callable[[Any], Any]) -> dict[int, Any]:
    if any(isinstance(value, dict) for value in queues.values()):  # RocketMQ's tools write topic -> broker -> queue
        (queues,) = (
            queues.values()
        )  # more are a ValueError: a store is one broker's, and the numbers of another one's queues mean nothing here
    by_id = {EVERY_QUEUE if name == "*" else _QUEUE_ID.parse(name): parse(value) for name, value in queues.items()}
    if len(by_id) < len(queues):  # "1" and "01"
        raise ValueError
    return by_id


_QUEUE_ID = whole(0, 65535)
STARTING_OFFSETS = Kind(
    _starting_offsets,
    "earliest, latest, committed, committed:earliest, committed:latest, or JSON such as "
    '{"flights": {"0": 23, "*": -2}} (-2 earliest, -1 latest), with each topic and queue once, and one broker',
)
ENDING_OFFSETS = Kind(
    _ending_offsets,
    'latest, or JSON such as {"flights": {"0": 23, "*": -1}} (-1 latest; a read cannot end at -2), '
    "with each topic and queue once, and one broker",
)
_TIMES = "milliseconds since 1970, ISO 8601 with a time zone such as 2026-03-01T12:00:00Z, or a time ago such as -10m"
_BY_QUEUE = 'JSON such as {"flights": {"0": 1700000000000, "*": "-10m"}}, each topic and queue once; a time is '
STARTING_TIMESTAMP = Kind(_start, f"{_TIMES}; -1 is the latest message, and -2 the earliest")
ENDING_TIMESTAMP = Kind(_end, f"{_TIMES}; -1 is the latest message")
STARTING_OFFSETS_BY_TIMESTAMP = Kind(
    lambda text: _by_queue(parsed_json(text), _start), f"{_BY_QUEUE}{STARTING_TIMESTAMP.allowed}"
)
ENDING_OFFSETS_BY_TIMESTAMP = Kind(
    lambda text: _by_queue(parsed_json(text), _end), f"{_BY_QUEUE}{ENDING_TIMESTAMP.allowed}"
)
