"""A disk on which another program has taken the last byte, and whose writer was killed: the store can make room."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from messagestore import Message, MessageStore, StoreConfig

CONFIG = StoreConfig(
    mapped_file_size_commit_log=1 << 22,
    mapped_file_size_consume_queue=20_000,
    max_hash_slot_num=1000,
    max_index_num=4000,
)
COUNT = 5000
ROOM = 1 << 17


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk], check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def killed(root: Path) -> None:
    """Let another process put messages, and kill it."""
    child = os.fork()
    if not child:
        try:
            store = MessageStore.open(root, CONFIG)
            for number in range(COUNT):
                store.put_message(Message("t", b"%d/" % number + b"." * 1000, keys=[f"k{number}"]))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def fill(disk: Path, left: int = 0) -> None:
    """Let another program take all of the disk but some bytes."""
    with contextlib.suppress(OSError), open(disk / "other", "wb", buffering=0) as other:
        while os.statvfs(disk).f_bavail * 4096 > left:
            other.write(bytes(4096))


def test_a_store_can_be_opened_and_shortened_on_a_disk_without_a_byte(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = disk / "s"
    killed(root)
    fill(disk)
    with MessageStore.open(root, CONFIG) as store:
        assert "had kept for a recovery" in caplog.text
        assert sum(store.max_offset("t", queue_id) for queue_id in store.topics()["t"]) == COUNT
        assert len(store.delete_expired_files(at_once=True).segments) == 1
        assert store.put_message(Message("t", b"more")).queue_offset
    lock = (root / "spark" / "writer.lock").stat()
    assert (lock.st_size, lock.st_blocks * 512) == (512, 4096)


def test_room_is_kept_where_there_is_plenty(disk: Path) -> None:
    """Not on a disk that is nearly full, of which it would take the rest."""
    root = disk / "s"
    lock = root / "spark" / "writer.lock"
    fill(disk, left=1 << 20)
    MessageStore.open(root, CONFIG).close()
    assert lock.stat().st_blocks * 512 < ROOM
    (disk / "other").unlink()
    MessageStore.open(root, CONFIG).close()
    assert lock.stat().st_blocks * 512 >= ROOM
