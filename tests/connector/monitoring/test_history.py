"""Curves of the past come from the log's times and from checkpoints; no database keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import checkpoint, offset
from messagestore import Message, MessageStore
from messagestore.files.commit_log import CommitLog
from messagestore.inspect import operator
from messagestore.spi import StoreReader
from messagestore.spi.local import LOCAL_STORES
from pyspark_messagestore.checkpoint.spark_checkpoint import read_progress
from pyspark_messagestore.monitoring.history import lag_history, spans
from small import SMALL, ClockDisk

PLANNED_MS = 1_700_000_000_000
"""When `checkpoint` says that batch 0 was planned; each further batch one millisecond later."""
BEGIN_MS = PLANNED_MS - 1000
STORED = [(0, 0), (0, 1), (5, 0), (999, 1), (1001, 0), (1001, 0), (1003, 1), (2000, 0)]
"""Milliseconds after BEGIN_MS, and the queue, of each message."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreReader]:
    """Eight messages in two queues of topic t, at the times of `STORED`."""
    clock = ClockDisk(BEGIN_MS)
    with MessageStore.open(tmp_path / "s", SMALL, disk=clock) as writer:
        for after_ms, queue_id in STORED:
            clock.now_ms = BEGIN_MS + after_ms
            writer.put_message(Message("t", b"x" * 100, queue_id=queue_id))
    reader = LOCAL_STORES.reader(str(tmp_path / "s"), SMALL)
    yield reader
    reader.close()


def brute(times_ms: list[int]) -> list[int]:
    """How many messages were stored before each time."""
    return [sum(BEGIN_MS + after_ms < time_ms for after_ms, _ in STORED) for time_ms in times_ms]


@pytest.mark.parametrize("points", [1, 2, 3, 7, 96, 100_000])
@pytest.mark.parametrize(("begin", "end"), [(0, 2001), (-5000, 9000), (5, 6), (6, 999), (3000, 4000), (-10, -5)])
def test_messages_by_time_are_those_of_a_count_one_by_one(
    store: StoreReader, tmp_path: Path, begin: int, end: int, points: int
) -> None:
    times_ms = spans(BEGIN_MS + begin, BEGIN_MS + end, points)
    assert len(times_ms) - 1 == min(points, end - begin)
    assert (times_ms[0], times_ms[-1]) == (BEGIN_MS + begin, BEGIN_MS + end)
    found = operator.look_at_topic(str(tmp_path / "s"), "t", times_ms, SMALL)
    assert found.stored == brute(times_ms)
    assert (found.queues, found.faults) == store.offsets(["t"])


def test_a_topic_that_has_no_message_has_a_flat_curve(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL) as writer:
        writer.create_topic("t")
    assert (
        operator.look_at_topic(str(tmp_path / "s"), "t", spans(BEGIN_MS, BEGIN_MS + 960, 96), SMALL).stored == [0] * 97
    )


def test_times_of_a_queue_cost_no_more_looks_than_it_has_messages(
    store: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    original = CommitLog.head
    monkeypatch.setattr(CommitLog, "head", lambda *given: looks.append(given[1]) or original(*given))
    operator.look_at_topic(str(tmp_path / "s"), "t", spans(BEGIN_MS, BEGIN_MS + 86_400_000, 96), SMALL)
    assert len(looks) == len(set(looks)) <= len(STORED)


def test_no_body_is_read(store: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a message was read")

    monkeypatch.setattr(CommitLog, "gather", refuse)
    assert operator.look_at_topic(str(tmp_path / "s"), "t", [BEGIN_MS + 3000], SMALL).stored == [len(STORED)]


def test_lag_of_each_batch_is_what_waited_when_it_was_planned(store: StoreReader, tmp_path: Path) -> None:
    """Batch 0 was planned at 1,000 ms and had read nothing before, so the first point is that of batch 1."""
    ends = [offset(store.describe([]).store_id, *places) for places in ((2, 2), (4, 2), (4, 3), (5, 3))]
    folder = checkpoint(tmp_path / "c", [[each] for each in ends], committed=3)
    history = lag_history(store, read_progress(str(folder), least=100), BEGIN_MS + 5000)
    # Stored before 1,001 ms: two messages in each queue; before 1,003 ms: four in queue 0; 1,003 itself in queue 1.
    assert [(point.batch_id, point.time_ms - PLANNED_MS, point.lag) for point in history] == [
        (1, 1, 0),
        (2, 2, 0),
        (3, 3, 0),
        (None, 4000, 1),
    ]


def test_lag_grows_while_a_query_reads_less_than_is_stored(store: StoreReader, tmp_path: Path) -> None:
    ends = [offset(store.describe([]).store_id, *places) for places in ((0, 0), (1, 0), (1, 1))]
    folder = checkpoint(tmp_path / "c", [[each] for each in ends])
    history = lag_history(store, read_progress(str(folder), least=100), BEGIN_MS + 5000)
    assert [point.lag for point in history] == [4, 3 + 2, 6]
    newest = lag_history(store, read_progress(str(folder)), BEGIN_MS + 5000)
    assert [(point.batch_id, point.lag) for point in newest] == [(None, 6)]


def test_batches_of_another_store_and_damaged_ones_are_left_out(store: StoreReader, tmp_path: Path) -> None:
    here = store.describe([]).store_id
    ends = [offset(here, 1, 1), offset("another", 9, 9), offset(here, 2, 2), offset(here, 3, 2)]
    folder = checkpoint(tmp_path / "c", [[each] for each in ends])
    (folder / "offsets" / "2").write_text("v1\n{")
    history = lag_history(store, read_progress(str(folder), least=100), BEGIN_MS + 5000)
    assert [(point.batch_id, point.lag) for point in history] == [(1, 2), (None, 3)]


def test_a_query_without_a_batch_has_no_past(store: StoreReader, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", [])
    assert lag_history(store, read_progress(str(folder), least=100), BEGIN_MS) == []
