"""Reduces a failing case to a minimal reproducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
MOST_TRIES = 300


def smallest(parts: Sequence[T], wrong: Callable[[Sequence[T]], bool], most_tries: int = MOST_TRIES) -> list[T]:
    """Return the parts that are needed: without any one of them, the failure disappears.

    Parts are dropped in blocks, first large ones, then smaller ones, then one by one (Zeller's delta debugging).

    Parameters
    ----------
    parts : sequence
        All parts, with which the failure occurs.
    wrong : callable
        Whether the failure still occurs with these parts.
    most_tries : int
        After this many calls, the current result is returned.
    """
    left = list(parts)
    size = len(left)
    while size and most_tries > 0:
        at, before = 0, len(left)
        while at < len(left) and most_tries > 0:
            fewer = left[:at] + left[at + size :]
            most_tries -= 1
            if wrong(fewer):
                left = fewer
            else:
                at += size
        if size == 1 and len(left) == before:
            break
        size = min(size // 2 or 1, len(left))
    return left
