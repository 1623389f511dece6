"""Copy topics of a Kafka cluster into a store, each record once.

    python kafka_to_store.py localhost:9092 flights,airports /data/store --app airport-copy

Each batch takes Kafka's next offsets into the store as its `origin`, in the record that makes the batch valid. So the
rows and the place behind them are in the log together, or neither is, whatever is killed and when. When the program
starts, it asks the store where to continue; Kafka's own consumer groups are not used.

    Kafka                the store
    partition            queue of the same number
    value                body; a null value (a tombstone) becomes an empty body with the property kafkaTombstone=true
    key                  key, if RocketMQ can hold it, else the property kafkaKey in base64
    headers              properties, if RocketMQ can hold all of them, else the property kafkaHeaders (JSON, base64)
    timestamp            bornTimestamp
"""

from __future__ import annotations

import argparse
import base64
import json
from typing import Any

import pyarrow as pa
from kafka import KafkaConsumer, TopicPartition

from messagestore import BatchRequest, MessageColumns, MessageStore


def main() -> None:
    """Copy until all records are copied that are there now, or until the program is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", help="Kafka's bootstrap servers, such as localhost:9092")
    parser.add_argument("topics", help="topics, with commas between them")
    parser.add_argument("root", help="the store's root folder; a missing one becomes a store")
    parser.add_argument("--app", default="kafka-to-store", help="names this copy; one for each set of topics")
    parser.add_argument("--batch-rows", type=int, default=5000, help="the most records in a batch")
    parser.add_argument("--follow", action="store_true", help="do not end at the records that are there now")
    given = parser.parse_args()
    consumer = KafkaConsumer(
        bootstrap_servers=given.servers,
        group_id=None,
        enable_auto_commit=False,
        isolation_level="read_committed",  # records of transactions that were aborted are not copied
        auto_offset_reset="none",  # an offset that Kafka's retention has deleted is an error, and not a silent gap
    )
    try:
        with MessageStore.open(given.root) as store:
            copied = copy(consumer, store, given.topics.split(","), given)
            print(f"{copied} records copied; app {given.app} is at {store.last_batch(given.app).origin}")
    finally:
        consumer.close()


def copy(consumer: KafkaConsumer, store: MessageStore, topics: list[str], given: argparse.Namespace) -> int:
    """Copy the records after the last batch of an app; returns how many."""
    app_id = given.app
    partitions = [TopicPartition(topic, number) for topic in topics for number in _numbers(consumer, topic)]
    consumer.assign(partitions)
    last = store.last_batch(app_id)
    version = 0 if last is None else last.version + 1
    begin(consumer, partitions, None if last is None else last.origin)
    for topic in topics:
        queue_count = max(_numbers(consumer, topic)) + 1
        if store.topic_config(topic) is None:
            store.create_topic(topic, queue_count)
    ends = consumer.end_offsets(partitions)
    copied = 0
    while given.follow or any(consumer.position(each) < ends[each] for each in partitions):
        polled = consumer.poll(timeout_ms=500, max_records=given.batch_rows)
        offsets: dict[str, dict[str, int]] = {}
        for each in partitions:
            offsets.setdefault(each.topic, {})[str(each.partition)] = consumer.position(each)
        if last is not None and last.origin == {"kafka": offsets}:
            continue
        parts = [columns(each.topic, each.partition, records) for each, records in polled.items() if records]
        store.append_batch(parts, BatchRequest(app_id=app_id, version=version, origin={"kafka": offsets}))
        copied += sum(part.row_count for part in parts)
        version += 1
        last = store.last_batch(app_id)
    return copied


def _numbers(consumer: KafkaConsumer, topic: str) -> list[int]:
    numbers = consumer.partitions_for_topic(topic)
    if not numbers:
        raise SystemExit(f"topic {topic}: Kafka has no such topic. Create it, or correct the name")
    return sorted(numbers)


def begin(consumer: KafkaConsumer, partitions: list[TopicPartition], origin: Any) -> None:
    """Go to where the last batch ended; partitions that are new since then begin at their first record."""
    offsets = {} if origin is None else origin["kafka"]
    for each in partitions:
        offset = offsets.get(each.topic, {}).get(str(each.partition))
        if offset is None:
            consumer.seek_to_beginning(each)
            continue
        first, end = consumer.beginning_offsets([each])[each], consumer.end_offsets([each])[each]
        if not first <= offset <= end:
            raise SystemExit(
                f"{each.topic}, partition {each.partition}: the store has copied it up to offset {offset}, and Kafka "
                f"has {first} to {end}: its retention deleted records that were not copied, or the topic was created "
                "again. Give --app another name to copy what is there"
            )
        consumer.seek(each, offset)


def columns(topic: str, partition: int, records: list[Any]) -> MessageColumns:
    """Records of one partition as columns."""
    keys: list[list[str]] = []
    properties: list[list[tuple[str, str]]] = []
    for record in records:
        pairs = _properties(record.headers)
        key = _text(record.key, forbidden=" \x01\x02")
        keys.append([] if key is None else [key])
        if key is None and record.key is not None:
            pairs.append(("kafkaKey", _base64(record.key)))
        if record.value is None:
            pairs.append(("kafkaTombstone", "true"))
        properties.append(pairs)
    rows = {
        "body": pa.array([record.value or b"" for record in records], pa.binary()),
        "keys": pa.array(keys, pa.list_(pa.string())),
        "properties": pa.array(properties, pa.map_(pa.string(), pa.string())),
        "bornTimestamp": pa.array([max(record.timestamp, 0) for record in records], pa.int64()),
    }
    return MessageColumns.from_arrow(pa.RecordBatch.from_pydict(rows), topic=topic, queue_id=partition)


def _properties(headers: list[tuple[str, bytes | None]]) -> list[tuple[str, str]]:
    """Headers as properties. The store refuses names that RocketMQ uses itself, such as TAGS, with the row's number."""
    pairs = [(name, _text(value, forbidden="\x01\x02")) for name, value in headers]
    names = {name for name, value in pairs if value is not None and _text(name.encode(), forbidden="\x01\x02")}
    if len(names) == len(headers):
        return [(name, value) for name, value in pairs if value is not None]
    packed = [[name, None if value is None else _base64(value)] for name, value in headers]
    return [("kafkaHeaders", json.dumps(packed))]


def _text(data: bytes | None, forbidden: str) -> str | None:
    """Bytes as text, or None where RocketMQ has no room for them: null, empty, not UTF-8, or a forbidden character."""
    try:
        text = (data or b"").decode()
    except UnicodeDecodeError:
        return None
    return text if text and not set(text) & set(forbidden) else None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode() or "="  # a property is never empty


if __name__ == "__main__":
    main()
