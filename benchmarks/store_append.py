"""How fast Arrow batches become visible messages.

Two ways are measured, both with SYNC_FLUSH: `MessageStore.append_batch`, and staging files like those of Spark's tasks
followed by the driver's commit. The time ends when the messages are visible; after each round, a separate reader checks
that they are.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from benchmarks.measure import Floors, Rounds, Settings, settle, timed, title
from benchmarks.messages import QUEUE_COUNT, SPARK_ROWS, TOPIC, sliced, table
from messagestore import BatchRequest, MessageColumns, MessageStore, StoreConfig
from messagestore.batches.append import append_batch
from messagestore.batches.staging import StagedChunks, StagedFile, StagingWriter
from messagestore.files.staging_files import remove
from messagestore.read_only_store import CHUNK_ROWS
from messagestore.session import attached_store
from messagestore.spi import encode

_TASKS = 2
_GOAL = 1_200_000.0
_SETTLE = 5
"""The memory that a figure uses, as a multiple of the appended part of the log.

It holds the log, the encoded batch or its staging files, and the index.
"""
_HOST = bytes(4) + (10911).to_bytes(4, "big")


def run(settings: Settings) -> None:
    """Measure figure 1."""
    title(f"append {settings.rows:,} messages until visible, SYNC_FLUSH")
    batch, rounds = table(settings.rows), Rounds()
    stores = {
        name: MessageStore.open(settings.folder / name, StoreConfig(message_index_enable=index_on))
        for name, index_on in (("append.batch.index_on", True), ("append.batch.index_off", False))
    }
    staged_roots = {
        name: (settings.folder / name, StoreConfig(message_index_enable=index_on))
        for name, index_on in (("append.staged.index_on", True), ("append.staged.index_off", False))
    }
    floors, size = None, 256 * settings.rows
    for version in range(settings.rounds + 1):  # the first round creates files and warms up
        into = rounds if version else Rounds()
        for name, store in stores.items():
            settle(settings.folder, _SETTLE * size)
            taken, size = timed(_append, store, batch, version)
            into.add_rate(name, settings.rows, taken)
            _check(settings.folder / name, (version + 1) * settings.rows)
        for name, (root, config) in staged_roots.items():
            settle(settings.folder, _SETTLE * size)
            staged, files = timed(stage, root, config, batch)
            committed, _ = timed(commit, root, config, files, version)
            into.add_rate(name, settings.rows, staged + committed)
            into.add_rate(f"{name}.stage", settings.rows, staged)
            into.add_rate(f"{name}.commit", settings.rows, committed)
            _check(root, (version + 1) * settings.rows)
        floors = floors or Floors(settings.folder, size)
        floors.add_rates(into, "append", settings.rows)
    for store in stores.values():
        store.close()
    for root, _ in staged_roots.values():
        attached_store(root).detach()
    for kind in ("memcpy", "pwrite", "fdatasync"):
        rounds.report(f"append.floor.{kind}", "messages/s")
    for name in (*stores, *staged_roots):
        goal = _GOAL if name.endswith("index_on") else None
        rounds.report(name, "messages/s", floor="append.floor.fdatasync", goal=goal)
    for name in staged_roots:
        rounds.report(f"{name}.stage", "messages/s", floor="append.floor.pwrite")
        rounds.report(f"{name}.commit", "messages/s", floor="append.floor.fdatasync")


def _append(store: MessageStore, batch: pa.RecordBatch, version: int) -> int:
    parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(batch, CHUNK_ROWS))
    return store.append_batch(parts, BatchRequest(app_id="bench", version=version)).appended_bytes


def stage(root: Path, config: StoreConfig, batch: pa.RecordBatch) -> list[StagedFile]:
    """Do the work of the tasks, one after the other: gather Spark's small batches, encode them, and write a file."""
    staging = root / "spark" / "staging"
    staging.mkdir(parents=True, exist_ok=True)
    files = []
    share = -(-batch.num_rows // _TASKS)
    for part in sliced(batch, share):
        small = sliced(part, SPARK_ROWS)
        with StagingWriter(str(staging)) as writer:
            for at in range(0, len(small), CHUNK_ROWS // SPARK_ROWS):
                gathered = pa.Table.from_batches(small[at : at + CHUNK_ROWS // SPARK_ROWS]).combine_chunks()
                columns = MessageColumns.from_arrow(gathered, topic=TOPIC)
                writer.write(encode(columns, limits=config, store_host=_HOST, born_host=_HOST))
            files.append(writer.finish())
    return files


def commit(root: Path, config: StoreConfig, files: list[StagedFile], version: int) -> None:
    """Do the work of the driver."""
    staging = str(root / "spark" / "staging")
    with attached_store(root, config).writing("benchmark") as writer:
        append_batch(writer, StagedChunks(staging, files), BatchRequest(app_id="bench", version=version))
    remove(os.path.join(staging, file.name) for file in files)


def _check(root: Path, count: int) -> None:
    """Check that another reader sees all messages."""
    with MessageStore.open_read_only(root) as reader:
        seen = sum(reader.max_offset(TOPIC, queue_id) for queue_id in range(QUEUE_COUNT))
    if seen != count:
        raise AssertionError(f"{root}: {seen} messages are visible, {count} were appended")
