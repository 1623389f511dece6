"""Where a store is: a folder of this host, the URL of a store that another host serves, or RocketMQ's brokers."""

from __future__ import annotations

import os
import re
import urllib.parse
from dataclasses import dataclass, replace
from typing import Any

from messagestore.errors import ConfigError
from messagestore.format.config import duration_s
from messagestore.remoting.settings import RemotingSettings, host_and_port

ROCKETMQ = "rocketmq"
"""The scheme of brokers: `rocketmq://ns1:9876;ns2:9876`, with the addresses of name servers."""
_LISTED = (f"{ROCKETMQ}+http", f"{ROCKETMQ}+https")
"""Brokers, too: the rest is the URL of a server that lists name servers (RocketMQ's `rocketmq.namesrv.domain`)."""
_LIST_PATH = "/rocketmq/nsaddr"
"""Where RocketMQ's clients ask such a server."""
OPENERS = {
    **dict.fromkeys(("http", "https"), "messagestore.spi.remote:REMOTE_STORES"),
    ROCKETMQ: "messagestore.spi.rocketmq:ROCKETMQ_STORES",
}
"""What opens the stores of a scheme: the module and the name of its `Stores`, as `module:name`. It is imported when a
store is opened, so nobody else needs what it imports.
"""

_URL = re.compile(r"([A-Za-z][\w+.-]*):")
_BROKER = re.compile(r"[\w.%-]*")
_VARIABLES = {
    "token_file": "MESSAGESTORE_TOKEN_FILE",
    "ca_file": "MESSAGESTORE_CA_FILE",
    "cert_file": "MESSAGESTORE_CERT_FILE",
    "key_file": "MESSAGESTORE_KEY_FILE",
    "credentials_file": "MESSAGESTORE_CREDENTIALS_FILE",
}
_RETRY_TIMEOUT = "MESSAGESTORE_RETRY_TIMEOUT"


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How the server of a store is reached: plain values, which travel to tasks.

    Secrets are in files that each process reads when it connects, because Spark shows the options of a query in its
    plans.

    Parameters
    ----------
    token_file : str
        A file with the token; empty: none is sent.
    ca_file : str
        The certificates that the server's is checked against; empty: those of the system.
    cert_file, key_file : str
        The client's own certificate and its key, if the server asks for one. Without `key_file`, `cert_file` has both.
    retry_timeout_s : float
        For how long a request is sent again.
    credentials_file : str
        Brokers: a file with `accessKey` and `secretKey`; empty: requests are not signed.
    use_tls : bool
        Brokers: whether connections are encrypted. A URL says so itself.
    check_host_name : bool
        Brokers: whether the certificate of a broker must name its host.
    read_from : str
        Brokers: "master", or "slave" to ask the master only if no slave answers.
    group : str
        Brokers: the consumer group that pulls name; empty: one of this project.
    """

    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    retry_timeout_s: float = 30.0
    credentials_file: str = ""
    use_tls: bool = False
    check_host_name: bool = True
    read_from: str = "master"
    group: str = ""

    @classmethod
    def of(cls, retry_timeout_s: float | None = None, **files: str | bool | None) -> RemoteSettings:
        """Settings, of which those that are None come from the environment of this process.

        A certificate and its key come from the same place.

        Raises
        ------
        ConfigError
            The environment has a time that is none.
        """
        values: dict[str, Any] = {name: os.environ.get(variable, "") for name, variable in _VARIABLES.items()}
        if files.get("cert_file") is not None:
            values["key_file"] = ""
        values |= {name: value for name, value in files.items() if value is not None}
        if retry_timeout_s is None:
            text = os.environ.get(_RETRY_TIMEOUT, "")
            retry_timeout_s = duration_s(_RETRY_TIMEOUT, text) if text else cls().retry_timeout_s
        return cls(**values, retry_timeout_s=retry_timeout_s)

    def remoting(self) -> RemotingSettings:
        """How brokers and name servers are reached."""
        return RemotingSettings(
            credentials_file=self.credentials_file,
            use_tls=self.use_tls,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
            check_host_name=self.check_host_name,
            retry_timeout_s=self.retry_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Location:
    """Where a store is, in plain values; its text is what errors say.

    `os.fspath` gives the folder. It raises `ConfigError` for a URL, so nothing that needs the files takes one for a
    relative path.

    Parameters
    ----------
    text : str
        The folder, or the URL.
    scheme : str
        The scheme of the URL, in lower case; empty for a folder.
    settings : RemoteSettings
        How the server is reached.
    """

    text: str
    scheme: str = ""
    settings: RemoteSettings = RemoteSettings()

    @classmethod
    def of(cls, text: str) -> Location:
        """The location that a user has written down; a path becomes absolute, a URL of a file a path.

        A server is reached with the settings of the environment. `reached` gives others.

        Raises
        ------
        ConfigError
            It is not `location_words`.
        """
        path = re.sub(r"^file:(//(localhost)?(?=/))?", "", text.strip())
        url = _URL.match(path)
        scheme = "" if url is None else url[1].lower()
        if scheme in _LISTED:
            return cls(_checked_list(path), ROCKETMQ, RemoteSettings.of())
        if scheme in OPENERS:
            checked = _checked_brokers(path) if scheme == ROCKETMQ else _checked_url(path)
            return cls(checked, scheme, RemoteSettings.of())
        if not path or "\0" in path or path.startswith("~") or url is not None:
            raise _refused(text)
        return cls(os.path.abspath(path))

    def reached(self, retry_timeout_s: float | None = None, **files: str | bool | None) -> Location:
        """The same store with other settings; the parameters are those of `RemoteSettings.of`."""
        if not self.is_remote:
            return self
        return replace(self, settings=RemoteSettings.of(retry_timeout_s, **files))

    def reached_by(self, **settings: Any) -> Location:
        """The same store with some other settings of `RemoteSettings`."""
        return replace(self, settings=replace(self.settings, **settings))

    @property
    def is_cluster(self) -> bool:
        """Whether it is RocketMQ's brokers."""
        return self.scheme == ROCKETMQ

    @property
    def _list_url(self) -> str:
        """The URL of the server that lists the name servers of a cluster; empty: they are named here."""
        url = self.text.partition("#")[0]
        return url.removeprefix(f"{ROCKETMQ}+") if url.startswith(_LISTED) else ""

    @property
    def name_servers(self) -> str:
        """The addresses of the name servers of a cluster, or the URL of a server that lists them."""
        return self._list_url or self.text.partition("://")[2].partition("/")[0]

    @property
    def broker(self) -> str:
        """The name of the broker of a cluster that is meant; empty: all of them."""
        return self.text.partition("#")[2] if self._list_url else self.text.partition("://")[2].partition("/")[2]

    def of_broker(self, name: str) -> Location:
        """One broker of this cluster."""
        url = self._list_url
        text = f"{ROCKETMQ}+{url}#{name}" if url else f"{ROCKETMQ}://{self.name_servers}/{name}"
        return replace(self, text=text)

    @property
    def is_remote(self) -> bool:
        """Whether another host serves the store: its files are not there to be looked at."""
        return bool(self.scheme)

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        if self.is_remote:
            raise ConfigError(
                f"{self.text}: found the URL of a store that is served; allowed is the path of a folder, because this "
                f"needs the store's files. Run it on the host of the store",
                key="path",
                value=self.text,
            )
        return self.text


def location_words() -> str:
    """What `Location.of` takes, in words."""
    folder = (
        "the path of a folder on a local or mounted file system, written out (no ~, and no URI such as s3: or dbfs:)"
    )
    schemes = " or ".join(f"{scheme}://host:port" for scheme in sorted(OPENERS) if scheme != ROCKETMQ)
    served = f", or the URL of a store that is served ({schemes}, without user and query)" if schemes else ""
    brokers = f", or {ROCKETMQ}://host:port;host:port with name servers of RocketMQ" if ROCKETMQ in OPENERS else ""
    brokers += f", or {_LISTED[0]}://host:port{_LIST_PATH} with a server that lists them" if brokers else ""
    return f"{folder}{served}{brokers}"


def _checked_brokers(text: str) -> str:
    """The address of brokers: name servers, and perhaps the name of one broker."""
    address = text.partition("://")[2]
    if re.match(r"https?://", address, re.IGNORECASE):
        raise ConfigError(
            f"path: found {text!r:.200}, with the URL of a server that lists name servers (rocketmq.namesrv.domain); "
            f"allowed is {ROCKETMQ}+{address:.200}",
            key="location",
            value=text,
        )
    servers, _, broker = address.rstrip("/").partition("/")
    if not servers or not _BROKER.fullmatch(broker):
        raise _refused(text)
    try:
        for address in servers.split(";"):
            host_and_port(address)
    except ConfigError:
        raise _refused(text) from None
    return f"{ROCKETMQ}://{servers}" + (f"/{broker}" if broker else "")


def _checked_list(text: str) -> str:
    """The URL of a list of name servers, with RocketMQ's own path if it has none; perhaps `#` and a broker."""
    url, _, broker = text.partition("#")
    if not _BROKER.fullmatch(broker) or ";" in url:
        raise _refused(text)
    scheme, _, rest = _checked_url(url).partition("://")
    path = "" if "/" in rest else _LIST_PATH
    return f"{scheme.lower()}://{rest}{path}" + (f"#{broker}" if broker else "")


def _checked_url(text: str) -> str:
    """The URL without a slash at its end. What else it could carry would be shown in errors and in Spark's plans."""
    try:
        url = urllib.parse.urlsplit(text)
        wrong = not url.hostname or url.username or url.password or url.query or url.fragment or (url.port == 0)
    except ValueError:
        wrong = True
    if wrong or any(character.isspace() or character == "\0" for character in text):
        raise _refused(text)
    return text.rstrip("/")


def _refused(text: str) -> ConfigError:
    return ConfigError(f"path: found {text!r:.200}; allowed is {location_words()}", key="location", value=text)
