"""Records what was passed to `commit` and must therefore be in the store; also reads a store in two ways."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import reference
from messagestore import MessageStore

BLANK_SIZE = 8


@dataclass
class Attempt:
    """A batch that was passed to `commit`: its query, its version, and its rows in the order of the partitions.

    `query` is empty for a batch job, which has no query id.
    """

    app: str
    version: int
    rows: list[bytes]
    query: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Return what identifies a batch."""
        return self.app, self.query, self.version


@dataclass
class Ledger:
    """Tracks which batches are certainly in the store, and which may be.

    It also tracks which query has each app, and whom that query replaced.
    """

    sure: dict[tuple[str, str, int], Attempt] = field(default_factory=dict)
    tried: dict[tuple[str, str, int], list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def attempted(self, attempt: Attempt) -> None:
        """Record an attempt before its commit."""
        self.tried[attempt.key].append(attempt)

    def committed(self, attempt: Attempt, *, skipping: bool = False, taking_over: bool = False) -> None:
        """Record a commit that returned: the store has the batch, and nothing else under its name."""
        key, owner = attempt.key, self.owners.setdefault(attempt.app, attempt.query)
        assert attempt.query not in self.replaced[attempt.app], f"{key}: a replaced query was let in again"
        if owner != attempt.query:
            assert taking_over, f"{key}: was accepted, and query {owner} has this app"
            self.replaced[attempt.app].add(owner)
            self.owners[attempt.app] = attempt.query
        before = self.sure.get(key)
        same = before is None or sorted(before.rows) == sorted(attempt.rows)
        assert same or skipping, f"{key}: was accepted a second time with other rows"
        if not skipping:
            self.sure[key] = attempt

    def has_other_rows(self, attempt: Attempt) -> bool:
        """Whether an attempt under the same name had other rows."""
        given = self.tried[attempt.key]
        return any(sorted(other.rows) != sorted(attempt.rows) for other in given)

    def has_later(self, attempt: Attempt) -> bool:
        """Whether a later version was tried."""
        return any((app, query) == attempt.key[:2] and version > attempt.version for app, query, version in self.tried)

    def has_other_query(self, attempt: Attempt) -> bool:
        """Whether another query has tried to write under the same app id."""
        return any(app == attempt.app and query != attempt.query for app, query, _ in self.tried)

    def last(self, app: str, query: str) -> int:
        """Return the last version of a query that is certainly in the store, or -1."""
        return max((version for found, owner, version in self.sure if (found, owner) == (app, query)), default=-1)


def visible(root: str, topic: str) -> dict[int, list[bytes]]:
    """Return queue -> bodies from its first message on, as a reader sees them; offsets must have no gap."""
    found: dict[int, list[bytes]] = {}
    with MessageStore.open_read_only(root) as store:
        for queue_id in store.topics().get(topic, []):
            expected = first = store.min_offset(topic, queue_id)
            bodies: list[bytes] = []
            for batch in store.read(topic, queue_id, first):
                offsets = batch.column("queue_offset").to_pylist()
                assert offsets == list(range(expected, expected + len(offsets))), f"{topic}/{queue_id}: {offsets}"
                expected += len(offsets)
                bodies += batch.column("body").to_pylist()
            found[queue_id] = bodies
    return found


def raw_bodies(root: str, topic: str) -> dict[int, list[bytes]]:
    """Read the same from the CommitLog's bytes with a second codec; the log ends at the first zero."""
    found: dict[int, list[bytes]] = defaultdict(list)

    for segment in sorted((Path(root) / "commitlog").iterdir()):
        data = segment.read_bytes()
        at = 0
        while at + BLANK_SIZE <= len(data):
            size, magic = struct.unpack_from(">iI", data, at)
            if magic == reference.BLANK:
                break
            if size == 0:
                return found

            record = reference.decode(data[at : at + size])
            assert record["physical_offset"] == int(segment.name) + at
            if record["topic"] == topic:
                assert record["queue_offset"] == len(found[record["queue_id"]]) or topic == "in"
                found[record["queue_id"]].append(record["body"])
            at += size
    return found


def check(queues: dict[int, list[bytes]], ledger: Ledger, apps: dict[str, str]) -> None:
    """Check that nothing certain is missing, nothing is duplicated, batches are whole, and rows are in order per queue.

    Parameters
    ----------
    queues : dict
        Queue -> bodies `label/input queue/number`.
    ledger : Ledger
    apps : dict
        App id -> the label of its rows.
    """
    there = Counter(body for bodies in queues.values() for body in bodies)
    twice = [body for body, count in there.items() if count > 1]
    assert not twice, f"duplicated: {twice[:5]}"

    allowed: set[bytes] = set()
    for key, attempts in ledger.tried.items():
        sure = ledger.sure.get(key)
        if sure is not None:
            lost = [row for row in sure.rows if row not in there]
            assert not lost, f"{key}: lost {lost[:5]}"
            allowed.update(sure.rows)
            continue

        kept = [attempt for attempt in attempts if attempt.rows and all(row in there for row in attempt.rows)]
        whole = max(kept, key=lambda attempt: len(attempt.rows), default=None)
        allowed.update([] if whole is None else whole.rows)

    strange = [body for body in there if body not in allowed]
    assert not strange, f"a part of a batch, or rows that nobody gave: {strange[:5]} ({apps})"

    for queue_id, bodies in queues.items():
        last: dict[tuple[bytes, bytes], int] = {}
        for body in bodies:
            label, origin, number = body.split(b"/")
            assert last.get((label, origin), -1) < int(number), f"queue {queue_id}: {body!r} is out of order"
            last[label, origin] = int(number)
