"""A disk that fills up and has room again: a caller repeats what failed, and no row is stored twice.

Every operation that needs room fails, starting with the n-th and for some that follow, with ENOSPC or EDQUOT. The clean
end moves with each put, so every operation of that move is among them. A caller repeats a step after an error, and
reopens the store when it must. The errors are judged, too: a full disk is a `StoreFullError`, and a put stops the
writer only if a sync fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from crash import checker
from crash.faults import ROOM_TAKERS, quiet_threads
from crash.harness import SMALL, Promise, Step, die, do_step
from crash.judge import Verdict, note_content, note_faults
from crash.memdisk import MemDisk
from crash.simdisk import Operation
from crash.workloads import Base, batch, copy_of, put
from messagestore import MessageStore, StoreConfig, StoreError, StoreFullError, StorePoisonedError

ERRORS = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}
MOVING = SMALL.replace(clean_interval="0s")
STORIES: dict[str, list[Step]] = {
    "puts": [put(10), put(11, 1), put(12, 0, "new"), ("puts", 20, 3, "single", 0), put(13)],
    "batches": [batch(1, 5), put(10), batch(2, 4), batch(0, 3, app="other")],
}
FOLLOWING = (1, 3, 12)
"""How many operations fail before there is room again."""
_TRIES = 30


class FullDisk(MemDisk):
    """A disk on which a number of operations fail, from the n-th operation that needs room on."""

    def __init__(self, root: Path, base: Base, at: int, count: int, number: int) -> None:
        super().__init__(root, base.content)
        self.failing = range(at, at + count)
        self.number = number
        self.asked = 0
        self.failed: list[Operation] = []
        for name in ROOM_TAKERS:
            setattr(self, name, self._guarded(name, getattr(self, name)))

    def _guarded(self, name, real):  # type: ignore[no-untyped-def] # four methods of the disk
        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            number, self.asked = self.asked, self.asked + 1
            if number in self.failing:
                path = str(getattr(arguments[0], "path", arguments[0]))
                self.failed.append(Operation(name, path, "failed"))
                raise self._translated(OSError(self.number, os.strerror(self.number), path), path, 1)
            return real(*arguments, **options)

        return call


def check(base: Base, root: Path, steps: Sequence[Step], at: int, count: int, number: int) -> tuple[bool, Verdict]:
    """Return whether something failed, and what is wrong afterwards."""
    disk, promise, verdict = FullDisk(root, base, at, count, number), copy_of(base.promise), Verdict()
    with quiet_threads():
        try:
            _do_all(disk, root, steps, promise, MOVING, verdict)
        finally:
            die(root)
    if not disk.failed:
        return False, verdict
    found = checker.check(disk.tree())
    note_faults(verdict, found, "after a full disk")
    note_content(verdict, found.bodies, found.queues, promise, (), everything=True)
    return True, verdict


def _do_all(
    disk: FullDisk, root: Path, steps: Sequence[Step], promise: Promise, config: StoreConfig, verdict: Verdict
) -> None:
    store: MessageStore | None = None
    for step in [*steps, ("close",)]:
        for _ in range(_TRIES):
            try:
                if store is None:
                    store = MessageStore.open(root, config, disk=disk)
                do_step(store, step, promise, config)
                break
            except StoreFullError:
                if step == ("close",) and not config.transient_store_pool_enable:
                    store = None  # it is closed; the next one closes the rest
            except StorePoisonedError as error:
                if step[0] in ("put", "puts"):
                    verdict.misread.append(f"{disk.failed[-1]}: a full disk stopped the writer in a put: {error}")
                with contextlib.suppress(StoreError):
                    if store is not None:
                        store.close()
                store = None
            except OSError as error:
                verdict.misread.append(f"{disk.failed[-1]}: not said to be a full disk: {error!r}")
                return
        else:
            verdict.misread.append(f"{step} never went through, although there is room again")
            return


def cases(base: Base, root: Path, quick: bool) -> Iterator[tuple[str, str, list[Step], int, int, int]]:
    """Yield story, key, steps, the first operation that fails, how many fail, and the error's number."""
    for story, steps in STORIES.items():
        disk = FullDisk(root, base, 0, 0, 0)
        with quiet_threads():
            _do_all(disk, root, steps, copy_of(base.promise), MOVING, Verdict())
        die(root)
        for at in range(disk.asked):
            chosen = [(name, count) for name in ERRORS for count in FOLLOWING]
            if quick:
                chosen = [chosen[at % len(chosen)]]
            for name, count in chosen:
                yield story, f"full/{story}/{name} x {count}/{at}", steps, at, count, ERRORS[name]
