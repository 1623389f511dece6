"""Which batches does the store already hold?

`spark/journal.json` keeps, per app, the last 1 000 versions with the place of their BATCH records. It is a cache of the
log: an entry counts only if its BATCH record is read back at its place, or if that place lies below the first segment.
The file is written whenever the clean end moves; what came after it is read from the BATCH topic's queue.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from messagestore.batch_record import SOURCE_NONE, BatchRecord
from messagestore.errors import CorruptionError
from messagestore.mapped_file import Disk

FORMAT_VERSION = 1
KEPT_VERSIONS = 1000
MAX_SIZE = 128 * 1024 * 1024
"""Most bytes of `journal.json` that are read."""
KEPT_REPLACED = 1000
"""Replaced query ids that are kept for each app, the newest ones."""
PARTIAL = -1
"""Row count of a batch that a power cut and then a broker left only a part of."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One batch of an app: where its BATCH record is, and its digest. `row_count` -1: only a part of it is there.

    `topics` are those its rows went to, sorted; None when an older release wrote the entry. `start`: it has no rows and
    says that the app goes on with the next version.
    """

    version: int
    version_source: str
    query_id: str | None
    physical_offset: int
    end: int
    row_count: int
    digest: int
    topics: tuple[str, ...] | None = field(default=None, compare=False)
    start: bool = False


@dataclass
class BatchJournal:
    """App id -> version -> entry, in the order of the log.

    Parameters
    ----------
    covered : int
        Queue offset in the BATCH topic up to which batches are taken in.
    checkpoint_crc : int | None
        CRC-32 of the store checkpoint's fields as they were when the journal was written. Another one in the file means
        that a broker has written since. None: not known.
    """

    covered: int = 0
    checkpoint_crc: int | None = None
    apps: dict[str, OrderedDict[int, JournalEntry]] = field(default_factory=dict)
    dropped: list[tuple[str, int]] = field(default_factory=list)
    """(app id, version) of entries whose BATCH record is not in the log any more; for the report."""
    taken_over: dict[str, list[str]] = field(default_factory=dict)
    """App id -> query ids from which another query took the app over, in that order."""

    def add(self, batch: BatchRecord) -> None:
        """Take in a batch that is in the log."""
        if batch.version_source != SOURCE_NONE:
            self._remember(batch)
        self.covered = max(self.covered, batch.queue_offset + 1)  # last: what it covers is not read again

    def _remember(self, batch: BatchRecord) -> None:
        if batch.replaces:  # the new query counts its versions from 0 again; those of the old one are of no use
            self.apps.pop(batch.app_id, None)
            known = [query_id for query_id in self.taken_over.get(batch.app_id, []) if query_id not in batch.replaces]
            self.taken_over[batch.app_id] = [*known, *batch.replaces][-KEPT_REPLACED:]
        versions = self.apps.setdefault(batch.app_id, OrderedDict())
        versions.pop(batch.version, None)
        versions[batch.version] = JournalEntry(
            version=batch.version,
            version_source=batch.version_source,
            query_id=batch.query_id,
            physical_offset=batch.physical_offset,
            end=batch.end,
            row_count=batch.row_count,
            digest=batch.digest,
            topics=tuple(sorted(batch.ranges)),
            start=batch.start,
        )
        while len(versions) > KEPT_VERSIONS:
            versions.popitem(last=False)

    def find(self, app_id: str, version: int) -> JournalEntry | None:
        """The entry of a version, or None."""
        return self.apps.get(app_id, OrderedDict()).get(version)

    def last(self, app_id: str) -> JournalEntry | None:
        """The entry with the highest version of an app, or None."""
        versions = self.apps.get(app_id)
        return versions[max(versions)] if versions else None

    def replaced(self, app_id: str) -> frozenset[str]:
        """Query ids of an app that are refused for good."""
        return frozenset(self.taken_over.get(app_id, ()))

    def app_ids(self) -> list[str]:
        """The apps that have batches."""
        return sorted(self.apps)

    def entries(self, app_id: str) -> list[JournalEntry]:
        """The entries of an app in the order of the log."""
        return list(self.apps.get(app_id, OrderedDict()).values())

    def query_ids(self, app_id: str) -> list[str]:
        """The query ids in the entries of an app, the newest last."""
        found = [entry.query_id for entry in self.apps.get(app_id, OrderedDict()).values() if entry.query_id]
        return list(dict.fromkeys(reversed(found)))[::-1]

    def drop(self, app_id: str, version: int) -> None:
        """Forget an entry whose batch is not in the log."""
        versions = self.apps[app_id]
        del versions[version]
        if not versions:
            del self.apps[app_id]
        self.dropped.append((app_id, version))

    def check(self, is_there: Callable[[str, JournalEntry], bool], *, above: int = 0) -> None:
        """Drop entries at or above a physical offset whose BATCH record is not read back."""
        for app_id in list(self.apps):
            for entry in list(self.apps[app_id].values()):
                if entry.physical_offset >= above and not is_there(app_id, entry):
                    self.drop(app_id, entry.version)

    def mark_partial(self, is_partial: Callable[[JournalEntry], bool]) -> list[tuple[str, int]]:
        """Remember batches of which only a part is in the log; (app id, version) of those that are new."""
        found = []
        for app_id, versions in self.apps.items():
            for entry in list(versions.values()):
                if entry.row_count >= 0 and is_partial(entry):
                    versions[entry.version] = replace(entry, row_count=PARTIAL)
                    found.append((app_id, entry.version))
        return found

    def extend(self, batches: Iterable[BatchRecord]) -> None:
        """Take in batches in the order of the log."""
        for batch in batches:
            self.add(batch)

    def to_json(self) -> bytes:
        """The file's text."""
        apps = {
            app_id: [
                [e.version, e.version_source, e.query_id, e.physical_offset, e.end, e.row_count, f"{e.digest:016x}"]
                for e in versions.values()
            ]
            for app_id, versions in sorted(self.apps.items())
        }
        fields: dict[str, Any] = {"formatVersion": FORMAT_VERSION, "covered": self.covered}
        if self.checkpoint_crc is not None:
            fields["checkpointCrc"] = self.checkpoint_crc
        fields["apps"] = apps
        starts = {app_id: [e.version for e in versions.values() if e.start] for app_id, versions in self.apps.items()}
        optional = {"replaced": self.taken_over, "starts": {app_id: found for app_id, found in starts.items() if found}}
        fields |= {name: value for name, value in optional.items() if value}
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> BatchJournal:
        """From the file's text; an unreadable one is an empty journal: it is only a cache."""
        try:
            fields = json.loads(text)
            if fields["formatVersion"] != FORMAT_VERSION:
                return cls()
            crc = fields.get("checkpointCrc")
            journal = cls(covered=int(fields["covered"]), checkpoint_crc=None if crc is None else int(crc))
            for app_id, rows in fields["apps"].items():
                journal.apps[app_id] = OrderedDict(
                    (
                        int(v),
                        JournalEntry(int(v), str(source), query_id, int(at), int(end), int(count), int(digest, 16)),
                    )
                    for v, source, query_id, at, end, count, digest in rows
                )
            journal.taken_over = {app_id: list(map(str, ids)) for app_id, ids in fields.get("replaced", {}).items()}
            for app_id, found in fields.get("starts", {}).items():
                for version in found:
                    journal.apps[app_id][version] = replace(journal.apps[app_id][version], start=True)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()
        return journal

    @classmethod
    def read(cls, disk: Disk, path: str) -> BatchJournal:
        """From the file; empty when there is none."""
        try:
            return cls.from_json(disk.read(path, MAX_SIZE))
        except (FileNotFoundError, CorruptionError):  # too large for a journal: as one that cannot be parsed
            return cls()

    def write(self, disk: Disk, path: str, via: str) -> None:
        """To the file, whole or not at all, synced."""
        disk.replace(path, self.to_json(), via=via)
