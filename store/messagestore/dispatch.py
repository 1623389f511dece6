"""How do records get into ConsumeQueues and the index?

Both are derived from the log. Dispatch takes arrays in log order, writes each queue's units in one go, then the index
entries (RocketMQ: DefaultMessageStore.ReputMessageService, CommitLogDispatcherBuildConsumeQueue / BuildIndex). Nothing
is synced here. What was dispatched before is skipped, so dispatching a range of the log again does no harm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore import javahash, record, record_columns
from messagestore.arrow_bytes import array_of, lengths_of, list_array, numpy_of, valid_of
from messagestore.commit_log import Scanned
from messagestore.consume_queue import UNIT_DTYPE, QueueFileReplaced, Units
from messagestore.index_file import IndexFileReplaced
from messagestore.layout import (
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from messagestore.message import SCHEDULE_TOPIC, MessageExt
from messagestore.store_files import StoreFiles

_KEYS_AT_ONCE = 1_000_000
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


class Dispatcher:
    """Writes units and entries of one store. Call under the writer's mutex."""

    def __init__(self, files: StoreFiles) -> None:
        self.files = files

    def dispatch(self, requests: Iterable[DispatchRequest]) -> None:
        """ConsumeQueues first, then the index, as RocketMQ does.

        Index entries of many requests are put together: each put reads and writes the slots it touches, and a large one
        costs hardly more than a small one.
        """
        waiting: list[DispatchRequest] = []
        key_count = 0
        for request in requests:
            self.dispatch_queues(request)
            waiting.append(request)
            key_count += len(request.key_hashes)
            if key_count >= _KEYS_AT_ONCE:
                self._put_index(waiting)
                waiting, key_count = [], 0
        self._put_index(waiting)

    def dispatch_queues(self, request: DispatchRequest) -> None:
        """Append each run's units; runs of one queue are written together."""
        units = np.empty(len(request.sizes), UNIT_DTYPE)
        units["physical_offset"] = request.physical_offsets
        units["size"] = request.sizes
        units["tags_code"] = request.tags_codes
        ends = np.cumsum(request.run_counts)
        pieces: dict[tuple[str, int], list[tuple[int, int]]] = {}
        queue_ids = request.run_queue_ids.tolist()
        for topic, queue_id, count, end in zip(
            request.run_topics, queue_ids, request.run_counts.tolist(), ends.tolist(), strict=True
        ):
            pieces.setdefault((topic, queue_id), []).append((end - count, end))
        for (topic, queue_id), spans in pieces.items():
            rows = np.arange(*spans[0]) if len(spans) == 1 else np.concatenate([np.arange(*span) for span in spans])
            for first, part in _runs(request.queue_offsets[rows], units[rows]):
                self._append(topic, queue_id, first, part)

    def _append(self, topic: str, queue_id: int, first: int, units: NDArray[np.void]) -> None:
        queue = self.files.queue(topic, queue_id)
        self.files.mark_written(topic, queue_id, queue)
        try:
            queue.append(first, units)
        except QueueFileReplaced:
            # A broker started by mistake deletes files before it asks for the lock: look again, rebuild, then append.
            queue.load()
            self.rebuild_queue(topic, queue_id, int(units["physical_offset"][0]))
            queue.append(first, units)

    def _put_index(self, requests: list[DispatchRequest]) -> None:
        index = self.files.index
        if index is None or not requests:
            return
        if len(requests) == 1:
            one = requests[0]
            index.put(one.physical_offsets, one.store_timestamps_ms, one.key_hashes, one.key_counts)
            return
        times = [np.broadcast_to(r.store_timestamps_ms, r.physical_offsets.shape) for r in requests]
        index.put(
            np.concatenate([r.physical_offsets for r in requests]),
            np.concatenate(times),
            np.concatenate([r.key_hashes for r in requests]),
            np.concatenate([r.key_counts for r in requests]),
        )

    def check_files(self) -> None:
        """Whether every queue and index file that was written is still the file at its path.

        Raises
        ------
        QueueFileReplaced, IndexFileReplaced
            A broker started by mistake deletes files before it asks for the lock.
        """
        for _, _, queue in self.files.written_queues():
            queue.check_files()
        if self.files.index is not None:
            self.files.index.check_files()

    def repair(self, end: int) -> None:
        """Make the index, and queues that are not at their path any more, again from the log up to `end`."""
        for topic, queue_id, queue in self.files.written_queues():
            try:
                queue.check_files()
            except QueueFileReplaced:
                queue.load()
                self.rebuild_queue(topic, queue_id, end)
        index, log = self.files.index, self.files.commit_log
        if index is None:
            return
        try:
            index.check_files()
            index.rewind(end, self._store_time)  # it may hold some entries of what is dispatched again
        except (IndexFileReplaced, FileNotFoundError):
            index.load()
            index.unlink_all()
            for run in log.scan(log.min_offset, end, verify_body_crc=False):
                self._put_index([request_of(run)])

    def _store_time(self, physical_offset: int) -> int | None:
        head = self.files.commit_log.head(physical_offset)
        return None if head is None else int(head["store_timestamp_ms"])

    def rewind_index(self, physical_offset: int) -> None:
        """The index as if nothing at or above an offset had been put."""
        if self.files.index is not None:
            self.files.index.rewind(physical_offset, self._store_time)

    def rebuild_queue(self, topic: str, queue_id: int, end: int) -> None:
        """Write a queue's units again from the log's first segment up to the physical offset `end`."""
        self.rebuild_queues([(topic, queue_id)], end)

    def rebuild_queues(
        self, queues: Iterable[tuple[str, int]], end: int, topics: Iterable[str] = ()
    ) -> set[tuple[str, int]]:
        """Write the units of some queues, and of all queues of some topics, again; those that have records.

        One pass over the log up to the physical offset `end`.
        """
        log, wanted, all_of = self.files.commit_log, set(queues), set(topics)
        found: set[tuple[str, int]] = set()
        for run in log.scan(log.min_offset, end, verify_body_crc=False):
            request = request_of(run)
            keys = list(zip(request.run_topics, request.run_queue_ids.tolist(), strict=True))
            these = {key for key in keys if key in wanted or key[0] in all_of}
            found |= these
            for topic, queue_id in these:
                keep = np.repeat([key == (topic, queue_id) for key in keys], request.run_counts)
                units = np.empty(int(keep.sum()), UNIT_DTYPE)
                units["physical_offset"] = request.physical_offsets[keep]
                units["size"] = request.sizes[keep]
                units["tags_code"] = request.tags_codes[keep]
                queue = self.files.queue(topic, queue_id)
                self.files.mark_written(topic, queue_id, queue)
                for first, part in _runs(request.queue_offsets[keep], units):
                    queue.append(first, part)
        return found


def _runs(queue_offsets: NDArray[np.int64], units: Units) -> Iterator[tuple[int, Units]]:
    """Units of one queue that follow one another, with the first one's number: one run, unless a topic was made
    again.
    """
    breaks = np.flatnonzero(np.diff(queue_offsets) != 1) + 1
    for part, first in zip(np.split(units, breaks), queue_offsets[np.append(0, breaks)].tolist(), strict=True):
        yield first, part


def queued_rows(run: Scanned) -> NDArray[np.bool_]:
    """Which records of a run get a unit: all but half messages of old brokers."""
    transaction = run.heads["sys_flag"] & SYS_FLAG_TRANSACTION_MASK
    queued: NDArray[np.bool_] = transaction != SYS_FLAG_TRANSACTION_ROLLBACK
    queued &= transaction != SYS_FLAG_TRANSACTION_PREPARED
    return queued


def request_of(run: Scanned) -> DispatchRequest:
    """What to dispatch for records read back from the log (recovery, catching up, plain puts)."""
    starts, heads = run.starts, run.heads
    queued = queued_rows(run)
    if not queued.all():  # only such logs pay for the copy
        starts, heads = starts[queued], heads[queued]
    if len(starts) <= _FEW:
        return _request_of_few(run, starts)
    return _request_of_many(run, starts, heads)


def _request_of_few(run: Scanned, starts: NDArray[np.int64]) -> DispatchRequest:
    """One by one: for a few dozen records that takes a fraction of what the many steps of `_request_of_many` cost."""
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


def _request_of_many(run: Scanned, starts: NDArray[np.int64], heads: NDArray[np.void]) -> DispatchRequest:
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
            delay_s = _DELAY_LEVELS_S[number - 1] if number <= len(_DELAY_LEVELS_S) else 1
            return message.store_timestamp_ms + 1000 * delay_s
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
