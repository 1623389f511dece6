"""Which queues of its topics a worker of a group has.

    ends of the queues (`read.queue_ends`) -> its share among the workers -> locks -> cursors
              which there are                          how many               whose    where it is in each

Threads: that of the consumer.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from messagestore.consume.beginning import Beginning, retry_topic
from messagestore.consume.cursor import Cursor
from messagestore.consume.progress import Queue
from messagestore.consume.queue_reader import QueueReader
from messagestore.errors import ConfigError, StoreLockedError
from messagestore.files.group_locks import GroupLocks
from messagestore.format import arguments
from messagestore.format.message import check_readable_queue
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.view import StoreView

_BALANCE_S = 0.25
"""How often a worker looks whether others came or went."""
Tell = Callable[[list[Queue]], None]
_log = logging.getLogger(__name__)


class Topics:
    """The topics that a consumer of a group reads: those that were named or match a pattern, and its retry topic.

    Parameters
    ----------
    topics, pattern : object
        As `Consumer` describes them.
    group : str

    Raises
    ------
    ConfigError, MessageIllegalError
        An argument is not what is allowed.
    """

    def __init__(self, topics: object, pattern: object, group: str) -> None:
        self.pattern = None if pattern is None else _pattern(pattern, topics)
        self._retry_topic = retry_topic(group)
        self.named = () if self.pattern is not None else _names(topics)
        if self._retry_topic not in self.named:
            self.named = (*self.named, self._retry_topic)

    def among(self, existing: Iterable[str]) -> tuple[str, ...]:
        """The topics to read, of those that exist now."""
        if self.pattern is None:
            return self.named
        return (*(name for name in sorted(existing) if re.fullmatch(self.pattern, name)), self._retry_topic)


class Assignment:
    """The queues that a worker has, each with its lock and its cursor.

    Parameters
    ----------
    view : StoreView
    group : str
    topics : Topics
    locks : GroupLocks
    reader : QueueReader
    beginning : Beginning
    gained : callable
        Told of queues that the worker has got, before their messages are handed out.
    leaving : callable
        Told of queues before another worker gets them. If it raises, the worker keeps them.
    lost : callable
        Told of queues that the worker has lost.

    Attributes
    ----------
    cursors : dict of (topic, queue id) to Cursor
    looked_s : float
        The time of the last look.
    """

    def __init__(
        self,
        view: StoreView,
        group: str,
        topics: Topics,
        locks: GroupLocks,
        reader: QueueReader,
        beginning: Beginning,
        *,
        gained: Tell,
        leaving: Tell,
        lost: Tell,
    ) -> None:
        self._view = view
        self._group = group
        self._topics = topics
        self._locks = locks
        self._reader = reader
        self._beginning = beginning
        self._gained, self._leaving, self._lost = gained, leaving, lost

        self._ends = self._ends_of(topics.named)
        self._restarts: dict[Queue, int] = {}
        self._has_looked = False
        self._known: frozenset[Queue] = frozenset()
        self._balanced_s = self.looked_s = -math.inf
        self.cursors: dict[Queue, Cursor] = {}

    def _ends_of(self, topics: Sequence[str]) -> QueueEnds:
        return QueueEnds(self._view, topics, names=self._topics.pattern is not None)

    # ---- the queues

    def end(self, queue: Queue) -> int:
        """Where a queue ended at the last look."""
        return self._ends.ends.get(queue, 0)

    def cursor(self, queue: object) -> Cursor:
        """The cursor of a queue that the caller of the consumer has named.

        Raises
        ------
        ConfigError
            The worker does not have the queue.
        """
        key = queue_of(queue)
        cursor = self.cursors.get(key)
        if cursor is None:
            raise ConfigError(
                f"queue: found {key[0]}/{key[1]}; allowed are the queues that this consumer reads: "
                f"{', '.join(f'{topic}/{queue_id}' for topic, queue_id in sorted(self.cursors)[:20]) or 'none yet'}",
                key="queue",
                value=queue,
            )
        return cursor

    def cursors_of(self, queues: Sequence[object]) -> list[Cursor]:
        """The cursors of some queues; without any, of all."""
        return [self.cursor(queue) for queue in queues] if queues else list(self.cursors.values())

    def kept(self, queue: Queue) -> Cursor:
        """The cursor of a queue of which messages were handed out.

        Raises
        ------
        StoreLockedError
            Another worker has the queue now.
        """
        cursor = self.cursors.get(queue)
        if cursor is None:
            raise self._given_away(f"{queue[0]}/{queue[1]}")
        return cursor

    def check_kept(self, queues: Iterable[Queue]) -> None:
        """Refuse to move the group in queues that were made again, or that another worker may have."""
        self._view.refresh()
        for queue in queues:
            self._reader.check_continues(self.cursors[queue])
        if not self._locks.intact():
            raise self._given_away("the queues of this worker")

    def _given_away(self, what: str) -> StoreLockedError:
        return StoreLockedError(
            f"{what}: not committed, because another worker of consumer group {self._group!r} has it now, or may have "
            f"it. The messages that were not committed are handed out there",
            path=self._locks.path,
            holder="another worker",
        )

    # ---- which there are

    def look(self) -> None:
        """See how far the queues reach now, and get those that are new.

        Raises
        ------
        StoreWentBackwardsError
            A queue was made again, or is gone.
        """
        self._view.refresh()
        ends = self._ends.look()
        if self._topics.pattern is not None and (names := self._named_now()) != self._ends.topics:
            self._ends, self._restarts = self._ends_of(names), {}
            ends = self._ends.look()
            self._leave_all_but(names)

        self.looked_s = time.monotonic()
        self._check_restarts(ends)
        gone = sorted(queue for queue in self.cursors if queue not in ends)
        for queue in gone:
            if self.cursors[queue].position:
                raise self._reader.went_back(self.cursors[queue], 0)
        if gone:  # nothing of them was handed out; they would count as this worker's share
            self._drop(gone)

        if not self._has_looked:
            self._beginning.begin(self._ends.topics)
        if self.looked_s - self._balanced_s > _BALANCE_S or self._known != ends.keys():
            self._balance(ends.keys())
        self._has_looked = True

    def _named_now(self) -> tuple[str, ...]:
        """The topics to read, of those that the last look has found."""
        return self._topics.among(self._ends.topic_names or ())

    def _check_restarts(self, ends: Mapping[Queue, int]) -> None:
        for queue, count in self._ends.restarts.items():
            if count > self._restarts.get(queue, 0) and queue in self.cursors:
                raise self._reader.went_back(self.cursors[queue], ends[queue])
        self._restarts = self._ends.restarts

    def leave_deleted(self) -> None:
        """Stop reading topics that the pattern has found and that were deleted since."""
        if self._topics.pattern is not None:
            self._view.refresh()
            self._ends.look()
            self._leave_all_but(self._named_now())

    def _leave_all_but(self, topics: Sequence[str]) -> None:
        gone = sorted(queue for queue in self.cursors if queue[0] not in topics)
        if not gone:
            return
        _log.warning(
            "%s: consumer group %s reads %s no more: deleted since it was found by the pattern %s",
            self._view.files.paths.root,
            self._group,
            ", ".join(sorted({topic for topic, _ in gone})),
            self._topics.pattern,
        )
        self._drop(gone)

    # ---- this worker's share

    def _balance(self, queues: Iterable[Queue]) -> None:
        """Bring the queues of each topic to this worker's share: give the others away, or take free ones."""
        self._balanced_s = time.monotonic()
        self._known = frozenset(queues)
        if not self._locks.intact():
            self._give_up_all()

        by_topic: dict[str, list[Queue]] = {topic: [] for topic in self._ends.topics}
        for queue in sorted(self._known):
            by_topic[queue[0]].append(queue)
        gained: list[Queue] = []
        for topic, all_queues in by_topic.items():
            share = self._share(topic, len(all_queues))
            had = [queue for queue in self.cursors if queue[0] == topic]
            if len(had) > share:
                self._give_away(sorted(had)[share:])
            missing = share - len(had)
            for queue in all_queues:
                if missing > 0 and queue not in self.cursors and self._locks.claim(*queue):
                    gained.append(queue)
                    missing -= 1
        self._begin(gained)

    def _share(self, topic: str, queue_count: int) -> int:
        """How many queues of a topic this worker is to have."""
        rank, count = self._locks.place(topic)
        share, left = divmod(queue_count, count)
        return share + ((rank + self._locks.shift(topic)) % count < left)

    def _begin(self, gained: list[Queue]) -> None:
        """Read queues whose locks were just taken."""
        try:
            new = self._beginning.cursors(gained, created_since=self._has_looked)
            for cursor in new:
                self._reader.recognise(cursor)
            self.cursors.update({cursor.queue: cursor for cursor in new})
        except BaseException:
            self._release(gained)
            raise
        if gained:
            self._gained(gained)

    def _give_away(self, queues: list[Queue]) -> None:
        """Give queues away: what was committed until now is where their next worker begins."""
        self._leaving(queues)
        self._forget(queues)
        self._release(queues)

    def _give_up_all(self) -> None:
        """Share anew, because the locks exclude nobody any more."""
        lost = list(self.cursors)
        _log.warning(
            "%s: this file was removed or replaced, so other workers of group %s may have the queues of this one: "
            "it gives them up, and shares the queues anew",
            self._locks.path,
            self._group,
        )
        self._locks.close()
        self._forget(lost)
        self._lost(lost)

    def _drop(self, queues: list[Queue]) -> None:
        """Give up queues that no longer exist."""
        self._forget(queues)
        self._release(queues)
        self._lost(queues)

    def _forget(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            self.cursors.pop(queue).gone = True

    def _release(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            self._locks.release(*queue)


# ---- arguments


def _pattern(pattern: object, topics: object) -> str:
    if topics:
        raise ConfigError("pattern: found topics, too; give one of them", key="pattern", value=pattern)
    text = arguments.text("pattern", pattern)
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"pattern: found {pattern!r}, which is no regular expression ({error})", key="pattern", value=pattern
        ) from None
    return text


def _names(topics: object) -> tuple[str, ...]:
    names = [topics] if isinstance(topics, str) and topics else topics
    if isinstance(names, str) or not isinstance(names, Iterable) or not (named := tuple(names)):
        raise ConfigError(
            f"topics: found {topics!r}; give one or several names of topics, or a pattern", key="topics", value=topics
        )

    for name in named:
        check_readable_queue(name, 0)
    if len({*named}) < len(named):
        raise ConfigError(f"topics: found {list(named)!r}; give each topic once", key="topics", value=topics)
    return named


def queue_of(queue: object) -> Queue:
    """A topic and a queue id."""
    if not isinstance(queue, tuple) or len(queue) != 2:
        raise arguments.refused("queue", queue, "a topic and a queue id, such as ('flights', 0)")
    topic, queue_id = queue
    check_readable_queue(topic, queue_id)
    return topic, arguments.whole_number("queue id", queue_id)
