"""Encodes columns of messages as records.

    head | body | TOPICLEN topic | PROPLEN | KEYS.. UNIQ_KEY.. TAGS.. the user's.. [CLUSTER..] [__CRC32#..]

The kernel checks and writes all records in one pass over the buffers of the columns (`store/kernel/encode.c`). Without
the kernel, `encode_message` writes one record after the other: the same bytes, many times more slowly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.errors import MessageIllegalError
from messagestore.format import javahash, kernel
from messagestore.format.arrow_bytes import is_large, is_textual, plain
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host, unpack_host
from messagestore.format.layout import RECORD_SIZE_RESERVE
from messagestore.format.message import NO_PROPERTIES, Message
from messagestore.format.message_checks import first_fault, topic_error
from messagestore.format.message_columns import ColumnTexts, MessageColumns
from messagestore.format.properties import RESERVED_PROPERTIES, encode_properties
from messagestore.format.record import (
    encode_message,
    host_flags,
    pack_head,
    stamp_record,
    stamps,
    store_timestamp_position,
    topic_bytes,
)
from messagestore.format.row_digest import digest_fields, row_hashes
from messagestore.format.rows import Rows


@lru_cache(maxsize=4096)
def _topic_place(topic: str, auto_version: bool) -> tuple[bytes, int, int]:
    """TOPICLEN with the topic, the magic, and the hash of `topic#`; raises as `topic_bytes` does."""
    magic, packed = topic_bytes(topic, auto_version)
    return packed, magic, javahash.java_hash(f"{topic}#")


def encode_one(
    message: Message,
    *,
    queue_id: int,
    store_host: bytes,
    limits: StoreConfig,
    property_crc: bool,
    unique_key: str | None = None,
    extra_properties: Sequence[tuple[str, str]] = (),
) -> tuple[bytearray, int, Sequence[int]]:
    """Encode one message as `encode_message` does, ready for `stamp_one`.

    The kernel does it in one call. It leaves messages to `encode_message` that are unusual or cannot be stored.

    Returns
    -------
    record : bytearray
    tags_code : int
        0 without tags.
    key_hashes : sequence of int
        The index hashes of UNIQ_KEY and of the keys.

    Raises
    ------
    MessageIllegalError
        As for `encode_message`.
    """
    if kernel.lib is not None:
        own, born_ms = message.properties, message.born_timestamp_ms
        try:
            topic, magic, topic_hash = _topic_place(message.topic, limits.auto_message_version_on_topic_len)
            encoded = kernel.lib.encode_message(
                message.body,
                topic,
                magic,
                topic_hash,
                queue_id,
                message.flag,
                message.sys_flag,
                time.time_ns() // 1_000_000 if born_ms is None else born_ms,
                pack_host(message.born_host),
                store_host,
                message.reconsume_times,
                message.prepared_transaction_offset,
                message.keys,
                unique_key,
                message.tags,
                message.wait_store_msg_ok,
                own,
                extra_properties,
                None if own is NO_PROPERTIES else RESERVED_PROPERTIES,
                limits.max_message_size,
                property_crc,
            )
        except (MessageIllegalError, TypeError):  # the scalar codec says which of the message's faults comes first
            encoded = None
        if encoded is not None and len(encoded[0]) <= limits.max_message_size + RECORD_SIZE_RESERVE:
            return encoded
    data = encode_message(
        message,
        queue_id=queue_id,
        store_host=store_host,
        limits=limits,
        property_crc=property_crc,
        unique_key=unique_key,
        extra_properties=extra_properties,
    )
    keys = message.keys if unique_key is None else (unique_key, *message.keys)
    tags_code = javahash.tags_code(message.tags) if message.tags else 0
    return data, tags_code, [javahash.index_hash(message.topic, key) for key in keys]


def stamp_one(
    record: bytearray, queue_offset: int, physical_offset: int, store_timestamp_ms: int, property_crc: bool
) -> None:
    """Fill in what depends on the place of one record, as `stamp` does for many."""
    if kernel.lib is not None:
        kernel.lib.stamp_message(record, queue_offset, physical_offset, store_timestamp_ms, property_crc)
    else:
        stamp_record(record, queue_offset, physical_offset, store_timestamp_ms, property_crc)


class _Encoded(NamedTuple):
    """What either way of encoding makes, in the order of the records; see `Rows`."""

    starts: NDArray[np.int64]
    data: NDArray[np.uint8]
    tags_codes: NDArray[np.int64]
    key_hashes: NDArray[np.int32]
    key_counts: NDArray[np.int32]
    digest: int


def encode(
    columns: MessageColumns | ColumnTexts,
    *,
    limits: StoreConfig,
    store_host: bytes,
    born_host: bytes,
    first_row: int = 0,
    with_digest: bool = True,
) -> Rows:
    """Encode the records of a batch, back to back and grouped by (topic, queue): each queue has one run.

    The records have no place yet: QUEUEOFFSET, PHYSICALOFFSET and STORETIMESTAMP are 0 (see `stamp`). The index hashes
    of each record are that of its UNIQ_KEY, and then those of its KEYS.

    Parameters
    ----------
    columns : MessageColumns or ColumnTexts
        The queues must be chosen. Pass `ColumnTexts` if a part of it was computed before, to compute that only once.
    limits : StoreConfig
        `maxMessageSize`, `autoMessageVersionOnTopicLen`, `stampCluster`, `enabledAppendPropCRC`.
    store_host, born_host : bytes
        The results of `hosts.pack_host`, the same for all rows.
    first_row : int
        The number of the first row in the user's batch, for errors.
    with_digest : bool
        Compute the digest of the rows; else it is 0.

    Raises
    ------
    MessageIllegalError
        The first row that cannot be stored.
    """
    texts = columns if isinstance(columns, ColumnTexts) else ColumnTexts(columns)
    columns = texts.columns

    encoded = None
    if kernel.lib is not None and columns.queue_id is not None and not _outside(columns.queue_id, columns.flag):
        batch = _batch(texts, limits, store_host, born_host, with_digest)
        size = kernel.lib.encode_size(batch)
        if size is not None:
            order, run_firsts, run_counts = _group(texts)
            encoded = _by_kernel(kernel.lib, batch, order, columns.row_count, *size)

    if encoded is None:
        fault = first_fault(texts, limits, first_row)
        if fault is not None:
            raise fault
        if kernel.lib is not None:
            raise AssertionError("the kernel refuses a batch in which every row is legal")
        kernel.tell_without()
        order, run_firsts, run_counts = _group(texts)
        encoded = _by_rows(texts, order, limits, store_host, born_host, with_digest)

    assert columns.queue_id is not None
    return Rows.unplaced(
        encoded.starts,
        data=encoded.data,
        store_timestamp_position=store_timestamp_position(host_flags(born_host, store_host)),
        run_topics=[texts.topic_names[code] for code in texts.topic_codes[run_firsts].tolist()],
        run_queue_ids=columns.queue_id[run_firsts].astype(np.int32),
        run_counts=run_counts.astype(np.int32),
        tags_codes=encoded.tags_codes,
        key_hashes=encoded.key_hashes,
        key_counts=encoded.key_counts,
        digest=encoded.digest,
        property_crc=limits.enabled_append_prop_crc,
    )


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


# ---- by the kernel


def _outside(*columns: NDArray[Any] | None) -> bool:
    """Whether a column has a number that does not fit into an int32."""
    limit = 1 << 31
    return any(
        column is not None
        and column.dtype != np.int32
        and bool(((column < -limit) | (column >= limit)).any())
        for column in columns
    )  # fmt: skip


def _by_kernel(
    lib: kernel.Kernel,
    batch: kernel.Batch,
    order: NDArray[np.int64] | None,
    n: int,
    size: int,
    key_count: int,
) -> _Encoded | None:
    """All records at once; None if a row cannot be stored."""
    starts, data = np.empty(n + 1, np.int64), np.empty(size, np.uint8)
    tags_codes = np.empty(n, np.int64)
    key_hashes, key_counts = np.empty(key_count, np.int32), np.empty(n, np.int32)
    digest = lib.encode(batch, order, data, starts, tags_codes, key_hashes, key_counts)
    if digest is None:
        return None
    return _Encoded(starts, data, tags_codes, key_hashes, key_counts, digest)


def _batch(
    texts: ColumnTexts, limits: StoreConfig, store_host: bytes, born_host: bytes, with_digest: bool
) -> kernel.Batch:
    """The buffers of the columns, in the order in which the kernel takes them."""
    columns = texts.columns
    times = columns.born_timestamp_ms
    head = pack_head(store_host, born_host, time.time_ns() // 1_000_000)

    keys = columns.keys
    key_lists: pa.Array | None = None
    if keys is not None and not is_textual(keys.type):
        key_lists = keys.cast(pa.list_(keys.type.value_type)) if pa.types.is_fixed_size_list(keys.type) else keys
        keys = key_lists.values

    pairs = columns.properties
    names, values = (None, None) if pairs is None else (plain(pairs.keys), plain(pairs.items))

    return (
        columns.row_count,
        _column(texts.body),
        None if key_lists is None or keys is None else _column(key_lists, len(keys)),
        None if keys is None else _column(plain(keys)),
        None if texts.unique_key is None else _column(texts.unique_key),
        None if texts.tags is None else _column(texts.tags),
        None if pairs is None or names is None else _column(pairs, len(names)),
        None if names is None else _column(names),
        None if values is None else _column(values),
        head,
        np.ascontiguousarray(columns.queue_id, np.int32),
        None if columns.flag is None else np.ascontiguousarray(columns.flag, np.int32),
        None if times is None else np.ascontiguousarray(times, np.int64),
        None if len(texts.topic_names) == 1 and isinstance(columns.topic, str) else texts.topic_codes,
        *_topics(tuple(texts.topic_names), limits.auto_message_version_on_topic_len),
        *_RESERVED,
        tuple(digest_fields(texts)) if with_digest else None,
        encode_properties(stamps(limits)),
        limits.max_message_size,
        limits.enabled_append_prop_crc,
    )


def _column(array: pa.Array, item_count: int | None = None) -> kernel.Column:
    """A plain array, or a list or map array whose child has so many items."""
    valid, offsets = array.buffers()[:2]
    if not array.null_count:
        valid = None
    if item_count is None:
        return array.buffers()[2], offsets, valid, array.offset, len(array), is_large(array.type)
    return None, offsets, valid, array.offset, len(array), is_large(array.type), item_count


def _packed(items: list[bytes]) -> tuple[bytes, NDArray[np.int64]]:
    return b"".join(items), np.cumsum([len(item) for item in items], dtype=np.int64)


_RESERVED = _packed([name.encode() for name in sorted(RESERVED_PROPERTIES)])


@lru_cache(64)
def _topics(
    names: tuple[str, ...], auto_version: bool
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """TOPICLEN and topic of each name, where each of them ends, the magics, and the hashes of `topic#`.

    A name that may not be stored is empty here. It is a fault only in rows that have it.
    """
    legal = [topic_error(name, auto_version) is None for name in names]
    places = [topic_bytes(name, auto_version) if good else (0, b"") for name, good in zip(names, legal, strict=True)]
    packed, ends = _packed([packed_topic for _, packed_topic in places])
    hashes = [javahash.java_hash(f"{name}#") for name in names]
    return packed, ends, np.array([magic for magic, _ in places], np.int32), np.array(hashes, np.int32)


# ---- by rows


def _by_rows(
    texts: ColumnTexts,
    order: NDArray[np.int64] | None,
    limits: StoreConfig,
    store_host: bytes,
    born_host: bytes,
    with_digest: bool,
) -> _Encoded:
    """One record after the other. The rows were checked."""
    columns = texts.columns
    assert columns.queue_id is not None
    n, host, now = columns.row_count, unpack_host(born_host), time.time_ns() // 1_000_000
    rows = range(n) if order is None else order.tolist()

    bodies, topics, codes = texts.body.to_pylist(), texts.topic_names, texts.topic_codes.tolist()
    keys, tags, unique_keys, properties = texts.key_rows, texts.tag_rows, texts.unique_key_rows, texts.property_rows
    queue_ids = columns.queue_id.tolist()
    flags = [0] * n if columns.flag is None else columns.flag.tolist()
    times = [now] * n if columns.born_timestamp_ms is None else columns.born_timestamp_ms.tolist()

    data, starts, tags_codes, key_hashes, key_counts = bytearray(), [0], [], [], []
    for row in rows:
        topic = topics[codes[row]]
        message = Message(topic, bodies[row], None, keys[row], tags[row], properties[row], flags[row], times[row], host)
        data += encode_message(
            message,
            queue_id=queue_ids[row],
            store_host=store_host,
            limits=limits,
            unique_key=unique_keys[row],
            extra_properties=stamps(limits),
        )
        starts.append(len(data))
        tags_codes.append(0 if tags[row] is None else javahash.tags_code(tags[row]))
        names = [name for name in (unique_keys[row], *keys[row]) if name is not None]
        key_hashes += [javahash.index_hash(topic, name) for name in names]
        key_counts.append(len(names))

    return _Encoded(
        np.array(starts, np.int64),
        np.frombuffer(data, np.uint8),
        np.array(tags_codes, np.int64),
        np.array(key_hashes, np.int32),
        np.array(key_counts, np.int32),
        sum(row_hashes(texts)) % (1 << 64) if with_digest else 0,
    )


# ---- stamping


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
    starts = np.ascontiguousarray(starts[:n])
    if kernel.lib is not None:
        offsets = np.ascontiguousarray(queue_offsets), np.ascontiguousarray(physical_offsets)
        kernel.lib.stamp(data, starts, *offsets, store_timestamp_ms, store_timestamp_position, property_crc)
        return
    view, begins = data.data, starts.tolist()
    places = zip(begins, [*begins[1:], len(view)], queue_offsets.tolist(), physical_offsets.tolist(), strict=True)
    for start, end, queue_offset, physical_offset in places if n else ():
        stamp_record(view[start:end], queue_offset, physical_offset, store_timestamp_ms, property_crc)
