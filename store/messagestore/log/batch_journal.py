"""The journal: records which batches the store already holds.

`spark/journal` is a cache of the BATCH records in the log. An entry counts only if its BATCH record can be read back
from its place, or if that place lies below the first segment. The file is written whenever the clean end moves; later
batches are read from the queue of the BATCH topic.

    | header | entries, 56 bytes each, in the order of the log | names as JSON: apps, queries, topics, identity |

A checksum covers every byte. A journal that is missing or damaged does not count as empty: recovery rebuilds it from
the log. The entries are one array, so reading and writing ten thousand of them takes less than a millisecond;
`journalRetention` limits their number. Readers of the store read only the header.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from messagestore.errors import CorruptionError, NotAStoreError
from messagestore.files.disk import Disk, replace_file
from messagestore.format.batch_record import DELIVERY_APP, SOURCE_NONE, SOURCE_SPARK, SOURCE_USER, BatchRecord
from messagestore.format.layout import (
    JOURNAL_CHECKPOINT_KNOWN,
    JOURNAL_ENTRY,
    JOURNAL_FORMAT,
    JOURNAL_HEADER,
    JOURNAL_INCOMPLETE,
    JOURNAL_MAGIC,
    JOURNAL_START,
    JOURNAL_USER_VERSION,
)
from messagestore.format.record import crc32
from messagestore.signal_handlers import pass_on

PARTIAL = -1
"""Row count of a batch of which a power cut, and then a broker, left only a part."""
DEFAULT_RETENTION = 10_000
MAX_SIZE = 256 * 1024 * 1024
"""The file is read up to this many bytes."""
MISSING = "missing"
"""The fault reported when the journal has no file."""
KEPT_REPLACED = 1_000
"""How many replaced query ids are remembered for each app."""
KEPT_DELIVERIES = 10
"""How many deliveries of delayed messages are remembered at least."""
_ROW = np.dtype([(f.name, f.type) for f in JOURNAL_ENTRY.fields])
_HEADER = JOURNAL_HEADER.struct
_CRC_POSITION = JOURNAL_HEADER.offset("crc")
_NONE = -1
_FEW = 64
_SLACK = 10
"""The oldest are dropped once there are a tenth more than `journalRetention`, so that not every commit does it."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One batch of an app.

    Parameters
    ----------
    version, version_source, query_id : int, str, str | None
        As in the BATCH record.
    physical_offset, end : int
        Where the BATCH record begins, and where the batch ends.
    row_count : int
        -1: only a part of the batch is in the log.
    digest : int
    topics : tuple of str
        Destination topics, sorted.
    start : bool
        The entry is not a batch but a mark: the app's history begins with the version after this one.
    """

    version: int
    version_source: str
    query_id: str | None
    physical_offset: int
    end: int
    row_count: int
    digest: int
    topics: tuple[str, ...] = ()
    start: bool = False


class _Numbers(dict[Any, int]):
    """Maps values of one kind to numbers; `values_by_number` maps the numbers back."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        super().__init__()
        self.by_number: list[Any] = []
        for value in values:
            self.number(value)

    def number(self, value: Any) -> int:
        """Return the number of a value; a new value gets a new number."""
        number = self.get(value)
        if number is None:
            number = len(self.by_number)
            self.by_number.append(value)  # first: an interrupt in between leaves a number unused, and none used twice
            self[value] = number
        return number


@dataclass
class BatchJournal:
    """The batches of each app.

    Parameters
    ----------
    covered : int
        Queue offset in the BATCH topic below which all batches are included.
    checkpoint_crc : int | None
        CRC-32 of the store checkpoint's fields as they were when the journal was written. If the checkpoint now has
        another one, a broker has written since. None: unknown.
    complete : bool
        False: the journal was rebuilt from a log that does not begin at 0, so batches and whole apps may be missing.
    end : int
        Physical offset below which the log's batches were included when the journal was written.
    identity : dict
        The fields of `spark/store.json`: either file can be rebuilt from the other.
    queues : dict of str to list of (int, int)
        Topic -> ranges (first, last) of queue ids that had units at the last clean end. None: unknown.
    fault : str
        Why the file could not be used; empty if it could.
    """

    covered: int = 0
    checkpoint_crc: int | None = None
    complete: bool = True
    end: int = 0
    identity: dict[str, Any] = field(default_factory=dict)
    queues: dict[str, list[tuple[int, int]]] | None = None
    fault: str = ""
    dropped: list[tuple[str, int]] = field(default_factory=list)
    """(app id, version) of entries whose BATCH record is no longer in the log; for the report."""

    def __post_init__(self) -> None:
        self._rows: NDArray[np.void] = np.empty(64, _ROW)
        self._count = 0
        self._tidied = 0  # rows that are in order and each belong to another app and version
        self._kept = 0  # rows that the last trim kept besides the newest ones
        self._apps, self._queries, self._topics = _Numbers(), _Numbers(), _Numbers()
        self._replaced: dict[str, dict[str, None]] = {}

    # ---- contents

    def __len__(self) -> int:
        return self._count

    def find(self, app_id: str, version: int) -> JournalEntry | None:
        """Return the entry of a version, or None."""
        rows = self._rows_of(app_id)
        of_version = rows[self._rows["version"][rows] == version]
        return self._entry(int(of_version[-1])) if len(of_version) else None

    def last(self, app_id: str) -> JournalEntry | None:
        """Return the entry with the highest version of an app, or None."""
        rows = self._rows_of(app_id)
        if not len(rows):
            return None
        versions = self._rows["version"][rows]
        return self._entry(int(rows[np.flatnonzero(versions == versions.max())[-1]]))

    def entries(self, app_id: str) -> list[JournalEntry]:
        """Return all entries of an app, in the order of the log."""
        self._tidy()
        return [self._entry(row) for row in self._rows_of(app_id).tolist()]

    def app_ids(self) -> list[str]:
        """Return the apps that have an entry, sorted."""
        return sorted(self._apps.by_number[app] for app in np.unique(self._rows["app"][: self._count]).tolist())

    def query_ids(self, app_id: str) -> list[str]:
        """Return the queries to which an app's entries belong, each once, the newest last."""
        numbers = self._rows["query"][self._rows_of(app_id)]
        newest_first = dict.fromkeys(numbers[numbers != _NONE][::-1].tolist())
        return [self._queries.by_number[number] for number in reversed(newest_first)]

    def replaced(self, app_id: str) -> frozenset[str]:
        """Return the query ids of an app that are refused permanently because another query has taken the app over."""
        return frozenset(self._replaced.get(app_id, ()))

    def newest_first(self, above: int = 0) -> Iterator[tuple[str, JournalEntry]]:
        """Yield (app id, entry) for all entries at or above a physical offset, the newest first."""
        self._tidy()
        first = int(np.searchsorted(self._rows["physical_offset"][: self._count], above))
        for row in reversed(range(first, self._count)):
            yield self._apps.by_number[int(self._rows["app"][row])], self._entry(row)

    def _rows_of(self, app_id: str) -> NDArray[np.int64]:
        app = self._apps.get(app_id)
        if app is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._rows["app"][: self._count] == app)

    def _entry(self, row: int) -> JournalEntry:
        fields = dict(zip(_ROW.names or (), self._rows[row].item(), strict=True))
        user, start = fields["flags"] & JOURNAL_USER_VERSION, fields["flags"] & JOURNAL_START
        return JournalEntry(
            version=fields["version"],
            version_source=SOURCE_USER if user else SOURCE_SPARK,
            query_id=None if fields["query"] == _NONE else self._queries.by_number[fields["query"]],
            physical_offset=fields["physical_offset"],
            end=fields["end"],
            row_count=fields["row_count"],
            digest=fields["digest"],
            topics=self._topics.by_number[fields["topics"]],
            start=bool(start),
        )

    # ---- changes

    def add(self, batch: BatchRecord) -> None:
        """Add a batch that is in the log."""
        if batch.version_source != SOURCE_NONE:
            entry = JournalEntry(
                version=batch.version,
                version_source=batch.version_source,
                query_id=batch.query_id,
                physical_offset=batch.physical_offset,
                end=batch.end,
                row_count=PARTIAL if batch.torn else batch.row_count,
                digest=batch.digest,
                topics=tuple(sorted(batch.ranges)),
                start=batch.start,
            )
            if batch.replaces:  # another query counts its versions from 0 again
                self._keep(np.flatnonzero(self._rows["app"][: self._count] != self._apps.get(batch.app_id, _NONE)))
                self._refuse(batch.app_id, batch.replaces)
            if batch.refused:
                self._refuse(batch.app_id, batch.refused)
            self.remember(batch.app_id, entry)
        # This comes last, because batches below `covered` are not read again.
        self.covered = max(self.covered, batch.queue_offset + 1)

    def _refuse(self, app_id: str, query_ids: Iterable[str]) -> None:
        """Remember the newest of the query ids that are refused permanently."""
        refused = self._replaced.setdefault(app_id, {})
        for query_id in query_ids:
            refused.pop(query_id, None)
            refused[query_id] = None
        for query_id in list(refused)[:-KEPT_REPLACED]:
            del refused[query_id]

    def remember(self, app_id: str, entry: JournalEntry) -> None:
        """Add an entry; an older entry of the same version no longer counts."""
        if self._count == len(self._rows):
            self._tidy()
            rows = np.empty(max(64, 2 * self._count), _ROW)
            rows[: self._count] = self._rows[: self._count]
            self._rows = rows

        user = JOURNAL_USER_VERSION if entry.version_source == SOURCE_USER else 0
        self._rows[self._count] = (
            entry.version,
            entry.physical_offset,
            entry.end,
            entry.row_count,
            entry.digest,
            self._apps.number(app_id),
            _NONE if entry.query_id is None else self._queries.number(entry.query_id),
            self._topics.number(entry.topics),
            user | (JOURNAL_START if entry.start else 0),
        )
        self._count += 1

    def extend(self, batches: Iterable[BatchRecord]) -> None:
        """Add batches in the order of the log."""
        for batch in batches:
            self.add(batch)

    def drop(self, app_id: str, version: int) -> None:
        """Forget an entry whose batch is not in the log."""
        rows = self._rows_of(app_id)
        gone = rows[self._rows["version"][rows] == version]
        if not len(gone):
            raise KeyError((app_id, version))
        self._keep(np.delete(np.arange(self._count), gone))
        self.dropped.append((app_id, version))

    def check(self, is_there: Callable[[str, JournalEntry], bool], *, above: int = 0) -> None:
        """Drop the entries whose BATCH record is missing.

        The log loses records only at its end. Therefore the newest entry is checked first, and the first entry whose
        record is there ends the search. A caller that relies on one entry checks that entry itself.
        """
        missing = itertools.takewhile(lambda app_and_entry: not is_there(*app_and_entry), self.newest_first(above))
        for app_id, entry in list(missing):
            self.drop(app_id, entry.version)

    def mark_partial(self, is_partial: Callable[[JournalEntry], bool], *, above: int = 0) -> list[tuple[str, int]]:
        """Remember batches of which only a part is in the log; return (app id, version) of the new ones."""
        self._tidy()
        marked = []
        first = int(np.searchsorted(self._rows["physical_offset"][: self._count], above))
        for row in range(first, self._count):
            entry = self._entry(row)
            if entry.row_count >= 0 and is_partial(entry):
                self._rows["row_count"][row] = PARTIAL
                marked.append((self._apps.by_number[int(self._rows["app"][row])], entry.version))
        return marked

    def carry(self, older: BatchJournal, below: int) -> None:
        """Take over what another journal knows about batches below a physical offset, whose records were deleted."""
        for app_id, entry in reversed(list(older.newest_first())):
            if entry.physical_offset < below:
                self.remember(app_id, entry)
        for app_id, query_ids in older._replaced.items():
            self._refuse(app_id, query_ids)

    def note_queues(self, queues: Iterable[tuple[str, int]]) -> None:
        """Remember queues that have units."""
        ranges_by_topic = self.queues if self.queues is not None else {}
        for topic, queue_id in sorted(queues):
            ranges = ranges_by_topic.setdefault(topic, [])
            if any(first <= queue_id <= last for first, last in ranges):
                continue
            if ranges and ranges[-1][1] == queue_id - 1:
                ranges[-1] = (ranges[-1][0], queue_id)
            else:
                ranges.append((queue_id, queue_id))
        self.queues = ranges_by_topic

    def queue_names(self) -> Iterator[tuple[str, int]]:
        """Yield the queues that had units at the last clean end."""
        for topic, ranges in (self.queues or {}).items():
            for first, last in ranges:
                yield from ((topic, queue_id) for queue_id in range(first, last + 1))

    def had_queue(self, topic: str, queue_id: int) -> bool:
        """Whether a queue had units at the last clean end."""
        return any(first <= queue_id <= last for first, last in (self.queues or {}).get(topic, ()))

    def trim(self, retention: int) -> None:
        """Keep the last `retention` batches and the last version of each app; keep everything if there are few more."""
        self._tidy()
        own = self._rows_of(DELIVERY_APP)
        if len(own) > 2 * KEPT_DELIVERIES:  # they come several times a second, and only the last one counts
            self._keep(np.setdiff1d(np.arange(self._count), own[:-KEPT_DELIVERIES]))

        if self._count - self._kept <= retention + retention // _SLACK:
            return

        rows = self._rows[: self._count]
        order = np.lexsort((rows["version"], rows["app"]))
        apps = rows["app"][order]
        last_of_app = order[np.append(apps[1:] != apps[:-1], True)]

        keep = np.zeros(self._count, np.bool_)
        keep[self._count - retention :] = True
        keep[last_of_app] = True
        self._keep(np.flatnonzero(keep))
        self._kept = self._count - retention

    def _tidy(self) -> None:
        """Keep one entry for each app and version, in the order of the log.

        Rows that were already tidy are not examined again.
        """
        rows, tidy = self._rows[: self._count], min(self._tidied, self._count)

        if self._count - tidy > _FEW or (np.diff(rows["physical_offset"][max(0, tidy - 1) :]) < 0).any():
            self._keep(np.argsort(rows["physical_offset"], kind="stable"))
            rows = self._rows[: self._count]

            order = np.lexsort((np.arange(self._count), rows["version"], rows["app"]))
            apps, versions = rows["app"][order], rows["version"][order]
            last = np.append((apps[1:] != apps[:-1]) | (versions[1:] != versions[:-1]), True)
            if not last.all():
                self._keep(np.sort(order[last]))
        else:
            again: set[int] = set()
            for row in range(tidy, self._count):
                older = rows[:row]
                same = (older["version"] == rows["version"][row]) & (older["app"] == rows["app"][row])
                again.update(np.flatnonzero(same).tolist())
            if again:
                self._keep(np.delete(np.arange(self._count), sorted(again)))

        self._tidied = self._count

    def _keep(self, rows: NDArray[np.int64]) -> None:
        self._rows[: len(rows)] = self._rows[rows]
        self._tidied = int(np.searchsorted(rows, self._tidied))
        self._count = len(rows)

    # ---- the file

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        self._tidy()
        rows = self._rows[: self._count].copy()

        names: dict[str, Any] = {"identity": self.identity}
        for key, column, numbers in (
            ("apps", "app", self._apps),
            ("queries", "query", self._queries),
            ("topics", "topics", self._topics),
        ):  # only what an entry names
            filled = rows[column] != _NONE
            used = np.bincount(rows[column][filled], minlength=len(numbers.by_number)) > 0
            names[key] = [numbers.by_number[number] for number in np.flatnonzero(used).tolist()]
            rows[column][filled] = (np.cumsum(used) - 1)[rows[column][filled]]

        names["replaced"] = {app_id: list(ids) for app_id, ids in sorted(self._replaced.items())}
        if self.queues is not None:
            names["queues"] = self.queues

        text = json.dumps(names, separators=(",", ":"), ensure_ascii=False).encode()
        body = rows.astype(JOURNAL_ENTRY.dtype).tobytes() + text

        flags = (JOURNAL_CHECKPOINT_KNOWN if self.checkpoint_crc is not None else 0) | (
            0 if self.complete else JOURNAL_INCOMPLETE
        )
        values = (
            JOURNAL_MAGIC, JOURNAL_FORMAT, flags, self.covered, self.end, self._count, len(text),
            self.checkpoint_crc or 0, crc32(body), 0,
        )  # fmt: skip

        head = _HEADER.pack(*values, 0)[:_CRC_POSITION]
        return head + crc32(head).to_bytes(4, "big") + body

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "") -> BatchJournal:
        """Parse the bytes of the file.

        Raises
        ------
        CorruptionError
            The bytes are damaged.
        NotAStoreError
            Another release wrote them.
        """
        journal, entry_count, names_size, body_crc = cls._from_header(data, path)

        body = memoryview(data)[JOURNAL_HEADER.size :]
        size = entry_count * JOURNAL_ENTRY.size + names_size
        if len(body) != size:
            raise CorruptionError(path, JOURNAL_HEADER.size, f"{size} bytes behind the header", f"{len(body)}")
        if crc32(body) != body_crc:
            raise CorruptionError(path, JOURNAL_HEADER.size, f"CRC-32 {body_crc:08x} of what follows", "another one")

        rows = np.frombuffer(body, JOURNAL_ENTRY.dtype, entry_count).astype(_ROW)
        try:
            names = json.loads(bytes(body[entry_count * JOURNAL_ENTRY.size :]))
            journal._apps, journal._queries = _Numbers(names["apps"]), _Numbers(names["queries"])
            journal._topics = _Numbers(tuple(topics) for topics in names["topics"])
            journal._replaced = {app_id: dict.fromkeys(ids) for app_id, ids in names["replaced"].items()}
            journal.identity = dict(names["identity"])
            if "queues" in names:
                journal.queues = {t: [(a, b) for a, b in ranges] for t, ranges in names["queues"].items()}

            for column, numbers in (("app", journal._apps), ("query", journal._queries), ("topics", journal._topics)):
                least = _NONE if column == "query" else 0
                if len(rows) and not least <= rows[column].min() <= rows[column].max() < len(numbers.by_number):
                    raise ValueError(f"a number of {column} that has no name")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            pass_on(error)
            raise CorruptionError(path, JOURNAL_HEADER.size, "the names of a journal", str(error)) from error

        journal._rows, journal._count, journal._tidied = rows, len(rows), len(rows)
        return journal

    @classmethod
    def _from_header(cls, data: bytes, path: str) -> tuple[BatchJournal, int, int, int]:
        """Return a journal without entries, the number of entries, the size of the names, and the CRC of both."""
        if len(data) < JOURNAL_HEADER.size:
            raise CorruptionError(path, 0, f"a header of {JOURNAL_HEADER.size} bytes", f"{len(data)} bytes")
        values = _HEADER.unpack_from(data)
        magic, version, flags, covered, end, entry_count, names_size, checkpoint_crc, body_crc, _, crc = values

        if magic != JOURNAL_MAGIC:
            raise CorruptionError(path, 0, "MSJOURNL", repr(bytes(data[:8])))
        if crc != crc32(data[:_CRC_POSITION]):
            raise CorruptionError(path, _CRC_POSITION, f"CRC-32 {crc:08x} of the header", "another one")
        if version != JOURNAL_FORMAT:
            raise NotAStoreError.of_version(path, version, JOURNAL_FORMAT)

        journal = cls(
            covered=covered,
            checkpoint_crc=checkpoint_crc if flags & JOURNAL_CHECKPOINT_KNOWN else None,
            complete=not flags & JOURNAL_INCOMPLETE,
            end=end,
        )
        return journal, entry_count, names_size, body_crc

    @classmethod
    def read(cls, disk: Disk, path: str) -> BatchJournal:
        """Read the file. One that is missing or cannot be used gives an empty journal with the reason as its `fault`.

        Raises
        ------
        NotAStoreError
            Another release wrote the file.
        """
        try:
            return cls.from_bytes(disk.read(path, MAX_SIZE), path)
        except FileNotFoundError as error:
            pass_on(error)
            return cls(fault=MISSING)
        except CorruptionError as error:
            return cls(complete=False, fault=str(error))

    @classmethod
    def read_checkpoint_crc(cls, disk: Disk, path: str) -> int | None:
        """Return the CRC of the store checkpoint when the journal was written, from the header; None: unknown."""
        try:
            return cls._from_header(disk.read_head(path, JOURNAL_HEADER.size), path)[0].checkpoint_crc
        except (FileNotFoundError, CorruptionError) as error:
            pass_on(error)
            return None

    def write(self, disk: Disk, path: str, via: str, retention: int = DEFAULT_RETENTION) -> None:
        """Write the file whole or not at all, and sync it."""
        self.trim(retention)
        replace_file(disk, path, self.to_bytes(), via=via)
        self.fault = ""
