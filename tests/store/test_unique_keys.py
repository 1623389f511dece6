"""UNIQ_KEYs of messages that are put: which ones have one, that no two are equal, and that they find the message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from messagestore import Message, MessageBatch, MessageExt, MessageStore, StoreConfig
from messagestore.inspect.verify import verify
from small import SMALL, ClockDisk, bodies, columns

STAMPED = SMALL.replace(stamp_uniq_key=True)


def put_in_all_forms(store: MessageStore) -> None:
    """Eight messages in t/0."""
    message = Message("t", b"x", queue_id=0, keys=["own"], tags="A")
    batch = MessageBatch.from_messages([message, message])
    store.put_message(message)
    store.put_message_async(message).result()
    store.put_message_oneway(message)
    store.put_messages(batch)
    store.put_messages_async(batch).result()
    store.put_messages_oneway(MessageBatch.from_messages([message]))
    store.flush()


def messages(store: MessageStore, topic: str = "t", queue_id: int = 0) -> list[MessageExt]:
    return store.get_message(topic, queue_id, 0).messages


@pytest.mark.parametrize("config", [STAMPED, STAMPED.replace(enabled_append_prop_crc=True, broker_ip1="::1")])
def test_each_message_of_a_put_gets_a_key_of_its_own(tmp_path: Path, config: StoreConfig) -> None:
    with MessageStore.open(tmp_path / "s", config) as store:
        put_in_all_forms(store)
        found = messages(store)
        keys = [message.unique_key for message in found]
        assert len(set(keys)) == len(keys) == 8
        assert all(key is not None and len(key) == 32 for key in keys)
        for message in found:
            assert message.unique_key is not None
            assert store.query_message("t", message.unique_key) == [message]
            assert (message.keys, message.tags) == (("own",), "A")
        assert len(store.query_message("t", "own")) == 8
    assert verify(tmp_path / "s", config).ok


def test_without_the_setting_only_delayed_messages_have_one(tmp_path: Path) -> None:
    """It stays when they are delivered."""
    disk = ClockDisk(1_700_000_000_000)
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        put_in_all_forms(store)
        assert {message.unique_key for message in messages(store)} == {None}
        for _ in range(2):
            store.put_message(Message("d", b"x", queue_id=0, delay_time_level=1))
        waiting = messages(store, "SCHEDULE_TOPIC_XXXX")
        assert len({message.unique_key for message in waiting} - {None}) == 2
        disk.now_ms += 60_000
        assert store.deliver_delayed().count == 2
        delivered = messages(store, "d")
        assert [message.unique_key for message in delivered] == [message.unique_key for message in waiting]
        assert delivered[0].unique_key is not None
        assert store.query_message("d", delivered[0].unique_key) == delivered[:1]
    assert verify(tmp_path / "s", SMALL).ok


def test_a_message_that_is_sent_back_gets_one_unless_it_has_one(tmp_path: Path) -> None:
    """Also as a dead letter, which does not wait."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
        (message,) = messages(store)
        store.send_back(message, "g", -1)
        (dead,) = messages(store, "%DLQ%g")
        assert dead.unique_key is not None
        assert len(dead.unique_key) == 32
        store.send_back(dead, "g", -1)
        assert [each.unique_key for each in messages(store, "%DLQ%g")] == [dead.unique_key] * 2


def test_keys_that_rows_have_stay(tmp_path: Path) -> None:
    """`put_messages` fills the gaps only, and `append_batch` takes the rows as they are, so that a replay is known."""
    given = replace(columns(bodies(3), queues=1), unique_key=pa.array(["U1", None, "U3"]))
    with MessageStore.open(tmp_path / "s", STAMPED) as store:
        store.put_messages(MessageBatch(given))
        store.append_batch(given)
        keys = [message.unique_key for message in messages(store)]
    assert (keys[0], keys[2]) == ("U1", "U3")
    assert keys[1] is not None
    assert len(keys[1]) == 32
    assert keys[3:] == ["U1", None, "U3"]
