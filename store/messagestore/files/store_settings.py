"""`spark/settings.json`: the settings that live with a store, for every process that gives none of its own.

    {"crc": .., "formatVersion": 1, "settings": {"fileReservedTime": "168", "flushDiskType": "ASYNC_FLUSH"}}

The keys are RocketMQ's, and the values are text, as in a properties file. The file is one of `checked_json`: a flipped
bit in `fileReservedTime` would delete messages. It exists once a setting was stored, and is written by a process that
holds the writer lock. What is fixed in a store stands in `store.json`.
"""

from __future__ import annotations

from collections.abc import Mapping

from messagestore.files.checked_json import read_fields, write_fields
from messagestore.files.disk import Disk
from messagestore.format.config import StoreConfig

MAX_SIZE = 1 << 20


def read_settings(disk: Disk, path: str) -> StoreConfig:
    """The stored settings as a configuration in which only they are given; the defaults if there is no file.

    Raises
    ------
    CorruptionError
        The file is damaged, or holds what is no setting.
    """
    hint = (
        "The messages do not depend on it. Restore the file from a copy; or delete it, and set the store's settings "
        "again with `messagestore config ROOT set NAME=VALUE`."
    )
    settings = read_fields(
        disk,
        path,
        MAX_SIZE,
        lambda fields: StoreConfig.from_mapping(fields["settings"]),
        what="a store's settings",
        hint=hint,
    )
    return StoreConfig() if settings is None else settings


def write_settings(disk: Disk, path: str, settings: Mapping[str, str], *, via: str) -> None:
    """Replace the file, and sync it.

    Parameters
    ----------
    settings : mapping of str to str
        RocketMQ's keys, with values as a properties file has them.
    via : str
        The path at which the new file is made before it gets its name.

    Raises
    ------
    OSError
        The file cannot be written; it is unchanged.
    """
    write_fields(disk, path, {"settings": dict(settings)}, via=via)
