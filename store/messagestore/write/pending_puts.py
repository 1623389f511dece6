"""Puts that are not dispatched yet.

Single puts gather until the flush thread dispatches them together, as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from messagestore.log.dispatch import DispatchRequest


@dataclass(slots=True)
class Put:
    """One record; without a unit when it is PREPARED or ROLLBACK."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    store_timestamp_ms: int
    key_hashes: list[int]
    has_unit: bool = True


@dataclass(slots=True)
class PutBatch:
    """Records of one queue, side by side."""

    physical_offset: int
    size: int
    queue_offset: int
    store_timestamp_ms: int
    request: DispatchRequest


def requests_of(puts: list[Put | PutBatch]) -> Iterator[DispatchRequest]:
    """Requests in log order; single puts that follow one another go together."""
    singles: list[Put] = []
    for put in puts:
        if isinstance(put, Put):
            singles.append(put)
            continue
        if singles:
            yield _request_of(singles)
            singles = []
        yield put.request
    if singles:
        yield _request_of(singles)


def _request_of(puts: list[Put]) -> DispatchRequest:
    return DispatchRequest(
        run_topics=[p.topic for p in puts],
        run_queue_ids=np.array([p.queue_id for p in puts], np.int32),
        run_counts=np.ones(len(puts), np.int32),
        queue_offsets=np.array([p.queue_offset for p in puts], np.int64),
        physical_offsets=np.array([p.physical_offset for p in puts], np.int64),
        sizes=np.array([p.size for p in puts], np.int32),
        tags_codes=np.array([p.tags_code for p in puts], np.int64),
        store_timestamps_ms=np.array([p.store_timestamp_ms for p in puts], np.int64),
        key_hashes=np.array([h for p in puts for h in p.key_hashes], np.int32),
        key_counts=np.array([len(p.key_hashes) for p in puts], np.int32),
        has_unit=None if all(p.has_unit for p in puts) else np.array([p.has_unit for p in puts]),
    )
