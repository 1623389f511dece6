"""`messagestore metrics`: the figures of a store for Prometheus, at an address or once."""

from __future__ import annotations

import importlib
import signal
import threading
from typing import Annotated

import typer

from messagestore import ConfigError
from messagestore.spi import Location
from pyspark_messagestore.checkpoint.spark_checkpoint import read_progress
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, by_location, existing, looking, opened, path_of
from pyspark_messagestore.requirements import install_extra

PLACE = 170
PANEL = "Care"

_ADDRESS = "127.0.0.1:9557"


@by_location
def metrics(
    root: Location,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where Prometheus finds the metrics, as /metrics.")
    ] = _ADDRESS,
    once: Annotated[
        bool, typer.Option("--once", help="Write the metrics to standard output, and end; nothing listens.")
    ] = False,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            help="Also show how far a query that reads the store is behind. Repeat the option for more.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object per metric to standard output, and end; nothing listens."),
    ] = False,
) -> None:
    """Give the figures of a store to Prometheus, under RocketMQ 5's names, and under names with spark_ for batches.
    They are read from the store's files at each request, so no other process has to run; with a URL, its server is
    asked. Until Ctrl-C.
    """
    try:
        library = importlib.import_module("prometheus_client")
        from pyspark_messagestore.monitoring.metrics import registry_of
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ConfigError(
            "the package prometheus_client is not installed, which `messagestore metrics` needs; run "
            f"{install_extra('metrics')}",
            key="metrics",
        ) from None

    # What was mistyped is told now, and not to Prometheus.
    if root.is_remote:
        with opened(root):
            pass
    else:
        existing(root.text)
    folders = [path_of(folder) for folder in checkpoint or ()]
    for folder in folders:
        read_progress(folder)

    registry = registry_of(root, folders, looking())
    if once or as_json:
        if as_json:
            for name, labels, value in (sample[:3] for metric in registry.collect() for sample in metric.samples):
                out.json_line({"name": name, "labels": labels, "value": int(value) if value == int(value) else value})
        else:
            out.block(library.generate_latest(registry).decode().removesuffix("\n"))
        if registry.get_sample_value("spark_store_up", {"store": str(root)}) != 1:
            raise typer.Exit(FOUND_NOTHING)
        return

    host, port = _address(listen)
    try:
        server, thread = library.start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"--listen: {listen} cannot be listened on: {error.strerror or error}. Give an address of this host and a "
            "port that is free",
            key="--listen",
            value=listen,
        ) from None

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    shown = f"[{host}]" if ":" in host else host
    out.line(f"http://{shown}:{server.server_port}/metrics")

    try:
        while not stopped.wait(1.0):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen: found {text!r}; allowed is HOST:PORT, for example {_ADDRESS}", key="--listen", value=text
        )
    return host.strip("[]"), int(port)
