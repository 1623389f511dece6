"""Stores whose clock was once far ahead: store times go back to the present, and no reader of times is misled.

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
from messagestore.inspect.verify import verify

NOW_MS = 1_750_000_000_000
AHEAD_MS = NOW_MS + 73 * 365 * 86_400_000
PUT_COUNT = 40


@contextmanager
def clock(now_ms: list[int]) -> Iterator[None]:
    """Replace this machine's time with the one in the list."""
    with mock.patch("time.time_ns", side_effect=lambda: now_ms[0] * 1_000_000):
        yield


def _far_ahead(folder: Path) -> None:
    """Kill the session whose times go back, at operation n, for every n."""
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
                _put(store, "last")  # only the index finds the previous one
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
    """Check that no time is above that of the log's last record: a broker would trust what was not synced."""
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
    """Check that messages are found by key, also within a time range, and that a search by time skips nothing."""
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
