"""How far a consumer group has come: its rows in `config/consumerOffset.json`, and what batches of the log add to them.
It is committed and reset here.

Threads: one. Processes: see `files.consumer_offsets`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from messagestore.errors import ConfigError, StoreLockedError, UnknownTopicError
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.files.disk import Disk
from messagestore.files.group_locks import GroupLocks
from messagestore.format import arguments
from messagestore.format.config import StoreConfig
from messagestore.format.message import BATCH_TOPIC, RETRY_PREFIX, check_group
from messagestore.read import query
from messagestore.read.group_offsets import add_progress, group_offsets
from messagestore.read.view import StoreView

Queue = tuple[str, int]


class GroupProgress:
    """The progress of one group.

    Parameters
    ----------
    view : StoreView
        The store.
    group : str
    """

    def __init__(self, view: StoreView, group: str) -> None:
        self.group = group
        self._view = view

    def committed(self, topics: Iterable[str]) -> dict[Queue, int]:
        """The next offset of each queue of some topics in which the group has one, read now.

        Raises
        ------
        CorruptionError
            The file cannot be read.
        ConfigError
            A broker keeps the offsets in RocksDB.
        """
        table = group_offsets(self._view)
        return {
            (topic, queue_id): offset for topic in topics for queue_id, offset in table.get(topic, self.group).items()
        }

    def topics(self) -> set[str]:
        """The topics in which the group has an offset, read now."""
        return set(group_offsets(self._view).topics(self.group))

    def commit(self, offsets: Mapping[Queue, int], *, first: bool = False) -> None:
        """Write the next offsets of some queues; they are on the disk when this returns.

        Parameters
        ----------
        first : bool
            Only of topics in which the group has none.

        Raises
        ------
        StoreLockedError
            A broker holds the store.
        CorruptionError, OSError
            As `publish_offsets`.
        """
        files = self._view.files
        publish_offsets(
            files.paths.root,
            self.group,
            offsets,
            files.disk,
            files.config.lock_timeout_s,
            durable=True,
            first=first,
            pending=lambda table: add_progress(self._view, table),
        )


EARLIEST, LATEST = "earliest", "latest"
_MILLISECONDS = 10**12
"""From here on a number is a time in milliseconds since 1970: as an offset, it would skip all messages."""


class OffsetReset(NamedTuple):
    """Where a group is in a queue, and where it goes.

    Parameters
    ----------
    topic : str
    queue_id : int
    committed : int | None
        The next offset to consume; None: the group has never read the queue.
    offset : int
        The next offset after the reset.
    """

    topic: str
    queue_id: int
    committed: int | None
    offset: int


def reset_offsets(
    root: str | os.PathLike[str],
    group: str,
    to: str | int | datetime,
    topics: Iterable[str] | None = None,
    *,
    execute: bool = False,
    disk: Disk | None = None,
) -> list[OffsetReset]:
    """Move a consumer group to another place in its queues, or show where it would go.

    With `execute`, the offsets of all queues change in one step, and are on the disk when this returns. The group must
    have no consumer then: this call holds its queues meanwhile, as a consumer does. A stream of Spark has its place in
    its checkpoint, and does not move.

    Parameters
    ----------
    root : path
        The store's root folder.
    group : str
        The consumer group.
    to : str, int or datetime
        "earliest" or "latest"; an offset, which each queue limits to what it has; a time with a time zone: the first
        message that was stored then or later.
    topics : iterable of str | None
        The topics; None: those of the store in which the group has offsets, but for its retry topic.
    execute : bool
        False: nothing is changed.
    disk : Disk | None
        For tests.

    Returns
    -------
    list of OffsetReset
        One for each queue, by topic and queue.

    Raises
    ------
    ConfigError
        `to` is not allowed, or the group has no offsets and no topics were given. Nothing was changed.
    UnknownTopicError
        A topic is not in the store.
    StoreLockedError
        A broker holds the store, or a consumer of the group reads one of the queues. Nothing was changed.

    Examples
    --------
    >>> from messagestore import Message, MessageStore, reset_offsets
    >>> with MessageStore.open("store") as store:
    ...     _ = store.put_message(Message("gates", b"B12", queue_id=0))
    >>> reset_offsets("store", "boards", "latest", ["gates"], execute=True)[0].offset
    1
    """
    path, disk = arguments.path("root", root), disk or Disk()
    check_group(group)
    _check_to(to)

    with contextlib.closing(StoreView(path, StoreConfig(message_index_enable=False), disk)) as view:
        table, queues = group_offsets(view), view.topics()
        if topics is None:
            # A group has a place in a topic that it waits for, too, if it reads it from now on (`start="latest"`).
            there = {*queues, *view.files.topics.names}
            topics = [topic for topic in table.topics(group) if topic in there and not topic.startswith(RETRY_PREFIX)]
            if not topics:
                raise ConfigError(
                    f"consumer group {group!r}: found no offsets in this store. Name the topics that it is to read "
                    "from there, or look at `messagestore groups`",
                    key="group",
                    value=group,
                )

        for topic in topics:
            created = view.files.topics.get(topic)
            if not queues.get(topic) and created is not None:  # nobody has put a message yet
                queues[topic] = list(range(created.write_queue_nums))
            if not queues.get(topic):
                raise UnknownTopicError(topic, {*queues, *view.files.topics.names} - {BATCH_TOPIC})
        keys = [(topic, queue_id) for topic in sorted(set(topics)) for queue_id in queues[topic]]

        with contextlib.closing(GroupLocks(disk, path, group)) if execute else contextlib.nullcontext() as locks:
            if locks is not None:
                _hold(locks, group, keys)
                table = group_offsets(view)  # the last consumer may have committed meanwhile
            committed = {topic: table.get(topic, group) for topic in topics}
            resets = [
                OffsetReset(topic, queue_id, committed[topic].get(queue_id), _offset(view, topic, queue_id, to))
                for topic, queue_id in keys
            ]
            if execute:
                GroupProgress(view, group).commit({(reset.topic, reset.queue_id): reset.offset for reset in resets})
    return resets


def _check_to(to: object) -> None:
    allowed = "'earliest', 'latest', an offset from 0 on, or a datetime with a time zone"
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise arguments.refused("to", to, allowed)
    elif to not in (EARLIEST, LATEST) and (type(to) is not int or to < 0):
        raise arguments.refused("to", to, allowed)
    elif type(to) is int and to >= _MILLISECONDS:
        raise ConfigError(
            f"to: found {to}, which is more likely a time in milliseconds than an offset; allowed is {allowed}, such "
            f"as datetime.fromtimestamp({to / 1000}, UTC)",
            key="to",
            value=to,
        )


def _hold(locks: GroupLocks, group: str, keys: Iterable[Queue]) -> None:
    """Take all queues, as a consumer does; refuse if a consumer has one of them."""
    for topic, queue_id in keys:
        if not locks.claim(topic, queue_id):
            raise StoreLockedError(
                f"consumer group {group!r}: a consumer reads queue {queue_id} of {topic!r} now, and would commit over "
                "the reset. Nothing was changed. Stop the group's consumers first",
                path=locks.path,
                holder=f"a consumer of group {group!r}",
            )


def _offset(view: StoreView, topic: str, queue_id: int, to: str | int | datetime) -> int:
    """The offset in a queue, which is never outside what the queue has."""
    least, most = view.min_offset(topic, queue_id), view.max_offset(topic, queue_id)
    if to == EARLIEST:
        return least
    if to == LATEST:
        return most
    if isinstance(to, datetime):
        return query.queue_offset_by_time(view, topic, queue_id, math.ceil(to.timestamp() * 1000))
    assert isinstance(to, int)
    return min(max(to, least), most)
