"""Mutants of how a broker's files of settings are changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from crash.mutants_hygiene import hostile
from crash.planting import Mutant, patched
from messagestore.files import broker_name, config_file
from messagestore.files.config_file import ConfigFile
from messagestore.files.disk import Disk
from messagestore.files.subscription_groups import SubscriptionGroupConfig
from messagestore.puts import Puts


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


MUTANTS = (
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
        patched(broker_name, "replace_file", in_place),
        "fuzz: the name of a broker, killed",
        hostile("the name of a broker, killed"),
    ),
    Mutant(
        "the name of a broker gets its name unsynced",
        patched(broker_name, "replace_file", unsynced),
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
