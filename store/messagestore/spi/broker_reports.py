"""What a running broker says of its topics and queues, as rows: the reports that a store makes of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from messagestore.log.remembered import corrected
from messagestore.spi.interface import Queue, Range, Report
from messagestore.spi.running_broker import RunningBroker


def topics(broker: RunningBroker) -> Report:
    """The view "topics": what name servers and the broker say of them."""
    names = sorted(broker.topic_names())
    queues = broker.queues(names)
    counts = dict.fromkeys(names, 0)
    begins, ends = broker.bounds(queues)
    for queue in queues:
        counts[queue[0]] += max(0, ends[queue] - begins[queue])

    rows = []
    for topic in names:
        data = broker.row_of(topic)
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


def offsets(broker: RunningBroker, topics: Sequence[str] = (), at_ms: int | None = None) -> Report:
    """How far the queues of some topics reach, and where they were at a time."""
    queues = broker.known_queues(topics)
    begins, ends = broker.bounds(queues)
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
        firsts = broker.seek(dict.fromkeys(queues, at_ms - 1))
        times_ms = broker.store_times(firsts)
        for queue, row in zip(queues, rows, strict=True):
            row |= {"offset": firsts[queue], "storeTimestamp": times_ms.get(queue)}
    return rows, []


def lag(broker: RunningBroker, offsets: Mapping[Queue, int], topics: Iterable[str] = ()) -> Report:
    """How far a reader is behind the end of each queue.

    `lagBytes` is an estimate from the first messages of each queue's lag: consumers cannot ask for sizes.
    """
    queues = sorted({*broker.queues({*topics, *(topic for topic, _ in offsets)}), *offsets})
    begins, ends = broker.bounds(queues)
    places = {queue: corrected(offsets.get(queue, 0), begins[queue], ends[queue]) for queue in queues}
    firsts = {queue: max(place, begins[queue]) for queue, place in places.items()}
    behind = [Range(*queue, first, ends[queue]) for queue, first in firsts.items() if first < ends[queue]]
    sizes = {
        (span.topic, span.queue_id): round(mean * span.count)
        for span, mean in zip(behind, broker.mean_sizes(behind), strict=True)
    }
    times_ms = broker.store_times({(span.topic, span.queue_id): span.start for span in behind})

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
