"""Runs the kill matrix on a real Spark: places of the protocol times victims.

A cell runs a query of three micro-batches; in the second one, its victim is killed once at its place. Then the query is
started again on the same checkpoint, in the same JVM or, if that was killed, in a new one, which continues with the
following cells. Thus each killed JVM costs one start of a JVM. Several cells that kill the commit's worker share one
query, with a micro-batch for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import spark_runs
from crash import turns
from crash.turns import taken

TASK_PLACES = ("task", "staged-half", "staged")
COMMIT_PLACES = (
    *("commit", "locked", "write-half", "data-synced", "head-written", "head-synced"),
    *("dispatch", "published", "returned"),
)
DRIVER_PLACES = ("offsets", "commits")
LOCAL, CLUSTER = "local[2,4]", "local-cluster[1,1,1024]"
MATRIX: dict[str, list[str]] = {
    LOCAL: [f"{place}:self" for place in (*TASK_PLACES, *COMMIT_PLACES)]
    + [f"{place}:{victim}" for victim in ("jvm", "zombie") for place in (*DRIVER_PLACES, *TASK_PLACES, *COMMIT_PLACES)]
    + ["first:jvm", "foreach:driver", "two:drivers"],
    CLUSTER: [f"{place}:executor" for place in TASK_PLACES],
}
QUICK: dict[str, list[str]] = {
    LOCAL: [
        *("commit:self", "write-half:self", "data-synced:self", "head-written:self", "head-synced:self"),
        *("dispatch:self", "published:self", "returned:self", "offsets:jvm", "commits:jvm", "write-half:zombie"),
        *("first:jvm", "foreach:driver", "two:drivers"),
    ],
    CLUSTER: ["staged-half:executor"],
}
TIMEOUT_S = 900


def chosen(names: list[str]) -> dict[str, list[str]]:
    """Return cells by name; `quick` and `all` are names, too."""
    if names == ["quick"]:
        return QUICK
    known = {cell for cells in MATRIX.values() for cell in cells}
    if names != ["all"] and set(names) - known:
        raise SystemExit(f"no such cell: {sorted(set(names) - known)}; there are {sorted(known)}")
    return {master: [cell for cell in MATRIX[master] if names == ["all"] or cell in names] for master in MATRIX}


def in_turn(seed: int) -> dict[str, list[str]]:
    """Return the cells of `QUICK` that a run with this seed takes. Those that share a query are in each run."""
    alone = [(master, cell) for master, cells in QUICK.items() for cell in cells if not cell.endswith(":self")]
    some = [one for _, one in taken(alone, turns.runs(1), seed)]
    return {
        master: [cell for cell in cells if cell.endswith(":self") or (master, cell) in some]
        for master, cells in QUICK.items()
    }


def run(cells: dict[str, list[str]], *, say: bool = False) -> Counter[str]:
    """Run cells; return how many were run, by victim.

    Raises
    ------
    AssertionError
        A cell went wrong; the message has the command that runs it alone.
    """
    tally: Counter[str] = Counter()
    for master, wanted in cells.items():
        with tempfile.TemporaryDirectory() as folder:
            left = list(wanted)
            for _ in range(len(wanted) + 1):
                if not left:
                    break

                before = len(left)
                done = _job(master, Path(folder), left)
                for line in done.stdout.splitlines():
                    if line.startswith("CELL "):
                        _, cell, runs = line.split()
                        left.remove(cell)
                        tally[f"Spark cells, victim {cell.partition(':')[2]}"] += 1
                        if say:
                            print(f"{cell:24} each row once, in order; the query ran {runs} times in the last JVM")

                killed = left and left[0].endswith((":jvm", ":zombie", ":driver")) and not Path(folder, "plan").exists()
                assert not left or killed or len(left) < before, _report(left[0], done)

            assert not left, _report(left[0], done)

    tally["Spark cells"] = sum(tally.values())
    return tally


def _job(master: str, folder: Path, cells: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the job; its output goes to files, because a process that outlives it would keep a pipe open."""
    command = [sys.executable, str(Path(__file__).with_name("cell_job.py")), master, str(folder), *cells]
    environment = {**os.environ, **spark_runs.environment(), "MESSAGESTORE_KILL_PLAN": str(folder / "plan")}
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("w") as stdout, err.open("w") as stderr:
        done = subprocess.run(
            command, stdout=stdout, stderr=stderr, timeout=TIMEOUT_S, check=False, env=environment, cwd=folder
        )
    return subprocess.CompletedProcess(command, done.returncode, out.read_text(), err.read_text())


def _report(cell: str, done: subprocess.CompletedProcess[str]) -> str:
    errors = [line for line in done.stderr.splitlines() if "Error" in line and "WARN" not in line]
    last = "\n".join(errors[-12:]) or done.stderr[-3000:]
    return (
        f"cell {cell} went wrong\nagain: PYTHONPATH=faults:tests .venv/bin/python -m spark_faults --cell {cell}\n{last}"
    )
