"""A writer that appends batches and kills itself: `python -m benchmarks.killed_writer ROOT ROWS BATCHES INDEX_ON`."""

from __future__ import annotations

import os
import signal
import sys

from benchmarks.messages import TOPIC, sliced, table
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig
from messagestore.read_only_store import CHUNK_ROWS


def main() -> None:
    root, rows, batch_count, index_on = sys.argv[1], *map(int, sys.argv[2:])
    batch = table(rows)
    store = MessageStore.open(root, StoreConfig(message_index_enable=bool(index_on), clean_interval="1h"))
    for version in range(batch_count):
        parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(batch, CHUNK_ROWS))
        store.append_batch(parts, BatchRequest(app_id="bench", version=version))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
