"""The progress of consumer groups that BATCH records carry, and the table of offsets that takes it over.

A batch can move the progress of groups (`MessageStore.append_batch(progress=...)`). Its BATCH record says so, and the
table `config/consumerOffset.json` is written behind it. What a kill leaves between the two is *pending*:

    config/consumerOffset.json    group g has read t/0 up to 5    BATCH records below 7 are settled
    BATCH record 7                group g: t/0 from 5 to 12       pending: g has read up to 12

Whoever reads the table adds what is pending. Whoever writes it does so first, under the table's lock, so what is
written later counts more. A BATCH record moves no group that is further than where it was when the batch was
appended: if a broker has moved it on since, the broker's place stays.

If the log loses its end, the table is ahead of it: more BATCH records are settled than there are. A group that is
beyond the end of a queue then goes back to where the last BATCH record that is left moved it (`last_places`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from messagestore.files.commit_log import CommitLog
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.format.batch_record import PROGRESS_TAG, BatchRecord
from messagestore.format.javahash import tags_code
from messagestore.format.message import BATCH_TOPIC
from messagestore.log.batch_search import known_batch
from messagestore.log.store_files import StoreFiles

Row = tuple[str, str, int]
"""A group, and one of its queues: topic and queue id."""
_NONE = -1
_TAGS_CODE = tags_code(PROGRESS_TAG)
_UNITS = 1 << 16


@dataclass(frozen=True, slots=True)
class Passed:
    """A queue in which a group is further than where a BATCH record would move it from."""

    group: str
    topic: str
    queue_id: int
    offset: int
    before: int
    after: int


def settle(files: StoreFiles, end: int, table: ConsumerOffsets) -> list[Passed]:
    """Add what is pending in a log that ends at `end` to a table that was loaded; as `add_pending`."""
    first = table.settled
    if first is None:
        return []
    queue = files.queue(BATCH_TOPIC, 0)
    return add_pending(table, files.commit_log, first, queue.end(limit=end), queue.read)


def add_pending(
    table: ConsumerOffsets, log: CommitLog, first: int, end: int, read: Callable[[int, int], NDArray[np.void]]
) -> list[Passed]:
    """Add the progress of the BATCH records `first..end` to a table; `read` takes a number and a count.

    Returns
    -------
    list of Passed
        Queues whose progress somebody has moved since. They stay as they are.

    Raises
    ------
    CorruptionError
        A BATCH record that carries progress cannot be read.
    """
    passed: list[Passed] = []
    for places, following in _carrying(log, first, end, read):
        for physical_offset in places:
            batch = known_batch(log, physical_offset)
            if batch is not None:  # a broker's client may have written a message with this tag
                passed += _add(table, batch)
        table.settle(following)
    return passed


def pending_places(files: StoreFiles, end: int, table: ConsumerOffsets) -> Iterator[int]:
    """The physical offsets of the BATCH records with progress that a table which was loaded does not have."""
    if table.settled is None:
        return
    queue = files.queue(BATCH_TOPIC, 0)
    for places, _ in _carrying(files.commit_log, table.settled, queue.end(limit=end), queue.read):
        yield from places


def last_places(files: StoreFiles, end: int, rows: Collection[Row]) -> dict[Row, int]:
    """Where the last BATCH records of a log that ends at `end` moved groups, for rows whose queue bears that out.

    The message before the place must lie before the record: the queue of a topic that was made again since does not
    bear a place of the old one out.
    """
    found: dict[Row, int] = {}
    queue, missing = files.queue(BATCH_TOPIC, 0), set(rows)
    first = queue.end(limit=end)
    while missing and first > 0:
        last, first = first, max(first - _UNITS, 0)
        pieces = list(_carrying(files.commit_log, first, last, queue.read))
        for physical_offset in reversed([place for places, _ in pieces for place in places]):
            batch = known_batch(files.commit_log, physical_offset)
            for row, after in _moved(batch) if batch is not None else ():
                if row in missing:
                    missing.discard(row)
                    if _is_before(files, row, after, physical_offset, end):
                        found[row] = after
    return found


def _moved(batch: BatchRecord) -> Iterator[tuple[Row, int]]:
    for group, topics in batch.progress.items():
        for topic, rows in topics.items():
            for queue_id, _, after in rows:
                yield (group, topic, queue_id), after


def _is_before(files: StoreFiles, row: Row, after: int, physical_offset: int, end: int) -> bool:
    """Whether the message before a place is in the queue, and lies before a physical offset."""
    _, topic, queue_id = row
    queue = files.queue(topic, queue_id)
    if not 0 < after <= queue.end(limit=end):
        return False
    begin = queue.search_physical(files.commit_log.min_offset)
    return begin < after and int(queue.read(after - 1, 1)["physical_offset"][0]) < physical_offset


def _carrying(
    log: CommitLog, first: int, end: int, read: Callable[[int, int], NDArray[np.void]]
) -> Iterator[tuple[list[int], int]]:
    """The physical offsets of those of the BATCH records `first..end` that carry progress, by their units, in pieces.
    With each comes the number of the record behind it.
    """
    while first < end:
        units = read(first, min(_UNITS, end - first))
        if not len(units):
            return
        carrying = (units["tags_code"] == _TAGS_CODE) & (units["physical_offset"] >= log.min_offset)
        first += len(units)
        yield units["physical_offset"][carrying].tolist(), first


def _add(table: ConsumerOffsets, batch: BatchRecord) -> list[Passed]:
    passed = []
    for group, topics in batch.progress.items():
        for topic, rows in topics.items():
            offsets = table.get(topic, group)
            for queue_id, before, after in rows:
                offset = offsets.get(queue_id, _NONE)
                if offset <= before:  # below: the table is older, as in a copy that was taken beside the pipe
                    table.update(topic, group, {queue_id: after})
                else:
                    passed.append(Passed(group, topic, queue_id, offset, before, after))
    return passed
