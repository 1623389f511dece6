"""A process forks while another of its threads commits: the locks of that thread are never let go in the child.

Every call of the child on what it inherited ends, and says that a child opens the store itself; the parent does not
notice anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.harness import SMALL, tree_hash
from crash.imitate import commit, put, rows_seen, seen
from messagestore import MessageStore
from messagestore.files.disk import Disk, File
from messagestore.inspect.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BOUND_S = 120.0


class WaitingDisk(Disk):
    """A sync of the log waits until it may go on."""

    def __init__(self) -> None:
        self.go_on, self.waiting = threading.Event(), threading.Event()
        self.go_on.set()

    def fdatasync(self, file: File) -> None:
        if "/commitlog/" in file.path and not self.go_on.is_set():
            self.waiting.set()
            assert self.go_on.wait(BOUND_S)
        super().fdatasync(file)


def in_child(work: Callable[[], object]) -> str:
    """What it raised, or "done"; "hangs" when it does not end."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "done"
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            said = type(error).__name__
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    until_s = time.monotonic() + BOUND_S
    with os.fdopen(read_end, "rb") as pipe:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "hangs"
            time.sleep(0.002)
        return pipe.read().decode()


@contextlib.contextmanager
def committing(store: MessageStore, disk: WaitingDisk, work: Callable[[], object]) -> Iterator[None]:
    """While the block runs another thread is in the middle of `work`, and holds its locks."""
    disk.waiting.clear()
    disk.go_on.clear()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert disk.waiting.wait(BOUND_S)
        yield
    finally:
        disk.go_on.set()
        thread.join()


@pytest.mark.parametrize("during", ["a batch", "a put", "a close"])
def test_a_child_forked_in_the_middle_of_a_commit_neither_hangs_nor_writes(scratch: Path, during: str) -> None:
    """Put, commit, flush, close and opening anew, each in a child of its own."""
    root, disk = scratch / "store", WaitingDisk()
    store = MessageStore.open(root, SMALL, disk=disk)
    put(store, "put/0/")
    commit(store.writer)
    works: dict[str, Callable[[], object]] = {
        "a batch": lambda: commit(store.writer, version=1),
        "a put": lambda: put(store, "put/1/"),
        "a close": store.close,
    }
    writer = store.writer
    with committing(store, disk, works[during]):
        before = tree_hash(root)
        closed = "StoreClosedError"
        assert in_child(lambda: put(store, "put/2/")) == closed
        assert in_child(lambda: commit(writer, version=2)) == closed
        assert in_child(store.flush) == closed
        assert in_child(store.close) in ("done", closed)
        assert in_child(lambda: MessageStore.open(root, SMALL.replace(lock_timeout="0ms"))) == "StoreLockedError"
        assert tree_hash(root) == before
    if during != "a close":
        put(store, "put/3/")
        store.close()
    versions = {0: 5, 1: 5} if during == "a batch" else {0: 5}
    puts = {"a batch": ["put/3/"], "a put": ["put/1/", "put/3/"], "a close": []}[during]
    assert rows_seen(root) == versions
    assert seen(root)[("single", 0)] == ["put/0/", *puts]
    assert not (root / "abort").exists()
    assert verify(root).ok
