"""How name servers and brokers are reached: plain values, which travel to tasks."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass

from messagestore.errors import ConfigError

JSON, ROCKETMQ = "JSON", "ROCKETMQ"
SERIALIZATIONS = (JSON, ROCKETMQ)
_HOST = re.compile(r"[\w.:%-]+")


@dataclass(frozen=True, slots=True)
class RemotingSettings:
    """How name servers and brokers are reached.

    Secrets are in files that each process reads when it connects.

    Parameters
    ----------
    credentials_file : str
        A file with `accessKey` and `secretKey`; empty: requests are not signed.
    use_tls : bool
        Whether connections are encrypted.
    ca_file : str
        The certificates that a broker's is checked against; empty: those of the system.
    cert_file, key_file : str
        The client's own certificate and its key. Without `key_file`, `cert_file` has both.
    check_host_name : bool
        Whether a broker's certificate must name its host. RocketMQ's own clients do not look at the name.
    retry_timeout_s : float
        For how long a request is repeated while the broker is busy or does not answer.
    serialization : str
        How the headers of requests are written: "JSON" or "ROCKETMQ". A broker answers alike.
    """

    credentials_file: str = ""
    use_tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    check_host_name: bool = True
    retry_timeout_s: float = 30.0
    serialization: str = JSON

    def file_states(self) -> tuple[tuple[int, int, int] | None, ...]:
        """A value that changes when one of the files changes. Connections read them when they are made."""
        return tuple(map(_state_of, (self.credentials_file, self.ca_file, self.cert_file, self.key_file)))


def _state_of(name: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(name)
    except OSError:  # there is none; connecting will say what is wrong with it
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def tls_context(settings: RemotingSettings) -> ssl.SSLContext:
    """How the certificate of a server is checked, and which one the client shows.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    context.check_hostname = settings.check_host_name
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file or None)
    return context


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`; an IPv6 address may stand in brackets.

    Raises
    ------
    ConfigError
        It is something else.
    """
    host, colon, port = address.strip().rpartition(":")
    host = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not colon or not _HOST.fullmatch(host) or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"address: found {address!r}; allowed is host:port, with an IPv6 address as [address]:port",
            key="path",
            value=address,
        )
    return host, int(port)
