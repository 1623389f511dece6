"""Two users of a store in one process, with different settings: both get what they asked for, or the second is told."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from crash import sessions
from messagestore import ASYNC_FLUSH, ConfigError, Message, MessageStore, StoreConfig
from messagestore.broker.delivery import Delivered
from messagestore.format.config import SYNC_FLUSH, java_key, settings
from messagestore.format.message import PutMessageResult
from messagestore.log.store_files import FIXED, store_host_of
from messagestore.session import attached_store
from messagestore.shared_settings import LOOKED_AT
from small import SMALL, SMALL_ASYNC, filled, read_all

_OTHERS: dict[str, object] = {
    "flush_disk_type": ASYNC_FLUSH,
    "message_delay_level": "1h",
    "broker_ip1": "10.0.0.7",
    "broker_cluster_name": "Other",
    "broker_name": "broker-b",
    "delete_when": "05;17",
    "clean_interval": "61s",
    "attach_timeout": "21s",
    "lock_timeout": "2s",
    "file_mode": "0640",
    "read_up_to": "flushed",
    "mapped_file_size_consume_queue": 20 * 32,
    "file_reserved_time": 24 * 30,
}
"""Another value of each setting that is a text, or a number with bounds of its own."""


def other_value(name: str) -> object:
    """A value that `SMALL` does not have."""
    value = getattr(SMALL, name)
    if name in _OTHERS:
        return _OTHERS[name]
    return not value if isinstance(value, bool) else value + 1


def changed(name: str) -> StoreConfig:
    """`SMALL`, with another value of one setting; the pool needs ASYNC_FLUSH."""
    changes = {name: other_value(name)}
    if name == "transient_store_pool_enable":
        changes["flush_disk_type"] = ASYNC_FLUSH
    return SMALL.replace(**changes)


NAMES = [each.name for each in settings()]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_session_does_not_change_the_settings_of_the_first(name: str, tmp_path: Path) -> None:
    """For every setting, the second opening is refused, or nothing has changed for either."""
    root, asked = tmp_path / "s", changed(name)
    assert getattr(asked, name) != getattr(SMALL, name)
    with MessageStore.open(root, SMALL) as first:
        before, level = first.writer.files.config, first.writer.files.config.delays_ms
        if name in FIXED:  # as in any store that has files
            with MessageStore.open(root, asked) as second:
                assert getattr(second.writer.files.config, name) == getattr(SMALL, name)
        else:
            with pytest.raises(ConfigError, match=f"open with other settings.*{java_key(name)}: found") as refused:
                MessageStore.open(root, asked)
            assert refused.value.key in (java_key(name), "flushDiskType")
            assert refused.value.value in (other_value(name), ASYNC_FLUSH)
            with pytest.raises(ConfigError, match=java_key(name)), attached_store(root).writing("x", config=asked):
                pass
        assert (first.writer.files.config, first._attached.config) == (before, SMALL)
        assert first.writer.files.config.delays_ms == level
        assert first.put_message(Message("t", b"x", queue_id=0)).is_ok


@pytest.mark.parametrize("name", NAMES)
def test_a_commit_after_another_one_works_with_its_own_settings(name: str, tmp_path: Path) -> None:
    """Spark's workers stay attached between commits: the next one may be another query's."""
    root, asked = tmp_path / "s", changed(name)
    store = attached_store(root, SMALL)
    with store.writing("the first query", config=SMALL) as writer:
        assert writer.files.config == SMALL
    with store.writing("the second query", config=asked) as writer:
        wanted = SMALL if name in FIXED else asked
        assert (store.config, writer.files.config) == (asked, wanted)
        assert writer.files.config.delays_ms == wanted.delays_ms
        assert writer.files.store_host == store_host_of(wanted)
        assert writer.log.preallocate == wanted.preallocate
        made = root / "spark" / "new-made"
        store.disk.open_new(made, 0).close()
        assert made.stat().st_mode & 0o777 == (wanted.file_mode_bits or 0o600)
    with store.writing("the first query again", config=SMALL) as writer:
        assert writer.files.config == SMALL
        made.unlink(missing_ok=True)
        store.disk.open_new(made, 0).close()
        assert made.stat().st_mode & 0o777 == 0o600
    store.detach()


def test_settings_that_only_concern_one_call_do_not_close_the_store_between_commits(tmp_path: Path) -> None:
    """Two queries with other time-outs share a worker, and no commit has to open the store."""
    root = filled(tmp_path / "s")
    store = attached_store(root, SMALL)
    with store.writing("one") as writer:
        pass
    for name in sorted(LOOKED_AT):
        with store.writing("another", config=changed(name)) as other:
            assert other is writer
    store.detach()


def test_a_session_without_a_configuration_joins_the_one_that_is_open(tmp_path: Path) -> None:
    """Levels, limits and flush type stay; after both are closed, a session has the defaults again, but for the levels
    of the store.
    """
    root, config = tmp_path / "s", SMALL_ASYNC.replace(message_delay_level="1h", max_message_size=1024)
    with MessageStore.open(root, config) as first:
        with MessageStore.open(root) as second:
            assert second.writer.files.config == config
        assert first.writer.files.config == config
        assert first.put_message(Message("t", b"x", delay_time_level=1)).queue_id == 0
        assert first.writer.files.config.delays_ms == (3_600_000,)
    with MessageStore.open(root) as third:
        found = third.writer.files.config
        assert (found.flush_disk_type, found.max_message_size) == (SYNC_FLUSH, 4 << 20)
        assert found.delays_ms == (3_600_000,)


def test_an_acknowledged_put_is_on_the_disk_though_another_thread_wants_async_flush(tmp_path: Path) -> None:
    """PUT_OK of a SYNC_FLUSH session means that the log is synced up to the put."""
    root, refused = tmp_path / "s", []

    def opens() -> None:
        try:
            MessageStore.open(root, SMALL_ASYNC).close()
        except ConfigError as error:
            refused.append(error.key)

    with MessageStore.open(root, SMALL) as store:
        thread = threading.Thread(target=opens)
        thread.start()
        thread.join()
        result: PutMessageResult = store.put_message(Message("t", b"x", queue_id=0))
        assert store.writer.synced_end >= result.physical_offset + result.size
        assert read_all(store) == [b"x"]
    assert refused == ["flushDiskType"]


def test_settings_that_were_altered_are_those_of_the_next_session(tmp_path: Path) -> None:
    """`alter_config` is for all sessions: one that asks for what was is told, and one that asks for nothing joins."""
    root = tmp_path / "s"
    with MessageStore.open(root, SMALL) as first:
        first.alter_config(max_message_size=100)
        with pytest.raises(ConfigError, match="maxMessageSize: found 8192, and the open session has 100"):
            MessageStore.open(root, SMALL)
        with MessageStore.open(root) as second:
            assert second.alter_config(max_message_size=200) == first.writer.files.config


def test_a_brokers_file_beside_a_session_without_one_is_refused(tmp_path: Path) -> None:
    """What it says about who may write would not be looked at."""
    root, file = tmp_path / "s", tmp_path / "broker.conf"
    file.write_text("brokerRole=SLAVE\n")
    with MessageStore.open(root, SMALL), pytest.raises(ConfigError, match="brokerSettings"):
        MessageStore.open(root, SMALL.replace(broker_settings=StoreConfig.load(file).broker_settings))


def test_delivering_beside_a_session_uses_its_levels(tmp_path: Path) -> None:
    """`deliver_delayed` without settings joins the session, and with other levels it is refused."""
    from messagestore import deliver_delayed

    root = tmp_path / "s"
    with MessageStore.open(root, SMALL.replace(message_delay_level="1h")) as store:
        store.put_message(Message("t", b"x", delay_time_level=1))
        found: Delivered = deliver_delayed(root)
        assert found.count == 0
        with pytest.raises(ConfigError, match="messageDelayLevel"):
            deliver_delayed(root, SMALL.replace(message_delay_level="1s"))
        assert store.writer.files.config.delays_ms == (3_600_000,)


@pytest.mark.parametrize("name", list(sessions.CASES))
def test_what_a_session_was_promised_does_not_depend_on_another_one(name: str, tmp_path: Path) -> None:
    """The named cases of `make crash`."""
    sessions.CASES[name](tmp_path)
