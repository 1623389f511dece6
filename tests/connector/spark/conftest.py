"""What the Spark tests share: one classic session for all of them, and stores that are easy to look into."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
SESSION = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.adaptive.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
}


def why_not() -> str | None:
    """Why Spark cannot run here, or None."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed (extra `spark`)"
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else shutil.which("java")
    if not java:
        return "no Java found: install a JRE 17 or newer, or set JAVA_HOME"
    modules = subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=False)
    if "jdk.incubator.vector" not in modules.stdout:
        return f"{java} has no module jdk.incubator.vector: a full JRE 17 or newer is needed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are marked `spark`, and skipped, with the reason, where Spark cannot run."""
    mine = [item for item in items if HERE in Path(item.path).parents]
    reason = why_not() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.spark)
        item.add_marker(pytest.mark.filterwarnings("default::ResourceWarning"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def environment() -> dict[str, str]:
    """For this process and for children: Spark's workers are this Python, and find the tests' own modules."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


@pytest.fixture(scope="session")
def kill_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says which process is to be killed where (killing.py); known to all of Spark's processes."""
    return tmp_path_factory.mktemp("kill") / "plan"


@pytest.fixture(scope="session")
def spark(kill_plan: Path) -> Iterator[object]:
    """A classic session, `local[2]` with tasks that may be tried four times."""
    os.environ.update(environment(), MESSAGESTORE_KILL_PLAN=str(kill_plan))
    sys.path.insert(0, str(HERE))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2,4]")
    for key, value in SESSION.items():
        builder = builder.config(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = builder.getOrCreate()
        yield session
        session.stop()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def run_job(name: str, *args: object, timeout_s: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """A script of this folder in a process of its own."""
    return subprocess.run(
        [sys.executable, str(HERE / name), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **environment(), **env},
        cwd=ROOT,
    )


def bodies(root: str, topic: str) -> Counter[str]:
    """The bodies of a topic, read without Spark; each queue must be whole and in order."""
    from messagestore import MessageStore

    found: Counter[str] = Counter()
    with MessageStore.open_read_only(root) as store:
        for queue_id in store.topics().get(topic, []):
            number = 0
            for batch in store.read(topic, queue_id, 0):
                assert batch.column("queue_offset").to_pylist() == list(range(number, number + batch.num_rows))
                number += batch.num_rows
                found.update(body.decode() for body in batch.column("body").to_pylist())
    return found


def fill(root: str, count: int, topic: str = "flights", **config: object) -> None:
    """A store with `count` messages, made without Spark."""
    import pyarrow as pa

    from messagestore import MessageColumns, MessageStore, StoreConfig

    small = {"mapped_file_size_commit_log": 1 << 22, "max_hash_slot_num": 1000, "max_index_num": 4000, **config}
    with MessageStore.open(root, StoreConfig(**small)) as store:
        store.create_topic(topic, 4)
        batch = pa.record_batch(
            {
                "body": [f"{i}" for i in range(count)],
                "keys": [[f"k{i % 17}"] for i in range(count)],
                "queue_id": pa.array([i % 4 for i in range(count)], pa.int32()),
            }
        )
        store.append_batch(MessageColumns.from_arrow(batch, topic=topic))
