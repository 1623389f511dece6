"""HTTP connections to the server of a store, and what happens when it does not answer.

A connection belongs to the process that opened it: Spark's workers are forked, so connections are kept by process. The
name of the server is resolved at each connect, because the address of a pod changes. A request that failed because the
connection broke, or because the server was busy or is being restarted, is sent again after growing, spread pauses, for
as long as `retry_timeout_s` allows. All requests may be sent again: those that change the store are recognised.

Python's own client is used. It reads a body into memory that is there, and costs no package on the executors.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import socket
import ssl
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from messagestore.errors import (
    AccessDeniedError,
    BatchConflictError,
    CommitUnknownError,
    ConfigError,
    LostBatchesError,
    ProtocolError,
    QueryConflictError,
    StoreError,
    StoreUnavailableError,
    VersionRegressionError,
)
from messagestore.format.json_text import bounded_json
from messagestore.signal_handlers import is_of_handler
from messagestore.spi.location import RemoteSettings
from messagestore.spi.wire import failures, frames, values, versions

PREFIX = "/v1/"
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 60.0
"""A server that is at work says so every five seconds. One that is silent for this long is taken for dead, or for as
long as `retryTimeout`, if that is less."""
_LEAST_ANSWER_S = 10.0
SILENCE_S = 15.0
"""The same, for what the server shows every five seconds that it is at work on: that is sent again within a
`retryTimeout` of 30 s if the connection has lost its other end."""
HEAD_LIMIT = 64 * 1024 * 1024
FRAME_LIMIT = 2 * 1024 * 1024 * 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_IDLE_S = 20.0
"""A connection that was idle for longer is not used again: the server may be closing it."""
_TOLD_AFTER_S = 1.0
_TCP_CORK = getattr(socket, "TCP_CORK", None)
_AGAIN = (429, 503)
_LOST = (502, 504)
"""What a proxy answers that has lost the server, which may have done what it was asked for."""
_DECIDED = (BatchConflictError, LostBatchesError, QueryConflictError, VersionRegressionError)
"""Refusals of a store that has looked for the batch. Others, such as a lock that is held, do not say if it is there."""
_WRONG_TIMES = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
_UNKNOWN = "The batch may be in the log or not: commit it again, and it is recognised"
_ITS_HOSTS = "files, processes, commands and settings that are named here are those of its host"
_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")


class _AgainError(Exception):
    """A request that may be sent again.

    Parameters
    ----------
    reason : Exception
    pause_s : float
        The pause that the server asks for.
    """

    def __init__(self, reason: Exception, pause_s: float = 0.0) -> None:
        super().__init__(str(reason))
        self.reason, self.pause_s = reason, pause_s


class Link:
    """The connections of this process to one server. Thread-safe.

    Parameters
    ----------
    url : str
        `http://host:port` or `https://host:port`.
    settings : RemoteSettings
    """

    def __init__(self, url: str, settings: RemoteSettings) -> None:
        parsed = urllib.parse.urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname or parsed.path.strip("/") or parsed.query:
            raise ConfigError(
                f"path: found {url!r}; allowed is a folder, or the URL of a store's server, http://host:port or "
                f"https://host:port",
                key="path",
                value=url,
            )
        self.url, self.settings = url, settings
        self._host, self._tls = parsed.hostname, parsed.scheme == "https"
        self._port = parsed.port or (443 if self._tls else 80)
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._pid = os.getpid()

    @property
    def answer_timeout_s(self) -> float:
        """For how long a server may be silent."""
        return min(ANSWER_TIMEOUT_S, max(self.settings.retry_timeout_s, _LEAST_ANSWER_S))

    # ---- requests

    def call(self, verb: str, body: dict[str, Any]) -> Any:
        """Send a small request, and return the value of its answer."""
        text = to_text(body)

        def once(connection: Connection) -> Any:
            return connection.value(verb, text)

        return self.retried(verb, once)

    def retried(
        self,
        what: str,
        once: Callable[[Connection], _Found],
        *,
        unknown: bool = False,
        is_repeatable: bool = True,
    ) -> _Found:
        """Do something with a connection, again and again until it is done, fails for good, or time is over.

        Without `is_repeatable`, it is not done again once the request may have arrived.
        """
        deadline = Deadline(self)
        try:
            while True:
                with self.attempt(what, deadline, unknown=unknown, is_repeatable=is_repeatable) as connection:
                    return once(connection)
        except (StoreError, OSError) as error:
            if is_of_handler(error) or not (unknown and deadline.was_sent):
                raise
            if isinstance(error, (CommitUnknownError, *_DECIDED)):
                raise
            raise _after_silence(self.url, what, error) from error

    def attempt(self, what: str, deadline: Deadline, *, unknown: bool = False, is_repeatable: bool = True) -> Attempt:
        """One try, as a block that ends without an error if there shall be another one after it.

        Parameters
        ----------
        what : str
            The verb, for errors.
        deadline : Deadline
            When the time is over.
        unknown : bool
            Whether the request may have been carried out although there was no answer.
        is_repeatable : bool
            Whether it may be sent again after that.

        Raises
        ------
        StoreUnavailableError
            The time is over.
        CommitUnknownError
            The same, with `unknown`, after the request was sent at least once.
        """
        return Attempt(self, what, deadline, unknown=unknown, is_repeatable=is_repeatable)

    # ---- connections

    def connection(self) -> Connection:
        """A connection for one request: one that was kept, or a new one."""
        if self._pid != os.getpid():  # this is a forked child; the connections are its parent's
            self._idle, self._pid = [], os.getpid()
        while (kept := self._taken()) is not None:
            since_s, raw = kept
            if time.monotonic() - since_s < _IDLE_S:
                return Connection(self, raw, was_used=True)
            raw.close()
        return Connection(self, self._opened(), was_used=False)

    def _opened(self) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_TIMEOUT_S, context=_context(self.settings)
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)

    def forget(self) -> None:
        """Close the connections that are kept."""
        while (kept := self._taken()) is not None:
            kept[1].close()

    def _taken(self) -> tuple[float, http.client.HTTPConnection] | None:
        """A connection that was kept, for this thread alone; None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def keep(self, raw: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request."""
        if self._pid == os.getpid():
            self._idle.append((time.monotonic(), raw))

    def headers(self, request_id: str) -> dict[str, str]:
        """The headers of a request."""
        headers = {versions.HEADER: versions.words(), versions.REQUEST_ID: request_id}
        if self.settings.token_file:
            headers["Authorization"] = f"Bearer {_token(self.settings.token_file)}"
        return headers


class Attempt:
    """One try of a request; `Link.attempt` makes it."""

    def __init__(self, link: Link, what: str, deadline: Deadline, *, unknown: bool, is_repeatable: bool) -> None:
        self._link, self._what, self._deadline = link, what, deadline
        self._unknown, self._is_repeatable = unknown, is_repeatable
        self.connection: Connection | None = None

    def __enter__(self) -> Connection:
        self.connection = self._link.connection()
        return self.connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        connection = self.connection
        assert connection is not None
        if error is None or error is connection.refusal or isinstance(error, GeneratorExit):
            connection.done()
            if error is None:
                self._deadline.answered()
            return False

        connection.close()
        if is_of_handler(error):
            self._deadline.was_sent |= connection.was_sent
            return False
        if isinstance(error, ssl.SSLError) and (
            fault := _tls_fault(self._link.url, error, was_open=connection.was_sent)
        ):
            raise fault from error  # the server has refused the connection, and read nothing of a request
        self._deadline.was_sent |= connection.was_sent and not isinstance(error, _AgainError)
        if not isinstance(error, _AgainError | OSError | http.client.HTTPException) or isinstance(error, StoreError):
            return False
        self._wait_for_next(error, connection)
        return True

    def _wait_for_next(self, error: Exception, connection: Connection) -> None:
        """Wait until the request may be sent again; raises `StoreUnavailableError` if it may not, or time is over."""
        reason, asked_s = (error.reason, error.pause_s) if isinstance(error, _AgainError) else (error, 0.0)
        was_refused = isinstance(error, _AgainError)
        if self._deadline.was_sent and not was_refused and not self._is_repeatable:
            self._give_up(reason)
        silent_s = connection.timeout_s if isinstance(error, TimeoutError) and connection.was_sent else 0.0
        if connection.was_used and not was_refused:
            self._link.forget()  # the server has closed what was idle, or was restarted, or its host was
            if not silent_s and self._deadline.first():
                return
        if not self._deadline.wait(reason, asked_s, silent_s):
            self._give_up(reason, was_refused=was_refused)

    def _give_up(self, reason: Exception, *, was_refused: bool = False) -> None:
        unknown = self._unknown and self._deadline.was_sent
        found = "the server refused" if was_refused else "no answer to"
        end = _UNKNOWN if unknown else "Look at the server's log, and at the network between this host and the server"
        error = (CommitUnknownError if unknown else StoreUnavailableError)(
            f"{self._link.url}: {found} {self._what} for {self._deadline.waited_s:.0f} s (retryTimeout is "
            f"{self._link.settings.retry_timeout_s:g} s), at last: {_words(reason)}. {end}"
        )
        for note in getattr(reason, "__notes__", ()):  # the request, as the server's log names it
            error.add_note(note)
        raise error from reason


class Deadline:
    """Until when one request is sent again. The pauses grow, and are spread so that clients do not come all at once."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._begin_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._told = self._tried = False
        self.was_sent = False
        """Whether the request may have arrived."""

    @property
    def waited_s(self) -> float:
        """For how long there was no answer."""
        return 0.0 if self._begin_s is None else time.monotonic() - self._begin_s

    def first(self) -> bool:
        """Whether this is the first failure, which may be that of an old connection."""
        is_first, self._tried = not self._tried, True
        return is_first

    def wait(self, reason: Exception, asked_s: float, silent_s: float) -> bool:
        """Wait before the next try, after a server that was silent for some time; False: the time is over."""
        if self._begin_s is None:
            self._begin_s = time.monotonic() - silent_s
        left_s = self._link.settings.retry_timeout_s - self.waited_s
        if left_s <= 0:
            return False
        if not self._told and self.waited_s >= _TOLD_AFTER_S:
            self._told = True
            _log.warning("waiting for the store at %s: %s", self._link.url, _words(reason))
        time.sleep(min(left_s, max(asked_s, self._pause_s * random.uniform(0.5, 1.0))))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True

    def answered(self) -> None:
        """Begin anew: the server is there."""
        if self._told:
            _log.warning("the store at %s is there again after %.1f s", self._link.url, self.waited_s)
        self._begin_s, self._pause_s, self._told, self._tried = None, _FIRST_PAUSE_S, False, False


class Connection:
    """A connection while one request uses it."""

    def __init__(self, link: Link, raw: http.client.HTTPConnection, *, was_used: bool) -> None:
        self._link, self._raw, self.was_used = link, raw, was_used
        self.was_sent = False
        self.timeout_s = link.answer_timeout_s
        self._response: http.client.HTTPResponse | None = None
        self._headers = link.headers(uuid.uuid4().hex[:16])
        self.refusal: Exception | None = None
        """What the server said if it refused the request."""

    # ---- sending

    def value(self, verb: str, text: bytes) -> Any:
        """Send a request with a JSON body; return the value of its answer."""
        self._send(verb, text)
        return self.answered_value()

    def _send(self, verb: str, text: bytes) -> None:
        headers = {"Content-Type": "application/json", **self._headers}
        with self.together():
            self.was_sent = True
            self._raw.request("POST", PREFIX + verb, body=text, headers=headers)
        self._response = self._raw.getresponse()

    def _connect(self) -> None:
        if self._raw.sock is None:
            self._raw.connect()
        sock: socket.socket | None = self._raw.sock
        assert sock is not None
        sock.settimeout(self.timeout_s)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Connect, and let what is sent now leave together, where the system can: what arrives alone wakes the server.

        A connection on which something fails is closed, so it need not be released.
        """
        self._connect()
        if _TCP_CORK is not None:
            self._raw.sock.setsockopt(socket.IPPROTO_TCP, _TCP_CORK, 1)
        yield
        if _TCP_CORK is not None:
            self._raw.sock.setsockopt(socket.IPPROTO_TCP, _TCP_CORK, 0)

    def begin(self, verb: str) -> None:
        """Begin a request whose body is a stream of frames. Call it in `together`, with the first frames."""
        self.was_sent = True
        self._raw.putrequest("POST", PREFIX + verb)
        self._raw.putheader("Transfer-Encoding", "chunked")
        for name, value in self._headers.items():
            self._raw.putheader(name, value)
        self._raw.endheaders()

    def send(self, *chunks: list[memoryview], ends: bool = False) -> None:
        """Send frames, each as a chunk; `ends` says that they are the last ones of the body."""
        pieces = [piece for chunk in chunks for piece in frames.as_chunk(chunk)]
        frames.send(self._raw.sock, [*pieces, frames.LAST_CHUNK] if ends else pieces)

    def receive(self) -> None:
        """Receive the head of the answer, also of one that came before the body was sent."""
        self._response = self._raw.getresponse()

    # ---- receiving

    def answered_value(self) -> Any:
        """The value of an answer that is no stream."""
        return values.from_json(self._body()["value"], strict=False)

    def _body(self) -> dict[str, Any]:
        text = self._text(self._checked())
        try:
            answer = bounded_json(text.decode("utf-8"), frames.MOST_VALUES)
            if not isinstance(answer, dict) or "value" not in answer:
                raise ValueError("found no value")
        except ValueError as error:
            raise ProtocolError(f"{self._link.url}: the answer is not that of a store's server: {error}") from error
        return answer

    def _text(self, response: http.client.HTTPResponse) -> bytes:
        """The body of an answer that is no stream; not every server at an address is one of ours."""
        text = response.read(HEAD_LIMIT + 1)
        if len(text) > HEAD_LIMIT:
            raise ProtocolError(
                f"{self._link.url}: found an answer of more than {HEAD_LIMIT:,} bytes, which no store's server gives. "
                f"Give the URL of one"
            )
        if response.length:  # `read` with a size does not say that it was cut
            raise http.client.IncompleteRead(text, response.length)
        return text

    def _checked(self) -> http.client.HTTPResponse:
        """The response, if it is one of success; otherwise its error is raised."""
        response = self._response
        assert response is not None
        if response.length is None and not response.chunked:  # the last header is missing: the head was cut
            raise http.client.IncompleteRead(b"")
        if response.status == 200:
            versions.check(response.headers.get(versions.HEADER, ""), f"server at {self._link.url}")
            return response
        text = self._text(response)
        try:
            error = failures.from_json(bounded_json(text.decode("utf-8"), frames.MOST_VALUES)["error"])
        except (ValueError, TypeError, KeyError) as fault:
            words = f"answered {response.status} {response.reason}, and not as a store's server does"
            if response.status in _LOST:
                raise ConnectionError(words) from fault
            error = StoreUnavailableError(f"{self._link.url}: {words}")
        if response.status in _AGAIN:
            retry_after = response.headers.get("Retry-After", "")
            raise _AgainError(error, float(retry_after) if retry_after.isdecimal() else 0.0)
        raise self._refused(error)

    def _refused(self, error: Exception) -> Exception:
        error.add_note(f"store at {self._link.url}; {_ITS_HOSTS}")
        self.refusal = error
        return error

    def stream(self, verb: str, text: bytes, *, shows_life: bool = False) -> Iterator[frames.Frame]:
        """Send a request whose answer is a stream of frames, and return the frames, the last of which has `done`.

        Parameters
        ----------
        verb : str
        text : bytes
        shows_life : bool
            Whether the server says every few seconds that it is at work.

        Raises
        ------
        http.client.IncompleteRead, OSError
            The stream was cut.
        """
        if shows_life:
            self.timeout_s = min(self.timeout_s, SILENCE_S)
        self._send(verb, text)
        response = self._checked()

        def take(view: memoryview) -> None:
            at = 0
            while at < len(view):
                count = response.readinto(view[at:])
                if not count:
                    raise http.client.IncompleteRead(b"", len(view) - at)
                at += count

        while True:
            frame = frames.read(take, HEAD_LIMIT, FRAME_LIMIT, lambda _: None)
            if "error" in frame.head:
                response.read()
                raise self._refused(failures.from_json(frame.head["error"]))
            if "done" in frame.head:
                response.read()
                yield frame
                return
            if "alive" not in frame.head:
                yield frame

    def said_before(self) -> Exception | None:
        """What the server answered before the body was sent to its end; None if it has not."""
        try:
            self.receive()
            self._checked()
        except (_AgainError, StoreError) as error:
            return error
        except (OSError, http.client.HTTPException) as error:
            return error if error is self.refusal else None
        return None

    # ---- ending

    def last(self, verb: str, text: bytes) -> None:
        """Send a request, once, and give the connection back."""
        try:
            self.value(verb, text)
        finally:
            self.done()

    def done(self) -> None:
        """Give the connection back, if the answer was received to its end."""
        response = self._response
        if response is not None and response.isclosed() and self._raw.sock is not None and not response.will_close:
            self._link.keep(self._raw)
        else:
            self._raw.close()

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()


def to_text(body: dict[str, Any]) -> bytes:
    """The JSON of a request."""
    return json.dumps(values.to_json(body), separators=(",", ":")).encode("utf-8")


def _after_silence(url: str, what: str, error: StoreError | OSError) -> CommitUnknownError:
    """The error for what was sent, and whose answer does not say whether it was carried out."""
    unknown = CommitUnknownError(f"{url}: it is not known whether {what} was carried out: {error}. {_UNKNOWN}")
    for note in getattr(error, "__notes__", ()):
        unknown.add_note(note)
    return unknown


def _words(reason: BaseException) -> str:
    return str(reason) or type(reason).__name__


# ---- secrets

_contexts: dict[tuple[str, ...], tuple[object, ssl.SSLContext]] = {}
_MOST_TOKEN = 4096
_SETTLED_S, _SETTLING_S = 1.0, 0.02


def _context(settings: RemoteSettings) -> ssl.SSLContext:
    """The TLS settings, read again when a file has changed.

    Files that are being replaced may not fit together for a moment, so the settings before stay if the new ones cannot
    be used. A process that has none waits for that moment.
    """
    paths = (settings.ca_file, settings.cert_file, settings.key_file)
    before = _contexts.get(paths)

    def load() -> tuple[object, ssl.SSLContext]:
        stamps = tuple(_stamp(path) for path in paths if path)
        if before is not None and before[0] == stamps:
            return before
        return stamps, _new_context(settings)

    try:
        _contexts[paths] = load() if before is not None else _settled(load)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        if before is None:
            raise ConfigError(
                f"options caFile, certFile, keyFile: found {', '.join(path for path in paths if path)}, which cannot "
                f"be used ({words}); allowed are files in PEM form that the driver and all tasks can read, with a key "
                f"that fits its certificate and has no password",
                key="certFile" if settings.cert_file else "caFile",
            ) from None
        _log.warning("the certificates of before stay in use, because %s cannot be used: %s", paths, words)
        return before[1]
    return _contexts[paths][1]


def _stamp(path: str) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ino, status.st_size


def _new_context(settings: RemoteSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.key_file and not settings.cert_file:
        raise ValueError("there is a key without a certificate")
    if settings.cert_file:
        # An empty password: OpenSSL would ask the terminal for the one of an encrypted key.
        context.load_cert_chain(settings.cert_file, settings.key_file or None, password="")
    return context


def _token(path: str) -> str:
    try:
        return _settled(lambda: _read_token(path))
    except OSError as error:
        raise ConfigError(
            f"option tokenFile: found {path!r}, which cannot be read ({error.strerror}); allowed is a file with a "
            f"token, which the driver and all tasks can read",
            key="tokenFile",
            value=path,
        ) from None
    except ValueError:
        raise ConfigError(
            f"option tokenFile: found {path!r}, which has no token; allowed is one line of at most {_MOST_TOKEN:,} "
            f"printable characters without blanks",
            key="tokenFile",
            value=path,
        ) from None


def _read_token(path: str) -> str:
    with open(path, "rb") as file:
        token = file.read(_MOST_TOKEN + 1).strip().decode("latin-1")
    if not token or len(token) > _MOST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError
    return token


def _settled(load: Callable[[], _Found]) -> _Found:
    """What some files have. If they cannot be used, they are read again for a moment.

    `cp` empties a file before it writes it, and files that belong together are replaced one after the other.
    """
    until_s = time.monotonic() + _SETTLED_S
    while True:
        try:
            return load()
        except (OSError, ValueError):
            if time.monotonic() >= until_s:
                raise
        time.sleep(_SETTLING_S)


def _tls_fault(url: str, error: ssl.SSLError, *, was_open: bool) -> StoreError | None:
    """What is wrong if another try cannot help; None if one may."""
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = (
            "Give the certificate of its authority as option caFile (--ca-file), or in MESSAGESTORE_CA_FILE, and ask "
            "for the host by the name that the certificate has"
        )
        if error.verify_code in _WRONG_TIMES:
            remedy = "Replace the certificate, which the server reads again, or set the clock of this host"
        return StoreUnavailableError(
            f"{url}: the server's certificate is not trusted ({error.verify_message}). {remedy}"
        )
    reason = error.reason or ""
    if not was_open and reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"):
        return StoreUnavailableError(f"{url}: the server does not speak TLS. Give the URL that its log shows")
    if "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")):
        return AccessDeniedError(
            f"{url}: the server does not accept the certificate of this client ({reason.lower().replace('_', ' ')}). "
            f"Give one that its --client-ca-file trusts as certFile and keyFile"
        )
    return None


# ---- one link per process and server

_links: dict[tuple[str, RemoteSettings], Link] = {}


def link_to(url: str, settings: RemoteSettings) -> Link:
    """The link of this process to a server."""
    key = (url, settings)
    link = _links.get(key)
    if link is None:
        link = _links[key] = Link(url, settings)
    return link
