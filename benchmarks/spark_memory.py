"""The memory of the largest Python process while Spark writes and reads 4 GiB.

There are three queries: a stream into the store, in micro-batches of `--rows`; a stream that reads the same rows back;
and a batch write of all rows again, in one commit. Meanwhile the peaks (VmHWM) of this process and all Python processes
below it are read twenty times a second. The log has 4 GiB, or 128 MiB with `--quick`.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.measure import Rounds, Settings
from benchmarks.spark_streams import MESSAGES, session

LOG_SIZE, QUICK_SIZE = 4 << 30, 128 << 20
RECORD_SIZE = 224
"""The approximate size of the record of one of these messages, in bytes."""
LIMIT_MB = 500
_INTERVAL_S = 0.05


def python_peaks_mb(root: int) -> dict[int, float]:
    """The peak of the resident memory of each Python process that descends from `root`, by process id."""
    parents, peaks = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, KeyError, ValueError):
            lines = Path("/proc", name, "status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            parents[int(name)] = int(status["PPid"])
            if status["Name"].strip().startswith(("python", "pytest")):
                peaks[int(name)] = int(status["VmHWM"].split()[0]) / 1024
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: peak for pid, peak in peaks.items() if pid in below}


@contextmanager
def watched(peaks: dict[int, float]) -> Iterator[None]:
    """Keep `peaks` up to date while the block runs."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_INTERVAL_S):
            peaks.update(python_peaks_mb(os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run(settings: Settings) -> None:
    """Run the three queries, each in a session of its own, so that its workers are new."""
    size = QUICK_SIZE if settings.quick else LOG_SIZE
    rows, rounds = size // RECORD_SIZE, Rounds()
    root, checkpoint = settings.folder / "store", settings.folder / "checkpoint"
    rounds.add("peak_memory_limit", LIMIT_MB)
    for name, call in (("stream_in", _stream_in), ("stream_out", _stream_out), ("one_batch", _one_batch)):
        spark = session()
        peaks: dict[int, float] = {}
        with watched(peaks):
            call(spark, str(root), str(checkpoint / name), rows, settings.rows)
        spark.stop()

        log = sum(file.stat().st_blocks * 512 for file in (root / "commitlog").iterdir())
        words = ", ".join(f"{peak:.0f}" for peak in sorted(peaks.values(), reverse=True))
        print(
            f"  {name}: a log of {log / (1 << 30):.2f} GiB; peaks of all Python processes: {words} MB", file=sys.stderr
        )

        rounds.add(f"peak_memory_{name}", max(peaks.values()))
        rounds.report(f"peak_memory_{name}", "MB", floor="peak_memory_limit", goal=LIMIT_MB, lower_is_better=True)
        if name == "stream_out":
            shutil.rmtree(root)


def _stream_in(spark: Any, root: str, checkpoint: str, rows: int, batch_rows: int) -> None:
    df = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", batch_rows).option("numPartitions", 2)
    writer = df.load().selectExpr(*MESSAGES).writeStream.format("messagestore").option("topic", "flights")
    query = writer.option("checkpointLocation", checkpoint).start(root)
    while sum(progress["numInputRows"] for progress in query.recentProgress) < rows:
        query.awaitTermination(0.5)  # raises the error that ended the query
    query.stop()


def _stream_out(spark: Any, root: str, checkpoint: str, rows: int, batch_rows: int) -> None:
    df = spark.readStream.format("messagestore").option("subscribe", "flights").option("startingOffsets", "earliest")
    df = df.option("maxOffsetsPerTrigger", batch_rows).load(root)
    writer = df.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination()
    read = sum(progress["numInputRows"] for progress in query.recentProgress)
    if read < rows:
        raise RuntimeError(f"read {read} of {rows} rows")


def _one_batch(spark: Any, root: str, checkpoint: str, rows: int, batch_rows: int) -> None:  # noqa: ARG001
    df = spark.range(0, rows, 1, 4).selectExpr("id value").selectExpr(*MESSAGES)
    df.write.format("messagestore").mode("append").option("topic", "flights").save(root)
