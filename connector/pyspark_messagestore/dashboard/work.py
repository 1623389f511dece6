"""What Spark did in a store: batches, gaps in time, replays that were recognised, and dead letters."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from messagestore import StoreError
from messagestore.inspect import operator
from messagestore.spi import Queue, Range, StoreReader
from pyspark_messagestore.dashboard.asked import MOST_COUNT, Asked, number
from pyspark_messagestore.dashboard.stored import Stored
from pyspark_messagestore.monitoring.health import dead_letter_topics
from pyspark_messagestore.words import error_words

BATCHES = 100
LETTERS, _LETTERS_SIZE = 200, 8 << 20
"""The newest dead letters of a topic that are read, and the most bytes of them."""
_MOST_TOPICS = 32
_GAP_FACTOR, _LEAST_GAP_MS = 10, 60_000
REASON, FIELD = "dlqReason", "dlqField"


def spark(stored: Stored, asked: Asked) -> dict[str, Any]:
    """The apps and their newest batches with gaps in time, what was replayed or left behind, and dead letters."""
    apps, faults = stored.rows("apps")
    batches, more = stored.rows("batches")
    facts = stored.facts()
    newest = sorted(batches, key=lambda row: -row["physicalOffset"])

    count = number(asked, "count", BATCHES, most=MOST_COUNT)
    timed = _timed(stored, newest[: max(BATCHES, count)])
    letters = stored.kept.get("letters", lambda: _dead_letters(stored, batches))

    return {
        "apps": [row | _pace(timed, row["app"]) for row in apps],
        "batches": timed[:count],
        "batchCount": len(batches),
        "gaps": gaps(timed),
        "counters": facts.figures["counters"],
        "staging": facts.figures["staging"],
        "deadLetters": facts.dead_letters,
        "letters": [row for of_topic in letters.topics.values() for row in of_topic.rows],
        "nowMs": facts.now_ms,
        "faults": list(dict.fromkeys([*faults, *more, *facts.faults, *letters.faults])),
    }


def _timed(stored: Stored, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Batches with the time at which each was stored."""
    try:
        times = operator.batch_times(stored.path, [row["physicalOffset"] for row in batches])
    except (StoreError, OSError):
        times = [None] * len(batches)
    return [{**row, "storeTimestamp": time_ms} for row, time_ms in zip(batches, times, strict=True)]


def _pace(batches: Sequence[Mapping[str, Any]], app: str) -> dict[str, Any]:
    """When an app wrote its newest batch, and how many milliseconds usually lie between two."""
    times = _times(batches, app)
    between = [after - before for before, after in pairwise(times)]
    return {
        "lastTimestamp": times[-1] if times else None,
        "usualMs": int(statistics.median(between)) if between else None,
    }


def _times(batches: Sequence[Mapping[str, Any]], app: str) -> list[int]:
    return sorted(row["storeTimestamp"] for row in batches if row["app"] == app and row["storeTimestamp"] is not None)


def gaps(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where an app wrote nothing for a minute or more, and for ten times as long as usual, the newest first.

    Parameters
    ----------
    batches : sequence of dict
        With `app`, `version` and `storeTimestamp`, of any apps in any order.
    """
    pauses = []
    for app in {row["app"] for row in batches}:
        usual_ms = _pace(batches, app)["usualMs"]
        rows = sorted(
            (row for row in batches if row["app"] == app and row["storeTimestamp"] is not None),
            key=lambda row: row["version"],
        )

        for before, after in pairwise(rows):
            gap_ms = after["storeTimestamp"] - before["storeTimestamp"]
            if gap_ms >= max(_LEAST_GAP_MS, _GAP_FACTOR * usual_ms):
                pauses.append(
                    {
                        "app": app,
                        "fromVersion": before["version"],
                        "toVersion": after["version"],
                        "begin": before["storeTimestamp"],
                        "end": after["storeTimestamp"],
                    }
                )
    return sorted(pauses, key=lambda gap: -gap["end"])


@dataclass(frozen=True)
class _OfTopic:
    """The newest dead letters of a topic.

    Parameters
    ----------
    place : tuple of int
        How many messages it ever had and has, and where the newest one ends. While these are the same, so are its
        letters.
    rows : list of dict
    queue_count : int
        How many queues the topic has.
    """

    place: tuple[int, int, int]
    rows: list[dict[str, Any]]
    queue_count: int


@dataclass(frozen=True)
class _Letters:
    """The dead letters of a store, by topic, and what could not be read."""

    topics: dict[str, _OfTopic]
    faults: list[str]


def _dead_letters(stored: Stored, batches: Sequence[Mapping[str, Any]]) -> tuple[_Letters, int]:
    """The newest dead letters of each topic, by reason and field, with the places of their messages; and how many
    queues the topics have. Only topics that have changed since the last look are read.

    Spark's dead letters may be in a topic of any name: its newest message has a reason. So a look goes through the
    topics that commits have counted, those of batches, and those in which RocketMQ's consumers leave what they give up.
    """
    newest = sorted(batches, key=lambda row: -row["physicalOffset"])
    counted = sorted(dead_letter_topics(stored.facts().figures["counters"]))
    written = dict.fromkeys([*counted, *(topic for row in newest for topic in row["topics"])])

    figures = {row["topic"]: row for row in stored.facts().figures["topics"]}
    queues: dict[str, list[Mapping[str, Any]]] = {}
    for of_queue in stored.rows("queues")[0]:
        queues.setdefault(of_queue["topic"], []).append(of_queue)
    given_up = [topic for topic in figures if topic.startswith("%DLQ%")]

    before: _Letters | None = stored.kept.last("letters")
    earlier, letters, faults = {} if before is None else before.topics, dict[str, _OfTopic](), list[str]()

    with stored.opened() as store:
        for topic in [*given_up, *written][:_MOST_TOPICS]:
            row = figures.get(topic)
            place = (0, 0, 0) if row is None else (row["messagesIn"], row["messages"], row["end"])
            if topic in earlier and earlier[topic].place == place:
                letters[topic] = earlier[topic]
                continue
            try:
                letters[topic] = _letters_of(stored, store, queues.get(topic, []), place, always=topic in given_up)
            except (StoreError, OSError) as error:
                faults.append(error_words(error))
    return _Letters(letters, faults), sum(of_topic.queue_count for of_topic in letters.values())


def _letters_of(
    stored: Stored,
    store: StoreReader,
    queues: Sequence[Mapping[str, Any]],
    place: tuple[int, int, int],
    *,
    always: bool,
) -> _OfTopic:
    """The newest dead letters of a topic by reason and field; none if its newest messages are no dead letters. Its
    queues are as the last look at the store has found them.
    """
    ends = {(row["topic"], row["queueId"]): row["maxOffset"] for row in queues}
    filled = [(row["topic"], row["queueId"]) for row in queues if row["messages"]]

    none = _OfTopic(place, [], len(ends))
    if not filled:
        return none
    newest = [] if always else _read(stored, store, ends, filled[:4], 1)
    if not always and not any(REASON in fields["properties"] for fields, _ in newest):
        return none

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for fields, where in _read(stored, store, ends, filled, max(1, LETTERS // len(filled))):
        if always or REASON in fields["properties"]:
            key = (fields["properties"].get(FIELD, ""), fields["properties"].get(REASON, ""))
            groups.setdefault(key, []).append(where)

    rows = [
        {
            "topic": filled[0][0],
            "field": field,
            "reason": reason,
            "count": len(places),
            "places": sorted(places, key=lambda place: -place["storeTimestamp"])[:10],
        }
        for (field, reason), places in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    return _OfTopic(place, rows, len(ends))


def _read(
    stored: Stored, store: StoreReader, ends: Mapping[Queue, int], queues: Sequence[Queue], count: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The last messages of some queues, and where each is."""
    lows = store.begins(queues)
    ranges = [Range(*queue, max(lows[queue], ends[queue] - count), ends[queue]) for queue in queues]
    rows, size = [], 0
    for page in store.gather(ranges):
        for queue_offset, message in zip(page.queue_offsets.tolist(), page.messages(), strict=True):
            fields = stored.fields(message, queue_offset)
            names = ("topic", "queueId", "queueOffset", "storeTimestamp")
            rows.append((fields, {name: fields[name] for name in names}))
            size += fields["size"]
            stored.reads.read(fields["size"])
        if size >= _LETTERS_SIZE:
            break
    return rows
