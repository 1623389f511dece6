"""Moves the progress of consumer groups with a batch: the messages that were read, and the results, count together.

    the groups' queues are held | table locked | pending progress taken over | batch appended, sealed | table written
                                                                                   commit point

The BATCH record carries the progress, so the seal of the batch is the one moment at which both count. What a kill
leaves between the seal and the table, `log.group_progress` adds. The table is locked meanwhile: what others publish is
either known to the batch or comes after it.

A queue is held against workers of the group: `ClaimedProgress` takes its lock, and a `Consumer` has it already.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, runtime_checkable

from messagestore.errors import (
    ConfigError,
    CorruptionError,
    OffsetOutOfRangeError,
    ProgressConflictError,
    StoreLockedError,
)
from messagestore.files.consumer_offsets import ConsumerOffsets, offsets_locked
from messagestore.files.disk import Disk
from messagestore.files.group_locks import GroupLocks
from messagestore.format import arguments, batch_record
from messagestore.format.message import BATCH_TOPIC, check_group, check_readable_queue, group_fault
from messagestore.log.group_progress import last_places, pending_places, settle
from messagestore.log.store_files import StoreFiles
from messagestore.signal_handlers import pass_on
from messagestore.writer.log_writer import LogWriter

Queue = tuple[str, int]
_TIMEOUT_S = 30.0
_NONE = -1
_log = logging.getLogger(__name__)


@runtime_checkable
class ProgressToMove(Protocol):
    """Progress that a batch is to move."""

    @property
    def offsets(self) -> Mapping[str, Mapping[Queue, int]]:
        """The next offset of each group in its queues."""

    def held(self, root: str) -> AbstractContextManager[object]:
        """Keep the queues until a batch is appended to the store at `root`; refuses queues that another worker has."""

    def allows(self, queue: Queue, offset: int) -> bool:
        """Whether a group may be moved on from where it is in a queue; -1: it has no progress there."""

    def moved(self) -> None:
        """The batch is in the log."""


class ClaimedProgress:
    """Progress that a program names itself. No worker of the group may have the queues meanwhile.

    Raises
    ------
    ConfigError, MessageIllegalError
        The groups, queues or offsets are not what is allowed.
    """

    def __init__(self, root: str, disk: Disk, progress: object) -> None:
        self._root, self._disk = root, disk
        self.offsets = _checked(progress)

    @contextlib.contextmanager
    def held(self, root: str) -> Iterator[None]:  # noqa: ARG002 - it was made for this store
        """Take the locks of the queues."""
        with ExitStack() as until_appended:
            for group, offsets in self.offsets.items():
                locks = GroupLocks(self._disk, self._root, group)
                until_appended.callback(locks.close)
                for topic, queue_id in offsets:
                    if not locks.claim(topic, queue_id):
                        raise StoreLockedError(
                            f"progress: queue {queue_id} of {topic!r} is read by a worker of consumer group "
                            f"{group!r}. Nothing was appended. Give the progress of that worker "
                            f"(`progress=consumer.positions()`), or close it first",
                            path=locks.path,
                            holder=f"a worker of consumer group {group}",
                        )
            yield

    def allows(self, queue: Queue, offset: int) -> bool:  # noqa: ARG002 - any, since the caller names the offsets
        """Whoever names offsets may move a group anywhere."""
        return True

    def moved(self) -> None:
        """The locks are given back when `held` ends."""


def _checked(progress: object) -> dict[str, dict[Queue, int]]:
    allowed = "a dict of consumer groups to dicts of (topic, queue id) to the next offset, or `consumer.positions()`"
    if not isinstance(progress, Mapping) or not progress:
        raise arguments.refused("progress", progress, allowed)
    offsets_of_groups: dict[str, dict[Queue, int]] = {}
    for group, offsets in progress.items():
        check_group(group)
        if not isinstance(offsets, Mapping) or not offsets:
            raise arguments.refused("progress", progress, allowed)
        offsets_of_groups[group] = {}
        for queue, offset in offsets.items():
            if not isinstance(queue, tuple) or len(queue) != 2:
                raise arguments.refused("progress", progress, allowed)
            check_readable_queue(*queue)
            offsets_of_groups[group][queue] = arguments.whole_number("progress", offset, 0, (1 << 63) - 1)
    return offsets_of_groups


class Move:
    """The progress of groups while a batch moves it.

    Parameters
    ----------
    writer : LogWriter
    progress : ProgressToMove
    held : ExitStack
        Gives the queues and the table back. The caller closes it when the batch is appended or has failed.
    """

    def __init__(self, writer: LogWriter, progress: ProgressToMove, held: ExitStack) -> None:
        self._writer, self._progress, self._held = writer, progress, held
        self._table = _table(writer.files)
        self._number = 0

    def begin(self, number: int) -> batch_record.Progress:
        """Lock the table, and return what BATCH record `number` says.

        Raises
        ------
        StoreLockedError
            Another worker has a queue, or somebody writes the table for too long.
        ProgressConflictError
            The group is elsewhere than where its consumer began.
        ConfigError
            The consumer reads another store, or the group is there already.
        OffsetOutOfRangeError
            A group would be behind the end of a queue.
        CorruptionError
            The table cannot be read.
        OSError
            The table cannot be written.
        """
        files, self._number = self._writer.files, number
        root = files.paths.root
        self._held.enter_context(self._progress.held(root))
        groups = ", ".join(sorted(self._progress.offsets))
        self._held.enter_context(offsets_locked(files.disk, root, f"consumer group {groups}", _TIMEOUT_S))

        self._table.load_to_save()
        _take_over(files, self._writer.end.physical_offset, self._table)
        if self._table.settled is None:  # readers look for pending progress from here on
            self._table.settle(number)
            self._table.save()
        return {group: self._moved_on(group, offsets) for group, offsets in self._progress.offsets.items()}

    def _moved_on(self, group: str, offsets: Mapping[Queue, int]) -> dict[str, list[tuple[int, int, int]]]:
        rows: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, queue_id), after in sorted(offsets.items()):
            before = self._table.get(topic, group).get(queue_id, _NONE)
            if not self._progress.allows((topic, queue_id), before):
                raise ProgressConflictError(
                    f"{topic}/{queue_id}: consumer group {group} is at {before if before >= 0 else 'no offset'}, and "
                    f"this consumer began elsewhere: the group was reset, or a batch of an earlier run was recovered. "
                    f"Nothing was appended. Drop the results, close the consumer and open another one, which continues "
                    f"where the group is",
                    group=group,
                    topic=topic,
                    queue_id=queue_id,
                    offset=before,
                )

            end = self._writer.files.queue(topic, queue_id).end(hint=after)
            if after > end:
                raise OffsetOutOfRangeError(
                    f"progress: found offset {after} of consumer group {group} in {topic}/{queue_id}; allowed is 0 to "
                    f"{end}, the next message that arrives: the group would skip messages. Nothing was appended",
                    topic=topic,
                    queue_id=queue_id,
                    queue_offset=after,
                    min=0,
                    max=end,
                )

            rows.setdefault(topic, []).append((queue_id, before, after))
        return rows

    def finish(self) -> None:
        """Write the table. The batch is in the log, so an error is no reason to append it again."""
        for group, offsets in self._progress.offsets.items():
            for (topic, queue_id), offset in offsets.items():
                self._table.update(topic, group, {queue_id: offset})
        self._table.settle(self._number + 1)
        try:
            self._table.save()
        except (OSError, CorruptionError, ConfigError) as error:
            pass_on(error)
            _log.warning(
                "%s: the batch is in the log, and moves its consumer groups, but their table could not be written "
                "(%s). Readers take the progress from the log until it can be written again",
                self._table.path,
                error,
            )
        self._progress.moved()


def settle_progress(writer: LogWriter) -> None:
    """Write progress that is pending into the table, and lower what a log that lost its end does not bear out.

    Call under the writer's mutex, when nothing is in flight.

    Raises
    ------
    StoreLockedError, CorruptionError, ConfigError, OSError
        The table cannot be read or written; the progress stays pending.
    """
    files = writer.files
    table = _table(files)
    table.load()
    if table.settled is None:
        return
    with offsets_locked(files.disk, files.paths.root, "progress of batches", _TIMEOUT_S):
        table.load_to_save()
        _go_back(files, writer.end.physical_offset, table)
        _take_over(files, writer.end.physical_offset, table)
        table.save()


def settle_if_possible(writer: LogWriter) -> None:
    """Write what batches of a writer that was killed did to the progress of consumer groups.

    If that fails, readers take the progress from the log, and the store can be used.
    """
    try:
        settle_progress(writer)
    except (StoreLockedError, ConfigError, CorruptionError, OSError) as error:
        pass_on(error)
        _log.warning("%s: the progress of consumer groups could not be written: %s", writer.files.paths.root, error)


def first_pending(writer: LogWriter) -> int | None:
    """The physical offset of the first BATCH record whose progress is not in the table; None: there is none, or the
    table is so damaged that it does not say.
    """
    files = writer.files
    table = _table(files)
    try:
        table.load()
    except CorruptionError:
        return None
    return next(pending_places(files, writer.end.physical_offset, table), None)


def _table(files: StoreFiles) -> ConsumerOffsets:
    table = ConsumerOffsets(files.disk, files.paths.root)
    table.writes_what_is_there = True
    return table


def _go_back(files: StoreFiles, end: int, table: ConsumerOffsets) -> None:
    """Move groups that are beyond the ends of queues to where the last BATCH records that are left moved them."""
    if table.settled is None or table.settled <= files.queue(BATCH_TOPIC, 0).end(limit=end):
        return
    names = files.queue_names()
    beyond = {
        (group, topic, queue_id): offset
        for group, topics in table.topics_of_groups().items()
        for topic in names.keys() & topics
        for queue_id, offset in table.get(topic, group).items()
        if group_fault(group) is None and offset > files.queue(topic, queue_id).end(limit=end)
    }
    for (group, topic, queue_id), after in last_places(files, end, beyond.keys()).items():
        table.update(topic, group, {queue_id: after})
        _log.warning(
            "%s: consumer group %s had read %s/%d up to %d, but the end of the log is gone. The group continues at %d, "
            "to which the last batch that is left moved it",
            table.path,
            group,
            topic,
            queue_id,
            beyond[group, topic, queue_id],
            after,
        )


def _take_over(files: StoreFiles, end: int, table: ConsumerOffsets) -> None:
    for passed in settle(files, end, table):
        _log.warning(
            "%s: consumer group %s is at %d in %s/%d, although a batch moved it from %d to %d: a broker has moved it "
            "since. It continues where it is",
            table.path,
            passed.group,
            passed.offset,
            passed.topic,
            passed.queue_id,
            passed.before,
            passed.after,
        )
