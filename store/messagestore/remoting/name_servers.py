"""Where the name servers are: at addresses that somebody gives, or on a list that an HTTP server has.

    NameServers("ns1:9876;ns2:9876", settings)
    NameServers("http://lists:8080/rocketmq/nsaddr", settings)      GET answers `10.0.0.1:9876;10.0.0.2:9876`

RocketMQ's clients and brokers find such a list by `rocketmq.namesrv.domain` (common/namesrv/DefaultTopAddressing.java).
It is asked for when a name server is needed first, every `LIST_S` from then on, and at once when no name server
answers. While the HTTP server gives no list, the name servers of its last one are asked.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator

from messagestore.errors import ConfigError, StoreUnavailableError
from messagestore.remoting.settings import RemotingSettings, host_and_port, tls_context
from messagestore.signal_handlers import pass_on

LIST_S = 30.0
"""How long a list is used before the server is asked for it again. RocketMQ's clients ask every 120 s."""
ANSWER_TIMEOUT_S = 3.0
_SIZE_LIMIT = 64 * 1024
_IS_URL = re.compile(r"https?://", re.IGNORECASE)
_log = logging.getLogger(__name__)


class NameServers:
    """The addresses of name servers. Several threads may ask for them.

    Parameters
    ----------
    text : str
        `host:port`, several with semicolons between them; or the `http:` or `https:` URL of a list of them.
    settings : RemotingSettings
        The certificates that the server of the list is checked against are those of brokers.

    Raises
    ------
    ConfigError
        An address is not `host:port`.
    """

    def __init__(self, text: str, settings: RemotingSettings) -> None:
        self.text = text.strip()
        self._settings = settings
        self._is_listed = bool(_IS_URL.match(self.text))
        self._addresses: tuple[str, ...] = () if self._is_listed else _addresses_in(self.text)
        self._asked_s: float | None = None
        self._is_old = False
        self._lock = threading.Lock()

    def __str__(self) -> str:
        """What errors say."""
        known = ";".join(self._addresses)
        return f"{known or 'none'} (the list of {self.text})" if self._is_listed else known

    def addresses(self) -> tuple[str, ...]:
        """The addresses, `host:port` each; a list that is too old is asked for again.

        Raises
        ------
        StoreUnavailableError
            There is no list, and there was none before.
        """
        if not self._is_listed:
            return self._addresses
        with self._lock:
            if self._asked_s is None or time.monotonic() - self._asked_s >= LIST_S:
                self._ask()
            return self._addresses

    def gave_no_answer(self) -> None:
        """Let the next `addresses` ask for the list: none of the name servers answers."""
        self._asked_s = None

    def _ask(self) -> None:
        try:
            self._addresses, self._is_old = self._list(), False
        except StoreUnavailableError as error:
            if not self._addresses:
                raise
            if not self._is_old:
                self._is_old = True
                _log.warning("%s. The name servers of its last list are asked: %s", error, ";".join(self._addresses))
        self._asked_s = time.monotonic()

    def _list(self) -> tuple[str, ...]:
        """The list that the server has now."""
        text = self._fetched().strip()
        line = text.splitlines()[0] if text else ""  # RocketMQ's clients read one line, too
        try:
            return _addresses_in(line)
        except ConfigError:
            raise StoreUnavailableError(
                f"{self.text}: found the list of name servers {line!r:.200}; allowed is host:port;host:port. Is this "
                f"the URL that rocketmq.namesrv.domain stands for, which ends with /rocketmq/nsaddr?"
            ) from None

    def _fetched(self) -> str:
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.connect()
                with _ended_in_time(connection.sock):
                    connection.request("GET", urllib.parse.urlsplit(self.text).path or "/")
                    with connection.getresponse() as answer:
                        data = answer.read(_SIZE_LIMIT + 1)
                        if answer.length and len(data) <= _SIZE_LIMIT:
                            raise http.client.IncompleteRead(data, answer.length)
        except (OSError, http.client.HTTPException) as error:
            pass_on(error)
            raise StoreUnavailableError(f"{self.text}: no list of name servers: {str(error) or repr(error)}") from error

        if answer.status != http.client.OK:
            raise StoreUnavailableError(
                f"{self.text}: no list of name servers: the server answered {answer.status} {answer.reason}"
            )
        if len(data) > _SIZE_LIMIT:
            raise StoreUnavailableError(
                f"{self.text}: found a list of name servers of more than {_SIZE_LIMIT:,} bytes, which is the limit"
            )
        return data.decode("utf-8", "replace")

    def _connection(self) -> http.client.HTTPConnection:
        url = urllib.parse.urlsplit(self.text)
        host = url.hostname or ""
        if url.scheme.lower() == "http":
            return http.client.HTTPConnection(host, url.port, timeout=ANSWER_TIMEOUT_S)
        context = tls_context(self._settings)
        return http.client.HTTPSConnection(host, url.port, timeout=ANSWER_TIMEOUT_S, context=context)


@contextlib.contextmanager
def _ended_in_time(sock: socket.socket) -> Iterator[None]:
    """End a connection whose server needs too long: a time-out of the socket begins anew with each byte.

    Raises
    ------
    TimeoutError
        The connection was ended.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        with contextlib.suppress(OSError):
            # What waits for an answer wakes up. TLS's own method takes away what it reads with.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(ANSWER_TIMEOUT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        pass_on(error)
        if not is_late.is_set() and not isinstance(error, TimeoutError):
            raise
        is_late.set()
    finally:
        timer.cancel()
    if is_late.is_set():  # what was read may be a part only
        raise TimeoutError(f"no complete answer within {ANSWER_TIMEOUT_S:g} s")


def _addresses_in(text: str) -> tuple[str, ...]:
    addresses = tuple(address.strip() for address in text.split(";") if address.strip())
    for address in addresses:
        host_and_port(address)
    if not addresses:
        raise ConfigError("name servers: found none; allowed is host:port;host:port", key="path")
    return addresses
