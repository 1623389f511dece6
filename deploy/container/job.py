"""Put orders, and work through them as a consumer group: the demo job of compose.yaml.

python job.py STORE
"""

from __future__ import annotations

import sys

from messagestore import Consumer, Message, MessageStore

ORDERS = 10


def main(path: str) -> None:
    """Put, consume and commit; started again, only the new orders come."""
    with MessageStore.open(path) as store:
        for number in range(ORDERS):
            store.put_message(Message("orders", b"order %d" % number, keys=[f"order-{number}"]))
    with Consumer(path, "billing", "orders", consumer_timeout=1) as consumer:
        for message in consumer:
            print(message.queue_id, message.queue_offset, message.body.decode(), flush=True)
            consumer.commit()


if __name__ == "__main__":
    main(sys.argv[1])
