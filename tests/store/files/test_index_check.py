"""What the check says of the index, compared with what searches find, entry by entry."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messagestore.files import index_check
from messagestore.files.disk import Disk, FilePool
from messagestore.files.index_file import IndexService
from messagestore.files.index_table import ENTRY_DTYPE
from messagestore.format.layout import INDEX_ENTRY, INDEX_HEADER, INDEX_SLOT_SIZE

SLOTS, ENTRIES = 8, 40


def service(root: Path, slots: int = SLOTS, entries: int = ENTRIES) -> IndexService:
    """An index of small files."""
    (root / "spark").mkdir(exist_ok=True)
    index = IndexService(
        str(root / "index"), FilePool(Disk()), str(root / "spark"), slot_count=slots, max_entry_count=entries
    )
    index.load()
    return index


def put(index: IndexService, hashes: list[int], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One key for each record; records are 100 bytes long. The keys' hashes and offsets."""
    offsets = (np.arange(len(hashes), dtype=np.int64) + first) * 100
    keys = np.array(hashes, np.int32)
    index.put(offsets, 1_700_000_000_000, keys, np.ones(len(hashes), np.int32))
    return keys, offsets


def found_by_search(index: IndexService) -> set[tuple[str, int]]:
    """Path and number of every entry that the chain of its slot leads to."""
    found = set()
    for file in index.files:
        count = file.header().entry_count
        for slot in range(file.slot_count):
            number, before = file.slot(slot), 1 << 31
            while 0 < number < min(before, file.max_entry_count):
                found.add((file.path, number))
                before, number = number, file.entry(number)[3]
        found = {(path, number) for path, number in found if path != file.path or number < count}
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def test_nothing_is_missing_in_an_empty_index(root: Path) -> None:
    """No files, no keys."""
    index = service(root)
    empty = np.empty(0, np.int32)
    assert index_check.missing(index.files, empty, empty.astype(np.int64)).tolist() == []
    assert index_check.unreachable(index.files) == []


def test_keys_without_files_are_missing(root: Path) -> None:
    """Each record once, however many keys it has."""
    index = service(root)
    assert index_check.missing(index.files, np.array([1, 2, 3], np.int32), np.array([0, 0, 100])).tolist() == [0, 100]


@given(hashes=st.lists(st.integers(0, 30), min_size=1, max_size=200), chunk=st.integers(1, 50))
def test_what_was_put_is_found(hashes: list[int], chunk: int) -> None:
    """Over several files, asked for in any pieces; a record whose keys lie in two files too."""
    with tempfile.TemporaryDirectory() as folder:
        index = service(Path(folder))
        keys, offsets = put(index, hashes)
        offsets_of_threes = offsets // 300 * 300
        index.unlink_all()
        starts, counts = np.unique(offsets_of_threes, return_counts=True)
        index.put(starts, 1_700_000_000_000, keys, counts.astype(np.int32))
        for start in range(0, len(keys), chunk):
            part = slice(start, start + chunk)
            assert index_check.missing(index.files, keys[part], offsets_of_threes[part]).tolist() == []
        assert index_check.unreachable(index.files) == []
        strange = offsets_of_threes.copy()
        strange[-1] += 1
        assert index_check.missing(index.files, keys, strange).tolist() == [strange[-1]]


@given(
    hashes=st.lists(st.integers(0, 30), min_size=1, max_size=100),
    damages=st.lists(
        st.tuples(st.sampled_from(["slot", "previous"]), st.integers(0, 1000), st.integers(-1, 60)), max_size=3
    ),
    chunk=st.integers(1, 50),
)
def test_what_no_chain_leads_to_is_unreachable(
    hashes: list[int], damages: list[tuple[str, int, int]], chunk: int
) -> None:
    """Any slots and any links of entries damaged: the same entries as a walk along every chain leaves out."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_check, "_ENTRY_CHUNK_COUNT", chunk)
        patch.setattr(index_check, "_SLOT_CHUNK_COUNT", 3)
        index = service(Path(folder))
        put(index, hashes)
        for what, place, value in damages:
            table = index.files[place % len(index.files)]
            position = INDEX_HEADER.size + place % SLOTS * INDEX_SLOT_SIZE
            if what == "previous":
                number = 1 + place % (table.header().entry_count - 1) if table.header().entry_count > 1 else 1
                position = table.entry_position(number) + INDEX_ENTRY.offset("previous")
            with open(table.path, "r+b") as file:
                file.seek(position)
                file.write(value.to_bytes(4, "big", signed=True))
        walked = found_by_search(index)
        all_entries = {(f.path, number) for f in index.files for number in range(1, f.header().entry_count)}
        found = {(path, _number(index, path, position)) for path, position, _ in index_check.unreachable(index.files)}
        # An entry that is reached along the chain of another slot counts as not reached: no put makes such a link.
        assert all_entries - walked <= found
        for path, number in found & walked:
            assert not _in_own_chain(index, path, number)


def _number(index: IndexService, path: str, position: int) -> int:
    table = next(file for file in index.files if file.path == path)
    return (position - table.entry_position(0)) // INDEX_ENTRY.size


def _in_own_chain(index: IndexService, path: str, wanted: int) -> bool:
    table = next(file for file in index.files if file.path == path)
    own = table.entry(wanted)[0] % table.slot_count
    number, before = table.slot(own), 1 << 31
    while 0 < number < min(before, table.max_entry_count):
        if number < table.header().entry_count and table.entry(number)[0] % table.slot_count != own:
            return False
        if number == wanted:
            return True
        before, number = number, table.entry(number)[3]
    return False


def test_a_damaged_offset_leads_no_other_key_astray(root: Path) -> None:
    """The entry in the middle of the file says a place far away: it is missing, and nothing else is."""
    for value in (0, 1 << 40):
        index = service(root, 64, 1000)
        index.unlink_all()
        keys, offsets = put(index, list(range(500)))
        table = index.files[0]
        for number in (251, 126, 376):  # where a binary search looks first
            with open(table.path, "r+b") as file:
                file.seek(table.entry_position(number) + INDEX_ENTRY.offset("physical_offset"))
                file.write(value.to_bytes(8, "big"))
        for start in range(0, 500, 50):
            part = slice(start, start + 50)
            wanted = [n * 100 for n in (125, 250, 375) if start <= n < start + 50]
            assert index_check.missing(index.files, keys[part], offsets[part]).tolist() == wanted


def test_a_check_beside_a_writer(root: Path) -> None:
    """Entries that the header does not count yet are walked through."""
    writer, stop = service(root, 64, 100_000), threading.Event()
    put(writer, [1])

    def write() -> None:
        first = 1
        while not stop.is_set() and first < 90_000:
            put(writer, [(first + i) % 1000 for i in range(20)], first)
            first += 20

    thread = threading.Thread(target=write)
    thread.start()
    try:
        reader = service(root, 64, 100_000)
        for _ in range(60):
            assert index_check.unreachable(reader.files) == []
    finally:
        stop.set()
        thread.join()


def test_entries_are_as_the_layout_says() -> None:
    """The check reads them by these names."""
    assert {"key_hash", "physical_offset", "previous"} <= set(ENTRY_DTYPE.names or ())
