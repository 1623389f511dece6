"""The report of a check: its findings and its counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

_MOST_FINDINGS = 1000
Progress = Callable[[int, int], None]
"""A function that is called with the bytes of the log that were checked and the bytes in total."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Parameters
    ----------
    path : str
    offset : int
        In a CommitLog file the physical offset, in every other file the position in bytes.
    expected, found : str
    """

    path: str
    offset: int
    expected: str
    found: str


@dataclass
class VerifyReport:
    """What was checked, and what was found.

    Parameters
    ----------
    start, end : int
        The physical offsets of the part of the log that was checked.
    record_count, unit_count, key_count, batch_count : int
    without_property_crc : int
        The number of records without a `__CRC32#` property (`enabledAppendPropCRC`).
    first_without_property_crc : int
        The physical offset of the first of them, or -1. A broker with `forceVerifyPropCRC=true` that recovers from
        there or from below cuts the log at this place.
    findings : list of Finding
        The first 1 000 faults.
    finding_count : int
        The number of all faults.
    notes : list of str
        What an operator should know, and what was not checked. No note is a fault.
    """

    start: int = 0
    end: int = 0
    record_count: int = 0
    unit_count: int = 0
    key_count: int = 0
    batch_count: int = 0
    without_property_crc: int = 0
    first_without_property_crc: int = -1
    findings: list[Finding] = field(default_factory=list)
    finding_count: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return not self.finding_count

    def find(self, path: str, offset: int, expected: str, found: str) -> None:
        """Add a fault."""
        self.add(Finding(path, offset, expected, found))

    def add(self, *findings: Finding) -> None:
        """Add faults."""
        self.finding_count += len(findings)
        self.findings += findings[: max(0, _MOST_FINDINGS - len(self.findings))]

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary, for JSON."""
        return {**asdict(self), "ok": self.ok}
