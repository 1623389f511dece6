"""Records that go elsewhere than they came for: delayed messages, which wait, and then are due; copies of a store's.

    put:      flights/3  ->  SCHEDULE_TOPIC_XXXX/2, with DELAY, REAL_TOPIC and REAL_QID behind the other properties
    deliver:  SCHEDULE_TOPIC_XXXX/2  ->  flights/3; the properties stay, as in RocketMQ

The bytes of head, body and properties are kept; only the topic, the queue and what depends on the place change. Many
records are rewritten at once.

Source: RocketMQ broker/util/HookUtils.java (transformDelayLevelMessage), broker/schedule/ScheduleMessageService.java.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.format import record_scan
from messagestore.format.arrow_bytes import array_of, lengths_of, list_array
from messagestore.format.delay_levels import DelayLevels
from messagestore.format.hosts import HOST_V4_SIZE
from messagestore.format.layout import (
    IPV6_EXTRA_SIZE,
    PROPERTIES_LENGTH_SIZE,
    PROPERTY_CRC_SIZE,
    RECORD_HEAD,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
)
from messagestore.format.properties import DELAY, PROPERTY_SEPARATOR, REAL_QID, REAL_TOPIC, encode_properties
from messagestore.format.record import PROPERTY_CRC_BLANK, topic_bytes
from messagestore.format.record_rows import rows_of
from messagestore.format.record_scan import PROPERTY_CRC_BEGIN
from messagestore.format.rows import SCHEDULE_TOPIC, Rows


def waiting_properties(level: int, topic: str, queue_id: int) -> list[tuple[str, str]]:
    """The properties that a message gets while it waits."""
    return [(DELAY, str(level)), (REAL_TOPIC, topic), (REAL_QID, str(queue_id))]


def delayed(rows: Rows, level: int, delay_levels: DelayLevels) -> Rows:
    """Encoded rows without a place, as they wait at a delay level."""
    starts = rows.starts
    runs = list(rows.runs())
    more = [encode_properties(waiting_properties(level, run.topic, run.queue_id)) for run in runs]
    of_rows = np.repeat(np.arange(len(runs)), rows.run_counts)

    data, begins = readdressed(
        rows.data,
        starts[:-1],
        [SCHEDULE_TOPIC],
        np.zeros(rows.row_count, np.int64),
        np.full(rows.row_count, level - 1, np.int32),
        more=list_array(more, pa.large_binary()).take(array_of(of_rows)),
        property_crc=rows.property_crc,
    )

    real: dict[str, int] = {}
    for run in runs:
        real[run.topic] = max(real.get(run.topic, 0), run.queue_id)

    waiting = unplaced(
        data,
        begins,
        delay_levels,
        store_timestamp_position=rows.store_timestamp_position,
        property_crc=rows.property_crc,
    )
    return replace(waiting, digest=rows.digest, real_queues=tuple(real.items()))


def unplaced(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    delay_levels: DelayLevels,
    *,
    store_timestamp_position: int,
    property_crc: bool,
) -> Rows:
    """Rows without a place of records that lie back to back; the last start is the end of the data."""
    begins = starts[:-1]
    rows = rows_of(data, begins, record_scan.heads(data, begins), 0, delay_levels)
    nothing = np.zeros(len(begins), np.int64)
    return replace(
        rows,
        data=data,
        queue_offsets=nothing,
        store_timestamps_ms=nothing,
        store_timestamp_position=store_timestamp_position,
        property_crc=property_crc,
    )


def readdressed(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    topics: Sequence[str],
    topic_codes: NDArray[np.int64],
    queue_ids: NDArray[np.int32],
    *,
    property_crc: bool,
    order: NDArray[np.int64] | None = None,
    more: pa.Array | None = None,
    store_host: bytes | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of records with other topics and queues, and without a place.

    Parameters
    ----------
    data : uint8[m]
    starts : int64[n]
        Where each record begins, in ascending order. The records were checked.
    topics : sequence of str
    topic_codes, queue_ids : int64[n], int32[n]
        The new topic of each record, by its index in `topics`, and its new queue.
    property_crc : bool
        Whether each record ends in an empty `__CRC32#`, to be stamped; one that it had goes in any case.
    order : int64[k] | None
        Which of the records to return, and in which order; None: all of them.
    more : pa.Array[n] | None
        large_binary: what comes behind the properties of each record.
    store_host : bytes | None
        The new STOREHOST, as `hosts.pack_host` returns it. None: it stays.

    Returns
    -------
    data : uint8[k]
        The records, back to back; writable.
    starts : int64[k + 1]
        Where each begins, and where the last one ends.
    """
    heads = record_scan.heads(data, starts)
    count, parts = record_scan.parts(data, starts, heads)
    if count < len(starts):
        raise AssertionError(f"record {count} of {len(starts)} was checked, and its lengths do not add up")

    # Cut each record into slices. The last two are its properties, and a `__CRC32#` behind them or nothing.
    property_ends = parts.ends - np.where(_has_crc(data, parts.property_starts, parts.ends), PROPERTY_CRC_SIZE, 0)
    flags = heads["sys_flag"].astype(np.int64)
    hosts = () if store_host is None else _store_hosts(starts, flags)
    slices = slices_of(data, starts, *hosts, parts.body_ends, parts.property_starts, property_ends)
    slice_count = 4 + len(hosts)

    # From here on, everything is by the order of the result.
    rows = np.arange(len(starts)) if order is None else order
    n, topic_codes, queue_ids, flags = len(rows), topic_codes[rows], queue_ids[rows], flags[rows]

    def cut(number: int) -> pa.Array:
        """One of the slices of each record."""
        return slices.take(array_of(slice_count * rows + number))

    behind = [] if more is None else [more.take(array_of(rows))]
    if property_crc:
        behind.append(_repeated(PROPERTY_CRC_BLANK, n))
    if behind:
        behind.insert(0, _separators(data, parts.property_starts[rows], property_ends[rows]))
    property_sizes = sum(map(lengths_of, behind), (property_ends - parts.property_starts)[rows])

    # Join what stays of each record with what is new.
    packed = [topic_bytes(topic, True) for topic in topics]  # they were accepted when the messages were put
    columns = [cut(0)]
    if store_host is not None:
        columns += [_repeated(store_host, n), cut(2)]
        flags = flags & ~SYS_FLAG_STORE_HOST_V6 | (SYS_FLAG_STORE_HOST_V6 if len(store_host) > HOST_V4_SIZE else 0)
    joined = pc.binary_join_element_wise(
        *columns,
        list_array([topic for _, topic in packed], pa.large_binary()).take(array_of(topic_codes)),
        _fixed(property_sizes.astype(">i2").view(np.uint8), PROPERTIES_LENGTH_SIZE),
        cut(slice_count - 2),
        *behind,
        pa.scalar(b"", pa.large_binary()),
    )

    begins = np.frombuffer(joined.buffers()[1], np.int64, n + 1, 8 * joined.offset)
    records = np.frombuffer(joined.buffers()[2], np.uint8)[begins[0] : begins[-1]].copy()
    begins = begins - begins[0]

    # Write the numbers of the heads anew.
    magics = np.array([magic for magic, _ in packed], np.int32)
    for name, values in (
        ("total_size", np.diff(begins)),
        ("magic", magics[topic_codes]),
        ("queue_id", queue_ids),
        ("queue_offset", np.zeros(n, np.int64)),
        ("physical_offset", np.zeros(n, np.int64)),
        ("sys_flag", flags),
    ):
        put_numbers(records, begins[:-1] + RECORD_HEAD.offset(name), values, 8 if name.endswith("_offset") else 4)
    return records, begins


def _separators(data: NDArray[np.uint8], property_starts: NDArray[np.int64], ends: NDArray[np.int64]) -> pa.Array:
    """What is missing behind the properties of each record: RocketMQ's producers leave out the last separator."""
    are_open = (ends > property_starts) & (data[np.maximum(ends - 1, 0)] != PROPERTY_SEPARATOR[0])
    return list_array([b"", PROPERTY_SEPARATOR], pa.large_binary()).take(array_of(are_open.view(np.int8)))


def put_numbers(data: NDArray[np.uint8], positions: NDArray[np.int64], values: NDArray[Any], width: int) -> None:
    """Write a big-endian number of 4 or 8 bytes at each position."""
    data[positions[:, None] + np.arange(width)] = values.astype(f">i{width}").view(np.uint8).reshape(-1, width)


def _has_crc(data: NDArray[np.uint8], property_starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which records end in `__CRC32#`."""
    at = ends - PROPERTY_CRC_SIZE
    begin = np.frombuffer(PROPERTY_CRC_BEGIN, np.uint8)
    same_bytes = data[np.maximum(at, 0)[:, None] + np.arange(len(begin))] == begin
    has: NDArray[np.bool_] = same_bytes.all(axis=1) & (at >= property_starts)
    return has


def _store_hosts(starts: NDArray[np.int64], flags: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where STOREHOST begins and ends in each record."""
    begins = starts + RECORD_HEAD.offset("store_ip") + np.where(flags & SYS_FLAG_BORN_HOST_V6, IPV6_EXTRA_SIZE, 0)
    return begins, begins + HOST_V4_SIZE + np.where(flags & SYS_FLAG_STORE_HOST_V6, IPV6_EXTRA_SIZE, 0)


def _repeated(value: bytes, n: int) -> pa.Array:
    return list_array([value], pa.large_binary()).take(array_of(np.zeros(n, np.int64)))


def slices_of(data: NDArray[np.uint8], *positions: NDArray[np.int64]) -> pa.Array:
    """Parts of the data, as large_binary without a copy: from each position of a record to its next one, and so on to
    the next record.
    """
    offsets = np.append(np.stack(positions, axis=1).reshape(-1), len(data))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _fixed(data: NDArray[np.uint8], width: int) -> pa.Array:
    offsets = np.arange(0, len(data) + 1, width, dtype=np.int64)
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
