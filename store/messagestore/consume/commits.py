"""What a consumer commits: which offsets it may commit, and when they become the progress of its group.

    the caller, `auto_commit` or a batch -> next offsets of queues -> the group's progress
                      asks                   checked first             written

A commit writes the progress at once (`commit`, `commit_if_due`). A batch moves it with its results (`Positions`). Both
first check that the worker still has the queues, and that they still are the queues that it has read.

Threads: that of the consumer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

from messagestore.consume.assignment import Assignment
from messagestore.consume.messages import ConsumedMessage
from messagestore.consume.positions import Positions
from messagestore.consume.progress import GroupProgress, Queue
from messagestore.consume.queue_reader import QueueReader
from messagestore.errors import ConfigError, StoreLockedError
from messagestore.format import arguments

_log = logging.getLogger(__name__)


class Commits:
    """The commits of one consumer.

    Parameters
    ----------
    root : str
        The store.
    progress : GroupProgress
    assignment : Assignment
    reader : QueueReader
    used : callable
        Returns a context in which no other thread uses the consumer; refuses a consumer that is closed.
    interval_s : float
        The time between two commits that the consumer makes by itself.
    """

    def __init__(
        self,
        root: str,
        progress: GroupProgress,
        assignment: Assignment,
        reader: QueueReader,
        used: Callable[[], AbstractContextManager[None]],
        interval_s: float,
    ) -> None:
        self.group = progress.group
        self._root = root
        self._progress = progress
        self._assignment = assignment
        self._reader = reader
        self._used = used
        self._interval_s = interval_s
        self._committed_s = time.monotonic()
        self._warned_of_broker = False

    # ---- progress that is written at once

    def committed(self, queue: Queue) -> int | None:
        """The group's progress in a queue, read now: the number of the next message; None if it has none."""
        return self._progress.committed([queue[0]]).get(queue)

    def record_beginning(self, begun: Mapping[Queue, int]) -> bool:
        """Record where the group begins. Returns whether it was written; it is not while a broker holds the store."""
        try:
            self._progress.commit(begun, first=True)
        except StoreLockedError as error:
            self._tell_of_broker(error)
            return False
        return True

    def commit(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None) -> None:
        """What `Consumer.commit` does."""
        self._commit(self._asked_for(messages))

    def _commit(self, offsets: Mapping[Queue, int]) -> None:
        new = self._new(offsets)
        if not new:
            return

        self._assignment.check_kept(new)
        self._progress.commit(new)
        for queue, offset in new.items():
            self._assignment.cursors[queue].committed(offset)

    def commit_if_due(self) -> None:
        """Commit what the caller got before this call, if it is time."""
        if time.monotonic() - self._committed_s >= self._interval_s:
            self.commit_by_itself()

    def commit_by_itself(self) -> None:
        """Commit all that was handed out, although nobody has asked; while a broker holds the store, warn instead."""
        self._committed_s = time.monotonic()
        try:
            self._commit(self._all_done())
        except StoreLockedError as error:
            self._tell_of_broker(error)

    def _tell_of_broker(self, error: StoreLockedError) -> None:
        """Warn once that the progress is not written; reading goes on."""
        if not self._warned_of_broker:
            self._warned_of_broker = True
            _log.warning("the progress of consumer group %s is not written: %s", self.group, error)

    # ---- progress that a batch moves

    def positions(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None) -> Positions:
        """What `Consumer.positions` does."""
        return Positions(self, self._new(self._asked_for(messages)))

    @contextlib.contextmanager
    def held(self, root: str, offsets: Mapping[Queue, int]) -> Iterator[None]:
        """Keep queues while a batch moves the group in them (`Positions`)."""
        with self._used():
            if os.path.realpath(root) != os.path.realpath(self._root):
                raise ConfigError(
                    f"progress: found positions of a consumer of {self._root}; allowed are those of {root}, the store "
                    f"to which the batch is appended: a batch moves no group of another store. Nothing was appended. "
                    f"Append without progress and commit then, which is at least once",
                    key="progress",
                )

            for queue in offsets:
                self._assignment.kept(queue)
            self._assignment.check_kept(offsets)

            if not self._new(offsets):
                raise ConfigError(
                    f"progress: found positions to which consumer group {self.group!r} was moved already, by a batch "
                    f"or a commit; allowed are those of a new poll. Nothing was appended. Put all results into one "
                    f"batch: its rows may have several topics",
                    key="progress",
                )

            for queue, offset in offsets.items():
                failed = self._assignment.cursors[queue].failed
                if failed is not None and failed.queue_offset < offset:
                    raise ConfigError(
                        f"progress: found positions behind message {failed.queue_offset} of {queue[0]}/{queue[1]}, "
                        f"which failed since they were taken (`retry`) and comes again; allowed are positions of what "
                        f"is done. Nothing was appended. Take `positions()` again",
                        key="progress",
                    )
            yield

    def may_move(self, queue: Queue, offset: int) -> bool:
        """Whether the group is in a queue where this consumer knows it (`Positions`)."""
        return offset in self._assignment.cursors[queue].bases

    def moved(self, offsets: Mapping[Queue, int]) -> None:
        """A batch has moved the group (`Positions`)."""
        for queue, offset in offsets.items():
            self._assignment.cursors[queue].committed(offset)

    # ---- offsets

    def _asked_for(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None) -> dict[Queue, int]:
        if messages is None:
            return self._all_done()
        return self._offsets_of([messages] if isinstance(messages, ConsumedMessage) else messages)

    def _all_done(self) -> dict[Queue, int]:
        """Where the group may be in all queues. A topic that was deleted since the last look is left out."""
        self._assignment.leave_deleted()
        return {queue: cursor.done for queue, cursor in self._assignment.cursors.items()}

    def _new(self, offsets: Mapping[Queue, int]) -> dict[Queue, int]:
        """The offsets that would move the group."""
        return {queue: offset for queue, offset in offsets.items() if offset > self._assignment.cursors[queue].floor}

    def _offsets_of(self, messages: Iterable[ConsumedMessage]) -> dict[Queue, int]:
        """The next offsets behind messages, in each of their queues."""
        last: dict[Queue, ConsumedMessage] = {}
        allowed = (
            "a message that `poll` returned, several of them, or nothing, for all that were handed out. To move the "
            "group to an offset, call `seek`, and then `commit`"
        )
        if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
            raise arguments.refused("messages", messages, allowed)

        for message in messages:
            if not isinstance(message, ConsumedMessage):
                raise arguments.refused("messages", message, allowed)
            cursor = self._assignment.kept(message.queue)
            if message.queue_offset >= cursor.position:
                raise ConfigError(
                    f"messages: found message {message.queue_offset} of {message.topic}/{message.queue_id}; allowed "
                    f"are messages that this consumer has handed out, below its position {cursor.position}",
                    key="messages",
                    value=message,
                )
            if message.queue not in last or message.queue_offset > last[message.queue].queue_offset:
                last[message.queue] = message

        for message in last.values():
            self._reader.check_still_there(message)
        return {
            queue: min(message.queue_offset + 1, self._assignment.cursors[queue].done)
            for queue, message in last.items()
        }
