"""A consumer of a group: it reads queues on, and keeps how far its group has come.

    ends of the queues (`read.queue_ends`) -> a block of a queue -> messages -> the group's progress
              what is there                    read and decoded     handed out     committed

A position is the number of the next message that is handed out. It never runs ahead: a block may be in memory, but the
position moves with the messages that the caller got, and a commit writes positions.

Threads: one at a time, except `close`. Processes: a forked child opens a consumer of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, TypeAlias

from messagestore.consume.messages import Block, ConsumedMessage
from messagestore.consume.positions import Positions
from messagestore.consume.progress import GroupProgress, Queue
from messagestore.errors import (
    ConfigError,
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreLockedError,
    StoreWentBackwardsError,
)
from messagestore.files.disk import Disk
from messagestore.files.group_locks import GroupLocks
from messagestore.format import arguments
from messagestore.format.config import StoreConfig
from messagestore.format.javahash import java_hash
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import RETRY_PREFIX, check_group, check_readable_queue
from messagestore.log.remembered import corrected
from messagestore.message_store import MessageStore
from messagestore.read import query
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.view import StoreView

EARLIEST, LATEST, COMMITTED = "earliest", "latest", "committed"
_BLOCK_ROWS = 4096
_BLOCK_BYTES = 1024 * 1024
_LOOK_S = 0.02
"""How old the known ends of the queues may become while there is something to hand out."""
_ANY_TAG = "*"
_BALANCE_S = 0.25
"""How often a consumer looks whether workers came or went."""
Rebalanced = Callable[["Consumer", list[Queue]], object]
_log = logging.getLogger(__name__)


_Mark: TypeAlias = "tuple[int, int, list[ConsumedMessage], int, ConsumedMessage | None, ConsumedMessage | None, float]"


class _Cursor:
    """Where a consumer is in one queue.

    Attributes
    ----------
    position : int
        The number of the next message to hand out.
    floor : int
        Up to here the group's progress is written, so that less need not be; -1: not known, or sought back.
    last : ConsumedMessage | None
        The last message that was handed out since the last seek.
    bases : tuple of int
        Where the group may be in the table if nobody but this consumer has moved it; -1: it has no progress.
    held : ConsumedMessage | None
        In an orderly consumer: the message that is not done yet. Until `held_until_s` it is not handed out again;
        infinity: the caller has it.
    ready : list of ConsumedMessage
        Messages of the block that was read, from `next_row` on not handed out yet.
    """

    __slots__ = (
        "bases",
        "end",
        "floor",
        "held",
        "held_until_s",
        "last",
        "next_row",
        "paused",
        "position",
        "queue",
        "ready",
    )

    def __init__(self, queue: Queue, position: int, floor: int) -> None:
        self.queue = queue
        self.position = self.end = position
        self.floor = floor
        self.bases: tuple[int, ...] = (floor, position)  # two, if what the group has lies beyond the queue's end
        self.last: ConsumedMessage | None = None
        self.ready: list[ConsumedMessage] = []
        self.next_row = 0
        self.paused = False
        self.held: ConsumedMessage | None = None
        self.held_until_s = math.inf

    def take_one(self) -> list[ConsumedMessage]:
        """Hand out one message, unless the one before holds the queue; one that failed comes again when it is due."""
        if self.held is None:
            taken = self.take(1)
            self.held = taken[0] if taken else None
        elif time.monotonic() < self.held_until_s:
            return []
        self.held_until_s = math.inf
        return [] if self.held is None else [self.held]

    @property
    def done(self) -> int:
        """Where the group may be: a message that failed, and holds the queue, is not done."""
        failed = self.held is not None and self.held_until_s < math.inf
        return self.held.queue_offset if failed and self.held is not None else self.position

    def give(self, block: Block) -> None:
        """Have the messages of a block handed out, and then continue behind it."""
        self.ready, self.next_row, self.end = block.messages(), 0, block.end
        if not self.ready:
            self.position = self.end

    def take(self, most: int) -> list[ConsumedMessage]:
        """Hand out messages, and move the position behind them."""
        taken = self.ready[self.next_row : self.next_row + most]
        if taken:
            self.last = taken[-1]
            self.next_row += len(taken)
            self.position = self.last.queue_offset + 1
            if self.next_row == len(self.ready):
                self.ready, self.next_row, self.position = [], 0, self.end
        return taken

    def mark(self) -> _Mark:
        """What the next hand-out changes."""
        return self.position, self.end, self.ready, self.next_row, self.last, self.held, self.held_until_s

    def go_back(self, mark: _Mark) -> None:
        """Be where the cursor was: nobody got what was handed out since."""
        self.position, self.end, self.ready, self.next_row, self.last, self.held, self.held_until_s = mark

    def committed(self, offset: int) -> None:
        """The group is at an offset now."""
        self.floor, self.bases = offset, (offset,)
        if self.held is not None and self.held.queue_offset < offset:
            self.held = None

    def seek(self, position: int) -> None:
        if position < self.floor:
            self.floor = -1
        self.position, self.ready, self.next_row, self.last, self.held = position, [], 0, None, None


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
        The consumer group: 1 to 255 characters of `%|a-zA-Z0-9_-`.
    topics : str or sequence of str
        The topics to read. They need not exist yet.
    pattern : str | None
        Instead of `topics`: a regular expression. All topics whose whole name matches it are read, also those that are
        created later; retry, dead-letter and system topics are not.
    start : str, int or datetime
        Where to begin in a queue in which the group has no progress: "earliest", the first message; "latest", behind
        the last; a time, as milliseconds since 1970 or a datetime with a time zone: the first message that was stored
        then or later. "committed" refuses such a queue.
    tags : str or sequence of str | None
        Only messages with one of these tags, also as RocketMQ writes it: `"UA || AA"`. The others count as read.
    orderly : bool
        Hand out one message of a queue at a time: the next one comes when it is committed, or among the dead letters.
        One that fails (`ConsumedMessage.retry`) holds its queue, and comes again.
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
        may commit. If it raises, the consumer keeps the queues, and it is called again.
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
        check_group(group)
        names = _topics(topics, pattern)
        self._start = _start(start)
        self._tags = _tags(tags)
        self._codes = None if self._tags is None else frozenset(map(java_hash, self._tags))
        self._orderly = arguments.true_or_false("orderly", orderly)
        self._auto_commit = arguments.true_or_false("auto_commit", auto_commit)
        self._auto_commit_s = arguments.seconds("auto_commit_interval", auto_commit_interval)
        self._idle_s = math.inf if consumer_timeout is None else arguments.seconds("consumer_timeout", consumer_timeout)
        settings = None if config is None else arguments.instance("config", config, StoreConfig)

        for name, function in (("on_assigned", on_assigned), ("on_revoked", on_revoked)):
            if function is not None:
                arguments.function(name, function)
        self._on_assigned, self._on_revoked = on_assigned, on_revoked

        self._view = StoreView(path, settings, disk)
        self._locks = GroupLocks(self._view.files.disk, path, group)
        self._progress = GroupProgress(self._view, group)
        self._pattern, self._disk = pattern, disk
        self._retry_topic = f"{RETRY_PREFIX}{group}"
        if self._retry_topic not in names:
            names = (*names, self._retry_topic)
        self._ends = QueueEnds(self._view, names, names=pattern is not None)
        self._restarts: dict[Queue, int] = {}
        self._cursors: dict[Queue, _Cursor] = {}
        self._turn = 0
        self._current: _Cursor | None = None
        """The queue whose block an iteration hands out."""
        self._has_looked = False
        self._looked_s = self._balanced_s = -math.inf
        self._known: frozenset[Queue] = frozenset()
        self._committed_s = time.monotonic()
        self._told_of_broker = False
        self.group = group
        self.root = path
        try:
            self._view.await_change(0)
            self._look()
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
        with self._used():
            self._commit_if_due()
            before: list[tuple[_Cursor, _Mark]] = []
            try:
                while not (messages := self._collected(most, before)):
                    left_s = end_s - time.monotonic()
                    if left_s <= 0:
                        break
                    self._view.await_change(left_s)
                    self._check_open()
                return messages
            except BaseException:  # an error, or what a signal handler raises: nobody gets what was collected
                for cursor, mark in reversed(before):
                    cursor.go_back(mark)
                raise

    def __iter__(self) -> Iterator[ConsumedMessage]:
        return self

    def __next__(self) -> ConsumedMessage:
        cursor = self._current
        fresh = time.monotonic() - self._looked_s <= _LOOK_S
        if cursor is not None and cursor.ready and fresh and not cursor.paused and not self._orderly:
            with self._used():
                self._commit_if_due()
                mark = cursor.mark()
                try:
                    for message in cursor.take(1):
                        return message
                except BaseException:
                    cursor.go_back(mark)
                    raise
        for queue, (message,) in self.poll(None if self._idle_s == math.inf else self._idle_s, 1).items():
            self._current = self._cursors[queue]
            return message
        raise StopIteration

    def _collected(self, most: int, before: list[tuple[_Cursor, _Mark]]) -> dict[Queue, list[ConsumedMessage]]:
        """What can be handed out now; `before` gets where each cursor was."""
        messages: dict[Queue, list[ConsumedMessage]] = {}
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._look()
        self._take_turns(messages, most, before)
        if not messages:
            self._look()
            self._take_turns(messages, most, before)
        return messages

    def _take_turns(
        self, messages: dict[Queue, list[ConsumedMessage]], most: int, before: list[tuple[_Cursor, _Mark]]
    ) -> None:
        cursors = list(self._cursors.values())
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

    def take_back(self, messages: Mapping[Queue, Sequence[ConsumedMessage]]) -> None:
        """Hand out again what a `poll` returned and nobody got, because who asked for it was cancelled."""
        with self._used():
            for queue, of_queue in messages.items():
                if queue in self._cursors:
                    self._cursors[queue].seek(of_queue[0].queue_offset)

    # ---- messages that could not be processed

    def send_back(self, message: ConsumedMessage, delay_level: int | None) -> None:
        """What `ConsumedMessage.retry` does."""
        with self._used():
            if not self._orderly:
                self._sent_back(message, delay_level, None)
                return

            cursor = self._cursors.get(message.queue)
            if cursor is None:
                raise self._given_away(f"{message.topic}/{message.queue_id}")
            if cursor.held is not message:
                raise ConfigError(
                    f"retry: found message {message.queue_offset} of {message.topic}/{message.queue_id}; allowed in an "
                    f"orderly consumer is the message that holds its queue, until it is committed",
                    key="message",
                    value=message,
                )

            delays_ms = self._view.files.config.delays_ms
            level = 1 if delay_level is None else arguments.whole_number("delay_level", delay_level, 1, len(delays_ms))
            cursor.held_until_s = time.monotonic() + (1.0 if delay_level is None else delays_ms[level - 1] / 1000)

    def bury(self, message: ConsumedMessage, reason: str | None) -> None:
        """What `ConsumedMessage.dead_letter` does."""
        with self._used():
            self._sent_back(message, -1, None if reason is None else arguments.text("reason", reason))
            cursor = self._cursors.get(message.queue)
            if cursor is not None and cursor.held is message:
                cursor.held = None

    def _sent_back(self, message: ConsumedMessage, delay_level: int | None, reason: str | None) -> None:
        with MessageStore.open(self.root, disk=self._disk) as store:
            store.send_back(message.message_ext, self.group, delay_level, reason=reason)

    # ---- reading

    def _look(self) -> None:
        """See how far the queues reach now, and get those that are new."""
        self._view.refresh()
        ends = self._ends.look()
        if self._pattern is not None:
            existing = sorted(self._ends.topic_names or ())
            names = (*(name for name in existing if re.fullmatch(self._pattern, name)), self._retry_topic)
            if names != self._ends.topics:
                self._ends, self._restarts = QueueEnds(self._view, names, names=True), {}
                ends = self._ends.look()

        self._looked_s = time.monotonic()
        for queue, count in self._ends.restarts.items():
            if count > self._restarts.get(queue, 0) and queue in self._cursors:
                raise self._went_back(self._cursors[queue], ends[queue])
        self._restarts = self._ends.restarts

        for queue, cursor in self._cursors.items():
            if queue not in ends and cursor.position:
                raise self._went_back(cursor, 0)

        if self._looked_s - self._balanced_s > _BALANCE_S or self._known != ends.keys():
            self._balance(ends.keys())
        self._has_looked = True

    # ---- sharing

    def _balance(self, queues: Iterable[Queue]) -> None:
        """Have as many queues of each topic as is this worker's share: give away the others, or take what is free."""
        self._balanced_s = time.monotonic()
        self._known = frozenset(queues)
        if not self._locks.intact():
            lost = list(self._cursors)
            _log.warning(
                "%s: this file was removed or replaced, so other workers of group %s may have the queues of this one: "
                "it gives them up, and shares the queues anew",
                self._locks.path,
                self.group,
            )
            self._locks.close()
            self._forget(lost)
            if self._on_revoked is not None:
                self._on_revoked(self, lost)

        by_topic: dict[str, list[Queue]] = {topic: [] for topic in self._ends.topics}
        for queue in sorted(self._known):
            by_topic[queue[0]].append(queue)
        gained: list[Queue] = []
        for topic, all_queues in by_topic.items():
            rank, count = self._locks.place(topic)
            share, left = divmod(len(all_queues), count)
            share += (rank + self._locks.shift(topic)) % count < left
            had = [queue for queue in self._cursors if queue[0] == topic]
            if len(had) > share:
                self._revoke(sorted(had)[share:])
            missing = share - len(had)
            for queue in all_queues:
                if missing > 0 and queue not in self._cursors and self._locks.claim(*queue):
                    gained.append(queue)
                    missing -= 1
        try:
            self._assign(gained)
        except BaseException:
            for queue in gained:
                self._locks.release(*queue)
            raise
        if gained and self._on_assigned is not None:
            self._on_assigned(self, gained)

    def _revoke(self, queues: list[Queue]) -> None:
        """Give queues away: what was committed until now is where their next worker begins."""
        if self._on_revoked is not None:
            self._on_revoked(self, queues)
        if self._auto_commit:
            self._commit_by_itself()
        self._forget(queues)
        for queue in queues:
            self._locks.release(*queue)

    def _forget(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            if self._current is self._cursors.pop(queue):
                self._current = None

    def _assign(self, queues: Iterable[Queue]) -> None:
        """Begin to read queues, where the group is in them."""
        new = sorted(queues)
        if not new:
            return
        committed = self._progress.committed({topic for topic, _ in new})
        self._view.refresh()  # another worker may have committed messages that came since the last look
        begun: dict[Queue, int] = {}
        cursors = []
        for queue in new:
            low, high = self._view.min_offset(*queue), self._view.max_offset(*queue)
            if queue not in committed:
                begun[queue] = self._first(queue, low, high)
                cursors.append(_Cursor(queue, begun[queue], -1))
            else:
                cursors.append(_Cursor(queue, self._corrected(queue, committed[queue], low, high), committed[queue]))
        if begun and self._start != EARLIEST:
            self._record_beginning(begun)
        self._cursors.update({cursor.queue: cursor for cursor in cursors})

    def _first(self, queue: Queue, low: int, high: int) -> int:
        """Where the group begins in a queue in which it has no progress."""
        if self._start == EARLIEST or self._has_looked or queue[0] == self._retry_topic:
            return low  # in a queue that is new, every message is newer than the consumer
        if self._start == LATEST:
            return high
        if isinstance(self._start, int):
            return query.queue_offset_by_time(self._view, *queue, self._start)
        raise ConfigError(
            f"start: found 'committed', but group {self.group!r} has no progress in queue {queue[1]} of "
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
                self.root,
                self.group,
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
            self.root,
            self.group,
            low,
            *queue,
            low - right,
            right,
        )
        return low

    def _record_beginning(self, begun: Mapping[Queue, int]) -> None:
        try:
            self._progress.commit(begun)
        except StoreLockedError as error:
            self._tell_of_broker(error)

    def _fetch(self, cursor: _Cursor) -> bool:
        """Read the next block of a queue; whether there is one."""
        view, queue = self._view, cursor.queue
        end_seen = self._ends.ends.get(queue, 0)
        if end_seen == cursor.position:
            return False
        self._check_continues(cursor)
        if end_seen < cursor.position:
            return False
        end = view.max_offset(*queue)
        try:
            blocks = view.blocks(*queue, cursor.position, end, _BLOCK_ROWS, _BLOCK_BYTES, self._codes)
            gathered = next(blocks, None)
        except OffsetOutOfRangeError as error:
            _log.warning("%s: consumer group %s continues at %d: %s", self.root, self.group, error.min, error)
            cursor.seek(error.min)
            return False
        self._check_continues(cursor)  # again, because the queue may have been made again while it was read
        if gathered is None:  # the topic was deleted meanwhile, and may come back
            return False
        cursor.give(Block(gathered, self._tags, self))
        return True

    def _check_continues(self, cursor: _Cursor) -> None:
        """Refuse a queue whose last message that was handed out is no longer the one that was there."""
        end = self._view.max_offset(*cursor.queue)
        if end < cursor.position:
            raise self._went_back(cursor, end)
        if cursor.last is None:
            return
        number, place = cursor.last.queue_offset, cursor.last.physical_offset
        units = self._view.units(*cursor.queue, number, number + 1)
        if not len(units) or int(units["size"][0]) == FILLER_UNIT_SIZE:
            return  # retention has deleted it
        if int(units["physical_offset"][0]) != place:
            raise self._went_back(cursor, end)

    def _went_back(self, cursor: _Cursor, end: int) -> StoreWentBackwardsError:
        topic, queue_id = cursor.queue
        return StoreWentBackwardsError(
            f"{topic}/{queue_id}: consumer group {self.group} was at {cursor.position}, and the messages before it are "
            f"gone or are others; the queue ends at {end}. It was made again, or the store was restored. Close this "
            f"consumer and open another one, which continues where the group is, or begins with `seek`"
        )

    # ---- progress

    def commit(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None = None) -> None:
        """Record how far the group has come. It is on the disk when this returns.

        Parameters
        ----------
        messages : ConsumedMessage, iterable of them, or None
            These messages, and with them all before them in their queues; None: all that were handed out.

        Raises
        ------
        StoreLockedError
            A broker holds the store, or another worker of the group has the queue of a message. Nothing was written.
        StoreWentBackwardsError
            As for `poll`. Nothing was written.
        ConfigError
            A message is not one that this consumer handed out.
        CorruptionError, OSError
            The file cannot be read or written; it is unchanged.
        """
        with self._used():
            self._commit(self._asked_for(messages))

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
            return Positions(self, self._new(self._asked_for(messages)))

    def _asked_for(self, messages: ConsumedMessage | Iterable[ConsumedMessage] | None) -> dict[Queue, int]:
        if messages is None:
            return {queue: cursor.done for queue, cursor in self._cursors.items()}
        return self._offsets_of([messages] if isinstance(messages, ConsumedMessage) else messages)

    def _new(self, offsets: Mapping[Queue, int]) -> dict[Queue, int]:
        """The queues in which the group would be moved."""
        return {queue: offset for queue, offset in offsets.items() if offset > self._cursors[queue].floor}

    @contextlib.contextmanager
    def held(self, offsets: Mapping[Queue, int]) -> Iterator[None]:
        """Keep queues while a batch moves the group in them (`Positions`)."""
        with self._used():
            for topic, queue_id in offsets:
                if (topic, queue_id) not in self._cursors:
                    raise self._given_away(f"{topic}/{queue_id}")
            self._check_mine(offsets)
            yield

    def may_move(self, queue: Queue, offset: int) -> bool:
        """Whether the group is in a queue where this consumer knows it (`Positions`)."""
        return offset in self._cursors[queue].bases

    def moved(self, offsets: Mapping[Queue, int]) -> None:
        """A batch has moved the group (`Positions`)."""
        for queue, offset in offsets.items():
            self._cursors[queue].committed(offset)

    def _offsets_of(self, messages: Iterable[ConsumedMessage]) -> dict[Queue, int]:
        offsets: dict[Queue, int] = {}
        allowed = (
            "a message that `poll` returned, several of them, or nothing, for all that were handed out. To move the "
            "group to an offset, call `seek`, and then `commit`"
        )
        if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
            raise arguments.refused("messages", messages, allowed)
        for message in messages:
            if not isinstance(message, ConsumedMessage):
                raise arguments.refused("messages", message, allowed)
            cursor = self._cursors.get(message.queue)
            if cursor is None:
                raise self._given_away(f"{message.topic}/{message.queue_id}")
            if message.queue_offset >= cursor.position:
                raise ConfigError(
                    f"messages: found message {message.queue_offset} of {message.topic}/{message.queue_id}; allowed "
                    f"are messages that this consumer has handed out, below its position {cursor.position}",
                    key="messages",
                    value=message,
                )
            offsets[message.queue] = max(offsets.get(message.queue, 0), message.queue_offset + 1)
        return offsets

    def _given_away(self, what: str) -> StoreLockedError:
        return StoreLockedError(
            f"{what}: not committed, because another worker of consumer group {self.group!r} has it now, or may have "
            f"it. The messages that were not committed are handed out there",
            path=self._locks.path,
            holder="another worker",
        )

    def _commit(self, offsets: Mapping[Queue, int]) -> None:
        new = self._new(offsets)
        if not new:
            return

        self._check_mine(new)
        self._progress.commit(new)
        for queue, offset in new.items():
            self._cursors[queue].committed(offset)

    def _check_mine(self, queues: Iterable[Queue]) -> None:
        """Refuse to move the group in queues that were made again, or that another worker may have."""
        self._view.refresh()
        for queue in queues:
            self._check_continues(self._cursors[queue])
        if not self._locks.intact():
            raise self._given_away("the queues of this worker")

    def _commit_if_due(self) -> None:
        """Commit what the caller got before this call, if it is time."""
        if self._auto_commit and time.monotonic() - self._committed_s >= self._auto_commit_s:
            self._commit_by_itself()

    def _commit_by_itself(self) -> None:
        self._committed_s = time.monotonic()
        try:
            self._commit({queue: cursor.done for queue, cursor in self._cursors.items()})
        except StoreLockedError as error:
            self._tell_of_broker(error)

    def _tell_of_broker(self, error: StoreLockedError) -> None:
        """Warn once that the progress is not written; reading goes on."""
        if not self._told_of_broker:
            self._told_of_broker = True
            _log.warning("the progress of consumer group %s is not written: %s", self.group, error)

    def committed(self, queue: Queue) -> int | None:
        """The group's progress in a queue, read now: the number of the next message; None if it has none."""
        with self._used():
            topic, queue_id = _queue(queue)
            return self._progress.committed([topic]).get((topic, queue_id))

    # ---- queues

    def assignment(self) -> set[Queue]:
        """The queues that this consumer reads."""
        with self._used():
            return set(self._cursors)

    def position(self, queue: Queue) -> int:
        """The number of the next message of a queue that is handed out.

        Raises
        ------
        ConfigError
            This consumer does not read the queue.
        """
        with self._used():
            return self._cursor(queue).position

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
            cursor = self._cursor(queue)
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
            cursor.seek(number)

    def seek_to_beginning(self, *queues: Queue) -> None:
        """Continue at the first message of some queues; without any, of all."""
        with self._used():
            for cursor in self._of(queues):
                self._view.refresh()
                cursor.seek(self._view.min_offset(*cursor.queue))

    def seek_to_end(self, *queues: Queue) -> None:
        """Continue behind the last message of some queues; without any, of all."""
        with self._used():
            for cursor in self._of(queues):
                self._view.refresh()
                cursor.seek(self._view.max_offset(*cursor.queue))

    def pause(self, *queues: Queue) -> None:
        """Hand out no messages of some queues until `resume`; without any, of all that the consumer has now."""
        with self._used():
            for cursor in self._of(queues):
                cursor.paused = True

    def resume(self, *queues: Queue) -> None:
        """Hand out messages of some queues again; without any, of all."""
        with self._used():
            for cursor in self._of(queues):
                cursor.paused = False

    def paused(self) -> set[Queue]:
        """The queues that were paused."""
        with self._used():
            return {queue for queue, cursor in self._cursors.items() if cursor.paused}

    def _of(self, queues: Sequence[Queue]) -> list[_Cursor]:
        return [self._cursor(queue) for queue in queues] if queues else list(self._cursors.values())

    def _cursor(self, queue: object) -> _Cursor:
        key = _queue(queue)
        cursor = self._cursors.get(key)
        if cursor is None:
            raise ConfigError(
                f"queue: found {key[0]}/{key[1]}; allowed are the queues that this consumer reads: "
                f"{', '.join(f'{topic}/{queue_id}' for topic, queue_id in sorted(self._cursors)[:20]) or 'none yet'}",
                key="queue",
                value=queue,
            )
        return cursor

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
                self._closed = True
                locks = getattr(self, "_locks", None)
                if locks is not None:
                    locks.close()
                view.close()

    def _leave(self, *, commit: bool) -> None:
        """What is to do with the queues before other workers get them."""
        if self._cursors and self._on_revoked is not None:
            self._on_revoked(self, list(self._cursors))
        if commit and self._auto_commit:
            self._commit_by_itself()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("an open consumer cannot be pickled or copied. Send its arguments, and open a consumer there")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(commit=kind is None)


# ---- arguments


def _topics(topics: object, pattern: object) -> tuple[str, ...]:
    """The topics to read; none with a pattern."""
    if pattern is not None:
        if topics:
            raise ConfigError("pattern: found topics, too; give one of them", key="pattern", value=pattern)
        try:
            re.compile(arguments.text("pattern", pattern))
        except re.error as error:
            raise ConfigError(
                f"pattern: found {pattern!r}, which is no regular expression ({error})", key="pattern", value=pattern
            ) from None
        return ()

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


def _start(start: object) -> str | int:
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


def _tags(tags: object) -> frozenset[str] | None:
    """The tags to hand out; None: all messages."""
    if tags is None or tags == _ANY_TAG:
        return None
    words = tags.split("||") if isinstance(tags, str) else tags
    if not isinstance(words, Iterable) or not (named := tuple(words)):
        raise arguments.refused("tags", tags, "one tag, several with ' || ' between them, or a list of tags")
    return frozenset(arguments.text("tags", word).strip() for word in named)


def _queue(queue: object) -> Queue:
    """A topic and a queue id."""
    if not isinstance(queue, tuple) or len(queue) != 2:
        raise arguments.refused("queue", queue, "a topic and a queue id, such as ('flights', 0)")
    topic, queue_id = queue
    check_readable_queue(topic, queue_id)
    return topic, arguments.whole_number("queue id", queue_id)
