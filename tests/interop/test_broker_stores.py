"""Random stores of the real Java store, ended and damaged at random: our recovery keeps what Java's own recovery keeps.

make interop ARGS="-k broker_stores"                                30 of 150 stores, others each day
make interop-deep STORES=2000 SEED=1000 ARGS="-k broker_stores"     others, as many as wanted
make interop-deep STORES=1 SEED=17 ARGS="-k broker_stores"          the one of seed 17
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from crash.kernels import planted as planted_in_kernel
from crash.planting import Planted, patched
from interop import broker_recipes
from interop.broker_recipes import Recipe
from interop.broker_stores import Kitchen, try_one
from interop.java_store import COUNTS, Driver
from interop.share import SHARE, part
from messagestore.format import record_rows
from messagestore.log.dispatch import QueueRuns
from messagestore.recovery.survey import Surveyor

STORES = int(os.environ.get("INTEROP_STORES", "150"))
FIRST_SEED = int(os.environ.get("INTEROP_SEED", "0"))
GROUP = 10
"""Stores of one test: while Java closes some, which takes it three seconds each, others go on."""
MOST_GROUPS_FOR_A_BUG = 5


def groups() -> list[list[int]]:
    seeds = part(range(FIRST_SEED, FIRST_SEED + STORES))
    return [seeds[i : i + GROUP] for i in range(0, len(seeds), GROUP)]


def right(recipes: list[Recipe], tried: Callable[[Recipe], str | None]) -> None:
    """Try all of them at once; a failure names its seeds, and the command that repeats one."""
    with ThreadPoolExecutor(GROUP) as pool:
        wrong = [*pool.map(tried, recipes)]
    COUNTS.recipes += len(recipes)
    found = [(made.seed, fault) for made, fault in zip(recipes, wrong, strict=True) if fault is not None]
    said = "\n\n".join(
        f'seed {seed} (make interop-deep STORES=1 SEED={seed} ARGS="-k broker_stores"): {fault}'
        for seed, fault in found
    )
    assert not found, f"{len(found)} of {len(recipes)} stores are wrong\n{said}"


@pytest.mark.parametrize("seeds", groups(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_stores_of_a_broker(seeds: list[int], drivers: Callable[[str], Driver], memory: Path) -> None:
    """Whatever Java wrote, deleted and left behind: what its own recovery keeps, ours keeps."""
    recipes = [broker_recipes.recipe(seed) for seed in seeds]
    jvms = {version: drivers(version) for version in sorted({made.version for made in recipes})}
    right(recipes, lambda made: try_one(made, jvms[made.version], memory / f"seed-{made.seed}"))


@pytest.mark.parametrize("seed", part(range(FIRST_SEED, FIRST_SEED + STORES, 50), min(SHARE, 3)))
def test_a_broker_that_is_killed(
    seed: int, own_java: Callable[..., Driver], drivers: Callable[[str], Driver], memory: Path
) -> None:
    """SIGKILL at some moment, while ten stores are written to; the seed does not repeat the moment."""
    recipes = [broker_recipes.recipe(each, killed=True) for each in range(seed, seed + 3 * GROUP, 3)]  # of one version
    doomed, survivor = own_java(recipes[0].version), drivers(recipes[0].version)
    kitchens = {made.seed: Kitchen(made, doomed, memory / f"seed-{made.seed}") for made in recipes}
    with ThreadPoolExecutor(GROUP) as pool:
        cooked = dict(zip(kitchens, pool.map(Kitchen.cook, kitchens.values()), strict=True))
        puts = [pool.submit(kitchen.put_until_killed, cooked[seed]) for seed, kitchen in kitchens.items()]
        time.sleep(Random(seed).random())
        doomed.kill()
        for put in puts:
            put.result()
    right(recipes, lambda made: try_one(made, survivor, memory / f"judged-{made.seed}", cooked[made.seed]))


# ---- the guard of all this: it finds what is wrong


def ends_where_numbers_begin_again(real: Callable[..., bool]) -> Callable[..., bool]:
    """Recovery takes a queue offset that does not follow for the end of the log."""

    def take(surveyor: Surveyor, run: Any) -> bool:
        before = surveyor.walk.end
        went_on = real(surveyor, run)
        if surveyor.walk.queues.restarted:
            surveyor.walk.end = before
            return False
        return went_on

    return take


PLANTED: dict[str, tuple[str, Planted]] = {
    "the log ends where queue offsets begin again": (
        "remade twice",
        patched(Surveyor, "_take", ends_where_numbers_begin_again),
    ),
    "a topic's earlier life stays in its queue": (
        "remade twice",
        patched(QueueRuns, "_restart", lambda real: lambda *_, **__: None),
    ),
    "records of long topics are none": (
        "V2",
        planted_in_kernel("frame.h", "magic != MAGIC_V1 && magic != MAGIC_V2", "magic != MAGIC_V1"),
    ),
    "the highest delay level is 17": (
        "delay above 18",
        patched(record_rows, "delay_of", lambda real: lambda level, delays_ms: real(level, delays_ms[:17])),
    ),
}
"""Bug -> a feature of the stores that show it, and the bug."""


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, drivers: Callable[[str], Driver], memory: Path) -> None:
    """Each within the first stores that have what it takes."""
    feature, planted = PLANTED[bug]
    able = (made for made in map(broker_recipes.recipe, itertools.count()) if feature in made.features)
    with planted(), ThreadPoolExecutor(GROUP) as pool:
        for _ in range(MOST_GROUPS_FOR_A_BUG):
            recipes = [*itertools.islice(able, GROUP)]
            jvms = {version: drivers(version) for version in sorted({made.version for made in recipes})}
            found = [*pool.map(lambda made: try_one(made, jvms[made.version], memory / f"{made.seed}"), recipes)]  # noqa: B023 - used at once
            COUNTS.recipes += len(recipes)
            if any(found):
                return
    raise AssertionError(f"not found in {MOST_GROUPS_FOR_A_BUG * GROUP} stores: {bug}")


def test_random_stores_with_light_queues(drivers: Callable[[str], Driver], memory: Path) -> None:
    """Refused by name, whatever derived files are gone: the records say that they are in light queues."""
    recipes = [broker_recipes.light_recipe(seed) for seed in range(FIRST_SEED, FIRST_SEED + GROUP)]
    jvms = {version: drivers(version) for version in sorted({made.version for made in recipes})}
    right(recipes, lambda made: try_one(made, jvms[made.version], memory / f"light-{made.seed}", light=True))
