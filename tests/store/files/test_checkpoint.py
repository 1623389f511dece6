"""The store checkpoint: RocketMQ's five numbers."""

from __future__ import annotations

import os
import struct
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.checkpoint import StoreCheckpoint
from messagestore.files.disk import Disk
from messagestore.format.layout import CHECKPOINT, CHECKPOINT_SIZE

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
CHECKPOINTS = st.builds(StoreCheckpoint, INT64, INT64, INT64, INT64, INT64)
SOME = StoreCheckpoint(1_600_000_000_123, 1_600_000_000_456, 7, 8, 1 << 40)


class LoggingDisk(Disk):
    """Remembers the order of what reaches the disk."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def pwrite(self, file, data, position):
        self.log.append(f"pwrite {position}+{len(data)}")
        super().pwrite(file, data, position)

    def fdatasync(self, file):
        self.log.append("fdatasync")
        super().fdatasync(file)

    def rename(self, source, target):
        self.log.append("rename")
        super().rename(source, target)

    def fsync_dir(self, path):
        self.log.append("fsync_dir")
        super().fsync_dir(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


@pytest.fixture
def disk() -> LoggingDisk:
    return LoggingDisk()


def write(disk: Disk, path: str, checkpoint: StoreCheckpoint) -> None:
    store_checkpoint.write(disk, path, checkpoint, via=path + ".new")


def test_the_fields_are_the_tables_rows():
    """The class is what the layout says, in its order."""
    assert [f.name for f in fields(StoreCheckpoint)] == [f.name for f in CHECKPOINT.fields]


def test_the_file_byte_by_byte(disk: Disk, path: str):
    """RocketMQ's file: five big-endian int64, zeros to 4 096 bytes."""
    write(disk, path, SOME)
    expected = struct.pack(">5q", 1_600_000_000_123, 1_600_000_000_456, 7, 8, 1 << 40)
    assert Path(path).read_bytes() == expected.ljust(4096, b"\0")


@given(CHECKPOINTS)
def test_the_numbers_come_back(checkpoint: StoreCheckpoint):
    """Any five int64, also with bytes behind them; one byte short they are not known."""
    data = checkpoint.to_bytes()
    assert StoreCheckpoint.from_bytes(data) == checkpoint
    assert StoreCheckpoint.from_bytes(data + b"\xff") == checkpoint
    assert StoreCheckpoint.from_bytes(data[:-1]) == StoreCheckpoint()
    assert all(type(getattr(StoreCheckpoint.from_bytes(data), f.name)) is int for f in fields(checkpoint))


@pytest.mark.parametrize("size", [0, 1, 39])
def test_a_short_file_is_all_zero(disk: Disk, path: str, size: int):
    """A broker that was killed while it made the file: everything is to be looked at."""
    Path(path).write_bytes(b"\x01" * size)
    assert store_checkpoint.read(disk, path) == StoreCheckpoint()


def test_no_file_is_all_zero(disk: Disk, path: str):
    """A store that has never had a checkpoint."""
    assert store_checkpoint.read(disk, path) == StoreCheckpoint()


def test_first_made_whole_then_written_in_place(disk: LoggingDisk, path: str):
    """The name appears with synced content; later a change is one write within a sector, and a sync."""
    write(disk, path, SOME)
    assert disk.log == ["pwrite 0+4096", "fdatasync", "rename", "fsync_dir"]
    inode = os.stat(path).st_ino
    disk.log.clear()
    write(disk, path, StoreCheckpoint(1, 2, 3, 4, 5))
    assert disk.log == ["pwrite 0+40", "fdatasync"]
    assert os.stat(path).st_ino == inode
    assert os.path.getsize(path) == CHECKPOINT_SIZE
    assert store_checkpoint.read(disk, path) == StoreCheckpoint(1, 2, 3, 4, 5)


@pytest.mark.parametrize("size", [0, 40, 5000])
def test_a_file_of_another_size_is_made_anew(disk: Disk, path: str, size: int):
    """What a killed process left behind becomes RocketMQ's 4 096 bytes."""
    Path(path).write_bytes(b"\x07" * size)
    write(disk, path, SOME)
    assert os.path.getsize(path) == CHECKPOINT_SIZE
    assert store_checkpoint.read(disk, path) == SOME


def test_bytes_behind_the_fields_stay(disk: Disk, path: str):
    """What a newer RocketMQ may keep there is not ours."""
    Path(path).write_bytes(bytes(40) + b"newer" + bytes(CHECKPOINT_SIZE - 45))
    write(disk, path, SOME)
    assert Path(path).read_bytes()[40:45] == b"newer"


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_a_number_beyond_int64_is_refused_before_the_first_byte(disk: LoggingDisk, path: str, value: int):
    """An offset never wraps."""
    with pytest.raises(ValueError, match=f"confirm_physical_offset: found {value}"):
        write(disk, path, StoreCheckpoint(confirm_physical_offset=value))
    assert not disk.log


@pytest.mark.parametrize(
    ("physic", "logics", "expected"),
    [(0, 0, 0), (2999, 9000, 0), (9000, 5000, 2000), (4000, 9000, 1000), (-5, 9000, 0)],
)
def test_the_time_that_needs_no_second_look(physic: int, logics: int, expected: int):
    """The smaller of the first two, less three seconds, not below zero."""
    assert StoreCheckpoint(physic, logics, 1).min_timestamp_ms == expected
