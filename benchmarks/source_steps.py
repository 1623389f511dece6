"""What a task of the source costs, step by step, beside a source whose rows are ready made.

The steps are those of `pyspark_messagestore.source.reading`, without Spark: gather (units, and records from the page
cache), decode, and Spark's types. The last one, send, is what Spark's worker does with the batches of any Python
source: it writes them as an Arrow stream to a socket, from which another process takes them. The JVM's part is not in
it.

CPU time is that of the thread, because it says more than the clock on a busy machine. The figures are the least of all
rounds, in which the sources take turns.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from benchmarks.measure import Settings, title
from benchmarks.messages import QUEUE_COUNT, TOPIC, table
from benchmarks.spark_floors import ReadyReader
from messagestore import MessageColumns, MessageStore
from messagestore.spi import LOCAL_STORES, Decoder, Range
from pyspark_messagestore.options.table import source_options
from pyspark_messagestore.source.reading import BATCH_ROWS, decoder_of
from pyspark_messagestore.source.schema import Projection, core_schema

STEPS = ("gather", "decode", "Spark's types", "send")


class Costs:
    """CPU seconds of each step, and the bytes that were sent."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.sent = 0

    @contextmanager
    def of(self, step: str) -> Iterator[None]:
        """Add what the block takes to a step."""
        before = time.thread_time()
        yield
        self.seconds[step] += time.thread_time() - before

    @property
    def whole(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())


def run(settings: Settings) -> None:
    """Measure four and ten columns, and the ready-made source; print a table."""
    from pyspark.sql.types import StructType

    from benchmarks.spark_streams import FOUR

    root = settings.folder / "store"
    with MessageStore.open(root) as store:
        store.append_batch(MessageColumns.from_arrow(table(settings.rows), topic=TOPIC))
        ranges = [Range(TOPIC, queue_id, 0, store.max_offset(TOPIC, queue_id)) for queue_id in range(QUEUE_COUNT)]
    core = core_schema()
    four = StructType([core[name.split()[0]] for name in FOUR.split(", ")])
    options = source_options({"path": str(root), "subscribe": TOPIC})
    sources: dict[str, Callable[[Costs], None]] = {
        "ready made": lambda costs: _ready(settings.rows, costs),
        "four columns": lambda costs: _read(root, ranges, decoder_of(options, Projection.of(four)), costs),
        "ten columns": lambda costs: _read(root, ranges, decoder_of(options, Projection.of(core)), costs),
    }
    best: dict[str, Costs] = {}
    for number in range(settings.rounds + 1):
        for name, source in sources.items():
            costs = Costs()
            source(costs)
            if number and (name not in best or costs.whole < best[name].whole):
                best[name] = costs
    title(f"CPU of the source's tasks, ns a row, {settings.rows:,} rows")
    print(markdown(best, settings.rows))
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)


def markdown(found: dict[str, Costs], rows: int) -> str:
    """The table."""
    lines = ["| step | " + " | ".join(found) + " |", "|---|" + "--:|" * len(found)]
    for step in STEPS:
        cells = [f"{1e9 * costs.seconds[step] / rows:.0f}" for costs in found.values()]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    lines.append("| all | " + " | ".join(f"{1e9 * costs.whole / rows:.0f}" for costs in found.values()) + " |")
    lines.append(
        "| bytes sent for a row | " + " | ".join(f"{costs.sent / rows:.0f}" for costs in found.values()) + " |"
    )
    return "\n".join(lines)


def _ready(rows: int, costs: Costs) -> None:
    reader = ReadyReader(rows, 1)
    [partition] = reader.partitions({"n": 0}, {"n": rows})
    batches = reader.read(partition)
    first = next(batches)
    with _sending(first.schema, costs) as send:
        send(first)
        for batch in batches:
            send(batch)


def _read(root: object, ranges: list[Range], decoder: Decoder, costs: Costs) -> None:
    store = LOCAL_STORES.reader(str(root))
    try:
        parts = store.gather(ranges, max_rows=BATCH_ROWS)
        schema = decoder._projection.arrow_schema
        with _sending(schema, costs) as send:
            while True:
                with costs.of("gather"):
                    part = next(parts, None)
                if part is None:
                    break

                with costs.of("decode"):
                    decoded = decoder.decoded(part)
                del part
                for found in decoded:
                    with costs.of("Spark's types"):
                        batches = list(decoder.rows(found))
                    for batch in batches:
                        send(batch)
    finally:
        store.close()


@contextmanager
def _sending(schema: pa.Schema, costs: Costs) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """A function that sends a batch as Spark's worker does; another process takes the bytes and drops them."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        buffer = bytearray(1 << 20)
        while theirs.recv_into(buffer):
            pass
        os._exit(0)
    theirs.close()
    try:
        with ours.makefile("wb", 65_536) as file, pa.ipc.new_stream(file, schema) as stream:

            def send(batch: pa.RecordBatch) -> None:
                with costs.of("send"):
                    stream.write_batch(batch)
                costs.sent += batch.nbytes

            yield send
    finally:
        ours.close()
        os.waitpid(pid, 0)
