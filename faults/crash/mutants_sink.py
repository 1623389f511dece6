"""Mutants of what the sink makes of a DataFrame's rows.

The searches run the sink's tasks and commits without Spark. PySpark may not be installed, so it is imported when a bug
is planted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa

from crash.judge import Verdict
from crash.planting import Ground, Mutant, Planted, without
from messagestore import ConfigError, Message, MessageStore, QueryConflictError, StoreError
from messagestore.batches import rules as batch_rules

_DEAD = {"invalidRows": "deadLetter", "deadLetterTopic": "dead"}


def in_module(module: str, name: str, make: Callable[[Any], Any]) -> Planted:
    """Patch a name of a module of the connector, which is imported when the bug is planted."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with mock.patch(f"pyspark_messagestore.{module}.{name}", make):
            yield

    return planted


def write(root: Path, rows: list[pa.RecordBatch], kinds: dict[str, str], **options: str) -> Any:
    """Commit batch 0 of an app; each record batch is a task."""
    from messagestore.spi import STORES
    from pyspark_messagestore.options.table import sink_options
    from pyspark_messagestore.sink.columns import prepare
    from pyspark_messagestore.sink.writers import Sink, TaskContext

    app = {"txnAppId": "app", "txnVersion": "0", "txnVersionSource": "spark"}
    parsed = sink_options({"path": str(root), "topic": "t", **app, **options})
    sink = Sink.plan(parsed, prepare(list(kinds.items()), parsed.topic, parsed.unknown_columns), STORES)
    staged = []
    for partition, batch in enumerate(rows):
        task = SimpleNamespace(partitionId=lambda p=partition: p, getLocalProperty=lambda _name: None)
        with mock.patch.object(TaskContext, "get", staticmethod(lambda t=task: t)):
            staged.append(sink.stage(iter([batch])))
    return sink.commit(staged, None)


def messages(root: Path, topic: str = "t") -> list[Any]:
    with MessageStore.open_read_only(root) as store:
        queues = store.topics().get(topic, [])
        return [m for q in queues for m in store.get_message(topic, q, 0, max_count=100).messages]


def judged(search: Callable[[Path], None]) -> Callable[[Ground], Iterator[Verdict]]:
    """A search of one case, whose errors and failed assertions are what is wrong."""

    def cases(ground: Ground) -> Iterator[Verdict]:
        verdict = Verdict()
        try:
            search(ground.folder / "written")
        except (AssertionError, StoreError) as error:
            verdict.misread.append(f"{type(error).__name__}: {error}")
        yield verdict

    return cases


def a_dead_letter_comes_again(root: Path) -> None:
    """The batch is planned again with other partitions, in a session elsewhere, with a smaller limit: it is known."""
    kinds = {"body": "binary", "bornTimestamp": "timestamp"}
    bodies, time = [b"good", b"x" * 101, b"also good", None], pa.timestamp("us", "UTC")

    def rows(first: int, end: int, zone: str) -> pa.RecordBatch:
        times = pa.array([1_700_000_000_000_000 + i for i in range(first, end)], time).cast(pa.timestamp("us", zone))
        return pa.record_batch({"body": pa.array(bodies[first:end], pa.binary()), "bornTimestamp": times})

    write(root, [rows(0, 4, "UTC")], kinds, maxMessageSize="100", **_DEAD)
    again = [rows(2, 4, "Asia/Tokyo"), rows(0, 2, "Asia/Tokyo")]
    status = write(root, again, kinds, maxMessageSize="99", **_DEAD).status
    assert status == "known", f"a replay is {status}"


def next_batch(root: Path) -> None:
    """The second batch of an app is for another topic than the first."""
    rows, kinds = pa.record_batch({"body": [b"x"]}), {"body": "binary"}
    write(root, [rows], kinds)
    with contextlib.suppress(QueryConflictError):
        write(root, [rows], kinds, topic="u", txnVersion="1")
        raise AssertionError("a batch of another query's checkpoint was written")


def another_checkpoint(root: Path) -> None:
    """A query gets the checkpoint of one that reads another topic."""
    from messagestore.spi import STORES
    from pyspark_messagestore.options.table import source_options
    from pyspark_messagestore.source.follower import Follower
    from pyspark_messagestore.source.offsets import StreamOffset

    with MessageStore.open(root) as store:
        for topic in ("a", "b"):
            store.put_message(Message(topic, b"x", queue_id=0))
    of_a, of_b = (Follower(source_options({"path": str(root), "subscribe": topic}), STORES) for topic in "ab")
    reached = of_a.ends()
    end = of_a.offset_at(StreamOffset(), dict.fromkeys(reached, 0), reached)
    of_b.ends()
    with contextlib.suppress(ConfigError):
        of_b.check_start(end)
        raise AssertionError("topic a, which was read, was left out silently")


def headers_without_a_name(root: Path) -> None:
    """A header whose name is null: the row is a dead letter, and the others are stored."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    values = [[{"key": "h", "value": b"1"}], [{"key": None, "value": b"1"}], [None]]
    rows = pa.record_batch({"value": [b"good", b"null", b"null"], "headers": pa.array(values, kind)})
    kinds = {"value": "binary", "headers": "array<struct<key:string,value:binary>>"}
    write(root, [rows], kinds, **_DEAD)
    reasons = [m.properties["dlqReason"] for m in messages(root, "dead")]
    assert [m.body for m in messages(root)] == [b"good"], "the rows that can be stored are not"
    assert all("without a name" in reason for reason in reasons), f"the reasons are {reasons}"


def a_column_of_the_users(root: Path) -> None:
    """A column that has the name of one of Kafka's becomes a property, as the option says."""
    rows = pa.record_batch({"body": [b"x"], "timestamp": ["noon"]})
    write(root, [rows], {"body": "binary", "timestamp": "string"}, unknownColumns="properties")
    found = [dict(m.properties) for m in messages(root)]
    assert found == [{"timestamp": "noon"}], f"a column was dropped: {found}"


def by_name(columns: Any) -> set[int]:
    """The columns that are left out by their names alone."""
    from pyspark_messagestore.sink.columns import ASSIGNED

    names = {name for kinds in ASSIGNED.values() for name in kinds}
    return {index for index, (name, _) in enumerate(columns) if name in names}


MUTANTS = (
    Mutant(
        "a header without a name counts as one with an empty name",
        in_module("sink.columns", "_unnamed", lambda _column: []),
        "null in headers",
        judged(headers_without_a_name),
    ),
    Mutant(
        "columns of the user's are left out by their names",
        in_module("sink.columns", "assigned", by_name),
        "a column named timestamp",
        judged(a_column_of_the_users),
    ),
    Mutant(
        "the next batch of an app goes to any topic",
        without(batch_rules, "_check_same_topic"),
        "swapped checkpoints",
        judged(next_batch),
    ),
    Mutant(
        "a topic leaves the subscription silently",
        in_module("source.follower", "Follower.check_left", lambda *_given: None),
        "swapped checkpoints",
        judged(another_checkpoint),
    ),
    Mutant(
        "what is said about a dead letter counts as its row",
        in_module("sink.dead_letters", "replace", lambda rows, **_digests: rows),
        "a replay with dead letters",
        judged(a_dead_letter_comes_again),
    ),
    Mutant(
        "a dead letter has the time zone of its session",
        in_module("sink.dead_letters", "_in_utc", lambda column: column),
        "a replay with dead letters",
        judged(a_dead_letter_comes_again),
    ),
)
