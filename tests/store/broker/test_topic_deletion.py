"""Topics that are deleted: what goes, what stays, and who has them in mind."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from crash import deletions
from crash.harness import die
from messagestore import (
    ASYNC_FLUSH,
    BatchRequest,
    Message,
    MessageIllegalError,
    MessageStore,
    StoreConfig,
    StoreWentBackwardsError,
    UnknownTopicError,
)
from messagestore.batches.append import Chunks, append_batch
from messagestore.files.consumer_offsets import ConsumerOffsets, publish_offsets
from messagestore.files.disk import Disk
from messagestore.format.record_columns import encode
from messagestore.inspect.verify import verify
from messagestore.read import queue_records
from messagestore.read.view import StoreView
from messagestore.session import attached_store
from small import SMALL, ClockDisk, bodies, columns, filled, read_all


def offsets(root: Path, topic: str, group: str = "g") -> dict[int, int]:
    table = ConsumerOffsets(Disk(), str(root))
    table.load()
    return table.get(topic, group)


def test_a_topic_goes_with_queues_settings_and_progress(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 12)
    with MessageStore.open(root, SMALL) as store, MessageStore.open_read_only(root, SMALL) as reader:
        store.put_message(Message("u", b"x", queue_id=0))
        publish_offsets(str(root), "g", {("t", 0): 6, ("u", 0): 1})
        end = store.writer.end
        assert reader.max_offset("t", 0) == 6
        gone = store.delete_topic("t")
        assert (gone.topics, gone.queue_count, gone.groups) == (("t",), 2, ("g",))
        assert store.topics() == reader.topics() == {"u": [0]}
        assert store.topic_config("t") is None
        assert (offsets(root, "t"), offsets(root, "u")) == ({}, {0: 1})
        assert store.writer.end == end, "nothing was appended"
        assert list(store.query_message("t", "k0")) == []
        first = store.look_message_by_offset(0)
        assert first is not None, "its records are in the log"
        assert first.topic == "t"
        assert store.put_message(Message("t", b"new", queue_id=0)).queue_offset == 0
        for one in (store, reader):
            assert [message.body for message in one.get_message("t", 0, 0).messages] == [b"new"]
            assert one.max_offset("t", 1) == 0
    report = verify(root, SMALL)
    assert report.findings == []
    with MessageStore.open(root, SMALL) as store:
        assert (store.report.rebuilt, store.check_queues()) == (None, None)
        assert read_all(store) == [b"new"]


def test_queues_whose_units_are_still_to_be_written_go_too(tmp_path: Path) -> None:
    """With ASYNC_FLUSH, the folder of a new queue comes a moment after its first put; the next put began in it."""
    with MessageStore.open(tmp_path / "s", StoreConfig(flush_disk_type=ASYNC_FLUSH)) as store:
        for number in range(20):
            for queue_id in range(3):
                store.put_message(Message("t", b"%d" % number, queue_id=queue_id))
            assert store.delete_topic("t").queue_count == 3
            assert store.topics().get("t") is None
            assert store.put_message(Message("t", b"again", queue_id=number % 3)).queue_offset == 0


def test_units_of_a_topic_that_was_made_again_while_it_was_read_are_no_damage(tmp_path: Path) -> None:
    """A file that was made again holds zeros where the old one had a unit."""
    root = filled(tmp_path / "s", 12)
    with MessageStore.open(root, SMALL) as store, closing(StoreView(str(root), SMALL)) as view:
        assert view.max_offset("t", 0) == 6
        zeros = np.zeros(1, np.int64)
        store.delete_topic("t")
        store.put_message(Message("t", b"new", queue_id=0))
        with pytest.raises(StoreWentBackwardsError, match=r"t/0: message 5 was visible.*ends at 1 now.*made again"):
            queue_records.check_units(view, "t", 0, np.array([5]), zeros, zeros.astype(np.int32))


@pytest.mark.parametrize(
    ("topic", "wanted"),
    [("SCHEDULE_TOPIC_XXXX", "reserved"), ("rmq_sys_x", "belong to the broker"), ("a b", "topic"), (3, "topic")],
)
def test_what_users_may_not_have_is_not_deleted(tmp_path: Path, topic: str, wanted: str) -> None:
    with (
        MessageStore.open(filled(tmp_path / "s"), SMALL) as store,
        pytest.raises(MessageIllegalError, match=wanted),
    ):
        store.delete_topic(topic)


def test_a_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with MessageStore.open(filled(tmp_path / "s"), SMALL) as store:
        with pytest.raises(UnknownTopicError, match="Its topics are: t"):
            store.delete_topic("T")
        assert store.topics() == {"t": [0, 1]}


def test_a_topic_of_which_only_offsets_or_settings_are_left_can_be_deleted(tmp_path: Path) -> None:
    """A broker's tools leave offsets of topics that are gone; a topic may never have got a message."""
    root = filled(tmp_path / "s")
    publish_offsets(str(root), "g", {("gone", 0): 6})
    with MessageStore.open(root, SMALL) as store:
        store.create_topic("empty", 4)
        assert store.delete_topic("gone").queue_count == store.delete_topic("empty").queue_count == 0
        assert store.topic_config("empty") is None
    assert offsets(root, "gone") == {}


def test_retry_topics_of_consumers_that_pop_go_too(tmp_path: Path) -> None:
    root = filled(tmp_path / "s")
    publish_offsets(str(root), "g", {("t", 0): 1})
    with MessageStore.open(root, SMALL) as store:
        for name in ("%RETRY%g_t", "%RETRY%g", "%RETRY%h_t"):
            store.put_message(Message(name, b"x", queue_id=0))
        assert store.delete_topic("t").topics == ("t", "%RETRY%g_t")
        assert sorted(store.topics()) == ["%RETRY%g", "%RETRY%h_t"]


def test_messages_that_are_still_to_come_make_a_topic_with_all_its_queues(tmp_path: Path) -> None:
    """A half message that is committed, and a delayed one: producers may use queues from 0 to 7 as before."""
    disk = ClockDisk(1_700_000_000_000)
    with MessageStore.open(tmp_path / "store", SMALL, disk=disk) as store:
        half = store.half_message(Message("halves", b"half", queue_id=2), "producers")
        store.put_message(Message("delays", b"delayed", queue_id=2, delay_time_level=1))
        for topic in ("halves", "delays"):
            store.delete_topic(topic)
        half.commit()
        disk.now_ms += 1_000
        assert store.deliver_delayed().count == 1
        for topic in ("halves", "delays"):
            assert store.max_offset(topic, 2) == 1
            assert store.put_message(Message(topic, b"later", queue_id=7)).is_ok


def test_recovery_brings_no_deleted_topic_back(tmp_path: Path) -> None:
    """The clean end has moved above its records before its queues go, so that nobody dispatches them again."""
    root = filled(tmp_path / "s")
    with MessageStore.open(root, SMALL) as store:
        for number in range(9):
            store.put_message(Message("t", b"late %d" % number, queue_id=0))
        store.delete_topic("t")
        store.put_message(Message("u", b"x", queue_id=0))
        die(root)
    with MessageStore.open(root, SMALL) as store:
        assert store.topics() == {"u": [0]}
    assert verify(root, SMALL).findings == []


@pytest.mark.parametrize("made_again", [True, False])
def test_who_removes_consumequeue_gets_back_what_was_not_made_again(tmp_path: Path, made_again: bool) -> None:
    """As from a broker: only the queues said that they had been deleted. Where numbers begin again, the new ones count."""
    root = filled(tmp_path / "s", 4)
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("kept", b"x", queue_id=0))
        store.delete_topic("t")
        if made_again:
            store.put_message(Message("t", b"new", queue_id=0))
    (root / "consumequeue").rename(tmp_path / "away")
    with MessageStore.open(root, SMALL) as store:
        assert read_all(store) == ([b"new"] if made_again else bodies(4)[::2])
    assert verify(root, SMALL).findings == []


def test_a_delayed_message_makes_its_topic_again(tmp_path: Path) -> None:
    config = SMALL.replace(message_delay_level="1s")
    disk = ClockDisk(1_795_170_401_381)
    with MessageStore.open(tmp_path / "s", config, disk=disk) as store:
        store.put_message(Message("t", b"now", queue_id=0))
        store.put_message(Message("t", b"later", queue_id=0, delay_time_level=1))
        store.delete_topic("t")
        disk.now_ms += 1_500
        while store.deliver_delayed().count:
            pass
        assert read_all(store) == [b"later"]


def test_retention_takes_its_records(tmp_path: Path) -> None:
    root = tmp_path / "s"
    config = SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
    with MessageStore.open(root, config) as store:
        for number in range(20):
            store.put_message(Message("t", b"." * 500, queue_id=number % 2))
        store.flush()
        publish_offsets(str(root), "g", {("t", 0): 1})
        assert "has not read" in store.delete_expired_files(before_offset=1 << 40).kept
        store.delete_topic("t")
        for _ in range(9):
            store.put_message(Message("u", b"." * 500, queue_id=0))
        store.flush()
        assert len(store.delete_expired_files(before_offset=1 << 40).segments) >= 2
        assert store.min_offset("u", 0) <= 9
    assert verify(root, config).findings == []


def test_a_reader_that_follows_the_topic_is_told(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 12)
    with MessageStore.open(root, SMALL) as store, MessageStore.open_read_only(root, SMALL) as reader:
        follower = reader.follow("t", 0, 0, columns=["body"], timeout=30)
        assert next(follower).num_rows == 6
        store.delete_topic("t")
        for number in range(20):
            store.put_message(Message("t", b"new %d" % number, queue_id=0))
        with pytest.raises(StoreWentBackwardsError):
            next(follower)


OTHER = """
import sys
from messagestore import MessageStore, StoreConfig
with MessageStore.open(sys.argv[1], StoreConfig.load(sys.argv[2])) as store:
    store.delete_topic("t")
    if sys.argv[3] == "made again":
        store.create_topic("t", 2)
"""


@pytest.mark.parametrize("made", ["made again", "gone"])
def test_a_process_that_takes_turns_knows_of_the_deletion(tmp_path: Path, made: str) -> None:
    """It was attached all the time, and held seals, a journal and unsynced units of queues that were gone."""
    root, settings = tmp_path / "s", tmp_path / "store.properties"
    text = "mappedFileSizeCommitLog=16384\nmappedFileSizeConsumeQueue=320\nmaxMessageSize=8192\nattachTimeout=60s\n"
    settings.write_text(text)
    config = SMALL.load(settings)
    store = attached_store(root, config)

    def put(version: int, topic: str = "t") -> None:
        with store.writing("test", config=config) as writer:
            rows = columns([b"%d/%d" % (version, n) for n in range(8)], topic=topic)
            chunk = encode(rows, limits=config, store_host=writer.files.store_host, born_host=bytes(8))
            append_batch(writer, Chunks([chunk]), BatchRequest(app_id="a", version=version))

    try:
        put(0)
        put(1, "u")
        put(2)
        subprocess.run([sys.executable, "-c", OTHER, str(root), str(settings), made], check=True, timeout=240)
        put(3, "u")
        put(4)
        put(5)
    finally:
        store.detach()
    with MessageStore.open(root, config) as after:
        assert (after.report.rebuilt, after.check_queues()) == (None, None)
        assert read_all(after) == [b"%d/%d" % (version, n) for version in (4, 5) for n in (0, 2, 4, 6)]
        assert read_all(after, "u") == [b"%d/%d" % (version, n) for version in (1, 3) for n in (0, 2, 4, 6)]
    assert verify(root, config).findings == []


def test_a_deletion_at_the_same_clean_end_is_noticed(tmp_path: Path) -> None:
    """The process that stayed attached wrote down the queue that it had known, so recovery would have made it again."""
    root, settings = filled(tmp_path / "s"), tmp_path / "store.properties"
    settings.write_text("mappedFileSizeCommitLog=16384\nmappedFileSizeConsumeQueue=320\nmaxMessageSize=8192\n")
    config = SMALL.replace(attach_timeout="60s")
    store = attached_store(root, config)
    try:
        with store.writing("a turn without a word", config=config):
            pass
        subprocess.run([sys.executable, "-c", OTHER, str(root), str(settings), "made again"], check=True, timeout=240)
        with store.writing("another turn", config=config):
            pass
    finally:
        store.detach()
    assert verify(root, config).findings == []
    (root / "abort").touch()
    with MessageStore.open(root, config) as after:
        assert (after.report.rebuilt, read_all(after)) == (None, [])


def test_the_file_of_topics_keeps_what_a_broker_wrote_of_the_others(tmp_path: Path) -> None:
    root = filled(tmp_path / "s")
    path = root / "config" / "topics.json"
    text = path.read_text().replace('"topicConfigTable":{', '"topicConfigTable":{"b":{"topicName":"b","own":1},')
    path.write_text(text)
    with MessageStore.open(root, SMALL) as store:
        store.delete_topic("t")
    table = json.loads(path.read_text())["topicConfigTable"]
    assert list(table) == ["b"]
    assert table["b"]["own"] == 1


def test_a_killed_deletion_leaves_all_or_nothing(tmp_path: Path) -> None:
    """`make crash` takes every operation."""
    labels = set()
    for key, verdict, label in itertools.islice(deletions.cases(tmp_path / "store", 7, (2, 13)), 60):
        assert verdict.ok, f"{key}: {label}: {verdict}"
        labels.add(label.split()[0])
    assert labels == {"kill", "power"}
