"""Tests a batch for thousands of queues, which may take two syncs, few descriptors and little memory per queue."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from crash.judge import Verdict
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig
from messagestore.files.mapped_file import Disk, File

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 24,
    mapped_file_size_consume_queue=20 * 50,
    clean_interval="1h",
    attach_timeout="1h",
)


class CountingDisk(Disk):
    """Counts the syncs of the log."""

    def __init__(self) -> None:
        self.syncs = 0

    def fdatasync(self, file: File) -> None:
        self.syncs += "/commitlog/" in file.path
        super().fdatasync(file)


def one_batch(folder: Path, queue_count: int) -> Verdict:
    """Write a message for each queue, twice; then read all of them with no more descriptors than the pools may hold."""
    verdict, root, disk = Verdict(), folder / "queues", CountingDisk()
    bodies = [b"body of queue %d" % queue_id for queue_id in range(queue_count)]
    table = pa.record_batch({"body": pa.array(bodies), "queue_id": pa.array(range(queue_count), pa.int32())})
    columns = MessageColumns.from_arrow(table, topic="many")
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        store.create_topic("many", queue_count)
        for version in range(2):
            disk.syncs = 0
            store.append_batch(columns, BatchRequest(app_id="app", version=version))
            if disk.syncs != 2:
                verdict.misread.append(f"{disk.syncs} syncs for a batch")
    before = len(os.listdir("/proc/self/fd"))
    queues = [("many", queue_id) for queue_id in range(queue_count)]
    with MessageStore.open_read_only(root, CONFIG) as reader:
        ends = set(reader.view.max_offsets(queues).values())
        if ends != {2}:
            verdict.lost.append(f"queues end at {ends}")
        for queue_id in range(0, queue_count, 17):
            found = [message.body for message in reader.get_message("many", queue_id, 0).messages]
            if found != [bodies[queue_id]] * 2:
                verdict.misread.append(f"queue {queue_id} holds {found}")
        files = reader.view.files
        used, allowed = len(os.listdir("/proc/self/fd")) - before, files.pool.limit + files.log_pool.limit
        if used > allowed + 8:
            verdict.misread.append(f"{used} descriptors; allowed are {allowed}")
    return verdict
