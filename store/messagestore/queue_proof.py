"""Where does a queue end, as the log proves it?

A crashed broker leaves units behind its queues' ends; a live one may show a unit half written. A unit counts when the
record it points to is one of its queue, with its number or at least behind the record of the unit before: a broker
that lost units numbers on from there, and its own rebuild of a topic that was made again shifts them.
"""

from __future__ import annotations

from messagestore import record
from messagestore.errors import CorruptionError
from messagestore.store_files import StoreFiles


def proven_queue_end(
    files: StoreFiles, topic: str, queue_id: int, log_end: int, hint: int = 0, *, crc: bool = True
) -> int:
    """Number of the first unit of a queue that the log below `log_end` does not prove.

    Units are a prefix of proven ones, then zeros, or what a crashed broker left behind its queue's end.

    Parameters
    ----------
    crc : bool
        The record's CRCs must agree: a broker that crashed may have left a torn one. False where that cannot be: a bit
        that flipped in a record is damage, to be reported when it is read, and does not make the queue end before it.
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
    units = files.queue(topic, queue_id).read(queue_offset, 1)
    if not len(units):
        return False
    physical_offset, size = int(units["physical_offset"][0]), int(units["size"][0])
    if physical_offset < files.commit_log.min_offset:
        return True  # below the first segment (or filler): nothing can be read back
    if physical_offset + size > log_end:
        return False
    head = files.commit_log.head(physical_offset)
    if head is None or (int(head["total_size"]), int(head["queue_id"])) != (size, queue_id):
        return False
    same_number = int(head["queue_offset"]) == queue_offset
    if same_number and not crc:
        return True
    if not same_number and not _is_behind(files, topic, queue_id, queue_offset, physical_offset):
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
    """Whether a unit's record lies behind that of the unit before: what a crash left points back."""
    before = files.queue(topic, queue_id).read(queue_offset - 1, 1)
    return bool(len(before)) and 0 <= int(before["physical_offset"][0]) < physical_offset
