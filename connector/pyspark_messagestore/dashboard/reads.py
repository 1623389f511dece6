"""How many bytes of messages the dashboard reads in a second: one budget for all stores and clients.

What was not read is kept for later, up to `KEPT_S` seconds of it, so that a person who clicks is not slowed. A request
that may read messages begins while there is room. While it runs, everything that it may read counts as taken, so that
no other request uses the same room; in the end, only what it has read counts. No request is broken off, so the room may
fall below zero: then the next ones wait.

Requests wait in the loop of the server, before they have a thread or a place among those that are answered. Looks run
in threads of their own, and report from there what they read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from starlette.types import Receive

READ_LIMIT = 64 << 20
"""Bytes a second, unless somebody says otherwise."""
KEPT_S = 16
MOST_WAIT_S, MOST_WAITING = 10.0, 32
"""How long a request waits, and how many do; others are asked to come again."""
_AGAIN_S = 0.02


class Reads:
    """The bytes that may be read.

    Parameters
    ----------
    limit : int
        Bytes a second; 0: as many as anybody asks for.
    clock : callable
        The time, in seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._lock = threading.Lock()
        self._room, self._at_s = float(limit * KEPT_S), clock()
        self.waiting = 0

    def read(self, size: int) -> None:
        """Note that so many bytes were read."""
        self._add(-size)

    @property
    def wait_s(self) -> float:
        """In how many seconds there is room if nobody reads meanwhile; 0.0: there is."""
        room = self._add(0)
        return 0.0 if room > 0 or not self._limit else (1 - room) / self._limit

    async def begin(self, size: int, receive: Receive) -> bool:
        """Wait until there is room, and take what a request may read; the caller gives it back with `end`.

        Parameters
        ----------
        receive : callable
            Says when the client has gone. It must be a client that sends nothing of interest.

        Returns
        -------
        bool
            False: there was no room for `MOST_WAIT_S`, too many requests wait, or the client has gone.
        """
        if self._take(size):
            return True
        if self.waiting >= MOST_WAITING:
            return False
        until_s = self._clock() + MOST_WAIT_S
        self.waiting += 1
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while not gone.done() and self._clock() < until_s:
                # Whoever reads less than it may gives back the rest, at any time.
                await asyncio.wait([gone], timeout=min(self.wait_s, _AGAIN_S))
                if not gone.done() and self._take(size):
                    return True
            return False
        finally:
            self.waiting -= 1
            gone.cancel()

    def end(self, size: int) -> None:
        """Give back what `begin` took."""
        self._add(size)

    def _take(self, size: int) -> bool:
        with self._lock:
            if self._limit and self._grown() <= 0:
                return False
            self._room -= size
            return True

    def _add(self, size: int) -> float:
        with self._lock:
            self._room = min(self._grown() + size, float(self._limit * KEPT_S))
            return self._room

    def _grown(self) -> float:
        """The room now. The caller has the lock."""
        now_s = self._clock()
        self._room = min(self._room + (now_s - self._at_s) * self._limit, float(self._limit * KEPT_S))
        self._at_s = now_s
        return self._room


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone. The body of a request that only reads means nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass
