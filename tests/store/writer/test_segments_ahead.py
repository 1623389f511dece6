"""Segments that are made ahead: no put waits for the next one, and nobody finds them when they are not needed."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crash.harness import die
from messagestore import ASYNC_FLUSH, Message, MessageStore, StoreConfig, StorePoisonedError
from messagestore.files.disk import Disk, File
from messagestore.files.staging_files import UNKNOWN, own_token, process_token
from messagestore.files.state import boot_hash
from messagestore.inspect.verify import verify
from messagestore.writer.segments_ahead import remove_orphans
from messagestore.writer.states import Health
from small import read_all

SEGMENT = 64 * 1024
CONFIG = StoreConfig(
    mapped_file_size_commit_log=SEGMENT,
    mapped_file_size_consume_queue=20 * 64,
    max_hash_slot_num=64,
    max_index_num=200,
    max_message_size=8 * 1024,
)
BODY = b"x" * 4050
PER_SEGMENT = 15
BOUND_S = 30.0


class AllocatingDisk(Disk):
    """Notes which thread creates which segments, and can refuse to."""

    def __init__(self) -> None:
        self.made_by: list[str] = []
        self.refused = 0
        self.fail_names = False
        self.names_may_fail = threading.Event()
        self.names_may_fail.set()
        self.room: int | None = None

    def open_new(self, path: str | Path, size: int) -> File:
        if size == SEGMENT:
            name = threading.current_thread().name
            if self.refused and name == "messagestore-allocate":
                raise OSError(self.refused, os.strerror(self.refused), str(path))
            self.made_by.append(name)
        return super().open_new(path, size)

    def fsync_dir(self, path: str | Path) -> None:
        if self.fail_names and threading.current_thread().name == "messagestore-allocate":
            self.names_may_fail.wait(BOUND_S)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().fsync_dir(path)

    def free(self, path: str | Path) -> int:
        return super().free(path) if self.room is None else self.room


def spares(root: Path) -> list[Path]:
    return sorted((root / "spark").glob("new-segment-*"))


def put(store: MessageStore, count: int) -> None:
    for _ in range(count):
        assert store.put_message(Message("t", BODY, queue_id=0)).is_ok


def fill(store: MessageStore, root: Path, count: int = PER_SEGMENT) -> None:
    """Put until the last segment is full, and the next two are made."""
    put(store, count)
    await_fact(lambda: len(spares(root)) == 2)


def await_fact(fact: Callable[[], bool]) -> None:
    until_s = time.monotonic() + BOUND_S
    while not fact() and time.monotonic() < until_s:
        time.sleep(0.001)


def test_a_thread_makes_the_next_two_segments(tmp_path: Path) -> None:
    """The put that needs a segment only gives the file its name; close removes what is left."""
    disk, root = AllocatingDisk(), tmp_path / "s"
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        put(store, 3)
        assert not spares(root)
        fill(store, root, PER_SEGMENT - 3)
        waiting = {path.stat().st_ino for path in spares(root)}
        assert len(waiting) == 2
        assert os.listdir(root / "commitlog") == ["0" * 20]
        put(store, PER_SEGMENT + 1)
        names = sorted(os.listdir(root / "commitlog"))
        assert len(names) == 3
        assert (root / "commitlog" / names[1]).stat().st_ino in waiting
        assert len(read_all(store)) == 2 * PER_SEGMENT + 1
    assert disk.made_by[0] != "messagestore-allocate"
    assert disk.made_by.count("messagestore-allocate") >= 2
    assert not spares(root)
    assert not [thread for thread in threading.enumerate() if thread.name == "messagestore-allocate"]
    assert verify(root).ok


def test_a_killed_writer_leaves_files_that_the_next_one_removes(tmp_path: Path) -> None:
    """They are no part of the log: a reader, recovery and `verify` find nothing of them."""
    root = tmp_path / "s"
    store = MessageStore.open(root, CONFIG)
    fill(store, root)
    die(root)
    assert len(spares(root)) == 2
    assert len(os.listdir(root / "commitlog")) == 1
    with MessageStore.open_read_only(root, CONFIG) as reader:
        assert reader.max_offset("t", 0) == PER_SEGMENT
    with MessageStore.open(root, CONFIG) as again:
        assert not spares(root)
        put(again, 3)
    assert verify(root).ok


def test_files_of_a_killed_child_stay_in_a_store_that_is_closed(tmp_path: Path) -> None:
    """Only a recovery removed them, and a store that another process closes afterwards needs none."""
    root = tmp_path / "s"
    with MessageStore.open(root, CONFIG) as store:
        put(store, 3)
    sleeping = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive, dead = process_token(sleeping.pid), process_token(ended.pid)
    ended.communicate(b"\n")
    another_boot = alive.replace(f".{boot_hash():08x}.", f".{boot_hash() ^ 1:08x}.")
    assert len({alive, dead, another_boot, own_token()}) == 4
    for number, token in enumerate([alive, dead, another_boot, own_token(), UNKNOWN]):
        (root / "spark" / f"new-segment-{token}-{number:08x}").write_bytes(bytes(SEGMENT))
    with MessageStore.open(root, CONFIG) as store:
        assert store.report is not None
        assert store.report.reason == "clean"
        assert [path.name for path in spares(root)] == [f"new-segment-{alive}-00000000"]
        put(store, 1)
    sleeping.communicate(b"\n")
    with MessageStore.open(root, CONFIG):
        assert not spares(root)


def test_a_file_that_a_living_process_lost_is_made_again(tmp_path: Path) -> None:
    """Its process may look dead from another container. It goes on, without an error."""
    disk, root = AllocatingDisk(), tmp_path / "s"
    with MessageStore.open(root, CONFIG.replace(preallocate=True), disk=disk) as store:
        fill(store, root)
        remove_orphans(store.writer.files)
        assert not spares(root)
        fill(store, root)
        assert len(read_all(store)) == 2 * PER_SEGMENT
    assert verify(root).ok


def test_blocks_are_reserved_ahead(tmp_path: Path) -> None:
    """With `preallocate`, the files have their blocks before a put needs them."""
    root = tmp_path / "s"
    with MessageStore.open(root, CONFIG.replace(preallocate=True)) as store:
        fill(store, root)

        def reserved() -> list[bool]:
            return [path.stat().st_blocks * 512 >= SEGMENT for path in spares(root)]

        await_fact(lambda: all(reserved()))  # a file is there before it has its blocks
        assert reserved() == [True, True]


def test_the_last_room_is_not_reserved_ahead(tmp_path: Path) -> None:
    """A disk that is nearly full is left to what is appended now."""
    disk, root = AllocatingDisk(), tmp_path / "s"
    with MessageStore.open(root, CONFIG.replace(preallocate=True), disk=disk) as store:
        disk.room = 2 * SEGMENT
        put(store, 3 * PER_SEGMENT)
        assert not spares(root)
    assert "messagestore-allocate" not in disk.made_by


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO])
def test_a_segment_that_cannot_be_made_ahead_fails_no_put(tmp_path: Path, number: int) -> None:
    """The put makes it."""
    disk, root = AllocatingDisk(), tmp_path / "s"
    disk.refused = number
    with MessageStore.open(root, CONFIG, disk=disk) as store:
        put(store, 3 * PER_SEGMENT)
        assert len(read_all(store)) == 3 * PER_SEGMENT
    assert not spares(root)


def test_a_file_that_somebody_removed_is_not_used(tmp_path: Path) -> None:
    """Another process that recovers the store removes what it takes for a dead writer's."""
    root = tmp_path / "s"
    with MessageStore.open(root, CONFIG) as store:
        fill(store, root)
        for path in spares(root):
            path.unlink()
        put(store, PER_SEGMENT)
        assert len(read_all(store)) == 2 * PER_SEGMENT


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", ASYNC_FLUSH])
def test_a_name_that_cannot_be_synced_stops_the_writer(tmp_path: Path, flush: str) -> None:
    """A second sync would not report it."""
    disk, root = AllocatingDisk(), tmp_path / "s"
    store = MessageStore.open(root, CONFIG.replace(flush_disk_type=flush), disk=disk)
    disk.fail_names = True
    with pytest.raises(StorePoisonedError, match="a sync failed"):  # noqa: PT012 - which put sees it is chance
        for _ in range(200):
            put(store, PER_SEGMENT)
            time.sleep(0.01)
    disk.fail_names = False
    with contextlib.suppress(StorePoisonedError):
        store.close()
    with MessageStore.open(root, CONFIG) as again:
        assert again.max_offset("t", 0) >= PER_SEGMENT


def test_close_says_that_a_name_could_not_be_synced(tmp_path: Path) -> None:
    """The thread that noticed it has no caller, and ASYNC_FLUSH puts that were acknowledged are not synced."""
    disk, root = AllocatingDisk(), tmp_path / "s"
    store = MessageStore.open(root, CONFIG.replace(flush_disk_type=ASYNC_FLUSH), disk=disk)
    disk.fail_names = True
    disk.names_may_fail.clear()
    put(store, PER_SEGMENT)  # the last ones have the next segments made; none of these puts needs one
    disk.names_may_fail.set()
    until_s = time.monotonic() + BOUND_S
    while store.writer.health is Health.SOUND and time.monotonic() < until_s:
        time.sleep(0.001)
    disk.fail_names = False
    with pytest.raises(StorePoisonedError, match="a sync failed"):
        store.close()
