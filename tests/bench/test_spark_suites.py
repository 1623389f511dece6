"""The benchmarks that need Spark run in their quick form, and say what they promise to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.spark]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--rounds", "1", "--folder", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert list(folder.iterdir()) == []
    return done


def test_a_profile_has_every_process_and_every_step(tmp_path: Path) -> None:
    """Both sinks; the bytes of the log are those of the rows; what the store costs is in steps with names."""
    text = run(tmp_path, "profile", "--rows", "20000").stdout
    ours, _, floor = text.partition("## Into a sink that drops every row")
    for name in ("JVM", "Python worker 1 (task)", "Python worker (commit)", "encode", "stage", "receive Arrow"):
        assert f"| {name} |" in ours, text
    for name in ("read back", "index", "queue units", "write the log", "sync"):
        assert f"| {name} |" in ours, text
    assert "MB written to commitlog" in ours and "MB written to staging" in ours
    assert "| JVM |" in floor and "commitlog" not in floor


def test_the_first_query_names_the_processes_that_spark_starts(tmp_path: Path) -> None:
    """Time, processes and imports, for sink and source beside a sink and a source of nobody."""
    done = run(tmp_path, "first")
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found["first.sink.python_processes"]["value"] >= 5
    assert found["first.sink"]["floor"] == found["first.sink_floor"]["value"]
    assert found["first.import.discovery"]["ratio"] < found["first.import.data_source"]["ratio"]
    assert "lookup_data_sources" in done.stderr and "python_streaming_sink_runner" in done.stderr
