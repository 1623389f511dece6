"""Runs histories one after another, each in its own empty folder."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import spark_runs
from crash import turns
from crash.shrink import smallest
from spark_faults import cells
from spark_faults.histories import History
from spark_faults.processes import connect

QUICK_HISTORIES = 2_000
MEMORY = Path("/dev/shm")
"""The disk may be memory, because kills lose nothing that was written."""


def histories(count: int, seed: int, *, seconds: float = 0.0) -> Counter[str]:
    """Run at least `count` histories, and more until the time is over.

    Raises
    ------
    AssertionError
        A history failed; the message has the command that repeats it.
    """
    tally: Counter[str] = Counter()
    end_s = time.monotonic() + seconds
    numbers = random.Random(seed)
    done = 0
    with (
        tempfile.TemporaryDirectory(prefix="spark-faults-", dir=MEMORY if MEMORY.is_dir() else None) as name,
        pytest.MonkeyPatch.context() as p,
    ):
        connect(p)
        while done < count or time.monotonic() < end_s:
            one(Path(name), numbers.getrandbits(48), tally)
            done += 1
    tally["histories"] = done
    return tally


def one(parent: Path, number: int, tally: Counter[str], only: Sequence[int] | None = None) -> None:
    """Run one history and delete its folder; report a failing one with as few actions as possible."""
    failed = _failure(parent, number, tally, only)
    if failed is None:
        return
    if only is None:
        only = smallest(
            range(failed[0].action_count), lambda some: _failure(parent, number, Counter(), some) is not None
        )
        failed = _failure(parent, number, Counter(), only) or failed
    history, error = failed
    actions = f" --actions {','.join(map(str, only))}" if only is not None else ""
    raise AssertionError(
        f"{type(error).__name__}: {error}\n"
        f"again: PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --only {number}{actions}\n"
        + "\n".join(history.story)
    ) from error


def _failure(
    parent: Path, number: int, tally: Counter[str], only: Sequence[int] | None
) -> tuple[History, Exception] | None:
    folder = Path(tempfile.mkdtemp(dir=parent))
    history = History(folder, number, tally)
    try:
        history.run(only)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return history, error
    finally:
        shutil.rmtree(folder)
    return None


def run(seconds: float, seed: int, quick: bool) -> dict[str, int]:
    """Run histories in two processes, and beside them the cells, which mostly wait; see `spark_faults.run`."""
    end_s = time.monotonic() + (0 if quick else seconds)
    half = QUICK_HISTORIES // turns.share // 2
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(histories, half, seed * 2 + part, seconds=0 if quick else seconds) for part in (0, 1)]
        tally = _cells(seed, end_s, quick=quick)
        for part in parts:
            tally += part.result()
    return shown(tally)


def _cells(seed: int, end_s: float, *, quick: bool) -> Counter[str]:
    """Run the quick cells that it is the turn of; in deep mode all, and the others in any order until the time is over."""
    reason = spark_runs.why_not()
    if reason is not None:
        return Counter({f"Spark cells NOT RUN ({reason})": 1})
    if quick:
        return cells.run(cells.in_turn(seed))
    tally = cells.run(cells.QUICK)
    done = {cell for names in cells.QUICK.values() for cell in names}
    rest = [(master, cell) for master, names in cells.MATRIX.items() for cell in names if cell not in done]
    random.Random(seed).shuffle(rest)
    while rest and time.monotonic() < end_s:
        some, rest = rest[:6], rest[6:]
        tally += cells.run({master: [cell for m, cell in some if m == master] for master in cells.MATRIX})
    return tally


_SHOWN = ("queries without their store", "queries over an older backup", "second topics refused", "apps taken over")


def shown(tally: Counter[str]) -> dict[str, int]:
    """Return the counts for one line, with kills and conflicts grouped."""
    sums: Counter[str] = Counter()
    for name, count in tally.items():
        if name.startswith(("killed at", "driver killed", "writer of the input killed", "killed while")):
            sums["kills in histories"] += count
        elif name.startswith("refused with") or name == "ended with BatchConflictError":
            sums["conflicts told"] += count
        elif (
            name in _SHOWN
            or name in ("histories", "commits", "rows", "Spark cells", "a commit sleeps")
            or "NOT RUN" in name
        ):
            sums[{"a commit sleeps": "zombie commits"}.get(name, name)] += count
    return dict(sums)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="spark_faults")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=QUICK_HISTORIES)
    parser.add_argument("--only", type=int, help="the number of a history")
    parser.add_argument("--actions", help="some of its actions: 0,3")
    parser.add_argument("--cell", action="append", help="a cell on a real Spark, place:victim; or `quick`, or `all`")
    arguments = parser.parse_args()

    tally: Counter[str] = Counter()
    try:
        if arguments.cell is not None:
            tally = cells.run(cells.chosen(arguments.cell), say=True)
        elif arguments.only is not None:
            with pytest.MonkeyPatch.context() as patches, tempfile.TemporaryDirectory() as folder:
                connect(patches)
                some = arguments.actions
                actions = None if some is None else [int(number) for number in some.split(",") if number]
                one(Path(folder), arguments.only, tally, actions)
        else:
            tally = histories(arguments.count, arguments.seed, seconds=arguments.seconds)
    except AssertionError:
        traceback.print_exc()
        return 1

    for name, count in sorted(tally.items()):
        print(f"{count:8,}  {name}")
    return 0
