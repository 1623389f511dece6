"""Which queues need no look of their own after a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crash.harness import die
from messagestore import Message, MessageStore
from messagestore.files.disk import Disk
from messagestore.format.layout import UNIT
from messagestore.log.queue_proof import is_settled
from messagestore.log.store_files import Identity, Paths, StoreFiles
from small import SMALL, bodies

FILE_SIZE = SMALL.mapped_file_size_consume_queue


@pytest.fixture
def files(tmp_path: Path) -> StoreFiles:
    """A closed store with 20 messages in queue 0 (two files), and three in queue 1."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for queue_id, count in ((0, 20), (1, 3)):
            for body in bodies(count):
                store.put_message(Message("t", body, queue_id=queue_id))
        end = store.writer.end.physical_offset
    paths = Paths(tmp_path / "s")
    found = StoreFiles(paths, SMALL, Identity.read(Disk(), paths.identity), Disk())
    found.load()
    assert found.commit_log.max_offset >= end
    return found


def end_of(files: StoreFiles) -> int:
    state = files.state_file.read()
    assert state is not None
    return state.clean_end


def newest(files: StoreFiles, queue_id: int = 0) -> Path:
    return max(Path(files.paths.consume_queue, "t", str(queue_id)).iterdir())


@pytest.mark.parametrize("queue_id", [0, 1])
def test_a_queue_that_ends_below_the_clean_end_is_settled(files: StoreFiles, queue_id: int) -> None:
    """Over files, and in the first one. A queue without a file needs a longer look: recovery may remove its folder."""
    assert is_settled(files, "t", queue_id, end_of(files))
    assert not is_settled(files, "t", 7, end_of(files))


def test_a_unit_behind_the_clean_end_is_noticed(files: StoreFiles) -> None:
    """The last unit's record ends above it by one byte."""
    last = files.queue("t", 0).read(19, 1)
    end = int(last["physical_offset"][0]) + int(last["size"][0])
    assert is_settled(files, "t", 0, end)
    assert not is_settled(files, "t", 0, end - 1)


def half_a_unit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4 * UNIT.size + 8)
        file.write(b"\1")


def a_unit_after_a_hole(path: Path) -> None:
    data = path.read_bytes()
    os.truncate(path, 0)
    with path.open("r+b") as file:
        file.write(data[: 2 * UNIT.size])
        file.seek(FILE_SIZE - UNIT.size)
        file.write((1 << 40).to_bytes(8, "big") + b"\0\0\0\1" + bytes(8))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(FILE_SIZE))


def another_size(path: Path) -> None:
    os.truncate(path, FILE_SIZE - UNIT.size)


def a_gap(path: Path) -> None:
    path.rename(path.with_name(f"{int(path.name) + FILE_SIZE:020d}"))


def a_stray_name(path: Path) -> None:
    (path.parent / "notes.txt").write_text("mine")


def a_folder(path: Path) -> None:
    (path.parent / f"{FILE_SIZE * 2:020d}").mkdir()


@pytest.mark.parametrize(
    "change", [half_a_unit, a_unit_after_a_hole, zeros, another_size, a_gap, a_stray_name, a_folder]
)
def test_whatever_is_not_plain_gets_a_longer_look(files: StoreFiles, change) -> None:
    """No guess: what a short look does not understand is no settled queue."""
    change(newest(files))
    assert not is_settled(files, "t", 0, end_of(files))


def test_queues_that_a_crash_did_not_touch_cost_recovery_one_look_each(tmp_path: Path) -> None:
    """Whatever their number: after a kill only the queue of the last put is opened, truncated and proven."""

    class Counting(Disk):
        def __init__(self) -> None:
            self.opened: list[str] = []

        def open(self, path, *, writable=False):
            self.opened.append(str(path))
            return super().open(path, writable=writable)

    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("t", 300)
        for queue_id in range(300):
            store.put_message(Message("t", b"x", queue_id=queue_id))
    MessageStore.open(root, SMALL).put_message(Message("t", b"y", queue_id=5))
    die(root)
    disk = Counting()
    with MessageStore.open(root, SMALL, disk=disk) as store:
        assert store.report is not None
        assert store.report.record_count == 1
    opened = [path.split("/consumequeue/")[1].rpartition("/")[0] for path in disk.opened if "/consumequeue/t/" in path]
    assert len(opened) < 300 + 20
    assert set(opened) == {f"t/{queue_id}" for queue_id in range(300)}
