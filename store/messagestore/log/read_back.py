"""Reads back records as rows: what the ConsumeQueues and the index need of each record.

Recovery, catching up, readers and `verify` use `rows_of`; appends get their rows from the encoder (RocketMQ:
CommitLog.checkMessageAndReturnSize, which makes a DispatchRequest).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.format import javahash, record, record_columns
from messagestore.format.arrow_bytes import array_of, lengths_of, list_array, numpy_of, valid_of
from messagestore.format.layout import (
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from messagestore.format.message import SCHEDULE_TOPIC, MessageExt
from messagestore.format.rows import Row, Rows
from messagestore.log.walk import Run

_FEW = 32  # below 45, where both ways take equally long
_DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's messageDelayLevel, levels 1 to 18."""


def _without_unit(run: Run) -> NDArray[np.bool_]:
    """Return which records of a run get no unit: PREPARED and ROLLBACK, whose QUEUEOFFSET is 0.

    Earlier revisions of this project gave their own records of these kinds a number and a unit like all others. A
    number that is not 0 therefore counts.
    """
    transaction = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK
    half: NDArray[np.bool_] = transaction == SYS_FLAG_TRANSACTION_ROLLBACK
    half |= transaction == SYS_FLAG_TRANSACTION_PREPARED
    half &= run.heads["queue_offset"] == 0
    return half


def rows_of(run: Run) -> Rows:
    """Return the rows of a run of records."""
    rows = _few(run) if len(run.starts) <= _FEW else _many(run)
    without = _without_unit(run)
    if not without.any():  # only logs with half messages pay for what follows
        return rows
    rolled_back = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_ROLLBACK
    indexed = ~(without & rolled_back)  # as RocketMQ: PREPARED is indexed, ROLLBACK is not
    return replace(
        rows,
        key_hashes=rows.key_hashes[np.repeat(indexed, rows.key_counts)],
        key_counts=np.where(indexed, rows.key_counts, 0).astype(np.int32),
        has_unit=~without,
    )


def _few(run: Run) -> Rows:
    """Read records one by one, which for a few dozen takes a fraction of what the many steps of `_many` cost."""
    found = []
    for start in run.starts.tolist():
        m = record.decode_message(run.data.data, start, verify=False)
        keys = m.keys if m.unique_key is None else (m.unique_key, *m.keys)
        hashes = [javahash.index_hash(m.topic, key) for key in keys]
        place = (m.queue_offset, run.physical_offset + start, m.size)
        found.append(Row(m.topic, m.queue_id, *place, _tags_code(m), m.store_timestamp_ms, hashes))
    return Rows.of(found)


def _many(run: Run) -> Rows:
    starts, heads = run.starts, run.heads
    columns = record_columns.decode(
        run.data,
        starts,
        heads["total_size"].astype(np.int32),
        ("topic", "tags", "keys", "unique_key"),
        verify_body_crc=False,
    )
    topics = columns.column("topic").dictionary_encode()
    codes = numpy_of(topics.indices).astype(np.int64)
    queue_ids = heads["queue_id"].astype(np.int64)
    changes = np.flatnonzero((np.diff(codes) != 0) | (np.diff(queue_ids) != 0)) + 1
    run_starts = np.concatenate([[0], changes]) if len(starts) else np.empty(0, np.int64)
    names = topics.dictionary.to_pylist()
    key_hashes, key_counts = _key_hashes(topics, columns.column("keys"), columns.column("unique_key"))
    tags_codes = javahash.java_hashes(columns.column("tags")).astype(np.int64)
    if SCHEDULE_TOPIC in names:
        for row in np.flatnonzero(codes == names.index(SCHEDULE_TOPIC)).tolist():  # only a broker's own topic
            tags_codes[row] = _tags_code(record.decode_message(run.data.data, int(starts[row]), verify=False))
    return Rows(
        run_topics=[names[codes[i]] for i in run_starts],
        run_queue_ids=queue_ids[run_starts].astype(np.int32),
        run_counts=np.diff(np.append(run_starts, len(starts))).astype(np.int32),
        queue_offsets=heads["queue_offset"].astype(np.int64),
        physical_offsets=run.physical_offset + starts,
        sizes=heads["total_size"].astype(np.int32),
        tags_codes=tags_codes,
        store_timestamps_ms=heads["store_timestamp_ms"].astype(np.int64),
        key_hashes=key_hashes,
        key_counts=key_counts,
    )


def _tags_code(message: MessageExt) -> int:
    """Return the tags code of a message's unit: the hash of its tags, or the due time of a delayed message."""
    if message.topic == SCHEDULE_TOPIC:
        level = message.system_properties.get("DELAY", "0")
        number = int(level) if level.isascii() and level.isdigit() else 0
        if number > 0:
            highest = len(_DELAY_LEVELS_S)  # RocketMQ treats a level above the highest as the highest
            return message.store_timestamp_ms + 1000 * _DELAY_LEVELS_S[min(number, highest) - 1]
    return javahash.tags_code(message.tags or "")


def _key_hashes(
    topics: pa.DictionaryArray, keys: pa.ListArray, unique_keys: pa.StringArray
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the index hashes of each record: UNIQ_KEY first, then the parts of KEYS."""
    n = len(topics)
    unique = valid_of(unique_keys)
    counts = lengths_of(keys).astype(np.int32)
    rows = np.concatenate([np.flatnonzero(unique), np.repeat(np.arange(n), counts)])
    order = np.argsort(rows, kind="stable")  # unique keys were put first, so they stay first within their row
    texts = pa.concat_arrays([unique_keys.filter(array_of(unique)), keys.flatten().cast(pa.string())])
    hashes = javahash.java_hashes(texts)
    prefixes = javahash.java_hashes(list_array([t + "#" for t in topics.dictionary.to_pylist()], pa.string()))
    codes = numpy_of(topics.indices)
    full = javahash.hash_after(
        prefixes[codes[rows]] if n else np.empty(0, np.int32), hashes, javahash.utf16_lengths(texts)
    )
    return javahash.index_hashes(full)[order], (counts + unique).astype(np.int32)
