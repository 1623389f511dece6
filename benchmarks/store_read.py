"""How fast stored messages become Arrow columns.

All queues are read one after the other, from the page cache, with `StoreView.read`, as Spark's tasks do.
"""

from __future__ import annotations

from benchmarks.measure import Floors, Rounds, Settings, settle, timed, title
from benchmarks.messages import QUEUE_COUNT, TOPIC, sliced, table
from messagestore import BatchRequest, MessageColumns, MessageStore
from messagestore.read import queue_records
from messagestore.read.view import StoreView
from messagestore.read_only_store import CHUNK_ROWS

FOUR = ("topic", "queue_id", "queue_offset", "body")
TEN = (*FOUR, "tags", "keys", "properties", "born_timestamp_ms", "store_timestamp_ms", "message_id")
_GOALS = {FOUR: 9_000_000.0, TEN: 4_000_000.0}


def run(settings: Settings) -> None:
    """Measure figure 2."""
    title(f"read {settings.rows:,} messages of {QUEUE_COUNT} queues")
    root, rounds = settings.folder / "read", Rounds()
    parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(table(settings.rows), CHUNK_ROWS))
    with MessageStore.open(root) as store:
        size = store.append_batch(parts, BatchRequest(app_id="bench")).appended_bytes

    floors = Floors(settings.folder, size)
    figures = {
        f"read.{len(columns)}_columns.{'crc' if verify else 'no_crc'}": (columns, verify)
        for columns in (FOUR, TEN)
        for verify in (True, False)
    }

    view = StoreView(root)
    for number in range(settings.rounds + 1):
        # The first round warms up and is not counted.
        into = rounds if number else Rounds()
        for name, (columns, verify) in figures.items():
            settle(settings.folder, size)
            taken, count = timed(_read, view, columns, verify=verify)
            if count != settings.rows:
                raise AssertionError(f"{name}: read {count} messages, {settings.rows} are there")
            into.add_rate(name, settings.rows, taken)
        into.add_rate("read.floor.pread", settings.rows, floors.pread())
        floors.add_rates(into, "read", settings.rows)
    view.close()

    for kind in ("memcpy", "pread", "pwrite", "fdatasync"):
        rounds.report(f"read.floor.{kind}", "messages/s")
    for name, (columns, verify) in figures.items():
        rounds.report(name, "messages/s", floor="read.floor.pread", goal=_GOALS[columns] if verify else None)


def _read(view: StoreView, columns: tuple[str, ...], *, verify: bool) -> int:
    view.refresh()
    count = 0
    for queue_id in range(QUEUE_COUNT):
        end = view.max_offset(TOPIC, queue_id)
        for batch in queue_records.read(view, TOPIC, queue_id, 0, end, columns, verify_body_crc=verify):
            count += batch.num_rows
    return count
