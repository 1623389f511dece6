"""The cost of one step of a stream for the driver, by the number of queues.

Ten messages arrive in one queue; the driver plans the step, and finds the next step empty. It must not touch the queues
that have not grown. The floor converts the stream offset to JSON text and back, as Spark does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable

from benchmarks.measure import Rounds, Settings, timed, title
from messagestore import MessageColumns, MessageStore, StoreConfig
from messagestore.spi import STORES
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.readers import StreamReader
from pyspark_messagestore.source.schema import Projection, core_schema

_TOPIC = "many"
_GROWTH = 10


def run(settings: Settings) -> None:
    """Measure figure 7."""
    title("one step of a stream on the driver, CPU time by number of queues")
    rounds = Rounds()
    counts = (100, 1_000) if settings.quick else (100, 1_000, 10_000)
    for count in counts:
        _steps(settings.folder / f"queues-{count}", count, settings.rounds, rounds)
    for count in counts:
        floor = f"queues.{count}.json"
        rounds.report(floor, "ms", lower_is_better=True)
        rounds.report(f"queues.{count}.step", "ms", floor=floor, lower_is_better=True)
        rounds.report(f"queues.{count}.idle", "ms", lower_is_better=True)


def _steps(root: Path, count: int, round_count: int, into: Rounds) -> None:
    everything = ReadAllAvailable()
    with MessageStore.open(root, StoreConfig(mapped_file_size_consume_queue=20 * 100)) as store:
        store.create_topic(_TOPIC, count)
        _append(store, np.arange(count, dtype=np.int32))

        options = source_options({"path": str(root), "subscribe": _TOPIC, "startingOffsets": "earliest"})
        reader = StreamReader(options, Projection.of(core_schema()), STORES)
        start = _again(reader.initialOffset())
        start = _again(reader.latestOffset(start, everything))

        for number in range(round_count + 1):
            _append(store, np.full(_GROWTH, number, np.int32))
            floor, _ = timed(_again, start)
            step, start = timed(_step, reader, start, everything)
            idle, _ = timed(reader.latestOffset, start, everything)
            if number:
                into.add(f"queues.{count}.json", 1000 * floor.cpu_s)
                into.add(f"queues.{count}.step", 1000 * step.cpu_s)
                into.add(f"queues.{count}.idle", 1000 * idle.cpu_s)
        reader.stop()


def _step(reader: StreamReader, start: dict[str, Any], everything: ReadAllAvailable) -> dict[str, Any]:
    end = _again(reader.latestOffset(start, everything))
    assert len(reader.partitions(start, end)) == 1
    assert reader.latestOffset(end, everything) == end
    return end


def _append(store: MessageStore, queue_ids: Any) -> None:
    batch = pa.record_batch({"body": [b"x" * 100] * len(queue_ids), "queue_id": pa.array(queue_ids)})
    store.append_batch(MessageColumns.from_arrow(batch, topic=_TOPIC))


def _again(offset: dict[str, Any]) -> dict[str, Any]:
    """The offset in the form in which Spark returns it."""
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found
