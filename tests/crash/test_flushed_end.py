"""What a reader with `readUpTo=flushed` sees: what a power cut leaves, and never less than before."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import shutil
import time
from pathlib import Path

import pytest

from crash.harness import APP, SMALL, die
from crash.imitate import Broker, Process
from crash.simdisk import KillDisk, Killed, RecordingDisk
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    ConfigError,
    Message,
    MessageStore,
    StoreConfig,
    StorePoisonedError,
)
from messagestore.files.disk import Disk, File
from messagestore.files.state import StateFile
from messagestore.format.config import FLUSHED

LAZY = SMALL.replace(
    flush_disk_type=ASYNC_FLUSH, flush_interval_commit_log=3_600_000, flush_commit_log_thorough_interval=3_600_000
)
"""Nothing is synced unless somebody asks for it."""
ONLY_FLUSHED = StoreConfig(read_up_to=FLUSHED)


class FailingDisk(Disk):
    """A disk on which syncs fail, as soon as `fails` is set."""

    fails = False

    def fdatasync(self, file: File) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        super().fdatasync(file)


def seen(root: Path, config: StoreConfig = ONLY_FLUSHED, topic: str = "t") -> int:
    """How many messages of queue 0 a new reader sees."""
    with MessageStore.open_read_only(root, config) as reader:
        return reader.max_offset(topic, 0)


def flushed_end(root: Path) -> int:
    """How far the log is flushed; 0 without a store."""
    state = StateFile(Disk(), str(root / "spark" / "state")).read()
    return 0 if state is None else state.flushed_end


def put(store: MessageStore, count: int = 1) -> None:
    for _ in range(count):
        store.put_message(Message("t", b"x" * 40, queue_id=0))


def until(root: Path, count: int, config: StoreConfig = ONLY_FLUSHED) -> None:
    deadline_s = time.monotonic() + 30
    while seen(root, config) < count:
        assert time.monotonic() < deadline_s, f"{seen(root, config)} of {count}"
        time.sleep(0.005)


def test_async_messages_are_seen_when_they_are_synced(scratch: Path) -> None:
    root = scratch / "s"
    with MessageStore.open(root, LAZY) as store:
        put(store, 3)
        until(root, 3, StoreConfig())
        assert seen(root) == 0
        store.flush()
        assert seen(root) == 3
        put(store, 2)
        until(root, 5, StoreConfig())
        assert seen(root) == 3
    assert seen(root) == 5


def test_an_open_reader_follows_what_is_synced(scratch: Path) -> None:
    """The visible end stays where it is when the sync comes; the reader notices all the same."""
    root = scratch / "s"
    with MessageStore.open(root, LAZY) as store:
        put(store)
        until(root, 1, StoreConfig())
        with MessageStore.open_read_only(root, ONLY_FLUSHED) as reader:
            assert reader.max_offset("t", 0) == 0
            assert reader.get_message("t", 0, 0).messages == []
            store.flush()
            assert [m.body for m in reader.get_message("t", 0, 0).messages] == [b"x" * 40]


def test_sync_messages_are_seen_at_once(scratch: Path) -> None:
    """Also while ASYNC_FLUSH messages lie before them: the sync of a batch covers everything below its end."""
    p = Process(scratch / "s", LAZY, Disk())
    p.batch(version=0, rows=9, flush=SYNC_FLUSH)
    topic = f"topic-{APP}"
    assert seen(p.root, topic=topic) == seen(p.root, StoreConfig(), topic) > 0
    before = seen(p.root, topic=topic)
    p.batch(version=1, rows=9, flush=ASYNC_FLUSH)
    assert seen(p.root, topic=topic) == before < seen(p.root, StoreConfig(), topic)
    p.batch(version=2, rows=9, flush=SYNC_FLUSH)
    assert seen(p.root, topic=topic) == seen(p.root, StoreConfig(), topic)
    p.batch(version=3, rows=9, flush=ASYNC_FLUSH)
    async_end = seen(p.root, StoreConfig(), topic)
    assert seen(p.root, topic=topic) < async_end
    p.batch(version=3, rows=9, flush=SYNC_FLUSH)  # Spark sends it again: it is known, and now it is synced
    assert seen(p.root, topic=topic) == async_end
    p.die()


@pytest.mark.parametrize("seed", range(8))
def test_what_was_seen_once_is_seen_for_ever(scratch: Path, seed: int) -> None:
    """Two processes take turns with both modes, die and recover; a power cut at the end takes nothing that was seen."""
    chance, root = random.Random(seed), scratch / "s"
    root.mkdir()
    disk = RecordingDisk(root)
    processes = [Process(root, LAZY, disk), Process(root, LAZY, disk)]
    versions, before = [0, 0], 0
    for _ in range(25):
        number = chance.randrange(2)
        p, what = processes[number], chance.randrange(10)
        if what == 0:
            p.detach()
        elif what == 1:
            p.die()
            processes[number] = Process(root, LAZY, disk)
        else:
            flush = chance.choice((SYNC_FLUSH, ASYNC_FLUSH, ASYNC_FLUSH))
            p.batch(f"app-{number}", versions[number], rows=chance.randint(1, 9), flush=flush)
            versions[number] += 1
        assert flushed_end(root) >= before
        before = flushed_end(root)
    image = disk.image(disk.position, "strict").build(scratch / "image")
    for p in processes:
        p.die()
    with MessageStore.open(image, SMALL) as store:
        assert store.writer.end.physical_offset >= before


def test_recovery_keeps_what_was_seen(scratch: Path) -> None:
    """The writer is killed, and so is the next one, at each operation of its recovery."""
    p = Process(scratch / "s", LAZY, Disk())
    p.batch(version=0, rows=9, flush=ASYNC_FLUSH)
    p.batch(version=1, rows=9, flush=SYNC_FLUSH)
    p.batch(version=2, rows=9, flush=ASYNC_FLUSH)
    before = flushed_end(p.root)
    p.die()
    for kill_at in itertools.count():
        root, disk = scratch / f"copy-{kill_at}", KillDisk(kill_at)
        shutil.copytree(p.root, root)
        with contextlib.suppress(Killed), MessageStore.open(root, LAZY, disk=disk):
            break
        die(root)
        assert flushed_end(root) >= before, kill_at
    assert kill_at > 20


def test_a_failed_sync_is_no_sync(scratch: Path) -> None:
    """The writer stops; what it had not synced is never seen, although it is visible."""
    root, disk = scratch / "s", FailingDisk()
    p = Process(root, LAZY, disk)
    p.batch(version=0, rows=9, flush=SYNC_FLUSH)
    topic = f"topic-{APP}"
    before = seen(root, topic=topic)
    p.batch(version=1, rows=9, flush=ASYNC_FLUSH)
    disk.fails = True
    with pytest.raises(StorePoisonedError):
        p.batch(version=2, rows=9, flush=SYNC_FLUSH)
    assert seen(root, topic=topic) == before < seen(root, StoreConfig(), topic)
    p.die()


def test_a_store_that_a_broker_wrote_last_is_refused(scratch: Path) -> None:
    root = scratch / "s"
    with MessageStore.open(root, SMALL) as store:
        put(store)
    with MessageStore.open_read_only(root, ONLY_FLUSHED) as reader:
        Broker(root)
        with pytest.raises(ConfigError, match=r"readUpTo: found flushed, but nothing in .* says what is on the disk"):
            seen(root)
        with pytest.raises(ConfigError, match="a Java broker wrote the store last"):
            reader.max_offset("t", 0)
    with MessageStore.open(root, SMALL):
        pass
    assert seen(root) == 1, "a writer of ours has recovered it"


def test_an_empty_store_has_no_message(scratch: Path) -> None:
    with MessageStore.open(scratch / "s", SMALL) as store:
        store.create_topic("t", 1)
    with MessageStore.open_read_only(scratch / "s", ONLY_FLUSHED) as reader:
        assert reader.topics() == {}


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="readUpTo: found 'synced'; allowed is visible or flushed"):
        StoreConfig(read_up_to="synced")
