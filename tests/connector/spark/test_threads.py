"""Reads, writes and streams that are started from other Python threads than the one that made the session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark import InheritableThread
from pyspark.sql import SparkSession

from spark_runs import bodies


def _in_a_thread(kind: type[threading.Thread], action: Callable[[], None]) -> str:
    """The error of an action; empty if there is none."""
    errors: list[str] = []

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 # what a user would see is the result
            errors.append(str(error))

    thread = kind(target=run)
    thread.start()
    thread.join()
    return "".join(errors)


@pytest.fixture
def write(spark: SparkSession, tmp_path: Path) -> Callable[[], None]:
    rows = spark.createDataFrame([("a",)], "body string").coalesce(1)
    writer = rows.write.format("messagestore").mode("append").option("topic", "t")
    return lambda: writer.save(str(tmp_path / "store"))


@pytest.mark.parametrize("kind", [threading.Thread, InheritableThread])
def test_a_write_from_a_thread_finds_the_format(
    spark: SparkSession, write: Callable[[], None], tmp_path: Path, kind: type[threading.Thread]
) -> None:
    """Spark looks for Python's data sources in the thread's active session, and a new thread has none.

    `createDataFrame` gives it one; `InheritableThread` and `getOrCreate` do not. As long as the first assertion holds,
    this is a fault of Spark's, and the table of errors in docs/guides/troubleshooting.md describes it.
    """
    assert "DATA_SOURCE_NOT_FOUND" in _in_a_thread(kind, write)

    def cured() -> None:
        spark.createDataFrame([], "a int")
        write()

    assert _in_a_thread(kind, cured) == ""
    assert bodies(str(tmp_path / "store"), "t") == {"a": 1}


def test_a_pool_of_threads_writes_and_streams(spark: SparkSession, write: Callable[[], None], tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    write()

    def copy(number: int) -> None:
        rows = spark.readStream.format("messagestore").option("subscribe", "t").option("startingOffsets", "earliest")
        writer = rows.load(root).writeStream.format("messagestore").option("topic", f"copy-{number}")
        writer = writer.option("checkpointLocation", str(tmp_path / f"checkpoint-{number}"))
        writer.trigger(availableNow=True).start(root).awaitTermination()

    with ThreadPoolExecutor(2, initializer=lambda: spark.createDataFrame([], "a int")) as pool:
        list(pool.map(copy, range(2)))
    assert [bodies(root, f"copy-{number}") for number in range(2)] == [{"a": 1}] * 2
