"""Reads JSON that others wrote: in time and memory that are in proportion to what is allowed, whatever the text is."""

from __future__ import annotations

import json
from typing import Any

_MOST_LEVELS = 64
"""How deep a text may nest. What is nested deeper cannot be written again: Python's recursion ends before that."""


def check_values(text: str, most: int) -> None:
    """Raise `ValueError` if a text has more values than are read; this takes no memory."""
    count = text.count(",") + text.count("{") + text.count("[")
    if count > most:
        raise ValueError(f"some {count:,} values; at most {most:,} are read")


def bounded_json(text: str, most_values: int) -> Any:
    """Return what a JSON text says.

    Parameters
    ----------
    most_values : int
        How many values the text may have at most; each takes some 100 bytes of memory, however short it is in the text.

    Raises
    ------
    ValueError
        It is no JSON, or has too many values, or nests too deeply.
    """
    check_values(text, most_values)

    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested too deeply; at most {_MOST_LEVELS} levels are read") from None
    if text.count("{") + text.count("[") <= _MOST_LEVELS:
        return value

    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        inner = (
            container.values() if isinstance(container, dict) else container
            for container in level
            if isinstance(container, dict | list)
        )
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"nested too deeply; at most {_MOST_LEVELS} levels are read")
