"""A store at one moment, as files that only grow.

The log up to a physical offset, and of each queue the units of the messages below it, are the same bytes whenever they
are read, so a copy of them needs no lock and no pause of the writer. What a file has at one moment is a prefix of what
it has later.

    read first      config/, the journal          offsets of groups and batches below the end
    then            the end: V, or what the queues show
    then            topics, consumer groups and the identity, so that they know all that is below the end
    while copying   log and units below the end; retention may take the oldest segments away
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np

from messagestore.errors import ConfigError, CorruptionError
from messagestore.files.consume_queue import CONSUME_QUEUE_FOLDER, UNIT_DTYPE, unit_bytes
from messagestore.files.disk import Disk
from messagestore.files.numbered_files import file_name
from messagestore.format.config import StoreConfig
from messagestore.format.layout import FILLER_UNIT_SIZE, UNIT
from messagestore.log.store_files import Identity, Paths
from messagestore.read.view import StoreView
from messagestore.signal_handlers import pass_on

LOG_FOLDER = "commitlog"
JOURNAL, BROKER_NAME, SETTINGS = "spark/journal", "spark/broker.json", "spark/settings.json"
_MOST_SMALL_SIZE = 256 << 20
_READ_AFTER = ("topics.json", "subscriptionGroup.json", "consumerFilter.json")
"""What must know every topic and group below the end; offsets of readers must not lie behind it."""
_TRIES = 5
_UNITS_AT_ONCE = 65_536


class Snapshot:
    """What a store holds at one moment.

    Parameters
    ----------
    root : str
    disk : Disk

    Attributes
    ----------
    begin, end : int
        Physical offsets of the log. `begin` moves up if retention deletes segments.
    queues : dict of (str, int) to (int, int)
        The number of the first message whose unit is there, and the queue's end.
    small : dict of str to bytes
        The files of `config/`, the journal, the broker's name and the stored settings, by their paths below the root.
    identity : Identity | None
        None: a broker's store.

    Raises
    ------
    NotAStoreError
        There is no store, or its queues are in RocksDB.
    ConfigError
        Its queues are batch queues.
    CorruptionError
        It cannot be read.
    """

    def __init__(self, root: str, disk: Disk) -> None:
        self._disk, self._paths = disk, Paths(root)
        for left in reversed(range(_TRIES)):
            self.small = dict(self._small_files())
            self.view = StoreView(root, StoreConfig(message_index_enable=False), disk)
            try:
                self._look()
                return
            except CorruptionError:  # a writer has opened a store that was closed
                self.view.close()
                if not left:
                    raise
            except BaseException:
                self.view.close()
                raise

    def _look(self) -> None:
        view = self.view
        if view.files.find_batch_queues():
            raise ConfigError(
                f"{self._paths.root}: the store has batch queues (queue.type=BatchCQ), which cannot be written here, "
                "so they cannot be restored. Copy the folder while its broker is stopped",
                key="ROOT",
                value=self._paths.root,
            )
        view.files.commit_log.load()
        keys = [(topic, queue_id) for topic, ids in sorted(view.topics().items()) for queue_id in ids]
        known_end = view.known_end
        self.end = known_end if known_end is not None else max((self._end_of(*key) for key in keys), default=0)
        self.begin = view.files.commit_log.min_offset
        self.end = max(self.end, self.begin)
        self.queues = {key: self._range(*key) for key in keys}
        self.small |= dict(self._small_files(only=_READ_AFTER))
        self.identity = Identity.read(self._disk, self._paths.identity)

    def _end_of(self, topic: str, queue_id: int) -> int:
        """Where the record of a queue's last message ends."""
        end = self.view.max_offset(topic, queue_id)
        units = self.view.units(topic, queue_id, max(0, end - 1), end)
        if not len(units) or int(units["size"][-1]) == FILLER_UNIT_SIZE:
            return 0
        return int(units["physical_offset"][-1]) + int(units["size"][-1])

    def _range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The messages of a queue that are below the end; its last one stays if retention has taken all."""
        end = min(self.view.max_offset(topic, queue_id), self.view.search_physical(topic, queue_id, self.end))
        return max(0, min(self.view.min_offset(topic, queue_id), end - 1)), end

    def _small_files(self, only: tuple[str, ...] | None = None) -> Iterator[tuple[str, bytes]]:
        for name, is_folder in self._disk.entries(self._paths.config):
            if not is_folder and (name in only if only is not None else not name.endswith(".tmp")):
                yield from self._small_file(f"config/{name}")
        if only is None:
            for path in (JOURNAL, BROKER_NAME, SETTINGS):
                yield from self._small_file(path)

    def _small_file(self, path: str) -> Iterator[tuple[str, bytes]]:
        try:
            yield path, self._disk.read(os.path.join(self._paths.root, path), _MOST_SMALL_SIZE)
        except FileNotFoundError as error:
            pass_on(error)
            return  # a broker replaces its files in two steps, and leaves a .bak, which is read, too

    # ---- as files

    @property
    def store_id(self) -> str:
        """The id of the store; empty for a broker's."""
        return self.view.store_id

    @property
    def segment_size(self) -> int:
        """The size of a segment in bytes."""
        return self.view.files.commit_log.file_size

    def queue_file_size(self, topic: str, queue_id: int) -> int:
        """The size of a queue's files in bytes."""
        return self.view.files.queue(topic, queue_id).file_size

    def log_files(self) -> list[tuple[int, str, int]]:
        """First offset, path and size of each segment, the oldest first, as far as it lies below the end."""
        size = self.segment_size
        starts = range(self.begin, self.end, size) if size else ()
        return [(start, f"{LOG_FOLDER}/{file_name(start)}", min(size, self.end - start)) for start in starts]

    def queue_files(self, topic: str, queue_id: int) -> list[tuple[int, str, int]]:
        """The same of a queue: offsets are those of the queue, in bytes."""
        first, end = self.queues[topic, queue_id]
        size, end_bytes = self.queue_file_size(topic, queue_id), end * UNIT.size
        if not end:
            return []
        starts = range(first * UNIT.size // size * size, end_bytes, size)
        folder = f"{CONSUME_QUEUE_FOLDER}/{topic}/{queue_id}"
        return [(start, f"{folder}/{file_name(start)}", min(size, end_bytes - start)) for start in starts]

    def log_bytes(self, offset: int, size: int) -> bytes:
        """Bytes of the log, which may be fewer at the end of a segment.

        Raises
        ------
        FileNotFoundError
            Retention has deleted the segment.
        """
        log = self.view.files.commit_log
        data = log.pread(offset, size)
        if not data and offset < log.min_offset:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self._paths.commit_log}: {offset}")
        return data

    def unit_bytes(self, topic: str, queue_id: int, first: int, end: int) -> bytes:
        """Units of a queue as they lie in a file. Those that are not there any more are fillers."""
        parts = []
        while first < end:
            units = self.view.units(topic, queue_id, first, min(end, first + _UNITS_AT_ONCE))
            if not len(units):
                units = np.zeros(min(end - first, _UNITS_AT_ONCE), UNIT_DTYPE)
                units["size"] = FILLER_UNIT_SIZE
            parts.append(unit_bytes(units))
            first += len(units)
        return b"".join(parts)

    def check_place(self) -> None:
        """Raise an error if another folder has taken the store's place."""
        self.view.check_place()

    def close(self) -> None:
        """Close all files."""
        self.view.close()
