"""A broker's batch queues (topics with queue.type=BatchCQ), for reading.

A unit has 46 bytes and stands for one record with one or more messages. Its place in the files says nothing about the
numbers of its messages: each unit contains the number of its first message, and how many there are.

    +-----------------+-----------------+-- ... --+
    | base 0, count 3 | base 3, count 1 |         |        in memory: four units, the first three of one record
    +-----------------+-----------------+-- ... --+

In memory, this class gives one unit for each message, as other queues do: the messages of a record have the same
physical offset, size and tags code. This project does not write such queues. Source: RocketMQ
`queue/BatchConsumeQueue.java`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messagestore.files.consume_queue import UNIT_DTYPE, ConsumeQueue, Units, is_queue_id
from messagestore.files.disk import Disk
from messagestore.format.layout import BATCH_UNIT

BATCH_QUEUE_FOLDER = "batchconsumequeue"
_DTYPE: np.dtype[Any] = BATCH_UNIT.dtype.newbyteorder("=")
_PROBE_COUNT = 64
_NO_END = 1 << 62


class BatchConsumeQueue(ConsumeQueue):
    """The messages of one batch queue. Offsets are in messages, as in `ConsumeQueue`; nothing can be written."""

    def load(self) -> None:
        """Read the folder again, and reopen the files that were open.

        Raises
        ------
        CorruptionError
            RocketMQ would refuse a file, or its size is not a multiple of a unit's size.
        """
        self._load_files(BATCH_UNIT.size)

    @property
    def first_file_queue_offset(self) -> int:
        """The number of the first message in the first file; 0 without messages."""
        units = self._raw(self._low, 1)
        return int(units["base"][0]) if _valid(units).all() and len(units) else 0

    @property
    def end_file_queue_offset(self) -> int:
        """The number after the last message, if the last file is full; otherwise a number that no queue reaches."""
        if not self.offsets:
            return 0
        last = self._raw(self._high - 1, 1)
        return _end_of(last) if len(last) and _valid(last)[0] else _NO_END

    def number_in_record(self, queue_offset: int) -> int:
        """The queue offset in the record of a message: that of the record's first message."""
        units = self._raw(self._unit_of(queue_offset), 1)
        return int(units["base"][0]) if len(units) else queue_offset

    def read(self, queue_offset: int, count: int) -> Units:
        """Read one unit for each message from `queue_offset` on; fewer than `count` at the end of the queue."""
        if count <= 0 or not self.offsets:
            return np.empty(0, UNIT_DTYPE)
        at = self._unit_of(queue_offset)

        parts: list[NDArray[np.void]] = []
        end = queue_offset
        while end < queue_offset + count:
            units = self._raw(at, min(count, 4096))
            valid = _valid(units)
            units = units if valid.all() else units[: int(valid.argmin())]
            if not len(units):
                break
            parts.append(units)
            end, at = _end_of(units), at + len(units)

        if not parts or int(parts[0]["base"][0]) > queue_offset:
            return np.empty(0, UNIT_DTYPE)

        units = np.concatenate(parts)
        counts = units["count"].astype(np.int64)
        message_units: Units = np.empty(int(counts.sum()), UNIT_DTYPE)
        for name in UNIT_DTYPE.names or ():
            message_units[name] = np.repeat(units[name], counts)
        skipped = queue_offset - int(units["base"][0])
        return message_units[skipped : skipped + count]

    def place(self, queue_offset: int) -> tuple[str, int]:
        """Return the file and the position of a message's unit; the folder if no file holds it."""
        at = self._unit_of(queue_offset) * BATCH_UNIT.size
        start = self.holding(at)
        return (self.directory, at) if start is None else (self.path(start), at - start)

    def end(self, hint: int = 0, limit: int | None = None) -> int:  # noqa: ARG002 # files say where to look
        """Return the queue offset of the next message.

        Parameters
        ----------
        hint : int
            Not used.
        limit : int | None
            A physical offset. Messages whose record ends above it count as missing.
        """

        def exists(units: NDArray[np.void]) -> NDArray[np.bool_]:
            return _valid(units) & (
                units["physical_offset"] <= (_NO_END if limit is None else limit) - units["size"].astype(np.int64)
            )

        end = self._first_unit_without(exists)
        return _end_of(self._raw(end - 1, 1)) if end > self._low else self.first_file_queue_offset

    def search_physical(self, physical_offset: int, hint: int = 0) -> int:  # noqa: ARG002 # as in `end`
        """Return the queue offset of the first message at `physical_offset` or above, or `end()`."""
        at = self._first_unit_without(lambda units: _valid(units) & (units["physical_offset"] < physical_offset))
        units = self._raw(at, 1)
        return int(units["base"][0]) if len(units) and _valid(units)[0] else self.end()

    # ---- units as they lie in the files

    @property
    def _low(self) -> int:
        return self.min_offset // BATCH_UNIT.size

    @property
    def _high(self) -> int:
        return self.max_offset // BATCH_UNIT.size

    def _unit_of(self, queue_offset: int) -> int:
        """The unit that has a message, or would have it."""
        at = self._first_unit_without(lambda units: _valid(units) & (units["base"] + units["count"] <= queue_offset))
        return min(at, max(self._low, self._high - 1))

    def _raw(self, at: int, count: int) -> NDArray[np.void]:
        """Units from the `at`-th one on, up to the end of their file."""
        data = self.pread(at * BATCH_UNIT.size, count * BATCH_UNIT.size) if at >= 0 else b""
        return np.frombuffer(data[: len(data) // BATCH_UNIT.size * BATCH_UNIT.size], BATCH_UNIT.dtype).astype(_DTYPE)

    def _first_unit_without(self, holds: Callable[[NDArray[np.void]], NDArray[np.bool_]]) -> int:
        """The first unit that does not meet a condition that a prefix of the units meets."""
        low, high = self._low, self._high
        while high - low > _PROBE_COUNT:
            middle = (low + high) // 2
            units = self._raw(middle, 1)
            if len(units) and holds(units)[0]:
                low = middle + 1
            else:
                high = middle

        while low < high:
            units = self._raw(low, high - low)
            flags = holds(units)
            if not len(flags) or not flags.all():
                return low + (int(flags.argmin()) if len(flags) else 0)
            low += len(flags)
        return low


def _valid(units: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which units RocketMQ regards as written."""
    valid: NDArray[np.bool_] = (units["physical_offset"] >= 0) & (units["size"] > 0)
    valid &= (units["base"] >= 0) & (units["count"] > 0)
    return valid


def _end_of(units: NDArray[np.void]) -> int:
    return int(units["base"][-1]) + int(units["count"][-1])


def batch_queues(disk: Disk, root: str) -> dict[str, list[int]]:
    """Return the batch queues that have a folder: queue ids, ascending, by topic."""
    ids_by_topic = {}
    top = os.path.join(root, BATCH_QUEUE_FOLDER)
    for topic, is_folder in disk.entries(top):
        children = disk.entries(os.path.join(top, topic)) if is_folder else []
        ids = sorted(int(name) for name, is_queue in children if is_queue and is_queue_id(name))
        if ids:
            ids_by_topic[topic] = ids
    return ids_by_topic
