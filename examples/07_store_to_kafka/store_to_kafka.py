"""Copy topics of a store into a Kafka cluster, each message once.

    python store_to_kafka.py /data/store flights,airports localhost:9092 --name airport-copy

Each Kafka transaction contains the messages of one batch, and one record in the topic `store-to-kafka-progress` that
says how far they reach. So Kafka shows both or neither, whatever is killed and when. When the program starts, it takes
over the transactional id, which ends a transaction that another run left open, and reads this record back.

    the store            Kafka
    queue                partition of the same number
    body                 value
    first key            key
    properties           headers; also `tags`, and `keys` if a message has several
    bornTimestamp        timestamp
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import TopicAlreadyExistsError

from messagestore import MessageStore, ReadOnlyStore

PROGRESS = "store-to-kafka-progress"
COLUMNS = ("queue_offset", "body", "tags", "keys", "properties", "born_timestamp_ms")


def main() -> None:
    """Copy until all messages are copied that are there now, or until the program is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="the store's root folder")
    parser.add_argument("topics", help="topics, with commas between them")
    parser.add_argument("servers", help="Kafka's bootstrap servers, such as localhost:9092")
    parser.add_argument("--name", default="store-to-kafka", help="names this copy; one for each set of topics")
    parser.add_argument("--batch-rows", type=int, default=5000, help="the most messages in a transaction")
    parser.add_argument("--follow", action="store_true", help="do not end at the messages that are there now")
    given = parser.parse_args()
    topics = given.topics.split(",")
    with MessageStore.open_read_only(given.root) as store:
        create_topics(given.servers, store, topics)
        producer = KafkaProducer(bootstrap_servers=given.servers, transactional_id=given.name, acks="all")
        try:
            producer.init_transactions()
            copied = copy(store, producer, topics, given)
            print(f"{copied} messages copied")
        finally:
            producer.close()


def create_topics(servers: str, store: ReadOnlyStore, topics: list[str]) -> None:
    """Create the Kafka topics that do not exist, with a partition for each queue."""
    admin = KafkaAdminClient(bootstrap_servers=servers)
    try:
        there = store.topics()
        wanted = [NewTopic(topic, max(there[topic], default=0) + 1, -1) for topic in topics if topic in there]
        compacted = NewTopic(PROGRESS, 1, -1, topic_configs={"cleanup.policy": "compact"})
        for topic in (*wanted, compacted):
            try:
                admin.create_topics([topic])
            except TopicAlreadyExistsError:
                continue
    finally:
        admin.close()


def copy(store: ReadOnlyStore, producer: KafkaProducer, topics: list[str], given: argparse.Namespace) -> int:
    """Copy the messages after the last transaction; returns how many."""
    name = given.name
    progress = last_progress(given.servers, name) or {"store": store.store_id, "offsets": {}}
    if progress["store"] != store.store_id:
        raise SystemExit(
            f"{name}: Kafka has messages of store {progress['store']}, and this is store {store.store_id}. Give --name "
            "another name to copy this store"
        )
    offsets: dict[str, dict[str, int]] = progress["offsets"]
    copied = 0
    while True:
        batches = list(next_batches(store, topics, offsets, given.batch_rows))
        if not batches:
            if not given.follow:
                return copied
            time.sleep(0.2)
            continue
        producer.begin_transaction()
        try:
            for topic, queue_id, batch in batches:
                for message in batch.to_pylist():
                    producer.send(topic, partition=queue_id, **record(message))
                offsets.setdefault(topic, {})[str(queue_id)] = batch["queue_offset"][-1].as_py() + 1
                copied += batch.num_rows
            text = json.dumps({"store": store.store_id, "offsets": offsets})
            producer.send(PROGRESS, key=name.encode(), value=text.encode(), partition=0)
            producer.commit_transaction()
        except BaseException:
            producer.abort_transaction()
            raise


def next_batches(store: ReadOnlyStore, topics: list[str], offsets: dict[str, dict[str, int]], left: int) -> Any:
    """At most `left` messages of the queues that have more of them: topic, queue id and columns."""
    there = store.topics()
    for topic in topics:
        for queue_id in sorted(there.get(topic, [])):
            start = offsets.get(topic, {}).get(str(queue_id), store.min_offset(topic, queue_id))
            end = store.max_offset(topic, queue_id)
            if start > end:
                raise SystemExit(
                    f"{topic}, queue {queue_id}: Kafka has its messages up to {start}, and the store ends at {end}: an "
                    "older copy of the store is here. Bring the newer one back"
                )
            for batch in store.read(topic, queue_id, start, min(end, start + left), COLUMNS):
                left -= batch.num_rows
                yield topic, queue_id, batch
            if not left:
                return


def record(message: dict[str, Any]) -> dict[str, Any]:
    """Value, key, headers and timestamp of a Kafka record."""
    keys, headers = message["keys"] or [], [(name, value.encode()) for name, value in message["properties"] or []]
    if message["tags"] is not None:
        headers.append(("tags", message["tags"].encode()))
    if len(keys) > 1:
        headers.append(("keys", " ".join(keys).encode()))
    return {
        "value": message["body"],
        "key": keys[0].encode() if keys else None,
        "headers": headers,
        "timestamp_ms": message["born_timestamp_ms"],
    }


def last_progress(servers: str, name: str) -> dict[str, Any] | None:
    """What the last transaction of a name said."""
    consumer = KafkaConsumer(
        bootstrap_servers=servers, group_id=None, enable_auto_commit=False, isolation_level="read_committed"
    )
    try:
        place = TopicPartition(PROGRESS, 0)
        consumer.assign([place])
        consumer.seek_to_beginning(place)
        end, found = consumer.end_offsets([place])[place], None
        while consumer.position(place) < end:
            for records in consumer.poll(timeout_ms=500).values():
                found = next((each.value for each in reversed(records) if each.key == name.encode()), found)
        return None if found is None else json.loads(found)
    finally:
        consumer.close()


if __name__ == "__main__":
    main()
