"""How far a consumer group has come: its rows in `config/consumerOffset.json`.

Threads: one. Processes: see `files.consumer_offsets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.disk import Disk

Queue = tuple[str, int]
_TIMEOUT_S = 30.0
"""How long a commit waits for those of others: many workers may commit at once on a slow disk."""


class GroupProgress:
    """The progress of one group.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    group : str
    """

    def __init__(self, disk: Disk, root: str, group: str) -> None:
        self.group = group
        self._disk, self._root = disk, root

    def committed(self, topics: Iterable[str]) -> dict[Queue, int]:
        """The next offset of each queue of some topics in which the group has one, read now.

        Raises
        ------
        CorruptionError
            The file cannot be read.
        ConfigError
            A broker keeps the offsets in RocksDB.
        """
        table = ConsumerOffsets(self._disk, self._root)
        table.load()
        return {
            (topic, queue_id): offset for topic in topics for queue_id, offset in table.get(topic, self.group).items()
        }

    def commit(self, offsets: Mapping[Queue, int]) -> None:
        """Write the next offsets of some queues; they are on the disk when this returns.

        Raises
        ------
        StoreLockedError
            A broker holds the store.
        CorruptionError, OSError
            As `publish_offsets`.
        """
        publish_offsets(self._root, self.group, offsets, self._disk, _TIMEOUT_S, durable=True)
