"""The number of syncs that a SYNC_FLUSH batch costs.

The floor is one `fdatasync` of each segment that the batch touches and one more for its head, whatever the number of
its queues.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.measure import Rounds, Settings, title
from benchmarks.messages import TOPIC, sliced, table
from messagestore import BatchRequest, MessageColumns, MessageStore
from messagestore.files.disk import Disk, File
from messagestore.read_only_store import CHUNK_ROWS

_MANY_QUEUES = 10_000


class CountingDisk(Disk):
    """The real disk; it counts the syncs of each folder."""

    def __init__(self) -> None:
        self.syncs: Counter[str] = Counter()

    def fdatasync(self, file: File) -> None:
        self.syncs[Path(file.path).parent.name] += 1
        super().fdatasync(file)

    def fsync_dir(self, path: str | Path) -> None:
        self.syncs["folders"] += 1
        super().fsync_dir(path)

    def syncfs(self, file: File) -> None:
        self.syncs["syncfs"] += 1
        super().syncfs(file)


def run(settings: Settings) -> None:
    """Measure figure 5: a store's second batch. The first one also syncs the folders of the files that it creates."""
    title("syncs of one SYNC_FLUSH batch")
    rounds = Rounds()
    for queue_count in (8, _MANY_QUEUES // 10 if settings.quick else _MANY_QUEUES):
        disk, name = CountingDisk(), f"syncs.{queue_count}_queues"
        batch = table(10 * queue_count, queue_count)

        with MessageStore.open(settings.folder / name, disk=disk) as store:
            for version in range(2):
                disk.syncs.clear()
                begin = store.writer.end.physical_offset
                parts = (MessageColumns.from_arrow(part, topic=TOPIC) for part in sliced(batch, CHUNK_ROWS))
                request = BatchRequest(app_id="bench", version=version, write_queue_nums=queue_count)
                end = store.append_batch(parts, request).end
                counts = Counter(disk.syncs)
            log = store.writer.log
            segments = (log.segment_of(end - 1) - log.segment_of(begin)) // log.segment_size + 1

        rounds.add(f"{name}.floor", segments + 1)
        folders_and_all = counts["folders"] + counts["syncfs"]
        rounds.add(f"{name}.fdatasync", counts.total() - folders_and_all)
        rounds.add(f"{name}.other", folders_and_all)
        rounds.report(f"{name}.fdatasync", "calls", floor=f"{name}.floor", goal=segments + 1, lower_is_better=True)
        rounds.report(f"{name}.other", "calls", lower_is_better=True)
