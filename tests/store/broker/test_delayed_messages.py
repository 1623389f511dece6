"""Delayed messages wait in SCHEDULE_TOPIC_XXXX as a broker's do: what is written, and what is read back after a rebuild."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from crash.harness import die
from crash.imitate import Broker
from messagestore import (
    BatchConflictError,
    BatchRequest,
    ConfigError,
    Message,
    MessageBatch,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
    StoreConfig,
    puts,
)
from messagestore.format import kernel
from messagestore.format.rows import SCHEDULE_TOPIC
from messagestore.inspect.verify import verify
from small import SMALL, SMALL_ASYNC, bodies, delayed, read_all

PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC
OTHER_LEVELS = SMALL.replace(message_delay_level="7s 2m 1d")
BIG = "x" * 32_740


def due_times(store: MessageStore, queue_id: int) -> list[int]:
    """How long after its store time each message of a queue is due."""
    messages = store.get_message(SCHEDULE_TOPIC, queue_id, 0, max_count=1000).messages
    codes = store.view.units(SCHEDULE_TOPIC, queue_id, 0, len(messages))["tags_code"]
    return [int(code) - message.store_timestamp_ms for code, message in zip(codes, messages, strict=True)]


@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC, SMALL.replace(enabled_append_prop_crc=True)])
def test_a_delayed_put_waits_where_a_brokers_does(tmp_path: Path, config: StoreConfig) -> None:
    with MessageStore.open(tmp_path, config) as store:
        message = Message(
            "t", b"later", queue_id=5, keys=["k"], tags="tag", properties={"own": "1"}, delay_time_level=3
        )
        result = store.put_message(message)
        assert (result.queue_id, result.queue_offset) == (2, 0)
        (found,) = store.get_message(SCHEDULE_TOPIC, 2, 0).messages
        assert found.body == b"later"
        assert (found.properties, found.keys, found.tags) == ({"own": "1"}, ("k",), "tag")
        waiting = {name: found.system_properties[name] for name in ("DELAY", "REAL_TOPIC", "REAL_QID")}
        assert waiting == {"DELAY": "3", "REAL_TOPIC": "t", "REAL_QID": "5"}
        assert due_times(store, 2) == [10_000]
        assert store.max_offset("t", 5) == 0
        assert [m.body for m in store.query_message(SCHEDULE_TOPIC, "k")] == [b"later"]
        config_of_topic = store.topic_config("t")
        assert config_of_topic is not None and config_of_topic.write_queue_nums == 8
    assert verify(tmp_path, config).ok


@pytest.mark.parametrize(("level", "delay_s"), [(1, 1), (18, 7200), (19, 7200), ((1 << 31) - 1, 7200)])
def test_a_level_above_the_last_one_becomes_the_last_one(tmp_path: Path, level: int, delay_s: int) -> None:
    """On a put, in a batch, and when the queues are made again."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.put_message(Message("t", b"later", queue_id=0, delay_time_level=level))
        store.append_batch(delayed([level]))
        queue_id = min(level, 18) - 1
        for message in store.get_message(SCHEDULE_TOPIC, queue_id, 0).messages:
            assert message.system_properties["DELAY"] == str(queue_id + 1)
        assert due_times(store, queue_id) == [delay_s * 1000] * 2
    shutil.rmtree(tmp_path / "consumequeue")
    die(tmp_path)
    (tmp_path / "abort").write_bytes(b"1")
    with MessageStore.open(tmp_path, SMALL) as store:
        assert due_times(store, queue_id) == [delay_s * 1000] * 2


def test_the_levels_of_a_store_count_on_puts_in_rebuilds_and_in_verify(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, OTHER_LEVELS) as store:
        for level in (1, 2, 3, 9):
            store.put_message(Message("t", b"later", queue_id=0, delay_time_level=level))
        store.append_batch(delayed([1] * 60))
    wanted = {0: [7_000] * 61, 1: [120_000], 2: [86_400_000] * 2}

    def check() -> None:
        with MessageStore.open_read_only(tmp_path, OTHER_LEVELS) as store:
            assert {queue_id: due_times(store, queue_id) for queue_id in store.topics()[SCHEDULE_TOPIC]} == wanted
        assert verify(tmp_path, OTHER_LEVELS).ok

    check()
    assert verify(tmp_path, SMALL).ok
    file = next((tmp_path / "consumequeue" / SCHEDULE_TOPIC / "1").iterdir())
    right = file.read_bytes()
    with open(file, "r+b") as unit:
        unit.seek(12)
        unit.write((int.from_bytes(right[12:20], "big") + 1000).to_bytes(8, "big"))
    report = verify(tmp_path, OTHER_LEVELS)
    assert not report.ok
    assert any("delay levels say" in note for note in report.notes)
    file.write_bytes(right)
    shutil.rmtree(tmp_path / "consumequeue")
    (tmp_path / "abort").write_bytes(b"1")
    with MessageStore.open(tmp_path, SMALL):
        pass
    check()


@pytest.mark.parametrize(
    "levels", ["", "1s  5s", "1x", "s", "1s 5", "-1s", "99999999999d", " 1s", " ".join(["1s"] * 1001)]
)
def test_delay_levels_that_a_broker_does_not_understand_are_refused(levels: str) -> None:
    with pytest.raises(ConfigError, match="messageDelayLevel"):
        StoreConfig(message_delay_level=levels)


@pytest.mark.parametrize("sys_flag", [0, PREPARED, COMMIT, ROLLBACK])
def test_half_messages_are_not_rerouted(tmp_path: Path, sys_flag: int) -> None:
    """As RocketMQ: PREPARED and ROLLBACK stay with their topic, and keep their level; COMMIT waits."""
    with MessageStore.open(tmp_path, SMALL) as store:
        put = store.put_message(Message("t", b"x", queue_id=1, sys_flag=sys_flag, delay_time_level=2))
        found = store.look_message_by_offset(put.physical_offset)
        assert found is not None
        assert found.system_properties["DELAY"] == "2"
        if sys_flag in (0, COMMIT):
            assert (found.topic, found.queue_id, found.system_properties["REAL_QID"]) == (SCHEDULE_TOPIC, 1, "1")
        else:
            assert (found.topic, found.queue_id) == ("t", 1)
            assert "REAL_TOPIC" not in found.system_properties


@pytest.mark.parametrize("with_kernel", [True, False], ids=["kernel", "scalar"])
@pytest.mark.parametrize("config", [SMALL, SMALL.replace(enabled_append_prop_crc=True, broker_ip1="::1")])
def test_delayed_rows_of_a_batch(
    tmp_path: Path, config: StoreConfig, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a level wait, the others are there at once; each record is what a single put would have written."""
    if not with_kernel:
        monkeypatch.setattr(kernel, "lib", None)
    monkeypatch.setattr(puts, "new_unique_key", lambda _: "U" * 32)  # a delayed put has one, a row has its own
    levels = [0, 3, None, 1, 3, 0, 40, 3]
    with MessageStore.open(tmp_path, config) as store:
        store.append_batch(replace(delayed(levels), unique_key=pa.array(["U" * 32] * 8)))
        assert read_all(store, "t", 0) == [bodies(8)[0], bodies(8)[2]]
        assert read_all(store, "t", 1) == [bodies(8)[5]]
        waiting = {queue_id: store.get_message(SCHEDULE_TOPIC, queue_id, 0).messages for queue_id in (0, 2, 17)}
        assert [[m.body for m in some] for some in waiting.values()] == [
            [bodies(8)[3]],
            [bodies(8)[4], bodies(8)[1], bodies(8)[7]],
            [bodies(8)[6]],
        ]
        for queue_id, delay_ms in ((0, 1_000), (2, 10_000), (17, 7_200_000)):
            assert due_times(store, queue_id) == [delay_ms] * len(waiting[queue_id])
        for message in waiting[2]:
            number = int(message.body[:6])
            single = Message(
                "t",
                message.body,
                queue_id=number % 2,
                keys=[f"k{number}"],
                tags="tag",
                delay_time_level=3,
                born_timestamp_ms=message.born_timestamp_ms,
                born_host=message.born_host,
            )
            put = store.put_message(single)
            one, other = (store.writer.log.read(m, s) for m, s in ((message.physical_offset, message.size), put[2:4]))
            assert message.size == put.size
            same = [a == b for a, b in zip(one, other, strict=True)]
            assert all(same[:20] + same[36:56] + same[80:-20])
    assert verify(tmp_path, config).ok


def test_a_batch_with_delays_is_known_when_it_comes_again(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        request = BatchRequest(app_id="a", version=0)
        assert store.append_batch(delayed([0, 3, 5]), request).status == "appended"
        assert store.append_batch(delayed([0, 3, 5]), request).status == "known"
        with pytest.raises(BatchConflictError):
            store.append_batch(delayed([0, 3, 6]), request)
        assert sum(store.max_offset(SCHEDULE_TOPIC, queue_id) for queue_id in range(18)) == 2


def test_the_same_delayed_rows_for_another_topic_are_another_batch(tmp_path: Path) -> None:
    """Otherwise a second sink under one app id would lose its rows without an error."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.append_batch(delayed([3, 3], "t"), BatchRequest(app_id="a", version=0))
        with pytest.raises(BatchConflictError, match="topics SCHEDULE_TOPIC_XXXX, u"):
            store.append_batch(delayed([3, 3], "u"), BatchRequest(app_id="a", version=0))
    for name in ("spark/journal", "spark/state"):
        (tmp_path / name).unlink()
    with MessageStore.open(tmp_path, SMALL) as store:
        assert store.append_batch(delayed([3, 3], "t"), BatchRequest(app_id="a", version=0)).status == "known"
    assert verify(tmp_path, SMALL).ok


def test_the_real_topic_of_delayed_rows_must_be_there_or_is_created(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        with pytest.raises(MessageIllegalError, match="autoCreateTopic is false"):
            store.append_batch(delayed([3]), BatchRequest(auto_create_topic=False))
        store.create_topic("one", queue_nums=1)
        with pytest.raises(MessageIllegalError, match="queue id: found 1"):
            store.append_batch(delayed([3, 3], "one"))
        assert SCHEDULE_TOPIC not in store.topics()
        store.append_batch(delayed([3, 3]), BatchRequest(write_queue_nums=3))
        config = store.topic_config("t")
        assert config is not None and config.write_queue_nums == 3


@pytest.mark.parametrize("level", [-1, True, "3", 3.0, 1 << 31, None])
def test_delay_levels_that_are_none_are_refused(tmp_path: Path, level: object) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        with pytest.raises(MessageIllegalError, match="delay level"):
            store.put_message(Message("t", b"x", delay_time_level=level))  # type: ignore[arg-type]
        assert store.topics() == {}


def test_rows_with_delays_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    """The first bad row of the batch, by its number; nothing was written."""
    large = pa.array([[("own", BIG)]] * 3, pa.map_(pa.string(), pa.string()))
    with MessageStore.open(tmp_path, SMALL) as store:
        with pytest.raises(MessageIllegalError, match=r"row 2: delay level: found -1"):
            store.append_batch(delayed([1, 0, -1]))
        with pytest.raises(MessageIllegalError, match=r"row 1: properties: found \d+ bytes; allowed are 32767"):
            store.append_batch(delayed([0, 1, 1], properties=large))
        with pytest.raises(MessageIllegalError, match="reserved"):
            store.append_batch(delayed([1], SCHEDULE_TOPIC))
        with pytest.raises(MessageIllegalError, match="Use append_batch"):
            store.put_messages(MessageBatch(delayed([0, 0, 1]).slice(2, 1)))
        with pytest.raises(MessageIllegalError, match="delay_time_level"):
            MessageBatch.from_messages([Message("t", b"x", delay_time_level=1)])
        assert store.topics() == {}


@pytest.mark.parametrize(
    "name", ["TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "DELAY"]
)
def test_timer_messages_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        with pytest.raises(MessageIllegalError, match=f"{name}.*delay_time_level"):
            store.put_message(Message("t", b"x", properties={name: "1795170401450"}))
        rows = pa.record_batch(
            {"body": [b"x"], "properties": pa.array([[(name, "1")]], pa.map_(pa.string(), pa.string()))}
        )
        with pytest.raises(MessageIllegalError, match=f"{name}.*delay_time_level"):
            store.append_batch(MessageColumns.from_arrow(rows, topic="t", queue_id=0))


def test_timer_messages_of_a_broker_are_read(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    timer = [
        ("TIMER_OUT_MS", "1795170401000"),
        ("REAL_TOPIC", "t"),
        ("REAL_QID", "3"),
        ("TIMER_DELIVER_MS", "1795170401450"),
    ]
    Broker(root, SMALL).put("rmq_sys_wheel_timer", b"later", 0, properties=timer)
    with MessageStore.open(root, SMALL) as store:
        (found,) = store.get_message("rmq_sys_wheel_timer", 0, 0).messages
        assert found.body == b"later"
        assert found.system_properties == dict(timer)
    assert verify(root, SMALL).ok


def test_the_due_time_of_many_delayed_records_is_read_back(tmp_path: Path) -> None:
    """More records than are read one by one, among others, with damaged levels of a foreign writer."""
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, SMALL)
    levels = ["3", "18", "x", "0", "99", "٣", "4294967297"]
    for number in range(70):
        level = levels[number % len(levels)]
        broker.put(
            SCHEDULE_TOPIC if number % 3 else "t", b"%d" % number, 0, properties=[("DELAY", level), ("TAGS", "A")]
        )
    shutil.rmtree(root / "consumequeue")
    with MessageStore.open(root, SMALL) as store:
        found = store.get_message(SCHEDULE_TOPIC, 0, 0, max_count=100).messages
        due = due_times(store, 0)
        known = {"3": 10_000, "18": 7_200_000, "99": 7_200_000, "4294967297": 7_200_000}
        assert len(found) == 46
        for message, after_ms in zip(found, due, strict=True):
            level = message.system_properties["DELAY"]
            assert after_ms == known.get(level, 65 - message.store_timestamp_ms)
