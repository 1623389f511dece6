"""Lets operation n of a workload fail, for n = 0, 1, 2 and so on, while the process survives.

The process must not acknowledge what is not safe, must not sync again what failed to sync, must raise an error of the
store's own kind, and must continue if the disk was only full. Then it dies, by a kill and by power cuts, and the store
is judged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crash import hostile
from crash.harness import Promise, Step, die, do_step
from crash.imitate import seal
from crash.judge import Crash, Verdict, judge
from crash.memdisk import MemRecordingDisk
from crash.simdisk import Operation
from crash.workloads import Base, Workload, copy_of, in_log_order
from messagestore import CorruptionError, MessageStore, StoreConfig, StoreError, StoreFullError, StorePoisonedError
from messagestore.files.disk import File

FAULTS = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EMFILE": errno.EMFILE,
    "EROFS": errno.EROFS,
    "EACCES": errno.EACCES,
    "MemoryError": -1,
}
ROOM_TAKERS = ("pwrite", "open_new", "mkdir", "rename")
OPENERS = ("open_new", "fsync_dir", "open")
_MAY_FAIL_WITH = {
    "EIO": (),  # any error
    "ENOSPC": ROOM_TAKERS,
    "EMFILE": OPENERS,
    "EROFS": (*ROOM_TAKERS, "unlink", "open"),
    "EACCES": ("open_new", "mkdir", "rename", "unlink", "open"),
    "MemoryError": (),
}


class Faulty(MemRecordingDisk):
    """A disk on which one operation fails; it detects a second sync of what failed to sync.

    Parameters
    ----------
    root, content
    fault : str
        One of `FAULTS`.
    at : int | None
        The number of the operation.
    sticky : bool
        All later operations of its kind fail, too.
    opens : bool
        Fail the opening of a file after `at` openings instead of operation `at`.
    """

    def __init__(
        self,
        root: Path,
        content: Any,
        fault: str = "EIO",
        at: int | None = None,
        *,
        sticky: bool = False,
        opens: bool = False,
    ) -> None:
        super().__init__(root, content, fail_at=None if opens else at, error_number=FAULTS[fault], half_writes=True)
        self.fault = fault
        self.sticky = sticky
        self.open_at = at if opens else None
        self.open_count = 0
        self.failed: Operation | None = None
        self.synced_again: list[str] = []
        self.renamed_since = False

    def open(self, path: str | Path, *, writable: bool = False) -> File:
        number, self.open_count = self.open_count, self.open_count + 1
        if self.open_at is not None and (number == self.open_at or (self.sticky and number > self.open_at)):
            self.failed = self.failed or Operation("open", str(path), "failed")
            raise self._error(str(path))
        return super().open(path, writable=writable)

    def _attempt(self, operation: Operation, *arguments: Any) -> Any:
        failed = self.failed
        if failed is not None and operation.name == "rename" and operation.detail.startswith(f"to {failed.path}/"):
            self.renamed_since = True  # another name in the folder that could not be synced: it may be tried
        if failed is not None and operation.name == failed.name:
            syncs = operation.name in ("fdatasync", "fsync_dir", "syncfs")
            again = operation.path == failed.path and "/new-" not in operation.path and not self.renamed_since
            if syncs and again and not self.sticky and self.fault != "MemoryError":  # then nothing was synced at all
                self.synced_again.append(str(operation))
            if self.sticky:
                self.fail_at = len(self.operations)
        if len(self.operations) == self.fail_at:
            self.failed = self.failed or operation
            if FAULTS[self.fault] < 0:
                self.operations.append(operation._replace(detail=f"{operation.detail}, failed".lstrip(", ")))
                raise self._error(operation.path)
        return super()._attempt(operation, *arguments)

    def _error(self, path: str) -> Exception:
        number = FAULTS[self.fault]
        return MemoryError("no memory (by the test)") if number < 0 else OSError(number, os.strerror(number), path)


def run_failing(
    root: Path, steps: Sequence[Step], disk: Faulty, promise: Promise, config: StoreConfig, tries: int = 2
) -> str:
    """Run a process that continues after errors, with several tries for each step; return how it ended.

    After `StorePoisonedError`, nothing may work until the store is opened again.
    """
    typed = (StoreError, OSError, MemoryError) if disk.fault == "MemoryError" else (StoreError, OSError)

    try:
        store = MessageStore.open(root, config, disk=disk)
    except typed as error:
        refuse_corruption(error)
        return "not opened"

    for step in steps:
        for _ in range(tries):
            try:
                do_step(store, step, promise, config)
                break
            except StorePoisonedError:
                check_poisoned(store, config)
                with contextlib.suppress(*typed):
                    store.close()
                return "poisoned"
            except typed as error:
                refuse_corruption(error)

    for _ in range(2):
        try:
            do_step(store, ("close",), promise, config)
        except typed as error:
            if not (isinstance(error, StoreFullError) and config.transient_store_pool_enable):
                break  # what waits in a pool is written by the next close
        else:
            return "closed"
    return "not closed"


def refuse_corruption(error: BaseException) -> None:
    """Check that an error of the disk is not reported as damage."""
    if isinstance(error, CorruptionError):
        raise AssertionError(f"took a failing disk for damage: {error}") from error


def check_poisoned(store: MessageStore, config: StoreConfig) -> None:
    """Check that nothing works any more."""
    for step in (("put", 999, "single", 0), ("batch", "app-1", 99, 1, "SYNC_FLUSH"), ("clean",)):
        try:
            do_step(store, step, Promise(), config)
        except StorePoisonedError:
            continue
        raise AssertionError(f"a poisoned writer did {step}")


def check_fault(
    base: Base,
    workload: Workload,
    root: Path,
    fault: str,
    at: int,
    *,
    sticky: bool = False,
    opens: bool = False,
    tries: int = 2,
    briefly: bool = False,
) -> tuple[str, Operation | None, Verdict]:
    """Let operation `at` fail. Return how the process ended, what failed, and what is wrong.

    What failed is None if there are not that many operations. The remains are judged after a power cut that takes all
    that it may, after one that takes nothing, and after a kill; with `briefly`, after one of the last two.
    """
    disk = Faulty(root, base.content, fault, at, sticky=sticky, opens=opens)
    own, verdict = copy_of(base.promise), Verdict()
    ended = "?"
    with quiet_threads():
        try:
            ended = run_failing(root, workload.steps, disk, own, workload.config, tries)
        except (AssertionError, StoreError, OSError) as error:
            verdict.misread.append(f"{type(error).__name__}: {error}")
        finally:
            die(root)
    if disk.failed is None:
        return ended, None, verdict
    verdict.misread += [f"what failed to sync was synced again: {operation}" for operation in disk.synced_again]
    # A step that failed twice leaves a gap in the sequence, which is not checked.
    steps = [*base.steps, *(step for step in workload.steps if any(accepted(own, step)))]
    strict, others = disk.image(disk.position, "strict").folder, []
    if not briefly or at % 2:
        others.append((disk.image(disk.position, "all").folder, True))
    if not briefly or not at % 2:
        others.append((disk.content(), False))
    for content, power_cut in [(strict, True), *others]:
        after = judge(Crash(content, own, steps, workload.config, power_cut=power_cut), root)
        # A disk that failed during a recovery or an append leaves any part of what was in flight, so what is visible
        # before the next recovery is not checked here.
        after.misread = [text for text in after.misread if not text.startswith("before recovery")]
        for kind, found in vars(after).items():
            getattr(verdict, kind).extend(found)
    once_full = fault == "ENOSPC" and not sticky
    if once_full and is_before_commit(disk.failed) and ended != "closed":
        verdict.misread.append(f"a full disk before the commit point, and the process is of no use any more ({ended})")
    return ended, disk.failed, verdict


def accepted(promise: Promise, step: Step) -> Iterator[bool]:
    """Yield whether a step returned, if it left something."""
    for whole in in_log_order([step]):
        name = whole[0].decode(hostile.ENCODING)
        key = (name.split("/")[0], int(name.split("/")[1]))
        yield name in promise.accepted or key in promise.accepted


def is_before_commit(operation: Operation) -> bool:
    """Whether nothing is promised yet, or the operation can be repeated, if there is no room for it."""
    if operation.name not in ROOM_TAKERS or seal(operation):
        return False
    return "/commitlog/" in operation.path or re.search("/spark/new-([0-9a-f]{32}|abort)$", operation.path) is not None


def operations_of(base: Base, workload: Workload, root: Path) -> tuple[list[Operation], str]:
    """Return what a workload does when nothing fails, and the folder of its disk."""
    disk = Faulty(root, base.content)
    ended = run_failing(root, workload.steps, disk, copy_of(base.promise), workload.config)
    die(root)
    if ended != "closed":
        raise AssertionError(f"without a fault the process ended: {ended}")
    return disk.operations, disk.root


def fault_points(operations: tuple[list[Operation], str], fault: str) -> dict[str, list[int]]:
    """Return the operations that may fail in this way, by purpose (the kind of file, and what is done to it)."""
    found: dict[str, list[int]] = {}
    for at, operation in enumerate(operations[0]):
        if not _MAY_FAIL_WITH[fault] or operation.name in _MAY_FAIL_WITH[fault]:
            where = (operation.detail if operation.name == "rename" else operation.path).split(f"{operations[1]}/")[-1]
            where = re.sub("[0-9a-f]{17,}", "*", where)
            found.setdefault(f"{operation.name} {where} {seal(operation)}", []).append(at)
    return found


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """Suppress the traceback of the flush thread, which may die of a fault; what it left is judged."""
    before = threading.excepthook
    threading.excepthook = lambda _: None
    try:
        yield
    finally:
        threading.excepthook = before
