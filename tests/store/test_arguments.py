"""Wrong arguments of the public functions: refused by name, with what is allowed, before anything is touched."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from messagestore import (
    BatchRequest,
    ConfigError,
    Consumer,
    Message,
    MessageBatch,
    MessageColumns,
    MessageStore,
    OffsetOutOfRangeError,
    StoreError,
    reset_offsets,
)
from small import SMALL

NO_NUMBERS: list[Any] = [float("nan"), 1.5, np.float64(1), float("inf"), "3", "", b"1", True, []]
NO_NUMBER_OR_NONE: list[Any] = [*NO_NUMBERS, None]
NO_TEXT: list[Any] = [None, 1, b"t", [], "", "\ud800", float("nan")]
NO_TOPIC: list[Any] = [*NO_TEXT, "a/b", "\0", "x" * 300]
ROWS = pa.record_batch({"body": [b"x"]})
COLUMNS = MessageColumns.from_arrow(ROWS, topic="u", queue_id=0)

Call = Callable[[MessageStore, Any], Any]
READS: dict[str, tuple[Call, list[Any]]] = {
    "topic: max_offset": (lambda s, v: s.max_offset(v, 0), NO_TOPIC),
    "topic: min_offset": (lambda s, v: s.min_offset(v, 0), NO_TOPIC),
    "topic: get_message": (lambda s, v: s.get_message(v, 0, 0), NO_TOPIC),
    "topic: get_batch": (lambda s, v: s.get_batch(v, 0, 0), NO_TOPIC),
    "topic: query_message": (lambda s, v: s.query_message(v, "k"), NO_TOPIC),
    "topic: queue_offset_by_time": (lambda s, v: s.queue_offset_by_time(v, 0, 0), NO_TOPIC),
    "topic: read": (lambda s, v: s.read(v, 0, 0), NO_TOPIC),
    "topic: wait": (lambda s, v: s.wait(v, 0, 0), NO_TOPIC),
    "topic: follow": (lambda s, v: s.follow(v, 0, 0), NO_TOPIC),
    "queue id: wait": (lambda s, v: s.wait("t", v, 0), [*NO_NUMBER_OR_NONE, -1]),
    "queue id: follow": (lambda s, v: s.follow("t", v, 0), [*NO_NUMBER_OR_NONE, -1]),
    "queue_offset: wait": (lambda s, v: s.wait("t", 0, v), [*NO_NUMBER_OR_NONE, -1]),
    "start: follow": (lambda s, v: s.follow("t", 0, v), NO_NUMBER_OR_NONE),
    "timeout: wait": (lambda s, v: s.wait("t", 0, 0, v), [float("nan"), -1, "3", b"1", True, []]),
    "timeout: follow": (lambda s, v: s.follow("t", 0, 0, timeout=v), [float("nan"), -0.5, "3", b"1", True, []]),
    "columns: follow": (lambda s, v: s.follow("t", 0, 0, columns=v), [["nothing"], [], ["body", "body"]]),
    "topic: topic_config": (lambda s, v: s.topic_config(v), NO_TEXT),
    "queue id: max_offset": (lambda s, v: s.max_offset("t", v), [*NO_NUMBER_OR_NONE, -1]),
    "queue id: min_offset": (lambda s, v: s.min_offset("t", v), [*NO_NUMBER_OR_NONE, -1]),
    "queue id: get_message": (lambda s, v: s.get_message("t", v, 0), [*NO_NUMBER_OR_NONE, -1]),
    "queue id: get_batch": (lambda s, v: s.get_batch("t", v, 0), [*NO_NUMBER_OR_NONE, -1]),
    "queue id: queue_offset_by_time": (lambda s, v: s.queue_offset_by_time("t", v, 0), [*NO_NUMBER_OR_NONE, -1]),
    "queue id: read": (lambda s, v: s.read("t", v, 0), [*NO_NUMBER_OR_NONE, -1]),
    "queue_offset: get_message": (lambda s, v: s.get_message("t", 0, v), NO_NUMBER_OR_NONE),
    "queue_offset: get_batch": (lambda s, v: s.get_batch("t", 0, v), NO_NUMBER_OR_NONE),
    "max_count: get_message": (lambda s, v: s.get_message("t", 0, 0, v), NO_NUMBER_OR_NONE),
    "max_count: get_batch": (lambda s, v: s.get_batch("t", 0, 0, v), NO_NUMBER_OR_NONE),
    "max_count: query_message": (lambda s, v: s.query_message("t", "k", v), [*NO_NUMBERS, 0, -1]),
    "key: query_message": (lambda s, v: s.query_message("t", v), NO_TEXT),
    "begin_ms: query_message": (lambda s, v: s.query_message("t", "k", begin_ms=v), NO_NUMBER_OR_NONE),
    "end_ms: query_message": (lambda s, v: s.query_message("t", "k", end_ms=v), NO_NUMBERS),
    "physical_offset: look_message_by_offset": (lambda s, v: s.look_message_by_offset(v), NO_NUMBER_OR_NONE),
    "offset message id: look_message_by_id": (lambda s, v: s.look_message_by_id(v), [*NO_TEXT, "zz" * 16, "f" * 32]),
    "timestamp_ms: queue_offset_by_time": (lambda s, v: s.queue_offset_by_time("t", 0, v), NO_NUMBER_OR_NONE),
    "boundary: queue_offset_by_time": (
        lambda s, v: s.queue_offset_by_time("t", 0, 0, v),
        ["mid", "", "LOWER", None, 1, []],
    ),
    "start: read": (lambda s, v: s.read("t", 0, v), NO_NUMBER_OR_NONE),
    "end: read": (lambda s, v: s.read("t", 0, 0, v), NO_NUMBERS),
    "columns: get_batch of an empty queue": (
        lambda s, v: s.get_batch("t", 7, 0, columns=v),
        [["nope"], [], "body", None, ["body", "body"], [1], 5],
    ),
    "columns: read of an empty queue": (
        lambda s, v: s.read("t", 7, 0, columns=v),
        [["nope"], [], "body", None, ["body", "body"], [1], 5],
    ),
}
WRITES: dict[str, tuple[Call, list[Any]]] = {
    "message: put_message": (lambda s, v: s.put_message(v), [None, "x", 5]),
    "wait_store_msg_ok: put_message": (
        lambda s, v: s.put_message(Message("t", b"", wait_store_msg_ok=v)),
        ["no", 0, None],
    ),
    "wait_store_msg_ok: half_message": (
        lambda s, v: s.half_message(Message("t", b"", wait_store_msg_ok=v), "g"),
        ["no", 0, None],
    ),
    "queue id: put_message": (
        lambda s, v: s.put_message(Message("t", b"", queue_id=v)),
        [*NO_NUMBERS, -1.0, -2, 1 << 70],
    ),
    "batch: put_messages": (lambda s, v: s.put_messages(v), [None, "x", 5, []]),
    "messages: from_messages": (lambda _, v: MessageBatch.from_messages(v), [None, 5, "x", [1], [None]]),
    "batch: from_arrow": (lambda _, v: MessageBatch.from_arrow(v, topic="t"), [None, "x", 5, {}]),
    "column 'body': from_arrow": (
        lambda _, v: MessageColumns.from_arrow(v, topic="t"),
        [pa.record_batch([pa.array([b"x"]), pa.array([b"y"])], names=["body", "body"])],
    ),
    "columns: append_batch": (
        lambda s, v: s.append_batch(v),
        [None, "x", 5, [1], {"body": [b"x"]}, [COLUMNS, None], pa.chunked_array([[b"x"]])],
    ),
    "topic: append_batch": (lambda s, v: s.append_batch(ROWS, topic=v, queue_id=0), [None, *NO_TOPIC[1:]]),
    "queue id: append_batch": (lambda s, v: s.append_batch(ROWS, topic="u", queue_id=v), [*NO_NUMBERS, -1, 65536]),
    "topic: append_batch of MessageColumns": (lambda s, v: s.append_batch(COLUMNS, topic=v), ["u"]),
    "queue_id: append_batch of MessageColumns": (lambda s, v: s.append_batch([COLUMNS], queue_id=v), [0]),
    "request: append_batch": (lambda s, v: s.append_batch(COLUMNS, v), ["x", 5, [], {}]),
    "txnAppId: BatchRequest": (lambda _, v: BatchRequest(app_id=v, version=0), [1, "", b"t", "a b", [], "x" * 5000]),
    "txnVersion: BatchRequest": (
        lambda _, v: BatchRequest(app_id="a", version=v),
        [*NO_NUMBER_OR_NONE, -1, 1 << 63],
    ),
    "stream_batch_id: BatchRequest": (lambda _, v: BatchRequest(stream_batch_id=v), [*NO_NUMBERS, -1]),
    "write_queue_nums: BatchRequest": (lambda _, v: BatchRequest(write_queue_nums=v), [*NO_NUMBERS, 0, 65537]),
    "auto_create_topic: BatchRequest": (lambda _, v: BatchRequest(auto_create_topic=v), ["false", 0, None]),
    "flush_disk_type: BatchRequest": (lambda _, v: BatchRequest(flush_disk_type=v), ["sync", "", None, 1]),
    "txnAppId: start_batches": (lambda s, v: s.start_batches(v, 3), [None, 1, "", "a b"]),
    "start version: start_batches": (lambda s, v: s.start_batches("a", v), [*NO_NUMBER_OR_NONE, 0, -1, 1 << 63]),
    "topic: create_topic": (lambda s, v: s.create_topic(v), NO_TOPIC),
    "writeQueueNums: create_topic": (lambda s, v: s.create_topic("n", v), [*NO_NUMBER_OR_NONE, 0, 65537]),
    "perm: create_topic": (lambda s, v: s.create_topic("n", perm=v), [*NO_NUMBER_OR_NONE, -1, 99]),
    "order: create_topic": (lambda s, v: s.create_topic("n", order=v), [None, 0, b"1", "yes", np.int64(1)]),
    "attributes: create_topic": (
        lambda s, v: s.create_topic("n", attributes=v),
        ["x", 5, {"a": 1}, {1: "a"}, {"": "a"}, [("a", "b")]],
    ),
    "order: alter_topic": (lambda s, v: s.alter_topic("t", order=v), [0, b"1", "yes"]),
    "attributes: alter_topic": (lambda s, v: s.alter_topic("t", attributes=v), ["x", 5, {"a": 1}]),
    "readQueueNums: alter_topic": (lambda s, v: s.alter_topic("t", read_queue_nums=v), [*NO_NUMBERS, 0, 65537]),
}


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        for number in range(3):
            store.put_message(Message("t", b"%d" % number, queue_id=0, keys=["k"]))
        store.flush()
        yield store


@pytest.mark.parametrize("case", READS)
def test_a_wrong_argument_of_a_read_is_named(store: MessageStore, case: str) -> None:
    """Some were taken for another value: "mid" for "upper", 1.5 for a queue without messages."""
    call, values = READS[case]
    for value in values:
        with pytest.raises(StoreError) as caught:
            call(store, value)
        assert str(caught.value).startswith(case.partition(":")[0]), value
        assert ("found " in str(caught.value) and "allowed " in str(caught.value)) or "none; give" in str(caught.value)


@pytest.mark.parametrize("case", WRITES)
def test_a_wrong_argument_of_a_write_is_named_and_changes_nothing(
    store: MessageStore, tmp_path: Path, case: str
) -> None:
    """`create_topic(order=b"1")` stayed in memory and failed every later change; an app id of None began an app."""
    call, values = WRITES[case]
    before = files(tmp_path / "store")
    for value in values:
        with pytest.raises(StoreError) as caught:
            call(store, value)
        assert case.partition(":")[0] in str(caught.value), value
        assert "found " in str(caught.value), value
    assert files(tmp_path / "store") == before
    store.create_topic("later", 2)
    assert store.put_message(Message("t", b"3", queue_id=0)).queue_offset == 3


URLS = ["http://localhost:8443", "https://store.example:8443", "rocketmq://ns1:9876", "s3://bucket/x", "file:///tmp/x"]


@pytest.mark.parametrize("root", URLS)
def test_a_url_makes_no_store_in_a_folder_of_that_name(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a relative path it would be one, and messages for a store on another host would go there."""
    monkeypatch.chdir(tmp_path)
    opens: list[Callable[[], Any]] = [
        lambda: MessageStore.open(root),
        lambda: MessageStore.open_read_only(root),
        lambda: Consumer(root, "g", "t"),
        lambda: reset_offsets(root, "g", "latest", ["t"]),
    ]
    for opened in opens:
        with pytest.raises(ConfigError, match=r"root: found '.*://.*'; allowed is .* run it on the host of the store"):
            opened()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", [None, 5, "", b"x", "\0", os.fsencode("/tmp/x")])
def test_a_root_that_is_no_path(root: Any) -> None:
    """An empty path was the current directory."""
    for opened in (MessageStore.open, MessageStore.open_read_only):
        with pytest.raises(StoreError, match=r"root: found .*; allowed is the path of a folder"):
            opened(root)


@pytest.mark.parametrize("config", ["x", 5, {}, []])
def test_settings_that_are_no_settings(tmp_path: Path, config: Any) -> None:
    """An empty dictionary counted as the defaults."""
    MessageStore.open(tmp_path / "s", SMALL).close()
    for opened in (MessageStore.open, MessageStore.open_read_only):
        with pytest.raises(StoreError, match=r"config: found .*; allowed is StoreConfig"):
            opened(tmp_path / "s", config)


def test_whole_numbers_of_numpy_count(store: MessageStore) -> None:
    """Offsets often come out of an array."""
    assert store.max_offset("t", np.int32(0)) == 3  # type: ignore[arg-type]
    found = store.get_message("t", np.int64(0), np.int64(1), np.int64(1))  # type: ignore[arg-type]
    assert [message.body for message in found.messages] == [b"1"]
    assert store.start_batches("a", np.int64(3)).status == "appended"  # type: ignore[arg-type]


@pytest.mark.parametrize(("queue_id", "high"), [(0, 3), (7, 0)])
def test_a_read_below_zero_is_out_of_range(store: MessageStore, queue_id: int, high: int) -> None:
    """It said that the store went backwards. RocketMQ and `get_message` call such an offset too small."""
    with pytest.raises(
        OffsetOutOfRangeError, match=f"t/{queue_id}: found start -5; the queue holds 0 to {high}"
    ) as caught:
        next(store.read("t", queue_id, -5))
    assert (caught.value.queue_offset, caught.value.min, caught.value.max) == (-5, 0, high)
