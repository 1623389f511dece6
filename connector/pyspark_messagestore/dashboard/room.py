"""What takes the room of a store: its segments by topic, what the next `gc` takes, and when the disk is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from messagestore import StoreError
from messagestore.inspect import operator
from messagestore.spi import Queue, Queues, Range, StoreReader
from pyspark_messagestore.dashboard.asked import Asked
from pyspark_messagestore.dashboard.stored import CONFIG, Stored
from pyspark_messagestore.monitoring.health import LEAST_GROWTH_MS
from pyspark_messagestore.words import error_words, expired_fields

DAY_MS = 86_400_000
SHOWN_TOPICS = 7
"""How many topics have a colour of their own. The others share one."""
_MOST_PIECES, _MOST_SEEKS, _MOST_QUEUES = 64, 20_000, 400
"""Parts, searches for where they begin, and queues that are looked at; a topic has one queue at least."""
OTHERS = "other topics"


def log(stored: Stored, asked: Asked) -> dict[str, Any]:  # noqa: ARG001
    """The segments by topic, what the next retention would take, who keeps the rest, and what recoveries did."""
    segments, wrong = stored.rows("segments")
    report, figures = stored.report(), stored.facts().figures
    faults = [*wrong, *report["faults"]]
    expired: dict[str, Any] | None = None
    try:
        expired = stored.kept.get("expired", lambda: (_expired(stored), report["consumeQueues"]["queues"]))
    except (StoreError, OSError) as error:
        faults.append(f"what gc would delete is not known: {error_words(error)}")
    return {
        "segments": segments,
        "parts": stored.kept.get("parts", lambda: _parts(stored, segments, report)).found,
        "expired": expired,
        "recoveries": report["recoveries"],
        "commitLog": report["commitLog"],
        "diskUsed": report["diskUsed"],
        "diskFree": figures["diskFree"],
        "growth": figures["growth"],
        "fullAt": full_at(figures),
        "verify": stored.checks.of(stored.path),
        "faults": list(dict.fromkeys(faults)),
    }


def _expired(stored: Stored) -> dict[str, Any]:
    return expired_fields(operator.expired(stored.path, CONFIG), done=False)


def full_at(figures: Mapping[str, Any]) -> int | None:
    """When the disk will be full if the log keeps growing as it did, in milliseconds. None: not within ten years, or
    the log has grown for less than `LEAST_GROWTH_MS`, which says nothing about the next day.
    """
    growth = figures["growth"]
    if growth is None or not growth["bytes"] or growth["ms"] < LEAST_GROWTH_MS:
        return None
    left_ms = int(figures["diskFree"]) * int(growth["ms"]) // int(growth["bytes"])
    return int(figures["nowMs"]) + left_ms if left_ms < 3650 * DAY_MS else None


@dataclass(frozen=True)
class _Parts:
    """What each topic takes of each part of the log.

    Parameters
    ----------
    found : dict
        What the page shows.
    sizes : dict of (int, int) to dict of str to int
        The bytes of each topic in parts of full segments, by where they begin and end. These do not change.
    recoveries : list of dict
        The recoveries that were known: one may cut the log, and what is written behind it again is something else.
    """

    found: dict[str, Any]
    sizes: dict[tuple[int, int], dict[str, int]]
    recoveries: list[dict[str, Any]]


def _parts(stored: Stored, segments: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> tuple[_Parts, int]:
    """About what each topic takes of each part of the log, from samples of queues and of record sizes. And how many
    places in queues were searched for, which is what the look costs. Full segments are searched once.

    A part is a segment, or several if there are very many segments or topics.
    """
    samples, shares = _sampled(stored)
    spans = _spans(segments, report["commitLog"], max(1, min(_MOST_PIECES, _MOST_SEEKS // max(1, len(samples)))))

    recoveries = report["recoveries"]
    before: _Parts | None = stored.kept.last("parts")
    known = {} if before is None or before.recoveries != recoveries else before.sizes
    new = sorted({limit for span in spans if span not in known for limit in span})
    firsts = dict(zip(new, operator.stood_at(stored.path, samples, new, CONFIG), strict=True))
    with stored.opened() as store:
        of_span = {
            span: known[span] if span in known else _sizes(store, firsts[span[0]], firsts[span[1]], shares)
            for span in spans
        }

    shown = _shown({span: {topic: size for topic, size in of_span[span].items() if topic in shares} for span in spans})
    full = {span: sizes for span, sizes in of_span.items() if span[1] < spans[-1][1]} if spans else {}
    return _Parts(shown, full, recoveries), len(samples) * len(new)


def _spans(segments: Sequence[Mapping[str, Any]], bounds: Mapping[str, int], most: int) -> list[tuple[int, int]]:
    """Where the parts of the log begin and end. There are about `most` of them at most, and each is one segment or
    several.
    """
    step = -(-len(segments) // most) or 1
    limits = [row["firstPhysicalOffset"] for row in segments[::step]]
    end = max([bounds["maxOffset"], *limits])
    return list(pairwise(dict.fromkeys([*(max(limit, bounds["minOffset"]) for limit in limits), end])))


def _shown(sizes_of_spans: Mapping[tuple[int, int], Mapping[str, int]]) -> dict[str, Any]:
    """What the page shows: the largest topics by name, the others together."""
    totals: dict[str, int] = {}
    for sizes in sizes_of_spans.values():
        for topic, size in sizes.items():
            totals[topic] = totals.get(topic, 0) + size

    named = sorted(totals, key=lambda topic: (-totals[topic], topic))[:SHOWN_TOPICS]
    rest = sum(totals.values()) - sum(totals[topic] for topic in named)
    return {
        "topics": [{"topic": topic, "size": totals[topic]} for topic in named],
        "others": {"count": len(totals) - len(named), "size": rest},
        "parts": [
            {
                "begin": begin,
                "end": end,
                "sizes": [sizes.get(topic, 0) for topic in named],
                "others": sum(size for topic, size in sizes.items() if topic not in named),
            }
            for (begin, end), sizes in sizes_of_spans.items()
        ],
    }


def _sampled(stored: Stored) -> tuple[list[Queue], dict[str, float]]:
    """The largest queues of each topic, and how many messages a topic has for each one in them."""
    of_topic: dict[str, list[tuple[int, int]]] = {}
    for row in stored.rows("queues")[0]:
        if row["messages"]:
            of_topic.setdefault(row["topic"], []).append((-row["messages"], row["queueId"]))
    most = max(1, _MOST_QUEUES // max(1, len(of_topic)))
    samples, shares = list[Queue](), dict[str, float]()
    for topic, counted in of_topic.items():
        chosen = sorted(counted)[:most]
        samples += [(topic, queue_id) for _, queue_id in chosen]
        shares[topic] = sum(count for count, _ in counted) / sum(count for count, _ in chosen)
    return samples, shares


def _sizes(store: StoreReader, before: Queues, behind: Queues, shares: Mapping[str, float]) -> dict[str, int]:
    """The bytes of each topic in a part of the log, from how many messages queues have there and samples of them."""
    ranges = [Range(*queue, first, behind[queue]) for queue, first in before.items() if behind[queue] > first]
    sizes: dict[str, float] = {}
    for each, mean in zip(ranges, store.mean_sizes(ranges), strict=True):
        sizes[each.topic] = sizes.get(each.topic, 0.0) + mean * each.count * shares[each.topic]
    return {topic: round(size) for topic, size in sizes.items()}
