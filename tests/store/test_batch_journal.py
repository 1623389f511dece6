"""The batch journal: a cache that is never believed without the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from messagestore.batch_journal import KEPT_VERSIONS, BatchJournal
from messagestore.batch_record import SOURCE_NONE, BatchRecord
from messagestore.mapped_file import Disk


def batch(version: int, app: str = "app", source: str = "spark", queue_offset: int = 0) -> BatchRecord:
    return BatchRecord(
        app,
        version,
        source,
        "q",
        "s",
        100 + version,
        queue_offset,
        200 + version,
        "SYNC_FLUSH",
        3,
        {"t": [(0, 0, 3)]},
        (),
        version,
    )


def test_round_trip_through_the_file(tmp_path: Path) -> None:
    """What is written is read, in order, with everything that decides about a replay."""
    journal = BatchJournal()
    journal.extend([batch(0), batch(1, "other", queue_offset=1), batch(5, queue_offset=2)])
    path = str(tmp_path / "journal.json")
    journal.write(Disk(), path, via=str(tmp_path / "new"))
    found = BatchJournal.read(Disk(), path)
    assert (found.covered, found.apps) == (3, journal.apps)
    assert [e.version for e in found.apps["app"].values()] == [0, 5]


def test_last_is_the_highest_version() -> None:
    """A user's versions only grow, but the journal does not rely on it."""
    journal = BatchJournal()
    journal.extend([batch(7), batch(3)])
    last = journal.last("app")
    assert last is not None and last.version == 7
    assert journal.last("unknown") is None
    assert journal.find("app", 4) is None


def test_batches_without_exactly_once_are_left_out() -> None:
    """Anonymous writes would make the file grow for ever; they still count as covered."""
    journal = BatchJournal()
    journal.add(batch(0, source=SOURCE_NONE, queue_offset=9))
    assert (journal.apps, journal.covered) == ({}, 10)


def test_only_the_last_versions_are_kept() -> None:
    """A thousand versions of each app."""
    journal = BatchJournal()
    journal.extend(batch(v, queue_offset=v) for v in range(KEPT_VERSIONS + 10))
    assert len(journal.apps["app"]) == KEPT_VERSIONS
    assert journal.find("app", 9) is None and journal.find("app", 10) is not None


def test_check_drops_what_the_log_does_not_hold() -> None:
    """Entries above the point whose batch is gone are dropped and reported; those below are not asked for."""
    journal = BatchJournal()
    journal.extend([batch(0), batch(1), batch(2)])
    journal.check(lambda app, entry: entry.version != 2, above=101)
    assert [e.version for e in journal.apps["app"].values()] == [0, 1]
    assert journal.dropped == [("app", 2)]
    journal.check(lambda app, entry: False)
    assert journal.apps == {}


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"formatVersion":2}', b'{"formatVersion":1,"covered":0,"apps":{"a":[[1]]}}', b"\xff"]
)
def test_an_unreadable_file_is_an_empty_journal(text: bytes) -> None:
    """It is rebuilt from the log; it is never a reason not to open."""
    assert BatchJournal.from_json(text) == BatchJournal()


def test_a_missing_file_is_an_empty_journal(tmp_path: Path) -> None:
    """A store without one."""
    assert BatchJournal.read(Disk(), str(tmp_path / "none")) == BatchJournal()
