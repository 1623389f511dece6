"""What the TransientStorePool gains single puts in ASYNC_FLUSH: how many there are, and how long they take.

Each round puts with the pool and without it, first alone, and then while another process writes files as fast as the
disk takes them, so that the kernel makes those wait who write to the page cache.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from benchmarks.measure import Rounds, Settings, settle, title
from messagestore import ASYNC_FLUSH, Message, MessageStore, StoreConfig

_SEGMENT = 64 << 20


def run(settings: Settings) -> None:
    """Measure the figures."""
    seconds = 0.5 if settings.quick else 4.0
    title("single puts in ASYNC_FLUSH, with and without a TransientStorePool, alone and beside a busy disk")
    rounds = Rounds()
    for _ in range(settings.rounds):
        for beside in ("alone", "busy"):
            settle(settings.folder)
            with _busy_disk(settings.folder, quick=settings.quick) if beside == "busy" else contextlib.nullcontext():
                for pool in ("direct", "pool"):
                    times, cpu_s = _puts(settings.folder / "pool", seconds, enabled=pool == "pool")
                    name = f"{beside}.{pool}"
                    rounds.add(f"pool.put.rate.{name}", len(times) / seconds)
                    for percentile in (50, 99, 99.9):
                        rounds.add(f"pool.put.p{percentile}.{name}", 1e6 * float(np.percentile(times, percentile)))
                    rounds.add(f"pool.put.cpu.{name}", 1e6 * cpu_s / len(times))
                    rounds.add(f"pool.put.longest.{name}", 1e6 * max(times))

    for beside in ("alone", "busy"):
        for figure in ("rate", "cpu", "p50", "p99", "p99.9", "longest"):
            name, unit = f"pool.put.{figure}.{beside}", "messages/s" if figure == "rate" else "us"
            rounds.report(f"{name}.direct", unit, lower_is_better=figure != "rate")
            rounds.report(f"{name}.pool", unit, floor=f"{name}.direct", lower_is_better=figure != "rate")


def _puts(root: Path, seconds: float, *, enabled: bool) -> tuple[list[float], float]:
    """The times of puts, and the CPU time of the process from the first put until the store is closed, in seconds."""
    config = StoreConfig(
        mapped_file_size_commit_log=_SEGMENT,
        flush_disk_type=ASYNC_FLUSH,
        transient_store_pool_enable=enabled,
    )

    times: list[float] = []
    with MessageStore.open(root, config) as store:
        cpu_s = time.process_time()

        until_s, number, begin_s = time.perf_counter() + seconds, 0, 0.0
        while begin_s < until_s:
            message = Message("small", bytes(100), queue_id=number % 8, keys=[f"k{number}"])
            begin_s = time.perf_counter()
            store.put_message(message)
            times.append(time.perf_counter() - begin_s)
            number += 1

    cpu_s = time.process_time() - cpu_s
    shutil.rmtree(root)
    return times, cpu_s


@contextlib.contextmanager
def _busy_disk(folder: Path, *, quick: bool) -> Iterator[None]:
    """Another process writes, and has dirtied what the kernel lets it before the block begins.

    A quick run asks only whether everything runs: it begins when the writer does.
    """
    path = folder / "busy"
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    blocks = 64 if quick else 4096
    writer = spawn.Process(target=_write_for_ever, args=(str(path), blocks, begun))
    writer.start()
    try:
        begun.wait()
        if not quick:
            time.sleep(5)
        yield
    finally:
        writer.terminate()
        writer.join()
        path.unlink(missing_ok=True)


def _write_for_ever(path: str, blocks: int, begun: Event) -> None:
    """Write a file of so many MiB again and again."""
    block = os.urandom(1 << 20)
    while True:
        with open(path, "wb") as file:
            file.write(block)
            begun.set()
            file.writelines(block for _ in range(blocks - 1))
