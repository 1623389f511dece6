"""The units and index entries that records give.

A `DispatchRequest` has, as arrays in log order, what ConsumeQueues and index need of each record: it is made from
columns by who appends a batch, and by `request_of` from records that are read back (RocketMQ: DispatchRequest,
CommitLog.checkMessageAndReturnSize).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.files.commit_log import Scanned
from messagestore.format import javahash, record, record_columns
from messagestore.format.arrow_bytes import array_of, lengths_of, list_array, numpy_of, valid_of
from messagestore.format.layout import (
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from messagestore.format.message import SCHEDULE_TOPIC, MessageExt

_FEW = 32  # less than 45, where both ways take as long
_DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's messageDelayLevel, levels 1 to 18."""


@dataclass
class DispatchRequest:
    """Records to dispatch, in log order; n records in r runs of one (topic, queue id) each.

    Parameters
    ----------
    run_topics, run_queue_ids, run_counts : list of str, int[r], int[r]
    queue_offsets, physical_offsets : int64[n]
    sizes : int32[n]
        Bytes of each record.
    tags_codes : int64[n]
    store_timestamps_ms : int64[n] or int
    key_hashes, key_counts : int32[k], int32[n]
        Index hashes; record i has the next `key_counts[i]` of them.
    has_unit : bool[n] or None
        Which records get a unit; None: all. PREPARED and ROLLBACK have none, and a PREPARED one is indexed all the
        same.
    """

    run_topics: list[str]
    run_queue_ids: NDArray[np.int32]
    run_counts: NDArray[np.int32]
    queue_offsets: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int32]
    tags_codes: NDArray[np.int64]
    store_timestamps_ms: NDArray[np.int64] | int
    key_hashes: NDArray[np.int32]
    key_counts: NDArray[np.int32]
    has_unit: NDArray[np.bool_] | None = None

    def rows_by_queue(self) -> dict[tuple[str, int], NDArray[np.int64]]:
        """The rows that get a unit, of each queue, in log order."""
        pieces: dict[tuple[str, int], list[tuple[int, int]]] = {}
        ends = np.cumsum(self.run_counts).tolist()
        for topic, queue_id, count, end in zip(
            self.run_topics, self.run_queue_ids.tolist(), self.run_counts.tolist(), ends, strict=True
        ):
            pieces.setdefault((topic, queue_id), []).append((end - count, end))
        found: dict[tuple[str, int], NDArray[np.int64]] = {}
        for key, spans in pieces.items():
            rows = np.arange(*spans[0]) if len(spans) == 1 else np.concatenate([np.arange(*span) for span in spans])
            if self.has_unit is not None:
                rows = rows[self.has_unit[rows]]
            if len(rows):
                found[key] = rows
        return found


def _without_unit(run: Scanned) -> NDArray[np.bool_]:
    """Which records of a run get no unit: PREPARED and ROLLBACK, whose QUEUEOFFSET is 0.

    Earlier revisions of this project gave such records of their own a number and a unit as to all others: where the
    number is not 0, it counts.
    """
    transaction = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK
    half: NDArray[np.bool_] = transaction == SYS_FLAG_TRANSACTION_ROLLBACK
    half |= transaction == SYS_FLAG_TRANSACTION_PREPARED
    half &= run.heads["queue_offset"] == 0
    return half


def request_of(run: Scanned) -> DispatchRequest:
    """What to dispatch for records read back from the log (recovery, catching up, plain puts)."""
    request = _request_of_few(run) if len(run.starts) <= _FEW else _request_of_many(run)
    without = _without_unit(run)
    if without.any():  # only such logs pay for it
        request.has_unit = ~without
        rolled_back = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_ROLLBACK
        indexed = ~(without & rolled_back)  # as RocketMQ: PREPARED is indexed, ROLLBACK is not
        request.key_hashes = request.key_hashes[np.repeat(indexed, request.key_counts)]
        request.key_counts = np.where(indexed, request.key_counts, 0).astype(np.int32)
    return request


def _request_of_few(run: Scanned) -> DispatchRequest:
    """One by one: for a few dozen records that takes a fraction of what the many steps of `_request_of_many` cost."""
    starts = run.starts
    messages = [record.decode_message(run.data.data, start, verify=False) for start in starts.tolist()]
    runs = [(key, len(list(same))) for key, same in itertools.groupby(messages, lambda m: (m.topic, m.queue_id))]
    keys = [m.keys if m.unique_key is None else (m.unique_key, *m.keys) for m in messages]
    hashes = [javahash.index_hash(m.topic, key) for m, some in zip(messages, keys, strict=True) for key in some]
    return DispatchRequest(
        run_topics=[topic for (topic, _), _ in runs],
        run_queue_ids=np.array([queue_id for (_, queue_id), _ in runs], np.int32),
        run_counts=np.array([count for _, count in runs], np.int32),
        queue_offsets=np.array([m.queue_offset for m in messages], np.int64),
        physical_offsets=run.physical_offset + starts,
        sizes=np.array([m.size for m in messages], np.int32),
        tags_codes=np.array([_tags_code(m) for m in messages], np.int64),
        store_timestamps_ms=np.array([m.store_timestamp_ms for m in messages], np.int64),
        key_hashes=np.array(hashes, np.int32),
        key_counts=np.array([len(some) for some in keys], np.int32),
    )


def _request_of_many(run: Scanned) -> DispatchRequest:
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
    return DispatchRequest(
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
    """The tags code of a message's unit: the hash of its tags; of a delayed message the time when it is due."""
    if message.topic == SCHEDULE_TOPIC:
        level = message.system_properties.get("DELAY", "0")
        number = int(level) if level.isascii() and level.isdigit() else 0
        if number > 0:
            highest = len(_DELAY_LEVELS_S)  # RocketMQ takes a level above it for this one
            return message.store_timestamp_ms + 1000 * _DELAY_LEVELS_S[min(number, highest) - 1]
    return javahash.tags_code(message.tags or "")


def _key_hashes(
    topics: pa.DictionaryArray, keys: pa.ListArray, unique_keys: pa.StringArray
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Index hashes of each record: UNIQ_KEY first, then the pieces of KEYS."""
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
