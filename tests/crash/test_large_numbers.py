"""Offsets and versions where a smaller kind of number ends: exact, or refused before the first byte."""

from __future__ import annotations

import itertools
from collections import deque
from functools import partial
from pathlib import Path

import pytest

from crash import checker
from crash.harness import SMALL, all_messages, batch_columns, payload
from crash.imitate import seen
from messagestore import (
    SYNC_FLUSH,
    BatchConflictError,
    BatchRequest,
    ConfigError,
    CorruptionError,
    LostBatchesError,
    Message,
    MessageStore,
    StoreFullError,
)
from messagestore.inspect.verify import verify

SEGMENT_SIZE = SMALL.mapped_file_size_commit_log
ROWS = 40
consume = partial(deque, maxlen=0)


def begin_at(root: Path, physical_offset: int) -> None:
    """A store whose older segments are gone: its log begins there."""
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / f"{physical_offset:020d}").write_bytes(bytes(SEGMENT_SIZE))


def append(store: MessageStore, number: int) -> list[int]:
    """A put and a batch; where each begins and ends."""
    put = store.put_message(Message("t", b"put/%d/" % number + b"x" * 1500, queue_id=0, keys=[f"k{number}"]))
    batch = store.append_batch(
        batch_columns("app-1", number, ROWS), BatchRequest(app_id="app-1", version=number, version_source="spark")
    )
    return [put.physical_offset, batch.physical_offset, batch.end]


@pytest.mark.parametrize("bits", [31, 32, 53])
def test_a_log_that_passes_the_end_of_a_smaller_number(root: Path, bits: int) -> None:
    """Physical offsets around 2^31, 2^32 and 2^53: records, units, index entries, the journal and `state` are exact."""
    border = 1 << bits
    begin_at(root, border - 2 * SEGMENT_SIZE)
    places = []
    for first in (0, 3):  # the second time the store is opened beyond the border, or just below
        with MessageStore.open(root, SMALL) as store:
            for number in range(first, first + 3):
                places += append(store, number)
            assert store.append_batch(batch_columns("app-1", 0, ROWS), request(0)).status == "known"
    assert places == sorted(places)
    assert places[0] < border < places[-1]
    with MessageStore.open_read_only(root, SMALL) as reader:
        messages = all_messages(reader)  # type: ignore[arg-type]
        assert [body.split(b"/")[1] for body in messages[("t", 0)]] == [b"%d" % n for n in range(6)]
        assert sum(len(found) for (topic, _), found in messages.items() if topic == "topic-app-1") == 6 * ROWS
        for number in range(6):
            assert [m.physical_offset for m in reader.query_message("t", f"k{number}")] == [places[3 * number]]
            hits = reader.query_message("topic-app-1", f"k{number}-7")
            assert [m.body for m in hits] == [payload("app-1", number, 7)]
    assert verify(root).ok
    assert checker.check(checker.read_tree(root)).faults == []


def request(version: int) -> BatchRequest:
    return BatchRequest(app_id="app-1", version=version, version_source="spark", flush_disk_type=SYNC_FLUSH)


def test_a_log_at_the_end_of_all_offsets_is_full(root: Path) -> None:
    """2^63: the segment that would end there is not made; what is in the one before stays, and nothing is written."""
    begin_at(root, (1 << 63) - 3 * SEGMENT_SIZE)
    with MessageStore.open(root, SMALL) as store:
        numbers = itertools.count()
        with pytest.raises(StoreFullError, match="Open a new store"):
            consume(append(store, number) for number in numbers)
        assert next(numbers) > 2
        message = Message("t", b"x" * 3000, queue_id=0)
        with pytest.raises(StoreFullError, match="Open a new store"):
            consume(store.put_message(message) for _ in itertools.count())
        count = store.max_offset("t", 0)
    assert len(seen(root)[("t", 0)]) == count
    assert verify(root).ok


def test_a_segment_that_ends_above_all_offsets_is_refused(root: Path) -> None:
    """A file name made up by somebody: an error that names it, for writers and readers."""
    begin_at(root, (1 << 63) - SEGMENT_SIZE)
    for open_it in (MessageStore.open, MessageStore.open_read_only):
        with pytest.raises(CorruptionError, match=f"{(1 << 63) - SEGMENT_SIZE}"):
            open_it(root, SMALL).max_offset("t", 0)


def test_versions_of_any_size_with_gaps_and_repeats(root: Path) -> None:
    """Ids of batches are opaque: 2^31, 2^63 - 1, a gap; each is known when it comes again, and refused with other rows."""
    versions = [1, 3, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 53) + 1, (1 << 63) - 1]
    for _ in range(2):
        with MessageStore.open(root, SMALL) as store:
            statuses = {
                store.append_batch(batch_columns("app-1", v, 3), BatchRequest(app_id="app-1", version=v)).status
                for v in versions
            }
            assert len(statuses) == 1
            for version in versions:
                with pytest.raises(BatchConflictError):
                    store.append_batch(batch_columns("app-1", 0, 3), BatchRequest(app_id="app-1", version=version))
    assert statuses == {"known"}
    assert sum(map(len, seen(root).values())) == 3 * len(versions)
    for version in (-1, 1 << 63):
        with pytest.raises(ConfigError, match="txnVersion"):
            BatchRequest(app_id="app-1", version=version)
    with MessageStore.open(root, SMALL) as store:
        store.start_batches("q", (1 << 63) - 3)
        store.append_batch(batch_columns("q", (1 << 63) - 3, 3), BatchRequest("q", (1 << 63) - 3, "spark"))
        with pytest.raises(LostBatchesError, match=f"{(1 << 63) - 2}"):
            store.append_batch(batch_columns("q", (1 << 63) - 1, 3), BatchRequest("q", (1 << 63) - 1, "spark"))
