"""spark/settings.json: the settings that live with a store."""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path

import pytest

from messagestore import (
    ASYNC_FLUSH,
    ConfigError,
    CorruptionError,
    MessageStore,
    NotAStoreError,
    StoreConfig,
    alter_stored_config,
    deliver_delayed,
    stored_config,
)
from messagestore.files.disk import Disk
from messagestore.files.store_settings import read_settings, write_settings
from messagestore.inspect import operator
from messagestore.inspect.verify import verify
from small import filled


def test_the_file_byte_by_byte(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"FILERESERVEDTIME": 168, "preallocate": True})
    settings = '{"fileReservedTime": "168", "preallocate": "true"}'
    crc = zlib.crc32(f'{{"formatVersion": 1, "settings": {settings}}}'.encode())
    wanted = f'{{"crc": {crc}, "formatVersion": 1, "settings": {settings}}}'
    assert (root / "spark" / "settings.json").read_text() == wanted


def test_the_settings_of_a_newer_release_are_refused(tmp_path: Path) -> None:
    """They are not taken for damage, whose hint would be to delete them."""
    root = filled(tmp_path / "s", 2)
    others = '"formatVersion": 2, "settings": {}}'
    crc = zlib.crc32(f"{{{others}".encode())
    (root / "spark" / "settings.json").write_text(f'{{"crc": {crc}, {others}')
    with pytest.raises(NotAStoreError, match=r"settings\.json: found format version 2; this release reads 1"):
        MessageStore.open(root)


def test_every_flipped_bit_is_damage(tmp_path: Path) -> None:
    """A flipped bit in fileReservedTime would let retention delete messages."""
    path = tmp_path / "settings.json"
    write_settings(Disk(), str(path), {"fileReservedTime": "168"}, via=str(tmp_path / "new"))
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert read_settings(Disk(), str(path)).to_mapping() == {"fileReservedTime": "168"}  # another blank
        except CorruptionError as error:
            assert "set the store's settings again" in str(error)


def test_a_damaged_file_stops_writers_and_readers_and_is_told_by_verify(tmp_path: Path) -> None:
    """Going on with the defaults could delete messages, or take a promise of SYNC_FLUSH away."""
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"flushDiskType": ASYNC_FLUSH})
    path = root / "spark" / "settings.json"
    path.write_text("{")
    for opens in (MessageStore.open, MessageStore.open_read_only, stored_config, deliver_delayed):
        with pytest.raises(CorruptionError, match=r"settings\.json"):
            opens(root)
    assert [finding.path for finding in verify(root).findings] == [str(path)]
    path.unlink()
    with MessageStore.open(root) as store:
        assert store.writer.files.config.flush_disk_type == "SYNC_FLUSH"
    assert verify(root).ok


def test_a_setting_counts_for_a_session_a_turn_and_a_reader_that_give_none(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"flushDiskType": ASYNC_FLUSH, "readUpTo": "flushed", "fileReservedTime": 24})
    with MessageStore.open(root) as store:
        config = store.writer.files.config
        assert (config.flush_disk_type, config.file_reserved_time) == (ASYNC_FLUSH, 24)
    with MessageStore.open_read_only(root) as reader:
        assert reader.view.files.config.read_up_to == "flushed"
    alter_stored_config(root, {"fileReservedTime": None})
    with MessageStore.open(root) as store:
        assert store.writer.files.config.file_reserved_time == -1


def test_what_a_caller_gives_wins_and_the_difference_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"fileReservedTime": 24, "lockTimeout": "7s"})
    given = StoreConfig(file_reserved_time=168, lock_timeout="1s")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with MessageStore.open(root, given) as store:
                assert store.writer.files.config.file_reserved_time == 168
                assert store.writer.files.config.lock_timeout == "1s"
    assert caplog.text.count("the store's own setting is 24") == 1
    assert "lockTimeout" not in caplog.text  # how long one caller waits concerns nobody else


def test_a_default_that_a_caller_names_wins_too(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"flushDiskType": ASYNC_FLUSH, "transientStorePoolEnable": True})
    with MessageStore.open(root, StoreConfig(flush_disk_type="SYNC_FLUSH")) as store:
        config = store.writer.files.config
        assert (config.flush_disk_type, config.transient_store_pool_enable) == ("SYNC_FLUSH", False)


def test_an_open_session_keeps_its_settings_and_a_second_one_joins_it(tmp_path: Path) -> None:
    """Otherwise the second session of a process would be refused after a change."""
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"fileReservedTime": 24})
    with MessageStore.open(root, StoreConfig(lock_timeout="5s")) as first:
        alter_stored_config(root, {"fileReservedTime": 48})
        with MessageStore.open(root, StoreConfig(lock_timeout="5s")) as second:
            assert second.writer is first.writer
            assert second.writer.files.config.file_reserved_time == 24
    with MessageStore.open(root) as third:
        assert third.writer.files.config.file_reserved_time == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fileReservdTime": 1}, "no such setting. Did you mean fileReservedTime"),
        ({"fileReservdTime": None}, "no such setting. Did you mean fileReservedTime"),
        ({"fileReservedTime": "x"}, "allowed is a whole number"),
        ({"fileReservedTime": -2}, "allowed is -1 to"),
        ({"flushDiskType": "ASYNC"}, "allowed is SYNC_FLUSH or ASYNC_FLUSH"),
        ({"mappedFileSizeCommitLog": 1 << 20}, "fixed when a store is made"),
        ({"maxIndexNum": None}, "fixed when a store is made"),
        ({"transientStorePoolEnable": True}, "with flushDiskType=SYNC_FLUSH"),
        ({"deleteWhen": "25"}, "hours from 0 to 23"),
    ],
)
def test_a_wrong_setting_changes_nothing(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"deleteWhen": "05"})
    with pytest.raises(ConfigError, match=message):
        alter_stored_config(root, {"preallocate": True, **changes})
    assert stored_config(root).to_mapping() == {"deleteWhen": "05"}


def test_a_folder_without_a_store_gets_none(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError, match="found no message store"):
        alter_stored_config(tmp_path / "none", {"deleteWhen": "05"})
    with pytest.raises(NotAStoreError, match="found no message store"):
        stored_config(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_where_each_value_comes_from(tmp_path: Path) -> None:
    root = filled(tmp_path / "s", 2)
    alter_stored_config(root, {"deleteWhen": "05"})
    rows = {row["name"]: (row["value"], row["from"]) for row in operator.settings(str(root))}
    assert rows["deleteWhen"] == ("05", "store")
    assert rows["maxIndexNum"][1] == "fixed"
    assert rows["fileReservedTime"] == (-1, "default")
    assert json.dumps(rows)
