"""Which part of its cases a mode takes in a run of `make crash`: another part for each seed, so that a few runs take all.

The seed of a run is the number of the commit, and so the runs of some commits in a row take every case between them. Each
kind of case has its own number of such runs. Cases come in an order that repeats itself (eight bits of a byte, the kinds of
power cuts at one operation), and every run takes some of each. CI has less time: with `SHARE=4` a run takes a quarter of the
cases of the dearest kinds.
"""

from __future__ import annotations

import itertools
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
share = 1
"""A run takes one in so many of the cases that it would take otherwise (`make crash SHARE=4`)."""
changed: frozenset[str] | None = None
"""Planted bugs are searched if they are in these files, named as git does (`make crash CHANGED=main`); None: in any."""


def runs(every: int) -> int:
    """Return how many runs take all cases between them, where `every` of them would if each took its whole part."""
    return every * share


def is_taken(number: int, every: int, seed: int, part: tuple[int, int] = (0, 1)) -> bool:
    """Whether this process takes a case.

    Parameters
    ----------
    number : int
        Of the case among all of its kind.
    every : int
        The number of runs that take all cases between them; 1: each run takes all.
    seed : int
        Of the run.
    part : (int, int)
        Which of how many processes this one is: they divide what the run takes.
    """
    block, place = divmod(number, every)
    shift = 0 if every % 2 else block * every // 8  # an even number would take the same bits of each byte
    return place == (seed + shift) % every and block % part[1] == part[0]


def taken(cases: Iterable[T], every: int, seed: int, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[int, T]]:
    """Yield the cases that this process takes, each with its number among all."""
    for number, case in enumerate(cases):
        if is_taken(number, every, seed, part):
            yield number, case


def taken_by_kind(
    cases: Iterable[T], every: Callable[[T], int], seed: int, part: tuple[int, int] = (0, 1)
) -> Iterator[T]:
    """Yield the cases that this process takes, where `every` differs from case to case; each has numbers of its own."""
    numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
    for case in cases:
        runs = every(case)
        if is_taken(next(numbers[runs]), runs, seed, part):
            yield case


def changed_since(folder: Path, commit: str) -> frozenset[str]:
    """Name the files that differ from a commit, with those that are not committed yet; ValueError if there is no such commit."""
    git = ["git", "-c", f"safe.directory={folder}", "-C", str(folder)]
    listed = [
        subprocess.run([*git, *words], capture_output=True, text=True, check=False)
        for words in (["diff", "--name-only", commit, "--"], ["ls-files", "--others", "--exclude-standard"])
    ]
    if listed[0].returncode:
        raise ValueError(f"git knows no commit {commit!r}: {listed[0].stderr.strip()}")
    return frozenset(name for done in listed for name in done.stdout.splitlines())


def of_commit(folder: Path) -> int:
    """Return the number of the commit that is checked out; 1 where there is no repository.

    In a clone without its history, which has no numbers, it is the commit's time in seconds.
    """

    def said(*words: str) -> str:
        try:
            git = ["git", "-c", f"safe.directory={folder}"]
            done = subprocess.run([*git, *words], cwd=folder, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    is_shallow = said("rev-parse", "--is-shallow-repository") == "true"
    number = said("show", "-s", "--format=%ct", "HEAD") if is_shallow else said("rev-list", "--count", "HEAD")
    return int(number or 1)
