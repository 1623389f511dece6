"""UNIQ_KEYs, as RocketMQ's clients stamp them, which depend only on a row's place in its batch.

A key is 16 bytes in hexadecimal. RocketMQ's clients put an address, a process id, a hash, a time and a counter there:

    bytes 0-7    SHA-256 of app, version and partition, the first 8 bytes
    bytes 8-9    the row's number in the task, upper half
    bytes 10-13  ms since the beginning of the month: 0
    bytes 14-15  the row's number, lower half

RocketMQ's tools search for a message from the time in its key on. A replay must give a row the same key, so the time
cannot be that of the write, and it must not be later than the store time. 0 is never later in the month of the write.

Source: RocketMQ `common/message/MessageClientIDSetter.java`.
"""

from __future__ import annotations

import hashlib
import uuid

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_SIZE = 16
_DIGITS = np.frombuffer(b"0123456789ABCDEF", np.uint8)


class UniqueKeys:
    """The keys of the rows of one task.

    Parameters
    ----------
    app_id, version : str | None, int | None
        None: the batch has no identity, and each attempt gets other keys.
    partition_id : int
    """

    def __init__(self, app_id: str | None, version: int | None, partition_id: int) -> None:
        batch = uuid.uuid4().hex if app_id is None or version is None else f"{app_id}\0{version}"
        head = hashlib.sha256(f"{batch}\0{partition_id}".encode()).digest()[:8]
        self._head = np.frombuffer(head, np.uint8)

    @property
    def prefix(self) -> str:
        """The digits with which all of them begin, and no key of another batch or partition."""
        return self._head.tobytes().hex().upper()

    def __call__(self, numbers: NDArray[np.int64]) -> pa.Array:
        """The keys of rows by their numbers in the task: string[n]."""
        count = len(numbers)
        rows = numbers.astype(">u4").view(np.uint8).reshape(count, 4)
        keys: NDArray[np.uint8] = np.zeros((count, _SIZE), np.uint8)
        keys[:, :8] = self._head
        keys[:, 8:10] = rows[:, :2]
        keys[:, 14:16] = rows[:, 2:]

        text = np.empty((count, 2 * _SIZE), np.uint8)
        text[:, 0::2] = _DIGITS[keys >> 4]
        text[:, 1::2] = _DIGITS[keys & 15]

        offsets = np.arange(0, (count + 1) * 2 * _SIZE, 2 * _SIZE, dtype=np.int32)
        return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))
