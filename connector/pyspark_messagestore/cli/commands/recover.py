"""`messagestore recover`: what a killed writer left is repaired."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from messagestore import MessageStore
from messagestore.inspect import operator
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import CUT, ConfigFile, Json, Root, Wait, config_of, existing

PLACE = 330
PANEL = "Care"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the store's warnings, because the command shows the report that they come from."""
    logger = logging.getLogger("messagestore")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def recover(
    root: Root,
    store_config: ConfigFile = None,
    wait: Wait = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="If the end of the log is lost, continue without the messages that were there."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Repair what a killed writer left, and close the store cleanly, so that a Java broker can take over.
    The exit code is 4 if bytes behind the log's end were cut off; one line then says how many messages they held. It is
    also 4 if a broker has replaced acknowledged messages, if --accept-loss continued without lost messages, or if
    ConsumeQueues were damaged or missing and were rebuilt from the log.
    """
    path = existing(root)
    config = config_of(store_config, lock_timeout=wait)

    repairing = out.waiting("looking for what a crash left, and repairing it")
    with repairing, _quiet(), MessageStore.open(path, config, accept_loss=accept_loss) as store:
        report = store.report
        assert report is not None

        # Opening has repaired what the last writer left. It has not compared every queue with what the close noted.
        lines = [report.rebuilt, store.check_queues()]
        report.rebuilt = "; ".join(line for line in lines if line) or None

    left = operator.is_open(path)
    if as_json:
        out.json_line({**report.to_dict(), "cut": report.cut, "closed": not left})
    else:
        rows = [("found", report.reason), ("log ends at", str(report.end))]
        if report.reason != "clean":
            rows.append(("read", f"{out.count_words(report.record_count, 'record')} from {report.start} on"))
        if report.cut is not None:
            rows.append(("cut off", report.cut))
        if report.lost is not None:
            rows.append(("lost", report.lost))
        if report.changed is not None:
            rows.append(("changed", report.changed))
        if report.rebuilt is not None:
            rows.append(("rebuilt", report.rebuilt))
        out.facts([*rows, *(("note", text) for text in report.notes if text not in (report.rebuilt or ""))])
        if left:
            out.line("another writer has the store open. Do not start a broker before that writer has closed it")
        else:
            out.line("closed cleanly: a Java broker can take over")

    if any(line is not None for line in (report.cut, report.lost, report.changed, report.rebuilt)):
        raise typer.Exit(CUT)
