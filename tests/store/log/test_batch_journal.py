"""The batch journal: a cache that is never believed without the log, and never empty because it is damaged."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from messagestore.errors import CorruptionError, NotAStoreError
from messagestore.files.disk import Disk
from messagestore.format.batch_record import SOURCE_NONE, BatchRecord
from messagestore.format.layout import JOURNAL_ENTRY, JOURNAL_HEADER
from messagestore.log.batch_journal import MISSING, PARTIAL, BatchJournal


def batch(
    version: int,
    app: str = "app",
    source: str = "spark",
    queue_offset: int = 0,
    query: str | None = "q",
    **others: object,
) -> BatchRecord:
    return BatchRecord(
        app,
        version,
        source,
        query,
        "s",
        100 + queue_offset * 1000 + version,
        queue_offset,
        200 + queue_offset * 1000 + version,
        "SYNC_FLUSH",
        3,
        {"t": [(0, 0, 3)], "a": [(0, 0, 1)]},
        (),
        version,
        **others,  # type: ignore[arg-type]
    )


def filled() -> BatchJournal:
    journal = BatchJournal(checkpoint_crc=7, identity={"storeId": "s"}, queues={"t": [(0, 3)]}, end=9000)
    journal.extend(
        [
            batch(0),
            batch(1, "other", "user", 1, None),
            batch(5, queue_offset=2, start=True),
            batch(0, "third", queue_offset=3, query="new", replaces=("q1", "q2")),
        ]
    )
    return journal


def test_round_trip_through_the_file(tmp_path: Path) -> None:
    """What is written is read, in order, with everything that decides about a replay."""
    journal, path = filled(), str(tmp_path / "journal")
    journal.write(Disk(), path, via=str(tmp_path / "new"))
    found = BatchJournal.read(Disk(), path)
    assert (found.covered, found.checkpoint_crc, found.end, found.complete, found.fault) == (4, 7, 9000, True, "")
    assert (found.identity, found.queues) == ({"storeId": "s"}, {"t": [(0, 3)]})
    assert found.app_ids() == ["app", "other", "third"]
    for app in found.app_ids():
        assert found.entries(app) == journal.entries(app)
    assert [entry.version for entry in found.entries("app")] == [0, 5]
    entry = found.find("app", 5)
    assert entry is not None and entry.start and entry.topics == ("a", "t") and entry.query_id == "q"
    other = found.find("other", 1)
    assert other is not None and (other.version_source, other.query_id) == ("user", None)
    assert found.replaced("third") == {"q1", "q2"}
    assert found.replaced("app") == frozenset()
    assert found.to_bytes() == journal.to_bytes()


def test_the_file_byte_by_byte() -> None:
    """As FORMAT.md says, written down a second time."""
    journal = BatchJournal(checkpoint_crc=7, identity={"storeId": "s"}, end=1234)
    journal.add(batch(5, "app", "user", 0))
    data = journal.to_bytes()
    entry = struct.pack(">qqqqQiiiI", 5, 105, 205, 3, 5, 0, 0, 0, 1)
    names = b'{"identity":{"storeId":"s"},"apps":["app"],"queries":["q"],"topics":[["a","t"]],'
    names += b'"replaced":{}}'
    body = entry + names
    head = struct.pack(">8siIqqqqIII", b"MSJOURNL", 1, 1, 1, 1234, 1, len(names), 7, zlib.crc32(body), 0)
    assert data == head + struct.pack(">I", zlib.crc32(head)) + body
    assert (JOURNAL_HEADER.size, JOURNAL_ENTRY.size) == (64, 56)


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
    assert (journal.app_ids(), journal.covered) == ([], 10)


def test_a_version_that_comes_again_has_one_entry() -> None:
    """The newer one counts."""
    journal = BatchJournal()
    journal.extend([batch(0), batch(1, queue_offset=1), batch(0, queue_offset=2)])
    found = journal.find("app", 0)
    assert found is not None and found.physical_offset == 2100
    assert [entry.version for entry in journal.entries("app")] == [1, 0]
    assert len(BatchJournal.from_bytes(journal.to_bytes())) == 2


def test_retention_keeps_the_newest_and_the_last_version_of_each_app() -> None:
    """An app that has not written for years is still known."""
    journal = BatchJournal()
    journal.extend(batch(v, f"old-{v % 3}", queue_offset=v) for v in range(9))
    journal.extend(batch(v, queue_offset=100 + v) for v in range(50))
    journal.trim(10)
    assert [entry.version for entry in journal.entries("app")] == list(range(40, 50))
    assert [[entry.version for entry in journal.entries(f"old-{n}")] for n in range(3)] == [[6], [7], [8]]
    assert journal.covered == 150


def test_a_takeover_forgets_the_versions_before_it() -> None:
    """The new query counts from 0 again; the old one stays refused after the file was written and read."""
    journal = BatchJournal()
    journal.extend([batch(0), batch(1, queue_offset=1), batch(0, queue_offset=2, query="new", replaces=("q",))])
    found = BatchJournal.from_bytes(journal.to_bytes())
    assert [(entry.version, entry.query_id) for entry in found.entries("app")] == [(0, "new")]
    found.drop("app", 0)
    assert found.replaced("app") == {"q"}
    assert BatchJournal.from_bytes(found.to_bytes()).replaced("app") == {"q"}


def test_query_ids_come_with_the_newest_last() -> None:
    """The last one is the app's query."""
    journal = BatchJournal()
    journal.extend(batch(v, queue_offset=v, query=query) for v, query in enumerate(["a", "b", None, "a", "c", "a"]))
    assert journal.query_ids("app") == ["b", "c", "a"]
    assert journal.query_ids("unknown") == []


def test_check_drops_what_the_log_does_not_hold() -> None:
    """The log loses records at its end: the newest entry is asked for first, and the first one that is there ends it."""
    journal = BatchJournal()
    journal.extend([batch(0), batch(1, queue_offset=1), batch(2, queue_offset=2)])
    asked: list[int] = []

    def is_there(_: str, entry: object) -> bool:
        asked.append(entry.version)  # type: ignore[attr-defined]
        return entry.version != 2  # type: ignore[attr-defined]

    journal.check(is_there, above=101)
    assert [entry.version for entry in journal.entries("app")] == [0, 1]
    assert (journal.dropped, asked) == ([("app", 2)], [2, 1])
    journal.check(lambda app, entry: False)
    assert journal.app_ids() == []


def test_only_entries_above_are_marked_as_partial() -> None:
    """The rest was synced."""
    journal = BatchJournal()
    journal.extend([batch(0), batch(1, queue_offset=1), batch(2, queue_offset=2)])
    assert journal.mark_partial(lambda entry: True, above=1101) == [("app", 1), ("app", 2)]
    assert [entry.row_count for entry in journal.entries("app")] == [3, PARTIAL, PARTIAL]
    assert journal.mark_partial(lambda entry: True) == [("app", 0)]


def test_queues_are_remembered_as_ranges() -> None:
    """Thousands of queues take one pair of numbers."""
    journal = BatchJournal()
    journal.note_queues([("t", q) for q in range(5)] + [("t", 9), ("u", 3)])
    journal.note_queues([("t", 2), ("t", 10)])
    assert journal.queues == {"t": [(0, 4), (9, 10)], "u": [(3, 3)]}
    assert journal.had_queue("t", 10) and not journal.had_queue("t", 7) and not journal.had_queue("x", 0)


def test_every_flipped_bit_is_damage() -> None:
    """No byte of the file is without a checksum."""
    data = filled().to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CorruptionError):
                BatchJournal.from_bytes(bytes(flipped))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_a_journal_that_was_cut_is_damage(size: int) -> None:
    """Whatever the length."""
    data = filled().to_bytes()
    for cut in (data[:size], data[:-1], data + b"\0"):
        with pytest.raises(CorruptionError):
            BatchJournal.from_bytes(cut)


def test_a_newer_format_is_refused() -> None:
    """Its checksum holds, so it is no damage."""
    data = bytearray(filled().to_bytes())
    data[8:12] = struct.pack(">i", 3)
    data[60:64] = struct.pack(">I", zlib.crc32(data[:60]))
    with pytest.raises(NotAStoreError, match="found format version 3; this release reads 1"):
        BatchJournal.from_bytes(bytes(data))


def test_a_damaged_file_is_no_empty_journal(tmp_path: Path) -> None:
    """Whoever reads it is told why it cannot be used, and makes it again."""
    path = tmp_path / "journal"
    path.write_bytes(filled().to_bytes()[:-1])
    found = BatchJournal.read(Disk(), str(path))
    assert "bytes behind the header" in found.fault and not found.complete
    assert BatchJournal.read_checkpoint_crc(Disk(), str(path)) == 7  # the header is whole
    assert BatchJournal.read(Disk(), str(tmp_path / "none")).fault == MISSING
    assert BatchJournal.read_checkpoint_crc(Disk(), str(tmp_path / "none")) is None
