"""Backups: a prefix of a store, taken beside its writers, that becomes a store again."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from crash.harness import tree_hash
from crash.imitate import Broker
from crash.simdisk import RecordingDisk
from messagestore import (
    BatchRequest,
    ConfigError,
    CorruptionError,
    LostBatchesError,
    Message,
    MessageStore,
    NotAStoreError,
    StoreLockedError,
    StoreWentBackwardsError,
)
from messagestore.backup import Point, back_up, points, prune, restore, restoring, stream
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.disk import Disk, File
from messagestore.files.writer_lock import WriterLock
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from small import SMALL, bodies, columns, filled, read_all

ROWS = 30


class Places:
    """Where a test's store, its backup and the restored store are."""

    def __init__(self, folder: Path) -> None:
        self.root, self.target, self.restored = (str(folder / name) for name in ("store", "backup", "restored"))

    def back_up(self, **options: Any) -> Point:
        return back_up(self.root, self.target, **options)

    def restore(self, number: int | None = None) -> Point:
        shutil.rmtree(self.restored, ignore_errors=True)
        return restore(self.target, self.restored, number=number, config=SMALL)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def request(version: int) -> BatchRequest:
    return BatchRequest(app_id="app", version=version, version_source="spark")


def batch(store: MessageStore, version: int, topic: str = "t") -> str:
    rows = columns(bodies(ROWS, 200, ROWS * version), topic=topic)
    return store.append_batch(rows, request(version)).status


def test_a_backup_beside_a_session_is_a_store_again_with_another_id(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        for version in range(3):
            batch(store, version)
        store.put_message(Message("single", b"one", queue_id=3, keys=["k"], tags="x"))
        publish_offsets(places.root, "group", {("t", 0): 7})
        found, store_id = places.back_up(), store.store_id
        batch(store, 3)
        assert (found.begin, found.end) == (0, found.end)

    places.restore()
    assert verify(places.restored).ok
    assert operator.status(places.restored, SMALL)["recoveries"] == [], "nothing went wrong"
    with MessageStore.open(places.restored, SMALL) as store:
        assert store.report is not None
        assert store.report.reason == "clean"
        assert store.writer.files.known_ids == {store.store_id, store_id}
        assert store.store_id != store_id
        assert sorted(read_all(store) + read_all(store, queue_id=1)) == bodies(3 * ROWS, 200)
        assert store.query_message("single", "k")[0].tags == "x"
        assert batch(store, 2) == "known"
        assert batch(store, 3) == "appended"
    offsets = ConsumerOffsets(Disk(), places.restored)
    offsets.load()
    assert offsets.get("t", "group") == {0: 7}


def test_the_next_backup_copies_what_is_new_and_each_point_is_restored(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        first_copied = second_copied = 0
        for version in range(6):
            batch(store, version)
        first_copied = places.back_up().new_bytes
        store.put_message(Message("t", b"new", queue_id=0))
        second = places.back_up()
        second_copied = second.new_bytes
        assert places.back_up().new_bytes == 0
        assert first_copied > 6 * ROWS * 200
        assert second_copied < 300

    assert [point.number for point in points(places.target)] == [1, 2, 3]
    for number, count in ((1, 90), (2, 91), (3, 91)):
        places.restore(number)
        with MessageStore.open_read_only(places.restored, SMALL) as store:
            assert store.max_offset("t", 0) == count
            assert len(read_all(store)) == count  # type: ignore[arg-type]


def test_a_backup_has_no_holes(places: Places) -> None:
    with MessageStore.open(places.root) as store:
        store.put_message(Message("t", b"one", queue_id=0))
        places.back_up()
    sizes = [path.stat().st_size for path in Path(places.target).rglob("*") if path.is_file()]
    assert sum(sizes) < 20_000
    assert (Path(places.root) / "commitlog" / ("0" * 20)).stat().st_size == 1 << 30


def test_a_backup_changes_nothing_in_the_store(places: Places) -> None:
    filled(Path(places.root))
    before = tree_hash(Path(places.root))
    places.back_up()
    assert tree_hash(Path(places.root)) == before


def test_a_brokers_store_is_backed_up_while_the_broker_lives(places: Places) -> None:
    root = Path(places.root)
    root.mkdir()
    broker = Broker(root, SMALL)
    for number in range(20):
        broker.put("t", b"%d" % number, number % 2)
    before = tree_hash(root)
    assert places.back_up().store_id == ""
    assert tree_hash(root) == before
    broker.put("t", b"late", 0)
    places.restore()
    with MessageStore.open_read_only(places.restored, SMALL) as store:
        assert read_all(store) == [b"%d" % number for number in range(0, 20, 2)]  # type: ignore[arg-type]
    assert places.back_up().new_bytes > 0


def test_what_retention_deleted_is_known_to_the_restored_store(places: Places) -> None:
    """Queues keep their numbers and batches stay known, although the log begins later."""
    with MessageStore.open(places.root, SMALL) as store:
        for version in range(8):
            batch(store, version, "old" if version == 0 else "t")
        places.back_up()
        store.delete_expired_files(at_once=True)
        begin, ends = store.writer.log.min_offset, {queue: store.max_offset("old", queue) for queue in range(2)}
        assert begin > 0
        second = places.back_up()
        assert second.begin == begin
        assert second.new_bytes < 1000  # what retention notes in the log

    places.restore()
    with MessageStore.open(places.restored, SMALL) as store:
        assert {queue: store.max_offset("old", queue) for queue in range(2)} == ends
        assert store.min_offset("old", 0) == ends[0]
        assert batch(store, 7) == "known"
        assert batch(store, 0, "old") == "known"
        assert batch(store, 8) == "appended"
    places.restore(1)
    with MessageStore.open_read_only(places.restored, SMALL) as store:
        assert store.min_offset("old", 0) == 0


def test_retention_that_deletes_a_segment_while_it_is_copied(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        for version in range(8):
            batch(store, version)

        class Deleting(Disk):
            """Retention runs when the first segment has been copied."""

            def fdatasync(self, file: File) -> None:
                super().fdatasync(file)
                store.delete_expired_files(at_once=True)

        found = places.back_up(target_disk=Deleting())
        assert found.begin == store.writer.log.min_offset > 0
    places.restore()
    with MessageStore.open(places.restored, SMALL) as store:
        assert store.max_offset("t", 0) == 8 * ROWS // 2
        assert batch(store, 7) == "known"


def test_a_queue_that_was_made_again_leaves_older_points_alone(places: Places) -> None:
    root = Path(places.root)
    root.mkdir()
    broker = Broker(root, SMALL)
    for number in range(20):
        broker.put("t", b"old %d" % number, 0)
    places.back_up()
    broker.delete_topic("t")
    places.back_up()
    for number in range(30):
        broker.put("t", b"new %d" % number, 0)
    third = places.back_up()
    assert any(name.startswith("consumequeue@3/t/0/") for name in third.files)

    def first_body(number: int) -> bytes:
        places.restore(number)
        with MessageStore.open_read_only(places.restored, SMALL) as store:
            return read_all(store)[0]  # type: ignore[arg-type]

    assert first_body(1) == b"old 0"
    assert first_body(3) == b"new 0"


def test_a_topic_that_was_deleted_last_is_not_in_the_restored_store(places: Places) -> None:
    """Its records are the last ones of the log, and behind all units; those of a topic of that name before it are not."""
    with MessageStore.open(places.root, SMALL) as store:
        for number in range(60):
            assert store.put_message(Message("gone", b"%d" % number * 300, queue_id=number % 3)).is_ok
        store.delete_topic("gone")
        assert store.put_message(Message("t", b"stays", queue_id=0)).is_ok
        for number in range(4):
            assert store.put_message(Message("gone", b"again %d" % number, queue_id=0)).is_ok
        store.delete_topic("gone")
        places.back_up()
    places.restore()
    with MessageStore.open(places.restored, SMALL) as store:
        assert store.topics() == {"t": [0]}
        assert store.topic_config("gone") is None
        assert store.put_message(Message("gone", b"new", queue_id=1)).queue_offset == 0
        assert store.max_offset("t", 0) == 1


def test_delayed_messages_and_open_halves_are_in_the_restored_store(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        store.put_message(Message("t", b"later", queue_id=0, delay_time_level=18))
        store.half_message(Message("orders", b"open"), "payments")
        places.back_up()
    places.restore()
    with MessageStore.open(places.restored, SMALL) as store:
        assert [half.topic for half in store.open_halves()] == ["orders"]
        assert store.max_offset("SCHEDULE_TOPIC_XXXX", 17) == 1
        assert store.max_offset("t", 0) == 0


# ---- going on against another store


def test_a_store_that_lacks_what_was_backed_up_is_refused(places: Places, tmp_path: Path) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        batch(store, 0)
    older = shutil.copytree(places.root, tmp_path / "older")
    with MessageStore.open(places.root, SMALL) as store:
        batch(store, 1)
    places.back_up()
    with pytest.raises(StoreWentBackwardsError, match=r"the backup reaches to .*, and the store ends at"):
        back_up(str(older), places.target)
    with MessageStore.open(older, SMALL) as store:
        for version in range(1, 4):
            store.append_batch(columns(bodies(ROWS, 190), topic="t"), request(version))
    with pytest.raises(StoreWentBackwardsError, match="the store has other bytes in front of"):
        back_up(str(older), places.target)
    assert len(points(places.target)) == 1


def test_a_restored_store_goes_on_in_the_same_backup(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        batch(store, 0)
    places.back_up()
    places.restore()
    with MessageStore.open(places.restored, SMALL) as store:
        batch(store, 1)
    assert 0 < back_up(places.restored, places.target).new_bytes < 60 * ROWS * 20


def test_another_store_is_refused(places: Places, tmp_path: Path) -> None:
    filled(Path(places.root))
    places.back_up()
    other = filled(tmp_path / "other")
    with pytest.raises(NotAStoreError, match=r"found backups of store .*, and this is store"):
        back_up(str(other), places.target)


def test_a_sink_that_has_written_more_is_told_by_the_restored_store(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        for version in range(3):
            batch(store, version)
            if version == 0:
                places.back_up()
    places.restore()
    with MessageStore.open(places.restored, SMALL) as store, pytest.raises(LostBatchesError):
        batch(store, 3)


# ---- damage


@pytest.mark.parametrize("part", ["commitlog/00000000000000000000", "consumequeue/t/0/00000000000000000000"])
def test_a_damaged_file_of_a_backup_restores_nothing(places: Places, part: str) -> None:
    filled(Path(places.root))
    places.back_up()
    path = Path(places.target) / part
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=f"{part}.*CRC-32"):
        places.restore()
    assert not Path(places.restored).exists()


def test_a_damaged_point_is_an_error_and_older_points_stay(places: Places) -> None:
    filled(Path(places.root))
    places.back_up()
    places.back_up()
    path = Path(places.target) / "points" / "000002.json"
    path.write_bytes(path.read_bytes().replace(b'"begin":0', b'"begin":1'))
    with pytest.raises(CorruptionError, match=r"000002\.json.*CRC-32"):
        places.restore()
    places.restore(1)


def test_a_disk_that_gives_back_other_bytes_makes_no_point(places: Places) -> None:
    class Flipping(Disk):
        """Each byte that is read from the backup's log is another one."""

        def pread_into(self, file: File, buffer: memoryview, position: int) -> int:
            count = super().pread_into(file, buffer, position)
            buffer[0] ^= "/commitlog/" in file.path
            return count

    filled(Path(places.root))
    with pytest.raises(CorruptionError, match="No point was made"):
        places.back_up(target_disk=Flipping())
    assert points(places.target) == []
    with pytest.raises(ConfigError, match="no point yet"):
        places.restore()


def test_a_restore_that_was_killed_is_run_again(places: Places) -> None:
    filled(Path(places.root))
    places.back_up()
    left = Path(places.restored + ".restoring")
    (left / "commitlog").mkdir(parents=True)
    (left / "commitlog" / ("0" * 20)).write_bytes(b"half")
    places.restore()
    assert not left.exists()
    assert verify(places.restored).ok


# ---- pruning


def test_a_power_cut_just_after_restore_leaves_all_of_it(
    places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Only what was synced is left, of files and of the names in each folder: nothing is missing."""
    filled(Path(places.root))
    publish_offsets(places.root, "group", {("t", 0): 3})
    places.back_up()
    disk = RecordingDisk(os.path.dirname(places.restored))
    monkeypatch.setattr(restoring, "Disk", lambda: disk)
    places.restore()
    left = disk.image(disk.position, "strict").build(tmp_path_factory.mktemp("left")) / "restored"
    now = {path.relative_to(places.restored) for path in Path(places.restored).rglob("*")}
    assert {path.relative_to(left) for path in left.rglob("*")} >= now - {Path("lock"), Path("spark/writer.lock")}
    assert tree_hash(left) == tree_hash(Path(places.restored))


def test_pruning_deletes_points_and_what_only_they_need(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        for version in range(8):
            batch(store, version)
        places.back_up()
        store.delete_expired_files(at_once=True)
        places.back_up()
    before = sorted(path for path in Path(places.target).rglob("*") if path.is_file())
    gone, size = prune(places.target, 1, delete=False)
    assert gone == [1]
    assert size > 0
    assert sorted(path for path in Path(places.target).rglob("*") if path.is_file()) == before
    assert prune(places.target, 1) == (gone, size)
    assert prune(places.target, 1) == ([], 0)
    assert [point.number for point in points(places.target)] == [2]
    places.restore()
    with MessageStore.open(places.root, SMALL) as store:
        batch(store, 8)
        assert places.back_up().number == 3
    places.restore()


# ---- as a stream


def test_a_stream_is_a_tar_archive_that_unpacks_to_a_backup(places: Places) -> None:
    with MessageStore.open(places.root, SMALL) as store:
        for version in range(4):
            batch(store, version)
        out = io.BytesIO()
        stream(places.root, out)
        batch(store, 4)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as archive:
        assert archive.getnames()[-1] == "points/000001.json"
        archive.extractall(places.target, filter="data")
    places.restore()
    with MessageStore.open(places.restored, SMALL) as store:
        assert [batch(store, 3), batch(store, 4)] == ["known", "appended"]


def test_a_stream_that_was_cut_off_restores_nothing(places: Places) -> None:
    filled(Path(places.root), 100)
    out = io.BytesIO()
    stream(places.root, out)
    cut = io.BytesIO(out.getvalue()[: len(out.getvalue()) // 2 // 512 * 512])
    with pytest.raises(tarfile.TarError), tarfile.open(fileobj=cut) as archive:
        archive.extractall(places.target, filter="data")
    with pytest.raises(NotAStoreError, match="found no backup"):
        places.restore()


# ---- arguments


def test_wrong_places_are_refused(places: Places, tmp_path: Path) -> None:
    filled(Path(places.root))
    with pytest.raises(ConfigError, match="found a folder inside the store"):
        back_up(places.root, os.path.join(places.root, "backup"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diary.txt").write_text("")
    with pytest.raises(NotAStoreError, match=r"found a folder with diary\.txt in it"):
        back_up(places.root, str(tmp_path / "other"))
    with pytest.raises(NotAStoreError):
        back_up(str(tmp_path / "nothing"), places.target)
    with pytest.raises(NotAStoreError, match="found no backup"):
        points(str(tmp_path / "nothing"))
    places.back_up()
    with pytest.raises(NotAStoreError, match="found something there already"):
        restore(places.target, places.root)
    with pytest.raises(ConfigError, match=r"--point: found 5; .* has 1"):
        places.restore(5)
    with pytest.raises(ConfigError, match="--keep: found 0"):
        prune(places.target, 0)


@pytest.mark.parametrize("what", ["a folder with a file", "a file"])
def test_what_comes_to_the_path_during_a_restore_stays(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    filled(Path(places.root))
    places.back_up()
    root = tmp_path / "restored"

    def come(*given: Any) -> None:
        if what == "a file":
            root.write_text("")
        else:
            root.mkdir()
            (root / "diary.txt").write_text("")
        real(*given)

    real = restoring._finish
    monkeypatch.setattr(restoring, "_finish", come)
    with pytest.raises(NotAStoreError, match=r"found something there that was made since .* is in .*restored"):
        restore(places.target, str(root))
    assert root.is_file() or (root / "diary.txt").is_file()


def test_one_process_at_a_time_writes_a_backup(places: Places) -> None:
    filled(Path(places.root))
    places.back_up()
    lock = WriterLock(os.path.join(places.target, "lock"))
    lock.acquire(0, description="another backup")
    try:
        with pytest.raises(StoreLockedError, match="another backup"):
            places.back_up()
    finally:
        lock.close()


def test_a_backup_that_was_killed_goes_on_where_it_was(places: Places) -> None:
    """Whole segments that were copied and synced are not copied again."""
    with MessageStore.open(places.root, SMALL) as store:
        for version in range(12):
            batch(store, version)

    class Dying(Disk):
        """Fails at the fourth sync of a file."""

        syncs = 0

        def fdatasync(self, file: File) -> None:
            self.syncs += "/commitlog/" in file.path
            if self.syncs == 4:
                raise OSError(5, "Input/output error")
            super().fdatasync(file)

    with pytest.raises(OSError, match="Input/output"):
        places.back_up(target_disk=Dying())
    left = json.loads((Path(places.target) / "points" / "unfinished.json").read_text().splitlines()[0])
    assert len(left["files"]) == 3
    found = places.back_up()
    assert found.new_bytes == sum(size for size, _ in found.files.values()) - 3 * SMALL.mapped_file_size_commit_log
    assert not (Path(places.target) / "points" / "unfinished.json").exists()
    places.restore()
