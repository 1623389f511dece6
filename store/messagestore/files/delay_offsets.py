"""`config/delayOffset.json`: how far the delayed messages of each level have been delivered.

The file is the broker's own (`ScheduleMessageService.java`). For each delay level, it holds the number of the next
message of queue `level - 1` in SCHEDULE_TOPIC_XXXX. A live broker reads it when it starts, and rewrites it from memory.

    "offsetTable":{1:250,3:17}

Threads: one. Processes: the caller holds the writer lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from messagestore.files.config_file import ConfigFile
from messagestore.files.config_table import ConfigTable
from messagestore.files.disk import Disk

_LARGEST_OFFSET = (1 << 63) - 1


class DelayOffsets(ConfigTable[int, int]):
    """`config/delayOffset.json` of one store.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    """

    writes_what_is_there = False  # delivery says again and again how far it is

    def __init__(self, disk: Disk, root: str) -> None:
        super().__init__(
            ConfigFile(
                disk,
                root,
                "delayOffset.json",
                "offsetTable",
                via="new-delay-offset.json",
                meaning="the broker's table of delivered messages",
                hint="Restore it from a copy. If you move it away instead, messages that a broker "
                "delivered come again.",
            )
        )

    def save(self, offsets: Mapping[int, int] | None = None) -> None:
        """Write these levels, and those that could not be written before; the other levels in the file stay.

        Raises
        ------
        CorruptionError
            The file is damaged, also if its `.bak` can be read: that may be older.
        """
        self._changed.update(offsets or {})
        super().save()

    def _parsed(self, table: dict[str, Any]) -> dict[int, int]:
        offsets = {int(level): offset for level, offset in table.items()}
        for offset in offsets.values():
            if type(offset) is not int or not 0 <= offset <= _LARGEST_OFFSET:
                raise ValueError(f"offset {offset!r}")
        return offsets
