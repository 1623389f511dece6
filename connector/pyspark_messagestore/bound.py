"""Where a read ends that does not go on for ever.

A stream fixes its end when it begins and keeps that in its offsets (`Until`), so a restarted query ends at the same
place. An end that is a time is looked up as the queues grow: the end of a queue is its first message that was stored at
that time or later.
"""

from __future__ import annotations

from collections.abc import Callable

from messagestore.spi import Queue, Queues
from pyspark_messagestore.offsets import Until
from pyspark_messagestore.positions import LATEST, Asked, Moment


class Bound:
    """The ends of the queues.

    Parameters
    ----------
    asked : Asked
    until : Until
    covers : function
        Whether a topic is read.
    with_empty : function
        The ends, also of queues that never had a message but may be named.
    at_time : function
        The first message of a queue that was stored at a time or later, or a given end if there is none.
    """

    def __init__(
        self,
        asked: Asked,
        until: Until,
        covers: Callable[[str], bool],
        with_empty: Callable[[Asked, Queues], Queues],
        at_time: Callable[[Queue, int, int], int],
    ) -> None:
        self.asked, self.until = asked, until
        self._covers, self._with_empty, self._at_time = covers, with_empty, at_time
        self._reached: Queues = {}  # queues that have a message at or after the time
        self._looked: Queues = {}  # the ends of the others when they were looked at

    def forget(self) -> None:
        """Look at all queues again: they may have other messages."""
        self._reached.clear()
        self._looked.clear()

    def limited(self, ends: Queues) -> Queues:
        """The ends, but none of them beyond the bound.

        Raises
        ------
        ConfigError
            A queue is not listed, or does not exist.
        """
        result = {}
        for queue, position in self.asked.positions(self._with_empty(self.asked, ends), self._covers).items():
            if queue not in ends:
                continue
            end = ends[queue]
            if isinstance(position, Moment):
                end = self._by_time(queue, position.at(self.until.now_ms), end)
            elif position == LATEST:
                end = min(end, self.until.queues.get(queue, 0))
            else:
                assert isinstance(position, int)
                end = min(end, position)
            result[queue] = end
        return result

    def _by_time(self, queue: Queue, time_ms: int, end: int) -> int:
        if queue not in self._reached and self._looked.get(queue) != end:
            self._looked[queue] = end
            first = self._at_time(queue, time_ms, end)
            if first < end:
                self._reached[queue] = first
        return min(end, self._reached.get(queue, end))

    def offsets(self, queues: Queues) -> Queues:
        """The queue offsets that the user wrote down, for some of the queues."""
        positions = self.asked.positions(self._with_empty(self.asked, queues), self._covers)
        return {queue: at for queue, at in positions.items() if queue in queues and isinstance(at, int) and at >= 0}

    def check(self, firsts: Queues) -> None:
        """Refuse an end below the beginning.

        Raises
        ------
        ConfigError
        """
        for queue, end in self.offsets(firsts).items():
            if end < firsts[queue]:
                raise self.asked.error(
                    f"queue {queue[1]} of {queue[0]} would end at {end}, but the read begins at {firsts[queue]}. Give "
                    f"an end that is not before the beginning"
                )
