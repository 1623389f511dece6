"""Messages of each kind that RocketMQ's producer sends, at a broker that runs: the source's columns beside a push consumer's.

Single messages, batches, ordered, delayed and transactional ones, with and without keys, tags and properties, and large
ones, which the producer compresses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StructType

from interop import java_build
from interop.cluster_clients import Clients, message
from interop.conftest import need
from interop.java_build import LEGACY, NEWEST
from interop.java_store import COUNTS, Driver
from interop.live import broker, create_topic, soon
from interop.real_broker import NameServer
from messagestore.spi import STORES
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.cluster import ClusterBatchReader
from pyspark_messagestore.source.schema import COLUMNS, Projection

QUEUES = 3
COMPRESSED, LARGE = 1, 4096
"""The flag of `sysFlag`, and above which size the producer compresses."""
OF_THE_CONSUMER = {"MIN_OFFSET", "MAX_OFFSET", "CONSUME_START_TIME"}
"""Properties that the consumer adds."""


def kinds() -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """What is sent, and how."""
    full = {"tags": "UA", "keys": "N14228 EWR", "flag": 7, "properties": {"gate": "C12", "ünicode": "é"}}
    words = b"a body that the producer compresses " * 1000

    def some(kind: str, count: int, **fields: Any) -> list[dict[str, Any]]:
        return [message(f"{kind} {number}".encode(), **fields) for number in range(count)]

    return [
        (some("plain", 5), {}),
        (some("full", 5, **full), {}),
        ([message(words), message(b"large " + words, **full)], {}),
        (some("batch", 7, **full), {"batch": True}),
        (some("ordered", 6, tags="o"), {"order": "N14228"}),
        (some("delayed", 3, delay=1, keys="later"), {}),
        (some("committed", 4, **full), {"state": "COMMIT_MESSAGE"}),
        (some("rolled back", 2), {"state": "ROLLBACK_MESSAGE"}),
    ]


def rows_of(names: NameServer) -> list[dict[str, Any]]:
    """All messages as the source reads them, with all columns."""
    schema = StructType()
    for column in COLUMNS:
        schema = schema.add(column.name, column.spark_type)
    options = source_options({"path": f"rocketmq://{names}", "subscribe": "t"})
    reader = ClusterBatchReader(options, Projection.of(schema), STORES)
    batches = [rows for part in reader.partitions() for rows in reader.read(part)]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def compare(row: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Each field of the consumer's message."""
    names = set(theirs) - {"bornTimestamp", "storeTimestamp", "bornHost", "storeHost", "keys", "properties", "sysFlag"}
    # The consumer takes the flag away when it unpacks a body; the column is what the broker has.
    assert row["sysFlag"] & ~COMPRESSED == theirs["sysFlag"]
    assert bool(row["sysFlag"] & COMPRESSED) == (len(row["body"]) > LARGE)
    assert {name: row[name] for name in names} == {name: theirs[name] for name in names}
    assert {name: row[name] for name in ("bornHost", "storeHost")} == {
        name: theirs[name].removeprefix("/") for name in ("bornHost", "storeHost")
    }
    for name in ("bornTimestamp", "storeTimestamp"):
        assert round(row[name].timestamp() * 1000) == theirs[name]
    assert row["keys"] == (theirs["keys"].split(" ") if theirs["keys"] else [])
    properties = {name: text for name, text in theirs["properties"].items() if name not in OF_THE_CONSUMER}
    assert dict(row["properties"]) | dict(row["systemProperties"]) == properties


@pytest.mark.parametrize("version", [NEWEST, LEGACY])
def test_each_field_is_a_push_consumers(memory: Path, drivers: Callable[[str], Driver], version: str) -> None:
    need(NEWEST, java_build.tools_classpath)
    need(version, java_build.tools_classpath)
    with (
        NameServer(NEWEST, memory / "names") as names,
        broker(version, memory, names) as one,
        Clients(drivers(NEWEST), names) as clients,
    ):
        create_topic(names, [one], "t", QUEUES)
        producer, sent = clients.producer(), 0
        for messages, how in kinds():
            answers = producer.send("t", messages, **how)
            assert {answer["status"] for answer in answers} == {"SEND_OK"}
            sent += len(messages) if how.get("state") != "ROLLBACK_MESSAGE" else 0
        received = clients.push("t").received(sent)
        rows = soon(lambda: rows_of(names), lambda rows: len(rows) == sent)
    COUNTS.stores += 1
    COUNTS.messages += sent

    def place(one_message: dict[str, Any]) -> tuple[int, int]:
        return one_message["queueId"], one_message["queueOffset"]

    assert len(received) == sent
    for row, theirs in zip(sorted(rows, key=place), sorted(received, key=place), strict=True):
        compare(row, theirs)
    assert not any(row["body"].startswith(b"rolled back") for row in rows)
    assert [row["body"] for row in sorted(rows, key=place) if row["tags"] == "o"] == [
        f"ordered {number}".encode() for number in range(6)
    ]
