"""The process is killed at every operation of the seam: nothing promised is lost, nothing is there twice or in half."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.harness import (
    ROOMY,
    SMALL,
    Promise,
    Step,
    check_store,
    fresh,
    make_base,
    no_thread_warnings,
    run_until_killed,
)
from crash.simdisk import KillDisk
from messagestore import ASYNC_FLUSH, SYNC_FLUSH

pytestmark = no_thread_warnings

FILLED: list[Step] = [
    ("open",),
    ("put", 0, "single", 0),
    ("put", 1, "single", 1),
    ("batch", "app-1", 0, 30, SYNC_FLUSH),
    ("put", 2, "single", 0),
    ("close",),
]
WORKLOADS: dict[str, list[Step]] = {
    "single put": [("open",), ("put", 10, "single", 0), ("put", 11, "single", 1), ("close",)],
    "put of a batch": [("open",), ("puts", 10, 5, "single", 0), ("puts", 20, 3, "single", 1), ("close",)],
    "batch": [("open",), ("batch", "app-1", 1, 20, SYNC_FLUSH), ("batch", "app-1", 2, 20, SYNC_FLUSH), ("close",)],
    "async batch": [
        ("open",),
        ("batch", "app-1", 1, 20, ASYNC_FLUSH),
        ("batch", "app-1", 2, 20, SYNC_FLUSH),
        ("close",),
    ],
    "empty batch": [("open",), ("batch", "app-1", 1, 0, SYNC_FLUSH), ("batch", "app-1", 2, 5, SYNC_FLUSH), ("close",)],
    "roll-over": [("open",), ("batch", "app-1", 1, 150, SYNC_FLUSH), ("put", 12, "single", 0), ("close",)],
    "roll-over by puts": [("open",), *(("big_put", 100 + i, 5000) for i in range(5)), ("close",)],
    "first batch of a topic": [("open",), ("batch", "other", 0, 10, SYNC_FLUSH), ("close",)],
    "clean end": [("open",), ("put", 10, "single", 0), ("clean",), ("batch", "app-1", 1, 10, SYNC_FLUSH), ("close",)],
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


def kill_at(base: Path | None, promise: Promise, steps: list[Step], root: Path, at: int | None, half: bool) -> KillDisk:
    """Kill at one operation, then check."""
    disk = KillDisk(at, half_writes=half)
    after = run_until_killed(fresh(base, root), steps, disk, promise=copy_of(promise))
    try:
        check_store(root, after)
    except BaseException as error:
        error.add_note(f"killed at operation {at}: {disk.killed_in} (half writes: {half})")
        raise
    return disk


def kill_everywhere(base: Path | None, promise: Promise, steps: list[Step], scratch: Path, *, whole: bool) -> int:
    """Kill at each operation in turn, in each write also after half of it; how many operations there were.

    Opening and closing are the same in all workloads: unless `whole`, operations of these two are left out.
    """
    operations = kill_at(base, promise, steps, scratch / "store", None, False).operations
    first, last = 0, len(operations)
    if not whole:
        abort = [i for i, operation in enumerate(operations) if operation.detail.endswith("/abort")]  # renamed to it
        first = abort[0] if abort else 0
        closing = [i for i, operation in enumerate(operations) if operation.path.endswith("/journal.json")]
        last = closing[-1] if closing else last
    for at in range(first, last):
        kill_at(base, promise, steps, scratch / "store", at, False)
        if operations[at].name == "pwrite":
            kill_at(base, promise, steps, scratch / "store", at, True)
    return last - first


@pytest.mark.parametrize("name", WORKLOADS)
def test_kill_at_every_operation(name: str, filled: tuple[Path, Promise], scratch: Path) -> None:
    """A process that adds to a closed store dies at each of its operations; the next one finds all that was
    promised.
    """
    base, promise = filled
    assert kill_everywhere(base, promise, WORKLOADS[name], scratch, whole=name == "single put") > 5


def test_kill_while_a_store_is_made(scratch: Path) -> None:
    """The first process of a store dies at each operation: the folder can always be opened again."""
    steps: list[Step] = [("open",), ("put", 0, "single", 0), ("batch", "app-1", 0, 5, SYNC_FLUSH), ("close",)]
    assert kill_everywhere(None, Promise(), steps, scratch, whole=True) > 20


@pytest.mark.parametrize(
    "last",
    [
        ("put", 20, "single", 0),
        ("batch", "app-1", 1, 20, SYNC_FLUSH),
        ("batch", "app-1", 1, 150, SYNC_FLUSH),
        ("batch", "app-1", 1, 20, ASYNC_FLUSH),
    ],
    ids=["put", "batch", "batch over segments", "async batch"],
)
@pytest.mark.parametrize("where", [0.4, 0.65, 0.85])
def test_kill_in_recovery(last: Step, where: float, filled: tuple[Path, Promise], scratch: Path) -> None:
    """A process dies in an append, the next one in each operation of its recovery, the third finds everything."""
    base, promise = filled
    steps: list[Step] = [("open",), last, ("close",)]
    counting = KillDisk()
    run_until_killed(fresh(base, scratch / "count"), steps, counting, promise=copy_of(promise))
    broken = fresh(base, scratch / "broken")
    after = run_until_killed(broken, steps, KillDisk(int(len(counting.operations) * where)), promise=copy_of(promise))
    at = 0
    while True:
        root = fresh(broken, scratch / "store")
        disk = KillDisk(at, half_writes=True)
        run_until_killed(root, [("open",), ("close",)], disk, promise=copy_of(after))
        try:
            check_store(root, after)
        except BaseException as error:
            error.add_note(f"recovery killed at operation {at}: {disk.killed_in}")
            raise
        if not disk.dead:
            break
        at += 1
    assert at > 3


def test_nothing_is_killed(scratch: Path) -> None:
    """All workloads, one after the other, by processes that live: the checks themselves hold."""
    root = scratch / "store"
    promise = make_base(root, FILLED)
    for steps in WORKLOADS.values():
        fresh_root = fresh(root, scratch / "copy")
        check_store(fresh_root, run_until_killed(fresh_root, steps, KillDisk(), promise=copy_of(promise)))
    assert ROOMY.mapped_file_size_commit_log > SMALL.mapped_file_size_commit_log
