"""`spark/consumers.lock`: which worker of a consumer group has which queue.

The file is empty; its bytes are only locked. A worker holds one byte for each topic, which says that it is there, and
one for each queue that it reads. All groups and topics share the file: the hash of both says where their bytes are.

    hash(group, topic) * 2**20   + slot             a worker that reads the topic
                                 + 2**19 + queue id   the worker that reads the queue

The locks belong to the open file description, so consumers of one process have locks of their own, and the kernel takes
them away when a worker ends, however it ends. A stopped worker (SIGSTOP) keeps them. In a forked child the file is
closed, as `LockFile` does.

Threads: one. Processes: any number.
"""

from __future__ import annotations

import errno
import fcntl
import os

from messagestore.errors import StoreFullError
from messagestore.files.disk import Disk, File
from messagestore.files.writer_lock import LockFile
from messagestore.format.xxh3 import xxh3

_TOPIC_SIZE = 1 << 20
_QUEUES_AT = 1 << 19
_HASHES = 1 << 42
"""So that the last byte lies below 2**62."""
MAX_WORKERS = 1 << 16


class GroupLocks(LockFile):
    """The locks of one worker.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    group : str
    """

    def __init__(self, disk: Disk, root: str, group: str) -> None:
        folder = os.path.join(root, "spark")
        if not disk.is_folder(folder):
            disk.mkdir(folder)
        super().__init__(os.path.join(folder, "consumers.lock"))
        self._group = group
        self._slots: dict[str, int] = {}
        self.held: set[tuple[str, int]] = set()

    def _open(self) -> File:
        try:
            return super()._open()
        except OSError as error:
            if error.errno == errno.EROFS:
                error.add_note(
                    f"{self.path}: workers of a consumer group lock this file, and its file system is mounted "
                    "read-only. Mount it writable, or read without a group (`MessageStore.open_read_only`)"
                )
            raise

    def _base(self, topic: str) -> int:
        return xxh3(f"{self._group}\0{topic}".encode()) % _HASHES * _TOPIC_SIZE

    def place(self, topic: str) -> tuple[int, int]:
        """The number of this worker among those that read a topic, from 0, and how many there are. It joins them first.

        Raises
        ------
        StoreFullError
            The topic has as many workers as there can be.
        """
        base = self._base(topic)
        if topic not in self._slots:
            for slot in range(MAX_WORKERS):
                if self._set(fcntl.F_WRLCK, base + slot):
                    self._slots[topic] = slot
                    break
            else:
                raise StoreFullError(
                    f"{self.path}: found {MAX_WORKERS} workers of group {self._group!r} that read {topic!r}; no more "
                    f"are allowed",
                    path=self.path,
                    needed=1,
                    free=0,
                )

        own = base + self._slots[topic]
        others = self._locked_by_others(base, MAX_WORKERS)
        return sum(other < own for other in others), len(others) + 1

    def shift(self, topic: str) -> int:
        """A number by which the workers take turns in having one queue more than others, by topic."""
        return self._base(topic) // _TOPIC_SIZE

    def claim(self, topic: str, queue_id: int) -> bool:
        """Take a queue unless another worker has it; whether it was taken."""
        if (topic, queue_id) not in self.held and self._set(fcntl.F_WRLCK, self._base(topic) + _QUEUES_AT + queue_id):
            self.held.add((topic, queue_id))
        return (topic, queue_id) in self.held

    def release(self, topic: str, queue_id: int) -> None:
        """Let another worker take a queue."""
        self._set(fcntl.F_UNLCK, self._base(topic) + _QUEUES_AT + queue_id)
        self.held.discard((topic, queue_id))

    def intact(self) -> bool:
        """Whether the file at the path is still the one that is locked: somebody may have removed it."""
        return self._file is None or self._at_path()

    def close(self) -> None:
        """Leave the group; a new call of `place` joins it again."""
        if self._file is not None:
            try:
                # Closing alone leaves the locks to a child that forked without our hook.
                for topic, slot in self._slots.items():
                    self._set(fcntl.F_UNLCK, self._base(topic) + slot)
                for topic, queue_id in list(self.held):
                    self.release(topic, queue_id)
            finally:
                self._slots.clear()
                self.held.clear()
                self._close()
