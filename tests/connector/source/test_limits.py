"""How much a micro-batch and a partition read: numbers, bytes, and how long messages wait."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from messagestore import ConfigError, MessageStore, OffsetOutOfRangeError
from messagestore.spi import Range
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.options.values import MOST
from pyspark_messagestore.source.limits import limited_by_size
from pyspark_messagestore.source.planning import pieces
from stream_steps import ALL, SMALL, add, batch, begun, finished, retain, rows, step, stream

QUEUES = st.lists(st.lists(st.integers(0, 400), max_size=30), max_size=6)


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Queues with 25 messages each, small and large."""
    path = str(tmp_path / "store")
    add(path, 60)
    add(path, 40, size=400)
    return path


def sizes_in(root: str, found: list[tuple[int, int]]) -> int:
    with MessageStore.open(root, SMALL) as store:
        return sum(store.get_message("t", queue, number).messages[0].size for queue, number in found)


# ---- as numbers


def taken(queues: list[list[int]], starts: dict, most: int) -> tuple[dict, list[int]]:
    ends = {("t", queue): len(sizes) for queue, sizes in enumerate(queues)}
    means = {("t", queue): float(np.mean(sizes)) if sizes else 0.0 for queue, sizes in enumerate(queues)}

    def sizes_of(each: Range) -> np.ndarray:
        return np.array(queues[each.queue_id][each.start : each.end], np.int32)

    reached = limited_by_size(starts, ends, most, means, sizes_of)
    return reached, [size for (_, q), end in reached.items() for size in queues[q][starts[("t", q)] : end]]


@given(QUEUES, st.integers(1, 3000))
@settings(max_examples=200)
def test_bytes_are_exact_and_no_queue_starves(queues: list[list[int]], most: int) -> None:
    """Never more than asked but for a single message, never less than fits, and step by step everything."""
    now = {("t", queue): 0 for queue in range(len(queues))}
    for _ in range(sum(map(len, queues)) + 1):
        if all(now["t", queue] == len(sizes) for queue, sizes in enumerate(queues)):
            return
        reached, found = taken(queues, now, most)
        assert found
        assert sum(found) <= most or len(found) == 1
        if sum(found) <= most:
            for queue, sizes in enumerate(queues):
                end = reached["t", queue]
                assert end == len(sizes) or sum(found) + sizes[end] > most
        now = reached
    raise AssertionError("it does not end")


def test_bytes_are_shared_in_proportion() -> None:
    """A queue that holds ten times as many bytes gives ten times as many."""
    queues = [[100] * 1000, [10] * 1000]
    reached, found = taken(queues, {("t", 0): 0, ("t", 1): 0}, 11_000)
    assert sum(found) > 10_990
    assert abs(reached["t", 0] - reached["t", 1]) <= 2


def test_a_large_message_is_not_passed_over_for_ever() -> None:
    """It fits only if its queue is the first one."""
    queues = [[950], [100] * 2000]
    now, steps = {("t", 0): 0, ("t", 1): 0}, 0
    while not now["t", 0]:
        now, _ = taken(queues, now, 1000)
        steps += 1
    assert steps < 50


@given(QUEUES, st.integers(1, 40), st.integers(1, 900), st.integers(1, 40))
@settings(max_examples=200)
def test_pieces_are_never_larger_than_asked(queues: list[list[int]], most: int, size: int, count: int) -> None:
    ranges = [Range("t", queue, 0, len(sizes)) for queue, sizes in enumerate(queues) if sizes]
    parts = pieces(
        ranges,
        most,
        most_rows=count,
        most_size=size,
        sizes=lambda each: np.array(queues[each.queue_id][each.start : each.end], np.int32),
    )
    covered = [(r.queue_id, n) for part in parts for r in part for n in range(r.start, r.end)]
    assert covered == [(r.queue_id, n) for r in ranges for n in range(r.count)]
    for part in parts:
        found = [queues[r.queue_id][n] for r in part for n in range(r.start, r.end)]
        assert len(found) <= min(most, count)
        assert sum(found) <= size or len(found) == 1


# ---- as options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("maxBytesPerTrigger", "0"),
        ("maxBytesPerTrigger", "1.5m"),
        ("maxBytesPerTrigger", "-1"),
        ("maxBytesPerTrigger", "9223372036854775808"),
        ("minOffsetsPerTrigger", "0"),
        ("maxTriggerDelay", "soon"),
        ("maxTriggerDelay", "1 h"),
        ("maxTriggerDelay", "-1"),
        ("maxRecordsPerPartition", "none"),
        ("maxBytesPerPartition", "m"),
    ],
)
def test_wrong_values(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_options({"path": "/s", "subscribe": "t", name: value})
    assert str(caught.value).startswith(f"option {name}: found {value!r}; allowed is ")


def test_sizes_as_spark_writes_them() -> None:
    def parsed(text: str) -> int | None:
        return source_options({"path": "/s", "subscribe": "t", "maxBytesPerTrigger": text}).max_bytes_per_trigger

    assert [parsed(text) for text in ("1000", "2k", "3 MB", "1g", "1tb")] == [1000, 2048, 3 << 20, 1 << 30, 1 << 40]


@pytest.mark.parametrize(
    ("text", "delay_s"),
    [
        ("1000", 1),
        ("10min", 600),
        ("5M", 300),
        ("100us", 0.0001),
        ("1d", 86400),
        (" 2h ", 7200),
        ("500ms", 0.5),
        ("3s", 3),
    ],
)
def test_delays_as_kafkas_connector_reads_them(text: str, delay_s: float) -> None:
    """A number without a unit used to be in seconds: a job of Kafka's waited a thousand times as long."""
    found = source_options({"path": "/s", "subscribe": "t", "maxTriggerDelay": text}).max_trigger_delay
    assert found == pytest.approx(delay_s)


def test_the_least_cannot_be_more_than_the_most() -> None:
    with pytest.raises(ConfigError, match="option minOffsetsPerTrigger: found 10, which is more than maxOffsets"):
        source_options({"path": "/s", "subscribe": "t", "minOffsetsPerTrigger": "10", "maxOffsetsPerTrigger": "9"})


def test_limits_are_for_streams(root: str) -> None:
    for name in ("maxBytesPerTrigger", "minOffsetsPerTrigger"):
        with pytest.raises(ConfigError, match=f"option {name}: is for streams"):
            batch(root, **{name: "1"})


# ---- in a stream


@pytest.mark.parametrize("most", [1, 500, 2000, 1 << 20])
def test_bytes_of_a_stream_are_exact(root: str, most: int) -> None:
    reader = stream(root, startingOffsets="earliest", maxBytesPerTrigger=str(most))
    found, _ = finished(reader, begun(reader))
    assert sorted(row for each in found for row in each) == [(queue, n) for queue in range(4) for n in range(25)]
    sizes = [sizes_in(root, each) for each in found]
    assert all(size <= most or len(each) == 1 for size, each in zip(sizes, found, strict=True))
    assert most < 2000 or all(size > most - 700 for size in sizes[:-3])


def test_numbers_and_bytes_together(root: str) -> None:
    given = {"startingOffsets": "earliest", "maxBytesPerTrigger": "3k", "maxOffsetsPerTrigger": "9"}
    reader = stream(root, **given)
    found, _ = finished(reader, begun(reader))
    assert sum(map(len, found)) == 100
    assert all(len(each) <= 9 and sizes_in(root, each) <= 3072 for each in found)
    assert max(map(len, found)) == 9
    assert min(map(len, found[:-1])) < 9


def test_once_reads_everything(root: str) -> None:
    """Spark's trigger Once asks for all that is available: no limit holds."""
    reader = stream(root, startingOffsets="earliest", maxBytesPerTrigger="1", minOffsetsPerTrigger="1000")
    assert reader.getDefaultReadLimit() == ReadMaxRows(MOST)
    assert len(step(reader, begun(reader), ALL)[0]) == 100
    assert stream(root).getDefaultReadLimit() == ReadAllAvailable()


def test_messages_wait_for_others_but_not_for_ever(root: str) -> None:
    reader = stream(root, minOffsetsPerTrigger="10", maxTriggerDelay="1s")
    start = begun(reader)
    assert step(reader, start) == ([], start)
    add(root, 4)
    assert step(reader, start) == ([], start)
    add(root, 8)
    found, start = step(reader, start)
    assert len(found) == 12
    add(root, 4)
    assert step(reader, start) == ([], start)
    begun_s = time.monotonic()
    while not (waited := step(reader, start))[0]:
        assert time.monotonic() - begun_s < 30
    assert len(waited[0]) == 4
    assert time.monotonic() - begun_s > 0.9
    start = waited[1]
    assert step(reader, start) == ([], start)


def test_what_is_there_when_a_run_begins_does_not_wait(root: str) -> None:
    """As with Kafka: it used to wait for up to a quarter of an hour, after each restart again."""
    reader = stream(root, startingOffsets="earliest", minOffsetsPerTrigger="1000")
    found, start = step(reader, begun(reader))
    assert len(found) == 100
    add(root, 4)
    assert step(reader, start) == ([], start)
    restarted = stream(root, minOffsetsPerTrigger="1000")
    assert len(step(restarted, start)[0]) == 4


def test_waiting_costs_microseconds(root: str) -> None:
    reader = stream(root, minOffsetsPerTrigger="10")
    start = begun(reader)
    assert step(reader, start) == ([], start)
    add(root, 4)
    assert step(reader, start) == ([], start)
    begun_s = time.thread_time()
    for _ in range(200):
        reader.latestOffset(start, reader.getDefaultReadLimit())
    assert (time.thread_time() - begun_s) / 200 < 0.001


def test_available_now_does_not_wait(root: str) -> None:
    reader = stream(root, startingOffsets="earliest", minOffsetsPerTrigger="90", maxOffsetsPerTrigger="90")
    start = begun(reader)
    reader.prepareForTriggerAvailableNow()
    first, start = step(reader, start)
    second, start = step(reader, start)
    assert (len(first), len(second)) == (90, 10)


def test_retention_while_a_stream_is_limited_by_bytes(tmp_path: Path) -> None:
    """What is gone is an error, or a gap; the rest is read once."""
    root = str(tmp_path / "store")
    add(root, 2000, size=100)
    strict, lenient = (
        stream(root, startingOffsets="earliest", maxBytesPerTrigger="20k", failOnDataLoss=value)
        for value in ("true", "false")
    )
    first, middle = step(strict, begun(strict))
    retain(root, 2)
    with pytest.raises(OffsetOutOfRangeError):
        step(strict, middle)
    found, _ = finished(lenient, middle)
    left = [row for each in found for row in each]
    assert len(set(left)) == len(left)
    assert not set(left) & set(first)
    assert {queue for queue, number in left if number == 499} == {0, 1, 2, 3}


# ---- partitions


def test_partitions_have_at_most_so_many_messages(root: str) -> None:
    reader = batch(root, maxRecordsPerPartition="7")
    counts = [len(rows(reader, [each])) for each in reader.partitions()]
    assert sum(counts) == 100
    assert max(counts) == 7
    small = batch(root, maxRecordsPerPartition="50", minPartitions="3")
    assert len(small.partitions()) == 4


def test_partitions_have_at_most_so_many_bytes(root: str) -> None:
    reader = batch(root, maxBytesPerPartition="2k")
    found = [rows(reader, [each]) for each in reader.partitions()]
    assert sorted(row for each in found for row in each) == [(queue, n) for queue in range(4) for n in range(25)]
    assert all(sizes_in(root, each) <= 2048 for each in found)
    assert len(found) < 2 * sizes_in(root, [row for each in found for row in each]) / 2048
    tiny = batch(root, maxBytesPerPartition="1")
    assert [len(rows(tiny, [each])) for each in tiny.partitions()] == [1] * 100


def test_the_same_rows_whatever_the_partitions_are(root: str) -> None:
    """A restart may divide a planned micro-batch in another way."""
    reader = stream(root, startingOffsets="earliest")
    start = begun(reader)
    found, end = step(reader, start, ALL)
    for other in ({"maxRecordsPerPartition": "3"}, {"maxBytesPerPartition": "1k"}, {"minPartitions": "50"}):
        divided = stream(root, **other)
        assert rows(divided, divided.partitions(start, end)) == found
