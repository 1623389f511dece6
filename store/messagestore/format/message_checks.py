"""Checks that every row of a batch is legal.

Each check looks at a whole column and yields the rows that it refuses; `first_fault` returns the error of the first
such row. A batch with one bad row is refused completely, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.errors import MessageIllegalError
from messagestore.format.arrow_bytes import (
    as_binary,
    lengths_of,
    list_array,
    numpy_of,
    plain,
    rows_not_utf8,
    rows_with,
    valid_of,
)
from messagestore.format.config import StoreConfig
from messagestore.format.layout import MAX_PROPERTIES_SIZE, MAX_V1_TOPIC_LENGTH
from messagestore.format.message import MAX_QUEUE_ID, check_queue_id, check_topic
from messagestore.format.message_columns import ColumnTexts, Entries
from messagestore.format.properties import RESERVED_PROPERTIES, check_keys, check_properties, check_tags
from messagestore.format.record import too_large

Fault = tuple[int, Callable[[int], MessageIllegalError]]
"""A row of the batch, and a function that makes its error from the number of the row in the user's batch."""


def first_fault(texts: ColumnTexts, limits: StoreConfig, first_row: int = 0) -> MessageIllegalError | None:
    """The error of the first row that cannot be stored, or None.

    Parameters
    ----------
    first_row : int
        The number of row 0 in the user's batch.
    """
    faults = [fault for fault in _faults(texts, limits) if fault is not None]
    if not faults:
        return None
    row, error = min(faults, key=lambda fault: fault[0])
    return error(first_row + row)


def sizes_fault(sizes: NDArray[np.int64], first_row: int) -> MessageIllegalError | None:
    """The error of the first row whose property string exceeds the format's limit, or None."""
    bad = np.flatnonzero(sizes > MAX_PROPERTIES_SIZE)
    if not len(bad):
        return None
    return too_large("properties", int(sizes[bad[0]]), MAX_PROPERTIES_SIZE, first_row + int(bad[0]))


def _faults(texts: ColumnTexts, limits: StoreConfig) -> Iterator[Fault | None]:
    yield _body_fault(texts, limits)
    yield from _topic_faults(texts, limits)
    yield _queue_fault(texts)
    yield _flag_fault(texts)
    yield from _key_faults(texts)
    yield _text_fault(texts.tags, check_tags)
    if texts.unique_key is not None:
        yield _text_fault(texts.unique_key, lambda value, row: check_keys((value,), row), blanks=True)
    if texts.entries is not None:
        yield from _property_faults(texts.entries)


def _body_fault(texts: ColumnTexts, limits: StoreConfig) -> Fault | None:
    """Refuse bodies that are null or exceed maxMessageSize.

    No record then exceeds its own limit, because the reserve is enough for all other parts.
    """
    body, limit = texts.body, limits.max_message_size
    sizes = lengths_of(body)
    large = np.flatnonzero(sizes > limit)
    null = np.flatnonzero(~valid_of(body)) if body.null_count else large[:0]
    if len(null) and not (len(large) and large[0] < null[0]):
        message = "body: found null; allowed are bytes (empty ones, too)"
        return int(null[0]), lambda row: MessageIllegalError(message, field="body", row=row)
    if len(large):
        return int(large[0]), lambda row: too_large("body", int(sizes[large[0]]), limit, row)
    return None


def _topic_faults(texts: ColumnTexts, limits: StoreConfig) -> Iterator[Fault | None]:
    """Check each name once. A bad name is a fault only in the rows that have it."""
    codes = texts.topic_codes
    if not len(codes):
        return
    for code, name in enumerate(texts.topic_names):
        error = _topic_error(name, limits)
        if error is not None and (rows := np.flatnonzero(codes == code)).size:
            yield int(rows[0]), partial(_topic_again, error.reason)
    if int(codes.min()) < 0:
        message = "topic: found null, and no topic for all rows. Give one of them"
        yield int(np.argmin(codes)), partial(_topic_again, message)


def _topic_again(reason: str, row: int) -> MessageIllegalError:
    return MessageIllegalError(reason, field="topic", row=row)


def _topic_error(name: str, limits: StoreConfig) -> MessageIllegalError | None:
    try:
        check_topic(name)
    except MessageIllegalError as error:
        return error
    if len(name) > MAX_V1_TOPIC_LENGTH and not limits.auto_message_version_on_topic_len:
        message = (
            f"topic: found {len(name)} bytes; allowed are {MAX_V1_TOPIC_LENGTH} without autoMessageVersionOnTopicLen"
        )
        return MessageIllegalError(message, field="topic")
    return None


def _flag_fault(texts: ColumnTexts) -> Fault | None:
    """Refuse numbers that do not fit into an int32."""
    flags = texts.columns.flag
    if flags is None or flags.dtype == np.int32:
        return None
    outside = np.flatnonzero((flags < -(1 << 31)) | (flags >= 1 << 31))
    if not len(outside):
        return None
    message = f"flag: found {flags[outside[0]]}; allowed is an int of 32 bits"
    return int(outside[0]), lambda row: MessageIllegalError(message, field="flag", row=row)


def _queue_fault(texts: ColumnTexts) -> Fault | None:
    queue_ids = texts.columns.queue_id
    if queue_ids is None:
        raise ValueError("queue_id: no queues were chosen. Give a column queue_id with the queue of each message")
    fits = (queue_ids >= 0) & (queue_ids <= MAX_QUEUE_ID)
    if fits.all():
        return None
    row = int(np.argmin(fits))
    return row, _raised(lambda number: check_queue_id(int(queue_ids[row]), number))


def _key_faults(texts: ColumnTexts) -> Iterator[Fault | None]:
    keys = texts.keys
    if keys is None or not len(keys.texts):
        return
    ends = np.cumsum(keys.counts)

    def to_row(item: int) -> int:
        return int(np.searchsorted(ends, item, "right"))

    yield _text_fault(keys.texts, lambda value, row: check_keys((value,), row), blanks=True, nulls=True, to_row=to_row)


def _property_faults(entries: Entries) -> Iterator[Fault | None]:
    """Check the names in the dictionary, and the names and values of a row item by item if one of them is bad."""
    names = plain(entries.names.dictionary)
    bad_codes = set(_bad_items(names, blanks=False, nulls=True))
    reserved = pc.is_in(
        as_binary(names), list_array([name.encode() for name in RESERVED_PROPERTIES], as_binary(names).type)
    )
    bad_codes.update(np.flatnonzero(numpy_of(reserved)).tolist())
    codes = entries.name_codes
    bad = np.isin(codes, [-1, *bad_codes]) if bad_codes or entries.names.null_count else np.zeros(len(codes), np.bool_)
    bad[_bad_items(entries.values, blanks=False, nulls=True)] = True
    items = np.flatnonzero(bad)
    if len(items):
        item = int(items[0])
        pair: Any = {_text_of(entries.names.slice(item, 1)): _text_of(entries.values.slice(item, 1))}
        yield int(entries.rows[item]), _raised(lambda row: check_properties(pair, row))
    yield _twice_fault(entries, len(names))


def _twice_fault(entries: Entries, name_count: int) -> Fault | None:
    """Refuse a name that a row has twice, because one of its two values would be lost."""
    if int(entries.counts.max()) < 2:
        return None
    pairs = entries.rows * np.int64(name_count + 1) + entries.name_codes
    if bool((pairs[1:] > pairs[:-1]).all()):
        return None  # all rows have the names in the same order
    order = np.argsort(pairs, kind="stable")
    twice = order[1:][pairs[order[1:]] == pairs[order[:-1]]]
    if not len(twice):
        return None
    item = int(twice.min())
    message = f"property {_text_of(entries.names.slice(item, 1))!r}: found twice; allowed is once"
    return int(entries.rows[item]), lambda row: MessageIllegalError(message, field="properties", row=row)


# ---- texts


def _bad_items(array: pa.Array, *, blanks: bool, nulls: bool) -> list[int]:
    """The items of a plain array that are empty, not UTF-8, or contain a forbidden byte; with `nulls`, also nulls."""
    bad: list[int] = rows_with(array, blanks=blanks).tolist() + rows_not_utf8(array)
    empty = lengths_of(array) == 0
    if empty.any():
        bad += np.flatnonzero(empty if nulls else empty & valid_of(array)).tolist()
    return bad


def _text_fault(
    array: pa.Array | None,
    check: Callable[[Any, int], object],
    *,
    blanks: bool = False,
    nulls: bool = False,
    to_row: Callable[[int], int] = int,
) -> Fault | None:
    """The first bad item of a plain array. `check`, the rule for a single message, says what is wrong with it."""
    bad = _bad_items(array, blanks=blanks, nulls=nulls) if array is not None and len(array) else []
    if not bad:
        return None
    item = min(bad)
    value = _text_of(plain(array).slice(item, 1))
    return to_row(item), _raised(lambda row: check(value, row))


def _text_of(item: pa.Array) -> str | None:
    """The text of an array of one item. Bytes that are not UTF-8 become lone surrogates, which every check refuses."""
    value = as_binary(plain(item)).to_pylist()[0]
    return None if value is None else str(value, "utf-8", "surrogateescape")


def _raised(check: Callable[[int], object]) -> Callable[[int], MessageIllegalError]:
    """The error that a check of one message raises."""

    def error(row: int) -> MessageIllegalError:
        try:
            check(row)
        except MessageIllegalError as raised:
            return raised
        raise AssertionError(f"row {row} is refused as one of a batch and accepted alone")

    return error
