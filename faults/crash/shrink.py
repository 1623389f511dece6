"""Reduction of a failing case to a minimal reproducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
MOST_TRIES = 300


def smallest(parts: Sequence[T], wrong: Callable[[Sequence[T]], bool], most_tries: int = MOST_TRIES) -> list[T]:
    """The parts that are needed: without any one of those left, nothing is wrong any more.

    Parts are dropped in blocks, first large ones, then smaller ones, then one by one (Zeller's delta debugging).

    Parameters
    ----------
    parts : sequence
        With all of them it is wrong.
    wrong : callable
        Whether it still is, with these.
    most_tries : int
        After so many calls what is left is given back.
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
