"""What is a figure, and what is it compared with?

One JSON line for each on stdout:

    {"name": ..., "value": ..., "unit": ..., "floor": ..., "ratio": ...}

`value` and `floor` are medians over the rounds, in the same unit; `ratio` is the median of value / floor of each round:
at most about 1 for a rate, at least about 1 for a time. A floor has a line of its own, with null for both. The table on
stderr also has the best round, and the least CPU time (all threads, kernel included) for one message: where others use
the machine, these say more about the code.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
T = TypeVar("T")
_PIECE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, where and how often.

    Parameters
    ----------
    folder : Path
        For data roots; removed afterwards.
    rows : int
        Messages in a batch.
    rounds : int
    quick : bool
        A look whether everything runs; the numbers mean less.
    """

    folder: Path
    rows: int
    rounds: int
    quick: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """How long something took; the CPU time is that of all threads."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


@dataclass
class Rounds:
    """Values by name, one for each round."""

    values: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """The value of one round."""
        self.values.setdefault(name, []).append(value)

    def add_rate(self, name: str, count: int, taken: Taken) -> None:
        """One round of a rate: `count` items in the time taken."""
        self.add(name, count / taken.wall_s)
        self.cpu_s.setdefault(name, []).append(taken.cpu_s / count)

    def report(
        self,
        name: str,
        unit: str,
        *,
        floor: str | None = None,
        goal: float | None = None,
        goal_ratio: float | None = None,
        lower_is_better: bool = False,
    ) -> None:
        """Print a figure.

        Parameters
        ----------
        name, unit : str
        floor : str | None
            Name of another series in the same unit.
        goal : float | None
            What was promised; only in the table.
        goal_ratio : float | None
            The same, of the ratio to the floor.
        lower_is_better : bool
            For times and counts.
        """
        values = self.values[name]
        value, best = statistics.median(values), (min if lower_is_better else max)(values)
        floor_value = ratio = None
        if floor is not None:
            floors = self.values[floor]
            floor_value = statistics.median(floors)
            ratio = statistics.median(v / f for v, f in zip(values, floors, strict=True))
        line = {
            "name": name,
            "value": _short(value),
            "unit": unit,
            "floor": _short(floor_value),
            "ratio": _short(ratio),
        }
        print(json.dumps(line), flush=True)
        text = f"  {name:<44} {_plain(value):>12} {unit:<12} best {_plain(best):>12}"
        if name in self.cpu_s:
            text += f"  CPU {1e9 * min(self.cpu_s[name]):7,.0f} ns"
        if ratio is not None:
            text += f"  {ratio:9.3g} x {floor}"
        if goal is not None:
            met = best <= goal if lower_is_better else best >= goal
            text += f"  (goal {_plain(goal)}: best is {'there' if met else f'at {best / goal:.2f}'})"
        if goal_ratio is not None and ratio is not None:
            text += f"  (goal {goal_ratio}: {'there' if ratio >= goal_ratio else f'at {ratio / goal_ratio:.2f}'})"
        print(text, file=sys.stderr, flush=True)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def title(text: str) -> None:
    """A heading in the table."""
    print(f"\n{text}", file=sys.stderr, flush=True)


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[Taken, T]:
    """How long a call takes, and what it gives; the collector is not part of it."""
    gc.collect()
    gc.disable()
    try:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = call(*args, **kwargs)
        return Taken(time.perf_counter() - wall_s, time.process_time() - cpu_s), result
    finally:
        gc.enable()


def settle(folder: Path, size: int = 0) -> None:
    """Before a figure: what earlier ones left dirty is written, and `size` bytes of memory are at hand.

    A virtual machine hands back free memory to its host and gets it again page by page, at some 10 us for 4 KiB: ten
    times what the bytes cost. Whatever is measured first would pay for it, so it is paid here, by a file of that size.
    """
    os.sync()
    path, piece = folder / "settle", bytes(min(size, _PIECE))
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(0, size, _PIECE):
                file.write(piece)
    finally:
        path.unlink()


class Floors:
    """What the machine needs for the bytes alone, in one process.

    Parameters
    ----------
    folder : Path
        On the file system the stores are on.
    size : int
        Bytes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / "floor"
        self.data: NDArray[np.uint8] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        self._target = np.ones(size, np.uint8)

    def memcpy(self) -> Taken:
        """Copy them in memory that is there already."""
        return timed(np.copyto, self._target, self.data)[0]

    def pwrite(self) -> Taken:
        """Write them into the page cache, into a new sparse file."""
        return self._write(sync=False)

    def fdatasync(self) -> Taken:
        """As `pwrite`, and sync them once."""
        return self._write(sync=True)

    def pread(self) -> Taken:
        """Read them from the page cache."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._pwrite(fd)
            view = self._target.data
            starts = range(0, len(view), _PIECE)
            return timed(lambda: [os.preadv(fd, [view[at : at + _PIECE]], at) for at in starts])[0]
        finally:
            os.close(fd)
            self.path.unlink()

    def _write(self, *, sync: bool) -> Taken:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, len(self.data))

            def write() -> None:
                self._pwrite(fd)
                if sync:
                    os.fdatasync(fd)

            return timed(write)[0]
        finally:
            os.close(fd)
            self.path.unlink()

    def _pwrite(self, fd: int) -> None:
        view = self.data.data
        for at in range(0, len(view), _PIECE):
            os.pwrite(fd, view[at : at + _PIECE], at)

    def add_rates(self, rounds: Rounds, prefix: str, count: int) -> None:
        """One round of the three floors of writing, as items per second."""
        settle(self.path.parent, len(self.data))
        rounds.add_rate(f"{prefix}.floor.memcpy", count, self.memcpy())
        rounds.add_rate(f"{prefix}.floor.pwrite", count, self.pwrite())
        rounds.add_rate(f"{prefix}.floor.fdatasync", count, self.fdatasync())
