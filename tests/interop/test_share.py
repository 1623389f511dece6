"""The parts of the cases that `make interop` takes by turns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from interop import share

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("count", [1, 5, 20, 150])
def test_as_many_days_as_there_are_parts_take_all_cases(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(share, "IS_WHOLE", False)
    found: list[int] = []
    for day in range(739_000, 739_005):
        monkeypatch.setattr(share, "DAY", day)
        some = share.part(range(count), 5)
        assert len(some) >= count // 5
        found += some
    assert sorted(found) == [*range(count)]
    monkeypatch.setattr(share, "IS_WHOLE", True)
    assert share.part(range(count), 5) == [*range(count)]


def test_all_cases_run_in_interop_deep() -> None:
    """Each file that leaves cases to other days is among those of the Makefile's verb that leaves none."""
    text = (HERE.parents[1] / "Makefile").read_text().replace("\\\n", " ")
    (names,) = re.findall(r"^IN_PARTS := \$\(addprefix tests/interop/test_,(.*)\)$", text, re.MULTILINE)
    own = {
        path.name
        for path in HERE.glob("test_*.py")
        if re.search(r"^from interop\.share import .*\bpart\b", path.read_text(), re.MULTILINE)
    }
    assert {f"test_{name}" for name in names.split()} == own


def test_a_change_touches_the_tests_that_are_about_it() -> None:
    tests = {path.name for path in HERE.glob("test_*.py")}
    assert share.touched(tests, ["README.md", "docs/cluster.md", "store/messagestore/serve/server.py"]) == set()
    assert share.touched(tests, ["tests/interop/test_timers.py"]) == {"test_timers.py"}
    assert share.touched(tests, ["store/messagestore/writer/log_writer.py"]) == tests
    by_connector = share.touched(tests, ["connector/pyspark_messagestore/source/follower.py"])
    assert {"test_live_source.py", "test_kafka_jobs.py"} <= by_connector < tests
    assert not by_connector & {"test_same_bytes.py", "test_timers.py"}


def test_every_pattern_fits_a_file() -> None:
    """A folder that was moved would touch nothing any more, and nobody would notice."""
    root = HERE.parents[1]
    for pattern, names in share._ABOUT.items():
        assert any(root.rglob(pattern)) if pattern == "*.md" else any(root.glob(pattern)), pattern
        for name in names:
            assert any(HERE.glob(name)), name
