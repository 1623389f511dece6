"""The profile of a micro-batch: where time is counted, and by whom."""

from __future__ import annotations

import cProfile
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import call_steps, process_tree

BUSY = """
import time, zlib
end = time.process_time() + {seconds}
while time.process_time() < end:
    zlib.crc32(bytes(100_000))
"""


def test_time_in_a_library_belongs_to_the_step_that_called_it(tmp_path: Path) -> None:
    """The encoder and the index both call one function outside of the project; each gets the time of its own calls."""
    library, encode, index = (
        tmp_path / name for name in ("library.py", "messagestore/format/encoder.py", "messagestore/files/index_x.py")
    )
    for path, text in (
        (library, "import time\ndef work(seconds): time.sleep(seconds)\n"),
        (encode, "def encode(): work(0.06)\n"),
        (index, "def insert(): work(0.02)\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    space: dict = {}
    for path in (library, encode, index):
        exec(compile(path.read_text(), str(path), "exec"), space)
    profile = cProfile.Profile(time.perf_counter)
    profile.enable()
    space["encode"]()
    space["insert"]()
    profile.disable()
    profile.create_stats()
    found = call_steps.seconds(profile, (*call_steps.COMMIT[3:4], *call_steps.TASK[4:5]))
    assert found["encode"] == pytest.approx(3 * found["index"], rel=0.5)
    assert found["encode"] + found["index"] == pytest.approx(sum(found.values()), rel=0.2)


@pytest.mark.parametrize(
    ("path", "name", "steps", "step"),
    [
        ("messagestore/files/disk.py", "fdatasync", call_steps.COMMIT, "sync"),
        ("messagestore/files/disk.py", "pwrite", call_steps.COMMIT, None),
        ("messagestore/format/record.py", "crc32", call_steps.COMMIT, None),
        ("messagestore/files/index_file.py", "put", call_steps.COMMIT, "index"),
        ("messagestore/something/new.py", "f", call_steps.COMMIT, "messagestore/something/new"),
        ("numpy/core.py", "take", call_steps.TASK, None),
        ("benchmarks/profiled_sink.py", "received", call_steps.TASK, call_steps.RECEIVE),
    ],
)
def test_modules_make_the_steps(path: str, name: str, steps: tuple, step: str | None) -> None:
    """A module without a step shows under its own name, so that no time disappears."""
    assert call_steps.step_of((f"/somewhere/{path}", 1, name), steps) == step


def test_every_module_that_makes_a_step_exists() -> None:
    """A step whose module was renamed would be empty, and its time would be elsewhere."""
    import re

    root = Path(__file__).resolve().parent.parent.parent
    modules = [
        str(path.relative_to(root / folder).with_suffix("")) + ":"
        for folder in ("store", "connector")
        for path in (root / folder).rglob("*.py")
    ]
    for pattern, step in (*call_steps.TASK, *call_steps.COMMIT):
        for part in re.findall(r"(?:files|write|log)/\w+(?:\\w\+)?|messagestore/\(format", pattern):
            looked_for = part.replace("messagestore/(", "")
            assert any(re.search(looked_for, module) for module in modules), (step, part)


def test_cpu_time_of_children_is_counted_also_of_those_that_ended() -> None:
    """A child that works and ends, its own child that outlives it, and nothing of other processes."""
    below = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BUSY.format(seconds=0.3)!r}]); "
    program = below + BUSY.format(seconds=0.3)
    meter = process_tree.Meter([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        while child.poll() is None:
            meter.sample()
            if child.pid in meter.last:
                assert process_tree.ancestor(child.pid, meter.last[os.getpid()].name) == os.getpid()
            time.sleep(0.02)
    assert process_tree.used(child.pid) is None
    meter.sample()
    assert meter.cpu_s >= 0.4
    assert len(meter.last) >= 3
    assert set(process_tree.tree([os.getpid()])) >= {os.getpid()}
