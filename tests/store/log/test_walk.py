"""The walk over the records of the log: what it gives, where it stops, and what it jumps over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from messagestore import BatchRequest, CorruptionError, Message, MessageStore, StoreConfig
from messagestore.files.commit_log import CommitLog
from messagestore.files.disk import Disk, FilePool
from messagestore.format import record
from messagestore.format.hosts import pack_host
from messagestore.log import walk as walks
from messagestore.log.walk import Depth, Walk
from small import SMALL, bodies, columns

SEGMENT = 4096
HOST = pack_host("127.0.0.1:10911")


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    """An empty log with segments of 4 KiB."""
    (tmp_path / "spark").mkdir()
    log = CommitLog(str(tmp_path / "commitlog"), SEGMENT, FilePool(Disk(), 8), str(tmp_path / "spark"))
    log.load()
    return log


def put(log: CommitLog, position: int, body: bytes, queue_offset: int = 0) -> int:
    """Write one stamped record; its end."""
    data = record.encode_message(Message("t", body, queue_id=0), queue_id=0, store_host=HOST, limits=StoreConfig())
    record.stamp_record(
        data, queue_offset=queue_offset, physical_offset=position, store_timestamp_ms=1000, property_crc=False
    )
    log.write(position, data)
    return position + len(data)


def test_a_walk_that_expects_few_records_reads_little(tmp_path: Path) -> None:
    """Behind the log's end lie zeros up to the end of the segment."""
    (tmp_path / "spark").mkdir()
    sizes = list[int]()

    class Counting(CommitLog):
        def read_array(self, physical_offset: int, size: int) -> NDArray[np.uint8]:
            sizes.append(size)
            return super().read_array(physical_offset, size)

    log = Counting(str(tmp_path / "commitlog"), 1 << 24, FilePool(Disk(), 8), str(tmp_path / "spark"))
    log.load()
    position = 0
    for number in range(3):
        position = put(log, position, b"b" * 40, number)
    runs = list(Walk(log, 0, few=True))
    assert (runs[-1].end, sum(len(run.starts) for run in runs), sum(sizes)) == (position, 3, 8192)
    for number, size in enumerate((50_000, 40, 200_000), 3):  # larger than what is read at first
        position = put(log, position, b"b" * size, number)
    for start in (0, runs[-1].end):
        walked, all_at_once = list(Walk(log, start, few=True)), list(Walk(log, start))
        assert [run.last_offset for run in walked][-1:] == [run.last_offset for run in all_at_once][-1:]
        assert sum(len(run.starts) for run in walked) == sum(len(run.starts) for run in all_at_once)
        assert walked[-1].end == position


def test_a_walk_crosses_segments(log: CommitLog) -> None:
    """Records in two segments, a BLANK between them: the walk gives both runs and stops at the zeros."""
    position = 0
    ends = []
    for number in range(60):
        size = 95 + 40
        if log.blank_needed(position, size):
            log.write(position, log.blank(position))
            position += log.left(position)
        position = put(log, position, b"b" * 40, number)
        ends.append(position)
    walk = Walk(log, 0)
    runs = list(walk)
    assert sum(len(run.starts) for run in runs) == 60
    assert [int(q) for run in runs for q in run.heads["queue_offset"]] == list(range(60))
    assert (walk.position, walk.stop.reason) == (position, "zero")
    assert runs[-1].end == ends[-1]


def test_a_walk_reads_on_for_a_record_larger_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is larger than what is read at once is found all the same."""
    monkeypatch.setattr(walks, "READ_SIZE", 1000)
    (tmp_path / "spark").mkdir()
    log = CommitLog(str(tmp_path / "commitlog"), 1 << 20, FilePool(Disk(), 8), str(tmp_path / "spark"))
    log.load()
    position = put(log, 0, b"a")
    position = put(log, position, b"b" * 50_000, 1)
    position = put(log, position, b"c", 2)
    walk = Walk(log, 0)
    assert sum(len(run.starts) for run in walk) == 3
    assert walk.position == position


def test_blank_without_next_segment_is_the_end(log: CommitLog) -> None:
    """As Java: the log ends at a BLANK when no further file is there, and behind it when one is."""
    position = put(log, 0, b"x")
    log.write(position, log.blank(position))
    walk = Walk(log, position)
    assert not list(walk)
    assert (walk.position, walk.stop.reason) == (position, "blank")
    log.create(SEGMENT)
    walk = Walk(log, position)
    assert not list(walk)
    assert walk.position == SEGMENT


def test_a_flipped_bit_ends_the_walk_at_its_record(log: CommitLog) -> None:
    """A damaged record and all behind it are not given; the walk says where and why."""
    second = put(log, 0, b"first")
    third = put(log, second, b"second", 1)
    put(log, third, b"third", 2)
    path = Path(log.path(0))
    data = bytearray(path.read_bytes())
    data[second + 88] ^= 1
    path.write_bytes(data)
    walk = Walk(log, 0)
    runs = list(walk)
    assert [len(run.starts) for run in runs] == [1]
    assert (walk.position, walk.stop.reason) == (second, "body_crc")


@pytest.mark.parametrize("read_size", [walks.READ_SIZE, 3000])
def test_a_walk_with_batches_gives_each_batch_record_alone_and_jumps(
    tmp_path: Path, read_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who jumps sees no record of a batch's data; who does not sees all of them, and nothing twice."""
    monkeypatch.setattr(walks, "READ_SIZE", read_size)
    config = SMALL.replace(mapped_file_size_commit_log=256 * 1024)
    with MessageStore.open(tmp_path / "s", config) as store:
        places = []
        for version in range(3):
            places.append(store.put_message(Message("single", b"x" * 900, queue_id=0)).physical_offset)
            result = store.append_batch(columns(bodies(40)), BatchRequest("app", version))
            places.append(result.physical_offset)
        log = store.writer.log
        end = store.writer.end.physical_offset
        walk = Walk(log, 0, end, Depth.FRAMING, batches=True)
        seen = []
        for run in walk:
            seen += (run.physical_offset + run.starts).tolist()
            if run.batch is not None:
                assert len(run.starts) == 1
                walk.jump(run.batch.end)
        assert seen == places
        assert (walk.position, walk.stop.reason) == (end, "end")
        all_starts = [at for run in Walk(log, 0, end) for at in (run.physical_offset + run.starts).tolist()]
        parts = [at for run in Walk(log, 0, end, batches=True) for at in (run.physical_offset + run.starts).tolist()]
        assert parts == all_starts
        assert len(all_starts) == 6 + 3 * 40


def test_a_walk_of_a_part_that_must_be_whole_names_where_it_breaks(log: CommitLog) -> None:
    """The end is known, and the chain of records stops before it."""
    second = put(log, 0, b"first")
    with pytest.raises(CorruptionError, match=f"the log goes on to {second + 100}") as error:
        list(Walk(log, 0, second + 100).whole())
    assert error.value.physical_offset == second
