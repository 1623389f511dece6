"""Mutants of how a broker's files of settings are changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from crash.mutants_hygiene import hostile
from crash.planting import Mutant, patched
from messagestore import session
from messagestore.files import checked_json, config_file
from messagestore.files.config_file import ConfigFile
from messagestore.files.disk import Disk
from messagestore.files.store_settings import read_settings
from messagestore.files.subscription_groups import SubscriptionGroupConfig
from messagestore.format.config import StoreConfig
from messagestore.puts import Puts
from messagestore.shared_settings import stored_with


def in_place(_: Any) -> Any:
    """The file is removed, and written again under its own name."""

    def write(disk: Disk, path: str, data: bytes, *, via: str) -> None:
        disk.unlink(path)
        with disk.open_new(path, 0) as file:
            disk.pwrite(file, data, 0)
            disk.fdatasync(file)
        disk.fsync_dir(os.path.dirname(path))

    return write


def unsynced(_: Any) -> Any:
    """The new file gets its name before its bytes are on the disk."""

    def write(disk: Disk, path: str, data: bytes, *, via: str) -> None:
        with disk.open_new(via, 0) as file:
            disk.pwrite(file, data, 0)
        disk.rename(via, path)
        disk.fsync_dir(os.path.dirname(path))

    return write


def believes_the_copy(real: Any) -> Any:
    """That the file was damaged is forgotten when its `.bak` could be read."""

    def load(file: ConfigFile, parse: Any) -> Any:
        result = real(file, parse)
        file.damage = None
        return result

    return load


def drops_others(real: Any) -> Any:
    """Only the settings that this project uses are written."""

    def to_fields(group: SubscriptionGroupConfig) -> dict[str, Any]:
        return {name: value for name, value in real(group).items() if name not in group.others}

    return to_fields


def asks_nobody(_: Any) -> Any:
    """Whoever has a session may change the files."""

    @contextlib.contextmanager
    def configuring(store: Any) -> Iterator[Any]:
        with store.writer.mutex:
            yield store.writer

    return configuring


def keeps_nothing(_: Any) -> Any:
    """What was stored before is forgotten with each change."""
    return lambda before, changes: stored_with(StoreConfig(), {k: v for k, v in changes.items() if v is not None})


def looks_once(_: Any) -> Any:
    """A process keeps the settings that it read first."""
    first: dict[str, StoreConfig] = {}

    def read(disk: Disk, path: str) -> StoreConfig:
        return first.setdefault(path, read_settings(disk, path))

    return read


def overrules(_: Any) -> Any:
    """The store's settings win over those that a caller gives."""

    def completed(config: StoreConfig, stored: StoreConfig) -> StoreConfig:
        return config.replace(**{name: getattr(stored, name) for name in stored.given}, lock_timeout="30s")

    return completed


MUTANTS = (
    Mutant(
        "settings of a store are written in place",
        patched(checked_json, "replace_file", in_place),
        "fuzz: settings of a store, killed",
        hostile("settings of a store, killed"),
    ),
    Mutant(
        "settings of a store get their name unsynced",
        patched(checked_json, "replace_file", unsynced),
        "fuzz: settings of a store, killed",
        hostile("settings of a store, killed"),
    ),
    Mutant(
        "a change of one stored setting forgets the others",
        patched(session, "stored_with", keeps_nothing),
        "fuzz: settings of a store, killed",
        hostile("settings of a store, killed"),
    ),
    Mutant(
        "an attached process keeps the stored settings that it read first",
        patched(session, "read_settings", looks_once),
        "fuzz: settings of a store, by several processes",
        hostile("settings of a store, by several processes"),
    ),
    Mutant(
        "stored settings overrule what a caller gives",
        patched(StoreConfig, "completed", overrules),
        "fuzz: settings of a store, killed",
        hostile("settings of a store, killed"),
    ),
    Mutant(
        "settings of groups are written in place",
        patched(config_file, "replace_file", in_place),
        "fuzz: settings of a group, killed",
        hostile("settings of a group, killed"),
    ),
    Mutant(
        "settings of groups get their name unsynced",
        patched(config_file, "replace_file", unsynced),
        "fuzz: settings of a group, killed",
        hostile("settings of a group, killed"),
    ),
    Mutant(
        "the name of a broker is written in place",
        patched(checked_json, "replace_file", in_place),
        "fuzz: the name of a broker, killed",
        hostile("the name of a broker, killed"),
    ),
    Mutant(
        "the name of a broker gets its name unsynced",
        patched(checked_json, "replace_file", unsynced),
        "fuzz: the name of a broker, killed",
        hostile("the name of a broker, killed"),
    ),
    Mutant(
        "a damaged table of groups is written over",
        patched(ConfigFile, "load", believes_the_copy),
        "fuzz: settings of groups, damaged",
        hostile("settings of groups, damaged"),
    ),
    Mutant(
        "settings of a group that are not ours are dropped",
        patched(SubscriptionGroupConfig, "to_fields", drops_others),
        "fuzz: settings of groups, damaged",
        hostile("settings of groups, damaged"),
    ),
    Mutant(
        "a session without the lock changes settings",
        patched(Puts, "configuring", asks_nobody),
        "fuzz: settings changed without the lock",
        hostile("settings changed without the lock"),
    ),
)
