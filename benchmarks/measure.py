"""Measures figures, compares them with floors, and prints them.

Each figure is printed as one JSON line on stdout:

    {"name": ..., "value": ..., "unit": ..., "floor": ..., "ratio": ...}

`value` and `floor` are medians over the rounds, in the same unit. `ratio` is the median of value / floor of each round:
at most about 1 for a rate, at least about 1 for a time. A floor has a line of its own, with null for `floor` and
`ratio`. The table on stderr also has the best round, and the least CPU time (all threads, kernel included) for one
message. If other programs use the machine, these two say more about the code.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
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
        The folder for data roots; it is deleted afterwards.
    rows : int
        The number of messages in a batch.
    rounds : int
    quick : bool
        True: only check that everything runs; the numbers mean less.
    publish : str | None
        The name under which a suite that has a document writes it; None: it only prints.
    size : int | None
        The bytes of the large store, for the suite that has one; None: as many as usual.
    """

    folder: Path
    rows: int
    rounds: int
    quick: bool
    publish: str | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """How long something took; the CPU time is that of all threads."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


@dataclass
class Rounds:
    """The values of all figures by name, one value for each round."""

    values: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add the value of one round."""
        self.values.setdefault(name, []).append(value)

    def add_rate(self, name: str, count: int, taken: Taken) -> None:
        """Add one round of a rate: `count` items in the time taken."""
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
            The name of another series in the same unit.
        goal : float | None
            The value that the project aims at; it is shown only in the table.
        goal_ratio : float | None
            The ratio to the floor that the project aims at; it is shown only in the table.
        lower_is_better : bool
            True for times and counts.
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
    """Print a heading of the table."""
    print(f"\n{text}", file=sys.stderr, flush=True)


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[Taken, T]:
    """How long a call takes, and its result. Python's garbage collector is off meanwhile."""
    gc.collect()
    gc.disable()
    try:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = call(*args, **kwargs)
        return Taken(time.perf_counter() - wall_s, time.process_time() - cpu_s), result
    finally:
        gc.enable()


MEMORY = Path("/dev/shm")


def in_memory(folder: Path) -> bool:
    """Whether a folder is on the file system in memory."""
    return MEMORY.exists() and folder.stat().st_dev == MEMORY.stat().st_dev


def room_in_memory(size: int) -> bool:
    """Whether `size` bytes are free on the file system in memory."""
    return MEMORY.exists() and shutil.disk_usage(MEMORY).free >= size


def settle(folder: Path, size: int = 0) -> None:
    """Prepare the machine for a figure: write the dirty pages of earlier figures, and claim `size` bytes of memory.

    A virtual machine returns free memory to its host and gets it back page by page, at about 10 us for 4 KiB: ten times
    the cost of the bytes themselves. The first figure would include that time. Writing a file of that size here avoids
    this. In memory there is nothing to write, and syncing everybody's disks would only wait.
    """
    if in_memory(folder):
        return
    os.sync()
    path, piece = folder / "settle", bytes(min(size, _PIECE))
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(0, size, _PIECE):
                file.write(piece)
    finally:
        path.unlink()


class Floors:
    """The times that the machine needs for the bytes alone, in one process.

    Parameters
    ----------
    folder : Path
        A folder on the file system of the stores.
    size : int
        The number of bytes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / "floor"
        self.data: NDArray[np.uint8] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        self._target = np.ones(size, np.uint8)

    def memcpy(self) -> Taken:
        """Copy the bytes within memory that is already allocated."""
        return timed(np.copyto, self._target, self.data)[0]

    def pwrite(self) -> Taken:
        """Write the bytes into the page cache, to a new sparse file."""
        return self._write(sync=False)

    def fdatasync(self) -> Taken:
        """Write the bytes as `pwrite` does, and sync them once."""
        return self._write(sync=True)

    def pread(self) -> Taken:
        """Read the bytes from the page cache."""
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
        """Add one round of the three floors of writing, as items per second."""
        settle(self.path.parent, len(self.data))
        rounds.add_rate(f"{prefix}.floor.memcpy", count, self.memcpy())
        rounds.add_rate(f"{prefix}.floor.pwrite", count, self.pwrite())
        rounds.add_rate(f"{prefix}.floor.fdatasync", count, self.fdatasync())
