"""A consumer of a group: it reads queues on, and keeps how far its group has come.

    ends of the queues (`read.queue_ends`) -> a block of a queue -> messages -> the group's progress
              what is there                    read and decoded     handed out     committed

A position is the number of the next message that is handed out. It never runs ahead: a block may be in memory, but the
position moves with the messages that the caller got, and a commit writes positions.

Threads: one at a time, except `close`. Processes: a forked child opens a consumer of its own.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, TypeVar

from messagestore.consume.assignment import Assignment, Topics, queue_of
from messagestore.consume.beginning import Beginning, start_of
from messagestore.consume.commits import Commits
from messagestore.consume.cursor import Cursor, Mark
from messagestore.consume.messages import ConsumedMessage
from messagestore.consume.positions import Positions
from messagestore.consume.progress import EARLIEST, GroupProgress, Queue
from messagestore.consume.queue_reader import QueueReader
from messagestore.errors import ConfigError, OffsetOutOfRangeError, StoreClosedError
from messagestore.files.disk import Disk
from messagestore.files.group_locks import GroupLocks
from messagestore.format import arguments
from messagestore.format.config import StoreConfig
from messagestore.format.message import check_retrying_group
from messagestore.message_store import MessageStore
from messagestore.read.view import StoreView

_LOOK_S = 0.02
"""How old the known ends of the queues may become while there is something to hand out."""
T = TypeVar("T")
Rebalanced = Callable[["Consumer", list[Queue]], object]
_log = logging.getLogger(__name__)


class _Use:
    """A call of a consumer, which holds its lock; `contextlib` would take longer than handing out a message."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Consumer:
    """Reads topics as a member of a consumer group, and keeps how far the group has come.

    The progress of the group is RocketMQ's (`config/consumerOffset.json`): a broker, `messagestore groups` and Spark's
    `startingOffsets=committed` see it, and the group may go on in any of them. A message is handed out at least once:
    whatever was not committed before the consumer was closed, or killed, is handed out again. Messages of a queue come
    in its order.

    A message that cannot be processed goes back with `ConsumedMessage.retry`, or among the dead letters with
    `ConsumedMessage.dead_letter`. Besides its topics, a consumer reads its group's retry topic `%RETRY%group`.

    Consumers of one group share the queues of a topic, in any threads and processes of this host, each with a consumer
    of its own. A queue has one worker at a time, who holds a lock of the kernel. When a worker comes, the others give
    queues away in their next `poll`; when one ends, they have its queues within a second. A worker that is stopped
    (SIGSTOP) keeps its queues.

    While a RocketMQ broker holds the store, a consumer reads, but cannot commit, because the broker keeps the progress
    in its memory and overwrites the file.

    Use one object from one thread at a time. Only `close` may be called by another thread: a `poll` that is going on
    then ends with `StoreClosedError`.

    Parameters
    ----------
    root : path
        The store's root folder.
    group : str
        The consumer group: 1 to 248 characters of `%|a-zA-Z0-9_-`.
    topics : str or sequence of str
        The topics to read. They need not exist yet.
    pattern : str | None
        Instead of `topics`: a regular expression. All topics whose whole name matches it are read, also those that are
        created later, and until they are deleted; retry, dead-letter and system topics are not.
    start : str, int or datetime
        Where to begin in a topic in which the group has no progress: "earliest", the first message; "latest", behind
        the last; a time, as milliseconds since 1970 or a datetime with a time zone: the first message that was stored
        then or later. "committed" refuses such a topic. A queue that is made later is read from its first message.
    tags : str or sequence of str | None
        Only messages with one of these tags, also as RocketMQ writes it: `"UA || AA"`. The others count as read.
    orderly : bool
        Hand out one message of a queue at a time: the next one comes when it is committed, or among the dead letters;
        with `auto_commit`, at the next call. One that fails (`ConsumedMessage.retry`) holds its queue, and comes again.
    auto_commit : bool
        Commit by itself what the caller got before the current call: in `poll` and in an iteration, every
        `auto_commit_interval` seconds, and in `close`.
    auto_commit_interval : float
        Seconds.
    consumer_timeout : float | None
        An iteration ends when no message has arrived for this many seconds; None: it never ends.
    on_assigned : callable | None
        Called with the consumer and a list of queues that it has got, before it hands out their messages.
    on_revoked : callable | None
        Called with the consumer and a list of queues, before another worker of the group gets them, and in `close`. It
        may commit. If it raises, the consumer keeps the queues, and it is called again. Also called when topics of
        `pattern` were deleted; there is nothing left to commit in their queues then.
    config : StoreConfig | None
        Settings for reading, as for `MessageStore.open_read_only`.
    disk : Disk | None
        For tests.

    Raises
    ------
    ConfigError, MessageIllegalError
        An argument is not what is allowed.
    NotAStoreError
        The folder is missing or holds no store.
    CorruptionError
        Stored bytes are damaged.

    Examples
    --------
    >>> from messagestore import Consumer, Message, MessageStore
    >>> with MessageStore.open("store") as store:
    ...     for gate in (b"B12", b"C3", b"D7"):
    ...         _ = store.put_message(Message("gates", gate, queue_id=0))
    >>> with Consumer("store", "boards", "gates") as consumer:
    ...     print(consumer.poll(max_records=2))
    ...     consumer.commit()
    {('gates', 0): [ConsumedMessage('gates', 0, 0, b'B12'), ConsumedMessage('gates', 0, 1, b'C3')]}
    >>> with Consumer("store", "boards", "gates", consumer_timeout=0.1) as consumer:
    ...     for message in consumer:
    ...         print(message.queue_offset, message.body)
    2 b'D7'
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        group: str,
        topics: str | Sequence[str] = (),
        *,
        pattern: str | None = None,
        start: str | int | datetime = EARLIEST,
        tags: str | Sequence[str] | None = None,
        orderly: bool = False,
        auto_commit: bool = False,
        auto_commit_interval: float = 5.0,
        consumer_timeout: float | None = None,
        on_assigned: Rebalanced | None = None,
        on_revoked: Rebalanced | None = None,
        config: StoreConfig | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._closing = self._closed = False
        self._closer = 0
        """The thread that closes it, whose callback may still commit."""
        self._one_thread = threading.RLock()
        self._use = _Use(self._one_thread)
        self._pid = os.getpid()

        path = arguments.path("root", root)
        check_retrying_group(group)
        wanted = Topics(topics, pattern, group)
        begin_at = start_of(start)
        named = arguments.tags(tags)
        passed_tags = None if named is None else frozenset(named)
        self._orderly = arguments.true_or_false("orderly", orderly)
        self._auto_commit = arguments.true_or_false("auto_commit", auto_commit)
        auto_commit_s = arguments.seconds("auto_commit_interval", auto_commit_interval)
        self._idle_s = math.inf if consumer_timeout is None else arguments.seconds("consumer_timeout", consumer_timeout)
        settings = None if config is None else arguments.instance("config", config, StoreConfig)

        for name, function in (("on_assigned", on_assigned), ("on_revoked", on_revoked)):
            if function is not None:
                arguments.function(name, function)
        self._on_assigned, self._on_revoked = on_assigned, on_revoked

        self._view = StoreView(path, settings, disk)
        self._locks = GroupLocks(self._view.files.disk, path, group)
        progress = GroupProgress(self._view, group)
        self._disk = disk
        self._reader = QueueReader(self._view, group, passed_tags, self)
        self._assignment = Assignment(
            self._view,
            group,
            wanted,
            self._locks,
            self._reader,
            Beginning(self._view, progress, begin_at, self._record_beginning, grows=wanted.pattern is not None),
            gained=self._tell_assigned,
            leaving=self._before_leaving,
            lost=self._tell_revoked,
        )
        self._commits = Commits(path, progress, self._assignment, self._reader, self._used, auto_commit_s)
        self._turn = 0
        self._current: Cursor | None = None
        """The queue whose block an iteration hands out."""
        self.group = group
        self.root = path
        try:
            self._view.await_change(0)
            self._assignment.look()
        except BaseException:
            self.close()
            raise

    # ---- messages

    def poll(self, timeout: float | None = 0.0, max_records: int = 500) -> dict[Queue, list[ConsumedMessage]]:
        """Messages that have not been handed out yet.

        Parameters
        ----------
        timeout : float | None
            How many seconds to wait if there is none; None: until there is one.
        max_records : int
            The largest number of messages.

        Returns
        -------
        dict of (topic, queue id) to list of ConsumedMessage
            In the order of each queue; empty after `timeout`. Queues with many messages take turns.

        Raises
        ------
        StoreWentBackwardsError
            The last message that was handed out is gone, or is another one: the queue was made again, or the store was
            restored. A new consumer continues where the group is, corrected as far as the queue's end shows it.
        CorruptionError
            A message is damaged. `seek` past it to go on.
        """
        end_s = math.inf if timeout is None else time.monotonic() + arguments.seconds("timeout", timeout)
        most = arguments.whole_number("max_records", max_records, 1)
        before: list[tuple[Cursor, Mark]] = []
        try:
            return self._polled(end_s, most, before)
        except BaseException:
            _go_back(before)
            raise

    def __iter__(self) -> Iterator[ConsumedMessage]:
        return self

    def __next__(self) -> ConsumedMessage:
        cursor = self._current
        fresh = time.monotonic() - self._assignment.looked_s <= _LOOK_S
        before: list[tuple[Cursor, Mark]] = []
        try:
            if cursor and cursor.ready and fresh and not (cursor.paused or cursor.gone or self._orderly):
                with self._used():
                    if self._auto_commit:
                        self._commits.commit_if_due()
                    before.append((cursor, cursor.mark()))
                    for message in cursor.take(1):
                        return message
            for queue, (message,) in self._polled(time.monotonic() + self._idle_s, 1, before).items():
                self._current = self._assignment.cursors[queue]
                return message
        except BaseException:
            _go_back(before)
            raise
        raise StopIteration

    def _polled(self, end_s: float, most: int, before: list[tuple[Cursor, Mark]]) -> dict[Queue, list[ConsumedMessage]]:
        """What `poll` hands out; `before` gets where each cursor was.

        Whoever calls this goes back to there after an error, or what a signal handler raises, which may be as late as
        when the lock is given back: nobody gets what was collected then.
        """
        with self._used():
            if self._auto_commit:
                self._commits.commit_if_due()
                if self._orderly:
                    self._let_go()
            while not (messages := self._collected(most, before)):
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                self._view.await_change(min(left_s, self._until_due_s()))
                self._check_open()
            return messages

    def _collected(self, most: int, before: list[tuple[Cursor, Mark]]) -> dict[Queue, list[ConsumedMessage]]:
        """What can be handed out now; `before` gets where each cursor was."""
        messages: dict[Queue, list[ConsumedMessage]] = {}
        begun_s = time.monotonic()
        if begun_s - self._assignment.looked_s > _LOOK_S:
            self._assignment.look()
        self._take_turns(messages, most, before)
        if not messages:
            if self._assignment.looked_s < begun_s:
                self._assignment.look()
            self._take_turns(messages, most, before)  # also behind messages that retention has deleted
        return messages

    def _take_turns(
        self, messages: dict[Queue, list[ConsumedMessage]], most: int, before: list[tuple[Cursor, Mark]]
    ) -> None:
        cursors = self._assignment.cursors_of(())
        for _ in range(len(cursors)):
            cursor = cursors[self._turn % len(cursors)]
            self._turn += 1
            while most and not cursor.paused and (cursor.held or cursor.ready or self._fetch(cursor)):
                before.append((cursor, cursor.mark()))
                taken = cursor.take_one() if self._orderly else cursor.take(most)
                if taken:
                    messages.setdefault(cursor.queue, []).extend(taken)
                    most -= len(taken)
                if self._orderly and cursor.held:
                    break
            if not most:
                return

    def _let_go(self) -> None:
        """Take what the caller has as done, since nobody commits it one by one."""
        for cursor in self._assignment.cursors.values():
            cursor.let_go()

    def _until_due_s(self) -> float:
        """Until a message that failed comes again, which changes nothing in the store."""
        held = [cursor for cursor in self._assignment.cursors.values() if cursor.held is not None and not cursor.paused]
        return max(0.0, min((cursor.held_until_s for cursor in held), default=math.inf) - time.monotonic())

    def _fetch(self, cursor: Cursor) -> bool:
        return self._reader.fetch(cursor, self._assignment.end(cursor.queue))

    def take_back(self, messages: Mapping[Queue, Sequence[ConsumedMessage]]) -> None:
        """Hand out again what a `poll` returned and nobody got, because who asked for it was cancelled."""
        with self._used():
            for queue, of_queue in messages.items():
                if queue in self._assignment.cursors:
                    self._reader.seek(self._assignment.cursors[queue], of_queue[0].queue_offset)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Call `work` when no other thread uses the consumer: a batch may be moving its group (`Positions`)."""
        with self._one_thread:
            return work()

    # ---- messages that could not be processed

    def send_back(self, message: ConsumedMessage, delay_level: int | None) -> bool:
        """What `ConsumedMessage.retry` does."""
        with self._used():
            delays_ms = self._view.files.config.delays_ms
            if delay_level is not None:
                delay_level = arguments.whole_number("delay_level", delay_level, 1, len(delays_ms))
            if not self._orderly:
                self._sent_back(message, delay_level, None)
                return False

            cursor = self._assignment.kept(message.queue)
            if cursor.held is not message:
                raise ConfigError(
                    f"retry: found message {message.queue_offset} of {message.topic}/{message.queue_id}; allowed in an "
                    f"orderly consumer is the message that holds its queue, until it is committed",
                    key="message",
                    value=message,
                )

            cursor.held_until_s = time.monotonic() + (1.0 if delay_level is None else delays_ms[delay_level - 1] / 1000)
            return True

    def bury(self, message: ConsumedMessage, reason: str | None) -> None:
        """What `ConsumedMessage.dead_letter` does."""
        with self._used():
            self._sent_back(message, -1, None if reason is None else arguments.text("reason", reason))
            cursor = self._assignment.cursors.get(message.queue)
            if cursor is not None and cursor.held is message:
                cursor.held = None

    def _sent_back(self, message: ConsumedMessage, delay_level: int | None, reason: str | None) -> None:
        with MessageStore.open(self.root, disk=self._disk) as store:
            store.send_back(message.message_ext, self.group, delay_level, reason=reason)

    # ---- queues that come and go

    def _tell_assigned(self, queues: list[Queue]) -> None:
        if self._on_assigned is not None:
            self._on_assigned(self, queues)

    def _before_leaving(self, queues: list[Queue]) -> None:
        """Let the caller, and the consumer itself, commit before another worker gets queues."""
        self._tell_revoked(queues)
        if self._auto_commit:
            self._commits.commit_by_itself()

    def _tell_revoked(self, queues: list[Queue]) -> None:
        if self._on_revoked is not None:
            self._on_revoked(self, queues)

    def _record_beginning(self, begun: Mapping[Queue, int]) -> bool:
        return self._commits.record_beginning(begun)

    # ---- progress

    def commit(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None = None) -> None:
        """Record how far the group has come. It is on the disk when this returns.

        Parameters
        ----------
        messages : ConsumedMessage, iterable of them, or None
            These messages, and with them all before them in their queues; None: all that were handed out. In an
            orderly consumer, one that failed (`ConsumedMessage.retry`) is not committed before it comes again.

        Raises
        ------
        StoreLockedError
            A broker holds the store, or another worker of the group has the queue of a message. Nothing was written.
        StoreWentBackwardsError
            As for `poll`, or another message is in the place of one of these. Nothing was written.
        ConfigError
            A message is not one that this consumer handed out.
        CorruptionError, OSError
            The file cannot be read or written; it is unchanged.
        """
        with self._used():
            self._commits.commit(messages)

    def positions(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None = None) -> Positions:
        """The group's progress for `MessageStore.append_batch(progress=...)`: results and progress count together.

        Parameters
        ----------
        messages : ConsumedMessage, iterable of them, or None
            These messages, and with them all before them in their queues; None: all that were handed out until now.

        Raises
        ------
        StoreLockedError
            Another worker of the group has the queue of a message.
        StoreWentBackwardsError
            Another message is in the place of one of these: the queue was made again, or the store was restored.
        ConfigError
            A message is not one that this consumer handed out, or nothing was handed out since the last commit.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from messagestore import Consumer, Message, MessageStore
        >>> with MessageStore.open("store") as store, Consumer("store", "pipe", "gates") as consumer:
        ...     _ = store.put_message(Message("gates", b"B12", queue_id=0))
        ...     results = [message.body.lower() for found in consumer.poll().values() for message in found]
        ...     rows = pa.table({"body": results})
        ...     result = store.append_batch(rows, topic="boards", queue_id=0, progress=consumer.positions())
        ...     consumer.committed(("gates", 0))
        1
        """
        with self._used():
            return self._commits.positions(messages)

    def committed(self, queue: Queue) -> int | None:
        """The group's progress in a queue, read now: the number of the next message; None if it has none."""
        with self._used():
            return self._commits.committed(queue_of(queue))

    # ---- queues

    def assignment(self) -> set[Queue]:
        """The queues that this consumer reads."""
        with self._used():
            return set(self._assignment.cursors)

    def position(self, queue: Queue) -> int:
        """The number of the next message of a queue that is handed out.

        Raises
        ------
        ConfigError
            This consumer does not read the queue.
        """
        with self._used():
            return self._assignment.cursor(queue).position

    def seek(self, queue: Queue, offset: int) -> None:
        """Continue at another message of a queue. The group's progress changes with the next commit.

        Parameters
        ----------
        queue : (str, int)
            Topic and queue id, as `poll` and `assignment` give them.
        offset : int

        Raises
        ------
        OffsetOutOfRangeError
            The queue has neither this message nor ends there.
        ConfigError
            This consumer does not read the queue, or the offset is no whole number.
        """
        with self._used():
            cursor = self._assignment.cursor(queue)
            number = arguments.whole_number("offset", offset)
            self._view.refresh()
            low, high = self._view.min_offset(*cursor.queue), self._view.max_offset(*cursor.queue)
            if not low <= number <= high:
                raise OffsetOutOfRangeError(
                    f"{cursor.queue[0]}/{cursor.queue[1]}: found offset {number}; allowed is {low}, the first message, "
                    f"to {high}, the next one that arrives",
                    topic=cursor.queue[0],
                    queue_id=cursor.queue[1],
                    queue_offset=number,
                    min=low,
                    max=high,
                )
            self._reader.seek(cursor, number)

    def seek_to_beginning(self, *queues: Queue) -> None:
        """Continue at the first message of some queues; without any, of all."""
        with self._used():
            for cursor in self._assignment.cursors_of(queues):
                self._view.refresh()
                self._reader.seek(cursor, self._view.min_offset(*cursor.queue))

    def seek_to_end(self, *queues: Queue) -> None:
        """Continue behind the last message of some queues; without any, of all."""
        with self._used():
            for cursor in self._assignment.cursors_of(queues):
                self._view.refresh()
                self._reader.seek(cursor, self._view.max_offset(*cursor.queue))

    def pause(self, *queues: Queue) -> None:
        """Hand out no messages of some queues until `resume`; without any, of all that the consumer has now."""
        with self._used():
            for cursor in self._assignment.cursors_of(queues):
                cursor.paused = True

    def resume(self, *queues: Queue) -> None:
        """Hand out messages of some queues again; without any, of all."""
        with self._used():
            for cursor in self._assignment.cursors_of(queues):
                cursor.paused = False

    def paused(self) -> set[Queue]:
        """The queues that were paused."""
        with self._used():
            return {queue for queue, cursor in self._assignment.cursors.items() if cursor.paused}

    # ---- the object

    def _used(self) -> _Use:
        """Refuse what would read a closed consumer, or one that another thread or process uses."""
        self._check_open()
        if not self._one_thread.acquire(blocking=False):
            raise StoreClosedError(
                "another thread uses this consumer. Use one object from one thread at a time; several threads open a "
                "consumer each"
            )
        return self._use

    def _check_open(self) -> None:
        if self._closing and (self._closed or self._closer != threading.get_ident()):
            raise StoreClosedError("the consumer is closed. Open another one")
        if os.getpid() != self._pid:
            raise StoreClosedError("the consumer was opened before a fork. Open one in the child process")

    def close(self) -> None:
        """Stop reading. With `auto_commit`, what was handed out is committed first. A second call does nothing.

        Raises
        ------
        StoreWentBackwardsError, CorruptionError, OSError
            As for `commit`. The consumer is closed nevertheless.
        """
        self._close(commit=True)

    def _close(self, *, commit: bool) -> None:
        try:
            self._close_once(commit=commit)
        except BaseException:
            self._close_once(commit=False)  # an exception of a signal handler leaves no queue to a dead worker
            raise

    def _close_once(self, *, commit: bool) -> None:
        """Do what `_close` does, as far as it is not done yet."""
        was_closing, self._closing = self._closing, True
        with self._one_thread:  # a poll of another thread ends within a tenth of a second
            if self._closed or os.getpid() != self._pid:
                return
            view = getattr(self, "_view", None)
            if view is None:
                self._closed = True
                return
            try:
                if not was_closing:
                    self._closer = threading.get_ident()
                    self._leave(commit=commit)
            finally:
                locks = getattr(self, "_locks", None)
                if locks is not None:
                    locks.close()
                view.close()
                self._closed = True

    def _leave(self, *, commit: bool) -> None:
        """What is to do with the queues before other workers get them."""
        if self._assignment.cursors:
            self._tell_revoked(list(self._assignment.cursors))
        if commit and self._auto_commit:
            self._commits.commit_by_itself()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("an open consumer cannot be pickled or copied. Send its arguments, and open a consumer there")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(commit=kind is None)


def _go_back(before: Sequence[tuple[Cursor, Mark]]) -> None:
    """Be where the cursors were: nobody gets what was taken from them since."""
    for cursor, mark in reversed(before):
        cursor.go_back(mark)
