"""The speed at which delayed messages that are due are delivered.

A store gets 100,000 messages with a delay level, and its clock then shows the time at which all of them are due. The
time ends when the last one is in its topic; afterwards a separate reader counts that each is there once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measure import Floors, Rounds, Settings, settle, timed, title
from benchmarks.messages import QUEUE_COUNT, TOPIC, table
from messagestore import MessageColumns, MessageStore, StoreConfig
from messagestore.files.disk import Disk

_COUNT, _QUICK_COUNT = 100_000, 20_000
_GOAL = 50_000
_LEVEL = 3


class _LaterDisk(Disk):
    """A disk whose clock is ahead by as much as the benchmark wants."""

    ahead_ms = 0

    def time_ns(self) -> int:
        return super().time_ns() + self.ahead_ms * 1_000_000


def run(settings: Settings) -> None:
    """Measure figure 9."""
    count = _QUICK_COUNT if settings.quick else _COUNT
    title(f"delivery of {count:,} due messages, each once")
    rounds, floors = Rounds(), None

    delays = pa.array(np.full(count, _LEVEL, np.int32))
    columns = MessageColumns.from_arrow(table(count).append_column("delay_time_level", delays), topic=TOPIC)

    disk = _LaterDisk()
    root = settings.folder / "delivery"
    with MessageStore.open(root, disk=disk) as store:
        for number in range(settings.rounds + 1):
            # The first round warms up and is not counted.
            into = rounds if number else Rounds()
            size = store.append_batch(columns).appended_bytes
            disk.ahead_ms += StoreConfig().delays_ms[_LEVEL - 1]
            settle(settings.folder, 5 * size)
            taken, delivered = timed(_deliver, store)
            into.add_rate("delivery", delivered, taken)
            _check(root, (number + 1) * count)
            floors = floors or Floors(settings.folder, size)
            floors.add_rates(into, "delivery", count)

    for kind in ("memcpy", "pwrite", "fdatasync"):
        rounds.report(f"delivery.floor.{kind}", "messages/s")
    rounds.report("delivery", "messages/s", floor="delivery.floor.fdatasync", goal=_GOAL)


def _deliver(store: MessageStore) -> int:
    count = 0
    while (done := store.deliver_delayed()).count:
        count += done.count
    return count


def _check(root: Path, count: int) -> None:
    """Check that another reader sees each message as often as it was put."""
    with MessageStore.open_read_only(root) as reader:
        seen = sum(reader.max_offset(TOPIC, queue_id) for queue_id in range(QUEUE_COUNT))
    if seen != count:
        raise AssertionError(f"{root}: {seen} messages were delivered, {count} were put")
