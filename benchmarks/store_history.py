"""The cost of a store's age for its writers, by the number of queues and of segments.

For queues, a store is opened after a writer that wrote to one of them was killed. For segments, a batch is committed
after a batch of another process, which is `python -m benchmarks.store_history ROOT`. The slope is the time that one
more queue, or segment, adds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from benchmarks.measure import Rounds, Settings, timed, title
from messagestore import ASYNC_FLUSH, BatchRequest, Message, MessageColumns, MessageStore, StoreConfig
from messagestore.batches.append import Chunks, append_batch
from messagestore.session import attached_store
from messagestore.spi import encode

_CONFIG = StoreConfig(
    mapped_file_size_commit_log=4096,
    mapped_file_size_consume_queue=20_000,
    max_hash_slot_num=100,
    max_index_num=1000,
    message_index_enable=False,
    flush_disk_type=ASYNC_FLUSH,
    clean_interval="1h",
    attach_timeout="1h",
)
_ROOMY = _CONFIG.replace(mapped_file_size_commit_log=1 << 26)
_BODY = bytes(3400)
"""A body of this size makes a record that fills a segment."""


def run(settings: Settings) -> None:
    """Measure figure 9."""
    title("what a store's history costs, by number of queues and segments")
    rounds = Rounds()
    queue_counts, segment_counts = ((100, 1_000), (100, 1_000)) if settings.quick else ((1_000, 16_000), (500, 16_000))
    for count in queue_counts:
        _open_after_kills(settings.folder / f"queues-{count}", count, rounds)
    for count in segment_counts:
        _commit_after_others(settings.folder / f"segments-{count}", count, rounds)
    for name, counts in (("history.queues", queue_counts), ("history.segments", segment_counts)):
        few, many = (rounds.values[f"{name}.{count}"] for count in counts)
        for count in counts:
            rounds.report(f"{name}.{count}", "ms", lower_is_better=True)
        rounds.add(f"{name}.slope", 1000 * (min(many) - min(few)) / (counts[1] - counts[0]))
        rounds.report(f"{name}.slope", "us", lower_is_better=True)


def _open_after_kills(root: Path, count: int, rounds: Rounds) -> None:
    with MessageStore.open(root, _ROOMY) as store:
        store.create_topic("many", count)
        for queue_id in range(count):
            store.put_message(Message("many", b"x", queue_id=queue_id))
    for _ in range(3):
        _killed(root)
        taken, store = timed(MessageStore.open, root, _ROOMY)
        store.close()
        rounds.add(f"history.queues.{count}", 1000 * taken.wall_s)


def _killed(root: Path) -> None:
    """Let a process put one message, and kill it."""
    pid = os.fork()
    if not pid:
        MessageStore.open(root, _ROOMY).put_message(Message("many", b"y", queue_id=0))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def _commit_after_others(root: Path, count: int, rounds: Rounds) -> None:
    with MessageStore.open(root, _CONFIG) as store:
        for _ in range(count):
            store.put_message(Message("many", _BODY, queue_id=0))

    command = [sys.executable, "-m", "benchmarks.store_history", str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        commit(root, 0)

        for version in range(1, 13, 2):
            other.stdin.write(f"{version}\n")
            other.stdin.flush()
            other.stdout.readline()
            taken, _ = timed(commit, root, version + 1)
            rounds.add(f"history.segments.{count}", 1000 * taken.wall_s)
        other.stdin.close()

    attached_store(root).detach()


def commit(root: Path, version: int) -> None:
    """Commit a batch of one message."""
    columns = MessageColumns.from_arrow(pa.record_batch({"body": pa.array([b"x"])}), topic="many", queue_id=0)
    with attached_store(root, _CONFIG).writing("a benchmark") as writer:
        host = writer.files.store_host
        chunk = encode(columns, limits=_CONFIG, store_host=host, born_host=host)
        append_batch(writer, Chunks(iter([chunk])), BatchRequest("bench", version, flush_disk_type=ASYNC_FLUSH))


if __name__ == "__main__":
    for line in sys.stdin:
        commit(Path(sys.argv[1]), int(line))
        print("done", flush=True)
