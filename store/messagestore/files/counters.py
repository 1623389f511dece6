"""`spark/counters`: how often writers met what leaves no trace in the log. It is for monitoring; nothing depends on it.

    {"counters": {"knownBatches": 3, "orphansDeleted": 12, "skippedBatches": 0}, "crc": .., "formatVersion": 1}

`deadLetters:TOPIC` counts the batches that have put dead letters into a topic, so that monitoring knows the topic.

The file is one of `checked_json`. It is written only when there is something to count, so an ordinary commit does not
touch it. A process that is killed before it has counted leaves the count one short.

Threads: one. Processes: a process that counts holds `spark/counters.lock`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from messagestore.errors import CorruptionError
from messagestore.files.checked_json import read_fields, write_fields
from messagestore.files.disk import Disk
from messagestore.files.writer_lock import WriterLock

KNOWN_BATCHES, SKIPPED_BATCHES, ORPHANS_DELETED = "knownBatches", "skippedBatches", "orphansDeleted"
NAMES = (KNOWN_BATCHES, SKIPPED_BATCHES, ORPHANS_DELETED)
DEAD_LETTERS = "deadLetters:"
MAX_SIZE = 64 * 1024
_TIMEOUT_S = 1.0


def read_counters(disk: Disk, path: str) -> dict[str, int]:
    """The counters; all are 0 if there is no file.

    Raises
    ------
    CorruptionError
        The file is damaged.
    """
    hint = "It is only for monitoring: delete it, and counting begins anew."
    counters = read_fields(disk, path, MAX_SIZE, _counters, what="counters", hint=hint)
    return {**dict.fromkeys(NAMES, 0), **(counters or {})}


def _counters(fields: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(value) for name, value in fields["counters"].items()}


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

        write_fields(disk, path, {"counters": counters}, via=os.path.join(spark, "counters.new"))
    finally:
        lock.close()
