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
from crash.imitate import another_boot
from messagestore import (
    ASYNC_FLUSH,
    SYNC_FLUSH,
    BatchRequest,
    CorruptionError,
    GetMessageStatus,
    MagicError,
    Message,
    MessageStore,
    NotAStoreError,
    OffsetOutOfRangeError,
    ReadOnlyStore,
    StoreConfig,
    StoreWentBackwardsError,
)
from messagestore.files.index_table import IndexTable
from messagestore.format.layout import UNIT
from messagestore.read import queue_records
from messagestore.read.view import StoreView
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


@pytest.mark.parametrize(("flush", "seen"), [(SYNC_FLUSH, 7), (ASYNC_FLUSH, 2)])
def test_v_of_another_boot_counts_as_far_as_it_is_proven(tmp_path: Path, flush: str, seen: int) -> None:
    """After a power cut and before recovery a reader sees what is proven to be on the disk, no more."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    store.append_batch(columns(bodies(4)), BatchRequest("app", 0))
    store.writer.clean_end.move()
    store.append_batch(columns(bodies(10)), BatchRequest("app", 1, flush_disk_type=flush))
    die(root)
    with MessageStore.open_read_only(root) as reader:
        assert len(read_all(reader)) == 7
    with another_boot(), MessageStore.open_read_only(root) as reader:
        assert len(read_all(reader)) == seen


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
        assert next(queue_records.read(reader.view, "t", 0, 0, 5, ["body"], verify_body_crc=False)).num_rows == 5


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
            list(queue_records.read(reader.view, "t", 0, 0, 5, ["body"]))


def test_small_pieces_are_the_same(tmp_path: Path) -> None:
    """Rows and bytes of one piece are limits, never gaps."""
    root = filled(tmp_path / "s", 200)
    with MessageStore.open_read_only(root) as reader:
        view = reader.view
        for max_rows, max_bytes in ((1, 1 << 20), (7, 1 << 20), (1000, 1), (1000, 500), (1000, 1 << 20)):
            found: list[bytes] = []
            for batch in queue_records.read(
                view, "t", 0, 10, 100, ["queue_offset", "body"], max_rows=max_rows, max_bytes=max_bytes
            ):
                assert batch.num_rows <= max_rows
                assert batch.column("queue_offset").to_pylist()[0] == 10 + len(found)
                found += batch.column("body").to_pylist()
            assert found == bodies(200)[::2][10:100]


def test_pieces_that_are_small_read_few_units_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units cost time, and a piece that its bytes limit leaves most of them to the next."""
    root, read, units = filled(tmp_path / "s", 2000), list[int](), StoreView.units

    def counted(view: StoreView, topic: str, queue_id: int, first: int, end: int) -> object:
        found = units(view, topic, queue_id, first, end)
        read.append(len(found))
        return found

    monkeypatch.setattr(StoreView, "units", counted)
    with MessageStore.open_read_only(root) as reader:
        pieces = list(queue_records.blocks(reader.view, "t", 0, 0, 1000, 1000, 4096))
        assert [number for piece in pieces for number in piece.queue_offsets] == list(range(1000))
        assert len(pieces) > 20
        assert sum(read) < 1500

        read.clear()
        whole = list(queue_records.blocks(reader.view, "t", 0, 0, 1000, 1000, 1 << 20))
        assert (len(whole), read) == (1, [1000])


def test_a_deleted_queue_is_not_read_as_empty(tmp_path: Path) -> None:
    """Units that were visible and are gone: an error, not an end."""
    root = filled(tmp_path / "s", 10)
    with MessageStore.open_read_only(root) as reader:
        high = reader.max_offset("t", 0)
        shutil.rmtree(root / "consumequeue" / "t")
        reader.view.files.forget_queues()
        reader.view.files.pool.clear()
        with pytest.raises(CorruptionError, match="units of t/0, as at the clean end, found no file"):
            list(queue_records.read(reader.view, "t", 0, 0, high, ["body"]))


def follow(root: str, queue_id: int, count: int, pipe: Connection) -> None:
    """A reader process: polls a queue until it has `count` messages; sends the numbers it read."""
    numbers: list[int] = []
    deadline = time.monotonic() + 120
    with MessageStore.open_read_only(root) as reader:
        while len(numbers) < count and time.monotonic() < deadline:
            high = reader.max_offset("t", queue_id)
            for batch in queue_records.read(reader.view, "t", queue_id, len(numbers), high, ["queue_offset", "body"]):
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
                    for batch in queue_records.read(reader.view, "t", 0, len(seen), high, ["body"]):
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
    deadline = time.monotonic() + 120
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


# ---- files that go while they are read


def delete_segments(root: Path, count: int) -> int:
    """As retention does; where the log begins now."""
    paths = sorted((root / "commitlog").iterdir())
    for path in paths[:count]:
        path.unlink()
    return int(paths[count].name)


def test_a_store_that_is_open_notices_retention(tmp_path: Path) -> None:
    """Segments are deleted under an open read-only store: RocketMQ's status and the new begin, without a restart."""
    root = filled(tmp_path / "s", 600)
    with MessageStore.open_read_only(root) as reader:
        assert reader.get_message("t", 0, 0).status is GetMessageStatus.FOUND
        begin = delete_segments(root, 2)
        reader.view.files.log_pool.clear()  # the files were not open, or others have displaced them
        found = reader.get_message("t", 0, 0)
        assert found.status is GetMessageStatus.OFFSET_TOO_SMALL
        first = reader.min_offset("t", 0)
        assert found.next_begin_offset == found.min_offset == first > 0
        with MessageStore.open_read_only(root) as other:
            assert other.min_offset("t", 0) == first
        message = reader.get_message("t", 0, first).messages[0]
        assert message.physical_offset >= begin
        assert reader.look_message_by_offset(0) is None
        assert reader.query_message("t", "k0") == []
        assert reader.queue_offset_by_time("t", 0, 0) == first


@pytest.mark.parametrize("open_files", [True, False], ids=["files are open", "files are not open"])
def test_a_range_that_retention_takes_while_it_is_read_is_counted(tmp_path: Path, open_files: bool) -> None:
    """What was read before is given; then the error says how many messages are gone, and where to go on."""
    root = filled(tmp_path / "s", 600)
    with MessageStore.open_read_only(root) as reader:
        view, counts = reader.view, list[int]()
        high = reader.max_offset("t", 0)
        batches = (
            block.decoded(["queue_offset"]) for block in queue_records.blocks(view, "t", 0, 0, high, 10, 1 << 20)
        )
        counts.append(next(batches).num_rows)
        delete_segments(root, 3)
        if not open_files:
            view.files.log_pool.clear()
        with pytest.raises(OffsetOutOfRangeError, match=r"messages from \d+ on are gone") as caught:
            list(map(counts.append, map(len, batches)))
        error, seen = caught.value, sum(counts)
        assert error.queue_offset == seen < error.min == reader.min_offset("t", 0)
        assert f"{error.min - seen} messages from {seen} on" in str(error)
        rest = [
            n
            for b in queue_records.read(view, "t", 0, error.min, high, ["queue_offset"])
            for n in b["queue_offset"].to_pylist()
        ]
        assert rest == list(range(error.min, high))


def test_a_segment_that_is_missing_in_the_middle_is_damage(tmp_path: Path) -> None:
    """Retention deletes the first segments; no other one may be missing."""
    root = filled(tmp_path / "s", 600)
    with MessageStore.open_read_only(root) as reader:
        assert reader.get_message("t", 0, 0).status is GetMessageStatus.FOUND
        sorted((root / "commitlog").iterdir())[1].unlink()
        reader.view.files.log_pool.clear()
        with pytest.raises(CorruptionError, match=r"expected this file, found .* as the next one"):
            read_all(reader)


def test_an_index_file_that_goes_while_a_key_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for again, in the files that are left and in the log."""
    root = filled(tmp_path / "s", 600)
    real = IndexTable.header

    def header(table: IndexTable) -> object:
        if os.path.exists(table.path):
            os.unlink(table.path)
            table.pool.clear()
        return real(table)

    with MessageStore.open_read_only(root) as reader:
        assert len(list((root / "index").iterdir())) > 2
        monkeypatch.setattr(IndexTable, "header", header)
        assert [m.body[:6] for m in reader.query_message("t", "k599")] == [b"000599"]
        assert not list((root / "index").iterdir())


# ---- another folder at the path


def everything_of(reader: ReadOnlyStore) -> list[object]:
    """Each way to look; they raise, or they answer."""
    return [
        lambda: reader.max_offset("t", 0),
        lambda: reader.min_offset("t", 0),
        lambda: reader.get_message("t", 0, 0),
        lambda: reader.get_batch("t", 0, 0),
        lambda: list(reader.read("t", 0, 0)),
        lambda: reader.look_message_by_offset(0),
        lambda: reader.query_message("t", "k0"),
        lambda: reader.queue_offset_by_time("t", 0, 0),
        reader.topics,
        lambda: reader.view.max_offsets([("t", 0)]),
        reader.view.quiet,
    ]


@pytest.mark.parametrize("how", ["renamed", "deleted", "another store", "a copy", "only the log", "a folder"])
def test_a_folder_that_was_renamed_or_replaced_is_never_read(tmp_path: Path, how: str) -> None:
    """A read-only store whose folder is gone raises; it neither looks empty nor shows the store that is there now."""
    root, other = filled(tmp_path / "s", 30), filled(tmp_path / "other", 300)
    with MessageStore.open_read_only(root) as reader:
        assert reader.max_offset("t", 0) == 15
        if how == "only the log":
            shutil.rmtree(root / "commitlog")
            shutil.copytree(other / "commitlog", root / "commitlog")
        else:
            root.rename(tmp_path / "away")
        if how == "deleted":
            shutil.rmtree(tmp_path / "away")
        elif how == "another store":
            shutil.copytree(other, root)
        elif how == "a copy":
            shutil.copytree(tmp_path / "away", root)
        elif how == "a folder":
            root.mkdir()
        kinds = NotAStoreError if how in ("renamed", "deleted", "a folder") else StoreWentBackwardsError
        for look in everything_of(reader):
            copy = "found a copy of store .* in another folder than" if how == "a copy" else ""
            with pytest.raises(kinds, match=copy or r"found .* where|in another folder than"):
                look()  # type: ignore[operator]
        if how == "renamed":
            (tmp_path / "away").rename(root)  # it is there again
            assert reader.max_offset("t", 0) == 15
            assert len(read_all(reader)) == 15


def test_a_folder_that_is_renamed_during_a_look_is_no_lost_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the place came just before, so the segments seemed to be missing from a store that was there."""
    root = filled(tmp_path / "s", 30)
    with MessageStore.open_read_only(root) as reader:
        assert reader.max_offset("t", 0) == 15
        log = reader.view.files.commit_log
        forget = log.forget_deleted

        def renamed_first() -> bool:
            if root.exists():
                root.rename(tmp_path / "away")
            return forget()

        monkeypatch.setattr(log, "forget_deleted", renamed_first)
        with pytest.raises(NotAStoreError, match="found nothing where"):
            reader.max_offset("t", 0)


def test_another_store_id_in_the_same_folder_is_noticed(tmp_path: Path) -> None:
    """The files were replaced one by one: the id is another one; a new file with the same id is none."""
    root = filled(tmp_path / "s", 30)
    identity = root / "spark" / "store.json"
    with MessageStore.open_read_only(root) as reader:
        text = identity.read_text()
        (root / "spark" / "new").write_text(text)
        (root / "spark" / "new").rename(identity)
        assert reader.max_offset("t", 0) == 15
        shutil.copyfile(filled(tmp_path / "other", 1) / "spark" / "store.json", root / "spark" / "new")
        (root / "spark" / "new").rename(identity)
        for _ in range(2):
            with pytest.raises(StoreWentBackwardsError, match="another folder than the folder that was opened"):
                reader.max_offset("t", 0)


# ---- sizes that a file tells


@pytest.mark.parametrize("size", [(1 << 31) - 2, 1 << 20, (1 << 16) - 7])
def test_a_unit_that_no_segment_can_hold_allocates_nothing(tmp_path: Path, size: int) -> None:
    """The size in a damaged unit is refused before memory is taken for it."""
    config = StoreConfig(mapped_file_size_commit_log=1 << 16)
    root = filled(tmp_path / "s", 10, config)
    path = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[20 * 2 + 8 : 20 * 2 + 12] = size.to_bytes(4, "big")
    path.write_bytes(data)
    with MessageStore.open_read_only(root) as reader:
        for look in (
            lambda: reader.get_message("t", 0, 2),
            lambda: reader.get_batch("t", 0, 2),
            lambda: list(reader.read("t", 0, 0)),
        ):
            with pytest.raises(MagicError, match=f"found physical offset [0-9]+, size {size}"):
                look()


def test_a_place_where_no_record_is_allocates_nothing(tmp_path: Path) -> None:
    """Four bytes of a body that would be the size of a large record: no record begins there."""
    root = filled(tmp_path / "s", 2)
    segment = root / "commitlog" / f"{0:020d}"
    with MessageStore.open_read_only(root) as reader:
        at = reader.get_message("t", 0, 0).messages[0].physical_offset + 95
        data = bytearray(segment.read_bytes())
        data[at : at + 4] = (15 * 1024).to_bytes(4, "big")
        segment.write_bytes(data)
        read: list[int] = []
        pread = reader.view.files.disk.pread
        reader.view.files.disk.pread = lambda file, size, position: (  # type: ignore[method-assign]
            read.append(size) or pread(file, size, position)
        )
        assert reader.look_message_by_offset(at) is None
        assert max(read) < 5000


def test_a_sparse_queue_takes_little_memory(tmp_path: Path) -> None:
    """Messages of a queue lie far apart: they are read together with what lies between, but in pieces."""
    config = StoreConfig(mapped_file_size_commit_log=1 << 20)
    with MessageStore.open(tmp_path / "s", config) as store:
        for _ in range(60):
            store.put_message(Message("t", b"." * 8000, queue_id=1))
            store.put_message(Message("t", b"x", queue_id=0))
    with MessageStore.open_read_only(tmp_path / "s") as reader:
        blocks = list(queue_records.blocks(reader.view, "t", 0, 0, 60, 100, 4000))
        assert sum(len(block.sizes) for block in blocks) == 60
        assert max(len(block.data) for block in blocks) < 5 * 4000 + 16 * 1024


@pytest.mark.parametrize("grown", [0, 20, 400])
def test_files_that_are_copied_over_in_place(tmp_path: Path, grown: int) -> None:
    """`rsync --inplace` keeps the files that are there; segments that go with it may be made again."""
    root, backup = filled(tmp_path / "s", 60), tmp_path / "backup"
    shutil.copytree(root, backup)
    with MessageStore.open(root, SMALL) as store:
        for body in bodies(200, start=1000):
            store.put_message(Message("t", body, queue_id=0))
    with MessageStore.open_read_only(root) as view:
        assert len(read_all(view)) == 230
        for path in [path for path in root.rglob("*") if path.is_file()]:
            source = backup / path.relative_to(root)
            if source.exists():
                with path.open("r+b") as file:
                    file.write(source.read_bytes())
            else:
                path.unlink()
        with MessageStore.open(root, SMALL) as store:
            for body in bodies(grown, start=2000):
                store.put_message(Message("t", body, queue_id=0))
        assert read_all(view) == [*bodies(60)[::2], *bodies(grown, start=2000)]
