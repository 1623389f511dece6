"""Retention of our own under Spark: a query that reads gets an error or counts the gap, and a commit without a session
deletes what has expired after it has published."""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from pathlib import Path

import pytest

from messagestore import BatchRequest, MessageStore, OffsetOutOfRangeError, StoreFullError
from messagestore.broker.retention import Retention
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify
from messagestore.log.store_files import store_host_of
from messagestore.session import AttachedStore
from messagestore.spi import ColumnTexts, Write, encode
from messagestore.spi.local import LocalWriter
from small import SMALL, bodies, columns
from stream_steps import ALL, add, again, rows, stream

EVERY_HOUR = ";".join(map(str, range(24)))


def delete(root: str, segments: int) -> int:
    """Delete segments; the first message of each queue that is left."""
    with MessageStore.open(root, SMALL) as store:
        end = store.writer.log.min_offset + segments * store.writer.log.segment_size
        assert len(store.delete_expired_files(before_offset=end).segments) == segments
        return sum(store.min_offset("t", queue_id) for queue_id in store.topics()["t"])


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "store")
    add(path, 2000, size=100)
    return path


def test_a_query_that_was_planned_gets_an_error_or_counts_the_gap(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """Segments go between planning and reading: the error has the number of what is gone, and with failOnDataLoss=false
    the numbers of the warnings and the rows that arrive are all that was planned."""
    strict, lenient = (stream(root, startingOffsets="earliest", failOnDataLoss=each) for each in ("true", "false"))
    start = again(strict.initialOffset())
    end = again(strict.latestOffset(start, ALL))
    planned = {
        reader: reader.partitions(start, end) for reader in (strict, lenient) if lenient.latestOffset(start, ALL)
    }
    gone = delete(root, 3)
    with pytest.raises(OffsetOutOfRangeError, match=r"\d+ messages from 0 on are gone"):
        rows(strict, planned[strict])
    caplog.clear()
    found = rows(lenient, planned[lenient])
    counted = [int(text) for record in caplog.records for text in re.findall(r"(\d+) messages", record.getMessage())]
    assert len(found) == 2000 - gone
    assert sum(counted) == gone


def test_a_query_goes_on_behind_a_gap_that_it_counts(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """It was stopped meanwhile, and its next messages are gone."""
    reader = stream(root, startingOffsets="earliest", failOnDataLoss="false")
    start = again(reader.initialOffset())
    gone = delete(root, 3)
    caplog.set_level(logging.WARNING)
    end = again(reader.latestOffset(start, ALL))
    found = rows(reader, reader.partitions(start, end))
    counted = [int(text) for record in caplog.records for text in re.findall(r"(\d+) messages", record.getMessage())]
    assert (len(found), sum(counted)) == (2000 - gone, gone)
    strict = stream(root, startingOffsets="earliest")
    with pytest.raises(OffsetOutOfRangeError, match="500 messages are gone"):
        strict.latestOffset(start, ALL)


# ---- the sink


class Sink:
    """Commits batches without a session, as Spark's driver does."""

    def __init__(self, root: str, disk: Disk | None = None, **settings: object) -> None:
        self.config = SMALL.replace(clean_resource_interval=0, attach_timeout="1h", **settings)
        self.store = AttachedStore(root, self.config, disk or Disk())
        self.writer = LocalWriter(
            root, self.config, staging_ttl_s=3600.0, disk=disk, attached=lambda _path, _config: self.store
        )
        self.versions = itertools.count()

    def commit(self, count: int = 100, version: int | None = None) -> str:
        version = next(self.versions) if version is None else version
        store_id, host = self.writer.prepare().store_id, store_host_of(self.config)
        with self.writer.stage(Write("0", f"{time.monotonic_ns()}"), store_id) as staging:
            texts = ColumnTexts(columns(bodies(count, 200, 1000 * version)))
            staging.write(encode(texts, limits=self.config, store_host=host, born_host=host))
            file = staging.finish()
        request = BatchRequest("app", version, version_source="spark")
        return self.writer.commit([file], request, store_id).result.status


def segments(root: str) -> list[Path]:
    return sorted(Path(root, "commitlog").iterdir())


def age(root: str, count: int) -> None:
    for path in segments(root)[:count]:
        os.utime(path, (time.time() - 100 * 3600,) * 2)


def test_a_commit_deletes_what_has_expired_and_the_batch_stays_known(tmp_path: Path) -> None:
    """There is no session. The commit publishes first; what it deletes is gone when it returns."""
    root = str(tmp_path / "store")
    sink = Sink(root, file_reserved_time=72)
    while len(segments(root) if Path(root).exists() else ()) < 4:
        sink.commit()
    last = next(sink.versions) - 1
    sink.versions = itertools.count(last + 1)
    age(root, 3)
    begin = int(segments(root)[3].name)
    assert sink.commit(version=last) == "known"
    assert int(segments(root)[0].name) == begin
    assert sink.commit(version=last) == "known"
    assert sink.commit() == "appended"
    sink.store.detach()
    assert verify(root, SMALL).findings == []


def test_a_commit_stands_when_retention_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The batch is in the log; what failed is logged once, and tried again with the next commit."""
    root = str(tmp_path / "store")
    sink = Sink(root, file_reserved_time=0, delete_when=EVERY_HOUR)
    for _ in range(4):
        sink.commit()
    begin = int(segments(root)[0].name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Retention, "_delete_segments", lambda *_: (_ for _ in ()).throw(OSError(5, "no such luck")))
        assert [sink.commit() for _ in range(2)] == ["appended", "appended"]
    assert caplog.text.count("retention could not run") == 1
    assert int(segments(root)[0].name) == begin
    sink.commit()
    assert int(segments(root)[0].name) > begin
    sink.store.detach()
    assert verify(root, SMALL).findings == []


def test_a_commit_on_a_disk_that_is_nearly_full_is_refused_after_a_try_to_make_room(tmp_path: Path) -> None:
    class FullDisk(Disk):
        percent = 10

        def used_percent(self, path: object) -> int:
            return self.percent

    root, disk = str(tmp_path / "store"), FullDisk()
    sink = Sink(root, disk, file_reserved_time=1000)
    for _ in range(4):
        sink.commit()
    disk.percent = 95
    assert sink.commit() == "appended", "nobody has looked at the disk yet"
    assert len(segments(root)) == 1, "the oldest ones went at once"
    with pytest.raises(StoreFullError, match="the disk is 95 % full"):
        sink.commit(version=5)
    disk.percent = 60
    assert sink.commit(version=5) == "appended", "the refusal looks again"
    sink.store.detach()
