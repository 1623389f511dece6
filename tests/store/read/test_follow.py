"""Waiting for messages and following a queue: woken by writers, by looking where a broker writes, and ended in time."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from crash.imitate import Broker
from messagestore import (
    ASYNC_FLUSH,
    Message,
    MessageStore,
    ReadOnlyStore,
    StoreClosedError,
    StoreConfig,
    StoreWentBackwardsError,
)
from messagestore.files.disk import Disk
from messagestore.files.folder_watch import FolderWatch
from messagestore.read import view
from small import SMALL, filled

PUT = """
import sys, time
from messagestore import Message, MessageStore
with MessageStore.open(sys.argv[1]) as store:
    sys.stdin.readline()
    for number in range(int(sys.argv[2])):
        store.put_message(Message("t", b"new/%d" % number, queue_id=0))
        time.sleep(0.02)
"""


class Blind(Disk):
    """All watches are in use."""

    def watch(self, path: str | Path) -> FolderWatch:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


class Patient(FolderWatch):
    """It waits for an event, whatever it is told: a wait that ends was ended by one."""

    def wait(self, timeout_s: float) -> bool:
        return super().wait(60.0 if timeout_s else 0.0)


class Trusting(Disk):
    def watch(self, path: str | Path) -> FolderWatch:
        return Patient(str(path))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """10 messages in topic t, queues 0 and 1."""
    return filled(tmp_path / "store", 10)


@contextmanager
def putting(root: Path, count: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that puts messages as soon as it is told to."""
    command = [sys.executable, "-c", PUT, str(root), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def texts(store: ReadOnlyStore, start: int, timeout: float | None) -> Iterator[bytes]:
    for batch in store.follow("t", 0, start, columns=["body"], timeout=timeout):
        yield from batch["body"].to_pylist()


def test_a_message_that_is_there_needs_no_wait(root: Path) -> None:
    with MessageStore.open_read_only(root) as store:
        assert store.wait("t", 0, 4)
        assert store.wait("t", 0, 0, timeout=0)


@pytest.mark.parametrize("disk", [None, Blind()], ids=["watched", "not watched"])
def test_a_wait_ends_in_time_without_a_message(root: Path, disk: Disk | None) -> None:
    """Also for a topic that does not exist, and in a store that is open for writing."""
    with MessageStore.open_read_only(root, disk=disk) as store:
        begin_s = time.monotonic()
        assert not store.wait("t", 0, 5, timeout=0.05)
        assert not store.wait("nothing", 7, 0, timeout=0.05)
        assert time.monotonic() - begin_s >= 0.1
    with MessageStore.open(root) as store:
        assert not store.wait("t", 0, 5, timeout=0.05)


def test_a_put_of_another_process_ends_a_wait(root: Path) -> None:
    """By an event: the reader would look again after a minute."""
    with putting(root) as process, MessageStore.open_read_only(root, disk=Trusting()) as store:
        tell(process)
        begin_s = time.monotonic()
        assert store.wait("t", 0, 5, timeout=50)
        assert time.monotonic() - begin_s < 40
        assert process.wait(60) == 0


def test_a_put_of_another_thread_ends_a_wait(root: Path) -> None:
    """In the same session, with both kinds of flush."""
    for offset, flush in ((5, "SYNC_FLUSH"), (6, ASYNC_FLUSH)):
        with MessageStore.open(root, StoreConfig(flush_disk_type=flush)) as store:
            timer = threading.Timer(0.1, lambda store=store: store.put_message(Message("t", b"late", queue_id=0)))
            timer.start()
            assert store.wait("t", 0, offset, timeout=60)
            timer.join()


@pytest.mark.parametrize("disk", [None, Blind()], ids=["watched", "not watched"])
def test_all_messages_are_followed_in_order(root: Path, disk: Disk | None) -> None:
    """Those that are there and those that arrive, each once; the iterator ends when nothing arrives any more."""
    with putting(root, 25) as process, MessageStore.open_read_only(root, disk=disk) as store:
        found = texts(store, 3, timeout=20)
        there = list(islice(found, 2))
        tell(process)
        arriving = list(islice(found, 25))
        assert process.wait(60) == 0
    assert len(there) == 2
    assert arriving == [b"new/%d" % number for number in range(25)]
    with MessageStore.open_read_only(root) as store:
        assert list(texts(store, 5, timeout=0)) == arriving


def test_a_broker_is_followed(root: Path) -> None:
    """It writes through memory mappings, of which nobody is told."""
    broker = Broker(root)
    with MessageStore.open_read_only(root, SMALL) as store:
        found = texts(store, 5, timeout=30)
        for number in range(3):
            broker.put("t", b"java/%d" % number, 0)
            assert next(found) == b"java/%d" % number


def test_a_topic_that_comes_later_is_followed(root: Path) -> None:
    with MessageStore.open(root) as store:
        found = store.follow("later", 0, 0, columns=["body"], timeout=30)
        timer = threading.Timer(0.05, lambda: store.put_message(Message("later", b"now", queue_id=0)))
        timer.start()
        assert next(found)["body"].to_pylist() == [b"now"]
        timer.join()


def test_a_start_beyond_the_end_is_waited_for(root: Path) -> None:
    """Messages below it are not given."""
    with MessageStore.open(root) as store:
        for number in range(3):
            store.put_message(Message("t", b"%d" % number, queue_id=0))
        assert list(texts(store, 7, timeout=0)) == [b"2"]
        assert list(texts(store, 9, timeout=0)) == []


def test_a_queue_that_goes_back_is_an_error(root: Path) -> None:
    """It was deleted, or the store was restored: the follower must not wait until the queue is as long again."""
    with MessageStore.open_read_only(root) as store:
        found = texts(store, 0, timeout=30)
        assert len(list(islice(found, 5))) == 5
        Broker(root)
        shutil.rmtree(root / "consumequeue" / "t" / "0")
        with pytest.raises(
            StoreWentBackwardsError, match="t/0: messages up to 5 were there, and now the queue ends at 0"
        ):
            next(found)


def test_a_watch_tells_of_what_happened_before_the_wait(tmp_path: Path) -> None:
    """So nothing is missed between a look and the wait after it."""
    watch = FolderWatch(str(tmp_path))
    assert not watch.wait(0)
    (tmp_path / "state").write_bytes(b"1")
    assert watch.wait(0)
    assert not watch.wait(0)
    (tmp_path / "new").write_bytes(b"2")
    (tmp_path / "new").rename(tmp_path / "state")
    assert watch.wait(0)
    watch.close()
    watch.close()
    with pytest.raises(FileNotFoundError, match="none"):
        FolderWatch(str(tmp_path / "none"))


def test_a_restored_store_is_watched_again(root: Path, tmp_path: Path) -> None:
    """Its folder `spark` is another one; the old watch would hear nothing."""
    with MessageStore.open_read_only(root) as store:
        store.wait("t", 0, 5, timeout=0)
        watch = store.view._watch
        shutil.copytree(root / "spark", tmp_path / "copy")
        shutil.rmtree(root / "spark")
        shutil.copytree(tmp_path / "copy", root / "spark")
        store.wait("t", 0, 5, timeout=0.01)
        assert store.view._watch is not watch is not None
    assert view._LOOK_S <= 0.1


@pytest.mark.parametrize("opened", [MessageStore.open, MessageStore.open_read_only])
@pytest.mark.parametrize("follow", [False, True])
def test_another_thread_that_closes_the_store_ends_a_wait(
    root: Path, opened: Callable[[Path], ReadOnlyStore], follow: bool
) -> None:
    """It used to end with EBADF, or to read from whatever file had got the descriptor's number."""
    for _ in range(10):
        store = opened(root)
        found = store.follow("t", 0, 0)
        next(found)
        closer = threading.Timer(0.02, store.close)
        closer.start()
        with pytest.raises(StoreClosedError):
            next(found) if follow else store.wait("t", 0, 5)
        closer.join()


def test_a_watch_that_is_closed_during_a_wait_keeps_its_descriptor_until_the_wait_ends(tmp_path: Path) -> None:
    """The number would otherwise be another file's, and the wait would read from that one."""
    watch = FolderWatch(str(tmp_path))
    (number,) = watch._descriptors
    ended: list[bool] = []
    waiter = threading.Thread(target=lambda: ended.append(watch.wait(30)))
    waiter.start()
    while not watch._waiting:
        time.sleep(0.001)
    time.sleep(0.05)
    watch.close()
    os.fstat(number)
    (tmp_path / "new").write_bytes(b"")
    waiter.join(60)
    assert ended == [True]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert watch.wait(30)
