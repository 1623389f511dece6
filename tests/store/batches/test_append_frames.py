"""Batches of Arrow's tables, and of frames that other libraries hand over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from messagestore import (
    BatchRequest,
    ChecksumError,
    ConfigError,
    Message,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
)
from messagestore.batches.encoding import PIECE_ROWS
from small import SMALL

ROWS = {
    "body": ["B12", "C3", "D7"],
    "topic": ["gates", "doors", "gates"],
    "queueId": [0, 1, 0],
    "tags": ["UA", "AA", "B6"],
}
TABLE = pa.table(ROWS)


class Frame:
    """A frame of a library that only speaks Arrow's PyCapsule interface."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


FORMS: dict[str, Callable[[], Any]] = {
    "a record batch": lambda: pa.record_batch(ROWS),
    "a table": lambda: TABLE,
    "a table of chunks": lambda: pa.concat_tables([TABLE[:1], TABLE[1:]]),
    "a stream of record batches": lambda: pa.RecordBatchReader.from_batches(
        TABLE.schema, TABLE.to_batches(max_chunksize=1)
    ),
    "a frame of pandas": lambda: pd.DataFrame(ROWS),
    "a frame of another library": lambda: Frame(TABLE),
    "columns": lambda: MessageColumns.from_arrow(TABLE),
    "a list of record batches": lambda: TABLE.to_batches(max_chunksize=2),
    "parts of several kinds": lambda: [TABLE[:1], Frame(TABLE[1:2]), MessageColumns.from_arrow(TABLE[2:])],
    "a generator": lambda: (part for part in TABLE.to_batches(max_chunksize=1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_batch_in_each_form(tmp_path: Path, form: str) -> None:
    """`append_batch(RecordBatch)` said "allowed is Iterable", which a record batch is. The digest is of the rows."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        request = BatchRequest(app_id="gates", version=0)
        done = store.append_batch(FORMS[form](), request)
        assert (done.status, done.row_count) == ("appended", 3)
        assert [m.body for m in store.get_message("gates", 0, 0).messages] == [b"B12", b"D7"]
        assert [(m.body, m.tags) for m in store.get_message("doors", 1, 0).messages] == [(b"C3", "AA")]
        assert store.append_batch(TABLE, request).status == "known"


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"columns", "parts of several kinds"}))
def test_one_topic_and_queue_for_all_rows(tmp_path: Path, form: str) -> None:
    """They take precedence over the columns."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        assert store.append_batch(FORMS[form](), topic="all", queue_id=5).row_count == 3
        assert [m.body for m in store.get_message("all", 5, 0).messages] == [b"B12", b"C3", b"D7"]
        assert store.topics().keys() & {"gates", "doors"} == set()


def queues_of(store: MessageStore, topic: str) -> dict[bytes, int]:
    """The queue of each message, by its body."""
    found = {}
    for queue_id in store.topics()[topic]:
        found |= {m.body: queue_id for m in store.get_message(topic, queue_id, 0, 1000).messages}
    return found


def test_rows_without_a_queue_get_one(tmp_path: Path) -> None:
    """By the hash of the sharding key, else of the first key, as a put; else the queues take turns."""
    rows = pa.table(
        {
            "body": [b"%d" % n for n in range(12)],
            "shardingKey": ["Aa", "BB", "Aa", *[None] * 9],
            "keys": pa.array([["x"], ["y"], None, ["x"], ["x", "y"], ["y"], *[None] * 6]),
            "queueId": pa.array([*[None] * 11, 3], pa.int32()),
        }
    )
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.create_topic("t", 5)
        request = BatchRequest("app", 0)
        assert store.append_batch(rows, request, topic="t").row_count == 12
        chosen = queues_of(store, "t")
        for key in ("x", "y"):
            store.put_message(Message("t", key.encode(), keys=[key]))
        puts = queues_of(store, "t")
        assert chosen[b"0"] == chosen[b"1"] == chosen[b"2"] == 2112 % 5  # "Aa" and "BB" have one hash
        assert chosen[b"3"] == chosen[b"4"] == puts[b"x"]
        assert chosen[b"5"] == puts[b"y"]
        assert sorted(chosen[b"%d" % n] for n in range(6, 11)) == [0, 1, 2, 3, 4]
        assert chosen[b"11"] == 3
        assert store.append_batch(rows, request, topic="t").status == "known"  # though the turn is another one


def test_rows_without_a_queue_of_new_topics_and_of_many_rows(tmp_path: Path) -> None:
    """Two topics, of which one is created with the request's number of queues; more rows than are encoded at once."""
    count = 2 * PIECE_ROWS + 6
    rows = pa.table({"body": [b"x"] * count, "topic": ["gates", "doors"] * (count // 2)})
    with MessageStore.open(tmp_path / "s") as store:
        store.create_topic("gates", 1)
        store.append_batch(MessageColumns.from_arrow(rows), BatchRequest(write_queue_nums=2))
        ends = {
            topic: [store.max_offset(topic, queue_id) for queue_id in ids]
            for topic, ids in sorted(store.topics().items())
            if topic in ("gates", "doors")
        }
        assert ends["gates"] == [count // 2]
        assert len(ends["doors"]) == 2
        assert max(ends["doors"]) - min(ends["doors"]) <= 3  # at most one for each part that is encoded


def test_more_rows_than_are_encoded_at_once(tmp_path: Path) -> None:
    """A wrong row is named by its number in the whole batch."""
    count = PIECE_ROWS + 10
    table = pa.table({"body": [b"x"] * count, "queueId": [0] * count})
    with MessageStore.open(tmp_path / "s") as store:
        assert store.append_batch(table, topic="t").row_count == count == store.max_offset("t", 0)
        broken = pa.table({"body": [b"x"] * count, "queueId": [0] * (count - 1) + [-4]})
        with pytest.raises(MessageIllegalError, match=f"row {count - 1}: queue id: found -4"):
            store.append_batch(broken, topic="t")
        with pytest.raises(MessageIllegalError, match=f"row {2 * count - 1}: queue id: found -4"):
            store.append_batch([table, broken], topic="t")
        assert store.max_offset("t", 0) == count


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no body": (TABLE.drop_columns("body"), {}, MessageIllegalError, "body: found no column body"),
    "no topic": (TABLE.drop_columns("topic"), {}, MessageIllegalError, "topic: found neither a column topic nor"),
    "a negative queue": (TABLE.set_column(2, "queueId", [[0, -1, 1]]), {}, MessageIllegalError, "row 1: queue id: found -1"),
    "an unknown column": (TABLE.append_column("price", [[1, 2, 3]]), {}, MessageIllegalError, "column 'price': no such column"),
    "a wrong type": (TABLE.set_column(0, "body", [[1, 2, 3]]), {}, MessageIllegalError, "column body: found type int64"),
    "one fault in the second part": ([TABLE, TABLE.drop_columns("topic")], {}, MessageIllegalError, "topic: found neither"),
    "a single column": (TABLE["body"], {}, ConfigError, "columns: found ChunkedArray, which gives no columns with names"),
    "a dictionary": (ROWS, {}, ConfigError, "columns: found 'body'; allowed is MessageColumns, RecordBatch, Table, or a"),
    "a topic beside columns": (
        MessageColumns.from_arrow(TABLE), {"topic": "t"}, ConfigError, "topic: found 't'; allowed is None for MessageColumns"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_frame_that_is_not_allowed_writes_nothing(tmp_path: Path, case: str) -> None:
    rows, arguments, kind, words = REFUSED[case]
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        with pytest.raises(kind, match=words):
            store.append_batch(rows, **arguments)
        assert store.topics() == {}


def test_a_scan_that_fails_says_why_and_nothing_is_written(tmp_path: Path) -> None:
    """A damaged source was called a frame without columns: nobody looked at its disk."""
    with MessageStore.open(tmp_path / "source", SMALL) as source:
        source.append_batch(TABLE)
    (path,) = (tmp_path / "source" / "commitlog").iterdir()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"D7", b"D8"))
    with (
        MessageStore.open_read_only(tmp_path / "source", SMALL) as source,
        MessageStore.open(tmp_path / "s", SMALL) as store,
    ):
        with pytest.raises(ChecksumError):
            store.append_batch(source.scan("gates", columns=["topic", "queueId", "body"]))
        assert store.topics() == {}


def test_a_stream_of_another_library_that_fails_is_no_frame_without_columns(tmp_path: Path) -> None:
    def parts() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch(ROWS)
        raise ValueError("the source is gone")

    class Broken:
        def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
            return pa.RecordBatchReader.from_batches(TABLE.schema, parts()).__arrow_c_stream__(requested_schema)

    with MessageStore.open(tmp_path / "s", SMALL) as store:
        with pytest.raises(pa.ArrowException, match="the source is gone"):
            store.append_batch(Broken())
        assert store.topics() == {}


def test_chunks_that_are_too_long_together() -> None:
    """Arrow's own error said neither which column nor what to do: 2 GiB of a type with offsets of 32 bits."""
    part = pa.array([b"x" * (1 << 20)])

    def parts() -> Iterator[pa.Table]:
        for _ in range(1 << 11):
            yield pa.table({"body": part})

    with pytest.raises(MessageIllegalError, match=r"column body: its chunks cannot be put together .* large type"):
        MessageColumns.from_arrow(pa.concat_tables(parts()), topic="t")
