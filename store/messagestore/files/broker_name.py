"""`spark/broker.json`: the name of the broker whose store this is. Reading and writing messages does not depend on it.

    {"brokerName": "broker-a", "crc": .., "formatVersion": 1}

The file is one of `checked_json`, and exists only if a writer gave a name. It is written by a process that holds the
writer lock. `spark/store.json` does not hold the name, because that file is written once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from messagestore.errors import CorruptionError
from messagestore.files.checked_json import read_fields, write_fields
from messagestore.files.disk import Disk
from messagestore.format.config import is_broker_name

MAX_SIZE = 4096
_log = logging.getLogger(__name__)


def read_broker_name(disk: Disk, path: str) -> str:
    """The name; empty if there is no file.

    Raises
    ------
    CorruptionError
        The file is damaged.
    """
    hint = "The messages do not depend on it: delete it, and give `brokerName` again when you write."
    return read_fields(disk, path, MAX_SIZE, _name, what="a broker's name", hint=hint) or ""


def _name(fields: Mapping[str, Any]) -> str:
    name = fields["brokerName"]
    if not is_broker_name(name):
        raise ValueError("no broker's name")
    return str(name)


def write_broker_name(disk: Disk, path: str, name: str, *, via: str) -> None:
    """Replace the file.

    Parameters
    ----------
    via : str
        The path at which the new file is made before it gets its name.

    Raises
    ------
    OSError
        The file cannot be written; it is unchanged.
    """
    write_fields(disk, path, {"brokerName": name}, via=via)


def keep_broker_name(disk: Disk, path: str, name: str, *, via: str) -> None:
    """Write a name that a writer gives, if the store has another one.

    Of several writers, the last one that gives a name counts. A damaged file is replaced.

    Raises
    ------
    OSError
        As for `write_broker_name`.
    """
    old_name = ""
    with contextlib.suppress(CorruptionError):
        old_name = read_broker_name(disk, path)
    if old_name == name:
        return

    write_broker_name(disk, path, name, via=via)
    if old_name:
        _log.warning(
            "%s: the name of the store's broker was %r and is %r now. Give all writers of a store the same brokerName",
            path,
            old_name,
            name,
        )
