"""Encodes columns of messages as records.

    head | body | TOPICLEN topic | PROPLEN | KEYS.. UNIQ_KEY.. TAGS.. the user's.. [__CRC32#..]

Every part is an array with one value per row, and Arrow joins the parts row by row in one pass. The heads are one
structured array that is made beforehand, because all sizes are known. Finally the records are sorted by queue.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.format import javahash
from messagestore.format.arrow_bytes import (
    MAX_SMALL,
    array_of,
    as_binary,
    binary_array,
    data_of,
    flat_index,
    join,
    lengths_of,
    list_array,
    offsets_of,
    plain,
    scalar_of,
    unaligned,
    valid_of,
)
from messagestore.format.config import StoreConfig
from messagestore.format.layout import (
    CRC_MASK,
    PROPERTIES_LENGTH_SIZE,
    PROPERTY_CRC_SIZE,
    RECORD_HEAD,
)
from messagestore.format.message_checks import first_fault, sizes_fault
from messagestore.format.message_columns import ColumnTexts, Entries, MessageColumns
from messagestore.format.properties import KEYS, NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR, TAGS, UNIQUE_KEY
from messagestore.format.record import (
    OFFSETS_POSITION,
    PROPERTY_CRC_BLANK,
    host_flags,
    store_timestamp_position,
    topic_bytes,
)
from messagestore.format.record_scan import (
    PROPERTY_CRC_BEGIN,
    PROPERTY_CRC_DIGITS,
    crcs_of,
    crcs_of_ranges,
    property_crc_digits,
)
from messagestore.format.row_digest import hashes_of
from messagestore.format.rows import Rows


def encode(
    columns: MessageColumns | ColumnTexts,
    *,
    limits: StoreConfig,
    store_host: bytes,
    born_host: bytes,
    first_row: int = 0,
) -> Rows:
    """Encode the records of a batch, back to back and grouped by (topic, queue): each queue has one run.

    The records have no place yet: QUEUEOFFSET, PHYSICALOFFSET and STORETIMESTAMP are 0 (see `stamp`). The index hashes
    of each record are that of its UNIQ_KEY, and then those of its KEYS.

    Parameters
    ----------
    columns : MessageColumns or ColumnTexts
        The queues must be chosen. Pass `ColumnTexts` if a part of it was computed before, to compute that only once.
    limits : StoreConfig
        `maxMessageSize`, `autoMessageVersionOnTopicLen`, `enabledAppendPropCRC`.
    store_host, born_host : bytes
        The results of `hosts.pack_host`, the same for all rows.
    first_row : int
        The number of the first row in the user's batch, for errors.

    Raises
    ------
    MessageIllegalError
        The first row that cannot be stored.
    """
    texts = columns if isinstance(columns, ColumnTexts) else ColumnTexts(columns)
    columns = texts.columns
    fault = first_fault(texts, limits, first_row)
    if fault is not None:
        raise fault
    property_crc = limits.enabled_append_prop_crc
    properties, property_sizes = _properties(texts, property_crc)
    fault = sizes_fault(property_sizes, first_row)
    if fault is not None:
        raise fault
    crcs = crcs_of(texts.body)
    topics, topic_sizes, magics = _topics(texts, limits)
    body_sizes = lengths_of(texts.body)
    heads = _heads(columns, store_host, born_host)
    heads["body_crc"] = crcs & np.uint32(CRC_MASK)
    heads["body_size"] = body_sizes
    heads["magic"] = magics
    sizes = heads.dtype.itemsize + body_sizes + topic_sizes + PROPERTIES_LENGTH_SIZE + property_sizes
    heads["total_size"] = sizes
    pieces = [_fixed(heads), texts.body, topics, _fixed(property_sizes.astype(">i2")), *properties]
    records = join(pieces, large=int(sizes.sum()) > MAX_SMALL)
    order, run_firsts, run_counts = _group(texts)
    if order is not None:
        records = records.take(array_of(order))
    key_hashes, key_counts = _key_hashes(texts, order)
    codes = texts.topic_codes[run_firsts].tolist()
    assert columns.queue_id is not None
    return Rows.unplaced(
        offsets_of(records).astype(np.int64),
        data=data_of(records)[: int(offsets_of(records)[-1])],
        store_timestamp_position=store_timestamp_position(host_flags(born_host, store_host)),
        run_topics=[texts.topic_names[code] for code in codes],
        run_queue_ids=columns.queue_id[run_firsts].astype(np.int32),
        run_counts=run_counts.astype(np.int32),
        tags_codes=_tags_codes(texts, order),
        key_hashes=key_hashes,
        key_counts=key_counts,
        row_hash_sum=int(hashes_of(texts, crcs).sum(dtype=np.uint64)),
        property_crc=property_crc,
    )


def _fixed(items: NDArray[Any]) -> pa.Array:
    """Items of one size as a binary array over the same bytes."""
    n, size = len(items), items.dtype.itemsize
    large = n * size > MAX_SMALL
    offsets = np.arange(0, (n + 1) * size, size, dtype=np.int64 if large else np.int32)
    return binary_array(items.view(np.uint8), offsets, pa.large_binary() if large else pa.binary())


def _heads(columns: MessageColumns, store_host: bytes, born_host: bytes) -> NDArray[np.void]:
    """The heads without the fields that depend on body, topic and properties; 88, 100 or 112 bytes each."""
    rows: list[tuple[str, Any]] = []
    for name in RECORD_HEAD.dtype.names or ():
        if name in ("born_ip", "store_ip"):
            rows.append((name[:-3] + "_host", f"V{len(born_host if name == 'born_ip' else store_host)}"))
        elif name not in ("born_port", "store_port"):
            rows.append((name, RECORD_HEAD.dtype[name]))
    kind = np.dtype(rows)
    blank = np.zeros(1, kind)
    blank["sys_flag"] = host_flags(born_host, store_host)
    blank["born_host"] = np.void(born_host)
    blank["store_host"] = np.void(store_host)
    if columns.born_timestamp_ms is None:
        blank["born_timestamp_ms"] = time.time_ns() // 1_000_000
    raw = np.empty(columns.row_count, f"V{kind.itemsize}")
    raw[:] = blank.view(raw.dtype)
    heads: NDArray[np.void] = raw.view(kind)
    heads["queue_id"] = columns.queue_id
    if columns.flag is not None:
        heads["flag"] = columns.flag
    if columns.born_timestamp_ms is not None:
        heads["born_timestamp_ms"] = columns.born_timestamp_ms
    return heads


def _topics(texts: ColumnTexts, limits: StoreConfig) -> tuple[pa.Array | bytes, Any, Any]:
    """TOPICLEN and topic of each row, their sizes, and the magics; one value each if there is only one topic."""
    codes = texts.topic_codes
    auto = limits.auto_message_version_on_topic_len
    used = np.unique(codes).tolist() if len(texts.topic_names) > 1 else [0]
    if not len(codes):
        return b"", 0, 0
    if len(used) == 1:
        magic, name = topic_bytes(texts.topic_names[used[0]], auto)
        return name, len(name), magic
    packed = {
        code: topic_bytes(texts.topic_names[code], auto) for code in used
    }  # a name that no row has may be illegal
    names = list_array(
        [packed[code][1] if code in packed else b"" for code in range(len(texts.topic_names))], pa.binary()
    )
    magics = np.array([packed[code][0] if code in packed else 0 for code in range(len(texts.topic_names))], np.int32)
    return names.take(array_of(codes)), lengths_of(names)[codes], magics[codes]


def _properties(texts: ColumnTexts, property_crc: bool) -> tuple[list[pa.Array | bytes], NDArray[np.int64]]:
    """The pieces of each row's property string, and its size in bytes."""
    n = texts.columns.row_count
    sizes = np.zeros(n, np.int64)
    pieces: list[pa.Array | bytes] = []
    columns: list[tuple[str, pa.Array, NDArray[np.bool_]]] = []
    if texts.keys is not None:
        columns.append((KEYS, texts.keys.joined, texts.keys.counts > 0))
    if texts.unique_key is not None:
        columns.append((UNIQUE_KEY, texts.unique_key, valid_of(texts.unique_key)))
    if texts.tags is not None:
        columns.append((TAGS, texts.tags, valid_of(texts.tags)))
    for name, values, present in columns:
        begin, end = name.encode() + NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
        if present.all():
            pieces += [begin, as_binary(values), end]
            sizes += len(begin) + len(end) + lengths_of(values)
        elif present.any():
            pieces += [_where(present, begin), as_binary(values), _where(present, end)]
            sizes += (len(begin) + len(end)) * present + lengths_of(values)
    if texts.entries is not None:
        users = _users(texts.entries)
        pieces.append(users)
        sizes += lengths_of(users)
    if property_crc:
        pieces.append(PROPERTY_CRC_BLANK)
        sizes += len(PROPERTY_CRC_BLANK)
    return pieces, sizes


def _where(present: NDArray[np.bool_], text: bytes) -> pa.Array:
    """The text in the rows that have the property, and null in the others."""
    return pc.if_else(array_of(present), scalar_of(text, pa.binary()), scalar_of(None, pa.binary()))


def _users(entries: Entries) -> pa.Array:
    """The user's part of each row's property string. The entries of a row are neighbours, so the part is one range."""
    names = as_binary(plain(entries.names.dictionary)).take(entries.names.indices)
    total = int(lengths_of(names).sum() + lengths_of(entries.values).sum()) + 2 * len(names)
    pairs = join([names, NAME_VALUE_SEPARATOR, as_binary(entries.values), PROPERTY_SEPARATOR], large=total > MAX_SMALL)
    offsets = offsets_of(pairs)[np.concatenate([[0], np.cumsum(entries.counts)])]
    return binary_array(data_of(pairs), offsets, pairs.type)


def _group(texts: ColumnTexts) -> tuple[NDArray[np.int64] | None, NDArray[np.int64], NDArray[np.int64]]:
    """The order that groups the rows by queue (None: they are grouped), and the first row and the length of each run.

    Rows of a queue keep their order. Queues are ordered by topic code and queue id, or stay as they are.
    """
    queue_ids = texts.columns.queue_id
    assert queue_ids is not None
    n = len(queue_ids)
    if not n:
        return None, np.empty(0, np.int64), np.empty(0, np.int64)
    width = int(queue_ids.max()) + 1
    queues = queue_ids.astype(np.int64)
    if len(texts.topic_names) > 1:
        queues += texts.topic_codes * width
    firsts = np.concatenate([[0], np.flatnonzero(queues[1:] != queues[:-1]) + 1])
    counts = np.diff(np.append(firsts, n))
    runs, most = queues[firsts], width * len(texts.topic_names)
    if len(runs) <= most and len(np.unique(runs)) == len(runs):
        return None, firsts, counts
    small = most <= 1 << 16
    order = np.argsort(queues.astype(np.uint16) if small else queues, kind="stable")  # numpy sorts 16 bits by radix
    queues = queues[order]
    firsts = np.concatenate([[0], np.flatnonzero(queues[1:] != queues[:-1]) + 1])
    return order, order[firsts], np.diff(np.append(firsts, n))


def _tags_codes(texts: ColumnTexts, order: NDArray[np.int64] | None) -> NDArray[np.int64]:
    hashes = texts.tags_hashes
    if hashes is None:
        return np.zeros(texts.columns.row_count, np.int64)
    return (hashes if order is None else hashes[order]).astype(np.int64)


def _key_hashes(texts: ColumnTexts, order: NDArray[np.int64] | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The index hashes (of topic#key) in the order of the records, and how many each record has."""
    n = texts.columns.row_count
    keys, unique = texts.keys, texts.unique_key
    prefixes = javahash.java_hashes(list_array([f"{name}#" for name in texts.topic_names], pa.string()))
    hashes, counts = np.empty(0, np.int32), np.zeros(n, np.int64)
    if keys is not None:
        counts = keys.counts
        rows = texts.topic_codes if len(keys.texts) == n and counts.all() else np.repeat(texts.topic_codes, counts)
        prefix = prefixes[rows] if len(texts.topic_names) > 1 else prefixes
        lengths = javahash.utf16_lengths(keys.texts)
        hashes = javahash.index_hashes(javahash.hash_after(prefix, keys.hashes, lengths))
    if unique is not None:
        present = valid_of(unique)
        lengths = javahash.utf16_lengths(unique)
        own = javahash.index_hashes(
            javahash.hash_after(prefixes[texts.topic_codes], javahash.java_hashes(unique), lengths)
        )
        hashes = np.insert(hashes, (np.cumsum(counts) - counts)[present], own[present])
        counts = counts + present
    if order is not None:
        starts = np.cumsum(counts) - counts
        counts = counts[order]
        hashes = hashes[flat_index(starts[order], counts)]
    return hashes, counts.astype(np.int32)


def stamp(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    queue_offsets: NDArray[np.int64],
    physical_offsets: NDArray[np.int64],
    store_timestamp_ms: int,
    store_timestamp_position: int,
    property_crc: bool,
) -> None:
    """Fill in what depends on the places of the records, and then the `__CRC32#` of each record that has one.

    Parameters
    ----------
    data : uint8[m]
        Records back to back up to the end, as `encode` returns them. They are changed in place.
    starts : int64[n]
        Where each record begins. n + 1 numbers are accepted, too: the last one is m.
    queue_offsets, physical_offsets : int64[n]
    store_timestamp_ms : int
    store_timestamp_position : int
    property_crc : bool
    """
    n = len(queue_offsets)
    starts, ends = starts[:n], np.append(starts[1:n], len(data))
    offsets = np.empty((n, 2), ">i8")
    offsets[:, 0] = queue_offsets
    offsets[:, 1] = physical_offsets
    unaligned(data, "V16")[starts + OFFSETS_POSITION] = offsets.view("V16")[:, 0]
    unaligned(data, ">i8")[starts + store_timestamp_position] = store_timestamp_ms
    if property_crc and n:
        ends = ends - PROPERTY_CRC_SIZE
        digits = property_crc_digits(crcs_of_ranges(data, starts, ends))
        kind = f"V{PROPERTY_CRC_DIGITS}"
        unaligned(data, kind)[ends + len(PROPERTY_CRC_BEGIN)] = digits.view(kind)[:, 0]
