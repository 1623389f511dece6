"""The library as its users see it: puts, gets, keys, times, sessions, errors."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from messagestore import (
    AppendMessageStatus,
    BatchRequest,
    ConfigError,
    GetMessageStatus,
    Message,
    MessageBatch,
    MessageIllegalError,
    MessageStore,
    NotAStoreError,
    PutMessageStatus,
    StoreClosedError,
    StoreConfig,
)
from messagestore.files.disk import Disk, File
from messagestore.inspect.verify import verify
from small import SMALL, SMALL_ASYNC, ClockDisk, bodies, columns, filled, read_all


def test_each_field_of_what_is_put_and_got(tmp_path: Path) -> None:
    """The second message of its queue, and the third of the log."""
    message = Message(
        "t",
        b"UA 1545",
        queue_id=1,
        keys=["k1", "k2"],
        tags="UA",
        properties={"gate": "C3"},
        flag=7,
        born_timestamp_ms=1_600_000_000_123,
        born_host="10.0.0.1:1234",
        reconsume_times=3,
    )
    now_ms = 1_700_000_000_456

    with MessageStore.open(tmp_path, SMALL, disk=ClockDisk(now_ms)) as store:
        before = [store.put_message(Message("t", b"x", queue_id=queue)) for queue in (0, 1)]
        put = store.put_message(message)
        got = store.get_message("t", 1, 1)

    place = put.physical_offset
    assert place == sum(each.size for each in before) > 0
    assert {name: getattr(put, name) for name in put._fields if name != "page_cache_ms"} == {
        "status": PutMessageStatus.PUT_OK,
        "append_status": AppendMessageStatus.PUT_OK,
        "physical_offset": place,
        "size": 91 + len("t") + len(b"UA 1545") + len("KEYS_k1 k2_TAGS_UA_gate_C3_"),
        "queue_offset": 1,
        "message_id": f"7F00000100002A9F{place:016X}",
        "message_count": 1,
        "store_timestamp_ms": now_ms,
        "queue_id": 1,
        "committed": True,
    }
    assert 0 < put.page_cache_ms < 60_000
    assert put.is_ok

    assert (got.status, got.next_begin_offset, got.min_offset, got.max_offset) == (GetMessageStatus.FOUND, 2, 0, 2)
    (found,) = got.messages
    assert dataclasses.asdict(found) == {
        "topic": "t",
        "queue_id": 1,
        "queue_offset": 1,
        "physical_offset": place,
        "size": put.size,
        "body": b"UA 1545",
        "keys": ("k1", "k2"),
        "tags": "UA",
        "properties": {"gate": "C3"},
        "system_properties": {"KEYS": "k1 k2", "TAGS": "UA"},
        "flag": 7,
        "sys_flag": 0,
        "born_timestamp_ms": 1_600_000_000_123,
        "store_timestamp_ms": now_ms,
        "born_host": "10.0.0.1:1234",
        "store_host": "127.0.0.1:10911",
        "reconsume_times": 3,
        "prepared_transaction_offset": 0,
        "body_crc": zlib.crc32(b"UA 1545") & 0x7FFFFFFF,
        "unique_key": None,
        "offset_message_id": put.message_id,
    }
    assert found.message_id == put.message_id


def test_put_and_get(tmp_path: Path) -> None:
    """One message, all of its fields, back as they were."""
    message = Message(
        "flights",
        b"hello",
        queue_id=3,
        keys=["N14228", "UA1545"],
        tags="UA",
        properties={"origin": "EWR", "ziel": "Zürich"},
        flag=7,
        born_timestamp_ms=1_700_000_000_000,
        born_host="10.1.2.3:4711",
    )
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        result = store.put_message(message)
        assert (result.status, result.queue_offset, result.physical_offset, result.is_ok) == (
            PutMessageStatus.PUT_OK,
            0,
            0,
            True,
        )
        found = store.get_message("flights", 3, 0)
        assert (found.status, found.next_begin_offset, found.min_offset, found.max_offset) == (
            GetMessageStatus.FOUND,
            1,
            0,
            1,
        )
        back = found.messages[0]
    assert (back.topic, back.queue_id, back.body, back.keys, back.tags) == (
        "flights",
        3,
        b"hello",
        ("N14228", "UA1545"),
        "UA",
    )
    assert back.properties == {"origin": "EWR", "ziel": "Zürich"}
    assert (back.flag, back.born_timestamp_ms, back.born_host) == (7, 1_700_000_000_000, "10.1.2.3:4711")
    assert back.store_timestamp_ms == result.store_timestamp_ms
    assert back.message_id == result.message_id == back.offset_message_id


@pytest.mark.parametrize(
    ("offset", "status", "next_offset"),
    [
        (-5, GetMessageStatus.OFFSET_TOO_SMALL, 0),
        (0, GetMessageStatus.FOUND, 3),
        (4, GetMessageStatus.FOUND, 5),
        (5, GetMessageStatus.OFFSET_OVERFLOW_ONE, 5),
        (6, GetMessageStatus.OFFSET_OVERFLOW_BADLY, 5),
        (1 << 62, GetMessageStatus.OFFSET_OVERFLOW_BADLY, 5),
    ],
)
def test_get_statuses(tmp_path: Path, offset: int, status: GetMessageStatus, next_offset: int) -> None:
    """RocketMQ's status and next offset for each class of offset."""
    filled(tmp_path / "s", 10)
    with MessageStore.open_read_only(tmp_path / "s") as store:
        found = store.get_message("t", 0, offset, 3)
        assert (found.status, found.next_begin_offset) == (status, next_offset)


def test_an_unknown_queue_has_no_message(tmp_path: Path) -> None:
    """As RocketMQ: NO_MESSAGE_IN_QUEUE and next offset 0."""
    filled(tmp_path / "s", 2)
    with MessageStore.open_read_only(tmp_path / "s") as store:
        for topic, queue_id in (("nowhere", 0), ("t", 5)):
            found = store.get_message(topic, queue_id, 3)
            assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0)


def test_retention_moves_the_begin(tmp_path: Path) -> None:
    """A first segment that was deleted: the queue begins later, and offsets below say so."""
    root = filled(tmp_path / "s", 300)
    (root / "commitlog" / f"{0:020d}").unlink()
    with MessageStore.open_read_only(root) as store:
        low = store.min_offset("t", 0)
        assert 0 < low < 150
        assert store.get_message("t", 0, 0).status is GetMessageStatus.OFFSET_TOO_SMALL
        assert store.get_message("t", 0, low).messages[0].body == bodies(300)[::2][low]


def test_max_msgs_num_batch_is_the_count_of_a_look_up(tmp_path: Path) -> None:
    """For a call that does not say how many; one that does gets more, too."""
    with MessageStore.open(tmp_path / "s", SMALL.replace(max_msgs_num_batch=5)) as store:
        for i in range(9):
            store.put_message(Message("t", b"%d" % i, queue_id=0, keys=["k"]))
        assert [m.body for m in store.query_message("t", "k")] == [b"4", b"5", b"6", b"7", b"8"]
        assert len(store.query_message("t", "k", max_count=100)) == 9


def test_find_by_key(tmp_path: Path) -> None:
    """Every key through the index, the newest last; other topics and keys with the same hash are not mixed in."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for i in range(30):
            store.put_message(Message("t", b"%d" % i, queue_id=0, keys=["Aa" if i % 2 else "BB", f"k{i}"]))
            store.put_message(Message("u", b"other", queue_id=0, keys=["Aa"]))
        assert [m.body for m in store.query_message("t", "k7")] == [b"7"]
        assert [m.body for m in store.query_message("t", "Aa", max_count=3)] == [b"25", b"27", b"29"]
        assert [m.body for m in store.query_message("t", "BB", max_count=100)] == [b"%d" % i for i in range(0, 30, 2)]
        assert store.query_message("t", "nothing") == []
        with pytest.raises(ConfigError, match="max_count: found 0; allowed is a whole number, 1 or more"):
            store.query_message("t", "Aa", 0)
        assert store.query_message("x", "Aa") == []


def test_keys_are_found_without_an_index(tmp_path: Path) -> None:
    """Index files that are gone make the search slow, not wrong."""
    root = filled(tmp_path / "s", 30)
    for path in (root / "index").iterdir():
        path.unlink()
    with MessageStore.open_read_only(root) as store:
        assert [m.body for m in store.query_message("t", "k17")] == [bodies(30)[17]]


def test_look_up_by_offset_and_id(tmp_path: Path) -> None:
    """By physical offset and by message id; anything that is no record's first byte gives None."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        first = store.put_message(Message("t", b"a", queue_id=0))
        second = store.put_message(Message("t", b"b", queue_id=0))
        assert store.look_message_by_offset(second.physical_offset).body == b"b"  # type: ignore[union-attr]
        assert store.look_message_by_id(first.message_id).body == b"a"  # type: ignore[union-attr]
        for offset in (1, -1, second.physical_offset + second.size, 1 << 40):
            assert store.look_message_by_offset(offset) is None


def test_find_by_time(tmp_path: Path) -> None:
    """The table that Java's getOffsetInQueueByTime gave for these store times."""
    disk = ClockDisk()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        for ms in (0, 93, 113, 114, 134, 135):
            disk.now_ms = 10_000 + ms
            store.put_message(Message("t", b"x", queue_id=0))
        expected = {-5: (0, 0), 0: (0, 0), 93: (1, 1), 98: (2, 1), 113: (2, 2), 114: (3, 3), 135: (5, 5), 140: (6, 5)}
        for ms, (lower, upper) in expected.items():
            assert store.queue_offset_by_time("t", 0, 10_000 + ms) == lower, ms
            assert store.queue_offset_by_time("t", 0, 10_000 + ms, "upper") == upper, ms


def test_equal_store_times(tmp_path: Path) -> None:
    """Lower gives the first of equal times, upper the last."""
    filled(tmp_path / "s", 10, disk=ClockDisk(5000))
    with MessageStore.open_read_only(tmp_path / "s") as store:
        assert store.queue_offset_by_time("t", 0, 5000) == 0
        assert store.queue_offset_by_time("t", 0, 5000, "upper") == 4
        assert store.queue_offset_by_time("t", 0, 5001) == 5


def test_the_clock_goes_back(tmp_path: Path) -> None:
    """Store time never goes back: a search by time stays a search in a sorted list."""
    disk, found = ClockDisk(), list[int]()
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        for disk.now_ms in (1000, 900, -5, 0, 2000):
            result = store.put_message(Message("t", b"x", queue_id=0, born_timestamp_ms=1))
            found.append(result.store_timestamp_ms)
    assert found[:-1] == sorted(found[:-1]) and found[0] == 1000 and found[-1] in (1000, 2000)
    assert min(found) == 1000


def test_batch_puts_lie_side_by_side(tmp_path: Path) -> None:
    """A MessageExtBatch: one store time, one segment, RocketMQ's joined message ids."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"x" * 7000, queue_id=0))
        store.put_message(Message("t", b"x" * 7000, queue_id=0))
        table = pa.record_batch({"body": pa.array(bodies(30)), "keys": pa.array([f"b{i}" for i in range(30)])})
        result = store.put_messages(MessageBatch.from_arrow(table, topic="t", queue_id=1))
        assert (result.message_count, result.queue_offset, result.physical_offset) == (30, 0, 16 * 1024)
        assert len(result.message_id.split(",")) == 30
        messages = store.get_message("t", 1, 0, 100).messages
        assert [m.body for m in messages] == bodies(30)
        assert len({m.store_timestamp_ms for m in messages}) == 1
        assert [m.body for m in store.query_message("t", "b12")] == [bodies(30)[12]]
        with pytest.raises(MessageIllegalError, match="append_batch"):
            store.put_messages(
                MessageBatch.from_arrow(pa.record_batch({"body": pa.array([b"x" * 4000] * 3)}), topic="t")
            )
    assert verify(tmp_path / "s").ok


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message("a/b", b""), "topic"),
        (Message("..", b""), "topic"),
        (Message("", b""), "topic"),
        (Message("t" * 128, b""), "topic"),
        (Message("rmq_sys_spark_sink", b""), "topic"),
        (Message("rmq_sys_wheel_timer", b""), "topic"),
        (Message("%LMQ%a", b""), "topic"),
        (Message("t", None), "body"),  # type: ignore[arg-type]
        (Message("t", b"x" * (8 * 1024 + 1)), "body"),
        (Message("t", b"", queue_id=8), "queue_id"),
        (Message("t", b"", queue_id=-2), "queue_id"),
        (Message("t", b"", keys=["a b"]), "keys"),
        (Message("t", b"", keys=[""]), "keys"),
        (Message("t", b"", keys=["a\x01"]), "keys"),
        (Message("t", b"", tags="a\x02b"), "tags"),
        (Message("t", b"", properties={"a\x01": "b"}), "properties"),
        (Message("t", b"", properties={"a": "b\x02"}), "properties"),
        (Message("t", b"", properties={"": "b"}), "properties"),
        (Message("t", b"", properties={"a": ""}), "properties"),
        (Message("t", b"", properties={"KEYS": "b"}), "properties"),
        (Message("t", b"", properties={"__CRC32#": "b"}), "properties"),
        (Message("t", b"", properties={"a": "x" * 32767}), "properties"),
    ],
)
def test_bad_messages_are_refused(tmp_path: Path, message: Message, field: str) -> None:
    """Each names the field, and nothing of it is in the log."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        with pytest.raises(MessageIllegalError) as caught:
            store.put_message(message)
        assert caught.value.field == field
        assert store.writer.end.physical_offset == 0


def test_a_record_must_fit_into_a_segment(tmp_path: Path) -> None:
    """With small segments the segment is the limit; Java would waste a whole file here."""
    with MessageStore.open(tmp_path / "s", SMALL.replace(mapped_file_size_commit_log=4096)) as store:
        with pytest.raises(MessageIllegalError, match="allowed are 4088, the room in a segment"):
            store.put_message(Message("t", b"x" * 4000, queue_id=0))
        assert store.put_message(Message("t", b"x" * 3990, queue_id=0)).is_ok


def test_queue_choice(tmp_path: Path) -> None:
    """By the first key's hash, the same for the same key; round robin without."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        by_key = {store.put_message(Message("t", b"", keys=["N1"])).queue_id for _ in range(5)}
        assert len(by_key) == 1
        turns = [store.put_message(Message("t", b"")).queue_id for _ in range(8)]
        assert sorted(turns) == list(range(8))


def test_async_puts_are_visible_soon_and_at_once_in_the_session(tmp_path: Path) -> None:
    """ASYNC_FLUSH: a reader of the session sees its own puts; another reader within moments."""
    with MessageStore.open(tmp_path / "s", SMALL_ASYNC) as store, MessageStore.open_read_only(tmp_path / "s") as reader:
        store.put_message(Message("t", b"x", queue_id=0))
        assert store.get_message("t", 0, 0).messages[0].body == b"x"
        store.put_message(Message("t", b"y", queue_id=0))
        deadline = time.monotonic() + 120
        while reader.max_offset("t", 0) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert reader.max_offset("t", 0) == 2


class SlowDisk(Disk):
    """Each sync of the log takes a while, and as long as the gate is closed."""

    pause_s = 0.0
    syncs = 0

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def fdatasync(self, file: File) -> None:
        if "commitlog" in file.path:
            self.syncs += 1
            time.sleep(self.pause_s)
            assert self.gate.wait(240)
        super().fdatasync(file)


def test_a_late_sync_is_a_status_not_a_loss(tmp_path: Path) -> None:
    """FLUSH_DISK_TIMEOUT: the message is stored all the same."""
    disk = SlowDisk()
    with MessageStore.open(tmp_path / "s", SMALL.replace(sync_flush_timeout=20), disk=disk) as store:
        disk.gate.clear()
        result = store.put_message(Message("t", b"late", queue_id=0))
        assert (result.status, result.is_ok) == (PutMessageStatus.FLUSH_DISK_TIMEOUT, True)
        disk.gate.set()
        store.flush()
        assert read_all(store) == [b"late"]


def test_threads_share_syncs(tmp_path: Path) -> None:
    """16 threads on one session in SYNC_FLUSH: all is stored once, in order per thread, with fewer syncs than puts."""
    disk = SlowDisk()
    with MessageStore.open(tmp_path / "s", SMALL.replace(mapped_file_size_commit_log=1 << 20), disk=disk) as store:
        disk.pause_s = 0.002

        def puts(number: int) -> None:
            for i in range(25):
                store.put_message(Message("t", b"%d/%d" % (number, i), queue_id=number % 2))

        threads = [threading.Thread(target=puts, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = read_all(store, queue_id=0) + read_all(store, queue_id=1)
        assert len(found) == len(set(found)) == 400
        for number in range(16):
            mine = [int(b.split(b"/")[1]) for b in found if b.startswith(b"%d/" % number)]
            assert mine == list(range(25))
        assert disk.syncs < 300
    assert verify(tmp_path / "s").ok


def test_not_waiting_for_the_sync(tmp_path: Path) -> None:
    """WAIT=false: the put returns before the sync, and is durable after `flush`."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for i in range(10):
            assert store.put_message(Message("t", b"%d" % i, queue_id=0, wait_store_msg_ok=False)).is_ok
        store.flush()
        assert read_all(store) == [b"%d" % i for i in range(10)]
        assert store.get_message("t", 0, 0).messages[0].system_properties["WAIT"] == "false"


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """Every call after close; closing twice does nothing."""
    store = MessageStore.open(tmp_path / "s", SMALL)
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.put_message(Message("t", b""))
    with pytest.raises(StoreClosedError):
        store.get_message("t", 0, 0)
    reader = MessageStore.open_read_only(tmp_path / "s")
    reader.close()
    with pytest.raises(StoreClosedError):
        reader.topics()


def test_folders_that_are_no_store(tmp_path: Path) -> None:
    """A folder with something else is left alone; a missing one is made for a writer only."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    for path, text in (("docs", "letter.txt"), ("file", "found a file")):
        with pytest.raises(NotAStoreError, match=text):
            MessageStore.open(tmp_path / path)
    for path in ("docs", "file", "missing"):
        with pytest.raises(NotAStoreError):
            MessageStore.open_read_only(tmp_path / path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["docs", "file", "letter.txt"]


def test_sizes_are_read_off_the_files(tmp_path: Path) -> None:
    """A store with small files opens with the defaults, and goes on with its own sizes."""
    root = filled(tmp_path / "s", 20)
    with MessageStore.open(root, StoreConfig()) as store:
        assert store.writer.log.segment_size == SMALL.mapped_file_size_commit_log
        for i in range(300):
            store.put_message(Message("t", b"x" * 50, queue_id=i % 2, wait_store_msg_ok=False))
    assert {p.stat().st_size for p in (root / "commitlog").iterdir()} == {SMALL.mapped_file_size_commit_log}
    assert verify(root).ok


def test_property_crc(tmp_path: Path) -> None:
    """`enabledAppendPropCRC`: single puts and batches carry `__CRC32#`, and are read back."""
    config = SMALL.replace(enabled_append_prop_crc=True)
    with MessageStore.open(tmp_path / "s", config) as store:
        store.put_message(Message("t", b"one", queue_id=0))
        store.put_messages(MessageBatch.from_messages([Message("t", b"two", queue_id=0, tags="x")]))
        messages = store.get_message("t", 0, 0).messages
        assert [m.body for m in messages] == [b"one", b"two"]
        assert all(len(m.system_properties["__CRC32#"]) == 10 for m in messages)
    assert verify(tmp_path / "s").ok


def test_messages_side_by_side_are_all_there(tmp_path: Path) -> None:
    """What a message of a batch may say is stored as that of one put by itself."""
    messages = [
        Message(
            "t", b"one", 1, keys=["k", "l"], tags="x", properties={"a": "b"}, flag=np.int32(-7), born_timestamp_ms=9
        ),
        Message("t", memoryview(np.arange(3, dtype=np.int16)), 1),
        Message("t", b"", 1, born_timestamp_ms=10),
    ]
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        for message in messages:
            store.put_message(message)
        before_ms = time.time_ns() // 1_000_000
        assert store.put_messages(MessageBatch.from_messages(messages)).is_ok
        found = store.get_message("t", 1, 0).messages
        for one, other in zip(found[:3], found[3:], strict=True):
            for name in ("topic", "queue_id", "body", "keys", "tags", "properties", "flag", "sys_flag", "born_host"):
                assert getattr(one, name) == getattr(other, name), name
        assert [found[i].born_timestamp_ms for i in (0, 2, 3, 5)] == [9, 10, 9, 10]
        assert before_ms <= found[4].born_timestamp_ms <= time.time_ns() // 1_000_000


BAD_FIELDS: list[tuple[dict[str, object], str]] = [
    ({"body": "text"}, "body: found str; allowed are bytes"),
    ({"body": 5}, "body: found int; allowed are bytes"),
    ({"body": None}, "body: found NoneType; allowed are bytes"),
    ({"body": memoryview(b"abc")[::2]}, "body: found a memoryview of bytes that are not side by side"),
    ({"flag": 1 << 31}, "flag: found 2147483648; allowed is an int of 32 bits"),
    ({"flag": 1.5}, "flag: found 1.5; allowed is an int of 32 bits"),
    ({"born_timestamp_ms": "now"}, "born_timestamp_ms: found 'now'; allowed is an int of 64 bits"),
    ({"tags": 5}, "tags: found int; allowed is text"),
    ({"tags": "a\ud800"}, "without a lone surrogate"),
    ({"keys": "ab"}, "keys: found text 'ab'; allowed is a list"),
    ({"keys": [5]}, "keys: found int; allowed is text"),
    ({"properties": {"a": 5}}, "property 'a': found int; allowed is text"),
    ({"keys": None}, "keys: found NoneType; allowed is a list"),
    ({"properties": {"KEYS": "a"}}, "Use `keys`"),
    ({"properties": ["a"]}, "properties: found list; allowed is a mapping of text to text"),
    ({"properties": None}, "properties: found NoneType"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_FIELDS)
def test_a_field_of_another_type_is_named(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    """Nothing of the message is in the log."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        end = store.writer.end
        with pytest.raises(MessageIllegalError, match=re.escape(words)):
            store.put_message(dataclasses.replace(Message("t", b"x", 0), **changes))
        assert store.writer.end == end


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"topic": 5}, "topic: found int; allowed is text"),
        ({"topic": "t", "queue_id": 1 << 40}, "queue id: found 1099511627776; allowed is 0 to 65535"),
        ({"topic": "t", "queue_id": 1.5}, "queue id: found 1.5"),
    ],
)
def test_a_topic_and_queue_for_all_rows_are_looked_at(names: dict[str, Any], words: str) -> None:
    """A queue id of 1.5 was 1."""
    with pytest.raises(MessageIllegalError, match=re.escape(words)):
        MessageBatch.from_arrow(pa.record_batch({"body": pa.array([b"x"])}), **names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *BAD_FIELDS,
        ({"topic": "u"}, "topic: found 'u'; allowed is 't', as in the first message"),
        ({"queue_id": 1}, "queue_id: found 1; allowed is 0, as in the first message"),
        ({"queue_id": None}, "queue_id: found None"),
        ({"sys_flag": 1}, "sys_flag: found 1; allowed in a batch is 0. Put this message by itself"),
        ({"born_host": "10.0.0.1:1"}, "born_host: found '10.0.0.1:1'"),
        ({"reconsume_times": 3}, "reconsume_times: found 3"),
        ({"wait_store_msg_ok": False}, "wait_store_msg_ok: found False"),
    ],
)
def test_a_message_that_a_batch_cannot_hold_is_named(changes: dict[str, object], words: str) -> None:
    """One of another topic went into the first one's, and a body of text was stored: without a word."""
    good = Message("t", b"x", 0)
    with pytest.raises(MessageIllegalError, match=re.escape(words)) as caught:
        MessageBatch.from_messages([good, good, dataclasses.replace(good, **changes)])
    assert caught.value.row == 2
    with pytest.raises(MessageIllegalError, match="found no message; give at least one"):
        MessageBatch.from_messages([])


def test_ipv6_store(tmp_path: Path) -> None:
    """A store on an IPv6 address: longer heads, longer message ids."""
    config = SMALL.replace(broker_ip1="2001:db8::2")
    with MessageStore.open(tmp_path / "s", config) as store:
        store.put_message(Message("t", b"six", queue_id=0, born_host="[2001:db8::1]:1234", keys=["k"], tags="x"))
        store.put_messages(MessageBatch.from_messages([Message("t", b"seven", queue_id=0)]))
        first, second = store.get_message("t", 0, 0).messages
        assert (first.born_host, first.store_host) == ("[2001:db8::1]:1234", "[2001:db8::2]:10911")
        assert len(first.offset_message_id) == 56
        assert read_all(store) == [b"six", b"seven"]
        assert store.look_message_by_id(second.message_id).body == b"seven"  # type: ignore[union-attr]
    assert verify(tmp_path / "s").ok


def open_below(root: Path) -> list[str]:
    """What this process has open of a store."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link) and str(root) in os.readlink(link)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="/proc/self/fd tells what is open")
@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
def test_nothing_is_open_after_close(tmp_path: Path, config: StoreConfig) -> None:
    """At once, and not when the garbage collector comes by: who unmounts a disk must not wait for it."""
    root = tmp_path / "s"
    gc.disable()
    try:
        for version in range(2):
            with MessageStore.open(root, config) as store:
                store.put_message(Message("t", b"x", queue_id=0, keys=["k"]))
                store.append_batch(columns(bodies(300)), BatchRequest("app", version))  # over several segments
                assert len(read_all(store)) == 151 * (version + 1)
                assert [m.body for m in store.query_message("t", "k")]
            assert open_below(root) == []
            with MessageStore.open_read_only(root) as reader:
                assert len(read_all(reader)) == 151 * (version + 1)  # type: ignore[arg-type]
                assert [m.body for m in reader.query_message("t", "k")]
            assert open_below(root) == []
    finally:
        gc.enable()


def test_chance_chooses_a_queue_for_queue_id_minus_one(tmp_path: Path) -> None:
    """As in a broker, whatever the keys are; a batch is refused, since its messages lie in one queue that is named."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.create_topic("t", queue_nums=4)
        results = [store.put_message(Message("t", b"x", queue_id=-1, keys=["same"])) for _ in range(200)]
        counts = [store.max_offset("t", queue_id) for queue_id in range(4)]
        assert sum(counts) == 200
        assert all(10 < count < 120 for count in counts)
        assert {result.queue_id for result in results} == {0, 1, 2, 3}
        with pytest.raises(MessageIllegalError, match="queue id: found -1"):
            MessageBatch.from_messages([Message("t", b"x", queue_id=-1)])
