"""The bytes of Arrow arrays.

Arrow provides the buffers, and numpy computes on them. Functions copy only if their docstring says so. A *plain* array
is a string, binary, large_string or large_binary array: it has one buffer of offsets and one of bytes.

The package makes arrays with `array_of` and `list_array`, and reads their values with `numpy_of`. If
pandas is installed, pyarrow's own functions for this import it, which costs every process 0.3 s and 40 MB for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_EMPTY = np.empty(0, np.uint8)
MAX_SMALL = (1 << 31) - 1
"""The number of bytes that offsets of 32 bits can address. Above it, the large types are used."""


def is_large(kind: pa.DataType) -> bool:
    """Whether a string, binary, list or map type has offsets of 64 bits."""
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind))


def is_plain(kind: pa.DataType) -> bool:
    """Whether a type is string, binary, large_string or large_binary."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_binary(kind) or (is_large(kind) and not pa.types.is_large_list(kind))
    )


def is_textual(kind: pa.DataType) -> bool:
    """Whether `plain` accepts an array of this type: texts or bytes in any of Arrow's forms."""
    if pa.types.is_dictionary(kind):
        return is_textual(kind.value_type)
    return is_plain(kind) or pa.types.is_fixed_size_binary(kind) or kind in (pa.string_view(), pa.binary_view())


def plain(array: pa.Array) -> pa.Array:
    """The same values as a plain array. It copies only what is not plain yet."""
    if isinstance(array, pa.DictionaryArray):
        # Arrow decodes no dictionary of views, which the categories of Polars are.
        array = pa.DictionaryArray.from_arrays(array.indices, plain(array.dictionary), safe=False).dictionary_decode()
    if not is_plain(array.type):
        binary = pa.types.is_fixed_size_binary(array.type) or array.type == pa.binary_view()
        array = array.cast(pa.binary() if binary else pa.string())
    return array


def as_binary(array: pa.Array) -> pa.Array:
    """A plain array as binary or large_binary: the same buffers."""
    if pa.types.is_string(array.type):
        return array.view(pa.binary())
    return array.view(pa.large_binary()) if pa.types.is_large_string(array.type) else array


def array_of(values: NDArray[Any]) -> pa.Array:
    """An Arrow array over the numbers of a numpy array. It copies bools only."""
    kind = pa.from_numpy_dtype(values.dtype)
    data = _bits(values) if kind == pa.bool_() else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, data])


def list_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array of Python objects.

    Parameters
    ----------
    values : sequence
        Texts or bytes, lists, lists of pairs for a map, and None for null; or numbers or bools, without None.
    kind : pa.DataType
        Theirs: a plain type, list, map, or that of the numbers.

    Raises
    ------
    ValueError
        More than 2 GiB for offsets of 32 bits.
    """
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_plain(kind) or is_list or pa.types.is_map(kind)):
        return array_of(np.array(values, kind.to_pandas_dtype()))

    present = np.array([value is not None for value in values], np.bool_)
    nulls = None if present.all() else _bits(present)

    children = []
    if is_plain(kind):
        items: list[Any] = [value.encode() if isinstance(value, str) else value or b"" for value in values]
        data = [pa.py_buffer(b"".join(items))]
    else:
        items, data = [value or () for value in values], []
        flat = [item for value in items for item in value]
        children = [list_array(flat, kind.value_type) if is_list else _entries(flat, kind)]

    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(item) for item in items], out=offsets[1:])
    if not is_large(kind):
        if offsets[-1] > MAX_SMALL:
            raise ValueError(f"found {offsets[-1]} bytes for one array of {kind}; allowed are {MAX_SMALL}")
        offsets = offsets.astype(np.int32)

    return pa.Array.from_buffers(kind, len(values), [nulls, pa.py_buffer(offsets), *data], children=children)


def _entries(pairs: list[tuple[Any, Any]], kind: pa.DataType) -> pa.Array:
    columns = [
        list_array([pair[0] for pair in pairs], kind.key_type), list_array([pair[1] for pair in pairs], kind.item_type)
    ]  # fmt: skip
    return pa.StructArray.from_arrays(columns, fields=[kind.key_field, kind.item_field])


def _bits(values: NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def numpy_of(array: pa.Array, null: int | None = None) -> NDArray[Any]:
    """The numbers of an Arrow array. It copies only bools, and arrays with nulls.

    Parameters
    ----------
    array : pa.Array
    null : int | None
        The number that replaces a null.

    Raises
    ------
    ValueError
        There are nulls, and `null` is None.
    """
    if array.null_count and null is None:
        raise ValueError(f"found {array.null_count} nulls in an array of {len(array)}; allowed are none")
    buffer, start, n = array.buffers()[1], array.offset, len(array)
    kind = np.dtype(array.type.to_pandas_dtype())
    if array.type == pa.bool_():
        bits = _EMPTY if buffer is None else np.frombuffer(buffer, np.uint8)[start // 8 :]
        values: NDArray[Any] = np.unpackbits(bits, count=start % 8 + n, bitorder="little")[start % 8 :].view(kind)
    else:
        values = np.empty(0, kind) if not n else np.frombuffer(buffer, kind, n, start * kind.itemsize)
    return values if not array.null_count else np.where(valid_of(array), values, kind.type(null))


def codes_of(array: pa.DictionaryArray) -> NDArray[np.int64]:
    """The index of each value in the dictionary: int64[n], with -1 for a null."""
    return numpy_of(array.indices.cast(pa.int64()), null=-1)


def offsets_of(array: pa.Array) -> NDArray[Any]:
    """The offsets of a plain, list or map array of n items: int32 or int64 [n+1]. They are not copied and need not
    begin at 0.
    """
    width = 8 if is_large(array.type) else 4
    buffer = array.buffers()[1]
    if buffer is None or not buffer.size:
        return np.zeros(len(array) + 1, f"i{width}")
    return np.frombuffer(buffer, f"i{width}", len(array) + 1, array.offset * width)


def data_of(array: pa.Array) -> NDArray[np.uint8]:
    """The bytes that the offsets of a plain array point into. They are not copied, and writable if Arrow made them."""
    buffer = array.buffers()[2]
    return _EMPTY if buffer is None else np.frombuffer(buffer, np.uint8)


def ranges_of(array: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Where each value's bytes are.

    Parameters
    ----------
    array : pa.Array[n]
        An array that `plain` accepts.

    Returns
    -------
    data : uint8[m], starts : int64[n], ends : int64[n]
        Value i is `data[starts[i]:ends[i]]`; a null is empty. `data` belongs to the array (or its plain copy).
    """
    array = plain(array)
    offsets = offsets_of(array).astype(np.int64)
    starts, ends = offsets[:-1], offsets[1:]
    if array.null_count:
        ends = np.where(valid_of(array), ends, starts)
    return data_of(array), starts, ends


def valid_of(array: pa.Array) -> NDArray[np.bool_]:
    """True where a value is not null: bool[n]."""
    if isinstance(array, pa.DictionaryArray) and array.dictionary.null_count:
        array = plain(array)
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    return numpy_of(array.is_valid())


def lengths_of(array: pa.Array) -> NDArray[np.int64]:
    """The size of each value of a plain array in bytes, or of each row of a list or map array in items: int64[n]. A
    null has size 0.
    """
    lengths = np.diff(offsets_of(array)).astype(np.int64)
    return lengths * valid_of(array) if array.null_count else lengths


def items_of(array: pa.Array) -> tuple[NDArray[np.int64], Callable[[pa.Array], pa.Array]]:
    """How many items each row of a list or map array has, and a function that picks these out of a textual child array.

    A null row has none, whatever its offsets say.
    """
    offsets = offsets_of(array)
    lengths = lengths_of(array)
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    if int(lengths.sum()) == count:
        return lengths, lambda child: child.slice(first, count)
    index = array_of(flat_index(offsets[:-1].astype(np.int64), lengths))
    return lengths, lambda child: (child if pa.types.is_dictionary(child.type) else plain(child)).take(index)


def flat_index(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of all items of ranges, one range after the other: int64[sum of lengths]."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)


def unaligned(data: NDArray[np.uint8], kind: Any) -> NDArray[Any]:
    """A view of `data` as items of dtype `kind` at every byte position: overlapping, stride 1.

    Index it with an array of positions to read or write an item at each. Empty when `data` is smaller than one item.
    """
    kind = np.dtype(kind)
    count = max(len(data) - kind.itemsize + 1, 0)
    return np.ndarray((count,), kind, data if count else np.empty(kind.itemsize, np.uint8), strides=(1,))


# ---- what texts hold


def rows_with(array: pa.Array, *, blanks: bool) -> NDArray[np.int64]:
    """The rows of a plain array that contain a byte 0x01 or 0x02, or with `blanks` a blank. A null contains none."""
    offsets = offsets_of(array)
    low = int(offsets[0])
    data = data_of(array)[low : int(offsets[-1])]
    if not len(data) or int(data.min()) > 0x20:
        return np.empty(0, np.int64)
    mask = (data - np.uint8(1)) < 2
    if blanks:
        mask |= data == 0x20
    positions = np.flatnonzero(mask)
    rows = np.unique(np.searchsorted(offsets, positions + low, "right") - 1)
    return rows[valid_of(array)[rows]] if array.null_count else rows


def rows_not_utf8(array: pa.Array) -> list[int]:
    """The rows of a plain array whose bytes are not UTF-8."""
    offsets = offsets_of(array)
    data = data_of(array)[int(offsets[0]) : int(offsets[-1])]
    if not len(data) or int(data.max()) < 0x80:
        return []
    try:
        array.view(pa.large_string() if is_large(array.type) else pa.string()).validate(full=True)
    except pa.ArrowInvalid:
        return [row for row, value in enumerate(as_binary(array).to_pylist()) if value is not None and _not_utf8(value)]
    return []


def _not_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False
