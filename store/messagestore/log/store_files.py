"""The files that make up a store, and its identity.

RocketMQ's folders hold only RocketMQ's files; our own are in `<root>/spark/`. `store.json` holds the store's id, the
settings that must never change (file sizes, index slots), and the delay levels, with which it is written again when
they change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from messagestore.errors import ConfigError, CorruptionError, NotAStoreError
from messagestore.files.batch_consume_queue import BATCH_QUEUE_FOLDER, BatchConsumeQueue, batch_queues
from messagestore.files.commit_log import CommitLog
from messagestore.files.consume_queue import ConsumeQueue, list_queues, queue_directory
from messagestore.files.disk import Disk, FilePool, remove_folder, replace_file
from messagestore.files.index_file import IndexService
from messagestore.files.state import StateFile
from messagestore.files.store_root import known_root
from messagestore.files.topics import Topics
from messagestore.format.config import StoreConfig, delays_of
from messagestore.format.delay_levels import MOST_ENTRIES, ROCKETMQS, DelayLevels
from messagestore.format.hosts import pack_host
from messagestore.format.message import BATCH_TOPIC
from messagestore.format.properties import PROPERTY_CRC
from messagestore.format.record import crc32, decode_message
from messagestore.log.sealed_ends import Key, SealedEnds
from messagestore.signal_handlers import pass_on

FORMAT_VERSION = 1
_HINT = (
    "Restore this file from a copy. Or move it away and run `messagestore recover`, which takes the id and the sizes "
    "from spark/journal or from the log."
)
_NEW = "new-"
DELETED_FOLDER = "deleted-topic-"
"""In `spark/`, behind `new-`: the queues of a topic that is being deleted."""
ABORT_WORD = "messagestore"
_MAX_PORT = 65535
_CACHED_QUEUES = 4096
CUT_DAYS = 30
CUT_SIZE = 1 << 30
"""How many days, and up to how many bytes in all, torn bytes are kept in `spark/cut`."""
_CUT_NAME = re.compile(r"\d{20}-(\d+)\.bin")
_log = logging.getLogger(__name__)
_MANY_FILES = 64  # from this number on, one syncfs is faster than syncing each file


class Paths:
    """The paths of all files below a root.

    `store_root` remembers the root and the mode of its new files from now on.
    """

    def __init__(self, root: str | os.PathLike[str], file_mode: int | None = None) -> None:
        self.root = os.path.abspath(os.fspath(root))
        known_root(self.root, file_mode)

        self.commit_log = os.path.join(self.root, "commitlog")
        self.consume_queue = os.path.join(self.root, "consumequeue")
        self.index = os.path.join(self.root, "index")
        self.config = os.path.join(self.root, "config")
        self.abort = os.path.join(self.root, "abort")
        self.checkpoint = os.path.join(self.root, "checkpoint")
        self.lock = os.path.join(self.root, "lock")

        self.spark = os.path.join(self.root, "spark")
        self.state = os.path.join(self.spark, "state")
        self.identity = os.path.join(self.spark, "store.json")
        self.journal = os.path.join(self.spark, "journal")
        self.ends = os.path.join(self.spark, "ends")
        self.writer_lock = os.path.join(self.spark, "writer.lock")
        self.serve_lock = os.path.join(self.spark, "serve")
        self.staging = os.path.join(self.spark, "staging")
        self.counters = os.path.join(self.spark, "counters")
        self.broker_name = os.path.join(self.spark, "broker.json")
        self.settings = os.path.join(self.spark, "settings.json")
        self.put_times = os.path.join(self.spark, "put-times.json")
        self.recoveries = os.path.join(self.spark, "recoveries.json")
        self.rebuild = os.path.join(self.spark, "rebuild")
        self.cut = os.path.join(self.spark, "cut")

    def temporary(self, name: str) -> str:
        """Return a fresh path in `spark/` at which a file is made before it gets its name."""
        return os.path.join(self.spark, _NEW + name)


@dataclass(frozen=True, slots=True)
class Identity:
    """`spark/store.json`: the store's id, the settings that are fixed in it, and its delay levels.

    Parameters
    ----------
    store_id : str
    mapped_file_size_commit_log, mapped_file_size_consume_queue, max_hash_slot_num, max_index_num : int
    message_index_enable : bool
    ancestors : tuple of str
        Ids of the stores of which this one is a copy; its log contains their BATCH records.
    delay_levels : DelayLevels
        Which delay levels count where in the log.
    """

    store_id: str
    mapped_file_size_commit_log: int
    mapped_file_size_consume_queue: int
    max_hash_slot_num: int
    max_index_num: int
    message_index_enable: bool
    ancestors: tuple[str, ...] = ()
    delay_levels: DelayLevels = ROCKETMQS

    @property
    def known_ids(self) -> frozenset[str]:
        """Ids of the stores whose batches belong to this store: its own id and those of its ancestors."""
        return frozenset((self.store_id, *self.ancestors))

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the file without its checksum."""
        return {
            "formatVersion": FORMAT_VERSION,
            "storeId": self.store_id,
            "ancestors": list(self.ancestors),
            "mappedFileSizeCommitLog": self.mapped_file_size_commit_log,
            "mappedFileSizeConsumeQueue": self.mapped_file_size_consume_queue,
            "maxHashSlotNum": self.max_hash_slot_num,
            "maxIndexNum": self.max_index_num,
            "messageIndexEnable": self.message_index_enable,
            "delayLevels": [[begin, levels] for begin, levels in self.delay_levels.entries],
        }

    def to_json(self) -> bytes:
        """Return the file's text. Its last field is the CRC-32 of all bytes before that field."""
        text = json.dumps(self.to_fields(), indent=2).removesuffix("\n}").encode()
        return text + f',\n  "crc": "{crc32(text):08x}"\n}}\n'.encode()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Identity:
        """Build it from the file's fields; raises `ValueError`, `KeyError` or `TypeError` if one is not valid."""
        ancestors = fields.get("ancestors", [])
        if not isinstance(ancestors, list) or not all(isinstance(ancestor, str) for ancestor in ancestors):
            raise ValueError("ancestors")

        levels = [(int(begin), str(levels)) for begin, levels in fields["delayLevels"]]
        begins = [begin for begin, _ in levels]
        ascending = bool(levels) and begins == sorted(set(begins)) and begins[0] >= 0
        if not ascending or not all(delays_of(ancestor) for _, ancestor in levels):
            raise ValueError("delayLevels")

        return cls(
            store_id=str(fields["storeId"]),
            mapped_file_size_commit_log=int(fields["mappedFileSizeCommitLog"]),
            mapped_file_size_consume_queue=int(fields["mappedFileSizeConsumeQueue"]),
            max_hash_slot_num=int(fields["maxHashSlotNum"]),
            max_index_num=int(fields["maxIndexNum"]),
            message_index_enable=bool(fields["messageIndexEnable"]),
            ancestors=tuple(ancestors),
            delay_levels=DelayLevels(tuple(levels)),
        )

    @classmethod
    def read(cls, disk: Disk, path: str) -> Identity | None:
        """Read it from the file; None if there is none.

        Raises
        ------
        CorruptionError
            The file is damaged; its sizes are needed.
        NotAStoreError
            Another release wrote the file.
        """
        try:
            text = disk.read(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            pass_on(error)
            return None
        return cls._parsed(text, path)

    @classmethod
    @lru_cache(16)
    def _parsed(cls, text: bytes, path: str) -> Identity:
        """Return what the file says; each task and commit asks for it several times."""
        try:
            fields = json.loads(text)
            version, identity = int(fields["formatVersion"]), cls.from_fields(fields)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            pass_on(error)
            raise CorruptionError(path, 0, "the JSON of a store's identity", repr(text[:60]), hint=_HINT) from error

        if version != FORMAT_VERSION:
            raise NotAStoreError.of_version(path, version, FORMAT_VERSION)
        if text != identity.to_json():
            damaged = "bytes that do not agree with their checksum"
            raise CorruptionError(path, 0, "a store's identity", damaged, hint=_HINT)
        return identity


FIXED = (
    "mapped_file_size_commit_log", "mapped_file_size_consume_queue", "max_hash_slot_num", "max_index_num",
    "message_index_enable",
)  # fmt: skip
"""The settings that an existing store has, whatever a configuration says."""


def with_fixed(config: StoreConfig, store: Identity | StoreConfig) -> StoreConfig:
    """Return a configuration with the values that are fixed in an existing store."""
    fixed = {name: getattr(store, name) for name in FIXED}
    if isinstance(store, StoreConfig) and store.enabled_append_prop_crc:
        fixed["enabled_append_prop_crc"] = True  # the store's records have it
    if all(getattr(config, name) == value for name, value in fixed.items()):
        return config
    return config.replace(**fixed)


def with_levels(config: StoreConfig, identity: Identity | None) -> StoreConfig:
    """Return a configuration with the delay levels that a store has now, unless somebody chose other ones."""
    if identity is None or config.is_given("message_delay_level"):
        return config
    levels = identity.delay_levels.last
    return config if config.message_delay_level == levels else config.replace(message_delay_level=levels)


def as_record(data: bytes | None, config: StoreConfig) -> StoreConfig:
    """Return a configuration that writes records as one of the store's own records was written.

    That record shows whether records end in `__CRC32#`: a broker with forceVerifyPropCRC=true would cut the log at the
    first record without it. (BATCH records always have it, so they show nothing.) It also shows the store's address,
    which counts unless the configuration names one: message ids then name the broker whose store this is.
    """
    if not data:
        return config
    try:
        message = decode_message(data, verify=False)
    except CorruptionError:
        return config
    changes: dict[str, Any] = {}
    if message.topic != BATCH_TOPIC and PROPERTY_CRC in message.system_properties:
        changes["enabled_append_prop_crc"] = True
    if not config.is_given("broker_ip1") and not config.is_given("listen_port"):
        with contextlib.suppress(CorruptionError):  # a damaged record names no address
            address, _, port = decode_message(data).store_host.rpartition(":")
            if 0 <= int(port) <= _MAX_PORT:  # without `__CRC32#`, no checksum covers the address
                changes |= {"broker_ip1": address.strip("[]"), "listen_port": int(port)}
    return config.replace(**changes) if changes else config


@contextlib.contextmanager
def opened_log(disk: Disk, paths: Paths) -> Iterator[CommitLog]:
    """Open the log of a store whose other files are not needed."""
    pool = FilePool(disk, 8)
    try:
        log = CommitLog(paths.commit_log, 0, pool, paths.spark)
        log.load()
        yield log
    finally:
        pool.clear()


def config_of_records(disk: Disk, paths: Paths, config: StoreConfig) -> StoreConfig:
    """Return `as_record` for a store that nobody has opened: by the last record below the clean end, else the first."""
    state = StateFile(disk, paths.state).read()
    if state is None:
        return config
    with opened_log(disk, paths) as log:
        if state.anchor_size:
            return as_record(log.read(state.anchor_position, state.anchor_size), config)
        if state.visible_end > log.min_offset:  # the clean end has not moved since the store was created
            return as_record(log.record_bytes(log.min_offset), config)
        return config


class StoreFiles:
    """The open files of one store. `message_store` makes it; writer, recovery and readers of one process share it.

    Parameters
    ----------
    paths : Paths
    config : StoreConfig
        Its sizes count only for a store without files, and its delay levels only for new messages, if somebody chose
        them. A store without an identity has no levels of its own: those of `config` count for all its records.
    identity : Identity | None
        None: this project never wrote the store (read-only views of a broker's store).
    disk : Disk
    """

    def __init__(self, paths: Paths, config: StoreConfig, identity: Identity | None, disk: Disk) -> None:
        self.paths = paths
        self.disk = disk
        self.identity: Identity | None = None
        self._asked = config
        if identity is not None:
            config = with_fixed(config, identity)
        self.config = config
        self.store_host = store_host_of(config)

        self.pool = FilePool(disk)
        self.log_pool = FilePool(disk, max(4, self.pool.limit // 4))
        segment_size = identity.mapped_file_size_commit_log if identity is not None else 0  # 0: taken from the files
        self.commit_log = CommitLog(
            paths.commit_log, segment_size, self.log_pool, paths.spark, preallocate=config.preallocate
        )
        self.know(identity)

        self.index: IndexService | None = None
        if config.message_index_enable:
            self.index = IndexService(
                paths.index,
                self.pool,
                paths.spark,
                slot_count=config.max_hash_slot_num,
                max_entry_count=config.max_index_num,
            )

        self.topics = Topics(disk, paths.root)
        self.state_file = StateFile(disk, paths.state)
        self._queues: OrderedDict[Key, ConsumeQueue] = OrderedDict()
        self._written: dict[Key, ConsumeQueue] = {}
        self._batch_queues: set[str] = set()

        self.ever_written: set[Key] = set()
        """Queues that got units since the journal last recorded them."""
        self.ends: SealedEnds | None = None
        """Where each queue ends in the dispatched log, as far as it is known; None: not read yet."""

        self.first_writer = False
        """True: this project has never written here, so there are no BATCH records to find."""
        self.searched_whole = True
        """False: the store shows no sign of this project, and its log was too long to be searched for BATCH records."""
        self.others_wrote = False
        """True: another process wrote queues and index above the clean end, and what it left unsynced is unknown."""
        self.others_named = False
        """True: another process may have made queues, and may have written a journal that contains them."""

    def know(self, identity: Identity | None) -> None:
        """Take over what `store.json` says now."""
        self.identity = identity
        self._set_levels()

    def ask(self, config: StoreConfig) -> None:
        """Give new messages the delay levels that a configuration asks for; if it asks for none, the store's."""
        self._asked = config
        self._set_levels()

    def _set_levels(self) -> None:
        """Set the levels of new messages, and those of the records of the log."""
        identity, levels = self.identity, with_levels(self._asked, self.identity).message_delay_level
        if self.config.message_delay_level != levels:
            self.config = self.config.replace(message_delay_level=levels)
        self.commit_log.delay_levels = DelayLevels(((0, levels),)) if identity is None else identity.delay_levels

    @property
    def asked_levels(self) -> str | None:
        """The delay levels that somebody chose for new messages; None: the store's own count."""
        return self._asked.message_delay_level if self._asked.is_given("message_delay_level") else None

    @property
    def other_levels(self) -> str | None:
        """What an operator has to know if the settings name other delay levels than the store's; None: nothing."""
        wanted, kept = self.asked_levels, self.commit_log.delay_levels.last
        if wanted is None or delays_of(wanted) == delays_of(kept):
            return None
        return (
            f"messageDelayLevel: the settings say {wanted!r}, and the store's delay levels are {kept!r}. What is in "
            "the store keeps its delays; a message that is put with these settings has theirs. A broker that takes the "
            "store over has the levels of its own file for all messages whose queues it makes again"
        )

    def keep_levels(self, delay_levels: DelayLevels) -> None:
        """Write other delay levels into `store.json`, and sync it, before a record has them.

        Raises
        ------
        StoreFullError
            The disk has no room; the levels are what they were.
        """
        if self.identity is None:
            raise AssertionError("a store without an identity is not written")
        if delay_levels != self.identity.delay_levels:
            identity = replace(self.identity, delay_levels=delay_levels)
            write_identity(self.disk, self.paths, identity)
            self.know(identity)

    def change_levels(self, end: int) -> bool:
        """Let `store.json` say that the delay levels of these settings count from `end` on; whether that is new.

        Raises
        ------
        ConfigError
            The levels have changed too often.
        StoreFullError
            The disk has no room; the levels are what they were.
        OSError
            The file cannot be written.
        """
        old, levels = self.commit_log.delay_levels, self.config.message_delay_level
        changed = old.changed(end, levels, self.commit_log.min_offset)
        if changed is old:
            return False

        if len(changed.entries) > MOST_ENTRIES:
            raise ConfigError(
                f"messageDelayLevel: found {levels!r}, and the store has {old.last!r}. Its delay levels have changed "
                f"{len(old.entries)} times in the log that it has now, and cannot change again: programs that put in "
                "turns give different ones. Give the same ones to all of them, or none, which means the store's. "
                "Retention of the oldest segments makes room for changes, too",
                key="messageDelayLevel",
                value=levels,
            )

        self.keep_levels(changed)
        if len(changed.entries) > 1:  # the first entry is what the store was made with, which is no change
            _log.warning(
                "%s: the store's delay levels were %r, and are %r from offset %d of the log on. What was put before "
                "keeps its delays. To leave the levels as they are, give no messageDelayLevel, or that one",
                self.paths.root,
                old.last,
                levels,
                end,
            )
        return True

    @property
    def store_id(self) -> str:
        """The store's id; empty for a store that this project never wrote."""
        return self.identity.store_id if self.identity else ""

    @property
    def known_ids(self) -> frozenset[str]:
        """Ids of the stores whose batches belong to this store; empty for a store that this project never wrote."""
        return self.identity.known_ids if self.identity else frozenset()

    def load(self, *, index: bool = True) -> None:
        """Examine the folders; the sizes of existing files take precedence over configured ones.

        Readers need the index only for keys.
        """
        self.commit_log.load()
        if not self.commit_log.segment_size:
            self.commit_log.file_size = self.config.mapped_file_size_commit_log
        if index and self.index is not None:
            self.index.load()
        self.topics.load()

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the ConsumeQueue of a topic and queue id, loaded; it may have no file yet."""
        key = (topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._written.get(key)  # the same object: it knows its files, and what is not synced
            if queue is None:
                queue = self._made_queue(topic, queue_id)
                queue.load()
                if not queue.file_size and topic not in self._batch_queues:
                    queue.assume_file_size(self._queue_file_size())
            self._queues[key] = queue
            while len(self._queues) > _CACHED_QUEUES:
                self._queues.popitem(last=False)
        else:
            self._queues.move_to_end(key)
        return queue

    def _made_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        if topic in self._batch_queues:
            folder = os.path.join(self.paths.root, BATCH_QUEUE_FOLDER, topic, str(queue_id))
            return BatchConsumeQueue(folder, 0, self.pool, self.paths.spark)
        size = self.identity.mapped_file_size_consume_queue if self.identity is not None else 0
        return ConsumeQueue(queue_directory(self.paths.root, topic, queue_id), size, self.pool, self.paths.spark)

    def find_batch_queues(self) -> dict[str, list[int]]:
        """Return topic -> queue ids of the batch queues, read from the folders. Only readers call this: a store with
        such queues cannot be written.
        """
        queues = batch_queues(self.disk, self.paths.root)
        for topic in queues.keys() - self._batch_queues:
            for key in [key for key in self._queues if key[0] == topic]:
                del self._queues[key]
        self._batch_queues |= queues.keys()
        return queues

    def has_batch_queues(self, topic: str) -> bool:
        """Whether a topic's queues are batch queues, as far as `find_batch_queues` has seen."""
        return topic in self._batch_queues

    def _queue_file_size(self) -> int:
        # Without store.json, the size is taken from any queue that has a file.
        if self.identity is None:
            for queue in self._queues.values():
                if queue.offsets:
                    return queue.file_size
        return self.config.mapped_file_size_consume_queue

    def forget_queues(self) -> None:
        """Forget what was cached about the queues, because another process wrote."""
        self._queues.clear()
        for queue in self._written.values():
            queue.load_after_others()

    def forget_queue_files(self, topic: str, queue_id: int, offset: int) -> None:
        """Forget the files of a queue that end at or below an offset in bytes, because retention deletes them."""
        for queues in (self._queues, self._written):
            queue = queues.get((topic, queue_id))
            if queue is not None:
                queue.forget_below(offset)

    def forget_written(self) -> None:
        """Forget all queues and their unsynced units, because another process has synced and perhaps deleted them."""
        self._queues.clear()
        self._written.clear()
        self.ever_written.clear()

    def drop_queue(self, topic: str, queue_id: int) -> None:
        """Forget a queue and its unsynced units, because its files are removed."""
        self._queues.pop((topic, queue_id), None)
        self._written.pop((topic, queue_id), None)

    def mark_written(self, topic: str, queue_id: int, queue: ConsumeQueue) -> None:
        """Remember that a queue has unsynced units."""
        self._written[(topic, queue_id)] = queue
        self.ever_written.add((topic, queue_id))

    def written_queues(self) -> list[tuple[str, int, ConsumeQueue]]:
        """Return the queues written since the last sync."""
        return [(topic, queue_id, queue) for (topic, queue_id), queue in self._written.items()]

    def queue_keys(self) -> list[Key]:
        """Return the topic and queue id of each queue, read from the folders."""
        return [(topic, queue_id) for topic, queue_ids in self.queue_names().items() for queue_id in queue_ids]

    def queue_names(self) -> dict[str, list[int]]:
        """Return topic -> queue ids, read from the folders."""
        return list_queues(self.disk, self.paths.root)[0]

    def sweep_temporary(self) -> None:
        """Remove files that a killed writer was making, and torn bytes that were saved long ago."""
        for name in self.disk.names(self.paths.spark):
            path = os.path.join(self.paths.spark, name)
            if name.startswith(_NEW + DELETED_FOLDER):
                remove_folder(self.disk, path)
            elif name.startswith(_NEW) and not self.disk.is_folder(path):  # a folder is not ours
                self.disk.unlink(path)
        self.sweep_cut()

    def sweep_cut(self) -> list[str]:
        """Delete torn bytes that were saved long ago, the oldest first.

        This deletes files older than `CUT_DAYS`, and whatever exceeds `CUT_SIZE` in total. The newest file always
        stays.

        Returns
        -------
        list of str
            Paths of the deleted files.
        """
        now_ms = self.disk.time_ns() // 1_000_000
        saved = []
        for name in self.disk.names(self.paths.cut):
            path, match = os.path.join(self.paths.cut, name), _CUT_NAME.fullmatch(name)
            if match is not None and not self.disk.is_folder(path):
                saved.append((int(match[1]), path, self.disk.size(path)))

        saved.sort(reverse=True)
        gone, size = [], 0
        for number, (saved_ms, path, bytes_there) in enumerate(saved):
            size += bytes_there
            if number and (size > CUT_SIZE or saved_ms < now_ms - CUT_DAYS * 86_400_000):
                gone.append(path)

        for path in gone:
            self.disk.unlink(path)
        if gone:
            _log.info("deleted %d files of torn bytes from earlier recoveries: %s", len(gone), ", ".join(gone))
        return gone

    def sync_derived(self) -> None:
        """Make ConsumeQueues, index and new names durable: file by file, or all at once if there are many."""
        dirty = sum(len(queue.written.files) + len(queue.written.folders) for queue in self._written.values())
        # What other processes left unsynced is unknown here, so the whole file system is synced.
        if dirty > _MANY_FILES or self.others_wrote:
            self.disk.syncfs(self.disk.open(self.paths.identity))
            for queue in self._written.values():
                queue.written.clear()

        for queue in self._written.values():
            queue.sync()
        if self.index is not None:
            self.index.sync()

        for folder in (self.paths.consume_queue, self.paths.root):
            if self.disk.is_folder(folder):
                self.disk.fsync_dir(folder)

        self._written.clear()
        self.others_wrote = False

    def read_abort(self) -> str | None:
        """Return the content of `abort`, or None if it is absent."""
        try:
            return self.disk.read_head(self.paths.abort, 200).decode("ascii", "replace").strip()
        except FileNotFoundError as error:
            pass_on(error)
            return None

    @property
    def abort_token(self) -> str:
        """The content of `abort` while this project writes."""
        return f"{ABORT_WORD} {self.store_id}"

    @property
    def abort_is_ours(self) -> bool:
        """Whether `abort` says that this project wrote last and has not closed the store."""
        return bool(self.store_id) and self.read_abort() == self.abort_token

    def configure(self, config: StoreConfig) -> None:
        """Write further records with these settings."""
        self.config = config
        self.store_host = store_host_of(config)

    def close(self) -> None:
        """Close all files."""
        self._queues.clear()
        self._written.clear()
        self.commit_log.close()
        self.pool.clear()
        self.log_pool.clear()
        self.state_file.close()


def store_host_of(config: StoreConfig) -> bytes:
    """Return STOREHOST of the records of a store: `brokerIP1` and `listenPort`, packed."""
    address = f"[{config.broker_ip1}]" if ":" in config.broker_ip1 else config.broker_ip1
    return pack_host(f"{address}:{config.listen_port}")


def looks_like_store(disk: Disk, paths: Paths) -> bool:
    """Whether the folder holds a store of RocketMQ's or ours."""
    return disk.is_folder(paths.commit_log) or disk.exists(paths.identity) or disk.exists(paths.journal)


def is_free(disk: Disk, paths: Paths) -> bool:
    """Whether a store may be made there: there is no folder, an empty one, or only what a killed creation left."""
    return set(disk.names(paths.root)) <= {"lock", "spark"} and set(disk.names(paths.spark)) <= {
        "writer.lock",
        "new-store.json",
        "staging",
    }


def check_root(disk: Disk, paths: Paths) -> None:
    """Refuse a root that holds something other than a store; nothing is created.

    Raises
    ------
    NotAStoreError
    """
    place = paths.root
    while not disk.exists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    if disk.exists(place) and not disk.is_folder(place):
        fault = "found a file" if place == paths.root else f"{place} is a file"
        raise NotAStoreError(f"{paths.root}: {fault}; allowed is a folder. Give another path", path=paths.root)
    if not looks_like_store(disk, paths) and not is_free(disk, paths):
        names = ", ".join(disk.names(paths.root)[:5])
        raise NotAStoreError(
            f"{paths.root}: found a folder with {names} in it; a new store needs a missing or empty folder",
            path=paths.root,
        )


def make_root(disk: Disk, paths: Paths) -> None:
    """Create the root before anything is locked in it.

    Raises
    ------
    NotAStoreError
        The folder holds something else, or cannot be, because a folder above it is a file.
    """
    check_root(disk, paths)
    disk.make_folders(paths.root)
    if not disk.exists(paths.identity):
        disk.sync_names_above(paths.root)


def make_staging(disk: Disk, paths: Paths) -> None:
    """Create the staging folder and the folders above it where there is no store yet. They do not make it a store.

    Raises
    ------
    NotAStoreError
        The folder holds something else.
    """
    make_root(disk, paths)
    make_own_folders(disk, paths)


def make_own_folders(disk: Disk, paths: Paths) -> None:
    """Create `spark/` and its contents, once no broker can be at work."""
    for path in (paths.spark, paths.staging):
        if not disk.is_folder(path):
            disk.mkdir(path)


def sizes_of_files(disk: Disk, paths: Paths, config: StoreConfig) -> StoreConfig:
    """Return the configuration with the sizes of the segments and queue files that exist."""
    with opened_log(disk, paths) as log:
        queue_size = config.mapped_file_size_consume_queue
        for topic, queue_ids in list_queues(disk, paths.root)[0].items():
            queue = ConsumeQueue(queue_directory(paths.root, topic, queue_ids[0]), 0, log.pool, paths.spark)
            queue.load()
            if queue.offsets:
                queue_size = queue.file_size
                break
        return config.replace(
            mapped_file_size_commit_log=log.segment_size or config.mapped_file_size_commit_log,
            mapped_file_size_consume_queue=queue_size,
        )


def new_identity(config: StoreConfig, store_id: str = "", ancestors: Iterable[str] = ()) -> Identity:
    """Return the identity of a store with these sizes; without an id, the store gets a new one."""
    own = store_id or uuid.uuid4().hex
    fixed = {name: getattr(config, name) for name in FIXED}
    levels = DelayLevels(((0, config.message_delay_level),))
    return Identity(store_id=own, **fixed, ancestors=tuple(sorted(set(ancestors) - {own})), delay_levels=levels)


def write_identity(disk: Disk, paths: Paths, identity: Identity) -> None:
    """Write `store.json` whole or not at all, and sync it."""
    replace_file(disk, paths.identity, identity.to_json(), via=paths.temporary("store.json"))
    disk.fsync_dir(paths.root)
