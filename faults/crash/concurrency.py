"""The mode `concurrency` of `make crash`: many readers, writers and brokers at once, on a real disk.

readers     8 processes follow a writer that rolls over constantly: 0 torn, 0 gaps, 0 repeats, batches whole
threads     16 threads put and append through one session
processes   4 processes commit in turn, each holding the lock for only one commit
turns       3 writers commit in random turns, each to its own topic; some sync late, some detach, and one is the
            last to close
surprises   streams read while a store is restored, renamed, recreated, killed and cut by retention (`crash.surprises`)
races       two writers open a store at the same moment: one wins, the other changes no byte
brokers     brokers start, write and stop beside short sessions and commits; `ways`, `stalls` and `refusals`: what a
            writer does when a broker arrives, or when the writer is refused (`crash.brokers`)
dumps       `messagestore dump` while retention deletes segments (`crash.dumps`)
retentions  retention, writers and a deliverer that are killed again and again, beside readers and a group (`crash.retentions`)
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from crash import brokers, checker, dumps, retentions
from crash.children import ended, in_child
from crash.counts import Counts, again
from crash.harness import (
    SMALL,
    Promise,
    batch_columns,
    do_step,
    make_base,
    payload,
    run_until_killed,
    scratch_folder,
    tree_hash,
)
from crash.imitate import Process, commit, dispatch, kill_when
from crash.judge import Verdict, note_content, note_faults
from crash.simdisk import KillDisk
from crash.workloads import FILLED, batch, copy_of, put
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, BatchRequest, MessageStore, StoreLockedError
from messagestore.session import attached_store

READERS, THREADS, PROCESSES, RACES = 8, 16, 4, 60
SURPRISES = 15
TURNS = 20
_QUEUES, _ROWS = 3, 30
ROLLING = SMALL.replace(clean_interval="20ms", lock_timeout="30s")


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run each kind once, or in turn for the given seconds; a case is a kind and its seed.

    In the quick profile, the parts divide the kinds among them.
    """
    counts, until_s = Counts(), time.monotonic() + seconds
    kinds: dict[str, Callable[[Path, random.Random, Counts], Verdict]] = {
        "readers": partial(_readers, quick_s=5.0), "threads": _threads, "processes": _processes, "turns": turns, "races": _races, "surprises": _surprises,
        "brokers": brokers.starts, "ways": brokers.ways, "stalls": brokers.stalls, "refusals": brokers.refusals,
        "ends": brokers.ends, "dumps": dumps.dumps,
        "retentions": retentions.retentions,
    }  # fmt: skip
    with scratch_folder() as folder:
        for turn in itertools.count() if quick or case else range(part[0], 1 << 30, part[1]):
            for number, (kind, look) in enumerate(kinds.items()):
                key = f"{kind}/{turn}"
                if key != case if case else quick and number % part[1] != part[0]:
                    continue
                verdict = look(folder / f"{kind}-{turn}", random.Random(f"{seed} {key}"), counts)
                if not verdict.ok:
                    counts.fail(f"{key}: {verdict}", again("concurrency", seed, key), verdict)
            if turn >= int(case.rpartition("/")[2]) if case else quick or time.monotonic() > until_s:
                return counts
    return counts


# ---- readers


def _readers(root: Path, chance: random.Random, counts: Counts, *, quick_s: float) -> Verdict:
    verdict = Verdict()
    with MessageStore.open(root, ROLLING) as store:
        store.create_topic("topic-many", _QUEUES)
        _append(store, 0)

        until_s = time.monotonic() + quick_s
        read_end, write_end = os.pipe()
        pids = [in_child(partial(_follow, root, until_s, write_end)) for _ in range(READERS)]
        os.close(write_end)

        version = 1
        while time.monotonic() < until_s:
            _append(store, version)
            version += 1

    failed = sum(not ended(pid) for pid in pids)
    with os.fdopen(read_end) as said:
        read = sum(map(int, said.read().split()))

    if failed:
        verdict.misread.append(f"{failed} of {READERS} readers saw something torn, missing, or twice (see the log)")
    counts.cases["messages read beside a writer"] += read
    counts.cases["reader processes"] += READERS
    return verdict


def _append(store: MessageStore, version: int) -> None:
    request = BatchRequest(app_id="many", version=version, version_source="user")
    store.append_batch(batch_columns("many", version, _ROWS, _QUEUES), request)


def _follow(root: Path, until_s: float, pipe: int) -> None:
    """Read as a reader: each queue without gap or repeat, each batch whole at any moment."""
    queues = [("topic-many", queue_id) for queue_id in range(_QUEUES)]
    per_queue = _ROWS // _QUEUES
    read = 0
    while time.monotonic() < until_s + 0.2:
        with MessageStore.open_read_only(root, ROLLING) as reader:  # opens a new one now and then
            begun_s, following = time.monotonic(), [0] * _QUEUES
            while time.monotonic() < min(begun_s + 2.0, until_s + 0.2):
                ends = reader.view.max_offsets(queues)
                assert len(set(ends.values())) == 1, f"half of a batch: {ends}"
                assert not ends[queues[0]] % per_queue, f"half of a batch: {ends}"
                for queue_id in range(_QUEUES):
                    start, end = following[queue_id], ends[("topic-many", queue_id)]
                    assert end >= start, f"the queue went back from {start} to {end}"
                    for table in reader.read("topic-many", queue_id, start, end):
                        offsets = table.column("queue_offset").to_pylist()
                        assert offsets == list(range(start, start + len(offsets))), "a gap, or a repeat"
                        wanted = [payload("many", n // per_queue, n % per_queue * _QUEUES + queue_id) for n in offsets]
                        assert table.column("body").to_pylist() == wanted, "torn, or another message"
                        start += len(offsets)
                        read += len(offsets)
                    assert start == end, f"stopped at {start} of {end}"
                    following[queue_id] = end
    os.write(pipe, f"{read} ".encode())


# ---- threads and processes


def _threads(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Put, put in parallel and append batches with 16 threads through one session."""
    promise, failures = Promise(), list[str]()
    with MessageStore.open(root, ROLLING) as store:

        def work(thread: int) -> None:
            try:
                for number in range(20):
                    own = thread * 1000 + number
                    if number % 5 == 4:
                        do_step(store, ("batch", f"app{thread}", number // 5, 12, "SYNC_FLUSH"), promise, ROLLING)
                    elif number % 5 == 3:
                        do_step(store, ("puts", own * 10, 3, "single", thread % 3), promise, ROLLING)
                    else:
                        do_step(store, ("put", own * 10, "single", thread % 3), promise, ROLLING)
            except BaseException as error:  # noqa: BLE001 - whatever it was, the test fails by it
                failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts.cases["appends of 16 threads"] += THREADS * 20
    verdict = _closed(root, promise)
    verdict.misread += failures
    return verdict


def _closed(root: Path, promise: Promise) -> Verdict:
    verdict, found = Verdict(), checker.check(checker.read_tree(root))
    note_faults(verdict, found, "closed")
    note_content(verdict, found.bodies, found.queues, promise, (), everything=True)
    return verdict


def _processes(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Run four processes that hold the lock for one commit each; some stay attached in between, some do not."""
    promise, versions = Promise(), 25
    with MessageStore.open(root, ROLLING):
        pass

    def work(app: str, seed: int) -> None:
        own = random.Random(seed)
        store = attached_store(root, ROLLING)
        for version in range(versions):
            with store.writing(f"{app} {version}") as writer:
                commit(writer, app, version, 6)
            if own.random() < 0.2:
                store.detach()
            time.sleep(own.random() * 0.002)
        store.detach()

    pids = [in_child(partial(work, f"p{number}", chance.randrange(1 << 30))) for number in range(PROCESSES)]
    good = [ended(pid) for pid in pids]
    for number in range(PROCESSES):
        promise.rows |= {(f"p{number}", version): 6 for version in range(versions)}
    promise.maybe_batches = set(promise.rows)
    counts.cases["commits of 4 processes"] += PROCESSES * versions
    verdict = _closed(root, promise)
    if not all(good):
        verdict.misread.append(f"{good.count(False)} of {PROCESSES} processes failed (see the log)")
    return verdict


def turns(root: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Writers stay attached while others attach, commit and leave.

    The last one to close knows what each of them wrote.
    """
    for number in range(TURNS):
        folder, promise = root.with_name(f"{root.name}-{number}"), Promise()
        writers, versions = [Process(folder, SMALL) for _ in range(3)], [0, 0, 0]

        for _ in range(chance.randrange(4, 16)):
            own = chance.randrange(3)
            writers[own].batch(f"p{own}", versions[own], 6, flush=chance.choice((SYNC_FLUSH, ASYNC_FLUSH)))
            promise.rows[(f"p{own}", versions[own])] = 6
            versions[own] += 1

            if not chance.choice(writers).syncs_late():
                return Verdict(misread=["a flush thread without the writer lock wrote what all writers share"])
            counts.cases["syncs by writers that have given the lock back"] += 1
            if chance.random() < 0.4:
                writers[own].detach()

        for writer in chance.sample(writers, 3):
            writer.detach()
        promise.maybe_batches = set(promise.rows)
        counts.cases["commits of writers in turn"] += sum(versions)

        found = _closed(folder, promise)
        shutil.rmtree(folder)
        if not found.ok:
            return found
    return Verdict()


# ---- surprises


def _surprises(folder: Path, chance: random.Random, counts: Counts) -> Verdict:
    """Run streams while anything may happen to the store between their steps."""
    from crash import surprises  # needs Spark's Python

    whole = Verdict()
    for number, verdict in enumerate(surprises.histories(folder, chance, SURPRISES)):
        counts.cases["histories of a store changed under its streams"] += 1
        for name in ("lost", "duplicated", "misread"):
            getattr(whole, name).extend(f"history {number}: {text}" for text in getattr(verdict, name))
    return whole


# ---- races


def _races(root: Path, chance: random.Random, counts: Counts, count: int = 0) -> Verdict:
    """Let two processes open a store at once, so many times; 0: `RACES` times."""
    verdict = Verdict()
    bases = {"closed": root.with_name("race-closed"), "killed": root.with_name("race-killed")}
    promise = make_base(bases["closed"], FILLED)
    shutil.copytree(bases["closed"], bases["killed"])

    disk = KillDisk(half_writes=True)
    kill_when(disk, dispatch, nth=3)
    run_until_killed(bases["killed"], [("open",), put(10), batch(1, 40)], disk, promise=copy_of(promise))

    alone = {}
    for name, base in bases.items():
        copied = root.with_name(f"race-{name}-alone")
        shutil.copytree(base, copied)
        with MessageStore.open(copied, SMALL):
            pass
        alone[name] = tree_hash(copied)

    for number in range(count or RACES):
        name = "killed" if number % 2 else "closed"
        target = root.with_name(f"race-{number}")
        shutil.copytree(bases[name], target)
        _race(target, name, alone[name], verdict)
        counts.cases["races of two writers"] += 1
        shutil.rmtree(target)
        if not verdict.ok:
            break
    return verdict


def _race(root: Path, name: str, alone: dict[str, str], verdict: Verdict) -> None:
    go_read, go_write = os.pipe()
    won_read, won_write = os.pipe()
    hold_read, hold_write = os.pipe()
    before = _everything(root)

    def work() -> None:
        os.close(go_write)
        os.close(hold_write)
        os.read(go_read, 1)
        try:
            store = MessageStore.open(root, SMALL.replace(lock_timeout="0s"))
        except StoreLockedError:
            os.write(won_write, b"l")
            return
        except BaseException:
            os.write(won_write, b"e")
            raise
        os.write(won_write, b"w")
        os.read(hold_read, 1)  # holds it until the other one has ended
        store.close()

    pids = [in_child(work) for _ in range(2)]
    os.close(won_write)
    os.close(go_read)
    os.close(hold_read)
    os.close(go_write)  # both continue
    said = sorted(os.read(won_read, 1) for _ in pids)
    if said != [b"l", b"w"]:
        verdict.misread.append(f"{name}: two writers opened at once: {said}")
    if name == "closed" and _everything(root) != before:
        verdict.misread.append("the writer that lost changed bytes")
    os.close(hold_write)
    good = [ended(pid) for pid in pids]
    if not all(good):
        verdict.misread.append(f"{name}: a process failed (see the log)")
    os.close(won_read)
    if tree_hash(root) != alone:
        verdict.misread.append(f"{name}: other bytes than one writer alone leaves")


def _everything(root: Path) -> dict[str, bytes]:
    """Return all bytes except the lock's note of its holder."""
    return {path: data for path, data in checker.read_tree(root).items() if not path.endswith(".lock")}
