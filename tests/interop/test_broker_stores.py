"""Random stores of the real Java store, ended and damaged at random: our recovery keeps what Java's own recovery keeps.

make interop ARGS="-k broker_stores"                150 stores
make interop-deep STORES=2000 SEED=1000             others, as many as wanted
make interop-deep STORES=1 SEED=17                  the one of seed 17
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from interop import broker_recipes
from interop.broker_stores import try_one
from interop.java_store import COUNTS, Driver

STORES = int(os.environ.get("INTEROP_STORES", "150"))
FIRST_SEED = int(os.environ.get("INTEROP_SEED", "0"))
GROUP = 10
"""Stores of one test: while Java closes some, which takes it three seconds each, others go on."""
PINNED: tuple[int, ...] = ()
"""Seeds that found something once."""


def groups() -> list[list[int]]:
    seeds = [*range(FIRST_SEED, FIRST_SEED + STORES)]
    return [seeds[i : i + GROUP] for i in range(0, len(seeds), GROUP)]


def check(seeds: list[int], drivers: Callable[[str], Driver], memory: Path) -> None:
    recipes = [broker_recipes.recipe(seed) for seed in seeds]
    jvms = {version: drivers(version) for version in sorted({made.version for made in recipes})}
    with ThreadPoolExecutor(GROUP) as pool:
        wrong = [*pool.map(lambda made: try_one(made, jvms[made.version], memory / f"seed-{made.seed}"), recipes)]
    COUNTS.recipes += len(recipes)
    found = [(seed, fault) for seed, fault in zip(seeds, wrong, strict=True) if fault is not None]
    said = "\n\n".join(f"seed {seed} (make interop-deep STORES=1 SEED={seed}): {fault}" for seed, fault in found)
    assert not found, f"{len(found)} of {len(recipes)} stores are wrong\n{said}"


@pytest.mark.parametrize("seeds", groups(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_stores_of_a_broker(seeds: list[int], drivers: Callable[[str], Driver], memory: Path) -> None:
    """A failure names its seeds, and the command that repeats one."""
    check(seeds, drivers, memory)
