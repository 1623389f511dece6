"""Which files make up a store, and which store is it?

RocketMQ's folders hold RocketMQ's files and nothing else; ours are in `<root>/spark/`. `store.json` is made once: the
store's id and what must never change (file sizes, index slots).
"""

from __future__ import annotations

import json
import os
import uuid
from collections import OrderedDict
from dataclasses import dataclass

from messagestore.commit_log import CommitLog
from messagestore.config import StoreConfig
from messagestore.consume_queue import ConsumeQueue, list_queues, queue_directory
from messagestore.errors import ConfigError, CorruptionError, NotAStoreError
from messagestore.hosts import pack_host
from messagestore.index_file import IndexService
from messagestore.mapped_file import Disk, FilePool
from messagestore.message import BATCH_TOPIC, LMQ_PREFIX
from messagestore.state import StateFile
from messagestore.store_root import known_root
from messagestore.topics import Topics

FORMAT_VERSION = 1
_NEW = "new-"
_BATCH_QUEUES = "batchconsumequeue"
ABORT_WORD = "messagestore"
_CACHED_QUEUES = 4096
_MANY_FILES = 64  # from here on one syncfs is faster than a sync of each


class Paths:
    """Where everything is, below a root. `store_root` knows the root from now on, and the mode of its new files."""

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
        self.journal = os.path.join(self.spark, "journal.json")
        self.writer_lock = os.path.join(self.spark, "writer.lock")
        self.staging = os.path.join(self.spark, "staging")
        self.cut = os.path.join(self.spark, "cut")

    def temporary(self, name: str) -> str:
        """A fresh path in `spark/` to make a file at before it gets its name."""
        return os.path.join(self.spark, _NEW + name)


@dataclass(frozen=True, slots=True)
class Identity:
    """`spark/store.json`: made once, never changed."""

    store_id: str
    mapped_file_size_commit_log: int
    mapped_file_size_consume_queue: int
    max_hash_slot_num: int
    max_index_num: int
    message_index_enable: bool

    def to_json(self) -> bytes:
        """The file's text."""
        fields = {
            "formatVersion": FORMAT_VERSION,
            "storeId": self.store_id,
            "mappedFileSizeCommitLog": self.mapped_file_size_commit_log,
            "mappedFileSizeConsumeQueue": self.mapped_file_size_consume_queue,
            "maxHashSlotNum": self.max_hash_slot_num,
            "maxIndexNum": self.max_index_num,
            "messageIndexEnable": self.message_index_enable,
        }
        return (json.dumps(fields, indent=2) + "\n").encode()

    @classmethod
    def read(cls, disk: Disk, path: str) -> Identity | None:
        """From the file; None when there is none.

        Raises
        ------
        CorruptionError
            When it cannot be read: the sizes in it are needed.
        """
        try:
            text = disk.read(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fields = json.loads(text)
            version = fields["formatVersion"]
            identity = cls(
                store_id=str(fields["storeId"]),
                mapped_file_size_commit_log=int(fields["mappedFileSizeCommitLog"]),
                mapped_file_size_consume_queue=int(fields["mappedFileSizeConsumeQueue"]),
                max_hash_slot_num=int(fields["maxHashSlotNum"]),
                max_index_num=int(fields["maxIndexNum"]),
                message_index_enable=bool(fields["messageIndexEnable"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CorruptionError(path, 0, "the JSON of a store's identity", repr(text[:60])) from error
        if version != FORMAT_VERSION:
            raise NotAStoreError(
                f"{path}: found format version {version}; this release knows {FORMAT_VERSION}; use a newer one",
                path=path,
            )
        return identity


_FIXED = (
    "mapped_file_size_commit_log", "mapped_file_size_consume_queue", "max_hash_slot_num", "max_index_num",
    "message_index_enable",
)  # fmt: skip


def with_fixed(config: StoreConfig, store: Identity | StoreConfig) -> StoreConfig:
    """A configuration with what is fixed in a store, once it is made."""
    fixed = {name: getattr(store, name) for name in _FIXED}
    if all(getattr(config, name) == value for name, value in fixed.items()):
        return config
    return config.replace(**fixed)


class StoreFiles:
    """The open files of one store. Made by `message_store`; shared by writer, recovery and readers of one process.

    Parameters
    ----------
    paths : Paths
    config : StoreConfig
        Sizes in it count only for a store without files.
    identity : Identity | None
        None: a store this project never wrote (read-only views of a broker's store).
    disk : Disk
    """

    def __init__(self, paths: Paths, config: StoreConfig, identity: Identity | None, disk: Disk) -> None:
        self.paths = paths
        self.disk = disk
        self.identity = identity
        if identity is not None:
            config = with_fixed(config, identity)
        self.config = config
        self.store_host = store_host_of(config)
        self.pool = FilePool(disk)
        self.log_pool = FilePool(disk, max(4, self.pool.limit // 4))
        segment_size = identity.mapped_file_size_commit_log if identity is not None else 0  # 0: read off the files
        self.commit_log = CommitLog(
            paths.commit_log, segment_size, self.log_pool, paths.spark, preallocate=config.preallocate
        )
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
        self._queues: OrderedDict[tuple[str, int], ConsumeQueue] = OrderedDict()
        self._written: dict[tuple[str, int], ConsumeQueue] = {}
        self.others_wrote = False
        """Another process wrote queues and index above the clean end: what it did not sync is not known here."""

    @property
    def store_id(self) -> str:
        """The store's id; empty for a store this project never wrote."""
        return self.identity.store_id if self.identity else ""

    def load(self, *, index: bool = True) -> None:
        """Look at the folders; sizes of files that exist win over configured ones. Readers need the index for keys
        only.
        """
        self.commit_log.load()
        if not self.commit_log.segment_size:
            self.commit_log.files.file_size = self.config.mapped_file_size_commit_log
        if index and self.index is not None:
            self.index.load()
        self.topics.load()

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The ConsumeQueue of a topic and queue, loaded; it may have no file yet."""
        key = (topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._written.get(key) or ConsumeQueue(  # one object a queue: it knows what is not synced
                queue_directory(self.paths.root, topic, queue_id),
                self.identity.mapped_file_size_consume_queue if self.identity is not None else 0,
                self.pool,
                self.paths.spark,
            )
            queue.load()
            if not queue.file_size:
                queue.file_size = self._queue_file_size()
            self._queues[key] = queue
            while len(self._queues) > _CACHED_QUEUES:
                self._queues.popitem(last=False)
        else:
            self._queues.move_to_end(key)
        return queue

    def _queue_file_size(self) -> int:
        # Without store.json the size is read off any queue that has a file.
        if self.identity is None:
            for queue in self._queues.values():
                if queue.files.offsets:
                    return queue.file_size
        return self.config.mapped_file_size_consume_queue

    def forget_queues(self) -> None:
        """Forget what was cached of the queues: somebody else wrote."""
        self._queues.clear()
        for queue in self._written.values():
            queue.load()

    def mark_written(self, topic: str, queue_id: int, queue: ConsumeQueue) -> None:
        """Remember that a queue has units that are not synced."""
        self._written[(topic, queue_id)] = queue

    def written_queues(self) -> list[tuple[str, int, ConsumeQueue]]:
        """Queues written since the last sync."""
        return [(topic, queue_id, queue) for (topic, queue_id), queue in self._written.items()]

    def queue_names(self) -> dict[str, list[int]]:
        """Topic -> queue ids, from the folders."""
        return list_queues(self.disk, self.paths.root)[0]

    def sweep_temporary(self) -> None:
        """Remove files that a killed writer was making."""
        for name in self.disk.names(self.paths.spark):
            path = os.path.join(self.paths.spark, name)
            if name.startswith(_NEW) and not self.disk.is_folder(path):  # a folder is nothing of ours
                self.disk.unlink(path)

    def sync_derived(self) -> None:
        """Make ConsumeQueues, index and new names durable: file by file, or all at once when there are many."""
        dirty = sum(len(queue.dirty) + len(queue.dirty_folders) for queue in self._written.values())
        if dirty > _MANY_FILES or self.others_wrote:
            self.disk.syncfs(self.disk.open(self.paths.identity))
            for queue in self._written.values():
                queue.mark_synced()
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
        """Content of `abort`, None when it is absent."""
        try:
            return self.disk.read_head(self.paths.abort, 200).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return None

    @property
    def abort_token(self) -> str:
        """What `abort` holds while this project writes."""
        return f"{ABORT_WORD} {self.store_id}"

    @property
    def abort_is_ours(self) -> bool:
        """Whether `abort` says that this project wrote last and has not closed the store."""
        return bool(self.store_id) and self.read_abort() == self.abort_token

    def close(self) -> None:
        """Let go of all files."""
        self._queues.clear()
        self._written.clear()
        self.commit_log.close()
        self.pool.clear()
        self.log_pool.clear()
        self.state_file.close()


def store_host_of(config: StoreConfig) -> bytes:
    """STOREHOST of the records of a store: `brokerIP1` and `listenPort`, packed."""
    address = f"[{config.broker_ip1}]" if ":" in config.broker_ip1 else config.broker_ip1
    return pack_host(f"{address}:{config.listen_port}")


def looks_like_store(disk: Disk, paths: Paths) -> bool:
    """Whether the folder holds a store, RocketMQ's or ours."""
    return disk.is_folder(paths.commit_log) or disk.exists(paths.identity)


def is_free(disk: Disk, paths: Paths) -> bool:
    """Whether a store may be made there: no folder, an empty one, or what a killed creation left."""
    return set(disk.names(paths.root)) <= {"lock", "spark"} and set(disk.names(paths.spark)) <= {
        "writer.lock",
        "new-store.json",
        "staging",
    }


def check_root(disk: Disk, paths: Paths) -> None:
    """Refuse a root that holds something else than a store; nothing is made.

    Raises
    ------
    NotAStoreError
    """
    if disk.exists(paths.root) and not disk.is_folder(paths.root):
        raise NotAStoreError(f"{paths.root}: found a file; a store is a folder", path=paths.root)
    if not looks_like_store(disk, paths) and not is_free(disk, paths):
        found = ", ".join(disk.names(paths.root)[:5])
        raise NotAStoreError(
            f"{paths.root}: found a folder with {found} in it; a store is made in a missing or empty folder only",
            path=paths.root,
        )


def make_root(disk: Disk, paths: Paths) -> None:
    """The root, before anything is locked in it.

    Raises
    ------
    NotAStoreError
        For a folder that holds something else.
    """
    check_root(disk, paths)
    missing = []
    path = paths.root
    while not disk.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        disk.mkdir(path)
    if missing:
        disk.fsync_dir(os.path.dirname(missing[-1]))


def make_staging(disk: Disk, paths: Paths) -> None:
    """The staging folder, and the folders above it, where there is no store yet. They do not make one.

    Raises
    ------
    NotAStoreError
        For a folder that holds something else.
    """
    make_root(disk, paths)
    make_own_folders(disk, paths)


def make_own_folders(disk: Disk, paths: Paths) -> None:
    """`spark/` and what is in it, once no broker can be at work."""
    for path in (paths.spark, paths.staging):
        if not disk.is_folder(path):
            disk.mkdir(path)


def create_identity(disk: Disk, paths: Paths, config: StoreConfig) -> Identity:
    """Make `store.json`; sizes of a broker's files win over configured ones."""
    log_size = config.mapped_file_size_commit_log
    pool = FilePool(disk, 8)
    log = CommitLog(paths.commit_log, 0, pool, paths.spark)
    log.load()
    queue_size = config.mapped_file_size_consume_queue
    for topic, queue_ids in list_queues(disk, paths.root)[0].items():
        queue = ConsumeQueue(queue_directory(paths.root, topic, queue_ids[0]), 0, pool, paths.spark)
        queue.load()
        if queue.files.offsets:
            queue_size = queue.file_size
            break
    identity = Identity(
        store_id=uuid.uuid4().hex,
        mapped_file_size_commit_log=log.segment_size or log_size,
        mapped_file_size_consume_queue=queue_size,
        max_hash_slot_num=config.max_hash_slot_num,
        max_index_num=config.max_index_num,
        message_index_enable=config.message_index_enable,
    )
    disk.replace(paths.identity, identity.to_json(), via=paths.temporary("store.json"))
    disk.fsync_dir(paths.root)
    return identity


def refuse_foreign_forms(disk: Disk, paths: Paths) -> None:
    """Refuse to write into stores whose queues are not simple ones, before the first byte.

    Raises
    ------
    NotAStoreError
        RocksDB queues, BatchConsumeQueues, or light queues: their units would be taken for damage, or not be written.
    """
    refuse_rocksdb(disk, paths)
    folder = os.path.join(paths.root, _BATCH_QUEUES)
    if disk.names(folder):
        raise NotAStoreError(f"{folder}: found BatchConsumeQueues; only simple queues can be written", path=paths.root)
    light = [name for name in disk.names(paths.consume_queue) if name.startswith(LMQ_PREFIX)]
    if light:
        raise NotAStoreError(
            f"{paths.consume_queue}: found the light queue {light[0]} (enableLmq); only simple queues can be written",
            path=paths.root,
        )


def refuse_rocksdb(disk: Disk, paths: Paths) -> None:
    """Refuse a store whose queues are not in files: it would look empty.

    Raises
    ------
    NotAStoreError
    """
    if disk.exists(os.path.join(paths.consume_queue, "CURRENT")):
        raise NotAStoreError(
            f"{paths.consume_queue}: found RocksDB queues (storeType=defaultRocksDB); only file queues can be "
            f"read and written",
            path=paths.root,
        )


def check_readable_topic(files: StoreFiles, topic: str) -> None:
    """Refuse a topic whose queues are of a kind that cannot be read: it would look empty.

    Raises
    ------
    ConfigError
    """
    found = ""
    if topic.startswith(LMQ_PREFIX):
        found = "a light queue (enableLmq): it points to messages of other topics; read those topics"
    elif files.disk.exists(os.path.join(files.paths.root, _BATCH_QUEUES, topic)):
        found = "BatchConsumeQueues (queue.type=BatchCQ)"
    if found:
        raise ConfigError(f"topic {topic!r}: found {found}; only simple queues can be read", key="topic", value=topic)


def check_simple_topic(files: StoreFiles, topic: str) -> None:
    """Refuse a topic whose `queue.type` is not SimpleCQ."""
    if topic != BATCH_TOPIC and not files.topics.is_simple_queue(topic):
        raise ConfigError(
            f"topic {topic!r} has queue.type {files.topics.get(topic)}; only topics with simple queues can be written",
            key="topic",
            value=topic,
        )
