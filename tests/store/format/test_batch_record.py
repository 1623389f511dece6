"""The BATCH record: its size is known before its numbers are, and nothing but the real thing is taken for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore import MessageIllegalError, StoreConfig
from messagestore.format.batch_record import (
    CHUNK_SIZE,
    BatchRecord,
    body,
    check_app_id,
    encode,
    parse,
    widest_body_size,
)
from messagestore.format.hosts import pack_host

HOST = pack_host("127.0.0.1:10911")


def batch(**changes: object) -> BatchRecord:
    fields: dict[str, object] = {
        "app_id": "app",
        "version": 3,
        "version_source": "spark",
        "query_id": "q",
        "store_id": "ab" * 16,
        "physical_offset": 0,
        "queue_offset": 0,
        "end": 0,
        "flush_disk_type": "SYNC_FLUSH",
        "row_count": 5,
        "ranges": {"t": [(0, 10, 3), (1, 0, 2)]},
        "crcs": (),
        "digest": 0xFFFF_FFFF_FFFF_FFFF,
    }
    return BatchRecord(**{**fields, **changes})  # type: ignore[arg-type]


@given(
    start=st.integers(0, (1 << 63) - 1),
    queue_offset=st.integers(0, (1 << 63) - 1),
    data=st.integers(0, 5 * CHUNK_SIZE),
    digest=st.integers(0, (1 << 64) - 1),
)
def test_size_is_known_before_the_numbers(start: int, queue_offset: int, data: int, digest: int) -> None:
    """Whatever S, E and the CRCs turn out to be, the body fits into the size that was planned."""
    planned = widest_body_size(batch(digest=digest), data)
    crcs = tuple(range(-(-data // CHUNK_SIZE)))
    real = batch(
        physical_offset=start, queue_offset=queue_offset, end=min(start + data, (1 << 63) - 1), crcs=crcs, digest=digest
    )
    assert len(body(real, planned)) == planned


def test_round_trip() -> None:
    """What is written is read; the size of the record is where the data begin."""
    size = len(encode(batch(), 600, StoreConfig(), HOST, 0))
    written = batch(physical_offset=4096, queue_offset=7, end=4096 + size + 100, crcs=(0xDEADBEEF,))
    data = bytes(encode(written, 600, StoreConfig(), HOST, 1_700_000_000_000))
    found = parse(data, 4096)
    assert found == replace(written, size=size)
    assert found is not None and found.data_offset == 4096 + size


def test_every_flipped_bit_is_noticed() -> None:
    """No single bit of a BATCH record can change without it being refused: its `__CRC32#` covers all of it."""
    size = len(encode(batch(), 600, StoreConfig(), HOST, 0))
    data = encode(batch(end=size), 600, StoreConfig(), HOST, 1_700_000_000_000)
    assert parse(bytes(data), 0) is not None
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert parse(bytes(data), 0) is None, f"bit {bit}"
        data[bit // 8] ^= 1 << bit % 8


def test_a_record_of_another_place_is_none() -> None:
    """A BATCH record that was copied to another offset is not taken for one."""
    data = bytes(encode(batch(physical_offset=100, end=100_000, crcs=(1,)), 600, StoreConfig(), HOST, 1))
    assert parse(data, 100) is not None
    assert parse(data, 200) is None


@pytest.mark.parametrize("change", [{"end": 5}, {"crcs": (1, 2, 3)}, {"crcs": ()}])
def test_numbers_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    """An end below the record's own, or CRCs that do not cover the data exactly."""
    good = batch(physical_offset=0, end=10_000, crcs=(1,))
    assert parse(bytes(encode(good, 600, StoreConfig(), HOST, 1)), 0) is not None
    assert parse(bytes(encode(replace(good, **change), 600, StoreConfig(), HOST, 1)), 0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("app_id", ["", "with blank", "tab\t", "x" * 256, "é" * 128, "\ud800", "a\x01b"])
def test_app_ids_that_cannot_be_a_key(app_id: str) -> None:
    """The app id is one of RocketMQ's keys."""
    with pytest.raises(MessageIllegalError, match="txnAppId"):
        check_app_id(app_id)


def test_app_ids_that_can() -> None:
    """A query id, words, and other scripts."""
    for app_id in ("2b7f9a52-1f2c-4c62-a6f9-6a1f7d0d7f6e", "late-flights", "航班"):
        check_app_id(app_id)
