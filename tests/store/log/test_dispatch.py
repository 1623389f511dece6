"""From records to queues and index: from arrays, and from bytes read back."""

from __future__ import annotations

import itertools
import struct
import tempfile
from collections import Counter
from dataclasses import fields
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
import strategies
from messagestore import BatchRequest, Message, MessageStore, StoreConfig
from messagestore.files.consume_queue import queue_directory
from messagestore.files.disk import Disk, File
from messagestore.format import record, record_rows, record_scan
from messagestore.format.hosts import pack_host
from messagestore.format.javahash import index_hash, java_hash
from messagestore.format.layout import SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK
from messagestore.format.rows import SCHEDULE_TOPIC, Rows
from messagestore.log import dispatch
from messagestore.log.walk import Run, Walk, rows_of
from messagestore.writer import log_writer, whole_batch
from small import SMALL, SMALL_ASYNC, ClockDisk, bodies, columns, filled, read_all


def test_what_is_read_back_is_what_was_dispatched(tmp_path: Path) -> None:
    """Units and index hashes from the log's bytes equal those written when the records were appended."""
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(20), queues=3), BatchRequest("app", 0))
        store.put_message(Message("u", b"x", queue_id=1, keys=["a", "ü"], tags="中文"))
        for run in Walk(store.writer.log, 0):
            rows = rows_of(run)
            for topic, queue_id, start, stop in rows.runs():
                units = store.writer.files.queue(topic, queue_id).read(int(rows.queue_offsets[start]), stop - start)
                assert np.array_equal(units["physical_offset"], rows.physical_offsets[start:stop])
                assert np.array_equal(units["size"], rows.sizes[start:stop])
                assert np.array_equal(units["tags_code"], rows.tags_codes[start:stop])
        assert rows.key_hashes[-2:].tolist() == [index_hash("u", "a"), index_hash("u", "ü")]
        assert rows.tags_codes[-1] == java_hash("中文")
        assert rows.key_counts.tolist() == [1] + [1] * 20 + [2]


def test_dispatching_again_changes_nothing(tmp_path: Path) -> None:
    """The same records twice, after a rewind of the index: the same bytes."""
    root = filled(tmp_path / "s", 40)
    files = lambda: {p: p.read_bytes() for f in ("consumequeue", "index") for p in (root / f).rglob("*") if p.is_file()}  # noqa: E731
    before = files()
    with MessageStore.open(root, SMALL) as store:
        dispatcher = store.writer.dispatcher
        dispatcher.rewind_index(0)
        dispatcher.dispatch(rows_of(run) for run in Walk(store.writer.log, 0))
    index = {p.name for p in before if p.parent.name == "index"}
    after = {p: data for p, data in files().items() if p.parent.name != "index"}
    assert after == {p: data for p, data in before.items() if p.parent.name != "index"}
    assert index
    with MessageStore.open_read_only(root) as reader:
        assert [m.body for m in reader.query_message("t", "k7")] == [bodies(40)[7]]


class QueueWrites(Disk):
    """Counts the writes of each queue's files, and how often they are opened."""

    def __init__(self) -> None:
        self.writes: Counter[str] = Counter()
        self.opens: Counter[str] = Counter()

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        self.writes[file.path.rpartition("/")[0]] += 1
        super().pwrite(file, data, position)

    def open(self, path: str | Path, *, writable: bool = False) -> File:
        self.opens[str(path).rpartition("/")[0]] += 1
        return super().open(path, writable=writable)


def test_a_batch_of_many_chunks_writes_each_of_many_queues_once(tmp_path: Path) -> None:
    """The cost of a queue is its system calls: there are as many for two chunks of a batch as for one."""
    disk, queue_count = QueueWrites(), 40
    with MessageStore.open(tmp_path / "s", SMALL, disk=disk) as store:
        store.writer.files.pool.limit = 4  # fewer than there are queues
        for version in range(2):
            disk.writes.clear(), disk.opens.clear()
            chunks = [columns(bodies(3 * queue_count), queues=queue_count) for _ in range(5)]
            store.append_batch(iter(chunks), BatchRequest("app", version, write_queue_nums=queue_count))
        writes, opens = (
            [count[queue_directory(str(tmp_path / "s"), "t", queue_id)] for queue_id in range(queue_count)]
            for count in (disk.writes, disk.opens)
        )
        assert writes == [1] * queue_count
        assert max(opens) == 1
        assert [store.max_offset("t", queue_id) for queue_id in range(queue_count)] == [30] * queue_count
        found = [body for queue_id in range(queue_count) for body in read_all(store, "t", queue_id)]
    assert Counter(found) == Counter(bodies(3 * queue_count) * 10)


@pytest.mark.parametrize("at_once", [1, 37, 1_000_000])
@pytest.mark.parametrize("long_run", [1, 8, 1_000_000])
def test_pieces_that_are_dispatched_together_write_what_each_of_them_would(
    tmp_path: Path, at_once: int, long_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues, seals and index have the same bytes, however many pieces of the log wait for the next one."""

    def written(name: str) -> dict[str, object]:
        disk = ClockDisk(1_800_000_000_000)
        with MessageStore.open(tmp_path / name, SMALL, disk=disk) as store:
            for version in range(3):
                chunks = [
                    columns(bodies(count), queues=queues) for count, queues in ((30, 3), (7, 7), (90, 2), (50, 9))
                ]
                store.append_batch(iter(chunks), BatchRequest("app", version, write_queue_nums=9))
            seals = dict(store.writer.numbers.sealed_ends().seals)
        folders = [tmp_path / name / folder for folder in ("consumequeue", "index")]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return {"seals": seals} | {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    expected = written("usual")
    monkeypatch.setattr(dispatch, "_KEYS_AT_ONCE", at_once)
    monkeypatch.setattr(dispatch, "_LONG_RUN", long_run)
    found = written("other")
    assert found == expected


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_few_records_are_dispatched_as_arrays_are(data: st.DataObject) -> None:
    """Queues and index have the same bytes, whether puts and small batches go through loops or through arrays."""
    groups = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    half = [0, SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK]
    messages = [
        Message(
            data.draw(st.sampled_from(["t", "u"])),
            b"x",
            queue_id=data.draw(st.integers(0, 2)),
            keys=data.draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=3)),
            tags=data.draw(st.sampled_from([None, "tag"])),
            sys_flag=data.draw(st.sampled_from([*half[:1] * 4, *half[1:]])),
        )
        for _ in range(sum(groups))
    ]
    jumps = data.draw(
        st.lists(st.sampled_from([0, 1, 999, 5_000_000, -4_000_000]), min_size=len(groups), max_size=len(groups))
    )
    config = SMALL_ASYNC.replace(max_index_num=data.draw(st.sampled_from([5, 20, 200])))
    with tempfile.TemporaryDirectory() as folder:
        found = [_dispatched(Path(folder, str(few)), config, groups, messages, jumps, few=few) for few in (0, 100)]
    assert found[0] == found[1]


def _dispatched(
    root: Path, config: StoreConfig, groups: list[int], messages: list[Message], jumps: list[int], *, few: int
) -> dict[str, object]:
    """The bytes of queue and index files, and the seals, after puts in groups."""
    disk = ClockDisk(1_800_000_000_000)
    rest = iter(messages)
    with (
        mock.patch.object(log_writer, "FEW_COUNT", few),
        mock.patch.object(whole_batch, "FEW_COUNT", few),
        MessageStore.open(root, config, disk=disk) as store,
    ):
        store._attached.flush.start = lambda: None  # type: ignore[union-attr, method-assign]
        store.writer.start_flushing = lambda: None
        for version, (count, jump_ms) in enumerate(zip(groups, jumps, strict=True)):
            disk.now_ms += jump_ms
            for message in itertools.islice(rest, count):
                store.put_message(message)
            store.writer.publish()
            store.append_batch(columns(bodies(count), queues=3, topic="u"), BatchRequest("app", version))
        ends = store.writer.files.ends
        seals = None if ends is None else dict(ends.seals)
        index = [Path(file.path).read_bytes() for file in store.writer.files.index.files]  # type: ignore[union-attr]
    queues = {str(p.relative_to(root)): p.read_bytes() for p in (root / "consumequeue").rglob("*") if p.is_file()}
    return {"index": index, "seals": seals, **queues}


@pytest.mark.parametrize("what", ["consumequeue", "index"])
def test_files_deleted_under_a_live_writer_are_made_again(tmp_path: Path, what: str) -> None:
    """A broker started by mistake deletes files before it asks for the lock: queues and index are rebuilt from the
    log.
    """
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        store.append_batch(columns(bodies(30)), BatchRequest("app", 0))
        victims = [p for p in (tmp_path / "s" / what).rglob("*") if p.is_file()]
        for path in victims:
            path.unlink()
        store.append_batch(columns(bodies(30, start=30)), BatchRequest("app", 1))
        assert read_all(store) == bodies(60)[::2]
        assert [m.body for m in store.query_message("t", "k4")] == [bodies(60)[4], bodies(60)[34]]


def test_a_deleted_segment_poisons(tmp_path: Path) -> None:
    """The log itself cannot be made again."""
    store = MessageStore.open(tmp_path / "s", SMALL)
    store.append_batch(columns(bodies(3)), BatchRequest("app", 0))
    (tmp_path / "s" / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(RuntimeError, match="deleted or replaced"):
        store.append_batch(columns(bodies(3)), BatchRequest("other", 0))
    store.close()


def scanned(tmp_path: Path, messages: list[tuple[Message, int]], numbers: list[int] | None = None) -> Rows:
    """Records of messages, as read back from a log."""
    host = pack_host("127.0.0.1:10911")
    with MessageStore.open(tmp_path / "s", SMALL) as store:
        position = 0
        for number, (message, sys_flag) in enumerate(messages):
            pairs = tuple(message.properties.items())
            plain = Message(message.topic, message.body, sys_flag=sys_flag)
            data = record.encode_message(plain, queue_id=0, store_host=host, limits=SMALL, extra_properties=pairs)
            record.stamp_record(
                data,
                queue_offset=numbers[number] if numbers else number,
                physical_offset=position,
                store_timestamp_ms=1_000_000,
                property_crc=False,
            )
            store.writer.log.write(position, data)
            position += len(data)
        run = next(iter(Walk(store.writer.log, 0)))
        store.writer.log.undo(0, position)
        return rows_of(run)


def test_delayed_messages_carry_their_due_time(tmp_path: Path) -> None:
    """SCHEDULE_TOPIC_XXXX: the tags code is store time plus the level's delay (vector H); a level above 18 counts as 18,
    as in RocketMQ's own units."""
    levels = {"3": 10_000, "1": 1_000, "18": 7_200_000, "99": 7_200_000}
    messages = [(Message(SCHEDULE_TOPIC, b"x", properties={"DELAY": level}), 0) for level in levels]
    rows = scanned(tmp_path, messages)
    assert rows.tags_codes.tolist() == [1_000_000 + delay for delay in levels.values()]


def test_half_messages_get_no_unit(tmp_path: Path) -> None:
    """PREPARED and ROLLBACK records are in no queue, whatever their number; PREPARED is indexed, as in RocketMQ."""
    prepared, rollback = SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK
    keys = {"KEYS": "k"}
    messages = [(Message("t", b"%d" % i, properties=keys), f) for i, f in enumerate([0, prepared, rollback, 0])]
    assert scanned(tmp_path, messages).has_unit.tolist() == [True, False, False, True]
    rows = scanned(tmp_path, messages, [0, 0, 0, 1])
    assert rows.has_unit.tolist() == [True, False, False, True]
    assert rows.key_counts.tolist() == [1, 1, 0, 1]
    assert rows.by_queue()[("t", 0)].tolist() == [0, 3]
    assert len(rows.key_hashes) == 3


def foreign_record(topic: str, queue_id: int, properties: bytes, number: int) -> bytes:
    """A record with any bytes as properties."""
    data = reference.encode(
        topic=topic,
        body=b"body" * (number % 3),
        queue_id=queue_id,
        queue_offset=number,
        born_host="127.0.0.1:1",
        store_host="[::1]:2",
        store_ms=1_000_000 + number,
    )
    data = data[:-2] + struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", len(data)) + data[4:]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["t", "u", SCHEDULE_TOPIC]) | strategies.topics,
            st.integers(0, 1),
            strategies.property_bytes | st.sampled_from([b"DELAY\x013\x02", b"DELAY\x0119\x02", b"DELAY\x01x\x02"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_few_records_and_many_are_dispatched_alike(found: list[tuple[str, int, bytes]]) -> None:
    """One by one or as arrays: the same rows, whatever the properties are."""
    records = [foreign_record(*one, number) for number, one in enumerate(found)]
    data = np.frombuffer(b"".join(records), np.uint8)
    starts = np.cumsum([0, *map(len, records[:-1])])
    run = Run(4096, data, starts, record_scan.heads(data, starts))
    few, many = (
        way(run.data, starts, run.heads, 4096, run.delay_levels) for way in (record_rows._few, record_rows._many)
    )
    for name in (field.name for field in fields(Rows)):
        value, other = getattr(few, name), getattr(many, name)
        assert np.array_equal(value, other), name
        assert not isinstance(value, np.ndarray) or value.dtype == other.dtype, name
