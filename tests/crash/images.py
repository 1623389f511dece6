"""Crash images: what any kill, and any power cut, may have left of a workload, judged one after the other.

A workload is recorded once. For every operation index there are images of a kill (with the next write done by half, too)
and of a power cut: what was not synced survives in any subset, by 512-byte sector, reordered, and names without a
directory sync are lost or not. Half of the images die a second time, in recovery or replay.

    every(workload)        each index, each mode: a fixed list
    at_random(workload)    for ever, by a seed
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crash.counts import Counts
from crash.counts import again as again_command
from crash.faults import quiet_threads
from crash.harness import Step, scratch_folder
from crash.imitate import another_boot
from crash.judge import Crash, Verdict, judge, killed
from crash.memdisk import MemDisk, MemRecordingDisk
from crash.power_cut import MODES, Folder, Image, Write
from crash.simdisk import RecordingDisk
from crash.workloads import WORKLOADS, Base, Bases, Recorded, Workload, copy_of, record, record_in_memory

POWER_MODES = tuple(mode for mode in MODES if mode != "all")


@dataclass
class Story:
    """One workload, recorded, with what came before it."""

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
        """A folder of which nothing is there yet is no store."""
        return 1 if self.workload.base == "empty" else 0

    def killed_at(self, cut: int, root: Path, *, half: bool = False) -> Crash | None:
        """The process died after `cut` operations; with `half` in the middle of the next one, if that is a write."""
        content, left = self.run.disk.image(cut, "all")._folder, (self.run.disk, cut, self.run.promised(cut))
        if half:
            halved = with_half_write(self.run.disk, cut, content, root)
            if halved is None:
                return None
            content = halved
        promise = killed(self.run.promised(cut))
        return Crash(content, promise, self.steps, self.workload.config, power_cut=False, left=None if half else left)

    def cut_off(self, image: Image) -> Crash:
        """Power went."""
        return Crash(image._folder, self.run.promised(image.cut), self.steps, self.workload.config)


def with_half_write(disk: RecordingDisk, cut: int, content: Folder, root: Path) -> Folder | None:
    """The next operation's write done by half; None when it is none."""
    for number, event in disk._events:
        if number == cut and isinstance(event, Write):
            break
    else:
        return None
    paths = disk._replay_at(cut).paths()
    if event.inode not in paths:
        return None
    half = MemDisk(root, content)
    path = f"{half.root}/{paths[event.inode]}"
    half.pwrite(half.open(path, writable=True), event.data[: len(event.data) // 2], event.position)
    return half.content()


# ---- which images


def kills(story: Story, root: Path) -> Iterator[tuple[str, Crash]]:
    """Each operation index, and each write by half."""
    for cut in range(story.first_cut, story.run.disk.position + 1):
        for half in (False, True):
            crash = story.killed_at(cut, root, half=half)
            if crash is not None:
                yield f"kill {cut}{' half' if half else ''}", crash


def power_cuts(story: Story, *, limit: int, seed: int = 0) -> Iterator[tuple[str, Crash]]:
    """Each operation index in each mode, at most `limit` images of a mode."""
    for cut in range(story.first_cut, story.run.disk.position + 1):
        for image in story.run.disk.images(cut, POWER_MODES, limit=limit, random_count=limit, seed=seed):
            yield f"power cut {cut}, {image.label}", story.cut_off(image)


def every(story: Story, root: Path, *, limit: int = 1) -> Iterator[tuple[str, Crash]]:
    """All kills, and power cuts at every index."""
    yield from kills(story, root)
    yield from power_cuts(story, limit=limit)


def at_random(story: Story, root: Path, chance: random.Random) -> tuple[str, Crash]:
    """One image, by chance."""
    cut = chance.randint(story.first_cut, story.run.disk.position)
    if chance.random() < 0.2:
        half = chance.random() < 0.5
        crash = story.killed_at(cut, root, half=half)
        if crash is not None:
            return f"kill {cut}{' half' if half else ''}", crash
    seed = chance.randrange(1 << 30)
    mode = chance.choice(POWER_MODES)
    in_order = chance.random() < 0.3
    images = list(story.run.disk.images(cut, (mode,), limit=1, random_count=1, seed=seed, names_in_order=in_order)) or [
        story.run.disk.image(cut)
    ]
    return f"power cut {cut}, {images[0].label}", story.cut_off(images[0])


# ---- judged


def again(crash: Crash, root: Path, chance: random.Random) -> tuple[str, Crash]:
    """The next process recovers and replays, and dies on the way: by a kill, or power goes."""
    replays: list[Step] = [
        ("batch", app, version, rows, "SYNC_FLUSH" if (app, version) in crash.promise.batches else "ASYNC_FLUSH")
        for (app, version), rows in sorted(crash.promise.rows.items())
    ]
    by_kill = chance.random() < 0.4
    if by_kill or crash.left is None:
        disk, promise = MemRecordingDisk(root, crash.content), crash.promise
    else:  # what the first one had not synced may go now, unless the second one synced it
        disk, promise = MemRecordingDisk.after_kill(root, *crash.left[:2]), crash.left[2]
    promise = copy_of(promise)
    if crash.power_cut:
        promise.accepted = {*promise.puts, *promise.batches}  # the rest may be gone, and no close makes it durable
    with another_boot(101) if crash.power_cut else contextlib.nullcontext():
        run = record(disk, promise, [("open",), *replays, ("close",)], crash.config)
    cut = chance.randint(0, disk.position)
    if by_kill:
        image = disk.image(cut, "all")
    else:
        mode = chance.choice(POWER_MODES)
        image = next(iter(disk.images(cut, (mode,), limit=1, random_count=1, seed=cut)), disk.image(cut))
    promise = run.promised(cut)
    if by_kill and not crash.power_cut:
        promise = killed(promise)
    # A replay appends behind what was lost: what is there is still whole, but no prefix of what was done first.
    steps = crash.steps if not replays else ()
    words = f"then {'kill' if by_kill else 'power cut'} {cut}, {image.label}"
    return words, Crash(image._folder, promise, steps, crash.config, power_cut=crash.power_cut or not by_kill)


def another_put(crash: Crash, root: Path) -> Crash:
    """After a kill another process puts a message in SYNC_FLUSH; then power goes, and takes what nobody synced."""
    assert crash.left is not None
    before, cut, promise = crash.left
    disk, put = MemRecordingDisk.after_kill(root, before, cut), ("put", 900, "single", 0)
    run = record(disk, promise, [("open",), put], crash.config)
    image = disk.image(disk.position, "strict")
    return Crash(image._folder, run.promised(disk.position), (), crash.config)


def judged(label: str, crash: Crash, root: Path, chance: random.Random, *, number: int) -> tuple[str, Verdict]:
    """The verdict on an image; every second one dies again first, one in four is looked at more closely."""
    if number % 2:
        words, crash = again(crash, root, chance)
        label = f"{label}, {words}"
    return label, judge(crash, root, thorough=number % 8 < 2)


# ---- the mode of `make crash`

QUICK_COUNT = 20_500


def run(seconds: float, seed: int, quick: bool, part: tuple[int, int] = (0, 1), case: str = "") -> Counts:
    """Every operation of every workload, then images by chance, up to `QUICK_COUNT`; or by chance for so many seconds."""
    counts, until_s = Counts(), time.monotonic() + seconds
    with scratch_folder() as folder, quiet_threads():
        root = folder / "store"
        bases = Bases(root)
        stories = {name: Story.of(name, bases) for name in WORKLOADS}
        for number, (key, label, crash) in enumerate(_cases(stories, root, seed, part, case, each=quick)):
            if number * part[1] >= QUICK_COUNT if quick else time.monotonic() > until_s:
                break
            words, verdict = judged(label, crash, root, random.Random(f"{seed} {key}"), number=number_of(key))
            counts.take("crash images", verdict, f"{key}: {words}", again_command("images", seed, key))
            if case:
                break
    return counts


def number_of(key: str) -> int:
    """`workload/17` -> 17."""
    return int(key.rpartition("/")[2])


def _cases(
    stories: dict[str, Story], root: Path, seed: int, part: tuple[int, int], case: str, *, each: bool
) -> Iterator[tuple[str, str, Crash]]:
    """Key of the case, label and image, without end: this part of them, or the one case. With `each`, every operation
    comes before those by chance.
    """
    for name, story in stories.items() if each else ():
        if not case or case.rpartition("/")[0] == name:
            for number, (label, crash) in enumerate(every(story, root)):
                if number == number_of(case) if case else number % part[1] == part[0]:
                    yield f"{name}/{number}", label, crash
    numbers = [number_of(case)] if case else itertools.count(part[0], part[1])
    names = list(stories)
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        label, crash = at_random(stories[chance.choice(names)], root, chance)
        yield f"by chance/{number}", label, crash
