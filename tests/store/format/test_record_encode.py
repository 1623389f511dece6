"""Columns to records."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest

import reference
from messagestore.errors import MessageIllegalError
from messagestore.format import record
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.message_columns import MessageColumns
from messagestore.format.record_encode import encode, stamp
from messagestore.format.row_digest import row_hashes
from messagestore.format.rows import Rows

V4, V6 = "10.1.2.3:10911", "[2001:db8::2]:10911"
TEXT_MAP = pa.map_(pa.string(), pa.string())
LONG = "%RETRY%" + "t" * 150


def encoded(columns: MessageColumns, *, crc: bool = False, store: str = V4, born: str = V4, **more: int) -> Rows:
    limits = StoreConfig(enabled_append_prop_crc=crc)
    return encode(columns, limits=limits, store_host=pack_host(store), born_host=pack_host(born), **more)


def records_of(batch: Rows) -> list[bytes]:
    return [batch.data[a:b].tobytes() for a, b in itertools.pairwise(batch.starts.tolist())]


def a_batch(n: int = 12) -> MessageColumns:
    """Every column, nulls among them, three queues of two topics by turns."""
    return MessageColumns(
        topic=pa.array([("TopicA", LONG)[i % 2] for i in range(n)]),
        queue_id=np.array([i % 3 for i in range(n)], np.int32),
        body=pa.array([b"body%d" % i * (i % 4) for i in range(n)], pa.binary()),
        keys=pa.array([([f"k{i}", f"é{i}"], [f"k{i}"], [], None)[i % 4] for i in range(n)], pa.list_(pa.string())),
        tags=pa.array([(None, "TagA", "中文")[i % 3] for i in range(n)]).dictionary_encode(),
        properties=pa.array([([("a", "1"), ("b", f"{i}")], None, [])[i % 3] for i in range(n)], TEXT_MAP),
        flag=np.arange(n, dtype=np.int32) - 3,
        born_timestamp_ms=np.arange(n, dtype=np.int64) + 1_700_000_000_000,
        unique_key=pa.array([f"U{i}" if i % 5 else None for i in range(n)]),
    )


def row_of(columns: MessageColumns, row: int) -> dict:
    """One row as arguments of the oracle."""
    keys = columns.keys[row].as_py()
    pairs = [("KEYS", " ".join(keys))] if keys else []
    for name, column in (("UNIQ_KEY", columns.unique_key), ("TAGS", columns.tags)):
        if column[row].as_py() is not None:
            pairs.append((name, column[row].as_py()))
    return {
        "topic": columns.topic[row].as_py(),
        "queue_id": int(columns.queue_id[row]),
        "body": columns.body[row].as_py(),
        "properties": pairs + (columns.properties[row].as_py() or []),
        "flag": int(columns.flag[row]),
        "born_ms": int(columns.born_timestamp_ms[row]),
    }


def order_of(columns: MessageColumns) -> list[int]:
    """Rows by queue, as they came within each."""
    topics = columns.topic.to_pylist()
    first = {topic: topics.index(topic) for topic in topics}
    return sorted(range(len(topics)), key=lambda row: (first[topics[row]], columns.queue_id[row]))


@pytest.mark.parametrize("crc", [False, True], ids=["", "crc"])
@pytest.mark.parametrize(("store", "born"), [(V4, V4), (V6, V4), (V4, V6), (V6, V6)])
def test_a_batch_byte_for_byte(store: str, born: str, crc: bool) -> None:
    """Grouped and stamped, each record is the one the oracle writes."""
    columns = a_batch()
    batch = encoded(columns, crc=crc, store=store, born=born)
    n = batch.row_count
    queue_offsets = np.arange(n) + 100
    physical_offsets = batch.starts[:-1] + (1 << 40)
    stamp(
        batch.data,
        batch.starts[:-1],
        queue_offsets,
        physical_offsets,
        1795170401381,
        batch.store_timestamp_position,
        crc,
    )
    wanted = [
        reference.encode(
            **row_of(columns, row),
            queue_offset=100 + place,
            physical_offset=int(physical_offsets[place]),
            born_host=born,
            store_host=store,
            store_ms=1795170401381,
            with_crc=crc,
        )
        for place, row in enumerate(order_of(columns))
    ]
    assert records_of(batch) == wanted
    assert batch.property_crc == crc


def test_what_goes_with_the_records() -> None:
    """Runs, tags codes, index hashes and digest of the same batch, in the records' order."""
    columns = a_batch()
    batch = encoded(columns)
    order = order_of(columns)
    runs = [
        (topic, queue_id)
        for topic, queue_id, count in zip(batch.run_topics, batch.run_queue_ids, batch.run_counts, strict=True)
        for _ in range(count)
    ]
    assert len(batch.run_topics) == len(set(runs)) == 6
    assert runs == [(columns.topic[row].as_py(), columns.queue_id[row]) for row in order]
    tags = [columns.tags[row].as_py() for row in order]
    assert batch.tags_codes.tolist() == [reference.java_hash(tag) if tag else 0 for tag in tags]
    assert batch.tags_codes.dtype == np.int64
    hashes, counts = [], []
    for row in order:
        unique = columns.unique_key[row].as_py()
        words = ([unique] if unique else []) + (columns.keys[row].as_py() or [])
        counts.append(len(words))
        hashes += [reference.index_key(columns.topic[row].as_py(), word) for word in words]
    assert batch.key_counts.tolist() == counts
    assert batch.key_hashes.tolist() == hashes
    assert batch.digest == sum(row_hashes(columns)) % 2**64
    assert {kind.dtype for kind in (batch.key_hashes, batch.key_counts, batch.run_counts)} == {np.dtype(np.int32)}
    assert batch.starts[0] == 0
    assert batch.starts[-1] == len(batch.data)
    assert batch.data.flags.writeable


def test_rows_that_are_grouped_stay_where_they_are() -> None:
    """Queues that come one after the other, in any order of their numbers."""
    columns = MessageColumns("T", np.array([7, 7, 2, 2, 5], np.int32), pa.array([b"0", b"1", b"2", b"3", b"4"]))
    batch = encoded(columns)
    assert [reference.decode(data)["body"] for data in records_of(batch)] == [b"0", b"1", b"2", b"3", b"4"]
    assert batch.run_queue_ids.tolist() == [7, 2, 5]
    assert batch.run_counts.tolist() == [2, 2, 1]


def test_many_queues_of_many_topics() -> None:
    """More than 16 bits can number: the order within a queue still is the user's."""
    n = 3000
    rng = np.random.default_rng(3)
    topics = pa.array([f"T{i}" for i in rng.integers(0, 5, n)]).dictionary_encode()
    queues = rng.choice(np.array([0, 1, 65535], np.int32), n)
    batch = encoded(MessageColumns(topics, queues, pa.array([b"%d" % i for i in range(n)])))
    seen: dict[tuple[str, int], int] = {}
    for data in records_of(batch):
        fields = reference.decode(data)
        key = (fields["topic"], fields["queue_id"])
        assert int(fields["body"]) > seen.get(key, -1)
        seen[key] = int(fields["body"])
        assert (topics[int(fields["body"])].as_py(), queues[int(fields["body"])]) == key
    assert len(batch.run_topics) == len(seen) == 15


def test_no_rows() -> None:
    for topic in ("T", pa.array([], pa.string())):
        columns = MessageColumns(
            topic, np.empty(0, np.int32), pa.array([], pa.binary()), keys=pa.array([], pa.list_(pa.string())),
            tags=pa.array([], pa.string()), unique_key=pa.array([], pa.string()), properties=pa.array([], TEXT_MAP),
        )  # fmt: skip
        batch = encoded(columns, crc=True)
        assert batch.row_count == 0
        assert batch.starts.tolist() == [0]
        assert batch.run_topics == []
        assert batch.digest == 0
        stamp(batch.data, batch.starts[:-1], np.empty(0, np.int64), np.empty(0, np.int64), 1, 56, True)


def test_times_and_flags_are_optional() -> None:
    """Without a column the time is now and the flag 0."""
    fields = reference.decode(records_of(encoded(MessageColumns("T", np.zeros(1, np.int32), pa.array([b"x"]))))[0])
    assert fields["flag"] == 0
    assert abs(fields["born_timestamp_ms"] - record.time.time() * 1000) < 60_000
    assert (fields["queue_offset"], fields["physical_offset"], fields["store_timestamp_ms"]) == (0, 0, 0)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary(), pa.binary_view()], ids=str)
def test_bodies_of_any_type(kind: pa.DataType) -> None:
    body = pa.array([b"\xc3\xa9", b"", b"x"], pa.binary()).cast(kind)
    batch = encoded(MessageColumns("T", np.zeros(2, np.int32), body[1:]))
    assert [reference.decode(data)["body"] for data in records_of(batch)] == [b"", b"x"]


@pytest.mark.parametrize("crc", [False, True], ids=["", "crc"])
def test_the_limit_of_properties(crc: bool) -> None:
    """32 767 bytes, the CRC's 20 included; the row is named."""
    room = 32767 - (20 if crc else 0) - len("KEYS\x01\x02") - len("a\x01\x02") - 1

    def batch(size: int) -> MessageColumns:
        pairs = pa.array([None, [("a", "v" * size)]], TEXT_MAP)
        return MessageColumns(
            "T", np.zeros(2, np.int32), pa.array([b"", b""]), keys=pa.array(["k", "k"]), properties=pairs
        )

    data = records_of(encoded(batch(room), crc=crc))[1]
    assert reference.decode(data)["all_properties"]["a"] == "v" * room
    with pytest.raises(MessageIllegalError) as caught:
        encoded(batch(room + 1), crc=crc, first_row=10)
    assert (caught.value.field, caught.value.size, caught.value.limit, caught.value.row) == (
        "properties",
        32768,
        32767,
        11,
    )


def test_a_bad_row_is_named() -> None:
    columns = MessageColumns("T", np.zeros(2, np.int32), pa.array([b"", None]))
    with pytest.raises(MessageIllegalError, match="row 6: body"):
        encoded(columns, first_row=5)


def test_stamping_a_part() -> None:
    """Some records of a batch, as they go into one segment: the others are not touched."""
    batch = encoded(a_batch(), crc=True)
    before = records_of(batch)
    begin, end = int(batch.starts[3]), int(batch.starts[7])
    for with_last in (False, True):
        starts = batch.starts[3 : 8 if with_last else 7] - begin
        stamp(batch.data[begin:end], starts, np.arange(4), np.arange(4) * 1000, 9, batch.store_timestamp_position, True)
        after = records_of(batch)
        assert after[:3] + after[7:] == before[:3] + before[7:]
        for i, data in enumerate(after[3:7]):
            message = record.decode_message(data, physical_offset=i * 1000)
            assert (message.queue_offset, message.store_timestamp_ms) == (i, 9)
