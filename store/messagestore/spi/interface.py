"""The interface between the connector and a store: the methods of a store, and the values that they exchange.

Every value consists of whole numbers, text, bytes and buffers, so that it can be sent to another host. No value holds
an open file. A store on this host is opened by `messagestore.spi.local`; a store on another host would be a
second implementation of `Stores`, `StoreReader` and `StoreWriter`.

    describe                     says which store this is, and what tasks must know about it
    ends                         says how far its queues reach
    gather                       returns the bytes of the records of some ranges; the caller decodes them
    stage, commit, abort         write rows to a staged file; append staged files to the log; delete staged files

The other methods of a reader answer the source's questions about single messages: `begins`, `places`, `seek`,
`prove_last`, `mean_sizes`, `sizes`, `proven`. `publish_progress` shows others how far a query has read, and
`published_progress` reads what a consumer group has published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from messagestore.files.staging_files import Write
from messagestore.format.config import StoreConfig
from messagestore.format.gathered import Gathered
from messagestore.format.record_columns import Rows
from messagestore.write.staging import StagedFile
from messagestore.write.transaction import BatchRequest, BatchResult

Queue = tuple[str, int]
"""A topic and a queue id."""
Queues = dict[Queue, int]
"""A queue offset for each queue."""

GATHERED_ROWS = 65_536
GATHERED_SIZE = 16 * 1024 * 1024
"""At most this many messages, and this many bytes of records, come together (but at least one message)."""


# ---- values


@dataclass(frozen=True, slots=True)
class Description:
    """Which store is at a path.

    Parameters
    ----------
    store_id : str
        The store's id; empty if this project never wrote the store, or if there is no store.
    ancestors : frozenset of str
        The ids of the stores that this one is a copy of.
    exists : bool
        Whether there is a store, of this project or of a broker.
    queue_counts : dict of str to int
        The number of queues that producers write, for each topic that has settings in the store.
    multi_tag_topics : frozenset of str
        The topics whose messages have the flag MULTI_TAGS.
    queue_ids : dict of str to list of int
        The existing queues, by topic; empty unless the caller asked for them.
    config : StoreConfig
        The settings with which records are encoded.
    """

    store_id: str = ""
    ancestors: frozenset[str] = frozenset()
    exists: bool = True
    queue_counts: dict[str, int] = field(default_factory=dict)
    multi_tag_topics: frozenset[str] = frozenset()
    queue_ids: dict[str, list[int]] = field(default_factory=dict)
    config: StoreConfig = field(default_factory=StoreConfig)


@dataclass(frozen=True, slots=True)
class Ends:
    """How far the queues of some topics reach at one moment.

    Parameters
    ----------
    store_id : str
    queues : dict of (str, int) to int
        The number of the first message of each queue that is not visible yet. It is the same object until one of them
        changes.
    restarted : frozenset of (str, int)
        Queues that this call found to begin again below the end that was known: they were deleted and created again.
        Each restart is reported once.
    recovered : bool
        False: the store was written before the machine was started, and no writer has recovered it since. A message
        that was visible before may be missing, and may come back.
    generation : int
        A number that changes if other files, or another folder, are at the path than at the call before. Everything
        that was proven about the store must then be proven again.
    """

    store_id: str
    queues: Queues
    restarted: frozenset[Queue] = frozenset()
    recovered: bool = True
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Range:
    """The messages `start..end` of one queue."""

    topic: str
    queue_id: int
    start: int
    end: int

    @property
    def count(self) -> int:
        """The number of messages."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies in the log.

    Parameters
    ----------
    physical_offset : int
    size : int
        The size of the record. 0: the queue has only a placeholder there, which a broker made for a message that was
        deleted or never existed.
    """

    physical_offset: int
    size: int

    @property
    def end(self) -> int:
        """The physical offset after the record."""
        return self.physical_offset + self.size


@dataclass(frozen=True, slots=True)
class LastRecord:
    """The last record that a stream has covered, by which the stream recognises the log.

    Parameters
    ----------
    position, size : int
        The place of the record in the log.
    crc : int
        The CRC-32 of its bytes. In a result of `prove_last`, -1 means that the log does not reach that far.
    store_timestamp_ms : int | None
        The store time, which shows what is newer in a log that was restored or created again. None in offsets of
        earlier releases, if no record begins at the place, and if the caller did not ask for it.
    """

    position: int
    size: int
    crc: int
    store_timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Proven:
    """What is proven to be on the disk of a store that no writer has recovered since the machine was started.

    The driver finds it once, and tasks use it when they read. Only the store that made it uses its contents.

    Parameters
    ----------
    start, end : int
        Physical offsets.
    units : dict of (str, int) to (int, bytes)
        For each queue, the number of the first message that has a unit here, and the bytes of the units.
    """

    start: int
    end: int
    units: dict[Queue, tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch that is in the store.

    Parameters
    ----------
    store_id : str
        The id of the store that it is in; the commit of a first batch may have created that store.
    result : BatchResult
    """

    store_id: str
    result: BatchResult


# ---- reading


class StoreReader(Protocol):
    """One store, opened for reading. It belongs to the folder that was at the path when it was opened.

    Any method may raise `NotAStoreError` or `StoreWentBackwardsError` if that folder is no longer there. Only `ends`
    opens another folder with the same store, and shows this by `Ends.generation`.

    Threads: one thread at a time.
    """

    def describe(self, *, queues: bool = False) -> Description:
        """Which store this is; with `queues` also which queues exist, which requires a look at all folders."""
        ...

    def broker_name(self) -> str:
        """The name of the broker whose store this is; empty if the store does not know it.

        Raises
        ------
        CorruptionError
            The file that holds the name cannot be read.
        """
        ...

    def ends(self, topics: Sequence[str], pattern: str | None = None) -> Ends:
        """How far the queues of some topics reach. The call takes microseconds if nothing has changed.

        Parameters
        ----------
        topics : sequence of str
        pattern : str | None
            A regular expression: also the topics whose whole name matches it, except retry, dead letter and system
            topics.

        Raises
        ------
        NotAStoreError
            The store is missing.
        StoreWentBackwardsError
            Another store is at the path.
        NotRecoveredError
            With `fail_on_unproven`: the log has records that only a recovery can show.
        """
        ...

    def await_change(self, timeout_s: float) -> None:
        """Wait until the store may have changed, for at most `timeout_s` seconds and perhaps for less.

        A change after one call ends the next one, so a caller that looks at the store between two calls misses nothing.
        """
        ...

    def begins(self, queues: Iterable[Queue]) -> Queues:
        """The number of each queue's first message whose record is in the log (the queue's end if there is none)."""
        ...

    def places(self, offsets: Mapping[Queue, int]) -> dict[Queue, Place]:
        """Where the message before each offset lies. A queue that has no message there is left out."""
        ...

    def seek(self, queue: Queue, *, physical_offset: int | None = None, after_ms: int | None = None) -> int:
        """The number of the first message of a queue that lies at a physical offset or above, or was stored after a
        time, whichever comes first; the queue's end if there is none.
        """
        ...

    def prove_last(self, position: int, size: int, *, with_time: bool = False) -> LastRecord | None:
        """The bytes that are now at a place in the log where the caller expects a record, as a `LastRecord`.

        None: the place is below the first segment. The result has a store time only if `with_time` is set.
        """
        ...

    def mean_sizes(self, ranges: Sequence[Range]) -> list[float]:
        """The approximate size of a record of each range, from some of its units. No record is read."""
        ...

    def sizes(self, each: Range) -> NDArray[np.int32]:
        """The size of each record of a range, from its units: int32[n], 0 for a placeholder. No record is read.

        `end` of the range is at most the queue's end. The result is shorter than the range if units are missing; a
        later `gather` says why.
        """
        ...

    def find(self, topic: str, keys: Sequence[str]) -> dict[Queue, list[int]]:
        """The numbers of all visible messages of a topic with one of some keys, or with one as unique key.

        The index finds them, and each record is compared. What the index does not cover is searched.
        """
        ...

    def proven(self, ranges: Iterable[Range]) -> Proven | None:
        """What a task needs in order to read these ranges as they were planned; None if it needs nothing."""
        ...

    def gather(
        self,
        ranges: Sequence[Range],
        *,
        max_rows: int = GATHERED_ROWS,
        max_size: int = GATHERED_SIZE,
        tags_codes: frozenset[int] | None = None,
    ) -> Iterator[Gathered]:
        """The messages of some ranges, in order, each message once. `end` of a range is at most the queue's end.

        Parameters
        ----------
        tags_codes : frozenset of int | None
            Only messages whose units have these tags codes. Messages with other tags may be among them: tags with the
            same hash, and messages whose unit has no hash.

        Raises
        ------
        OffsetOutOfRangeError
            Retention has deleted the next message, at `queue_offset`; `min` is the first one that is left. All messages
            before it were returned.
        StoreWentBackwardsError
            A message that was visible is missing: the queue was deleted, or the store was restored.
        CorruptionError
            A unit cannot belong to a record, or a file is missing.
        """
        ...

    def publish_progress(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Write how far a query has read, as the offsets of a RocketMQ consumer group. Nothing depends on it.

        Raises
        ------
        StoreLockedError
            A broker holds the store, and keeps all consumer offsets itself.
        CorruptionError, ConfigError, OSError
            The file cannot be read or written, or the group is not allowed; the file is unchanged.
        """
        ...

    def view(self, name: str) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows that say what the store contains, and what could not be read, in words.

        Parameters
        ----------
        name : str
            "topics", "queues", "segments", "groups", or "batches" (the journal). Values are text, numbers, lists and
            dicts; times are in milliseconds.
        """
        ...

    def published_progress(self, group: str) -> Queues:
        """How far a consumer group has read, in the queues in which it has read at all.

        Raises
        ------
        CorruptionError
            The file cannot be read.
        """
        ...

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        ...


# ---- writing


class Staging(Protocol):
    """One staged file while a task writes it. A file that is not finished is deleted when the block ends."""

    def write(self, chunk: Rows) -> None:
        """Append encoded records."""
        ...

    def finish(self) -> StagedFile:
        """Complete the file; returns what the commit needs to find and to recognise it."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StoreWriter(Protocol):
    """Writes to the store at a path. It holds nothing between two calls, and any process may create one.

    `store_id` in its methods is the id that `prepare` returned, which is empty if there was no store. If another store,
    or none, is at the path later, `NotAStoreError` is raised and nothing is created.
    """

    def describe(self) -> Description:
        """What is at the path now. Nothing is created."""
        ...

    def prepare(self) -> Description:
        """What is at the path, before a batch is written; the batch's rows must be encoded with its configuration.

        The queue counts are left out: each task reads the current ones. A store that only a broker has written gets
        its id. If there is no store, nothing is created. Files that dead writers left are deleted.

        Raises
        ------
        StoreLockedError
            A broker holds the store.
        NotAStoreError
            The path holds something else, or a store in a form that cannot be written.
        ConfigError
            A setting of the store's broker forbids writing.
        """
        ...

    def digests_of(self, app_id: str | None, version: int) -> Collection[str]:
        """The names of the digests with which the rows of a batch must be encoded; tasks call this.

        The store recognises a batch that comes again by the digest with which it holds the batch. Earlier releases
        computed another one than this release does.

        Raises
        ------
        NotAStoreError
            A newer release wrote the store.
        """
        ...

    def stage(self, write: Write, store_id: str) -> Staging:
        """A new staged file for a write; tasks call this."""
        ...

    def commit(
        self, files: Sequence[StagedFile], request: BatchRequest, store_id: str, *, closing: bool = False
    ) -> Committed:
        """Append the rows of staged files as one batch, in their order; the log contains all of it once afterwards.

        The files of the batch, and those that failed attempts left, are deleted. A batch that is already in the log is
        recognised by its app id and version. So a caller that never got an answer stages the rows again and commits
        them again.

        Parameters
        ----------
        closing : bool
            The caller's process may end without notice: leave the store in the state of a closed store.

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
        """Delete staged files of a batch that was given up, by their names, while no commit can read them.

        What is in the log stays there.

        Raises
        ------
        StoreLockedError
            A commit is running. The files are left for the next `prepare`.
        """
        ...


class Stores(Protocol):
    """Opens stores by their path. It is pickled into Spark's tasks, so it holds plain values only."""

    def reader(self, path: str, config: StoreConfig | None = None, proven: Proven | None = None) -> StoreReader:
        """Open a store for reading.

        Parameters
        ----------
        proven : Proven | None
            What the driver's reader returned for the ranges that are read.

        Raises
        ------
        NotAStoreError
            There is no store, or its queues cannot be read.
        """
        ...

    def writer(
        self,
        path: str,
        config: StoreConfig,
        *,
        staging_ttl_s: float,
        staging_dir: str | None = None,
        ends_abruptly: bool = False,
    ) -> StoreWriter:
        """A writer for the store at a path; nothing is opened yet.

        Parameters
        ----------
        staging_dir : str | None
            An existing folder for the staged files, which tasks and driver see; None: a folder in the store.
        staging_ttl_s : float
            A staged file that nobody has written to for this many seconds is deleted.
        ends_abruptly : bool
            True: this process does not end as a Python program does (a worker of Spark), so it releases the store
            before it ends.
        """
        ...
