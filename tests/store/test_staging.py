"""Staging files: what a task wrote is what the writer reads, or it is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from messagestore import BatchRequest, ChecksumError, CorruptionError, MessageStore, StoreConfig
from messagestore.hosts import pack_host
from messagestore.mapped_file import Disk, File
from messagestore.record_columns import EncodedRecords, encode
from messagestore.staging import StagedChunks, StagedFile, StagingWriter, remove, sweep
from messagestore.transaction import Chunks, append_batch
from small import SMALL, bodies, columns, read_all

HOST = pack_host("127.0.0.1:10911")


def chunk(count: int = 20, start: int = 0) -> EncodedRecords:
    return encode(columns(bodies(count, start=start)), limits=StoreConfig(), store_host=HOST, born_host=HOST)


def staged(folder: Path, *chunks: EncodedRecords) -> StagedFile:
    with StagingWriter(str(folder)) as writer:
        for one in chunks:
            writer.write(one)
        return writer.finish()


def same(left: EncodedRecords, right: EncodedRecords, *, with_data: bool) -> bool:
    names = ["starts", "run_queue_ids", "run_counts", "tags_codes", "key_hashes", "key_counts"]
    names += ["data"] if with_data else []
    scalars = ["run_topics", "store_timestamp_position", "row_hash_sum", "row_count", "property_crc"]
    arrays = all(np.array_equal(getattr(left, n), getattr(right, n)) for n in names)
    return arrays and all(getattr(left, n) == getattr(right, n) for n in scalars)


def test_chunks_come_back(tmp_path: Path) -> None:
    """Several files, several chunks: in order, whole, with and without their data."""
    written = [chunk(20), chunk(1, 20), chunk(300, 30)]
    first, second = staged(tmp_path, *written[:2]), staged(tmp_path, written[2])
    assert (first.row_count, second.row_count) == (21, 300)
    chunks = StagedChunks([first, second])
    assert len(chunks) == 3
    for with_data in (False, True, False):
        for index, one in enumerate(written):
            assert same(chunks.read(index, with_data=with_data), one, with_data=with_data)


def test_data_can_be_stamped(tmp_path: Path) -> None:
    """The writer fills in offsets: the memory is its own, and the file does not change."""
    file = staged(tmp_path, chunk())
    chunks = StagedChunks([file])
    chunks.read(0, with_data=True).data[:] = 7
    assert same(chunks.read(0, with_data=True), chunk(), with_data=False)
    StagedChunks([file])


def test_a_staged_batch_is_the_same_as_one_in_memory(tmp_path: Path) -> None:
    """Both ways into the log give the same messages, and the same digest."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        file = staged(tmp_path / "s" / "spark" / "staging", chunk(50))
        result = append_batch(store.writer, StagedChunks([file]), BatchRequest("a", 0))
        assert result.status == "appended"
        assert append_batch(store.writer, Chunks([chunk(50)]), BatchRequest("a", 0)).status == "known"
        assert read_all(store) == bodies(50)[::2]


@pytest.mark.parametrize("where", ["begin", "middle", "end", "cut", "longer", "gone"])
def test_an_altered_file_is_refused(tmp_path: Path, where: str) -> None:
    """Bytes changed, missing, added, or no file at all: refused before anything of the batch is written."""
    file = staged(tmp_path, chunk())
    path = Path(file.path)
    data = bytearray(path.read_bytes())
    position = {"begin": 0, "middle": len(data) // 2, "end": len(data) - 1}.get(where)
    if position is not None:
        data[position] ^= 1
        path.write_bytes(data)
    elif where == "cut":
        path.write_bytes(data[:-10])
    elif where == "longer":
        path.write_bytes(data + b"x")
    else:
        path.unlink()
    with pytest.raises(CorruptionError) as caught:
        StagedChunks([file])
    assert (caught.type is ChecksumError) == (where != "gone")
    assert file.path in str(caught.value)


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    """A task that fails leaves nothing; a finished file stays for the writer."""
    with pytest.raises(RuntimeError), StagingWriter(str(tmp_path)) as writer:  # noqa: PT012 - the failure is inside
        writer.write(chunk())
        raise RuntimeError("task failed")
    assert list(tmp_path.iterdir()) == []
    file = staged(tmp_path, chunk())
    assert os.stat(file.path).st_mode & 0o777 == 0o600
    remove([file.path, file.path])
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_was_copied_without_its_empty_folders_takes_batches(tmp_path: Path) -> None:
    """Archives and copies leave empty folders out; a task makes `staging` again, and nothing above it."""
    file = staged(tmp_path / "staging", chunk())
    assert os.path.exists(file.path)
    with pytest.raises(FileNotFoundError):
        staged(tmp_path / "gone" / "staging", chunk())
    assert not (tmp_path / "gone").exists()


def test_only_old_orphans_are_swept(tmp_path: Path) -> None:
    """Files of dead attempts go after their time; fresh ones and other people's files stay."""
    old, fresh = staged(tmp_path, chunk()), staged(tmp_path, chunk())
    (tmp_path / "notes.txt").write_text("mine")
    hour_ago = time.time() - 3600
    os.utime(old.path, (hour_ago, hour_ago))
    os.utime(tmp_path / "notes.txt", (hour_ago, hour_ago))
    assert sweep(str(tmp_path), 1800) == [old.path]
    assert Path(fresh.path).exists() and (tmp_path / "notes.txt").exists()


class FullDisk(Disk):
    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        raise OSError(28, "No space left on device", file.path)


def test_a_full_disk_in_a_task(tmp_path: Path) -> None:
    """The task fails with the system's error and leaves nothing."""
    with pytest.raises(OSError, match="No space"), StagingWriter(str(tmp_path), FullDisk()) as writer:  # noqa: PT012
        writer.write(chunk())
        writer.finish()
    assert list(tmp_path.iterdir()) == []
