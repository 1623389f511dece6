"""`config/consumerOffset.json`: records how far consumer groups have read.

The file is the broker's own (`ConsumerOffsetManager.java`). For each topic and group, it holds the next offset to
consume in each queue. A live broker reads it before it takes its lock, and rewrites it from memory every 5 s and when
it ends. Therefore this project writes it only while no broker is running. Consumers and `committed` begin where it
says, and retention keeps what no group has read; a query of Spark's goes by its own checkpoint.

    "offsetTable":{"flights@delays":{0:1200,1:1190}}

One row is the store's own: as a group of the broker's kind, `CID_RMQ_SYS_SPARK_PROGRESS` in the topic of BATCH records,
it says which of them have their progress in this table (`log.group_progress`). A broker keeps the row as that of any
other group, so the row and the offsets of the groups are always of one moment.

Threads: one. Processes: a process that publishes holds `spark/consumer-offsets.lock`. It is a separate lock, because a
writer's session may hold `spark/writer.lock` for days, and the groups of readers must still make progress. Publishing
does not attach to the store: that would protect nothing, would make a broker that is about to start fail, and would
make a writer that is about to close leave `abort` behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from messagestore.errors import ConfigError, MessageIllegalError, StoreLockedError
from messagestore.files.config_file import ConfigFile
from messagestore.files.config_table import ConfigTable
from messagestore.files.disk import Disk
from messagestore.files.writer_lock import WriterLock, probe_java
from messagestore.format.half_records import GROUP as HALF_GROUP
from messagestore.format.message import (
    BATCH_TOPIC,
    MAX_QUEUE_ID,
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    group_fault,
    topic_fault,
)

PROGRESS_GROUP = f"{SYSTEM_GROUP_PREFIX}SPARK_PROGRESS"
_SEPARATOR = "@"
_LARGEST_OFFSET = (1 << 63) - 1
_TIMEOUT_S = 1.0


class ConsumerOffsets(ConfigTable[str, dict[int, int]]):
    """`config/consumerOffset.json` of one store.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    """

    writes_what_is_there = False  # a query publishes after each micro-batch, and itself goes by its checkpoint

    def __init__(self, disk: Disk, root: str) -> None:
        # A separate name, because recovery sweeps `new-*` in `spark/` under a lock that is not held here.
        super().__init__(
            ConfigFile(
                disk,
                root,
                "consumerOffset.json",
                "offsetTable",
                via="consumer-offsets.json",
                meaning="the broker's table of consumer offsets",
                hint="Restore it from a copy. If you move it away instead, all consumer groups lose their offsets.",
                only_in_files=True,
            )
        )

    def _parsed(self, table: dict[str, Any]) -> dict[str, dict[int, int]]:
        offsets_by_name: dict[str, dict[int, int]] = {}
        for name, offsets in table.items():
            offsets_by_name[name] = {int(queue_id): offset for queue_id, offset in offsets.items()}
            for offset in offsets_by_name[name].values():
                if type(offset) is not int or not -_LARGEST_OFFSET - 1 <= offset <= _LARGEST_OFFSET:
                    raise ValueError(f"offset {offset!r}")
        return offsets_by_name

    def _merged(self, rows: dict[str, dict[int, int]], changed: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
        return rows | {name: rows.get(name, {}) | offsets for name, offsets in changed.items()}

    def _derived(self, rows: dict[str, dict[int, int]]) -> dict[str, Any]:
        return {"groupTopicMap": {group: tuple(topics) for group, topics in _topics_of_groups(rows).items()}}

    def load_to_save(self) -> None:
        """Load the file, and refuse one that `save` would refuse.

        Raises
        ------
        CorruptionError
            The file is damaged.
        """
        self.load()
        if self._file.damage is not None:
            raise self._file.damage

    # ---- offsets

    @property
    def settled(self) -> int | None:
        """The number of the first BATCH record whose progress may not be in the table; None: no record has any."""
        return self.get(BATCH_TOPIC, PROGRESS_GROUP).get(0)

    def settle(self, number: int) -> None:
        """Say that the progress of all BATCH records below a number is in the table."""
        self.update(BATCH_TOPIC, PROGRESS_GROUP, {0: number}, own=True)

    @property
    def groups(self) -> list[str]:
        """All groups, sorted."""
        return sorted(self.topics_of_groups())

    def topics(self, group: str) -> list[str]:
        """Return the topics in which a group has offsets, sorted."""
        return self.topics_of_groups().get(group, [])

    def topics_of_groups(self) -> dict[str, list[str]]:
        """Return each group and the topics in which it has offsets, both sorted, in one pass."""
        return _topics_of_groups(self._rows)

    def topics_read(self, has_queues: Callable[[str], bool]) -> dict[str, list[str]]:
        """Return each group and what it reads, both sorted: the topics in which it has offsets, and its retry topic.

        Every consumer reads the retry topic of its group from the beginning, and has no offset there before it has
        read the first message. `has_queues` says whether there is such a topic.
        """
        return {
            group: sorted({*topics, *filter(has_queues, [RETRY_PREFIX + group])})
            for group, topics in self.topics_of_groups().items()
        }

    def get(self, topic: str, group: str) -> dict[int, int]:
        """Return queue id -> next offset to consume; empty for a group that has never read the topic."""
        return dict(self._rows.get(topic + _SEPARATOR + group, {}))

    def update(self, topic: str, group: str, offsets: Mapping[int, int], *, own: bool = False) -> None:
        """Set the offsets of some queues, even to lower ones; `save` writes them.

        `own` says that the group is one of the broker's own, which users may not have.

        Raises
        ------
        ConfigError
            RocketMQ does not allow the group or reserves it, or a queue id or an offset is out of range.
        MessageIllegalError
            The topic is not legal.
        """
        fault = None if own else group_fault(group)
        if fault is not None:
            raise ConfigError(f"consumer group: {fault}", key="consumerGroup", value=group)
        fault = topic_fault(topic)
        if fault is not None:
            raise MessageIllegalError(f"topic: {fault}", field="topic")

        for queue_id, offset in offsets.items():
            for key, value, most in (("queue id", queue_id, MAX_QUEUE_ID), ("offset", offset, _LARGEST_OFFSET)):
                if type(value) is not int or not 0 <= value <= most:
                    message = f"{topic}, consumer group {group}: {key}: found {value!r}; allowed is 0 to {most}"
                    raise ConfigError(message, key=key, value=value)

        if offsets:
            name = topic + _SEPARATOR + group
            for table in (self._rows, self._changed):
                table.setdefault(name, {}).update(offsets)

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups of users that have offsets in a topic, sorted."""
        return [group for group, topics in self.topics_of_groups().items() if topic in topics]

    def forget_topic(self, topic: str) -> None:
        """Take away the offsets of all groups in a topic; `save` writes the table without them.

        Source: RocketMQ ConsumerOffsetManager.cleanOffsetByTopic.
        """
        for name in [name for name in self._rows if name.partition(_SEPARATOR)[0] == topic]:
            self._remove(name)


def publish_offsets(
    root: str,
    group: str,
    offsets: Mapping[tuple[str, int], int],
    disk: Disk | None = None,
    timeout_s: float = _TIMEOUT_S,
    *,
    own: bool = False,
    durable: bool = False,
    first: bool = False,
    pending: Callable[[ConsumerOffsets], object] | None = None,
) -> None:
    """Record how far a group has read; other groups, topics and queues in the file stay as they are.

    Parameters
    ----------
    offsets : dict of (topic, queue id) to int
        The next offset to consume.
    timeout_s : float
        How long to wait for another process that publishes.
    own : bool
        The group is one of the broker's own.
    durable : bool
        Write and sync the file also if it has these offsets: a call that wrote them may have failed before its sync.
    first : bool
        Leave out topics in which the group has an offset already: another worker was faster.
    pending : callable | None
        Adds to the table what BATCH records of the log move on, because what is published comes after them.

    Raises
    ------
    StoreLockedError
        A Java broker holds the store, and therefore the file; or another process publishes for longer than `timeout_s`.
    CorruptionError
        The file cannot be read; it is left unchanged.
    ConfigError, MessageIllegalError
        As `ConsumerOffsets.update`.
    OSError
        The file cannot be written; it is unchanged.
    """
    disk = disk or Disk()
    holder = probe_java(root)
    if holder is not None:
        raise StoreLockedError(
            f"{root}: locked by {holder.words}, which keeps the consumer offsets in memory and overwrites their file. "
            "Stop it first",
            path=root,
            holder=holder.words,
        )

    table = ConsumerOffsets(disk, root)
    table.writes_what_is_there = durable
    by_topic: dict[str, dict[int, int]] = {}
    for (topic, queue_id), offset in offsets.items():
        by_topic.setdefault(topic, {})[queue_id] = offset

    with offsets_locked(disk, root, f"consumer group {group}", timeout_s):
        if pending is not None:
            table.load()
            pending(table)
        if first:
            table.load()
            by_topic = {topic: of_topic for topic, of_topic in by_topic.items() if not table.get(topic, group)}
        for topic, of_topic in by_topic.items():
            table.update(topic, group, of_topic, own=own)
        table.save()


def most_read(root: str, disk: Disk) -> dict[tuple[str, int], int]:
    """Return (topic, queue id) -> the largest offset of a consumer group of users, or of the store's own row.

    Raises
    ------
    CorruptionError
        The file cannot be read.
    """
    table = ConsumerOffsets(disk, root)
    table.load()
    largest: dict[tuple[str, int], int] = {}
    for group, topics in table.topics_of_groups().items():
        for topic in topics if group != HALF_GROUP else ():
            for queue_id, offset in table.get(topic, group).items():
                largest[topic, queue_id] = max(largest.get((topic, queue_id), 0), offset)
    if table.settled is not None:
        largest[BATCH_TOPIC, 0] = max(largest.get((BATCH_TOPIC, 0), 0), table.settled)
    return largest


def lower_offsets(root: str, topic: str, queue_id: int, end: int, right: int, disk: Disk) -> dict[str, int]:
    """Give all groups of users whose offset in a queue is above `end` the offset `right`, and return what they had.

    The store's own row counts as one of them.

    The caller holds the store.

    Raises
    ------
    StoreLockedError
        Another process publishes for too long.
    CorruptionError
        The file cannot be read; it is left unchanged.
    OSError
        The file cannot be written; it is unchanged.
    """
    table = ConsumerOffsets(disk, root)
    with offsets_locked(disk, root, "offsets beyond the end of a queue", _TIMEOUT_S):
        table.load()
        groups = [*(group for group in table.groups if group != HALF_GROUP), PROGRESS_GROUP]
        beyond = {group: table.get(topic, group).get(queue_id, 0) for group in groups}
        beyond = {group: offset for group, offset in beyond.items() if offset > end}
        for group in beyond:
            table.update(topic, group, {queue_id: right}, own=True)
        table.save()
    return beyond


@contextlib.contextmanager
def offsets_locked(disk: Disk, root: str, description: str, timeout_s: float) -> Iterator[None]:
    """Hold the lock of those who write the file.

    Raises
    ------
    StoreLockedError
        Another process publishes for longer than `timeout_s`.
    """
    folder = os.path.join(root, "spark")
    if not disk.is_folder(folder):
        disk.mkdir(folder)
    lock = WriterLock(os.path.join(folder, "consumer-offsets.lock"))
    try:
        lock.acquire(timeout_s, description=description)
        yield
    finally:
        lock.close()


def _topics_of_groups(names: Iterable[str]) -> dict[str, list[str]]:
    topics_by_group: dict[str, list[str]] = {}
    for name in sorted(names):
        pair = _topic_and_group(name)
        if pair is not None and pair[1] != PROGRESS_GROUP:
            topics_by_group.setdefault(pair[1], []).append(pair[0])
    return {group: sorted(topics_by_group[group]) for group in sorted(topics_by_group)}


def _topic_and_group(name: str) -> tuple[str, str] | None:
    """Return the topic and group in a key of the table; a broker ignores a key that lacks either."""
    topic, _, group = name.partition(_SEPARATOR)
    return (topic, group) if topic and group and _SEPARATOR not in group else None
