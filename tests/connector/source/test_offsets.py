"""Stream offsets: one text for one offset, exact limits, pieces of even size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore import ConfigError
from messagestore.spi import LastRecord, Range
from pyspark_messagestore.source.limits import limited
from pyspark_messagestore.source.offsets import StreamOffset
from pyspark_messagestore.source.planning import pieces

QUEUES = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b-c", "flights"]), st.integers(0, 12)),
    st.tuples(st.integers(0, 50), st.integers(0, 100)),
    max_size=12,
)


def test_the_text_is_canonical() -> None:
    """Spark compares offsets as text: whatever order they were found in, the text is one."""
    one = StreamOffset("id", ("b", "a"), {("b", 10): 1, ("b", 2): 3, ("a", 0): 7}, 99, LastRecord(5, 94, 3, 7))
    two = StreamOffset("id", ("a", "b"), {("a", 0): 7, ("b", 2): 3, ("b", 10): 1}, 99, LastRecord(5, 94, 3, 7))
    text = json.dumps(one.to_json())
    assert text == json.dumps(two.to_json()) == json.dumps(one.to_json(), sort_keys=True)
    assert json.dumps(StreamOffset.from_json(json.loads(text)).to_json()) == text


@given(QUEUES, st.integers(0, 1 << 62))
def test_offsets_survive_the_round_trip(queues, physical_offset: int) -> None:
    offset = StreamOffset("x", ("a",), {q: end for q, (_, end) in queues.items()}, physical_offset)
    again = StreamOffset.from_json(json.loads(json.dumps(offset.to_json())))
    assert (again.queues, again.physical_offset, again.store_id) == (offset.queues, physical_offset, "x")
    assert json.dumps(again.to_json()) == json.dumps(offset.to_json(), sort_keys=True)


@pytest.mark.parametrize("fields", [{}, {"flights": {"0": 1}}, {**StreamOffset().to_json(), "formatVersion": 2}])
def test_offsets_of_others_are_refused(fields: dict) -> None:
    """A checkpoint of another source, or of a release to come."""
    with pytest.raises(ConfigError, match="checkpoint: found the offset"):
        StreamOffset.from_json(fields)


@given(QUEUES, st.integers(1, 500))
def test_limits_are_exact(queues, most: int) -> None:
    """Exactly so many, or all when there are fewer; never beyond an end, never behind a start."""
    starts = {q: start for q, (start, _) in queues.items()}
    ends = {q: start + count for q, (start, count) in queues.items()}
    reached = limited(starts, ends, most)
    assert sum(reached[q] - starts[q] for q in ends) == min(most, sum(ends[q] - starts[q] for q in ends))
    assert all(starts[q] <= reached[q] <= ends[q] for q in ends)
    waiting = [q for q in ends if ends[q] > starts[q]]
    if most >= len(waiting):
        assert all(reached[q] > starts[q] for q in waiting)


def test_limits_are_proportional() -> None:
    """A queue that holds ten times as much gives ten times as much."""
    starts = {("t", 0): 0, ("t", 1): 0}
    reached = limited(starts, {("t", 0): 10_000, ("t", 1): 1_000}, 1100)
    assert abs(reached["t", 0] - 1000) <= 2
    assert sum(reached.values()) == 1100


def test_no_queue_starves_below_one_message_each() -> None:
    """Five queues, two messages at a time: after five steps each has given two."""
    starts = {("t", q): 100 * q for q in range(5)}
    ends = {queue: start + 50 for queue, start in starts.items()}
    now = dict(starts)
    for _ in range(5):
        now = limited(now, ends, 2)
    assert [now[q] - starts[q] for q in sorted(now)] == [2, 2, 2, 2, 2]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), max_size=8),
    st.integers(1, 120),
)
def test_pieces_cover_every_message_once(sizes, rows: int) -> None:
    """None is larger than asked; together they are the ranges, in order."""
    ranges = [Range("t", i, start, start + count) for i, (start, count) in enumerate(sizes)]
    parts = pieces(ranges, rows)
    assert all(0 < sum(r.count for r in part) <= rows for part in parts)
    covered = [(r.queue_id, n) for part in parts for r in part for n in range(r.start, r.end)]
    assert covered == [(r.queue_id, n) for r in ranges for n in range(r.start, r.end)]


def test_small_queues_are_put_together() -> None:
    assert [len(part) for part in pieces([Range("t", q, 0, 10) for q in range(100)], 250)] == [25, 25, 25, 25]
