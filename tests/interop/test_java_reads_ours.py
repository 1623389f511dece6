"""What we wrote, read by Java: every field, every key, every time; its open and close change no byte; then it appends, and
we read on, and append."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interop import recipes
from interop.compare import check_all, check_keys, check_messages
from interop.java_build import OLDER
from interop.java_store import ANSWER_S, Driver, JavaStore, java_config, single
from interop.recipes import Recipe
from interop.share import SHARE, part
from interop.test_retention import expire
from interop.trees import difference, tree
from messagestore import BatchRequest, Message, MessageColumns, MessageStore, StoreConfig

SEEDS = 400
PARTS = 4
"""How many tests share the seeds, so that several processes run them."""
EXAMPLES = 20
GROUP = 100
"""Stores that Java closes at once: each takes three seconds."""


@dataclass
class Cooked:
    root: Path
    recipe: Recipe
    rng: Random
    name: str
    before: dict[str, bytes]
    expired: bool


def cook(root: Path, recipe: Recipe, rng: Random) -> None:
    """The recipe, and Spark batches between its steps: BATCH records, for several queues at once."""
    with MessageStore.open(root, recipe.config) as store:
        half = len(recipe.steps) // 2
        recipes.put_ours(store, Recipe(recipe.config, recipe.steps[:half]))
        for version in range(rng.choice([0, 0, 1, 3])):
            append_batch(store, rng, version)
        recipes.put_ours(store, Recipe(recipe.config, recipe.steps[half:]))


def append_batch(store: MessageStore, rng: Random, version: int) -> None:
    """One batch of a Spark query, of one message to about a hundred."""
    count = rng.choice([0, 1, 7, 100])
    table = pa.record_batch(
        {
            "topic": pa.array([rng.choice(["spark-a", "spark-b"]) for _ in range(count)], pa.string()),
            "queue_id": pa.array([rng.randint(0, 2) for _ in range(count)], pa.int32()),
            "body": pa.array([recipes.body(rng, 200) for _ in range(count)], pa.binary()),
            "tags": pa.array([rng.choice(recipes.TAGS) for _ in range(count)], pa.string()),
            "keys": pa.array([[f"b{version}-{i}"] for i in range(count)], pa.list_(pa.string())),
        }
    )
    with recipes.our_clock() as now:
        now[0] = recipes.T0_MS
        store.append_batch(MessageColumns.from_arrow(table), BatchRequest(app_id="app", version=version))


class Round:
    """Stores that go through Java's hands together."""

    def __init__(self, java: Driver, root: Path) -> None:
        self.java = java
        self.root = root
        self.numbers = itertools.count()
        self.expired = 0
        self.done = 0
        """Stores that went all the way."""
        self.cooked: list[tuple[Cooked, Future[bool]]] = []

    def add(self, recipe: Recipe, rng: Random, name: str, share_expired: float = 0) -> None:
        """Java opens what we wrote, or what retention has left of it, reads it, and begins to close."""
        root = self.root / f"store-{next(self.numbers)}"
        cook(root, recipe, rng)
        segments = int(len(list((root / "commitlog").iterdir())) * share_expired)
        if segments:
            expire(root, segments, queue_files=True)
            self.expired += 1
        cooked = Cooked(root, recipe, rng, name, tree(root), segments > 0)
        java = JavaStore(self.java, root, java_config(recipe.config)).open()
        try:
            with MessageStore.open_read_only(root) as store:
                check_all(store, java, recipe, expired=cooked.expired)
        finally:
            self.cooked.append((cooked, java.closing()))
        if len(self.cooked) >= GROUP:
            self.finish()

    def finish(self) -> None:
        """No byte has changed; Java appends, we read on and append, Java reads that."""
        cooked, self.cooked = self.cooked, []
        for _, closed in cooked:
            closed.result(ANSWER_S)
        appended = [(each, self.append(each)) for each, _ in cooked]
        for each, closed in appended:
            closed.result(ANSWER_S)
            self.go_on(each)
            shutil.rmtree(each.root)
            self.done += 1
        self.java.call("gc")

    def append(self, each: Cooked) -> Future[bool]:
        different = difference(each.before, tree(each.root))
        assert not different, f"{each.name}: opened and closed by Java: {different}"
        java = JavaStore(self.java, each.root, java_config(each.recipe.config)).open()
        try:
            topics = list(each.recipe.keys_by_topic())
            steps = recipes.more_steps(each.rng, each.recipe, topics, each.rng.randint(1, 4), recipes.T0_MS + 10**8)
            recipes.put_java(java, Recipe(each.recipe.config, steps))
            with MessageStore.open_read_only(each.root) as store:
                check_all(store, java, Recipe(each.recipe.config, (*each.recipe.steps, *steps)), expired=each.expired)
        finally:
            closing = java.closing()
        return closing

    def go_on(self, each: Cooked) -> None:
        """After Java has appended and closed, a put of ours goes behind everything."""
        with MessageStore.open(each.root, each.recipe.config) as store:
            before = {topic: store.max_offset(topic, 0) for topic in store.topics()}
            for topic in each.recipe.keys_by_topic():
                put = store.put_message(Message(topic, b"ours again", queue_id=0, keys=["again"]))
                assert put.queue_offset == before.get(topic, 0), each.name
                assert [message.body for message in store.query_message(topic, "again")] == [b"ours again"], each.name


@pytest.mark.parametrize("first", range(PARTS))
def test_random_stores_are_read_by_java(java: Driver, root: Path, first: int) -> None:
    """Thousands of messages in hundreds of stores: all shapes of messages, roll-over at every alignment, Spark batches."""
    going = Round(java, root)
    seeds = part(range(first, SEEDS, PARTS))
    for seed in seeds:
        rng = Random(seed + 10_000)
        going.add(recipes.recipe(rng), rng, f"seed {seed + 10_000}")
    going.finish()
    assert going.done == len(seeds) >= SEEDS // PARTS // SHARE


def test_random_stores_are_read_by_an_older_java(drivers: Callable[[str], Driver], root: Path) -> None:
    """RocketMQ 5.1 reads them, too."""
    going = Round(drivers(OLDER), root)
    seeds = part(range(SEEDS // 4))
    for seed in seeds:
        rng = Random(seed + 20_000)
        recipe = recipes.recipe(rng)
        going.add(
            Recipe(recipe.config.replace(enabled_append_prop_crc=False), recipe.steps), rng, f"seed {seed + 20_000}"
        )
    going.finish()
    assert going.done == len(seeds) >= SEEDS // 4 // SHARE


def test_random_stores_without_their_first_segments_are_read_by_java(java: Driver, root: Path) -> None:
    """Retention has deleted a part of the log, or all but its last segment, and queue files with it: queues begin above 0,
    amid a batch of Spark's, amid a queue file, or have nothing left."""
    going = Round(java, root)
    seeds = part(range(SEEDS // 8))
    for seed in seeds:
        rng = Random(seed + 30_000)
        recipe = recipes.recipe(rng, most_steps=30)
        small = recipe.config.replace(mapped_file_size_commit_log=rng.choice([4096, 4099, 6000]))
        going.add(Recipe(small, recipe.steps), rng, f"seed {seed + 30_000}", rng.choice([0.3, 0.6, 0.99]))
    assert going.expired > len(seeds) // 4
    going.finish()
    assert going.done == len(seeds) >= SEEDS // 8 // SHARE


def test_random_stores_are_read_by_java_and_failures_are_made_small(java: Driver, root: Path) -> None:
    """The same by Hypothesis: its seeds are others, and it shrinks."""
    going = Round(java, root)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(st.randoms(use_true_random=False))
    def add(rng: Random) -> None:
        recipe = recipes.recipe(rng, most_steps=4)
        going.add(recipe, Random(1), repr(recipe), rng.choice([0, 0.5, 0.99]))

    add()
    going.finish()
    assert going.done >= EXAMPLES


@pytest.mark.parametrize("size", [4 * 1024 * 1024, 4 * 1024 * 1024 - 1, 1 << 20])
def test_the_largest_bodies(java: Driver, root: Path, size: int) -> None:
    """4 MiB is the most that both take; segments of 16 MiB roll over under them."""
    config = StoreConfig(mapped_file_size_commit_log=16 << 20, max_hash_slot_num=64, max_index_num=400)
    bodies = [bytes([i]) * size for i in range(6)]
    with MessageStore.open(root, config) as store:
        for i, body in enumerate(bodies):
            store.put_message(Message("large", body, queue_id=i % 2, keys=[f"k{i}"]))
    before = tree(root)
    with JavaStore(java, root, java_config(config)) as theirs, MessageStore.open_read_only(root) as store:
        check_messages(store, theirs)
        check_keys(store, theirs, "large", [f"k{i}" for i in range(6)])
    assert not difference(before, tree(root))
    with JavaStore(java, root, java_config(config)) as theirs:
        (put,) = theirs.put([single("large", bytes(size), queue_id=1)])
        assert put["ok"]
        theirs.dispatched()
        with MessageStore.open_read_only(root) as store:
            check_messages(store, theirs)
