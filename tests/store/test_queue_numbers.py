"""Queues whose units have other numbers than their records say: a broker makes them when a crash brings a deleted topic
back. What RocketMQ shows of them is shown, whichever way they are read, and writers go on behind it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from random import Random

import pytest

from crash.harness import die
from crash.imitate import Broker, overwrite, units, walk
from crash.renumbered import shown
from crash.surprises import Stream
from messagestore import BatchRequest, CorruptionError, MagicError, Message, MessageStore
from messagestore.files.disk import Disk
from messagestore.files.state import StateFile
from messagestore.inspect.verify import verify
from messagestore.read.queue_ends import QueueEnds
from messagestore.read.view import StoreView
from small import SMALL, columns

FIRST = [b"a0", b"a1", b"a2", b"a3", b"a4"]
SHOWN = [*FIRST, b"b0", b"c"]
"""The first life of the topic, the first message of the second one, and what was put behind them."""


def brought_back(root: Path, *, closes: bool) -> None:
    """A topic lived twice and was deleted twice; the broker was killed, and its recovery brought both lives back."""
    root.mkdir()
    broker = Broker(root, SMALL)
    for body in FIRST:
        broker.put("t", body)
        broker.put("u", b"other")
    broker.delete_topic("t")
    for body in (b"b0", b"b1", b"b2"):
        broker.put("t", body)
    broker.delete_topic("t")
    broker = Broker(root, SMALL)
    broker.recover()
    broker.put("t", b"c")
    if closes:
        broker.close()


@pytest.fixture(params=[True, False], ids=["closed", "killed"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    brought_back(tmp_path / "store", closes=request.param)
    return tmp_path / "store"


def bodies(store: MessageStore) -> list[bytes]:
    faults: list[str] = []
    found = shown(store, faults.append)["t", 0]
    assert faults == []
    return found


def is_own(root: Path) -> bool:
    state = StateFile(Disk(), str(root / "spark" / "state")).read()
    assert state is not None
    return state.own


def test_the_imitated_broker_does_as_the_real_one(root: Path) -> None:
    """Five units of the first life, `b0` of the second one; `b1` and `b2` repeat numbers."""
    numbers = {record["physical_offset"]: record["queue_offset"] for record in walk(root)[0]}
    assert [numbers[place] for place, _, _ in units(root, "t", 0)] == [0, 1, 2, 3, 4, 0, 6]


def test_a_reader_shows_what_a_broker_shows(root: Path) -> None:
    """`read` raised MagicError at the first message whose record says another number."""
    with MessageStore.open_read_only(root, SMALL) as store:
        assert bodies(store) == SHOWN
    report = verify(root, SMALL)
    assert report.ok, report.findings[:3]
    assert any("t/0: units whose number is not that of their record: 1 " in note for note in report.notes)
    assert any("t/0: records that repeat a number and are in no queue: 2 " in note for note in report.notes)


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_writer_goes_on_behind_them(root: Path, end: str) -> None:
    """Numbers go on behind the last unit, also after a kill of ours, and nothing of the queue moves."""
    before = units(root, "t", 0)
    store = MessageStore.open(root, SMALL)
    assert bodies(store) == SHOWN
    assert store.put_message(Message("t", b"ours", queue_id=0)).queue_offset == 7
    store.append_batch(columns([b"batch"], topic="t"), BatchRequest("app", 0))
    if end == "closed":
        store.close()
    else:
        store.writer.publish()
        die(root)
    with MessageStore.open(root, SMALL) as store:
        assert bodies(store) == [*SHOWN, b"ours", b"batch"]
    assert units(root, "t", 0)[:7] == before
    report = verify(root, SMALL)
    assert report.ok, report.findings[:3]


@pytest.mark.parametrize("puts", [0, 1])
def test_the_only_topic_that_a_broker_deleted_comes_back_after_a_kill(tmp_path: Path, puts: int) -> None:
    """A killed writer and no queues looked like a folder that somebody had removed, so all queues were rebuilt."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.put_message(Message("t", b"deleted", queue_id=0))
    broker = Broker(tmp_path, SMALL)
    broker.delete_topic("t")
    broker.close()
    (tmp_path / "config" / "topics.json").write_text('{"dataVersion":{},"topicConfigTable":{}}')
    with MessageStore.open(tmp_path, SMALL) as store:
        for _ in range(puts):
            store.put_message(Message("u", b"new", queue_id=0))
        store.flush()
        die(tmp_path)
    if puts:
        shutil.rmtree(tmp_path / "consumequeue" / "u")  # what was put since is proven by the log
    with MessageStore.open(tmp_path, SMALL) as store:
        assert shown(store, pytest.fail) == ({("u", 0): [b"new"]} if puts else {})
        assert store.topics() == ({"u": [0]} if puts else {})
    assert verify(tmp_path, SMALL).ok


def test_a_broker_that_dies_with_its_queues_behind(root: Path) -> None:
    """Records that have no unit yet get the next ones, and the queue is not made again from the log."""
    broker = Broker(root, SMALL)
    broker.recover()
    broker.put("t", b"behind", unit=False)
    before = units(root, "t", 0)
    with MessageStore.open(root, SMALL) as store:
        assert bodies(store) == [*SHOWN, b"behind"]
    assert units(root, "t", 0)[:7] == before


def test_recovery_that_starts_late_in_the_log_keeps_them(tmp_path: Path) -> None:
    """The walk begins behind the messages that were brought back, and its first record has no unit."""
    root = tmp_path / "store"
    brought_back(root, closes=False)
    broker = Broker(root, SMALL)
    broker.recover()
    for _ in range(20):
        broker.now_ms += 10_000
        broker.put("u", b"x" * 2000)
    broker.checkpoint()
    broker.put("t", b"late", unit=False)
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert store.report.start > units(root, "t", 0)[6][0]
        assert bodies(store) == [*SHOWN, b"late"]
    assert verify(root, SMALL).ok


def test_a_stream_reads_them_once_and_goes_on(root: Path) -> None:
    """Spark's source raised MagicError; its offsets count units."""
    with MessageStore.open(root, SMALL):
        pass
    stream, chance = Stream(root, lenient=False), Random(1)

    def read() -> None:
        while stream.step(lambda: None, chance):
            pass

    read()
    for version in range(3):
        with MessageStore.open(root, SMALL) as store:
            store.put_message(Message("t", b"put%d" % version, queue_id=0))
            store.append_batch(columns([b"row%d" % version], topic="t"), BatchRequest("app", version))
        stream.restart()
        read()
    there = [body for body in stream.delivered if body != b"other"]
    assert there == [*SHOWN, *(b"%s%d" % (what, n) for n in range(3) for what in (b"put", b"row"))]


def test_the_ends_of_many_queues_are_asked_where_numbers_jump(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that does not follow is no end of a queue where a broker was at work."""
    monkeypatch.setattr("messagestore.read.queue_ends.FEW_QUEUES", 0)
    with MessageStore.open(root, SMALL):
        pass
    view = StoreView(root, SMALL)
    ends = QueueEnds(view, ["t", "u"])
    assert ends.look()["t", 0] == 7
    broker = Broker(root, SMALL)
    broker.recover()
    broker.delete_topic("t")
    broker.put("t", b"d0")
    broker.delete_topic("t")
    broker.recover()
    broker.close()
    with MessageStore.open(root, SMALL) as store:
        wanted = store.max_offset("t", 0)
    assert wanted == 8
    view.refresh()
    assert ends.look()["t", 0] == wanted
    assert not ends.restarts
    view.close()


def test_what_only_we_wrote_is_checked_strictly(tmp_path: Path) -> None:
    """A number that a record of ours does not have is damage, for every way of reading, before and after it is closed."""
    root = tmp_path / "store"
    store = MessageStore.open(root, SMALL)
    places = [store.put_message(Message("t", b"%d/" % n, queue_id=0)).physical_offset for n in range(5)]
    store.close()
    for _ in range(2):  # opened and closed again without messages, too
        MessageStore.open(root, SMALL).close()
    assert is_own(root)
    overwrite(root, places[2] + 20, (77).to_bytes(8, "big"))
    assert not verify(root, SMALL).ok
    with MessageStore.open_read_only(root, SMALL) as view:
        with pytest.raises(MagicError, match="message 77"):
            list(view.read("t", 0, 0))
        with pytest.raises(MagicError, match="message 77"):
            view.get_message("t", 0, 0)


@pytest.mark.parametrize("kind", ["killed", "closed", "deletes"])
def test_a_store_remembers_that_a_broker_was_there(tmp_path: Path, kind: str) -> None:
    """Whatever tells of the broker is gone after the next session of ours; a later one must still know."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"0", queue_id=0))
        store.put_message(Message("u", b"0", queue_id=0))
    assert is_own(root)
    if kind == "deletes":  # and nothing else: its checkpoint stays as it was
        shutil.rmtree(root / "consumequeue" / "u")
        (root / "config" / "topics.json").unlink(missing_ok=True)
    else:
        broker = Broker(root, SMALL)
        broker.put("t", b"1")
        if kind == "closed":
            broker.close()
    for number in range(2):
        with MessageStore.open(root, SMALL) as store:
            assert not is_own(root)
            store.put_message(Message("t", b"ours%d" % number, queue_id=0))
    assert not is_own(root)


def test_an_empty_store_that_is_opened_again_is_ours(tmp_path: Path) -> None:
    """No message was ever put, so there is no journal that could say whether a broker was there."""
    root = tmp_path / "store"
    for _ in range(3):
        MessageStore.open(root, SMALL).close()
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"0", queue_id=0))
    assert is_own(root)


def test_a_unit_that_points_back_is_damage_in_a_broker_s_store_too(root: Path) -> None:
    """Numbers may differ, the order of the log may not: no message is shown twice."""
    place, size, tags_code = units(root, "t", 0)[1]
    Broker(root, SMALL, starts=False).unit("t", 0, 4, place, size, tags_code)
    with MessageStore.open_read_only(root, SMALL) as store, pytest.raises(CorruptionError):
        list(store.read("t", 0, 0))
    assert not verify(root, SMALL).ok


def test_a_part_of_a_deleted_topic_that_came_back_is_no_fault(tmp_path: Path) -> None:
    """A broker's recovery that starts late in the log brings back the last records only: the queue begins with them."""
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, SMALL)
    places = [broker.put("t", b"%d/" % number) for number in range(5)]
    broker.put("u", b"other")
    broker.delete_topic("t")
    for number in (3, 4):
        broker.unit("t", 0, number, places[number], places[1] - places[0])
    with open(root / "consumequeue" / "t" / "0" / f"{0:020d}", "r+b") as file:
        file.write(struct.pack(">qiq", 0, 0x7FFFFFFF, 0) * 3)  # what RocketMQ fills such a queue with
    broker.close()
    report = verify(root, SMALL)
    assert report.ok, report.findings[:2]
    with MessageStore.open_read_only(root, SMALL) as store:
        assert [(m.queue_offset, m.body) for m in store.get_message("t", 0, 3).messages] == [(3, b"3/"), (4, b"4/")]
