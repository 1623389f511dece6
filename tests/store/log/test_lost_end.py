"""The end of a log that was closed is gone, and with it what says where the log ended: nothing is cut in silence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from messagestore import BatchRequest, CorruptionError, Message, MessageStore
from messagestore.files import checkpoint as store_checkpoint
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify
from messagestore.log.store_files import Paths
from small import SMALL, bodies, columns, filled, read_all

COUNT = 230
"""Puts that fill two segments and a part of a third."""


def closed(root: Path) -> Path:
    filled(root, COUNT)
    with MessageStore.open(root, SMALL) as store:
        for version in range(2):
            rows = columns(bodies(8, start=1000 * (1 + version)), topic="u")
            store.append_batch(rows, BatchRequest("app", version, "spark", "q"))
    return root


def remove(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def lose_end(root: Path, how: str) -> None:
    segments = sorted((root / "commitlog").iterdir())
    assert len(segments) >= 3
    if how == "no file":
        segments[-1].unlink()
    else:
        segments[-1].write_bytes(bytes(SMALL.mapped_file_size_commit_log))


def content(root: Path) -> dict[str, bytes]:
    folders = ("commitlog", "consumequeue", "index")
    return {str(path): path.read_bytes() for name in folders for path in (root / name).rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", ["no file", "zeros"])
@pytest.mark.parametrize(
    "lost",
    [
        ("spark/state",),
        ("spark/state", "spark/journal"),
        ("spark/state", "checkpoint"),
        ("spark",),
        ("spark", "checkpoint"),
        ("spark", "consumequeue/rmq_sys_spark_sink"),
    ],
    ids="+".join,
)
def test_the_last_segment_is_lost_together_with_what_tells(tmp_path: Path, lost: tuple[str, ...], how: str) -> None:
    root = closed(tmp_path / "s")
    lose_end(root, how)
    remove(root, *lost)
    before = content(root)
    for _ in range(2):  # the first attempt leaves nothing that the second one believes
        with pytest.raises(CorruptionError, match=r"missing are at least \d+ bytes .* --accept-loss"):
            MessageStore.open(root, SMALL)
        assert content(root) == before


@pytest.mark.parametrize("how", ["no file", "zeros"])
@pytest.mark.parametrize("lost", [("spark/state",), ("spark",), ()], ids="+".join)
def test_a_reader_does_not_show_a_shorter_log(tmp_path: Path, lost: tuple[str, ...], how: str) -> None:
    root = closed(tmp_path / "s")
    remove(root, *lost)
    with MessageStore.open_read_only(root) as view:
        assert len(read_all(view)) == COUNT // 2  # nothing is missing yet
    lose_end(root, how)
    with pytest.raises(CorruptionError), MessageStore.open_read_only(root) as view:
        read_all(view)


def test_an_older_state_does_not_hide_a_lost_end(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 20)
    older = (root / "spark" / "state").read_bytes()
    with MessageStore.open(root, SMALL) as store:
        end = store.writer.end.physical_offset
        for body in bodies(50, start=20):
            store.put_message(Message("t", body, queue_id=0))
    (root / "spark" / "state").write_bytes(older)
    segment = root / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes()[:end].ljust(SMALL.mapped_file_size_commit_log, b"\0"))
    with pytest.raises(CorruptionError, match="50 messages of 1 queue"):
        MessageStore.open(root, SMALL)


def test_no_number_of_messages_is_named_where_the_queues_are_gone_too(tmp_path: Path) -> None:
    root = closed(tmp_path / "s")
    lose_end(root, "no file")
    remove(root, "consumequeue")
    with pytest.raises(CorruptionError, match=r"missing are at least \d+ bytes .* \(no ConsumeQueue says how many"):
        MessageStore.open(root, SMALL)


def test_an_older_state_of_a_whole_log_is_no_loss(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 20)
    older = (root / "spark" / "state").read_bytes()
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"later", queue_id=0))
    (root / "spark" / "state").write_bytes(older)
    with MessageStore.open(root, SMALL) as store:
        assert read_all(store)[-1] == b"later"


def test_a_whole_restore_lifts_the_refusal(tmp_path: Path) -> None:
    """The id that a copy gets knows the batches of the segment that was missing."""
    root = closed(tmp_path / "s")
    last = max((root / "commitlog").iterdir())
    saved = last.read_bytes()
    lose_end(root, "no file")
    remove(root, "spark")
    with pytest.raises(CorruptionError, match="--accept-loss"):
        MessageStore.open(root, SMALL)
    last.write_bytes(saved)
    with MessageStore.open(root, SMALL) as store:
        rows = columns(bodies(8, start=2000), topic="u")
        assert store.append_batch(rows, BatchRequest("app", 1, "spark", "q")).status == "known"
        assert len(read_all(store, queue_id=0)) == COUNT // 2


@pytest.mark.parametrize("lost", [("spark/state",), ("spark",), ()], ids="+".join)
def test_what_is_lost_is_accepted_when_asked(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """Also of a batch whose first rows are left: it is cut off whole, and can be sent again."""
    root = closed(tmp_path / "s")
    lose_end(root, "no file")
    remove(root, *lost)
    with MessageStore.open(root, SMALL, accept_loss=True) as store:
        assert store.report is not None
        assert store.report.lost is not None
        kept = len(read_all(store, queue_id=0))
        assert 0 < kept < COUNT // 2
        assert store.put_message(Message("t", b"new", queue_id=0)).queue_offset == kept
        for version in range(2):
            rows = columns(bodies(8, start=1000 * (1 + version)), topic="u")
            assert store.append_batch(rows, BatchRequest("app", version, "spark", "q")).status == "appended"
    report = verify(root, SMALL)
    assert report.ok, report.findings
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert store.report.lost is None


@pytest.mark.parametrize("is_last", [True, False])
def test_a_log_that_is_lost_from_the_middle_of_a_record_on_is_accepted_when_asked(
    tmp_path: Path, is_last: bool
) -> None:
    """The remedy that the error names works, and what is left of the record is not a message. In its properties, which no
    CRC covers, a cut is not seen.
    """
    with MessageStore.open(tmp_path / "whole", SMALL) as store:
        for body in bodies(3):
            store.put_message(Message("t", body, queue_id=0))
        cut = store.put_message(Message("t", b"y" * 30, queue_id=0, tags="TAG", keys=["k"]))
        if not is_last:
            store.put_message(Message("t", b"z", queue_id=0))
    name = f"commitlog/{0:020d}"
    log = (tmp_path / "whole" / name).read_bytes()
    for kept in range(0, cut.size - len(b"KEYS.k.TAGS.TAG."), 3):
        root = tmp_path / f"{kept}"
        shutil.copytree(tmp_path / "whole", root)
        (root / name).write_bytes(log[: cut.physical_offset + kept].ljust(len(log), b"\0"))
        with pytest.raises(CorruptionError, match=rf"missing are .* from {cut.physical_offset} on, .* --accept-loss"):
            MessageStore.open(root, SMALL)
        with MessageStore.open(root, SMALL, accept_loss=True) as store:
            assert read_all(store) == bodies(3)
            store.put_message(Message("t", b"later", queue_id=0))
        assert verify(root).ok


def test_units_that_a_brokers_crash_left_are_no_loss(tmp_path: Path) -> None:
    """A broker cuts the log and leaves old units behind; then it closes the store."""
    root = filled(tmp_path / "s", 20)
    disk, paths = Disk(), Paths(root)
    with MessageStore.open(root, SMALL) as store:
        end, last_ms = store.writer.end.physical_offset, store.writer.end.last_store_timestamp_ms
    remove(root, "spark")
    queue = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    units = bytearray(queue.read_bytes())
    units[200:220] = (end + 500).to_bytes(8, "big") + (100).to_bytes(4, "big") + bytes(8)  # unit 10: behind the end
    queue.write_bytes(units)
    found = store_checkpoint.read(disk, paths.checkpoint)
    brokers = replace(found, physic_timestamp_ms=last_ms, confirm_physical_offset=0)
    store_checkpoint.write(disk, paths.checkpoint, brokers, via=str(root / "new"))
    with MessageStore.open(root, SMALL) as store:
        assert len(read_all(store)) == 10
        assert store.put_message(Message("t", b"new", queue_id=0)).queue_offset == 10
