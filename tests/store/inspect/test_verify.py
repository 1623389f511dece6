"""A whole store has no findings, whoever holds it; each fault put into one is named with its file and offset."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crash.imitate import Broker, another_boot
from messagestore import BatchRequest, Message, MessageStore, NotAStoreError, StoreConfig, StoreFullError
from messagestore.files.disk import Disk, File
from messagestore.files.numbered_files import file_name
from messagestore.files.state import State, StateFile
from messagestore.format import record_scan
from messagestore.format.layout import (
    BLANK,
    CHECKPOINT,
    INDEX_ENTRY,
    INDEX_HEADER,
    INDEX_SLOT_SIZE,
    RECORD_HEAD,
    STATE_CLEAN,
    STATE_SLOT_POSITIONS,
    UNIT,
)
from messagestore.inspect.report import _MOST_FINDINGS
from messagestore.inspect.verify import Finding, VerifyReport, verify
from messagestore.log.batch_journal import BatchJournal
from messagestore.log.dispatch import Dispatcher
from small import SMALL, bodies, columns, filled

ONE_SEGMENT = SMALL.replace(mapped_file_size_commit_log=256 * 1024)


class SealedDisk(Disk):
    """A disk that nobody may write to."""

    def _refuse(self, *args: object, **named: object) -> None:
        raise AssertionError(f"verify wrote: {args} {named}")

    open_new = pwrite = fdatasync = fsync_dir = syncfs = rename = unlink = mkdir = fallocate = punch = _refuse  # type: ignore[assignment]

    def open(self, path, *, writable=False):
        assert not writable, path
        return super().open(path)


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of every file."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def checked(root: Path, config: StoreConfig | None = None) -> VerifyReport:
    """The report, made twice and without a byte changed."""
    before = tree(root)
    report = verify(root, config, disk=SealedDisk())
    assert tree(root) == before
    assert len(report.findings) <= report.finding_count
    assert report.ok == (not report.findings)
    return report


def one(report: VerifyReport) -> Finding:
    """The only finding."""
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def damage(path: Path, position: int, data: bytes | Callable[[bytes], bytes], size: int = 1) -> None:
    """Put other bytes into a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        if callable(data):
            data = data(file.read(size))
            file.seek(position)
        file.write(data)


def flipped(data: bytes) -> bytes:
    return bytes(byte ^ 0x40 for byte in data)


def starts(root: Path, segment: int = 0) -> list[int]:
    """Where the records of one segment begin."""
    path = root / "commitlog" / file_name(segment)
    data = np.fromfile(path, np.uint8)
    return (segment + record_scan.scan(data, segment, file_bytes_left=len(data))[0]).tolist()


def log_path(root: Path, segment: int = 0) -> Path:
    return root / "commitlog" / file_name(segment)


def queue_path(root: Path, queue_id: int = 0, topic: str = "t", offset: int = 0) -> Path:
    return root / "consumequeue" / topic / str(queue_id) / file_name(offset)


def index_path(root: Path) -> Path:
    return min((root / "index").iterdir())


def with_batches(root: Path, count: int = 2, config: StoreConfig = ONE_SEGMENT) -> Path:
    with MessageStore.open(root, config) as store:
        for version in range(count):
            store.append_batch(columns(bodies(20, start=100 * version)), BatchRequest(app_id="app", version=version))
    return root


def as_broker(root: Path, *, crashed: bool = False) -> Path:
    """The same store as a broker would have left it: nothing of ours beside its files."""
    shutil.rmtree(root / "spark")
    (root / "abort").unlink(missing_ok=True)
    if crashed:
        (root / "abort").write_text("4711")
    return root


BROKER = ONE_SEGMENT  # what a user must say of a broker's index


# ---- whole stores


def test_a_closed_store_is_whole(tmp_path: Path) -> None:
    """Several segments, queue files and index files; everything is counted."""
    root = filled(tmp_path / "store", 500)
    report = checked(root)
    assert report.ok, report.findings
    assert (report.record_count, report.unit_count, report.key_count, report.batch_count) == (500, 500, 500, 0)
    assert report.start == 0
    assert report.end > 2 * SMALL.mapped_file_size_commit_log
    assert len(list((root / "index").iterdir())) > 2
    assert report.notes == []
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_batches_are_whole(tmp_path: Path) -> None:
    """Each batch counts its own record too."""
    report = checked(with_batches(tmp_path / "store", 5, SMALL))
    assert report.ok, report.findings
    assert (report.record_count, report.batch_count) == (105, 5)


def test_a_new_store_is_whole(tmp_path: Path) -> None:
    """Opened and closed, never written."""
    root = tmp_path / "store"
    MessageStore.open(root, SMALL).close()
    assert checked(root).ok


def test_a_folder_without_a_store_is_none(tmp_path: Path) -> None:
    """The message says what was looked for."""
    with pytest.raises(NotAStoreError, match="found no message store"):
        verify(tmp_path)


def test_a_live_store_is_whole_while_it_grows(tmp_path: Path) -> None:
    """Checked again and again beside a writer of puts and batches: what is under way is no fault."""
    root, stop, failed = tmp_path / "store", threading.Event(), []

    def write() -> None:
        try:
            with MessageStore.open(root, SMALL) as store:
                for version in range(10_000):
                    if stop.is_set():
                        return
                    for body in bodies(5):
                        store.put_message(Message("t", body, keys=["k", "x"]))
                    store.append_batch(columns(bodies(30)), BatchRequest(app_id="app", version=version))
        except Exception as error:  # noqa: BLE001 - told by the test
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not (root / "abort").exists():
            assert writer.is_alive()
        counts = [0]
        while counts[-1] < 2000:
            assert writer.is_alive(), failed
            report = verify(root, disk=SealedDisk())
            assert report.ok, report.findings
            counts.append(report.record_count)
        assert counts == sorted(counts)
        assert len(set(counts)) > 5
    finally:
        stop.set()
        writer.join()
    assert not failed
    assert checked(root).ok


def test_a_store_that_is_opened_and_closed_all_the_time_is_whole(tmp_path: Path) -> None:
    """`abort` comes and goes, the clean end moves, the state changes: the check begins again rather than blame it."""
    root, stop = filled(tmp_path / "store", 50), threading.Event()

    def write() -> None:
        while not stop.is_set():
            with MessageStore.open(root) as store:
                store.put_message(Message("t", b"x", queue_id=0, keys=["k"]))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(25):
            report = verify(root, disk=SealedDisk())
            assert report.ok, report.findings
    finally:
        stop.set()
        writer.join()


def test_a_killed_writer_leaves_a_whole_store(tmp_path: Path) -> None:
    """SIGKILL between puts: what is acknowledged is whole, what is behind it is said not to be checked."""
    root = tmp_path / "store"
    code = (
        "import sys; from messagestore import *\n"
        "from small import SMALL\n"
        "store = MessageStore.open(sys.argv[1], SMALL)\n"
        "while True: print(store.put_message(Message('t', b'x' * 100, keys=['k'])).physical_offset, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True, env=environment)
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(60)]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    report = checked(root)
    assert report.ok, report.findings
    assert report.end > acknowledged[-1]
    assert any("was killed" in note for note in report.notes)
    MessageStore.open(root).close()
    assert checked(root).notes == []


def test_a_recovery_that_died_midway_leaves_a_whole_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has taken keys out of the index, which look-ups then read from the log, as on a disk without room for more."""
    root = tmp_path / "store"
    with MessageStore.open(root, ONE_SEGMENT) as store:
        for _ in range(3):
            store.put_message(Message("t", b"x", queue_id=0, keys=["k"]))
        shutil.copytree(root, tmp_path / "killed")
    root = tmp_path / "killed"
    file, state = state_of(root)
    file.write(replace(state, counter=state.counter + 1, in_flight=state.visible_end))

    def full(*pieces: object) -> None:
        raise StoreFullError("no room for an index file", path="index", needed=1, free=0)

    with monkeypatch.context() as patched:
        patched.setattr(Dispatcher, "_put_index", full)
        with pytest.raises(StoreFullError):
            MessageStore.open(root)
    report = checked(root)
    assert report.ok, report.findings
    assert "3 keys from 0 on are not in the index yet" in report.notes
    with MessageStore.open_read_only(root) as reader:
        assert len(reader.query_message("t", "k")) == 3
    MessageStore.open(root).close()
    assert checked(root).notes == []


def test_after_a_power_cut_only_what_is_proven_is_checked(tmp_path: Path) -> None:
    """State was written in another boot: bytes above C may be anything, and the index too."""
    root = tmp_path / "store"
    with MessageStore.open(root, ONE_SEGMENT) as store:
        store.put_message(Message("t", b"first", queue_id=0, keys=["k"]))
        writer = store.writer
        writer.clean_end.move()
        clean_end = writer.state.clean_end
        store.put_message(Message("t", b"second", queue_id=0, keys=["k"]))
        shutil.copytree(root, tmp_path / "cut")
    root = tmp_path / "cut"
    damage(log_path(root), clean_end + RECORD_HEAD.size, flipped)
    damage(index_path(root), INDEX_HEADER.size, bytes(INDEX_SLOT_SIZE * SMALL.max_hash_slot_num))
    assert not checked(root).ok, "while the machine runs, it is a fault"
    with another_boot():
        report = checked(root)
    assert report.ok, report.findings
    assert (report.end, report.record_count) == (clean_end, 1)
    assert any("was restarted" in note for note in report.notes)


@pytest.mark.parametrize("crashed", [False, True])
def test_a_broker_store_is_whole(tmp_path: Path, crashed: bool) -> None:
    """No `spark` folder; index counts come from the configuration."""
    root = as_broker(with_batches(filled(tmp_path / "store", 50, ONE_SEGMENT), 0), crashed=crashed)
    report = checked(root, BROKER)
    assert report.ok, report.findings
    assert (report.record_count, report.key_count) == (50, 50)
    assert bool(report.notes) == crashed


def test_index_files_of_another_size_are_a_finding(tmp_path: Path) -> None:
    """A broker's store opened without its settings: the rest is checked all the same."""
    root = as_broker(filled(tmp_path / "store", 50))
    report = checked(root)
    assert one(report).path == str(index_path(root))
    assert "maxHashSlotNum 5000000" in one(report).expected
    assert report.unit_count == 50


def test_what_a_running_broker_has_not_dispatched_is_no_fault(tmp_path: Path) -> None:
    """Records behind the last unit, the last one torn; the index lags as well."""
    root = as_broker(filled(tmp_path / "store", 50, ONE_SEGMENT), crashed=True)
    for queue_id in (0, 1):
        damage(queue_path(root, queue_id, offset=16 * 20), 8 * UNIT.size, bytes(8 * UNIT.size))
    damage(log_path(root), starts(root)[-1], flipped)
    report = checked(root, BROKER)
    assert report.ok, report.findings
    assert report.record_count == 48


def test_a_deleted_topic_is_no_fault(tmp_path: Path) -> None:
    """A broker deletes queues and settings of a topic at once, and leaves its records to retention."""
    root = filled(tmp_path / "store", 20)
    with MessageStore.open(root) as store:
        store.put_message(Message("kept", b"x", queue_id=0))
    shutil.rmtree(root / "consumequeue" / "t")
    assert not checked(root).ok, "its settings are there: the queues are missing"
    topics = root / "config" / "topics.json"
    table = json.loads(topics.read_text())
    del table["topicConfigTable"]["t"]
    topics.write_text(json.dumps(table))
    report = checked(root)
    assert report.ok, report.findings
    assert any("deleted" in note for note in report.notes)


def test_verify_misses_the_queues_of_a_topic_that_was_deleted_and_made_again(tmp_path: Path) -> None:
    """Nobody has put anything into the new one, so no queue of it shows that the records are those of the old one."""
    root = filled(tmp_path / "store", 20)
    with MessageStore.open(root) as store:
        store.put_message(Message("kept", b"x", queue_id=0))
    shutil.rmtree(root / "consumequeue" / "t")
    topics = root / "config" / "topics.json"
    table = json.loads(topics.read_text())
    del table["topicConfigTable"]["t"]
    topics.write_text(json.dumps(table))
    (root / "checkpoint").write_bytes((root / "checkpoint").read_bytes()[:24].ljust(4096, b"\0"))  # as a broker
    with MessageStore.open(root) as store:
        store.create_topic("t", 2)
        store.put_message(Message("kept", b"x", queue_id=0))
    report = checked(root)
    assert report.ok, report.findings
    assert any("deleted" in note for note in report.notes)
    with MessageStore.open(root) as store:
        assert store.put_message(Message("t", b"x", queue_id=0)).queue_offset == 0
    assert checked(root).ok
    shutil.rmtree(root / "consumequeue" / "t")
    assert not checked(root).ok, "it has messages now"


def test_a_topic_made_again_is_no_fault(tmp_path: Path) -> None:
    """Its queue begins at 0 once more; the units of the first run are gone."""
    root = filled(tmp_path / "store", 20, ONE_SEGMENT)
    with MessageStore.open(root, ONE_SEGMENT) as store:  # without any queue the log would be dispatched from its start
        store.put_message(Message("other", b"x", queue_id=0))
    shutil.rmtree(root / "consumequeue" / "t")
    topics = root / "config" / "topics.json"  # a broker deletes both; a folder alone is damage
    fields = json.loads(topics.read_text())
    del fields["topicConfigTable"]["t"]
    topics.write_text(json.dumps(fields))
    filled(root, 6, ONE_SEGMENT)
    report = checked(root)
    assert report.ok, report.findings
    assert any("start again at 0" in note for note in report.notes)


def test_a_topic_made_again_by_a_writer_that_was_killed_is_no_fault(tmp_path: Path) -> None:
    """It had written the first messages of two queues of the new topic, but had not made them visible; queue 2 has none.

    Other units that point there are still a fault.
    """
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        for number in range(21):
            store.put_message(Message("t", b"old", queue_id=number % 3, keys=["k"]))
        store.delete_topic("t")
        store.create_topic("t", 3)
        store.put_message(Message("other", b"x", queue_id=0))
        visible = state_of(root)[1].visible_end
        for number in range(6):
            store.put_message(Message("t", b"new", queue_id=number % 2, keys=["k"]))
        shutil.copytree(root, tmp_path / "killed")
    root = tmp_path / "killed"
    file, state = state_of(root)
    file.write(replace(state, counter=state.counter + 1, visible_end=visible, in_flight=visible))
    report = checked(root)
    assert report.ok, report.findings
    notes = [
        note for note in report.notes if f"was deleted and created again, and no record from there to {visible}" in note
    ]
    assert len(notes) == 3

    damaged = shutil.copytree(root, tmp_path / "damaged")
    units = queue_path(damaged, 0).read_bytes()
    damage(queue_path(damaged, 0), 0, units[20:40], 20)
    assert not checked(damaged).ok, "unit 0 points to message 1"
    damage(queue_path(damaged, 0), 0, units[:8] + b"\xff" * 4 + units[12:20], 20)
    assert not checked(damaged).ok, "its size is -1"
    damage(queue_path(damaged, 0), 0, units[:20], 20)
    damage(queue_path(damaged, 1), 0, units[:20], 20)
    assert not checked(damaged).ok, "unit 0 of queue 1 points to a message of queue 0"


def test_a_writer_that_was_killed_while_it_made_a_queue_again_leaves_a_whole_store(tmp_path: Path) -> None:
    """The queue has its folder, and no file yet. So its old records do not say where the new topic begins."""

    copies, copied = list[Path](), list[Path]()

    class Copying(Disk):
        def make_folders(self, path: str) -> list[str]:
            made = super().make_folders(path)
            for root in copied:
                copies.append(tmp_path / f"killed {len(copies)}")
                shutil.copytree(root, copies[-1])
            return made

    with MessageStore.open(tmp_path / "store", SMALL, disk=Copying()) as store:
        for number in range(21):
            store.put_message(Message("t", b"old", queue_id=number % 3))
        store.delete_topic("t")
        store.create_topic("t", 3)
        store.put_message(Message("other", b"x", queue_id=0))
        copied.append(tmp_path / "store")
        for number in range(3):
            store.put_message(Message("t", b"new", queue_id=number))
        copied.clear()
    assert len(copies) == 3
    for root in copies:
        report = checked(root)
        assert report.ok, report.findings


def test_retention_takes_the_first_segment(tmp_path: Path) -> None:
    """Units and index entries below the first segment are no fault, nor is a journal entry."""
    root = with_batches(filled(tmp_path / "store", 300), 1, SMALL)
    log_path(root).unlink()
    report = checked(root)
    assert report.ok, report.findings
    assert report.start == SMALL.mapped_file_size_commit_log


def test_a_file_that_is_deleted_again_and_again_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes a file of each look at the folders: the check ends with a finding that names the last one."""
    root = filled(tmp_path / "store", 300)
    read = Disk.pread_into

    def gone(disk: Disk, file: File, view: memoryview, position: int) -> int:
        if file.path.startswith(str(root / "commitlog")):
            raise FileNotFoundError(2, "No such file or directory", file.path)
        return read(disk, file, view, position)

    monkeypatch.setattr(Disk, "pread_into", gone)
    (found,) = verify(root, SMALL).findings
    assert found.path.startswith(str(root / "commitlog"))
    assert "it was deleted in each of 5 checks" in found.found


# ---- faults in the log


def test_every_damaged_body_is_named(tmp_path: Path) -> None:
    """Three flipped bits, three findings, each with the record's offset; the records between are checked."""
    root = filled(tmp_path / "store", 100, ONE_SEGMENT)
    places = [starts(root)[i] for i in (3, 50, 98)]
    for place in places:
        damage(log_path(root), place + RECORD_HEAD.size + 5, flipped)
    report = checked(root)
    assert [finding.offset for finding in report.findings] == places
    assert {finding.path for finding in report.findings} == {str(log_path(root))}
    assert all("BODYCRC" in finding.expected for finding in report.findings)
    assert report.record_count == 97
    assert report.end == starts_end(root)


def starts_end(root: Path) -> int:
    state = StateFile(Disk(), str(root / "spark" / "state")).read()
    assert state is not None
    return state.visible_end


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("total_size", b"\0\0\0\0"),
        ("total_size", b"\x7f\0\0\0"),
        ("magic", b"\0\0\0\1"),
        ("physical_offset", b"\1" * 8),
    ],
)
def test_a_damaged_head_is_named(tmp_path: Path, field: str, data: bytes) -> None:
    """The next record is found through the queues."""
    root = filled(tmp_path / "store", 30, ONE_SEGMENT)
    place, following = starts(root)[10:12]
    damage(log_path(root), place + RECORD_HEAD.offset(field), data)
    finding = one(checked(root))
    assert (finding.path, finding.offset) == (str(log_path(root)), place)
    assert f"the next record is at {following}" in finding.found


def test_a_damaged_last_record_of_a_closed_store_is_named(tmp_path: Path) -> None:
    """No unit behind it proves that it was there: the clean end does."""
    root = filled(tmp_path / "store", 10, ONE_SEGMENT)
    place = starts(root)[-1]
    damage(log_path(root), place + RECORD_HEAD.size, flipped)
    report = checked(root)
    assert place in [finding.offset for finding in report.findings if finding.path == str(log_path(root))]


def test_a_damaged_record_of_a_closed_broker_store_is_named(tmp_path: Path) -> None:
    """Its unit points to it, first in the middle, then at the end."""
    root = as_broker(filled(tmp_path / "store", 10, ONE_SEGMENT))
    for row in (4, 9):
        place = starts(root)[-1] if row == 9 else starts(root)[row]
        damage(log_path(root), place + RECORD_HEAD.size, flipped)
        report = checked(root, BROKER)
        assert [finding.offset for finding in report.findings] == [place]
        damage(log_path(root), place + RECORD_HEAD.size, flipped)


def test_a_torn_stretch_is_one_finding(tmp_path: Path) -> None:
    """Zeros over several records."""
    root = filled(tmp_path / "store", 100, ONE_SEGMENT)
    place, end = starts(root)[10], starts(root)[20]
    damage(log_path(root), place, bytes(end - place))
    finding = one(checked(root))
    assert (finding.offset, finding.found) == (place, f"TOTALSIZE 0; the next record is at {end}")


def test_a_missing_last_segment_is_named(tmp_path: Path) -> None:
    """The log goes on behind the last file."""
    root = filled(tmp_path / "store", 300)
    last = max((root / "commitlog").iterdir())
    last.unlink()
    report = checked(root)
    assert report.findings[0].path == str(log_path(root, int(last.name) - SMALL.mapped_file_size_commit_log))
    assert "BLANK" in report.findings[0].expected


def test_a_missing_segment_in_the_middle_is_named(tmp_path: Path) -> None:
    """Nothing else can be checked then."""
    root = filled(tmp_path / "store", 500)
    path = log_path(root, SMALL.mapped_file_size_commit_log)
    path.unlink()
    finding = one(checked(root))
    assert (finding.path, finding.offset) == (str(path), SMALL.mapped_file_size_commit_log)


def test_a_log_that_is_gone_is_named(tmp_path: Path) -> None:
    """Queues without a log."""
    root = as_broker(filled(tmp_path / "store", 10))
    shutil.rmtree(root / "commitlog")
    (root / "commitlog").mkdir()
    report = checked(root, SMALL)
    assert {finding.path for finding in report.findings} == {str(queue_path(root, q)) for q in (0, 1)}
    assert "records for the units 0 to 4" in report.findings[0].expected


def test_a_damaged_blank_record_is_named(tmp_path: Path) -> None:
    """The next segment is found all the same."""
    root = filled(tmp_path / "store", 300)
    segment = SMALL.mapped_file_size_commit_log
    data = log_path(root).read_bytes()
    place = data.index((0xCBD43194).to_bytes(4, "big")) - 4
    damage(log_path(root), place, b"\0\0\0\x09")
    finding = one(checked(root))
    assert finding.offset == place
    assert finding.expected.startswith(f"a BLANK of {segment - place} bytes")
    assert f"the next record is at {segment}" in finding.found
    assert BLANK.size == 8


def test_bytes_behind_the_end_are_named(tmp_path: Path) -> None:
    """In the last segment of a closed store."""
    root = filled(tmp_path / "store", 10)
    place = starts_end(root) + 1000
    damage(log_path(root), place, b"x")
    finding = one(checked(root))
    assert (finding.path, finding.offset, finding.expected) == (
        str(log_path(root)),
        place,
        "zeros behind the log's end",
    )


def test_a_segment_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """EIO: the check goes on with the next segment."""

    class BadDisk(SealedDisk):
        def pread_into(self, file, buffer, position):
            if file.path == str(log_path(root)) and position <= 500 < position + len(buffer):
                raise OSError(5, "Input/output error", file.path)
            return super().pread_into(file, buffer, position)

    root = filled(tmp_path / "store", 300)
    report = verify(root, disk=BadDisk())
    finding = report.findings[0]
    assert (finding.path, finding.expected[:22]) == (str(log_path(root)), "bytes that can be read")
    assert "Input/output error" in finding.found
    assert report.record_count > 100


def test_a_topic_that_would_leave_the_folder_is_named(tmp_path: Path) -> None:
    """Names in the log become paths: they are checked before."""
    root = tmp_path / "store"
    with MessageStore.open(root, ONE_SEGMENT) as store:
        store.put_message(Message("aaaa", b"", queue_id=0))
        store.put_message(Message("t", b"", queue_id=0))
    damage(log_path(root), RECORD_HEAD.size + 1, b"../b")
    report = checked(root)
    assert report.findings[0].expected == "a legal topic and queue id"
    assert "'../b'" in report.findings[0].found


def test_a_damaged_queue_offset_is_one_finding(tmp_path: Path) -> None:
    """The records behind it keep their numbers."""
    root = filled(tmp_path / "store", 30, ONE_SEGMENT)
    place = starts(root)[10]
    damage(log_path(root), place + RECORD_HEAD.offset("queue_offset"), (999).to_bytes(8, "big"))
    finding = one(checked(root))
    assert (finding.offset, finding.expected, finding.found) == (place, "queue offset 5 of t/0", "999")


def test_store_times_that_go_back_are_said(tmp_path: Path) -> None:
    """A broker's clock may be set back: no fault."""
    root = filled(tmp_path / "store", 10, ONE_SEGMENT)
    damage(log_path(root), starts(root)[5] + RECORD_HEAD.offset("store_timestamp_ms"), (10).to_bytes(8, "big"))
    report = checked(root)
    assert report.ok, report.findings
    assert f"first at {starts(root)[5]}" in report.notes[0]


def test_a_record_without_unit_at_the_end_of_a_closed_store_is_named(tmp_path: Path) -> None:
    """A broker that closes has dispatched everything."""
    root = as_broker(filled(tmp_path / "store", 10, ONE_SEGMENT))
    damage(queue_path(root, 1), 4 * UNIT.size, bytes(UNIT.size))
    finding = one(checked(root, BROKER))
    assert (finding.offset, finding.expected) == (starts(root)[-1], "a unit of t/1 for this record")


# ---- faults in queues


@pytest.mark.parametrize("field", ["physical_offset", "size", "tags_code"])
def test_a_damaged_unit_is_named(tmp_path: Path, field: str) -> None:
    """With the place of the unit in its file."""
    root = filled(tmp_path / "store", 60, ONE_SEGMENT)
    path, position = queue_path(root, offset=16 * 20), 3 * UNIT.size
    damage(path, position + UNIT.offset(field), flipped)
    finding = one(checked(root))
    assert (finding.path, finding.offset) == (str(path), position)
    assert finding.expected.startswith("unit 19 of t/0: physical offset")


def test_a_missing_queue_is_named(tmp_path: Path) -> None:
    """Twenty units are listed, the rest is counted."""
    root = filled(tmp_path / "store", 100, ONE_SEGMENT)
    shutil.rmtree(root / "consumequeue" / "t" / "1")
    report = checked(root)
    assert report.finding_count == 50
    assert len(report.findings) == 20
    assert {finding.path for finding in report.findings} == {str(root / "consumequeue" / "t" / "1")}
    assert "30 more" in report.notes[0]


def test_a_missing_queue_file_is_named(tmp_path: Path) -> None:
    """A gap between a queue's files; its other queue is checked."""
    root = filled(tmp_path / "store", 100, ONE_SEGMENT)
    path = queue_path(root, 1, offset=16 * 20)
    path.unlink()
    report = checked(root)
    assert one(report).path == str(path)
    assert report.unit_count == 50


def test_a_cut_queue_file_is_named(tmp_path: Path) -> None:
    """Java refuses a file of another size."""
    root = filled(tmp_path / "store", 10)
    os.truncate(queue_path(root), 100)
    finding = one(checked(root))
    assert (finding.path, finding.expected, finding.found) == (
        str(queue_path(root)),
        "a file of 320 bytes",
        "100 bytes",
    )


def test_a_unit_without_record_is_named(tmp_path: Path) -> None:
    """Java would show a message that nobody put."""
    root = filled(tmp_path / "store", 10)
    damage(queue_path(root), 5 * UNIT.size, b"\0" * 7 + b"\x09\0\0\0\x64" + bytes(8))
    finding = one(checked(root))
    assert (finding.path, finding.offset) == (str(queue_path(root)), 5 * UNIT.size)
    assert finding.expected == "records for the units 5 to 5 of t/0"


def test_a_queue_without_any_record_is_named(tmp_path: Path) -> None:
    """A folder copied from elsewhere."""
    root = filled(tmp_path / "store", 10)
    shutil.copytree(root / "consumequeue" / "t" / "1", root / "consumequeue" / "t" / "7")
    finding = one(checked(root))
    assert (finding.path, finding.expected) == (str(queue_path(root, 7)), "records for the units 0 to 4 of t/7")


def test_bytes_behind_the_last_unit_are_named(tmp_path: Path) -> None:
    """Not a unit now, but one when the queue has grown up to it."""
    root = filled(tmp_path / "store", 10)
    damage(queue_path(root), 8 * UNIT.size + 2, b"\1")
    finding = one(checked(root))
    assert (finding.path, finding.offset) == (str(queue_path(root)), 8 * UNIT.size)


def test_strangers_in_the_queue_folder_are_named(tmp_path: Path) -> None:
    """A file, and a folder that is no topic's."""
    root = filled(tmp_path / "store", 10)
    (root / "consumequeue" / "readme.txt").write_text("x")
    (root / "consumequeue" / "a topic").mkdir(parents=True)
    report = checked(root)
    assert sorted(finding.path for finding in report.findings) == [
        str(root / "consumequeue" / "a topic"),
        str(root / "consumequeue" / "readme.txt"),
    ]


def test_a_stranger_in_the_log_folder_is_named(tmp_path: Path) -> None:
    """It would stop a broker."""
    root = filled(tmp_path / "store", 10)
    (root / "commitlog" / "notes").write_text("x")
    finding = one(checked(root))
    assert (finding.path, finding.found) == (str(root / "commitlog" / "notes"), "'notes'")


def test_a_stranger_in_the_root_is_a_note(tmp_path: Path) -> None:
    """It harms nobody."""
    root = filled(tmp_path / "store", 10)
    (root / "notes").write_text("x")
    report = checked(root)
    assert report.ok
    assert report.notes == [f"{root / 'notes'} does not belong to a message store"]


def test_a_link_in_place_of_a_segment_is_named(tmp_path: Path) -> None:
    """Files are opened without following links."""
    root = filled(tmp_path / "store", 10)
    log_path(root).rename(tmp_path / "elsewhere")
    log_path(root).symlink_to(tmp_path / "elsewhere")
    assert str(log_path(root)) in {finding.path for finding in verify(root).findings}


# ---- faults in the index


def test_a_missing_index_entry_is_named(tmp_path: Path) -> None:
    """Another hash: the key is not found, and who looks at the chain meets a stranger."""
    root = filled(tmp_path / "store", 50, ONE_SEGMENT)
    position = INDEX_HEADER.size + SMALL.max_hash_slot_num * INDEX_SLOT_SIZE + 7 * INDEX_ENTRY.size
    damage(index_path(root), position + 3, flipped)
    report = checked(root)
    assert f"the record at {starts(root)[6]}" in report.findings[0].expected
    assert {finding.path for finding in report.findings} <= {str(index_path(root)), str(root / "index")}

    (note,) = (note for note in report.notes if "messagestore recover" in note)
    assert note.startswith(f"{root / 'index'}: remove this folder")
    shutil.rmtree(root / "index")
    MessageStore.open(root, SMALL).close()
    assert verify(root, SMALL).ok


def test_a_damaged_slot_is_named(tmp_path: Path) -> None:
    """Every entry of its chain is passed over."""
    root = filled(tmp_path / "store", 50, ONE_SEGMENT)
    slots = np.fromfile(index_path(root), ">i4", SMALL.max_hash_slot_num, offset=INDEX_HEADER.size)
    slot = int(np.flatnonzero(slots)[0])
    damage(index_path(root), INDEX_HEADER.size + slot * INDEX_SLOT_SIZE, b"\0\0\0\0")
    report = checked(root)
    assert {finding.path for finding in report.findings} == {str(index_path(root))}
    assert all(finding.found == "an entry that no chain reaches" for finding in report.findings)


@pytest.mark.parametrize("bits", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_the_index_hides_keys_and_is_named(tmp_path: Path, bits: int) -> None:
    """The index has no checksum: a key may not be found then, and `verify` says why. Nothing else is shown for it."""
    count, chance = 12, random.Random(20)
    root = filled(tmp_path / "store", count, ONE_SEGMENT)
    whole = index_path(root).read_bytes()

    def found() -> list[list[int]]:
        with MessageStore.open_read_only(root, SMALL) as store:
            return [[m.physical_offset for m in store.query_message("t", f"k{i}")] for i in range(count)]

    right = found()
    assert all(right)
    used = INDEX_HEADER.size + SMALL.max_hash_slot_num * INDEX_SLOT_SIZE + (1 + count) * INDEX_ENTRY.size
    hidden = 0
    for bit in chance.sample(range(8 * used), bits):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        index_path(root).write_bytes(data)
        now = found()
        assert all(some in ([], all_of_it) for some, all_of_it in zip(now, right, strict=True)), bit
        hidden += now != right
        assert now == right or not verify(root, SMALL).ok, bit
    assert hidden


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    """Keys behind the last entry of a store that is up to date."""
    root = filled(tmp_path / "store", 50)
    shutil.rmtree(root / "index")
    finding = one(checked(root))
    assert (finding.path, finding.expected[:22]) == (str(root / "index"), "entries for the 50 key")


def test_keys_before_the_index_begins_are_a_note(tmp_path: Path) -> None:
    """After a crash of its own a broker deletes index files; a look-up scans what they do not cover."""
    root = filled(tmp_path / "store", 500)
    index_path(root).unlink()
    report = checked(root)
    assert report.ok, report.findings
    assert "are in no index file" in report.notes[0]


def test_a_cut_index_file_is_named(tmp_path: Path) -> None:
    """The rest of the store is checked."""
    root = filled(tmp_path / "store", 50)
    os.truncate(index_path(root), 100)
    report = checked(root)
    assert one(report).found == "100 bytes"
    assert report.unit_count == 50


# ---- faults in batches and small files


def test_damaged_batch_headers_are_named(tmp_path: Path) -> None:
    """A bit of a header that no record's CRC covers: the batch's does."""
    root = with_batches(tmp_path / "store")
    place = starts(root)[5]
    damage(log_path(root), place + RECORD_HEAD.offset("born_timestamp_ms"), flipped)
    finding = one(checked(root))
    assert finding.offset == starts(root)[1]
    assert finding.expected == "the data of the batch at 0 (CRC-32)"


def test_a_batch_of_another_store_is_named(tmp_path: Path) -> None:
    """A segment copied from another store."""
    one_store, other = with_batches(tmp_path / "one"), with_batches(tmp_path / "other")
    shutil.copy(log_path(other), log_path(one_store))
    report = checked(one_store)
    assert any("one of '" in finding.found for finding in report.findings)


def test_a_lost_batch_is_named_by_the_journal(tmp_path: Path) -> None:
    """The journal says that it was there."""
    root = with_batches(tmp_path / "store")
    path = root / "spark" / "journal"
    journal = BatchJournal.read(Disk(), str(path))
    entry = journal.find("app", 1)
    assert entry is not None
    journal.remember("app", replace(entry, physical_offset=entry.physical_offset + 8))
    path.write_bytes(journal.to_bytes())
    finding = one(checked(root))
    assert (finding.path, finding.expected[:22]) == (str(path), "version 1 of app 'app'")


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    """A writer would read the log instead; what lies below the first segment is lost, though."""
    root = with_batches(tmp_path / "store")
    path = root / "spark" / "journal"
    path.write_bytes(path.read_bytes()[:30])
    assert one(checked(root)).path == str(path)


@pytest.mark.parametrize("name", ["journal", "store.json"])
def test_a_missing_small_file_is_named(tmp_path: Path, name: str) -> None:
    """A writer makes both again, but the operator should know that they were lost."""
    root = with_batches(tmp_path / "store")
    (root / "spark" / name).unlink()
    report = verify(root, SMALL)
    assert one(report).path == str(root / "spark" / name)


def test_a_perfect_copy_without_our_folder_is_perfect(tmp_path: Path) -> None:
    """A RocketMQ slave copies the log, the queues and the index, and nothing of `spark/`."""
    root = with_batches(tmp_path / "store")
    shutil.rmtree(root / "spark")
    report = verify(root, SMALL)
    assert report.ok, report.findings
    assert any("this is a copy" in note for note in report.notes)


def state_of(root: Path) -> tuple[StateFile, State]:
    file = StateFile(Disk(), str(root / "spark" / "state"))
    state = file.read()
    assert state is not None
    return file, state


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"clean_end": 1 << 40, "flags": 0}, "a clean end up to"),
        ({"in_flight": 1, "flags": 0}, "bytes in flight from"),
        ({"in_flight": 1 << 40, "flags": STATE_CLEAN}, "because the store was closed"),
        ({"anchor_crc": 1}, "the last one below the clean end"),
    ],
)
def test_a_state_that_contradicts_itself_is_named(tmp_path: Path, changes: dict[str, int], expected: str) -> None:
    """Its CRC is right."""
    root = filled(tmp_path / "store", 10)
    file, state = state_of(root)
    file.write(replace(state, counter=state.counter + 1, **changes))
    found = [finding for finding in checked(root).findings if finding.path == str(root / "spark" / "state")]
    assert expected in found[0].expected


def test_a_state_without_valid_slot_is_named(tmp_path: Path) -> None:
    """Of a closed store, and of one that a writer holds."""
    root = filled(tmp_path / "store", 10)
    for position in STATE_SLOT_POSITIONS:
        damage(root / "spark" / "state", position + 20, flipped)
    for abort in (None, f"messagestore {json.loads((root / 'spark' / 'store.json').read_text())['storeId']}"):
        if abort is not None:
            (root / "abort").write_text(abort)
        report = checked(root)
        finding = one(report)
        assert (finding.path, finding.expected, finding.found) == (
            str(root / "spark" / "state"),
            "a valid slot",
            "none",
        )
        assert report.record_count == 10


def test_a_damaged_identity_is_named(tmp_path: Path) -> None:
    """Without its sizes nothing can be checked."""
    root = filled(tmp_path / "store", 10)
    path = root / "spark" / "store.json"
    path.write_text("{")
    assert one(checked(root)).path == str(path)


def test_a_damaged_topic_table_is_named(tmp_path: Path) -> None:
    """The rest is checked."""
    root = filled(tmp_path / "store", 10)
    (root / "config" / "topics.json").write_text("{")
    report = checked(root)
    assert str(root / "config" / "topics.json") in {finding.path for finding in report.findings}
    assert report.unit_count == 10


@pytest.mark.parametrize("name", ["live", "store"])
def test_a_store_checkpoint_from_the_future_is_named(tmp_path: Path, name: str) -> None:
    """A broker would trust queues that a power cut took. In a live store, and in one that was closed."""
    root = tmp_path / name
    with MessageStore.open(tmp_path / "store", ONE_SEGMENT) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        store.writer.clean_end.move()
        shutil.copytree(tmp_path / "store", tmp_path / "live")
    path = root / "checkpoint"
    assert checked(root).ok
    damage(path, CHECKPOINT.offset("logics_timestamp_ms"), (1 << 50).to_bytes(8, "big"))
    damage(path, CHECKPOINT.offset("confirm_physical_offset"), (1 << 40).to_bytes(8, "big"))
    assert [(f.path, f.offset) for f in checked(root).findings] == [(str(path), 8), (str(path), 32)]


def test_a_store_checkpoint_of_another_size_is_named(tmp_path: Path) -> None:
    """Java maps 4 096 bytes."""
    root = filled(tmp_path / "store", 10)
    os.truncate(root / "checkpoint", 40)
    assert one(checked(root)).expected == "4096 bytes"


# ---- the report


def test_progress_is_told(tmp_path: Path) -> None:
    """In bytes of the log; the last call says that all is done."""
    root = filled(tmp_path / "store", 500)
    calls: list[tuple[int, int]] = []
    report = verify(root, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (report.end, report.end)


def test_findings_are_counted_beyond_those_that_are_kept() -> None:
    """A store full of damage does not fill the memory."""
    report = VerifyReport()
    for offset in range(_MOST_FINDINGS + 7):
        report.find("p", offset, "a", "b")
    assert (len(report.findings), report.finding_count) == (_MOST_FINDINGS, _MOST_FINDINGS + 7)


@pytest.mark.parametrize("seed", range(8))
def test_any_byte_that_a_reader_would_trust_is_found(tmp_path: Path, seed: int) -> None:
    """Random bytes of a batch's records, of units and of the heads of slots: never an exception, always a finding."""
    root = with_batches(tmp_path / "store", 1)
    random = np.random.default_rng(seed)
    end = starts_end(root)
    for path, low, high in (
        (log_path(root), 0, end),
        (queue_path(root), 0, 10 * UNIT.size),
        (queue_path(root, 1), 0, 10 * UNIT.size),
    ):
        for position in random.integers(low, high, 6).tolist():
            damage(path, position, flipped)
            report = verify(root, disk=SealedDisk())
            assert not report.ok, (path, position)
            damage(path, position, flipped)
    assert checked(root).ok


def test_a_key_between_two_index_files_is_found(tmp_path: Path) -> None:
    """What the check only notes, since a look-up scans the log for it: so it must."""
    root = filled(tmp_path / "store", 500)
    sorted((root / "index").iterdir())[1].unlink()
    assert "are in no index file" in checked(root).notes[0]
    with MessageStore.open_read_only(root) as store:
        assert all(len(store.query_message("t", f"k{i}")) == 1 for i in range(0, 500, 7))


def test_a_store_with_rocksdb_queues_is_refused_by_name(tmp_path: Path) -> None:
    """It has no queue files: it looked empty without a fault while its broker ran, and had false ones after."""
    root = filled(tmp_path / "s", 4)
    (root / "consumequeue" / "CURRENT").write_text("MANIFEST-000005\n")
    with pytest.raises(NotAStoreError, match="found queues in RocksDB"):
        verify(root)


def test_messages_of_others_in_the_topic_of_batches_are_no_faults(tmp_path: Path) -> None:
    """A broker does not keep a producer from sending to it: they were faults for ever."""
    root = filled(tmp_path / "s", 4)
    broker = Broker(root, SMALL)
    for number in range(3):
        broker.put("rmq_sys_spark_sink", b"foreign%d" % number)
    broker.close()
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns(bodies(3)), BatchRequest("app", 0))
    report = verify(root)
    assert report.ok, report.findings
    assert report.batch_count == 1
    assert [note for note in report.notes if "messages of other producers" in note]


def test_an_index_file_without_entries_is_no_fault(tmp_path: Path) -> None:
    """A record without keys behind a full file makes the next file, as in RocketMQ: it ends where the full one does."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as store:
        for i in range(SMALL.max_index_num - 1):
            store.put_message(Message("t", b"x", keys=[f"k{i}"]))
        store.put_message(Message("t", b"without keys"))
    paths = sorted((root / "index").iterdir())
    assert len(paths) == 2
    assert verify(root, SMALL).findings == []
    for name in ("begin_timestamp_ms", "end_timestamp_ms", "begin_physical_offset", "end_physical_offset"):
        data = bytearray(paths[1].read_bytes())
        data[INDEX_HEADER.offset(name)] ^= 1
        whole = paths[1].read_bytes()
        paths[1].write_bytes(data)
        assert [each.offset for each in verify(root, SMALL).findings] == [INDEX_HEADER.offset(name)]
        paths[1].write_bytes(whole)
