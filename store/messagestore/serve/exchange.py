"""One HTTP request and its answer, read from and written to the socket itself.

cheroot has parsed the request line and the headers. What follows does not go through its file objects, which copy every
byte two or three times: bodies are read into the memory where they are needed, and answers are sent from the memory in
which they are.

A request whose body was not read to its end is answered, and then the connection is closed. To let the client read the
answer, the server first takes in what is on its way, for a moment and within bounds, and throws it away.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from messagestore.errors import ProtocolError
from messagestore.spi.wire import frames

_HEX_DIGITS = b"0123456789abcdefABCDEF"
_MOST_LINE = 64
_LINGER_S = 1.0
_LINGER_SIZE = 16 * 1024 * 1024
_SMALL_BODY = 64 * 1024


class CutError(ConnectionError):
    """The client went away, or was silent for too long, in the middle of a request."""


class Exchange:
    """A request, and its answer.

    Parameters
    ----------
    request : cheroot.server.HTTPRequest
        Its line and headers have been read.

    Attributes
    ----------
    method, path : str
    received, sent : int
        Bytes of the bodies.
    status : int
        What was answered; 0 before.
    is_known : bool
        Whether the client may use the server. The answer to anybody else does not wait for a body.
    lingers : bool
        Whether the end of the answer waits until the client may have read it, where the body was not.
    paced : function
        Called with the size of each piece of the body that was taken. It may wait.
    """

    def __init__(self, request: Any) -> None:
        self._request, self._socket, self._file = request, request.conn.socket, request.conn.rfile
        self.method = request.method.decode("latin-1")
        self.path = request.path.decode("latin-1")
        self.client = str(request.conn.remote_addr)
        self.received = self.sent = self.status = 0
        self.is_known, self.lingers = False, True
        self.paced: Callable[[int], None] = lambda _: None
        self._chunked = bool(request.chunked_read)
        self._left = 0 if self._chunked else max(0, int(self.header("Content-Length") or 0))
        self._ended = not self._chunked and not self._left
        self._begun = b""
        request.sent_headers = True  # what cheroot would send is sent here

    def header(self, name: str) -> str:
        """A header of the request; empty without it."""
        value: bytes = self._request.inheaders.get(name.encode("latin-1"), b"")
        return value.decode("latin-1")

    # ---- the request's body

    @property
    def size(self) -> int | None:
        """The size of the body; None if the client did not say it."""
        return None if self._chunked else self._left

    def take(self, view: memoryview) -> None:
        """Fill a view with the next bytes of the body.

        Raises
        ------
        CutError
            The body ends before.
        """
        at = 0
        while at < len(view):
            if not self._left and not self._next_chunk():
                raise CutError("the request's body ends in the middle of a message")
            count = self._some(view[at : at + min(self._left, frames.BLOCK)])
            at += count
            self._left -= count
            self.received += count
            if not self._left:
                self._end_of_piece()
            self.paced(count)

    def rest(self, limit: int, room: Callable[[int], None] = lambda _: None) -> bytes:
        """The rest of the body, if it is not larger than the limit.

        Parameters
        ----------
        limit : int
        room : function
            Called with the size of what was read and comes next, before memory is taken for that.

        Raises
        ------
        ProtocolError
            It is larger; no memory was taken for it.
        """
        body = bytearray()
        while not self._ended:
            if not self._left and not self._next_chunk():
                break
            if len(body) + self._left > limit:
                raise ProtocolError(f"found a body of more than {limit:,} bytes; that is the limit")
            room(len(body) + self._left)
            piece = bytearray(self._left)
            self.take(memoryview(piece))
            body += piece
        return bytes(body)

    def end(self) -> None:
        """Read the end of a body that must have no more bytes."""
        if not self._ended and (self._left or self._next_chunk()):
            raise ProtocolError("found bytes after the last frame")

    def _next_chunk(self) -> bool:
        if not self._chunked or self._ended:
            return False
        size = self._line().partition(b";")[0].strip()
        if not size or size.strip(_HEX_DIGITS):  # `int` also takes signs, underscores and 0x, and a proxy does not
            raise ProtocolError("found a chunk without a size")
        self._left = int(size, 16)
        if not self._left:
            while self._line():  # trailers
                pass
            self._ended = True
            return False
        return True

    def _end_of_piece(self) -> None:
        if not self._chunked:
            self._ended = True
        elif self._line():
            raise ProtocolError("found bytes after a chunk")

    def _line(self) -> bytes:
        line: bytes = self._file.readline(_MOST_LINE)
        if not line.endswith(b"\n"):
            raise CutError("the request's body ends between two chunks")
        return line.rstrip(b"\r\n")

    def _some(self, view: memoryview) -> int:
        if self._file.has_data():
            data = self._file.read(min(len(view), len(self._file.peek())))
            view[: len(data)] = data
            return len(data)
        count: int = self._socket.recv_into(view)
        if not count:
            raise CutError("the client closed the connection in the middle of a request")
        return count

    # ---- the answer

    def go_on(self) -> None:
        """Tell a client whose body is read slowly that its request is not forgotten."""
        self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    def answer(self, status: int, body: Any, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Answer with JSON, or with text that is given as bytes."""
        text = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode("utf-8")
        kind = "text/plain; charset=utf-8" if isinstance(body, bytes) else "application/json"
        sent = b"" if self.method == "HEAD" else text
        head = self._head(status, [*headers, ("Content-Type", kind)], ("Content-Length", str(len(text))))
        frames.send(self._socket, [memoryview(head), memoryview(sent)])
        self.sent += len(sent)
        self._finish()

    def begin(self, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Begin the answer of a stream of frames. Its head leaves with the first: alone, it would wake the client."""
        kind = ("Content-Type", "application/octet-stream")
        self._begun = self._head(200, [*headers, kind], ("Transfer-Encoding", "chunked"))

    def has_room(self) -> bool:
        """Whether a small frame can be sent without waiting for the client."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    def is_gone(self) -> bool:
        """Whether the client has closed the connection, or its direction of it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, pieces: Sequence[memoryview], *, ends: bool = False) -> None:
        """Send a frame; `ends` says that it is the last one of the answer."""
        chunk = [memoryview(self._begun), *frames.as_chunk(pieces)]
        self._begun = b""
        frames.send(self._socket, [*chunk, frames.LAST_CHUNK] if ends else chunk)
        self.sent += sum(map(len, pieces))

    def finish(self, pieces: Sequence[memoryview]) -> None:
        """Send the last frame, and end the answer of a stream."""
        self.send(pieces, ends=True)
        self._finish()

    def _head(self, status: int, headers: Sequence[tuple[str, str]], size: tuple[str, str]) -> bytes:
        """The head of the answer. The header that says how long the body is comes last: a head without it was cut."""
        self.status = status
        if self.is_known and not self._ended and not self._chunked and self._left <= _SMALL_BODY:
            self.rest(_SMALL_BODY)  # so that the connection can be kept
        if not self._ended:
            self._request.close_connection = True
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if self._request.close_connection:
            lines.append("Connection: close")
        lines.append(": ".join(size))
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _finish(self) -> None:
        if not self._ended and self.lingers:
            self._linger()

    def drop(self) -> None:
        """Close the connection after this request, whatever the client asked for."""
        self._request.close_connection = True

    def _linger(self) -> None:
        """Throw away what is on its way: a reset would take the answer from a client that has not read it yet."""
        waste, got, until_s = memoryview(bytearray(frames.BLOCK)), 0, time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            if self._request.server.ssl_adapter is None:
                self._socket.shutdown(socket.SHUT_WR)
            while got < _LINGER_SIZE and (left_s := until_s - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                count = self._socket.recv_into(waste)
                if not count:
                    break
                got += count
