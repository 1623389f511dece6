"""The sink and the source on every kind of session."""

from __future__ import annotations

import pytest

from messagestore import MessageStore
from pyspark_messagestore import MessageStoreSink
from spark_runs import bodies, closed, fill, run_job


# The quick form of `local[2]` and `remote` is in test_servers.py: the same job on both, with one checkpoint.
@pytest.mark.parametrize(
    "master",
    [
        pytest.param("local[2]", marks=pytest.mark.slow),
        "local-cluster[2,1,1024]",
        pytest.param("remote", marks=pytest.mark.slow),
    ],
)
def test_streams_through_sink_and_source(tmp_path, request, master: str):
    """A store is read as a stream and written back to another topic, found by name alone, with nothing registered."""
    if master == "remote":
        request.getfixturevalue("connect_port")
    root = str(tmp_path / "store")
    fill(root, 1000)
    done = run_job("job.py", master, root, tmp_path / "checkpoint", cwd=tmp_path)
    assert '{"done": true}' in done.stdout, done.stderr[-4000:]
    assert bodies(root, "copy") == bodies(root, "flights")
    assert len(bodies(root, "copy")) == 1000
    assert closed(root), "the stream left the store open"


def test_a_batch_write_leaves_a_store_that_is_closed(spark, tmp_path):
    """Spark kills the worker of the commit when the job is over: the store is closed before, and a broker finds it so.
    The next write goes on."""
    root = tmp_path / "store"
    for count in (1, 2):
        frame = spark.range(10).selectExpr("cast(id as string) as body")
        frame.write.format("messagestore").mode("append").option("topic", "t").save(str(root))
        assert not (root / "abort").exists()
        assert sum(bodies(str(root), "t").values()) == 10 * count


def test_output_mode_update_and_dead_letters(spark, tmp_path):
    """Spark refuses `update` for a sink in Python; `foreachBatch` takes it, with all options of the sink."""
    root, copy = str(tmp_path / "store"), str(tmp_path / "copy")
    rows = spark.range(12).selectExpr("IF(id = 7, NULL, CAST(id % 3 AS STRING)) AS body", "array('k') AS keys")
    rows.write.format("messagestore").mode("append").options(
        topic="t", invalidRows="deadLetter", deadLetterTopic="dead", uniqKey="true", brokerClusterName="north"
    ).save(root)
    assert sum(bodies(root, "t").values()) == 11
    assert sum(bodies(root, "dead").values()) == 1
    named = spark.read.format("messagestore").schema("systemProperties map<string, string>")
    named = named.option("subscribe", "t,dead").load(root)
    assert named.where("systemProperties['CLUSTER'] = 'north'").count() == 12
    stream = spark.readStream.format("messagestore").option("subscribe", "t").option("startingOffsets", "earliest")
    counts = stream.load(root).groupBy("body").count()
    updates = counts.selectExpr("body", "CAST(count AS STRING) AS n", "count AS ignored")
    sink = MessageStoreSink(copy, topic="counts", app_id="counts", unknown_columns="properties")
    query = updates.writeStream.outputMode("update").foreachBatch(sink)
    query.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    with MessageStore.open_read_only(copy) as store:
        found = [m for q in store.topics()["counts"] for m in store.get_message("counts", q, 0, max_count=10).messages]
    assert {m.body: m.properties for m in found} == {
        b"0": {"n": "4", "ignored": "4"},
        b"1": {"n": "3", "ignored": "3"},
        b"2": {"n": "4", "ignored": "4"},
    }
