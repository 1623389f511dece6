"""The digest rowsum-1 of earlier releases: what their stores hold is compared with these vectors for ever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
from messagestore.format.config import StoreConfig
from messagestore.format.earlier_digest import earlier_hashes
from messagestore.format.hosts import pack_host
from messagestore.format.layout import DIGEST_NAME, EARLIER_DIGEST_NAME
from messagestore.format.message_columns import MessageColumns
from messagestore.format.record_encode import encode

COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "keys": pa.list_(pa.string()),
    "tags": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "flag": pa.int32(),
    "sharding_key": pa.string(),
    "queue_id": pa.int32(),
    "born_timestamp": pa.int64(),
    "delay_time_level": pa.int32(),
}

VECTORS: list[tuple[dict, int]] = [
    ({"body": b""}, 0xE220A8397B1DCDAF),
    ({"body": b"hello"}, 0xDB4FD5FD7237A388),
    ({"body": b"hello", "topic": "TopicA"}, 0xDAA26BC2C49C1EE3),
    ({"body": b"hello", "keys": ["k1"]}, 0x1C9564CFD0539844),
    ({"body": b"hello", "keys": ["k1", "k2"], "tags": "TagA"}, 0x5CE57DA91D770DD3),
    ({"body": b"hello", "tags": "中文"}, 0x2CAEFD2D0D677595),
    ({"body": b"hello", "properties": {"a": "1", "b": "2"}}, 0x622A42DC8C12ECF4),
    ({"body": b"hello", "flag": 0}, 0x8EFD2BC80B41139C),
    ({"body": b"hello", "flag": -1, "queue_id": 3}, 0x28C2C0BB0A9BD20C),
    ({"body": b"hello", "sharding_key": "😀"}, 0x8C65799D64AB7E97),
    ({"body": b"hello", "born_timestamp": 1700000000000}, 0x4F97DFC1E2C0D32E),
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
        },
        0x5981428FB51E3D96,
    ),
]
SUM = 0x8DA594EE4B9E0DBD


def columns_of(rows: list[dict], kinds: dict[str, pa.DataType] = COLUMNS) -> MessageColumns:
    """A batch with all columns that a row has, null where it has not."""
    used = [name for name in kinds if any(name in row for row in rows)]
    arrays = {name: pa.array([row.get(name) for row in rows], kinds[name]) for name in used}
    body = pa.array([row.get("body") for row in rows], pa.binary())
    return MessageColumns.from_arrow(
        pa.table({"body": body, **arrays}), topic=None if "topic" in arrays else "of the option"
    )


def hashes(columns: MessageColumns) -> list[int]:
    """By the reference; what the encoder sums, with the kernel or without, is the same row by row."""
    found = earlier_hashes(columns)
    given = columns.given if isinstance(columns.topic, str) else {**columns.given, "topic": columns.topic}
    rows = replace(columns, topic="T", queue_id=np.zeros(columns.row_count, np.int32), given=given)
    host = pack_host("127.0.0.1:0")
    for row, wanted in enumerate(found):
        both = {"store_host": host, "born_host": host}
        for names in ((EARLIER_DIGEST_NAME,), (DIGEST_NAME, EARLIER_DIGEST_NAME), ()):
            one = encode(rows.slice(row, 1), limits=StoreConfig(), digests=names, **both)
            assert set(one.digests) == set(names)
            assert one.digests.get(EARLIER_DIGEST_NAME, wanted) == wanted
    return found


def oracle(row: dict) -> int:
    fields = {name: row.get(name) for name in COLUMNS if name != "born_timestamp"}
    return reference.earlier_row_hash(row["body"], born_ms=row.get("born_timestamp"), **fields)


@pytest.mark.parametrize(("row", "wanted"), VECTORS)
def test_vectors(row: dict, wanted: int) -> None:
    """A row alone, and by the oracle."""
    assert EARLIER_DIGEST_NAME == "rowsum-1"
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
    },
)


@given(st.lists(rows, min_size=1, max_size=8))
def test_any_batch_agrees_with_the_oracle(batch: list[dict]) -> None:
    """Order and company of a row do not matter."""
    assert hashes(columns_of(batch)) == [oracle(row) for row in batch]
    columns = columns_of(batch)
    assert hashes(columns.slice(1, len(batch))) == [oracle(row) for row in batch[1:]]


def test_one_text_in_every_type_is_one_digest() -> None:
    """string, binary, large, dictionary; keys as list or alone; order of properties; empty or null: all the same."""
    batch = [
        {"body": b"x%d" % i, "topic": "T", "keys": [f"k{i}"], "tags": "é", "properties": {"a": "1", "b": f"{i}"}}
        for i in range(5)
    ] + [{"body": b"", "topic": "T", "tags": "é"}]
    wanted = hashes(columns_of(batch))
    text_map = pa.map_(pa.binary(), pa.large_string())
    for kind in (pa.binary(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        kinds = COLUMNS | {"topic": kind, "tags": kind, "keys": pa.large_list(pa.binary()), "properties": text_map}
        turned = [
            row | {"properties": dict(reversed(row.get("properties", {}).items())), "keys": row.get("keys", [])}
            for row in batch
        ]
        arrays = {}
        for name in ("topic", "tags"):
            arrays[name] = pa.array([row.get(name) for row in turned], pa.string()).cast(kind)
        for name in ("keys", "properties"):
            arrays[name] = pa.array([row[name] for row in turned], kinds[name])
        body = pa.array([row["body"].decode() for row in turned], pa.string())
        assert hashes(MessageColumns.from_arrow(pa.table({"value": body, **arrays}))) == wanted
    alone = [row | {"keys": row.get("keys", [None])[0]} for row in batch]
    assert hashes(columns_of(alone, COLUMNS | {"keys": pa.string()})) == wanted
