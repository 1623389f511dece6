"""`spark/recoveries.json`: what the last recoveries cut, rebuilt or gave up. It is for people; nothing depends on it.

    {"crc": .., "formatVersion": 1, "recoveries": [{"reason": "a writer crashed", "recoveredTime": 1760000000000, ..}]}

`crc` is the CRC-32 of the recoveries as JSON with sorted keys and without blanks. The newest comes last. A recovery
that found nothing to mend is not in the file, so an ordinary start does not touch it. The file is replaced as a whole,
by a process that holds the writer lock.
"""

from __future__ import annotations

import json
from typing import Any

from messagestore.errors import CorruptionError
from messagestore.files.disk import Disk, replace_file
from messagestore.format.record import crc32

FORMAT_VERSION = 1
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
    try:
        data = disk.read(path, MAX_SIZE)
    except (FileNotFoundError, NotADirectoryError):
        return []

    try:
        fields = json.loads(data)
        reports = fields["recoveries"]
        if fields["formatVersion"] != FORMAT_VERSION or fields["crc"] != crc32(_canonical(reports)):
            raise ValueError("another CRC or format version")
        if not isinstance(reports, list) or not all(_is_report(report) for report in reports):
            raise TypeError("no list of reports")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        hint = "It is only for people: delete it. The bytes that were cut off are still in `spark/cut`."
        raise CorruptionError(path, 0, "reports of recoveries with their CRC", repr(error)[:80], hint=hint) from None
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
    while len(data := _as_file(kept)) > MAX_SIZE:
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


def _as_file(reports: list[dict[str, Any]]) -> bytes:
    fields = {"crc": crc32(_canonical(reports)), "formatVersion": FORMAT_VERSION, "recoveries": reports}
    return json.dumps(fields, sort_keys=True).encode("ascii")


def _canonical(reports: object) -> bytes:
    return json.dumps(reports, sort_keys=True, separators=(",", ":")).encode("ascii")
