"""`spark/settings.json`: the settings that live with a store, for every process that gives none of its own.

    {"crc": .., "formatVersion": 1, "settings": {"fileReservedTime": "168", "flushDiskType": "ASYNC_FLUSH"}}

The keys are RocketMQ's, and the values are text, as in a properties file. `crc` is the CRC-32 of the settings as JSON
with sorted keys: a flipped bit in `fileReservedTime` would delete messages. The file exists once a setting was stored.
It is replaced as a whole, by a process that holds the writer lock. What is fixed in a store stands in `store.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from messagestore.errors import ConfigError, CorruptionError
from messagestore.files.disk import Disk, replace_file
from messagestore.format.config import StoreConfig
from messagestore.format.record import crc32

FORMAT_VERSION = 1
MAX_SIZE = 1 << 20


def read_settings(disk: Disk, path: str) -> StoreConfig:
    """The stored settings as a configuration in which only they are given; the defaults if there is no file.

    Raises
    ------
    CorruptionError
        The file is damaged, or holds what is no setting.
    """
    try:
        data = disk.read(path, MAX_SIZE)
    except (FileNotFoundError, NotADirectoryError):
        return StoreConfig()
    try:
        fields = json.loads(data)
        settings = fields["settings"]
        if fields["formatVersion"] != FORMAT_VERSION or fields["crc"] != _crc(settings):
            raise ValueError("another CRC or format version")
        return StoreConfig.from_mapping(settings)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ConfigError) as error:
        hint = (
            "The messages do not depend on it. Restore the file from a copy; or delete it, and set the store's "
            "settings again with `messagestore config ROOT set NAME=VALUE`."
        )
        raise CorruptionError(path, 0, "a store's settings with their CRC", repr(error)[:160], hint=hint) from None


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
    fields = {"crc": _crc(settings), "formatVersion": FORMAT_VERSION, "settings": dict(settings)}
    replace_file(disk, path, json.dumps(fields, sort_keys=True).encode("ascii"), via=via)


def _crc(settings: Mapping[str, str]) -> int:
    return crc32(json.dumps(dict(settings), sort_keys=True).encode("ascii"))
