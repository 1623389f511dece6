"""The source's columns: one table for Spark's schema and Arrow's."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from messagestore import ConfigError, Message, MessageStore, StoreConfig
from messagestore.spi import COLUMNS as STORED
from pyspark_messagestore.source.schema import COLUMNS, Projection, core_schema

CORE = [
    "topic",
    "queueId",
    "queueOffset",
    "body",
    "tags",
    "keys",
    "properties",
    "bornTimestamp",
    "storeTimestamp",
    "msgId",
]


def test_the_core_columns_are_those_of_the_documents() -> None:
    assert core_schema().names == CORE
    assert all(column.stored in STORED for column in COLUMNS)


def test_batches_have_the_schema_that_spark_expects(tmp_path) -> None:
    """Spark compares the first batch's schema with its own, and refuses any difference."""
    schema = StructType().fromJson(core_schema().jsonValue())
    for column in COLUMNS:
        if not column.core:
            schema.add(column.name, column.spark_type)
    projection = Projection.of(schema)
    with MessageStore.open(tmp_path / "s", StoreConfig(max_hash_slot_num=100, max_index_num=400)) as store:
        store.put_message(Message("t", b"one", tags="x", keys=["k", "l"], properties={"a": "b"}, queue_id=0))
        store.put_message(Message("t", b"", queue_id=0))
        stored = next(iter(store.read("t", 0, 0, None, projection.stored)))
    batch = projection.converted(stored)
    assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"), check_metadata=True)
    batch.validate(full=True)
    row = batch.to_pylist()[0]
    assert (row["body"], row["tags"], row["keys"], row["properties"]) == (b"one", "x", ["k", "l"], [("a", "b")])
    assert row["bornTimestamp"].timestamp() * 1000 == pytest.approx(stored["born_timestamp_ms"][0].as_py())
    assert batch["tags"][1].as_py() is None


def test_a_projection_is_all_that_is_decoded() -> None:
    projection = Projection.of(StructType().add("queueOffset", "long").add("body", "binary"))
    assert projection.stored == ("queue_offset", "body")


def test_wrong_columns_are_named() -> None:
    with pytest.raises(ConfigError, match=r"column offset: no such column; allowed are topic, queueId"):
        Projection.of(StructType().add("offset", "long"))
    with pytest.raises(ConfigError, match=r"column body: found type string; allowed is binary"):
        Projection.of(StructType().add("body", "string"))
    with pytest.raises(ConfigError, match=r"column tags: found NOT NULL"):
        Projection.of(StructType().add("tags", "string", False))


def test_times_keep_their_milliseconds() -> None:
    projection = Projection.of(StructType().add("storeTimestamp", "timestamp"))
    stored = pa.record_batch({"store_timestamp_ms": np.array([1_700_000_000_123], np.int64)})
    assert projection.converted(stored).column(0).cast(pa.int64()).to_pylist() == [1_700_000_000_123_000]


def test_a_scan_has_the_sources_columns_and_types(tmp_path) -> None:
    every = [column.name for column in COLUMNS]
    schema = StructType([StructField(column.name, column.spark_type) for column in COLUMNS])
    with MessageStore.open(tmp_path / "s") as store:
        store.put_message(Message("t", b"one", tags="x", keys=["k"], properties={"a": "b"}, queue_id=0))
        found = store.scan("t", columns=every).read_all()
        assert store.scan("t").schema.names == core_schema().names
        stored = next(iter(store.read("t", 0, 0, None, Projection.of(schema).stored)))
    assert found.schema.equals(to_arrow_schema(schema, timezone="UTC"), check_metadata=True)
    assert found.to_pylist() == Projection.of(schema).converted(stored).to_pylist()
