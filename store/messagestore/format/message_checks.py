"""Checks that every row of a batch is legal.

Each check looks at a whole column and yields the rows that it refuses. `first_fault` returns the error of the first
such row: a batch with one bad row is refused completely, before anything is written. `all_faults` returns an error for
each bad row, for a caller that puts bad rows elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from messagestore.format.layout import MAX_PROPERTIES_SIZE, MAX_V1_TOPIC_LENGTH, PROPERTY_CRC_SIZE
from messagestore.format.message import MAX_QUEUE_ID, check_delay_level, check_queue_id, check_topic
from messagestore.format.message_columns import ColumnTexts, Entries
from messagestore.format.properties import (
    DELAY,
    KEYS,
    REAL_QID,
    REAL_TOPIC,
    RESERVED_PROPERTIES,
    TAGS,
    UNIQUE_KEY,
    check_keys,
    check_properties,
    check_tags,
    encode_properties,
)
from messagestore.format.record import stamps, too_large

_WAITING_SIZE = len(f"{DELAY}=1000;{REAL_TOPIC}=;{REAL_QID}={MAX_QUEUE_ID};")
"""The most that the properties of a delayed message have besides its topic while it waits."""
Fault = tuple[NDArray[np.int64], Callable[[int, int], MessageIllegalError]]
"""The rows that one check refuses, in ascending order, and a function that makes the error of one of them.

The function takes the row in the batch, and the number of that row for the error's text.
"""


def first_fault(texts: ColumnTexts, limits: StoreConfig, first_row: int = 0) -> MessageIllegalError | None:
    """The error of the first row that cannot be stored, or None.

    Parameters
    ----------
    first_row : int
        The number of row 0 in the user's batch.
    """
    faults = list(_faults(texts, limits))
    if not faults:
        return None
    rows, error = min(faults, key=lambda fault: fault[0][0])
    row = int(rows[0])
    return error(row, first_row + row)


def all_faults(texts: ColumnTexts, limits: StoreConfig, first_row: int = 0) -> dict[int, MessageIllegalError]:
    """An error for each row that cannot be stored, by the row in the batch.

    Parameters
    ----------
    first_row : int
        The number of row 0 in the user's batch.
    """
    errors: dict[int, MessageIllegalError] = {}
    for rows, error in _faults(texts, limits):
        for row in rows.tolist():
            if row not in errors:
                errors[row] = error(row, first_row + row)
    return errors


def _faults(texts: ColumnTexts, limits: StoreConfig) -> Iterator[Fault]:
    """The faults of all columns; each has at least one row."""
    yield from _body_faults(texts, limits)
    yield from _topic_faults(texts, limits)
    yield from _queue_faults(texts)
    yield from _flag_faults(texts)
    yield from _delay_faults(texts)
    yield from _key_faults(texts)
    yield from _text_faults(texts.tags, check_tags)
    if texts.unique_key is not None:
        yield from _text_faults(texts.unique_key, lambda value, row: check_keys((value,), row), blanks=True)
    if texts.entries is not None:
        yield from _property_faults(texts.entries)
    yield from _size_faults(texts, limits)


def _body_faults(texts: ColumnTexts, limits: StoreConfig) -> Iterator[Fault]:
    """Refuse bodies that are null or exceed maxMessageSize.

    No record then exceeds its own limit, because the reserve is enough for all other parts.
    """
    body, limit = texts.body, limits.max_message_size
    sizes = lengths_of(body)
    large = np.flatnonzero(sizes > limit)
    if len(large):
        yield large, lambda row, number: too_large("body", int(sizes[row]), limit, number)
    null = np.flatnonzero(~valid_of(body)) if body.null_count else large[:0]
    if len(null):
        yield null, _same("body: found null; allowed are bytes (empty ones, too)", "body")


def _topic_faults(texts: ColumnTexts, limits: StoreConfig) -> Iterator[Fault]:
    """Check each name once. A bad name is a fault only in the rows that have it."""
    codes = texts.topic_codes
    if not len(codes):
        return
    for code, name in enumerate(texts.topic_names):
        error = topic_error(name, limits.auto_message_version_on_topic_len)
        if error is not None and (rows := np.flatnonzero(codes == code)).size:
            yield rows, _same(error.reason, "topic")
    if int(codes.min()) < 0:
        yield (
            np.flatnonzero(codes < 0),
            _same("topic: found null, and no topic for all rows. Give one of them", "topic"),
        )


def _same(reason: str, field: str) -> Callable[[int, int], MessageIllegalError]:
    """The same error for every row that a check refuses."""
    return lambda _row, number: MessageIllegalError(reason, field=field, row=number)


def topic_error(name: str, auto_version: bool) -> MessageIllegalError | None:
    """Why no message of this topic can be stored, or None. `auto_version`: autoMessageVersionOnTopicLen."""
    try:
        check_topic(name)
    except MessageIllegalError as error:
        return error
    if len(name) > MAX_V1_TOPIC_LENGTH and not auto_version:
        message = (
            f"topic: found {len(name)} bytes; allowed are {MAX_V1_TOPIC_LENGTH} without autoMessageVersionOnTopicLen"
        )
        return MessageIllegalError(message, field="topic")
    return None


def _flag_faults(texts: ColumnTexts) -> Iterator[Fault]:
    """Refuse numbers that do not fit into an int32."""
    flags = texts.columns.flag
    if flags is None or flags.dtype == np.int32:
        return
    outside = np.flatnonzero((flags < -(1 << 31)) | (flags >= 1 << 31))
    if len(outside):
        yield (
            outside,
            lambda row, number: MessageIllegalError(
                f"flag: found {flags[row]}; allowed is an int of 32 bits", field="flag", row=number
            ),
        )


def _delay_faults(texts: ColumnTexts) -> Iterator[Fault]:
    levels = texts.columns.delay_time_level
    below = np.flatnonzero(levels < 0) if levels is not None else np.empty(0, np.int64)
    if levels is not None and len(below):
        yield below, _raised(lambda row, number: check_delay_level(int(levels[row]), number))


def _queue_faults(texts: ColumnTexts) -> Iterator[Fault]:
    queue_ids = texts.columns.queue_id
    if queue_ids is None:
        message = "queue_id: no queues were chosen. Give a column queue_id with the queue of each message"
        raise MessageIllegalError(message, field="queue_id")
    outside = np.flatnonzero((queue_ids < 0) | (queue_ids > MAX_QUEUE_ID))
    if len(outside):
        yield outside, _raised(lambda row, number: check_queue_id(int(queue_ids[row]), number))


def _key_faults(texts: ColumnTexts) -> Iterator[Fault]:
    keys = texts.keys
    if keys is None or not len(keys.texts):
        return
    ends = np.cumsum(keys.counts)
    yield from _text_faults(
        keys.texts,
        lambda value, row: check_keys((value,), row),
        blanks=True,
        nulls=True,
        rows_of=lambda items: np.searchsorted(ends, items, "right"),
    )


def _property_faults(entries: Entries) -> Iterator[Fault]:
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
        rows, firsts = np.unique(entries.rows[items], return_index=True)

        def check(row: int, number: int) -> None:
            item = int(items[firsts[np.searchsorted(rows, row)]])
            pair: Any = {_text_of(entries.names.slice(item, 1)): _text_of(entries.values.slice(item, 1))}
            check_properties(pair, number)

        yield rows, _raised(check)
    yield from _twice_faults(entries, len(names))


def _twice_faults(entries: Entries, name_count: int) -> Iterator[Fault]:
    """Refuse a name that a row has twice, because one of its two values would be lost."""
    if int(entries.counts.max()) < 2:
        return
    pairs = entries.rows * np.int64(name_count + 1) + entries.name_codes
    if bool((pairs[1:] > pairs[:-1]).all()):
        return  # all rows have the names in the same order
    order = np.argsort(pairs, kind="stable")
    twice = np.sort(order[1:][pairs[order[1:]] == pairs[order[:-1]]])
    if not len(twice):
        return
    rows, firsts = np.unique(entries.rows[twice], return_index=True)

    def error(row: int, number: int) -> MessageIllegalError:
        item = int(twice[firsts[np.searchsorted(rows, row)]])
        message = f"property {_text_of(entries.names.slice(item, 1))!r}: found twice; allowed is once"
        return MessageIllegalError(message, field="properties", row=number)

    yield rows, error


def _size_faults(texts: ColumnTexts, limits: StoreConfig) -> Iterator[Fault]:
    """Refuse property strings that exceed the format's limit."""
    stamped = len(encode_properties(stamps(limits))) + (PROPERTY_CRC_SIZE if limits.enabled_append_prop_crc else 0)
    sizes = np.full(texts.columns.row_count, stamped, np.int64)
    if texts.keys is not None:
        counts = texts.keys.counts
        sizes += np.where(counts, _sums(lengths_of(texts.keys.texts) + 1, counts) + len(f"{KEYS}="), 0)
    for name, column in ((UNIQUE_KEY, texts.unique_key), (TAGS, texts.tags)):
        if column is not None:
            sizes += np.where(valid_of(column), lengths_of(column) + len(f"{name}=;"), 0)
    if texts.entries is not None:
        names, codes = lengths_of(plain(texts.entries.names.dictionary)), texts.entries.name_codes
        entry_sizes = lengths_of(texts.entries.values) + 2
        entry_sizes += np.append(names, 0)[codes]  # the last size is for nulls
        sizes += _sums(entry_sizes, texts.entries.counts)
    levels = texts.columns.delay_time_level
    if levels is not None and levels.any():
        topics = np.append([len(name.encode("utf-8", "replace")) for name in texts.topic_names], 0)
        sizes += np.where(levels > 0, topics[texts.topic_codes] + _WAITING_SIZE, 0)
    bad = np.flatnonzero(sizes > MAX_PROPERTIES_SIZE)
    if len(bad):
        yield bad, lambda row, number: too_large("properties", int(sizes[row]), MAX_PROPERTIES_SIZE, number)


def _sums(values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of each row's values, which lie one row behind the other."""
    sums, ends = np.concatenate([[0], np.cumsum(values)]), np.cumsum(counts)
    sums_of_rows: NDArray[np.int64] = sums[ends] - sums[ends - counts]
    return sums_of_rows


# ---- texts


def _bad_items(array: pa.Array, *, blanks: bool, nulls: bool) -> list[int]:
    """The items of a plain array that are empty, not UTF-8, or contain a forbidden byte; with `nulls`, also nulls."""
    bad: list[int] = rows_with(array, blanks=blanks).tolist() + rows_not_utf8(array)
    empty = lengths_of(array) == 0
    if empty.any():
        bad += np.flatnonzero(empty if nulls else empty & valid_of(array)).tolist()
    return bad


def _text_faults(
    array: pa.Array | None,
    check: Callable[[Any, int], object],
    *,
    blanks: bool = False,
    nulls: bool = False,
    rows_of: Callable[[NDArray[np.int64]], NDArray[np.int64]] = lambda items: items,
) -> Iterator[Fault]:
    """The bad items of a plain array. `check`, the rule for a single message, says what is wrong with an item."""
    bad = _bad_items(array, blanks=blanks, nulls=nulls) if array is not None and len(array) else []
    if not bad:
        return

    items = np.unique(np.array(bad, np.int64))
    rows, firsts = np.unique(rows_of(items), return_index=True)
    texts = plain(array)
    yield (
        rows,
        _raised(
            lambda row, number: check(_text_of(texts.slice(int(items[firsts[np.searchsorted(rows, row)]]), 1)), number)
        ),
    )


def _text_of(item: pa.Array) -> str | None:
    """The text of an array of one item. Bytes that are not UTF-8 become lone surrogates, which every check refuses."""
    value = as_binary(plain(item)).to_pylist()[0]
    return None if value is None else str(value, "utf-8", "surrogateescape")


def _raised(check: Callable[[int, int], object]) -> Callable[[int, int], MessageIllegalError]:
    """The error that a check of one message raises."""

    def error(row: int, number: int) -> MessageIllegalError:
        try:
            check(row, number)
        except MessageIllegalError as raised:
            return raised
        raise AssertionError(f"row {number} is refused as one of a batch and accepted alone")

    return error
