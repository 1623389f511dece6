"""Part of the mode `images`: backups that a kill or a power cut interrupts, beside a writer.

A story takes three backups of a store, while the writer does a step before each operation of the backup. The disk of the backup records every operation. From what is left there after each of them, the
next backup goes on; then its point is restored, and judged as any store: everything that the writer had promised must
be in it. The first point must be what it was, in every case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crash.counts import Counts
from crash.counts import again as again_command
from crash.harness import Promise, Step, die, do_step
from crash.judge import Crash, Verdict, judge, killed
from crash.memdisk import MemDisk, MemRecordingDisk, Tree, half_write, with_half_write
from crash.power_cut import POWER_MODES, Folder, Write
from crash.simdisk import Operation
from crash.turns import is_taken
from crash.workloads import WORKLOADS, Bases, Workload, copy_of
from messagestore import MessageStore, StoreError
from messagestore.backup.copying import back_up
from messagestore.backup.points import Point, Target
from messagestore.backup.restoring import fill

STORIES = ("roll-over", "retention", "async puts", "Spark commits")
KEY = "backup of "
_POWER_EVERY = 11
EVERY = 7
"""How many runs take all deaths between them."""


class Places:
    """Where the store, its backup and what is restored of it are, for the code that uses them."""

    def __init__(self, folder: Path) -> None:
        self.store, self.target, self.restored = folder / "store", folder / "backup", folder / "restored"


@dataclass
class Story:
    """Three backups beside a writer, recorded.

    Parameters
    ----------
    name : str
    workload : Workload
    source : MemDisk
        The store behind its last step. Its writer is attached.
    disk : MemRecordingDisk
        The disk of the backup.
    first : dict of str to bytes
        What the first point restores.
    promise : Promise
        What the writer had promised in the end.
    steps : list of Step
        What the writer has done since the store was made.
    """

    name: str
    workload: Workload
    source: MemDisk
    disk: MemRecordingDisk
    first: Tree
    promise: Promise
    steps: list[Step]

    @classmethod
    @contextlib.contextmanager
    def told(cls, name: str, places: Places, bases: Bases) -> Iterator[Story]:
        """Tell a story, and let its writer live until the block ends."""
        workload = WORKLOADS[name]
        base = bases[workload.base]
        promise = copy_of(base.promise)
        source, disk = MemDisk(places.store, base.content), MemRecordingDisk(places.target)
        store = MessageStore.open(places.store, workload.config, disk=source)
        try:
            steps = list(workload.steps)
            third = len(steps) // 3
            left: list[Step] = []

            def writes(_: Operation | None = None) -> None:
                if left:
                    do_step(store, left.pop(0), promise, workload.config)

            first: Tree = {}
            for some in (steps[:third], steps[third : 2 * third], steps[2 * third :]):
                left += some
                while len(left) > len(some) // 2:
                    writes()
                disk.before = writes
                _back_up(places, source, disk)
                disk.before = None
                if not first:
                    first = _restored(places, disk, 1)
            while left:
                writes()
            do_step(store, ("clean",), promise, workload.config)  # what nobody sees yet is in no backup
            yield cls(name, workload, source, disk, first, killed(promise), [*base.steps, *steps])
        finally:
            die(places.store)

    def left(self, places: Places, *, power_every: int) -> Iterator[tuple[str, Folder]]:
        """What the backups left: after a kill at each operation, in the middle of each write, and after power cuts.

        Parameters
        ----------
        places : Places
        power_every : int
            The power is cut at every operation with a multiple of this number.
        """
        events = {number for number, event in self.disk._events if isinstance(event, Write)}
        for cut in range(self.disk.position + 1):
            content = self.disk.image(cut, "all").folder
            yield f"kill {cut}", content
            if cut in events and half_write(self.disk, cut) is not None:
                yield f"kill {cut} half", with_half_write(self.disk, cut, content, places.target)
            for image in self.disk.images(cut, POWER_MODES, limit=1, random_count=1) if cut % power_every == 0 else ():
                yield f"power cut {cut}, {image.label}", image.folder

    def judged(self, places: Places, content: Folder) -> Verdict:
        """Take the next backup, restore what it has, and judge that."""
        disk, verdict = MemDisk(places.target, content), Verdict()
        try:
            first_is_there = bool(Target(str(places.target), disk).numbers())
            point = _back_up(places, self.source, disk)
            if first_is_there and _restored(places, disk, 1) != self.first:
                verdict.misread.append("the first point restores something else than before")
            restored = MemDisk(places.restored)
            fill(Target(str(places.target), disk), point, str(places.restored), restored)
        except (StoreError, OSError, AssertionError) as error:
            verdict.misread.append(f"{type(error).__name__}: {error}")
            return verdict
        crash = Crash(restored.content(), copy_of(self.promise), self.steps, self.workload.config, power_cut=False)
        return judge(crash, places.restored, thorough=True)


def _back_up(places: Places, source: MemDisk, disk: MemDisk) -> Point:
    return back_up(str(places.store), str(places.target), disk=source, target_disk=disk)


def _restored(places: Places, disk: MemDisk, number: int) -> Tree:
    """The files of a point, without its id, which is another one each time."""
    target, restored = Target(str(places.target), disk), MemDisk(places.restored)
    fill(target, target.read(number), str(places.restored), restored)
    return {path: data for path, data in restored.tree().items() if not path.startswith("spark/")}


def run(folder: Path, seed: int, part: tuple[int, int], runs: int, case: str = "") -> Counts:
    """Run the kills of each story, and some power cuts: all of them in so many runs."""
    counts, places = Counts(), Places(folder)
    bases = Bases(places.store)
    for number, name in enumerate(STORIES):
        if case.rpartition("/")[0] != f"{KEY}{name}" if case else number % part[1] != part[0]:
            continue
        with Story.told(name, places, bases) as story:
            for at, (label, content) in enumerate(story.left(places, power_every=_POWER_EVERY)):
                key = f"{KEY}{name}/{at}"
                if key == case if case else is_taken(at, runs, seed):
                    verdict = story.judged(places, content)
                    counts.take("backups", verdict, f"{key}: {label}", again_command("images", seed, key))
    return counts
