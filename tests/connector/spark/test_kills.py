"""kill -9 of tasks, of the commit process, of executors and of the driver: each row is in the store once afterwards."""

from __future__ import annotations

from contextlib import suppress

import pytest

from spark_runs import bodies, fill, run_job

StreamingQueryException = pytest.importorskip("pyspark.errors").StreamingQueryException
COUNT = 1000


def stream(spark, root: str, checkpoint: str) -> None:
    import job
    import killing

    spark.dataSource.register(killing.KillingSource)
    job.copy(spark, root, checkpoint, "killing")


@pytest.mark.parametrize("place", ["task", "staged-half", "staged"])
def test_a_killed_task_is_tried_again(spark, kill_plan, root, tmp_path, place: str):
    """Spark starts the task again in the same query; what the first attempt staged is ignored."""
    fill(root, COUNT)
    kill_plan.write_text(f"{place} self 1")
    stream(spark, root, str(tmp_path / "checkpoint"))
    assert not kill_plan.exists()
    assert bodies(root, "copy") == bodies(root, "flights")


@pytest.mark.parametrize("place", ["commit", "locked", "data", "sealed", "published", "returned"])
def test_a_killed_commit_is_made_good_on_restart(spark, kill_plan, root, tmp_path, place: str):
    """The query fails, Spark calls abort in another process, the query is started again and writes the batch again:
    before the commit point it is new, behind it it is known."""
    fill(root, COUNT)
    kill_plan.write_text(f"{place} self 1")
    with suppress(StreamingQueryException):  # behind the commit point Spark may try the call again by itself
        stream(spark, root, str(tmp_path / "checkpoint"))
    assert not kill_plan.exists()
    stream(spark, root, str(tmp_path / "checkpoint"))
    found = bodies(root, "copy")
    assert found == bodies(root, "flights")
    assert set(found.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["task", "locked", "sealed", "returned"])
def test_a_killed_driver_starts_again(tmp_path, place: str):
    """The JVM and all its children are killed at once; the job is started anew on the same checkpoint."""
    root, plan = str(tmp_path / "store"), tmp_path / "plan"
    fill(root, COUNT)
    plan.write_text(f"{place} JVM 1")
    args = ("job.py", "local[2]", root, tmp_path / "checkpoint", "killing")
    first = run_job(*args, cwd=tmp_path, MESSAGESTORE_KILL_PLAN=str(plan))
    assert '"done"' not in first.stdout
    assert not plan.exists(), first.stderr[-4000:]
    second = run_job(*args, cwd=tmp_path, MESSAGESTORE_KILL_PLAN=str(plan))
    assert '"done"' in second.stdout, second.stderr[-4000:]
    assert bodies(root, "copy") == bodies(root, "flights")


@pytest.mark.slow
def test_messages_that_arrive_after_the_query_began_are_not_lost_when_its_first_batch_is_killed(tmp_path):
    """The query begins at `latest`, and the topic is empty then. The driver is killed when offsets/0 is written and
    commits/0 is not. Spark asks twice before the kill where the query begins, and again after it; messages arrive after
    the first two answers, and all of them are copied."""
    root, plan = str(tmp_path / "store"), tmp_path / "plan"
    fill(root, 0)
    plan.write_text("offsets JVM 1")
    args = ("job.py", "local[2]", root, tmp_path / "checkpoint", "killing", "latest")
    first = run_job(*args, cwd=tmp_path, MESSAGESTORE_KILL_PLAN=str(plan))
    assert '"done"' not in first.stdout
    assert not plan.exists(), first.stderr[-4000:]
    assert (tmp_path / "checkpoint" / "offsets" / "0").exists()
    assert not (tmp_path / "checkpoint" / "commits" / "0").exists()
    second = run_job(*args, cwd=tmp_path, MESSAGESTORE_KILL_PLAN=str(plan))
    assert '"done"' in second.stdout, second.stderr[-4000:]
    assert sum(bodies(root, "flights").values()) == 500
    assert bodies(root, "copy") == bodies(root, "flights")


@pytest.mark.slow
def test_a_killed_executor_is_replaced(tmp_path):
    """The executor's JVM dies with its workers in the middle of a task; another executor runs the task again."""
    root, plan = str(tmp_path / "store"), tmp_path / "plan"
    fill(root, COUNT)
    plan.write_text("staged-half executor 1")
    done = run_job(
        *("job.py", "local-cluster[2,1,1024]", root, tmp_path / "checkpoint", "killing"),
        cwd=tmp_path,
        MESSAGESTORE_KILL_PLAN=str(plan),
    )
    assert not plan.exists(), done.stderr[-4000:]
    assert '"done"' in done.stdout, done.stderr[-4000:]
    assert bodies(root, "copy") == bodies(root, "flights")
