"""Numbers as a picture: the bars of a curve, for an SVG that needs no script and no style of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 960, 120


@dataclass(frozen=True)
class Bar:
    """One bar.

    Parameters
    ----------
    x, y, width, height : float
        In a picture of `WIDTH` times `HEIGHT`; y goes down.
    words : str
        What it stands for.
    """

    x: float
    y: float
    width: float
    height: float
    words: str


def bars(values: Sequence[int], words: Sequence[str]) -> list[Bar]:
    """One bar for each value; the highest fills the picture, and one that is not 0 can be seen.

    Parameters
    ----------
    values : sequence of int
        [n] Not negative.
    words : sequence of str
        [n]
    """
    if not values:
        return []
    step, highest = WIDTH / len(values), max(1, *values)
    heights = [0.0 if not value else max(1.0, HEIGHT * value / highest) for value in values]
    return [
        Bar(round(number * step, 2), round(HEIGHT - height, 2), round(max(0.5, step - 1), 2), round(height, 2), text)
        for number, (height, text) in enumerate(zip(heights, words, strict=True))
    ]


def strip(sizes: Sequence[int], words: Sequence[str]) -> list[Bar]:
    """Bars of one height side by side, each as wide as its size."""
    total = sum(sizes) or 1
    found, x = list[Bar](), 0.0
    for size, text in zip(sizes, words, strict=True):
        width = WIDTH * size / total
        found.append(Bar(round(x, 2), 0, round(max(0.5, width - 1), 2), 24, text))
        x += width
    return found
