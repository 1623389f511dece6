"""Tests a batch for thousands of queues: it may take two syncs, one write for each queue, few descriptors and little
memory per queue. A file that somebody deletes while the others are written is noticed, although it is closed by then.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from crash.judge import Verdict
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig
from messagestore.files.consume_queue import queue_directory
from messagestore.files.disk import Disk, File
from messagestore.files.numbered_files import file_name

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 24,
    mapped_file_size_consume_queue=20 * 50,
    clean_interval="1h",
    attach_timeout="1h",
)


class CountingDisk(Disk):
    """Counts the syncs of the log and the writes to queues, and deletes a file with the write to another one."""

    def __init__(self) -> None:
        self.syncs = self.writes = 0
        self.deletes: dict[str, str] = {}
        """Files that are deleted once, each by the folder of the queue with whose write it goes."""

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        super().pwrite(file, data, position)
        self.writes += "/consumequeue/" in file.path
        gone = self.deletes.pop(os.path.dirname(file.path), None)
        if gone is not None:
            os.unlink(gone)

    def fdatasync(self, file: File) -> None:
        self.syncs += "/commitlog/" in file.path
        super().fdatasync(file)


def one_batch(folder: Path, queue_count: int) -> Verdict:
    """Write two batches with two messages for each queue, each in two parts; the file of the first queue is deleted
    while the second batch is dispatched. Then read all of them with no more descriptors than the pools may hold.
    """
    verdict, root, disk = Verdict(), folder / "queues", CountingDisk()
    bodies = [b"body of queue %d" % queue_id for queue_id in range(queue_count)]
    table = pa.record_batch({"body": pa.array(bodies), "queue_id": pa.array(range(queue_count), pa.int32())})
    columns = MessageColumns.from_arrow(table, topic="many")
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        store.create_topic("many", queue_count)
        folders = [queue_directory(str(root), "many", queue_id) for queue_id in (0, queue_count - 1)]
        for version in range(2):
            disk.syncs = disk.writes = 0
            if version:
                disk.deletes[folders[1]] = os.path.join(folders[0], file_name(0))
            store.append_batch(iter([columns, columns]), BatchRequest(app_id="app", version=version))
            if disk.syncs != 2:
                verdict.misread.append(f"{disk.syncs} syncs for a batch")
            if not version and disk.writes:  # a new file gets its first units before its name, and then none
                verdict.misread.append(f"{disk.writes} writes to queues for a batch")
        if disk.deletes:
            verdict.misread.append("no file was deleted")
    before = len(os.listdir("/proc/self/fd"))
    queues = [("many", queue_id) for queue_id in range(queue_count)]
    with MessageStore.open_read_only(root, CONFIG) as reader:
        ends = set(reader.view.max_offsets(queues).values())
        if ends != {4}:
            verdict.lost.append(f"queues end at {ends}")
        for queue_id in range(0, queue_count, 17):
            found = [message.body for message in reader.get_message("many", queue_id, 0).messages]
            if found != [bodies[queue_id]] * 4:
                verdict.misread.append(f"queue {queue_id} holds {found}")
        files = reader.view.files
        used, allowed = len(os.listdir("/proc/self/fd")) - before, files.pool.limit + files.log_pool.limit
        if used > allowed + 8:
            verdict.misread.append(f"{used} descriptors; allowed are {allowed}")
    return verdict
