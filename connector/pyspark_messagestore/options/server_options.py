"""The options of source and sink that say how the server of a store is reached."""

from __future__ import annotations

from dataclasses import dataclass

from messagestore import ConfigError
from messagestore.spi import Location
from pyspark_messagestore.options.option import option
from pyspark_messagestore.options.values import BOOLEAN, DURATION, TEXT


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
        "With an https URL as path, or with useTLS: the certificates (PEM) of the authorities that may have signed the "
        "server's.",
        shown="`MESSAGESTORE_CA_FILE` of the driver's environment, else those of the system",
    )
    cert_file: str | None = option(
        "certFile",
        TEXT,
        None,
        "With an https URL as path, or with useTLS: the client's own certificate (PEM), if the server asks for one.",
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
        "With the URL of a served store, or rocketmq:// as path: how long a request is sent again if the server does "
        "not answer, or is busy or being restarted.",
        shown="`MESSAGESTORE_RETRY_TIMEOUT` of the driver's environment, else `30s`",
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

        if self.token_file is not None and path.is_cluster:
            raise ConfigError(
                f"option tokenFile: found together with {path}. Brokers know no tokens: give credentialsFile, or leave "
                f"the option out",
                key="tokenFile",
                value=self.token_file,
            )
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


@dataclass(frozen=True, slots=True)
class BrokerOptions(ServerOptions):
    """How RocketMQ's name servers and brokers are reached, besides."""

    credentials_file: str | None = option(
        "credentialsFile",
        TEXT,
        None,
        "With rocketmq:// as path: a file with `accessKey` and `secretKey`, as in RocketMQ's `conf/tools.yml`, with "
        "which requests are signed (ACL 1.0 and 2.0). The driver and all tasks read it when they connect.",
        shown="`MESSAGESTORE_CREDENTIALS_FILE` of the driver's environment, else none",
    )
    use_tls: bool | None = option(
        "useTLS",
        BOOLEAN,
        None,
        "With rocketmq:// as path: encrypt the connections to name servers and brokers.",
        shown="`false`",
    )
    check_host_name: bool | None = option(
        "checkHostName",
        BOOLEAN,
        None,
        "With useTLS: whether a broker's certificate must name the address under which the broker is registered. With "
        "false, a certificate that an authority of caFile has signed is enough.",
        shown="`true`",
    )

    def located(self, path: Location) -> Location:
        """The store at a path, with how its server or its brokers are reached."""
        return ServerOptions.located(self, path).reached_by(
            **{
                name: value
                for name, value in (
                    ("credentials_file", self.credentials_file),
                    ("use_tls", self.use_tls),
                    ("check_host_name", self.check_host_name),
                )
                if value is not None
            }
        )

    def check_brokers(self, path: Location) -> None:
        """Refuse options about brokers without brokers.

        Raises
        ------
        ConfigError
        """
        of_brokers: dict[str, object] = {
            "credentialsFile": self.credentials_file,
            "useTLS": self.use_tls,
            "checkHostName": self.check_host_name,
        }
        for name, asked in of_brokers.items():
            if asked is not None and not path.is_cluster:
                raise ConfigError(
                    f"option {name}: found together with {path}; allowed is the address of RocketMQ's name servers, "
                    f"such as rocketmq://host:port. Give one as path, or leave the option out",
                    key=name,
                    value=asked,
                )
