"""The mode `errors` of `make crash`: the operating system refuses the n-th operation, for every n.

faults      each operation of each workload fails, once or permanently: EIO, ENOSPC, EMFILE, EROFS, EACCES, MemoryError
opens       the n-th opening of a file fails
full        a disk has no room for the n-th operation and some that follow; then it has, and a caller tries again
short       every write is done in pieces of a few bytes, or nothing of it is written
tmpfs       a file system that is really full, and has room again (root)
ulimit      64 descriptors for a process, 40 queues
queues      one batch for 10,000 of them
dead        ext4 that becomes read-only; ext4 and XFS that are shut down under readers (root)
interrupts  KeyboardInterrupt, SystemExit and MemoryError between two lines of the store's code
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from crash import checker, dead_disks, full_disks, interrupts, many_queues, turns
from crash.counts import Counts, again
from crash.faults import FAULTS, check_fault, fault_points, operations_of
from crash.harness import SMALL, Promise, Step, batch_columns, check_content, die, run_steps, scratch_folder
from crash.judge import Verdict, note_content, note_faults
from crash.power import FILE_SYSTEMS, CannotMountError
from crash.turns import taken_by_kind
from crash.workloads import FILLED, WORKLOADS, Base, Bases, batch, put
from messagestore import BatchRequest, Message, MessageStore, StoreError, StoreFullError, StorePoisonedError
from messagestore.files.disk import Disk
from messagestore.inspect.verify import verify

EVERY = {"full disks": 5, "interrupts": 37, "I/O errors": 13, "errors of open": 17}
"""How many runs take all cases of a kind between them; each run takes all of the others."""
Case = tuple[str, str, Callable[[], Verdict]]


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run the cases of each kind; the quick profile takes another part of those in `EVERY` for each seed."""
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder:
        cases = itertools.chain(
            _others(folder),
            _full_disks(folder),
            _interrupts(folder),
            _faults(folder, quick and not case),
        )

        whole = not quick or bool(case)
        chosen = taken_by_kind(
            cases,
            lambda one: 1 if whole or one[0] not in EVERY else turns.runs(EVERY[one[0]]),
            seed,
            (0, 1) if case else part,
        )
        for kind, key, run_case in chosen:
            if case and key != case:
                continue
            if not quick and time.monotonic() > until_s:
                break

            try:
                verdict = run_case()
            except (AssertionError, StoreError, OSError) as error:
                verdict = Verdict(misread=[f"{type(error).__name__}: {error}"])
            except (CannotRunHere, CannotMountError) as error:
                counts.notes.append(f"{kind}: {error}")
                continue

            counts.take(kind, verdict, key, again("errors", seed, key))
            if case:
                break
    return counts


class CannotRunHere(Exception):
    """The machine does not permit this."""


# ---- in memory


def _faults(folder: Path, briefly: bool) -> Iterator[Case]:
    root = folder / "store"
    bases = Bases(root)
    names = [name for name in WORKLOADS if not name.startswith(("recovery", "a new", "close and"))]
    for name in names:
        workload = WORKLOADS[name]
        operations = operations_of(bases[workload.base], workload, root)
        for fault, sticky in itertools.product(FAULTS, (False, True)):
            for group in fault_points(operations, fault).values():
                for number, at in enumerate(group):
                    tries = 1 + (number + sticky) % 2  # a caller that gives up continues with something else
                    key = f"{name}/{fault}{' sticky' if sticky else ''}/{at}"
                    yield "I/O errors", key, partial(_fault, bases, name, fault, at, sticky, False, briefly, tries)
        for fault in ("EMFILE", "EACCES", "EIO"):
            for at in range(60):
                yield (
                    "errors of open",
                    f"{name}/{fault} open/{at}",
                    partial(_fault, bases, name, fault, at, False, True, briefly),
                )


def _fault(
    bases: Bases, name: str, fault: str, at: int, sticky: bool, opens: bool, briefly: bool, tries: int = 2
) -> Verdict:
    workload = WORKLOADS[name]
    base = bases[workload.base]
    return check_fault(base, workload, bases.root, fault, at, sticky=sticky, opens=opens, tries=tries, briefly=briefly)[
        2
    ]


def _full_disks(folder: Path) -> Iterator[Case]:
    root = folder / "store"
    base = Bases(root)["filled"]
    for _, key, steps, at, count, number in full_disks.cases(base, root, False):
        yield "full disks", key, partial(_full_disk, base, root, steps, at, count, number)


def _full_disk(base: Base, root: Path, steps: list[Step], at: int, count: int, number: int) -> Verdict:
    return full_disks.check(base, root, steps, at, count, number)[1]


def _interrupts(folder: Path) -> Iterator[Case]:
    """Interrupt each line of each long story."""
    root = folder / "store"
    base = Bases(root)["filled"]
    for story in interrupts.LONG:
        for number, (line, hit, error) in enumerate(interrupts.cases(interrupts.lines(story, base, root))):
            key = f"{story}:{line[0]}:{line[1]}:{hit}:{error.__name__}"
            yield "interrupts", key, partial(_interrupt, base, root, story, line, hit, error, number % 2 == 1)


def _interrupt(
    base: Base, root: Path, story: str, line: interrupts.Line, hit: int, error: type[BaseException], power_cut: bool
) -> Verdict:
    return interrupts.check(story, base, root, interrupts.Interrupter(line, hit, error), power_cut=power_cut)


# ---- on the real disk


def _others(folder: Path) -> Iterator[Case]:
    for size in (1, 7, 500):
        yield "short writes", f"short/{size}", partial(_short_writes, folder, size)
    for at in range(0, 40, 4):
        yield "short writes", f"nothing written/{at}", partial(_nothing_written, folder, at)
    yield "full tmpfs", "tmpfs/puts", partial(_full_tmpfs, folder, False)
    yield "full tmpfs", "tmpfs/batches", partial(_full_tmpfs, folder, True)
    yield "64 descriptors", "ulimit", partial(_few_descriptors, folder)
    yield "10,000 queues in a batch", "queues", partial(many_queues.one_batch, folder, 10_000)
    yield "read-only ext4", "dead/read-only", partial(dead_disks.turned_read_only, folder)
    for kind in FILE_SYSTEMS:
        yield f"{kind} shut down", f"dead/{kind}", partial(dead_disks.shut_down, folder, kind)


class ShortDisk(Disk):
    """Writes at most a given number of bytes at a time, and none at all in the n-th call, if that is given."""

    def __init__(self, most: int, nothing_at: int = -1) -> None:
        self.most = most
        self.nothing_at = nothing_at
        self.count = 0

    def _pwrite(self, fd: int, view: bytearray | memoryview, position: int) -> int:
        self.count += 1
        if self.count == self.nothing_at:
            return 0
        return os.pwrite(fd, view[: self.most], position)


_STEPS: list[Step] = [*FILLED[:-1], put(10), batch(1, 40), put(11, 1), batch(2, 130), ("close",)]


def _checked(root: Path, promise: Promise) -> Verdict:
    """Check a closed store on the real disk with the checker and the store's own `verify`."""
    verdict, found = Verdict(), checker.check(checker.read_tree(root))
    note_faults(verdict, found, "closed")
    note_content(verdict, found.bodies, found.queues, promise, ())
    report = verify(root)
    if not report.ok:
        verdict.misread.append(f"verify: {report.findings[:3]}")
    return verdict


def _short_writes(folder: Path, size: int) -> Verdict:
    root, promise = folder / f"short-{size}", Promise()
    run_steps(root, _STEPS, ShortDisk(size), promise, SMALL)
    return _checked(root, promise)


def _nothing_written(folder: Path, at: int) -> Verdict:
    """Check that a write of nothing is an error, and not an endless loop."""
    root, promise = folder / f"nothing-{at}", Promise()
    with contextlib.suppress(OSError, StoreError):  # queues and index are written a second time instead
        run_steps(root, _STEPS, ShortDisk(1 << 20, at + 1), promise, SMALL)
    die(root)
    with MessageStore.open(root, SMALL) as store:
        check_content(store, promise)
    return _checked(root, promise)


def die_of(root: Path) -> None:
    from crash.harness import die

    die(root)


def _full_tmpfs(folder: Path, batches: bool) -> Verdict:
    """Fill a file system of 1 MiB: the store reports it, loses nothing, and continues when there is room again."""
    mount = folder / "full"
    mount.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        raise CannotRunHere("mounting a tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], capture_output=True, check=False)
    if mounted.returncode:
        raise CannotRunHere(f"mounting a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        return _fill(mount / "store", mount, batches)
    finally:
        subprocess.run(["umount", "-l", mount], check=False)


def _fill(root: Path, folder: Path, batches: bool) -> Verdict:
    promise = Promise()
    ballast = [folder / f"ballast-{number}" for number in range(3)]
    for path in ballast:
        path.write_bytes(bytes(150_000))
    store = MessageStore.open(root, SMALL)
    numbers = itertools.count()
    while ballast:
        try:
            while True:
                _append(store, next(numbers), batches, promise)
        except (StoreFullError, StorePoisonedError) as error:
            ballast.pop().unlink()  # makes room again
            if isinstance(error, StorePoisonedError):  # no room after the commit point: only recovery can decide
                with contextlib.suppress(StoreError):
                    store.close()
                die(root)
                store = MessageStore.open(root, SMALL)
    store.close()
    after = _checked(root, promise)
    with MessageStore.open_read_only(root, SMALL) as reader:
        check_content(reader, promise)  # type: ignore[arg-type]
    return after


def _append(store: MessageStore, number: int, batches: bool, promise: Promise) -> None:
    if batches:
        key = ("app-1", number)
        promise.maybe_batches.add(key)
        promise.rows[key] = 20
        store.append_batch(batch_columns(*key, 20), BatchRequest(app_id="app-1", version=number, version_source="user"))
        promise.batches.add(key)
    else:
        body = f"put/{number}/" + "x" * 300
        promise.maybe_puts.append(body)
        if store.put_message(Message("full", body.encode(), queue_id=number % 4)).is_ok:
            promise.puts.append(body)


def _few_descriptors(folder: Path) -> Verdict:
    """Write a batch for 40 queues with `ulimit -n 64`, and read them."""
    verdict = Verdict()
    code = f"from crash.errors import write_many_queues; write_many_queues({str(folder / 'ulimit')!r})"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        verdict.misread.append(done.stderr[-1500:])
        return verdict
    note_faults(verdict, checker.check(checker.read_tree(folder / "ulimit")), "ulimit")
    return verdict


def write_many_queues(root: str) -> None:
    """Write in a separate process, which may use 64 descriptors and uses no more."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with MessageStore.open(root, SMALL.replace(mapped_file_size_commit_log=1 << 18)) as store:
        store.create_topic("topic-many", 40)
        for version in range(3):
            columns = batch_columns("many", version, 200, 40)
            store.append_batch(columns, BatchRequest(app_id="many", version=version, version_source="user"))
        for queue_id in range(40):
            found = [m.body for m in store.get_message("topic-many", queue_id, 0, 1000).messages]
            assert len(found) == 15, f"queue {queue_id}: {len(found)} messages"
