"""`spark/broker.json`: the name of the broker whose store this is. Reading and writing messages does not depend on it.

    {"brokerName": "broker-a", "crc": .., "formatVersion": 1}

`crc` is the CRC-32 of the name in UTF-8. The file exists only if a writer gave a name. It is replaced as a whole, by a
process that holds the writer lock. `spark/store.json` does not hold the name, because that file is written once.
"""

from __future__ import annotations

import json

from messagestore.errors import CorruptionError
from messagestore.files.disk import Disk, replace_file
from messagestore.format.config import is_broker_name
from messagestore.format.record import crc32

FORMAT_VERSION = 1
MAX_SIZE = 4096


def read_broker_name(disk: Disk, path: str) -> str:
    """The name; empty if there is no file.

    Raises
    ------
    CorruptionError
        The file is damaged.
    """
    try:
        data = disk.read(path, MAX_SIZE)
    except (FileNotFoundError, NotADirectoryError):
        return ""

    try:
        fields = json.loads(data)
        name = fields["brokerName"]
        if fields["formatVersion"] != FORMAT_VERSION or not is_broker_name(name) or fields["crc"] != _crc(name):
            raise ValueError("another name, CRC or format version")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        hint = "The messages do not depend on it: delete it, and give `brokerName` again when you write."
        raise CorruptionError(path, 0, "a broker's name with its CRC", repr(error)[:80], hint=hint) from None
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
    fields = {"brokerName": name, "crc": _crc(name), "formatVersion": FORMAT_VERSION}
    replace_file(disk, path, json.dumps(fields, sort_keys=True).encode("ascii"), via=via)


def _crc(name: str) -> int:
    return crc32(name.encode("utf-8"))
