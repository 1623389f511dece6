"""Delivery of delayed messages: each that is due comes to its topic and queue once, whoever delivers and whatever stops."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from crash.harness import die
from crash.imitate import Broker, flip
from crash.simdisk import KillDisk, Killed
from messagestore import (
    BatchRequest,
    CorruptionError,
    Message,
    MessageIllegalError,
    MessageStore,
    StoreConfig,
    StorePoisonedError,
    deliver_delayed,
)
from messagestore.files.config_file import parsed
from messagestore.format.batch_record import BATCH_TOPIC, DELIVERY_APP
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect.verify import verify
from messagestore.session import attached_store
from small import SMALL, SMALL_ASYNC, ClockDisk, bodies, delayed, read_all

NOW_MS = 1_795_170_401_381
ROOMY = SMALL.replace(mapped_file_size_commit_log=256 * 1024)


def delivered(store: MessageStore, topic: str = "t") -> list[bytes]:
    return sorted(body for queue_id in store.topics().get(topic, []) for body in read_all(store, topic, queue_id))


def deliver_all(store: MessageStore) -> int:
    count = 0
    while (done := store.deliver_delayed()).count:
        count += done.count
    return count


def offsets_of_file(root: Path) -> dict[str, int]:
    return dict(parsed((root / "config" / "delayOffset.json").read_text())["offsetTable"])


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL_ASYNC,
        SMALL.replace(enabled_append_prop_crc=True),
        SMALL.replace(broker_ip1="::1"),
        SMALL.replace(message_index_enable=False),
    ],
    ids=["sync", "async", "crc", "ipv6", "no index"],
)
def test_a_due_message_is_delivered_once_with_all_that_it_had(tmp_path: Path, config: StoreConfig) -> None:
    disk = ClockDisk(NOW_MS)
    message = Message(
        "t",
        b"later",
        queue_id=5,
        keys=["k", "l"],
        tags="tag",
        properties={"own": "1"},
        flag=7,
        born_timestamp_ms=17,
        born_host="[2001:db8::1]:1234",
        reconsume_times=3,
        delay_time_level=2,
    )
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        store.put_message(message)
        store.flush()
        disk.now_ms += 4_999
        assert store.deliver_delayed() == (result := store.deliver_delayed())
        assert (result.count, result.left_out, result.next_due_ms) == (0, 0, NOW_MS + 5_000)
        disk.now_ms += 1
        result = store.deliver_delayed()
        assert (result.count, result.left_out, result.next_due_ms) == (1, 0, None)
        assert store.deliver_delayed().count == 0
        (found,) = store.get_message("t", 5, 0).messages
        (waiting,) = store.get_message(SCHEDULE_TOPIC, 1, 0).messages
        assert (found.body, found.keys, found.tags, found.properties) == (b"later", ("k", "l"), "tag", {"own": "1"})
        assert (found.flag, found.born_timestamp_ms, found.reconsume_times) == (7, 17, 3)
        assert (found.born_host, found.store_host) == (waiting.born_host, waiting.store_host)
        assert found.born_host == "[2001:db8::1]:1234"
        assert {name: found.system_properties[name] for name in ("DELAY", "REAL_TOPIC", "REAL_QID")} == {
            "DELAY": "2", "REAL_TOPIC": "t", "REAL_QID": "5"
        }  # fmt: skip
        assert found.store_timestamp_ms == disk.now_ms
        assert [m.body for m in store.query_message("t", "l")] == [b"later"]
    assert verify(tmp_path, config).ok
    assert offsets_of_file(tmp_path) == {"2": 1}


def test_messages_of_many_levels_topics_and_queues(tmp_path: Path) -> None:
    """Within a queue, the messages of a level keep their order."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, ROOMY, disk=disk) as store:
        for topic in ("t", "u"):
            store.append_batch(delayed([1, 2, 3] * 40, topic))
        disk.now_ms += 5_000
        assert store.deliver_delayed().count == 160
        disk.now_ms += 5_000
        assert store.deliver_delayed().count == 80
        for topic in ("t", "u"):
            assert delivered(store, topic) == bodies(120)
            for queue_id in (0, 1):
                found = store.get_message(topic, queue_id, 0, 100).messages
                for level in ("1", "2", "3"):
                    numbers = [int(m.body[:6]) for m in found if m.system_properties["DELAY"] == level]
                    assert numbers == sorted(numbers)
    assert verify(tmp_path, ROOMY).ok


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_a_round_is_limited(tmp_path: Path, rows: int) -> None:
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, ROOMY, disk=disk) as store:
        store.append_batch(delayed([1] * 20 + [2] * 20))
        disk.now_ms += 10_000
        services = store._attached.services
        assert services is not None
        delivery = services.delivery
        counts = []
        while (done := delivery.deliver(rows)).count:
            assert done.count <= rows
            counts.append(done.count)
            assert (done.next_due_ms is not None) == (sum(counts) < 40)
        assert sum(counts) == 40
        assert delivered(store) == bodies(40)


def test_a_due_time_that_a_clock_far_ahead_gave_is_now(tmp_path: Path) -> None:
    """As in RocketMQ: a message does not wait for such a clock."""
    disk = ClockDisk(NOW_MS + 7_200_000)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"x", queue_id=0, delay_time_level=3))
        disk.now_ms = NOW_MS
        assert store.deliver_delayed().count == 1


@pytest.mark.parametrize("back_ms", [1, 100, 1_800_000])
def test_a_clock_that_is_set_back_neither_shortens_nor_lengthens_a_delay(tmp_path: Path, back_ms: int) -> None:
    """Store times stand still then. Messages were once delivered at once, and later waited for the clock to catch up."""
    disk = ClockDisk(NOW_MS)
    back = NOW_MS - back_ms
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"before", queue_id=0, delay_time_level=2))
        disk.now_ms = back
        assert store.deliver_delayed().count == 0
        store.put_message(Message("t", b"after", queue_id=0, delay_time_level=2))
        disk.now_ms = back + 1_000
        store.put_message(Message("t", b"later", queue_id=0, delay_time_level=2))
        store.put_message(Message("t", b"short", queue_id=0, delay_time_level=1))
        counts = {}
        for ms in (1_999, 2_000, 4_999, 5_000, 5_999, 6_000):
            disk.now_ms = back + ms
            counts[ms] = store.deliver_delayed().count
        assert counts == {1_999: 0, 2_000: 1, 4_999: 0, 5_000: 2, 5_999: 0, 6_000: 1}


def test_a_deliverer_that_comes_later_waits_for_no_longer_than_a_level(tmp_path: Path) -> None:
    """What was put before the clock was set back counts as put when somebody first looked."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"x", queue_id=0, delay_time_level=1))
    disk.now_ms -= 1_800_000
    disk.now_ms += 300
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        assert store.deliver_delayed().count == 0
        disk.now_ms += 999
        done = store.deliver_delayed()
        assert (done.count, done.next_due_ms) == (0, disk.now_ms + 1)
        disk.now_ms += 1
        assert store.deliver_delayed().count == 1
    assert verify(tmp_path, SMALL).ok


@pytest.mark.parametrize("pause_ms", [1, 100, 900, 60_000])
def test_after_the_clock_was_set_back_a_message_waits_no_longer_because_the_store_was_closed(
    tmp_path: Path, pause_ms: int
) -> None:
    """`messagestore deliver --once` from cron counted from its own first look, each time, for half an hour."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.put_message(Message("x", b"x", queue_id=0))
        disk.now_ms -= 1_800_000
        store.put_message(Message("t", b"x", queue_id=0, delay_time_level=1))
        put_ms = disk.now_ms
    file = tmp_path / "spark" / "put-times.json"
    while not deliver_delayed(tmp_path, SMALL, disk=disk).count:
        attached_store(tmp_path, disk=disk).detach()
        assert disk.now_ms < put_ms + 1_000
        disk.now_ms += pause_ms
    assert put_ms + 1_000 <= disk.now_ms < put_ms + 1_000 + pause_ms
    attached_store(tmp_path, disk=disk).detach()
    assert file.exists()
    assert verify(tmp_path, SMALL).ok
    disk.now_ms = NOW_MS + max(SMALL.delays_ms)
    with MessageStore.open(tmp_path, SMALL, disk=disk):
        pass
    assert not file.exists()


@pytest.mark.parametrize("how", ["set right again", "set back once more", "killed"])
def test_no_delay_gets_shorter_between_two_openings(tmp_path: Path, how: str) -> None:
    disk = ClockDisk(NOW_MS)
    store = MessageStore.open(tmp_path, SMALL, disk=disk)
    store.put_message(Message("x", b"x", queue_id=0))
    disk.now_ms -= 1_800_000
    store.put_message(Message("t", b"x", queue_id=0, delay_time_level=2))
    if how == "killed":
        die(tmp_path)
        disk.now_ms += 4_000  # counts anew
    else:
        store.close()
        disk.jump(1_790_000 if how == "set right again" else -1_000_000)
    for ms in (0, 4_999):
        disk.now_ms += ms
        with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
            assert store.deliver_delayed().count == 0
    disk.now_ms += 1
    assert deliver_delayed(tmp_path, SMALL, disk=disk).count == 1


def test_a_damaged_file_of_put_times_is_named_and_takes_no_message(tmp_path: Path, caplog) -> None:
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.put_message(Message("x", b"x", queue_id=0))
        disk.now_ms -= 1_800_000
        store.put_message(Message("t", b"x", queue_id=0, delay_time_level=1))
    (tmp_path / "spark" / "put-times.json").write_text("{")
    assert "put-times.json" in str(verify(tmp_path, SMALL).findings)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        assert "put-times.json" in caplog.text
        assert store.deliver_delayed().count == 0
        disk.now_ms += 1_000
        assert store.deliver_delayed().count == 1
    assert verify(tmp_path, SMALL).ok


def test_a_clock_that_is_not_set_takes_no_delay_away(tmp_path: Path) -> None:
    """A machine without a battery begins in 1970, until it has asked for the time."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"x", queue_id=0, delay_time_level=2))
        disk.now_ms = 3_000
        assert store.deliver_delayed().count == 0
        disk.jump(NOW_MS - 3_000)
        disk.now_ms += 4_999
        assert store.deliver_delayed().count == 0
        disk.now_ms = NOW_MS + 5_000
        assert store.deliver_delayed().count == 1


def test_units_of_a_broker_with_an_extension_have_no_due_time(tmp_path: Path) -> None:
    """ConsumeQueueExt: the unit holds the place in another file; the message still waits for as long as its level says."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.append_batch(delayed([2] * 40))
    path = tmp_path / "consumequeue" / SCHEDULE_TOPIC / "1" / ("0" * 20)
    units = bytearray(path.read_bytes())
    for number in range(16):
        struct.pack_into(">q", units, 20 * number + 12, -(1 << 31) - 1 - number)
    path.write_bytes(units)
    (tmp_path / "spark" / "ends").unlink()
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        disk.now_ms += 4_999
        assert deliver_all(store) == 0
        disk.now_ms += 1
        assert deliver_all(store) == 40
        assert delivered(store) == bodies(40)


def test_progress_is_in_the_log(tmp_path: Path) -> None:
    """A killed deliverer's successor goes on behind what was delivered, without delayOffset.json, and writes it."""
    disk = ClockDisk(NOW_MS)
    store = MessageStore.open(tmp_path, SMALL, disk=disk)
    store.append_batch(delayed([1, 1, 2, 1]))
    disk.now_ms += 1_000
    assert deliver_all(store) == 3
    die(tmp_path)
    assert not (tmp_path / "config" / "delayOffset.json").exists()
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        assert offsets_of_file(tmp_path) == {"1": 3}
        assert store.deliver_delayed().count == 0
        disk.now_ms += 4_000
        assert deliver_all(store) == 1
        assert delivered(store) == bodies(4)
    assert offsets_of_file(tmp_path) == {"1": 3, "2": 1}
    for name in ("config/delayOffset.json", "spark/journal", "spark/state"):
        (tmp_path / name).unlink()
        with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
            assert store.deliver_delayed().count == 0
            assert delivered(store) == bodies(4)


def test_the_larger_progress_counts(tmp_path: Path) -> None:
    """A broker that delivered after us wrote its file. What the queue does not have, or is not due yet, it did not
    deliver."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.append_batch(delayed([1, 1, 1, 1, 2, 2]))
        disk.now_ms += 1_000
        services = store._attached.services
        assert services is not None
        delivery = services.delivery
        assert delivery.deliver(1).count == 1
    file = tmp_path / "config" / "delayOffset.json"
    file.write_text(file.read_text().replace("{1:1", "{1:3,2:99,7:5"))
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        disk.now_ms += 10_000
        assert deliver_all(store) == 3
        assert delivered(store) == [bodies(6)[number] for number in (0, 3, 4, 5)]
    assert offsets_of_file(tmp_path) == {"1": 4, "2": 2, "7": 0}


def test_deliverers_take_turns(tmp_path: Path) -> None:
    """Sessions and calls of `deliver_delayed` one after the other, also after a kill: no message comes twice."""
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, ROOMY, disk=disk) as store:
        store.append_batch(delayed([1] * 60))
    disk.now_ms += 1_000
    assert deliver_delayed(tmp_path, ROOMY, disk=disk).count == 60
    die(tmp_path)
    with MessageStore.open(tmp_path, ROOMY, disk=disk) as store:
        assert store.deliver_delayed().count == 0
        store.append_batch(delayed([1] * 60))
        disk.now_ms += 1_000
        assert store.deliver_delayed().count == 60
    assert deliver_delayed(tmp_path, ROOMY, disk=disk).count == 0
    with MessageStore.open(tmp_path, ROOMY, disk=disk) as store:
        assert delivered(store) == sorted(bodies(60) * 2)


def test_deliverers_with_other_levels_deliver_each_message_once_when_it_is_due(tmp_path: Path) -> None:
    """Those who did not know a level left it out of the progress, so those who did delivered its messages again."""
    disk = ClockDisk(NOW_MS)
    three = ROOMY.replace(message_delay_level="1s 5s 10s")
    others = [three, ROOMY.replace(message_delay_level="1s 2s"), ROOMY.replace(message_delay_level="3s")]
    with MessageStore.open(tmp_path, three, disk=disk) as store:
        store.append_batch(delayed([1, 2, 3] * 5))
    counts = {}
    for turn in range(24):
        disk.now_ms = NOW_MS + turn * 500
        with MessageStore.open(tmp_path, others[turn % 3], disk=disk) as store:
            counts[turn * 500] = deliver_all(store)
    assert {at: count for at, count in counts.items() if count} == {1_000: 5, 5_000: 5, 10_000: 5}
    (tmp_path / "config" / "delayOffset.json").unlink()
    with MessageStore.open(tmp_path, others[1], disk=disk) as store:
        assert deliver_all(store) == 0
        assert delivered(store) == bodies(15)
    assert offsets_of_file(tmp_path) == {"1": 5, "2": 5, "3": 5}


def test_a_session_delivers_by_a_thread(tmp_path: Path) -> None:
    """With the wall clock: beside puts of other threads, and it ends with the session."""
    config = ROOMY.replace(deliver_delayed=True, message_delay_level="1s 2s")
    with MessageStore.open(tmp_path, config) as store:
        with ThreadPoolExecutor(3) as pool:
            puts = [Message("t", b"%03d" % n, queue_id=n % 4, delay_time_level=1 + n % 2) for n in range(60)]
            assert all(result.is_ok for result in pool.map(store.put_message, puts))
        until_s = time.monotonic() + 30
        while len(found := delivered(store)) < 60 and time.monotonic() < until_s:
            time.sleep(0.05)
        assert found == [b"%03d" % n for n in range(60)]
        for queue_id in range(4):
            for message in store.get_message("t", queue_id, 0, 100).messages:
                waited_ms = message.store_timestamp_ms - message.born_timestamp_ms
                assert 1000 * int(message.system_properties["DELAY"]) <= waited_ms + 1 < 20_000
        assert any(thread.name == "messagestore-delivery" for thread in threading.enumerate())
    assert not any(thread.name == "messagestore-delivery" for thread in threading.enumerate())
    assert offsets_of_file(tmp_path) == {"1": 30, "2": 30}
    assert verify(tmp_path, config).ok


HOSTILE = {
    "no topic": [("REAL_QID", "0")],
    "no queue": [("REAL_TOPIC", "t")],
    "a folder above": [("REAL_TOPIC", "../t"), ("REAL_QID", "0")],
    "the batches'": [("REAL_TOPIC", BATCH_TOPIC), ("REAL_QID", "0")],
    "itself": [("REAL_TOPIC", SCHEDULE_TOPIC), ("REAL_QID", "0")],
    "half": [("REAL_TOPIC", "RMQ_SYS_TRANS_HALF_TOPIC"), ("REAL_QID", "0")],
    "timer": [("REAL_TOPIC", "rmq_sys_wheel_timer"), ("REAL_QID", "0")],
    "no number": [("REAL_TOPIC", "t"), ("REAL_QID", "x")],
    "negative": [("REAL_TOPIC", "t"), ("REAL_QID", "-1")],
    "large": [("REAL_TOPIC", "t"), ("REAL_QID", "65536")],
    "long": [("REAL_TOPIC", "t" * 200), ("REAL_QID", "0")],
}


@pytest.mark.parametrize("many", [1, 40])
def test_messages_that_cannot_be_delivered_stay_and_hold_nothing_back(
    tmp_path: Path, many: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, ROOMY)
    for _ in range(many):
        for properties in HOSTILE.values():
            broker.put(SCHEDULE_TOPIC, b"never", 0, properties=[("DELAY", "1"), *properties])
        broker.put(SCHEDULE_TOPIC, b"good", 0, properties=[("DELAY", "1"), ("REAL_TOPIC", "t"), ("REAL_QID", "9")])
    disk = ClockDisk(NOW_MS * 2)
    with caplog.at_level(logging.WARNING), MessageStore.open(root, ROOMY, disk=disk) as store:
        done = store.deliver_delayed()
        assert (done.count, done.left_out) == (many, many * len(HOSTILE))
        assert store.deliver_delayed().left_out == 0
        assert read_all(store, "t", 9) == [b"good"] * many
        assert set(store.topics()) == {SCHEDULE_TOPIC, BATCH_TOPIC, "t"}
        config = store.topic_config("t")
        assert config is not None and config.write_queue_nums == 10
    assert [m for m in caplog.messages if "have no topic and queue" in m]
    assert verify(root, ROOMY).ok


@pytest.mark.parametrize("damaged", [0, 1, 30])
def test_a_damaged_message_holds_back_only_its_own_level(tmp_path: Path, damaged: int) -> None:
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, ROOMY, disk=disk) as store:
        store.append_batch(delayed([1] * 40 + [2] * 40))
        units = store.view.units(SCHEDULE_TOPIC, 0, damaged, damaged + 1)
        at = int(units["physical_offset"][0])
    flip(tmp_path, at + 100)
    disk.now_ms += 10_000
    with MessageStore.open(tmp_path, ROOMY, disk=disk) as store:
        errors = 0
        for _ in range(12):
            try:
                store.deliver_delayed()
            except CorruptionError as error:
                assert error.physical_offset == at
                errors += 1
        assert errors
        found = [int(body[:6]) for body in delivered(store)]
        assert set(range(40, 80)) <= set(found) and len(set(found)) == len(found)
        assert len([number for number in found if number < 40]) == damaged


def test_a_segment_too_small_for_the_batch_of_many_queues(tmp_path: Path) -> None:
    disk, config = ClockDisk(NOW_MS), SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=1024)
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        store.create_topic("t", queue_nums=600)
        for number in range(600):
            store.put_message(Message("t", b"%06d" % number, queue_id=number, delay_time_level=1))
        disk.now_ms += 1_000
        assert deliver_all(store) == 600
        assert delivered(store) == [b"%06d" % number for number in range(600)]


def test_what_retention_took_is_not_waited_for(tmp_path: Path) -> None:
    """The first segments are gone, and the last delivery's record with them: what is left is delivered, once."""
    disk, config = ClockDisk(NOW_MS), SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        store.append_batch(delayed([1] * 10))
        disk.now_ms += 1_000
        assert deliver_all(store) == 10
        store.append_batch(delayed([1] * 100))
    shutil.rmtree(tmp_path / "config")
    for name in sorted(p.name for p in (tmp_path / "commitlog").iterdir())[:3]:
        (tmp_path / "commitlog" / name).unlink()
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        left = store.max_offset(SCHEDULE_TOPIC, 0) - store.min_offset(SCHEDULE_TOPIC, 0)
        assert 10 < left < 100
        disk.now_ms += 1_000
        assert deliver_all(store) == left
        assert deliver_all(store) == 0


def test_retention_keeps_the_progress(tmp_path: Path) -> None:
    """The segment of the last delivery is deleted by our own retention, and delayOffset.json is lost: nothing comes again,
    and what waits in a newer segment comes once."""
    disk, config = ClockDisk(NOW_MS), SMALL.replace(mapped_file_size_commit_log=4096, max_message_size=2048)
    config = config.replace(flush_delay_offset_interval=1)  # retention asks the file what was delivered
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        store.append_batch(delayed([1] * 10))
        disk.now_ms += 1_000
        assert deliver_all(store) == 10
        for _ in range(20):
            store.put_message(Message("x", b"." * 500, queue_id=0))
        store.append_batch(delayed([2] * 5 + [3] * 3))
        store.delete_expired_files(before_offset=8192)
        assert store.writer.log.min_offset == 8192
        assert store.max_offset(SCHEDULE_TOPIC, 0) == store.min_offset(SCHEDULE_TOPIC, 0) == 10
        last = store.writer.journal.last(DELIVERY_APP)
        assert last is not None and last.version == 0 and last.physical_offset > 4096
        disk.now_ms += 5_000
        assert deliver_all(store) == 5
    (tmp_path / "config" / "delayOffset.json").unlink()
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        disk.now_ms += 5_000
        assert deliver_all(store) == 3
        assert deliver_all(store) == 0
    assert offsets_of_file(tmp_path) == {"1": 10, "2": 5, "3": 3}
    assert verify(tmp_path, config).ok


def test_a_topic_that_is_gone_is_created_again(tmp_path: Path) -> None:
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        store.put_message(Message("t", b"x", queue_id=3, delay_time_level=1))
    file = tmp_path / "config" / "topics.json"
    fields = json.loads(file.read_text())
    fields["topicConfigTable"] = {}
    file.write_text(json.dumps(fields))
    disk.now_ms += 1_000
    with MessageStore.open(tmp_path, SMALL, disk=disk) as store:
        assert deliver_all(store) == 1
        config = store.topic_config("t")
        assert config is not None and config.write_queue_nums == 8


def test_a_session_that_is_poisoned_delivers_nothing_and_says_so(tmp_path: Path) -> None:
    """Also while nothing is due: an answer of 0 would say that all is well."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"later", queue_id=0, delay_time_level=18))
        with pytest.raises(StorePoisonedError, match="a sync failed"):
            raise store.writer.poison("a sync failed (test)")
        with pytest.raises(StorePoisonedError, match="a sync failed"):
            store.deliver_delayed()


def test_the_app_of_deliveries_is_the_stores_own(tmp_path: Path) -> None:
    with pytest.raises(MessageIllegalError, match="belong to the store"):
        BatchRequest(app_id=DELIVERY_APP)
    with MessageStore.open(tmp_path, SMALL) as store, pytest.raises(MessageIllegalError, match="belong to the store"):
        store.start_batches(DELIVERY_APP, 3)


def test_deliveries_do_not_push_other_batches_out_of_the_journal(tmp_path: Path) -> None:
    config = ROOMY.replace(journal_retention=50)
    disk = ClockDisk(NOW_MS)
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        for version in range(20):
            store.append_batch(delayed([1, 0]), BatchRequest(app_id="a", version=version))
        services = store._attached.services
        assert services is not None
        delivery = services.delivery
        for _ in range(15):
            store.append_batch(delayed([1] * 20))
            disk.now_ms += 1_000
            while delivery.deliver(1).count:
                pass
    with MessageStore.open(tmp_path, config, disk=disk) as store:
        assert len(store.writer.journal.entries("a")) == 20
        assert store.append_batch(delayed([1, 0]), BatchRequest(app_id="a", version=19)).status == "known"
        assert 10 <= len(store.writer.journal.entries(DELIVERY_APP)) <= 20
        assert store.deliver_delayed().count == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
def test_a_kill_during_a_delivery_loses_and_doubles_nothing(tmp_path: Path, config: StoreConfig) -> None:
    """The deliverer dies at every third operation, also while it writes delayOffset.json; its successor delivers the rest."""

    class Dying(KillDisk):
        now_ms = NOW_MS

        def time_ns(self) -> int:
            return self.now_ms * 1_000_000

    base, root = tmp_path / "base", tmp_path / "store"
    clock = ClockDisk(NOW_MS)
    with MessageStore.open(base, config, disk=clock) as store:
        store.append_batch(delayed([1, 1, 2, 0, 1]))
    at = 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        disk = Dying(at)
        disk.now_ms = NOW_MS + 10_000
        try:
            with MessageStore.open(root, config, disk=disk) as store:
                deliver_all(store)
        except (Killed, StorePoisonedError):
            pass
        die(root)
        later = ClockDisk(NOW_MS + 10_000)
        with MessageStore.open(root, config, disk=later) as store:
            deliver_all(store)
            assert delivered(store) == bodies(5), at
        assert offsets_of_file(root) == {"1": 3, "2": 1}
        report = verify(root, config)
        assert report.ok, (at, report.findings[:3])
        if not disk.dead:
            break
        at += 3
    assert at > 40
