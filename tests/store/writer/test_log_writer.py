"""The writer: order of its steps, in flight, clean end, undoing, poison."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from messagestore import (
    ASYNC_FLUSH,
    BatchRequest,
    Message,
    MessageIllegalError,
    MessageStore,
    StoreFullError,
    StorePoisonedError,
)
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.disk import Disk, File
from messagestore.files.state import NOTHING_IN_FLIGHT, StateFile
from messagestore.format.record import crc32
from messagestore.inspect.verify import verify
from small import SMALL, bodies, columns, filled, read_all


class TracingDisk(Disk):
    """Names of the operations in order, and a full disk on demand."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.full = False

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        name = (
            Path(file.path).parent.name
            if Path(file.path).parent.name in ("commitlog", "index")
            else Path(file.path).name
        )
        if self.full and name == "commitlog":
            raise StoreFullError(f"{file.path}: no room", path=file.path, needed=len(data), free=0)
        self.trace.append("head" if name == "commitlog" and len(data) == 8 else name)
        super().pwrite(file, data, position)

    def fdatasync(self, file: File) -> None:
        self.trace.append("sync " + (Path(file.path).parent.name if "commitlog" in file.path else Path(file.path).name))
        super().fdatasync(file)

    def punch(self, file: File, position: int, size: int) -> None:
        self.trace.append("punch")
        super().punch(file, position, size)


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    """In flight, data, record, sync, head, sync, queues, index, publish: nothing comes before what it relies on."""
    disk = TracingDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.append_batch(columns(bodies(4)), BatchRequest("app", 0))
        disk.trace.clear()
        store.append_batch(columns(bodies(4), queues=1), BatchRequest("app", 1))
        trace = [name for name in disk.trace if name != "index"]
        queue = f"{0:020d}"
        assert trace[:6] == ["state", "commitlog", "commitlog", "sync commitlog", "head", "sync commitlog"]
        assert trace[6:] == [queue, queue, "state"]
        assert disk.trace.index("index") > disk.trace.index(queue)
        assert disk.trace[-1] == "state"


def test_state_through_a_session(tmp_path: Path) -> None:
    """In flight from the first put on, V behind each put, nothing in flight and C = V after close."""
    path = str(tmp_path / "s" / "spark" / "state")
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        first = store.put_message(Message("t", b"x", queue_id=0))
        state = StateFile(Disk(), path).read()
        assert state is not None
        assert (state.visible_end, state.in_flight, state.clean_end) == (first.size, first.size, 0)
    state = StateFile(Disk(), path).read()
    assert state is not None and state.clean
    assert (state.visible_end, state.in_flight, state.clean_end) == (first.size, NOTHING_IN_FLIGHT, first.size)
    data = (tmp_path / "s" / "commitlog" / f"{0:020d}").read_bytes()[: first.size]
    assert (state.anchor_position, state.anchor_size, state.anchor_crc) == (0, first.size, crc32(data))


def test_the_store_checkpoint_at_the_clean_end(tmp_path: Path) -> None:
    """Its times are the store times at C, never newer; the other fields stay as a broker left them."""
    root = filled(tmp_path / "s", 5)
    found = store_checkpoint.read(Disk(), str(root / "checkpoint"))
    with MessageStore.open_read_only(root) as reader:
        last = max(m.store_timestamp_ms for q in (0, 1) for m in reader.get_message("t", q, 0).messages)
    assert found.physic_timestamp_ms == found.logics_timestamp_ms == last
    assert 0 < found.index_timestamp_ms <= last
    store_checkpoint.write(
        Disk(),
        str(root / "checkpoint"),
        store_checkpoint.StoreCheckpoint(1, 2, 3, 4444, 5),
        via=str(root / "spark" / "new-checkpoint"),
    )
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    assert store_checkpoint.read(Disk(), str(root / "checkpoint")).master_flushed_offset == 4444


def test_the_clean_end_moves_at_a_roll(tmp_path: Path) -> None:
    """A new segment: everything behind is synced, so a broker's walk from it finds all queues complete."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        while len(store.writer.log.offsets) < 2:
            store.put_message(Message("t", b"x" * 500, queue_id=0))
        assert store.writer.state.clean_end == store.writer.state.visible_end > SMALL.mapped_file_size_commit_log


def test_the_clean_end_moves_in_time(tmp_path: Path) -> None:
    """After cleanInterval, at the next publish."""
    with MessageStore.open(tmp_path / "s", SMALL.replace(clean_interval="0s")) as store:
        result = store.put_message(Message("t", b"x", queue_id=0))
        assert store.writer.state.clean_end == result.size


def test_a_full_disk_undoes_the_put(tmp_path: Path) -> None:
    """Also the BLANK of a roll-over: the log ends where it ended, in zeros, and the next put goes there."""
    disk = TracingDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        while store.writer.log.left(store.writer.end.physical_offset) > 3000:
            store.put_message(Message("t", b"x" * 900, queue_id=0))
        count, end = store.max_offset("t", 0), store.writer.end.physical_offset
        for size in (10, 2990):
            disk.full = True
            with pytest.raises(StoreFullError):
                store.put_message(Message("t", b"y" * size, queue_id=0))
            disk.full = False
            assert store.writer.end.physical_offset == end
            assert not any(store.writer.log.read(end, 1 << 20))
        assert store.put_message(Message("t", b"y" * 2990, queue_id=0)).queue_offset == count
        assert len(read_all(store)) == count + 1
    assert verify(tmp_path / "s").ok


def test_poison_is_remembered_in_state(tmp_path: Path) -> None:
    """Another process that was attached all the time must not go on from what it cached."""
    store = MessageStore.open(tmp_path / "s", SMALL)
    store.put_message(Message("t", b"x", queue_id=0))
    error = store.writer.poison("a sync failed (test)")
    assert isinstance(error, StorePoisonedError)
    state = StateFile(Disk(), str(tmp_path / "s" / "spark" / "state")).read()
    assert state is not None and state.poisoned
    store.close()
    assert (tmp_path / "s" / "abort").exists()
    with MessageStore.open(tmp_path / "s", SMALL) as again:
        assert not again.writer.state.poisoned


def test_queue_offsets_are_range_checked(tmp_path: Path) -> None:
    """A queue offset that cannot be a position in a file is refused before it is packed."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        store.writer.numbers.next_offsets[("t", 0)] = 1 << 62
        with pytest.raises(MessageIllegalError, match="queue offset"):
            store.put_message(Message("t", b"x", queue_id=0))
        assert len(read_all(store)) == 1


def test_async_flag_is_set_by_puts_too(tmp_path: Path) -> None:
    """ASYNC_FLUSH puts: `state` says so before the first byte."""
    with MessageStore.open(tmp_path / "s", SMALL.replace(flush_disk_type=ASYNC_FLUSH)) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        assert store.writer.state.asynchronous


def test_puts_that_wait_are_synced_before_they_are_visible(tmp_path: Path) -> None:
    """Also when an ASYNC batch was appended before: a SYNC session's puts are published after their sync only."""
    disk = TracingDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.append_batch(columns(bodies(2)), BatchRequest("app", 0, flush_disk_type=ASYNC_FLUSH))
        store._attached.flush.stop()  # type: ignore[union-attr]
        store.put_message(Message("t", b"waits", queue_id=0, wait_store_msg_ok=False))
        disk.trace.clear()
        store.append_batch(columns(bodies(2)), BatchRequest("app", 1))
        assert disk.trace[0] == "sync commitlog"


class LockBehindADeadDisk(Disk):
    """Says EIO when it is asked for the lock file."""

    dead = False

    def at_path(self, file: File) -> bool:
        if self.dead and file.path.endswith("/lock"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), file.path)
        return super().at_path(file)


@pytest.mark.parametrize("kind", [TimeoutError, ValueError, KeyboardInterrupt])
def test_an_exception_of_a_signal_handler_within_a_put_stops_the_writer(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    """Between the record and the note of where it ends: the next record would otherwise be written over it."""

    class Numbers(dict[tuple[str, int], int]):
        def __setitem__(self, queue: tuple[str, int], number: int) -> None:
            super().__setitem__(queue, number)
            raise kind

    store = MessageStore.open(tmp_path / "s", SMALL)
    store.put_message(Message("t", b"before", queue_id=0))
    store.writer.numbers.next_offsets = Numbers(store.writer.numbers.next_offsets)
    with pytest.raises(kind):
        store.put_message(Message("t", b"in doubt", queue_id=0))
    with pytest.raises(StorePoisonedError, match=r"an append was interrupted .*writes nothing more\. Close the store"):
        store.put_message(Message("t", b"refused", queue_id=0))
    with MessageStore.open(tmp_path / "s", SMALL) as other:  # the session that can write nothing is not in its way
        other.put_message(Message("t", b"after", queue_id=0))
    store.close()
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        assert read_all(store) == [b"before", b"in doubt", b"after"]
    assert verify(tmp_path / "s").ok


@pytest.mark.parametrize("batch", [False, True], ids=["put", "batch"])
def test_a_lock_that_cannot_be_looked_at_stops_the_writer(tmp_path: Path, batch: bool) -> None:
    """A dead disk may show there first: the error says what to do, nothing is written, and the next session goes on."""
    disk = LockBehindADeadDisk()
    store = MessageStore.open(tmp_path / "s", SMALL, disk=disk)
    store.put_message(Message("t", b"before", queue_id=0))
    disk.dead, store.writer._locks_checked_s = True, 0.0

    def append() -> object:
        if batch:
            return store.append_batch(columns(bodies(2)), BatchRequest("app", 0))
        return store.put_message(Message("t", b"x", queue_id=0))

    for _ in range(2):
        with pytest.raises(StorePoisonedError, match=r"lock file cannot be examined.*Check the disk"):
            append()
        disk.dead = False  # it stays stopped
    store.close()
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        assert read_all(store) == [b"before"]
