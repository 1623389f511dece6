"""What Java wrote, read by us: live, after a clean close, and after we have appended to it; every status, every time."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random

import pytest

from interop import recipes
from interop.compare import ALL_COLUMNS, check_all
from interop.java_build import OLDER
from interop.java_store import ANSWER_S, Driver, JavaStore, java_config
from interop.recipes import Recipe
from interop.share import SHARE, part
from interop.trees import difference, tree
from messagestore import Message, MessageStore
from messagestore.read_only_store import ReadOnlyStore

SEEDS = 250
PARTS = 2
"""How many tests share the seeds, so that two processes run them."""
GROUP = 100
Rows = dict[tuple[str, int], list[dict[str, object]]]


def everything(store: ReadOnlyStore) -> Rows:
    """Every row of every queue, all columns."""
    return {
        (topic, queue_id): [
            row
            for batch in store.read(topic, queue_id, store.min_offset(topic, queue_id), columns=ALL_COLUMNS)
            for row in batch.to_pylist()
        ]
        for topic, ids in store.topics().items()
        for queue_id in ids
    }


class Round:
    """Stores of Java's that are read together."""

    def __init__(self, java: Driver, root: Path) -> None:
        self.java = java
        self.root = root
        self.numbers = itertools.count()
        self.done = 0
        """Stores that went all the way."""
        self.made: list[tuple[Path, Recipe, str, Rows, Future[bool]]] = []

    def add(self, recipe: Recipe, name: str) -> None:
        """Java writes, and we read beside it."""
        root = self.root / f"store-{next(self.numbers)}"
        java = JavaStore(self.java, root, java_config(recipe.config)).open()
        found: Rows = {}
        try:
            recipes.put_java(java, recipe)
            with MessageStore.open_read_only(root, recipe.config) as store:
                check_all(store, java, recipe)
                found = everything(store)
        finally:
            self.made.append((root, recipe, name, found, java.closing()))
        if len(self.made) >= GROUP:
            self.finish()

    def finish(self) -> None:
        """Closed: we read the same; our open and close changes no byte; what we append, Java reads."""
        made, self.made = self.made, []
        for *_, closed in made:
            closed.result(ANSWER_S)
        closing = [self.append(*each[:4]) for each in made]
        for closed in closing:
            closed.result(ANSWER_S)
        for root, *_ in made:
            shutil.rmtree(root)
            self.done += 1
        self.java.call("gc")

    def append(self, root: Path, recipe: Recipe, name: str, found: Rows) -> Future[bool]:
        with MessageStore.open_read_only(root, recipe.config) as store:
            assert everything(store) == found, f"{name}: closed, it reads otherwise"
        before = tree(root)
        with MessageStore.open(root, recipe.config) as store:
            assert everything(store) == found, f"{name}: taken over, it reads otherwise"
        assert not difference(before, tree(root)), f"{name}: opened and closed by us: {difference(before, tree(root))}"
        with MessageStore.open(root, recipe.config) as store:
            for topic in recipe.keys_by_topic():
                store.put_message(Message(topic, b"ours", queue_id=0, keys=["ours"]))
        java = JavaStore(self.java, root, java_config(recipe.config)).open()
        try:
            with MessageStore.open_read_only(root, recipe.config) as store:
                check_all(store, java, recipe)
        finally:
            closing = java.closing()
        return closing


@pytest.mark.parametrize("first", range(PARTS))
def test_random_stores_of_java_are_read(java: Driver, root: Path, first: int) -> None:
    """All shapes of messages, roll-over at every alignment: as Java reads them, live and closed."""
    going = Round(java, root)
    seeds = part(range(first, SEEDS, PARTS))
    for seed in seeds:
        going.add(recipes.recipe(Random(seed + 30_000)), f"seed {seed + 30_000}")
    going.finish()
    assert going.done == len(seeds) >= SEEDS // PARTS // SHARE


def test_random_stores_of_an_older_java_are_read(drivers: Callable[[str], Driver], root: Path) -> None:
    """RocketMQ 5.1 writes properties without the last separator."""
    going = Round(drivers(OLDER), root)
    seeds = part(range(SEEDS // 4))
    for seed in seeds:
        recipe = recipes.recipe(Random(seed + 40_000))
        config = recipe.config.replace(enabled_append_prop_crc=False)
        going.add(Recipe(config, recipe.steps), f"seed {seed + 40_000}")
    going.finish()
    assert going.done == len(seeds) >= SEEDS // 4 // SHARE
