"""The mode `images` of `make crash`: judges what any kill and any power cut may leave of a workload.

A workload is recorded once. For every operation index there are images of a kill (also with half of the next write
completed) and of a power cut: any subset of what was not synced survives, by 512-byte sector and in any order, and
names without a directory sync may be lost. Half of the images die a second time, in recovery or replay.

    every(story)                 each index, each mode: a fixed list
    at_random(story, chance)     endless, by a seed

An image that is judged wrong is reduced while it is still wrong: without its second death, and with less of what the
power cut removed. The key of the result replays it: `roll-over/31;once;lost 4,7`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crash import backups, turns
from crash.counts import Counts
from crash.counts import again as again_command
from crash.faults import quiet_threads
from crash.harness import Step, scratch_folder
from crash.imitate import another_boot
from crash.judge import Crash, Verdict, judge, killed
from crash.memdisk import MemRecordingDisk, half_write, with_half_write
from crash.power_cut import POWER_MODES, SECTOR_SIZE, Image, Write
from crash.shrink import smallest
from crash.simdisk import RecordingDisk
from crash.turns import taken
from crash.workloads import WORKLOADS, Base, Bases, Recorded, Workload, copy_of, record, record_in_memory
from messagestore.files.state import State
from messagestore.format.layout import STATE_FLUSHED, STATE_SLOT, STATE_SLOT_POSITIONS


@dataclass
class Story:
    """One recorded workload, with what came before it."""

    name: str
    workload: Workload
    base: Base
    run: Recorded

    @classmethod
    def of(cls, name: str, bases: Bases) -> Story:
        workload = WORKLOADS[name]
        base = bases[workload.base]
        return cls(name, workload, base, record_in_memory(base, workload, bases.root))

    @property
    def steps(self) -> list[Step]:
        return [*self.base.steps, *self.workload.steps]

    @property
    def first_cut(self) -> int:
        """The first operation index to examine: a folder in which nothing exists yet is not a store."""
        return 1 if self.workload.base == "empty" else 0


@dataclass(frozen=True)
class Death:
    """Says how a workload's process ended.

    Parameters
    ----------
    story : Story
    cut : int
        How many operations had been done.
    image : Image | None
        What the power cut left; None: the process was killed.
    half : bool
        The kill was in the middle of the next operation, which is a write.
    """

    story: Story
    cut: int
    image: Image | None = None
    half: bool = False

    @property
    def label(self) -> str:
        """Return the death in words."""
        if self.image is not None:
            return f"power cut {self.cut}, {self.image.label}"
        return f"kill {self.cut}{' half' if self.half else ''}"

    def crash(self, root: Path) -> Crash:
        """Return what is left of the store, and what must be there."""
        story, disk = self.story, self.story.run.disk
        promise, config = story.run.promised(self.cut), story.workload.config
        flushed = flushed_end(disk, self.cut)

        if self.image is not None:
            return Crash(self.image.folder, promise, story.steps, config, flushed_end=flushed)

        content, left = disk.image(self.cut, "all").folder, (disk, self.cut, story.run.promised(self.cut))
        if self.half:
            content = with_half_write(disk, self.cut, content, root)

        return Crash(
            content,
            killed(promise),
            story.steps,
            config,
            power_cut=False,
            left=None if self.half else left,
            flushed_end=flushed,
        )


def flushed_end(disk: RecordingDisk, cut: int) -> int:
    """Return how far a reader with `readUpTo=flushed` may have seen after the first `cut` operations."""
    replay = disk._replay_at(cut)
    inode = next((inode for inode, path in replay.paths().items() if path == "spark/state"), None)
    if inode is None:
        return 0
    file, size = replay.files[inode], STATE_SLOT.size + STATE_FLUSHED.size
    slots = (file.sector(position // SECTOR_SIZE, 1 << 30)[:size] for position in STATE_SLOT_POSITIONS)
    states = [state for slot in slots if (state := State.from_bytes(slot)) is not None]
    return max(states, key=lambda state: state.counter).flushed_end if states else 0


# ---- which images


def kills(story: Story) -> Iterator[Death]:
    """Yield a death for each operation index, and for half of each write."""
    disk = story.run.disk
    writes = {number for number, event in disk._events if isinstance(event, Write)}
    for cut in range(story.first_cut, disk.position + 1):
        yield Death(story, cut)
        if cut in writes and half_write(disk, cut) is not None:
            yield Death(story, cut, half=True)


def power_cuts(story: Story, *, limit: int, seed: int = 0) -> Iterator[Death]:
    """Yield deaths for each operation index in each mode, at most `limit` images of a mode."""
    disk = story.run.disk
    for cut in range(story.first_cut, disk.position + 1):
        for image in disk.images(cut, POWER_MODES, limit=limit, random_count=limit, seed=seed):
            yield Death(story, cut, image)


def every(story: Story, *, limit: int = 1) -> Iterator[Death]:
    """Yield all kills, and power cuts at every index."""
    yield from kills(story)
    yield from power_cuts(story, limit=limit)


def at_random(story: Story, chance: random.Random) -> Death:
    """Return one random death."""
    disk = story.run.disk
    cut = chance.randint(story.first_cut, disk.position)
    if chance.random() < 0.2:
        return Death(story, cut, half=chance.random() < 0.5 and half_write(disk, cut) is not None)
    seed = chance.randrange(1 << 30)
    mode = chance.choice(POWER_MODES)
    in_order = chance.random() < 0.3
    images = disk.images(cut, (mode,), limit=1, random_count=1, seed=seed, names_in_order=in_order)
    return Death(story, cut, next(images, None) or disk.image(cut))


# ---- judgement


def again(crash: Crash, root: Path, chance: random.Random) -> tuple[str, Crash]:
    """Let the next process recover and replay; it dies on the way, by a kill or by a power cut."""
    replays: list[Step] = [
        ("replay", app, version, rows, "SYNC_FLUSH" if (app, version) in crash.promise.batches else "ASYNC_FLUSH")
        for (app, version), rows in sorted(crash.promise.rows.items())
    ]
    by_kill = chance.random() < 0.4
    if by_kill or crash.left is None:
        disk, promise = MemRecordingDisk(root, crash.content), crash.promise
    else:  # what the first one had not synced may now be lost, unless the second one synced it
        disk, promise = MemRecordingDisk.after_kill(root, *crash.left[:2]), crash.left[2]
    promise = copy_of(promise)
    if crash.power_cut:
        promise.accepted = {*promise.puts, *promise.batches}  # the rest may be lost, and no close makes it durable
    disk.kill_at = chance.randint(0, 40 + 25 * len(replays))  # about as many operations as it would do
    with another_boot(101) if crash.power_cut else contextlib.nullcontext():
        run = record(disk, promise, [("open",), *replays, ("close",)], crash.config)
    cut = disk.position
    if by_kill:
        image = disk.image(cut, "all")
    else:
        mode = chance.choice(POWER_MODES)
        image = next(iter(disk.images(cut, (mode,), limit=1, random_count=1, seed=cut)), disk.image(cut))
    promise = run.promised(cut)
    if by_kill and not crash.power_cut:
        promise = killed(promise)
    flushed = crash.flushed_end
    if not crash.power_cut:  # otherwise the store is of an earlier boot until it is recovered
        flushed = max(flushed, flushed_end(disk, cut))
    # A replay appends after what was lost: what is there is still whole, but not a prefix of what was done first.
    steps = crash.steps if not replays else ()
    words = f"then {'kill' if by_kill else 'power cut'} {cut}, {image.label}"
    return words, Crash(
        image.folder, promise, steps, crash.config, power_cut=crash.power_cut or not by_kill, flushed_end=flushed
    )


def another_process(crash: Crash, root: Path, *steps: Step) -> Crash:
    """After a kill, let another process do `steps` in SYNC_FLUSH; then a power cut removes what nobody synced."""
    assert crash.left is not None
    before, cut, promise = crash.left
    disk = MemRecordingDisk.after_kill(root, before, cut)
    run = record(disk, promise, [("open",), *steps], crash.config)
    image = disk.image(disk.position, "strict")
    return Crash(image.folder, run.promised(disk.position), (), crash.config)


# ---- the mode of `make crash`

EVERY = 2
"""How many runs take all listed images between them."""
QUICK_BY_CHANCE = 4_000
SHRUNK_FAILURES = 3
"""How many failures of each process are reduced; the others are printed as they were found."""


@dataclass(frozen=True)
class Case:
    """One image to be judged, and how to reproduce it.

    Parameters
    ----------
    key : str
        `workload/17`, the 17th of `every`; or `by chance/17`.
    seed : int
    death : Death
    once : bool
        The image does not die a second time, although its number is odd.
    lost : tuple of int | None
        Only these of the atoms that the power cut removed are lost (`Image.lost`); None: all of them.
    """

    key: str
    seed: int
    death: Death
    once: bool = False
    lost: tuple[int, ...] | None = None

    @property
    def number(self) -> int:
        return number_of(self.key)

    def judged(self, root: Path) -> tuple[str, Verdict]:
        """Return its description and what is wrong.

        Every second image dies again first, and one in eight is examined more closely.
        """
        death = self.death
        if self.lost is not None and death.image is not None:
            death = replace(death, image=death.image.with_lost(self.lost))
        label, crash = death.label, death.crash(root)
        if self.number % 2 and not self.once:
            words, crash = again(crash, root, random.Random(f"{self.seed} {self.key}"))
            label = f"{label}, {words}"
        return label, judge(crash, root, thorough=self.number % 16 < 2)

    def with_words(self, words: Sequence[str]) -> Case:
        """Return the case that `words`, which follow the key in `case`, describe."""
        found = self
        for word in words:
            if word == "once":
                found = replace(found, once=True)
            elif word.startswith("lost"):
                found = replace(found, lost=tuple(int(n) for n in word[4:].split(",") if n.strip()))
            else:
                raise SystemExit(f"--case: found {word!r} behind {self.key!r}; allowed are `once` and `lost 1,2,3`")
        return found

    def __str__(self) -> str:
        lost = "" if self.lost is None else f";lost {','.join(map(str, self.lost))}"
        return f"{self.key}{';once' if self.once else ''}{lost}"

    def shrunk(self, root: Path) -> Case:
        """Return the smallest form that is still judged wrong."""

        def wrong(case: Case) -> bool:
            return not case.judged(root)[1].ok

        found = self
        if self.number % 2 and wrong(replace(found, once=True)):
            found = replace(found, once=True)
        if found.death.image is not None:
            lost = smallest(found.death.image.lost, lambda some: wrong(replace(found, lost=tuple(some))))
            found = replace(found, lost=tuple(lost))
        return found


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Run one in `EVERY` of the listed images of each workload, and some random ones.

    In deep mode, run all listed images, and random ones until the seconds are over.
    """
    counts, until_s = Counts(), time.monotonic() + seconds
    key, *words = case.split(";")
    with scratch_folder() as folder, quiet_threads():
        if not case or case.startswith(backups.KEY):
            runs = backups.EVERY if quick else 1
            counts.add(backups.run(folder / "backups", seed, part, runs, case if case.startswith(backups.KEY) else ""))
        if case.startswith(backups.KEY):
            return counts
        root = folder / "store"

        bases = Bases(root)
        stories = {name: Story.of(name, bases) for name in WORKLOADS}
        by_chance = QUICK_BY_CHANCE // turns.share if quick else None
        for found in cases(stories, seed, part, key, runs=turns.runs(EVERY) if quick else 1, by_chance=by_chance):
            if not quick and time.monotonic() > until_s:
                break

            one = found.with_words(words)
            label, verdict = one.judged(root)
            if not verdict.ok and not words and len(counts.failures) < SHRUNK_FAILURES:
                one = one.shrunk(root)
                label, verdict = one.judged(root)

            counts.take("crash images", verdict, f"{one}: {label}", again_command("images", seed, str(one)))
            if case:
                break
    return counts


def number_of(key: str) -> int:
    """Return the number in a key: `workload/17` -> 17."""
    return int(key.rpartition("/")[2])


def cases(
    stories: dict[str, Story], seed: int, part: tuple[int, int], key: str = "", *, runs: int, by_chance: int | None
) -> Iterator[Case]:
    """Yield this part of the cases, or the one with this key: those that are listed come before the random ones.

    Parameters
    ----------
    stories, seed, part, key : dict, int, (int, int), str
    runs : int
        How many runs take all listed cases between them.
    by_chance : int | None
        How many random cases all parts yield; None: they have no end.
    """
    for name, story in stories.items():
        if key:
            if key.rpartition("/")[0] == name:
                yield Case(key, seed, next(itertools.islice(every(story), number_of(key), None)))
                return
            continue
        for number, death in taken(every(story), runs, seed, part):
            yield Case(f"{name}/{number}", seed, death)
    names = list(stories)
    numbers = itertools.count(part[0], part[1]) if by_chance is None else range(part[0], by_chance, part[1])
    for number in [number_of(key)] if key else numbers:
        chance = random.Random(f"{seed} {number}")
        yield Case(f"by chance/{number}", seed, at_random(stories[chance.choice(names)], chance))
