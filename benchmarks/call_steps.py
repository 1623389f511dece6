"""Which step of the work a profile's time belongs to.

`cProfile` says how long each function took, and who called it. The time of a function that is not a step of its own (of
numpy, of Arrow, of the interpreter, of `Disk`) goes to its callers, in proportion, until a function of a step is
reached. Modules make the steps, so that a function may be renamed or moved inside its module; a module without a step
appears under its own name.
"""

from __future__ import annotations

import cProfile
import pstats
import re
from collections import defaultdict
from typing import Any

Function = tuple[str, int, str]
"""The file, the line and the name of a function, as `pstats` has them."""

RECEIVE = "receive Arrow"
TASK = (
    (r"profiled_sink:received$", RECEIVE),
    (r"pyspark_messagestore/sink/writers:", "gather"),
    (r"pyspark_messagestore/sink/columns:", "map columns"),
    (r"messagestore/(batches/staging|files/staging_files):", "stage"),
    (r"messagestore/(format|_kernel|kernel)\b.*:", "encode"),
)
COMMIT = (
    (r"files/disk:(fdatasync|fsync_dir|syncfs|start_writeback)$", "sync"),
    (r"messagestore/(batches/staging|files/staging_files):", "read back"),
    (r"messagestore/(batches/plan|writer/queue_numbers|format/batch_record):", "place"),
    (r"messagestore/(files/index_\w+):", "index"),
    (r"messagestore/(files/consume_queue|log/dispatch|log/queue_\w+|files/numbered_files):", "queue units"),
    (r"messagestore/(batches/append):add\w*$", "CRC of the batch"),
    (r"messagestore/(batches/append|files/commit_log|writer/log_writer):", "write the log"),
    (r"messagestore/(format|_kernel|kernel)\b.*:", "stamp"),
    (r"messagestore/files/(state|checkpoint|unsynced|topics)|messagestore/log/batch_journal", "small files"),
)
_PASSED_ON = re.compile(r"messagestore/(files/disk|format/record):(?!fdatasync|fsync_dir|syncfs|start_writeback)")
"""Functions that many steps call: files, and the CRC of one value. Their time goes to the callers."""
_OURS = re.compile(r"(pyspark_messagestore|messagestore|benchmarks)/(.*)\.py$")


def seconds(profile: cProfile.Profile, steps: tuple[tuple[str, str], ...]) -> dict[str, float]:
    """The time of each step, in the unit of the profile's clock."""
    table: dict[Function, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found: dict[str, float] = defaultdict(float)
    moving = {function: row[2] for function, row in table.items()}
    for _ in range(100):  # each pass carries what is left one caller up; a recursion halves it at least
        on: dict[Function, float] = defaultdict(float)
        for function, time in moving.items():
            step, callers = step_of(function, steps), table[function][4]
            if step is not None or not callers:
                found[step or "not in a step"] += time
                continue
            weights = {caller: row[3] or row[2] or 1e-9 for caller, row in callers.items()}
            total = sum(weights.values())
            for caller, weight in weights.items():
                on[caller] += time * weight / total
        moving = on
        if sum(moving.values()) < 1e-6:
            break
    found["not in a step"] += sum(moving.values())
    return {step: time for step, time in found.items() if time > 0}


def step_of(function: Function, steps: tuple[tuple[str, str], ...]) -> str | None:
    """The step that a function belongs to; None: its time goes to its callers."""
    path, _, name = function
    ours = _OURS.search(path)
    if ours is None:
        return None
    place = f"{ours[1]}/{ours[2]}:{name}"
    for pattern, step in steps:
        if re.search(pattern, place) and not (_PASSED_ON.search(place)):
            return step
    if _PASSED_ON.search(place) or ours[1] == "benchmarks":
        return None
    return place.partition(":")[0]
