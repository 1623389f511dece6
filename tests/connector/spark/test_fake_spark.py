"""The fake Spark of the histories calls sink and source in the order, and in as many processes, as the real one does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spark_runs import HERE

StreamingQueryException = pytest.importorskip("pyspark.errors").StreamingQueryException


@pytest.fixture
def trace(spark, kill_plan: Path) -> Path:
    """Where the calls are written down; the name was in the environment before Spark began."""
    path = kill_plan.with_name("trace")
    path.unlink(missing_ok=True)
    return path


def calls(trace: Path) -> list[str]:
    """Names of the calls; the processes are told apart by the test that counts them."""
    return [line.rpartition(" ")[0] for line in trace.read_text().splitlines()]


def pids(trace: Path, name: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in trace.read_text().splitlines() if line.startswith(name)]


def real(spark, checkpoint: Path, *, foreach: bool) -> bool:
    """One run of a query on the real Spark; whether it ended well."""
    df = spark.readStream.format("tracing").load()
    writer = df.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    if foreach:
        writer = writer.foreachBatch(lambda batch, _: batch.write.format("tracing").mode("append").save())
    else:
        writer = writer.format("tracing")
    try:
        writer.start().awaitTermination()
    except StreamingQueryException:
        return False
    return True


def faked(monkeypatch: pytest.MonkeyPatch, checkpoint: object, *, foreach: bool) -> bool:
    """The same on the fake one."""
    import tracing

    from spark_faults import fake_spark
    from spark_faults.processes import Process

    monkeypatch.setattr(fake_spark.Driver, "kind", tracing.TracingSource)
    monkeypatch.setattr(fake_spark.Driver, "_transformed", lambda self, batches, *_: batches)
    driver = fake_spark.Driver(checkpoint, {}, {}, "", lambda _: Process(), foreach=foreach)
    try:
        for _ in driver.batches():
            pass
    except fake_spark.QueryFailedError:
        return False
    return True


@pytest.mark.parametrize("foreach", [False, True], ids=["writeStream", "foreachBatch"])
def test_the_same_calls_in_the_same_order(spark, trace, tmp_path, monkeypatch, foreach: bool) -> None:
    """A query whose first commit fails, and which is started again: three batches."""
    sys.path.insert(0, str(HERE))
    import tracing

    from spark_faults.fake_spark import Checkpoint

    spark.dataSource.register(tracing.TracingSource)
    fail = trace.with_name("trace.fail")
    found = {}
    for name in ("real", "fake"):
        checkpoint = tmp_path / name if name == "real" else Checkpoint("id")
        trace.write_text("")
        fail.touch()
        ended = []
        for _ in range(2):
            if name == "real":
                ended.append(real(spark, checkpoint, foreach=foreach))
            else:
                ended.append(faked(monkeypatch, checkpoint, foreach=foreach))
            fail.unlink(missing_ok=True)
        assert ended == [False, True]
        found[name] = calls(trace)
        if name == "real" and not foreach:
            assert set(pids(trace, "commit ")[:1]).isdisjoint(pids(trace, "abort"))
    assert found["fake"] == found["real"]
