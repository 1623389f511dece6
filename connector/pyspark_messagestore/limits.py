"""How far the next micro-batch reads, so that it stays within the limits that the user has set.

The functions work on numbers; the sizes of records come from a function of the caller.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from messagestore.spi import Queue, Queues, Range

Sizes = Callable[[Range], NDArray[np.int32]]
"""The sizes of the records of a range, from its beginning; fewer if the rest is missing."""
_FIRST_SIZES = 256
_MOST_SIZES = 65_536


def limited(starts: Queues, ends: Queues, most: int) -> Queues:
    """The ends of a step that takes exactly `most` messages (or all, if there are fewer).

    The share of each queue is in proportion to the messages that it holds, and at least one message. If there are more
    queues with messages than `most`, the queues take turns. The turns begin at another queue each time, as the start
    offsets move, so that every queue is read.
    """
    waiting = {queue: end - starts.get(queue, 0) for queue, end in sorted(ends.items()) if end > starts.get(queue, 0)}
    if sum(waiting.values()) <= most:
        return dict(ends)
    result = {queue: min(starts.get(queue, 0), end) for queue, end in ends.items()}
    queues = list(waiting)
    if most <= len(queues):
        first = sum(starts.get(queue, 0) for queue in ends) % len(queues)
        for queue in (queues + queues)[first : first + most]:
            result[queue] += 1
        return result
    rest, more = most - len(queues), sum(waiting.values()) - len(queues)
    shares = {queue: divmod((count - 1) * rest, more) for queue, count in waiting.items()}
    left = rest - sum(whole for whole, _ in shares.values())
    by_remainder = sorted(queues, key=lambda queue: -shares[queue][1])
    rounded_up = set(by_remainder[:left])
    for queue in queues:
        result[queue] += 1 + shares[queue][0] + (queue in rounded_up)
    return result


def limited_by_size(starts: Queues, ends: Queues, most: int, mean_sizes: Mapping[Queue, float], sizes: Sizes) -> Queues:
    """The ends of a step whose records have at most `most` bytes together, or that has one larger message.

    No further message of any queue fits into what is left. First each queue gives one message, as far as they fit; then
    the share of each queue is in proportion to the bytes that it holds. The queue that is first, and thus gives a
    message in any case, is another one each time, so that every queue is read.

    Parameters
    ----------
    mean_sizes : mapping
        About how large the records of each queue are.
    """
    result = {queue: min(starts.get(queue, 0), end) for queue, end in ends.items()}
    queues = [queue for queue, end in sorted(ends.items()) if end > result[queue]]
    if not queues:
        return result
    first = zlib.crc32(b"%d" % sum(result.values())) % len(queues)
    queues = queues[first:] + queues[:first]
    left = most

    def take(queue: Queue, count: int, room: int) -> None:
        nonlocal left
        start = result[queue]
        end, size = fitting(Range(*queue, start, min(ends[queue], start + count)), min(room, left), sizes)
        result[queue], left = end, left - size

    for queue in queues:
        take(queue, 1, left)
    if all(result[queue] == starts.get(queue, 0) for queue in queues):
        result[queues[0]] += 1
        return result
    waiting = {queue: (ends[queue] - result[queue]) * mean_sizes[queue] for queue in queues}
    total, shared = sum(waiting.values()), left
    for queue in queues if total else ():
        take(queue, ends[queue] - result[queue], int(shared * waiting[queue] / total))
    for queue in queues:
        take(queue, ends[queue] - result[queue], left)
    return result


def fitting(each: Range, room: int, sizes: Sizes) -> tuple[int, int]:
    """How far a range fits into a number of bytes: its end, and the bytes that it has up to there."""
    position, used, count = each.start, 0, _FIRST_SIZES
    while position < each.end:
        found = np.cumsum(
            sizes(Range(each.topic, each.queue_id, position, min(each.end, position + count))), dtype="i8"
        )
        fits = int(np.searchsorted(found, room - used, side="right"))
        if fits:
            used += int(found[fits - 1])
            position += fits
        if not len(found) or fits < len(found):
            break
        count = min(4 * count, _MOST_SIZES)
    return position, used
