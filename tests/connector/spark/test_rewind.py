"""A real query, stopped, rewound with `messagestore checkpoint rewind`, and started again from the copy."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cli_runs import objects, run
from spark_runs import bodies, fill

PROVIDERS = "org.apache.spark.sql.execution.streaming.state."
STATE = {
    "hdfs": {},
    "rocksdb": {"spark.sql.streaming.stateStore.providerClass": PROVIDERS + "RocksDBStateStoreProvider"},
    "rocksdb, changes, ids": {
        "spark.sql.streaming.stateStore.providerClass": PROVIDERS + "RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    },
}


def copying(spark: Any, source: str, sink: str, checkpoint: Path, *, distinct: bool = False) -> None:
    """Copy a topic in batches of 1,000 until its end; with state if the rows must be distinct."""
    df = (
        spark.readStream.format("messagestore")
        .option("subscribe", "flights")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 1000)
        .load(source)
        .select("body")
    )
    query = (
        (df.dropDuplicates(["body"]) if distinct else df)
        .writeStream.format("messagestore")
        .option("topic", "copy")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(sink)
    )
    query.awaitTermination()


def test_a_restored_backup_and_the_rewind_that_the_error_names(spark: Any, tmp_path: Path) -> None:
    """The sink's store is a backup without the last batches: the error says what to type, and typing it brings all back."""
    source, sink, backup = (str(tmp_path / name) for name in ("source", "sink", "backup"))
    checkpoint = tmp_path / "checkpoint"
    fill(source, 2000)
    copying(spark, source, sink, checkpoint)
    shutil.copytree(sink, backup)
    fill(source, 3000)
    copying(spark, source, sink, checkpoint)
    expected = bodies(source, "flights")
    assert bodies(sink, "copy") == expected
    shutil.rmtree(sink)
    shutil.copytree(backup, sink)
    fill(source, 1000)
    with pytest.raises(Exception, match="not in the store") as raised:
        copying(spark, source, sink, checkpoint)
    found = re.search(r"messagestore (checkpoint rewind) CHECKPOINT (\d+) --to NEW_FOLDER", str(raised.value))
    assert found is not None
    run(*found[1].split(), checkpoint, found[2], "--to", tmp_path / "copy")
    copying(spark, source, sink, tmp_path / "copy")
    assert bodies(sink, "copy") == bodies(source, "flights")
    assert sum(row["lag"] for row in objects(run("lag", source, "--checkpoint", tmp_path / "copy", "--json"))) == 0
    assert sum(row["lag"] for row in objects(run("lag", source, "--checkpoint", checkpoint, "--json"))) == 1000


@pytest.mark.parametrize("provider", STATE)
def test_a_query_with_state_is_rewound_with_its_state(spark: Any, tmp_path: Path, provider: str) -> None:
    """Each row passes once. With the state of later batches, the batches that run again would be empty, and the sink,
    which holds them, would refuse them as other rows; with the right state it knows them, and nothing is doubled.
    """
    source, sink, checkpoint = str(tmp_path / "source"), str(tmp_path / "sink"), tmp_path / "checkpoint"
    fill(source, 4000)
    for key, value in STATE[provider].items():
        spark.conf.set(key, value)
    try:
        copying(spark, source, sink, checkpoint, distinct=True)
        expected = Counter(map(str, range(4000)))
        assert bodies(sink, "copy") == expected
        (app,) = objects(run("batches", sink, "--json"))
        run("checkpoint", "rewind", checkpoint, 2, "--to", tmp_path / "copy")
        copying(spark, source, sink, tmp_path / "copy", distinct=True)
        assert bodies(sink, "copy") == expected
        assert objects(run("batches", sink, "--json")) == [app]
        fill(source, 1000)  # the same bodies as those of the first batch: state from before the rewind knows them
        copying(spark, source, sink, tmp_path / "copy", distinct=True)
        assert bodies(sink, "copy") == expected
    finally:
        for key in STATE[provider]:
            spark.conf.unset(key)
