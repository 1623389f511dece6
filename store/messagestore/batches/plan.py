"""The plan of a batch: where each part of it goes in the log.

A plan is made before the first byte is written. It contains the topics and queues that the batch touches, the queue
offsets that its rows get, S, the pieces of rows between BLANK records, E, and the size of the BATCH record. It keeps
the size of each chunk and not its rows.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import ConfigError, MessageIllegalError
from messagestore.files.topics import MAX_QUEUE_COUNT
from messagestore.format import arguments, batch_record
from messagestore.format.batch_record import (
    OWN_APP_PREFIX,
    SOURCE_NONE,
    SOURCE_SPARK,
    BatchRecord,
    Progress,
    check_app_id,
    check_origin,
)
from messagestore.format.config import ASYNC_FLUSH, SYNC_FLUSH
from messagestore.format.layout import BLANK
from messagestore.format.message import BATCH_TOPIC, check_queue_id, check_topic
from messagestore.format.record_columns import Rows
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.log.batch_journal import JournalEntry
from messagestore.log.refusals import check_writable_topic
from messagestore.log.store_files import StoreFiles


@dataclass(frozen=True, slots=True)
class Contents:
    """What shows whether rows are the same as earlier ones: their number, the sum of their digests, and their topics.

    Parameters
    ----------
    row_count : int
    digest : int
        A number of 64 bits.
    topics : frozenset of str
        Also those to which delayed rows go when they are due.
    """

    row_count: int = 0
    digest: int = 0
    topics: frozenset[str] = frozenset()

    def __add__(self, other: Contents) -> Contents:
        digest = (self.digest + other.digest) % (1 << 64)
        return Contents(self.row_count + other.row_count, digest, self.topics | other.topics)

    def __str__(self) -> str:
        return (
            f"{self.row_count} rows with digest {self.digest:016x} for {', '.join(sorted(self.topics)) or 'no topic'}"
        )


def contents_of(chunk: Rows) -> Contents:
    """What is compared of the rows of a chunk."""
    topics = frozenset((*chunk.run_topics, *(topic for topic, _ in chunk.real_queues)))
    return Contents(chunk.row_count, chunk.digest, topics)


_BATCH_ID = re.compile(r"[0-9a-f]{32}")


class ChunkSource(Protocol):
    """Encoded records of a batch, in the order they go into the log; each chunk may be read several times."""

    @property
    def contents(self) -> Contents:
        """What all chunks together are. Nobody asks for a chunk of a batch that is in the log already."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, *, with_data: bool) -> Rows:
        """Chunk `index`. Without `with_data`, `data` may be empty; with it, the caller writes to `data`."""
        ...


class Chunks(list[Rows]):
    """Chunks in memory."""

    @property
    def contents(self) -> Contents:
        """What all chunks together are."""
        return sum(map(contents_of, self), Contents())

    def read(self, index: int, *, with_data: bool) -> Rows:  # noqa: ARG002 - as in the protocol
        """Chunk `index`."""
        return self[index]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Who appends a batch, and what to do if the store holds it already.

    Parameters
    ----------
    app_id : str | None
        The application that the batch belongs to. Together with `version` it makes the batch exactly-once. None: the
        batch gets a random id and is not recognised if it is appended again.
    version : int
        The number of the batch within its app, from 0 to 2^63 - 1. Without an `app_id`, leave it out.
    version_source : str
        "user": versions only have to grow. "spark": they are Spark's batch ids, so that a gap is an error.
    query_id : str | None
        The id of the streaming query. None: a batch write, or a stream whose id is not known (foreachBatch on Spark
        Connect).
    stream_batch_id : int | None
        The micro-batch that this batch is a part of, if it is known; `version` may be another number.
    flush_disk_type : str
        "SYNC_FLUSH": the batch is on the disk when `append_batch` returns. "ASYNC_FLUSH": it is there soon after.
    on_replay_mismatch : str
        What to do if the store holds this version with other rows: "fail", or "skip" to drop the new rows.
    on_version_regression : str
        What to do if the version is unknown, and below the last one: "fail", or "skip" to drop the rows.
    on_lost_batches : str
        What to do if versions between the last one in the store and this one are missing: "fail" or "continue".
    on_new_query : str
        What to do if the app's batches in the store are another query's: "fail", or "continue" to take the app over.
    topic : str | None
        The topic of all rows of the app, this batch's and later ones'. None: each row names its topic.
    on_new_topic : str
        What to do if versions are Spark's batch ids and `topic` is not that of the app's last batch: "fail", or
        "continue" to go on with the new one.
    auto_create_topic : bool
        True: a topic that does not exist is created. False: it is an error.
    write_queue_nums : int
        The number of queues of a topic that is created.
    start : bool
        For `MessageStore.start_batches`: an empty batch that says that the app continues with `version` + 1.
    origin : dict | None
        Where the rows come from, for the program that appends them: `MessageStore.last_batch` returns it. It is stored
        in the batch's own record, so it is in the log exactly if the rows are. At most 32 KiB as JSON; needs an
        `app_id`.

    Raises
    ------
    ConfigError
        A value is not allowed.

    Examples
    --------
    >>> from messagestore import BatchRequest
    >>> BatchRequest(app_id="gates-of-the-day", version=7).on_replay_mismatch
    'fail'
    """

    app_id: str | None = None
    version: int = 0
    version_source: str = batch_record.SOURCE_USER
    query_id: str | None = None
    stream_batch_id: int | None = None
    flush_disk_type: str = SYNC_FLUSH
    on_replay_mismatch: str = "fail"
    on_version_regression: str = "fail"
    on_lost_batches: str = "fail"
    on_new_query: str = "fail"
    topic: str | None = None
    on_new_topic: str = "fail"
    auto_create_topic: bool = True
    write_queue_nums: int = 8
    start: bool = False
    origin: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        allowed = {
            "flush_disk_type": (SYNC_FLUSH, ASYNC_FLUSH),
            "version_source": (SOURCE_SPARK, batch_record.SOURCE_USER),
            "on_replay_mismatch": ("fail", "skip"),
            "on_version_regression": ("fail", "skip"),
            "on_lost_batches": ("fail", "continue"),
            "on_new_query": ("fail", "continue"),
            "on_new_topic": ("fail", "continue"),
        }
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                raise ConfigError(f"{key}: found {getattr(self, key)!r}; allowed is {' or '.join(values)}", key=key)

        if self.origin is not None:
            check_origin(self.origin)
            if self.app_id is None:
                raise ConfigError("origin: found without app_id. Give the app that the batch belongs to", key="origin")

        if self.app_id is None and self.version != 0:
            raise ConfigError(
                f"version: found {self.version!r} without app_id, so the batch would not be recognised if it came "
                "again. Give the app that counts these versions, or leave both out",
                key="version",
            )

        if self.app_id is not None:
            check_app_id(self.app_id)
            if self.app_id.startswith(OWN_APP_PREFIX) and not isinstance(self, OwnRequest):
                raise MessageIllegalError(
                    f"txnAppId: found {self.app_id[:80]!r}; names that begin with {OWN_APP_PREFIX} belong to the "
                    "store. Choose another one",
                    field="txnAppId",
                )
            # 4.2 would be stored as 4, and would not be recognised in a replay
            version = arguments.whole_number("txnVersion", self.version, 0, (1 << 63) - 1)
            object.__setattr__(self, "version", version)
            if self.query_id is not None:
                arguments.text("query_id", self.query_id)

        if self.stream_batch_id is not None:
            object.__setattr__(
                self, "stream_batch_id", arguments.whole_number("stream_batch_id", self.stream_batch_id, 0)
            )
        if self.topic is not None:
            arguments.text("topic", self.topic)

        arguments.true_or_false("auto_create_topic", self.auto_create_topic)
        arguments.true_or_false("start", self.start)
        queue_nums = arguments.whole_number("write_queue_nums", self.write_queue_nums, 1, MAX_QUEUE_COUNT)
        object.__setattr__(self, "write_queue_nums", queue_nums)


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """How the store recognises a batch without an app id that is committed again.

    Parameters
    ----------
    batch_id : str
        A random id of 32 hex digits, which is written to the log in place of an app id.
    log_end : int
        A physical offset at or below which the log ended when the write was planned, and below which nothing is ever
        cut off: the batch can only lie behind it.

    Raises
    ------
    ConfigError
        The id has another form.
    """

    batch_id: str
    log_end: int

    def __post_init__(self) -> None:
        if not _BATCH_ID.fullmatch(self.batch_id):
            raise ConfigError(
                f"batch_id: found {self.batch_id!r:.80}; allowed are 32 hex digits", key="batch_id", value=self.batch_id
            )
        arguments.whole_number("log_end", self.log_end, 0)


class OwnRequest(BatchRequest):
    """A batch that the store itself appends: its app id is reserved."""

    __slots__ = ()


@dataclass(slots=True)
class Piece:
    """Rows of one chunk that lie together in the log."""

    chunk: int
    first_row: int
    row_count: int
    physical_offset: int


@dataclass(slots=True)
class _ChunkSize:
    size: int
    row_count: int


class Restated(NamedTuple):
    """A batch whose BATCH record is written again without rows, because retention deletes the segment of the first one.

    Parameters
    ----------
    entry : JournalEntry
        The batch.
    refused : tuple of str
        The query ids of its app that are refused.
    born_timestamp_ms : int | None
        When the batch was stored; None: nobody knows it any more.
    """

    entry: JournalEntry
    refused: tuple[str, ...]
    born_timestamp_ms: int | None


class BatchPlan:
    """Where each part of one batch goes in the log.

    Parameters
    ----------
    files : StoreFiles
    log_end : int
        The physical offset at which the log ends.
    next_offset : callable
        Returns the queue offset that the next message of a (topic, queue id) gets.
    source : ChunkSource
    request : BatchRequest
    replaces : tuple of str
        Query ids from which this batch takes its app over.
    own : bool
        The store made the records itself: their topics and queues are not checked.
    batch_id : str | None
        What is written in place of an app id, if the request has none; None: a random one.
    restated : Restated | None
        The batch that the record describes; `source` has no rows then.
    progress : callable | None
        Returns the progress of consumer groups that the batch moves, once all numbers of the batch are known.
    """

    def __init__(
        self,
        files: StoreFiles,
        log_end: int,
        next_offset: Callable[[str, int], int],
        source: ChunkSource,
        request: BatchRequest,
        replaces: tuple[str, ...] = (),
        *,
        own: bool = False,
        batch_id: str | None = None,
        restated: Restated | None = None,
        progress: Callable[[int], Progress] | None = None,
    ) -> None:
        self.files = files
        self.log = files.commit_log
        self.source = source

        self.row_count = 0
        self.digest = 0
        self.chunk_sizes: list[_ChunkSize] = []
        self.first_offsets: dict[tuple[str, int], int] = {}
        self.counts: dict[tuple[str, int], int] = {}
        self.sizes: dict[str, int] = {}
        """The bytes of the records of each topic."""
        self.real_queues: dict[str, int] = {}
        """Where the delayed rows go when they are due: each topic, with its highest queue id."""

        for index in range(len(source)):
            self._take(source.read(index, with_data=False))
        if not own:
            self._check_topics(request)

        for key in self.counts:
            self.first_offsets[key] = next_offset(*key)

        number = next_offset(BATCH_TOPIC, 0)
        self.batch = BatchRecord(
            app_id=request.app_id if request.app_id is not None else batch_id or uuid.uuid4().hex,
            version=request.version,
            version_source=request.version_source if request.app_id is not None else SOURCE_NONE,
            query_id=request.query_id,
            store_id=files.store_id,
            physical_offset=0,
            queue_offset=number,
            end=0,
            flush_disk_type=request.flush_disk_type,
            row_count=self.row_count,
            ranges=self._ranges(),
            crcs=(),
            digest=0 if own else self.digest,
            replaces=replaces,
            start=request.start,
            origin=request.origin,
            topic=request.topic,
            progress={} if progress is None else progress(number),
        )

        self.born_timestamp_ms: int | None = None
        if restated is not None:
            entry, refused, self.born_timestamp_ms = restated
            self.batch = replace(
                self.batch,
                restated=True,
                refused=refused,
                row_count=entry.row_count,
                digest=entry.digest,
                ranges={topic: [] for topic in entry.topics},
            )

        self._place(log_end)

    def _take(self, chunk: Rows) -> None:
        ends_of_rows = np.append(0, np.cumsum(chunk.sizes, dtype=np.int64))
        sizes = np.diff(ends_of_rows[np.append(0, np.cumsum(chunk.run_counts))]).tolist()
        for (topic, queue_id, start, stop), size in zip(chunk.runs(), sizes, strict=True):
            self.counts[(topic, queue_id)] = self.counts.get((topic, queue_id), 0) + stop - start
            self.sizes[topic] = self.sizes.get(topic, 0) + size
        for topic, queue_id in chunk.real_queues:
            self.real_queues[topic] = max(self.real_queues.get(topic, 0), queue_id)
        self.row_count += chunk.row_count
        self.digest = (self.digest + chunk.digest) % (1 << 64)
        self.chunk_sizes.append(_ChunkSize(chunk.end, chunk.row_count))

    def _check_topics(self, request: BatchRequest) -> None:
        topics = self.files.topics
        most = dict(self.real_queues)
        for topic, queue_id in self.counts:
            if topic != SCHEDULE_TOPIC:  # only the encoder sends messages there
                most[topic] = max(most.get(topic, 0), queue_id)

        missing = []
        for topic, queue_id in most.items():
            check_topic(topic)
            check_writable_topic(self.files, topic)
            config = topics.get(topic)

            if config is None and not request.auto_create_topic:
                raise MessageIllegalError(
                    f"topic {topic!r} is not in config/topics.json, and autoCreateTopic is false. Create it first",
                    field="topic",
                )
            check_queue_id(
                queue_id, queue_count=config.write_queue_nums if config else request.write_queue_nums, topic=topic
            )
            if config is None:
                missing.append(topic)

        for topic in missing:
            topics.create(topic, request.write_queue_nums)
        if missing:
            topics.save_or_drop()

    def _ranges(self) -> dict[str, list[tuple[int, int, int]]]:
        ranges: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, queue_id), count in sorted(self.counts.items()):
            ranges.setdefault(topic, []).append((queue_id, self.first_offsets[(topic, queue_id)], count))
        for topic in self.real_queues:
            ranges.setdefault(topic, [])  # the same rows for another topic are another batch
        return ranges

    def _place(self, log_end: int) -> None:
        """Set S, the pieces and E.

        The size of the BATCH record depends on E only through the number of CRCs: widen it until the CRCs fit.
        """
        log, files = self.log, self.files
        most = sum(chunk.size for chunk in self.chunk_sizes)
        while True:
            self.body_size = batch_record.widest_body_size(self.batch, most)
            widest = batch_record.encode(self.batch, self.body_size, files.config, files.store_host, 0)
            self.size = len(widest)
            limit = log.segment_size - BLANK.size

            if self.size > limit:
                raise MessageIllegalError(
                    f"batch: the BATCH record would have {self.size} bytes, because it names {len(self.counts)} "
                    f"queues; allowed are {limit}, the room in a segment. Write to fewer queues at once, or use "
                    f"larger segments (mappedFileSizeCommitLog)",
                    field="batch",
                    size=self.size,
                    limit=limit,
                )

            start = log_end + log.left(log_end) if log.blank_needed(log_end, self.size) else log_end
            self.pieces, end = self._pieces(start + self.size)
            if end - start - self.size <= most:
                break
            most = end - start - self.size

        log.check_room(end)
        self.batch = replace(self.batch, physical_offset=start, end=end, size=self.size)
        self.last_record = (start, self.size)

    def _pieces(self, position: int) -> tuple[list[Piece], int]:
        """The pieces in order, and the end of the last one.

        A unit (rows of one topic and queue, at most maxMessageSize) never crosses a segment's end.
        """
        log = self.log
        pieces: list[Piece] = []
        for index, chunk in enumerate(self.chunk_sizes):
            if not chunk.row_count:
                continue

            if not log.blank_needed(position, chunk.size):
                pieces.append(Piece(index, 0, chunk.row_count, position))
                position += chunk.size
                continue

            rows = self.source.read(index, with_data=False)
            starts = rows.starts
            unit_ends = self._unit_ends(rows, starts)

            row = 0
            while row < chunk.row_count:
                room = log.left(position) - BLANK.size
                fitting = int(np.searchsorted(starts[unit_ends], starts[row] + room, side="right"))
                last = int(unit_ends[fitting - 1]) if fitting else 0
                if last > row:
                    pieces.append(Piece(index, row, last - row, position))
                    position += int(starts[last] - starts[row])
                    row = last
                if row < chunk.row_count:
                    position += log.left(position)

        return pieces, position

    def _unit_ends(self, rows: Rows, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the row after each unit of a chunk, ascending."""
        limit = min(self.files.config.max_message_size, self.log.segment_size - BLANK.size)
        ends: list[int] = []
        for run in rows.runs():
            row = run.start
            while row < run.stop:
                last = int(np.searchsorted(starts, starts[row] + limit, side="right")) - 1
                row = min(max(last, row + 1), run.stop)
                ends.append(row)

        sizes = np.diff(np.concatenate([[0], starts[ends]]))
        room = self.log.segment_size - BLANK.size
        if len(sizes) and int(sizes.max()) > room:
            raise MessageIllegalError(
                f"record: found {int(sizes.max())} bytes; allowed are {room}, the room in a segment "
                f"(mappedFileSizeCommitLog)",
                field="body",
                size=int(sizes.max()),
                limit=room,
            )
        return np.array(ends, np.int64)

    def rows(self, timestamp_ms: int, *, with_data: bool) -> Iterator[Rows]:
        """The rows of each piece with queue offsets, position and store time; each call reads the source again."""
        next_offsets = dict(self.first_offsets)
        index, chunk = -1, None
        for piece in self.pieces:
            if chunk is None or piece.chunk != index:
                index, chunk = piece.chunk, self.source.read(piece.chunk, with_data=with_data)
                chunk = chunk.waiting(self.files.config.delays_ms).numbered(next_offsets)
            rows = chunk.slice(piece.first_row, piece.first_row + piece.row_count)
            yield rows.at(piece.physical_offset, timestamp_ms)
