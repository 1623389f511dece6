"""The kernel against the scalar codec: the same bytes, the same numbers, and the same rows refused."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from crash.kernel_cases import ABUSES, HOSTS, NASTY, abuse_encode, abused, both, difference, difference_of_message
from messagestore.format import kernel, record_encode
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host
from messagestore.format.message import Message
from messagestore.format.message_columns import ColumnTexts, MessageColumns
from messagestore.format.record_encode import encode

pytestmark = pytest.mark.skipif(kernel.lib is None, reason=f"no compiled kernel: {kernel.why_not}")

TEXT_MAP = pa.map_(pa.string(), pa.string())


def same(columns: MessageColumns, **options: Any) -> Any:
    """What both codecs make of the columns, which is the same."""
    by_kernel, by_rows = both(columns, **options)
    assert by_kernel == by_rows
    return by_kernel


@pytest.mark.parametrize("seed", range(150))
def test_hostile_batches_are_the_same_by_both_codecs(seed):
    """NULs, empty and broken texts, characters of four bytes, nulls, parts of arrays, large and dictionary types,
    lists with nulls, names that are reserved or there twice, V2 topics, IPv6 hosts, with and without property CRC.
    """
    by_kernel, by_rows = difference(seed, legal=seed % 3 == 0)
    assert by_kernel == by_rows
    if seed % 3 == 0:
        assert len(by_kernel) > 3, by_kernel  # no error


@pytest.mark.parametrize("seed", range(40))
def test_hostile_messages_are_the_same_by_both_codecs(seed):
    """One message at a time: other types and subclasses, mutable bodies and parts of them, numbers that do not fit,
    many keys and properties, lone surrogates, extra properties, both magics, IPv6 hosts.
    """
    encoded = 0
    for number in range(seed * 50, seed * 50 + 50):
        by_kernel, by_rows = difference_of_message(number, legal=number % 3 == 0)
        assert by_kernel == by_rows, number
        encoded += len(by_kernel) == 4
    assert encoded > 15


def test_the_kernel_encodes_what_producers_send(monkeypatch):
    """What it leaves to the scalar codec is rare; otherwise its own encoder would have no use."""
    monkeypatch.setattr(record_encode, "encode_message", None)
    for message in (
        Message("T", b""),
        Message("T", bytearray(b"b"), keys=["k", "é"], tags="a b", properties={"x": "y"}, born_timestamp_ms=5),
        Message("T", b"b" * 70_000, keys=("k",), wait_store_msg_ok=False, born_host=HOSTS[1], flag=-1, sys_flag=4),
    ):
        record, tags_code, key_hashes = record_encode.encode_one(
            message, queue_id=1, store_host=pack_host(HOSTS[0]), limits=StoreConfig(), property_crc=True, unique_key="u"
        )
        assert len(record) > len(message.body)
        assert bool(tags_code) == bool(message.tags)
        assert len(key_hashes) == 1 + len(message.keys)


@pytest.mark.parametrize("seed", range(20))
def test_arguments_that_do_not_fit_together_are_errors(seed):
    """Nothing else comes of them; `make crash` does this with sanitizers, which see more."""
    for number in range(seed * 100, seed * 100 + 100):
        abused(kernel.lib, number, ABUSES)


words = st.one_of(strategies.texts, st.sampled_from(NASTY), strategies.any_text.filter(lambda text: not _lone(text)))


def _lone(text: str) -> bool:
    return any(0xD800 <= ord(character) < 0xE000 for character in text)


@given(
    rows=st.lists(
        st.tuples(
            strategies.bodies,
            st.none() | st.lists(words, max_size=3),
            st.none() | words,
            st.none() | words,
            st.none() | st.lists(st.tuples(words, words), max_size=3),
        ),
        max_size=6,
    ),
    crc=st.booleans(),
    hosts=st.tuples(st.sampled_from(HOSTS), st.sampled_from(HOSTS)),
)
def test_any_texts_are_the_same_by_both_codecs(rows, crc, hosts):
    body, keys, tags, unique_key, properties = zip(*rows, strict=True) if rows else [()] * 5
    columns = MessageColumns(
        topic="T",
        queue_id=np.arange(len(rows), dtype=np.int32) % 2,
        body=pa.array(body, pa.binary()),
        keys=pa.array(keys, pa.list_(pa.string())),
        tags=pa.array(tags, pa.string()),
        unique_key=pa.array(unique_key, pa.string()),
        properties=pa.array(properties, TEXT_MAP),
        born_timestamp_ms=np.zeros(len(rows), np.int64),
    )
    same(columns, crc=crc, store=hosts[0], born=hosts[1])


@pytest.mark.parametrize("n", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_rows_are_the_same_by_both_codecs(n: int):
    chance = np.random.default_rng(7)
    numbers = chance.integers(0, 1 << 40, n).tolist()
    columns = MessageColumns(
        topic=pa.array([("one", "two")[number % 2] for number in numbers]),
        queue_id=chance.integers(0, 200, n).astype(np.int32),
        body=pa.array([b"body %d" % number for number in numbers], pa.large_binary()),
        keys=pa.array([f"key-{number}" for number in numbers]),
        tags=pa.array([f"tag{number % 7}" for number in numbers]).dictionary_encode(),
        born_timestamp_ms=np.array(numbers),
    )
    found = same(columns, crc=True)
    assert len(found[0]) > 100 * n
    stamped = same(columns.slice(0, 1000), crc=True, cluster="DefaultCluster")
    assert len(stamped[0]) == len(same(columns.slice(0, 1000), crc=True)[0]) + 1000 * len("CLUSTER=DefaultCluster;")


@pytest.mark.parametrize(
    ("names", "legal"),
    [
        ([f"n{i}" for i in range(17)], True),
        ([*(f"n{i}" for i in range(17)), "n3"], False),
        ([f"n{i}" for i in range(3000)], True),
        ([*(f"n{i}" for i in range(3000)), "n2999"], False),
        (["Aa", "BB"], True),  # of one hash
        (["Aa", "BB", "Aa"], False),
        ([f"{a}{b}{c}{d}{e}" for a in ("Aa", "BB") for b in ("Aa", "BB") for c in ("Aa", "BB") for d in ("Aa", "BB") for e in ("Aa", "BB")], True),
    ],
    ids=["17", "17 and one again", "3000", "3000 and one again", "one hash", "one hash, one again", "32 of one hash"],
)  # fmt: skip
def test_names_that_a_row_has_twice(names, legal):
    """The row before has the same names, so that what is remembered of it must not hide the second one."""
    rows = [[(name, "v") for name in names[:16]], [(name, "v") for name in names]]
    columns = MessageColumns(
        "T", np.zeros(2, np.int32), pa.array([b"", b""]), properties=pa.array(rows, TEXT_MAP), born_timestamp_ms=np.zeros(2, np.int64)
    )  # fmt: skip
    found = same(columns)
    assert (len(found) > 3) == legal


def test_columns_whose_offsets_lead_outside_are_refused():
    """Arrow trusts its offsets; the kernel reads no byte outside the buffer."""
    for offsets in ([0, 5], [-1, 2], [3, 1], [0, 2**31 - 1]):
        memory = np.array([0, 4], np.int32)
        body = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(memory), pa.py_buffer(b"abcd")])
        memory[:] = offsets  # behind the back of Arrow, which looks only once
        with pytest.raises(ValueError, match="row 0: its offsets lead outside the column"):
            encode(
                MessageColumns("T", np.zeros(1, np.int32), body),
                limits=StoreConfig(), store_host=pack_host(HOSTS[0]), born_host=pack_host(HOSTS[0]),
            )  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "position", "message"),
    [
        ([0, 50], 56, "record 0: found 0 to 50"),
        ([0, 150], 56, "record 1: found 150 to 200"),
        ([-1, 100], 56, "record 0: found -1 to 100"),
        ([100, 0], 56, "record 0: found 100 to 0"),
        ([0, 100], 84, "store_timestamp_position: found 84"),
        ([0, 100], -1, "store_timestamp_position: found -1"),
    ],
)
def test_stamping_outside_the_data_is_refused(starts, position, message):
    data, two = np.zeros(200, np.uint8), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=message):
        kernel.lib.stamp(data, np.array(starts, np.int64), two, two, 0, position, True)
    assert not data.any()


def test_a_part_of_the_wrong_arguments_is_encoded():
    """The guard of the cases above: an error in their making would make each of them a TypeError."""
    done = 0
    for seed in range(300):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            abuse_encode(kernel.lib, random.Random(seed))
            done += 1
    assert 50 < done < 250


@pytest.mark.parametrize("place", [20])
def test_fields_of_the_digest_that_do_not_fit_are_errors(place):
    host = pack_host(HOSTS[0])
    columns = MessageColumns("T", np.zeros(2, np.int32), pa.array([b"1", b"2"]), sharding_key=pa.array(["a", None]))
    batch = list(record_encode._batch(ColumnTexts(columns), StoreConfig(), host, host, True))
    [(number, values, present)] = batch[place]
    for wrong, error in (
        (((number, values[:1], present),), ValueError),
        (((number, values, present[:1]),), ValueError),
        (((0, values, present),), ValueError),
        (((number, values, present),) * 2, ValueError),
        (((number, values, present),) * 9, ValueError),
        ([(number, values, present)], ValueError),
        ((number, values, present), TypeError),
    ):
        batch[place] = wrong
        with pytest.raises(error):
            kernel.lib.encode_size(tuple(batch))
