"""When records were put while the machine's clock is behind the store's."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from messagestore import CorruptionError
from messagestore.files import state
from messagestore.writer import put_times
from messagestore.writer.put_times import PutTimes, read_put_times
from small import ClockDisk


def latest(times: PutTimes, *places: int) -> list[int]:
    return times.latest(np.array(places, np.int64)).tolist()


def test_a_record_was_put_when_its_append_began() -> None:
    times = PutTimes()
    times.note(1_000, 100, put=True)  # what lies below 100 was there
    times.note(1_500, 200, put=True)  # 100 to 200 was put at 1 000
    times.note(4_000, 300)  # 200 to 300 at 1 500
    times.note(5_000, 400)  # somebody else put 300 to 400
    assert times.end == 400
    assert latest(times, 0, 99, 100, 199, 200, 299, 300, 399) == [
        1_000,
        1_000,
        1_000,
        1_000,
        1_500,
        1_500,
        5_000,
        5_000,
    ]


def test_marks_stay_when_the_clock_has_caught_up() -> None:
    times = PutTimes()
    times.note(1_000, 100, put=True)
    times.caught_up(2_000, 200)
    times.caught_up(90_000, 300)  # nothing is noted any more
    assert (times.end, latest(times, 150)) == (200, [1_000])


def test_many_marks_lose_precision_and_never_become_early(monkeypatch) -> None:
    monkeypatch.setattr(put_times, "_MOST_MARKS", 8)
    times = PutTimes()
    for number in range(100):
        times.note(1_000 + number, 10 * (number + 1))
        found = latest(times, *range(0, 10 * (number + 1), 10))
        assert all(found[each] >= 1_000 + each for each in range(number + 1))
        assert found[-1] == 1_000 + number


class Saved:
    """Marks at 100 and 200, saved after four seconds."""

    def __init__(self, folder: Path) -> None:
        self.path, self.via = str(folder / "put-times.json"), str(folder / "new-put-times.json")
        self.disk = ClockDisk()
        self.disk.uptime_ms = 4_000
        self.times = PutTimes()
        self.times.note(1_000, 100, 9_000)
        self.times.note(3_000, 200, 9_000)
        self.save(self.times, 5_000)

    def save(self, times: PutTimes, store_clock_ms: int) -> None:
        times.save(self.disk, self.path, store_clock_ms, via=self.via)

    def loaded(self, end: int = 1_000) -> PutTimes:
        times = PutTimes()
        times.load(self.disk, self.path, end)
        return times


def test_another_process_knows_when_records_were_put(tmp_path: Path) -> None:
    times = Saved(tmp_path).loaded()
    assert (times.end, latest(times, 0, 150)) == (200, [1_000, 3_000])


def test_what_was_cut_off_says_nothing_about_what_is_put_there_again(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    times = saved.loaded(150)
    assert times.end == 100
    saved.save(times, 5_000)
    assert saved.loaded().end == 100


@pytest.mark.parametrize("what", ["another boot", "a start meanwhile"])
def test_after_a_restart_of_the_machine_a_delay_counts_anew(tmp_path: Path, monkeypatch, what: str) -> None:
    saved = Saved(tmp_path)
    saved.disk.uptime_ms = 2_500
    if what == "another boot":
        saved.disk.uptime_ms = 4_000
        monkeypatch.setattr(state, "_boot_hash", state.boot_hash() ^ 1)
    times = saved.loaded()
    assert (times.end, latest(times, 0, 150)) == (200, [saved.disk.uptime_ms] * 2)


def test_the_file_goes_when_the_last_message_is_due_by_the_stores_clock(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    saved.times.caught_up(5_000, 200)
    for clock_ms, there in ((8_999, True), (9_000, False)):
        saved.save(saved.times, clock_ms)
        assert Path(saved.path).exists() == there
    assert saved.times.end == saved.loaded().end == 0


def test_the_file_byte_by_byte(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(state, "_boot_hash", 7)
    others = b'"formatVersion": 1, "marks": [[1000, 100], [3000, 200]], "untilMs": 9000}'
    crc = zlib.crc32(b'{"bootHash": 7, ' + others)
    assert Path(Saved(tmp_path).path).read_bytes() == b'{"bootHash": 7, "crc": %d, ' % crc + others


def test_every_flipped_bit_is_damage(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    data = Path(saved.path).read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        Path(saved.path).write_bytes(flipped)
        with pytest.raises(CorruptionError, match="times of puts"):
            read_put_times(saved.disk, saved.path)
