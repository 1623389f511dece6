"""Any batch of messages: written as columns or one by one, read as columns or one by one, it is the same."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
from messagestore.format import record, record_columns
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.message import Message

PLACE = 1 << 33
READ = ["topic", "queue_id", "body", "tags", "keys", "properties", "flag", "born_timestamp_ms", "store_timestamp_ms",
        "queue_offset", "physical_offset", "message_id", "born_host", "store_host", "size"]  # fmt: skip


def columns_of(messages: list[Message], queues: list[int]) -> record_columns.MessageColumns:
    text_map = pa.map_(pa.string(), pa.string())
    return record_columns.MessageColumns(
        topic=pa.array([m.topic for m in messages]),
        queue_id=np.array(queues, np.int32),
        body=pa.array([m.body for m in messages], pa.binary()),
        keys=pa.array([list(m.keys) for m in messages], pa.list_(pa.string())),
        tags=pa.array([m.tags for m in messages], pa.string()),
        properties=pa.array([list(m.properties.items()) for m in messages], text_map),
        flag=np.array([m.flag for m in messages], np.int32),
        born_timestamp_ms=np.array([m.born_timestamp_ms for m in messages], np.int64),
    )


@given(
    messages=st.lists(strategies.messages, min_size=1, max_size=8),
    queues=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    born_host=strategies.hosts,
    store_host=strategies.hosts,
    crc=st.booleans(),
    store_ms=strategies.int64s,
)
def test_columns_and_single_messages_make_the_same_log(
    messages: list[Message], queues: list[int], born_host: str, store_host: str, crc: bool, store_ms: int
) -> None:
    limits = StoreConfig(enabled_append_prop_crc=crc)
    queues = queues[: len(messages)]
    columns = columns_of(messages, queues)
    batch = record_columns.encode(
        columns, limits=limits, store_host=pack_host(store_host), born_host=pack_host(born_host), first_row=0
    )
    n = batch.row_count
    places = batch.starts[:-1] + PLACE
    record_columns.stamp(
        batch.data, batch.starts[:-1], np.arange(n), places, store_ms, batch.store_timestamp_position, crc
    )

    # The rows by queue, each queue's in the order they came; each alone is the same bytes.
    keys = [(m.topic, q) for m, q in zip(messages, queues, strict=True)]
    runs = list(zip(batch.run_topics, batch.run_queue_ids.tolist(), strict=True))
    rows = [row for run in runs for row in range(n) if keys[row] == run]
    assert sorted(rows) == list(range(n))
    for place, row in enumerate(rows):
        m = messages[row]
        alone = record.encode_message(
            Message(m.topic, m.body, None, m.keys, m.tags, m.properties, m.flag, m.born_timestamp_ms, born_host),
            queue_id=queues[row],
            store_host=pack_host(store_host),
            limits=limits,
        )
        record.stamp_record(alone, place, int(places[place]), store_ms, property_crc=crc)
        assert batch.data[batch.starts[place] : batch.starts[place + 1]].tobytes() == bytes(alone)

    # A scan finds them all, and the columns read back are what was given.
    starts, _, end = record.scan(batch.data, PLACE, file_bytes_left=len(batch.data) + 8)
    assert starts.tolist() == batch.starts[:-1].tolist()
    assert end.reason == "end"
    read = record_columns.decode(batch.data, starts, np.diff(batch.starts).astype(np.int32), READ)
    read.validate(full=True)
    for place, (row, found) in enumerate(zip(rows, read.to_pylist(), strict=True)):
        m = messages[row]
        assert (found["topic"], found["queue_id"], found["body"]) == (m.topic, queues[row], m.body)
        assert (found["tags"], found["keys"], dict(found["properties"])) == (m.tags, list(m.keys), dict(m.properties))
        assert (found["flag"], found["born_timestamp_ms"]) == (m.flag, m.born_timestamp_ms)
        assert (found["store_timestamp_ms"], found["queue_offset"]) == (store_ms, place)
        assert found["message_id"] == reference.message_id(store_host, PLACE + int(batch.starts[place]))
        assert pack_host(found["born_host"]) == pack_host(born_host)
        assert found["size"] == batch.starts[place + 1] - batch.starts[place]


@given(st.lists(strategies.messages, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_order_or_parts(messages: list[Message], random: object) -> None:
    """Rows in another order, in two parts: the sums agree."""

    def digest(rows: list[Message]) -> int:
        return sum(record_columns.row_hashes(columns_of(rows, [0] * len(rows)))) % 2**64

    mixed = random.sample(messages, len(messages))
    cut = random.randrange(len(messages) + 1)
    parts = [part for part in (mixed[:cut], mixed[cut:]) if part]
    assert sum(map(digest, parts)) % 2**64 == digest(messages)
