"""Stores whose clock was far ahead once: store times go back to now, and nothing that reads times is misled.

A named case of the mode `fuzz`: a put with the wrong clock, then puts with the right one, killed at every operation.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from crash.harness import SMALL, die
from crash.simdisk import KillDisk, Killed
from messagestore import Message, MessageStore, StorePoisonedError
from messagestore.verify.verify import verify

NOW_MS = 1_750_000_000_000
AHEAD_MS = NOW_MS + 73 * 365 * 86_400_000
PUT_COUNT = 40


@contextmanager
def clock(now_ms: list[int]) -> Iterator[None]:
    """This machine's time is what is in the list."""
    with mock.patch("time.time_ns", side_effect=lambda: now_ms[0] * 1_000_000):
        yield


def _far_ahead(folder: Path) -> None:
    """Killed at operation n of the session that goes back, for every n."""
    for number in itertools.count():
        root, now_ms = folder / f"clock-{number}", [NOW_MS - 86_400_000]
        with clock(now_ms):
            with MessageStore.open(root, SMALL) as store:
                store.put_message(Message("t", b"before", queue_id=0))
                now_ms[0] = AHEAD_MS
                _put(store, "ahead")
            now_ms[0] = NOW_MS
            disk = KillDisk()
            died = _goes_back(root, disk, number, now_ms)
            if died:
                _check_checkpoint(root)
            now_ms[0] += 10_000
            with MessageStore.open(root, SMALL) as store:
                result = _put(store, "after")
                _put(store, "last")  # the index alone finds the one before
            assert result == now_ms[0], f"killed in {disk.killed_in}: a store time of {result}"
            _check_checkpoint(root)
            _check_found(root, now_ms[0])
        if not died:
            return


def _goes_back(root: Path, disk: KillDisk, number: int, now_ms: list[int]) -> bool:
    try:
        store = MessageStore.open(root, SMALL, disk=disk)
        disk.kill_at = len(disk.operations) + number
        for count in range(PUT_COUNT):
            now_ms[0] += 1000
            assert _put(store, f"k{count}") == now_ms[0]
        store.close()
    except (Killed, StorePoisonedError):
        return True
    finally:
        die(root)
    return False


def _put(store: MessageStore, key: str) -> int:
    return store.put_message(Message("t", b"x" * 900, queue_id=0, keys=[key])).store_timestamp_ms


def _check_checkpoint(root: Path) -> None:
    """No time in it is above that of the last record in the log: a broker would trust what was not synced."""
    times = struct.unpack_from(">qqq", (root / "checkpoint").read_bytes())
    last = 0
    for segment in sorted((root / "commitlog").iterdir()):
        data, at = segment.read_bytes(), 0
        while at + 60 < len(data) and (size := struct.unpack_from(">i", data, at)[0]) > 0:
            if struct.unpack_from(">I", data, at + 4)[0] == 0xDAA320A7:
                last = struct.unpack_from(">q", data, at + 56)[0]
            at += size
    assert max(times) <= last, f"the store checkpoint says {max(times)}, and the last record {last}"


def _check_found(root: Path, last_ms: int) -> None:
    """By key, also within a time; by time nothing is skipped."""
    report = verify(root)
    assert report.ok, report.findings[:3]
    assert any("store times go back" in note for note in report.notes), report.notes
    with MessageStore.open_read_only(root, SMALL) as reader:
        for key in ("ahead", "after"):
            assert len(reader.query_message("t", key)) == 1, key
        assert len(reader.query_message("t", "after", begin_ms=last_ms - 1000, end_ms=last_ms)) == 1
        end = reader.max_offset("t", 0)
        assert reader.queue_offset_by_time("t", 0, last_ms) <= end - 1, "a reader would skip a message"


CASES = {"a clock that was far ahead": _far_ahead}
