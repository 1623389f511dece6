"""The store of the stories: orders that Spark and others wrote, a consumer group and a query that read them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.pandas.types import from_arrow_schema

from checkpoints import checkpoint, offset
from cli_runs import objects, run
from messagestore import BatchRequest, Message, MessageColumns, MessageStore, StoreConfig
from messagestore.files.consumer_offsets import publish_offsets
from messagestore.session import attached_store
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.sink import writers
from pyspark_messagestore.sink.writers import StreamWriter
from sink_tasks import staged
from small import SMALL

CONFIG = SMALL.replace(stamp_uniq_key=True)
CITIES = ("Oslo", "Turin", "Lyon", "Ghent", "Porto")
DEAD = "%DLQ%billing"


class Shop(NamedTuple):
    """A store, and the checkpoint of a query that reads it.

    Parameters
    ----------
    root, query : Path
    key : str
        Of the message returns/0 @0, as are `unique_key` and `message_id`.
    unique_key, message_id : str
    """

    root: Path
    query: Path
    key: str
    unique_key: str
    message_id: str


def order(number: int) -> bytes:
    """The body of an order, as JSON."""
    return json.dumps({"order": number, "price": 5 + number * 7 % 90, "to": {"city": CITIES[number % 5]}}).encode()


def orders(numbers: Sequence[int], queues: int = 4) -> MessageColumns:
    """Orders as a batch of Spark has them, spread over the queues of their topic."""
    rows = {
        "body": pa.array([order(number) for number in numbers], pa.binary()),
        "queue_id": pa.array([number % queues for number in numbers], pa.int32()),
        "keys": pa.array([f"order-{number}" for number in numbers]),
        "tags": pa.array(["paid" if number % 3 else "new" for number in numbers]),
    }
    return MessageColumns.from_arrow(pa.record_batch(rows), topic="orders")


def rejecting(root: Path, numbers: Sequence[int], times: int = 1) -> None:
    """A micro-batch of Spark's sink, without a JVM: orders, and one without a body. `times`: Spark sends it again."""
    rows = pa.record_batch(
        {
            "body": pa.array([*(order(number) for number in numbers), None], pa.binary()),
            "keys": [*(f"again-{number}" for number in numbers), "no-body"],
        }
    )
    options = {"path": str(root), "topic": "orders", "invalidRows": "deadLetter", "deadLetterTopic": "orders-rejected"}
    source = MessageStoreDataSource(CaseInsensitiveDict(options))
    writer = source.streamWriter(from_arrow_schema(rows.schema, prefer_timestamp_ntz=True), False)
    assert isinstance(writer, StreamWriter)
    context = SimpleNamespace(properties={"sql.streaming.queryId": "rejecting"}, partition=0)
    task = SimpleNamespace(partitionId=lambda: context.partition, getLocalProperty=context.properties.get)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writers.TaskContext, "get", staticmethod(lambda: task))
        for _ in range(times):
            writer.commit(staged(writer.sink, context, 0, rows), 0)
    attached_store(str(root)).detach()


def shop(folder: Path, config: StoreConfig = CONFIG) -> Shop:
    """40 orders in three batches of an app, one of which came twice; one put, which a consumer gave up; a group and a query that are behind."""
    root = folder / "shop"
    with MessageStore.open(root, config) as store:
        for version, numbers in enumerate((range(12), range(12, 24), range(24, 40))):
            store.append_batch(orders(numbers), BatchRequest(app_id="orders-etl", version=version))
        store.append_batch(orders(range(24, 40)), BatchRequest(app_id="orders-etl", version=2))
        put = Message("returns", order(4), queue_id=0, keys=("return-4",), tags="late", properties={"clerk": "Ines"})
        assert store.put_message(put).is_ok
        (returned,) = store.get_message("returns", 0, 0).messages
        assert store.send_back(returned, "billing", -1, reason="no such customer").is_ok
        store_id = store.store_id
    (message,) = objects(run("get", root, "returns", "--json"))
    publish_offsets(
        root, "billing", {("orders", 0): 9, ("orders", 1): 4, ("orders", 2): 10, ("orders", 3): 10}, own=True
    )
    read = [(2, 2, 2, 2), (4, 4, 4, 4), (7, 6, 6, 6), (8, 7, 8, 7)]
    query = checkpoint(
        folder / "late-orders",
        [[offset(store_id, *ends, topic="orders")] for ends in read],
        at_ms=int(time.time() * 1000) - 40_000,
        step_ms=10_000,
    )
    return Shop(root, query, "return-4", message["systemProperties"]["UNIQ_KEY"], message["msgId"])
