"""Where a process dies within a story: at each operation, by a kill or by each kind of power cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from crash.power_cut import MODES, Image
from crash.simdisk import RecordingDisk
from crash.turns import taken_by_kind


class Recorded(Protocol):
    """What was recorded once, of a process that did not die."""

    @property
    def name(self) -> str: ...

    @property
    def disk(self) -> RecordingDisk: ...


S = TypeVar("S", bound=Recorded)


@dataclass(frozen=True)
class Point(Generic[S]):
    """Where the process dies: before operation `cut`. `mode` "all" is a kill, the others are kinds of power cuts."""

    story: S
    cut: int
    mode: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.story.name}/{self.cut}/{self.mode}/{self.seed}"

    @property
    def is_kill(self) -> bool:
        return self.mode == "all"

    def left(self) -> Image | None:
        """What it leaves; None: nothing that a power cut of this kind could change."""
        if self.is_kill:
            return self.story.disk.image(self.cut, "all")
        return next(iter(self.story.disk.images(self.cut, (self.mode,), limit=1, random_count=1, seed=self.seed)), None)

    def said(self, image: Image) -> str:
        return f"kill {self.cut}" if self.is_kill else f"power cut {self.cut}, {image.label}"


def points(stories: Sequence[S], seed: int) -> list[Point[S]]:
    """A kill at each operation of each story, and each kind of power cut there, which `seed` decides."""
    return [
        Point(story, cut, mode, seed) for story in stories for cut in range(story.disk.position + 1) for mode in MODES
    ]


def chosen(
    stories: Sequence[S], seed: int, part: tuple[int, int], *, every: tuple[int, int] | None = None
) -> Iterator[Point[S]]:
    """Yield this part of the points that a run with this seed takes.

    Parameters
    ----------
    every : (int, int), optional
        A quick run takes one kill and one power cut in so many. Without it, a run takes all: first the kills, in any order.
    """
    each = points(stories, seed)
    if every is not None:
        return taken_by_kind(each, lambda point: every[0] if point.is_kill else every[1], seed, part)
    random.Random(seed).shuffle(each)
    return iter(sorted(each, key=lambda point: not point.is_kill)[part[0] :: part[1]])
