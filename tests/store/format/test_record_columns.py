"""One name for both directions."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from messagestore.format import record_columns
from messagestore.format.config import StoreConfig
from messagestore.format.hosts import pack_host


def test_what_other_modules_use() -> None:
    """The names that the layers above import."""
    wanted = {
        "COLUMNS",
        "DIGEST_NAME",
        "Expected",
        "MessageColumns",
        "Rows",
        "decode",
        "encode",
        "row_hashes",
        "stamp",
        "stamp_rows",
        "stamped",
    }
    assert wanted <= set(record_columns.__all__)
    assert all(hasattr(record_columns, name) for name in record_columns.__all__)


def test_what_was_read_can_be_written_again() -> None:
    """Body, topic, tags, keys, properties, flag and times of a read batch: the same records, and the same digest."""
    n = 7
    text_map = pa.map_(pa.string(), pa.string())
    table = pa.table(
        {
            "topic": [f"T{i % 2}" for i in range(n)],
            "body": pa.array([b"b%d" % i for i in range(n)]),
            "keys": pa.array([[f"k{i}", "x"] if i % 3 else None for i in range(n)], pa.list_(pa.string())),
            "tags": pa.array([f"t{i}" if i % 2 else None for i in range(n)]),
            "properties": pa.array([[("a", f"{i}")] if i % 2 else [] for i in range(n)], text_map),
            "queue_id": pa.array([i % 2 for i in range(n)], pa.int32()),
            "born_timestamp_ms": pa.array(range(n), pa.int64()),
            "flag": pa.array(range(n), pa.int32()),
        }
    )
    host = pack_host("10.1.2.3:10911")

    def written(columns: pa.Table | pa.RecordBatch) -> record_columns.Rows:
        messages = record_columns.MessageColumns.from_arrow(columns)
        return record_columns.encode(messages, limits=StoreConfig(), store_host=host, born_host=host)

    first = written(table)
    sizes = np.diff(first.starts).astype(np.int32)
    read = record_columns.decode(first.data, first.starts[:-1], sizes, table.schema.names)
    second = written(read)
    assert second.data.tobytes() == first.data.tobytes()
    assert second.digest == first.digest
    assert second.key_hashes.tolist() == first.key_hashes.tolist()
