"""The first query of a session: how long until its first micro-batch is done, and which Python processes Spark starts.

Each measurement is a program of its own: `python -m benchmarks.first_query KIND FOLDER`. The floor is a Python sink (or
source) that imports nothing of this project. Imports are also measured alone, as the user CPU time of a new Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import machine, process_tree
from benchmarks.measure import Rounds, Settings

KINDS = ("sink_floor", "sink", "source_floor", "source")
IMPORTS = {
    "pyspark": "import pyspark.sql.datasource",
    "pyarrow": "import pyspark.sql.datasource, numpy, pyarrow.compute",
    "discovery": "from pyspark_messagestore import DefaultSource",
    "data_source": "from pyspark_messagestore import MessageStoreDataSource",
    "sink": "import pyspark_messagestore.sink.writers",
    "source": "import pyspark_messagestore.source.readers",
}
"""What a process of Spark's imports: nothing of ours, with Arrow, then what each of its steps needs of ours."""
_WATCH_S = 0.03
_ROWS = 10


def run(settings: Settings) -> None:
    """Measure figure 10."""
    rounds, processes = Rounds(), {}
    for number in range(settings.rounds):
        for kind in KINDS:
            folder = settings.folder / f"{kind}-{number}"
            folder.mkdir()
            command = [sys.executable, "-m", "benchmarks.first_query", kind, str(folder)]
            done = subprocess.run(command, cwd=machine.ROOT, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            rounds.add(f"first.{kind}", found["wall_s"])
            rounds.add(f"first.{kind}.python_cpu", sum(each["cpu_s"] for each in found["processes"]))
            rounds.add(f"first.{kind}.python_processes", len(found["processes"]))
            processes[kind] = found["processes"]

        for name, words in IMPORTS.items():
            rounds.add(f"first.import.{name}", _import_s(words))

    for kind in KINDS:
        floor = None if kind.endswith("_floor") else f"{kind}_floor"
        for suffix, unit in (("", "s"), (".python_cpu", "s"), (".python_processes", "processes")):
            other = floor and f"first.{floor}{suffix}"
            rounds.report(f"first.{kind}{suffix}", unit, floor=other, lower_is_better=True)
    for name in IMPORTS:
        floor = None if name == "pyspark" else "first.import.pyspark"
        rounds.report(f"first.import.{name}", "s of CPU", floor=floor, lower_is_better=True)

    for kind in KINDS:
        print(f"\n  {kind}: the Python processes of the last round, in the order of their start", file=sys.stderr)
        for each in processes[kind]:
            print(f"    at {each['at_s']:5.1f} s  {each['cpu_s']:5.2f} s of CPU  {each['words']}", file=sys.stderr)


def _import_s(words: str) -> float:
    """The user CPU time of a new Python that imports something; the least of three."""
    program = f"{words}\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
    return min(
        float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    )


class _Watch(threading.Thread):
    """Notes every Python process below this one, and what it has used when it is seen last."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begun = time.monotonic()
        self.seen: dict[int, dict[str, Any]] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(_WATCH_S):
            for pid, process in process_tree.tree([os.getpid()]).items():
                if process.name.startswith("python") and pid != os.getpid():
                    self._note(pid, process)

    def _note(self, pid: int, process: process_tree.Used) -> None:
        with suppress(OSError):
            arguments = Path("/proc", str(pid), "cmdline").read_bytes().decode().split("\0")
            words = " ".join(arguments[arguments.index("-m") + 1 :]).strip() if "-m" in arguments else "python"
            if process.parent in self.seen:
                words += " (forked)"
            first = self.seen.setdefault(pid, {"at_s": time.monotonic() - self.begun})
            first |= {"cpu_s": process.user_s + process.system_s, "words": words}


def _first_batch(kind: str, folder: Path) -> dict[str, Any]:
    from benchmarks.spark_streams import FOUR, MESSAGES, session

    if kind == "source":
        from benchmarks import messages
        from messagestore import MessageColumns, MessageStore

        with MessageStore.open(folder / "store") as store:
            store.append_batch(MessageColumns.from_arrow(messages.table(_ROWS), topic="flights"))
    spark = session()
    spark.range(10).count()  # Spark itself is up
    watch, begun = _Watch(), time.perf_counter()
    watch.start()
    stream = spark.readStream
    if kind.startswith("sink"):
        rows = stream.format("rate-micro-batch").option("rowsPerBatch", _ROWS).option("numPartitions", 2).load()
        writer = rows.selectExpr(*MESSAGES).writeStream.format("messagestore" if kind == "sink" else "dropping")
        writer = writer.option("topic", "flights") if kind == "sink" else writer
    elif kind == "source":
        rows = stream.format("messagestore").schema(FOUR).option("subscribe", "flights")
        writer = rows.option("startingOffsets", "earliest").load(str(folder / "store")).writeStream.format("noop")
    else:
        writer = stream.format("ready").option("rows", _ROWS).load().writeStream.format("noop")
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start(
        *([str(folder / "store")] if kind == "sink" else [])
    )
    while not any(progress["numInputRows"] for progress in query.recentProgress):
        if not query.isActive:
            raise RuntimeError(str(query.exception()))
        time.sleep(0.02)
    wall_s = time.perf_counter() - begun
    watch.stopped.set()
    watch.join()
    query.stop()
    spark.stop()
    return {"wall_s": wall_s, "processes": sorted(watch.seen.values(), key=lambda each: each["at_s"])}


if __name__ == "__main__":
    print(json.dumps(_first_batch(sys.argv[1], Path(sys.argv[2]))), flush=True)
