"""The messages that the benchmarks use.

Each message has a body of 100 bytes, one key of 5 to 16 characters out of 1 000 000, and one of 5 tags; the messages go
to 8 queues in turn. The columns have the form that Spark gives them: nothing is dictionary-encoded, and `keys` is a
list. The messages are random, and the same in every run.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TOPIC = "flights"
BODY_SIZE = 100
KEY_COUNT = 1_000_000
TAGS = ("created", "paid", "shipped", "returned", "lost")
QUEUE_COUNT = 8
SPARK_ROWS = 10_000
"""The number of rows of an Arrow batch that Spark passes to a sink."""


@lru_cache(maxsize=1)
def _keys() -> pa.Array:
    numbers = np.random.default_rng(2).choice(10_000_000, KEY_COUNT, replace=False)
    numbers[::3] = numbers[::3].astype(np.int64) * 99_991 + 10_000_000  # at most 12 digits, and still all different
    return pc.binary_join_element_wise(pa.scalar("ord-"), pa.array(numbers).cast(pa.string()), "")


def table(rows: int, queue_count: int = QUEUE_COUNT) -> pa.RecordBatch:
    """One batch of messages, with queue ids."""
    random = np.random.default_rng(3)
    bodies = random.integers(0, 256, rows * BODY_SIZE, np.uint8)
    body_offsets = np.arange(rows + 1, dtype=np.int32) * BODY_SIZE
    keys = _keys().take(pa.array(random.integers(0, KEY_COUNT, rows)))
    tags = pa.array(TAGS).take(pa.array(random.integers(0, len(TAGS), rows)))
    return pa.record_batch(
        {
            "body": pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(body_offsets), pa.py_buffer(bodies)]),
            "keys": pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), keys),
            "tags": tags,
            "queue_id": pa.array((np.arange(rows) % queue_count).astype(np.int32)),
        }
    )


def sliced(batch: pa.RecordBatch, rows: int) -> list[pa.RecordBatch]:
    """The batch in parts of `rows` rows."""
    return [batch.slice(start, rows) for start in range(0, batch.num_rows, rows)]
