"""The TransientStorePool: puts in memory that are not in the files of the log yet.

The pool has buffers of the size of a segment, which are locked in memory. A put is copied into the buffer of its
segment, at its own position, and a thread drains the pool a moment later: it writes what the buffers
hold to the files. A buffer returns to the pool when its segment is full and written.

    log      | in the files                      | in buffers only         |
                                               begin                      end

What was not drained exists in this process only, so whoever kills the process takes it away. Everybody but the writer
deals with the bytes in the files only.

Threads: puts come one at a time, under the writer's mutex; one drain runs beside them. A put changes only `end` and
the newest buffer, and a drain only `begin` and the oldest buffer. `mutex` keeps drains apart from each other.
Source: RocketMQ store/TransientStorePool.java.
"""

from __future__ import annotations

import mmap
import resource
import threading
from collections import deque

from messagestore.errors import ConfigError
from messagestore.files.commit_log import RECORD_BEGIN, CommitLog
from messagestore.files.disk import Disk

_SIZE_KEY = "transientStorePoolSize"


class _Buffer:
    """A buffer, and the segment that it is for. `wrote` is the position up to which it holds bytes."""

    __slots__ = ("memory", "start", "wrote")

    def __init__(self, start: int, memory: mmap.mmap) -> None:
        self.start = start
        self.memory = memory
        self.wrote = 0


class TransientStorePool:
    """The buffers of one writer.

    Parameters
    ----------
    log : CommitLog
        Where they are written to.
    size : int
        How many buffers there are.

    Attributes
    ----------
    begin, end : int
        The bytes of the log that are in buffers only: physical offsets. There are none unless `begin` is below `end`.

    Raises
    ------
    ConfigError
        The system does not give the memory, or does not lock it.
    """

    def __init__(self, log: CommitLog, size: int) -> None:
        self._log = log
        self.begin = self.end = 0
        self.mutex = threading.Lock()
        self._free = _locked_buffers(log.disk, size, log.segment_size)
        self._used: deque[_Buffer] = deque()

    @property
    def undrained(self) -> int:
        """How many bytes of the log are in buffers only; about so many, while puts or a drain run."""
        return max(0, self.end - self.begin)

    # ---- puts, under the writer's mutex

    def has_room(self, log_end: int, physical_offset: int) -> bool:
        """Whether there is a buffer for a put, and for the BLANK record at the log's end if the put is not there."""
        if self.begin >= self.end:
            self._return_all(log_end)
        elif physical_offset == log_end:
            return True  # it follows another put in the same segment
        newest = self._used[-1].start if self._used else -1
        needed = {self._log.segment_of(log_end), self._log.segment_of(physical_offset)} - {newest}
        return len(needed) <= len(self._free)

    def _return_all(self, log_end: int) -> None:
        """Return the buffers if none holds anything, except that of the segment in which the log ends."""
        with self.mutex:
            while self._used and self._used[0].start != self._log.segment_of(log_end):
                self._free.append(self._used.popleft().memory)

    def put(self, log_end: int, physical_offset: int, data: bytes | bytearray) -> None:
        """Take a record; one that is not at the log's end begins the next segment, after a BLANK in this one.

        Call `has_room` before.
        """
        if self.begin >= self.end:
            self.begin = log_end  # before `end`: a drain that runs meanwhile finds nothing to do
        if physical_offset != log_end:
            self._copy(log_end, self._log.blank(log_end))
        self._copy(physical_offset, data)
        self.end = physical_offset + len(data)  # last: a drain takes what lies below it

    def _copy(self, physical_offset: int, data: bytes | bytearray) -> None:
        start = self._log.segment_of(physical_offset)
        if not self._used or self._used[-1].start != start:
            self._used.append(_Buffer(start, self._free.pop()))
        buffer = self._used[-1]
        position = physical_offset - start
        buffer.memory[position : position + len(data)] = data
        buffer.wrote = position + len(data)

    # ---- draining

    def drain(self, end: int, *, create: bool) -> bool:
        """Write what lies below `end`, which is the end of a record, to the files of the log.

        The result is False if there is more to do: the next segment does not exist yet. With `create`, that segment is
        created with its first record in it, as by every other put, and nothing else is written to it.

        Raises
        ------
        OSError
            A write failed. What was not written before stays in the buffers.
        """
        with self.mutex:
            while self.begin < min(end, self.end):
                buffer = self._used[0]
                stop = min(buffer.start + buffer.wrote, end)
                if self.begin < stop:
                    missing = self._log.holding(self.begin) is None
                    if missing and not create:
                        return False
                    if missing:
                        stop = self.begin + RECORD_BEGIN.unpack_from(buffer.memory, self.begin - buffer.start)[0]
                    with memoryview(buffer.memory) as memory:
                        self._log.write(self.begin, memory[self.begin - buffer.start : stop - buffer.start])
                    self.begin = stop
                    if missing:
                        return False
                else:  # the segment is full, and written
                    self.begin = self._used[1].start
                    self._free.append(self._used.popleft().memory)
        return True

    def close(self) -> None:
        """Give the memory back. What was not drained is lost."""
        with self.mutex:
            self.begin = self.end  # for whoever is about to drain it
            self._free, self._used = [], deque()  # unmapped with the last reference: a failed write may have one

    def forget_threads(self) -> None:
        """In a forked child, replace the lock, because its holder is not there, and let the shared memory go."""
        self.mutex = threading.Lock()
        self._free, self._used = [], deque()


def _locked_buffers(disk: Disk, count: int, size: int) -> list[mmap.mmap]:
    """Memory that is never swapped out, in buffers of `size` bytes each."""
    needed, what = count * size, f"{count} buffers of {size} bytes (mappedFileSizeCommitLog)"
    available = disk.available_memory()
    if available is not None and needed > available:
        text = (
            f"{what} take {needed} bytes of memory, and {available} are left of the machine's memory, or below a limit "
            f"of this process's control group. Choose"
        )
        raise _no_memory(text, count)

    buffers: list[mmap.mmap] = []
    try:
        buffers.extend(disk.locked_memory(size) for _ in range(count))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "any size" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        raise _no_memory(
            f"{what} must be locked in memory, and the system refused buffer {len(buffers) + 1} ({error.strerror}). A "
            f"process of this user may lock {allowed} (ulimit -l, in systemd LimitMEMLOCK). Raise this limit, choose",
            count,
        ) from error
    return buffers


def _no_memory(fault: str, count: int) -> ConfigError:
    return ConfigError(
        f"{_SIZE_KEY}: {fault} fewer buffers or smaller segments, or set transientStorePoolEnable=false",
        key=_SIZE_KEY,
        value=count,
    )
