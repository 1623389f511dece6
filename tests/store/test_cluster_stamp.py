"""The property CLUSTER of messages that are put: which ones have it, where it is, and that a replay stays known."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from crash.imitate import walk
from messagestore import (
    BatchRequest,
    ConfigError,
    Message,
    MessageBatch,
    MessageExt,
    MessageIllegalError,
    MessageStore,
    StoreConfig,
)
from messagestore.format import kernel
from messagestore.inspect.verify import verify
from small import SMALL, ClockDisk, bodies, columns

STAMPED = SMALL.replace(stamp_cluster=True, broker_cluster_name="north")
OWN_TOPICS = ("rmq_sys_spark_sink", "RMQ_SYS_TRANS_OP_HALF_TOPIC")


def put_in_all_forms(store: MessageStore) -> None:
    """Eleven messages in t/0, d and u/0, and one half message that is committed."""
    message = Message("t", b"x", queue_id=0, keys=["own"], tags="A", properties={"gate": "B12"})
    store.put_message(message)
    store.put_message_async(message).result()
    store.put_message_oneway(message)
    store.put_messages(MessageBatch.from_messages([message, message]))
    store.put_message(Message("d", b"x", queue_id=0, delay_time_level=1))
    store.half_message(Message("t", b"half", queue_id=0), "g").commit()
    store.append_batch(columns(bodies(3), topic="u"), BatchRequest(app_id="app", version=0))
    store.flush()


def clusters(root: Path) -> dict[str, set[str | None]]:
    """The values of CLUSTER in the records of each topic."""
    found: dict[str, set[str | None]] = {}
    for record in walk(root)[0]:
        found.setdefault(record["topic"], set()).add(record["all_properties"].get("CLUSTER"))
    return found


@pytest.mark.parametrize("lib", [kernel.lib, None], ids=["kernel", "scalar"])
@pytest.mark.parametrize("config", [STAMPED, STAMPED.replace(enabled_append_prop_crc=True, broker_ip1="::1")])
def test_messages_of_a_user_are_stamped_and_the_store_s_own_are_not(
    tmp_path: Path, config: StoreConfig, lib: object
) -> None:
    """The stamp is behind the user's properties, where a broker puts it in the messages of a batch."""
    disk = ClockDisk(1_700_000_000_000)
    with mock.patch.object(kernel, "lib", lib), MessageStore.open(tmp_path / "s", config, disk=disk) as store:
        put_in_all_forms(store)
        disk.now_ms += 60_000
        assert store.deliver_delayed().count == 1
    found = clusters(tmp_path / "s")
    assert {topic: found.pop(topic) for topic in OWN_TOPICS} == {topic: {None} for topic in OWN_TOPICS}
    assert set(found) >= {"t", "d", "u", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"}
    assert set(map(frozenset, found.values())) == {frozenset({"north"})}
    last = ["__CRC32#"] if config.enabled_append_prop_crc else []
    for record in walk(tmp_path / "s")[0]:
        if record["topic"] == "t" and record["body"] == b"x":
            assert list(record["all_properties"]) == ["KEYS", "TAGS", "gate", "CLUSTER", *last]
    assert verify(tmp_path / "s", config).ok


def test_without_the_setting_nothing_is_stamped(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "s", SMALL.replace(broker_cluster_name="north")) as store:
        put_in_all_forms(store)
    assert set().union(*clusters(tmp_path / "s").values()) == {None}


def test_a_message_that_is_sent_back_keeps_its_stamp_and_gets_none(tmp_path: Path) -> None:
    """As by a broker, which stamps what a producer sends."""

    def sent_back(store: MessageStore) -> MessageExt:
        (message,) = store.get_message("t", 0, 0).messages
        store.send_back(message, "g", -1)
        return store.get_message("%DLQ%g", 0, 0).messages[0]

    with MessageStore.open(tmp_path / "bare", SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    with MessageStore.open(tmp_path / "bare", STAMPED) as store:
        assert "CLUSTER" not in sent_back(store).system_properties
    with MessageStore.open(tmp_path / "stamped", STAMPED) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    with MessageStore.open(tmp_path / "stamped", STAMPED.replace(broker_cluster_name="south")) as store:
        assert sent_back(store).system_properties["CLUSTER"] == "north"
    assert verify(tmp_path / "stamped", SMALL).ok


def test_a_batch_that_comes_again_is_known_whatever_the_setting_is(tmp_path: Path) -> None:
    """The stamp is the store's and not the user's."""
    configs = [SMALL, STAMPED, STAMPED.replace(broker_cluster_name="south"), SMALL]
    for version, first in enumerate(configs):
        found = []
        for config in [first, *configs]:
            with MessageStore.open(tmp_path / "s", config) as store:
                request = BatchRequest(app_id="app", version=version)
                found.append(store.append_batch(columns(bodies(3, start=version)), request).status)
        assert found == ["appended"] + ["known"] * len(configs)
    with MessageStore.open_read_only(tmp_path / "s") as reader:
        assert reader.max_offset("t", 0) + reader.max_offset("t", 1) == 3 * len(configs)


@pytest.mark.parametrize("lib", [kernel.lib, None], ids=["kernel", "scalar"])
def test_a_stamp_counts_among_the_properties(tmp_path: Path, lib: object) -> None:
    """A message that just fits without it is refused with it, alone and as one of a batch."""
    room = 32_767 - len("name=;")
    one = Message("t", b"x", queue_id=0, properties={"name": "v" * room})
    config = SMALL.replace(mapped_file_size_commit_log=1 << 20, max_message_size=1 << 16)
    with mock.patch.object(kernel, "lib", lib):
        with MessageStore.open(tmp_path / "bare", config) as store:
            store.put_message(one)
            store.put_messages(MessageBatch.from_messages([one]))
        with MessageStore.open(tmp_path / "s", config.replace(stamp_cluster=True)) as store:
            for put in (lambda: store.put_message(one), lambda: store.put_messages(MessageBatch.from_messages([one]))):
                with pytest.raises(MessageIllegalError, match="properties: found 32790 bytes; allowed are 32767"):
                    put()
            assert store.topics() == {}


@pytest.mark.parametrize("name", ["", "a\x01b", "a\nb", "x" * 256, "\udc80"])
def test_a_name_that_cannot_be_stamped_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"brokerClusterName: found .*; allowed is printable text of 1 to 255 bytes"):
        SMALL.replace(stamp_cluster=True, broker_cluster_name=name)
    assert SMALL.replace(broker_cluster_name=name).broker_cluster_name == name  # a broker's file may say what it wants
