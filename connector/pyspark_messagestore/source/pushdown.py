"""Filters of a batch read that Spark passes on, as a narrower read.

Only whole ranges of messages, and tags, are left out here. Spark evaluates every filter again, so a filter that is not
understood costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from pyspark_messagestore.options.values import MOST

CLOCK_MARGIN_MS = 3_600_000
"""By how much the store times of a queue may go back: a clock that was set."""


@dataclass(frozen=True)
class Narrowed:
    """What a read must return at least.

    Parameters
    ----------
    topics, queue_ids, tags : frozenset | None
        None: all.
    first, end : int
        Queue offsets.
    first_ms, end_ms : int
        Store times; the margin for clocks is in them.
    """

    topics: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    tags: frozenset[str] | None = None
    first: int = 0
    end: int = MOST
    first_ms: int = -1
    end_ms: int = MOST

    def covers(self, topic: str, queue_id: int) -> bool:
        """Whether messages of a queue may be wanted."""
        return (self.topics is None or topic in self.topics) and (self.queue_ids is None or queue_id in self.queue_ids)


def narrowed(filters: Iterable[Filter], columns: Mapping[str, str]) -> Narrowed:
    """What filters leave of a read.

    Parameters
    ----------
    columns : mapping
        The name of each column that the read has -> the stored column that it is made from.
    """
    result = Narrowed()
    for condition in filters:
        path = getattr(condition, "attribute", None)
        if path is None or len(path) != 1:
            continue
        stored = columns.get(path[0])
        if stored in ("topic", "queue_id", "tags"):
            result = _by_value(result, stored, condition)
        elif stored in ("queue_offset", "store_timestamp_ms"):
            result = _by_bounds(result, stored, condition)
    return result


def _by_value(narrowed: Narrowed, stored: str, condition: Filter) -> Narrowed:
    if isinstance(condition, EqualTo):
        values: Iterable[Any] = (condition.value,)
    elif isinstance(condition, In):
        values = condition.value
    else:
        return narrowed

    # In SQL, nothing is equal to null.
    wanted = frozenset(value for value in values if value is not None)
    if stored == "topic":
        return replace(narrowed, topics=wanted & (wanted if narrowed.topics is None else narrowed.topics))
    if stored == "queue_id":
        return replace(narrowed, queue_ids=wanted & (wanted if narrowed.queue_ids is None else narrowed.queue_ids))
    return replace(narrowed, tags=wanted & (wanted if narrowed.tags is None else narrowed.tags))


def _by_bounds(narrowed: Narrowed, stored: str, condition: Filter) -> Narrowed:
    if not isinstance(condition, EqualTo | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return narrowed

    value = condition.value
    if stored == "queue_offset" and type(value) is int:
        first, end = value, value + 1
        name_first, name_end = "first", "end"
    elif stored == "store_timestamp_ms" and isinstance(value, datetime) and value.tzinfo is not None:
        ms = int(value.timestamp() * 1000)
        first, end = ms - CLOCK_MARGIN_MS, ms + 1 + CLOCK_MARGIN_MS
        name_first, name_end = "first_ms", "end_ms"
    else:
        return narrowed

    # EqualTo is a bound on both sides.
    if not isinstance(condition, LessThan | LessThanOrEqual):
        narrowed = replace(narrowed, **{name_first: max(getattr(narrowed, name_first), first)})
    if not isinstance(condition, GreaterThan | GreaterThanOrEqual):
        narrowed = replace(narrowed, **{name_end: min(getattr(narrowed, name_end), end)})

    return narrowed
