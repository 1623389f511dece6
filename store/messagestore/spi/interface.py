"""The interface between the connector and a store: the methods of a store, and the values that travel.

Every value is made of whole numbers, text, bytes and buffers, so that it can be sent to another host. None of them
holds an open file. A store on this host is opened by `messagestore.spi.local`; a store on another host would be a
second implementation of `Stores`, `StoreReader` and `StoreWriter`.

    describe                     which store this is, and what tasks must know of it
    ends                         how far its queues reach
    gather                       the bytes of the records of some ranges; the caller decodes them
    stage, commit, abort         write rows to a staged file; append staged files to the log; delete them

The other methods of a reader answer what the source asks about single messages: `begins`, `places`, `seek`,
`prove_last`, `mean_sizes`, `proven`. `publish_progress` shows others how far a query has read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from messagestore.files.staging_files import Write
from messagestore.format.config import StoreConfig
from messagestore.format.message import MessageExt
from messagestore.format.record import decode_message
from messagestore.format.record_columns import Expected, Rows, decode
from messagestore.write.staging import StagedFile
from messagestore.write.transaction import BatchRequest, BatchResult

Queue = tuple[str, int]
"""Topic and queue id."""
Queues = dict[Queue, int]
"""Queue -> queue offset."""

GATHERED_ROWS = 65_536
GATHERED_SIZE = 16 * 1024 * 1024
"""At most so many messages, and so many bytes of records, come together (one message at least)."""


# ---- values


@dataclass(frozen=True, slots=True)
class Description:
    """Which store is at a path.

    Parameters
    ----------
    store_id : str
        Empty for a store that this project never wrote, and where there is none.
    ancestors : frozenset of str
        Ids of the stores that this one is a copy of.
    exists : bool
        Whether there is a store, of this project or a broker's.
    queue_counts : dict of str to int
        How many queues producers write, for each topic that the store has settings of.
    queue_ids : dict of str to list of int
        The queues that are there, by topic; empty unless they were asked for.
    config : StoreConfig
        The settings that records are encoded with.
    """

    store_id: str = ""
    ancestors: frozenset[str] = frozenset()
    exists: bool = True
    queue_counts: dict[str, int] = field(default_factory=dict)
    queue_ids: dict[str, list[int]] = field(default_factory=dict)
    config: StoreConfig = field(default_factory=StoreConfig)


@dataclass(frozen=True, slots=True)
class Ends:
    """How far the queues of some topics reach at one moment.

    Parameters
    ----------
    store_id : str
    queues : dict of (str, int) to int
        Number of the first message of each queue that cannot be seen yet. The same object until one of them changes.
    restarted : frozenset of (str, int)
        Queues that this look found to begin again below the end that was known: they were deleted and made again. Each
        restart is reported once.
    recovered : bool
        False: the store was written before the machine was started, and no writer has recovered it since. A message
        that was there may be missing, and come back.
    generation : int
        Another number says that other files, or another folder, are at the path than at the look before: whatever was
        proven about the store must be proven again.
    """

    store_id: str
    queues: Queues
    restarted: frozenset[Queue] = frozenset()
    recovered: bool = True
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Range:
    """Messages `start..end` of one queue."""

    topic: str
    queue_id: int
    start: int
    end: int

    @property
    def count(self) -> int:
        """Messages."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies in the log.

    Parameters
    ----------
    physical_offset : int
    size : int
        0: the queue has only a placeholder there, which a broker made for a message that is gone or never was.
    """

    physical_offset: int
    size: int

    @property
    def end(self) -> int:
        """The physical offset behind the record."""
        return self.physical_offset + self.size


@dataclass(frozen=True, slots=True)
class LastRecord:
    """The last record that a stream has covered, to know the log again by.

    Parameters
    ----------
    position, size : int
        Its place in the log.
    crc : int
        CRC-32 of its bytes. In an answer of `prove_last`, -1 where the log does not reach so far.
    store_timestamp_ms : int | None
        It tells what is newer in a log that was restored or made again. None in offsets of earlier releases, where no
        record begins at the place, and where nobody asked for it.
    """

    position: int
    size: int
    crc: int
    store_timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Proven:
    """What is proven to be on the disk of a store that no writer has recovered since the machine was started.

    The driver finds it once, and tasks read by it. Only the store that made it looks inside.

    Parameters
    ----------
    start, end : int
        Physical offsets.
    units : dict of (str, int) to (int, bytes)
        For each queue the number of the first message that the bytes tell of, and its units.
    """

    start: int
    end: int
    units: dict[Queue, tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Consecutive messages of one queue: their units, and the bytes of their records.

    Parameters
    ----------
    topic : str
    queue_id : int
    start : int
        Number of the first message.
    physical_offsets, sizes : int64[n], int32[n]
        The units.
    data : uint8[m]
        The records, perhaps with bytes of others in between.
    positions : int64[n]
        Where each record begins in `data`.
    path : str
        Names the log in errors.
    renumbered : bool[n] or None
        Messages whose record may say another number than its unit has: a broker brought back a topic that had been
        deleted. None: no record may.
    """

    topic: str
    queue_id: int
    start: int
    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int32]
    data: NDArray[np.uint8]
    positions: NDArray[np.int64]
    path: str
    renumbered: NDArray[np.bool_] | None = None

    @property
    def end(self) -> int:
        """The number behind the last message."""
        return self.start + len(self.sizes)

    def decoded(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Columns of the messages; nothing else is decoded. Every record is compared with its unit and its CRCs.

        Parameters
        ----------
        columns : sequence of str
            Names of `messagestore.spi.COLUMNS`.

        Raises
        ------
        CorruptionError
            A record is not the one that its unit promised, or a CRC does not hold.
        """
        queue_offsets = np.arange(self.start, self.end, dtype=np.int64)
        expected = Expected(self.topic, self.queue_id, queue_offsets, self.physical_offsets, self.renumbered)
        return decode(self.data, self.positions, self.sizes, columns, expected=expected, path=self.path)

    def messages(self) -> Iterator[MessageExt]:
        """The messages one by one, for a person to read; the CRCs of each are checked.

        Raises
        ------
        CorruptionError
            A record is damaged, or it is the record of another place.
        """
        columns = (self.physical_offsets, self.positions, self.sizes)
        for place, position, size in zip(*(column.tolist() for column in columns), strict=True):
            record = self.data[position : position + size].tobytes()
            yield decode_message(record, path=self.path, physical_offset=place)


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch that is in the store.

    Parameters
    ----------
    store_id : str
        The store that it is in: the commit of a first batch may have made it.
    result : BatchResult
    """

    store_id: str
    result: BatchResult


# ---- reading


class StoreReader(Protocol):
    """One store, opened for reading. It belongs to the folder that was at the path when it was opened.

    Any method may raise `NotAStoreError` or `StoreWentBackwardsError` when that folder is not there any more; only
    `ends` opens another folder with the same store, and says so by `Ends.generation`.

    Threads: one at a time.
    """

    def describe(self, *, queues: bool = False) -> Description:
        """Which store this is; with `queues` also which queues are there, which takes a look at all folders."""
        ...

    def ends(self, topics: Sequence[str]) -> Ends:
        """How far the queues of some topics reach. Microseconds when nothing has changed.

        Raises
        ------
        NotAStoreError
            The store is gone.
        StoreWentBackwardsError
            Another store is at the path.
        NotRecoveredError
            With `fail_on_unproven`: some records are there, and only a recovery can show them.
        """
        ...

    def begins(self, queues: Iterable[Queue]) -> Queues:
        """Number of the first message of each queue whose record is still in the log (its end when there is none)."""
        ...

    def places(self, offsets: Mapping[Queue, int]) -> dict[Queue, Place]:
        """Where the message before each offset lies. A queue that has nothing there is left out."""
        ...

    def seek(self, queue: Queue, *, physical_offset: int | None = None, after_ms: int | None = None) -> int:
        """Number of the first message of a queue that lies at a physical offset or above, or was stored after a time,
        whichever comes first; the queue's end when there is none.
        """
        ...

    def prove_last(self, position: int, size: int, *, with_time: bool = False) -> LastRecord | None:
        """The bytes that lie at a place of the log now, as the record that a caller knows must lie there; None below
        the first segment. Only `with_time` it has a store time.
        """
        ...

    def mean_sizes(self, ranges: Sequence[Range]) -> list[float]:
        """About how large a record of each range is, by some of its units. No record is read."""
        ...

    def proven(self, ranges: Iterable[Range]) -> Proven | None:
        """What a task must be given to read these ranges as they were planned; None when it needs nothing."""
        ...

    def gather(
        self, ranges: Sequence[Range], *, max_rows: int = GATHERED_ROWS, max_size: int = GATHERED_SIZE
    ) -> Iterator[Gathered]:
        """The messages of some ranges, in order, each once. `end` of a range is at most the queue's end.

        Raises
        ------
        OffsetOutOfRangeError
            Retention has taken the next message, at `queue_offset`; `min` is the first one that is left. All before it
            were given.
        StoreWentBackwardsError
            A message that was there is gone: the queue was deleted, or the store restored.
        CorruptionError
            A unit can be no record's, or a file is missing.
        """
        ...

    def publish_progress(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Write down how far a query has read, as the offsets of a RocketMQ consumer group. Nothing depends on it.

        Raises
        ------
        StoreLockedError
            A broker holds the store, and keeps all consumer offsets itself.
        CorruptionError, ConfigError, OSError
            The file cannot be read or written, or the group is not allowed; it is as it was.
        """
        ...

    def close(self) -> None:
        """Let go of everything; a second time does nothing."""
        ...


# ---- writing


class Staging(Protocol):
    """One staged file while a task writes it. A file that is not finished goes when the block ends."""

    def write(self, chunk: Rows) -> None:
        """Append encoded records."""
        ...

    def finish(self) -> StagedFile:
        """The file is complete: what the commit needs to find it and to know it again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StoreWriter(Protocol):
    """The way into the store at a path. It holds nothing between two calls, and any process may make one.

    `store_id` in its methods is what `prepare` said: empty where there was no store. When another store, or none, is
    there later, `NotAStoreError` is raised and nothing is made.
    """

    def describe(self) -> Description:
        """What is at the path now. Nothing is made."""
        ...

    def prepare(self) -> Description:
        """As `describe`, before a batch is written; the configuration is the one its rows must be encoded with. The
        queue counts are left out: each task asks for those of its own moment.

        A store that only a broker has written gets its id. Where there is no store nothing is made. Files that dead
        writers left are deleted.

        Raises
        ------
        StoreLockedError
            A broker holds the store.
        NotAStoreError
            The path holds something else, or a store of a form that cannot be written.
        ConfigError
            A setting of the store's broker forbids writing.
        """
        ...

    def stage(self, write: Write, store_id: str) -> Staging:
        """In a task: a new staged file for a write."""
        ...

    def commit(
        self, files: Sequence[StagedFile], request: BatchRequest, store_id: str, *, closing: bool = False
    ) -> Committed:
        """Append the rows of staged files as one batch, in their order; it is there once and whole when this returns.
        The files of the batch, and what failed attempts left of it, are deleted.

        A batch that is already there is recognised by its app id and version. So a caller that never got an answer
        stages the rows again and commits them again.

        Parameters
        ----------
        closing : bool
            The caller's process may end without notice: leave the store as if it had been closed.

        Raises
        ------
        BatchConflictError, QueryConflictError, VersionRegressionError, LostBatchesError, MessageIllegalError
            The batch is refused; nothing of it was written.
        ChecksumError, CorruptionError
            A staged file is not what its task wrote; nothing of the batch was written.
        StoreLockedError, StoreFullError, StorePoisonedError
        """
        ...

    def abort(self, names: Sequence[str], store_id: str) -> None:
        """Delete staged files of a batch that was given up, by their names, while no commit can read them. What is in
        the log stays there.

        Raises
        ------
        StoreLockedError
            A commit is at work. The files are left for the next `prepare`.
        """
        ...


class Stores(Protocol):
    """Opens stores by their path. It is pickled into Spark's tasks, so it holds plain values only."""

    def reader(self, path: str, config: StoreConfig | None = None, proven: Proven | None = None) -> StoreReader:
        """Open a store for reading.

        Parameters
        ----------
        proven : Proven | None
            What the driver's reader said of the ranges that are to be read.

        Raises
        ------
        NotAStoreError
            There is no store, or one whose queues cannot be read.
        """
        ...

    def writer(
        self, path: str, config: StoreConfig, *, staging_ttl_s: float, ends_abruptly: bool = False
    ) -> StoreWriter:
        """The way into the store at a path; nothing is opened yet.

        Parameters
        ----------
        staging_ttl_s : float
            A staged file that nobody has written to for so long is deleted.
        ends_abruptly : bool
            This process does not end as a Python program does (a worker of Spark): what it holds of the store is given
            back before it ends.
        """
        ...
