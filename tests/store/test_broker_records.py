"""A broker's log is taken over whole: whatever its records are, and whichever derived files are gone. (The real broker's are
in tests/interop/test_broker_logs.py.)"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path

import pytest

from crash.broker_logs import (
    FILLS,
    LONG,
    MISSING,
    PREPARED,
    faults_of,
    last_runs,
    left_by_a_broker,
    light_queues_behind,
    long_topics,
    torn_in_a_name,
)
from crash.harness import die
from crash.imitate import Broker, flip, overwrite, seen, units, walk
from crash.simdisk import KillDisk, Killed
from messagestore import CorruptionError, Message, MessageStore, StorePoisonedError
from messagestore.inspect.verify import verify
from small import SMALL


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("fill", FILLS)
def test_no_record_of_a_broker_is_cut(root: Path, fill: str, closes: bool, missing: str) -> None:
    """Topics of 200 bytes, a topic that was made again twice, PREPARED and ROLLBACK: all of it stays, each queue holds its
    last run, and what is put next follows."""
    records = left_by_a_broker(root, FILLS[fill], closes=closes, missing=MISSING[missing])
    assert list(faults_of(root, records)) == []
    topic, queue_id = records[0]["topic"], records[0]["queue_id"]
    if topic != LONG:
        expected = len(last_runs(records)[(topic, queue_id)])
        with MessageStore.open(root, SMALL) as store:
            assert store.put_message(Message(topic, b"ours", queue_id=queue_id)).queue_offset == expected
    report = verify(root, SMALL)
    assert report.ok, report.findings[:3]


def test_queues_below_the_start_of_the_walk_are_made_again(root: Path) -> None:
    """A broker was killed, its checkpoint lets recovery start late in the log, and all queues are gone: topics whose records
    lie below that start come back, too."""
    broker = Broker(root, SMALL)
    for number in range(20):
        broker.now_ms += 10_000
        broker.put("early", b"e%d/" % number + b"x" * 900)
    for number in range(40):
        broker.now_ms += 10_000
        broker.put("late", b"l%d/" % number + b"x" * 900)
    broker.checkpoint(broker.now_ms - 5000)
    shutil.rmtree(root / "consumequeue")
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert store.report.start > 0
        assert any("rebuilt" in note for note in store.report.notes)
        assert store.max_offset("early", 0) == 20
        assert store.max_offset("late", 0) == 40
    report = verify(root, SMALL)
    assert report.ok, report.findings[:3]


def test_a_queue_that_is_gone_is_made_again_from_the_first_segment(root: Path) -> None:
    """The same with one queue's folder gone; its last run only, where its topic had been made again."""
    broker = Broker(root, SMALL)
    for run in range(2):
        for number in range(12):
            broker.now_ms += 10_000
            broker.put("t", b"%d-%d/" % (run, number) + b"x" * 900)
            broker.put("u", b"u%d-%d/" % (run, number) + b"x" * 900)
        if not run:
            broker.delete_topic("t")
    broker.checkpoint(broker.now_ms - 5000)
    broker.put("t", b"last/")
    shutil.rmtree(root / "consumequeue" / "t" / "0")
    records = walk(root)[0]
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert store.report.start > 0
    assert seen(root, SMALL) == last_runs(records)
    assert verify(root, SMALL).ok


def lost_topic(root: Path, *, named: bool, closes: bool = True) -> list[dict]:
    """A broker's store of several segments whose topic `t` has lost its folder; its records."""
    broker = Broker(root, SMALL)
    for number in range(40):
        broker.now_ms += 10_000
        broker.put("t", b"%d/" % number + b"x" * 700, number % 2)
        broker.put("u", b"u%d/" % number)
    if closes:
        broker.close()
    (root / "config").mkdir(exist_ok=True)
    table = {name: {"topicName": name, "writeQueueNums": 2} for name in ("t", "u", "never-used")[not named :]}
    (root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": table}))
    shutil.rmtree(root / "consumequeue" / "t")
    return walk(root)[0]


def notes(store: MessageStore) -> list[str]:
    """What recovery said of queues; the imitated broker has no index."""
    assert store.report is not None
    return [note for note in store.report.notes if not note.startswith("index:")]


def test_a_named_topic_of_a_broker_that_lost_its_folder_is_made_again(root: Path) -> None:
    """`topics.json` names the topic, so nobody deleted it: it opened as one without messages, and nothing was said."""
    records = lost_topic(root, named=True)
    assert not verify(root, SMALL).ok
    with MessageStore.open(root, SMALL) as store:
        assert notes(store) == ["t/0, t/1: the queues' folders were missing and were rebuilt from the log"]
        assert store.put_message(Message("t", b"next", queue_id=0)).queue_offset == 20
    assert seen(root, SMALL) == last_runs(walk(root)[0])
    assert walk(root)[0][:-1] == records
    assert verify(root, SMALL).ok


def test_a_topic_that_a_broker_deleted_stays_deleted(root: Path) -> None:
    """A broker takes a topic's name away before its folder."""
    lost_topic(root, named=False)
    with MessageStore.open(root, SMALL) as store:
        assert notes(store) == []
        assert store.topics() == {"u": [0]}


def test_a_log_that_is_too_long_to_search_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done then makes the queues again."""
    monkeypatch.setattr("messagestore.recovery.apply.LOOKED_THROUGH_SIZE", 1000)
    records = lost_topic(root, named=True)
    with MessageStore.open(root, SMALL) as store:
        (note,) = notes(store)
        assert note.startswith("topics.json names topics without a folder in consumequeue: never-used, t.")
    shutil.rmtree(root / "consumequeue")
    with MessageStore.open(root, SMALL):
        pass
    assert seen(root, SMALL) == last_runs(records)


def test_making_a_lost_topic_again_may_be_killed(root: Path, tmp_path: Path) -> None:
    """At each operation: whoever opens the store next makes the queues again, whole."""
    records = lost_topic(root, named=True)
    assert opened_after_a_kill_at_every(root, tmp_path / "copy", last_runs(records), step=3) > 30


def test_a_deleted_index_of_a_broker_is_made_again(root: Path) -> None:
    """Closed, and the folder `index` removed: what verify advises is true."""
    broker = Broker(root, SMALL)
    for number in range(30):
        broker.put("t", b"%d/" % number, properties=[("KEYS", f"k{number}")])
    broker.put("t", b"half/", sys_flag=PREPARED, properties=[("KEYS", "half")])
    broker.close()
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert store.report.notes == ["index: the files were missing and were rebuilt from the log"]
    assert (root / "index").is_dir()
    report = verify(root, SMALL)
    assert (report.ok, report.key_count) == (True, 31)
    with MessageStore.open_read_only(root, SMALL) as store:
        assert [m.body for m in store.query_message("t", "half")] == [b"half/"]


def test_a_rolled_back_message_is_not_found_by_its_key(root: Path) -> None:
    """A broker does not index it; nor is it found where no index file covers the log."""
    broker = Broker(root, SMALL)
    broker.put("t", b"first", sys_flag=0xC, properties=[("KEYS", "k")])
    for body, sys_flag in ((b"there", 0), (b"half", 0x4), (b"gone", 0xC), (b"done", 0x8)):
        broker.put("t", body, sys_flag=sys_flag, properties=[("KEYS", "k")])
    with MessageStore.open_read_only(root, SMALL) as store:
        assert [m.body for m in store.query_message("t", "k")] == [b"there", b"half", b"done"]
    with MessageStore.open(root, SMALL) as store:
        assert [m.body for m in store.query_message("t", "k")] == [b"there", b"half", b"done"]
    assert verify(root, SMALL).ok


@pytest.mark.parametrize(("level", "delay_s"), [(1, 1), (18, 7200), (19, 7200), (1000, 7200)])
def test_a_delay_level_above_the_highest_is_the_highest(root: Path, level: int, delay_s: int) -> None:
    """A unit that is made again says the time at which a broker sends the message."""
    broker = Broker(root, SMALL)
    broker.put("SCHEDULE_TOPIC_XXXX", b"later", 17, properties=[("DELAY", str(level))])
    shutil.rmtree(root / "consumequeue")
    with MessageStore.open(root, SMALL) as store:
        (message,) = store.get_message("SCHEDULE_TOPIC_XXXX", 17, 0).messages
        (unit,) = store.view.units("SCHEDULE_TOPIC_XXXX", 17, 0, 1)
    assert int(unit["tags_code"]) == message.store_timestamp_ms + 1000 * delay_s


def opened_after_a_kill_at_every(root: Path, copy: Path, queues: dict[tuple[str, int], list[str]], *, step: int) -> int:
    """A recovery of a copy dies at every `step`-th operation, and the next one makes the queues whole; how many there are."""
    at = 0
    while True:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        disk = KillDisk(at)
        with contextlib.suppress(Killed, StorePoisonedError):
            MessageStore.open(copy, SMALL, disk=disk)
        die(copy)
        with MessageStore.open(copy, SMALL):
            pass
        assert seen(copy, SMALL) == queues, disk.killed_in
        assert not (copy / "spark" / "rebuild").exists()
        if not disk.dead:
            return at
        at += step


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "killed"])
def test_a_rebuild_that_is_killed_begins_anew(root: Path, tmp_path: Path, closes: bool) -> None:
    """All queues of several segments are made again, and the process dies at each operation: whoever opens the store next
    makes all of them, and nobody takes a part for the whole."""

    def fill(broker: Broker) -> None:
        for number in range(60):
            broker.now_ms += 10_000
            broker.put(f"t{number // 20}", b"%d/" % number + b"x" * 700, number % 2)

    records = left_by_a_broker(root, fill, closes=closes, missing=("consumequeue",))
    if not closes:
        newest = records[-1]["store_timestamp_ms"]
        Broker(root, SMALL).checkpoint(newest - 5000)
    assert opened_after_a_kill_at_every(root, tmp_path / "copy", last_runs(records), step=7) > 50


def damaged(folder: Path, how: str) -> None:
    """A queue of 20 messages, in two files of which the second one holds the last three units."""
    first, second = sorted(folder.iterdir())
    if how == "all zeros":
        for path in (first, second):
            path.write_bytes(bytes(path.stat().st_size))
    elif how == "older":
        second.unlink()
        first.write_bytes(first.read_bytes()[:100].ljust(first.stat().st_size, b"\0"))
    elif how == "the newest file":
        second.unlink()
    else:
        number = int(how)
        path, at = (first, number) if number < 17 else (second, number - 17)
        content = bytearray(path.read_bytes())
        content[20 * at : 20 * at + 20] = bytes(20)
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["all zeros", "older", "the newest file", "0", "5", "17", "19"])
def test_a_damaged_queue_of_a_store_that_a_broker_closed_is_made_again(root: Path, tmp_path: Path, how: str) -> None:
    """The next put took the number of the first unit that was not sound, and all messages behind it were in no queue."""

    def fill(broker: Broker) -> None:
        for number in range(20):
            broker.now_ms += 1000
            broker.put("t", b"%d/" % number)
            broker.put("u", b"u%d/" % number)

    records = left_by_a_broker(root, fill, closes=True)
    damaged(root / "consumequeue" / "t" / "0", how)
    if how in ("5", "older"):
        assert opened_after_a_kill_at_every(root, tmp_path / "copy", last_runs(records), step=5) > 50
    with MessageStore.open(root, SMALL) as store:
        assert store.report is not None
        assert any("units were missing and were rebuilt from the log" in note for note in store.report.notes), (
            store.report
        )
        assert seen(root, SMALL) == last_runs(records)
        assert store.put_message(Message("t", b"ours", queue_id=0)).queue_offset == 20
        assert store.put_message(Message("u", b"ours", queue_id=0)).queue_offset == 20
    assert verify(root, SMALL).ok


def test_a_damaged_record_of_a_closed_log_is_named_not_cut(root: Path) -> None:
    """The queues, which would tell where the log ends, are gone, and a record in the middle is damaged: nothing in a log
    that was closed is torn."""
    records = left_by_a_broker(root, long_topics, closes=True, missing=("consumequeue",))
    flip(root, records[4]["physical_offset"] + 90)
    before = walk(root)
    with pytest.raises(CorruptionError, match="the store was closed") as error:
        MessageStore.open(root, SMALL)
    assert error.value.physical_offset == records[4]["physical_offset"]
    assert walk(root) == before
    assert not (root / "consumequeue").exists()


def test_a_damaged_number_in_our_own_log_is_damage(tmp_path: Path) -> None:
    """Behind the clean end the numbers of our own records follow one another: one that does not is named, and neither it
    nor what follows is cut."""
    root = tmp_path / "store"
    store = MessageStore.open(root, SMALL)
    places = [store.put_message(Message("t", b"%d/" % n, queue_id=0)).physical_offset for n in range(5)]
    die(root)
    overwrite(root, places[2] + 20, (77).to_bytes(8, "big"))
    with pytest.raises(CorruptionError, match="queue offset 2 of t/0") as error:
        MessageStore.open(root, SMALL)
    assert error.value.physical_offset == places[2]


def test_a_damaged_number_in_a_broker_s_log_costs_no_message(root: Path) -> None:
    """RocketMQ gives such a record the next unit and shows it there; those that follow are where they were."""
    broker = Broker(root, SMALL)
    places = [broker.put("t", b"%d/" % n) for n in range(6)]
    before = units(root, "t", 0)
    shutil.rmtree(root / "consumequeue")
    overwrite(root, places[2] + 20, (77).to_bytes(8, "big"))
    with MessageStore.open(root, SMALL) as store:
        assert [m.body for m in store.get_message("t", 0, 3).messages] == [b"3/", b"4/", b"5/"]
        assert [(m.queue_offset, m.body) for m in store.get_message("t", 0, 2, 1).messages] == [(2, b"2/")]
        (rows,) = store.read("t", 0, 0, columns=("queue_offset", "body"))
        assert rows.to_pylist() == [{"queue_offset": n, "body": b"%d/" % n} for n in range(6)]
    assert units(root, "t", 0) == before


def test_what_is_cut_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes, messages and queues, in one line of the report and of the log."""
    broker = Broker(root, SMALL)
    places = [broker.put("t", b"%d/" % n, n % 2) for n in range(9)]
    flip(root, places[4] + 89)
    with caplog.at_level(logging.WARNING), MessageStore.open(root, SMALL) as store:
        report = store.report
    assert report is not None
    assert (report.end, report.cut_messages, report.cut_queues) == (places[4], 5, 2)
    assert report.cut is not None
    where = f"{report.zeroed_bytes} bytes behind {places[4]}, where a record's body does not match its CRC"
    assert report.cut.startswith(f"{where}: 5 messages of 2 queues")
    assert [r.getMessage() for r in caplog.records] == [f"{root}: cut off {report.cut}"]


def test_a_record_torn_inside_its_topics_name_does_not_stop_the_store(tmp_path: Path) -> None:
    """The last record of a log, without properties, lost the end of its topic's name in a power cut: all lengths add up.
    It is cut and kept aside; a record like it in the middle, or in a log that was closed, is damage."""
    torn_in_a_name(tmp_path)


def test_light_queues_that_a_killed_broker_had_not_made_are_recognised(tmp_path: Path) -> None:
    """A writer opened the store, as no light queue had a folder."""
    light_queues_behind(tmp_path)
