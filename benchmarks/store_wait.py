"""How long after a put a reader that waits has the message.

A reader follows a queue. A message is put every few milliseconds, by a thread of the same process or by another
process, and its body is the time at which the put began. The delay ends when the reader has the decoded message. With
SYNC_FLUSH, it includes the sync, because nobody sees a message earlier; the floor is the time of the put itself.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.measure import Rounds, Settings, settle, title
from messagestore import ASYNC_FLUSH, Message, MessageStore, ReadOnlyStore, StoreConfig

_COUNT, _QUICK_COUNT = 500, 200
_PAUSE_S = 0.003
_GOAL_MS = 5.0
_TOPIC = "arrivals"


def run(settings: Settings) -> None:
    """Measure the delays in one process and across processes."""
    count = _QUICK_COUNT if settings.quick else _COUNT
    title(f"a reader that waits has each of {count:,} messages")
    rounds = Rounds()
    for _ in range(settings.rounds):
        for name, config in (("async", StoreConfig(flush_disk_type=ASYNC_FLUSH)), ("sync", StoreConfig())):
            root = settings.folder / f"wait-{name}"
            settle(settings.folder)
            for where, measure in (("same", _same_process), ("other", _other_process)):
                delays = measure(root, config, count)
                for percentile in (50, 99):
                    rounds.add(f"wait.{name}.{where}.p{percentile}", 1e3 * float(np.percentile(delays, percentile)))
    for name in ("async", "sync"):
        for where in ("same", "other"):
            rounds.report(f"wait.{name}.{where}.p50", "ms", lower_is_better=True)
            rounds.report(f"wait.{name}.{where}.p99", "ms", goal=_GOAL_MS, lower_is_better=True)


def _same_process(root: Path, config: StoreConfig, count: int) -> list[float]:
    """The delays in seconds while a thread of this process puts."""
    with MessageStore.open(root, config) as store:
        return _delays(store, count, lambda: _put(store))


def _put(store: MessageStore) -> None:
    store.put_message(Message(_TOPIC, repr(time.perf_counter()).encode(), queue_id=0))


def _other_process(root: Path, config: StoreConfig, count: int) -> list[float]:
    """The delays in seconds while another process puts. The clock is the same for all processes of a machine."""
    command = [sys.executable, "-m", "benchmarks.one_writer", str(root), config.flush_disk_type]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()

        def put(stdin: object = writer.stdin) -> None:
            print(file=stdin, flush=True)

        with MessageStore.open_read_only(root, config) as store:
            delays = _delays(store, count, put)
        writer.stdin.close()
    if writer.returncode:
        raise AssertionError(f"the writer ended with {writer.returncode}")
    return delays


def _delays(store: ReadOnlyStore, count: int, put: Callable[[], None]) -> list[float]:
    """The time from each put to its message in a reader, in seconds."""
    start = store.max_offset(_TOPIC, 0)

    def put_all() -> None:
        for _ in range(count):
            time.sleep(_PAUSE_S)
            put()

    thread = threading.Thread(target=put_all)
    thread.start()
    delays: list[float] = []
    for batch in store.follow(_TOPIC, 0, start, columns=["body"], timeout=10.0):
        now_s = time.perf_counter()
        delays += [now_s - float(body) for body in batch["body"].to_pylist()]
        if len(delays) >= count:
            break
    thread.join()
    if len(delays) != count:
        raise AssertionError(f"{len(delays)} of {count} messages arrived")
    return delays
