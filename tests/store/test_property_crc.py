"""The property CRC (`__CRC32#`) follows the store's setting and the store's own records; `verify` counts records without."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.harness import die
from crash.imitate import Broker, flip, walk
from messagestore import BatchRequest, ChecksumError, Message, MessageBatch, MessageStore
from messagestore.files.disk import Disk
from messagestore.format import kernel
from messagestore.format.layout import PROPERTY_CRC_SIZE
from messagestore.format.record_scan import PROPERTY_CRC_BEGIN
from messagestore.inspect.verify import verify
from messagestore.log.store_files import Paths, config_of_records
from small import SMALL, columns

WITH_CRC = SMALL.replace(enabled_append_prop_crc=True)


def with_crc(root: Path) -> list[bool]:
    """Of each record that is no BATCH record, whether it has one."""
    return ["__CRC32#" in r["all_properties"] for r in walk(root)[0] if r["topic"] != "rmq_sys_spark_sink"]


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "killed"])
def test_records_behind_a_broker_s_with_a_crc_have_one(tmp_path: Path, closes: bool) -> None:
    """Without a setting: a broker with forceVerifyPropCRC=true keeps what we put into its store."""
    root = tmp_path / "store"
    root.mkdir()
    broker = Broker(root, SMALL)
    for number in range(4):
        broker.put("t", b"%d/" % number, with_crc=True)
    if closes:
        broker.close()
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"ours", queue_id=0))
        store.put_messages(MessageBatch.from_messages([Message("t", b"a"), Message("t", b"b")]))
        store.append_batch(columns([b"row"] * 4), BatchRequest("app", 0, "spark"))
    assert all(with_crc(root))
    assert len(with_crc(root)) == 11
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"again", queue_id=0))
        assert config_of_records(Disk(), Paths(root), SMALL).enabled_append_prop_crc
    assert all(with_crc(root))
    report = verify(root, SMALL)
    assert (report.ok, report.without_property_crc, report.first_without_property_crc) == (True, 0, -1)


def test_the_setting_counts_where_no_record_tells(tmp_path: Path) -> None:
    """A new store, and one whose last record is an empty batch."""
    root = tmp_path / "store"
    with MessageStore.open(root, SMALL) as store:
        store.append_batch(columns([]), BatchRequest("app", 0, "spark"))
    with MessageStore.open(root, SMALL) as store:
        store.put_message(Message("t", b"x", queue_id=0))
    assert with_crc(root) == [False]
    with MessageStore.open(root, WITH_CRC) as store:
        store.put_message(Message("t", b"y", queue_id=0))
    assert with_crc(root) == [False, True]


def test_verify_says_what_a_broker_that_forces_it_would_cut(tmp_path: Path) -> None:
    """How many records have none, and where the first one is."""
    root = tmp_path / "store"
    with MessageStore.open(root, WITH_CRC) as store:
        for number in range(3):
            store.put_message(Message("t", b"%d" % number, queue_id=0))
    assert verify(root, SMALL).without_property_crc == 0
    plain = tmp_path / "plain"
    store = MessageStore.open(plain, SMALL)
    results = [store.put_message(Message("t", b"%d" % number, queue_id=0)) for number in range(3)]
    store.writer.publish()
    die(plain)
    report = verify(plain, SMALL)
    assert (report.without_property_crc, report.first_without_property_crc) == (3, results[0].physical_offset)
    assert report.to_dict()["without_property_crc"] == 3


@pytest.mark.parametrize("codec", ["kernel", "scalar"])
def test_a_flipped_bit_in_the_name_of_the_property_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Each of its 72 bits, by each way to read; else `get` would show a property that nobody gave."""
    if codec == "scalar":
        monkeypatch.setattr(kernel, "lib", None)
    root = tmp_path / "s"
    with MessageStore.open(root, WITH_CRC) as store:
        for number in range(3):
            result = store.put_message(Message("t", b"%d" % number, queue_id=0, properties={"a": "b"}))
    begin = result.physical_offset + result.size - PROPERTY_CRC_SIZE
    for bit in range(8 * len(PROPERTY_CRC_BEGIN)):
        flip(root, begin + bit // 8, 1 << bit % 8)
        with MessageStore.open_read_only(root, SMALL) as store:
            with pytest.raises(ChecksumError, match="a property __CRC32#"):
                store.get_message("t", 0, 0)
            with pytest.raises(ChecksumError, match="a property __CRC32#"):
                store.look_message_by_offset(result.physical_offset)
            with pytest.raises(ChecksumError, match="a property __CRC32#"):
                list(store.read("t", 0, 0))
        flip(root, begin + bit // 8, 1 << bit % 8)
    with MessageStore.open_read_only(root, SMALL) as store:
        assert len(store.get_message("t", 0, 0).messages) == 3


def test_properties_of_users_with_nearly_that_name_are_theirs(tmp_path: Path) -> None:
    """In records without the property, as a broker writes them, the value tells them apart."""
    root = tmp_path / "s"
    names = [f"__CRC32{last}" for last in "!xX0"] + ["__CRC33#", "_-CRC32#"]
    with MessageStore.open(root, SMALL) as store:
        for name in names:
            store.put_message(Message("t", b"x", queue_id=0, properties={name: "0123456789"}))
    with MessageStore.open_read_only(root, SMALL) as store:
        found = store.get_message("t", 0, 0).messages
        assert [message.properties for message in found] == [{name: "0123456789"} for name in names]
        assert sum(batch.num_rows for batch in store.read("t", 0, 0, columns=("properties",))) == len(names)
