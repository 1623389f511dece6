"""A store, the processes that use it, and the plain model beside it: what each action of the mode `model` does.

The disk and the clock are simulated (`WorldDisk`), so that a history is the same each time it is run, and thousands of
histories fit into a minute. Two processes use the store. They are objects with locks, descriptors and caches of their
own (`Actor`); a death ends one of them, and a power cut both.

An action is a name and a seed for its own choices. So an action does the same whatever was left out before it, as far
as the store allows it, and a failing history can be shrunk. Messages carry the number of the action in their bodies.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from crash import checker
from crash.judge import Verdict
from crash.memdisk import MemRecordingDisk, Node, as_content
from crash.plain_model import (
    BATCH_TOPIC,
    CLOSED,
    COMMITTED,
    HALF_TOPIC,
    KILLED,
    LIVES,
    OPEN,
    POWER_CUT,
    SCHEDULE_TOPIC,
    Effect,
    Found,
    Half,
    Model,
    Operation,
    Queue,
    Slot,
    Wait,
)
from crash.power_cut import Folder
from crash.simdisk import Killed
from crash.simdisk import Operation as DiskOperation
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchConflictError,
    BatchRequest,
    ConfigError,
    Consumer,
    HalfMessageEndedError,
    LostBatchesError,
    Message,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
    PutMessageResult,
    ReadOnlyStore,
    StoreConfig,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StorePoisonedError,
    StoreWentBackwardsError,
    UnknownTopicError,
    VersionRegressionError,
    deliver_delayed,
)
from messagestore import session as attached_store
from messagestore.batches.append import Chunks, append_batch
from messagestore.files import state
from messagestore.format import record_columns
from messagestore.format.config import settings
from messagestore.inspect.verify import verify
from messagestore.session import AttachedStore
from small import SMALL

NOW_MS = 1_795_170_401_381
HOUR_MS = 3_600_000
NEVER_MS = 3_600_000
"""The longest interval that a setting takes: the store's threads do nothing by themselves."""
SIZES = (
    SMALL.replace(mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=20 * 8, max_message_size=2048),
    SMALL.replace(mapped_file_size_commit_log=8192, max_hash_slot_num=16, max_index_num=40, max_message_size=4096),
    SMALL,
)
LEVELS = ("1s 5s", "1s 5s 10s", "20s", "3s 1m 2s", "1s 5s 10s 20s")
"""The delay levels of sessions. They change now and then, and each message keeps those of its put."""
TOPICS, QUEUES = ("alpha", "beta"), 2
STORED = {
    "flushDiskType": "flush_disk_type",
    "maxMessageSize": "max_message_size",
    "fileReservedTime": "file_reserved_time",
}
"""Settings that live with the store in some histories, and that some sessions do not give."""
APPS, GROUPS = ("app-1", "app-2"), ("readers", "billing")
FOLLOWER = "follower"
"""The group of the consumer that stays open."""
PRODUCERS = "payments"
RETRY_MAX = 2
_ROOM_TAKERS = ("pwrite", "open_new", "mkdir", "rename", "fallocate")
_MOST, _MOST_ROUNDS = 100_000, 100
_COLUMNS = ("queue_offset", "body", "physical_offset", "store_timestamp_ms")
_REFUSALS = (
    BatchConflictError,
    ConfigError,
    HalfMessageEndedError,
    LostBatchesError,
    MessageIllegalError,
    StoreLockedError,
    UnknownTopicError,
    VersionRegressionError,
)
"""Errors that say that something is not allowed: whatever the disk does, nothing was written."""
_TIMEOUT_S = 30.0


class WorldDisk(MemRecordingDisk):
    """A recorded disk in memory, with a clock, times of files, and room that ends.

    Parameters
    ----------
    root, content
    now_ms : int
        What its clock shows.
    modified : dict of str -> int
        Path -> when the file was last written to, in milliseconds.
    """

    def __init__(
        self, root: Path, content: Folder | None = None, now_ms: int = NOW_MS, modified: dict[str, int] | None = None
    ) -> None:
        super().__init__(root, content)
        self.now_ms = now_ms
        self.uptime_ms = 0
        self.full = False
        self.error: tuple[int, int] | None = None
        """At which operation an error is raised, and which."""
        self.faulty = False
        """Whether an error was raised since this was set to False."""
        self._names: dict[str, tuple[dict[str, int], int]] = {}
        """Folder -> the numbers of what was in it at the last look, and when that was noticed."""
        self.modified: dict[int, int] = {}
        for path, time_ms in (modified or {}).items():
            node = self.nodes.get(path)
            if node is not None:
                self.modified[node.number] = time_ms

    def time_ns(self) -> int:
        return self.now_ms * 1_000_000

    def uptime_ns(self) -> int:
        return self.uptime_ms * 1_000_000

    def modified_s(self, path: str | Path) -> float:
        text = os.path.normpath(path)  # readers ask for `folder/.`
        if text in self.children:
            return self._folder_changed_ms(text) / 1000
        node = self.nodes.get(text)
        return self.modified.get(node.number if node is not None else -1, self.now_ms) / 1000

    def _folder_changed_ms(self, folder: str) -> int:
        """When a name in a folder came, went, or became another file, as the look that noticed it says."""
        paths = [f"{folder}/{name}" for name in self.children[folder]]
        names = {path: self.folder_numbers.get(path) or getattr(self.nodes[path], "number", 0) for path in paths}
        before = self._names.get(folder)
        if before is None or before[0] != names:
            before = self._names[folder] = names, self.now_ms
        return before[1]

    def times(self) -> dict[str, int]:
        """Path -> when the file was last written to."""
        return {
            path: self.modified[node.number]
            for path, node in self.nodes.items()
            if isinstance(node, Node) and node.number in self.modified
        }

    def _open_new(self, path: str, size: int) -> Any:
        file = super()._open_new(path, size)
        self.modified[file.inode] = self.now_ms
        return file

    def _pwrite_all(self, file: Any, data: bytes, position: int) -> None:
        super()._pwrite_all(file, data, position)
        self.modified[file.inode] = self.now_ms

    def _attempt(self, operation: DiskOperation, *arguments: Any) -> Any:
        number = None
        if self.full and operation.name in _ROOM_TAKERS and _takes_room(self, operation):
            number = errno.ENOSPC
        elif self.error is not None and len(self.operations) >= self.error[0]:
            number, self.error = self.error[1], None
        if number is not None:
            self.faulty = True
            self.fail_at, self.error_number = len(self.operations), number
        return super()._attempt(operation, *arguments)


def _takes_room(disk: WorldDisk, operation: DiskOperation) -> bool:
    """Whether a full disk refuses an operation: blocks of a file that has them can be written again."""
    if operation.name == "rename":
        return False
    if operation.name != "pwrite":
        return True
    return "/commitlog/" in operation.path and random.Random(len(disk.operations)).random() < 0.5


# ---- messages


def body_of(action: int, number: int, size: int = 0) -> bytes:
    return b"m/%d/%d/" % (action, number) + b"." * size


def _number_of(body: bytes) -> int:
    _, action, number, *_ = body.split(b"/")
    return 7 * int(action) + int(number)


def keys_of(body: bytes) -> list[str]:
    """The keys of a message, of which one is its own."""
    return [f"k{_number_of(body) % 5}", body.split(b"/.")[0].decode().rstrip("/.")]


def tag_of(body: bytes) -> str | None:
    return (None, "red", "blue")[_number_of(body) % 3]


def message_of(queue: Queue, body: bytes, level: int = 0) -> Message:
    return Message(queue[0], body, queue_id=queue[1], keys=keys_of(body), tags=tag_of(body), delay_time_level=level)


def columns_of(rows: Sequence[tuple[Queue, bytes, int]]) -> MessageColumns:
    """Rows of a batch: queue, body, delay level."""
    return MessageColumns.from_arrow(
        pa.record_batch(
            {
                "body": pa.array([body for _, body, _ in rows], pa.binary()),
                "topic": pa.array([queue[0] for queue, _, _ in rows], pa.string()),
                "queue_id": pa.array([queue[1] for queue, _, _ in rows], pa.int32()),
                "keys": pa.array([keys_of(body) for _, body, _ in rows], pa.list_(pa.string())),
                "tags": pa.array([tag_of(body) for _, body, _ in rows], pa.string()),
                "delay_time_level": pa.array([level or None for _, _, level in rows], pa.int32()),
            }
        )
    )


# ---- processes


@dataclass(eq=False)
class Actor:
    """A process: its side of the store, its open session, and the settings of that."""

    number: int
    store: AttachedStore | None = None
    session: MessageStore | None = None
    config: StoreConfig = SMALL


@dataclass(frozen=True)
class Copy:
    """A copy of a closed store, and of the model at that time."""

    content: Folder
    modified: dict[str, int]
    model: Model
    rows: dict[tuple[str, int], list[tuple[Queue, bytes, int]]]
    half_ids: dict[bytes, str]
    stored: dict[str, str]
    unsure: set[tuple[str, Queue]]


class Died(Exception):
    """A process has died in an action, or is of no use any more."""


class World:
    """A store that is used and abused, and what must be in it.

    Parameters
    ----------
    root : Path
        Only lock files really exist there.
    chance : random.Random
        Chooses the settings that a store keeps for ever.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root = root
        self.path = os.path.realpath(root)
        self.disk = WorldDisk(root)
        self.model = Model()
        self.verdict = Verdict()
        self.log: list[str] = []
        """What was done, in words."""

        self.base = chance.choice(SIZES).replace(
            clean_interval="1h",
            attach_timeout="1h",
            lock_timeout="10ms",
            message_index_enable=chance.random() < 0.8,
            flush_interval_commit_log=NEVER_MS,
            flush_commit_log_thorough_interval=NEVER_MS,
            commit_interval_commit_log=NEVER_MS,
            commit_commit_log_thorough_interval=NEVER_MS,
            clean_resource_interval=0,
        )

        self.actors = [Actor(0), Actor(1)]
        self.true_ms = 0
        """The true time, which passes and never jumps."""
        self.jumps = 0
        """How often the clock jumped."""
        self.looked_ms = 0
        """When somebody first looked after the clock had jumped, or after those who knew of it had died: what was put
        before counts as put then."""
        self.unseen = False
        """Whether nobody has looked yet."""
        self.level = 0
        """Which of `LEVELS` the next sessions have."""

        self.ended = CLOSED
        self.cut = ""
        """The kind of power cut that follows the next kill; empty: none."""

        self.rows: dict[tuple[str, int], list[tuple[Queue, bytes, int]]] = {}
        self.half_ids: dict[bytes, str] = {}

        self.deliveries: list[tuple[int, int, tuple[int, ...]]] = []
        """When somebody delivered since the last comparison: the true time, the clock, the delays."""
        self.delivered_count: int | None = 0
        """How many messages were said to be delivered since then; None: it is not known."""
        self.ignored: set[str] = set()
        """What retention was told to ignore since the last comparison."""
        self.sealed: set[str] = set()
        """Topics that nobody may write to, for a moment."""
        self.deleting = ""
        """The topic whose deletion was asked for, and did not return."""
        self.missing: set[str] = set()
        """Topics that were deleted, and are made again when the store is opened next."""
        self.unsure: set[tuple[str, Queue]] = set()
        """Groups and queues whose progress may be on the disk in an older or a newer state."""
        self.stored: dict[str, str] = {}
        """The settings that live with the store."""
        self.storing: dict[str, str] | None = None
        """Those that may live with it, because a change did not return."""

        self.copies: list[Copy] = []
        self.reader: ReadOnlyStore | None = None
        self.follower: Consumer | None = None
        """A consumer that stays open, and commits nothing."""
        self.followed: dict[Queue, int] = {}
        """The number after the last message of each queue that it got."""
        self.remade = False
        """Whether a topic was deleted since it looked last."""
        self.last_store_ms = 0
        """The latest store time of any message."""
        self.boots = 1

    # ---- time

    @property
    def wall_ms(self) -> int:
        return self.disk.now_ms

    def pass_time(self, ms: int) -> None:
        self.true_ms += ms
        self.disk.now_ms += ms
        self.disk.uptime_ms = self.true_ms

    def jump(self, ms: int) -> None:
        """Set the clock without any time passing."""
        self.disk.now_ms += ms
        self.jumps += 1
        self.unseen = True

    def looked(self) -> None:
        """Note that a process has compared the store's clock with the machine's."""
        if self.unseen:
            self.looked_ms, self.unseen = self.true_ms, False

    # ---- processes

    @contextlib.contextmanager
    def acting(self, actor: Actor) -> Iterator[None]:
        """Let a process be the one that runs."""
        stores = attached_store._stores
        stores.pop(self.path, None)
        if actor.store is not None:
            stores[self.path] = actor.store
        try:
            yield
        finally:
            actor.store = stores.pop(self.path, None)

    def end(self, actor: Actor) -> None:
        """End a process as a kill does."""
        actor.session = None
        store, actor.store = actor.store, None
        if store is not None:
            store._drop()

    @property
    def holder(self) -> Actor | None:
        return next((actor for actor in self.actors if actor.session is not None), None)

    def session(self, chance: random.Random) -> MessageStore:
        """The open session; one is opened if there is none."""
        holder = self.holder
        if holder is None:
            return self.open(chance.choice(self.actors), self.settings(chance))
        assert holder.session is not None
        return holder.session

    @property
    def config(self) -> StoreConfig:
        holder = self.holder
        return self.base if holder is None else holder.config

    def settings(self, chance: random.Random) -> StoreConfig:
        """Settings that may change each time a store is opened."""
        flush = chance.choice([SYNC_FLUSH, SYNC_FLUSH, ASYNC_FLUSH])
        config = self.base.replace(
            flush_disk_type=flush,
            transient_store_pool_enable=flush == ASYNC_FLUSH and chance.random() < 0.3,
            transient_store_pool_size=2,
            enabled_append_prop_crc=chance.random() < 0.3,
            stamp_uniq_key=chance.random() < 0.3,
            stamp_cluster=chance.random() < 0.2,
            message_delay_level=self._levels(chance),
            clean_interval=chance.choice(["0s", "1h"]),
            flush_delay_offset_interval=chance.choice([1, NEVER_MS]),
            transaction_check_max=chance.choice([1, 2, 15]),
            transaction_time_out=chance.choice([0, 6000]),
            max_index_num=chance.choice([20, 40, 200]),
            mapped_file_size_commit_log=chance.choice([4096, 8192, 16384]),
            max_message_size=chance.choice([1024, 2048]),
            check_crc_on_recover=chance.random() < 0.7,
            file_reserved_time=chance.choice([-1, -1, 1]),
            proven_tail_size=chance.choice([0, 1 << 20]),
            put_in_flight_size=1 << 20,
        )
        left_out = {field for key, field in STORED.items() if key in self.stored and chance.random() < 0.5}
        if config.transient_store_pool_enable:
            left_out.discard("flush_disk_type")  # the pool needs ASYNC_FLUSH
        return config.replace(
            **{field: getattr(StoreConfig(), field) for field in left_out}, given=config.given - left_out
        )

    def effective(self, config: StoreConfig) -> StoreConfig:
        """The settings of a session: what it does not give is the store's."""
        stored = StoreConfig.from_mapping(dict(self.stored))
        fields = [field for key, field in STORED.items() if key in self.stored and not config.is_given(field)]
        return config.replace(**{field: getattr(stored, field) for field in fields})

    def _levels(self, chance: random.Random) -> str:
        """The delay levels that a writer has: those of the last one, or others."""
        if chance.random() < 0.2:
            self.level = chance.randrange(len(LEVELS))
        return LEVELS[self.level]

    def open(self, actor: Actor, config: StoreConfig) -> MessageStore:
        """Open a session, which recovers what the last process left, and compare."""
        self.note(f"process {actor.number} opens: {_differing(config, self.base)}")
        if all(each.store is None for each in self.actors):
            self.disk.faulty = False
        with self.trying("open"), self.acting(actor):
            actor.session = MessageStore.open(self.root, config, disk=self.disk)
        assert actor.session is not None
        self._settle_stored()
        actor.config = self.effective(config)
        self.compare(actor.session)
        with self.trying("alter topic"):
            for topic in sorted(self.sealed):
                if actor.session.topic_config(topic) is not None:
                    actor.session.alter_topic(topic, perm=6)
            for topic in sorted(self.missing):
                if actor.session.topic_config(topic) is None:
                    actor.session.create_topic(topic, QUEUES)
        self.sealed.clear()
        self.missing.clear()
        return actor.session

    def _settle_stored(self) -> None:
        """Find out whether settings are on the disk whose change did not return."""
        if self.storing is None:
            return
        data = self.disk.tree().get("spark/settings.json")
        found = json.loads(data)["settings"] if data is not None else {}
        if found not in (self.stored, self.storing):
            self.wrong(f"the store has the settings {found}, and had {self.stored} or {self.storing}")
        self.stored, self.storing = found, None

    @contextlib.contextmanager
    def consumer(self, group: str) -> Iterator[Consumer]:
        """A consumer in the process that has the session."""
        holder = self.holder
        assert holder is not None
        with self.trying("consume"), self.acting(holder):
            consumer = Consumer(self.root, group, TOPICS, disk=self.disk)
            try:
                yield consumer
            finally:
                with contextlib.suppress(Killed, StoreError, OSError):
                    consumer.close()

    def check_position(self, group: str, queue: Queue, position: int) -> None:
        """Compare where a new consumer begins in a queue with where its group is."""
        slots, read = self.model.queues.get(queue, []), self.model.read.get(group, {}).get(queue, 0)
        if slots and (group, queue) not in self.unsure and position != max(read, slots[0].found.number):
            self.wrong(f"{queue}: group {group} is at {read}, and its consumer begins at {position}: {slots[0].found}")

    def moving(self, group: str, offsets: Mapping[Queue, int]) -> contextlib.AbstractContextManager[None]:
        """Move a group while the block runs; if that fails, it is in doubt where the group is."""
        return _Moving(self, group, offsets)

    def close(self) -> None:
        """Close the open session cleanly, if there is one."""
        holder = self.holder
        if holder is None or holder.session is None:
            return
        self.note("close")
        session, holder.session = holder.session, None
        self.ended = KILLED
        with self.trying("close"), self.acting(holder):
            session.close()
        self.model.flush()
        self.ended = CLOSED

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Sort out what an action raises: `Died` if its process is of no use any more."""
        try:
            yield
        except Killed as error:
            raise Died(what) from error
        except (StoreError, OSError, MemoryError) as error:
            if self.disk.dead:
                raise Died(what) from error
            if isinstance(error, _REFUSALS) or not self.disk.faulty:
                raise
            self.note(f"  {what}: {type(error).__name__}: {error}")
            raise Died(what) from error

    def died(self) -> None:
        """Let the next process find what this one left."""
        self.unseen = True
        self.disk.error = None
        self.disk.full = False

        holder = self.holder
        with contextlib.suppress(Killed, StoreError):
            self.drop_readers()

        if self.cut and self.disk.dead:
            for actor in self.actors:
                self.end(actor)
            self.ended = POWER_CUT
            self._cut_power()
        else:
            for actor in self.actors:
                if holder is None or actor is holder or actor.store is None or self.disk.dead:
                    self.end(actor)
            self.disk.revive()
            if self.ended != POWER_CUT:
                self.ended = KILLED

        self.cut = ""

    def _cut_power(self) -> None:
        disk, mode = self.disk, self.cut
        seed = len(disk.operations)
        image = next(iter(disk.images(disk.position, (mode,), limit=1, random_count=1, seed=seed)), None)
        image = image or disk.image(disk.position, "strict")
        self.note(f"the power is cut: {image.label}")
        self.replace_disk(image.folder, disk.times())
        self.boots += 1
        state._boot_hash = self.boots

    def replace_disk(self, content: Folder, modified: dict[str, int]) -> None:
        self.disk = WorldDisk(self.root, content, self.disk.now_ms, modified)
        self.disk.uptime_ms = self.true_ms

    def note(self, text: str) -> None:
        self.log.append(text)

    def wrong(self, text: str) -> None:
        self.verdict.misread.append(text)

    def take(self, verdict: Verdict) -> None:
        for kind, found in vars(verdict).items():
            getattr(self.verdict, kind).extend(found)

    # ---- what is there

    def compare(self, session: MessageStore, *, lives: bool = False) -> None:
        """Compare everything that is in the store with the model; with `lives`, after a flush."""
        model, ended = self.model, LIVES if lives else self.ended
        with self.trying("compare"):
            if lives:
                session.flush()
                model.flush()
            else:
                found = checker.check(self.disk.tree())
            open_halves = session.open_halves()
            if not lives:
                tree_contents = _in_log(found)
            contents = _read(session)
            tree = self.disk.tree()

        self._settle_deletion(contents, tree)
        if not lives:
            self._take_faults(found, ended)
        log_begin = min((int(path[10:]) for path in tree if path.startswith("commitlog/0")), default=0)
        if log_begin != model.begin:
            self.take(model.deleted_below(log_begin, self.ignored))

        if not lives:
            for queue in sorted({*contents, *tree_contents}):
                one = contents.get(queue, [])
                other = [each for each in tree_contents.get(queue, []) if each.place not in model.gone]
                if one != other and queue[0] != BATCH_TOPIC:
                    self.wrong(f"{queue}: the log holds {len(other)} messages, the store shows {len(one)}")

        by_place = {found.place: found.body for found in contents.get((HALF_TOPIC, 0), ())}
        self.take(model.compare(contents, ended, [by_place.get(half.physical_offset, b"?") for half in open_halves]))

        times = (found.store_ms for queue in contents.values() for found in queue)
        self.last_store_ms = max([self.last_store_ms, *times])

        self._check_deliveries()
        self._check_ends(session)
        self._check_apps(session)

        self.ended = LIVES
        self.ignored.clear()
        self.deliveries.clear()
        self.delivered_count = 0

    def _settle_deletion(self, contents: Mapping[Queue, Sequence[Found]], tree: Mapping[str, bytes]) -> None:
        """Find out what became of a deletion that did not return: the topic is there as a whole, or is gone."""
        topic, self.deleting = self.deleting, ""
        if not topic or any(found for queue, found in contents.items() if queue[0] == topic):
            return
        self.note(f"{topic} is gone")
        forgotten = f'"{topic}@'.encode() not in tree.get("config/consumerOffset.json", b"")
        had = {queue: self.model.following.get(queue, {0}) for queue, slots in self.model.queues.items() if not slots}
        self.model.delete(topic, forgotten=forgotten)
        for queue, numbers in had.items():
            if queue[0] == topic:
                self.model.following[queue] = {0, *numbers}  # a queue without messages does not show whether it is new
        self.missing.add(topic)

    def _take_faults(self, found: checker.Checked, when: str) -> None:
        """Take what the checker found, but not the segments that a killed process made ahead.

        A process that was attached all the time goes on without a recovery, which would remove them. Nor does the
        checker know of topics that were deleted: it misses their queues, and does not expect that numbers begin again.
        """
        ignored = ["spark/new-segment-", *(f"consumequeue/{topic}/" for topic in self.model.deleted)]
        faults = [fault for fault in found.faults if not fault.path.startswith(tuple(ignored))]
        for topic in self.model.deleted:
            faults = [fault for fault in faults if f"('{topic}', " not in fault.expected]
        self.verdict.misread += [f"checker, {when}: {fault}" for fault in faults[:3]]

    def _check_ends(self, session: MessageStore) -> None:
        model = self.model
        for queue, slots in model.queues.items():
            low, high = session.min_offset(*queue), session.max_offset(*queue)
            if slots and (low, high) != (slots[0].found.number, slots[-1].found.number + 1):
                self.wrong(f"{queue}: {low} to {high}, and holds {slots[0].found} to {slots[-1].found}")
            if not slots and (low != high or high not in model.following.get(queue, {0})):
                self.wrong(f"{queue}: {low} to {high}, without a message; it goes on at {model.following.get(queue)}")

    def _check_apps(self, session: MessageStore) -> None:
        for app in APPS:
            last, known = session.last_batch(app), self.model.batches.get(app, {})
            version = -1 if last is None else last.version
            if version != max(known, default=-1):
                wrong = self.verdict.lost if version < max(known, default=-1) else self.verdict.misread
                wrong.append(f"{app}: the last version is {version}; known are {sorted(known)}")

    def _check_deliveries(self) -> None:
        delivered = self.model.arrived
        if self.delivered_count is not None and len(delivered) != self.delivered_count:
            self.wrong(f"{self.delivered_count} messages were said to be delivered, and {len(delivered)} were")
        for slot in delivered:
            assert slot.wait is not None
            if not any(self._may_come(slot, *delivery) for delivery in self.deliveries):
                self.wrong(f"delayed message {slot.found.body[:24]!r} came early: {slot.wait}, {self.deliveries}")

    def _may_come(self, slot: Slot, true_ms: int, wall_ms: int, delays_ms: tuple[int, ...]) -> bool:
        """Whether a message was due; as in RocketMQ, also if it is due further away than its level's delay."""
        wait = slot.wait
        assert wait is not None
        if wait.jumps == self.jumps:
            return true_ms - wait.put_ms >= wait.delay_ms
        due_ms = slot.found.store_ms + wait.delay_ms
        return (
            true_ms - wait.put_ms >= wait.delay_ms
            or due_ms
            <= max(wall_ms, self.last_store_ms)  # the store's clock stands still after the machine's went back
            or due_ms > wall_ms + min(delays_ms)
        )

    def rounds(self, deliver: Callable[[], int]) -> int:
        """Deliver until nothing is left; returns how many messages were delivered."""
        total = 0
        for _ in range(_MOST_ROUNDS):
            count = deliver()
            self.looked()
            total += count
            if not count:
                return total
        self.verdict.duplicated.append(f"{total} messages were delivered, and no end is in sight")
        return total

    def check_late(self) -> None:
        """Check that nothing waits that is due, after everything was delivered."""
        late: dict[int, bool] = {}
        for level, slot, wait in self.model.waiting():
            if late.get(level) is False:
                continue
            put_ms = max(wait.put_ms, self.looked_ms) if self.jumps else wait.put_ms
            is_late = self.true_ms - put_ms >= wait.delay_ms
            late[level] = is_late
            if is_late:
                self.verdict.lost.append(
                    f"delayed message {slot.found.body[:24]!r} of level {level}, number {slot.found.number}, is due "
                    f"and was not delivered"
                )

    # ---- appends

    def append(self, operation: Operation, call: Callable[[], Any], *, flush: str | None = None) -> Any:
        """Let a process append something; returns what it returned, or None if it was refused or is in doubt."""
        model = self.model
        if operation not in model.pending:  # otherwise it is in flight
            model.begins(operation)
        try:
            result = call()
        except (Killed, StorePoisonedError) as error:
            if not self.disk.dead and not self.disk.faulty:
                self.wrong(f"{operation.what}: {error}")
            raise Died(operation.what) from error
        except StoreFullError as error:
            if self.disk.dead:
                raise Died(operation.what) from error
            self.note(f"  {operation.what}: {error}")
            if not self.disk.faulty:
                self.wrong(f"{operation.what}: {error}")
            model.refused(operation)
            return None
        except (OSError, MemoryError) as error:
            if self.disk.dead:
                raise Died(operation.what) from error
            self.note(f"  {operation.what}: {error}")
            if not self.disk.faulty:
                self.wrong(f"{operation.what}: {error}")
            return None
        except StoreError as error:
            if self.disk.dead:
                raise Died(operation.what) from error
            if isinstance(error, _REFUSALS):
                model.refused(operation)
                raise
            if not self.disk.faulty:
                raise
            self.note(f"  {operation.what}: {error}")
            return None
        self.looked()
        committed = not isinstance(result, PutMessageResult) or result.committed
        durable = (flush or self.config.flush_disk_type) == SYNC_FLUSH
        model.returned(operation, durable=durable, committed=committed)
        return result

    def next_version(self, app: str) -> int | None:
        """The next version of an app; None if it is in doubt which that is."""
        pending = [each for each in self.model.pending if each.batch is not None and each.batch[0] == app]
        if not all(operation.done for operation in pending):
            return None
        known = [*self.model.batches.get(app, {}), *(each.batch[1] for each in pending if each.batch is not None)]
        return max(known, default=-1) + 1

    def effect(self, queue: Queue, body: bytes, level: int = 0) -> Effect:
        """What a message leaves: itself, or the delayed message."""
        if not level:
            return Effect(queue, body)
        delays_ms = self.config.delays_ms
        level = min(level, len(delays_ms))
        wait = Wait(queue, delays_ms[level - 1], self.true_ms, self.jumps)
        return Effect((SCHEDULE_TOPIC, level - 1), body, wait)

    def check_number(self, queue: Queue, numbers: set[int], result: PutMessageResult | None) -> None:
        if result is not None and numbers and result.queue_offset not in numbers:
            self.wrong(f"{queue}: a put got number {result.queue_offset}, and the next one is {sorted(numbers)}")

    def end_half(self, store: MessageStore, body: bytes, wish: str) -> None:
        """Commit or roll back a half message, which may have ended already."""
        half = self.model.halves[body]
        pending = [
            operation for operation in self.model.pending if operation.half is not None and operation.half[0] == body
        ]
        if any(not operation.done for operation in pending):
            return  # nobody knows how it has ended
        known = pending[-1].half[1] if pending and pending[-1].half is not None else half.state
        effects = (Effect(half.target, body),) if wish == COMMITTED and known == OPEN else ()
        operation = Operation(f"{wish} {body!r}", effects, half=(body, wish) if known == OPEN else None)

        def call() -> Any:
            found = store.find_half(self.half_ids[body])
            return found.commit() if wish == COMMITTED else found.rollback()

        try:
            self.append(operation, call)
        except HalfMessageEndedError as error:
            self.note(f"{wish} {body!r}: {error}")
            if known in (OPEN, wish) and not self._is_unknown(half):
                self.wrong(f"{wish} {body!r}, which is {known}: {error}")
            return
        self.note(f"{wish} {body!r}, which was {known}")
        if known not in (OPEN, wish, "deleted") and not self._is_unknown(half):
            self.wrong(f"{wish} {body!r}, which was {known} before")

    def _is_unknown(self, half: Half) -> bool:
        """Whether the store may not know how a half message has ended: retention may have deleted it, or a broker its
        topic, where a message that was committed is looked for.
        """
        return self.model.begin > 0 or half.target[0] in self.model.deleted

    @property
    def clock_never_jumped(self) -> bool:
        return not any("clock jumps" in line or "restored" in line for line in self.log)

    def drop_readers(self) -> None:
        """End what stays open beside the session: the store is about to be another one."""
        (reader, follower), self.reader = (self.reader, self.follower), None
        self.follower, self.followed, self.remade = None, {}, False
        try:
            if reader is not None:
                reader.close()
        finally:
            if follower is not None:
                follower.close()

    def follow(self) -> dict[Queue, list[tuple[int, bytes]]] | None:
        """The numbers and bodies that the consumer which stays open gets now; None if a queue was made again.

        It looks each time: it waits for nothing that it has, and goes on until there is nothing.
        """
        holder, got = self.holder, dict[Queue, list[tuple[int, bytes]]]()
        assert holder is not None
        with self.trying("follow"), self.acting(holder):
            if self.follower is None:
                self.follower = Consumer(self.root, FOLLOWER, TOPICS, disk=self.disk)
            try:
                while messages := self.follower.poll():
                    for queue, some in messages.items():
                        got.setdefault(queue, []).extend((each.queue_offset, each.body) for each in some)
            except StoreWentBackwardsError:
                if not self.remade:
                    raise
                self.follower.close()
                self.follower, self.followed, self.remade = None, {}, False
                return None
        self.followed.update({queue: some[-1][0] + 1 for queue, some in got.items()})
        self.remade = False
        return got

    def delete_topic(self, topic: str) -> None:
        """Let a broker open the closed store, delete a topic, and close it again."""
        for actor in self.actors:
            if actor.store is not None:  # it took turns, and keeps brokers out
                with self.trying("detach"):
                    actor.store.detach()
            self.end(actor)
        self.drop_readers()
        tree, times = self.disk.tree(), self.disk.times()
        table = json.loads(tree["config/topics.json"])
        table["topicConfigTable"].pop(topic, None)
        if f"consumequeue/{topic}/" in tree:
            self.disk.remove_tree(f"consumequeue/{topic}")
        content = self.disk.content()
        config = content["config"]
        assert isinstance(config, dict)
        config["topics.json"] = as_content(json.dumps(table).encode())
        content["checkpoint"] = as_content(tree["checkpoint"][:24].ljust(4096, b"\0"))
        self.replace_disk(content, times)
        self.model.delete(topic)

    def restore(self, old: Copy) -> None:
        """Put a copy in the place of the store."""
        self.drop_readers()
        self.replace_disk(old.content, old.modified)
        self.model = copy.deepcopy(old.model)
        self.rows, self.half_ids = dict(old.rows), dict(old.half_ids)
        self.stored, self.storing, self.unsure = dict(old.stored), None, set(old.unsure)
        self.deleting = ""
        self.ended = CLOSED
        self.jumps += 1
        self.unseen = True
        self.deliveries.clear()
        self.ignored.clear()
        self.delivered_count = 0

    def turn(self, actor: Actor, config: StoreConfig, at: int, chance: random.Random) -> None:
        """Let a process that has no session append a batch, or deliver, and stay attached."""
        if chance.random() < 0.4:
            self.note(f"process {actor.number} delivers in its turn")
            self.deliveries.append((self.true_ms, self.wall_ms, config.delays_ms))
            before, self.delivered_count = self.delivered_count, None
            self.ended = KILLED
            with self.trying("deliver"), self.acting(actor):
                count = self.rounds(lambda: deliver_delayed(self.root, config, disk=self.disk).count)
            if before is not None:
                self.delivered_count = before + count
            self.ended = CLOSED
            if count:
                self.model.flush()
            return
        app = chance.choice(APPS)
        version = self.next_version(app)
        if version is None:
            return
        rows = [
            ((chance.choice(TOPICS), chance.randrange(QUEUES)), body_of(at, n), 0) for n in range(chance.randint(1, 6))
        ]
        self.rows[app, version] = rows
        operation = Operation(
            f"batch {app} {version} ({at}, process {actor.number})",
            tuple(Effect(queue, body) for queue, body, _ in rows),
            batch=(app, version),
        )
        self.note(operation.what)
        request = BatchRequest(app_id=app, version=version, version_source="spark", flush_disk_type=SYNC_FLUSH)

        def call() -> Any:
            with self.acting(actor):
                store = attached_store.attached_store(self.root, config, self.disk)
                with store.writing("a turn") as writer:
                    host = writer.files.store_host
                    chunk = record_columns.encode(
                        columns_of(rows), limits=writer.files.config, store_host=host, born_host=host
                    )
                    return append_batch(writer, Chunks([chunk]), request)

        self.ended = KILLED
        self.append(operation, call, flush=SYNC_FLUSH)
        self.ended = CLOSED

    # ---- reading

    def check_reads(self, store: ReadOnlyStore, chance: random.Random) -> None:
        """Compare what a store shows with the model: by number, by Arrow batch, by key, by time, by place."""
        model = self.model
        contents = {queue: slots for queue, slots in model.queues.items() if slots}
        for queue, slots in sorted(contents.items()):
            first = slots[0].found.number
            bodies = [
                body for part in store.read(*queue, first, columns=("body",)) for body in part["body"].to_pylist()
            ]
            if bodies != [slot.found.body for slot in slots]:
                self.wrong(f"{queue}: `read` shows {len(bodies)} messages, there are {len(slots)}")
        if not contents:
            return

        queue, slots = chance.choice(sorted(contents.items()))
        slot = chance.choice(slots)
        message = store.get_message(*queue, slot.found.number, 1).messages[0]

        placed = store.look_message_by_offset(slot.found.place)
        if placed is None or placed.body != message.body or message.body != slot.found.body:
            self.wrong(f"{queue}: {slot.found} is shown as {message} and {placed}")

        if queue[0] in TOPICS and (list(message.keys), message.tags) != (keys_of(message.body), tag_of(message.body)):
            self.wrong(f"{queue}: {slot.found} has keys {message.keys} and tags {message.tags}")
        if queue[0] in TOPICS:
            self._check_key(store, queue[0], chance.choice(keys_of(message.body)))

        self._check_time(store, queue, slots, slot.found.store_ms + chance.choice([-1, 0, 1]))

    def _check_key(self, store: ReadOnlyStore, topic: str, key: str) -> None:
        wanted = sorted(
            (slot.found.place, slot.found.body)
            for queue, slots in self.model.queues.items()
            if queue[0] == topic
            for slot in slots
            if key in keys_of(slot.found.body)
        )
        found = [
            (each.physical_offset, each.body)
            for each in store.query_message(topic, key, 1000)
            if each.physical_offset not in self.model.gone  # the index leads there, as in RocketMQ
        ]
        if found != wanted:
            self.wrong(f"{topic}: key {key} leads to {len(found)} messages, not {len(wanted)}: {found}, {wanted}")

    def _check_time(self, store: ReadOnlyStore, queue: Queue, slots: Sequence[Slot], time_ms: int) -> None:
        times = [slot.found.store_ms for slot in slots]
        wanted = next(
            (slot.found.number for slot in slots if slot.found.store_ms >= time_ms), slots[-1].found.number + 1
        )
        found = store.queue_offset_by_time(*queue, time_ms)
        monotone = times == sorted(times)
        if monotone and found != wanted:
            self.wrong(
                f"{queue}: the first message at {time_ms} or later is {wanted}; the search says {found}: {times}"
            )

    # ---- the end

    def finish(self) -> None:
        """Deliver and end everything, and compare for the last time, with `verify`."""
        self.disk.full, self.disk.error, self.disk.kill_at, self.cut = False, None, None, ""
        config = self.base.replace(max_message_size=2048)  # without levels: the store's count
        if self.holder is None:
            self.open(self.actors[0], config)
        holder = self.holder
        assert holder is not None and holder.session is not None
        store = holder.session
        self.compare(store, lives=True)
        self.pass_time(5 * HOUR_MS)
        self.deliveries.append((self.true_ms, self.wall_ms, holder.config.delays_ms))
        self.delivered_count = self.rounds(lambda: store.deliver_delayed().count)
        self.compare(store, lives=True)
        self.check_late()
        for half in store.open_halves():
            body = next((b for b, i in self.half_ids.items() if i == half.message_id), None)
            message = store.look_message_by_offset(half.physical_offset)
            body = body or (message.body if message is not None else b"")
            self.half_ids[body] = half.message_id
            self.end_half(store, body, COMMITTED)
        self.compare(store, lives=True)
        self.check_reads(store, random.Random(1))
        for app, versions in sorted(self.model.batches.items()):
            version = max(versions, default=None)
            if version is None or (app, version) not in self.rows:
                continue
            request = BatchRequest(app_id=app, version=version, version_source="spark")
            status = store.append_batch(columns_of(self.rows[app, version]), request).status
            if status != "known":
                self.verdict.duplicated.append(f"the last batch of {app}, {version}, was {status} again")
        self.close()
        for actor in self.actors:  # one that took turns is attached
            if actor.store is not None:
                actor.store.detach()
        tree = self.disk.tree()
        self._take_faults(checker.check(tree), "at the end")
        report = verify(self.root, config, disk=self.disk)
        self.verdict.misread += [f"verify: {each}" for each in report.findings[:3]]
        if "abort" in tree:
            self.wrong("abort is there after the close")


class _Moving:
    """The context manager of `World.moving`."""

    def __init__(self, world: World, group: str, offsets: Mapping[Queue, int]) -> None:
        self._read = world.model.read.setdefault(group, {})
        self._world, self._group, self._offsets = world, group, offsets

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for queue, offset in self._offsets.items():
            if error is None:
                self._read[queue] = offset
                self._world.unsure.discard((self._group, queue))
            else:
                self._read[queue] = min(self._read.get(queue, 0), offset)
                self._world.unsure.add((self._group, queue))


def _differing(config: StoreConfig, base: StoreConfig) -> str:
    names = [each.name for each in settings() if getattr(config, each.name) != getattr(base, each.name)]
    return ", ".join(f"{name}={getattr(config, name)}" for name in names) or "the usual settings"


def _in_log(found: checker.Checked) -> dict[Queue, list[Found]]:
    contents: dict[Queue, list[Found]] = {}
    for record in found.records:
        if record.topic != BATCH_TOPIC:
            each = Found(record.queue_offset, record.body, record.physical_offset, record.store_ms)
            contents.setdefault((record.topic, record.queue_id), []).append(each)
    return contents


def _read(store: ReadOnlyStore) -> dict[Queue, list[Found]]:
    """What a store shows, with its tags and keys checked."""
    contents: dict[Queue, list[Found]] = {}
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids if topic != BATCH_TOPIC else ():
            begin = store.min_offset(topic, queue_id)
            found = store.get_batch(topic, queue_id, begin, _MOST, _COLUMNS)
            contents[topic, queue_id] = (
                [] if found is None else [Found(*row) for row in zip(*found.to_pydict().values(), strict=True)]
            )
    return contents
