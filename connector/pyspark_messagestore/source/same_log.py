"""Whether the log is still the one that was read or planned, and the warning of a gap in it."""

from __future__ import annotations

import logging

from messagestore.spi import LastRecord, Place, Queue, Queues, StoreReader
from pyspark_messagestore.source.offsets import StreamOffset

_log = logging.getLogger(__name__)


def is_there(store: StoreReader, last: LastRecord) -> bool:
    """Whether a record that was read is still in the log, or retention has deleted its segment."""
    return last.is_there(store.prove_last(last.position, last.size))


def ends_behind(place: Place | None, physical_offset: int) -> bool:
    """Whether a message ends after a physical offset; False if retention has deleted the message."""
    return place is not None and place.ends_behind(physical_offset)


def place_now(store: StoreReader, start: StreamOffset, reader: str = "this query") -> tuple[Queues, list[str]]:
    """From where a query, or another reader, at `start` has to read on in this store, and why it refuses to, in words.

    For whoever only looks: the query itself finds the same (`Follower.check_start`). If nothing is wrong, the queues
    are those of `start`. In a log that was cut, restored or made again, they begin at the first message that is newer
    than what was read.
    """
    topic_ends = store.ends(sorted({topic for topic, _ in start.queues}))
    faults: dict[Queue | None, str] = {}

    last = start.last
    if last is not None and not is_there(store, last):
        faults[None] = f"the record at physical offset {last.position} is not the one that {reader} has read"

    places = store.places(
        {queue: min(offset, topic_ends.queues.get(queue, 0)) for queue, offset in start.queues.items()}
    )
    for queue, offset in start.queues.items():
        name, end = f"{queue[0]}/{queue[1]}", topic_ends.queues.get(queue, 0)
        behind = ends_behind(places.get(queue), start.physical_offset)
        if offset > end and (topic_ends.recovered or behind):
            faults[queue] = f"{name} ends at {end}, but {reader} has read up to {offset}"
        elif behind:
            faults[queue] = f"{name} was created again: message {offset - 1} is not the one that {reader} has read"

    time_ms = None if last is None else last.store_timestamp_ms
    queues = dict(start.queues)

    # Where the log itself is another one, the place in none of the queues holds.
    wrong = [queue for queue in (start.queues if None in faults else faults) if queue is not None]
    times_ms = dict.fromkeys((queue for queue in wrong if queue in topic_ends.queues), time_ms)
    firsts = store.seek(times_ms, physical_offset=start.physical_offset) if times_ms else {}
    queues.update({queue: min(firsts.get(queue, 0), queues[queue]) for queue in wrong})

    return queues, list(faults.values())


GO_ON = "Start a new query, or set failOnDataLoss=false to continue at the first message that is left"


def warn_of_gap(queue: Queue, start: int, end: int) -> None:
    """Log a warning that counts messages that retention has deleted."""
    _log.warning(
        "%s/%d: retention has deleted %d messages, %d to %d. With failOnDataLoss=false the query continues behind them",
        *queue,
        end - start,
        start,
        end - 1,
    )
