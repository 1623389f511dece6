"""`spark/counters`: how often writers met what leaves no trace in the log. It is for monitoring; nothing depends on it.

    {"counters": {"knownBatches": 3, "orphansDeleted": 12, "skippedBatches": 0}, "crc": .., "formatVersion": 1}

`crc` is the CRC-32 of the counters as JSON with sorted keys and without blanks. The file is replaced as a whole. It is
written only when there is something to count, so an ordinary commit does not touch it. A process that is killed before
it has counted leaves the count one short.

Threads: one. Processes: a process that counts holds `spark/counters.lock`.
"""

from __future__ import annotations

import json
import os

from messagestore.errors import CorruptionError
from messagestore.files.disk import Disk, replace_file
from messagestore.files.writer_lock import WriterLock
from messagestore.format.record import crc32

KNOWN_BATCHES, SKIPPED_BATCHES, ORPHANS_DELETED = "knownBatches", "skippedBatches", "orphansDeleted"
NAMES = (KNOWN_BATCHES, SKIPPED_BATCHES, ORPHANS_DELETED)
FORMAT_VERSION = 1
MAX_SIZE = 64 * 1024
_TIMEOUT_S = 1.0


def read_counters(disk: Disk, path: str) -> dict[str, int]:
    """The counters; all are 0 if there is no file.

    Raises
    ------
    CorruptionError
        The file is damaged.
    """
    try:
        data = disk.read(path, MAX_SIZE)
    except (FileNotFoundError, NotADirectoryError):
        return dict.fromkeys(NAMES, 0)

    try:
        fields = json.loads(data)
        counters = {str(name): int(value) for name, value in fields["counters"].items()}
        if fields["formatVersion"] != FORMAT_VERSION or fields["crc"] != crc32(_canonical(counters)):
            raise ValueError("another CRC or format version")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        hint = "It is only for monitoring: delete it, and counting begins anew."
        raise CorruptionError(path, 0, "counters with their CRC", repr(error)[:80], hint=hint) from None
    return {**dict.fromkeys(NAMES, 0), **counters}


def count(disk: Disk, spark: str, **changes: int) -> None:
    """Add to some counters. A damaged file begins anew.

    Parameters
    ----------
    spark : str
        The folder `spark` of the store; it exists.

    Raises
    ------
    StoreLockedError
        Another process counts for longer than a second.
    OSError
        The file cannot be written; it is unchanged.
    """
    path = os.path.join(spark, "counters")
    lock = WriterLock(os.path.join(spark, "counters.lock"))
    try:
        lock.acquire(_TIMEOUT_S, description="counters")
        try:
            counters = read_counters(disk, path)
        except CorruptionError:
            counters = dict.fromkeys(NAMES, 0)

        for name, change in changes.items():
            counters[name] = counters.get(name, 0) + change

        fields = {"counters": counters, "crc": crc32(_canonical(counters)), "formatVersion": FORMAT_VERSION}
        text = json.dumps(fields, sort_keys=True)
        replace_file(disk, path, text.encode("ascii"), via=os.path.join(spark, "counters.new"))
    finally:
        lock.close()


def _canonical(counters: dict[str, int]) -> bytes:
    return json.dumps(counters, sort_keys=True, separators=(",", ":")).encode("ascii")
