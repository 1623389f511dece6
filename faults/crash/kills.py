"""The mode `kills` of `make crash`: kills forked writers with SIGKILL at any moment, on a real disk.

A child writes without end, and reports to its parent through a pipe what it is about to do and what was acknowledged.
The parent kills it after some microseconds; a new child continues in the same store, so that hundreds of kills
accumulate in it. After each kill the store is judged: by a reader that comes first, by the next writer, and by the
checker of these tests.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from crash import checker, hostile
from crash.counts import Counts, again
from crash.harness import (
    SMALL,
    Promise,
    Step,
    batch_columns,
    die,
    payload,
    put_message,
    put_text,
    scratch_folder,
)
from crash.judge import Verdict, note_content, note_faults, read_queue
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, BatchRequest, MessageStore, PutMessageResult, StoreConfig, StoreError
from messagestore.batches.append import KNOWN

QUICK_COUNT = 500
KILLS_OF_A_STORE = 20
_STEP = struct.Struct(">ciiI")  # what, app or number, version or count, rows
_BEGUN, _DONE = b"b", b"d"
_APPS = ("one", "two", f"{hostile.APP}-one", f"{hostile.APP}-two")
_PUT = 99


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run `QUICK_COUNT` kills, or as many as the seconds allow.

    The moment of a kill is random; a case is a store's seed.
    """
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder:
        for number in range(part[0], 1 << 30, part[1]):
            if case and number != int(case):
                if number > int(case):
                    break
                continue
            done = counts.cases["SIGKILLs"]
            if done * part[1] >= QUICK_COUNT if quick else time.monotonic() > until_s:
                break
            one_store(
                folder / f"store-{number}", random.Random(f"{seed} {number}"), counts, again("kills", seed, str(number))
            )
    return counts


def one_store(root: Path, chance: random.Random, counts: Counts, command: str) -> None:
    """Kill the writers of one store again and again."""
    promise, config = Promise(), some_config(chance)
    first = some_contents(chance)
    for number in range(KILLS_OF_A_STORE):
        child = Child(root, config, first + number, chance.randrange(1 << 30), promise)
        wait_s = 0.004 + chance.random() * chance.choice((0.01, 0.03, 0.06))
        time.sleep(wait_s)
        steps = child.kill()
        verdict = judged(root, promise, config, steps)
        counts.take("SIGKILLs", verdict, f"kill {number} after {wait_s:.4f} s", command)
        if not verdict.ok:
            return


def some_config(chance: random.Random) -> StoreConfig:
    """Choose SYNC_FLUSH or ASYNC_FLUSH, with a pool or without, and whether the clean end moves constantly or never."""
    flush_disk_type = chance.choice((SYNC_FLUSH, SYNC_FLUSH, ASYNC_FLUSH, ASYNC_FLUSH))
    return SMALL.replace(
        flush_disk_type=flush_disk_type,
        transient_store_pool_enable=flush_disk_type == ASYNC_FLUSH and chance.random() < 0.5,
        transient_store_pool_size=chance.choice((1, 2, 5)),
        commit_interval_commit_log=chance.choice((1, 5, 1000)),
        commit_commit_log_least_pages=0,
        clean_interval=chance.choice(("1h", "5ms")),
        flush_interval_commit_log=20,
    )


def some_contents(chance: random.Random) -> int:
    """Choose the number of a store's first process, which decides between ordinary and hostile contents."""
    return chance.choice((0, hostile.FROM // 1000))


class Child:
    """A process that writes until it is killed.

    Parameters
    ----------
    root : Path
    config : StoreConfig
    number : int
        The number of the process: it determines the numbers of its puts, and whether contents are hostile.
    seed : int
    promise : Promise
        What earlier processes promised; `kill` adds to it.
    """

    def __init__(self, root: Path, config: StoreConfig, number: int, seed: int, promise: Promise) -> None:
        self.promise, self.config = promise, config
        self.pipe, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _write_for_ever(root, config, write_end, 1000 * number, random.Random(seed), dict(promise.rows))
        os.close(write_end)

    def kill(self, *, power_cut: bool = False) -> list[Step]:
        """Kill it; return the steps that it had begun, in order.

        What was acknowledged is then in the promise, as far as it is one: a power cut may remove what ASYNC_FLUSH
        acknowledged, and a kill what was only in memory.
        """
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        promised = not power_cut or self.config.flush_disk_type == SYNC_FLUSH
        return _take_in(self.pipe, self.promise, self.config, promised)


def _write_for_ever(
    root: Path, config: StoreConfig, pipe: int, first: int, chance: random.Random, rows: dict[tuple[str, int], int]
) -> None:
    """Run the child, which never returns."""
    status = 1
    with contextlib.suppress(BaseException):
        following = {app: max((v + 1 for a, v in rows if a == app), default=0) for app in _APPS}
        apps, counts = ((2, 3), (1, 7, 20)) if first >= hostile.FROM else ((0, 1), (1, 7, 40, 130))

        with MessageStore.open(root, config) as store:
            for number in range(first, first + 1000):
                if chance.random() < 0.2:
                    _put_without_waiting(store, pipe, number)
                    continue

                if chance.random() < 0.5:
                    os.write(pipe, _STEP.pack(_BEGUN, _PUT, number, 0))
                    if store.put_message(put_message(number, "single", number % 3)).committed:
                        os.write(pipe, _STEP.pack(_DONE, _PUT, number, 0))
                    continue

                app = chance.choice(apps)
                version, count = following[_APPS[app]], chance.choice(counts)
                os.write(pipe, _STEP.pack(_BEGUN, app, version, count))
                store.append_batch(batch_columns(_APPS[app], version, count), _request(_APPS[app], version, config))
                os.write(pipe, _STEP.pack(_DONE, app, version, count))
                following[_APPS[app]] += 1

        status = 0
    os._exit(status)


def _put_without_waiting(store: MessageStore, pipe: int, number: int) -> None:
    """Put a message whose Future reports it as done when it completes, while the process goes on."""

    def done(future: Future[PutMessageResult]) -> None:
        if future.result().is_ok and future.result().committed:
            os.write(pipe, _STEP.pack(_DONE, _PUT, number, 0))

    os.write(pipe, _STEP.pack(_BEGUN, _PUT, number, 0))
    store.put_message_async(put_message(number, "single", number % 3)).add_done_callback(done)


def _request(app: str, version: int, config: StoreConfig) -> BatchRequest:
    return BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=config.flush_disk_type)


def _take_in(pipe: int, promise: Promise, config: StoreConfig, promised: bool) -> list[Step]:
    """Record what the child reported before it died."""
    with os.fdopen(pipe, "rb") as said:
        data = said.read()
    steps: list[Step] = []
    begun: list[str] = []
    for what, app, version, rows in _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size]):
        if what == _DONE and not promised:
            continue
        if app == _PUT:
            (promise.maybe_puts if what == _BEGUN else promise.puts).append(put_text(version))
            if what == _BEGUN:
                begun.append(put_text(version))
            step: Step = ("put", version, "single", version % 3)
        else:
            promise.rows[(_APPS[app], version)] = rows
            if what == _DONE:  # a batch commits what was put before it
                promise.puts += [body for body in begun if body not in promise.puts]
            (promise.maybe_batches if what == _BEGUN else promise.batches).add((_APPS[app], version))
            step = ("batch", _APPS[app], version, rows, config.flush_disk_type)
        if what == _BEGUN:
            steps.append(step)
    return steps


def judged(root: Path, promise: Promise, config: StoreConfig, steps: Sequence[Step]) -> Verdict:
    """Judge with a reader, a writer that replays each app's last batch, and the checker."""
    verdict = Verdict()
    if not (root / "commitlog").exists():
        if promise.puts or promise.batches:
            verdict.lost.append("the whole store")
        return verdict
    try:
        _next_processes(root, promise, config, steps, verdict)
    except (StoreError, OSError, AssertionError) as error:
        verdict.misread.append(f"{type(error).__name__}: {error}")
    finally:
        die(root)
    return verdict


def _next_processes(root: Path, promise: Promise, config: StoreConfig, steps: Sequence[Step], verdict: Verdict) -> None:
    with MessageStore.open_read_only(root, config) as reader:
        seen = {
            body
            for topic, queue_ids in reader.topics().items()
            if topic != checker.BATCH_TOPIC
            for queue_id in queue_ids
            for body in read_queue(reader, topic, queue_id)
        }
    with MessageStore.open(root, config) as store:
        found = checker.check(checker.read_tree(root))
        note_faults(verdict, found, "after recovery")
        note_content(verdict, found.bodies, found.queues, promise, steps)
        there = set(found.bodies)
        if not seen <= there:
            verdict.misread.append("a reader saw what recovery did not keep")
        for key in [key for key in promise.rows if payload(*key, 0) not in there and key not in promise.batches]:
            del promise.rows[key]  # it was not promised and is missing: the next process writes it anew
            promise.maybe_batches.discard(key)
        for app in _APPS:
            last = max((version for name, version in promise.rows if name == app), default=-1)
            if last >= 0:
                rows = promise.rows[(app, last)]
                result = store.append_batch(batch_columns(app, last, rows), _request(app, last, config))
                if result.status != KNOWN:
                    verdict.duplicated.append(f"{app} {last}: is there, and was {result.status} again")
                promise.batches.add((app, last))
    # After the close, everything that exists is durable, and stays.
    found = checker.check(checker.read_tree(root))
    note_faults(verdict, found, "after close")
    note_content(verdict, found.bodies, found.queues, promise, ())
    promise.puts = [body for body in promise.maybe_puts if body.encode(hostile.ENCODING) in there]
    promise.batches = set(promise.rows)
