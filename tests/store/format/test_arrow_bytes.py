"""Bytes of Arrow arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore.format import arrow_bytes

VALUES = [b"ab", None, b"", b"c", b"\xc3\xa9"]
KINDS = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.string_view(),
    pa.binary_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.binary()),
    pa.dictionary(pa.uint32(), pa.string_view()),  # a category of Polars
]


def arrow(kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind) and not arrow_bytes.is_plain(kind.value_type):
        indices = pa.array([0, None, 1, 2, 3], kind.index_type)
        return pa.DictionaryArray.from_arrays(indices, pa.array([b"ab", b"", b"c", b"\xc3\xa9"]).cast(kind.value_type))
    if pa.types.is_dictionary(kind):
        return pa.array(VALUES, pa.binary()).cast(kind.value_type).dictionary_encode().cast(kind)
    return pa.array(VALUES, pa.binary()).cast(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_form_of_text(kind: pa.DataType) -> None:
    """Plain, sliced, viewed or dictionary-encoded: the same bytes, nulls empty."""
    assert arrow_bytes.is_textual(kind)
    for start in range(len(VALUES)):
        array = arrow(kind).slice(start)
        data, starts, ends = arrow_bytes.ranges_of(array)
        found = [bytes(data[a:b]) for a, b in zip(starts, ends, strict=True)]
        assert found == [value or b"" for value in VALUES[start:]]
        assert arrow_bytes.valid_of(array).tolist() == [value is not None for value in VALUES[start:]]
        plain = arrow_bytes.plain(array)
        assert arrow_bytes.as_binary(plain).to_pylist() == VALUES[start:]
        assert arrow_bytes.lengths_of(plain).tolist() == [len(value or b"") for value in VALUES[start:]]


def test_what_is_no_text() -> None:
    assert not arrow_bytes.is_textual(pa.int32())
    assert not arrow_bytes.is_textual(pa.list_(pa.string()))
    assert not arrow_bytes.is_textual(pa.dictionary(pa.int32(), pa.int64()))
    assert arrow_bytes.is_textual(pa.binary(3))


def test_a_null_within_a_dictionary_is_a_null() -> None:
    for kind in (pa.string(), pa.string_view()):
        array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]).cast(kind))
        assert arrow_bytes.valid_of(array).tolist() == [True, False, True]
        assert arrow_bytes.plain(array).to_pylist() == ["a", None, "a"]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.string())], ids=str)
def test_items_of_lists(kind: pa.DataType) -> None:
    """Slices and nulls, also nulls that have items behind them."""
    lists = [["a"], None, [], ["b", "c"], ["d"]]
    array = pa.array(lists, kind)
    cls = pa.ListArray if kind == pa.list_(pa.string()) else pa.LargeListArray
    hidden = cls.from_arrays(
        pa.array([0, 1, 3, 3, 5, 6], pa.int32() if cls is pa.ListArray else pa.int64()),
        pa.array(list("aXXbcd")),
        mask=pa.array([False, True, False, False, False]),
    )
    for candidate in (array, hidden):
        for start in range(6):
            part = candidate.slice(start)
            counts, pick = arrow_bytes.items_of(part)
            assert counts.tolist() == [len(row or []) for row in lists[start:]]
            assert pick(part.values).to_pylist() == [text for row in lists[start:] for text in row or []]


def test_items_of_maps() -> None:
    maps = [[("a", "1")], None, [], [("b", "2"), ("c", "3")]]
    array = pa.array(maps, pa.map_(pa.string(), pa.string()))
    for start in range(5):
        counts, pick = arrow_bytes.items_of(array.slice(start))
        assert counts.tolist() == [len(row or []) for row in maps[start:]]
        assert pick(array.slice(start).keys).to_pylist() == [k for row in maps[start:] for k, _ in row or []]


def test_unaligned() -> None:
    """Items at any position, to read and to write; none in too few bytes."""
    data = np.arange(6, dtype=np.uint8)
    view = arrow_bytes.unaligned(data, ">u2")
    assert view[[0, 3, 4]].tolist() == [0x0001, 0x0304, 0x0405]
    view[np.array([1])] = 0xFFEE
    assert data.tolist() == [0, 0xFF, 0xEE, 3, 4, 5]
    assert len(arrow_bytes.unaligned(data[:1], ">u2")) == 0
    assert len(arrow_bytes.unaligned(data[:0], "V16")) == 0


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary()], ids=str)
def test_rows_with_separators(kind: pa.DataType) -> None:
    array = pa.array(["ok", "a\x01", "", None, "b c", "\x02\x02", "\x00\x03"]).cast(kind)
    assert arrow_bytes.rows_with(array, blanks=False).tolist() == [1, 5]
    assert arrow_bytes.rows_with(array, blanks=True).tolist() == [1, 4, 5]
    assert arrow_bytes.rows_with(array.slice(2), blanks=True).tolist() == [2, 3]
    assert arrow_bytes.rows_with(array.slice(0, 1), blanks=True).tolist() == []


def test_a_separator_behind_a_null_does_not_count() -> None:
    """What lies under a null is not the user's."""
    array = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([0, 2, 4], np.int32)), pa.py_buffer(b"\x01 ok")]
    )
    assert arrow_bytes.rows_with(array, blanks=True).tolist() == []


def test_rows_that_are_not_utf8() -> None:
    array = pa.array([b"a", b"\xff", None, "é".encode(), b"\xe4\xb8"], pa.binary())
    assert arrow_bytes.rows_not_utf8(array) == [1, 4]
    assert arrow_bytes.rows_not_utf8(array.view(pa.string()).slice(2)) == [2]
    assert arrow_bytes.rows_not_utf8(array.cast(pa.large_binary()).slice(2, 2)) == []
    halves = pa.array([b"\xe4\xb8", b"\xad"], pa.binary())
    assert arrow_bytes.rows_not_utf8(halves) == [0, 1]


def test_flat_index() -> None:
    assert arrow_bytes.flat_index(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert arrow_bytes.flat_index(np.empty(0, np.int64), np.empty(0, np.int64)).tolist() == []


TEXTS = pa.string()
OBJECTS: list[tuple[pa.DataType, st.SearchStrategy]] = [
    (TEXTS, st.none() | st.text(max_size=5)),
    (pa.large_string(), st.none() | st.text(max_size=5)),
    (pa.binary(), st.none() | st.binary(max_size=5)),
    (pa.large_binary(), st.binary(max_size=5)),
    (pa.list_(TEXTS), st.none() | st.lists(st.none() | st.text(max_size=5), max_size=3)),
    (pa.large_list(pa.int32()), st.none() | st.lists(st.integers(-9, 9), max_size=3)),
    (pa.map_(TEXTS, TEXTS), st.none() | st.lists(st.tuples(st.text(max_size=5), st.none() | st.text()), max_size=3)),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.uint64(), st.integers(0, (1 << 64) - 1)),
    (pa.bool_(), st.booleans()),
]


@pytest.mark.parametrize(("kind", "values"), OBJECTS, ids=[str(kind) for kind, _ in OBJECTS])
@given(data=st.data())
def test_arrays_of_objects_are_those_of_pyarrow(kind: pa.DataType, values: st.SearchStrategy, data) -> None:
    given_values = data.draw(st.lists(values, max_size=20))
    made = arrow_bytes.list_array(given_values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(given_values, kind))
    assert made.null_count == given_values.count(None)


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.int32(), pa.int64(), pa.uint64()], ids=str)
@given(values=st.lists(st.none() | st.integers(0, 1), max_size=40), start=st.integers(0, 40))
def test_numbers_of_arrays(kind: pa.DataType, values: list[int | None], start: int) -> None:
    """Sliced and with nulls; and back."""
    array = pa.array(values, pa.int8()).cast(kind).slice(min(start, len(values)))
    whole = array.fill_null(bool(1) if kind == pa.bool_() else 1)
    assert arrow_bytes.numpy_of(array, null=1).tolist() == whole.to_pylist()
    numbers = arrow_bytes.numpy_of(whole)
    assert numbers.dtype == kind.to_pandas_dtype()
    assert arrow_bytes.array_of(numbers).equals(whole)
    assert arrow_bytes.array_of(numbers[::2]).to_pylist() == whole.to_pylist()[::2]
    if array.null_count:
        with pytest.raises(ValueError, match=f"found {array.null_count} nulls in an array of {len(array)}"):
            arrow_bytes.numpy_of(array)


def test_codes_of_a_dictionary() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.uint8()), pa.array(["a", "b"]))
    assert arrow_bytes.codes_of(array).tolist() == [1, -1, 0]
    assert arrow_bytes.codes_of(array.slice(1)).tolist() == [-1, 0]
