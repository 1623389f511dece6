"""A search by time, compared with a plain scan: the first message that was stored at a time or later."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import pytest

from messagestore import Message, MessageStore
from messagestore.read import query, queue_records
from messagestore.read.view import StoreView
from messagestore.writer import store_clock
from small import SMALL, ClockDisk

START_MS = 1_700_000_000_000


def stored(root: Path, chance: random.Random, most_back_ms: int) -> list[int]:
    """A store whose clock was set back now and then, together by `most_back_ms` at most; the store times."""
    disk = ClockDisk(START_MS)
    highest_ms = START_MS
    with MessageStore.open(root, SMALL, disk=disk) as store:
        for _ in range(120):
            disk.now_ms += chance.choice((0, 1, 7, 400, 2500))
            highest_ms = max(highest_ms, disk.now_ms)
            if chance.random() < 0.15:
                disk.now_ms = highest_ms - chance.randint(0, most_back_ms)
            store.put_message(Message("t", bytes(chance.choice((0, 30, 900))), queue_id=0, keys=["k"]))
    view = StoreView(root, SMALL)
    batch = next(queue_records.read(view, "t", 0, 0, 120, ["store_timestamp_ms"]))
    view.close()
    return [int(value) for value in batch.column(0).cast("int64").to_pylist()]


def compare(root: Path, times: list[int]) -> None:
    view = StoreView(root, SMALL)
    for time_ms in sorted({*times, *(each + 1 for each in times), *(each - 1 for each in times)}):
        wanted = next((number for number, each in enumerate(times) if each > time_ms), len(times))
        assert query.offset_behind_time(view, "t", 0, time_ms) == wanted, time_ms
    view.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_brokers_clock_that_is_set_back_by_seconds_skips_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A broker's store times go back with its clock, as they do here when ours do not stand still."""
    monkeypatch.setattr(store_clock, "MOST_AHEAD_MS", -1)
    logging.disable(logging.WARNING)
    try:
        times = stored(tmp_path / "s", random.Random(seed), 10_000)
    finally:
        logging.disable(logging.NOTSET)
    assert times != sorted(times)
    shutil.rmtree(tmp_path / "s" / "spark")
    compare(tmp_path / "s", times)


@pytest.mark.parametrize("seed", range(3))
def test_our_own_store_times_stand_still_meanwhile(tmp_path: Path, seed: int) -> None:
    """So a search is exact, however far the clock was set back within an hour."""
    times = stored(tmp_path / "s", random.Random(seed), 3_500_000)
    assert times == sorted(times)
    compare(tmp_path / "s", times)
