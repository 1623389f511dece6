"""A clock that is wrong, by an hour or by a century: store times go back only where a clock had been far
ahead, and messages are found by key and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import checker
from crash.harness import SMALL
from crash.imitate import put
from messagestore import Message, MessageStore
from messagestore.inspect.verify import verify
from small import ClockDisk

NOW_S = 1_700_000_000
_HOUR_S, _YEAR_S = 3600, 31_557_600
CLOCKS = {
    "an hour back": NOW_S - _HOUR_S,
    "ten years back": NOW_S - 10 * _YEAR_S,
    "1970": 0,
    "before 1970": -5,
    "a century ahead": NOW_S + 100 * _YEAR_S,
}


@pytest.mark.parametrize("reopened", [False, True], ids=["the same process", "the next process"])
@pytest.mark.parametrize("clock", CLOCKS)
def test_messages_are_found_though_the_clock_jumped(root: Path, clock: str, reopened: bool) -> None:
    """It jumps, and jumps back; the index holds seconds since its begin, which end at 0 and at 2^31 - 1."""
    disk, stamps = ClockDisk(NOW_S * 1000), []
    store = MessageStore.open(root, SMALL, disk=disk)
    for number, second in enumerate((NOW_S, CLOCKS[clock], NOW_S + 1)):
        disk.now_ms = second * 1000
        if reopened and number:
            store.close()
            store = MessageStore.open(root, SMALL, disk=disk)
        message = Message("t", b"put/%d/" % number, queue_id=0, keys=[f"k{number}", "all"], born_timestamp_ms=1)
        stamps.append(store.put_message(message).store_timestamp_ms)
    assert stamps[0] == NOW_S * 1000
    assert stamps[1] == max(NOW_S, CLOCKS[clock]) * 1000, "a clock behind the last record by an hour, or not set"
    assert stamps[2] == (NOW_S + 1) * 1000, "no record holds later ones in its future"
    for number in range(3):
        assert [m.queue_offset for m in store.query_message("t", f"k{number}")] == [number]
        begin_ms = min(stamps[number], (NOW_S + 2**31 - 1) * 1000)  # as RocketMQ's: its entries hold no later time
        found = store.query_message("t", f"k{number}", begin_ms=begin_ms, end_ms=stamps[number])
        if stamps == sorted(stamps) or number != 1:  # a time in the future that the index has left again
            assert [m.queue_offset for m in found] == [number]
    assert len(store.query_message("t", "all")) == 3
    for stamp in stamps if stamps == sorted(stamps) else ():
        assert store.queue_offset_by_time("t", 0, stamp) == stamps.index(stamp)
    if stamps == sorted(stamps):
        assert store.queue_offset_by_time("t", 0, stamps[-1] + 1) == 3
    store.close()
    assert verify(root).ok
    assert checker.check(checker.read_tree(root)).faults == []


def test_a_store_that_was_made_before_1970_goes_on(root: Path) -> None:
    """A machine whose clock battery is empty makes the store; the time is set right later."""
    disk = ClockDisk(-100_000_000)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        first = put(store, "put/0/").store_timestamp_ms
    disk.now_ms = NOW_S * 1000
    with MessageStore.open(root, SMALL, disk=disk) as store:
        assert put(store, "put/1/").store_timestamp_ms == NOW_S * 1000 > first
        assert [m.body for m in store.get_message("single", 0, 0).messages] == [b"put/0/", b"put/1/"]
    assert verify(root).ok


def test_verify_names_a_record_of_the_future(root: Path) -> None:
    """With the right clock again, whether or not anything was put since."""
    disk = ClockDisk((NOW_S + 7200) * 1000)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        put(store, "put/0/")
    disk.now_ms = NOW_S * 1000
    report = verify(root, disk=disk)
    assert report.ok
    assert report.notes == [
        (
            f"a record was stored at {(NOW_S + 7200) * 1000}, which is 7200 s ahead of this machine's clock: the clock "
            "of the writer or of this machine is, or was, wrong"
        )
    ]


def test_a_clock_that_goes_back_by_more_than_an_hour_is_warned_of_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By an hour or less: the last time is used again, without a word."""
    disk = ClockDisk(NOW_S * 1000)
    with MessageStore.open(root, SMALL, disk=disk) as store:
        put(store, "put/0/")
    with MessageStore.open(root, SMALL, disk=disk) as store:
        disk.now_ms = (NOW_S - 3600) * 1000
        assert put(store, "put/1/").store_timestamp_ms == NOW_S * 1000
        assert caplog.records == []
        disk.now_ms = (NOW_S - 3601) * 1000
        for number in (2, 3):
            assert put(store, f"put/{number}/").store_timestamp_ms == disk.now_ms
    assert len(caplog.records) == 1
    assert "is 3601 s ahead of this machine's clock. Store times go back to now" in caplog.text
