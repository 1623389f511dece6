"""A queue's file that is missing or was cut is an error of each reader, however the store was left: never fewer messages.

The messages are in the log, so `messagestore recover` brings all of them back.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from crash.imitate import another_boot
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    CorruptionError,
    Message,
    MessageStore,
    ReadOnlyStore,
    StoreConfig,
    StorePoisonedError,
)
from messagestore.format.layout import UNIT

FILE_UNITS = 10
QUEUES = 3
CONFIG = StoreConfig(mapped_file_size_consume_queue=FILE_UNITS * UNIT.size)
COUNT = 25  # of each queue: two full files and a half


def _put(store: MessageStore, queue_id: int, count: int) -> None:
    for number in range(count):
        store.put_message(Message("t", b"%d/%d" % (queue_id, number), queue_id=queue_id))


def _lose_all(queue: Path) -> None:
    for path in queue.iterdir():
        path.unlink()


def _lose_last(queue: Path) -> None:
    max(queue.iterdir()).unlink()


def _lose_first(queue: Path) -> None:
    """Readers took its messages for deleted by retention, and a scan left them out."""
    min(queue.iterdir()).unlink()


def _cut(queue: Path) -> None:
    """The last file has only its first unit: the rest reads as zeros, as after a copy that was broken off."""
    path = max(queue.iterdir())
    with open(path, "r+b") as file:
        file.truncate(UNIT.size)
        file.truncate(FILE_UNITS * UNIT.size)


def _zero(queue: Path) -> None:
    """A part of a file in the middle is zeros."""
    path = sorted(queue.iterdir())[1]
    with open(path, "r+b") as file:
        file.write(bytes((FILE_UNITS - 1) * UNIT.size))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "all files": _lose_all,
    "the last file": _lose_last,
    "the first file": _lose_first,
    "the end of the last file": _cut,
    "units in the middle": _zero,
    "its folder": shutil.rmtree,
}


@contextlib.contextmanager
def _killed(root: Path, flush: int, *, batch: bool = False) -> Iterator[None]:
    """Another process puts messages to the first queue, at last as a batch, and is killed."""
    child = os.fork()
    if not child:
        try:
            store = MessageStore.open(root, CONFIG.replace(flush_disk_type=flush))
            _put(store, 0, 5)
            if batch:
                store.append_batch(pa.record_batch({"body": [b"of a batch"]}), topic="t", queue_id=0)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    yield


@contextlib.contextmanager
def _at_work(root: Path) -> Iterator[None]:
    with contextlib.suppress(StorePoisonedError), MessageStore.open(root, CONFIG) as store:
        _put(store, 0, 5)
        yield  # the writer notices at its end, if it has written to these files itself


@contextlib.contextmanager
def _rebooted(root: Path, *, batch: bool = False) -> Iterator[None]:
    with _killed(root, SYNC_FLUSH, batch=batch), another_boot():
        yield


LEFT: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "closed": contextlib.nullcontext,
    "a writer at work": _at_work,
    "killed": lambda root: _killed(root, SYNC_FLUSH),
    "killed with ASYNC_FLUSH": lambda root: _killed(root, ASYNC_FLUSH),
    "before a restart": _rebooted,
    "before a restart, after a batch": lambda root: _rebooted(root, batch=True),
}


def bodies(reader: ReadOnlyStore, queue_id: int) -> list[bytes]:
    return [body for batch in reader.read("t", queue_id, 0) for body in batch["body"].to_pylist()]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("queue_id", [0, 1], ids=["the queue that goes on", "another queue"])
def test_a_queue_without_its_files_shows_all_or_is_an_error(
    tmp_path: Path, left: str, damage: str, queue_id: int
) -> None:
    root = tmp_path / "s"
    with MessageStore.open(root, CONFIG.replace(flush_disk_type=ASYNC_FLUSH)) as store:
        for each in range(QUEUES):
            _put(store, each, COUNT)

    expected = {f"{each}/{number}".encode() for each in range(QUEUES) for number in range(COUNT)}
    with LEFT[left](root):
        DAMAGES[damage](root / "consumequeue" / "t" / str(queue_id))
        with MessageStore.open_read_only(root) as reader:
            try:
                shown = [body for each in range(QUEUES) for body in bodies(reader, each)]
            except CorruptionError as error:
                assert "recover" in str(error)
            else:  # all that is missing lies above the clean end, and the log proves it
                assert (left, queue_id) == ("before a restart, after a batch", 0)
                assert set(shown) >= expected
    if left != "closed":
        return
    with MessageStore.open(root) as store:
        store.check_queues()  # as `messagestore recover`
        store.put_message(Message("t", b"more", queue_id=queue_id))
        assert {body for each in range(QUEUES) for body in bodies(store, each)} == {*expected, b"more"}


def test_a_topic_that_is_deleted_beside_a_reader_is_no_fault(tmp_path: Path) -> None:
    """Each deletion takes the files of queues that had seals a moment ago, which the reader may still know."""
    root = tmp_path / "s"
    done = threading.Event()

    def delete_again_and_again() -> None:
        with MessageStore.open(root, CONFIG.replace(clean_interval="0s", flush_disk_type=ASYNC_FLUSH)) as store:
            for number in range(40):
                for queue_id in range(QUEUES):
                    _put(store, queue_id, 1 + number % FILE_UNITS)
                store.delete_topic("t")
        done.set()

    with MessageStore.open(root, CONFIG) as store:
        _put(store, 0, COUNT)
    with MessageStore.open_read_only(root) as stays, concurrent.futures.ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(delete_again_and_again)
        while not done.is_set() and not deleting.done():
            with MessageStore.open_read_only(root) as new:
                for reader in (stays, new):
                    for queue_id in reader.topics().get("t", ()):
                        assert reader.max_offset("t", queue_id) <= COUNT + FILE_UNITS
        deleting.result()
