"""What the ConsumeQueues and the index need of records, read back from their bytes (see `Rows`).

RocketMQ: CommitLog.checkMessageAndReturnSize, which makes a DispatchRequest. A delayed message lies in
SCHEDULE_TOPIC_XXXX until it is due; instead of a hash of its tags, its unit has the time at which it is due.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from messagestore.format import javahash, record, record_decode
from messagestore.format.arrow_bytes import array_of, lengths_of, list_array, numpy_of, valid_of
from messagestore.format.delay_levels import DelayLevels
from messagestore.format.message import MessageExt
from messagestore.format.properties import DELAY
from messagestore.format.rows import SCHEDULE_TOPIC, Row, Rows

_FEW = 32  # below 45, where both ways take equally long


def rows_of(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    heads: NDArray[np.void],
    physical_offset: int,
    delay_levels: DelayLevels,
) -> Rows:
    """The rows of valid records.

    Parameters
    ----------
    data : uint8[m]
    starts : int64[n]
        Where each record begins in `data`.
    heads : structured[n]
        As `record_scan.heads` gives them.
    physical_offset : int
        The place of `data[0]`.
    delay_levels : DelayLevels
        Which delay levels count for each record.
    """
    way = _few if len(starts) <= _FEW else _many
    return way(data, starts, heads, physical_offset, delay_levels)


def _few(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    heads: NDArray[np.void],  # noqa: ARG001 - as `_many`
    physical_offset: int,
    delay_levels: DelayLevels,
) -> Rows:
    """Read records one by one, which for a few dozen takes a fraction of what the many steps of `_many` cost."""
    rows = []
    for start in starts.tolist():
        m = record.decode_message(data.data, start, verify=False)
        keys = m.keys if m.unique_key is None else (m.unique_key, *m.keys)
        hashes = [javahash.index_hash(m.topic, key) for key in keys]
        place = (m.queue_offset, physical_offset + start, m.size)
        code = _tags_code(m, delay_levels, physical_offset + start)
        rows.append(Row(m.topic, m.queue_id, *place, code, m.store_timestamp_ms, hashes))
    return Rows.of(rows)


def _many(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    heads: NDArray[np.void],
    physical_offset: int,
    delay_levels: DelayLevels,
) -> Rows:
    sizes = heads["total_size"].astype(np.int32)
    columns = record_decode.decode(data, starts, sizes, ("topic", "tags", "keys", "unique_key"), verify_body_crc=False)

    topics = columns.column("topic").dictionary_encode()
    codes = numpy_of(topics.indices).astype(np.int64)
    queue_ids = heads["queue_id"].astype(np.int64)
    changes = np.flatnonzero((np.diff(codes) != 0) | (np.diff(queue_ids) != 0)) + 1
    run_starts = np.concatenate([[0], changes]) if len(starts) else np.empty(0, np.int64)
    names = topics.dictionary.to_pylist()

    key_hashes, key_counts = _key_hashes(topics, columns.column("keys"), columns.column("unique_key"))
    tags_codes = javahash.java_hashes(columns.column("tags")).astype(np.int64)
    times = heads["store_timestamp_ms"].astype(np.int64)

    # The unit of a delayed message has the time when it is due in place of the hash of its tags.
    if SCHEDULE_TOPIC in names:
        delayed = np.flatnonzero(codes == names.index(SCHEDULE_TOPIC))
        properties = record_decode.decode(
            data, starts[delayed], sizes[delayed], ("system_properties",), verify_body_crc=False
        ).column(0)
        rows, levels = values_of(properties, DELAY)
        of_rows = delayed[rows]
        for some, delays_ms in delay_levels.of(physical_offset + starts[of_rows]):
            delays = _delays(levels.take(array_of(some)), delays_ms)
            waits = delays >= 0
            waiting = of_rows[some[waits]]
            tags_codes[waiting] = times[waiting] + delays[waits]

    return Rows(
        run_topics=[names[codes[i]] for i in run_starts],
        run_queue_ids=queue_ids[run_starts].astype(np.int32),
        run_counts=np.diff(np.append(run_starts, len(starts))).astype(np.int32),
        queue_offsets=heads["queue_offset"].astype(np.int64),
        physical_offsets=physical_offset + starts,
        sizes=sizes,
        tags_codes=tags_codes,
        store_timestamps_ms=times,
        key_hashes=key_hashes,
        key_counts=key_counts,
    )


def values_of(properties: pa.MapArray, name: str) -> tuple[NDArray[np.int64], pa.Array]:
    """The rows that have a property, in ascending order, and its value in each of them.

    Parameters
    ----------
    properties : pa.MapArray[n]
        A column of `record_decode.decode`.
    """
    counts = np.diff(numpy_of(properties.offsets))
    hits = pc.equal(properties.keys, name)
    return np.repeat(np.arange(len(properties)), counts)[numpy_of(hits)], properties.items.filter(hits)


def _delays(levels: pa.Array, delays_ms: tuple[int, ...]) -> NDArray[np.int64]:
    """The delay of each value of DELAY in milliseconds; -1 for what is no level."""
    texts = levels.dictionary_encode()
    delays_of_levels = [delay_of(text, delays_ms) for text in texts.dictionary.to_pylist()]
    delays_of_rows: NDArray[np.int64] = np.array(delays_of_levels, np.int64)[numpy_of(texts.indices)]
    return delays_of_rows


def delay_of(level: str, delays_ms: tuple[int, ...]) -> int:
    """How long a message with a property DELAY waits, in milliseconds; -1 if it is no level.

    As in RocketMQ, a level above the last one counts as the last one.
    """
    number = int(level) if level.isascii() and level.isdigit() and len(level) <= 10 else 0
    return delays_ms[min(number, len(delays_ms)) - 1] if number > 0 else -1


def _tags_code(message: MessageExt, delay_levels: DelayLevels, physical_offset: int) -> int:
    """The tags code of a message's unit: the hash of its tags, or the due time of a delayed message."""
    if message.topic == SCHEDULE_TOPIC:
        delay_ms = delay_of(message.system_properties.get(DELAY, ""), delay_levels.at(physical_offset))
        if delay_ms >= 0:
            return message.store_timestamp_ms + delay_ms
    return javahash.tags_code(message.tags or "")


def _key_hashes(
    topics: pa.DictionaryArray, keys: pa.ListArray, unique_keys: pa.StringArray
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The index hashes of each record: UNIQ_KEY first, then the parts of KEYS."""
    n = len(topics)
    unique = valid_of(unique_keys)
    counts = lengths_of(keys).astype(np.int32)
    rows = np.concatenate([np.flatnonzero(unique), np.repeat(np.arange(n), counts)])
    order = np.argsort(rows, kind="stable")  # unique keys were put first, so they stay first within their row
    texts = pa.concat_arrays([unique_keys.filter(array_of(unique)), keys.flatten().cast(pa.string())])
    prefixes = javahash.java_hashes(list_array([t + "#" for t in topics.dictionary.to_pylist()], pa.string()))
    codes = numpy_of(topics.indices)
    before = prefixes[codes[rows]] if n else np.empty(0, np.int32)
    return javahash.index_hashes_behind(before, texts)[order], (counts + unique).astype(np.int32)
