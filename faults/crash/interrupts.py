"""Raises an error of a signal handler, or `MemoryError`, between any two lines of the store, with `sys.settrace`.

Some stories are run repeatedly, each time with one error in another line. Then the step is tried again, as a person or
Spark would. At the end, the process is killed and everything is judged: what was acknowledged is stored, nothing is
stored twice, and no batch is stored in part.

    session         a session: puts, batches of both flush modes, close
    async session   the same in ASYNC_FLUSH, without a thread that publishes
    group           puts beside three threads that put too, and wait for the same syncs
    promised        puts in flight beside those of three threads
    turns           commits in turn with another process, which has committed the same batch before
    opened again    a session, which this process opens again after an error, and then another process writes
    puts, batches   parts of a session, for tests that must be short
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import messagestore
from crash.faults import quiet_threads
from crash.harness import SMALL, Promise, Step, die, do_step
from crash.imitate import Process, commit
from crash.judge import Crash, Verdict, judge, killed
from crash.memdisk import MemRecordingDisk
from crash.workloads import ASYNC, Base, copy_of
from messagestore import ASYNC_FLUSH, SYNC_FLUSH, Message, MessageStore, StoreConfig, StoreError
from messagestore.files.disk import Disk
from messagestore.writer.flush import FlushService

PACKAGE = os.path.dirname(os.path.realpath(messagestore.__file__))


class Unknown(KeyError):
    """What a handler raises that looks for something of its own; a damaged record has the same effect."""


class Gone(FileNotFoundError):
    """What a handler raises that does not find a file of its own."""


ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, Unknown, SystemExit, Gone, MemoryError)
"""Besides, the searches of planted bugs raise `TimeoutError`, as a handler of SIGALRM does: an `OSError`, which whoever
expects a failing disk may catch.
"""
Line = tuple[str, int]
"""Module and line."""
_TRIES = 3
_OTHER_PUTS = 500
_LONG_MS = 20_000


class Interrupter:
    """Counts the lines of the store that this thread runs, and raises an error once, before one of them.

    Parameters
    ----------
    line : Line | None
        None: only count.
    hit : int
        Raise at this occurrence of the line, counted from 1.
    error : type
    """

    def __init__(self, line: Line | None = None, hit: int = 1, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.line, self.hit, self.error = line, hit, error
        self.hits: Counter[Line] = Counter()
        self.raised = False

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Trace while the block runs, in a program that has a handler."""
        before, handler = sys.gettrace(), signal.signal(signal.SIGUSR2, lambda _number, _frame: None)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGUSR2, handler)

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code, caller = frame.f_code, frame.f_back
        if not code.co_filename.startswith(PACKAGE) or self.raised:
            return None
        if self.line is not None and _module(code) != self.line[0]:
            return None
        if code.co_name == "__del__" or (caller is not None and caller.f_code.co_name == "__del__"):
            return None  # Python ignores errors raised in these
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if event == "line" and not self.raised and frame.f_lasti not in _nowhere(frame.f_code):
            line = (_module(frame.f_code), frame.f_lineno)
            self.hits[line] += 1
            if line == self.line and self.hits[line] == self.hit:
                self.raised = True
                raise self.error("by the test")
        return self._step


@lru_cache(4096)
def _module(code: CodeType) -> str:
    return os.path.basename(code.co_filename).removesuffix(".py")


@lru_cache(4096)
def _nowhere(code: CodeType) -> frozenset[int]:
    """Return lines that the tracer sees but where Python raises nothing: a `try:`, and the normal exit of a `with`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    found = {step.offset for step in steps if step.opname == "NOP"}
    for place, step in enumerate(steps):
        nones = steps[place + (step.opname == "SWAP") :][:3]
        if len(nones) == 3 and all(none.opname == "LOAD_CONST" and none.argval is None for none in nones):
            found.add(step.offset)  # the arguments of `__exit__`
    return frozenset(found)


# ---- the stories

_SESSION: tuple[Step, ...] = (
    ("put", 10, "single", 0),
    ("puts", 20, 4, "single", 1),
    ("batch", "app-1", 1, 8, SYNC_FLUSH),
    ("put", 11, "new", 0),
    ("batch", "app-1", 2, 90, ASYNC_FLUSH),
    ("clean",),
    ("put", 12, "single", 0),
)
_BATCHES: tuple[Step, ...] = (("batch", "app-1", 1, 8, SYNC_FLUSH), ("batch", "app-1", 2, 90, SYNC_FLUSH))
_PUTS: tuple[Step, ...] = (("put", 10, "single", 0), ("puts", 20, 4, "single", 1), ("put", 11, "single", 0))


def session(
    root: Path,
    disk: Disk,
    promise: Promise,
    interrupter: Interrupter,
    config: StoreConfig = SMALL,
    steps: Sequence[Step] = _SESSION,
) -> None:
    """Run a session; each step is tried again, puts as new ones."""
    with interrupter.armed(), contextlib.suppress(*ERRORS, StoreError, OSError):
        store = MessageStore.open(root, config, disk=disk)
        for step in steps:
            for attempt in range(_TRIES):
                again = (step[0], int(step[1]) + _OTHER_PUTS * attempt, *step[2:]) if "put" in step[0] else step  # type: ignore[operator, call-overload]
                try:
                    do_step(store, again, promise, config)
                    break
                except (*ERRORS, StoreError, OSError):
                    continue
        store.close()


def async_session(root: Path, disk: Disk, promise: Promise, interrupter: Interrupter) -> None:
    """Run the same in ASYNC_FLUSH, with a flush thread that leaves publishing the puts to this thread."""
    with_puts = FlushService._round

    def without_puts(service: FlushService) -> None:
        if service._requested > service._flushed:
            with_puts(service)
        service._dispatch_wanted = False

    with mock.patch.object(FlushService, "_round", without_puts):
        session(root, disk, promise, interrupter, ASYNC)


def group(
    root: Path, disk: Disk, promise: Promise, interrupter: Interrupter, *, step: str = "puts", in_flight: bool = False
) -> None:
    """Interrupt a thread that puts beside three others: each of them is acknowledged in time, or gets an error.

    With `in_flight`, the others wait for Futures.
    """
    late: list[str] = []
    config = SMALL.replace(sync_flush_timeout=_LONG_MS)
    store = MessageStore.open(root, config, disk=disk)

    def put(first: int) -> None:
        for number in range(first, first + 3):
            body, begun_s = f"put/{number}/", time.monotonic()
            promise.maybe_puts.append(body)
            try:
                message = Message("single", body.encode(), queue_id=0)
                if in_flight:
                    acknowledged = store.put_message_async(message).result(_LONG_MS / 2000).is_ok
                else:
                    acknowledged = store.put_message(message).is_ok
            except TimeoutError:  # an OSError, too
                late.append(body)
                return
            except (StoreError, OSError):
                return  # the interrupt has stopped the writer
            if not acknowledged or time.monotonic() - begun_s > _LONG_MS / 2000:
                late.append(body)
            elif acknowledged:
                promise.accepted.add(body)
                promise.puts.append(body)

    threads = [threading.Thread(target=put, args=(100 * number,), daemon=True) for number in (3, 4, 5)]
    for thread in threads:
        thread.start()
    for attempt in range(_TRIES):
        with interrupter.armed(), contextlib.suppress(*ERRORS, StoreError, OSError):
            do_step(store, (step, 20 + _OTHER_PUTS * attempt, 4, "single", 1), promise, config)
            break
    for thread in threads:
        thread.join(_LONG_MS / 1000)
    if late or any(thread.is_alive() for thread in threads):
        raise AssertionError(f"puts of other threads were late, or never came back: {late}")
    with contextlib.suppress(*ERRORS, StoreError, OSError):
        store.close()


def turns(root: Path, disk: Disk, promise: Promise, interrupter: Interrupter) -> None:
    """Let P commit, Q commit P's next batch and one of its own, and P bring the same batch and continue."""
    p, q = Process(root, SMALL, disk), Process(root, SMALL, disk)
    committed = partial(_committed, promise)
    try:
        committed(p, "app-1", 1, 5)
        committed(q, "app-1", 2, 7)
        committed(q, "other", 0, 6)
        for app, version, rows in (("app-1", 2, 7), ("other", 1, 4), ("app-1", 3, 5)):
            for attempt in range(_TRIES):
                try:
                    with interrupter.armed():
                        committed(p, app, version, rows)
                    break
                except (*ERRORS, StoreError, OSError) as error:
                    if attempt == _TRIES - 1:
                        raise AssertionError(f"the commit is of no use any more: {error!r}") from error
        committed(q, "other", 2, 3)
        with interrupter.armed(), contextlib.suppress(*ERRORS, StoreError, OSError):
            p.detach()
    finally:
        p.die()
        q.die()


def _committed(promise: Promise, process: Process, app: str, version: int, rows: int) -> None:
    promise.rows[(app, version)] = rows
    promise.maybe_batches.add((app, version))
    with process.store.writing(f"{app} {version}") as writer:
        commit(writer, app, version, rows)
    promise.accepted.add((app, version))
    promise.batches.add((app, version))


def opened_again(root: Path, disk: Disk, promise: Promise, interrupter: Interrupter) -> None:
    """Interrupt a session anywhere: this process opens the store again, and leaves it to another one when it closes it."""

    def put(number: int) -> None:
        with MessageStore.open(root, SMALL, disk=disk) as store:
            do_step(store, ("put", number, "single", 0), promise, SMALL)

    with interrupter.armed(), contextlib.suppress(*ERRORS, StoreError, OSError):
        put(10)
    try:
        put(10 + _OTHER_PUTS)
        q = Process(root, SMALL.replace(lock_timeout="5s"), disk)
        try:
            _committed(promise, q, "other", 0, 4)
        finally:
            q.die()
    except (*ERRORS, StoreError, OSError) as error:
        raise AssertionError(f"the store is of no use any more: {error!r}") from error


LONG = ("session", "async session", "group", "promised", "turns", "opened again")
STORIES: dict[str, Callable[[Path, Disk, Promise, Interrupter], None]] = {
    "puts": partial(session, steps=_PUTS),
    "batches": partial(session, steps=_BATCHES),
    "session": session,
    "async session": async_session,
    "group": group,
    "promised": partial(group, step="futures", in_flight=True),
    "turns": turns,
    "opened again": opened_again,
}


def lines(story: str, base: Base, root: Path) -> Counter[Line]:
    """Return the lines that a story runs without an interrupt, and how often."""
    counting = Interrupter()
    _tell(story, base, root, counting)
    if not counting.hits:
        raise AssertionError("no line of the store was seen")
    return counting.hits


def _tell(story: str, base: Base, root: Path, interrupter: Interrupter) -> tuple[MemRecordingDisk, Promise]:
    disk, promise = MemRecordingDisk(root, base.content), copy_of(base.promise)
    with quiet_threads():
        try:
            STORIES[story](root, disk, promise, interrupter)
        finally:
            die(root)
    return disk, promise


def check(story: str, base: Base, root: Path, interrupter: Interrupter, *, power_cut: bool) -> Verdict:
    """Run a story with an interrupt; return what is wrong afterwards."""
    verdict = Verdict()
    try:
        disk, promise = _tell(story, base, root, interrupter)
    except (AssertionError, StoreError, OSError) as error:
        verdict.misread.append(f"{type(error).__name__}: {error}")
        return verdict
    content = disk.image(disk.position, "strict").folder if power_cut else disk.content()
    promise = promise if power_cut else killed(promise)
    verdict = judge(Crash(content, promise, (), SMALL, power_cut=power_cut), root, briefly=True)
    # A writer that stopped before its first byte records that in `state` of a store that is closed.
    verdict.misread = [
        text for text in verdict.misread if not text.startswith("before recovery: Fault(path='spark/state'")
    ]
    return verdict


def cases(hits: Counter[Line]) -> Iterator[tuple[Line, int, type[BaseException]]]:
    """Yield each line, the first and the last time that it is reached, with the errors in turn."""
    for number, (line, count) in enumerate(sorted(hits.items())):
        errors = itertools.cycle(ERRORS[number % len(ERRORS) :] + ERRORS[: number % len(ERRORS)])
        for hit in sorted({1, count}):
            yield line, hit, next(errors)
