"""Where does a queue end, as the log proves it?

A crashed broker leaves units behind its queues' ends; a live one may show a unit half written. A unit counts when the
record it points to says the same.
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
    if not crc:
        head = files.commit_log.head(physical_offset)
        wanted = (size, queue_id, queue_offset)
        return head is not None and tuple(int(head[f]) for f in ("total_size", "queue_id", "queue_offset")) == wanted
    data = files.commit_log.record_bytes(physical_offset)
    if data is None or len(data) != size:
        return False
    try:
        message = record.decode_message(data, physical_offset=physical_offset)
    except CorruptionError:
        return False
    return (message.topic, message.queue_id, message.queue_offset) == (topic, queue_id, queue_offset)
