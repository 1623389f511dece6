"""One connection to a name server or a broker, with many requests under way.

    send(frame) -> Call          writes the request, and returns at once
    Call.answer()                reads frames until this call has its answer; those of other calls are kept for them

Nobody reads in the background: whoever waits for an answer reads for all. Any thread may send, and any thread may wait.
A request that the other side sends is answered with "not supported": a client that is not registered gets none.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from messagestore.errors import ConfigError, ProtocolError, StoreUnavailableError
from messagestore.remoting import codes
from messagestore.remoting.frames import (
    ANSWER_FLAG,
    FRAME_LIMIT,
    ONEWAY_FLAG,
    SIZE_BYTES,
    Frame,
    packed,
    texts_of,
    unpacked,
)
from messagestore.remoting.settings import RemotingSettings, host_and_port, tls_context
from messagestore.remoting.signing import Credentials
from messagestore.signal_handlers import is_of_handler, pass_on

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""How long an answer is waited for unless the caller says otherwise. A broker answers an ordinary request within a
second, and says so if it is busy.
"""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_OPAQUE_LIMIT = 1 << 31
_SHORTEST_S = 0.001
"""How long a read may take after its first bytes have arrived."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Parameters
    ----------
    code : int
        `codes.SUCCESS`, or another one of `codes`.
    remark : str
        The broker's words about it.
    fields : dict of str to str
        The header.
    body : bytes or memoryview
    address : str
        Who answered.
    """

    code: int
    remark: str
    fields: Mapping[str, str]
    body: bytes | memoryview
    address: str

    def number(self, name: str) -> int:
        """A whole number of the header.

        Raises
        ------
        ProtocolError
            The header has no such number.
        """
        try:
            return int(self.fields[name])
        except (KeyError, ValueError):
            raise ProtocolError(
                f"{self.address}: found an answer with the fields {dict(self.fields)!r:.300}; allowed is one with the "
                f"number {name}"
            ) from None


class Call:
    """A request that is under way."""

    __slots__ = ("_answer", "_connection", "_failure", "opaque")

    def __init__(self, connection: Connection, opaque: int) -> None:
        self.opaque = opaque
        self._connection = connection
        self._answer: Answer | None = None
        self._failure: Exception | None = None

    @property
    def address(self) -> str:
        """Whom the request was sent to."""
        return self._connection.address

    @property
    def is_done(self) -> bool:
        """Whether the answer, or the end of the connection, was read already."""
        return self._answer is not None or self._failure is not None

    @property
    def has_failed(self) -> bool:
        """Whether the connection broke before the answer came."""
        return self._failure is not None

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """Wait for the answer, whatever its code is.

        Raises
        ------
        StoreUnavailableError
            The connection broke, or the time is over. The request may have been carried out, or not.
        ProtocolError
            The other side does not speak this protocol.
        """
        if not self.is_done:
            self._connection.read_until(self, time.monotonic() + timeout_s, timeout_s)
        if self._failure is not None:
            raise self._failure
        assert self._answer is not None
        return self._answer

    def end(self, answer: Answer | None, failure: Exception | None = None) -> None:
        """Set what became of the request."""
        self._answer, self._failure = answer, failure

    def give_up(self) -> None:
        """Give the answer up; if it arrives, it is dropped."""
        self._connection.forget(self)


def read_any(calls: Sequence[Call], timeout_s: float) -> None:
    """Wait until one of some calls is done, whatever its answer is, for at most `timeout_s` seconds.

    All calls are of the same connection, or are done. With 0, only what has arrived already is read.
    """
    if calls and not any(call.is_done for call in calls):
        calls[0]._connection.read_any(calls, time.monotonic() + timeout_s)


class Connection:
    """One socket to a name server or a broker.

    Parameters
    ----------
    address : str
        `host:port`, or `[host]:port` with an IPv6 address.
    settings : RemotingSettings

    Raises
    ------
    StoreUnavailableError
        Nobody listens at the address, or TLS fails.
    """

    def __init__(self, address: str, settings: RemotingSettings) -> None:
        self.address = address
        self._settings = settings
        self._credentials = Credentials.read(settings.credentials_file) if settings.credentials_file else None
        self._opaques = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._sending, self._turn = threading.Lock(), threading.Condition()
        self._has_reader = False
        self._head = bytearray(SIZE_BYTES)
        self._frame: bytearray | None = None
        self._filled = 0
        self._broken: Exception | None = None
        self._socket = self._connected()

    def _connected(self) -> socket.socket:
        host, port = host_and_port(self.address)
        try:
            plain = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        except OSError as error:
            pass_on(error)
            raise StoreUnavailableError(f"{self.address}: no connection: {error}") from error

        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                plain.setsockopt(socket.IPPROTO_TCP, option, value)
            if not self._settings.use_tls:
                return plain
            return tls_context(self._settings).wrap_socket(plain, server_hostname=host)
        except (OSError, ssl.SSLError) as error:
            plain.close()
            pass_on(error)
            raise StoreUnavailableError(f"{self.address}: no connection: {error}") from error
        except BaseException:
            plain.close()
            raise

    @property
    def is_broken(self) -> bool:
        """Whether it can be used no longer."""
        return self._broken is not None

    def is_idle(self) -> bool:
        """Whether it works, and no request is under way. What has arrived is read."""
        while self._broken is None and not self._calls and self._has_arrived():
            with self._turn:
                self._take_turn(_SHORTEST_S)
        return self._broken is None and not self._calls and self._frame is None and not self._filled

    # ---- requests

    def send(
        self, code: int, fields: Mapping[str, object], body: bytes | memoryview = b"", *, oneway: bool = False
    ) -> Call:
        """Write a request.

        Parameters
        ----------
        oneway : bool
            Nobody answers: the call is done when the request is written.

        Raises
        ------
        StoreUnavailableError
            The connection broke. The request may have arrived, or not.
        """
        texts = texts_of(fields)
        if self._credentials is not None:
            texts = self._credentials.signed(texts, body)

        opaque = next(self._opaques) % _OPAQUE_LIMIT
        call = Call(self, opaque)
        frame = Frame(code, opaque, texts, body, ONEWAY_FLAG if oneway else 0)
        if not oneway:
            self._calls[opaque] = call
        self._write(frame)
        if oneway:
            call.end(Answer(codes.SUCCESS, "", {}, b"", self.address))
        return call

    def _write(self, frame: Frame) -> None:
        pieces = packed(frame, self._settings.serialization)
        try:
            with self._sending:
                if self._broken is None:
                    self._socket.settimeout(ANSWER_TIMEOUT_S)
                    for piece in pieces:
                        self._socket.sendall(piece)
        except BaseException as error:
            self._break(error)  # a frame of which a part was sent leaves nothing to go on with
            if not isinstance(error, OSError) or is_of_handler(error):
                raise
        if self._broken is not None:
            raise self._broken

    # ---- answers

    def read_until(self, call: Call, until_s: float, timeout_s: float) -> None:
        """Read frames until a call is done.

        Raises
        ------
        StoreUnavailableError
            The time is over. An answer that arrives later is dropped.
        """
        with self._turn:
            while not call.is_done:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    self._calls.pop(call.opaque, None)
                    raise StoreUnavailableError(f"{self.address}: no answer within {timeout_s:g} s")
                self._take_turn(left_s)

    def read_any(self, calls: Sequence[Call], until_s: float) -> None:
        """Read frames until one of some calls is done, or the time is over and nothing more has arrived."""
        with self._turn:
            while not any(call.is_done for call in calls):
                left_s = until_s - time.monotonic()
                if left_s <= 0 and (self._has_reader or not self._has_arrived()):
                    return
                self._take_turn(max(left_s, _SHORTEST_S))

    def _has_arrived(self) -> bool:
        """Whether there is something to read."""
        try:
            if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                return True
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed meanwhile: reading says so
            return True

    def _take_turn(self, timeout_s: float) -> None:
        """Read on, or wait for the thread that does; the caller holds the turn."""
        if self._has_reader:
            self._turn.wait(timeout_s)
            return

        self._has_reader = True
        self._turn.release()
        try:
            self._read(timeout_s)
        finally:
            self._turn.acquire()
            self._has_reader = False
            self._turn.notify_all()

    def forget(self, call: Call) -> None:
        """Drop the answer of a call when it arrives."""
        self._calls.pop(call.opaque, None)

    def _read(self, timeout_s: float) -> None:
        """Read on for at most some time, and give a frame that is complete to its call. What was read is kept."""
        try:
            self._socket.settimeout(timeout_s)
            buffer = self._head if self._frame is None else self._frame
            count = self._socket.recv_into(memoryview(buffer)[self._filled :])
            if not count:
                raise ConnectionResetError("the other side closed the connection")

            self._filled += count
            if self._frame is not None:
                self._take_frame(self._frame)
            if self._frame is None and self._filled == SIZE_BYTES:
                self._begin_frame()
        except BaseException as error:
            of_handler = is_of_handler(error)
            if isinstance(error, TimeoutError) and not of_handler:
                return
            self._break(error)  # nobody knows where the next frame begins: bytes may have arrived and not been counted
            if of_handler or not isinstance(error, OSError | ValueError):
                raise

    def _begin_frame(self) -> None:
        """Make room for the frame whose size has come, and for the size of the next one."""
        size = int.from_bytes(self._head, "big")
        if not SIZE_BYTES <= size <= FRAME_LIMIT:
            self._break(
                ProtocolError(
                    f"{self.address}: found a frame of {size:,} bytes; allowed are frames of RocketMQ's remoting "
                    f"protocol up to {FRAME_LIMIT:,}. Is this the address of a name server or a broker, and does it "
                    f"expect TLS?"
                )
            )
            return
        self._frame, self._filled = bytearray(size + SIZE_BYTES), 0

    def _take_frame(self, buffer: bytearray) -> None:
        """Give the frame to its call if it is complete."""
        size = len(buffer) - SIZE_BYTES
        if self._filled < size:
            return
        self._filled -= size
        self._head[: self._filled] = buffer[size : size + self._filled]
        self._frame = None
        try:
            self._receive(unpacked(memoryview(buffer)[:size]))
        except ProtocolError as error:
            self._break(error)

    def _receive(self, frame: Frame) -> None:
        if frame.is_answer:
            call = self._calls.pop(frame.opaque, None)  # None: it was given up
            if call is not None:
                call.end(Answer(frame.code, frame.remark, frame.fields, frame.body, self.address))
        elif not frame.flag & ONEWAY_FLAG:
            with contextlib.suppress(StoreUnavailableError):  # every call that is under way fails then
                refusal = Frame(codes.REQUEST_CODE_NOT_SUPPORTED, frame.opaque, flag=ANSWER_FLAG)
                self._write(refusal)

    # ---- the end

    def _break(self, error: BaseException) -> None:
        """Fail all that is under way: no answer can arrive any more."""
        if self._broken is None:
            self._broken = (
                error
                if isinstance(error, ProtocolError | ConfigError)
                else StoreUnavailableError(
                    f"{self.address}: the connection broke: {str(error) or type(error).__name__}"
                )
            )
        with contextlib.suppress(OSError):
            # A thread that waits for an answer wakes up. TLS's own method takes away what that thread reads with.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()
        while self._calls:
            with contextlib.suppress(KeyError):  # another thread was faster
                _, call = self._calls.popitem()
                call.end(None, self._broken)

    def close(self) -> None:
        """Close the socket. What is under way fails."""
        self._break(ConnectionAbortedError("it was closed here"))
