"""The speed of single puts.

With ASYNC_FLUSH, the time ends when `put_message` returns, or when the last message is visible. With SYNC_FLUSH, one
thread puts, or 16 or 64 threads that share syncs, or one thread that keeps 64 or 1,000 puts in flight. For each put,
the floors handle a record of the same size: they copy it, write it, or write and sync it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from benchmarks.measure import Rounds, Settings, Taken, settle, timed, title
from benchmarks.messages import QUEUE_COUNT, TAGS, TOPIC
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, Message, MessageStore, PutMessageResult, StoreConfig
from messagestore.read.view import StoreView

_THREADS = (16, 64)
_IN_FLIGHT = (64, 1000)
_BODY = bytes(range(100))


def run(settings: Settings) -> None:
    """Measure figure 3."""
    asynchronous, synchronous = (5_000, 200) if settings.quick else (40_000, 1_000)
    title(f"single puts: {asynchronous:,} in ASYNC_FLUSH, {synchronous:,} in SYNC_FLUSH")

    rounds = Rounds()
    stores = {
        mode: MessageStore.open(settings.folder / mode, StoreConfig(flush_disk_type=mode))
        for mode in (ASYNC_FLUSH, SYNC_FLUSH)
    }
    size = stores[ASYNC_FLUSH].put_message(_messages(1)[0]).size

    for number in range(settings.rounds + 1):
        # The first round warms up and is not counted.
        into = rounds if number else Rounds()
        _floors(settings.folder, size, asynchronous, synchronous, into)
        for name, by_key in (("put.async", False), ("put.async.by_key", True)):
            _async(stores[ASYNC_FLUSH], asynchronous, into, name, by_key=by_key)

        settle(settings.folder)
        into.add_rate("put.sync.1_thread", synchronous, _sync(stores[SYNC_FLUSH], synchronous, 1))
        for threads in _THREADS:
            count = 4 * synchronous // threads * threads
            into.add_rate(f"put.sync.{threads}_threads", count, _sync(stores[SYNC_FLUSH], count, threads))
        for in_flight in _IN_FLIGHT:
            into.add_rate(
                f"put.sync.{in_flight}_in_flight",
                8 * synchronous,
                put_in_flight(stores[SYNC_FLUSH], _messages(8 * synchronous), in_flight),
            )

    for store in stores.values():
        store.close()

    for kind in ("memcpy", "pwrite", "fdatasync"):
        rounds.report(f"put.floor.{kind}", "messages/s")
    for name in ("put.async", "put.async.by_key"):
        rounds.report(name, "messages/s", floor="put.floor.pwrite", goal=40_000)
        rounds.report(f"{name}.until_visible", "messages/s", floor="put.floor.pwrite")
    rounds.report("put.sync.1_thread", "messages/s", floor="put.floor.fdatasync")
    for threads in _THREADS:
        rounds.report(f"put.sync.{threads}_threads", "messages/s", floor="put.floor.fdatasync")
    for in_flight in _IN_FLIGHT:
        rounds.report(f"put.sync.{in_flight}_in_flight", "messages/s", floor="put.floor.fdatasync")


def _messages(count: int, *, by_key: bool = False) -> list[Message]:
    return [
        Message(
            TOPIC,
            _BODY,
            keys=[f"ord-{number * 7919 % 1_000_000}"],
            tags=TAGS[number % len(TAGS)],
            queue_id=None if by_key else number % QUEUE_COUNT,
        )
        for number in range(count)
    ]


def _async(store: MessageStore, count: int, into: Rounds, name: str, *, by_key: bool) -> None:
    messages = _messages(count, by_key=by_key)
    end = store.writer.end.physical_offset

    def put_all() -> None:
        nonlocal end
        for message in messages:
            result = store.put_message(message)
        end = result.physical_offset + result.size

    put, _ = timed(put_all)
    shown, _ = timed(_wait_visible, store, end)
    into.add_rate(name, count, put)
    into.add_rate(f"{name}.until_visible", count, put + shown)


def _wait_visible(store: MessageStore, end: int) -> None:
    view = StoreView(store.writer.files.paths.root)
    while (view.refresh().end or 0) < end:
        pass
    view.close()


def _sync(store: MessageStore, count: int, thread_count: int) -> Taken:
    shares = [_messages(count // thread_count) for _ in range(thread_count)]

    def put_all(messages: list[Message]) -> None:
        for message in messages:
            store.put_message(message)

    threads = [threading.Thread(target=put_all, args=(share,)) for share in shares]

    def run_all() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(run_all)[0]


def put_in_flight(store: MessageStore, messages: Iterable[Message], in_flight: int) -> Taken:
    """One thread puts without waiting, and lets at most so many puts be in flight."""

    def put_all() -> None:
        waiting: deque[Future[PutMessageResult]] = deque()
        for message in messages:
            if len(waiting) == in_flight:
                waiting.popleft().result()
            waiting.append(store.put_message_async(message))
        for future in waiting:
            future.result()

    return timed(put_all)[0]


def _floors(folder: Path, size: int, asynchronous: int, synchronous: int, into: Rounds) -> None:
    record, target = bytes(size), bytearray(size)
    fd = os.open(folder / "floor", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 1 << 30)

    def copy() -> None:
        for _ in range(asynchronous):
            target[:] = record

    def write() -> None:
        for number in range(asynchronous):
            os.pwrite(fd, record, number * size)

    def sync() -> None:
        for number in range(synchronous):
            os.pwrite(fd, record, number * size)
            os.fdatasync(fd)

    try:
        into.add_rate("put.floor.memcpy", asynchronous, timed(copy)[0])
        into.add_rate("put.floor.pwrite", asynchronous, timed(write)[0])
        settle(folder)
        into.add_rate("put.floor.fdatasync", synchronous, timed(sync)[0])
    finally:
        os.close(fd)
        (folder / "floor").unlink()
