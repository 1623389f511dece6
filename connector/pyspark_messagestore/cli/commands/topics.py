"""`messagestore topics`: which topics there are, with their settings."""

from __future__ import annotations

from typing import Any

from messagestore.spi import Location
from pyspark_messagestore.cli import output as out
from pyspark_messagestore.cli.app import Json, by_location, end_of_rows, named_report, opened_parts

PLACE = 120
PANEL = "Topics and groups"


@by_location
def topics(root: Location, as_json: Json = False) -> None:
    """Show the topics of a store, with their settings and the number of their messages. Of brokers that run, each has
    a row for each topic.
    """
    with out.waiting("looking through the queues"), opened_parts(root) as stores:
        rows, faults = named_report((name, store.view("topics")) for name, store in stores.items())
    if as_json:
        for row in rows:
            out.json_line(row)
    elif rows:
        titles = [("topic", False), ("messages", True), ("queues", True), ("write", True), ("read", True)]
        titles = [*titles, ("perm", True), ("order", False), ("type", False)]
        out.table([("broker", False), *titles] if "brokerName" in rows[0] else titles, map(_cells, rows))
    end_of_rows(rows, faults, "no topic found")


def _cells(row: dict[str, Any]) -> list[object]:
    settings = [row[name] for name in ("writeQueueNums", "readQueueNums", "perm", "order")]
    kind = out.message_type(row["attributes"] or {})
    return [
        *([row["brokerName"]] if "brokerName" in row else []),
        row["topic"],
        f"{row['messages']:,}",
        row["queues"],
        *("-" if value is None else str(value).lower() for value in settings),
        kind or "-",
    ]
