"""Checks that the queue files still hold what they held when the clean end last moved.

`spark/ends` holds the seal of each queue (`sealed_ends`). A file that was cut, zeroed, deleted or replaced by an older
copy does not match its seal. The log still has everything, so the queue is rebuilt from it.

    a writer        compares a queue's last unit when it first asks for the queue's end
    a reader        does the same in a store that was closed, and raises
    `recover`       compares all units of all queues with their CRC

If the file lags behind the clean end because a process died between the two writes, the log records in between supply
the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from messagestore.errors import CorruptionError
from messagestore.files.consume_queue import ConsumeQueue, pack_few, queue_directory, unit_bytes, units_of
from messagestore.format import record
from messagestore.format.layout import FILLER_UNIT_SIZE
from messagestore.format.message import is_own_topic
from messagestore.log.sealed_ends import Key, Seal, SealedEnds
from messagestore.log.store_files import StoreFiles
from messagestore.log.walk import Depth, Walk, rows_of
from messagestore.signal_handlers import pass_on

MOST_BEHIND = 1 << 30
"""At most this many bytes of the log are read to find out what the file does not say."""
REBUILD_HINT = "The messages are in the log. `messagestore recover` rebuilds the queue from it."
_CHUNK = 50_000


class Fault(NamedTuple):
    """Describes what is wrong with a queue's files."""

    path: str
    position: int
    expected: str
    found: str

    def error(self) -> CorruptionError:
        """Return the error for callers that cannot repair the queue."""
        return CorruptionError(self.path, self.position, self.expected, self.found, hint=REBUILD_HINT)


def sealed_at(files: StoreFiles, clean_end: int, visible_end: int) -> SealedEnds:
    """Return where the queues end in the log below `visible_end`, as far as it is known.

    Parameters
    ----------
    files : StoreFiles
    clean_end : int
        C of `state`: later blocks of the file belong to another history.
    visible_end : int
        Where the dispatched log ends; above C the log is read.
    """
    ends = SealedEnds.read(files.disk, files.paths.ends, clean_end)
    if not ends.anchor.is_in(files.commit_log) or visible_end - ends.clean_end > MOST_BEHIND:
        return SealedEnds()
    try:
        take_in(files, ends, ends.clean_end, visible_end)
    except CorruptionError:  # a record is damaged: whoever reads it gets the error
        return SealedEnds()
    return ends


def take_in(files: StoreFiles, ends: SealedEnds, start: int, end: int) -> None:
    """Add the units of the records in a part of the log that only this project wrote."""
    for run in Walk(files.commit_log, start, end, Depth.FRAMING).whole():
        read = rows_of(run)
        units = units_of(read)
        for key, rows in read.by_queue().items():
            offsets = read.queue_offsets[rows]
            if (np.diff(offsets) != 1).any():
                ends.ask(key)
            else:
                ends.extend(key, int(offsets[0]), unit_bytes(units[rows]))


# ---- checks


def fault_of(files: StoreFiles, ends: SealedEnds, key: Key, *, thorough: bool = False) -> Fault | None:
    """Return what is wrong with a queue's files; None if nothing is, or if nothing is known about the queue.

    Parameters
    ----------
    thorough : bool
        Check all units. Otherwise check only the last one, in one small read.
    """
    expected, seal = ends.end_of(key), ends.seals.get(key)
    if not expected:
        return None

    directory = queue_directory(files.paths.root, *key)
    wanted = f"{expected} units of {key[0]}/{key[1]}, as at the clean end"
    try:
        queue = files.queue(*key)
        if not queue.offsets:
            if is_deleted(files, key):
                return None
            return Fault(directory, 0, wanted, "no file")

        path, position = queue.place(expected - 1)
        units = queue.read(expected - 1, 1)
        sealed = key not in ends.unsealed and seal is not None

        start = queue.first_file_queue_offset
        if start and not files.commit_log.min_offset and int(queue.read(start, 1)["size"][0]) != FILLER_UNIT_SIZE:
            return Fault(directory, 0, f"{wanted}: the log begins at 0", f"units from {start} on")

        if not len(units) or (int(units["size"][0]) <= 0 and not sealed):
            return Fault(path, position, wanted, f"{queue.end()}")
        if sealed and seal is not None and units[0].item() != (seal.physical_offset, seal.size, seal.tags_code):
            return Fault(path, position, wanted, f"another last unit, {units[0].item()}")
        return _fault_inside(queue, seal, key, wanted) if thorough and sealed and seal is not None else None
    except CorruptionError as error:
        return Fault(error.path, error.physical_offset, error.expected, error.found)
    except FileNotFoundError as error:
        pass_on(error)
        return Fault(str(error.filename), 0, wanted, "no file")


def is_deleted(files: StoreFiles, key: Key) -> bool:
    """Whether a broker has deleted a queue's topic: it removes the name from `topics.json`, and deletes the folder."""
    topic, folder = key[0], os.path.dirname(queue_directory(files.paths.root, *key))
    return not is_own_topic(topic) and topic not in files.topics.names and not files.disk.is_folder(folder)


def number_left(files: StoreFiles, ends: SealedEnds, key: Key) -> int:
    """Return the number with which a queue goes on that has no files, and no messages in the log; 0: none is known.

    Retention leaves the newest file of such a queue, so somebody else removed it. Its seal still has the last unit.
    """
    seal = ends.seals.get(key)
    if seal is None or key in ends.unsealed or seal.physical_offset >= files.commit_log.min_offset:
        return 0
    return 0 if is_deleted(files, key) else seal.end


def keep_number(files: StoreFiles, ends: SealedEnds, key: Key) -> None:
    """Make again the last unit of a queue that has no message left, from its seal, so that the queue numbers on.

    This is for a queue that has just been rebuilt from the log, which cannot give this unit back. RocketMQ, too, takes
    the number after the last unit.
    """
    queue, end = files.queue(*key), number_left(files, ends, key)
    if end and not queue.offsets:
        seal = ends.seals[key]
        queue.append(end - 1, _last_unit(seal))
        files.mark_written(*key, queue)


def renew_seal(files: StoreFiles, ends: SealedEnds, key: Key) -> None:
    """Let the seal of a queue that was rebuilt cover no units that the log could not give back."""
    seal = ends.seals.get(key)
    if seal is not None and key not in ends.unsealed and is_without_crc(files, key, seal):
        ends.answer(key, Seal.of(seal.end - 1, _last_unit(seal)))


def _last_unit(seal: Seal) -> bytes:
    return pack_few([(seal.physical_offset, seal.size, seal.tags_code)])


def _fault_inside(queue: ConsumeQueue, seal: Seal, key: Key, wanted: str) -> Fault | None:
    """Return a fault if a unit has changed or is impossible, or if there are units after the last one."""
    crc = 0
    for start in range(queue.first_file_queue_offset, seal.end, _CHUNK):
        units = queue.read(start, min(_CHUNK, seal.end - start))
        crc = record.crc32(unit_bytes(units[max(0, seal.crc_from - start) :]), crc)
        bad = np.flatnonzero((units["size"] <= 0) | (units["physical_offset"] < 0))
        if len(bad):
            path, position = queue.place(start + int(bad[0]))
            return Fault(path, position, f"unit {start + int(bad[0])} of {key[0]}/{key[1]}", str(units[bad[0]].item()))

    if crc != seal.crc and seal.crc_from >= queue.first_file_queue_offset:
        covered = f"the units {seal.crc_from} to {seal.end - 1} of {key[0]}/{key[1]}"
        return Fault(*queue.place(seal.crc_from), f"CRC-32 {seal.crc:08x} of {covered}", f"{crc:08x}")

    if queue.end(hint=seal.end) != seal.end:
        return Fault(*queue.place(seal.end), wanted, "units behind the last one")
    return None


def is_without_crc(files: StoreFiles, key: Key, seal: Seal) -> bool:
    """Whether the first units that a queue's CRC covers were deleted together with their file, or are filler units,
    because the queue was rebuilt after retention had deleted their records.
    """
    queue = files.queue(*key)
    start = queue.first_file_queue_offset
    if not seal.crc_from <= start < seal.end:
        return False
    return seal.crc_from < start or int(queue.read(start, 1)["size"][0]) == FILLER_UNIT_SIZE


def seal_of_file(files: StoreFiles, ends: SealedEnds, key: Key, limit: int) -> Seal | None:
    """Return the seal of a queue according to its file; None if it lacks units that it must have.

    Parameters
    ----------
    limit : int
        Physical offset at which the dispatched log ends.
    """
    end, old = ends.unsealed.get(key), ends.seals.get(key)
    try:
        queue = files.queue(*key)
        if end is None:
            end = queue.end(hint=old.end if old is not None else 0, limit=limit)
        if not end:
            return None

        # Another process may have written since, and its retention deleted the file with the unit behind the seal.
        if old is not None and not (0 < end - old.end <= _CHUNK and queue.first_file_queue_offset <= old.end):
            old = None
        first = old.end if old is not None else end - 1

        units = queue.read(first, end - first)
        if len(units) < end - first or int(units["size"][-1]) <= 0 or int(units["size"][-1]) == FILLER_UNIT_SIZE:
            return None

        seal = Seal.of(first, unit_bytes(units), old)
        return seal if seal.physical_offset + seal.size <= limit else None
    except (CorruptionError, FileNotFoundError) as error:
        pass_on(error)
        return None


def without_last_unit(files: StoreFiles, start: int, end: int, keys: Collection[Key]) -> set[Key]:
    """Return those of some queues whose last record in a part of the log has no unit at its own number.

    This is for queues without a known seal. A queue that has another unit there is left alone, because numbers may
    repeat in a broker's log.
    """
    last: dict[Key, int] = {}
    for run in Walk(files.commit_log, start, end, Depth.FRAMING).whole():
        read = rows_of(run)
        for key, rows in read.by_queue().items():
            if key in keys:
                last[key] = int(read.queue_offsets[rows[-1]])
    return {key for key, number in last.items() if not _has_unit(files, key, number)}


def short_queues(files: StoreFiles, end: int) -> set[Key]:
    """Return the queues with no unit for their last record in the newest segment below the log's end.

    This is for a store whose queues were whole when it was closed, and for which no seal is known. The numbers of units
    and records may differ in a broker's queue, so the place of the record is searched for. A queue without a folder may
    have been deleted with its topic and is left out.
    """
    log = files.commit_log
    if end <= log.min_offset:
        return set()

    with_folder = set(files.queue_keys())
    last: dict[Key, int] = {}
    for run in Walk(log, log.segment_of(end - 1), end, Depth.FRAMING):
        read = rows_of(run)
        for key, rows in read.by_queue().items():
            if key in with_folder:
                last[key] = int(read.physical_offsets[rows[-1]])

    return {key for key, place in last.items() if not _has_unit_of(files, key, place)}


def _has_unit_of(files: StoreFiles, key: Key, physical_offset: int) -> bool:
    with contextlib.suppress(CorruptionError, FileNotFoundError):
        queue = files.queue(*key)
        units = queue.read(queue.search_physical(physical_offset), 1)
        return bool(len(units)) and int(units["physical_offset"][0]) == physical_offset
    return False


def _has_unit(files: StoreFiles, key: Key, number: int) -> bool:
    with contextlib.suppress(CorruptionError, FileNotFoundError):
        units = files.queue(*key).read(number, 1)
        return bool(len(units)) and int(units["size"][0]) > 0
    return False


def listed(keys: Collection[Key]) -> str:
    """Return a few names of queues for a line of text."""
    names = [f"{topic}/{queue_id}" for topic, queue_id in sorted(keys)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
