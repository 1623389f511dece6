"""Owns the connections: accepts them, bounds them, and ends those that are silent. cheroot parses the requests.

A connection gets a thread when bytes arrive, and not before, so a client that connects and says nothing costs a
descriptor for the idle time. From then on, the client must say what it wants within `HEAD_S`. That includes the TLS
handshake, which the connection's thread makes and not the one that accepts. There are more threads than streams, so
that small requests are answered while all streams are in use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import ssl
import threading
import time
import weakref
from typing import Any

from cheroot.errors import FatalSSLAlert
from cheroot.makefile import MakeFile
from cheroot.server import Gateway, HeaderReader, HTTPConnection, HTTPRequest, HTTPServer

from messagestore.errors import ProtocolError, StoreUnavailableError
from messagestore.serve.certificates import Certificates
from messagestore.serve.exchange import Exchange
from messagestore.serve.limits import SPARE_THREADS
from messagestore.serve.service import Service
from messagestore.spi.wire import failures

HEAD_S = 10.0
"""Seconds for a handshake, a request line and headers together."""
_CROWDED_HEAD_S = 1.0
"""The same while all threads are in use: who says what he wants gets the thread of one who does not."""
_HEADER_SIZE = 32 * 1024
_WATCH_S = 0.5
_LINGER_S = 1.0
_LINGER_SIZE = 1024 * 1024
_ONLY_TLS_JSON = json.dumps(
    {"error": failures.to_json(ProtocolError("the server speaks only TLS at this port. Use https:// in the path"))}
).encode()
_ONLY_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_ONLY_TLS_JSON), _ONLY_TLS_JSON)
)
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_ONCE = (b"Authorization", b"Content-Length", b"Transfer-Encoding")
_log = logging.getLogger("messagestore.serve")


class _WholeLines:
    """The lines of a request's head. One that is cut is no request, whatever its beginning looks like.

    Parameters
    ----------
    file : cheroot.server.SizeCheckWrapper
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def readline(self) -> bytes:
        """The next line; empty if the client has closed the connection between two requests.

        Raises
        ------
        ConnectionResetError
            The client's data ends in the middle of a head.
        """
        line: bytes = self._file.readline()
        if not line.endswith(b"\n") and self._file.bytes_read:
            raise ConnectionResetError(errno.ECONNRESET, "the head of a request was cut")
        return line


class _Headers(dict[bytes, bytes]):
    """The headers of a request. Those that say where its body ends, or whose it is, come once.

    A proxy that reads another one of two values takes what follows the body for another request, perhaps of another
    client, and so gives each client the answer of the one before it.
    """

    def __setitem__(self, name: bytes, value: bytes) -> None:
        if name in _ONCE and name in self:
            raise ValueError(f"found the header {name.decode('latin-1')} twice; allowed is one")
        if name == b"Content-Length" and not value.isdigit():
            raise ValueError("found a Content-Length that is no number")
        super().__setitem__(name, value)


class _HeaderReader(HeaderReader):
    """Reads headers whose names have no blanks around them. A proxy that passes over such a header believes another
    size of the body, or none (RFC 9112, section 5.1).
    """

    def _transform_key(self, key_name: bytes) -> bytes:
        if key_name != key_name.strip():
            raise ValueError("found blanks around the name of a header; allowed are none")
        return key_name.title()


class _HTTPRequest(HTTPRequest):
    header_reader = _HeaderReader()

    def read_request_line(self) -> bool:
        """Read the request line; the headers are read from the same file."""
        self.rfile = _WholeLines(self.rfile)
        return bool(super().read_request_line())  # type: ignore[no-untyped-call]

    def read_request_headers(self) -> bool:
        """Read the headers; the size of the body is said in one way."""
        self.inheaders = _Headers()
        if not super().read_request_headers():  # type: ignore[no-untyped-call]
            return False
        if b"Transfer-Encoding" in self.inheaders and (not self.chunked_read or b"Content-Length" in self.inheaders):
            words = "found the header Transfer-Encoding; allowed is HTTP/1.1, and no Content-Length"
            self.simple_response("400 Bad Request", words)
            return False
        return True


class _Connection(HTTPConnection):
    """A connection with a deadline, by which its client must have said what it wants."""

    RequestHandlerClass = _HTTPRequest

    def __init__(self, server: _HTTPServer, sock: Any, *rest: Any) -> None:
        super().__init__(server, sock, *rest)
        self._is_new = isinstance(sock, ssl.SSLSocket)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.head_due_s: float | None = None
        server.open_connections.add(self)

    def communicate(self) -> bool:
        """Answer one request."""
        self.head_due_s = time.monotonic() + HEAD_S
        try:
            if self._is_new and not self._shake_hands():
                return False
            return bool(super().communicate())  # type: ignore[no-untyped-call]
        except OSError as error:  # cheroot could not tell the client what is wrong
            _log.info("connection of %s: ended: %s", self.remote_addr, error)
            return False
        finally:
            self.head_due_s = None

    def _shake_hands(self) -> bool:
        self._is_new = False
        try:
            self.socket.do_handshake()
        except OSError as error:
            _log.info("connection of %s: no TLS handshake: %s", self.remote_addr, error)
            raw = _Plain(self.socket)
            with contextlib.suppress(OSError):
                if getattr(error, "reason", "") == "HTTP_REQUEST":
                    raw.send(_ONLY_TLS)
                raw.linger()
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self.server.open_connections.discard(self)
        super().close()

    def refuse(self, reason: str) -> None:
        """Say why the connection is closed, and close it; nobody waits. With TLS it is closed without a word."""
        if not isinstance(self.socket, ssl.SSLSocket):
            body = json.dumps({"error": failures.to_json(StoreUnavailableError(reason))}).encode()
            with contextlib.suppress(OSError):
                self.socket.settimeout(0)
                self.socket.send(_BUSY % (len(body), body))
                self.socket.recv(_HEADER_SIZE)  # a reset, for what was not read, could take the answer away
        self.close()

    def cut(self) -> None:
        """End the connection while a thread waits for it."""
        with contextlib.suppress(OSError):
            _Plain(self.socket).shut(socket.SHUT_RDWR)


class _Plain:
    """The socket below TLS.

    `SSLSocket.shutdown` ends the encryption first, so another thread that is sending could send plain text.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def shut(self, how: int) -> None:
        """Shut the connection down."""
        socket.socket.shutdown(self._socket, how)

    def send(self, data: bytes) -> None:
        """Send plain text, to a client that does not speak TLS."""
        socket.socket.sendall(self._socket, data)

    def linger(self) -> None:
        """End a connection so that its client receives what was sent last: a reset would take it away."""
        self.shut(socket.SHUT_WR)
        until_s, got = time.monotonic() + _LINGER_S, 0
        while got < _LINGER_SIZE and (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            data = socket.socket.recv(self._socket, 1 << 16)
            if not data:
                break
            got += len(data)


class _Gateway(Gateway):
    def respond(self) -> None:
        request = self.req
        request.conn.head_due_s = None
        request.server.service.handle(Exchange(request))


class _HTTPServer(HTTPServer):
    ConnectionClass = _Connection

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        limits = service.limits
        threads = limits.streams + SPARE_THREADS
        super().__init__(address, _Gateway, minthreads=threads, maxthreads=threads, server_name="messagestore")
        self.service = service
        self.timeout = limits.idle_s  # type: ignore[assignment] # a socket's timeout
        self.max_request_header_size = _HEADER_SIZE
        self.open_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self.request_queue_size = 128

    def process_conn(self, conn: Any) -> None:
        """Hand a connection that has bytes to a thread. A new one waits for its first bytes without a thread."""
        if conn.last_used is not None:
            super().process_conn(conn)
        elif len(self.open_connections) > self.service.limits.connections:
            limit = self.service.limits.connections
            _log.warning("connection of %s refused: %s are open", conn.remote_addr, limit)
            conn.refuse(f"{limit} connections are open, and no more are allowed (--connections)")
        else:
            self.put_conn(conn)

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Log what cheroot found wrong with a request or a connection: a line, unless it is a fault of this program."""
        _log.log(level, "%s", msg, exc_info=traceback and level >= logging.ERROR)


class LateHandshake:
    """TLS whose handshake is made by the thread that reads the first bytes.

    Parameters
    ----------
    certificates : Certificates
        Those of the moment when a connection is opened count.
    """

    def __init__(self, certificates: Certificates) -> None:
        self.certificates, self.makefile = certificates, MakeFile

    def bind(self, sock: socket.socket) -> socket.socket:
        """The socket that listens, as it is."""
        return sock

    def wrap(self, sock: socket.socket) -> tuple[ssl.SSLSocket, dict[str, str]]:
        """A TLS socket that has said nothing yet."""
        try:
            return self.certificates.context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False), {}
        except OSError as error:  # the client has gone already
            sock.close()
            raise FatalSSLAlert(str(error)) from error


class Server:
    """Listens at an address, and answers until it is stopped.

    Parameters
    ----------
    service : Service
    host, port : str, int
        Port 0: one that is free.
    certificates : Certificates, optional
        With them, only TLS is spoken.
    """

    def __init__(
        self, service: Service, host: str = "127.0.0.1", port: int = 0, certificates: Certificates | None = None
    ) -> None:
        self.service = service
        self._http = _HTTPServer((host, port), service)
        if certificates is not None:
            self._http.ssl_adapter = LateHandshake(certificates)
        self._scheme = "http" if certificates is None else "https"
        self._host = host
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """Where clients find the server."""
        host, port = self._http.socket.getsockname()[:2]
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> None:
        """Listen at the address, and answer in threads of this process.

        Raises
        ------
        OSError
            The address cannot be listened on.
        """
        self._http.prepare()
        for target, name in ((self._http.serve, "serve"), (self._watch, "serve-watch")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _watch(self) -> None:
        """End connections whose clients take too long to say what they want."""
        while not self._stopped.wait(_WATCH_S):
            now_s, crowded = time.monotonic(), self._http.requests.idle == 0
            for conn in list(self._http.open_connections):
                due_s = conn.head_due_s
                if due_s is not None and due_s - (HEAD_S - _CROWDED_HEAD_S if crowded else 0.0) < now_s:
                    conn.cut()

    def stop(self, drain_s: float = 0.0) -> bool:
        """Refuse new requests, wait for running ones, and close; return whether all have ended in time.

        Those that have not are cut off. Their clients ask again, and a commit that was waiting has not begun.
        """
        ended = self.service.drain(drain_s)
        self._stopped.set()
        for conn in list(self._http.open_connections):
            conn.cut()
        with self.service.hosted.ending():  # after the cut: clients get no answer of what ends now
            self._http.shutdown_timeout = 5
            self._http.stop()
        for thread in self._threads:
            thread.join(10.0)
        self.service.hosted.close()
        return ended
