"""`spark/recoveries.json`: what the last recoveries cut, rebuilt or gave up. It is for people; nothing depends on it.

    {"crc": .., "formatVersion": 1, "recoveries": [{"reason": "a writer crashed", "recoveredTime": 1760000000000, ..}]}

The file is one of `checked_json`. The newest recovery comes last. One that found nothing to mend is not in the file, so
an ordinary start does not touch it. It is written by a process that holds the writer lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from messagestore.errors import CorruptionError
from messagestore.files.checked_json import as_file, read_fields
from messagestore.files.disk import Disk, replace_file

MOST_KEPT = 16
MAX_SIZE = 1 << 20
_MOST_CHARACTERS, _MOST_NOTES = 2000, 16
"""Of each text, and of each list of texts: a report has seven texts and a list, so the newest one always fits."""


def read_recoveries(disk: Disk, path: str) -> list[dict[str, Any]]:
    """The reports of the last recoveries that mended something, the newest last; none if there is no file.

    Raises
    ------
    CorruptionError
        The file is damaged.
    """
    hint = "It is only for people: delete it. The bytes that were cut off are still in `spark/cut`."
    return read_fields(disk, path, MAX_SIZE, _reports, what="reports of recoveries", hint=hint) or []


def _reports(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    reports = fields["recoveries"]
    if not isinstance(reports, list) or not all(_is_report(report) for report in reports):
        raise TypeError("no list of reports")
    return reports


def keep_recovery(disk: Disk, path: str, report: dict[str, Any], *, via: str) -> None:
    """Add a report, or replace the one with the same `recoveredTime`. The oldest goes if there are too many.

    A damaged file begins anew.

    Parameters
    ----------
    report : dict
        Fields for JSON, `recoveredTime` (milliseconds since 1970) among them. Long texts and lists are cut off.
    via : str
        The path at which the new file is made before it gets its name.

    Raises
    ------
    OSError
        The file cannot be written; it is unchanged.
    """
    try:
        kept = read_recoveries(disk, path)
    except CorruptionError:
        kept = []
    kept = [other for other in kept if other["recoveredTime"] != report["recoveredTime"]]
    kept = [*kept, {name: _bounded(value) for name, value in report.items()}][-MOST_KEPT:]
    while len(data := as_file({"recoveries": kept})) > MAX_SIZE:
        del kept[0]
    replace_file(disk, path, data, via=via)


def _is_report(report: object) -> bool:
    return isinstance(report, dict) and isinstance(report.get("recoveredTime"), int)


def _bounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_bounded(each) for each in value[:_MOST_NOTES]]
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return value[: _MOST_CHARACTERS - 3] + "..."
    return value
