"""Chooses the queues of rows that have none: by the hash of the sharding key, else of the first key, else in turn.

These are RocketMQ's: `SelectMessageQueueByHash` takes the hash modulo the number of queues, and a producer without a
selector takes one queue after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from messagestore.format.arrow_bytes import valid_of
from messagestore.format.javahash import java_hashes, queue_of_hash
from messagestore.format.message_columns import ColumnTexts


def queue_counts(texts: ColumnTexts, count_of: Callable[[str], int]) -> NDArray[np.int32] | np.int32:
    """The number of queues of each row's topic, int32[n]; one number if there is only one topic.

    Parameters
    ----------
    texts : ColumnTexts
        n rows.
    count_of : callable
        Returns the number of queues of a topic.
    """
    counts = [count_of(name) for name in texts.topic_names] or [1]
    if len(counts) == 1:
        return np.int32(counts[0])
    of_rows: NDArray[np.int32] = np.array(counts, np.int32)[texts.topic_codes]  # a null topic is refused later
    return of_rows


def choose_queues(
    texts: ColumnTexts,
    counts: NDArray[np.int32] | np.int32,
    turn: int,
    *,
    by_sharding_key: bool = True,
    by_key: bool = True,
) -> NDArray[np.int32]:
    """A queue for each row: int32[n].

    Parameters
    ----------
    texts : ColumnTexts
        n rows.
    counts : int32[n] or int32
        As `queue_counts` gives them.
    turn : int
        The turn of a topic's first row. Row i of the topic takes queue (turn + i) % count, if no hash chooses for it.
    by_sharding_key, by_key : bool
        Which hashes choose.
    """
    n = texts.columns.row_count
    hashes, has_hash = np.zeros(n, np.int32), np.zeros(n, np.bool_)

    keys = texts.keys if by_key else None
    if keys is not None and len(keys.counts) == len(keys.texts) and keys.counts.all():
        hashes, has_hash = keys.hashes, np.ones(n, np.bool_)
    elif keys is not None:
        has_hash = keys.counts > 0
        # The first key of a row counts, however many it has.
        hashes[has_hash] = keys.hashes[(np.cumsum(keys.counts) - keys.counts)[has_hash]]

    sharding = texts.columns.sharding_key if by_sharding_key else None
    if sharding is not None:
        has_sharding = valid_of(sharding)
        hashes = np.where(has_sharding, java_hashes(sharding), hashes)
        has_hash = has_hash | has_sharding

    if has_hash.all():
        return queue_of_hash(hashes, counts)
    turns = turn + _numbers_in_topics(texts, counts)
    return np.where(has_hash, queue_of_hash(hashes, counts), turns % counts).astype(np.int32)


def _numbers_in_topics(texts: ColumnTexts, counts: NDArray[np.int32] | np.int32) -> NDArray[np.int64]:
    """The number of each row among those of its topic: int64[n]. Topics that alternate must not share the turns."""
    numbers = np.arange(texts.columns.row_count, dtype=np.int64)
    if not counts.ndim:
        return numbers
    codes = texts.topic_codes
    order = np.argsort(codes, kind="stable")
    in_topics = np.empty_like(numbers)
    in_topics[order] = numbers - np.searchsorted(codes[order], codes[order])
    return in_topics


def give_queues(texts: ColumnTexts, count_of: Callable[[str], int], turn: int) -> None:
    """Choose a queue for each row that has none: its column is missing, or null there."""
    columns = texts.columns
    given = columns.given.get("queue_id")
    if columns.queue_id is not None and (given is None or not given.null_count):
        return
    counts = np.maximum(queue_counts(texts, count_of), 1)  # a topic without queues is refused later
    chosen = choose_queues(texts, counts, turn)
    if columns.queue_id is None:
        columns.queue_id = chosen
    elif given is not None:
        columns.queue_id = np.where(valid_of(given), columns.queue_id, chosen).astype(np.int32)
