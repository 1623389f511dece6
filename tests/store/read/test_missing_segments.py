"""A log that lacks segments: a copy of a part of it, one of several folders, a disk that lost files. No reader shows the
rest of it as if it were all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import missing_segments
from messagestore import ConfigError, CorruptionError, MessageStore, NotAStoreError, ReadOnlyStore, StoreConfig
from messagestore.format.layout import UNIT
from messagestore.inspect.verify import verify
from messagestore.read.view import StoreView
from missing_segments import MISSING, STORES, prepared, segments
from small import SMALL, filled, read_all


def _looks(store: ReadOnlyStore) -> dict[str, Callable[[], object]]:
    """Each way to look at what was in the last segment."""
    return {
        "max_offset": lambda: store.max_offset("t", 0),
        "get_message": lambda: store.get_message("t", 0, 0, 1000),
        "get_batch": lambda: store.get_batch("t", 0, 0),
        "read": lambda: read_all(store),
        "query_message": lambda: store.query_message("t", "k199"),
        "queue_offset_by_time": lambda: store.queue_offset_by_time("t", 0, 1 << 50),
        "look_message_by_offset": lambda: store.look_message_by_offset(missing_segments.last_record(store)),
        "wait": lambda: store.wait("t", 0, 99, timeout=0),
        "follow": lambda: list(store.follow("t", 0, 0, timeout=0)),
    }


def _look(root: Path, name: str) -> object:
    with MessageStore.open_read_only(root, SMALL) as store:
        return _looks(store)[name]()


REFUSED = r"segment|no commitlog folder|this file|last record"
LOOKS = ["max_offset", "get_message", "get_batch", "read", "query_message", "queue_offset_by_time",
         "look_message_by_offset", "wait", "follow"]  # fmt: skip


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("whose", STORES)
def test_no_way_to_look_shows_a_part_of_the_log(tmp_path: Path, whose: str, missing: str) -> None:
    """Each way, whoever left the store, whatever is missing; the whole store is shown by each."""
    root = prepared(tmp_path, whose)
    with MessageStore.open_read_only(root, SMALL) as store:
        missing_segments.end = store.view.files.commit_log.max_offset
        assert list(_looks(store)) == LOOKS
        for look in _looks(store).values():
            look()
        assert len(read_all(store)) == 100
    MISSING[missing](root)
    for name in LOOKS:
        with pytest.raises((CorruptionError, NotAStoreError), match=REFUSED):
            _look(root, name)
    try:
        assert not verify(root, SMALL).ok
    except NotAStoreError:
        assert missing == "the folder"


def test_what_retention_deletes_is_not_missing(tmp_path: Path) -> None:
    """The first segments may go, one by one, down to the last one."""
    for whose in STORES:
        root = prepared(tmp_path / whose.replace(" ", "-"), whose)
        for path in segments(root)[:-1]:
            path.unlink()
            with MessageStore.open_read_only(root, SMALL) as store:
                assert store.max_offset("t", 0) == 100


def test_a_segment_that_a_live_broker_makes_is_not_missing(tmp_path: Path) -> None:
    """The reader knew the folder before; the next unit points into a segment that it has not seen."""
    root = prepared(tmp_path, "a broker at work")
    last = segments(root)[-1]
    data = last.read_bytes()
    last.unlink()
    unit_files = {path: path.read_bytes() for path in root.glob("consumequeue/*/*/*")}
    for path, whole in unit_files.items():
        units = np.frombuffer(whole, UNIT.dtype).copy()
        units[units["physical_offset"] >= int(last.name)] = 0
        path.write_bytes(units.tobytes())
    view = StoreView(root, SMALL)
    known = view.max_offset("t", 1)
    last.write_bytes(data)
    for path, whole in unit_files.items():
        path.write_bytes(whole)
    assert view.max_offset("t", 1) > known
    view.close()


@pytest.mark.parametrize("key", ["storePathCommitLog", "readOnlyCommitLogStorePaths"])
def test_a_log_in_several_folders_is_refused_by_name(tmp_path: Path, key: str) -> None:
    """The broker's own settings say so: readers refuse the store as writers do."""
    root = filled(tmp_path / "s")
    (tmp_path / "broker.conf").write_text(f"brokerName=a\n{key}={root}/commitlog,/mnt/b\n")
    config = StoreConfig.load(tmp_path / "broker.conf")
    for look in (MessageStore.open_read_only, verify, MessageStore.open):
        with pytest.raises(ConfigError, match=f"{key}.*in several folders"):
            look(root, config)
