"""What an operator asks about a store on this host: who holds it, how it was left, and what is in it.

These functions take no lock and write nothing. What they return consists of numbers, text, lists and dicts, so that it
can be sent to another host, and `messagestore status --json` writes it unchanged.

They open the files themselves, for the commands that make sense only where the files are. What a reader of a store may
ask too, from another host as well, looks through a view that is open (`views`, `queues` and `lag`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from messagestore.broker.delivery import delivered_so_far
from messagestore.broker.expired import ExpiredFiles, asked_for, foreseen
from messagestore.broker.open_halves import OpenHalves
from messagestore.errors import ConfigError, UnknownTopicError
from messagestore.files.consumer_filters import consumer_filters
from messagestore.files.disk import Disk
from messagestore.files.store_settings import read_settings
from messagestore.files.subscription_groups import SubscriptionGroups
from messagestore.format.config import ROCKETMQS_LEVELS, StoreConfig, java_key
from messagestore.format.config import settings as all_settings
from messagestore.format.message import BATCH_TOPIC, RETRY_PREFIX, MessageExt, check_topic
from messagestore.inspect.lag import groups_of
from messagestore.inspect.queues import offsets_of, places_of, topics_of
from messagestore.inspect.records import begins, records
from messagestore.inspect.standing import status_of
from messagestore.inspect.verify import Finding, VerifyReport, verify
from messagestore.inspect.views import overall_of
from messagestore.log.remembered import corrected
from messagestore.log.store_files import FIXED, Identity, Paths, config_of_records, looks_like_store
from messagestore.log.walk import Depth, Walk
from messagestore.read.group_offsets import group_offsets
from messagestore.read.query import KeySearch, look_message_by_offset, offsets_behind_times, search_key
from messagestore.read.view import StoreView
from messagestore.signal_handlers import pass_on
from messagestore.writer.catching_up import journal_of

_SMALL_SIZE = 4096

__all__ = [
    "ExpiredFiles",
    "Finding",
    "KeySearch",
    "VerifyReport",
    "batch_times",
    "corrected",
    "dump",
    "expired",
    "filters",
    "group_places",
    "group_settings",
    "groups",
    "holds_store",
    "is_open",
    "log_range",
    "message_at",
    "message_before",
    "overall",
    "search",
    "settings",
    "stamp",
    "status",
    "stood_at",
    "verify",
]


def holds_store(path: str) -> bool:
    """Whether a folder holds a store, of this project or a broker's."""
    return looks_like_store(Disk(), Paths(path))


def settings(path: str) -> list[dict[str, Any]]:
    """Each setting of a store: its `name` in RocketMQ's spelling, its `value`, and where that comes `from`.

    `store`: it was set for the store. `fixed`: it is one of the sizes with which the store was made. `records`: the
    store's records have it. `default`: nobody said anything.
    """
    with _view(path, None) as view:
        files = view.files
        stored = read_settings(files.disk, files.paths.settings)
        recorded = config_of_records(files.disk, files.paths, files.config)
        levels = ROCKETMQS_LEVELS if files.identity is None else files.identity.delay_levels.last
        name_of_broker = view.broker_name

    rows = []
    for setting in all_settings():
        value, source = getattr(files.config, setting.name), "default"
        if setting.name in FIXED:
            source = "fixed"
        elif setting.name in stored.given:
            source = "store"
        elif setting.name == "message_delay_level" and levels != ROCKETMQS_LEVELS:
            value, source = levels, "store"
        elif setting.name == "broker_name" and name_of_broker:
            value, source = name_of_broker, "store"
        elif getattr(recorded, setting.name) != value:
            value, source = getattr(recorded, setting.name), "records"
        rows.append({"name": java_key(setting.name), "value": value, "from": source})
    return rows


def stamp(path: str) -> tuple[object, ...] | None:
    """A value that changes whenever something that these functions show may have changed. It takes a system call for
    each small file.

    None: nobody can tell, because a broker is at work, which writes without a trace in small files. What happens to a
    single segment or queue file is not seen, unless a writer of ours did it.
    """
    disk, paths = Disk(), Paths(path)
    marks: list[object] = []
    for name in (paths.abort, paths.state):
        try:
            marks.append(disk.read_head(name, _SMALL_SIZE))
        except FileNotFoundError as error:
            pass_on(error)
            marks.append(None)
    identity = Identity.read(disk, paths.identity)
    if marks[0] is not None and (identity is None or identity.store_id.encode() not in cast("bytes", marks[0])):
        return None
    folders = (paths.root, paths.spark, os.path.join(paths.root, "config"))
    names = [os.path.join(folder, name) for folder in folders for name in sorted(disk.names(folder))]
    for name in (*folders, *names):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name)
            marks.append((name, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(marks)


def is_open(path: str) -> bool:
    """Whether a writer is attached to a store, or was and has not closed it."""
    return Disk().exists(Paths(path).abort)


def status(path: str, config: StoreConfig | None = None) -> dict[str, Any]:
    """Who holds a store, how it was left and what it contains. `faults` lists what could not be read, in words.

    Raises
    ------
    NotAStoreError
        There is no store.
    """
    with _view(path, config) as view:
        return status_of(view)


def groups(path: str, config: StoreConfig | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """How far each consumer group has read each queue of its topics, and what could not be read, in words."""
    with _view(path, config) as view:
        return groups_of(view)


def overall(path: str, config: StoreConfig | None = None) -> dict[str, tuple[list[dict[str, Any]], list[str]]]:
    """The rows of the views `figures`, `status`, `topics` and `queues` by name, from one look at the queues."""
    with _view(path, config) as view:
        return overall_of(view)


@dataclass(frozen=True)
class TopicLook:
    """What one look at the queues of a topic has found.

    Parameters
    ----------
    queues : list of dict
        As `offsets`.
    groups : list of dict
        How far each consumer group has read each queue, as `groups`.
    stored : list of int
        [n] How many messages that are still there were stored before each of the times that were asked for.
    faults : list of str
        What could not be read, in words.
    """

    queues: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    stored: list[int]
    faults: list[str]


def look_at_topic(path: str, topic: str, times_ms: Sequence[int] = (), config: StoreConfig | None = None) -> TopicLook:
    """Look at the queues of one topic, at each only once.

    Parameters
    ----------
    times_ms : sequence of int
        [n] Milliseconds since 1970. No body is read.

    Raises
    ------
    UnknownTopicError
        The store has no such topic.
    """
    with _view(path, config) as view:
        queues, faults = offsets_of(view, [topic], None)
        ends = {(topic, row["queueId"]): (row["minOffset"], row["maxOffset"]) for row in queues}
        groups, more = groups_of(view, topic, ends)
        stored = np.zeros(len(times_ms), np.int64)
        before_ms = [time_ms - 1 for time_ms in times_ms]
        for (_, queue_id), (low, high) in ends.items():
            if low < high:
                numbers = offsets_behind_times(view, topic, queue_id, before_ms, (low, high))
                stored += np.maximum(0, np.array(numbers, np.int64) - low)
    return TopicLook(queues, groups, stored.tolist(), list(dict.fromkeys([*faults, *more])))


def group_places(path: str, topic: str, queue_id: int) -> dict[str, int | None]:
    """Each consumer group that reads a topic, and the number of the message of one queue that it reads next.

    None: it has no offset in this queue, and begins with the first message. Where the queue ends is not looked for.

    Raises
    ------
    CorruptionError, ConfigError
        The offsets cannot be read, or a broker keeps them in RocksDB.
    """
    with _view(path, None) as view:
        table = group_offsets(view)
        readers = table.topics_read(view.topics().__contains__ if topic.startswith(RETRY_PREFIX) else lambda _: False)
        return {group: table.get(topic, group).get(queue_id) for group, topics in readers.items() if topic in topics}


def deletions(path: str, topics: Iterable[str]) -> list[dict[str, Any]]:
    """What would go with each of some topics: its messages and queues, and the groups that have read some of it.

    Raises
    ------
    MessageIllegalError
        A topic is the broker's own.
    UnknownTopicError
        The store has no such topic.
    """
    with _view(path, None) as view:
        existing = {row["topic"]: row for row in topics_of(view, places_of(view, [], in_log=False), [])}
        read: dict[str, list[str]] = {}
        for group, names in group_offsets(view).topics_of_groups().items():
            for name in names:
                read.setdefault(name, []).append(group)
    rows = []
    for name in topics:
        check_topic(name)
        if name not in existing and name not in read:
            raise UnknownTopicError(name, existing, hint="Nothing was deleted")
        counts = existing.get(name, {"messages": 0, "queues": 0})
        rows.append(
            {"topic": name, **{part: counts[part] for part in ("messages", "queues")}, "groups": read.get(name, [])}
        )
    return rows


def group_settings(path: str) -> list[dict[str, Any]]:
    """The settings of each consumer group that has some, as they are in config/subscriptionGroup.json.

    Raises
    ------
    CorruptionError
        The file cannot be read.
    """
    groups = SubscriptionGroups(Disk(), path)
    groups.load()
    return [settings.to_fields() for name in groups.names if (settings := groups.get(name)) is not None]


def filters(path: str) -> list[dict[str, Any]]:
    """The filters that consumer groups have registered with a broker, from config/consumerFilter.json.

    Raises
    ------
    CorruptionError
        The file cannot be read.
    """
    return [
        {
            "group": filter_data.consumer_group,
            "topic": filter_data.topic,
            "filter": {
                "expression": filter_data.expression,
                "expressionType": filter_data.expression_type,
                "bornTime": filter_data.born_time_ms,
                "deadTime": filter_data.dead_time_ms,
                "clientVersion": filter_data.client_version,
            },
        }
        for filter_data in consumer_filters(Disk(), path)
    ]


def expired(
    path: str,
    config: StoreConfig | None = None,
    *,
    reserved_hours: float | None = None,
    before_ms: int | None = None,
    before_offset: int | None = None,
    ignored_groups: Collection[str] = (),
    at_once: bool = False,
) -> ExpiredFiles:
    """What `MessageStore.delete_expired_files` would delete now, and why the rest stays. Nothing is changed.

    Raises
    ------
    ConfigError
        An argument is not allowed, or a topic is compacted.
    CorruptionError
        What must be read is damaged.
    """
    with _view(path, config) as view:
        files = view.files
        expiry = asked_for(
            files.config,
            files.disk.time_ns() // 1_000_000,
            reserved_hours=reserved_hours,
            before_ms=before_ms,
            before_offset=before_offset,
            ignored_groups=ignored_groups,
            at_once=at_once,
        )

        view.refresh()
        view.check_units_in_log()
        halves = OpenHalves(view)
        halves.refresh()
        progress, journal_end = halves.progress(), view.max_offset(BATCH_TOPIC, 0)

        return view.healed(
            lambda: foreseen(
                files,
                files.state_file.read() if view.store_id else None,
                expiry,
                lambda: progress,
                lambda: delivered_so_far(files, journal_of(files, journal_end)),
            )
        )


@contextlib.contextmanager
def _view(path: str, config: StoreConfig | None) -> Iterator[StoreView]:
    view = StoreView(path, config)
    try:
        yield view
    finally:
        view.close()


def log_range(path: str) -> tuple[int, int]:
    """Where the log begins, and a physical offset behind which nothing is shown."""
    with _view(path, None) as view:
        view.refresh()
        log = view.files.commit_log
        return log.min_offset, log.max_offset if view.known_end is None else view.known_end


def stood_at(
    path: str, queues: Sequence[tuple[str, int]], physical_offsets: Sequence[int], config: StoreConfig | None = None
) -> list[dict[tuple[str, int], int]]:
    """The number of the first message of each queue at each of some physical offsets or above. The end of a queue is
    looked for once, which takes as long as a search.
    """
    with _view(path, config) as view:
        found = {queue: view.search_physicals(*queue, physical_offsets) for queue in queues}
    return [{queue: numbers[i] for queue, numbers in found.items()} for i in range(len(physical_offsets))]


def batch_times(path: str, physical_offsets: Sequence[int]) -> list[int | None]:
    """When the batches were stored whose BATCH records are at some physical offsets, in milliseconds since 1970; None
    where no record begins. A record that retention has written again has the time of the first one.
    """
    with _view(path, None) as view:
        view.refresh()
        log = view.files.commit_log
        heads = view.healed(lambda: [log.head(physical_offset) for physical_offset in physical_offsets])
    return [None if head is None else int(head["born_timestamp_ms"]) for head in heads]


# ---- messages


def search(
    path: str, key: str, *, max_count: int, max_size: int, start: int | None = None, config: StoreConfig | None = None
) -> KeySearch:
    """Search all topics for a key or unique key. The index is asked; of what it does not cover, about `max_size` bytes
    are read.

    Parameters
    ----------
    start : int | None
        Where the last search stopped; None: this is the first one.

    Raises
    ------
    ConfigError
        No record begins at `start`.
    CorruptionError
        What must be read is damaged.
    """
    with _view(path, config) as view:
        log = view.files.commit_log
        view.refresh()
        if start is not None and log.min_offset <= start < log.max_offset and not begins(log, start):
            raise ConfigError(
                f"after: no record begins at {start}. Take the place that the last search gave, or begin again",
                key="after",
                value=start,
            )
        return search_key(view, key, max_count=max_count, max_size=max_size, start=start)


def message_at(path: str, physical_offset: int) -> MessageExt | None:
    """The message at a physical offset; None if no visible record begins there.

    Raises
    ------
    CorruptionError
        A record begins there, and is damaged.
    """
    with _view(path, None) as view:
        return look_message_by_offset(view, physical_offset)


def message_before(path: str, physical_offset: int, start: int) -> MessageExt | None:
    """The message before a physical offset in the log; None if no visible record begins there.

    Parameters
    ----------
    start : int
        Where a record begins before it; the log is read from there.

    Raises
    ------
    CorruptionError
        The record before it is damaged.
    """
    with _view(path, None) as view:
        view.refresh()

        def last() -> int | None:
            place = None
            for run in Walk(view.files.commit_log, start, physical_offset, Depth.FRAMING):
                place = run.physical_offset + int(run.starts[-1]) if len(run.starts) else place
            return place

        before = view.healed(last)
        return None if before is None else look_message_by_offset(view, before)


def dump(
    path: str, config: StoreConfig | None, start: int | None, tell: Callable[[str], None]
) -> Generator[tuple[bytes, MessageExt], None, None]:
    """The bytes and the message of each record, in the order of the log, as far as a reader may see.

    Parameters
    ----------
    start : int | None
        The physical offset of the first record; None: the first record in the log.
    tell : function
        It receives one line for each gap that retention makes meanwhile, and one if a broker's log ends with a torn
        record.

    Raises
    ------
    ConfigError
        No record begins at `start`.
    CorruptionError
        The log ends before its end.
    """
    view = StoreView(path, config)
    try:
        yield from records(view, start, tell)
    finally:
        view.close()
