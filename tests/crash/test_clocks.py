"""A clock that is wrong, by an hour or by a century: store times go back only where a clock had been far
ahead, and messages are found by key and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import checker
from crash.harness import SMALL
from crash.imitate import put
from messagestore import Message, MessageStore
from messagestore.verify.verify import verify

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
def test_messages_are_found_though_the_clock_jumped(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, clock: str, reopened: bool
) -> None:
    """It jumps, and jumps back; the index holds seconds since its begin, which end at 0 and at 2^31 - 1."""
    root, now = scratch / "store", [NOW_S]
    monkeypatch.setattr("messagestore.write.log_writer.time.time_ns", lambda: now[0] * 10**9)
    stamps = []
    store = MessageStore.open(root, SMALL)
    for number, second in enumerate((NOW_S, CLOCKS[clock], NOW_S + 1)):
        now[0] = second
        if reopened and number:
            store.close()
            store = MessageStore.open(root, SMALL)
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


def test_a_store_that_was_made_before_1970_goes_on(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock battery is empty makes the store; the time is set right later."""
    root, now = scratch / "store", [-100_000]
    monkeypatch.setattr("messagestore.write.log_writer.time.time_ns", lambda: now[0] * 10**9)
    with MessageStore.open(root, SMALL) as store:
        first = put(store, "put/0/").store_timestamp_ms
    now[0] = NOW_S
    with MessageStore.open(root, SMALL) as store:
        assert put(store, "put/1/").store_timestamp_ms == NOW_S * 1000 > first
        assert [m.body for m in store.get_message("single", 0, 0).messages] == [b"put/0/", b"put/1/"]
    assert verify(root).ok


def test_verify_names_a_record_of_the_future(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the right clock again, whether or not anything was put since."""
    root, now = scratch / "store", [NOW_S + 7200]
    monkeypatch.setattr("messagestore.write.log_writer.time.time_ns", lambda: now[0] * 10**9)
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
    now[0] = NOW_S
    report = verify(root)
    assert report.ok
    assert report.notes == [
        (
            f"a record was stored at {(NOW_S + 7200) * 1000}, which is 7200 s ahead of this machine's clock: one of the two "
            "clocks is, or was, wrong"
        )
    ]


def test_a_clock_that_goes_back_by_more_than_an_hour_is_warned_of_once(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By an hour or less: the last time is used again, without a word."""
    root, now = scratch / "store", [NOW_S]
    monkeypatch.setattr("messagestore.write.log_writer.time.time_ns", lambda: now[0] * 10**9)
    with MessageStore.open(root, SMALL) as store:
        put(store, "put/0/")
    with MessageStore.open(root, SMALL) as store:
        now[0] = NOW_S - 3600
        assert put(store, "put/1/").store_timestamp_ms == NOW_S * 1000
        assert caplog.records == []
        now[0] = NOW_S - 3601
        for number in (2, 3):
            assert put(store, f"put/{number}/").store_timestamp_ms == now[0] * 1000
    assert len(caplog.records) == 1
    assert "is 3601 s ahead of this machine's clock: store times go back to now" in caplog.text
