"""A process that puts one message for each line that it reads: `python -m benchmarks.one_writer ROOT FLUSH_DISK_TYPE`.

The body is the time before the put, and after it the process writes a line. The end of its input ends it.
"""

from __future__ import annotations

import sys
import time

from messagestore import Message, MessageStore, StoreConfig


def main() -> None:
    root, flush_disk_type = sys.argv[1:]
    with MessageStore.open(root, StoreConfig(flush_disk_type=flush_disk_type)) as store:
        print("ready", flush=True)
        for _ in sys.stdin:
            store.put_message(Message("arrivals", repr(time.perf_counter()).encode(), queue_id=0))


if __name__ == "__main__":
    main()
