"""Where commands listen, and the address at which Prometheus finds a store's figures."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from messagestore import ConfigError, StoreConfig
from messagestore.spi import Location
from pyspark_messagestore.requirements import install_extra

METRICS_ADDRESS = "127.0.0.1:9557"


def address_of(text: str, example: str) -> tuple[str, int]:
    """The host and the port that the option --listen names.

    Raises
    ------
    ConfigError
        The text is not HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen: found {text!r}; allowed is HOST:PORT, for example {example}", key="--listen", value=text
        )
    return host.strip("[]"), int(port)


class Look:
    """What one look at a store found. A registry would look again for each question.

    Parameters
    ----------
    metrics : iterable of Metric
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Any]:
        """The metrics, as a registry gives them."""
        return self._metrics

    @property
    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """The name, the labels and the value of each figure."""
        return [tuple(sample[:3]) for metric in self._metrics for sample in metric.samples]


class Figures:
    """A store's figures for Prometheus.

    Parameters
    ----------
    root : Location
    checkpoints : sequence of str
        The folders of queries that read the store.
    config : StoreConfig

    Raises
    ------
    ModuleNotFoundError
        The package `prometheus_client` is not installed.
    """

    def __init__(self, root: Location | str, checkpoints: Sequence[str], config: StoreConfig | None = None) -> None:
        self._library: Any = importlib.import_module("prometheus_client")
        from pyspark_messagestore.monitoring.metrics import registry_of

        self.registry: Any = registry_of(root, checkpoints, config)

    def look(self) -> Look:
        """Read all figures once."""
        return Look(self.registry.collect())

    def text(self, look: Look | None = None) -> bytes:
        """All figures, or those of a look, in Prometheus' text format."""
        return bytes(self._library.generate_latest(look or self.registry))

    @contextmanager
    def listening(self, listen: str) -> Iterator[str]:
        """Answer Prometheus at an address; yields the URL.

        Raises
        ------
        ConfigError
            It is no address, or not one that can be listened on.
        """
        host, port = address_of(listen, METRICS_ADDRESS)
        try:
            server, thread = self._library.start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(
                f"--listen: {listen} cannot be listened on: {error.strerror or error}. Give an address of this host "
                "and a port that is free",
                key="--listen",
                value=listen,
            ) from None

        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def needed_figures(command: str, root: Location | str, checkpoints: Sequence[str], config: StoreConfig) -> Figures:
    """The figures for a command that cannot do without them.

    Raises
    ------
    ConfigError
        The package for them is not installed; the error has the command that installs it.
    """
    try:
        return Figures(root, checkpoints, config)
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ConfigError(
            f"the package prometheus_client is not installed, which `messagestore {command}` needs; run "
            f"{install_extra('metrics')}",
            key=command,
        ) from None
