"""Settings of consumer groups: created, altered and read, and never lost with what else is in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from messagestore import (
    ConfigError,
    CorruptionError,
    Message,
    MessageIllegalError,
    MessageStore,
    StoreClosedError,
    StoreError,
)
from messagestore.files.config_file import parsed
from messagestore.files.consumer_filters import consumer_filters
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify
from small import SMALL, filled


def path_of(root: Path, name: str = "subscriptionGroup.json") -> Path:
    (root / "config").mkdir(parents=True, exist_ok=True)
    return root / "config" / name


def fields(root: Path) -> dict[str, Any]:
    return parsed(path_of(root).read_text())


def test_a_group_is_created_with_rocketmqs_defaults(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        assert store.group_config("boards") is None
        assert not path_of(tmp_path).exists(), "looking creates nothing"
        made = store.create_group("boards")
        assert (made.retry_max_times, made.retry_queue_nums, made.consume_enable) == (16, 1, True)
        assert store.create_group("boards", retry_max_times=1) == made, "it stays as it is"
        assert store.alter_group("boards", retry_max_times=0, consume_enable=False).retry_queue_nums == 1
    assert fields(tmp_path)["subscriptionGroupTable"] == {
        "boards": {"consumeEnable": False, "groupName": "boards", "retryMaxTimes": 0, "retryQueueNums": 1}
    }
    assert fields(tmp_path)["dataVersion"]["counter"] == 2
    with MessageStore.open(tmp_path, SMALL) as store:
        config = store.group_config("boards")
        assert config is not None
        assert (config.retry_max_times, config.consume_enable) == (0, False)
    assert verify(tmp_path, SMALL).ok


def test_what_is_not_named_stays(tmp_path: Path) -> None:
    """Fields of the group, of other groups and of the file that this project does not know, and the version."""
    table = {
        "boards": {"groupName": "boards", "retryMaxTimes": -1, "newField": {"1": [2]}, "attributes": {"a": "b"}},
        "others": {"consumeMessageOrderly": True, "subscriptionDataSet": [{"topic": "t"}]},
    }
    before = {
        "subscriptionGroupTable": table,
        "forbiddenTable": {"boards": {"t": 2}},
        "dataVersion": {"counter": 7, "stateVersion": 3, "timestamp": 5, "newer": 1},
    }
    filled(tmp_path, 2)
    path_of(tmp_path).write_text(json.dumps(before))
    with MessageStore.open(tmp_path, SMALL) as store:
        store.alter_group("boards", consume_enable=False)
    after = fields(tmp_path)
    assert after["forbiddenTable"] == before["forbiddenTable"]
    assert after["subscriptionGroupTable"]["boards"] == table["boards"] | {"consumeEnable": False, "retryQueueNums": 1}
    others = {"groupName": "others", "consumeEnable": True, "retryMaxTimes": 16, "retryQueueNums": 1}
    assert after["subscriptionGroupTable"]["others"] == table["others"] | others
    version = after["dataVersion"]
    assert (version["counter"], version["stateVersion"], version["newer"]) == (8, 3, 1)


def test_another_process_is_not_overwritten(tmp_path: Path) -> None:
    """The table is read when it is changed, not when the store is opened."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.create_group("boards")
        changed = fields(tmp_path)
        changed["subscriptionGroupTable"]["theirs"] = {"groupName": "theirs", "retryMaxTimes": 9}
        path_of(tmp_path).write_text(json.dumps(changed))
        theirs = store.group_config("theirs")
        assert theirs is not None and theirs.retry_max_times == 9
        store.alter_group("boards", retry_max_times=1)
    assert fields(tmp_path)["subscriptionGroupTable"]["theirs"]["retryMaxTimes"] == 9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"retry_max_times": -1}, "retryMaxTimes: found -1; allowed is 0 to 2147483647"),
        ({"retry_max_times": 1 << 31}, "retryMaxTimes: found 2147483648"),
        ({"retry_queue_nums": 65537}, "retryQueueNums: found 65537; allowed is 0 to 65536"),
        ({"retry_queue_nums": 1.5}, "retryQueueNums: found 1.5"),
        ({"retry_queue_nums": True}, "retryQueueNums: found True"),
        ({"consume_enable": "no"}, "consumeEnable"),
        ({"consume_enable": 1}, "consumeEnable"),
    ],
)
def test_a_value_that_is_not_allowed_changes_nothing(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        store.create_group("boards")
        before = path_of(tmp_path).read_bytes()
        with pytest.raises(ConfigError, match=words):
            store.alter_group("boards", **settings)
        with pytest.raises(ConfigError, match=words):
            store.create_group("others", **settings)
        assert path_of(tmp_path).read_bytes() == before


@pytest.mark.parametrize("group", ["", "a b", "CID_RMQ_SYS_x", 3, ["g"], "g" * 256, "\x1b[2J"])
def test_groups_that_cannot_be_are_refused(tmp_path: Path, group: Any) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        with pytest.raises(MessageIllegalError, match="group: found"):
            store.create_group(group)
        with pytest.raises(ConfigError):
            store.alter_group(group, retry_max_times=1)
        assert not path_of(tmp_path).exists()


def test_altering_a_group_without_settings_names_those_that_have(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        with pytest.raises(ConfigError, match=r"groups that have: none. Create it first"):
            store.alter_group("boards", retry_max_times=1)
        store.create_group("alarms")
        with pytest.raises(ConfigError, match=r"groups that have: 'alarms'. Create it first"):
            store.alter_group("boards", retry_max_times=1)


DAMAGED = [
    "{",
    "[]",
    '{"subscriptionGroupTable":[]}x',
    '{"subscriptionGroupTable":{"boards":7}}',
    '{"subscriptionGroupTable":{"boards":{"retryMaxTimes":"many"}}}',
    '{"subscriptionGroupTable":{"boards":{"retryQueueNums":true}}}',
    '{"subscriptionGroupTable":{"boards":{"consumeEnable":"perhaps"}}}',
    "\xff\x00",
]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("has_backup", [False, True])
def test_a_damaged_file_is_named_and_never_overwritten(tmp_path: Path, text: str, has_backup: bool) -> None:
    """Without a copy of a broker's nothing is read; with one that is read, as a broker does, and nothing is written."""
    filled(tmp_path, 2)
    path = path_of(tmp_path)
    path.write_bytes(text.encode("latin-1"))
    backup = path.with_name("subscriptionGroup.json.bak")
    if has_backup:
        backup.write_text('{"subscriptionGroupTable":{"boards":{"retryMaxTimes":3}}}')
    with MessageStore.open(tmp_path, SMALL) as store:
        before = path.read_bytes()
        if has_backup:
            found = store.group_config("boards")
            assert found is not None and found.retry_max_times == 3
        else:
            with pytest.raises(CorruptionError, match=r"subscriptionGroup.json"):
                store.group_config("boards")
        for change in (
            lambda: store.alter_group("boards", retry_max_times=1),
            lambda: store.create_group("others"),
        ):
            with pytest.raises(CorruptionError, match=r"subscriptionGroup.json.*Restore it from a copy"):
                change()
        assert path.read_bytes() == before
        assert store.put_message(Message("t", b"x", queue_id=0)).is_ok, "a damaged table is in nobody else's way"


def test_a_session_that_lost_the_store_changes_no_setting(tmp_path: Path) -> None:
    """A broker may hold it meanwhile, with these files in memory: neither groups nor topics are written."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.create_topic("t")
        store.create_group("boards")
        before = [path_of(tmp_path, name).read_bytes() for name in ("topics.json", "subscriptionGroup.json")]
        (tmp_path / "lock").rename(tmp_path / "old")
        for change in (
            lambda: store.alter_group("boards", retry_max_times=1),
            lambda: store.create_group("others"),
            lambda: store.create_topic("others"),
            lambda: store.alter_topic("t", write_queue_nums=1),
        ):
            with pytest.raises(StoreError, match="lock file was removed or replaced"):
                change()
        assert [path_of(tmp_path, name).read_bytes() for name in ("topics.json", "subscriptionGroup.json")] == before
        (tmp_path / "old").rename(tmp_path / "lock")


def test_a_closed_store_and_a_forked_child_change_no_setting(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        child = os.fork()
        if not child:
            status = 1
            try:
                store.create_group("boards")
            except StoreClosedError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(StoreClosedError):
        store.create_group("boards")
    assert not path_of(tmp_path).exists()


# ---- filters


def test_filters_are_read_as_a_broker_writes_them(tmp_path: Path) -> None:
    """Sorted by group and topic; what is missing has Java's defaults."""
    assert consumer_filters(Disk(), str(tmp_path)) == []
    path_of(tmp_path, "consumerFilter.json").write_text(
        '{"filterDataByTopic":{"t":{"topic":"t","groupFilterData":{"g":{"bloomFilterData":{"bitNum":64,"bitPos":[1]},'
        '"bornTime":5,"clientVersion":9,"consumerGroup":"g","deadTime":0,"expression":"a > {1:2}",'
        '"expressionType":"SQL92","topic":"t"},"f":{"bornTime":5,"deadTime":6}}},"u":{"topic":"u"}}}'
    )
    first, second = consumer_filters(Disk(), str(tmp_path))
    assert (first.consumer_group, first.topic, first.expression, first.is_dead) == ("f", "t", "", True)
    assert (second.consumer_group, second.expression, second.expression_type) == ("g", "a > {1:2}", "SQL92")
    assert (second.born_time_ms, second.client_version, second.is_dead) == (5, 9, False)


@pytest.mark.parametrize(
    "text", ["{", '{"filterDataByTopic":{"t":{"groupFilterData":{"g":{"bornTime":"x"}}}}}', '{"filterDataByTopic":[1]}']
)
def test_damaged_filters_are_named(tmp_path: Path, text: str) -> None:
    path_of(tmp_path, "consumerFilter.json").write_text(text)
    with pytest.raises(CorruptionError, match=r"consumerFilter.json.*move it away"):
        consumer_filters(Disk(), str(tmp_path))


def test_a_stores_own_messages_do_not_depend_on_these_files(tmp_path: Path) -> None:
    """Without config, a filled store has no group and no filter, and looking makes none."""
    root = filled(tmp_path / "s", 4)
    with MessageStore.open(root, SMALL) as store:
        assert store.group_config("boards") is None
    assert consumer_filters(Disk(), str(root)) == []
    assert not path_of(root).exists()
