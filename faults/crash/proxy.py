"""A TCP proxy between a client and a server, which disturbs one connection at one byte.

    with Proxy(("127.0.0.1", port)) as proxy:
        proxy.plan(Fault("reset", UP, 1_200))     # counted over all connections since `plan`
        ...                                        # the client talks to proxy.port
        proxy.happened                             # whether the byte was reached

What a fault does, the moment before its byte would pass:

    delay        nothing passes for `DELAY_S`, then everything goes on
    reset        both ends get a RST
    close        both ends get a FIN: what came before has arrived
    half-close   who would have got the byte gets a FIN; what it says still passes
    half-open    the server gets a RST, the client hears nothing any more
    blackhole    nothing passes any more in either direction, and nobody is told

Any other fault is the caller's: `act` is called with its kind, and then everything goes on.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

UP, DOWN = "up", "down"
"""From the client to the server, and back."""
KINDS = ("delay", "reset", "close", "half-close", "half-open", "blackhole")
DELAY_S = 0.2
_PIECE = 65_536


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, in which direction, and before which byte of it."""

    kind: str
    direction: str
    at: int


@dataclass
class _Pair:
    """A connection from a client, and the one to the server for it."""

    client: socket.socket
    server: socket.socket
    silent: bool = False
    ends: int = 0

    def other(self, one: socket.socket) -> socket.socket:
        return self.server if one is self.client else self.client


@dataclass
class Proxy:
    """Listens on an address of this host, until the block ends.

    Parameters
    ----------
    target : (str, int)
        The server; it need not run yet.
    act : function
        Called with the kind of a fault that is not the proxy's own.
    listens_on : (str, int)
        Where clients come; port 0: a free one.

    Attributes
    ----------
    passed : dict of str to list of int
        For each direction, how many bytes had passed since `plan` after each piece.
    happened : bool
        Whether the planned fault has happened.
    """

    target: tuple[str, int]
    act: Callable[[str], None] = lambda kind: None  # a fault that is not the proxy's own
    listens_on: tuple[str, int] = ("127.0.0.1", 0)
    happened: bool = False
    passed: dict[str, list[int]] = field(default_factory=lambda: {UP: [], DOWN: []})

    def __post_init__(self) -> None:
        self._listener = socket.create_server(self.listens_on, backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._counts = {UP: 0, DOWN: 0}
        self._pairs: list[_Pair] = []
        self._ended = False
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def plan(self, fault: Fault | None) -> None:
        """Count from here on, and let a fault happen."""
        with self._lock:
            self._fault, self.happened = fault, False
            self._counts = {UP: 0, DOWN: 0}
            self.passed = {UP: [], DOWN: []}

    def cut(self) -> None:
        """Reset all connections; `act` may call this."""
        for pair in self._pairs:
            self._end(pair, abruptly=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._waker.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            while not self._ended:
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._forward(key.data, key.fileobj)  # type: ignore[arg-type]
            for pair in self._pairs:
                self._end(pair)
        for each in (self._listener, self._wake, self._waker):
            each.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self.target, 5)
        except OSError:  # the server is down, so the client is refused
            _reset(client)
            return
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(client, server)
        self._pairs.append(pair)
        for each in (client, server):
            self._selector.register(each, selectors.EVENT_READ, pair)

    def _forward(self, pair: _Pair, source: socket.socket) -> None:
        """Pass on one piece, up to the byte of the fault."""
        if source.fileno() < 0 or pair.silent:
            return
        try:
            piece = source.recv(_PIECE)
        except OSError:
            self._end(pair, abruptly=True)
            return
        direction, target = (UP if source is pair.client else DOWN), pair.other(source)

        if not piece:
            self._end_direction(pair, source)
            return

        with self._lock:
            fault, before = self._fault, self._counts[direction]
            due = (
                fault is not None
                and not self.happened
                and fault.direction == direction
                and before <= fault.at < before + len(piece)
            )
            if due:
                self.happened = True
            self._counts[direction] += len(piece)
            self.passed[direction].append(self._counts[direction])

        if not due:
            self._send(pair, target, piece)
            return
        assert fault is not None
        first = piece[: fault.at - before]
        self._send(pair, target, first)
        if fault.kind == "half-close":
            self._end_direction(pair, source)
            return
        self._disturb(pair, fault.kind)
        if not pair.silent and target.fileno() >= 0:
            self._send(pair, target, piece[len(first) :])

    def _end_direction(self, pair: _Pair, source: socket.socket) -> None:
        """Pass on nothing more of one end; the other one may go on."""
        pair.ends += 1
        self._ignore(source)
        with contextlib.suppress(OSError):
            pair.other(source).shutdown(socket.SHUT_WR)
        if pair.ends == 2:
            self._end(pair)

    def _disturb(self, pair: _Pair, kind: str) -> None:
        if kind == "delay":
            time.sleep(DELAY_S)
        elif kind == "reset":
            self._end(pair, abruptly=True)
        elif kind == "close":
            self._end(pair)
        elif kind == "half-open":
            pair.silent = True
            for each in (pair.client, pair.server):
                self._ignore(each)
            _reset(pair.server)
        elif kind == "blackhole":
            pair.silent = True
            for each in (pair.client, pair.server):
                self._ignore(each)
        else:
            self.act(kind)

    def _send(self, pair: _Pair, target: socket.socket, piece: bytes) -> None:
        try:
            target.sendall(piece)
        except OSError:
            self._end(pair, abruptly=True)

    def _ignore(self, connection: socket.socket) -> None:
        """Wait no more for what comes. It may have ended already: a send found that its other end has gone."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def _end(self, pair: _Pair, *, abruptly: bool = False) -> None:
        for each in (pair.client, pair.server):
            if each.fileno() < 0:
                continue
            self._ignore(each)
            if abruptly:
                _reset(each)
            else:
                each.close()


def _reset(connection: socket.socket) -> None:
    """Close with a RST."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
