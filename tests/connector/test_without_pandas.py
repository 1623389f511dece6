"""pandas takes 0.3 s and 40 MB of each process that imports it, and pyarrow does so unasked: nothing of ours may make it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

STORY = """
import sys
import traceback
from types import SimpleNamespace
from pyspark.sql.types import StructField, StructType
from messagestore.spi import STORES
from pyspark_messagestore.sink import writers as sink
from pyspark_messagestore.sink.columns import prepare
from pyspark_messagestore.options.table import sink_options, source_options
from pyspark_messagestore.source.schema import COLUMNS, Projection
from pyspark_messagestore.source.readers import BatchReader
import pyarrow as pa
from messagestore import Consumer, Message, MessageBatch, MessageStore
from messagestore.format.arrow_bytes import list_array
from messagestore.inspect.verify import verify

class Watch:
    stack = ""

    def find_spec(self, name, path=None, target=None):
        if name == "pandas" and not Watch.stack:
            Watch.stack = "".join(traceback.format_stack()[:-1])

def check(what):
    assert "pandas" not in sys.modules, f"{what}: pandas was imported by\\n{Watch.stack}"

sys.meta_path.insert(0, Watch())
check("import")
root = sys.argv[1]
properties = {"color": "blue"}
with MessageStore.open(root) as store:
    store.put_message(Message("t", b"one", tags="A", keys=("k", "l"), properties=properties, queue_id=0))
    two = [Message("t", b"two", keys=("k",), queue_id=0), Message("t", b"three", queue_id=0)]
    store.put_messages(MessageBatch.from_messages(two))
    check("put")
    assert len(store.query_message("t", "k")) == 2
    check("query")
    assert store.get_message("t", 0, 0, 10).messages[0].properties == properties
    check("get")

with MessageStore.open(root) as store, Consumer(root, "g", "t") as consumer:
    (found,) = consumer.poll().values()
    check("poll")
    assert [found[0].tags, found[0].keys, found[0].properties] == ["A", ("k", "l"), properties]
    check("fields")
    results = pa.table({"body": list_array([message.body for message in found], pa.binary())})
    store.append_batch(results, topic="results", queue_id=0, progress=consumer.positions())
    check("pipe")
    assert consumer.committed(("t", 0)) == 3
    assert store.scan("results").read_all().num_rows == 3
    check("scan")

task = SimpleNamespace(partitionId=lambda: 0, getLocalProperty={"sql.streaming.queryId": "q", "streaming.sql.batchId": "0"}.get)
sink.TaskContext.get = staticmethod(lambda: task)
kinds = [("body", "string"), ("keys", "array<string>"), ("tags", "string"), ("properties", "map<string,string>"), ("queueId", "int"), ("bornTimestamp", "timestamp")]
texts = pa.string()
rows = pa.record_batch({
    "body": list_array([f"row {n}" for n in range(100)], texts),
    "keys": list_array([["k", str(n)] if n % 3 else None for n in range(100)], pa.list_(texts)),
    "tags": list_array(["A", None, "B", "C"] * 25, texts),
    "properties": list_array([[("color", "red")], None] * 50, pa.map_(texts, texts)),
    "queueId": list_array([0, 1] * 50, pa.int32()),
    "bornTimestamp": list_array([1, 2] * 50, pa.int64()).view(pa.timestamp("us", "UTC")),
})
writer = sink.StreamWriter(sink.Sink.plan(sink_options({"path": root, "topic": "t"}), prepare(kinds, "t"), STORES))
message = writer.sink.stage(iter([rows, rows]))
check("staging")
writer.commit([message], 0)
check("commit")
columns = Projection.of(StructType([StructField(column.name, column.spark_type) for column in COLUMNS]))
reader = BatchReader(source_options({"path": root, "subscribe": "t"}), columns, STORES)
count = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))
assert count == 203, count
check("read")
assert verify(root).ok
check("verify")
"""


def test_nothing_imports_pandas(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STORY, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
