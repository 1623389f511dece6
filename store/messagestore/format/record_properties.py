"""The properties of many records as columns.

The property strings of all rows are gathered into one buffer. If every row reads name 0x01 value 0x02 ... with names
and values that are not empty, the places of the separators alone say where each name and value is, for all rows at
once. A row that reads otherwise, or is not UTF-8, is first rewritten the way Java understands it. That is a loop over
such rows only; no writer of today produces them.
"""

from __future__ import annotations

from functools import cache, cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.format.arrow_bytes import (
    array_of,
    data_of,
    gather,
    list_array,
    numpy_of,
    offsets_of,
    rows_not_utf8,
    unaligned,
)
from messagestore.format.properties import (
    KEYS,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    RESERVED_PROPERTIES,
    TAGS,
    UNIQUE_KEY,
    WAIT,
    decode_properties,
    encode_properties,
)

_WORD = 8
_FREQUENT = (KEYS, TAGS, UNIQUE_KEY, WAIT)
"""Reserved names of at most eight bytes: each is one number (`_words`) and needs no dictionary look-up."""
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)] + [0], np.uint64)
_TOPS = np.array([(0x80 | size) << 56 for size in range(_WORD)] + [0, 0], np.uint64)
"""Indexed by the size of the name; the last item is for all names of more than eight bytes."""


def _word(name: str) -> np.uint64:
    """A frequent name as a number, as in `_words`."""
    return np.uint64(int.from_bytes(name.encode(), "little")) | _TOPS[len(name)]  # type: ignore[no-any-return]


_FREQUENT_WORDS = {name: _word(name) for name in _FREQUENT}


class PropertyTexts:
    """The properties of n rows.

    Parameters
    ----------
    data : uint8[m]
        Bytes of the log; they are not changed.
    starts, ends : int64[n]
        Where each row's property string is in `data`.
    """

    def __init__(self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self.row_count = len(starts)
        texts = gather(data, starts, ends)
        marks = _Marks(texts)
        bad = marks.bad_rows()
        bad = np.union1d(bad, np.array(rows_not_utf8(texts), np.int64))
        if len(bad):
            marks = _Marks(_rewritten(texts, bad))
            marks.drop_those_in_values()
        self._data = marks.data
        self._row_ends = marks.offsets[1:]
        self._name_ends = marks.positions[0::2]
        self._value_starts = self._name_ends + 1
        self._value_ends = marks.positions[1::2]
        self._name_starts = np.concatenate([np.zeros(1, np.int64), self._value_ends + 1])[:-1]

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """The row of each property: int64[k]."""
        count = len(self._value_ends)
        each = count // max(self.row_count, 1)
        if each * self.row_count == count and np.array_equal(
            self._value_ends[each - 1 :: each or 1], self._row_ends - 1
        ):
            return np.repeat(np.arange(self.row_count), each)  # every row has the same number of properties
        is_last = np.zeros(len(self._data), np.bool_)
        sizes = np.diff(self._row_ends, prepend=0)
        filled = np.flatnonzero(sizes)
        is_last[self._row_ends[filled] - 1] = True
        last = is_last[self._value_ends]
        ordinal: NDArray[np.int64] = np.cumsum(last) - last
        return ordinal if len(filled) == self.row_count else filled[ordinal]

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        """Each name of at most eight bytes as one number, 0 for a longer one: uint64[k].

        In the number of a shorter name, the last byte is its size and 0x80. No UTF-8 text of eight bytes has such a
        byte there after such bytes.
        """
        starts = self._name_starts
        sizes = np.minimum(self._name_ends - starts, _WORD + 1)
        data = self._data
        if len(data) < _WORD:
            data = np.concatenate([data, np.zeros(_WORD, np.uint8)])
        words: NDArray[np.uint64] = unaligned(data, np.uint64)[np.minimum(starts, len(data) - _WORD)]
        for item in range(
            max(len(starts) - 2, 0), len(starts)
        ):  # within the last eight bytes: shift out the bytes before
            before = max(int(starts[item]) - (len(data) - _WORD), 0)
            words[item] >>= np.uint64(8 * before)
        words &= _MASKS[sizes]
        words |= _TOPS[sizes]
        return words

    def _find(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The properties with a frequent name, at most one per row (the last one), and their rows."""
        items = np.flatnonzero(self._words == _FREQUENT_WORDS[name])
        rows = self._rows[items]
        last = np.append(rows[1:] != rows[:-1], True) if len(rows) else np.empty(0, np.bool_)
        return (items, rows) if last.all() else (items[last], rows[last])

    def _values(self, items: NDArray[np.int64]) -> pa.Array:
        found = gather(self._data, self._value_starts[items], self._value_ends[items])
        return found.view(pa.string())

    def column(self, name: str) -> pa.Array:
        """The value of a frequent property in each row: string[n], null in rows without it."""
        items, rows = self._find(name)
        values = self._values(items)
        if len(rows) == self.row_count:
            return values
        present = np.zeros(self.row_count, np.bool_)
        present[rows] = True
        offsets = offsets_of(values)[np.concatenate([[0], np.cumsum(present)])]
        bitmap = pa.py_buffer(np.packbits(present, bitorder="little"))
        return pa.Array.from_buffers(
            pa.string(), self.row_count, [bitmap, pa.py_buffer(offsets), values.buffers()[2] or pa.py_buffer(b"")]
        )

    def keys(self) -> pa.Array:
        """KEYS of each row, split at single blanks, without empty pieces: list of string [n]; empty without KEYS."""
        items, rows = self._find(KEYS)
        texts = self._values(items)
        data, offsets = data_of(texts), offsets_of(texts).astype(np.int64)
        cuts = np.flatnonzero(data[: int(offsets[-1])] == 0x20)
        if len(cuts):
            starts = np.sort(np.concatenate([offsets[:-1], cuts + 1]))
            ends = np.sort(np.concatenate([cuts, offsets[1:]]))
            filled = starts < ends
            starts, ends = starts[filled], ends[filled]
            rows = rows[np.searchsorted(offsets, starts, "right") - 1]
            texts = gather(data, starts, ends).view(pa.string())
        counts = np.bincount(rows, minlength=self.row_count)
        return _lists(pa.list_(pa.string()), counts, texts)

    def map(self, *, reserved: bool) -> pa.Array:
        """The properties of each row whose names are RocketMQ's (`reserved`) or the user's own: map[n], none null."""
        frequent = np.zeros(len(self._name_ends), np.bool_)
        for word in _FREQUENT_WORDS.values():
            frequent |= self._words == word
        kind = pa.map_(pa.string(), pa.string())
        items = np.arange(len(frequent)) if reserved else np.flatnonzero(~frequent)
        names = gather(self._data, self._name_starts[items], self._name_ends[items]).dictionary_encode()
        is_reserved = pc.is_in(names.dictionary, _reserved().cast(names.dictionary.type))
        codes = numpy_of(names.indices)
        wanted = numpy_of(is_reserved) == reserved
        if not wanted.all():
            kept = wanted[codes]
            items, codes = items[kept], codes[kept]
        last = self._last_of_each(items, codes)
        if last is not None:
            items, codes = items[last], codes[last]
        counts = np.bincount(self._rows[items], minlength=self.row_count)
        texts = names.dictionary.view(pa.string()).take(array_of(codes))
        entries = pa.StructArray.from_arrays([texts, self._values(items)], fields=[kind.key_field, kind.item_field])
        return _lists(kind, counts, entries)

    def _last_of_each(self, items: NDArray[np.int64], codes: NDArray[np.int32]) -> NDArray[np.int64] | None:
        """If a row has a name twice: which properties to keep, the last one of each name. None if no row has."""
        rows = self._rows[items]
        pairs = rows * (int(codes.max(initial=0)) + 1) + codes
        if bool((pairs[1:] > pairs[:-1]).all()):
            return None  # all rows have the same names in the same order, or one name per row
        order = np.argsort(pairs, kind="stable")
        last = np.append(pairs[order[1:]] != pairs[order[:-1]], True)
        return None if last.all() else np.sort(order[last])


class _Marks:
    """The separators in the property strings of n rows.

    Attributes
    ----------
    data, offsets : uint8[m], int64[n+1]
        The strings, back to back from 0 on.
    positions, kinds : int64[k], uint8[k]
        Where the separators are, and which of the two each one is: 0x01 or 0x02.
    """

    def __init__(self, texts: pa.Array) -> None:
        self.offsets = offsets_of(texts).astype(np.int64)
        self.data = data_of(texts)[: int(self.offsets[-1])]
        self.positions = np.flatnonzero((self.data - np.uint8(1)) < 2)
        self.kinds = self.data[self.positions]

    def bad_rows(self) -> NDArray[np.int64]:
        """The rows that do not consist of name 0x01 value 0x02 with names and values of at least one byte."""
        starts, ends = self.offsets[:-1], self.offsets[1:]
        filled = ends > starts
        closed = self.data[ends[filled] - 1] == PROPERTY_SEPARATOR[0]
        if self._all_alternate() and closed.all():
            return np.empty(0, np.int64)
        rows = np.searchsorted(self.offsets, self.positions, "right") - 1
        firsts = np.searchsorted(self.positions, starts)
        odd = (np.arange(len(rows)) - firsts[rows]) & 1
        before = np.where(np.arange(len(rows)) > firsts[rows], np.append(-1, self.positions[:-1]), starts[rows] - 1)
        wrong = (self.kinds != NAME_VALUE_SEPARATOR[0] + odd) | (self.positions - before < 2)
        unclosed = np.flatnonzero(filled)[~closed]
        return np.union1d(rows[wrong], unclosed)

    def drop_those_in_values(self) -> None:
        """Forget each 0x01 behind another one: Java splits at the first, and the others belong to the value."""
        closes = self.kinds == PROPERTY_SEPARATOR[0]
        opens = np.append(True, closes[:-1])[: len(closes)]
        self.positions, self.kinds = self.positions[closes | opens], self.kinds[closes | opens]

    def _all_alternate(self) -> bool:
        """Whether the separators of all rows alternate, and none is directly behind another."""
        names, values = self.kinds[0::2], self.kinds[1::2]
        if len(names) != len(values) or not len(names):
            return len(names) == len(values)
        gaps = np.diff(self.positions, prepend=-1)
        return bool(
            (names == NAME_VALUE_SEPARATOR[0]).all() and (values == PROPERTY_SEPARATOR[0]).all() and gaps.min() > 1
        )


def _rewritten(texts: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """The texts, with some rows rewritten as Java reads them. They are rewritten one by one, as each is wrong in its
    own way.
    """
    fixed = [encode_properties(decode_properties(texts[row].as_py()).items()) for row in rows.tolist()]
    mask = np.zeros(len(texts), np.bool_)
    mask[rows] = True
    return pc.replace_with_mask(texts, array_of(mask), list_array(fixed, texts.type))


def _lists(kind: pa.DataType, counts: NDArray[np.int64], items: pa.Array) -> pa.Array:
    """A list or map array without nulls, made from the items of all rows."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.Array.from_buffers(kind, len(counts), [None, pa.py_buffer(offsets)], children=[items])


@cache
def _reserved() -> pa.Array:
    """Reserved names."""
    return list_array([name.encode() for name in sorted(RESERVED_PROPERTIES)], pa.binary())
