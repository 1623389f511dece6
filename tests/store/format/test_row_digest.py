"""The digest rowsum-1. The vectors of FORMAT.md are here: what a store holds is compared with them for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
from crash.digests import KINDS, LOOKALIKES, columns_of
from messagestore.format import kernel
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.layout import DIGEST_NAME
from messagestore.format.message_columns import MessageColumns
from messagestore.format.record_encode import encode
from messagestore.format.row_digest import row_hashes

HOST = pack_host("127.0.0.1:0")

VECTORS: list[tuple[dict, int]] = [
    ({"body": b""}, 0x854121D5F7000A9D),
    ({"body": b"hello"}, 0xCC43551F142F101B),
    ({"body": b"hello", "topic": "TopicA"}, 0x486A92818A67C62E),
    ({"body": b"hello", "keys": ["k1"]}, 0x3E601956FB816082),
    ({"body": b"hello", "keys": ["k1", "k2"], "tags": "TagA"}, 0x71D8F66A32A4F252),
    ({"body": b"hello", "tags": "中文"}, 0xA3859DB35247A540),
    ({"body": b"hello", "properties": {"a": "1", "b": "2"}}, 0x39D271286A6D22C8),
    ({"body": b"hello", "flag": 0}, 0xF614BE0B310CCA6B),
    ({"body": b"hello", "flag": -1, "queue_id": 3}, 0x0745005298F3DFEA),
    ({"body": b"hello", "sharding_key": "😀"}, 0xC240A7CA1781506C),
    ({"body": b"hello", "delay_time_level": 3}, 0x8A1B67C68A616E61),
    ({"body": b"hello", "unique_key": "7F0000010007"}, 0x93232EEAA6424DD5),
    ({"body": b"hello", "born_timestamp": 1700000000000}, 0xD85E079B44FA281D),
    (
        {
            "body": bytes(range(256)),
            "topic": "TopicA",
            "keys": ["k1", "k2"],
            "tags": "TagA",
            "properties": {"color": "red", "größe": "42"},
            "flag": 7,
            "sharding_key": "order-1",
            "queue_id": 1,
            "born_timestamp": 1795170401381,
            "delay_time_level": 18,
            "unique_key": "u-1",
        },
        0xD4416B00FFA1D26C,
    ),
    ({"body": b"hello" * 100}, 0x456BD884E802F491),
]
SUM = 0xF664700DBF36A1D3


def encoded(columns: MessageColumns) -> int:
    """The digest of a batch as the encoder sums it: with the kernel, if there is one, and without it the same."""
    given = columns.given if isinstance(columns.topic, str) else {**columns.given, "topic": columns.topic}
    rows = replace(columns, topic="T", queue_id=np.zeros(columns.row_count, np.int32), given=given)
    found = encode(rows, limits=StoreConfig(), store_host=HOST, born_host=HOST).digest
    with mock.patch.object(kernel, "lib", None):
        assert encode(rows, limits=StoreConfig(), store_host=HOST, born_host=HOST).digest == found
    return found


def hashes(columns: MessageColumns) -> list[int]:
    """By the reference; what the encoder sums is the same row by row, and for all of them."""
    found = row_hashes(columns)
    assert [encoded(columns.slice(row, 1)) for row in range(columns.row_count)] == found
    assert encoded(columns) == sum(found) % 2**64
    return found


def oracle(row: dict) -> int:
    fields = {name: row.get(name) for name in KINDS if name != "born_timestamp"}
    return reference.row_hash(row["body"], born_ms=row.get("born_timestamp"), **fields)


@pytest.mark.parametrize(("row", "wanted"), VECTORS)
def test_vectors(row: dict, wanted: int) -> None:
    """A row alone, and by the oracle."""
    assert DIGEST_NAME == "rowsum-1"
    assert oracle(row) == wanted
    assert hashes(columns_of([row])) == [wanted]


def test_vectors_as_one_batch() -> None:
    """In one batch, where columns are there and null in most rows, each hash is the same; and their sum."""
    found = hashes(columns_of([row for row, _ in VECTORS]))
    assert found == [wanted for _, wanted in VECTORS]
    assert sum(found) % 2**64 == SUM


rows = st.fixed_dictionaries(
    {"body": strategies.bodies},
    optional={
        "topic": strategies.topics,
        "keys": st.lists(strategies.keys, max_size=3),
        "tags": strategies.texts,
        "properties": strategies.property_maps,
        "flag": strategies.int32s,
        "sharding_key": strategies.texts,
        "queue_id": st.integers(0, 65535),
        "born_timestamp": strategies.int64s,
        "delay_time_level": st.integers(0, 18),
        "unique_key": strategies.keys,
    },
)


@given(st.lists(rows, min_size=1, max_size=8))
def test_any_batch_agrees_with_the_oracle(batch: list[dict]) -> None:
    """Order and company of a row do not matter."""
    assert hashes(columns_of(batch)) == [oracle(row) for row in batch]
    columns = columns_of(batch)
    assert hashes(columns.slice(1, len(batch))) == [oracle(row) for row in batch[1:]]


def test_bodies_of_every_length() -> None:
    """Each way through XXH3, from a part of a column."""
    batch = [{"body": random.Random(n).randbytes(n)} for n in (*range(0, 300, 7), 1024, 1025, 70_000)]
    assert hashes(columns_of(batch)) == [oracle(row) for row in batch]


def test_one_text_in_every_type_is_one_digest() -> None:
    """string, binary, large, dictionary; keys as list or alone; order of properties; empty or null: all the same."""
    batch = [
        {"body": b"x%d" % i, "topic": "T", "keys": [f"k{i}"], "tags": "é", "properties": {"a": "1", "b": f"{i}"}}
        for i in range(5)
    ] + [{"body": b"", "topic": "T", "tags": "é"}]
    wanted = hashes(columns_of(batch))
    text_map = pa.map_(pa.binary(), pa.large_string())
    for kind in (pa.binary(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        turned = [
            row | {"properties": dict(reversed(row.get("properties", {}).items())), "keys": row.get("keys", [])}
            for row in batch
        ]
        arrays = {
            name: pa.array([row.get(name) for row in turned], pa.string()).cast(kind) for name in ("topic", "tags")
        }
        for name, other in (("keys", pa.large_list(pa.binary())), ("properties", text_map)):
            arrays[name] = pa.array([row[name] for row in turned], other)
        body = pa.array([row["body"].decode() for row in turned], pa.string())
        assert hashes(MessageColumns.from_arrow(pa.table({"value": body, **arrays}))) == wanted
    alone = [row | {"keys": row.get("keys", [None])[0]} for row in batch]
    assert hashes(columns_of(alone, kinds=KINDS | {"keys": pa.string()})) == wanted


def test_what_is_not_the_users_does_not_count() -> None:
    """The topic option, a chosen queue, a default time, a unique key of the sink: a replay may have others."""
    body = pa.table({"body": pa.array([b"x"])})
    plain = hashes(MessageColumns.from_arrow(body, topic="T"))
    other = MessageColumns.from_arrow(body, topic="other", queue_id=5, default_born_timestamp_ms=7)
    other.unique_key = pa.array(["made-by-the-sink"])
    assert hashes(other) == plain == [oracle({"body": b"x"})]
    given = pa.table({"body": pa.array([b"x"]), "topic": ["T"], "queue_id": pa.array([None], pa.int32())})
    chosen = MessageColumns.from_arrow(given, topic="option")
    chosen.queue_id = np.array([3], np.int32)
    assert hashes(chosen) == [oracle({"body": b"x", "topic": "T"})]
    assert hashes(chosen) != plain


@pytest.mark.parametrize("name", LOOKALIKES)
def test_rows_that_look_alike_have_other_digests(name: str) -> None:
    """Texts of one Java hash, bodies of one CRC, texts that move to another field, rows that swap their queues."""
    left, right = ([{"body": b"x"} | row for row in batch] for batch in LOOKALIKES[name])
    assert len(left) == len(right)
    assert sum(hashes(columns_of(left))) % 2**64 != sum(hashes(columns_of(right))) % 2**64


def test_moving_a_value_to_another_field_changes_the_digest() -> None:
    """The same text as tag, key, property or sharding key: never the same rows."""
    fields = [{"tags": "v"}, {"keys": ["v"]}, {"sharding_key": "v"}, {"properties": {"v": "v"}}, {"topic": "v"}, {}]
    fields += [{"unique_key": "v"}, {"flag": 7}, {"queue_id": 7}, {"born_timestamp": 7}, {"delay_time_level": 7}]
    found = [hashes(columns_of([{"body": b"x"} | field]))[0] for field in fields]
    assert len(set(found)) == len(fields)


def test_the_sum_does_not_depend_on_order() -> None:
    batch = [{"body": b"%d" % i, "tags": f"t{i}"} for i in range(100)]
    mixed = random.Random(1).sample(batch, len(batch))
    assert sum(hashes(columns_of(batch))) == sum(hashes(columns_of(mixed)))
