"""Where a read ends, if the options give it an end.

A stream fixes its end when it begins and keeps that in its offsets (`Until`), so a restarted query ends at the same
place. An end that is a time is looked up as the queues grow: the end of a queue is its first message that was stored at
that time or later.
"""

from __future__ import annotations

from collections.abc import Callable

from messagestore.spi import Queue, Queues
from pyspark_messagestore.options.positions import LATEST, Asked, Moment, Position
from pyspark_messagestore.source.offsets import Until


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
    at_times : function
        The first message of each queue that was stored at its time or later; the queue's end if there is none.
    warn_once : function
        Logs a warning, once.
    """

    def __init__(
        self,
        asked: Asked,
        until: Until,
        covers: Callable[[str], bool],
        with_empty: Callable[[Asked, Queues], Queues],
        at_times: Callable[[Queues], Queues],
        warn_once: Callable[[str], None],
    ) -> None:
        self.asked, self.until = asked, until
        self._covers, self._with_empty, self._at_times, self._warn_once = covers, with_empty, at_times, warn_once
        self._reached: Queues = {}  # queues that have a message at or after the time
        self._looked: Queues = {}  # the ends of the others when they were looked at

    def forget(self) -> None:
        """Look at all queues again: they may have other messages."""
        self._reached.clear()
        self._looked.clear()

    def limited(self, ends: Queues) -> Queues:
        """The ends, but none of them beyond the bound.

        A queue that had no message yet when the end was fixed, and that the option does not list, is beyond the bound:
        nobody could have listed it, and the query would fail at its first message.

        Raises
        ------
        ConfigError
            A queue is not listed, or does not exist.
        """
        late = {queue for queue in ends if queue not in self.until.queues and not self.asked.covers(queue)}
        for topic, queue_id in sorted(late):
            self._warn_once(
                f"{topic}/{queue_id} had no message when this query began, and option {self.asked.option} does not "
                f"list it: it is not read"
            )

        listed = {queue: end for queue, end in ends.items() if queue not in late} if late else ends
        result = dict.fromkeys(late, 0)
        positions = {queue: position for queue, position in self._positions(listed).items() if queue in ends}
        now_ms = self.until.now_ms
        self._look({queue: at.at(now_ms) for queue, at in positions.items() if isinstance(at, Moment)}, ends)

        for queue, position in positions.items():
            end = ends[queue]
            if isinstance(position, Moment):
                end = min(end, self._reached.get(queue, end))
            elif position == LATEST:
                end = min(end, self.until.queues.get(queue, 0))
            else:
                assert isinstance(position, int)
                end = min(end, position)

            result[queue] = end
        return result

    def _positions(self, queues: Queues) -> dict[Queue, Position]:
        return self.asked.positions(self._with_empty(self.asked, queues), self._covers)

    def _look(self, times_ms: Queues, ends: Queues) -> None:
        """Look for the first message at or after its time in queues that had none yet and have grown since."""
        times_ms = {
            queue: time_ms
            for queue, time_ms in times_ms.items()
            if queue not in self._reached and self._looked.get(queue) != ends[queue]
        }
        for queue, first in self._at_times(times_ms).items():
            self._looked[queue] = ends[queue]
            if first < ends[queue]:
                self._reached[queue] = first

    def offsets(self, queues: Queues) -> Queues:
        """The queue offsets that the user wrote down, for some of the queues."""
        positions = self._positions(queues)
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
