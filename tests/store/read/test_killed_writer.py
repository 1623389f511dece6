"""After a writer with ASYNC_FLUSH was killed, and before another one opens the store, a reader sees every put that was
acknowledged: their records are in the log, and only their units are still to be written."""

from __future__ import annotations

import codecs
import logging
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crash import strangers
from crash.harness import die
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.simdisk import RecordingDisk
from messagestore import ASYNC_FLUSH, BatchRequest, Message, MessageStore, NotRecoveredError, ReadOnlyStore
from messagestore.files.writer_lock import WriterLock
from messagestore.inspect.operator import status
from messagestore.read import sight
from messagestore.recovery.apply import _Changes
from messagestore.recovery.survey import Survey, Surveyor
from small import SMALL, SMALL_ASYNC, bodies, columns, read_all

HOUR_MS = 3_600_000
QUIET = SMALL_ASYNC.replace(flush_interval_commit_log=HOUR_MS, flush_commit_log_thorough_interval=HOUR_MS)


@pytest.fixture(autouse=True)
def _look_at_the_lock_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "_LOCK_LOOK_S", 0.0)


def filled(root: Path, count: int = 200) -> MessageStore:
    """A session with acknowledged puts, some of which have no unit yet; a batch shows those before it."""
    store = MessageStore.open(root, QUIET)
    store.writer.start_flushing = lambda: None  # no thread writes units
    for i in range(count):
        store.put_message(Message("t", b"%d" % i, queue_id=i % 3, keys=[f"k{i}"]))
        if i == count // 3:
            store.append_batch(columns(bodies(6), topic="b"), BatchRequest("app", 0, flush_disk_type=ASYNC_FLUSH))
    return store


def everything(store: ReadOnlyStore) -> dict[tuple[str, int], list[bytes]]:
    return {
        (topic, queue_id): read_all(store, topic, queue_id)
        for topic, queue_ids in store.topics().items()
        for queue_id in queue_ids
    }


def test_every_acknowledged_put_is_seen_after_a_kill(tmp_path: Path) -> None:
    """By each way to look, and nothing is written; a writer then finds the same."""
    root = tmp_path / "s"
    filled(root)
    die(root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with MessageStore.open_read_only(root, SMALL) as reader:
        seen = everything(reader)
        assert sorted(int(body) for queue_id in range(3) for body in seen["t", queue_id]) == list(range(200))
        found = reader.query_message("t", "k199")
        assert [message.body for message in found] == [b"199"]
        assert reader.look_message_by_offset(found[0].physical_offset).body == b"199"
        assert reader.get_message("t", 1, 66).messages[0].body == b"199"
    assert status(str(root))["messages"] == 206
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    with MessageStore.open(root, SMALL) as store:
        assert everything(store) == seen


def test_a_reader_that_was_open_before_the_kill(tmp_path: Path) -> None:
    """It sees V beside the writer, everything after the kill, no less during the recovery, and then what is new."""
    root = tmp_path / "s"
    store = filled(root)
    with MessageStore.open_read_only(root, SMALL) as reader:
        visible = store.writer.state.visible_end
        assert (reader.max_offset("t", 0), reader.view.visible.end) == (23, visible)
        die(root)
        assert reader.max_offset("t", 0) == 67
        lock = WriterLock(str(root / "spark" / "writer.lock"))
        lock.acquire(1, description="a recovery that has not changed anything yet")
        assert reader.max_offset("t", 0) == 67
        lock.release()
        with MessageStore.open(root, SMALL) as again:
            again.put_message(Message("t", b"new", queue_id=0))
            assert reader.max_offset("t", 0) == 68
            assert reader.view.tail is None


def test_a_reader_that_opens_while_a_recovery_looks_at_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw what the killed writer had published, and nobody said that acknowledged puts were missing."""
    root = tmp_path / "s"
    with killed_child(root):
        pass
    seen: list[int] = []
    real = Surveyor.run

    def looking(surveyor: Surveyor) -> Survey:
        with MessageStore.open_read_only(root, SMALL) as reader:
            seen.append(reader.max_offset("t", 0))
        return real(surveyor)

    monkeypatch.setattr(Surveyor, "run", looking)
    with MessageStore.open(root, SMALL) as store:
        assert store.max_offset("t", 0) == 67
    assert seen == [67]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_reader_that_may_not_open_the_lock(tmp_path: Path) -> None:
    """It could not ask whether the writer lives, and would see what that had published. The kernel's list of locks
    tells: beside a writer that lives, the reader sees what is published, and after a kill everything."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "s"
        with killed_child(root):
            for path in (Path(folder), *Path(folder).rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            (root / "spark" / "writer.lock").chmod(0o600)
            assert is_seen_by_nobody(root, 23)
        assert is_seen_by_nobody(root, 67)


@contextmanager
def killed_child(root: Path) -> Iterator[None]:
    """Another process fills a store, and is killed afterwards."""
    ready, filled_it = os.pipe()
    child = os.fork()
    if not child:
        filled(root)
        os.write(filled_it, b"1")
        signal.pause()
    try:
        assert os.read(ready, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(filled_it)


def is_seen_by_nobody(root: Path, count: int) -> bool:
    """Whether another user, who may not open the lock, sees so many messages in t/0."""

    def look() -> None:
        with MessageStore.open_read_only(root, SMALL) as reader:
            assert reader.max_offset("t", 0) == count

    codecs.lookup("ascii")  # that user may not read Python's files
    return strangers._as_nobody(look)


@pytest.mark.parametrize("step", ["_begin", "_make_durable", "_repair_derived", "_publish"])
def test_nothing_disappears_while_a_recovery_works_or_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """An open reader, and one that comes while the recovery is dead, see the acknowledged puts at each step."""
    root = tmp_path / "s"
    filled(root)
    die(root)
    reader = MessageStore.open_read_only(root, SMALL)
    assert reader.max_offset("t", 0) == 67
    real = getattr(_Changes, step)

    def dying(changes: _Changes, *arguments: object) -> object:
        assert reader.max_offset("t", 0) == 67
        real(changes, *arguments)
        assert reader.max_offset("t", 0) == 67
        raise KeyboardInterrupt

    monkeypatch.setattr(_Changes, step, dying)
    with pytest.raises(KeyboardInterrupt):
        MessageStore.open(root, SMALL)
    die(root)
    assert len(read_all(reader)) == 67
    with MessageStore.open_read_only(root, SMALL) as another:
        assert len(read_all(another)) == 67
    reader.close()


def test_what_lies_above_the_limit_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`provenTailSize` limits the search; a warning says what is left out, or an error on request."""
    root = tmp_path / "s"
    filled(root, 900)
    die(root)
    config = SMALL.replace(proven_tail_size=2_000)
    with MessageStore.open_read_only(root, config) as reader:
        assert 101 < reader.max_offset("t", 0) < 300
    assert "a writer was killed" in caplog.text
    assert "not examined (provenTailSize)" in caplog.text
    with pytest.raises(NotRecoveredError, match="a writer was killed"):
        MessageStore.open_read_only(root, config.replace(fail_on_unproven=True))


@pytest.mark.parametrize("seed", range(6))
def test_a_reader_sees_no_more_than_recovery_keeps(tmp_path: Path, seed: int) -> None:
    """Puts and batches, killed between any two operations or in the middle of a write: every acknowledged message is
    seen, of a batch everything or nothing, and recovery keeps what was seen."""
    chance, root = random.Random(seed), tmp_path / "store"
    disk = MemRecordingDisk(root)
    acknowledged: list[tuple[int, bytes]] = []
    with MessageStore.open(root, QUIET, disk=disk) as store:
        for step in range(25):
            if chance.random() < 0.7:
                body = b"put/%d" % step + bytes(chance.randrange(900))
                store.put_message(Message("t", body, queue_id=0, properties={"p": "x" * chance.randrange(300)}))
                acknowledged.append((disk.position, body))
            else:
                rows = bodies(5, start=5 * step)
                request = BatchRequest("app", step, flush_disk_type=ASYNC_FLUSH)
                store.append_batch(columns(rows, topic="b", queues=1), request)
                acknowledged += [(disk.position, body) for body in rows]
        count = disk.position
    logging.disable(logging.WARNING)
    try:
        for _ in range(25):
            cut = chance.randint(1, count)
            for found in images(disk, cut, tmp_path):
                check(found, {body for position, body in acknowledged if position <= cut}, f"{seed} {cut}")
    finally:
        logging.disable(logging.NOTSET)


def images(disk: RecordingDisk, cut: int, folder: Path) -> Iterator[MemDisk]:
    """What a kill leaves: everything that was written until then."""
    for image in disk.images(cut, ("all",), limit=1):
        found = MemDisk(folder / "image", image.folder)
        if "commitlog/" in found.tree():
            yield found


def check(disk: MemDisk, promised: set[bytes], label: str) -> None:
    with MessageStore.open_read_only(disk.root, QUIET, disk=disk) as reader:
        seen = everything(reader)
    with MessageStore.open(disk.root, QUIET, disk=disk) as store:
        kept = everything(store)
    for key, found in seen.items():
        assert kept.get(key, [])[: len(found)] == found, label
    assert promised <= {body for found in seen.values() for body in found}, label
    assert len(seen.get(("b", 0), [])) % 5 == 0, label
