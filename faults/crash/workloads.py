"""The workloads of the harness: scripts of steps, the stores with which they begin, and recordings of them.

A `Workload` is what one process does between its open and its close. `record` runs one on a disk that records every
operation, and notes with each promise how many operations had been done when it was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from crash import hostile
from crash.harness import SMALL, Promise, Step, die, payload, put_text, run_steps
from crash.imitate import dispatch, kill_when, log_write, seal
from crash.memdisk import MemKillDisk, MemRecordingDisk
from crash.power_cut import Folder
from crash.simdisk import Killed, Operation, RecordingDisk
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, StoreConfig, StorePoisonedError

ASYNC = SMALL.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=20)
WITH_CRC = SMALL.replace(enabled_append_prop_crc=True)
FEW_ENTRIES = SMALL.replace(max_hash_slot_num=16, max_index_num=40)
SEGMENTS = SMALL.replace(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 8, max_message_size=2048)
SMALL_FILES = SEGMENTS.replace(max_hash_slot_num=16, max_index_num=40)
SEGMENTS_ASYNC = SEGMENTS.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=20)
POOL = SEGMENTS_ASYNC.replace(
    transient_store_pool_enable=True,
    transient_store_pool_size=2,
    commit_interval_commit_log=3_600_000,
    commit_commit_log_thorough_interval=3_600_000,
)
HOSTILE = SMALL.replace(mapped_file_size_commit_log=64 * 1024, max_message_size=16 * 1024)
HOSTILE_CRC = HOSTILE.replace(enabled_append_prop_crc=True)
HOSTILE_ASYNC = HOSTILE.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=20)
FILLED: list[Step] = [
    ("open",),
    ("put", 0, "single", 0),
    ("put", 1, "single", 1),
    ("batch", "app-1", 0, 12, SYNC_FLUSH),
    ("put", 2, "single", 0),
    ("close",),
]


def batch(version: int, rows: int, flush: str = SYNC_FLUSH, app: str = "app-1") -> Step:
    return ("batch", app, version, rows, flush)


def commit(version: int, rows: int, flush: str = SYNC_FLUSH, app: str = "app-1") -> Step:
    return ("commit", app, version, rows, flush)


def put(number: int, queue_id: int = 0, topic: str = "single") -> Step:
    return ("put", number, topic, queue_id)


@dataclass(frozen=True)
class Workload:
    """What a process does between its open and its close.

    Parameters
    ----------
    steps : tuple of Step
    config : StoreConfig
    base : str
        One of `bases`: the store with which it begins.
    """

    steps: tuple[Step, ...]
    config: StoreConfig = SMALL
    base: str = "filled"

    @property
    def all_steps(self) -> list[Step]:
        return [("open",), *self.steps, ("close",)]


WORKLOADS = {
    "single puts": Workload((put(10), put(11, 1), put(12), put(13, 0, "new"))),
    "puts with CRC": Workload((put(10), ("puts", 20, 3, "new", 1), put(11, 1)), WITH_CRC),
    "puts side by side": Workload((("puts", 10, 5, "single", 0), ("puts", 20, 3, "new", 1))),
    "group commit": Workload((("group", 10, 6, "single", 2), ("group", 20, 6, "new", 3))),
    "puts in flight": Workload(
        (("futures", 10, 5, "single", 0), ("oneway", 20, 3, "new", 1), put(15), ("futures", 30, 4, "new", 1))
    ),
    "async puts": Workload((put(10), put(11, 1), put(12), ("puts", 20, 4, "new", 1), put(13)), ASYNC),
    "async puts over segments": Workload(
        tuple(("big_put", 100 + i, 1300) for i in range(6)), SEGMENTS_ASYNC, base="small segments"
    ),
    "puts in a pool": Workload(
        (
            put(10),
            put(11, 1),
            batch(1, 8, ASYNC_FLUSH),
            put(12),
            ("puts", 20, 3, "new", 1),
            put(13),
            ("flush",),
            put(14),
        ),
        POOL,
        base="small segments",
    ),
    "roll-over in a pool": Workload(
        (*(("big_put", 100 + i, 1300) for i in range(9)), put(10), ("clean",), ("big_put", 110, 1300)),
        POOL,
        base="small segments",
    ),
    "batches": Workload((batch(1, 12), batch(2, 12))),
    "a large batch": Workload((commit(1, 230), batch(2, 5))),
    "async batches": Workload((batch(1, 8, ASYNC_FLUSH), batch(2, 8, ASYNC_FLUSH), batch(3, 8, ASYNC_FLUSH))),
    "async, then sync": Workload((batch(1, 10, ASYNC_FLUSH), batch(2, 10), batch(3, 10, ASYNC_FLUSH))),
    "async roll-over": Workload(
        (batch(1, 30, ASYNC_FLUSH), batch(2, 10, ASYNC_FLUSH)), SEGMENTS, base="small segments"
    ),
    "empty batch": Workload((batch(1, 0), batch(2, 5))),
    "roll-over": Workload((batch(1, 60), put(12)), SEGMENTS, base="small segments"),
    "roll-over by puts": Workload(tuple(("big_put", 100 + i, 1300) for i in range(5)), SEGMENTS, base="small segments"),
    "roll-over of the index": Workload((batch(1, 25), put(10), batch(2, 25)), FEW_ENTRIES, base="few entries"),
    "first batch of a topic": Workload((batch(0, 20, app="other"),)),
    "Spark commits": Workload((commit(1, 12), commit(2, 9), commit(0, 5, app="other"))),
    "Spark commits, async": Workload((commit(1, 8, ASYNC_FLUSH), commit(2, 8, ASYNC_FLUSH))),
    "topics": Workload((("topic", "one", 4), put(10, 3, "one"), ("topic", "two", 2), put(11, 1, "two"))),
    "clean end moves": Workload((put(10), batch(1, 10), ("clean",), batch(2, 10), ("clean",), put(11))),
    "clean end moves, async": Workload((batch(1, 10, ASYNC_FLUSH), ("clean",), batch(2, 10, ASYNC_FLUSH))),
    "close and open": Workload((put(10), ("close",), ("open",), batch(1, 5), ("close",), ("open",), put(11))),
    "a new store": Workload((put(0), batch(0, 5)), base="empty"),
    "hostile puts": Workload((*(put(hostile.FROM + i, i % 2) for i in range(11)), put(10)), HOSTILE, "roomy"),
    "hostile puts with CRC": Workload(
        (*(put(hostile.FROM + i, i % 2) for i in range(6)), put(10)), HOSTILE_CRC, "roomy"
    ),
    "hostile puts, async": Workload(
        (*(put(hostile.FROM + 20 + i, i % 2) for i in range(11)), put(10)), HOSTILE_ASYNC, "roomy"
    ),
    "hostile puts side by side": Workload(
        (("puts", hostile.FROM + 40, 4, "single", 0), ("puts", hostile.FROM + 50, 3, "new", 1)), HOSTILE, "roomy"
    ),
    "hostile batches": Workload(
        (batch(0, 12, app="hostile"), put(hostile.FROM + 60), batch(1, 12, app="hostile")), HOSTILE, "roomy"
    ),
    "hostile batches, async": Workload(
        (batch(0, 11, ASYNC_FLUSH, "hostile"), batch(1, 7, ASYNC_FLUSH, "hostile")), HOSTILE, "roomy"
    ),
    "retention": Workload(
        (batch(1, 30), *(put(10 + i) for i in range(12)), batch(2, 4), ("expire", 99), put(40), batch(3, 4)),
        SEGMENTS,
        base="small segments",
    ),
    "retention of a part": Workload(
        (
            batch(1, 20),
            *(put(10 + i) for i in range(10)),
            batch(2, 20),
            ("expire", 1),
            batch(3, 20),
            put(40),
            ("expire", 2),
            put(41),
        ),
        SMALL_FILES,
        base="small files",
    ),
    "retention, async": Workload(
        (
            *(("big_put", 100 + i, 1300) for i in range(6)),
            batch(1, 4, ASYNC_FLUSH),
            ("big_put", 110, 1300),
            ("big_put", 111, 1300),
            ("expire", 99),
            batch(2, 4, ASYNC_FLUSH),
        ),
        SEGMENTS_ASYNC,
        base="small segments",
    ),
    "retention, and again": Workload(
        (batch(1, 30), ("expire", 99), batch(0, 30, app="other"), ("expire", 99), put(40), ("expire", 99)),
        SEGMENTS,
        base="small segments",
    ),
    "recovery: sealed, not dispatched": Workload((), base="sealed, not dispatched"),
    "recovery: half dispatched, over segments": Workload((), SEGMENTS, base="half dispatched, over segments"),
    "recovery: not sealed": Workload((), base="not sealed"),
    "recovery: torn put": Workload((), base="torn put"),
    "recovery: async": Workload((), base="async"),
    "recovery, then a batch": Workload((batch(1, 30), batch(2, 6)), base="not sealed"),
}

BASIC = (
    *("single puts", "async puts", "batches", "roll-over", "first batch of a topic", "Spark commits", "close and open"),
    *("a new store", "recovery: sealed, not dispatched", "recovery: torn put"),
)
"""The workloads that `make test` also runs."""


def copy_of(promise: Promise) -> Promise:
    return replace(
        promise,
        puts=list(promise.puts),
        maybe_puts=list(promise.maybe_puts),
        batches=set(promise.batches),
        maybe_batches=set(promise.maybe_batches),
        rows=dict(promise.rows),
        uncommitted=list(promise.uncommitted),
        accepted=set(promise.accepted),
        expired=set(promise.expired),
    )


# ---- initial stores


@dataclass(frozen=True)
class Base:
    """A store that some process left.

    Parameters
    ----------
    content : Folder
    promise : Promise
        What the process had promised.
    steps : sequence of Step
        What it did, and may have left.
    """

    content: Folder
    promise: Promise
    steps: Sequence[Step]


_CLOSED = {
    "filled": SMALL,
    "roomy": HOSTILE,
    "few entries": FEW_ENTRIES,
    "small segments": SEGMENTS,
    "small files": SMALL_FILES,
}
_TORN: dict[str, tuple[str, list[Step], Callable[[Operation], bool], int]] = {
    "sealed, not dispatched": ("filled", [put(10), batch(1, 20)], dispatch, 3),
    "half dispatched, over segments": ("small segments", [batch(1, 50)], dispatch, 8),
    "not sealed": ("filled", [put(10), batch(1, 30)], seal, 1),
    "torn put": (
        "filled",
        [put(10), ("big_put", 11, 3000)],
        lambda operation: log_write(operation) and operation.detail.startswith("31"),
        1,
    ),
    "async": ("filled", [batch(1, 12, ASYNC_FLUSH), batch(2, 12, ASYNC_FLUSH)], dispatch, 6),
}
BASES = ("empty", *_CLOSED, *_TORN)


def make_base(name: str, root: Path) -> Base:
    """Create one of `BASES` in memory; `root` is where it will live."""
    if name == "empty":
        return Base({}, Promise(), [])

    closed, steps, when, nth = _TORN.get(name, (name, [], None, 0))
    config, disk, promise = _CLOSED[closed], MemKillDisk(root), Promise()
    run_steps(root, FILLED, disk, promise, config)
    die(root)

    if when is None:
        return Base(disk.content(), promise, FILLED)

    disk = MemKillDisk(root, disk.content(), half_writes=True)
    kill_when(disk, when, nth=nth)
    with contextlib.suppress(Killed, StorePoisonedError):
        run_steps(root, [("open",), *steps, ("close",)], disk, promise, config)
    die(root)

    if not disk.dead:
        raise AssertionError(f"{name}: nothing was killed")
    return Base(disk.content(), promise, [*FILLED, *steps])


class Bases:
    """Bases, each created on first use; they belong to one place.

    Parameters
    ----------
    root : Path
    made : dict of str -> Base
        Those that there are already.
    """

    def __init__(self, root: Path, made: Mapping[str, Base] = MappingProxyType({})) -> None:
        self.root = root
        self._made = {name: replace(base, promise=copy_of(base.promise)) for name, base in made.items()}

    def __getitem__(self, name: str) -> Base:
        if name not in self._made:
            self._made[name] = make_base(name, self.root)
        return self._made[name]


# ---- operations, and when they were promised


@dataclass
class Recorded:
    """A workload that ran on a disk that records it."""

    disk: RecordingDisk
    promises: list[tuple[int, Promise]] = field(default_factory=list)
    """Each promise, with how many operations had been done when it was made."""

    def promised(self, cut: int) -> Promise:
        """Return what had been promised by then; everything may be there."""
        last = copy_of(self.promises[-1][1])
        for position, promise in self.promises:
            if position <= cut:
                last.puts, last.batches, last.accepted = promise.puts, promise.batches, promise.accepted
        return last


def record(disk: RecordingDisk, promise: Promise, steps: Iterable[Step], config: StoreConfig) -> Recorded:
    """Run steps at the disk's folder; a kill or a poisoned writer ends them."""
    run, own, root = Recorded(disk), copy_of(promise), Path(disk.folder)

    def noted() -> Iterator[Step]:
        for step in steps:
            run.promises.append((disk.position, copy_of(own)))
            yield step

    with contextlib.suppress(Killed, StorePoisonedError):
        try:
            run_steps(root, noted(), disk, own, config)
        finally:
            die(root)
    run.promises.append((disk.position, copy_of(own)))
    return run


def record_in_memory(base: Base, workload: Workload, root: Path) -> Recorded:
    """Run and record a workload on its base, in memory."""
    return record(MemRecordingDisk(root, base.content), base.promise, workload.all_steps, workload.config)


# ---- operations as bodies


def in_log_order(steps: Sequence[Step]) -> list[list[bytes]]:
    """Return the bodies of each put and batch, in the order of the log: each is stored whole, or not at all.

    Puts of several threads at once (`group`) are left out, because their order is unknown.
    """
    found: list[list[bytes]] = []
    for step in steps:
        match step:
            case ("put", int(number), *_):
                found.append([put_text(number).encode(hostile.ENCODING)])
            case ("puts", int(number), int(count), *_):
                found += [[put_text(number + i).encode(hostile.ENCODING)] for i in range(count)]
            case ("big_put", int(number), int(size)):
                found.append([(f"put/{number}/" + "x" * size).encode()])
            case ("batch" | "commit", str(app), int(version), int(rows), _):
                if rows:
                    found.append([payload(app, version, row) for row in range(rows)])
    return found


def prefix_faults(bodies: set[bytes], steps: Sequence[Step], expired: Collection[bytes] = ()) -> tuple[int, list[str]]:
    """Return how many puts and batches exist, and why they are not a prefix of what was done, each whole.

    What retention may have deleted does not count.
    """
    faults, present = [], []
    for done in in_log_order(steps):
        whole = [body for body in done if body not in expired]
        if not whole:
            continue
        count = len(bodies & set(whole))
        if count not in (0, len(whole)):
            faults.append(f"{count} of {len(whole)} rows of {whole[0]!r}")
        present.append(count > 0)
    kept = sum(present)
    if not all(present[:kept]):
        faults.append(f"not a prefix: {present}")
    return kept, faults


def check_prefix(bodies: set[bytes], steps: Sequence[Step], who: str) -> int:
    """Check that the bodies are a prefix of what was done, with whole batches; return how many exist."""
    kept, faults = prefix_faults(bodies, steps)
    assert not faults, f"{who}: {faults}"
    return kept
