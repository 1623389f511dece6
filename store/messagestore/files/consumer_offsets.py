"""`config/consumerOffset.json`: records how far consumer groups have read.

The file is the broker's own (`ConsumerOffsetManager.java`). For each topic and group, it holds the next offset to
consume in each queue. A live broker reads it before it takes its lock, and rewrites it from memory every 5 s and when
it ends. Therefore this project writes it only while no broker is running, and does not rely on it for anything.

    "offsetTable":{"flights@delays":{0:1200,1:1190}}

Threads: one. Processes: a process that publishes holds `spark/consumer-offsets.lock`. It is a separate lock, because a
writer's session may hold `spark/writer.lock` for days, and the groups of readers must still make progress. Publishing
does not attach to the store: that would protect nothing, would make a broker that is about to start fail, and would
make a writer that is about to close leave `abort` behind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from messagestore.errors import ConfigError, MessageIllegalError, StoreLockedError
from messagestore.files.config_file import ConfigFile
from messagestore.files.mapped_file import Disk
from messagestore.files.writer_lock import WriterLock, probe_java
from messagestore.format.message import MAX_QUEUE_ID, group_fault, topic_fault

_SEPARATOR = "@"
_LARGEST_OFFSET = (1 << 63) - 1
_TIMEOUT_S = 1.0


class ConsumerOffsets:
    """`config/consumerOffset.json` of one store.

    Parameters
    ----------
    disk : Disk
    root : str
        The store.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        # A separate name, because recovery sweeps `new-*` in `spark/` under a lock that is not held here.
        self._file = ConfigFile(
            disk,
            root,
            "consumerOffset.json",
            "offsetTable",
            via="consumer-offsets.json",
            meaning="the broker's table of consumer offsets",
            hint="Restore it from a copy. If you move it away instead, all consumer groups lose their offsets.",
        )
        self.path = self._file.path
        self._offsets: dict[str, dict[int, int]] = {}
        self._changed: dict[str, dict[int, int]] = {}

    # ---- the file

    def load(self) -> None:
        """Read the file, or its `.bak` if the file is missing, empty or unreadable. Unsaved changes are dropped.

        Raises
        ------
        CorruptionError
            There is a file, but none that can be read.
        """
        self._offsets, self._changed = {}, {}
        self._offsets = self._file.load(_table)

    def save(self) -> None:
        """Write what was updated since `load` or the last `save`; the rest of the file stays as it is now.

        The caller holds the lock (`publish_offsets`). Without changes, nothing is written.
        """
        changed = self._changed
        if not changed:
            return
        self.load()
        before = {name: dict(offsets) for name, offsets in self._offsets.items()}
        for name, offsets in changed.items():
            self._offsets.setdefault(name, {}).update(offsets)
        if self._offsets != before:
            self._changed = changed  # the changes remain to be saved if this fails
            self._file.save(self._offsets, groupTopicMap={group: tuple(self.topics(group)) for group in self.groups})
        self._changed = {}

    # ---- offsets

    @property
    def groups(self) -> list[str]:
        """All groups, sorted."""
        return sorted({pair[1] for name in self._offsets if (pair := _topic_and_group(name)) is not None})

    def topics(self, group: str) -> list[str]:
        """Return the topics in which a group has offsets, sorted."""
        pairs = (_topic_and_group(name) for name in self._offsets)
        return sorted(pair[0] for pair in pairs if pair is not None and pair[1] == group)

    def get(self, topic: str, group: str) -> dict[int, int]:
        """Return queue id -> next offset to consume; empty for a group that has never read the topic."""
        return dict(self._offsets.get(topic + _SEPARATOR + group, {}))

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
            for table in (self._offsets, self._changed):
                table.setdefault(name, {}).update(offsets)


def publish_offsets(
    root: str,
    group: str,
    offsets: Mapping[tuple[str, int], int],
    disk: Disk | None = None,
    timeout_s: float = _TIMEOUT_S,
    *,
    own: bool = False,
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
    by_topic: dict[str, dict[int, int]] = {}
    for (topic, queue_id), offset in offsets.items():
        by_topic.setdefault(topic, {})[queue_id] = offset
    folder = os.path.join(root, "spark")
    if not disk.is_folder(folder):
        disk.mkdir(folder)
    lock = WriterLock(os.path.join(folder, "consumer-offsets.lock"))
    try:
        lock.acquire(timeout_s, description=f"consumer group {group}")
        for topic, of_topic in by_topic.items():
            table.update(topic, group, of_topic, own=own)
        table.save()
    finally:
        lock.close()


def _topic_and_group(name: str) -> tuple[str, str] | None:
    """Return the topic and group in a key of the table; a broker ignores a key that lacks either."""
    topic, _, group = name.partition(_SEPARATOR)
    return (topic, group) if topic and group and _SEPARATOR not in group else None


def _table(fields: dict[str, Any]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for name, offsets in fields.items():
        found[name] = {int(queue_id): offset for queue_id, offset in offsets.items()}
        for offset in found[name].values():
            if type(offset) is not int or not -_LARGEST_OFFSET - 1 <= offset <= _LARGEST_OFFSET:
                raise ValueError(f"offset {offset!r}")
    return found
