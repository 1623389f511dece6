"""A query's progress as a consumer group's: what is published when, and what happens when it cannot be."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from messagestore import ConfigError, CorruptionError, StoreLockedError, StoreWentBackwardsError
from messagestore.files.consumer_offsets import ConsumerOffsets
from messagestore.files.disk import Disk
from messagestore.spi import LOCAL_STORES, LocalStores
from pyspark_messagestore.datasource import MessageStoreDataSource
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source import progress
from pyspark_messagestore.source.progress import GroupProgress
from pyspark_messagestore.source.readers import StreamReader
from pyspark_messagestore.source.schema import Projection, core_schema
from small import filled

ALL = ReadAllAvailable()
BODY = Projection.of(StructType().add("body", "binary"))


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(filled(tmp_path / "store", 40))


def stream(root: str, stores: LocalStores = LOCAL_STORES, **options: str) -> StreamReader:
    given = {"path": root, "subscribe": "t", "startingOffsets": "earliest", "consumerGroup": "g", **options}
    return StreamReader(source_options(given), BODY, stores)


class Refusing(LocalStores):
    """Stores that publish no progress: `error` is raised, or nothing happens."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls: list[tuple[object, ...]] = []

    def reader(self, *arguments, **options):
        reader = super().reader(*arguments, **options)
        reader.publish_progress = self.publish_progress
        return reader

    def publish_progress(self, *arguments: object) -> None:
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error


@pytest.fixture
def refusing() -> Refusing:
    return Refusing()


def again(offset: dict) -> dict:
    """As it comes back from Spark."""
    return json.loads(json.dumps(offset))


def committed(root: str, group: str = "g", topic: str = "t") -> dict[int, int]:
    offsets = ConsumerOffsets(Disk(), root)
    offsets.load()
    return offsets.get(topic, group)


def test_what_is_done_is_published(root: str) -> None:
    """Where a new query begins; then each micro-batch once Spark says that it is done, the last one, too."""
    reader = stream(root)
    start = again(reader.initialOffset())
    assert committed(root) == {}
    middle = again(reader.latestOffset(start, ReadMaxRows(10)))
    assert committed(root) == {0: 0, 1: 0}
    reader.partitions(start, middle)
    assert committed(root) == {0: 0, 1: 0}, "planned is not done"
    end = again(reader.latestOffset(middle, ALL))
    assert committed(root) == {0: 5, 1: 5}
    assert reader.latestOffset(end, ALL) == end
    assert committed(root) == {0: 20, 1: 20}
    reader.commit(end)
    reader.stop()
    assert committed(root) == {0: 20, 1: 20}


def test_without_the_option_nothing_is_written(root: str) -> None:
    """Reading stays reading."""
    reader = StreamReader(
        source_options({"path": root, "subscribe": "t", "startingOffsets": "earliest"}), BODY, LOCAL_STORES
    )
    reader.latestOffset(again(reader.latestOffset(again(reader.initialOffset()), ALL)), ALL)
    assert not (Path(root) / "config" / "consumerOffset.json").exists()


def test_it_is_never_read(root: str) -> None:
    """A group that is somewhere else does not move a query."""
    other = stream(root, startingOffsets="latest")
    other.latestOffset(again(other.initialOffset()), ALL)
    assert committed(root) == {0: 20, 1: 20}
    reader = stream(root)
    assert reader.initialOffset()["queues"] == {"t": {"0": 0, "1": 0}}


def test_an_idle_query_writes_once(root: str, refusing: Refusing) -> None:
    """Spark asks ninety times a second."""
    reader = stream(root, refusing)
    end = again(reader.latestOffset(again(reader.initialOffset()), ALL))
    for _ in range(100):
        reader.latestOffset(again(end), ALL)
    assert len(refusing.calls) == 2
    assert refusing.calls[1] == ("g", {("t", 0): 20, ("t", 1): 20})


def test_progress_in_another_store_is_not_published(root: str, tmp_path: Path) -> None:
    """The checkpoint is of another store: its offsets mean nothing here."""
    reader = stream(root)
    end = again(reader.latestOffset(again(reader.initialOffset()), ALL))
    other = str(filled(tmp_path / "other", 40))
    with pytest.raises(StoreWentBackwardsError):
        stream(other).latestOffset(end, ALL)
    assert committed(other) == {}


# ---- when it cannot be


@pytest.mark.parametrize(
    "error",
    [
        StoreLockedError("held by a broker", path="lock", holder="a broker"),
        CorruptionError("consumerOffset.json", 0, "a table", "a hole"),
        OSError(errno.EROFS, os.strerror(errno.EROFS), "consumerOffset.json"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "consumerOffset.json"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_published_is_told_once(
    root: str, refusing: Refusing, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The query goes on, whatever it is; the warning names group and cause."""
    refusing.error = error
    reader = stream(root, refusing)
    offset = again(reader.initialOffset())
    for most in (10, 10, 10):
        offset = again(reader.latestOffset(offset, ReadMaxRows(most)))
    assert len(refusing.calls) == 3
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "consumer group g: its progress cannot be published" in told.getMessage()
    assert str(error) in told.getMessage()
    assert "The query continues and tries again" in told.getMessage()


def test_each_kind_is_told_and_told_again_after_it_went_well(
    refusing: Refusing, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a trouble, not one a micro-batch; a trouble that comes back is a new one."""
    group = GroupProgress("g")
    full, read_only = OSError(errno.ENOSPC, "full"), OSError(errno.EROFS, "read-only")
    for number, error in enumerate([full, read_only, full, read_only, None, full, full]):
        refusing.error = error
        group.publish(
            refusing, {"formatVersion": 1, "storeId": "", "last": None, "physicalOffset": number, "queues": {}}
        )
    assert [str(record.args[1]) for record in caplog.records] == [
        "[Errno 28] full",
        "[Errno 30] read-only",
        "[Errno 28] full",
    ]


def test_an_idle_query_tries_again(refusing: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the broker is gone the last offsets get published, without another message."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    group = GroupProgress("g")
    start = {"formatVersion": 1, "storeId": "", "last": None, "physicalOffset": 7, "queues": {}}
    refusing.error = OSError(errno.ENOSPC, "full")
    group.publish(refusing, start)
    group.publish(refusing, start)
    assert len(refusing.calls) == 1
    now[0] += progress.RETRY_S
    refusing.error = None
    for _ in range(3):
        group.publish(refusing, start)
    assert len(refusing.calls) == 2


# ---- the option


def test_the_option_and_its_alias(root: str) -> None:
    for name in ("consumerGroup", "group"):
        assert source_options({"path": root, "subscribe": "t", name: "a-b_c%|9"}).consumer_group == "a-b_c%|9"
    assert source_options({"path": root, "subscribe": "t"}).consumer_group is None


@pytest.mark.parametrize("group", ["", "a b", "a@b", "x" * 256, "CID_RMQ_SYS_TRANS"])
def test_groups_that_rocketmq_does_not_allow(root: str, group: str) -> None:
    with pytest.raises(ConfigError, match=r"option consumerGroup: found .*; allowed is a consumer group"):
        source_options({"path": root, "subscribe": "t", "group": group})


def test_it_is_for_streams(root: str) -> None:
    """A batch read has no progress; `committed` asks for the offsets of a group."""
    source = MessageStoreDataSource(options={"path": root, "subscribe": "t", "consumerGroup": "g"})
    with pytest.raises(ConfigError, match="option consumerGroup: is for streams, but this is a batch read"):
        source.reader(core_schema())
    with pytest.raises(ConfigError, match="option startingOffsets: found committed without consumerGroup"):
        source_options({"path": root, "subscribe": "t", "startingOffsets": "committed"})
