"""Ctrl-C, SystemExit or want of memory between any two lines of a commit: as a kill, or as if nothing had been.

Here in each line of the functions where an order of lines matters; `make crash` (mode `errors`, kind `interrupts`) takes
lines of the whole store, and its deep mode all of them.
"""

from __future__ import annotations

import errno
import inspect
import os
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from crash import interrupts
from crash.harness import no_thread_warnings, scratch_folder
from crash.imitate import Process, rows_seen
from crash.interrupts import ERRORS, Interrupter, Line
from crash.workloads import Base, Bases
from messagestore.files.commit_log import CommitLog
from messagestore.files.disk import Disk
from messagestore.files.numbered_files import MappedFileQueue
from messagestore.inspect.verify import verify
from messagestore.log.batch_journal import BatchJournal
from messagestore.writer.catching_up import _catch_up
from messagestore.writer.flush import FlushService
from messagestore.writer.log_writer import LogWriter

pytestmark = no_thread_warnings


@lru_cache
def base_of(root: str) -> Base:
    return Bases(Path(root))["filled"]


@lru_cache
def lines_of(story: str) -> Counter[Line]:
    with scratch_folder() as folder:
        return interrupts.lines(story, Bases(folder / "store")["filled"], folder / "store")


def in_function(story: str, *functions: Callable[..., object]) -> list[tuple[Line, int]]:
    """Lines of functions that a story runs, and a time in the middle of all the times it does."""
    found = []
    for function in functions:
        source, first = inspect.getsourcelines(function)
        module = function.__module__.rpartition(".")[2]
        for (name, line), count in sorted(lines_of(story).items()):
            if name == module and first <= line < first + len(source):
                found.append(((name, line), (count + 1) // 2))
    assert found, functions
    return found


@pytest.mark.parametrize(
    ("story", "functions", "power_cut"),
    [
        ("async session", (LogWriter.publish, LogWriter._publish), False),
        ("puts", (LogWriter.append, LogWriter.append_side_by_side, LogWriter._check_put, LogWriter._begin_put), False),
        ("group", (FlushService.wait, FlushService.request, LogWriter.append, LogWriter.appended), False),
        ("batches", (CommitLog.write, MappedFileQueue.create), True),
        ("turns", (_catch_up, BatchJournal.add), False),
    ],
    ids=["publishing puts", "putting", "waiting beside others", "making a segment, then a power cut", "catching up"],
)
def test_an_interrupt_between_two_lines_loses_and_doubles_nothing(
    root: Path, story: str, functions: tuple[Callable[..., object], ...], power_cut: bool
) -> None:
    base, raised = base_of(str(root)), 0
    for number, (line, hit) in enumerate(in_function(story, *functions)):
        error = MemoryError if power_cut else ERRORS[number % len(ERRORS)]  # what is tried again must be synced
        interrupter = Interrupter(line, hit, error)
        verdict = interrupts.check(story, base, root, interrupter, power_cut=power_cut)
        assert verdict.ok, f"{interrupter.error.__name__} before {line}, time {hit}: {verdict}"
        raised += interrupter.raised
    assert raised > 5


@pytest.mark.slow
@pytest.mark.parametrize("story", interrupts.LONG)
def test_an_interrupt_between_any_two_lines_of_the_store(root: Path, story: str) -> None:
    """Every fifth line."""
    base = base_of(str(root))
    for number, (line, hit, error) in enumerate(interrupts.cases(lines_of(story))):
        if number % 5 == 0:
            verdict = interrupts.check(story, base, root, Interrupter(line, hit, error), power_cut=number % 2 == 0)
            assert verdict.ok, f"{error.__name__} before {line}, time {hit}: {verdict}"


class BadReads(Disk):
    """The n-th read fails, once; or an open does."""

    def __init__(self) -> None:
        self.fail_at, self.count = -1, 0

    def _next(self) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: str | Path, *, writable: bool = False) -> Any:
        self._next()
        return super().open(path, writable=writable)

    def pread(self, *arguments: Any) -> bytes:
        self._next()
        return super().pread(*arguments)

    def pread_into(self, *arguments: Any) -> int:
        self._next()
        return super().pread_into(*arguments)


def test_a_batch_of_another_process_is_known_after_a_read_failed(root: Path, process: Callable[..., Process]) -> None:
    """P stayed attached while Q committed version n; P comes with version n, and a read fails while it catches up. The
    second try must not take the journal for complete: the batch would be there twice.
    """
    disk = BadReads()
    p, q = process(root, disk), process(root)
    p.batch(version=0)
    failed = 0
    for version in range(1, 40):
        q.batch(version=version)
        disk.count, disk.fail_at = 0, version
        for _ in range(2):
            try:
                assert p.batch(version=version).status == "known", f"read {version} failed"
                break
            except OSError:
                failed += 1
    assert failed > 15
    disk.fail_at = -1
    p.detach()
    q.detach()
    assert rows_seen(root) == dict.fromkeys(range(40), 5)
    assert verify(root).ok
