"""A process that consumes as one worker of a group: `python -m benchmarks.one_worker ROOT TOPIC`.

It writes a line for each message, with the time between what the body says and now, and one for each queue that it gets
or gives away: `= 0.003`, `+ 5`, `- 5`. It commits nothing.
"""

from __future__ import annotations

import sys
import time

from messagestore import Consumer

GROUP = "workers"


def main() -> None:
    root, topic = sys.argv[1:]

    def say(sign: str) -> object:
        return lambda _, queues: [print(sign, queue_id, flush=True) for _, queue_id in queues]

    with Consumer(root, GROUP, topic, on_assigned=say("+"), on_revoked=say("-")) as consumer:
        while True:
            for messages in consumer.poll(1.0).values():
                now_s = time.perf_counter()
                for message in messages:
                    print("=", now_s - float(message.body), flush=True)


if __name__ == "__main__":
    main()
