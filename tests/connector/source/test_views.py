"""Frames that say what a store contains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StructType

from messagestore import BatchRequest, ConfigError, MessageStore, NotAStoreError
from messagestore.files.consumer_offsets import publish_offsets
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.source.views import VIEWS
from small import SMALL, bodies, columns, filled


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = filled(tmp_path / "store", 60)
    with MessageStore.open(path, SMALL) as store:
        for version in range(3):
            store.append_batch(columns(bodies(100), topic="u"), BatchRequest(app_id="app", version=version))
    publish_offsets(str(path), "g", {("t", 0): 7})
    return str(path)


def rows(root: str, view: str, schema: StructType | None = None, **options: str) -> list[dict]:
    source = MessageStoreDataSource({"path": root, "view": view, **options})
    reader = source.reader(schema or source.schema())
    (partition,) = reader.partitions()
    return [row for each in reader.read(partition) for row in each.to_pylist()]


def test_topics(root: str) -> None:
    found = {row["topic"]: row for row in rows(root, "topics")}
    assert {name: (row["queues"], row["messages"], row["writeQueueNums"]) for name, row in found.items()} == {
        "t": (2, 60, 8),
        "u": (2, 300, 8),
    }


def test_queues(root: str) -> None:
    found = {(row["topic"], row["queueId"]): row for row in rows(root, "queues")}
    assert {queue: (row["minOffset"], row["maxOffset"]) for queue, row in found.items()} == {
        ("t", 0): (0, 30),
        ("t", 1): (0, 30),
        ("u", 0): (0, 150),
        ("u", 1): (0, 150),
    }


def test_segments(root: str) -> None:
    found = rows(root, "segments")
    assert [row["file"] for row in found] == sorted(str(path) for path in (Path(root) / "commitlog").iterdir())
    assert [row["endPhysicalOffset"] - row["firstPhysicalOffset"] for row in found] == [16384] * len(found)
    times = [row["firstStoreTimestamp"] for row in found]
    assert times == sorted(times)
    assert times[0].year >= 2020


def test_groups(root: str) -> None:
    (row,) = [row for row in rows(root, "groups") if row["queueId"] == 0]
    assert (row["group"], row["topic"], row["committedOffset"], row["lag"]) == ("g", "t", 7, 23)


def test_batches(root: str) -> None:
    found = rows(root, "batches")
    assert [(row["app"], row["version"], row["rows"], row["topics"]) for row in found] == [
        ("app", version, 100, ["u"]) for version in range(3)
    ]
    assert all(row["physicalOffset"] < row["endPhysicalOffset"] for row in found)


def test_some_columns_of_a_view(root: str) -> None:
    assert rows(root, "queues", StructType().add("maxOffset", "long"))[0] == {"maxOffset": 30}
    with pytest.raises(ConfigError, match="schema: column body: no such column of type binary; the view queues has"):
        rows(root, "queues", StructType().add("body", "binary"))


def test_wrong_uses(root: str) -> None:
    with pytest.raises(ConfigError, match="option view: found 'files'; allowed is messages or topics or"):
        rows(root, "files")
    for name, value in (("subscribe", "t"), ("startingTimestamp", "-1h"), ("keys", "k"), ("endingOffsets", "latest")):
        with pytest.raises(ConfigError, match=f"option {name}: is for messages, but this reads view=topics"):
            rows(root, "topics", **{name: value})
    with pytest.raises(ConfigError, match="option view: found queues, but this is a stream"):
        MessageStoreDataSource({"path": root, "view": "queues"}).streamReader(VIEWS["queues"]).initialOffset()
    shutil.rmtree(root)
    with pytest.raises(NotAStoreError):
        rows(root, "queues")


def test_an_empty_view(tmp_path: Path) -> None:
    root = str(filled(tmp_path / "store", 2))
    assert rows(root, "batches") == []
    assert rows(root, "groups") == []
