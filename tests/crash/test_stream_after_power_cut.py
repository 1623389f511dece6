"""A stream has read what ASYNC_FLUSH had not synced; the power goes and takes it. The source is told, at once or when the
log has grown again: other messages have the numbers by then, and nobody must take them for those that were read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from crash.harness import APP, SMALL
from crash.imitate import Process, another_boot
from crash.simdisk import RecordingDisk
from messagestore import ASYNC_FLUSH, MessageStore, StoreWentBackwardsError
from messagestore.spi import STORES
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.readers import StreamReader
from pyspark_messagestore.source.schema import Projection

COLUMNS = Projection.of(StructType().add("queueId", "integer").add("queueOffset", "long").add("body", "binary"))
ALL = ReadAllAvailable()
ASYNC = SMALL.replace(flush_interval_commit_log=3_600_000, flush_commit_log_thorough_interval=3_600_000)


def stream(root: Path, **options: str) -> StreamReader:
    return StreamReader(source_options({"path": str(root), "subscribe": f"topic-{APP}", **options}), COLUMNS, STORES)


def delivered(reader: StreamReader, start: dict, end: dict) -> list[bytes]:
    return [
        body
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for body in batch["body"].to_pylist()
    ]


@pytest.fixture(params=["strict"])
def after_the_cut(scratch: Path, request: pytest.FixtureRequest) -> tuple[Path, dict]:
    """A store whose second, ASYNC batch a power cut took, or might have taken; and how far a stream had read it."""
    root = scratch / "store"
    root.mkdir()
    disk = RecordingDisk(root)
    p = Process(root, ASYNC, disk)
    p.batch(version=0, rows=5)
    p.batch(version=1, rows=7, flush=ASYNC_FLUSH)
    reader = stream(root, startingOffsets="earliest")
    start = reader.initialOffset()
    read_up_to = json.loads(json.dumps(reader.latestOffset(start, ALL)))
    assert len(delivered(reader, start, read_up_to)) == 12
    target = disk.image(disk.position, request.param).build(scratch / "image")
    p.die()
    return target, read_up_to


@pytest.mark.parametrize("grown", [False, True], ids=["the log is shorter", "the log has grown again"])
def test_messages_that_were_read_and_lost_are_missed(after_the_cut: tuple[Path, dict], grown: bool) -> None:
    """An error that says what to do; with failOnDataLoss=false it goes on behind the place up to which it had read."""
    root, read_up_to = after_the_cut
    with another_boot():
        if grown:
            p = Process(root)
            p.batch("other", 0, rows=3)
            for version in range(1, 4):
                p.batch(version=version, rows=10)
            p.detach()
        else:
            with MessageStore.open(root, SMALL):
                pass
        with pytest.raises(StoreWentBackwardsError, match="failOnDataLoss=false"):
            stream(root).latestOffset(read_up_to, ALL)
        lenient = stream(root, failOnDataLoss="false")
        end = json.loads(json.dumps(lenient.latestOffset(read_up_to, ALL)))
        found = delivered(lenient, read_up_to, end)
        assert len(found) == len(set(found))
        assert {body.split(b"/")[1] for body in found} == ({b"1", b"2", b"3"} if grown else set())
        assert len(found) >= (20 if grown else 0)


@pytest.mark.parametrize("after_the_cut", ["all"], indirect=True)
def test_before_a_writer_has_recovered_nothing_is_new(after_the_cut: tuple[Path, dict]) -> None:
    """All of it survived, but could be cut yet: the stream waits, without an error; then it goes on."""
    root, read_up_to = after_the_cut
    with another_boot():
        reader = stream(root)
        end = json.loads(json.dumps(reader.latestOffset(read_up_to, ALL)))
        assert delivered(reader, read_up_to, end) == []
        p = Process(root)
        p.batch(version=2, rows=4)
        p.detach()
        reader = stream(root)
        end = json.loads(json.dumps(reader.latestOffset(read_up_to, ALL)))
        assert len(delivered(reader, read_up_to, end)) == 4
