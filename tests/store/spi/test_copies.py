"""Records of another store, appended as they are: nothing of a message is lost, whatever form its record has."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from messagestore import BatchRequest, CorruptionError, Message, MessageExt, MessageStore
from messagestore.format.gathered import Gathered
from messagestore.format.hosts import pack_host
from messagestore.format.record import encode_message, stamp_record
from messagestore.spi import append_copies
from small import SMALL

ORIGIN = {"originBroker", "originQueueId", "originQueueOffset", "originStoreTimestamp", "originOffsetMsgId"}
OWN = {"physical_offset", "size", "store_timestamp_ms", "store_host", "properties", "offset_message_id", "queue_offset"}
"""What is that of the copy."""
STORE_HOST_V6 = 0x20
HOSTS = ("10.1.2.3:4567", "[fd00::17]:4567")
FORMS = [
    Message("t", b"plain", keys=["k1", "k2"], tags="a", properties={"p": "v"}, flag=7, born_timestamp_ms=1),
    Message("t", b"", born_timestamp_ms=2),
    Message("t", zlib.compress(b"long" * 99), sys_flag=1, born_timestamp_ms=3),
    Message("t", b"committed", sys_flag=8, prepared_transaction_offset=4711, born_timestamp_ms=4),
    Message("t", b"again", reconsume_times=3, born_timestamp_ms=5, properties={"Größe": "9 \u4e2d"}),
]


def block(records: Sequence[bytearray], first: int = 40, gap: bytes = b"", *, crc: bool = False) -> Gathered:
    """Messages `first`, `first + 1`, ... of t/3, perhaps with other bytes between them."""
    data, positions, places = b"", list[int](), list[int]()
    for number, record in enumerate(records):
        places.append(1_000_000 + 5000 * number)
        stamp_record(record, first + number, places[-1], 1_700_000_000_000 + number, crc)
        positions.append(len(data))
        data += bytes(record) + gap
    return Gathered(
        "t",
        3,
        first,
        first + len(records),
        np.arange(first, first + len(records), dtype=np.int64),
        np.array(places, np.int64),
        np.array([len(record) for record in records], np.int32),
        np.frombuffer(data, np.uint8),
        np.array(positions, np.int64),
        "the log there",
    )


def record(message: Message, born: str = HOSTS[0], store: str = HOSTS[0], *, crc: bool = False) -> bytearray:
    limits = SMALL.replace(enabled_append_prop_crc=crc)
    message = Message(**{name: getattr(message, name) for name in message.__slots__} | {"born_host": born})
    return encode_message(message, queue_id=3, store_host=pack_host(store), limits=limits, unique_key="U")


def bare(data: bytearray) -> bytearray:
    """The record without the separator behind its last property, as RocketMQ's producers send it."""
    short = data[:-1]
    short[:4] = len(short).to_bytes(4, "big")
    at = data.index(b"UNIQ_KEY") - 2
    short[at : at + 2] = (int.from_bytes(data[at : at + 2], "big") - 1).to_bytes(2, "big")
    return short


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[MessageStore]:
    with MessageStore.open(tmp_path / "archive", SMALL) as store:
        store.create_topic("t", 4)
        yield store


def copied(archive: MessageStore, *blocks: Gathered) -> list[MessageExt]:
    append_copies(archive.writer, blocks, "broker-a", BatchRequest())
    found: list[MessageExt] = []
    while len(found) < archive.max_offset("t", 3):
        found += archive.get_message("t", 3, len(found), 32).messages
    return found


def same(copy: MessageExt, there: MessageExt, number: int) -> None:
    assert copy.sys_flag & ~STORE_HOST_V6 == there.sys_flag & ~STORE_HOST_V6
    for one in (copy, there):
        one.system_properties.pop("__CRC32#", None)
    for name in set(there.__slots__) - OWN - {"sys_flag"}:
        assert getattr(copy, name) == getattr(there, name), name
    assert {name: text for name, text in copy.properties.items() if name not in ORIGIN} == there.properties
    assert {name: text for name, text in copy.properties.items() if name in ORIGIN} == {
        "originBroker": "broker-a",
        "originQueueId": "3",
        "originQueueOffset": str(number),
        "originStoreTimestamp": str(there.store_timestamp_ms),
        "originOffsetMsgId": there.offset_message_id,
    }


@pytest.mark.parametrize("crc_here", [False, True])
@pytest.mark.parametrize("crc_there", [False, True])
@pytest.mark.parametrize("host_here", HOSTS)
def test_every_field_stays(tmp_path: Path, crc_here: bool, crc_there: bool, host_here: str) -> None:
    """All forms, all widths of hosts, mixed as they come, few and many at once; the copy is a store without fault."""
    ip, _, port = host_here.rpartition(":")
    config = SMALL.replace(enabled_append_prop_crc=crc_here, broker_ip1=ip.strip("[]"), listen_port=int(port))
    records = [
        record(form, born, store, crc=crc_there)
        for form in FORMS
        for born in HOSTS
        for store in HOSTS
        for _ in range(2)
    ]
    there = block(records, gap=b"other", crc=crc_there)
    wanted = list(there.messages())
    with MessageStore.open(tmp_path / "archive", config) as archive:
        archive.create_topic("t", 4)
        found = copied(archive, there)
        assert len(found) == len(wanted) == 40
        for number, (copy, original) in enumerate(zip(found, wanted, strict=True)):
            same(copy, original, 40 + number)
            assert (copy.queue_offset, copy.store_host) == (number, host_here)
        assert [m.body for m in archive.query_message("t", key="k1")] == [b"plain"] * 8
        assert archive.check_queues() is None


def test_a_last_property_without_its_separator(archive: MessageStore) -> None:
    """RocketMQ's producers leave it out. Without care, the name of the next property would belong to the value."""
    message = Message("t", b"x", born_timestamp_ms=1)
    there = block([bare(record(message)), record(message)])
    for number, (copy, original) in enumerate(zip(copied(archive, there), there.messages(), strict=True)):
        same(copy, original, 40 + number)


def test_a_copy_of_a_copy_says_where_the_message_was_first(archive: MessageStore) -> None:
    first = {"originBroker": "broker-z", "originQueueOffset": "17"}
    named = [{"p": "v", **first}, {**first, "p": "v"}, {"xoriginQueueOffset": "5"}]
    found = copied(archive, block([record(Message("t", b"x", properties=each)) for each in named]))
    assert [message.properties["originQueueOffset"] for message in found] == ["17", "17", "42"]
    assert [message.properties["originBroker"] for message in found] == ["broker-z", "broker-z", "broker-a"]


@pytest.mark.parametrize("crc_here", [False, True])
def test_properties_that_leave_no_room(tmp_path: Path, crc_here: bool) -> None:
    """The message is copied whole all the same, and the caller learns which one does not say where it was."""
    config = SMALL.replace(mapped_file_size_commit_log=1 << 20, enabled_append_prop_crc=crc_here)
    with MessageStore.open(tmp_path / "archive", config) as archive:
        archive.create_topic("t", 4)
        forms = [Message("t", b"x", properties={"p": "v" * size}) for size in (5, 32_650, 32_753, 32_500)]
        there = block([record(form) for form in forms])
        done = append_copies(archive.writer, [there], "broker-a", BatchRequest())
        assert (done.message_count, done.size, done.without_origin) == (4, int(there.sizes.sum()), [41, 42])
        found = archive.get_message("t", 3, 0, 9).messages
        for copy, form in zip(found, forms, strict=True):
            assert copy.properties["p"] == form.properties["p"]
        assert ["originBroker" in copy.properties for copy in found] == [True, False, False, True]


def test_a_damaged_record_is_not_copied(archive: MessageStore) -> None:
    records = [record(form) for form in FORMS]
    there = block(records)
    data = there.data.copy()
    data[there.positions[0] + 90] ^= 1
    damaged = Gathered(*(data if name == "data" else getattr(there, name) for name in there.__slots__))
    with pytest.raises(CorruptionError, match="the log there"):
        append_copies(archive.writer, [block(records[:2], 30), damaged], "broker-a", BatchRequest())
    assert archive.max_offset("t", 3) == 0


def test_a_batch_without_messages_says_where_a_copy_begins(archive: MessageStore) -> None:
    request = BatchRequest(app_id="copy/broker-a/t", version=0, origin={"next": 5})
    done = append_copies(archive.writer, [], "broker-a", request)
    assert (done.message_count, done.size, done.result.status) == (0, 0, "appended")
    last = archive.last_batch("copy/broker-a/t")
    assert last is not None
    assert last.origin == {"next": 5}
