"""Which settings does a store have?

`StoreConfig` is frozen. Fields are RocketMQ's key names in snake_case; `conf/store.properties` holds the same keys as
RocketMQ spells them. What must not change once a store exists (file sizes, index slots) is kept in `spark/store.json`.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
from dataclasses import dataclass, fields
from pathlib import Path

from messagestore.errors import ConfigError
from messagestore.layout import CRC_MASK, UNIT

SYNC_FLUSH = "SYNC_FLUSH"
ASYNC_FLUSH = "ASYNC_FLUSH"
MIN_SEGMENT_SIZE = 4096
_MAX_SIZE = 1024 * 1024
"""Most bytes of a settings file."""

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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = {"int": int, "bool": bool, "str": str}[str(field.type)]
            if type(value) is not wanted:
                self._refuse(field.name, f"a value of type {field.type}")
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
        known = {java_key(f.name).lower(): f for f in fields(cls)}
        values: dict[str, object] = {}
        for key, value in mapping.items():
            field = known.get(key.lower())
            if field is None:
                keys = [java_key(f.name) for f in fields(cls)]
                near = difflib.get_close_matches(key, keys, 1)
                hint = f"did you mean {near[0]}?" if near else f"known settings: {', '.join(keys)}"
                raise ConfigError(f"{key}: no such setting; {hint}", key=key, value=value)
            values[field.name] = _typed(java_key(field.name), str(field.type), value)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> StoreConfig:
        """From a `store.properties` file (`key=value` lines, `#` comments).

        An error names the line and what is expected there, and shows nothing of a file that is none: whoever may give
        the path may not be allowed to read the file.
        """
        known = [java_key(field.name) for field in fields(cls)]
        mapping: dict[str, object] = {}
        for number, line in enumerate(_text_of(path).splitlines(), 1):
            text = line.strip()
            if not text or text.startswith(("#", "!")):
                continue
            key, equals, value = (part.strip() for part in text.partition("="))
            if not equals:
                raise ConfigError(f"{path}: line {number}: found no `=`; a line is key=value", key=f"line {number}")
            if key.lower() not in [name.lower() for name in known]:
                near = difflib.get_close_matches(key, known, 1)
                found = (
                    f"{key}: no such setting; did you mean {near[0]}?"
                    if near
                    else (f"found a key that is no setting; known settings: {', '.join(known)}")
                )
                raise ConfigError(f"{path}: line {number}: {found}", key=f"line {number}")
            mapping[key] = value
        return cls.from_mapping(mapping)


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
