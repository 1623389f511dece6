"""XXH3 in C and in Python, beside the test vectors of xxHash and an implementation by somebody else."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from messagestore.format import kernel
from messagestore.format.xxh3 import xxh3, xxh3_of

VECTORS = {
    0: 0x2D06800538D394C2,
    1: 0xC44BDFF4074EECDB,
    6: 0x27B56A84CD2D7325,
    12: 0xA713DAF0DFBB77E7,
    24: 0xA3FE70BF9D3510EB,
    48: 0x397DA259ECBA1F11,
    80: 0xBCDEFBBB2C47C90A,
    195: 0xCD94217EE362EC3A,
    403: 0xCDEB804D65C6DEA4,
    512: 0x617E49599013CB6B,
    2048: 0xDD59E2C3A5F038E0,
    2099: 0xC6B9D9B3FC9AC765,
    2240: 0x6E73A90539CF2948,
    2367: 0xCB37AEB9E5D361ED,
}
"""The hashes of the first bytes of `sanity_buffer`, without a seed, in the tests of xxHash (`tests/sanity_test.c`)."""


def sanity_buffer(size: int) -> bytes:
    """The bytes that xxHash is tested with."""
    data, value = bytearray(), 2654435761
    for _ in range(size):
        data.append(value >> 56)
        value = value * 11400714785074694797 % 2**64
    return bytes(data)


def by_both(values: list[bytes]) -> list[int]:
    """By the kernel, if there is one, and by Python: the same."""
    array = pa.array(values, pa.large_binary())
    found = xxh3_of(array)
    assert found.dtype == np.uint64
    with mock.patch.object(kernel, "lib", None):
        assert xxh3_of(array).tolist() == found.tolist() == [xxh3(value) for value in values]
    return found.tolist()


def test_vectors() -> None:
    data = sanity_buffer(max(VECTORS))
    assert by_both([data[:size] for size in VECTORS]) == list(VECTORS.values())


def test_every_size_up_to_some_blocks() -> None:
    """Each way through the function, and each remainder: 16, 128 and 240 bytes, stripes of 64, blocks of 1024."""
    data = random.Random(1).randbytes(5000)
    sizes = [*range(1300), *range(2040, 2060), *range(2100, 2120), *range(3064, 3140), 4096, 4097, 5000]
    assert by_both([data[:size] for size in sizes]) == [xxhash.xxh3_64_intdigest(data[:size]) for size in sizes]


@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_numbers_that_overflow(fill: int) -> None:
    values = [bytes([fill]) * size for size in (1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025, 65536)]
    assert by_both(values) == [xxhash.xxh3_64_intdigest(value) for value in values]


@given(st.lists(st.binary(max_size=600), max_size=5))
def test_any_bytes(values: list[bytes]) -> None:
    assert by_both(values) == [xxhash.xxh3_64_intdigest(value) for value in values]


def test_values_of_every_type() -> None:
    """Texts of every Arrow type, parts of arrays, dictionaries; a null is hashed like no bytes."""
    texts = ["before", "a", None, "größe" * 60, "", "a", "behind"]
    wanted = [xxhash.xxh3_64_intdigest((text or "").encode()) for text in texts[1:6]]
    for lib in (kernel.lib, None):
        with mock.patch.object(kernel, "lib", lib):
            for kind in (
                pa.string(),
                pa.large_string(),
                pa.binary(),
                pa.string_view(),
                pa.dictionary(pa.int8(), pa.string()),
            ):
                array = pa.array(texts, pa.string()).cast(kind).slice(1, 5)
                assert xxh3_of(array).tolist() == wanted
