"""How much slower single puts are while retention deletes 100 segments.

A thread puts messages in SYNC_FLUSH. In each round, the 99th percentile of the time of a put is taken twice: while
nothing is deleted (the floor), and while 100 segments are deleted, with RocketMQ's pause of 100 ms after each. The
segments have all of their blocks, because deleting a file costs what its blocks cost.
"""

from __future__ import annotations

import shutil
import threading
import time

import numpy as np

from benchmarks.measure import Rounds, Settings, settle, title
from messagestore import ExpiredFiles, Message, MessageStore, StoreConfig

_SEGMENTS = 100


def run(settings: Settings) -> None:
    """Measure the figure."""
    size, segments = (1 << 20, 20) if settings.quick else (16 << 20, _SEGMENTS)
    title(f"single puts in SYNC_FLUSH while {segments} segments of {size >> 20} MiB are deleted")

    rounds = Rounds()
    for _ in range(settings.rounds):
        root = settings.folder / "retention"
        config = StoreConfig(mapped_file_size_commit_log=size, max_message_size=size // 4, preallocate=True)
        with MessageStore.open(root, config) as store:
            big = Message("big", bytes(size // 4 - 4096), queue_id=0)
            while len(store.writer.log.offsets) < segments + 1:
                store.put_message(big)
            settle(settings.folder)

            quiet = _puts_while(store, lambda stop: stop.wait(0.12 * segments))
            deleted: list[ExpiredFiles] = []
            busy = _puts_while(
                store, lambda _, to=store, found=deleted: found.append(to.delete_expired_files(at_once=True))
            )

            if len(deleted[0].segments) < segments:
                raise AssertionError(f"{len(deleted[0].segments)} of {segments} segments were deleted")
        shutil.rmtree(root)

        for name, times in (("quiet", quiet), ("deleting", busy)):
            rounds.add(f"retention.put.p50.{name}", 1e6 * float(np.percentile(times, 50)))
            rounds.add(f"retention.put.p99.{name}", 1e6 * float(np.percentile(times, 99)))

    for percentile in ("p50", "p99"):
        rounds.report(f"retention.put.{percentile}.quiet", "us", lower_is_better=True)
        rounds.report(
            f"retention.put.{percentile}.deleting",
            "us",
            floor=f"retention.put.{percentile}.quiet",
            lower_is_better=True,
        )


def _puts_while(store: MessageStore, work: object) -> list[float]:
    """The times of puts, in seconds, until a thread has done its work."""
    stop, times = threading.Event(), []
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    number = 0
    while thread.is_alive():
        message = Message("small", bytes(100), queue_id=number % 8, keys=[f"k{number}"])
        begin_s = time.perf_counter()
        store.put_message(message)
        times.append(time.perf_counter() - begin_s)
        number += 1
    thread.join()
    return times
