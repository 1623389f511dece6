"""Plants bugs in the store, and provides the searches that must find them.

A mutant is a patch of the store's code and a search: kills, power cuts, second deaths, errors, damage, or many
processes at once. The lists of mutants are in `crash.mutants` and in the `crash.mutants_*` modules, one for each area.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar
from unittest import mock

from crash import errors, flips, images, replays
from crash.counts import Counts
from crash.faults import check_fault, fault_points, operations_of
from crash.judge import Verdict, judge
from crash.simdisk import KillDisk
from crash.workloads import WORKLOADS, Base, Bases
from messagestore import SYNC_FLUSH
from messagestore.files.disk import Disk
from messagestore.writer.log_writer import LogWriter

MOST_CASES = 1500
_ROOT = Path(__file__).resolve().parents[2]
_KERNEL = Path("store", "kernel")
_BY_NAME = (Path("connector/pyspark_messagestore"), Path("connector/pyspark_messagestore/dashboard"))
Planted = Callable[[], AbstractContextManager[object]]
Case = Verdict | Callable[[], Verdict]
"""What is wrong in one case of a search, or what looks for it: a case that is passed over then costs nothing."""
Search = Callable[["Ground"], Iterator[Case]]


class Ground:
    """The place where the searches run.

    Stores that they begin with are created once per process, by the code without a bug: what a store has in it does not
    depend on where it is.

    Attributes
    ----------
    made : dict of str -> Base
        Where the workloads begin.
    samples : dict of str -> Sample
        What the mode `flips` damages.
    states : dict of str -> State
        What the mode `replays` damages.
    """

    made: ClassVar[dict[str, Base]] = {}
    samples: ClassVar[dict[str, flips.Sample]] = {}
    states: ClassVar[dict[str, replays.State]] = {}

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.root = folder / "store"
        if not self.made:
            bases = Bases(self.root)
            self.samples.update(flips.make_samples(self.root))
            self.states.update(replays.make_states(self.root))
            self.made.update({name: bases[name] for name in {workload.base for workload in WORKLOADS.values()}})
        self.bases = Bases(self.root, self.made)


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Parameters
    ----------
    name : str
    planted : callable
        A context manager that patches the store.
    found_by : str
        The kind of case that must find it; for human readers.
    search : callable
        Returns its cases.
    case : int
        The number of the case that found it, counted from 1: it is tried before the others. 0: they are tried in order.
    """

    name: str
    planted: Planted
    found_by: str
    search: Search
    case: int = 0


def sources_of(planted: Planted) -> set[str]:
    """Name the files in which a bug is planted, as git does: those of every class, module and function that its patch names.

    Empty: the patch is of the harness's own disk, and any file may be the one that has the bug.
    """
    found, seen, waiting = set[str](), set[int](), list[Any]([planted])
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))

        if isinstance(value, str):
            found |= _named(value)
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, ModuleType | type | FunctionType):
            name = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if name.partition(".")[0] in ("messagestore", "pyspark_messagestore"):
                found.add(str(Path(str(sys.modules[name].__file__)).relative_to(_ROOT)))
            elif isinstance(value, FunctionType) and name.startswith("crash."):
                waiting += [cell.cell_contents for cell in value.__closure__ or ()]
                waiting += [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        elif inspect.ismethod(value):
            waiting += [value.__self__, value.__func__]
    return found


def _named(text: str) -> set[str]:
    """Name the C source, or the module of the connector or of its dashboard (`sink.columns`, `stored.Stored`), that a text is."""
    if not re.fullmatch(r"[\w.]+", text):
        return set()
    parts = text.split(".")
    paths = [_KERNEL / text]
    paths += [folder.joinpath(*parts[:count]).with_suffix(".py") for folder in _BY_NAME for count in (1, 2)]
    return {str(path) for path in paths if (_ROOT / path).is_file()}


def _names(code: CodeType) -> set[str]:
    """What a function and those in it name."""
    return {*code.co_names}.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


# ---- searches


def kills(*names: str) -> Search:
    def search(ground: Ground) -> Iterator[Case]:
        for name in names:
            story = images.Story.of(name, ground.bases)
            for number, death in enumerate(images.kills(story)):
                yield partial(_judged, death, ground.root, number)

    return search


def _judged(death: images.Death, root: Path, number: int) -> Verdict:
    return judge(death.crash(root), root, thorough=number % 4 == 0)


def power_cuts(*names: str) -> Search:
    def search(ground: Ground) -> Iterator[Case]:
        for name in names:
            story = images.Story.of(name, ground.bases)
            cases = list(images.power_cuts(story, limit=2))
            ground.chance.shuffle(cases)
            for number, death in enumerate(cases):
                yield partial(_judged, death, ground.root, number)

    return search


def second_deaths(*names: str) -> Search:
    """Kill the writer, then cut the power while the next process recovers, or just after."""

    def judged(death: images.Death, root: Path, chance: random.Random) -> Verdict:
        return judge(images.again(death.crash(root), root, chance)[1], root)

    def search(ground: Ground) -> Iterator[Case]:
        for name in names:
            story = images.Story.of(name, ground.bases)
            cases = list(images.kills(story))
            ground.chance.shuffle(cases)
            for death in cases:
                yield partial(judged, death, ground.root, random.Random(ground.chance.random()))

    return search


def next_batches(*names: str) -> Search:
    """Kill the writer, let the next process append a batch over several segments, then cut the power."""

    def judged(death: images.Death, root: Path) -> Verdict:
        return judge(images.another_process(death.crash(root), root, ("batch", "later", 0, 60, SYNC_FLUSH)), root)

    def search(ground: Ground) -> Iterator[Case]:
        for name in names:
            for death in images.kills(images.Story.of(name, ground.bases)):
                if not death.half:  # what a power cut leaves of half a write is not known
                    yield partial(judged, death, ground.root)

    return search


def faults(name: str, *kinds: str, tries: int = 2) -> Search:
    def judged(ground: Ground, kind: str, at: int) -> Verdict:
        workload = WORKLOADS[name]
        return check_fault(ground.bases[workload.base], workload, ground.root, kind, at, tries=tries)[2]

    def search(ground: Ground) -> Iterator[Case]:
        workload = WORKLOADS[name]
        operations = operations_of(ground.bases[workload.base], workload, ground.root)
        for kind in kinds:
            for group in fault_points(operations, kind).values():
                for at in group[:3]:
                    yield partial(judged, ground, kind, at)

    return search


def damage(name: str, *parts: str, ways: str = "vrw") -> Search:
    def judged(ground: Ground, sample: flips.Sample, change: flips.Damage, path: str, derived: bool) -> Verdict:
        return flips.look(sample, ground.root, change, path, ways, derived=derived)[1]

    def search(ground: Ground) -> Iterator[Case]:
        cases = [*flips.damages(ground.samples), *flips.flips(ground.samples)]
        chosen = [case for case in cases if case[1].startswith(name + ":") and any(part in case[1] for part in parts)]
        ground.chance.shuffle(chosen)
        for _, _, sample, change, path, derived in chosen:
            yield partial(judged, ground, sample, change, path, derived)

    return search


def many(kind: Callable[..., Verdict], *, tries: int = 20, **options: Any) -> Search:
    """Cases in which threads and processes meet by chance: on a busy machine, most of them may pass each other by."""

    def search(ground: Ground) -> Iterator[Verdict]:
        for number in range(tries):
            with mock.patch("traceback.print_exc"), tempfile.TemporaryDirectory(dir=ground.folder) as folder:
                yield kind(Path(folder, f"many-{number}"), ground.chance, Counts(), **options)

    return search


def short_writes(ground: Ground) -> Iterator[Verdict]:
    yield errors._short_writes(ground.folder, 7)


# ---- patches


def without(target: object, name: str, result: Any = None) -> Planted:
    """Replace a function with one that does nothing."""
    return lambda: mock.patch.object(target, name, return_value=result)


def patched(target: object, name: str, make: Callable[[Any], Any]) -> Planted:
    """Replace a method with one made from it."""
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))


def no_sync(part: str, operation: str = "fdatasync") -> Planted:
    """Drop the call that should sync one kind of file or folder."""

    def make(real: Any) -> Any:
        def dropped(disk: Disk, what: Any) -> None:
            path = str(getattr(what, "path", what))
            if part not in path.removeprefix(disk.folder) + "/":  # type: ignore[attr-defined]
                real(disk, what)

        def careful(disk: Disk, what: Any) -> None:
            return dropped(disk, what) if hasattr(disk, "folder") else real(disk, what)

        return careful

    return patched(KillDisk, operation, make)


def sync_log(*, data: bool, head: bool) -> Planted:
    def make(real: Any) -> Any:
        def some(writer: LogWriter, end: int, *, segment: int | None = None) -> None:
            if head if segment is not None else data:
                real(writer, end, segment=segment)
            elif segment is None:
                writer.synced_end = end

        return some

    return patched(LogWriter, "sync_log", make)
