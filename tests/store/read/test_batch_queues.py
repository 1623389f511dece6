"""A broker's batch queues (queue.type=BatchCQ), message by message, although several messages share a record."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from messagestore import ConfigError, CorruptionError, MessageStore, NotAStoreError, OffsetOutOfRangeError
from messagestore.files.batch_consume_queue import BatchConsumeQueue
from messagestore.files.disk import Disk, FilePool
from messagestore.format import record
from messagestore.format.inner_batch import single_records
from messagestore.format.layout import BATCH_UNIT, MAGIC_BLANK
from messagestore.format.message import Message
from messagestore.spi import LOCAL_STORES, Range
from small import SMALL

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
UNITS_IN_FILE = 5
INNER = 0xC0


def element(body: bytes, flag: int = 0, properties: bytes = b"") -> bytes:
    """A message as a producer's batch contains it."""
    size = 20 + len(body) + 2 + len(properties)
    return struct.pack(">iiiii", size, 0, 0, flag, len(body)) + body + struct.pack(">h", len(properties)) + properties


def record_of(body: bytes, base: int, place: int, sys_flag: int = INNER, topic: str = "inner") -> bytes:
    data = record.encode_message(
        Message(topic, body, sys_flag=sys_flag, born_timestamp_ms=5), queue_id=0, store_host=HOST, limits=SMALL
    )
    record.stamp_record(data, base, place, 1_700_000_000_000 + base)
    return bytes(data)


class Made:
    """A store as a broker leaves it: inner batches of 1 to 7 messages, and single messages among them."""

    def __init__(self, root: Path, batches: int, seed: int = 1) -> None:
        rng = random.Random(seed)
        size = SMALL.mapped_file_size_commit_log
        self.root, self.bodies, self.places = root, list[bytes](), list[int]()
        log, units = bytearray(), []
        for _ in range(batches):
            base, count = len(self.bodies), rng.choice([1, 1, 2, 3, 7])
            texts = [b"%d/%s" % (base + i, bytes(rng.choices(range(256), k=rng.randrange(40)))) for i in range(count)]
            single = count == 1 and rng.random() < 0.5
            body = (
                texts[0]
                if single
                else b"".join(
                    element(text, flag=base + i, properties=b"KEYS\x01k%d\x02TAGS\x01T\x02" % (base + i))
                    for i, text in enumerate(texts)
                )
            )
            flags = 0 if single else INNER
            if not single and rng.random() < 0.3:
                body, flags = zlib.compress(body), INNER | 0x1
            data = record_of(body, base, len(log), flags)
            left = size - len(log) % size
            if len(data) + 8 > left:
                log += struct.pack(">ii", left, MAGIC_BLANK) + bytes(left - 8)
                data = record_of(body, base, len(log), flags)
            units.append((len(log), len(data), 0, 1_700_000_000_000 + base, base, count, -1, 0))
            self.places += [len(log)] * count
            log += data
            self.bodies += texts
        folder = root / "commitlog"
        folder.mkdir(parents=True)
        for at in range(0, len(log), size):
            (folder / f"{at:020d}").write_bytes(bytes(log[at : at + size]).ljust(size, b"\0"))
        folder = root / "batchconsumequeue" / "inner" / "0"
        folder.mkdir(parents=True)
        for at in range(0, len(units), UNITS_IN_FILE):
            packed = b"".join(BATCH_UNIT.struct.pack(*unit) for unit in units[at : at + UNITS_IN_FILE])
            name = f"{at * BATCH_UNIT.size:020d}"
            (folder / name).write_bytes(packed.ljust(UNITS_IN_FILE * BATCH_UNIT.size, b"\0"))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "store", 23)


@pytest.mark.parametrize("batches", [1, 4, 5, 6, 40])
def test_every_message_is_read_once_from_any_place(tmp_path: Path, batches: int) -> None:
    """From the middle of a record, to the middle of another, and across files and segments."""
    made = Made(tmp_path / "store", batches, seed=batches)
    count = len(made.bodies)
    with MessageStore.open_read_only(made.root, SMALL) as store:
        assert store.topics() == {"inner": [0]}
        assert (store.min_offset("inner", 0), store.max_offset("inner", 0)) == (0, count)
        for start in range(count):
            for end in {start + 1, (start + count) // 2, count}:
                batches_ = store.read("inner", 0, start, end, columns=["queue_offset", "body", "physical_offset"])
                rows = [row for batch in batches_ for row in batch.to_pylist()]
                assert [row["queue_offset"] for row in rows] == list(range(start, max(end, start)))
                assert [row["body"] for row in rows] == made.bodies[start:end]
                assert [row["physical_offset"] for row in rows] == made.places[start:end]
            found = store.get_message("inner", 0, start, 4)
            assert [message.body for message in found.messages] == made.bodies[start : start + 4]
            assert found.next_begin_offset == min(start + 4, count)


def test_each_message_has_its_own_properties(made: Made) -> None:
    """Flag, keys and tags are the message's; times and hosts the record's; a body is never left compressed."""
    with MessageStore.open_read_only(made.root, SMALL) as store:
        (batch,) = store.read("inner", 0, 0, columns=["queue_offset", "flag", "keys", "tags", "sys_flag", "born_host"])
        rows = batch.to_pylist()
    inner = [row for row in rows if row["sys_flag"] & 0x80]
    assert len(inner) > 20
    for row in inner:
        assert (row["flag"], row["keys"], row["tags"]) == (row["queue_offset"], [f"k{row['queue_offset']}"], "T")
        assert row["sys_flag"] == INNER
    assert {row["born_host"] for row in rows} == {rows[0]["born_host"]}


def test_the_end_of_a_living_broker_is_followed(made: Made) -> None:
    """A file that grows, and the next file."""
    root = made.root
    other = Made(root.parent / "longer", 40)
    with MessageStore.open_read_only(root, SMALL) as store:
        assert store.max_offset("inner", 0) == len(made.bodies)
        for folder in ("commitlog", "batchconsumequeue/inner/0"):
            for path in sorted((root.parent / "longer" / folder).iterdir()):
                (root / folder / path.name).write_bytes(path.read_bytes())
        assert store.max_offset("inner", 0) == len(other.bodies)
        rest = store.read("inner", 0, len(made.bodies), columns=["body"])
        assert [body for batch in rest for body in batch["body"].to_pylist()] == other.bodies[len(made.bodies) :]


def test_a_unit_without_its_record_ends_the_queue(made: Made) -> None:
    """A broker that crashed left units after the log's end."""
    last = max((made.root / "commitlog").iterdir())
    start = int(last.name)
    data = bytearray(last.read_bytes())
    data[made.places[-1] - start :] = bytes(len(data) - (made.places[-1] - start))
    last.write_bytes(data)
    with MessageStore.open_read_only(made.root, SMALL) as store:
        assert store.max_offset("inner", 0) == made.places.index(made.places[-1])


def test_what_retention_has_deleted_is_counted(tmp_path: Path) -> None:
    made = Made(tmp_path / "store", 300)
    first, second = sorted((made.root / "commitlog").iterdir())[:2]
    begin = int(second.name)
    first.unlink()
    least = next(number for number, place in enumerate(made.places) if place >= begin)
    with MessageStore.open_read_only(made.root, SMALL) as store:
        assert store.min_offset("inner", 0) == least
        with pytest.raises(OffsetOutOfRangeError, match=f"{least} messages from 0 on are gone"):
            list(store.read("inner", 0, 0))
        found = store.read("inner", 0, least, columns=["body"])
        assert [body for batch in found for body in batch["body"].to_pylist()] == made.bodies[least:]


def test_a_connector_reads_it_as_any_queue(made: Made) -> None:
    """Sizes are shares of a record, so that limits in bytes mean something."""
    reader = LOCAL_STORES.reader(str(made.root), SMALL)
    queue, count = ("inner", 0), len(made.bodies)
    assert reader.ends(["inner"]).queues == {queue: count}
    whole = Range("inner", 0, 0, count)
    [sizes] = reader.sizes([whole])
    assert len(sizes) == count
    assert int(sizes.sum()) <= made.places[-1] + 2000
    bodies = [m.body for block in reader.gather([whole], max_rows=4) for m in block.messages()]
    assert bodies == made.bodies
    reader.close()


def test_searching_by_key_is_refused_and_by_time_is_not(made: Made) -> None:
    with MessageStore.open_read_only(made.root, SMALL) as store:
        with pytest.raises(ConfigError, match=r"batch queues \(queue.type=BatchCQ\)"):
            store.query_message("inner", "k1")
        middle = len(made.bodies) // 2
        base = made.places.index(made.places[middle])
        assert store.queue_offset_by_time("inner", 0, 1_700_000_000_000 + base) == base


def test_nobody_writes_there(made: Made) -> None:
    with pytest.raises(NotAStoreError, match="batch queues"):
        MessageStore.open(made.root, SMALL)


def test_a_body_that_is_no_batch_is_damage_and_nothing_else() -> None:
    """Each length in it, at each value near its ends, and each cut."""
    good = element(b"abc", properties=b"KEYS\x01k\x02") + element(b"") + element(b"xyz" * 5)
    assert len(single_records(record_of(good, 7, 0), "log", 0)) == 3
    first = len(element(b"abc", properties=b"KEYS\x01k\x02"))
    values = (-(2**31), -1, 0, 1, 19, 20, 22, len(good), 2**31 - 1)
    wrong = [good[:cut] for cut in range(1, len(good)) if cut != first]
    wrong += [good[:at] + struct.pack(">i", value) + good[at + 4 :] for at in (0, 16) for value in values]
    wrong += [good[:23] + struct.pack(">h", value) + good[25:] for value in (-(2**15), -1, 0, 2**15 - 1)]
    refused = 0
    for body in wrong:
        try:
            found = single_records(record_of(body, 7, 0), "log", 0)
        except CorruptionError as error:
            assert "a batch of messages as body" in str(error)
            refused += 1
        else:
            assert all(record.decode_message(each).topic == "inner" for each in found)
    assert refused > len(wrong) - 5
    with pytest.raises(CorruptionError, match="zlib cannot decompress it"):
        single_records(record_of(good, 7, 0, INNER | 0x1), "log", 0)


def test_units_are_found_in_any_number_of_files(tmp_path: Path) -> None:
    """Against a list, with queues that do not begin at 0."""
    for seed in range(40):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        base = first = rng.choice([0, 0, 1000])
        expected, units = [], []
        for at in range(rng.randrange(1, 30)):
            count = rng.choice([1, 2, 300])
            units.append((at * 100, 100, at, 0, base, count, -1, 0))
            expected += [(at * 100, 100, at)] * count
            base += count
        begin = rng.choice([0, 3]) * UNITS_IN_FILE
        for at in range(0, len(units), UNITS_IN_FILE):
            packed = b"".join(BATCH_UNIT.struct.pack(*unit) for unit in units[at : at + UNITS_IN_FILE])
            name = f"{(begin + at) * BATCH_UNIT.size:020d}"
            (folder / name).write_bytes(packed.ljust(UNITS_IN_FILE * BATCH_UNIT.size, b"\0"))
        queue = BatchConsumeQueue(str(folder), 0, FilePool(Disk()), str(tmp_path))
        queue.load()
        assert (queue.first_file_queue_offset, queue.end()) == (first, base)
        for _ in range(30):
            start, count = rng.randrange(first, base + 3), rng.randrange(0, 700)
            found = queue.read(start, count)
            assert found.tolist() == expected[start - first : start - first + count]
            place = rng.randrange(0, 3200)
            wanted = next((first + n for n, unit in enumerate(expected) if unit[0] >= place), base)
            assert queue.search_physical(place) == wanted
            limit = rng.randrange(0, 3300)
            assert queue.end(limit=limit) == first + sum(unit[0] + 100 <= limit for unit in expected)
        assert np.array_equal(queue.read(base, 5), queue.read(base, 0))
