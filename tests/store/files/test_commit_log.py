"""The CommitLog: fitting, BLANK, rolling, scanning, zeroing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from messagestore import CorruptionError, Message, StoreConfig
from messagestore.files.commit_log import CommitLog
from messagestore.files.disk import Disk, FilePool
from messagestore.files.unsynced import FileReplaced
from messagestore.format import record
from messagestore.format.hosts import pack_host
from messagestore.format.layout import MAGIC_BLANK

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


@pytest.mark.parametrize("left", range(12))
def test_a_record_fits_with_eight_bytes_to_spare(log: CommitLog, left: int) -> None:
    """RocketMQ's rule L + 8 <= remaining, at each count of bytes to spare."""
    put(log, 0, b"x")
    size = SEGMENT - 100 - left
    assert log.blank_needed(100, size) == (left < 8)


def test_blank_fills_the_segment(log: CommitLog) -> None:
    """Vector F: the BLANK's size is what is left of the file."""
    put(log, 0, b"x")
    blank = log.blank(SEGMENT - 4534 % SEGMENT)
    assert blank == (4534 % SEGMENT).to_bytes(4, "big") + (MAGIC_BLANK & 0xFFFFFFFF).to_bytes(4, "big")


def test_zero_behind_zeroes_later_segments(log: CommitLog) -> None:
    """Everything behind the end is zero afterwards, files keep their size, and it says how much was not."""
    end = put(log, 0, b"kept")
    log.write(end, b"garbage" * 10)
    log.create(SEGMENT, b"more")
    assert log.zero_behind(end) == 70 + 4
    first, second = (Path(log.path(start)).read_bytes() for start in (0, SEGMENT))
    assert (len(first), len(second)) == (SEGMENT, SEGMENT)
    assert not any(first[end:]) and not any(second) and any(first[:end])
    assert log.zero_behind(end) == 0


def test_rewrite_keeps_the_bytes(log: CommitLog) -> None:
    """Writing a range again changes nothing that can be read."""
    end = put(log, put(log, 0, b"a"), b"b", 1)
    before = log.read(0, end)
    log.rewrite(0, end)
    assert log.read(0, end) == before


def test_replaced_segment_is_noticed(log: CommitLog) -> None:
    """A segment that was deleted behind the writer's back is named."""
    end = put(log, 0, b"a")
    log.check_files(0, end)
    Path(log.path(0)).unlink()
    with pytest.raises(FileReplaced) as caught:
        log.check_files(0, end)
    assert caught.value.path == log.path(0)


def test_missing_bytes_are_corruption(log: CommitLog) -> None:
    """Bytes that must be there and are not: with file and offset."""
    put(log, 0, b"a")
    with pytest.raises(CorruptionError) as caught:
        log.exact(SEGMENT + 5, 10)
    assert caught.value.physical_offset == SEGMENT + 5
    with pytest.raises(CorruptionError):
        log.read_into(memoryview(bytearray(10)), SEGMENT * 3)


def test_crc_of_a_range_over_segments(log: CommitLog) -> None:
    """The CRC of a range is that of its bytes, zeros behind a BLANK included."""
    position = put(log, 0, b"x" * 3000)
    log.write(position, log.blank(position))
    end = put(log, SEGMENT, b"y", 1)
    everything = Path(log.path(0)).read_bytes() + Path(log.path(SEGMENT)).read_bytes()
    assert log.crc(10, end) == record.crc32(everything[10:end])
    assert log.crc(10, 3 * SEGMENT) == -1


def test_head_refuses_what_is_no_record(log: CommitLog) -> None:
    """`head` believes nothing but a record that names its own place."""
    end = put(log, 0, b"abc")
    assert int(log.head(0)["total_size"]) == end
    assert log.head(1) is None
    assert log.head(end) is None
    assert log.head(10 * SEGMENT) is None
    assert isinstance(log.read_array(0, 10), np.ndarray)
