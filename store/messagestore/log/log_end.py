"""Places in the log, each with the record before it: where the log ends, and what proves that it is this log."""

from __future__ import annotations

from typing import NamedTuple

from messagestore.files.commit_log import CommitLog
from messagestore.files.state import State


class LogEnd(NamedTuple):
    """Where the log ends, and the last record before that end (with `last_size` 0, there is no record)."""

    physical_offset: int
    last_position: int
    last_size: int
    last_store_timestamp_ms: int


class Anchor(NamedTuple):
    """A record of the log, and the CRC-32 of its bytes. A log that has it is the one that the record was read from.

    With `size` 0, there is no record.
    """

    position: int
    size: int
    crc: int

    @classmethod
    def of(cls, state: State) -> Anchor:
        """The last record below the clean end of `state`."""
        return cls(state.anchor_position, state.anchor_size, state.anchor_crc)

    def is_in(self, log: CommitLog) -> bool:
        """Whether the log has this record, unchanged."""
        if self.position < log.min_offset or not log.fits(self.position, self.size):
            return False
        return log.crc(self.position, self.position + self.size) == self.crc


def is_anchored(log: CommitLog, state: State) -> bool:
    """Whether the record before C is in the log. If C has no record before it, the log must begin there."""
    return Anchor.of(state).is_in(log) if state.anchor_size else state.clean_end == log.min_offset
