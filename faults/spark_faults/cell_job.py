"""Runs cells of the kill matrix on one real Spark; `spark_faults.cells` starts it, again after its JVM was killed.

    python cell_job.py MASTER FOLDER CELL...        CELL is place:victim, or two:drivers

A cell that was begun continues with the same checkpoint. The job prints a line `CELL <cell> <runs of the query>` for
each cell that is finished and correct.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import job
import killing
from pyspark.errors import StreamingQueryException

from spark_runs import bodies, fill, in_order

ROWS_OF_A_BATCH = 250
ROWS = 3 * ROWS_OF_A_BATCH
BATCH = 1
RUNS = 5
TWO_DRIVERS = "two:drivers"
TASK_PLACES = ("task", "staged")
FIRST = "first"
"""As `offsets`, in the first micro-batch of a query that begins at `latest`; all messages arrive after that."""


def main() -> None:
    warnings.simplefilter("ignore")
    master, folder, *cells = sys.argv[1:]
    plan = Path(os.environ[killing.PLAN])
    spark = job.session(master)
    spark.dataSource.register(killing.KillingSource)
    commits = [cell for cell in cells if cell.endswith(":self") and not cell.startswith(TASK_PLACES)]
    if len(commits) > 1:
        in_one_query(spark, Path(folder, "commits"), commits, plan)
        for cell in commits:
            print("CELL", cell, len(commits) + 1, flush=True)
    for cell in cells if len(commits) < 2 else [cell for cell in cells if cell not in commits]:
        print("CELL", cell, one(spark, Path(folder, cell.replace(":", "-")), cell, plan), flush=True)
    spark.stop()


def in_one_query(spark: object, folder: Path, cells: list[str], plan: Path) -> None:
    """Run cells whose victim is the commit's worker, which ends the query.

    Each cell takes one micro-batch and one new start.
    """
    root, checkpoint, count = str(folder / "store"), str(folder / "checkpoint"), (len(cells) + 1) * ROWS_OF_A_BATCH
    fill(root, count)
    for number, cell in enumerate(cells, start=1):
        plan.write_text(f"{cell.partition(':')[0]} self {number}")
        try:
            job.copy(spark, root, checkpoint, "killing")
        except StreamingQueryException:
            assert not plan.exists(), f"{cell}: the query failed before it came to this place"
        else:
            raise AssertionError(f"{cell}: nobody came to this place")
    job.copy(spark, root, checkpoint, "killing")
    check_copied(", ".join(cells), root, count)


def one(spark: object, folder: Path, cell: str, plan: Path) -> int:
    """Run the query of one cell until it ends by itself; then count."""
    place, victim = cell.split(":")
    root, checkpoint = str(folder / "store"), str(folder / "checkpoint")

    others = []
    if not folder.exists():
        fill(root, 0 if place == FIRST else ROWS)
        plan.with_suffix(".done").unlink(missing_ok=True)
        if cell == TWO_DRIVERS:
            others = [another_driver(folder, root, checkpoint)]
        else:
            at = "offsets" if place == FIRST else place
            plan.write_text(f"{at} {os.getpid() if victim == 'driver' else victim} {BATCH}")

    runs = 0
    while True:
        runs += 1
        try:
            if place == "foreach":
                job.copy_foreach(spark, root, checkpoint, "killing")
            else:
                starting = "latest" if place == FIRST else "earliest"
                job.copy(spark, root, checkpoint, "killing", starting)
            if all(other.poll() is not None for other in others):
                break
        except StreamingQueryException as error:
            lines = [line for line in str(error).splitlines() if "Error" in line or "Exception" in line]
            print("FAILED", cell, *lines[-1:], flush=True)
            if runs >= RUNS and not others:
                raise

    assert not plan.exists(), f"{cell}: nobody came to this place"
    wait_for_zombie(plan)
    check_copied(cell, root, killing.ARRIVING if place == FIRST else ROWS)
    return runs


def check_copied(cell: str, root: str, row_count: int) -> None:
    """Check that each row of `flights` is in `copy` once, in order."""
    found = bodies(root, "copy")
    assert found == bodies(root, "flights"), f"{cell}: {len(found)} of {row_count} rows"
    assert len(found) == row_count
    assert set(found.values()) == {1}, f"{cell}: rows are there twice"
    assert in_order(root, "copy"), f"{cell}: out of order"


def another_driver(folder: Path, root: str, checkpoint: str) -> subprocess.Popen[bytes]:
    """Start a second driver on the same checkpoint; when both reach the same batch, one of the two fails."""
    script = Path(job.__file__)
    with (folder / "other.txt").open("wb") as words:
        other = subprocess.Popen(
            [sys.executable, str(script), "local[2]", root, checkpoint, "killing"], stdout=words, stderr=words
        )
    while not Path(checkpoint, "offsets", "0").exists() and other.poll() is None:
        time.sleep(0.05)  # from here on both are at work
    return other


def wait_for_zombie(plan: Path) -> None:
    """Wait until the worker that outlived its JVM has finished."""
    note = plan.with_name(plan.name + ".zombie")
    if note.exists():
        pid = int(note.read_text())
        end_s = time.monotonic() + 60
        while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < end_s:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.1)
        note.unlink()


if __name__ == "__main__":
    main()
