"""The records of a range of a queue, as bytes or as record batches, by the units of the queue.

Files that retention deletes meanwhile, and queues that were made again, end in an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import CorruptionError, MagicError, OffsetOutOfRangeError, StoreWentBackwardsError
from messagestore.files.commit_log import GAP
from messagestore.format import record_columns
from messagestore.format.gathered import Gathered
from messagestore.format.inner_batch import single_records
from messagestore.format.layout import BLANK, FILLER_UNIT_SIZE
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.seal_check import REBUILD_HINT
from messagestore.read.ahead import Ahead
from messagestore.read.view import StoreView
from messagestore.signal_handlers import pass_on

READ_ROWS = record_columns.BLOCK_ROWS
READ_BYTES = 16 * 1024 * 1024
_READ_AHEAD = 2
_EXTENSION_ADDRESS = -(1 << 31) - 1
"""A tags code at or below this is no hash: it points to the extension file of a broker's ConsumeQueue."""
_USUAL_SIZE = 256
"""How large a record is thought to be before the first ones are known. Units that are read for nothing cost as much as
the others."""
_MOST_GAPS = 4
"""How many times the requested bytes may be read in order to read the records of a sparse queue together."""


def read(
    view: StoreView,
    topic: str,
    queue_id: int,
    start: int,
    end: int,
    columns: Sequence[str],
    *,
    verify_body_crc: bool = True,
    max_rows: int = READ_ROWS,
    max_bytes: int = READ_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Read the messages `start..end` of a queue as record batches, in order, each message once.

    A thread reads the next records meanwhile.

    Parameters
    ----------
    view : StoreView
    start, end : int
        Queue offsets; `end` at most `max_offset`.
    columns : sequence of str
        Names in `record_columns.COLUMNS`; nothing else is decoded.
    max_rows, max_bytes : int
        The limits of one batch, in messages and bytes of records. A batch has at least one message.

    Raises
    ------
    CorruptionError
        A unit and its record do not agree, or a CRC does not match. The error names file and offset.
    OffsetOutOfRangeError
        Retention has deleted the next message, at `queue_offset`; `min` is the first one that is left. All messages
        before it were given.
    StoreClosedError
        The iteration was begun before a fork.
    """
    gathered = blocks(view, topic, queue_id, start, end, max_rows, max_bytes)

    def decoded(block: Gathered) -> pa.RecordBatch:
        return block.decoded(columns, verify_body_crc=verify_body_crc)

    if end - start <= max_rows:
        yield from map(decoded, gathered)
        return

    # Reading and copying do not need the GIL, which the CRCs hold for long.
    with Ahead(gathered, _READ_AHEAD) as made:
        yield from map(decoded, made)


def blocks(
    view: StoreView,
    topic: str,
    queue_id: int,
    start: int,
    end: int,
    max_rows: int,
    max_bytes: int,
    tags_codes: frozenset[int] | None = None,
) -> Iterator[Gathered]:
    """The messages of a queue as bytes, up to `max_rows` messages and `max_bytes` bytes at a time.

    Parameters
    ----------
    view : StoreView
    tags_codes : frozenset of int | None
        Only the messages whose unit has one of these tags codes. A unit that has no tags code is passed on, too:
        those of delayed messages, which have a time instead, and those that point to an extension file.
    """
    position = start
    codes = None if tags_codes is None or topic == SCHEDULE_TOPIC else np.array(sorted(tags_codes), np.int64)
    rows = max_rows if codes is not None else min(max_rows, max(1, max_bytes // _USUAL_SIZE))
    while position < end:
        asked = min(end, position + rows)
        try:
            block = _block(view, topic, queue_id, position, asked, max_bytes, codes)
        except FileNotFoundError as error:
            pass_on(error)
            _check_retention(view, topic, queue_id, position)
            if view.max_offset(topic, queue_id) <= position:
                raise _went_back(view, topic, queue_id, position) from error
            raise CorruptionError(str(error.filename), 0, "this file", "none") from error
        if block is None:
            _check_retention(view, topic, queue_id, position)
            raise _went_back(view, topic, queue_id, position)
        looked_at = block.end - position
        rows = looked_at + looked_at // 8 + 1 if block.end < asked else 2 * rows
        rows = min(rows, max_rows)
        position = block.end
        yield block
        del block  # so that the next block can use its memory


def _block(
    view: StoreView, topic: str, queue_id: int, position: int, end: int, max_bytes: int, codes: NDArray[np.int64] | None
) -> Gathered | None:
    """The next messages of a queue; None if the first of them is no longer in the queue or in the log."""
    units = view.units(topic, queue_id, position, end)
    if not len(units) or 0 <= int(units["physical_offset"][0]) < view.files.commit_log.min_offset:
        return None

    end = position + len(units)
    rows = np.arange(len(units), dtype=np.int64)
    all_offsets = units["physical_offset"].astype(np.int64)

    if codes is not None:
        rows = rows[np.isin(units["tags_code"], codes) | (units["tags_code"] <= _EXTENSION_ADDRESS)]
        if not len(rows):
            none = np.empty(0, np.int64)
            sizes, path = none.astype(np.int32), view.files.paths.commit_log
            return Gathered(topic, queue_id, position, end, none, none, sizes, none.astype(np.uint8), none, path)

    sizes = units["size"][rows].astype(np.int32)
    physical_offsets = all_offsets[rows]
    costs = sizes
    if view.files.has_batch_queues(topic):  # the messages of one record are read together
        costs = np.where(np.diff(physical_offsets, prepend=-1) == 0, 0, sizes).astype(np.int32)

    count = max(1, int(np.searchsorted(np.cumsum(costs, dtype=np.int64), max_bytes, side="right")))
    gaps = physical_offsets[1:count] - physical_offsets[: count - 1] - sizes[: count - 1]
    read_together = np.cumsum(costs[1:count] + np.where((gaps > 0) & (gaps <= GAP), gaps, 0), dtype=np.int64)
    count = 1 + int(np.searchsorted(read_together, _MOST_GAPS * max_bytes, side="right"))
    if count < len(rows):
        end = position + int(rows[count])

    queue_offsets = position + rows[:count]
    sizes, physical_offsets = sizes[:count], physical_offsets[:count]
    check_units(view, topic, queue_id, queue_offsets, physical_offsets, sizes)
    if view.files.has_batch_queues(topic):
        return _gathered_singly(view, topic, queue_id, position, queue_offsets, physical_offsets, sizes)

    data, positions = view.files.commit_log.gather(physical_offsets, sizes)
    view.check_place()  # after reading, because files are opened by their paths

    renumbered = None
    if not view.own:
        renumbered = _in_order(view, topic, queue_id, position, all_offsets)[rows[:count]]
    path = view.files.paths.commit_log
    return Gathered(
        topic, queue_id, position, end, queue_offsets, physical_offsets, sizes, data, positions, path, renumbered
    )


def _gathered_singly(
    view: StoreView,
    topic: str,
    queue_id: int,
    start: int,
    queue_offsets: NDArray[np.int64],
    physical_offsets: NDArray[np.int64],
    sizes: NDArray[np.int32],
) -> Gathered:
    """Messages of a batch queue, each with a record of its own that is made from its part of the inner batch."""
    queue, log, path = view.files.queue(topic, queue_id), view.files.commit_log, view.files.paths.commit_log

    places, firsts = np.unique(physical_offsets, return_index=True)
    data, positions = log.gather(places, sizes[firsts])
    # After reading, because files are opened by their paths.
    view.check_place()

    records_of_units: list[bytes] = []
    for row, (place, first) in enumerate(zip(places.tolist(), firsts.tolist(), strict=True)):
        at, size = int(positions[row]), int(sizes[first])
        records = single_records(data[at : at + size].tobytes(), path, place)
        skipped = int(queue_offsets[first]) - queue.number_in_record(int(queue_offsets[first]))
        wanted = int(np.count_nonzero(physical_offsets == place))
        if skipped + wanted > len(records):
            said = f"unit {int(queue_offsets[first]) + wanted - 1} of {topic}/{queue_id}"
            raise MagicError(path, place, said, f"a record with {len(records)} messages")
        records_of_units += records[skipped : skipped + wanted]

    lengths = np.fromiter(map(len, records_of_units), np.int32, len(records_of_units))
    ends = np.cumsum(lengths, dtype=np.int64)
    return Gathered(
        topic,
        queue_id,
        start,
        start + len(records_of_units),
        queue_offsets,
        physical_offsets,
        lengths,
        np.frombuffer(b"".join(records_of_units), np.uint8),
        ends - lengths,
        path,
    )


def _in_order(
    view: StoreView, topic: str, queue_id: int, position: int, physical_offsets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which units point to a place after the record of the unit before.

    A broker that restores a deleted topic gives its records the next units, whatever numbers they contain. Even so,
    each unit points to a later record than the one before, so no record is in its queue twice.
    """
    before = view.units(topic, queue_id, max(position - 1, 0), position)
    filled = not len(before) or int(before["size"][0]) == FILLER_UNIT_SIZE
    last = -1 if filled else int(before["physical_offset"][0])
    renumbered: NDArray[np.bool_] = np.diff(physical_offsets, prepend=last) > 0
    return renumbered


def _check_retention(view: StoreView, topic: str, queue_id: int, position: int) -> None:
    """Raise an error if the message at `position` was deleted with the first segments of the log.

    Raises
    ------
    OffsetOutOfRangeError
        The message was deleted. The error says how many messages are gone, from this one to the first that is left.
    NotAStoreError, StoreWentBackwardsError
        The whole store is missing, or another one is there.
    """
    view.heal()
    begin = view.min_offset(topic, queue_id)
    if not view.files.queue(topic, queue_id).offsets or begin <= position:
        return

    high = view.max_offset(topic, queue_id)
    raise OffsetOutOfRangeError(
        f"{topic}/{queue_id}: {begin - position} messages from {position} on are gone, because retention has "
        f"deleted their segments. The queue holds {begin} to {high}",
        topic=topic,
        queue_id=queue_id,
        queue_offset=position,
        min=begin,
        max=high,
    )


def check_units(
    view: StoreView,
    topic: str,
    queue_id: int,
    queue_offsets: NDArray[np.int64],
    physical_offsets: NDArray[np.int64],
    sizes: NDArray[np.int32],
) -> None:
    """Refuse units that cannot belong to a record, before anything is read or allocated for them.

    Raises
    ------
    MagicError
        The size of a unit is not that of a record, or exceeds the room in its segment.
    StoreWentBackwardsError
        The queue has other units now: its topic was deleted or made again while it was read.
    """
    log = view.files.commit_log
    room = log.file_size - BLANK.size - (physical_offsets - log.min_offset) % log.file_size

    bad = np.flatnonzero((sizes <= 0) | (sizes > room) | (physical_offsets < 0))
    if len(bad):
        row = int(bad[0])
        queue_offset = int(queue_offsets[row])
        _check_same_unit(view, topic, queue_id, queue_offset, int(physical_offsets[row]), int(sizes[row]))
        raise MagicError(
            view.files.queue(topic, queue_id).place(queue_offset)[0],
            queue_offset,
            f"unit {queue_offset} of {topic}/{queue_id}",
            f"physical offset {int(physical_offsets[row])}, size {int(sizes[row])}",
            hint=REBUILD_HINT,
        )


def _check_same_unit(
    view: StoreView, topic: str, queue_id: int, queue_offset: int, physical_offset: int, size: int
) -> None:
    """Refuse a queue that no longer has a unit that was read a moment ago."""
    view.refresh()
    end = view.max_offset(topic, queue_id)
    units = view.units(topic, queue_id, queue_offset, queue_offset + 1)
    same = len(units) and (int(units["physical_offset"][0]), int(units["size"][0])) == (physical_offset, size)
    if end <= queue_offset or not same:
        raise _went_back(view, topic, queue_id, queue_offset)


def _went_back(view: StoreView, topic: str, queue_id: int, queue_offset: int) -> StoreWentBackwardsError:
    return StoreWentBackwardsError(
        f"{topic}/{queue_id}: message {queue_offset} was visible, and is gone or is another; the queue ends at "
        f"{view.max_offset(topic, queue_id)} now. Its topic was deleted or made again while it was read, or the "
        "store was restored"
    )
