"""Whether the log is still the one that was read or planned, and how a gap in it is told. Driver and tasks use it."""

from __future__ import annotations

import logging

from messagestore.spi import LastRecord, Place, Queue, StoreReader

_log = logging.getLogger(__name__)


def is_there(store: StoreReader, last: LastRecord) -> bool:
    """Whether a record that was read is still in the log, or retention has deleted its segment."""
    found = store.prove_last(last.position, last.size)
    return found is None or found.crc == last.crc


def ends_behind(place: Place | None, physical_offset: int) -> bool:
    """Whether a message ends after a physical offset; False if retention has deleted the message."""
    return place is not None and place.size > 0 and place.end > physical_offset


GO_ON = "Start a new query, or set failOnDataLoss=false to continue at the first message that is left"


def tell_gap(queue: Queue, start: int, end: int) -> None:
    """Log a warning that counts messages that retention has deleted."""
    _log.warning(
        "%s/%d: retention has deleted %d messages, %d to %d. With failOnDataLoss=false the query continues behind them",
        *queue,
        end - start,
        start,
        end - 1,
    )
