"""Small files that are lost, damaged, swapped or not copied: no batch is appended twice, and none is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from crash.harness import die
from crash.simdisk import KillDisk, Killed
from messagestore import (
    BatchRequest,
    CorruptionError,
    LostBatchesError,
    Message,
    MessageStore,
    NotAStoreError,
    StoreConfig,
    StorePoisonedError,
)
from messagestore.files.disk import Disk
from messagestore.format.batch_record import BODY_BEGIN
from messagestore.format.message import BATCH_TOPIC
from messagestore.inspect.verify import verify
from messagestore.log import store_identity
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.store_files import Identity, Paths
from small import SMALL, bodies, columns, filled, read_all

ROWS = 6
ONE_SEGMENT = SMALL.replace(mapped_file_size_commit_log=256 * 1024)


def append(store: MessageStore, version: int, app: str = "app", topic: str = "t") -> str:
    rows = columns(bodies(ROWS, start=100 * version), topic=topic)
    return store.append_batch(rows, BatchRequest(app, version, "spark", "q")).status


def store_with(root: Path, versions: int = 3, config: StoreConfig = ONE_SEGMENT) -> Path:
    """A closed store with some batches."""
    with MessageStore.open(root, config) as store:
        for version in range(versions):
            append(store, version)
    return root


def left_by_a_kill(root: Path, config: StoreConfig = ONE_SEGMENT, *, topic: str = "other") -> Path:
    """A store with three batches below the clean end; then a writer was killed behind a put to another topic."""
    store_with(root, config=config)
    pid = os.fork()
    if not pid:
        store = MessageStore.open(root, config)
        store.put_message(Message(topic, b"last", queue_id=0))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return root


def count_of(store: MessageStore, topic: str = "t") -> int:
    return sum(len(read_all(store, topic, queue_id)) for queue_id in store.topics().get(topic, ()))


def check_known(root: Path, config: StoreConfig = ONE_SEGMENT, versions: int = 3) -> list[str]:
    """The last batch comes again, as Spark's first one after a start, and then a new one; what recovery said."""
    with MessageStore.open(root, config) as store:
        assert append(store, versions - 1) == "known"
        assert append(store, 0) == "known"
        assert count_of(store) == versions * ROWS
        assert append(store, versions) == "appended"
        assert store.report is not None
        notes = store.report.notes
    report = verify(root, config)
    assert report.ok, report.findings
    with MessageStore.open(root, config) as store:
        assert append(store, versions) == "known"
        assert count_of(store) == (versions + 1) * ROWS
    return notes


def store_id(root: Path) -> str:
    identity = Identity.read(Disk(), Paths(root).identity)
    assert identity is not None
    return identity.store_id


def segment(root: Path) -> Path:
    return root / "commitlog" / ("0" * 20)


# ---- a BATCH record that cannot be read


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_flipped_bit_in_the_last_batch_record_and_its_replay(tmp_path: Path, how: str) -> None:
    """The batch could not be read, and so it counted as not there: its replay was appended."""
    root = (store_with if how == "closed" else left_by_a_kill)(tmp_path / "s")
    whole = segment(root).read_bytes()
    at = whole.rfind(BODY_BEGIN)
    for position in (at - 88 + 4, at - 88 + 12, at - 88 + 30, at + 1, at + 30, at + 200):
        data = bytearray(whole)
        data[position] ^= 4
        segment(root).write_bytes(data)
        with pytest.raises(CorruptionError) as caught, MessageStore.open(root, ONE_SEGMENT) as store:
            append(store, 2)
        assert caught.value.physical_offset == at - 88
        assert caught.value.path == str(segment(root))
    segment(root).write_bytes(whole)
    check_known(root)


def test_a_flipped_bit_before_the_record_proves_nothing(tmp_path: Path) -> None:
    """The chain of records from the segment's start breaks before the place that is asked for."""
    root = store_with(tmp_path / "s")
    data = bytearray(segment(root).read_bytes())
    last = data.rfind(BODY_BEGIN)
    data[last + 20] ^= 1
    data[data.find(BODY_BEGIN) - 88 + 2] ^= 1  # the size of the first record
    segment(root).write_bytes(data)
    with pytest.raises(CorruptionError) as caught, MessageStore.open(root, ONE_SEGMENT) as store:
        append(store, 2)
    assert caught.value.physical_offset == 0


def test_an_entry_whose_place_is_stepped_over_is_dropped(tmp_path: Path) -> None:
    """Whole records lie where the journal has a batch: that batch is gone, and its replay is appended."""
    root = store_with(tmp_path / "s")
    path = Path(Paths(root).journal)
    journal = BatchJournal.read(Disk(), str(path))
    entry = journal.find("app", 2)
    assert entry is not None
    for moved in (8, 0):  # amid a record; another batch's record
        other = journal.find("app", 1)
        assert other is not None
        changed = BatchJournal.from_bytes(path.read_bytes())
        changed.remember("gone", entry.__class__(0, "spark", "q", other.physical_offset + moved, other.end, 3, 1))
        path.write_bytes(changed.to_bytes())
        with MessageStore.open(root, ONE_SEGMENT) as store:
            assert append(store, 0, "gone", topic=f"u{moved}") == "appended"
        root = store_with(tmp_path / f"again{moved}")
        path = Path(Paths(root).journal)
        journal = BatchJournal.read(Disk(), str(path))
        entry = journal.find("app", 2)
        assert entry is not None


def test_a_batch_that_a_unit_names_and_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    """Without a journal the BATCH records are read again: one that cannot be read was passed over."""
    root = store_with(tmp_path / "s")
    data = bytearray(segment(root).read_bytes())
    data[data.rfind(BODY_BEGIN) + 20] ^= 1
    segment(root).write_bytes(data)
    Path(Paths(root).journal).unlink()
    with pytest.raises(CorruptionError, match="BODYCRC"):
        MessageStore.open(root, ONE_SEGMENT)


# ---- lost files


@pytest.mark.parametrize(
    "lost",
    [
        ["spark/store.json"],
        ["spark/journal"],
        ["spark/state"],
        ["spark/store.json", "spark/state"],
        ["spark/journal", "spark/state"],
        ["consumequeue/rmq_sys_spark_sink"],
        ["consumequeue/rmq_sys_spark_sink", "spark/journal"],
        ["consumequeue/rmq_sys_spark_sink", "spark/journal", "spark/state"],
        ["consumequeue/t"],
        ["consumequeue/t", "spark/journal", "consumequeue/rmq_sys_spark_sink"],
        ["consumequeue", "spark/journal"],
        ["consumequeue", "index", "spark/journal", "spark/state"],
        ["checkpoint", "spark/journal"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_what_is_lost_is_made_again(tmp_path: Path, lost: list[str], how: str) -> None:
    """Files of `spark/` and what is derived from the log: no row twice, none lost, and the same store id."""
    root = (store_with if how == "closed" else left_by_a_kill)(tmp_path / "s")
    before = store_id(root)
    for name in lost:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    notes = check_known(root)
    assert store_id(root) == before
    assert notes


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_all_of_spark_is_lost(tmp_path: Path, how: str) -> None:
    """A RocketMQ slave after a failover: every batch was appended again."""
    root = (store_with if how == "closed" else left_by_a_kill)(tmp_path / "s")
    before = store_id(root)
    shutil.rmtree(root / "spark")
    notes = check_known(root)
    identity = Identity.read(Disk(), Paths(root).identity)
    assert identity is not None and identity.store_id != before
    assert identity.ancestors == (before,)
    assert any("is a copy and got a new id" in note and before in note for note in notes)


def test_a_copy_of_a_copy(tmp_path: Path) -> None:
    """Batches of all its ancestors are known, and their ids survive the loss of either small file."""
    root = store_with(tmp_path / "s")
    ids = [store_id(root)]
    for number in range(2):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(root, copy)
        shutil.rmtree(copy / "spark")
        with MessageStore.open(copy, ONE_SEGMENT) as store:
            assert append(store, 2 + number) == "known"
            assert append(store, 3 + number) == "appended"
        root = copy
        ids.append(store_id(root))
    for name in ("store.json", "journal"):
        (root / "spark" / name).unlink()
        with MessageStore.open(root, ONE_SEGMENT) as store:
            assert [append(store, version) for version in range(5)] == ["known"] * 5
        identity = Identity.read(Disk(), Paths(root).identity)
        assert identity is not None
        assert (identity.store_id, set(identity.ancestors)) == (ids[2], set(ids[:2]))
    assert verify(root, ONE_SEGMENT).ok


def test_a_segment_of_another_store_is_still_refused(tmp_path: Path) -> None:
    """Also in a copy: only ids that were in its log when it was taken over are ancestors."""
    root, other = store_with(tmp_path / "a"), store_with(tmp_path / "b")
    shutil.rmtree(root / "spark")
    check_known(root)
    shutil.copy(segment(other), segment(root))
    (root / "abort").write_text(f"messagestore {store_id(root)}\n")
    with pytest.raises(CorruptionError):
        MessageStore.open(root, ONE_SEGMENT)


@pytest.mark.parametrize("name", ["store.json", "journal"])
def test_small_files_of_another_store(tmp_path: Path, name: str) -> None:
    """Put there by mistake: the log is not judged by them."""
    root, other = store_with(tmp_path / "a"), store_with(tmp_path / "b", versions=1)
    shutil.copy(other / "spark" / name, root / "spark" / name)
    if name == "journal":
        assert any("found the journal of store" in note for note in check_known(root))
        return
    with pytest.raises(CorruptionError, match=r"spark/store\.json of another store"):
        MessageStore.open(root, ONE_SEGMENT)
    (root / "spark" / name).unlink()
    check_known(root)


def test_an_older_journal(tmp_path: Path) -> None:
    """Restored from a backup: what came after it is read from the log."""
    root = store_with(tmp_path / "s", versions=1)
    older = Path(Paths(root).journal).read_bytes()
    store_with(root, versions=3)
    Path(Paths(root).journal).write_bytes(older)
    check_known(root)


# ---- damaged files


def test_every_flipped_bit_of_the_identity_is_refused(tmp_path: Path) -> None:
    """Readers and writers: an id or a size that changed was believed."""
    root = store_with(tmp_path / "s")
    path = Path(Paths(root).identity)
    whole = path.read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises((CorruptionError, NotAStoreError)):
            Identity.read(Disk(), str(path))
    with pytest.raises(CorruptionError, match="move it away and run `messagestore recover`"):
        MessageStore.open(root, ONE_SEGMENT)
    path.unlink()
    check_known(root)


def test_flips_of_the_journal_and_a_replay(tmp_path: Path) -> None:
    """A flipped app id, version or offset doubled rows."""
    root = store_with(tmp_path / "s")
    path = Path(Paths(root).journal)
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with MessageStore.open(root, ONE_SEGMENT) as store:
            assert [append(store, version) for version in range(3)] == ["known"] * 3
            assert store.report is not None and any("could not be used" in note for note in store.report.notes)


# ---- what cannot be known


def test_a_journal_made_again_over_a_log_that_does_not_begin_at_0(tmp_path: Path) -> None:
    """Batches that retention took are in no BATCH record any more: an app that is not known may have been there."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        append(store, 0, "gone")
        append(store, 1, "gone")
        for version in range(40):
            append(store, version)
    segments = sorted((root / "commitlog").iterdir())
    assert len(segments) > 2
    segments[0].unlink()
    with MessageStore.open(root, SMALL) as store:
        assert append(store, 1, "gone") == "known"  # the journal remembers
    Path(Paths(root).journal).unlink()
    with MessageStore.open(root, SMALL) as store:
        assert not store.writer.journal.complete
        assert append(store, 39) == "known"
        assert append(store, 0, "new") == "appended"
        for source in ("spark", "user"):
            request = BatchRequest("gone", 2, source, "q" if source == "spark" else None)
            with pytest.raises(LostBatchesError, match="messagestore batches start"):
                store.append_batch(columns(bodies(ROWS)), request)
    with MessageStore.open(root, SMALL) as store:
        assert not store.writer.journal.complete  # and it stays so


def test_index_slots_of_a_copy_come_from_the_options(tmp_path: Path) -> None:
    """They are in no file of RocketMQ's. Without the right ones the index of a copy is made again."""
    root = store_with(tmp_path / "s")
    shutil.rmtree(root / "spark")
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    index = next((root / "index").iterdir())
    notes = check_known(root)
    assert index.exists() and not any("index" in note.replace(str(tmp_path), "") for note in notes)
    other = ONE_SEGMENT.replace(max_hash_slot_num=32, max_index_num=500)
    check_known(copy, other)
    assert {path.stat().st_size for path in (copy / "index").iterdir()} == {40 + 32 * 4 + 500 * 20}
    with MessageStore.open_read_only(copy) as reader:
        assert len(reader.query_message("t", "k0")) == 4


def test_the_wrong_index_slots_for_a_broker_s_store_are_refused_before_a_byte(tmp_path: Path) -> None:
    """A store that this project never wrote: its index is the broker's."""
    root = filled(tmp_path / "s", 20)
    shutil.rmtree(root / "spark")
    with pytest.raises(CorruptionError, match="Open the store with the settings with which it was written"):
        MessageStore.open(root, StoreConfig())
    assert not Path(Paths(root).identity).exists()
    with MessageStore.open(root, SMALL) as store:
        assert len(read_all(store)) == 10
        assert store.report is not None and store.report.notes == []


# ---- queues that are gone


@pytest.mark.parametrize("how", ["closed", "killed"])
@pytest.mark.parametrize("what", ["consumequeue/t", "consumequeue/t/1"])
def test_a_queue_without_a_folder(tmp_path: Path, how: str, what: str) -> None:
    """Rows were lost in silence, and the queue was numbered from 0 again."""
    root = (store_with if how == "closed" else left_by_a_kill)(tmp_path / "s")
    shutil.rmtree(root / what)
    notes = check_known(root)
    assert any("rebuilt from the log" in note for note in notes)


def test_a_queue_beside_a_new_record_is_not_lost_with_journal_and_topic(tmp_path: Path) -> None:
    """Recovery made the topic's folder for a queue with a new record, and so took the topic's other queues for deleted."""
    root = store_with(tmp_path / "s")
    with MessageStore.open(root, ONE_SEGMENT) as store:
        before = {queue_id: read_all(store, "t", queue_id) for queue_id in store.topics()["t"]}
    left_by_a_kill(root, topic="t")
    before[0].append(b"last")
    shutil.rmtree(root / "consumequeue" / "t")
    (root / "spark" / "journal").unlink()
    copy, at = tmp_path / "copy", 0
    while True:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        disk = KillDisk(at)
        with contextlib.suppress(Killed, StorePoisonedError):
            MessageStore.open(copy, ONE_SEGMENT, disk=disk)
        die(copy)
        with MessageStore.open(copy, ONE_SEGMENT) as store:
            assert {queue_id: read_all(store, "t", queue_id) for queue_id in store.topics()["t"]} == before, at
            assert append(store, 2) == "known"
        if not disk.dead:
            break
        at += 1
    assert at > 30


def test_a_topic_that_a_broker_deleted_stays_deleted(tmp_path: Path) -> None:
    """It is neither in topics.json nor in consumequeue/; made again, it begins without messages."""
    root = filled(tmp_path / "s", 20)
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("u", b"x", queue_id=0))
    shutil.rmtree(root / "consumequeue" / "t")
    shutil.rmtree(root / "config")
    with MessageStore.open(root, SMALL) as store:
        assert store.topics().get("t") is None
        store.create_topic("t", 2)
    with MessageStore.open(root, SMALL) as store:
        assert store.topics().get("t") is None
        store.put_message(Message("t", b"new", queue_id=0))
        assert read_all(store) == [b"new"]


@pytest.mark.parametrize("more", [(), ("checkpoint",), ("config",), ("index",)], ids="+".join)
def test_all_of_spark_and_the_queue_of_batches_are_lost(tmp_path: Path, more: tuple[str, ...]) -> None:
    root = store_with(tmp_path / "s")
    for name in ("spark", f"consumequeue/{BATCH_TOPIC}", *more):
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    check_known(root)


def only_a_brokers(root: Path, versions: int = 0) -> Path:
    """A store of three segments without `spark/` and without a queue of BATCH records; the batches are the newest."""
    filled(root, 250)
    with MessageStore.open(root, SMALL) as store:
        for version in range(versions):
            append(store, version, topic="u")
    shutil.rmtree(root / "spark")
    shutil.rmtree(root / "consumequeue" / BATCH_TOPIC, ignore_errors=True)
    return root


def test_a_long_log_is_searched_for_batches_from_its_newest_part_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_identity, "SEARCHED_SIZE", 100)
    with MessageStore.open(only_a_brokers(tmp_path / "s", versions=3), SMALL) as store:
        assert [append(store, version, topic="u") for version in range(4)] == ["known", "known", "known", "appended"]


def test_what_was_not_searched_is_not_taken_for_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_identity, "SEARCHED_SIZE", 100)
    root = only_a_brokers(tmp_path / "s")
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert any("batches start" in note for note in store.report.notes)
        with pytest.raises(LostBatchesError, match="batches start"):
            store.append_batch(columns(bodies(2)), BatchRequest("by-hand", 7, "user"))
        assert append(store, 0) == "appended"
    with MessageStore.open(root, SMALL) as store, pytest.raises(LostBatchesError, match="batches start"):
        store.append_batch(columns(bodies(2)), BatchRequest("by-hand", 7, "user"))


def test_a_short_log_of_a_broker_is_searched_whole(tmp_path: Path) -> None:
    with MessageStore.open(only_a_brokers(tmp_path / "s"), SMALL) as store:
        assert store.report is not None
        assert store.report.notes == []
        status = store.append_batch(columns(bodies(2)), BatchRequest("by-hand", 7, "user")).status
        assert status == "appended"


@pytest.mark.parametrize("same_id", [False, True])
def test_the_folder_spark_of_another_copy(tmp_path: Path, same_id: bool) -> None:
    """Two copies of a store went on by themselves, to the same length: the log of one gets `spark/` of the other."""
    first, second = store_with(tmp_path / "first"), tmp_path / "second"
    shutil.copytree(first, second)
    if not same_id:
        shutil.rmtree(second / "spark")
    for root, app in ((first, "app"), (second, "bpp")):
        with MessageStore.open(root, ONE_SEGMENT) as store:
            for version in (0, 1) if app == "bpp" else (3, 4):
                append(store, version, app)
    shutil.rmtree(second / "spark")
    shutil.copytree(first / "spark", second / "spark")
    if not same_id:
        for _ in range(2):
            with pytest.raises(CorruptionError, match=r"of another store or copy.*belong together"):
                MessageStore.open(second, ONE_SEGMENT)
        shutil.rmtree(second / "spark")  # as the error says
    with MessageStore.open(second, ONE_SEGMENT) as store:
        assert [append(store, version, "bpp") for version in range(2)] == ["known", "known"]
        assert [append(store, version) for version in range(4)] == ["known", "known", "known", "appended"]
        assert count_of(store) == 6 * ROWS
    report = verify(second, ONE_SEGMENT)
    assert report.ok, report.findings
