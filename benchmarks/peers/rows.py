"""The rows of the race: the messages of `benchmarks.messages`, with bodies of either kind."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from benchmarks import messages
from benchmarks.peers.contestants import PADDED


def table(rows: int, bodies: str) -> pa.RecordBatch:
    """One batch: `body`, `keys`, `tags`, `queue_id`."""
    batch = messages.table(rows)
    if bodies != PADDED:
        return batch
    at = np.arange(rows)
    grid = np.empty((rows, messages.BODY_SIZE), np.uint8)
    grid[:] = np.frombuffer((b"abcdefghijklmnopqrstuvwxyz" * 4)[: messages.BODY_SIZE], np.uint8)
    for place in range(8):  # eight digits, the first one first
        grid[:, place] = ord("0") + at // 10 ** (7 - place) % 10
    offsets = np.arange(rows + 1, dtype=np.int32) * messages.BODY_SIZE
    body = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(grid.reshape(-1))])
    return batch.set_column(0, "body", body)
