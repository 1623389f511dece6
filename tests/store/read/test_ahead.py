"""Reads that a thread helps with: in a forked child, after the main thread has ended, and without any thread."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from messagestore import Message, MessageStore, StoreClosedError
from messagestore.read.ahead import Ahead
from small import SMALL, bodies, columns, filled, read_all

COUNT = 40_000
"""More messages than one batch of a read holds, so that a thread reads ahead."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large") / "s"
    with MessageStore.open(root, SMALL.replace(mapped_file_size_commit_log=1 << 23)) as store:
        store.append_batch(columns(bodies(COUNT, 10), queues=1))
    return root


def in_child(work: object) -> int:
    """The exit status of `work` in a forked child; 99 if it raises."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()  # type: ignore[operator]
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("way", ["read", "follow"])
def test_an_iterator_that_was_begun_before_a_fork_does_not_hang_in_the_child(large: Path, way: str) -> None:
    """The child is told, and reads with a store of its own; the parent goes on."""
    with MessageStore.open_read_only(large) as store:
        batches = store.read("t", 0, 0) if way == "read" else store.follow("t", 0, 0, timeout=0.01)
        first = next(batches)

        def work() -> int:
            try:
                next(batches)
            except StoreClosedError as error:
                assert "begun before a fork" in str(error)
                with MessageStore.open_read_only(large) as own:
                    return 0 if len(read_all(own)) == COUNT else 1
            return 2

        assert in_child(work) == 0
        assert first.num_rows + sum(batch.num_rows for batch in batches) == COUNT


def test_a_child_reads_with_a_store_that_was_opened_before_the_fork(large: Path) -> None:
    """Also if a thread of the parent was opening a file just then: the child has new locks."""
    with MessageStore.open_read_only(large) as store:
        assert store.max_offset("t", 0) == COUNT
        pools = store.view.files.pool, store.view.files.log_pool
        for pool in pools:
            pool._lock.acquire()
        try:
            status = in_child(lambda: 0 if len(read_all(store)) == COUNT else 1)
        finally:
            for pool in pools:
                pool._lock.release()
        assert status == 0


_LATE = """
import atexit, sys, threading
sys.path[:0] = {paths!r}
from messagestore import MessageStore, StoreConfig
from small import SMALL, bodies, columns, read_all

CONFIG = SMALL.replace(mapped_file_size_commit_log=1 << 23, max_index_num=400_000)
store = MessageStore.open({root!r}, CONFIG)

def work():
    done = store.append_batch(columns(bodies(65_537, 10), queues=1))
    print(done.status, len(read_all(store)), flush=True)

def late():
    threading.main_thread().join()
    work()

if {way!r} == "atexit":
    atexit.register(work)
else:
    threading.Thread(target=late).start()
"""


@pytest.mark.parametrize("way", ["a thread that outlives the main thread", "atexit"])
def test_large_batches_and_reads_work_while_the_interpreter_ends(tmp_path: Path, way: str) -> None:
    """The standard library's pools take nothing more by then."""
    root = tmp_path / "s"
    paths = [str(Path(__file__).parents[2])]
    program = _LATE.format(paths=paths, root=str(root), way=way)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    said = [line for line in ran.stderr.splitlines() if "the compiled kernel of messagestore is missing" not in line]
    assert (ran.stdout.split(), said) == (["appended", "65537"], [])
    with MessageStore.open_read_only(root) as store:
        assert store.max_offset("t", 0) == 65_537
    assert not (root / "abort").exists()


def test_without_a_thread_the_items_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.12 refuses threads once the main thread has ended."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            yield number

    with Ahead(items(), 2) as ahead:
        assert made == []
        assert next(ahead) == 0
        assert made == [0]
        assert list(ahead) == [1, 2, 3, 4]


def test_no_more_is_made_than_may_wait_and_an_error_comes_in_its_place() -> None:
    """The thread sleeps until there is room; after the error it has ended."""
    made, enough = [], threading.Event()

    def items() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            if number == 2:
                enough.set()
            if number == 4:
                raise ValueError("by the test")
            yield number

    with Ahead(items(), 3) as ahead:
        assert enough.wait(240)
        assert made == [0, 1, 2]
        assert [next(ahead) for _ in range(4)] == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(ValueError, match="by the test"):
                next(ahead)


def test_an_iterator_that_is_left_ends_its_thread(large: Path) -> None:
    """No thread stays behind a reader who has seen enough."""
    before = threading.active_count()
    with MessageStore.open_read_only(large) as store:
        batches = store.read("t", 0, 0)
        next(batches)
        assert threading.active_count() == before + 1
        batches.close()  # type: ignore[attr-defined]
        assert threading.active_count() == before


def test_a_session_that_reads_in_a_forked_child_is_told(tmp_path: Path) -> None:
    """A put or a read of the parent's session in the child is an error, and never waits."""
    with MessageStore.open(filled(tmp_path / "s"), SMALL) as store:

        def work() -> int:
            try:
                store.put_message(Message("t", b"x", queue_id=0))
            except StoreClosedError:
                return 0
            return 1

        assert in_child(work) == 0
