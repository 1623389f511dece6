"""What the tests of the connector need to run Spark, and to look into stores without it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "connector" / "spark"
HOME = Path(sys.prefix, "spark")
CLASSES = HOME / "classes.jsa"
"""Where `spark_home.py` has been run: Spark, and its classes, so that they start fast."""
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # short programs: half the CPU
QUIET = "-Xlog:disable -Xlog:all=off"
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
    if not java or not os.access(java, os.X_OK):
        return "no Java found: install a JRE 17 or newer, or set JAVA_HOME"
    modules = subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=False)
    if "jdk.incubator.vector" not in modules.stdout:
        return f"{java} has no module jdk.incubator.vector: a full JRE 17 or newer is needed"
    return None


def environment() -> dict[str, str]:
    """For this process and for children: Spark's workers are this Python, and find the tests' own modules."""
    paths = [str(HERE), str(ROOT / "faults"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    home = {"SPARK_HOME": str(HOME)} if HOME.exists() else {}
    return {
        **home,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JDK_JAVA_OPTIONS": f"{JAVA_OPTIONS} -XX:SharedArchiveFile={CLASSES} {QUIET}"
        if CLASSES.exists()
        else JAVA_OPTIONS,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


@contextlib.contextmanager
def session(master: str, **settings: str) -> Iterator[Any]:
    """A classic session of this process."""
    os.environ.update(environment())
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    for key, value in {**SESSION, **settings}.items():
        builder = builder.config(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spark = builder.getOrCreate()
        yield spark
        spark.stop()


def run_job(
    name: str, *args: object, cwd: Path, timeout_s: float = 900, **env: str
) -> subprocess.CompletedProcess[str]:
    """A script of this folder in a process of its own; Spark leaves folders where it runs, in `cwd`."""
    return subprocess.run(
        [sys.executable, str(HERE / name), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **environment(), **env},
        cwd=cwd,
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


def closed(root: str, timeout_s: float = 120) -> bool:
    """Whether a store is left closed: the worker of the commits ends a moment after the JVM."""
    until_s = time.monotonic() + timeout_s
    while (found := os.path.exists(f"{root}/abort")) and time.monotonic() < until_s:
        time.sleep(0.05)
    return not found


def in_order(root: str, topic: str) -> bool:
    """Whether the rows of `fill` that came from one queue follow each other in order, in each queue of a topic."""
    from messagestore import MessageStore

    with MessageStore.open_read_only(root) as store:
        for queue_id in store.topics().get(topic, []):
            last = dict.fromkeys(range(4), -1)
            for batch in store.read(topic, queue_id, 0):
                for number in map(int, batch.column("body").to_pylist()):
                    if number <= last[number % 4]:
                        return False
                    last[number % 4] = number
    return True


def fill(root: str, count: int, topic: str = "flights", *, first: int = 0, **config: object) -> None:
    """A store with `count` messages more, made without Spark; their bodies are numbers from `first` on."""
    import pyarrow as pa

    from messagestore import MessageColumns, MessageStore, StoreConfig

    small = {"mapped_file_size_commit_log": 1 << 22, "max_hash_slot_num": 1000, "max_index_num": 4000, **config}
    with MessageStore.open(root, StoreConfig(**small)) as store:
        store.create_topic(topic, 4)
        batch = pa.record_batch(
            {
                "body": [f"{i}" for i in range(first, first + count)],
                "keys": [[f"k{i % 17}"] for i in range(first, first + count)],
                "queue_id": pa.array([i % 4 for i in range(first, first + count)], pa.int32()),
            }
        )
        store.append_batch(MessageColumns.from_arrow(batch, topic=topic))
