"""`messagestore metrics`: the figures of a store for Prometheus, at an address or once."""

from __future__ import annotations

from typing import Annotated

import typer

from messagestore.spi import Location
from pyspark_messagestore.checkpoint.spark_checkpoint import read_progress
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import (
    FOUND_NOTHING,
    CheckpointFolders,
    by_location,
    existing,
    looking,
    opened,
    path_of,
)
from pyspark_messagestore.cli.endpoint import METRICS_ADDRESS, needed_figures
from pyspark_messagestore.cli.services import run_services, told_to_end

PLACE = 170
PANEL = "Care"


@by_location
def metrics(
    root: Location,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where Prometheus finds the metrics, as /metrics.")
    ] = METRICS_ADDRESS,
    once: Annotated[
        bool, typer.Option("--once", help="Write the metrics to standard output, and end; nothing listens.")
    ] = False,
    checkpoint: CheckpointFolders = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object per metric to standard output, and end; nothing listens."),
    ] = False,
) -> None:
    """Give the figures of a store to Prometheus, under RocketMQ 5's names, and under names with spark_ for batches.
    They are read from the store's files at each request, so no other process has to run; with a URL, its server is
    asked. Until Ctrl-C.
    """
    # What was mistyped is told now, and not to Prometheus.
    if root.is_remote:
        with opened(root):
            pass
    else:
        existing(root.text)
    folders = [path_of(folder) for folder in checkpoint or ()]
    for folder in folders:
        read_progress(folder)

    figures = needed_figures("metrics", root, folders, looking())
    if once or as_json:
        look = figures.look()
        if as_json:
            for name, labels, value in look.samples:
                out.json_line({"name": name, "labels": labels, "value": int(value) if value == int(value) else value})
        else:
            out.block(figures.text(look).decode().removesuffix("\n"))
        if ("spark_store_up", {"store": str(root)}, 1) not in look.samples:
            raise typer.Exit(FOUND_NOTHING)
        return

    with told_to_end() as ends, figures.listening(listen) as url:
        out.line(url)
        run_services((), ends)
