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

    A group begins in its topics once, in all their queues, whichever of its workers comes first. A queue is made when
    its first message is put: where the group has begun, a queue without progress is newer, and nothing in it is
    skipped. With a pattern, that counts for topics, too.

    Parameters
    ----------
    view : StoreView
    progress : GroupProgress
        The group's progress, which decides wherever there is one.
    start : str or int
        Where the group begins, as `start_of` gives it.
    grows : bool
        A pattern finds the topics: a group that has begun in one of them has begun in those that are made later.
    record : callable
        Records a beginning that nobody could find again, in topics in which the group has none. Says if it could.
    """

    def __init__(
        self,
        view: StoreView,
        progress: GroupProgress,
        start: str | int,
        record: Callable[[Mapping[Queue, int]], bool],
        *,
        grows: bool,
    ) -> None:
        self._view = view
        self._progress = progress
        self._start = start
        self._record = record
        self._grows = grows
        self._begun_topics: set[str] = set()
        self._unrecorded: dict[Queue, int] = {}
        """Where this consumer began while a broker held the store. What is recorded goes when its topic is deleted."""
        self._retry_topic = retry_topic(progress.group)

    def begin(self, topics: Iterable[str]) -> None:
        """Record where the group begins in topics in which it has no progress, unless that is their first message."""
        if self._start in (EARLIEST, COMMITTED):
            return
        begun_before = self._progress.topics()
        if self._grows and begun_before and self._start == LATEST:
            return
        self._view.refresh()
        begun: dict[Queue, int] = {}
        for topic in sorted(set(topics) - begun_before - {self._retry_topic}):
            for queue_id in self._view.queue_ids(topic) or [0]:
                queue = (topic, queue_id)
                begun[queue] = self._view.max_offset(*queue) if self._start == LATEST else self._by_time(queue)
        if self._grows and not begun:
            begun[self._retry_topic, 0] = 0  # the pattern has found nothing yet, and the group has begun
        self._begun_topics = {topic for topic, _ in begun}
        if begun and not self._record(begun):
            self._unrecorded = begun

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
            `start` is "committed", and the group has no progress in a topic.
        CorruptionError
            The progress cannot be read.
        """
        new = sorted(queues)
        if not new:
            return []
        committed = self._progress.committed({topic for topic, _ in new})
        begun_topics = {self._retry_topic, *(topic for topic, _ in committed)}
        self._view.refresh()  # another worker may have committed messages that came since the last look
        cursors = []
        for queue in new:
            if queue in committed:
                low, high = self._view.min_offset(*queue), self._view.max_offset(*queue)
                cursors.append(Cursor(queue, self._corrected(queue, committed[queue], low, high), committed[queue]))
                continue
            if self._start == COMMITTED and not created_since and queue[0] not in begun_topics:
                raise ConfigError(
                    f"start: found 'committed', but group {self._progress.group!r} has no progress in {queue[0]!r}; "
                    "allowed for a group that begins are 'earliest', 'latest' or a time",
                    key="start",
                    value=self._start,
                )
            position = self._unrecorded[queue] if queue in self._unrecorded else self._first(queue)
            cursors.append(Cursor(queue, position, -1))
        return cursors

    def _first(self, queue: Queue) -> int:
        """Where the group reads a queue that was made after it has begun in the topic.

        A time that is still to come counts where this consumer began with it. Another one may have begun earlier.
        """
        if isinstance(self._start, int) and queue[0] in self._begun_topics:
            return self._by_time(queue)
        return self._view.min_offset(*queue)

    def _by_time(self, queue: Queue) -> int:
        assert isinstance(self._start, int)
        return query.queue_offset_by_time(self._view, *queue, self._start)

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
    """The topic of the messages that a group has sent back."""
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
