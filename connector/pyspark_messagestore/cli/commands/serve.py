"""`messagestore serve`: a server beside a store, for Spark jobs on other hosts."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from messagestore import ConfigError
from messagestore.spi import duration_s
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import ConfigFile, Json, Root, config_of, path_of, size_of
from pyspark_messagestore.cli.endpoint import Figures, address_of
from pyspark_messagestore.cli.services import run_services, told_to_end
from pyspark_messagestore.requirements import install_extra

PLACE = 175
PANEL = "Spark"

_ADDRESS = "127.0.0.1:9556"
_MIB = 1024 * 1024


def serve(
    root: Root,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients find the store.")
    ] = _ADDRESS,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Never write. A broker may write the store meanwhile.")
    ] = False,
    create: Annotated[bool, typer.Option("--create", help="Make the store if there is none.")] = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Listen on an address that other hosts reach also without a certificate, so that nothing is "
            "encrypted, or without tokens, so that whoever reaches it can read and write everything.",
        ),
    ] = False,
    cert_file: Annotated[
        str, typer.Option("--cert-file", metavar="FILE", help="The server's certificate (PEM); clients use https.")
    ] = "",
    key_file: Annotated[
        str,
        typer.Option("--key-file", metavar="FILE", help="Its key (PEM), if the certificate's file does not have it."),
    ] = "",
    client_ca_file: Annotated[
        str,
        typer.Option(
            "--client-ca-file", metavar="FILE", help="Clients need a certificate that one of these (PEM) has signed."
        ),
    ] = "",
    token_file: Annotated[
        str,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Clients need a token. A line for each: name, role (read, write or operate), SHA-256 of the token.",
        ),
    ] = "",
    drain: Annotated[
        str, typer.Option("--drain", metavar="DURATION", help="How long running requests may take at the end.")
    ] = "30s",
    connections: Annotated[int, typer.Option("--connections", min=1, help="The most open connections.")] = 256,
    streams: Annotated[int, typer.Option("--streams", min=1, help="The most reads and writes at a time.")] = 64,
    reports: Annotated[
        int,
        typer.Option(
            "--reports",
            min=1,
            help="The most reports (`status`, `lag` and others) and searches for keys at a time; more wait.",
        ),
    ] = 2,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory for all streams. A number alone is in MiB.")
    ] = "256MiB",
    body: Annotated[
        str, typer.Option("--body", metavar="SIZE", help="The largest JSON body. A number alone is in MiB.")
    ] = "8MiB",
    frame: Annotated[
        str, typer.Option("--frame", metavar="SIZE", help="The largest frame. A number alone is in MiB.")
    ] = "64MiB",
    staged: Annotated[
        str,
        typer.Option(
            "--staged",
            metavar="SIZE",
            help="What one client may have staged and not committed. A number alone is in MiB.",
        ),
    ] = "64GiB",
    idle: Annotated[
        str, typer.Option("--idle", metavar="DURATION", help="After this time a silent client is disconnected.")
    ] = "30s",
    rate: Annotated[
        str,
        typer.Option(
            "--rate",
            metavar="SIZE",
            help="What one client may send or get in a second, such as 10MiB; 0 for no limit.",
        ),
    ] = "0",
    store_config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Serve the store to Spark jobs on other hosts, until Ctrl-C or SIGTERM.
    Its clients give the address as their path, for example http://127.0.0.1:9556. The server takes turns with other
    writers, so commands and jobs of this host can go on. One server a store can write. At /metrics it has the figures
    of the store and its own, at /healthz and /readyz how it is. Certificates and tokens are read again when their
    files change.
    """
    try:
        lifecycle = importlib.import_module("messagestore.serve.lifecycle")
        limits = importlib.import_module("messagestore.serve.limits")
    except ModuleNotFoundError as error:
        if error.name != "cheroot":
            raise
        raise ConfigError(
            f"the package cheroot is not installed, which `messagestore serve` needs; run {install_extra('serve')}",
            key="serve",
        ) from None

    path, (host, port) = path_of(root), address_of(listen, _ADDRESS)
    limits.keep_few_heaps()
    served = lifecycle.ServedStore(
        path,
        config_of(store_config),
        host=host,
        port=port,
        limits=limits.Limits(
            connections=connections,
            streams=streams,
            reports=reports,
            memory=size_of("--memory", memory, unit=_MIB, least=16 * _MIB),
            body=size_of("--body", body, unit=_MIB),
            frame=size_of("--frame", frame, unit=_MIB),
            staged=size_of("--staged", staged, unit=_MIB),
            idle_s=duration_s("--idle", idle),
            rate=size_of("--rate", rate, least=0),
        ),
        read_only=read_only,
        create=create,
        insecure=insecure,
        cert_file=cert_file,
        key_file=key_file,
        client_ca_file=client_ca_file,
        token_file=token_file,
        metrics=_figures_of(path),
    )
    drain_s = duration_s("--drain", drain)

    log = logging.getLogger("messagestore")
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False  # the handler of all commands would say each line again
    try:
        with told_to_end() as ends:
            served.start()
            if as_json:
                out.json_line({"url": served.url, "instance": served.instance_id, "readOnly": read_only})
            else:
                out.line(served.url)
            run_services((), ends)
            served.stop(drain_s)
    finally:
        log.removeHandler(lines)
        log.setLevel(logging.NOTSET)
        log.propagate = True


def _figures_of(path: str) -> Callable[[], bytes]:
    """The store's figures, as `messagestore metrics` gives them; none without the package for them."""
    try:
        return Figures(path, ()).text
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        return lambda: b""
