"""`StoreConfig`: the settings of a store.

A configuration is frozen. Its fields are RocketMQ's key names in snake_case; `conf/store.properties` holds the same
keys as RocketMQ spells them. The settings that must not change once a store exists (file sizes, index slots) are kept
in the store's `spark/store.json`.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from messagestore.errors import ConfigError
from messagestore.format.broker_keys import KINDS, RELEVANT, broker_key
from messagestore.format.java_properties import Property, properties_of, value_of
from messagestore.format.layout import CRC_MASK, UNIT

SYNC_FLUSH = "SYNC_FLUSH"
ASYNC_FLUSH = "ASYNC_FLUSH"
VISIBLE = "visible"
FLUSHED = "flushed"
MIN_SEGMENT_SIZE = 4096
DEFAULT_RESERVED_HOURS = 72
"""RocketMQ's fileReservedTime."""
_LAST_HOUR = 23
_MAX_NAME = 255
_MAX_SIZE = 1024 * 1024
"""The largest size of a settings file, in bytes."""

_log = logging.getLogger(__name__)
_listed: set[str] = set()
"""Brokers' files whose foreign settings this process has already listed in the log."""
T = TypeVar("T")

MAX_DELAY_LEVELS = 1000
MAX_CLUSTER_NAME_SIZE = 255
MAX_DELAY_MS = 36_500 * 86_400_000
"""The longest delay of a level: a hundred years."""
_LEVEL = re.compile(r"(\d{1,12})([smhd])", re.ASCII)
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(key: str, value: object) -> float:
    """Convert a duration such as `30s`, `500ms` or `1.5m`, or a bare number of seconds, to seconds.

    Raises
    ------
    ConfigError
        The value is none of these, or is negative.
    """
    seconds = _seconds_of(str(value))
    if seconds is None:
        raise ConfigError(
            f"{key}: found {value!r}; allowed is a duration such as 500ms, 30s, 2m, 1h", key=key, value=value
        )
    return seconds


@lru_cache(256)
def _seconds_of(text: str) -> float | None:
    """The seconds of a duration, or None if it is none. Each group of puts asks for one or two of them."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", text)
    return None if match is None else float(match[1]) * _UNITS_S[match[2] or "s"]


BROKER_NAME_WORDS = "1 to 255 printable characters, without blanks at the beginning and the end"


def is_broker_name(name: object) -> bool:
    """Whether a value can be the name of a broker, as `BROKER_NAME_WORDS` says it."""
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable() and name == name.strip()


@lru_cache(16)
def delays_of(levels: str) -> tuple[int, ...]:
    """The delays that a `messageDelayLevel` names, in milliseconds; none if it is not legal.

    Source: RocketMQ broker/schedule/ScheduleMessageService.java (parseDelayLevel).
    """
    parts = [_LEVEL.fullmatch(part) for part in levels.split(" ")]
    if len(parts) > MAX_DELAY_LEVELS or None in parts:
        return ()
    delays = [round(int(part[1]) * 1000 * _UNITS_S[part[2]]) for part in parts if part is not None]
    return () if max(delays) > MAX_DELAY_MS else tuple(delays)


ROCKETMQS_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def _no_setting(default: T) -> T:
    """A field that is no setting: two configurations that differ only in it are equal."""
    return field(default=default, repr=False, compare=False, metadata={"setting": False})


def _notes_what_is_given(cls: type[T]) -> type[T]:
    """Make the constructor of a configuration note in `given` which fields its caller gave.

    A value alone does not say it: who names RocketMQ's own delay levels wants them, also where a store has others.
    """
    construct: Callable[..., None] = cls.__init__
    names = [setting.name for setting in fields(cls)]  # type: ignore[arg-type]

    @wraps(construct)
    def noting(self: T, *values: object, **named: object) -> None:
        given_names = frozenset([*names[: len(values)], *named])
        named.setdefault("given", given_names)
        construct(self, *values, **named)

    cls.__init__ = noting  # type: ignore[assignment]
    return cls


@_notes_what_is_given
@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The settings of a store: sizes in bytes, times in milliseconds unless stated otherwise.

    Every field has a default, and all of them can be given as keywords. `load` reads them from a file, in which the
    keys are spelled as in RocketMQ (`flushDiskType`).

    Parameters
    ----------
    mapped_file_size_commit_log : int
        The size of one CommitLog segment. It counts only while the store has no files, as the next three do.
    mapped_file_size_consume_queue : int
        The size of one ConsumeQueue file, rounded up to whole units of 20 bytes.
    max_hash_slot_num, max_index_num : int
        The hash slots and the entries of one index file.
    message_index_enable : bool
        False: no index is written, and a search by key reads the log.
    max_message_size : int
        The largest body. A record may have 65 536 bytes more.
    max_msgs_num_batch : int
        The number of messages that a search by key returns if the caller gives none.
    flush_disk_type : str
        "SYNC_FLUSH": a put returns when the message is on the disk. "ASYNC_FLUSH": a thread syncs soon after; a power
        cut may take the last messages, a killed process does not.
    sync_flush_timeout : int
        How long a put waits for its sync before it returns `FLUSH_DISK_TIMEOUT`.
    put_in_flight_size : int
        How many bytes `put_message_async` lets wait for their sync. A call beyond that waits until some are synced.
    stamp_uniq_key : bool
        True: each message of `put_message` and `put_messages`, in all forms, gets a UNIQ_KEY, as a broker gives one.
        It costs 43 bytes and an index entry a message. Delayed messages, half messages and those that are sent back
        have one in any case; `append_batch` takes what its column `unique_key` holds.
    stamp_cluster : bool
        True: each message that a user puts gets the property CLUSTER, as a broker gives it; also those of
        `append_batch` and of Spark. RocketMQ's clients need it to answer a request. It costs 9 bytes and the name.
    broker_cluster_name : str
        The name in CLUSTER.
    flush_interval_commit_log, flush_commit_log_least_pages, flush_commit_log_thorough_interval : int
        ASYNC_FLUSH: every interval the thread syncs if at least so many pages of 4 KiB are waiting; after the thorough
        interval it syncs whatever is waiting.
    transient_store_pool_enable, transient_store_pool_size : bool, int
        ASYNC_FLUSH only. True: an open session (`MessageStore.open`) copies single puts into buffers, and a thread
        writes (commits) them to the log a moment later. A put then returns with `committed` False: if the process is
        killed before the commit, the message is lost. Puts were measured to be no faster (`writer/README.md`). The size
        is the number of buffers. Each has the size of a segment and is locked in memory: with the defaults, 5 GiB. A
        broker's own file does not turn this on.
    commit_interval_commit_log, commit_commit_log_least_pages, commit_commit_log_thorough_interval : int
        The pool: every interval the thread commits if at least so many pages of 4 KiB are waiting; after the thorough
        interval it commits whatever is waiting.
    enabled_append_prop_crc : bool
        True: every record gets a CRC-32 of its head and its properties.
    check_crc_on_recover : bool
        True: recovery checks the CRC-32 of each body that it passes.
    auto_message_version_on_topic_len : bool
        True: a topic with more than 127 bytes is written in RocketMQ's second record format.
    message_delay_level : str
        How long a delayed message that is put now waits at each level, from level 1 on: whole numbers with s, m, h or
        d, separated by single blanks. A store keeps its levels: if nobody chooses other ones here, they count, and
        what was put keeps its delay in any case. A RocketMQ broker takes the levels from its own file.
    deliver_delayed : bool
        True: an open session (`MessageStore.open`) delivers delayed messages when they are due, by a thread.
    flush_delay_offset_interval : int
        Delivering delayed messages: how often `config/delayOffset.json` is written.
    transaction_time_out, transaction_check_max, transaction_check_interval : int
        Half messages: how long after it was made one is checked first, how often it is checked before it is discarded,
        and the interval between two rounds.
    reject_transaction_message : bool
        True: half messages are refused.
    broker_ip1, listen_port : str, int
        The store's address, which is written into each record and is part of the message ids.
    broker_name : str
        The name of the broker whose store this is. A writer keeps it in the store, where monitoring and Spark's source
        find it. Empty: the store keeps the name that it has.
    file_reserved_time : int
        For how many hours a segment is kept after it was last written to. After that, retention deletes it. -1: nothing
        is deleted unless somebody asks for it (`MessageStore.delete_expired_files`, `messagestore gc`). A broker's own
        file that does not say it means 72, as in RocketMQ.
    delete_when : str
        The hours of the day, in local time, at which expired segments are deleted, such as "04" or "04;16".
    disk_max_used_space_ratio : int
        From this percentage of the disk on, expired segments are deleted at any hour.
    disk_space_clean_forcibly_ratio : int
        From this percentage on, segments are deleted before they have expired, the oldest first, also those that a
        consumer group still needs.
    disk_space_warning_level_ratio : int
        From this percentage on, writes are refused, too.
    clean_file_forcibly_enable : bool
        False: segments that have not expired are never deleted, however full the disk is.
    clean_resource_interval : int
        The interval in which retention looks whether something has to be deleted.
    delete_file_batch_max, delete_commit_log_files_interval : int
        How many segments are deleted in one interval at most, and the pause after each.
    delete_consume_queue_files_interval : int
        The pause after each queue of which files were deleted.
    correct_logic_min_offset_force_interval : int
        The interval in which the files of all queues are examined even if no segment was deleted.
    preallocate : bool
        True: a new segment gets all of its disk blocks at once, so that a full disk shows early. A thread does this for
        the next two segments, unless they would take the last room. RocketMQ's `warmMapedFileEnable` has no
        counterpart: it touches the pages of a mapping, and this store writes without mappings.
    clean_interval : str
        The shortest time between two moves of the clean end (a duration, such as "60s").
    attach_timeout : str
        How long a writer keeps Java brokers out after its last append (a duration).
    lock_timeout : str
        How long an append waits for another writer (a duration).
    file_mode : str
        The mode of new files, such as "0640". Empty: derived from the root folder's group permissions.
    journal_retention : int
        How many batches the journal keeps at least, besides the last one of each app.
    proven_tail_size : int
        After a reboot and before recovery: how much of the log a reader examines to prove what is on the disk.
    fail_on_unproven : bool
        True: a reader that then finds messages it cannot prove raises `NotRecoveredError`; False: it logs a warning.
    read_up_to : str
        "visible": a reader shows what is visible. "flushed": only what survives a power cut, so ASYNC_FLUSH messages
        appear when they are synced.
    broker_settings : tuple of (str, str)
        Set by `load`: what a broker's own file says about who may write to the store, and how.
    given : frozenset of str
        Set by the constructor, `replace`, `load` and `from_mapping`: the fields whose values were given.
    stored : frozenset of str
        Set by `completed`: the fields among them whose values live with the store.

    Raises
    ------
    ConfigError
        A value has the wrong type or is out of range.

    Examples
    --------
    >>> from messagestore import ASYNC_FLUSH, MessageStore, StoreConfig
    >>> config = StoreConfig(flush_disk_type=ASYNC_FLUSH, lock_timeout="5s")
    >>> with MessageStore.open("store", config) as store:
    ...     store.topics()
    {}
    """

    mapped_file_size_commit_log: int = 1024 * 1024 * 1024
    mapped_file_size_consume_queue: int = 300_000 * UNIT.size
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000
    message_index_enable: bool = True
    max_message_size: int = 4 * 1024 * 1024
    max_msgs_num_batch: int = 64
    flush_disk_type: str = SYNC_FLUSH
    sync_flush_timeout: int = 5000
    put_in_flight_size: int = 64 * 1024 * 1024
    stamp_uniq_key: bool = False
    stamp_cluster: bool = False
    broker_cluster_name: str = "DefaultCluster"
    flush_interval_commit_log: int = 500
    flush_commit_log_least_pages: int = 4
    flush_commit_log_thorough_interval: int = 10_000
    transient_store_pool_enable: bool = False
    transient_store_pool_size: int = 5
    commit_interval_commit_log: int = 200
    commit_commit_log_least_pages: int = 4
    commit_commit_log_thorough_interval: int = 200
    enabled_append_prop_crc: bool = False
    check_crc_on_recover: bool = True
    auto_message_version_on_topic_len: bool = True
    message_delay_level: str = ROCKETMQS_LEVELS
    deliver_delayed: bool = False
    flush_delay_offset_interval: int = 10_000
    transaction_time_out: int = 6000
    transaction_check_max: int = 15
    transaction_check_interval: int = 30_000
    reject_transaction_message: bool = False
    broker_ip1: str = "127.0.0.1"
    listen_port: int = 10911
    broker_name: str = ""
    file_reserved_time: int = -1
    delete_when: str = "04"
    disk_max_used_space_ratio: int = 75
    disk_space_clean_forcibly_ratio: int = 85
    disk_space_warning_level_ratio: int = 90
    clean_file_forcibly_enable: bool = True
    clean_resource_interval: int = 10_000
    delete_file_batch_max: int = 10
    delete_commit_log_files_interval: int = 100
    delete_consume_queue_files_interval: int = 100
    correct_logic_min_offset_force_interval: int = 300_000
    preallocate: bool = False
    clean_interval: str = "60s"
    attach_timeout: str = "20s"
    lock_timeout: str = "30s"
    file_mode: str = ""
    journal_retention: int = 10_000
    proven_tail_size: int = 1024 * 1024 * 1024
    fail_on_unproven: bool = False
    read_up_to: str = VISIBLE
    broker_settings: tuple[tuple[str, str], ...] = _no_setting(())
    """Keys and values of a broker's own file that say who may write, and how."""
    given: frozenset[str] = _no_setting(frozenset())
    """The fields whose values a caller, a file or a mapping gave."""
    stored: frozenset[str] = _no_setting(frozenset())
    """The fields in `given` whose values come from the store, and nobody else gave."""

    def __post_init__(self) -> None:
        for name, wanted in _types():
            if type(getattr(self, name)) is not wanted:
                self._refuse(name, f"a value of type {wanted.__name__}")

        self._check_range("mapped_file_size_commit_log", MIN_SEGMENT_SIZE, CRC_MASK)
        # At least two units: RocketMQ's own recovery never ends when a queue file of a single unit is full.
        self._check_range("mapped_file_size_consume_queue", UNIT.size + 1, CRC_MASK // UNIT.size * UNIT.size)
        if self.mapped_file_size_consume_queue % UNIT.size:  # RocketMQ rounds up, too
            rounded = -(-self.mapped_file_size_consume_queue // UNIT.size) * UNIT.size
            object.__setattr__(self, "mapped_file_size_consume_queue", rounded)

        self._check_range("max_hash_slot_num", 1, 500_000_000)
        self._check_range("max_index_num", 2, 100_000_000)
        self._check_range("max_message_size", 10, 1024 * 1024 * 1024)
        self._check_range("max_msgs_num_batch", 1, 1_000_000)
        self._check_range("sync_flush_timeout", 1, 3_600_000)
        self._check_range("put_in_flight_size", 1, 1 << 40)

        name = self.broker_cluster_name
        if self.stamp_cluster and not (name.isprintable() and 0 < len(name.encode()) <= MAX_CLUSTER_NAME_SIZE):
            self._refuse("broker_cluster_name", f"printable text of 1 to {MAX_CLUSTER_NAME_SIZE} bytes")

        self._check_range("flush_interval_commit_log", 1, 3_600_000)
        self._check_range("flush_commit_log_least_pages", 0, 1_000_000)
        self._check_range("flush_commit_log_thorough_interval", 1, 3_600_000)
        self._check_range("transient_store_pool_size", 1, 1_000_000)
        self._check_range("commit_interval_commit_log", 1, 3_600_000)
        self._check_range("commit_commit_log_least_pages", 0, 1_000_000)
        self._check_range("commit_commit_log_thorough_interval", 1, 3_600_000)
        self._check_range("flush_delay_offset_interval", 1, 3_600_000)

        if not delays_of(self.message_delay_level):
            self._refuse(
                "message_delay_level",
                f"1 to {MAX_DELAY_LEVELS} times such as 1s, 5m, 2h or 1d, separated by single blanks",
            )

        self._check_range("transaction_time_out", 0, 86_400_000)
        self._check_range("transaction_check_max", 0, 1_000_000)
        self._check_range("transaction_check_interval", 1, 86_400_000)
        self._check_range("listen_port", 0, 65535)

        self._check_range("file_reserved_time", -1, 24 * 36_525)
        for name in ("disk_max_used_space_ratio", "disk_space_clean_forcibly_ratio", "disk_space_warning_level_ratio"):
            self._check_range(name, 0, 100)
        for name in (
            "clean_resource_interval",
            "delete_commit_log_files_interval",
            "delete_consume_queue_files_interval",
            "correct_logic_min_offset_force_interval",
        ):
            self._check_range(name, 0, 86_400_000)
        self._check_range("delete_file_batch_max", 1, 1_000_000)
        if not self.delete_hours:
            self._refuse("delete_when", "hours from 0 to 23, separated by semicolons, such as 04 or 04;16")

        self._check_range("journal_retention", 1, 1_000_000)
        self._check_range("proven_tail_size", 0, 1 << 40)

        if self.flush_disk_type not in (SYNC_FLUSH, ASYNC_FLUSH):
            self._refuse("flush_disk_type", f"{SYNC_FLUSH} or {ASYNC_FLUSH}")
        if self.read_up_to not in (VISIBLE, FLUSHED):
            self._refuse("read_up_to", f"{VISIBLE} or {FLUSHED}")

        try:
            ipaddress.ip_address(self.broker_ip1.replace("%", " "))  # an address in a record cannot hold a zone
        except ValueError:
            self._refuse("broker_ip1", "an IPv4 or IPv6 address without a zone")
        if self.broker_name and not is_broker_name(self.broker_name):
            self._refuse("broker_name", BROKER_NAME_WORDS)

        for name in ("clean_interval", "attach_timeout", "lock_timeout"):
            duration_s(java_key(name), getattr(self, name))
        if self.file_mode and re.fullmatch("0?6[046][046]", self.file_mode) is None:
            self._refuse(
                "file_mode",
                "0600, 0640, 0644, 0660, 0664 or 0666; empty text means: as the root folder's group",
            )

    def _check_range(self, name: str, least: int, most: int) -> None:
        if not least <= getattr(self, name) <= most:
            self._refuse(name, f"{least} to {most}")

    def _refuse(self, name: str, allowed: str) -> None:
        key, value = java_key(name), getattr(self, name)
        raise ConfigError(f"{key}: found {value!r}; allowed is {allowed}", key=key, value=value)

    @property
    def delays_ms(self) -> tuple[int, ...]:
        """How long a delayed message waits, in milliseconds; level 1 comes first."""
        return delays_of(self.message_delay_level)

    @property
    def clean_interval_s(self) -> float:
        """The shortest time between two moves of the clean end, in seconds."""
        return duration_s("cleanInterval", self.clean_interval)

    @property
    def attach_timeout_s(self) -> float:
        """How long a writer stays attached after its last append, in seconds."""
        return duration_s("attachTimeout", self.attach_timeout)

    @property
    def lock_timeout_s(self) -> float:
        """How long an append waits for another writer, in seconds."""
        return duration_s("lockTimeout", self.lock_timeout)

    @property
    def delete_hours(self) -> frozenset[int]:
        """The hours of `delete_when`; empty if it is not a list of hours."""
        parts = [part.strip() for part in self.delete_when.split(";") if part.strip()]
        if any(re.fullmatch("[0-9]{1,2}", part) is None or int(part) > _LAST_HOUR for part in parts):
            return frozenset()
        return frozenset(map(int, parts))

    @property
    def max_used_percent(self) -> int:
        """`disk_max_used_space_ratio` within RocketMQ's bounds."""
        return min(max(self.disk_max_used_space_ratio, 10), 95)

    @property
    def forced_percent(self) -> int:
        """`disk_space_clean_forcibly_ratio` within RocketMQ's bounds."""
        return min(max(self.disk_space_clean_forcibly_ratio, 30), 85)

    @property
    def warning_percent(self) -> int:
        """`disk_space_warning_level_ratio` within RocketMQ's bounds."""
        return min(max(self.disk_space_warning_level_ratio, 35), 90)

    @property
    def retention_enabled(self) -> bool:
        """Whether a writer deletes expired segments by itself, and refuses writes on a disk that is nearly full."""
        return self.file_reserved_time >= 0

    @property
    def file_mode_bits(self) -> int | None:
        """The mode of new files; None: `store_root` derives it from the root folder."""
        return int(self.file_mode, 8) if self.file_mode else None

    def replace(self, **changes: object) -> StoreConfig:
        """A copy with other values for some fields, which count as given.

        Examples
        --------
        >>> from messagestore import StoreConfig
        >>> StoreConfig().replace(max_message_size=1024).max_message_size
        1024
        """
        changes.setdefault("given", self.given.union(changes))
        changes.setdefault("stored", self.stored.difference(changes))
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def from_mapping(cls, mapping: dict[str, object]) -> StoreConfig:
        """Make a configuration from RocketMQ's key names.

        Parameters
        ----------
        mapping : dict
            Keys in any case; values of the right type, or text as in a properties file.

        Raises
        ------
        ConfigError
            A key is unknown, or a value is not allowed.

        Examples
        --------
        >>> from messagestore import StoreConfig
        >>> StoreConfig.from_mapping({"flushDiskType": "ASYNC_FLUSH", "maxMessageSize": "1024"}).max_message_size
        1024
        """
        cls.check_names(mapping)
        settings_by_key = {java_key(f.name).lower(): f for f in settings()}
        values: dict[str, object] = {}
        for key, value in mapping.items():
            setting = settings_by_key[key.lower()]
            values[setting.name] = _typed(java_key(setting.name), str(setting.type), value)
        values["given"] = frozenset(values)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def check_names(cls, keys: Iterable[str]) -> None:
        """Refuse what is no setting in RocketMQ's spelling, in any case of its letters.

        Raises
        ------
        ConfigError
            A key is unknown. The message suggests one that is like it.
        """
        for key in keys:
            if key.lower() not in _own_keys():
                near = _near(key)
                hint = f"Did you mean {near}?" if near else f"The settings are {', '.join(_own_keys().values())}"
                raise ConfigError(f"{key}: no such setting. {hint}", key=key)

    @classmethod
    def load(cls, path: str | Path) -> StoreConfig:
        """Read a `store.properties` file (`key=value` lines, `#` comments), or a broker's own `broker.conf`.

        A file that contains a key which only RocketMQ knows is a broker's file. Settings that a store does not have are
        then ignored and listed once in the log, and `broker_settings` keeps those that a writer must know. In any other
        file, an unknown key is an error.

        The values in a broker's file are what the broker takes them for. A number that RocketMQ cannot read leaves the
        default, and a boolean is false unless it is `true`; a blank at the end of the line is enough for both. The log
        names these settings.

        Parameters
        ----------
        path : path

        Raises
        ------
        ConfigError
            A line is no setting, or a value is not allowed. The message names the line. It shows no content of a file
            that is no settings file, because whoever gives the path may not be allowed to read the file.

        Examples
        --------
        >>> from messagestore import StoreConfig
        >>> with open("store.properties", "w") as file:
        ...     _ = file.write("mappedFileSizeCommitLog=1048576")
        >>> StoreConfig.load("store.properties").mapped_file_size_commit_log
        1048576
        """
        lines = _lines_of(path)
        foreign: dict[str, str] = {}
        if any(broker_key(key) is not None and key.lower() not in _own_keys() for _, key, *_ in lines):
            mapping, foreign = _as_a_broker_reads(path, lines)
        else:
            mapping = _as_we_read(path, lines)
        config = cls.from_mapping(mapping)
        if not foreign:
            return config
        if config.transient_store_pool_enable:  # it was meant for the broker's memory
            config = config.replace(transient_store_pool_enable=False)
            foreign["transientStorePoolEnable"] = "true"
        if "file_reserved_time" not in config.given:
            config = config.replace(file_reserved_time=DEFAULT_RESERVED_HOURS)
        kept = tuple((key, foreign[key]) for key in RELEVANT if key in foreign)
        return config.replace(broker_settings=kept, given=frozenset(setting.name for setting in settings()))

    def is_callers(self, name: str) -> bool:
        """Whether a caller chose the value of a field; False if it is the store's or the default."""
        return name not in self.stored and self.is_given(name)

    def completed(self, stored: StoreConfig) -> StoreConfig:
        """These settings, with those that live with the store where the caller gave none.

        What an earlier call took from the store, and the store does not have any more, is the default again.

        Parameters
        ----------
        stored : StoreConfig
            The store's settings are those in its `given`.

        Examples
        --------
        >>> from messagestore import StoreConfig
        >>> stored = StoreConfig(max_message_size=1024, lock_timeout="5s")
        >>> config = StoreConfig(lock_timeout="1s").completed(stored)
        >>> config.max_message_size, config.lock_timeout
        (1024, '1s')
        """
        taken = {name: getattr(stored, name) for name in stored.given if not self.is_callers(name)}
        pool = "transient_store_pool_enable"
        if taken.get(pool) and taken.get("flush_disk_type", self.flush_disk_type) != ASYNC_FLUSH:
            del taken[pool]  # the caller wants SYNC_FLUSH, with which there is no pool
        if not taken and not self.stored:
            return self
        defaults = _defaults()
        back = {name: getattr(defaults, name) for name in self.stored if name not in taken}
        given = (self.given - self.stored).union(taken)
        return self.replace(**back, **taken, given=given, stored=frozenset(taken))

    def to_mapping(self) -> dict[str, str]:
        """The fields in `given`, with RocketMQ's keys and with values as a properties file has them."""
        values = {name: getattr(self, name) for name, _ in _types() if name in self.given}
        return {
            java_key(name): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in values.items()
        }

    def is_given(self, name: str) -> bool:
        """Whether somebody chose the value of a field, also if it is the default.

        A broker's file chooses every setting: what it leaves out has RocketMQ's default.
        """
        if name in self.given:
            return True
        return bool(getattr(self, name) != getattr(_defaults(), name))  # `dataclasses.replace` notes nothing


def settings() -> list[dataclasses.Field[object]]:
    """The fields of `StoreConfig` that are settings, without `broker_settings`, `given` and `stored`."""
    return [setting for setting in fields(StoreConfig) if setting.metadata.get("setting", True)]


@lru_cache(1)
def _defaults() -> StoreConfig:
    return StoreConfig()


@lru_cache(1)
def _types() -> list[tuple[str, type]]:
    """The name and the type of each setting."""
    types: dict[str, type] = {"int": int, "bool": bool, "str": str}
    return [(setting.name, types[str(setting.type)]) for setting in settings()]


@lru_cache(1)
def _own_keys() -> dict[str, str]:
    """RocketMQ's spelling of each setting, by the same in lower case."""
    return {java_key(setting.name).lower(): java_key(setting.name) for setting in settings()}


def _lines_of(path: str | Path) -> list[Property]:
    """The settings in a file or pipe, each byte as one character. A larger file is refused before it is read whole."""
    with open(path, "rb") as file:  # not through a `Disk`: a settings file belongs to no store
        data = file.read(_MAX_SIZE + 1)
    if len(data) > _MAX_SIZE:
        text = f"{path}: found more than {_MAX_SIZE} bytes, so this is no store.properties file"
        raise ConfigError(text, key=str(path))
    return list(properties_of(data.decode("latin-1")))


def _as_we_read(path: str | Path, lines: list[Property]) -> dict[str, object]:
    """The settings in a file of this project, which is UTF-8.

    Raises
    ------
    ConfigError
        A line is no setting, a key is unknown, or a value is no text.
    """
    values_by_key: dict[str, object] = {}
    blanks: dict[str, int] = {}
    for number, key, value, separator in lines:
        if not separator:
            raise ConfigError(f"{path}: line {number}: found no `=`; allowed is key=value", key=f"line {number}")
        if key.lower() not in _own_keys():
            raise _no_such_setting(path, number, key)
        try:
            values_by_key[key] = value.strip().encode("latin-1").decode("utf-8")
        except UnicodeError:
            fault = "found bytes that are not UTF-8. Give a store.properties file (lines of key=value)"
            raise ConfigError(f"{path}: line {number}: {fault}", key=f"line {number}") from None
        kind = KINDS.get(key, "")
        if value_of(kind, value) != value_of(kind, value.strip()):
            blanks[key] = number
    _tell_of_blanks(str(path), blanks)
    return values_by_key


_POOL = {"transientStorePoolEnable"}
"""Ignored in a broker's own file, where it was meant for the broker's memory."""


def _as_a_broker_reads(path: str | Path, lines: list[Property]) -> tuple[dict[str, object], dict[str, str]]:
    """The settings of a store in a broker's file, and all others that RocketMQ knows.

    Raises
    ------
    ConfigError
        A key looks like one that counts here, and RocketMQ does not know it.
    """
    own: dict[str, object] = {}
    foreign: dict[str, str] = {}
    unknown: list[int] = []
    misread: dict[str, int] = {}
    for number, key, text, _ in lines:
        is_own, brokers = key.lower() in _own_keys(), broker_key(key)
        if brokers is None and is_own:  # nobody but this project reads it
            own[key] = text.strip()
        elif brokers == key:
            value = value_of(KINDS[key], text)
            taken: dict[str, Any] = own if is_own else foreign
            taken.pop(key, None)  # the last line counts, also where it leaves the default
            misread.pop(key, None)
            if value is not None or not is_own:
                taken[key] = value or ""
            if value is None or (KINDS[key] == "boolean" and text.lower() not in ("true", "false")):
                misread[key] = number
        elif is_own or _near(key) or brokers in RELEVANT:
            raise _no_such_setting(path, number, key)
        else:
            unknown.append(number)
    ignored = sorted({*foreign, *(_POOL & own.keys())} - {*RELEVANT}) if foreign else []
    _list_once(str(path), ignored, unknown, misread)
    return own, foreign


def _near(key: str) -> str:
    """The setting of a store that a key is most like; empty if it is like none."""
    return next(iter(difflib.get_close_matches(key, _own_keys().values(), 1)), "")


def _no_such_setting(path: str | Path, number: int, key: str) -> ConfigError:
    near = _own_keys().get(key.lower()) or broker_key(key) or _near(key)
    fault = (
        f"{key}: no such setting. Did you mean {near}?"
        if near
        else f"found a key that is no setting. The settings are {', '.join(_own_keys().values())}"
    )
    return ConfigError(f"{path}: line {number}: {fault}", key=f"line {number}")


def _list_once(path: str, keys: list[str], lines: list[int], misread: dict[str, int]) -> None:
    """Log, once for a file, which settings of a broker were ignored, and which are not what they seem."""
    if path in _listed:
        return
    _listed.add(path)

    names = ", ".join(keys)
    passed_over = f"; {len(keys)} of its settings do not concern a store and were ignored: {names}" if keys else ""
    more = f". RocketMQ 5.5 does not know the settings in lines {', '.join(map(str, lines))}" if lines else ""
    _log.warning("%s: this is a RocketMQ broker's file%s%s", path, passed_over, more)

    for key, number in misread.items():
        boolean = KINDS[key] == "boolean"
        _log.warning(
            "%s: line %d: RocketMQ does not read the value of %s as it is meant, and takes %s; so does this project. "
            "Look for a blank at the end of the line",
            path,
            number,
            key,
            "false, as for anything but true" if boolean else "its default, as for anything but a whole number",
        )


def _tell_of_blanks(path: str, blanks: dict[str, int]) -> None:
    """Log, once for a file, which values RocketMQ would not take: a broker's file may have no key of its own."""
    if not blanks or path in _listed:
        return
    _listed.add(path)
    for key, number in blanks.items():
        _log.warning(
            "%s: line %d: there is a blank behind the value of %s. Here it does not count, but a RocketMQ broker would "
            "not take this value. If this is a broker's file, remove the blank",
            path,
            number,
            key,
        )


def java_key(name: str) -> str:
    """`flush_disk_type` -> `flushDiskType`: RocketMQ's spelling of a field."""
    if name == "broker_ip1":
        return "brokerIP1"
    head, *rest = name.split("_")
    return head + "".join("CRC" if word == "crc" else word.capitalize() for word in rest)


def _typed(key: str, kind: str, value: object) -> object:
    if kind == "bool" and not isinstance(value, bool):
        if str(value).lower() not in ("true", "false"):
            raise ConfigError(f"{key}: found {value!r}; allowed is true or false", key=key, value=value)
        return str(value).lower() == "true"
    if kind == "int" and not isinstance(value, int):
        if re.fullmatch(r"-?\d+", str(value)) is None:
            raise ConfigError(f"{key}: found {value!r}; allowed is a whole number", key=key, value=value)
        return int(str(value))
    return value
