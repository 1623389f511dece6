"""How fast a store is backed up, beside a plain copy of as many bytes on the same disk.

The floor copies the log's bytes from the page cache to a new file and syncs it once, as `cp` and `sync` would. A backup
also computes checksums and reads back what it has written. The next backup has one percent more messages.
"""

from __future__ import annotations

import os
import shutil
import time

from benchmarks.measure import Rounds, Settings, settle, title
from benchmarks.messages import TOPIC, sliced, table
from messagestore import BatchRequest, MessageColumns, MessageStore
from messagestore.backup import back_up
from messagestore.read_only_store import CHUNK_ROWS

_GOAL = 0.7
_PIECE_SIZE = 4 << 20


def run(settings: Settings) -> None:
    """Measure the first backup, and the next one."""
    title(f"back up {settings.rows:,} messages")
    root, target, rounds = settings.folder / "store", settings.folder / "backup", Rounds()

    def append(rows: int, version: int) -> int:
        parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(table(rows), CHUNK_ROWS))
        with MessageStore.open(root) as store:
            return store.append_batch(parts, BatchRequest(app_id="bench", version=version)).end

    size = append(settings.rows, 0)
    for number in range(settings.rounds + 1):
        into = rounds if number else Rounds()  # the first round warms up and is not counted
        settle(settings.folder, size)
        into.add("backup.floor.copy", size / _copied(str(root / "commitlog" / ("0" * 20)), str(target) + ".copy", size))

        settle(settings.folder, size)
        begun_s = time.perf_counter()
        copied = back_up(str(root), str(target)).new_bytes
        first_s = time.perf_counter() - begun_s
        into.add("backup.first", copied / first_s)

        size = append(max(1, settings.rows // 100), number + 1)
        begun_s = time.perf_counter()
        more = back_up(str(root), str(target)).new_bytes
        next_s = time.perf_counter() - begun_s
        into.add("backup.next.share_of_bytes", more / copied)
        into.add("backup.next.share_of_time", next_s / first_s)
        shutil.rmtree(target)
    rounds.report("backup.floor.copy", "bytes/s")
    rounds.report("backup.first", "bytes/s", floor="backup.floor.copy", goal_ratio=_GOAL)
    rounds.report("backup.next.share_of_bytes", "of the first")
    rounds.report("backup.next.share_of_time", "of the first", lower_is_better=True)


def _copied(source: str, target: str, size: int) -> float:
    """Seconds for a copy of the first bytes of a file, synced."""
    begun_s = time.perf_counter()
    with open(source, "rb") as old, open(target, "wb") as new:
        left = size
        while left:
            piece = old.read(min(_PIECE_SIZE, left))
            new.write(piece)
            left -= len(piece)
        new.flush()
        os.fdatasync(new.fileno())
    taken_s = time.perf_counter() - begun_s
    os.unlink(target)
    return taken_s
