"""The certificates and tokens between Spark and a store on another host, replaced while a query runs.

new token            the server knows both for a while, so no query may fail. The file of the clients is written as `cp`
                     writes it: it is empty for a moment
new certificate      the same: clients trust both for a while
expired certificate  new connections are refused by the client, until there is another one
wrong token          requests are refused by the server, until the right one is there again
"""

from __future__ import annotations

import contextlib
import http.client
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from tls_files import certificate, expired, replace, token_line

_SEEN_S = 120.0
_EMPTY_S = 0.1


class Secrets:
    """The files of both sides.

    Parameters
    ----------
    folder : Path
    port : int
        Where the server listens, on the loopback address.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._token_number = self._cert_number = 0
        self._token, self._tokens = folder / "token", folder / "tokens"
        self._trusted, self._cert, self._key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        self._made = certificate(folder, "cert-0")
        self._trust(self._made[0])
        self._show(*self._made)
        self._accept(0)
        replace(self._token, "token-0")

    @property
    def options(self) -> dict[str, str]:
        """The options of a client."""
        return {"tokenFile": str(self._token), "caFile": str(self._trusted)}

    @property
    def arguments(self) -> list[str]:
        """The arguments of the server."""
        secrets = {"--cert-file": self._cert, "--key-file": self._key, "--token-file": self._tokens}
        return [str(word) for pair in secrets.items() for word in pair]

    def act(self, kind: str) -> None:
        """Replace what a fault says, and return when the server has noticed."""
        if kind == "new token":
            self._token_number += 1
            self._accept(self._token_number - 1, self._token_number)
            _until(lambda: self._status() == 200)
            _write(self._token, f"token-{self._token_number}")
            self._accept(self._token_number)
        elif kind == "new certificate":
            before = self._made[0]
            self._cert_number += 1
            self._made = certificate(self._folder, f"cert-{self._cert_number}")
            _write(self._trusted, Path(before).read_text() + Path(self._made[0]).read_text())
            self._show(*self._made)
            _until(lambda: self._shown() == _der(self._made[0]))
            self._trust(self._made[0])
        elif kind == "expired certificate":
            old = expired(*self._made)
            self._trust(old)  # it is another certificate, and clients would say that they do not know it
            self._show(old, self._made[1])
            _until(lambda: self._shown() == _der(old))
        elif kind == "wrong token":
            replace(self._token, "another-token")
        else:
            raise ValueError(kind)

    def heal(self) -> None:
        """Put right what made requests fail, if anything did."""
        replace(self._token, f"token-{self._token_number}")
        if self._cert.read_bytes() != Path(self._made[0]).read_bytes():
            self._trust(self._made[0])
            self._show(*self._made)
            _until(lambda: self._shown() == _der(self._made[0]))

    def _accept(self, *numbers: int) -> None:
        replace(self._tokens, *(token_line("spark", "write", f"token-{number}") for number in numbers))

    def _trust(self, *paths: str) -> None:
        replace(self._trusted, *(Path(path).read_text() for path in paths))

    def _show(self, cert: str, key: str) -> None:
        for path, made in ((self._key, key), (self._cert, cert)):
            shutil.copyfile(made, f"{path}.new")
            Path(f"{path}.new").replace(path)

    def _status(self) -> int:
        """What the server answers to the newest token."""
        with contextlib.closing(_connection(self._port)) as connection:
            headers = {"Messagestore-Protocol": "1-1", "Authorization": f"Bearer token-{self._token_number}"}
            connection.request("POST", "/v1/hello", b"{}", headers)
            return connection.getresponse().status

    def _shown(self) -> bytes:
        """The certificate that the server shows to a new connection."""
        with contextlib.closing(_connection(self._port)) as connection:
            connection.connect()
            assert isinstance(connection.sock, ssl.SSLSocket)
            return connection.sock.getpeercert(binary_form=True) or b""


def _write(path: Path, text: str) -> None:
    path.write_text("")
    time.sleep(_EMPTY_S)
    path.write_text(text)


def ready(port: int) -> bool:
    """Whether a server is there, and ready."""
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(_connection(port)) as connection:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    return False


def _connection(port: int) -> http.client.HTTPSConnection:
    """A connection that takes any certificate: it asks which one there is."""
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=ssl._create_unverified_context())


def _der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


def _until(fact: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _SEEN_S
    while not fact():
        assert time.monotonic() < end_s, "the server does not read its files again"
        time.sleep(0.05)
