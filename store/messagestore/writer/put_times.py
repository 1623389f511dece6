"""When records were put, by the time since the machine was started, while its clock is behind the store's.

After the clock was set back, store times stand still at the last one, so a record's store time does not say when it was
put. For an ordinary message that is no matter. A delayed message would wait for the clock to catch up, up to an hour.

    the log      |----- put by 3.0 s -----|-- by 4.0 s --|   <- its end now
    marks                           (3.0 s, end)   (4.0 s, end)

What was put before a process began to write or deliver counts as put when it first looked. The marks are in
`spark/put-times.json` from one process to the next. They stay when the clock has caught up, since what was put before
may still wait, and go when the store's clock has passed the last of these due times.

    {"bootHash": 7, "crc": .., "formatVersion": 1, "marks": [[3000, 4096]], "untilMs": 1795170408381}

The file is one of `checked_json`.

A process that is killed, or a restart of the machine, loses marks. What they said counts anew, from the next look on:
no delay gets shorter. The time since the start does not depend on the clock, so it does not matter how often that is
set.

Threads: the writer's mutex.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from messagestore.files.checked_json import read_fields, write_fields
from messagestore.files.disk import Disk
from messagestore.files.state import boot_hash

MAX_SIZE = 1 << 20
_MOST_MARKS = 4096
_Saved: TypeAlias = tuple[int, list[tuple[int, int]], int]


class PutTimes:
    """Marks in the log, each with a time: what lies below was put at that time or before."""

    def __init__(self) -> None:
        self._times_ms: list[int] = []
        self._ends: list[int] = []
        self._begun_ms: int | None = None
        """When the put began whose end the next call of `note` tells; None: that call is about no put."""
        self._until_ms = 0
        """When the last message that waits is due, by the store's clock."""
        self.behind = False
        """Whether the machine's clock was behind the store's at the last look."""
        self._changed = False

    @property
    def end(self) -> int:
        """The physical offset below which something is known."""
        return self._ends[-1] if self._ends else 0

    def note(self, uptime_ms: int, end: int, until_ms: int = 0, *, put: bool = False) -> None:
        """Note that the log ends at `end` now, while the clock is behind.

        Parameters
        ----------
        uptime_ms : int
            The time since the machine was started.
        end : int
            A physical offset.
        until_ms : int
            When the last message that has been put, or is put now, is due by the store's clock.
        put : bool
            A record is put there now; the next call tells where it ends.
        """
        self.behind = True
        self._until_ms = max(self._until_ms, until_ms)
        self._mark(uptime_ms if self._begun_ms is None else self._begun_ms, end)
        self._begun_ms = uptime_ms if put else None

    def caught_up(self, uptime_ms: int, end: int) -> None:
        """The clock is not behind: store times say when records are put from now on."""
        if self.behind:
            self.note(uptime_ms, end)
            self.behind = False

    def _mark(self, time_ms: int, end: int) -> None:
        if self._ends and end <= self._ends[-1]:
            return
        if len(self._ends) == _MOST_MARKS:  # what lies between two marks counts as put at the later one
            self._times_ms, self._ends = self._times_ms[1::2], self._ends[1::2]
        self._times_ms.append(time_ms)
        self._ends.append(end)
        self._changed = True

    def latest(self, physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """When records below `end` were put at the latest, in milliseconds since the machine's start: int64[n]."""
        return np.array(self._times_ms, np.int64)[np.searchsorted(self._ends, physical_offsets, "right")]

    # ---- from one process to the next

    def load(self, disk: Disk, path: str, end: int) -> None:
        """Take over what the last process has saved.

        Parameters
        ----------
        disk : Disk
        path : str
        end : int
            Where the log ends. What was cut off says nothing about what is put there again.

        Raises
        ------
        CorruptionError
            The file is damaged: nothing is known.
        """
        if self._changed:
            return  # the last save has failed, and nobody can know more

        self._times_ms, self._ends, self._begun_ms, self._until_ms, self.behind = [], [], None, 0, False
        saved = read_put_times(disk, path)
        if saved is None:
            return

        boot, marks, self._until_ms = saved
        uptime_ms = disk.uptime_ns() // 1_000_000
        marks_in_log = [(time_ms, at) for time_ms, at in marks if at <= end]
        if marks_in_log and (boot != boot_hash() or marks_in_log[-1][0] > uptime_ms):
            marks_in_log = [(uptime_ms, marks_in_log[-1][1])]

        self._times_ms, self._ends = [time_ms for time_ms, _ in marks_in_log], [at for _, at in marks_in_log]
        self.behind = bool(marks_in_log)
        self._changed = marks_in_log != marks

    def save(self, disk: Disk, path: str, store_clock_ms: int, *, via: str) -> None:
        """Let the next process know the marks, or remove the file when they say nothing more.

        Raises
        ------
        OSError
            The file cannot be written; the next call tries it again.
        """
        if self._ends and not self.behind and store_clock_ms >= self._until_ms:
            self._times_ms, self._ends, self._changed = [], [], True
        if not self._changed:
            return
        if self._ends:
            marks = [[time_ms, end] for time_ms, end in zip(self._times_ms, self._ends, strict=True)]
            fields = {"bootHash": boot_hash(), "marks": marks, "untilMs": self._until_ms}
            write_fields(disk, path, fields, via=via)
        elif disk.exists(path):
            disk.unlink(path)
        self._changed = False


def read_put_times(disk: Disk, path: str) -> _Saved | None:
    """The hash of the boot in which the marks were made, the marks, and until when they matter; None without a file.

    Raises
    ------
    CorruptionError
        The file is damaged.
    """
    hint = (
        "The messages do not depend on it. Delete it: delayed messages then wait for their level once more, if the "
        "machine's clock was set back."
    )
    return read_fields(disk, path, MAX_SIZE, _saved, what="times of puts", hint=hint)


def _saved(fields: Mapping[str, Any]) -> _Saved:
    marks = [(int(time_ms), int(end)) for time_ms, end in fields["marks"]]
    return int(fields["bootHash"]), marks, int(fields["untilMs"])
