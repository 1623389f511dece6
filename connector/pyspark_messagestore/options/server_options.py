"""The options of source and sink that say how the server of a store is reached."""

from __future__ import annotations

from dataclasses import dataclass

from messagestore import ConfigError
from messagestore.spi import Location
from pyspark_messagestore.options.option import option
from pyspark_messagestore.options.values import DURATION, TEXT


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What `SourceOptions` and `SinkOptions` have in common."""

    token_file: str | None = option(
        "tokenFile",
        TEXT,
        None,
        "With the URL of a served store as path: the file with the token that is sent to the server. The driver and "
        "all tasks read it when they connect, so it may be replaced while a query runs.",
        shown="`MESSAGESTORE_TOKEN_FILE` of the driver's environment, else none",
    )
    ca_file: str | None = option(
        "caFile",
        TEXT,
        None,
        "With an https URL as path: the certificates (PEM) of the authorities that may have signed the server's.",
        shown="`MESSAGESTORE_CA_FILE` of the driver's environment, else those of the system",
    )
    cert_file: str | None = option(
        "certFile",
        TEXT,
        None,
        "With an https URL as path: the client's own certificate (PEM), if the server asks for one.",
        shown="`MESSAGESTORE_CERT_FILE` of the driver's environment, else none",
    )
    key_file: str | None = option(
        "keyFile",
        TEXT,
        None,
        "The key (PEM, without a password) of `certFile`. Without this option, that file has both.",
        shown="`MESSAGESTORE_KEY_FILE` of the driver's environment, else none",
    )
    retry_timeout: float | None = option(
        "retryTimeout",
        DURATION,
        None,
        "With the URL of a served store as path: how long a request is sent again if the server does not answer, or is "
        "busy or being restarted.",
        shown="`30s`",
    )

    def located(self, path: Location) -> Location:
        """The store at a path, with how its server is reached."""
        return path.reached(
            self.retry_timeout,
            token_file=self.token_file,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
        )

    def check_server(self, path: Location) -> None:
        """Refuse options about a server without a server.

        Raises
        ------
        ConfigError
        """
        options = {
            "tokenFile": self.token_file,
            "caFile": self.ca_file,
            "certFile": self.cert_file,
            "keyFile": self.key_file,
            "retryTimeout": self.retry_timeout,
        }
        for name, value in options.items():
            if value is not None and not path.is_remote:
                raise ConfigError(
                    f"option {name}: found together with the folder {path}; allowed is the URL of a store that is "
                    f"served, such as https://host:port. Give one as path, or leave the option out",
                    key=name,
                    value=value,
                )
        if self.key_file is not None and self.cert_file is None:
            raise ConfigError(
                "option keyFile: found without certFile. Give the certificate of the key, too, or leave the key out",
                key="keyFile",
                value=self.key_file,
            )
