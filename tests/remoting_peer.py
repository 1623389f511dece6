"""A server that answers remoting requests as a test says."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Self

from messagestore.remoting.frames import ANSWER_FLAG, Frame, packed, unpacked


def whole(connection: socket.socket, size: int) -> bytes | None:
    """So many bytes; None if the other side ended before."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            return None
        data += more
    return data


def read_frame(connection: socket.socket) -> Frame | None:
    head = whole(connection, 4)
    data = None if head is None else whole(connection, int.from_bytes(head, "big"))
    return None if data is None else unpacked(data)


def answer(
    request: Frame, code: int = 0, fields: dict[str, str] | None = None, body: bytes = b"", remark: str = ""
) -> bytes:
    return b"".join(packed(Frame(code, request.opaque, fields or {}, body, ANSWER_FLAG, remark)))


class Peer:
    """Listens on a free port, and gives each connection to a function, in a thread of its own.

    Parameters
    ----------
    serve : function
        Gets a connected socket. The connection ends when it returns.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], None],
        *,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._serve, self._tls = serve, tls
        self.connection_count = 0
        self.failures: list[BaseException] = []
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connection_count += 1
            self._open.append(connection)
            threading.Thread(target=self._connected, args=(connection,), daemon=True).start()

    def _connected(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            self._serve(connection)
        except OSError:
            pass  # the client went
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failures.append(error)
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def stop_listening(self) -> None:
        """Take no more connections. Those that are open go on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        self.stop_listening()
        self._thread.join(10)
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        assert not self.failures, self.failures


def answering(reply: Callable[[Frame], bytes | None]) -> Callable[[socket.socket], None]:
    """Serves by answering each request at once; None ends the connection."""

    def serve(connection: socket.socket) -> None:
        while (request := read_frame(connection)) is not None:
            data = reply(request)
            if data is None:
                return
            connection.sendall(data)

    return serve
