"""Java's String.hashCode, for one text and for many."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strategies
import vectors
from messagestore.format import javahash

KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]
texts = st.one_of(strategies.texts, st.just(""), st.text(st.characters(codec="utf-8"), max_size=200))


def arrow(values: list[str | None], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode()
    binary = kind in (pa.binary(), pa.large_binary())
    return pa.array([v.encode() if binary and v is not None else v for v in values], kind)


def test_known_hashes() -> None:
    """What Java gave, 中文 and the text with the smallest hash among them."""
    for text, value in vectors.HASHES.items():
        assert javahash.java_hash(text) == value
        assert reference.java_hash(text) == value
    assert javahash.java_hashes(pa.array(list(vectors.HASHES))).tolist() == list(vectors.HASHES.values())


def test_known_index_hashes() -> None:
    for (topic, key), value in vectors.INDEX_HASHES.items():
        assert javahash.index_hash(topic, key) == reference.index_key(topic, key) == value


def test_the_smallest_hash_has_no_abs() -> None:
    """orders#d1kjgwz hashes to -2147483648, whose abs Java cannot hold: its slot is that of 0."""
    assert javahash.java_hash("orders#d1kjgwz") == -(2**31)
    assert javahash.index_hash("orders", "d1kjgwz") == 0
    assert javahash.index_hashes(np.array([-(2**31), -5, 7], np.int32)).tolist() == [0, 5, 7]
    hashes = np.array([-(2**31), -5, 7], np.int32)
    assert javahash.queue_of_hash(hashes, 4).tolist() == [0, 1, 3]
    assert javahash.queue_of_hash(hashes, np.array([1, 2, 3], np.int32)).tolist() == [0, 1, 1]
    assert javahash.queue_of_hash(hashes, 4).dtype == np.int32


@given(strategies.any_text)
def test_lone_surrogates_are_code_units(text: str) -> None:
    """A Python text may hold what UTF-8 cannot; its hash is that of its code units."""
    assert javahash.java_hash(text) == reference.java_hash(text)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(values=st.lists(st.none() | texts, max_size=30), data=st.data())
def test_arrays_agree_with_the_oracle(kind: pa.DataType, values: list[str | None], data: st.DataObject) -> None:
    """Whatever the type, nulls and slices: each hash is the oracle's."""
    start = data.draw(st.integers(0, len(values)))
    array = arrow(values, kind).slice(start)
    wanted = [text or "" for text in values[start:]]
    hashes = javahash.java_hashes(array)
    assert hashes.dtype == np.int32
    assert hashes.tolist() == [reference.java_hash(text) for text in wanted]


def test_long_texts_cross_chunks() -> None:
    """Texts that end, begin and lie across the end of a chunk, and one longer than a chunk."""
    rng = np.random.default_rng(1)
    for sizes in ([65536, 1, 65535, 2], [1, 65536, 0, 70000, 3], [200_000], [30_000] * 7, [0, 0, 65536, 0]):
        values = ["".join(map(chr, rng.integers(97, 123, size))) for size in sizes]
        assert javahash.java_hashes(pa.array(values)).tolist() == [reference.java_hash(v) for v in values]
        wide = [v + "é" for v in values]
        assert javahash.java_hashes(pa.array(wide)).tolist() == [reference.java_hash(v) for v in wide]


def test_bytes_that_are_not_utf8() -> None:
    """Java reads each fault as U+FFFD; rows beside it are not affected."""
    values = [b"ok", b"\xff", b"a\xe4\xb8", "é".encode(), b"\x80\x80z", b"\xed\xa0\x80", b""]
    wanted = [reference.java_hash(v.decode("utf-8", "replace")) for v in values]
    assert javahash.java_hashes(pa.array(values, pa.binary())).tolist() == wanted


def test_a_text_cut_within_a_character_beside_its_rest() -> None:
    """Two values that are UTF-8 only when read together are still hashed apart."""
    values = [b"x\xe4\xb8", b"\xad", b"\xf0\x9f", b"\x98\x80"]
    wanted = [reference.java_hash(v.decode("utf-8", "replace")) for v in values]
    assert javahash.java_hashes(pa.array(values, pa.binary())).tolist() == wanted


def test_one_long_key_among_short_ones_needs_no_matrix() -> None:
    """A key of 4 KiB among 100 000 short ones must not cost 400 MB."""
    values = pa.array([f"k{i:08d}" for i in range(100_000)] + ["x" * 4096])
    javahash.java_hashes(values[:10])
    tracemalloc.start()
    try:
        hashes = javahash.java_hashes(values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert hashes[-1] == reference.java_hash("x" * 4096)
    assert peak < 16 << 20


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=20))
def test_the_index_hash_of_a_key_behind_the_hash_of_a_topic(pairs: list[tuple[str, str]]) -> None:
    """topic#key is never put together: its hash goes on from that of the topic."""
    before = javahash.java_hashes(pa.array([f"{topic}#" for topic, _ in pairs]))
    found = javahash.index_hashes_behind(before, pa.array([key for _, key in pairs]))
    assert found.tolist() == [reference.index_key(topic, key) for topic, key in pairs]


def test_nothing() -> None:
    for kind in KINDS:
        assert javahash.java_hashes(arrow([], kind)).tolist() == []
    assert javahash.index_hashes_behind(np.empty(0, np.int32), pa.array([], pa.string())).tolist() == []
