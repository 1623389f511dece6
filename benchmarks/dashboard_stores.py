"""The stores that the dashboard is measured with, and processes that write to them.

    python -m benchmarks.dashboard_stores ROOT RATE    puts in batches until its input ends, and then prints how many

RATE is batches a second, and 0 is as many as there can be.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from messagestore import ASYNC_FLUSH, BatchRequest, Message, MessageBatch, MessageColumns, MessageStore, StoreConfig
from messagestore.files.consumer_offsets import publish_offsets

_BODY_SIZE = 4096
_PUT_COUNT, _PUT_SIZE = 100, 200
_PART = 20_000


def _rows(count: int, body_size: int, queue_count: int, keys_from: int) -> pa.RecordBatch:
    """Messages with a body of JSON and a key each."""
    filler = "x" * max(0, body_size - 60)
    numbers = np.arange(keys_from, keys_from + count)
    bodies = [f'{{"number": {number}, "price": {number % 997}, "note": "{filler}"}}' for number in numbers.tolist()]
    return pa.record_batch(
        {
            "body": pa.array(bodies, pa.string()).cast(pa.binary()),
            "keys": pa.array([f"order-{number}" for number in numbers.tolist()]),
            "tags": pa.array(["created", "paid"] * (count // 2) + ["created"] * (count % 2)),
            "queue_id": pa.array((np.arange(count) % queue_count).astype(np.int32)),
        }
    )


def large(root: Path, size: int, topic_count: int = 100, queue_count: int = 8) -> None:
    """A store of so many bytes, in topics `t-0`, `t-1` and so on, with three groups each."""
    count = max(queue_count, size // (_BODY_SIZE + 200) // topic_count)
    with MessageStore.open(root, StoreConfig(flush_disk_type=ASYNC_FLUSH)) as store:
        for version, start in enumerate(range(0, count, _PART // topic_count)):
            part = min(_PART // topic_count, count - start)
            parts = (
                MessageColumns.from_arrow(_rows(part, _BODY_SIZE, queue_count, start), topic=f"t-{number}")
                for number in range(topic_count)
            )
            store.append_batch(parts, BatchRequest("bench", version, write_queue_nums=queue_count))
    for group in ("a", "b", "c"):
        _groups(root, group, {(f"t-{number}", 0): 1 for number in range(topic_count)})


def many_queues(root: Path, count: int, topic_count: int = 10) -> None:
    """Two messages in each of so many queues, in topics `t-0`, `t-1` and so on, and a group that has read them."""
    each = count // topic_count
    with MessageStore.open(root, StoreConfig(flush_disk_type=ASYNC_FLUSH)) as store:
        parts = (
            MessageColumns.from_arrow(_rows(2 * each, 100, each, number * 2 * each), topic=f"t-{number}")
            for number in range(topic_count)
        )
        store.append_batch(parts, BatchRequest("bench", 0, write_queue_nums=each))
    _groups(root, "all", {(f"t-{number}", queue): 1 for number in range(topic_count) for queue in range(each)})


def many_groups(root: Path, topic_count: int, group_count: int) -> None:
    """Topics `t-0`, `t-1` and so on, each read by so many groups."""
    with MessageStore.open(root, StoreConfig(flush_disk_type=ASYNC_FLUSH)) as store:
        parts = (
            MessageColumns.from_arrow(_rows(8, 100, 4, number * 8), topic=f"t-{number}")
            for number in range(topic_count)
        )
        store.append_batch(parts, BatchRequest("bench", 0, write_queue_nums=4))
    for group in range(group_count):
        places = {(f"t-{number}", queue): 1 for number in range(topic_count) for queue in range(4)}
        _groups(root, f"group-{group}", places)


def _groups(root: Path, group: str, places: dict[tuple[str, int], int]) -> None:
    publish_offsets(str(root), group, places, own=True)


class Writer:
    """A process that writes to a store. The count of its messages is known at the end.

    Parameters
    ----------
    root : Path
    rate : int
        Batches of `_PUT_COUNT` messages a second; 0: as many as there can be.
    """

    def __init__(self, root: Path, rate: int = 0) -> None:
        command = [sys.executable, "-m", "benchmarks.dashboard_stores", str(root), str(rate)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def end(self) -> float:
        """End the process; the messages that it put in a second."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise AssertionError(f"the writer ended with {self._process.returncode}")
        return float(out)


@contextlib.contextmanager
def writing(root: Path, rate: int) -> Iterator[None]:
    """A writer at work in the meantime."""
    writer = Writer(root, rate)
    try:
        yield
    finally:
        writer.end()


def main() -> None:
    root, rate = sys.argv[1], int(sys.argv[2])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    body, count = b'{"price": 1, "note": "' + b"x" * (_PUT_SIZE - 30) + b'"}', 0
    with MessageStore.open(root, StoreConfig(flush_disk_type=ASYNC_FLUSH)) as store:
        batch = MessageBatch.from_messages([Message("t-0", body, queue_id=0, keys=("k",))] * _PUT_COUNT)
        print("ready", flush=True)
        begin = time.perf_counter()
        while not ended.is_set():
            store.put_messages(batch)
            count += _PUT_COUNT
            if rate:
                ended.wait(1 / rate)
        print(count / (time.perf_counter() - begin))


if __name__ == "__main__":
    main()
