"""The sink and the source on every kind of session."""

from __future__ import annotations

import os
import time

import pytest

from spark_runs import bodies, fill, run_job


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]", "remote"])
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
    until_s = time.monotonic() + 120
    while os.path.exists(f"{root}/abort") and time.monotonic() < until_s:
        time.sleep(0.05)  # the worker of the commits ends a moment after the JVM
    assert not os.path.exists(f"{root}/abort"), "the stream left the store open"


def test_a_batch_write_leaves_a_store_that_is_closed(spark, tmp_path):
    """Spark kills the worker of the commit when the job is over: the store is closed before, and a broker finds it so.
    The next write goes on."""
    root = tmp_path / "store"
    for count in (1, 2):
        frame = spark.range(10).selectExpr("cast(id as string) as body")
        frame.write.format("messagestore").mode("append").option("topic", "t").save(str(root))
        assert not (root / "abort").exists()
        assert sum(bodies(str(root), "t").values()) == 10 * count
