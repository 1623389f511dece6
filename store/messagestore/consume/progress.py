"""How far a consumer group has come: its rows in `config/consumerOffset.json`, and what batches of the log add to them.

Threads: one. Processes: see `files.consumer_offsets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from messagestore.files.consumer_offsets import publish_offsets
from messagestore.read.group_offsets import add_progress, group_offsets
from messagestore.read.view import StoreView

Queue = tuple[str, int]
_TIMEOUT_S = 30.0
"""How long a commit waits for those of others: many workers may commit at once on a slow disk."""


class GroupProgress:
    """The progress of one group.

    Parameters
    ----------
    view : StoreView
        The store.
    group : str
    """

    def __init__(self, view: StoreView, group: str) -> None:
        self.group = group
        self._view = view

    def committed(self, topics: Iterable[str]) -> dict[Queue, int]:
        """The next offset of each queue of some topics in which the group has one, read now.

        Raises
        ------
        CorruptionError
            The file cannot be read.
        ConfigError
            A broker keeps the offsets in RocksDB.
        """
        table = group_offsets(self._view)
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
        files = self._view.files
        publish_offsets(
            files.paths.root,
            self.group,
            offsets,
            files.disk,
            _TIMEOUT_S,
            durable=True,
            pending=lambda table: add_progress(self._view, table),
        )
