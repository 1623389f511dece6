"""The race beside a broker that runs: our source and sink, and RocketMQ's own clients, at the same messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from interop import java_build
from interop.conftest import need
from interop.java_build import NEWEST

ROOT = Path(__file__).resolve().parent.parent.parent
RATES = {"live.source", "live.source.java", "live.sink", "live.sink.java", "live.copy", "live.copy.read"}


@pytest.mark.slow
def test_all_figures_are_taken(tmp_path: Path) -> None:
    """Each side counts its messages, and a run in which one is missing ends with an error."""
    need(NEWEST)
    need(NEWEST, java_build.tools_classpath)
    command = [sys.executable, "-m", "benchmarks", "live", "--quick", "--rounds", "1", "--rows", "10000"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=2400, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    ways = {f"{pace}.{what}" for pace in ("busy", "idle") for what in ("put.nobody", "put.source", "put.java")}
    ways |= {f"{pace}.arrival.{reader}" for pace in ("busy", "idle") for reader in ("source", "java")}
    delays = {f"live.{way}.p{percentile}" for way in ways for percentile in (50, 99)}
    assert set(rows) == {*RATES, *delays}
    assert all(row["value"] > 0 for row in rows.values())
    assert list(tmp_path.iterdir()) == []
