"""A batch that is planned again in another way is known: other partitions, another order, another session.

Each replay is committed to a store that holds the batch already, once for each way in which the sink can treat rows.
What is really another batch is refused, with the reason, and the first one can still be sent again.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from messagestore import BatchConflictError, MessageStore
from messagestore.spi import STORES
from pyspark_messagestore.options.table import sink_options
from pyspark_messagestore.sink.columns import prepare
from pyspark_messagestore.sink.writers import Sink, StagedMessage
from sink_tasks import settings

_MAP = pa.map_(pa.string(), pa.string())
COLUMNS = {
    "body": ("binary", pa.binary()),
    "topic": ("string", pa.string()),
    "tags": ("string", pa.string()),
    "keys": ("array<string>", pa.list_(pa.string())),
    "properties": ("map<string,string>", _MAP),
    "queueId": ("bigint", pa.int64()),
    "shardingKey": ("string", pa.string()),
    "bornTimestamp": ("timestamp", pa.timestamp("us", "UTC")),
    "flag": ("int", pa.int32()),
    "delayTimeLevel": ("int", pa.int32()),
}
OTHERS = {"gate": ("string", pa.string()), "day": ("date", pa.date32()), "late": ("boolean", pa.bool_())}
_LARGE = {
    pa.binary(): pa.large_binary(),
    pa.string(): pa.large_string(),
    pa.list_(pa.string()): pa.list_(pa.large_string()),
    _MAP: pa.map_(pa.large_string(), pa.large_string()),
}


def good(number: int) -> dict[str, Any]:
    """A row that the store can hold; every column has nulls somewhere."""
    every = lambda n, value: None if number % n == 0 else value  # noqa: E731
    return {
        "body": b"row %d" % number,
        "topic": f"t{number % 2}",
        "tags": every(3, f"tag{number % 4}"),
        "keys": every(5, [f"k{number}", "common"][: number % 3]),
        "properties": every(4, [("p", str(number)), ("q", "\u00fc")][: number % 3]),
        "queueId": every(2, number % 8),
        "shardingKey": every(7, f"s{number % 3}"),
        "bornTimestamp": every(6, 1_700_000_000_000_001 + number * 3_600_000_000),
        "flag": every(9, number),
        "delayTimeLevel": 1 if number % 11 == 0 else None,
        "gate": every(3, f"C{number}"),
        "day": every(4, number),
        "late": every(5, number % 2 == 0),
    }


_FAULTS = (
    {"body": None},
    {"body": b"x" * 101},
    {"topic": "no/topic"},
    {"queueId": 1 << 40},
    {"queueId": 9},
    {"keys": ["a b", None]},
    {"tags": "a\x01b"},
    {"properties": [("UNIQ_KEY", "mine"), ("a", "1")]},
    {"properties": [("a", "x" * 33_000)]},
    {"delayTimeLevel": -1},
    {"bornTimestamp": -1, "body": None},
)
"""What no store can hold, in one column or several."""


def rows_of(count: int, *, faulty: bool) -> list[dict[str, Any]]:
    rows = [good(number) for number in range(count)]
    if faulty:
        for index, fault in enumerate(_FAULTS * 2):
            rows[3 * index + 1] = {**rows[3 * index + 1], **fault}
    return rows


@dataclass(frozen=True)
class Treatment:
    """How the sink treats the rows."""

    faulty: bool = False
    others: bool = False
    options: tuple[tuple[str, str], ...] = ()


_DEAD = (("invalidRows", "deadLetter"), ("deadLetterTopic", "dead"), ("maxMessageSize", "100"))
TREATMENTS = {
    "plain": Treatment(),
    "round robin": Treatment(options=(("queueSelector", "roundRobin"),)),
    "unique keys": Treatment(options=(("uniqKey", "true"),)),
    "columns that become properties": Treatment(others=True, options=(("unknownColumns", "properties"),)),
    "dead letters": Treatment(faulty=True, options=_DEAD),
    "dead letters, round robin": Treatment(faulty=True, options=(*_DEAD, ("queueSelector", "roundRobin"))),
    "dead letters, unique keys": Treatment(faulty=True, options=(*_DEAD, ("uniqKey", "true"))),
    "dead letters, columns that become properties": Treatment(
        faulty=True, others=True, options=(*_DEAD, ("unknownColumns", "properties"))
    ),
}


@dataclass(frozen=True)
class Plan:
    """How Spark plans the batch.

    Parameters
    ----------
    partitions : function
        Rows -> for each task its Arrow batches, as lists of rows.
    time_zone : str
        The session's.
    large : bool
        `spark.sql.execution.arrow.useLargeVarTypes`.
    known_query : bool
        False: foreachBatch on Connect, whose tasks know neither query nor batch.
    options : tuple of (name, value)
        What the user changes between two runs, and which changes nothing in a row.
    """

    partitions: Callable[[list[dict[str, Any]]], list[list[list[dict[str, Any]]]]]
    time_zone: str = "UTC"
    large: bool = False
    known_query: bool = True
    options: tuple[tuple[str, str], ...] = ()


def whole(rows: list[dict[str, Any]]) -> list[list[list[dict[str, Any]]]]:
    return [[rows]]


def in_parts(count: int) -> Callable[[list[dict[str, Any]]], list[list[list[dict[str, Any]]]]]:
    return lambda rows: [[rows[i * len(rows) // count : (i + 1) * len(rows) // count]] for i in range(count)]


def shuffled(seed: int, count: int) -> Callable[[list[dict[str, Any]]], list[list[list[dict[str, Any]]]]]:
    def parts(rows: list[dict[str, Any]]) -> list[list[list[dict[str, Any]]]]:
        random = np.random.default_rng(seed)
        found: list[list[list[dict[str, Any]]]] = [[] for _ in range(count)]
        mixed = [{**rows[i], "properties": _turned(rows[i]["properties"])} for i in random.permutation(len(rows))]
        while mixed:
            size = int(random.integers(1, 9))
            found[int(random.integers(count))].append(mixed[:size])
            mixed = mixed[size:]
        return found

    return parts


def _turned(pairs: list[tuple[str, str]] | None) -> list[tuple[str, str]] | None:
    return None if pairs is None else pairs[::-1]


PLANS = {
    "the same again": Plan(whole),
    "five partitions": Plan(in_parts(5)),
    "a partition for each row, and empty ones": Plan(in_parts(200)),
    "rows backwards": Plan(lambda rows: [[rows[::-1]]]),
    "another order in two partitions (coalesced by AQE)": Plan(shuffled(1, 2)),
    "another order in seven partitions, many small Arrow batches": Plan(shuffled(2, 7)),
    "rows one by one": Plan(lambda rows: [[[row] for row in rows]]),
    "a session in Berlin": Plan(whole, time_zone="Europe/Berlin"),
    "a session in New York, three partitions": Plan(in_parts(3), time_zone="America/New_York"),
    "large Arrow types": Plan(in_parts(2), large=True),
    "from classic Spark to Connect": Plan(in_parts(3), known_query=False),
    "another host, cluster and limit": Plan(
        in_parts(2),
        options=(("storeHost", "10.0.0.1:10911"), ("brokerClusterName", "south"), ("maxMessageSize", "99")),
    ),
    "everything at once": Plan(shuffled(3, 4), "Asia/Kolkata", large=True, known_query=False),
}


def arrow(rows: list[dict[str, Any]], columns: dict[str, tuple[str, pa.DataType]], plan: Plan) -> pa.RecordBatch:
    arrays = {}
    for name, (_, kind) in columns.items():
        column = pa.array([row[name] for row in rows], kind)
        if name == "bornTimestamp":
            column = column.cast(pa.timestamp("us", plan.time_zone))
        arrays[name] = column.cast(_LARGE[kind]) if plan.large and kind in _LARGE else column
    return pa.RecordBatch.from_pydict(arrays)


def planned(root: str, treatment: Treatment, plan: Plan, columns: dict[str, tuple[str, pa.DataType]]) -> Sink:
    given = {"path": root, "storeConfig": str(settings(root)), "txnAppId": "app", "txnVersion": "0"}
    parsed = sink_options({**given, "txnVersionSource": "spark", **dict(treatment.options), **dict(plan.options)})
    kinds = [(name, kind) for name, (kind, _) in columns.items()]
    return Sink.plan(parsed, prepare(kinds, parsed.topic, parsed.unknown_columns), STORES)


def committed(root: str, context: Any, treatment: Treatment, plan: Plan, rows: list[dict[str, Any]]) -> Any:
    """Plan a batch, run its tasks as attempts of their own, and commit what they left."""
    columns = {**COLUMNS, **OTHERS} if treatment.others else COLUMNS
    sink = planned(root, treatment, plan, columns)
    query = {"sql.streaming.queryId": "q1", "streaming.sql.batchId": "0"}
    context.properties = query if plan.known_query else {}
    staged: list[StagedMessage] = []
    for partition, batches in enumerate(plan.partitions(rows)):
        context.partition = partition
        copy = pickle.loads(pickle.dumps(sink))
        for _ in range(1 + partition % 2):  # every other task has a second attempt
            left = copy.stage(iter([arrow(each, columns, plan) for each in batches if each]))
        staged.append(pickle.loads(pickle.dumps(left)))
    return sink.commit(staged, None)


def contents(root: str) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    with MessageStore.open_read_only(root) as store:
        for topic, queue_ids in store.topics().items():
            if not topic.startswith("rmq_sys_spark"):
                for queue_id in queue_ids:
                    for each in store.get_message(topic, queue_id, 0, max_count=1000).messages:
                        yield topic, each.body, dict(each.properties)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_batch_that_is_planned_in_another_way_is_known(root: str, context, treatment: str) -> None:
    how, rows = TREATMENTS[treatment], rows_of(80, faulty=TREATMENTS[treatment].faulty)
    assert committed(root, context, how, PLANS["five partitions"], rows).status == "appended"
    before = list(contents(root))
    assert len(before) == 80
    found = {name: committed(root, context, how, plan, rows).status for name, plan in PLANS.items()}
    assert found == dict.fromkeys(PLANS, "known")
    assert list(contents(root)) == before


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_another_batch_is_refused_and_the_first_one_still_known(root: str, context, treatment: str) -> None:
    """One row more, one less, or one value of one row that is another one: good rows and dead letters alike."""
    how, rows = TREATMENTS[treatment], rows_of(80, faulty=TREATMENTS[treatment].faulty)
    committed(root, context, how, PLANS["five partitions"], rows)
    others = {"one less": rows[:-1], "one more": [*rows, good(99)]}
    for index in (0, 1):  # with dead letters, row 1 is one
        for name, value in {
            "body": rows[index]["body"] + b"!" if rows[index]["body"] else b"now a body",
            "tags": "other",
            "keys": ["other"],
            "properties": [("other", "1")],
            "bornTimestamp": 1_600_000_000_000_000,
        }.items():
            others[f"{name} of row {index}"] = [*rows[:index], {**rows[index], name: value}, *rows[index + 1 :]]
    before = list(contents(root))
    for name, other in others.items():
        with pytest.raises(BatchConflictError, match="Nothing of this batch was written"):
            pytest.fail(f"{name}: {committed(root, context, how, PLANS['five partitions'], other)}")
        assert committed(root, context, how, PLANS["everything at once"], rows).status == "known"
    assert list(contents(root)) == before


def test_a_dead_letter_says_nothing_that_another_attempt_changes(root: str, context) -> None:
    """Whatever the plan, the letters of a batch are the same."""
    how, rows = TREATMENTS["dead letters"], rows_of(80, faulty=True)
    plans = {name: plan for name, plan in PLANS.items() if not plan.options}
    found = []
    for number, plan in enumerate(plans.values()):
        path = f"{root}-{number}"
        committed(path, context, how, replace(plan, known_query=True), rows)
        letters = [(body, tuple(sorted(pairs.items()))) for topic, body, pairs in contents(path) if topic == "dead"]
        found.append(sorted(letters))
    assert len(found[0]) == 2 * len(_FAULTS)
    assert all(letters == found[0] for letters in found)
    origins = [json.loads(dict(pairs)["dlqOrigin"]) for _, pairs in found[0]]
    assert {origin["batch"] for origin in origins} == {0}
    assert "1969-12-31 23:59:59.999999Z" in {origin["bornTimestamp"] for origin in origins}
