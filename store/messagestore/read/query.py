"""Finds messages by queue offset, by physical offset, by key and by time.

The functions answer as RocketMQ does (DefaultMessageStore.getMessage, lookMessageByOffset, queryMessage,
getOffsetInQueueByTime), from a `StoreView`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import ConfigError, CorruptionError, MagicError
from messagestore.files.commit_log import HEAD_READ_SIZE
from messagestore.format import record, record_scan
from messagestore.format.layout import FILLER_UNIT_SIZE, SYS_FLAG_TRANSACTION_MASK, SYS_FLAG_TRANSACTION_ROLLBACK
from messagestore.format.message import BATCH_TOPIC, GetMessageResult, GetMessageStatus, MessageExt
from messagestore.format.record_scan import MIN_RECORD_SIZE
from messagestore.log.refusals import check_readable_topic
from messagestore.log.walk import Depth, Walk
from messagestore.read import queue_records
from messagestore.read.queue_records import READ_BYTES, READ_ROWS
from messagestore.read.view import StoreView, healing

LOWER, UPPER = "lower", "upper"
_DEFAULT_COUNT = 32
T = TypeVar("T")
_EVERY = 1 << 62
"""More messages than any store has."""
NO_END_MS = (1 << 63) - 1
"""A time that no message has reached: the default upper limit of a search by key."""
_SET_BACK_MS = 10_000
"""The longest time by which a broker's clock may be set back without making a search by time inexact. The times of this
project's writers stand still then, up to an hour.
"""
_LOOKED_THROUGH_ROWS = 4096


def looked_up(view: StoreView, look: Callable[[], T]) -> T:
    """What `look` finds in the store that the view has opened. It looks again if a file was deleted meanwhile."""
    answer = view.healed(look)
    view.check_place()
    return answer


def get_status(view: StoreView, topic: str, queue_id: int, queue_offset: int) -> tuple[GetMessageStatus, int, int, int]:
    """RocketMQ's status for an offset, the offset to continue with, and the queue's minimum and maximum offset."""
    low, high = view.min_offset(topic, queue_id), view.max_offset(topic, queue_id)
    if high == 0:
        return GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0, low, high
    if queue_offset < low:
        return GetMessageStatus.OFFSET_TOO_SMALL, low, low, high
    if queue_offset == high:
        return GetMessageStatus.OFFSET_OVERFLOW_ONE, queue_offset, low, high
    if queue_offset > high:
        return GetMessageStatus.OFFSET_OVERFLOW_BADLY, high, low, high
    return GetMessageStatus.FOUND, queue_offset, low, high


def get_message(
    view: StoreView, topic: str, queue_id: int, queue_offset: int, max_count: int = _DEFAULT_COUNT
) -> GetMessageResult:
    """Up to `max_count` messages of a queue from `queue_offset` on, with RocketMQ's status and next offset."""
    return looked_up(view, lambda: _get_message(view, topic, queue_id, queue_offset, max_count))


def _get_message(view: StoreView, topic: str, queue_id: int, queue_offset: int, max_count: int) -> GetMessageResult:
    view.refresh()
    status, next_offset, low, high = get_status(view, topic, queue_id, queue_offset)
    messages: list[MessageExt] = []

    if status is GetMessageStatus.FOUND:
        end = min(high, queue_offset + max(1, max_count))
        if view.files.has_batch_queues(topic):
            blocks = queue_records.blocks(view, topic, queue_id, queue_offset, end, READ_ROWS, READ_BYTES)
            messages = [message for block in blocks for message in block.messages()]
            return GetMessageResult(status, messages, end, low, high)

        units = view.units(topic, queue_id, queue_offset, end)
        readable = (message_of(view, topic, queue_id, number, unit) for number, unit in enumerate(units, queue_offset))
        messages = [message for message in readable if message is not None]
        next_offset = queue_offset + len(units)
        if not messages:
            status = GetMessageStatus.MESSAGE_WAS_REMOVING
    return GetMessageResult(status, messages, next_offset, low, high)


def message_of(view: StoreView, topic: str, queue_id: int, number: int, unit: np.void) -> MessageExt | None:
    """The message of unit `number` of a queue; None if retention has deleted it, or if the unit is below the first one.

    Raises
    ------
    CorruptionError
        The unit and the record contradict each other, or one of them is damaged.
    """
    physical_offset, size = int(unit["physical_offset"]), int(unit["size"])
    if physical_offset < view.files.commit_log.min_offset or size == FILLER_UNIT_SIZE:
        return None
    queue_records.check_units(
        view, topic, queue_id, np.array([number]), np.array([physical_offset]), np.array([size], np.int32)
    )
    return _numbered(view, topic, queue_id, number, message_at(view, physical_offset, size))


def _numbered(view: StoreView, topic: str, queue_id: int, number: int, message: MessageExt) -> MessageExt:
    """The message of a unit, with the number of the unit.

    Raises
    ------
    MagicError
        No broker ever wrote the store, but the record says that it is another message.
    """
    if (message.topic, message.queue_id, message.queue_offset) == (topic, queue_id, number):
        return message
    if not view.own:
        return replace(message, queue_offset=number)
    log, at = view.files.commit_log, message.physical_offset
    in_record = f"message {message.queue_offset} of {message.topic[:300]}/{message.queue_id}"
    raise MagicError(log.path_of(at), at, f"message {number} of {topic}/{queue_id}", in_record)


def get_batch(
    view: StoreView,
    topic: str,
    queue_id: int,
    queue_offset: int,
    max_count: int,
    columns: Sequence[str],
) -> pa.RecordBatch | None:
    """The messages of `get_message` as one record batch; None if the status is not FOUND."""
    view.refresh()
    status, _, _, high = get_status(view, topic, queue_id, queue_offset)
    if status is not GetMessageStatus.FOUND:
        return None
    end = min(high, queue_offset + max(1, max_count))
    block = next(queue_records.blocks(view, topic, queue_id, queue_offset, end, READ_ROWS, READ_BYTES), None)
    return None if block is None else block.decoded(columns)  # None: the topic was deleted meanwhile


def message_at(view: StoreView, physical_offset: int, size: int | None = None) -> MessageExt:
    """The message whose record begins at a physical offset.

    Raises
    ------
    CorruptionError
        No record begins there, or it is damaged.
    """
    log = view.files.commit_log
    path = log.path_of(physical_offset)
    data = log.record_bytes(physical_offset) if size is None else log.exact(physical_offset, size)
    if data is None:
        raise CorruptionError(
            path, physical_offset, "a record", "none", hint="Give the physical offset of a record's first byte."
        )
    return record.decode_message(data, path=path, physical_offset=physical_offset)


def look_message_by_offset(view: StoreView, physical_offset: int) -> MessageExt | None:
    """The message at a physical offset; None if no visible record begins there."""
    return looked_up(view, lambda: _look_message_by_offset(view, physical_offset))


def _look_message_by_offset(view: StoreView, physical_offset: int) -> MessageExt | None:
    view.refresh()
    return _message_at(view, physical_offset)


def _message_at(view: StoreView, physical_offset: int) -> MessageExt | None:
    """The message at a physical offset that the last `refresh` shows; None if no record begins there."""
    visible = view.visible
    if physical_offset < view.files.commit_log.min_offset or (
        visible.end is not None and physical_offset >= visible.end
    ):
        return None

    if physical_offset >= view.files.commit_log.max_offset:
        view.check_units_in_log()

    data = view.files.commit_log.record_bytes(physical_offset)
    if data is None:
        return None

    try:
        path = view.files.commit_log.path_of(physical_offset)
        return record.decode_message(data, path=path, physical_offset=physical_offset)
    except CorruptionError:
        if view.files.commit_log.head(physical_offset) is not None:
            raise  # a record begins here and is damaged
        return None


def query_message(
    view: StoreView,
    topic: str,
    key: str,
    max_count: int | None = None,
    begin_ms: int = 0,
    end_ms: int = NO_END_MS,
) -> list[MessageExt]:
    """The newest messages of a topic with a key (or unique key), oldest first; each hit is checked against its record.

    The parts of the log that no index file covers are scanned, so a missing index file makes this slow but not wrong.

    Parameters
    ----------
    max_count : int | None
        The largest number of messages; None: the setting `maxMsgsNumBatch`.

    Raises
    ------
    ConfigError
        `max_count` is below 1.
    """
    if max_count is None:
        max_count = view.files.config.max_msgs_num_batch
    elif max_count < 1:
        raise ConfigError(f"max_count: found {max_count}; allowed is 1 or more", key="max_count", value=max_count)
    return looked_up(view, lambda: _query_message(view, topic, key, max_count, begin_ms, end_ms))


def find_keys(view: StoreView, topic: str, keys: Iterable[str], most: int | None = None) -> dict[int, list[int]]:
    """All messages of a topic with one of some keys (or unique keys): queue id -> queue offsets, ascending.

    Raises
    ------
    ConfigError
        There may be more than `most`: so many hits are looked at.
    """
    at_most = _EVERY if most is None else most

    def look() -> dict[int, list[int]]:
        numbers: dict[int, set[int]] = {}
        left = at_most
        for key in keys:
            for message in _messages_with(view, topic, key, at_most, 0, NO_END_MS, most_hits=left):
                left -= 1
                number = view.search_physical(topic, message.queue_id, message.physical_offset)
                unit = view.units(topic, message.queue_id, number, number + 1)
                if len(unit) and int(unit["physical_offset"][0]) == message.physical_offset:
                    numbers.setdefault(message.queue_id, set()).add(number)
        return {queue_id: sorted(of_queue) for queue_id, of_queue in sorted(numbers.items())}

    return looked_up(view, look)


def runs_of(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs of consecutive ones: the first of each, and the one after its last."""
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1


def _query_message(
    view: StoreView, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int
) -> list[MessageExt]:
    return list(deque(_messages_with(view, topic, key, max_count, begin_ms, end_ms), max_count))


def _messages_with(
    view: StoreView, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int, *, most_hits: int = _EVERY
) -> Iterator[MessageExt]:
    """The messages with a key, oldest first: at least the newest `max_count`.

    Raises
    ------
    ConfigError
        More than `most_hits` messages may have it.
    """
    visible = view.refresh()
    files = view.files
    if topic not in view.topics():
        check_readable_topic(topic)
        return
    if files.has_batch_queues(topic):
        raise ConfigError(
            f"topic {topic!r} has batch queues (queue.type=BatchCQ), and RocketMQ's index does not contain the keys of "
            "their messages. Read the topic, and compare its keys",
            key="topic",
            value=topic,
        )
    if view.known_end is None:
        for queue_id in view.queue_ids(topic):
            view.max_offset(topic, queue_id)  # refuses a log that lacks segments
    # Entries hold whole seconds, and hits may be other keys with the same hash: ask for more, and check them.
    hits, gaps = _look_up(view, [topic], key, 2 * max_count + 64, begin_ms - 1000, end_ms)
    if view.refresh().recovered != visible.recovered:  # a recovery began or ended meanwhile
        visible = view.visible
        hits, gaps = _look_up(view, [topic], key, 2 * max_count + 64, begin_ms - 1000, end_ms)
    limit = visible.end if visible.end is not None else files.commit_log.max_offset
    for start, end in gaps:
        for _, found in _runs_with_key(view, key, start, min(end, limit)):
            hits.update(found)
            _check_hits(hits, topic, most_hits)
    _check_hits(hits, topic, most_hits)
    for physical_offset in sorted(hits):
        if not files.commit_log.min_offset <= physical_offset < limit:
            continue
        message = _look_message_by_offset(view, physical_offset)
        if message is None or message.topic != topic or not (key == message.unique_key or key in message.keys):
            continue
        if message.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_ROLLBACK:
            continue  # the scan found it; in RocketMQ it has no index entries
        if begin_ms <= message.store_timestamp_ms <= end_ms:
            yield message


def _check_hits(hits: set[int], topic: str, most: int) -> None:
    if len(hits) > most:
        raise ConfigError(
            f"keys: found more than {most:,} messages of topic {topic!r} that may have them, which is the limit here. "
            f"Give fewer keys, or read the topic and compare its keys",
            key="keys",
        )


@dataclass(frozen=True)
class KeySearch:
    """What a search through a part of a store has found.

    Parameters
    ----------
    messages : list of MessageExt
        The messages with the key, in the order of the log; of those that the index found, the newest.
    searched_size : int
        How many bytes of the log were read because the index does not cover them.
    go_on : int | None
        The physical offset at which a further search begins; None: all was searched.
    begin, end : int
        The physical offsets of the part of the log that there is to search, by the index or without it.
    more : bool
        There are, or may be, older messages with the key.
    """

    messages: list[MessageExt]
    searched_size: int
    go_on: int | None
    begin: int
    end: int
    more: bool


def search_key(view: StoreView, key: str, *, max_count: int, max_size: int, start: int | None = None) -> KeySearch:
    """Search all topics for a key or unique key, and read at most about `max_size` bytes that the index does not cover.

    Topics with batch queues, whose keys the index does not have, are left out.

    Parameters
    ----------
    start : int | None
        Where the last search stopped (`go_on`): the index is not asked again.
    """
    return looked_up(view, lambda: _search_key(view, key, max_count, max_size, start))


def _search_key(view: StoreView, key: str, max_count: int, max_size: int, start: int | None) -> KeySearch:
    view.refresh()
    files = view.files
    topics = {topic for topic in view.topics() if topic != BATCH_TOPIC and not files.has_batch_queues(topic)}
    asked = topics if start is None else ()  # whoever goes on has the hits of the index
    hits, gaps = _look_up(view, asked, key, 2 * max_count + 64, 0, NO_END_MS)

    limit = view.known_end if view.known_end is not None else files.commit_log.max_offset
    parts = [(max(gap_start, start or 0), min(gap_end, limit)) for gap_start, gap_end in gaps]
    size, go_on = _search_parts(view, key, parts, max_size, hits)

    found, matches = deque[MessageExt](maxlen=max_count), 0
    for physical_offset in sorted(hit for hit in hits if files.commit_log.min_offset <= hit < limit):
        message = _message_at(view, physical_offset)
        if message is None or message.topic not in topics or not (key == message.unique_key or key in message.keys):
            continue
        if message.sys_flag & SYS_FLAG_TRANSACTION_MASK != SYS_FLAG_TRANSACTION_ROLLBACK:
            found.append(message)
            matches += 1
    return KeySearch(list(found), size, go_on, min(files.commit_log.min_offset, limit), limit, matches > max_count)


def _search_parts(
    view: StoreView, key: str, parts: Iterable[tuple[int, int]], max_size: int, hits: set[int]
) -> tuple[int, int | None]:
    """Add to `hits` the records in parts of the log that may contain a key: how many bytes were read, and where a
    further search begins (None: all was searched).
    """
    size = 0
    for begin, end in parts:
        position = begin
        for run_end, candidates in _runs_with_key(view, key, position, end):
            if size >= max_size:  # not before there is more to read
                return size, position
            hits.update(candidates)
            size += run_end - position
            position = run_end
    return size, None


def _look_up(
    view: StoreView, topics: Iterable[str], key: str, max_count: int, begin_ms: int, end_ms: int
) -> tuple[set[int], list[tuple[int, int]]]:
    """The hits of the index, at most so many in each topic, and the ranges of the log that it does not cover."""
    index, visible, position = view.files.index, view.visible, view.files.commit_log.min_offset
    hits: set[int] = set()
    gaps = []
    if index is not None:
        index.load()
        if not visible.recovered:
            index.forget_unsafe(visible.clean_end)
        for topic in topics:
            hits.update(index.search(topic, key, max_count, begin_ms, end_ms))
        for begin, end in index.ranges():  # a crashed broker also leaves gaps between files
            gaps.append((position, begin))
            position = max(position, end)
    return hits, [*gaps, (position, NO_END_MS)]


def _runs_with_key(view: StoreView, key: str, start: int, end: int) -> Iterator[tuple[int, list[int]]]:
    """The records of a range, run by run: where the run ends, and the physical offsets of those whose bytes may
    contain the key.
    """
    needle = key.encode()
    walk = Walk(view.files.commit_log, start, end, Depth.FRAMING) if start < end else ()
    for run in walk:
        text = run.data.tobytes()
        candidates = []
        hit = text.find(needle)
        while hit >= 0:
            row = int(np.searchsorted(run.starts, hit, side="right")) - 1
            candidates.append(run.physical_offset + int(run.starts[row]))
            if row + 1 >= len(run.starts):
                break
            hit = text.find(needle, int(run.starts[row + 1]))
        yield run.end, candidates


def queue_offset_by_time(view: StoreView, topic: str, queue_id: int, timestamp_ms: int, boundary: str = LOWER) -> int:
    """The queue offset for a store time, as in RocketMQ's getOffsetInQueueByTime.

    Parameters
    ----------
    boundary : str
        "lower": the first message that was stored at the time or later (the queue's end if there is none). "upper": the
        last message that was stored at the time or earlier (the queue's begin if there is none).
    """
    view.refresh()
    if boundary == LOWER:
        offset = offset_behind_time(view, topic, queue_id, timestamp_ms - 1)
    else:
        low = view.min_offset(topic, queue_id)
        offset = max(low, offset_behind_time(view, topic, queue_id, timestamp_ms) - 1)
    view.check_place()
    return offset


def offset_behind_time(view: StoreView, topic: str, queue_id: int, timestamp_ms: int) -> int:
    """The number of the first message of a queue that was stored after a time; its maximum offset if there is
    none.

    A broker's store times go back when its clock is set back. By up to `_SET_BACK_MS`, the number is exact: the
    search begins that much earlier, and looks at each message from there on.
    """
    return offsets_behind_times(view, topic, queue_id, [timestamp_ms])[0]


@healing
def offsets_behind_times(
    view: StoreView, topic: str, queue_id: int, times_ms: Sequence[int], bounds: tuple[int, int] | None = None
) -> list[int]:
    """The same for several times. The queue's bounds are looked for once, unless they are known, and no message is
    looked at twice.
    """
    first, end = bounds or view.bounds(topic, queue_id)
    seen: dict[int, int | None] = {}

    def stored_ms(number: int) -> int | None:
        if number not in seen:
            units = view.units(topic, queue_id, number, number + 1)
            head = view.files.commit_log.head(int(units["physical_offset"][0])) if len(units) else None
            seen[number] = None if head is None else int(head["store_timestamp_ms"])
        return seen[number]

    first_ms, last_ms = (None, None) if first == end else (stored_ms(first), stored_ms(end - 1))

    def behind(before_ms: int) -> int:
        if last_ms is not None and last_ms <= before_ms:  # most often nothing was stored since the time,
            return end
        if first_ms is not None and first_ms > before_ms:  # or everything
            return first

        left, right = first, end
        while left < right:
            middle = (left + right) // 2
            middle_ms = stored_ms(middle)
            if middle_ms is not None and middle_ms > before_ms:
                right = middle
            else:
                left = middle + 1
        return left

    if view.own:
        return [behind(time_ms) for time_ms in times_ms]
    return [_first_behind(view, topic, queue_id, behind(time_ms - _SET_BACK_MS), end, time_ms) for time_ms in times_ms]


def _first_behind(view: StoreView, topic: str, queue_id: int, start: int, end: int, timestamp_ms: int) -> int:
    """The number of the first message from `start` on that was stored after a time; `end` if there is none."""
    log = view.files.commit_log
    while start < end:
        units = view.units(topic, queue_id, start, min(end, start + _LOOKED_THROUGH_ROWS))
        if not len(units):
            return start

        rows = np.flatnonzero((units["physical_offset"] >= log.min_offset) & (units["size"] >= MIN_RECORD_SIZE))
        if len(rows):
            offsets = units["physical_offset"][rows].astype(np.int64)
            data, positions = log.gather(offsets, np.minimum(units["size"][rows], HEAD_READ_SIZE).astype(np.int32))
            heads = record_scan.heads(np.append(data, np.zeros(HEAD_READ_SIZE, np.uint8)), positions)
            later = (heads["physical_offset"] == offsets) & (heads["store_timestamp_ms"] > timestamp_ms)
            if later.any():
                return start + int(rows[later.argmax()])

        start += len(units)
    return end
