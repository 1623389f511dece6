"""The interface between the connector and a store: the methods of a store, and the values that they exchange.

Every value consists of whole numbers, text, bytes and buffers, so that it can be sent to another host. No value holds
an open file. `messagestore.spi.local` opens a store on this host, `remote` one behind a server on another host, and
`rocketmq` that of a running broker. Each implements `Stores`, `StoreReader` and `StoreWriter`, or the part it can.

    describe                     says which store this is, and what tasks must know about it
    ends                         says how far its queues reach
    gather                       returns the bytes of the records of some ranges; the caller decodes them
    stage, commit, abort         write rows to a staged file; append staged files to the log; delete staged files

The other methods of a reader answer the source's questions about single messages: `begins`, `places`, `seek`,
`prove_last`, `mean_sizes`, `sizes`, `proven`. Each takes many queues or ranges, since a call to another host takes as
long for ten thousand as for one. `publish_progress` shows others how far a query has read, and `published_progress`
reads what a consumer group has published. `view`, `offsets`, `lag` and `group_lag` are for people and monitoring
systems: they look through a whole store, in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from messagestore.batches.append import BatchRequest, BatchResult, PlannedWrite
from messagestore.batches.staging import StagedFile
from messagestore.files.staging_files import Write
from messagestore.format.config import StoreConfig
from messagestore.format.gathered import Gathered
from messagestore.format.record_columns import Rows
from messagestore.spi.location import Location

Queue = tuple[str, int]
"""A topic and a queue id."""
Queues = dict[Queue, int]
"""A queue offset for each queue."""
Report = tuple[list[dict[str, Any]], list[str]]
"""Rows that say what a store contains, and what could not be read, in words."""

GATHERED_ROWS = 65_536
GATHERED_SIZE = 16 * 1024 * 1024
"""At most this many messages, and this many bytes of records, come together (but at least one message)."""
MOST_NAMED = 65_536
"""How many queues, ranges, topics or keys a request to another host names at most. More are asked for in parts."""


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
        The number of queues that producers write, for each topic that was asked about and has settings in the store.
    multi_tag_topics : frozenset of str
        The topics, of these, whose messages have the flag MULTI_TAGS.
    queue_ids : dict of str to list of int
        The existing queues, by topic; empty unless the caller asked for them.
    config : StoreConfig
        The settings with which records are encoded.
    log_end : int
        For `PlannedWrite`: a physical offset behind which everything lies that is appended from now on. Only `prepare`
        looks for it; 0 otherwise.
    """

    store_id: str = ""
    ancestors: frozenset[str] = frozenset()
    exists: bool = True
    queue_counts: dict[str, int] = field(default_factory=dict)
    multi_tag_topics: frozenset[str] = frozenset()
    queue_ids: dict[str, list[int]] = field(default_factory=dict)
    config: StoreConfig = field(default_factory=StoreConfig)
    log_end: int = 0


@dataclass(frozen=True, slots=True)
class Ends:
    """How far the queues of some topics reach at one moment.

    Parameters
    ----------
    store_id : str
    queues : dict of (str, int) to int
        The number of the first message of each queue that is not visible yet. It is the caller's own object, from the
        answer that he passed, until one of them changes.
    topic_names : frozenset of str | None
        The names of all topics that have queues, except retry, dead letter and system topics; the caller's own
        object, as `queues`. None: he did not ask for them.
    restarts : dict of (str, int) to int
        How often each queue was found to begin again below the end that was known: it was deleted and created again.
        Queues to which this never happened are left out.
    shrinks : dict of (str, int) to int
        How often each queue was found to be shorter than before, or gone; as `restarts`.
    recovered : bool
        False: the store was written before the machine was started, or by a writer that was killed, and no writer has
        recovered it since. A message that was visible before may be missing, and may come back.
    instance : str
        Who has followed these queues without interruption. It changes if other files, or another folder, are at the
        path than at the call before, or if the store was opened again. Everything that was proven about the store must
        then be proven again, and `restarts` and `shrinks` begin at 0.
    serial : int
        The number of this answer: the same `instance` and `serial` mean that nothing has changed.
    """

    store_id: str
    queues: Queues
    topic_names: frozenset[str] | None = None
    restarts: Queues = field(default_factory=dict)
    shrinks: Queues = field(default_factory=dict)
    recovered: bool = True
    instance: str = ""
    serial: int = 0

    @property
    def token(self) -> str:
        """What a caller on another host sends with its next call, in order to be told that nothing has changed."""
        return f"{self.instance}.{self.serial}"

    def restarted_since(self, before: Ends) -> set[Queue]:
        """The queues that began again after another answer; nothing is known about one of another instance."""
        return _counted_since(self.restarts, before.restarts) if self.instance == before.instance else set()

    def shrunk_since(self, before: Ends) -> set[Queue]:
        """The queues that became shorter, or went, after another answer, also if they have grown again."""
        return _counted_since(self.shrinks, before.shrinks) if self.instance == before.instance else set()


def _counted_since(now: Queues, before: Queues) -> set[Queue]:
    return set() if now is before else {queue for queue, count in now.items() if count != before.get(queue, 0)}


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

    def ends_behind(self, physical_offset: int) -> bool:
        """Whether there is a record that ends after a physical offset."""
        return self.size > 0 and self.end > physical_offset


NOT_REACHED = -1
"""Takes the place of a CRC-32 where the log does not reach as far as the record."""


@dataclass(frozen=True, slots=True)
class LastRecord:
    """The last record that a stream has covered, by which the stream recognises the log.

    Parameters
    ----------
    position, size : int
        The place of the record in the log.
    crc : int
        The CRC-32 of its bytes. In a result of `prove_last`, `NOT_REACHED` means that the log does not reach that far.
    store_timestamp_ms : int | None
        The store time, which shows what is newer in a log that was restored or created again. None if no record
        begins at the place, and if the caller did not ask for it.
    """

    position: int
    size: int
    crc: int
    store_timestamp_ms: int | None = None

    def is_there(self, record: LastRecord | None) -> bool:
        """Whether `prove_last` has found this record at its place, or retention has deleted its segment."""
        return record is None or record.crc == self.crc


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """In which log ranges were planned. `gather` compares it before and after a read.

    Parameters
    ----------
    store_id : str
        The store; empty if it has no id.
    physical_offset : int
        No record of the ranges ends after this offset. 0: the offset is not known.
    last : LastRecord | None
        The last record that was planned; by it, the log is recognised.
    """

    store_id: str
    physical_offset: int = 0
    last: LastRecord | None = None


@dataclass(frozen=True, slots=True)
class Proven:
    """What is proven to be in a store that no writer has recovered since the machine was started, or a writer killed.

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
    opens another folder with the same store, and shows this by `Ends.instance`.

    No call depends on who called before, so several callers may share a reader. Threads: one thread at a time.
    """

    def describe(self, topics: Iterable[str] | None = None, *, queues: bool = False) -> Description:
        """Which store this is, and what is known of some topics (None: of all).

        With `queues` also which queues exist. For all topics, this requires a look at all folders.
        """
        ...

    def broker_name(self) -> str:
        """The name of the broker whose store this is; empty if the store does not know it.

        Raises
        ------
        CorruptionError
            The file that holds the name cannot be read.
        """
        ...

    def ends(self, topics: Sequence[str], since: Ends | None = None, *, names: bool = False) -> Ends:
        """How far the queues of some topics reach. The call takes microseconds if nothing has changed.

        Parameters
        ----------
        topics : sequence of str
        since : Ends | None
            The caller's last answer for these topics. If nothing has changed since, the result is this very object.
        names : bool
            Also say which topics there are. Whoever follows the topics that match a pattern compares their names
            himself, and asks for those that match.

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

    def seek(self, times_ms: Mapping[Queue, int | None], *, physical_offset: int | None = None) -> Queues:
        """The number of the first message of each queue that lies at a physical offset or above, or was stored after
        the queue's time (None: at no time), whichever comes first; the queue's end if there is none.
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

    def sizes(self, ranges: Sequence[Range]) -> list[NDArray[np.int32]]:
        """The size of each record of some ranges, from their units: int32[n], 0 for a placeholder. No record is read.

        `end` of a range is at most the queue's end. A result is shorter than its range if units are missing; a later
        `gather` says why. Four bytes a message: ask for parts of long ranges.
        """
        ...

    def find(self, topics: Sequence[str], keys: Sequence[str]) -> dict[Queue, list[int]]:
        """The numbers of all visible messages of some topics with one of some keys, or with one as unique key.

        The index finds them, and each record is compared. What the index does not cover is searched.
        """
        ...

    def proven(self, parts: Sequence[Sequence[Range]]) -> list[Proven | None]:
        """What each of several tasks needs in order to read its ranges as they were planned; None: it needs nothing."""
        ...

    def gather(
        self,
        ranges: Sequence[Range],
        *,
        planned: PlannedRead | None = None,
        max_rows: int = GATHERED_ROWS,
        max_size: int = GATHERED_SIZE,
        tags_codes: frozenset[int] | None = None,
    ) -> Iterator[Gathered]:
        """The messages of some ranges, in order, each message once. `end` of a range is at most the queue's end.

        Parameters
        ----------
        planned : PlannedRead | None
            Where the ranges were planned. It is compared with the log before the first message is read, and again when
            all were returned, or those before one that retention has deleted.
        tags_codes : frozenset of int | None
            Only messages whose units have these tags codes. Messages with other tags may be among them: tags with the
            same hash, and messages whose unit has no hash.

        Raises
        ------
        OffsetOutOfRangeError
            Retention has deleted the next message, at `queue_offset`; `min` is the first one that is left. All messages
            before it were returned.
        NotAStoreError
            The ranges were planned in another store.
        StoreWentBackwardsError
            A message that was visible is missing, or log or queues are not those that were planned: the queue was
            deleted, or the store was restored.
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

    def view(self, name: str) -> Report:
        """Rows that say what the store contains, and what could not be read, in words.

        Parameters
        ----------
        name : str
            "topics", "queues", "segments", "groups", "batches" (the journal), or "apps" (the next version of each app).
            "status" and "figures" have one row: who holds the store, how it was left and what it contains; and what a
            monitoring system asks for. Values are text, numbers, lists and dicts; times are in milliseconds.

        Raises
        ------
        ConfigError
            There is no view of this name.
        """
        ...

    def offsets(self, topics: Sequence[str] = (), at_ms: int | None = None) -> Report:
        """How far the queues of some topics reach, one row for each queue, and what could not be read, in words.

        Parameters
        ----------
        topics : sequence of str
            Without one: all topics but the store's own.
        at_ms : int | None
            Each row also has the number and the time of the first message that was stored at this time or later.

        Raises
        ------
        UnknownTopicError
            The store has no such topic.
        """
        ...

    def lag(self, offsets: Mapping[Queue, int], topics: Iterable[str] = ()) -> Report:
        """How far a reader is behind the end of each queue, in messages, in bytes and since when; and what is wrong
        with the store or with the reader's place, in words.

        Parameters
        ----------
        offsets : mapping of (str, int) to int
            The number of the first message of each queue that was not read.
        topics : iterable of str
            More topics, whose queues the reader reads from their beginning.
        """
        ...

    def group_lag(self, group: str) -> Report:
        """How far a consumer group is behind, as `lag`; no row if the group has no offset in the store."""
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

    def describe(self, topics: Iterable[str] | None = None) -> Description:
        """What is at the path now, and what is known of some topics (None: of all). Nothing is created.

        A task asks this once before it stages: it encodes its rows with what the result says.
        """
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

    def stage(self, write: Write, store_id: str) -> Staging:
        """A new staged file for a write; tasks call this."""
        ...

    def commit(
        self,
        files: Sequence[StagedFile],
        request: BatchRequest,
        store_id: str,
        *,
        planned: PlannedWrite | None = None,
        closing: bool = False,
        dead_letter_topic: str = "",
    ) -> Committed:
        """Append the rows of staged files as one batch, in their order; the log contains all of it once afterwards.

        The files of the batch, and those that failed attempts left, are deleted. A batch that is already in the log is
        recognised by its app id and version, or by `planned`, and by what `files` say about its rows: no file is
        opened. So a caller that never got an answer commits the same files again, which may be gone by then, or stages
        the rows again and commits these.

        Parameters
        ----------
        planned : PlannedWrite | None
            By what a batch without an app id is recognised: a random id, and `log_end` of what `prepare` returned
            before. None: a batch without an app id that is committed again is appended again.
        closing : bool
            The caller's process may end without notice: leave the store in the state of a closed store.
        dead_letter_topic : str
            The topic of those rows of the batch that are dead letters, which is kept for monitoring. Empty: none is.

        Raises
        ------
        BatchConflictError, QueryConflictError, VersionRegressionError, LostBatchesError, MessageIllegalError
            The batch is refused; nothing of it was written.
        ChecksumError, CorruptionError
            A staged file is missing, or is not what its task wrote; nothing of the batch was written.
        ConfigError
            A name is not that of a staged file; nothing of the batch was written.
        StoreWentBackwardsError
            The log ends before the place where the write was planned.
        StoreLockedError, StoreFullError, StorePoisonedError
        """
        ...

    def abort(self, names: Sequence[str], store_id: str) -> None:
        """Delete staged files of a batch that was given up, by their names, while no commit can read them.

        What is in the log stays there. Files of the same writes that failed attempts left are deleted, too.

        Raises
        ------
        ConfigError
            A name is not that of a staged file; nothing was deleted.
        StoreLockedError
            A commit is running. The files are left for the next `prepare`.
        """
        ...


class Stores(Protocol):
    """Opens stores by their location. It is pickled into Spark's tasks, so it holds plain values only."""

    def reader(
        self,
        location: Location,
        config: StoreConfig | None = None,
        proven: Proven | None = None,
        *,
        to_gather: bool = False,
    ) -> StoreReader:
        """Open a store for reading.

        Parameters
        ----------
        proven : Proven | None
            What the driver's reader returned for the ranges that are read.
        to_gather : bool
            The caller only gathers, with a `PlannedRead` that names the store: a store on another host is not asked
            which one it is, and that there is none is told by `gather`.

        Raises
        ------
        NotAStoreError
            There is no store, or its queues cannot be read.
        """
        ...

    def writer(
        self,
        location: Location,
        config: StoreConfig,
        *,
        staging_ttl_s: float,
        staging_dir: str | None = None,
        ends_abruptly: bool = False,
    ) -> StoreWriter:
        """A writer for the store at a location; nothing is opened yet.

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
