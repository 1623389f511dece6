"""The small files of `spark/` that hold fields in JSON with their CRC. What the fields mean is said by their modules.

    {"crc": .., "formatVersion": 1, ..}

`crc` is the CRC-32 of the other fields as JSON with sorted keys. A file is replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from messagestore.errors import ConfigError, CorruptionError, NotAStoreError
from messagestore.files.disk import Disk, replace_file
from messagestore.format.record import crc32
from messagestore.signal_handlers import pass_on

FORMAT_VERSION = 1
_Taken = TypeVar("_Taken")


def read_fields(
    disk: Disk, path: str, max_size: int, take: Callable[[Mapping[str, Any]], _Taken], *, what: str, hint: str
) -> _Taken | None:
    """What `take` makes of the fields; None if there is no file.

    Parameters
    ----------
    max_size : int
        Bytes. Nothing writes a larger file.
    take : callable
        Gets the fields. What it raises says that they are not what the file's module writes.
    what, hint : str
        For an error: what the file holds, and what to do.

    Raises
    ------
    CorruptionError
        The file is damaged.
    NotAStoreError
        Another release wrote the file.
    """
    try:
        data = disk.read(path, max_size)
    except (FileNotFoundError, NotADirectoryError) as error:
        pass_on(error)
        return None

    try:
        fields = json.loads(data)
        if fields.pop("crc") != _crc(fields):
            raise ValueError("another CRC")
        version = fields.pop("formatVersion")
        if version != FORMAT_VERSION:
            raise NotAStoreError.of_version(path, version, FORMAT_VERSION)
        return take(fields)
    except NotAStoreError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, ConfigError) as error:
        pass_on(error)
        raise CorruptionError(path, 0, f"{what} with their CRC", repr(error)[:160], hint=hint) from None


def as_file(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a file."""
    fields = {"formatVersion": FORMAT_VERSION, **fields}
    return json.dumps({"crc": _crc(fields), **fields}, sort_keys=True).encode("ascii")


def write_fields(disk: Disk, path: str, fields: Mapping[str, Any], *, via: str) -> None:
    """Replace a file, and sync it.

    Parameters
    ----------
    via : str
        The path at which the new file is made before it gets its name.

    Raises
    ------
    OSError
        The file cannot be written; it is unchanged.
    """
    replace_file(disk, path, as_file(fields), via=via)


def _crc(fields: Mapping[str, Any]) -> int:
    return crc32(json.dumps(dict(fields), sort_keys=True).encode("ascii"))
