"""The process is killed at every operation of the seam: nothing promised is lost, nothing is there twice or in half.

Every operation of some workloads here, once; `make crash` has all of them, writes done by half, second deaths and power
cuts.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from crash import images
from crash.harness import Promise, check_store, no_thread_warnings, run_until_killed
from crash.images import Death, Story
from crash.judge import Crash, judge
from crash.memdisk import MemDisk
from crash.simdisk import KillDisk, Operation
from crash.workloads import BASIC, WORKLOADS, Bases, copy_of

pytestmark = no_thread_warnings

WHOLE = ("single puts", "a new store")
"""Of these opening and closing, too: they are the same in all others."""


@pytest.fixture
def bases(scratch: Path) -> Bases:
    return Bases(scratch / "store")


def between_open_and_close(operations: list[Operation]) -> range:
    """Operations from the first `abort` to the last write of the journal."""
    opened = [i for i, operation in enumerate(operations) if operation.detail.endswith("/abort")]  # renamed to it
    closing = [i for i, operation in enumerate(operations) if operation.path.endswith("/new-journal")]
    return range(opened[0] if opened else 0, closing[-1] if closing else len(operations))


def fail_unless_ok(label: str, crash: Crash, root: Path, *, thorough: bool = False) -> None:
    verdict = judge(crash, root, thorough=thorough, briefly=not thorough)
    assert verdict.ok, f"{label}: {verdict}"


@pytest.mark.parametrize("name", BASIC)
def test_kill_at_every_operation(name: str, bases: Bases) -> None:
    """A process dies at each of its operations; the next one finds all that was acknowledged."""
    story = Story.of(name, bases)
    operations = story.run.disk.operations
    whole = name in WHOLE or story.workload.base not in ("filled", "few entries")
    places = range(story.first_cut, len(operations)) if whole else between_open_and_close(operations)
    assert len(places) > 5
    for number, cut in enumerate(places):
        crash = Death(story, cut).crash(bases.root)
        fail_unless_ok(f"killed at operation {cut}: {operations[cut]}", crash, bases.root, thorough=number % 16 == 0)


def test_kill_in_the_middle_of_a_write(bases: Bases) -> None:
    """A process dies when half of a write is done."""
    story = Story.of("batches", bases)
    halves = [cut for cut, operation in enumerate(story.run.disk.operations) if operation.name == "pwrite"]
    assert len(halves) > 20
    for cut in halves:
        crash = Death(story, cut, half=True).crash(bases.root)
        fail_unless_ok(f"half of operation {cut}", crash, bases.root)


def test_killed_twice(bases: Bases) -> None:
    """A process dies, and the next one in its recovery or replay; the third finds everything."""
    chance = random.Random(2)
    story = Story.of("roll-over by puts", bases)
    deaths = list(images.kills(story))[::7]
    assert len(deaths) > 20
    for death in deaths:
        words, second = images.again(death.crash(bases.root), bases.root, chance)
        fail_unless_ok(f"{death.label}, {words}", second, bases.root)


@pytest.mark.parametrize("name", ["Spark commits", "async puts"])
def test_on_a_real_disk(name: str, scratch: Path) -> None:
    """The same on files that are really there, killed at some operations, and looked at by the store's own reading."""
    bases = Bases(scratch / "memory")
    base, workload = bases["filled"], WORKLOADS[name]
    for at in (None, 25, 40, 55):
        root = scratch / f"store-{at}"
        bases.root.mkdir(exist_ok=True)
        story_disk = MemDisk(bases.root, base.content)
        story_disk.write_to(root)
        promise = run_until_killed(root, workload.all_steps, KillDisk(at), workload.config, copy_of(base.promise))
        check_store(root, promise, workload.config)


def test_the_harness_notices_a_lost_put(bases: Bases) -> None:
    """The guard of the tests above: what was promised and is not there is said."""
    story = Story.of("single puts", bases)
    crash = Death(story, story.run.disk.position).crash(bases.root)
    promise = Promise(**{**vars(crash.promise), "puts": [*crash.promise.puts, "put/77/"]})
    verdict = judge(Crash(crash.content, promise, crash.steps, crash.config, power_cut=False), bases.root)
    assert verdict.lost == ["put/77/"]
