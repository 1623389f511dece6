"""The index is compared, byte by byte, with RocketMQ's own rules applied one key at a time (java_index.py)."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from java_index import JavaIndex, Record
from messagestore.errors import CorruptionError, StoreFullError
from messagestore.files import index_file, index_rewind, index_table
from messagestore.files.disk import Disk, File, FilePool
from messagestore.files.index_file import IndexService
from messagestore.files.index_table import ENTRY_DTYPE, IndexHeader, slot_position
from messagestore.files.unsynced import FileReplaced
from messagestore.format import kernel
from messagestore.format.javahash import index_hash
from messagestore.format.layout import INDEX_ENTRY, INDEX_HEADER
from small import ClockDisk

NOW_MS = 1_795_170_401_381
FOREVER = (0, 2**62)


@pytest.fixture(scope="module", autouse=True)
def _both_ways() -> Iterator[None]:
    """Puts of these tests have a few dozen keys: the smaller ones go through the loop, the larger through the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("messagestore.files.index_file._FEW_COUNT", 20)
        yield


class QuickDisk(Disk):
    """Does not wait for the disk."""

    def fdatasync(self, file: File) -> None:
        file.fileno()

    def fsync_dir(self, path: str | Path) -> None:
        assert self.is_folder(path)


class WatchedDisk(QuickDisk):
    """Keeps what each file held after each write, remembers writes and syncs, and can fail at a given change."""

    def __init__(self, fail_at: int = -1, error: type[OSError] = OSError) -> None:
        self.versions: dict[str, list[bytes]] = {}
        self.writes: list[tuple[int, int]] = []
        self.synced: list[str] = []
        self.fail_at = fail_at
        self.error = error

    def _change(self) -> None:
        self.fail_at -= 1
        if self.fail_at == -1:
            raise self.error("cut off here") if self.error is OSError else _full()

    def pwrite(self, file: File, data: bytes | bytearray | memoryview, position: int) -> None:
        self._change()
        super().pwrite(file, data, position)
        self.writes.append((position, len(data)))
        self._keep(file)

    def punch(self, file: File, position: int, size: int) -> None:
        self._change()
        super().punch(file, position, size)
        self._keep(file)

    def unlink(self, path: str | Path) -> None:
        self._change()
        super().unlink(path)

    def fdatasync(self, file: File) -> None:
        self._change()
        super().fdatasync(file)
        self.synced.append(os.path.basename(file.path))

    def fsync_dir(self, path: str | Path) -> None:
        super().fsync_dir(path)
        self.synced.append(os.path.basename(path) + "/")

    def _keep(self, file: File) -> None:
        size = os.fstat(file.fileno()).st_size
        if size < 1 << 20:
            self.versions.setdefault(file.path, []).append(os.pread(file.fileno(), size, 0))


def _full() -> StoreFullError:
    return StoreFullError("no room", path="index", needed=20, free=0)


def make(root: str | Path, slots: int = 7, entries: int = 10, disk: Disk | None = None) -> IndexService:
    os.makedirs(os.path.join(root, "spark"), exist_ok=True)
    index = IndexService(
        os.path.join(root, "index"),
        FilePool(disk or QuickDisk(), 8),
        os.path.join(root, "spark"),
        slot_count=slots,
        max_entry_count=entries,
    )
    index.load()
    return index


def put(index: IndexService, records: list[Record], one_time: bool = False) -> None:
    times = np.array([r.store_timestamp_ms for r in records], np.int64)
    index.put(
        np.array([r.physical_offset for r in records], np.int64),
        int(times[0]) if one_time else times,
        np.array([h for r in records for h in r.hashes], np.int32),
        np.array([len(r.hashes) for r in records], np.int32),
    )


def images(root: str | Path) -> list[bytes]:
    folder = Path(root, "index")
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.exists() else []


def java(records: list[Record], slots: int, entries: int) -> JavaIndex:
    index = JavaIndex(slots, entries)
    for record in records:
        index.build(record)
    return index


def some_records(
    rng: random.Random, count: int, physical: int = 0, hash_count: int = 0, most_keys: int = 4, step_ms: int = 700
) -> list[Record]:
    """Records in log order; hashes from all, or from `hash_count` of them; store times may go back."""
    pool = [rng.choice([0, 1, rng.randrange(2**31)]) for _ in range(hash_count)]
    records, now = [], NOW_MS
    for _ in range(count):
        hashes = [rng.choice(pool) if pool else rng.randrange(2**31) for _ in range(rng.randrange(most_keys + 1))]
        records.append(Record(physical, now, hashes))
        physical += rng.randrange(91, 300)
        now += rng.randrange(-step_ms // 10, step_ms + 1)
    return records


SEEDS = st.integers(0, 2**32).map(random.Random)
SHAPES = st.tuples(st.integers(1, 40), st.integers(2, 60))
HASH_COUNTS = st.sampled_from([0, 1, 3, 30])


# ---- the bytes


def test_header_and_entry_have_the_bytes_java_wrote():
    """Bytes that Java wrote (vector J)."""
    header = IndexHeader(NOW_MS, NOW_MS + 84, 0, 69784, 9, 17)
    java_header = "000001a1f87e7c65000001a1f87e7cb9000000000000000000000000000110980000000900000011"
    assert header.to_bytes().hex() == java_header
    assert IndexHeader._fields == tuple(field.name for field in INDEX_HEADER.fields)
    entry = np.frombuffer(bytes.fromhex("7170b40300000000000005aa0000000000000008"), INDEX_ENTRY.dtype)
    assert entry.astype(ENTRY_DTYPE)[0].item() == (1903211523, 1450, 0, 8)
    assert [index_hash("TopicA", key) for key in ("U1", "k1", "k2")] == [1903241331, 1903240649, 1903240648]


@settings(max_examples=60, deadline=None)
@given(SEEDS, SHAPES, HASH_COUNTS, st.integers(0, 120), st.booleans())
def test_puts_write_what_java_writes(rng: random.Random, shape: tuple[int, int], hashes: int, count: int, reopen: bool):
    """Any split of the records into puts gives Java's files: entries, slots, headers, one file after the other."""
    records = some_records(rng, count, rng.choice([0, 5, 2**32 - 5000, 2**62]), hashes)
    with tempfile.TemporaryDirectory() as root:
        index = make(root, *shape)
        done = 0
        while done < count:
            step = rng.choice([1, 2, 5, 50])
            put(index, records[done : done + step])
            done += step
            if reopen:
                index = make(root, *shape)
        expected = java(records, *shape)
        assert images(root) == expected.images()
        assert index.end_physical_offset == (expected.files[-1].end_physical if count else 0)
        assert index.end_timestamp_ms == (expected.files[-1].end_time if count else 0)
        names = sorted(os.listdir(Path(root, "index"))) if count else []
        assert all(len(name) == 17 and name.isdigit() for name in names)


@settings(max_examples=24, deadline=None)
@given(SEEDS, SHAPES, HASH_COUNTS)
def test_records_put_before_are_skipped(rng: random.Random, shape: tuple[int, int], hashes: int):
    """A record below the newest entry's is skipped, one at it is put again: Java's rule, Java's duplicates."""
    records = some_records(rng, 60, 0, hashes)
    with tempfile.TemporaryDirectory() as root:
        index = make(root, *shape)
        expected = JavaIndex(*shape)
        for _ in range(6):
            first = rng.randrange(60)
            part = records[first : first + rng.randrange(1, 40)]
            put(index, part)
            for record in part:
                expected.build(record)
        assert images(root) == expected.images()


@settings(max_examples=40, deadline=None)
@given(SEEDS, SHAPES, st.sampled_from([1, 3, 30]), st.data())
def test_a_search_finds_what_java_finds(rng: random.Random, shape: tuple[int, int], hashes: int, data: st.DataObject):
    """Same hits in the same order, for any hash, count and time; without limits, all there are (a dict's answer)."""
    records = some_records(rng, 80, 1000, hashes)
    with tempfile.TemporaryDirectory() as root:
        index = make(root, *shape)
        put(index, records)
        expected = java(records, *shape)
        by_hash: dict[int, list[int]] = {}
        for record in records:
            for key_hash in record.hashes:
                by_hash.setdefault(key_hash, []).insert(0, record.physical_offset)
        for key_hash in [*by_hash, 12345]:
            most = data.draw(st.sampled_from([1, 2, 64]))
            begin, end = sorted(NOW_MS + data.draw(st.integers(-3000, 30_000)) for _ in range(2))
            assert search(index, key_hash, most, begin, end) == expected.query(key_hash, most, begin, end)
            assert search(index, key_hash, 1000, *FOREVER) == by_hash.get(key_hash, [])


def search(index: IndexService, key_hash: int, most: int, begin: int, end: int) -> list[int]:
    """IndexService.search for a hash instead of a key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("messagestore.files.index_file.index_hash", lambda _topic, _key: key_hash)
        return index.search("T", "k", most, begin, end)


def test_keys_are_found_by_topic_and_key(tmp_path: Path):
    """Also the key whose Java hash is the smallest int, whose index hash is 0."""
    index = make(tmp_path, 100, 1000)
    keys = [("T", "a"), ("T", "b"), ("U", "a"), ("orders", "d1kjgwz")]
    assert index_hash("orders", "d1kjgwz") == 0
    put(index, [Record(10 * i, NOW_MS, [index_hash(*key)]) for i, key in enumerate(keys)])
    for i, key in enumerate(keys):
        assert index.search(*key, 64, *FOREVER) == [10 * i]
    assert index.search("T", "c", 64, *FOREVER) == []


def test_a_record_without_keys_makes_the_file(tmp_path: Path):
    """As Java: the first record makes the first file, the first one behind a full file the next."""
    index = make(tmp_path, 3, 3)
    put(index, [Record(0, NOW_MS)])
    assert images(tmp_path) == [IndexHeader().to_bytes() + bytes(3 * 4 + 3 * 20)]
    put(index, [Record(50, NOW_MS, [1, 2])])
    assert len(images(tmp_path)) == 1
    put(index, [Record(70, NOW_MS)])
    assert images(tmp_path)[1][:40] == IndexHeader(NOW_MS, NOW_MS, 50, 50).to_bytes()
    assert index.ranges() == [(50, 50)]


def test_a_second_files_first_entry_counts_from_the_file_before(tmp_path: Path):
    """Java's quirk, kept: 5 s after the first file's end, in a file that begins with that very entry."""
    index = make(tmp_path, 3, 2)
    put(index, [Record(0, NOW_MS, [1]), Record(50, NOW_MS + 5000, [2])])
    table = index.files[-1]
    assert table.header() == IndexHeader(NOW_MS + 5000, NOW_MS + 5000, 50, 50, 1, 2)
    assert table.entry(1) == (2, 50, 5, 0)


@pytest.mark.parametrize(("later_ms", "seconds"), [(100 * 365 * 86_400_000, 2**31 - 1), (-5000, 0), (1999, 1)])
def test_times_are_clamped(tmp_path: Path, later_ms: int, seconds: int):
    """A clock a century ahead, or back: the entry is kept, its seconds end at the ends of the field."""
    for count in (1, 40):  # one by one, and as arrays
        index = make(tmp_path / str(count), 50, 100)
        put(index, [Record(0, NOW_MS, [1])])
        put(index, [Record(9, NOW_MS + later_ms, [2] * count)])
        assert index.files[-1].entry(2)[2] == seconds
        assert search(index, 2, 1, 0, 2**62) == [9]


def test_one_time_for_all_records(tmp_path: Path):
    """A batch has one store time."""
    index = make(tmp_path, 50, 100)
    records = [Record(i * 10, NOW_MS, [i]) for i in range(40)]
    put(index, records, one_time=True)
    assert images(tmp_path) == java(records, 50, 100).images()


def test_entries_come_before_the_header_and_slots_last(tmp_path: Path):
    """What a slot points to is there, and counted: a broker that took over from a killed writer kept a file whose slots
    led to entries the header did not count, and lost the keys behind them. A small put touches little."""
    disk = WatchedDisk()
    index = make(tmp_path, 400_000, 1000, disk)
    entries_at, page = slot_position(400_000), 4096
    for count in (10, 40):
        put(index, [Record(count * 1000 + i, NOW_MS, [i * 8192]) for i in range(count)])
        few = count <= index_file._FEW_COUNT or kernel.lib is None
        slots = {i * 8192 % 400_000 for i in range(count)}
        places = [slot_position(slot) for slot in slots] if few else {slot_position(s) // page for s in slots}
        entries, header, *rest = disk.writes[-len(places) - 2 :]
        assert entries == (entries_at + 20 * (1 if count == 10 else 11), 20 * count)
        assert header == (0, 40)
        if few:
            assert sorted(rest) == sorted((place, 4) for place in places)
        else:
            assert all(at >= 40 and at + size <= entries_at and size <= page for at, size in rest)
            assert {at // page for at, _ in rest} == places


def test_a_slot_that_leads_to_an_entry_of_the_next_put_is_empty(tmp_path: Path):
    """Nothing may lead there before the put; the keys get the entries that Java gives them."""
    index = make(tmp_path, 10, 1000)
    before, after = [Record(0, NOW_MS, [3])], [Record(9 + i, NOW_MS, [i % 7]) for i in range(40)]
    put(index, before)
    with Disk().open(index.files[0].path, writable=True) as file:
        for slot, number in enumerate([5, 41, 42, 1, 17, -1, 2**31 - 1, 39, 11, 0]):
            os.pwrite(file.fileno(), number.to_bytes(4, "big", signed=True), slot_position(slot))
    index = make(tmp_path, 10, 1000)
    put(index, after)
    slots = [slice(slot_position(slot), slot_position(slot + 1)) for slot in range(7)]
    [found], [expected] = images(tmp_path), java(before + after, 10, 1000).images()
    assert [found[slot] for slot in slots] == [expected[slot] for slot in slots]
    assert found[slot_position(10) :] == expected[slot_position(10) :]


@pytest.mark.parametrize(
    ("offsets", "times", "hashes", "counts"),
    [
        ([5], NOW_MS, [1], [1, 0]),
        ([5], [NOW_MS, NOW_MS], [1], [1]),
        ([5], NOW_MS, [1], [2]),
        ([5, 6], NOW_MS, [1], [2, -1]),
        ([5], NOW_MS, [-1], [1]),
        ([5, 4], NOW_MS, [1], [1, 0]),
        ([-5], NOW_MS, [1], [1]),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, offsets, times, hashes, counts):
    """Before a byte is written."""
    index = make(tmp_path)
    with pytest.raises(ValueError, match="found"):
        index.put(
            np.array(offsets, np.int64),
            times if isinstance(times, int) else np.array(times, np.int64),
            np.array(hashes, np.int32),
            np.array(counts, np.int32),
        )
    assert images(tmp_path) == []


def test_large_puts_go_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The memory of a put is bounded; the bytes are the same."""
    monkeypatch.setattr("messagestore.files.index_file._PUT_COUNT", 50)
    records = some_records(random.Random(1), 200)
    index = make(tmp_path, 1000, 300)
    put(index, records)
    assert images(tmp_path) == java(records, 1000, 300).images()


@pytest.mark.parametrize("disk", [Disk(), QuickDisk()], ids=["many parts by one call", "each part by a call"])
def test_few_keys_read_and_write_slots_and_many_keys_pages(tmp_path: Path, disk: Disk):
    """The bytes are those of Java in both cases, also where several keys of a put share a slot."""
    shape = (30_000, 3000)
    records = some_records(random.Random(2), 700, hash_count=300)
    index = make(tmp_path, *shape, disk)
    put(index, records[:15])
    put(index, records[15:30])
    put(index, records[30:400])
    put(index, records[400:])
    assert images(tmp_path) == java(records, *shape).images()


# ---- rewind


def rewound(
    root: str | Path, shape: tuple[int, int], offset: int, times: dict[int, int], disk: Disk | None = None
) -> None:
    index_rewind.rewind(make(root, *shape, disk), offset, times.get)


def check_rewind(root: str, shape: tuple[int, int], before: list[Record], after: list[Record], offset: int) -> None:
    """Rewound, the files are those of the records before; with those after put again, those of all."""
    times = {r.physical_offset: r.store_timestamp_ms for r in before + after}
    rewound(root, shape, offset, times)
    expected = java(before, *shape)
    assert images(root) == expected.images_with_entries()
    again = WatchedDisk()
    rewound(root, shape, offset, times, again)
    assert not again.writes
    assert not again.synced
    index = make(root, *shape)
    last = expected.images_with_entries()
    assert index.end_physical_offset == (expected.files[len(last) - 1].end_physical if last else 0)
    put(index, [*before[-1:], *after] if not last else after)
    if last:
        assert images(root) == java(before + after, *shape).images()


@settings(max_examples=60, deadline=None)
@given(SEEDS, SHAPES, HASH_COUNTS, st.integers(0, 80), st.integers(0, 80))
def test_rewind_after_a_kill(rng: random.Random, shape: tuple[int, int], hashes: int, kept: int, later: int):
    """The process died, the page cache lives: all of the later puts is there, and all of it goes."""
    records = some_records(rng, kept + later + 1, rng.choice([0, 9, 2**32 - 3000, 2**60]), hashes)
    offset = records[kept].physical_offset
    with tempfile.TemporaryDirectory() as root:
        put(make(root, *shape), records)
        check_rewind(root, shape, records[:kept], records[kept:], offset)


def survive(rng: random.Random, root: str, base: dict[str, bytes], disk: WatchedDisk, unit_size: int) -> None:
    """Each page of each file as it was at some time since the base; new names may be gone."""
    mix = rng.choice(["any", "old or new", "mostly old", "mostly new"])
    for path, versions in disk.versions.items():
        if not path.startswith(os.path.join(root, "index")):
            continue
        choices = [base.get(path, bytes(len(versions[0]))), *versions]
        if path not in base and rng.random() < 0.2:
            Path(path).unlink()
            continue
        image = bytearray(choices[-1])
        for at in range(0, len(image), unit_size):
            old = {"any": 0.5, "old or new": 0.5, "mostly old": 0.95, "mostly new": 0.05}[mix] > rng.random()
            chosen = rng.choice(choices) if mix == "any" else choices[0 if old else -1]
            image[at : at + unit_size] = chosen[at : at + unit_size]
        Path(path).write_bytes(image)


LARGE_SHAPES = st.tuples(st.integers(1, 3000), st.integers(2, 900))


@settings(max_examples=24, deadline=None)
@given(SEEDS, LARGE_SHAPES, HASH_COUNTS, st.integers(0, 250), st.integers(1, 250), st.sampled_from([512, 4096]))
def test_rewind_after_a_power_cut(
    rng: random.Random, shape: tuple[int, int], hashes: int, kept: int, later: int, unit_size: int
):
    """What was synced is whole; of the later puts any pages, at any time, are on the disk. None of it shows."""
    records = some_records(rng, kept + later, rng.choice([1, 2**32 - 3000, 2**32 + 5, 2**60]), hashes)
    offset = records[kept].physical_offset
    with tempfile.TemporaryDirectory() as root:
        index = make(root, *shape)
        put(index, records[:kept])
        index.sync()
        base = {file.path: Path(file.path).read_bytes() for file in index.files}
        disk = WatchedDisk()
        index = make(root, *shape, disk)
        done = kept
        while done < len(records):
            step = rng.choice([3, 10, 60])
            put(index, records[done : done + step])
            done += step
        index.files.clear()
        survive(rng, root, base, disk, unit_size)
        check_rewind(root, shape, records[:kept], records[kept:], offset)


@settings(max_examples=16, deadline=None)
@given(SEEDS, st.tuples(st.integers(1, 40), st.integers(30, 60)), HASH_COUNTS, st.integers(0, 60), st.integers(1, 60))
def test_a_rewind_that_is_cut_off_is_done_again(
    rng: random.Random, shape: tuple[int, int], hashes: int, kept: int, later: int
):
    """Killed before its n-th change, for each n, the next rewind ends with the same bytes."""
    records = some_records(rng, kept + later, 1, hashes)
    offset = records[kept].physical_offset
    times = {r.physical_offset: r.store_timestamp_ms for r in records}
    with tempfile.TemporaryDirectory() as root:
        put(make(root, *shape), records)
        start = {path: path.read_bytes() for path in Path(root, "index").iterdir()}
        rewound(root, shape, offset, times)
        expected = images(root)
        for change in range(30):
            for path, data in start.items():
                path.write_bytes(data)
            try:
                rewound(root, shape, offset, times, WatchedDisk(fail_at=change))
            except OSError:
                rewound(root, shape, offset, times)
            else:
                assert images(root) == expected
                return
            assert images(root) == expected
    pytest.fail("a rewind of a few small files makes less than thirty changes")


@settings(max_examples=24, deadline=None)
@given(SEEDS, SHAPES, HASH_COUNTS, st.integers(0, 40), st.integers(1, 60))
def test_a_put_that_failed_is_rewound(rng: random.Random, shape: tuple[int, int], hashes: int, kept: int, later: int):
    """The disk was full in the middle: after a rewind the same records are put, and nothing is left of the attempt."""
    records = some_records(rng, kept + later, 1, hashes)
    with tempfile.TemporaryDirectory() as root:
        index = make(root, *shape)
        if kept:
            put(index, records[:kept])
        index.sync()
        index = make(root, *shape, WatchedDisk(rng.randrange(12), StoreFullError))
        try:
            put(index, records[kept:])
        except StoreFullError:
            times = {r.physical_offset: r.store_timestamp_ms for r in records}
            index_rewind.rewind(index, records[kept].physical_offset, times.get)
            put(index, [r for r in records if r.physical_offset > index.end_physical_offset])
        assert images(root) == java(records, *shape).images()


def test_the_end_time_is_that_of_the_last_entry(tmp_path: Path):
    """Nobody knows the milliseconds any more: the header's end is made from the entry, never later than the truth."""
    records = [Record(i * 100, NOW_MS + i * 1300, [i]) for i in range(10)]
    put(make(tmp_path, 50, 4), records)
    index = make(tmp_path, 50, 4)
    index_rewind.rewind(index, 800)
    assert index.end_timestamp_ms == NOW_MS + 6 * 1300 + 1000  # entry 2 of the third file: 1300 ms after its begin
    assert index.end_physical_offset == 700
    index_rewind.rewind(index, 700)
    assert index.end_timestamp_ms == NOW_MS + 6 * 1300
    assert search(index, 6, 9, NOW_MS + 6 * 1300, NOW_MS + 6 * 1300) == []  # Java's quirk: it counts 1 s more
    assert search(index, 5, 9, *FOREVER) == [500]


def test_a_key_of_zeros_at_the_logs_origin_is_kept(tmp_path: Path):
    """Hash 0, record 0, no time, none before: an entry that looks like none."""
    for others in (0, 1, 5, 30):
        root = tmp_path / str(others)
        before = [Record(0, NOW_MS, [8] * others + [0] + [9] * others)]
        after = [Record(100, NOW_MS, [0, 7, 8])]
        put(make(root, 7, 200), before + after)
        check_rewind(str(root), (7, 200), before, after, 100)


def test_an_entry_that_lost_its_link_back_ends_no_chain(tmp_path: Path):
    """Its last four bytes, in a sector of their own, did not reach the disk: "none before" is then no answer."""
    shape = (3, 200)
    before = [Record(i * 10, NOW_MS, [i]) for i in range(98)]
    after = [Record(980, NOW_MS, [5])]
    index = make(tmp_path, *shape)
    put(index, before + after)
    table = index.files[0]
    cut = table.entry_position(99) + 16
    assert cut % 512 == 0
    assert table.entry(99)[3] == 96
    with open(table.path, "r+b") as file:
        file.seek(cut)
        file.write(bytes(512))
    check_rewind(str(tmp_path), shape, before, after, 980)


def test_chains_too_long_to_follow_are_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One key in every record: the chain is as long as the file, and found by scanning, in chunks."""
    for name in ("_ENTRY_CHUNK_COUNT", "_SLOT_CHUNK_COUNT"):
        monkeypatch.setattr(index_rewind, name, 16)
    scans = []
    scan = index_rewind._scan
    monkeypatch.setattr(index_rewind, "_MAX_ROUNDS", 3)
    monkeypatch.setattr(index_rewind, "_scan", lambda *args: scans.append(1) or scan(*args))
    before = [Record(i * 10, NOW_MS, [5, i + 7]) for i in range(100)]
    after = [Record(1000 + i * 10, NOW_MS, [5, i * 3]) for i in range(100)]
    put(make(tmp_path, 40, 500), before + after)
    check_rewind(str(tmp_path), (40, 500), before, after, 1000)
    assert scans


def test_a_rewind_to_the_origin_leaves_no_file(tmp_path: Path):
    """Nothing was ever put: no file, as before the first record."""
    put(make(tmp_path), [Record(i, NOW_MS, [i]) for i in range(30)])
    assert len(images(tmp_path)) == 4
    index_rewind.rewind(make(tmp_path), 0)
    assert images(tmp_path) == []


def test_what_a_rewind_changed_is_synced(tmp_path: Path):
    """Else a later power cut could bring back entries of the history that was dropped, between those of the new one."""
    put(make(tmp_path), [Record(i, NOW_MS, [i]) for i in range(12)])
    disk = WatchedDisk()
    index = make(tmp_path, disk=disk)
    index_rewind.rewind(index, 5)
    assert disk.synced == [os.path.basename(index.files[0].path), "index/"]


# ---- hostile files


@settings(max_examples=60, deadline=None)
@given(SEEDS, SHAPES, st.integers(0, 300))
def test_any_bytes_end_in_an_answer(rng: random.Random, shape: tuple[int, int], physical: int):
    """Cycles, forward pointers, negative counts: searches end, a rewind and a put leave a working index."""
    slots, entries = shape
    with tempfile.TemporaryDirectory() as root:
        Path(root, "index").mkdir()
        words = [rng.choice([0, 1, 2, 3, rng.randrange(entries + 2), rng.getrandbits(32)]) for _ in range(2000)]
        data = b"".join(word.to_bytes(4, "big") for word in words)
        Path(root, "index", "20250101000000000").write_bytes(data[: 40 + slots * 4 + entries * 20])
        index = make(root, *shape)
        for key_hash in range(slots + 1):
            assert len(search(index, key_hash, 1000, 0, 2**62)) < entries
        index.ranges()
        index_rewind.rewind(index, physical)
        index.put(np.array([2**62]), NOW_MS, np.array([3], np.int32), np.array([1], np.int32))
        if index.end_physical_offset == 2**62:
            assert 2**62 in index.files[-1].search(3, 1000, -(2**63), 2**64)


def test_a_cycle_in_a_chain_ends(tmp_path: Path):
    """Two entries that point to each other: RocketMQ stops only at one that points to itself."""
    index = make(tmp_path, 1, 10)
    put(index, [Record(i, NOW_MS, [i]) for i in range(4)])
    table = index.files[0]
    entries = table.entries(1, 4)
    entries["previous"] = [2, 3, 2, 3]
    with open(table.path, "r+b") as file:
        file.seek(table.entry_position(1))
        file.write(entries.astype(INDEX_ENTRY.dtype).tobytes())
    assert search(index, 0, 64, *FOREVER) == []
    assert search(index, 2, 64, *FOREVER) == [2]


def test_a_search_gives_up_after_a_million_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A slot full of other keys must not hold a reader for minutes; the log says so."""
    monkeypatch.setattr(index_table, "_MAX_STEPS", 20)
    index = make(tmp_path, 1, 100)
    put(index, [Record(i, NOW_MS, [0 if i < 5 else i]) for i in range(50)])
    assert search(index, 0, 64, *FOREVER) == []
    assert "stopped after 20 entries" in caplog.text
    assert search(index, 40, 1, *FOREVER) == [40]


def test_entries_being_put_do_not_hide_those_that_are_there(tmp_path: Path):
    """Slots are written before the header: a reader meets a number the header does not count yet, and walks on."""
    index = make(tmp_path, 2, 100)
    put(index, [Record(0, NOW_MS, [1, 2])])
    header = Path(index.files[0].path).read_bytes()[:40]
    put(index, [Record(100, NOW_MS, [1, 3])])
    with open(index.files[0].path, "r+b") as file:
        file.write(header)
    reader = make(tmp_path, 2, 100)
    assert search(reader, 1, 64, *FOREVER) == [0]


# ---- files


def test_names_go_up_whatever_the_clock_does(tmp_path: Path):
    """Java takes the last name for the newest file: a clock set back must not put a new file before an old one."""
    disk = ClockDisk()
    index = make(tmp_path, 3, 2, disk)
    now = time.time_ns()
    for i, moment in enumerate((now, now, now - 10**15, now + 5_000_000)):
        disk.now_ms = moment // 10**6
        put(index, [Record(i, NOW_MS, [i])])
    names = [os.path.basename(file.path) for file in index.files]
    assert names == sorted(os.listdir(tmp_path / "index"))
    assert names[0] == time.strftime("%Y%m%d%H%M%S", time.localtime(now // 10**9)) + f"{now // 10**6 % 1000:03d}"
    assert int(names[1]) == int(names[0]) + 1
    assert int(names[2]) == int(names[0]) + 2
    assert search(index, 2, 64, *FOREVER) == [2]


def test_load_skips_what_rocketmq_skips(tmp_path: Path):
    """Names that are no numbers, folders, and a file a broker has just made."""
    index = make(tmp_path)
    put(index, [Record(0, NOW_MS, [1])])
    folder = tmp_path / "index"
    (folder / "x.tmp").write_bytes(b"x")
    (folder / "99990101000000000").mkdir()
    (folder / "99980101000000000").write_bytes(b"")
    assert [file.path for file in make(tmp_path).files] == [file.path for file in index.files]


def test_another_size_is_refused_with_the_settings(tmp_path: Path):
    """Slot and entry counts are not in the file: read with others, every byte would mean something else."""
    put(make(tmp_path, 7, 10), [Record(0, NOW_MS, [1])])
    with pytest.raises(
        CorruptionError, match=r"maxHashSlotNum 7, maxIndexNum 11.*settings with which it was written"
    ) as error:
        make(tmp_path, 7, 11)
    assert "`--store-config`" in str(error.value)  # a broker that runs would go on without the folder
    assert "delete the folder index while no broker runs" in str(error.value)


def test_ranges(tmp_path: Path):
    """What a key lookup need not scan the log for."""
    index = make(tmp_path, 7, 4)
    assert index.ranges() == []
    put(index, [Record(100 + i * 10, NOW_MS, [i]) for i in range(5)])
    assert index.ranges() == [(100, 120), (130, 140)]


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("delete", [False, True])
@pytest.mark.parametrize(
    "call",
    [IndexService.check_files, IndexService.sync, lambda index: put(index, [Record(5, NOW_MS, [1])])],
)
def test_a_replaced_file_is_noticed(tmp_path: Path, call: Callable[[IndexService], None], forget: bool, delete: bool):
    """A second broker deletes the newest index file before it asks for the lock."""
    index = make(tmp_path)
    put(index, [Record(0, NOW_MS, [1])])
    index.check_files()
    path = Path(index.files[0].path)
    data = path.read_bytes()
    if not delete:
        path.with_suffix(".x").write_bytes(data)
        path.with_suffix(".x").rename(path)
    else:
        path.unlink()
    if forget:
        index.pool.clear()
    with pytest.raises(FileReplaced, match="deleted or replaced"):
        call(index)
    index.unlink_all()
    index.load()
    put(index, [Record(0, NOW_MS, [1])])
    index.sync()
    assert images(tmp_path) == [data]


def test_sync_forces_files_and_folders_once(tmp_path: Path):
    """Then nothing is left to force."""
    disk = WatchedDisk()
    index = make(tmp_path, 7, 3, disk)
    put(index, [Record(i, NOW_MS, [i]) for i in range(3)])
    index.sync()
    index.sync()
    names = [os.path.basename(file.path) for file in index.files]
    assert disk.synced == [*names, "index/", tmp_path.name + "/"]
    put(index, [Record(3, NOW_MS, [3])])
    index.written.clear()
    index.sync()
    assert len(disk.synced) == 4


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path):
    """A full disk while the next file is made: no stray file anywhere."""
    index = make(tmp_path, disk=WatchedDisk(0, StoreFullError))
    with pytest.raises(StoreFullError):
        put(index, [Record(0, NOW_MS, [1])])
    assert os.listdir(tmp_path / "spark") == []
    assert images(tmp_path) == []
    put(index, [Record(0, NOW_MS, [1])])
    assert images(tmp_path) == java([Record(0, NOW_MS, [1])], 7, 10).images()
