"""How fast whole topics become a frame: `scan`, beside what Spark's source does without Spark.

The source's rate is that of one task: gather, decode and Spark's types, from the page cache. If Polars and DuckDB are
installed, they read the same columns of the same rows from Parquet, uncompressed and with Snappy, into memory; they use
all cores, and `scan` has one thread that decodes and one that reads ahead.

The memory is what a process adds to its own while it goes through the rows, with nothing else in it.
"""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Floors, Rounds, Settings, settle, timed, title
from benchmarks.messages import QUEUE_COUNT, TOPIC, sliced, table
from messagestore import BatchRequest, MessageColumns, MessageStore
from messagestore.format.frame_columns import FRAME_COLUMNS
from messagestore.read_only_store import CHUNK_ROWS
from messagestore.spi import LOCAL_STORES, Decoder, FrameProjection, Range

FOUR = ("topic", "queueId", "queueOffset", "body")
TEN = tuple(column.name for column in FRAME_COLUMNS if column.core)
_SOURCE_ROWS = 65_536
_GOAL = 0.8
"""Of the source's rate."""


def run(settings: Settings) -> None:
    """Measure four and ten columns."""
    title(f"scan {settings.rows:,} messages of {QUEUE_COUNT} queues")
    root, rounds = settings.folder / "scan", Rounds()
    parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(table(settings.rows), CHUNK_ROWS))
    with MessageStore.open(root) as store:
        size = store.append_batch(parts, BatchRequest(app_id="bench")).appended_bytes
    floors = Floors(settings.folder, size)

    reads: dict[str, Callable[[], int]] = {}
    for columns in (FOUR, TEN):
        name = f"scan.{len(columns)}_columns"
        reads[name] = lambda columns=columns: _scan(root, columns)  # type: ignore[misc]
        reads[f"{name}.source"] = lambda columns=columns: _source(root, columns)  # type: ignore[misc]
        for codec in ("none", "snappy"):
            path = settings.folder / f"{len(columns)}-{codec}.parquet"
            _write_parquet(root, columns, path, codec)
            for peer, read in _PEERS.items():
                if importlib.util.find_spec(peer):
                    reads[f"{name}.{peer}.parquet_{codec}"] = lambda read=read, path=path: read(path)  # type: ignore[misc]

    for number in range(settings.rounds + 1):
        into = rounds if number else Rounds()  # the first round warms up and is not counted
        for name, read in reads.items():
            settle(settings.folder, size)
            taken, count = timed(read)
            if count != settings.rows:
                raise AssertionError(f"{name}: read {count} messages, {settings.rows} are there")
            into.add_rate(name, settings.rows, taken)
        floors.add_rates(into, "scan", settings.rows)

    for name in reads:
        ours = f"scan.{name.split('.')[1]}"
        if name == ours:
            rounds.report(name, "messages/s", floor=f"{ours}.source", goal_ratio=_GOAL)
        else:
            rounds.report(name, "messages/s")
    print(f"scan.memory: {_memory(root) >> 20} MiB for {size >> 20} MiB of records")


def _write_parquet(root: Path, columns: tuple[str, ...], path: Path, codec: str) -> None:
    with (
        MessageStore.open_read_only(root) as reader,
        reader.scan(TOPIC, columns=columns) as frame,
        pq.ParquetWriter(path, frame.schema, compression=codec) as file,
    ):
        for batch in frame:
            file.write_batch(batch)


def _scan(root: Path, columns: tuple[str, ...]) -> int:
    with MessageStore.open_read_only(root) as store:
        return sum(batch.num_rows for batch in store.scan(TOPIC, columns=columns))


def _source(root: Path, columns: tuple[str, ...]) -> int:
    """What the tasks of Spark's source do, one after the other."""
    decoder, count = Decoder(FrameProjection.named(columns)), 0
    store = LOCAL_STORES.reader(str(root))
    try:
        ends = store.ends([TOPIC]).queues
        ranges = [Range(*queue, 0, end) for queue, end in sorted(ends.items())]
        for part in store.gather(ranges, max_rows=_SOURCE_ROWS):
            count += sum(batch.num_rows for found in decoder.decoded(part) for batch in decoder.rows(found))
    finally:
        store.close()
    return count


def _polars(path: Path) -> int:
    import polars

    return int(polars.read_parquet(path).height)


def _duckdb(path: Path) -> int:
    import duckdb

    found: pa.Table = duckdb.sql(f"select * from read_parquet('{path}')").to_arrow_table()
    return found.num_rows


_PEERS = {"polars": _polars, "duckdb": _duckdb}


def _memory(root: Path) -> int:
    """By how much the peak of a child's memory grows while it reads all rows, in bytes."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _scan(root, FOUR)
        os.write(write_end, b"%d" % ((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as said:
        found = int(said.read())
    os.waitpid(pid, 0)
    return found
