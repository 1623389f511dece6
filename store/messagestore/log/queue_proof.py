"""Proves from the log where a queue ends.

A crashed broker leaves units after the ends of its queues, and a live broker may show a unit that is half written. A
unit counts if the record that it points to belongs to its queue, and either has its number or at least lies after the
record of the previous unit: a broker that lost units continues to number from there, and its own rebuild of a topic
that was created again shifts the numbers.
"""

from __future__ import annotations

import itertools

from messagestore.errors import CorruptionError
from messagestore.files.consume_queue import queue_directory
from messagestore.files.numbered_files import FILE_NAME
from messagestore.format import record
from messagestore.format.layout import FILLER_UNIT_SIZE, UNIT
from messagestore.log.store_files import StoreFiles
from messagestore.signal_handlers import pass_on

_TAIL_SIZE = 4096


def proven_queue_end(
    files: StoreFiles, topic: str, queue_id: int, log_end: int, hint: int = 0, *, crc: bool = True
) -> int:
    """Return the number of the first unit of a queue that the log below `log_end` does not prove.

    The units are a prefix of proven ones, followed by zeros or by what a crashed broker left after its queue's end.

    Parameters
    ----------
    crc : bool
        Require that the record's CRCs match, because a broker that crashed may have left a torn record. Pass False
        where that cannot happen: a flipped bit in a record is damage, which is reported when the record is read and
        does not make the queue end before it.
    """
    queue = files.queue(topic, queue_id)
    end = queue.end(hint=hint, limit=log_end)
    if end == 0 or _proves(files, topic, queue_id, end - 1, log_end, crc):
        return end

    low, high = queue.first_file_queue_offset, end - 1
    while low < high:
        middle = (low + high) // 2
        if _proves(files, topic, queue_id, middle, log_end, crc):
            low = middle + 1
        else:
            high = middle
    return low


def _proves(files: StoreFiles, topic: str, queue_id: int, queue_offset: int, log_end: int, crc: bool) -> bool:
    queue = files.queue(topic, queue_id)
    units = queue.read(queue_offset, 1)
    if not len(units):
        return False

    number = queue.number_in_record(queue_offset)
    physical_offset, size = int(units["physical_offset"][0]), int(units["size"][0])
    if physical_offset < files.commit_log.min_offset:
        return True  # below the first segment (or filler): nothing can be read back
    if physical_offset + size > log_end:
        return False

    head = files.commit_log.head(physical_offset)
    if head is None or (int(head["total_size"]), int(head["queue_id"])) != (size, queue_id):
        return False

    same_number = int(head["queue_offset"]) == number
    if same_number and not crc:
        return True
    if not same_number and not _is_behind(files, topic, queue_id, number, physical_offset):
        return False

    data = files.commit_log.record_bytes(physical_offset)
    if data is None or len(data) != size:
        return False
    try:
        message = record.decode_message(data, verify=crc, physical_offset=physical_offset)
    except CorruptionError:
        return False
    return message.topic == topic


def _is_behind(files: StoreFiles, topic: str, queue_id: int, queue_offset: int, physical_offset: int) -> bool:
    """Whether a unit's record lies after that of the previous unit; units that a crash left point backwards."""
    before = files.queue(topic, queue_id).read(queue_offset - 1, 1)
    return bool(len(before)) and 0 <= int(before["physical_offset"][0]) < physical_offset


def is_settled(files: StoreFiles, topic: str, queue_id: int, clean_end: int) -> bool:
    """Whether a queue certainly has nothing above the clean end: its last unit points below it, and zeros follow.

    This is for the thousands of queues that a crash did not touch. It costs one look at the folder and one at the last
    page of the newest file that is not a hole. False: only a longer check can decide.
    """
    disk, directory = files.disk, queue_directory(files.paths.root, topic, queue_id)
    entries = disk.entries(directory)
    if not entries or any(is_folder or FILE_NAME.fullmatch(name) is None for name, is_folder in entries):
        return False

    file_size = files.config.mapped_file_size_consume_queue
    starts = [int(name) for name, _ in entries]
    if any(after - before != file_size for before, after in itertools.pairwise(starts)):
        return False

    try:
        file = disk.open(f"{directory}/{entries[-1][0]}")
    except FileNotFoundError as error:
        pass_on(error)
        return False

    try:
        ranges = list(disk.data_ranges(file, 0, file_size)) if disk.length(file) == file_size else []
        if len(ranges) != 1:
            return False
        end = ranges[0][1]
        start = max(0, end - _TAIL_SIZE) // UNIT.size * UNIT.size
        tail = disk.pread(file, end - start, start)
    finally:
        file.close()

    length = (int.from_bytes(tail, "little").bit_length() + 7) // 8  # without zeros; `rstrip` takes ten times as long
    if not length:
        return False

    at = (length - 1) // UNIT.size * UNIT.size
    physical_offset, size, _ = UNIT.struct.unpack(tail[at:length].ljust(UNIT.size, b"\0"))
    return bool(physical_offset >= 0 and 0 < size != FILLER_UNIT_SIZE and physical_offset + size <= clean_end)
