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
    """One bar for each value. The highest fills the picture, and every value above 0 is visible.

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


@dataclass(frozen=True)
class Part:
    """A part of a strip, divided into several kinds.

    Parameters
    ----------
    bars : list of (int, Bar)
        The number of each kind, and its bar: as wide as the part, and as high as the kind's share.
    words : str
        What the part stands for.
    x, width : float
    marked : bool
        It is drawn with a line above it.
    """

    bars: list[tuple[int, Bar]]
    words: str
    x: float
    width: float
    marked: bool


STRIP_HEIGHT, _MARK_HEIGHT = 48, 8


def stacked(
    sizes: Sequence[int], shares: Sequence[Sequence[int]], words: Sequence[str], marked: Sequence[bool]
) -> list[Part]:
    """Parts side by side, each as wide as its size, and divided by its shares.

    Parameters
    ----------
    sizes : sequence of int
        [n]
    shares : sequence of sequence of int
        [n] How much of each kind is in a part, the first kind at the bottom.
    words : sequence of str
        [n]
    marked : sequence of bool
        [n]
    """
    total = sum(sizes) or 1
    found, x = list[Part](), 0.0
    for size, kinds, text, mark in zip(sizes, shares, words, marked, strict=True):
        width, whole, y = WIDTH * size / total, sum(kinds) or 1, float(STRIP_HEIGHT)
        inner, drawn = max(0.5, width - 1), list[tuple[int, Bar]]()
        for kind, share in enumerate(kinds):
            height = (STRIP_HEIGHT - _MARK_HEIGHT) * share / whole
            y -= height
            if height:
                drawn.append((kind, Bar(round(x, 2), round(y, 2), round(inner, 2), round(height, 2), text)))
        found.append(Part(drawn, text, round(x, 2), round(inner, 2), mark))
        x += width
    return found
