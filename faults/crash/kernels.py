"""Builds kernels for the harness: one with sanitizers, and ones with a planted bug."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from crash import kernel_cases
from crash.counts import Counts
from crash.judge import Verdict
from crash.planting import Ground, Planted
from messagestore.errors import CorruptionError
from messagestore.files.disk import Disk
from messagestore.format import kernel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "store" / "kernel"
_SANITIZERS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_FAST = ("-O1",)
"""A kernel with a planted bug runs for a moment: compiling it for speed would take longer than that."""
_PRELOADED = ("libasan.so", "libstdc++.so")
"""The address sanitizer must come first in a process, and before the C++ library that Arrow throws exceptions with."""


def _compile() -> Any:
    """The module `store/kernel/compile.py`, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("messagestore_compile", SOURCES / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiling = _compile()
_objects = tempfile.TemporaryDirectory()
"""What this process has compiled: kernels with a planted bug differ from the others in one file."""


def _preloaded() -> list[str]:
    """The libraries to preload; empty if the compiler has no sanitizer."""
    found = []
    for name in _PRELOADED:
        done = subprocess.run(
            [*compiling.compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False
        )
        found.append(done.stdout.strip())
    return found if all(os.path.isabs(path) for path in found) else []


def sanitized(folder: Path, seed: int, count: int, command: str, sources: Path = SOURCES, *what: str) -> Counts:
    """Build the kernel with sanitizers and run so many cases in another process; with "reading", only those."""
    counts = Counts()
    reason = compiling.why_not() or ("" if _preloaded() else "the C compiler has no address sanitizer")
    if reason:
        counts.notes.append(f"the kernel was not built with sanitizers: {reason}")
        return counts
    built = compiling.compiled(
        Path(folder, "_kernel.sanitized.so"), sources=sources, flags=_SANITIZERS, objects=Path(_objects.name)
    )
    environment = {
        **os.environ,
        kernel.VARIABLE: str(built),
        "LD_PRELOAD": " ".join(_preloaded()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONMALLOC": "malloc",  # each object has memory of its own
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # and so has each buffer of Arrow
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = [sys.executable, "-m", "crash.kernel_cases", str(seed), str(count), *what]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, errors="replace", check=False)
    said = done.stderr.splitlines()
    numbers = [line for line in said if line.isdigit()]
    counts.cases["calls of the kernel with sanitizers"] += len(numbers)
    if done.returncode or len(numbers) != count:
        words = "\n".join(line for line in said if not line.isdigit())
        counts.fail(f"the kernel, case {numbers[-1:]} (exit {done.returncode}):\n{words}", command)
    return counts


# ---- planted bugs


def rewritten(file: str, old: str, new: str) -> Planted:
    """Replace one text of the kernel's sources by another, for a search that compiles them itself."""
    count = (SOURCES / file).read_text().count(old)
    if count != 1:
        raise AssertionError(f"{file} has {count} times: {old}")

    @contextlib.contextmanager
    def use() -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder:
            sources = Path(folder, "kernel")
            shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
            (sources / file).write_text((sources / file).read_text().replace(old, new))
            with mock.patch(f"{__name__}.SOURCES", sources):
                yield

    return lambda: _as_object(use())


def planted(file: str, old: str, new: str) -> Planted:
    """Compile the kernel with one text replaced by another, and use it in this process."""
    change = rewritten(file, old, new)

    @contextlib.contextmanager
    def use() -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder, change():
            target, objects = Path(folder, "_kernel.planted.so"), Path(_objects.name)
            lib = kernel.load(compiling.compiled(target, sources=SOURCES, flags=_FAST, objects=objects))
            with mock.patch.object(kernel, "lib", lib):
                yield

    return lambda: _as_object(use())


def _as_object(manager: AbstractContextManager[None]) -> AbstractContextManager[object]:
    return manager


def differences(_: Ground) -> Iterator[Verdict]:
    """Compare the kernel with the scalar codec."""
    for number in range(1000):
        by_kernel, by_rows = kernel_cases.difference(number, legal=number % 3 == 0)
        yield Verdict(misread=[] if by_kernel == by_rows else [f"batch {number}: the codecs differ"])


def differences_of_messages(_: Ground) -> Iterator[Verdict]:
    """Compare the kernel with the scalar codec, one message at a time."""
    for number in range(1000):
        by_kernel, by_rows = kernel_cases.difference_of_message(number, legal=number % 3 == 0)
        yield Verdict(misread=[] if by_kernel == by_rows else [f"message {number}: the codecs differ"])


def unreadable_parts(ground: Ground) -> Iterator[Verdict]:
    """Read and write parts of a file that it does not have."""
    verdict, disk, path = Verdict(), Disk(), Path(ground.folder, "parts")
    file = disk.open_new(path, 10)
    buffer, starts, ends = memoryview(bytearray(8)), np.array([0, 4]), np.array([4, 8])
    for move, positions in ((disk.pread_parts, [0, 8]), (disk.pread_parts, [20, 0]), (disk.pwrite_parts, [-1, 0])):
        try:
            move(file, buffer, np.array(positions), starts, ends)
            verdict.misread.append(f"{move.__name__} of parts at {positions} in a file of 10 bytes did not fail")
        except (OSError, CorruptionError):
            pass
    path.unlink()
    yield verdict


def abuses(ground: Ground) -> Iterator[Verdict]:
    """Give the kernel arguments that lie, with sanitizers."""
    for seed in range(3):
        counts = sanitized(ground.folder, seed, 3000, "", SOURCES)
        yield Verdict(misread=counts.failures)


def readings(ground: Ground) -> Iterator[Verdict]:
    """Let the kernel read hostile records, with sanitizers, and compare it with the scalar codec."""
    for seed in range(3):
        counts = sanitized(ground.folder, seed, 2000, "", SOURCES, "reading")
        yield Verdict(misread=counts.failures)
