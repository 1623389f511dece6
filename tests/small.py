"""Small stores for tests: segments of 16 KiB, queue files of 16 units, index files of 199 entries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from messagestore import Message, MessageColumns, MessageStore, StoreConfig
from messagestore.files.disk import Disk
from messagestore.format.config import ASYNC_FLUSH

SMALL = StoreConfig(
    mapped_file_size_commit_log=16 * 1024,
    mapped_file_size_consume_queue=20 * 16,
    max_hash_slot_num=64,
    max_index_num=200,
    max_message_size=8 * 1024,
    lock_timeout="1s",
    delete_commit_log_files_interval=0,
    delete_consume_queue_files_interval=0,
)
SMALL_ASYNC = SMALL.replace(flush_disk_type=ASYNC_FLUSH)
SMALL_POOL = SMALL_ASYNC.replace(
    transient_store_pool_enable=True,
    transient_store_pool_size=3,
    commit_interval_commit_log=3_600_000,
    commit_commit_log_thorough_interval=3_600_000,
)
"""A session with a TransientStorePool, which nothing commits by itself."""


class ClockDisk(Disk):
    """The disk of a machine whose clock shows what the test wants."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms
        self.uptime_ms = 0

    @property
    def now_ms(self) -> int:
        """What the clock shows. If that goes on, so much time passes; if it goes back, none."""
        return self._now_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        self.uptime_ms += max(0, now_ms - self._now_ms)
        self._now_ms = now_ms

    def jump(self, ms: int) -> None:
        """Set the clock without any time passing."""
        self._now_ms += ms

    def time_ns(self) -> int:
        return self.now_ms * 1_000_000

    def uptime_ns(self) -> int:
        return self.uptime_ms * 1_000_000


def columns(
    bodies: list[bytes], *, topic: str = "t", queues: int = 2, key: str = "k", queue_ids: list[int] | None = None
) -> MessageColumns:
    """One message per body, spread over queues, with a key and a tag each."""
    count = len(bodies)
    ids = queue_ids if queue_ids is not None else [i % queues for i in range(count)]
    table = pa.record_batch(
        {
            "body": pa.array(bodies, pa.binary()),
            "queue_id": pa.array(np.array(ids, np.int32)),
            "keys": pa.array([f"{key}{i}" for i in range(count)]),
            "tags": pa.array(["tag"] * count),
        }
    )
    return MessageColumns.from_arrow(table, topic=topic)


def bodies(count: int, size: int = 50, start: int = 0) -> list[bytes]:
    """Distinct bodies of about `size` bytes."""
    return [f"{i:06d}".encode() + b"." * (size - 6) for i in range(start, start + count)]


def delayed(levels: list[int | None], topic: str = "t", **more: object) -> MessageColumns:
    """Rows with delay levels, spread over two queues."""
    count = len(levels)
    rows = {
        "body": pa.array(bodies(count), pa.binary()),
        "queue_id": pa.array(np.arange(count, dtype=np.int32) % 2),
        "keys": pa.array([f"k{i}" for i in range(count)]),
        "tags": ["tag"] * count,
        "delay_time_level": pa.array(levels, pa.int32()),
        **more,
    }
    return MessageColumns.from_arrow(pa.record_batch(rows), topic=topic)


def filled(root: Path, count: int = 10, config: StoreConfig = SMALL, disk: Disk | None = None) -> Path:
    """A closed store with `count` single puts in topic t, queues 0 and 1."""
    with MessageStore.open(root, config, disk=disk) as store:
        for i, body in enumerate(bodies(count)):
            store.put_message(Message("t", body, queue_id=i % 2, keys=[f"k{i}"], tags="tag"))
    return root


def stop_periodic(store: MessageStore) -> None:
    """End the threads of retention and delivery: the test does their work when it wants to."""
    services = store._attached.services
    assert services is not None
    for service in services.periodic:
        service.stop()


def read_all(store: MessageStore, topic: str = "t", queue_id: int = 0) -> list[bytes]:
    """Bodies of a queue."""
    found: list[bytes] = []
    for batch in store.read(topic, queue_id, 0, columns=("body",)):
        found += batch.column("body").to_pylist()
    return found
