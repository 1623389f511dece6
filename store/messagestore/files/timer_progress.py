"""`config/timercheck`: how far a broker has delivered timer messages.

The file is the broker's own (`TimerCheckpoint.java`). A broker moves the messages of `rmq_sys_wheel_timer` into its
timer wheel, in the order of the queue, and delivers each of them when the second of its TIMER_OUT_MS comes. The file
says how far both have come. A live broker writes it every second.

    0   8   16  24
    | R | - | Q | ...     the wheel was read below R (ms); the queue was read below Q

Nothing here writes the file.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from messagestore.files.disk import Disk
from messagestore.signal_handlers import pass_on

TIMER_TOPIC = "rmq_sys_wheel_timer"
_HEAD = struct.Struct(">qqq")


@dataclass(frozen=True, slots=True)
class TimerProgress:
    """How far a broker has come. A timer message that neither number covers was not delivered.

    Parameters
    ----------
    read_ms : int
        Messages of the wheel were delivered if their TIMER_OUT_MS is below this; 0: it is not known.
    queue_offset : int
        Messages of `rmq_sys_wheel_timer` came into the wheel if their queue offset is below this; 0: it is not known.
    """

    read_ms: int = 0
    queue_offset: int = 0


def read_timer_progress(disk: Disk, root: str) -> TimerProgress:
    """Read the file of a store. Nothing was delivered, as far as is known, if there is none or if it is cut off."""
    path = os.path.join(root, "config", "timercheck")
    try:
        head = disk.read_head(path, _HEAD.size)
    except (FileNotFoundError, NotADirectoryError) as error:
        pass_on(error)
        return TimerProgress()
    if len(head) < _HEAD.size:
        return TimerProgress()
    read_ms, _, queue_offset = _HEAD.unpack(head)
    return TimerProgress(read_ms, queue_offset)
