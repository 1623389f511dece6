"""Queue files of a closed store that are damaged, short, missing or older than the log."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from messagestore import BatchRequest, CorruptionError, Message, MessageColumns, MessageStore, StoreConfig
from messagestore.files.consume_queue import UNIT_DTYPE, unit_bytes
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify
from messagestore.log.log_end import Anchor
from messagestore.log.sealed_ends import SealedEnds
from messagestore.session import attached_store
from small import SMALL

CONFIG = SMALL.replace(mapped_file_size_consume_queue=20 * 16)
FIRST, SECOND = "00000000000000000000", "00000000000000000320"


def write(root: Path, versions: range, config: StoreConfig = CONFIG) -> None:
    """Batches of twelve rows over the queues 0 to 2 of topic t, and a put into each of two queues."""
    with MessageStore.open(root, config) as store:
        for version in versions:
            rows = MessageColumns(
                topic="t",
                queue_id=np.arange(12, dtype=np.int32) % 3,
                body=pa.array([b"%d/%d" % (version, row) for row in range(12)], pa.binary()),
            )
            request = BatchRequest("app", version, version_source="spark", query_id="q")
            assert store.append_batch(rows, request).status == "appended"
            for queue_id in range(2):
                store.put_message(Message("p", b"put %d" % version, queue_id))


def bodies(root: Path) -> list[bytes]:
    """All messages, of all queues; each queue's numbers follow one another."""
    found = []
    with MessageStore.open_read_only(root) as store:
        for topic, queue_ids in store.topics().items():
            for queue_id in queue_ids if not topic.startswith("rmq_sys") else ():
                start, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
                read = [row for part in store.read(topic, queue_id, start, columns=("body",)) for row in part.column(0)]
                assert len(read) == end - start
                found += [row.as_py() for row in read]
    return sorted(found)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A closed store, and beside it the folder of its queues as it was two sessions before."""
    root = tmp_path / "store"
    write(root, range(3))
    shutil.copytree(root / "consumequeue", tmp_path / "older")
    write(root, range(3, 6))
    write(root, range(6, 8))
    return root


def older(root: Path, *parts: str) -> None:
    """Put an older copy back."""
    path, copy = root.joinpath("consumequeue", *parts), root.parent.joinpath("older", *parts)
    if path.is_dir():
        shutil.rmtree(path)
        shutil.copytree(copy, path)
    else:
        shutil.copy2(copy, path)


def zero(path: Path, start: int = 0, end: int = 320) -> None:
    data = bytearray(path.read_bytes())
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def flip(path: Path, unit: int, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[unit * 20 + byte] ^= 1 << bit
    path.write_bytes(data)


QUEUE = "consumequeue/t/0"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "the newest file deleted": lambda root: (root / QUEUE / SECOND).unlink(),
    "the first file deleted": lambda root: (root / QUEUE / FIRST).unlink(),
    "the queue deleted": lambda root: shutil.rmtree(root / QUEUE),
    "the topic deleted": lambda root: shutil.rmtree(root / "consumequeue/t"),
    "all queues deleted": lambda root: shutil.rmtree(root / "consumequeue"),
    "the newest file zeroed": lambda root: zero(root / QUEUE / SECOND),
    "its end zeroed": lambda root: zero(root / QUEUE / SECOND, 100),
    "its last unit zeroed": lambda root: zero(root / QUEUE / SECOND, 300),
    "the first file zeroed": lambda root: zero(root / QUEUE / FIRST),
    "a unit in the middle zeroed": lambda root: zero(root / QUEUE / FIRST, 60, 80),
    "the newest file empty": lambda root: (root / QUEUE / SECOND).write_bytes(b""),
    "the newest file cut": lambda root: (root / QUEUE / SECOND).write_bytes((root / QUEUE / SECOND).read_bytes()[:50]),
    "the first file cut": lambda root: (root / QUEUE / FIRST).write_bytes((root / QUEUE / FIRST).read_bytes()[:50]),
    "an older queue": lambda root: older(root, "t", "0"),
    "an older topic": lambda root: older(root, "t"),
    "older queues": older,
    "a flipped bit in the last unit": lambda root: flip(root / QUEUE / SECOND, 15, 7, 0),
    "the sign of a unit's size": lambda root: flip(root / QUEUE / FIRST, 5, 8, 7),
    "the sign of a unit's offset": lambda root: flip(root / QUEUE / FIRST, 0, 0, 7),
    "a low bit of a unit's offset": lambda root: flip(root / QUEUE / SECOND, 5, 7, 1),
    "the queue of batches deleted": lambda root: shutil.rmtree(root / "consumequeue/rmq_sys_spark_sink"),
    "the queue of batches zeroed": lambda root: zero(root / "consumequeue/rmq_sys_spark_sink/0" / FIRST),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_recover_makes_damaged_queues_again(closed: Path, name: str) -> None:
    """`recover` puts every queue right, and says so."""
    before = bodies(closed)
    DAMAGE[name](closed)
    with MessageStore.open(closed, CONFIG) as store:
        line = store.check_queues()
        assert store.report is not None
        assert line or store.report.rebuilt
    assert bodies(closed) == before
    assert verify(closed).ok
    with MessageStore.open(closed, CONFIG) as store:  # and that is all
        assert store.check_queues() is None
        assert store.report is not None
        assert (store.report.reason, store.report.rebuilt) == ("clean", None)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_writer_numbers_on_from_the_true_end(closed: Path, name: str) -> None:
    """No queue offset is given out twice, and no acknowledged message is left out of its queue."""
    before = bodies(closed)
    DAMAGE[name](closed)
    with MessageStore.open(closed, CONFIG) as store:
        assert [store.put_message(Message("t", b"new", queue_id)).queue_offset for queue_id in range(3)] == [32] * 3
        assert store.put_message(Message("p", b"new", 0)).queue_offset == 8
    with MessageStore.open(closed, CONFIG) as store:
        store.check_queues()
    assert bodies(closed) == sorted([*before, *[b"new"] * 4])
    assert verify(closed).ok


@pytest.mark.parametrize("name", DAMAGE)
def test_a_reader_of_a_closed_store_never_shows_fewer_messages(closed: Path, name: str) -> None:
    """All of them, or an error that says what to do."""
    before = bodies(closed)
    DAMAGE[name](closed)
    if "batches" in name:
        assert bodies(closed) == before
        return
    with pytest.raises(CorruptionError):
        bodies(closed)


def test_a_writer_says_which_queues_it_made_again(closed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line for all of them, with the first fault."""
    older(closed)
    with caplog.at_level(logging.WARNING, "messagestore"), MessageStore.open(closed, CONFIG) as store:
        store.put_message(Message("t", b"new", 1))
        store.put_message(Message("p", b"new", 1))
    lines = [record.getMessage() for record in caplog.records if "rebuilt from the log" in record.getMessage()]
    assert len(lines) == 1
    assert "t/0" in lines[0]


def test_a_file_that_lags_behind_the_clean_end_is_completed_from_the_log(closed: Path) -> None:
    """A writer was killed between `state` and `ends`: the records behind the last block tell the rest."""
    ends = closed / "spark/ends"
    full = SealedEnds.read(Disk(), str(ends), 1 << 60)
    before = bodies(closed)
    shutil.copytree(closed, closed.parent / "copy")
    write(closed, range(8, 9))
    shutil.copy2(closed.parent / "copy/spark/ends", ends)
    zero(closed / QUEUE / "00000000000000000640", 20, 80)
    assert full.seals["t", 0].end == 32
    with pytest.raises(CorruptionError, match="36 units of t/0"):
        bodies(closed)
    with MessageStore.open(closed, CONFIG) as store:
        assert store.put_message(Message("t", b"new", 0)).queue_offset == 36
    assert len(bodies(closed)) == len(before) + 12 + 2 + 1


def test_a_damaged_or_foreign_file_counts_as_unknown(closed: Path) -> None:
    """The seals are no truth of their own: what is not proven to be of this log says nothing."""
    before, ends = bodies(closed), closed / "spark/ends"
    data = ends.read_bytes()
    other = closed.parent / "other"
    write(other, range(9))
    for content in (b"", b"x" * 100, data[:71], bytes(len(data)), (other / "spark/ends").read_bytes()):
        ends.write_bytes(content)
        assert bodies(closed) == before
        with MessageStore.open(closed, CONFIG) as store:
            assert store.check_queues() is None
        assert SealedEnds.read(Disk(), str(ends), 1 << 60).seals["t", 0].end == 32
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 16
        ends.write_bytes(changed)
        assert bodies(closed) == before


def test_recover_compares_queues_that_are_not_sealed_with_the_log(closed: Path) -> None:
    """A store of a release that wrote no `ends`."""
    before = bodies(closed)
    (closed / "spark/ends").unlink()
    older(closed, "t", "1")
    with MessageStore.open(closed, CONFIG) as store:
        line = store.check_queues()
    assert line is not None
    assert "t/1" in line
    assert bodies(closed) == before


@pytest.mark.parametrize("also", ["spark/ends", "checkpoint"])
@pytest.mark.parametrize("name", ["an older queue", "an older topic", "the newest file deleted", "its end zeroed"])
def test_a_writer_numbers_on_from_the_true_end_without_the_file_that_says_it(
    closed: Path, name: str, also: str
) -> None:
    """The queue is damaged, and so is what says where it ended, or who wrote last: the log's newest segment tells."""
    expected = bodies(closed)
    (closed / also).unlink()
    DAMAGE[name](closed)
    with MessageStore.open(closed, CONFIG) as store:
        for queue_id in range(3):
            assert store.put_message(Message("t", b"next", queue_id)).queue_offset == 8 * 4
    assert bodies(closed) == sorted([*expected, b"next", b"next", b"next"])
    assert verify(closed).ok


def test_who_opens_the_store_makes_a_queue_again_whose_folder_and_seal_are_lost(closed: Path) -> None:
    """The journal names the queues that had messages. Until they are there, they would seem to have none."""
    expected = bodies(closed)
    (closed / "spark" / "ends").unlink()
    shutil.rmtree(closed / QUEUE)
    with MessageStore.open(closed, CONFIG) as store:
        assert "rebuilt from the log" in str(store.report)
    assert bodies(closed) == expected


def test_the_file_grows_with_the_queues_that_are_touched(tmp_path: Path) -> None:
    """A change of the clean end costs what it touches; now and then the file is written anew."""
    disk, path, via = Disk(), str(tmp_path / "ends"), str(tmp_path / "new-ends")
    ends = SealedEnds()
    unit = np.zeros(1, UNIT_DTYPE)
    unit["size"] = 100
    for queue_id in range(2000):
        ends.extend(("many", queue_id), 0, unit_bytes(unit))
    ends.write(disk, path, via, 1, Anchor(0, 1, 0))
    size = disk.size(path)
    assert size > 2000 * 48
    for number in range(1, 3000):
        ends.extend(("many", 7), number, unit_bytes(unit))
        ends.write(disk, path, via, number + 1, Anchor(0, 1, 0))
        if number == 1:
            assert disk.size(path) - size == 72 + 48 + len(b'["many"]')
        if number % 500 == 0:
            assert disk.size(path) < 3.5 * size
            assert SealedEnds.read(disk, path, 1 << 60).seals == ends.seals
            assert SealedEnds.read(disk, path, number).clean_end <= number
    assert ends.seals["many", 7].end == 3000


def test_the_file_byte_by_byte(tmp_path: Path) -> None:
    """As FORMAT.md has it, packed a second time."""
    disk, path = Disk(), str(tmp_path / "ends")
    ends = SealedEnds()
    units = np.zeros(2, UNIT_DTYPE)
    units["physical_offset"], units["size"], units["tags_code"] = [100, 300], [200, 150], [-1, 7]
    ends.extend(("t", 3), 0, unit_bytes(units))
    ends.write(disk, path, str(tmp_path / "new-ends"), 450, Anchor(300, 150, 9))
    bytes_of_units = struct.pack(">qiqqiq", 100, 200, -1, 300, 150, 7)
    body = struct.pack(">qqqqiiiI", 2, 300, 7, 0, 150, 0, 3, zlib.crc32(bytes_of_units)) + b'["t"]'
    head = struct.pack(">8siIqqiIqqIq", b"MSQENDS1", 1, 0, 450, 300, 150, 9, 1, 5, zlib.crc32(body), 0)
    assert Path(path).read_bytes() == head + struct.pack(">I", zlib.crc32(head)) + body


def test_a_torn_block_counts_for_nothing(tmp_path: Path) -> None:
    """Whatever an append that died has left, the blocks before it count, and the next one takes its place."""
    disk, path, via = Disk(), str(tmp_path / "ends"), str(tmp_path / "new-ends")
    unit = np.zeros(1, UNIT_DTYPE)
    unit["size"] = 100
    ends = SealedEnds()
    ends.extend(("t", 0), 0, unit_bytes(unit))
    ends.write(disk, path, via, 1, Anchor(0, 1, 0))
    whole = disk.size(path)
    ends.extend(("t", 0), 1, unit_bytes(unit))
    ends.write(disk, path, via, 2, Anchor(0, 1, 0))
    data = Path(path).read_bytes()
    for size in range(whole, len(data)):
        Path(path).write_bytes(data[:size] + bytes(len(data) - size))
        found = SealedEnds.read(disk, path, 9)
        torn = data[:size] + bytes(len(data) - size) != data
        assert (found.clean_end, found.seals["t", 0].end) == ((1, 1) if torn else (2, 2))
        if torn and size % 16 == 0:
            found.extend(("u", 0), 0, unit_bytes(unit))
            found.write(disk, path, via, 3, Anchor(0, 1, 0))
            again = SealedEnds.read(disk, path, 9)
            assert (again.clean_end, again.seals) == (3, found.seals)


def test_processes_that_take_turns_know_each_others_ends(tmp_path: Path) -> None:
    """What another process appended is asked of the queue files when the clean end moves."""
    root = tmp_path / "store"
    write(root, range(1))
    attached = attached_store(root, CONFIG.replace(attach_timeout="60s"))
    with attached.writing("first") as writer:
        writer.numbers.next_offset("t", 0)
    child = multiprocessing.get_context("fork").Process(target=write, args=(root, range(1, 4)))
    child.start()
    child.join()
    assert child.exitcode == 0
    with attached.writing("second") as writer:
        assert writer.numbers.next_offset("t", 0) == 16
        assert writer.numbers.next_offset("p", 1) == 4
        writer.clean_end.move()
    attached.detach()
    seals = SealedEnds.read(Disk(), str(root / "spark/ends"), 1 << 60).seals
    assert (seals["t", 0].end, seals["p", 1].end, seals["rmq_sys_spark_sink", 0].end) == (16, 4, 4)
