"""The report of a recovery: what it found, and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

_WHERE = {
    "zero": "the size of a record is still zero",
    "end": "a record is not complete",
    "blank": "a BLANK ends the last segment",
    "magic": "no record begins",
    "size": "a record has an impossible size",
    "position": "a record of another place lies",
    "length": "the lengths of a record do not add up",
    "body_crc": "a record's body does not match its CRC",
    "property_crc": "a record does not match its CRC",
    "torn": "a record is torn",
    "batch": "the data of a batch are not complete",
}
"""What lies at the log's end, for each `stop`."""


@dataclass
class RecoveryReport:
    """What recovery found and did when a store was opened.

    Parameters
    ----------
    reason : str
        Why recovery looked at the log: "new", "clean", "closed by a broker", "closed, but files were lost or changed",
        "a broker crashed", "a writer crashed", or "not closed, nothing in flight" (the last writer ended between two
        appends).
    start, end : int
        The physical offsets at which the walk over the log began, and at which the log ends.
    record_count : int
        The number of records that the walk checked.
    stop : str
        Why the log ends there: the reason of a `ScanEnd`, "torn" or "batch". `cut` says it in words.
    zeroed_bytes : int
        The number of bytes after the end that were not zero, and were set to zero.
    cut_messages, cut_queues : int
        The number of records that began after the end, complete or not, and of the queues that they belonged to.
    saved : str | None
        The file in `spark/cut/` that keeps the bytes that were cut off.
    lost : str | None
        What is missing at the end of the log, which the caller accepted. None: nothing is missing.
    changed : str | None
        Set if a broker has changed bytes below the clean end: acknowledged messages are lost, and this says which.
    rebuilt : str | None
        Which ConsumeQueues were damaged or missing, and were rebuilt from the log.
    notes : list of str
        Everything else that an operator should know.

    Examples
    --------
    >>> from messagestore import MessageStore
    >>> with MessageStore.open("store") as store:
    ...     store.report.reason, store.report.record_count, store.report.cut
    ('new', 0, None)
    """

    reason: str
    start: int = 0
    end: int = 0
    record_count: int = 0
    stop: str = ""
    zeroed_bytes: int = 0
    cut_messages: int = 0
    cut_queues: int = 0
    saved: str | None = None
    lost: str | None = None
    changed: str | None = None
    rebuilt: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary, for JSON."""
        return asdict(self)

    def to_fields(self) -> dict[str, Any]:
        """The fields, and what was cut in words, as they are kept in `spark/recoveries.json`."""
        return {
            "reason": self.reason,
            "start": self.start,
            "end": self.end,
            "recordCount": self.record_count,
            "stop": self.stop,
            "zeroedBytes": self.zeroed_bytes,
            "cutMessages": self.cut_messages,
            "cutQueues": self.cut_queues,
            "cut": self.cut,
            "saved": self.saved,
            "lost": self.lost,
            "changed": self.changed,
            "rebuilt": self.rebuilt,
            "notes": list(self.notes),
        }

    def note_queues(self, note: str) -> None:
        """Report which queues were missing and are rebuilt."""
        self.notes.append(note)
        self.rebuilt = f"{self.rebuilt}; {note}" if self.rebuilt else note

    @property
    def has_news(self) -> bool:
        """Whether recovery mended, gave up or remarked on something."""
        return any((self.cut, self.lost, self.changed, self.rebuilt, self.notes))

    @property
    def cut(self) -> str | None:
        """What was cut off the end of the log, in one line; None if nothing was cut off."""
        if not self.zeroed_bytes:
            return None
        messages = f"{self.cut_messages} message" + ("" if self.cut_messages == 1 else "s")
        queues = f"{self.cut_queues} queue" + ("" if self.cut_queues == 1 else "s")
        kept = f"; the bytes are kept in {self.saved}" if self.saved else ""
        return f"{self.zeroed_bytes} bytes behind {self.end}, where {_WHERE[self.stop]}: {messages} of {queues}{kept}"
