"""Staging files: what a task wrote is what the writer reads, or it is refused."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from messagestore import (
    BatchRequest,
    ChecksumError,
    ConfigError,
    CorruptionError,
    MessageStore,
    StoreConfig,
    StoreError,
)
from messagestore.batches.append import Chunks, append_batch
from messagestore.batches.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.files import staging_files
from messagestore.files.disk import Disk, File
from messagestore.files.staging_files import (
    UNKNOWN,
    Write,
    driver_token,
    is_dead,
    path_of,
    process_token,
    remove,
    sweep,
    sweep_write,
)
from messagestore.format.hosts import pack_host
from messagestore.format.record_columns import Rows, encode, stamped
from small import SMALL, bodies, columns, read_all

HOST = pack_host("127.0.0.1:10911")


def chunk(count: int = 20, start: int = 0) -> Rows:
    return encode(columns(bodies(count, start=start)), limits=StoreConfig(), store_host=HOST, born_host=HOST)


def staged(folder: Path, *chunks: Rows) -> StagedFile:
    with StagingWriter(str(folder)) as writer:
        for one in chunks:
            writer.write(one)
        return writer.finish()


def same(left: Rows, right: Rows, *, with_data: bool) -> bool:
    names = ["starts", "run_queue_ids", "run_counts", "tags_codes", "key_hashes", "key_counts"]
    names += ["data"] if with_data else []
    scalars = ["run_topics", "store_timestamp_position", "digest", "row_count", "property_crc"]
    arrays = all(np.array_equal(getattr(left, n), getattr(right, n)) for n in names)
    return arrays and all(getattr(left, n) == getattr(right, n) for n in scalars)


def test_a_file_says_what_its_rows_are_compared_by(tmp_path: Path) -> None:
    """The batch is recognised by it although its files are gone; what was promised must be in the file."""
    written = [chunk(20), chunk(1, 20), chunk(300, 30)]
    files = [staged(tmp_path, *written[:2]), staged(tmp_path, written[2])]
    assert [file.topics for file in files] == [("t",), ("t",)]
    assert StagedChunks(str(tmp_path), files).contents == Chunks(written).contents
    for file in files:
        (tmp_path / file.name).rename(tmp_path / "away")
        assert StagedChunks(str(tmp_path), [file]).contents == file.contents
        (tmp_path / "away").rename(tmp_path / file.name)
    for other in ({"digest": 5}, {"row_count": 22}, {"topics": ("u",)}):
        chunks = StagedChunks(str(tmp_path), [replace(files[0], **other)])
        chunks.read(0, with_data=False)
        with pytest.raises(CorruptionError, match="rows with digest"):
            chunks.read(1, with_data=False)
    with pytest.raises(CorruptionError, match="rows with digest"):
        StagedChunks(str(tmp_path), [replace(staged(tmp_path), row_count=1)]).open()


@pytest.mark.parametrize("other", ["", "..", "a.staged", "/etc/passwd", "../{}", "x/{}", "{}\n", "{}x", "{}\0"])
def test_a_name_leads_to_no_other_file(tmp_path: Path, other: str) -> None:
    """A name may come from another host; no folder, no parent, no file that is not a finished staging file."""
    name = staged(tmp_path, chunk()).name
    assert path_of(str(tmp_path), name) == str(tmp_path / name)
    for wrong in (other.format(name), name.removesuffix(".staged") + ".writing"):
        with pytest.raises(ConfigError, match="staged file: found the name"):
            path_of(str(tmp_path), wrong)
        with pytest.raises(ConfigError):
            StagedChunks(str(tmp_path), [StagedFile(wrong, 0, 0, 0, 0, ())])


def test_chunks_come_back(tmp_path: Path) -> None:
    """Several files, several chunks: in order, whole, with and without their data."""
    written = [chunk(20), chunk(1, 20), chunk(300, 30)]
    first, second = staged(tmp_path, *written[:2]), staged(tmp_path, written[2])
    assert (first.row_count, second.row_count) == (21, 300)
    chunks = StagedChunks(str(tmp_path), [first, second])
    assert len(chunks) == 3
    for with_data in (False, True, False):
        for index, one in enumerate(written):
            assert same(chunks.read(index, with_data=with_data), one, with_data=with_data)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file counts as large, and every chunk has several blocks."""
    monkeypatch.setattr("messagestore.batches.staging._KEPT_SIZE", 0)
    monkeypatch.setattr("messagestore.format.record_columns.BLOCK_SIZE", 1000)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kept", [0, 3000, 1 << 20])
def test_large_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """What does not stay in memory is found in the file, in any part of a chunk, and stamped block by block."""
    monkeypatch.setattr("messagestore.batches.staging._KEPT_COLUMNS_SIZE", kept)
    written = [chunk(20), chunk(1, 20), chunk(300, 30)]
    chunks = StagedChunks(str(tmp_path), [staged(tmp_path, *written[:2]), staged(tmp_path, written[2])])
    for index, one in enumerate(written):
        assert same(chunks.read(index, with_data=False), one, with_data=False)
    for index, one in enumerate(written):
        found = chunks.read(index, with_data=True)
        assert found.stored is not None and same(found, one, with_data=False)
        blocks = [bytes(block) for block in stamped(found.at(500, 9))]
        wanted = replace(one, data=one.data.copy()).at(500, 9)
        assert b"".join(blocks) == b"".join(map(bytes, stamped(wanted)))
        assert len(blocks) > len(one.data) // 2000
        found = chunks.read(index, with_data=True)  # as it lies in two segments
        first, second = found.slice(0, index), found.slice(index, one.row_count)
        assert first.stored is not None and second.stored is not None
        parts = [part.stored.read(0, int(part.starts[-1])).tobytes() for part in (first, second) if part.stored]
        assert b"".join(parts) == one.data.tobytes()
        with pytest.raises(ValueError, match="allowed is 0 to"):
            second.stored.read(0, int(second.starts[-1]) + 1)
        again = chunks.read(index, with_data=True).stored
        assert again is not None
        with pytest.raises(ValueError, match="where the one before ended"):  # else its CRC would not be compared
            again.read(1, 2)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("where", [0.0, 0.4, 0.999])
def test_data_that_were_damaged_in_staging_are_taken_out_of_the_log_again(tmp_path: Path, where: float) -> None:
    """The batch is not in the log, no BATCH record seals its bytes, and Spark's retry brings it."""
    rows = chunk(300)
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(5)), BatchRequest("a", 0))
        before, end = read_all(store), store.writer.end
        folder = tmp_path / "s" / "spark" / "staging"
        file = staged(folder, chunk(50), rows)
        path = folder / file.name
        data = bytearray(path.read_bytes())
        begin = data.index(rows.data[:200].tobytes())
        data[begin + int(where * len(rows.data))] ^= 4
        path.write_bytes(data)
        with pytest.raises(ChecksumError, match="Spark's retry writes the batch again") as caught:
            append_batch(store.writer, StagedChunks(str(folder), [file]), BatchRequest("a", 1))
        assert str(path) in str(caught.value)
        assert store.writer.end == end and read_all(store) == before
        assert not store.writer.log.nonzero_ranges(end.physical_offset)
        good = staged(folder, chunk(50), rows)
        assert append_batch(store.writer, StagedChunks(str(folder), [good]), BatchRequest("a", 1)).status == "appended"
        assert read_all(store) == [*before, *bodies(50)[::2], *bodies(300)[::2]]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("where", ["columns", "table", "end"])
def test_what_a_plan_is_made_of_is_checked_before_it_is_used(tmp_path: Path, where: str) -> None:
    """Also of large files, whose data are compared while they are read."""
    file = staged(tmp_path, chunk())
    path = tmp_path / file.name
    data = bytearray(path.read_bytes())
    places = struct.unpack_from("<8q", data, len(data) - 32 - 64)
    data[{"columns": places[4] + places[5] - 9, "table": len(data) - 40, "end": len(data) - 5}[where]] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match="CRC-32"):
        StagedChunks(str(tmp_path), [file]).read(0, with_data=False)


@pytest.mark.usefixtures("large")
def test_a_large_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Its table was right a moment ago; nothing that is missing is taken for zeros."""
    file = staged(tmp_path, chunk(300))
    chunks = StagedChunks(str(tmp_path), [file])
    found = chunks.read(0, with_data=True)
    os.truncate(tmp_path / file.name, 2000)
    with pytest.raises(CorruptionError, match=r"bytes"):
        list(stamped(found.at(500, 9)))


def test_data_can_be_stamped(tmp_path: Path) -> None:
    """The writer fills in offsets: the memory is its own, and the file does not change."""
    file = staged(tmp_path, chunk())
    chunks = StagedChunks(str(tmp_path), [file])
    chunks.read(0, with_data=True).data[:] = 7
    assert same(chunks.read(0, with_data=True), chunk(), with_data=False)
    StagedChunks(str(tmp_path), [file]).read(0, with_data=False)


def test_a_staged_batch_is_the_same_as_one_in_memory(tmp_path: Path) -> None:
    """Both ways into the log give the same messages, and the same digest."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        folder = tmp_path / "s" / "spark" / "staging"
        file = staged(folder, chunk(50))
        result = append_batch(store.writer, StagedChunks(str(folder), [file]), BatchRequest("a", 0))
        assert result.status == "appended"
        assert append_batch(store.writer, Chunks([chunk(50)]), BatchRequest("a", 0)).status == "known"
        assert read_all(store) == bodies(50)[::2]


@pytest.mark.parametrize("where", ["begin", "middle", "end", "cut", "longer", "gone"])
def test_an_altered_file_is_refused(tmp_path: Path, where: str) -> None:
    """Bytes changed, missing, added, or no file at all: refused before anything of the batch is written."""
    file = staged(tmp_path, chunk())
    path = tmp_path / file.name
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
        StagedChunks(str(tmp_path), [file]).read(0, with_data=False)
    assert (caught.type is ChecksumError) == (where != "gone")
    assert str(path) in str(caught.value)


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    """A task that fails leaves nothing; a finished file stays for the writer."""
    with pytest.raises(RuntimeError), StagingWriter(str(tmp_path)) as writer:  # noqa: PT012 - the failure is inside
        writer.write(chunk())
        raise RuntimeError("task failed")
    assert list(tmp_path.iterdir()) == []
    file = staged(tmp_path, chunk())
    path = str(tmp_path / file.name)
    assert os.stat(path).st_mode & 0o777 == 0o600
    remove([path, path])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_driver_has_removed_while_it_was_written(tmp_path: Path) -> None:
    """As by two drivers of one query: the task fails with a sentence, not with the name of a file."""
    with StagingWriter(str(tmp_path)) as writer:
        writer.write(chunk())
        os.unlink(writer.path)
        with pytest.raises(StoreError, match=r"writing: this file of rows.*another driver runs the same query"):
            writer.finish()


def test_a_store_that_was_copied_without_its_empty_folders_takes_batches(tmp_path: Path) -> None:
    """Archives and copies leave empty folders out; a task makes `staging` again, and nothing above it."""
    file = staged(tmp_path / "staging", chunk())
    assert (tmp_path / "staging" / file.name).exists()
    with pytest.raises(FileNotFoundError):
        staged(tmp_path / "gone" / "staging", chunk())
    assert not (tmp_path / "gone").exists()


def test_only_old_orphans_are_swept(tmp_path: Path) -> None:
    """Files of dead attempts go after their time; fresh ones and other people's files stay."""
    old, fresh = staged(tmp_path, chunk()), staged(tmp_path, chunk())
    (tmp_path / "notes.txt").write_text("mine")
    hour_ago = time.time() - 3600
    os.utime(tmp_path / old.name, (hour_ago, hour_ago))
    os.utime(tmp_path / "notes.txt", (hour_ago, hour_ago))
    assert sweep(str(tmp_path), 1800) == [str(tmp_path / old.name)]
    assert (tmp_path / fresh.name).exists() and (tmp_path / "notes.txt").exists()


def of_write(folder: Path, write: Write) -> str:
    with StagingWriter(str(folder), write=write) as writer:
        writer.write(chunk())
        return os.path.join(folder, writer.finish().name)


def dead_process() -> str:
    """What names a process that has ended."""
    process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    token = process_token(process.pid)
    process.communicate()
    return token


def test_files_of_a_forked_worker_have_its_own_name(tmp_path: Path) -> None:
    """Spark forks its workers from a daemon that may have staged itself: a dead worker's file is not the daemon's."""
    StagingWriter(str(tmp_path / "daemon")).finish()
    pid = os.fork()
    if not pid:
        try:
            StagingWriter(str(tmp_path / "worker")).finish()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    for folder, expected in (("daemon", os.getpid()), ("worker", pid)):
        [name] = os.listdir(tmp_path / folder)
        match = re.fullmatch(r"0-[0-9a-f]{16}\.0-(\d+)\..*", name)
        assert match is not None
        assert int(match[1]) == expected


def test_a_file_whose_driver_is_dead_is_swept_at_once(tmp_path: Path) -> None:
    """One of a live driver, of another boot, of another container, or of nobody known waits for its time."""
    me = process_token(os.getpid())
    pid, start, boot, namespace = me.split(".")
    gone = of_write(tmp_path, Write(dead_process(), "q"))
    reused = of_write(tmp_path, Write(f"{pid}.{int(start) + 1}.{boot}.{namespace}", "q"))
    kept = [
        of_write(tmp_path, Write(driver, "q"))
        for driver in (me, UNKNOWN, f"999999.1.00000000.{namespace}", f"999999.1.{boot}.00000000")
    ]
    assert sorted(sweep(str(tmp_path), 3600)) == sorted([gone, reused])
    assert sorted(map(str, tmp_path.iterdir())) == sorted(kept)


def test_an_unfinished_file_of_a_killed_task_is_swept_at_once(tmp_path: Path) -> None:
    """The driver lives on; a task that still writes keeps its file."""
    me = process_token(os.getpid())
    running = StagingWriter(str(tmp_path), write=Write(me, "q"))
    running.write(chunk())
    killed = Path(running.path.replace(f"-{me}-", f"-{dead_process()}-"))
    killed.write_bytes(b"half")
    assert str(killed) != running.path
    assert sweep(str(tmp_path), 3600) == [str(killed)]
    assert (tmp_path / running.finish().name).exists()


def test_a_commit_takes_what_failed_attempts_left_of_its_write(tmp_path: Path) -> None:
    """Of this batch and earlier ones; other writes, other drivers and later batches are not touched."""
    me, other = process_token(os.getpid()), UNKNOWN
    committed = of_write(tmp_path, Write(me, "q", 7))
    orphans = [of_write(tmp_path, Write(me, "q", batch)) for batch in (3, 6, 7)]
    kept = [of_write(tmp_path, write) for write in (Write(me, "q", 8), Write(me, "r", 7), Write(other, "q", 7))]
    (tmp_path / "notes.txt").write_text("mine")
    assert sorted(sweep_write(str(tmp_path), [os.path.basename(committed)])) == sorted([committed, *orphans])
    assert sorted(map(str, tmp_path.iterdir())) == sorted([*kept, str(tmp_path / "notes.txt")])


def test_names_of_releases_before_are_kept_for_their_time(tmp_path: Path) -> None:
    """32 hex digits: nobody knows whose they are."""
    old = tmp_path / ("0" * 32 + ".staged")
    old.write_bytes(b"x")
    assert sweep(str(tmp_path), 3600) == sweep_write(str(tmp_path), [old.name]) == []
    assert sweep(str(tmp_path), -1) == [str(old)]


def test_a_process_of_another_user_is_not_taken_for_dead() -> None:
    """Pid 1 is there, whether or not it may be looked at."""
    token = process_token(1)
    assert not is_dead(token)
    assert is_dead(token.replace("1.", "1.99", 1)) or token == UNKNOWN


@pytest.mark.parametrize("digits", [10, 11, 20, 70])
def test_a_made_up_pid_in_a_name_does_not_stop_a_commit(tmp_path: Path, digits: int) -> None:
    """Above 2^31 the kernel cannot be asked: every commit ended in an OverflowError as long as the file was there."""
    token = process_token(os.getpid()).partition(".")[2]
    made_up = tmp_path / f"{'9' * digits}.{token}-{'0' * 16}.0-0-00000000.staged"
    made_up.write_bytes(b"x")
    assert sweep(str(tmp_path), 3600) == [str(made_up)]


def test_the_driver_is_the_nearest_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a Python worker; without one nobody is known."""
    assert driver_token() == UNKNOWN
    tree = {
        os.getpid(): ("python", 50),
        50: ("python3 (daemon)", 40),
        40: ("java", 30),
        30: ("java", 1),
        1: ("init", 0),
    }
    monkeypatch.setattr(
        staging_files, "_stat_of", lambda pid: [tree[pid][0], "S", str(tree[pid][1]), *["0"] * 17, "777"]
    )
    assert driver_token().startswith("40.777.")


def test_a_full_disk_of_orphans_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once: what is left takes more than is free."""

    class SmallDisk(Disk):
        def free(self, path: str | Path) -> int:
            return 10

    of_write(tmp_path, Write(UNKNOWN, "q"))
    for _ in range(2):
        sweep(str(tmp_path), 3600, SmallDisk())
    assert len(caplog.records) == 1
    assert "the disk has 10 bytes free" in caplog.text


class FullDisk(Disk):
    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        raise OSError(28, "No space left on device", file.path)


def test_a_full_disk_in_a_task(tmp_path: Path) -> None:
    """The task fails with the system's error and leaves nothing."""
    with pytest.raises(OSError, match="No space"), StagingWriter(str(tmp_path), FullDisk()) as writer:  # noqa: PT012
        writer.write(chunk())
        writer.finish()
    assert list(tmp_path.iterdir()) == []
