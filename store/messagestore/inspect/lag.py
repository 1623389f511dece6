"""How far readers are behind the ends of the queues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from messagestore.errors import ConfigError, MessageIllegalError
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import RETRY_PREFIX
from messagestore.inspect.queues import store_time, telling
from messagestore.log.remembered import corrected
from messagestore.read.group_offsets import group_offsets
from messagestore.read.view import StoreView

_UNITS_READ = 1 << 18
"""The number of units that are read at once when sizes are added up."""


def groups_of(
    view: StoreView, only: str | None = None, bounds: Mapping[tuple[str, int], tuple[int, int]] = MappingProxyType({})
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each queue of the topics that groups have read, or of one of them, and what could not be read, in
    words.

    If a queue has no committed offset, the group never read it, and all of its messages are lag. If the group had read
    further than the queue's end is now, because the queue was created again or the log was cut, `beyond` says by how
    many messages, and the lag counts from where the group goes on (`log/remembered.py`).
    """
    offsets = group_offsets(view)

    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    known = Ends(view, bounds)
    has_queues = view.topics().__contains__ if only is None or only.startswith(RETRY_PREFIX) else lambda _: False
    for group, topics in offsets.topics_read(has_queues).items():
        for topic in topics if only is None else [only] if only in topics else []:
            committed = offsets.get(topic, group)
            ends: dict[int, tuple[int, int]] = {}
            with telling(faults, ConfigError, MessageIllegalError):
                ends = known.of(topic, committed)

            for queue_id, (low, high) in ends.items():
                offset = committed.get(queue_id)
                rows.append(
                    {
                        "group": group,
                        "topic": topic,
                        "queueId": queue_id,
                        "committedOffset": offset,
                        "maxOffset": high,
                        "lag": high - (low if offset is None else corrected(offset, low, high)),
                        "beyond": max((offset or 0) - high, 0),
                    }
                )
    return rows, list(dict.fromkeys(faults))


def lag_of(
    view: StoreView, committed: Mapping[tuple[str, int], int], topics: Iterable[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each queue, and what is wrong with the store or with the reader's place, in words.

    `lag` counts messages. If the queue ends before the reader's place, it counts from where the reader goes on
    (`log/remembered.py`), and `beyond` says by how many messages the place is too far. `lagBytes` adds the sizes of the
    records that are still there. `oldestUnread` is the store time of the first of them.
    """
    view.refresh()
    rows, faults, remarks = lag_rows(Ends(view), committed, topics)
    return rows, list(dict.fromkeys([*remarks, *faults]))


def group_lag_of(view: StoreView, group: str) -> tuple[list[dict[str, Any]], list[str]]:
    """How far a consumer group is behind, as `lag_of`; no row if the group has no offset in the store."""
    table = group_offsets(view)
    topics = table.topics_read(view.topics().__contains__).get(group, [])
    committed = {(topic, queue_id): offset for topic in topics for queue_id, offset in table.get(topic, group).items()}
    return lag_of(view, committed, topics)


class Ends:
    """The queues of topics and what lies between their ends, each looked for once: many groups read the same topics.

    Parameters
    ----------
    view : StoreView
    ends : mapping of (str, int) to (int, int)
        The first message that is there and the end of queues, as far as they are known.
    """

    def __init__(self, view: StoreView, ends: Mapping[tuple[str, int], tuple[int, int]] = MappingProxyType({})) -> None:
        self.view = view
        self._queue_ids: dict[str, list[int]] = {}
        self._ends = dict(ends)
        self._waiting: dict[tuple[str, int, int], tuple[int, int | None]] = {}

    def queue_ids(self, topic: str) -> list[int]:
        """The ids of a topic's queues."""
        if topic not in self._queue_ids:
            self._queue_ids[topic] = list(self.view.queue_ids(topic))
        return self._queue_ids[topic]

    def of(self, topic: str, more: Iterable[int]) -> dict[int, tuple[int, int]]:
        """The ends of a topic's queues, and of more that a reader names. Of those that do not exist only one is looked
        for: whoever wrote the reader's places may have named a million.
        """
        queue_ids = self.queue_ids(topic)
        gone = sorted(set(more).difference(queue_ids))
        ends = dict.fromkeys(sorted([*queue_ids, *gone]), (0, 0))
        for queue_id in [*queue_ids, *gone[:1]]:
            if (topic, queue_id) not in self._ends:
                self._ends[topic, queue_id] = self.view.bounds(topic, queue_id)
            ends[queue_id] = self._ends[topic, queue_id]
        return ends

    def waiting(self, topic: str, queue_id: int, first: int, high: int) -> tuple[int, int | None]:
        """The bytes of the records from a message up to the end of its queue, and its store time."""
        if first >= high:
            return 0, None
        key = (topic, queue_id, first)
        if key not in self._waiting:
            size = sum(
                _records_size(self.view, topic, queue_id, start, min(high, start + _UNITS_READ))
                for start in range(first, high, _UNITS_READ)
            )
            self._waiting[key] = (size, store_time(self.view, topic, queue_id, first))
        return self._waiting[key]


def lag_rows(
    known: Ends, committed: Mapping[tuple[str, int], int], topics: Iterable[str]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """One row for each queue; what could not be read; and what is wrong with the reader's place, both in words."""
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    remarks: list[str] = []

    read: dict[str, set[int]] = {topic: set() for topic in topics}
    for topic, queue_id in committed:
        read.setdefault(topic, set()).add(queue_id)

    for topic in sorted(read):
        with telling(faults, ConfigError, MessageIllegalError):
            for queue_id, ends in known.of(topic, read[topic]).items():
                rows.append(_lag_row(known, (topic, queue_id), ends, committed.get((topic, queue_id)), remarks))
    return rows, faults, remarks


def _lag_row(
    known: Ends, queue: tuple[str, int], ends: tuple[int, int], offset: int | None, remarks: list[str]
) -> dict[str, Any]:
    topic, queue_id = queue
    low, high = ends
    position = 0 if offset is None else offset
    place = corrected(position, low, high)
    first = max(place, low)

    if position > high:
        remarks.append(
            f"{topic}/{queue_id}: the reader is at {position}, but the queue ends at {high}: the topic was deleted, or "
            f"the store was rebuilt, cut or restored. The lag counts from {place}"
        )
    elif offset is not None and place < low:
        words = "1 message that was" if low - place == 1 else f"{low - place} messages that were"
        remarks.append(f"{topic}/{queue_id}: retention has deleted {words} not read")

    size, oldest_ms = known.waiting(topic, queue_id, first, high)
    return {
        "topic": topic,
        "queueId": queue_id,
        "committedOffset": offset,
        "minOffset": low,
        "maxOffset": high,
        "lag": high - (first if offset is None else place),
        "beyond": max(position - high, 0),
        "lagBytes": size,
        "oldestUnread": oldest_ms,
    }


def _records_size(view: StoreView, topic: str, queue_id: int, start: int, end: int) -> int:
    """The bytes of some records, from their units; a placeholder of a broker's has none."""
    sizes = view.units(topic, queue_id, start, end)["size"]
    return int(sizes[(sizes > 0) & (sizes != FILLER_UNIT_SIZE)].sum(dtype="int64"))
