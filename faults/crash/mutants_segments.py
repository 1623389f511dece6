"""Bugs planted where segments are made ahead."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

from crash.harness import die
from crash.mutants_numbers import named
from crash.planting import Mutant, patched, without
from crash.workloads import SEGMENTS, SEGMENTS_ASYNC
from messagestore import Message, MessageStore, StorePoisonedError
from messagestore.files.disk import Disk
from messagestore.log.store_files import Paths, StoreFiles
from messagestore.writer import standing
from messagestore.writer.segments_ahead import AllocateService
from messagestore.writer.states import Health

_BOUND_S = 30.0


def fill(root: Path) -> MessageStore:
    """A store whose last segment is full, and whose next segments are made."""
    store = MessageStore.open(root, SEGMENTS)
    for size in (1180, 1180, 1180, 10):
        assert store.put_message(Message("t", b"x" * size, queue_id=0)).is_ok
    services, until_s = store._attached.services, time.monotonic() + _BOUND_S
    assert services is not None
    while len(services.segments._spares) < 2 and time.monotonic() < until_s:
        time.sleep(0.001)
    return store


def a_writer_is_killed(root: Path) -> None:
    """What it had made ahead is no part of the store, and the next writer removes it."""
    fill(root)
    die(root)
    with MessageStore.open_read_only(root, SEGMENTS) as reader:
        assert reader.max_offset("t", 0) == 4
    with MessageStore.open(root, SEGMENTS) as store:
        left = [name for name in os.listdir(root / "spark") if name.startswith("new-")]
        assert not left, f"a killed writer's files are left: {left}"
        assert store.put_message(Message("t", b"x" * 1200, queue_id=0)).queue_offset == 4


def somebody_removes_them(root: Path) -> None:
    """A put does not depend on a file that another process has removed."""
    with fill(root) as store:
        for path in (root / "spark").glob("new-segment-*"):
            path.unlink()
        try:
            assert store.put_message(Message("t", b"x" * 1200, queue_id=0)).is_ok
        except OSError as error:
            raise AssertionError(f"a put failed: {error}") from error


def the_store_is_closed(root: Path) -> None:
    """Nobody pays for what was not needed."""
    fill(root).close()
    left = [name for name in os.listdir(root / "spark") if name.startswith("new-")]
    assert not left, f"a closed store has files that were made ahead: {left}"


class UnsyncedNames(Disk):
    """The folder of the log cannot be synced by the thread that makes segments."""

    def fsync_dir(self, path: str | Path) -> None:
        if str(path).endswith("commitlog") and threading.current_thread().name == "messagestore-allocate":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().fsync_dir(path)


def a_name_is_not_synced(root: Path) -> None:
    """The thread that noticed it has no caller, so close says it."""
    store = MessageStore.open(root, SEGMENTS_ASYNC, disk=UnsyncedNames())
    for _ in range(4):
        assert store.put_message(Message("t", b"x" * 1180, queue_id=0)).is_ok
    until_s = time.monotonic() + _BOUND_S
    while store.writer.health is Health.SOUND and time.monotonic() < until_s:
        time.sleep(0.001)
    try:
        store.close()
    except StorePoisonedError:
        return
    raise AssertionError("puts that were acknowledged are not synced, and close returned as if they were")


def in_the_log(real: Any) -> Any:
    """The files wait in the folder of the log, as RocketMQ's do, and a kill leaves them there."""

    def temporary(paths: Paths, name: str) -> str:
        path: str = real(paths, name)
        return os.path.join(paths.commit_log, os.path.basename(path)) if name.startswith("segment-") else path

    return temporary


def named_ahead(_: Any) -> Any:
    """A file is taken for the one at its path without a look."""

    def take(allocation: AllocateService) -> Any:
        return allocation._spares.popleft() if allocation._spares else None

    return take


MUTANTS: tuple[Mutant, ...] = (
    Mutant("segments that are made ahead wait in the folder of the log", patched(Paths, "temporary", in_the_log), "a kill", named(a_writer_is_killed)),
    Mutant("what a killed writer made ahead is not removed", without(StoreFiles, "sweep_temporary"), "a kill", named(a_writer_is_killed)),
    Mutant("a segment that was made ahead is used without a look", patched(AllocateService, "take", named_ahead), "a file that is gone", named(somebody_removes_them)),
    Mutant("a close leaves what was made ahead", without(AllocateService, "remove"), "a close", named(the_store_is_closed)),
    Mutant("an error that only a thread of the store has seen counts as told", without(standing, "is_service_thread", result=False), "a name that is not synced", named(a_name_is_not_synced)),
)  # fmt: skip
