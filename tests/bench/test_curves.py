"""The curves: every axis is measured, drawn and published, and keeps what earlier runs published."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
from benchmarks import curves

ROOT = Path(__file__).resolve().parent.parent.parent


def run(folder: Path, *arguments: str) -> dict:
    """A quick run that publishes; the numbers that it published."""
    command = [sys.executable, "-m", "benchmarks", "curves", "--quick", "--rounds", "1", "--folder", str(folder)]
    published = folder / "published"
    done = subprocess.run(
        [*command, "--publish", str(published), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [path.name for path in folder.iterdir()] == ["published"], "data were left behind"
    return json.loads((published / "curves.json").read_text())


@pytest.mark.slow
def test_every_axis_is_measured_and_drawn(tmp_path: Path) -> None:
    """All axes in their quick form."""
    pytest.importorskip("matplotlib")
    found = run(tmp_path, "--rows", "20000")
    assert list(found) == list(curves.AXES)
    check(found, tmp_path)
    assert len(found["size"]["series"]["recovery after a kill"]) == 2


def check(found: dict, folder: Path) -> None:
    """For each axis there is a picture, its numbers, and a page that shows both."""
    text = (folder / "published" / "README.md").read_text()
    for name, curve in found.items():
        assert len(curve["x_values"]) > 1, name
        assert curve["x_values"] == sorted(curve["x_values"])
        for label, values in curve["series"].items():
            assert len(values) == len(curve["x_values"]), (name, label)
            assert min(values) > 0, (name, label)
            assert f"{label}, {curve['y']}" in text
        picture = folder / "published" / f"{name}.svg"
        assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
        assert curve["title"] in picture.read_text()
        assert picture.stat().st_size < 60_000
        assert f"({name}.svg)" in text


def test_an_axis_that_is_measured_again_leaves_the_others(tmp_path: Path) -> None:
    """A long run may be done axis by axis, on different disks."""
    pytest.importorskip("matplotlib")
    first = run(tmp_path, "--rows", "100", "--only", "queues", "readers")
    assert list(first) == ["queues", "readers"]
    check(first, tmp_path)
    second = run(tmp_path, "--rows", "200", "--only", "readers")
    assert second["queues"] == first["queues"]
    assert second["readers"]["notes"] != first["readers"]["notes"]


def test_the_same_numbers_make_the_same_picture(tmp_path: Path) -> None:
    """A picture changes in a commit only when its numbers do."""
    pytest.importorskip("matplotlib")
    curve = curves.Curve("Rows", "rows", "rows/s")
    for x in (1, 10):
        curve.add(x, appended=100.0 * x, read_back=50.0)
    for name in ("a", "b"):
        curves.draw(curve, tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    curve.series["appended"][1] = 5.0
    curves.draw(curve, tmp_path / "c.svg")
    assert (tmp_path / "c.svg").read_bytes() != (tmp_path / "a.svg").read_bytes()


def test_a_process_that_was_not_killed_where_it_should_be_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery with nothing to recover would look fast."""
    from benchmarks.measure import Settings

    monkeypatch.setattr(curves, "_killed", lambda *_: None)
    with pytest.raises(AssertionError, match="did not append its batches"):
        curves.size(Settings(folder=tmp_path, rows=20_000, rounds=1, quick=True))
