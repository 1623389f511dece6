"""`messagestore status`: who holds a store, how it was left, and what is in it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from messagestore.spi import Location
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import FOUND_NOTHING, ConfigFile, Json, by_location, opened, path_of
from pyspark_messagestore.monitoring.health import Finding, facts_of, findings_of, status_report

PLACE = 110
PANEL = "Care"


@by_location
def status(
    root: Location,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            help="Also look at a query that reads the store. Repeat the option for more.",
            show_default=False,
        ),
    ] = None,
    store_config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show who holds the store, how it was left, what is in it, and what is wrong or soon will be."""
    folders = [path_of(folder) for folder in checkpoint or ()]
    with out.waiting("looking through the store"), opened(root, store_config) as store:
        facts = facts_of(store, folders)
        report = status_report(store.view("status"), facts)

    faults, findings = report["faults"], findings_of(facts)
    if as_json:
        out.json_line(report)
    else:
        status_lines(report)
        _finding_lines([finding for finding in findings if finding.rule != "unreadable"])

    for fault in faults:
        out.note(f"messagestore: {fault}")
    if faults:
        raise typer.Exit(FOUND_NOTHING)


def _finding_lines(findings: list[Finding]) -> None:
    for finding in findings:
        out.line()
        out.line(f"{finding.severity:<8} {out.shown(finding.sentence)}")
        out.line(f"{'':<8} {out.shown(finding.remedy)}")


_MOST_QUEUES_SHOWN = 16


def status_lines(report: dict[str, Any]) -> None:
    """Print what `status_of` found."""
    log, queues, index = report["commitLog"], report["consumeQueues"], report["index"]
    segments = f"{out.count_words(log['segments'], 'segment')} of {out.size_words(log['segmentSize'])}"

    rows = [
        ("store", report["root"]),
        ("id", report["storeId"] or "none: this project has never written to it"),
        *([("broker", report["brokerName"])] if report["brokerName"] is not None else []),
        ("held by", _holder_words(report["heldBy"])),
        *([("served by", report["heldBy"]["server"])] if report["heldBy"]["server"] is not None else []),
        *([("waits for it", "a broker that is starting")] if report["heldBy"]["brokerWaits"] else []),
        ("left", _LEFT_WORDS[report["left"]]),
    ]
    if report["state"] is not None:
        rows.append(("state", _state_words(report["state"])))

    rows += [
        ("log", f"{log['minOffset']} to {log['maxOffset']}, {segments}, {out.size_words(log['bytesOnDisk'])} on disk"),
        ("queues", f"{queues['queues']:,}, {out.size_words(queues['bytesOnDisk'])} on disk"),
        ("index", f"{out.count_words(index['files'], 'file')}, {out.size_words(index['bytesOnDisk'])} on disk"),
        ("messages", f"{report['messages']:,} in {out.count_words(len(report['topics']), 'topic')}"),
    ]

    hidden = report["unproven"]
    if hidden is not None:
        count = out.count_words(hidden["records"], "record") + (" and more" if hidden["more"] else "")
        rows.append(
            ("not shown", f"{count} behind {hidden['begin']}, not proven to be durable: run `messagestore recover`")
        )

    last = report["lastBatch"]
    if last is not None:
        about = f"{last['app']} version {last['version']}, {out.count_words(last['rows'], 'row')}"
        rows.append(("batches", f"{report['batches']:,}, the last: {about}"))

    for recovery in (report.get("recoveries") or ())[:1]:  # the server of an older version does not tell
        rows.append(("recovered", _recovery_words(recovery)))

    out.facts(rows)
    if report["topics"]:
        out.line()
        columns = [("topic", False), ("messages", True), ("queues", False)]
        out.table(columns, [(row["topic"], f"{row['messages']:,}", _queue_words(row)) for row in report["topics"]])


def _recovery_words(recovery: dict[str, Any]) -> str:
    """When the store was recovered with something to mend, why, and what was done."""
    done = {"cut": "cut off", "lost": "lost", "changed": "changed", "rebuilt": "rebuilt"}
    words = [f"{verb} {recovery[name]}" for name, verb in done.items() if recovery.get(name)]
    if not words:
        words = [str(note) for note in recovery.get("notes") or ()]
    return "; ".join([f"{out.time_words(recovery['recoveredTime'])}, because {recovery.get('reason')}", *words])


def _holder_words(held: dict[str, Any]) -> str:
    if held["broker"] is not None:
        return str(held["broker"])
    if held["writer"] is not None:
        return f"a writer, {held['writer']}"
    return "nobody; a writer is attached and keeps brokers out" if held["attached"] else "nobody"


_LEFT_WORDS = {
    "closed": "closed cleanly",
    "open": "open: a writer is at work",
    "attached": "open, idle: nothing is in flight",
    "idle": "idle, nothing in flight: the last writer ended without closing the store, as Spark's workers do. The next "
    "writer continues, but run `messagestore recover` before you start a broker",
    "killed": "by a writer that was killed in the middle of a write: the next writer, or `messagestore recover`, "
    "repairs the store. What was acknowledged is safe",
    "recovering": "by a recovery that was killed: the next writer, or `messagestore recover`, starts it again",
    "poisoned": "by a writer whose sync failed: check the disk, then run `messagestore recover`",
    "restarted": "open when the machine stopped: the next writer, or `messagestore recover`, checks it",
    "broker": "by a broker that was killed: `messagestore recover`, or the broker itself, repairs it",
    "unreadable": "open, and `spark/state` cannot be read, the file that says how far the last writer came: run "
    "`messagestore recover`",
}
"""What each value of `left` means, and what to do about it."""


def _state_words(state: dict[str, Any]) -> str:
    words = [f"visible up to {state['visibleEnd']}", f"clean up to {state['cleanEnd']}"]
    if state["inFlight"] is not None:
        words.append(f"in flight from {state['inFlight']}")
    words += [word for word, name in (("ASYNC_FLUSH", "asyncFlush"), ("poisoned", "poisoned")) if state[name]]
    words.append(
        f"written by pid {state['writerPid']}" + ("" if state["thisBoot"] else " before the machine was started")
    )
    return ", ".join(words)


def _queue_words(row: dict[str, Any]) -> str:
    """The offsets of each queue, as in `0: 0-12  1: 0-7`, and the number of queues that are not shown."""
    parts = [f"{queue}: {q['minOffset']}-{q['maxOffset']}" for queue, q in row["queues"].items()]
    more = len(parts) - _MOST_QUEUES_SHOWN
    parts = parts[:_MOST_QUEUES_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return "  ".join(parts) or "none yet"
