"""What clients together may take of a server, and what it answers to those that ask for more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from messagestore.errors import StoreError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server; sizes in bytes.

    Parameters
    ----------
    connections : int
        Open connections; more are closed at once.
    streams : int
        Streams (`gather`, `stage`, `commit`) at the same time.
    memory : int
        Memory for the buffers of all streams.
    body : int
        A JSON body, and the JSON head of a frame.
    frame : int
        A frame.
    staged : int
        What one client may have in a file that it stages.
    idle_s : float
        Seconds in which a client must send or take something.
    rate : int
        Bytes a second of one client; 0: no limit.
    """

    connections: int = 256
    streams: int = 64
    memory: int = 256 * MIB
    body: int = 8 * MIB
    frame: int = 64 * MIB
    staged: int = 64 * 1024 * MIB
    idle_s: float = 30.0
    rate: int = 0


class BusyError(StoreError):
    """A limit is reached; the client shall come back.

    Attributes
    ----------
    status : int
        The HTTP status: 429 if the client itself is over a limit, 503 if all clients together are.
    retry_after_s : int
    """

    def __init__(self, message: str, *, status: int = 503, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class Budget:
    """Counts what is taken of the limits. Thread-safe.

    Parameters
    ----------
    limits : Limits
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.streams = 0
        self.memory = 0
        self._changed = threading.Condition()
        self._due_s: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def stream(self) -> Iterator[Room]:
        """A place for a stream, with no memory yet.

        Raises
        ------
        BusyError
            All places are taken.
        """
        with self._changed:
            if self.streams >= self.limits.streams:
                raise BusyError(f"{self.streams} streams are open, and at most {self.limits.streams} are allowed")
            self.streams += 1
        room = Room(self)
        try:
            yield room
        finally:
            room.take(0)
            with self._changed:
                self.streams -= 1

    def change(self, by: int) -> None:
        """Take memory, once there is enough, or give it back.

        Raises
        ------
        BusyError
            Others did not give back enough within the idle time.
        """
        with self._changed:
            if by > 0 and not self._changed.wait_for(
                lambda: self.memory + by <= self.limits.memory, self.limits.idle_s
            ):
                raise BusyError(
                    f"the streams hold {self.memory:,} bytes, and {by:,} more would be over the {self.limits.memory:,} "
                    f"that are allowed"
                )
            self.memory += by
            self._changed.notify_all()

    def pace(self, client: str, size: int) -> float:
        """Wait as long as the rate of a client asks for after `size` bytes; return the seconds."""
        rate = self.limits.rate
        if not rate:
            return 0.0
        with self._changed:
            now_s = time.monotonic()
            self._due_s[client] = max(self._due_s[client], now_s) + size / rate
            wait_s = self._due_s[client] - now_s - 1.0  # a second's worth may come at once
        if wait_s <= 0:
            return 0.0
        time.sleep(wait_s)
        return wait_s


class Room:
    """The memory of one stream."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        """Hold this much memory instead of what was held."""
        by, self._size = size - self._size, size
        try:
            self._budget.change(by)
        except BusyError:
            self._size -= by
            raise
