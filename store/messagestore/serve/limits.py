"""What clients together may take of a server, and what it answers to those that ask for more."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from messagestore.errors import ProtocolError, StoreError

MIB = 1024 * 1024
SPARE_THREADS = 20
"""Threads for requests that are no streams."""
_PROBE_THREADS = 4
"""Of these, threads that only probes use: a client that sends slowly has a thread for as long as it sends."""
_LOOK_S = 1.0
_LARGE = (2, 6)
"""How many large requests that read are answered at a time, and how many more wait for that. Each has a thread, and
some are left for others.
"""
_LARGE_WRITES = (1, 4)
"""The same for those that write, which do not wait for readers: the client of a commit that hears nothing gives up."""
_M_ARENA_MAX = -8
"""glibc's malloc.h."""
_HEAPS = 2
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT = 32 * 1024 * 1024
"""How many free bytes at the end of a heap are kept. Larger pieces are not taken from a heap."""


def keep_few_heaps() -> None:
    """Let all threads of this process share two heaps of the C library, where that is glibc, and let a heap keep what
    a part of a read or a frame needs.

    By itself, the library makes up to eight heaps for each processor, and each heap keeps a part of what was freed in
    it: some 270 MB in a server that has appended large batches and then has 64 readers. And it would give the memory of
    each part back to the system, whose pages cost a third of the processor time of a read.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _HEAPS)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _KEPT)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server; sizes in bytes.

    Parameters
    ----------
    connections : int
        Open connections; more are closed at once, without TLS after a 503.
    streams : int
        Streams (`gather`, `stage`, `commit`, reports) and `find` at the same time.
    reports : int
        Reports and `find` at the same time, each of which looks through the whole store; others wait for their turn.
    memory : int
        Memory for the buffers of all streams.
    body : int
        A JSON body, and the JSON head of a frame.
    frame : int
        A frame.
    staged : int
        What one client may have staged and not committed, in all its files together.
    idle_s : float
        Seconds in which a client must send or take something.
    rate : int
        Bytes a second of one client; 0: no limit.
    """

    connections: int = 256
    streams: int = 64
    reports: int = 2
    memory: int = 256 * MIB
    body: int = 8 * MIB
    frame: int = 64 * MIB
    staged: int = 64 * 1024 * MIB
    idle_s: float = 30.0
    rate: int = 0

    @property
    def requests(self) -> int:
        """Requests at the same time, without probes."""
        return self.streams + SPARE_THREADS - _PROBE_THREADS


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


@dataclass(slots=True)
class Turns:
    """Turns that few have at a time. They are given in the order in which they were asked for.

    Parameters
    ----------
    most, most_waiting : int
        How many have a turn, and how many wait for one.
    """

    most: int
    most_waiting: int
    taken: int = 0
    waiting: deque[object] = field(default_factory=deque)


class Budget:
    """Counts what is taken of the limits. Thread-safe.

    Parameters
    ----------
    limits : Limits
    over : Event, optional
        Set when the server ends: nobody waits any more.
    """

    def __init__(self, limits: Limits, over: threading.Event | None = None) -> None:
        self.limits = limits
        self._over = over or threading.Event()
        self.streams = self.reports = self.memory = 0
        self.large, self.large_writes = Turns(*_LARGE), Turns(*_LARGE_WRITES)
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
        try:
            with self.room() as room:
                yield room
        finally:
            with self._changed:
                self.streams -= 1

    @contextlib.contextmanager
    def room(self) -> Iterator[Room]:
        """Memory for an answer that is no stream, none yet."""
        room = Room(self)
        try:
            yield room
        finally:
            room.take(0)

    @contextlib.contextmanager
    def report(self, is_gone: Callable[[], bool]) -> Iterator[None]:
        """A turn to look through the whole store.

        Raises
        ------
        ConnectionError
            The client went away before its turn, or the server ends.
        """
        with self._changed:
            while self.reports >= self.limits.reports:
                self._wait(is_gone)
            self.reports += 1
        try:
            yield
        finally:
            with self._changed:
                self.reports -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def large_request(self, is_gone: Callable[[], bool], *, writes: bool = False) -> Iterator[None]:
        """A turn to answer a request that names many things: it takes seconds of a processor, and much memory.

        Parameters
        ----------
        is_gone : function
            Whether nobody waits for the answer any more.
        writes : bool
            Whether the request writes: readers have turns of their own.

        Raises
        ------
        BusyError
            Too many others wait for a turn.
        ConnectionError
            The client went away before its turn, or the server ends.
        """
        turns, place = self.large_writes if writes else self.large, object()
        with self._changed:
            count = len(turns.waiting)
            if count >= turns.most_waiting and (count or turns.taken >= turns.most):
                raise BusyError(
                    f"{turns.taken} requests for many things are being answered, and {count} wait; no more than "
                    f"{turns.most_waiting} may"
                )
            turns.waiting.append(place)
            try:
                while turns.taken >= turns.most or turns.waiting[0] is not place:
                    self._wait(is_gone)
                turns.taken += 1
            finally:
                turns.waiting.remove(place)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                turns.taken -= 1
                self._changed.notify_all()

    def _wait(self, is_gone: Callable[[], bool] = lambda: False, most_s: float = _LOOK_S) -> None:
        """Wait a moment for what others give back, which is free for the caller only after another look."""
        if self._over.is_set():
            raise ConnectionError("the server ends")
        if is_gone():
            raise ConnectionError("the client is gone")
        self._changed.wait(min(most_s, _LOOK_S))

    def change(self, by: int) -> None:
        """Take memory, once there is enough, or give it back.

        Raises
        ------
        BusyError
            Others did not give back enough within the idle time.
        ConnectionError
            The server ends.
        """
        due_s = time.monotonic() + self.limits.idle_s
        with self._changed:
            while by > 0 and self.memory + by > self.limits.memory:
                left_s = due_s - time.monotonic()
                if left_s <= 0:
                    raise BusyError(
                        f"the streams hold {self.memory:,} bytes, and {by:,} more would be over the "
                        f"{self.limits.memory:,} that are allowed"
                    )
                self._wait(most_s=left_s)
            self.memory += by
            self._changed.notify_all()

    def pace(self, client: str, size: int, alive: Callable[[], None] = lambda: None) -> float:
        """Wait as long as the rate of a client asks for after `size` bytes; return the seconds.

        Parameters
        ----------
        client : str
        size : int
        alive : function
            Called at least once a second meanwhile.

        Raises
        ------
        ConnectionError
            The server ends.
        """
        rate = self.limits.rate
        if not rate:
            return 0.0
        with self._changed:
            now_s = time.monotonic()
            self._due_s[client] = max(self._due_s[client], now_s) + size / rate
            wait_s = self._due_s[client] - now_s - 1.0  # a second's worth may come at once
        if wait_s <= 0:
            return 0.0
        while (left_s := now_s + wait_s - time.monotonic()) > 0:
            if self._over.wait(min(left_s, _LOOK_S)):
                raise ConnectionError("the server ends")
            alive()
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
        except (BusyError, ConnectionError):
            self._size -= by
            raise


class StagedBytes:
    """Counts what each client has staged and not committed. Thread-safe.

    The count of a client grows with what it sends. Files go without notice, by a commit, an abort or a sweep, and there
    may be some from before the server was started. So the staging folder is looked at when a client comes for the first
    time, and again before it is refused.

    Parameters
    ----------
    limit : int
        For each client.
    look : function
        Returns the sizes of a client's files, by `stem_of` their names.
    """

    def __init__(self, limit: int, look: Callable[[str], Mapping[str, int]]) -> None:
        self._limit, self._look = limit, look
        self._mutex = threading.Lock()
        self._counts: dict[str, int] = {}
        self._open: dict[str, set[Share]] = defaultdict(set)

    @contextlib.contextmanager
    def share(self, client: str) -> Iterator[Share]:
        """What one more file of a client takes, nothing at first.

        Raises
        ------
        BusyError
            The client has no room left.
        """
        share = Share(self, client)
        with self._mutex:
            self._open[client].add(share)
        try:
            share.take(1)  # a file without rows takes some room, too
            yield share
        finally:
            with self._mutex:
                self._open[client].discard(share)
                if client in self._counts:
                    self._counts[client] += share.staged - share.size

    def add(self, share: Share, size: int) -> None:
        """Count what a file is about to take.

        Raises
        ------
        BusyError
            It would be too much; nothing was counted.
        ProtocolError
            The file alone would be.
        """
        if share.size + size > self._limit:
            raise ProtocolError(
                f"found a staged file of at least {share.size + size - 1:,} bytes; allowed are {self._limit:,} for all "
                f"files of a client (--staged). Write smaller batches or more partitions, or raise the limit"
            )
        client = share.client
        with self._mutex:
            if client not in self._counts or self._counts[client] + size > self._limit:
                self._counts[client] = self._counted(client)
            if self._counts[client] + size > self._limit:
                raise BusyError(
                    f"client {client} has staged {self._counts[client]:,} bytes that are not committed, and {size:,} "
                    f"more would be over the {self._limit:,} that are allowed (--staged). Commit or abort what is "
                    f"staged, write smaller batches, or raise the limit",
                    status=429,
                )
            self._counts[client] += size
            share.size += size

    def _counted(self, client: str) -> int:
        """The bytes of the files in the folder, and of those that are being written as far as they were sent."""
        shares = self._open[client]
        stems = {share.stem for share in shares}
        on_disk = sum(size for stem, size in self._look(client).items() if stem not in stems)
        return on_disk + sum(share.size for share in shares)

    def sums(self) -> dict[str, int]:
        """What each client that was seen has staged now."""
        with self._mutex:
            self._counts = {client: self._counted(client) for client in self._counts}
            return dict(self._counts)


class Share:
    """What one file takes of the bytes that its client may stage.

    Attributes
    ----------
    size : int
        What was counted while the file is written.
    stem : str
        `stem_of` its name, once it is there.
    staged : int
        Its size, once it is finished; 0 before, since a file that is not finished is deleted.
    """

    def __init__(self, counts: StagedBytes, client: str) -> None:
        self._counts, self.client = counts, client
        self.size = self.staged = 0
        self.stem = ""

    def take(self, size: int) -> None:
        """Count more, before it is received."""
        self._counts.add(self, size)
