"""Rows that say what a store contains, by name: `StoreReader.view`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from messagestore.errors import ConfigError
from messagestore.inspect.figures import apps_of, batches_of, figures_of
from messagestore.inspect.lag import groups_of
from messagestore.inspect.queues import Places, places_of, queue_rows, segments_of, topics_of
from messagestore.inspect.standing import Looked, status_of
from messagestore.read.view import StoreView

Rows = tuple[list[dict[str, Any]], list[str]]
"""The rows, and what could not be read, in words."""


def rows_of(view: StoreView, name: str) -> Rows:
    """The rows of `StoreReader.view`, and what could not be read, in words.

    Raises
    ------
    ConfigError
        There is no view of this name.
    """
    if name not in _VIEWS:
        raise ConfigError(f"view: found {name!r:.60}; allowed are {', '.join(_VIEWS)}", key="view", value=name)
    return _VIEWS[name](view)


def overall_of(view: StoreView) -> dict[str, Rows]:
    """The rows of the views `figures`, `status`, `topics` and `queues` by name, from one look at the queues, which is
    what takes the time of each.
    """
    looked, faults = Looked(view), list[str]()
    figures, places = _as_row(figures_of(view, looked)), looked.places(faults)
    of_topics = [*faults]
    return {
        "figures": figures,
        "status": _as_row(status_of(view, looked)),
        "topics": (topics_of(view, places, of_topics), of_topics),
        "queues": (queue_rows(places), faults),
    }


def _of_queues(view: StoreView, rows: Callable[[Places, list[str]], list[dict[str, Any]]]) -> Rows:
    faults: list[str] = []
    return rows(places_of(view, faults, in_log=False), faults), faults


def _as_row(found: dict[str, Any]) -> Rows:
    """One row, and what could not be read."""
    faults: list[str] = found.pop("faults")
    return [found], faults


_VIEWS: dict[str, Callable[[StoreView], Rows]] = {
    "topics": lambda view: _of_queues(view, lambda places, faults: topics_of(view, places, faults)),
    "queues": lambda view: _of_queues(view, lambda places, _: queue_rows(places)),
    "groups": groups_of,
    "segments": lambda view: (segments_of(view), []),
    "batches": lambda view: (batches_of(view), []),
    "apps": lambda view: (apps_of(view), []),
    "status": lambda view: _as_row(status_of(view)),
    "figures": lambda view: _as_row(figures_of(view)),
}
"""What `StoreReader.view` shows, by name."""
