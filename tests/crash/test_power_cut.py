"""Power cuts, failing disks and full disks, at every operation: nothing acknowledged is lost, nothing is there in half.

Power cuts: a workload runs once on a disk that records it; the folder is then built as a power cut at any time may have
left it (`crash.power_cut`), and another boot looks at it: first a reader that comes before any writer, then the next
writer, with everything that `harness.check_store` asks for. In ASYNC_FLUSH only the newest batches and puts may be gone.

Failing disks: operation n fails, for n = 0, 1, 2, ... The process lives on: it must not acknowledge what is not safe, not
sync again what failed to sync, and stay of use where the disk was only full.

Some cuts and operations here, all of them in the tests that are marked `slow`.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from crash.harness import (
    SMALL,
    Promise,
    Step,
    all_messages,
    check_store,
    die,
    do_step,
    fresh,
    make_base,
    no_thread_warnings,
    payload,
    run_steps,
    spread,
)
from crash.imitate import another_boot, dispatch, kill_when, read_slot, seal, walk
from crash.simdisk import MODES, FailDisk, Image, KillDisk, Killed, Operation, RecordingDisk
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    MessageStore,
    StoreConfig,
    StoreError,
    StoreFullError,
    StorePoisonedError,
)

pytestmark = no_thread_warnings

ASYNC = SMALL.replace(flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=20)
FILLED: list[Step] = [
    ("open",),
    ("put", 0, "single", 0),
    ("put", 1, "single", 1),
    ("batch", "app-1", 0, 30, SYNC_FLUSH),
    ("put", 2, "single", 0),
    ("close",),
]


def batch(version: int, rows: int, flush: str = SYNC_FLUSH, app: str = "app-1") -> Step:
    return ("batch", app, version, rows, flush)


def put(number: int, queue_id: int = 0, topic: str = "single") -> Step:
    return ("put", number, topic, queue_id)


@dataclass(frozen=True)
class Workload:
    """What a process does between its open and its close."""

    steps: tuple[Step, ...]
    config: StoreConfig = SMALL

    @property
    def all_steps(self) -> list[Step]:
        return [("open",), *self.steps, ("close",)]


WORKLOADS = {
    "single puts": Workload((put(10), put(11, 1), put(12), put(13, 0, "new"))),
    "puts side by side": Workload((("puts", 10, 5, "single", 0), ("puts", 20, 3, "new", 1))),
    "async puts": Workload((put(10), put(11, 1), put(12), ("puts", 20, 4, "new", 1), put(13)), ASYNC),
    "async puts over segments": Workload(tuple(("big_put", 100 + i, 5000) for i in range(6)), ASYNC),
    "batches": Workload((batch(1, 20), batch(2, 20))),
    "async batches": Workload((batch(1, 8, ASYNC_FLUSH), batch(2, 8, ASYNC_FLUSH), batch(3, 8, ASYNC_FLUSH))),
    "async, then sync": Workload((batch(1, 10, ASYNC_FLUSH), batch(2, 10), batch(3, 10, ASYNC_FLUSH))),
    "async roll-over": Workload((batch(1, 60, ASYNC_FLUSH), batch(2, 10, ASYNC_FLUSH))),
    "empty batch": Workload((batch(1, 0), batch(2, 5))),
    "roll-over": Workload((batch(1, 250), put(12))),
    "roll-over by puts": Workload(tuple(("big_put", 100 + i, 5000) for i in range(5))),
    "first batch of a topic": Workload((batch(0, 40, app="other"),)),
    "clean end moves": Workload((put(10), batch(1, 10), ("clean",), batch(2, 10), ("clean",), put(11))),
    "clean end moves, async": Workload((batch(1, 10, ASYNC_FLUSH), ("clean",), batch(2, 10, ASYNC_FLUSH))),
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Promise]:
    """A store that was closed, with puts and a batch in it."""
    root = tmp_path_factory.mktemp("base") / "store"
    return root, make_base(root, FILLED)


def copy_of(promise: Promise) -> Promise:
    return Promise(
        list(promise.puts),
        list(promise.maybe_puts),
        set(promise.batches),
        set(promise.maybe_batches),
        dict(promise.rows),
    )


# ---- what was done, and when it was promised


@dataclass
class Recorded:
    """A workload that ran through on a disk that records it."""

    disk: RecordingDisk
    promises: list[tuple[int, Promise]] = field(default_factory=list)
    """With each promise how many operations had been done when it was made."""

    def promised(self, cut: int) -> Promise:
        """What had been promised by then; what may be there is everything."""
        last = copy_of(self.promises[-1][1])
        for position, promise in self.promises:
            if position <= cut:
                last.puts, last.batches = promise.puts, promise.batches
        return last


def record(base: Path | None, promise: Promise, workload: Workload, folder: Path, disk: RecordingDisk | None = None) -> Recorded:
    root = fresh(base, folder)
    run = Recorded(disk or RecordingDisk(root))
    own = copy_of(promise)

    def noted() -> Iterator[Step]:
        for step in workload.all_steps:
            run.promises.append((run.disk.position, copy_of(own)))
            yield step

    try:
        run_steps(root, noted(), run.disk, own, workload.config)
    except (Killed, StorePoisonedError):
        pass
    finally:
        die(root)
    run.promises.append((run.disk.position, copy_of(own)))
    return run


# ---- what must hold


def in_log_order(steps: Sequence[Step]) -> list[list[bytes]]:
    """Bodies of each put and batch, in the order of the log: each is there whole, or not at all."""
    found: list[list[bytes]] = []
    for step in steps:
        match step:
            case ("put", int(number), *_):
                found.append([f"put/{number}/".encode()])
            case ("puts", int(number), int(count), *_):
                found += [[f"put/{number + i}/".encode()] for i in range(count)]
            case ("big_put", int(number), int(size)):
                found.append([(f"put/{number}/" + "x" * size).encode()])
            case ("batch", str(app), int(version), int(rows), _):
                if rows:
                    found.append([payload(app, version, row) for row in range(rows)])
    return found


def check_prefix(bodies: set[bytes], steps: Sequence[Step], who: str) -> int:
    """What is there is a prefix of what was done, and of each batch everything or nothing; how many are there."""
    present = []
    for whole in in_log_order(steps):
        count = len(bodies & set(whole))
        assert count in (0, len(whole)), f"{who}: {count} of {len(whole)} rows of {whole[0]!r}"
        present.append(count > 0)
    kept = sum(present)
    assert all(present[:kept]), f"{who}: not a prefix: {present}"
    return kept


def bodies_of(store: MessageStore) -> set[bytes]:
    return {body for found in all_messages(store).values() for body in found}


def check_reader(root: Path, steps: Sequence[Step], config: StoreConfig) -> int:
    """A reader that comes before any writer sees a prefix of whole batches; each key of what it sees is found."""
    with MessageStore.open_read_only(root, config) as reader:
        found = bodies_of(reader)  # type: ignore[arg-type]
        kept = check_prefix(found, steps, "reader")
        for step in steps:
            match step:
                case ("batch", str(app), int(version), int(rows), _) if rows and payload(app, version, 0) in found:
                    hits = reader.query_message(f"topic-{app}", f"k{version}-{rows - 1}")
                    assert [m.body for m in hits] == [payload(app, version, rows - 1)], "reader: a key is not found"
        return kept


def check_image(image: Image, promise: Promise, steps: Sequence[Step], target: Path, config: StoreConfig) -> None:
    """Another boot finds this: a reader first, then the next writer."""
    shutil.rmtree(target, ignore_errors=True)
    image.build(target)
    try:
        with another_boot():
            seen = check_reader(target, steps, config)
            with MessageStore.open(target, config) as store:
                kept = check_prefix(bodies_of(store), steps, "recovery")
            assert seen <= kept, "a reader saw what recovery did not keep"
            check_store(target, promise, config)
    except BaseException as error:
        error.add_note(str(image))
        raise


def check_cuts(
    base: Path | None, promise: Promise, workload: Workload, scratch: Path, *, cuts: int | None, limit: int, modes: Sequence[str] = MODES
) -> int:
    """Images of a workload: `cuts` of its operations (None: all), at most `limit` of each mode; how many there were."""
    run = record(base, promise, workload, scratch / "recorded")
    steps = [*FILLED, *workload.steps] if base is not None else list(workload.steps)
    places = range(run.disk.position + 1) if cuts is None else spread(run.disk.position + 1, cuts)
    count = 0
    for cut in places:
        for image in run.disk.images(cut, modes, limit=limit, random_count=limit):
            if not (base is None and cut == 0):
                check_image(image, run.promised(cut), steps, scratch / "image", workload.config)
                count += 1
    return count


SOME_MODES = ("strict", "one missing", "random")


@pytest.mark.parametrize("name", WORKLOADS)
def test_power_cuts(name: str, filled: tuple[Path, Promise], scratch: Path) -> None:
    """Power goes while a process adds to a closed store; whatever survives, the next boot finds what was promised."""
    base, promise = filled
    assert check_cuts(base, promise, WORKLOADS[name], scratch, cuts=6, limit=1, modes=SOME_MODES) > 6


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_all_power_cuts(name: str, filled: tuple[Path, Promise], scratch: Path) -> None:
    """The same at every operation, with every kind of image."""
    base, promise = filled
    assert check_cuts(base, promise, WORKLOADS[name], scratch, cuts=None, limit=2) > 50
