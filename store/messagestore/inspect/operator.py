"""What an operator asks about a store on this host: who holds it, how it was left, and what is in it.

These functions take no lock and write nothing. What they return consists of numbers, text, lists and dicts, so that it
can be sent to another host, and `messagestore status --json` writes it unchanged.

`rows_of`, `offsets_of`, `lag_of` and `group_lag_of` look through a view that is open. A reader of a store asks them
(`spi/local.py`), and so does a server for readers of other hosts. The functions that take a path open the files
themselves; the commands that make sense only where the files are use them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

from messagestore.broker.delivery import delivered_so_far
from messagestore.broker.expired import ExpiredFiles, asked_for, foreseen
from messagestore.broker.open_halves import OpenHalves
from messagestore.errors import ConfigError, CorruptionError, MessageIllegalError, UnknownTopicError
from messagestore.files.commit_log import CommitLog
from messagestore.files.consumer_filters import consumer_filters
from messagestore.files.counters import read_counters
from messagestore.files.disk import Disk
from messagestore.files.recoveries import read_recoveries
from messagestore.files.state import State, boot_hash
from messagestore.files.store_settings import read_settings
from messagestore.files.subscription_groups import SubscriptionGroups
from messagestore.files.writer_lock import probe_attached, probe_java, probe_writer
from messagestore.format.config import ROCKETMQS_LEVELS, StoreConfig, java_key
from messagestore.format.config import settings as all_settings
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import BATCH_TOPIC, RETRY_PREFIX, MessageExt, check_topic
from messagestore.format.record import decode_message
from messagestore.format.record_scan import head_sizes
from messagestore.inspect import waiting
from messagestore.inspect.verify import Finding, VerifyReport, verify
from messagestore.log.batch_journal import JournalEntry
from messagestore.log.batch_search import batches_from, read_batch
from messagestore.log.condition import Left, Traces, look
from messagestore.log.remembered import corrected
from messagestore.log.store_files import FIXED, Identity, Paths, config_of_records, looks_like_store
from messagestore.log.walk import Walk
from messagestore.read.group_offsets import group_offsets
from messagestore.read.query import KeySearch, look_message_by_offset, queue_offset_by_time, search_key
from messagestore.read.view import StoreView
from messagestore.signal_handlers import pass_on
from messagestore.writer.catching_up import journal_of

_TRIES = 100
_SMALL_SIZE = 4096
_UNITS_READ = 1 << 18
"""The number of units that are read at once when sizes are added up."""

__all__ = [
    "ExpiredFiles",
    "Finding",
    "KeySearch",
    "VerifyReport",
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
    "overall",
    "search",
    "settings",
    "stamp",
    "status",
    "stood_at",
    "store_times",
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
    """What is another value whenever something in a store may have changed that these functions show. It takes a
    system call for each small file.

    None: nobody can tell, because a broker is at work, which writes without a trace in small files. What happens to a
    single segment or queue file is not seen, unless a writer of ours did it.
    """
    disk, paths = Disk(), Paths(path)
    found: list[object] = []
    for name in (paths.abort, paths.state):
        try:
            found.append(disk.read_head(name, _SMALL_SIZE))
        except FileNotFoundError as error:
            pass_on(error)
            found.append(None)
    identity = Identity.read(disk, paths.identity)
    if found[0] is not None and (identity is None or identity.store_id.encode() not in cast("bytes", found[0])):
        return None
    folders = (paths.root, paths.spark, os.path.join(paths.root, "config"))
    names = [os.path.join(folder, name) for folder in folders for name in sorted(disk.names(folder))]
    for name in (*folders, *names):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name)
            found.append((name, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


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
        stored = [0] * len(times_ms)
        before_ms = [time_ms - 1 for time_ms in times_ms]
        for (_, queue_id), (low, high) in ends.items():
            if low < high:
                numbers = view.offsets_behind_times(topic, queue_id, before_ms, (low, high))
                stored = [before + max(0, number - low) for before, number in zip(stored, numbers, strict=True)]
    return TopicLook(queues, groups, stored, list(dict.fromkeys([*faults, *more])))


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
        there = {row["topic"]: row for row in topics_of(view)[0]}
        read: dict[str, list[str]] = {}
        for group, names in group_offsets(view).topics_of_groups().items():
            for name in names:
                read.setdefault(name, []).append(group)
    rows = []
    for name in topics:
        check_topic(name)
        if name not in there and name not in read:
            raise UnknownTopicError(name, there, hint="Nothing was deleted")
        found = there.get(name, {"messages": 0, "queues": 0})
        rows.append(
            {"topic": name, **{part: found[part] for part in ("messages", "queues")}, "groups": read.get(name, [])}
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


def store_times(path: str, physical_offsets: Sequence[int]) -> list[int | None]:
    """When the records at some physical offsets were stored, in milliseconds since 1970; None where none begins."""
    with _view(path, None) as view:
        view.refresh()
        log = view.files.commit_log
        heads = view.healed(lambda: [log.head(physical_offset) for physical_offset in physical_offsets])
    return [None if head is None else int(head["store_timestamp_ms"]) for head in heads]


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
        if start is not None and log.min_offset <= start < log.max_offset and not _begins(log, start):
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


# ---- the records of the log


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
        yield from _records(view, start, tell)
    finally:
        view.close()


def _records(view: StoreView, start: int | None, tell: Callable[[str], None]) -> Iterator[tuple[bytes, MessageExt]]:
    log, end = view.files.commit_log, view.refresh().end
    position = log.min_offset if start is None else start
    if start is not None and (end is None or start < end) and not view.healed(lambda: _begins(log, start)):
        raise ConfigError(
            f"--from: found no whole record at {start}; allowed is the first byte of a record from {log.min_offset} to "
            f"{end if end is not None else log.max_offset}",
            key="--from",
            value=start,
        )

    while end is None or position < end:
        walk = Walk(log, position, end)
        try:
            for run in walk:
                for at, size in zip(run.starts.tolist(), head_sizes(run.heads).tolist(), strict=True):
                    message = decode_message(run.data.data, at, physical_offset=run.physical_offset + at)
                    yield run.data[at : at + size].tobytes(), message
                position = run.end
        except FileNotFoundError as error:
            pass_on(error)
            position = _behind_deleted(view, position, error, tell)
            continue
        _check_end(view, walk, tell)
        return


def _begins(log: CommitLog, position: int) -> bool:
    """Whether a record or a BLANK begins at a position."""
    return log.head(position) is not None or _is_blank(log, position)


def _behind_deleted(view: StoreView, position: int, error: FileNotFoundError, tell: Callable[[str], None]) -> int:
    """Where to continue if retention has deleted the segment at a position: at the first segment that is left.

    Raises
    ------
    CorruptionError
        There are segments before it, so retention did not delete it.
    """
    view.refresh()
    first = view.files.commit_log.min_offset
    if first <= position:
        raise CorruptionError(str(error.filename), 0, "this file", "none") from error
    tell(
        f"{first - position} bytes of the log from {position} on are gone, because retention has deleted their "
        f"segments. Continuing at {first}"
    )
    return first


def _check_end(view: StoreView, walk: Walk, tell: Callable[[str], None]) -> None:
    """Check that the records ended where the log ends.

    Raises
    ------
    CorruptionError
        They ended before it.
    """
    at, stop, end = walk.position, walk.stop, walk.end
    state = view.files.state_file.read() if view.store_id else None
    least = end if end is not None else state.clean_end if state is not None else 0
    torn = stop.reason not in ("zero", "blank", "end")
    if at < least or (torn and end is None and look(view.files).condition.closed):
        raise walk.broken()
    if end is None:
        view.check_units_in_log()
    if torn and end is None:
        tell(
            f"a broker is at work or was killed, and the log ends at {at}: expected {stop.expected}, found {stop.found}"
        )


def _is_blank(log: CommitLog, position: int) -> bool:
    if log.holding(position) is None or log.left(position) < len(log.blank(position)):
        return False
    return log.read(position, len(log.blank(position))) == log.blank(position)


# ---- status


def status_of(view: StoreView, looked: _Looked | None = None) -> dict[str, Any]:
    """Everything that `status` shows, for JSON. `faults` lists what could not be read, in words."""
    files, paths = view.files, view.files.paths
    faults: list[str] = []
    looked = looked or _Looked(view)
    standing, queues = looked.standing, looked.places(faults)
    batches = queues.get((BATCH_TOPIC, 0), (0, 0, 0))
    shown_end = max((end for _, _, end in queues.values()), default=files.commit_log.min_offset)

    return {
        "root": paths.root,
        "storeId": view.store_id or None,
        "brokerName": _broker_name(view, faults),
        **standing,
        "unproven": _unproven(view),
        **_behind(view),
        "diskUsed": _disk_used(view),
        "commitLog": {
            "segments": len(files.commit_log.offsets),
            "segmentSize": files.commit_log.segment_size,
            "minOffset": files.commit_log.min_offset,
            "maxOffset": view.known_end if view.known_end is not None else shown_end,
            "bytesOnDisk": _disk_size(paths.commit_log),
        },
        "consumeQueues": {"queues": len(queues), "bytesOnDisk": _disk_size(paths.consume_queue)},
        "index": {"files": len(files.disk.names(paths.index)), "bytesOnDisk": _disk_size(paths.index)},
        "topics": _topics(view, queues),
        "messages": sum(high - low for (topic, _), (low, high, _) in queues.items() if topic != BATCH_TOPIC),
        "batches": batches[1] - batches[0],
        "lastBatch": _last_batch(view, batches[1], faults),
        "recoveries": _recoveries(view, faults),
        "faults": faults,
    }


def _recoveries(view: StoreView, faults: list[str]) -> list[dict[str, Any]]:
    """The reports of the last recoveries that mended something, the newest first."""
    try:
        return read_recoveries(view.files.disk, view.files.paths.recoveries)[::-1]
    except CorruptionError as error:
        faults.append(str(error))
        return []


def _broker_name(view: StoreView, faults: list[str]) -> str | None:
    try:
        return view.broker_name or None
    except CorruptionError as error:
        faults.append(str(error))
        return None


def _standing(view: StoreView) -> dict[str, Any]:
    """Who holds the store and how it was left: `abort`, `state` and the locks, all at one moment.

    A writer changes `state` before its first byte and after its last, both under the writer lock. So if neither `abort`
    nor `state` has changed while the locks were examined, all three belong together. They also do if the lock was held,
    and the same writer had the store open before and after: one at work changes `state` faster than anybody looks.
    """
    for _ in range(_TRIES):
        traces = look(view.files)
        held = _holders(view)
        again = look(view.files, traces.promise)
        if traces == again or (held["writer"] is not None and _is_at_work(traces, again)):
            break
    return {
        "heldBy": held,
        "abort": {"present": traces.abort is not None, "ours": traces.ours, "content": traces.abort},
        "state": _state(traces.state if view.store_id else None),
        "left": _left(traces, held),
    }


def _is_at_work(before: Traces, after: Traces) -> bool:
    """Whether the same writer of ours had the store open at two moments."""
    states = before.state, after.state
    return (
        before.abort == after.abort
        and before.condition.ours_open
        and after.condition.ours_open
        and all(state is not None and not state.recovering and not state.poisoned for state in states)
        and len({(state.writer_pid, state.boot_hash) for state in states if state is not None}) == 1
    )


def _holders(view: StoreView) -> dict[str, Any]:
    root = view.files.paths.root
    broker = probe_java(root)
    return {
        "broker": None if broker is None else broker.words,
        "brokerPid": broker.pid if broker is not None and broker.pid > 0 else None,
        "writer": probe_writer(view.files.paths.writer_lock),
        "server": probe_writer(view.files.paths.serve_lock),
        "attached": broker is None and probe_attached(root),
    }


_LEFT_OPEN = {
    Left.IDLE: "idle",
    Left.IN_FLIGHT: "killed",
    Left.RECOVERING: "recovering",
    Left.RESTARTED: "restarted",
    Left.UNREADABLE: "unknown",
    Left.BROKER: "broker",
}
"""One word for each way in which a store is left open, if the locks show nobody at work."""


def _left(traces: Traces, held: dict[str, Any]) -> str:
    """How the store was left, in one word of `_LEFT_WORDS`."""
    left, condition, state = traces.left, traces.condition, traces.state
    if condition.closed:
        return "closed"
    if held["broker"] is not None or held["writer"] is not None:
        return "open"
    if condition.ours_open and state is not None and state.poisoned:
        return "poisoned"
    return "attached" if left is Left.IDLE and held["attached"] else _LEFT_OPEN[left]


def _state(state: State | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {
        "counter": state.counter,
        "visibleEnd": state.visible_end,
        "cleanEnd": state.clean_end,
        "inFlight": state.in_flight if state.in_flight >= 0 else None,
        "poisoned": state.poisoned,
        "asyncFlush": state.asynchronous,
        "clean": state.clean,
        "writerPid": state.writer_pid,
        "thisBoot": state.boot_hash == boot_hash(),
    }


_Places = dict[tuple[str, int], tuple[int, int, int]]


class _Looked:
    """What several views of a store show, looked for once.

    Parameters
    ----------
    view : StoreView
    in_log : bool
        Whether `places` also says where the last message of each queue ends in the log; otherwise that is 0.
    """

    def __init__(self, view: StoreView, *, in_log: bool = True) -> None:
        self._view, self._in_log = view, in_log

    @cached_property
    def standing(self) -> dict[str, Any]:
        """Who holds the store, and how it was left."""
        return _standing(self._view)

    def places(self, faults: list[str]) -> _Places:
        """The minimum offset, the maximum offset, and the physical offset after the last message, of each queue. What
        could not be read is added to `faults`, in words.
        """
        places, more = self._places
        faults += more
        return places

    @cached_property
    def _places(self) -> tuple[_Places, list[str]]:
        faults: list[str] = []
        return _queues(self._view, faults, in_log=self._in_log), faults


def _queues(view: StoreView, faults: list[str], *, in_log: bool = True) -> _Places:
    """The minimum offset, the maximum offset, and the physical offset after the last message, of each queue; 0 for the
    latter if it is not asked for.
    """
    ends_of_queues: _Places = {}
    for topic, ids in sorted(view.topics().items()):
        for queue_id in ids:
            try:
                low, high = view.bounds(topic, queue_id)
                end = 0
                if in_log:
                    last = view.units(topic, queue_id, max(low, high - 1), high)
                    end = int((last["physical_offset"] + last["size"]).max(initial=0))
                ends_of_queues[(topic, queue_id)] = (low, high, end)
            except CorruptionError as error:
                faults.append(str(error))
    return ends_of_queues


def _topics(view: StoreView, queues: dict[tuple[str, int], tuple[int, int, int]]) -> list[dict[str, Any]]:
    topics: dict[str, dict[str, Any]] = {}
    for name in view.files.topics.names:
        topics[name] = {"topic": name, "messages": 0, "queues": {}}

    for (topic, queue_id), (low, high, _) in queues.items():
        if topic != BATCH_TOPIC:
            row = topics.setdefault(topic, {"topic": topic, "messages": 0, "queues": {}})
            row["messages"] += high - low
            row["queues"][str(queue_id)] = {"minOffset": low, "maxOffset": high}

    for name, row in topics.items():
        config = view.files.topics.get(name)
        row["writeQueueNums"] = config.write_queue_nums if config is not None else None
    return [topics[name] for name in sorted(topics)]


def _last_batch(view: StoreView, end: int, faults: list[str]) -> dict[str, Any] | None:
    try:
        if view.tail is None:
            batches = list(batches_from(view.files, end - 1, end)) if end else []
        else:  # the units in the queue's files were never synced
            units = view.units(BATCH_TOPIC, 0, max(0, end - 1), end)
            last = read_batch(view.files.commit_log, int(units["physical_offset"][0])) if len(units) else None
            batches = [] if last is None else [last]
    except CorruptionError as error:
        faults.append(str(error))
        return None
    for batch in batches:
        return {
            "app": batch.app_id,
            "version": batch.version,
            "physicalOffset": batch.physical_offset,
            "end": batch.end,
            "rows": batch.row_count,
        }
    return None


def _unproven(view: StoreView) -> dict[str, Any] | None:
    """What a reader does not show, because no writer has recovered the store since the machine was started."""
    tail = view.tail
    if tail is None or tail.complete:
        return None
    return {"records": tail.hidden_count, "begin": tail.end, "end": tail.hidden_end, "more": tail.limited}


def _behind(view: StoreView) -> dict[str, int | None]:
    """How many bytes at the end of the log no reader sees yet, and how many no sync has covered, by the files.

    What another process has in memory cannot be seen: it may have synced a moment ago, or have puts that it has not
    committed (`transientStorePoolEnable`), unless nothing is in flight. None: the files do not say, as after a broker.
    """
    files = view.files
    state = files.state_file.read() if view.store_id else None
    if state is None or view.known_end is None:
        return {"dispatchBehind": None, "flushBehind": None, "commitBehind": None}
    end = state.visible_end
    if not state.idle:
        files.commit_log.load()
        for run in Walk(files.commit_log, end, few=True):
            end = run.end
        state = files.state_file.read() or state  # what was dispatched during the walk is not behind
    return {
        "dispatchBehind": max(0, end - state.visible_end),
        "flushBehind": max(0, end - state.flushed_end),
        "commitBehind": 0 if state.idle else None,
    }


def _disk_used(view: StoreView) -> dict[str, int]:
    """How full the disk is under the log and under the queues, in percent."""
    paths = view.files.paths
    folders = {"commitlog": paths.commit_log, "consumequeue": paths.consume_queue}
    return {name: view.files.disk.used_percent(path) for name, path in folders.items() if view.files.disk.exists(path)}


def _disk_size(folder: str) -> int:
    """The bytes that the files of a folder occupy on the disk; sparse files occupy less than their size."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # retention has just deleted it
    return total


# ---- topics and queues


def topics_of(view: StoreView, looked: _Looked | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each topic that has settings or queues, and what could not be read, in words.

    The settings are None for a topic that has queues and no settings: a writer or a broker takes its defaults then.
    """
    faults: list[str] = []
    rows = []

    for row in _topics(view, (looked or _Looked(view, in_log=False)).places(faults)):
        config = view.files.topics.get(row["topic"])
        rows.append(
            {
                "topic": row["topic"],
                "writeQueueNums": None if config is None else config.write_queue_nums,
                "readQueueNums": None if config is None else config.read_queue_nums,
                "perm": None if config is None else config.perm,
                "order": None if config is None else config.order,
                "topicFilterType": None if config is None else config.topic_filter_type,
                "topicSysFlag": None if config is None else config.topic_sys_flag,
                "attributes": None if config is None else config.attributes,
                "queues": len(row["queues"]),
                "messages": row["messages"],
            }
        )

    return rows, faults


def offsets_of(view: StoreView, topics: Sequence[str], at_ms: int | None) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each queue of some topics (none: of all but the store's own), and what could not be read, in words.

    A topic that was created and got no message yet has its queues, from 0 to 0, if it is named. `offset` is that of the
    first message that was stored at `at_ms` or later, and `storeTimestamp` its store time.
    """
    one = len(topics) == 1  # one folder is read in place of all
    queue_ids_by_topic = {topics[0]: view.queue_ids(topics[0])} if one else view.topics()
    for topic in topics:
        if not queue_ids_by_topic.get(topic) and view.files.topics.get(topic) is None:
            raise UnknownTopicError(topic, {*view.topics(), *view.files.topics.names} - {BATCH_TOPIC})

    rows: list[dict[str, Any]] = []
    faults: list[str] = []

    for topic in dict.fromkeys(topics) or sorted(queue_ids_by_topic.keys() - {BATCH_TOPIC}):
        created = view.files.topics.get(topic)
        ids = queue_ids_by_topic.get(topic) or range(created.write_queue_nums if created is not None and topics else 0)
        for queue_id in ids:
            try:
                low, high = view.bounds(topic, queue_id)
                row = {
                    "topic": topic,
                    "queueId": queue_id,
                    "minOffset": low,
                    "maxOffset": high,
                    "messages": high - low,
                }

                if at_ms is not None:
                    offset = queue_offset_by_time(view, topic, queue_id, at_ms)
                    time_ms = _store_time(view, topic, queue_id, offset) if offset < high else None
                    row |= {"offset": offset, "storeTimestamp": time_ms}
            except CorruptionError as error:
                faults.append(str(error))
                continue
            rows.append(row)
    return rows, faults


def _store_time(view: StoreView, topic: str, queue_id: int, offset: int) -> int | None:
    """When the message at a queue offset below the queue's end was stored; None if its record is gone."""
    units = view.units(topic, queue_id, offset, offset + 1)
    head = view.files.commit_log.head(int(units["physical_offset"][0])) if len(units) else None
    return None if head is None else int(head["store_timestamp_ms"])


# ---- consumer groups


def groups_of(
    view: StoreView, only: str | None = None, ends: Mapping[tuple[str, int], tuple[int, int]] = MappingProxyType({})
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each queue of the topics that groups have read, or of one of them, and what could not be read, in
    words.

    If a queue has no committed offset, the group never read it, and all of its messages are lag. If the group had read
    further than the queue's end is now, because the queue was created again or the log was cut, `beyond` says by how
    many messages, and the lag counts from where the group goes on (`log/remembered.py`).
    """
    offsets = group_offsets(view)

    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    known = _Ends(view, ends)
    has_queues = view.topics().__contains__ if only is None or only.startswith(RETRY_PREFIX) else lambda _: False
    for group, topics in offsets.topics_read(has_queues).items():
        for topic in topics if only is None else [only] if only in topics else []:
            committed = offsets.get(topic, group)
            try:
                ends = known.of(topic, committed)
            except (ConfigError, CorruptionError, MessageIllegalError) as error:
                faults.append(str(error))
                continue

            for queue_id, (low, high) in ends.items():
                offset = committed.get(queue_id)
                rows.append(
                    {
                        "group": group,
                        "topic": topic,
                        "queueId": queue_id,
                        "committedOffset": offset,
                        "maxOffset": high,
                        "lag": high - (low if offset is None else corrected(offset, low, high)),
                        "beyond": max((offset or 0) - high, 0),
                    }
                )
    return rows, list(dict.fromkeys(faults))


def lag_of(
    view: StoreView, committed: Mapping[tuple[str, int], int], topics: Iterable[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """One row for each queue, and what is wrong with the store or with the reader's place, in words.

    `lag` counts messages. If the queue ends before the reader's place, it counts from where the reader goes on
    (`log/remembered.py`), and `beyond` says by how many messages the place is too far. `lagBytes` adds the sizes of the
    records that are still there. `oldestUnread` is the store time of the first of them.
    """
    view.refresh()
    rows, faults, remarks = _lag_of(_Ends(view), committed, topics)
    return rows, list(dict.fromkeys([*remarks, *faults]))


def group_lag_of(view: StoreView, group: str) -> tuple[list[dict[str, Any]], list[str]]:
    """How far a consumer group is behind, as `lag_of`; no row if the group has no offset in the store."""
    table = group_offsets(view)
    topics = table.topics_read(view.topics().__contains__).get(group, [])
    committed = {(topic, queue_id): offset for topic in topics for queue_id, offset in table.get(topic, group).items()}
    return lag_of(view, committed, topics)


class _Ends:
    """The queues of topics and what lies between their ends, each looked for once: many groups read the same topics.

    Parameters
    ----------
    view : StoreView
    ends : mapping of (str, int) to (int, int)
        The first message that is there and the end of queues, as far as they are known.
    """

    def __init__(self, view: StoreView, ends: Mapping[tuple[str, int], tuple[int, int]] = MappingProxyType({})) -> None:
        self.view = view
        self._queue_ids: dict[str, list[int]] = {}
        self._ends = dict(ends)
        self._waiting: dict[tuple[str, int, int], tuple[int, int | None]] = {}

    def queue_ids(self, topic: str) -> list[int]:
        """The ids of a topic's queues."""
        if topic not in self._queue_ids:
            self._queue_ids[topic] = list(self.view.queue_ids(topic))
        return self._queue_ids[topic]

    def of(self, topic: str, more: Iterable[int]) -> dict[int, tuple[int, int]]:
        """The ends of a topic's queues, and of more that a reader names. Of those that do not exist only one is looked
        for: whoever wrote the reader's places may have named a million.
        """
        queue_ids = self.queue_ids(topic)
        gone = sorted(set(more).difference(queue_ids))
        ends = dict.fromkeys(sorted([*queue_ids, *gone]), (0, 0))
        for queue_id in [*queue_ids, *gone[:1]]:
            if (topic, queue_id) not in self._ends:
                self._ends[topic, queue_id] = self.view.bounds(topic, queue_id)
            ends[queue_id] = self._ends[topic, queue_id]
        return ends

    def waiting(self, topic: str, queue_id: int, first: int, high: int) -> tuple[int, int | None]:
        """The bytes of the records from a message up to the end of its queue, and its store time."""
        if first >= high:
            return 0, None
        key = (topic, queue_id, first)
        if key not in self._waiting:
            size = sum(
                _records_size(self.view, topic, queue_id, start, min(high, start + _UNITS_READ))
                for start in range(first, high, _UNITS_READ)
            )
            self._waiting[key] = (size, _store_time(self.view, topic, queue_id, first))
        return self._waiting[key]


def _lag_of(
    known: _Ends, committed: Mapping[tuple[str, int], int], topics: Iterable[str]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """One row for each queue; what could not be read; and what is wrong with the reader's place, both in words."""
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    remarks: list[str] = []

    read: dict[str, set[int]] = {topic: set() for topic in topics}
    for topic, queue_id in committed:
        read.setdefault(topic, set()).add(queue_id)

    for topic in sorted(read):
        try:
            for queue_id, ends in known.of(topic, read[topic]).items():
                rows.append(_lag_row(known, (topic, queue_id), ends, committed.get((topic, queue_id)), remarks))
        except (ConfigError, CorruptionError, MessageIllegalError) as error:
            faults.append(str(error))
    return rows, faults, remarks


def _lag_row(
    known: _Ends, queue: tuple[str, int], ends: tuple[int, int], offset: int | None, remarks: list[str]
) -> dict[str, Any]:
    topic, queue_id = queue
    low, high = ends
    position = 0 if offset is None else offset
    place = corrected(position, low, high)
    first = max(place, low)

    if position > high:
        remarks.append(
            f"{topic}/{queue_id}: the reader is at {position}, but the queue ends at {high}: the topic was deleted, or "
            f"the store was rebuilt, cut or restored. The lag counts from {place}"
        )
    elif offset is not None and place < low:
        remarks.append(f"{topic}/{queue_id}: retention has deleted {low - place} messages that were not read")

    size, oldest_ms = known.waiting(topic, queue_id, first, high)
    return {
        "topic": topic,
        "queueId": queue_id,
        "committedOffset": offset,
        "minOffset": low,
        "maxOffset": high,
        "lag": high - (first if offset is None else place),
        "beyond": max(position - high, 0),
        "lagBytes": size,
        "oldestUnread": oldest_ms,
    }


def _records_size(view: StoreView, topic: str, queue_id: int, start: int, end: int) -> int:
    """The bytes of some records, from their units; a placeholder of a broker's has none."""
    sizes = view.units(topic, queue_id, start, end)["size"]
    return int(sizes[(sizes > 0) & (sizes != FILLER_UNIT_SIZE)].sum(dtype="int64"))


# ---- figures


def figures_of(view: StoreView, looked: _Looked | None = None) -> dict[str, Any]:
    """The numbers that a monitoring system asks for, all of them from the store's files. `faults` lists what could not
    be read, in words.

    No process has to have counted them, so they are right whichever process wrote, and however it ended.
    """
    faults: list[str] = []
    files, now_ms = view.files, view.files.disk.time_ns() // 1_000_000
    looked = looked or _Looked(view)
    queues = looked.places(faults)
    begin = files.commit_log.head(files.commit_log.min_offset) if len(files.commit_log.offsets) else None

    topics: dict[str, dict[str, Any]] = {}
    for (topic, _), (low, high, end) in queues.items():
        if topic != BATCH_TOPIC:
            row = topics.setdefault(topic, {"topic": topic, "messagesIn": 0, "messages": 0, "end": 0})
            row["messagesIn"] += high
            row["messages"] += high - low
            row["end"] = max(row["end"], end)  # behind its newest message: a topic that begins anew has another one

    own = {queue: place for queue, place in queues.items() if queue[0] != BATCH_TOPIC and place[1]}
    newest = max(own, key=lambda queue: own[queue][2], default=None)  # the last message in the log is this queue's
    ends = {queue: (low, high) for queue, (low, high, _) in queues.items()}
    log_end = max((end for _, _, end in queues.values()), default=files.commit_log.min_offset)

    journal = journal_of(files, view.max_offset(BATCH_TOPIC, 0))
    apps = [_app_figures(view, app_id, journal.entries(app_id)) for app_id in journal.app_ids()]

    return {
        "root": files.paths.root,
        "storeId": view.store_id,
        "brokerName": _broker_name(view, faults),
        "left": looked.standing["left"],
        "unproven": _unproven(view),
        "nowMs": now_ms,
        "newestMs": waiting.newest_ms(view, {} if newest is None else {newest: own[newest][1]}),
        "growth": waiting.growth(view, log_end, now_ms),
        "delayed": _readable(lambda: waiting.delayed(view, journal), faults),
        "openHalves": _readable(lambda: waiting.open_halves(view), faults),
        "storageSize": _disk_size(files.paths.commit_log),
        **_behind(view),
        "diskUsed": _disk_used(view),
        "diskFree": files.disk.free(files.paths.root),
        "reserveTimeMs": None if begin is None else max(0, now_ms - int(begin["store_timestamp_ms"])),
        "topics": list(topics.values()),
        "groups": _group_figures(view, ends, now_ms, faults),
        "batches": queues.get((BATCH_TOPIC, 0), (0, 0, 0))[1],
        "apps": apps,
        "staging": waiting.staged(files.paths.staging),
        "counters": _counters(view, faults),
        "faults": list(dict.fromkeys(faults)),
    }


def _app_figures(view: StoreView, app_id: str, entries: list[JournalEntry]) -> dict[str, Any]:
    batches = [entry for entry in entries if not entry.start]
    last = max(batches, key=lambda entry: entry.version, default=None)
    head = None if last is None else view.files.commit_log.head(last.physical_offset)
    return {
        "app": app_id,
        "lastVersion": None if last is None else last.version,
        "lastRows": None if last is None or last.row_count < 0 else last.row_count,
        "publishedMs": None if head is None else int(head["store_timestamp_ms"]),
    }


def _group_figures(
    view: StoreView, ends: Mapping[tuple[str, int], tuple[int, int]], now_ms: int, faults: list[str]
) -> list[dict[str, Any]]:
    """The lag of each group and topic: messages, bytes, and for how long the oldest message waits."""
    try:
        table = group_offsets(view)
    except (ConfigError, CorruptionError) as error:  # its broker keeps them elsewhere, or the table is damaged
        faults.append(str(error))
        return []
    figures, known = [], _Ends(view, ends)
    for group, topics in table.topics_read(view.topics().__contains__).items():
        for topic in topics:
            committed = table.get(topic, group)
            try:
                gone = sorted(committed.keys() - set(known.queue_ids(topic)))[1:]  # one tells if there can be the topic
            except (ConfigError, CorruptionError, MessageIllegalError):
                gone = []
            beyond = sum(max(committed.pop(queue_id), 0) for queue_id in gone)
            queues = {(topic, queue_id): offset for queue_id, offset in committed.items()}
            rows, wrong, _ = _lag_of(known, queues, [topic])  # a place that is gone is the group's fault
            faults += wrong
            oldest = min((row["oldestUnread"] for row in rows if row["oldestUnread"] is not None), default=None)
            figures.append(
                {
                    "group": group,
                    "topic": topic,
                    "lag": sum(row["lag"] for row in rows),
                    "lagBytes": sum(row["lagBytes"] for row in rows),
                    "beyond": sum(row["beyond"] for row in rows) + (0 if wrong else beyond),
                    "deleted": sum(_deleted(row) for row in rows),
                    "latencyMs": 0 if oldest is None else max(0, now_ms - oldest),
                }
            )
    return figures


def _deleted(row: dict[str, Any]) -> int:
    """How many messages of a queue retention has deleted before a reader read them."""
    if row["committedOffset"] is None:
        return 0
    low: int = row["minOffset"]
    return max(0, low - corrected(row["committedOffset"], low, row["maxOffset"]))


def _counters(view: StoreView, faults: list[str]) -> dict[str, int]:
    try:
        return read_counters(view.files.disk, view.files.paths.counters)
    except CorruptionError as error:
        faults.append(str(error))
        return {}


def _readable(look: Callable[[], dict[str, Any]], faults: list[str]) -> dict[str, Any] | None:
    """What a look finds; None, and a fault, if it cannot be read."""
    try:
        return look()
    except (ConfigError, CorruptionError, MessageIllegalError) as error:
        faults.append(str(error))
        return None


# ---- batches


def apps_of(view: StoreView) -> list[dict[str, Any]]:
    """One row for each app, for JSON: its query, the versions that the store knows, and the next version."""
    journal = journal_of(view.files, view.max_offset(BATCH_TOPIC, 0))
    rows = []
    for app_id in journal.app_ids():
        entries = journal.entries(app_id)
        batches = sorted((entry for entry in entries if not entry.start), key=lambda entry: entry.version)
        last = batches[-1] if batches else None
        query_ids = journal.query_ids(app_id)

        rows.append(
            {
                "app": app_id,
                "queryId": query_ids[-1] if query_ids else None,
                "firstVersion": batches[0].version if batches else None,
                "lastVersion": None if last is None else last.version,
                "lastRows": None if last is None else last.row_count,
                "lastTopics": None if last is None else list(last.topics),
                "nextVersion": max(entry.version for entry in entries) + 1,
                "replacedQueryIds": sorted(journal.replaced(app_id)),
            }
        )
    return rows


def rows_of(view: StoreView, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of `StoreReader.view`, and what could not be read, in words.

    Raises
    ------
    ConfigError
        There is no view of this name.
    """
    if name not in _VIEWS:
        raise ConfigError(f"view: found {name!r:.60}; allowed are {', '.join(_VIEWS)}", key="view", value=name)
    return _VIEWS[name](view)


def overall(path: str, config: StoreConfig | None = None) -> dict[str, tuple[list[dict[str, Any]], list[str]]]:
    """The rows of the views `figures`, `status`, `topics` and `queues` by name, from one look at the queues, which is
    what takes the time of each.
    """
    with _view(path, config) as view:
        looked = _Looked(view)
        return {
            "figures": _as_row(figures_of(view, looked)),
            "status": _as_row(status_of(view, looked)),
            "topics": topics_of(view, looked),
            "queues": _queue_rows(looked),
        }


def _queue_rows(looked: _Looked) -> tuple[list[dict[str, Any]], list[str]]:
    faults: list[str] = []
    rows = [
        {"topic": topic, "queueId": queue_id, "minOffset": low, "maxOffset": high, "messages": high - low}
        for (topic, queue_id), (low, high, _) in looked.places(faults).items()
        if topic != BATCH_TOPIC
    ]
    return rows, faults


def _as_row(found: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """One row, and what could not be read."""
    faults: list[str] = found.pop("faults")
    return [found], faults


def _segments_of(view: StoreView) -> list[dict[str, Any]]:
    log = view.files.commit_log
    log.load()

    rows = []
    for start in log.offsets:
        head = log.head(start)
        rows.append(
            {
                "file": log.path(start),
                "firstPhysicalOffset": start,
                "endPhysicalOffset": start + log.segment_size,
                "firstStoreTimestamp": None if head is None else int(head["store_timestamp_ms"]),
            }
        )
    return rows


def _batches_of(view: StoreView) -> list[dict[str, Any]]:
    journal = journal_of(view.files, view.max_offset(BATCH_TOPIC, 0))

    return [
        {
            "app": app_id,
            "version": entry.version,
            "versionSource": entry.version_source,
            "queryId": entry.query_id,
            "rows": None if entry.row_count < 0 else entry.row_count,
            "topics": list(entry.topics),
            "physicalOffset": entry.physical_offset,
            "endPhysicalOffset": entry.end,
        }
        for app_id in journal.app_ids()
        for entry in sorted(journal.entries(app_id), key=lambda entry: entry.version)
        if not entry.start
    ]


_VIEWS: dict[str, Callable[[StoreView], tuple[list[dict[str, Any]], list[str]]]] = {
    "topics": topics_of,
    "queues": lambda view: _queue_rows(_Looked(view, in_log=False)),
    "groups": groups_of,
    "segments": lambda view: (_segments_of(view), []),
    "batches": lambda view: (_batches_of(view), []),
    "apps": lambda view: (apps_of(view), []),
    "status": lambda view: _as_row(status_of(view)),
    "figures": lambda view: _as_row(figures_of(view)),
}
"""What `StoreReader.view` shows, by name."""
