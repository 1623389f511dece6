"""Runs `messagestore dump` during retention: every remaining record is shown once, and deleted ones are counted."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

from crash.counts import Counts
from crash.judge import Verdict
from messagestore import MessageExt
from messagestore.inspect.operator import dump
from small import SMALL, filled

_HISTORIES = 20
_COUNT = 300


def dumps(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Delete segments, the first ones first, after any record that was shown."""
    verdict = Verdict()
    for number in range(_HISTORIES):
        target = filled(root / str(number), _COUNT)
        segments = sorted((target / "commitlog").iterdir())
        gone_after = sorted(chance.randrange(_COUNT) for _ in segments[:-1])
        notes: list[str] = []
        try:
            shown = dict(_shown(dump(str(target), SMALL, None, notes.append), segments, gone_after))
            _compare(verdict, f"history {number}", shown, notes)
        except FileNotFoundError as error:
            verdict.misread.append(f"history {number}: {error!r}")
        counts.cases["dumps beside retention"] += 1
    return verdict


def _shown(
    records: Iterator[tuple[bytes, MessageExt]], segments: list[Path], gone_after: list[int]
) -> Iterator[tuple[int, int]]:
    """Return the place and size of each record."""
    for shown, (_, message) in enumerate(records):
        yield message.physical_offset, message.size
        while gone_after and gone_after[0] <= shown:
            del gone_after[0]
            segments.pop(0).unlink()


def _compare(verdict: Verdict, name: str, shown: dict[int, int], notes: list[str]) -> None:
    """Check that places are consecutive, except for the reported gaps and the BLANK records at the ends of segments."""
    told = {int(end) - int(size): int(end) for size, end in
            (re.search(r"^(\d+) bytes .* Continuing at (\d+)$", note).groups() for note in notes)}  # type: ignore[union-attr] # fmt: skip
    places = sorted(shown)
    if list(shown) != places:
        verdict.misread.append(f"{name}: out of order")
    for before, place in itertools.pairwise(places):
        end = before + shown[before]
        segment_end = -(-end // SMALL.mapped_file_size_commit_log) * SMALL.mapped_file_size_commit_log
        if place not in (end, segment_end, told.get(end)):
            verdict.lost.append(f"{name}: nothing between {end} and {place}, and nothing was said")
