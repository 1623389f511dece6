"""What the tests of a sequence share: a store to begin with, disks that record, images of a power cut, and recovery.

The steps themselves (commits, puts, brokers, other boots) are in `crash.imitate`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from crash.harness import APP, ROOMY, SMALL
from crash.imitate import Process, commit, put
from crash.simdisk import RecordingDisk
from kernel import FLOCK
from messagestore import MessageStore

CONFIG = ROOMY
SIZES = {"mapped_file_size_commit_log": SMALL.mapped_file_size_commit_log}
"""Segments that a few batches fill."""
Start = Callable[..., Process]
"""The fixture `process`: starts a process on a store."""


def filled(root: Path, start: Start, versions: int = 1) -> None:
    """A store that was closed: a few puts, and batches of the app from version 0 on."""
    p = start(root)
    with p.session() as store:
        put(store, "put/0/")
        put(store, "put/1/")
        for version in range(versions):
            commit(store.writer, APP, version)


def reopened(root: Path, **changes: object) -> MessageStore:
    return MessageStore.open(root, CONFIG.replace(**changes))


def recovered(root: Path) -> list[str]:
    """Open and close the store; what recovery had to say."""
    with reopened(root) as store:
        assert store.report is not None
        return store.report.notes


def recording(root: Path) -> RecordingDisk:
    root.mkdir(exist_ok=True)
    return RecordingDisk(root)


def image(disk: RecordingDisk, scratch: Path, cut: int | None = None, mode: str = "strict") -> Path:
    """The store after a power cut."""
    target = scratch / f"image-{time.monotonic_ns()}"
    return disk.image(disk.position if cut is None else cut, mode).build(target)


def broker_may_lock(root: Path) -> bool:
    """Whether FileChannel.tryLock(0, 1, false) would get its lock. The file is only read: the writers make way for
    whoever opens it for writing.
    """
    with open(root / "lock", "rb") as file:
        asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        return bool(FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] == fcntl.F_UNLCK)
