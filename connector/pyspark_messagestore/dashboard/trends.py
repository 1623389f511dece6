"""Whether a reader catches up or falls behind, in words."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark_messagestore.monitoring.history import LagPoint
from pyspark_messagestore.words import count_words


def outlook(points: Sequence[LagPoint]) -> str:
    """Whether a reader catches up, from its last batches, in words."""
    if not points:
        return "unknown: no batch of this query is done yet"
    return trend(points)


def trend(points: Sequence[LagPoint]) -> str:
    """Whether the last points of a curve go up or down, in words."""
    if not points[-1].lag:
        return "caught up"
    last, before = points[-1], [point for point in points[-10:] if point.time_ms < points[-1].time_ms]
    if not before:
        return f"{count_words(last.lag, 'message')} behind"
    per_s = (last.lag - before[0].lag) * 1000 / (last.time_ms - before[0].time_ms)
    if per_s > 0:
        return f"falls behind by {_amount(per_s)} a second"
    if per_s < 0:
        return f"caught up in about {_duration(last.lag / -per_s)}"
    return f"stays {count_words(last.lag, 'message')} behind"


def span_words(span_ms: int) -> str:
    """A span of time, short: `12 s`, `4 min`, `3 h`."""
    return f"{span_ms} ms" if span_ms < 1000 else _duration(span_ms / 1000)


def _amount(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}" if per_s >= 0.1 else "less than 0.1"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(1, seconds):.0f} s"
