"""How far the next micro-batch reads, so that it stays within the limits that the user has set, and when it waits.

The functions work on numbers; the sizes of records come from a function of the caller.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messagestore.spi import Queue, Queues, Range

Sizes = Callable[[Range], NDArray[np.int32]]
"""The sizes of the records of a range, from its beginning; fewer if the rest is missing."""
_FIRST_SIZES = 256
_MOST_SIZES = 65_536
_MOST_ASKED = 262_144
"""How many sizes are asked for at once."""


class MinOffsets:
    """`minOffsetsPerTrigger`: a micro-batch waits until there are so many messages, for `maxTriggerDelay` at most.

    Parameters
    ----------
    least : int | None
        How many messages; None: no micro-batch waits.
    delay_s : float
        For how long a micro-batch waits.

    Attributes
    ----------
    until_s : float
        When the wait that goes on ends, by the monotonic clock.
    has_looked : bool
        Whether this run has looked for messages. What it finds at its first look does not wait for others.
    """

    def __init__(self, least: int | None, delay_s: float) -> None:
        self.least = least
        self.until_s = 0.0
        self.has_looked = False
        self._delay_s = delay_s
        self._start: dict[str, Any] | None = None

    def waits(self, start: dict[str, Any], count: int, *, ends_soon: bool) -> bool:
        """Whether the micro-batch from `start` on waits, since there are only `count` messages so far.

        It does not if the query ends soon.
        """
        is_first, self.has_looked = not self.has_looked, True
        if self.least is None or ends_soon or is_first or not 0 < count < self.least:
            return False
        if self._start != start:
            self._start, self.until_s = start, time.monotonic() + self._delay_s
        return time.monotonic() < self.until_s


class SizesAhead:
    """The sizes of records, asked for together with those that will be needed next: one call for many queues.

    Parameters
    ----------
    ask : function
        Returns the sizes of the records of several ranges.
    needed : list of Range
        What will probably be needed, in this order.
    """

    def __init__(self, ask: Callable[[Sequence[Range]], list[NDArray[np.int32]]], needed: Sequence[Range]) -> None:
        self._ask = ask
        self._needed = list(reversed(needed))  # the next one is last
        self._known: dict[Queue, tuple[int, NDArray[np.int32]]] = {}

    def __call__(self, range_: Range) -> NDArray[np.int32]:
        """The sizes of a range from its beginning: at least one, unless its unit is missing."""
        queue = range_.topic, range_.queue_id
        if not self._has(queue, range_.start):
            self._fetch(range_)
        start, sizes = self._known[queue]
        return sizes[range_.start - start : range_.end - start]

    def _has(self, queue: Queue, offset: int) -> bool:
        start, sizes = self._known.get(queue, (0, ()))
        return start <= offset < start + len(sizes)

    def _fetch(self, range_: Range) -> None:
        """Ask for a range, and for what is needed next."""
        own = range_.topic, range_.queue_id
        wanted, left = {own: range_}, _MOST_ASKED

        while self._needed and left > 0:
            following = self._needed.pop()
            part = replace(following, end=min(following.end, following.start + left))
            if part.end < following.end:
                self._needed.append(replace(following, start=part.end))
            left -= part.count

            queue = part.topic, part.queue_id
            if queue == own and part.start <= range_.start < part.end:
                wanted[own] = replace(range_, end=max(range_.end, part.end))
            else:
                wanted.setdefault(queue, part)

        for queue, sizes in zip(wanted, self._ask(list(wanted.values())), strict=True):
            self._known[queue] = wanted[queue].start, sizes


def shares(ranges: Sequence[Range], most: int, mean_sizes: Mapping[Queue, float]) -> list[Range]:
    """About what `limited_by_size` will look at: twice each queue's share of `most` bytes, and a few messages more."""
    total = sum(span.count * mean_sizes[span.topic, span.queue_id] for span in ranges)
    part = min(1.0, 2 * most / total) if total else 1.0
    return [replace(span, end=min(span.end, span.start + int(span.count * part) + 8)) for span in ranges]


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

    # Each queue has one message. The queues share the others in proportion to what they hold beyond it.
    rest, more = most - len(queues), sum(waiting.values()) - len(queues)
    shares = {queue: divmod((count - 1) * rest, more) for queue, count in waiting.items()}

    # Whole shares leave some messages over; those with the largest remainders get them, so the sum is exactly `most`.
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

    # Each next message is larger than `most`. One is taken all the same; otherwise the query would never get past it.
    if all(result[queue] == starts.get(queue, 0) for queue in queues):
        result[queues[0]] += 1
        return result

    waiting = {queue: (ends[queue] - result[queue]) * mean_sizes[queue] for queue in queues}
    total, shared = sum(waiting.values()), left
    for queue in queues if total else ():
        take(queue, ends[queue] - result[queue], int(shared * waiting[queue] / total))

    # What the shares leave goes to the queues in turn, until none of their messages fits.
    for queue in queues:
        take(queue, ends[queue] - result[queue], left)
    return result


def fitting(range_: Range, room: int, sizes: Sizes) -> tuple[int, int]:
    """How far a range fits into a number of bytes: its end, and the bytes that it has up to there."""
    position, used, count = range_.start, 0, _FIRST_SIZES
    while position < range_.end:
        used_up_to = np.cumsum(
            sizes(Range(range_.topic, range_.queue_id, position, min(range_.end, position + count))), dtype="i8"
        )

        fits = int(np.searchsorted(used_up_to, room - used, side="right"))
        if fits:
            used += int(used_up_to[fits - 1])
            position += fits

        if not len(used_up_to) or fits < len(used_up_to):
            break
        count = min(4 * count, _MOST_SIZES)
    return position, used
