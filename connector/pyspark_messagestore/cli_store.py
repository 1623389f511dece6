"""`messagestore status`, `dump`, `verify` and `recover`: a store as a whole, which is shown, checked and repaired."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from messagestore import MessageStore
from messagestore.spi import local_operator
from pyspark_messagestore import cli_output as out
from pyspark_messagestore.cli_app import (
    CUT,
    FOUND_NOTHING,
    ConfigFile,
    Json,
    Root,
    Wait,
    config_of,
    existing,
    looking,
    path_of,
)
from pyspark_messagestore.cli_status import status_lines

# ---- commands that look


def status(root: Root, store_config: ConfigFile = None, as_json: Json = False) -> None:
    """Show who holds the store, how it was left, and what is in it."""
    with out.waiting("looking through the store"):
        found = local_operator.status(path_of(root), looking(store_config))
    if as_json:
        out.json_line(found)
    else:
        status_lines(found)
    for fault in found["faults"]:
        out.note(f"messagestore: {fault}")
    if found["faults"]:
        raise typer.Exit(FOUND_NOTHING)


def dump(
    root: Root,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="PHYSICAL",
            min=0,
            help="Start with the record at this physical offset.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="Show at most N records.", show_default=False)
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="T", help="Show only records of this topic.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Also show the head of each record in hex.")] = False,
    as_json: Json = False,
) -> None:
    """Show the records of the CommitLog in the order in which they were written."""
    found = 0
    with contextlib.closing(local_operator.dump(path_of(root), looking(), start, out.note)) as records:
        for head, message in records:
            if topic is not None and message.topic != topic:
                continue
            if as_json:
                out.json_line({**out.message_fields(message), **({"head": head.hex()} if raw else {})})
            else:
                out.line(out.message_line(message, physical=True))
                for text in out.hex_lines(head) if raw else ():
                    out.line(text)
            found += 1
            if found == count:
                break
    if not found:
        out.note("no record found")
        raise typer.Exit(FOUND_NOTHING)


def verify(root: Root, store_config: ConfigFile = None, as_json: Json = False) -> None:
    """Check every byte of the store that has a meaning. This writes nothing, and a writer may be at work."""
    path = existing(root)
    with out.progress_bar("checking") as progress:
        report = local_operator.verify(path, config_of(store_config), progress=progress)
    if as_json:
        out.json_line(report.to_dict())
    else:
        out.report_lines(report, os.path.realpath(path))
    if not report.ok:
        raise typer.Exit(FOUND_NOTHING)


# ---- commands that write


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
        lines = [report.rebuilt, store.check_queues()]
        report.rebuilt = "; ".join(line for line in lines if line) or None
    left = local_operator.is_open(path)
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
    if any(each is not None for each in (report.cut, report.lost, report.changed, report.rebuilt)):
        raise typer.Exit(CUT)
