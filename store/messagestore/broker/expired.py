"""Which segments retention may delete, and why the others stay.

Segments go from the oldest on, and the first one that stays ends the search (RocketMQ's `deleteExpiredFileByTime`). A
segment stays in any case if it is being written, if it is not below the clean end, or if it holds the record before
the clean end, by which the next writer recognises the log. What is asked for decides about the rest (`Expiry`). A
segment also stays while a consumer group has not read all of it, or while a delayed message, a half message or a timer
message waits in it, unless the disk is so full that `at_once` is set.

Only a broker delivers timer messages. Its timer wheel holds no messages, but the physical offsets of their records in
`rmq_sys_wheel_timer`, and it delivers nothing for a record that is gone. RocketMQ's own retention does not look at
them; it relies on `fileReservedTime`, since a broker puts a message again that waits for longer than two days
(timerRollWindowSlot).

Source: RocketMQ `DefaultMessageStore.CleanCommitLogService`, `MappedFileQueue.deleteExpiredFileByTime`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import ConfigError, CorruptionError
from messagestore.files.consume_queue import ConsumeQueue, Units, queue_ids_of
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.state import State
from messagestore.files.timer_progress import TIMER_TOPIC, TimerProgress, read_timer_progress
from messagestore.files.topics import CLEANUP_POLICY, COMPACTION
from messagestore.format import arguments
from messagestore.format.config import DEFAULT_RESERVED_HOURS, StoreConfig
from messagestore.format.half_records import GROUP as HALF_GROUP
from messagestore.format.half_records import HALF_TOPIC, OP_TOPIC, QUEUE_ID
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import BATCH_TOPIC, LMQ_PREFIX
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.remembered import corrected
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Walk

_HOUR_S = 3600
_MOST_HOURS = 1_000_000
_HOURS_OF_TWO_DAYS = 48
DELIVERY = SCHEDULE_TOPIC
"""Stands for the delivery of delayed messages where consumer groups are named."""
ROCKSDB_HALF_TOPIC = "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC"
"""Half messages of a broker with transRocksDBEnable, whose database says which of them are open."""
_DUE_MS = re.compile(rb"TIMER_OUT_MS\x01([0-9]{1,18})\x02")
_UNIT_COUNT, _READ_SIZE = 4096, 8 << 20
"""The most timer messages, and the most bytes of them, that are looked at together."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Expiry:
    """What is asked for. A segment must meet all conditions that are given.

    Parameters
    ----------
    modified_ms : int | None
        The segment was last written to at this time at the latest.
    before_ms : int | None
        All of its messages were stored before this time.
    before_offset : int | None
        It ends at or below this physical offset.
    at_once : bool
        The disk is nearly full: neither the age of a segment nor consumer groups count.
    ignored_groups : frozenset of str
        Consumer groups that do not count.
    most : int | None
        At most this many segments.
    pending_progress : int | None
        The physical offset of the first BATCH record whose progress of consumer groups could not be written down. It
        stays, however full the disk is: the groups would go back, and pipes would append their results again.
    """

    modified_ms: int | None = None
    before_ms: int | None = None
    before_offset: int | None = None
    at_once: bool = False
    ignored_groups: frozenset[str] = frozenset()
    most: int | None = None
    pending_progress: int | None = None


class Needed(NamedTuple):
    """The first message that somebody needs. For a consumer group, it is the first message that the group has not read;
    for `DELIVERY`, the first delayed message that was not delivered; for RocketMQ's group of half messages, the first
    open one; for a topic of a broker's own, the first message that waits there.
    """

    physical_offset: int
    group: str
    topic: str
    queue_id: int
    queue_offset: int

    @property
    def words(self) -> str:
        """Who needs the message, for a sentence."""
        if self.topic == HALF_TOPIC and self.group == HALF_GROUP:
            return f"half message {self.queue_offset} of {self.topic} is neither committed nor rolled back"
        if self.group == TIMER_TOPIC:
            return f"timer message {self.queue_offset} of {self.topic} is not delivered yet, which only a broker does"
        if self.group == ROCKSDB_HALF_TOPIC:
            return (
                f"half message {self.queue_offset} of {self.topic} may be open, which only its broker's database says"
            )
        what = "the delivery of delayed messages" if self.group == DELIVERY else f"consumer group {self.group}"
        return f"{what} has not read {self.topic}/{self.queue_id} from message {self.queue_offset} on"


@dataclass(frozen=True, slots=True)
class ExpiredSegments:
    """What may be deleted.

    Parameters
    ----------
    offsets : tuple of int
        Where the segments begin that may be deleted, the oldest first.
    kept : str
        Why the next segment stays, in words; empty if the log has no segment.
    unread : tuple of Needed
        The consumer groups that lose messages that they have not read, because the disk forces it.
    """

    offsets: tuple[int, ...]
    kept: str
    unread: tuple[Needed, ...]


@dataclass(frozen=True, slots=True)
class ExpiredFiles:
    """What retention deleted or would delete, and why the rest stays.

    Parameters
    ----------
    segments : tuple of str
        The paths of the segments.
    size : int
        Their size in bytes; on the disk they may take less.
    message_count : int | None
        How many messages were in them; counted only beforehand. None: not counted.
    queue_file_count, index_file_count : int
        How many files of ConsumeQueues and of the index led only to these segments, and were deleted, too.
    min_offset : int
        The physical offset at which the log begins without them.
    kept : str
        Why the next segment stays.
    restated : tuple of (str, int)
        The app and version of batches that were written down again before the segment with their BATCH record went.
    unread_groups : tuple of str
        Consumer groups that have not read all of what is deleted, because the disk forces it.
    """

    segments: tuple[str, ...] = ()
    size: int = 0
    message_count: int | None = None
    queue_file_count: int = 0
    index_file_count: int = 0
    min_offset: int = 0
    kept: str = ""
    restated: tuple[tuple[str, int], ...] = ()
    unread_groups: tuple[str, ...] = ()


def refuse_compaction(files: StoreFiles) -> None:
    """Refuse retention in a store with topics that are compacted.

    Raises
    ------
    ConfigError
        There is such a topic; the error names it.
    """
    compacted = [name for name in files.topics.names if files.topics.is_compacted(name)]
    if not compacted:
        return
    names = ", ".join(compacted[:5]) + (f" and {len(compacted) - 5} more" if len(compacted) > 5 else "")
    raise ConfigError(
        f"{files.paths.root}: found {CLEANUP_POLICY}={COMPACTION} for {'topic' if len(compacted) == 1 else 'topics'} "
        f"{names}. Of such a topic the last message of each key must stay, and only a broker keeps these messages "
        f"elsewhere before it deletes segments. Nothing was deleted. Let the broker delete, or set the topic's "
        f"{CLEANUP_POLICY} to DELETE",
        key=CLEANUP_POLICY,
        value=COMPACTION,
    )


HalfProgress = Callable[[], tuple[int, int]]
"""Returns the queue offsets of the first half message and of the first op message that somebody has to look at."""
DeliveryProgress = Callable[[], Mapping[int, int]]
"""Returns the queue offset of the first delayed message, of each level, that was not delivered; without a level: 0."""


def expired_segments(
    files: StoreFiles, state: State | None, expiry: Expiry, half_progress: HalfProgress, delivered: DeliveryProgress
) -> ExpiredSegments:
    """Return which segments may be deleted, and why the next one stays.

    Parameters
    ----------
    files : StoreFiles
        Their log is loaded.
    state : State | None
        None: this project has never written the store.
    expiry : Expiry
    half_progress : callable
        It is called only if the store has half messages, and a segment might go.
    delivered : callable
        It is called only if the store has delayed messages, and a segment might go.

    Raises
    ------
    CorruptionError
        The offsets of the consumer groups, or the record at the end of a segment, cannot be read.
    """
    log = files.commit_log
    needs = _Needs(files, expiry, half_progress, delivered)
    offsets: list[int] = []
    kept = ""

    for start in log.offsets:
        kept = _why_kept(files, state, start) or _not_asked_for(files, start, expiry) or needs.why_kept(start)
        if not kept and expiry.most is not None and len(offsets) >= expiry.most:
            kept = f"only {expiry.most} are deleted at a time"
        if kept:
            break
        offsets.append(start)

    end = offsets[-1] + log.segment_size if offsets else log.min_offset
    return ExpiredSegments(tuple(offsets), kept, tuple(needs.below(end)))


class _Needs:
    """Who needs what is in the log: consumer groups, and messages that wait. They are looked up only when a segment
    might go, and the groups only once.
    """

    def __init__(
        self, files: StoreFiles, expiry: Expiry, half_progress: HalfProgress, delivered: DeliveryProgress
    ) -> None:
        self._files, self._expiry = files, expiry
        self._half_progress, self._delivered = half_progress, delivered
        self._groups: list[Needed] | None = None
        self._waiting: list[Needed] = []

    def why_kept(self, start: int) -> str:
        """Why the segment that begins at `start` stays; empty if nobody needs it, or if the disk is nearly full."""
        end = start + self._files.commit_log.segment_size
        if self._groups is None:
            self._groups = _needed_for(self._files, self._expiry, self._half_progress, self._delivered)
        if self._groups and self._groups[0].physical_offset < end and not self._expiry.at_once:
            return _needed_words(self._groups, end)

        if not self._waiting:
            self._waiting = _waiting_for(self._files, start, self._expiry)
            if self._waiting and not self._expiry.at_once:
                return self._waiting[0].words
        return ""

    def below(self, end: int) -> list[Needed]:
        """Those who need something below a physical offset, as far as they were looked up."""
        return [need for need in (*(self._groups or ()), *self._waiting) if need.physical_offset < end]


def _needed_for(
    files: StoreFiles, expiry: Expiry, half_progress: HalfProgress, delivered: DeliveryProgress
) -> list[Needed]:
    """What consumer groups need, in the order of the log. What is damaged does not stop what the disk forces."""
    try:
        return sorted(needed(files, half_progress, delivered, expiry.ignored_groups))
    except CorruptionError as error:
        if not expiry.at_once:
            raise
        _log.warning("%s: it is not known which consumer groups need what is deleted: %s", files.paths.root, error)
        return []


def asked_for(
    config: StoreConfig,
    now_ms: int,
    *,
    reserved_hours: float | None,
    before_ms: int | None,
    before_offset: int | None,
    ignored_groups: Collection[str],
    at_once: bool,
) -> Expiry:
    """Return what somebody asks for by hand; without any condition, what `fileReservedTime` says.

    Raises
    ------
    ConfigError
        A value is not allowed.
    """
    if reserved_hours is not None and (
        type(reserved_hours) not in (int, float) or not 0 <= reserved_hours < _MOST_HOURS
    ):
        raise arguments.refused("reserved_hours", reserved_hours, f"a number of hours from 0 to {_MOST_HOURS}")

    if before_ms is not None:
        before_ms = arguments.whole_number("before_ms", before_ms, 0)
    if before_offset is not None:
        before_offset = arguments.whole_number("before_offset", before_offset, 0)

    if isinstance(ignored_groups, str) or not isinstance(ignored_groups, Collection):
        raise arguments.refused("ignored_groups", ignored_groups, "a list of consumer groups")
    arguments.true_or_false("at_once", at_once)

    if reserved_hours is None and before_ms is None and before_offset is None:
        reserved_hours = config.file_reserved_time if config.retention_enabled else DEFAULT_RESERVED_HOURS

    return Expiry(
        modified_ms=None if reserved_hours is None else now_ms - int(reserved_hours * _HOUR_S * 1000),
        before_ms=before_ms,
        before_offset=before_offset,
        at_once=at_once,
        ignored_groups=frozenset(arguments.text("ignored_groups", group) for group in ignored_groups),
    )


def foreseen(
    files: StoreFiles, state: State | None, expiry: Expiry, half_progress: HalfProgress, delivered: DeliveryProgress
) -> ExpiredFiles:
    """Return what a run would delete. Nothing is changed.

    Raises
    ------
    ConfigError
        A topic is compacted.
    CorruptionError
        What must be read before anything is deleted is damaged.
    """
    refuse_compaction(files)
    log = files.commit_log
    expired = expired_segments(files, state, expiry, half_progress, delivered)
    end = expired.offsets[-1] + log.segment_size if expired.offsets else log.min_offset

    message_count = queue_file_count = 0
    for topic, queue_ids in files.queue_names().items():
        for queue_id in queue_ids:
            queue = files.queue(topic, queue_id)
            if end:
                queue_file_count += queue.count_below(end)
            if topic != BATCH_TOPIC and expired.offsets:
                message_count += queue.search_physical(end) - queue.search_physical(log.min_offset)

    return ExpiredFiles(
        segments=tuple(map(log.path, expired.offsets)),
        size=len(expired.offsets) * log.segment_size,
        message_count=message_count,
        queue_file_count=queue_file_count,
        min_offset=end,
        kept=expired.kept,
        unread_groups=tuple(need.group for need in expired.unread),
    )


def _why_kept(files: StoreFiles, state: State | None, start: int) -> str:
    """Why a segment can never be deleted now; empty if it can."""
    log = files.commit_log
    end = start + log.segment_size
    if start == log.offsets[-1]:
        return "it is the last one, to which the store writes"
    if state is None:
        if log.head(end) is None:  # a broker makes segments ahead
            return "no record begins after it, so it is the one that is written to"
        return ""
    if end > state.clean_end:
        return f"it is not below the clean end, {state.clean_end}: more than that is not certainly on the disk"
    if not state.anchor_size or end > state.anchor_position:
        return "it holds the record before the clean end, by which the next writer recognises the log"
    return ""


def _not_asked_for(files: StoreFiles, start: int, expiry: Expiry) -> str:
    """Why a segment is not among what is asked for; empty if it is."""
    log = files.commit_log
    end = start + log.segment_size
    if expiry.before_offset is not None and end > expiry.before_offset:
        return f"it ends at {end}, above {expiry.before_offset}"

    if expiry.pending_progress is not None and end > expiry.pending_progress:
        return (
            f"it ends at {end}, above {expiry.pending_progress}: a batch there moves consumer groups, and their table "
            f"cannot be written"
        )
    if expiry.at_once:
        return ""

    if expiry.modified_ms is not None:
        modified_ms = int(files.disk.modified_s(log.path(start)) * 1000)
        if modified_ms > expiry.modified_ms:
            return f"it was written to at {_time(modified_ms)}, after {_time(expiry.modified_ms)}"

    if expiry.before_ms is not None:
        last_ms = _last_time(files, start)
        if last_ms >= expiry.before_ms:
            return f"it holds messages that were stored at {_time(last_ms)}, not before {_time(expiry.before_ms)}"
    return ""


def _last_time(files: StoreFiles, start: int) -> int:
    """The latest store time in a segment. All heads are read: where a clock was set back, no later record says it."""
    last_ms, log = 0, files.commit_log
    for run in Walk(log, start, start + log.segment_size, Depth.FRAMING).whole():
        last_ms = max(last_ms, int(run.heads["store_timestamp_ms"].max()))
    return last_ms


def _needed_words(groups: list[Needed], end: int) -> str:
    waiting = [need for need in groups if need.physical_offset < end]
    first, more = waiting[0], len(waiting) - 1
    return first.words + (f", and {more} more group{'s' * (more > 1)} need{'s' * (more == 1)} it" if more else "")


def needed(
    files: StoreFiles, half_progress: HalfProgress, delivered: DeliveryProgress, ignored: frozenset[str] = frozenset()
) -> list[Needed]:
    """Return the oldest message in the log that each consumer group has not read; without groups that have read all.

    A delayed message that was not delivered counts like one that the group `DELIVERY` has not read. An open half
    message counts like one that RocketMQ's group of half messages has not read, whatever the table of offsets says: it
    is saved only now and then.

    A queue of a topic that the group reads, in which it has no offset, counts as not read at all, as in `lag`. So do
    the queues of its retry topic.

    Raises
    ------
    CorruptionError
        The table of offsets cannot be read.
    """
    table = ConsumerOffsets(files.disk, files.paths.root)
    table.load()

    needed = []
    topics_read = table.topics_read(lambda topic: bool(queue_ids_of(files.disk, files.paths.root, topic)))
    for group, topics in topics_read.items():
        if group in ignored or group == HALF_GROUP:
            continue
        places = [
            Needed(place, group, topic, queue_id, queue_offset)
            for topic in topics
            if not topic.startswith(LMQ_PREFIX)
            for queue_id, offset in _offsets(files, table, topic, group).items()
            for queue_offset, place in _first_unread(files, topic, queue_id, offset)
        ]
        if places:
            needed.append(min(places))

    queue_ids = queue_ids_of(files.disk, files.paths.root, SCHEDULE_TOPIC)
    progress = delivered() if queue_ids else {}
    waiting = [
        Needed(place, DELIVERY, SCHEDULE_TOPIC, queue_id, queue_offset)
        for queue_id in queue_ids
        for queue_offset, place in _first_unread(files, SCHEDULE_TOPIC, queue_id, progress.get(queue_id + 1, 0))
    ]
    if waiting and DELIVERY not in ignored:
        needed.append(min(waiting))

    halves = _needed_halves(files, half_progress)
    if halves and HALF_GROUP not in ignored:
        needed.append(min(halves))
    return needed


def _needed_halves(files: StoreFiles, half_progress: HalfProgress) -> list[Needed]:
    """The first open half message, and the first op message that is needed; empty if there are none."""
    if not queue_ids_of(files.disk, files.paths.root, HALF_TOPIC):
        return []
    return [
        Needed(place, HALF_GROUP, topic, QUEUE_ID, queue_offset)
        for topic, offset in zip((HALF_TOPIC, OP_TOPIC), half_progress(), strict=True)
        if queue_ids_of(files.disk, files.paths.root, topic)
        for queue_offset, place in _first_unread(files, topic, QUEUE_ID, offset)
    ]


def _waiting_for(files: StoreFiles, start: int, expiry: Expiry) -> list[Needed]:
    """What waits for a broker in a segment, in the order of the log. Damage does not stop what the disk forces."""
    try:
        return sorted(need for need in waiting_in(files, start) if need.group not in expiry.ignored_groups)
    except CorruptionError as error:
        if not expiry.at_once:
            raise
        _log.warning("%s: it is not known which timer messages wait in what is deleted: %s", files.paths.root, error)
        return []


def waiting_in(files: StoreFiles, start: int) -> list[Needed]:
    """Return the first message of a segment that waits for a broker, of each of the broker's own topics.

    Raises
    ------
    CorruptionError
        A timer message cannot be read.
    """
    needed = []
    for topic, first_of in ((TIMER_TOPIC, _first_timer), (ROCKSDB_HALF_TOPIC, _first_unit)):
        for queue_id in queue_ids_of(files.disk, files.paths.root, topic):
            queue = files.queue(topic, queue_id)
            begin, end = queue.search_physical(start), queue.search_physical(start + files.commit_log.segment_size)
            needed += [
                Needed(place, topic, topic, queue_id, number) for number, place in first_of(files, queue, begin, end)
            ]
    return needed


def _first_unit(files: StoreFiles, queue: ConsumeQueue, begin: int, end: int) -> list[tuple[int, int]]:  # noqa: ARG001 - as `_first_timer`
    """The number and the place of the first message of a part of a queue; empty if the part has none."""
    return [(begin, int(queue.read(begin, 1)["physical_offset"][0]))] if begin < end else []


def _first_timer(files: StoreFiles, queue: ConsumeQueue, begin: int, end: int) -> list[tuple[int, int]]:
    """The number and the place of the first timer message, in a part of its queue, that was not delivered."""
    progress = _timer_progress(files)
    while begin < end:
        units = queue.read(begin, min(_UNIT_COUNT, end - begin))
        units = units[: max(1, int(np.searchsorted(np.cumsum(units["size"]), _READ_SIZE)))]
        late = np.arange(begin, begin + len(units)) >= progress.queue_offset
        rows = np.flatnonzero(late | (_due_ms(files, units) >= progress.read_ms))
        if len(rows):
            return [(begin + int(rows[0]), int(units["physical_offset"][rows[0]]))]
        begin += len(units)
    return []


def _timer_progress(files: StoreFiles) -> TimerProgress:
    """How far the broker has come. Nobody but itself knows if it keeps its timers in RocksDB (5.5)."""
    if dict(files.config.broker_settings).get("timerRocksDBEnable", "").lower() == "true":
        return TimerProgress()
    return read_timer_progress(files.disk, files.paths.root)


def _due_ms(files: StoreFiles, units: Units) -> NDArray[np.int64]:
    """When timer messages are due: the largest TIMER_OUT_MS in the bytes of each record; -1 without."""
    data, begins = files.commit_log.gather(units["physical_offset"], units["size"])
    due_ms = np.full(len(units), -1, np.int64)
    hits: list[Any] = list(_DUE_MS.finditer(data.data))
    rows = np.searchsorted(begins, [hit.start() for hit in hits], side="right") - 1
    np.maximum.at(due_ms, rows, np.array([int(hit[1]) for hit in hits], np.int64))
    return due_ms


def _offsets(files: StoreFiles, table: ConsumerOffsets, topic: str, group: str) -> dict[int, int]:
    committed = table.get(topic, group)
    return {queue_id: committed.get(queue_id, 0) for queue_id in queue_ids_of(files.disk, files.paths.root, topic)}


def _first_unread(files: StoreFiles, topic: str, queue_id: int, offset: int) -> list[tuple[int, int]]:
    """The number and the place of the first message that is left and was not read; empty if there is none."""
    queue = files.queue(topic, queue_id)
    begin = queue.search_physical(files.commit_log.min_offset)
    end = queue.end(hint=offset)
    if offset > end:  # the numbers went back: a delayed message may still have to be delivered, and a group reads on
        offset = 0 if topic == SCHEDULE_TOPIC else corrected(offset, begin, end)
    first = max(offset, begin)
    units = queue.read(first, 1)
    if not len(units) or int(units["size"][0]) <= 0 or int(units["size"][0]) == FILLER_UNIT_SIZE:
        return []
    return [(first, int(units["physical_offset"][0]))]


# ---- when


def last_delete_time_ms(config: StoreConfig, now_ms: int) -> int:
    """Return until when a broker that was always running would have looked for expired segments.

    This is now during an hour of `deleteWhen`, and at other hours the end of the last such hour. A store that no
    process has open at that hour is thus cleaned when it is opened next.
    """
    now = time.localtime(now_ms // 1000)
    begin_s = now_ms // 1000 - 60 * now.tm_min - now.tm_sec
    for back in range(_HOURS_OF_TWO_DAYS):
        hour_s = begin_s - back * _HOUR_S
        if time.localtime(hour_s).tm_hour in config.delete_hours:
            return min(now_ms, (hour_s + _HOUR_S) * 1000)
    return 0  # a clock change removed the hour on both days


def _time(time_ms: int) -> str:
    if not 0 <= time_ms < 1 << 47:
        return f"{time_ms} ms since 1970"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ms // 1000))
