"""What senders put into bodies, keys and properties decides neither what recovery cuts, nor whether the store opens, nor how
long that takes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import reference
from crash.harness import die
from crash.imitate import another_boot, overwrite, seen
from messagestore import ASYNC_FLUSH, BatchRequest, Message, MessageStore, StoreConfig
from messagestore.files.disk import Disk, File
from messagestore.format import batch_record, record
from messagestore.format.message import BATCH_TOPIC
from messagestore.inspect.verify import verify
from messagestore.recovery import log_tail
from small import SMALL, SMALL_ASYNC, columns

ROOMY = SMALL.replace(mapped_file_size_commit_log=1 << 20, max_message_size=1 << 19)
NULS = [511, 512, 513, 1023, 4096]


@pytest.mark.parametrize("size", NULS)
@pytest.mark.parametrize("config", [SMALL, SMALL_ASYNC], ids=["sync", "async"])
def test_zero_bytes_in_properties_are_no_torn_record(tmp_path: Path, config: StoreConfig, size: int) -> None:
    """A header filled up with zeros, after a plain kill: nothing that was acknowledged is cut, and nothing is refused."""
    root = tmp_path / "store"
    store = MessageStore.open(root, config)
    wanted = []
    for number in range(12):
        body = b"%d/" % number
        fields = (
            {"properties": {"header": "h" + "\0" * size}},
            {"tags": "T" + "\0" * size},
            {"keys": ["K" + "\0" * size]},
        )[number % 3]
        store.put_message(Message("t", body, queue_id=0, **fields))  # type: ignore[arg-type]
        wanted.append(body.decode())
    store.writer.publish()
    die(root)
    with MessageStore.open(root, config) as store:
        assert store.report is not None
        assert store.report.cut is None
        messages = store.get_message("t", 0, 0).messages
        assert messages[0].properties == {"header": "h" + "\0" * size}
        assert messages[1].tags == "T" + "\0" * size
        assert messages[2].keys == ("K" + "\0" * size,)
    assert seen(root, config)[("t", 0)] == wanted
    assert verify(root, config).ok


@pytest.mark.parametrize("part", range(1, 40))
def test_a_put_that_was_written_in_part_is_cut(tmp_path: Path, part: int) -> None:
    """Killed in a pwrite: a part of a record from its beginning on. Its last byte tells, wherever it ends and whatever is in
    its properties."""
    root = tmp_path / "store"
    store = MessageStore.open(root, SMALL_ASYNC)
    store.put_message(Message("t", b"whole", queue_id=0))
    store.writer.publish()
    end = store.writer.end.physical_offset
    message = Message("t", b"torn", keys=["k"], properties={"p": "x" + "\0" * 600 + "y"})
    data = record.encode_message(message, queue_id=0, store_host=store.writer.files.store_host, limits=SMALL)
    record.stamp_record(data, 1, end, store.writer.end.last_store_timestamp_ms)
    die(root)
    count = len(data) * part // 40
    overwrite(root, end, bytes(data[:count]))
    with MessageStore.open(root, SMALL_ASYNC) as store:
        assert store.report is not None
        assert store.report.end == end
        assert store.report.zeroed_bytes == len(bytes(data[:count]).strip(b"\0"))
    assert seen(root, SMALL_ASYNC)[("t", 0)] == ["whole"]


def like_a_batch(size: int) -> bytes:
    """A body that begins as a BATCH record's, and ends with what comes behind one."""
    behind = bytes([len(BATCH_TOPIC)]) + BATCH_TOPIC.encode() + struct.pack(">h", 20) + b"__CRC32#\x010123456789\x02"
    return batch_record.BODY_BEGIN.ljust(size - 2 * len(behind)) + behind + behind


@pytest.mark.parametrize("count", [100, 512, 4096, 60_000])
def test_a_torn_put_that_looks_like_a_batch_does_not_stop_the_store(tmp_path: Path, count: int) -> None:
    """Its topic lies where its own lengths say: it is a message nobody was told of, and is cut."""
    root = tmp_path / "store"
    with MessageStore.open(root, ROOMY) as store:
        store.append_batch(columns([b"row"] * 3), BatchRequest("app", 0, "spark"))
    store = MessageStore.open(root, ROOMY)
    end = store.writer.end.physical_offset
    result = store.put_message(Message("t", like_a_batch(64_000), queue_id=0))
    die(root)
    assert result.size > count
    overwrite(root, end + count, bytes(result.size - count))
    for path in (root / "consumequeue" / "t" / "0").iterdir():  # the put was not acknowledged: there is no unit
        path.write_bytes(path.read_bytes()[: 2 * 20].ljust(path.stat().st_size, b"\0"))
    with MessageStore.open(root, ROOMY) as store:
        assert store.report is not None
        assert (store.report.end, store.report.cut_messages) == (end, 1)
        assert store.append_batch(columns([b"row"] * 3), BatchRequest("app", 0, "spark")).status == "known"


def forged(store_id: str, at: int, size: int) -> bytes:
    """A BATCH record of a place, whole and with right CRCs, that a sender made up."""
    batch = batch_record.BatchRecord(
        app_id="app",
        version=7,
        version_source="spark",
        query_id=None,
        store_id=store_id,
        physical_offset=at,
        queue_offset=0,
        end=at + size,
        flush_disk_type="SYNC_FLUSH",
        row_count=0,
        ranges={},
        crcs=(),
        digest=0,
    )
    body = batch_record.body(batch)
    for _ in range(3):
        data = reference.encode(
            topic=BATCH_TOPIC,
            body=body,
            properties=[("KEYS", "app")],
            physical_offset=at,
            store_ms=1 << 42,
            with_crc=True,
        )
        batch = batch_record.replace(batch, end=at + len(data))
        body = batch_record.body(batch)
    return data


def test_a_whole_batch_record_within_a_torn_put_proves_nothing(tmp_path: Path) -> None:
    """A sender who knows the store's id and guesses the place: what lies within a torn message is its body."""
    root = tmp_path / "store"
    store = MessageStore.open(root, ROOMY)
    store.put_message(Message("t", b"whole", queue_id=0))
    end, store_id = store.writer.end.physical_offset, store.writer.files.store_id
    body = b"." * 12 + forged(store_id, end + 100, 0)
    assert batch_record.parse(body[12:], end + 100) is not None
    result = store.put_message(Message("t", body + bytes(5000) + b"end", queue_id=0))
    die(root)
    overwrite(root, end + result.size - 100, bytes(100))
    for path in (root / "consumequeue" / "t" / "0").iterdir():
        path.write_bytes(path.read_bytes()[:20].ljust(path.stat().st_size, b"\0"))
    with MessageStore.open(root, ROOMY) as store:
        assert store.report is not None
        assert (store.report.end, store.report.cut_messages) == (end, 1)
    assert seen(root, ROOMY)[("t", 0)] == ["whole"]


class CountingDisk(Disk):
    """Counts the bytes that are read from the log."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_count = 0

    def pread(self, file: File, size: int, position: int) -> bytes:
        data = super().pread(file, size, position)
        if "/commitlog/" in file.path:
            self.byte_count += len(data)
        return data

    def pread_into(self, file: File, buffer: memoryview, position: int) -> int:
        count = super().pread_into(file, buffer, position)
        if "/commitlog/" in file.path:
            self.byte_count += count
        return count


def needles(size: int, _: int, __: str) -> bytes:
    return (batch_record.BODY_BEGIN * (size // len(batch_record.BODY_BEGIN) + 1))[:size]


def nested_heads(size: int, at: int, _: str) -> bytes:
    """Heads of V1 records of their places, each of which claims all that follows."""
    data, step = bytearray(size), 112
    for start in range(0, size - step, step):
        head = reference.encode(topic=BATCH_TOPIC, body=batch_record.BODY_BEGIN, physical_offset=at + start)
        head = struct.pack(">i", size - start) + head[4:84] + struct.pack(">i", size - start - 150) + head[88:112]
        data[start : start + step] = head.ljust(step, b"x")
    return bytes(data)


def nested_batches(size: int, at: int, store_id: str) -> bytes:
    """As many whole BATCH records of their places as there is room for, and heads around them."""
    data, inner = bytearray(nested_heads(size, at, store_id)), len(forged(store_id, at, 0))
    for start in range(200, size - inner, inner + 200):
        data[start : start + inner] = forged("0" * len(store_id), at + start, 0)
    return bytes(data)


CONTENTS = {f.__name__: f for f in (needles, nested_heads, nested_batches)}


@pytest.mark.parametrize("torn", ["head", "tail"])
@pytest.mark.parametrize("content", CONTENTS)
def test_recovery_reads_in_proportion_to_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, torn: str
) -> None:
    """A put whose body was made to look like thousands of BATCH records was torn: each more byte of it is read and goes through
    a checksum a few times, however many there are."""
    costs = []
    for size in (1 << 15, 1 << 16, 1 << 17):
        root = tmp_path / f"store-{size}"
        store = MessageStore.open(root, ROOMY)
        store.put_message(Message("t", b"whole", queue_id=0))
        end, store_id = store.writer.end.physical_offset, store.writer.files.store_id
        store.append_batch(columns([b"row"] * 3), BatchRequest("app", 0, "spark", flush_disk_type=ASYNC_FLUSH))
        end = store.writer.end.physical_offset
        result = store.put_message(Message("t", CONTENTS[content](size, end + 88, store_id), queue_id=0))
        die(root)
        if torn == "head":
            overwrite(root, end, bytes(64))
        else:
            overwrite(root, end + result.size - 40, bytes(40))
        checksummed = 0

        def counting(data: object, crc: int = 0, *, plain: object = record.crc32) -> int:
            nonlocal checksummed
            checksummed += memoryview(data).nbytes  # type: ignore[arg-type]
            return plain(data, crc)  # type: ignore[operator,no-any-return]

        monkeypatch.setattr(record, "crc32", counting)
        disk = CountingDisk()
        with another_boot(), MessageStore.open(root, ROOMY, disk=disk) as store:
            assert store.report is not None
            assert store.report.end == end
        monkeypatch.undo()
        costs.append(disk.byte_count + checksummed)
    first, second = costs[1] - costs[0], costs[2] - costs[1]  # the rest of the segment is read, too: that is the same
    assert first <= 12 * (1 << 15), costs
    assert second <= 12 * (1 << 16), costs
    assert second <= 2.2 * first, costs


def test_a_real_batch_behind_a_hole_is_found_among_forged_ones(tmp_path: Path) -> None:
    """The search does not miss what it is for: a SYNC_FLUSH batch behind a lost record, with hostile bytes around it."""
    root = tmp_path / "store"
    store = MessageStore.open(root, ROOMY)
    first = store.put_message(Message("t", b"first", queue_id=0))
    end = store.writer.end
    store.put_message(Message("t", nested_heads(1 << 14, end.physical_offset + 88, ""), queue_id=0))
    batch = store.append_batch(columns([b"row"] * 3), BatchRequest("app", 0, "spark"))
    store.put_message(Message("t", nested_heads(1 << 14, store.writer.end.physical_offset + 88, ""), queue_id=0))
    overwrite(root, first.physical_offset, bytes(8))
    before = end._replace(physical_offset=first.physical_offset)
    found = log_tail.later_sync_batch(store.writer.files, before)
    assert found is not None
    assert found.physical_offset == batch.physical_offset
    die(root)
