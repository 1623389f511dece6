"""The place of a stream: how far it has read, how far it reads next, and in which pieces.

A stream offset is a dict that Spark keeps and compares as JSON text, so its form is canonical: its keys are sorted.

    {"formatVersion": 1, "last": {"crc": .., "position": .., "size": .., "storeTimestamp": ..}, "physicalOffset": ..,
     "queues": {"flights": {"0": 1200, "1": 1190}}, "storeId": ".."}

`storeTimestamp` is missing in offsets of earlier releases.

The functions are pure and work on numbers; nothing here opens a store.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from messagestore import ConfigError
from messagestore.spi import LastRecord, Queue, Queues, Range

FORMAT_VERSION = 1


def _last_to_json(last: LastRecord) -> dict[str, int]:
    fields = {"crc": last.crc, "position": last.position, "size": last.size}
    return fields if last.store_timestamp_ms is None else {**fields, "storeTimestamp": last.store_timestamp_ms}


def _last_from_json(fields: Mapping[str, Any]) -> LastRecord:
    time_ms = fields.get("storeTimestamp")
    return LastRecord(
        int(fields["position"]), int(fields["size"]), int(fields["crc"]), None if time_ms is None else int(time_ms)
    )


@dataclass(frozen=True)
class StreamOffset:
    """How far a stream has read.

    Parameters
    ----------
    store_id : str
        The store's id; empty for a store without one.
    topics : tuple of str
        The subscribed topics; some may have no queue yet.
    queues : dict
        The next queue offset of each queue.
    physical_offset : int
        The end of the last record that is covered.
    last : LastRecord | None
        That record.
    """

    store_id: str = ""
    topics: tuple[str, ...] = ()
    queues: Queues = field(default_factory=dict)
    physical_offset: int = 0
    last: LastRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """The form that Spark receives: always the same text for the same offset."""
        queues: dict[str, dict[str, int]] = {topic: {} for topic in self.topics}
        for (topic, queue_id), offset in self.queues.items():
            queues.setdefault(topic, {})[str(queue_id)] = offset
        return {
            "formatVersion": FORMAT_VERSION,
            "last": None if self.last is None else _last_to_json(self.last),
            "physicalOffset": self.physical_offset,
            "queues": {topic: dict(sorted(queues[topic].items())) for topic in sorted(queues)},
            "storeId": self.store_id,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StreamOffset:
        """Read an offset that Spark has kept.

        Raises
        ------
        ConfigError
            The offset belongs to another source, or to a newer release.
        """
        try:
            version = fields["formatVersion"]
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version}")
            last = fields["last"]
            return cls(
                store_id=str(fields["storeId"]),
                topics=tuple(sorted(fields["queues"])),
                queues={
                    (topic, int(queue_id)): int(offset)
                    for topic, queues in fields["queues"].items()
                    for queue_id, offset in queues.items()
                },
                physical_offset=int(fields["physicalOffset"]),
                last=None if last is None else _last_from_json(last),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"checkpoint: found the offset {json.dumps(dict(fields))[:200]} ({error}); this source knows offsets "
                f"of its own, "
                f"format version {FORMAT_VERSION}; use the checkpoint of this query, or a new one",
                key="checkpointLocation",
            ) from None


# ---- how far next


def limited(starts: Queues, ends: Queues, most: int) -> Queues:
    """The ends of a step that takes exactly `most` messages (or all, if there are fewer).

    The share of each queue is in proportion to the messages that it holds, and at least one message. If there are more
    queues with messages than `most`, the queues take turns. The turns begin at another queue each time, as the start
    offsets move, so that every queue is read.
    """
    waiting = {queue: end - starts.get(queue, 0) for queue, end in sorted(ends.items()) if end > starts.get(queue, 0)}
    if sum(waiting.values()) <= most:
        return dict(ends)
    result = {queue: min(starts.get(queue, 0), end) for queue, end in ends.items()}
    queues = list(waiting)
    if most <= len(queues):
        first = sum(starts.get(queue, 0) for queue in ends) % len(queues)
        for queue in (queues + queues)[first : first + most]:
            result[queue] += 1
        return result
    rest, more = most - len(queues), sum(waiting.values()) - len(queues)
    shares = {queue: divmod((count - 1) * rest, more) for queue, count in waiting.items()}
    left = rest - sum(whole for whole, _ in shares.values())
    by_remainder = sorted(queues, key=lambda queue: -shares[queue][1])
    rounded_up = set(by_remainder[:left])
    for queue in queues:
        result[queue] += 1 + shares[queue][0] + (queue in rounded_up)
    return result


# ---- in which pieces


def pieces(ranges: list[Range], most: float, weights: Mapping[Queue, float] | None = None) -> list[list[Range]]:
    """Divide and combine ranges into pieces of about the weight `most`, in order; no piece is much heavier.

    A queue that is heavier than `most` is divided into equal parts; light queues are combined.

    Parameters
    ----------
    most : float
    weights : mapping of (topic, queue id) to float, optional
        The weight of one message of a queue; 1 for queues without an entry.
    """
    parts: list[tuple[Range, float]] = []
    for each in ranges:
        weight = 1.0 if weights is None else weights.get((each.topic, each.queue_id), 1.0)
        count = min(each.count, math.ceil(each.count * weight / most))
        bounds = [each.start + each.count * i // count for i in range(count + 1)] if count else []
        cut = [Range(each.topic, each.queue_id, *pair) for pair in itertools.pairwise(bounds)]
        parts += [(part, part.count * weight) for part in cut]
    result: list[list[Range]] = []
    filled = most
    for part, heavy in parts:
        if filled + heavy > most:
            result.append([])
            filled = 0
        result[-1].append(part)
        filled += heavy
    return result
