"""Where a consumer begins in a queue that it gets: where its group is, or where a group without progress is to begin.

Threads: that of the consumer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from messagestore.consume.cursor import Cursor
from messagestore.consume.progress import EARLIEST, LATEST, GroupProgress, Queue
from messagestore.errors import ConfigError
from messagestore.format import arguments
from messagestore.format.message import RETRY_PREFIX
from messagestore.log.remembered import corrected
from messagestore.read import query
from messagestore.read.view import StoreView

COMMITTED = "committed"
_log = logging.getLogger(__name__)


class Beginning:
    """Makes the cursors of queues that a worker gets.

    Parameters
    ----------
    view : StoreView
    progress : GroupProgress
        The group's progress, which decides wherever there is one.
    start : str or int
        Where the group begins in other queues, as `start_of` gives it.
    record : callable
        Records a beginning that nobody could find again.
    """

    def __init__(
        self,
        view: StoreView,
        progress: GroupProgress,
        start: str | int,
        record: Callable[[Mapping[Queue, int]], None],
    ) -> None:
        self._view = view
        self._progress = progress
        self._start = start
        self._record = record
        self._retry_topic = retry_topic(progress.group)

    def cursors(self, queues: Iterable[Queue], *, created_since: bool) -> list[Cursor]:
        """Cursors for queues that are this worker's from now on.

        Parameters
        ----------
        queues : iterable of (str, int)
        created_since : bool
            A queue without progress is one that was created after the consumer was opened.

        Raises
        ------
        ConfigError
            `start` is "committed", and the group has no progress in a queue.
        CorruptionError
            The progress cannot be read.
        """
        new = sorted(queues)
        if not new:
            return []
        committed = self._progress.committed({topic for topic, _ in new})
        self._view.refresh()  # another worker may have committed messages that came since the last look
        begun: dict[Queue, int] = {}
        cursors = []
        for queue in new:
            low, high = self._view.min_offset(*queue), self._view.max_offset(*queue)
            if queue not in committed:
                begun[queue] = low if created_since else self._first(queue, low, high)  # all it has is newer
                cursors.append(Cursor(queue, begun[queue], -1))
            else:
                cursors.append(Cursor(queue, self._corrected(queue, committed[queue], low, high), committed[queue]))
        if begun and self._start != EARLIEST:
            self._record(begun)
        return cursors

    def _first(self, queue: Queue, low: int, high: int) -> int:
        """Where the group begins in a queue in which it has no progress."""
        if self._start == EARLIEST or queue[0] == self._retry_topic:
            return low
        if self._start == LATEST:
            return high
        if isinstance(self._start, int):
            return query.queue_offset_by_time(self._view, *queue, self._start)
        raise ConfigError(
            f"start: found 'committed', but group {self._progress.group!r} has no progress in queue {queue[1]} of "
            f"{queue[0]!r}; allowed for a group that begins are 'earliest', 'latest' or a time",
            key="start",
            value=self._start,
        )

    def _corrected(self, queue: Queue, committed: int, low: int, high: int) -> int:
        right = corrected(committed, low, high)
        if right != committed:
            _log.warning(
                "%s: consumer group %s has read %s/%d up to %d, but the queue ends at %d: it was rebuilt, cut, "
                "restored or made again. The group continues at %d",
                self._view.files.paths.root,
                self._progress.group,
                *queue,
                committed,
                high,
                right,
            )
        if right >= low:
            return right
        _log.warning(
            "%s: consumer group %s continues at %d in %s/%d: %d messages from %d on are gone, because retention has "
            "deleted them",
            self._view.files.paths.root,
            self._progress.group,
            low,
            *queue,
            low - right,
            right,
        )
        return low


def retry_topic(group: str) -> str:
    """The topic in which the messages are that a group has sent back."""
    return f"{RETRY_PREFIX}{group}"


def start_of(start: object) -> str | int:
    """Where a group begins: a word, or a time in milliseconds since 1970."""
    allowed = "'earliest', 'latest', 'committed', milliseconds since 1970, or a datetime with a time zone"
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise arguments.refused("start", start, allowed)
        return math.ceil(start.timestamp() * 1000)

    if isinstance(start, str):
        if start not in (EARLIEST, LATEST, COMMITTED):
            raise arguments.refused("start", start, allowed)
        return start

    try:
        return arguments.whole_number("start", start, 0)
    except ConfigError:
        raise arguments.refused("start", start, allowed) from None
