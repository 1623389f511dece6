"""The past of a store and of its readers, from what is on the disk: no database keeps it.

The log is in the order of time, so a binary search over the heads of some records finds where a queue stood at a time.
No body is read. What a streaming query had read is in its checkpoint. For the offsets of consumer groups there is
nothing of this kind: only the newest one is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from messagestore.spi import Queue, Queues, StoreReader
from pyspark_messagestore.checkpoint.spark_checkpoint import Batch, Progress, stream_offset


@dataclass(frozen=True)
class LagPoint:
    """How far a query was behind when it planned a batch.

    Parameters
    ----------
    batch_id : int | None
        The batch; None: now.
    time_ms : int
    lag : int
        How many messages no earlier batch had read, without those that retention has deleted.
    """

    batch_id: int | None
    time_ms: int
    lag: int


def spans(begin_ms: int, end_ms: int, points: int) -> list[int]:
    """The limits of so many spans of time, or of fewer if they would be shorter than a millisecond."""
    points = max(1, min(points, end_ms - begin_ms))
    return [begin_ms + (end_ms - begin_ms) * i // points for i in range(points + 1)]


def lag_history(store: StoreReader, progress: Progress, now_ms: int) -> list[LagPoint]:
    """How far a query was behind at each of its batches, and now; the oldest comes first.

    Parameters
    ----------
    progress : Progress
        With the newest batches of the query (`read_progress(folder, least=...)`). Batches that read another store, and
        those that cannot be read, are left out.
    now_ms : int
        Milliseconds since 1970.
    """
    looks = _looks(store, progress, now_ms)
    queues = sorted({queue for _, _, places in looks for queue, _ in places})
    ends, begins = _ends_at(store, queues, {time_ms for _, time_ms, _ in looks}), store.begins(queues)
    return [
        LagPoint(
            batch_id,
            time_ms,
            sum(max(0, ends[time_ms][queue] - max(place, begins[queue])) for queue, place in places),
        )
        for batch_id, time_ms, places in looks
    ]


def _looks(
    store: StoreReader, progress: Progress, now_ms: int
) -> list[tuple[int | None, int, list[tuple[Queue, int]]]]:
    """The batches of a query: their ids, when they were planned, and how far each source had read before each."""
    here = store.describe([])
    store_ids = {here.store_id, *here.ancestors, ""}
    queues_of: dict[str, Queues] = {}

    def read_by(batch: Batch) -> list[tuple[Queue, int]]:
        """How far each source of the query has read when a batch is done. A queue that was created since then is read
        from its beginning.
        """
        read: list[tuple[Queue, int]] = []
        for offset in map(stream_offset, batch.offsets):
            if offset is None or offset.store_id not in store_ids:
                continue
            places: Queues = {}
            for topic in offset.topics:
                if topic not in queues_of:
                    queues_of[topic] = dict.fromkeys(store.ends([topic]).queues, 0)
                places |= queues_of[topic]
            read += (places | offset.queues).items()
        return read

    looks: list[tuple[int | None, int, list[tuple[Queue, int]]]] = [
        (batch.batch_id, batch.planned_at_ms, read_by(before))
        for before, batch in pairwise(progress.batches)
        if not before.fault and batch.planned_at_ms is not None
    ]
    if progress.committed is not None and not progress.committed.fault:
        looks.append((None, now_ms, read_by(progress.committed)))
    return looks


def _ends_at(store: StoreReader, queues: Sequence[Queue], times_ms: Collection[int]) -> dict[int, Queues]:
    """Where queues ended at some times: the number of the first message of each that was stored then or later."""
    times = sorted(times_ms)
    found: dict[int, Queues] = {}

    def look(time_ms: int, wanted: Sequence[Queue]) -> Queues:
        return store.seek(dict.fromkeys(wanted, time_ms - 1)) if wanted else {}

    def between(first: int, last: int) -> None:
        """Find what lies between two times that are known. A queue that got nothing in between is not searched."""
        if last - first < 2:
            return
        before, behind = found[times[first]], found[times[last]]
        changed = [queue for queue in queues if before[queue] != behind[queue]]
        if not changed:
            found.update(dict.fromkeys(times[first + 1 : last], before))
            return
        middle = (first + last) // 2
        found[times[middle]] = {**before, **look(times[middle], changed)}
        between(first, middle)
        between(middle, last)

    for time_ms in {*times[:1], *times[-1:]}:
        found[time_ms] = dict(look(time_ms, queues))
    between(0, len(times) - 1)
    return found
