"""What readers see: committed prefixes, beside live writers, ours and brokers, and after crashes."""

from __future__ import annotations

import os
import shutil
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from crash.harness import die
from messagestore import BatchRequest, CorruptionError, Message, MessageStore, StoreWentBackwardsError
from messagestore.layout import UNIT
from messagestore.view import StoreView
from processes import CONTEXT
from small import SMALL, SMALL_ASYNC, bodies, columns, filled, read_all


def test_a_reader_follows_a_session(tmp_path: Path) -> None:
    """Each put is visible to another view when the put returns."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"0", queue_id=0))
        with MessageStore.open_read_only(tmp_path / "s") as reader:
            for i in range(1, 300):
                store.put_message(Message("t", b"%d" % i, queue_id=0))
                assert reader.max_offset("t", 0) == i + 1
            assert read_all(reader) == [b"%d" % i for i in range(300)]


def test_a_queue_that_grows_over_several_files_at_once(tmp_path: Path) -> None:
    """A batch fills the rest of a queue's file and two more: a reader that knew only the first sees all of it."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(10), queues=1), BatchRequest("app", 0))
        with MessageStore.open_read_only(tmp_path / "s") as reader:
            assert reader.max_offset("t", 0) == 10
            store.append_batch(columns(bodies(30), queues=1), BatchRequest("app", 1))
            assert reader.max_offset("t", 0) == 40


def test_an_idle_refresh_is_cheap(tmp_path: Path) -> None:
    """Asked 90 times a second by Spark: microseconds."""
    root = filled(tmp_path / "s", 10)
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        view = StoreView(root)
        view.refresh()
        begin = time.process_time()
        for _ in range(200):
            view.refresh()
        assert (time.process_time() - begin) / 200 < 0.001
        view.close()


def test_a_batch_in_flight_is_invisible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a batch is dispatched its units are there already; readers go by V and see nothing of it."""
    seen: list[tuple[int, int]] = []
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(4)), BatchRequest("app", 0))
        reader = MessageStore.open_read_only(tmp_path / "s")
        write_state = store.writer.write_state

        def look_first(**changes: int) -> None:
            if "visible_end" in changes:
                units = store.writer.files.queue("t", 0).end()
                seen.append((units, reader.max_offset("t", 0)))
            write_state(**changes)

        monkeypatch.setattr(store.writer, "write_state", look_first)
        store.append_batch(columns(bodies(10)), BatchRequest("app", 1))
        assert seen == [(7, 2)]
        assert reader.max_offset("t", 0) == 7
        reader.close()


def test_a_killed_writers_units_stay_invisible(tmp_path: Path) -> None:
    """A writer killed between dispatch and publish leaves V where it was."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    store.append_batch(columns(bodies(4)), BatchRequest("app", 0))
    store.writer.write_state = lambda **changes: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        store.put_message(Message("t", b"x", queue_id=0))
    die(root)
    with MessageStore.open_read_only(root) as reader:
        assert read_all(reader) == bodies(4)[::2]


def test_v_of_another_boot_counts_up_to_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut and before recovery a reader sees what was synced, no more."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    store.append_batch(columns(bodies(4)), BatchRequest("app", 0))
    store.writer.move_clean()
    store.append_batch(columns(bodies(10)), BatchRequest("app", 1))
    die(root)
    with MessageStore.open_read_only(root) as reader:
        assert len(read_all(reader)) == 7
    monkeypatch.setattr("messagestore.view.boot_hash", lambda: 12345)
    with MessageStore.open_read_only(root) as reader:
        assert len(read_all(reader)) == 2


def test_abort_ours_without_state_is_an_error(tmp_path: Path) -> None:
    """Nothing says what is visible: the reader names the command that decides."""
    root = tmp_path / "s"
    MessageStore.open(root, SMALL).put_message(Message("t", b"x", queue_id=0))
    die(root)
    (root / "spark" / "state").write_bytes(bytes(4096))
    with pytest.raises(CorruptionError, match="messagestore recover"):
        MessageStore.open_read_only(root)


def test_a_brokers_store(tmp_path: Path) -> None:
    """No spark folder: what the queues show, and it grows as a broker appends."""
    root = filled(tmp_path / "broker", 10)
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root / "spark")
    (root / "abort").write_text("4711")
    with MessageStore.open_read_only(root) as reader:
        assert (reader.store_id, len(read_all(reader))) == ("", 5)
        unit = (root / "consumequeue" / "t" / "0" / f"{0:020d}").read_bytes()
        end = sum(UNIT.dtype.itemsize for _ in range(5))
        assert any(unit[:end]) and not any(unit[end:])


def test_a_torn_unit_of_a_live_broker_is_not_taken(tmp_path: Path) -> None:
    """A unit that is seen half written points to no record of its queue: it does not count yet."""
    root = filled(tmp_path / "s", 10)
    shutil.rmtree(root / "spark")
    (root / "abort").write_text("4711")
    path = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[100:112] = (7).to_bytes(8, "big") + (90).to_bytes(4, "big")
    path.write_bytes(data)
    with MessageStore.open_read_only(root) as reader:
        assert reader.max_offset("t", 0) == 5
        assert read_all(reader) == bodies(10)[::2]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    """A flipped bit in a body: refused with file and physical offset, not skipped."""
    root = filled(tmp_path / "s", 10)
    segment = root / "commitlog" / f"{0:020d}"
    with MessageStore.open_read_only(root) as reader:
        at = reader.get_message("t", 0, 2).messages[0].physical_offset
    data = bytearray(segment.read_bytes())
    data[at + 90] ^= 1
    segment.write_bytes(data)
    with MessageStore.open_read_only(root) as reader:
        with pytest.raises(CorruptionError) as caught:
            read_all(reader)
        assert caught.value.physical_offset == at
        assert next(reader.view.read("t", 0, 0, 5, ["body"], verify_body_crc=False)).num_rows == 5


@pytest.mark.parametrize("position", [20, 28, 12, 4, 0])
def test_a_record_that_disagrees_with_its_unit_is_named(tmp_path: Path, position: int) -> None:
    """Queue offset, physical offset, queue id, magic or size changed: no other record is given in its place."""
    root = filled(tmp_path / "s", 10)
    segment = root / "commitlog" / f"{0:020d}"
    with MessageStore.open_read_only(root) as reader:
        at = reader.get_message("t", 0, 2).messages[0].physical_offset
        data = bytearray(segment.read_bytes())
        data[at + position + 3] ^= 1
        segment.write_bytes(data)
        with pytest.raises(CorruptionError):
            list(reader.view.read("t", 0, 0, 5, ["body"]))


def test_small_pieces_are_the_same(tmp_path: Path) -> None:
    """Rows and bytes of one piece are limits, never gaps."""
    root = filled(tmp_path / "s", 200)
    with MessageStore.open_read_only(root) as reader:
        view = reader.view
        for max_rows, max_bytes in ((1, 1 << 20), (7, 1 << 20), (1000, 1), (1000, 500), (1000, 1 << 20)):
            found: list[bytes] = []
            for batch in view.read("t", 0, 10, 100, ["queue_offset", "body"], max_rows=max_rows, max_bytes=max_bytes):
                assert batch.num_rows <= max_rows
                assert batch.column("queue_offset").to_pylist()[0] == 10 + len(found)
                found += batch.column("body").to_pylist()
            assert found == bodies(200)[::2][10:100]


def test_a_deleted_queue_is_not_read_as_empty(tmp_path: Path) -> None:
    """Units that were visible and are gone: an error, not an end."""
    root = filled(tmp_path / "s", 10)
    with MessageStore.open_read_only(root) as reader:
        high = reader.max_offset("t", 0)
        shutil.rmtree(root / "consumequeue" / "t")
        reader.view.files.forget_queues()
        reader.view.files.pool.clear()
        with pytest.raises(StoreWentBackwardsError):
            list(reader.view.read("t", 0, 0, high, ["body"]))


def follow(root: str, queue_id: int, count: int, pipe: Connection) -> None:
    """A reader process: polls a queue until it has `count` messages; sends the numbers it read."""
    numbers: list[int] = []
    deadline = time.monotonic() + 60
    with MessageStore.open_read_only(root) as reader:
        while len(numbers) < count and time.monotonic() < deadline:
            high = reader.max_offset("t", queue_id)
            for batch in reader.view.read("t", queue_id, len(numbers), high, ["queue_offset", "body"]):
                assert batch.column("queue_offset").to_pylist() == list(
                    range(len(numbers), len(numbers) + batch.num_rows)
                )
                numbers += [int(b[:6]) for b in batch.column("body").to_pylist()]
    pipe.send(numbers)


@pytest.mark.parametrize("how", ["batches", "sync puts", "async puts"])
def test_reader_processes_beside_a_writer(tmp_path: Path, how: str) -> None:
    """Readers that poll without pause, under roll-over of every kind of file: nothing torn, lost, repeated or out of
    order.
    """
    root = tmp_path / "s"
    config = SMALL_ASYNC if how == "async puts" else SMALL
    count = 200 if how == "sync puts" else 1500
    with MessageStore.open(root, config) as store:
        pipes = []
        for number in range(2):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=follow, args=(str(root), number, count, theirs), daemon=True)
            process.start()
            pipes.append((mine, process))
        if how == "batches":
            for version in range(count // 50):
                store.append_batch(columns(bodies(100, start=100 * version)), BatchRequest("app", version))
        else:
            for i, body in enumerate(bodies(2 * count)):
                store.put_message(Message("t", body, queue_id=i % 2))
        for number, (pipe, process) in enumerate(pipes):
            assert pipe.poll(90)
            assert pipe.recv() == list(range(number, 2 * count, 2))
            process.join()


def test_readers_while_the_store_is_recovered_and_closed(tmp_path: Path) -> None:
    """A reader thread polls through kills, recoveries and clean ends: what it has read never changes or goes back."""
    root = filled(tmp_path / "s", 2)
    stop = threading.Event()
    errors: list[BaseException] = []
    seen: list[bytes] = []

    def poll() -> None:
        try:
            with MessageStore.open_read_only(root) as reader:
                while not stop.is_set():
                    high = reader.max_offset("t", 0)
                    assert high >= len(seen)
                    for batch in reader.view.read("t", 0, len(seen), high, ["body"]):
                        seen.extend(batch.column("body").to_pylist())
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    expected = bodies(2)[::2]
    for turn in range(12):
        store = MessageStore.open(root, SMALL)
        rows = bodies(40, start=1000 * (turn + 1))
        store.append_batch(columns(rows), BatchRequest("app", turn))
        expected += rows[::2]
        if turn % 3:
            die(root)
        else:
            store.close()
    deadline = time.monotonic() + 10
    while len(seen) < len(expected) and not errors and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert not errors, errors
    assert seen == expected
    assert os.path.exists(root)


def test_a_reader_that_was_there_before_the_first_file(tmp_path: Path) -> None:
    """A reader looked at a broker's empty store, and took the default sizes for its: the first file of another size was
    called damage."""
    made, root = filled(tmp_path / "made", 40), tmp_path / "store"
    for folder in ("commitlog", "consumequeue"):
        (root / folder).mkdir(parents=True)
    with MessageStore.open_read_only(root) as store:
        assert store.max_offset("t", 0) == 0
        for folder in ("commitlog", "consumequeue"):
            shutil.copytree(made / folder, root / folder, dirs_exist_ok=True)
        assert store.max_offset("t", 0) == 20
        assert len(store.get_message("t", 0, 0, 100).messages) == 20
