"""The time to open a store that was closed.

The goal is 20 ms, whatever the size of the store. The floor reads the store's small files: `state`, `store.json` and
similar ones.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from benchmarks.measure import Rounds, Settings, timed, title
from benchmarks.messages import TOPIC, sliced, table
from messagestore import BatchRequest, MessageColumns, MessageStore
from messagestore.read_only_store import CHUNK_ROWS

_GOAL_MS = 20.0
_MANY_QUEUES = 10_000
_SMALL_FILES = ("spark/store.json", "spark/state", "spark/journal", "checkpoint", "config/topics.json")


def run(settings: Settings) -> None:
    """Measure figure 4."""
    title("open a clean store")

    batch = table(settings.rows)
    stores = {"1_batch": 1, "4_batches": 4}
    for name, batch_count in stores.items():
        make_store(settings.folder / name, batch, batch_count)
    queue_count = _MANY_QUEUES // 10 if settings.quick else _MANY_QUEUES
    many = f"{queue_count}_queues"
    make_store(settings.folder / many, table(10 * queue_count, queue_count), 1, queue_count)

    rounds = Rounds()
    names = [*stores, many]
    for number in range(2 * settings.rounds + 1):
        # The first round warms up and is not counted.
        into = rounds if number else Rounds()
        for name in names:
            _open(settings.folder / name, name, into)

    for name in names:
        floor = f"open.{name}.floor"
        rounds.report(floor, "ms", lower_is_better=True)
        rounds.report(f"open.{name}.write", "ms", floor=floor, goal=_GOAL_MS, lower_is_better=True)
        rounds.report(f"open.{name}.read_only", "ms", floor=floor, goal=_GOAL_MS, lower_is_better=True)


def make_store(root: Path, batch: pa.RecordBatch, batch_count: int, queue_count: int = 8) -> None:
    """Create a store with `batch_count` batches, and close it."""
    with MessageStore.open(root) as store:
        for version in range(batch_count):
            parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(batch, CHUNK_ROWS))
            store.append_batch(parts, BatchRequest(app_id="bench", version=version, write_queue_nums=queue_count))


def _open(root: Path, name: str, into: Rounds) -> None:
    floor, _ = timed(lambda: [(root / path).read_bytes() for path in _SMALL_FILES])
    write, store = timed(MessageStore.open, root)
    store.close()
    read, reader = timed(MessageStore.open_read_only, root)
    reader.close()
    into.add(f"open.{name}.floor", 1000 * floor.wall_s)
    into.add(f"open.{name}.write", 1000 * write.wall_s)
    into.add(f"open.{name}.read_only", 1000 * read.wall_s)
