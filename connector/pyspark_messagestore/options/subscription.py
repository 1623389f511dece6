"""Which topics and queues a query reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from messagestore.spi import Queue, Queues, is_ordinary_topic, stored_topic_fault
from pyspark_messagestore.options.values import Kind, parsed_json, whole

Assigned = dict[str, tuple[int, ...]]
_QUEUE_ID = whole(0, 65535)


@dataclass(frozen=True)
class Subscription:
    """What a query reads. Exactly one of the three is given.

    Parameters
    ----------
    topics : tuple of str
        All queues of these topics.
    pattern : str | None
        All queues of the topics that match a regular expression, whenever they are created. Retry, dead letter and
        system topics never match.
    assigned : dict of str to tuple of int | None
        These queues only.
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: Assigned | None = None

    @cached_property
    def named(self) -> tuple[str, ...]:
        """The topics that the user named."""
        return self.topics if self.assigned is None else tuple(self.assigned)

    @property
    def option(self) -> str:
        """The option that the user gave."""
        if self.assigned is not None:
            return "assign"
        return "subscribe" if self.pattern is None else "subscribePattern"

    @cached_property
    def queues(self) -> frozenset[Queue] | None:
        """The assigned queues; None if all queues of the topics are read."""
        if self.assigned is None:
            return None
        return frozenset((topic, queue_id) for topic, ids in self.assigned.items() for queue_id in ids)

    def covers_topic(self, topic: str) -> bool:
        """Whether queues of a topic are read."""
        if self.pattern is None:
            return topic in self.named
        return is_ordinary_topic(topic) and re.fullmatch(self.pattern, topic) is not None

    def covers(self, queue: Queue) -> bool:
        """Whether a queue is read."""
        return self.covers_topic(queue[0]) if self.queues is None else queue in self.queues

    def of(self, ends: Queues) -> Queues:
        """The ends of the queues that are read. An assigned queue that has no message yet ends at 0."""
        return ends if self.queues is None else {queue: ends.get(queue, 0) for queue in sorted(self.queues)}


# ---- how the options say it


def _topics(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names or any(
        stored_topic_fault(name) for name in names
    ):  # a broker's topics may have longer names than users' topics
        raise ValueError
    return names


def _pattern(text: str) -> str:
    if not text:
        raise ValueError
    try:
        re.compile(text)
    except (re.error, OverflowError):
        raise ValueError from None
    return text


def _assigned(text: str) -> Assigned:
    table: Mapping[str, Any] = parsed_json(text)
    result: Assigned = {}
    for topic, ids in table.items():
        if stored_topic_fault(topic) or not isinstance(ids, list):
            raise ValueError
        result[topic] = tuple(
            sorted({_QUEUE_ID.parse(str(queue_id)) if type(queue_id) is int else -1 for queue_id in ids})
        )
        if -1 in result[topic]:
            raise ValueError
    return result


TOPICS = Kind(_topics, "one or more topics (letters, digits, and %|-_) with commas between them")
PATTERN = Kind(_pattern, "a regular expression as Python has them, which is compared with whole names of topics")
ASSIGNED = Kind(_assigned, 'JSON topic -> list of queue ids, such as {"flights": [0, 1]}, with each topic once')
