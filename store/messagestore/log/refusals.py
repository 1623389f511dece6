"""Refuses stores and topics that this project cannot write or read, before the first byte.

The settings of a store's broker, the names of its files and folders, and its newest records show which stores these
are. `messagestore.format.broker_keys` lists the settings.

Light queues (a broker's enableLmq with enableMultiDispatch) need a look at records. Their messages are in topics of
their own. Light queues, which have no records of their own, hold units for them. If the folder of all queues is
missing, or if the broker was killed before it had created the light queues, only the properties that the broker added
reveal these messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import numpy as np

from messagestore.errors import ConfigError, MessageIllegalError, NotAStoreError
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.batch_consume_queue import BATCH_QUEUE_FOLDER
from messagestore.files.commit_log import CommitLog
from messagestore.files.config_file import why_in_rocksdb
from messagestore.files.consume_queue import list_queues
from messagestore.files.disk import Disk
from messagestore.files.topics import CLEANUP_POLICY, COMPACTION, PERM_READ_WRITE, PERM_WRITE
from messagestore.format import record_scan
from messagestore.format.broker_keys import SEND, why_not_written
from messagestore.format.config import StoreConfig, java_key
from messagestore.format.message import BATCH_TOPIC, LMQ_PREFIX
from messagestore.format.properties import PROPERTY_SEPARATOR
from messagestore.log.store_files import ABORT_WORD, Paths, StoreFiles, looks_like_store, opened_log
from messagestore.log.walk import Depth, Run, Walk
from messagestore.signal_handlers import pass_on

_DISPATCHED = re.compile(rb"INNER_MULTI_QUEUE_OFFSET\x01")
"""The property in which a broker's store records the number of a message in each of its light queues."""
_CONTROLLER_FILES = frozenset(
    {"epochFileCheckpoint", "epochFileCheckpoint.bak", "brokerIdentity", "brokerIdentity-temp"}
)
"""Files that only a broker with enableControllerMode makes."""
_DLEDGER_FOLDER = "dledger-"
_ROCKSDB_QUEUES = "consumequeue_rocksdb"
"""Where RocketMQ 5.5 keeps these queues with useSeparateStorePathForRocksdbCQ."""
_LOG_FOLDERS_SEPARATOR = ","
"""Separates the folders of a log in RocketMQ's settings (MixAll.MULTI_PATH_SPLITTER)."""


def refuse_to_write(disk: Disk, paths: Paths, config: StoreConfig) -> None:
    """Refuse a store that must not be written to, before anything is created or locked.

    Raises
    ------
    ConfigError
        A setting of the broker forbids it, or the sizes of a broker's files cannot be known.
    NotAStoreError
        The store has a form that cannot be written.
    """
    refuse_broker_settings(paths, config)
    refuse_foreign_forms(disk, paths)
    refuse_to_guess_sizes(disk, paths, config)


def refuse_broker_settings(paths: Paths, config: StoreConfig) -> None:
    """Refuse a store whose broker needs other bytes or offsets, or whose log is written by others.

    Raises
    ------
    ConfigError
    """
    settings = dict(config.broker_settings)
    refused = why_not_written(settings)
    if (
        refused is None
        and settings.get("forceVerifyPropCRC", "").lower() == "true"
        and not config.enabled_append_prop_crc
    ):
        refused = "forceVerifyPropCRC", "its broker cuts records without a property CRC. Set enabledAppendPropCRC=true"

    refused = refused or _log_in_folders(paths, settings) or _log_elsewhere(paths, settings)
    if refused is not None:
        key, reason = refused
        raise ConfigError(
            f"{paths.root}: cannot be written with {key}={settings[key]}: {reason}", key=key, value=settings[key]
        )


def _log_elsewhere(paths: Paths, settings: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the setting of a broker by which its log is in another folder, and the reason to refuse to write."""
    key, path = "storePathCommitLog", settings.get("storePathCommitLog")
    if not path or not _is_of(paths, settings) or os.path.realpath(path) == os.path.realpath(paths.commit_log):
        return None
    link = f"Make {paths.commit_log} a symbolic link to that folder"
    return key, f"its log is elsewhere, and a second one would be created here. {link}"


def _log_in_folders(paths: Paths, settings: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the setting of a broker by which its log is in several folders, and the reason to refuse the store."""
    for key in ("readOnlyCommitLogStorePaths", "storePathCommitLog"):
        several = key != "storePathCommitLog" or _LOG_FOLDERS_SEPARATOR in settings.get(key, "")
        if settings.get(key) and several and _is_of(paths, settings):
            return key, f"its log is in several folders, and only one can be read. Use one folder, {paths.commit_log}"
    return None


def _is_of(paths: Paths, settings: Mapping[str, str]) -> bool:
    """Whether the settings of a broker are those of this store."""
    return os.path.realpath(settings.get("storePathRootDir", paths.root)) == os.path.realpath(paths.root)


def refuse_to_guess_sizes(disk: Disk, paths: Paths, config: StoreConfig) -> None:
    """Refuse a store that a broker made and that has no files yet from which their size can be learned.

    Raises
    ------
    ConfigError
        The sizes are unknown, and a broker does not start with files of another size.
    """
    ours = disk.exists(paths.identity) or disk.exists(paths.journal)
    if ours or not looks_like_store(disk, paths) or disk.names(paths.commit_log):
        return

    missing = ["mapped_file_size_commit_log"]
    if not any(queue_ids for queue_ids in list_queues(disk, paths.root)[0].values()):
        missing.append("mapped_file_size_consume_queue")
    missing = [java_key(name) for name in missing if not config.is_given(name)]
    if missing:
        keys = " and ".join(missing)
        raise ConfigError(
            f"{paths.root}: a broker created this store, and no file in it says which file sizes the broker uses. With "
            f"other sizes the broker does not start. Give the broker's own file (broker.conf) as storeConfig or "
            f"--store-config, or a file with {keys}",
            key=missing[0],
        )


def refuse_foreign_forms(disk: Disk, paths: Paths) -> None:
    """Refuse to write into stores whose queues are not simple ones, before the first byte.

    Raises
    ------
    NotAStoreError
        The store has RocksDB queues, BatchConsumeQueues or light queues, whose units would be taken for damage or not
        be written. Or its broker belongs to a group that elects its master, so the group's other brokers decide what
        stays in the log. Or it keeps its topics and groups in RocksDB, so nobody else knows what may be written and
        what is still to be read.
    """
    refuse_rocksdb(disk, paths)
    elsewhere = why_in_rocksdb(disk, paths.root)
    if elsewhere is not None:
        raise NotAStoreError(f"{elsewhere}. Messages can be read", path=paths.root)
    _refuse_elected(disk, paths)

    folder = os.path.join(paths.root, BATCH_QUEUE_FOLDER)
    if disk.names(folder):
        text = f"{folder}: found RocketMQ's batch queues; only simple queues can be written. Send to the broker instead"
        raise NotAStoreError(text, path=paths.root)

    light = [name for name in disk.names(paths.consume_queue) if name.startswith(LMQ_PREFIX)]
    if light:
        raise NotAStoreError(
            f"{paths.consume_queue}: found the light queue {light[0]} (enableLmq); only simple queues can be written. "
            f"Send to the broker instead",
            path=paths.root,
        )

    if not disk.is_folder(paths.consume_queue):
        _refuse_light_messages(disk, paths, whole=True)
    elif _broker_crashed(disk, paths):
        _refuse_light_messages(disk, paths, whole=False)


def _refuse_elected(disk: Disk, paths: Paths) -> None:
    """Refuse a store of the controller mode or of DLedger, just as the setting in a broker's file is refused."""
    names = disk.names(paths.root)
    leftovers = sorted(_CONTROLLER_FILES.intersection(names))
    if leftovers:
        raise NotAStoreError(
            f"{os.path.join(paths.root, leftovers[0])}: found a file of the controller mode (enableControllerMode), in "
            f"which brokers elect a master, and cut what no other one has confirmed. Send the messages to the "
            f"broker. If this broker has left that mode for good, stop it and delete {', '.join(leftovers)}",
            path=paths.root,
        )

    for name in names:
        folder = os.path.join(paths.root, name)
        if name.startswith(_DLEDGER_FOLDER) and disk.is_folder(folder):
            raise NotAStoreError(
                f"{folder}: found the log of DLedger (enableDLegerCommitLog), which has another form than the "
                f"CommitLog. Send the messages to the broker",
                path=paths.root,
            )


def _broker_crashed(disk: Disk, paths: Paths) -> bool:
    """Whether `abort` exists and does not come from this project."""
    try:
        return not disk.read_head(paths.abort, len(ABORT_WORD)).startswith(ABORT_WORD.encode())
    except (FileNotFoundError, NotADirectoryError) as error:
        pass_on(error)
        return False


def _refuse_light_messages(disk: Disk, paths: Paths, *, whole: bool) -> None:
    """Refuse a store with light messages where only records show them.

    That is so if the folder of all queues is missing or was never made (`whole`), or if a broker was killed. In the
    latter case, everything that the broker may not have dispatched lies where its own recovery would begin, or later.
    """
    with opened_log(disk, paths) as log:
        light_offset = None
        if log.offsets:
            times = store_checkpoint.read(disk, paths.checkpoint)
            start = log.min_offset if whole else log.segment_before_time(times.min_timestamp_ms)
            light_offset = first_light_message(log, start)
    if light_offset is not None:
        raise NotAStoreError(
            f"{log.path_of(light_offset)}: found at offset {light_offset} a message of a light queue (enableLmq) "
            f"that has no folder; only simple queues can be written. Start a broker, which rebuilds these queues",
            path=paths.root,
        )


def refuse_to_read(disk: Disk, paths: Paths, config: StoreConfig | None = None) -> None:
    """Refuse a folder that holds no store, or a store whose log or queues cannot be read.

    Raises
    ------
    NotAStoreError
    ConfigError
        By the settings of the broker, the log is in several folders.
    """
    settings = dict(config.broker_settings) if config is not None else {}
    several = _log_in_folders(paths, settings)
    if several is not None:
        key, reason = several
        raise ConfigError(
            f"{paths.root}: cannot be read with {key}={settings[key]}: {reason}", key=key, value=settings[key]
        )
    if not looks_like_store(disk, paths):
        raise NotAStoreError(
            f"{paths.root}: found no message store (no commitlog folder). Give the store's root folder", path=paths.root
        )
    refuse_rocksdb(disk, paths)


def refuse_rocksdb(disk: Disk, paths: Paths) -> None:
    """Refuse a store whose queues are not in files, because it would look empty.

    Raises
    ------
    NotAStoreError
    """
    for folder in (paths.consume_queue, os.path.join(paths.root, _ROCKSDB_QUEUES)):
        if disk.exists(os.path.join(folder, "CURRENT")):
            raise NotAStoreError(
                f"{folder}: found queues in RocksDB (storeType=defaultRocksDB or rocksdbCQDoubleWriteEnable); only "
                f"queues in files can be read and written",
                path=paths.root,
            )


def check_readable_topic(topic: str) -> None:
    """Refuse a topic whose queues are of a kind that cannot be read, because it would look empty.

    Raises
    ------
    ConfigError
    """
    if topic.startswith(LMQ_PREFIX):
        fault = "found a light queue (enableLmq), which points to messages of other topics. Read those topics instead"
        raise ConfigError(f"topic {topic!r}: {fault}", key="topic", value=topic)


def check_simple_topic(files: StoreFiles, topic: str) -> None:
    """Refuse a topic whose `queue.type` is not SimpleCQ, or which is compacted.

    A broker gives the consumers of a compacted topic what it has copied into files of its own while it ran. They would
    never see a message that somebody else has put.

    Raises
    ------
    ConfigError
    """
    if topic != BATCH_TOPIC and not files.topics.is_simple_queue(topic):
        raise ConfigError(
            f"topic {topic!r} has queue.type {files.topics.get(topic)}; only topics with simple queues can be written",
            key="topic",
            value=topic,
        )

    if files.topics.is_compacted(topic):
        raise ConfigError(
            f"topic {topic!r} has {CLEANUP_POLICY} {COMPACTION}: consumers read it from files that only a running "
            f"broker writes. {SEND}, or set the topic's {CLEANUP_POLICY} to DELETE",
            key=CLEANUP_POLICY,
            value=COMPACTION,
        )


def check_writable_topic(files: StoreFiles, topic: str) -> None:
    """Refuse a topic that users may not put messages to: its queues are not simple ones, or it may not be written.

    RocketMQ's producers find no queue of a topic without write permission, and a broker answers NO_PERMISSION when a
    message is sent back to one. A broker's own `brokerPermission` forbids all topics.

    Raises
    ------
    ConfigError
        The topic has other queues.
    MessageIllegalError
        The topic, or the broker, may not be written, or the topic has no queue to write.
    """
    check_simple_topic(files, topic)
    config, broker_settings = files.topics.get(topic), files.config.broker_settings
    if config is not None and config.write_queue_nums < 1:
        raise MessageIllegalError(
            f"topic {topic!r}: found writeQueueNums {config.write_queue_nums} in config/topics.json; writing needs 1 "
            "or more, so nothing was written. Change it with alter_topic or `topic alter --queues`",
            field="topic",
        )
    if config is not None and not config.perm & PERM_WRITE:
        raise MessageIllegalError(
            f"topic {topic!r}: found perm {config.perm} in config/topics.json; writing needs {PERM_WRITE}, so nothing "
            f"was written (RocketMQ: NO_PERMISSION). Change it with alter_topic or `topic alter --perm "
            f"{PERM_READ_WRITE}`",
            field="topic",
        )
    if not broker_settings:  # the usual case, and this is done for every single put
        return
    of_broker = dict(broker_settings).get("brokerPermission", "")
    if re.fullmatch("[0-9]+", of_broker) and not int(of_broker) & PERM_WRITE:  # RocketMQ ignores what is no number
        raise MessageIllegalError(
            f"topic {topic!r}: found brokerPermission={of_broker} in the broker's file; writing needs {PERM_WRITE}, so "
            "nothing was written (RocketMQ: NO_PERMISSION). Write to another broker's store",
            field="topic",
        )


def first_light_message(log: CommitLog, start: int) -> int | None:
    """Return the physical offset of the first message of a light queue from `start` on, or None.

    Only framing is checked.
    """
    for run in Walk(log, start, depth=Depth.FRAMING):
        row = _first_in(run)
        if row is not None:
            return run.physical_offset + int(run.starts[row])
    return None


def _first_in(run: Run) -> int | None:
    hits = [hit.start() for hit in _DISPATCHED.finditer(run.data.data)]
    if not hits:
        return None
    _, where = record_scan.parts(run.data, run.starts, run.heads)
    for hit in hits:
        row = int(np.searchsorted(where.property_starts, hit, side="right")) - 1
        if row < 0 or hit >= int(where.ends[row]):
            continue  # the match is in a body
        if hit == int(where.property_starts[row]) or int(run.data[hit - 1]) == PROPERTY_SEPARATOR[0]:
            return row
    return None
