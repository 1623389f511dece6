"""Which settings does a store have?

`StoreConfig` is frozen. Fields are RocketMQ's key names in snake_case; `conf/store.properties` holds the same keys as
RocketMQ spells them. What must not change once a store exists (file sizes, index slots) is kept in `spark/store.json`.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import logging
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from messagestore.errors import ConfigError
from messagestore.format.broker_keys import RELEVANT, broker_key
from messagestore.format.layout import CRC_MASK, UNIT

SYNC_FLUSH = "SYNC_FLUSH"
ASYNC_FLUSH = "ASYNC_FLUSH"
MIN_SEGMENT_SIZE = 4096
_MAX_SIZE = 1024 * 1024
"""Most bytes of a settings file."""

_log = logging.getLogger(__name__)
_listed: set[str] = set()
"""Files of brokers whose foreign settings this process has listed."""
T = TypeVar("T")

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(key: str, value: object) -> float:
    """Seconds from `30s`, `500ms`, `1.5m`, or a bare number of seconds.

    Raises
    ------
    ConfigError
        When it is none of these, or negative.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", str(value))
    if match is None:
        raise ConfigError(
            f"{key}: found {value!r}; allowed is a duration such as 500ms, 30s, 2m, 1h", key=key, value=value
        )
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def _no_setting(default: T) -> T:
    """A field that is no setting: configurations that differ in it alone are equal."""
    return field(default=default, repr=False, compare=False, metadata={"setting": False})


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of a store; sizes in bytes, times in ms unless the name says otherwise.

    Raises
    ------
    ConfigError
        When a value is of the wrong type or out of range.
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
    flush_interval_commit_log: int = 500
    flush_commit_log_least_pages: int = 4
    flush_commit_log_thorough_interval: int = 10_000
    enabled_append_prop_crc: bool = False
    check_crc_on_recover: bool = True
    auto_message_version_on_topic_len: bool = True
    broker_ip1: str = "127.0.0.1"
    listen_port: int = 10911
    preallocate: bool = False
    clean_interval: str = "60s"
    attach_timeout: str = "20s"
    lock_timeout: str = "30s"
    file_mode: str = ""
    journal_retention: int = 10_000
    proven_tail_size: int = 1024 * 1024 * 1024
    fail_on_unproven: bool = False
    broker_settings: tuple[tuple[str, str], ...] = _no_setting(())
    """What a broker's own file says about who may write, and how: key and value."""
    given: frozenset[str] = _no_setting(frozenset())
    """Fields whose values a file or a mapping gave."""

    def __post_init__(self) -> None:
        for each in settings():
            value = getattr(self, each.name)
            wanted = {"int": int, "bool": bool, "str": str}[str(each.type)]
            if type(value) is not wanted:
                self._refuse(each.name, f"a value of type {each.type}")
        for name in ("mapped_file_size_commit_log",):
            self._check_range(name, MIN_SEGMENT_SIZE, CRC_MASK)
        # Room for two units at least: RocketMQ's own recovery never ends where a queue file of one unit is full.
        self._check_range("mapped_file_size_consume_queue", UNIT.size + 1, CRC_MASK // UNIT.size * UNIT.size)
        if self.mapped_file_size_consume_queue % UNIT.size:  # RocketMQ rounds up, too
            rounded = -(-self.mapped_file_size_consume_queue // UNIT.size) * UNIT.size
            object.__setattr__(self, "mapped_file_size_consume_queue", rounded)
        self._check_range("max_hash_slot_num", 1, 500_000_000)
        self._check_range("max_index_num", 2, 100_000_000)
        self._check_range("max_message_size", 10, 1024 * 1024 * 1024)
        self._check_range("max_msgs_num_batch", 1, 1_000_000)
        self._check_range("sync_flush_timeout", 1, 3_600_000)
        self._check_range("flush_interval_commit_log", 1, 3_600_000)
        self._check_range("flush_commit_log_least_pages", 0, 1_000_000)
        self._check_range("flush_commit_log_thorough_interval", 1, 3_600_000)
        self._check_range("listen_port", 0, 65535)
        self._check_range("journal_retention", 1, 1_000_000)
        self._check_range("proven_tail_size", 0, 1 << 40)
        if self.flush_disk_type not in (SYNC_FLUSH, ASYNC_FLUSH):
            self._refuse("flush_disk_type", f"{SYNC_FLUSH} or {ASYNC_FLUSH}")
        try:
            ipaddress.ip_address(self.broker_ip1.replace("%", " "))  # an address in a record has no zone
        except ValueError:
            self._refuse("broker_ip1", "an IPv4 or IPv6 address without a zone")
        for name in ("clean_interval", "attach_timeout", "lock_timeout"):
            duration_s(java_key(name), getattr(self, name))
        if self.file_mode and re.fullmatch("0?6[046][046]", self.file_mode) is None:
            self._refuse("file_mode", "0600, 0640, 0644, 0660, 0664 or 0666; left out: as the root folder's group")

    def _check_range(self, name: str, least: int, most: int) -> None:
        if not least <= getattr(self, name) <= most:
            self._refuse(name, f"{least} to {most}")

    def _refuse(self, name: str, allowed: str) -> None:
        key, value = java_key(name), getattr(self, name)
        raise ConfigError(f"{key}: found {value!r}; allowed is {allowed}", key=key, value=value)

    @property
    def clean_interval_s(self) -> float:
        """Least time between two moves of the clean end."""
        return duration_s("cleanInterval", self.clean_interval)

    @property
    def attach_timeout_s(self) -> float:
        """How long a writer stays attached after its last append."""
        return duration_s("attachTimeout", self.attach_timeout)

    @property
    def lock_timeout_s(self) -> float:
        """How long an append waits for another writer."""
        return duration_s("lockTimeout", self.lock_timeout)

    @property
    def file_mode_bits(self) -> int | None:
        """Mode of new files; None: `store_root` decides by the root folder."""
        return int(self.file_mode, 8) if self.file_mode else None

    def replace(self, **changes: object) -> StoreConfig:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @classmethod
    def from_mapping(cls, mapping: dict[str, object]) -> StoreConfig:
        """From RocketMQ's key names (any case); values may be text, as in a properties file."""
        known = {java_key(f.name).lower(): f for f in settings()}
        values: dict[str, object] = {}
        for key, value in mapping.items():
            each = known.get(key.lower())
            if each is None:
                keys = [java_key(f.name) for f in settings()]
                near = difflib.get_close_matches(key, keys, 1)
                hint = f"did you mean {near[0]}?" if near else f"known settings: {', '.join(keys)}"
                raise ConfigError(f"{key}: no such setting; {hint}", key=key, value=value)
            values[each.name] = _typed(java_key(each.name), str(each.type), value)
        values["given"] = frozenset(values)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> StoreConfig:
        """From a `store.properties` file (`key=value` lines, `#` comments), or a broker's own file.

        A file with a key that only RocketMQ knows is a broker's. What a store does not have is passed over then, and
        listed once in the log; `broker_settings` keeps what a writer must know. In any other file such keys are
        refused.

        An error names the line and what is expected there, and shows nothing of a file that is none: whoever may give
        the path may not be allowed to read the file.
        """
        own = {java_key(each.name).lower(): java_key(each.name) for each in settings()}
        mapping: dict[str, object] = {}
        foreign: dict[str, str] = {}
        unknown: list[tuple[int, str]] = []
        for number, line in enumerate(_text_of(path).splitlines(), 1):
            text = line.strip()
            if not text or text.startswith(("#", "!")):
                continue
            key, equals, value = (part.strip() for part in text.partition("="))
            if not equals:
                raise ConfigError(f"{path}: line {number}: found no `=`; a line is key=value", key=f"line {number}")
            brokers = broker_key(key)
            if key.lower() in own:
                mapping[key] = value
            elif brokers is not None:
                foreign[brokers] = value
            else:
                unknown.append((number, key))
        for number, key in unknown:
            near = difflib.get_close_matches(key, own.values(), 1)
            if near or not foreign:
                found = (
                    f"{key}: no such setting; did you mean {near[0]}?"
                    if near
                    else f"found a key that is no setting; known settings: {', '.join(own.values())}"
                )
                raise ConfigError(f"{path}: line {number}: {found}", key=f"line {number}")
        config = cls.from_mapping(mapping)
        if not foreign:
            return config
        _list_once(str(path), sorted(foreign), [number for number, _ in unknown])
        kept = tuple((key, foreign[key]) for key in RELEVANT if key in foreign)
        return config.replace(broker_settings=kept, given=frozenset(each.name for each in settings()))

    def is_given(self, name: str) -> bool:
        """Whether somebody chose the value of a field: a broker's file chooses RocketMQ's default by leaving it out."""
        return name in self.given or getattr(self, name) != getattr(StoreConfig(), name)


def settings() -> list[dataclasses.Field[object]]:
    """The fields of `StoreConfig` that are settings."""
    return [each for each in fields(StoreConfig) if each.metadata.get("setting", True)]


def _list_once(path: str, keys: list[str], lines: list[int]) -> None:
    """Say which settings of a broker's file were passed over; once a process."""
    if path in _listed:
        return
    _listed.add(path)
    more = f"; lines that RocketMQ 5.3 does not know: {', '.join(map(str, lines))}" if lines else ""
    _log.warning(
        "%s: a RocketMQ broker's file; %d settings in it are none of a store and were passed over: %s%s",
        path,
        len(keys),
        ", ".join(keys),
        more,
    )


def _text_of(path: str | Path) -> str:
    """The text of a settings file, or of a pipe; not more than such a file has."""
    with open(path, "rb") as file:  # a setting's file belongs to no store: not through its disk
        data = file.read(_MAX_SIZE + 1)
    if len(data) > _MAX_SIZE:
        text = f"{path}: found more than {_MAX_SIZE} bytes; a store.properties file is smaller"
        raise ConfigError(text, key=str(path))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        text = f"{path}: found bytes that are no UTF-8; give a store.properties file (key=value lines)"
        raise ConfigError(text, key=str(path)) from None


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
