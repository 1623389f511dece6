"""The source without Spark: small stores, and streams that are asked as Spark asks them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from messagestore import MessageColumns, MessageStore, StoreConfig
from messagestore.spi import STORES
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.readers import BatchReader, StreamReader
from pyspark_messagestore.source.schema import Projection

SMALL = StoreConfig(mapped_file_size_commit_log=1 << 16, max_hash_slot_num=100, max_index_num=400)
BODY = Projection.of(StructType().add("queueId", "integer").add("queueOffset", "long").add("body", "binary"))
ALL = ReadAllAvailable()


def add(root: str, count: int, topic: str = "t", queues: int = 4, size: int = 10, **columns: Any) -> None:
    """Append one batch, spread over the queues of a topic; `columns` are lists."""
    with MessageStore.open(root, SMALL) as store:
        store.create_topic(topic, queues)
        batch = pa.record_batch(
            {
                "body": [f"{i}".ljust(size) for i in range(count)],
                "queue_id": pa.array([i % queues for i in range(count)], pa.int32()),
                **columns,
            }
        )
        store.append_batch(MessageColumns.from_arrow(batch, topic=topic))


def stream(root: str, projection: Projection = BODY, **options: str) -> StreamReader:
    """A stream of topic t, unless the options say otherwise."""
    return StreamReader(source_options({"path": root, **_subscribed(options)}), projection, STORES)


def batch(root: str, projection: Projection = BODY, **options: str) -> BatchReader:
    """A batch read of topic t, unless the options say otherwise."""
    parsed = source_options({"path": root, **_subscribed(options)})
    parsed.check_batch()
    return BatchReader(parsed, projection, STORES)


def _subscribed(options: dict[str, str]) -> dict[str, str]:
    return options if options.keys() & {"subscribePattern", "assign"} else {"subscribe": "t", **options}


def again(offset: dict[str, Any]) -> Any:
    """As it comes back from Spark."""
    return json.loads(json.dumps(offset))


def tables(reader: StreamReader | BatchReader, partitions: list[Any]) -> list[pa.RecordBatch]:
    """What the tasks read."""
    found = []
    for partition in partitions:
        copy = pickle.loads(pickle.dumps(reader))
        found += list(copy.read(pickle.loads(pickle.dumps(partition))))
    return found


def rows(reader: StreamReader | BatchReader, partitions: list[Any]) -> list[tuple[int, int]]:
    """Queue and number of each message that the tasks read."""
    found: list[tuple[int, int]] = []
    for each in tables(reader, partitions):
        found += zip(each["queueId"].to_pylist(), each["queueOffset"].to_pylist(), strict=True)
    return found


def begun(reader: StreamReader) -> Any:
    """The first offset, as it comes back from Spark."""
    return again(reader.initialOffset())


def planned_first(reader: StreamReader) -> Any:
    """The end of a new query's first micro-batch. If nobody can say where the query begins, this is the error."""
    return again(reader.latestOffset(begun(reader), ALL))


def step(reader: StreamReader, start: Any, limit: ReadLimit | None = None) -> tuple[list[tuple[int, int]], Any]:
    """One micro-batch: its messages, and its end."""
    end = again(reader.latestOffset(start, limit or reader.getDefaultReadLimit()))
    return ([], end) if end == start else (rows(reader, reader.partitions(start, end)), end)


def finished(reader: StreamReader, start: Any) -> tuple[list[list[tuple[int, int]]], Any]:
    """All micro-batches until nothing is new. Each is planned by a reader that was started anew, as after a restart."""
    found = []
    while True:
        taken, end = step(reader, start)
        if end == start:
            return found, end
        other = StreamReader(reader.options, reader.projection, reader.stores)
        assert rows(other, other.partitions(start, end)) == taken
        found.append(taken)
        start = end


def retain(root: str, count: int) -> None:
    """Retention deletes the first segments."""
    for segment in sorted((Path(root) / "commitlog").iterdir())[:count]:
        segment.unlink()
