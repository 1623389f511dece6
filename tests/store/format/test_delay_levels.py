"""Which delay levels count where in the log."""

from __future__ import annotations

import numpy as np
import pytest

from messagestore.format.delay_levels import ROCKETMQS, DelayLevels

THREE = DelayLevels(((0, "1s 5s"), (100, "1h"), (200, "7s 8s 9s")))


def test_a_record_has_the_levels_that_count_where_it_begins() -> None:
    assert [THREE.at(place)[0] for place in (0, 99, 100, 199, 200, 1 << 40)] == [
        1000,
        1000,
        3600000,
        3600000,
        7000,
        7000,
    ]
    assert ROCKETMQS.at(0)[17] == 7_200_000
    assert DelayLevels(((500, "1h"),)).at(3) == (3_600_000,)


def test_many_records_have_the_levels_that_each_of_them_has() -> None:
    places = np.array([250, 0, 100, 99, 200, 150, 3], np.int64)
    found = [0] * len(places)
    for rows, delays_ms in THREE.of(places):
        for row in rows.tolist():
            found[row] = delays_ms[0]
    assert found == [THREE.at(place)[0] for place in places.tolist()]
    assert [rows.tolist() for rows, _ in ROCKETMQS.of(places)] == [[*range(7)]]
    assert list(THREE.of(np.empty(0, np.int64))) == []


@pytest.mark.parametrize(
    ("place", "levels", "entries"),
    [
        (300, "7s 8s 9s", THREE.entries),
        (300, "1m", (*THREE.entries, (300, "1m"))),
        (200, "1m", ((0, "1s 5s"), (100, "1h"), (200, "1m"))),
        (150, "60m", ((0, "1s 5s"), (100, "1h"))),
        (150, "7s 8s 9s", ((0, "1s 5s"), (100, "1h"), (150, "7s 8s 9s"))),
        (50, "1s 5s", ((0, "1s 5s"),)),
        (0, "1m", ((0, "1m"),)),
    ],
)
def test_levels_change_from_a_place_on(place: int, levels: str, entries: tuple[tuple[int, str], ...]) -> None:
    """What was to count from there on, or behind it, was for records that a crash has taken."""
    changed = THREE.changed(place, levels)
    assert changed.entries == entries
    assert changed.changed(place, levels) is changed


def test_levels_that_count_for_no_record_are_left_out() -> None:
    assert THREE.changed(300, "1m", 199).entries == ((100, "1h"), (200, "7s 8s 9s"), (300, "1m"))
    assert THREE.changed(300, "1m", 200).entries == ((200, "7s 8s 9s"), (300, "1m"))
    assert THREE.below(200).entries == ((0, "1s 5s"), (100, "1h"))
    assert THREE.below(0).entries == ((0, "1s 5s"),)
    assert THREE.longest_ms == 3_600_000
