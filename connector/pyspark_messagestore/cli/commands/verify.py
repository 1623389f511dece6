"""`messagestore verify`: every byte of a store that has a meaning is checked."""

from __future__ import annotations

import os

import typer

from messagestore.inspect import operator
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, ConfigFile, Json, Root, config_of, existing

PLACE = 320
PANEL = "Care"


def verify(root: Root, store_config: ConfigFile = None, as_json: Json = False) -> None:
    """Check every byte of the store that has a meaning. This writes nothing, and a writer may be at work."""
    path = existing(root)
    with out.progress_bar("checking") as progress:
        report = operator.verify(path, config_of(store_config), progress=progress)
    if as_json:
        out.json_line(report.to_dict())
    else:
        out.report_lines(report, os.path.realpath(path))
    if not report.ok:
        raise typer.Exit(FOUND_NOTHING)
