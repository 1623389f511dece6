"""Clients that nobody uses, with their connections, for whoever needs one next in this process.

    client = taken(name_servers, settings)     an idle one, or a new one
    given_back(client)                         its connections stay open for a while

A task of Spark is short, and the next one in its process asks the same brokers: without this, each of them would ask
name servers and connect. A client has one user at a time, so that nobody closes the connections of somebody else. A
client is not used again if its files with certificates or secrets have changed.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

from messagestore.remoting.client import Client
from messagestore.remoting.settings import RemotingSettings

IDLE_S = 60.0
"""How long an idle client keeps its connections. Brokers close those that were silent for 120 s."""
MOST_IDLE = 8
"""How many clients are kept."""


class _Shelf:
    """The idle clients of this process, and since when they are; the newest is last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Client]] = []

    def taken(self, name_servers: str, settings: RemotingSettings) -> Client:
        made = Client(name_servers, settings)
        while (client := self._popped(made)) is not None:
            if client.keep_idle():
                client.begin()
                return client
        return made

    def _popped(self, like: Client) -> Client | None:
        with self._lock:
            self._drop_old()
            for place in reversed(range(len(self._idle))):
                if self._idle[place][1].key == like.key:
                    return self._idle.pop(place)[1]
        return None

    def given_back(self, client: Client) -> None:
        if not client.keep_idle():
            client.close()
            return
        with self._lock:
            self._idle.append((time.monotonic(), client))
            self._drop_old()

    def _drop_old(self) -> None:
        before_s = time.monotonic() - IDLE_S
        while self._idle and (self._idle[0][0] < before_s or len(self._idle) > MOST_IDLE):
            self._idle.pop(0)[1].close()

    def clear(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop()[1].close()


_shelf = _Shelf()


def taken(name_servers: str, settings: RemotingSettings) -> Client:
    """A client for one user: an idle one whose connections work, or a new one.

    Raises
    ------
    ConfigError
        An address is not `host:port`.
    """
    return _shelf.taken(name_servers, settings)


def given_back(client: Client) -> None:
    """Give a client back. Its connections stay open for a while, unless requests are under way on them."""
    _shelf.given_back(client)


def close_idle() -> None:
    """Close the connections of all idle clients."""
    _shelf.clear()


def _begin_anew() -> None:
    """In a forked process: the sockets are its parent's, and a thread that is not there may hold the lock."""
    global _shelf  # noqa: PLW0603 # the forked process has another one
    _shelf = _Shelf()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(close_idle)
