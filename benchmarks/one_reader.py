"""A process that reads a whole store when it is told to: `python -m benchmarks.one_reader ROOT`.

It says `ready`, waits for a line, reads, and says how many messages it read in how many seconds.
"""

from __future__ import annotations

import sys
import time

from benchmarks.messages import QUEUE_COUNT, TOPIC
from benchmarks.store_read import FOUR
from messagestore import MessageStore


def main() -> None:
    with MessageStore.open_read_only(sys.argv[1]) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.perf_counter()
        count = 0
        for queue_id in range(QUEUE_COUNT):
            for batch in store.read(TOPIC, queue_id, 0, columns=FOUR):
                count += batch.num_rows
        print(count, time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main()
