"""The origin of a batch: a program that copies rows from elsewhere finds, with the rows, where it has to continue."""

from __future__ import annotations

import math
import os

import pyarrow as pa
import pytest

from messagestore import (
    BatchConflictError,
    BatchRequest,
    ConfigError,
    LostBatchesError,
    MessageColumns,
    MessageIllegalError,
    MessageStore,
    StoreConfig,
)

SMALL = StoreConfig(mapped_file_size_commit_log=65_536, max_hash_slot_num=100, max_index_num=400)


def rows(*bodies: str) -> MessageColumns:
    return MessageColumns.from_arrow(pa.record_batch({"body": pa.array(bodies, pa.string())}), topic="t", queue_id=0)


def put(store: MessageStore, version: int, origin: dict | None, *bodies: str):
    return store.append_batch(rows(*bodies), BatchRequest(app_id="app", version=version, origin=origin))


@pytest.mark.parametrize(
    "origin", [{}, {"topic": {"0": 17}, "text": "\u00fc\U0001f600\x00\n", "list": [1, None, True, 1.5]}]
)
def test_the_origin_comes_back_with_the_batch(tmp_path, origin: dict) -> None:
    """In the same session, in the next one, and after the small files of the store are lost."""
    with MessageStore.open(tmp_path, SMALL) as store:
        assert store.last_batch("app") is None
        put(store, 0, {"first": 1}, "a")
        put(store, 1, origin, "b", "c")
        found = store.last_batch("app")
        assert (found.version, found.row_count, found.origin) == (1, 2, origin)
        assert store.last_batch("other") is None
    os.unlink(tmp_path / "spark" / "journal")
    with MessageStore.open(tmp_path, SMALL) as store:
        assert store.last_batch("app") == found
        put(store, 2, None)
        assert store.last_batch("app").origin is None


def test_a_replay_with_another_origin_is_refused(tmp_path) -> None:
    """The rows are the same, but whoever sent them would continue elsewhere."""
    with MessageStore.open(tmp_path, SMALL) as store:
        put(store, 0, {"at": 1}, "a")
        assert put(store, 0, {"at": 1}, "a").status == "known"
        assert put(store, 0, None, "a").status == "known"
        with pytest.raises(
            BatchConflictError, match=r"with origin \{'at': 1\}, and came again with origin \{'at': 2\}"
        ):
            put(store, 0, {"at": 2}, "a")
        assert store.max_offset("t", 0) == 1


def test_origins_that_json_cannot_hold(tmp_path) -> None:
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for origin in (
        {"x": math.nan},
        {"x": b"1"},
        {1: 2},
        {"x": (1, 2)},
        ["list"],
        "text",
        {"x": "y" * 40_000},
        {"x": "\ud800"},
        deep,
    ):
        with pytest.raises(ConfigError, match=r"^origin: .* of at most 32768 bytes"):
            BatchRequest(app_id="app", origin=origin)
    with pytest.raises(ConfigError, match="origin: found without app_id"):
        BatchRequest(origin={})
    with MessageStore.open(tmp_path, SMALL) as store:
        put(store, 0, {"x": "y" * 32_000}, "a")
        assert len(store.last_batch("app").origin["x"]) == 32_000
        with pytest.raises(MessageIllegalError, match="txnAppId"):
            store.last_batch("a b")


def test_retention_took_the_record_of_the_last_batch(tmp_path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        put(store, 0, {"at": 1}, "a")
        for version in range(20):
            store.append_batch(rows("x" * 9000), BatchRequest(app_id="big", version=version))
    os.unlink(tmp_path / "commitlog" / ("0" * 20))
    with MessageStore.open(tmp_path, SMALL) as store:
        with pytest.raises(LostBatchesError, match="version 0 is the last one, and retention has deleted its record"):
            store.last_batch("app")
        assert store.last_batch("big").version == 19
