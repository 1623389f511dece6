"""The same messages, hosts and times, appended by Java and by us, give the same bytes: log, queues and index."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interop import recipes
from interop.java_build import OLDER
from interop.java_store import ANSWER_S, COUNTS, Driver, JavaStore, java_config
from interop.recipes import T0_MS, Put, Recipe
from interop.share import SHARE, part
from interop.trees import difference, tree
from messagestore.format.layout import INDEX_HEADER

SEEDS = 250
EXAMPLES = 20
quietly = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Kitchen:
    """Cooks recipes twice and compares: while Java's store is open, and after both have closed."""

    def __init__(self, java: Driver, root: Path) -> None:
        self.java = java
        self.root = root
        self.numbers = itertools.count()
        self.done = 0
        """Recipes that gave the same bytes, open and closed."""
        self.closing: list[tuple[Future[bool], Path, Path, str]] = []

    def cook(self, recipe: Recipe, name: str) -> None:
        number = next(self.numbers)
        ours, theirs = self.root / f"ours-{number}", self.root / f"java-{number}"
        recipes.cook_ours(ours, recipe)
        java = JavaStore(self.java, theirs, java_config(recipe.config)).open()
        try:
            recipes.put_java(java, recipe)
            COUNTS.messages += len(recipe.messages())
        finally:
            self.closing.append((java.closing(), ours, theirs, name))
        found, wanted = tree(ours, index_by_order=True), while_open(tree(theirs, index_by_order=True))
        if difference(found, wanted):
            raise AssertionError(f"{name}: {difference(found, wanted)}")
        if len(self.closing) >= 100:
            self.finish()

    def finish(self) -> None:
        """Wait for Java's closes, all at once, and compare again."""
        closing, self.closing = self.closing, []
        for closed, *_ in closing:
            closed.result(ANSWER_S)
        for _, ours, theirs, name in closing:
            different = difference(tree(ours, index_by_order=True), tree(theirs, index_by_order=True))
            assert not different, f"{name}, after close: {different}"
            shutil.rmtree(ours)
            shutil.rmtree(theirs)
            self.done += 1
        self.java.call("gc")


def test_random_stores_are_the_same_bytes(java: Driver, root: Path) -> None:
    """Singles and batches, V1 and V2, all hosts, keys, tags and properties, at every alignment, with and without
    `__CRC32#`: the same files, while Java has them open and after both have closed."""
    kitchen = Kitchen(java, root)
    seeds = part(range(SEEDS))
    for seed in seeds:
        kitchen.cook(recipes.recipe(Random(seed)), f"recipes.recipe(Random({seed}))")
    kitchen.finish()
    assert kitchen.done == len(seeds) >= SEEDS // SHARE


def test_random_stores_are_the_same_bytes_as_those_of_an_older_version(
    drivers: Callable[[str], Driver], root: Path
) -> None:
    """RocketMQ 5.1 knows no `__CRC32#`, and its encoder of batches leaves out the last separator of the properties (a
    client's text is stored as it comes): single puts with the text of a newer client are the same bytes."""
    kitchen = Kitchen(drivers(OLDER), root)
    seeds = part(range(SEEDS // 5))
    for seed in seeds:
        recipe = recipes.recipe(Random(seed))
        steps = tuple(Put(message, T0_MS + number) for number, message in enumerate(recipe.messages()))
        config = recipe.config.replace(enabled_append_prop_crc=False)
        kitchen.cook(Recipe(config, steps), f"seed {seed}")
    kitchen.finish()
    assert kitchen.done == len(seeds) >= SEEDS // 5 // SHARE


def test_random_stores_are_the_same_bytes_and_failures_are_made_small(java: Driver, root: Path) -> None:
    """The same, by Hypothesis: its seeds are others, and it shrinks."""
    kitchen = Kitchen(java, root)

    @quietly
    @given(st.randoms(use_true_random=False))
    def cook(rng: Random) -> None:
        recipe = recipes.recipe(rng, most_steps=4)
        kitchen.cook(recipe, repr(recipe))

    cook()
    kitchen.finish()
    assert kitchen.done >= EXAMPLES


def while_open(files: dict[str, bytes]) -> dict[str, bytes]:
    """What Java has not done before it closes: the next segment is made ahead of time, and goes; the count in the header
    of an index file without entries is 0, and becomes 1."""
    segments = sorted(name for name in files if name.startswith("commitlog/"))
    spare = segments[-1] if len(segments) > 1 and not any(files[segments[-1]]) else None
    found = {name: data for name, data in files.items() if name != spare}
    for name, data in found.items():
        count = INDEX_HEADER.offset("entry_count")
        if name.startswith("index/") and not any(data[count : INDEX_HEADER.size]):
            found[name] = data[:count] + b"\0\0\0\1" + data[INDEX_HEADER.size :]
    return found
