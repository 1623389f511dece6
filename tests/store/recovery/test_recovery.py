"""Taking a store over: what is kept, what is cut, what is refused. Kills and power cuts are in tests/crash."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import shutil
from pathlib import Path

import pytest

from crash.harness import die
from crash.imitate import Broker, seen
from crash.simdisk import KillDisk, Killed
from messagestore import (
    ASYNC_FLUSH,
    BatchRequest,
    ChecksumError,
    CorruptionError,
    Message,
    MessageStore,
    StorePoisonedError,
)
from messagestore.files.disk import Disk
from messagestore.format import record_scan
from messagestore.inspect.verify import verify
from messagestore.log import walk
from messagestore.recovery import survey
from messagestore.recovery.report import _WHERE, RecoveryReport
from small import SMALL, bodies, columns, filled, read_all


def left_by_a_killed_session(root: Path, batches: int = 2) -> MessageStore:
    """A store whose writer was killed after some batches."""
    store = MessageStore.open(root, SMALL)
    for version in range(batches):
        store.append_batch(columns(bodies(10, start=10 * version)), BatchRequest("app", version, "spark"))
    die(root)
    return store


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def first_segment(root: Path) -> Path:
    return root / "commitlog" / f"{0:020d}"


def test_reasons(tmp_path: Path) -> None:
    """The report says whose store it was and what was done."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None and store.report.reason == "new"
        store.put_message(Message("t", b"x", queue_id=0))
    with MessageStore.open(root, SMALL) as store:
        assert store.report.reason == "clean"  # type: ignore[union-attr]
        store.put_message(Message("t", b"y", queue_id=0))
        die(root)
    with MessageStore.open(root, SMALL) as store:
        report = store.report
        assert report is not None and report.reason == "a writer crashed"
        assert report.record_count == 1 and report.end > report.start
        assert report.to_dict()["reason"] == "a writer crashed"
    (root / "abort").write_text("4711")
    with MessageStore.open(root, SMALL) as store:
        assert store.report.reason == "a broker crashed"  # type: ignore[union-attr]
    shutil.rmtree(root / "spark")
    with MessageStore.open(root, SMALL) as store:
        assert store.report.reason == "closed by a broker"  # type: ignore[union-attr]
        assert read_all(store) == [b"x", b"y"]
    assert verify(root).ok


def test_a_torn_put_is_cut_and_kept_aside(tmp_path: Path) -> None:
    """Bytes of a record that was not written whole: cut from the log, saved in spark/cut, the rest is there."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    store.put_message(Message("t", b"whole", queue_id=0))
    end = store.writer.end.physical_offset
    store.writer.begin(end, "SYNC_FLUSH")
    die(root)
    with first_segment(root).open("r+b") as file:
        file.seek(end)
        file.write(b"\x00\x00\x00\x80\xda\xa3\x20\xa7" + b"torn" * 10)
    with MessageStore.open(root, SMALL) as store:
        report = store.report
        assert report is not None
        assert (report.end, report.zeroed_bytes > 40) == (end, True)
        assert report.saved is not None and Path(report.saved).read_bytes().endswith(b"torn" * 10)
        assert read_all(store) == [b"whole"]
    assert verify(root).ok


def test_a_flipped_bit_in_a_synced_batch_is_refused(tmp_path: Path) -> None:
    """SYNC_FLUSH: the head proves that all data were on the disk. Refused, and not a byte is changed."""
    root = tmp_path / "s"
    left_by_a_killed_session(root)
    flip(first_segment(root), 1500)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "writer.lock"}
    with pytest.raises(CorruptionError):
        MessageStore.open(root, SMALL)
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "writer.lock"} == before


def test_a_flipped_bit_in_the_last_async_batch_cuts_that_batch(tmp_path: Path) -> None:
    """ASYNC_FLUSH promises nothing: the batch is cut as a whole, the ones before stay, and its replay is appended."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(10)), BatchRequest("app", 0, "spark", flush_disk_type=ASYNC_FLUSH))
        second = store.append_batch(
            columns(bodies(10, start=10)), BatchRequest("app", 1, "spark", flush_disk_type=ASYNC_FLUSH)
        )
        die(root)
    flip(first_segment(root), second.end - 200)
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None and store.report.end == second.physical_offset
        assert read_all(store) == bodies(10)[::2]
        assert store.append_batch(columns(bodies(10, start=10)), BatchRequest("app", 1, "spark")).status == "appended"
    assert verify(root).ok


def test_a_flipped_bit_in_a_synced_put_is_refused(tmp_path: Path) -> None:
    """A ConsumeQueue unit is written after the sync: it proves that the record was on the disk."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    results = [store.put_message(Message("t", body, queue_id=0)) for body in bodies(5)]
    die(root)
    flip(first_segment(root), results[2].physical_offset + 95)
    with pytest.raises(CorruptionError, match="proves the record"):
        MessageStore.open(root, SMALL)


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    """Segments that were synced and are gone: named, not forgotten."""
    root = filled(tmp_path / "s", 300)
    segments = sorted((root / "commitlog").iterdir())
    assert len(segments) >= 3
    segments[-1].unlink()
    with pytest.raises(CorruptionError, match="segments up to"):
        MessageStore.open(root, SMALL)


def test_a_gap_between_segments_is_refused(tmp_path: Path) -> None:
    """A segment in the middle that is gone."""
    root = filled(tmp_path / "s", 300)
    sorted((root / "commitlog").iterdir())[1].unlink()
    with pytest.raises(CorruptionError, match="this file"):
        MessageStore.open(root, SMALL)


def test_queues_without_a_log_are_refused(tmp_path: Path) -> None:
    """D16: CommitLog deleted, queues left: not an empty store (RocketMQ deletes the queues)."""
    root = filled(tmp_path / "s", 10)
    shutil.rmtree(root / "commitlog")
    with pytest.raises(CorruptionError):
        MessageStore.open(root, SMALL)
    assert list((root / "consumequeue" / "t").iterdir())


def test_stray_and_odd_files_are_named(tmp_path: Path) -> None:
    """A stray name and a wrong size in RocketMQ's folders: a broker would not start either."""
    root = filled(tmp_path / "s", 10)
    (root / "commitlog" / "notes.txt").write_text("x")
    with pytest.raises(CorruptionError, match=r"notes\.txt"):
        MessageStore.open(root, SMALL)
    (root / "commitlog" / "notes.txt").unlink()
    with first_segment(root).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CorruptionError, match="16385"):
        MessageStore.open(root, SMALL)


@pytest.mark.parametrize("kept", [1_000_000, 60, 0])
@pytest.mark.parametrize("what", ["consumequeue", "index"])
def test_derived_files_are_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, kept: int) -> None:
    """Queues or index deleted under a store that was not closed: written again from the log, byte for byte; from what
    the walk kept, and behind that from the log.
    """
    monkeypatch.setattr(survey, "_KEPT_RECORDS", kept)
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    for i, body in enumerate(bodies(100)):
        store.put_message(Message("t", body, queue_id=i % 2, keys=[f"k{i}"]))
    store.writer.finish()
    store.writer.clean_end.move()
    store.put_message(Message("t", b"last", queue_id=0, keys=["last"]))
    die(root)
    before = {p.relative_to(root): p.read_bytes() for p in (root / "consumequeue").rglob("*") if p.is_file()}
    shutil.rmtree(root / what)
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None and any("rebuilt" in note for note in store.report.notes)
        assert read_all(store) == [*bodies(100)[::2], b"last"]
        assert [m.body for m in store.query_message("t", "k1")] == [bodies(100)[1]]
    assert {p.relative_to(root): p.read_bytes() for p in (root / "consumequeue").rglob("*") if p.is_file()} == before
    assert verify(root).ok


def test_one_queue_is_rebuilt(tmp_path: Path) -> None:
    """One queue's folder deleted under a killed writer: its units below the clean end come back as well."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    for i, body in enumerate(bodies(40)):
        store.put_message(Message("t", body, queue_id=i % 2))
    store.writer.finish()
    store.writer.clean_end.move()
    store.put_message(Message("t", b"last", queue_id=0))
    die(root)
    shutil.rmtree(root / "consumequeue" / "t" / "0")
    with MessageStore.open(root, SMALL) as store:
        assert read_all(store) == [*bodies(40)[::2], b"last"]
    assert verify(root).ok


def test_an_empty_folder_of_a_queue_is_no_sign_that_it_had_messages(tmp_path: Path) -> None:
    """A power cut leaves the folder of a queue without its file, and the topic had been deleted before."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        for queue_id in (0, 1):
            store.put_message(Message("t", b"earlier", queue_id=queue_id))
        store.delete_topic("t")
        store.put_message(Message("t", b"later", queue_id=0))
        die(root)
    (root / "consumequeue" / "t" / "1").mkdir()

    with MessageStore.open(root, SMALL) as store:
        assert read_all(store) == [b"later"]
    assert verify(root).ok
    with MessageStore.open(root, SMALL) as store:
        assert store.put_message(Message("t", b"new", queue_id=1)).queue_offset == 0
    assert verify(root).ok


def test_journal_is_rebuilt_from_the_log(tmp_path: Path) -> None:
    """The journal is a cache: without it, or with a broken one, batches are known all the same."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        for version in range(3):
            store.append_batch(columns(bodies(5)), BatchRequest("app", version, "spark"))
    for text in (None, b"{broken"):
        (root / "spark" / "journal").unlink()
        if text is not None:
            (root / "spark" / "journal").write_bytes(text)
        with MessageStore.open(root, SMALL) as store:
            assert store.append_batch(columns(bodies(5)), BatchRequest("app", 1, "spark")).status == "known"
            store.writer.clean_end.move()


def test_state_is_rebuilt_from_the_log(tmp_path: Path) -> None:
    """Without spark/state nothing is lost: the store is walked."""
    root = tmp_path / "s"
    left_by_a_killed_session(root)
    (root / "spark" / "state").unlink()
    with MessageStore.open(root, SMALL) as store:
        assert read_all(store) == bodies(20)[::2]
        assert store.append_batch(columns(bodies(10)), BatchRequest("app", 0, "spark")).status == "known"
    assert verify(root).ok


def test_a_copied_segment_of_another_store_is_refused(tmp_path: Path) -> None:
    """D18: valid BATCH records of another store are not taken in."""
    left_by_a_killed_session(tmp_path / "a")
    left_by_a_killed_session(tmp_path / "b")
    shutil.copy(first_segment(tmp_path / "a"), first_segment(tmp_path / "b"))
    with pytest.raises(CorruptionError, match="BATCH record of store"):
        MessageStore.open(tmp_path / "b", SMALL)


@pytest.mark.parametrize("position", [30, 90, 100, 150])
def test_a_damaged_sealed_batch_record_is_refused(tmp_path: Path, position: int) -> None:
    """The last batch's own record, with no queue to prove it: its `__CRC32#` tells damage from a torn write."""
    root = tmp_path / "s"
    left_by_a_killed_session(root, batches=1)
    shutil.rmtree(root / "consumequeue")
    flip(first_segment(root), position)
    with pytest.raises(ChecksumError):
        MessageStore.open(root, SMALL)


def test_folders_that_are_missing_are_not_a_brokers_work(tmp_path: Path) -> None:
    """`recover` said "closed by a broker" of a store that no broker had ever opened."""
    root = filled(tmp_path / "s", 10)
    shutil.rmtree(root / "consumequeue")
    with MessageStore.open(root, SMALL) as store:
        assert store.report.reason == "closed, but files were lost or changed"  # type: ignore[union-attr]


def test_each_reason_why_a_log_ends_has_words() -> None:
    """An operator was told that a log ends at a "(zero)"."""
    source = "".join(Path(module.__file__ or "").read_text() for module in (record_scan, walk, survey))
    reasons = set(re.findall(r'ScanEnd\("(\w+)"', source))
    assert reasons >= {"zero", "torn", "batch"}
    for reason in reasons:
        report = RecoveryReport("", end=7, stop=reason, zeroed_bytes=1)
        assert report.cut is not None and report.cut.startswith(f"1 bytes behind 7, where {_WHERE[reason]}: ")


def test_recovery_twice_changes_nothing(tmp_path: Path) -> None:
    """Recovery is idempotent, byte for byte."""
    root = tmp_path / "s"
    left_by_a_killed_session(root)
    trees = []
    for _ in range(2):
        MessageStore.open(root, SMALL)
        die(root)
        trees.append(
            {
                p: p.read_bytes()
                for folder in ("commitlog", "consumequeue", "index")
                for p in (root / folder).rglob("*")
                if p.is_file()
            }
        )
    assert trees[0] == trees[1]


def test_only_what_is_above_the_clean_end_is_walked(tmp_path: Path) -> None:
    """A large store opens as fast as a small one: the walk starts at C."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    for body in bodies(200):
        store.put_message(Message("t", body, queue_id=0, wait_store_msg_ok=False))
    store.flush()
    store.writer.finish()
    store.writer.clean_end.move()
    clean = store.writer.end.physical_offset
    store.put_message(Message("t", b"one more", queue_id=0))
    die(root)
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert (store.report.start, store.report.record_count) == (clean, 1)


def test_rocksdb_and_batch_queues_are_refused_for_writing(tmp_path: Path) -> None:
    """Stores whose queues are not simple ones: refused before the first byte; nothing of ours is left in them."""
    root = filled(tmp_path / "a", 4)
    (root / "consumequeue" / "CURRENT").write_text("MANIFEST-1")
    with pytest.raises(ValueError, match="RocksDB"):
        MessageStore.open(root, SMALL)
    root = filled(tmp_path / "b", 4)
    (root / "batchconsumequeue" / "t" / "0").mkdir(parents=True)
    with pytest.raises(ValueError, match="batch queues"):
        MessageStore.open(root, SMALL)
    assert Disk().names(root / "batchconsumequeue") == ["t"]


def test_a_broker_that_overwrote_acknowledged_messages_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It had read the store before they were put (where there are no leases): `state` proves that they were there."""
    root = filled(tmp_path / "s", 4)
    broker = Broker(root, SMALL, starts=False)
    with MessageStore.open(root, SMALL) as store:
        for number in range(6):
            store.put_message(Message("t", b"acknowledged/%d" % number, queue_id=0))
    broker.start()
    broker.put("java", b"j0" * 600)
    broker.close()
    with caplog.at_level(logging.ERROR), MessageStore.open(root, SMALL) as store:
        assert store.report is not None and store.report.changed is not None
        assert "have changed" in store.report.changed and "acknowledged messages" in store.report.changed
    assert store.report.changed in caplog.text
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None and store.report.changed is None  # told once


@pytest.mark.parametrize("count", [30, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["no keys", "keys"])
def test_recoveries_that_are_killed_hide_nothing_from_readers(
    keys: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    """Three in a row die, each somewhere; on the same boot a reader sees what was visible before, whole. One that died
    without an index file made all queues anew, and the next one took them away from the readers."""
    root, chance = tmp_path / "store", random.Random(1)
    store = MessageStore.open(root, SMALL)
    for number in range(20):
        store.put_message(Message("t", b"%d" % number, queue_id=number % 2, keys=keys))
    store.flush()
    die(root)
    before, died = seen(root), 0
    assert len(before) == 2
    for _ in range(count):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        for at in [chance.randrange(40) for _ in range(3)]:
            disk = KillDisk(at)
            with contextlib.suppress(Killed, StorePoisonedError):
                MessageStore.open(copy, SMALL, disk=disk)
            die(copy)
            died += disk.dead
            assert seen(copy) == before, disk.killed_in
    assert died > count


def test_a_queue_file_of_another_size_after_a_kill_names_the_way_out(tmp_path: Path) -> None:
    """The units of a killed store are proofs, so its queues are not rebuilt without a word; what helps was not said."""
    root = tmp_path / "s"
    store = MessageStore.open(root, SMALL)
    for number in range(20):
        store.put_message(Message("t", b"%d/" % number, queue_id=0))
    die(root)
    newest = max((root / "consumequeue" / "t" / "0").iterdir())
    newest.write_bytes(newest.read_bytes()[:50])
    with pytest.raises(CorruptionError, match=r"remove the folder .*consumequeue and run `messagestore recover`"):
        MessageStore.open(root, SMALL)
    shutil.rmtree(root / "consumequeue")
    with MessageStore.open(root, SMALL) as store:
        assert read_all(store) == [b"%d/" % number for number in range(20)]
