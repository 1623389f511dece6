"""`config/delayOffset.json`: how far the delayed messages of each level have been delivered.

The file is the broker's own (`ScheduleMessageService.java`). For each delay level, it holds the number of the next
message of queue `level - 1` in SCHEDULE_TOPIC_XXXX. A live broker reads it when it starts, and rewrites it from memory.

    "offsetTable":{1:250,3:17}

Threads: one. Processes: the caller holds the writer lock.
"""

from __future__ import annotations

from typing import Any

from messagestore.files.config_file import ConfigFile
from messagestore.files.mapped_file import Disk

_LARGEST_OFFSET = (1 << 63) - 1


class DelayOffsets:
    """`config/delayOffset.json` of one store.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        self._file = ConfigFile(
            disk,
            root,
            "delayOffset.json",
            "offsetTable",
            via="new-delay-offset.json",
            meaning="the broker's table of delivered messages",
            hint="Restore it from a copy. If you move it away instead, messages that a broker delivered come again.",
        )
        self.path = self._file.path

    def load(self) -> dict[int, int]:
        """Level -> number of the next message to deliver, from the file or its `.bak`.

        Raises
        ------
        CorruptionError
            There is a file, but none that can be read.
        """
        return self._file.load(_table)

    def save(self, offsets: dict[int, int]) -> None:
        """Write these levels; the other levels in the file stay."""
        found = self.load()
        if any(found.get(level) != offset for level, offset in offsets.items()):
            table: dict[Any, int] = found | offsets
            self._file.save(table)


def _table(fields: dict[str, Any]) -> dict[int, int]:
    found = {int(level): offset for level, offset in fields.items()}
    for offset in found.values():
        if type(offset) is not int or not 0 <= offset <= _LARGEST_OFFSET:
            raise ValueError(f"offset {offset!r}")
    return found
