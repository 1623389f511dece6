"""Rows of records: runs, slices, places and numbers."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from messagestore.format.rows import Row, Rows

rows_of_puts = st.lists(
    st.builds(
        Row,
        topic=st.sampled_from(["t", "u"]),
        queue_id=st.integers(0, 2),
        queue_offset=st.integers(0, 1 << 40),
        physical_offset=st.just(0),
        size=st.integers(90, 5000),
        tags_code=st.integers(-(1 << 31), 1 << 31),
        store_timestamp_ms=st.integers(0, 1 << 41),
        key_hashes=st.lists(st.integers(0, (1 << 31) - 1), max_size=3),
        has_unit=st.booleans(),
    ),
    max_size=12,
)


def side_by_side(found: list[Row], start: int = 4096) -> list[Row]:
    """The same rows, one behind the other in the log."""
    placed = []
    for row in found:
        placed.append(replace(row, physical_offset=start))
        start += row.size
    return placed


def same(left: Rows, right: Rows) -> bool:
    names = [field.name for field in fields(Rows) if field.name != "has_unit"]
    units = [np.ones(rows.row_count, np.bool_) if rows.has_unit is None else rows.has_unit for rows in (left, right)]
    return np.array_equal(*units) and all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


@given(rows_of_puts, st.data())
def test_a_slice_is_what_its_rows_alone_would_be(found: list[Row], data: st.DataObject) -> None:
    """Runs that are cut, keys, and rows without a unit."""
    placed = side_by_side(found)
    start = data.draw(st.integers(0, len(placed)))
    stop = data.draw(st.integers(start, len(placed)))
    assert same(Rows.of(placed).slice(start, stop), Rows.of(placed[start:stop]))


@given(rows_of_puts)
def test_rows_of_a_queue_are_found_in_all_its_runs(found: list[Row]) -> None:
    """Each row with a unit once, in the order of the log; queues that have none are left out."""
    by_queue = Rows.of(found).by_queue()
    wanted: dict[tuple[str, int], list[int]] = {}
    for number, row in enumerate(found):
        if row.has_unit:
            wanted.setdefault((row.topic, row.queue_id), []).append(number)
    assert {key: numbers.tolist() for key, numbers in by_queue.items()} == wanted


@given(rows_of_puts)
def test_runs_and_topics_name_every_row(found: list[Row]) -> None:
    rows = Rows.of(found)
    numbers = {number: (run.topic, run.queue_id) for run in rows.runs() for number in range(run.start, run.stop)}
    assert [numbers[number] for number in range(len(found))] == [(row.topic, row.queue_id) for row in found]
    assert list(rows.of_topic("u")) == [number for number, row in enumerate(found) if row.topic == "u"]


@given(rows_of_puts)
def test_rows_are_numbered_and_placed_as_they_would_be_one_by_one(found: list[Row]) -> None:
    """Numbers go on from those of each queue, places from the first one; the rows themselves stay as they were."""
    rows = Rows.of(side_by_side(found, 0))
    next_offsets = {(topic, queue_id): 7 * queue_id for topic in "tu" for queue_id in range(3)}
    wanted, numbers = dict(next_offsets), []
    for row in found:
        numbers.append(wanted[(row.topic, row.queue_id)])
        wanted[(row.topic, row.queue_id)] += 1
    placed = rows.numbered(next_offsets).at(1 << 40, 99)
    assert (placed.queue_offsets.tolist(), next_offsets) == (numbers, wanted)
    assert placed.physical_offsets.tolist() == [row.physical_offset for row in side_by_side(found, 1 << 40)]
    assert placed.store_timestamps_ms.tolist() == [99] * len(found)
    assert placed.starts.tolist() == rows.starts.tolist()
    assert placed.end == ((1 << 40) + sum(row.size for row in found) if found else 0)
    assert rows.queue_offsets.tolist() == [row.queue_offset for row in found]


@given(rows_of_puts)
def test_rows_one_by_one_are_the_rows_that_they_were_made_of(found: list[Row]) -> None:
    """Columns of single records, and the records of these columns."""
    assert Rows.of(side_by_side(found)).each() == side_by_side(found)


def test_bytes_go_with_a_slice() -> None:
    """A chunk that is cut where a segment ends: each part has its own bytes."""
    starts = np.array([0, 3, 5, 9])
    columns = {
        "run_topics": ["t"],
        "run_queue_ids": np.zeros(1, np.int32),
        "run_counts": np.array([3], np.int32),
        "tags_codes": np.zeros(3, np.int64),
        "key_hashes": np.empty(0, np.int32),
        "key_counts": np.zeros(3, np.int32),
    }
    rows = Rows.unplaced(starts, data=np.frombuffer(b"aaabbcccc", np.uint8), **columns)
    assert rows.slice(1, 3).data.tobytes() == b"bbcccc"
    assert rows.slice(0, 1).data.tobytes() == b"aaa"
    assert rows.slice(1, 3).at(100, 1).physical_offsets.tolist() == [100, 102]
    assert Rows.unplaced(starts, **columns).slice(1, 3).data.tobytes() == b""
